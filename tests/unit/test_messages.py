from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.storage.config import TopicConfig

CONFIG = TopicConfig(type="queue", ttl_ms=2**64 - 1, durability="fsync", durable=True, dead_letter="d", priority=-5)
HEADS: list[tuple[Op, Any]] = [
    (Op.APPEND, messages.Append("t", 3, 100)),
    (Op.APPEND, messages.Append("t", 10_000, 2**40, False, CONFIG, "schlüssel")),
    (Op.DIFF, messages.Diff("t", 2**64 - 1, 1_000, 2**20, ["a", "b"], True, False, 30_000)),
    (Op.PUT_TOPIC, messages.PutTopic("t", CONFIG, None)),
    (Op.PUT_TOPIC, messages.PutTopic("t", CONFIG, "queue")),
    (Op.GET_TOPIC, messages.GetTopic("t", True)),
    (Op.DROP_TOPIC, messages.DropTopic("t", False)),
    (Op.LIST_TOPICS, messages.ListTopics("p", "after", 100, True)),
    (Op.DELETE_RECORDS, messages.DeleteRecords("t", 2**64 - 1, "tag", True)),
    (Op.DELETE_RECORDS, messages.DeleteRecords("t", None, None, False)),
]
ANSWERS: list[tuple[Op, Any]] = [
    (Op.DIFF, messages.Diffed(1_000, 5)),
    (Op.PUT_TOPIC, messages.TopicPut(True, CONFIG)),
    (Op.GET_TOPIC, messages.TopicReport(1, 2, 3, 4, CONFIG, -5, None, 7)),
    (Op.DROP_TOPIC, messages.TopicDropped(True)),
    (Op.LIST_TOPICS, messages.TopicsListed([messages.TopicRow("a", 1, 2, 3, 4, True, 5)], True)),
    (Op.DELETE_RECORDS, messages.RecordsDeleted(1, 2, 3, 4, 5, 6)),
]


@pytest.mark.parametrize(("op", "head"), HEADS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("body", [b"", b"some bytes", bytes(1000)])
def test_requests_round_trip(op: Op, head: Any, body: bytes) -> None:
    envelope = messages.unpack(messages.pack(op, 2**64 - 1, head, body, deadline_ms=2**63))
    assert (envelope.op, envelope.error) == (op, 0)
    assert (envelope.correlation, envelope.deadline_ms) == (2**64 - 1, 2**63)
    assert bytes(envelope.body) == body
    assert messages.decode_request(op, envelope.head) == head


@pytest.mark.parametrize(("op", "head"), ANSWERS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("body", [b"", b"rendered"])
def test_answers_round_trip(op: Op, head: Any, body: bytes) -> None:
    found, rest = messages.decode_answer(messages.pack(op, 7, head, body))
    assert found == head
    assert bytes(rest) == body


U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


@examples(100)
@given(
    correlation=U64,
    first_seq=U64,
    records=U32,
    head_seq=U64,
    created=st.booleans(),
    deduped=st.booleans(),
    wal_us=U32,
    fsync_us=U32,
)
def test_the_answer_to_an_append(correlation: int, **fields: Any) -> None:
    message = messages.pack_appended(correlation, *fields.values())
    assert messages.unpack(message).correlation == correlation
    answer, _ = messages.decode_answer(message)
    assert answer == messages.Appended(**fields)
    assert tuple(messages.unpack_appended(message)) == tuple(answer)


@examples(100)
@given(
    correlation=U64,
    deadline_ms=U64,
    topic=st.text(st.sampled_from("abc:-_.9"), min_size=1, max_size=255),
    size=U64,
    counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=20),
    body=st.binary(max_size=200),
)
def test_plain_appends_are_appends(
    correlation: int, deadline_ms: int, topic: str, size: int, counts: list[int], body: bytes
) -> None:
    message = messages.pack_plain(correlation, deadline_ms, topic.encode(), size, counts, body)
    assert message[0] == Op.APPEND_PLAIN
    assert messages.unpack(message).correlation == correlation
    found = messages.unpack_plain(message)
    assert found[:3] == (correlation, deadline_ms, messages.Append(topic, sum(counts), size))
    assert bytes(found[3]) == body
    assert found[4] == (tuple(counts) if len(counts) > 1 else None)


@pytest.mark.parametrize("requests", [1, 2, 256, 65_535])
def test_one_answer_may_be_for_several_requests(requests: int) -> None:
    message = messages.pack_appended(7, 1, 9, 9, False, False, 0, 0, requests)
    assert messages.unpack_correlation(message) == (requests, 7)
    assert messages.decode_answer(message)[0].records == 9


@pytest.mark.parametrize("detail", [None, {}, {"cap_records": 5, "nested": {"a": [1, "x", None]}}])
@pytest.mark.parametrize("retry_after_s", [None, 5])
def test_failures_arrive_as_they_were_raised(detail: dict[str, Any] | None, retry_after_s: int | None) -> None:
    error = ApiError("topic_full", 'topic "é" is full', detail, retry_after_s=retry_after_s)
    message = messages.pack_failure(Op.APPEND, 9, error)
    assert messages.unpack(message).correlation == 9
    with pytest.raises(ApiError) as caught:
        messages.decode_answer(message)
    found = caught.value
    assert (found.code, found.message, found.detail, found.retry_after_s) == (
        error.code,
        error.message,
        detail,
        retry_after_s,
    )


def test_a_cancel_names_its_call_and_nothing_else() -> None:
    envelope = messages.unpack(messages.pack_cancel(77))
    assert (envelope.op, envelope.correlation, bytes(envelope.head), bytes(envelope.body)) == (Op.CANCEL, 77, b"", b"")


def test_every_operation_has_a_request_and_an_answer() -> None:
    unanswered = {Op.UNFOLLOW, Op.SAVE_CURSORS, Op.CLOSE_STREAM, Op.RESTORE_SESSION, Op.CLOSE_WORK, Op.WORK_SENT}
    unanswered |= {Op.LOG_LEASES}  # with an append's answer, if any
    unasked = {Op.TAIL, Op.TOPIC_GONE, Op.TAKE_STREAM, Op.HEAD_MOVED}
    unasked |= {Op.QUEUE_CHANGED, Op.JOBS_REMOVED, Op.JOBS, Op.WORK_ENDED, Op.PACED, Op.KEEP_SESSION}
    structs = set(Op) - {Op.CANCEL, Op.END_POLL, Op.APPEND_PLAIN}
    assert set(messages.REQUESTS) == structs - unasked
    assert set(messages.ANSWERS) | {Op.APPEND} == structs - unanswered
