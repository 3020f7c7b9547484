"""A shard stepped by hand, its folder backed up and restored: what came back is what was there, for a reader of the
folder and for the shard that recovers from it, under any number of shards."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folderplay import newcomer, write_manifest
from hypothesis import example, given
from hypothesis import strategies as st
from model import BOOT, QuickDisk, Record, Shard, examples
from onlooker import live_records
from test_folder_steps import CONFIGS, EPHEMERAL, STEPS, Play, Step

from topics import limits
from topics.backup import moment as moments
from topics.backup.create import create
from topics.backup.disk import BackupDisk
from topics.backup.moment import Moment
from topics.backup.repository import Repository
from topics.backup.restore import restore
from topics.backup.source import Source, sources
from topics.cli.datadir.snapshot import make as make_view
from topics.datadir import log
from topics.datadir.fsck.verify import verify
from topics.datadir.view.folder import Folder
from topics.errors import CorruptData, DiskFull, TopicsError
from topics.storage.routers import Rule, encode_rules, routers_path

OTHER_BOOT = b"another life ..."


class Elsewhere(Shard):
    """On another machine, or on this one after a restart of it."""

    def open(self, disk: QuickDisk | None = None, *, boot: bytes = OTHER_BOOT) -> None:
        super().open(disk, boot=boot)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 8)
    monkeypatch.setattr(log, "_boot_id", lambda: BOOT)  # the machine is in the life that the shard's files are of
    monkeypatch.setattr(BackupDisk, "sync", lambda self, fd: None)
    monkeypatch.setattr(BackupDisk, "sync_dir", lambda self, path: None)


def told(folder: Folder) -> dict[str, tuple[Any, ...]]:
    """All that a folder shows of its topics, wherever in it that lies."""
    return {
        topic.name: (
            topic.id,
            topic.config,
            topic.created_ms,
            topic.head_seq,
            topic.earliest_seq,
            topic.evict_floor,
            topic.cap_seq,
            topic.ttl_seq,
            topic.count,
            topic.bytes(folder.columns),
            topic.deleted_total,
            topic.evicted_total,
            topic.expired_total,
            topic.last_write_ms,
            topic.holes,
            topic.trims,
            live_records(folder, topic),
        )
        for topic in folder.topics
    }


def answered(shard: Shard) -> dict[str, tuple[Any, ...]]:
    """All that a shard tells its clients."""
    found = {}
    for name in sorted(shard.engine.topics):
        report = shard.report(name)
        shown = (report.config, report.head_seq, report.earliest_seq, report.count, report.bytes, report.last_write_ts)
        counted = (shard.topic(name).deleted_total, shard.topic(name).evicted_total, shard.topic(name).expired_total)
        found[name] = (shown, counted, shard.everything(name), list(shard.topic(name).keys))
    return found


def copied(shard: Shard, base: Path, name: str, **more: Any) -> Path:
    """Backed up and restored."""
    repository = Repository.made(str(base / "repository"))
    create(shard.settings.data_dir, repository, name)
    return back(base, name, **more)


def back(base: Path, name: str, *, shards: int | None = None) -> Path:
    target = base / f"{name}-{shards}"
    restore(Repository(str(base / "repository")), name, str(target), shards=shards)
    return target


def check_folder(target: Path, shard: Shard, expected: dict[str, tuple[Any, ...]]) -> None:
    assert told(Folder(str(target), now_ms=shard.clock.now_ms())) == expected
    verdict = verify(str(target), deep=True, running=False)
    assert verdict.clean, verdict.problems
    assert not verdict.notes  # neither a torn tail nor files that nothing names


@examples(30)
@given(steps=st.lists(STEPS, min_size=10, max_size=30), more=st.lists(STEPS, max_size=10))
@example(
    steps=[
        *(("append", "a", 12) for _ in range(4)),
        ("flush", "a"),
        ("checkpoint",),
        ("tag", "a", "x1"),
        ("checkpoint",),
        ("tag", "a", "y"),
        ("append", "b", 12),
        ("drop", "b"),
    ],
    more=[("before", "a", 30), ("checkpoint",)],
)
def test_any_steps(tmp_path_factory: pytest.TempPathFactory, steps: list[Step], more: list[Step]) -> None:
    base = tmp_path_factory.mktemp("steps")
    (base / "data").mkdir()
    here = Play(base / "data")
    for number, part in enumerate((steps, more)):
        for step in part:
            here.do(step)
        here.shard.settle()
        name = f"b{number}"
        expected = told(newcomer(here.shard))
        check_folder(copied(here.shard, base, name), here.shard, expected)
        check_folder(back(base, name, shards=3), here.shard, expected)
    # What was backed up first has not changed since.
    assert told(Folder(str(base / "b0-None"), now_ms=here.shard.clock.now_ms())) == told(
        Folder(str(back(base, "b0", shards=2)), now_ms=here.shard.clock.now_ms())
    )
    restored = Elsewhere(base / "b1-None", wall=here.shard.wall, wal_file_bytes=9_000, segment_max_events=20)
    here.shard.restart()
    assert answered(restored) == answered(here.shard)


def filled(folder: Path) -> Shard:
    """Sealed and open segments, deletes in them and in the log, a tail."""
    folder.mkdir()
    shard = Shard(folder, wal_file_bytes=9_000, segment_max_events=20)
    write_manifest(folder)
    for number in range(5):
        shard.append("a", [Record(b'{"n":%d}' % (number * 10 + at), f"t{at}") for at in range(10)])
    shard.append("b", [Record(b"1"), Record(b"2")])
    shard.flush("a")
    shard.delete("a", tag="t3")
    shard.checkpoint()
    shard.delete("a", tag="t4")
    shard.append("a", [Record(b'"tail"')])
    return shard


def test_a_witness_in_the_log_is_no_trouble(tmp_path: Path) -> None:
    shard = filled(tmp_path / "data")
    expected = told(Folder(shard.settings.data_dir, now_ms=shard.clock.now_ms()))
    lsn = shard.engine.wal.written_lsn
    shard.be_quiet()
    assert shard.engine.wal.written_lsn == lsn + 2
    assert told(Folder(shard.settings.data_dir, now_ms=shard.clock.now_ms())) == expected
    name = create(shard.settings.data_dir, Repository.made(str(tmp_path / "repository")), "one").name
    seen = shard.everything("a")
    for shards in (None, 2, 3):
        check_folder(back(tmp_path, name, shards=shards), shard, expected)
    restored = Elsewhere(tmp_path / "one-None", wall=shard.wall)
    assert restored.everything("a") == seen
    shard.crash()
    assert verify(shard.settings.data_dir, deep=True, running=False).clean


def test_the_second_one_copies_what_is_new(tmp_path: Path) -> None:
    shard = filled(tmp_path / "data")
    repository = Repository.made(str(tmp_path / "repository"))
    first = create(shard.settings.data_dir, repository, "one")
    assert first.copied_bytes == first.total_bytes
    again = create(shard.settings.data_dir, repository, "two")
    assert again.copied_bytes == 0
    assert again.total_bytes == first.total_bytes

    segments = {entry.object for entry in repository.load("one").entries if entry.file.endswith(".data")}
    assert len(segments) == 3
    shard.delete("a", tag="t5")
    shard.checkpoint()  # flags change in every segment
    third = create(shard.settings.data_dir, repository, "three")
    kept = {entry.object: entry.flags for entry in repository.load("three").entries if entry.file.endswith(".data")}
    assert set(kept) == segments
    assert all(kept.values())
    assert third.copied_bytes < 3_000


def test_content_that_was_lost_is_copied_again(tmp_path: Path) -> None:
    shard = filled(tmp_path / "data")
    repository = Repository.made(str(tmp_path / "repository"))
    create(shard.settings.data_dir, repository, "one")
    entry = next(entry for entry in repository.load("one").entries if entry.file.endswith(".data"))
    Path(repository.object_path(entry.object)).unlink()
    again = create(shard.settings.data_dir, repository, "two")
    assert again.copied_bytes == entry.bytes
    check_folder(back(tmp_path, "one"), shard, told(newcomer(shard)))


def test_what_was_copied_before_a_break_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = filled(tmp_path / "data")
    repository = Repository.made(str(tmp_path / "repository"))
    put = repository.put
    puts: list[Any] = []

    def counted(pieces: Any) -> Any:
        if len(puts) == 5:
            raise KeyboardInterrupt
        found = put(pieces)
        puts.append(found)
        return found

    monkeypatch.setattr(repository, "put", counted)
    monkeypatch.setattr("topics.backup.create._THREADS", 1)
    with pytest.raises(KeyboardInterrupt):
        create(shard.settings.data_dir, repository, "one")
    done = repository.part("one")[1]
    assert len(done) == 5
    puts.clear()

    def resumed(pieces: Any) -> Any:
        puts.append(None)
        return put(pieces)

    monkeypatch.setattr(repository, "put", resumed)
    made = create(shard.settings.data_dir, repository, "one")
    anew = sum(1 for each in done if not each.identity)  # a snapshot and flags: nobody can tell without reading them
    assert len(puts) == len(repository.load("one").entries) + 3 - len(done) + anew
    assert made.copied_bytes == made.total_bytes


# --- one moment ----------------------------------------------------------------------------------------


class Clock:
    """Takes the place of the time module: something happens at the very moment at which the time is taken."""

    def __init__(self, *happenings: Callable[[], int]) -> None:
        self._happenings = list(happenings)
        self.asked = 0

    def time_ns(self) -> int:
        self.asked += 1
        happens = self._happenings.pop(0) if self._happenings else lambda: 2_000_000_000_000
        return happens() * 1_000_000


def values(target: Path, name: str) -> list[bytes]:
    folder = Folder(str(target))
    (topic,) = (topic for topic in folder.topics if topic.name == name)
    return [seen.data for seen in live_records(folder, topic)]


@pytest.fixture
def happens(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    def set_clock(*happenings: Callable[[], int]) -> Clock:
        clock = Clock(*happenings)
        monkeypatch.setattr(moments, "time", clock)
        return clock

    return set_clock


def test_nothing_later_than_the_moment_is_in_it(tmp_path: Path, happens: Callable[..., Clock]) -> None:
    shard = filled(tmp_path / "data")
    shard.wall.pass_ms(1_000)

    def meanwhile() -> int:
        shard.append("b", [Record(b'"just in time"')])
        at_ms = shard.clock.now_ms()
        shard.wall.pass_ms(1)
        for number in range(40):  # enough that the log goes on in another file
            shard.append("b", [Record(b'"late %d%s"' % (number, b"x" * 400))])
        return at_ms

    happens(meanwhile)
    target = copied(shard, tmp_path, "one")
    assert values(target, "b") == [b"1", b"2", b'"just in time"']
    assert verify(str(target), deep=True, running=False).clean
    assert len(values(copied(shard, tmp_path, "two"), "b")) == 43


def test_a_clock_that_was_set_back_hides_nothing(tmp_path: Path, happens: Callable[..., Clock]) -> None:
    shard = filled(tmp_path / "data")
    happens(lambda: 1_000)
    assert values(copied(shard, tmp_path, "one"), "b") == [b"1", b"2"]


def test_a_snapshot_meanwhile_means_another_look(tmp_path: Path, happens: Callable[..., Clock]) -> None:
    shard = filled(tmp_path / "data")

    def meanwhile() -> int:
        shard.delete("a", tag="t6")
        shard.flush("a")
        shard.checkpoint()
        return shard.clock.now_ms()

    clock = happens(meanwhile)
    expected = copied(shard, tmp_path, "one")
    assert clock.asked == 2
    assert told(Folder(str(expected))) == told(Folder(shard.settings.data_dir))


def test_flags_that_are_set_meanwhile_are_of_later(tmp_path: Path, happens: Callable[..., Clock]) -> None:
    """The delete is cut off, so its flags must not be there; although they are on the disk when segments are copied."""
    shard = filled(tmp_path / "data")
    shard.wall.pass_ms(10)
    expected = told(newcomer(shard))

    def meanwhile() -> int:
        at_ms = shard.clock.now_ms()
        shard.wall.pass_ms(1)
        shard.delete("a", tag="t7")
        for topic in shard.engine.topics.values():  # a checkpoint that has got as far as its flags
            for segment in topic.segments:
                segment.write_flags(segment.take_dirty())
        return at_ms

    happens(meanwhile)
    check_folder(copied(shard, tmp_path, "one"), shard, expected)


def test_a_topic_that_is_dropped_meanwhile_is_still_whole(tmp_path: Path, happens: Callable[..., Clock]) -> None:
    shard = filled(tmp_path / "data")
    shard.wall.pass_ms(10)
    expected = told(newcomer(shard))

    def meanwhile() -> int:
        at_ms = shard.clock.now_ms()
        shard.wall.pass_ms(1)
        shard.drop("a")
        return at_ms

    happens(meanwhile)
    check_folder(copied(shard, tmp_path, "one"), shard, expected)
    happens()
    check_folder(copied(shard, tmp_path, "two"), shard, told(newcomer(shard)))


def test_a_stable_view_keeps_what_its_snapshot_names_too(tmp_path: Path) -> None:
    """`topics snapshot` of a folder whose log drops a topic with segments."""
    shard = filled(tmp_path / "data")
    shard.drop("a")
    make_view(shard.settings.data_dir, str(tmp_path / "views"), "one")
    assert told(Folder(str(tmp_path / "views" / "one"))) == told(newcomer(shard))


def test_routers_that_change_meanwhile_mean_another_look(tmp_path: Path, happens: Callable[..., Clock]) -> None:
    shard = filled(tmp_path / "data")
    path = Path(routers_path(shard.settings.data_dir))
    rules = [Rule("r", "a", "b", shard.topic("a").id, shard.topic("b").id, 0, 1)]

    def meanwhile() -> int:
        path.write_bytes(encode_rules(rules))
        return shard.clock.now_ms()

    clock = happens(meanwhile)
    target = copied(shard, tmp_path, "one")
    assert clock.asked == 2
    assert Folder(str(target)).rules == rules


def test_a_segment_that_goes_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has dropped its topic: another moment, without it."""
    shard = filled(tmp_path / "data")
    rounds: list[Any] = []

    def listed(moment: Moment) -> list[Source]:
        found = sources(moment)
        if not rounds:
            shard.drop("a")
            shard.checkpoint()
        rounds.append(len(found))
        return found

    monkeypatch.setattr("topics.backup.create.sources", listed)
    create(shard.settings.data_dir, Repository.made(str(tmp_path / "repository")), "one")
    assert len(rounds) == 2
    check_folder(back(tmp_path, "one"), shard, told(newcomer(shard)))
    assert {topic.name for topic in Folder(str(tmp_path / "one-None")).topics} == {"b"}


# --- damage --------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "offset", "says", "begun"),
    [
        ("*/*/*.data", 150, "no good block", ["one"]),  # that shows when it is copied
        ("*/*/*.idx", 70, "index checksum fails", []),
        ("*/*/*.snap", 40, "snapshot checksum fails", []),
        ("*/*/*.wal", 80, "damaged at offset 64", []),
    ],
)
def test_what_is_damaged_is_not_backed_up(tmp_path: Path, kind: str, offset: int, says: str, begun: list[str]) -> None:
    shard = filled(tmp_path / "data")
    shard.crash()
    flip(sorted((tmp_path / "data").glob(kind))[0], offset)
    repository = Repository.made(str(tmp_path / "repository"))
    with pytest.raises(CorruptData, match=says):
        create(shard.settings.data_dir, repository, "one")
    assert repository.names() == []
    assert repository.unfinished() == begun


@pytest.mark.parametrize("kind", ["*/*/*.data", "*/*/*.idx"])
def test_what_is_missing_is_named(tmp_path: Path, kind: str) -> None:
    shard = filled(tmp_path / "data")
    shard.crash()
    gone = sorted((tmp_path / "data").glob(kind))[0]
    gone.unlink()
    with pytest.raises(CorruptData, match=rf"{gone.name}.*is missing"):
        create(shard.settings.data_dir, Repository.made(str(tmp_path / "repository")), "one")


def test_a_torn_tail_is_no_damage(tmp_path: Path) -> None:
    shard = filled(tmp_path / "data")
    shard.crash()
    expected = told(newcomer(shard))
    wal = sorted((tmp_path / "data").glob("*/*/*.wal"))[-1]
    end = Folder(shard.settings.data_dir).shards[0].wals[-1].end
    data = bytearray(wal.read_bytes())
    data[end : end + 30] = b"\x17" * 30
    wal.write_bytes(data)
    check_folder(copied(shard, tmp_path, "one"), shard, expected)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    shard = filled(tmp_path / "data")
    (tmp_path / "data" / "topics.json").write_text('{"format":9,"layout":1,"shards":1}')
    with pytest.raises(TopicsError, match="format 9"):
        create(shard.settings.data_dir, Repository.made(str(tmp_path / "repository")), "one")


def test_what_was_in_memory_only_is_lost_as_in_a_crash(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    here = Play(tmp_path / "data")
    for step in [("put", "a", EPHEMERAL), ("append", "a", 9), ("put", "b", CONFIGS[0]), ("append", "b", 3)]:
        here.do(step)
    restored = Shard(copied(here.shard, tmp_path, "one"), wall=here.shard.wall)
    here.shard.restart()
    assert answered(restored) == answered(here.shard)
    assert restored.everything("a") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_it_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    shard = filled(tmp_path / "data")
    place = tmp_path / "repository"
    write, written = os.pwrite, []

    def full(fd: int, data: bytes, offset: int) -> int:
        written.append(fd)
        if len(written) > 12:
            raise OSError(code, os.strerror(code))
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFull, match=rf"{place}/.*make room"):
            create(shard.settings.data_dir, Repository.made(str(place)), "one")
    assert not list(place.glob("objects/*.tmp"))
    check_folder(copied(shard, tmp_path, "one"), shard, told(newcomer(shard)))
