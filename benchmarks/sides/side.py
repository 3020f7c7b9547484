"""What a scenario asks of either side: start, take load, say what it holds, die, come back.

Ours and Redis are two implementations; a scenario never knows which one it drives. A side owns one child
process and one temporary folder, and `close` ends and removes both, whatever state they are in.
"""

from __future__ import annotations

import abc
import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

from benchmarks import BenchFailed, tree
from benchmarks.generators.forwards import ForwardJob
from benchmarks.generators.load import Job
from benchmarks.generators.opening import Watcher
from benchmarks.generators.watch import WatchJob

STREAMS = ("bench-0", "bench-1", "bench-2", "bench-3")
START_S = 60.0
STOP_S = 20.0
POLL_S = 0.02  # asking more often would take from the recovery that is being timed
VARIANTS = 4  # different requests per stream, so that no two in a row carry the same bytes


class Side(abc.ABC):
    name = ""

    def __init__(self, *, parent: Path | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="topics-bench-", dir=parent))
        self.port = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    # --- what each side does its own way ---------------------------------------------------------------
    @abc.abstractmethod
    def start(self) -> float:
        """Start the server on the folder as it is; returns the seconds until it answers."""

    def declare(self) -> None:  # noqa: B027  # nothing to do is the usual answer
        """Make the streams, where that is needed."""

    @abc.abstractmethod
    def append_job(
        self,
        *,
        connections: int,
        batch: int,
        record_bytes: int,
        requests: int | None = None,
        timed: bool = False,
        streams: Sequence[str] = STREAMS,
    ) -> Job:
        """Appends spread over the streams: without end, or `requests` of them in all."""

    @abc.abstractmethod
    def read_job(self, *, connections: int, limit: int) -> Job:
        """Reads through the first stream by cursor, `limit` records each; asks everything once before."""

    @abc.abstractmethod
    def publish_job(self, *, connections: int, depth: int, record_bytes: int) -> Job:
        """Records one by one over standing connections, spread over the streams, `depth` of them in flight."""

    @abc.abstractmethod
    def watch_job(
        self,
        *,
        wire: Literal["sse", "ws"],
        watchers: int,
        writers: int,
        batch: int,
        rate: float,
        record_bytes: int,
        source: str = STREAMS[0],
        stream: str = STREAMS[0],
    ) -> WatchJob:
        """Watchers of a stream, and writers of it or of where it gets its records from. Redis has one way to
        watch, whatever `wire` says."""

    @abc.abstractmethod
    def route(self, source: str, dest: str) -> None:
        """From now on every record of one stream comes into the other; both are made, where that is needed."""

    @abc.abstractmethod
    def forward_job(self, *, source: str, dest: str, connections: int, batch: int, record_bytes: int) -> ForwardJob:
        """Appends to the source, and the question how much of it the destination holds."""

    @abc.abstractmethod
    def held(self, stream: str) -> int:
        """Records of one stream."""

    @abc.abstractmethod
    def open_watchers(self, count: int) -> list[Watcher]:
        """Idle watchers of the first stream, for who closes them again."""

    @abc.abstractmethod
    def stored(self) -> int:
        """Records held, over all streams."""

    # --- the child process -----------------------------------------------------------------------------
    def processes(self) -> list[tree.Process]:
        return tree.descend(self._child.pid) if self._child else []

    def _spawn(self, command: list[str], environ: dict[str, str], answers: Callable[[], bool]) -> float:
        started = time.perf_counter()
        self._log = (self.folder / "log").open("ab")
        # start_new_session: Ctrl-C in the terminal reaches the bench alone, which then stops its children.
        self._child = subprocess.Popen(
            command,
            env=environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        while not answers():
            if self._child.poll() is not None:
                status = self._child.returncode
                raise BenchFailed(f"{self.name} ended with {status} while starting.\n{self._log_tail()}")
            if time.perf_counter() - started > START_S:
                raise BenchFailed(f"{self.name} was not ready after {START_S:.0f} s.\n{self._log_tail()}")
            time.sleep(POLL_S)
        return time.perf_counter() - started

    def _log_tail(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2_000:]

    def crash(self) -> None:
        """kill -9 of the whole tree, by pid."""
        processes = self.processes()
        tree.kill(processes)
        self._reap(processes)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for whoever is left."""
        processes = self.processes()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(STOP_S)
        tree.kill(processes)
        self._reap(processes)

    def _reap(self, processes: list[tree.Process]) -> None:
        if self._child is not None:
            self._child.wait()
            self._child = None
        if self._log is not None:
            self._log.close()
            self._log = None
        if left := tree.wait_gone(processes, most_s=5.0):
            raise BenchFailed(f"{self.name}: processes {[p.pid for p in left]} did not end")

    def close(self) -> None:
        try:
            self.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def spread(*, connections: int, per_stream: int, requests: int | None, streams: int = len(STREAMS)) -> list[list[int]]:
    """Which of the prepared requests each connection sends, connection i on stream i modulo their number.

    Request `stream * per_stream + variant` belongs to that stream. With a total, it is dealt out evenly.
    """
    plans: list[list[int]] = []
    for connection in range(connections):
        first = connection % streams * per_stream
        turn = [first + (connection + variant) % per_stream for variant in range(per_stream)]
        if requests is not None:
            share = requests // connections + (connection < requests % connections)
            turn = [turn[number % per_stream] for number in range(share)]
        plans.append(turn)
    return plans


def read_plans(*, connections: int, pages: int) -> list[list[int]]:
    """Every connection reads all pages in order; each begins elsewhere."""
    plans = []
    for connection in range(connections):
        first = connection * pages // connections
        plans.append([(first + page) % pages for page in range(pages)])
    return plans
