"""How far an import has come: a small file on this machine, so that running it again appends nothing twice.

One file for each export, server and choice of names, one JSON object a line:

```
{"type":"run","key":"…","at_ms":…}                                        an import begins
{"type":"begun","topic":…,"target":…,"first":…,"last":…,"head_seq":…,"at_ms":…}   synced; then the append is sent
{"type":"refused"}                                                       the server said no: nothing was written
{"type":"done","topics":…,"records":…,"at_ms":…}                          everything is there
```

Appends go one at a time, so of all that were begun the last alone may be without an answer. Whether it was written the
server knows for as long as the topic remembers its key; after that the records behind `head_seq` tell. Seqs are those
of the export. The file is locked while it is in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Mapping

import msgspec

from topics.errors import TopicsError


class ImportLogError(TopicsError):
    """It can't be used; the text says why and what to do."""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    key: str
    at_ms: int


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    topic: str  # of the export
    target: str
    first: int  # seqs of the export
    last: int
    head_seq: int  # of the target, before
    at_ms: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The last append that was begun is not written."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    topics: int
    records: int
    at_ms: int


_decoder = msgspec.json.Decoder(Run | Begun | Refused | Done)


class ImportLog:
    def __init__(self, path: str, *, again: bool) -> None:
        self.path = path
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ImportLogError(
                f"can't write {path}: {(exc.strerror or str(exc)).lower()}. XDG_STATE_HOME says where it is made"
            ) from None
        self.run: Run | None = None
        self.finished: Done | None = None
        self.doubt: Begun | None = None  # begun, and no answer
        self._upto: dict[str, int] = {}  # by topic of the export: what is written
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._replay()
        except BlockingIOError:
            os.close(self._fd)
            raise ImportLogError(f"another import of the same export is running (it holds {path})") from None
        except BaseException:
            os.close(self._fd)
            raise
        if again and self.finished is not None:
            os.ftruncate(self._fd, 0)
            self.run = self.finished = self.doubt = None
            self._upto = {}

    def close(self) -> None:
        os.close(self._fd)

    @property
    def resumed(self) -> bool:
        return self.run is not None and self.finished is None

    def is_written(self, topic: str, seq: int) -> bool:
        return seq <= self._upto.get(topic, 0)

    # --- what happens ---

    def start(self) -> None:
        if self.run is None:
            self.run = Run(key=uuid.uuid4().hex, at_ms=_now_ms())
            self._add(self.run)

    def begin(self, topic: str, target: str, *, first: int, last: int, head_seq: int) -> None:
        self.doubt = Begun(topic=topic, target=target, first=first, last=last, head_seq=head_seq, at_ms=_now_ms())
        self._add(self.doubt)
        os.fdatasync(self._fd)

    def answered(self) -> None:
        """The append that was begun is written."""
        if self.doubt is not None:
            self._upto[self.doubt.topic] = max(self.doubt.last, self._upto.get(self.doubt.topic, 0))
            self.doubt = None

    def refused(self) -> None:
        self.doubt = None
        self._add(Refused())

    def finish(self, *, topics: int, records: int) -> None:
        self.finished = Done(topics=topics, records=records, at_ms=_now_ms())
        self._add(self.finished)
        os.fdatasync(self._fd)

    def key_of(self, begun: Begun) -> str:
        """The idempotency key of an append: the same, whenever it is sent."""
        assert self.run is not None
        return f"import:{self.run.key}:{_digest(begun.topic)}:{begun.first}"

    # --- the file ---

    def _replay(self) -> None:
        text = _read(self._fd)
        whole = text.rfind(b"\n") + 1  # the last line may have been cut off: nothing was sent after it
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                found = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                raise ImportLogError(
                    f"line {number} of {self.path} can't be read ({exc}). It says what was imported already; move it "
                    "away to import everything again"
                ) from None
            if isinstance(found, Run):
                self.run = found
            elif isinstance(found, Begun):
                self.answered()
                self.doubt = found
            elif isinstance(found, Refused):
                self.doubt = None
            else:
                self.answered()
                self.finished = found
        os.ftruncate(self._fd, whole)

    def _add(self, line: Run | Begun | Refused | Done) -> None:
        os.write(self._fd, msgspec.json.encode(line) + b"\n")


def path_of(server: str, export: str, names: Mapping[str, str], into: str | None) -> str:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    chosen = "\n".join([server, export, into or "", *(f"{old}={new}" for old, new in sorted(names.items()))])
    return os.path.join(home, "topics", f"import-{_digest(chosen)}.jsonl")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _read(fd: int) -> bytes:
    found = bytearray()
    while chunk := os.pread(fd, 65_536, len(found)):
        found += chunk
    return bytes(found)
