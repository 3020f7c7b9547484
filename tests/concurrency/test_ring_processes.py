"""Two real processes on one link: shared memory, eventfds, two cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from figures import KILLS
from peer import BELLS_BYTES, GENERATION, RING_BYTES, Peer, exchange, message

from topics.errors import RingFull, RingPoisoned
from topics.shm.doorbell import Doorbell
from topics.shm.layout import link_bytes, ring_span
from topics.shm.region import Region
from topics.shm.ring import RingReader, format_link

COUNT = 100_000
PEER = Path(__file__).parent / "peer.py"

Start = Callable[[str, int], tuple[Peer, subprocess.Popen[bytes]]]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []
    regions: list[Region] = []
    bells_fds: list[int] = []

    def start_peer(role: str, count: int) -> tuple[Peer, subprocess.Popen[bytes]]:
        region, bells = Region.create(link_bytes(RING_BYTES)), Region.create(BELLS_BYTES)
        format_link(region.view, generation=GENERATION, ring_bytes=RING_BYTES)
        ours, theirs = Doorbell.create_fd(), Doorbell.create_fd()
        fds = (region.fd, bells.fd, theirs, ours)
        child = subprocess.Popen([sys.executable, PEER, role, *map(str, fds), str(count)], pass_fds=fds)
        children.append(child)
        regions.extend((region, bells))
        bells_fds.extend((ours, theirs))
        return Peer(0, region, bells, own_fd=ours, other_fd=theirs), child

    yield start_peer
    for child in children:
        child.kill()
        child.wait()
    for fd in bells_fds:
        os.close(fd)


def test_both_directions_at_once_lose_nothing_and_never_hang(start: Start) -> None:
    peer, child = start("exchange", COUNT)
    exchange(peer, COUNT, until=time.monotonic() + 90)
    assert child.wait(30) == 0
    assert peer.link.reader.empty()


@pytest.mark.parametrize("kill_after", [1, 50, 333, 1_000, 2_500])
def test_a_killed_producer_leaves_no_half_message(start: Start, kill_after: int) -> None:
    peer, child = start("produce", 0)
    received = 0

    def take() -> None:
        nonlocal received
        for got in peer.link.drain():
            assert got == message(received)
            received += 1

    while received < kill_after:
        if peer.link.reader.empty():
            peer.wait()
        take()
    child.send_signal(signal.SIGKILL)
    KILLS.add()
    assert child.wait(30) == -signal.SIGKILL
    while not peer.link.reader.empty():
        take()
    assert received >= kill_after
    assert peer.link.drain() == []


def test_a_killed_producers_ring_is_nothing_to_the_next_generation(start: Start) -> None:
    peer, child = start("produce", 0)
    peer.wait()
    child.kill()
    child.wait(30)
    half = peer.link.reader._data.obj
    with pytest.raises(RingPoisoned, match="generation"):
        RingReader(memoryview(half)[ring_span(RING_BYTES) :], generation=GENERATION + 1, max_message=2**30)


def test_a_killed_consumer_is_backpressure_and_not_a_hang(start: Start) -> None:
    peer, child = start("exchange", COUNT)
    while peer.link.reader.empty():
        peer.wait()
    child.kill()
    child.wait(30)
    sent = 0
    while peer.link.writer.outbox_bytes <= peer.link.writer.capacity and sent < COUNT:
        peer.link.writer.send(bytes(100))
        peer.link.flush()
        sent += 1
    assert 0 < sent < COUNT
    with pytest.raises(RingFull):
        peer.link.writer.send(bytes(100))
