"""Many clients that send the worst bodies they can, in a process of their own: `bombers.py PORT CLIENTS SECONDS`.

Each has one connection, sends one request after the other, reads every answer, and connects again when it is sent away.
Prints how often each status was answered, as JSON; `lost` counts requests that got no answer.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
import zlib
from collections import Counter
from itertools import cycle

MIB = 1 << 20


def bomb(before: bytes, unit: bytes, after: bytes, *, size: int = 60 * MIB) -> bytes:
    packer = zlib.compressobj(level=9, wbits=31)
    chunk = unit * 100_000
    parts = [packer.compress(chunk) for _ in range(size // len(chunk))]
    return b"".join([packer.compress(before), *parts, packer.compress(after), packer.flush()])


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def requests() -> list[bytes]:
    record = b'{"data":[%b]}' % b",".join([b"{}"] * 2_000)
    return [
        post("/v0/topics/a:x/delete", bomb(b'{"match":[', b"{},", b"{}]}")),
        post("/v0/topics/a:x/diff", bomb(b'{"node":[', b'"a",', b'"a"]}')),
        post("/v0/watch", bomb(b'{"topics":{', b'"a":{},', b'"a":{}}}')),
        post("/v0/topics/a:x", bomb(b'{"records":[', b'{"data":1},', b'{"data":1}]}')),
        post("/v0/topics/a:x", bomb(b'{"records":[', b"{},", b"{}]}")),
        post("/v0/topics/a:x", bomb(b"{", b'"records":[],', b'"records":[]}')),
        post("/v0/topics/a:x", bomb(b'{"records":[', record + b",", b"{}]}", size=40 * MIB)),
        b"GET /v0/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]


class Bomber:
    def __init__(self, port: int, shift: int, arsenal: list[bytes], answers: Counter[str]) -> None:
        self._port = port
        self._next = cycle(arsenal[shift % len(arsenal) :] + arsenal[: shift % len(arsenal)])
        self._answers = answers
        self._connect()

    def _connect(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        self.sock.setblocking(False)
        self._begin()

    def _begin(self) -> None:
        self._out = memoryview(next(self._next))
        self._in = b""

    @property
    def interest(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def step(self, events: int) -> bool:
        """False: the connection is over."""
        try:
            if events & selectors.EVENT_WRITE and self._out:
                self._out = self._out[self.sock.send(self._out) :]
            if events & selectors.EVENT_READ:
                received = self.sock.recv(1 << 18)
                if not received:
                    self._answers["lost"] += 1
                    return False
                self._in += received
        except BlockingIOError:
            return True
        except OSError:
            self._answers["lost"] += 1
            return False
        head, found, body = self._in.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(body) >= length:
                self._answers[head[9:12].decode()] += 1
                if b"connection: close" in head.lower() or self._out:
                    return False
                self._begin()
        return True


def main(port: int, clients: int, seconds: float) -> None:
    answers: Counter[str] = Counter()
    arsenal = requests()
    selector = selectors.DefaultSelector()
    for number in range(clients):
        bomber = Bomber(port, number, arsenal, answers)
        selector.register(bomber.sock, bomber.interest, bomber)
    print("ready", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for key, events in selector.select(0.1):
            bomber = key.data
            if bomber.step(events):
                selector.modify(bomber.sock, bomber.interest, bomber)
            else:
                selector.unregister(bomber.sock)
                bomber.sock.close()
                bomber._connect()
                selector.register(bomber.sock, bomber.interest, bomber)
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
