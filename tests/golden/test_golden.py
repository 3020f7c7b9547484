"""The format on disk is a promise: the same values give the same bytes, and old bytes give the same values."""

from __future__ import annotations

import struct

import generate
import msgspec
import pytest
from generate import CONFIG, FOLDER, SALT, TOPIC_ID, TS
from xxhash import xxh3_64_intdigest

from topics.storage.columns import Columns
from topics.storage.control import DeleteFrame, TopicFrame
from topics.storage.format import FORMAT_VERSION, FrameType
from topics.storage.frames import decode_wal_header, scan
from topics.storage.segment import decode_index, decode_segment_header, decode_tag_page, index_head_bytes, scan_blocks
from topics.storage.snapshot import decode_snapshot, decode_topic


def golden(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", generate.FILES)
def test_the_same_values_give_the_same_bytes(name: str) -> None:
    assert generate.FILES[name]() == golden(name), (
        f"{name}: the bytes on disk changed. If that is on purpose: raise FORMAT_VERSION, keep this file, read both"
    )


def test_every_golden_file_is_of_this_version_or_older() -> None:
    files = sorted(FOLDER.glob("*.bin"))
    assert files
    for path in files:
        assert int(path.name.split(".")[0].removeprefix("v")) <= FORMAT_VERSION


# --- read by the program -----------------------------------------------------------------------------


def test_wal_header() -> None:
    assert decode_wal_header(golden("v1.wal.bin")[:64], path="golden") == generate.WAL_HEADER


def test_wal_frames() -> None:
    frames = list(scan(golden("v1.wal.bin"), salt=SALT))
    assert len(frames) == len(generate.FRAMES)
    for at, (frame, given) in enumerate(zip(frames, generate.FRAMES, strict=True)):
        assert (frame.lsn, frame.synced, frame.flags) == (1000 + at, 990 + at // 2, 0)
        for name, usual in {"first_seq": 0, "count": 0, "body": b"", "key": b""}.items():
            assert getattr(frame, name) == given.get(name, usual)
        assert (frame.type, frame.topic_id, frame.ts) == (given["type"], given["topic_id"], given["ts"])
    assert frames[3].last_seq == 2**63 + 2


def test_control_frames() -> None:
    frames = list(scan(golden("v1.wal.bin"), salt=SALT))
    topic = msgspec.msgpack.decode(frames[0].body, type=TopicFrame)
    assert topic == TopicFrame("jobs", CONFIG, TS, 100_000)
    deletes = [
        msgspec.msgpack.decode(frame.body, type=DeleteFrame) for frame in frames if frame.type == FrameType.DELETE
    ]
    assert deletes == [DeleteFrame(before_seq=8), DeleteFrame(seqs=[9, 11])]


def test_batches() -> None:
    frames = [frame for frame in scan(golden("v1.wal.bin"), salt=SALT) if frame.type == FrameType.APPEND]
    full, plain, one_node = (Columns(frame.body, count=frame.count, ts=frame.ts) for frame in frames)
    assert full.data() == generate.FULL_DATA
    assert full.tags() == generate.FULL_TAGS
    assert full.nodes() == generate.FULL_NODES
    assert full.metas() == generate.FULL_METAS
    assert list(full.times()) == [TS + 1] * 4
    assert plain.data() == generate.PLAIN_DATA
    assert (plain.has_tags, plain.has_nodes, plain.has_metas) == (False, False, False)
    assert one_node.nodes() == ["worker-7"] * 3


def test_segment() -> None:
    data = golden("v1.segment.bin")
    assert decode_segment_header(data[:64], path="golden") == generate.SEGMENT_HEADER
    (first, first_frame), (second, _) = scan_blocks(data, salt=SALT, path="golden")
    assert (first.first_seq, first.last_seq, first.count, first.tagged) == (7, 12, 6, True)
    assert (first.first_ts, first.last_ts) == (TS + 1, TS + 2)
    assert data[first.flags_offset : first.flags_offset + 6] == bytes([0, 0, 0xD5, 0, 0, 0])
    columns = Columns(first_frame.body, count=6, ts=first.first_ts)
    assert columns.data() == generate.FULL_DATA + generate.PLAIN_DATA
    assert columns.tags() == [*generate.FULL_TAGS, None, None]
    assert list(columns.times()) == [TS + 1] * 4 + [TS + 2] * 2
    assert sum(columns.sizes()) == first.bytes
    assert (second.first_seq, second.count, second.tagged, second.bytes) == (20, 3, False, 99)
    assert second.end == len(data)


def test_index() -> None:
    data = golden("v1.index.bin")
    index = decode_index(data[: index_head_bytes(data[:64], path="golden")], path="golden")
    assert (index.topic_id, index.first_seq, index.last_seq) == (TOPIC_ID, 7, 22)
    assert index.blocks == [entry for entry, _ in generate.blocks()]
    assert len(index.directory) == 3
    found: dict[str, list[int]] = {}
    for offset, length in index.pages_for_prefix(""):
        found |= dict(decode_tag_page(data[offset : offset + length], path="golden"))
    assert found.pop("x:1") == [7]
    assert found.pop('quo"te') == [9]
    assert found.pop("é") == [10]
    assert found == {f"page:{number:03d}": [number, number + 1000] for number in range(150)}


def test_snapshot() -> None:
    state = decode_snapshot(golden("v1.snapshot.bin"), path="golden")
    assert state == generate.SHARD
    assert decode_topic(state.topics[0]) == generate.TOPIC


# --- read by hand, as docs/FORMAT.md would have it: no code of ours but the checksum --------------------


def u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def test_wal_header_by_hand() -> None:
    data = golden("v1.wal.bin")
    assert data[:8] == b"TOPICWAL"
    assert (u32(data, 8), u32(data, 12), u64(data, 16), u64(data, 24)) == (1, 3, 2, 41)
    assert (u32(data, 32), u32(data, 36), data[40:56]) == (SALT, 0, bytes(range(16)))
    assert u64(data, 56) == xxh3_64_intdigest(data[:56])


def test_frames_by_hand() -> None:
    data = golden("v1.wal.bin")
    at = 64
    for number, given in enumerate(generate.FRAMES):
        body, key = given.get("body", b""), given.get("key", b"")
        assert isinstance(body, bytes)
        assert isinstance(key, bytes)
        assert at % 8 == 0
        assert u32(data, at) == SALT
        assert u32(data, at + 4) == len(body)
        assert (data[at + 8], data[at + 9]) == (given["type"], 0)
        assert struct.unpack_from("<H", data, at + 10)[0] == len(key)
        assert u32(data, at + 12) == given.get("count", 0)
        assert u64(data, at + 16) == given["topic_id"]
        assert u64(data, at + 24) == given.get("first_seq", 0)
        assert u64(data, at + 32) == given["ts"]
        assert (u64(data, at + 40), u64(data, at + 48)) == (1000 + number, 990 + number // 2)
        assert data[at + 56 : at + 56 + len(key)] == key
        assert data[at + 56 + len(key) :].startswith(body)
        end = at + (56 + len(key) + len(body) + 7) // 8 * 8
        assert not any(data[at + 56 + len(key) + len(body) : end])
        assert u64(data, end) == xxh3_64_intdigest(data[at:end])
        at = end + 8
    assert not any(data[at:])


def test_batch_body_by_hand() -> None:
    body = generate.FULL_BODY
    lengths = struct.unpack_from("<4I", body)
    assert lengths[0] == 0
    at = 16
    parts = []
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    assert parts[1] == '["x:1",null,"quo\\"te","é"]'.encode()
    assert parts[2] == b'[null,"n1","n2",null]'
    assert parts[3] == b'[{"k": "v"},null,{},null]'
    assert body[at:].split(b"\x1e") == generate.FULL_DATA


def test_segment_by_hand() -> None:
    data = golden("v1.segment.bin")
    assert data[:8] == b"TOPICSEG"
    assert (u32(data, 8), u64(data, 16), u64(data, 24), u64(data, 32), u32(data, 40)) == (1, TOPIC_ID, 7, TS, SALT)
    assert u64(data, 56) == xxh3_64_intdigest(data[:56])
    assert data[64 + 8] == 16
    length = (56 + u32(data, 64 + 4) + 7) // 8 * 8 + 8
    assert u64(data, 64 + length - 8) == xxh3_64_intdigest(data[64 : 64 + length - 8])
    assert data[64 + length : 64 + length + 8] == bytes([0, 0, 0xD5, 0, 0, 0, 0, 0])
    assert u32(data, 64 + length + 8) == SALT


def test_index_by_hand() -> None:
    data = golden("v1.index.bin")
    assert data[:8] == b"TOPICIDX"
    assert (u32(data, 8), u64(data, 16), u64(data, 24), u64(data, 32)) == (1, TOPIC_ID, 7, 22)
    table, directory = u64(data, 40), u64(data, 48)
    assert u64(data, 56) == xxh3_64_intdigest(data[:56] + data[64 : 64 + table + directory])
    first_tag, offset, length = msgspec.msgpack.decode(data[64 + table : 64 + table + directory])[0]
    page = data[64 + table + directory + offset :][:length]
    assert first_tag == "page:000"
    assert u64(page, length - 8) == xxh3_64_intdigest(page[:-8])
    assert msgspec.msgpack.decode(page[:-8])[0] == ["page:000", [0, 1000]]


def test_snapshot_by_hand() -> None:
    data = golden("v1.snapshot.bin")
    assert data[:8] == b"TOPICSNP"
    assert (u32(data, 8), u64(data, 16), u64(data, 24)) == (1, len(data) - 32, xxh3_64_intdigest(data[32:]))
    shard = msgspec.msgpack.decode(data[32:])
    assert shard[:6] == [3, 2, 1007, TS + 10, True, 4]
    assert shard[6][0][:2] == [TOPIC_ID, "jobs"]
