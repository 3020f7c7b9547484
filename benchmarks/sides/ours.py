"""Our side: `topics serve` on a temporary folder, spoken to over HTTP/1.1 as any client would.

The variables of the caller's environment that tune the server (shards, gateways, ring size) are passed on,
so that a setting can be measured; those that would point it at somebody's data or port are not.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks import BenchFailed
from benchmarks.generators import payload
from benchmarks.generators.forwards import ForwardJob
from benchmarks.generators.load import Job
from benchmarks.generators.opening import Watcher, open_watchers
from benchmarks.generators.watch import WatchJob
from benchmarks.sides.side import STREAMS, VARIANTS, Side, read_plans, spread
from topics import settings
from topics.storage.config import owner_of_name

# The console script's entry point, without relying on where a package manager put the script.
SERVE = [sys.executable, "-c", "from topics.cli.main import main; main()", "serve"]
_NOT_PASSED_ON = ("HOST", "PORT", "PORT_FILE", "DATA_DIR", "COLD_DIR", "API_KEYS", "API_KEYS_FILE", "CONFIG")


class _Appended(msgspec.Struct):
    head_seq: int


class _Page(msgspec.Struct):
    records: list[msgspec.Raw]
    next_from_seq: int


class Ours(Side):
    name = "topics"

    def __init__(
        self,
        *,
        durability: str,
        parent: Path | None = None,
        spin_us: int | None = None,
        command: list[str] | None = None,
    ) -> None:
        super().__init__(parent=parent)
        self._durability = durability
        self._command = command or SERVE
        self._port_file = self.folder / "port"
        dropped = {f"TOPICS_{name}" for name in _NOT_PASSED_ON}
        self._environ = {name: value for name, value in os.environ.items() if name not in dropped}
        self._environ.setdefault("TOPICS_LOG", "warning")
        self._environ |= {
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(self._port_file),
            "TOPICS_DATA_DIR": str(self.folder / "data"),
        }
        if spin_us is not None:
            self._environ["TOPICS_SPIN_US"] = str(spin_us)

    def start(self) -> float:
        self._port_file.unlink(missing_ok=True)
        self.port = 0
        return self._spawn(self._command, self._environ, self._answers)

    def _answers(self) -> bool:
        if not self.port:
            try:
                self.port = int(self._port_file.read_text())
            except (OSError, ValueError):
                return False  # not there yet, or not written to its end
        try:
            status, _ = self._call("GET", "/v0/ready")
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def _call(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            if body is None:
                connection.request(method, path)
            else:
                head = {"Content-Type": "application/json"}
                connection.request(method, path, msgspec.json.encode(body), head)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _must(self, method: str, path: str, body: object = None) -> bytes:
        status, answer = self._call(method, path, body)
        if status not in (200, 201):
            raise BenchFailed(f"{method} {path} answered {status}: {answer[:300]!r}")
        return answer

    def declare(self) -> None:
        for topic in STREAMS:
            self.make(topic)

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
        for stream, topic in enumerate(streams):
            for variant in range(VARIANTS):
                first = (stream * VARIANTS + variant) * batch
                made.append(payload.http_append(topic, payload.records(batch, first=first, size=record_bytes)))
        return Job(
            port=self.port,
            requests=made,
            plans=spread(connections=connections, per_stream=VARIANTS, requests=requests, streams=len(streams)),
            replies="http",
            once=requests is not None,
            timed=timed,
            watch=self.processes(),
        )

    def read_job(self, *, connections: int, limit: int) -> Job:
        topic = STREAMS[0]
        made: list[bytes] = []
        from_seq = 0
        head_seq = self.held(topic)
        while from_seq < head_seq:
            body = {"from_seq": from_seq, "limit": limit}
            page = msgspec.json.decode(self._must("POST", f"/v0/topics/{topic}/diff", body), type=_Page)
            if len(page.records) != limit:
                raise BenchFailed(f"diff from {from_seq} gave {len(page.records)} records instead of {limit}")
            made.append(payload.http_diff(topic, from_seq=from_seq, limit=limit))
            from_seq = page.next_from_seq
        return Job(
            port=self.port,
            requests=made,
            plans=read_plans(connections=connections, pages=len(made)),
            replies="http",
            watch=self.processes(),
        )

    def publish_job(self, *, connections: int, depth: int, record_bytes: int) -> Job:
        made = []
        for stream, topic in enumerate(STREAMS):
            for variant in range(VARIANTS):
                first = (stream * VARIANTS + variant) * depth
                batch = payload.records(depth, first=first, size=record_bytes)
                made.append(b"".join(payload.ws_publish(topic, data) for data in batch))
        return Job(
            port=self.port,
            requests=made,
            plans=spread(connections=connections, per_stream=VARIANTS, requests=None),
            replies="ws",
            depth=depth,
            watch=self.processes(),
        )

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
            wire=wire,
            stream=stream,
            watchers=watchers,
            writes=[payload.http_append(source, each) for each in batches],
            batch=batch,
            writers=writers,
            rate=rate,
            watch=self.processes(),
        )

    def open_watchers(self, count: int) -> list[Watcher]:
        return open_watchers(wire="sse", port=self.port, stream=STREAMS[0], count=count)

    # --- routers ---------------------------------------------------------------------------------------
    @property
    def shards(self) -> int:
        return settings.from_environment(self._environ).wal_shards

    def route(self, source: str, dest: str) -> None:
        self.make(source)
        self.make(dest)
        self._must("PUT", f"/v0/routers/{source}->{dest}", {"source": source, "dest": dest})

    def make(self, topic: str) -> None:
        self._must("PUT", f"/v0/topics/{topic}", {"durability": self._durability})

    def forward_job(self, *, source: str, dest: str, connections: int, batch: int, record_bytes: int) -> ForwardJob:
        writes = self.append_job(connections=connections, batch=batch, record_bytes=record_bytes, streams=(source,))
        return ForwardJob(writes=writes, batch=batch, ask=payload.http_get(f"/v0/topics/{dest}"), answer="http")

    def stored(self) -> int:
        return sum(self.held(topic) for topic in STREAMS)

    def held(self, stream: str) -> int:
        answer = self._must("GET", f"/v0/topics/{stream}")
        return msgspec.json.decode(answer, type=_Appended).head_seq


def name_on(shard: int, base: str, *, shards: int) -> str:
    """A name like `base` that belongs to that shard."""
    number = 0
    while owner_of_name(f"{base}.{number}", shards) != shard:
        number += 1
    return f"{base}.{number}"
