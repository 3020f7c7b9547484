from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.storage import paths


@examples(100)
@given(layout=st.integers(0, 2**32 - 1), number=st.integers(0, 2**48 - 1), kind=st.sampled_from(["wal", "snap"]))
def test_numbered_names_round_trip(layout: int, number: int, kind: str) -> None:
    assert paths.parse_numbered(paths.numbered_name(layout, number, kind)) == (layout, number, kind)


@examples(100)
@given(numbers=st.lists(st.integers(0, 2**48 - 1), min_size=2, max_size=5))
def test_names_sort_as_their_numbers(numbers: list[int]) -> None:
    names = [paths.numbered_name(1, number, "wal") for number in numbers]
    assert sorted(names) == [paths.numbered_name(1, number, "wal") for number in sorted(numbers)]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "00000001-000000000001.tmp",
        "00000001-000000000001.snap.tmp",
        "00000001-000000000001.WAL",
        "0000001-000000000001.wal",
        "00000001-00000000001.wal",
        "00000001_000000000001.wal",
        "0000000g-000000000001.wal",
        "0000000A-000000000001.wal",
        "x00000001-000000000001.wal",
        "00000001-000000000001.wal~",
    ],
)
def test_names_that_are_not_ours(name: str) -> None:
    assert paths.parse_numbered(name) is None


@examples(50)
@given(first_seq=st.integers(0, 2**64 - 1))
def test_segment_names_round_trip(first_seq: int) -> None:
    name = paths.segment_name(first_seq)
    assert len(name) == len("00000000000000000001.data")
    assert paths.parse_segment(name) == first_seq


@pytest.mark.parametrize("name", ["1.data", "00000000000000000001.idx", "00000000000000000001.data.tmp", ""])
def test_names_that_are_no_segment(name: str) -> None:
    assert paths.parse_segment(name) is None


def test_where_things_are() -> None:
    assert paths.shard_dir("d", 3) == os.path.join("d", "wal", "shard-03")
    assert paths.shard_dir("d", 63) == os.path.join("d", "wal", "shard-63")
    assert paths.topic_dir("d", 0xAB) == os.path.join("d", "topics", "00000000000000ab")
    assert paths.topics_dir("d") == os.path.dirname(paths.topic_dir("d", 1))
    assert paths.index_path("d/7.data") == "d/7.idx"
