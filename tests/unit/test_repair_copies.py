"""A log file that is gone, with what it knew of routers' copies: their seqs are in no other file."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from folderplay import write_manifest
from model import Record
from pipeshard import Forwarder, PipeShard, numbers

from topics import limits
from topics.cli.datadir.repair import _repair
from topics.datadir.fsck.verify import verify
from topics.datadir.log import _boot_id
from topics.datadir.repair.plan import Loss
from topics.errors import CorruptData
from topics.storage.config import TopicConfig

LARGE = [Record(b'"%s"' % (b"x" * 3_000))]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 2_000)


def build(folder: Path, *, direct: bool, saved: bool = True) -> tuple[PipeShard, list[str]]:
    """A killed shard: copies in memory, whose lines are in two log files."""
    shard = PipeShard(folder, wal_file_bytes=9_000, boot=_boot_id())
    for name in ("s", "d"):
        shard.put(name, TopicConfig())
    if direct:
        shard.append("d", numbers(90, 1))
        shard.flush("d")
    forwarder = Forwarder(shard, "s", "d")
    shard.append("s", numbers(1, 5))
    forwarder.pump()
    for _ in range(4):
        shard.append("s", LARGE)
    forwarder.pump()
    if direct:
        shard.append("d", numbers(91, 1))
    shard.flush("s")
    if saved:
        shard.checkpoint()
    shard.append("s", numbers(6, 1))
    forwarder.pump()
    paths = [file.path for file in shard.engine.wal.files]
    assert len(paths) == 2
    shard.crash()
    write_manifest(folder)
    return shard, paths


def seqs_and_tombstones(shard: PipeShard) -> tuple[list[int], list[tuple[int, int]]]:
    page = shard.diff("d", 0)
    gone = [] if page.tombstone is None else [(page.tombstone.gap_from, page.tombstone.gap_to)]
    found = sorted(shard.seqs("d"))
    for before, after in pairwise(found):
        if after > before + 1 and (tombstone := shard.diff("d", before).tombstone) is not None:
            gone.append((tombstone.gap_from, tombstone.gap_to))
    return found, gone


@pytest.mark.parametrize("direct", [False, True])
def test_a_start_misses_them(tmp_path: Path, direct: bool) -> None:
    shard, paths = build(tmp_path / "data", direct=direct)
    os.unlink(paths[0])
    with pytest.raises(CorruptData, match=r"5 of seqs .* of topic 'd' were in the log alone"):
        shard.open(boot=_boot_id())


@pytest.mark.parametrize("direct", [False, True])
def test_they_are_named_and_readers_get_a_tombstone(tmp_path: Path, direct: bool) -> None:
    folder = tmp_path / "data"
    _, paths = build(folder, direct=direct)
    assert verify(str(folder), deep=True, running=False).clean
    os.unlink(paths[0])
    found = verify(str(folder), deep=True, running=False)
    assert any("were in the log alone" in str(problem) for problem in found.problems), found.problems
    report = _repair(str(folder), str(tmp_path / "copy"), False)
    assert report.whole, report
    first = 2 if direct else 1
    assert report.lost == [Loss(topic="d", first=first, last=first + 4)]
    assert verify(str(tmp_path / "copy"), deep=True, running=False).clean
    shard = PipeShard(tmp_path / "copy", boot=_boot_id())
    Forwarder(shard, "s", "d").pump()
    seqs, tombstones = seqs_and_tombstones(shard)
    assert tombstones[0] == (first, first + 4)
    assert not set(seqs) & set(range(first, first + 5))
    assert set(shard.data("d")) >= {LARGE[0].data, b"6"}
    shard.crash()


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_there_is_not_missed(tmp_path: Path, direct: bool) -> None:
    """Also when a client, or the source, has removed copies in the meantime."""
    folder = tmp_path / "data"
    shard, _ = build(folder, direct=direct)
    shard.open(boot=_boot_id())
    shard.delete("s", before_seq=3)
    Forwarder(shard, "s", "d").pump()
    shard.checkpoint()
    shard.delete("d", before_seq=5)
    before = seqs_and_tombstones(shard)
    shard.crash()
    assert verify(str(folder), deep=True, running=False).clean
    shard.open(boot=_boot_id())
    Forwarder(shard, "s", "d").pump()
    assert seqs_and_tombstones(shard) == before
    shard.crash()


def test_where_the_originals_are_is_told_of_each_hop(tmp_path: Path) -> None:
    """s has what it wrote; d has what it wrote and what is in a segment of it, and has lost the other copies."""
    folder = tmp_path / "data"
    shard = PipeShard(folder, boot=_boot_id())
    for name in "sde":
        shard.put(name, TopicConfig())
    first, second = Forwarder(shard, "s", "d"), Forwarder(shard, "d", "e")
    shard.append("s", numbers(1, 3))
    first.pump()
    shard.flush("d")
    shard.checkpoint()
    shard.append("s", numbers(4, 2))
    first.pump()
    shard.append("d", numbers(6, 1))
    shard.append("s", numbers(7, 1))
    first.pump()
    second.pump()
    shard.crash()
    write_manifest(folder, routers=True)
    told = _repair(str(folder), str(tmp_path / "copy"), False).also_lost
    assert [line.partition(" are not made again. ")[2] for line in told if "made again. " in line] == [
        "The originals are in s",
        "The originals are in d, but for seq 4..5, 7: those were such copies themselves",
    ]


@pytest.mark.parametrize(
    ("how", "hops"),
    [
        (
            "s dropped",
            [
                "what copied into topic d; d seq 1..3 were copies in memory only and are not made again. The topic of "
                "their originals is gone",
                "They were made of such copies in d, which are lost themselves",
            ],
        ),
        (
            "d dropped",
            [
                "what copied into topic e; e seq 1..3 were copies in memory only and are not made again. The topic of "
                "their originals is gone"
            ],
        ),
        (
            "s ephemeral",
            [
                "d seq 1..3 were copies in memory only and are not made again. Their originals in s were in memory "
                "only, too",
                "They were made of such copies in d, which are lost themselves",
            ],
        ),
        (
            "d ephemeral",
            [
                "",  # readers miss nothing there
                "e seq 1..3 were copies in memory only and are not made again. Their originals in d were in memory "
                "only, too",
            ],
        ),
    ],
)
@pytest.mark.parametrize("saved", [True, False])
def test_a_hop_whose_source_can_not_tell_is_told_by_its_destination(
    tmp_path: Path, how: str, hops: list[str], saved: bool
) -> None:
    """Its readers get a tombstone there."""
    folder = tmp_path / "data"
    shard = PipeShard(folder, boot=_boot_id())
    for name in "sde":
        shard.put(name, TopicConfig(durability="ephemeral" if how == f"{name} ephemeral" else "disk"))
    first, second = Forwarder(shard, "s", "d"), Forwarder(shard, "d", "e")
    shard.append("s", numbers(1, 3))
    first.pump()
    second.pump()
    if how.endswith("dropped"):
        shard.drop(how[0])
    if saved:
        shard.checkpoint()
    shard.crash()
    write_manifest(folder, routers=True)
    told = [line for line in _repair(str(folder), str(tmp_path / "copy"), False).also_lost if "into topic" in line]
    assert len(told) == len(hops)
    for line, end in zip(told, hops, strict=True):
        assert line.endswith(end), line
