"""The files of a folder as others may leave them: moved to the cold folder, not readable for us, or gone while we read;
and that looking leaves no trace."""

from __future__ import annotations

import builtins
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from folderplay import newcomer, stored_records, write_manifest
from model import Record, Shard
from onlooker import contents, named, shown

from topics import limits
from topics.datadir import files as files_module
from topics.datadir import log as log_module
from topics.datadir.files import ColdTierAway, Files
from topics.datadir.view import folder as view_module
from topics.datadir.view import shard as shard_module
from topics.datadir.view.folder import Folder
from topics.errors import CorruptData, TopicsError
from topics.storage.config import TopicConfig
from topics.storage.routers import encode_rules


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 8)
    monkeypatch.setattr(view_module, "_PAUSE_S", 0.0)


def records(count: int, size: int = 10) -> list[Record]:
    return [Record(b'"%b"' % (b"x" * size), tag=f"t{number % 3}") for number in range(count)]


def filled(folder: Path) -> Shard:
    """Two topics with sealed and open segments, and more in the log."""
    shard = Shard(folder, wal_file_bytes=5_000, segment_max_events=16)
    write_manifest(folder)
    for name in ("t", "u"):
        shard.put(name, TopicConfig(cap_bytes=3_000) if name == "u" else TopicConfig())
        for _ in range(6):
            shard.append(name, records(8))
        shard.delete(name, tag="t1")
        shard.flush(name)
        shard.append(name, records(4))
        shard.flush(name)
    shard.checkpoint()
    for name in ("t", "u"):
        shard.append(name, records(3))
        shard.append(name, records(2, size=600))
    (folder / "routers").write_bytes(encode_rules([]))
    return shard


# --- the cold folder ---------------------------------------------------------------------------------


def move(folder: Path, cold: Path, *, which: slice = slice(None), suffixes: tuple[str, ...] = (".data", ".idx")) -> int:
    """Sealed segments leave for another folder, under the same names."""
    moved = sorted(folder.glob("topics/*/*.idx"))[which]
    for index in moved:
        for suffix in suffixes:
            source = index.with_suffix(suffix)
            target = cold / source.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, target)
    return len(moved)


def everything(folder: Folder) -> dict[str, Any]:
    found = shown(folder)
    found["records"] = {topic.name: stored_records(folder, topic) for topic in folder.topics}
    return found


@pytest.mark.parametrize("how", ["manifest", "argument", "both"])
@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(1, None, 2)])
def test_segments_in_the_cold_folder(tmp_path: Path, how: str, which: slice) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    shard = filled(hot)
    expected = everything(newcomer(shard))
    assert expected["records"] == {name: shard.everything(name) for name in ("t", "u")}
    moved = move(hot, cold, which=which)
    assert moved > 0
    with pytest.raises(CorruptData, match="missing"):
        newcomer(shard)
    more: dict[str, Any] = {}
    if how == "manifest":
        write_manifest(hot, cold=str(cold))
    elif how == "argument":
        more = {"cold_dir": str(cold)}
    else:
        write_manifest(hot, cold=str(tmp_path / "elsewhere"))
        more = {"cold_dir": str(cold)}
    folder = newcomer(shard, **more)
    assert everything(folder) == expected
    tiers = [folder.files.find(batch.file)[0] for topic in folder.topics for batch in topic.batches if not batch.wal]
    assert {"cold"} <= set(tiers) <= {"hot", "cold"}
    assert sum(tier == "cold" for tier in tiers) < len(tiers), "open segments stay"


def test_a_segment_on_its_way_to_the_cold_folder(tmp_path: Path) -> None:
    """Copied already and not removed yet; or one of its two files has gone before the other."""
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    shard = filled(hot)
    write_manifest(hot, cold=str(cold))
    onlooker = newcomer(shard)
    expected = everything(onlooker)
    shutil.copytree(hot / "topics", cold / "topics")
    assert everything(newcomer(shard)) == expected
    for index in sorted(hot.glob("topics/*/*.idx")):
        index.unlink()
        assert everything(newcomer(shard)) == expected
        index.with_suffix(".data").unlink()
        assert everything(newcomer(shard)) == expected
    # Who planned before can read them where they are now.
    assert everything(onlooker) == expected
    onlooker.look(now_ms=shard.clock.now_ms())
    assert everything(onlooker) == expected


def test_a_segment_that_is_in_neither_folder(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    shard = filled(hot)
    write_manifest(hot, cold=str(cold))
    move(hot, cold)
    gone = sorted(cold.glob("topics/*/*.data"))[0]
    gone.unlink()
    with pytest.raises(CorruptData, match=gone.name):
        newcomer(shard)
    shutil.rmtree(cold)
    with pytest.raises(ColdTierAway, match=f"the cold tier {cold} of this folder is not there"):
        newcomer(shard)


def test_damage_in_the_cold_folder_is_damage(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    shard = filled(hot)
    write_manifest(hot, cold=str(cold))
    move(hot, cold)
    index = sorted(cold.glob("topics/*/*.idx"))[0]
    index.write_bytes(index.read_bytes()[:-1] if index.stat().st_size < 70 else b"rubbish")
    with pytest.raises(TopicsError, match=index.name):
        newcomer(shard)


def test_the_cold_folder_is_named_later(tmp_path: Path) -> None:
    """A manifest that changes is looked at again."""
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    shard = filled(hot)
    onlooker = newcomer(shard)
    expected = everything(onlooker)
    write_manifest(hot, cold=str(cold))
    move(hot, cold)
    onlooker.look(now_ms=shard.clock.now_ms())
    assert everything(onlooker) == expected


# --- whose files they are ----------------------------------------------------------------------------


@contextmanager
def somebody_else() -> Iterator[None]:
    """Root may read and write everything; whoever else runs the tests is somebody already."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that anybody may read and nobody may write to. Not below pytest's own, which others can't enter."""
    place = Path(tempfile.mkdtemp(prefix="topics-folder-"))
    try:
        folder = place / "data"
        filled(folder).crash()
        for path in [place, folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield folder
    finally:
        for path in [place, *place.rglob("*")]:
            if not path.is_symlink() and path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(place)


def test_who_may_only_read_can_read_everything(public: Path) -> None:
    before = contents(public)
    with somebody_else():
        with pytest.raises(PermissionError):
            (public / "topics.json").open("ab")
        with pytest.raises(PermissionError):
            (public / "wal" / "shard-00" / "new").touch()
        folder = Folder(str(public), now_ms=0)
        seen = everything(folder)
        folder.look(now_ms=0)
        assert everything(folder) == seen
        assert {name for name, topic in seen["topics"].items() if topic["count"]} == {"t", "u"}
    assert contents(public) == before


KINDS: dict[str, Callable[[Path], Path]] = {
    "the folder": lambda folder: folder,
    "manifest": lambda folder: folder / "topics.json",
    "shard folder": lambda folder: folder / "wal" / "shard-00",
    "snapshot": lambda folder: next(folder.glob("wal/shard-00/*.snap")),
    "log file": lambda folder: sorted(folder.glob("wal/shard-00/*.wal"))[-1],
    "topic folder": lambda folder: sorted(folder.glob("topics/*"))[0],
    "segment": lambda folder: sorted(folder.glob("topics/*/*.data"))[0],
    "index": lambda folder: sorted(folder.glob("topics/*/*.idx"))[0],
    "rules": lambda folder: folder / "routers",
}


@pytest.mark.parametrize("kind", KINDS)
def test_who_may_not_read_is_told_what_and_what_to_do(public: Path, kind: str) -> None:
    path = KINDS[kind](public)
    path.chmod(0)
    with somebody_else(), pytest.raises(TopicsError, match="can't read") as caught:
        everything(Folder(str(public), now_ms=0))
    assert path.name in str(caught.value)
    assert "group" in str(caught.value)


# --- files go and come while we read -----------------------------------------------------------------


class Interference:
    """Does something in between: just before the n-th file or folder is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.then: Callable[[], None] = lambda: None
        self.opened = 0
        open_segment, list_folder = Files.open, os.listdir

        def opening() -> None:
            self.opened += 1
            self.left -= 1
            if self.left == 0:
                self.then()

        def open_file(*args: Any, **more: Any) -> Any:
            opening()
            return builtins.open(*args, **more)

        def open_in_tier(files: Files, file: str) -> int:
            opening()
            return open_segment(files, file)

        def listing(path: str) -> list[str]:
            opening()
            return list_folder(path)

        class Os:
            listdir = staticmethod(listing)

            def __getattr__(self, name: str) -> Any:
                return getattr(os, name)

        for module in (files_module, log_module, shard_module, view_module):
            monkeypatch.setattr(module, "open", open_file, raising=False)
        monkeypatch.setattr(Files, "open", open_in_tier)
        monkeypatch.setattr(shard_module, "os", Os())

    def run(self, at: int, then: Callable[[], None], look: Callable[[], Folder]) -> Folder | None:
        """None: there were not so many."""
        self.left, self.then = at, then
        try:
            folder = look()
        finally:
            interfered, self.left = self.left <= 0, -1
        return folder if interfered else None


def tidies_up(shard: Shard) -> Iterator[None]:
    """Everything of a topic goes, and with it segments, log files and the snapshot."""
    shard.delete("t", before_seq=10_000)
    yield
    shard.flush("u")
    shard.checkpoint()
    yield


def moves_payloads(shard: Shard) -> Iterator[None]:
    for name in ("t", "u"):
        shard.flush(name)
    yield
    shard.checkpoint()
    yield
    shard.append("t", records(3))
    yield


def clears_the_capped_one(shard: Shard) -> Iterator[None]:
    """Its records have to be read to know which of them the cap took."""
    shard.delete("u", before_seq=10_000)
    yield
    shard.checkpoint()
    yield


def goes_on(shard: Shard) -> Iterator[None]:
    """The log grows over several files."""
    for _ in range(6):
        shard.append("u", records(3, size=500))
        yield


def drops_and_makes_again(shard: Shard) -> Iterator[None]:
    shard.drop("t")
    yield
    shard.checkpoint()
    yield
    shard.append("t", records(2))
    yield


def stops_and_starts(shard: Shard) -> Iterator[None]:
    shard.stop()
    yield
    shard.open()
    yield
    shard.append("t", records(2))
    yield


def dies_and_starts(shard: Shard) -> Iterator[None]:
    """The unused end of the log is cut off."""
    shard.restart()
    yield
    shard.delete("t", tag="t2")
    yield
    shard.checkpoint()
    yield


DOINGS = [
    tidies_up,
    moves_payloads,
    clears_the_capped_one,
    goes_on,
    drops_and_makes_again,
    stops_and_starts,
    dies_and_starts,
]


@pytest.mark.parametrize("doing", DOINGS)
@pytest.mark.parametrize("again", [False, True], ids=["newcomer", "onlooker"])
def test_what_happens_while_we_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: Callable[[Shard], Iterator[None]], again: bool
) -> None:
    """At every single opening of a file: the look ends well, with what was there at one moment."""
    interference = Interference(monkeypatch)
    at = tried = 0
    while True:
        at += 1
        folder = tmp_path / f"{at}"
        shard = filled(folder)
        now = shard.clock.now_ms() + 1_000_000
        moments = [shown(Folder(str(folder), now_ms=now), sizes=False)]
        onlooker = Folder(str(folder), now_ms=now)
        if again:  # so that a second look has something to do
            shard.append("u", records(2))
            moments = [shown(Folder(str(folder), now_ms=now), sizes=False)]

        def go_on(shard: Shard = shard, folder: Path = folder, moments: list[Any] = moments, now: int = now) -> None:
            for _ in doing(shard):
                moments.append(shown(Folder(str(folder), now_ms=now), sizes=False))

        def look(folder: Path = folder, onlooker: Folder = onlooker, now: int = now) -> Folder:
            if again:
                onlooker.look(now_ms=now)
                return onlooker
            return Folder(str(folder), now_ms=now)

        seen = interference.run(at, go_on, look)
        if seen is None:
            break
        tried += 1
        assert shown(seen, sizes=False) in moments, f"opening {at}: a state that never was"
        seen.look(now_ms=now)
        assert shown(seen, sizes=False) == moments[-1]
        if shard.is_open:
            for topic in seen.topics:
                assert stored_records(seen, topic) == shard.everything(topic.name)
        shard.crash()
        shutil.rmtree(folder)
    assert tried > (5 if again else 12)


def test_a_batch_is_read_after_its_file_went(tmp_path: Path) -> None:
    """Who planned before a file went learns that it went, and finds the records elsewhere."""
    shard = filled(tmp_path)
    folder = newcomer(shard)
    batch = [batch for batch in named(folder, "t").batches if batch.wal][-1]
    expected = folder.columns(batch).data()
    shard.flush("t")
    shard.flush("u")
    shard.checkpoint()
    shard.append("t", records(1))
    shard.restart()
    shard.checkpoint()
    with pytest.raises(FileNotFoundError) as caught:
        folder.columns(batch)
    assert batch.file in str(caught.value.filename)
    folder.look(now_ms=shard.clock.now_ms())
    (moved,) = named(folder, "t").select(batch.first, batch.first)
    assert not moved.wal
    assert folder.columns(moved).data()[batch.first - moved.first :][: batch.count] == expected


def test_other_records_than_those_that_were_planned(tmp_path: Path) -> None:
    """A good batch where another one was: the file is not the one that was looked at."""
    folder = newcomer(filled(tmp_path))
    for topic in folder.topics:
        for batch in topic.batches:
            for other in ({"first": batch.first + 1}, {"count": batch.count + 1}):
                with pytest.raises(CorruptData, match=f"{batch.file}.*offset {batch.offset}"):
                    folder.columns(msgspec.structs.replace(batch, **other))


# --- stable views ------------------------------------------------------------------------------------


def test_the_time_of_a_stable_view_is_when_it_was_made(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    write_manifest(tmp_path)
    shard.put("t", TopicConfig(ttl_ms=1_000))
    shard.append("t", records(3))
    made_ms = shard.clock.now_ms() + 500
    assert Folder(str(tmp_path)).topics[0].count == 0, "by now they have expired"
    (tmp_path / "snapshot.json").write_text(f'{{"created_ms": {made_ms}, "name": "x"}}')
    folder = Folder(str(tmp_path))
    assert (folder.topics[0].count, folder.taken_ms) == (3, made_ms)
    (tmp_path / "snapshot.json").write_text("{")
    with pytest.raises(CorruptData, match=r"snapshot\.json is damaged"):
        Folder(str(tmp_path))
