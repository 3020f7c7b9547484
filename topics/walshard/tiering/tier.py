"""The cold tier as a running shard reaches it: by a descriptor of the folder whose marker is this data folder's.

A path is only a name. When the disk behind it is unmounted or moved away, the same name leads to whatever lies below
it, and a segment that is copied there is gone as soon as the disk is back. So whoever writes opens the folder, reads
its marker (cold.json) through that very descriptor, and names everything else relative to it. What happens to the name
meanwhile does not matter: the bytes go to the folder whose marker was read.

Nothing is held open between two pieces of work, so that an operator can unmount the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from topics.errors import ColdTierGone, CorruptData, DiskFull
from topics.storage.manifest import COLD_NOTE, ColdNote

_NOTE_BYTES = 4_096


class ColdTier:
    def __init__(self, path: str, id: str | None) -> None:
        self.path = path
        self._id = id
        self.gone = False  # it was not there when the relocator last looked: for who may not wait for a disk

    @contextmanager
    def opened(self) -> Iterator[str]:
        """A name of the folder that stays its name, whatever is mounted or renamed. Raises ColdTierGone."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from None
        # The kernel resolves this name through the descriptor, as openat() does. So the disk, and the disks that tests
        # put in its place, need no second set of calls.
        root = f"/proc/self/fd/{fd}"
        try:
            self._check(fd)
            yield root
        except OSError as error:
            if not isinstance(error.filename, str) or not error.filename.startswith(root):
                raise
            shown = error.filename.replace(root, self.path, 1)
            raise OSError(error.errno, error.strerror, shown) from error
        except (CorruptData, DiskFull) as error:
            if root not in str(error):
                raise
            raise type(error)(str(error).replace(root, self.path)) from error
        finally:
            os.close(fd)

    def look(self) -> None:
        """Raises ColdTierGone if it is not there."""
        with self.opened():
            pass

    def why_not(self) -> str | None:
        """Why nothing of it can be read; None: it is there."""
        try:
            self.look()
        except ColdTierGone as error:
            return str(error)
        return None

    def _check(self, fd: int) -> None:
        try:
            note = os.open(COLD_NOTE, os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd)
            try:
                found = msgspec.json.decode(os.read(note, _NOTE_BYTES), type=ColdNote).id
            finally:
                os.close(note)
        except FileNotFoundError:
            raise self._gone(f"it has no {COLD_NOTE}") from None
        except OSError as error:
            raise self._gone(f"{COLD_NOTE}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._gone(f"{COLD_NOTE} is damaged: {error}") from None
        if found != self._id:
            raise self._gone("it is the cold tier of another data folder")

    def _gone(self, why: str) -> ColdTierGone:
        return ColdTierGone(f"the cold tier {self.path} is not there ({why}): mount its disk")
