from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from topics.actors.control import (
    MAX_FDS,
    Channel,
    ChannelClosed,
    Failed,
    LinkGrant,
    LinkUp,
    Ready,
    Stop,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    theirs.setblocking(False)
    yield ours, Channel(theirs)
    ours.close()
    theirs.close()


def test_messages_keep_their_borders_and_order(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    one.send_nowait(Stop())
    one.send_nowait(Failed("ü" * 1_000))
    assert two.receive() == (Stop(), [])
    assert two.receive() == (Failed("ü" * 1_000), [])
    with pytest.raises(BlockingIOError):
        two.receive()


def test_fds_arrive_usable_and_close_on_exec(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    reading, writing = os.pipe()
    grant = LinkGrant(peer="shard-0", side=1, generation=7, size=10)
    one.send_nowait(LinkUp(grant), [writing])
    os.close(writing)
    message, fds = two.receive()
    assert message == LinkUp(grant)
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"through")
    assert os.read(reading, 10) == b"through"


def test_as_many_fds_as_the_largest_table_needs(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    fd = os.eventfd(0)
    one.send_nowait(Ready(), [fd] * MAX_FDS)
    message, fds = two.receive()
    assert message == Ready()
    assert len(fds) == MAX_FDS
    for each in fds:
        os.close(each)
    with pytest.raises(OSError, match="254 fds"):
        one.send_nowait(Ready(), [fd] * (MAX_FDS + 1))


def test_end_of_file_is_an_exception_on_both_ways(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    two.close()
    with pytest.raises(ChannelClosed):
        one.receive()
    with pytest.raises(ChannelClosed):
        one.send_nowait(Stop())


def test_last_words_are_heard_after_the_end(ends: tuple[Channel, Channel]) -> None:
    one, two = ends
    two.send_nowait(Failed("corrupt"))
    two.close()
    assert one.receive()[0] == Failed("corrupt")
    with pytest.raises(ChannelClosed):
        one.receive()


def test_a_peer_that_does_not_listen_never_blocks_us(ends: tuple[Channel, Channel]) -> None:
    one, _ = ends

    def talk() -> None:
        while True:
            one.send_nowait(Failed("x" * 10_000))

    with pytest.raises(BlockingIOError):
        talk()


def test_oversized_message_is_refused(ends: tuple[Channel, Channel]) -> None:
    one, _ = ends
    with pytest.raises(OSError, match="control message"):
        one.send_nowait(Failed("x" * 1_000_000))


def test_sockets_are_packets() -> None:
    ours, theirs = Channel.pair()
    assert ours.sock.type & socket.SOCK_SEQPACKET
    assert not ours.sock.getblocking()
    assert not os.get_inheritable(theirs.fileno())
    ours.close()
    theirs.close()
