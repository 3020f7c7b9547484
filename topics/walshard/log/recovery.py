"""From a folder to topics: the newest good snapshot, the segments it names, then the WAL.

Idempotent: nothing on disk is changed but cut-off tails, until the first snapshot of the new life.
Shard-count-agnostic: every frame and topic belongs to the shard that its topic id names under the count in force
now, so a changed count reads all old folders and takes what is its own. Refuses damage that is no torn tail, with
the file, the offset and what to do.

    frame    lsn covered by the snapshot               lsn after it
    TOPIC    skip: the snapshot's config is newer      create or configure
    DROP     skip                                      drop
    APPEND   if not in a segment: a row again          the same, and its key
    DELETE   on rows from the WAL, not counted again   on all rows; first copies that a start did not find any more
    HEAD     raises the head                           the same, and is the ceiling now
     of no topic, with copies of routers' destina-     the same
             tions: if not in a segment, rows without
             their bytes

Caps and TTL do nothing while frames are replayed: batches were published in another order than they were logged if
some waited for a sync, so retention would decide otherwise than it did. Frames that depend on it say how far it had
come, and it runs once at the end.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import msgspec

from topics.actors.clock import Clock
from topics.errors import CorruptData, FormatError
from topics.settings import Settings
from topics.storage.columns import Columns
from topics.storage.config import owner_of_id
from topics.storage.control import CopiesLine, DeleteFrame, HeadFrame, TopicFrame, decode_copies
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import WHOLE, Frame, WalHeader, decode_wal_header, frames_after, header_is_whole, scan
from topics.storage.leases import is_log_name
from topics.storage.paths import (
    parse_numbered,
    parse_topic_dir,
    shard_dir,
    topics_dir,
)
from topics.storage.recovery import Behind, TailVerdict, judge_tail, look_behind, sum_up, used_bytes
from topics.storage.snapshot import ShardState, TopicState, decode_snapshot, decode_topic
from topics.walshard.forwards.copies import Copies, CopyMemory, Pipe
from topics.walshard.log.disk import Disk
from topics.walshard.log.wal import WalFile
from topics.walshard.segments.loader import Loader, recount
from topics.walshard.segments.segments import OpenFiles
from topics.walshard.tiering.tier import ColdTier
from topics.walshard.topic import retention
from topics.walshard.topic.idempotency import Remembered
from topics.walshard.topic.index import Row
from topics.walshard.topic.topic import Topic, Totals, count_seqs, merge_ranges

_decode_topic_frame = msgspec.msgpack.Decoder(TopicFrame).decode
_decode_head_frame = msgspec.msgpack.Decoder(HeadFrame).decode
_decode_delete_frame = msgspec.msgpack.Decoder(DeleteFrame).decode


def boot_id() -> bytes:
    """Tells whether the machine, and with it the page cache, has gone since a file was written."""
    with open("/proc/sys/kernel/random/boot_id") as source:
        return bytes.fromhex(source.read().strip().replace("-", ""))


class Recovered(msgspec.Struct):
    topics: dict[str, Topic]
    totals: Totals
    copies: CopyMemory
    dropped: list[Topic]  # the snapshot may still name their files: they go with the next one
    wal_files: list[WalFile]
    snapshots: list[str]
    next_lsn: int
    next_file_no: int
    next_snapshot_no: int
    snapshot_lsn: int
    snapshot_due: bool  # heads went up, and only a snapshot can say so
    frames: int
    notes: list[str]
    away: str | None = None  # why segments of the cold tier have not been seen


class _Folder(msgspec.Struct):
    """What one shard folder holds of one layout."""

    path: str
    snapshots: list[tuple[int, str]]
    wals: list[tuple[int, str]]


def _list(folder: str, layout: int) -> _Folder:
    snapshots: list[tuple[int, str]] = []
    wals: list[tuple[int, str]] = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        names = []
    for name in names:
        parsed = parse_numbered(name)
        if parsed is None or parsed[0] != layout:
            continue
        (snapshots if parsed[2] == "snap" else wals).append((parsed[1], os.path.join(folder, name)))
    return _Folder(folder, sorted(snapshots), sorted(wals))


class Recovery:
    def __init__(
        self,
        *,
        settings: Settings,
        disk: Disk,
        files: OpenFiles,
        clock: Clock,
        shard: int,
        shards: int,
        boot: bytes,
        progress: Callable[[int], None],
        cold: ColdTier | None = None,
    ) -> None:
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._shard = shard
        self._shards = shards
        self._boot = boot
        self._loader = Loader(settings.data_dir, cold, disk=disk, files=files)
        self._progress = progress
        self._totals = Totals()
        self._copies = CopyMemory()
        self._topics: dict[int, Topic] = {}
        self._snapshot_heads: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        self._tails: dict[int, list[tuple[int, int]]] = {}  # what snapshots have seen in the log alone ...
        self._found: dict[int, list[tuple[int, int]]] = {}  # ... and what of these topics is there, or deleted
        self._logged: dict[int, list[tuple[int, int]]] = {}  # of destinations: the seqs of batches that the WAL knows
        self._dropped: list[Topic] = []
        self._wal_files: list[WalFile] = []
        self._jumped = False
        self._frames = 0
        self._work = 0
        self._worked = 0
        self.notes: list[str] = []

    def run(self, *, layout: int, old_shards: int) -> Recovered:
        """Read what `old_shards` shards of `layout` left; usually that is this shard alone."""
        sources = [self._shard] if old_shards == self._shards else list(range(old_shards))
        folders = [_list(shard_dir(self._settings.data_dir, source), layout) for source in sources]
        self._work = sum(os.path.getsize(path) for folder in folders for _, path in folder.wals) or 1
        newest = 0
        next_lsn = next_file = next_snapshot = 1
        for source, folder in zip(sources, folders, strict=True):
            settled = set(self._topics)
            state = self._load_snapshot(folder)
            covered = state.lsn if state else 0
            # What the snapshot does not cover is in the file that was written then, or in a later one.
            sure = 0 if state is None else state.file_no if state.clean or state.stopped else state.file_no - 1
            file_no = state.file_no if state else 0
            last_lsn, same_boot = self._replay(folder, covered, sure, file_no, alone=old_shards == self._shards)
            if state is None and last_lsn == 0:
                self._refuse_if_topics_exist(folder, owner=source, shards=old_shards)
            # A file that the snapshot has not seen belongs to a later life, which did not end cleanly.
            clean = state is not None and state.clean and all(no <= state.file_no for no, _ in folder.wals)
            fresh = [topic for id, topic in self._topics.items() if id not in settled]
            self._settle(fresh, folder_clean=clean, same_boot=same_boot)
            newest = max(newest, covered)
            next_lsn = max(next_lsn, last_lsn + 1, covered + 1)
            next_file = max([next_file, *(number + 1 for number, _ in folder.wals)])
            next_snapshot = max([next_snapshot, *(number + 1 for number, _ in folder.snapshots)])
        self._sync_recovered()
        now = self._clock.now_ms()
        for topic in self._topics.values():
            if not topic.rebuilding:
                retention.expire(topic, now_ms=now)
                retention.enforce_caps(topic)
        return Recovered(
            topics={topic.name: topic for topic in self._topics.values()},
            totals=self._totals,
            copies=self._copies,
            dropped=self._dropped,
            wal_files=self._wal_files,
            snapshots=[path for folder in folders for _, path in folder.snapshots],
            next_lsn=next_lsn,
            next_file_no=next_file,
            next_snapshot_no=next_snapshot,
            snapshot_lsn=newest,
            snapshot_due=self._jumped,
            frames=self._frames,
            notes=self.notes,
            away=self._loader.away,
        )

    def _refuse_if_topics_exist(self, folder: _Folder, *, owner: int, shards: int) -> None:
        """Neither snapshot nor frames: a new shard, unless there are topics that only they could explain."""
        root = topics_dir(self._settings.data_dir)
        for name in os.listdir(root) if os.path.isdir(root) else []:
            if (topic_id := parse_topic_dir(name)) is not None and owner_of_id(topic_id, shards) == owner:
                raise CorruptData(
                    f"{folder.path}: holds neither a snapshot nor a log, but {os.path.join(root, name)} belongs to "
                    "this shard. Restore the folder from a backup"
                )

    def _totals_of(self, name: str) -> Totals:
        return self._totals.internal if is_log_name(name) else self._totals

    def _mine(self, topic_id: int) -> bool:
        return owner_of_id(topic_id, self._shards) == self._shard

    # --- snapshot and segments -----------------------------------------------------------------------

    def _load_snapshot(self, folder: _Folder) -> ShardState | None:
        """The newest one. An older one is no substitute: WAL files that only the newer covers may be gone."""
        if not folder.snapshots:
            return None
        path = folder.snapshots[-1][1]
        with open(path, "rb") as source:
            state = decode_snapshot(source.read(), path=path)
        self._clock.at_least(state.clock_ms)
        for raw in state.topics:
            topic_state = decode_topic(raw)
            if self._mine(topic_state.id):
                self._load_topic(topic_state)
        return state

    def _load_topic(self, state: TopicState) -> None:
        topic = Topic(
            id=state.id,
            name=state.name,
            config=state.config,
            created_ms=state.created_ms,
            ceiling=state.ceiling,
            totals=self._totals_of(state.name),
        )
        topic.restore(state)
        self._topics[state.id] = topic
        self._snapshot_heads[state.id] = state.head_seq
        self._floors[state.id] = state.floor
        if state.tail:
            self._tails[state.id] = state.tail
        self._loader.load(topic, state)

    # --- the WAL -------------------------------------------------------------------------------------

    def _replay(self, folder: _Folder, covered: int, sure: int, file_no: int, *, alone: bool) -> tuple[int, bool]:
        """Apply every frame in order; returns the last lsn, and whether the machine still is in the boot that wrote
        all files but those up to number `sure`, which the snapshot covers. It was made when file `file_no` was the
        current one.

        No file is changed until all of them have been judged: what is refused can still be repaired by hand."""
        if file_no and all(number != file_no for number, _ in folder.wals):
            raise CorruptData(
                f"{folder.path}: WAL file {file_no:012x} is missing; the snapshot knows of it. Restore the folder from "
                "a backup, or let topics repair keep what is good"
            )
        expected = covered + 1  # the first frame may be an older one, never a newer one
        first = True
        same_boot = True
        last_lsn = 0
        cuts: list[tuple[str, int]] = []
        gone: list[str] = []
        for at, (number, path) in enumerate(folder.wals):
            size = os.path.getsize(path)
            fd = self._disk.open(path, write=True)
            with _map(fd, size) as data:
                header = self._wal_header(folder, at, data)
                if header is None:
                    os.close(fd)
                    gone.append(path)
                    continue
                file = WalFile(path, header, self._disk, fd=fd, size=size)
                same_boot = same_boot and (number <= sure or header.boot_id == self._boot)
                end = FILE_HEADER_BYTES
                cut = False
                for frame in scan(data, salt=header.salt):
                    if (frame.lsn > expected) if first else (frame.lsn != expected):
                        behind = _behind(data, header.salt, frame.offset, folder.wals[at + 1 :])
                        cut = self._gap(path, header, behind, last_lsn=last_lsn, covered=covered)
                        break
                    first = False
                    expected = frame.lsn + 1
                    last_lsn = frame.lsn
                    end = frame.offset + frame.length
                    self._apply(frame, file, covered)
                    if not self._frames & 0xFFF:
                        self._report(frame.offset)
                file.end = file.size = end
                file.last_lsn = last_lsn
                if not cut and (rubbish := look_behind(data, salt=header.salt, start=end)) is not Behind.ZEROS:
                    later = _behind(data, header.salt, end, folder.wals[at + 1 :])
                    kept = number <= sure or header.boot_id == self._boot
                    cut = self._judge(path, rubbish, later, end=end, last_lsn=last_lsn, same_boot=kept, covered=covered)
            self._worked += size
            self._report(0)
            cuts.append((path, end))
            self._wal_files.append(file)
            if cut:
                gone.extend(later for _, later in folder.wals[at + 1 :])
                break
        if 0 < last_lsn < covered:
            raise CorruptData(
                f"{folder.path}: the log ends with frame {last_lsn}, but the snapshot knows of frame {covered}. "
                "Restore the folder from a backup, or let topics repair keep what is good"
            )
        self._miss_nothing(folder)
        if alone:  # other shards may be reading the same old files; nobody will write to them any more
            for path, end in cuts:
                if end < os.path.getsize(path):
                    self._disk.truncate(path, end)
            for path in gone:
                self._disk.unlink(path)
        return last_lsn, same_boot

    def _miss_nothing(self, folder: _Folder) -> None:
        """What the snapshot has seen in the log must be there, or a file of it is gone, with what was in it alone."""
        for topic_id, tail in self._tails.items():
            if (topic := self._topics.get(topic_id)) is None:
                continue
            low = max(self._floors[topic_id], topic.evict_floor)
            found = merge_ranges([*self._found.get(topic_id, []), *topic.holes, *topic.trims, (1, low - 1)])
            missed = [(first, last, lost) for first, last in tail if (lost := _missing(first, last, found))]
            if missed:
                raise CorruptData(
                    f"{folder.path}: {sum(lost for _, _, lost in missed)} of seqs {missed[0][0]} to {missed[-1][1]} of "
                    f"topic {topic.name!r} were in the log alone, and a file of it is missing. Restore the folder from "
                    "a backup, or let topics repair keep what is good"
                )
        self._tails.clear()
        self._found.clear()

    def _wal_header(self, folder: _Folder, at: int, data: mmap.mmap | bytes) -> WalHeader | None:
        """None: the crash came before the file had a whole header, so it never held a frame."""
        path = folder.wals[at][1]
        last = at + 1 == len(folder.wals)
        if last and not header_is_whole(data[:FILE_HEADER_BYTES]) and not used_bytes(data, start=FILE_HEADER_BYTES):
            return None  # a header is synced before the first frame is written
        if len(data) >= FILE_HEADER_BYTES and any(data[:FILE_HEADER_BYTES]):
            header = decode_wal_header(data[:FILE_HEADER_BYTES], path=path)
            return msgspec.structs.replace(header, boot_id=self._boot) if header.boot_id == WHOLE else header
        raise CorruptData(f"{path}: this WAL file has lost its header; restore it from a backup")

    def _gap(self, path: str, header: WalHeader, behind: Iterator[Frame], *, last_lsn: int, covered: int) -> bool:
        """Frames are missing before the next one: a power cut took an unsynced tail, or it is damage."""
        frame = next(behind)
        same_boot = header.boot_id == self._boot
        later = sum_up(chain([frame], behind))
        verdict = judge_tail(last_lsn=last_lsn, behind=Behind.PIECE, later=later, same_boot=same_boot, covered=covered)
        if verdict is not TailVerdict.UNSYNCED:
            raise CorruptData(
                f"{path}: frame {frame.lsn} at offset {frame.offset} follows frame {last_lsn or covered}; "
                "a WAL file or a part of one is missing. Restore it from a backup"
            )
        self.notes.append(f"{path}: {verdict.value} from frame {frame.lsn} on; cut")
        return True

    def _judge(
        self,
        path: str,
        rubbish: Behind,
        behind: Iterator[Frame],
        *,
        end: int,
        last_lsn: int,
        same_boot: bool,
        covered: int,
    ) -> bool:
        """Decide what the bytes behind the last good frame mean; True: newer files go too."""
        later = sum_up(behind)
        verdict = judge_tail(last_lsn=last_lsn, behind=rubbish, later=later, same_boot=same_boot, covered=covered)
        if verdict is TailVerdict.CORRUPT:
            proof = "a whole frame stood here" if later is None else "good frames follow"
            raise CorruptData(
                f"{path}: damaged at offset {end} (after frame {last_lsn}), and {proof}. This shard stays "
                "down so that nothing acknowledged is dropped silently. Restore the file from a backup, or let topics "
                "repair keep what is good"
            )
        self.notes.append(f"{path}: {verdict.value} tail cut at offset {end}")
        return verdict is TailVerdict.UNSYNCED

    def _apply(self, frame: Frame, file: WalFile, covered: int) -> None:
        self._frames += 1
        kind = frame.type
        fresh = frame.lsn > covered
        if kind == FrameType.HEAD and not frame.first_seq:
            self._copied(decode_copies(frame), file, fresh)
            return
        if not self._mine(frame.topic_id):
            return
        topic = self._topics.get(frame.topic_id)
        self._clock.at_least(frame.ts)
        if kind == FrameType.APPEND:
            if topic is not None and frame.last_seq > topic.flushed_seq:
                self._append(topic, frame, file)
            if topic is not None and frame.key and fresh:
                topic.keys.remember(frame.key.decode(), Remembered(frame.first_seq, frame.count, frame.ts))
        elif kind == FrameType.DELETE:
            if topic is not None:
                self._delete(topic, frame, fresh)
        elif kind == FrameType.HEAD:
            if topic is not None:
                if fresh:
                    topic.ceiling = frame.first_seq  # the last promise counts, also if it is a lower one
                if topic.pipe is not None and not topic.pipe.logged:
                    return  # of an older program, which knew of copies that the log does not
                head = _decode_head_frame(frame.body).head_seq
                known = max(topic.head_seq, self._snapshot_heads.get(topic.id, 0))
                if head > known:
                    self._lost(topic, known + 1, head)
                    topic.head_seq = head
                    topic.next_seq = head + 1
        elif not fresh:
            return
        elif kind == FrameType.TOPIC:
            self._configure(topic, frame)
        elif kind == FrameType.DROP:
            if topic is not None:
                self._drop(topic)
        else:
            raise FormatError(f"{file.path}: frame type {kind} at offset {frame.offset} is unknown; upgrade topics")

    def _append(self, topic: Topic, frame: Frame, file: WalFile) -> None:
        row = Row(
            first=frame.first_seq,
            count=frame.count,
            first_ts=frame.ts,
            last_ts=frame.ts,
            size=Columns(frame.body, count=frame.count, ts=frame.ts).size,
            source=file,
            offset=frame.offset,
            length=frame.length,
            live=frame.count,
        )
        expected = max(topic.next_seq, self._snapshot_heads.get(topic.id, 0) + 1)
        if topic.id in self._tails:
            self._find(topic.id, row.first, row.last)
        if topic.pipe is not None:
            self._logged.setdefault(topic.id, []).append((row.first, row.last))
        elif row.first > expected:
            self._lost(topic, expected, row.first - 1)
        row.skip = min(max(0, self._floors.get(topic.id, 0) - row.first), row.count)
        if row.skip:
            row.body = frame.body
            recount(row)
            row.body = None
        topic.next_seq = row.last + 1
        topic.head_seq = row.last
        if row.live:
            file.pins += 1
            topic.publish(row)
        topic.last_ts = max(topic.last_ts, frame.ts)
        topic.last_write_ts = topic.last_ts

    def _find(self, topic_id: int, first: int, last: int) -> None:
        found = self._found.setdefault(topic_id, [])
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))

    def _copied(self, lines: list[CopiesLine], file: WalFile, fresh: bool) -> None:
        for line in lines:
            topic = self._topics.get(line.topic_id)
            self._clock.at_least(line.ts)
            if topic is None or topic.pipe is None:
                continue
            if line.names_seqs:
                self._copies_row(topic, topic.pipe, line, file, fresh)
            elif line.count:
                self._sized(topic, topic.pipe, line)
            elif fresh or topic.pipe.marks:
                topic.pipe.move(line.at, line.counts)

    @staticmethod
    def _sized(topic: Topic, pipe: Pipe, line: CopiesLine) -> None:
        """Of copies whose own lines do not tell what each of them counts for; but for those that were not live. They
        may have been in one block by then, with records of clients between them."""
        told = _sizes(line)
        for row in topic.rows.since(topic.rows.position(line.first_seq)):
            if row.first > line.last_seq:
                break
            if not row.live or not topic.is_unfilled(row):
                continue
            sizes = pipe.sizes.setdefault(row.last, array("I", [0]) * row.count)
            first, last = max(row.first, line.first_seq), min(row.last, line.last_seq)
            begin = first - row.first + len(sizes) - row.count
            sizes[begin : begin + last - first + 1] = told[first - line.first_seq : last - line.first_seq + 1]
            row.sizes = sizes[-row.count :]
            topic.add_live(0, -row.size)
            row.size = sum(row.sizes[index] for index in row.live_indexes())
            topic.add_live(0, row.size)

    def _copies_row(self, topic: Topic, pipe: Pipe, copies: CopiesLine, file: WalFile, fresh: bool) -> None:
        """Copies whose bytes were in memory: a row that is filled later, or what stands for records that were lost."""
        settled = max(topic.flushed_seq, pipe.flushed_to)
        if copies.last_seq <= settled:
            return
        if topic.id in self._tails:
            self._find(topic.id, copies.first_seq, copies.last_seq)
        self._logged.setdefault(topic.id, []).append((copies.first_seq, copies.last_seq))
        pipe.advance(copies.last_seq, copies.at, copies.counts, copies.sources)
        topic.next_seq = copies.last_seq + 1
        topic.head_seq = copies.last_seq
        if not copies.count:
            if fresh or copies.first_seq > self._snapshot_heads.get(topic.id, 0):  # it was not readable yet
                topic.trims = merge_ranges([*topic.trims, (copies.first_seq, copies.last_seq)])
            if copies.hops is not None and copies.first_seq > self._snapshot_heads.get(topic.id, 0):
                topic.remember_lost_hops(copies.first_seq, zip(copies.hops[::2], copies.hops[1::2], strict=True))
            return
        if copies.hops is not None and copies.first_seq > self._snapshot_heads.get(topic.id, 0):
            topic.remember_hops(copies.first_seq, copies.hops)
        first = max(copies.first_seq, settled + 1)
        row = Row(
            first=first,
            count=copies.last_seq - first + 1,
            first_ts=copies.ts,
            last_ts=copies.ts,
            size=copies.size,
            source=Copies(self._copies, file),
            offset=0,
            length=0,
            live=copies.last_seq - first + 1,
        )
        row.skip = min(max(0, self._floors.get(topic.id, 0) - row.first), row.count)
        if not fresh:  # what the source did not have when an earlier start asked for it
            for begin, end in topic.trims:
                for seq in range(max(begin, row.first), min(end, row.last) + 1):
                    row.mark_deleted(seq - row.first)
        row.live = sum(1 for _ in row.live_indexes())
        if copies.sizes:
            pipe.sizes[row.last] = _sizes(copies)
            row.sizes = pipe.sizes[row.last][-row.count :]
            row.size = sum(row.sizes[index] for index in row.live_indexes())
        else:
            row.size = copies.size * row.live // copies.count
        if row.live:
            file.pin()
            topic.publish(row)
        topic.last_ts = max(topic.last_ts, copies.ts)
        topic.last_write_ts = topic.last_ts

    @staticmethod
    def _lost(topic: Topic, first: int, last: int) -> None:
        """Seqs that may have been given out, and whose records went with the process or with the power."""
        topic.holes = merge_ranges([*topic.holes, (first, last)])

    def _delete(self, topic: Topic, frame: Frame, fresh: bool) -> None:
        delete = _decode_delete_frame(frame.body)
        counted = topic.deleted_total
        topic.delete_seqs(chain.from_iterable(range(first, last + 1) for first, last in delete.trims))
        topic.deleted_total = counted
        if fresh and delete.trims:
            topic.trims = merge_ranges([*topic.trims, *delete.trims])
        if topic.id in self._tails:  # a repair leaves out what is deleted
            self._find(topic.id, 1, (delete.before_seq or 1) - 1)
            for seq in delete.seqs or ():
                self._find(topic.id, seq, seq)
        if fresh:
            retention.raise_floor(topic, cap_seq=delete.cap_seq, ttl_seq=delete.ttl_seq)
        if delete.before_seq is not None:
            topic.delete_before(delete.before_seq)
        if delete.seqs:
            topic.delete_seqs(delete.seqs)
        if not fresh:
            topic.deleted_total = counted
        elif told := delete.deleted or len(delete.seqs or ()):
            topic.deleted_total = counted + told  # all were live; their flags may be on the disk already

    def _configure(self, topic: Topic | None, frame: Frame) -> None:
        body = _decode_topic_frame(frame.body)
        if topic is None:
            self._topics[frame.topic_id] = Topic(
                id=frame.topic_id,
                name=body.name,
                config=body.config,
                created_ms=body.created_ms,
                ceiling=body.ceiling,
                totals=self._totals_of(body.name),
            )
        else:
            retention.raise_floor(topic, cap_seq=body.cap_seq, ttl_seq=body.ttl_seq)
            topic.config = body.config
            topic.ceiling = body.ceiling
        topic = self._topics[frame.topic_id]
        if body.pipe is None:
            topic.pipe = None
        elif topic.pipe is None or topic.pipe.source_id != body.pipe.source_id:
            there = max(topic.head_seq, self._snapshot_heads.get(topic.id, 0))
            topic.pipe = Pipe(body.pipe.source_id, body.pipe.at, {}, flushed_to=there, ring=body.pipe.ring)
            topic.pipe.logged = body.pipe.logged
        else:
            topic.pipe.ring = body.pipe.ring

    def _drop(self, topic: Topic) -> None:
        topic.drop()
        del self._topics[topic.id]
        self._dropped.append(topic)

    # --- after the last frame ------------------------------------------------------------------------

    def _settle(self, topics: list[Topic], *, folder_clean: bool, same_boot: bool) -> None:
        """Heads that can't be known from records: seqs that were given out must not be given out again."""
        for topic in topics:
            if topic.pipe is not None and not folder_clean:
                if not topic.ephemeral:
                    self._settle_copies(topic, same_boot=same_boot)
                    continue
                topic.pipe.begin_rebuild(topic.copies())  # from when its class was another one
            head = known = max(topic.head_seq, self._snapshot_heads.get(topic.id, 0))
            durability = topic.config.durability
            lost = not folder_clean and (durability == "ephemeral" or (durability == "disk" and not same_boot))
            if lost:
                head = max(head, topic.ceiling)
                self._jumped = True
            if head > known:
                self._lost(topic, known + 1, head)
            topic.head_seq = head
            topic.next_seq = head + 1
            topic.sure_ceiling = topic.ceiling
            # What is lost below the first live record is an eviction like any other.
            while topic.holes and topic.holes[0][0] <= topic.earliest_seq:
                first, last = topic.holes.pop(0)
                below = max(0, min(last + 1, topic.evict_floor) - first)
                # Some of them a client had deleted before: those are counted already.
                evicted = max(0, min(last - max(first, topic.evict_floor) + 1, topic.unaccounted))
                topic.evicted_total += evicted
                topic.lost_total += evicted
                topic.cap_seq = max(topic.cap_seq, last)
                topic.evict_floor = max(topic.evict_floor, topic.cap_seq + 1)
                topic.pass_over(max(0, min(below, topic.unaccounted)))
            topic.touched()

    def _settle_copies(self, topic: Topic, *, same_boot: bool) -> None:
        """A router's destination whose copies were in memory. After a power cut the log may have lost the last of them,
        though readers have seen them. If all that clients wrote here was synced before it could be seen, the copies are
        made again in the same order; else the next seq is above all that was ever given out."""
        pipe = topic.pipe
        assert pipe is not None
        settled = max(pipe.flushed_to, topic.flushed_seq)
        head = known = max(topic.head_seq, pipe.flushed_to, self._snapshot_heads.get(topic.id, 0))
        # Before they are filled: what the source has lost since had its share in what caps took. What an earlier start
        # did not find had none in what they took after it: the log says so before it has anything that caps count.
        retention.enforce_caps(topic, sized=all(pipe.knows_sizes(row) for row in topic.copies()))
        pipe.begin_rebuild(topic.copies())
        rejects = topic.config.discard == "reject" and (topic.config.cap_records or topic.config.cap_bytes)
        power_cut = pipe.tail_lost or not same_boot  # also one that an earlier start has not got over
        pipe.tail_lost = False
        if pipe.logged and power_cut and topic.needs_sync and not pipe.ring and not rejects:
            if topic.ceiling > known:  # or nothing was copied above what is there
                pipe.lose_tail(topic.ceiling)
        elif not pipe.logged or power_cut:
            head = max(known, topic.ceiling)
            pipe.skip(head)
            self._jumped = True
            if power_cut and topic.config.durability == "disk" and head > known:
                self._lost(topic, known + 1, head)
        pipe.logged = True
        passed = _missing(settled + 1, head, [*self._logged.get(topic.id, []), *topic.holes, *topic.trims])
        topic.head_seq = head
        topic.next_seq = head + 1
        topic.sure_ceiling = topic.ceiling
        # What a client or a cap had taken of them is counted already.
        topic.pass_over(max(0, min(passed, topic.unaccounted)))

    def _sync_recovered(self) -> None:
        """What a dead process wrote may never have been synced; nobody may read it before it is."""
        for file in self._wal_files:
            self._disk.sync(file.fd)

    def _report(self, offset: int) -> None:
        self._progress(min(999, (self._worked + offset) * 1000 // self._work))


def _sizes(line: CopiesLine) -> array[int]:
    return array("I", line.sizes * line.count if len(line.sizes) == 1 else line.sizes)


def _missing(first: int, last: int, there: list[tuple[int, int]]) -> int:
    """How many of these seqs are in none of the ranges."""
    within = [(max(first, begin), min(last, end)) for begin, end in there if begin <= last and end >= first]
    return last - first + 1 - count_seqs(merge_ranges(within))


@contextmanager
def _map(fd: int, size: int) -> Iterator[mmap.mmap | bytes]:
    """A file's bytes without reading them; an empty file can't be mapped."""
    if size == 0:
        yield b""
        return
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as data:
        yield data


def _behind(data: mmap.mmap | bytes, salt: int, start: int, newer: list[tuple[int, str]]) -> Iterator[Frame]:
    """Every good frame from here on, in this file and in newer ones."""
    yield from frames_after(data, salt=salt, start=start)
    for _, path in newer:
        with open(path, "rb") as source:
            rest = source.read()
        if header_is_whole(rest[:FILE_HEADER_BYTES]) or any(rest[FILE_HEADER_BYTES:]):
            header = decode_wal_header(rest[:FILE_HEADER_BYTES], path=path)
            yield from frames_after(rest, salt=header.salt, start=FILE_HEADER_BYTES)
