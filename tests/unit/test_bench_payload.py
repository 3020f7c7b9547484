"""What is sent: exact sizes, valid JSON, the same record bytes to both sides, plans that add up."""

import json
from itertools import pairwise

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.events import AcceptConnection, Request, TextMessage

from benchmarks.generators import payload
from benchmarks.scenarios import RECORD_BYTES, STORED_RECORD_BYTES
from benchmarks.sides.side import STREAMS, read_plans, spread


@pytest.mark.parametrize("size", [RECORD_BYTES, STORED_RECORD_BYTES, 1_000])
def test_records_have_their_size_and_differ(size: int) -> None:
    made = payload.records(200, first=7, size=size)
    assert {len(data) for data in made} == {size}
    assert len({json.loads(data)["id"] for data in made}) == 200


def test_a_record_too_small_for_its_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        payload.record(1, size=20)


def test_an_append_is_one_whole_http_request() -> None:
    batch = payload.records(3, first=0, size=80)
    head, _, body = payload.http_append("bench-0", batch).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v0/topics/bench-0?return_seqs=false HTTP/1.1\r\n")
    assert b"Content-Length: %d" % len(body) in head
    assert [record["data"] for record in json.loads(body)["records"]] == [json.loads(data) for data in batch]
    assert b"return_seqs" not in payload.http_append("bench-0", batch[:1])


def test_redis_gets_the_same_bytes() -> None:
    (data,) = payload.records(1, first=0, size=80)
    expected = b"*5\r\n$4\r\nXADD\r\n$7\r\nbench-0\r\n$1\r\n*\r\n$4\r\ndata\r\n$80\r\n" + data + b"\r\n"
    assert payload.resp_append("bench-0", [data]) == expected
    assert payload.resp_append("bench-0", [data] * 100) == expected * 100


@pytest.mark.parametrize("connections", [1, 4, 16, 64])
def test_connections_are_spread_over_the_streams(connections: int) -> None:
    plans = spread(connections=connections, per_stream=4, requests=None)
    streams = [{request // 4 for request in plan} for plan in plans]
    assert all(len(one) == 1 for one in streams)
    assert [one.pop() for one in streams] == [number % len(STREAMS) for number in range(connections)]
    assert all(sorted(request % 4 for request in plan) == [0, 1, 2, 3] for plan in plans)


@pytest.mark.parametrize("requests", [0, 1, 15, 16, 17, 1_000])
def test_a_total_is_dealt_out_exactly(requests: int) -> None:
    plans = spread(connections=16, per_stream=4, requests=requests)
    sizes = [len(plan) for plan in plans]
    assert sum(sizes) == requests
    assert max(sizes) - min(sizes) <= 1


def test_every_reader_reads_every_page_in_order() -> None:
    plans = read_plans(connections=4, pages=10)
    assert all(sorted(plan) == list(range(10)) for plan in plans)
    assert len({plan[0] for plan in plans}) == 4
    assert all((after - before) % 10 == 1 for plan in plans for before, after in pairwise(plan))


# --- WebSocket --------------------------------------------------------------------------------------------


def received(data: bytes) -> list[str]:
    """The messages in the data, as a server that knows the protocol reads them."""
    server = Connection(ConnectionType.SERVER)
    server.receive_data(data)
    return [event.data for event in server.events() if isinstance(event, TextMessage) and event.message_finished]


@pytest.mark.parametrize("size", [0, 1, 3, 125, 126, 127, 65_535, 65_536, 200_000])
def test_a_message_is_what_a_websocket_server_reads(size: int) -> None:
    text = "".join(chr(ord("a") + at % 26) for at in range(size))
    assert "".join(received(payload.ws_text(text.encode()))) == text


def test_publishes_and_subscriptions_are_whole_commands() -> None:
    (data,) = payload.records(1, first=0, size=80)
    (published,) = received(payload.ws_publish("bench-0", data))
    expected = {"op": "publish", "topic": "bench-0", "records": [{"data": json.loads(data)}]}
    assert json.loads(published) == expected
    assert len(received(payload.ws_publish("bench-0", data) * 16)) == 16
    (subscribed,) = received(payload.ws_subscribe("bench-0", limit=7))
    assert json.loads(subscribed) == {"op": "subscribe", "topic": "bench-0", "tail": True, "limit": 7}


def test_the_handshake_is_one_that_a_websocket_server_accepts() -> None:
    server = WSConnection(ConnectionType.SERVER)
    server.receive_data(payload.WS_HANDSHAKE)
    assert [type(event) for event in server.events()] == [Request]
    assert payload.WS_ACCEPT in server.send(AcceptConnection())
