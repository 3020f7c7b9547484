"""Every command of a WebSocket: its options and clamps, its reply, its refusals. The frames that are pushed have a file
of their own, as has the protocol below."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .client import Client, unique
from .conftest import SMALL
from .server import Server
from .sockets import Frame, Socket, dialling
from .test_append import VERBATIM

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024
Dial = Callable[..., Socket]


@pytest.fixture
def dial(server: Server) -> Iterator[Dial]:
    with dialling(server.port) as dial:
        yield dial


@pytest.fixture
def ws(dial: Dial) -> Socket:
    return dial()


@pytest.fixture
def small_ws(small_server: Server, dial: Dial) -> Socket:
    return dial(small_server.port)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for three topics per socket, and few topics at all."""
    folder = tmp_path_factory.mktemp("narrow")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_MAX_WATCH_TOPICS=3, TOPICS_MAX_TOPICS=9)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def assert_refused(ws: Socket, code: str, op: str, **fields: object) -> Frame:
    """An error with that code, for that request, and the socket is as good as before."""
    refused = ws.call(op, **fields)
    assert refused.error == code, refused
    ws.ping()
    return refused


# --- ping and request ids ----------------------------------------------------------------------------


def test_ping(ws: Socket) -> None:
    before = time.time_ns() // 1_000_000
    pong = ws.call("ping", request_id="p")
    assert pong.without("ts") == {"op": "pong", "request_id": "p"}
    assert isinstance(pong["ts"], int)
    assert before - 1 <= pong["ts"] <= time.time_ns() // 1_000_000 + 1


@pytest.mark.parametrize(
    "request_id",
    ["r1", "", "é 漢 🎈", 'a"b\\c\n', "x" * 254, 0, 7, -1, 2**63 - 1, 2**70, 1.5, True, ["a", {}], {"a": [1, None]}],
    ids=repr,
)
def test_a_request_id_comes_back_as_it_was(ws: Socket, topic: str, request_id: object) -> None:
    for op, fields in (
        ("ping", {}),
        ("publish", {"topic": topic, "records": [{"data": 1}]}),
        ("subscribe", {"topic": topic, "tail": True}),
        ("unsubscribe", {"topic": topic}),
        ("publish", {"topic": topic, "records": []}),
        ("sing", {}),
    ):
        reply = ws.call(op, request_id=request_id, **fields)
        assert (reply.request_id, type(reply.request_id)) == (request_id, type(request_id))


def test_without_a_request_id_there_is_none_in_the_reply(ws: Socket, topic: str) -> None:
    for op, reply, fields in (
        ("ping", "pong", {}),
        ("publish", "ack", {"topic": topic, "records": [{"data": 1}]}),
        ("subscribe", "subscribed", {"topic": topic, "from_seq": 1}),
        ("unsubscribe", "unsubscribed", {"topic": topic}),
        ("publish", "error", {"topic": topic, "records": []}),
        ("sing", "error", {}),
    ):
        ws.tell(op, **fields)
        frame = ws.receive()
        while frame.op == "caught_up":
            frame = ws.receive()
        assert frame.op == reply
        assert "request_id" not in frame


def test_a_request_id_that_is_too_long_is_refused_without_it(ws: Socket, topic: str) -> None:
    for op in ("publish", "sing"):
        ws.tell(op, request_id="x" * 255, topic=topic, records=[{"data": 1}])
        refused = ws.receive()
        assert refused.error == ("invalid_request" if op == "publish" else "unsupported_message")
        assert "request_id" not in refused
    assert ws.call("subscribe", topic=topic).error == "topic_not_found"


def test_a_lone_surrogate_is_called_that(ws: Socket, topic: str) -> None:
    """A string that was cut inside of a character: what JSON.stringify makes of it."""
    for fields in ({"request_id": "\ud83d"}, {"records": [{"data": "\ud83d"}], "request_id": 1}):
        ws.tell("publish", **{"topic": topic, "records": [{"data": 1}], **fields})
        refused = ws.receive()
        assert refused.error == "invalid_json"
        assert "a lone surrogate" in refused["message"]
    ws.ping()


def test_unknown_fields_are_ignored(ws: Socket, topic: str) -> None:
    ws.publish(topic, 1, colour="red")
    ws.subscribe(topic, colour="red")
    assert ws.data(topic, 1) == [1]
    ws.unsubscribe(topic, colour="red")
    assert ws.call("ping", colour="red").op == "pong"


# --- subscribe ---------------------------------------------------------------------------------------


def test_subscribe_names_the_place_in_each_topic(ws: Socket, api1: Client, topic: str) -> None:
    api1.append(topic, *range(5))
    api1.delete(topic, before_seq=3)
    reply = ws.call("subscribe", request_id="s", topic=topic, from_seq=4)
    assert reply.json == {
        "op": "subscribed",
        "request_id": "s",
        "topics": {topic: {"from_seq": 4, "head_seq": 5, "earliest_seq": 3}},
    }


@pytest.mark.parametrize(
    ("place", "from_seq", "expected"),
    [
        ({}, 0, [0, 1, 2]),
        ({"from_seq": 0}, 0, [0, 1, 2]),
        ({"from_seq": 2}, 2, [2]),
        ({"from_seq": 3}, 3, []),
        ({"tail": True}, 3, []),
        ({"tail": False, "from_seq": 1}, 1, [1, 2]),
        ({"tail": True, "from_seq": 1}, 3, []),
    ],
)
@pytest.mark.parametrize("form", ["topic", "topics"])
def test_where_it_starts(
    ws: Socket, api1: Client, topic: str, form: str, place: dict[str, object], from_seq: int, expected: list[int]
) -> None:
    api1.append(topic, 0, 1, 2)
    if form == "topic":
        reply = ws.call("subscribe", topic=topic, **place)
    else:
        reply = ws.call("subscribe", topics={topic: place})
    assert reply["topics"] == {topic: {"from_seq": from_seq, "head_seq": 3, "earliest_seq": 1}}
    ws.publish(topic, "new")
    assert ws.data(topic, len(expected) + 1) == [*expected, "new"]


def test_subscribe_to_many_topics_at_once(ws: Socket, api1: Client) -> None:
    topics = [unique() for _ in range(20)]
    for number, topic in enumerate(topics):
        api1.append(topic, f"old {number}", f"new {number}")
    reply = ws.call("subscribe", topics={topic: {"from_seq": 1} for topic in topics})
    assert reply["topics"] == {topic: {"from_seq": 1, "head_seq": 2, "earliest_seq": 1} for topic in topics}
    for number, topic in enumerate(topics):
        assert ws.data(topic, 1) == [f"new {number}"]


def test_topics_may_be_added_one_by_one(ws: Socket, api1: Client) -> None:
    topics = [unique() for _ in range(10)]
    for topic in topics:
        api1.put(topic)
        ws.subscribe(topic)
    for number, topic in enumerate(topics):
        api1.append(topic, number)
    assert [ws.data(topic, 1) for topic in topics] == [[number] for number in range(10)]


def test_an_empty_topic_can_be_subscribed(ws: Socket, api1: Client, topic: str) -> None:
    api1.put(topic)
    assert ws.subscribe(topic)["topics"] == {topic: {"from_seq": 0, "head_seq": 0, "earliest_seq": 1}}
    api1.append(topic, 1)
    assert ws.data(topic, 1) == [1]


def frames_of(ws: Socket, topic: str, count: int) -> list[Frame]:
    """The record frames that bring so many records, each where the one before ended."""
    frames: list[Frame] = []
    while sum(len(frame["records"]) for frame in frames) < count:
        frame = ws.receive()
        assert frame.topic == topic
        if frame.op == "record":
            assert frame["from_seq"] == (frames[-1]["to_seq"] if frames else 0)
            frames.append(frame)
    return frames


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (7, 7), (0, 256), (None, 256), (1_000, 1_000), (5_000, 1_000)])
def test_limit_bounds_a_frame(ws: Socket, api1: Client, topic: str, limit: int | None, most: int) -> None:
    total = min(most * 2 + 1, 1_500)
    api1.append(topic, *range(total))
    ws.subscribe(topic, **({} if limit is None else {"limit": limit}))
    frames = frames_of(ws, topic, total)
    assert max(len(frame["records"]) for frame in frames) == most
    assert [data for frame in frames for data in frame.data] == list(range(total))


def test_limit_follows_its_variable(small_ws: Socket, topic: str) -> None:
    small_ws.publish(topic, *range(SMALL["TOPICS_MAX_BATCH_RECORDS"]))
    small_ws.subscribe(topic, limit=500)
    frames = frames_of(small_ws, topic, SMALL["TOPICS_MAX_BATCH_RECORDS"])
    assert max(len(frame["records"]) for frame in frames) == SMALL["TOPICS_MAX_LIMIT"]


@pytest.mark.parametrize(
    ("given", "most"),
    [(1, 0), (5_000, 5_000), (None, 256 * 1024), (0, MIB), (10**12, 8 * MIB)],
    ids=["one byte", "small", "left out", "zero", "huge"],
)
def test_max_batch_bytes_bounds_a_frame(ws: Socket, api1: Client, topic: str, given: int | None, most: int) -> None:
    """A frame ends before the record that would exceed the budget, and has at least one."""
    size = 1_000 if most < MIB else 200_000
    total = {0: 5, 5_000: 30}.get(most, most * 2 // size)
    for at in range(0, total, 200):
        api1.append(topic, *["x" * size] * min(200, total - at))
    ws.subscribe(topic, limit=1_000, **({} if given is None else {"max_batch_bytes": given}))
    largest = 0
    for frame in frames_of(ws, topic, total):
        content = sum(len(data) for data in frame.data)
        assert len(frame["records"]) == 1 or content <= most
        largest = max(largest, content)
    assert largest >= min(most // 2, size * total // 2)


def test_what_a_record_shows(ws: Socket, api1: Client, topic: str) -> None:
    full = {"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": [1]}}
    api1.append_records(topic, [full, {"data": None}])

    def seen(**options: object) -> list[set[str]]:
        ws.subscribe(topic, **options)
        records = ws.records(topic, 2)
        ws.until("caught_up", topic)
        return [set(record) - {"$seq", "$ts"} for record in records]

    assert seen() == [{"data", "$node", "meta"}, {"data"}]
    assert seen(include_tags=True) == [{"data", "$node", "$tag", "meta"}, {"data"}]
    assert seen(include_meta=False) == [{"data", "$node"}, {"data"}]
    assert seen(include_data=False, include_meta=False) == [{"$node"}, set()]
    assert seen(include_data=False, include_meta=False, include_tags=True) == [{"$node", "$tag"}, set()]
    assert seen(include_data=True, include_meta=True, include_tags=False) == [{"data", "$node", "meta"}, {"data"}]
    ws.subscribe(topic, include_tags=True)
    record = ws.records(topic, 2)[0]
    assert (record["$tag"], record["$node"], record["meta"], record["data"]) == ("t", "n", {"m": [1]}, {"a": 1})


@pytest.mark.parametrize("consistency", ["eventual", "strong"])
def test_consistency_is_accepted(ws: Socket, topic: str, consistency: str) -> None:
    ws.publish(topic, 1, config={"durable": True})
    ws.subscribe(topic, consistency=consistency)
    ws.publish(topic, 2)
    assert ws.data(topic, 2) == [1, 2]


@pytest.mark.parametrize(
    ("node", "expected"),
    [("a", ["b", None]), (["a"], ["b", None]), (["a", "b"], [None]), ([], ["a", "b", None]), ("A", ["a", "b", None])],
    ids=str,
)
def test_the_node_filter(ws: Socket, api1: Client, topic: str, node: object, expected: list[str | None]) -> None:
    api1.append_records(topic, [{"data": "a", "node": "a"}, {"data": "b", "node": "b"}, {"data": None}])
    ws.subscribe(topic, node=node)
    assert ws.data(topic, len(expected)) == expected
    api1.append_records(topic, [{"data": 1, "node": "a"}, {"data": 2, "node": "b"}, {"data": 3}])
    live = {"a": 1, "b": 2, None: 3}
    assert ws.data(topic, len(expected)) == [live[name] for name in expected]
    ws.assert_quiet()


def test_a_topic_may_ignore_nodes(ws: Socket, api1: Client, topic: str) -> None:
    api1.put(topic, dedupe_node=False)
    api1.append(topic, 1, node="me")
    ws.subscribe(topic, node="me")
    api1.append(topic, 2, node="me")
    assert ws.data(topic, 2) == [1, 2]


def test_an_unknown_topic_is_an_error_and_nothing_is_subscribed(ws: Socket, api1: Client, topic: str) -> None:
    known, unknown = unique(), unique()
    api1.put(known)
    refused = assert_refused(ws, "topic_not_found", "subscribe", topic=unknown)
    assert refused["detail"]["topic"] == unknown
    assert_refused(ws, "topic_not_found", "subscribe", topics={known: {}, unknown: {}})
    api1.append(known, 1)
    api1.append(unknown, 1)
    ws.assert_quiet()
    assert ws.subscribe(unknown)["topics"][unknown]["head_seq"] == 1


def test_lenient_leaves_unknown_topics_out(ws: Socket, api1: Client) -> None:
    known, unknown = unique(), unique()
    api1.append(known, 1)
    reply = ws.call("subscribe", topics={unknown: {}, known: {}}, lenient=True)
    assert reply["topics"] == {known: {"from_seq": 0, "head_seq": 1, "earliest_seq": 1}}
    assert ws.data(known, 1) == [1]
    api1.append(unknown, 1)
    ws.until("caught_up", known)
    ws.assert_quiet()
    assert ws.call("subscribe", topic=unique(), lenient=True)["topics"] == {}
    assert_refused(ws, "topic_not_found", "subscribe", topic=unique(), lenient=False)


def test_topics_per_socket_are_limited(narrow: Server, dial: Dial) -> None:
    ws, other = dial(narrow.port), dial(narrow.port)
    topics = [unique() for _ in range(4)]
    for topic in topics:
        ws.publish(topic, 1)
    assert_refused(ws, "invalid_request", "subscribe", topics={topic: {} for topic in topics})
    assert set(ws.call("subscribe", topics={topic: {} for topic in topics[:2]})["topics"]) == set(topics[:2])
    assert_refused(ws, "invalid_request", "subscribe", topics={topic: {} for topic in topics[2:]})
    ws.subscribe(topics[2])
    assert_refused(ws, "invalid_request", "subscribe", topic=topics[3])
    ws.subscribe(topics[1])  # is one of the three already
    ws.unsubscribe(topics[0])
    ws.subscribe(topics[3])
    other.call("subscribe", topics={topic: {} for topic in topics[:3]})  # each socket has its own three
    with narrow.client() as client:
        client.drop(topics[3])
        ws.until("topic_deleted", topics[3])
        ws.subscribe(topics[0], tail=True)  # what was deleted makes room
        client.append(topics[0], "x")
    assert ws.data(topics[0], 1) == ["x"]


BAD_SUBSCRIPTIONS: dict[str, dict[str, object]] = {
    "no topic": {},
    "topic null": {"topic": None},
    "topic a number": {"topic": 1},
    "topic a list": {"topic": ["{known}"]},
    "topic empty": {"topic": ""},
    "topic with a space": {"topic": "a b"},
    "topic too long": {"topic": "a" * 256},
    "topics empty": {"topics": {}},
    "topics a list": {"topics": ["{known}"]},
    "topics a string": {"topics": "{known}"},
    "topics with a bad name": {"topics": {"{known}": {}, "a b": {}}},
    "options null": {"topics": {"{known}": None}},
    "options a number": {"topics": {"{known}": 5}},
    "from_seq a string": {"topic": "{known}", "from_seq": "1"},
    "from_seq negative": {"topic": "{known}", "from_seq": -1},
    "from_seq a fraction": {"topic": "{known}", "from_seq": 1.5},
    "from_seq beyond u64": {"topic": "{known}", "from_seq": 2**64},
    "from_seq in the map": {"topics": {"{known}": {"from_seq": "1"}}},
    "tail a string": {"topic": "{known}", "tail": "yes"},
    "tail a number": {"topic": "{known}", "tail": 1},
    "tail in the map": {"topics": {"{known}": {"tail": 1}}},
    "limit a string": {"topic": "{known}", "limit": "5"},
    "limit negative": {"topic": "{known}", "limit": -1},
    "max_batch_bytes negative": {"topic": "{known}", "max_batch_bytes": -1},
    "max_batch_bytes a string": {"topic": "{known}", "max_batch_bytes": "5"},
    "node a number": {"topic": "{known}", "node": 5},
    "node a list of numbers": {"topic": "{known}", "node": [5]},
    "include_data a number": {"topic": "{known}", "include_data": 1},
    "include_tags a string": {"topic": "{known}", "include_tags": "true"},
    "include_meta null": {"topic": "{known}", "include_meta": []},
    "consistency unknown": {"topic": "{known}", "consistency": "total"},
    "consistency a number": {"topic": "{known}", "consistency": 1},
    "lenient a string": {"topic": "{known}", "lenient": "yes"},
}


@pytest.mark.parametrize("fields", BAD_SUBSCRIPTIONS.values(), ids=BAD_SUBSCRIPTIONS.keys())
def test_a_subscription_of_wrong_types_is_refused(
    ws: Socket, api1: Client, topic: str, fields: dict[str, object]
) -> None:
    api1.put(topic)
    given = json.loads(json.dumps(fields).replace("{known}", topic))
    assert_refused(ws, "invalid_request", "subscribe", **given)
    api1.append(topic, 1)
    ws.assert_quiet(for_s=0.02)


# --- subscribing again, unsubscribing ----------------------------------------------------------------


def test_subscribing_again_replaces_place_and_options(ws: Socket, api1: Client, topic: str) -> None:
    api1.append_records(topic, [{"data": number, "tag": "t"} for number in range(3)])
    ws.subscribe(topic)
    assert ws.data(topic, 3) == [0, 1, 2]
    ws.until("caught_up", topic)
    reply = ws.subscribe(topic, from_seq=1, include_tags=True, include_data=False)
    assert reply["topics"][topic]["from_seq"] == 1
    again = ws.records(topic, 2)
    assert [set(record) for record in again] == [{"$seq", "$ts", "$tag"}] * 2
    ws.until("caught_up", topic)
    ws.subscribe(topic, tail=True)
    ws.until("caught_up", topic)
    api1.append(topic, 3)
    assert ws.records(topic, 1)[0]["data"] == 3  # once, and with the options of the last one
    ws.assert_quiet()


def test_subscribing_again_in_the_middle_of_a_backlog(ws: Socket, api1: Client, topic: str) -> None:
    api1.append(topic, *range(5_000))
    ws.tell("subscribe", request_id="first", topic=topic, limit=1)
    assert ws.receive().request_id == "first"
    assert ws.receive().seqs == [1]
    ws.tell("subscribe", request_id="second", topic=topic, from_seq=4_990, limit=1_000)
    before = [frame["from_seq"] for frame in ws.until("subscribed")[:-1]]
    assert before == list(range(1, len(before) + 1))
    frame = ws.receive()
    assert (frame["from_seq"], frame.data) == (4_990, list(range(4_990, 5_000)))
    assert ws.receive().op == "caught_up"
    ws.assert_quiet()


def test_unsubscribe(ws: Socket, api1: Client, topic: str) -> None:
    api1.append(topic, 1)
    ws.subscribe(topic)
    assert ws.data(topic, 1) == [1]
    ws.until("caught_up", topic)
    assert ws.call("unsubscribe", request_id="u", topic=topic).json == {
        "op": "unsubscribed",
        "request_id": "u",
        "topic": topic,
        "topics": [topic],
    }
    ws.publish(topic, 2)
    api1.append(topic, 3)
    ws.assert_quiet()
    ws.subscribe(topic, from_seq=1)
    assert ws.data(topic, 2) == [2, 3]


def test_unsubscribe_from_several(ws: Socket, api1: Client) -> None:
    topics = [unique() for _ in range(3)]
    for topic in topics:
        api1.put(topic)
        ws.settle(topic)
    reply = ws.call("unsubscribe", request_id=7, topics=topics[:2])
    assert reply.json == {"op": "unsubscribed", "request_id": 7, "topics": topics[:2]}
    for topic in topics:
        api1.append(topic, topic)
    assert ws.data(topics[2], 1) == [topics[2]]
    ws.assert_quiet()


def test_unsubscribe_from_what_was_never_subscribed(ws: Socket, api1: Client, topic: str) -> None:
    api1.put(topic)
    for name in (topic, unique()):
        assert ws.unsubscribe(name)["topic"] == name
    names = [unique(), topic]
    assert ws.call("unsubscribe", topics=names)["topics"] == names


def test_nothing_follows_unsubscribed_even_out_of_a_backlog(ws: Socket, api1: Client, topic: str) -> None:
    api1.append(topic, *range(5_000))
    for _ in range(5):
        ws.tell("subscribe", topic=topic, limit=1)
        ws.tell("unsubscribe", topic=topic)
        assert ws.receive().op == "subscribed"
        frames = ws.until("unsubscribed")[:-1]
        assert [frame["from_seq"] for frame in frames] == list(range(len(frames)))
        ws.assert_quiet(for_s=0.05)


@pytest.mark.parametrize(
    "fields",
    [{}, {"topic": 1}, {"topic": None}, {"topics": "x"}, {"topics": {"x": {}}}, {"topics": [1]}, {"topics": [None]}],
    ids=str,
)
def test_an_unsubscription_of_wrong_types_is_refused(ws: Socket, fields: dict[str, object]) -> None:
    assert_refused(ws, "invalid_request", "unsubscribe", **fields)


# --- publish -----------------------------------------------------------------------------------------


def test_the_ack(ws: Socket, topic: str) -> None:
    records = [{"data": 1}, {"data": 2}]
    ack = ws.call("publish", request_id="p1", topic=topic, records=records)
    expected: dict[str, Any] = {
        "op": "ack",
        "request_id": "p1",
        "topic": topic,
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
    }
    assert ack.without("performance") == expected
    ack = ws.call("publish", request_id="p2", topic=topic, records=[{"data": 3}])
    assert ack.without("performance") == expected | {
        "request_id": "p2",
        "first_seq": 3,
        "last_seq": 3,
        "seqs": [3],
        "head_seq": 3,
        "count": 1,
        "created": False,
    }


def test_return_seqs(ws: Socket, topic: str) -> None:
    assert "seqs" not in ws.publish(topic, 1, 2, return_seqs=False)
    assert ws.publish(topic, 3, 4, return_seqs=True)["seqs"] == [3, 4]
    ack = ws.publish(topic, 5, return_seqs=False)
    assert (ack["first_seq"], ack["last_seq"], ack["count"]) == (5, 5, 1)


def test_create_false_creates_nothing(ws: Socket, api1: Client, topic: str) -> None:
    refused = assert_refused(ws, "topic_not_found", "publish", topic=topic, records=[{"data": 1}], create=False)
    assert refused["detail"]["topic"] == topic
    assert api1.state(topic).status == 404
    assert ws.publish(topic, 1, create=True)["created"] is True
    assert ws.publish(topic, 2, create=False)["created"] is False


def test_config_counts_when_the_topic_is_created(ws: Socket, api1: Client, topic: str) -> None:
    ws.publish(topic, 1, config={"cap_records": 3, "durability": "fsync"})
    ws.publish(topic, 2, config={"cap_records": 9})
    config = api1.state(topic)["config"]
    assert (config["cap_records"], config["durability"]) == (3, "fsync")


def test_a_config_without_auto_create_creates_nothing(ws: Socket, api1: Client, topic: str) -> None:
    config = {"auto_create": False}
    assert_refused(ws, "topic_not_found", "publish", topic=topic, records=[{"data": 1}], config=config)
    assert api1.state(topic).status == 404


def test_an_idempotency_key_is_shared_with_http(ws: Socket, api1: Client, topic: str) -> None:
    assert ws.publish(topic, "a", idempotency_key="k")["deduped"] is False
    again = ws.publish(topic, "b", idempotency_key="k")
    assert (again["deduped"], again["seqs"], again["created"]) == (True, [1], False)
    assert api1.append(topic, "c", idempotency_key="k")["deduped"] is True
    api1.append(topic, "d", idempotency_key="other")
    assert ws.publish(topic, "e", idempotency_key="other")["deduped"] is True
    assert api1.diff(topic).data == ["a", "d"]


def test_nodes_tags_and_meta(ws: Socket, api1: Client, topic: str) -> None:
    records = [
        {"data": 1, "tag": "t1", "meta": {"a": [1, {"b": None}]}},
        {"data": 2, "node": "own", "tag": "t2"},
        {"data": 3, "meta": {}},
    ]
    ws.call("publish", topic=topic, records=records, node="batch")
    read = api1.diff(topic, include_tags=True)["records"]
    assert [record["$node"] for record in read] == ["batch", "own", "batch"]
    assert [record.get("$tag") for record in read] == ["t1", "t2", None]
    assert [record.get("meta") for record in read] == [{"a": [1, {"b": None}]}, None, {}]
    assert api1.delete(topic, match="t1")["deleted"] == 1


def test_disable_backpressure_is_accepted(ws: Socket, topic: str) -> None:
    assert ws.publish(topic, 1, disable_backpressure=True)["seqs"] == [1]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_only_the_fsync_class_waits_for_the_disk(ws: Socket, api1: Client, topic: str, durability: str) -> None:
    api1.put(topic, durability=durability)
    ws.settle(topic)
    for number in range(3):
        ack = ws.publish(topic, number)
        assert (ack["performance"]["fsync_ms"] > 0) == (durability == "fsync")
        assert ws.data(topic, 1) == [number]


@pytest.mark.parametrize("value", VERBATIM.values(), ids=VERBATIM.keys())
def test_data_and_meta_arrive_byte_by_byte(ws: Socket, topic: str, value: bytes) -> None:
    text = value.decode()
    ws.publish(topic, "first")
    ws.settle(topic, tail=True)
    meta = f'{{ "b" : {text} ,"a":1}}'
    ws.send_text(f'{{"op":"publish","topic":"{topic}","records":[{{"data":{text},"meta":{meta}}},{{"data":0}}]}}')
    frames = [ws.receive(), ws.receive()]
    assert {frame.op for frame in frames} == {"ack", "record"}
    pushed = next(frame for frame in frames if frame.op == "record")
    assert f'"data":{text}' in pushed.raw
    assert f'"meta":{meta}' in pushed.raw
    assert pushed.data[1] == 0


def test_the_last_of_duplicate_keys_counts(ws: Socket, api1: Client, topic: str) -> None:
    ws.send_text(
        f'{{"op":"ping","op":"publish","topic":"x","topic":"{topic}","records":[],"records":[{{"data":1,"data":2}}]}}'
    )
    assert ws.receive()["topic"] == topic
    assert api1.diff(topic).data == [2]


BAD_PUBLISHES: dict[str, dict[str, object]] = {
    "no records": {},
    "records null": {"records": None},
    "records empty": {"records": []},
    "records an object": {"records": {"data": 1}},
    "a record without data": {"records": [{"tag": "a"}]},
    "a record that is a number": {"records": [1]},
    "a good and a bad record": {"records": [{"data": 1}, {"data": 2, "tag": 5}]},
    "tag a number": {"records": [{"data": 1, "tag": 5}]},
    "tag too long": {"records": [{"data": 1, "tag": "x" * 257}]},
    "node of a record a number": {"records": [{"data": 1, "node": 5}]},
    "node of a record too long": {"records": [{"data": 1, "node": "x" * 129}]},
    "meta a list": {"records": [{"data": 1, "meta": [1]}]},
    "meta too large": {"records": [{"data": 1, "meta": {"a": "x" * 17_000}}]},
    "meta of too many keys": {"records": [{"data": 1, "meta": {str(n): n for n in range(65)}}]},
    "node a list": {"records": [{"data": 1}], "node": ["a"]},
    "node too long": {"records": [{"data": 1}], "node": "x" * 129},
    "create a string": {"records": [{"data": 1}], "create": "true"},
    "config a string": {"records": [{"data": 1}], "config": "x"},
    "config of wrong types": {"records": [{"data": 1}], "config": {"ttl_ms": "1"}},
    "config with an unknown class": {"records": [{"data": 1}], "config": {"durability": "hope"}},
    "idempotency_key a number": {"records": [{"data": 1}], "idempotency_key": 5},
    "idempotency_key empty": {"records": [{"data": 1}], "idempotency_key": ""},
    "idempotency_key too long": {"records": [{"data": 1}], "idempotency_key": "x" * 257},
    "disable_backpressure a string": {"records": [{"data": 1}], "disable_backpressure": "yes"},
    "return_seqs a string": {"records": [{"data": 1}], "return_seqs": "false"},
    "return_seqs a number": {"records": [{"data": 1}], "return_seqs": 1},
}


@pytest.mark.parametrize("fields", BAD_PUBLISHES.values(), ids=BAD_PUBLISHES.keys())
def test_a_publish_of_wrong_types_appends_nothing(
    ws: Socket, api1: Client, topic: str, fields: dict[str, object]
) -> None:
    assert_refused(ws, "invalid_request", "publish", topic=topic, **fields)
    assert api1.state(topic).status == 404
    assert ws.publish(topic, "good")["seqs"] == [1]


@pytest.mark.parametrize("name", [None, 1, "", "a b", "-a", "a/b", "é", "a" * 256, ["a"]], ids=repr)
def test_a_publish_needs_the_name_of_a_topic(ws: Socket, name: object) -> None:
    given = {} if name is None else {"topic": name}
    assert_refused(ws, "invalid_request", "publish", records=[{"data": 1}], **given)


def test_limits_have_the_codes_of_http(small_ws: Socket, small_server: Server, topic: str) -> None:
    batch = [{"data": 1}] * (SMALL["TOPICS_MAX_BATCH_RECORDS"] + 1)
    assert_refused(small_ws, "batch_too_large", "publish", topic=topic, records=batch)
    large = [{"data": "x" * (SMALL["TOPICS_MAX_RECORD_BYTES"] - 1)}]
    assert_refused(small_ws, "record_too_large", "publish", topic=topic, records=large)
    for field, most in (("tag", SMALL["TOPICS_MAX_TAG_BYTES"]), ("node", SMALL["TOPICS_MAX_NODE_BYTES"])):
        records = [{"data": 1, field: "x" * (most + 1)}]
        assert_refused(small_ws, "invalid_request", "publish", topic=topic, records=records)
    with small_server.client() as client:
        assert client.state(topic).status == 404
    fits = "x" * (SMALL["TOPICS_MAX_RECORD_BYTES"] - 2)
    assert small_ws.publish(topic, *[fits] * SMALL["TOPICS_MAX_BATCH_RECORDS"])["count"] == 5


def test_a_full_topic_refuses_and_says_so(ws: Socket, api1: Client, topic: str) -> None:
    ws.publish(topic, 1, 2, config={"cap_records": 3, "discard": "reject"})
    refused = assert_refused(ws, "topic_full", "publish", topic=topic, records=[{"data": 3}, {"data": 4}])
    assert refused["detail"]["cap_records"] == 3
    assert ws.publish(topic, 3)["seqs"] == [3]
    assert_refused(ws, "topic_full", "publish", topic=topic, records=[{"data": 4}])
    oversized = [{"data": number} for number in range(4)]
    assert_refused(ws, "record_too_large", "publish", topic=topic, records=oversized)
    api1.delete(topic, before_seq=2)
    assert ws.publish(topic, 4)["seqs"] == [4]


def test_an_instance_limit_is_throttled(narrow: Server, dial: Dial) -> None:
    ws = dial(narrow.port)
    filling = []
    with narrow.client() as client:
        while len(client.list()["topics"]) < 9:
            filling.append(unique())
            client.put(filling[-1])
        refused = assert_refused(ws, "throttled", "publish", topic=unique(), records=[{"data": 1}])
        assert (refused["detail"]["limit"], refused["detail"]["max"]) == ("max_topics", 9)
        for topic in filling:
            client.drop(topic)


# --- many publishes on one socket --------------------------------------------------------------------


def test_hundreds_of_publishes_in_flight_are_acknowledged_in_their_order(ws: Socket, api1: Client) -> None:
    topics = [unique() for _ in range(4)]
    api1.put(topics[0], durability="fsync")
    api1.put(topics[1], durability="ephemeral")
    total = 600
    for number in range(total):
        topic = topics[number % len(topics)]
        ws.tell("publish", request_id=number, topic=topic, records=[{"data": number}, {"data": -number}])
    acks: dict[str, list[Frame]] = {topic: [] for topic in topics}
    for ack in ws.replies(total):
        assert ack.op == "ack", ack
        acks[ack["topic"]].append(ack)
    for at, topic in enumerate(topics):
        numbers = list(range(at, total, len(topics)))
        assert [ack.request_id for ack in acks[topic]] == numbers
        assert [ack["first_seq"] for ack in acks[topic]] == [1 + 2 * turn for turn in range(len(numbers))]
        expected = [value for number in numbers for value in (number, -number)]
        assert api1.diff(topic, limit=1_000).data == expected


def test_refusals_among_publishes_in_flight_name_their_request(ws: Socket, api1: Client, topic: str) -> None:
    for number in range(300):
        if number % 3:
            ws.tell("publish", request_id=number, topic=topic, records=[{"data": number}])
        elif number % 2:
            ws.tell("publish", request_id=number, topic=topic, records=[])
        else:
            ws.tell("publish", request_id=number, topic=unique("absent"), records=[{"data": 1}], create=False)
    replies = {reply.request_id: reply for reply in ws.replies(300)}
    assert sorted(replies) == list(range(300))
    good = [number for number in range(300) if number % 3]
    assert [number for number, reply in sorted(replies.items()) if reply.op == "ack"] == good
    assert {replies[number].error for number in range(0, 300, 6)} == {"topic_not_found"}
    assert {replies[number].error for number in range(3, 300, 6)} == {"invalid_request"}
    assert api1.diff(topic, limit=1_000).data == good


def test_large_publishes_in_flight(ws: Socket, api1: Client, topic: str) -> None:
    """Each is larger than what a socket buffers, and the acks are read only afterwards."""
    for number in range(8):
        records = [{"data": [number, "x" * 500_000]}, {"data": [number, "y" * 500_000]}]
        ws.tell("publish", request_id=number, topic=topic, records=records)
    assert [(ack.request_id, ack["last_seq"]) for ack in ws.replies(8)] == [(n, 2 * n + 2) for n in range(8)]
    assert api1.state(topic)["head_seq"] == 16


def test_commands_of_all_kinds_in_flight(ws: Socket, topic: str) -> None:
    ws.publish(topic, 0)
    for number in range(100):
        ws.tell("publish", request_id=f"p{number}", topic=topic, records=[{"data": number}])
        ws.tell("subscribe", request_id=f"s{number}", topic=topic, tail=True)
        ws.tell("ping", request_id=f"i{number}")
        ws.tell("unsubscribe", request_id=f"u{number}", topic=topic)
    replies = [str(reply.request_id) for reply in ws.replies(400)]
    for kind in "psiu":
        assert [name for name in replies if name[0] == kind] == [f"{kind}{number}" for number in range(100)]


# --- reading what was written ------------------------------------------------------------------------


def test_an_acknowledged_record_is_there_for_everyone(ws: Socket, dial: Dial, api1: Client, topic: str) -> None:
    other = dial()
    for number in range(1, 30):
        assert ws.publish(topic, number)["last_seq"] == number
        assert api1.diff(topic, number - 1).data == [number]
        place = other.subscribe(topic, tail=True)["topics"][topic]
        assert (place["from_seq"], place["head_seq"]) == (number, number)
        assert ws.subscribe(topic, tail=True)["topics"][topic]["from_seq"] == number


def test_a_socket_receives_its_own_records_unless_it_says_who_it_is(ws: Socket, api1: Client, topic: str) -> None:
    api1.put(topic)
    ws.settle(topic)
    ws.publish(topic, 1, node="me")
    assert ws.data(topic, 1) == [1]
    ws.subscribe(topic, node="me", tail=True)
    ws.until("caught_up", topic)
    ws.publish(topic, 2, node="me")
    api1.append(topic, 3, node="you")
    assert ws.data(topic, 1) == [3]


def test_a_chat_room(dial: Dial, api1: Client, topic: str) -> None:
    """Everyone hears all the others, in the order of the room, and nobody an echo."""
    api1.put(topic)
    people = [f"person-{number}" for number in range(6)]
    sockets = {person: dial() for person in people}
    for person, socket in sockets.items():
        socket.settle(topic, node=person, tail=True)
    for turn in range(10):
        for person, socket in sockets.items():
            socket.tell("publish", topic=topic, records=[{"data": [person, turn]}], node=person, return_seqs=False)
    for socket in sockets.values():
        assert {reply.op for reply in socket.replies(10)} == {"ack"}
    room = api1.diff(topic, limit=1_000).data
    assert len(room) == 60
    for person, socket in sockets.items():
        assert [said for said in room if said[0] == person] == [[person, turn] for turn in range(10)]
        assert socket.data(topic, 50) == [said for said in room if said[0] != person]
        socket.assert_quiet(for_s=0.02)
