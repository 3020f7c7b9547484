"""What is left of a segment: its good blocks, what of the rest still stands in the log, and the seqs that are gone.

The blocks of a segment follow each other without a byte between them, so one that lost a block is written anew: header,
good blocks with their delete flags as they are, and blocks made of batches in the log for seqs whose block is gone. Its
index is made again from that. A segment of which nothing is left is no segment any more.

With a good index the seqs of a block that can't be read are known exactly; without one it is all that lies between its
neighbours, which may include records that were gone before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from topics.datadir.files import Files
from topics.datadir.fsck.checking import UNREADABLE, check_columns
from topics.datadir.inventory import Entry
from topics.datadir.ranges import Ranges, minus
from topics.datadir.reading import Block, read_all, walk_segment
from topics.errors import FormatError, TopicsError
from topics.storage.columns import Columns
from topics.storage.format import DELETED, FILE_HEADER_BYTES, aligned, frame_bytes
from topics.storage.frames import Frame, find_salt, header_is_whole
from topics.storage.paths import index_path
from topics.storage.segment import (
    BlockEntry,
    SegmentHeader,
    SegmentIndex,
    block_entry,
    decode_index,
    decode_segment_header,
    decode_tag_page,
    encode_block,
    encode_index,
    scan_blocks,
    tag_rows,
)

FromLog = Callable[[int, int, int], list[Frame]]  # (topic id, first seq, last seq) -> batches within, with their bodies


class Kept(msgspec.Struct, frozen=True):
    """A good block of the file as it is."""

    offset: int
    length: int  # of its frame
    first_seq: int
    count: int
    flags: bytes

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.count - 1


class Remains(msgspec.Struct, kw_only=True):
    entry: Entry
    header: SegmentHeader
    blocks: list[Kept | Frame]  # a Frame comes from the log
    lost: Ranges
    rewrite: bool
    reindex: bool
    faults: list[str]

    @property
    def last_seq(self) -> int:
        return self.blocks[-1].last_seq

    @property
    def restored(self) -> Ranges:
        return [(block.first_seq, block.last_seq) for block in self.blocks if isinstance(block, Frame)]

    def data(self, files: Files) -> bytes:
        """The segment as it is to be."""
        source = _read(files, self.entry.file) if any(isinstance(one, Kept) for one in self.blocks) else b""
        pieces = [self.header.encode()]
        for block in self.blocks:
            if isinstance(block, Kept):
                padding = bytes(aligned(block.count) - block.count)
                pieces += [source[block.offset : block.offset + block.length], block.flags, padding]
                continue
            columns = Columns(block.body, count=block.count, ts=block.ts)
            pieces.append(
                encode_block(
                    block.body,
                    salt=self.header.salt,
                    topic_id=self.header.topic_id,
                    first_seq=block.first_seq,
                    count=block.count,
                    first_ts=block.ts,
                    last_ts=block.ts,
                    size=columns.size,
                    flags=None,
                )
            )
        return b"".join(pieces)

    @property
    def data_bytes(self) -> int:
        total = FILE_HEADER_BYTES
        for block in self.blocks:
            frame = block.length if isinstance(block, Kept) else frame_bytes(key_len=0, body_len=len(block.body))
            total += frame + aligned(block.count)
        return total


def index_of(data: bytes, *, path: str) -> bytes:
    """The index of a whole segment, from its bytes."""
    header = decode_segment_header(data, path=path)
    found = scan_blocks(data, salt=header.salt, path=path)
    tagged = [
        (entry.first_seq, Columns(frame.body, count=frame.count, ts=frame.ts)) for entry, frame in found if entry.tagged
    ]
    return encode_index(
        topic_id=header.topic_id,
        first_seq=header.first_seq,
        last_seq=found[-1][0].last_seq,
        blocks=[entry for entry, _ in found],
        tags=tag_rows(tagged),
    )


def examine(files: Files, entry: Entry, from_log: FromLog) -> Remains:
    """Raises FormatError for what a newer program wrote, or what belongs elsewhere."""
    try:
        data = _read(files, entry.file)
    except FileNotFoundError:
        return _Examination(files, entry, b"", from_log).missing()
    return _Examination(files, entry, data[: entry.data_bytes], from_log).run()


def _read(files: Files, file: str) -> bytes:
    with files.opened(file) as fd:
        return read_all(fd)


class _Examination:
    def __init__(self, files: Files, entry: Entry, data: bytes, from_log: FromLog) -> None:
        self._files = files
        self._entry = entry
        self._data = data
        self._from_log = from_log
        self._faults: list[str] = []
        self._good: list[Kept] = []
        self._holes: Ranges = []  # what lies between good blocks where there is damage

    def missing(self) -> Remains:
        self._faults.append("this segment is missing")
        self._holes = [(self._entry.first_seq, self._entry.last_seq)]
        index = self._index() if self._entry.sealed else None
        return self._remains(self._fresh_header(None), index, rewrite=True)

    def run(self) -> Remains:
        entry = self._entry
        header = self._header()
        rewrite = bool(self._faults)
        rewrite |= self._take_blocks(header)
        index = self._index() if entry.sealed else None
        found = self._remains(header, index, rewrite=rewrite)
        if entry.sealed and index is None and not found.rewrite:
            found.reindex = True
        elif entry.sealed and index is not None and not found.rewrite and not self._fits(index):
            self._faults.append("the index is not that of this segment")
            found.reindex = True
        return found

    def _remains(self, header: SegmentHeader, index: SegmentIndex | None, *, rewrite: bool) -> Remains:
        entry = self._entry
        holes = self._holes
        if index is not None and holes:
            there = [(block.first_seq, block.last_seq) for block in self._good]
            holes = minus([(block.first_seq, block.last_seq) for block in index.blocks], there)
        lost = holes
        blocks: list[Kept | Frame] = list(self._good)
        for first, last in holes:
            for frame in self._from_log(entry.topic_id, first, last):
                blocks.append(frame)
                lost = minus(lost, [(frame.first_seq, frame.last_seq)])
        blocks.sort(key=lambda block: block.first_seq)
        return Remains(
            entry=entry,
            header=header,
            blocks=blocks,
            lost=lost,
            rewrite=rewrite,
            reindex=rewrite and entry.sealed,
            faults=self._faults,
        )

    # --- the header ---

    def _header(self) -> SegmentHeader:
        entry, head = self._entry, self._data[:FILE_HEADER_BYTES]
        try:
            header = decode_segment_header(head, path=entry.file)
        except TopicsError as exc:
            if isinstance(exc, FormatError) and header_is_whole(head):
                raise
            self._faults.append(str(exc).removeprefix(f"{entry.file}: "))
            return self._fresh_header(find_salt(self._data))
        if (header.topic_id, header.first_seq) != (entry.topic_id, entry.first_seq):
            raise FormatError(f"{entry.file}: belongs to another topic or another place: put it back where it belongs")
        return header

    def _fresh_header(self, salt: int | None) -> SegmentHeader:
        entry = self._entry
        return SegmentHeader(entry.topic_id, entry.first_seq, 0, salt or (entry.first_seq << 1 | 1) & 0xFFFF_FFFF)

    # --- blocks ---

    def _take_blocks(self, header: SegmentHeader) -> bool:
        """Whether something is wrong with them."""
        entry = self._entry
        wrong = False
        damaged = False  # since the last good block
        for piece in walk_segment(self._data, salt=header.salt, counts=entry.data_bytes):
            if isinstance(piece, Block) and (fault := self._fault_of(piece)) is None:
                kept = self._kept(piece)
                wrong |= kept.flags != piece.flags
                if damaged:
                    self._hole(kept.first_seq - 1)
                damaged = False
                self._good.append(kept)
                continue
            text = fault if isinstance(piece, Block) else "no good block"
            offset = piece.frame.offset if isinstance(piece, Block) else piece.offset
            self._faults.append(f"{text} at offset {offset}")
            wrong = damaged = True
        if len(self._data) < entry.data_bytes:
            self._faults.append(f"ends {entry.data_bytes - len(self._data)} bytes too early")
            wrong = damaged = True
        if damaged:
            self._hole(entry.last_seq)
        return wrong

    def _hole(self, last: int) -> None:
        first = self._good[-1].last_seq + 1 if self._good else self._entry.first_seq
        if first <= last:
            self._holes.append((first, last))

    def _fault_of(self, block: Block) -> str | None:
        frame, last = block.frame, self._good[-1].last_seq if self._good else 0
        if frame.topic_id != self._entry.topic_id or not last < frame.first_seq <= self._entry.last_seq:
            return "a block that does not belong here"
        if len(block.flags) != frame.count:
            return "a block without its delete flags"
        try:
            columns = Columns(frame.body, count=frame.count, ts=frame.ts)
            check_columns(columns)
            tag_rows([(frame.first_seq, columns)])
        except UNREADABLE:
            return "a block whose records can't be told apart"
        return None

    def _kept(self, block: Block) -> Kept:
        frame, flags = block.frame, block.flags
        if flags.count(0) + flags.count(DELETED) != frame.count:
            odd = [frame.first_seq + at for at, flag in enumerate(flags) if flag not in (0, DELETED)]
            self._faults.append(f"delete flags of no meaning, which count as not deleted: seq {_numbers(odd)}")
            flags = bytes(flag if flag == DELETED else 0 for flag in flags)
        return Kept(frame.offset, frame.length, frame.first_seq, frame.count, flags)

    # --- the index ---

    def _index(self) -> SegmentIndex | None:
        """None: it can't be used."""
        entry, name = self._entry, index_path(self._entry.file)
        try:
            data = _read(self._files, name)
            index = decode_index(data, path=name)
            self._tags: dict[str, list[int]] = {}
            for _, offset, length in index.directory:
                at = index.pages_offset + offset
                self._tags.update(decode_tag_page(data[at : at + length], path=name))
        except FileNotFoundError:
            self._faults.append("its index is missing")
            return None
        except UNREADABLE as exc:
            self._faults.append(f"its index can't be used: {str(exc).removeprefix(f'{name}: ')}")
            return None
        if (index.topic_id, index.first_seq) != (entry.topic_id, entry.first_seq):
            self._faults.append("its index is that of another segment")
            return None
        return index

    def _fits(self, index: SegmentIndex) -> bool:
        header = decode_segment_header(self._data, path=self._entry.file)
        blocks: list[BlockEntry] = []
        tags: dict[str, list[int]] = {}
        for piece in walk_segment(self._data, salt=header.salt):
            if isinstance(piece, Block):
                frame = piece.frame
                blocks.append(block_entry(frame))
                columns = Columns(frame.body, count=frame.count, ts=frame.ts)
                for tag, seqs in tag_rows([(frame.first_seq, columns)]).items():
                    tags.setdefault(tag, []).extend(seqs)
        return index.blocks == blocks and index.last_seq == self._entry.last_seq and self._tags == tags


def _numbers(seqs: Iterable[int]) -> str:
    listed = list(seqs)
    return ", ".join(map(str, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
