"""What a WebSocket is sent without asking: records, `caught_up`, gaps, deletions; to one socket and to many, through
one gateway and through two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from .client import Client, unique
from .server import Server, eventually
from .sockets import Frame, RawSocket, Socket, dialling, handshake

pytestmark = pytest.mark.e2e

Dial = Callable[..., Socket]


@pytest.fixture
def dial(server: Server) -> Iterator[Dial]:
    with dialling(server.port) as dial:
        yield dial


@pytest.fixture
def ws(dial: Dial) -> Socket:
    return dial()


# --- records and caught_up ---------------------------------------------------------------------------


def test_a_backlog_then_live(ws: Socket, api1: Client, topic: str) -> None:
    """The whole conversation, field by field and in its order."""
    api1.append_records(topic, [{"data": "a", "node": "n"}, {"data": "b"}])
    stamps = [record["$ts"] for record in api1.diff(topic)["records"]]
    ws.tell("subscribe", request_id="s", topic=topic)
    place = {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}
    assert ws.receive().json == {"op": "subscribed", "request_id": "s", "topics": {topic: place}}
    assert ws.receive().json == {
        "op": "record",
        "topic": topic,
        "from_seq": 0,
        "to_seq": 2,
        "head_seq": 2,
        "records": [
            {"$seq": 1, "$ts": stamps[0], "$node": "n", "data": "a"},
            {"$seq": 2, "$ts": stamps[1], "data": "b"},
        ],
    }
    assert ws.receive().json == {"op": "caught_up", "topic": topic, "head_seq": 2}
    api1.append(topic, "c")
    live = ws.receive()
    assert live.without("records") == {"op": "record", "topic": topic, "from_seq": 2, "to_seq": 3, "head_seq": 3}
    assert (live.seqs, live.data) == ([3], ["c"])
    ws.assert_quiet()


@pytest.mark.parametrize("tail", [True, False])
def test_caught_up_comes_at_once_where_nothing_is_owed(ws: Socket, api1: Client, topic: str, tail: bool) -> None:
    api1.put(topic)
    if tail:
        api1.append(topic, 1, 2)
    ws.tell("subscribe", topic=topic, tail=tail)
    assert ws.receive().op == "subscribed"
    assert ws.receive().json == {"op": "caught_up", "topic": topic, "head_seq": 2 if tail else 0}
    ws.assert_quiet()


def test_caught_up_once_per_topic(ws: Socket, api1: Client) -> None:
    topics = [unique() for _ in range(30)]
    for topic in topics:
        api1.append(topic, *range(10))
    ws.tell("subscribe", topics={topic: {} for topic in topics}, limit=3)
    assert ws.receive().op == "subscribed"
    frames: list[Frame] = []
    while sum(frame.op == "caught_up" for frame in frames) < len(topics):
        frames.append(ws.receive())
    for topic in topics:
        own = [frame for frame in frames if frame.topic == topic]
        assert [frame.op for frame in own] == ["record"] * 4 + ["caught_up"]
        assert [data for frame in own[:-1] for data in frame.data] == list(range(10))
    ws.assert_quiet()


def test_caught_up_when_the_rest_is_filtered(ws: Socket, api1: Client, topic: str) -> None:
    """Own records are skipped silently, so the end may be reached without a record."""
    api1.append(topic, 1, 2, 3, node="me")
    ws.tell("subscribe", topic=topic, node="me")
    assert ws.receive().op == "subscribed"
    assert ws.receive().json == {"op": "caught_up", "topic": topic, "head_seq": 3}
    api1.append(topic, 4, node="me")
    api1.append(topic, 5)
    assert ws.records(topic, 1)[0]["$seq"] == 5
    ws.assert_quiet()


def test_head_seq_tells_the_lag(ws: Socket, api1: Client, topic: str) -> None:
    api1.append(topic, *range(10))
    ws.subscribe(topic, limit=4)
    frames = ws.until("caught_up")[:-1]
    assert [(frame["from_seq"], frame["to_seq"], frame["head_seq"]) for frame in frames] == [
        (0, 4, 10),
        (4, 8, 10),
        (8, 10, 10),
    ]


def test_batches_arrive_in_order_and_once(ws: Socket, dial: Dial, api1: Client, topic: str) -> None:
    """Subscribed in the middle of a flow of appends: neither the seam nor the flow loses or repeats anything."""
    api1.append(topic, 0)
    writer = dial()
    total = 400

    def write() -> None:
        for number in range(1, total):
            writer.tell("publish", topic=topic, records=[{"data": number}], return_seqs=False)
        for ack in writer.replies(total - 1):
            assert ack.op == "ack"

    thread = threading.Thread(target=write)
    thread.start()
    ws.subscribe(topic)
    late = dial()
    place = late.subscribe(topic, tail=True)["topics"][topic]["from_seq"]
    received = ws.records(topic, total)
    assert [(record["$seq"], record["data"]) for record in received] == [(n + 1, n) for n in range(total)]
    assert late.data(topic, total - place) == list(range(place, total))
    thread.join(30)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_every_class_is_pushed(ws: Socket, api1: Client, topic: str, durability: str) -> None:
    api1.put(topic, durability=durability)
    api1.append(topic, "old")
    ws.subscribe(topic)
    api1.append(topic, "new")
    assert ws.data(topic, 2) == ["old", "new"]


def test_large_records(ws: Socket, api1: Client, topic: str) -> None:
    data = ["é" * 150_000, "x" * 1_000_000, {"a": ["🎈"] * 50_000}]
    for value in data:
        assert api1.append(topic, value).status in (200, 201)
    ws.subscribe(topic)
    assert ws.data(topic, 3) == data
    api1.append(topic, data[0])
    assert ws.data(topic, 1) == data[:1]


def test_more_than_a_ring_holds(ws: Socket, api1: Client, topic: str) -> None:
    for turn in range(30):
        api1.append(topic, *[f"{turn}:{number}:" + "x" * 10_000 for number in range(100)])
    ws.subscribe(topic, limit=1_000)
    received = ws.data(topic, 3_000)
    assert [value.rpartition(":")[0] for value in received] == [f"{n // 100}:{n % 100}" for n in range(3_000)]


def test_many_topics_on_one_socket(ws: Socket, api1: Client) -> None:
    topics = [unique() for _ in range(250)]
    for topic in topics:
        ws.tell("publish", topic=topic, records=[{"data": topic}])
    assert {ack.op for ack in ws.replies(250)} == {"ack"}
    ws.call("subscribe", topics={topic: {} for topic in topics})
    for topic in topics:
        ws.tell("publish", topic=topic, records=[{"data": [topic]}], return_seqs=False)
    seen: dict[str, list[object]] = {topic: [] for topic in topics}
    while sum(map(len, seen.values())) < 500:
        frame = ws.receive()
        if frame.op == "record":
            assert frame.topic is not None
            seen[frame.topic] += frame.data
    assert seen == {topic: [topic, [topic]] for topic in topics}


def test_a_topic_with_a_name_of_every_kind(ws: Socket, api1: Client) -> None:
    for name in ("a" * 255, "A.b_c:d-e", "0", unique("voice-room:green")):
        api1.append(name, 1)
        assert ws.subscribe(name)["topics"][name]["head_seq"] >= 1
        assert ws.receive().topic == name
        ws.until("caught_up", name)
        api1.drop(name)
        ws.until("topic_deleted", name)


# --- tombstones --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("from_seq", "gap_from"), [(0, 1), (1, 2), (5, 6)])
def test_a_place_that_is_too_old(ws: Socket, api1: Client, topic: str, from_seq: int, gap_from: int) -> None:
    api1.append(topic, *range(10), config={"cap_records": 3})
    ws.tell("subscribe", topic=topic, from_seq=from_seq)
    assert ws.receive()["topics"] == {topic: {"from_seq": from_seq, "head_seq": 10, "earliest_seq": 8}}
    assert ws.receive().json == {
        "op": "tombstone",
        "topic": topic,
        "reason": "from_seq_too_old",
        "gap_from": gap_from,
        "gap_to": 7,
        "earliest_seq": 8,
        "head_seq": 10,
    }
    frame = ws.receive()
    assert (frame["from_seq"], frame["to_seq"], frame.seqs) == (7, 10, [8, 9, 10])
    assert ws.receive().op == "caught_up"
    ws.assert_quiet()


@pytest.mark.parametrize("place", [{"from_seq": 7}, {"tail": True}], ids=str)
def test_a_place_that_is_just_young_enough(ws: Socket, api1: Client, topic: str, place: dict[str, object]) -> None:
    api1.append(topic, *range(10), config={"cap_records": 3})
    ws.subscribe(topic, **place)
    assert "tombstone" not in [frame.op for frame in ws.until("caught_up")]


def test_what_expired_is_a_gap_too(ws: Socket, api1: Client, topic: str) -> None:
    api1.append(topic, 1, 2, config={"ttl_ms": 50})
    eventually(lambda: api1.diff(topic)["tombstone"])
    ws.tell("subscribe", topic=topic)
    assert ws.receive()["topics"] == {topic: {"from_seq": 0, "head_seq": 2, "earliest_seq": 3}}
    assert ws.receive().json == {
        "op": "tombstone",
        "topic": topic,
        "reason": "from_seq_too_old",
        "gap_from": 1,
        "gap_to": 2,
        "earliest_seq": 3,
        "head_seq": 2,
    }
    assert ws.receive().json == {"op": "caught_up", "topic": topic, "head_seq": 2}


def test_a_gap_that_opens_while_live_says_why(ws: Socket, api1: Client, topic: str) -> None:
    """A batch larger than the cap: its first records were never readable."""
    api1.put(topic, cap_records=3)
    ws.settle(topic)
    api1.append(topic, *range(10))
    assert ws.receive().json == {
        "op": "tombstone",
        "topic": topic,
        "reason": "cap",
        "gap_from": 1,
        "gap_to": 7,
        "earliest_seq": 8,
        "head_seq": 10,
    }
    assert ws.records(topic, 3)[0]["$seq"] == 8
    api1.append(topic, 11)
    assert ws.data(topic, 1) == [11]  # evicting what was delivered is no gap
    ws.assert_quiet()


@pytest.mark.parametrize("head", [0, 2])
def test_a_place_beyond_the_head_means_recreated(ws: Socket, api1: Client, topic: str, head: int) -> None:
    api1.put(topic)
    if head:
        api1.append(topic, "a", "b")
    ws.tell("subscribe", topic=topic, from_seq=100)
    assert ws.receive().op == "subscribed"
    assert ws.receive().json == {
        "op": "tombstone",
        "topic": topic,
        "reason": "recreated",
        "gap_from": 1,
        "gap_to": head,
        "earliest_seq": 1,
        "head_seq": head,
    }
    api1.append(topic, "c")
    assert ws.data(topic, head + 1) == ["a", "b", "c"][2 - head :]


def test_what_somebody_deleted_is_silent(ws: Socket, api1: Client, topic: str) -> None:
    api1.append_records(topic, [{"data": number, "tag": "odd" if number % 2 else "even"} for number in range(6)])
    api1.delete(topic, before_seq=3)
    api1.delete(topic, match="odd")
    ws.subscribe(topic)
    frames = ws.until("caught_up")
    assert [frame.op for frame in frames] == ["record", "caught_up"]
    assert frames[0].data == [2, 4]
    api1.append_records(topic, [{"data": "x", "tag": "odd"}])
    assert ws.data(topic, 1) == ["x"]
    api1.delete(topic, match="odd")
    api1.append(topic, "y")
    assert ws.data(topic, 1) == ["y"]
    ws.assert_quiet()


# --- deletion of topics ------------------------------------------------------------------------------


def test_a_deleted_topic_is_over(ws: Socket, api1: Client, topic: str) -> None:
    other = unique()
    for name in (topic, other):
        api1.append(name, 1, 2)
        ws.settle(name, tail=True)
    api1.drop(topic)
    assert ws.receive().json == {"op": "topic_deleted", "topic": topic, "head_seq": 2, "reason": "deleted"}
    api1.append(topic, "new life")
    api1.append(other, 3)
    assert ws.data(other, 1) == [3]
    ws.assert_quiet()
    assert ws.subscribe(topic)["topics"] == {topic: {"from_seq": 0, "head_seq": 1, "earliest_seq": 1}}
    assert ws.data(topic, 1) == ["new life"]


def test_a_deleted_topic_can_be_unsubscribed_and_published_again(ws: Socket, api1: Client, topic: str) -> None:
    api1.put(topic)
    ws.settle(topic)
    api1.drop(topic)
    ws.until("topic_deleted", topic)
    assert ws.unsubscribe(topic)["topic"] == topic
    assert ws.call("subscribe", topic=topic).error == "topic_not_found"
    assert ws.publish(topic, 1)["created"] is True
    ws.assert_quiet()


def test_everyone_hears_of_a_deletion_once(dial: Dial, api1: Client, topic: str) -> None:
    api1.append(topic, *range(5))
    sockets = [dial() for _ in range(10)]
    for socket in sockets:
        socket.settle(topic, tail=True)
    api1.drop(topic)
    for socket in sockets:
        assert socket.receive()["head_seq"] == 5
        socket.assert_quiet(for_s=0.02)


def test_a_deletion_in_the_middle_of_a_backlog(ws: Socket, api1: Client, topic: str) -> None:
    for _ in range(10):
        api1.append(topic, *["x" * 10_000] * 100)
    ws.subscribe(topic, limit=1)
    assert ws.receive().seqs == [1]
    api1.drop(topic)
    frames = ws.until("topic_deleted")
    seqs = [seq for frame in frames if frame.op == "record" for seq in frame.seqs]
    assert seqs == list(range(2, len(seqs) + 2))
    ws.assert_quiet()


# --- several sockets, two gateways -------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two-gateways")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_GATEWAYS=2, TOPICS_MAX_SSE_CONNECTIONS=60)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def test_many_sockets_on_two_gateways_hear_the_same(two_gateways: Server, dial: Dial) -> None:
    topic = unique()
    sockets = [dial(two_gateways.port) for _ in range(40)]
    sockets[0].publish(topic, "first")
    for socket in sockets:
        socket.settle(topic, tail=True)
    for turn in range(3):
        for number, socket in enumerate(sockets):
            socket.tell("publish", topic=topic, records=[{"data": [turn, number]}], return_seqs=False)
    with two_gateways.client() as client:
        eventually(lambda: client.state(topic)["head_seq"] == 121)
        expected = client.diff(topic, 1, limit=1_000).data
    assert sorted(expected) == [[turn, number] for turn in range(3) for number in range(40)]
    for socket in sockets:
        assert {ack.op for ack in socket.replies(3)} == {"ack"}
        assert socket.data(topic, 120) == expected
        socket.close()


def test_a_deletion_reaches_the_sockets_of_both_gateways(two_gateways: Server, dial: Dial) -> None:
    topic = unique()
    sockets = [dial(two_gateways.port) for _ in range(12)]
    sockets[0].publish(topic, 1)
    for socket in sockets:
        socket.settle(topic, tail=True)
    with two_gateways.client() as client:
        client.drop(topic)
    for socket in sockets:
        assert socket.receive().op == "topic_deleted"
        socket.close()


def test_the_limit_of_connections_is_exact_over_both(two_gateways: Server) -> None:
    """More than allowed, all at once: exactly as many as allowed get in, the others learn why."""
    port, allowed, tried = two_gateways.port, 60, 90

    def slots_are_free() -> bool:
        opened = [RawSocket(port, upgraded=False) for _ in range(tried)]
        try:
            for raw in opened:
                raw.send(handshake())
            statuses = []
            for raw in opened:
                status, headers = raw.head()
                statuses.append(status)
                if status == 429:
                    assert int(headers["retry-after"]) >= 1
                    assert b'"max_sse_connections"' in raw.body(headers)
            assert set(statuses) <= {101, 429}
            assert statuses.count(101) <= allowed
            return statuses.count(101) == allowed
        finally:
            for raw in opened:
                raw.close()

    eventually(slots_are_free, every_s=0.2, what=f"{allowed} free slots")  # sockets of other tests end meanwhile
