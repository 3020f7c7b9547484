"""Diffs and pieces: the window, the cursor, the tombstone, the filters; and the JSON around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, Shard, error_of, examples

from topics.actors import messages
from topics.actors.messages import Diff, Op, Piece, Read
from topics.gateway.streams.frames import Batch
from topics.storage.config import TopicConfig
from topics.walshard.topic import reads


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path, segment_max_events=8)


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(count)]


def seqs(page: Any) -> list[int]:
    return [stored.seq for stored in page.stored]


def test_the_answer_is_json_of_the_contract_up_to_its_performance_block(shard: Shard) -> None:
    shard.append("a:b", [Record(b'{"x":1}', tag="t", node="n", meta=b'{"m":1}')])
    sent = shard.send(Op.DIFF, Diff("a:b", 0, 10, 10_000, include_tags=True))
    _, body = messages.decode_answer(shard.answers.messages.pop(sent))
    shown = json.loads(bytes(body) + b"}")
    ts = shown["records"][0].pop("$ts")
    assert ts == shard.clock.now_ms()
    assert shown == {
        "topic": "a:b",
        "records": [{"$seq": 1, "$node": "n", "$tag": "t", "data": {"x": 1}, "meta": {"m": 1}}],
        "next_from_seq": 1,
        "head_seq": 1,
        "earliest_seq": 1,
        "caught_up": True,
        "tombstone": None,
        "lag": 0,
    }


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize(
    ("from_seq", "limit", "expected", "following"),
    [
        (0, 100, list(range(1, 21)), 20),
        (0, 1, [1], 1),
        (0, 5, [1, 2, 3, 4, 5], 5),
        (4, 3, [5, 6, 7], 7),
        (19, 5, [20], 20),
        (20, 5, [], 20),
        (0, 20, list(range(1, 21)), 20),
        (3, 12, list(range(4, 16)), 15),
    ],
)
def test_windows(shard: Shard, flushed: bool, from_seq: int, limit: int, expected: list[int], following: int) -> None:
    for size in (5, 1, 9, 5):
        shard.append("t", records(size))
    if flushed:
        shard.flush("t")
    page = shard.diff("t", from_seq, limit=limit)
    assert seqs(page) == expected
    assert (page.next_from_seq, page.caught_up, page.lag) == (following, following == 20, 20 - following)
    assert page.scanned == len(expected)


@examples(80)
@given(
    sizes=st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=6), min_size=1, max_size=6),
    budget=st.integers(1, 1_500),
    limit=st.integers(1, 12),
    deleted=st.sets(st.integers(1, 30), max_size=8),
    flushed=st.booleans(),
)
def test_bytes_bound_a_page_but_one_record_always_comes(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    budget: int,
    limit: int,
    deleted: set[int],
    flushed: bool,
) -> None:
    shard = Shard(tmp_path_factory.mktemp("reads"), cache_bytes=500, segment_max_events=5)
    seq = 0
    for batch in sizes:
        tagged = []
        for size in batch:
            seq += 1
            tagged.append(Record(b'"' + b"x" * size + b'"', tag="gone" if seq in deleted else None))
        shard.append("t", tagged)
    shard.delete("t", tag="gone")
    if flushed:
        shard.flush("t")
    expected = [number for number in range(1, seq + 1) if number not in deleted]
    found: list[int] = []
    at = 0
    for _ in range(2 * seq + 2):
        page = shard.diff("t", at, limit=limit, max_bytes=budget)
        assert len(page.stored) <= limit
        if len(page.stored) > 1:
            assert sum(len(stored.record.data) for stored in page.stored) <= budget
        found += seqs(page)
        assert page.next_from_seq > at or page.caught_up
        at = page.next_from_seq
        if page.caught_up:
            break
    assert found == expected
    shard.crash()


def test_own_nodes_are_left_out_and_the_cursor_goes_past_them(shard: Shard) -> None:
    shard.append("t", [Record(b"1", node="a"), Record(b"2", node="b"), Record(b"3"), Record(b"4", node="a")])
    assert seqs(shard.diff("t", nodes=["a"])) == [2, 3]
    assert seqs(shard.diff("t", nodes=["a", "b"])) == [3]
    assert seqs(shard.diff("t", nodes=["A"])) == [1, 2, 3, 4]
    assert seqs(shard.diff("t", nodes=[])) == [1, 2, 3, 4]
    page = shard.diff("t", nodes=["a"], limit=1)
    assert (seqs(page), page.next_from_seq, page.scanned, page.caught_up) == ([], 1, 1, False)
    page = shard.diff("t", 3, nodes=["a"])
    assert (seqs(page), page.next_from_seq, page.caught_up, page.tombstone) == ([], 4, True, None)


def test_a_topic_may_opt_out_of_the_filter(shard: Shard) -> None:
    shard.append("t", [Record(b"1", node="a")], config=TopicConfig(dedupe_node=False))
    assert seqs(shard.diff("t", nodes=["a"])) == [1]


def test_tags_and_meta_only_on_request(shard: Shard) -> None:
    shard.append("t", [Record(b"1", tag="x", meta=b'{"a":1}')])
    for include_tags in (True, False):
        for include_meta in (True, False):
            [stored] = shard.diff("t", include_tags=include_tags, include_meta=include_meta).stored
            assert stored.record.tag == ("x" if include_tags else None)
            assert stored.record.meta == (b'{"a":1}' if include_meta else None)


def test_deleted_gaps_are_silent(shard: Shard) -> None:
    shard.append("t", records(10))
    shard.delete("t", before_seq=6)
    page = shard.diff("t", 2)
    assert (seqs(page), page.tombstone, page.earliest_seq) == ([6, 7, 8, 9, 10], None, 6)
    shard.delete("t", before_seq=100)
    page = shard.diff("t", 2)
    assert (seqs(page), page.tombstone, page.next_from_seq, page.caught_up) == ([], None, 10, True)
    assert page.earliest_seq == 11


def test_evicted_gaps_are_told(shard: Shard) -> None:
    shard.append("t", records(10), config=TopicConfig(cap_records=4))
    page = shard.diff("t", 2)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (3, 6, "cap")
    assert page.tombstone.missed_estimate == 4
    assert (page.tombstone.earliest_seq, page.tombstone.head_seq) == (7, 10)
    assert seqs(page) == [7, 8, 9, 10]
    assert shard.diff("t", 5).tombstone is not None
    assert shard.diff("t", 6).tombstone is None
    assert shard.diff("t", 10).tombstone is None


def test_a_tombstone_comes_once_and_with_the_first_page(shard: Shard) -> None:
    shard.append("t", records(10), config=TopicConfig(cap_records=4))
    page = shard.diff("t", 0, limit=2)
    assert page.tombstone is not None
    assert seqs(page) == [7, 8]
    page = shard.diff("t", page.next_from_seq, limit=2)
    assert page.tombstone is None
    assert seqs(page) == [9, 10]


def test_a_gap_of_deletes_and_evictions_reaches_to_the_first_live_record(shard: Shard) -> None:
    shard.append("t", records(10), config=TopicConfig(cap_records=8))
    shard.delete("t", before_seq=7)
    page = shard.diff("t", 0)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to) == (1, 6)
    assert shard.diff("t", 1).tombstone is not None
    assert shard.diff("t", 2).tombstone is None


def test_everything_expired(shard: Shard) -> None:
    shard.append("t", records(3), config=TopicConfig(ttl_ms=50))
    shard.wall.pass_ms(50)
    assert len(shard.everything("t")) == 3
    shard.wall.pass_ms(1)
    page = shard.diff("t", 0)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (1, 3, "ttl")
    assert (seqs(page), page.next_from_seq, page.caught_up, page.earliest_seq) == ([], 3, True, 4)


def test_both_reasons(shard: Shard) -> None:
    shard.append("t", records(4), config=TopicConfig(ttl_ms=50, cap_records=3))
    shard.wall.pass_ms(51)
    assert shard.report("t").count == 0
    shard.append("t", records(1))
    for cursor, reason in ((0, "mixed"), (1, "ttl"), (2, "ttl")):
        found = shard.diff("t", cursor).tombstone
        assert found is not None
        assert found.reason == reason


def test_a_cursor_from_the_future_means_another_topic(shard: Shard) -> None:
    shard.append("t", records(3))
    page = shard.diff("t", 4)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason) == (1, 3, "recreated")
    assert seqs(page) == [1, 2, 3]
    assert shard.diff("t", 3).tombstone is None
    shard.drop("t")
    shard.put("t", TopicConfig())
    page = shard.diff("t", 3)
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.missed_estimate) == (1, 0, 0)
    assert (seqs(page), page.next_from_seq, page.caught_up) == ([], 0, True)


def test_resident_records_lost_between_logged_ones_leave_a_tombstone(shard: Shard) -> None:
    shard.append("t", records(3))
    shard.put("t", TopicConfig(durability="ephemeral"))
    shard.append("t", records(4))
    shard.put("t", TopicConfig())
    shard.append("t", records(2))
    assert seqs(shard.diff("t")) == list(range(1, 10))
    shard.restart()
    found: list[int] = []
    gaps = []
    at = 0
    while True:
        page = shard.diff("t", at)
        found += seqs(page)
        if page.tombstone is not None:
            gaps.append((page.tombstone.gap_from, page.tombstone.gap_to))
        at = page.next_from_seq
        if page.caught_up:
            break
    assert found == [1, 2, 3, 8, 9]
    assert gaps == [(4, 7)]
    assert shard.diff("t", 5).tombstone is not None
    assert shard.diff("t", 7).tombstone is None


def test_no_topic(shard: Shard) -> None:
    assert error_of(lambda: shard.diff("nothing")).code == "topic_not_found"


def test_a_read_makes_a_topic_hot(shard: Shard) -> None:
    shard.append("t", records(1))
    assert shard.report("t").effective_priority == 0
    shard.diff("t")
    assert shard.report("t").effective_priority == 500
    shard.wall.pass_ms(30_000)
    assert shard.report("t").effective_priority == 250


# --- pieces: what watchers get -------------------------------------------------------------------------


def read_of(from_seq: int, **more: Any) -> Read:
    options = {"limit": 100, "max_bytes": 100_000, "tags": False, "meta": True, "data": True, "nodes": None, **more}
    return Read(
        "t",
        0,
        from_seq,
        options["limit"],
        options["max_bytes"],
        options["tags"],
        options["meta"],
        options["data"],
        options["nodes"],
    )


def piece_of(
    shard: Shard, from_seq: int, *, origins: bool = False, **more: Any
) -> tuple[Piece, list[dict[str, Any]], bytes]:
    topic = shard.topic("t")
    shard.engine.refresh(topic)
    message, following = reads.piece(
        Op.TAIL, topic, read_of(from_seq, **more), shard.engine.cache, 77, from_seq=from_seq, origins=origins
    )
    assert messages.unpack(message).correlation == 77
    piece, body = messages.decode_answer(message)
    assert following == piece.to_seq
    return piece, json.loads(b"[" + bytes(body) + b"]"), bytes(body)


def test_a_piece_says_from_where_to_where(shard: Shard) -> None:
    for size in (3, 4):
        shard.append("t", records(size))
    topic = shard.topic("t")
    assert piece_of(shard, 1, limit=3)[0] == Piece(topic.id, 1, 4, 7)
    piece, shown, _ = piece_of(shard, 0)
    assert (piece.to_seq, [record["$seq"] for record in shown]) == (7, list(range(1, 8)))
    assert piece_of(shard, 7) == (Piece(topic.id, 7, 7, 7), [], b"")


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("flushed", [False, True])
def test_what_a_record_shows(shard: Shard, tags: bool, meta: bool, data: bool, flushed: bool) -> None:
    shard.append("t", [Record(b'{"x": 1}', tag="g", node="n", meta=b'{"m":1}'), Record(b"2"), Record(b"null")])
    if flushed:
        shard.flush("t")
    _, shown, _ = piece_of(shard, 0, tags=tags, meta=meta, data=data)
    always = {"$seq", "$ts"}
    assert set(shown[0]) == (
        always
        | {"$node"}
        | ({"$tag"} if tags else set())
        | ({"meta"} if meta else set())
        | ({"data"} if data else set())
    )
    for record, value in zip(shown, [{"x": 1}, 2, None], strict=True):
        assert ("data" in record) == data
        if data:
            assert record["data"] == value
    assert set(shown[1]) == always | ({"data"} if data else set())


def test_without_data_the_budget_still_counts_records(shard: Shard) -> None:
    """At least one always comes, and everything comes in the end."""
    for _ in range(3):
        shard.append("t", [Record(b'"' + b"x" * 500 + b'"') for _ in range(3)])
    found: list[int] = []
    at = 0
    while at < 9:
        piece, shown, _ = piece_of(shard, at, data=False, max_bytes=100)
        assert piece.to_seq > at
        found += [record["$seq"] for record in shown]
        at = piece.to_seq
    assert found == list(range(1, 10))


def test_a_gap_is_apart_from_what_lies_behind_it(shard: Shard) -> None:
    shard.append("t", records(10), config=TopicConfig(cap_records=4))
    piece, shown, _ = piece_of(shard, 2, limit=2)
    assert piece.gap == messages.Gap(3, 6, "cap", 7)
    assert (piece.from_seq, piece.to_seq, piece.head_seq) == (6, 8, 10)
    assert [record["$seq"] for record in shown] == [7, 8]
    assert piece_of(shard, 8)[0].gap is None


def test_a_gap_up_to_the_head(shard: Shard) -> None:
    shard.append("t", records(3), config=TopicConfig(ttl_ms=50))
    shard.wall.pass_ms(51)
    piece, shown, _ = piece_of(shard, 0)
    assert piece.gap == messages.Gap(1, 3, "ttl", 4)
    assert (piece.from_seq, piece.to_seq, shown) == (3, 3, [])


def test_a_cursor_from_the_future(shard: Shard) -> None:
    shard.append("t", records(3))
    piece, shown, _ = piece_of(shard, 9)
    assert piece.gap == messages.Gap(1, 3, "recreated", 1)
    assert (piece.from_seq, piece.to_seq, len(shown)) == (0, 3, 3)
    shard.drop("t")
    shard.put("t", TopicConfig())
    piece, shown, _ = piece_of(shard, 9)
    assert piece.gap == messages.Gap(1, 0, "recreated", 1)
    assert (piece.from_seq, piece.to_seq, shown) == (0, 0, [])


def test_no_piece_goes_across_a_hole(shard: Shard) -> None:
    shard.append("t", records(3))
    shard.put("t", TopicConfig(durability="ephemeral"))
    shard.append("t", records(4))
    shard.put("t", TopicConfig())
    shard.append("t", records(2))
    shard.restart()
    told = []
    at = 0
    for _ in range(10):
        piece, shown, _ = piece_of(shard, at)
        told.append((piece.gap and (piece.gap.gap_from, piece.gap.gap_to), [record["$seq"] for record in shown]))
        at = piece.to_seq
        if at == piece.head_seq:
            break
    assert told == [(None, [1, 2, 3]), ((4, 7), [8, 9])]


@pytest.mark.parametrize("flushed", [False, True])
def test_origins_cut_the_body_at_every_record(shard: Shard, flushed: bool) -> None:
    nodes = ["a", None, "b", "", None]
    shard.append("t", [Record(b'"%b"' % (b"x" * at), node=node) for at, node in enumerate(nodes)])
    shard.append("t", records(2))
    shard.append("t", [Record(b"1", tag="gone", node="c"), Record(b"2", node="c")])
    shard.delete("t", tag="gone")
    if flushed:
        shard.flush("t")
    piece, shown, body = piece_of(shard, 0, origins=True)
    assert piece.nodes == [*nodes, None, None, "c"]
    assert [record.get("$node") for record in shown] == piece.nodes
    assert piece.ends is not None
    parts = [body[start : end - 1] for start, end in zip([0, *piece.ends], piece.ends, strict=False)]
    assert [json.loads(part)["$seq"] for part in parts] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert piece.ends[-1] == len(body) + 1


def test_no_origins_where_there_are_none(shard: Shard) -> None:
    shard.append("t", records(3))
    piece, shown, _ = piece_of(shard, 0, origins=True)
    assert (piece.nodes, piece.ends, len(shown)) == (None, None, 3)


def test_no_origins_of_a_topic_without_filter(shard: Shard) -> None:
    shard.append("t", records(1, node="a"), config=TopicConfig(dedupe_node=False))
    assert piece_of(shard, 0, origins=True)[0].nodes is None
    assert len(piece_of(shard, 0, nodes=["a"])[1]) == 1


@examples(60)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.sampled_from([None, "a", "b", ""]), st.integers(0, 300)), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    own=st.lists(st.sampled_from(["a", "b", "", "c"]), unique=True),
    limit=st.integers(1, 6),
    budget=st.integers(1, 800),
    cap=st.sampled_from([0, 0, 3, 7]),
)
def test_pushes_and_reads_agree(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[str | None, int]]],
    own: list[str],
    limit: int,
    budget: int,
    cap: int,
) -> None:
    """A push that names origins, without those of a reader, is what that reader's own read gets."""
    shard = Shard(tmp_path_factory.mktemp("pieces"), cache_bytes=300)
    for batch in batches:
        shard.append(
            "t",
            [Record(b'"%b"' % (b"x" * size), node=node) for node, size in batch],
            config=TopicConfig(cap_records=cap),
        )
    at = 0
    for _ in range(40):
        pushed, shown, body = piece_of(shard, at, origins=True, limit=limit, max_bytes=budget)
        read, own_shown, own_body = piece_of(shard, at, nodes=own or None, limit=limit, max_bytes=budget)
        assert (pushed.gap, pushed.from_seq, pushed.to_seq) == (read.gap, read.from_seq, read.to_seq)
        assert len(shown) <= limit
        batch_frame = Batch(b"t", pushed, body).without(frozenset(own))
        left = b"" if batch_frame is None else batch_frame.sse()
        assert [record for record in shown if record.get("$node") not in own] == own_shown
        assert (own_body in left) if own_body else batch_frame is None
        assert pushed.to_seq > at or pushed.to_seq == pushed.head_seq
        at = pushed.to_seq
        if at == pushed.head_seq:
            break
    assert at == shard.topic("t").head_seq
    shard.crash()
