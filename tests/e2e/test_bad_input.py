"""What is not JSON, not ours, or out of range: the exact refusal, nothing appended, the connection as good as new; in
both lanes. Wrong types of single fields stand with their endpoints."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from .client import JSON, Client

pytestmark = pytest.mark.e2e

GOOD = b'{"records":[{"data":1}]}'

MALFORMED = {
    "nothing but a space": b" ",
    "not JSON": b"hello",
    "cut off": b'{"records":[{"data":1}]',
    "cut off in a string": b'{"records":[{"data":"1',
    "two values": b'{"records":[{"data":1}]}{"records":[{"data":2}]}',
    "something after it": b'{"records":[{"data":1}]}x',
    "trailing comma": b'{"records":[{"data":1},]}',
    "trailing comma in data": b'{"records":[{"data":[1,]}]}',
    "single quotes": b"{'records':[{'data':1}]}",
    "comments": b'{"records":[{"data":1}]/* */}',
    "unquoted key": b'{records:[{"data":1}]}',
    "NaN": b'{"records":[{"data":NaN}]}',
    "Infinity": b'{"records":[{"data":Infinity}]}',
    "leading zero": b'{"records":[{"data":01}]}',
    "leading plus": b'{"records":[{"data":+1}]}',
    "bare point": b'{"records":[{"data":1.}]}',
    "hexadecimal": b'{"records":[{"data":0x1}]}',
    "bad literal": b'{"records":[{"data":nul}]}',
    "empty value": b'{"records":[{"data":}]}',
    "control character in a string": b'{"records":[{"data":"a\nb"}]}',
    "nul in a string": b'{"records":[{"data":"a\0b"}]}',
    "record separator in a string": b'{"records":[{"data":"a\x1eb"}]}',
    "record separator outside": b'{"records":[{"data":1\x1e}]}',
    "bad escape": rb'{"records":[{"data":"\x41"}]}',
    "cut escape": rb'{"records":[{"data":"\u00"}]}',
    "lone surrogate": rb'{"records":[{"data":"\ud800"}]}',
    "lone surrogate in a tag": rb'{"records":[{"data":1,"tag":"\ud800 and more"}]}',
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "UTF-16": GOOD.decode().encode("utf-16"),
    "invalid UTF-8 in data": b'{"records":[{"data":"\xff\xfe"}]}',
    "invalid UTF-8 in meta": b'{"records":[{"data":1,"meta":{"\xc3(":1}}]}',
    "invalid UTF-8 in a tag": b'{"records":[{"data":1,"tag":"\xe2\x28\xa1"}]}',
    "invalid UTF-8 in an ignored field": b'{"records":[{"data":1}],"x":"\xff"}',
    "overlong UTF-8": b'{"records":[{"data":"\xc0\xaf"}]}',
    "surrogate in UTF-8": b'{"records":[{"data":"\xed\xa0\x80"}]}',
    "deep arrays": b'{"records":[{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    "deep objects": b'{"records":[{"data":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}]}",
    "deep and never closed": b"[" * 200_000,
    "deep in an ignored field": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_body_appends_nothing(api: Client, topic: str, body: bytes) -> None:
    assert api.send("POST", f"/v0/topics/{topic}", content=body).refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_a_lone_surrogate_is_called_that(api: Client, topic: str) -> None:
    """A string that was cut inside of a character: what JSON.stringify makes of it."""
    answer = api.append(topic, "\ud83d")
    assert answer.refusal == (400, "invalid_request")
    assert "a lone surrogate" in answer["error"]["message"]
    assert api.append(topic, "\ud83d\ude00").status == 201
    assert api.diff(topic).data == ["\U0001f600"]


@pytest.mark.parametrize("endpoint", ["", "/diff", "/delete"])
@pytest.mark.parametrize("body", [b"{", b"null", b"[]", b'"x"', b"\xff", b"{}x"])
def test_every_endpoint_refuses_what_is_no_object(api: Client, topic: str, endpoint: str, body: bytes) -> None:
    api.append(topic, 1)
    assert api.send("POST", f"/v0/topics/{topic}{endpoint}", content=body).refusal == (400, "invalid_request")
    state = api.state(topic)
    assert (state["head_seq"], state["count"]) == (1, 1)


@pytest.mark.parametrize("body", [b"{", b"null", b"[]", b'"x"', b"\xff", b"{}x", b'{"ttl_ms":}'])
def test_put_refuses_what_is_no_object(api: Client, topic: str, body: bytes) -> None:
    assert api.send("PUT", f"/v0/topics/{topic}", content=body).refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_an_append_needs_a_body(api: Client, topic: str) -> None:
    assert api.send("POST", f"/v0/topics/{topic}").refusal == (400, "invalid_request")
    assert api.send("POST", f"/v0/topics/{topic}", headers=JSON).refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_nesting_of_a_reasonable_depth_passes(api: Client, topic: str) -> None:
    data = b"[" * 100 + b"]" * 100
    assert api.send("POST", f"/v0/topics/{topic}", content=b'{"records":[{"data":%b}]}' % data).status == 201
    assert b'"data":%b' % data in api.diff(topic).raw


# --- content type ------------------------------------------------------------------------------------

RIGHT_TYPES = [
    "application/json",
    "application/json; charset=utf-8",
    "application/json;charset=UTF-8",
    'application/json; charset="utf-8"',
    "Application/JSON",
]
WRONG_TYPES = [
    "",
    "text/plain",
    "text/json",
    "application/x-www-form-urlencoded",
    "application/json-patch+json",
    "application/jsonx",
    "application/json; charset=latin-1",
    "multipart/form-data; boundary=x",
]


@pytest.mark.parametrize("content_type", RIGHT_TYPES)
def test_right_content_types(api: Client, topic: str, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    assert api.send("POST", f"/v0/topics/{topic}", content=GOOD, headers=headers).status == 201


@pytest.mark.parametrize("content_type", WRONG_TYPES)
@pytest.mark.parametrize(
    ("method", "endpoint", "body"),
    [("PUT", "", b"{}"), ("POST", "", GOOD), ("POST", "/diff", b"{}"), ("POST", "/delete", b'{"before_seq":9}')],
    ids=["put", "append", "diff", "delete"],
)
def test_wrong_content_types(
    api: Client, topic: str, content_type: str, method: str, endpoint: str, body: bytes
) -> None:
    headers = {"Content-Type": content_type}
    answer = api.send(method, f"/v0/topics/{topic}{endpoint}", content=body, headers=headers)
    assert answer.refusal == (415, "unsupported_media_type")
    assert api.state(topic).status == 404


# --- content encoding --------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip"])
def test_a_gzip_body(api: Client, topic: str, coding: str) -> None:
    body = gzip.compress(b'{"records":[{"data":%b}]}' % (b'"' + b"x" * 10_000 + b'"'))
    headers = {"Content-Encoding": coding}
    assert api.send("POST", f"/v0/topics/{topic}", content=body, headers=headers).status == 201
    assert api.diff(topic).data == ["x" * 10_000]


def test_an_identity_body(api: Client, topic: str) -> None:
    answer = api.send("POST", f"/v0/topics/{topic}", content=GOOD, headers={"Content-Encoding": "identity"})
    assert answer.status == 201


@pytest.mark.parametrize("coding", ["br", "deflate", "zstd", "gzip, gzip", "gzip, br"])
def test_other_codings_are_refused(api: Client, topic: str, coding: str) -> None:
    headers = {"Content-Encoding": coding}
    answer = api.send("POST", f"/v0/topics/{topic}", content=gzip.compress(GOOD), headers=headers)
    assert answer.refusal == (415, "unsupported_media_type")
    assert api.state(topic).status == 404


@pytest.mark.parametrize(
    "body",
    [
        GOOD,
        gzip.compress(GOOD)[:-1],
        gzip.compress(GOOD)[:-9],
        gzip.compress(GOOD) + b"x",
        gzip.compress(GOOD) + gzip.compress(GOOD),
        gzip.compress(GOOD)[:-6] + b"\0\0" + gzip.compress(GOOD)[-4:],
        b"\x1f\x8b",
    ],
    ids=["not gzip", "cut", "cut in data", "something after it", "two members", "bad checksum", "head only"],
)
def test_bad_gzip_is_refused(api: Client, topic: str, body: bytes) -> None:
    answer = api.send("POST", f"/v0/topics/{topic}", content=body, headers={"Content-Encoding": "gzip"})
    assert answer.refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_a_gzip_bomb_is_the_large_body_it_is(small: Client, topic: str) -> None:
    bomb = gzip.compress(b" " * 10_000_000 + GOOD)
    assert len(bomb) < 20_000
    answer = small.send("POST", f"/v0/topics/{topic}", content=bomb, headers={"Content-Encoding": "gzip"})
    assert answer.refusal == (413, "payload_too_large")
    assert small.state(topic).status == 404


def test_gzip_up_to_the_limit_passes(small: Client, topic: str) -> None:
    body = GOOD[:-1] + b" " * (20_000 - len(GOOD)) + GOOD[-1:]
    headers = {"Content-Encoding": "gzip"}
    assert small.send("POST", f"/v0/topics/{topic}", content=gzip.compress(body), headers=headers).status == 201
    body += b" "
    assert small.send("POST", f"/v0/topics/{topic}", content=gzip.compress(body), headers=headers).status == 413


@pytest.mark.parametrize(
    ("accept", "zipped"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5, br", True),
        ("GZIP", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("br", False),
        ("identity", False),
    ],
)
def test_large_answers_are_zipped_on_request(api: Client, topic: str, accept: str, zipped: bool) -> None:
    api.append(topic, "x" * 5_000)
    answer = api.send("POST", f"/v0/topics/{topic}/diff", {}, headers={"Accept-Encoding": accept})
    assert (answer.headers.get("content-encoding") == "gzip") == zipped
    assert (int(answer.headers["content-length"]) < 1_000) == zipped
    assert answer.data == ["x" * 5_000]


def test_small_answers_are_not_zipped(api: Client, topic: str) -> None:
    answer = api.send("GET", "/v0/health", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in answer.headers


# --- odd requests ------------------------------------------------------------------------------------


def test_a_long_target_is_refused(api: Client) -> None:
    assert api.get("/v0/topics", prefix="x" * 9_000).refusal == (414, "uri_too_long")
    assert api.get("/v0/topics", prefix="x" * 7_000).status == 200


@pytest.mark.parametrize("query", ["prefix=%FF", "prefix=%C3%28", "&".join(f"a{n}=1" for n in range(100))])
def test_a_query_that_can_not_be_read_is_refused(api: Client, query: str) -> None:
    assert api.get(f"/v0/topics?{query}").refusal == (400, "invalid_request")


def test_a_body_where_none_belongs_is_passed_over(api: Client, topic: str) -> None:
    api.append(topic, 1)
    for method, path in (("GET", f"/v0/topics/{topic}"), ("GET", "/v0/health"), ("DELETE", f"/v0/topics/{topic}")):
        answer = api.send(method, path, content=b"{not json", headers={"Content-Type": "text/plain"})
        assert answer.status == 200, path


def test_a_key_header_that_is_no_text_is_refused(api: Client, topic: str) -> None:
    headers: dict[str, Any] = {"Idempotency-Key": b"\xff\xfe", "Content-Type": "application/json"}
    answer = api.send("POST", f"/v0/topics/{topic}", content=GOOD, headers=headers)
    assert answer.refusal == (400, "invalid_request")
    assert api.state(topic).status == 404


def test_after_every_kind_of_refusal_the_connection_goes_on(api: Client, topic: str) -> None:
    with api.twin() as own:
        for method, path, content in (
            ("POST", f"/v0/topics/{topic}", b"{"),
            ("POST", f"/v0/topics/{topic}/diff", b"{}"),
            ("POST", "/v0/nowhere", GOOD),
            ("PATCH", f"/v0/topics/{topic}", GOOD),
            ("PUT", "/v0/topics/a%20b", b"{}"),
            ("PUT", f"/v0/topics/{topic}", b'{"ttl_ms":-1}'),
        ):
            assert 400 <= own.send(method, path, content=content).status < 500
            assert own.get("/v0/health").status == 200
        assert own.append(topic, 1)["seqs"] == [1]
