"""Our side of the lines about queues: a topic of type `queue`, filled by appends, worked on by claims or on `/work`.

It is the server of ours.py with a queue in it; every other line is measured without one.
"""

from __future__ import annotations

import msgspec

from benchmarks.generators import load
from benchmarks.generators.workers import WorkJob
from benchmarks.sides.ours import Ours

QUEUE = "bench-queue"
FILL_BATCH = 1_000
FILL_CONNECTIONS = 2


class _Counted(msgspec.Struct):
    count: int


class OurQueues(Ours):
    def make_queue(self, *, jitter_ms: int) -> None:
        config = {"type": "queue", "durability": self._durability, "claim_jitter_ms": jitter_ms}
        self._must("PUT", f"/v0/topics/{QUEUE}", config)

    def fill_queue(self, jobs: int, *, job_bytes: int) -> int:
        """Adds that many or a few more, in whole batches; says how many."""
        batches = -(-jobs // FILL_BATCH)
        job = self.append_job(
            connections=FILL_CONNECTIONS, batch=FILL_BATCH, record_bytes=job_bytes, requests=batches, streams=(QUEUE,)
        )
        return load.drive(job).acknowledged * FILL_BATCH

    def queued(self) -> int:
        """Jobs that are not acknowledged, claimed or not."""
        return msgspec.json.decode(self._must("GET", f"/v0/topics/{QUEUE}"), type=_Counted).count

    def work_job(self, *, workers: int, size: int, push: bool, timed: bool) -> WorkJob:
        return WorkJob(
            port=self.port,
            wire="http",
            queue=QUEUE,
            workers=workers,
            size=size,
            push=push,
            timed=timed,
            watch=self.processes(),
        )
