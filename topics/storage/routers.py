"""The file of router rules: who copies what where. Written whole by the router process; anyone may read it.

0       8         12        16            24
| magic | version | 0       | payload len | XXH3-64 of the payload | payload: msgpack array of Rule
| 8 bytes | u32   | u32     | u64         | u64                    |
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec
from xxhash import xxh3_64_intdigest

from topics.errors import CorruptData, FormatError
from topics.storage.format import FORMAT_VERSION, SNAPSHOT_HEADER, check_version

ROUTERS_MAGIC = b"TOPICRTR"
Guarantee = Literal["at_least_once", "exactly_once"]


class Past(msgspec.Struct, array_like=True, frozen=True):
    """Rings were closed or opened around this router: how far the records go that were on their way then."""

    hops: int | None = None  # the source's seqs up to `until`: how many routers they may have passed; None: any number
    until: int = 0  # the source's head when a ring was closed
    passed: int = 0  # these seqs count as having passed so many
    last: int | None = None  # what lies behind them, if there is no ring now: the same of the ring that was opened
    before: Past | None = None  # of an earlier ring, whose seqs had not all been copied when this one was closed


class Rule(msgspec.Struct, array_like=True, frozen=True):
    """One router. Fields may only be added at the end."""

    router: str
    source: str
    dest: str
    source_id: int  # the lives of the two topics that were meant
    dest_id: int
    since: int  # the source's head when it was created: what was there before is not copied
    created_ms: int
    preserve_node: bool = True
    preserve_tag: bool = True
    filter: list[str] | None = None  # ["tag", "Eq", "X"] or ["tag", "Glob", "X*"]
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"
    past: Past | None = None  # left out of the file where there is none


_decode = msgspec.msgpack.Decoder(list[Rule]).decode


def routers_path(data_dir: str) -> str:
    return os.path.join(data_dir, "routers")


def missing_rules(path: str) -> CorruptData:
    """What is said of the file if the manifest knows of it."""
    return CorruptData(
        f"{path}: the rules of all routers are missing, though the manifest knows of them: restore the file from a "
        "backup, or let topics repair say what is lost"
    )


def encode_rules(rules: list[Rule]) -> bytes:
    payload = msgspec.msgpack.encode([_fields(rule) for rule in rules])
    return SNAPSHOT_HEADER.pack(ROUTERS_MAGIC, FORMAT_VERSION, 0, len(payload), xxh3_64_intdigest(payload)) + payload


def _fields(rule: Rule) -> Rule | tuple[object, ...]:
    """Without trailing fields that say nothing."""
    if rule.past is None:
        return msgspec.structs.astuple(rule)[:-1]
    if rule.past.before is None:
        return *msgspec.structs.astuple(rule)[:-1], msgspec.structs.astuple(rule.past)[:-1]
    return rule


def decode_rules(data: bytes, *, path: str) -> list[Rule]:
    if len(data) < SNAPSHOT_HEADER.size:
        raise CorruptData(f"{path}: shorter than its header")
    magic, version, _, length, checksum = SNAPSHOT_HEADER.unpack_from(data)
    if magic != ROUTERS_MAGIC:
        raise FormatError(f"{path}: not a file of router rules")
    check_version(version, path=path)
    payload = data[SNAPSHOT_HEADER.size : SNAPSHOT_HEADER.size + length]
    if len(payload) != length or xxh3_64_intdigest(payload) != checksum:
        raise CorruptData(f"{path}: checksum fails; restore it from a backup")
    return _decode(payload)
