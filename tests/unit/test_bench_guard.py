"""The lines about the guard: the generator against a stand-in that can be told to misbehave (this file, run as a
program), the sides and the lines against real servers, and the arithmetic."""

import itertools
import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import BenchFailed, table
from benchmarks.figures import Figures, line
from benchmarks.generators import payload
from benchmarks.generators.scrapes import Scraped, ScrapeJob, drive, run_apart
from benchmarks.guard import KEYS, Guarded, GuardMeasurement, delayed_ms, kept, often, scrape_s, scrapes_of, signed
from benchmarks.measure import Pace
from benchmarks.scenarios import BY_NAME

pytestmark = pytest.mark.full

QUICK = Pace(rounds=1, seconds=0.3, warm_s=0.05)
STAND_IN = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", sys.executable, __file__]
STALL_S = 0.4
SETTINGS = {"TOPICS_WAL_SHARDS": "1"}  # fewer processes to wait for


# --- the stand-in -----------------------------------------------------------------------------------------


class StandIn:
    """One topic for all names, one request at a time; a scrape may keep everybody else waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._head = 0
        self._fault = os.environ.get("STAND_IN_FAULT", "")

    def serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        Path(os.environ["TOPICS_PORT_FILE"]).write_text(str(listener.getsockname()[1]))
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        while request := stream.readline().split():
            length = 0
            while (header := stream.readline()) != b"\r\n":
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = stream.read(length)
            status, answer = b"200 OK", b"{}"
            with self._lock:
                if request[1] == b"/v0/metrics":
                    if self._fault == "closes":
                        connection.shutdown(socket.SHUT_RDWR)
                        return
                    if self._fault == "refuses":
                        status = b"401 Unauthorized"
                    if self._fault == "stalls":
                        time.sleep(STALL_S)
                elif request[0] == b"POST":
                    self._head += body.count(b'"data"') - (self._fault == "forgets" and self._head == 0)
                elif request[0] == b"GET":
                    # All streams are one here, and the bench adds up four of them.
                    head = self._head if b"bench-0" in request[1] else 0
                    answer = json.dumps({"head_seq": head}).encode()
            connection.sendall(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(answer), answer))


@pytest.fixture
def make_side(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    made: list[Guarded] = []

    def make(*, command: list[str] | None = None, key: str | None = None, **settings: str) -> Guarded:
        side = Guarded(name="topics", settings=SETTINGS | settings, key=key, parent=tmp_path, command=command)
        made.append(side)
        side.start()
        side.declare()
        return side

    try:
        yield make
    finally:
        for side in made:
            side.close()
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def measurement(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GuardMeasurement]:
    yield GuardMeasurement(
        pace=QUICK, tell=lambda text: None, parent=tmp_path, with_redis=False, command=getattr(request, "param", None)
    )
    assert list(tmp_path.iterdir()) == []


def scrape_job(side: Guarded, *, connections: int = 2, rate: float = 0.0, **changes: object) -> ScrapeJob:
    job = side.scrape_job(side.append_job(connections=connections, batch=1, record_bytes=80), rate=rate)
    return msgspec.structs.replace(job, **changes)


# --- the generator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 100.0])
def test_appends_go_on_beside_scrapes(make_side: Callable[..., Guarded], rate: float) -> None:
    side = make_side(command=STAND_IN)
    found = run_apart(scrape_job(side, rate=rate, scrapes_at=(0.1, 0.3), warm_s=0.1, seconds=0.5))
    assert 0 < found.requests < found.acknowledged == side.stored()
    assert found.wall_s >= 0.5
    assert len(found.scrapes_ns) == 2
    assert all(0 < time_ns < 1e10 for time_ns in found.scrapes_ns)
    if rate:
        assert found.acknowledged <= 0.7 * rate  # of the warm-up and the window together, and a late end
        assert found.requests <= len(found.times_ns) <= found.acknowledged
        assert all(0 < time_ns < 1e10 for time_ns in found.times_ns)


def test_without_scrapes_nobody_scrapes(make_side: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "closes")
    found = drive(scrape_job(make_side(command=STAND_IN), rate=100, seconds=0.2))
    assert found.scrapes_ns == []
    assert found.requests > 0


def test_everyone_who_was_kept_waiting_is_counted(
    make_side: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "stalls")
    side = make_side(command=STAND_IN)
    found = drive(scrape_job(side, connections=2, rate=200, scrapes_at=(0.2,), seconds=0.4 + STALL_S))
    assert [time_ns >= STALL_S * 1e9 for time_ns in found.scrapes_ns] == [True]
    # Two were under way; forty more were due in the first half of the stall, and waited for the other half.
    waited = [time_ns for time_ns in found.times_ns if time_ns > STALL_S * 1e9 / 2]
    assert len(waited) > 20
    assert side.stored() == found.acknowledged


@pytest.mark.parametrize(
    ("fault", "complaint"), [("closes", "closed the connection that scrapes"), ("refuses", "not a success")]
)
@pytest.mark.parametrize("rate", [0.0, 100.0])
def test_a_scrape_that_fails_stops_the_run(
    make_side: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch, fault: str, complaint: str, rate: float
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    job = scrape_job(make_side(command=STAND_IN), rate=rate, scrapes_at=(0.0,), seconds=0.2)
    with pytest.raises(BenchFailed, match=complaint):
        run_apart(job)


# --- real servers -----------------------------------------------------------------------------------------


def get(side: Guarded, path: str, key: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{side.port}{path}")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_guarded_server_wants_one_of_the_keys_and_counts(
    make_side: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPICS_API_KEYS_FILE", "/there/is/no/such/file")  # of the caller, who means another server
    side = make_side(key=KEYS[-1], TOPICS_API_KEYS=",".join(KEYS), TOPICS_REQUEST_METRICS="1")
    found = drive(scrape_job(side, scrapes_at=(0.0,), seconds=0.2))
    assert side.stored() == found.acknowledged
    assert get(side, "/v0/topics/bench-0")[0] == 401
    assert get(side, "/v0/topics/bench-0", "bench-key-99")[0] == 401
    assert {get(side, "/v0/topics/bench-0", key)[0] for key in KEYS} == {200}
    status, metrics = get(side, "/v0/metrics", KEYS[0])
    assert status == 200
    counted = 'topics_http_requests_total{method="POST",route="/v0/topics/:topic",status="200"}'
    assert counted in metrics.decode()


def test_topics_are_made_by_the_batch_and_counted(make_side: Callable[..., Guarded]) -> None:
    side = make_side()
    before = side.topics()
    side.fill_topics(250)
    assert side.topics() == before + 300
    assert side.stored() == 0  # none of them is one that is appended to later


def test_topics_that_are_not_there_stop_the_run(
    make_side: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make_side()
    monkeypatch.setattr(side, "topics", lambda: 99)
    with pytest.raises(BenchFailed, match="100 topics were made, and the metrics say 99"):
        side.fill_topics(100)


@pytest.mark.parametrize("name", ["guard-c16", "scrape", "scrape-appends"])
def test_a_line_of_real_servers(measurement: GuardMeasurement, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TOPICS_WAL_SHARDS", "1")
    scenario = msgspec.structs.replace(BY_NAME[name], records=min(BY_NAME[name].records, 200), rate=100)
    found = measurement.run(scenario)
    assert found.met is not None
    assert found.ratio is None
    assert len(found.ours.slices) == {"guard-c16": 4, "scrape": 1, "scrape-appends": 1}[name]
    assert len(table.cells(found)) == len(table.COLUMNS)


@pytest.mark.parametrize("measurement", [STAND_IN], indirect=True)
def test_other_lines_are_measured_as_ever(measurement: GuardMeasurement) -> None:
    found = measurement.run(BY_NAME["latency"])
    assert found.name == "latency"
    assert found.ours.value > 0


@pytest.mark.parametrize("measurement", [STAND_IN], indirect=True)
def test_a_server_that_loses_a_record_stops_the_run(
    measurement: GuardMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "forgets")
    with pytest.raises(BenchFailed, match=r"guarded acknowledged .* and holds"):
        measurement.run(BY_NAME["guard-c16"])


# --- arithmetic -------------------------------------------------------------------------------------------


def scraped(
    *, requests: int = 0, times_ms: list[float] | None = None, scrapes_ms: list[float] | None = None
) -> Scraped:
    return Scraped(
        requests=requests,
        acknowledged=requests,
        wall_s=2.0,
        own_cpu_s=0.5,
        watched_cpu_s=3.0,
        times_ns=[int(ms * 1e6) for ms in times_ms or []],
        scrapes_ns=[int(ms * 1e6) for ms in scrapes_ms or []],
    )


def test_the_guard_is_judged_round_by_round() -> None:
    on = [scraped(requests=n) for n in (90, 960, 970)]
    off = [scraped(requests=n) for n in (100, 1_000, 1_000)]
    found = kept(on, off)
    assert found.slices == [0.9, 0.96, 0.97]
    assert found.value == 0.96
    assert [(each.what, each.value) for each in found.beside] == [
        ("with", 480),
        ("without", 500),
        ("processor time per append", pytest.approx(1 / 0.96)),
    ]
    assert (found.generator_cpu, found.server_cpu) == (0.25, 1.5)
    assert table.cells(line(BY_NAME["guard-c16"], found, None))[1:6] == [
        "0.96x (with 480 /s, without 500 /s, processor time per append 1.04x)",
        "–",
        "–",
        "≥ 0.95x",
        "yes",
    ]
    assert line(BY_NAME["guard-c64"], Figures(value=0.94), None).met is False


def test_a_scrape_is_judged_by_all_of_them() -> None:
    found = scrape_s([scraped(scrapes_ms=[10, 20]), scraped(scrapes_ms=[30])])
    assert found.value == 0.02
    assert [(each.what, each.value) for each in found.beside] == [("longest", 0.03)]
    with pytest.raises(BenchFailed):
        scrape_s([scraped()])


def test_appends_beside_scrapes_are_judged_by_the_longest_of_each_round() -> None:
    on = [scraped(times_ms=[1.0] * 99 + [longest]) for longest in (5, 30, 7)]
    off = [scraped(times_ms=[1.0] * 99 + [longest]) for longest in (4, 3, 9)]
    found = delayed_ms(on, off)
    assert found.slices == [1, 27, -2]
    assert found.value == 1
    assert [(each.what, each.value) for each in found.beside] == [
        ("longest with scrapes", 30),
        ("p99 with scrapes", 1),
        ("longest without", 9),
        ("p99 without", 1),
    ]


@given(seconds=st.sampled_from([0.1, 0.25, 0.4, 1.0, 1.5, 7.0]), every_s=st.sampled_from([0.5, 1.0, 2.0]))
def test_scrapes_keep_their_distance_over_turns(seconds: float, every_s: float) -> None:
    turns = 40
    at = [
        turn * seconds + each
        for turn in range(turns)
        for each in scrapes_of(turn, seconds=seconds, every_s=every_s)
        if 0 <= each < seconds or pytest.fail(f"{each} is not in a turn of {seconds} s")
    ]
    assert at == pytest.approx([every_s * (n + 0.5) for n in range(len(at))])
    assert abs(len(at) - turns * seconds / every_s) <= 1


def test_a_turn_of_the_guard_has_a_scrape() -> None:
    pace = often(Pace())
    assert [len(scrapes_of(turn, seconds=pace.seconds, every_s=1.0)) for turn in range(pace.rounds)] == [1] * 12


def test_a_key_is_a_line_of_the_head() -> None:
    bare = payload.http_append("t", [b"1"])
    assert signed(bare, None) == bare
    lines = signed(bare, "secret").split(b"\r\n")
    assert lines[1] == b"Authorization: Bearer secret"
    assert b"\r\n".join(lines[:1] + lines[2:]) == bare
    assert len(set(KEYS)) == 20


def test_rounds_are_paired() -> None:
    with pytest.raises(ValueError, match="zip"):
        kept([scraped(requests=1)], list(itertools.repeat(scraped(requests=1), 2)))


if __name__ == "__main__":
    StandIn().serve()
