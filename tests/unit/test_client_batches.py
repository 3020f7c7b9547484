"""From a stream of bytes to batches of records."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from topics.client import batches
from topics.client.batches import BadLine, Batch, Batcher, Line, Lines, json_of, text_of


def cut_into_lines(*chunks: bytes) -> list[tuple[int, bytes]]:
    lines = Lines()
    found = [line for chunk in chunks for line in lines.feed(chunk)] + lines.finish()
    return [(line.number, line.text) for line in found]


# --- lines -------------------------------------------------------------------------------------------


def test_lines_are_numbered_and_lose_their_ends() -> None:
    assert cut_into_lines(b"a\nb\r\n\nc\n") == [(1, b"a"), (2, b"b"), (3, b""), (4, b"c")]


def test_the_last_line_needs_no_end() -> None:
    assert cut_into_lines(b"a\nb") == [(1, b"a"), (2, b"b")]
    assert cut_into_lines(b"") == []
    assert cut_into_lines(b"\n") == [(1, b"")]


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", "é".encode(), b'{"x":1}']), max_size=30), st.data())
def test_where_the_chunks_end_does_not_matter(pieces: list[bytes], data: st.DataObject) -> None:
    text = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = cut_into_lines(text)
    assert cut_into_lines(*chunks) == whole
    assert [number for number, _ in whole] == list(range(1, len(whole) + 1))


def test_a_line_without_end_is_not_gathered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_LINE_BYTES", 10)
    lines = Lines()
    lines.feed(b"short\n1234567890")
    with pytest.raises(BadLine, match="line 2 is longer"):
        lines.feed(b"1")


# --- records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [b"1.50", b"1e400", b"12345678901234567890123", b'{"b": 1, "a": 2}', b'"\\u00e9\\/"', '"é"'.encode(), b"null"],
)
def test_values_keep_their_spelling(text: bytes) -> None:
    assert bytes(json_of(Line(1, b" \t" + text + b" \r")) or b"") == text


@pytest.mark.parametrize("text", [b"", b"  ", b"\t\r"])
def test_empty_lines_are_no_records(text: bytes) -> None:
    assert json_of(Line(1, text)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1', "line 7 is not JSON: it ends too early"),
        (b"hello", "line 7 is not JSON: invalid character"),
        (b"1 2", "line 7 is not JSON: trailing characters"),
        (b"NaN", "line 7 is not JSON"),
        (b"01", "line 7 is not JSON"),
        (b'"\xff"', "line 7 is not UTF-8 (byte 2)"),
        (b"[" * 100_000, "line 7 is "),
    ],
)
def test_what_is_not_json_is_refused_with_its_line(text: bytes, words: str) -> None:
    with pytest.raises(BadLine) as caught:
        json_of(Line(7, text))
    assert words in str(caught.value)
    assert caught.value.line == 7


@given(st.text())
def test_text_becomes_a_json_string(text: str) -> None:
    assert msgspec.json.decode(text_of(Line(1, text.encode()))) == text


def test_text_must_be_utf_8() -> None:
    with pytest.raises(BadLine, match=r"line 3 is not UTF-8 \(byte 2\)"):
        text_of(Line(3, b"a\xff"))


# --- batches -----------------------------------------------------------------------------------------


def gathered(batcher: Batcher, *values: bytes) -> list[list[bytes]]:
    found = [batcher.add(line, Raw(value)) for line, value in enumerate(values, 1)] + [batcher.take()]
    return [[bytes(data) for data in batch.data] for batch in found if batch is not None]


def test_a_batch_has_its_number() -> None:
    assert gathered(Batcher(max_records=2), b"1", b"2", b"3", b"4", b"5") == [[b"1", b"2"], [b"3", b"4"], [b"5"]]


def test_a_batch_has_its_bytes() -> None:
    assert gathered(Batcher(max_bytes=4), b"11", b"22", b"3", b"4444", b"5") == [
        [b"11", b"22"],
        [b"3"],
        [b"4444"],
        [b"5"],
    ]


def test_what_is_too_long_goes_alone() -> None:
    assert gathered(Batcher(max_bytes=3), b"1", b"22222", b"3") == [[b"1"], [b"22222"], [b"3"]]


def test_nothing_makes_no_batch() -> None:
    batcher = Batcher()
    assert batcher.take() is None
    assert not batcher


def test_a_batch_knows_its_lines() -> None:
    batcher = Batcher(max_records=2)
    assert batcher.add(3, Raw(b"1")) is None
    assert batcher.add(9, Raw(b"2")) == Batch([Raw(b"1"), Raw(b"2")], [3, 9])


@given(
    st.lists(st.binary(min_size=1, max_size=12), max_size=60),
    st.integers(1, 6),
    st.integers(1, 30),
)
def test_batches_hold_everything_in_order_and_within_bounds(
    values: list[bytes], max_records: int, max_bytes: int
) -> None:
    found = gathered(Batcher(max_records=max_records, max_bytes=max_bytes), *values)
    assert [value for batch in found for value in batch] == values
    for batch in found:
        assert 1 <= len(batch) <= max_records
        assert sum(map(len, batch)) <= max_bytes or len(batch) == 1
