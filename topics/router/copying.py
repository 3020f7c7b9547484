"""What becomes of a batch on its way from a source to a destination. Pure.

One router without filter that keeps everything passes the batch on as it is. Otherwise records are looked at one by
one: the filter, what is kept, and for `exactly_once` the mark in `meta` that tells a copy from any other.

In a ring a record goes on until it has been in every topic once, and so does what stands for a record that a topic
lost: both carry how many routers they have passed, and what has passed enough is not handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from topics.actors.messages import RawPiece
from topics.storage import columns
from topics.storage.columns import Columns
from topics.storage.config import epoch_of
from topics.storage.routers import Past, Rule

MARK = "_topics_router"
_decode_meta = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class Copied(msgspec.Struct):
    body: bytes
    count: int
    size: int
    counts: dict[str, int]  # by router
    sources: list[tuple[int, int]]  # the seqs they come from, as runs
    hops: list[int] | None
    told: list[tuple[int, int]] = []  # of what the source has lost: how many to tell, and what these have passed then


def matches(rule: Rule, tag: str | None) -> bool:
    if rule.filter is None:
        return True
    if tag is None:
        return False
    _, operator, pattern = rule.filter
    return tag == pattern if operator == "Eq" else tag.startswith(pattern[:-1])


def copy(rules: Sequence[Rule], piece: RawPiece, body: bytes, *, ring_hops: int | None) -> Copied:
    past = rules[0].past
    told = _told(piece, ring_hops, past) if piece.lost else []
    if not piece.count:
        return Copied(b"", 0, 0, {}, [], None, told)
    source = Columns(body, count=piece.count, ts=0)
    first = piece.seqs[0][0]
    counted = ring_hops is not None or (past is not None and (piece.hops is not None or first <= past.until))
    if len(rules) == 1 and not counted and rules[0].since < first and _keeps_all(rules[0], source):
        return Copied(body, piece.count, source.size, {rules[0].router: piece.count}, piece.seqs, None, told)
    seqs = list(chain.from_iterable(range(start, start + count) for start, count in piece.seqs))
    passed = piece.hops or [0] * piece.count
    tags = source.tags()
    chosen: list[tuple[int, Rule]] = []
    hops: list[int] = []
    for index, (seq, tag) in enumerate(zip(seqs, tags, strict=True)):
        then = _passed_then(passed[index], seq, ring_hops, past) if counted else 0
        if then is None:
            continue
        found = [(index, rule) for rule in rules if seq > rule.since and matches(rule, tag)]
        chosen += found
        hops += [then] * len(found)
    if not chosen:
        return Copied(b"", 0, 0, {}, [], None, told)
    passed_then = hops if any(hops) else None
    counts: dict[str, int] = {}
    for _, rule in chosen:
        counts[rule.router] = counts.get(rule.router, 0) + 1
    picked = _rendered(source, chosen, seqs, tags)
    size = Columns(picked, count=len(chosen), ts=0).size
    return Copied(picked, len(chosen), size, counts, _runs([seqs[index] for index, _ in chosen]), passed_then, told)


def _passed_then(passed: int, seq: int, ring_hops: int | None, past: Past | None) -> int | None:
    """How many routers what stands at this seq of the source has passed behind this one; None: it goes no further."""
    before = past is not None and seq <= past.until
    limit, least = ring_hops, 0
    if past is not None and ring_hops is None:
        limit = past.last
    now = limit
    while past is not None and seq <= past.until:  # the oldest says how far; it counts as far as any of them says
        limit, least, past = past.hops, max(least, past.passed), past.before
    if limit is not None and passed >= limit:
        return None
    if before:
        passed = max(passed, least)
        if limit is not None and now is not None:
            passed += max(0, now - limit)  # it goes no further in a larger ring than it would have gone
    elif limit is None:
        return 0  # it leads out of a ring, or there is none
    return passed + 1 if passed or ring_hops is not None else 0


def _told(piece: RawPiece, ring_hops: int | None, past: Past | None) -> list[tuple[int, int]]:
    by_passed = dict(piece.lost_hops or {})
    by_passed[0] = piece.lost - sum(by_passed.values())
    told = []
    for passed, count in sorted(by_passed.items()):
        then = _passed_then(passed, piece.to_seq, ring_hops, past)
        if count and then is not None:
            told.append((count, then))
    return told


def _runs(seqs: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for seq in seqs:
        if runs and sum(runs[-1]) == seq:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((seq, 1))
    return runs


def _keeps_all(rule: Rule, source: Columns) -> bool:
    return (
        rule.filter is None
        and rule.guarantee == "at_least_once"
        and (rule.preserve_node or not source.has_nodes)
        and (rule.preserve_tag or not source.has_tags)
    )


def _rendered(source: Columns, chosen: list[tuple[int, Rule]], seqs: list[int], all_tags: list[str | None]) -> bytes:
    data = source.data()
    all_nodes = source.nodes()
    all_metas = source.metas()
    tags = [all_tags[index] if rule.preserve_tag else None for index, rule in chosen]
    nodes = [all_nodes[index] if rule.preserve_node else None for index, rule in chosen]
    metas = [
        _marked(all_metas[index], rule, seqs[index]) if rule.guarantee == "exactly_once" else _raw(all_metas[index])
        for index, rule in chosen
    ]
    return columns.pack(
        [data[index] for index, _ in chosen],
        tags=tags if any([tag is not None for tag in tags]) else None,
        nodes=nodes if any([node is not None for node in nodes]) else None,
        metas=metas if any([meta is not None for meta in metas]) else None,
    )


def _raw(meta: bytes | None) -> msgspec.Raw | None:
    return None if meta is None else msgspec.Raw(meta)


def _marked(meta: bytes | None, rule: Rule, seq: int) -> msgspec.Raw:
    """The record's meta with our mark as its last field; a mark of an earlier router makes room for it. It depends on
    the rule and the seq alone: after a crash the same record becomes the same copy."""
    topic_id, epoch = f"{rule.source_id:016x}", epoch_of(rule.source_id)
    mark = _encode(
        {
            "idempotency_key": f"router:{rule.router}:{topic_id}:{epoch}:{seq}",
            "router": rule.router,
            "source_topic": rule.source,
            "source_seq": seq,
            "source_epoch": epoch,
            "source_topic_id": topic_id,  # in hex: 64 bits are too many for a number in JavaScript
        }
    )
    if meta is not None and MARK.encode() in meta:
        fields = _decode_meta(meta)
        fields.pop(MARK, None)
        meta = _encode(fields)
    inner = b"" if meta is None else meta.strip()[1:-1].strip()
    return msgspec.Raw(b'{%b%b"%b":%b}' % (inner, b"," if inner else b"", MARK.encode(), mark))
