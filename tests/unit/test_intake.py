"""A round of a shard ends in time; what it did not get to comes in the next one, in order, each link in its turn."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import BOOT, examples
from test_engine_faults import FaultyDisk
from test_shard_process import Bell, Life

from topics.actors import messages
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.shm import layout
from topics.shm.ring import format_link
from topics.walshard import process
from topics.walshard.intake import Intake

MS = 1_000_000
RING = 64 * 1024


class Stage:
    """Peers whose messages each take a known time to handle; the clock is moved by hand."""

    def __init__(self, peers: int) -> None:
        self.now_ns = 0
        self.handled: list[bytes] = []
        self.links: dict[str, Link] = {}
        self.outside: dict[str, Link] = {}
        bell: Any = Bell()
        for number in range(peers):
            view = memoryview(bytearray(layout.link_bytes(RING)))
            format_link(view, generation=1, ring_bytes=RING)
            name = f"gateway-{number}"
            self.outside[name] = Link("shard-0", view, side=0, generation=1, bell=bell)
            self.links[name] = Link(name, view, side=1, generation=1, bell=bell)
        self.intake = Intake(self, clock=lambda: self.now_ns)

    def send(self, peer: str, *said: bytes) -> None:
        for each in said:
            self.outside[peer].writer.send_always(each)
        self.outside[peer].flush()

    def handle(self, message: bytes, reply_to: object) -> None:
        self.handled.append(bytes(message))
        self.now_ns += int(message.split()[1]) * MS

    def take_long(self, message: bytearray, reply_to: object) -> None:
        self.handled.append(bytes(message[:4]))

    def round(self) -> list[bytes]:
        at = len(self.handled)
        handled = self.intake.take(self.links, self.now_ns)
        assert handled == len(self.handled) - at
        return self.handled[at:]

    def says(self, name: str, how_many: int, *, ms: int) -> list[bytes]:
        return [b"%b-%d %d" % (name.encode(), number, ms) for number in range(how_many)]


def test_a_round_ends_in_time_and_the_next_goes_on_where_it_was() -> None:
    stage = Stage(1)
    said = stage.says("a", 10, ms=4)
    stage.send("gateway-0", *said)
    assert stage.round() == said[:3]
    assert stage.intake.is_late
    assert stage.intake.late_us(stage.now_ns) == 12_000
    later = stage.says("b", 2, ms=1)
    stage.send("gateway-0", *later)
    assert stage.round() == said[3:6]
    assert stage.round() == said[6:9]
    assert stage.round() + stage.round() == said[9:] + later
    assert not stage.intake.is_late
    assert stage.intake.late_us(stage.now_ns) == 0


def test_what_is_quick_is_handled_in_one_round() -> None:
    stage = Stage(2)
    said = stage.says("a", 500, ms=0)
    stage.send("gateway-0", *said)
    stage.send("gateway-1", *stage.says("b", 500, ms=0))
    assert len(stage.round()) == 1_000
    assert not stage.intake.is_late


def test_a_busy_link_does_not_keep_out_the_others() -> None:
    stage = Stage(3)
    stage.send("gateway-0", *stage.says("a", 30, ms=11))
    stage.send("gateway-1", *stage.says("b", 2, ms=1))
    stage.send("gateway-2", *stage.says("c", 2, ms=11))
    assert stage.round() == [b"a-0 11"]
    assert stage.round() == [b"b-0 1", b"b-1 1", b"c-0 11"]
    assert stage.round() == [b"a-1 11"]
    assert stage.round() == [b"c-1 11"]
    assert stage.round() == [b"a-2 11"]


def test_a_long_message_does_not_overtake_what_it_was_taken_with() -> None:
    stage = Stage(1)
    said = stage.says("a", 3, ms=11)
    stage.send("gateway-0", *said)
    stage.outside["gateway-0"].writer.send_long([b"long" * 10])
    stage.outside["gateway-0"].flush()
    assert [stage.round() for _ in range(3)] == [said[:1], said[1:2], [*said[2:], b"long"]]
    assert not stage.intake.is_late


def test_a_link_that_went_down_is_not_heard_any_more_but_for_its_last_words() -> None:
    stage = Stage(2)
    said = stage.says("a", 5, ms=11)
    for peer in stage.links:
        stage.send(peer, *said)
    assert stage.round() + stage.round() == [said[0], said[0]]
    stage.send("gateway-1", b"last 0")
    stage.intake.forget(stage.links["gateway-0"])
    del stage.links["gateway-0"]
    stage.intake.empty(stage.links["gateway-1"])
    assert stage.handled[2:] == [*said[1:], b"last 0"]
    assert not stage.intake.is_late
    assert stage.round() == []


@given(st.lists(st.lists(st.sampled_from([0, 1, 3, 11, 30]), max_size=30), min_size=1, max_size=4))
@examples(200)
def test_order_is_kept_nothing_is_lost_and_no_round_takes_long(costs: list[list[int]]) -> None:
    stage = Stage(len(costs))
    said = {
        f"gateway-{at}": [b"%d-%d %d" % (at, number, ms) for number, ms in enumerate(each)]
        for at, each in enumerate(costs)
    }
    for peer, each in said.items():
        stage.send(peer, *each)
    for _ in count():
        before = stage.now_ns
        took = stage.round()
        last = int(took[-1].split()[1]) * MS if took else 0
        assert stage.now_ns - before - last <= 10 * MS
        if not took:
            break
    for at, each in enumerate(said.values()):
        assert [message for message in stage.handled if message.startswith(b"%d-" % at)] == each


def test_a_shard_answers_what_it_has_done_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round of a real shard: what is left makes it come back, and what it ends with is all that was asked."""
    monkeypatch.setattr(process, "boot_id", lambda: BOOT)
    stage = Stage(1)
    disk = FaultyDisk()
    life = Life(tmp_path, disk, links=stage.links)
    shard = life.begin()
    engine: Any = shard._engine

    class Slow:
        def handle(self, message: bytes, reply_to: Any) -> None:
            engine.handle(message, reply_to)
            stage.now_ns += 4 * MS

        take_long = engine.take_long

    shard._intake = Intake(Slow(), clock=lambda: stage.now_ns)
    asked = [messages.pack(Op.DIFF, at, messages.Diff("none", 0, 10, 1_000)) for at in range(1, 11)]
    stage.send("gateway-0", *asked)

    def answered() -> list[int]:
        return [messages.unpack(each).correlation for each in stage.outside["gateway-0"].drain()]

    assert shard._round(stage.now_ns)
    assert answered() == [1, 2, 3]
    assert shard._has_work()
    shard._finish()
    assert answered() == [4, 5, 6, 7, 8, 9, 10]
    disk.close_all()
