"""Scrapes that are made together: over a real link whose other end the test plays, with a clock moved by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from delivery import Bell, Sink, join

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.gateway.api.types import Request, Response, Wait
from topics.gateway.calls import Calls
from topics.gateway.http1.response import Answers
from topics.gateway.metrics.page import MetricsHandlers
from topics.gateway.metrics.scrapes import Scrapes
from topics.keys import Key, Scope
from topics.shm.counters import Board, Word

MS = 1_000_000


class Scene:
    def __init__(self) -> None:
        self.board = Board.create(["supervisor", "gateway-0", "shard-0"])
        self.now_ns = 0
        self.refused: list[str] = []
        self.calls = Calls(shards=1, timeout_ms=5_000)
        ours, self.shard = join(Bell(), Bell())
        self.calls.link_up(0, ours)
        self.metrics = MetricsHandlers(self.board, shards=1)
        self.scrapes = Scrapes(self.metrics, self.calls, clock=lambda: self.now_ns, refused=self.refused.append)
        self.asked: list[messages.Envelope] = []

    def ask(self, *, accept: bytes = b"", key: Key | None = None, **query: str) -> Sink:
        request = Request("", 0, query, b"", None, 0, key=key)
        request.headers = {b"accept": accept} if accept else {}
        sink = Sink()
        outcome = self.scrapes.get(request)
        assert isinstance(outcome, Wait)
        self.calls.submit(outcome, sink)
        return sink

    def wave(self) -> int:
        """Whatever was asked of the shard is answered; how much that was."""
        self.calls.flush()
        asked = [messages.unpack(message) for message in self.shard.drain()]
        self.asked += asked
        for envelope in asked:
            head = messages.decode_request(envelope.op, envelope.head)
            rows = [messages.TopicRow(f"{head.prefix}x", 9, 2, 8, 800, False, 0, 0)]
            answer = messages.TopicsListed(rows, False)
            self.shard.writer.send(messages.pack(Op.LIST_TOPICS, envelope.correlation, answer))
        self.shard.flush()
        self.calls.drain()
        return len(asked)

    def write(self, topics: int) -> None:
        self.board.row("shard-0").set(Word.TOPICS, topics)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def text(sink: Sink) -> str:
    assert isinstance(sink.value, Response)
    return (bytes(sink.value.body) + sink.value.tail).decode()


def topics(sink: Sink) -> int:
    [line] = [line for line in text(sink).splitlines() if line.startswith("topics_topics ")]
    return int(float(line.split()[1]))


def test_the_first_is_made_at_once(scene: Scene) -> None:
    sink = scene.ask()
    assert scene.wave() == 1
    assert sink.value.status == 200
    assert scene.scrapes.waiting == 0


def test_who_comes_while_one_is_made_waits_for_the_next(scene: Scene) -> None:
    """Its answer shows what was written before it came."""
    first = scene.ask()
    scene.write(5)
    later = [scene.ask() for _ in range(3)]
    scene.write(7)
    assert scene.wave() == 1
    assert topics(first) == 7
    assert [sink.values for sink in later] == [[], [], []]
    scene.write(8)
    scene.now_ns += limits.SCRAPE_MS * MS
    scene.scrapes.step()
    assert scene.wave() == 1, "one for all three"
    assert [topics(sink) for sink in later] == [8, 8, 8]
    assert later[0].value is later[1].value


def test_one_after_the_other_each_sees_what_was_written(scene: Scene) -> None:
    for written in range(20):
        scene.write(written)
        sink = scene.ask()
        if not sink.values and (due := scene.scrapes.next_due_ns) is not None:
            assert due - scene.now_ns <= limits.SCRAPE_MS * MS
            scene.now_ns = due
            scene.scrapes.step()
        scene.wave()
        assert topics(sink) == written


def test_a_crowd_is_answered_once_a_second(scene: Scene) -> None:
    made = 0
    sinks: list[Sink] = []
    for _ in range(100):  # five seconds
        sinks += [scene.ask() for _ in range(10) if scene.scrapes.waiting < 100]
        scene.scrapes.step()
        made += scene.wave()
        scene.now_ns += 50 * MS
    assert 5 <= made <= 8
    scene.now_ns += 2_000 * MS
    scene.scrapes.step()
    scene.wave()
    assert all(len(sink.values) == 1 for sink in sinks)
    assert scene.scrapes.next_due_ns is None


def test_options_have_answers_of_their_own(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the page is made once for all who want the same form of it."""
    made: list[bool] = []
    families = scene.metrics._families

    def count(cut: bool) -> Any:
        made.append(cut)
        return families(cut)

    monkeypatch.setattr(scene.metrics, "_families", count)
    scene.ask()
    scene.wave()
    made.clear()
    key = Key(b"", int(Scope.READ), ("tenant:",))
    plain, again, jobs = scene.ask(), scene.ask(), scene.ask(topic="jobs*")
    tenant, as_json = scene.ask(key=key), scene.ask(accept=b"application/json")
    scene.now_ns += 1_000 * MS
    scene.scrapes.step()
    assert scene.wave() == 4
    assert plain.value is again.value
    assert 'topic="jobsx"' in text(jobs)
    assert 'topic="jobsx"' not in text(plain)
    heads = [messages.decode_request(envelope.op, envelope.head) for envelope in scene.asked[1:]]
    assert [(head.prefix, head.prefixes) for head in heads] == [("", ()), ("jobs", ()), ("", ("tenant:",)), ("", ())]
    assert tenant.value is not plain.value
    assert json.loads(text(as_json))["metrics"]["topics_topics"] == 0
    assert len(made) == 2, "text and JSON"


def test_so_many_wait_and_no_more(scene: Scene) -> None:
    sinks = [scene.ask() for _ in range(limits.SCRAPES_WAITING)]
    with pytest.raises(ApiError) as refused:
        scene.ask()
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    assert scene.refused == ["scrapes"]
    scene.wave()
    scene.now_ns += 1_000 * MS
    scene.scrapes.step()
    scene.wave()
    assert all(len(sink.values) == 1 for sink in sinks)
    assert scene.scrapes.waiting == 0
    scene.ask()


def test_a_pattern_that_is_none_is_refused_at_once(scene: Scene) -> None:
    scene.ask()
    with pytest.raises(ApiError) as refused:
        scene.ask(topic="a")
    assert refused.value.code == "invalid_request"


def test_one_that_fails_takes_no_other_with_it(scene: Scene) -> None:
    class Broken(Sink):
        aborted = False

        def finish(self, value: Any) -> None:
            raise OSError

        def abort(self) -> None:
            self.aborted = True

    faults: list[Exception] = []
    scene.calls.on_fault = lambda error, id: faults.append(error)
    scene.ask()
    scene.wave()
    before, broken, after = scene.ask(), Broken(), Sink()
    for sink in (broken, after):
        scene.calls.submit(scene.scrapes.get(Request("", 0, {}, b"", None, 0)), sink)
    scene.now_ns += 1_000 * MS
    scene.scrapes.step()
    scene.wave()
    assert (before.value.status, after.value.status, broken.aborted, len(faults)) == (200, 200, True, 1)
    assert scene.scrapes.waiting == 0


def test_a_shard_that_does_not_answer_keeps_the_next_ones_for_a_second(scene: Scene) -> None:
    stuck = scene.ask()
    scene.now_ns += 900 * MS
    second = scene.ask()
    assert len(scene.calls) == 1
    scene.now_ns = scene.scrapes.next_due_ns or 0
    assert scene.now_ns == 1_000 * MS
    scene.scrapes.step()
    assert len(scene.calls) == 2
    scene.wave()
    assert (stuck.value.status, second.value.status) == (200, 200)


def test_when_the_gateway_stops_none_is_left_waiting(scene: Scene) -> None:
    first, second = scene.ask(), scene.ask()
    scene.scrapes.hurry()
    third = scene.ask()
    scene.wave()
    assert [sink.value.status for sink in (first, second, third)] == [200, 200, 200]


def test_an_answer_for_many_is_compressed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[bytes] = []

    def pack(body: bytes) -> bytes:
        packed.append(body)
        return b"small"

    monkeypatch.setattr("topics.gateway.http1.response.gzip", pack)
    response, answers = Response(200, b"x" * limits.GZIP_MIN_BYTES, tail=b"y"), Answers()
    answers.tick()
    sent = {answers.encode(response, keep_alive=True, gzipped=True, bodiless=False, id=1) for _ in range(3)}
    assert len(sent) == 1
    assert len(packed) == 1
