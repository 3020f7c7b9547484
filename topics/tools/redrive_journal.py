"""The journal of a redrive: which dead letters were begun to be written to their queue, and which of them are written.

It exists because a redrive touches two topics, and a crash between them leaves a question that the server answers only
for as long as the target remembers idempotency keys. One file per server and dead-letter topic, one JSON object per
line, and empty when no question is open:

```
{"type":"planned","boot":…,"appends":[{"key":…,"seq":…,"target":…,"head_seq":…,"at_ms":…},…]}    synced
{"type":"begun","append":{…}}           the append is about to be sent
{"type":"written","key":…}              it was answered
{"type":"settled","keys":[…]}           gone from the dead letters, or never written
```

A crash of the command loses no line: what was begun and has no answer is in question, one append at most. A crash of
the machine loses what was not synced, so behind it everything that was planned and has no answer is in question. Which
of the two it was, the boot id tells. A file is locked while it is in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable

import msgspec

from topics.errors import TopicsError


class JournalError(TopicsError):
    """The journal can't be used; the text says why and what to do."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """Of one dead letter to its target."""

    key: str  # idempotency key, and the identity of the dead letter
    seq: int  # of the dead letter
    target: str
    head_seq: int  # of the target, before: the copy, if there is one, lies behind it
    at_ms: int  # not after it was sent, by the clock of the machine that the redrive runs on


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned"):
    boot: str
    appends: list[Append]


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    append: Append


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    key: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag="settled"):
    keys: list[str]


Line = Planned | Begun | Written | Settled
_decoder = msgspec.json.Decoder(Line)


class Open:
    """What the lines so far leave open, as seen since this boot."""

    def __init__(self, boot: str) -> None:
        self._boot = boot
        self.planned: dict[str, Append] = {}
        self.begun: dict[str, Append] = {}
        self.written: set[str] = set()

    def apply(self, line: Line) -> None:
        if isinstance(line, Planned):
            to = self.planned if line.boot == self._boot else self.begun
            for append in line.appends:
                to.setdefault(append.key, append)
        elif isinstance(line, Begun):
            self.begun.setdefault(line.append.key, line.append)
        elif isinstance(line, Written):
            self.written.add(line.key)
        else:
            for key in line.keys:
                self.planned.pop(key, None)
                self.begun.pop(key, None)
                self.written.discard(key)


def replay(text: bytes, *, path: str) -> tuple[Open, int]:
    """What is open, and how many bytes of the file are whole lines: the last may have been cut off."""
    found = Open(boot_id())
    whole = text.rfind(b"\n") + 1
    for number, line in enumerate(text[:whole].splitlines(), 1):
        try:
            found.apply(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JournalError(
                f"line {number} of the journal {path} can't be read ({error}). It says what an earlier redrive has "
                "written already; without it that may be written a second time. Move it away to do without"
            ) from None
    return found, whole


class Journal:
    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = _opened(path)
        except OSError as error:
            raise JournalError(
                f"can't write the journal {path}: {(error.strerror or str(error)).lower()}. "
                "XDG_STATE_HOME says in which folder it is made"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = _read(self._fd)
            self._open, whole = replay(text, path=path)
            os.ftruncate(self._fd, whole)
        except BlockingIOError:
            os.close(self._fd)
            raise JournalError(f"another redrive of the same dead letters is running (it holds {path})") from None
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    # --- what is open ---

    def is_written(self, key: str) -> bool:
        return key in self._open.written

    def doubts(self) -> list[Append]:
        """Begun, and no answer."""
        return [append for key, append in self._open.begun.items() if key not in self._open.written]

    def unremoved(self) -> list[Append]:
        """Written, but perhaps still among the dead letters."""
        return [append for key, append in self._open.begun.items() if key in self._open.written]

    # --- what happens ---

    def plan(self, appends: list[Append]) -> None:
        """What is going to be begun. Synced once for all of them, because a sync takes longer than an append."""
        if appends:
            self._add(Planned(boot=boot_id(), appends=appends))
            os.fdatasync(self._fd)

    def begin(self, append: Append) -> None:
        self._add(Begun(append=append))

    def write(self, key: str) -> None:
        self._add(Written(key=key))

    def settle(self, keys: Iterable[str]) -> None:
        self._add(Settled(keys=list(keys)))
        if not self._open.begun and not self._open.planned:
            os.ftruncate(self._fd, 0)

    def end_plan(self) -> None:
        """What was planned and not begun will not be."""
        if left := [key for key in self._open.planned if key not in self._open.begun]:
            self.settle(left)

    def _add(self, line: Line) -> None:
        os.write(self._fd, msgspec.json.encode(line) + b"\n")
        self._open.apply(line)


def path_of(server: str, topic: str) -> str:
    """Where the journal of a topic's redrives is. Servers are told apart by their address, because a copy of a data
    folder holds the same dead letters.
    """
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = re.sub(r"[^A-Za-z0-9._-]", "_", topic)[:100]
    digest = hashlib.sha256(f"{server}\n{topic}".encode()).hexdigest()[:12]
    return os.path.join(home, "topics", f"redrive-{name}-{digest}.jsonl")


def peek(path: str) -> Open:
    """What a journal says, without using it."""
    try:
        with open(path, "rb") as file:
            return replay(file.read(), path=path)[0]
    except FileNotFoundError:
        return Open(boot_id())
    except OSError as error:
        raise JournalError(f"can't read the journal {path}: {(error.strerror or str(error)).lower()}") from None


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _opened(path: str) -> int:
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)  # or the file could be gone after a power cut, whatever was synced in it
    finally:
        os.close(folder_fd)
    return fd


def _read(fd: int) -> bytes:
    found = bytearray()
    while chunk := os.pread(fd, 65_536, len(found)):
        found += chunk
    return bytes(found)
