"""A queue's topic as the coordinator sees it: which jobs it is given, when an ack is an ack, the leases log beside it,
and what it is told without asking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, Shard, error_of, examples
from test_engine_faults import FaultyDisk

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.storage import columns
from topics.storage.config import TopicConfig
from topics.storage.format import RECORD_OVERHEAD
from topics.storage.leases import CHECKPOINT_TAG, JobState, LeaseEvent, decode_event, encode_event, log_id, log_name
from topics.walshard.jobs import removals
from topics.walshard.topic.render import render

CLASSES = ["ephemeral", "memory", "disk", "fsync"]
LOG = log_name("q")


class Coordinator:
    """Whoever asks the shard for jobs. Everything that comes is kept, pushes too."""

    outbox_bytes = 0
    position = 0

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.messages: list[tuple[Op, int, Any, bytes]] = []
        self._next = 1

    def send_always(self, message: bytes) -> None:
        correlation = messages.unpack(message).correlation
        try:
            head, body = messages.decode_answer(message)
            self.messages.append((Op(message[0]), correlation, head, bytes(body)))
        except ApiError as error:
            self.messages.append((Op(message[0]), correlation, error, b""))

    def wake_after(self, position: int) -> bool:
        return True

    def send(self, op: Op, head: Any, body: bytes = b"", *, correlation: int | None = None) -> int:
        if correlation is None:
            correlation, self._next = self._next, self._next + 1
        self.shard.engine.handle(messages.pack(op, correlation, head, body), self)
        return correlation

    def answers(self, correlation: int) -> list[tuple[Any, bytes]]:
        return [(head, body) for _, known, head, body in self.messages if known == correlation]

    def ask(self, op: Op, head: Any, body: bytes = b"") -> tuple[Any, bytes]:
        sent = self.send(op, head, body)
        self.shard.settle()
        answers = self.answers(sent)
        assert len(answers) == 1
        if isinstance(answers[0][0], ApiError):
            raise answers[0][0]
        return answers[0]

    def pushed(self) -> list[tuple[Op, Any]]:
        """What came without being asked for, since the last look."""
        pushes = (Op.QUEUE_CHANGED, Op.JOBS_REMOVED, Op.TOPIC_GONE)
        found = [(op, head) for op, _, head, _ in self.messages if op in pushes]
        self.messages = [each for each in self.messages if each[0] not in pushes]
        return found

    # --- questions ---

    def id_of(self, topic: str = "q") -> int:
        return self.shard.topic(topic).id

    def open(self, topic: str = "q") -> messages.QueueOpened:
        answer: messages.QueueOpened = self.ask(Op.OPEN_QUEUE, messages.OpenQueue(topic))[0]
        return answer

    def take(
        self,
        limit: int = 100,
        *,
        wanted: list[int] | None = None,
        after: int = 0,
        held: list[int] | None = None,
        max_bytes: int = 2**20,
    ) -> tuple[messages.JobsTaken, list[dict[str, Any]]]:
        head = messages.TakeJobs("q", self.id_of(), wanted or [], after, held or [], limit, max_bytes)
        taken, body = self.ask(Op.TAKE_JOBS, head)
        assert json.loads(b"[" + body + b"]") == _pieces(taken, body)
        return taken, _pieces(taken, body)

    def check(self, seqs: list[int]) -> messages.JobsChecked:
        answer: messages.JobsChecked = self.ask(Op.CHECK_JOBS, messages.CheckJobs("q", self.id_of(), seqs))[0]
        return answer

    def send_complete(self, seqs: list[int], events: list[LeaseEvent] | None = None, *, durable: bool = False) -> int:
        body, size = _batch(events or [])
        head = messages.CompleteJobs("q", self.id_of(), seqs, durable, len(events or []), size)
        return self.send(Op.COMPLETE_JOBS, head, body)

    def complete(self, seqs: list[int], events: list[LeaseEvent] | None = None, **more: Any) -> messages.JobsCompleted:
        sent = self.send_complete(seqs, events, **more)
        self.shard.settle()
        [(answer, _)] = self.answers(sent)
        if isinstance(answer, ApiError):
            raise answer
        assert isinstance(answer, messages.JobsCompleted)
        return answer

    def send_log(self, events: list[LeaseEvent], *, durable: bool = False, quiet: bool = False) -> int:
        body, size = _batch(events)
        checkpoint = any(event.event == "checkpoint" for event in events)
        head = messages.LogLeases("q", self.id_of(), durable, len(events), size, checkpoint)
        return self.send(Op.LOG_LEASES, head, body, correlation=0 if quiet else None)

    def log(self, events: list[LeaseEvent], **more: Any) -> None:
        self.send_log(events, quiet=True, **more)
        self.shard.settle()


def _pieces(taken: messages.JobsTaken, body: bytes) -> list[dict[str, Any]]:
    starts = [0, *taken.ends[:-1]] if taken.ends else []
    return [json.loads(body[start : end - 1]) for start, end in zip(starts, taken.ends, strict=True)]


def _batch(events: list[LeaseEvent]) -> tuple[bytes, int]:
    if not events:
        return b"", 0
    encoded = [encode_event(event) for event in events]
    tags = [CHECKPOINT_TAG if event.event == "checkpoint" else None for event in events]
    size = sum(map(len, encoded)) + len(encoded) * RECORD_OVERHEAD
    return columns.pack(encoded, tags=tags if any(tags) else None), size


def claimed(*seqs: int, node: str = "a") -> LeaseEvent:
    return LeaseEvent("claimed", node, list(seqs), [100 + seq for seq in seqs], 5_000)


def acked(*seqs: int) -> LeaseEvent:
    return LeaseEvent("acked", "a", list(seqs), [100 + seq for seq in seqs])


def checkpoint(*seqs: int) -> LeaseEvent:
    return LeaseEvent("checkpoint", jobs=[JobState(seq, 1, "a", 100 + seq, 5_000, 1) for seq in seqs])


def logged(shard: Shard, topic: str = "q") -> list[LeaseEvent]:
    name = log_name(topic)
    if name not in shard.engine.topics:
        return []
    return [decode_event(stored.record.data) for stored in shard.everything(name)]


def config(durability: str = "disk", **more: Any) -> TopicConfig:
    return TopicConfig(type="queue", durability=durability, durable=durability == "fsync", **more)  # type: ignore[arg-type]


def numbers(first: int, count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(first, first + count)]


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path, segment_max_events=8)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Shard, FaultyDisk]:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 2_000)
    disk = FaultyDisk()
    return Shard(tmp_path, disk=disk, wal_file_bytes=16_384), disk


# --- handing out -------------------------------------------------------------------------------------


def test_fresh_jobs_in_order_up_to_the_limit(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 3))
    shard.append("q", numbers(4, 3))
    queue = Coordinator(shard)
    taken, jobs = queue.take(4)
    assert (taken.seqs, taken.wanted, taken.gone) == ([1, 2, 3, 4], 0, [])
    assert (taken.at, taken.end, taken.live) == (4, False, 6)
    assert [(job["$seq"], job["data"]) for job in jobs] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    taken, _ = queue.take(4, after=taken.at)
    assert (taken.seqs, taken.at, taken.end) == ([5, 6], 6, True)
    taken, _ = queue.take(4, after=taken.at)
    assert (taken.seqs, taken.at, taken.end) == ([], 6, True)


@pytest.mark.parametrize("limit", range(1, 8))
def test_the_end_is_known_with_the_last_job(shard: Shard, limit: int) -> None:
    """Nobody has to ask once more only to hear that there is nothing."""
    shard.put("q", config())
    shard.append("q", numbers(1, 5))
    taken, _ = Coordinator(shard).take(limit)
    assert taken.end == (limit >= 5)


def test_a_job_is_shown_as_readers_see_it(shard: Shard) -> None:
    shard.put("q", config())
    record = Record(b'{"a": [1,  2]}', tag="t", node="n", meta=b'{"m":  1e2}')
    shard.append("q", [record, Record(b"null")])
    queue = Coordinator(shard)
    _, body = queue.ask(Op.TAKE_JOBS, messages.TakeJobs("q", queue.id_of(), [], 0, [], 5, 1_000))
    assert b'"data":{"a": [1,  2]}' in body, "verbatim"
    assert b'"meta":{"m":  1e2}' in body
    job = json.loads(b"[" + body + b"]")[0]
    assert (job["$tag"], job["$node"], job["$ts"]) == ("t", "n", shard.clock.now_ms())


def test_wanted_ones_come_first_whatever_their_place(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 6))
    queue = Coordinator(shard)
    taken, jobs = queue.take(4, wanted=[2, 5], after=0, held=[2, 5])
    assert (taken.seqs, taken.wanted) == ([2, 5, 1, 3], 2)
    assert [job["data"] for job in jobs] == [2, 5, 1, 3]
    assert (taken.at, taken.end) == (3, False)


def test_wanted_ones_that_are_gone_give_their_place_to_fresh_ones(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 2, tag="old"))
    shard.append("q", numbers(3, 4))
    shard.delete("q", tag="old")
    taken, _ = Coordinator(shard).take(3, wanted=[1, 2, 3], after=3)
    assert (taken.seqs, taken.wanted, taken.gone) == ([3, 4, 5], 1, [1, 2])
    taken, _ = Coordinator(shard).take(3, wanted=[0, 3, 99], after=6)
    assert (taken.seqs, taken.gone, taken.end) == ([3], [0, 99], True)


def test_the_cursor_passes_held_jobs(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 6))
    taken, _ = Coordinator(shard).take(2, held=[1, 2, 4, 5, 6])
    assert (taken.seqs, taken.at, taken.end) == ([3], 6, True)
    taken, _ = Coordinator(shard).take(1, held=[4, 5])
    assert (taken.seqs, taken.at, taken.end) == ([1], 1, False)


@pytest.mark.parametrize("most", [1, 100, 150, 151, 152, 10_000])
def test_bytes_bound_a_pass_but_for_its_first_job(shard: Shard, most: int) -> None:
    shard.put("q", config())
    shard.append("q", [Record(b'"%b"' % (b"x" * 100)) for _ in range(5)])
    queue = Coordinator(shard)
    _, body = queue.ask(Op.TAKE_JOBS, messages.TakeJobs("q", queue.id_of(), [], 0, [], 1, 2**20))
    one = len(body)
    for wanted in ([], [2, 4]):
        taken, jobs = queue.take(5, wanted=wanted, max_bytes=most, held=wanted)
        sizes = [end - start - 1 for start, end in zip([0, *taken.ends], taken.ends, strict=False)]
        assert len(jobs) == max(1, min(5, most // one))
        assert sum(sizes) <= max(most, one)
        assert taken.end == (len(jobs) == 5)
        assert taken.seqs[:2] == (wanted or [1, 2])[: len(taken.seqs)]


def test_a_job_that_is_too_large_for_what_is_left_waits(shard: Shard) -> None:
    """The cursor stays before it: the next pass begins there."""
    shard.put("q", config())
    shard.append("q", [Record(b"1"), Record(b'"%b"' % (b"x" * 1_000)), Record(b"3")])
    queue = Coordinator(shard)
    taken, _ = queue.take(3, max_bytes=500)
    assert (taken.seqs, taken.at, taken.end) == ([1], 1, False)
    taken, _ = queue.take(3, after=1, max_bytes=500)
    assert (taken.seqs, taken.at, taken.end) == ([2], 2, False)
    taken, _ = queue.take(3, wanted=[1, 2, 3], after=3, max_bytes=500)
    assert (taken.seqs, taken.gone) == ([1], [])


def test_what_expired_is_not_given(shard: Shard) -> None:
    shard.put("q", config(ttl_ms=1_000))
    shard.append("q", numbers(1, 2))
    shard.wall.pass_ms(600)
    shard.append("q", numbers(3, 2))
    queue = Coordinator(shard)
    before, _ = queue.take()
    shard.wall.pass_ms(600)
    taken, _ = queue.take(wanted=[1, 3], held=[1, 3])
    assert (taken.seqs, taken.gone) == ([3, 4], [1])
    assert taken.removals == before.removals + 2


def test_another_topic_of_the_same_name_is_another(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 2))
    queue = Coordinator(shard)
    old = queue.id_of()
    shard.drop("q")
    requests: list[tuple[Op, Any]] = [
        (Op.TAKE_JOBS, messages.TakeJobs("q", old, [1], 0, [], 1, 100)),
        (Op.CHECK_JOBS, messages.CheckJobs("q", old, [1])),
        (Op.COMPLETE_JOBS, messages.CompleteJobs("q", old, [1], False, 0, 0)),
        (Op.LOG_LEASES, messages.LogLeases("q", old, False, 0, 0, False)),
    ]
    for again in (False, True):
        if again:
            shard.put("q", config())
            shard.append("q", numbers(1, 2))
        for op, head in requests:
            assert error_of(lambda op=op, head=head: queue.ask(op, head)).code == "topic_not_found"
    assert shard.report("q").count == 2
    assert logged(shard) == []


_seqs = st.lists(st.integers(1, 30), max_size=8, unique=True).map(sorted)


@examples(60)
@given(
    batches=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    deleted=_seqs,
    wanted=_seqs,
    held=_seqs,
    after=st.integers(0, 30),
    limit=st.integers(1, 12),
    most=st.sampled_from([1, 60, 200, 10_000]),
    moved=st.sampled_from(["", "flush", "restart", "flush restart"]),
    evicted=st.integers(0, 5),
)
def test_any_taking(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[int],
    deleted: list[int],
    wanted: list[int],
    held: list[int],
    after: int,
    limit: int,
    most: int,
    moved: str,
    evicted: int,
) -> None:
    """Against a list: whatever was deleted, evicted, moved to segments, or read again after a restart."""
    shard = Shard(tmp_path_factory.mktemp("taking"), segment_max_events=5)
    shard.put("q", config())
    at = 0
    for count in batches:
        shard.append("q", numbers(at + 1, count))
        at += count
    queue = Coordinator(shard)
    alive = [seq for seq in range(1, at + 1) if seq not in deleted]
    if "flush" in moved:
        shard.flush("q")
    queue.complete([seq for seq in deleted if seq <= at])
    if evicted:
        shard.put("q", config(cap_records=max(1, len(alive) - evicted)))
        alive = alive[-max(1, len(alive) - evicted) :]
        assert shard.report("q").count == len(alive)
    if "restart" in moved:
        shard.restart()
        queue = Coordinator(shard)
    wanted = wanted[:limit]
    taken, jobs = queue.take(limit, wanted=wanted, after=after, held=sorted({*held, *wanted}), max_bytes=most)
    assert taken.gone == [seq for seq in wanted if seq not in alive]
    order = [seq for seq in wanted if seq in alive]
    fresh = [seq for seq in alive if seq > after and seq not in held and seq not in wanted]
    expected = [*order, *fresh][:limit]
    assert taken.seqs == expected[: len(taken.seqs)]
    assert taken.seqs or not expected
    assert [job["$seq"] for job in jobs] == [job["data"] for job in jobs] == taken.seqs
    if most == 10_000:
        assert taken.seqs == expected
    left = [seq for seq in fresh if seq > taken.at]
    skipped = [seq for seq in fresh if seq <= taken.at and seq not in taken.seqs]
    assert skipped == [], "the cursor passes no job that was not given"
    assert not taken.end or not left
    assert taken.live == len(alive)
    shard.crash()


def test_a_batch_that_goes_out_job_by_job_is_made_once(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    from topics.walshard import jobs as module

    made = []

    def counted(row: Any, *args: Any, **more: Any) -> Any:
        made.append(row)
        return render(row, *args, **more)

    monkeypatch.setattr(module, "render", counted)
    shard.put("q", config())
    shard.append("q", numbers(1, 50))
    queue = Coordinator(shard)
    for seq in range(1, 51):
        taken, jobs = queue.take(1, after=seq - 1)
        assert [job["data"] for job in jobs] == [seq]
        queue.complete(taken.seqs)
    assert len(made) == 1


def test_what_is_kept_for_going_out_has_a_bound(shard: Shard) -> None:
    shard.put("q", config())
    for _ in range(12):
        shard.append("q", [Record(b'"%b"' % (b"x" * 500_000)) for _ in range(2)])
    queue = Coordinator(shard)
    for after in range(0, 24, 2):
        queue.take(1, after=after)
    kept = shard.engine.jobs._rendered
    assert shard.engine.jobs._rendered_bytes == sum(each.weight for _, each in kept.values())
    assert shard.engine.jobs._rendered_bytes <= 8 * limits.MIB
    assert len(kept) > 1


# --- done --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("leases_durable", [False, True])
def test_an_ack_is_a_delete(shard: Shard, durability: str, leases_durable: bool) -> None:
    shard.put("q", config(durability))
    shard.append("q", numbers(1, 4))
    queue = Coordinator(shard)
    before = removals(shard.topic("q"))
    done = queue.complete([2, 4, 99], [acked(2, 4)], durable=leases_durable)
    assert (done.live, done.removals) == (2, before), "a removal by an ack is none that anybody has to look for"
    assert [stored.seq for stored in shard.everything("q")] == [1, 3]
    assert logged(shard) == [acked(2, 4)]
    again = queue.complete([2, 4], [acked(2, 4)], durable=leases_durable)
    assert (again.live, again.removals) == (2, before)
    shard.restart()
    expected = [] if durability == "ephemeral" else [1, 3]
    assert [stored.seq for stored in shard.everything("q")] == expected
    assert logged(shard) == [acked(2, 4), acked(2, 4)]
    assert shard.append("q", numbers(5, 1)).first_seq > 4, "no seq is given twice"


@pytest.mark.parametrize("durability", CLASSES)
def test_when_an_ack_is_answered(shard: Shard, durability: str) -> None:
    """At once; only where the topic promises the platter, after the sync."""
    shard.put("q", config(durability))
    shard.append("q", numbers(1, 4))
    shard.sync()
    queue = Coordinator(shard)
    sent = queue.send_complete([1, 2], [acked(1, 2)])
    assert bool(queue.answers(sent)) == (durability != "fsync")
    report = shard.answer(shard.send(Op.GET_TOPIC, messages.GetTopic("q", False)))
    assert (report.count, report.completing) == (2, 2 if durability == "fsync" else 0)
    taken = queue.send(Op.TAKE_JOBS, messages.TakeJobs("q", queue.id_of(), [], 0, [], 9, 1_000))
    [(found, _)] = queue.answers(taken)
    assert found.seqs == [3, 4], "gone for everybody at once"
    assert found.live == (4 if durability == "fsync" else 2)
    shard.settle()
    [(done, _)] = queue.answers(sent)
    assert (done.live, done.fsync_us > 0) == (2, durability == "fsync")
    assert shard.report("q").completing == 0


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_an_ack_and_its_event_are_one_write(faulty: tuple[Shard, FaultyDisk], durability: str) -> None:
    shard, disk = faulty
    shard.put("q", config(durability))
    shard.append("q", numbers(1, 4))
    queue = Coordinator(shard)
    queue.complete([1], [acked(1)])
    disk.calls.clear()
    queue.complete([2, 3], [claimed(4), acked(2, 3)])
    assert disk.calls.count("write") == 1


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("partial", [0.0, 0.6, 1.0])
def test_an_ack_that_can_not_be_written_has_not_happened(
    faulty: tuple[Shard, FaultyDisk], durability: str, fault: str, partial: float
) -> None:
    shard, disk = faulty
    shard.put("q", config(durability))
    shard.append("q", numbers(1, 4))
    queue = Coordinator(shard)
    queue.complete([1], [acked(1)])
    before = removals(shard.topic("q"))
    getattr(disk, fault)()
    disk.partial = partial
    error = error_of(lambda: queue.complete([2, 3], [acked(2, 3)]))
    assert error.code == ("storage_full" if fault == "full" else "internal")
    assert [stored.seq for stored in shard.everything("q")] == [2, 3, 4]
    assert shard.report("q").completing == 0
    disk.well()
    shard.append("q", numbers(5, 1))
    assert logged(shard) == [acked(1)], "it does not come with a later write either"
    assert removals(shard.topic("q")) == before
    shard.restart()
    assert [stored.seq for stored in shard.everything("q")] == [2, 3, 4, 5]
    assert logged(shard) == [acked(1)]
    queue = Coordinator(shard)
    queue.complete([2, 3], [acked(2, 3)])
    assert [stored.seq for stored in shard.everything("q")] == [4, 5]
    assert logged(shard) == [acked(1), acked(2, 3)]


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
@pytest.mark.parametrize("known", [False, True])
def test_acks_work_on_a_full_disk(faulty: tuple[Shard, FaultyDisk], durability: str, known: bool) -> None:
    """Whether the log can be written or not: the jobs go."""
    shard, disk = faulty
    shard.put("q", config(durability))
    shard.append("q", numbers(1, 20))
    queue = Coordinator(shard)
    if known:
        queue.complete([1], [acked(1)])
    disk.no_new_files()
    filled = 0
    while not isinstance(_outcome(shard, Record(b'"%b"' % (b"x" * 300))), ApiError):
        filled += 1
        assert filled < 1_000
    for seq in range(2, 6):
        queue.complete([seq], [LeaseEvent("acked", "a" * 100, [seq], [100 + seq])])
    assert [stored.seq for stored in shard.everything("q")][:2] == ([6, 7] if known else [1, 6])
    disk.well()
    queue.complete([6], [acked(6)])
    assert logged(shard)[-1] == acked(6)
    shard.restart()
    assert 6 not in [stored.seq for stored in shard.everything("q")]
    assert logged(shard)[-1] == acked(6)


def _outcome(shard: Shard, record: Record) -> Any:
    sent = shard.send_append("filler", [record])
    shard.settle()
    try:
        return shard.answer(sent)
    except ApiError as error:
        return error


def test_appends_of_the_same_round_are_not_lost_with_an_ack(faulty: tuple[Shard, FaultyDisk]) -> None:
    """They are a write of their own; what fails then is the ack."""
    shard, disk = faulty
    shard.put("q", config())
    shard.append("q", numbers(1, 2))
    queue = Coordinator(shard)
    sent = shard.send_append("q", numbers(3, 1))
    writes = 0

    def second(call: str) -> Exception | None:
        nonlocal writes
        writes += call == "write"
        return OSError(5, "bad sector") if call == "write" and writes == 2 else None

    disk.when = second
    ack = queue.send_complete([1], [acked(1)])
    shard.settle()
    assert shard.answer(sent).first_seq == 3
    [(error, _)] = queue.answers(ack)
    assert isinstance(error, ApiError)
    assert [stored.seq for stored in shard.everything("q")] == [1, 2, 3]


@pytest.mark.parametrize("moved", ["", "flush", "restart", "flush restart"])
def test_acks_across_rows_and_segments(shard: Shard, moved: str) -> None:
    shard.put("q", config())
    for first in range(1, 41, 10):
        shard.append("q", numbers(first, 10))
    queue = Coordinator(shard)
    queue.complete([1, 11, 21, 31, 40], [acked(1, 11, 21, 31, 40)])
    if "flush" in moved:
        shard.flush("q")
    if "restart" in moved:
        shard.restart()
        queue = Coordinator(shard)
    queue.complete(list(range(2, 11)), [acked(*range(2, 11))])
    left = [seq for seq in range(12, 40) if seq not in (21, 31)]
    assert [stored.seq for stored in shard.everything("q")] == left
    taken, jobs = queue.take()
    assert taken.seqs == left == [job["data"] for job in jobs]
    shard.restart()
    assert Coordinator(shard).take()[0].seqs == left
    assert shard.report("q").earliest_seq == 12


# --- what is there -----------------------------------------------------------------------------------


def test_a_look_tells_what_is_gone(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 3, tag="x"))
    shard.append("q", numbers(4, 3))
    queue = Coordinator(shard)
    before = queue.check([])
    queue.complete([5], [acked(5)])
    assert queue.check([5]).removals == before.removals
    shard.delete("q", tag="x")
    found = queue.check([1, 2, 3, 4, 5, 6, 7])
    assert (found.gone, found.live) == ([1, 2, 3, 5, 7], 2)
    assert found.removals != before.removals


@pytest.mark.parametrize("way", ["tag", "before", "cap", "ttl"])
def test_every_way_to_go_but_an_ack_is_a_removal(shard: Shard, way: str) -> None:
    shard.put("q", config(cap_records=4 if way == "cap" else 0, ttl_ms=1_000 if way == "ttl" else 0))
    shard.append("q", numbers(1, 4, tag="t"))
    queue = Coordinator(shard)
    before = queue.open().removals
    if way == "tag":
        shard.delete("q", tag="t")
    elif way == "before":
        shard.delete("q", before_seq=3)
    elif way == "cap":
        shard.append("q", numbers(5, 1))
    else:
        shard.wall.pass_ms(2_000)
    assert queue.check([1]).gone == [1]
    assert queue.check([]).removals != before


# --- the leases log ----------------------------------------------------------------------------------


def test_the_log_is_made_with_its_first_event(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 3))
    queue = Coordinator(shard)
    assert queue.ask(Op.LIST_QUEUES, messages.ListQueues())[0].topics == []
    assert (queue.open().log_from, queue.open().log_head) == (0, 0)
    queue.log([claimed(1), claimed(2, 3)])
    assert shard.topic(LOG).id == log_id(queue.id_of())
    assert logged(shard) == [claimed(1), claimed(2, 3)]
    assert queue.ask(Op.LIST_QUEUES, messages.ListQueues())[0].topics == ["q"]
    assert (queue.open().log_from, queue.open().log_head) == (0, 2)
    shard.restart()
    assert logged(shard) == [claimed(1), claimed(2, 3)]
    assert Coordinator(shard).open().log_head == 2


def test_nobody_sees_the_log(tmp_path: Path) -> None:
    shard = Shard(tmp_path, max_topics=2)
    shard.put("q", config())
    shard.append("q", numbers(1, 3))
    totals = (shard.engine.totals.records, shard.engine.totals.bytes)
    for _ in range(2):
        Coordinator(shard).log([claimed(1, 2)])
        listed = shard.call(Op.LIST_TOPICS, messages.ListTopics("", "", 10, False))
        assert [row.topic for row in listed.rows] == ["q"]
        assert shard.engine.topic_count == 1
        assert (shard.engine.totals.records, shard.engine.totals.bytes) == totals
        shard.restart()
    assert shard.engine.topic_count == 1
    assert (shard.engine.totals.records, shard.engine.totals.bytes) == totals
    shard.append("second", numbers(1, 1))
    assert error_of(lambda: shard.append("third", numbers(1, 1))).code == "throttled"
    Coordinator(shard).log([claimed(3)])
    assert len(logged(shard)) == 3


def test_the_log_goes_with_its_queue(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 3))
    queue = Coordinator(shard)
    queue.log([claimed(1)])
    old = queue.id_of()
    shard.drop("q")
    assert LOG not in shard.engine.topics
    assert shard.engine.topic_count == 0
    shard.restart()
    assert set(shard.engine.topics) == set()
    shard.put("q", config())
    queue = Coordinator(shard)
    assert queue.open().log_head == 0
    queue.log([claimed(2)])
    assert logged(shard) == [claimed(2)]
    assert shard.topic(LOG).id == log_id(queue.id_of()) != log_id(old)
    shard.restart()
    assert logged(shard) == [claimed(2)]


@pytest.mark.parametrize("first", [False, True])
def test_the_log_has_the_class_that_was_asked_for(shard: Shard, first: bool) -> None:
    """Also when that changes; what was written before stays."""
    shard.put("q", config())
    queue = Coordinator(shard)
    queue.log([claimed(1)], durable=first)
    classes = {False: "memory", True: "fsync"}
    assert shard.topic(LOG).config.durability == classes[first]
    queue.log([claimed(2)], durable=not first)
    assert shard.topic(LOG).config.durability == classes[not first]
    shard.restart()
    assert shard.topic(LOG).config.durability == classes[not first]
    assert logged(shard) == [claimed(1), claimed(2)]
    queue = Coordinator(shard)
    queue.complete([], [claimed(3)], durable=first)
    assert shard.topic(LOG).config.durability == classes[first]
    assert logged(shard) == [claimed(1), claimed(2), claimed(3)]


def test_durable_events_are_answered_when_they_are_synced(shard: Shard) -> None:
    shard.put("q", config())
    queue = Coordinator(shard)
    queue.log([claimed(1)], durable=True)
    shard.sync()
    sent = queue.send_log([claimed(2)], durable=True)
    shard.engine.commit.write()
    assert queue.answers(sent) == []
    shard.settle()
    assert len(queue.answers(sent)) == 1
    quiet = len(queue.messages)
    queue.log([claimed(3)], durable=True)
    assert len(queue.messages) == quiet, "nobody asked"
    nothing = queue.send_log([], durable=True)
    shard.settle()
    assert len(queue.answers(nothing)) == 1


@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_events_that_can_not_be_written(
    faulty: tuple[Shard, FaultyDisk], fault: str, known: bool, durable: bool
) -> None:
    """Whoever waits is told; a log whose first write failed was never there."""
    shard, disk = faulty
    shard.put("q", config())
    shard.append("q", numbers(1, 3))
    queue = Coordinator(shard)
    if known:
        queue.log([claimed(1)], durable=durable)
    getattr(disk, fault)()
    sent = queue.send_log([claimed(2)], durable=durable)
    shard.settle()
    [(error, _)] = queue.answers(sent)
    assert error.code == ("storage_full" if fault == "full" else "internal")
    assert (LOG in shard.engine.topics) == known
    assert shard.engine.topic_count == 1
    disk.well()
    queue.log([claimed(3)], durable=durable)
    expected = [claimed(1), claimed(3)] if known else [claimed(3)]
    assert logged(shard) == expected
    shard.restart()
    assert logged(shard) == expected
    assert shard.engine.topic_count == 1


def test_a_reader_starts_at_the_last_checkpoint(shard: Shard) -> None:
    shard.put("q", config())
    queue = Coordinator(shard)
    queue.log([claimed(1), claimed(2)])
    queue.log([checkpoint(1, 2)])
    queue.log([claimed(3)])
    queue.log([checkpoint(1, 2, 3)])
    queue.log([claimed(4)])
    for _ in range(2):
        opened = Coordinator(shard).open()
        assert (opened.log_from, opened.log_head) == (4, 6)
        shard.flush(LOG)
        shard.restart()


def test_a_log_that_is_damaged_fails_its_queue_alone(tmp_path: Path) -> None:
    """Also where the answer has to wait for a sync, so that no request is being handled when the log is read."""
    shard = Shard(tmp_path, segment_max_events=4)
    shard.put("q", config())
    queue = Coordinator(shard)
    for seq in range(1, 9):
        queue.log([claimed(seq)], durable=True)
    shard.flush(LOG)
    path = shard.topic(LOG).segments[0].index_path
    shard._files.forget(path)
    Path(path).write_bytes(b"damaged")
    error = error_of(queue.open)
    assert (error.code, "damaged" in error.message) == ("internal", True)
    queue.send_log([claimed(9)], durable=True)
    shard.engine.commit.write()
    assert shard.topic(LOG).pending
    waits = queue.send(Op.OPEN_QUEUE, messages.OpenQueue("q"))
    assert queue.answers(waits) == []
    shard.settle()
    assert queue.answers(waits)[0][0].message == error.message
    assert [topic for topic, _ in shard.engine.totals.unreadable] == ["q"]
    shard.append("q", numbers(1, 3))
    assert queue.take()[0].seqs == [1, 2, 3]


def test_history_has_a_bound(tmp_path: Path) -> None:
    """What follows the checkpoint before last is never cut: the last one may not survive a power cut."""
    shard = Shard(tmp_path, segment_max_events=8, lease_history_bytes=2_000)
    shard.put("q", config())
    queue = Coordinator(shard)
    last = 0
    for turn in range(40):
        for _ in range(5):
            last += 1
            queue.log([claimed(last, node="n" * 50)])
        queue.log([checkpoint(last)])
        events = logged(shard)
        assert shard.topic(LOG).bytes < 2_000 + 3 * 2_000
        checkpoints = [at for at, event in enumerate(events) if event.event == "checkpoint"]
        assert events[-1] == checkpoint(last)
        assert turn == 0 or len(checkpoints) >= 2
        opened = queue.open()
        assert shard.everything(LOG)[checkpoints[-1]].seq == opened.log_from + 1
        if turn % 10 == 9:
            shard.flush(LOG)
            shard.restart()
            queue = Coordinator(shard)
            assert logged(shard)[-1] == checkpoint(last)


def test_a_checkpoint_larger_than_the_history(tmp_path: Path) -> None:
    shard = Shard(tmp_path, lease_history_bytes=1_000, wal_file_bytes=64 * 1024)
    shard.put("q", config())
    queue = Coordinator(shard)
    for first in range(1, 4):
        queue.log([checkpoint(*range(first, first + 5_000))])
        queue.log([claimed(9_000 + first)])
    events = logged(shard)
    assert events[-1] == claimed(9_003)
    assert [event.event for event in events].count("checkpoint") == 2
    shard.restart()
    assert Coordinator(shard).open().log_head == 6
    assert logged(shard)[-2:] == events[-2:]


# --- what the coordinator is told --------------------------------------------------------------------


def test_pushes_of_a_queue_that_is_open(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 3, tag="t"))
    shard.append("q", numbers(4, 3))
    queue = Coordinator(shard)
    shard.put("q", config(lease_ms=1_000))
    shard.delete("q", before_seq=2)
    assert queue.pushed() == [], "it has not asked"
    opened = queue.open()
    shard.put("q", config(lease_ms=2_000))
    [(op, changed)] = queue.pushed()
    assert (op, changed.config.lease_ms) == (Op.QUEUE_CHANGED, 2_000)
    queue.complete([4], [acked(4)])
    assert queue.pushed() == [], "its own doing"
    shard.delete("q", tag="t")
    [(op, removed)] = queue.pushed()
    assert (op, removed.removals != opened.removals) == (Op.JOBS_REMOVED, True)
    shard.delete("q", tag="t")
    shard.append("q", numbers(7, 1))
    assert queue.pushed() == [], "nothing was removed"
    shard.put("q", config(lease_ms=2_000, cap_records=1))
    assert {op for op, _ in queue.pushed()} >= {Op.QUEUE_CHANGED, Op.JOBS_REMOVED}
    shard.append("q", numbers(8, 1))
    assert [op for op, _ in queue.pushed()] == [Op.JOBS_REMOVED]
    shard.drop("q")
    assert [op for op, _ in queue.pushed()] == [Op.TOPIC_GONE]
    shard.put("q", config())
    shard.append("q", numbers(1, 1))
    assert queue.pushed() == []


def test_a_change_is_told_before_whoever_made_it_is_answered(shard: Shard) -> None:
    shard.put("q", config())
    queue = Coordinator(shard)
    queue.open()
    sent = shard.send(Op.PUT_TOPIC, messages.PutTopic("q", config(lease_ms=3_000), None))
    assert not shard.answered(sent)
    assert [op for op, _ in queue.pushed()] == [Op.QUEUE_CHANGED]
    shard.settle()
    assert shard.answered(sent)


def test_only_who_opened_it_last_is_told(shard: Shard) -> None:
    shard.put("q", config())
    shard.append("q", numbers(1, 3))
    first, second = Coordinator(shard), Coordinator(shard)
    first.open()
    second.open()
    shard.delete("q", before_seq=2)
    assert first.pushed() == []
    assert [op for op, _ in second.pushed()] == [Op.JOBS_REMOVED]
    shard.engine.caller_gone(second)
    shard.delete("q", before_seq=3)
    shard.put("q", config(lease_ms=1_000))
    shard.drop("q")
    assert second.pushed() == []


def test_what_can_not_be_opened(shard: Shard) -> None:
    queue = Coordinator(shard)
    assert error_of(lambda: queue.open("nothing")).code == "topic_not_found"
    shard.append("plain", numbers(1, 1))
    assert error_of(lambda: queue.open("plain")).code == "not_a_queue"
    assert queue.ask(Op.LIST_QUEUES, messages.ListQueues())[0].topics == []
