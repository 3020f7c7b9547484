"""Questions to shards over real links on plain memory: every call ends exactly once."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from topics.actors import messages
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.gateway.api.types import Call, Gather, Response
from topics.gateway.calls import Calls
from topics.gateway.http1.append_batch import PlainAppend, PlainRun
from topics.gateway.http1.response import Answers
from topics.shm.counters import State
from topics.shm.doorbell import Doorbell
from topics.shm.layout import link_bytes
from topics.shm.ring import format_link
from topics.storage.columns import Columns

RING_BYTES = 64 * 1024


class Shard:
    """The other end of a link, played by the test."""

    def __init__(self) -> None:
        view = memoryview(bytearray(link_bytes(RING_BYTES)))
        format_link(view, generation=1, ring_bytes=RING_BYTES)
        words = memoryview(bytearray(64)).cast("Q")
        self.fds = [Doorbell.create_fd(), Doorbell.create_fd()]
        self.gateway = Link("shard", view, side=0, generation=1, bell=Doorbell(self.fds[0], words, 0))
        self.shard = Link("gateway", view, side=1, generation=1, bell=Doorbell(self.fds[1], words, 1))

    def asked(self) -> list[messages.Envelope]:
        return [messages.unpack(message) for message in self.shard.drain()]

    def answer(self, message: bytes) -> None:
        self.shard.writer.send(message)
        self.shard.flush()

    def dropped(self, correlation: int, deleted: bool) -> None:
        self.answer(messages.pack(Op.DROP_TOPIC, correlation, messages.TopicDropped(deleted)))


class Sink:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def finish(self, value: Any) -> None:
        self.values.append(value)

    def abort(self) -> None: ...

    @property
    def value(self) -> Any:
        assert len(self.values) == 1, "a call ends exactly once"
        return self.values[0]

    @property
    def error(self) -> dict[str, Any]:
        assert isinstance(self.value, Response)
        found: dict[str, Any] = json.loads(bytes(self.value.body))["error"]
        return found


@pytest.fixture
def shards() -> Any:
    made = [Shard() for _ in range(3)]
    yield made
    for shard in made:
        for fd in shard.fds:
            os.close(fd)


@pytest.fixture
def calls(shards: list[Shard]) -> Calls:
    calls = Calls(shards=3, timeout_ms=5_000)
    for index, shard in enumerate(shards):
        calls.link_up(index, shard.gateway)
    return calls


def drop(shard: int, *, timeout_ms: int = 0, name: str = "t") -> Call:
    return Call(shard=shard, op=Op.DROP_TOPIC, head=messages.DropTopic(name, False), timeout_ms=timeout_ms)


def submit(calls: Calls, outcome: Any) -> Sink:
    sink = Sink()
    calls.submit(outcome, sink)
    calls.flush()
    return sink


def test_a_response_needs_no_shard(calls: Calls) -> None:
    response = Response(200, b"{}")
    assert submit(calls, response).value is response
    assert len(calls) == 0


def test_a_call_is_asked_and_answered(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, drop(1))
    assert sink.values == []
    [envelope] = shards[1].asked()
    assert envelope.op == Op.DROP_TOPIC
    assert messages.decode_request(envelope.op, envelope.head) == messages.DropTopic("t", False)
    assert shards[0].asked() == shards[2].asked() == []
    assert len(calls) == 1
    assert not calls.has_answers()
    shards[1].dropped(envelope.correlation, True)
    assert calls.has_answers()
    calls.drain()
    assert sink.value == messages.TopicDropped(True)
    assert len(calls) == 0


def test_answers_find_their_callers_in_any_order(calls: Calls, shards: list[Shard]) -> None:
    sinks = [submit(calls, drop(0, name=f"t{number}")) for number in range(10)]
    asked = shards[0].asked()
    assert len({envelope.correlation for envelope in asked}) == 10
    for number, envelope in reversed(list(enumerate(asked))):
        shards[0].dropped(envelope.correlation, number % 2 == 0)
    calls.drain()
    assert [sink.value.deleted for sink in sinks] == [number % 2 == 0 for number in range(10)]


def test_the_same_correlation_of_another_shard_is_another_call(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, drop(0))
    [envelope] = shards[0].asked()
    shards[1].dropped(envelope.correlation, True)
    calls.drain()
    assert sink.values == []
    shards[0].dropped(envelope.correlation, False)
    calls.drain()
    assert sink.value == messages.TopicDropped(False)


def test_an_answer_to_nobody_is_dropped(calls: Calls, shards: list[Shard]) -> None:
    shards[0].dropped(12345, True)
    calls.drain()
    sink = submit(calls, drop(0))
    [envelope] = shards[0].asked()
    shards[0].dropped(envelope.correlation, True)
    shards[0].dropped(envelope.correlation, True)
    calls.drain()
    assert sink.value == messages.TopicDropped(True)


def test_an_error_of_the_shard_is_the_answer(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, drop(0))
    [envelope] = shards[0].asked()
    error = ApiError("topic_not_empty", "not empty", {"count": 3}, retry_after_s=4)
    shards[0].answer(messages.pack_failure(Op.DROP_TOPIC, envelope.correlation, error))
    calls.drain()
    assert sink.value.status == 409
    assert ("Retry-After", "4") in sink.value.headers
    assert sink.error == {"code": "topic_not_empty", "message": "not empty", "detail": {"count": 3}}


def test_a_shard_that_is_down_is_refused_at_once(calls: Calls) -> None:
    calls.link_down(1)
    assert not calls.linked(1)
    assert calls.linked(0)
    sink = submit(calls, drop(1))
    assert sink.value.status == 503
    assert sink.value.headers == (("Retry-After", "1"),)
    assert sink.error["code"] == "shard_unavailable"
    assert "outcome" not in sink.error["detail"]


def test_a_shard_that_goes_down_leaves_the_outcome_unknown(calls: Calls, shards: list[Shard]) -> None:
    gone, other = submit(calls, drop(1)), submit(calls, drop(0))
    calls.link_down(1)
    assert gone.value.status == 503
    assert gone.error["detail"]["outcome"] == "unknown"
    assert other.values == []
    calls.link_up(1, Shard().gateway)
    calls.drain()
    [envelope] = shards[0].asked()
    shards[0].dropped(envelope.correlation, True)
    calls.drain()
    assert other.value == messages.TopicDropped(True)
    assert len(calls) == 0


def test_a_restarted_shard_is_asked_over_its_new_link(calls: Calls) -> None:
    calls.link_down(0)
    fresh = Shard()
    calls.link_up(0, fresh.gateway)
    sink = submit(calls, drop(0))
    [envelope] = fresh.asked()
    fresh.dropped(envelope.correlation, True)
    calls.drain()
    assert sink.value == messages.TopicDropped(True)


class Clock:
    """The deadline clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = time.monotonic_ns()
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def pass_ms(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000


def test_a_call_without_an_answer_ends_at_its_deadline(
    calls: Calls, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    sink = submit(calls, drop(0))
    [envelope] = shards[0].asked()
    assert envelope.deadline_ms == clock.now_ns // 1_000_000 + 5_000
    clock.pass_ms(4_999)
    calls.expire()
    assert sink.values == []
    clock.pass_ms(1)
    calls.expire()
    assert sink.value.status == 503
    assert sink.error["detail"]["outcome"] == "unknown"
    shards[0].dropped(envelope.correlation, True)
    calls.drain()
    calls.expire()
    assert len(sink.values) == 1


def test_a_long_poll_has_its_wait_on_top(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    poll, usual = submit(calls, drop(0, timeout_ms=30_000)), submit(calls, drop(0))
    clock.pass_ms(5_001)
    calls.expire()
    assert poll.values == []
    assert usual.value.status == 503
    clock.pass_ms(30_000)
    calls.expire()
    assert poll.value.status == 503


def test_a_full_ring_is_backpressure(calls: Calls, shards: list[Shard]) -> None:
    sinks = []
    for _ in range(10_000):
        sinks.append(submit(calls, drop(0, name="x" * 200)))
        if sinks[-1].values:
            break
    refused = sinks[-1]
    assert refused.value.status == 429
    assert refused.error["code"] == "throttled"
    assert refused.error["detail"]["retry_after_ms"] > 0
    assert calls.refused == 1
    assert len(calls) == len(sinks) - 1
    answered = 0
    while answered < len(sinks) - 1:
        asked = shards[0].asked()
        answered += len(asked)
        for envelope in asked:
            shards[0].shard.writer.send_always(
                messages.pack(Op.DROP_TOPIC, envelope.correlation, messages.TopicDropped(True))
            )
        shards[0].shard.flush()
        calls.drain()
        calls.flush()
    while len(calls):
        shards[0].shard.flush()
        calls.drain()
    assert all(sink.value == messages.TopicDropped(True) for sink in sinks[:-1])
    assert submit(calls, drop(0)).values == []


# --- several shards at once ---


def gather(rendered: list[Any]) -> Gather:
    def render(answers: list[Any]) -> Response:
        rendered.append(answers)
        return Response(200, b"all")

    return Gather([drop(shard) for shard in range(3)], render)


def test_a_gather_waits_for_all_and_keeps_their_order(calls: Calls, shards: list[Shard]) -> None:
    rendered: list[Any] = []
    sink = submit(calls, gather(rendered))
    for index in (2, 0, 1):
        assert sink.values == []
        [envelope] = shards[index].asked()
        shards[index].dropped(envelope.correlation, index == 1)
        calls.drain()
    assert sink.value.body == b"all"
    assert [answer.deleted for answer in rendered[0]] == [False, True, False]


def test_one_failure_is_the_whole_answer_and_the_rest_is_ignored(calls: Calls, shards: list[Shard]) -> None:
    rendered: list[Any] = []
    sink = submit(calls, gather(rendered))
    envelopes = [shard.asked()[0] for shard in shards]
    shards[0].dropped(envelopes[0].correlation, True)
    shards[1].answer(messages.pack_failure(Op.DROP_TOPIC, envelopes[1].correlation, ApiError("internal", "broken")))
    calls.drain()
    assert sink.value.status == 500
    shards[2].dropped(envelopes[2].correlation, True)
    calls.drain()
    assert len(sink.values) == 1
    assert rendered == []
    assert len(calls) == 0


def test_a_gather_with_a_shard_down(calls: Calls, shards: list[Shard]) -> None:
    calls.link_down(1)
    rendered: list[Any] = []
    sink = submit(calls, gather(rendered))
    assert sink.value.status == 503
    for index in (0, 2):
        for envelope in shards[index].asked():
            shards[index].dropped(envelope.correlation, True)
    calls.drain()
    assert len(sink.values) == 1
    assert rendered == []


def test_a_shard_dies_during_a_gather(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, gather([]))
    [envelope] = shards[0].asked()
    shards[0].dropped(envelope.correlation, True)
    calls.drain()
    calls.link_down(2)
    calls.link_down(1)
    assert sink.value.status == 503


# --- clients that leave ---


def test_an_abandoned_long_poll_is_cancelled(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, drop(0, timeout_ms=1_000))
    [asked] = shards[0].asked()
    calls.abandon(sink)
    calls.flush()
    [cancel] = shards[0].asked()
    assert (cancel.op, cancel.correlation) == (Op.CANCEL, asked.correlation)
    shards[0].dropped(asked.correlation, True)
    calls.drain()
    assert sink.values == []
    assert len(calls) == 0


def test_a_client_that_sends_no_more_ends_its_long_poll(calls: Calls, shards: list[Shard]) -> None:
    sink, other = submit(calls, drop(0, timeout_ms=1_000)), submit(calls, drop(0))
    asked, _ = shards[0].asked()
    calls.leave(sink)
    calls.leave(other)
    calls.flush()
    [end] = shards[0].asked()
    assert (end.op, end.correlation) == (Op.END_POLL, asked.correlation)
    shards[0].dropped(asked.correlation, True)
    calls.drain()
    assert len(sink.values) == 1
    assert len(calls) == 1


def test_an_abandoned_write_is_left_alone(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, drop(0))
    calls.abandon(sink)
    calls.flush()
    assert [envelope.op for envelope in shards[0].asked()] == [Op.DROP_TOPIC]
    assert len(calls) == 1


def test_long_polls_end_when_the_server_stops(calls: Calls, shards: list[Shard]) -> None:
    poll, write = submit(calls, drop(0, timeout_ms=1_000)), submit(calls, drop(0))
    calls.end_polls(ApiError("shutting_down", "stopping", retry_after_s=2))
    calls.flush()
    assert poll.value.status == 503
    assert poll.value.close
    assert write.values == []
    assert [envelope.op for envelope in shards[0].asked()] == [Op.DROP_TOPIC, Op.DROP_TOPIC, Op.CANCEL]


class Failing(Sink):
    """Fails to take its answer, and the call behind it, of the same connection, is abandoned for that."""

    def __init__(self, calls: Calls, others: list[Sink]) -> None:
        super().__init__()
        self._calls = calls
        self._others = others

    def finish(self, value: Any) -> None:
        raise RuntimeError

    def abort(self) -> None:
        for other in self._others:
            self._calls.abandon(other)
        raise RuntimeError


@pytest.mark.parametrize("by", ["their deadline", "the end"])
def test_a_fault_takes_the_other_calls_of_its_connection_along(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    clock = Clock(monkeypatch)
    faults: list[Exception] = []
    calls.on_fault = lambda error, _: faults.append(error)
    behind = Sink()
    calls.submit(drop(0, timeout_ms=1_000), Failing(calls, [behind]))
    calls.submit(drop(0, timeout_ms=1_000), behind)
    stranger = submit(calls, drop(0, timeout_ms=1_000))
    if by == "the end":
        calls.end_polls(ApiError("shutting_down", "stopping", retry_after_s=2))
    else:
        clock.pass_ms(6_001)
        calls.expire()
    assert len(faults) == 2
    assert behind.values == []
    assert stranger.value.status == 503
    assert not len(calls)


# --- appends without options take their answer themselves ---


class Lane:
    """As much of the HTTP/1 lane as a plain append needs."""

    def __init__(self) -> None:
        self.dirty: set[Any] = set()
        self.answers = Answers()
        self.answers.tick()
        self.handlers = self
        self.draining = False
        self.meter = self.access = None

    def answered(self, entry: Any, value: Response) -> None: ...


class Connection:
    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.closed = False


def plain(records: int = 1, *, return_seqs: bool = True) -> PlainAppend:
    deadline_ms = time.monotonic_ns() // 1_000_000 + 5_000
    return PlainAppend(Connection(Lane()), True, False, "t", records, return_seqs, time.perf_counter_ns(), deadline_ms)


def run_of(shard: int, *entries: PlainAppend) -> PlainRun:
    run = PlainRun(shard, b"t")
    for entry in entries:
        run.add(entry, 33 * entry.records, b"\x1e".join([b"1"] * entry.records))
    return run


def shown(entry: PlainAppend) -> tuple[int, dict[str, Any]]:
    assert entry.answer is not None, "not answered"
    head, _, body = entry.answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


def test_a_plain_append(calls: Calls, shards: list[Shard]) -> None:
    entry = plain(2)
    calls.send_plain(run_of(2, entry))
    calls.flush()
    [message] = shards[2].shard.drain()
    correlation, deadline_ms, request, batch, counts = messages.unpack_plain(message)
    assert (deadline_ms, request, counts) == (entry.deadline_ms, messages.Append("t", 2, 66), None)
    assert Columns(bytes(batch), count=2, ts=0).data() == [b"1", b"1"]
    shards[2].answer(messages.pack_appended(correlation, 5, 2, 6, True, False, 0, 0))
    calls.drain()
    status, content = shown(entry)
    assert (status, content["seqs"], content["head_seq"], content["created"]) == (201, [5, 6], 6, True)
    assert len(calls) == 0


def test_a_run_is_one_question_and_its_answer_is_shared_out(calls: Calls, shards: list[Shard]) -> None:
    entries = [plain(2), plain(1), plain(3, return_seqs=False)]
    before = submit(calls, drop(1))
    calls.send_plain(run_of(1, *entries))
    after = submit(calls, drop(1))
    first, message, last = shards[1].shard.drain()
    correlation, _, request, batch, counts = messages.unpack_plain(message)
    assert (request.count, counts) == (6, (2, 1, 3))
    assert len(Columns(bytes(batch), count=6, ts=0).data()) == 6
    shards[1].answer(messages.pack_appended(correlation, 10, 6, 15, False, False, 7, 0, 3))
    shards[1].dropped(messages.unpack(last).correlation, True)
    shards[1].dropped(messages.unpack(first).correlation, False)
    calls.drain()
    contents = [shown(entry)[1] for entry in entries]
    assert [(one["first_seq"], one["last_seq"], one["count"]) for one in contents] == [
        (10, 11, 2),
        (12, 12, 1),
        (13, 15, 3),
    ]
    assert [one.get("seqs") for one in contents] == [[10, 11], [12], None]
    assert all(one["head_seq"] == 15 for one in contents)
    assert (before.value.deleted, after.value.deleted) == (False, True)
    assert len(calls) == 0


def test_a_run_that_was_judged_one_by_one(calls: Calls, shards: list[Shard]) -> None:
    entries = [plain(1), plain(1), plain(1)]
    calls.send_plain(run_of(1, *entries))
    calls.flush()
    [message] = shards[1].shard.drain()
    correlation = messages.unpack_plain(message)[0]
    shards[1].answer(messages.pack_appended(correlation, 1, 1, 1, True, False, 0, 0))
    shards[1].answer(messages.pack_failure(Op.APPEND, correlation + 1, ApiError("topic_full", "full")))
    shards[1].answer(messages.pack_appended(correlation + 2, 2, 1, 2, False, False, 0, 0))
    calls.drain()
    assert [shown(entry)[0] for entry in entries] == [201, 422, 200]
    assert len(calls) == 0


def test_one_of_a_run_gave_up_waiting(calls: Calls, shards: list[Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    entries = [plain(2), plain(2)]
    entries[1].deadline_ms += 60_000
    calls.send_plain(run_of(0, *entries))
    calls.flush()
    [message] = shards[0].shard.drain()
    clock.pass_ms(10_000)
    calls.expire()
    assert shown(entries[0])[0] == 503
    shards[0].answer(messages.pack_appended(messages.unpack_plain(message)[0], 1, 4, 4, False, False, 0, 0, 2))
    calls.drain()
    status, content = shown(entries[1])
    assert (status, content["seqs"]) == (200, [3, 4])
    assert shown(entries[0])[0] == 503


def test_a_run_that_is_never_answered_is_forgotten(
    calls: Calls, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last of it has given up; what is said of it later is said to nobody."""
    told: list[int] = []
    calls.on_unasked = lambda shard, message: told.append(messages.unpack_correlation(message)[1])
    clock = Clock(monkeypatch)
    entries = [plain(), plain()]
    entries[1].deadline_ms += 60_000
    calls.send_plain(run_of(0, *entries))
    calls.flush()
    [message] = shards[0].shard.drain()
    clock.pass_ms(10_000)
    calls.expire()
    assert len(calls._runs[0]) == 1
    clock.pass_ms(60_000)
    calls.expire()
    assert calls._runs[0] == {}
    assert [shown(entry)[0] for entry in entries] == [503, 503]
    first = messages.unpack_plain(message)[0]
    shards[0].answer(messages.pack_appended(first, 1, 2, 2, False, False, 0, 0, 2))
    calls.drain()
    assert told == [first]
    assert [shown(entry)[0] for entry in entries] == [503, 503]


def test_a_client_that_left_is_not_answered(calls: Calls, shards: list[Shard]) -> None:
    entries = [plain(1), plain(1)]
    entries[0].connection.closed = True
    calls.send_plain(run_of(0, *entries))
    calls.flush()
    [message] = shards[0].shard.drain()
    shards[0].answer(messages.pack_appended(messages.unpack_plain(message)[0], 1, 2, 2, False, False, 0, 0, 2))
    calls.drain()
    assert entries[0].answer is None
    assert shown(entries[1])[1]["seqs"] == [2]


def test_plain_appends_end_like_all_others(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    late, gone, refused = plain(), plain(), plain()
    calls.send_plain(run_of(0, late))
    calls.send_plain(run_of(1, gone, plain()))
    calls.link_down(1)
    calls.send_plain(run_of(1, refused))
    clock.pass_ms(6_000)
    calls.expire()
    assert [shown(entry)[0] for entry in (late, gone, refused)] == [503, 503, 503]
    assert len(calls) == 0
    calls.link_up(1, Shard().gateway)
    calls.drain()


def test_a_plain_append_into_a_full_ring(calls: Calls) -> None:
    for _ in range(10_000):
        entries = [plain(50), plain(50)]
        calls.send_plain(run_of(0, *entries))
        if entries[0].answer is not None:
            break
    assert [shown(entry)[0] for entry in entries] == [429, 429]
    assert calls.refused == 2


# --- what is not a question and its answer ---


def test_what_nobody_asked_for_goes_to_whoever_wants_it(calls: Calls, shards: list[Shard]) -> None:
    told: list[tuple[int, int, int]] = []
    calls.on_unasked = lambda shard, message: told.append((shard, message[0], messages.unpack(message).correlation))
    sink = submit(calls, drop(1))
    [envelope] = shards[1].asked()
    push = messages.pack(Op.TOPIC_GONE, envelope.correlation, messages.TopicGone(5))
    shards[1].dropped(envelope.correlation, True)
    shards[1].answer(push)  # under the same correlation, behind its answer
    shards[2].answer(push)
    calls.drain()
    assert sink.value == messages.TopicDropped(True)
    assert told == [(1, Op.TOPIC_GONE, envelope.correlation), (2, Op.TOPIC_GONE, envelope.correlation)]


def test_answers_too_late_are_unasked(calls: Calls, shards: list[Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    calls.on_unasked = lambda shard, message: told.append(messages.unpack(message).correlation)
    clock = Clock(monkeypatch)
    late, abandoned = submit(calls, drop(0)), submit(calls, drop(0, timeout_ms=60_000))
    envelopes = shards[0].asked()
    clock.pass_ms(5_001)
    calls.expire()
    calls.abandon(abandoned)
    for envelope in envelopes:
        shards[0].dropped(envelope.correlation, True)
    calls.drain()
    assert told == [envelope.correlation for envelope in envelopes]
    assert late.value.status == 503
    assert abandoned.values == []


def test_a_push_and_answers_keep_their_order(calls: Calls, shards: list[Shard]) -> None:
    order: list[Any] = []
    calls.on_unasked = lambda shard, message: order.append(messages.decode_answer(message)[0].head_seq)
    sinks = [submit(calls, drop(0)) for _ in range(2)]
    for sink in sinks:
        sink.finish = order.append  # type: ignore[method-assign, assignment]
    first, second = shards[0].asked()
    writer = shards[0].shard.writer
    for message in (
        messages.pack(Op.TOPIC_GONE, 900, messages.TopicGone(1)),
        messages.pack(Op.DROP_TOPIC, first.correlation, messages.TopicDropped(True)),
        messages.pack(Op.TOPIC_GONE, 900, messages.TopicGone(2)),
        messages.pack(Op.DROP_TOPIC, second.correlation, messages.TopicDropped(False)),
        messages.pack(Op.TOPIC_GONE, 900, messages.TopicGone(3)),
    ):
        writer.send_always(message)
    shards[0].shard.flush()
    calls.drain()
    assert order == [1, messages.TopicDropped(True), 2, messages.TopicDropped(False), 3]


def test_telling_has_no_answer_and_is_never_refused(calls: Calls, shards: list[Shard]) -> None:
    for number in range(2_000):  # more than the ring and its outbox would take of questions
        calls.tell(0, messages.pack(Op.UNFOLLOW, number, messages.Unfollow(), bytes(100)))
    got: list[int] = []
    while len(got) < 2_000:
        calls.flush()
        got += [envelope.correlation for envelope in shards[0].asked()]
    assert got == list(range(2_000))
    assert len(calls) == 0
    calls.link_down(0)
    calls.tell(0, messages.pack(Op.UNFOLLOW, 1, messages.Unfollow()))  # lost, and nobody minds


def test_asking_says_under_which_correlation(calls: Calls, shards: list[Shard]) -> None:
    sink = Sink()
    correlation = calls.ask(drop(0), sink)
    calls.flush()
    assert [envelope.correlation for envelope in shards[0].asked()] == [correlation]
    calls.link_down(0)
    assert calls.ask(drop(0), sink) == 0
    assert len(sink.values) == 2


# --- an answer that is another question ---


def test_a_gather_may_end_in_another_call(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, Gather([drop(0), drop(1)], lambda answers: drop(2, name="next")))
    for shard in shards[:2]:
        assert sink.values == []
        [envelope] = shard.asked()
        shard.dropped(envelope.correlation, True)
        calls.drain()
    calls.flush()
    [envelope] = shards[2].asked()
    assert messages.decode_request(envelope.op, envelope.head).topic == "next"
    shards[2].dropped(envelope.correlation, False)
    calls.drain()
    assert sink.value == messages.TopicDropped(False)
    assert len(calls) == 0


def test_a_gather_may_end_in_another_gather(calls: Calls, shards: list[Shard]) -> None:
    inner = Gather([drop(1), drop(2)], lambda answers: Response(200, b"%d" % len(answers)))
    sink = submit(calls, Gather([drop(0)], lambda answers: inner))
    for at in (0, 2, 1):
        [envelope] = shards[at].asked()
        shards[at].dropped(envelope.correlation, True)
        calls.drain()
        calls.flush()
    assert sink.value.body == b"2"


def test_the_second_question_meets_a_shard_that_is_down(calls: Calls, shards: list[Shard]) -> None:
    calls.link_down(2)
    sink = submit(calls, Gather([drop(0)], lambda answers: drop(2)))
    [envelope] = shards[0].asked()
    shards[0].dropped(envelope.correlation, True)
    calls.drain()
    assert sink.value.status == 503
    assert len(calls) == 0


def test_the_shard_of_the_second_question_dies(calls: Calls, shards: list[Shard]) -> None:
    sink = submit(calls, Gather([drop(0)], lambda answers: drop(2)))
    [envelope] = shards[0].asked()
    shards[0].dropped(envelope.correlation, True)
    calls.drain()
    assert sink.values == []
    calls.link_down(2)
    assert sink.error["detail"]["outcome"] == "unknown"


def test_rendering_may_refuse(calls: Calls, shards: list[Shard]) -> None:
    def render(answers: list[Any]) -> Response:
        raise ApiError("topic_not_found", "no such topic")

    sink = submit(calls, Gather([drop(0), drop(1)], render))
    for shard in shards[:2]:
        [envelope] = shard.asked()
        shard.dropped(envelope.correlation, True)
    calls.drain()
    assert sink.value.status == 404
    assert sink.error["code"] == "topic_not_found"


def test_a_question_asked_while_answers_are_handed_out(calls: Calls, shards: list[Shard]) -> None:
    """A sink may ask again at once, of the shard whose answers are being drained or of one that is down."""
    later = Sink()
    calls.link_down(2)

    class Eager(Sink):
        def finish(self, value: Any) -> None:
            super().finish(value)
            calls.ask(drop(0), later)
            calls.ask(drop(2), later)

    eager = Eager()
    calls.ask(drop(0), eager)
    calls.flush()
    [envelope] = shards[0].asked()
    shards[0].dropped(envelope.correlation, True)
    calls.drain()
    assert eager.value == messages.TopicDropped(True)
    assert [value.status for value in later.values] == [503]
    calls.flush()
    [envelope] = shards[0].asked()
    calls.link_down(0)
    assert [value.status for value in later.values] == [503, 503]
    assert len(calls) == 0


# --- a shard that a reload replaces ---


@pytest.fixture
def replaced(shards: list[Shard]) -> Any:
    """Calls to shard 0, whose state the test says, and its successor."""
    states = {0: State.READY}
    calls = Calls(shards=3, timeout_ms=5_000, state_of=lambda peer: states.get(peer, State.READY))
    for index, shard in enumerate(shards):
        calls.link_up(index, shard.gateway)
    successor = Shard()
    yield calls, successor, states
    for fd in successor.fds:
        os.close(fd)


def test_only_what_would_wait_anyway_ends_with_its_clients_input(replaced: Any, shards: list[Shard]) -> None:
    calls, successor, _ = replaced
    calls.hold(0)
    calls.link_down(0)
    poll, write = submit(calls, drop(0, timeout_ms=1_000)), submit(calls, drop(0))
    calls.leave(poll)
    calls.leave(write)
    assert poll.error["code"] == "request_timeout"
    calls.link_up(0, successor.gateway)
    calls.release(time.monotonic_ns())
    calls.flush()
    assert [asked.op for asked in successor.asked()] == [Op.DROP_TOPIC]


def test_what_comes_while_a_shard_is_replaced_waits_for_the_next(replaced: Any, shards: list[Shard]) -> None:
    calls, successor, states = replaced
    before = submit(calls, drop(0, name="before"))
    calls.hold(0)
    assert calls.has_sent_all(0)
    during = submit(calls, drop(0, name="during"))
    entries = [plain(), plain(2)]
    calls.send_plain(run_of(0, *entries))
    internal = Sink()
    assert calls.ask(drop(0), internal) == 0
    assert internal.error["code"] == "shard_unavailable"
    assert calls.reachable(0)
    assert len(calls) == 3  # one is out, two wait
    [asked] = shards[0].asked()
    shards[0].dropped(asked.correlation, True)
    states[0] = State.STARTING
    calls.link_down(0)  # its answer is in the ring
    assert before.value == messages.TopicDropped(True)
    assert during.values == []
    calls.release(time.monotonic_ns())
    assert calls.reachable(0)
    calls.link_up(0, successor.gateway)
    calls.release(time.monotonic_ns())
    calls.flush()
    first, second = successor.asked()
    assert messages.decode_request(first.op, first.head) == messages.DropTopic("during", False)
    assert second.op == Op.APPEND_PLAIN
    successor.dropped(first.correlation, True)
    calls.drain()
    assert during.value == messages.TopicDropped(True)
    states[0] = State.READY
    calls.release(time.monotonic_ns())
    assert not calls.holding.busy


def test_what_was_handed_over_is_never_kept_back_again(replaced: Any, shards: list[Shard]) -> None:
    calls, successor, _ = replaced
    out = submit(calls, drop(0))
    calls.hold(0)
    calls.link_down(0)
    assert out.error["detail"]["outcome"] == "unknown"
    calls.link_up(0, successor.gateway)
    calls.release(time.monotonic_ns())
    calls.flush()
    assert successor.asked() == []


def test_a_shard_that_does_not_come_back_is_not_waited_for(replaced: Any, shards: list[Shard]) -> None:
    calls, _, states = replaced
    calls.hold(0)
    waiting = submit(calls, drop(0))
    states[0] = State.FAILED
    calls.link_down(0)
    calls.release(time.monotonic_ns())
    assert waiting.error["code"] == "shard_unavailable"
    assert "nothing was done" in waiting.error["message"]
    assert not calls.reachable(0)
    assert submit(calls, drop(0)).error["code"] == "shard_unavailable"
    assert len(calls) == 0


# --- a round's share of time ---


def answer_all(shard: Shard) -> None:
    for envelope in shard.asked():
        shard.dropped(envelope.correlation, True)


def test_when_the_time_is_up_answers_wait_for_the_next_round(calls: Calls, shards: list[Shard]) -> None:
    """One is taken whatever the clock says; peers take turns; each keeps its order."""
    taken: list[tuple[int, int]] = []

    class Noting(Sink):
        def __init__(self, shard: int, number: int) -> None:
            super().__init__()
            self.place = shard, number

        def finish(self, value: Any) -> None:
            taken.append(self.place)

    for shard in range(3):
        for number in range(3):
            calls.submit(drop(shard), Noting(shard, number))
    calls.flush()
    for each in shards:
        answer_all(each)
    for round_number in range(1, 10):
        assert calls.has_answers()
        calls.drain(0)
        assert len(taken) == round_number
    assert sorted(taken) == [(shard, number) for shard in range(3) for number in range(3)]
    assert taken[:3] == [(0, 0), (1, 0), (2, 0)]
    for shard in range(3):
        assert [number for which, number in taken if which == shard] == [0, 1, 2]
    assert not calls.has_answers()
    assert len(calls) == 0


def test_what_waits_for_the_next_round_is_answered_when_its_shard_goes(calls: Calls, shards: list[Shard]) -> None:
    sinks = [submit(calls, drop(1)) for _ in range(3)]
    answer_all(shards[1])
    calls.drain()
    late = [submit(calls, drop(1)) for _ in range(3)]
    answer_all(shards[1])
    while not late[0].values:
        calls.drain(0)
    last = submit(calls, drop(1))
    answer_all(shards[1])
    unknown = submit(calls, drop(1))
    calls.link_down(1)
    assert [sink.value.deleted for sink in (*sinks, *late, last)] == [True] * 7
    assert unknown.error["code"] == "shard_unavailable"
    assert not calls.has_answers()
