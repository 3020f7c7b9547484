"""Copies of another topic's records, made by routers: derived, so their bytes are not logged again.

A topic that is a router's destination has a pipe: how far the source has been copied into it. Copies are rows whose
bytes are in memory until the mover writes them into segments. The log holds a line for each batch of them: its seqs
here, and those of the source (storage/control.py, CopiesLine). Rules:

- a FORWARD says where it begins. If the pipe stands elsewhere nothing happens and the forwarder is told where: no
  record is copied twice or left out.
- the line is in the log before the copies are readable, so seqs that were given out keep their meaning. After a crash
  the rows are there, between the records that clients wrote and without those that clients deleted; their bytes are
  read from the source once more (rebuild.py), and until that is done the topic is not shown to anyone. It takes no
  space on the disk.
- a power cut may have taken lines of copies that readers have seen, none of them above the ceiling (`tail_lost`). They
  are copied again like new ones before the topic is shown: up to the ceiling, or as far as the source goes. Nothing
  else may keep them out: they go around the watch on free space and into the reserve of the log, and the mover writes
  them down meanwhile. Where it finds no space for what memory can't hold, the topic is shown without the rest.
- what the source does not have any more reads as a `source_trim` tombstone: copies whose bytes were lost with the
  process, and records that were lost before they were copied, which take as many seqs here.
- in a ring, what stands for a lost record goes as far as the record would have gone, and carries how many routers it
  has passed: a loss is told once in each topic that the record never reached, never where it was lost or written.
- whoever reads a source that is being filled gets all that lies before the first row without bytes, and passes what is
  not live there: a row waits only for what its source held before the row was copied, so no two wait for each other.
- what could not be logged has not happened: the pipe is as before, and the forwarder is told. But where nothing had to
  be copied the position moves on all the same; the log is told as far as there is space.
- after a crash caps take what they had taken, and nothing else. What the source does not have any more is therefore
  logged (Topic.untold) before anything that caps count, and lines have the sizes of copies where bytes are counted.

    crash                  what is left                    what happens
    forwarder              pipe and copies                 it asks where the pipe stands and goes on
    this shard             rows and position               rows are filled from the source
    the machine            what was synced of them         the same; of a destination of class fsync the rest is
                                                           copied again in the same order, into the same seqs. If the
                                                           source lost some of it, or the class syncs later than it
                                                           answers, or neither disk nor memory has room for it: above
                                                           the ceiling, which nobody has ever seen.
                                                           A snapshot says when that is over: from then on a crash is
                                                           one of the above
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import itemgetter
from typing import Any

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, DiskFull, being_rebuilt, topic_not_found
from topics.storage.columns import Columns, coalesce
from topics.walshard.forwards.copies import Copies, CopyMemory, Pipe, copy_ids
from topics.walshard.forwards.rebuild import Filled
from topics.walshard.log.commit import Commit, ReplyTo, write_failed
from topics.walshard.log.disk import KILL_POINTS, kill_point
from topics.walshard.tiering.fetcher import window
from topics.walshard.topic import reads
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.topic import Topic

_LAST = itemgetter(1)


class Pipes:
    def __init__(
        self,
        *,
        topics: dict[str, Topic],
        commit: Commit,
        cache: BatchCache,
        copies: CopyMemory,
        refresh: Callable[[Topic], None],
        now_ms: Callable[[], int],
        check_room: Callable[[Topic, int, int], None],
        filled: Callable[[Topic], None],
    ) -> None:
        self._topics = topics
        self._commit = commit
        self._cache = cache
        self._copies = copies
        self._refresh = refresh
        self._now_ms = now_ms
        self._check_room = check_room
        self._filled = filled
        self.unsaved = False  # a power cut has been got over, which the next start would not know
        self.rebuilding = {topic.id for topic in topics.values() if topic.rebuilding}
        # Set by the process: flush this topic, write a snapshot, then call back.
        self.settle: Callable[[Topic, Callable[[], None]], None] = lambda topic, then: then()
        self.handlers: dict[int, Callable[[Any, Any, int], bytes | None]] = {
            Op.READ_RAW: self._read_raw,
            Op.OPEN_PIPE: self._open,
            Op.CLOSE_PIPE: self._close,
            Op.LIST_PIPES: self._list,
        }

    # --- the source ---

    def _read_raw(self, request: messages.ReadRaw, reply_to: ReplyTo, correlation: int) -> bytes:
        topic = self._alive(request.topic, request.topic_id)
        self._refresh(topic)
        if topic.pipe is not None and topic.pipe.tail_lost:
            # Its head is not where it was: whoever copies from it would take that for its end. Never so in a ring.
            raise being_rebuilt(topic.name)
        # Routers behind it need not wait for all of it, and in a ring they must not: each would wait for the other.
        unfilled = None if topic.pipe is None or topic.pipe.rebuild is None else topic.pipe.rebuild.first_seq
        piece, body = read_raw(topic, request, self._cache, before=unfilled)
        if unfilled is not None and piece.to_seq <= request.from_seq and piece.to_seq < topic.head_seq:
            raise being_rebuilt(topic.name)
        return messages.pack(Op.READ_RAW, correlation, piece, body)

    def _alive(self, name: str, topic_id: int) -> Topic:
        topic = self._topics.get(name)
        if topic is None or topic.id != topic_id:
            raise topic_not_found(name)
        return topic

    # --- the destination ---

    def _open(self, request: messages.OpenPipe, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self._alive(request.topic, request.topic_id)
        pipe = topic.pipe
        if pipe is not None and pipe.pending:
            raise _busy()
        if pipe is not None and pipe.source_id != request.source_id:
            # Its router is gone: nothing of it may be made again after what comes now.
            def begin() -> None:
                if topic.dropped:
                    raise topic_not_found(topic.name)
                if topic.pipe is not pipe:
                    raise _busy()  # somebody else was here meanwhile
                self._begin(topic, request, reply_to, correlation)

            self._settled(topic, self._answering(Op.OPEN_PIPE, reply_to, correlation, begin))
            return None
        if pipe is None:
            self._begin(topic, request, reply_to, correlation)
            return None
        pipe.keep_only(request.routers)
        topic.touched()
        if request.ring and pipe.tail_lost:  # the two would wait for each other
            self._skip_tail(topic, pipe, trimmed=False, at=pipe.at)
        if pipe.ring == request.ring:
            return messages.pack(Op.OPEN_PIPE, correlation, _opened(pipe))
        ring, pipe.ring = pipe.ring, request.ring
        try:
            self._opened(topic, pipe, reply_to, correlation)
        except (ApiError, DiskFull, OSError):
            pipe.ring = ring
            raise
        return None

    def _begin(self, topic: Topic, request: messages.OpenPipe, reply_to: ReplyTo, correlation: int) -> None:
        before = topic.pipe
        there = topic.next_seq - 1  # was not copied
        pipe = topic.pipe = Pipe(request.source_id, request.at, {}, flushed_to=there, ring=request.ring)
        try:
            self._opened(topic, pipe, reply_to, correlation)
        except (ApiError, DiskFull, OSError):
            topic.pipe = before
            raise

    def _opened(self, topic: Topic, pipe: Pipe, reply_to: ReplyTo, correlation: int) -> None:
        """Logged: a restart must know that the topic holds copies, before the first snapshot says so."""
        self._log(topic)

        def answer(fsync_us: int) -> bytes:
            return messages.pack(Op.OPEN_PIPE, correlation, _opened(pipe))

        self._commit.wait_for_sync(reply_to, answer)

    def _close(self, request: messages.ClosePipe, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self._topics.get(request.topic)
        pipe = topic.pipe if topic is not None and topic.id == request.topic_id else None
        if topic is None or pipe is None or pipe.source_id != request.source_id:
            return messages.pack(Op.CLOSE_PIPE, correlation, messages.PipeClosed(None, {}))

        def answer(fsync_us: int) -> bytes:
            return messages.pack(Op.CLOSE_PIPE, correlation, messages.PipeClosed(pipe.at, pipe.forwarded))

        if request.keep and pipe.rebuilding:
            raise being_rebuilt(topic.name)

        def close() -> None:
            if topic.dropped or request.keep:
                reply_to.send_always(answer(0))
                return
            if topic.pipe is pipe:
                topic.pipe = None
                try:
                    self._log(topic)
                except (ApiError, DiskFull, OSError):
                    topic.pipe = pipe
                    raise
            self._commit.wait_for_sync(reply_to, answer)

        self._settled(topic, self._answering(Op.CLOSE_PIPE, reply_to, correlation, close))
        return None

    @staticmethod
    def _answering(op: Op, reply_to: ReplyTo, correlation: int, then: Callable[[], None]) -> Callable[[], None]:
        """For what the mover calls back: nobody above it would tell whoever asked."""

        def call() -> None:
            try:
                then()
            except (ApiError, DiskFull, OSError) as error:
                failure = error if isinstance(error, ApiError) else write_failed(error)
                reply_to.send_always(messages.pack_failure(op, correlation, failure))

        return call

    def _settled(self, topic: Topic, then: Callable[[], None]) -> None:
        """Go on when every copy is in a segment that a snapshot names."""
        pipe = topic.pipe
        assert pipe is not None
        if pipe.rebuild is not None:  # its source is gone
            self._fill(topic, pipe.rebuild.give_up())
            pipe.rebuild = None
            self._rebuilt(topic, pipe)
        if pipe.tail_lost:
            self._skip_tail(topic, pipe, trimmed=True, at=pipe.at)
        if topic.has_copies or pipe.pending or pipe.saved_at != pipe.at:
            self.settle(topic, then)
        else:
            then()

    def _fill(self, topic: Topic, filled: Iterable[Filled]) -> None:
        for each in filled:
            if each.row.live:
                topic.fill(each.row, each.runs)
        self._filled(topic)

    def _skip_tail(self, topic: Topic, pipe: Pipe, *, trimmed: bool, at: int) -> None:
        """The source has not all that was copied before the power went: go on above what readers may have seen."""
        self._commit.skip_tail(topic, pipe.tail_to, trimmed=trimmed, at=at)
        self._tail_ends(topic, pipe)
        self._rebuilt(topic, pipe)

    def _tail_ends(self, topic: Topic, pipe: Pipe) -> None:
        pipe.tail_lost = False
        pipe.saved_at = -1  # a start without the pipe would not know which seqs have been skipped
        topic.touched()
        self.unsaved = True

    def _rebuilt(self, topic: Topic, pipe: Pipe) -> None:
        if not pipe.rebuilding and topic.id in self.rebuilding:
            self.rebuilding.discard(topic.id)
            self._refresh(topic)
            self._commit.published(topic)

    def topic_dropped(self, topic: Topic) -> None:
        self.rebuilding.discard(topic.id)

    def _log(self, topic: Topic) -> None:
        self._commit.make_room(limits.CONTROL_BYTES)
        self._commit.stage_topic(topic, self._now_ms())
        self._commit.write_control()
        topic.touched()

    def _list(self, request: messages.ListPipes, reply_to: ReplyTo, correlation: int) -> bytes:
        rows = [
            messages.PipeRow(topic.name, topic.id, topic.pipe.source_id, topic.pipe.at)
            for topic in self._topics.values()
            if topic.pipe is not None
        ]
        return messages.pack(Op.LIST_PIPES, correlation, messages.PipesListed(rows))

    def forward(self, request: messages.Forward, body: bytes, reply_to: ReplyTo, correlation: int) -> bytes | None:
        topic = self._alive(request.topic, request.topic_id)
        pipe = topic.pipe
        if pipe is None or pipe.source_id != request.source_id:
            raise ApiError("not_found", f'nothing is copied into "{topic.name}" from that topic')
        if pipe.pending:
            raise _busy()
        if pipe.position != request.from_seq:
            return messages.pack(Op.FORWARD, correlation, _forwarded(pipe))
        if pipe.rebuild is not None:
            ids = copy_ids(request.sources)
            filled = pipe.rebuild.take(ids, body, to_seq=request.to_seq, level=request.level)
            self._fill(topic, filled)
            if pipe.rebuild.done:
                pipe.rebuild = None
                if pipe.tail_lost and request.to_seq < pipe.at:  # the source lost more than this topic did
                    self._skip_tail(topic, pipe, trimmed=True, at=request.to_seq)
                    self._move(topic, pipe, topic.head_seq, request.to_seq, {}, [])
                elif pipe.tail_lost and request.level and request.to_seq == pipe.at:  # nothing else was copied
                    self._tail_ends(topic, pipe)
                self._rebuilt(topic, pipe)
            return messages.pack(Op.FORWARD, correlation, _forwarded(pipe))
        if self._copies.bytes > limits.COPIES_BYTES:
            if pipe.tail_lost and self._copies.stuck:
                self._skip_tail(topic, pipe, trimmed=False, at=pipe.at)
            raise ApiError(
                "throttled", "copies wait to be written to segments", {"retry_after_ms": 50}, retry_after_s=1
            )
        if request.count:
            self._check_room(topic, request.count, request.size)
        behind_lost = request.from_seq + request.lost
        lost_more = request.to_seq < request.from_seq  # the source, than this topic
        told = [(request.lost, 0)] if request.told is None else request.told
        lost = sum(count for count, _ in told)
        if pipe.tail_lost and (lost_more or not request.complete):
            self._skip_tail(topic, pipe, trimmed=lost_more or lost > 0, at=min(behind_lost, request.to_seq))
            if request.lost:
                self._move(topic, pipe, topic.head_seq, behind_lost, {}, [])
            lost = 0
        ts = max(self._now_ms(), topic.last_ts)
        if lost:
            at = behind_lost if request.count else request.to_seq
            part = _Told(self, topic, pipe, request, reply_to, correlation, last=topic.next_seq - 1 + lost, at=at)
            self._commit.stage_loss(topic, told, at=at, ts=ts, reply_to=part)
            pipe.pending += 1
            if not request.count:
                return None
        if not request.count:
            self._move_on(topic, pipe, request, reply_to, correlation)
            return None
        if KILL_POINTS:
            kill_point("forward")
        copied = _Copied(self, topic, pipe, request, reply_to, correlation)
        try:
            copied.last = self._commit.stage_copies(topic, request, body, ts=ts, memory=self._copies, reply_to=copied)
        except DiskFull:
            if pipe.tail_lost:
                self._skip_tail(topic, pipe, trimmed=False, at=pipe.at)
            raise
        pipe.pending += 1
        return None

    def copied(self, topic: Topic, pipe: Pipe, request: messages.Forward, *, last: int) -> None:
        """The copies are in the topic; `last` is the seq of the last one."""
        self._advance(topic, pipe, request, last=last)
        if not topic.dropped:
            self._commit.published(topic)

    def told(self, topic: Topic, pipe: Pipe, request: messages.Forward, *, last: int, at: int) -> None:
        """Seqs up to `last` stand for what the source had lost, which is told, whatever becomes of the copies."""
        self._move(topic, pipe, last, at, {}, [])
        if not request.count:
            self._level(topic, pipe, request, last=last)

    def _advance(self, topic: Topic, pipe: Pipe, request: messages.Forward, *, last: int) -> None:
        if request.hops is not None and request.count:
            topic.remember_hops(last - request.count + 1, request.hops)
        self._move(topic, pipe, last, request.to_seq, request.counts, request.sources)
        self._level(topic, pipe, request, last=last)

    def _level(self, topic: Topic, pipe: Pipe, request: messages.Forward, *, last: int) -> None:
        if pipe.tail_lost and (request.level or last >= pipe.tail_to):
            self._tail_ends(topic, pipe)
            self._rebuilt(topic, pipe)
        topic.touched()

    def _move_on(
        self, topic: Topic, pipe: Pipe, request: messages.Forward, reply_to: ReplyTo, correlation: int
    ) -> None:
        """There was nothing to copy. The log is told, or a start would ask for these records again, and take those that
        the source has evicted by then for lost. As far as there is space: nothing else depends on it. Whoever copies is
        answered behind the write: it never says of records that they have been looked at which a kill brings back."""

        def written() -> None:
            pipe.pending -= 1
            pipe.move(request.to_seq)
            self._level(topic, pipe, request, last=topic.head_seq)
            reply_to.send_always(messages.pack(Op.FORWARD, correlation, _forwarded(pipe)))

        if request.to_seq != pipe.at:
            with suppress(ApiError, DiskFull, OSError):
                self._commit.log_position(topic, request.to_seq)
        pipe.pending += 1
        self._commit.after_write(written)

    @staticmethod
    def _move(
        topic: Topic, pipe: Pipe, last: int, at: int, counts: dict[str, int], sources: list[tuple[int, int]]
    ) -> None:
        newest = topic.rows.back()
        # From when its class was another one: these are written down, and what follows them waits until they are.
        held = bool(pipe.marks) or (newest is not None and isinstance(newest.source, Copies))
        pipe.advance(last, at, counts, sources)
        if topic.ephemeral and not held:
            pipe.flushed(last)  # its records are never written down, and a restart goes on behind them


def _opened(pipe: Pipe) -> messages.PipeOpened:
    return messages.PipeOpened(pipe.position, pipe.forwarded, pipe.until)


def _forwarded(pipe: Pipe) -> messages.Forwarded:
    return messages.Forwarded(pipe.position, pipe.until)


def _busy() -> ApiError:
    return ApiError("throttled", "a forward before this one is not done yet", {"retry_after_ms": 20}, retry_after_s=1)


class _Copied:
    """Takes the answer of the commit: the copies are published, or could not be."""

    def __init__(
        self, pipes: Pipes, topic: Topic, pipe: Pipe, request: messages.Forward, reply_to: ReplyTo, correlation: int
    ) -> None:
        self._pipes = pipes
        self._topic = topic
        self._pipe = pipe
        self._request = request
        self._reply_to = reply_to
        self._correlation = correlation
        self.last = 0

    def send_always(self, message: bytes) -> None:
        self._pipe.pending -= 1
        if message[1]:
            error = messages.decode_failure(message)
            self._reply_to.send_always(messages.pack_failure(Op.FORWARD, self._correlation, error))
            return
        if KILL_POINTS:
            kill_point("forwarded")
        self._pipes.copied(self._topic, self._pipe, self._request, last=self.last)
        answer = messages.pack(Op.FORWARD, self._correlation, _forwarded(self._pipe))
        self._reply_to.send_always(answer)


class _Told:
    """The same for what the source has lost. If copies come behind it, they answer."""

    def __init__(
        self,
        pipes: Pipes,
        topic: Topic,
        pipe: Pipe,
        request: messages.Forward,
        reply_to: ReplyTo,
        correlation: int,
        *,
        last: int,
        at: int,
    ) -> None:
        self._pipes = pipes
        self._topic = topic
        self._pipe = pipe
        self._request = request
        self._reply_to = reply_to
        self._correlation = correlation
        self._last = last
        self._at = at

    def send_always(self, message: bytes) -> None:
        self._pipe.pending -= 1
        if not message[1]:
            self._pipes.told(self._topic, self._pipe, self._request, last=self._last, at=self._at)
            answer = messages.pack(Op.FORWARD, self._correlation, _forwarded(self._pipe))
        else:
            answer = messages.pack_failure(Op.FORWARD, self._correlation, messages.decode_failure(message))
        if not self._request.count:
            self._reply_to.send_always(answer)


def read_raw(
    topic: Topic, request: messages.ReadRaw, cache: BatchCache, *, before: int | None = None
) -> tuple[messages.RawPiece, bytes]:
    """Whole rows where possible: no work per record. Never across a hole: the next read says what was lost there.
    `before`: nothing from this seq on."""
    from_seq = request.from_seq
    if request.ring:
        topic.hops_read = from_seq
    lost = 0
    lost_hops: dict[int, int] = {}
    if from_seq > topic.head_seq:
        from_seq = topic.head_seq  # it lost its tail: what comes now is new
    elif (gap := reads.find_gap(topic, from_seq))[0] is not None:
        lost = _lost_to(topic, from_seq)
        lost_hops = _hops_lost(topic, from_seq + 1, from_seq + lost)
        from_seq = gap[1]
    stop = reads.next_hole(topic, from_seq)
    if before is not None:
        stop = max(from_seq + 1, min(stop, before))
    if request.until is not None:
        stop = max(from_seq + 1, min(stop, request.until + 1))
    batches: list[Columns] = []
    seqs: list[tuple[int, int]] = []
    taken = size = 0
    at = from_seq
    complete = lost == 0
    for row in topic.rows.since(topic.rows.position(from_seq + 1)):
        if row.live == 0:
            continue
        if taken and (taken + row.count > request.limit or size + row.size > request.max_bytes):
            break
        if row.first >= stop or (before is not None and row.first >= before):
            # What is not live before it is passed, as at the end: whoever reads may be what this row waits for. The
            # cursor may stand within an unfilled row.
            complete = complete and at >= stop - 1
            at = max(at, stop - 1)
            break
        if cache.away(row):
            if taken or lost:
                break
            raise window(topic, cache, first=row, records=request.limit, size=request.max_bytes)
        start = max(0, at + 1 - row.first)
        complete = complete and row.first <= at + 1
        at = row.last
        columns = Columns(cache.body(row), count=row.count, ts=row.first_ts)
        if start == 0 and row.whole and row.count <= request.limit:
            seqs.append((row.first, row.count))
        else:
            indexes = list(row.live_indexes(start))
            if len(indexes) > request.limit:
                indexes = indexes[: request.limit]
                at = row.first + indexes[-1]
            complete = complete and len(indexes) == at - row.first + 1 - start
            if not indexes:
                continue
            columns = Columns(columns.pick(indexes), count=len(indexes), ts=row.first_ts)
            seqs.extend(_runs(row.first, indexes))
        batches.append(columns)
        taken += columns.count
        size += row.size
        if at < row.last:
            break
    else:
        complete = complete and at == stop - 1
        at = stop - 1
    hops = _hops_of(topic, seqs) if topic.hops else None
    body = _joined(batches)
    piece = messages.RawPiece(at, topic.head_seq, taken, seqs, lost, complete, hops, lost_hops)
    return piece, body


def _lost_to(topic: Topic, from_seq: int) -> int:
    """How many seqs behind a cursor caps, TTL or a crash took, before the next one that is left."""
    if from_seq + 1 < topic.evict_floor:
        return topic.evict_floor - 1 - from_seq
    tombstone, _ = reads.find_gap(topic, from_seq)
    assert tombstone is not None
    return tombstone.gap_to - from_seq


def _joined(batches: list[Columns]) -> bytes:
    if not batches:
        return b""
    if len(batches) == 1:
        return batches[0].timeless()
    merged = coalesce(batches)
    return Columns(merged, count=sum(batch.count for batch in batches), ts=0).timeless()


def _runs(first: int, indexes: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in indexes:
        seq = first + index
        if runs and sum(runs[-1]) == seq:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((seq, 1))
    return runs


def _hops_lost(topic: Topic, first: int, last: int) -> dict[int, int]:
    """How many of these seqs have passed how many routers."""
    found: dict[int, int] = {}
    for low, high, passed in topic.hops[bisect_left(topic.hops, first, key=_LAST) :]:
        if low > last:
            break
        found[passed] = found.get(passed, 0) + min(high, last) - max(low, first) + 1
    return found


def _hops_of(topic: Topic, seqs: list[tuple[int, int]]) -> list[int] | None:
    """Ranges and seqs both ascend: one walk over what they have in common, however many lie behind."""
    ranges = topic.hops
    if not seqs or ranges[-1][1] < seqs[0][0]:
        return None
    at = bisect_left(ranges, seqs[0][0], key=_LAST)
    low, high, passed = ranges[at]
    if low >= sum(seqs[-1]):
        return None
    hops = []
    for first, count in seqs:
        for seq in range(first, first + count):
            while high < seq and at < len(ranges) - 1:
                at += 1
                low, high, passed = ranges[at]
            hops.append(passed if low <= seq <= high else 0)
    return hops if any(hops) else None
