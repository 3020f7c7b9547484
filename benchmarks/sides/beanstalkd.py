"""The other peer of the lines about queues: Debian's beanstalkd with its write-ahead log, in its own protocol.

It has queues and nothing else, so it takes part in no other line. Its log is synced at most once a second, as Redis's
is. It gives one job for each question and has no push: a worker sends as many questions together as it wants jobs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path
from typing import NoReturn

from benchmarks import BenchFailed
from benchmarks.generators import payload
from benchmarks.generators.claims import LEASE_MS
from benchmarks.generators.load import connect
from benchmarks.generators.workers import WorkJob
from benchmarks.sides.side import Side

TUBE = "default"
FILL_BATCH = 1_000
SYNC_EVERY_MS = 1_000
_JOBS = re.compile(rb"current-jobs-(?:ready|reserved|delayed): (\d+)\n")


def present() -> bool:
    return shutil.which("beanstalkd") is not None


class Beanstalkd(Side):
    name = "beanstalkd"

    def __init__(self, *, parent: Path | None = None) -> None:
        super().__init__(parent=parent)
        self._control: socket.socket | None = None

    def start(self) -> float:
        # Fact: the port must be named, and somebody could take it between here and there: the run then says so.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = ["beanstalkd", "-l", "127.0.0.1", "-p", str(self.port), "-b", str(self.folder)]
        return self._spawn([*command, "-f", str(SYNC_EVERY_MS)], dict(os.environ), self._answers)

    def _answers(self) -> bool:
        try:
            self._control = connect(self.port)
        except OSError:
            return False
        return self.queued() == 0

    def stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        super().stop()

    def _call(self, request: bytes, *, lines: int) -> bytes:
        """Requests whose answers have that many lines in all, at least."""
        assert self._control is not None
        self._control.sendall(request)
        data = b""
        while data.count(b"\n") < lines:
            chunk = self._control.recv(1 << 20)
            if not chunk:
                raise BenchFailed(f"beanstalkd closed the connection after {request[:60]!r}")
            data += chunk
        return data

    # --- the queue -----------------------------------------------------------------------------------------
    def make_queue(self, *, jitter_ms: int) -> None:
        """The tube is there from the start, and it knows no window in which claims are gathered."""

    def fill_queue(self, jobs: int, *, job_bytes: int) -> int:
        batches = -(-jobs // FILL_BATCH)
        head = b"put 0 0 %d %d\r\n" % (LEASE_MS // 1_000, job_bytes)
        batch = payload.records(FILL_BATCH, first=0, size=job_bytes)
        request = b"".join(head + data + b"\r\n" for data in batch)
        for _ in range(batches):
            answer = self._call(request, lines=FILL_BATCH)
            if answer.count(b"INSERTED ") != FILL_BATCH:
                raise BenchFailed(f"beanstalkd did not take every job: {answer[-300:]!r}")
        return batches * FILL_BATCH

    def queued(self) -> int:
        # OK <bytes>\r\n, then a YAML document whose last line is empty but for its \r\n.
        answer = self._call(b"stats\r\n", lines=1)
        head, _, body = answer.partition(b"\r\n")
        if not head.startswith(b"OK "):
            raise BenchFailed(f"stats answered {answer[:300]!r}")
        while len(body) < int(head[3:]) + 2:
            assert self._control is not None
            body += self._control.recv(1 << 16)
        return sum(int(found) for found in _JOBS.findall(body))

    def work_job(self, *, workers: int, size: int, push: bool, timed: bool) -> WorkJob:
        return WorkJob(
            port=self.port,
            wire="beanstalkd",
            queue=TUBE,
            workers=workers,
            size=size,
            timed=timed,
            watch=self.processes(),
        )

    def held(self, stream: str) -> int:
        return self.queued()

    def stored(self) -> int:
        return self.queued()

    # --- what it has no counterpart for ------------------------------------------------------------------------
    def _has_none(self, *args: object, **asked: object) -> NoReturn:
        raise BenchFailed("beanstalkd has queues, and nothing else")

    append_job = read_job = publish_job = watch_job = forward_job = route = open_watchers = _has_none
