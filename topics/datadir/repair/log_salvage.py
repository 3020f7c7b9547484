"""What is left of the log of a shard: its good frames in order, and where frames are missing between them.

A log is never refused here. Where bytes are no frame the next good one is looked for; a file that lost its header is
read by the salt that its frames begin with. Missing frames are a `Gap`: which numbers, how many bytes held them, and
the head of the frame where exactly one is missing and its head can still be read.

A log made whole again keeps every good frame as it was. In the place of each missing one stands a HEAD frame that says
nothing, so that the numbers go on without a hole; a topic that only a missing frame named gets a name there. A last
frame that was whole once is missing, too. What a kill leaves of a write, and a power cut of an unsynced tail, is no
damage: the server cuts that off by itself, and so does this.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from itertools import chain

import msgspec

from topics.datadir.files import Files, reading
from topics.datadir.fsck.checking import boot_id
from topics.datadir.reading import read_all, walk_log
from topics.errors import FormatError, TopicsError
from topics.storage.control import HeadFrame, TopicFrame, encode_head
from topics.storage.format import (
    FILE_HEADER_BYTES,
    FRAME_HEADER,
    RECORD_SEPARATOR,
    FrameType,
    aligned,
    frame_bytes,
)
from topics.storage.frames import (
    WHOLE,
    Frame,
    WalHeader,
    decode_wal_header,
    encode_frame,
    find_salt,
    frames_after,
    header_is_whole,
)
from topics.storage.paths import numbered_name, parse_numbered, shard_dir
from topics.storage.recovery import Behind, TailVerdict, judge_tail, look_behind, sum_up, used_bytes

_COLUMN_LENGTHS = 16  # at the beginning of a batch
_KINDS = frozenset(map(int, FrameType))


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Frames that are in no file: those between two numbers."""

    after: int
    before: int
    file: str
    offset: int
    room: int | None  # bytes that may have held them; None: no telling
    open: bool = False  # nothing follows it: no telling how many there were
    frame: Frame | None = None  # the head of the missing frame; its body is gone, a topic's is what is left of it

    @property
    def count(self) -> int:
        return self.before - self.after - 1


class LogFile(msgspec.Struct, kw_only=True):
    file: str  # below the data folder
    number: int
    header: WalHeader
    frames: list[Frame] = []  # good ones, in order; batches without their bodies
    gaps: list[Gap] = []  # each stands before the first frame whose number is its `before`, or at the end
    whole: bool = True  # it can stay as it is
    faults: list[str] = []

    def pieces(self) -> Iterator[Frame | Gap]:
        """Frames and gaps, as they follow each other."""
        gaps = list(reversed(self.gaps))
        for frame in self.frames:
            while gaps and gaps[-1].before <= frame.lsn:
                yield gaps.pop()
            yield frame
        yield from reversed(gaps)


class _Torn(msgspec.Struct, frozen=True):
    """Bytes that are no frame."""

    data: bytes
    offset: int
    file: str
    salt: int  # of that file; the next good frame may be in another
    room: int | None  # None: the file may have been cut short here
    lost: bool = False  # a frame stood here, whatever follows


class SalvagedLog(msgspec.Struct, kw_only=True):
    shard: int
    files: list[LogFile] = []
    last_lsn: int = 0
    cut: bool = False  # what follows goes, as the server would have it

    @property
    def first_lsn(self) -> int:
        """0: there is no frame."""
        return next((file.frames[0].lsn for file in self.files if file.frames), 0)

    @property
    def gaps(self) -> list[Gap]:
        return [gap for file in self.files for gap in file.gaps]

    def pieces(self) -> Iterator[Frame | Gap]:
        for file in self.files:
            yield from file.pieces()


def salvage(files: Files, shard: int, *, covered: int, file_no: int, clean: bool) -> SalvagedLog:
    """covered: the last frame that the snapshot knows; file_no: the file that was written then. 0: there is none.
    clean: nothing came after it."""
    return _Salvage(files, shard, covered=covered, file_no=file_no, clean=clean).run()


class _Salvage:
    def __init__(self, files: Files, shard: int, *, covered: int, file_no: int, clean: bool) -> None:
        self._files = files
        self._shard = shard
        self._layout = files.manifest.layout
        self._folder = shard_dir(files.data_dir, shard)
        self._covered = covered
        self._file_no = file_no
        self._clean = clean
        self._log = SalvagedLog(shard=shard)
        self._missing = False  # the last file that was looked at is the one that the snapshot names, and is not there
        self._torn: _Torn | None = None  # behind the last frame, and nothing good behind it in its file

    def run(self) -> SalvagedLog:
        numbers = self._numbers()
        gone = self._file_no > 0 and self._file_no not in numbers
        for number in sorted({*numbers, self._file_no} if gone else numbers):
            self._missing = gone and number == self._file_no
            if self._missing:
                self._log.files.append(self._made_again(number))
                continue
            self._read(number, last=number == max(numbers))
            if self._log.cut:
                return self._log
        self._end()
        return self._log

    def _numbers(self) -> list[int]:
        try:
            parsed = [parse_numbered(name) for name in os.listdir(self._folder)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [one[1] for one in parsed if one is not None and (one[0], one[2]) == (self._layout, "wal")]

    def _name(self, number: int) -> str:
        return self._files.relative(os.path.join(self._folder, numbered_name(self._layout, number, "wal")))

    def _header(self, number: int, *, salt: int, boot: bytes) -> WalHeader:
        return WalHeader(self._shard, self._layout, number, salt, boot)

    def _made_again(self, number: int) -> LogFile:
        header = self._header(number, salt=_new_salt(), boot=WHOLE)
        fault = "this log file is missing, though the snapshot knows of it"
        return LogFile(file=self._name(number), number=number, header=header, whole=False, faults=[fault])

    # --- one file ---

    def _read(self, number: int, *, last: bool) -> None:
        name = self._name(number)
        data = self._data(name)
        if last and number > self._file_no and data.count(0) == len(data):
            return  # made when the crash came: the server removes it
        file = self._opened(name, number, data)
        follows = bool(self._log.files) and self._log.files[-1].number + 1 == number
        if not follows:
            self._torn = None
        self._log.files.append(file)
        for piece in walk_log(data, salt=file.header.salt):
            if isinstance(piece, Frame):
                if not self._take(file, piece):
                    return
                self._torn = None
            elif piece.kind != "end":
                lost = piece.kind == "torn" and self._was_frame(file, data, piece.offset)
                if piece.kind == "torn" and last and not lost:
                    return
                file.whole = False
                file.faults.append(f"no good frame at offset {piece.offset}, behind frame {self._log.last_lsn}")
                room = piece.length if piece.kind == "damaged" else None
                rest = data[piece.offset : piece.offset + piece.length]
                self._torn = _Torn(rest, piece.offset, file.file, file.header.salt, room, lost)

    def _was_frame(self, file: LogFile, data: bytes, offset: int) -> bool:
        """Whether bytes behind the last frame of a file, that a server would refuse, were a frame."""
        verdict = judge_tail(
            last_lsn=self._log.last_lsn,
            behind=look_behind(data, salt=file.header.salt, start=offset),
            later=None,
            same_boot=file.number < self._file_no or file.header.boot_id in (WHOLE, boot_id()),
        )
        return verdict is TailVerdict.CORRUPT

    def _data(self, name: str) -> bytes:
        with reading(name), open(os.path.join(self._folder, os.path.basename(name)), "rb", buffering=0) as source:
            return read_all(source.fileno())

    def _opened(self, name: str, number: int, data: bytes) -> LogFile:
        head = data[:FILE_HEADER_BYTES]
        try:
            header = decode_wal_header(head, path=name)
        except TopicsError as exc:
            if isinstance(exc, FormatError) and header_is_whole(head):
                raise  # of a newer program
            fault = str(exc).removeprefix(f"{name}: ")
            header = self._header(number, salt=find_salt(data) or _new_salt(), boot=WHOLE)
            return LogFile(file=name, number=number, header=header, whole=False, faults=[fault])
        expected = self._header(number, salt=header.salt, boot=header.boot_id)
        if header != expected:
            raise FormatError(f"{name}: is a file of another shard or another number: put it back where it belongs")
        return LogFile(file=name, number=number, header=header)

    def _take(self, file: LogFile, frame: Frame) -> bool:
        """False: nothing from here on counts."""
        log = self._log
        before = log.last_lsn or min(self._covered, frame.lsn - 1)
        if not log.last_lsn and self._torn is not None and before == frame.lsn - 1 > 0:
            before -= 1  # the log begins with what can't be read: a frame at least
        if frame.lsn <= log.last_lsn:
            file.whole = False
            file.faults.append(f"frame {frame.lsn} at offset {frame.offset} stands behind frame {log.last_lsn}")
            return True
        if frame.lsn != before + 1:
            if not log.gaps and self._is_unsynced(file, frame):
                log.cut = True
                return False
            self._add_gap(file, frame, before)
        log.last_lsn = frame.lsn
        file.frames.append(frame._replace(body=b"") if frame.type == FrameType.APPEND else frame)
        return True

    def _is_unsynced(self, file: LogFile, frame: Frame) -> bool:
        torn = self._torn  # what stands before it
        verdict = judge_tail(
            last_lsn=self._log.last_lsn,
            behind=Behind.PIECE if torn is None else look_behind(torn.data, salt=torn.salt),
            later=sum_up(chain([frame], self._behind(file, frame))),
            same_boot=file.number <= self._file_no or file.header.boot_id in (WHOLE, boot_id()),
            covered=self._covered,
        )
        return verdict is TailVerdict.UNSYNCED

    def _behind(self, file: LogFile, frame: Frame) -> Iterator[Frame]:
        """The good frames that follow one, in its file and in newer ones."""
        for number in sorted(number for number in self._numbers() if number >= file.number):
            name = self._name(number)
            data = self._data(name)
            if number == file.number:
                yield from frames_after(data, salt=file.header.salt, start=frame.offset + frame.length)
            elif any(data):
                yield from frames_after(
                    data, salt=self._opened(name, number, data).header.salt, start=FILE_HEADER_BYTES
                )

    def _add_gap(self, file: LogFile, frame: Frame, before: int) -> None:
        torn = self._torn
        head = None
        if torn is not None and frame.lsn == before + 2:
            head = _head_of(torn, lsn=before + 1)
        file.whole = False
        if torn is None or torn.file != file.file:
            file.faults.append(f"frame {frame.lsn} at offset {frame.offset} follows frame {before}")
        file.gaps.append(
            Gap(
                after=before,
                before=frame.lsn,
                file=file.file if torn is None else torn.file,
                offset=frame.offset if torn is None else torn.offset,
                room=None if torn is None else torn.room,
                frame=head,
            )
        )

    def _end(self) -> None:
        """The snapshot has seen more than there is, the file is missing that was written after it, or the last frame
        is damaged."""
        log = self._log
        last = log.files[-1] if log.files else None
        if last is None:
            return
        short = 0 < log.last_lsn < self._covered
        if not short and not self._missing:
            if self._torn is not None and self._torn.lost:
                self._lose_last(self._torn)
            return
        if short:
            text = f"the log ends with frame {log.last_lsn}, but the snapshot has seen {self._covered}"
            last.faults.append(text)
        last.whole = False
        after = log.last_lsn or self._covered
        before = max(log.last_lsn, self._covered) + 1
        last.gaps.append(Gap(after=after, before=before, file=last.file, offset=0, room=None, open=not self._clean))
        log.last_lsn = before - 1

    def _lose_last(self, torn: _Torn) -> None:
        log = self._log
        file = next(file for file in log.files if file.file == torn.file)
        after = log.last_lsn or self._covered
        room = aligned(used_bytes(torn.data, start=0))
        head = _head_of(msgspec.structs.replace(torn, room=room), lsn=after + 1)
        file.gaps.append(Gap(after=after, before=after + 2, file=torn.file, offset=torn.offset, room=room, frame=head))
        log.last_lsn = after + 1


def _new_salt() -> int:
    return secrets.randbits(31) << 1 | 1


def _head_of(torn: _Torn, *, lsn: int) -> Frame | None:
    """The head of a frame whose body is damaged, if number, length and count are what they must be."""
    if len(torn.data) < FRAME_HEADER.size:
        return None
    fields = FRAME_HEADER.unpack_from(torn.data)
    _, body_len, kind, flags, key_len, count, topic_id, first_seq, ts, found, synced = fields
    length = frame_bytes(key_len=key_len, body_len=body_len)
    if found != lsn or kind not in _KINDS or length != (torn.room or length):
        return None
    at = FRAME_HEADER.size + key_len
    batch = torn.data[at + _COLUMN_LENGTHS : at + body_len]
    if count != (batch.count(RECORD_SEPARATOR) + 1 if kind == FrameType.APPEND else 0):
        return None
    body = torn.data[at : at + body_len] if kind == FrameType.TOPIC else b""
    return Frame(kind, flags, count, topic_id, first_seq, ts, found, synced, b"", body, torn.offset, length)


# --- the log made whole ------------------------------------------------------------------------------


class Inserted(msgspec.Struct, frozen=True, kw_only=True):
    """A frame to stand in a gap or at the end of the log."""

    type: FrameType
    topic_id: int
    first_seq: int = 0
    body: bytes = b""


def named_topic(topic_id: int, frame: TopicFrame) -> Inserted:
    return Inserted(type=FrameType.TOPIC, topic_id=topic_id, body=msgspec.msgpack.encode(frame))


def head_raised(topic_id: int, *, head_seq: int, ceiling: int) -> Inserted:
    """Seqs up to the head were given out; their records are gone as far as they are nowhere else."""
    body = encode_head(HeadFrame(head_seq))
    return Inserted(type=FrameType.HEAD, topic_id=topic_id, first_seq=ceiling, body=body)


def rebuilt(
    data: bytes, file: LogFile, *, shard: int, names: dict[int, list[Inserted]], tail: list[Inserted], last_lsn: int
) -> bytes:
    """The file without what is damaged in it. data: its bytes as they are; names: topics to be named in a gap, by its
    `after`; tail: what is to stand behind the last frame of the log, if this is its last file."""
    clock = max([frame.ts for frame in file.frames], default=0)
    nothing = head_raised(shard, head_seq=0, ceiling=0)

    def frame_of(one: Inserted, lsn: int) -> bytes:
        return encode_frame(
            salt=file.header.salt,
            type=one.type,
            topic_id=one.topic_id,
            first_seq=one.first_seq,
            ts=clock,
            lsn=lsn,
            synced=0,
            body=one.body,
        )

    pieces = [file.header.encode()]
    for piece in file.pieces():
        if isinstance(piece, Frame):
            pieces.append(data[piece.offset : piece.offset + piece.length])
            continue
        own = names.get(piece.after, [])
        for at in range(piece.count):
            pieces.append(frame_of(own[at] if at < len(own) else nothing, piece.after + 1 + at))
    pieces += [frame_of(one, last_lsn + at) for at, one in enumerate(tail, 1)]
    return b"".join(pieces)
