"""A load generator runs in a process of its own, so that its processor time is its own too.

`run` starts `python -m <module>` with one job on stdin and reads what it measured from stdout, both msgpack;
`serve` is that process's side. A crash or a wrong answer ends it with a text on stderr and a status other than 0.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from benchmarks import BenchFailed, child_environment, tree

J = TypeVar("J", bound=msgspec.Struct)
W = TypeVar("W", bound="Window")


class Window(msgspec.Struct, kw_only=True, frozen=True):
    """The time between two marks, and the processor time used in it."""

    wall_s: float
    own_cpu_s: float
    watched_cpu_s: float


class Mark(msgspec.Struct, frozen=True):
    at: float
    own_cpu_s: float
    watched_cpu_s: float

    def until(self, end: Mark) -> Window:
        return Window(
            wall_s=end.at - self.at,
            own_cpu_s=end.own_cpu_s - self.own_cpu_s,
            watched_cpu_s=end.watched_cpu_s - self.watched_cpu_s,
        )


def mark(watch: list[tree.Process]) -> Mark:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Mark(time.perf_counter(), used.ru_utime + used.ru_stime, tree.cpu_s(watch))


def run(module: str, job: msgspec.Struct, answer: type[W]) -> W:
    # start_new_session: Ctrl-C reaches the bench alone, which then ends this child by its pid.
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(msgspec.msgpack.encode(job))
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
    if child.returncode != 0:
        text = err.decode(errors="replace").strip()
        raise BenchFailed(text or f"the load generator ended with {child.returncode}")
    return msgspec.msgpack.decode(out, type=answer)


def serve(job_type: type[J], work: Callable[[J], Window]) -> int:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=job_type)
    gc.disable()
    try:
        outcome = work(job)
    except (BenchFailed, OSError) as error:
        print(f"load generator: {error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcome))
    return 0
