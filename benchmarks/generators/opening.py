"""Opening watchers of one stream, of whichever kind, before the clock starts.

They are opened in waves: each step is sent on all connections of a wave before the answers are read, so that
a thousand of them take a fraction of a second and no listening queue overflows. A watcher is open when the server
has said that it is live (`caught-up`), or, on Redis, when its question names the last entry there is: what is
written from then on reaches it, to the last record.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from benchmarks import BenchFailed
from benchmarks.generators import payload
from benchmarks.generators.deliveries import SSE_FRAME_MARK, WS_FRAME_MARK, Deliveries, Pushed, Xread
from benchmarks.generators.load import connect, shake_hands
from benchmarks.generators.replies import body_length

Wire = Literal["sse", "ws", "redis"]
WAVE = 100
LIMIT = 1_000  # records per frame, entries per reply: the most that ours gives


class Watcher(NamedTuple):
    socket: socket.socket
    deliveries: Deliveries


class _Session(msgspec.Struct):
    stream_url: str


def open_watchers(*, wire: Wire, port: int, stream: str, count: int, timed: bool = False) -> list[Watcher]:
    begin = {"sse": _open_sse, "ws": _open_ws, "redis": _open_redis}[wire]
    watchers: list[Watcher] = []
    try:
        while len(watchers) < count:
            wave = [connect(port) for _ in range(min(WAVE, count - len(watchers)))]
            # Listed before anything can fail, so that they are closed in any case.
            watchers += [Watcher(each, Pushed(b"", timed=False)) for each in wave]
            watchers[-len(wave) :] = begin(wave, stream, timed)
    except BaseException:
        close_watchers(watchers)
        raise
    return watchers


def close_watchers(watchers: list[Watcher]) -> None:
    for watcher in watchers:
        watcher.socket.close()


def _open_sse(wave: list[socket.socket], stream: str, timed: bool) -> list[Watcher]:
    asked = payload.http_watch(stream, limit=LIMIT)
    for each in wave:
        each.sendall(asked)
    for each, answer in [(each, _read_until(each, _whole_answer)) for each in wave]:
        session = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=_Session)
        each.sendall(payload.http_stream(session.stream_url))
    for each in wave:
        head = _read_until(each, lambda data: b"event: caught-up" in data and data.endswith(b"\n\n"))
        if not head.startswith(b"HTTP/1.1 200"):
            raise BenchFailed(f"no event stream: {head[:300]!r}")
    return [Watcher(each, Pushed(SSE_FRAME_MARK, timed=timed)) for each in wave]


def _open_ws(wave: list[socket.socket], stream: str, timed: bool) -> list[Watcher]:
    for each in wave:
        shake_hands(each)
        each.sendall(payload.ws_subscribe(stream, limit=LIMIT))
    for each in wave:
        _read_until(each, lambda data: b'"op":"caught_up"' in data and data.endswith(b"}"))
    return [Watcher(each, Pushed(WS_FRAME_MARK, timed=timed)) for each in wave]


def _open_redis(wave: list[socket.socket], stream: str, timed: bool) -> list[Watcher]:
    wave[0].sendall(payload.resp(b"XREVRANGE", stream.encode(), b"+", b"-", b"COUNT", b"1"))
    # *1 *2 $n id *2 $4 data $n value, or *0 alone.
    lines = _read_until(wave[0], lambda data: data == b"*0\r\n" or data.count(b"\n") == 9).split(b"\r\n")
    after = lines[3] if len(lines) > 3 else b"0-0"
    watchers = [Watcher(each, Xread(stream, after=after, count=LIMIT, timed=timed)) for each in wave]
    for each, deliveries in watchers:
        each.sendall(deliveries.question())
    return watchers


def _whole_answer(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    return end >= 0 and len(data) == end + 4 + body_length(data[: end + 4])


def _read_until(connection: socket.socket, enough: Callable[[bytes], bool]) -> bytes:
    data = b""
    while not enough(data):
        try:
            chunk = connection.recv(1 << 16)
        except TimeoutError as error:
            raise BenchFailed(f"a watcher was not opened, the last that came was {data[-300:]!r}") from error
        if not chunk:
            raise BenchFailed(f"the server closed a connection that was to watch: {data[-300:]!r}")
        data += chunk
    return data
