"""Large bodies read in slices: what they give is what the decoder of small bodies gives, or its refusal."""

from __future__ import annotations

import gc
import json
import random
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.errors import ApiError
from topics.gateway.api.schemas import AppendIn, append_decoder, decode_json
from topics.gateway.compression import Inflater
from topics.gateway.large import decoder
from topics.gateway.large.decoder import DIRECT_BYTES, LargeBody, opened
from topics.settings import Settings

SETTINGS = Settings(max_batch_records=50, max_record_bytes=4_000)


def gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(level=6, wbits=31)
    return packer.compress(data) + packer.flush()


def read(data: bytes, settings: Settings = SETTINGS, *, gzipped: bool = False) -> AppendIn:
    inflater = Inflater(gzip(data), most=64 << 20) if gzipped else None
    body = LargeBody(b"" if gzipped else data, direct, settings, inflater=inflater)
    while not body.step():
        pass
    assert body.size == len(data)
    return body.given


def direct(data: bytes) -> AppendIn:
    return decode_json(append_decoder, data)


def outcome(decode: Callable[[bytes], AppendIn], data: bytes) -> Any:
    """Of which two can be compared: the values, or that there are none."""
    try:
        found = decode(data)
    except ApiError as error:
        return error.code
    records = [(bytes(r.data), r.tag, r.node, None if r.meta is None else bytes(r.meta)) for r in found.records]
    return records, found.node, found.idempotency_key, found.create, found.config, found.disable_backpressure


@pytest.fixture(params=[1, 30, 200, 1 << 20])
def slice_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Slices of a few bytes put every border everywhere."""
    monkeypatch.setattr(decoder, "_SLICE_BYTES", request.param)
    monkeypatch.setattr(decoder, "_INFLATE_BYTES", request.param)
    return int(request.param)


BODIES = [
    b'{"records":[{"data":1}]}',
    b'{"records":[]}',
    b' {\n"records" :\t[ {"data":1} , {"data":"a,}{\\"]["} ,{"data":[{"data":1},{"data":2}]}] , "node" : "n" } \n',
    b'{"records":[{"data":1},{"data":2},{"data":{"data":3}},{"data":[{"data":1},{"data":2}]},{"data":4}]}',
    b'{"node":"a","records":[{"data":1}],"node":"b"}',
    b'{"records":[{"data":1}],"records":[{"data":2},{"data":3}]}',
    b'{"records":[{"data":1}],"records":7}',
    b'{"records":7,"records":[{"data":1}]}',
    b'{"r\\u0065cords":[{"data":1}]}',
    b'{"records":[{"data":12345678901234567890.5e7},{"data":-0},{"data":true},{"data":null}]}',
    b'{"records":[{"data":1,"tag":"t","node":"n","meta":{"a":"b"},"junk":[[[]]]}],"config":{"ttl_ms":5},"create":true}',
    b'{"junk":{"a":[1,2,{"records":[]}]},"records":[{"data":1}]}',
    '{"records":[{"data":"é"},{"data":"日本"},{"data":"😀"}]}'.encode(),
    b'{"records":[{"data":"\xff"}]}',
    b'{"records":[{"data":"a"},{"data":"\xc3"},{"data":"b"}]}',
    b'{"records":[{"data":1},]}',
    b'{"records":[{"data":1}],}',
    b'{"records":[{"data":1}]',
    b'{"records":[{"data":1}',
    b'{"records":[{"data":1} {"data":2}]}',
    b'{"records":[{"data":1}]} x',
    b'{"records":[{"data":01}]}',
    b'{"records":[{"data":1},{}]}',
    b'{"records":[{"data":1},{"tag":"a"}]}',
    b'{"records":[1]}',
    b'{"records":{}}',
    b'{"records":null}',
    b'{"records"}',
    b"{records:[]}",
    b'{"node":5,"records":[{"data":1}]}',
    b'{"node":"a"}',
    b"{}",
    b"{,}",
    b"[]",
    b"",
    b" ",
    b"nul",
    b'{"records":[{"data":' + b"[" * 100 + b"]" * 100 + b"}]}",
    b'{"records":[{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"records":[{"data":1}]}',
]


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:40]))
def test_it_is_what_the_decoder_gives(slice_bytes: int, body: bytes, gzipped: bool) -> None:
    settings = Settings()
    assert outcome(lambda data: read(data, settings, gzipped=gzipped), body) == outcome(direct, body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
record = st.fixed_dictionaries({"data": values}, optional={"tag": st.text(max_size=4), "meta": st.just({"a": "b"})})
bodies = st.fixed_dictionaries(
    {"records": st.lists(record, max_size=30)},
    optional={"node": st.text(max_size=9), "junk": values, "create": st.booleans()},
)


@settings(deadline=None)
@given(body=bodies, spaced=st.booleans(), escaped=st.booleans(), cut=st.integers(0, 3_000), step=st.integers(1, 400))
def test_any_body_and_any_part_of_one(body: Any, spaced: bool, escaped: bool, cut: int, step: int) -> None:
    text = json.dumps(
        body, indent=1 if spaced else None, separators=None if spaced else (",", ":"), ensure_ascii=escaped
    )
    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_SLICE_BYTES", step)
        patch.setattr(decoder, "_INFLATE_BYTES", step)
        for part in (data, data[: cut % (len(data) + 1)]):
            expected = outcome(direct, part)
            assert outcome(lambda part: read(part, Settings()), part) == expected
            assert outcome(lambda part: read(part, Settings(), gzipped=True), part) == expected


def refused(body: LargeBody[AppendIn]) -> ApiError:
    with pytest.raises(ApiError) as found:
        run(body)
    return found.value


def run(body: LargeBody[AppendIn]) -> None:
    while not body.step():
        pass


def bomb(unit: bytes, *, before: bytes, after: bytes) -> bytes:
    packer = zlib.compressobj(level=9, wbits=31)
    parts = [packer.compress(before)]
    chunk = unit * 10_000
    for _ in range(60 * (1 << 20) // len(chunk)):
        parts.append(packer.compress(chunk))
    return b"".join([*parts, packer.compress(after), packer.flush()])


@pytest.mark.parametrize(
    ("unit", "before", "after", "code"),
    [
        (b"{},", b'{"records":[', b"{}]}", "invalid_request"),
        (b'{"data":1},', b'{"records":[', b'{"data":1}]}', "batch_too_large"),
        (b"{},", b'{"junk":[', b"{}]}", "payload_too_large"),
        (b"{},", b'{"records":[{"data":[', b"{}]}]}", "record_too_large"),
        (b"x", b'{"records":[{"data":"', b'"}]}', "record_too_large"),
        (b'"a":1,', b"{", b'"records":[]}', "payload_too_large"),
        (b"{},", b'{"match":[', b"{}]}", "payload_too_large"),
        (b'"records":[],', b"{", b'"records":[]}', "payload_too_large"),
    ],
)
def test_a_bomb_is_refused_after_its_first_part(unit: bytes, before: bytes, after: bytes, code: str) -> None:
    packed = bomb(unit, before=before, after=after)
    assert len(packed) < 400_000
    inflater = Inflater(packed, most=64 << 20)
    error = refused(LargeBody(b"", direct, Settings(), inflater=inflater))
    assert error.code == code
    assert inflater.size <= 4 << 20, "it went on inflating"


def test_spaces_without_an_end_are_a_body_that_is_too_large() -> None:
    packed = bomb(b" ", before=b'{"records":[', after=b"]}" + b" " * (8 << 20))
    error = refused(LargeBody(b"", direct, Settings(), inflater=Inflater(packed, most=64 << 20)))
    assert error.code == "payload_too_large"


def test_a_slice_is_small() -> None:
    """Of records of every size: none takes more than some slices' worth at once."""
    record = b'{"data":"%b"}' % (b"x" * 6_000)
    data = b'{"records":[%b]}' % b",".join([record] * 3_000)
    body = LargeBody(data, direct, Settings())
    steps = 0
    while not body.step():
        steps += 1
    assert len(body.given.records) == 3_000
    assert steps >= len(data) // (2 * decoder._SLICE_BYTES)


@pytest.mark.parametrize("size", [1_000_000, 140_000])
def test_a_slice_of_large_records_is_small(size: int) -> None:
    data = b'{"records":[%b]}' % b",".join([b'{"data":"%b"}' % (b"x" * size)] * 20)
    body = LargeBody(data, direct, Settings())
    steps = 0
    while not body.step():
        steps += 1
    assert steps >= 20, "records that are larger than a slice have one each"


def test_a_slice_of_spaces_is_small() -> None:
    data = b'{%b"records":[{"data":1}]}' % (b" " * (20 << 20))
    body = LargeBody(data, direct, Settings())
    steps = 0
    while not body.step():
        steps += 1
    assert steps >= 5
    assert len(body.given.records) == 1


def test_inflating_copies_no_more_than_a_piece() -> None:
    """zlib copies what it was given and has no room for: given the whole of a large body, it would copy that for every
    slice."""
    data = random.Random(7).randbytes(3 << 20)
    inflater = Inflater(gzip(data), most=4 << 20)
    found = bytearray()
    while not inflater.done:
        found += inflater.more(100_000)
        assert len(inflater._unpacker.unconsumed_tail) <= 256 << 10
    assert found == data


def test_the_most_that_is_taken() -> None:
    def body(count: int, size: int) -> bytes:
        return b'{"records":[%b]}' % b",".join([b'{"data":"%b"}' % (b"x" * size)] * count)

    assert len(read(body(50, 10)).records) == 50
    with pytest.raises(ApiError) as found:
        read(body(51, 10))
    assert (found.value.code, found.value.detail) == ("batch_too_large", {"count": 51, "max": 50})
    assert len(read(body(1, 8_000)).records) == 1  # refused later, for its size
    with pytest.raises(ApiError) as found:
        read(body(1, 80_000))
    assert found.value.code == "record_too_large"
    assert found.value.detail is not None
    assert found.value.detail["record"] == 0


@pytest.mark.parametrize(
    "packed", [b"", b"x", gzip(b"{}")[:-1], gzip(b"{}") + b"x", gzip(b'{"records"') + gzip(b":[]}")]
)
def test_gzip_that_is_none(packed: bytes) -> None:
    error = refused(LargeBody(b"", direct, Settings(), inflater=Inflater(packed, most=1_000)))
    assert error.code == "invalid_request"


@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "body",
    [
        rb'{"records":[{"data":"\ud800"}]}',
        rb'{"records":[{"data":1}],"node":"\ud800"}',
        rb'{"records":[{"data":1},{"data":"\ud800"},{"data":1}]}',
        rb'{"records":[{"data":"x \ud800 and more"}]}',
    ],
)
def test_a_lone_surrogate_is_called_that(slice_bytes: int, body: bytes, gzipped: bool) -> None:
    with pytest.raises(ApiError) as caught:
        read(body, gzipped=gzipped)
    assert caught.value.code == "invalid_request"
    assert "a lone surrogate" in caught.value.message, caught.value.message


def test_small_bodies_are_opened_whole() -> None:
    small = b'{"records":[{"data":1}]}'
    assert opened(small, SETTINGS, gzipped=False, most=1_000) == (small, None)
    assert opened(gzip(small), SETTINGS, gzipped=True, most=1_000) == (small, None)
    assert opened(b"", SETTINGS, gzipped=True, most=1_000) == (b"", None)
    assert opened(b" " * (DIRECT_BYTES + 1), SETTINGS, gzipped=False, most=2 * DIRECT_BYTES)[1] is not None
    assert opened(gzip(b" " * (DIRECT_BYTES + 1)), SETTINGS, gzipped=True, most=2 * DIRECT_BYTES)[1] is not None
    packed = gzip(b'{"records":[]}' + b" " * DIRECT_BYTES)
    body = opened(packed, SETTINGS, gzipped=True, most=2 * DIRECT_BYTES)[1]
    assert body is not None
    assert body.size == 0, "it is inflated before its turn"
    run(body)
    assert body.size == DIRECT_BYTES + 14
    with pytest.raises(ApiError, match="larger than 1000 bytes"):
        opened(gzip(b" " * 1_001), SETTINGS, gzipped=True, most=1_000)


def test_the_decoder_says_where_a_value_ends() -> None:
    """What the walk relies on and msgspec does not promise."""
    for text, end in ((b'{"a":1},x', 7), (b"12 ,", 3), (b'"a":', 3), (b"[[]]]", 4), (b"true}", 4)):
        with pytest.raises(msgspec.DecodeError) as found:
            msgspec.json.decode(text, type=msgspec.Raw)
        match = decoder._TRAILING.search(str(found.value))
        assert match is not None
        assert int(match[1]) - 1 == end
    with pytest.raises(msgspec.DecodeError, match="truncated"):
        msgspec.json.decode(b'{"a":', type=msgspec.Raw)


def count_steps(body: LargeBody[AppendIn]) -> tuple[int, str]:
    steps = 0
    try:
        while True:
            steps += 1
            if body.step():
                return steps, ""
    except ApiError as error:
        return steps, error.code


@pytest.mark.parametrize(
    ("data", "least", "code"),
    [
        (b'{%b"node":"n"}' % (b'"records":[],' * 100_000), 100, "payload_too_large"),
        (b'{%b"node":"n"}' % (b'"records":[{"data":1}],' * 50_000), 100, "payload_too_large"),
        (b'{%b"records":[{"data":1}]}' % (b'"":1,' * 40_000), 100, ""),
        (b'{"records":[%b{"data":1}]}' % (b" " * (8 << 20)), 30, ""),
        (b'{"records":[%b{"data":1}]}' % (b'{"data":[%b0]},' % (b"0," * 400_000) * 10), 10, ""),
    ],
    ids=["records again and again", "one record each", "tiny fields", "spaces", "few large records"],
)
def test_whatever_a_body_consists_of_others_get_their_turn(data: bytes, least: int, code: str) -> None:
    steps, found = count_steps(LargeBody(data, direct, Settings()))
    assert (steps >= least, found) == (True, code)


def test_blocks_without_content_are_read_in_slices() -> None:
    """60 MiB of them keep zlib for half a second, and inflate to nothing."""
    empty = b"\0\0\0\xff\xff" * 800_000
    packed = bytes.fromhex("1f8b08000000000000ff") + empty
    steps, code = count_steps(LargeBody(b"", direct, Settings(), inflater=Inflater(packed, most=64 << 20)))
    assert (steps >= 10, code) == (True, "invalid_request")


def test_what_is_left_of_a_packed_body_is_not_copied_again_and_again() -> None:
    packer = zlib.compressobj(level=0, wbits=31)
    data = b'{"records":[{"data":"%b"}]}' % (b"x" * 900_000)
    packed = packer.compress(data * 8) + packer.flush()
    inflater = Inflater(packed, most=64 << 20)
    inflater.more(1_000)
    assert len(inflater._unpacker.unconsumed_tail) <= 256 << 10


@pytest.mark.parametrize("steps", [0, 3])
def test_a_body_that_is_not_read_to_its_end_does_not_wait_for_a_collection(steps: int) -> None:
    body = LargeBody(b'{"records":[%b{"data":1}]}' % (b" " * (2 << 20)), direct, SETTINGS)
    for _ in range(steps):
        assert not body.step()
    known = weakref.ref(body)
    gc.disable()
    try:
        body.close()
        del body
        assert known() is None
    finally:
        gc.enable()
