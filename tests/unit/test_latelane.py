"""The lane that is loaded late: what comes before it is there, waits, and is served in its order or closed."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import trio
import trio.testing

from topics.gateway.admission.places import Places
from topics.gateway.http2.lane_loader import LOAD_AFTER_S, LateLane


class Lane:
    """What a gateway uses of the real one, and what it was told."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.connections = 3
        self.requests = 5
        self.unanswered = 2
        self.outlets = {"one"}

    def hand_over(self, sock: socket.socket, first: bytes) -> None:
        self.said.append(first)
        sock.close()

    def retire(self) -> None:
        self.said.append("retire")

    def forget_counters(self) -> None:
        self.said.append("forget")

    async def run(self) -> None:
        await trio.sleep_forever()


def make(places: Places | None = None, *, load_after_s: float = LOAD_AFTER_S) -> tuple[LateLane, Lane]:
    lane = Lane()

    def build() -> Any:
        lane.said.append("built")
        return lane

    late = LateLane(build, places=Places(most=10, per_peer=0) if places is None else places, load_after_s=load_after_s)
    return late, lane


def test_it_is_loaded_for_the_first_connection_and_serves_in_order() -> None:
    late, lane = make()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.run)
            await trio.testing.wait_all_tasks_blocked()
            assert not late.loaded
            for first in (b"1", b"2"):
                late.hand_over(socket.socket(), first)
            assert (late.connections, late.unanswered, late.requests, late.streams) == (2, 2, 0, 0)
            with trio.fail_after(30):
                while not late.loaded:
                    await trio.sleep(0.001)
            late.hand_over(socket.socket(), b"3")
            assert (late.connections, late.unanswered, late.requests, late.streams) == (3, 2, 5, 1)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert lane.said == ["built", b"1", b"2", b"3"]


def test_it_is_loaded_after_a_while_in_any_case() -> None:
    late, lane = make(load_after_s=0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.run)
            with trio.fail_after(30):
                while not late.loaded:
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert lane.said == ["built"]


def test_what_was_said_before_it_was_there_is_passed_on() -> None:
    late, lane = make()
    late.retire()
    late.forget_counters()
    late.hand_over(socket.socket(), b"1")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.run)
            with trio.fail_after(30):
                while not late.loaded:
                    await trio.sleep(0.001)
            late.retire()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert lane.said == ["built", "retire", "forget", b"1", "retire"]


def test_a_gateway_that_ends_closes_what_was_not_served() -> None:
    places = Places(most=10, per_peer=0)
    late, lane = make(places)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.run)
            await trio.testing.wait_all_tasks_blocked()
            sock = socket.socket()
            places.take(sock, "127.0.0.1")
            nursery.cancel_scope.cancel()
            late.hand_over(sock, b"1")
        assert sock.fileno() == -1

    trio.run(main)
    assert lane.said == []
    assert len(places) == 0


def test_a_gateway_does_not_import_it() -> None:
    """It would take as long as everything else together."""
    code = "import sys, topics.gateway.process as _; print({'quart', 'hypercorn'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "set()\n"
