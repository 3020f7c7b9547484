"""The generator that watches, and the lines made with it, against a trivial fan-out server and a real Redis."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks import BenchFailed, table
from benchmarks.figures import Figures, deliveries, delivery_ms, line
from benchmarks.generators.opening import close_watchers
from benchmarks.generators.watch import Delivered, WatchJob, drive
from benchmarks.measure import Measurement, Pace
from benchmarks.scenarios import BY_NAME, Scenario, Target
from benchmarks.sides import redis
from benchmarks.sides.ours import Ours
from benchmarks.sides.redis import Redis
from benchmarks.sides.side import Side

pytestmark = pytest.mark.full

QUICK = Pace(rounds=2, seconds=0.3, warm_s=0.06)
STAND_IN = [sys.executable, str(Path(__file__).parent.parent / "trivial_fanout.py")]
SIDES = [
    "sse",
    "ws",
    pytest.param("redis", marks=pytest.mark.skipif(not redis.present(), reason="redis-server is not installed")),
]


@pytest.fixture
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Side]:
    made = (
        Redis(policy="everysec", parent=tmp_path)
        if request.param == "redis"
        else Ours(durability="disk", parent=tmp_path, command=STAND_IN)
    )
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def wire(request: pytest.FixtureRequest) -> str:
    param: str = request.param
    return param


def job(side: Side, wire: str, *, batch: int = 1, writers: int = 1, rate: float = 0.0) -> WatchJob:
    made = side.watch_job(
        wire="ws" if wire == "ws" else "sse", watchers=7, writers=writers, batch=batch, rate=rate, record_bytes=80
    )
    return msgspec.structs.replace(made, warm_s=0.05, seconds=0.2)


# --- counting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "wire"), [(each, each) for each in ["sse", "ws"]], indirect=True)
@pytest.mark.parametrize("batch", [1, 10])
def test_every_watcher_gets_every_write_as_one_frame(side: Side, wire: str, batch: int) -> None:
    found = drive(job(side, wire, batch=batch, writers=2))
    assert side.stored() == found.acknowledged * batch
    assert 0 < found.frames <= found.acknowledged * 7
    assert found.records == found.frames * batch
    assert found.wall_s >= 0.2
    assert found.own_cpu_s > 0


@pytest.mark.skipif(not redis.present(), reason="redis-server is not installed")
@pytest.mark.parametrize(("side", "wire"), [("redis", "redis")], indirect=True)
@pytest.mark.parametrize("batch", [1, 10])
def test_readers_of_redis_get_every_entry(side: Side, wire: str, batch: int) -> None:
    for round_number in range(2):  # the second begins after entries that are there already
        before = side.stored()
        found = drive(job(side, wire, batch=batch, writers=2))
        assert side.stored() - before == found.acknowledged * batch
        assert 0 < found.frames <= found.records, round_number


@pytest.mark.parametrize(("side", "wire"), [("sse", "sse"), ("ws", "ws")], indirect=True)
def test_frames_cut_in_two_are_counted_once(side: Side, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side.stop()
    monkeypatch.setenv("STAND_IN_FAULT", "cuts")
    with_cuts = Ours(durability="disk", parent=side.folder.parent, command=STAND_IN)
    try:
        with_cuts.start()
        drive(job(with_cuts, wire, writers=4))  # it would complain about one record too few or too many
        timed = drive(job(with_cuts, wire, rate=100))
        assert len(timed.times_ns) == len(timed.served_ns) * 7
    finally:
        with_cuts.close()


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [("loses", "a watcher has"), ("doubles", "a watcher got"), ("closes", "closed a watcher")],
)
def test_what_is_not_exact_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, complaint: str
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    monkeypatch.setattr("benchmarks.generators.watch.DRAIN_S", 0.5)
    wrong = Ours(durability="disk", parent=tmp_path, command=STAND_IN)
    try:
        wrong.start()
        with pytest.raises(BenchFailed, match=complaint):
            drive(job(wrong, "sse"))
    finally:
        wrong.close()


# --- times --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "wire"), [(each, each) for each in ["sse", "ws"]], indirect=True)
def test_times_are_one_per_write_and_watcher(side: Side, wire: str) -> None:
    found = drive(job(side, wire, rate=50))
    # 50 writes/s for 0.2 s at most; a busy machine leaves some out.
    assert 1 <= len(found.served_ns) <= 11
    assert len(found.times_ns) == len(found.served_ns) * 7
    assert max(found.times_ns) == max(found.served_ns)
    assert 0 < min(found.times_ns) < 1e9
    assert found.acknowledged >= len(found.served_ns)


def test_delivery_is_the_median_over_pairs_or_over_writes() -> None:
    outcomes = [
        Delivered(
            wall_s=2.0,
            own_cpu_s=0.5,
            watched_cpu_s=3.0,
            frames=200,
            records=4_000,
            acknowledged=2,
            times_ns=[1_000_000, 2_000_000, 3_000_000, 50_000_000],
            served_ns=[2_000_000, 50_000_000, 4_000_000],
        )
    ] * 2
    pairs = delivery_ms(outcomes, to_the_last=False)
    assert (pairs.value, pairs.p50_ms, pairs.p99_ms) == (2, None, 50)
    last = delivery_ms(outcomes, to_the_last=True)
    assert (last.value, last.p50_ms, last.p99_ms) == (4, 2, 50)
    assert last.generator_cpu == 0.25
    assert deliveries(outcomes, unit="frames/s").value == 100
    records = deliveries(outcomes, unit="records/s")
    assert (records.value, records.per_frame) == (2_000, 20)


def test_a_slice_without_a_delivery_is_a_failure() -> None:
    nothing = Delivered(wall_s=1.0, own_cpu_s=0.0, watched_cpu_s=0.0, frames=0, records=0, acknowledged=0)
    for to_the_last in (False, True):
        with pytest.raises(BenchFailed):
            delivery_ms([nothing], to_the_last=to_the_last)


# --- watchers at rest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["sse", SIDES[2]], indirect=True)
def test_more_watchers_than_one_wave_are_opened(side: Side) -> None:
    opened = side.open_watchers(150)
    try:
        assert len({each.socket.fileno() for each in opened}) == 150
    finally:
        close_watchers(opened)
    assert all(each.socket.fileno() == -1 for each in opened)


# --- lines --------------------------------------------------------------------------------------------------


@pytest.fixture
def measurement(tmp_path: Path) -> Iterator[Measurement]:
    yield Measurement(pace=QUICK, tell=lambda text: None, parent=tmp_path, with_redis=redis.present(), command=STAND_IN)
    assert list(tmp_path.iterdir()) == []  # the folders of both sides are gone


def small(name: str) -> Scenario:
    scenario = BY_NAME[name]
    return msgspec.structs.replace(scenario, watchers=min(scenario.watchers, 30), rate=scenario.rate and 100)


@pytest.mark.parametrize(
    "name", ["deliver-10", "fanout-frames", "fanout-records", "watcher-memory", "ws-publish", "ws-publish-16"]
)
def test_a_line_has_figures_of_both_sides(measurement: Measurement, name: str) -> None:
    found = measurement.run(small(name))
    assert found.ours.value > 0 or name == "watcher-memory"  # the stand-in may need no new page
    assert found.met is not None
    if redis.present():
        assert found.theirs is not None
        assert found.theirs.value > 0


def test_the_websocket_line_has_the_event_streams_beside_it(measurement: Measurement) -> None:
    found = measurement.run(small("ws-fanout"))
    assert found.ours.sse is not None
    assert found.met is (found.ours.value / found.ours.sse >= 0.5)
    assert (found.theirs is not None) == redis.present()


def test_a_refused_publish_stops_the_run(measurement: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "refuses")
    with pytest.raises(BenchFailed, match=r"not an acknowledgement.*throttled"):
        measurement.run(BY_NAME["ws-publish"])


def test_slices_are_fewer_and_shorter_but_never_none() -> None:
    assert Pace().short() == Pace(rounds=2, seconds=1.5 * 0.3, warm_s=0.3 / 4)
    assert Pace().short(0.2) == Pace(rounds=2, seconds=1.5 * 0.2, warm_s=0.3 / 4)
    assert Pace(rounds=1, seconds=0.05, warm_s=0.0).short() == Pace(rounds=1, seconds=0.1, warm_s=0.0)


@pytest.mark.parametrize(
    ("target", "ours", "sse", "met", "text"),
    [
        (Target(least=80_000), 80_000, None, True, "≥ 80,000"),
        (Target(least=80_000), 79_999, None, False, "≥ 80,000"),
        (Target(of_sse=0.5), 50, 100, True, "≥ 0.5x of SSE"),
        (Target(of_sse=0.5), 49, 100, False, "≥ 0.5x of SSE"),
        (Target(of_sse=0.5), 49, None, None, "≥ 0.5x of SSE"),
    ],
)
def test_targets(target: Target, ours: float, sse: float | None, met: bool | None, text: str) -> None:
    assert target.met(ours=ours, theirs=1.0, sse=sse) is met
    assert target.times_better(ours=ours, theirs=10.0) == ours / 10  # more is better
    assert str(target) == text


def test_the_table_names_units_and_what_stands_beside() -> None:
    lines = [
        line(BY_NAME["deliver-1000"], Figures(value=12.0, p50_ms=7.0, p99_ms=14.0), Figures(value=6.0)),
        line(BY_NAME["fanout-frames"], Figures(value=90_000, per_frame=3.94), Figures(value=100_000)),
        line(BY_NAME["fanout-records"], Figures(value=1.5e6), None),
        line(BY_NAME["watcher-memory"], Figures(value=12.34), Figures(value=6.17)),
        line(BY_NAME["ws-fanout"], Figures(value=30_000, sse=40_000), Figures(value=60_000)),
    ]
    assert [table.cells(each)[1:6] for each in lines] == [
        ["12.000 ms (p50 7.00, p99 14.00)", "6.000 ms", "0.50x", "≤ 20 ms", "yes"],
        ["90.0 k/s (3.9 per frame)", "100.0 k/s", "0.90x", "≥ 80,000 frames/s", "yes"],
        ["1.50 M/s", "–", "–", "≥ 1,000,000 records/s", "yes"],
        ["12.3 KB", "6.2 KB", "0.50x", "≤ 30 KB", "yes"],
        ["30.0 k/s (SSE 40.0 k/s: 0.75x)", "60.0 k/s", "0.50x", "≥ 0.5x of SSE", "yes"],
    ]
