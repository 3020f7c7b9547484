"""What a backup says about itself: a summary, and one entry for each file of the data folder. Pure.

A backup is a file of JSON lines, in the repository's `backups` folder:

    {"name":"nightly","moment_ms":...}      the summary: all that a list of backups shows
    {"file":"wal/shard-00/...","object":...}  an entry for each file
    {"sha256":"..."}                        of all bytes before this line

The content of a file is an object of the repository, named by its SHA-256. Two things are not in the content, so that
it never changes once a segment has been written: delete flags are clear in it, and stand in an object of their own (the
entry's `flags`); and the log files of the machine's present life carry no boot id (frames.WHOLE).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import msgspec

from topics.errors import CorruptData, FormatError

FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAME_RULE = "letters, digits, dots, dashes and underscores, at most 100"
_OBJECT = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(
    r"routers|wal/shard-[0-9]{2,}/[0-9a-f]{8}-[0-9a-f]{12}\.(wal|snap)|topics/[0-9a-f]{16}/[0-9]{20}\.(data|idx)"
)


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    file: str  # below the data folder
    bytes: int
    object: str
    identity: str = ""  # the same again: the same content, without reading it
    flags: str = ""  # the object with its delete flags, if any is set
    flags_bytes: int = 0

    def objects(self) -> list[tuple[str, int]]:
        """(object, bytes) of all that a restore of this file reads."""
        content = [(self.object, self.bytes)]
        return [*content, (self.flags, self.flags_bytes)] if self.flags else content


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    format: int  # of backups
    version: str  # of the program
    source: str  # the data folder
    moment_ms: int  # nothing later is in it
    finished_ms: int
    data_format: int
    layout: int
    shards: int
    topics: int
    records: int
    files: int
    total_bytes: int
    copied_bytes: int  # what it added to the repository; the rest was there


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    summary: Summary
    entries: list[Entry]


class _Seal(msgspec.Struct):
    sha256: str


_encode = msgspec.json.encode
_decode_summary = msgspec.json.Decoder(Summary).decode
_decode_entry = msgspec.json.Decoder(Entry).decode


def encode_backup(backup: Backup) -> bytes:
    lines = [_encode(backup.summary), *map(_encode, backup.entries)]
    text = b"\n".join(lines) + b"\n"
    return text + _encode(_Seal(hashlib.sha256(text).hexdigest())) + b"\n"


def decode_summary(line: bytes, *, path: str) -> Summary:
    """From the first line. A newer program's may look otherwise; its format is what counts then."""
    try:
        found = msgspec.json.decode(line)
        version = found.get("format") if isinstance(found, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise FormatError(
                f"{path}: a backup of format {version}, this program reads up to {FORMAT}; upgrade topics"
            )
        return _decode_summary(line)
    except msgspec.DecodeError as exc:
        raise CorruptData(f"{path}: damaged ({exc})") from None


def decode_backup(data: bytes, *, path: str) -> Backup:
    first, _, _ = data.partition(b"\n")
    summary = decode_summary(first, path=path)
    end = data.rstrip(b"\n").rfind(b"\n") + 1
    try:
        seal = msgspec.json.decode(data[end:], type=_Seal)
        if hashlib.sha256(data[:end]).hexdigest() != seal.sha256:
            raise CorruptData(f"{path}: damaged (its checksum fails)")
        entries = [_decode_entry(line) for line in data[len(first) + 1 : end].splitlines()]
    except msgspec.DecodeError as exc:
        raise CorruptData(f"{path}: damaged ({exc})") from None
    _check(entries, path=path)
    return Backup(summary=summary, entries=entries)


def _check(entries: Iterable[Entry], *, path: str) -> None:
    """Names that a restore may make files of."""
    for entry in entries:
        if not _FILE.fullmatch(entry.file):
            raise CorruptData(f"{path}: {entry.file!r} is no file of a data folder")
        if not all(_OBJECT.fullmatch(name) for name, _ in entry.objects()):
            raise CorruptData(f"{path}: the content of {entry.file} is named {entry.object!r}, which is no checksum")


# --- delete flags --------------------------------------------------------------------------------------

Run = tuple[int, int]  # (offset in the segment, how many)


def encode_flags(runs: list[Run]) -> bytes:
    return msgspec.msgpack.encode(runs)


def decode_flags(data: bytes) -> list[Run]:
    return msgspec.msgpack.decode(data, type=list[Run])
