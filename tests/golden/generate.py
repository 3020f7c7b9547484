"""Writes the golden files: one of each kind of file and frame, from fixed values.

They are the on-disk format as it was published; a program that reads them wrongly, or writes anything else for the
same values, has changed the format. Run this only when FORMAT_VERSION is raised, and keep the old files:

    python tests/golden/generate.py
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Raw

from topics.storage import columns
from topics.storage.config import TopicConfig
from topics.storage.control import DeleteFrame, TopicFrame, encode_delete
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import Frame, WalHeader, encode_frame, scan
from topics.storage.segment import (
    BlockEntry,
    SegmentHeader,
    encode_block,
    encode_index,
    scan_blocks,
    tag_rows,
)
from topics.storage.snapshot import (
    KeyState,
    SegmentState,
    ShardState,
    TopicState,
    encode_snapshot,
    encode_topic,
)

FOLDER = Path(__file__).parent
TOPIC_ID = 0x0123_4567_89AB_CDEF
TS = 1_748_470_000_123
SALT = 0x5EED_1234

CONFIG = TopicConfig(
    type="queue",
    ttl_ms=60_000,
    cap_records=1_000,
    cap_bytes=2**40,
    discard="reject",
    durable=True,
    durability="fsync",
    priority=-7,
    auto_priority=False,
    auto_create=False,
    idempotency_window_ms=5_000,
    dedupe_node=False,
    lease_ms=1_000,
    claim_jitter_ms=50,
    max_deliveries=3,
    dead_letter="jobs.dlq",
    leases_durable=True,
)
WAL_HEADER = WalHeader(shard=3, layout=2, file_no=41, salt=SALT, boot_id=bytes(range(16)))
SEGMENT_HEADER = SegmentHeader(topic_id=TOPIC_ID, first_seq=7, created_ms=TS, salt=SALT)

# A body with every column, and one with none.
FULL_DATA = [b'{"a": 1.50, "b":"\\u00e9"}', b"null", '"é"'.encode(), b"[1,2,\t3]"]
FULL_TAGS = ["x:1", None, 'quo"te', "é"]
FULL_NODES = [None, "n1", "n2", None]
FULL_METAS = [b'{"k": "v"}', None, b"{}", None]
FULL_BODY = columns.pack(
    FULL_DATA,
    tags=FULL_TAGS,
    nodes=FULL_NODES,
    metas=[None if meta is None else Raw(meta) for meta in FULL_METAS],
)
PLAIN_DATA = [b"1", b"[]"]
PLAIN_BODY = columns.pack(PLAIN_DATA)
ONE_NODE_BODY = columns.pack([b"0", b"1", b"2"], nodes="worker-7")

FRAMES: list[dict[str, object]] = [
    {
        "type": FrameType.TOPIC,
        "topic_id": TOPIC_ID,
        "ts": TS,
        "body": msgspec.msgpack.encode(TopicFrame("jobs", CONFIG, TS, 100_000)),
    },
    {"type": FrameType.APPEND, "topic_id": TOPIC_ID, "first_seq": 7, "count": 4, "ts": TS + 1, "body": FULL_BODY},
    {
        "type": FrameType.APPEND,
        "topic_id": TOPIC_ID,
        "first_seq": 11,
        "count": 2,
        "ts": TS + 2,
        "body": PLAIN_BODY,
        "key": "schlüssel-1".encode(),
    },
    {"type": FrameType.APPEND, "topic_id": 2**64 - 1, "first_seq": 2**63, "count": 3, "ts": 0, "body": ONE_NODE_BODY},
    {
        "type": FrameType.DELETE,
        "topic_id": TOPIC_ID,
        "ts": TS + 3,
        "body": encode_delete(DeleteFrame(before_seq=8)),
    },
    {
        "type": FrameType.DELETE,
        "topic_id": TOPIC_ID,
        "ts": TS + 3,
        "body": encode_delete(DeleteFrame(seqs=[9, 11])),
    },
    {"type": FrameType.HEAD, "topic_id": TOPIC_ID, "first_seq": 200_000, "ts": TS + 4},
    {"type": FrameType.DROP, "topic_id": TOPIC_ID, "ts": TS + 5},
]


def wal() -> bytes:
    frames = [
        encode_frame(salt=SALT, lsn=1000 + at, synced=990 + at // 2, **frame)  # type: ignore[arg-type]
        for at, frame in enumerate(FRAMES)
    ]
    return WAL_HEADER.encode() + b"".join(frames) + bytes(256)


def appends() -> list[Frame]:
    return [frame for frame in scan(wal(), salt=SALT) if frame.type == FrameType.APPEND and frame.topic_id == TOPIC_ID]


def segment() -> bytes:
    """Two blocks: one made of two batches, with a deleted record, and one as it was sent."""
    first, second = (columns.Columns(frame.body, count=frame.count, ts=frame.ts) for frame in appends())
    blocks = [
        encode_block(
            columns.coalesce([first, second]),
            salt=SALT,
            topic_id=TOPIC_ID,
            first_seq=7,
            count=6,
            first_ts=TS + 1,
            last_ts=TS + 2,
            size=first.size + second.size,
            flags=bytes([0, 0, 0xD5, 0, 0, 0]),
        ),
        encode_block(
            ONE_NODE_BODY,
            salt=SALT,
            topic_id=TOPIC_ID,
            first_seq=20,
            count=3,
            first_ts=TS + 9,
            last_ts=TS + 9,
            size=99,
            flags=None,
        ),
    ]
    return SEGMENT_HEADER.encode() + b"".join(blocks)


def blocks() -> list[tuple[BlockEntry, Frame]]:
    return scan_blocks(segment(), salt=SALT, path="golden")


def index() -> bytes:
    found = blocks()
    tags = tag_rows(
        (entry.first_seq, columns.Columns(frame.body, count=frame.count, ts=frame.ts)) for entry, frame in found
    )
    # More tags than one page takes; of which segment they are is nothing to the format.
    tags |= {f"page:{number:03d}": [number, number + 1000] for number in range(150)}
    return encode_index(topic_id=TOPIC_ID, first_seq=7, last_seq=22, blocks=[entry for entry, _ in found], tags=tags)


TOPIC = TopicState(
    id=TOPIC_ID,
    name="jobs",
    config=CONFIG,
    created_ms=TS,
    head_seq=22,
    ceiling=100_000,
    floor=8,
    evict_floor=7,
    cap_seq=5,
    ttl_seq=6,
    flushed_seq=22,
    last_ts=TS + 9,
    last_write_ts=TS + 9,
    last_read_ts=None,
    deleted_total=2,
    evicted_total=5,
    expired_total=1,
    segments=[SegmentState(7, 12, 640, True, True), SegmentState(20, 22, 320, False, False)],
    keys=[KeyState("schlüssel-1", 11, 2, TS + 2)],
    holes=[(13, 19)],
)
SHARD = ShardState(
    shard=3, layout=2, lsn=1007, clock_ms=TS + 10, clean=True, file_no=4, topics=[Raw(encode_topic(TOPIC))]
)


def snapshot() -> bytes:
    return encode_snapshot(SHARD)


FILES = {
    "v1.wal.bin": wal,
    "v1.segment.bin": segment,
    "v1.index.bin": index,
    "v1.snapshot.bin": snapshot,
}


def main() -> None:
    assert len(WAL_HEADER.encode()) == FILE_HEADER_BYTES
    for name, make in FILES.items():
        path = FOLDER / name
        path.write_bytes(make())
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
