"""The files of a data folder, opened for reading only.

A segment may have moved to the cold folder, under the same name; whoever asks for it need not know. Bytes come with
their checksum checked, or not at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from topics.errors import CorruptData, FormatError, TopicsError
from topics.folder.batch import Batch
from topics.storage.columns import Columns
from topics.storage.format import FILE_HEADER_BYTES
from topics.storage.frames import decode_frame
from topics.storage.manifest import MANIFEST_NAME, SNAPSHOT_NOTE, Manifest, decode_manifest
from topics.storage.paths import index_path
from topics.storage.segment import SegmentHeader, SegmentIndex, decode_index, decode_segment_header


class _Note(msgspec.Struct):
    """What counts here of snapshot.json."""

    created_ms: int


class Files:
    def __init__(self, data_dir: str, *, cold_dir: str | None = None) -> None:
        self.data_dir = data_dir
        self.cold_dir = cold_dir  # None: what the manifest says
        self.manifest = self.read_manifest()

    def read_manifest(self) -> Manifest:
        path = os.path.join(self.data_dir, MANIFEST_NAME)
        try:
            with open(path, "rb") as file:
                self.manifest = decode_manifest(file.read(), path=path)
        except (FileNotFoundError, NotADirectoryError):
            what = "is no data folder" if os.path.isdir(self.data_dir) else "does not exist or is no folder"
            raise FormatError(
                f"{self.data_dir}: {what} of topics ({MANIFEST_NAME} is missing): name the folder that the server "
                "has as TOPICS_DATA_DIR"
            ) from None
        except PermissionError:
            raise TopicsError(f"can't read {path}: run this as a user of the server's group") from None
        return self.manifest

    def frozen_ms(self) -> int | None:
        """A snapshot stays as it was when it was made: this is its time. None: it is a data folder."""
        try:
            with open(os.path.join(self.data_dir, SNAPSHOT_NOTE), "rb") as file:
                return msgspec.json.decode(file.read(), type=_Note).created_ms
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as exc:
            raise CorruptData(f"{SNAPSHOT_NOTE} is damaged ({exc}): make the snapshot again") from None

    def roots(self) -> Iterator[tuple[str, str]]:
        """(tier, folder), in the order to look."""
        yield "hot", self.data_dir
        cold = self.cold_dir or self.manifest.cold
        if cold:
            yield "cold", cold

    def open(self, file: str) -> int:
        return os.open(self.find(file)[1], os.O_RDONLY | os.O_CLOEXEC)

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
        raise FileNotFoundError(os.path.join(self.data_dir, file))

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.data_dir)

    @contextmanager
    def opened(self, file: str) -> Iterator[int]:
        fd = self.open(file)
        try:
            yield fd
        finally:
            os.close(fd)

    def read_header(self, file: str) -> SegmentHeader:
        with self.opened(file) as fd:
            return decode_segment_header(os.pread(fd, FILE_HEADER_BYTES, 0), path=file)

    def read_index(self, file: str) -> SegmentIndex:
        """The index of a sealed segment."""
        name = index_path(file)
        with self.opened(name) as fd:
            return decode_index(os.pread(fd, os.fstat(fd).st_size, 0), path=name)

    def columns(self, batch: Batch) -> Columns:
        """The records of a batch."""
        with self.opened(batch.file) as fd:
            data = os.pread(fd, batch.length, batch.offset)
        frame = decode_frame(data, 0, salt=batch.salt)
        if frame is None:
            raise CorruptData(f"{batch.file}: checksum of the batch at offset {batch.offset} fails")
        return Columns(frame.body, count=frame.count, ts=frame.ts)
