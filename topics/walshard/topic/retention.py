"""What leaves a topic by itself: caps and TTL. Pure apart from reading a row's record sizes when a cap cuts through
it.

    cause        when                              moves evict_floor   shows as
    cap          after a batch is published        yes                 tombstone "cap"
    ttl          before every use of the topic     yes                 tombstone "ttl"
    delete       when a client asks (topic.py)     never               nothing
Whole rows go at once; only the row at the floor is cut. ts never falls along a topic, so what has expired is a prefix.

A row that can't be read stops nothing. A cap takes as many of its records as of any other, each with an equal share of
its bytes. TTL takes it as a whole when its last record has expired: nobody can read the others meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from topics.errors import CorruptData, Unreachable
from topics.storage.columns import Columns
from topics.walshard.topic.index import Row
from topics.walshard.topic.topic import Topic

_RETRY_MS = 1_000  # before a row that could not be read is tried again


def expire(topic: Topic, *, now_ms: int) -> None:
    """Drop records older than ttl_ms (strictly)."""
    ttl_ms = topic.config.ttl_ms
    if not ttl_ms:
        return
    horizon = now_ms - ttl_ms  # a record with ts < horizon has expired
    while (front := topic.rows.front()) is not None and front.first_ts < horizon:
        if front.last_ts < horizon:
            expired = list(front.live_indexes())
        else:
            expired = _before(topic, front, horizon, now_ms)
            if not expired:
                return
        topic.expired_total += len(expired)
        topic.totals.expired += len(expired)
        topic.ttl_seq = max(topic.ttl_seq, _lose(topic, front, expired, sizes=None))


def _before(topic: Topic, row: Row, horizon: int, now_ms: int) -> list[int]:
    if row.times is None:
        if row is topic.unread and now_ms < topic.unread_ms + _RETRY_MS:
            return []
        try:
            row.times = array("Q", Columns(row.load(), count=row.count, ts=row.first_ts).times())
        except (CorruptData, Unreachable, OSError) as error:
            topic.can_not_read(row, error)
            topic.unread_ms = now_ms
            return []
    times = row.times
    return [index for index in row.live_indexes() if times[index] < horizon]


def enforce_caps(topic: Topic, *, sized: bool = True) -> None:
    """discard "old": evict from the front until the topic is within its caps. "reject" never drops what it took.
    sized: the size of each record is known, or can be."""
    config = topic.config
    if config.discard != "old":
        return
    if config.cap_records:
        while topic.count > config.cap_records:
            front = topic.rows.front()
            assert front is not None
            excess = topic.count - config.cap_records
            live = list(front.live_indexes())
            if excess < len(live):
                front.sizes = topic.sizes_or_shares(front)  # kept: the next batch cuts into it again
            _evict(topic, front, live[:excess], sizes=front.sizes)
    if config.cap_bytes and sized:
        while topic.bytes > config.cap_bytes:
            front = topic.rows.front()
            assert front is not None
            live = list(front.live_indexes())
            if topic.bytes - front.size >= config.cap_bytes:
                _evict(topic, front, live, sizes=None)
                continue
            sizes = front.sizes = topic.sizes_or_shares(front)  # kept: the next batch cuts into it again
            over = topic.bytes - config.cap_bytes
            taken = 0
            for index in live:
                taken += 1
                over -= sizes[index]
                if over <= 0:
                    break
            _evict(topic, front, live[:taken], sizes=sizes)


def _evict(topic: Topic, row: Row, indexes: list[int], *, sizes: Sequence[int] | None) -> None:
    topic.evicted_total += len(indexes)
    topic.totals.evicted += len(indexes)
    topic.floor_due |= row.source is not None and topic.resident_rows > 0
    topic.cap_seq = max(topic.cap_seq, _lose(topic, row, indexes, sizes=sizes))


def _lose(topic: Topic, row: Row, indexes: list[int], *, sizes: Sequence[int] | None) -> int:
    """Take a prefix of the front row's live records away, against the reader's will; returns the last seq lost."""
    last = row.first + indexes[-1]
    topic.evict_floor = max(topic.evict_floor, last + 1)
    row.skip = indexes[-1] + 1
    topic.remove(row, indexes, sizes=sizes)
    topic.trim_front()
    return last


def raise_floor(topic: Topic, *, cap_seq: int, ttl_seq: int) -> None:
    """Repeat in recovery what caps and TTL took while the topic was live: everything up to these seqs."""
    last = max(cap_seq, ttl_seq)
    while (front := topic.rows.front()) is not None and front.first <= last:
        lost = [index for index in front.live_indexes() if front.first + index <= last]
        if not lost:
            break
        if ttl_seq > cap_seq:
            topic.expired_total += len(lost)
        else:
            topic.evicted_total += len(lost)
        _lose(topic, front, lost, sizes=None)
    topic.cap_seq = max(topic.cap_seq, cap_seq)
    topic.ttl_seq = max(topic.ttl_seq, ttl_seq)
    topic.evict_floor = max(topic.evict_floor, last + 1)


def would_overflow(topic: Topic, *, records: int, size: int) -> bool:
    """discard "reject": a write is refused if it would not fit, counting batches that are not readable yet."""
    config = topic.config
    return bool(
        (config.cap_records and topic.count + topic.pending_records + records > config.cap_records)
        or (config.cap_bytes and topic.bytes + topic.pending_bytes + size > config.cap_bytes)
    )


def never_fits(topic: Topic, *, records: int, size: int) -> bool:
    config = topic.config
    return bool((config.cap_records and records > config.cap_records) or (config.cap_bytes and size > config.cap_bytes))
