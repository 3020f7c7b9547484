"""GET /v0/metrics: what the counters page says, and a bounded block about topics.

The page is read without asking anyone; only the block asks the shards, for a page of topics. What can't be asked now is
left out: metrics describe a server that is not ready, too. Prometheus text by default, JSON for who asks for that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import invalid
from topics.gateway.exchange import Call, Gather, Outcome, Request, Response
from topics.gateway.handlers import with_performance
from topics.shm.counters import SYNC_BUCKET_US, Board, State, Word
from topics.shm.counters import Row as Words

_TEXT = (("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CLASSES = (
    ("ephemeral", Word.TOPICS_EPHEMERAL),
    ("memory", Word.TOPICS_MEMORY),
    ("disk", Word.TOPICS_DISK),
    ("fsync", Word.TOPICS_FSYNC),
)
# name, what it says, the word; summed over all processes that write it
_SUMS = (
    ("topics_records_live", "Records neither deleted nor evicted.", Word.RECORDS_LIVE),
    ("topics_bytes_live", "Their accounted bytes.", Word.BYTES_LIVE),
    ("topics_queue_topics", "Topics of type queue.", Word.QUEUE_TOPICS),
    ("topics_queue_leases_in_flight", "Jobs that somebody holds.", Word.LEASES),
    ("topics_routers", "Routers.", Word.ROUTERS),
    ("topics_watch_sessions", "Watch sessions.", Word.SESSIONS),
)
_WAL = (
    ("topics_wal_frames", "Frames appended to the log.", Word.WAL_FRAMES),
    ("topics_wal_batches", "Writes they went out in.", Word.WAL_BATCHES),
    ("topics_wal_fsyncs", "Completed syncs.", Word.WAL_FSYNCS),
    ("topics_wal_bytes_written", "Bytes appended to the log.", Word.WAL_BYTES),
    ("topics_wal_rotations", "Log files begun after the first.", Word.WAL_ROTATIONS),
)
_BY_TOPIC = (
    ("topics_topic_head_seq", "Highest assigned seq.", "head_seq"),
    ("topics_topic_earliest_seq", "Seq of the first live record.", "earliest_seq"),
    ("topics_topic_records_live", "Live records.", "count"),
    ("topics_topic_bytes_live", "Their accounted bytes.", "bytes"),
)


class TopicFigures(msgspec.Struct):
    """A row of the block about topics."""

    row: messages.TopicRow
    queue: messages.QueueCounts | None = None


class MetricsHandlers:
    def __init__(self, board: Board, *, shards: int, linked: Callable[[int], bool] = lambda peer: True) -> None:
        self._board = board
        self._shards = shards
        self._queue = shards + 1
        self._linked = linked

    def get(self, request: Request) -> Outcome:
        prefix = _prefix(request.query.get("topic"))
        head = messages.ListTopics(
            prefix=prefix,
            after="",
            limit=limits.METRICS_TOPICS,
            touch=False,
            prefixes=request.key.prefixes if request.key else (),
        )
        asked = [
            Call(shard=shard, op=Op.LIST_TOPICS, head=head) for shard in range(self._shards) if self._linked(shard)
        ]
        if not asked:
            return self._answer(request, [], True)
        return Gather(asked, lambda answers: self._listed(request, answers), tolerant=True)

    def _listed(self, request: Request, answers: list[messages.TopicsListed | None]) -> Outcome:
        rows = [row for answer in answers if answer is not None for row in answer.rows]
        rows.sort(key=lambda row: row.topic)
        cut = len(rows) > limits.METRICS_TOPICS or any([answer is None or answer.more for answer in answers])
        figures = [TopicFigures(row) for row in rows[: limits.METRICS_TOPICS]]
        queues = [one for one in figures if one.row.topic_id]
        if not queues or not self._linked(self._queue):
            return self._answer(request, figures, cut)

        def counted(counts: list[messages.QueuesCounted | None]) -> Outcome:
            if (answer := counts[0]) is not None:
                for one, count in zip(queues, answer.counts, strict=True):
                    one.queue = count
            return self._answer(request, figures, cut)

        head = messages.CountQueues([messages.QueueRow.of(one.row) for one in queues])
        return Gather([Call(shard=self._queue, op=Op.COUNT_QUEUES, head=head)], counted, tolerant=True)

    def _answer(self, request: Request, figures: list[TopicFigures], cut: bool) -> Response:
        families = list(self._families(figures, cut))
        if _wants_json(request.headers.get(b"accept", b"")):
            return Response(200, with_performance(_as_json(families), request.started_ns))
        return Response(200, generate_latest(_Once(families)), _TEXT)

    # --- families ---

    def _families(self, figures: list[TopicFigures], cut: bool) -> Iterator[Metric]:
        rows = self._board.rows()
        shards = [row for row in rows if row.name.startswith("shard-")]
        yield _gauge("topics_topics", "Topics.", sum(row[Word.TOPICS] for row in shards))
        by_class = GaugeMetricFamily("topics_topics_by_class", "Topics by durability class.", labels=["class"])
        for name, word in _CLASSES:
            by_class.add_metric([name], sum(row[word] for row in shards))
        yield by_class
        for name, meaning, word in _SUMS:
            yield _gauge(name, meaning, sum(row[word] for row in rows))
        streams = sum(row[Word.STREAMS] for row in shards)  # their home counts those of all gateways
        yield _gauge("topics_sse_connections", "Open event streams and WebSockets.", streams)
        ready = all(row.state == State.READY and not row[Word.DERIVING] for row in rows if row.name != "supervisor")
        yield _gauge("topics_ready", "1 if every process serves.", int(ready))
        progress = sum(row[Word.PROGRESS_PERMILLE] for row in shards) / (1_000 * max(1, len(shards)))
        yield _gauge("topics_recovery_progress", "How far recovery is, from 0 to 1.", progress)
        started_ms = min([row[Word.STARTED_MS] for row in rows if row[Word.STARTED_MS]], default=0)
        uptime_ms = max(0, time.time_ns() // 1_000_000 - started_ms) if started_ms else 0
        yield _gauge("topics_uptime_ms", "Since the server started.", uptime_ms)
        for name, meaning, word in _WAL:
            yield CounterMetricFamily(name, meaning, value=sum(row[word] for row in shards))
        depth = sum(row[Word.RING_DEPTH] for row in shards)
        yield _gauge("topics_wal_queue_depth", "Bytes in the rings to the shards, as they last looked.", depth)
        peak = max([row[Word.RING_HIGH_WATER] for row in shards], default=0)
        yield _gauge("topics_wal_queue_depth_peak", "The most bytes that one of these rings held.", peak)
        full = sum(row[Word.RING_FULL] for row in rows)
        yield CounterMetricFamily("topics_wal_submit_full", "Requests refused because a ring was full.", value=full)
        read_only = int(any(row[Word.WAL_READ_ONLY] for row in shards))
        yield _gauge("topics_wal_read_only", "1 if the last write found no space.", read_only)
        yield _sync_histogram(shards)
        yield from _processes(rows)
        for name, meaning, field in _BY_TOPIC:
            family = GaugeMetricFamily(name, meaning, labels=["topic"])
            for one in figures:
                family.add_metric([one.row.topic], getattr(one.row, field))
            yield family
        ready_jobs = GaugeMetricFamily("topics_topic_queue_ready", "Jobs that can be claimed.", labels=["topic"])
        held_jobs = GaugeMetricFamily("topics_topic_queue_in_flight", "Jobs that somebody holds.", labels=["topic"])
        for one in figures:
            if one.queue is not None:
                ready_jobs.add_metric([one.row.topic], one.queue.ready)
                held_jobs.add_metric([one.row.topic], one.queue.in_flight)
        yield ready_jobs
        yield held_jobs
        yield _gauge("topics_topic_metrics_truncated", "1 if topics were left out of the block above.", int(cut))


class _Once(CollectorRegistry):
    """What generate_latest wants, of families that exist already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _wants_json(accept: bytes) -> bool:
    """Whether an Accept header names JSON, and nothing textual before it."""
    for part in accept.lower().split(b","):
        kind = part.partition(b";")[0].strip()
        if kind == b"application/json":
            return True
        if kind.startswith(b"text/"):
            return False
    return False


def _prefix(text: str | None) -> str:
    if text is None:
        return ""
    if "*" in text[:-1] or not text.endswith("*"):
        raise invalid("topic is a prefix followed by a single *", field="topic")
    return text[:-1]


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=value)


def _sync_histogram(shards: list[Words]) -> HistogramMetricFamily:
    counts = [sum(row[Word.SYNC_BUCKETS + at] for row in shards) for at in range(len(SYNC_BUCKET_US) + 1)]
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*map(str, SYNC_BUCKET_US), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, total))
    spent = sum(row[Word.WAL_SYNC_US_SUM] for row in shards)
    return HistogramMetricFamily(
        "topics_wal_fsync_latency_us", "Duration of a sync in microseconds.", buckets=buckets, sum_value=spent
    )


def _processes(rows: list[Words]) -> Iterator[Metric]:
    restarts = CounterMetricFamily("topics_process_restarts", "Starts after the first.", labels=["process"])
    memory = GaugeMetricFamily("topics_process_resident_bytes", "Resident memory.", labels=["process"])
    requests = CounterMetricFamily("topics_process_requests", "Requests taken since its start.", labels=["process"])
    full = CounterMetricFamily(
        "topics_process_ring_full", "Messages refused because a ring was full.", labels=["process"]
    )
    for row in rows:
        restarts.add_metric([row.name], row[Word.RESTARTS])
        requests.add_metric([row.name], row[Word.REQUESTS])
        full.add_metric([row.name], row[Word.RING_FULL])
        if row[Word.PID]:
            memory.add_metric([row.name], _resident_bytes(row[Word.PID]))
    return iter((restarts, memory, requests, full))


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as source:
            return int(source.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0  # it has just ended


def _as_json(families: Iterable[Metric]) -> dict[str, Any]:
    """By name: a number, or rows of labels and value."""
    shown: dict[str, Any] = {}
    for family in families:
        for sample in family.samples:
            if not sample.labels:
                shown[sample.name] = sample.value
            else:
                shown.setdefault(sample.name, []).append({**sample.labels, "value": sample.value})
    return {"metrics": shown}
