"""Clients that must not notice a reload: each works on one connection for as long as the server leaves it open, and
fails with the first answer that is not a success.

What a server may do to them is what a stopping one may do by contract: end an event stream or a WebSocket with the word
for it, and send an HTTP/2 client elsewhere with a GOAWAY. Over HTTP/1.1 it may do nothing at all: the connection stays.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from .client import unique
from .h2wire import H2Wire
from .server import Server
from .sockets import Closed, Socket
from .sse import Ended, Silence, Watching

PATIENCE_S = 30.0
GOING_AWAY = 1001


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Member(ABC, threading.Thread):
    """One client, until told to stop."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.rounds = 0
        self.failure: BaseException | None = None
        self.worst_s = 0.0
        self._enough = threading.Event()
        self._opened = ExitStack()

    def owns(self, what: C) -> C:
        self._opened.callback(what.close)
        return what

    def close(self) -> None:
        """What it owns, once it has stopped and nothing more is asked of it."""
        self._opened.close()

    def run(self) -> None:
        try:
            self.begin()
            while not self._enough.is_set():
                started = time.monotonic()
                self.step()
                self.worst_s = max(self.worst_s, time.monotonic() - started)
                self.rounds += 1
        except BaseException as error:
            self.failure = error

    def begin(self) -> None: ...

    @abstractmethod
    def step(self) -> None: ...

    def dismiss(self) -> None:
        self._enough.set()

    def stop(self) -> None:
        self._enough.set()
        self.join(PATIENCE_S)
        if self.failure is not None:
            raise AssertionError(f"{type(self).__name__}, round {self.rounds}: {self.failure!r}") from self.failure
        assert not self.is_alive(), f"{type(self).__name__} waits for an answer"


class Http1:
    """One connection; a second one is never made."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._connection.connect()
        self._connection.auto_open = 0

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, body=content, headers={"Content-Type": "application/json"})
        response = self._connection.getresponse()
        raw = response.read()
        assert response.status in (200, 201), f"{method} {path}: {response.status} {raw!r}"
        assert response.headers.get("Connection", "keep-alive") == "keep-alive", response.headers
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def close(self) -> None:
        self._connection.close()


class Http2:
    """One connection until a GOAWAY. A request that it says was not served is sent again, and only such a one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._wire = H2Wire(port)
        self.moved = 0

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        while True:
            if not self._wire.is_alive():
                self._move()
            wire = self._wire
            number = 0
            try:
                number = wire.ask(method, path, content)
                stream = wire.streams[number]
                while not stream.ended and not stream.reset and wire.receive():
                    pass
            except OSError:
                # What was sent behind a goodbye that had not been read; reading on says whether it was one.
                while not wire.goodbye and wire.receive():
                    pass
            stream = wire.streams[number]
            if stream.ended and not stream.reset:
                status = int(stream.headers[":status"])
                assert status in (200, 201), f"{method} {path}: {status} {stream.body!r}"
                answer: dict[str, Any] = json.loads(stream.body)
                return answer
            assert wire.last_stream is not None, "closed without a goodbye"
            assert number > wire.last_stream, "the goodbye says that it was served, and it was not answered"
            self._move()

    def _move(self) -> None:
        self._wire.close()
        self._wire = H2Wire(self._port)
        self.moved += 1

    def close(self) -> None:
        self._wire.close()


Lane = Http1 | Http2


class Writer(Member):
    """Appends 0, 1, 2 … to a topic of its own, each once."""

    def __init__(self, server: Server, lane: Lane, **config: object) -> None:
        super().__init__(server)
        self.lane = self.owns(lane)
        self.topic = unique("crowd")
        self.lane.ask("PUT", f"/v0/topics/{self.topic}", config)

    def step(self) -> None:
        body = {"records": [{"data": self.rounds}]}
        answer = self.lane.ask("POST", f"/v0/topics/{self.topic}", body)
        assert answer["last_seq"] == self.rounds + 1, answer

    def check(self, found: list[Any]) -> None:
        assert found == list(range(self.rounds))


class Keyed(Writer):
    """With options, so by the ordinary way: an idempotency key, a tag."""

    def step(self) -> None:
        record = {"data": self.rounds, "tag": f"t{self.rounds % 7}"}
        body = {"records": [record], "idempotency_key": f"k{self.rounds}"}
        answer = self.lane.ask("POST", f"/v0/topics/{self.topic}", body)
        assert answer["last_seq"] == self.rounds + 1, answer
        assert not answer["deduped"], answer


class Reader(Member):
    """Follows a topic by long polls: every record once, in order."""

    def __init__(self, server: Server, topic: str, lane: Lane) -> None:
        super().__init__(server)
        self.topic = topic
        self.lane = self.owns(lane)
        self.found: list[Any] = []
        self.at = 0

    def step(self) -> None:
        body = {"from_seq": self.at, "wait_ms": 2_000, "limit": 1_000}
        answer = self.lane.ask("POST", f"/v0/topics/{self.topic}/diff", body)
        assert answer["tombstone"] is None, answer
        self.found += [record["data"] for record in answer["records"]]
        self.at = answer["next_from_seq"]


class Looker(Member):
    """Lists topics, asks for the state of one, and whether the server is ready."""

    def __init__(self, server: Server, topic: str, lane: Lane) -> None:
        super().__init__(server)
        self.topic = topic
        self.lane = self.owns(lane)

    def step(self) -> None:
        listed = self.lane.ask("GET", "/v0/topics?limit=1000")
        assert self.topic in {row["topic"] for row in listed["topics"]}
        self.lane.ask("GET", f"/v0/topics/{self.topic}")
        self.lane.ask("GET", "/v0/ready")


class Watcher(Member):
    """An event stream, opened again where it ended."""

    def __init__(self, server: Server, topic: str) -> None:
        super().__init__(server)
        self.topic = topic
        self.found: list[Any] = []
        self.ends = 0

    def begin(self) -> None:
        self._watching = self.owns(Watching(self.server))
        self._session = self._watching.create({self.topic: {"from_seq": 0}})
        assert self._session.status in (200, 201), self._session
        self._stream = self._watching.open(self._session)

    def step(self) -> None:
        try:
            frame = self._stream.event(within_s=2.0)
        except Ended:
            assert self._stream.frames[-1].event == "error", self._stream.frames[-3:]
            self.ends += 1
            self._stream = self._watching.open(self._session, self._stream.last_id)
            return
        except Silence:
            if self._enough.is_set():
                return
            raise
        assert frame.event in ("record", "caught-up", "error"), frame
        if frame.event == "record":
            self.found += [record["data"] for record in frame["records"]]


class Talker(Member):
    """A WebSocket that publishes and watches what it published; opened again where it ended."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.topic = unique("talk")
        with server.client() as client:
            assert client.put(self.topic).status == 201
        self.found: list[Any] = []
        self.ends = 0
        self._at = 0

    def begin(self) -> None:
        self._open()

    def _open(self) -> None:
        self._socket = self.owns(Socket(self.server.port))
        self._socket.subscribe(self.topic, from_seq=self._at)

    def step(self) -> None:
        try:
            self._socket.tell("publish", topic=self.topic, records=[{"data": self.rounds}], request_id=self.rounds)
        except Closed as closed:
            self._again(closed)
            self.step()
            return
        acknowledged = False
        while not acknowledged:
            try:
                frame = self._socket.receive(within_s=PATIENCE_S)
            except Closed as closed:
                # Said before it was heard: nobody has taken it.
                self._again(closed)
                self.step()
                return
            assert frame.op in ("ack", "record", "caught_up", "subscribed"), frame
            if frame.op == "record":
                self.found += frame.data
                self._at = frame["to_seq"]
            acknowledged = frame.op == "ack"

    def _again(self, closed: Closed) -> None:
        assert closed.code == GOING_AWAY, closed
        self.ends += 1
        self._open()


class Worker(Member):
    """Puts jobs into a queue, claims and acks them: each is delivered once and acked once."""

    def __init__(self, server: Server, lane: Lane, **config: object) -> None:
        super().__init__(server)
        self.lane = self.owns(lane)
        self.topic = unique("jobs")
        self.done: list[int] = []
        self._numbers = itertools.count(0)
        self.lane.ask("PUT", f"/v0/topics/{self.topic}", {"type": "queue", **config})

    def step(self) -> None:
        path = f"/v0/topics/{self.topic}"
        number = next(self._numbers)
        self.lane.ask("POST", path, {"records": [{"data": number}]})
        answer = self.lane.ask("POST", f"{path}/claim", {"node": "w", "max": 10, "lease_ms": 60_000})
        jobs = answer["claimed"]
        assert [job["data"] for job in jobs] == [number], answer
        assert [job["deliveries"] for job in jobs] == [1], answer
        acked = self.lane.ask("POST", f"{path}/ack", {"node": "w", "seqs": [job["$seq"] for job in jobs]})
        assert acked["acked"] == len(jobs), acked
        self.done += [job["data"] for job in jobs]


class Keeper(Member):
    """Makes and removes topics and routers, and deletes records."""

    def __init__(self, server: Server, lane: Lane) -> None:
        super().__init__(server)
        self.lane = self.owns(lane)

    def step(self) -> None:
        source, dest, router = unique("kept"), unique("kept"), unique("kept")
        self.lane.ask("PUT", f"/v0/topics/{source}", {"cap_records": 10})
        self.lane.ask("PUT", f"/v0/routers/{router}", {"source": source, "dest": dest, "create_dest": True})
        self.lane.ask("POST", f"/v0/topics/{source}", {"records": [{"data": 1, "tag": "a"}]})
        assert self.lane.ask("GET", f"/v0/routers/{router}")["source"] == source
        assert self.lane.ask("POST", f"/v0/topics/{source}/delete", {"match": "a"})["deleted"] == 1
        self.lane.ask("DELETE", f"/v0/routers/{router}")
        for topic in (source, dest):
            assert self.lane.ask("DELETE", f"/v0/topics/{topic}")["deleted"]


class Cohort(Member):
    """Claims from a queue that gathers claims for a while, with nothing or one job in it."""

    def __init__(self, server: Server, lane: Lane) -> None:
        super().__init__(server)
        self.lane = self.owns(lane)
        self.topic = unique("cohort")
        self.lane.ask("PUT", f"/v0/topics/{self.topic}", {"type": "queue", "claim_jitter_ms": 50})

    def step(self) -> None:
        path = f"/v0/topics/{self.topic}"
        assert self.lane.ask("POST", f"{path}/claim", {"node": "w", "max": 3})["count"] == 0
        self.lane.ask("POST", path, {"records": [{"data": self.rounds}]})
        [job] = self.lane.ask("POST", f"{path}/claim", {"node": "w", "max": 3})["claimed"]
        assert (job["data"], job["deliveries"]) == (self.rounds, 1), job
        again = {"node": "w", "seqs": [job["$seq"]]}
        assert self.lane.ask("POST", f"{path}/extend", {**again, "lease_ms": 50_000})["extended"] == 1
        assert self.lane.ask("POST", f"{path}/nack", again)["nacked"] == 1
        [job] = self.lane.ask("POST", f"{path}/claim", {"node": "w", "max": 3})["claimed"]
        assert (job["data"], job["deliveries"]) == (self.rounds, 2), job
        assert self.lane.ask("POST", f"{path}/ack", again)["acked"] == 1
        shown = self.lane.ask("GET", path)["queue"]
        assert (shown["ready"], shown["in_flight"]) == (0, 0), shown
