"""The files of a data folder, opened for reading only.

A segment may have moved to the cold folder, under the same name; whoever asks for it need not know. Bytes come with
their checksum checked, or not at all. A file that is not there is a FileNotFoundError: the server may have removed it,
so whoever met one looks at the folder again before calling it damage. Everything else that can be wrong with a file is
an error that names it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from topics.datadir.batch import Batch
from topics.errors import CorruptData, FormatError, TopicsError
from topics.storage.columns import Columns
from topics.storage.format import FILE_HEADER_BYTES
from topics.storage.frames import decode_frame
from topics.storage.manifest import (
    COLD_NOTE,
    MANIFEST_NAME,
    RESTORE_NOTE,
    SNAPSHOT_NOTE,
    ColdNote,
    Manifest,
    decode_manifest,
    unfinished_restore,
)
from topics.storage.paths import index_path
from topics.storage.segment import (
    SegmentIndex,
    decode_index,
    index_head_bytes,
)


class ColdTierAway(TopicsError):
    """The disk of the cold tier is not mounted, or another is there: what is only there is not lost."""


class Superseded(Exception):
    """Files went or changed while they were read: there is a newer snapshot or another layout. Start over."""


class Deletes(msgspec.Struct, frozen=True, array_like=True):
    """What of a topic was deleted when a snapshot was made."""

    total: int  # ever
    flagged: int  # of those, records whose bytes are still there


class Note(msgspec.Struct):
    """What counts here of snapshot.json."""

    created_ms: int
    deletes: dict[str, Deletes] | None = None  # by topic id; None: of a version that did not note them


@contextmanager
def reading(path: str) -> Iterator[None]:
    """What goes wrong with a file names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    except PermissionError:
        raise TopicsError(f"can't read {path}: run this as a user of the server's group") from None
    except OSError as exc:
        raise TopicsError(f"can't read {path}: {exc.strerror or exc}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptData(f"{path}: its checksum holds, but nobody can read it ({exc}). Upgrade topics") from None


def _away(root: str, id: str | None) -> str | None:
    """Why this is not the folder with that marker. The links of a stable view have none."""
    if not os.path.isdir(root):
        return "no such folder"
    if id is None:
        return None
    try:
        with open(os.path.join(root, COLD_NOTE), "rb") as source:
            found = msgspec.json.decode(source.read(), type=ColdNote).id
    except FileNotFoundError:
        return f"it has no {COLD_NOTE}"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        return f"{COLD_NOTE}: {exc}"
    return None if found == id else "it is that of another data folder"


class Files:
    def __init__(self, data_dir: str, *, cold_dir: str | None = None) -> None:
        self.data_dir = data_dir
        self.cold_dir = cold_dir  # None: what the manifest says
        self.manifest = self.read_manifest()

    def read_manifest(self) -> Manifest:
        path = os.path.join(self.data_dir, MANIFEST_NAME)
        try:
            with reading(path), open(path, "rb") as file:
                self.manifest = decode_manifest(file.read(), path=path)
        except FileNotFoundError:
            if os.path.exists(os.path.join(self.data_dir, RESTORE_NOTE)):
                raise FormatError(unfinished_restore(self.data_dir)) from None
            what = "is no data folder" if os.path.isdir(self.data_dir) else "does not exist or is no folder"
            raise FormatError(
                f"{self.data_dir}: {what} of topics ({MANIFEST_NAME} is missing): name the folder that the server "
                "has as TOPICS_DATA_DIR"
            ) from None
        return self.manifest

    def frozen_ms(self) -> int | None:
        """A snapshot stays as it was when it was made: this is its time. None: it is a data folder."""
        note = self.read_note()
        return None if note is None else note.created_ms

    def read_note(self) -> Note | None:
        """None: it is a data folder and no snapshot."""
        path = os.path.join(self.data_dir, SNAPSHOT_NOTE)
        try:
            with reading(path), open(path, "rb") as file:
                return msgspec.json.decode(file.read(), type=Note)
        except FileNotFoundError:
            return None
        except CorruptData:
            raise CorruptData(f"{path} is damaged: make the snapshot again") from None

    def roots(self) -> Iterator[tuple[str, str]]:
        """(tier, folder), in the order to look."""
        yield "hot", self.data_dir
        cold = self.cold_dir or self.manifest.cold
        if cold:
            yield "cold", cold

    def open(self, file: str) -> int:
        """Whoever moves a segment to the cold folder copies it first, so it is always in one of them."""
        for _, root in self.roots():
            try:
                return os.open(os.path.join(root, file), os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                continue
        raise self._missing(file)

    def find(self, file: str) -> tuple[str, str, int]:
        """(tier, path, bytes that it takes on the disk) of a file, named as it is below the data folder."""
        for tier, root in self.roots():
            path = os.path.join(root, file)
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISREG(found.st_mode):
                return tier, path, found.st_blocks * 512
        raise self._missing(file)

    def cold_away(self) -> str | None:
        """Why the cold tier can't be read; None: it is there, or there is none."""
        for tier, root in self.roots():
            if tier == "cold" and (why := _away(root, self.manifest.cold_id)) is not None:
                return f"the cold tier {root} of this folder is not there ({why}): mount its disk"
        return None

    def _missing(self, file: str) -> TopicsError | FileNotFoundError:
        if file.endswith(".data") and (away := self.cold_away()) is not None:
            return ColdTierAway(away)
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.path.join(self.data_dir, file))

    def lost(self, error: FileNotFoundError) -> CorruptData:
        """What to say where a file counts and is nowhere."""
        cold = dict(self.roots()).get("cold") if str(error.filename).endswith(".data") else None
        where = "" if cold is None else f", and so is its copy in the cold tier {cold}, which is there"
        return CorruptData(f"{error.filename}: this file is missing{where}; restore it from a backup")

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.data_dir)

    @contextmanager
    def opened(self, file: str) -> Iterator[int]:
        with reading(file):
            fd = self.open(file)
            try:
                yield fd
            finally:
                os.close(fd)

    def read_index(self, file: str) -> SegmentIndex:
        """The index of a sealed segment, without the pages of its tags."""
        name = index_path(file)
        with self.opened(name) as fd:
            need = index_head_bytes(os.pread(fd, FILE_HEADER_BYTES, 0), path=name)
            return decode_index(os.pread(fd, min(need, os.fstat(fd).st_size), 0), path=name)

    def columns(self, batch: Batch) -> Columns:
        """The records of a batch."""
        with self.opened(batch.file) as fd:
            data = os.pread(fd, batch.length, batch.offset)
        frame = decode_frame(data, 0, salt=batch.salt)
        if frame is None or frame.first_seq != batch.first or frame.count != batch.count:
            raise CorruptData(f"{batch.file}: checksum of the batch at offset {batch.offset} fails")
        try:
            return Columns(frame.body, count=frame.count, ts=frame.ts)
        except CorruptData as exc:
            raise CorruptData(f"{batch.file}: at offset {batch.offset}: {exc}") from None
