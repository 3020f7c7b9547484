"""A power cut took copies that readers have seen: the shard knows it until they are made again, or their seqs skipped,
whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model import Record
from pipeshard import Forwarder, PipeShard
from test_engine_recovery import OTHER_BOOT, PowerDisk

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.storage.config import TopicConfig
from topics.storage.snapshot import decode_topic, encode_topic

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
