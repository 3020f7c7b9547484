"""Moves sealed segments to the cold tier, on a thread of its own and with half of the time idle.

    1  copy     <cold>/topics/<id>/<first>.data.tmp, synced, renamed, its folder synced        on the thread
    2           the snapshot, which has the flags of what is to be cold                          in a checkpoint,
    3  leave    the flags that changed meanwhile go to the copy                                  in this order,
    4           unlink the hot file, sync its folder                                             by the mover

While both files are there the hot one counts: so a crash before 4 leaves it as it was (and a copy that the next start
removes), and after 4 the cold one has every flag that a snapshot may take for granted. The snapshot comes first because
the cold disk may be away at the next start, which then knows from it alone what is deleted; only where it finds no room
the hot files go before it. Indexes stay hot: they are small, and deletes by tag and a start need them.

1, 3 and 4 each go through a descriptor of the folder that has the marker of this data folder (tier.py): what lies where
an unmounted disk was is not written to, and no hot file goes for a copy there. A cold disk that is full or gone stops
relocation, which tries again later; nothing else notices. Whether it is there is looked at even if nothing is to move,
so that operators hear of it before readers do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from topics.errors import ColdTierGone, CorruptData, DiskFull, Unreachable
from topics.settings import Settings
from topics.storage.leases import is_log_name
from topics.storage.paths import segment_name, topic_dir
from topics.walshard.jobs import last_checkpoint
from topics.walshard.log.disk import Disk
from topics.walshard.log.worker import Worker
from topics.walshard.segments.orphans import remove_unnamed
from topics.walshard.segments.segments import Segment
from topics.walshard.tiering.tier import ColdTier
from topics.walshard.topic.topic import Topic

_RETRY_MS = 30_000
_LOOK_MS = 2_000  # how often it is looked whether the disk is there


class Arrival(NamedTuple):
    """A copy that is complete."""

    topic: Topic
    segment: Segment
    path: str


def surplus(segments: Iterable[Segment], *, keep_segments: int, keep_bytes: int) -> list[Segment]:
    """Hot sealed segments that are no longer among the most recent, oldest first; keep_bytes 0: the count decides."""
    hot = [segment for segment in segments if segment.sealed and not segment.cold and segment.live_rows]
    kept = size = 0
    for segment in reversed(hot):
        size += segment.data_bytes
        if kept == keep_segments or (keep_bytes and size > keep_bytes):
            break
        kept += 1
    return hot[: len(hot) - kept]


class Relocator:
    def __init__(self, disk: Disk, *, tier: ColdTier, settings: Settings, now_ms: Callable[[], int]) -> None:
        self._disk = disk
        self._tier = tier
        self._settings = settings
        self._now_ms = now_ms
        self._worker = Worker("relocator")
        self._looked_at: dict[Topic, None] = {}  # topics that may have segments to move, in order
        self._copying: Segment | None = None
        self._leaving: dict[Segment, Topic] = {}  # whose copies are to take the place of their hot files
        self._damaged: set[int] = set()  # leases logs that can't be read, and that it has been said of
        self._retry_ms = 0
        self._look_ms = 0
        self._looking = False
        self._closing = False
        self._stopped = False  # said so once
        self.returned = False  # it was gone and is back: the mover has to write what it has missed
        self.event_fd = self._worker.event_fd
        self.arrived: list[Arrival] = []
        self.tiered: set[Topic] = set()  # topics that have segments in the cold tier
        self.on_trouble: Callable[[str], None] = lambda reason: None
        self.on_back: Callable[[], None] = lambda: None
        self.relocated = 0

    @property
    def busy(self) -> bool:
        return self._worker.outstanding > 0

    @property
    def gone(self) -> bool:
        """The disk is not there; said so once."""
        return self._tier.gone

    @property
    def copying(self) -> bool:
        return self._copying is not None

    def held(self) -> tuple[int, int]:
        """Segments in the cold tier, and the bytes of their files."""
        cold = [segment.data_bytes for topic in self.tiered for segment in topic.segments if segment.cold]
        return len(cold), sum(cold)

    def consider(self, topic: Topic) -> None:
        """It may have more hot segments than it should."""
        if self._settings.cold_dir is not None:
            self._looked_at[topic] = None
        if any(segment.cold for segment in topic.segments):
            self.tiered.add(topic)

    def step(self) -> bool:
        """Begin the next copy, if one is due; returns whether there is more to do."""
        if self._copying is not None or not self._looked_at:
            return self.busy
        if self.gone or self._now_ms() < self._retry_ms:
            return True
        waiting = {arrival.segment for arrival in self.arrived}
        settings = self._settings
        while self._looked_at:
            topic = next(iter(self._looked_at))
            found: list[Segment] = []
            if not topic.dropped:
                found = surplus(
                    topic.segments, keep_segments=settings.hot_retain_segments, keep_bytes=settings.hot_retain_bytes
                )
            if found and is_log_name(topic.name):
                needed = self._needed(topic)
                found = [segment for segment in found if segment.last_seq < needed]
            for segment in found:
                if segment not in waiting:
                    self._copy(topic, segment)
                    return True
            del self._looked_at[topic]
        return self.busy

    def _needed(self, log: Topic) -> int:
        """From where on a leases log stays, so that its queue opens without the cold disk. All of it stays while that
        can't be told; that is said once, and a queue that is opened meets the error itself."""
        try:
            needed = last_checkpoint(log)
        except (CorruptData, Unreachable, OSError) as error:
            if log.id not in self._damaged:
                self._damaged.add(log.id)
                log.totals.unreadable.append((log.name, str(error)))
            return 0
        self._damaged.discard(log.id)
        return needed

    def look(self) -> None:
        """Now and then, also while nothing else happens: is the disk there?"""
        now = self._now_ms()
        if self._looking or now < self._look_ms:
            return
        self._looking = True
        self._look_ms = now + _LOOK_MS

        def then(_: None, error: Exception | None) -> None:
            self._looking = False
            if error is not None:
                self._trouble(error)
            elif self.gone:
                self._tier.gone = self._stopped = False
                self.returned = True
                self._retry_ms = 0
                self.on_back()

        self._worker.submit(self._tier.look, then)

    def _copy(self, topic: Topic, segment: Segment) -> None:
        path = os.path.join(topic_dir(self._tier.path, topic.id), segment_name(segment.first_seq))
        source, size = segment.path, segment.data_bytes
        self._copying = segment

        def work() -> bool:
            with self._tier.opened() as root:
                folder = topic_dir(root, topic.id)
                self._disk.make_dir(folder)
                target = os.path.join(folder, segment_name(segment.first_seq))
                return self._disk.copy(source, target, size, go_on=self._go_on)

        def then(complete: bool | None, error: Exception | None) -> None:
            self._copying = None
            if error is not None:
                self._trouble(error)
            elif complete:
                if self._stopped:
                    self._stopped = False
                    self.on_back()
                if topic.dropped or segment not in topic.segments:
                    self.remove(topic.id, segment)
                else:
                    self.arrived.append(Arrival(topic, segment, path))

        self._worker.submit(work, then)

    def _go_on(self, took_s: float) -> bool:
        """Between pieces: give the disks to others for as long as we had them."""
        time.sleep(min(took_s, 0.5))
        return not self._closing

    def trouble(self, error: Exception) -> None:
        """Somebody met it: said once, and looked at again later."""
        self._trouble(error)

    def _trouble(self, error: Exception) -> None:
        if not isinstance(error, OSError | DiskFull | CorruptData):
            raise error
        self._retry_ms = self._now_ms() + _RETRY_MS
        known = self.gone if isinstance(error, ColdTierGone) else self._stopped
        self._tier.gone = self.gone or isinstance(error, ColdTierGone)
        if not known:
            self._stopped = True
            self.on_trouble(str(error))

    def switch(self) -> list[Segment]:
        """At the beginning of a checkpoint: segments whose copy counts from now on. Their hot files are to go."""
        arrived, self.arrived = self.arrived, []
        self.tiered = {topic for topic in self.tiered if any(segment.cold for segment in topic.segments)}
        switched = []
        for topic, segment, path in arrived:
            if topic.dropped or segment not in topic.segments:
                self.remove(topic.id, segment)
                continue
            segment.relocate(path, self._tier)
            topic.touched()  # snapshots have the flags of what is cold
            self._leaving[segment] = topic
            switched.append(segment)
            self.tiered.add(topic)
        return switched

    def settled(self, segment: Segment, error: Exception | None) -> None:
        """After that checkpoint: the hot file is gone, or stays because of an error."""
        topic = self._leaving.pop(segment)
        if error is None:
            self.relocated += 1
        else:
            self._trouble(error)
            self.consider(topic)

    def remove(self, topic_id: int, segment: Segment) -> None:
        """Of the cold tier, whenever that disk gets to it. What is left by a crash goes with the next start, and
        what is left because the disk is away when it is back (`tidy`)."""

        def work() -> None:
            with self._tier.opened() as root:
                folder = topic_dir(root, topic_id)
                self._disk.unlink(os.path.join(folder, segment_name(segment.first_seq)))
                self._disk.remove_empty(folder)

        self._worker.submit(work, lambda _, error: None)

    def remove_topic(self, topic_id: int) -> None:
        def work() -> None:
            with self._tier.opened() as root:
                self._disk.remove_dir(topic_dir(root, topic_id))

        self._worker.submit(work, lambda _, error: None)

    def tidy(self, named: dict[int, set[str]], spared: set[int], *, shard: int, shards: int) -> None:
        """Remove what went while the disk was away. The copy that has been asked for before is made by then, and
        stays; later ones come behind this."""
        for arrival in self.arrived:
            named.setdefault(arrival.topic.id, set()).add(os.path.basename(arrival.path))
        if (copying := self._copying) is not None:
            named.setdefault(copying.header.topic_id, set()).add(segment_name(copying.first_seq))

        def work() -> None:
            with self._tier.opened() as root:
                remove_unnamed(root, named, spared, shard=shard, shards=shards, disk=self._disk)

        self._worker.submit(work, lambda _, error: None)

    def take(self) -> None:
        if self._worker.take():
            self.step()

    def wait(self) -> None:
        """For tests: until nothing is under way."""
        self._worker.wait()

    def close(self) -> None:
        """A copy that is under way is left unfinished."""
        self._closing = True
        self._worker.close()
