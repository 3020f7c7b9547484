"""The supervisor's looks at its children: who is left alone, who is killed, and what is said of it, once each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from topics import limits
from topics.actors.log import Log
from topics.actors.supervisor.heartbeat import Vitals
from topics.actors.supervisor.process import ChildProcess, ProcessSpec
from topics.actors.supervisor.process_table import Child
from topics.actors.supervisor.pulse import Pulse
from topics.actors.supervisor.restarts import ChildLife, Event, Life
from topics.shm.counters import Board, Word


class Standin(ChildProcess):
    """A process that is only told to die."""

    def __init__(self, pid: int, vitals: Callable[[], Vitals]) -> None:
        self.pid = pid
        self.kills = 0
        self._vitals = vitals

    def vitals(self) -> Vitals | None:
        return self._vitals()

    def kill(self) -> None:
        self.kills += 1


class Ward:
    """Two children, whose hearts, signs of life and clock the test moves."""

    def __init__(self) -> None:
        self.now = 10.0
        self.board = Board.create(["gateway-0", "shard-0"])
        self.children = [Child(ProcessSpec(row.name, "none", 0), self.board) for row in self.board.rows()]
        self.states = {"gateway-0": "S", "shard-0": "S"}
        self.pulse = Pulse(
            self.children,
            interval_ms=1_000,
            log=Log("supervisor", "info"),
            clock=lambda: self.now,
        )
        for pid, child in enumerate(self.children):
            child._life = ChildLife(lambda: self.now)
            self.start(child, pid)

    def start(self, child: Child, pid: int) -> None:
        child.handle(Event.START)
        child.handle(Event.READY)
        child.process = Standin(pid, lambda: Vitals(0.0, self.states[child.name]))
        child.row.set(Word.HEARTBEAT, 1)
        self.pulse.begin(child)

    def look(self, times: int, *silent: str) -> None:
        for _ in range(times):
            self.now += 1.0
            for child in self.children:
                if child.name not in silent:
                    child.row.add(Word.HEARTBEAT)
            self.pulse.look()

    def kills(self, name: str) -> int:
        process = next(child for child in self.children if child.name == name).process
        assert isinstance(process, Standin)
        return process.kills


@pytest.fixture
def ward() -> Iterator[Ward]:
    ward = Ward()
    yield ward
    ward.board.close()


def test_a_child_that_sleeps_without_a_beat_is_killed_once(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.look(3)
    ward.look(limits.HEARTBEAT_MISSES - 1, "shard-0")
    assert ward.kills("shard-0") == 0
    ward.look(10, "shard-0")
    assert (ward.kills("shard-0"), ward.kills("gateway-0")) == (1, 0)
    assert ward.children[1].life is Life.KILLED
    log = capsys.readouterr().err
    assert log.count("\n") == 1
    assert "level=warning process=supervisor event=child_hangs child=shard-0 pid=1 how=stuck silent_ms=5000" in log


def test_a_busy_child_is_left_alone_named_once_and_so_is_its_return(
    ward: Ward, capsys: pytest.CaptureFixture[str]
) -> None:
    ward.states["gateway-0"] = "R"
    ward.look(1)
    ward.look(40, "gateway-0")
    assert ward.pulse.busy == {"gateway-0"}
    assert ward.children[0].life is Life.READY
    ward.look(5)
    assert ward.pulse.busy == set()
    assert ward.kills("gateway-0") == 0
    log = capsys.readouterr().err.splitlines()
    assert len(log) == 2
    assert "level=warning" in log[0]
    assert "event=child_busy child=gateway-0 pid=0 silent_ms=5000 killed_after_ms=60000" in log[0]
    assert "level=info" in log[1]
    assert "event=child_beats_again child=gateway-0 pid=0 silent_ms=41000" in log[1]


def test_an_endless_loop_is_killed_after_the_longer_bound(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.states["gateway-0"] = "R"
    ward.look(1)
    ward.look(limits.BUSY_LIMIT_MS // 1_000 - 1, "gateway-0")
    assert ward.kills("gateway-0") == 0
    ward.look(3, "gateway-0")
    assert ward.kills("gateway-0") == 1
    assert ward.pulse.busy == set()
    assert "event=child_hangs child=gateway-0 pid=0 how=endless silent_ms=60000" in capsys.readouterr().err


def test_a_busy_child_that_dies_is_not_busy_any_more(ward: Ward) -> None:
    ward.states |= {"gateway-0": "R", "shard-0": "R"}
    ward.look(1)
    ward.look(10, "gateway-0", "shard-0")
    assert ward.pulse.busy == {"gateway-0", "shard-0"}
    ward.children[1].process = None
    ward.look(1, "gateway-0")
    assert ward.pulse.busy == {"gateway-0"}
    ward.children[0].handle(Event.EXIT)
    ward.start(ward.children[0], 0)
    assert ward.pulse.busy == set()


@pytest.mark.parametrize("event", [Event.STOP, Event.RETIRE])
@pytest.mark.parametrize("state", ["R", "S"])
def test_a_child_that_stops_or_retires_has_another_deadline(
    ward: Ward, capsys: pytest.CaptureFixture[str], event: Event, state: str
) -> None:
    ward.states["shard-0"] = state
    ward.look(1)
    ward.children[1].handle(event)
    ward.look(100, "shard-0")
    assert ward.kills("shard-0") == 0
    assert ward.pulse.busy == set()
    assert capsys.readouterr().err == ""
