"""Request heads: what is understood, what is refused, and what ends the connection."""

from __future__ import annotations

import gzip as gzip_module
import zlib

import pytest
from parts import metrics, queues, routers, watches

from topics import limits
from topics.errors import ApiError
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.compression import gunzip, gzip
from topics.gateway.http1.head import Head, Heads, accepts_gzip, check_content_type, is_gzipped
from topics.settings import Settings
from topics.shm.counters import Board

MAX_BODY = 10_000


@pytest.fixture(scope="module")
def heads() -> Heads:
    handlers = Handlers(Settings(), shards=2, board=Board.create(["shard-0"]))
    routes = Routes(handlers, watches(shards=2), routers(shards=2), queues(shards=2), metrics(shards=2))
    return Heads(routes, max_body_bytes=MAX_BODY)


def raw(line: bytes, *headers: bytes, host: bool = True) -> bytes:
    lines = [line, *([b"Host: localhost"] if host else []), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


GET = b"GET /v0/topics/a HTTP/1.1"
POST = b"POST /v0/topics/a HTTP/1.1"
JSON = b"Content-Type: application/json"


def post(*headers: bytes) -> bytes:
    return raw(POST, JSON, *headers)


# --- understood --------------------------------------------------------------------------------------


def test_a_plain_get(heads: Heads) -> None:
    head = heads.get(raw(GET))
    assert head.error is None
    assert head.route is not None
    assert (head.route.name, head.body_length, head.keep_alive) == ("a", 0, True)
    assert (head.expect, head.gzip_body, head.gzip_answer, head.idempotency_key, head.bodiless) == (
        False,
        False,
        False,
        None,
        False,
    )
    assert not head.fatal
    assert not head.chunked


def test_a_body_with_a_length(heads: Heads) -> None:
    assert heads.get(post(b"Content-Length: 17")).body_length == 17
    assert heads.get(post(b"Content-Length: 0")).body_length == 0
    assert heads.get(post(b"CONTENT-LENGTH:5")).body_length == 5
    assert heads.get(post(b"Content-Length: %d" % MAX_BODY)).body_length == MAX_BODY


def test_a_chunked_body(heads: Heads) -> None:
    for value in (b"chunked", b"Chunked", b"CHUNKED "):
        head = heads.get(post(b"Transfer-Encoding: " + value))
        assert head.chunked
        assert head.error is None


@pytest.mark.parametrize(
    ("line", "headers", "keep"),
    [
        (GET, [], True),
        (GET, [b"Connection: keep-alive"], True),
        (GET, [b"Connection: close"], False),
        (GET, [b"Connection: Close"], False),
        (b"GET /v0/topics/a HTTP/1.0", [], False),
        (b"GET /v0/topics/a HTTP/1.0", [b"Connection: keep-alive"], False),
    ],
)
def test_keep_alive(heads: Heads, line: bytes, headers: list[bytes], keep: bool) -> None:
    head = heads.get(raw(line, *headers))
    assert head.error is None
    assert head.keep_alive is keep


def test_expectations(heads: Heads) -> None:
    assert heads.get(post(b"Content-Length: 5", b"Expect: 100-continue")).expect
    assert heads.get(post(b"Content-Length: 5", b"Expect: 100-Continue")).expect
    head = heads.get(post(b"Content-Length: 5", b"Expect: something"))
    assert head.error is not None
    assert head.error.status == 417


def test_the_idempotency_key(heads: Heads) -> None:
    assert heads.get(post(b"Idempotency-Key: abc")).idempotency_key == "abc"
    assert heads.get(post("Idempotency-Key: schlüssel".encode())).idempotency_key == "schlüssel"
    head = heads.get(post(b"Idempotency-Key: \xff"))
    assert head.error is not None
    assert head.error.code == "invalid_request"
    assert not head.fatal


def test_http_1_0_needs_no_host(heads: Heads) -> None:
    assert heads.get(raw(b"GET /v0/topics/a HTTP/1.0", host=False)).error is None


def test_a_target_with_scheme_and_host(heads: Heads) -> None:
    head = heads.get(raw(b"GET http://127.0.0.1:1/v0/topics/a?touch=false HTTP/1.1"))
    assert head.route is not None
    assert (head.route.name, head.route.query) == ("a", {"touch": "false"})


def test_head_is_a_get_without_the_body(heads: Heads) -> None:
    head = heads.get(raw(b"HEAD /v0/topics/a HTTP/1.1"))
    assert head.route is not None
    assert head.bodiless


def test_an_upgrade_we_do_not_speak_is_a_plain_request(heads: Heads) -> None:
    head = heads.get(raw(GET, b"Connection: Upgrade", b"Upgrade: foo"))
    assert head.error is None
    assert head.route is not None


# --- answered after the body; the connection goes on ----------------------------------------------------


@pytest.mark.parametrize(
    ("request_head", "status", "code"),
    [
        (raw(b"GET /nothing HTTP/1.1"), 404, "not_found"),
        (raw(b"PATCH /v0/topics/a HTTP/1.1", b"Content-Length: 3"), 405, "method_not_allowed"),
        (raw(b"GET /v0/topics/.a HTTP/1.1"), 400, "invalid_request"),
        (raw(b"GET /v0/topics/%ff HTTP/1.1"), 400, "invalid_request"),
        (raw(b"GET ftp://x/v0/topics/a HTTP/1.1"), 400, "invalid_request"),
        (raw(POST, b"Content-Length: 3"), 415, "unsupported_media_type"),
        (raw(POST, b"Content-Length: 3", b"Content-Type: text/plain"), 415, "unsupported_media_type"),
        (
            raw(POST, b"Content-Length: 3", b"Content-Type: application/json; charset=latin-1"),
            415,
            "unsupported_media_type",
        ),
        (raw(POST, b"Transfer-Encoding: chunked"), 415, "unsupported_media_type"),
        (post(b"Content-Length: 3", b"Content-Encoding: br"), 415, "unsupported_media_type"),
        (post(b"Content-Length: 3", b"Content-Encoding: gzip, gzip"), 415, "unsupported_media_type"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_refused_but_in_step(heads: Heads, request_head: bytes, status: int, code: str) -> None:
    head = heads.get(request_head)
    assert head.error is not None
    assert (head.error.status, head.error.code) == (status, code)
    assert not head.fatal
    assert head.keep_alive


def test_a_post_without_a_body_needs_no_content_type(heads: Heads) -> None:
    assert heads.get(raw(b"POST /v0/topics/a/diff HTTP/1.1")).error is None
    assert heads.get(raw(b"POST /v0/topics/a/diff HTTP/1.1", b"Content-Length: 0")).error is None


# --- refused, and the connection ends -------------------------------------------------------------------

FATAL = {
    "length and coding": post(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    "coding and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 3"),
    "two lengths": post(b"Content-Length: 3", b"Content-Length: 4"),
    "two equal lengths": post(b"Content-Length: 3", b"Content-Length: 3"),
    "a list of lengths": post(b"Content-Length: 3, 3"),
    "negative length": post(b"Content-Length: -3"),
    "signed length": post(b"Content-Length: +3"),
    "hex length": post(b"Content-Length: 0x3"),
    "empty length": post(b"Content-Length: "),
    "length with text": post(b"Content-Length: 3x"),
    "arabic length": post("Content-Length: ٣".encode()),
    "endless length": post(b"Content-Length: " + b"9" * 30),
    "unknown coding": post(b"Transfer-Encoding: gzip"),
    "two codings": post(b"Transfer-Encoding: gzip, chunked"),
    "chunked twice": post(b"Transfer-Encoding: chunked, chunked"),
    "chunked in two lines": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "chunked then identity": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    "identity": post(b"Transfer-Encoding: identity"),
    "chunked in 1.0": raw(b"POST /v0/topics/a HTTP/1.0", JSON, b"Transfer-Encoding: chunked"),
    "bare LF": raw(GET).replace(b"\r\n", b"\n", 1),
    "only LF": raw(GET).replace(b"\r\n", b"\n"),
    "bare CR": raw(GET, b"X: a\rb"),
    "CR before CR LF": raw(GET, b"X: a\r"),
    "LF in a value": raw(GET, b"X: a\nContent-Length: 5"),
    "NUL": raw(GET, b"X: a\0b"),
    "folded": raw(GET, b"X: a", b" b"),
    "folded with a tab": raw(GET, b"X: a", b"\tb"),
    "space before the colon": raw(GET, b"Content-Length : 3"),
    "no colon": raw(GET, b"nonsense"),
    "empty name": raw(GET, b": x"),
    "name with a space": raw(GET, b"X Y: z"),
    "no host": raw(GET, host=False),
    "two hosts": raw(GET, b"Host: y"),
    "no version": raw(b"GET /v0/topics/a"),
    "version 0.9": raw(b"GET /v0/topics/a HTTP/0.9"),
    "version 2": raw(b"GET /v0/topics/a HTTP/2.0"),
    "version 1.2": raw(b"GET /v0/topics/a HTTP/1.2"),
    "version 11": raw(b"GET /v0/topics/a HTTP/1.11"),
    "lower-case version": raw(b"GET /v0/topics/a http/1.1"),
    "no target": raw(b"GET HTTP/1.1"),
    "two spaces in the target": raw(b"GET /v0 /topics HTTP/1.1"),
    "no method": raw(b"/v0/topics/a HTTP/1.1"),
    "lower-case method": raw(b"get /v0/topics/a HTTP/1.1"),
    "unknown method": raw(b"FROBNICATE /v0/topics/a HTTP/1.1"),
    "rubbish": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "empty": b"\r\n\r\n",
    "expectation": post(b"Expect: 200-ok"),
    "too large a body": post(b"Content-Length: %d" % (MAX_BODY + 1)),
    "too many headers": raw(GET, *[b"X-%d: y" % number for number in range(limits.MAX_HEADERS + 1)]),
    "too long a head": raw(GET, b"X: " + b"y" * limits.MAX_HEAD_BYTES),
    "too long a target": raw(b"GET /" + b"a" * limits.MAX_URI_BYTES + b" HTTP/1.1"),
}
CODES = {
    "too large a body": 413,
    "too many headers": 431,
    "too long a head": 431,
    "too long a target": 414,
    "expectation": 417,
    "unknown method": 405,
    "version 0.9": 505,
    "version 2": 505,
    "no version": 505,
}


@pytest.mark.parametrize("name", FATAL)
def test_refused_for_good(heads: Heads, name: str) -> None:
    head = heads.get(FATAL[name])
    assert head.error is not None, "accepted"
    assert head.fatal, f"{head.error.code}: {head.error.message}"
    assert head.route is None
    assert not head.keep_alive
    assert head.error.status == CODES.get(name, 400)


def test_a_refusal_is_never_remembered(heads: Heads) -> None:
    before = len(heads._known)
    for request_head in FATAL.values():
        heads.get(request_head)
    assert len(heads._known) == before


def test_a_head_seen_before_is_the_same_head(heads: Heads) -> None:
    assert heads.get(raw(GET, b"X: same")) is heads.get(raw(GET, b"X: same"))


def test_the_memory_of_heads_is_bounded() -> None:
    handlers = Handlers(Settings(), shards=2, board=Board.create(["shard-0"]))
    routes = Routes(handlers, watches(shards=2), routers(shards=2), queues(shards=2), metrics(shards=2))
    heads = Heads(routes, max_body_bytes=MAX_BODY)
    for number in range(5_000):
        heads.get(raw(GET, b"X: %d" % number))
    assert len(heads._known) <= 4_096
    large = raw(GET, b"X: " + b"y" * 4_000)
    assert heads.get(large) is not heads.get(large)


# --- the way of plain appends ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_head", "plain"),
    [
        (post(b"Content-Length: 9"), True),
        (raw(b"POST /v0/topics/a?return_seqs=false HTTP/1.1", JSON, b"Content-Length: 9"), True),
        (raw(b"POST /v0/topics/a?return_seqs=true HTTP/1.1", JSON, b"Content-Length: 9"), False),
        (raw(b"POST /v0/topics/a?return_seqs=perhaps HTTP/1.1", JSON, b"Content-Length: 9"), False),
        (raw(b"POST /v0/topics/a/diff HTTP/1.1", JSON, b"Content-Length: 9"), False),
        (raw(b"PUT /v0/topics/a HTTP/1.1", JSON, b"Content-Length: 9"), False),
        (post(b"Content-Length: 9", b"Idempotency-Key: k"), False),
        (post(b"Content-Length: 9", b"Content-Encoding: gzip"), False),
        (post(b"Content-Length: 9", b"Connection: close"), False),
        (raw(POST, b"Content-Length: 9"), False),
    ],
    ids=lambda value: repr(value)[:70],
)
def test_which_appends_may_be_plain(heads: Heads, request_head: bytes, plain: bool) -> None:
    head: Head = heads.get(request_head)
    assert (head.plain is not None) == plain
    if head.plain is not None:
        assert (head.plain.topic, head.plain.encoded) == ("a", b"a")
        assert head.plain.return_seqs == (b"return_seqs" not in request_head)


# --- encodings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        (b"", False),
        (b"gzip", True),
        (b"GZIP", True),
        (b"x-gzip", True),
        (b"deflate, gzip", True),
        (b"gzip;q=1.0", True),
        (b"gzip; q=0.5", True),
        (b"gzip;q=0", False),
        (b"gzip;q=0.0", False),
        (b"gzip ; q=0.000", False),
        (b"identity", False),
        (b"br", False),
        (b"gzipped", False),
    ],
)
def test_accept_encoding(value: bytes, accepted: bool) -> None:
    assert accepts_gzip(value) is accepted


@pytest.mark.parametrize(("value", "gzipped"), [(b"", False), (b"identity", False), (b"gzip", True), (b" GZip ", True)])
def test_content_encoding(value: bytes, gzipped: bool) -> None:
    assert is_gzipped(value) is gzipped


@pytest.mark.parametrize("value", [b"br", b"deflate", b"gzip, br", b"zstd"])
def test_content_encodings_we_do_not_know(value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        is_gzipped(value)
    assert caught.value.status == 415


@pytest.mark.parametrize(
    "value",
    [
        b"application/json",
        b"application/json; charset=utf-8",
        b"application/json;charset=UTF-8",
        b"Application/JSON",
        b' application/json ; charset="utf-8"',
        b"application/json;",
    ],
)
def test_content_types(value: bytes) -> None:
    check_content_type(value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"text/json",
        b"application/jsonp",
        b"application/json; charset=utf-16",
        b"application/x-www-form-urlencoded",
    ],
)
def test_content_types_we_do_not_take(value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        check_content_type(value)
    assert caught.value.status == 415


def test_gzip_there_and_back() -> None:
    body = b'{"records":[]}' * 100
    assert gunzip(gzip(body), most=len(body)) == body
    assert gunzip(bytearray(gzip_module.compress(body)), most=10_000) == body
    assert gunzip(gzip(b""), most=0) == b""


def test_a_bomb_is_the_large_body_that_it_is() -> None:
    bomb = gzip(bytes(10_000_000))
    with pytest.raises(ApiError) as caught:
        gunzip(bomb, most=1_000)
    assert caught.value.code == "payload_too_large"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"plain",
        gzip(b"x" * 100)[:-1],
        gzip(b"x" * 100)[:-9],
        gzip(b"x") + b"more",
        gzip(b"x") + gzip(b"y"),
        zlib.compress(b"x"),
        gzip(b"x" * 50)[:20] + b"\xff" * 20,
    ],
    ids=repr,
)
def test_bad_gzip(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        gunzip(data, most=1_000)
    assert caught.value.code == "invalid_request"


# --- hosts and pages ---------------------------------------------------------------------------------


def code_of(head: Head) -> str | None:
    return None if head.error is None else head.error.code


def test_a_host_is_judged_once_per_head(heads: Heads) -> None:
    """What is refused is kept like any other head: the next one costs a look into a dictionary."""
    foreign = raw(POST, b"Host: evil.example:4000", JSON, b"Content-Length: 2", host=False)
    head = heads.get(foreign)
    assert (code_of(head), head.fatal, head.reads_body, head.keep_alive) == ("misdirected_request", False, False, True)
    assert heads.known(foreign) is heads.get(foreign) is head
    ours = raw(POST, JSON, b"Content-Length: 2")
    assert code_of(heads.get(ours)) is None
    assert heads.known(ours) is heads.get(ours)


@pytest.mark.parametrize(
    ("line", "headers", "code"),
    [
        (b"GET http://localhost:1/v0/topics HTTP/1.1", [b"Host: localhost"], None),
        (b"GET http://evil.example/v0/topics HTTP/1.1", [b"Host: localhost"], "misdirected_request"),
        (b"GET HTTPS://evil.example/v0/topics HTTP/1.1", [b"Host: localhost"], "misdirected_request"),
        (b"GET http://localhost@evil.example/v0/topics HTTP/1.1", [b"Host: localhost"], "misdirected_request"),
        (b"GET http:///v0/topics HTTP/1.1", [b"Host: localhost"], "misdirected_request"),
        (b"GET http://localhost/v0/topics HTTP/1.1", [b"Host: evil.example"], "misdirected_request"),
        (b"GET http://evil.example/v0/health HTTP/1.1", [b"Host: evil.example"], None),
        (b"GET http://evil.example/v0/nothing HTTP/1.1", [b"Host: localhost"], "misdirected_request"),
        (b"GET /v0/nothing HTTP/1.1", [b"Host: evil.example"], "misdirected_request"),
        (b"PATCH /v0/topics HTTP/1.1", [b"Host: evil.example"], "misdirected_request"),
        (b"GET /v0/nothing HTTP/1.1", [b"Host: localhost"], "not_found"),
        (b"GET /v0/topics HTTP/1.1", [b"Host:"], "misdirected_request"),
        (b"GET /v0/topics HTTP/1.1", [], "invalid_request"),
        (b"GET /v0/topics HTTP/1.0", [], None),
        (b"GET /v0/topics HTTP/1.0", [b"Host: evil.example"], "misdirected_request"),
        (b"GET /v0/topics HTTP/1.1", [b"Host: localhost", b"Sec-Fetch-Site: cross-site"], "forbidden"),
        (b"GET /v0/topics HTTP/1.1", [b"Host: localhost", b"Origin: http://localhost"], None),
        (b"GET /v0/topics HTTP/1.1", [b"Host: localhost", *[b"Origin: http://localhost"] * 2], "forbidden"),
        (b"GET /v0/topics HTTP/1.1", [b"Host: localhost", *[b"Sec-Fetch-Site: none"] * 2], "forbidden"),
    ],
)
def test_hosts_and_pages(heads: Heads, line: bytes, headers: list[bytes], code: str | None) -> None:
    assert code_of(heads.get(raw(line, *headers, host=False))) == code
