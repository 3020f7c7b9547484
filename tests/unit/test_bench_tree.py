"""Process trees as /proc shows them: found whole, measured, and ended by pid."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks import tree

pytestmark = pytest.mark.full

# A parent with a child that burns processor time until it is told to stop by its end.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print("up", flush=True)
child.wait()
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    processes = tree.descend(parent.pid)
    try:
        yield parent
    finally:
        tree.kill(processes)
        parent.wait()
        parent.stdout.close()
        assert tree.wait_gone(processes, most_s=10) == []


def test_the_tree_is_found_parents_first(busy: subprocess.Popen[bytes]) -> None:
    processes = tree.descend(busy.pid)
    assert len(processes) == 2
    assert processes[0].pid == busy.pid
    assert all(tree.alive(process) for process in processes)


def test_processor_time_and_memory_are_those_of_the_tree(busy: subprocess.Popen[bytes]) -> None:
    processes = tree.descend(busy.pid)
    began = tree.cpu_s(processes)
    deadline = time.monotonic() + 20
    while tree.cpu_s(processes) < began + 0.05:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert tree.fine_cpu_s(processes) >= 0.05
    assert tree.memory_bytes(processes) > 1_000_000
    assert not tree.wait_quiet(processes, most_s=0.3)


def test_a_sleeping_process_is_quiet() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        assert tree.wait_quiet(tree.descend(sleeper.pid), most_s=10)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_kill_ends_the_whole_tree(busy: subprocess.Popen[bytes]) -> None:
    processes = tree.descend(busy.pid)
    tree.kill(processes)
    busy.wait()
    assert tree.wait_gone(processes, most_s=10) == []
    assert tree.descend(busy.pid) == []


def test_a_pid_of_somebody_else_is_never_counted_or_killed() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        found = tree.find(sleeper.pid)
        assert found is not None
        earlier = tree.Process(found.pid, found.started - 1)
        assert not tree.alive(earlier)
        assert tree.cpu_s([earlier]) == 0
        tree.kill([earlier])
        assert sleeper.poll() is None
        assert tree.alive(found)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_that_is_gone_is_nothing() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert tree.find(ended.pid) is None
    assert tree.descend(ended.pid) == []
    gone = [tree.Process(ended.pid, 1)]
    assert (tree.cpu_s(gone), tree.fine_cpu_s(gone), tree.memory_bytes(gone)) == (0, 0, 0)


def test_this_process_is_alive() -> None:
    found = tree.find(os.getpid())
    assert found is not None
    assert tree.alive(found)
