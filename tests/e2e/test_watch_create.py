"""POST /v0/watch and the refusals of GET /v0/watch/:wid: every field, clamp and code; in both lanes.

What an option does to a stream stands in test_watch_stream.py; here it is accepted or refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .client import Client
from .server import Server
from .sse import WID, Topics, Watching, create, encode_cursor
from .wire import Wire, request

pytestmark = pytest.mark.e2e

UNKNOWN = "wid_AAAAAAAAAAAAAAAAAAAAAA"  # well formed, given to nobody
U64_MAX = 2**64 - 1


@pytest.fixture
def watching(server: Server, lane: Any) -> Iterator[Watching]:
    with Watching(server, lane) as watching:
        yield watching


@pytest.fixture
def three(api: Client, topic: str) -> str:
    """A topic with three records."""
    api.append(topic, 1, 2, 3)
    return topic


@pytest.fixture
def wid(api: Client, three: str) -> str:
    return str(create(api, three)["wid"])


# --- the answer --------------------------------------------------------------------------------------


def test_every_field_of_the_answer(api: Client, three: str) -> None:
    answer = create(api, three)
    assert answer.status == 200
    wid = answer["wid"]
    assert answer.without_performance() == {
        "wid": wid,
        "stream_url": f"/v0/watch/{wid}",
        "session_ttl_ms": 300_000,
        "topics": {three: {"from_seq": 0, "head_seq": 3, "earliest_seq": 1}},
    }


def test_a_wid_is_unguessable_and_given_once(api: Client, three: str) -> None:
    wids = [create(api, three)["wid"] for _ in range(100)]
    assert all(WID.fullmatch(wid) for wid in wids)
    assert len(set(wids)) == 100
    raw = [base64.urlsafe_b64decode(wid.removeprefix("wid_") + "==") for wid in wids]
    assert {len(bits) for bits in raw} == {16}
    for at in range(16):  # no byte of it stands still or counts: 100 random bytes have about 83 values
        assert len({bits[at] for bits in raw}) > 50, at


@pytest.mark.parametrize("from_seq", [0, 1, 3, 4, 1_000, U64_MAX])
def test_from_seq_is_answered_as_given(api: Client, three: str, from_seq: int) -> None:
    answer = create(api, {three: {"from_seq": from_seq}})
    assert answer["topics"] == {three: {"from_seq": from_seq, "head_seq": 3, "earliest_seq": 1}}


@pytest.mark.parametrize("from_seq", [None, 0, 1, 99])
def test_tail_is_the_head_whatever_from_seq_says(api: Client, three: str, from_seq: int | None) -> None:
    options = {"tail": True} | ({} if from_seq is None else {"from_seq": from_seq})
    assert create(api, {three: options})["topics"][three] == {"from_seq": 3, "head_seq": 3, "earliest_seq": 1}


def test_tail_false_changes_nothing(api: Client, three: str) -> None:
    assert create(api, {three: {"tail": False, "from_seq": 2}})["topics"][three]["from_seq"] == 2


def test_the_watermarks_are_those_of_the_topic(api: Client, topic: str) -> None:
    api.put(topic, cap_records=3)
    api.append(topic, *range(10))
    assert create(api, topic)["topics"][topic] == {"from_seq": 0, "head_seq": 10, "earliest_seq": 8}


def test_an_empty_topic(api: Client, topic: str) -> None:
    api.put(topic)
    for options in ({}, {"tail": True}):
        assert create(api, {topic: options})["topics"][topic] == {"from_seq": 0, "head_seq": 0, "earliest_seq": 1}


def test_many_topics_keep_their_order(api: Client, topic: str) -> None:
    names = [f"{topic}.{n}" for n in (5, 1, 4, 2, 3, 0)]
    for at, name in enumerate(names):
        api.append(name, *range(at + 1))
    answer = create(api, names)
    assert list(answer["topics"]) == names
    assert [state["head_seq"] for state in answer["topics"].values()] == [1, 2, 3, 4, 5, 6]


def test_a_queue_can_be_watched(api: Client, topic: str) -> None:
    api.put(topic, type="queue")
    api.append(topic, 1)
    assert create(api, topic)["topics"][topic]["head_seq"] == 1


# --- what is accepted --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"node": "n"},
        {"node": ["a", "b"]},
        {"node": []},
        {"node": ""},
        {"node": None},
        {"limit": 0},
        {"limit": 1},
        {"limit": 1_001},
        {"limit": U64_MAX},
        {"max_batch_bytes": 0},
        {"max_batch_bytes": 1},
        {"max_batch_bytes": U64_MAX},
        {"heartbeat_ms": 0},
        {"heartbeat_ms": 999},
        {"heartbeat_ms": 60_001},
        {"heartbeat_ms": U64_MAX},
        {"include_meta": False, "include_tags": True, "include_data": False},
        {"consistency": "eventual"},
        {"consistency": "strong"},
        {"unknown": {"deep": [1]}, "Limit": "x"},
    ],
    ids=repr,
)
def test_options_that_are_accepted(watching: Watching, three: str, options: dict[str, Any]) -> None:
    """And the stream that they make delivers."""
    session = watching.create({three: {"unknown": 1, "from_seq": 2}}, **options)
    assert session.status == 200
    assert watching.open(session).events(2) == [("record", three, [3]), ("caught-up", three, 3)]


def test_the_last_of_two_keys_counts(api: Client, three: str) -> None:
    body = b'{"topics":{"nope":{}},"topics":{"%b":{"from_seq":1,"from_seq":2}}}' % three.encode()
    assert api.send("POST", "/v0/watch", content=body)["topics"][three]["from_seq"] == 2


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b'{"topics":{}}',
        b'{"topics":null}',
        b'{"topics":[]}',
        b'{"topics":["NAME"]}',
        b'{"topics":"NAME"}',
        b'{"topics":{"NAME":5}}',
        b'{"topics":{"NAME":[]}}',
        b'{"topics":{"NAME":"x"}}',
        b'{"topics":{"":{}}}',
        b'{"topics":{"no name":{}}}',
        b'{"topics":{"a/b":{}}}',
        b'{"topics":{"a\\n":{}}}',
        b'{"topics":{"\xff":{}}}',
        b'{"topics":{"%b":{}}}' % (b"x" * 256),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_topics_that_are_refused(api: Client, three: str, body: bytes) -> None:
    answer = api.send("POST", "/v0/watch", content=body.replace(b"NAME", three.encode()))
    assert answer.refusal == (400, "invalid_request")


@pytest.mark.parametrize(
    "options",
    [
        {"from_seq": -1},
        {"from_seq": "1"},
        {"from_seq": 1.5},
        {"from_seq": U64_MAX + 1},
        {"from_seq": True},
        {"from_seq": []},
        {"tail": 1},
        {"tail": "true"},
    ],
    ids=repr,
)
def test_topic_options_that_are_refused(api: Client, three: str, options: dict[str, Any]) -> None:
    assert create(api, {three: options}).refusal == (400, "invalid_request")


@pytest.mark.parametrize(
    "options",
    [
        {"node": 5},
        {"node": {}},
        {"node": ["a", 5]},
        {"node": [None]},
        {"limit": -1},
        {"limit": "10"},
        {"limit": 1.5},
        {"limit": None},
        {"max_batch_bytes": -1},
        {"max_batch_bytes": "1"},
        {"max_batch_bytes": 0.5},
        {"heartbeat_ms": "1000"},
        {"heartbeat_ms": 1_000.5},
        {"include_meta": 1},
        {"include_tags": "true"},
        {"include_data": None},
        {"consistency": "linearizable"},
        {"consistency": "Strong"},
        {"consistency": ""},
        {"consistency": 1},
        {"cursor": 5},
        {"cursor": {}},
        {"cursor": ["x"]},
        {"cursor": "!"},
        {"cursor": "x"},
        {"cursor": "AAAA"},
    ],
    ids=repr,
)
def test_options_that_are_refused(api: Client, three: str, options: dict[str, Any]) -> None:
    assert create(api, three, **options).refusal == (400, "invalid_request")


def test_a_body_needs_its_content_type(api: Client, three: str) -> None:
    body = json.dumps({"topics": {three: {}}}).encode()
    answer = api.send("POST", "/v0/watch", content=body, headers={"Content-Type": "text/plain"})
    assert answer.refusal == (415, "unsupported_media_type")


def test_a_body_that_is_too_long(small: Client, topic: str) -> None:
    answer = create(small, topic, unknown="x" * 20_000)
    assert answer.refusal == (413, "payload_too_large")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "PATCH"])
def test_sessions_are_made_by_post_alone(server: Server, api1: Client, method: str) -> None:
    with Wire(server.port) as wire:
        wire.send(request(method, "/v0/watch"))
        status, headers = wire.head()
    assert status == 405
    assert headers["allow"] == "POST"


# --- topics that do not exist ------------------------------------------------------------------------


def test_an_unknown_topic(api: Client, three: str, topic: str) -> None:
    answer = create(api, [three, f"{topic}.unknown"])
    assert answer.refusal == (404, "topic_not_found")
    assert answer.detail["topic"] == f"{topic}.unknown"
    assert api.state(f"{topic}.unknown").status == 404  # watching creates nothing


def test_lenient_leaves_them_out(watching: Watching, three: str) -> None:
    answer = watching.create({"unknown-1": {}, three: {"from_seq": 2}, "unknown-2": {"tail": True}}, lenient=True)
    assert answer["topics"] == {three: {"from_seq": 2, "head_seq": 3, "earliest_seq": 1}}
    stream = watching.open(answer)
    assert stream.events(2) == [("record", three, [3]), ("caught-up", three, 3)]
    assert stream.frames[-1].cursor == {three: 3}


@pytest.mark.parametrize(
    ("text", "refusal"), [("false", (404, "topic_not_found")), ("maybe", (400, "invalid_request"))]
)
def test_lenient_is_a_flag(api: Client, text: str, refusal: tuple[int, str]) -> None:
    answer = api.send("POST", "/v0/watch", {"topics": {"unknown": {}}}, lenient=text)
    assert answer.refusal == refusal


def test_lenient_is_for_unknown_topics_alone(api: Client) -> None:
    assert create(api, {"no name": {}}, lenient=True).refusal == (400, "invalid_request")
    assert create(api, {}, lenient=True).refusal == (400, "invalid_request")


# --- the cursor --------------------------------------------------------------------------------------


def test_a_cursor_overrides_from_seq_and_tail(api: Client, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(4)]
    for name in names:
        api.append(name, 1, 2, 3)
    topics: Topics = {names[0]: {"from_seq": 3}, names[1]: {"tail": True}, names[2]: {}, names[3]: {"from_seq": 2}}
    answer = create(api, topics, cursor=encode_cursor(dict(zip(names[:3], (1, 2, 3), strict=True))))
    assert [answer["topics"][name]["from_seq"] for name in names] == [1, 2, 3, 2]


def test_a_cursor_is_where_the_stream_begins(watching: Watching, three: str) -> None:
    session = watching.create({three: {"tail": True}}, cursor=encode_cursor({three: 1}))
    assert watching.open(session).events(2) == [("record", three, [2, 3]), ("caught-up", three, 3)]


def test_a_cursor_may_name_topics_that_are_not_watched(api: Client, three: str) -> None:
    answer = create(api, three, cursor=encode_cursor({"another": 7, three: 2}))
    assert answer["topics"] == {three: {"from_seq": 2, "head_seq": 3, "earliest_seq": 1}}


BAD_IDS = [
    "!",
    "x",
    "a b",
    "AAAA",
    encode_cursor({"t": 1}) + "!",
    encode_cursor({"t": 1}) + "!!!!",
    " ".join(encode_cursor({"t": 1})),
    base64.urlsafe_b64encode(b"[1]").decode(),
    base64.urlsafe_b64encode(b'{"t":1').decode(),
    encode_cursor({"t": "1"}),
    encode_cursor({"t": -1}),
    encode_cursor({"t": 1.5}),
    encode_cursor({"t": U64_MAX + 1}),
    encode_cursor({"t": None}),
    encode_cursor({"t": True}),
    encode_cursor({"t": {}}),
]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_cursor_that_is_no_id(api: Client, three: str, bad: str) -> None:
    assert create(api, three, cursor=bad).refusal == (400, "invalid_request")


@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_last_event_id_that_is_no_id_is_left_aside(watching: Watching, wid: str, three: str, bad: str) -> None:
    assert watching.open(wid, bad).events(1) == [("record", three, [1, 2, 3])]


# --- limits ------------------------------------------------------------------------------------------


def test_256_topics_at_most(api: Client, three: str) -> None:
    """Counted before anybody looks whether they exist."""
    names = [three, *(f"{three}.unknown-{n}" for n in range(255))]
    assert list(create(api, names, lenient=True)["topics"]) == [three]
    for lenient in (True, False):
        answer = create(api, [*names, "one-more"], lenient=lenient)
        assert answer.refusal == (400, "invalid_request")


# --- opening -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wid",
    [
        "x",
        "wid_",
        "wid_short",
        UNKNOWN[:-1],
        UNKNOWN + "A",
        UNKNOWN[4:] + "AAAA",
        UNKNOWN[:-1] + "!",
        UNKNOWN[:-1] + "%20",
        UNKNOWN[:-1] + "%0A",
        UNKNOWN[:-1] + "%C3%A9",
        UNKNOWN.upper(),
        "wid_" + "A" * 2_000,
    ],
    ids=lambda wid: wid[:40],
)
def test_what_is_no_wid(watching: Watching, wid: str) -> None:
    assert watching.attempt(wid).answer().refusal == (404, "not_found")


def test_a_wid_that_is_unknown(watching: Watching) -> None:
    assert watching.attempt(UNKNOWN).answer().refusal == (404, "not_found")


@pytest.mark.parametrize(
    "accept",
    [
        None,
        "*/*",
        "text/*",
        "text/event-stream",
        "TEXT/Event-Stream",
        "text/html, text/event-stream;q=0.9",
        "*/*;q=0.1",
    ],
)
def test_accept_that_allows_an_event_stream(watching: Watching, wid: str, accept: str | None) -> None:
    headers = [] if accept is None else [("Accept", accept)]
    assert watching.get(f"/v0/watch/{wid}", *headers).status == 200


@pytest.mark.parametrize("accept", ["application/json", "text/html", "text/html, application/*", "text/event-streams"])
def test_accept_that_does_not(watching: Watching, wid: str, three: str, accept: str) -> None:
    answer = watching.get(f"/v0/watch/{wid}", ("Accept", accept)).answer()
    assert answer.refusal == (406, "not_acceptable")
    assert watching.open(wid).events(1) == [("record", three, [1, 2, 3])]


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE"])
def test_streams_are_opened_by_get_alone(
    server: Server, connect: Callable[..., Wire], wid: str, method: str, lane: Any
) -> None:
    if lane == "http1":
        wire = connect()
        wire.send(request(method, f"/v0/watch/{wid}"))
        status, headers = wire.head()
    else:
        with Watching(server, lane) as watching:
            refused = watching.get(f"/v0/watch/{wid}", method=method)
            status, headers = refused.status, refused.headers
    assert status == 405
    assert headers["allow"] == "GET"


def test_a_query_is_ignored(watching: Watching, wid: str, three: str) -> None:
    assert watching.get(f"/v0/watch/{wid}?a=b&token=x").events(1) == [("record", three, [1, 2, 3])]


def test_a_refused_stream_leaves_the_connection_usable(wire: Wire, wid: str, three: str) -> None:
    path = f"/v0/watch/{wid}"
    assert wire.ask(request("GET", path, headers=("Accept: text/html",))).status == 406
    assert wire.ask(request("GET", f"/v0/watch/{UNKNOWN}")).status == 404
    assert wire.ask(request("POST", "/v0/watch", b'{"topics":{"%b":{}}}' % three.encode())).status == 200
    wire.send(request("GET", path))
    status, headers = wire.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
