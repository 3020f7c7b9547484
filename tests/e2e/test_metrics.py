"""GET /v0/metrics of a real server, read with Prometheus' own parser, in both lanes."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from topics import limits

from .client import Client, unique
from .h2wire import H2Wire
from .server import Server, eventually

pytestmark = pytest.mark.e2e

Scrape = Callable[..., dict[str, float]]


def parsed(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name}({labels})" if labels else sample.name] = sample.value
    return found


def over_http1(server: Server, path: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()
    finally:
        connection.close()


def over_http2(server: Server, path: str) -> tuple[int, str, bytes]:
    with H2Wire(server.port) as wire:
        stream = wire.finish(wire.open("GET", path, end=True))
        return int(stream.headers[":status"]), stream.headers["content-type"], stream.body


@pytest.fixture(params=[over_http1, over_http2], ids=["http1", "http2"])
def scrape(request: pytest.FixtureRequest, server: Server) -> Scrape:
    def get(query: str = "") -> dict[str, float]:
        status, content_type, body = request.param(server, f"/v0/metrics{query}")
        assert status == 200
        assert content_type == "text/plain; version=0.0.4; charset=utf-8"
        return parsed(body.decode())

    return get


def test_what_is_written_is_counted(api1: Client, scrape: Scrape) -> None:
    topic = unique("metrics")
    before = scrape()
    api1.append(topic, 1, 2, 3)
    found = scrape(f"?topic={topic}*")
    assert found[f"topics_topic_head_seq({topic})"] == 3
    assert found[f"topics_topic_earliest_seq({topic})"] == 1
    assert found[f"topics_topic_records_live({topic})"] == 3
    assert sum(name.startswith("topics_topic_head_seq") for name in found) == 1
    eventually(lambda: scrape()["topics_records_live"] >= before["topics_records_live"] + 3, what="the page")
    assert scrape()["topics_topics"] >= before["topics_topics"] + 1
    assert scrape()["topics_ready"] == 1


def test_classes_and_queues_are_counted(api1: Client, scrape: Scrape) -> None:
    before = scrape()
    queue = unique("metrics")
    api1.put(queue, type="queue", durable=True)
    api1.append(queue, "a", "b", "c")
    assert len(api1.send("POST", f"/v0/topics/{queue}/claim", {"node": "w", "max": 2})["claimed"]) == 2

    def counted() -> bool:
        found = scrape(f"?topic={queue}*")
        return (
            found["topics_queue_topics"] == before["topics_queue_topics"] + 1
            and found["topics_topics_by_class(fsync)"] == before["topics_topics_by_class(fsync)"] + 1
            and found["topics_queue_leases_in_flight"] >= 2
        )

    eventually(counted, what="the page")
    found = scrape(f"?topic={queue}*")
    assert (found[f"topics_topic_queue_ready({queue})"], found[f"topics_topic_queue_in_flight({queue})"]) == (1, 2)
    assert found["topics_wal_fsyncs_total"] > before["topics_wal_fsyncs_total"]
    assert found["topics_wal_fsync_latency_us_count"] > 0
    api1.drop(queue)
    eventually(lambda: scrape()["topics_queue_topics"] == before["topics_queue_topics"], what="one queue less")


def test_the_leases_log_is_no_topic(api1: Client, scrape: Scrape) -> None:
    queue = unique("metrics")
    api1.put(queue, type="queue")
    api1.append(queue, 1)
    api1.send("POST", f"/v0/topics/{queue}/claim", {"node": "w"})
    assert not [name for name in scrape() if "#" in name]


def test_json(api: Client) -> None:
    answer = api.send("GET", "/v0/metrics", headers={"Accept": "application/json"})
    assert answer.status == 200
    metrics: dict[str, Any] = answer["metrics"]
    assert metrics["topics_ready"] == 1
    assert {row["process"] for row in metrics["topics_process_resident_bytes"]} >= {"supervisor", "queue", "router"}


@pytest.mark.parametrize("query", ["?topic=a", "?topic=*a", "?topic="])
def test_other_patterns_are_refused(api: Client, query: str) -> None:
    answer = api.send("GET", f"/v0/metrics{query}")
    assert answer.refusal == (400, "invalid_request")


def test_a_scrape_goes_on_without_a_shard(tmp_path: Path) -> None:
    """It says that topics are missing, and that the server is not ready."""
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_WAL_SHARDS=2)
    with closing(server):
        server.wait_ready()
        for _ in range(limits.RESTARTS_PER_MINUTE + 1):  # then it is given up
            eventually(lambda: killed(server, "shard-1"), what="its end")
        eventually(lambda: parsed(scraped(server))["topics_topic_metrics_truncated"] == 1, what="a block that is cut")
        assert parsed(scraped(server))["topics_ready"] == 0


def killed(server: Server, name: str) -> bool:
    """Whether there was one to kill: the next life takes a moment to begin."""
    try:
        server.signal_child(name)
    except ProcessLookupError:
        return False
    return True


def scraped(server: Server) -> str:
    status, _, body = over_http1(server, "/v0/metrics")
    assert status == 200
    return body.decode()
