"""A queue as its workers use it, by one lane. Every answer is checked for what all answers of its endpoint share.

What takes a moment by contract (an expiry, a move to the dead letters) is waited for, with a deadline. A lease that
must not end during a test has the default length; one that must end has the shortest there is.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from .client import Answer, Client, unique
from .routing import read
from .server import eventually

ENDPOINTS = ("claim", "ack", "nack", "extend")
CLASSES = ("ephemeral", "memory", "disk", "fsync")
SHORTEST_MS = 100
LONGEST_MS = 86_400_000
DEFAULT_LEASE_MS = 30_000
WITHIN_S = 30.0

LEASE_ID = re.compile(r"lease_[0-9a-f]+")
JOB_ALWAYS = {"$seq", "$ts", "lease_id", "deadline", "deliveries", "data"}
JOB_MAYBE = {"$tag", "$node", "meta"}
# endpoint -> the fields of its answer, and those of its performance block
FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "claim": ({"topic", "claimed", "count", "ready"}, {"server_total_ms", "throttle_wait_ms"}),
    "ack": ({"topic", "acked", "skipped", "ready", "in_flight"}, {"server_total_ms", "fsync_ms"}),
    "nack": ({"topic", "nacked", "skipped", "ready", "in_flight"}, {"server_total_ms"}),
    "extend": ({"topic", "extended", "skipped", "deadlines"}, {"server_total_ms"}),
}

Job = dict[str, Any]
T = TypeVar("T")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Counters(NamedTuple):
    ready: int
    in_flight: int
    dead_lettered: int = 0


def check(answer: Answer, endpoint: str, topic: str) -> Answer:
    """What holds for every success of an endpoint."""
    assert answer.status == 200, answer
    fields, timings = FIELDS[endpoint]
    assert set(answer.json) == fields | {"performance"}, answer
    assert set(answer["performance"]) == timings, answer
    assert answer["topic"] == topic
    if endpoint == "claim":
        assert answer["performance"]["throttle_wait_ms"] == 0
        seqs = seqs_of(answer)
        assert seqs == sorted(set(seqs)), "not ascending"
        assert answer["count"] == len(seqs)
        for job in answer["claimed"]:
            check_job(job)
    else:
        assert all(isinstance(seq, int) for seq in answer["skipped"]), answer
    for name in {"ready", "in_flight"} & fields:
        assert isinstance(answer[name], int)
        assert answer[name] >= 0
    return answer


def check_job(job: Job) -> None:
    assert set(job) >= JOB_ALWAYS, job
    assert set(job) <= JOB_ALWAYS | JOB_MAYBE, job
    assert LEASE_ID.fullmatch(job["lease_id"]), job
    assert job["deliveries"] >= 1
    assert job["$ts"] <= job["deadline"]


def seqs_of(claimed: Answer | Sequence[Job]) -> list[int]:
    jobs = claimed["claimed"] if isinstance(claimed, Answer) else claimed
    return [job["$seq"] for job in jobs]


def leases_of(claimed: Answer | Sequence[Job]) -> list[str]:
    jobs = claimed["claimed"] if isinstance(claimed, Answer) else claimed
    return [job["lease_id"] for job in jobs]


def data_of(claimed: Answer | Sequence[Job]) -> list[Any]:
    jobs = claimed["claimed"] if isinstance(claimed, Answer) else claimed
    return [job["data"] for job in jobs]


class Queue:
    """One queue topic; `by` is the same one through another connection."""

    def __init__(self, api: Client, name: str) -> None:
        self.api = api
        self.name = name

    def by(self, api: Client) -> Queue:
        return Queue(api, self.name)

    def configure(self, **config: object) -> Answer:
        """Declare it: what is left out takes its default."""
        answer = self.api.put(self.name, type="queue", **config)
        assert answer.status in (200, 201), answer
        return answer

    # --- producers ---

    def produce(self, *data: object, **fields: object) -> list[int]:
        """Jobs that are data alone; their seqs."""
        return self.produce_records([{"data": value} for value in data], **fields)

    def produce_records(self, records: list[dict[str, Any]], **fields: object) -> list[int]:
        answer = self.api.append_records(self.name, records, **fields)
        assert answer.status in (200, 201), answer
        seqs: list[int] = answer["seqs"]
        return seqs

    # --- workers ---

    def post(self, endpoint: str, body: object) -> Answer:
        """Any body, whatever the answer."""
        return self.api.send("POST", f"/v0/topics/{self.name}/{endpoint}", body)

    def claim(self, max: int | None = None, *, node: str = "w", **fields: object) -> Answer:
        if max is not None:
            fields["max"] = max
        return check(self.post("claim", {"node": node, **fields}), "claim", self.name)

    def take(self, count: int = 1, *, node: str = "w", **fields: object) -> list[Job]:
        """Claim so many jobs, which must be there."""
        answer = self.claim(count, node=node, **fields)
        assert answer["count"] == count, answer
        claimed: list[Job] = answer["claimed"]
        return claimed

    def ack(self, seqs: Sequence[int], *, node: str = "w", **fields: object) -> Answer:
        return self._settle("ack", "acked", seqs, node, fields)

    def nack(self, seqs: Sequence[int], *, node: str = "w", **fields: object) -> Answer:
        return self._settle("nack", "nacked", seqs, node, fields)

    def extend(
        self, seqs: Sequence[int], *, node: str = "w", lease_ms: int = DEFAULT_LEASE_MS, **fields: object
    ) -> Answer:
        answer = self._settle("extend", "extended", seqs, node, {"lease_ms": lease_ms, **fields})
        done = list(seqs)
        for seq in answer["skipped"]:
            done.remove(seq)
        assert answer["deadlines"].keys() == {str(seq) for seq in done}, answer
        return answer

    def _settle(self, endpoint: str, counted: str, seqs: Sequence[int], node: str, fields: dict[str, object]) -> Answer:
        answer = check(self.post(endpoint, {"node": node, "seqs": list(seqs), **fields}), endpoint, self.name)
        assert answer[counted] + len(answer["skipped"]) == len(seqs), answer
        left = list(seqs)
        for seq in answer["skipped"]:
            left.remove(seq)  # what is skipped was asked for
        return answer

    def wear(self, seqs: Sequence[int], times: int, *, node: str = "w") -> None:
        """Deliver exactly these jobs so many times and give them back each time: they are the lowest claimable ones."""
        for _ in range(times):
            assert seqs_of(self.take(len(seqs), node=node)) == list(seqs)
            assert self.nack(seqs, node=node)["nacked"] == len(seqs)

    # --- looking ---

    def state(self) -> Answer:
        answer = self.api.state(self.name)
        assert answer.status == 200, answer
        assert answer["type"] == "queue"
        assert set(answer["queue"]) == set(Counters._fields), answer
        return answer

    def row(self) -> dict[str, Any]:
        """Of the list of topics."""
        rows = [row for row in self.api.list(prefix=self.name)["topics"] if row["topic"] == self.name]
        assert len(rows) == 1, rows
        row: dict[str, Any] = rows[0]
        return row

    def counters(self) -> Counters:
        return Counters(**self.state()["queue"])

    def assert_counters(self, ready: int, in_flight: int, dead_lettered: int = 0, *, hidden: int = 0) -> None:
        """Everywhere they are shown, and that they add up. `hidden` jobs are delayed or on their way elsewhere."""
        state = self.state()
        expected = Counters(ready, in_flight, dead_lettered)
        assert Counters(**state["queue"]) == expected
        assert state["count"] == ready + in_flight + hidden
        row = self.row()
        assert (Counters(**row["queue"]), row["count"]) == (expected, state["count"])

    def wait_counters(
        self, ready: int, in_flight: int, dead_lettered: int = 0, *, hidden: int = 0, within_s: float = WITHIN_S
    ) -> None:
        expected = Counters(ready, in_flight, dead_lettered)
        last: Counters | None = None

        def there() -> bool:
            nonlocal last
            last = self.counters()
            return last == expected

        try:
            eventually(there, within_s=within_s)
        except AssertionError:
            raise AssertionError(f"{self.name} has {last}, not {expected}, after {within_s} s") from None
        self.assert_counters(ready, in_flight, dead_lettered, hidden=hidden)

    def wait_claim(self, max: int = 1, *, node: str = "w", **fields: object) -> list[Job]:
        """Claim until there is something."""
        claimed: list[Job] = eventually(
            lambda: self.claim(max, node=node, **fields)["claimed"], within_s=WITHIN_S, what=f"a job of {self.name}"
        )
        return claimed

    def records(self) -> list[dict[str, Any]]:
        """What is in the jobs log."""
        return read(self.api, self.name)

    def left(self) -> list[int]:
        """The seqs in the jobs log."""
        return [record["$seq"] for record in self.records() if "$seq" in record]


def make_queue(api: Client, name: str | None = None, **config: object) -> Queue:
    """A new queue."""
    queue = Queue(api, name or unique("q"))
    assert queue.configure(**config)["created"] is True
    return queue


# --- several at once ---------------------------------------------------------------------------------


@contextmanager
def workers(queue: Queue, count: int) -> Iterator[list[Queue]]:
    """The queue through so many connections of their own, all open already."""
    clients = [queue.api.twin() for _ in range(count)]
    try:
        for client in clients:
            assert client.get("/v0/health").status == 200
        yield [queue.by(client) for client in clients]
    finally:
        for client in clients:
            client.close()


def together(calls: Sequence[Callable[..., Any]]) -> list[Any]:
    """All at the same moment, each in a thread; their results in order."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(run, call) for call in calls]]
