"""The least that a server of live delivery can do: what the load generator costs by itself, and a stand-in for tests.

Run it as `.venv/bin/python tests/trivial_fanout.py [LINE...]` to have `topics bench` measure it in our server's place.
One thread, one loop; it keeps nothing but a count per topic and gives each write to every watcher as one frame
that is made once. So what the generator uses of a core in these figures is its own price, and the figures are more
than a server that does any work can reach. With TOPICS_PORT_FILE set it is that server.

STAND_IN_FAULT makes it wrong on purpose: `loses` or `doubles` one record of one watcher, `cuts` every frame in
two that are sent apart, `closes` a watcher, `refuses` publishes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from pathlib import Path

READY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\nretry: 2000\n\n"
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def text_frame(message: bytes) -> bytes:
    size = len(message)
    if size < 126:
        return b"\x81%c%b" % (size, message)
    return b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), message)


def unmask(data: bytes) -> tuple[bytes, int]:
    """The first message in the data and where it ends; 0 while it is not whole."""
    if len(data) < 8:
        return b"", 0
    size, head = data[1] & 0x7F, 2
    if size == 126:
        size, head = int.from_bytes(data[2:4], "big"), 4
    end = head + 4 + size
    if len(data) < end:
        return b"", 0
    mask = data[head : head + 4]
    return bytes(byte ^ mask[at % 4] for at, byte in enumerate(data[head + 4 : end])), end


class Connection:
    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = peer
        self.received = b""
        self.unsent = b""
        self.websocket = False
        self.served = 0

    def send(self, data: bytes) -> None:
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # it hung up; the loop will learn of it
            return
        self.unsent = data[sent:]

    def send_rest(self) -> None:
        data, self.unsent = self.unsent, b""
        if data:
            self.send(data)


class TrivialFanout:
    def __init__(self) -> None:
        self._fault = os.environ.get("STAND_IN_FAULT", "")
        self._heads: dict[str, int] = {}
        self._watchers: dict[str, list[Connection]] = {}
        self._by_fd: dict[int, Connection] = {}
        self._poller = select.epoll()

    def serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1_024)
        listener.setblocking(False)
        self._poller.register(listener.fileno(), select.EPOLLIN)
        Path(os.environ["TOPICS_PORT_FILE"]).write_text(str(listener.getsockname()[1]))
        while True:
            for fd, event in self._poller.poll():
                if fd == listener.fileno():
                    connection = Connection(listener.accept()[0])
                    self._by_fd[connection.socket.fileno()] = connection
                    self._poller.register(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
                else:
                    self._serve(self._by_fd[fd], event)

    def _serve(self, connection: Connection, event: int) -> None:
        connection.send_rest()
        if not event & select.EPOLLIN:
            return
        try:
            data = connection.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(connection)
            return
        connection.received += data
        while end := self._take(connection, connection.received):
            connection.received = connection.received[end:]

    def _hang_up(self, connection: Connection) -> None:
        for watching in self._watchers.values():
            if connection in watching:
                watching.remove(connection)
        del self._by_fd[connection.socket.fileno()]
        connection.socket.close()

    def _take(self, connection: Connection, data: bytes) -> int:
        """Serve the first request or message in the data; where it ends."""
        if connection.websocket:
            message, end = unmask(data)
            if end:
                self._command(connection, json.loads(message))
            return end
        head, found, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"\r\ncontent-length:")[2].split(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return 0
        method, target = head.split(b" ", 2)[:2]
        self._request(connection, method, target.decode().partition("?")[0].split("/"), rest[:length])
        return len(head) + 4 + length

    def _request(self, connection: Connection, method: bytes, path: list[str], body: bytes) -> None:
        if path[2] == "ws":
            connection.websocket = True
            connection.send(SWITCH)
        elif path[2] == "watch" and method == b"POST":
            topic = next(iter(json.loads(body)["topics"]))
            connection.send(answer(b'{"wid":"wid_x","stream_url":"/v0/watch/%b"}' % topic.encode()))
        elif path[2] == "watch":
            self._watchers.setdefault(path[3], []).append(connection)
            connection.send(STREAM + b'id: x\nevent: caught-up\ndata: {"topic":"%b"}\n\n' % path[3].encode())
        elif path[2] == "topics" and method == b"POST":
            head_seq = self._append(path[3], body.partition(b'"records":[')[2].rpartition(b"]")[0])
            connection.send(answer(b'{"head_seq":%d}' % head_seq))
        elif path[2] == "topics":
            connection.send(answer(b'{"head_seq":%d}' % self._heads.get(path[3], 0)))
        else:
            connection.send(READY)

    def _command(self, connection: Connection, command: dict[str, object]) -> None:
        topic = str(command["topic"])
        if command["op"] == "subscribe":
            self._watchers.setdefault(topic, []).append(connection)
            connection.send(text_frame(b'{"op":"subscribed"}') + text_frame(b'{"op":"caught_up","topic":"x"}'))
        elif self._fault == "refuses":
            connection.send(text_frame(b'{"op":"error","code":"throttled","message":"no"}'))
        else:
            records = command["records"]
            assert isinstance(records, list)
            head_seq = self._append(topic, b",".join(json.dumps(each).encode() for each in records))
            connection.send(text_frame(b'{"op":"ack","head_seq":%d}' % head_seq))

    def _append(self, topic: str, records: bytes) -> int:
        count = records.count(b'{"data":')
        seq = self._heads.get(topic, 0) + count
        self._heads[topic] = seq
        if watching := self._watchers.get(topic):
            named = records.replace(b'{"data":', b'{"$seq":%d,"data":' % seq)
            data = b'{"op":"record","topic":"x","records":[%b],"to_seq":%d}' % (named, seq)
            event = b"id: x\nevent: record\ndata: %b\n\n" % data
            message = text_frame(data)
            for connection in watching[:]:
                self._deliver(connection, message if connection.websocket else event)
        return seq

    def _deliver(self, connection: Connection, frame: bytes) -> None:
        connection.served += 1
        # The tenth of one watcher, so that everything before it is in order.
        wrong = self._fault and connection.served == 10 and connection is self._watchers["bench-0"][0]
        if self._fault == "cuts":
            self._cut(connection, frame)
        elif not wrong:
            connection.send(frame)
        elif self._fault == "doubles":
            connection.send(frame + frame)
        elif self._fault == "closes":
            self._hang_up(connection)

    def _cut(self, connection: Connection, frame: bytes) -> None:
        # TCP_NODELAY: two sends are two segments, and the place moves through the whole frame.
        at = connection.served % len(frame)
        connection.send(frame[:at])
        connection.send(frame[at:])


def measure(names: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks import table
    from benchmarks.measure import Measurement, Pace
    from benchmarks.scenarios import SCENARIOS

    kinds = ("deliver", "fanout", "publish")
    chosen = [each for each in SCENARIOS if each.kind in kinds and (not names or each.name in names)]
    measurement = Measurement(pace=Pace(), tell=lambda text: None, with_redis=False, command=[sys.executable, __file__])
    print(table.markdown([measurement.run(scenario) for scenario in chosen]))


if __name__ == "__main__":
    if "TOPICS_PORT_FILE" in os.environ:
        TrivialFanout().serve()
    else:
        measure(sys.argv[1:])
