"""Bodies that are large, or become large when they are inflated: bounded per route; large appends in slices."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from topics import limits

from .client import Client, unique
from .server import Server
from .sockets import Socket
from .wire import Wire, chunked, request

GZIP = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
CONTROL = limits.CONTROL_BODY_BYTES


def bomb(before: bytes, unit: bytes, after: bytes, *, size: int = 4 * limits.MIB) -> bytes:
    """A gzip body of some kilobytes that inflates to so many bytes."""
    packer = zlib.compressobj(level=9, wbits=31)
    parts = [packer.compress(before)]
    chunk = unit * 100_000
    parts += [packer.compress(chunk) for _ in range(size // len(chunk))]
    return b"".join([*parts, packer.compress(after), packer.flush()])


BOMBS = {
    "delete": ((b'{"match":[', b"{},", b"{}]}"), 413),
    "diff": ((b'{"node":[', b'"a",', b'"a"]}'), 413),
    "ack": ((b'{"node":"a","seqs":[', b"1,", b"1]}"), 413),
    "nack": ((b'{"node":"a","seqs":[1],"x":[', b"[],", b"1]}"), 413),
    "claim": ((b'{"node":"', b"x", b'"}'), 413),
    "": ((b'{"records":[', b'{"data":1},', b'{"data":1}]}'), 400),
}


@pytest.mark.parametrize("verb", BOMBS)
def test_a_bomb_is_refused(api: Client, topic: str, verb: str) -> None:
    parts, status = BOMBS[verb]
    answer = api.send("POST", f"/v0/topics/{topic}/{verb}".rstrip("/"), content=bomb(*parts), headers=GZIP)
    assert answer.status == status, answer


def test_the_largest_bomb_is_refused_and_the_gateway_lives(api1: Client, server: Server, topic: str) -> None:
    pid = server.pid_of("gateway-0")
    body = bomb(b'{"match":[', b"{},", b"{}]}", size=60 * limits.MIB)
    assert len(body) < 100_000
    for _ in range(6):
        answer = api1.send("POST", f"/v0/topics/{topic}/delete", content=body, headers=GZIP)
        assert answer.refusal == (413, "payload_too_large")
    assert server.pid_of("gateway-0") == pid


def test_a_watch_and_a_config_are_bounded_too(api: Client, topic: str) -> None:
    body = bomb(b'{"topics":{', b'"a":{},', b'"a":{}}}')
    assert api.send("POST", "/v0/watch", content=body, headers=GZIP).refusal == (413, "payload_too_large")
    body = bomb(b'{"x":[', b"0,", b"0]}")
    assert api.send("PUT", f"/v0/topics/{topic}", content=body, headers=GZIP).refusal == (413, "payload_too_large")
    assert api.send("PUT", f"/v0/routers/{topic}", content=body, headers=GZIP).refusal == (413, "payload_too_large")


def padded(size: int) -> bytes:
    return b'{"from_seq":0}' + b" " * (size - 14)


def test_the_most_of_a_body_that_is_no_append(api: Client, topic: str) -> None:
    api.append(topic, 1)
    assert api.send("POST", f"/v0/topics/{topic}/diff", content=padded(CONTROL)).status == 200
    answer = api.send("POST", f"/v0/topics/{topic}/diff", content=padded(CONTROL + 1))
    assert answer.refusal == (413, "payload_too_large")
    assert answer.detail == {"max": CONTROL}
    assert api.diff(topic).seqs == [1]


def test_chunks_are_counted_as_they_come(connect: Callable[..., Wire], api1: Client, topic: str) -> None:
    api1.append(topic, 1)
    head = request(
        "POST", f"/v0/topics/{topic}/diff", headers=("Transfer-Encoding: chunked", "Content-Type: application/json")
    )
    assert connect().ask(head, chunked(padded(CONTROL), 1_000)).status == 200
    assert connect().ask(head, chunked(padded(CONTROL + 1), 1_000)).refusal == (413, "payload_too_large")


def records(count: int, size: int) -> list[dict[str, Any]]:
    return [
        {"data": {"n": n, "list": [{"data": n}, {"data": "},{"}], "text": "é" * (size // 2)}, "tag": f"t{n % 3}"}
        for n in range(count)
    ]


@pytest.fixture
def stored(api1: Client) -> Callable[[str], list[Any]]:
    def read(topic: str) -> list[Any]:
        found: list[Any] = []
        while more := api1.diff(topic, len(found), limit=1_000)["records"]:
            found += more
        return found

    return read


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_large_append_is_what_was_sent(
    api: Client, topic: str, stored: Callable[[str], list[Any]], packed: bool
) -> None:
    sent = records(3_000, 1_000)
    content = json.dumps({"records": sent, "node": "n"}, ensure_ascii=False).encode()
    assert len(content) > 3 * limits.MIB
    if packed:
        packer = zlib.compressobj(level=1, wbits=31)
        content = packer.compress(content) + packer.flush()
    answer = api.send("POST", f"/v0/topics/{topic}", content=content, headers=GZIP if packed else None)
    assert (answer["first_seq"], answer["last_seq"]) == (1, 3_000)
    found = stored(topic)
    assert [record["data"] for record in found] == [record["data"] for record in sent]
    assert {record["$node"] for record in found} == {"n"}


def test_a_large_append_that_is_refused_leaves_nothing(api: Client, topic: str) -> None:
    api.append(topic, 1)
    wrong = json.dumps({"records": [*records(2_000, 1_000), {"tag": "no data"}]}).encode()
    answer = api.send("POST", f"/v0/topics/{topic}", content=wrong)
    assert answer.refusal == (400, "invalid_request")
    assert api.state(topic)["head_seq"] == 1


def test_what_follows_a_large_append_on_its_connection_waits_for_it(wire: Wire, topic: str) -> None:
    body = json.dumps({"records": records(2_000, 1_000)}).encode()
    small = b'{"records":[{"data":"small"}]}'
    path = f"/v0/topics/{topic}"
    wire.send(
        request("POST", path, body), request("POST", path, small), request("POST", path + "/diff", b'{"from_seq":2000}')
    )
    assert wire.answer()["last_seq"] == 2_000
    assert wire.answer()["first_seq"] == 2_001
    assert wire.answer().data == ["small"]


@pytest.fixture
def ws(server: Server) -> Iterator[Socket]:
    socket = Socket(server.port)
    yield socket
    socket.close()


def test_a_large_publish(ws: Socket, topic: str, stored: Callable[[str], list[Any]]) -> None:
    sent = records(1_500, 1_000)
    ws.send_text(json.dumps({"op": "publish", "topic": topic, "request_id": "p", "records": sent}))
    ws.send_text(json.dumps({"op": "publish", "topic": topic, "request_id": "q", "records": [{"data": "small"}]}))
    first, second = json.loads(ws.receive_text(30)), json.loads(ws.receive_text(30))
    assert (first["op"], first["request_id"], first["last_seq"]) == ("ack", "p", 1_500)
    assert (second["op"], second["request_id"], second["first_seq"]) == ("ack", "q", 1_501)
    assert [record["data"] for record in stored(topic)] == [*(record["data"] for record in sent), "small"]


def test_a_large_command_that_is_no_publish(ws: Socket, topic: str) -> None:
    for size in (CONTROL, 2 * limits.MIB):
        ws.send_text(json.dumps({"op": "ping", "request_id": "p", "x": "x" * size}))
        refusal = json.loads(ws.receive_text(30))
        assert (refusal["op"], refusal["code"]) == ("error", "payload_too_large")
        ws.send_text('{"op":"ping","request_id":"q"}')
        assert json.loads(ws.receive_text(30))["op"] == "pong"


def test_a_large_publish_that_is_refused_names_its_request(ws: Socket, api1: Client) -> None:
    topic = unique()
    wrong = [*records(1_500, 1_000), {"tag": "no data"}]
    ws.send_text(json.dumps({"op": "publish", "topic": topic, "request_id": "p", "records": wrong}))
    refusal = json.loads(ws.receive_text(30))
    assert (refusal["op"], refusal["code"], refusal["request_id"]) == ("error", "invalid_request", "p")
    assert api1.state(topic).status == 404
