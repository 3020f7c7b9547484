"""Every limit at its edge: the last value that passes and the first that does not, in both lanes.

The large ones against the defaults, the others also against a server whose limits are small, so that each is known to
follow its variable.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from .client import JSON, Client
from .conftest import SMALL
from .server import Server
from .wire import Wire, chunked, request

pytestmark = pytest.mark.e2e

KIB = 1024
MIB = 1024 * KIB
BODY = 64 * MIB


def _refused(api: Client, topic: str, record: dict[str, object], code: str = "invalid_request") -> None:
    assert api.append_records(topic, [{"data": 0}, record]).refusal == (400, code)
    assert api.state(topic).status == 404


# --- defaults ----------------------------------------------------------------------------------------


def test_10_000_records_pass(api: Client, topic: str) -> None:
    answer = api.append(topic, *range(10_000))
    assert answer["seqs"] == list(range(1, 10_001))
    assert api.state(topic)["count"] == 10_000


def test_10_001_records_do_not(api: Client, topic: str) -> None:
    answer = api.append(topic, *range(10_001))
    assert answer.refusal == (400, "batch_too_large")
    assert answer.detail == {"count": 10_001, "max": 10_000}
    assert api.state(topic).status == 404


def test_a_record_of_one_mib_passes(api: Client, topic: str) -> None:
    data = "x" * (MIB - 2)
    api.append(topic, data)
    assert api.diff(topic).data == [data]


def test_a_record_of_one_mib_with_meta_passes(api: Client, topic: str) -> None:
    meta = {"a": "b"}
    api.append_records(topic, [{"data": "x" * (MIB - 2 - len(json.dumps(meta))), "meta": meta}])
    assert api.diff(topic)["records"][0]["meta"] == meta


@pytest.mark.parametrize("meta", [None, {"a": "b"}])
def test_a_record_beyond_one_mib_does_not(api: Client, topic: str, meta: dict[str, str] | None) -> None:
    room = MIB - 2 - (len(json.dumps(meta)) if meta else 0)
    _refused(api, topic, {"data": "x" * (room + 1), "meta": meta}, "record_too_large")


def test_the_size_is_that_of_the_bytes_sent(api: Client, topic: str) -> None:
    escaped = b'"' + rb"\u00e9" * (MIB // 6) + b'"'
    assert MIB - 10 < len(escaped) - 2 <= MIB
    body = b'{"records":[{"data":%b}]}'
    assert api.send("POST", f"/v0/topics/{topic}", content=body % (escaped[:-7] + b'"')).status == 201
    longer = b'"' + rb"\u00e9" * (MIB // 6 + 1) + b'"'
    answer = api.send("POST", f"/v0/topics/{topic}", content=body % longer)
    assert answer.refusal == (400, "record_too_large")


def _meta_of(size: int) -> bytes:
    return b'{"a":"%b"}' % (b"x" * (size - 8))


def test_meta_of_16_kib_passes(api: Client, topic: str) -> None:
    body = b'{"records":[{"data":1,"meta":%b}]}'
    assert api.send("POST", f"/v0/topics/{topic}", content=body % _meta_of(16 * KIB)).status == 201
    refused = api.send("POST", f"/v0/topics/{topic}", content=body % _meta_of(16 * KIB + 1))
    assert refused.refusal == (400, "invalid_request")
    assert api.state(topic)["head_seq"] == 1


def test_meta_of_64_keys_passes(api: Client, topic: str) -> None:
    keys = {f"k{n}": {"a:b": ":::"} for n in range(64)}
    api.append_records(topic, [{"data": 1, "meta": keys}])
    assert api.diff(topic)["records"][0]["meta"] == keys


def test_meta_of_65_keys_does_not(api: Client, topic: str) -> None:
    _refused(api, topic, {"data": 1, "meta": {f"k{n}": n for n in range(65)}})


@pytest.mark.parametrize(
    ("field", "most"),
    [("tag", 256), ("node", 128)],
)
@pytest.mark.parametrize("letter", ["x", "é", "🎈"])
def test_tags_and_nodes_are_measured_in_bytes(api: Client, topic: str, field: str, most: int, letter: str) -> None:
    longest = letter * (most // len(letter.encode()))
    _refused(api, topic, {"data": 1, field: longest + "x"})
    api.append_records(topic, [{"data": 1, field: longest}])
    assert api.diff(topic, include_tags=True)["records"][0][f"${field}"] == longest


def test_the_node_of_a_batch_has_the_same_limit(api: Client, topic: str) -> None:
    assert api.append(topic, 1, node="n" * 129).refusal == (400, "invalid_request")
    assert api.append(topic, 1, node="n" * 128).status == 201


@pytest.mark.parametrize("letter", ["x", "é", "🎈"])
def test_keys_are_measured_in_characters(api: Client, topic: str, letter: str) -> None:
    assert api.append(topic, 1, idempotency_key=letter * 257).refusal == (400, "invalid_request")
    assert api.state(topic).status == 404
    assert api.append(topic, 1, idempotency_key=letter * 256).status == 201
    assert api.append(topic, 1, idempotency_key=letter * 256)["deduped"] is True


def test_the_key_in_the_header_has_the_same_limit(api: Client, topic: str) -> None:
    for length, status in ((257, 400), (256, 201)):
        answer = api.send(
            "POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]}, headers={"Idempotency-Key": "k" * length}
        )
        assert answer.status == status


def _large_body() -> bytes:
    """A write of 63 records of a MiB in exactly 64 MiB."""
    records = b",".join([b'{"data":"%b"}' % (b"x" * (MIB - 2))] * 63)
    start = b'{"records":[' + records
    end = b"]}"
    return start + b" " * (BODY - len(start) - len(end)) + end


def test_a_body_of_64_mib_passes_and_one_byte_more_does_not(
    server: Server, connect: Callable[..., Wire], topic: str, api1: Client
) -> None:
    body = _large_body()
    assert len(body) == BODY
    wire = connect()
    answer = wire.ask(request("POST", f"/v0/topics/{topic}", headers=_framing(BODY)), body)
    assert (answer.status, answer["count"]) == (201, 63)
    refused = wire.ask(request("POST", f"/v0/topics/{topic}", headers=_framing(BODY + 1)))
    assert refused.refusal == (413, "payload_too_large")
    wire.assert_closed()
    state = api1.state(topic)
    assert (state["head_seq"], state["count"]) == (63, 63)
    last = api1.diff(topic, 62)
    assert last.data == ["x" * (MIB - 2)]
    api1.drop(topic)


def _framing(length: int) -> tuple[str, ...]:
    return ("Content-Type: application/json", f"Content-Length: {length}")


# --- each follows its variable -----------------------------------------------------------------------


def test_small_batches(small: Client, topic: str) -> None:
    most = SMALL["TOPICS_MAX_BATCH_RECORDS"]
    assert small.append(topic, *range(most + 1)).refusal == (400, "batch_too_large")
    assert small.append(topic, *range(most)).status == 201


def test_small_records(small: Client, topic: str) -> None:
    most = SMALL["TOPICS_MAX_RECORD_BYTES"]
    _refused(small, topic, {"data": "x" * (most - 1)}, "record_too_large")
    assert small.append(topic, "x" * (most - 2)).status == 201


def test_small_meta(small: Client, topic: str) -> None:
    most = SMALL["TOPICS_MAX_META_BYTES"]
    body = b'{"records":[{"data":1,"meta":%b}]}'
    assert small.send("POST", f"/v0/topics/{topic}", content=body % _meta_of(most + 1)).status == 400
    assert small.send("POST", f"/v0/topics/{topic}", content=body % _meta_of(most)).status == 201


@pytest.mark.parametrize("field", ["tag", "node"])
def test_small_tags_and_nodes(small: Client, topic: str, field: str) -> None:
    most = SMALL[f"TOPICS_MAX_{field.upper()}_BYTES"]
    _refused(small, topic, {"data": 1, field: "x" * (most + 1)})
    assert small.append_records(topic, [{"data": 1, field: "x" * most}]).status == 201


def test_a_small_limit_also_clamps_the_default(small: Client, topic: str) -> None:
    small.append(topic, 1, 2, 3, 4)
    assert small.diff(topic).seqs == [1, 2, 3]
    assert small.diff(topic, limit=500).seqs == [1, 2, 3]
    assert small.diff(topic, limit=0).seqs == [1, 2, 3]
    assert small.diff(topic, limit=2).seqs == [1, 2]


def _padded(size: int) -> bytes:
    body = b'{"records":[{"data":1}]}'
    return body[:-1] + b" " * (size - len(body)) + body[-1:]


def test_a_small_body_limit(small: Client, topic: str) -> None:
    most = SMALL["TOPICS_MAX_BODY_BYTES"]
    assert small.send("POST", f"/v0/topics/{topic}", content=_padded(most + 1)).refusal == (413, "payload_too_large")
    assert small.state(topic).status == 404
    assert small.send("POST", f"/v0/topics/{topic}", content=_padded(most)).status == 201


def test_the_body_limit_counts_chunks_too(small_server: Server, connect: Callable[..., Wire], topic: str) -> None:
    most = SMALL["TOPICS_MAX_BODY_BYTES"]
    head = request(
        "POST", f"/v0/topics/{topic}", headers=("Content-Type: application/json", "Transfer-Encoding: chunked")
    )
    wire = connect(small_server)
    assert wire.ask(head, chunked(_padded(most), 7, most // 2)).status == 201
    assert wire.ask(head, chunked(_padded(most + 1), 7, most // 2)).refusal == (413, "payload_too_large")
    wire.assert_closed()


def test_the_content_type_does_not_excuse_a_large_body(small: Client, topic: str) -> None:
    most = SMALL["TOPICS_MAX_BODY_BYTES"]
    for headers in (JSON, {"Content-Type": "text/plain"}):
        answer = small.send("POST", f"/v0/topics/{topic}", content=b"x" * (most + 1), headers=headers)
        assert answer.status in (413, 415)


def test_a_batch_larger_than_the_cache_is_read_like_any_other(small: Client, topic: str) -> None:
    data = ["x" * 900, "y" * 900, "z" * 900]
    small.append(topic, *data)
    assert small.diff(topic).data == data
    assert small.diff(topic, 1, limit=1).data == data[1:2]
    assert small.diff(topic, include_tags=True, node="n").data == data
