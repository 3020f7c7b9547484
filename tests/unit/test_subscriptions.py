"""What may be asked for: the body of a watch and the commands of a WebSocket, checked, clamped or refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import error_of, examples

from topics import limits
from topics.actors import messages
from topics.errors import ApiError
from topics.gateway.api import positions
from topics.gateway.api.types import Gather, Response
from topics.gateway.api.watch_schemas import (
    Ping,
    Publish,
    Start,
    Subscribe,
    Subscription,
    Unsubscribe,
    decode_command,
    decode_watch,
    request_id_of,
)
from topics.gateway.streams.frames import composite, prefixes
from topics.settings import Settings
from topics.storage.columns import Columns
from topics.storage.config import owner_of_name

SETTINGS = Settings()


def watch(settings: Settings = SETTINGS, **body: Any) -> Subscription:
    return decode_watch(json.dumps({"topics": {"t": {}}, **body}).encode(), settings)


def command(**fields: Any) -> Any:
    return decode_command(json.dumps(fields).encode())


# --- POST /v0/watch ------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert watch() == Subscription(
        topics={"t": Start(0, False)},
        nodes=None,
        limit=256,
        max_bytes=262_144,
        include_tags=False,
        include_meta=True,
        include_data=True,
        heartbeat_ms=15_000,
    )


def test_everything_said() -> None:
    given = watch(
        topics={"b": {"from_seq": 9}, "a": {"tail": True}, "c": {"from_seq": 1, "tail": False}},
        node="n",
        limit=7,
        max_batch_bytes=99,
        heartbeat_ms=2_000,
        include_meta=False,
        include_tags=True,
        include_data=False,
        consistency="strong",
    )
    assert list(given.topics.items()) == [("b", Start(9)), ("a", Start(0, True)), ("c", Start(1))]
    assert (given.nodes, given.limit, given.max_bytes, given.heartbeat_ms) == (["n"], 7, 99, 2_000)
    assert (given.include_meta, given.include_tags, given.include_data) == (False, True, False)


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("limit", 0, 256),
        ("limit", 1_000, 1_000),
        ("limit", 1_001, 1_000),
        ("limit", 10**30, 1_000),
        ("max_batch_bytes", 0, limits.MIB),
        ("max_batch_bytes", 8 * limits.MIB + 1, 8 * limits.MIB),
        ("max_batch_bytes", 1, 1),
        ("heartbeat_ms", 0, 1_000),
        ("heartbeat_ms", 999, 1_000),
        ("heartbeat_ms", 60_001, 60_000),
        ("node", None, None),
        ("node", [], None),
        ("node", "", [""]),
        ("node", ["a", "b", "a"], ["a", "b", "a"]),
    ],
)
def test_clamps(field: str, given: Any, expected: Any) -> None:
    attribute = {"max_batch_bytes": "max_bytes", "node": "nodes"}.get(field, field)
    assert getattr(watch(**{field: given}), attribute) == expected


def test_the_limit_of_the_settings() -> None:
    assert watch(Settings(max_limit=5), limit=6).limit == 5
    assert watch(Settings(max_limit=5)).limit == 5


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b'{"topics":{"t":{}}} x',
        b'{"topics":{"t":{}},"node":"\xff"}',
        b'{"topics":null}',
        b'{"topics":[]}',
        b'{"topics":["t"]}',
        b'{"topics":"t"}',
        b'{"topics":{}}',
        b'{"topics":{"t":null}}',
        b'{"topics":{"t":5}}',
        b'{"topics":{"":{}}}',
        b'{"topics":{"a/b":{}}}',
        b'{"topics":{"\\u00e9":{}}}',
        b'{"topics":{"t":{"from_seq":-1}}}',
        b'{"topics":{"t":{"from_seq":18446744073709551616}}}',
        b'{"topics":{"t":{"from_seq":"1"}}}',
        b'{"topics":{"t":{"from_seq":1.5}}}',
        b'{"topics":{"t":{"from_seq":null}}}',
        b'{"topics":{"t":{"tail":1}}}',
        b'{"topics":{"t":{"tail":null}}}',
    ],
)
def test_topics_that_are_none(body: bytes) -> None:
    assert error_of(lambda: decode_watch(body, SETTINGS)).code == "invalid_request"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", -1),
        ("limit", "5"),
        ("limit", None),
        ("limit", True),
        ("max_batch_bytes", -1),
        ("max_batch_bytes", "x"),
        ("heartbeat_ms", -1),
        ("heartbeat_ms", []),
        ("node", 5),
        ("node", [5]),
        ("node", ["a", None]),
        ("node", {}),
        ("include_meta", 1),
        ("include_tags", "yes"),
        ("include_data", None),
        ("consistency", "weak"),
        ("consistency", None),
        ("consistency", "Eventual"),
        ("cursor", 5),
        ("cursor", "?"),
        ("cursor", ""),
    ],
)
def test_options_that_are_none(field: str, value: Any) -> None:
    assert error_of(lambda: watch(**{field: value})).code == "invalid_request"


def test_unknown_fields_are_ignored() -> None:
    assert watch(something={"else": 1}, topics={"t": {"more": 1}}) == watch()


def test_so_many_topics_and_nodes() -> None:
    settings = Settings(max_watch_topics=3)
    topics: dict[str, Any] = {f"t{number}": {} for number in range(3)}
    assert len(watch(settings, topics=topics).topics) == 3
    error = error_of(lambda: watch(settings, topics={**topics, "t3": {}}))
    assert (error.code, error.detail) == ("invalid_request", {"field": "topics", "max": 3})
    nodes = [str(number) for number in range(limits.MAX_READ_NODES)]
    assert watch(node=nodes).nodes == nodes
    assert error_of(lambda: watch(node=[*nodes, "x"])).detail == {"field": "node"}


def cursor(**at: int) -> str:
    return composite(zip(prefixes(list(at)), at.values(), strict=True)).decode()


def test_a_cursor_says_where_to_begin() -> None:
    given = watch(
        topics={"a": {"from_seq": 5}, "b": {"tail": True}, "c": {"from_seq": 7}}, cursor=cursor(b=3, a=9, z=1)
    )
    assert list(given.topics.items()) == [("a", Start(9)), ("b", Start(3)), ("c", Start(7))]
    assert watch(cursor=cursor()).topics == {"t": Start(0)}


# --- commands ------------------------------------------------------------------------------------------


def test_subscribe_to_one_topic() -> None:
    given = command(
        op="subscribe",
        request_id="s1",
        topic="t",
        tail=True,
        node="u",
        limit=2_000,
        max_batch_bytes=0,
        include_meta=False,
    )
    assert isinstance(given, Subscribe)
    assert (bytes(given.request_id), given.lenient) == (b'"s1"', False)
    wanted = given.subscription(SETTINGS)
    assert wanted.topics == {"t": Start(0, True)}
    assert (wanted.nodes, wanted.limit, wanted.max_bytes, wanted.include_meta) == (["u"], 1_000, limits.MIB, False)


def test_subscribe_to_several() -> None:
    given = command(op="subscribe", topics={"a": {"from_seq": 3}, "b": {"tail": True}}, from_seq=99, lenient=True)
    assert given.subscription(SETTINGS).topics == {"a": Start(3), "b": Start(0, True)}
    assert (given.request_id, given.lenient) == (None, True)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"topic": "a", "topics": {"b": {}}},
        {"topics": {}},
        {"topic": ""},
        {"topic": "a/b"},
        {"topic": "t", "from_seq": -1},
        {"topic": "t", "limit": -1},
        {"topic": "t", "max_batch_bytes": -1},
    ],
)
def test_subscribe_to_what(fields: dict[str, Any]) -> None:
    given = command(op="subscribe", **fields)
    assert error_of(lambda: given.subscription(SETTINGS)).code == "invalid_request"


def test_unsubscribe() -> None:
    assert command(op="unsubscribe", topic="t", request_id=5).names() == ["t"]
    assert command(op="unsubscribe", topics=["a", "b"]).names() == ["a", "b"]
    assert command(op="unsubscribe", topics=[]).names() == []
    for fields in ({}, {"topic": "t", "topics": ["t"]}):
        given = command(op="unsubscribe", **fields)
        assert isinstance(given, Unsubscribe)
        assert error_of(given.names).code == "invalid_request"


def test_ping() -> None:
    assert command(op="ping") == Ping()
    assert command(op="ping").request_id is None
    request_ids: list[object] = ["r", 7, 1.5, True, None, [1], {"a": {}}]
    for request_id in request_ids:
        assert json.loads(bytes(command(op="ping", request_id=request_id).request_id)) == request_id


def test_a_request_id_is_bounded_and_kept_without_its_message() -> None:
    longest = "x" * (limits.WS_REQUEST_ID_BYTES - 2)
    text = json.dumps({"op": "ping", "request_id": longest, "more": "x" * 10_000}).encode()
    references = sys.getrefcount(text)
    given = decode_command(text).request_id
    assert bytes(given) == json.dumps(longest).encode()
    assert sys.getrefcount(text) == references, "the message is kept until the answer"
    error = error_of(lambda: command(op="ping", request_id=longest + "x"))
    assert (error.code, error.detail) == ("invalid_request", {"field": "request_id", "max": 256})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"x",
        b"[",
        b"[[x",
        b"[" * 10_000,
        b'{"op":"ping"',
        b'{"op":"nothing",}',
        b'{"op":"ping"}{"op":"ping"}',
        b'{"op":"ping","request_id":NaN}',
        b'{"op":"ping","x":' + b"[" * 10_000,
        b'{"op":"ping","x":"\xff"}',
    ],
)
def test_what_is_no_json(text: bytes) -> None:
    assert error_of(lambda: decode_command(text)).code == "invalid_json"


@pytest.mark.parametrize(
    "text",
    [
        rb'{"op":"ping","request_id":"\ud800"}',
        rb'{"request_id":"\ud800","op":"ping"}',
        rb'{"op":"publish","topic":"t","records":[{"data":"\ud800"}]}',
    ],
)
def test_a_lone_surrogate_is_called_that(text: bytes) -> None:
    error = error_of(lambda: decode_command(text))
    assert (error.code, "a lone surrogate" in error.message) == ("invalid_json", True), error.message


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"null",
        b'"ping"',
        b"{}",
        b'{"op":null}',
        b'{"op":5}',
        b'{"op":"Ping"}',
        b'{"op":"record"}',
        b'{"op":["ping"]}',
        b'{"op":"ping","x":{},"op":"nothing"}',
    ],
)
def test_what_names_no_command(text: bytes) -> None:
    error = error_of(lambda: decode_command(text))
    assert (error.code, error.detail) == ("unsupported_message", {"field": "op"})


@pytest.mark.parametrize(
    "text",
    [
        b'{"op":"publish"}',
        b'{"op":"publish","topic":"t"}',
        b'{"op":"publish","topic":"t","records":{}}',
        b'{"op":"publish","topic":"t","records":[{}]}',
        b'{"op":"publish","topic":"t","records":[{"data":1,"node":5}]}',
        b'{"op":"publish","topic":"t","records":[{"data":1}],"return_seqs":1}',
        b'{"op":"publish","topic":5,"records":[{"data":1}]}',
        b'{"op":"subscribe","topic":"t","consistency":"no"}',
        b'{"op":"subscribe","topics":["t"]}',
        b'{"op":"unsubscribe","topics":"t"}',
    ],
)
def test_commands_whose_fields_do_not_fit(text: bytes) -> None:
    assert error_of(lambda: decode_command(text)).code == "invalid_request"


def test_of_an_op_that_is_there_twice_the_last_one_counts() -> None:
    assert isinstance(decode_command(b'{"op":"nothing","op":"ping","request_id":1}'), Ping)
    assert isinstance(decode_command(b'{"op":"subscribe","topic":5,"op":"ping"}'), Ping)


def test_an_op_inside_of_data_is_data() -> None:
    given = decode_command(b'{"op":"publish","topic":"t","records":[{"data":{"op":"ping","op":"x"}}]}')
    assert isinstance(given, Publish)
    assert bytes(given.records[0].data) == b'{"op":"ping","op":"x"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"op":"nothing","request_id":"a"}', b'"a"'),
        (b'{"request_id":-5}', b"-5"),
        (b'{"request_id":null}', b"null"),
        (b'{"request_id":[1, 2.0]}', b"[1, 2.0]"),
        (b'{"request_id":"%b"}' % (b"x" * 254), b'"%b"' % (b"x" * 254)),
        (b'{"request_id":"%b"}' % (b"x" * 255), None),
        (b"[]", None),
        (b'{"request_id":"a"', None),
        (b"", None),
        (b'{"x":' + b"[" * 10_000, None),
    ],
)
def test_whose_command_it_was(text: bytes, expected: bytes | None) -> None:
    given = request_id_of(text)
    assert (None if given is None else bytes(given)) == expected


@examples(150)
@given(text=st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_text_is_a_command_or_refused(text: bytes) -> None:
    request_id_of(text)
    try:
        decode_command(text)
    except ApiError as error:
        if error.code not in ("invalid_request", "invalid_json", "unsupported_message"):
            raise


# --- publish -------------------------------------------------------------------------------------------


def test_publish_of_nothing_but_data() -> None:
    given = command(op="publish", topic="t", records=[{"data": 1}, {"data": {"a": [2]}}], return_seqs=False)
    assert not given.return_seqs
    plain = given.plain(SETTINGS, size=100)
    assert plain is not None
    count, _, data = plain
    assert (count, data) == (2, b'1\x1e{"a": [2]}')
    head, batch = given.append(SETTINGS, size=100)
    assert (head.topic, head.count, head.size) == ("t", 2, plain[1])
    assert [bytes(value) for value in Columns(batch, count=2, ts=0).data()] == [b"1", b'{"a": [2]}']


@pytest.mark.parametrize(
    "more",
    [
        {"node": "n"},
        {"idempotency_key": "k"},
        {"create": False},
        {"config": {}},
        {"records": [{"data": 1, "tag": "x"}]},
        {"records": [{"data": 1, "node": "x"}]},
        {"records": [{"data": 1, "meta": {}}]},
        {"records": []},
    ],
)
def test_more_than_data_is_not_plain(more: dict[str, Any]) -> None:
    given = command(**{"op": "publish", "topic": "t", "records": [{"data": 1}], **more})
    assert given.plain(SETTINGS, size=100) is None


def test_a_large_publish_is_looked_at_closely() -> None:
    settings = Settings(max_record_bytes=50)
    given = command(op="publish", topic="t", records=[{"data": "x" * 60}])
    assert given.plain(settings, size=120) is None
    assert error_of(lambda: given.append(settings, size=120)).code == "record_too_large"


def test_publish_with_everything() -> None:
    given = command(
        op="publish",
        topic="t",
        records=[{"data": 1, "tag": "x", "node": "own", "meta": {"m": 1}}, {"data": 2}],
        node="common",
        create=True,
        config={"cap_records": 5},
        idempotency_key="k",
        disable_backpressure=True,
    )
    head, batch = given.append(SETTINGS, size=300)
    assert (head.create, head.key) == (True, "k")
    assert head.config is not None
    assert head.config.cap_records == 5
    columns = Columns(batch, count=2, ts=0)
    assert (columns.nodes(), columns.tags()) == (["own", "common"], ["x", None])


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"records": []}, "invalid_request"),
        ({"records": [{"data": 1}] * 4}, "batch_too_large"),
        ({"idempotency_key": ""}, "invalid_request"),
        ({"idempotency_key": "k" * 257}, "invalid_request"),
        ({"node": "n" * 129}, "invalid_request"),
        ({"records": [{"data": 1, "meta": []}]}, "invalid_request"),
        ({"config": {"ttl_ms": -1}}, "invalid_request"),
    ],
)
def test_publish_that_is_refused(more: dict[str, Any], code: str) -> None:
    settings = Settings(max_batch_records=3)
    given = command(**{"op": "publish", "topic": "t", "records": [{"data": 1}], **more})
    assert given.plain(settings, size=100) is None
    assert error_of(lambda: given.append(settings, size=100)).code == code


# --- where topics stand --------------------------------------------------------------------------------


def located(names: list[str], shards: int, answers: dict[str, messages.Position], *, lenient: bool) -> Any:
    """What comes of asking, if shards answer so."""
    found: list[Any] = []

    def then(positions: positions.Found) -> Response:
        found.append(positions)
        return Response(200, b"")

    gather = positions.locate(names, shards, lenient=lenient, then=then)
    assert isinstance(gather, Gather)
    replies = []
    for call in gather.calls:
        assert {owner_of_name(name, shards) for name in call.head.topics} == {call.shard}
        replies.append(messages.PositionsFound([answers.get(name) for name in call.head.topics]))
    assert sorted(name for call in gather.calls for name in call.head.topics) == sorted(names)
    gather.render(replies)
    return found[0]


def test_each_shard_is_asked_once_for_its_own() -> None:
    names = [f"t{number}" for number in range(20)]
    answers = {name: messages.Position(number + 1, number, 1) for number, name in enumerate(names)}
    assert located(names, 3, answers, lenient=False) == answers
    assert located(names, 1, answers, lenient=True) == answers


def test_unknown_topics() -> None:
    answers = {"a": messages.Position(1, 2, 3)}
    error = error_of(lambda: located(["a", "b"], 2, answers, lenient=False))
    assert (error.code, error.detail) == ("topic_not_found", {"topic": "b"})
    assert located(["a", "b"], 2, answers, lenient=True) == answers
    assert located(["b"], 2, {}, lenient=True) == {}


def test_where_to_begin() -> None:
    position = messages.Position(1, 88, 80)
    assert positions.start_of(Start(5), position) == 5
    assert positions.start_of(Start(5, tail=True), position) == 88
    assert positions.start_of(Start(100), position) == 100
    assert positions.described(["t"], [5], {"t": position}) == {
        "t": {"from_seq": 5, "head_seq": 88, "earliest_seq": 80}
    }
