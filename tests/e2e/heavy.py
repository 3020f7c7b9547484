"""Somebody who appends 60 MiB at once, in a process of its own: `python -m e2e.heavy WAY PORT TOPIC ROUNDS`.

Waits for a line on its input before each append, and says what became of it. Over a WebSocket all of it is one masked
frame. Or reads 8 MiB at once as gzip: of bytes that take longest to compress.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import sys
from collections.abc import Callable

from .client import Client, Lane
from .h2ws import H2Sockets
from .sockets import Conversation, RawSocket, text_frame

RECORDS = 9_999
TIMEOUT_S = 60.0
_PIECE = 1 << 20
_ASCII, _OTHER = '{"data":"%s"}' % ("x" * 6_000), '{"data":"%s"}' % ("é" * 3_000)


def _records(record: str) -> str:
    return f'"records":[{",".join([record] * RECORDS)}]'


def _by_request(port: int, topic: str) -> Callable[[], str]:
    body = f"{{{_records(_ASCII)}}}".encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def append() -> str:
        connection.request("POST", f"/v0/topics/{topic}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return "done" if answer.status in (200, 201) else str(answer.status)

    return append


def _frame(topic: str, record: str) -> bytes:
    return text_frame(f'{{"op":"publish","return_seqs":false,"topic":"{topic}",{_records(record)}}}')


def _told(socket: Conversation) -> str:
    answer = json.loads(socket.receive_text(TIMEOUT_S))
    return "done" if answer["op"] == "ack" else str(answer)


def _by_socket(port: int, topic: str, record: str) -> Callable[[], str]:
    frame = _frame(topic, record)
    socket = RawSocket(port)
    socket.sock.settimeout(TIMEOUT_S)

    def publish() -> str:
        socket.send(frame)
        return _told(socket)

    return publish


def _by_http2_socket(port: int, topic: str) -> Callable[[], str]:
    frame = _frame(topic, _OTHER)
    socket = H2Sockets(port).socket()
    socket.wire.sock.settimeout(TIMEOUT_S)

    def publish() -> str:
        for at in range(0, len(frame), _PIECE):
            socket.send(frame[at : at + _PIECE])
        return _told(socket)

    return publish


def _by_diff(port: int, topic: str, lane: Lane) -> Callable[[], str]:
    client = Client(port, lane)
    client.append(topic, *[base64.b64encode(os.urandom(640 << 10)).decode() for _ in range(9)])
    body = json.dumps({"max_batch_bytes": 8 << 20}).encode()
    headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}

    def read() -> str:
        status, received, packed = client._transport.ask("POST", f"/v0/topics/{topic}/diff", body, headers)
        done = status == 200 and received["content-encoding"] == "gzip" and len(packed) > 5 << 20
        return "done" if done else f"{status}, {len(packed)} bytes"

    return read


WAYS: dict[str, Callable[[int, str], Callable[[], str]]] = {
    "http": _by_request,
    "ws": lambda port, topic: _by_socket(port, topic, _ASCII),
    "ws-utf8": lambda port, topic: _by_socket(port, topic, _OTHER),
    "ws-http2": _by_http2_socket,
    "gzip": lambda port, topic: _by_diff(port, topic, "http1"),
    "gzip-http2": lambda port, topic: _by_diff(port, topic, "http2"),
}


def main(way: str, port: int, topic: str, rounds: int) -> None:
    append = WAYS[way](port, topic)
    for _ in range(rounds):
        sys.stdin.readline()
        print(append(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
