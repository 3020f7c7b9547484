"""Requests that arrive together, at gateways and shards of the test's choice, and what a cap says when it is reached.

Connections are made beforehand, each to a known gateway. For a volley every process that takes part may be held still
(SIGSTOP) until all requests have been sent: then they race from the same moment, on as many processors as there are.

What is admitted is counted from outside, and only where it is certain (`Account`): something is there from its answer
until somebody has begun to remove it. So a count above a cap is a fault of the server, whatever the timing was.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from topics.storage.config import owner_of_name

from .client import Answer, Client, Lost
from .server import Server, eventually, gone
from .wire import Wire, request

WITHIN_S = 30.0
BACK_S = 30.0  # a killed process is back, and has said what it knows

T = TypeVar("T")
_numbers = itertools.count(1)


# --- names -------------------------------------------------------------------------------------------


def fresh(stem: str = "cap") -> str:
    """A topic name nobody else uses."""
    return f"{stem}-{next(_numbers)}"


def fresh_on(shard: int, shards: int, stem: str = "cap") -> str:
    """Likewise, on that shard."""
    while owner_of_name(name := fresh(stem), shards) != shard:
        pass
    return name


# --- processes ---------------------------------------------------------------------------------------


def processes(server: Server, kind: str) -> list[str]:
    """The names of all that are there of this kind: gateway, shard, router, queue."""
    return sorted(name for name in server.pids() if name.partition("-")[0] == kind)


def _stands_still(pid: int) -> bool:
    """A signal that was sent need not have arrived."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def still(server: Server, names: Iterable[str]) -> Iterator[None]:
    """These processes stand still meanwhile."""
    pids = [server.signal_child(name, signal.SIGSTOP) for name in names]
    try:
        for pid in pids:
            eventually(lambda pid=pid: _stands_still(pid), what="a process that stands still")
        yield
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass


@contextmanager
def alone(server: Server, name: str) -> Iterator[None]:
    """Only this gateway accepts connections."""
    with still(server, [other for other in processes(server, "gateway") if other != name]):
        yield


def kill(server: Server, name: str) -> None:
    """kill -9 of one that runs: what the board shows may have died a moment ago."""

    def killed() -> int:
        pid = server.pid_of(name)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return 0
        return pid

    pid = eventually(killed, every_s=0.05)
    eventually(lambda: gone(pid))


def kill_and_wait(server: Server, name: str) -> None:
    """And it is back."""
    pid = server.pid_of(name)
    kill(server, name)
    eventually(lambda: server.pid_of(name) != pid, within_s=BACK_S)
    wait_ready_everywhere(server)


def wait_ready_everywhere(server: Server) -> None:
    """Every gateway says so: each has its own links, and one may be behind the others."""
    server.wait_ready()
    asked = request("GET", "/v0/ready")
    for name in processes(server, "gateway"):
        with wire_to(server, name) as wire:
            eventually(lambda wire=wire: wire.ask(asked).status == 200, what=f"{name} is ready")


# --- requests that arrive together -------------------------------------------------------------------


def put_request(topic: str, *headers: str, **config: object) -> bytes:
    return request("PUT", f"/v0/topics/{topic}", json.dumps(config).encode(), headers=headers)


def append_request(topic: str, *data: object, headers: tuple[str, ...] = (), **fields: object) -> bytes:
    body = json.dumps({"records": [{"data": value} for value in data], **fields}).encode()
    return request("POST", f"/v0/topics/{topic}", body, headers=headers)


def drop_request(topic: str, *headers: str) -> bytes:
    return request("DELETE", f"/v0/topics/{topic}", headers=headers)


def router_request(router: str, source: str, dest: str, *headers: str) -> bytes:
    body = json.dumps({"source": source, "dest": dest}).encode()
    return request("PUT", f"/v0/routers/{router}", body, headers=headers)


def wire_to(server: Server, gateway: str) -> Wire:
    """A connection to this gateway, which has accepted it."""
    with alone(server, gateway):
        wire = Wire(server.port)
        assert wire.ask(request()).status == 200
    return wire


class Racers:
    """So many connections, by turns to each gateway."""

    def __init__(self, server: Server, count: int) -> None:
        self._server = server
        gateways = processes(server, "gateway")
        self._bells = [wire_to(server, name) for name in gateways]
        self.wires = [wire_to(server, gateways[at % len(gateways)]) for at in range(count)]

    def __enter__(self) -> Racers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for wire in (*self._bells, *self.wires):
            wire.close()

    def volley(self, requests: Sequence[bytes], *, hold: str | None = None) -> list[Answer]:
        """Each by its own connection, all sent before any is read. `hold`: the processes of this kind wait for all."""
        with self.sent(requests, hold=hold):
            pass
        return [wire.answer() for wire, _ in zip(self.wires, requests, strict=False)]

    def bursts(self, requests: Sequence[bytes], count: int, *, hold: str | None = None) -> list[Answer]:
        """Likewise, but each is so many requests in one go."""
        with self.sent(requests, hold=hold):
            pass
        return [wire.answer() for wire, _ in zip(self.wires, requests, strict=False) for _ in range(count)]

    @contextmanager
    def sent(self, requests: Sequence[bytes], *, hold: str | None = None) -> Iterator[None]:
        """Likewise, and nothing is read."""
        assert len(requests) <= len(self.wires)
        with still(self._server, processes(self._server, hold) if hold else ()):
            for wire, raw in zip(self.wires, requests, strict=False):
                wire.send(raw)
            if hold == "shard":
                for bell in self._bells:
                    assert bell.ask(request()).status == 200  # the gateway has had its round
        yield


def all_at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Each in a thread; their results in order, or the first failure."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(at: int) -> None:
        try:
            start.wait(30)
            results[at] = calls[at]()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=[at], daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "one of them never ended"
    if failures:
        raise failures[0]
    return [results[at] for at in range(len(calls))]


# --- what a cap says ---------------------------------------------------------------------------------


def assert_capped(answer: Answer, limit: str, most: int) -> None:
    """The whole refusal: code, the cap by name and value, and when to come back."""
    assert answer.refusal == (429, "throttled"), answer
    assert answer.detail == {"limit": limit, "max": most}, answer
    after = answer.headers["retry-after"]
    assert after.isdecimal(), after
    assert 1 <= int(after) <= 3_600, after


def split(answers: Iterable[Answer], limit: str, most: int) -> tuple[list[Answer], list[Answer]]:
    """Those that were let through, and those that the cap refused; there is nothing else."""
    passed: list[Answer] = []
    refused: list[Answer] = []
    for answer in answers:
        if answer.status in (200, 201):
            passed.append(answer)
        else:
            assert_capped(answer, limit, most)
            refused.append(answer)
    return passed, refused


# --- looking -----------------------------------------------------------------------------------------


def rows(api: Client) -> list[dict[str, object]]:
    """Every topic of the server, as the list shows it."""
    found: list[dict[str, object]] = []
    cursor: dict[str, object] = {}
    while True:
        page = api.list(page_size=500, **cursor)
        assert page.status == 200, page
        found += page["topics"]
        if page.json.get("next_cursor") is None:
            return found
        cursor = {"cursor": page["next_cursor"]}


def names(api: Client) -> set[str]:
    listed = [str(row["topic"]) for row in rows(api)]
    assert len(set(listed)) == len(listed), f"listed twice: {listed}"
    return set(listed)


def live_bytes(api: Client) -> int:
    return sum(int(str(row["bytes"])) for row in rows(api))


def metric(server: Server, name: str, *headers: str) -> float:
    """One without labels."""
    with Wire(server.port) as wire:
        wire.send(request("GET", "/v0/metrics", headers=headers))
        status, received = wire.head()
        text = wire.body(received).decode()
    assert status == 200, text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and not sample.labels:
                return float(sample.value)
    raise AssertionError(f"no {name}")


def insist(ask: Callable[[], Answer], *, within_s: float = BACK_S) -> Answer:
    """Ask until it is answered by whoever owns it; meanwhile somebody may be unavailable."""

    def answered() -> Answer | None:
        try:
            answer = ask()
        except Lost:
            return None
        return None if answer.status == 503 else answer

    answer = eventually(answered, within_s=within_s, what="an answer")
    assert answer is not None
    return answer


class Account:
    """What is certainly there, counted from outside by any number of threads.

    Something is there at the latest when its answer has come, and at least until its removal is asked for.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._there = 0
        self.highest = 0
        self.admitted = 0

    def came(self, amount: int = 1) -> None:
        with self._lock:
            self._there += amount
            self.admitted += 1
            self.highest = max(self.highest, self._there)
            assert self._there <= self._most, f"{self._there} at once, {self._most} are allowed"

    def going(self, amount: int = 1) -> None:
        """Before the request to remove it is sent."""
        with self._lock:
            self._there -= amount


def until(deadline_s: float) -> Iterator[int]:
    """Rounds until so many seconds have passed, at least one."""
    end = time.monotonic() + deadline_s
    for round_number in itertools.count():
        yield round_number
        if time.monotonic() > end:
            return
