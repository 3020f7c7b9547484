"""What `topics tail` prints, and when it has read what there was."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from msgspec import Raw

from topics.cli.client.tail import Goal, JsonPrinter, LinePrinter, clock_text, cut
from topics.cli.shared.terminal import harmless
from topics.client import CaughtUp, Event, Position, Records, Tombstone, TopicDeleted

TODAY_MS = time.time_ns() // 1_000_000


def batch(*seqs: int, topic: str = "jobs", data: str = "1") -> Records:
    raw = [Raw(b'{"$seq":%d,"$ts":%d,"data":%b}' % (seq, TODAY_MS, data.encode())) for seq in seqs]
    return Records(topic=topic, raw=raw, from_seq=0, to_seq=max(seqs), head_seq=1_000)


def tombstone(reason: str = "cap", gap_to: int = 83) -> Tombstone:
    return Tombstone(topic="jobs", reason=reason, gap_from=80, gap_to=gap_to, earliest_seq=gap_to + 1, head_seq=90)


def printed(event: Event, *, several: bool = False) -> str:
    return b"".join(LinePrinter(several=several).lines(event)).decode()


def as_json(event: Event) -> str:
    return b"".join(JsonPrinter().lines(event)).decode()


# --- lines -------------------------------------------------------------------------------------------


def test_a_record_is_a_line() -> None:
    assert printed(batch(7, 8, data='{"n": 1.50}')) == "".join(
        f'{clock_text(TODAY_MS)}  {seq}  {{"n":1.50}}\n' for seq in (7, 8)
    )


def test_with_several_topics_each_is_named() -> None:
    assert printed(batch(7), several=True).split() == [clock_text(TODAY_MS), "jobs", "7", "1"]


def test_node_and_tag_where_there_are_any() -> None:
    raw = Raw(b'{"$seq":7,"$ts":%d,"$node":"w 1","$tag":"a\\u001b[31m","data":[]}' % TODAY_MS)
    event = Records(topic="jobs", raw=[raw], from_seq=6, to_seq=7, head_seq=7)
    assert printed(event) == f"{clock_text(TODAY_MS)}  7  node=w 1  tag=a\\u001b[31m  []\n"


def test_other_days_have_a_date() -> None:
    noon = time.mktime((2024, 2, 29, 12, 0, 0, 0, 0, -1))
    assert clock_text(int(noon) * 1_000 + 45) == "2024-02-29 12:00:00.045"


def test_losses_and_deletions_are_told_and_the_head_is_not() -> None:
    assert printed(tombstone()) == "-- missed 80..83 of jobs: evicted by the cap\n"
    assert printed(TopicDeleted(topic="jobs", head_seq=1)) == "-- jobs was deleted\n"
    assert printed(CaughtUp(topic="jobs", head_seq=1)) == ""


@pytest.mark.parametrize("character", ["\x1b", "\x7f", "\x9b", "\u202e", "\u2028"])
def test_terminals_are_not_given_orders(character: str) -> None:
    shown = harmless(f'"a{character}b"')
    assert character not in shown
    assert json.loads(shown) == f"a{character}b"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 5, "abcd…"),
        ("abcdef", 1, "…"),
        ("abcdef", -3, "…"),
        ("日本語", 6, "日本語"),
        ("日本語", 5, "日本…"),
        ("日本語", 4, "日…"),
    ],
)
def test_cut(text: str, width: int, shown: str) -> None:
    assert cut(text, width) == shown


# --- JSON --------------------------------------------------------------------------------------------


def test_json_is_what_the_server_wrote_and_the_topic() -> None:
    event = batch(7, data='{"n": 1.50, "big": 12345678901234567890123, "e": 1e400}')
    assert as_json(event) == '{"topic":"jobs",' + bytes(event.raw[0]).decode()[1:] + "\n"


def test_json_is_one_line_even_if_the_data_is_not() -> None:
    lines = as_json(batch(7, data='{\n  "n": 1.50,\r\n  "s": "a\\nb"\n}')).splitlines()
    assert len(lines) == 1
    assert lines[0].endswith('"data":{"n":1.50,"s":"a\\nb"}}')


def test_json_of_what_is_no_record() -> None:
    assert json.loads(as_json(tombstone())) == {
        "topic": "jobs",
        "tombstone": {"reason": "cap", "gap_from": 80, "gap_to": 83, "earliest_seq": 84, "head_seq": 90},
    }
    assert json.loads(as_json(TopicDeleted(topic="jobs", head_seq=4))) == {
        "topic": "jobs",
        "deleted": {"head_seq": 4, "reason": "deleted"},
    }
    assert as_json(CaughtUp(topic="jobs", head_seq=1)) == ""


# --- --until-head ------------------------------------------------------------------------------------


def seqs(event: Event | None) -> list[int]:
    return [record.seq for record in event] if isinstance(event, Records) else []


def test_nothing_to_read_is_read_at_once() -> None:
    assert Goal({"jobs": Position(9, 9, 1)}).reached
    assert not Goal({"jobs": Position(8, 9, 1)}).reached
    assert not Goal({"jobs": Position(50, 9, 1)}).reached  # made again


def test_what_came_later_is_not_printed() -> None:
    goal = Goal({"jobs": Position(0, 9, 1)})
    assert seqs(goal.take(batch(7, 8))) == [7, 8]
    assert not goal.reached
    assert seqs(goal.take(batch(9, 10, 11))) == [9]
    assert goal.reached
    assert goal.take(batch(12)) is None


def test_every_topic_is_waited_for() -> None:
    goal = Goal({"a": Position(0, 1, 1), "b": Position(0, 1, 1)})
    goal.take(batch(1, topic="a"))
    assert not goal.reached
    assert goal.take(batch(2, topic="a")) is None
    goal.take(batch(1, topic="b"))
    assert goal.reached


@pytest.mark.parametrize(
    ("event", "reached"),
    [
        (CaughtUp(topic="jobs", head_seq=90), True),  # the last ones were deleted or filtered out
        (TopicDeleted(topic="jobs", head_seq=0), True),
        (tombstone(gap_to=83), False),
        (tombstone(gap_to=90), True),
        (tombstone("recreated", gap_to=2), False),
    ],
    ids=["caught up", "deleted", "a gap before", "a gap to the end", "made again"],
)
def test_the_head_is_also_reached_without_records(event: Event, reached: bool) -> None:
    goal = Goal({"jobs": Position(70, 90, 1)})
    assert goal.take(event) == event
    assert goal.reached is reached


def test_the_event_itself_is_left_alone() -> None:
    event = batch(9, 10)
    copy = msgspec.structs.replace(event)
    Goal({"jobs": Position(0, 9, 1)}).take(event)
    assert event == copy
