"""Metrics from a counters page filled by hand, read back with Prometheus' own parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.gateway.api.types import Call, Gather, GatherSink, Outcome, Request, Response, error_response
from topics.gateway.metrics.page import MetricsHandlers
from topics.keys import Key, Scope
from topics.shm.counters import Board, State, Word
from topics.storage.config import TopicConfig
from topics.walshard.kinds import Kinds

NAMES = ["supervisor", "gateway-0", "router", "queue", "shard-0", "shard-1"]


@pytest.fixture
def board() -> Board:
    board = Board.create(NAMES)
    for name in NAMES[1:]:
        board.row(name).set(Word.STATE, State.READY)
    for name, topics, records in (("shard-0", 3, 10), ("shard-1", 4, 20)):
        words = board.row(name).words
        words[Word.TOPICS] = topics
        words[Word.RECORDS_LIVE] = records
        words[Word.TOPICS_DISK] = topics - 1
        words[Word.TOPICS_FSYNC] = 1
        words[Word.WAL_FSYNCS] = 3
        words[Word.WAL_SYNC_US_SUM] = 500
        words[Word.SYNC_BUCKETS] = 1
        words[Word.SYNC_BUCKETS + 2] = 2
        words[Word.RING_DEPTH] = 5
        words[Word.RING_HIGH_WATER] = topics * 100
        words[Word.PROGRESS_PERMILLE] = 1_000
    board.row("queue").words[Word.LEASES] = 7
    board.row("gateway-0").words[Word.RING_FULL] = 2
    board.row("shard-0").words[Word.STREAMS] = 6
    board.row("gateway-0").words[Word.STREAMS] = 6  # the same ones
    return board


def ask(accept: bytes = b"", key: Key | None = None, **query: str) -> Request:
    request = Request("", 0, query, b"", None, 0, key=key)
    request.headers = {b"accept": accept} if accept else {}
    return request


def row(name: str, *, queue: bool = False) -> messages.TopicRow:
    return messages.TopicRow(name, 9, 2, 8, 800, False, 0, 77 if queue else 0)


def samples(outcome: Outcome) -> dict[str, float]:
    assert isinstance(outcome, Response)
    assert dict(outcome.headers)["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families((bytes(outcome.body) + outcome.tail).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scrape(handlers: MetricsHandlers, *rows: messages.TopicRow, more: bool = False, **query: Any) -> dict[str, float]:
    gather = handlers.get(ask(**query))
    assert isinstance(gather, Gather)
    return samples(gather.render([messages.TopicsListed(list(rows), more), messages.TopicsListed([], False)]))


def test_the_page_is_summed_over_processes(board: Board) -> None:
    found = scrape(MetricsHandlers(board, shards=2), row("a"))
    assert found["topics_topics"] == 7
    assert found["topics_records_live"] == 30
    assert found["topics_topics_by_class{class=disk}"] == 5
    assert found["topics_topics_by_class{class=fsync}"] == 2
    assert found["topics_topics_by_class{class=memory}"] == 0
    assert found["topics_queue_leases_in_flight"] == 7
    assert found["topics_sse_connections"] == 6
    assert found["topics_ready"] == 1
    assert found["topics_recovery_progress"] == 1
    assert found["topics_wal_fsyncs_total"] == 6
    assert (found["topics_wal_queue_depth"], found["topics_wal_queue_depth_peak"]) == (10, 400)
    assert found["topics_wal_submit_full_total"] == 2
    assert found["topics_process_ring_full_total{process=gateway-0}"] == 2


def test_the_histogram_is_cumulative(board: Board) -> None:
    found = scrape(MetricsHandlers(board, shards=2))
    assert found["topics_wal_fsync_latency_us_bucket{le=50}"] == 2
    assert found["topics_wal_fsync_latency_us_bucket{le=100}"] == 2
    assert found["topics_wal_fsync_latency_us_bucket{le=250}"] == 6
    assert found["topics_wal_fsync_latency_us_bucket{le=500}"] == 6  # the bound that the contract's example shows
    assert found["topics_wal_fsync_latency_us_bucket{le=+Inf}"] == 6
    assert (found["topics_wal_fsync_latency_us_count"], found["topics_wal_fsync_latency_us_sum"]) == (6, 1_000)


def test_who_does_not_serve_makes_it_not_ready(board: Board) -> None:
    board.row("queue").set(Word.STATE, State.RECOVERING)
    assert scrape(MetricsHandlers(board, shards=2))["topics_ready"] == 0


def test_topics_have_their_block(board: Board) -> None:
    found = scrape(MetricsHandlers(board, shards=2), row("a:1"))
    assert found["topics_topic_head_seq{topic=a:1}"] == 9
    assert found["topics_topic_earliest_seq{topic=a:1}"] == 2
    assert found["topics_topic_records_live{topic=a:1}"] == 8
    assert found["topics_topic_bytes_live{topic=a:1}"] == 800
    assert found["topics_topic_metrics_truncated"] == 0


def test_the_block_is_bounded(board: Board) -> None:
    handlers = MetricsHandlers(board, shards=2)
    gather = handlers.get(ask())
    assert isinstance(gather, Gather)
    many = [row(f"t{number:05}") for number in range(limits.METRICS_TOPICS)]
    found = samples(gather.render([messages.TopicsListed(many, False), messages.TopicsListed([row("z")], False)]))
    assert sum(name.startswith("topics_topic_head_seq") for name in found) == limits.METRICS_TOPICS
    assert found["topics_topic_metrics_truncated"] == 1
    assert scrape(handlers, row("a"), more=True)["topics_topic_metrics_truncated"] == 1


def test_a_topic_that_is_being_rebuilt_is_left_out(board: Board) -> None:
    half = messages.TopicRow("b", 0, 1, 0, 0, False, 0, rebuilding=True)
    found = scrape(MetricsHandlers(board, shards=2), row("a"), half)
    assert "topics_topic_head_seq{topic=a}" in found
    assert "topics_topic_head_seq{topic=b}" not in found
    assert found["topics_topic_metrics_truncated"] == 1


def test_queues_ask_the_coordinator(board: Board) -> None:
    gather = MetricsHandlers(board, shards=2).get(ask())
    assert isinstance(gather, Gather)
    counting = gather.render([messages.TopicsListed([row("a"), row("q", queue=True)], False)])
    assert isinstance(counting, Gather)
    assert (counting.calls[0].shard, counting.calls[0].op) == (3, Op.COUNT_QUEUES)
    found = samples(counting.render([messages.QueuesCounted([messages.QueueCounts(5, 3, 1)])]))
    assert found["topics_topic_queue_ready{topic=q}"] == 5
    assert found["topics_topic_queue_in_flight{topic=q}"] == 3
    assert "topics_topic_queue_ready{topic=a}" not in found
    again = gather.render([messages.TopicsListed([row("q", queue=True)], False)])
    assert isinstance(again, Gather)
    without = samples(again.render([None]))  # the coordinator went away meanwhile
    assert "topics_topic_queue_ready{topic=q}" not in without
    assert without["topics_topic_head_seq{topic=q}"] == 9


def test_shards_that_are_away_are_left_out(board: Board) -> None:
    nobody = MetricsHandlers(board, shards=2, linked=lambda peer: False)
    assert samples(nobody.get(ask()))["topics_topic_metrics_truncated"] == 1
    one = MetricsHandlers(board, shards=2, linked=lambda peer: peer != 1).get(ask())
    assert isinstance(one, Gather)
    assert [call.shard for call in one.calls] == [0]
    assert one.tolerant
    assert samples(one.render([None]))["topics_topic_metrics_truncated"] == 1


def test_a_prefix_chooses_topics_and_a_key_its_own(board: Board) -> None:
    key = Key(b"", int(Scope.READ), ("tenant:",))
    gather = MetricsHandlers(board, shards=2).get(ask(key=key, topic="jobs*"))
    assert isinstance(gather, Gather)
    head = gather.calls[0].head
    assert (head.prefix, head.prefixes, head.touch) == ("jobs", ("tenant:",), False)


@pytest.mark.parametrize("text", ["jobs", "", "a*b*", "*a"])
def test_other_patterns_are_refused(board: Board, text: str) -> None:
    with pytest.raises(ApiError) as refused:
        MetricsHandlers(board, shards=2).get(ask(topic=text))
    assert refused.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("accept", "as_json"),
    [
        (b"application/json", True),
        (b"application/json;q=0.9, */*", True),
        (b"text/plain, application/json", False),
        (b"*/*", False),
        (b"", False),
    ],
)
def test_json_for_who_asks_for_it(board: Board, accept: bytes, as_json: bool) -> None:
    gather = MetricsHandlers(board, shards=2).get(ask(accept))
    assert isinstance(gather, Gather)
    response = gather.render([messages.TopicsListed([row("a")], False)])
    assert isinstance(response, Response)
    if not as_json:
        assert samples(response)["topics_topics"] == 7
        return
    shown = json.loads(bytes(response.body))["metrics"]
    assert shown["topics_topics"] == 7
    assert shown["topics_topic_head_seq"] == [{"topic": "a", "value": 9}]


def test_json_has_the_flat_keys_of_the_contract(board: Board) -> None:
    gather = MetricsHandlers(board, shards=2).get(ask(b"application/json"))
    assert isinstance(gather, Gather)
    response = gather.render([messages.TopicsListed([row("a")], False)])
    assert isinstance(response, Response)
    flat = json.loads(bytes(response.body))
    del flat["metrics"], flat["performance"]
    wal = flat.pop("wal")
    assert flat == {
        **{"topics": 7, "topics_ephemeral": 0, "topics_memory": 0, "topics_disk": 5, "topics_fsync": 2},
        **{"routers": 0, "records_live": 30, "bytes_live": 0, "queue_topics": 0, "queue_leases_in_flight": 7},
        **{"sse_connections": 6, "watch_sessions": 0, "ready": True, "replay_progress": 1, "uptime_ms": 0},
    }
    assert flat["ready"] is True
    assert wal == {
        **{"fsyncs": 6, "frames": 0, "batches": 0, "bytes_written": 0, "rotations": 0, "queue_depth": 10},
        **{"queue_depth_peak": 400, "submit_full_total": 2, "read_only": 0},
        **{"fsync_count": 6, "fsync_micros_total": 1_000},
    }


def test_a_tolerant_gathering_goes_on_without_what_failed() -> None:
    got: list[object] = []
    calls = [Call(shard=at, op=Op.LIST_TOPICS, head=None) for at in range(2)]
    gather = Gather(calls, lambda answers: Response(200, repr(answers).encode()), tolerant=True)
    sink = GatherSink(gather, got.append)
    sink.slot(0).finish(error_response(ApiError("shard_unavailable", "away")))
    sink.slot(1).finish(5)
    assert [response.body for response in got if isinstance(response, Response)] == [b"[None, 5]"]


def test_kinds_follow_configs() -> None:
    kinds = Kinds([])
    plain, queue = TopicConfig(), TopicConfig(type="queue", durability="fsync", durable=True)
    kinds.add(plain)
    kinds.add(queue)
    assert (kinds.by_class["disk"], kinds.by_class["fsync"], kinds.queues) == (1, 1, 1)
    kinds.change(plain, TopicConfig(durability="memory"))
    kinds.remove(queue)
    assert (kinds.by_class["disk"], kinds.by_class["memory"], kinds.by_class["fsync"], kinds.queues) == (0, 1, 0, 0)
