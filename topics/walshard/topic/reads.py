"""Reading a topic from a cursor: which records, the tombstone, the next cursor, as JSON.

In order per row: the floor and its tombstone, expiry (retention.py ran before), deletes, the window of `limit`
records and `max_bytes`, the reader's own nodes. Everything examined advances the cursor, delivered or not. A record
that would exceed `max_bytes` is left to the next reading, unless it is the first.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from topics.actors import messages
from topics.actors.messages import Diff, Follow, Op, Read
from topics.storage.columns import Columns
from topics.walshard.tiering.fetcher import window
from topics.walshard.topic import render
from topics.walshard.topic.cache import BatchCache
from topics.walshard.topic.index import Row
from topics.walshard.topic.topic import Topic


class Tombstone(NamedTuple):
    gap_from: int
    gap_to: int
    reason: str

    def json(self, *, earliest_seq: int, head_seq: int) -> bytes:
        missed = max(0, self.gap_to - self.gap_from + 1)
        return b'{"gap_from":%d,"gap_to":%d,"reason":"%b","missed_estimate":%d,"earliest_seq":%d,"head_seq":%d}' % (
            self.gap_from,
            self.gap_to,
            self.reason.encode(),
            missed,
            earliest_seq,
            head_seq,
        )


class Reading(NamedTuple):
    parts: list[bytes]  # JSON of one or more records each
    next_from_seq: int
    scanned: int
    tombstone: Tombstone | None
    behind_gap: int  # the cursor behind the tombstone

    @property
    def found(self) -> bool:
        """Whether there is anything to tell: a long poll waits until there is."""
        return bool(self.parts) or self.tombstone is not None


def find_gap(topic: Topic, from_seq: int) -> tuple[Tombstone | None, int]:
    """What a reader at this cursor has missed, and the cursor behind it."""
    if from_seq > topic.head_seq:
        return Tombstone(1, topic.head_seq, "recreated"), topic.earliest_seq - 1
    if from_seq + 1 < topic.evict_floor:
        reason = topic.tombstone_reason(from_seq)
        return Tombstone(from_seq + 1, topic.earliest_seq - 1, reason), topic.earliest_seq - 1
    for holes, reason in ((topic.holes, "cap"), (topic.trims, "source_trim")):
        for first, last in holes:
            if first <= from_seq + 1 <= last:
                return Tombstone(from_seq + 1, last, reason), last
    return None, from_seq


def next_hole(topic: Topic, from_seq: int) -> int:
    """Where the next hole behind a cursor begins. No reading goes across it: the next one starts with a tombstone."""
    holes = (*topic.holes, *topic.trims)
    return min((first for first, _ in holes if first > from_seq), default=topic.head_seq + 1)


def read(
    topic: Topic,
    request: Diff | Read | Follow,
    cache: BatchCache,
    *,
    from_seq: int,
    nodes: list[str] | None = None,
    include_data: bool = True,
    origins: list[str | None] | None = None,
    in_place: bool = False,
) -> Reading:
    """What the request's window holds behind from_seq. With `origins` each part is one record, whose node is added
    to that list. Raises Away if all of it has to be fetched from the cold tier first, or with `in_place` reads it,
    however long that takes."""
    tombstone, from_seq = find_gap(topic, from_seq)
    stop = next_hole(topic, from_seq) if topic.holes or topic.trims else topic.head_seq + 1
    own = frozenset(nodes) if nodes and topic.config.dedupe_node else None
    plain = request.include_meta and not request.include_tags and include_data
    shown = plain and own is None and origins is None  # the rendered form is all that is needed
    parts: list[bytes] = []
    scanned = 0
    budget = request.max_bytes
    last = from_seq
    rows = topic.rows
    for row in rows.since(rows.position(from_seq + 1)):
        if row.live == 0:
            continue
        room = request.limit - scanned
        if room <= 0 or (budget <= 0 and scanned):
            break
        if row.first >= stop:
            last = stop - 1
            break
        if not in_place and row.body is None and not (shown and row.rendered is not None) and cache.away(row):
            if scanned or tombstone is not None:
                break  # the rest is the next reading's
            raise window(topic, cache, first=row, records=request.limit, size=request.max_bytes)
        if plain:
            rendered = cache.rendered(row)
        else:
            rendered = render.Rendered(
                render.render(
                    row,
                    cache.body(row),
                    include_tags=request.include_tags,
                    include_meta=request.include_meta,
                    include_data=include_data,
                )
            )
        start = max(0, from_seq + 1 - row.first)
        cut = False  # the window ends inside this row
        if row.whole:
            stop_index = rendered.fitting(start, min(row.count, start + room), budget)
            if stop_index == start:
                if scanned:
                    break
                stop_index += 1
            taken: range | list[int] = range(start, stop_index)
            cut = stop_index < row.count
            budget -= rendered.size(start, stop_index)
        else:
            taken = []
            for index in row.live_indexes(start):
                size = rendered.size(index, index + 1)
                if len(taken) >= room or (size > budget and (taken or scanned)):
                    cut = True
                    break
                taken.append(index)
                budget -= size
            if not taken:
                if cut:
                    break
                continue
        scanned += len(taken)
        last = row.first + taken[-1]
        if own is not None:
            taken = _foreign(row, taken, own, cache)
        if origins is not None:
            origins.extend(_origins(row, taken, cache))
            parts.extend([rendered.slice(index, index + 1) for index in taken])
        elif isinstance(taken, range):
            whole = len(taken) == row.count
            parts.append(rendered.text if whole else rendered.slice(taken.start, taken.stop))
        else:
            parts.extend([rendered.slice(index, index + 1) for index in taken])
        if cut:
            break
    else:
        last = stop - 1  # nothing live is left behind what was examined
    if not scanned and tombstone is None and from_seq < last == stop - 1 < topic.head_seq:
        # Nothing but what clients deleted lies before a hole: the hole is what this reader is to be told.
        return read(
            topic,
            request,
            cache,
            from_seq=last,
            nodes=nodes,
            include_data=include_data,
            origins=origins,
            in_place=in_place,
        )
    return Reading(parts, last, scanned, tombstone, from_seq)


def behind_own(topic: Topic, nodes: list[str], cache: BatchCache, *, from_seq: int) -> tuple[int, int]:
    """The cursor behind the reader's own records: what comes next is another's, a gap, or not there yet. And how many
    there were. Every batch is opened once, however small the window is that the reader asks for."""
    if find_gap(topic, from_seq)[0] is not None:
        return from_seq, 0
    stop = next_hole(topic, from_seq)
    own = frozenset(nodes)
    passed = 0
    for row in topic.rows.since(topic.rows.position(from_seq + 1)):
        if row.first >= stop:
            break
        live = list(row.live_indexes(max(0, from_seq + 1 - row.first))) if row.live else []
        others = _foreign(row, live, own, cache) if live else []
        if others:
            return row.first + others[0] - 1, passed + live.index(others[0])
        passed += len(live)
    return stop - 1, passed


def _foreign(row: Row, indexes: range | list[int], nodes: frozenset[str], cache: BatchCache) -> range | list[int]:
    """Those not written by the reader itself."""
    columns = Columns(cache.body(row), count=row.count, ts=row.first_ts)
    if not columns.has_nodes:
        return indexes
    origin = columns.nodes()
    return [index for index in indexes if origin[index] not in nodes]


def _origins(row: Row, indexes: range | list[int], cache: BatchCache) -> list[str | None]:
    columns = Columns(cache.body(row), count=row.count, ts=row.first_ts)
    if not columns.has_nodes:
        return [None] * len(indexes)
    nodes = columns.nodes()
    return [nodes[index] for index in indexes]


def piece(
    op: Op,
    topic: Topic,
    request: Read | Follow,
    cache: BatchCache,
    correlation: int,
    *,
    from_seq: int,
    origins: bool = False,
) -> tuple[bytes, int]:
    """What a watcher gets next, ready for the ring, and the cursor behind it."""
    nodes: list[str | None] | None = [] if origins and topic.config.dedupe_node else None
    own = request.nodes if isinstance(request, Read) else None
    reading = read(
        topic, request, cache, from_seq=from_seq, nodes=own, include_data=request.include_data, origins=nodes
    )
    gap = None
    if reading.tombstone is not None:
        gap = messages.Gap(*reading.tombstone, topic.earliest_seq)
        from_seq = reading.behind_gap
    ends = None
    if nodes is not None and any([node is not None for node in nodes]):
        ends = list(accumulate(len(part) + 1 for part in reading.parts))
    head = messages.Piece(topic.id, from_seq, reading.next_from_seq, topic.head_seq, gap, nodes if ends else None, ends)
    return messages.pack(op, correlation, head, b",".join(reading.parts)), reading.next_from_seq


def diffed(topic: Topic, reading: Reading, correlation: int, *, waited_ms: int) -> bytes:
    """The answer to a diff, ready for the ring: its JSON up to the performance block, which the gateway adds."""
    head, earliest, following = topic.head_seq, topic.earliest_seq, reading.next_from_seq
    tombstone = b"null"
    if reading.tombstone is not None:
        tombstone = reading.tombstone.json(earliest_seq=earliest, head_seq=head)
    caught_up = b"true" if following == head else b"false"
    return messages.pack(
        Op.DIFF,
        correlation,
        messages.Diffed(reading.scanned, waited_ms),
        b'{"topic":"%b","records":[' % topic.name.encode(),
        b",".join(reading.parts),
        b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d'
        % (following, head, earliest, caught_up, tombstone, head - following),
    )


def seqs_with_tag(topic: Topic, tag: str, *, prefix: bool, below: int) -> list[int]:
    """Live seqs below a bound whose tag matches, from the segments' tag pages and the tail's index."""
    found: list[int] = []
    for segment in topic.segments:
        if segment.sealed and segment.live_rows and segment.first_seq < below:
            found.extend(segment.seqs_with_tag(tag, prefix=prefix))
    tail = topic.tail_tags()
    found.extend(tail.with_prefix(tag) if prefix else tail.equal(tag))
    live = []
    row: Row | None = None
    for seq in found:
        if seq >= below:
            continue
        if row is None or not row.first <= seq <= row.last:
            row = topic.rows.find(seq)
        if row is not None and row.live and row.is_live(seq - row.first):
            live.append(seq)
    return live
