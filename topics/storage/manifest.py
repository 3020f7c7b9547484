"""topics.json: the format of a data folder, and which of its files count. It is there before the first byte of data."""

from __future__ import annotations

import msgspec
from xxhash import xxh3_64_intdigest

from topics.errors import CorruptData, FormatError
from topics.storage.format import FORMAT_VERSION

MANIFEST_NAME = "topics.json"
COLD_NOTE = "cold.json"  # in the cold tier: whose it is
SNAPSHOT_NOTE = "snapshot.json"  # beside it in a stable view, whose segments are links to the real ones
RESTORE_NOTE = "restore.json"  # in a folder into which a backup is being restored; the manifest comes last
_CHECK = b',"check":"'  # the last field: the checksum of all bytes before it, in hex


class ColdNote(msgspec.Struct, frozen=True):
    """What cold.json says."""

    id: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: int
    layout: int
    shards: int
    cold: str | None = None  # the folder of segments that have left this one; the same names below it
    cold_id: str | None = None  # what cold.json says there: that it is this folder's cold tier
    routers: bool = False  # there is a file of router rules, perhaps without a rule: one that is missing is lost


def decode_manifest(text: bytes, *, path: str, format_version: int = FORMAT_VERSION) -> Manifest:
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
        if manifest.format < 1 or manifest.layout < 1 or manifest.shards < 1:
            raise msgspec.ValidationError("numbers from 1 on expected")
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptData(f"{path} is damaged ({exc}): restore it from a backup") from None
    if manifest.format > format_version:
        raise FormatError(
            f"{path}: written in format {manifest.format}, this program reads up to {format_version}: "
            "use the newer program that wrote it"
        )
    _check(text, path=path)
    return manifest


def unfinished_restore(path: str) -> str:
    """What is said of a folder with RESTORE_NOTE and without a manifest."""
    return (
        f"{path} holds a restore that was not finished: go on with it by the same command, `topics backup restore`, or "
        "empty the folder"
    )


def encode_manifest(manifest: Manifest) -> bytes:
    text = msgspec.json.encode(manifest)[:-1]
    return text + _CHECK + b"%016x" % xxh3_64_intdigest(text) + b'"}\n'


def is_checked(text: bytes) -> bool:
    """Whether it has a checksum; those of earlier programs have none."""
    return _CHECK in text


def _check(text: bytes, *, path: str) -> None:
    """Over the bytes as they stand: a newer program may have written fields that are none of ours."""
    covered, found, rest = text.partition(_CHECK)
    if found and rest.rstrip() != b'%016x"}' % xxh3_64_intdigest(covered):
        raise CorruptData(f"{path} is damaged (its checksum fails): restore it from a backup")
