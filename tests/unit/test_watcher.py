"""Cursors between their states, the feeds they share, and the backlog of a connection; the test plays the shard."""

from __future__ import annotations

import json
from typing import Any

import pytest
from delivery import Bell, join

from topics import limits
from topics.actors import messages
from topics.actors.messages import Following, Gap, Op, Piece, TopicGone
from topics.errors import ApiError, topic_not_found
from topics.gateway.calls import Calls
from topics.gateway.streams.feeds import Feeds, Options
from topics.gateway.streams.frames import Batch
from topics.gateway.streams.watcher import Cursor, State, Watcher

OPTIONS = Options(100, 10_000, False, True, True)
BACKLOG = 1_000
TOPIC_ID = 7


class Outlet:
    """A connection that takes what it is told to."""

    def __init__(self) -> None:
        self.written = 0
        self.sent = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def finish(self) -> None: ...
    def abort(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Client:
    """A watcher's voice: what its client hears."""

    def __init__(self, world: World, *, backlog: int = BACKLOG) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.outlet = Outlet()
        self.watcher = Watcher(
            calls=world.calls,
            feeds=world.feeds,
            outlet=self.outlet,
            voice=self,
            backlog_bytes=backlog,
            now_ns=lambda: world.now_ns,
        )
        self.world = world

    def cursor(
        self,
        topic: str = "t",
        at: int = 0,
        *,
        topic_id: int = TOPIC_ID,
        nodes: list[str] | None = None,
        options: Options = OPTIONS,
    ) -> Cursor:
        cursor = Cursor(self.watcher, topic=topic, shard=0, at=at, topic_id=topic_id, options=options, nodes=nodes)
        cursor.feed_moved()
        return cursor

    def tell_records(self, cursor: Cursor, batch: Batch) -> None:
        text = batch.sse()
        self.outlet.write(text)
        shown = json.loads(text.partition(b"data: ")[2])
        seqs = [record["$seq"] for record in shown["records"]]
        self.heard.append(("records", cursor.topic, seqs))
        assert cursor.at == batch.piece.to_seq

    def tell_gap(self, cursor: Cursor, gap: Gap, head_seq: int, reason: bytes) -> None:
        self.outlet.write(b"gap")
        self.heard.append(("gap", cursor.topic, gap.gap_from, gap.gap_to, reason.decode()))
        assert cursor.at == gap.gap_to or gap.reason == "recreated"

    def tell_caught_up(self, cursor: Cursor, head_seq: int) -> None:
        self.heard.append(("caught up", cursor.topic, head_seq))
        assert cursor.at == head_seq

    def tell_gone(self, cursor: Cursor, head_seq: int) -> None:
        self.heard.append(("gone", cursor.topic, head_seq))

    def tell_paced(self, topics: list[str], retry_after_ms: int) -> None:
        self.heard.append(("paced", topics, retry_after_ms))

    def hears(self) -> list[tuple[Any, ...]]:
        heard, self.heard = self.heard, []
        return heard

    def drains(self, *, left: int = 0) -> None:
        self.outlet.sent = self.outlet.written - left
        if self.watcher.is_drained:
            self.watcher.drained()


class World:
    """A gateway's half of a link, and the other half in the test's hands."""

    def __init__(self, *, linked: bool = True) -> None:
        self.now_ns = 5
        self.calls = Calls(shards=1, timeout_ms=60_000)
        self.feeds = Feeds(self.calls, shards=1)
        self.late: list[int] = []
        self.calls.on_unasked = self._unasked
        if linked:
            self.link_up()

    def _unasked(self, shard: int, message: bytes) -> None:
        if not self.feeds.take(shard, message):
            self.late.append(message[0])

    def link_up(self) -> None:
        gateway, self.shard = join(Bell(), Bell(), ring_bytes=256 * 1024)
        self.calls.link_up(0, gateway)
        self.feeds.link_up(0)

    def link_down(self) -> None:
        self.calls.link_down(0)
        self.feeds.link_down(0)

    def asked(self) -> list[tuple[int, int, Any]]:
        """What the gateway has asked since: op, correlation, request."""
        self.calls.flush()
        found = []
        for message in self.shard.drain():
            envelope = messages.unpack(message)
            found.append((envelope.op, envelope.correlation, messages.decode_request(envelope.op, envelope.head)))
        return found

    def one(self, op: Op) -> tuple[int, Any]:
        [(found, correlation, request)] = self.asked()
        assert found == op
        return correlation, request

    def say(self, *sent: bytes) -> None:
        for message in sent:
            self.shard.writer.send_always(message)
        self.shard.flush()
        self.calls.drain()

    def following(self, correlation: int, at: int, *, head: int | None = None, topic_id: int = TOPIC_ID) -> None:
        head = at if head is None else head
        self.say(messages.pack(Op.FOLLOW, correlation, Following(topic_id, at, head)))

    def push(self, correlation: int, first: int, last: int, *, head: int | None = None, **more: Any) -> None:
        self.say(piece(Op.TAIL, correlation, first, last, head=head, **more))

    def answer(self, correlation: int, first: int, last: int, *, head: int | None = None, **more: Any) -> None:
        self.say(piece(Op.READ, correlation, first, last, head=head, **more))

    def refuse(self, op: Op, correlation: int, error: ApiError) -> None:
        self.say(messages.pack_failure(op, correlation, error))


def piece(
    op: Op,
    correlation: int,
    first: int,
    last: int,
    *,
    head: int | None = None,
    gap: Gap | None = None,
    nodes: list[str | None] | None = None,
    topic_id: int = TOPIC_ID,
    pad: int = 0,
    empty: bool = False,
) -> bytes:
    """Records from behind `first` up to `last`."""
    parts = [b'{"$seq":%d,"data":"%b"}' % (seq, b"x" * pad) for seq in range(first + 1, last + 1)]
    ends = None
    if nodes is not None:
        ends = [sum(len(part) + 1 for part in parts[: at + 1]) for at in range(len(parts))]
    shown = Piece(topic_id, first, last, last if head is None else head, gap, nodes, ends)
    return messages.pack(op, correlation, shown, b"" if empty else b",".join(parts))


@pytest.fixture
def world() -> World:
    return World()


def live(world: World, client: Client, at: int = 5, **more: Any) -> tuple[Cursor, int]:
    """A cursor that is live, and the correlation of its feed."""
    cursor = client.cursor(at=at, **more)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, at)
    assert cursor.state is State.LIVE
    assert client.hears() == [("caught up", cursor.topic, at)]
    return cursor, correlation


# --- catching up and going live ------------------------------------------------------------------------


def test_level_from_the_start(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=5)
    assert cursor.state is State.WAITING
    correlation, request = world.one(Op.FOLLOW)
    assert request == messages.Follow("t", 0, None, *OPTIONS, False)
    world.following(correlation, 5)
    assert (cursor.state, client.hears()) == (State.LIVE, [("caught up", "t", 5)])
    world.push(correlation, 5, 7)
    assert client.hears() == [("records", "t", [6, 7])]
    assert cursor.at == 7


def test_behind_it_reads_until_it_is_level(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=1)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    reading, request = world.one(Op.READ)
    assert cursor.state is State.READING
    assert request == messages.Read("t", TOPIC_ID, 1, *OPTIONS, None)
    world.answer(reading, 1, 3, head=5)
    reading, request = world.one(Op.READ)
    assert request.from_seq == 3
    world.push(correlation, 5, 6)  # not live yet: it will read that
    assert client.hears() == [("records", "t", [2, 3])]
    world.answer(reading, 3, 6)
    assert (cursor.state, client.hears()) == (State.LIVE, [("records", "t", [4, 5, 6]), ("caught up", "t", 6)])
    assert world.asked() == []


def test_ahead_of_a_feed_that_is_behind_it_waits(world: World) -> None:
    """A read reached the head before the pushes did."""
    client = Client(world)
    cursor = client.cursor(at=5)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 3, head=5)
    reading, _ = world.one(Op.READ)
    world.answer(reading, 5, 5)
    assert cursor.state is State.WAITING
    assert world.asked() == []  # not again and again
    world.push(correlation, 3, 4, head=5)
    reading, _ = world.one(Op.READ)  # the feed moved, but is not there
    world.answer(reading, 5, 5)
    assert (cursor.state, client.hears()) == (State.WAITING, [])
    world.push(correlation, 4, 5)
    assert (cursor.state, client.hears()) == (State.LIVE, [("caught up", "t", 5)])
    world.push(correlation, 5, 6)
    assert client.hears() == [("records", "t", [6])]


def test_overtaken_while_it_waits_it_reads(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=5)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 3, head=5)
    reading, _ = world.one(Op.READ)
    world.answer(reading, 5, 5)
    world.push(correlation, 3, 8)
    reading, request = world.one(Op.READ)
    assert request.from_seq == 5
    world.answer(reading, 5, 8)
    assert (cursor.state, client.hears()) == (State.LIVE, [("records", "t", [6, 7, 8]), ("caught up", "t", 8)])


def test_level_with_a_feed_that_has_more_to_come(world: World) -> None:
    """It goes live, and is caught up when the feed is."""
    client = Client(world)
    cursor = client.cursor(at=5)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5, head=9)
    assert (cursor.state, client.hears()) == (State.LIVE, [])
    world.push(correlation, 5, 7, head=9)
    assert client.hears() == [("records", "t", [6, 7])]
    world.push(correlation, 7, 9)
    assert client.hears() == [("records", "t", [8, 9]), ("caught up", "t", 9)]
    world.push(correlation, 9, 10)
    assert client.hears() == [("records", "t", [10])]


def test_caught_up_is_told_once_for_each_time(world: World) -> None:
    """Also if it lagged while it still owed one."""
    client = Client(world)
    cursor = client.cursor(at=5)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5, head=9)
    client.outlet.write(bytes(BACKLOG + 1))
    world.push(correlation, 5, 9)
    assert cursor.state is State.LAGGING
    client.drains()
    reading, _ = world.one(Op.READ)
    world.answer(reading, 5, 9)
    assert client.hears() == [("records", "t", [6, 7, 8, 9]), ("caught up", "t", 9)]
    world.push(correlation, 9, 10)
    assert client.hears() == [("records", "t", [10])]


def test_of_another_life_it_is_not_level(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=5, topic_id=99)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    assert (cursor.state, client.hears()) == (State.READING, [])
    reading, request = world.one(Op.READ)
    assert (request.topic_id, request.from_seq) == (99, 5)
    world.answer(reading, 0, 5, gap=Gap(1, 5, "recreated", 1))
    assert client.hears() == [("gap", "t", 1, 5, "recreated"), ("records", "t", [1, 2, 3, 4, 5]), ("caught up", "t", 5)]
    assert (cursor.state, cursor.topic_id) == (State.LIVE, TOPIC_ID)


def test_whichever_life_there_is_will_do(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=5, topic_id=0)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    assert (cursor.state, cursor.topic_id) == (State.LIVE, TOPIC_ID)


# --- gaps ----------------------------------------------------------------------------------------------


def test_a_gap_of_the_first_read_is_an_old_cursor_s_and_later_ones_keep_their_reason(world: World) -> None:
    client = Client(world)
    client.cursor(at=0)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 9)
    reading, _ = world.one(Op.READ)
    world.answer(reading, 3, 5, head=9, gap=Gap(1, 3, "ttl", 4))
    reading, _ = world.one(Op.READ)
    world.answer(reading, 7, 9, gap=Gap(6, 7, "cap", 8))
    world.push(correlation, 12, 13, gap=Gap(10, 12, "mixed", 13))
    assert client.hears() == [
        ("gap", "t", 1, 3, "from_seq_too_old"),
        ("records", "t", [4, 5]),
        ("gap", "t", 6, 7, "cap"),
        ("records", "t", [8, 9]),
        ("caught up", "t", 9),
        ("gap", "t", 10, 12, "mixed"),
        ("records", "t", [13]),
    ]


def test_a_gap_behind_a_lag_is_an_old_cursor_s(world: World) -> None:
    client = Client(world)
    _, correlation = live(world, client)
    client.outlet.write(bytes(BACKLOG + 1))
    world.push(correlation, 5, 6)
    client.drains()
    reading, _ = world.one(Op.READ)
    world.answer(reading, 7, 9, gap=Gap(6, 7, "cap", 8))
    assert client.hears() == [("gap", "t", 6, 7, "from_seq_too_old"), ("records", "t", [8, 9])]


def test_a_gap_with_nothing_behind_it(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    world.push(correlation, 8, 8, gap=Gap(6, 8, "ttl", 9))
    assert client.hears() == [("gap", "t", 6, 8, "ttl")]
    assert cursor.at == 8


# --- own records ---------------------------------------------------------------------------------------


def test_own_records_are_passed_over_without_a_word(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client, nodes=["me"])
    world.push(correlation, 5, 8, nodes=["me", "you", None])
    world.push(correlation, 8, 9, nodes=["me"])
    assert client.hears() == [("records", "t", [7, 8])]
    assert cursor.at == 9


def test_reads_name_the_nodes_and_pushes_come_with_theirs(world: World) -> None:
    client = Client(world)
    client.cursor(at=1, nodes=["b", "a"])
    correlation, request = world.one(Op.FOLLOW)
    assert request.with_nodes
    world.following(correlation, 5)
    _, request = world.one(Op.READ)
    assert request.nodes == ["a", "b"]


def test_a_push_of_nothing_moves_on(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    world.push(correlation, 5, 8, empty=True)
    assert (client.hears(), cursor.at, cursor.state) == ([], 8, State.LIVE)


# --- a slow client -------------------------------------------------------------------------------------


def test_a_push_to_a_full_client_is_not_written(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    world.push(correlation, 5, 6, pad=BACKLOG)
    assert client.hears() == [("records", "t", [6])]
    assert client.watcher.full
    written = client.outlet.written
    world.now_ns = 77
    world.push(correlation, 6, 7)
    world.push(correlation, 7, 8)
    assert (cursor.state, cursor.at, client.outlet.written) == (State.LAGGING, 6, written)
    assert client.watcher.full_since_ns == 77
    client.drains(left=BACKLOG // 2 + 1)
    assert (cursor.state, cursor.at) == (State.LAGGING, 6)
    client.drains(left=BACKLOG // 2)
    assert client.watcher.full_since_ns == 0
    reading, request = world.one(Op.READ)
    assert request.from_seq == 6
    world.answer(reading, 6, 8)
    assert client.hears() == [("records", "t", [7, 8]), ("caught up", "t", 8)]
    assert cursor.state is State.LIVE


def test_exactly_full_is_not_full(world: World) -> None:
    client = Client(world)
    client.outlet.write(bytes(BACKLOG))
    assert not client.watcher.full
    client.outlet.write(b"x")
    assert client.watcher.full


def test_a_read_that_fills_the_client_is_its_last(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=0)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 9)
    reading, _ = world.one(Op.READ)
    world.answer(reading, 0, 2, head=9, pad=BACKLOG)
    assert (cursor.state, cursor.at) == (State.LAGGING, 2)
    assert world.asked() == []
    client.drains()
    _, request = world.one(Op.READ)
    assert request.from_seq == 2


def test_answers_that_find_it_full_are_read_again_later(world: World) -> None:
    """Several topics read at once: only one answer may go beyond the bound."""
    client = Client(world)
    cursors = [client.cursor(topic, at=0) for topic in ("a", "b", "c")]
    for _, correlation, _ in world.asked():
        world.following(correlation, 9)
    reads = {request.topic: correlation for _, correlation, request in world.asked()}
    world.answer(reads["a"], 0, 2, head=9, pad=BACKLOG)
    written = client.outlet.written
    world.answer(reads["b"], 0, 9, pad=BACKLOG)
    world.answer(reads["c"], 3, 9, gap=Gap(1, 3, "cap", 4))
    assert client.outlet.written == written
    assert [(cursor.state, cursor.at) for cursor in cursors] == [(State.LAGGING, at) for at in (2, 0, 0)]
    client.hears()
    client.drains()
    reads = {request.topic: correlation for _, correlation, request in world.asked()}
    world.answer(reads["c"], 3, 9, gap=Gap(1, 3, "cap", 4))
    heard = client.hears()
    assert heard[0] == ("gap", "c", 1, 3, "from_seq_too_old")


def test_the_rest_of_the_watchers_go_on(world: World) -> None:
    slow, quick = Client(world), Client(world)
    _, correlation = live(world, slow)
    quick.cursor(at=5)
    assert quick.hears() == [("caught up", "t", 5)]
    assert world.asked() == []  # one feed for both
    slow.outlet.write(bytes(BACKLOG + 1))
    world.push(correlation, 5, 6)
    assert (slow.hears(), quick.hears()) == ([], [("records", "t", [6])])


def test_a_lagging_cursor_that_is_closed_stays_closed(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    client.outlet.write(bytes(BACKLOG + 1))
    world.push(correlation, 5, 6)
    cursor.close()
    assert [op for op, _, _ in world.asked()] == [Op.UNFOLLOW]
    client.drains()
    assert (cursor.state, world.asked()) == (State.GONE, [])


# --- many topics of one watcher ------------------------------------------------------------------------


def test_a_few_reads_at_a_time(world: World) -> None:
    client = Client(world, backlog=100_000)
    names = [f"t{number}" for number in range(limits.WATCH_READS + 3)]
    for name in names:
        client.cursor(name, at=0)
    for _, correlation, _ in world.asked():
        world.following(correlation, 3)
    order = []
    out: list[tuple[int, Any]] = []
    while True:
        out += [(correlation, request) for _, correlation, request in world.asked()]
        if not out:
            break
        assert len(out) <= limits.WATCH_READS
        correlation, request = out.pop(0)
        order.append(request.topic)
        world.answer(correlation, 0, 3)
    assert sorted(order) == sorted(names)
    assert {topic for kind, topic, *_ in client.hears() if kind == "caught up"} == set(names)


def test_a_closed_cursor_gives_its_turn_away(world: World) -> None:
    client = Client(world)
    cursors = [client.cursor(f"t{number}", at=0) for number in range(limits.WATCH_READS + 2)]
    for _, correlation, _ in world.asked():
        world.following(correlation, 3)
    out = [(correlation, request.topic) for _, correlation, request in world.asked()]
    for cursor in cursors[:-1]:
        cursor.close()
    world.asked()
    for correlation, _ in out:  # nobody wants these answers any more
        world.answer(correlation, 0, 3)
    _, request = world.one(Op.READ)
    assert request.topic == cursors[-1].topic
    assert client.hears() == []


# --- topics go -----------------------------------------------------------------------------------------


def test_a_live_topic_is_deleted(world: World) -> None:
    client, other = Client(world), Client(world)
    cursor, correlation = live(world, client)
    other.cursor(at=2)
    reading, _ = world.one(Op.READ)
    world.say(messages.pack(Op.TOPIC_GONE, correlation, TopicGone(9)))
    assert (cursor.state, cursor.at, client.hears()) == (State.GONE, 9, [("gone", "t", 9)])
    assert len(world.feeds) == 0
    world.push(correlation, 9, 10)
    assert client.hears() == []
    world.refuse(Op.READ, reading, topic_not_found("t"))
    assert other.hears() == [("gone", "t", 2)]
    assert world.asked() == []


def test_a_topic_that_is_not_there(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=4)
    correlation, _ = world.one(Op.FOLLOW)
    world.refuse(Op.FOLLOW, correlation, topic_not_found("t"))
    assert (cursor.state, client.hears()) == (State.GONE, [("gone", "t", 4)])
    assert len(world.feeds) == 0
    cursor.close()
    assert world.asked() == []


def test_deleted_while_it_reads(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=1)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    reading, _ = world.one(Op.READ)
    world.say(messages.pack(Op.TOPIC_GONE, correlation, TopicGone(5)))
    assert client.hears() == []
    world.refuse(Op.READ, reading, topic_not_found("t"))
    assert [kind for kind, *_ in client.hears()] == ["gone"]
    assert cursor.state is State.GONE


def test_deleted_while_its_last_answer_is_on_the_way(world: World) -> None:
    """The read was answered before; the next step finds that the topic is gone."""
    client = Client(world)
    cursor = client.cursor(at=1)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    reading, _ = world.one(Op.READ)
    world.say(
        messages.pack(Op.TOPIC_GONE, correlation, TopicGone(5)),
        piece(Op.READ, reading, 1, 5),
    )
    assert client.hears() == [("records", "t", [2, 3, 4, 5]), ("gone", "t", 5)]
    assert cursor.state is State.GONE


def test_deleted_while_it_lags(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    client.outlet.write(bytes(BACKLOG + 1))
    world.push(correlation, 5, 6)
    world.say(messages.pack(Op.TOPIC_GONE, correlation, TopicGone(6)))
    assert client.hears() == []
    client.drains()
    assert client.hears() == [("gone", "t", 6)]
    assert cursor.state is State.GONE
    assert world.asked() == []


def test_deleted_and_made_again_while_it_reads(world: World) -> None:
    """It goes on in the new life, with a feed of its own."""
    client = Client(world)
    cursor = client.cursor(at=1)
    old, _ = world.one(Op.FOLLOW)
    world.following(old, 50)
    reading, _ = world.one(Op.READ)
    world.say(messages.pack(Op.TOPIC_GONE, old, TopicGone(50)))
    world.answer(reading, 0, 3, topic_id=8, gap=Gap(1, 3, "recreated", 1))
    assert client.hears() == [("gap", "t", 1, 3, "recreated"), ("records", "t", [1, 2, 3])]
    new, request = world.one(Op.FOLLOW)
    assert request.topic_id == 0
    world.following(new, 3, topic_id=8)
    assert client.hears() == [("caught up", "t", 3)]
    assert (cursor.state, cursor.at, cursor.topic_id) == (State.LIVE, 3, 8)
    world.push(new, 3, 4, topic_id=8)
    assert client.hears() == [("records", "t", [4])]
    cursor.close()
    assert [op for op, _, _ in world.asked()] == [Op.UNFOLLOW]
    assert len(world.feeds) == 0


def test_a_new_watcher_of_a_topic_that_was_made_again(world: World) -> None:
    client = Client(world)
    _, old = live(world, client)
    world.say(messages.pack(Op.TOPIC_GONE, old, TopicGone(5)))
    later = Client(world)
    later.cursor(at=0, topic_id=8)
    new, request = world.one(Op.FOLLOW)
    assert (new != old, request.topic_id, request.from_seq) == (True, 0, None)
    world.following(new, 0, topic_id=8)
    assert later.hears() == [("caught up", "t", 0)]


# --- shards go and come --------------------------------------------------------------------------------


def test_live_watchers_wait_for_a_shard_and_go_on(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    world.push(correlation, 5, 6)
    client.hears()
    world.link_down()
    assert (cursor.state, client.hears()) == (State.LIVE, [])
    world.link_up()
    again, request = world.one(Op.FOLLOW)
    assert (request.topic_id, request.from_seq) == (TOPIC_ID, 6)
    world.following(again, 6, head=8)
    world.push(again, 6, 8)
    assert client.hears() == [("records", "t", [7, 8])]
    assert (cursor.state, len(world.feeds)) == (State.LIVE, 1)


def test_a_feed_goes_on_from_where_it_stands_and_not_from_the_head(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    world.push(correlation, 5, 6, head=9)
    assert client.hears() == [("records", "t", [6])]
    world.link_down()
    world.link_up()
    again, request = world.one(Op.FOLLOW)
    assert request.from_seq == 6
    world.following(again, 6, head=9)
    world.push(again, 6, 9)
    assert client.hears() == [("records", "t", [7, 8, 9])]
    assert (cursor.state, cursor.at) == (State.LIVE, 9)


def test_the_topic_is_gone_when_the_shard_is_back(world: World) -> None:
    client = Client(world)
    cursor, _ = live(world, client)
    world.link_down()
    world.link_up()
    again, _ = world.one(Op.FOLLOW)
    world.refuse(Op.FOLLOW, again, topic_not_found("t"))
    assert (cursor.state, client.hears()) == (State.GONE, [("gone", "t", 5)])


def test_a_shard_dies_under_a_read(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=1)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    world.one(Op.READ)
    world.link_down()
    assert (cursor.state, client.hears()) == (State.WAITING, [])
    client.watcher.sweep()  # still away: nothing is asked of nobody
    assert cursor.state is State.WAITING
    world.link_up()
    again, request = world.one(Op.FOLLOW)
    assert request.from_seq == 5
    world.following(again, 5)
    reading, request = world.one(Op.READ)
    assert request.from_seq == 1
    world.answer(reading, 1, 5)
    assert client.hears()[-1] == ("caught up", "t", 5)
    client.watcher.sweep()
    assert world.asked() == []


def test_a_shard_dies_under_a_follow(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=1)
    world.one(Op.FOLLOW)
    world.link_down()
    assert cursor.state is State.WAITING
    world.feeds.sweep()
    world.link_up()
    correlation, request = world.one(Op.FOLLOW)
    assert (request.topic_id, request.from_seq) == (0, None)
    world.following(correlation, 1)
    assert client.hears() == [("caught up", "t", 1)]
    world.feeds.sweep()
    assert world.asked() == []


def test_a_watcher_that_comes_while_the_shard_is_away() -> None:
    world = World(linked=False)
    client = Client(world)
    names = [f"t{number}" for number in range(3 * limits.WATCH_READS)]
    cursors = [client.cursor(name, at=1) for name in names]
    assert {cursor.state for cursor in cursors} == {State.WAITING}
    world.feeds.sweep()
    client.watcher.sweep()
    world.link_up()
    for _, correlation, request in world.asked():
        assert request.from_seq is None
        world.following(correlation, 1)
    assert {cursor.state for cursor in cursors} == {State.LIVE}
    assert len(world.feeds) == len(names)


def test_reads_fail_at_once_while_a_known_feed_s_shard_is_away(world: World) -> None:
    """Many topics, so that the queue of reads is worked off inside of itself."""
    client = Client(world, backlog=100_000)
    names = [f"t{number}" for number in range(3 * limits.WATCH_READS)]
    cursors = [client.cursor(name, at=1) for name in names]
    for _, correlation, _ in world.asked():
        world.following(correlation, 5)
    world.asked()
    world.link_down()
    assert {cursor.state for cursor in cursors} == {State.WAITING}
    client.watcher.sweep()
    client.watcher.sweep()
    assert {cursor.state for cursor in cursors} == {State.WAITING}
    world.link_up()
    for op, correlation, _ in world.asked():
        assert op == Op.FOLLOW
        world.following(correlation, 5)
    done = 0
    while out := world.asked():
        assert len(out) <= limits.WATCH_READS
        for _, correlation, _ in out:
            world.answer(correlation, 1, 5)
            done += 1
    assert done == len(names)
    assert {cursor.state for cursor in cursors} == {State.LIVE}


def test_a_shard_with_too_much_to_do_is_asked_again_later(world: World) -> None:
    client = Client(world)
    cursor = client.cursor(at=1)
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    reading, _ = world.one(Op.READ)
    world.refuse(Op.READ, reading, ApiError("throttled", "not now"))
    assert (cursor.state, world.asked()) == (State.WAITING, [])
    client.watcher.sweep()
    reading, _ = world.one(Op.READ)
    world.refuse(Op.READ, reading, ApiError("internal", "damaged"))
    world.push(correlation, 5, 6)  # the feed moved: reason enough to try
    reading, _ = world.one(Op.READ)
    world.answer(reading, 1, 6)
    assert cursor.state is State.LIVE
    client.watcher.sweep()
    assert world.asked() == []


def test_a_follow_that_was_refused_is_tried_again(world: World) -> None:
    client = Client(world)
    client.cursor(at=1)
    correlation, _ = world.one(Op.FOLLOW)
    world.refuse(Op.FOLLOW, correlation, ApiError("throttled", "not now"))
    assert world.asked() == []
    world.feeds.sweep()
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 1)
    world.feeds.sweep()
    assert (world.asked(), client.hears()) == ([], [("caught up", "t", 1)])


def test_a_tail_that_failed_is_followed_again(world: World) -> None:
    client = Client(world)
    cursor, correlation = live(world, client)
    world.refuse(Op.TAIL, correlation, ApiError("internal", "damaged"))
    assert (cursor.state, world.asked()) == (State.LIVE, [])
    world.feeds.sweep()
    again, request = world.one(Op.FOLLOW)
    assert (request.topic_id, request.from_seq) == (TOPIC_ID, 5)
    world.following(again, 5, head=6)
    world.push(again, 5, 6)
    assert client.hears() == [("records", "t", [6])]


# --- feeds are shared and given up ---------------------------------------------------------------------


def test_one_feed_for_all_that_want_the_same(world: World) -> None:
    clients = [Client(world) for _ in range(3)]
    cursors = [client.cursor(at=5) for client in clients]
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    world.push(correlation, 5, 6)
    assert [client.hears()[-1] for client in clients] == [("records", "t", [6])] * 3
    for cursor in cursors[:-1]:
        cursor.close()
    assert world.asked() == []
    cursors[-1].close()
    gone, request = world.one(Op.UNFOLLOW)
    assert (gone, request) == (correlation, messages.Unfollow())
    assert len(world.feeds) == 0
    world.push(correlation, 6, 7)
    assert [client.hears() for client in clients] == [[]] * 3


@pytest.mark.parametrize(
    "other",
    [
        {"topic": "other"},
        {"options": OPTIONS._replace(limit=1)},
        {"options": OPTIONS._replace(max_bytes=1)},
        {"options": OPTIONS._replace(include_tags=True)},
        {"options": OPTIONS._replace(include_data=False)},
        {"nodes": ["a"]},
    ],
)
def test_other_wishes_other_feed(world: World, other: dict[str, Any]) -> None:
    client = Client(world)
    client.cursor()
    client.cursor(**other)
    assert [op for op, _, _ in world.asked()] == [Op.FOLLOW, Op.FOLLOW]
    assert len(world.feeds) == 2


def test_other_nodes_same_feed(world: World) -> None:
    one, two = Client(world), Client(world)
    one.cursor(at=5, nodes=["a"])
    two.cursor(at=5, nodes=["b", "c"])
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    world.push(correlation, 5, 7, nodes=["a", "b"])
    assert one.hears()[-1] == ("records", "t", [7])
    assert two.hears()[-1] == ("records", "t", [6])


def test_a_feed_that_is_left_before_it_was_answered(world: World) -> None:
    client = Client(world)
    client.cursor().close()
    asked = world.asked()
    assert [op for op, _, _ in asked] == [Op.FOLLOW, Op.UNFOLLOW]
    assert asked[0][1] == asked[1][1]
    world.following(asked[0][1], 5)
    assert (client.hears(), len(world.feeds)) == ([], 0)


def test_a_follow_that_was_refused_after_it_was_left_is_not_tried_again(world: World) -> None:
    client = Client(world)
    client.cursor().close()
    (_, correlation, _), _ = world.asked()
    world.refuse(Op.FOLLOW, correlation, ApiError("throttled", "not now"))
    world.feeds.sweep()
    assert world.asked() == []


def test_an_answer_too_late_is_unfollowed(world: World) -> None:
    """The shard has a tail that nobody here uses."""
    client = Client(world)
    client.cursor(at=5)
    late, _ = world.one(Op.FOLLOW)
    for entry in world.calls._pending[0].values():
        entry.deadline_ms = 0
    world.calls.expire()
    world.following(late, 5)
    assert world.one(Op.UNFOLLOW)[0] == late
    world.feeds.sweep()
    correlation, _ = world.one(Op.FOLLOW)
    world.following(correlation, 5)
    assert client.hears() == [("caught up", "t", 5)]


def test_pushes_for_nobody(world: World) -> None:
    world.push(12345, 5, 6)
    world.say(messages.pack(Op.TOPIC_GONE, 12345, TopicGone(9)))
    assert world.late == []
    world.say(messages.pack(Op.DROP_TOPIC, 12345, messages.TopicDropped(True)))
    assert world.late == [Op.DROP_TOPIC]
