"""A data folder, proved: every file that counts is read, and what they say is held against each other.

Three rounds. The files, one by one (checking.py): headers, checksums, indexes, frames, blocks. What only shows between
files: frames missing from the log, segments that overlap, topics on the wrong shard, snapshots that contradict
themselves. And the topics as a reader would see them (view/folder.py): seqs that nobody can account for, counters that
don't add up.

A problem means that something is damaged or missing. A note is worth knowing and loses nobody anything: a write that a
crash cut short, files that the next start removes. A server may be at work meanwhile; whatever looks wrong is looked at
again, and only what is still wrong then and still counts is called so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import msgspec

from topics.datadir import inventory
from topics.datadir.files import Files
from topics.datadir.fsck.checking import Checked, check_file
from topics.datadir.inventory import Entry, Inventory
from topics.datadir.ranges import total
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.errors import TopicsError
from topics.storage.config import bucket_of, owner_of_id
from topics.storage.leases import SUFFIX, is_log_name
from topics.storage.manifest import COLD_NOTE, MANIFEST_NAME
from topics.storage.paths import numbered_name, parse_numbered, shard_dir
from topics.storage.snapshot import ShardState, TopicState, decode_snapshot, decode_topic

MOST_SHOWN = 1_000  # of problems; all are counted
_PAUSE_S = 0.2
_UNREADABLE = (TopicsError, msgspec.MsgspecError)

Progress = Callable[[str, int, int], None]  # (file, files done, files in all)


class Trouble(msgspec.Struct, frozen=True):
    file: str  # below the data folder
    offset: int
    text: str
    shard: int | None = None
    topic: str | None = None

    @property
    def place(self) -> tuple[str, int, str]:
        """To sort by. A name may be there twice, once in each tier, and shard and topic may be None."""
        return self.file, self.offset, self.text


class Verdict(msgspec.Struct, kw_only=True):
    deep: bool
    files: int = 0
    bytes: int = 0
    frames: int = 0
    blocks: int = 0
    records: int = 0  # in files, dead ones too
    topics: int = 0
    live_records: int = 0
    problem_count: int = 0
    problems: list[Trouble] = []
    notes: list[Trouble] = []

    @property
    def clean(self) -> bool:
        return not self.problem_count


def verify(data_dir: str, *, deep: bool, running: bool, progress: Progress = lambda *_: None) -> Verdict:
    """running: a server holds the folder, so young files that nothing names are its work."""
    return _Verification(data_dir, deep=deep, running=running, progress=progress).run()


class _Verification:
    def __init__(self, data_dir: str, *, deep: bool, running: bool, progress: Progress) -> None:
        self._data_dir = data_dir
        self._running = running
        self._progress = progress
        self._verdict = Verdict(deep=deep)
        self._told: set[Trouble] = set()

    def run(self) -> Verdict:
        verdict = self._verdict
        try:
            Files(self._data_dir)
        except TopicsError as exc:
            self._problem(Trouble(MANIFEST_NAME, 0, _sentence(exc, self._data_dir)))
            return verdict
        listed = self._list()
        checked = self._check_files(listed)
        for trouble in self._confirmed(listed, checked):
            self._problem(trouble)
        self._note_leftovers(listed, checked)
        self._look_at_topics()
        verdict.problems.sort(key=lambda trouble: trouble.place)
        verdict.notes.sort(key=lambda trouble: trouble.place)
        return verdict

    def _list(self) -> Inventory:
        now_ms = time.time_ns() // 1_000_000
        settled_ms = inventory.SETTLED_MS if self._running else 0
        return inventory.take(self._data_dir, now_ms=now_ms, settled_ms=settled_ms)

    def _problem(self, trouble: Trouble) -> None:
        if trouble in self._told:
            return
        self._told.add(trouble)
        self._verdict.problem_count += 1
        if len(self._verdict.problems) < MOST_SHOWN:
            self._verdict.problems.append(trouble)

    # --- file by file ---

    def _check_files(self, listed: Inventory) -> dict[str, Checked]:
        verdict, found = self._verdict, {}
        for done, entry in enumerate(listed.entries):
            self._progress(entry.file, done, len(listed.entries))
            found[entry.file] = checked = check_file(self._data_dir, entry, deep=verdict.deep)
            verdict.files += not (checked.missing or checked.away)
            verdict.bytes += checked.bytes
            verdict.records += checked.records
            if entry.kind == "wal":
                verdict.frames += checked.frames
            else:
                verdict.blocks += checked.frames
        self._progress("", len(listed.entries), len(listed.entries))
        return found

    def _confirmed(self, listed: Inventory, checked: dict[str, Checked]) -> list[Trouble]:
        """What is wrong, and still is if one looks again."""
        found = set(self._troubles(listed, checked))
        if not found or not self._running:
            return sorted(found, key=lambda trouble: trouble.place)
        time.sleep(_PAUSE_S)
        again = self._list()
        doubtful = {trouble.file for trouble in found}
        rechecked = dict(checked)
        for entry in again.entries:
            index = entry.file.removesuffix(".data") + ".idx"
            if entry.kind == "wal" or doubtful & {entry.file, index} or entry.file not in rechecked:
                rechecked[entry.file] = check_file(self._data_dir, entry, deep=self._verdict.deep)
        return sorted(found & set(self._troubles(again, rechecked)), key=lambda trouble: trouble.place)

    def _troubles(self, listed: Inventory, checked: dict[str, Checked]) -> Iterator[Trouble]:
        files = Files(self._data_dir)
        if (away := files.cold_away()) is not None:
            there = sum(checked[entry.file].away for entry in listed.entries)
            held = f"{there} segments are in it and were not looked at" if there else "no segment is missed"
            yield Trouble(COLD_NOTE, 0, f"{away}; {held}")
        for one in listed.damage:
            yield Trouble(one.file, 0, one.text.removeprefix(f"{one.file}: "), one.shard)
        for entry in listed.entries:
            found = checked[entry.file]
            if found.missing:
                where = "" if files.manifest.cold is None else f" here and in the cold tier {files.manifest.cold}"
                text = f"this file is missing{where}, though it counts; restore it from a backup"
                yield Trouble(entry.file, 0, text, entry.shard, entry.topic)
            for problem in found.problems:
                yield Trouble(problem.file, problem.offset, problem.text, entry.shard, entry.topic)
        yield from _overlaps(listed.entries)
        states = dict(self._states())
        shards = files.manifest.shards
        for shard in range(shards):
            logs = [(entry, checked[entry.file]) for entry in listed.entries if entry.kind == "wal"]
            own = [(entry, each) for entry, each in logs if entry.shard == shard]
            yield from _log_troubles(own, covered=listed.covered.get(shard, 0))
            if shard not in states and not any(one.shard == shard for one in listed.damage):
                yield from self._nameless(listed, own, shard)
        yield from _state_troubles(states, shards=shards)

    def _states(self) -> Iterator[tuple[int, tuple[str, ShardState]]]:
        """By shard: the snapshot that counts, and its file. One that can't be read is told of by the inventory."""
        files = Files(self._data_dir)
        for shard in range(files.manifest.shards):
            folder = shard_dir(files.data_dir, shard)
            try:
                parsed = [parse_numbered(name) for name in os.listdir(folder)]
                numbers = [one[1] for one in parsed if one and one[0] == files.manifest.layout and one[2] == "snap"]
                if not numbers:
                    continue
                path = os.path.join(folder, numbered_name(files.manifest.layout, max(numbers), "snap"))
                with open(path, "rb") as source:
                    yield shard, (files.relative(path), decode_snapshot(source.read(), path=path))
            except (FileNotFoundError, *_UNREADABLE):
                continue

    @staticmethod
    def _nameless(listed: Inventory, logs: list[tuple[Entry, Checked]], shard: int) -> Iterator[Trouble]:
        """A shard without a snapshot whose log does not go back to the beginning: its segments are nobody's."""
        if any(found.first_lsn == 1 for _, found in logs):
            return
        lost = [orphan for orphan in listed.orphans if orphan.shard == shard and orphan.file.endswith(".data")]
        if lost:
            text = f"shard {shard} has no snapshot, so nobody names its {len(lost)} segments and a start removes them"
            yield Trouble(lost[0].file, 0, text, shard)

    def _note_leftovers(self, listed: Inventory, checked: dict[str, Checked]) -> None:
        notes = self._verdict.notes
        for orphan in listed.orphans:
            text = f"counts for nothing ({orphan.why}); the next start removes it"
            notes.append(Trouble(orphan.file, 0, text, orphan.shard))
        if self._running:
            return  # the end of the log is being written
        for entry in listed.entries:
            if (at := checked[entry.file].torn) is not None:
                text = "the log ends here; what follows was cut short and never acknowledged: the next start drops it"
                notes.append(Trouble(entry.file, at, text, entry.shard))

    # --- as a reader sees it ---

    def _look_at_topics(self) -> None:
        try:
            folder = Folder(self._data_dir)
        except TopicsError as exc:
            if self._verdict.clean:
                file, _, text = str(exc).partition(": ")
                self._problem(Trouble(file, 0, text or "can't be read as a whole"))
            else:
                text = f"topics were not held against their records: {exc}"
                self._verdict.notes.append(Trouble(MANIFEST_NAME, 0, text))
            return
        for shard in folder.shards:
            home = folder.files.relative(shard.snapshot) if shard.snapshot else f"wal/shard-{shard.number:02d}"
            for topic in shard.topics.values():
                self._verdict.topics += not topic.internal
                self._verdict.live_records += topic.count
                for text in topic_troubles(topic):
                    self._problem(Trouble(home, 0, f"topic {topic.name!r}: {text}", shard.number, topic.name))


def topic_troubles(topic: Topic) -> Iterator[str]:
    """Watermarks that can't be, seqs that nobody can account for."""
    head = topic.head_seq
    if not topic.evict_floor <= topic.earliest_seq <= head + 1:
        yield f"evict_floor {topic.evict_floor}, earliest_seq {topic.earliest_seq} and head_seq {head} are out of order"
    if topic.evict_floor <= max(topic.cap_seq, topic.ttl_seq):
        yield f"evict_floor {topic.evict_floor} is below what caps and TTL took ({max(topic.cap_seq, topic.ttl_seq)})"
    gone = topic.deleted_total + topic.evicted_total + topic.expired_total
    if topic.count + gone > head:
        yield f"{topic.count} live and {gone} gone are more records than the {head} that were ever there"
    if unlogged := topic.unlogged:
        first, last = unlogged[0][0], unlogged[-1][1]
        yield f"{total(unlogged)} of seqs {first} to {last} were in the log alone, and a file of it is missing"
        return
    if topic.pipe is not None or topic.config.durability == "ephemeral":
        return  # some of its records are in memory alone
    unknown = missing_seqs(topic)
    known = topic.deleted_before  # what was deleted since is still in a file
    if unknown > known:
        yield f"{unknown} seqs have no record, and only {known} of them can have been deleted or skipped"


def missing_seqs(topic: Topic) -> int:
    """Seqs from the floor to the head that are in no batch and in no range that is known to be lost."""
    spans = [(batch.first, batch.last) for batch in topic.batches]
    spans += [*topic.holes, *topic.trims]
    at, missing = topic.low, 0
    for first, last in sorted(spans):
        missing += max(0, first - at)
        at = max(at, last + 1)
    return missing + max(0, topic.head_seq + 1 - at)


# --- between files -----------------------------------------------------------------------------------


def _overlaps(entries: Iterable[Entry]) -> Iterator[Trouble]:
    """Segments of one topic that hold the same seqs, by what the snapshot says."""
    segments = [entry for entry in entries if entry.kind == "segment"]
    segments.sort(key=lambda entry: (entry.topic_id, entry.first_seq))
    for before, entry in pairwise(segments):
        if entry.topic_id == before.topic_id and entry.first_seq <= before.last_seq:
            text = f"begins with seq {entry.first_seq}; the one before ends with {before.last_seq}"
            yield Trouble(entry.file, 0, text, entry.shard, entry.topic)


def _log_troubles(logs: list[tuple[Entry, Checked]], *, covered: int) -> Iterator[Trouble]:
    """Frames that are in no file: between two files, before the first, or behind the last."""
    full = [(entry, found) for entry, found in sorted(logs, key=lambda log: log[0].file) if found.frames]
    if not full:
        return
    entry, found = full[0]
    if found.first_lsn > covered + 1:
        text = f"the log begins with frame {found.first_lsn}, but the snapshot ends with {covered}; a file is missing"
        yield Trouble(entry.file, 0, text, entry.shard)
    for (_, before), (entry, found) in pairwise(full):
        if found.first_lsn != before.last_lsn + 1:
            text = f"begins with frame {found.first_lsn}; the file before ends with {before.last_lsn}"
            yield Trouble(entry.file, 0, text, entry.shard)
    entry, found = full[-1]
    if found.last_lsn < covered:
        text = f"the log ends with frame {found.last_lsn}, but the snapshot has seen {covered}"
        yield Trouble(entry.file, 0, text, entry.shard)


def _state_troubles(states: dict[int, tuple[str, ShardState]], *, shards: int) -> Iterator[Trouble]:
    """What snapshots say about themselves and about each other."""
    names: dict[str, int] = {}
    for shard, (file, state) in states.items():
        if state.shard != shard:
            yield Trouble(file, 0, f"says that it is of shard {state.shard}", shard)
        for raw in state.topics:
            try:
                topic = decode_topic(raw)
            except msgspec.MsgspecError as exc:
                yield Trouble(file, 0, f"a topic in it can't be read: {exc}", shard)
                continue
            for text in _topic_state_troubles(topic, shard=shard, shards=shards):
                yield Trouble(file, 0, f"topic {topic.name!r}: {text}", shard, topic.name)
            if topic.name in names:
                text = f"topic {topic.name!r} is there twice, also on shard {names[topic.name]}"
                yield Trouble(file, 0, text, shard, topic.name)
            names[topic.name] = shard


def _topic_state_troubles(topic: TopicState, *, shard: int, shards: int) -> Iterator[str]:
    log = is_log_name(topic.name)
    bucket = bucket_of(topic.name.removesuffix(SUFFIX) if log else topic.name)
    if (topic.id & 0xFFFF) != bucket:
        yield f"its id {topic.id:016x} does not belong to its name"
    if (owner := owner_of_id(topic.id, shards)) != shard:
        yield f"belongs to shard {owner}"
    if not topic.head_seq <= topic.ceiling:
        yield f"head_seq {topic.head_seq} is above its ceiling {topic.ceiling}"
    if not 1 <= topic.evict_floor <= topic.head_seq + 1:
        yield f"evict_floor {topic.evict_floor} is outside 1..{topic.head_seq + 1}"
    if topic.flushed_seq > topic.head_seq:
        yield f"flushed_seq {topic.flushed_seq} is above head_seq {topic.head_seq}"
    for first, last in [*topic.holes, *topic.trims]:
        if not 1 <= first <= last <= topic.ceiling:
            yield f"a hole from {first} to {last} is outside 1..{topic.ceiling}"
    for segment in topic.segments:
        if not segment.first_seq <= segment.last_seq <= topic.flushed_seq:
            yield f"a segment holds {segment.first_seq} to {segment.last_seq}, flushed_seq is {topic.flushed_seq}"
    if any(not segment.sealed for segment in topic.segments[:-1]):
        yield "a segment that is not its last is not sealed"


def _sentence(exc: Exception, data_dir: str) -> str:
    text = str(exc)
    for prefix in (os.path.join(data_dir, MANIFEST_NAME), data_dir):
        text = text.removeprefix(prefix)
    return text.removeprefix(": ").strip()
