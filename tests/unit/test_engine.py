"""The shard's commands: what each does, when it is answered, and when others can see it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from model import Answers, Record, Shard, batch_of, error_of

from topics import limits
from topics.actors import messages
from topics.actors.messages import Diff, DropTopic, ListTopics, Op, PutTopic
from topics.errors import DiskFull
from topics.storage.config import TopicConfig


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path)


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(count)]


def config(durability: str, **more: Any) -> TopicConfig:
    return TopicConfig(durability=durability, durable=durability == "fsync", **more)  # type: ignore[arg-type]


# --- when an append is answered ------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["disk", "memory", "ephemeral"])
def test_these_classes_are_answered_after_the_write(shard: Shard, durability: str) -> None:
    shard.put("t", config(durability))
    sent = shard.send_append("t", records(2))
    assert not shard.answered(sent)
    assert shard.diff("t").stored != []  # a read writes what is staged first
    assert shard.answered(sent)
    answer = shard.answer(sent)
    assert (answer.first_seq, answer.records, answer.head_seq, answer.fsync_us) == (1, 2, 2, 0)


def test_fsync_is_answered_and_seen_after_the_sync(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    sent = shard.send_append("t", records(2))
    shard.engine.commit.write()
    assert not shard.answered(sent)
    assert shard.diff("t").stored == []
    assert shard.topic("t").head_seq == 0
    shard.settle()
    assert shard.answered(sent)
    assert shard.answer(sent).head_seq == 2
    assert len(shard.diff("t").stored) == 2


def test_a_new_topic_is_answered_after_its_creation_is_synced(shard: Shard) -> None:
    sent = shard.send_append("t", records(1))
    shard.engine.commit.write()
    assert not shard.answered(sent)
    shard.settle()
    answer = shard.answer(sent)
    assert (answer.created, answer.fsync_us) == (True, 0)
    again = shard.append("t", records(1))
    assert (again.created, again.first_seq) == (False, 2)


def test_batches_of_one_topic_are_seen_in_order_whatever_they_wait_for(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    first = shard.send_append("t", records(1))
    shard.engine.commit.write()
    shard.send(Op.PUT_TOPIC, PutTopic("t", config("disk"), None))
    second = shard.send_append("t", records(1))
    shard.engine.commit.write()
    assert not shard.answered(second)
    shard.settle()
    assert shard.answer(first).first_seq == 1
    assert shard.answer(second).first_seq == 2
    assert [stored.seq for stored in shard.everything("t")] == [1, 2]


def test_one_round_is_one_write_and_one_sync(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    before = shard.engine.wal.batches
    sent = [shard.send_append("t", records(3)) for _ in range(10)]
    shard.settle()
    assert shard.engine.wal.batches == before + 1
    assert [shard.answer(one).first_seq for one in sent] == list(range(1, 31, 3))


def test_what_came_during_a_sync_is_the_next_one(shard: Shard) -> None:
    synced: list[int] = []
    shard.engine.commit.on_sync = synced.append
    shard.put("t", config("fsync"))
    synced.clear()
    shard.send_append("t", records(1))
    shard.engine.commit.write()
    for _ in range(5):
        shard.send_append("t", records(1))
        shard.engine.commit.write()
    shard.settle()
    assert len(synced) == 2
    assert shard.report("t").count == 6


def test_seqs_are_contiguous_over_topics_and_rounds(shard: Shard) -> None:
    sent = []
    for number in range(30):
        sent.append((number % 3, shard.send_append(f"t{number % 3}", records(number % 4 + 1))))
        if number % 7 == 0:
            shard.settle()
    shard.settle()
    following = {0: 1, 1: 1, 2: 1}
    for topic, one in sent:
        answer = shard.answer(one)
        assert answer.first_seq == following[topic]
        following[topic] += answer.records


def test_a_request_after_its_deadline_is_dropped(shard: Shard) -> None:
    shard.append("t", records(1))
    past = time.monotonic_ns() // 1_000_000 - 1_000
    shard.engine.begin_round(time.monotonic_ns())
    message = messages.pack(Op.DROP_TOPIC, 99, DropTopic("t", False), deadline_ms=past)
    shard.engine.handle(message, shard.answers)
    assert not shard.answered(99)
    assert "t" in shard.engine.topics


def test_the_disk_class_gets_its_sync_a_moment_later(tmp_path: Path) -> None:
    shard = Shard(tmp_path, disk_sync_ms=1)
    shard.append("t", records(1))
    shard.sync()
    shard.append("t", records(1))
    assert shard.engine.wal.synced_lsn < shard.engine.wal.written_lsn
    deadline = shard.engine.next_deadline_ns
    assert deadline is not None
    assert deadline <= time.monotonic_ns() + 1_000_000
    shard.engine.commit.sync_now()
    shard.settle()
    assert shard.engine.wal.synced_lsn == shard.engine.wal.written_lsn
    assert shard.engine.next_deadline_ns is None


# --- creating ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "auto_create", "made"),
    [
        (None, None, True),
        (None, True, True),
        (None, False, False),
        (True, None, True),
        (True, False, True),
        (False, None, False),
        (False, True, False),
    ],
)
def test_whether_a_write_creates(shard: Shard, create: bool | None, auto_create: bool | None, made: bool) -> None:
    given = None if auto_create is None else TopicConfig(auto_create=auto_create)
    if made:
        assert shard.append("t", records(1), create=create, config=given).created
    else:
        assert error_of(lambda: shard.append("t", records(1), create=create, config=given)).code == "topic_not_found"
        assert "t" not in shard.engine.topics


def test_a_config_of_a_modest_write_makes_no_topic(shard: Shard) -> None:
    """Its key may not configure. What exists is written to as before, and without a config a topic is made."""
    given = TopicConfig(type="queue", dead_letter="elsewhere", max_deliveries=1)
    error = error_of(lambda: shard.append("t", records(1), config=given, modest=True))
    assert (error.code, error.detail) == ("forbidden", {"scopes": ["admin"]})
    assert "t" not in shard.engine.topics
    refused = error_of(lambda: shard.append("t", records(1), config=TopicConfig(), create=True, modest=True))
    assert refused.code == "forbidden"
    unmade = error_of(lambda: shard.append("t", records(1), config=given, create=False, modest=True))
    assert unmade.code == "topic_not_found"
    assert shard.append("t", records(1), modest=True).created
    assert not shard.append("t", records(1), config=given, modest=True).created
    assert shard.report("t").config == TopicConfig()


def test_an_inline_config_counts_only_for_the_creation(shard: Shard) -> None:
    shard.append("t", records(1), config=TopicConfig(cap_records=5))
    shard.append("t", records(1), config=TopicConfig(cap_records=9))
    assert shard.report("t").config == TopicConfig(cap_records=5)


def test_put_creates_updates_and_leaves_alone(shard: Shard) -> None:
    assert shard.put("t", TopicConfig(ttl_ms=5)).created
    written = shard.engine.wal.written_lsn
    same = shard.put("t", TopicConfig(ttl_ms=5))
    assert (same.created, shard.engine.wal.written_lsn) == (False, written)
    assert shard.put("t", TopicConfig(ttl_ms=6)).config.ttl_ms == 6
    assert shard.put("t", TopicConfig()).config.ttl_ms == 0
    shard.restart()
    assert shard.report("t").config == TopicConfig()


def test_a_put_is_answered_when_it_is_on_the_platter(shard: Shard) -> None:
    sent = shard.send(Op.PUT_TOPIC, PutTopic("t", TopicConfig(), None))
    assert not shard.answered(sent)
    shard.settle()
    assert shard.answer(sent).created


def test_a_type_never_changes(shard: Shard) -> None:
    shard.call(Op.PUT_TOPIC, PutTopic("q", TopicConfig(type="queue"), "queue"))
    error = error_of(lambda: shard.call(Op.PUT_TOPIC, PutTopic("q", TopicConfig(type="log"), "log")))
    assert (error.code, error.status) == ("topic_exists_incompatible", 409)
    kept = shard.call(Op.PUT_TOPIC, PutTopic("q", TopicConfig(ttl_ms=5), None))
    assert (kept.config.type, kept.config.ttl_ms) == ("queue", 5)


def test_every_config_field_survives(shard: Shard) -> None:
    whole = TopicConfig(
        type="queue",
        ttl_ms=10**6,
        cap_records=2,
        cap_bytes=2**64 - 1,
        discard="reject",
        durable=True,
        durability="fsync",
        priority=-4,
        auto_priority=False,
        auto_create=False,
        idempotency_window_ms=5,
        dedupe_node=False,
        lease_ms=600,
        claim_jitter_ms=7,
        max_deliveries=8,
        dead_letter="dlq",
        leases_durable=True,
    )
    shard.call(Op.PUT_TOPIC, PutTopic("t", whole, "queue"))
    shard.restart()
    assert shard.report("t").config == whole
    shard.checkpoint()
    shard.restart()
    assert shard.report("t").config == whole


# --- idempotency keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["disk", "fsync", "memory", "ephemeral"])
def test_a_retry_gets_the_first_answer(shard: Shard, durability: str) -> None:
    shard.put("t", config(durability))
    first = shard.append("t", records(3), key="k")
    shard.append("t", records(2))
    again = shard.append("t", records(1), key="k")
    assert (again.first_seq, again.records, again.deduped, again.created) == (1, 3, True, False)
    assert not first.deduped
    assert again.head_seq == 5
    assert shard.report("t").count == 5
    assert not shard.append("t", records(1), key="other").deduped


def test_keys_belong_to_their_topic(shard: Shard) -> None:
    shard.append("t", records(1), key="k")
    assert not shard.append("u", records(1), key="k").deduped


def test_a_key_is_remembered_for_its_window(shard: Shard) -> None:
    shard.put("t", TopicConfig(idempotency_window_ms=100))
    shard.append("t", records(1), key="k")
    shard.wall.pass_ms(100)
    assert shard.append("t", records(1), key="k").deduped
    shard.wall.pass_ms(1)
    assert not shard.append("t", records(1), key="k").deduped
    assert shard.append("t", records(1), key="k").first_seq == 2


def test_a_retry_is_not_answered_before_the_first_is_durable(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    first = shard.send_append("t", records(1), key="k")
    again = shard.send_append("t", records(1), key="k")
    assert not shard.answered(first)
    assert not shard.answered(again)
    shard.settle()
    assert shard.answer(first).deduped is False
    assert shard.answer(again).deduped is True
    assert shard.report("t").count == 1


@pytest.mark.parametrize("how", ["crash", "snapshot", "flush", "stop", "pending"])
def test_keys_survive_as_their_records_do(shard: Shard, how: str) -> None:
    shard.put("t", config("fsync"))
    shard.append("t", records(1))
    shard.checkpoint()
    sent = shard.send_append("t", records(3), key="schlüssel")
    shard.engine.commit.write()
    if how == "pending":
        shard.checkpoint()
    shard.settle()
    assert shard.answer(sent).first_seq == 2
    if how == "flush":
        shard.flush("t")
    if how in ("flush", "snapshot"):
        shard.checkpoint()
    if how == "stop":
        shard.stop()
        shard.open()
    else:
        shard.restart()
    again = shard.append("t", records(1), key="schlüssel")
    assert (again.first_seq, again.records, again.deduped) == (2, 3, True)


def test_keys_of_resident_records_end_with_the_process(shard: Shard) -> None:
    shard.append("t", records(1), key="k", config=config("ephemeral"))
    shard.checkpoint()
    shard.restart()
    assert not shard.append("t", records(1), key="k").deduped


# --- seqs are never given out twice ------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["disk", "fsync", "memory", "ephemeral"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_seqs_go_on_after_a_restart(shard: Shard, durability: str, checkpoint: bool) -> None:
    shard.put("t", config(durability))
    shard.append("t", records(5))
    if checkpoint:
        shard.checkpoint()
    shard.append("t", records(2))
    shard.restart()
    first = shard.append("t", records(1)).first_seq
    assert first == 8 if durability != "ephemeral" else first > 7


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_seqs_beyond_a_promise_wait_for_the_next_one(
    shard: Shard, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQ_RESERVE", 10)
    shard.put("t", config(durability))
    for _ in range(20):
        shard.append("t", records(3))
    topic = shard.topic("t")
    assert topic.ceiling >= 60
    sent = shard.send_append("t", records(30))
    shard.engine.commit.write()
    assert not shard.answered(sent), "seqs that no promise on the platter covers were given out"
    shard.settle()
    assert shard.answer(sent).first_seq == 61


def test_a_class_changed_to_and_fro_uses_no_seq_twice(shard: Shard) -> None:
    given: list[int] = []
    for durability in ("ephemeral", "disk", "ephemeral", "memory", "fsync", "ephemeral"):
        shard.put("t", config(durability))
        answer = shard.append("t", records(3))
        given += range(answer.first_seq, answer.first_seq + 3)
        if durability != "memory":
            shard.restart()
    assert len(set(given)) == len(given)
    assert given == sorted(given)


# --- dropping and listing ------------------------------------------------------------------------------------


def test_a_dropped_topic_is_gone_and_its_name_starts_over(shard: Shard) -> None:
    shard.append("t", records(5), key="k")
    assert shard.drop("t")
    assert not shard.drop("t")
    assert error_of(lambda: shard.diff("t")).code == "topic_not_found"
    assert error_of(lambda: shard.report("t")).code == "topic_not_found"
    assert error_of(lambda: shard.delete("t", before_seq=5)).code == "topic_not_found"
    answer = shard.append("t", records(1), key="k")
    assert (answer.first_seq, answer.created, answer.deduped) == (1, True, False)
    shard.restart()
    assert shard.report("t").count == 1


def test_a_drop_only_if_empty(shard: Shard) -> None:
    shard.append("t", records(2))
    error = error_of(lambda: shard.drop("t", if_empty=True))
    assert (error.code, error.detail) == ("topic_not_empty", {"topic": "t", "count": 2})
    shard.delete("t", before_seq=3)
    assert shard.drop("t", if_empty=True)
    assert not shard.drop("t", if_empty=True)


def test_a_topic_with_unpublished_records_is_not_empty(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    shard.send_append("t", records(1))
    assert error_of(lambda: shard.drop("t", if_empty=True)).code == "topic_not_empty"


def test_a_drop_while_its_appends_wait(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    sent = shard.send_append("t", records(1))
    assert shard.drop("t")
    assert shard.answer(sent).first_seq == 1
    assert shard.engine.totals.records == 0
    assert [file.pins for file in shard.engine.wal.files] == [0]
    shard.restart()
    assert shard.engine.topics == {}


def test_listing_pages_by_name(shard: Shard) -> None:
    names = ["b", "a", "a:2", "a:10", "B", "c"]
    for name in names:
        shard.append(name, records(2))
    found: list[str] = []
    after = ""
    while True:
        page = shard.call(Op.LIST_TOPICS, ListTopics("", after, 2, False))
        found += [row.topic for row in page.rows]
        if not page.more:
            break
        after = found[-1]
    assert found == sorted(names)
    page = shard.call(Op.LIST_TOPICS, ListTopics("a", "", 100, False))
    assert [row.topic for row in page.rows] == ["a", "a:10", "a:2"]
    assert not page.more
    row = page.rows[0]
    assert (row.head_seq, row.earliest_seq, row.count, row.durable, row.effective_priority) == (2, 1, 2, False, 0)
    assert shard.call(Op.LIST_TOPICS, ListTopics("", "zz", 10, False)).rows == []


def test_listing_sees_what_has_expired(shard: Shard) -> None:
    shard.append("t", records(2), config=TopicConfig(ttl_ms=10))
    shard.wall.pass_ms(11)
    [row] = shard.call(Op.LIST_TOPICS, ListTopics("", "", 10, False)).rows
    assert (row.count, row.bytes, row.earliest_seq) == (0, 0, 3)


@pytest.mark.parametrize(("touch", "priority"), [(False, 0), (True, 500)])
def test_looking_may_touch(shard: Shard, touch: bool, priority: int) -> None:
    shard.append("t", records(1))
    shard.call(Op.LIST_TOPICS, ListTopics("", "", 10, touch))
    assert shard.report("t").effective_priority == priority
    assert (shard.report("t").last_read_ts is not None) == touch
    shard.call(Op.GET_TOPIC, messages.GetTopic("t", touch))
    assert shard.report("t").effective_priority == priority


# --- quotas ------------------------------------------------------------------------------------------------


def test_topics_are_counted(tmp_path: Path) -> None:
    shard = Shard(tmp_path, max_topics=2)
    shard.append("a", records(1))
    shard.put("b", TopicConfig())
    for attempt in (lambda: shard.append("c", records(1)), lambda: shard.put("c", TopicConfig())):
        error = error_of(attempt)
        assert (error.code, error.status) == ("throttled", 429)
        assert error.detail is not None
        assert error.detail["limit"] == "max_topics"
        assert error.retry_after_s
    assert shard.append("a", records(1)).first_seq == 2
    shard.drop("b")
    assert shard.append("c", records(1)).created


def test_bytes_are_counted(tmp_path: Path) -> None:
    shard = Shard(tmp_path, max_total_bytes=200)
    shard.append("a", records(3))
    shard.append("b", records(3))
    error = error_of(lambda: shard.append("b", records(1)))
    assert error.code == "throttled"
    assert error.detail is not None
    assert error.detail["limit"] == "max_total_bytes"
    assert error_of(lambda: shard.append("c", records(1))).code == "throttled"
    assert "c" not in shard.engine.topics
    shard.delete("a", before_seq=3)
    assert shard.append("b", records(2)).first_seq == 4


# --- long polls ----------------------------------------------------------------------------------------------


def poll(shard: Shard, topic: str = "t", from_seq: int = 0, wait_ms: int = 60_000, **more: Any) -> int:
    return shard.send(Op.DIFF, Diff(topic, from_seq, 100, 10_000, wait_ms=wait_ms, **more))


def seqs_of(shard: Shard, sent: int) -> list[int]:
    _, body = messages.decode_answer(shard.answers.messages.pop(sent))
    return [record["$seq"] for record in json.loads(bytes(body) + b"}")["records"]]


def test_a_poll_with_something_to_tell_does_not_wait(shard: Shard) -> None:
    shard.append("t", records(2))
    assert seqs_of(shard, poll(shard)) == [1, 2]
    assert seqs_of(shard, poll(shard, from_seq=9)) == [1, 2], "a tombstone is something to tell"


def test_a_poll_waits_for_the_next_record(shard: Shard) -> None:
    shard.append("t", records(2))
    sent = poll(shard, from_seq=2)
    assert not shard.answered(sent)
    shard.append("u", records(1))
    assert not shard.answered(sent)
    shard.append("t", records(2))
    assert seqs_of(shard, sent) == [3, 4]
    assert shard.engine.polls._by_topic == {}


def test_a_poll_sees_an_fsync_record_only_when_it_is_durable(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    sent = poll(shard)
    shard.send_append("t", records(1))
    shard.engine.commit.write()
    assert not shard.answered(sent)
    shard.settle()
    assert seqs_of(shard, sent) == [1]


def test_own_records_do_not_end_a_poll(shard: Shard) -> None:
    shard.append("t", records(1))
    sent = poll(shard, from_seq=1, nodes=["me"])
    shard.append("t", records(1, node="me"))
    assert not shard.answered(sent)
    shard.append("t", records(1, node="you"))
    assert seqs_of(shard, sent) == [3]


def test_own_records_beyond_the_window_do_not_hide_others(shard: Shard) -> None:
    shard.append("t", records(1))
    sent = shard.send(Op.DIFF, Diff("t", 1, 1, 10_000, ["me"], wait_ms=60_000))
    shard.append("t", records(1, node="me"))
    shard.append("t", records(3, node="me"))
    assert not shard.answered(sent)
    shard.append("t", [*records(2, node="me"), *records(2, node="you")])
    diffed, _ = messages.decode_answer(shard.answers.messages[sent])
    assert diffed.scanned == 7
    assert seqs_of(shard, sent) == [8]


def test_a_poll_has_passed_own_records_when_its_time_is_up(shard: Shard) -> None:
    shard.append("t", records(1))
    sent = shard.send(Op.DIFF, Diff("t", 1, 1, 10_000, ["me"], wait_ms=60_000))
    shard.append("t", records(3, node="me"))
    shard.delete("t", before_seq=3)
    shard.engine.polls.end(shard.engine.refresh)
    diffed, body = messages.decode_answer(shard.answers.messages.pop(sent))
    page = json.loads(bytes(body) + b"}")
    assert (page["records"], page["next_from_seq"], page["caught_up"], diffed.scanned) == ([], 4, True, 3)


def test_a_gap_behind_own_records_ends_a_poll(shard: Shard) -> None:
    shard.put("t", config("memory", cap_records=4))
    sent = shard.send(Op.DIFF, Diff("t", 0, 1, 10_000, ["me"], wait_ms=60_000))
    shard.append("t", records(3, node="me"))
    assert not shard.answered(sent)
    shard.append("t", records(6, node="me"))
    _, body = messages.decode_answer(shard.answers.messages.pop(sent))
    page = json.loads(bytes(body) + b"}")
    assert (page["tombstone"]["gap_from"], page["tombstone"]["gap_to"], page["records"]) == (4, 5, [])


def test_many_polls_on_one_topic(shard: Shard) -> None:
    shard.append("t", records(1))
    sent = [poll(shard, from_seq=1) for _ in range(20)]
    shard.append("t", records(1))
    assert all(seqs_of(shard, one) == [2] for one in sent)


class SlowLooks:
    """A clock that each look at a poll moves by a millisecond."""

    def __init__(self, shard: Shard) -> None:
        self.now_ns = time.monotonic_ns()
        polls: Any = shard.engine.polls
        look = polls._look

        def slow(poll: Any, *, last: bool = False) -> None:
            self.now_ns += 1_000_000
            look(poll, last=last)

        polls._look, polls._clock = slow, lambda: self.now_ns


def test_what_wakes_many_polls_answers_some_in_each_round(shard: Shard) -> None:
    """In the order in which they came; one that was cancelled meanwhile is left out."""
    shard.append("t", records(1))
    sent = [poll(shard, from_seq=1) for _ in range(150)]
    SlowLooks(shard)
    shard.append("t", records(1))
    assert list(shard.answers.messages) == sent[:64]
    assert shard.engine.next_deadline_ns == 0, "it goes on at once"
    shard.engine.handle(messages.pack_cancel(sent[149]), shard.answers)
    shard.append("t", records(1))
    assert list(shard.answers.messages.keys() - set(sent)) == []
    shard.engine.polls.end_due(shard.engine.refresh)
    assert [one for one in shard.answers.messages if one in sent] == sent[:128]
    shard.engine.polls.end_due(shard.engine.refresh)
    assert [one for one in shard.answers.messages if one in sent] == sent[:149]
    assert seqs_of(shard, sent[0]) == [2]
    assert seqs_of(shard, sent[148]) == [2, 3]
    assert shard.engine.next_deadline_ns != 0


def test_many_polls_end_some_in_each_round(shard: Shard) -> None:
    shard.append("t", records(1))
    sent = [poll(shard, from_seq=1, wait_ms=1_000) for _ in range(150)]
    slow = SlowLooks(shard)
    shard.engine.polls.end_due(shard.engine.refresh)
    assert not shard.answers.messages.keys() & set(sent)
    slow.now_ns += 2_000_000_000
    for answered in (64, 128, 150):
        shard.engine.polls.end_due(shard.engine.refresh)
        assert [one for one in shard.answers.messages if one in sent] == sent[:answered]
    assert not shard.engine.polls._by_topic


def test_a_poll_ends_when_its_time_is_up(shard: Shard) -> None:
    shard.append("t", records(1))
    sent = poll(shard, from_seq=1, wait_ms=1)
    deadline = shard.engine.next_deadline_ns
    assert deadline is not None
    while time.monotonic_ns() < deadline:
        pass
    shard.engine.polls.end_due(shard.engine.refresh)
    assert seqs_of(shard, sent) == []
    shard.append("t", records(1))
    assert shard.answers.messages.keys().isdisjoint({sent})


def test_a_poll_on_a_topic_that_goes_ends_with_it(shard: Shard) -> None:
    shard.append("t", records(1))
    sent = poll(shard, from_seq=1)
    shard.drop("t")
    assert error_of(lambda: shard.answer(sent)).code == "topic_not_found"


def test_a_cancelled_poll_is_never_answered(shard: Shard) -> None:
    shard.append("t", records(1))
    cancelled, other = poll(shard, from_seq=1), poll(shard, from_seq=1)
    shard.engine.handle(messages.pack_cancel(cancelled), shard.answers)
    shard.append("t", records(1))
    assert not shard.answered(cancelled)
    assert shard.answered(other)


def test_polls_of_a_peer_that_died_are_forgotten(shard: Shard) -> None:
    shard.append("t", records(1))
    gone = Answers()
    shard.engine.handle(messages.pack(Op.DIFF, 5, Diff("t", 1, 10, 100, wait_ms=1_000)), gone)
    mine = poll(shard, from_seq=1)
    shard.engine.polls.cancel(gone)
    shard.append("t", records(1))
    assert gone.messages == {}
    assert shard.answered(mine)


# --- deletes are answered as durably as their topic is ---------------------------------------------------------


def test_a_delete_on_an_fsync_topic_waits_for_its_sync(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    shard.append("t", records(3))
    sent = shard.send(Op.DELETE_RECORDS, messages.DeleteRecords("t", 3, None, False))
    assert not shard.answered(sent)
    assert [stored.seq for stored in shard.diff("t").stored] == [3], "it takes effect at once"
    shard.settle()
    assert shard.answer(sent).deleted == 2


def test_a_delete_on_a_disk_topic_does_not(shard: Shard) -> None:
    shard.append("t", records(3))
    sent = shard.send(Op.DELETE_RECORDS, messages.DeleteRecords("t", 3, None, False))
    assert shard.answered(sent)


def test_a_delete_of_nothing_writes_nothing(shard: Shard) -> None:
    shard.append("t", records(3, tag="x"))
    written = shard.engine.wal.written_lsn
    assert shard.delete("t", tag="y").deleted == 0
    assert shard.delete("t", before_seq=1).deleted == 0
    assert shard.engine.wal.written_lsn == written


@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_delete_that_ends_in_a_batch_of_which_nothing_is_left(shard: Shard, durability: str, on_disk: bool) -> None:
    """Its body is not kept, and its file may be gone."""
    shard.put("t", config(durability))
    for tag in "abc":
        shard.append("t", records(3, tag=tag))
        if on_disk and durability == "disk":
            shard.flush("t")
    assert shard.delete("t", tag="b").deleted == 3
    if on_disk:
        shard.checkpoint()
    assert shard.delete("t", before_seq=5).deleted == 3
    assert [stored.seq for stored in shard.everything("t")] == [7, 8, 9]


def test_a_delete_is_bounded_by_what_is_published(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    shard.append("t", records(2, tag="x"))
    shard.send_append("t", records(2, tag="x"))
    shard.engine.commit.write()
    assert shard.delete("t", tag="x").deleted == 2
    assert [stored.seq for stored in shard.everything("t")] == [3, 4]
    shard.restart()
    assert [stored.seq for stored in shard.everything("t")] == [3, 4]


def test_damaged_data_is_an_error_for_the_reader_and_no_crash(shard: Shard) -> None:
    shard.append("t", records(3))
    shard.append("u", records(1))
    row = next(iter(shard.topic("t").rows))
    row.body = None
    with open(row.source.path, "r+b") as file:
        file.seek(row.offset + 70)
        file.write(b"\xff\xff")
    error = error_of(lambda: shard.diff("t"))
    assert error.code == "internal"
    assert "damaged" in error.message
    assert len(shard.everything("u")) == 1


# --- plain appends that travelled together ------------------------------------------------------------------------


def send_run(shard: Shard, topic: str, sizes: list[int]) -> list[int]:
    """Several appends in one message; returns their correlations."""
    first = next(shard.correlations)
    correlations = [first, *(next(shard.correlations) for _ in sizes[1:])]
    values = [b"%d" % number for number in range(sum(sizes))]
    body, size = batch_of([Record(value) for value in values])
    deadline_ms = time.monotonic_ns() // 1_000_000 + 60_000
    shard.engine.handle(messages.pack_plain(first, deadline_ms, topic.encode(), size, sizes, body), shard.answers)
    return correlations


def test_a_run_is_one_batch_with_one_answer(shard: Shard) -> None:
    shard.append("t", records(1))
    [first, *others] = send_run(shard, "t", [2, 1, 3])
    shard.settle()
    message = shard.answers.messages[first]
    assert messages.unpack_correlation(message) == (3, first)
    answer = shard.answer(first)
    assert (answer.first_seq, answer.records, answer.head_seq) == (2, 6, 7)
    assert not any(shard.answered(other) for other in others)
    assert [stored.record.data for stored in shard.everything("t")[1:]] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    shard.restart()
    assert shard.report("t").count == 7


def test_a_run_that_creates_its_topic_is_taken_apart(shard: Shard) -> None:
    sent = send_run(shard, "t", [2, 1])
    shard.settle()
    answers = [shard.answer(one) for one in sent]
    assert [(answer.first_seq, answer.records, answer.created) for answer in answers] == [(1, 2, True), (3, 1, False)]
    assert [stored.record.data for stored in shard.everything("t")] == [b"0", b"1", b"2"]


def test_a_run_into_a_topic_that_rejects_is_judged_one_by_one(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=4, discard="reject"))
    sent = send_run(shard, "t", [3, 2, 1, 9])
    shard.settle()
    assert shard.answer(sent[0]).first_seq == 1
    assert error_of(lambda: shard.answer(sent[1])).code == "topic_full"
    assert shard.answer(sent[2]).first_seq == 4
    assert error_of(lambda: shard.answer(sent[3])).code == "record_too_large"
    assert [stored.record.data for stored in shard.everything("t")] == [b"0", b"1", b"2", b"5"]
    assert shard.report("t").bytes == sum(stored.record.size for stored in shard.everything("t"))


def test_a_run_under_a_quota_is_judged_one_by_one(tmp_path: Path) -> None:
    shard = Shard(tmp_path, max_total_bytes=150)
    shard.put("t", TopicConfig())
    accepted = send_run(shard, "t", [1, 2])
    shard.settle()
    assert [shard.answer(one).first_seq for one in accepted] == [1, 2]
    fits, too_much = send_run(shard, "t", [1, 30])
    shard.settle()
    assert shard.answer(fits).first_seq == 4
    assert error_of(lambda: shard.answer(too_much)).code == "throttled"


def test_a_run_evicts_as_its_appends_would(shard: Shard) -> None:
    shard.put("t", TopicConfig(cap_records=4))
    send_run(shard, "t", [3, 3])
    shard.settle()
    assert [stored.seq for stored in shard.everything("t")] == [3, 4, 5, 6]
    assert shard.topic("t").evict_floor == 3


def test_a_run_on_an_fsync_topic_waits_for_its_sync(shard: Shard) -> None:
    shard.put("t", config("fsync"))
    [first, _] = send_run(shard, "t", [1, 1])
    shard.engine.commit.write()
    assert not shard.answered(first)
    shard.settle()
    assert shard.answer(first).records == 2


def test_a_run_that_can_not_be_written_fails_for_each(shard: Shard) -> None:
    shard.append("t", records(1))

    def full(*args: object) -> None:
        raise DiskFull("no space")

    write, shard.disk.write = shard.disk.write, full  # type: ignore[method-assign,assignment]
    sent = send_run(shard, "t", [1, 2])
    shard.settle()
    shard.disk.write = write  # type: ignore[method-assign]
    for one in sent:
        assert error_of(lambda one=one: shard.answer(one)).code == "storage_full"
    assert shard.append("t", records(1)).first_seq == 2
