"""The end of a run of tests and of everything that it started, whoever ends it.

    told to end (SIGTERM, SIGINT, SIGHUP)   an Ending says so, and the run ends in order
    a process that the run started dies     the run has adopted what that one leaves, and kills it in the end
    the run is killed                       what it started by `led` gets a signal, and ends with its own processes

A server under test is in a session of its own and outlives whoever started it: only its ancestors can end it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TRACKER = b"multiprocessing.resource_tracker"  # of multiprocessing: it ends with this process
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ending:
    """Whether somebody has told this process to end, and by which signal."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return self.number != 0

    def watch(self) -> None:
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the run goes on without its terminal
                signal.signal(number, lambda number, _: self.tell(number))

    def tell(self, number: int = signal.SIGTERM) -> None:
        self.number = self.number or number

    @property
    def code(self) -> int:
        """The exit code of what was cut short, as a shell shows it."""
        return 128 + self.number


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def adopt() -> None:
    """Be the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int, number: int) -> None:
    """Get this signal when the parent dies, or its thread that started this process."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was quicker
        os.kill(os.getpid(), number)


def led(command: Sequence[str], number: int) -> list[str]:
    """The command that runs this one and gives it the signal when the caller dies."""
    return [sys.executable, os.path.abspath(__file__), str(os.getpid()), str(int(number)), *command]


def children_of(pid: int) -> Iterator[int]:
    """Of all its threads."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, file.read_text().split())
        except OSError:
            pass  # a thread that has ended


def descendants(pid: int) -> list[int]:
    found = []
    for child in children_of(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if _TRACKER not in command:
            found += [child, *descendants(child)]
    return found


def reap() -> None:
    """Adopted ones that have ended. Not while a Popen of this process is waited for: it would miss its exit code."""
    for child in children_of(os.getpid()):
        try:
            os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            pass


def end_descendants(*, within_s: float = 10.0) -> int:
    """Kill all that is left; returns how many there were. A process that forks meanwhile is met in the next turn."""
    ended: set[int] = set()
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        reap()
        left = descendants(os.getpid())
        if not left:
            break
        for pid in left:
            ended.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)
    return len(ended)


def contained(main: Callable[[], int]) -> int:
    """The exit code of a command that leaves no process behind. It may watch for signals with an Ending; until then
    they end it like an exception."""
    adopt()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return main()
    finally:
        end_descendants()


if __name__ == "__main__":
    end_with(int(sys.argv[1]), int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
