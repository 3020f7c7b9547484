"""Every file of a folder, damaged in every way, is repaired as promised (mended.py), or called beyond repair.

A few losses nobody can see, and no test asks for them: the last frame of the log with its end gone looks like a write
that a crash cut short, and a last log file that is gone has left no trace.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from figures import DAMAGES
from mended import check_word, frames_of, repair
from model import EXHAUSTIVE, SEED, seeds

pytestmark = pytest.mark.usefixtures("small_files")

Damage = tuple[str, Callable[[Path], None]]


def flipped(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def zeroed(path: Path, offset: int, length: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = bytes(len(data[offset : offset + length]))
    path.write_bytes(data)


def damages(path: Path, rng: random.Random, *, last: bool) -> Iterator[Damage]:
    used = size = len(path.read_bytes().rstrip(b"\0"))
    if last:  # its last frame without its end is a torn write, and goes without a word
        end = frames_of(path)[-1]
        size = end.offset
        for offset in range(end.offset, used - 1, 1 if EXHAUSTIVE else 7):
            yield f"byte {offset}", lambda path, at=offset: flipped(path, at)  # type: ignore[misc]
    heads = [0, 9, 33, 64, 72]
    spread = range(size) if EXHAUSTIVE else [rng.randrange(size) for _ in range(2)]
    for offset in sorted({*heads, *spread}):
        if offset < size:
            yield f"byte {offset}", lambda path, at=offset: flipped(path, at)  # type: ignore[misc]
    for _ in range(20 if EXHAUSTIVE else 1):
        at, length = rng.randrange(size), rng.randrange(1, 600)
        if not last or at + length < size:
            yield f"zeros at {at}", lambda path, at=at, length=length: zeroed(path, at, length)  # type: ignore[misc]
    if not last:
        for cut in {0, min(70, size), size // 2, size - 5}:
            yield f"cut to {cut}", lambda path, cut=cut: os.truncate(path, cut)  # type: ignore[misc]
        yield "removed", lambda path: path.unlink()


KINDS = ["topics.json", "routers", "*.snap", "*.wal", "*.data", "*.idx"]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
def test_every_kind_of_file(whole: Path, tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind if SEED is None else f"{kind}/{SEED}")
    gone = repaired = hopeless = 0
    paths = sorted(path.relative_to(whole) for path in whole.rglob(kind) if path.is_file())
    assert paths
    for name in paths:
        last = kind == "*.wal" and name == paths[-1]
        for what, damage in damages(whole / name, rng, last=last):
            mine = tmp_path / "mine"
            shutil.rmtree(mine, ignore_errors=True)
            shutil.copytree(whole, mine)
            damage(mine / name)
            DAMAGES.add()
            try:
                report = repair(mine)
                if report.hopeless:
                    hopeless += 1
                    assert all("backup" in text for text in report.hopeless), report.hopeless
                    continue
                repaired += report.repaired
                gone += check_word(whole, mine, report)
            except BaseException as exc:
                exc.add_note(f"{name}: {what}")
                raise
    assert repaired
    if kind in ("*.idx", "topics.json", "routers"):
        assert gone == 0
    elif kind != "*.snap":
        assert gone
    assert bool(hopeless) == (kind == "*.snap")


@pytest.mark.timeout(3600 if EXHAUSTIVE else 120)
def test_several_places_at_once(whole: Path, tmp_path: Path) -> None:
    names = [path.relative_to(whole) for kind in KINDS for path in sorted(whole.rglob(kind)) if path.is_file()]
    last = max(name for name in names if name.suffix == ".wal")
    repaired = 0
    for seed in seeds(12, 2_000):
        rng = random.Random(seed)
        mine = tmp_path / "mine"
        shutil.rmtree(mine, ignore_errors=True)
        shutil.copytree(whole, mine)
        done = []
        for name in rng.sample(names, rng.randrange(2, 5)):
            if name.suffix == ".snap":
                continue  # without it there is no telling
            what, damage = rng.choice(list(damages(whole / name, rng, last=name == last)))
            damage(mine / name)
            DAMAGES.add()
            done.append(f"{name}: {what}")
        try:
            report = repair(mine)
            assert not report.hopeless
            check_word(whole, mine, report)
            repaired += report.repaired
        except BaseException as exc:
            exc.add_note(f"seed {seed}: {done}")
            raise
    assert repaired
