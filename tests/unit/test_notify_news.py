"""What the service manager is told, by looks at a board whose words and whose clock the test moves."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from topics.actors.supervisor.sd_notify import EXTEND_US, Address, Bulletin, Phase, ServiceManager
from topics.errors import StartRefused
from topics.shm.counters import ROW_BYTES, Row, State, Word

EXTEND = f"EXTEND_TIMEOUT_USEC={EXTEND_US}"
NAMES = ("gateway-0", "router", "shard-0", "shard-1")
SERVING = "serving http://127.0.0.1:4000 from ./data"


class Scene:
    """A board without shared memory, a clock without time, and a bulletin that looks at both."""

    def __init__(self, *, watchdog_us: int | None = None, heartbeat_s: float = 1.0) -> None:
        self.now = 100.0
        self.busy: set[str] = set()
        self.rows = {name: Row(name, memoryview(bytearray(ROW_BYTES)).cast("Q")) for name in NAMES}
        self.bulletin = Bulletin(
            list(self.rows.values()),
            serving=SERVING,
            clock=lambda: self.now,
            heartbeat_s=heartbeat_s,
            watchdog_us=watchdog_us,
            busy=self.busy,
        )

    def beat(self, *but: str) -> None:
        for name, row in self.rows.items():
            if name not in but:
                row.add(Word.HEARTBEAT)

    def set(self, state: State, *names: str) -> None:
        for name in names or NAMES:
            self.rows[name].set(Word.STATE, state)

    def step(self, seconds: float, *silent: str) -> list[str]:
        self.now += seconds
        self.beat(*silent)
        return self.bulletin.look()

    def serve(self) -> None:
        self.set(State.READY)
        self.beat()
        assert self.bulletin.look() == ["READY=1", f"STATUS={SERVING}"]


# --- starting ---


def test_ready_comes_once_and_only_when_everyone_serves() -> None:
    scene = Scene()
    scene.set(State.STARTING)
    assert scene.bulletin.look()[0] == EXTEND
    for name in NAMES[:-1]:
        scene.set(State.READY, name)
        assert "READY=1" not in scene.step(0.1)
    scene.set(State.READY, NAMES[-1])
    assert scene.step(0.1) == ["READY=1", f"STATUS={SERVING}"]
    assert scene.bulletin.phase is Phase.SERVING
    assert scene.step(0.1) == []


def test_not_ready_while_copies_are_made_again() -> None:
    scene = Scene()
    scene.set(State.READY)
    scene.rows["shard-1"].set(Word.DERIVING, 3)
    assert scene.bulletin.look() == [EXTEND, "STATUS=starting: shard-1 makes copies for 3 topics again"]
    scene.rows["shard-1"].set(Word.DERIVING, 0)
    assert scene.step(0.1)[0] == "READY=1"


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_no_other_state_is_ready(state: State) -> None:
    scene = Scene()
    scene.set(State.READY)
    scene.set(state, "router")
    assert "READY=1" not in scene.bulletin.look()


def test_status_shows_how_far_the_replay_is() -> None:
    scene = Scene()
    scene.set(State.READY, "gateway-0", "router")
    scene.set(State.RECOVERING, "shard-0", "shard-1")
    scene.rows["shard-0"].set(Word.PROGRESS_PERMILLE, 200)
    scene.rows["shard-1"].set(Word.PROGRESS_PERMILLE, 600)
    assert scene.bulletin.look()[1] == "STATUS=replaying the log, 40 % done: shard-0 20 %, shard-1 60 %"
    assert scene.step(0.1) == []  # nothing new
    scene.set(State.READY, "shard-1")
    scene.rows["shard-1"].set(Word.PROGRESS_PERMILLE, 1_000)
    scene.rows["shard-0"].set(Word.PROGRESS_PERMILLE, 500)
    assert scene.step(0.1) == ["STATUS=replaying the log, 75 % done: shard-0 50 %"]


def test_time_is_asked_for_again_while_the_replay_goes_on_and_not_when_it_hangs() -> None:
    scene = Scene()
    scene.set(State.RECOVERING)
    scene.beat()
    asked = [EXTEND in scene.step(0.5) for _ in range(40)]
    assert sum(asked) == 4  # in 20 s; each asks for 30
    silent = [scene.step(0.5, "shard-0") for _ in range(40)]
    assert [EXTEND in news for news in silent].count(True) <= 1  # before the patience was over
    assert any("STATUS=" in line and "shard-0 does not respond" in line for news in silent for line in news)
    assert EXTEND in scene.step(0.5)  # it goes on


def test_who_stays_down_is_named_and_the_rest_gets_its_time() -> None:
    scene = Scene()
    scene.set(State.READY)
    scene.set(State.FAILED, "shard-1")
    assert scene.bulletin.look() == [EXTEND, "STATUS=starting: shard-1 failed and stays down, see the log"]
    asked = [EXTEND in scene.step(1.0, "shard-1") for _ in range(60)]
    assert sum(asked) == 12


# --- reloading ---


def test_time_is_asked_for_again_while_processes_are_replaced_and_not_when_one_hangs() -> None:
    """A reload may take longer than the manager grants a command; its watchdog is not forgotten over it."""
    scene = Scene(watchdog_us=4_000_000)
    scene.serve()
    assert not any(EXTEND in scene.step(1.0) for _ in range(20))
    scene.bulletin.reloading(monotonic_us=1)
    replaced = [scene.step(1.0) for _ in range(120)]
    assert EXTEND in replaced[0]
    assert [EXTEND in news for news in replaced].count(True) == 24
    assert ["WATCHDOG=1" in news for news in replaced].count(True) == 60
    hung = [scene.step(1.0, "shard-0") for _ in range(60)]
    assert [EXTEND in news for news in hung].count(True) <= 1
    assert EXTEND in scene.step(1.0)
    scene.bulletin.reloaded()
    assert not any(EXTEND in scene.step(1.0) for _ in range(20))
    scene.bulletin.reloading(monotonic_us=2)
    assert EXTEND in scene.step(0.1)


# --- serving ---


def pings(scene: Scene, seconds: float, *silent: str) -> list[float]:
    found = []
    begin = scene.now
    while scene.now < begin + seconds:
        news = scene.step(scene.bulletin.pause_s, *silent)
        if "WATCHDOG=1" in news:
            found.append(scene.now - begin)
    return found


@pytest.mark.parametrize("watchdog_s", [1.0, 2.6, 10.0, 30.0])
def test_pings_come_at_half_of_the_time(watchdog_s: float) -> None:
    scene = Scene(watchdog_us=round(watchdog_s * 1_000_000))
    assert scene.bulletin.pause_s <= 0.1
    scene.serve()
    found = pings(scene, 10 * watchdog_s)
    assert found == pytest.approx([watchdog_s / 2 * n for n in range(1, len(found) + 1)])
    assert len(found) >= 19


def test_no_pings_before_ready_and_none_if_nobody_asked() -> None:
    scene = Scene(watchdog_us=1_000_000)
    scene.set(State.RECOVERING)
    assert pings(scene, 5) == []
    scene = Scene()
    scene.serve()
    assert pings(scene, 5) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_ping_while_somebody_stalls(name: str) -> None:
    scene = Scene(watchdog_us=4_000_000)
    scene.serve()
    assert pings(scene, 4) == [2, 4]
    assert pings(scene, 20, name) == [2]  # so long it may be silent
    assert pings(scene, 2) == [1]


def test_a_slow_heart_is_given_the_time_it_needs() -> None:
    scene = Scene(watchdog_us=1_000_000, heartbeat_s=5.0)
    scene.serve()
    assert len(pings(scene, 10, *NAMES)) == 20
    assert pings(scene, 10, *NAMES) == []


@pytest.mark.parametrize("state", [State.BACKOFF, State.FAILED])
def test_who_is_not_there_can_not_stall(state: State) -> None:
    scene = Scene(watchdog_us=2_000_000)
    scene.serve()
    scene.set(state, "shard-0")
    assert len(pings(scene, 60, "shard-0")) == 60


def test_a_busy_one_is_the_supervisors_to_judge() -> None:
    scene = Scene(watchdog_us=4_000_000)
    scene.serve()
    scene.busy.add("shard-0")
    assert scene.step(1, "shard-0") == [f"STATUS={SERVING}; but shard-0 is busy and can't be asked"]
    assert len(pings(scene, 60, "shard-0")) == 30
    scene.busy.clear()  # it was killed, or beats again
    assert pings(scene, 20, "shard-0") == [1]
    assert any("shard-0 does not respond" in line for line in scene.bulletin._status.splitlines())


def test_a_new_life_counts_from_its_first_beat() -> None:
    scene = Scene(watchdog_us=2_000_000)
    scene.serve()
    row = scene.rows["shard-0"]
    row.clear()
    row.set(Word.GENERATION, 2)
    scene.set(State.STARTING, "shard-0")
    assert len(pings(scene, 60, "shard-0")) == 60  # the start deadline is the supervisor's
    row.add(Word.HEARTBEAT)
    scene.set(State.RECOVERING, "shard-0")
    assert pings(scene, 60, "shard-0") == [1, 2, 3]  # one look finds it, and two heartbeats it may be silent


def test_status_while_serving() -> None:
    scene = Scene()
    scene.serve()
    scene.set(State.BACKOFF, "shard-0")
    assert scene.step(1) == [f"STATUS={SERVING}; but shard-0 is about to be started again"]
    scene.set(State.RECOVERING, "shard-0")
    scene.rows["shard-0"].set(Word.PROGRESS_PERMILLE, 420)
    assert scene.step(1) == [f"STATUS={SERVING}; but shard-0 42 %"]
    scene.set(State.READY, "shard-0")
    assert scene.step(1) == [f"STATUS={SERVING}"]


# --- stopping ---


def test_stopping_is_said_once_and_nothing_after_it() -> None:
    scene = Scene(watchdog_us=1_000_000)
    scene.serve()
    assert scene.bulletin.stopping() == ["STOPPING=1", "STATUS=stopping"]
    assert [scene.step(1.0) for _ in range(10)] == [[]] * 10


def test_who_stops_while_starting_never_says_ready() -> None:
    scene = Scene()
    scene.bulletin.stopping()
    scene.set(State.READY)
    assert scene.step(1.0) == []


# --- the environment, and the socket ---


def test_nobody_wants_to_be_told() -> None:
    assert Address.from_environment({}, 1) is None
    assert Address.from_environment({"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "1"}, 1) is None


@pytest.mark.parametrize("path", ["run/notify", "vsock:2:1234", "/" + "x" * 107])
def test_addresses_that_can_not_be_used(path: str) -> None:
    with pytest.raises(StartRefused, match="NOTIFY_SOCKET"):
        Address.from_environment({"NOTIFY_SOCKET": path}, 1)


@pytest.mark.parametrize(
    ("environ", "watchdog_us"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3_000_000),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "17"}, 3_000_000),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "18"}, None),
    ],
)
def test_the_watchdog_may_be_meant_for_somebody_else(environ: dict[str, str], watchdog_us: int | None) -> None:
    found = Address.from_environment({"NOTIFY_SOCKET": "/run/notify", **environ}, 17)
    assert found == Address("/run/notify", watchdog_us)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1.5"])
def test_a_watchdog_that_can_not_be_read(text: str) -> None:
    with pytest.raises(StartRefused, match="WATCHDOG_USEC"):
        Address.from_environment({"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": text}, 17)


@pytest.mark.parametrize("abstract", [False, True])
def test_datagrams_arrive_whole(abstract: bool, tmp_path: Path) -> None:
    name = f"@topics-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind("\0" + name[1:] if abstract else name)
        manager = ServiceManager(Address(name))
        assert manager.tell_nowait(["READY=1", "STATUS=ä"]) is None
        assert manager.tell_nowait([]) is None
        assert manager.tell_nowait(["STOPPING=1"]) is None
        assert [other.recv(4096).decode() for _ in range(2)] == ["READY=1\nSTATUS=ä", "STOPPING=1"]
        manager.close()


def test_what_was_not_taken_is_sent_again_but_for_signs_of_life(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    manager = ServiceManager(Address(name))
    assert isinstance(manager.tell_nowait(["READY=1", "STATUS=a"]), FileNotFoundError)
    assert isinstance(manager.tell_nowait(["WATCHDOG=1"]), FileNotFoundError)
    assert isinstance(manager.tell_nowait([EXTEND, "STATUS=b"]), FileNotFoundError)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(name)
        assert manager.tell_nowait([]) is None
        assert other.recv(4096) == b"READY=1\nSTATUS=b"
        manager.close()


def test_a_manager_that_does_not_read_never_holds_us_up(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(name)
        manager = ServiceManager(Address(name))
        answers = [manager.tell_nowait([f"STATUS={'x' * 4000}"]) for _ in range(2_000)]
        assert isinstance(answers[-1], BlockingIOError)
        manager.close()
