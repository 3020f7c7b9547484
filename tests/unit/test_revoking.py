"""Keys that end while they are in use: remembered heads, bodies on their way, streams, sockets, polls, sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from delivery import UPGRADE, House, SseClient, WsClient, open_request, parse_answer, send, watch_request
from model import Record

from topics.gateway.large.decoder import DIRECT_BYTES
from topics.keys import Key, parse_keys, renumbered

KEYS = "one:rw:t name=first expires=2027-01-01T00:00:00Z\ntwo:rw"
END_MS = 1_798_761_600_000


def parse(text: str) -> tuple[Key, ...]:
    return parse_keys(text, source="here", attributes=True)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, api_keys=parse(KEYS))
    house.shards[0].shard.append("t", [Record(b"1")])
    yield house
    house.crash()


def signed(request: bytes, secret: str) -> bytes:
    return request.replace(b"Host: localhost\r\n", b"Host: localhost\r\nAuthorization: Bearer %b\r\n" % secret.encode())


def ask(house: House, request: bytes, secret: str) -> SseClient:
    client = send(house.gateways[0], signed(request, secret))
    house.settle()
    client.read()
    assert client.answer is not None
    return client


def status(house: House, request: bytes, secret: str) -> int:
    answer = ask(house, request, secret).answer
    assert answer is not None
    return answer.status


def session(house: House, secret: str) -> bytes:
    answer = ask(house, watch_request({"topics": {"t": {}}}), secret).answer
    assert answer is not None
    return open_request(answer.json["wid"])


def connect(house: House, secret: str) -> WsClient:
    client = WsClient(house.gateways[0], upgrade=signed(UPGRADE, secret))
    house.settle()
    assert client.read() == []
    client.send({"op": "subscribe", "topic": "t"})
    house.settle()
    assert [said["op"] for said in client.read()] == ["subscribed", "record", "caught_up"]
    return client


def revoke(house: House, text: str) -> None:
    gateway = house.gateways[0]
    gateway.take_keys(renumbered(parse(text), gateway.settings.api_keys))
    house.settle()


def expire(house: House) -> None:
    house.gateways[0].wall_ms = END_MS
    house.gateways[0].stays_awake = True
    house.settle()


def append(house: House) -> None:
    house.shards[0].shard.send_append("t", [Record(b"2")])
    house.shards[0].round()
    house.settle()


def errors(said: list[Any]) -> list[tuple[str, str]]:
    return [(one["code"], one["message"]) for one in said if one["op"] == "error"]


HEALTH = b"GET /v0/topics?page_size=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
ENDS = {
    "revoked": lambda house: revoke(house, "two:rw"),
    "demoted": lambda house: revoke(house, "one:r:t name=first\ntwo:rw"),
    "moved": lambda house: revoke(house, "one:rw:u name=first\ntwo:rw"),
    "expired": expire,
}
SAYS = {
    "revoked": "this key was revoked",
    "demoted": "the rights of this key have changed; retry",
    "moved": "the rights of this key have changed; retry",
    "expired": "this key has expired: it was good until 2027-01-01T00:00:00Z",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_stream_ends_with_its_key_and_others_go_on(house: House, how: str) -> None:
    opened = {secret: ask(house, session(house, secret), secret) for secret in ("one", "two")}
    ENDS[how](house)
    opened["one"].read()
    assert opened["one"].events[-1].kind == "error"
    assert SAYS[how] in str(opened["one"].events[-1].data)
    assert opened["one"].pipe.shut
    before = len(opened["one"].events)
    append(house)
    assert [event.kind for event in opened["two"].read()] == ["record"]
    assert opened["one"].read() == []
    assert len(opened["one"].events) == before
    opened["one"].pipe.ended = True
    house.settle()
    assert house.shards[0].engine.sessions.streams == 1


@pytest.mark.parametrize("how", ENDS)
def test_a_socket_ends_with_its_key_and_others_go_on(house: House, how: str) -> None:
    one, two = connect(house, "one"), connect(house, "two")
    ENDS[how](house)
    assert errors(one.read()) == [("unauthorized", SAYS[how])]
    assert one.close_code == 1008
    append(house)
    assert [said["op"] for said in two.read()] == ["record"]
    assert one.read() == []


def test_what_was_published_is_acknowledged_before_the_socket_ends(house: House) -> None:
    client = connect(house, "one")
    client.send({"op": "publish", "topic": "t", "records": [{"data": 2}], "request_id": 1})
    house.gateways[0].round()
    house.gateways[0].take_keys(parse("two"))
    client.send({"op": "publish", "topic": "t", "records": [{"data": 3}], "request_id": 2})
    house.settle()
    said = client.read()
    assert [one["op"] for one in said] == ["error", "ack"]
    assert client.close_code == 1008
    assert house.shards[0].shard.report("t").head_seq == 2, "what came behind is not heard"


def test_a_stream_that_was_asked_for_before_its_key_ended(house: House) -> None:
    request = session(house, "one")
    client = send(house.gateways[0], signed(request, "one"))
    late = WsClient(house.gateways[0], upgrade=signed(UPGRADE, "one"))
    house.gateways[0].round()
    house.gateways[0].take_keys(parse("two"))
    house.settle()
    client.read()
    assert [event.kind for event in client.events] == ["error"]
    assert errors(late.read()) == [("unauthorized", "this key was revoked")]
    assert late.close_code == 1008
    client.pipe.ended = late.pipe.ended = True
    house.settle()
    assert house.shards[0].engine.sessions.streams == 0


def test_a_session_is_not_worth_more_than_its_key_is_now(house: House) -> None:
    mine, other = session(house, "one"), session(house, "two")
    revoke(house, "one:rw:u name=first\ntwo:rw")
    assert status(house, mine, "one") == 403
    assert house.shards[0].engine.sessions.streams == 0
    revoke(house, "two:rw")
    assert status(house, mine, "one") == 401
    assert status(house, mine, "two") == 401
    assert status(house, other, "two") == 200


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_heads_that_are_remembered_are_judged_again(house: House, how: str) -> None:
    assert [status(house, HEALTH, "one") for _ in range(2)] == [200, 200]
    ENDS[how](house)
    refused = ask(house, HEALTH, "one").answer
    assert refused is not None
    assert (refused.status, refused.json["error"]["code"]) == (401, "unauthorized")
    assert ("has expired" in refused.json["error"]["message"]) is (how == "expired")
    assert status(house, HEALTH, "two") == 200


def test_the_end_of_a_key_is_seen_before_the_first_request_after_it(house: House) -> None:
    """The loop has slept for long: nothing was due."""
    assert status(house, HEALTH, "one") == 200
    house.gateways[0].wall_ms = END_MS
    assert status(house, HEALTH, "one") == 401


def test_a_body_on_its_way_is_refused(house: House) -> None:
    for size in (100, 200_000):
        house.gateways[0].take_keys(parse(KEYS))
        request = (
            "POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {size}\r\n\r\n"
        ).encode()
        client = send(house.gateways[0], signed(request, "one") + b'{"records":[')
        house.settle()
        assert not client.pipe.took
        revoke(house, "two:rw")
        answer = parse_answer(bytes(client.pipe.took))
        assert answer is not None
        assert (answer.status, answer.headers["connection"]) == (401, "close")


LARGE = b" " * (DIRECT_BYTES + 1)  # read in slices; what is sent to the shard stays small


def large_append() -> bytes:
    body = b'{"records":[{"data":2}]%b}' % LARGE
    framing = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\n{framing}".encode() + body


def begin_to_read(house: House) -> None:
    for _ in range(1_000):
        if house.gateways[0].calls.slices:
            return
        house.gateways[0].round()
    raise AssertionError("no large body came")


def rounds_until_sent(house: House) -> int:
    """How many rounds a gateway needs for a large append, from its first slice until it is out."""
    send(house.gateways[0], signed(large_append(), "two"))
    begin_to_read(house)
    rounds = 0
    while house.gateways[0].calls.slices:
        house.gateways[0].round()
        rounds += 1
    house.settle()
    assert house.shards[0].shard.report("t").head_seq == 2
    return rounds


@pytest.mark.parametrize("how", ENDS)
def test_a_large_append_is_not_sent_if_its_key_ends_while_it_is_read(house: House, how: str) -> None:
    """At the first slice, in the middle, and between the last one and the moment in which it would be sent."""
    gateway = house.gateways[0]
    most = rounds_until_sent(house)
    assert most > 3
    for rounds in (0, most // 2, most - 1):
        gateway.wall_ms = 0
        gateway.take_keys(parse(KEYS))
        client = send(gateway, signed(large_append(), "one"))
        begin_to_read(house)
        for _ in range(rounds):
            gateway.round()
        assert gateway.calls.slices
        assert not client.pipe.took
        ENDS[how](house)
        answer = parse_answer(bytes(client.pipe.took))
        assert answer is not None
        assert (answer.status, answer.json["error"]["message"]) == (401, SAYS[how])
        assert house.shards[0].shard.report("t").head_seq == 2
        assert gateway.streams.budget.held == 0


def test_a_large_publish_is_not_sent_if_its_key_ends_while_it_is_read(house: House) -> None:
    """Something else is out, and its acknowledgement keeps the socket open for a moment."""
    gateway = house.gateways[0]
    client = connect(house, "one")
    client.send({"op": "publish", "topic": "t", "records": [{"data": 2}], "request_id": 1})
    client.send(b'{"op":"publish","topic":"t","request_id":2,"records":[{"data":3}]%b}' % LARGE)
    begin_to_read(house)
    gateway.take_keys(parse("two"))
    for _ in range(20):  # the shard is slow: what was read would be sent by now
        gateway.round()
    assert not gateway.calls.slices
    house.settle()
    assert [one["op"] for one in client.read()] == ["error", "ack"]
    assert client.close_code == 1008
    assert house.shards[0].shard.report("t").head_seq == 2
    assert gateway.streams.budget.held == 0


def test_a_long_poll_is_asked_again(house: House) -> None:
    body = b'{"from_seq":1,"wait_ms":30000}'
    framing = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    head = f"POST /v0/topics/t/diff HTTP/1.1\r\nHost: localhost\r\n{framing}"
    polls = [send(house.gateways[0], signed(head.encode() + body, secret)) for secret in ("one", "two")]
    house.settle()
    assert [bytes(poll.pipe.took) for poll in polls] == [b"", b""]
    revoke(house, "two:rw")
    assert [answer.status for poll in polls if (answer := parse_answer(bytes(poll.pipe.took)))] == [200, 200]


def test_another_name_or_a_later_end_changes_nothing(house: House) -> None:
    socket, stream = connect(house, "one"), ask(house, session(house, "one"), "one")
    revoke(house, "one:w+r:t name=other expires=2028-01-01T00:00:00Z\ntwo:rw")
    expire(house)
    append(house)
    assert [said["op"] for said in socket.read()] == ["record"]
    assert [event.kind for event in stream.read()] == ["record"]
    assert status(house, HEALTH, "one") == 200
