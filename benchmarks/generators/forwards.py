"""The load generator for forwarding: writes into a source, and looks at how much has arrived at the destination.

Rules: the writes are those of load.py, as fast as they are answered. The clock runs from the first write until the
destination holds every record that was acknowledged; one too many is a failure, and so is one that does not come. While
writes are going on the destination is left alone; after them it is asked every few milliseconds, seldom enough
not to take from the forwarding that is measured.

`python -m benchmarks.generators.forwards` takes one ForwardJob and gives one Arrived, as apart.py has it.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Literal

import msgspec

from benchmarks import BenchFailed
from benchmarks.generators import apart, load
from benchmarks.generators.load import Job, connect
from benchmarks.generators.replies import body_length

ASK_EVERY_S = 0.005
ARRIVE_S = 20.0  # a router that is further behind than this has stopped
_HEAD_SEQ = re.compile(rb'"head_seq":\s*(\d+)')


class ForwardJob(msgspec.Struct, kw_only=True, frozen=True):
    writes: Job
    batch: int  # records per write
    ask: bytes  # the request whose answer says how many records the destination holds
    answer: Literal["http", "resp"]
    warm_s: float = 0.0
    seconds: float = 0.0


class Arrived(apart.Window, kw_only=True, frozen=True):
    """The window lasts until the last record is there."""

    acknowledged: int  # writes, warm-up too
    records: int  # of the window
    writing_s: float  # until the last write was answered
    arrived_writing: int  # records that were there by then


class Destination:
    """Asks over one connection how many records there are."""

    def __init__(self, *, port: int, ask: bytes, answer: Literal["http", "resp"]) -> None:
        self._socket = connect(port)
        self._ask = ask
        self._held = held_of_http if answer == "http" else held_of_resp

    def held(self) -> int:
        self._socket.sendall(self._ask)
        data = b""
        while (held := self._held(data)) is None:
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise BenchFailed("the server closed the connection that asks for the destination")
            data += chunk
        return held

    def wait_for(self, records: int) -> None:
        deadline = time.perf_counter() + ARRIVE_S
        while (held := self.held()) != records:
            if held > records:
                raise BenchFailed(f"the destination holds {held:,} records, and {records:,} were acknowledged")
            if time.perf_counter() > deadline:
                raise BenchFailed(f"{held:,} of {records:,} records have arrived {ARRIVE_S:.0f} s after the end")
            time.sleep(ASK_EVERY_S)

    def close(self) -> None:
        self._socket.close()


def held_of_http(data: bytes) -> int | None:
    """head_seq of a topic's state; None while the answer is not whole."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or len(body) < body_length(head + end):
        return None
    found = _HEAD_SEQ.search(body)
    if found is None:
        raise BenchFailed(f"no head_seq in {body[:300]!r}")
    return int(found[1])


def held_of_resp(data: bytes) -> int | None:
    """A whole number of Redis; None while it is not whole."""
    if not data.endswith(b"\r\n"):
        return None
    if not data.startswith(b":"):
        raise BenchFailed(f"not a number from Redis: {data[:300]!r}")
    return int(data[1:-2])


def drive(job: ForwardJob) -> Arrived:
    writes = job.writes
    destination = Destination(port=writes.port, ask=job.ask, answer=job.answer)
    try:
        held = destination.held()
        warmed = 0
        if job.warm_s:
            warmed = load.drive(msgspec.structs.replace(writes, warm_s=0.0, seconds=job.warm_s)).acknowledged
            held += warmed * job.batch
            destination.wait_for(held)
        begin = apart.mark(writes.watch)
        written = load.drive(msgspec.structs.replace(writes, warm_s=0.0, seconds=job.seconds)).acknowledged
        writing_s = time.perf_counter() - begin.at
        arrived_writing = destination.held() - held
        destination.wait_for(held + written * job.batch)
        window = begin.until(apart.mark(writes.watch))
    finally:
        destination.close()
    return Arrived(
        wall_s=window.wall_s,
        own_cpu_s=window.own_cpu_s,
        watched_cpu_s=window.watched_cpu_s,
        acknowledged=warmed + written,
        records=written * job.batch,
        writing_s=writing_s,
        arrived_writing=arrived_writing,
    )


def run_apart(job: ForwardJob) -> Arrived:
    return apart.run("benchmarks.generators.forwards", job, Arrived)


if __name__ == "__main__":
    sys.exit(apart.serve(ForwardJob, drive))
