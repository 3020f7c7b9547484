"""The endpoints of live delivery and the streams they open: sessions, takeovers, heartbeats, slow clients, deaths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parts
import pytest
from delivery import (
    SECOND,
    UNLIMITED,
    UPGRADE,
    House,
    SseClient,
    WsClient,
    create,
    open_request,
    send,
    watch,
    watch_request,
)
from model import Record, error_of

from topics import limits
from topics.gateway.http1 import connection as connection_module
from topics.gateway.streams.frames import composite, prefixes
from topics.storage.config import TopicConfig, owner_of_name

BACKLOG = 4_000
PATTERN = re.compile(r"wid_[A-Za-z0-9_-]{22}\Z")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, gateways=2, stream_backlog_bytes=BACKLOG)
    house.shards[0].shard.append("t", [Record(b"%d" % number) for number in range(4)])
    yield house
    assert not any(gateway.faults for gateway in house.gateways)
    house.crash()


def append(house: House, *records: Record, topic: str = "t") -> None:
    house.shards[0].shard.send_append(topic, list(records))
    house.shards[0].round()
    house.settle()


def last_id(**at: int) -> str:
    return composite(zip(prefixes(list(at)), at.values(), strict=True)).decode()


def counts(house: House) -> tuple[int, int, int, int]:
    """Streams at home and at the gateways, tails, feeds."""
    return (
        house.shards[0].engine.sessions.streams,
        sum(len(gateway.streams) for gateway in house.gateways),
        sum(len(shard.engine.tails) for shard in house.shards),
        sum(len(gateway.feeds) for gateway in house.gateways),
    )


# --- POST /v0/watch ------------------------------------------------------------------------------------


def post(house: House, body: dict[str, Any], **more: Any) -> SseClient:
    client = send(house.gateways[0], watch_request(body, **more))
    house.settle()
    client.read()
    assert client.answer is not None
    return client


def test_a_session_is_made(house: House) -> None:
    house.shards[0].shard.append("capped", [Record(b"1")] * 5, config=TopicConfig(cap_records=2))
    client = post(house, {"topics": {"t": {"from_seq": 3}, "capped": {"tail": True}}})
    assert client.answer is not None
    assert client.answer.status == 200
    shown = client.answer.json
    assert PATTERN.match(shown["wid"])
    assert shown["stream_url"] == f"/v0/watch/{shown['wid']}"
    assert shown["session_ttl_ms"] == 300_000
    assert list(shown["topics"].items()) == [
        ("t", {"from_seq": 3, "head_seq": 4, "earliest_seq": 1}),
        ("capped", {"from_seq": 5, "head_seq": 5, "earliest_seq": 4}),
    ]
    assert shown["performance"]["server_total_ms"] >= 0
    assert house.shards[0].engine.sessions.sessions == 1
    assert post(house, {"topics": {"t": {}}}).answer.json["wid"] != shown["wid"]  # type: ignore[union-attr]


def test_unknown_topics(house: House) -> None:
    body: dict[str, Any] = {"topics": {"nothing": {}, "t": {}}}
    answer = post(house, body).answer
    assert answer is not None
    assert (answer.status, answer.json["error"]["code"]) == (404, "topic_not_found")
    assert house.shards[0].engine.sessions.sessions == 0
    answer = post(house, body, lenient=True).answer
    assert answer is not None
    assert (answer.status, list(answer.json["topics"])) == (200, ["t"])


def test_a_bad_body(house: House) -> None:
    answer = post(house, {"topics": {}}).answer
    assert answer is not None
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")


def test_topics_of_several_shards(tmp_path: Path) -> None:
    house = House(tmp_path, shards=3)
    names = [f"t{number}" for number in range(8)]
    for name in names:
        house.shards[owner_of_name(name, 3)].shard.append(name, [Record(b"1")] * 2)
    client = watch(house, create(house, {"topics": {name: {} for name in names}}))
    client.read()
    assert {event.data["topic"] for event in client.events if event.kind == "caught-up"} == set(names)
    assert all(list(event.id) == names for event in client.events if event.id is not None)
    assert client.events[-1].id == dict.fromkeys(names, 2)
    assert {len(shard.engine.tails) for shard in house.shards} <= set(range(9))
    client.close()
    house.settle()
    assert counts(house) == (0, 0, 0, 0)
    house.crash()


def test_a_shard_that_is_down_refuses_a_session_on_it(tmp_path: Path) -> None:
    house = House(tmp_path, shards=2)
    names = [next(name for name in "abcdefgh" if owner_of_name(name, 2) == number) for number in (0, 1)]
    for number, name in enumerate(names):
        house.shards[number].shard.append(name, [Record(b"1")])
    house.shard_dies(1)
    asked: list[tuple[dict[str, Any], int]] = [({names[0]: {}}, 200), ({names[0]: {}, names[1]: {}}, 503)]
    for body, status in asked:
        client = send(house.gateways[0], watch_request({"topics": body}))
        for _ in range(4):
            house.gateways[0].round()
            house.shards[0].round()
        client.read()
        assert client.answer is not None
        assert client.answer.status == status
    house.shard_returns(1)
    house.crash()


# --- GET /v0/watch/:wid --------------------------------------------------------------------------------


def test_a_stream(house: House) -> None:
    client = watch(house, create(house, {"topics": {"t": {"from_seq": 1}}, "limit": 2}))
    assert client.answer is not None
    assert client.answer.status == 200
    assert client.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in client.answer.headers
    assert bytes(client.pipe.took).partition(b"\r\n\r\n")[2].startswith(b"retry: 2000\n\nid: ")
    assert client.kinds() == ["record", "record", "caught-up"]
    assert client.seqs() == [2, 3, 4]
    append(house, Record(b"5"))
    assert client.seqs() == [2, 3, 4, 5]
    assert counts(house) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    "wid",
    [
        "wid_AAAAAAAAAAAAAAAAAAAAA",
        "wid_AAAAAAAAAAAAAAAAAAAAAAA",
        "wid_AAAAAAAAAAAAAAAAAAAAA%0A",
        "wid_AAAAAAAAAAAAAAAAAAAA++",
        "wid_x",
        "x",
    ],
)
def test_a_malformed_wid_is_refused_as_an_unknown_one(house: House, wid: str) -> None:
    """Clients post again when a session is gone; on a 400 they give up."""
    malformed, unknown = (watch(house, given).answer for given in (wid, "wid_AAAAAAAAAAAAAAAAAAAAAA"))
    assert malformed is not None
    assert unknown is not None
    assert (malformed.status, malformed.json["error"]["code"]) == (404, "not_found")
    assert malformed.json == unknown.json
    assert counts(house)[:2] == (0, 0)


@pytest.mark.parametrize("ident", ["x", "e30x!", "[]", "\xff", last_id(t=1)[:-1], last_id(t=-1)])
def test_a_last_event_id_that_is_none_is_left_aside(house: House, ident: str) -> None:
    """A refusal is final for an EventSource: the session's own cursors count, also those of a second stream."""
    wid = create(house, {"topics": {"t": {"from_seq": 1}}})
    client = watch(house, wid, last_id=ident)
    assert client.streaming
    assert client.seqs() == [2, 3, 4]
    client.close()
    house.settle()
    append(house, Record(b"5"))
    assert watch(house, wid, last_id=ident).seqs() == [5]


def test_not_acceptable(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    request = open_request(wid).replace(b"text/event-stream", b"application/json")
    client = send(house.gateways[0], request)
    house.settle()
    client.read()
    assert client.answer is not None
    assert (client.answer.status, client.answer.json["error"]["code"]) == (406, "not_acceptable")


def test_limits_over_all_gateways(tmp_path: Path) -> None:
    house = House(tmp_path, gateways=2, max_sse_connections=2, max_watch_sessions=3)
    house.shards[0].shard.append("t", [Record(b"1")])
    wids = [create(house, {"topics": {"t": {}}}, gateway=number % 2) for number in range(3)]
    answer = post(house, {"topics": {"t": {}}}).answer
    assert answer is not None
    assert (answer.status, answer.json["error"]["detail"]) == (429, {"limit": "max_watch_sessions", "max": 3})
    assert answer.headers["retry-after"]
    clients = [watch(house, wid, gateway=number) for number, wid in enumerate(wids[:2])]
    refused = watch(house, wids[2], gateway=1).answer
    assert refused is not None
    assert (refused.status, refused.json["error"]["detail"]) == (429, {"limit": "max_sse_connections", "max": 2})
    clients[0].close()
    house.settle()
    assert watch(house, wids[2], gateway=1).streaming
    assert counts(house)[:2] == (2, 2)
    house.crash()


def test_a_session_is_forgotten_after_its_ttl(tmp_path: Path) -> None:
    house = House(tmp_path, session_ttl_ms=5_000)
    sessions = house.shards[0].engine.sessions
    now = [10_000]
    sessions._now_ms = lambda: now[0]
    house.shards[0].shard.append("t", [Record(b"1")])
    wid = create(house, {"topics": {"t": {}}})
    now[0] += 4_999
    client = watch(house, wid)
    assert client.streaming
    now[0] += 50_000
    client.close()
    house.settle()
    now[0] += 5_000
    answer = watch(house, wid).answer
    assert answer is not None
    assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
    house.crash()


# --- reconnecting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gateway", [0, 1])
def test_a_reconnect_goes_on_where_the_socket_was(house: House, gateway: int) -> None:
    wid = create(house, {"topics": {"t": {}}, "limit": 1})
    client = watch(house, wid, window=0)
    head = 400  # the head of the answer and the first records, somewhere in the middle of one
    client.pipe.window = head
    house.settle()
    seen = client.seqs()
    assert 0 < len(seen) < 4
    client.close()
    house.settle()
    append(house, Record(b"5"))
    again = watch(house, wid, gateway=gateway)
    assert seen + again.seqs() == [1, 2, 3, 4, 5]


def test_an_id_rewinds_and_never_takes_forward(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    for presented, expected in ((None, [1, 2, 3, 4]), (2, [3, 4]), (0, [1, 2, 3, 4]), (4, []), (99, []), (None, [])):
        ident = None if presented is None else last_id(t=presented)
        client = watch(house, wid, last_id=ident)
        assert client.seqs() == expected, f"with {presented}"
        client.close()
        house.settle()


def test_an_id_names_some_of_the_topics(house: House) -> None:
    house.shards[0].shard.append("u", [Record(b"1")] * 2)
    wid = create(house, {"topics": {"t": {}, "u": {}}})
    client = watch(house, wid)
    client.close()
    house.settle()
    client = watch(house, wid, last_id=last_id(u=1, other=7))
    assert (client.seqs("t"), client.seqs("u")) == ([], [2])


def test_a_topic_is_deleted_and_others_go_on(house: House) -> None:
    house.shards[0].shard.append("u", [Record(b"1")])
    wid = create(house, {"topics": {"t": {"tail": True}, "u": {"tail": True}}})
    client = watch(house, wid)
    house.shards[0].shard.drop("t")
    append(house, Record(b"2"), topic="u")
    assert client.kinds()[2:] == ["topic-deleted", "record"]
    assert client.events[2].data == {"topic": "t", "head_seq": 4, "reason": "deleted"}
    assert client.events[2].id == {"t": 4, "u": 1}
    client.close()
    house.settle()
    again = watch(house, wid)
    assert again.kinds() == ["topic-deleted", "caught-up"]
    again.close()
    house.settle()
    house.shards[0].shard.append("t", [Record(b"9")] * 7)
    third = watch(house, wid)
    assert sorted(third.kinds()) == ["caught-up", "caught-up", "record", "tombstone"]
    [gap] = [event for event in third.events if event.kind == "tombstone"]
    assert gap.data["reason"] == "recreated"
    assert third.seqs("t") == [1, 2, 3, 4, 5, 6, 7]


def test_made_again_with_a_longer_life_than_the_cursor(house: House) -> None:
    """A session knows which topic it was: nothing is skipped because seqs look familiar."""
    wid = create(house, {"topics": {"t": {"tail": True}}})
    house.shards[0].shard.drop("t")
    house.shards[0].shard.append("t", [Record(b"1")] * 9)
    client = watch(house, wid)
    assert client.kinds() == ["tombstone", "record", "caught-up"]
    assert client.seqs() == list(range(1, 10))


def test_records_that_went_with_the_shard_s_process(house: House) -> None:
    house.shards[0].shard.append("e", [Record(b"1")] * 3, config=TopicConfig(durability="ephemeral"))
    wid = create(house, {"topics": {"e": {"from_seq": 0}}})
    client = watch(house, wid)
    assert client.seqs() == [1, 2, 3]
    append(house, Record(b"4"), topic="e")
    house.shard_dies(0)
    house.shard_returns(0)
    house.settle()
    append(house, Record(b"5"), topic="e")
    seqs = client.seqs()
    gaps = [event.data for event in client.events if event.kind == "tombstone"]
    assert seqs[:4] == [1, 2, 3, 4]
    assert len(seqs) == 5
    head = house.shards[0].shard.topic("e").head_seq
    assert seqs[-1] == head
    covered = [seq for gap in gaps for seq in range(gap["gap_from"], gap["gap_to"] + 1)]
    assert all(seq > 4 for seq in covered)


# --- takeovers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gateway", [0, 1])
def test_a_second_stream_takes_over(house: House, gateway: int) -> None:
    wid = create(house, {"topics": {"t": {}}})
    first = watch(house, wid)
    assert first.seqs() == [1, 2, 3, 4]
    second = watch(house, wid, gateway=gateway)
    assert first.pipe.closed
    assert second.kinds() == ["caught-up"]
    append(house, Record(b"5"))
    assert (first.seqs(), second.seqs()) == ([1, 2, 3, 4], [5])
    assert counts(house) == (1, 1, 1, 1)


def test_what_the_first_client_did_not_take_goes_to_the_second(house: House) -> None:
    wid = create(house, {"topics": {"t": {"tail": True}}})
    first = watch(house, wid)
    first.pipe.window = 0
    append(house, Record(b"5"))
    second = watch(house, wid)
    first.pipe.window = UNLIMITED
    house.settle()
    assert (first.seqs(), second.seqs()) == ([], [5])


def test_two_opens_at_once(house: House) -> None:
    """The first is taken before it began."""
    wid = create(house, {"topics": {"t": {}}})
    clients = [send(house.gateways[0], open_request(wid)) for _ in range(3)]
    house.settle()
    for client in clients:
        client.read()
    assert [client.over for client in clients] == [True, True, False]
    assert [client.seqs() for client in clients] == [[], [], [1, 2, 3, 4]]
    assert counts(house) == (1, 1, 1, 1)


def test_a_stream_is_taken_while_it_waits_for_its_turn(house: House) -> None:
    """It stands behind a slow answer on its connection."""
    wid = create(house, {"topics": {"t": {}}})
    body = json.dumps({"from_seq": 4, "wait_ms": 20_000}).encode()
    poll = (
        b"POST /v0/topics/t/diff HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    first = send(house.gateways[0], poll + open_request(wid))
    house.settle()
    second = watch(house, wid)
    assert second.seqs() == [1, 2, 3, 4]
    assert counts(house)[:2] == (1, 1)
    append(house, Record(b"5"))  # the poll is answered, and the first stream's turn has come
    house.settle()
    assert b'"next_from_seq":5' in first.pipe.took
    assert b"event: record" not in first.pipe.took
    assert first.over
    assert second.seqs() == [1, 2, 3, 4, 5]
    assert counts(house) == (1, 1, 1, 1)


def test_a_client_that_left_before_its_stream_began(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    client = send(house.gateways[0], open_request(wid))
    house.gateways[0].round()
    house.gateways[0].lane.close(client.connection)
    house.settle()
    assert counts(house) == (0, 0, 0, 0)
    assert watch(house, wid).seqs() == [1, 2, 3, 4]


# --- time ----------------------------------------------------------------------------------------------


def test_heartbeats_when_it_is_quiet(house: House) -> None:
    wid = create(house, {"topics": {"t": {"tail": True}}, "heartbeat_ms": 2_000})
    client = watch(house, wid)
    for beats, seconds in ((0, 1.9), (1, 0.2), (1, 1.9), (2, 0.2)):
        house.pass_time(int(seconds * SECOND))
        house.gateways[0].round()
        client.read()
        assert client.heartbeats == beats
    for _ in range(4):  # with something to say there is no need
        house.pass_time(SECOND)
        append(house, Record(b"1"))
    client.read()
    assert client.heartbeats == 2
    assert bytes(client.pipe.took).count(b": hb 1") == 2


def test_a_round_that_takes_longer_than_a_heartbeat(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is due is measured with a fresh clock, what was said with the round's: that must not go on for ever."""
    client = watch(house, create(house, {"topics": {"t": {"tail": True}}, "heartbeat_ms": 1_000}))
    written: list[bytes] = []

    def write(self: Any, data: bytes) -> None:
        written.append(data)
        assert len(written) < 10, "heartbeats without end"

    monkeypatch.setattr(connection_module.Connection, "write", write)
    streams = house.gateways[0].streams
    streams.tick(streams.now_ns + 5 * SECOND)
    assert len(written) == 1
    assert client.stream.due_ns > streams.now_ns + 5 * SECOND


def test_the_clock_of_a_closed_stream_stops(house: House) -> None:
    client = watch(house, create(house, {"topics": {"t": {}}, "heartbeat_ms": 1_000}))
    assert house.gateways[0].streams.next_due_ns is not None
    client.close()
    house.settle()
    house.pass_time(2 * SECOND)
    house.gateways[0].round()
    assert house.gateways[0].streams.next_due_ns is None


def test_a_client_that_does_not_read_is_told_and_closed(house: House) -> None:
    wid = create(house, {"topics": {"t": {"tail": True}}})
    client = watch(house, wid)
    client.pipe.window = 0
    for _ in range(8):
        append(house, Record(b'"%b"' % (b"x" * 1_000)))
        connection = client.connection
        assert connection.written - connection.sent <= BACKLOG + 1_300
    house.pass_time(limits.SLOW_CONSUMER_TIMEOUT_MS * 1_000_000 - SECOND)
    house.gateways[0].round()
    assert not client.connection.closing
    house.pass_time(2 * SECOND)
    house.gateways[0].round()
    assert client.connection.closing
    client.pipe.window = UNLIMITED
    house.settle()
    assert client.kinds()[-1] == "error"
    assert (client.events[-1].id, client.events[-1].data["code"]) == (None, 408)
    assert client.over
    seen = client.seqs()
    assert 0 < len(seen) < 8
    client.close()
    house.settle()
    assert counts(house) == (0, 0, 0, 0)
    again = watch(house, wid, last_id=last_id(t=seen[-1]))
    assert seen + again.seqs() == list(range(5, 13))  # what it took in the end is not sent again


def test_a_client_that_reads_again_in_time(house: House) -> None:
    client = watch(house, create(house, {"topics": {"t": {"tail": True}}}))
    client.pipe.window = 0
    for _ in range(8):
        append(house, Record(b'"%b"' % (b"x" * 1_000)))
    house.pass_time(20 * SECOND)
    house.gateways[0].round()
    client.pipe.window = UNLIMITED
    house.settle()
    house.pass_time(20 * SECOND)
    house.gateways[0].round()
    house.settle()
    assert client.seqs() == list(range(5, 13))
    assert client.kinds()[-1] == "caught-up"
    assert not client.over


def test_a_frame_larger_than_the_backlog(house: House) -> None:
    append(house, *[Record(b'"%b"' % (b"x" * 2_000)) for _ in range(6)])
    client = watch(house, create(house, {"topics": {"t": {}}, "max_batch_bytes": 100_000}))
    assert client.seqs() == list(range(1, 11))
    assert client.kinds()[-1] == "caught-up"
    append(house, Record(b"1"))
    assert client.seqs()[-1] == 11


# --- deaths --------------------------------------------------------------------------------------------


def test_a_gateway_dies_and_the_id_decides(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    client = watch(house, wid)
    assert client.seqs() == [1, 2, 3, 4]
    house.gateway_dies(0)
    append(house, Record(b"5"))
    again = watch(house, wid, gateway=1, last_id=last_id(t=4))
    assert again.seqs() == [5]
    again.close()
    house.settle()
    assert watch(house, wid, gateway=1, last_id=last_id(t=99)).seqs() == []  # only the first one after it


def test_a_gateway_dies_and_there_is_no_id(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    watch(house, wid)
    house.pass_time(SECOND)
    house.gateways[0].round()  # the cursors are saved
    house.settle()
    append(house, Record(b"5"))
    house.gateway_dies(0)
    assert watch(house, wid, gateway=1).seqs() == [5]


def test_a_gateway_dies_and_the_first_to_come_back_leaves_again(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}}, gateway=1)
    watch(house, wid)
    house.gateway_dies(0)
    hasty = send(house.gateways[1], open_request(wid))
    house.gateways[1].round()
    house.gateways[1].lane.close(hasty.connection)
    house.settle()
    assert watch(house, wid, gateway=1, last_id=last_id(t=4)).seqs() == []


def test_the_home_dies_under_a_stream(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    client = watch(house, wid)
    house.shard_dies(0)
    house.shard_returns(0)
    house.settle()
    append(house, Record(b"5"))
    assert client.seqs() == [1, 2, 3, 4, 5]
    assert counts(house) == (1, 1, 1, 1)
    second = watch(house, wid, gateway=1)  # it knows who has it
    assert client.over
    assert second.seqs() == []


def test_the_home_dies_before_the_first_stream(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    house.shard_dies(0)
    house.shard_returns(0)
    house.settle()
    assert watch(house, wid, gateway=1).seqs() == [1, 2, 3, 4]


def test_the_home_dies_between_two_streams(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    for gateway in (0, 1):
        client = watch(house, wid, gateway=gateway)
        client.close()
        house.settle()
        append(house, Record(b"5"))
    house.shard_dies(0)
    house.shard_returns(0)
    house.settle()
    assert watch(house, wid).seqs() == [6]  # the later of the two that served it knows better


def test_a_stream_closes_while_the_home_is_away(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    client = watch(house, wid)
    assert client.seqs() == [1, 2, 3, 4]
    house.shard_dies(0)
    client.close()
    house.gateways[0].round()
    house.shard_returns(0)
    house.settle()
    assert counts(house) == (0, 0, 0, 0)
    append(house, Record(b"5"))
    assert watch(house, wid, gateway=1).seqs() == [5]


def test_an_open_while_the_home_is_away(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    house.shard_dies(0)
    client = send(house.gateways[0], open_request(wid))
    house.gateways[0].round()
    client.read()
    assert client.answer is not None
    assert (client.answer.status, client.answer.json["error"]["code"]) == (503, "shard_unavailable")
    house.shard_returns(0)
    house.settle()


def test_the_home_dies_while_an_open_waits(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    first = watch(house, wid)
    second = send(house.gateways[1], open_request(wid))
    house.gateways[1].round()
    house.shards[0].round()  # the first is told to close
    house.shard_dies(0)
    house.shard_returns(0)
    house.settle()
    second.read()
    assert second.answer is not None
    assert second.answer.status == 503
    assert not first.over
    third = watch(house, wid, gateway=1)
    assert (first.over, third.over, third.seqs()) == (True, False, [])
    assert counts(house)[:2] == (1, 1)


def test_an_answer_that_nobody_waits_for_is_given_back(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    send(house.gateways[0], open_request(wid))
    house.gateways[0].round()
    for entry in house.gateways[0].calls._pending[0].values():
        entry.deadline_ms = 0
    house.gateways[0].calls.expire()
    house.settle()
    assert counts(house)[:2] == (0, 0)


# --- the server stops ----------------------------------------------------------------------------------


def test_the_server_stops(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    client = watch(house, wid)
    house.gateways[0].stop()
    assert client.kinds()[-1] == "error"
    assert client.events[-1].data["code"] == 503
    assert client.over
    append(house, Record(b"5"))
    assert client.seqs() == [1, 2, 3, 4]
    client.close()
    house.settle()
    assert counts(house) == (0, 0, 0, 0)
    assert watch(house, wid, gateway=1).seqs() == [5]


def test_the_server_stops_while_a_stream_opens(house: House) -> None:
    wid = create(house, {"topics": {"t": {}}})
    client = send(house.gateways[0], open_request(wid))
    house.gateways[0].round()
    house.shards[0].round()
    house.gateways[0].stop()
    house.settle()
    client.read()
    assert client.answer is not None
    assert client.answer.status == 200
    assert client.kinds() == ["error"]
    assert client.over
    client.close()
    house.settle()
    assert counts(house) == (0, 0, 0, 0)
    assert watch(house, wid, gateway=1).seqs() == [1, 2, 3, 4]


# --- the handshake of a WebSocket ----------------------------------------------------------------------

HEADERS = {
    b"host": b"example.com:4000",
    b"upgrade": b"websocket",
    b"connection": b"keep-alive, Upgrade",
    b"sec-websocket-version": b"13",
    b"sec-websocket-key": b"dGhlIHNhbXBsZSBub25jZQ==",
}


def test_a_handshake() -> None:
    watches = parts.watches(shards=1)
    assert watches.handshake(HEADERS) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert watches.handshake({**HEADERS, b"upgrade": b"h2c, WebSocket", b"connection": b"UPGRADE"})


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        (b"upgrade", b"", "upgrade_required"),
        (b"upgrade", b"h2c", "upgrade_required"),
        (b"connection", b"keep-alive", "upgrade_required"),
        (b"connection", b"", "upgrade_required"),
        (b"sec-websocket-version", b"8", "upgrade_required"),
        (b"sec-websocket-version", b"", "upgrade_required"),
        (b"sec-websocket-version", b"13, 8", "upgrade_required"),
        (b"sec-websocket-key", b"", "invalid_request"),
        (b"sec-websocket-key", b"c2hvcnQ=", "invalid_request"),
        (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ", "invalid_request"),
        (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ==!", "invalid_request"),
        (b"sec-websocket-key", b"\xff" * 24, "invalid_request"),
    ],
)
def test_no_handshake(name: bytes, value: bytes, code: str) -> None:
    watches = parts.watches(shards=1)
    assert error_of(lambda: watches.handshake({**HEADERS, name: value})).code == code
    left_out = {known: said for known, said in HEADERS.items() if known != name}
    assert error_of(lambda: watches.handshake(left_out)).code in ("upgrade_required", "invalid_request")


def test_a_plain_get_is_told_to_upgrade(house: House) -> None:
    client = send(house.gateways[0], b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\n\r\n")
    house.settle()
    client.read()
    assert client.answer is not None
    assert (client.answer.status, client.answer.headers["sec-websocket-version"]) == (426, "13")
    assert client.answer.json["error"]["code"] == "upgrade_required"
    assert not client.over
    client.pipe.inbox += UPGRADE  # the connection is still good
    house.settle()
    assert b"HTTP/1.1 101 " in client.pipe.took


def test_sockets_are_in_the_books_too(house: House) -> None:
    WsClient(house.gateways[0])
    watch(house, create(house, {"topics": {"t": {}}}))
    assert counts(house)[:2] == (2, 2)
