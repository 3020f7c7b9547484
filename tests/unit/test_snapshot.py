from __future__ import annotations

import struct

import msgspec
import pytest
from msgspec import Raw

from topics.errors import CorruptData, FormatError
from topics.storage.config import TopicConfig
from topics.storage.format import FORMAT_VERSION
from topics.storage.snapshot import (
    ColdState,
    KeyState,
    SegmentState,
    ShardState,
    TopicState,
    decode_snapshot,
    decode_topic,
    encode_snapshot,
    encode_topic,
)


def topic(number: int) -> TopicState:
    return TopicState(
        id=number,
        name=f"t{number}",
        config=TopicConfig(cap_records=number),
        created_ms=1,
        head_seq=10,
        ceiling=100,
        floor=3,
        evict_floor=2,
        cap_seq=1,
        ttl_seq=0,
        flushed_seq=8,
        last_ts=9,
        last_write_ts=9,
        last_read_ts=None,
        deleted_total=1,
        evicted_total=1,
        expired_total=0,
        segments=[SegmentState(2, 8, 640, True, False)],
        keys=[KeyState("k", 8, 2, 9)],
        holes=[(3, 4)],
    )


def shard(topics: int = 2) -> ShardState:
    states = [Raw(encode_topic(topic(number))) for number in range(topics)]
    return ShardState(shard=1, layout=2, lsn=3, clock_ms=4, clean=False, file_no=5, topics=states)


def test_round_trip() -> None:
    state = decode_snapshot(encode_snapshot(shard(3)), path="s")
    assert (state.shard, state.layout, state.lsn, state.clock_ms, state.clean) == (1, 2, 3, 4, False)
    assert [decode_topic(raw) for raw in state.topics] == [topic(number) for number in range(3)]


def test_a_shard_without_topics() -> None:
    assert decode_snapshot(encode_snapshot(shard(0)), path="s").topics == []


def test_what_follows_the_payload_is_of_no_concern() -> None:
    assert decode_snapshot(encode_snapshot(shard()) + b"more", path="s") == shard()


def test_every_flipped_bit_is_found() -> None:
    raw = bytearray(encode_snapshot(shard(1)))
    unused = range(12, 16)
    for at in range(len(raw)):
        for bit in range(8):
            raw[at] ^= 1 << bit
            if at in unused:
                assert decode_snapshot(bytes(raw), path="s") == shard(1)
            else:
                with pytest.raises((CorruptData, FormatError), match="some/snap"):
                    decode_snapshot(bytes(raw), path="some/snap")
            raw[at] ^= 1 << bit


def test_every_truncation_is_found() -> None:
    raw = encode_snapshot(shard())
    for length in range(len(raw)):
        with pytest.raises(CorruptData):
            decode_snapshot(raw[:length], path="s")


def test_a_newer_snapshot_says_upgrade() -> None:
    raw = bytearray(encode_snapshot(shard()))
    struct.pack_into("<I", raw, 8, FORMAT_VERSION + 1)
    with pytest.raises(FormatError, match="upgrade"):
        decode_snapshot(bytes(raw), path="s")


def test_not_a_snapshot() -> None:
    with pytest.raises(FormatError, match="not a topics snapshot"):
        decode_snapshot(bytes(64), path="s")


def test_fields_that_a_newer_program_added_at_the_end_are_passed_over() -> None:
    """Within a version fields may be added behind the known ones."""
    state = topic(1)
    state.skipped_total, state.lost_total, state.tail, state.cold = 3, 1, [(7, 9)], [ColdState(7)]
    fields = msgspec.msgpack.decode(encode_topic(state))
    assert decode_topic(msgspec.msgpack.encode([*fields, "news"])) == state


def test_counts_that_say_nothing_are_not_written() -> None:
    state = topic(1)
    short = encode_topic(state)
    state.lost_total = 1
    assert msgspec.msgpack.decode(encode_topic(state)) == [*msgspec.msgpack.decode(short), 0, 1]
    assert decode_topic(encode_topic(state)) == state
    state.lost_total, state.tail = 0, [(7, 9)]
    assert msgspec.msgpack.decode(encode_topic(state)) == [*msgspec.msgpack.decode(short), 0, 0, [[7, 9]]]
    assert decode_topic(encode_topic(state)) == state
