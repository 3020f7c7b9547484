"""The peer: Debian's redis-server with an append-only file, spoken to in its own protocol.

It runs at its best: no snapshots, and no rewriting of the append-only file while a measurement runs (its
default at 64 MB, which would also disturb the other side's turn).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks import BenchFailed, child_environment
from benchmarks.generators import load, payload
from benchmarks.generators.claims import GROUP
from benchmarks.generators.forwards import ForwardJob
from benchmarks.generators.load import Job
from benchmarks.generators.opening import Watcher, open_watchers
from benchmarks.generators.watch import WatchJob
from benchmarks.generators.workers import WorkJob
from benchmarks.sides.side import STREAMS, VARIANTS, Side, read_plans, spread

Value = int | bytes | list["Value"] | None
Policy = Literal["everysec", "always"]
QUEUE = "bench-queue"
FILL_PIPELINE = 100
FILL_CONNECTIONS = 4


def present() -> bool:
    return shutil.which("redis-server") is not None


def parse(data: bytes, at: int = 0) -> tuple[Value, int] | None:
    """One reply and where it ends; None when it is not all there. An error reply is raised."""
    line_end = data.find(b"\r\n", at)
    if line_end < 0:
        return None
    kind, text, after = data[at : at + 1], data[at + 1 : line_end], line_end + 2
    if kind == b"-":
        raise BenchFailed(f"Redis: {text.decode(errors='replace')}")
    if kind == b"+":
        return text, after
    if kind == b":":
        return int(text), after
    if kind == b"$":
        size = int(text)
        if size < 0:
            return None, after
        return (data[after : after + size], after + size + 2) if len(data) >= after + size + 2 else None
    if kind != b"*":
        raise BenchFailed(f"not a Redis reply: {data[at : at + 60]!r}")
    values: list[Value] = []
    for _ in range(int(text)):
        found = parse(data, after)
        if found is None:
            return None
        value, after = found
        values.append(value)
    return values, after


class Redis(Side):
    name = "redis"

    def __init__(self, *, policy: Policy, parent: Path | None = None) -> None:
        super().__init__(parent=parent)
        self._policy = policy
        self._control: socket.socket | None = None
        self._copiers: list[subprocess.Popen[bytes]] = []

    def start(self) -> float:
        # Fact: Redis takes no port 0. Somebody could take the port between here and there: it then ends
        # while starting, and the run says so.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", self._policy]
        command += ["--auto-aof-rewrite-percentage", "0", "--daemonize", "no"]
        return self._spawn(command, dict(os.environ), self._answers)

    def _answers(self) -> bool:
        try:
            return self._call(b"PING")[0] == b"PONG"
        except (OSError, BenchFailed):  # not listening yet, or still loading its file
            self._hang_up()
            return False

    def _call(self, *words: bytes) -> tuple[Value, int]:
        """One command: its reply, and the size of the reply in bytes."""
        if self._control is None:
            self._control = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self._control.sendall(payload.resp(*words))
        data = b""
        while (found := parse(data)) is None:
            chunk = self._control.recv(1 << 20)
            if not chunk:
                raise BenchFailed(f"Redis closed the connection after {words[0]!r}")
            data += chunk
        return found

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def crash(self) -> None:
        self._end_copiers()
        self._hang_up()
        super().crash()

    def stop(self) -> None:
        self._end_copiers()
        self._hang_up()
        super().stop()

    def _end_copiers(self) -> None:
        for copier in self._copiers:
            copier.kill()
            copier.communicate()
        self._copiers.clear()

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
        made = []
        for number, stream in enumerate(streams):
            for variant in range(VARIANTS):
                first = (number * VARIANTS + variant) * batch
                made.append(payload.resp_append(stream, payload.records(batch, first=first, size=record_bytes)))
        return Job(
            port=self.port,
            requests=made,
            plans=spread(connections=connections, per_stream=VARIANTS, requests=requests, streams=len(streams)),
            replies="pipeline",
            depth=batch,
            once=requests is not None,
            timed=timed,
            watch=self.processes(),
        )

    def read_job(self, *, connections: int, limit: int) -> Job:
        stream = STREAMS[0]
        made: list[bytes] = []
        sizes: list[int] = []
        start = b"-"
        for _ in range(self.held(stream) // limit):
            entries, size = self._call(b"XRANGE", stream.encode(), start, b"+", b"COUNT", b"%d" % limit)
            if not isinstance(entries, list) or len(entries) != limit:
                raise BenchFailed(f"XRANGE from {start!r} did not give {limit} entries")
            made.append(payload.resp_range(stream, start=start, count=limit))
            sizes.append(size)
            start = b"(" + _entry_id(entries[-1])
        return Job(
            port=self.port,
            requests=made,
            plans=read_plans(connections=connections, pages=len(made)),
            replies="sized",
            sizes=sizes,
            watch=self.processes(),
        )

    def publish_job(self, *, connections: int, depth: int, record_bytes: int) -> Job:
        return self.append_job(connections=connections, batch=depth, record_bytes=record_bytes)

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
        batches = payload.batches(batch, timed=rate > 0, variants=VARIANTS, size=record_bytes)
        return WatchJob(
            port=self.port,
            wire="redis",
            stream=stream,
            watchers=watchers,
            writes=[payload.resp_append(source, each) for each in batches],
            batch=batch,
            writers=writers,
            rate=rate,
            watch=self.processes(),
        )

    def open_watchers(self, count: int) -> list[Watcher]:
        return open_watchers(wire="redis", port=self.port, stream=STREAMS[0], count=count)

    def route(self, source: str, dest: str) -> None:
        """Redis has no routers: a client copies (copier.py)."""
        command = [sys.executable, "-m", "benchmarks.sides.copier", str(self.port), source, dest]
        copier = subprocess.Popen(
            command, env=child_environment(), stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self._copiers.append(copier)
        assert copier.stdout is not None
        if copier.stdout.readline() != b"copying\n":
            raise BenchFailed(f"the client that copies did not start.\n{self._log_tail()}")

    def forward_job(self, *, source: str, dest: str, connections: int, batch: int, record_bytes: int) -> ForwardJob:
        writes = self.append_job(connections=connections, batch=batch, record_bytes=record_bytes, streams=(source,))
        return ForwardJob(writes=writes, batch=batch, ask=payload.resp(b"XLEN", dest.encode()), answer="resp")

    # --- queues: a stream and a group of consumers -----------------------------------------------------------
    def make_queue(self, *, jitter_ms: int) -> None:
        """A group knows no window in which claims are gathered."""
        self._call(b"XGROUP", b"CREATE", QUEUE.encode(), GROUP, b"0", b"MKSTREAM")

    def fill_queue(self, jobs: int, *, job_bytes: int) -> int:
        """Adds that many or a few more, in whole pipelines; says how many."""
        pipelines = -(-jobs // FILL_PIPELINE)
        job = self.append_job(
            connections=FILL_CONNECTIONS,
            batch=FILL_PIPELINE,
            record_bytes=job_bytes,
            requests=pipelines,
            streams=(QUEUE,),
        )
        return load.drive(job).acknowledged * FILL_PIPELINE

    def queued(self) -> int:
        return self.held(QUEUE)

    def work_job(self, *, workers: int, size: int, push: bool, timed: bool) -> WorkJob:
        """Redis has no push: its consumers ask, whatever `push` says."""
        return WorkJob(
            port=self.port, wire="redis", queue=QUEUE, workers=workers, size=size, timed=timed, watch=self.processes()
        )

    def stored(self) -> int:
        return sum(self.held(stream) for stream in STREAMS)

    def held(self, stream: str) -> int:
        length, _ = self._call(b"XLEN", stream.encode())
        if not isinstance(length, int):
            raise BenchFailed(f"XLEN answered {length!r}")
        return length


def _entry_id(entry: Value) -> bytes:
    if isinstance(entry, list) and entry and isinstance(entry[0], bytes):
        return entry[0]
    raise BenchFailed(f"not a stream entry: {entry!r}")
