"""When a child counts as hung: every case of misses and signs of life, with a clock and vitals that the test moves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topics import limits
from topics.actors.supervisor.heartbeat import (
    AT_WORK,
    HUNG,
    START_TIMEOUT_MS,
    HeartbeatWatch,
    Patience,
    Verdict,
    Vitals,
    judge,
    works,
)
from topics.actors.supervisor.vitals import open_stat, read_vitals

PATIENCE = Patience(starting=10, beating=3, busy=7)
V = Verdict


@pytest.mark.parametrize(
    ("begun", "misses", "at_work", "wanted"),
    [
        *((begun, 0, at_work, V.BEATS) for begun in (False, True) for at_work in (False, True)),
        # Before the first beat only the start deadline counts.
        *((False, misses, at_work, V.QUIET) for misses in (1, 3, 7, 9) for at_work in (False, True)),
        *((False, misses, at_work, V.STUCK) for misses in (10, 99) for at_work in (False, True)),
        *((True, misses, at_work, V.QUIET) for misses in (1, 2) for at_work in (False, True)),
        *((True, misses, False, V.STUCK) for misses in (3, 6, 7, 99)),
        *((True, misses, True, V.BUSY) for misses in (3, 4, 6)),
        *((True, misses, True, V.ENDLESS) for misses in (7, 8, 99)),
    ],
)
def test_every_case(begun: bool, misses: int, at_work: bool, wanted: Verdict) -> None:
    assert judge(PATIENCE, begun=begun, misses=misses, at_work=at_work) is wanted


def test_patience_follows_the_interval() -> None:
    usual = Patience.of(interval_ms=1_000)
    assert usual == Patience(starting=60, beating=limits.HEARTBEAT_MISSES, busy=60)
    assert usual.starting * 1_000 == START_TIMEOUT_MS
    slow = Patience.of(interval_ms=60_000, misses_allowed=5)
    assert slow == Patience(starting=5, beating=5, busy=10)  # never shorter than a hang; a busy one has longer


# --- signs of life between two looks ---


@pytest.mark.parametrize("cpu_s", [0.0, 1.0])
@pytest.mark.parametrize(("state", "wanted"), list(AT_WORK.items()))
def test_states_that_say_enough(state: str, wanted: bool, cpu_s: float) -> None:
    """Whatever the processor time says: one that was stopped a moment ago has used some."""
    assert works(Vitals(0.0, "S"), Vitals(cpu_s, state), elapsed_s=1.0) is wanted
    assert works(None, Vitals(cpu_s, state), elapsed_s=0.0) is wanted


@pytest.mark.parametrize("state", ["S", "I", None])
def test_otherwise_the_share_of_processor_time_decides(state: str | None) -> None:
    def after(cpu_s: float, elapsed_s: float = 2.0) -> bool:
        return works(Vitals(5.0, state), Vitals(5.0 + cpu_s, state), elapsed_s=elapsed_s)

    least_s = 2.0 * limits.BUSY_SHARE
    assert after(2.0)
    assert after(least_s + 0.001)
    assert not after(least_s - 0.001)
    assert not after(0.02)  # two ticks of a thread in the background
    assert not after(0.0)
    assert not after(0.0, elapsed_s=0.0)


def test_what_can_not_be_seen_is_no_sign_of_life() -> None:
    assert not works(Vitals(0.0, "R"), None, elapsed_s=1.0)
    assert not works(None, Vitals(100.0, "S"), elapsed_s=1.0)


# --- a watch over many looks ---


class Patient:
    """A child whose heart, processor time and state the test decides."""

    def __init__(self, patience: Patience = PATIENCE) -> None:
        self.watch = HeartbeatWatch(patience)
        self.now = 50.0
        self.cpu_s = 1.0
        self.asked = 0

    def _vitals(self) -> Vitals | None:
        self.asked += 1
        return self.vitals

    def look(self, beat: int, state: str | None = "S", *, cpu_s: float = 0.0, gone: bool = False) -> Verdict:
        self.now += 1.0
        self.cpu_s += cpu_s
        self.vitals = None if gone else Vitals(self.cpu_s, state)
        return self.watch.look(beat, self._vitals, now=self.now)


def test_heart_that_stops_is_noticed_after_the_misses_allowed() -> None:
    child = Patient()
    assert child.look(10) is V.BEATS
    assert [child.look(10) for _ in range(4)] == [V.QUIET, V.QUIET, V.STUCK, V.STUCK]


def test_one_beat_forgives_all_misses_and_costs_no_look_at_the_process() -> None:
    child = Patient()
    assert not {child.look(beat) for beat in (10, 10, 10, 11, 11, 11, 12)} & HUNG
    assert child.asked == 4
    assert {child.look(beat) for beat in range(20, 30)} == {V.BEATS}
    assert child.asked == 4


def test_before_the_first_beat_only_the_start_deadline_counts() -> None:
    for state, cpu_s in (("S", 0.0), ("R", 1.0)):
        child = Patient()
        assert [child.look(0, state, cpu_s=cpu_s) for _ in range(10)] == [V.QUIET] * 9 + [V.STUCK]


@pytest.mark.parametrize(
    ("state", "cpu_s"),
    [("R", 1.0), ("R", 0.0), ("D", 0.0), ("S", 0.5), (None, 0.5)],
    ids=["runs", "gets no processor", "waits for a disk", "its threads work", "its state is hidden"],
)
def test_one_at_work_is_busy_and_is_killed_after_the_longer_bound(state: str | None, cpu_s: float) -> None:
    child = Patient()
    child.look(10)
    assert [child.look(10, state, cpu_s=cpu_s) for _ in range(7)] == [V.QUIET] * 2 + [V.BUSY] * 4 + [V.ENDLESS]


def test_a_busy_one_that_comes_back_has_all_its_time_again() -> None:
    child = Patient()
    for beat in range(1, 5):
        assert child.look(beat) is V.BEATS
        assert [child.look(beat, "R") for _ in range(6)] == [V.QUIET] * 2 + [V.BUSY] * 4


@pytest.mark.parametrize("state", ["T", "t", "S"])
def test_a_busy_one_that_gets_stuck_is_killed_when_most_looks_say_so(state: str) -> None:
    child = Patient()
    child.look(10)
    assert [child.look(10, "R", cpu_s=1.0) for _ in range(4)][-1] is V.BUSY
    assert [child.look(10, state) for _ in range(2)] == [V.BUSY, V.STUCK]


def test_a_few_ticks_of_a_thread_now_and_then_are_no_work() -> None:
    child = Patient(Patience.of(interval_ms=1_000))
    child.look(10)
    looks = [child.look(10, "S", cpu_s=0.02) for _ in range(4)] + [child.look(10, "R", cpu_s=0.02)]
    assert looks == [V.QUIET] * 4 + [V.STUCK]


def test_one_that_was_stopped_in_the_middle_of_its_work_is_stuck() -> None:
    child = Patient()
    child.look(10)
    assert [child.look(10, "T", cpu_s=cpu_s) for cpu_s in (0.9, 0.0, 0.0)] == [V.QUIET, V.QUIET, V.STUCK]


def test_a_process_that_is_gone_shows_no_life() -> None:
    child = Patient()
    child.look(10)
    assert [child.look(10, gone=True) for _ in range(3)][-1] is V.STUCK


def test_time_that_the_supervisor_lost_is_not_held_against_the_share() -> None:
    """A look that comes late compares with the time that passed, and is one miss all the same."""
    child = Patient()
    child.look(10)
    child.now += 1_000.0
    assert child.look(10, cpu_s=0.5) is V.QUIET
    assert [child.look(10, cpu_s=0.5) for _ in range(2)] == [V.QUIET, V.BUSY]


# --- what the kernel says ---


@pytest.mark.parametrize("name", ["sleeps", "odd) R 1 ("])
def test_vitals_of_a_real_process(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    program.symlink_to("/bin/sh")
    child = subprocess.Popen([program, "-c", "read line; while :; do :; done"], stdin=subprocess.PIPE)
    stat = open_stat(child.pid)
    try:
        wait_for(lambda: (found := read_vitals(child.pid, stat)) is not None and found.state == "S")
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        wait_for(lambda: (found := read_vitals(child.pid, stat)) is not None and found.cpu_s > 0.05)
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: (found := read_vitals(child.pid, stat)) is not None and found.state == "T")
    finally:
        child.kill()
        child.communicate()
    assert read_vitals(child.pid, stat) is None
    os.close(stat)
    assert open_stat(child.pid) == -1
    assert read_vitals(os.getpid(), -1) is not None  # its state is unknown, its processor time is not


def test_processor_time_of_all_threads_counts() -> None:
    work = "def work():\n while True: pass\n"
    code = f"import threading, time\n{work}threading.Thread(target=work).start()\ntime.sleep(99)"
    child = subprocess.Popen([sys.executable, "-c", code])
    stat = open_stat(child.pid)
    try:
        wait_for(lambda: (found := read_vitals(child.pid, stat)) is not None and found.cpu_s > 0.3)
    finally:
        child.kill()
        child.wait()
        os.close(stat)


def wait_for(holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_state_and_sign_leads_to_a_verdict() -> None:
    """No sequence of signs raises, and none but misses leads away from a beat."""
    for signs in itertools.product(["R", "D", "S", "T", None], repeat=4):
        child = Patient()
        child.look(1)
        verdicts = [child.look(1, state, cpu_s=0.05) for state in signs]
        assert verdicts[:2] == [V.QUIET, V.QUIET]
        assert verdicts[2] in (V.BUSY, V.STUCK)
        assert child.look(2) is V.BEATS
