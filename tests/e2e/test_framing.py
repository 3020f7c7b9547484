"""HTTP/1.1 byte by byte, over raw sockets: what is understood, what is refused, and that nothing behind a refusal
runs."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable

import pytest

from .client import Client
from .server import Server, eventually
from .wire import Wire, append_request, chunked, request

pytestmark = pytest.mark.e2e

Connect = Callable[..., Wire]
HEALTH = request()
BODY = b'{"records":[{"data":1}]}'
CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")


def chunked_append(topic: str, body: bytes = BODY, *sizes: int, end: bytes = b"0\r\n\r\n") -> bytes:
    return request("POST", f"/v0/topics/{topic}", headers=CHUNKED) + chunked(body, *sizes, end=end)


# --- keep-alive and pipelining -----------------------------------------------------------------------


def test_a_connection_serves_many_requests(wire: Wire, topic: str) -> None:
    for number in range(1, 51):
        assert wire.ask(append_request(topic))["seqs"] == [number]


def test_connection_close_is_honoured(wire: Wire) -> None:
    answer = wire.ask(request(headers=("Connection: close",)))
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    wire.assert_closed()


def test_nothing_runs_after_connection_close(wire: Wire, api1: Client, topic: str) -> None:
    wire.send(request(headers=("Connection: close",)) + append_request(topic))
    assert wire.answer().status == 200
    wire.assert_closed()
    assert api1.state(topic).status == 404


def test_many_pipelined_requests_are_answered_in_order(wire: Wire, topic: str) -> None:
    count = 1_000
    sender = threading.Thread(target=wire.send, args=(append_request(topic) * count,))
    sender.start()
    assert [wire.answer()["first_seq"] for _ in range(count)] == list(range(1, count + 1))
    sender.join()


def test_slow_and_fast_requests_of_a_pipeline_keep_their_order(wire: Wire, api1: Client, topic: str) -> None:
    """An fsync, topics of both shards, a long poll that times out, one that is fed by the request behind it."""
    api1.put(f"{topic}.sync", durability="fsync")
    api1.put(f"{topic}.empty")
    api1.put(f"{topic}.fed")
    poll = b'{"wait_ms":300}'
    requests = [
        append_request(f"{topic}.sync"),
        HEALTH,
        request("POST", f"/v0/topics/{topic}.empty/diff", poll),
        append_request(f"{topic}.a"),
        request("POST", f"/v0/topics/{topic}.fed/diff", b'{"wait_ms":20000}'),
        append_request(f"{topic}.fed", '"food"'),
        request("GET", "/v0/nowhere"),
        append_request(f"{topic}.sync"),
        request("GET", "/v0/topics?page_size=1"),
        HEALTH,
    ]
    wire.send(b"".join(requests))
    answers = [wire.answer() for _ in requests]
    assert answers[0]["seqs"] == [1]
    assert answers[1]["status"] == "ok"
    assert answers[2]["records"] == []
    assert answers[3]["topic"] == f"{topic}.a"
    assert answers[4].data == ["food"]
    assert answers[5]["topic"] == f"{topic}.fed"
    assert answers[6].refusal == (404, "not_found")
    assert answers[7]["seqs"] == [2]
    assert len(answers[8]["topics"]) == 1
    assert answers[9]["status"] == "ok"


def test_requests_of_a_pipeline_take_effect_in_order(wire: Wire, topic: str) -> None:
    """Whatever path each takes through the server, it sees what the ones before it did, and nothing else."""
    path = f"/v0/topics/{topic}"
    wire.ask(request("PUT", path, b"{}"))
    state, diff = request("GET", path), request("POST", f"{path}/diff", b'{"limit":1000}')
    round_of_seven = [
        append_request(topic),  # seqs 1 to 4 of five
        request("POST", path, b'{"records":[{"data":1,"tag":"a"},{"data":2,"tag":"b","meta":{}}],"node":"n"}'),
        diff,
        append_request(topic, idempotency_key='"%d"'),
        request("POST", f"{path}/delete", b'{"match":"a"}'),
        state,
        request("POST", path, '{"records":[{"data":"é"}]}'.encode()),
    ]
    rounds = 20
    parts = []
    for number in range(rounds):
        parts += [part.replace(b'"%d"', b'"%02d"' % number) for part in round_of_seven]
    parts = [_with_length(part) for part in parts]
    sender = threading.Thread(target=wire.send, args=(b"".join(parts),))
    sender.start()
    for number in range(rounds):
        first = 5 * number + 1
        assert wire.answer()["seqs"] == [first]
        assert wire.answer()["seqs"] == [first + 1, first + 2]
        assert wire.answer()["head_seq"] == first + 2
        assert wire.answer()["seqs"] == [first + 3]
        assert wire.answer()["deleted"] == 1
        seen = wire.answer()
        assert (seen["head_seq"], seen["count"]) == (first + 3, first + 3 - (number + 1))
        assert wire.answer()["seqs"] == [first + 4]
    sender.join()


def _with_length(raw: bytes) -> bytes:
    """The same request with the length of the body it has now."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def test_a_client_that_does_not_read_keeps_nobody_waiting(
    server: Server, connect: Connect, api1: Client, topic: str
) -> None:
    """Nor does it cost more memory than the requests of one connection may: the server stops reading from it."""
    api1.append(topic, "x" * 500_000)
    before = _memory(server)
    deaf = connect()
    deaf.send(request("POST", f"/v0/topics/{topic}/diff", b"{}") * 2_000)
    wire = connect()
    for number in range(2, 22):
        assert wire.ask(append_request(topic))["seqs"] == [number]
    assert _memory(server) - before < 300_000_000


def _memory(server: Server) -> int:
    return sum(line.rss_bytes or 0 for line in server.ps().processes)


def test_hundreds_of_connections_at_a_time(connect: Connect, topic: str) -> None:
    wires = [connect() for _ in range(300)]
    for wire in wires:
        wire.send(append_request(topic))
    assert sorted(wire.answer()["first_seq"] for wire in wires) == list(range(1, 301))


def test_a_client_that_does_not_read_loses_nothing(wire: Wire, api1: Client, topic: str) -> None:
    """More answers than socket buffers hold: the server stops reading, and goes on when the client does."""
    api1.append(topic, "x" * 100_000)
    count = 200
    ask = request("POST", f"/v0/topics/{topic}/diff", b"{}")
    sender = threading.Thread(target=wire.send, args=(ask * count,))
    sender.start()
    for _ in range(count):
        assert len(wire.answer().data[0]) == 100_000
    sender.join()


@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_request_may_arrive_in_pieces(wire: Wire, topic: str, step: int) -> None:
    raw = append_request(topic)
    assert wire.ask(*[raw[at : at + step] for at in range(0, len(raw), step)])["seqs"] == [1]


def test_two_requests_split_anywhere(wire: Wire, topic: str) -> None:
    raw = append_request(topic) * 2
    for at in range(1, len(raw)):
        wire.send(raw[:at], raw[at:])
        assert wire.answer().status in (200, 201)
        assert wire.answer().status == 200


def test_header_names_and_values_are_read_loosely_where_they_may_be(wire: Wire, topic: str) -> None:
    wire.send(
        f"POST /v0/topics/{topic} HTTP/1.1\r\nhOST:localhost\r\ncontent-TYPE:   application/json  \r\n"
        f"CONTENT-LENGTH:\t{len(BODY)} \r\n\r\n".encode()
        + BODY
    )
    assert wire.answer().status == 201


def test_an_empty_line_before_a_request_is_ignored(wire: Wire) -> None:
    assert wire.ask(b"\r\n" + HEALTH).status == 200
    assert wire.ask(b"\r\n", HEALTH).status == 200


def test_the_absolute_form_is_understood(wire: Wire) -> None:
    assert wire.ask(request(path="http://localhost/v0/health")).status == 200


def test_an_upgrade_we_do_not_speak_is_answered_as_a_plain_request(wire: Wire, topic: str) -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    assert wire.ask(request(headers=upgrade)).status == 200
    assert wire.ask(request("POST", f"/v0/topics/{topic}", BODY, headers=upgrade)).status == 201
    assert wire.ask(HEALTH).status == 200


# --- appends that arrive together --------------------------------------------------------------------
# The server may handle them as one; no client can tell.


def _statuses(wire: Wire, count: int) -> list[int]:
    return [wire.answer().status for _ in range(count)]


def test_only_the_first_of_them_creates(wire: Wire, topic: str) -> None:
    wire.send(append_request(topic) * 10)
    answers = [wire.answer() for _ in range(10)]
    assert [answer.status for answer in answers] == [201] + [200] * 9
    assert [answer["created"] for answer in answers] == [True] + [False] * 9
    assert [answer["seqs"] for answer in answers] == [[n] for n in range(1, 11)]
    assert [answer["count"] for answer in answers] == [1] * 10
    assert all(answer["head_seq"] >= answer["last_seq"] for answer in answers)


def test_each_is_answered_for_its_own_records(wire: Wire, api1: Client, topic: str) -> None:
    sizes = [1, 3, 2, 50, 1, 7]
    bodies = [b",".join([b'{"data":"%d/%d"}' % (at, n) for n in range(size)]) for at, size in enumerate(sizes)]
    wire.send(b"".join(request("POST", f"/v0/topics/{topic}", b'{"records":[%b]}' % body) for body in bodies))
    first = 1
    for size in sizes:
        answer = wire.answer()
        assert (answer["first_seq"], answer["last_seq"], answer["count"]) == (first, first + size - 1, size)
        assert answer["seqs"] == list(range(first, first + size))
        first += size
    assert api1.diff(topic).data == [f"{at}/{n}" for at, size in enumerate(sizes) for n in range(size)]


def test_return_seqs_is_each_ones_own(wire: Wire, topic: str) -> None:
    body = b'{"records":[{"data":1}]}'
    wire.send((request("POST", f"/v0/topics/{topic}?return_seqs=false", body) + append_request(topic)) * 3)
    assert ["seqs" in wire.answer().json for _ in range(6)] == [False, True] * 3


@pytest.mark.parametrize("cap", [1, 2, 3, 7])
def test_a_full_topic_takes_as_many_as_fit(wire: Wire, api1: Client, topic: str, cap: int) -> None:
    api1.put(topic, cap_records=cap, discard="reject")
    wire.send(append_request(topic) * 10)
    assert _statuses(wire, 10) == [200] * cap + [422] * (10 - cap)
    assert api1.state(topic)["head_seq"] == cap


def test_the_first_that_does_not_fit_stops_none_that_does(wire: Wire, api1: Client, topic: str) -> None:
    api1.put(topic, cap_records=4, discard="reject")
    two = request("POST", f"/v0/topics/{topic}", b'{"records":[{"data":1},{"data":2}]}')
    five = request("POST", f"/v0/topics/{topic}", b'{"records":[%b]}' % b",".join([b'{"data":0}'] * 5))
    wire.send(append_request(topic) + two + five + two + append_request(topic) + append_request(topic))
    assert _statuses(wire, 6) == [200, 200, 400, 422, 200, 422]
    assert api1.state(topic)["count"] == 4


def test_caps_in_bytes_are_each_ones_own(wire: Wire, api1: Client, topic: str) -> None:
    api1.append(f"{topic}.measure", "x" * 100)
    size = api1.state(f"{topic}.measure")["bytes"]
    api1.put(topic, cap_bytes=3 * size, discard="reject")
    wire.send(append_request(topic, '"' + "x" * 100 + '"') * 5)
    assert _statuses(wire, 5) == [200, 200, 200, 422, 422]


def test_evictions_are_as_if_each_had_come_alone(wire: Wire, api1: Client, topic: str) -> None:
    api1.put(topic, cap_records=3)
    wire.send(b"".join(append_request(topic, str(n)) for n in range(10)))
    assert _statuses(wire, 10) == [200] * 10
    answer = api1.diff(topic)
    assert (answer.data, answer["tombstone"]["gap_to"]) == ([7, 8, 9], 7)


def test_a_bad_one_among_them_is_refused_alone(wire: Wire, api1: Client, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    wire.send(append_request(topic) + request("POST", path, b'{"records":[{"data":1},]}') + append_request(topic))
    assert _statuses(wire, 3) == [201, 400, 200]
    assert api1.state(topic)["head_seq"] == 2


def test_different_topics_among_them(wire: Wire, api1: Client, topic: str) -> None:
    wire.send(b"".join(append_request(f"{topic}.{n % 3}", str(n)) for n in range(30)))
    answers = [wire.answer() for _ in range(30)]
    assert [answer["topic"] for answer in answers] == [f"{topic}.{n % 3}" for n in range(30)]
    for number in range(3):
        assert api1.diff(f"{topic}.{number}").data == list(range(number, 30, 3))


def test_a_topic_deleted_among_them(wire: Wire, api1: Client, topic: str) -> None:
    api1.put(topic, ttl_ms=60_000)
    wire.send(append_request(topic) * 2 + request("DELETE", f"/v0/topics/{topic}") + append_request(topic) * 2)
    answers = [wire.answer() for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 201, 200]
    assert [answer["seqs"] for answer in answers if "seqs" in answer.json] == [[1], [2], [1], [2]]
    assert api1.state(topic)["config"]["ttl_ms"] == 0


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_many_connections_at_once(connect: Connect, api1: Client, topic: str, durability: str) -> None:
    api1.put(topic, durability=durability)
    wires = [connect() for _ in range(30)]
    for number, wire in enumerate(wires):
        wire.send(append_request(topic, f"[{number},0]") + append_request(topic, f"[{number},1]"))
    placed: dict[int, list[int]] = {}
    for number, wire in enumerate(wires):
        for at in range(2):
            answer = wire.answer()
            assert (answer["performance"]["fsync_ms"] > 0) == (durability == "fsync")
            placed[answer["seqs"][0]] = [number, at]
    assert api1.diff(topic).data == [placed[seq] for seq in range(1, 61)]


def test_one_of_them_who_leaves_takes_nobody_along(connect: Connect, api1: Client, topic: str) -> None:
    api1.put(topic, durability="fsync")
    stay, leave = connect(), connect()
    for _ in range(10):
        leave.send(append_request(topic))
        stay.send(append_request(topic))
    leave.reset()
    assert _statuses(stay, 10) == [200] * 10


# --- HEAD --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v0/health", 200),
        ("/v0/topics", 200),
        ("/v0/topics/absent", 404),
        ("/nowhere", 404),
        ("/v0/topics/a/diff", 405),
    ],
)
def test_head_is_a_get_without_the_body(wire: Wire, path: str, status: int) -> None:
    wire.send(request("HEAD", path) + HEALTH)
    answered, headers = wire.head()
    assert answered == status
    assert int(headers["content-length"]) > 0
    assert wire.answer()["status"] == "ok"


# --- chunked -----------------------------------------------------------------------------------------


def test_a_chunked_body(wire: Wire, topic: str) -> None:
    assert wire.ask(chunked_append(topic))["seqs"] == [1]
    assert wire.ask(HEALTH).status == 200


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 23])
def test_chunks_of_any_size(wire: Wire, topic: str, size: int) -> None:
    assert wire.ask(chunked_append(topic, BODY, *[size] * len(BODY)))["seqs"] == [1]


def test_a_chunked_body_split_at_every_byte(wire: Wire, topic: str) -> None:
    raw = chunked_append(topic, BODY, 3, 8)
    for number, at in enumerate(range(1, len(raw)), start=1):
        assert wire.ask(raw[:at], raw[at:])["seqs"] == [number]


def test_a_chunked_body_byte_by_byte(wire: Wire, topic: str) -> None:
    raw = chunked_append(topic, BODY, 3, 8)
    assert wire.ask(*[raw[at : at + 1] for at in range(len(raw))])["seqs"] == [1]


def test_a_large_chunked_body(wire: Wire, api1: Client, topic: str) -> None:
    body = json.dumps({"records": [{"data": "x" * 1_000}] * 500}).encode()
    assert wire.ask(chunked_append(topic, body, *[40_000] * 20))["count"] == 500
    assert api1.state(topic)["count"] == 500


@pytest.mark.parametrize(
    "encoded",
    [
        b"018\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"18;name=value\r\n" + BODY + b"\r\n0;last\r\n\r\n",
        b"18\r\n" + BODY + b"\r\n000\r\n\r\n",
        b"18\r\n" + BODY + b"\r\n0\r\nTrailer: x\r\nOther: y\r\n\r\n",
    ],
    ids=["leading zero", "extensions", "long last chunk", "trailers"],
)
def test_odd_but_legal_chunks(wire: Wire, topic: str, encoded: bytes) -> None:
    assert wire.ask(request("POST", f"/v0/topics/{topic}", headers=CHUNKED) + encoded)["seqs"] == [1]
    assert wire.ask(HEALTH).status == 200


def test_a_trailer_is_not_a_header(wire: Wire, topic: str) -> None:
    """A key, a length or a host in a trailer changes nothing."""
    end = b"0\r\nIdempotency-Key: k\r\nContent-Length: 5\r\nHost: other\r\n\r\n"
    assert wire.ask(chunked_append(topic, end=end))["seqs"] == [1]
    assert wire.ask(chunked_append(topic, end=end))["deduped"] is False


def test_a_gzip_body_may_be_chunked(wire: Wire, topic: str) -> None:
    head = request("POST", f"/v0/topics/{topic}", headers=(*CHUNKED, "Content-Encoding: gzip"))
    assert wire.ask(head + chunked(gzip.compress(BODY), 5, 5))["seqs"] == [1]


def test_a_chunked_body_where_none_belongs_is_passed_over(wire: Wire, api1: Client, topic: str) -> None:
    raw = request("GET", "/v0/health", headers=("Transfer-Encoding: CHUNKED",)) + chunked(append_request(topic), 20)
    wire.send(raw + HEALTH)
    assert wire.answer().status == 200
    assert wire.answer().status == 200
    assert api1.state(topic).status == 404


@pytest.mark.parametrize("size", [64 << 10, 256 << 10, 512 << 10])
@pytest.mark.parametrize("off", [-200, -1, 0, 1])
def test_bodies_of_all_sizes_and_what_stands_behind_them(wire: Wire, topic: str, size: int, off: int) -> None:
    """Around the sizes at which the server goes about it in another way."""
    body = b'{"records":[{"data":"%b"}]}' % (b"x" * (size + off - 25))
    assert len(body) == size + off
    wire.send((request("POST", f"/v0/topics/{topic}", body) + HEALTH) * 2)
    assert [wire.answer().status for _ in range(4)] == [201, 200, 200, 200]
    for data in json.loads(wire.ask(request("POST", f"/v0/topics/{topic}/diff", b"{}")).raw)["records"]:
        assert len(data["data"]) == size + off - 25


# --- expect ------------------------------------------------------------------------------------------

EXPECT = ("Expect: 100-continue",)


def _expecting(topic: str, body: bytes = BODY, *more: str, path: str = "") -> bytes:
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}", *EXPECT, *more)
    return request("POST", path or f"/v0/topics/{topic}", headers=lines)


def test_expect_is_told_to_continue(wire: Wire, topic: str) -> None:
    wire.send(_expecting(topic))
    assert wire.head() == (100, {})
    assert wire.ask(BODY)["seqs"] == [1]
    assert wire.ask(HEALTH).status == 200


def test_expect_with_a_large_body(wire: Wire, topic: str) -> None:
    body = b'{"records":[{"data":"%b"}]}' % (b"x" * 500_000)
    wire.send(_expecting(topic, body))
    assert wire.head() == (100, {})
    assert wire.ask(body, HEALTH)["seqs"] == [1]
    assert wire.answer().status == 200


def test_expect_with_chunks(wire: Wire, topic: str) -> None:
    wire.send(request("POST", f"/v0/topics/{topic}", headers=(*CHUNKED, *EXPECT)))
    assert wire.head() == (100, {})
    assert wire.ask(chunked(BODY, 4))["seqs"] == [1]


def test_expect_behind_a_request_that_is_not_answered_yet(wire: Wire, api1: Client, topic: str) -> None:
    """The 100 has its place in the order of answers, and does come."""
    api1.put(topic)
    wire.send(request("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":200}') + _expecting(topic))
    assert wire.answer()["records"] == []
    assert wire.head() == (100, {})
    assert wire.ask(BODY)["seqs"] == [1]


def test_whoever_does_not_wait_for_the_100_is_answered_too(wire: Wire, topic: str) -> None:
    wire.send(_expecting(topic) + BODY)
    status, headers = wire.head()
    if status == 100:
        status, headers = wire.head()
    assert status == 201
    assert json.loads(wire.body(headers))["seqs"] == [1]


@pytest.mark.parametrize(
    ("head", "refusal"),
    [
        (_expecting("", path="/v0/nowhere"), (404, "not_found")),
        (_expecting("", path="/v0/topics/a%20b"), (400, "invalid_request")),
        (_expecting("", path="/v0/health"), (405, "method_not_allowed")),
        (request("POST", "/v0/topics/x", headers=("Content-Length: 10", *EXPECT)), (415, "unsupported_media_type")),
        (
            request(
                "POST",
                "/v0/topics/x",
                headers=("Content-Type: application/json", f"Content-Length: {64 * 1024 * 1024 + 1}", *EXPECT),
            ),
            (413, "payload_too_large"),
        ),
        (request(headers=("Expect: miracles",)), (417, "expectation_failed")),
    ],
    ids=["no route", "bad name", "wrong method", "content type", "too large", "unknown expectation"],
)
def test_a_refusal_comes_instead_of_the_100(wire: Wire, head: bytes, refusal: tuple[int, str]) -> None:
    assert wire.ask(head).refusal == refusal


# --- HTTP/1.0 ----------------------------------------------------------------------------------------


def test_http_1_0_is_answered_and_closed(wire: Wire, topic: str) -> None:
    assert wire.ask(request("POST", f"/v0/topics/{topic}", BODY, version="HTTP/1.0"))["seqs"] == [1]
    wire.assert_closed()


def test_http_1_0_needs_no_host(wire: Wire) -> None:
    assert wire.ask(b"GET /v0/health HTTP/1.0\r\n\r\n").status == 200
    wire.assert_closed()


def test_http_1_0_is_never_told_to_continue(wire: Wire, topic: str) -> None:
    assert wire.ask(_expecting(topic).replace(b"HTTP/1.1", b"HTTP/1.0"), BODY).status == 201


def test_http_1_0_keep_alive_is_closed_or_says_so(wire: Wire) -> None:
    answer = wire.ask(request(version="HTTP/1.0", headers=("Connection: keep-alive",)))
    assert answer.status == 200
    if answer.headers.get("connection", "").lower() == "keep-alive":
        assert wire.ask(request(version="HTTP/1.0")).status == 200
    wire.assert_closed()


# --- what is refused, and that nothing behind it runs ------------------------------------------------

POST = "POST /v0/topics/{topic} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

AMBIGUOUS = {
    "length and chunked": POST + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": POST + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
    "the same length twice": POST + "Content-Length: 5\r\nContent-Length: 5\r\n\r\n12345",
    "a list of lengths": POST + "Content-Length: 5, 5\r\n\r\n12345",
    "negative length": POST + "Content-Length: -1\r\n\r\n",
    "signed length": POST + "Content-Length: +5\r\n\r\n12345",
    "hexadecimal length": POST + "Content-Length: 0x5\r\n\r\n12345",
    "length with a space": POST + "Content-Length: 1 0\r\n\r\n1234567890",
    "empty length": POST + "Content-Length:\r\n\r\n",
    "underscored length": POST + "Content-Length: 1_0\r\n\r\n1234567890",
    "length beyond 64 bits": POST + "Content-Length: 18446744073709551621\r\n\r\n12345",
    "endless length": POST + f"Content-Length: {'9' * 100}\r\n\r\n12345",
    "unknown coding": POST + "Transfer-Encoding: gzip\r\n\r\n",
    "coding twice": POST + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": POST + "Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "gzip, chunked": POST + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": POST + "Transfer-Encoding: identity\r\n\r\n",
    "xchunked": POST + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "vertical tab before chunked": POST + "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "space before the colon": POST + "Content-Length : 5\r\n\r\n12345",
    "space in a name": POST + "Content Length: 5\r\n\r\n12345",
    "a line without a colon": POST + "nonsense\r\n\r\n",
    "an empty name": POST + ": x\r\n\r\n",
    "folded line": POST + "X-A: b\r\n c\r\n\r\n",
    "folded length": POST + "Content-Length:\r\n 5\r\n\r\n12345",
    "folded by a tab": POST + "X-A: b\r\n\tc\r\n\r\n",
    "folded first line": "GET /v0/health HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "bare LF": "GET /v0/health HTTP/1.1\nHost: localhost\n\n",
    "bare LF in the middle": "GET /v0/health HTTP/1.1\r\nHost: localhost\nX-A: b\r\n\r\n",
    "bare CR": "GET /v0/health HTTP/1.1\r\nHost: localhost\rX-A: b\r\n\r\n",
    "CR LF by hand at the end": "GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\n",
    "nul in a value": "GET /v0/health HTTP/1.1\r\nHost: localhost\r\nX-A: a\0b\r\n\r\n",
    "control character in a value": "GET /v0/health HTTP/1.1\r\nHost: localhost\r\nX-A: a\x01b\r\n\r\n",
    "no host": "GET /v0/health HTTP/1.1\r\n\r\n",
    "two hosts": "GET /v0/health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "HTTP/0.9": "GET /v0/health\r\n\r\n",
    "HTTP/0.9 with headers": "GET /v0/health\r\nHost: localhost\r\n\r\n",
    "HTTP/2.0 in words": "GET /v0/health HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "HTTP/1.2": "GET /v0/health HTTP/1.2\r\nHost: localhost\r\n\r\n",
    "HTTP/9.9": "GET /v0/health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "http/1.1 in small letters": "GET /v0/health http/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/1.1.1": "GET /v0/health HTTP/1.1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/11": "GET /v0/health HTTP/11\r\nHost: localhost\r\n\r\n",
    "a space in the target": "GET /v0/he alth HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no target": "GET HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a control character in the target": "GET /v0/\x01health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "small method": "get /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("head", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
@pytest.mark.parametrize("together", [True, False], ids=["in one piece", "in two"])
def test_bad_framing_ends_the_connection_and_nothing_behind_it_runs(
    connect: Connect, api1: Client, topic: str, head: str, together: bool
) -> None:
    raw = head.format(topic=f"{topic}.host").encode("latin-1")
    smuggled = append_request(f"{topic}.smuggled")
    wire = connect()
    try:
        wire.send(*([raw + smuggled] if together else [raw, smuggled]))
    except OSError:
        pass  # it has been refused already
    answer = wire.answer()
    assert answer.status == 400 or (answer.status == 505 and "HTTP/1.1\r\n" not in head), answer
    assert answer.headers["connection"] == "close"
    wire.assert_closed()
    assert api1.state(f"{topic}.smuggled").status == 404
    assert api1.state(f"{topic}.host").status == 404


BAD_CHUNKS = {
    "no size": b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no number": b"xyz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "prefixed": b"0x18\r\n" + BODY + b"\r\n0\r\n\r\n",
    "negative": b"-18\r\n" + BODY + b"\r\n0\r\n\r\n",
    "signed": b"+18\r\n" + BODY + b"\r\n0\r\n\r\n",
    "leading space": b" 18\r\n" + BODY + b"\r\n0\r\n\r\n",
    "underscore": b"1_8\r\n" + BODY + b"\r\n0\r\n\r\n",
    "beyond 64 bits": b"10000000000000018\r\n" + BODY + b"\r\n0\r\n\r\n",
    "bare LF after the size": b"18\n" + BODY + b"\r\n0\r\n\r\n",
    "bare LF in an extension": b"18;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "bare CR in an extension": b"18;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "shorter than said": b"20\r\n" + BODY + b"\r\n0\r\n\r\n" + b"x" * 10,
    "longer than said": b"10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no line end after the data": b"18\r\n" + BODY + b"0\r\n\r\n",
    "LF after the data": b"18\r\n" + BODY + b"\n0\r\n\r\n",
    "endless size": b"0" * 100_000 + b"18\r\n" + BODY + b"\r\n0\r\n\r\n",
    "endless extension": b"18;" + b"a" * 100_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "endless trailer": b"18\r\n" + BODY + b"\r\n0\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
    "endless trailers": b"18\r\n" + BODY + b"\r\n0\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    "bare LF in a trailer": b"18\r\n" + BODY + b"\r\n0\r\nA: b\nC: d\r\n\r\n",
}


@pytest.mark.parametrize("encoded", BAD_CHUNKS.values(), ids=BAD_CHUNKS.keys())
def test_bad_chunks_end_the_connection_and_nothing_behind_them_runs(
    connect: Connect, api1: Client, topic: str, encoded: bytes
) -> None:
    wire = connect()
    try:
        wire.send(
            request("POST", f"/v0/topics/{topic}", headers=CHUNKED) + encoded, append_request(f"{topic}.smuggled")
        )
    except OSError:
        pass  # it has been refused already
    answer = wire.answer()
    assert answer.status in (400, 431)
    wire.assert_closed()
    assert api1.state(topic).status == 404
    assert api1.state(f"{topic}.smuggled").status == 404


def test_what_stands_before_a_bad_request_is_answered_first(wire: Wire, api1: Client, topic: str) -> None:
    wire.send(append_request(topic) + b"nonsense\r\n\r\n" + append_request(topic))
    assert wire.answer()["seqs"] == [1]
    assert wire.answer().status == 400
    wire.assert_closed()
    assert api1.state(topic)["head_seq"] == 1


def test_a_refused_request_keeps_its_body_to_itself(wire: Wire, api1: Client, topic: str) -> None:
    """The body of a request that is refused for its route is not the next request."""
    wire.send(request("POST", "/v0/nowhere", append_request(topic)) + HEALTH)
    assert wire.answer().status == 404
    assert wire.answer()["status"] == "ok"
    assert api1.state(topic).status == 404


def test_a_body_of_a_get_is_not_the_next_request(wire: Wire, api1: Client, topic: str) -> None:
    wire.send(request("GET", "/v0/health", append_request(topic)) + HEALTH)
    assert wire.answer().status == 200
    assert wire.answer().status == 200
    assert api1.state(topic).status == 404


@pytest.mark.parametrize("method", ["FOO", "PROPFIND", "TRACE", "CONNECT", "M-SEARCH"])
def test_unknown_methods(wire: Wire, method: str) -> None:
    answer = wire.ask(request(method, "/v0/topics/abc"))
    assert answer.refusal == (405, "method_not_allowed")
    assert {name.strip() for name in answer.headers["allow"].split(",")} >= {"GET", "PUT", "POST", "DELETE"}


# --- oversized heads ---------------------------------------------------------------------------------


def test_a_head_of_many_headers(wire: Wire) -> None:
    assert wire.ask(request(headers=tuple(f"X-{n}: {n}" for n in range(90)))).status == 200
    assert wire.ask(request(headers=tuple(f"X-{n}: {n}" for n in range(200)))).refusal == (431, "header_too_large")
    wire.assert_closed()


def test_a_large_header(wire: Wire) -> None:
    assert wire.ask(request(headers=(f"X-A: {'a' * 20_000}",))).status == 200
    assert wire.ask(request(headers=(f"X-A: {'a' * 40_000}",))).refusal == (431, "header_too_large")
    wire.assert_closed()


def test_a_long_target(wire: Wire) -> None:
    assert wire.ask(request(path=f"/v0/topics?prefix={'a' * 8_000}")).status == 200
    assert wire.ask(request(path=f"/v0/topics?prefix={'a' * 8_200}")).refusal == (414, "uri_too_long")
    wire.assert_closed()


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nX-A: ",
        b"\r\n",
        b"\r\n\r",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10,
        b"A",
        b"PRI * ",
    ],
    ids=["target", "header", "after an empty line", "after half a line", "many", "method", "preface"],
)
def test_a_head_that_never_ends_is_cut_off(wire: Wire, start: bytes) -> None:
    try:
        wire.send(start, *[b"a" * 50_000] * 20)
    except OSError:
        pass
    answer = wire.answer()
    assert answer.status in (400, 414, 431)
    wire.assert_closed()


def test_a_body_far_beyond_the_limit_is_refused_before_it_is_sent(
    small_server: Server, connect: Connect, small_clients: dict[str, Client], topic: str
) -> None:
    wire = connect(small_server)
    length = ("Content-Type: application/json", "Content-Length: 5000000")
    assert wire.ask(request("POST", f"/v0/topics/{topic}", headers=length)).refusal == (413, "payload_too_large")
    try:
        wire.send(*[b" " * 50_000] * 100)
    except OSError:
        pass  # it does not listen any more
    wire.assert_closed()
    assert small_clients["http1"].append(topic, 1)["seqs"] == [1]


# --- clients that leave ------------------------------------------------------------------------------


def test_a_half_closed_client_still_gets_its_answer(wire: Wire, topic: str) -> None:
    wire.send(append_request(topic) * 3)
    wire.half_close()
    assert [wire.answer()["first_seq"] for _ in range(3)] == [1, 2, 3]
    wire.assert_closed()


def test_a_half_closed_client_still_gets_answers_of_every_kind(wire: Wire, api1: Client, topic: str) -> None:
    """Also of what could wait and need not."""
    api1.put(topic, durability="fsync", type="queue")
    api1.append(topic, "old")
    claim = request("POST", f"/v0/topics/{topic}/claim", b'{"node":"w"}')
    diff = request("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":25000}')
    wire.send(claim + diff + append_request(topic, "2") + request("GET", f"/v0/topics/{topic}"))
    wire.half_close()
    assert wire.answer()["count"] == 1
    assert wire.answer().data == ["old"]
    assert wire.answer()["first_seq"] == 2
    assert wire.answer()["type"] == "queue"
    wire.assert_closed()


def test_nothing_waits_for_a_client_that_sends_no_more(wire: Wire, api1: Client, topic: str) -> None:
    """It may have closed: a poll is answered with what there is."""
    api1.put(topic)
    wire.send(request("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":25000}') * 2, append_request(topic))
    wire.half_close()
    first, second = wire.answer(), wire.answer()
    assert (first.status, second.status) == (200, 200)
    assert wire.answer()["first_seq"] == 1
    assert first["performance"]["server_total_ms"] < 12_500
    wire.assert_closed()


@pytest.mark.parametrize("leave", [Wire.close, Wire.reset], ids=["close", "reset"])
@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_half_a_body_is_nothing(
    server: Server, connect: Connect, api1: Client, topic: str, framing: str, leave: Callable[[Wire], None]
) -> None:
    sockets = server.sockets_of("gateway-0")
    wire = connect()
    wire.send(request("POST", f"/v0/topics/{topic}", headers=("Content-Type: application/json", framing)), BODY)
    leave(wire)
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, what="the connection's end")
    assert api1.state(topic).status == 404


def test_a_client_that_leaves_in_the_middle_of_a_large_body(server: Server, connect: Connect, topic: str) -> None:
    sockets = server.sockets_of("gateway-0")
    wire = connect()
    head = ("Content-Type: application/json", "Content-Length: 60000000")
    wire.send(request("POST", f"/v0/topics/{topic}", headers=head), b"x" * 1_000_000)
    wire.close()
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, what="the connection's end")


@pytest.mark.parametrize("leave", [Wire.close, Wire.reset], ids=["close", "reset"])
def test_a_client_that_leaves_a_long_poll_leaves_nothing_behind(
    server: Server, connect: Connect, api1: Client, topic: str, leave: Callable[[Wire], None]
) -> None:
    sockets = server.sockets_of("gateway-0")
    api1.put(topic)
    wires = [connect() for _ in range(5)]
    for wire in wires:
        wire.send(request("POST", f"/v0/topics/{topic}/diff", b'{"wait_ms":30000}'))
    eventually(lambda: api1.state(topic, touch=False)["last_read_ts"] is not None)
    for wire in wires:
        leave(wire)
    eventually(lambda: server.sockets_of("gateway-0") <= sockets, within_s=15, what="the connections' end")
    assert api1.append(topic, 1)["seqs"] == [1]


def test_an_append_whose_client_has_left_is_whole_or_absent(connect: Connect, api1: Client, topic: str) -> None:
    api1.put(topic)
    for _ in range(20):
        wire = connect()
        wire.send(request("POST", f"/v0/topics/{topic}", b'{"records":[{"data":1},{"data":2}]}'))
        wire.reset()
    eventually(lambda: api1.append(f"{topic}.after", 1).status in (200, 201))
    data = api1.diff(topic).data
    assert data == [1, 2] * (len(data) // 2)
