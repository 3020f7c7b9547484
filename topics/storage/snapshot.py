"""A shard's snapshot: the metadata of its topics, without payloads.

Persisted fields stand here alone; what a running topic keeps beside them is in walshard/topic/topic.py. A snapshot
names the WAL position it covers: recovery loads it and replays what came after, and what came before as far as payloads
still lie in the WAL. It is also the list of segments that count: a file it does not name is left over and goes.
"""

from __future__ import annotations

import msgspec
from xxhash import xxh3_64_intdigest

from topics.errors import CorruptData, FormatError
from topics.storage.config import TopicConfig
from topics.storage.format import DELETED, FORMAT_VERSION, SNAPSHOT_HEADER, SNAPSHOT_MAGIC, check_version

_AS_DIGITS = bytes(ord("1") if flag == DELETED else ord("0") for flag in range(256))
_AS_SET = bytes(DELETED if flag == DELETED else 0 for flag in range(256))
_AS_FLAGS = bytes(DELETED if digit == ord("1") else 0 for digit in range(256))


class SegmentState(msgspec.Struct, array_like=True):
    first_seq: int
    last_seq: int
    data_bytes: int  # valid bytes of the .data file; more than that is a flush that did not finish
    sealed: bool
    flagged: bool  # some delete flags are set


class KeyState(msgspec.Struct, array_like=True):
    key: str
    first_seq: int
    count: int
    ts: int


class PipeState(msgspec.Struct, array_like=True):
    """How far another topic's records have been copied into this one. The copies up to here are in segments."""

    source_id: int
    at: int  # the source's seq
    forwarded: dict[str, int]  # by router: copies made, ever
    deleted: list[int] = []  # of older programs: copies that a client removed and that were in no segment
    flushed_to: int = 0  # the last seq here that is covered by `at`
    direct: int = 0  # of older programs: the last seq here that a client wrote itself
    ring: bool = False  # the two are part of a ring
    logged: bool = False  # copies above `flushed_to` are in the log by their seqs (control.CopiesLine)
    tail_lost: bool = False  # a power cut may have taken copies behind them that readers have seen; left out if not


class ColdState(msgspec.Struct, array_like=True):
    """What is deleted of a segment in the cold tier: its file there may be out of reach, or not know it yet. Flags that
    are set here or in the file are set."""

    first_seq: int  # of the segment
    rows: list[tuple[int, bytes, int]] = []  # blocks of which a part is live: first seq, pack_flags(), live bytes or 0
    dead: list[int] = []  # blocks above the floor of which nothing is live, by their first seqs


class TopicState(msgspec.Struct, array_like=True):
    id: int
    name: str
    config: TopicConfig
    created_ms: int
    head_seq: int
    ceiling: int  # no seq above it was ever given out
    floor: int  # everything below is gone, evicted or deleted
    evict_floor: int  # one above the highest seq lost to cap or TTL
    cap_seq: int  # highest seq evicted by a cap
    ttl_seq: int  # highest seq expired
    flushed_seq: int  # records up to here are in segments
    last_ts: int
    last_write_ts: int | None
    last_read_ts: int | None
    deleted_total: int
    evicted_total: int
    expired_total: int
    segments: list[SegmentState]
    keys: list[KeyState]
    holes: list[tuple[int, int]]  # seqs whose records a restart takes or took: they were in memory only
    pipe: PipeState | None = None
    trims: list[tuple[int, int]] = []  # seqs that stand for records which the source had lost before they were copied
    hops: list[tuple[int, int, int]] = []  # first seq, last seq, routers passed in a ring; only what may go round again
    skipped_total: int = 0  # seqs that no record has and no range above names: see Topic.pass_over
    lost_total: int = 0  # of evicted_total: seqs of holes, which no cap took
    tail: list[tuple[int, int]] = []  # live records, and copies, that the log alone knows; neighbours joined
    cold: list[ColdState] = []  # of every segment in the cold tier that has delete flags

    @property
    def deleted_above(self) -> int:
        """How many of the deleted records and skipped seqs may have been above the floor, at most. Every seq below it
        was deleted, skipped, evicted or lost: one that was neither evicted nor lost explains nothing above."""
        low = max(self.floor, self.evict_floor)
        lost = sum(max(0, min(last, low - 1) - first + 1) for first, last in [*self.holes, *self.trims])
        below = low - 1 - self.evicted_total - self.expired_total - lost
        return max(0, self.deleted_total + self.skipped_total - max(0, below))


class ShardState(msgspec.Struct, array_like=True):
    shard: int
    layout: int
    lsn: int  # the last frame this snapshot covers
    clock_ms: int  # the shard's clock, which never goes back
    clean: bool  # written while stopping: nothing came after it ...
    file_no: int  # ... unless there is a WAL file with a higher number than this
    topics: list[msgspec.Raw]  # each a TopicState, encoded: unchanged topics are not encoded again
    stopped: bool = False  # like `clean`, but some copies are known to the log alone: all of it is on the platter


_PIPE = TopicState.__struct_fields__.index("pipe")
_encode_shard = msgspec.msgpack.Encoder().encode
_decode_shard = msgspec.msgpack.Decoder(ShardState).decode
_decode_topic = msgspec.msgpack.Decoder(TopicState).decode


def encode_topic(state: TopicState) -> bytes:
    """Without the last fields where they say nothing, as in most topics: those of all are read at every start."""
    fields = list(msgspec.structs.astuple(state))
    if state.pipe is not None and not state.pipe.tail_lost:
        fields[_PIPE] = msgspec.structs.astuple(state.pipe)[:-1]
    silent = 0 if state.cold else 1 if state.tail else 2 if state.skipped_total or state.lost_total else 4
    return _encode_shard(fields[: len(fields) - silent])


def decode_topic(raw: bytes | msgspec.Raw) -> TopicState:
    return _decode_topic(raw)


def pack_flags(flags: bytes | bytearray | None) -> bytes:
    """Delete flags as bits, that of the first record lowest, without the zero bytes at the end."""
    if not flags:
        return b""
    return int(flags.translate(_AS_DIGITS)[::-1], 2).to_bytes((len(flags) + 7) // 8, "little").rstrip(b"\0")


def unpack_flags(bits: bytes, count: int) -> bytearray:
    digits = f"{int.from_bytes(bits, 'little'):0{count}b}".encode()
    if len(digits) != count:
        raise CorruptData(f"delete flags of {len(digits)} records for a block of {count}")
    return bytearray(digits[::-1].translate(_AS_FLAGS))


def join_flags(flags: bytearray, more: bytes | bytearray) -> bytearray:
    """What is set in either."""
    mine = int.from_bytes(flags.translate(_AS_SET), "little")
    others = int.from_bytes(more.translate(_AS_SET), "little")
    return bytearray((mine | others).to_bytes(len(flags), "little"))


def encode_snapshot(state: ShardState) -> bytes:
    payload = _encode_shard(state if state.stopped else msgspec.structs.astuple(state)[:-1])  # as in encode_topic
    return SNAPSHOT_HEADER.pack(SNAPSHOT_MAGIC, FORMAT_VERSION, 0, len(payload), xxh3_64_intdigest(payload)) + payload


def decode_snapshot(data: bytes, *, path: str) -> ShardState:
    if len(data) < SNAPSHOT_HEADER.size:
        raise CorruptData(f"{path}: shorter than a snapshot header")
    magic, version, _, length, checksum = SNAPSHOT_HEADER.unpack_from(data)
    if magic != SNAPSHOT_MAGIC:
        raise FormatError(f"{path}: not a topics snapshot")
    check_version(version, path=path)
    payload = data[SNAPSHOT_HEADER.size : SNAPSHOT_HEADER.size + length]
    if len(payload) != length or xxh3_64_intdigest(payload) != checksum:
        raise CorruptData(f"{path}: snapshot checksum fails")
    return _decode_shard(payload)


def with_header(data: bytes, magic: bytes = SNAPSHOT_MAGIC) -> bytes | None:
    """The file with the header that belongs to it, if only that is damaged: the payload's checksum tells."""
    if len(data) < SNAPSHOT_HEADER.size:
        return None
    payload = data[SNAPSHOT_HEADER.size :]
    checksum = SNAPSHOT_HEADER.unpack_from(data)[4]
    if xxh3_64_intdigest(payload) != checksum:
        return None
    return SNAPSHOT_HEADER.pack(magic, FORMAT_VERSION, 0, len(payload), checksum) + payload
