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
from topics.gateway import calls as calls_module
from topics.gateway.calls import Calls
from topics.gateway.exchange import Call, Gather, Response
from topics.shm.doorbell import Doorbell
from topics.shm.layout import link_bytes
from topics.shm.ring import format_link

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

    @property
    def value(self) -> Any:
        assert len(self.values) == 1, "a call ends exactly once"
        return self.values[0]

    @property
    def error(self) -> dict[str, Any]:
        assert isinstance(self.value, Response)
        found: dict[str, Any] = json.loads(self.value.body)["error"]
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
        monkeypatch.setattr(calls_module.time, "monotonic_ns", lambda: self.now_ns)

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


# --- appends without options take their answer themselves ---


class Plain:
    def __init__(self) -> None:
        self.deadline_ms = time.monotonic_ns() // 1_000_000 + 5_000
        self.taken: list[bytes] = []
        self.finished: list[Response] = []

    def take(self, message: bytes) -> None:
        self.taken.append(bytes(message))

    def finish(self, value: Response) -> None:
        self.finished.append(value)


def test_a_plain_append(calls: Calls, shards: list[Shard]) -> None:
    entry = Plain()
    calls.send_plain(2, entry, b"t", 1, 33, b"batch")
    calls.flush()
    [message] = shards[2].shard.drain()
    correlation, deadline_ms, request, batch = messages.unpack_plain(message)
    assert (deadline_ms, request, bytes(batch)) == (entry.deadline_ms, messages.Append("t", 1, 33), b"batch")
    answer = messages.pack_appended(correlation, 1, 1, 1, False, False, 0, 0)
    shards[2].answer(answer)
    calls.drain()
    assert (entry.taken, entry.finished) == ([answer], [])
    assert len(calls) == 0


def test_plain_appends_end_like_all_others(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    late, gone, refused = Plain(), Plain(), Plain()
    calls.send_plain(0, late, b"t", 1, 33, b"batch")
    calls.send_plain(1, gone, b"t", 1, 33, b"batch")
    calls.link_down(1)
    calls.send_plain(1, refused, b"t", 1, 33, b"batch")
    clock.pass_ms(6_000)
    calls.expire()
    for entry in (late, gone, refused):
        assert [response.status for response in entry.finished] == [503]
        assert entry.taken == []


def test_a_plain_append_into_a_full_ring(calls: Calls) -> None:
    last = Plain()
    for _ in range(10_000):
        last = Plain()
        calls.send_plain(0, last, b"t", 1, 33, bytes(500))
        if last.finished:
            break
    assert [response.status for response in last.finished] == [429]
