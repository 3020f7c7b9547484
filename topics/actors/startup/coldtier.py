"""The folder of the cold tier: whose it is, decided before a server starts.

    <cold>/cold.json              the id that the data folder's manifest also has
    <cold>/topics/<id>/*.data     sealed segments that have left the data folder

The id keeps two data folders from sharing one cold folder, where each would remove what it does not know. It also lets
the folder move: whoever brings it to another place and names that in TOPICS_COLD_DIR is recognised. Without
TOPICS_COLD_DIR nothing more is moved there, and what is there is still read.

cold.json is written before the manifest names the folder: a crash in between leaves a folder that the next start, with
the same settings, refuses only if something else is in it.

A cold tier that is away (its disk is not mounted, or can't be read) does not keep a server from starting: `why_away`
says so, the shards serve what they have, and go on with it when it is back. Nothing is made at its place meanwhile.
What is refused is another's folder, and a new place while the old one, which has segments, is out of reach.
"""

from __future__ import annotations

import os
import secrets

import msgspec

from topics.errors import StartRefused
from topics.storage.manifest import COLD_NOTE, ColdNote, Manifest


def settle_cold(data_dir: str, manifest: Manifest, cold_dir: str | None) -> Manifest:
    """The manifest as it has to be with this setting; raises StartRefused where segments would be out of reach."""
    if cold_dir is None:
        if manifest.cold is not None and _is_another(manifest.cold, manifest.cold_id):
            raise StartRefused(_not_there(manifest.cold))
        return manifest
    cold = os.path.abspath(cold_dir)
    if os.path.commonpath([cold, os.path.abspath(data_dir)]) == os.path.abspath(data_dir):
        raise StartRefused(f"TOPICS_COLD_DIR {cold} is inside the data folder: choose a folder on another disk")
    if manifest.cold_id is not None and manifest.cold == cold and not _is_another(cold, manifest.cold_id):
        return manifest
    found = _read_id(cold)
    if manifest.cold_id is None:
        if found is not None or _segments_in(cold):
            raise StartRefused(
                f"TOPICS_COLD_DIR {cold} is the cold tier of another data folder: choose an empty folder"
            )
        return _begin(cold, manifest, secrets.token_hex(8))
    if found == manifest.cold_id:
        return msgspec.structs.replace(manifest, cold=cold)
    if found is not None or _segments_in(cold):
        raise StartRefused(f"TOPICS_COLD_DIR {cold} is the cold tier of another data folder: choose an empty folder")
    old = manifest.cold
    if old is not None and old != cold and _read_id(old) == manifest.cold_id and not _segments_in(old):
        return _begin(cold, manifest, manifest.cold_id)
    raise StartRefused(
        f"segments of {data_dir} are in the cold tier {old}, and TOPICS_COLD_DIR {cold} is empty: mount that disk, or "
        f"move everything in {old} to {cold}"
    )


def why_away(manifest: Manifest) -> str | None:
    """What to tell an operator of a cold tier that is out of reach; None: it is there, or there is none."""
    cold = manifest.cold
    if cold is None or _known_id(cold) is not None:
        return None
    return (
        f"the cold tier {cold} is not there, or has no {COLD_NOTE}: mount its disk, and the server goes on with it by "
        "itself. Until then reads of records that are there are answered 503, and no segment is moved there"
    )


def _is_another(cold: str, id: str | None) -> bool:
    return _known_id(cold) not in (None, id)


def _known_id(cold: str) -> str | None:
    """None also where the disk does not let itself be read."""
    try:
        return _read_id(cold)
    except _Unreadable:
        return None


class _Unreadable(StartRefused):
    pass


def _not_there(cold: str) -> str:
    return (
        f"the cold tier {cold}, where segments may be, is not there or is another: mount that disk, or name the place "
        "it was moved to as TOPICS_COLD_DIR"
    )


def _read_id(cold: str) -> str | None:
    path = os.path.join(cold, COLD_NOTE)
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=ColdNote).id
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise _Unreadable(f"can't read {path}: {exc}. Make it readable, or restore it from a backup") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise StartRefused(f"can't read {path}: {exc}. Make it readable, or restore it from a backup") from None


def _segments_in(cold: str) -> bool:
    try:
        return any(files for _, _, files in os.walk(os.path.join(cold, "topics")))
    except OSError as exc:
        raise StartRefused(f"can't read {cold}: {exc.strerror}") from None


def _begin(cold: str, manifest: Manifest, id: str) -> Manifest:
    path = os.path.join(cold, COLD_NOTE)
    try:
        os.makedirs(cold, mode=0o750, exist_ok=True)
        temporary = f"{path}.tmp"
        with open(temporary, "wb") as file:
            file.write(msgspec.json.encode(ColdNote(id)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fd = os.open(cold, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise StartRefused(f"can't use {cold} as TOPICS_COLD_DIR: {exc.strerror}") from None
    return msgspec.structs.replace(manifest, cold=cold, cold_id=id)
