"""GET /v0/metrics: what the counters page says, and a bounded block about topics.

The page is read without asking anyone; only the block asks the shards, for a page of topics. What can't be asked now is
left out: metrics describe a server that is not ready, too. Prometheus text by default, JSON for who asks for that.
"""

from __future__ import annotations

import itertools
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
from topics.gateway.api.topics import with_performance
from topics.gateway.api.types import Call, Gather, Outcome, Request, Response
from topics.gateway.metrics.answered import Answered
from topics.gateway.metrics.refusals import WORDS as REFUSED_WORDS
from topics.shm.counters import SYNC_BUCKET_US, Board, State, Word
from topics.shm.counters import Row as Words
from topics.shm.usage import Usage

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
    ("topics_cold_segments", "Segments in the cold tier.", Word.COLD_SEGMENTS),
    ("topics_cold_bytes", "Bytes of their files.", Word.COLD_BYTES),
    ("topics_cold_tier_missing", "Shards that don't find the cold tier at its place.", Word.COLD_GONE),
    ("topics_watch_sessions", "Watch sessions.", Word.SESSIONS),
)
_WAL = (
    ("topics_wal_frames", "Frames appended to the log.", Word.WAL_FRAMES),
    ("topics_wal_batches", "Writes they went out in.", Word.WAL_BATCHES),
    ("topics_wal_fsyncs", "Completed syncs.", Word.WAL_FSYNCS),
    ("topics_wal_bytes_written", "Bytes appended to the log.", Word.WAL_BYTES),
    ("topics_wal_rotations", "Log files begun after the first.", Word.WAL_ROTATIONS),
)
# Loss is explicit: where it goes on, this rises.
_LOSSES = (
    ("topics_records_evicted", "Records that a cap of their topic took.", Word.RECORDS_EVICTED),
    ("topics_records_expired", "Records that outlived the TTL of their topic.", Word.RECORDS_EXPIRED),
)
_BY_TOPIC = (
    ("topics_topic_head_seq", "Highest assigned seq.", "head_seq"),
    ("topics_topic_earliest_seq", "Seq of the first live record.", "earliest_seq"),
    ("topics_topic_records_live", "Live records.", "count"),
    ("topics_topic_bytes_live", "Their accounted bytes.", "bytes"),
)
_BY_QUEUE = (
    ("topics_topic_queue_ready", "Jobs that can be claimed.", "ready"),
    ("topics_topic_queue_in_flight", "Jobs that somebody holds.", "in_flight"),
)


class TopicFigures(msgspec.Struct):
    """A row of the block about topics."""

    row: messages.TopicRow
    queue: messages.QueueCounts | None = None


class MetricsHandlers:
    def __init__(
        self,
        board: Board,
        *,
        shards: int,
        linked: Callable[[int], bool] = lambda peer: True,
        usage: Usage | None = None,
        data_dir: str | None = None,
    ) -> None:
        self._answered = Answered(usage) if usage is not None else None
        self._data_dir = data_dir
        self._board = board
        self._shards = shards
        self._queue = shards + 1
        self._linked = linked
        # What was made of the counters page, for requests that share it: text or JSON, with and without a cut block.
        self.page: dict[tuple[bool, bool], Any] | None = None

    def name_routes(self, labels: list[tuple[str, str]]) -> None:
        """Method and path of routes, by number."""
        if self._answered is not None:
            self._answered.labels = labels

    def options(self, request: Request) -> tuple[Any, ...]:
        """What an answer depends on. Raises if the request asks for what there is not."""
        prefixes = request.key.prefixes if request.key else ()
        return _prefix(request.query.get("topic")), prefixes, _wants_json(request.headers.get(b"accept", b""))

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
        known = [row for answer in answers if answer is not None for row in answer.rows]
        rows = sorted((row for row in known if not row.rebuilding), key=lambda row: row.topic)
        cut = len(rows) < len(known) or len(rows) > limits.METRICS_TOPICS
        cut = cut or len(answers) < self._shards  # some could not even be asked
        cut = cut or any([answer is None or answer.more for answer in answers])
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
        as_json = _wants_json(request.headers.get(b"accept", b""))
        page: Any = None if self.page is None else self.page.get((as_json, cut))
        if page is None:
            families, answered = self._families(cut), self._answered
            if as_json:
                page = _as_json([*families, *(answered.families() if answered is not None else ())])
            else:
                page = generate_latest(_Once(families)) + (answered.text() if answered is not None else b"")
            if self.page is not None:
                self.page[as_json, cut] = page
        if as_json:
            shown = page | {name: rows for name, _, rows in _topic_rows(figures)}
            return Response(200, with_performance({**_flat(shown), "metrics": shown}, request.started_ns))
        return Response(200, page, _TEXT, tail=_topic_block(figures))

    # --- families ---

    def _families(self, cut: bool) -> Iterator[Metric]:
        rows = self._board.rows()
        shards = [row for row in rows if row.name.startswith("shard-")]
        yield _gauge("topics_topics", "Topics.", sum(row[Word.TOPICS] for row in shards))
        by_class = GaugeMetricFamily("topics_topics_by_class", "Topics by durability class.", labels=["class"])
        for name, word in _CLASSES:
            by_class.add_metric([name], sum(row[word] for row in shards))
        yield by_class
        for name, meaning, word in _SUMS:
            yield _gauge(name, meaning, sum(row[word] for row in rows))
        died = sum(row[Word.DEAD_LETTERED] for row in rows)
        yield CounterMetricFamily("topics_queue_dead_lettered", "Jobs moved to dead letters.", value=died)
        streams = sum(row[Word.STREAMS] for row in shards)  # their home counts those of all gateways
        yield _gauge("topics_sse_connections", "Open event streams and WebSockets.", streams)
        ready = all(row.state == State.READY and not row[Word.DERIVING] for row in rows if row.name != "supervisor")
        yield _gauge("topics_ready", "1 if every process serves.", int(ready))
        progress = sum(row[Word.PROGRESS_PERMILLE] for row in shards) / (1_000 * max(1, len(shards)))
        yield _gauge("topics_recovery_progress", "How far recovery is, from 0 to 1.", progress)
        started_ms = min([row[Word.STARTED_MS] for row in rows if row[Word.STARTED_MS]], default=0)
        uptime_ms = max(0, time.time_ns() // 1_000_000 - started_ms) if started_ms else 0
        yield _gauge("topics_uptime_ms", "Since the server started.", uptime_ms)
        lag = max([row[Word.ROUTER_LAG] for row in rows], default=0)
        yield _gauge("topics_router_lag_records", "Records of its source that the slowest router has yet to see.", lag)
        for name, meaning, word in (*_LOSSES, *_WAL):
            yield CounterMetricFamily(name, meaning, value=sum(row[word] for row in shards))
        depth = sum(row[Word.RING_DEPTH] for row in shards)
        yield _gauge("topics_wal_queue_depth", "Bytes in the rings to the shards, as they last looked.", depth)
        peak = max([row[Word.RING_HIGH_WATER] for row in shards], default=0)
        yield _gauge("topics_wal_queue_depth_peak", "The most bytes that one of these rings held.", peak)
        full = sum(row[Word.RING_FULL] for row in rows)
        yield CounterMetricFamily("topics_wal_submit_full", "Requests refused because a ring was full.", value=full)
        read_only = int(any(row[Word.WAL_READ_ONLY] for row in shards))
        yield _gauge("topics_wal_read_only", "1 if there is no space to write into, or too little.", read_only)
        if self._data_dir is not None:
            free = _free_bytes(self._data_dir)
            yield _gauge("topics_disk_free_bytes", "Free space on the disk that holds the data.", free)
        yield _sync_histogram(shards)
        yield from _processes(rows)
        yield from _budgets([row for row in rows if row.name.startswith("gateway-")])
        yield _gauge("topics_topic_metrics_truncated", "1 if topics were left out of the block above.", int(cut))


def _topic_rows(figures: list[TopicFigures]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Name, meaning and rows of every gauge about topics."""
    for name, meaning, field in _BY_TOPIC:
        yield name, meaning, [{"topic": one.row.topic, "value": getattr(one.row, field)} for one in figures]
    for name, meaning, field in _BY_QUEUE:
        queues = [one for one in figures if one.queue is not None]
        yield name, meaning, [{"topic": one.row.topic, "value": getattr(one.queue, field)} for one in queues]


def _topic_block(figures: list[TopicFigures]) -> bytes:
    """The same as text. By hand: prometheus_client would take twenty milliseconds for a thousand topics, in which
    nobody else is served. Names of topics need no escaping."""
    parts: list[str] = []
    for name, meaning, rows in _topic_rows(figures):
        parts.append(f"# HELP {name} {meaning}\n# TYPE {name} gauge\n")
        parts += [f'{name}{{topic="{row["topic"]}"}} {row["value"]}\n' for row in rows]
    return "".join(parts).encode()


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
    buckets = _cumulative([*map(str, SYNC_BUCKET_US), "+Inf"], counts)
    spent = sum(row[Word.WAL_SYNC_US_SUM] for row in shards)
    return HistogramMetricFamily(
        "topics_wal_fsync_latency_us", "Duration of a sync in microseconds.", buckets=buckets, sum_value=spent
    )


def _cumulative(bounds: list[str], counts: list[int]) -> list[tuple[str, float]]:
    return list(zip(bounds, itertools.accumulate(counts), strict=True))


# name, what it says, the word, and what it is divided by
_GAUGES = (
    ("topics_process_ring_depth_bytes", "Waiting in the rings to it, when it last looked.", Word.RING_DEPTH, 1),
    ("topics_process_ring_high_water_bytes", "The most it saw in one of them.", Word.RING_HIGH_WATER, 1),
    ("topics_process_loop_lag_seconds", "The longest round of its loop in the last second.", Word.LOOP_LAG_US, 1e6),
    ("topics_process_pressure", "Level of its governor: 0 calm to 4 refusing.", Word.PRESSURE, 1),
)
_COUNTERS = (
    ("topics_process_doorbells", "Bells it rang.", Word.DOORBELLS, 1),
    ("topics_process_busy_seconds", "Time it spent in rounds of its loop.", Word.BUSY_US, 1e6),
)


def _processes(rows: list[Words]) -> Iterator[Metric]:
    for name, meaning, word, unit in _GAUGES:
        gauge = GaugeMetricFamily(name, meaning, labels=["process"])
        for row in rows:
            gauge.add_metric([row.name], row[word] / unit)
        yield gauge
    for name, meaning, word, unit in _COUNTERS:
        counter = CounterMetricFamily(name, meaning, labels=["process"])
        for row in rows:
            counter.add_metric([row.name], row[word] / unit)
        yield counter
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
            memory.add_metric([row.name], _resident_bytes(row[Word.PID]) or row[Word.RESIDENT_BYTES])
    yield from (restarts, memory, requests, full)


# name, what it says, the word; of gateways
_OCCUPANCY = (
    ("topics_gateway_buffered_bytes", "Bytes of requests and of unread answers that it holds.", Word.BUFFERED_BYTES),
    ("topics_gateway_buffered_bytes_limit", "The most that it may hold.", Word.BUFFERED_BYTES_LIMIT),
    ("topics_gateway_connections", "Open client connections.", Word.CONNECTIONS),
    ("topics_gateway_connections_limit", "The most that have a place.", Word.CONNECTIONS_LIMIT),
)


def _budgets(gateways: list[Words]) -> Iterator[Metric]:
    for name, meaning, word in _OCCUPANCY:
        gauge = GaugeMetricFamily(name, meaning, labels=["process"])
        for row in gateways:
            gauge.add_metric([row.name], row[word])
        yield gauge
    refusals = CounterMetricFamily(
        "topics_gateway_refusals",
        "Requests and connections that a budget had no room for.",
        labels=["process", "budget"],
    )
    for row in gateways:
        for budget, word in REFUSED_WORDS.items():
            refusals.add_metric([row.name, budget], row[word])
    yield refusals


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as source:
            return int(source.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0  # it has just ended, or /proc hides it


def _free_bytes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _as_json(families: Iterable[Metric]) -> dict[str, Any]:
    """By name: a number, or rows of labels and value."""
    shown: dict[str, Any] = {}
    for family in families:
        for sample in family.samples:
            if not sample.labels:
                shown[sample.name] = sample.value
            else:
                shown.setdefault(sample.name, []).append({**sample.labels, "value": sample.value})
    return shown


# The keys of the contract's JSON form, and which of our names holds the value.
_FLAT = (
    ("topics", "topics_topics"),
    ("routers", "topics_routers"),
    ("records_live", "topics_records_live"),
    ("bytes_live", "topics_bytes_live"),
    ("queue_topics", "topics_queue_topics"),
    ("queue_leases_in_flight", "topics_queue_leases_in_flight"),
    ("sse_connections", "topics_sse_connections"),
    ("watch_sessions", "topics_watch_sessions"),
    ("replay_progress", "topics_recovery_progress"),
    ("uptime_ms", "topics_uptime_ms"),
)
_FLAT_WAL = (
    ("fsyncs", "topics_wal_fsyncs_total"),
    ("frames", "topics_wal_frames_total"),
    ("batches", "topics_wal_batches_total"),
    ("bytes_written", "topics_wal_bytes_written_total"),
    ("rotations", "topics_wal_rotations_total"),
    ("queue_depth", "topics_wal_queue_depth"),
    ("queue_depth_peak", "topics_wal_queue_depth_peak"),
    ("submit_full_total", "topics_wal_submit_full_total"),
    ("read_only", "topics_wal_read_only"),
    ("fsync_count", "topics_wal_fsync_latency_us_count"),
    ("fsync_micros_total", "topics_wal_fsync_latency_us_sum"),
)


def _flat(shown: dict[str, Any]) -> dict[str, Any]:
    """The same figures under the short keys that clients of the contract read."""
    flat: dict[str, Any] = {key: shown[name] for key, name in _FLAT}
    flat |= {f"topics_{row['class']}": row["value"] for row in shown["topics_topics_by_class"]}
    flat["ready"] = bool(shown["topics_ready"])
    flat["wal"] = {key: shown[name] for key, name in _FLAT_WAL}
    return flat
