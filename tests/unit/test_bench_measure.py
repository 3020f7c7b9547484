"""Scenarios end to end against a stand-in for the server (this file, run as a program) and a real Redis if
there is one; and the arithmetic of the table."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks import BenchFailed, child_environment, table, tree
from benchmarks.command import bench
from benchmarks.figures import Figures, line, medians_ms, percentile, rates
from benchmarks.generators.load import Outcome
from benchmarks.machine import describe, filesystem_of
from benchmarks.measure import Measurement, Pace
from benchmarks.scenarios import BY_NAME, SCENARIOS, Scenario, Target
from benchmarks.sides import redis

pytestmark = pytest.mark.full

QUICK = Pace(rounds=2, seconds=0.1, warm_s=0.02)
STAND_IN = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", sys.executable, __file__]
PEERS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not redis.present(), reason="redis-server is not installed")),
]


# --- the stand-in -----------------------------------------------------------------------------------------


class StandIn:
    """Answers like the server, and keeps only how many records each topic has, in a file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Path(os.environ["TOPICS_DATA_DIR"]) / "counts.json"
        self._counts.parent.mkdir(exist_ok=True)
        self._heads: dict[str, int] = json.loads(self._counts.read_text()) if self._counts.exists() else {}
        self._forgets = int(os.environ.get("STAND_IN_FORGETS", "0"))

    def serve(self) -> None:
        if os.environ.get("STAND_IN_FAILS"):
            sys.exit("no space for the stand-in")
        listener = socket.create_server(("127.0.0.1", 0))
        Path(os.environ["TOPICS_PORT_FILE"]).write_text(str(listener.getsockname()[1]))
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        while request := stream.readline().split():
            length = 0
            while (header := stream.readline()) != b"\r\n":
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = self._answer(request[0], request[1].decode(), stream.read(length))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def _answer(self, method: bytes, target: str, body: bytes) -> bytes:
        path = target.partition("?")[0].split("/")
        if path[2] == "ready":
            return b"{}"
        topic = path[3]
        if path[-1] == "diff":
            asked = json.loads(body)
            after = asked["from_seq"] + asked["limit"]
            return json.dumps({"records": [{}] * asked["limit"], "next_from_seq": after}).encode()
        with self._lock:
            if method == b"POST":
                self._heads[topic] = self._heads.get(topic, 0) + body.count(b'"data"') - self._forgets
                self._counts.write_text(json.dumps(self._heads))
            return json.dumps({"head_seq": self._heads.get(topic, 0)}).encode()


@pytest.fixture
def measurement(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Measurement]:
    yield Measurement(
        pace=QUICK,
        tell=lambda text: None,
        parent=tmp_path,
        with_redis=getattr(request, "param", False),
        command=STAND_IN,
    )
    assert list(tmp_path.iterdir()) == []  # the folders of both sides are gone


def small(name: str) -> Scenario:
    scenario = BY_NAME[name]
    records = {"read": 2_000, "recovery": 20_000, "memory": 20_000}.get(scenario.kind, 0)
    return msgspec.structs.replace(scenario, records=records)


@pytest.mark.parametrize("measurement", PEERS, indirect=True)
@pytest.mark.parametrize("name", ["append-100", "append-1-fsync", "diff-1000", "latency", "recovery", "memory"])
def test_a_scenario_gives_a_line_and_leaves_nothing(measurement: Measurement, name: str) -> None:
    found = measurement.run(small(name))
    assert found.ours.value > 0
    assert found.met is not None or found.theirs is None
    if found.theirs is not None:
        assert found.theirs.value > 0
        assert found.ratio is not None


def test_a_side_that_holds_less_than_it_acknowledged_stops_the_run(
    measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FORGETS", "1")
    with pytest.raises(BenchFailed, match=r"acknowledged .* and holds"):
        measurement.run(BY_NAME["append-100"])


def test_a_server_that_does_not_start_stops_the_run_with_its_log(
    measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(BenchFailed, match="no space for the stand-in"):
        measurement.run(BY_NAME["append-100"])


# --- ended from outside -----------------------------------------------------------------------------------

RUN = """
import sys
from benchmarks.sides import ours
ours.SERVE[:] = sys.argv[1].split("|")
from benchmarks.command import bench
bench(["--only", "append-1-c16", "--seconds", "60", "--dir", sys.argv[2]])
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_both_servers_and_removes_their_folders(tmp_path: Path, signum: int) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", RUN, "|".join(STAND_IN), str(tmp_path)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        sides = 1 + redis.present()
        deadline = time.monotonic() + 60
        # The bench, its servers, and the load generator.
        while len(tree.descend(running.pid)) < 2 + sides:
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.02)
        processes = tree.descend(running.pid)
        running.send_signal(signum)
        out, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, out
    assert b"interrupted" in out
    assert tree.wait_gone(processes, most_s=10) == []
    assert list(tmp_path.iterdir()) == []


# --- arithmetic -------------------------------------------------------------------------------------------


def outcome(*, requests: int, times_ns: list[int] | None = None) -> Outcome:
    return Outcome(
        requests=requests,
        wall_s=2.0,
        own_cpu_s=0.5,
        watched_cpu_s=3.0,
        acknowledged=requests,
        times_ns=times_ns or [],
    )


def test_a_side_is_the_median_of_its_slices() -> None:
    figures = rates([outcome(requests=n) for n in (100, 20, 40)], records_per_request=10)
    assert figures.value == 200
    assert figures.slices == [500, 100, 200]
    assert figures.generator_cpu == 0.25
    assert figures.server_cpu == 1.5


def test_latency_is_the_median_of_medians_and_the_p99_of_all() -> None:
    times = [list(range(1_000_000, 101_000_000, 1_000_000))] * 3
    figures = medians_ms([outcome(requests=100, times_ns=each) for each in times])
    assert figures.value == 50.5
    assert figures.p99_ms == 99


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7
    with pytest.raises(BenchFailed):
        percentile([], 0.5)


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "met", "times"),
    [
        (Target(ratio=4), 400, 100, True, 4),
        (Target(ratio=4), 399, 100, False, 3.99),
        (Target(ratio=4), 400, None, None, None),
        (Target(ratio=4), 400, 0, None, None),
        (Target(most=0.35), 0.35, 0.7, True, 2),
        (Target(most=0.35), 0.36, None, False, None),
        (Target(most=0.2), 0.0, 0.1, True, None),
    ],
)
def test_targets(target: Target, ours: float, theirs: float | None, met: bool, times: float | None) -> None:
    assert target.met(ours=ours, theirs=theirs) is met
    assert target.times_better(ours=ours, theirs=theirs) == times


def test_the_table_says_the_same_in_every_form() -> None:
    lines = [
        line(BY_NAME["append-100"], Figures(value=1.5e6, generator_cpu=0.3), Figures(value=4e5)),
        line(BY_NAME["append-1-c16"], Figures(value=41_000), Figures(value=100_000)),
        line(BY_NAME["latency"], Figures(value=0.2, p99_ms=0.5), None),
        line(BY_NAME["memory"], Figures(value=312.4), None),
        line(BY_NAME["idle"], Figures(value=0.1), Figures(value=0.2)),
    ]
    rows = [row.strip("| ").split(" | ") for row in table.markdown(lines).splitlines()]
    assert rows[2][1:7] == ["1.50 M/s", "400.0 k/s", "3.75x", "≥ 3x", "yes", "30% / –"]
    assert rows[3][1:6] == ["41.0 k/s", "100.0 k/s", "0.41x", "≥ 0.5x", "NO"]
    assert rows[4][1:6] == ["0.200 ms (p99 0.50)", "–", "–", "≤ 0.35 ms", "yes"]
    assert rows[5][1:6] == ["312 MB", "–", "–", "≤ 500 MB", "yes"]
    assert rows[6][1:6] == ["0.10 %", "0.20 %", "2.00x", "≤ 0.2 %", "yes"]
    assert table.drawn(lines).row_count == 5
    report = table.Report(machine=describe(None), seconds=1.5, rounds=3, lines=lines)
    assert json.loads(table.as_json(report))["lines"][0]["name"] == "append-100"


def test_the_file_system_is_that_of_the_folder(tmp_path: Path) -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(tmp_path) != "unknown"


def test_the_names_are_listed_and_checked() -> None:
    listed = CliRunner().invoke(bench, ["--list"])
    assert listed.exit_code == 0
    assert [row.split()[0] for row in listed.output.splitlines()] == [each.name for each in SCENARIOS]
    refused = CliRunner().invoke(bench, ["--only", "append-7"])
    assert refused.exit_code == 2
    assert "append-7" in refused.output


if __name__ == "__main__":
    StandIn().serve()
