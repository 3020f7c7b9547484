"""The bytes of a file as a backup keeps them, checked on their way: what is damaged is never put into a repository.

A file that has gone, or is not what the moment saw, is FileNotFoundError or Superseded: take another moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec

from topics.backup.moment import Log, Moment, Segment, State
from topics.datadir.batch import Batch
from topics.datadir.files import Files, Superseded, reading
from topics.errors import CorruptData
from topics.storage.format import CHECKSUM, FILE_HEADER_BYTES, aligned
from topics.storage.frames import WHOLE, decode_frame, decode_wal_header
from topics.storage.routers import decode_rules
from topics.storage.segment import decode_index, decode_segment_header, decode_tag_page
from topics.storage.snapshot import decode_snapshot

_READ_BYTES = 4 << 20
_REMEDY = "`topics verify --deep` tells what else is; restore it from an earlier backup"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file to be kept. `identity`: two with the same one have the same content; empty: nobody can tell."""

    file: str
    size: int  # about, where it has no identity
    pieces: Callable[[], Iterator[bytes]]
    identity: str = ""
    flags: Segment | None = None  # has delete flags to be kept beside it


def sources(moment: Moment) -> list[Source]:
    """What may go soonest comes first."""
    files = moment.files
    found = [_state(state) for state in moment.states]
    found += [_log(log) for log in moment.logs]
    if moment.rules:
        found.append(Source(file=moment.routers, size=0, pieces=lambda: _rules(moment)))
    for segment in moment.segments:
        found += _segment(files, segment)
    return found


# --- snapshots, logs, routers ---


def _state(state: State) -> Source:
    def pieces() -> Iterator[bytes]:
        data = _read(state.fd, os.fstat(state.fd).st_size, 0, file=state.file)
        decode_snapshot(data, path=state.file)
        yield data

    return Source(file=state.file, size=os.fstat(state.fd).st_size, pieces=pieces)


def _log(log: Log) -> Source:
    """Its frames were checked when it was looked at. Only its end can have changed since: a write that failed is cut
    off, and others are written in its place."""

    def pieces() -> Iterator[bytes]:
        head = _read(log.fd, FILE_HEADER_BYTES, 0, file=log.file)
        header = decode_wal_header(head, path=log.file)
        yield msgspec.structs.replace(header, boot_id=WHOLE).encode() if log.whole else head
        last = b""
        for at in range(FILE_HEADER_BYTES, log.end, _READ_BYTES):
            last = _read(log.fd, min(_READ_BYTES, log.end - at), at, file=log.file)
            yield last
        if log.checksum and _tail(log.fd, log.end) != log.checksum:
            raise Superseded

    life = "whole" if log.whole else "as it was"
    identity = f"{log.file} {log.salt:08x} {log.end} {log.checksum.hex()} {life}"
    return Source(file=log.file, size=log.end, pieces=pieces, identity=identity)


def _rules(moment: Moment) -> Iterator[bytes]:
    with moment.files.opened(moment.routers) as fd:
        data = os.pread(fd, os.fstat(fd).st_size, 0)
    if decode_rules(data, path=moment.routers) != moment.rules:
        raise Superseded
    yield data


# --- segments ---


def _segment(files: Files, segment: Segment) -> list[Source]:
    last = segment.blocks[-1] if segment.blocks else None
    with files.opened(segment.file) as fd:
        checksum = _tail(fd, last.offset + last.length) if last else b""
    identity = f"{segment.file} {segment.salt:08x} {segment.bytes} {checksum.hex()}"
    data = Source(
        file=segment.file,
        size=segment.bytes,
        pieces=lambda: _blocks(files, segment),
        identity=identity,
        flags=segment if segment.deleted else None,
    )
    if not segment.sealed:
        return [data]
    _, _, size = files.find(segment.index)
    index = Source(
        file=segment.index, size=size, pieces=lambda: _index(files, segment.index), identity=f"{identity} index"
    )
    return [data, index]


def _blocks(files: Files, segment: Segment) -> Iterator[bytes]:
    """The header and every block, its flags clear."""
    with files.opened(segment.file) as fd:
        head = _read(fd, FILE_HEADER_BYTES, 0, file=segment.file)
        decode_segment_header(head, path=segment.file)
        yield head
        at = FILE_HEADER_BYTES
        for block in segment.blocks:
            if block.offset != at:
                raise CorruptData(f"{segment.file}: no block at offset {at}; {_REMEDY}")
            yield _block(fd, segment.file, block)
            at += block.length + aligned(block.count)
        if at != segment.bytes:
            raise CorruptData(f"{segment.file}: its blocks end at offset {at}, not at {segment.bytes}; {_REMEDY}")


def _block(fd: int, file: str, block: Batch) -> bytes:
    data = _read(fd, block.length, block.offset, file=file)
    frame = decode_frame(data, 0, salt=block.salt)
    if frame is None or (frame.first_seq, frame.count) != (block.first, block.count):
        raise CorruptData(f"{file}: no good block at offset {block.offset}; {_REMEDY}")
    return data + bytes(aligned(block.count))


def _index(files: Files, file: str) -> Iterator[bytes]:
    with files.opened(file) as fd:
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        index = decode_index(data, path=file)
        for _, offset, length in index.directory:
            at = index.pages_offset + offset
            decode_tag_page(data[at : at + length], path=file)
    yield data


def _tail(fd: int, end: int) -> bytes:
    """The checksum of the frame that ends there."""
    return os.pread(fd, CHECKSUM.size, end - CHECKSUM.size)


def _read(fd: int, length: int, offset: int, *, file: str) -> bytes:
    with reading(file):
        data = os.pread(fd, length, offset)
        while 0 < len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
            data += more
    if len(data) < length:
        raise CorruptData(f"{file}: ends at offset {offset + len(data)}, {offset + length} bytes expected; {_REMEDY}")
    return data
