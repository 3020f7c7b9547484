"""What earlier runs have read and counted: OUT/ledger.json, replaced as a whole at the end of a run.

For each report: by topic id the first seq that it has not read, and which run folders of its accumulated tables count.
Replacing the file is the one step that makes a run count. A run that dies before it leaves folders that no ledger
names; the next run removes them and reads the same records again.

Marks are kept by id, not by name: a topic that was deleted and made again has another id and begins at its beginning. A
mark never goes back. So a run over an older snapshot reads nothing twice; and where a power cut took records whose seqs
were given out again, those seqs stay counted once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from topics.errors import TopicsError

from .outputs import write_atomically

NAME = "ledger.json"
LOCK = ".lock"
VERSION = 1

View = Literal["records", "leases"]


class LedgerError(TopicsError):
    """The output folder can't be gone on with. Says what to do."""


class Counted(msgspec.Struct, kw_only=True):
    """One report's part."""

    records: dict[str, int] = {}  # topic id -> the first seq not read yet
    leases: dict[str, int] = {}  # likewise, by the id of the leases log
    tables: dict[str, list[str]] = {}  # accumulated table -> the runs whose folders count

    def marks(self, view: View) -> dict[str, int]:
        return self.records if view == "records" else self.leases


class Ledger(msgspec.Struct, kw_only=True):
    version: int = VERSION
    folder: str  # where the data was in the last run
    ids: list[str]  # of the topics that were there, leases logs too
    run: str = ""
    now_ms: int = 0
    reports: dict[str, Counted] = {}


class _Version(msgspec.Struct):
    version: int


def load(out: Path) -> Ledger | None:
    """None: nothing has been counted here."""
    path = out / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"can't read {path}: {(error.strerror or str(error)).lower()}") from None
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise LedgerError(
                f"{path} has version {version}, this program knows version {VERSION}: "
                "choose another --out, or start over with --fresh"
            )
        return msgspec.json.decode(text, type=Ledger)
    except msgspec.DecodeError as error:
        raise LedgerError(f"{path} is damaged ({error}): choose another --out, or start over with --fresh") from None


def save(out: Path, ledger: Ledger) -> None:
    write_atomically(out / NAME, msgspec.json.format(msgspec.json.encode(ledger), indent=1) + b"\n")


def check_folder(ledger: Ledger, *, out: Path, folder: str, ids: Iterable[str]) -> None:
    """Numbers of two folders must not be added up. One may have moved, or be a snapshot of the other: topics tell."""
    now = set(ids)
    known = set(ledger.ids)
    if now & known or (folder == ledger.folder and not (now and known)):
        return
    what = "has none of the topics of" if now and known else "is not"
    raise LedgerError(
        f"{out} holds the reports of another folder: {folder} {what} {ledger.folder}. "
        "Choose another --out, or start over with --fresh"
    )


def advanced(
    before: Mapping[str, int], read_to: Mapping[str, int], *, gone_for_good: bool, ids: set[str]
) -> dict[str, int]:
    """Marks after a run that read up to `read_to`. A topic that is gone from the folder itself never comes back; one
    that a snapshot does not have may."""
    kept = {topic_id: seq for topic_id, seq in before.items() if topic_id in ids or not gone_for_good}
    for topic_id, seq in read_to.items():
        kept[topic_id] = max(kept.get(topic_id, 0), seq)
    return kept


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the output folder: two runs in one would each forget what the other counted."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LedgerError(f"--out {out}: {(error.strerror or str(error)).lower()}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(f"--out {out}: another run is writing there; wait for it, or choose another") from None
        yield
    finally:
        os.close(descriptor)
