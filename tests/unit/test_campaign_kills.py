"""The oracle of the campaign of kills is shown each loss that it has to find."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from campaigns import kills
from campaigns.campaign import Tally
from campaigns.kills import Actor, Topic, Trouble, Writer, Wrong
from campaigns.kills import Story as KillStory


class Answer:
    ok = True
    status = 200

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.raw = json.dumps(body, separators=(",", ":")).encode()


class Pages:
    """A server's answers to reads."""

    def __init__(self, records: list[tuple[int, str]], tombstone: object = None) -> None:
        self.records = records
        self.tombstone = tombstone

    def diff(self, topic: str, from_seq: int, **more: object) -> Answer:
        shown = [{"$seq": seq, "data": json.loads(data)} for seq, data in self.records if seq > from_seq][:3]
        last = shown[-1]["$seq"] if shown else from_seq
        return Answer(
            {
                "records": shown,
                "next_from_seq": last,
                "caught_up": last >= max((seq for seq, _ in self.records), default=0),
                "tombstone": self.tombstone,
            }
        )


def sent(topic: Topic, count: int = 2, *, first_seq: int = 0, refused: bool = False) -> list[str]:
    batch, body = topic.new_batch(count)
    batch.first_seq, batch.answered, batch.refused = first_seq, first_seq > 0, refused
    return [json.dumps(record["data"]) for record in json.loads(body)["records"]]


@pytest.fixture
def topic() -> Topic:
    return Topic("t", "fsync")


def check(topic: Topic, pages: Pages) -> int:
    return topic.check(pages)  # type: ignore[arg-type]


def test_what_was_acknowledged_and_what_was_not_answered(topic: Topic) -> None:
    one, two = sent(topic, first_seq=1), sent(topic)
    sent(topic)  # without an answer, and not there
    assert check(topic, Pages([(1, one[0]), (2, one[1]), (3, two[0]), (4, two[1])])) == 4
    assert topic.checked_to == 4
    more = sent(topic, first_seq=5)
    assert check(topic, Pages([(5, more[0]), (6, more[1])])) == 2


def test_a_batch_that_is_gone(topic: Topic) -> None:
    one = sent(topic, first_seq=1)
    sent(topic, first_seq=3)
    with pytest.raises(Wrong, match="acknowledged at seq 3 and is gone"):
        check(topic, Pages([(1, one[0]), (2, one[1])]))


def test_half_a_batch(topic: Topic) -> None:
    one = sent(topic)
    with pytest.raises(Wrong, match="not whole"):
        check(topic, Pages([(1, one[0])]))


def test_a_record_that_changed(topic: Topic) -> None:
    one = sent(topic, first_seq=1)
    with pytest.raises(Wrong, match="not what anybody sent"):
        check(topic, Pages([(1, one[0]), (2, '{"b":"x"}')]))


def test_a_seq_that_was_given_to_another(topic: Topic) -> None:
    one, two = sent(topic, first_seq=1), sent(topic, first_seq=1)
    with pytest.raises(Wrong, match=r"is gone|known to be at"):
        check(topic, Pages([(1, two[0]), (2, two[1])]))
    assert one


def test_a_gap_without_a_tombstone(topic: Topic) -> None:
    one, two = sent(topic, first_seq=1), sent(topic, first_seq=4)
    with pytest.raises(Wrong, match="no tombstone"):
        check(topic, Pages([(1, one[0]), (2, one[1]), (4, two[0]), (5, two[1])]))


def test_a_batch_that_was_refused_and_one_that_is_there_twice(topic: Topic) -> None:
    one = sent(topic, refused=True)
    with pytest.raises(Wrong, match="refused"):
        check(topic, Pages([(1, one[0]), (2, one[1])]))
    other = Topic("u", "disk")
    two = sent(other)
    with pytest.raises(Wrong, match="not whole"):
        check(other, Pages([(1, two[0]), (2, two[1]), (3, two[0]), (4, two[1])]))


def test_a_bystander_that_got_an_error() -> None:
    class Load:
        def __init__(self, actors: list[Actor]) -> None:
            self.actors = actors

    writer = Writer(Load([]), Topic("t", "disk"))  # type: ignore[arg-type]
    writer.troubles, writer.shards = [Trouble(5.0, "503")], frozenset({"shard-1"})
    story = KillStory.__new__(KillStory)
    story.tally = Tally()
    load: Any = Load([writer])
    story._check_bystanders(load, ["shard-1"], 4.0)
    story._check_bystanders(load, ["gateway-0"], 4.0)
    story._check_bystanders(load, ["shard-0"], 6.0)
    with pytest.raises(Wrong, match="shard-0 died"):
        story._check_bystanders(load, ["shard-0"], 4.0)


def test_kills_count_for_the_goal_under_load_only() -> None:
    story = KillStory.__new__(KillStory)
    story.tally, story.life = Tally(), Counter(kills=9, kills_shard=4, pairs=2)
    story._count(10_000, 9.0)
    assert story.tally.counts == {"kills": 9, "kills_shard": 4, "pairs": 2, "records": 10_000, "load_ms": 9_000}
    story._count(8_000, 9.0)
    assert story.tally.counts["kills"] == 9
    assert (story.tally.counts["lives_below_the_rate"], story.tally.counts["uncounted_kills"]) == (1, 9)


def test_a_stop_that_leaves_a_process_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        pid, code = 1, 0

        def stop(self) -> int:
            return self.code

        def log(self) -> str:
            return ""

    monkeypatch.setattr(kills, "children_of", lambda pid: [2, 3])
    monkeypatch.setattr(kills, "gone", lambda pid: True)
    story, server = KillStory.__new__(KillStory), Server()
    story._stop(server)  # type: ignore[arg-type]
    monkeypatch.setattr(kills, "gone", lambda pid: pid == 2)
    with pytest.raises(Wrong, match=r"outlive a stop: \[3\]"):
        story._stop(server)  # type: ignore[arg-type]
    server.code = 1
    with pytest.raises(Wrong, match="ended with 1"):
        story._stop(server)  # type: ignore[arg-type]


def test_descriptors_that_every_kill_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    story: Any = KillStory.__new__(KillStory)
    story.life = Counter(kills=9)
    server: Any = Writer.__new__(Writer)
    server.pid = 1
    monkeypatch.setattr(kills, "descriptors_of", lambda pid: 39)
    monkeypatch.setattr(kills, "eventually", lambda look, **more: look() or pytest.fail("many"))
    story._check_descriptors(server, 37)
    monkeypatch.setattr(kills, "eventually", refuse)
    with pytest.raises(Wrong, match="has 39 descriptors after 9 kills, had 20"):
        story._check_descriptors(server, 20)


def refuse(look: Any, **more: Any) -> None:
    assert look()
