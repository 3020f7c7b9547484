"""The board: one row of words per process, in memory that everyone maps and anyone may read from outside.

    0            1024         2048                      1024 * (1 + rows)
    | header     | row 0      | row 1      | ...        |
    | magic      | 128 words of 8 bytes, see TABLE; the last four hold the process name |
    | version
    | rows

Rules: every word has one writer at a time, so plain loads and stores do, and a counter costs one item
assignment. `supervisor` writes the words that TABLE gives to it, and the others only while the process is
not alive. The one exception is SLEEPING (see doorbell.py). Readers see each word whole but no two words
of the same instant.

Crash: a row keeps its last values until the supervisor clears it for the next process of that name.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

import msgspec

from topics.errors import TopicsError
from topics.shm.region import Region

MAGIC: Final = 0x4452414F_42504F54  # "TOPBOARD"
BOARD_VERSION: Final = 2
ROW_WORDS: Final = 128
ROW_BYTES: Final = ROW_WORDS * 8
NAME_BYTES: Final = 32
SYNC_BUCKET_COUNT: Final = 16


class State(enum.IntEnum):
    EMPTY = 0
    STARTING = 1
    RECOVERING = 2
    READY = 3
    STOPPING = 4
    STOPPED = 5
    FAILED = 6
    BACKOFF = 7


class Word:
    """Positions in a row. Plain integers: an enum's members cost more to look up than the store itself."""

    SLEEPING: Final = 0
    PID: Final = 1
    STATE: Final = 2
    STARTED_MS: Final = 3
    RESTARTS: Final = 4
    GENERATION: Final = 5
    HEARTBEAT: Final = 6
    PROGRESS_PERMILLE: Final = 7

    TOPICS: Final = 16
    RECORDS_LIVE: Final = 17
    BYTES_LIVE: Final = 18
    REQUESTS: Final = 19
    CONNECTIONS: Final = 20
    STREAMS: Final = 21
    SESSIONS: Final = 22
    FEEDS: Final = 23

    RING_FULL: Final = 24
    DOORBELLS: Final = 25
    RING_DEPTH: Final = 26
    RING_HIGH_WATER: Final = 27
    OUTBOX_DEPTH: Final = 28
    OUTBOX_HIGH_WATER: Final = 29
    PUSHES: Final = 30
    ROUTERS: Final = 31

    WAL_FRAMES: Final = 32
    WAL_BATCHES: Final = 33
    WAL_FSYNCS: Final = 34
    WAL_BYTES: Final = 35
    WAL_ROTATIONS: Final = 36
    WAL_READ_ONLY: Final = 37
    WAL_SYNC_US_SUM: Final = 38
    FORWARDED: Final = 39
    DERIVING: Final = 40
    QUEUES: Final = 41
    LEASES: Final = 42
    JOBS_CLAIMED: Final = 43
    JOBS_ACKED: Final = 44
    DEAD_LETTERED: Final = 45
    SYNC_BUCKETS: Final = 48
    TOPICS_EPHEMERAL: Final = 64
    TOPICS_MEMORY: Final = 65
    TOPICS_DISK: Final = 66
    TOPICS_FSYNC: Final = 67
    QUEUE_TOPICS: Final = 68

    LOOP_LAG_US: Final = 72
    BUSY_US: Final = 73
    PRESSURE: Final = 74
    THROTTLE_MS: Final = 75
    DISK_FREE: Final = 76
    TOTALS_KNOWN: Final = 77
    CLAIMED_TOPICS: Final = 78
    CLAIMED_BYTES: Final = 79

    WAL_LSN: Final = 80
    WAL_BACKLOG: Final = 81
    SNAPSHOT_MS: Final = 82
    RECORDS_ADDED: Final = 83
    COLD_SEGMENTS: Final = 84
    COLD_BYTES: Final = 85
    COLD_FETCHES: Final = 86
    RECORDS_EVICTED: Final = 87
    RECORDS_EXPIRED: Final = 88
    ROUTER_LAG: Final = 89
    RESIDENT_BYTES: Final = 90
    BUFFERED_BYTES: Final = 91
    BUFFERED_BYTES_LIMIT: Final = 92
    CONNECTIONS_LIMIT: Final = 93
    REFUSED_BUFFERED_BYTES: Final = 94
    REFUSED_CONNECTIONS: Final = 95
    REFUSED_CONNECTIONS_PER_PEER: Final = 96
    REFUSED_OPEN_FILES: Final = 97
    REFUSED_INFLIGHT_PER_KEY: Final = 98
    REFUSED_SCRAPES: Final = 99
    COLD_GONE: Final = 100

    NAME: Final = ROW_WORDS - NAME_BYTES // 8


class WordInfo(msgspec.Struct, frozen=True):
    index: int
    name: str
    writer: str
    meaning: str
    width: int = 1


_S, _P, _ANY = "supervisor", "process", "any"

TABLE: Final[tuple[WordInfo, ...]] = (
    WordInfo(Word.SLEEPING, "sleeping", _ANY, "1 while the process waits for its bell"),
    WordInfo(Word.PID, "pid", _S, "process id; 0 while there is none"),
    WordInfo(Word.STATE, "state", _P, "a State"),
    WordInfo(Word.STARTED_MS, "started_ms", _S, "wall clock at its last start"),
    WordInfo(Word.RESTARTS, "restarts", _S, "starts after the first but for reloads, since the server started"),
    WordInfo(Word.GENERATION, "generation", _S, "which life of this name it is, from 1"),
    WordInfo(Word.HEARTBEAT, "heartbeat", _P, "CLOCK_MONOTONIC in ns at its last beat; 0 before the first"),
    WordInfo(Word.PROGRESS_PERMILLE, "progress_permille", _P, "how far recovery is"),
    WordInfo(Word.TOPICS, "topics", _P, "topics it owns"),
    WordInfo(Word.RECORDS_LIVE, "records_live", _P, "records neither deleted nor evicted"),
    WordInfo(Word.BYTES_LIVE, "bytes_live", _P, "their accounted bytes"),
    WordInfo(Word.REQUESTS, "requests", _P, "requests taken since it started"),
    WordInfo(Word.CONNECTIONS, "connections", _P, "open client connections"),
    WordInfo(Word.STREAMS, "streams", _P, "open SSE and WebSocket connections; of shard-0: those of all gateways"),
    WordInfo(Word.SESSIONS, "sessions", _P, "watch sessions it keeps"),
    WordInfo(Word.FEEDS, "feeds", _P, "topics it follows for watchers, or that are followed at it"),
    WordInfo(Word.RING_FULL, "ring_full", _P, "messages refused because a ring and its outbox were full"),
    WordInfo(Word.DOORBELLS, "doorbells", _P, "bells it rang"),
    WordInfo(Word.RING_DEPTH, "ring_depth", _P, "bytes waiting in the rings to it, when it last looked"),
    WordInfo(Word.RING_HIGH_WATER, "ring_high_water", _P, "the most bytes it saw in one of its rings"),
    WordInfo(Word.OUTBOX_DEPTH, "outbox_depth", _P, "bytes waiting for room in the rings from it"),
    WordInfo(Word.OUTBOX_HIGH_WATER, "outbox_high_water", _P, "the most that ever waited so"),
    WordInfo(Word.PUSHES, "pushes", _P, "pushes of published records, taken or sent"),
    WordInfo(Word.ROUTERS, "routers", _P, "router rules it knows"),
    WordInfo(Word.WAL_FRAMES, "wal_frames", _P, "frames appended to the log"),
    WordInfo(Word.WAL_BATCHES, "wal_batches", _P, "writes they went out in"),
    WordInfo(Word.WAL_FSYNCS, "wal_fsyncs", _P, "completed syncs"),
    WordInfo(Word.WAL_BYTES, "wal_bytes", _P, "bytes appended to the log"),
    WordInfo(Word.WAL_ROTATIONS, "wal_rotations", _P, "log files begun after the first"),
    WordInfo(Word.WAL_READ_ONLY, "wal_read_only", _P, "1 while the disk takes no appends"),
    WordInfo(Word.FORWARDED, "forwarded", _P, "records it copied from topics to topics"),
    WordInfo(Word.DERIVING, "deriving", _P, "topics whose copies are being made again after a restart"),
    WordInfo(Word.QUEUES, "queues", _P, "queues whose leases it knows"),
    WordInfo(Word.LEASES, "leases", _P, "jobs that somebody holds"),
    WordInfo(Word.JOBS_CLAIMED, "jobs_claimed", _P, "jobs handed out since it started"),
    WordInfo(Word.JOBS_ACKED, "jobs_acked", _P, "jobs completed since it started"),
    WordInfo(Word.DEAD_LETTERED, "dead_lettered", _P, "jobs moved to dead letters since it started"),
    WordInfo(Word.WAL_SYNC_US_SUM, "wal_sync_us_sum", _P, "microseconds spent in syncs"),
    WordInfo(Word.SYNC_BUCKETS, "sync_buckets", _P, "syncs by duration, see sync_bucket", SYNC_BUCKET_COUNT),
    WordInfo(Word.TOPICS_EPHEMERAL, "topics_ephemeral", _P, "topics of the ephemeral class"),
    WordInfo(Word.TOPICS_MEMORY, "topics_memory", _P, "topics of the memory class"),
    WordInfo(Word.TOPICS_DISK, "topics_disk", _P, "topics of the disk class"),
    WordInfo(Word.TOPICS_FSYNC, "topics_fsync", _P, "topics of the fsync class"),
    WordInfo(Word.QUEUE_TOPICS, "queue_topics", _P, "topics of type queue"),
    WordInfo(Word.LOOP_LAG_US, "loop_lag_us", _P, "the longest round of its loop in about the last second"),
    WordInfo(Word.BUSY_US, "busy_us", _P, "time spent in rounds since it started"),
    WordInfo(Word.PRESSURE, "pressure", _P, "level of its governor: 0 calm to 4 refusing"),
    WordInfo(Word.THROTTLE_MS, "throttle_ms", _P, "what refused clients are told to wait"),
    WordInfo(Word.DISK_FREE, "disk_free", _P, "free bytes of the data disk, when it last looked"),
    WordInfo(Word.TOTALS_KNOWN, "totals_known", _P, "1 when the next two are true, perhaps of a past life"),
    WordInfo(Word.CLAIMED_TOPICS, "claimed_topics", _P, "topics, with one that is about to be made"),
    WordInfo(Word.CLAIMED_BYTES, "claimed_bytes", _P, "bytes of records, with those that are about to be written"),
    WordInfo(Word.WAL_LSN, "wal_lsn", _P, "the last frame of its log"),
    WordInfo(Word.WAL_BACKLOG, "wal_backlog", _P, "bytes of frames in the log files that it keeps"),
    WordInfo(Word.SNAPSHOT_MS, "snapshot_ms", _P, "wall clock at its last snapshot; 0 before its first"),
    WordInfo(Word.RECORDS_ADDED, "records_added", _P, "records that became readable since it started"),
    WordInfo(Word.COLD_SEGMENTS, "cold_segments", _P, "segments in the cold tier"),
    WordInfo(Word.COLD_BYTES, "cold_bytes", _P, "bytes of their files"),
    WordInfo(Word.COLD_FETCHES, "cold_fetches", _P, "reads from there since it started"),
    WordInfo(Word.COLD_GONE, "cold_gone", _P, "1 while the cold tier is not at its place"),
    WordInfo(Word.RECORDS_EVICTED, "records_evicted", _P, "records that caps took since the server started"),
    WordInfo(Word.RECORDS_EXPIRED, "records_expired", _P, "records that outlived their topic's TTL, likewise"),
    WordInfo(Word.ROUTER_LAG, "router_lag", _P, "records of its source that the slowest router has yet to look at"),
    WordInfo(Word.RESIDENT_BYTES, "resident_bytes", _P, "its memory, as it saw it at its last beat"),
    WordInfo(Word.BUFFERED_BYTES, "buffered_bytes", _P, "bytes of clients that it holds, when it last looked"),
    WordInfo(Word.BUFFERED_BYTES_LIMIT, "buffered_bytes_limit", _P, "the most that it may hold"),
    WordInfo(Word.CONNECTIONS_LIMIT, "connections_limit", _P, "the most connections that have a place"),
    WordInfo(Word.REFUSED_BUFFERED_BYTES, "refused_buffered_bytes", _P, "requests that there was no memory for"),
    WordInfo(Word.REFUSED_CONNECTIONS, "refused_connections", _P, "connections that found no place"),
    WordInfo(Word.REFUSED_CONNECTIONS_PER_PEER, "refused_connections_per_peer", _P, "likewise, of one address"),
    WordInfo(Word.REFUSED_OPEN_FILES, "refused_open_files", _P, "likewise, for want of descriptors"),
    WordInfo(Word.REFUSED_INFLIGHT_PER_KEY, "refused_inflight_per_key", _P, "requests of keys with too many under way"),
    WordInfo(Word.REFUSED_SCRAPES, "refused_scrapes", _P, "scrapes, because too many waited"),
    WordInfo(Word.NAME, "name", _S, "UTF-8, zero padded", NAME_BYTES // 8),
)

# Upper bounds in microseconds of all sync buckets but the last, which has none: those that the contract's example has,
# so that dashboards made for it find theirs.
SYNC_BUCKET_US: Final = (
    *(50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000),
    *(100_000, 250_000, 500_000, 1_000_000, 2_500_000),
)


def sync_bucket(duration_us: int) -> int:
    """The bucket that counts a sync of this duration: the first whose bound it does not exceed."""
    return bisect_left(SYNC_BUCKET_US, duration_us)


# What outlives a process: its share of quotas, and what is summed up over processes and must never go back.
KEPT: Final = frozenset(
    (
        *(Word.TOTALS_KNOWN, Word.CLAIMED_TOPICS, Word.CLAIMED_BYTES),
        *(Word.WAL_FRAMES, Word.WAL_BATCHES, Word.WAL_BYTES, Word.WAL_ROTATIONS, Word.WAL_FSYNCS, Word.WAL_SYNC_US_SUM),
        *range(Word.SYNC_BUCKETS, Word.SYNC_BUCKETS + SYNC_BUCKET_COUNT),
        *(Word.RECORDS_EVICTED, Word.RECORDS_EXPIRED),
        Word.RING_FULL,
        *range(Word.REFUSED_BUFFERED_BYTES, Word.REFUSED_SCRAPES + 1),
    )
)


class Row:
    """One process's words. `words` is for loops that can't afford the method call."""

    __slots__ = ("name", "words")

    def __init__(self, name: str, words: memoryview) -> None:
        self.name = name
        self.words = words

    def __getitem__(self, word: int) -> int:
        value: int = self.words[word]
        return value

    def set(self, word: int, value: int) -> None:
        self.words[word] = value

    def add(self, word: int, amount: int = 1) -> None:
        self.words[word] += amount

    def raise_to(self, word: int, value: int) -> None:
        """For high-water marks."""
        if value > self.words[word]:
            self.words[word] = value

    @property
    def state(self) -> State:
        return State(self.words[Word.STATE])

    def clear(self) -> None:
        """All words but the name and those that are KEPT to zero; only while no process of this name lives."""
        for word in range(Word.NAME):
            if word not in KEPT:
                self.words[word] = 0


class Board:
    def __init__(self, region: Region) -> None:
        self.region = region
        self.words = region.view.cast("Q")
        if region.size < ROW_BYTES or self.words[0] != MAGIC:
            raise TopicsError("not a counter board")
        if self.words[1] != BOARD_VERSION:
            raise TopicsError(
                f"counter board of version {self.words[1]}; this program reads {BOARD_VERSION}: "
                "use the topics program that the server was started with"
            )
        self._rows: dict[str, Row] = {}
        self._positions: dict[str, int] = {}
        for number in range(1, self.words[2] + 1):
            start = number * ROW_WORDS
            words = self.words[start : start + ROW_WORDS]
            name = words[Word.NAME :].tobytes().rstrip(b"\0").decode()
            self._rows[name] = Row(name, words)
            self._positions[name] = start

    @classmethod
    def create(cls, names: Iterable[str]) -> Board:
        encoded = [name.encode() for name in names]
        if len(set(encoded)) != len(encoded) or any(not 0 < len(name) <= NAME_BYTES for name in encoded):
            raise ValueError(f"process names must differ and have 1 to {NAME_BYTES} bytes: {encoded}")
        region = Region.create(ROW_BYTES * (1 + len(encoded)))
        for number, name in enumerate(encoded, 1):
            at = number * ROW_BYTES + Word.NAME * 8
            region.view[at : at + len(name)] = name
        with region.view.cast("Q") as header:
            header[1] = BOARD_VERSION
            header[2] = len(encoded)
            header[0] = MAGIC
        return cls(region)

    @classmethod
    def attach(cls, fd: int, size: int, *, writable: bool = True) -> Board:
        return cls(Region.attach(fd, size, writable=writable))

    def row(self, name: str) -> Row:
        return self._rows[name]

    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def sleeping_index(self, name: str) -> int:
        """Where in `words` the sleeping flag of a process stands: what its doorbell needs."""
        return self._positions[name] + Word.SLEEPING

    def close(self) -> None:
        for row in self._rows.values():
            row.words.release()
        self.words.release()
        self.region.close()
