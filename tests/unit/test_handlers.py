"""Handlers: the question they ask of which shard, and what they make of the answer."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from parts import queues, watches

from topics import __version__
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.gateway.api.topics import Handlers
from topics.gateway.api.types import Call, Gather, Request, Response
from topics.keys import HIDDEN, Key, Scope
from topics.settings import Settings
from topics.shm.counters import Board, State, Word
from topics.storage.config import TopicConfig

SHARDS = ["shard-0", "shard-1", "shard-2"]


@pytest.fixture
def board() -> Board:
    return Board.create(["supervisor", "gateway-0", *SHARDS])


@pytest.fixture
def handlers(board: Board) -> Handlers:
    return Handlers(Settings(), shards=3, board=board)


def request(name: str = "t", *, body: bytes = b"", key: str | None = None, shard: int = 1, **query: str) -> Request:
    return Request(name=name, shard=shard, query=query, body=body, idempotency_key=key, started_ns=0)


def call_of(outcome: object) -> Call:
    assert isinstance(outcome, Call)
    return outcome


def content(response: Any) -> dict[str, Any]:
    assert isinstance(response, Response)
    found: dict[str, Any] = json.loads(bytes(response.body) + response.tail)
    return found


# --- records ---


@pytest.mark.parametrize(
    ("scopes", "modest"), [(None, False), (Scope.WRITE, True), (Scope.WRITE | Scope.ADMIN, False), (Scope.ALL, False)]
)
def test_a_config_is_modest_without_admin(handlers: Handlers, scopes: Scope | None, modest: bool) -> None:
    key = None if scopes is None else Key(b"", int(scopes))
    for body, expected in ((b'{"records":[{"data":1}],"config":{}}', modest), (b'{"records":[{"data":1}]}', False)):
        asked = request(body=body)
        asked.key = key
        assert call_of(handlers.append(asked)).head.modest is expected


def test_a_dead_letter_topic_outside_of_the_prefixes_is_not_shown(handlers: Handlers) -> None:
    config = TopicConfig(dead_letter="out:dead", max_deliveries=1)
    report = messages.TopicReport(1, 1, 1, 1, config, 0, 0, 0)
    for prefixes, shown in (((), "out:dead"), (("out:", "in:"), "out:dead"), (("in:",), HIDDEN)):
        asked = request("in:q")
        asked.key = Key(b"", prefixes=prefixes)
        gather = handlers.get_topic(asked)
        assert isinstance(gather, Gather)
        assert content(gather.render([report]))["config"]["dead_letter"] == shown
    with pytest.raises(ApiError, match="dead_letter"):  # what was shown can't be sent back by mistake
        handlers.put_topic(request(body=b'{"type":"queue","max_deliveries":1,"dead_letter":"%b"}' % HIDDEN.encode()))


def test_an_append_asks_its_shard_and_shows_the_seqs(handlers: Handlers) -> None:
    call = call_of(handlers.append(request(body=b'{"records":[{"data":1},{"data":2}]}', key="k")))
    assert (call.shard, call.op, call.timeout_ms) == (1, Op.APPEND, 0)
    assert (call.head.topic, call.head.count, call.head.key) == ("t", 2, "k")
    response = call.render(messages.Appended(7, 2, 9, False, False, 120, 0), b"")
    assert response.status == 200
    shown = content(response)
    performance = shown.pop("performance")
    assert shown == {
        "topic": "t",
        "first_seq": 7,
        "last_seq": 8,
        "seqs": [7, 8],
        "head_seq": 9,
        "count": 2,
        "created": False,
        "deduped": False,
    }
    assert performance["wal_append_ms"] == 0.12
    assert performance["fsync_ms"] == 0.0
    assert performance["server_total_ms"] >= 0


@pytest.mark.parametrize(("created", "status"), [(True, 201), (False, 200)])
@pytest.mark.parametrize("microseconds", [0, 1, 999, 4_095, 4_096, 1_234_567, 2**32 - 1])
def test_an_append_that_created_says_so(handlers: Handlers, created: bool, status: int, microseconds: int) -> None:
    call = call_of(handlers.append(request(body=b'{"records":[{"data":1}]}')))
    response = call.render(messages.Appended(1, 1, 1, created, True, microseconds, microseconds), b"")
    assert response.status == status
    shown = content(response)
    assert (shown["created"], shown["deduped"], shown["seqs"]) == (created, True, [1])
    assert shown["performance"]["wal_append_ms"] == microseconds / 1000
    assert shown["performance"]["fsync_ms"] == microseconds / 1000


@pytest.mark.parametrize("flag", ["false", "0"])
def test_seqs_may_be_left_out(handlers: Handlers, flag: str) -> None:
    call = call_of(handlers.append(request(body=b'{"records":[{"data":1}]}', return_seqs=flag)))
    assert "seqs" not in content(call.render(messages.Appended(1, 1, 1, False, False, 0, 0), b""))


def test_a_diff_passes_the_shards_json_on(handlers: Handlers) -> None:
    call = call_of(handlers.diff(request(body=b'{"from_seq":5,"wait_ms":700}')))
    assert (call.op, call.head.from_seq, call.head.wait_ms) == (Op.DIFF, 5, 700)
    assert call.timeout_ms == 700
    response = call.render(messages.Diffed(3, 0), memoryview(b'{"topic":"t","records":[]'))
    shown = content(response)
    assert shown["records"] == []
    assert shown["performance"]["records_scanned"] == 3


def test_a_delete_shows_what_is_left(handlers: Handlers) -> None:
    call = call_of(handlers.delete_records(request(body=b'{"match":["tag","Glob","x*"],"before_seq":9}')))
    assert (call.op, call.head.before_seq, call.head.tag, call.head.prefix) == (Op.DELETE_RECORDS, 9, "x", True)
    shown = content(call.render(messages.RecordsDeleted(3, 4, 9, 5, 500, 1_500), b""))
    performance = shown.pop("performance")
    assert shown == {"topic": "t", "deleted": 3, "earliest_seq": 4, "head_seq": 9, "count": 5, "bytes": 500}
    assert performance["fsync_ms"] == 1.5


# --- topics ---


@pytest.mark.parametrize(("created", "status"), [(True, 201), (False, 200)])
def test_a_put_echoes_the_whole_config(handlers: Handlers, created: bool, status: int) -> None:
    call = call_of(handlers.put_topic(request(body=b'{"durable":true}')))
    assert call.head == messages.PutTopic("t", TopicConfig(durable=True, durability="fsync"), None)
    response = call.render(messages.TopicPut(created, call.head.config), b"")
    assert response.status == status
    shown = content(response)
    assert (shown["topic"], shown["created"]) == ("t", created)
    assert list(shown["config"]) == list(TopicConfig.__struct_fields__)
    assert shown["config"]["durability"] == "fsync"


def test_a_get_shows_the_state(handlers: Handlers) -> None:
    gather = handlers.get_topic(request())
    assert isinstance(gather, Gather)
    assert [call.head for call in gather.calls] == [messages.GetTopic("t", True)]
    quiet = handlers.get_topic(request(touch="false"))
    assert isinstance(quiet, Gather)
    assert [call.head for call in quiet.calls] == [messages.GetTopic("t", False)]
    report = messages.TopicReport(9, 4, 5, 500, TopicConfig(), 250, 100, None)
    shown = content(gather.render([report]))
    assert "queue" not in shown
    assert shown["next_seq"] == 10
    assert (shown["head_seq"], shown["earliest_seq"], shown["count"], shown["bytes"]) == (9, 4, 5, 500)
    assert (shown["type"], shown["effective_priority"]) == ("log", 250)
    assert (shown["last_write_ts"], shown["last_read_ts"]) == (100, None)


def test_a_get_of_a_queue_asks_the_coordinator_too(handlers: Handlers) -> None:
    gather = handlers.get_topic(request())
    assert isinstance(gather, Gather)
    report = messages.TopicReport(9, 4, 5, 500, TopicConfig(type="queue"), 250, 100, None, 77, 3, 1)
    counting = gather.render([report])
    assert isinstance(counting, Gather)
    call = counting.calls[0]
    assert (call.shard, call.op) == (4, Op.COUNT_QUEUES)
    assert call.head == messages.CountQueues([messages.QueueRow("t", 77, 5, 3, 1)])
    shown = content(counting.render([messages.QueuesCounted([messages.QueueCounts(3, 2, 1)])]))
    assert shown["queue"] == {"ready": 3, "in_flight": 2, "dead_lettered": 1}


def test_counters_that_are_not_to_be_had_are_asked_for_again_and_then_refused(handlers: Handlers) -> None:
    report = messages.TopicReport(9, 4, 5, 500, TopicConfig(type="queue"), 250, 100, None, 77)
    outcome = handlers.get_topic(request())
    for _ in range(2):
        assert isinstance(outcome, Gather)
        counting = outcome.render([report])
        assert isinstance(counting, Gather)
        outcome = counting.render([messages.QueuesCounted([None])])
    assert isinstance(outcome, Gather)
    counting = outcome.render([report])
    assert isinstance(counting, Gather)
    with pytest.raises(ApiError) as refused:
        counting.render([messages.QueuesCounted([None])])
    assert refused.value.code == "shard_unavailable"


def row(name: str) -> messages.TopicRow:
    return messages.TopicRow(name, 1, 1, 1, 33, False, 0)


def listed(handlers: Handlers, answers: list[messages.TopicsListed], **query: Any) -> dict[str, Any]:
    gather = handlers.list_topics(request("", **query))
    assert isinstance(gather, Gather)
    return content(gather.render(answers))


def test_a_listing_asks_every_shard_and_merges_by_name(handlers: Handlers) -> None:
    gather = handlers.list_topics(request("", prefix="p", page_size="3"))
    assert isinstance(gather, Gather)
    assert [call.shard for call in gather.calls] == [0, 1, 2]
    assert all(call.head == messages.ListTopics("p", "", 3, False) for call in gather.calls)
    shown = listed(
        handlers,
        [
            messages.TopicsListed([row("a"), row("d")], False),
            messages.TopicsListed([row("b"), row("c")], False),
            messages.TopicsListed([], False),
        ],
        page_size="3",
    )
    assert [topic["topic"] for topic in shown["topics"]] == ["a", "b", "c"]
    after = json.loads(base64.b64decode(shown["next_cursor"]))
    assert after == {"after": "c"}
    following = handlers.list_topics(request("", cursor=shown["next_cursor"]))
    assert isinstance(following, Gather)
    assert following.calls[0].head.after == "c"


def test_only_what_a_page_shows_is_touched(handlers: Handlers) -> None:
    gather = handlers.list_topics(request("", prefix="p", page_size="3", touch="true"))
    assert isinstance(gather, Gather)
    assert not any(call.head.touch for call in gather.calls)
    again = gather.render(
        [
            messages.TopicsListed([row("a"), row("d"), row("e")], False),
            messages.TopicsListed([row("f")], False),
            messages.TopicsListed([row("b"), row("c")], False),
        ]
    )
    assert isinstance(again, Gather)
    asked = [(call.shard, call.head) for call in again.calls]
    assert asked == [(0, messages.ListTopics("p", "", 1, True)), (2, messages.ListTopics("p", "", 2, True))]
    read = messages.TopicRow("a", 2, 1, 2, 66, False, 500)
    shown = content(again.render([messages.TopicsListed([read], True), messages.TopicsListed([row("c")], True)]))
    assert [(topic["topic"], topic["effective_priority"]) for topic in shown["topics"]] == [
        ("a", 500),
        ("b", 0),
        ("c", 0),
    ]
    assert json.loads(base64.b64decode(shown["next_cursor"])) == {"after": "c"}
    nothing = handlers.list_topics(request("", touch="true"))
    assert isinstance(nothing, Gather)
    assert content(nothing.render([messages.TopicsListed([], False)] * 3))["topics"] == []


def test_a_topic_that_is_being_rebuilt_says_so_in_its_row(handlers: Handlers) -> None:
    """Nothing of what it has so far is shown; the others are. A queue is not counted."""
    half = messages.TopicRow("b", 7, 3, 2, 99, True, 5, 77, rebuilding=True)
    answers = [messages.TopicsListed([row("a"), row("c")], False), messages.TopicsListed([half], True)]
    shown = listed(handlers, answers)
    assert [topic["topic"] for topic in shown["topics"]] == ["a", "b", "c"]
    assert [topic for topic in shown["topics"] if "error" in topic] == [shown["topics"][1]]
    rebuilt = shown["topics"][1]
    assert (rebuilt["error"]["code"], rebuilt["error"]["detail"]) == ("shard_unavailable", {"topic": "b"})
    assert [rebuilt[name] for name in ("head_seq", "earliest_seq", "count", "bytes")] == [None] * 4
    assert (rebuilt["durable"], rebuilt["effective_priority"]) == (True, 5)
    assert "queue" not in rebuilt
    assert shown["topics"][0]["count"] == 1


def test_the_last_page_has_no_cursor(handlers: Handlers) -> None:
    none = messages.TopicsListed([], False)
    assert "next_cursor" not in listed(handlers, [messages.TopicsListed([row("a")], False), none, none])
    assert "next_cursor" not in listed(handlers, [none, none, none])
    assert listed(handlers, [none, none, none])["topics"] == []
    exact = listed(handlers, [messages.TopicsListed([row("a"), row("b")], False), none, none], page_size="2")
    assert "next_cursor" not in exact
    assert "next_cursor" in listed(handlers, [messages.TopicsListed([row("a")], True), none, none], page_size="1")


@pytest.mark.parametrize(
    "cursor",
    [
        *("", "x", "!!!!", "bm90IGpzb24=", base64.b64encode(b"{}").decode(), base64.b64encode(b'{"after":1}').decode()),
        pytest.param(base64.b64encode(b'{"x":%b%b}' % (b"[" * 2_000, b"]" * 2_000)).decode(), id="deep"),
    ],
)
def test_cursors_that_we_never_gave_out(handlers: Handlers, cursor: str) -> None:
    with pytest.raises(ApiError) as caught:
        handlers.list_topics(request("", cursor=cursor))
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("100", 100), ("1000", 1_000), ("1001", 1_000), ("99999", 1_000)])
def test_page_sizes(handlers: Handlers, text: str, size: int) -> None:
    gather = handlers.list_topics(request("", page_size=text))
    assert isinstance(gather, Gather)
    assert gather.calls[0].head.limit == size


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "1e3", "٣", "9" * 30])
def test_page_sizes_that_are_refused(handlers: Handlers, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        handlers.list_topics(request("", page_size=text))
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("text", ["yes", "True", "2", ""])
def test_flags_that_are_refused(handlers: Handlers, text: str) -> None:
    asked: tuple[Callable[[], object], ...] = (
        lambda: handlers.get_topic(request(touch=text)),
        lambda: handlers.list_topics(request("", touch=text)),
        lambda: handlers.append(request(body=b'{"records":[{"data":1}]}', return_seqs=text)),
    )
    for ask in asked:
        with pytest.raises(ApiError) as caught:
            ask()
        assert caught.value.code == "invalid_request"


# --- queues ---


def test_an_extend_shows_the_deadlines_of_what_was_not_skipped() -> None:
    """One that stands twice is skipped once; and many seqs take no longer than they must."""
    settings = Settings(max_claim=100_002)
    handlers = queues(shards=3, streams=watches(shards=3, settings=settings).streams)
    seqs = [*range(1, 100_001), 7, 8]
    body = json.dumps({"node": "n", "seqs": seqs, "lease_ms": 1_000}).encode()
    call = call_of(handlers.extend(request(body=body)))
    began = time.process_time()  # other work on the machine is not ours
    shown = content(call.render(messages.Extended([9, 7], 5_000), b""))
    assert time.process_time() - began < 1
    assert (shown["extended"], shown["skipped"]) == (100_000, [9, 7])
    assert shown["deadlines"] == {str(seq): 5_000 for seq in range(1, 100_001) if seq != 9}


# --- probes ---


def test_health_always_answers(handlers: Handlers) -> None:
    response = handlers.health(request(""))
    shown = content(response)
    assert (shown["status"], shown["version"]) == ("ok", __version__)
    assert shown["uptime_ms"] >= 0


def be_ready(board: Board) -> None:
    for name in SHARDS:
        board.row(name).set(Word.STATE, State.READY)
        board.row(name).set(Word.TOPICS, 2)


def test_ready_when_every_shard_is(handlers: Handlers, board: Board) -> None:
    be_ready(board)
    response = handlers.ready(request(""))
    assert isinstance(response, Response)
    assert response.status == 200
    shown = content(response)
    assert (shown["status"], shown["wal_replay_complete"], shown["topics"]) == ("ready", True, 6)


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_not_ready_while_one_is_not(handlers: Handlers, board: Board, state: State) -> None:
    be_ready(board)
    board.row("shard-1").set(Word.STATE, state)
    response = handlers.ready(request(""))
    assert isinstance(response, Response)
    assert response.status == 503
    assert ("Retry-After", "1") in response.headers
    error = content(response)["error"]
    assert error["code"] == "not_ready"
    assert error["detail"]["waiting_for"] == {"shard-1": state.name.lower()}


@pytest.mark.parametrize("ready", [True, False])
def test_a_cold_tier_that_is_missed_is_named(handlers: Handlers, board: Board, ready: bool) -> None:
    """Also where it may be what a shard waits for."""
    be_ready(board)
    board.row("shard-1").set(Word.DERIVING, not ready)
    board.row("shard-2").set(Word.COLD_GONE, 1)
    response = handlers.ready(request(""))
    assert isinstance(response, Response)
    shown = content(response)
    found = shown["degraded"] if ready else shown["error"]["detail"]
    assert found["cold_tier_missing"] == ["shard-2"]
    board.row("shard-2").set(Word.COLD_GONE, 0)
    response = handlers.ready(request(""))
    assert isinstance(response, Response)
    assert b"cold_tier_missing" not in bytes(response.body)


def test_not_ready_before_the_gateway_can_reach_them(board: Board) -> None:
    be_ready(board)
    handlers = Handlers(Settings(), shards=3, board=board, linked=lambda shard: shard != 2)
    response = handlers.ready(request(""))
    assert isinstance(response, Response)
    assert response.status == 503
    assert list(content(response)["error"]["detail"]["waiting_for"]) == ["shard-2"]


def test_not_ready_while_stopping(handlers: Handlers, board: Board) -> None:
    be_ready(board)
    handlers.draining = True
    response = handlers.ready(request(""))
    assert isinstance(response, Response)
    assert (response.status, content(response)["error"]["code"]) == (503, "shutting_down")
