"""A power cut took copies that readers have seen: the shard knows it until they are made again, or their seqs skipped,
whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from folderplay import newcomer, write_manifest
from model import BOOT, Record
from onlooker import named
from pipeshard import Forwarder, PipeShard, numbers, rule
from test_engine_recovery import OTHER_BOOT, PowerDisk

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, DiskFull
from topics.storage.config import Durability, TopicConfig
from topics.storage.snapshot import decode_topic, encode_topic
from topics.walshard.log.commit import storage_full

SEEN = 3


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[PipeShard]:
    """Started again after the cut, and before its source was asked for anything."""
    disk = PowerDisk()
    shard = PipeShard(tmp_path, disk=disk)
    for name in ("s", "d"):
        shard.put(name, TopicConfig(durability="fsync", durable=True))
    forwarder = Forwarder(shard, "s", "d")
    forwarder.step()
    shard.append("s", [Record(b"%d" % number) for number in range(SEEN)])
    forwarder.pump()
    assert list(shard.seqs("d")) == [1, 2, 3]
    shard.crash()
    disk.cut_power(tmp_path, lambda: False)
    shard.open(disk, boot=OTHER_BOOT)
    yield shard
    shard.crash()


def kill(shard: PipeShard) -> None:
    shard.checkpoint()
    shard.restart(boot=OTHER_BOOT)


def kill_twice(shard: PipeShard) -> None:
    kill(shard)
    kill(shard)


@pytest.mark.parametrize("end", [lambda shard: None, kill, kill_twice])
def test_no_seq_that_was_seen_is_given_to_another_record(shard: PipeShard, end: Callable[[PipeShard], None]) -> None:
    """The source can't say any more what had been copied."""
    shard.delete("s", before_seq=SEEN + 1)
    end(shard)
    shard.append("s", [Record(b'"new"')])
    Forwarder(shard, "s", "d").pump()
    ((seq, data),) = shard.seqs("d").items()
    assert data == b'"new"'
    assert seq > SEEN


@pytest.mark.parametrize("end", [lambda shard: None, kill, kill_twice])
def test_the_same_copies_have_the_same_seqs(shard: PipeShard, end: Callable[[PipeShard], None]) -> None:
    end(shard)
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {1: b"0", 2: b"1", 3: b"2"}
    kill(shard)
    Forwarder(shard, "s", "d").pump()
    pipe = shard.topic("d").pipe
    assert pipe is not None
    assert not pipe.tail_lost
    assert shard.seqs("d") == {1: b"0", 2: b"1", 3: b"2"}


def test_a_router_behind_it_waits(shard: PipeShard) -> None:
    """It has copied three: a head below that would say that it has to begin anew."""
    with pytest.raises(ApiError) as refused:
        shard.answer(shard.send(Op.READ_RAW, messages.ReadRaw("d", shard.id_of("d"), SEEN, 10, 1_000, False)))
    assert refused.value.code == "shard_unavailable"
    Forwarder(shard, "s", "d").pump()
    piece, records = shard.read_raw("d", SEEN)
    assert (piece.to_seq, records) == (SEEN, [])


def test_only_who_lost_something_says_so_in_a_snapshot(shard: PipeShard) -> None:
    """Others are written as before."""
    lost = shard.topic("d").state()
    assert lost.pipe is not None
    assert lost.pipe.tail_lost
    assert decode_topic(encode_topic(lost)) == lost
    size = len(encode_topic(lost))
    lost.pipe.tail_lost = False
    assert decode_topic(encode_topic(lost)) == lost
    assert len(encode_topic(lost)) == size - 1


# --- when it ends ---


def opened_after_a_cut(shard: PipeShard, disk: PowerDisk, folder: Path, *, taken: bool) -> None:
    shard.crash()
    disk.cut_power(folder, lambda: not taken)
    shard.open(disk, boot=OTHER_BOOT)


def pair(folder: Path, disk: PowerDisk, durability: Durability = "fsync") -> tuple[PipeShard, Forwarder]:
    shard = PipeShard(folder, disk=disk)
    shard.put("s", TopicConfig(durability="fsync", durable=True))
    shard.put("d", TopicConfig(durability=durability, durable=durability == "fsync"))
    forwarder = Forwarder(shard, "s", "d")
    forwarder.step()
    shard.append("s", numbers(1, 3))
    forwarder.pump()
    return shard, forwarder


def move(shard: PipeShard) -> None:
    shard.mover.step(quiet=False)
    shard.mover.wait()


def test_more_is_to_be_copied_than_memory_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies go into segments meanwhile, and it opens before all of them are there."""
    monkeypatch.setattr(limits, "COPIES_BYTES", 2_000)
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk)
    shard.put("s2", TopicConfig())
    shard.put("d2", TopicConfig())
    Forwarder(shard, "s2", "d2").step()
    for number in range(4, 4 + 2 * limits.SEQ_RESERVE):
        shard.append("s", [Record(b'"%0100d"' % number)])
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    ceiling = shard.topic("d").ceiling
    forwarder = Forwarder(shard, "s", "d")
    for _ in range(4 * limits.SEQ_RESERVE):
        if not shard.topic("d").rebuilding:
            break
        forwarder.step(limit=1)
        move(shard)
    assert not shard.topic("d").rebuilding
    assert shard.topic("d").head_seq == ceiling < shard.topic("s").head_seq
    assert [int(data.strip(b'"')) for data in shard.data("d")] == list(range(1, ceiling + 1))
    shard.append("s2", numbers(1, 1))
    other = Forwarder(shard, "s2", "d2")
    for _ in range(9):
        other.step()
        move(shard)
    assert shard.data("d2") == [b"1"]
    shard.crash()


class Low:
    """The disk has less space than the settings ask for."""

    low = True

    def check(self) -> None:
        raise storage_full()


@pytest.mark.parametrize("how", ["low", "no log file", "lost at the source, and no log file"])
def test_without_space_it_opens_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk)
    shard.append("s", [*numbers(4, 1), Record(b"5", tag="x"), *numbers(6, 1)])
    opened_after_a_cut(shard, disk, tmp_path, taken=False)
    expected = [b"1", b"2", b"3", b"4", b"5", b"6"]
    if how == "low":
        monkeypatch.setattr(shard.engine, "space", Low())
    else:
        shard.engine.wal.room = 0  # all that is left of the file is for deletes, as at a start on a full disk
        monkeypatch.setattr(shard.engine.wal, "rotate", no_new_file)
        if how != "no log file":
            shard.delete("s", tag="x")
            expected = [b"1", b"2", b"3"]  # what follows is above the ceiling, and waits for space
    forwarder = Forwarder(shard, "s", "d")
    for _ in range(9):
        with suppress(ApiError):  # of what is new
            forwarder.step()
    assert shard.data("d") == expected
    assert shard.delete("d", before_seq=2).deleted == 1
    with pytest.raises(ApiError) as refused:
        shard.append("d", numbers(9, 1))
    assert refused.value.code == "storage_full"
    shard.crash()


def no_new_file(size: int) -> None:
    raise DiskFull("no space")


def deleted_here(shard: PipeShard, forwarder: Forwarder) -> None:
    shard.append("s", [Record(b"4", tag="x")])
    forwarder.pump()
    shard.delete("d", tag="x")


def lost_there(shard: PipeShard, forwarder: Forwarder) -> None:
    shard.forward("s", "d", [], lost=1, to_seq=4, complete=False)
    shard.append("s", numbers(4, 1))


@pytest.mark.parametrize("how", ["memory", "log"])
def test_without_space_and_memory_it_opens_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The rest comes when there is space, at seqs that nobody has seen: once, and in its order."""
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk)
    for number in range(4, 44):
        shard.append("s", [Record(b'"%0100d"' % number)])
    Forwarder(shard, "s", "d").pump()
    seen = shard.seqs("d")
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    ceiling = shard.topic("d").ceiling
    monkeypatch.setattr(shard.engine.wal, "rotate", no_new_file)
    shard.engine.wal.room = 0
    if how == "memory":
        monkeypatch.setattr(limits, "COPIES_BYTES", 2_000)
        monkeypatch.setattr(disk, "create", no_file)
    else:
        shard.engine.wal._reserve = 600
    forwarder = Forwarder(shard, "s", "d")
    for _ in range(90):
        with suppress(ApiError):
            forwarder.step(limit=1)
        move(shard)
        shard.wall.pass_ms(1_100)
    assert not shard.topic("d").rebuilding
    found = shard.seqs("d")
    assert found
    assert found.items() < seen.items()
    assert shard.delete("d", before_seq=2).deleted == 1
    monkeypatch.undo()
    shard.engine.wal._reserve = limits.WAL_RESERVE_BYTES
    shard.append("d", numbers(99, 1))
    for _ in range(90):
        forwarder.step()
        move(shard)
    del found[1]
    after = shard.seqs("d")
    assert {seq: data for seq, data in after.items() if seq < 44} == found
    assert list(after.values())[: len(found)] == list(found.values())
    assert after[ceiling + 1] == b"99"
    assert [data for data in after.values() if data != b"99"] == list(seen.values())[1:]
    shard.restart(disk, boot=OTHER_BOOT)
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == after
    shard.crash()


def no_file(path: str, *, size: int = 0) -> int:
    raise DiskFull("no space")


@pytest.mark.parametrize("last", [deleted_here, lost_there])
def test_a_cut_that_takes_nothing_skips_nothing(tmp_path: Path, last: Callable[[PipeShard, Forwarder], None]) -> None:
    """Though no row stands for the last seqs, and the rows that are filled again end before."""
    disk = PowerDisk()
    shard, forwarder = pair(tmp_path, disk)
    last(shard, forwarder)
    shard.sync()
    trims = shard.topic("d").trims
    opened_after_a_cut(shard, disk, tmp_path, taken=False)
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {1: b"1", 2: b"2", 3: b"3"}
    assert (shard.topic("d").head_seq, shard.topic("d").trims) == (4, trims)
    shard.append("s", numbers(5, 1))
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d")[5] == b"5"
    shard.crash()


def test_the_source_has_lost_what_stood_behind_the_last_copy(tmp_path: Path) -> None:
    """Readers have seen its copies, of two routers: more than the one seq that stands for a lost record."""
    disk = PowerDisk()
    shard = PipeShard(tmp_path, disk=disk)
    for name in ("s", "d"):
        shard.put(name, TopicConfig(durability="fsync", durable=True))
    rules = [rule(shard, "s", "d"), rule(shard, "s", "d", "r2")]
    forwarder = Forwarder(shard, "s", "d", rules)
    forwarder.step()
    shard.append("s", numbers(1, 1))
    forwarder.pump()
    shard.sync()
    shard.append("s", numbers(2, 1))
    forwarder.pump()
    assert shard.seqs("d") == {1: b"1", 2: b"1", 3: b"2", 4: b"2"}
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    assert shard.topic("d").head_seq == 2
    shard.put("s", TopicConfig(durability="fsync", durable=True, ttl_ms=1_000))
    shard.wall.pass_ms(2_000)
    Forwarder(shard, "s", "d", rules).pump()
    shard.append("s", numbers(3, 1))
    Forwarder(shard, "s", "d", rules).pump()
    seqs = [seq for seq, data in shard.seqs("d").items() if data == b"3"]
    assert len(seqs) == 2
    assert min(seqs) > 4
    shard.crash()


@pytest.mark.parametrize("flushed", [True, False])
def test_a_source_that_lost_more_gives_no_seq_anew(tmp_path: Path, flushed: bool) -> None:
    """Its head is below what was copied: what readers have seen behind that can't be known from it."""
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk)
    shard.forward("s", "d", [Record(b"4"), Record(b"5")], to_seq=5)  # as if it was in another shard, and had them then
    if flushed:
        shard.flush("d")
        shard.checkpoint()
    shard.sync()
    shard.forward("s", "d", [Record(b"6")], to_seq=6)
    assert shard.seqs("d")[6] == b"6"
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    shard.append("s", [Record(b'"new"')])
    forwarder.pump()
    (seq,) = [seq for seq, data in shard.seqs("d").items() if data == b'"new"']
    assert seq > 6
    assert shard.diff("d", 5).tombstone is not None
    shard.crash()


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_nobody_is_told_of_seqs_that_a_power_cut_gives_to_others(tmp_path: Path, durability: Durability) -> None:
    """Readers go on behind a loss, and would miss what got its seqs: it is told when the promise of them is synced."""
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk, durability)
    lost = 4 * limits.SEQ_RESERVE
    shard.put("s", TopicConfig(durability="fsync", durable=True, cap_records=1))
    for number in range(lost + 1):
        shard.append("s", numbers(number, 1))
    shard.sync()
    loss: dict[str, Any] = {"lost": lost, "to_seq": 3 + lost, "complete": False}
    sent = shard.send_forward("s", "d", [], **loss)
    shard.engine.commit.write()
    assert (shard.diff("d", SEEN).tombstone, shard.topic("d").head_seq) == (None, SEEN)
    shard.settle()
    assert shard.answer(sent).at == 3 + lost
    gap = shard.diff("d", SEEN).tombstone
    assert gap is not None
    assert gap.gap_to == SEEN + lost
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    Forwarder(shard, "s", "d").pump()
    assert shard.append("d", numbers(9, 1)).first_seq > gap.gap_to
    shard.crash()


def with_a_loss(shard: PipeShard, count: int) -> dict[str, Any]:
    """The source has lost so many records behind those that were copied: what a forwarder says of it."""
    shard.put("s", TopicConfig(durability="fsync", durable=True, cap_records=1))
    for number in range(count + 1):
        shard.append("s", numbers(number, 1))
    shard.sync()
    return {"lost": count, "to_seq": SEEN + count, "complete": False}


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_a_loss_is_told_however_slow_syncs_are(tmp_path: Path, durability: Durability) -> None:
    """Nothing came for a minute, and the shard takes back what quiet topics promise before the sync has come to its
    end: not what the loss waits for."""
    lost = 4 * limits.SEQ_RESERVE
    shard, _ = pair(tmp_path, PowerDisk(), durability)
    loss = with_a_loss(shard, lost)
    shard.wall.pass_ms(60_000)
    commit = shard.engine.commit
    commit.lower_ceilings(shard.clock.now_ms())
    sent = shard.send_forward("s", "d", [], **loss)
    commit.write()
    for _ in range(9):
        shard.wall.pass_ms(1_000)
        commit.lower_ceilings(shard.clock.now_ms())
    assert not shard.answered(sent)
    shard.settle()
    assert shard.answer(sent).at == SEEN + lost
    assert shard.topic("d").head_seq == SEEN + lost
    shard.crash()


@pytest.mark.parametrize("lost", [4, 4 * limits.SEQ_RESERVE])
@pytest.mark.parametrize("copies", [0, 2, 2 * limits.SEQ_RESERVE])
@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_loss_takes_its_place_behind_what_clients_write(
    tmp_path: Path, durability: Durability, copies: int, lost: int
) -> None:
    """They never leave a moment in which nothing of theirs is on its way."""
    shard, _ = pair(tmp_path, PowerDisk(), durability)
    loss = with_a_loss(shard, lost)
    head = SEEN
    for turn in range(3):
        before = shard.send_append("d", numbers(100 + turn, 1))
        at = shard.topic("d").pipe.at  # type: ignore[union-attr]
        loss["to_seq"] = at + lost + copies
        sources = {"sources": [(at + lost + 1, copies)]} if copies else {}
        sent = shard.send_forward("s", "d", numbers(7, copies), **loss, **sources)
        behind = shard.send_append("d", numbers(200 + turn, 1))
        shard.settle()
        assert shard.answer(before).first_seq == head + 1
        assert shard.answer(sent).at == loss["to_seq"]
        assert shard.answer(behind).first_seq == head + 1 + lost + copies + 1
        assert shard.topic("d").trims[-1] == (head + 2, head + 1 + lost)
        head += 1 + lost + copies + 1
        assert (shard.topic("d").head_seq, shard.topic("d").pending) == (head, 0)
    assert shard.topic("d").unaccounted == 0
    if durability != "ephemeral":
        trims = shard.topic("d").trims
        shard.restart()
        topic = shard.topic("d")
        assert (topic.head_seq, topic.trims, topic.holes, topic.unaccounted) == (head, trims, [], 0)
    shard.crash()


@pytest.mark.parametrize("published", [False, True])
def test_a_snapshot_is_made_while_a_loss_waits(tmp_path: Path, published: bool) -> None:
    """It does not have what nobody could read by then: the log has, and keeps it."""
    lost = 4 * limits.SEQ_RESERVE
    shard, _ = pair(tmp_path, PowerDisk())
    loss = with_a_loss(shard, lost)
    shard.flush("d")
    shard.flush("s")
    shard.checkpoint()
    sent = shard.send_forward("s", "d", [], **loss)
    shard.engine.commit.write()
    shard.engine.wal.rotate(0)
    shard.checkpoint()
    assert not shard.answered(sent)
    assert len(shard.engine.wal.older) == 1
    copies = shard.send_forward("s", "d", [], from_seq=SEEN + lost)
    assert shard.outcome(copies).code == "throttled"
    if published:
        shard.settle()
        assert shard.answer(sent).at == SEEN + lost
        shard.checkpoint()
        assert not shard.engine.wal.older
    shard.restart()
    topic = shard.topic("d")
    assert (topic.head_seq, topic.trims, topic.unaccounted) == (SEEN + lost, [(SEEN + 1, SEEN + lost)], 0)
    assert topic.pipe is not None
    assert topic.pipe.at == SEEN + lost
    write_manifest(tmp_path)
    view = named(newcomer(shard), "d")
    assert (view.head_seq, view.trims) == (SEEN + lost, [(SEEN + 1, SEEN + lost)])
    shard.crash()


def test_what_is_skipped_is_promised_on_the_platter(tmp_path: Path) -> None:
    """Copies that were made again have raised the ceiling since: a second power cut may take that promise."""
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk)
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    topic = shard.topic("d")
    ceiling = topic.ceiling
    more = limits.SEQ_RESERVE * 2 // 3
    Forwarder(shard, "s", "d").step(limit=2)
    cut = Event()
    sync = disk.sync
    disk.sync = lambda fd: cut.wait() and None  # type: ignore[assignment, method-assign]
    sent = shard.send_forward("s", "d", numbers(4, more), level=False)
    shard.engine.commit.write()
    assert shard.answered(sent)
    assert topic.rebuilding
    assert topic.ceiling > ceiling
    shard.send_forward("s", "d", [], to_seq=SEEN + more + 3, complete=False)
    shard.engine.commit.write()
    assert not topic.rebuilding
    cursor = shard.diff("d", topic.head_seq).next_from_seq
    disk.cut_power(tmp_path, lambda: False)
    cut.set()
    shard.crash()
    disk.sync = sync
    shard.open(disk, boot=BOOT)
    shard.delete("s", before_seq=SEEN + 1)
    Forwarder(shard, "s", "d").pump()
    assert shard.append("d", numbers(9, 1)).first_seq > cursor
    shard.crash()


# --- what could keep it ---


def test_two_topics_that_become_a_ring_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """The rules of the ring were saved, and the power went before the pipes knew."""
    disk = PowerDisk()
    shard = PipeShard(tmp_path, disk=disk)
    for name in ("a", "b"):
        shard.put(name, TopicConfig(durability="fsync", durable=True))
    there, back = Forwarder(shard, "a", "b"), Forwarder(shard, "b", "a")
    shard.append("a", numbers(1, 1))
    there.pump()
    back.step()
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    assert shard.topic("a").rebuilding
    assert shard.topic("b").rebuilding
    both = [Forwarder(shard, "a", "b", ring_hops=1), Forwarder(shard, "b", "a", ring_hops=1)]
    for _ in range(9):
        for forwarder in both:
            forwarder.step()
    assert not shard.topic("a").rebuilding
    assert not shard.topic("b").rebuilding
    shard.crash()


@pytest.mark.parametrize("running", [False, True])
def test_skipped_seqs_stay_skipped_when_the_router_goes(tmp_path: Path, running: bool) -> None:
    """They are in a snapshot before the log says that nothing is copied any more: a snapshot from before is none."""
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk)
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    ceiling = shard.topic("d").ceiling
    assert ceiling > SEEN
    if running:
        shard.mover.checkpoint()
    shard.open_pipe("s", "d", ring=True)
    assert not shard.topic("d").rebuilding
    shard.close_pipe("s", "d")
    shard.restart(disk, boot=OTHER_BOOT)
    shard.append("d", [Record(b'"new"')])
    assert shard.seqs("d") == {ceiling + 1: b'"new"'}
    shard.crash()


def test_a_kill_after_it_is_only_a_kill(tmp_path: Path) -> None:
    """The mover's next step writes down that it is over: the source may lose records again."""
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk)
    opened_after_a_cut(shard, disk, tmp_path, taken=True)
    forwarder = Forwarder(shard, "s", "d")
    forwarder.pump()
    move(shard)
    shard.append("s", [Record(b"4", tag="x"), Record(b"5")])
    shard.delete("s", tag="x")
    shard.restart(disk, boot=OTHER_BOOT)
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {1: b"1", 2: b"2", 3: b"3", 4: b"5"}
    shard.crash()


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_a_stop_while_copies_are_made_again_and_a_reboot_are_no_power_cut(
    tmp_path: Path, durability: Durability
) -> None:
    """All that was written is on the platter."""
    disk = PowerDisk()
    shard, _ = pair(tmp_path, disk, durability)
    shard.append("s", [Record(b"4", tag="x"), Record(b"5")])
    shard.restart(disk)
    assert shard.topic("d").rebuilding
    shard.stop()
    shard.open(disk, boot=OTHER_BOOT)
    shard.delete("s", tag="x")
    Forwarder(shard, "s", "d").pump()
    assert shard.seqs("d") == {1: b"1", 2: b"2", 3: b"3", 4: b"5"}
    shard.crash()
