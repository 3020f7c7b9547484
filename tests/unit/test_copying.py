"""What becomes of a batch between source and destination, against a model that looks at one record after another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, batch_of, examples

from topics.actors.messages import RawPiece
from topics.router.copying import MARK, Copied, copy, matches
from topics.storage.columns import Columns
from topics.storage.routers import Rule

SOURCE_ID = 0xFEDC_BA98_7654_3210


def rule(router: str = "r", **more: Any) -> Rule:
    return Rule(
        router=router,
        source="s",
        dest="d",
        source_id=SOURCE_ID,
        dest_id=2,
        since=more.pop("since", 0),
        created_ms=0,
        **more,
    )


def piece_of(
    records: list[Record], seqs: list[int] | None = None, hops: list[int] | None = None
) -> tuple[RawPiece, bytes]:
    seqs = seqs if seqs is not None else list(range(1, len(records) + 1))
    runs: list[tuple[int, int]] = []
    for seq in seqs:
        if runs and sum(runs[-1]) == seq:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((seq, 1))
    head = seqs[-1] if seqs else 0
    body = batch_of(records)[0] if records else b""
    return RawPiece(head, head, len(records), runs, 0, True, hops), body


def copied(
    rules: list[Rule], records: list[Record], *, ring_hops: int | None = None, **piece: Any
) -> tuple[Copied, list[Record]]:
    found = copy(rules, *piece_of(records, **piece), ring_hops=ring_hops)
    if not found.count:
        assert (found.body, found.size, found.counts) == (b"", 0, {})
        return found, []
    columns = Columns(found.body, count=found.count, ts=0)
    made = [
        Record(*fields) for fields in zip(columns.data(), columns.tags(), columns.nodes(), columns.metas(), strict=True)
    ]
    assert found.size == columns.size == sum(record.size for record in made)
    assert sum(found.counts.values()) == found.count
    return found, made


A = Record(b"1", tag="a", node="n", meta=b'{"k": 1}')
B = Record(b"2", tag="b")
C = Record(b"3", node="m")
D = Record(b"4")


# --- filters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "tag", "expected"),
    [
        (None, None, True),
        (None, "x", True),
        (["tag", "Eq", "x"], "x", True),
        (["tag", "Eq", "x"], "xy", False),
        (["tag", "Eq", "x"], "X", False),
        (["tag", "Eq", "x"], None, False),
        (["tag", "Eq", "x*"], "x*", True),
        (["tag", "Eq", "x*"], "xy", False),
        (["tag", "Eq", ""], "", True),
        (["tag", "Eq", ""], None, False),
        (["tag", "Glob", "x*"], "x", True),
        (["tag", "Glob", "x*"], "xyz", True),
        (["tag", "Glob", "x*"], "y", False),
        (["tag", "Glob", "*"], "anything", True),
        (["tag", "Glob", "*"], "", True),
        (["tag", "Glob", "*"], None, False),
        (["tag", "Glob", "[x]*"], "[x]y", True),
        (["tag", "Glob", "?*"], "x", False),
    ],
)
def test_filters(pattern: list[str] | None, tag: str | None, expected: bool) -> None:
    assert matches(rule(filter=pattern), tag) is expected


# --- one router --------------------------------------------------------------------------------------


def test_a_router_that_keeps_everything_passes_the_batch_on_as_it_is() -> None:
    piece, body = piece_of([A, B, C, D])
    found = copy([rule()], piece, body, ring_hops=None)
    assert found.body is body
    assert (found.count, found.counts, found.hops) == (4, {"r": 4}, None)
    assert found.sources == [(1, 4)]


def test_nothing_in_nothing_out() -> None:
    found, made = copied([rule(), rule("q", guarantee="exactly_once")], [])
    assert (found.count, made, found.hops) == (0, [], None)


@pytest.mark.parametrize(("node", "tag"), [(True, True), (True, False), (False, True), (False, False)])
def test_what_is_preserved(node: bool, tag: bool) -> None:
    _, made = copied([rule(preserve_node=node, preserve_tag=tag)], [A, B, C, D])
    assert [record.node for record in made] == (["n", None, "m", None] if node else [None] * 4)
    assert [record.tag for record in made] == (["a", "b", None, None] if tag else [None] * 4)
    assert [(record.data, record.meta) for record in made] == [(r.data, r.meta) for r in (A, B, C, D)]


def test_columns_that_are_not_needed_are_not_there() -> None:
    found, _ = copied([rule(preserve_node=False, preserve_tag=False)], [A, B])
    columns = Columns(found.body, count=2, ts=0)
    assert (columns.has_nodes, columns.has_tags, columns.has_metas) == (False, False, True)
    found, _ = copied([rule(filter=["tag", "Eq", "b"])], [A, B])
    columns = Columns(found.body, count=1, ts=0)
    assert (columns.has_nodes, columns.has_tags, columns.has_metas) == (False, True, False)


def test_only_what_is_newer_than_the_router() -> None:
    found, made = copied([rule(since=11)], [A, B, C, D], seqs=[10, 11, 12, 20])
    assert made == [C, D]
    assert found.sources == [(12, 1), (20, 1)]
    assert copied([rule(since=20)], [A, B, C, D], seqs=[10, 11, 12, 20])[0].count == 0
    assert copied([rule(since=9)], [A, B, C, D], seqs=[10, 11, 12, 20])[0].count == 4


# --- exactly once ------------------------------------------------------------------------------------


def marks(made: list[Record]) -> list[dict[str, Any]]:
    return [json.loads(record.meta or b"{}")[MARK] for record in made]


def test_the_mark_says_where_a_copy_comes_from() -> None:
    _, made = copied([rule("my->router", guarantee="exactly_once")], [A, D], seqs=[7, 9])
    assert marks(made) == [
        {
            "idempotency_key": f"router:my->router:{SOURCE_ID:016x}:{SOURCE_ID >> 16}:{seq}",
            "router": "my->router",
            "source_topic": "s",
            "source_seq": seq,
            "source_epoch": SOURCE_ID >> 16,
            "source_topic_id": f"{SOURCE_ID:016x}",
        }
        for seq in (7, 9)
    ]
    keys = [mark["idempotency_key"] for mark in marks(made)]
    assert len(set(keys)) == 2
    assert [
        mark["idempotency_key"]
        for mark in marks(copied([rule("my->router", guarantee="exactly_once")], [D], seqs=[9])[1])
    ] == [keys[1]]
    other_life = Rule("my->router", "s", "d", SOURCE_ID + 1, 2, 0, 0, guarantee="exactly_once")
    assert marks(copied([other_life], [D], seqs=[9])[1])[0]["idempotency_key"] not in keys
    assert marks(copied([rule("other", guarantee="exactly_once")], [D], seqs=[9])[1])[0]["idempotency_key"] not in keys


@pytest.mark.parametrize(
    ("meta", "rest"),
    [
        (None, {}),
        (b"{}", {}),
        (b"{ }", {}),
        (b'{"k":1}', {"k": 1}),
        (b' {"k" : [1, {"x":2}] } ', {"k": [1, {"x": 2}]}),
        (b'{"_topics_router":1}', {}),
        (b'{"_topics_router":{"key":"forged"},"k":2}', {"k": 2}),
        (b'{"k":2,"_topics_router":{"router":"r","source":"s","seq":1,"key":"r:0000000000000001:1"}}', {"k": 2}),
        (b'{"k":2,"_topics_router":null}', {"k": 2}),
        (b'{"k":"_topics_router"}', {"k": "_topics_router"}),
        (b'{"k":{"_topics_router":5}}', {"k": {"_topics_router": 5}}),
        (rb'{"\u005ftopics_router":1,"k":2}', {"k": 2}),
        ('{"é":"😀"}'.encode(), {"é": "😀"}),
    ],
)
def test_the_mark_joins_what_is_there_and_takes_the_place_of_another(meta: bytes | None, rest: dict[str, Any]) -> None:
    _, (record,) = copied([rule(guarantee="exactly_once")], [Record(b"1", meta=meta)])
    assert record.meta is not None
    found = json.loads(record.meta)
    assert found.pop(MARK)["router"] == "r"
    assert found == rest


def test_spelling_survives_beside_the_mark() -> None:
    meta = rb'{"n":1.50, "big":12345678901234567890,"e":"\u00e9"}'
    _, (record,) = copied([rule(guarantee="exactly_once")], [Record(b"1", meta=meta)])
    assert record.meta is not None
    assert record.meta.startswith(meta[:-1])


# --- rings -------------------------------------------------------------------------------------------


def test_in_a_ring_each_record_passes_so_many_routers_and_no_more() -> None:
    found, made = copied([rule()], [A, B, C, D], ring_hops=2, hops=[0, 1, 2, 3])
    assert made == [A, B]
    assert found.hops == [1, 2]
    assert found.counts == {"r": 2}
    assert found.sources == [(1, 2)]


def test_records_written_into_a_ring_have_passed_none() -> None:
    found, made = copied([rule()], [A, B], ring_hops=1)
    assert (made, found.hops) == ([A, B], [1, 1])
    found, made = copied([rule()], [A, B], ring_hops=1, hops=[1, 1])
    assert (made, found.hops) == ([], None)


def test_out_of_a_ring_hops_do_not_count() -> None:
    found, made = copied([rule()], [A, B], ring_hops=None, hops=[5, 0])
    assert (made, found.hops) == ([A, B], None)


# --- against the model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A copy by the model: what it is, of which record, by which router, having passed how many."""

    record: Record
    seq: int
    router: str
    hops: int


def naive(
    rules: list[Rule], records: list[Record], seqs: list[int], hops: list[int] | None, ring_hops: int | None
) -> list[Made]:
    made = []
    for at, (seq, record) in enumerate(zip(seqs, records, strict=True)):
        passed = hops[at] if hops else 0
        for each in rules:
            if seq <= each.since or (ring_hops is not None and passed >= ring_hops):
                continue
            if each.filter is not None:
                _, operator, pattern = each.filter
                if record.tag is None:
                    continue
                if operator == "Eq" and record.tag != pattern:
                    continue
                if operator == "Glob" and record.tag[: len(pattern) - 1] != pattern[:-1]:
                    continue
            copy_of = Record(
                record.data,
                record.tag if each.preserve_tag else None,
                record.node if each.preserve_node else None,
                record.meta,
            )
            made.append(Made(copy_of, seq, each.router, passed + 1))
    return made


RECORDS = st.lists(
    st.builds(
        Record,
        data=st.sampled_from([b"1", b'"x y"', b'{"a": [1.0]}', b"null"]),
        tag=st.sampled_from([None, "a", "ab", "b", "", "*"]),
        node=st.sampled_from([None, "n", "é"]),
        meta=st.sampled_from([None, b"{}", b'{"k": 1}', b'{"_topics_router":2}']),
    ),
    min_size=1,
    max_size=8,
)
FILTERS = st.sampled_from(
    [None, None, ["tag", "Eq", "a"], ["tag", "Eq", "*"], ["tag", "Glob", "a*"], ["tag", "Glob", "*"], ["tag", "Eq", ""]]
)
RULES = st.lists(
    st.builds(
        lambda router, **more: rule(router, **more),
        router=st.sampled_from("pqrs"),
        since=st.sampled_from([0, 0, 5, 12]),
        preserve_node=st.booleans(),
        preserve_tag=st.booleans(),
        filter=FILTERS,
        guarantee=st.sampled_from(["at_least_once", "exactly_once"]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda each: each.router,
)


@examples(400)
@given(rules=RULES, records=RECORDS, data=st.data())
def test_like_a_naive_copier(rules: list[Rule], records: list[Record], data: st.DataObject) -> None:
    many = len(records)
    seqs = sorted(data.draw(st.sets(st.integers(1, 20), min_size=many, max_size=many)))
    hops = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=many, max_size=many))
    ring_hops = data.draw(st.sampled_from([None, None, 1, 2, 3]))
    expected = naive(rules, records, seqs, hops, ring_hops)
    found, made = copied(rules, records, ring_hops=ring_hops, seqs=seqs, hops=hops)
    assert found.count == len(expected)
    sources = [seq for first, length in found.sources for seq in range(first, first + length)]
    assert sources == [each.seq for each in expected]
    if ring_hops is not None and expected:
        assert found.hops == [each.hops for each in expected]
    else:
        assert found.hops is None
    counts: dict[str, int] = {}
    for each in expected:
        counts[each.router] = counts.get(each.router, 0) + 1
    assert found.counts == counts
    guarantees = {each.router: each.guarantee for each in rules}
    for got, want in zip(made, expected, strict=True):
        assert (got.data, got.tag, got.node) == (want.record.data, want.record.tag, want.record.node)
        if guarantees[want.router] == "at_least_once":
            assert got.meta == want.record.meta
            continue
        assert got.meta is not None
        meta, before = json.loads(got.meta), json.loads(want.record.meta or b"{}")
        mark = meta.pop(MARK)
        before.pop(MARK, None)
        assert meta == before
        assert (mark["router"], mark["source_seq"]) == (want.router, want.seq)
