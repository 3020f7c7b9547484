"""Those who abuse a server, and those who only want to use it meanwhile.

A bystander appends and reads on one connection, one after the other, and notes how long it takes. A flooder sends the
same bytes again and again, as fast as they are taken, on a socket that is its own from then on.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .client import LANES, Client, Lane, unique
from .server import Server, eventually

PROMPT_S = 16.0  # machines are busy


class Bystander(threading.Thread):
    """Appends and reads on one connection, one after the other, until told to stop."""

    def __init__(self, server: Server, lane: Lane) -> None:
        super().__init__(daemon=True)
        self.lane = lane
        self._client = Client(server.port, lane)
        self._topic = unique("bystander")
        self._enough = threading.Event()
        self.asked = 0
        self.worst_s = 0.0
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._client as client:
                while not self._enough.is_set():
                    started = time.monotonic()
                    for answer in (client.append(self._topic, 1), client.diff(self._topic, self.asked)):
                        assert answer.error is None, answer
                    assert answer.data == [1], answer
                    self.asked += 1
                    self.worst_s = max(self.worst_s, time.monotonic() - started)
                    self._enough.wait(0.02)
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._enough.set()
        self.join(PROMPT_S)
        assert self.failure is None, repr(self.failure)
        assert not self.is_alive(), "it waits for an answer"


@contextmanager
def bystanders(server: Server, *, within_s: float = 3.0) -> Iterator[None]:
    """Within, nobody else may notice anything: each is always answered in that time, or in a multiple of what it took
    on the same machine just before."""
    others = [Bystander(server, lane) for lane in LANES]
    for other in others:
        eventually(lambda other=other: other.asked >= 5 or other.failure)
    usual_s = {other.lane: other.worst_s for other in others}
    yield
    for other in others:
        before = other.asked
        eventually(lambda other=other, before=before: other.asked > before + 1 or other.failure)
        other.stop()
        most_s = within_s + 10 * usual_s[other.lane]
        assert other.worst_s < most_s, f"{other.lane} waited {other.worst_s:.1f} s, more than {most_s:.1f} s"


class Flooder(threading.Thread):
    """What comes back is thrown away."""

    def __init__(self, sock: socket.socket, raw: bytes, for_s: float) -> None:
        super().__init__(daemon=True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)  # little is left when it ends
        self._sock = sock
        self._raw = raw
        self._until = time.monotonic() + for_s
        self.sent = 0
        self.start()

    def run(self) -> None:
        sock, raw = self._sock, memoryview(self._raw)
        with sock:
            try:
                while time.monotonic() < self._until:
                    readable, writable, _ = select.select([sock], [sock], [], 0.1)
                    if readable and not sock.recv(1 << 18):
                        return
                    if writable:
                        sent = sock.send(raw)
                        self.sent += sent
                        raw = raw[sent:] or memoryview(self._raw)
            except OSError:
                pass  # it was closed

    def wait(self) -> None:
        self.join(PROMPT_S)
        assert self.sent > 5_000, "it did not get to flood anything"
