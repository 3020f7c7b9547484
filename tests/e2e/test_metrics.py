"""GET /v0/metrics of a real server, read with Prometheus' own parser, in both lanes.

Requests are counted for all gateways together and stay counted when one of them dies, so a scrape is compared with an
earlier one of the same server, and each test asks for what it counts.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from topics import limits

from .client import LANES, Client, Lane, Lost, unique
from .h2wire import H2Wire
from .h2ws import H2Sockets
from .keyed import PROBES, ROUTES, Route
from .queues import make_queue
from .routing import name_on
from .server import Server, eventually
from .sockets import RawSocket
from .sse import Watching
from .wire import Wire, append_request, request
from .working import Working

pytestmark = pytest.mark.e2e

Scrape = Callable[..., dict[str, float]]
Counts = dict[tuple[str, str, str], float]  # method, route, status

# Of the contract: every name, and what kind of metric it is.
GAUGES = {
    "topics_topics",
    "topics_topics_by_class",
    "topics_routers",
    "topics_records_live",
    "topics_bytes_live",
    "topics_queue_topics",
    "topics_queue_leases_in_flight",
    "topics_sse_connections",
    "topics_watch_sessions",
    "topics_ready",
    "topics_recovery_progress",
    "topics_uptime_ms",
    "topics_topic_head_seq",
    "topics_topic_earliest_seq",
    "topics_topic_records_live",
    "topics_topic_bytes_live",
    "topics_topic_queue_ready",
    "topics_topic_queue_in_flight",
    "topics_topic_metrics_truncated",
    "topics_wal_queue_depth",
    "topics_wal_queue_depth_peak",
    "topics_wal_read_only",
    "topics_disk_free_bytes",
    "topics_router_lag_records",
    "topics_cold_segments",
    "topics_cold_bytes",
    "topics_process_ring_depth_bytes",
    "topics_process_ring_high_water_bytes",
    "topics_process_loop_lag_seconds",
    "topics_process_pressure",
    "topics_process_resident_bytes",
    "topics_gateway_buffered_bytes",
    "topics_gateway_buffered_bytes_limit",
    "topics_gateway_connections",
    "topics_gateway_connections_limit",
}
COUNTERS = {
    "topics_wal_frames_total",
    "topics_wal_batches_total",
    "topics_wal_fsyncs_total",
    "topics_wal_bytes_written_total",
    "topics_wal_rotations_total",
    "topics_wal_submit_full_total",
    "topics_queue_dead_lettered_total",
    "topics_records_evicted_total",
    "topics_records_expired_total",
    "topics_http_requests_total",
    "topics_process_doorbells_total",
    "topics_process_busy_seconds_total",
    "topics_process_restarts_total",
    "topics_process_requests_total",
    "topics_gateway_refusals_total",
}
HISTOGRAMS = {"topics_wal_fsync_latency_us", "topics_http_request_duration_seconds"}
BY_PROCESS = {name for name in GAUGES | COUNTERS if name.startswith("topics_process_")}
CLASSES = {"ephemeral", "memory", "disk", "fsync"}


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


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the topics of this file alone: on a shared one TTLs of other tests change what is summed up."""
    folder = tmp_path_factory.mktemp("quiet")
    with closing(Server(folder / "data", log=folder / "log")) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def quiet_api(quiet: Server) -> Iterator[Client]:
    with quiet.client() as client:
        yield client


@pytest.fixture(params=[over_http1, over_http2], ids=["http1", "http2"])
def scrape(request: pytest.FixtureRequest, quiet: Server) -> Scrape:
    def get(query: str = "") -> dict[str, float]:
        status, content_type, body = request.param(quiet, f"/v0/metrics{query}")
        assert status == 200
        assert content_type == "text/plain; version=0.0.4; charset=utf-8"
        return parsed(body.decode())

    return get


def test_what_is_written_is_counted(quiet_api: Client, scrape: Scrape) -> None:
    topic = unique("metrics")
    before = scrape()
    quiet_api.append(topic, 1, 2, 3)
    found = scrape(f"?topic={topic}*")
    assert found[f"topics_topic_head_seq({topic})"] == 3
    assert found[f"topics_topic_earliest_seq({topic})"] == 1
    assert found[f"topics_topic_records_live({topic})"] == 3
    assert sum(name.startswith("topics_topic_head_seq") for name in found) == 1
    assert found["topics_records_live"] >= before["topics_records_live"] + 3
    assert found["topics_topics"] >= before["topics_topics"] + 1
    assert found["topics_wal_frames_total"] >= before["topics_wal_frames_total"] + 2  # the topic and its records
    assert scrape()["topics_ready"] == 1


def test_classes_and_queues_are_counted(quiet_api: Client, scrape: Scrape) -> None:
    before = scrape()
    queue = unique("metrics")
    quiet_api.put(queue, type="queue", durable=True)
    quiet_api.append(queue, "a", "b", "c")
    assert len(quiet_api.send("POST", f"/v0/topics/{queue}/claim", {"node": "w", "max": 2})["claimed"]) == 2

    found = scrape(f"?topic={queue}*")
    assert found["topics_queue_topics"] == before["topics_queue_topics"] + 1
    assert found["topics_topics_by_class(fsync)"] == before["topics_topics_by_class(fsync)"] + 1
    assert found["topics_queue_leases_in_flight"] >= 2
    assert (found[f"topics_topic_queue_ready({queue})"], found[f"topics_topic_queue_in_flight({queue})"]) == (1, 2)
    assert found["topics_wal_fsyncs_total"] > before["topics_wal_fsyncs_total"]
    assert found["topics_wal_fsync_latency_us_count"] > 0
    quiet_api.drop(queue)
    found = scrape()
    assert found["topics_queue_topics"] == before["topics_queue_topics"]
    assert found["topics_topics_by_class(fsync)"] == before["topics_topics_by_class(fsync)"]


def test_a_claim_that_dead_letters_is_counted_when_it_is_answered(quiet_api: Client, scrape: Scrape) -> None:
    queue = unique("metrics")
    quiet_api.put(queue, type="queue", max_deliveries=1, dead_letter=f"{queue}.dead")
    quiet_api.append(queue, "a", "b", "c")
    claim = partial(quiet_api.send, "POST", f"/v0/topics/{queue}/claim", {"node": "w", "max": 3})
    seqs = [job["$seq"] for job in claim()["claimed"]]
    assert quiet_api.send("POST", f"/v0/topics/{queue}/nack", {"node": "w", "seqs": seqs})["nacked"] == 3
    before = scrape()
    assert claim()["count"] == 0
    found = quiet_api.state(queue)
    assert (found["count"], found["queue"]) == (0, {"ready": 0, "in_flight": 0, "dead_lettered": 3})
    assert quiet_api.state(f"{queue}.dead")["count"] == 3
    assert scrape()["topics_queue_dead_lettered_total"] >= before["topics_queue_dead_lettered_total"] + 3


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Server]:
    """Of which nobody else loses or routes anything."""
    server = Server(tmp_path / "data", log=tmp_path / "log")
    with closing(server):
        server.wait_ready()
        yield server


def test_what_caps_and_ttl_take_is_counted(alone: Server) -> None:
    """And what a client deletes is not: that is no loss."""
    with alone.client() as api:
        api.put("capped", cap_records=5)
        api.append("capped", *range(20))
        api.append("deleted", *range(7))
        api.delete("deleted", before_seq=8)
        api.put("brief", ttl_ms=1)
        api.append("brief", 1, 2, 3)
        eventually(lambda: api.state("brief")["count"] == 0, what="they are too old")

    def lost() -> tuple[float, float]:
        found = parsed(scraped(alone))
        return found["topics_records_evicted_total"], found["topics_records_expired_total"]

    assert lost() == (15, 3)


def test_the_lag_of_a_router_is_shown(alone: Server) -> None:
    def lag() -> float:
        return parsed(scraped(alone))["topics_router_lag_records"]

    with alone.client() as api:
        api.put("dest", cap_records=1, discard="reject")
        api.append("dest", "full")
        api.put("source")
        api.send("PUT", "/v0/routers/r", {"source": "source", "dest": "dest"})
        api.append("source", *range(40))
        api.append("source", *range(2))
        eventually(lambda: lag() == 42, what="a router that can't go on")
        api.put("dest", cap_records=1_000, discard="reject")
        eventually(lambda: lag() == 0, what="one that has caught up")


def test_the_leases_log_is_no_topic(quiet_api: Client, scrape: Scrape) -> None:
    queue = unique("metrics")
    quiet_api.put(queue, type="queue")
    quiet_api.append(queue, 1)
    quiet_api.send("POST", f"/v0/topics/{queue}/claim", {"node": "w"})
    assert not [name for name in scrape() if "#" in name]


def test_json(api: Client) -> None:
    answer = api.send("GET", "/v0/metrics", headers={"Accept": "application/json"})
    assert answer.status == 200
    metrics: dict[str, Any] = answer["metrics"]
    assert metrics["topics_ready"] == 1
    assert answer["ready"] is True
    assert answer["topics"] == metrics["topics_topics"]
    assert answer["wal"]["fsync_count"] == metrics["topics_wal_fsync_latency_us_count"]
    assert {row["process"] for row in metrics["topics_process_resident_bytes"]} >= {"supervisor", "queue", "router"}


@pytest.mark.parametrize("query", ["?topic=a", "?topic=*a", "?topic="])
def test_other_patterns_are_refused(api: Client, query: str) -> None:
    answer = api.send("GET", f"/v0/metrics{query}")
    assert answer.refusal == (400, "invalid_request")


@pytest.mark.full
def test_a_scrape_goes_on_without_a_shard(tmp_path: Path) -> None:
    """It says that topics are missing, and that the server is not ready."""
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_WAL_SHARDS=2)
    with closing(server):
        server.wait_ready()
        eventually(lambda: given_up(server, "shard-1"), every_s=0.05, what="its end")
        eventually(lambda: parsed(scraped(server))["topics_topic_metrics_truncated"] == 1, what="a block that is cut")
        assert parsed(scraped(server))["topics_ready"] == 0


def given_up(server: Server, name: str) -> bool:
    """Whether it is not started any more; until then each of its lives is ended."""
    (line,) = [line for line in server.ps().processes if line.name == name]
    if line.state == "failed":
        return True
    if line.pid is not None:
        try:
            os.kill(line.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the next life takes a moment to begin
    return False


def scraped(server: Server) -> str:
    status, _, body = over_http1(server, "/v0/metrics")
    assert status == 200
    return body.decode()


# --- the exposition ----------------------------------------------------------------------------------

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(?:\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? '
    r"([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|Inf|NaN))",
    re.I,
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
_SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def check_exposition(text: str) -> dict[str, str]:
    """What `promtool check metrics` would look at, line by line; the type of every family by its name."""
    types: dict[str, str] = {}
    helps: set[str] = set()
    seen: set[tuple[str, str]] = set()
    current = ""
    assert text.endswith("\n")
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            name, _, meaning = line.removeprefix("# HELP ").partition(" ")
            assert name not in helps, f"HELP of {name} twice"
            assert meaning, line
            helps.add(name)
            current = name
        elif line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert name not in types, f"TYPE of {name} twice"
            assert name == current, f"the TYPE of {name} does not follow its HELP"
            assert kind in _SUFFIXES, line
            assert (kind == "counter") == name.endswith("_total"), line
            types[name] = kind
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample is not None, line
            name, labels, value = sample.groups()
            assert name in {current + suffix for suffix in _SUFFIXES[types[current]]}, f"{line} among {current}"
            assert (name, labels or "") not in seen, f"twice: {line}"
            seen.add((name, labels or ""))
            assert float(value) >= 0, line  # nothing here is ever negative
            found = [label for label, _ in _LABEL.findall(labels or "")]
            assert len(set(found)) == len(found), line
    assert set(types) == helps
    return types


def check_histograms(text: str) -> int:
    """Buckets add up; how many histograms there are."""
    found = 0
    for family in text_string_to_metric_families(text):
        if family.type != "histogram":
            continue
        rows: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for sample in family.samples:
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            row = rows.setdefault(labels, {"buckets": []})
            if sample.name.endswith("_bucket"):
                row["buckets"].append((float(sample.labels["le"]), sample.value))
            else:
                row[sample.name.rpartition("_")[2]] = sample.value
        for labels, row in rows.items():
            bounds = [bound for bound, _ in row["buckets"]]
            counts = [count for _, count in row["buckets"]]
            assert bounds == sorted(set(bounds)), labels
            assert bounds[-1] == float("inf"), labels
            assert counts == sorted(counts), labels
            assert counts[-1] == row["count"], labels
            assert row["sum"] >= 0, labels
            assert (row["sum"] == 0) or row["count"] > 0, labels
            found += 1
    return found


def touch_everything(server: Server, lane: Lane) -> None:
    """So that nothing is missing for want of something to show."""
    with server.client(lane) as api, Watching(server, lane) as watching:
        name = unique("everything")
        api.put(name, durable=True)
        api.append(name, 1)
        queue = make_queue(api)
        queue.produce(1)
        queue.claim()
        watching.follow(name).wait_caught_up(name)


@pytest.mark.parametrize("lane", LANES)
def test_the_text_is_one_that_prometheus_takes(server: Server, lane: Lane) -> None:
    touch_everything(server, lane)
    status, _, body = (over_http1 if lane == "http1" else over_http2)(server, "/v0/metrics")
    assert status == 200
    types = check_exposition(body.decode())
    assert {name for name, kind in types.items() if kind == "gauge"} >= GAUGES
    assert {name for name, kind in types.items() if kind == "counter"} >= COUNTERS
    assert {name for name, kind in types.items() if kind == "histogram"} >= HISTOGRAMS
    assert all(name.startswith("topics_") for name in types)
    assert check_histograms(body.decode()) > 2


def test_every_name_has_a_value(server: Server) -> None:
    touch_everything(server, "http1")
    found = {re.sub(r"\(.*", "", name) for name in parsed(scraped(server))}
    assert found >= GAUGES | COUNTERS
    assert found >= {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}


def test_the_json_form_has_the_same_names(server: Server) -> None:
    touch_everything(server, "http1")
    with server.client() as api:
        metrics = api.send("GET", "/v0/metrics", headers={"Accept": "application/json"})["metrics"]
    names = {re.sub(r"\(.*", "", name) for name in parsed(scraped(server))}
    assert set(metrics) == names
    assert {row["class"] for row in metrics["topics_topics_by_class"]} == CLASSES


@pytest.mark.full
def test_metrics_of_a_server_that_is_not_ready(tmp_path: Path) -> None:
    """A queue process that is given up: what the page says is said."""
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_CALL_TIMEOUT_MS=500, TOPICS_HEARTBEAT_MS=60_000)
    with closing(server):
        server.wait_ready()
        eventually(lambda: given_up(server, "queue"), every_s=0.05, what="its end")
        assert parsed(scraped(server))["topics_ready"] == 0
        check_exposition(scraped(server))


# --- requests ----------------------------------------------------------------------------------------


def counts(text: str) -> Counts:
    found: Counts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "topics_http_requests_total":
                assert sample.labels.keys() == {"method", "route", "status"}
                labels = sample.labels
                found[labels["method"], labels["route"], labels["status"]] = sample.value
    return found


def durations(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """By method and route: the count, the sum, and how many took no longer than so many seconds."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name == "topics_http_request_duration_seconds":
            for sample in family.samples:
                labels = sample.labels
                part = labels.get("le") or sample.name.rpartition("_")[2]
                found.setdefault((labels["method"], labels["route"]), {})[part] = sample.value
    return found


def since(before: Counts, text: str) -> Counts:
    """What was counted meanwhile, without the scrapes themselves."""
    now = counts(text)
    assert all(now.get(labels, 0) >= count for labels, count in before.items()), "a counter went back"
    grown = {labels: count - before.get(labels, 0) for labels, count in now.items()}
    return {labels: count for labels, count in grown.items() if count and labels[1] != "/v0/metrics"}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two gateways, whose every request is a test's own."""
    folder = tmp_path_factory.mktemp("twins")
    server = Server(folder / "data", log=folder / "log", TOPICS_GATEWAYS=2)
    with closing(server):
        server.wait_ready()
        yield server


def template(path: str) -> str:
    path = path.partition("?")[0].replace("{name}", ":topic" if "/topics/" in path else ":router")
    return re.sub(r"/wid_.*", "/:wid", path)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("route", [route for route in ROUTES if route.path != "/v0/metrics"], ids=str)
def test_every_route_is_counted_as_itself(twins: Server, lane: Lane, route: Route) -> None:
    """Under its template, so that names of topics never become labels. HEAD is the GET that it stands for."""
    before = counts(scraped(twins))
    name = unique("in:counted")
    path = route.path.replace("{name}", name)
    with twins.client(lane) as api:
        api.put("in:watched")
        statuses = [head_status(twins, lane, path)] if route.method == "HEAD" else []
        statuses += [] if statuses else [api.send(route.method, path, route.body).status for _ in range(3)]
    expected = Counter(
        ("GET" if route.method == "HEAD" else route.method, template(route.path), str(status)) for status in statuses
    )
    made = "PUT", "/v0/topics/:topic"
    found = since(before, scraped(twins))
    grown = {labels: count for labels, count in found.items() if labels[:2] != made or route.method == "PUT"}
    if (route.method, template(route.path)) == made:
        assert sum(grown.values()) == 4
        assert set(grown) == {(*made, "200"), (*made, "201")}
    else:
        assert {labels: count for labels, count in grown.items() if labels[:2] != made} == expected


def head_status(server: Server, lane: Lane, path: str) -> int:
    if lane == "http1":
        with Wire(server.port) as wire:
            wire.send(request("HEAD", path))
            return wire.head()[0]
    with H2Wire(server.port) as wire2:
        return int(wire2.finish(wire2.open("HEAD", path, end=True)).headers[":status"])


@pytest.mark.parametrize("over", [over_http1, over_http2], ids=LANES)
def test_scrapes_are_counted_too(twins: Server, over: Callable[..., tuple[int, str, bytes]]) -> None:
    """One that is under way is not among those it shows."""
    scrape = ("GET", "/v0/metrics", "200")
    before = counts(scraped(twins)).get(scrape, 0)
    for _ in range(3):
        over(twins, "/v0/metrics")
    assert counts(scraped(twins))[scrape] == before + 4


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("path", PROBES)
def test_probes_are_counted_by_the_name_they_were_asked_by(twins: Server, lane: Lane, path: str) -> None:
    before = counts(scraped(twins))
    with twins.client(lane) as api:
        assert api.get(path).status == 200
    assert since(before, scraped(twins)) == {("GET", path, "200"): 1}


@pytest.mark.parametrize("lane", LANES)
def test_what_is_no_route_is_counted_as_none(twins: Server, lane: Lane) -> None:
    """Whatever strangers ask for, it makes no new labels."""
    before = counts(scraped(twins))
    with twins.client(lane) as api:
        for path in ("/", "/v0", "/v0/nothing", "/v0/topics/a/b/c", f"/{unique()}", "/v0/topics/-bad"):
            api.get(path)
        api.send("PATCH", "/v0/topics/a", {})
        api.send("DELETE", "/v0/health")
    found = since(before, scraped(twins))
    assert {labels[1] for labels in found} == {"none"}
    assert {labels[2]: count for labels, count in found.items()} == {"404": 5, "400": 1, "405": 2}
    assert len({labels[0] for labels in found}) == 1


def test_framing_that_is_refused_is_counted(twins: Server) -> None:
    before = counts(scraped(twins))
    for raw in (b"\x16\x03\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", request(path="/" + "a" * 9_000)):
        with Wire(twins.port) as wire:
            wire.send(raw)
            wire.head()
    found = since(before, scraped(twins))
    assert {labels[1:]: count for labels, count in found.items()} == {("none", "400"): 2, ("none", "414"): 1}


@pytest.mark.parametrize("lane", LANES)
def test_statuses_are_told_apart(twins: Server, lane: Lane) -> None:
    name = unique("statuses")
    before = counts(scraped(twins))
    with twins.client(lane) as api:
        api.append(name, 1)
        api.append(name, 1)
        api.append(name, 1, node="n")
        api.append(name, 1, expected_head=7)
        api.send("POST", f"/v0/topics/{name}", content=b"{")
        api.send("POST", f"/v0/topics/{name}", content=b"{}", headers={"Content-Type": "text/plain"})
        api.send("POST", f"/v0/topics/{unique()}", {"records": [{"data": 1}], "create": False})
        api.send("POST", f"/v0/topics/{name}", {"records": [{"data": 1}]}, headers={"Host": "evil.example"})
    found = since(before, scraped(twins))
    assert {labels[:2] for labels in found} == {("POST", "/v0/topics/:topic")}
    by_status = {labels[2]: count for labels, count in found.items()}
    assert by_status["201"] >= 1
    assert by_status["415"] == 1
    assert by_status["400"] >= 1
    assert by_status["421"] == 1
    assert sum(by_status.values()) == 8


def test_appends_of_a_pipeline_are_each_counted(twins: Server) -> None:
    name = unique("pipeline")
    before = counts(scraped(twins))
    with Wire(twins.port) as wire:
        wire.send(append_request(name) * 100)
        for _ in range(100):
            wire.answer()
    posts = ("POST", "/v0/topics/:topic")
    assert since(before, scraped(twins)) == {(*posts, "200"): 99, (*posts, "201"): 1}


def test_streams_are_counted_when_they_open(twins: Server) -> None:
    before = counts(scraped(twins))
    for lane in LANES:
        with Watching(twins, lane) as watching, Working(twins, lane) as working:
            watching.client.put("streamed")
            watching.follow("streamed")
            working.open(working.queue())
    with RawSocket(twins.port), H2Sockets(twins.port) as wire:
        wire.socket()
    found = since(before, scraped(twins))
    assert found["GET", "/v0/watch/:wid", "200"] == 2
    assert found["GET", "/v0/topics/:topic/work", "200"] == 2
    assert (found["GET", "/v0/ws", "101"], found["GET", "/v0/ws", "200"]) == (1, 1)


def test_sessions_and_streams_are_counted_when_they_are_answered(alone: Server) -> None:
    def figures() -> tuple[float, float]:
        found = parsed(scraped(alone))
        return found["topics_watch_sessions"], found["topics_sse_connections"]

    with ExitStack() as stack:
        sessions = streams = 0
        for lane in LANES:
            watching, working = stack.enter_context(Watching(alone, lane)), stack.enter_context(Working(alone, lane))
            watching.client.put("counted")
            queue = working.queue()
            for _ in range(3):  # one that is only just in time by chance is not three times
                watching.follow("counted")
                sessions, streams = sessions + 1, streams + 1
                assert figures() == (sessions, streams)
                working.open(queue)
                streams += 1
                assert figures() == (sessions, streams)


@pytest.mark.parametrize("lane", LANES)
def test_durations_are_those_of_requests(twins: Server, lane: Lane) -> None:
    diff = ("POST", "/v0/topics/:topic/diff")
    with twins.client(lane) as api:
        api.put("timed")
        api.diff("timed")
        before = durations(scraped(twins))[diff]
        api.diff("timed", 0, wait_ms=400)
        api.diff("timed")
    after = durations(scraped(twins))[diff]
    assert after["count"] == before["count"] + 2
    assert 0.4 <= after["sum"] - before["sum"] < 5
    quick = max([bound for bound in after if re.fullmatch(r"[0-9.]+", bound) and float(bound) < 0.4], key=float)
    assert 0.1 < float(quick) < 0.4
    assert after[quick] - before[quick] <= 1  # the one that waited is in a slower bucket
    assert after["+Inf"] - before["+Inf"] == 2


def test_there_are_as_many_durations_as_answers(twins: Server) -> None:
    for lane in LANES:
        touch_everything(twins, lane)
    text = scraped(twins)
    answers: Counter[tuple[str, str]] = Counter()
    for (method, route, _), count in counts(text).items():
        answers[method, route] += int(count)
    assert {labels: row["count"] for labels, row in durations(text).items()} == answers
    assert all(row["sum"] > 0 for row in durations(text).values())


# --- over gateways and their lives -------------------------------------------------------------------


def served_by(server: Server, gateway: int) -> Client:
    """A connection to that gateway: its ids say whose they are."""

    def find() -> Client | None:
        client = server.client()
        try:
            if client.get("/v0/health").headers["x-request-id"].startswith(f"{gateway}."):
                return client
        except Lost:
            pass
        client.close()
        return None

    found = eventually(find, what=f"a connection to gateway-{gateway}")
    assert found is not None
    return found


def test_a_scrape_of_one_gateway_counts_the_requests_of_all(twins: Server) -> None:
    lists = ("GET", "/v0/topics", "200")
    with served_by(twins, 0) as first, served_by(twins, 1) as second:

        def seen(by: Client) -> float:
            rows = by.send("GET", "/v0/metrics", headers={"Accept": "application/json"})["metrics"]
            return sum(
                float(row["value"])
                for row in rows["topics_http_requests_total"]
                if (row["method"], row["route"], row["status"]) == lists
            )

        before = seen(first)
        assert seen(second) == before
        for _ in range(7):
            first.list()
        for _ in range(5):
            second.list()
        assert seen(first) == seen(second) == before + 12


def monotonic(text: str) -> dict[str, float]:
    """What may never go back while the server lives."""
    kept = ("topics_http_", "topics_wal_")
    ends = ("_total", "_count", "_sum", "_bucket")
    return {
        name: value
        for name, value in parsed(text).items()
        if name.startswith(kept) and name.partition("(")[0].endswith(ends)
    }


@pytest.mark.full
@pytest.mark.parametrize(
    "victims", [["gateway-0", "gateway-1", "gateway-0"], ["shard-0", "shard-1"]], ids=["gateways", "shards"]
)
def test_counters_do_not_go_back_when_a_process_dies(tmp_path: Path, victims: list[str]) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_GATEWAYS=2)
    over = threading.Event()
    with closing(server):
        server.wait_ready()
        threads = [threading.Thread(target=keep_asking, args=(server, lane, over)) for lane in (*LANES, *LANES)]
        for thread in threads:
            thread.start()
        last: dict[str, float] = {}
        try:
            for name in victims:
                eventually(lambda: enough(attempt(server)), what="something that is counted")
                pid = server.signal_child(name)
                deadline = time.monotonic() + 30
                while (server.pids().get(name, pid) == pid or not is_ready(server)) and time.monotonic() < deadline:
                    if text := attempt(server):
                        last = not_less(last, monotonic(text))
                last = not_less(last, monotonic(scraped(server)))
        finally:
            over.set()
            for thread in threads:
                thread.join()
        last = not_less(last, monotonic(scraped(server)))
    assert len(last) > 30


def enough(text: str | None) -> bool:
    """To lose: answers by all gateways, and frames in the logs of all shards."""
    if text is None or len(counts(text)) < 3:
        return False
    requests = by_process(text, "topics_process_requests_total")
    return parsed(text)["topics_wal_frames_total"] > 50 and min(requests["shard-0"], requests["shard-1"]) > 20


def keep_asking(server: Server, lane: Lane, over: threading.Event) -> None:
    names = [name_on(shard, "survivor") for shard in (0, 1)]
    while not over.is_set():
        try:
            with server.client(lane) as api:
                for name in names:
                    api.append(name, 1)
                api.get("/v0/nothing")
        except (Lost, OSError):
            pass


def attempt(server: Server) -> str | None:
    """A scrape, if whoever accepts it lives long enough."""
    try:
        return scraped(server)
    except (OSError, http.client.HTTPException):
        return None


def is_ready(server: Server) -> bool:
    return all(line.state == "ready" for line in server.ps().processes)


def not_less(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    back = {name: (value, now.get(name)) for name, value in before.items() if now.get(name, -1) < value}
    assert not back, f"went back: {back}"
    return now


def test_requests_are_not_counted_where_that_is_not_wanted(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_REQUEST_METRICS=0)
    with closing(server):
        server.wait_ready()
        for lane in LANES:
            touch_everything(server, lane)
        eventually(lambda: parsed(scraped(server))["topics_wal_frames_total"] > 0, what="what is counted all the same")
        text = scraped(server)
    check_exposition(text)
    found = parsed(text)
    assert not [name for name in found if name.startswith("topics_http_")]
    assert found["topics_topics"] >= 2


# --- processes ---------------------------------------------------------------------------------------


def by_process(text: str, name: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                assert sample.labels.keys() == {"process"}
                found[sample.labels["process"]] = sample.value
    return found


def test_every_process_has_its_figures(twins: Server) -> None:
    text = scraped(twins)
    everyone = set(twins.pids())
    assert everyone == {"supervisor", "gateway-0", "gateway-1", "router", "queue", "shard-0", "shard-1"}
    for name in BY_PROCESS:
        found = by_process(text, name)
        assert found.keys() == everyone, name
    for name, pid in twins.pids().items():
        status = Path(f"/proc/{pid}/status").read_text()
        resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1_024  # type: ignore[index]
        shown = by_process(text, "topics_process_resident_bytes")[name]
        assert resident / 2 < shown < resident * 2, name


def test_connections_are_counted_where_they_are_open(twins: Server) -> None:
    """Whichever gateway is asked; when all have left nobody is there, though nothing wakes the gateway to look."""

    def connections() -> float:
        found = parsed(scraped(twins))
        return sum(found[f"topics_gateway_connections(gateway-{number})"] for number in range(2))

    assert parsed(scraped(twins))["topics_gateway_connections_limit(gateway-1)"] > 16
    eventually(lambda: connections() == 1, what="the scrape alone")
    with ExitStack() as stack:
        for _ in range(6):
            wire = stack.enter_context(Wire(twins.port))
            assert wire.ask(request()).status == 200
            h2 = stack.enter_context(H2Wire(twins.port))
            h2.finish(h2.ask("GET", "/v0/health"))
        eventually(lambda: connections() == 13, what="twelve, and the scrape")
    eventually(lambda: connections() == 1, what="the scrape alone")


def test_work_is_seen_in_the_figures_of_who_does_it(twins: Server) -> None:
    def figures() -> dict[str, dict[str, float]]:
        text = scraped(twins)
        return {name: by_process(text, name) for name in BY_PROCESS}

    before, began = figures(), time.monotonic()
    for lane in LANES:
        with twins.client(lane) as api:
            for _ in range(50):
                api.append(unique("worked"), "x" * 1_000)

    def grown() -> bool:
        after = figures()
        rows = ("topics_process_doorbells_total", "topics_process_busy_seconds_total", "topics_process_requests_total")
        ring = after["topics_process_ring_high_water_bytes"]
        return all(
            max(after[name][process] - before[name][process] for process in after[name] if process.startswith(who)) > 0
            for name in rows
            for who in ("gateway-", "shard-")
        ) and all(ring[shard] >= 1_000 for shard in ("shard-0", "shard-1"))

    eventually(grown, what="figures that grow")
    elapsed = time.monotonic() - began
    after = figures()
    for process, busy in after["topics_process_busy_seconds_total"].items():
        spent = busy - before["topics_process_busy_seconds_total"][process]
        assert 0 <= spent <= elapsed + 1, process
    assert after["topics_process_busy_seconds_total"]["supervisor"] == 0  # it has no such loop


def test_a_long_round_is_lag_and_passes(twins: Server) -> None:
    """Ten thousand records at once take a gateway a while; a moment later that is forgotten."""
    body = json.dumps({"records": [{"data": "x" * 500, "tag": "t"}] * 10_000}).encode()

    def lag(text: str) -> float:
        return max(
            seconds
            for process, seconds in by_process(text, "topics_process_loop_lag_seconds").items()
            if process.startswith("gateway-")
        )

    def pressed() -> float:
        with twins.client() as api:
            assert api.send("POST", "/v0/topics/lag", content=body).status in (200, 201)
        return lag(small_scrape())

    def small_scrape() -> str:
        """Without the block about topics, which is work by itself."""
        return over_http1(twins, "/v0/metrics?topic=none-of-them*")[2].decode()

    peak = eventually(lambda: (found := pressed()) > 0.03 and found, what="a lag")
    assert peak < 30
    eventually(lambda: lag(small_scrape()) < peak / 2, every_s=0.2, what="the end of the lag")
    busy = by_process(scraped(twins), "topics_process_busy_seconds_total")
    assert sum(seconds for process, seconds in busy.items() if process.startswith("gateway-")) > 0.01


def test_restarts_are_counted(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "log")
    with closing(server):
        server.wait_ready()
        assert set(by_process(scraped(server), "topics_process_restarts_total").values()) == {0}
        for _ in range(2):
            pid = server.signal_child("router")
            eventually(lambda pid=pid: server.pids().get("router", pid) != pid)
            server.wait_ready()
        found = by_process(scraped(server), "topics_process_restarts_total")
        assert found.pop("router") == 2
        assert set(found.values()) == {0}


def test_a_calm_server_says_so(twins: Server) -> None:
    eventually(
        lambda: set(by_process(scraped(twins), "topics_process_pressure").values()) == {0}, what="no pressure anywhere"
    )
    found = by_process(scraped(twins), "topics_process_ring_depth_bytes")
    assert max(found.values()) < limits.RING_BYTES


def test_pressure_is_shown(tmp_path: Path) -> None:
    """A gateway for which a millisecond is long, and requests that take longer."""
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_PRESSURE_LAG_MS=1)
    body = json.dumps({"records": [{"data": "x" * 100, "tag": "t"}] * 1_000}).encode()

    def pressed() -> bool:
        with server.client() as api:
            api.send("POST", "/v0/topics/pressed", content=body)
        levels = by_process(scraped(server), "topics_process_pressure")
        assert set(levels.values()) <= {0, 1, 2, 3, 4}
        return any(level > 0 for level in levels.values())

    with closing(server):
        server.wait_ready()
        eventually(pressed, every_s=0.05, what="pressure")


# --- the disk ----------------------------------------------------------------------------------------


def test_free_space_is_that_of_the_data_folder(twins: Server) -> None:
    found = os.statvfs(twins.data_dir)
    shown = parsed(scraped(twins))["topics_disk_free_bytes"]
    assert shown == pytest.approx(found.f_bavail * found.f_frsize, rel=0.2)
    assert parsed(scraped(twins))["topics_wal_read_only"] == 0


def test_too_little_space_makes_the_log_read_only(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_MIN_FREE_BYTES=2**40)
    found = os.statvfs(tmp_path)
    if found.f_bavail * found.f_frsize > 2**40:
        pytest.skip("this disk has more free space than can be asked for")
    with closing(server):
        server.wait_ready()
        eventually(lambda: parsed(scraped(server))["topics_wal_read_only"] == 1, what="what the disk watch says")
