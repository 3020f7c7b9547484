"""Frames of the server, read; events, in words; and where a subscription goes on."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from topics.client.events import (
    CaughtUp,
    Event,
    Position,
    Record,
    Records,
    Refused,
    Subscribed,
    Tombstone,
    TopicDeleted,
    read_frame,
)
from topics.client.positions import Positions

# --- frames ------------------------------------------------------------------------------------------

RECORD = (
    '{"op":"record","topic":"jobs","from_seq":4,"to_seq":6,"head_seq":9,"new":{"field":1},"records":['
    '{"$seq":5,"$ts":1700000000123,"$node":"n","$tag":"t","data":{"a": 1.50, "b":1e400},"meta":{"k": 1}},'
    '{"$seq":6,"$ts":1700000000124,"data":null}]}'
)


def test_records_keep_the_spelling_of_their_data() -> None:
    batch = read_frame(RECORD)
    assert isinstance(batch, Records)
    assert (batch.topic, batch.from_seq, batch.to_seq, batch.head_seq, len(batch)) == ("jobs", 4, 6, 9, 2)
    first, second = batch
    assert bytes(first.data) == b'{"a": 1.50, "b":1e400}'
    assert bytes(first.meta) == b'{"k": 1}'
    assert (first.seq, first.ts_ms, first.node, first.tag) == (5, 1700000000123, "n", "t")
    assert (second.seq, second.node, second.tag) == (6, None, None)
    assert (bytes(second.data), bytes(second.meta)) == (b"null", b"")
    assert bytes(batch.raw[1]) == b'{"$seq":6,"$ts":1700000000124,"data":null}'


class Job(msgspec.Struct):
    do: str


def test_data_is_decoded_on_demand() -> None:
    record = msgspec.json.decode(b'{"$seq":1,"$ts":2,"data":{"do":"resize"}}', type=Record)
    assert record.decode() == {"do": "resize"}
    assert record.decode(Job).do == "resize"
    with pytest.raises(msgspec.ValidationError):
        record.decode(int)


TOMBSTONE = Tombstone(topic="jobs", reason="cap", gap_from=80, gap_to=83, earliest_seq=84, head_seq=90)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ({"op": "caught_up", "topic": "jobs", "head_seq": 43}, CaughtUp(topic="jobs", head_seq=43)),
        (
            {"op": "topic_deleted", "topic": "jobs", "head_seq": 3, "reason": "deleted"},
            TopicDeleted(topic="jobs", head_seq=3),
        ),
        ({"op": "tombstone", **msgspec.structs.asdict(TOMBSTONE)}, TOMBSTONE),
        (
            {"op": "subscribed", "topics": {"a": {"from_seq": 1, "head_seq": 2, "earliest_seq": 1}}},
            Subscribed({"a": Position(1, 2, 1)}),
        ),
        (
            {"op": "error", "request_id": "s", "code": "forbidden", "message": "no"},
            Refused("forbidden", "no", request_id="s"),
        ),
        ({"op": "pong", "ts": 5}, None),
        ({"op": "of a later version", "topics": 5}, None),
    ],
)
def test_frames(frame: dict[str, Any], expected: object) -> None:
    assert read_frame(json.dumps(frame)) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", '{"op":1}', '{"op":"record","topic":"jobs"}', '{"op":"caught_up"}'])
def test_what_is_no_frame_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_frame(text)


# --- words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("cap", "missed 80..83 of jobs: evicted by the cap"),
        ("ttl", "missed 80..83 of jobs: expired"),
        ("mixed", "missed 80..83 of jobs: evicted by the cap or expired"),
        ("from_seq_too_old", "missed 80..83 of jobs: no longer kept"),
        ("of_a_later_version", "missed 80..83 of jobs: of_a_later_version"),
        ("recreated", "jobs was deleted and made again: reading on from its start"),
    ],
)
def test_tombstones_in_words(reason: str, words: str) -> None:
    assert str(msgspec.structs.replace(TOMBSTONE, reason=reason)) == words


def test_a_single_loss_is_no_range() -> None:
    assert str(msgspec.structs.replace(TOMBSTONE, gap_to=80)) == "missed 80 of jobs: evicted by the cap"


def test_deletions_in_words() -> None:
    assert str(TopicDeleted(topic="jobs", head_seq=3)) == "jobs was deleted"


# --- positions ---------------------------------------------------------------------------------------


def asked(positions: Positions) -> Any:
    return positions.command("s", {})["topics"]


def begun(**starts: int | None) -> Positions:
    """Every topic has a head of 100."""
    positions = Positions(starts)
    gone = positions.subscribed({topic: Position(100 if seq is None else seq, 100, 1) for topic, seq in starts.items()})
    assert gone == []
    return positions


def records(topic: str, to_seq: int) -> Records:
    return Records(topic=topic, raw=[], from_seq=0, to_seq=to_seq, head_seq=1_000)


def test_the_first_command_says_where_to_begin() -> None:
    command = Positions({"a": 0, "b": None, "c": 7}).command("s", {"include_tags": True})
    assert command == {
        "op": "subscribe",
        "request_id": "s",
        "topics": {"a": {"from_seq": 0}, "b": {"tail": True}, "c": {"from_seq": 7}},
        "lenient": False,
        "include_tags": True,
    }


def test_a_tail_becomes_a_position_once_it_has_begun() -> None:
    assert asked(begun(a=None)) == {"a": {"from_seq": 100}}


@pytest.mark.parametrize(
    ("event", "seq"),
    [
        (records("a", 105), 105),
        (CaughtUp(topic="a", head_seq=108), 108),
        (msgspec.structs.replace(TOMBSTONE, topic="a", gap_to=120), 120),
        (msgspec.structs.replace(TOMBSTONE, topic="a", reason="recreated", gap_to=99, earliest_seq=1), 0),
    ],
    ids=["records", "caught up", "tombstone", "recreated"],
)
def test_what_was_delivered_is_not_asked_for_again(event: Event, seq: int) -> None:
    positions = begun(a=100, b=100)
    positions.moved(event)
    assert asked(positions) == {"a": {"from_seq": seq}, "b": {"from_seq": 100}}


def test_a_deleted_topic_is_not_asked_for_again() -> None:
    positions = begun(a=1, b=2)
    positions.moved(TopicDeleted(topic="a", head_seq=5))
    assert asked(positions) == {"b": {"from_seq": 2}}
    assert positions
    positions.moved(records("a", 7))  # a straggler
    positions.moved(TopicDeleted(topic="b", head_seq=5))
    assert not positions


def test_unknown_at_first_is_an_error_and_later_a_deletion() -> None:
    positions = Positions({"a": 3, "b": None})
    assert positions.command("s", {})["lenient"] is False
    positions.subscribed({"a": Position(3, 9, 1), "b": Position(9, 9, 1)})
    assert positions.command("s", {})["lenient"] is True
    assert positions.subscribed({"b": Position(9, 9, 1)}) == [TopicDeleted(topic="a", head_seq=3)]


def test_the_first_answer_is_kept() -> None:
    positions = begun(a=0)
    positions.subscribed({"a": Position(50, 2_000, 1)})
    assert positions.first == {"a": Position(0, 100, 1)}
