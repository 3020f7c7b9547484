"""A large append is packed in slices into the same bytes as a small one, and refused for the same reasons."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics import limits
from topics.errors import ApiError
from topics.gateway.api import schemas
from topics.gateway.api.schemas import AppendIn
from topics.gateway.large import packing
from topics.gateway.large.packing import Packing
from topics.settings import Settings

SETTINGS = Settings(max_record_bytes=5_000, max_meta_bytes=500)

RECORDS = st.lists(
    st.fixed_dictionaries(
        {"data": st.one_of(st.none(), st.integers(), st.text(max_size=20))},
        optional={
            "tag": st.one_of(st.none(), st.text(max_size=5)),
            "node": st.one_of(st.none(), st.text(min_size=1, max_size=5)),
            "meta": st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.integers(), max_size=3)),
        },
    ),
    min_size=1,
    max_size=12,
)


def given_of(value: object) -> AppendIn:
    return schemas.decode_json(schemas.append_decoder, msgspec.json.encode(value))


def packed(given_in: AppendIn, *, key: str | None = None) -> Packing:
    made = Packing(given_in, "t", SETTINGS, key=key)
    while not made.step():
        pass
    return made


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_PIECE_BYTES", 30)
    monkeypatch.setattr(packing, "_PIECE_RECORDS", 4)


@examples(300)
@given(records=RECORDS, node=st.one_of(st.none(), st.text(min_size=1, max_size=5)))
def test_the_same_bytes_as_a_small_append(records: list[dict[str, object]], node: str | None) -> None:
    value = {"records": records, "node": node, "idempotency_key": "k", "config": {"ttl_ms": 5}}
    size = len(msgspec.json.encode(value))
    head, body = schemas.resolve_append(given_of(value), "t", SETTINGS, key=None, size=size)
    made = packed(given_of(value))
    assert made.head == head
    assert b"".join(made.pieces) == body


REFUSED: dict[str, dict[str, object]] = {
    "no records": {"records": []},
    "too many": {"records": [{"data": 1}] * (limits.MAX_BATCH_RECORDS + 1)},
    "record": {"records": [{"data": 1}] * 9 + [{"data": "x" * 6_000}]},
    "tag": {"records": [{"data": 1}] * 9 + [{"data": 1, "tag": "x" * 300}]},
    "node": {"records": [{"data": 1}] * 9 + [{"data": 1, "node": "x" * 300}]},
    "common node": {"records": [{"data": 1}], "node": "x" * 300},
    "meta": {"records": [{"data": 1}] * 9 + [{"data": 1, "meta": [1]}]},
    "large meta": {"records": [{"data": 1}] * 9 + [{"data": 1, "meta": {"x": "x" * 600}}]},
    "key": {"records": [{"data": 1}], "idempotency_key": ""},
    "config": {"records": [{"data": 1}], "config": {"dead_letter": "t"}},
}


@pytest.mark.parametrize("why", REFUSED)
def test_the_same_refusals_as_of_a_small_append(why: str) -> None:
    value = REFUSED[why]
    with pytest.raises(ApiError) as small:
        schemas.resolve_append(given_of(value), "t", SETTINGS, key=None, size=10_000)
    with pytest.raises(ApiError) as large:
        packed(given_of(value))
    assert (large.value.code, large.value.message, large.value.detail) == (
        small.value.code,
        small.value.message,
        small.value.detail,
    )


def test_no_piece_is_much_larger_than_a_slice() -> None:
    value = {"records": [{"data": "x" * 20, "meta": {"m": n}} for n in range(100)]}
    made = packed(given_of(value), key="header")
    assert made.head.key == "header"
    assert max(map(len, made.pieces)) < 120
    assert len(made.pieces) > 50
