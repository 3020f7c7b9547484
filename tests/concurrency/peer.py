"""One end of a link in a process of its own, and the stream that both ends of these tests speak.

What message n must be follows from n alone, so a receiver knows it beforehand: a lost, doubled, cut or mixed-up
message can't pass. Run as `python peer.py <role> <region fd> <bells fd> <bell fd> <peer's bell fd> <count>`.
"""

from __future__ import annotations

import select
import sys
import time

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from topics.actors.link import Link
from topics.errors import RingFull
from topics.shm.doorbell import Doorbell
from topics.shm.layout import link_bytes
from topics.shm.region import Region

RING_BYTES = 64 * 1024
GENERATION = 9
BELLS_BYTES = 4096
LATE_S = 10.0  # a wake-up that took this long was lost


def length_of(number: int) -> int:
    """Mostly small; some of no bytes at all, some that need fragments, a few longer than the ring."""
    draw = xxh3_64_intdigest(number.to_bytes(8, "little"))
    kind, size = draw % 1_000, draw >> 10
    if kind < 20:
        return 0
    if kind < 900:
        return 8 + size % 300
    if kind < 990:
        return 8 + size % 6_000
    if kind < 998:
        return 8 + size % 40_000
    return 8 + size % (3 * RING_BYTES)


def message(number: int) -> bytes:
    length = length_of(number)
    if length == 0:
        return b""
    fill = number.to_bytes(8, "little") * ((length - 8) // 8 + 1)
    body = fill[: length - 8]
    return body + xxh3_64_digest(body + number.to_bytes(8, "little"))


class Peer:
    """A link and the bell that wakes this end of it."""

    def __init__(self, side: int, region: Region, bells: Region, *, own_fd: int, other_fd: int) -> None:
        words = bells.view.cast("Q")
        self.bell = Doorbell(own_fd, words, side * 8)
        other = Doorbell(other_fd, words, (1 - side) * 8)
        self.link = Link("other", region.view, side=side, generation=GENERATION, bell=other)
        self._poll = select.poll()
        self._poll.register(own_fd, select.POLLIN)
        self.slept = 0

    def wait(self) -> None:
        """Sleep until the other end rings; it must, if there was anything to ring for. Once armed, look again at
        both rings: what happened before that was not rung for."""
        self.bell.arm()
        left = self.link.writer.outbox_bytes
        self.link.flush()
        if self.link.reader.empty() and self.link.writer.outbox_bytes == left:
            self.slept += 1
            if not self._poll.poll(LATE_S * 1000):
                raise AssertionError(f"no bell; the ring is {'empty' if self.link.reader.empty() else 'NOT empty'}")
        self.bell.disarm()
        self.bell.clear()


def exchange(peer: Peer, count: int, *, until: float) -> None:
    """Send `count` messages and receive as many, as fast as it goes, and check every one."""
    sent = received = 0
    link = peer.link
    while received < count or sent < count or link.writer.outbox_bytes:
        before = (sent, received, link.writer.outbox_bytes)
        try:
            for _ in range(100):
                if sent == count:
                    break
                link.writer.send(message(sent))
                sent += 1
        except RingFull:
            pass
        link.flush()
        for got in link.drain():
            expected = message(received)
            if got != expected:
                raise AssertionError(f"message {received}: {len(got)} bytes, expected {len(expected)}")
            received += 1
        if before == (sent, received, link.writer.outbox_bytes):
            peer.wait()
        if time.monotonic() > until:
            raise AssertionError(f"not done in time: sent {sent}, received {received}")


def produce(peer: Peer) -> None:
    """Send without end; somebody kills us."""
    sent = 0
    while True:
        try:
            while True:
                peer.link.writer.send(message(sent))
                sent += 1
        except RingFull:
            pass
        peer.link.flush()
        if peer.link.writer.outbox_bytes > peer.link.writer.capacity:
            peer.wait()


def main() -> None:
    role, region_fd, bells_fd, own_fd, other_fd, count = sys.argv[1], *map(int, sys.argv[2:])
    region = Region.attach(region_fd, link_bytes(RING_BYTES))
    bells = Region.attach(bells_fd, BELLS_BYTES)
    peer = Peer(1, region, bells, own_fd=own_fd, other_fd=other_fd)
    if role == "exchange":
        exchange(peer, count, until=time.monotonic() + 90)
    else:
        produce(peer)


if __name__ == "__main__":
    main()
