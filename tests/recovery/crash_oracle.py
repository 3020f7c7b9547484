"""What a server owes after a crash: a ledger of all that was sent and acknowledged, and the check against a server.

Rules: every record's data names its batch and its place in it, so what a server shows can be traced to what was
sent. A batch is SENT until its answer is known; a check decides what became of those that were not answered, and
from then on holds the server to it. A seq belongs to one record for ever, in all lives of the topic.

    what                         after kill -9 it must be
    acknowledged batch           there, whole, with the seqs of the answer, byte for byte
    unanswered batch             there as a whole, in order, or nowhere
    refused batch                nowhere
    acknowledged delete          effective
    unanswered delete            effective for everything it covers, or for nothing
    ephemeral records            gone; their seqs are not given out again
    config, also of ephemeral    as acknowledged, or as the last unanswered PUT said

memory counts as disk here: it makes no promise to clients, but it takes the same write, and losing a process must
lose nothing that was written.
"""

from __future__ import annotations

import enum
import itertools
import json
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from crash_server import Answer, Client, NoAnswer, Server
from figures import ACKNOWLEDGED, CHECKED, LOST

from topics.storage.format import RECORD_OVERHEAD

Given = tuple[str, str | None, bytes | None] | tuple[str, str | None, bytes | None, str | None]
_NAMED = re.compile(rb'^\{"b":(\d+),"i":(\d+),"n":(\d+)[,}]')


class Fate(enum.Enum):
    SENT = "sent"  # no answer: unknown
    ACKED = "acked"  # answered, or unanswered and found after a crash
    REFUSED = "refused"  # an answer that promises that nothing was done
    LOST = "lost"  # unanswered and not found after a crash


class Record(msgspec.Struct, frozen=True):
    data: bytes
    tag: str | None = None
    meta: bytes | None = None
    node: str | None = None

    @property
    def size(self) -> int:
        return len(self.data) + len(self.meta or b"") + RECORD_OVERHEAD

    def json(self) -> bytes:
        parts = [b'"data":' + self.data]
        if self.tag is not None:
            parts.append(b'"tag":' + json.dumps(self.tag).encode())
        if self.node is not None:
            parts.append(b'"node":' + json.dumps(self.node).encode())
        if self.meta is not None:
            parts.append(b'"meta":' + self.meta)
        return b"{" + b",".join(parts) + b"}"


class Shown(msgspec.Struct):
    """A record as a diff shows it."""

    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    tag: str | None = msgspec.field(name="$tag", default=None)
    node: str | None = msgspec.field(name="$node", default=None)
    meta: msgspec.Raw = msgspec.Raw()  # empty: absent; msgspec has no union with Raw


class _Diff(msgspec.Struct):
    records: list[Shown]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    tombstone: dict[str, Any] | None


_decode_diff = msgspec.json.Decoder(_Diff).decode


class Batch:
    def __init__(self, number: int, records: Sequence[Record], key: str | None) -> None:
        self.number = number
        self.records = records
        self.key = key
        self.fate = Fate.SENT
        self.first_seq = 0  # once known
        self.life = 0  # in which life of the server it was sent

    def body(self) -> bytes:
        fields = [b'"records":[' + b",".join(record.json() for record in self.records) + b"]"]
        if self.key is not None:
            fields.append(b'"idempotency_key":' + json.dumps(self.key).encode())
        return b"{" + b",".join(fields) + b"}"


class Deletion:
    """before_seq, or the tags that were current when it was sent; covers nothing that was sent after it."""

    def __init__(self, *, before_seq: int | None, tags: frozenset[str] | None, up_to_batch: int) -> None:
        self.before_seq = before_seq
        self.tags = tags
        self.up_to_batch = up_to_batch
        self.fate = Fate.SENT

    def covers(self, batch: Batch, index: int, seq: int) -> bool:
        if batch.number > self.up_to_batch:
            return False
        if self.before_seq is not None and (not seq or seq >= self.before_seq):
            return False
        return self.tags is None or batch.records[index].tag in self.tags


class Reading(msgspec.Struct):
    records: list[Shown]
    head_seq: int
    earliest_seq: int
    tombstone: dict[str, Any] | None


class TopicLedger:
    def __init__(self, oracle: Oracle, name: str, durability: str) -> None:
        self.name = name
        self.durability = durability
        self.cap_records = 0
        self.batches: dict[int, Batch] = {}
        self.deletions: list[Deletion] = []
        self.config: dict[str, Any] | None = None  # as last acknowledged
        self.unanswered_configs: list[dict[str, Any]] = []
        self.dropped: Fate | None = None
        self.highest_acked = 0
        self.earliest_seen = 0
        self._owner: dict[int, tuple[int, int]] = {}  # seq -> batch, index; for ever
        self._oracle = oracle
        self._lock = threading.Lock()

    # --- doing -----------------------------------------------------------------------------------------

    def put(self, client: Client, **fields: Any) -> Answer:
        fields = {"durability": self.durability, **fields}
        wanted = {**fields}
        try:
            answer = client.put(self.name, **fields)
        except NoAnswer:
            self.unanswered_configs.append(wanted)
            raise
        if answer.ok:
            self.config = answer.body["config"]
            self.cap_records = self.config["cap_records"]
            self.unanswered_configs = []
            for name, value in wanted.items():
                assert self.config[name] == value, f"{self.name}: config {name} echoed as {self.config[name]!r}"
        elif answer.outcome_unknown:
            self.unanswered_configs.append(wanted)
        return answer

    def new_batch(self, records: Sequence[Given], key: str | None = None) -> Batch:
        """records: (padding, tag, meta) or (padding, tag, meta, node)."""
        number = next(self._oracle.numbers)
        count = len(records)
        made = []
        for index, (padding, tag, meta, *node) in enumerate(records):
            # A spelling that no encoder would choose: the bytes must come back as they were sent.
            data = b'{"b":%d,"i":%d,"n":%d, "v":1.50E+1,"p":"%b"}' % (number, index, count, padding.encode())
            made.append(Record(data, tag, meta, node[0] if node else None))
        batch = Batch(number, made, key)
        batch.life = self._oracle.life
        with self._lock:
            self.batches[number] = batch
        return batch

    def send(self, client: Client, batch: Batch) -> Answer:
        answer = client.call("POST", f"/v0/topics/{self.name}", batch.body())
        self.settle(batch, answer)
        return answer

    def settle(self, batch: Batch, answer: Answer) -> None:
        if answer.ok:
            body = answer.body
            assert body["count"] == len(batch.records)
            assert body["last_seq"] - body["first_seq"] + 1 == body["count"]
            assert body["seqs"] == list(range(body["first_seq"], body["last_seq"] + 1))
            assert body["head_seq"] >= body["last_seq"]
            self._acked(batch, body["first_seq"])
        elif not answer.outcome_unknown:
            batch.fate = Fate.REFUSED

    def append(self, client: Client, records: Sequence[Given], key: str | None = None) -> Batch:
        batch = self.new_batch(records, key)
        self.send(client, batch)
        return batch

    def append_plain(self, client: Client, count: int = 1, *, key: str | None = None, padding: str = "") -> Batch:
        batch = self.append(client, [(padding, None, None)] * count, key)
        assert batch.fate is Fate.ACKED, f"{self.name}: an append was {batch.fate.value}"
        return batch

    def _acked(self, batch: Batch, first_seq: int) -> None:
        with self._lock:
            batch.fate = Fate.ACKED
            batch.first_seq = first_seq
            ACKNOWLEDGED.add(len(batch.records))
            for index in range(len(batch.records)):
                self._claim(first_seq + index, batch.number, index)
            self.highest_acked = max(self.highest_acked, first_seq + len(batch.records) - 1)

    def _claim(self, seq: int, number: int, index: int) -> None:
        owner = self._owner.setdefault(seq, (number, index))
        assert owner == (number, index), (
            f"{self.name}: seq {seq} was given to record {index} of batch {number}, and before to {owner}"
        )

    def delete(
        self,
        client: Client,
        *,
        before_seq: int | None = None,
        tags: Iterable[str] | None = None,
        match: Any = None,
    ) -> Answer:
        """match is what goes on the wire, tags what it matches."""
        deletion = Deletion(
            before_seq=before_seq,
            tags=None if tags is None else frozenset(tags),
            up_to_batch=self._oracle.last_number() if before_seq is None else 1 << 62,
        )
        with self._lock:
            self.deletions.append(deletion)
        fields: dict[str, Any] = {}
        if before_seq is not None:
            fields["before_seq"] = before_seq
        if match is not None:
            fields["match"] = match
        answer = client.delete(self.name, **fields)
        if answer.ok:
            deletion.fate = Fate.ACKED
        elif not answer.outcome_unknown:
            deletion.fate = Fate.REFUSED
        return answer

    def drop(self, client: Client) -> Answer:
        self.dropped = Fate.SENT
        answer = client.call("DELETE", f"/v0/topics/{self.name}")
        if answer.ok:
            self.dropped = Fate.ACKED
        elif not answer.outcome_unknown:
            self.dropped = None
        return answer

    # --- checking --------------------------------------------------------------------------------------

    def check(self, client: Client, *, crashed: bool = True) -> Reading | None:
        """Everything the server shows of this topic is owed, and everything owed is shown.

        crashed: whether ephemeral records must be gone; without it those of the current life must be there.
        """
        state = client.get(self.name)
        if self.dropped is not None:
            if state.status == 404:
                self.dropped = Fate.ACKED
                return None
            assert self.dropped is not Fate.ACKED, f"{self.name}: dropped, and here again"
            self.dropped = None
        if state.status == 404 and self.config is None and not self._may_exist():
            return None
        assert state.ok, f"{self.name}: {state.status} {state.raw!r}"
        self._check_config(state.body["config"])
        reading = read_all(client, self.name)
        shown = {record.seq: record for record in reading.records}
        assert len(shown) == len(reading.records)
        self._check_order(reading)
        self._trace(reading.records)
        self._resolve_deletions(shown)
        expected = self._expected(crashed=crashed)
        if self.cap_records:
            expected = dict(sorted(expected.items())[-self.cap_records :])
        missing = sorted(expected.keys() - shown.keys())
        surplus = sorted(shown.keys() - expected.keys())
        CHECKED.add(len(expected))
        LOST.add(len(missing))
        assert not missing, (
            f"{self.name} ({self.durability}): {len(missing)} records missing, first seqs {missing[:5]} "
            f"(batches {[self._owner[seq] for seq in missing[:5]]}); head {reading.head_seq}, "
            f"earliest {reading.earliest_seq}"
        )
        assert not surplus, f"{self.name} ({self.durability}): {len(surplus)} records that must not be, {surplus[:5]}"
        body = state.body
        assert body["count"] == len(shown)
        assert body["bytes"] == sum(record.size for record in expected.values())
        assert reading.head_seq >= self.highest_acked, (
            f"{self.name}: head_seq {reading.head_seq} is below the acknowledged {self.highest_acked}"
        )
        earliest = min(shown, default=reading.head_seq + 1)
        assert reading.earliest_seq == body["earliest_seq"] == earliest
        assert reading.earliest_seq >= self.earliest_seen, f"{self.name}: earliest_seq went back"
        self.earliest_seen = reading.earliest_seq
        return reading

    def _may_exist(self) -> bool:
        return any(batch.fate is Fate.ACKED for batch in self.batches.values())

    def _check_config(self, config: dict[str, Any]) -> None:
        if self.config is not None and config == self.config:
            self.unanswered_configs = []
            return
        for wanted in reversed(self.unanswered_configs):
            if all(config[name] == value for name, value in wanted.items()):
                self.config = config
                self.unanswered_configs = []
                return
        assert self.config is None, f"{self.name}: config is {config}, acknowledged was {self.config}"
        if self.config is None:
            self.config = config
            assert config["durability"] == self.durability

    def _check_order(self, reading: Reading) -> None:
        last_seq = last_ts = 0
        for record in reading.records:
            assert record.seq > last_seq
            assert record.ts >= last_ts, f"{self.name}: ts goes back at seq {record.seq}"
            last_seq, last_ts = record.seq, record.ts
        assert last_seq <= reading.head_seq

    def _trace(self, records: list[Shown]) -> None:
        """Every record shown is one that was sent, unchanged, in its place; unanswered batches found are now owed."""
        for record in records:
            data = bytes(record.data)
            named = _NAMED.match(data)
            assert named is not None, f"{self.name}: seq {record.seq} is not ours: {data[:80]!r}"
            number, index = int(named[1]), int(named[2])
            batch = self.batches[number]
            sent = batch.records[index]
            shown = Record(data, record.tag, bytes(record.meta) or None, record.node)
            LOST.add(shown != sent)
            assert shown == sent, f"{self.name}: seq {record.seq} was changed: {shown} instead of {sent}"
            assert batch.fate is not Fate.REFUSED, f"{self.name}: batch {number} was refused, and is here"
            assert batch.fate is not Fate.LOST, f"{self.name}: batch {number} was gone after a crash, and is here again"
            if batch.fate is Fate.SENT:
                self._acked(batch, record.seq - index)
            assert record.seq == batch.first_seq + index, (
                f"{self.name}: record {index} of batch {number} is at seq {record.seq}, acknowledged as "
                f"{batch.first_seq + index}"
            )
        for batch in self.batches.values():
            if batch.fate is Fate.SENT:
                batch.fate = Fate.LOST

    def _resolve_deletions(self, shown: dict[int, Shown]) -> None:
        unanswered = [deletion for deletion in self.deletions if deletion.fate is Fate.SENT]
        if not unanswered:
            return
        for deletion in unanswered:
            deletion.fate = Fate.ACKED
            for seq in shown:
                number, index = self._owner[seq]
                if deletion.covers(self.batches[number], index, seq):
                    deletion.fate = Fate.LOST
                    break

    def _expected(self, *, crashed: bool) -> dict[int, Record]:
        effective = [deletion for deletion in self.deletions if deletion.fate is Fate.ACKED]
        floor = max((each.before_seq for each in effective if each.before_seq and each.tags is None), default=0)
        tagged = [each for each in effective if each.tags is not None]
        expected = {}
        for batch in self.batches.values():
            if batch.fate is not Fate.ACKED:
                continue
            if self.durability == "ephemeral" and (crashed or batch.life != self._oracle.life):
                continue
            for index, record in enumerate(batch.records):
                seq = batch.first_seq + index
                if seq < floor:
                    continue
                if record.tag is not None and any(each.covers(batch, index, seq) for each in tagged):
                    continue
                expected[seq] = record
        return expected

    def check_keys(self, client: Client, *, most: int = 20) -> tuple[int, int]:
        """Send batches with keys again: those that survived are deduplicated, those that did not are written now.

        Call it after check(), within the topic's window. Returns how many were which.
        """
        deduped = written = 0
        with_keys = [batch for batch in self.batches.values() if batch.key is not None]
        lost = [batch for batch in with_keys if batch.fate is Fate.LOST and not self._covered(batch)]
        if self.cap_records:
            lost = []  # it may have been written and evicted
        kept = [batch for batch in with_keys if batch.fate is Fate.ACKED]
        for batch in kept[-most:]:
            answer = client.call("POST", f"/v0/topics/{self.name}", batch.body())
            assert answer.ok, answer.raw
            assert answer.body["deduped"], f"{self.name}: batch {batch.number} survived, its key {batch.key} did not"
            assert answer.body["first_seq"] == batch.first_seq
            deduped += 1
        for batch in lost[-most:]:
            batch.fate, batch.life = Fate.SENT, self._oracle.life
            answer = client.call("POST", f"/v0/topics/{self.name}", batch.body())
            assert answer.ok, answer.raw
            assert not answer.body["deduped"], (
                f"{self.name}: batch {batch.number} was lost, its key {batch.key} was not"
            )
            self.settle(batch, answer)
            written += 1
        return deduped, written

    def _covered(self, batch: Batch) -> bool:
        """Whether an effective delete explains that nothing of it is seen."""
        return any(
            deletion.fate is Fate.ACKED and (deletion.tags is None or deletion.covers(batch, index, 0))
            for deletion in self.deletions
            for index in range(len(batch.records))
        )


class Oracle:
    def __init__(self) -> None:
        self.topics: dict[str, TopicLedger] = {}
        self.numbers = itertools.count(1)
        self.life = 1

    def last_number(self) -> int:
        """Take a number: batches made before this call have lower ones."""
        return next(self.numbers)

    def topic(self, name: str, durability: str = "disk") -> TopicLedger:
        if name not in self.topics:
            self.topics[name] = TopicLedger(self, name, durability)
        return self.topics[name]

    def create(self, client: Client, name: str, durability: str = "disk", **config: Any) -> TopicLedger:
        ledger = self.topic(name, durability)
        answer = ledger.put(client, **config)
        assert answer.ok, answer.raw
        return ledger

    def restarted(self) -> None:
        """The processes that held the topics are gone; call before check()."""
        self.life += 1

    def check(self, server: Server, *, crashed: bool = True) -> int:
        """All topics against the server; returns how many records were read."""
        client = server.client()
        read = 0
        listed = list_topics(client)
        try:
            for name, ledger in self.topics.items():
                reading = ledger.check(client, crashed=crashed)
                assert (name in listed) == (reading is not None), f"{name}: the listing disagrees with the topic"
                if reading is not None:
                    read += len(reading.records)
                    assert (listed[name]["head_seq"], listed[name]["count"]) == (reading.head_seq, len(reading.records))
        finally:
            client.close()
        return read

    def check_keys(self, server: Server, *, most: int = 20) -> tuple[int, int]:
        client = server.client()
        deduped = written = 0
        try:
            for ledger in self.topics.values():
                if ledger.dropped is None and ledger.durability != "ephemeral":
                    more, again = ledger.check_keys(client, most=most)
                    deduped += more
                    written += again
        finally:
            client.close()
        return deduped, written

    def acked(self) -> int:
        """Batches acknowledged so far."""
        return sum(
            batch.fate is Fate.ACKED for ledger in self.topics.values() for batch in list(ledger.batches.values())
        )


def list_topics(client: Client) -> dict[str, dict[str, Any]]:
    """All pages of the listing, by name."""
    found: dict[str, dict[str, Any]] = {}
    cursor = ""
    while True:
        answer = client.call("GET", f"/v0/topics?page_size=50{cursor}")
        assert answer.ok, answer.raw
        page = [row["topic"] for row in answer.body["topics"]]
        assert page == sorted(page)
        assert not found.keys() & set(page)
        found.update({row["topic"]: row for row in answer.body["topics"]})
        if "next_cursor" not in answer.body:
            return found
        cursor = f"&cursor={quote(answer.body['next_cursor'])}"


def read_all(client: Client, topic: str, *, from_seq: int = 0) -> Reading:
    records: list[Shown] = []
    tombstone: dict[str, Any] | None = None
    while True:
        answer = client.diff(topic, from_seq, limit=1000, include_tags=True)
        assert answer.ok, f"{topic}: {answer.status} {answer.raw!r}"
        diff = _decode_diff(answer.raw)
        tombstone = tombstone or diff.tombstone
        records.extend(diff.records)
        assert diff.caught_up or diff.next_from_seq > from_seq
        from_seq = diff.next_from_seq
        if diff.caught_up:
            return Reading(records, diff.head_seq, diff.earliest_seq, tombstone)
