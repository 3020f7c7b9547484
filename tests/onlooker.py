"""Somebody who looks at a data folder beside the server that writes it: all that a folder shows, all that the API says,
and whether the two agree.

Two readings of the API with a look at the folder between them tell what the folder must show: if the readings are the
same, exactly that (`steady`); if clients write meanwhile, everything that is in both, and nothing that was gone before
(`between`).
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from topics.datadir.batch import Batch
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.storage.format import DELETED, RECORD_OVERHEAD
from topics.storage.leases import decode_event

WITHIN_S = 40.0


class Seen(NamedTuple):
    """A record, to the last byte."""

    seq: int
    ts: int
    tag: str | None
    node: str | None
    meta: bytes | None
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data) + len(self.meta or b"") + RECORD_OVERHEAD


# --- all that a folder shows -------------------------------------------------------------------------


def named(folder: Folder, name: str) -> Topic:
    (topic,) = (topic for topic in folder.topics if topic.name == name)
    return topic


def live_records(folder: Folder, topic: Topic, first: int = 1, last: int | None = None) -> list[Seen]:
    """From the bytes on the disk."""
    found = []
    last = topic.head_seq if last is None else last
    for batch in topic.select(first, last):
        wanted = {seq for seq in batch.live_seqs(max(first, topic.low)) if seq <= last}
        if not wanted:
            continue
        columns = folder.columns(batch)
        fields = zip(columns.times(), columns.tags(), columns.nodes(), columns.metas(), columns.data(), strict=True)
        found += [Seen(seq, *each) for seq, each in enumerate(fields, batch.first) if seq in wanted]
    return found


def _shown_batch(batch: Batch) -> tuple[Any, ...]:
    flags = None if batch.flags is None or DELETED not in batch.flags else bytes(batch.flags)
    return (
        batch.file,
        batch.wal,
        batch.salt,
        batch.offset,
        batch.length,
        batch.first,
        batch.count,
        batch.first_ts,
        batch.last_ts,
        batch.size,
        batch.tagged,
        flags,
    )


def _shown_topic(folder: Folder, topic: Topic, *, sizes: bool) -> dict[str, Any]:
    return {
        "shard": topic.shard,
        "id": topic.id,
        "name": topic.name,
        "config": topic.config,
        "created_ms": topic.created_ms,
        "head_seq": topic.head_seq,
        "earliest_seq": topic.earliest_seq,
        "disk_seq": topic.disk_seq,
        "low": topic.low,
        "evict_floor": topic.evict_floor,
        "cap_seq": topic.cap_seq,
        "ttl_seq": topic.ttl_seq,
        "count": topic.count,
        "bytes": topic.bytes(folder.columns) if sizes else None,
        "deleted_total": topic.deleted_total,
        "evicted_total": topic.evicted_total,
        "expired_total": topic.expired_total,
        "last_write_ms": topic.last_write_ms,
        "last_read_ms": topic.last_read_ms,
        "holes": topic.holes,
        "trims": topic.trims,
        "lost": topic.lost,
        "segments": [msgspec.structs.astuple(segment) for segment in topic.segments],
        "batches": [_shown_batch(batch) for batch in topic.batches],
    }


def shown(folder: Folder, *, sizes: bool = True) -> dict[str, Any]:
    """sizes: read what has to be read for them; its files must still be there."""
    return {
        "shards": [
            (shard.number, shard.layout, shard.snapshot, shard.covered, shard.clean, shard.clock_ms, shard.torn)
            for shard in folder.shards
        ],
        "wals": [msgspec.structs.astuple(wal) for shard in folder.shards for wal in shard.wals],
        "topics": {topic.name: _shown_topic(folder, topic, sizes=sizes) for topic in folder.topics},
        "rules": folder.rules,
    }


def assert_same(seen: Folder, expected: Folder) -> None:
    mine, others = shown(seen), shown(expected)
    assert mine["topics"].keys() == others["topics"].keys()
    for name, topic in others["topics"].items():
        for field, value in topic.items():
            assert mine["topics"][name][field] == value, f"{name}: {field}"
    assert mine == others


def moment(folder: Folder) -> list[tuple[str | None, int]]:
    """What has been read: two folders that agree here have seen the same bytes."""
    return [(shard.snapshot, max((wal.last_lsn for wal in shard.wals), default=0)) for shard in folder.shards]


def contents(folder: Path | str) -> dict[str, tuple[int, int, int, str]]:
    """Every file: mode, size, time of the last change, content. To see that nothing is written."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        state = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else os.fspath(path.name)
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_size, state.st_mtime_ns, content)
    return found


class Stream:
    """Takes what is there up to disk_seq, and comes back there the next time."""

    def __init__(self, data_dir: str, *topics: str) -> None:
        self.folder = Folder(data_dir)
        self._at = dict.fromkeys(topics, 0)
        self._got: dict[str, dict[int, Seen]] = {name: {} for name in topics}

    def look(self) -> None:
        self.folder.look()
        for name, at in self._at.items():
            topic = named(self.folder, name)
            disk_seq = topic.disk_seq
            try:
                records = live_records(self.folder, topic, at + 1, disk_seq)
            except FileNotFoundError:
                continue  # it went just now: the next look finds it elsewhere
            self._got[name] |= {record.seq: record for record in records}
            self._at[name] = max(at, disk_seq)

    def check_end(self, told: dict[str, Told]) -> int:
        """Everything that is there was taken, as it is; how much that was."""
        for name, got in self._got.items():
            for record in told[name].records:
                assert got.get(record.seq) == record, f"{name}: {record.seq} was passed over, now at {self._at[name]}"
        return sum(map(len, self._got.values()))


# --- all that the API says ---------------------------------------------------------------------------


class _Shown(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: msgspec.Raw = msgspec.Raw()


class _Diff(msgspec.Struct):
    records: list[_Shown]
    next_from_seq: int
    caught_up: bool
    tombstone: dict[str, Any] | None


class Told(msgspec.Struct):
    """What the API says of a topic. The head and the floor were asked for first, the records after that."""

    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    config: dict[str, Any]
    queue: dict[str, int] | None
    records: list[Seen]


class Api:
    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        content = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, content, {} if content is None else {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def must(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        status, raw = self.ask(method, path, body)
        assert status < 300, f"{method} {path}: {status} {raw[:300]!r}"
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def read(self, method: str, path: str, body: object = None) -> bytes:
        """A shard that has just died is back in a moment, and copies that were in memory are made again."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            status, raw = self.ask(method, path, body)
            if status == 200:
                return raw
            assert status == 503, f"{method} {path}: {status} {raw[:300]!r}"
            assert time.monotonic() < deadline, f"{method} {path}: {raw[:300]!r}"
            time.sleep(0.05)

    def put(self, topic: str, **config: object) -> dict[str, Any]:
        return self.must("PUT", f"/v0/topics/{topic}", config)

    def append(self, topic: str, records: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
        return self.must("POST", f"/v0/topics/{topic}", {"records": records, **fields})

    def post(self, topic: str, verb: str, **fields: object) -> dict[str, Any]:
        return self.must("POST", f"/v0/topics/{topic}/{verb}", fields)

    def state(self, topic: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.read("GET", f"/v0/topics/{topic}?touch=false"))
        return found

    def names(self) -> list[str]:
        found: list[str] = []
        cursor = ""
        while True:
            page = json.loads(self.read("GET", f"/v0/topics?page_size=500{cursor}"))
            found += [row["topic"] for row in page["topics"]]
            if "next_cursor" not in page:
                return found
            cursor = f"&cursor={quote(page['next_cursor'])}"

    def diff(self, topic: str, from_seq: int, *, limit: int = 1_000) -> _Diff:
        body = {"from_seq": from_seq, "limit": limit, "include_tags": True, "include_meta": True}
        return msgspec.json.decode(self.read("POST", f"/v0/topics/{topic}/diff", body), type=_Diff)

    def records(self, topic: str) -> Iterator[Seen]:
        from_seq = 0
        while True:
            page = self.diff(topic, from_seq)
            for each in page.records:
                meta = bytes(each.meta) or None
                yield Seen(each.seq, each.ts, each.tag, each.node, meta, bytes(each.data))
            if page.caught_up:
                return
            from_seq = page.next_from_seq

    def told(self, topic: str) -> Told:
        state = self.state(topic)
        fields = {name: state[name] for name in ("head_seq", "earliest_seq", "count", "bytes", "config")}
        return Told(**fields, queue=state.get("queue"), records=list(self.records(topic)))

    def everything(self) -> dict[str, Told]:
        return {name: self.told(name) for name in self.names()}

    def close(self) -> None:
        self._connection.close()


# --- do they agree? ----------------------------------------------------------------------------------


NONE: frozenset[str] = frozenset()


def steady(
    api: Api,
    *folders: Folder,
    forgetful: frozenset[str] = NONE,
    trimmed: frozenset[str] = NONE,
    within_s: float = WITHIN_S,
) -> None:
    """While no client writes. Copies of routers reach the disk a little later, and TTLs go on: look until nothing has
    changed between two readings. forgetful, trimmed: see `check_topic`."""
    deadline = time.monotonic() + within_s
    told: dict[str, Told] = {}
    while True:
        names = api.names()
        for folder in folders:
            folder.look()
        states = {name: api.state(name) for name in names}
        late = [name for folder in folders for name in names if is_late(folder, name, states[name], trimmed)]
        if not late:
            before = api.everything()
            for folder in folders:
                folder.look()
            told = api.everything()
            if told == before:
                break
        assert time.monotonic() < deadline, f"it never rests: {late or 'the answers change'}"
        time.sleep(0.1)
    try:
        _check_all(api, folders, told, forgetful=forgetful, trimmed=trimmed)
    except FileNotFoundError:  # the server has moved on since the look, as it may at any time: look again
        remaining_s = deadline - time.monotonic()
        if remaining_s < 0:
            raise
        steady(api, *folders, forgetful=forgetful, trimmed=trimmed, within_s=remaining_s)


def _check_all(
    api: Api,
    folders: tuple[Folder, ...],
    told: dict[str, Told],
    *,
    forgetful: frozenset[str],
    trimmed: frozenset[str],
) -> None:
    for folder in folders:
        visible = [topic.name for topic in folder.topics if not topic.internal]
        assert visible == sorted(told)
        for name, truth in told.items():
            check_topic(folder, named(folder, name), truth, forgetful=name in forgetful, trimmed=name in trimmed)
            if name not in forgetful | trimmed:
                check_tombstones(named(folder, name), truth, api)
            if truth.queue is not None:
                check_leases(folder, named(folder, name), truth)


def is_late(folder: Folder, name: str, state: dict[str, Any], trimmed: frozenset[str] = NONE) -> bool:
    """Whether some of its copies are in memory only."""
    topic = named(folder, name)
    if name in trimmed:
        return topic.count != int(state["count"])
    return topic.pipe is not None and topic.disk_seq < int(state["head_seq"])


def check_topic(folder: Folder, topic: Topic, truth: Told, *, forgetful: bool = False, trimmed: bool = False) -> None:
    """forgetful: it is ephemeral. Its records are never on the disk, and where its head is the disk knows roughly.
    trimmed: a router copies from such a topic into it. If the source loses records their place here is a tombstone,
    which reaches the disk with the next records."""
    records = live_records(folder, topic)
    assert topic.count == len(records)
    assert topic.bytes(folder.columns) == sum(record.size for record in records)
    assert msgspec.to_builtins(topic.config) == truth.config
    if forgetful:
        assert not records
        assert topic.head_seq <= truth.head_seq
        return
    assert records == truth.records, topic.name
    if trimmed:
        assert topic.head_seq <= truth.head_seq
        return
    found = (topic.head_seq, topic.earliest_seq, topic.count, topic.bytes(folder.columns))
    assert found == (truth.head_seq, truth.earliest_seq, truth.count, truth.bytes), topic.name
    assert topic.disk_seq == truth.head_seq
    if topic.pipe is None:
        gone = topic.deleted_total + topic.evicted_total - topic.lost_total + topic.expired_total
        gone += topic.lost + topic.trimmed + topic.skipped_total
        assert topic.head_seq == topic.count + gone, f"{topic.name}: what was given out and what became of it"


def check_tombstones(topic: Topic, truth: Told, api: Api) -> None:
    """A reader of the folder is told of a loss where a client is, and of the same records. Jobs move to their dead
    letter and records expire without a client, so only a topic whose records are as they were counts."""
    for from_seq in {0, topic.evict_floor - 2, topic.evict_floor - 1, topic.head_seq // 2, topic.head_seq}:
        if not 0 <= from_seq <= topic.head_seq:
            continue
        told = api.diff(topic.name, from_seq, limit=1).tombstone
        gap = topic.find_gap(from_seq + 1, topic.head_seq)
        if gap is not None and any(from_seq < record.seq < gap[0] for record in truth.records):
            gap = None  # it is told to whoever has read so far
        if not _same_gap(topic, told, gap):
            wrong = f"{topic.name} from {from_seq}: a client is told {told}, the folder says {gap}"
            assert api.told(topic.name).records != truth.records, wrong
            return


def _same_gap(topic: Topic, told: dict[str, Any] | None, gap: tuple[int, int, str] | None) -> bool:
    if told is None or gap is None:
        return told is None and gap is None
    first, last, reason = gap
    # A client is told to go on behind what was deleted, too: below `low` everything is, by its number.
    low = max(last + 1, topic.low)
    between = [seq for batch in topic.batches for seq in batch.live_seqs(low) if seq <= told["gap_to"]]
    return (first, reason) == (told["gap_from"], told["reason"]) and last <= told["gap_to"] and not between


def check_leases(folder: Folder, queue: Topic, truth: Told) -> None:
    """Who holds what, from the leases log alone, as docs/FORMAT.md says."""
    log = folder.leases_of(queue)
    leased: dict[int, tuple[int, int]] = {}  # seq -> (lease, deadline)
    dead = 0
    for record in [] if log is None else live_records(folder, log):
        event = decode_event(record.data)
        if event.event == "checkpoint":
            leased = {job.seq: (job.lease, job.deadline) for job in event.jobs if job.state == 1}
            dead = event.dead_lettered
        for seq, lease in zip(event.seqs, event.leases, strict=True):
            if event.event == "claimed":
                leased[seq] = (lease, event.deadline)
            elif leased.get(seq, (0, 0))[0] == lease:
                if event.event == "extended":
                    leased[seq] = (lease, event.deadline)
                else:
                    del leased[seq]
            if event.event == "dead_lettered":
                dead += 1
    live = {record.seq for record in truth.records}
    held = {seq for seq, (_, deadline) in leased.items() if seq in live and deadline > folder.taken_ms}
    assert truth.queue is not None
    assert (len(held), dead) == (truth.queue["in_flight"], truth.queue["dead_lettered"]), queue.name


def between(before: dict[str, Told], folder: Folder, after: dict[str, Told]) -> int:
    """While clients write: what was there before and is there after the look was there in between; what was gone before
    stays gone. Returns how many records were held against each other."""
    held = 0
    for name in before.keys() & after.keys():
        topic = named(folder, name)
        first = {record.seq: record for record in before[name].records}
        last = {record.seq: record for record in after[name].records}
        records = live_records(folder, topic)
        assert topic.count == len(records)
        assert topic.bytes(folder.columns) == sum(record.size for record in records)
        seen = {record.seq: record for record in records}
        until = topic.disk_seq
        for seq in first.keys() & last.keys():
            if seq <= until:
                assert seen.get(seq) == first[seq], f"{name}: record {seq}"
                held += 1
        for seq, record in seen.items():
            if seq <= before[name].head_seq:
                assert first.get(seq) == record, f"{name}: record {seq} was gone before"
            elif seq in last:
                assert last[seq] == record, f"{name}: record {seq}"
        if topic.pipe is None:
            assert topic.head_seq >= max([before[name].head_seq, *first])
            assert before[name].earliest_seq <= topic.earliest_seq
            if after[name].head_seq >= topic.head_seq:
                assert topic.earliest_seq <= max(after[name].earliest_seq, topic.head_seq + 1)
    return held
