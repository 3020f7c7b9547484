"""A whole data folder at one moment: every topic, from every shard.

`look()` again to see what has come since; that costs what is new, and everything once there is a newer snapshot. It
gives what a new Folder would give.
"""

from __future__ import annotations

import time

from topics.datadir.batch import Batch
from topics.datadir.files import Deletes, Files, Superseded, reading
from topics.datadir.view.shard import Shard
from topics.datadir.view.topic import Topic
from topics.errors import CorruptData, FormatError, TopicsError
from topics.storage.columns import Columns
from topics.storage.leases import log_id
from topics.storage.manifest import Manifest
from topics.storage.routers import Rule, decode_rules, missing_rules, routers_path

_TRIES = 20  # a server makes a snapshot every few seconds at most
_PAUSE_S = 0.05


class Folder:
    def __init__(self, data_dir: str, *, cold_dir: str | None = None, now_ms: int | None = None) -> None:
        """now_ms: the time for TTLs; None: the machine's."""
        self.files = Files(data_dir, cold_dir=cold_dir)
        self.taken_ms = 0
        self.shards: list[Shard] = []
        self.rules: list[Rule] = []
        self._manifest: Manifest | None = None  # None: everything has to be read
        self.look(now_ms=now_ms)

    def look(self, *, now_ms: int | None = None) -> None:
        problem: TopicsError | None = None
        for _ in range(_TRIES):
            try:
                if self._look(now_ms):
                    return
            except (CorruptData, FormatError) as exc:
                # Files that go while they are read look like damage; damage stays.
                self._manifest = None
                if problem is not None and str(problem) == str(exc):
                    raise
                problem = exc
                time.sleep(_PAUSE_S)
            except BaseException:
                self._manifest = None  # half of what is new may have been taken in
                raise
        raise problem or CorruptData(f"{self.files.data_dir}: its files change faster than they can be read; try again")

    def _look(self, now_ms: int | None) -> bool:
        """False: it changed meanwhile."""
        manifest = self.files.read_manifest()
        if manifest != self._manifest:
            self._manifest = manifest
            self.shards = [self._shard(number) for number in range(manifest.shards)]
        try:
            self._look_at_shards()
            self.rules = self._read_rules()
            if self.files.read_manifest() != manifest:
                self._manifest = None
                return False
            self._settle(now_ms)
        except Superseded:
            return False
        except FileNotFoundError as exc:
            raise self.files.lost(exc) from None
        return True

    def _shard(self, number: int) -> Shard:
        manifest = self.files.manifest
        return Shard(self.files, number, layout=manifest.layout, shards=manifest.shards)

    def _look_at_shards(self) -> None:
        for at, shard in enumerate(self.shards):
            for _ in range(_TRIES):
                try:
                    shard.look()
                    break
                except Superseded:
                    shard = self.shards[at] = self._shard(shard.number)
            else:
                raise Superseded

    def _settle(self, now_ms: int | None) -> None:
        note = self.files.read_note()
        if now_ms is None:
            now_ms = time.time_ns() // 1_000_000 if note is None else note.created_ms
        self.taken_ms = now_ms
        if note is not None and note.deletes is not None:
            self._enter_later_deletes(note.deletes)
        for shard in self.shards:
            now = max(self.taken_ms, shard.clock_ms)
            for topic in shard.topics.values():
                topic.retain(now_ms=now, columns=self.columns)

    def _enter_later_deletes(self, known: dict[str, Deletes]) -> None:
        """A snapshot shares its segments with the server, which sets flags in them when clients delete. Its books don't
        say so, but it is known how many flags there were when it was made."""
        for topic in self.topics:
            then = known.get(f"{topic.id:016x}", Deletes(0, 0))
            topic.deleted_total = then.total + topic.flagged - then.flagged

    def _read_rules(self) -> list[Rule]:
        path = routers_path(self.files.data_dir)
        name = self.files.relative(path)
        try:
            with reading(name), open(path, "rb") as source:
                return decode_rules(source.read(), path=name)
        except FileNotFoundError:
            if self.files.manifest.routers:
                raise missing_rules(name) from None
            return []

    # --- looking things up ---

    @property
    def topics(self) -> list[Topic]:
        """Of all shards, by name; leases logs too."""
        found = [topic for shard in self.shards for topic in shard.topics.values()]
        return sorted(found, key=lambda topic: topic.name)

    def topic(self, topic_id: int) -> Topic | None:
        for shard in self.shards:
            if (topic := shard.topics.get(topic_id)) is not None:
                return topic
        return None

    def leases_of(self, queue: Topic) -> Topic | None:
        return self.topic(log_id(queue.id))

    def columns(self, batch: Batch) -> Columns:
        """The records of a batch. FileNotFoundError: its file went since the last look; look again."""
        return self.files.columns(batch)
