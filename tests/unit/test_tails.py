"""What followers of topics are sent, when, in which order, and what ends it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from delivery import Bell, join
from hypothesis import given
from hypothesis import strategies as st
from model import Record, Shard, error_of, examples

from topics import limits
from topics.actors import messages
from topics.actors.messages import Follow, Op, Piece, Positions, Read, Unfollow
from topics.storage.config import TopicConfig


class Follower:
    """A link's writer: `taken` is how much of what it was sent the other side has taken out of the ring."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.position = 0
        self.taken = 0
        self.outbox_bytes = 0
        self.asked = 0  # wake-ups asked for

    def send_always(self, message: bytes) -> None:
        self.messages.append(message)
        self.position += len(message)

    def consumed(self, position: int) -> bool:
        return self.taken >= position

    def wake_after(self, position: int) -> bool:
        self.asked += 1
        return self.consumed(position)

    def take(self) -> list[tuple[int, int, Any, bytes]]:
        """Everything that was sent: op, correlation, answer, body."""
        self.taken = self.position
        found = []
        for message in self.messages:
            correlation = messages.unpack(message).correlation
            if message[1]:
                found.append((message[0], correlation, messages.decode_failure(message), b""))
            else:
                answer, body = messages.decode_answer(message)
                found.append((message[0], correlation, answer, bytes(body)))
        self.messages = []
        return found

    def pieces(self, correlation: int | None = None) -> list[tuple[Piece, list[int]]]:
        """The pushes among it, with their seqs."""
        return [
            (piece, seqs(body))
            for op, known, piece, body in self.take()
            if op == Op.TAIL and correlation in (None, known)
        ]


def seqs(body: bytes) -> list[int]:
    return [record["$seq"] for record in json.loads(b"[" + body + b"]")]


def records(count: int, **more: Any) -> list[Record]:
    return [Record(b"%d" % number, **more) for number in range(count)]


class Stage:
    """A shard with followers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.shard = Shard(folder, **settings)
        self._correlation = 100

    @property
    def tails(self) -> Any:
        return self.shard.engine.tails

    def send(self, op: Op, follower: Any, head: Any, *, correlation: int | None = None) -> int:
        self._correlation += 1
        correlation = self._correlation if correlation is None else correlation
        self.shard.engine.handle(messages.pack(op, correlation, head), follower)
        return correlation

    def ask(self, op: Op, follower: Follower, head: Any) -> tuple[Any, bytes]:
        """What is answered at once; an error is raised."""
        correlation = self.send(op, follower, head)
        _, known, answer, body = follower.take()[-1]
        assert known == correlation
        if isinstance(answer, Exception):
            raise answer
        return answer, body

    def follow(
        self,
        follower: Any,
        topic: str = "t",
        from_seq: int | None = None,
        *,
        limit: int = 100,
        max_bytes: int = 10_000,
        topic_id: int = 0,
        with_nodes: bool = False,
        correlation: int | None = None,
        include_tags: bool = False,
        include_meta: bool = True,
        include_data: bool = True,
    ) -> int:
        head = Follow(topic, topic_id, from_seq, limit, max_bytes, include_tags, include_meta, include_data, with_nodes)
        return self.send(Op.FOLLOW, follower, head, correlation=correlation)

    def append(self, topic: str, records: list[Record], **more: Any) -> None:
        self.shard.append(topic, records, **more)

    def topic(self, name: str = "t") -> Any:
        return self.shard.topic(name)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def read_of(topic: str, from_seq: int, *, topic_id: int = 0, limit: int = 100, nodes: list[str] | None = None) -> Read:
    return Read(topic, topic_id, from_seq, limit, 10_000, False, True, True, nodes)


# --- positions and reads -------------------------------------------------------------------------------


def test_positions(stage: Stage) -> None:
    stage.append("a", records(5), config=TopicConfig(cap_records=2))
    stage.append("b", records(1), config=TopicConfig(ttl_ms=50))
    stage.shard.wall.pass_ms(51)
    answer, _ = stage.ask(Op.POSITIONS, Follower(), Positions(["b", "nothing", "a", "a"]))
    a, b = stage.topic("a"), stage.topic("b")
    assert answer.found == [
        messages.Position(b.id, 1, 2),
        None,
        messages.Position(a.id, 5, 4),
        messages.Position(a.id, 5, 4),
    ]
    assert stage.shard.report("a").effective_priority == 500  # it was looked at


def test_a_read_is_a_piece(stage: Stage) -> None:
    stage.append("t", records(5))
    piece, body = stage.ask(Op.READ, Follower(), read_of("t", 1, limit=2))
    assert piece == Piece(stage.topic().id, 1, 3, 5)
    assert seqs(body) == [2, 3]
    piece, body = stage.ask(Op.READ, Follower(), read_of("t", 5))
    assert (piece, body) == (Piece(stage.topic().id, 5, 5, 5), b"")


def test_a_read_leaves_out_nodes_and_goes_on_behind_them(stage: Stage) -> None:
    stage.append("t", [Record(b"1", node="a"), Record(b"2"), Record(b"3", node="a")])
    piece, body = stage.ask(Op.READ, Follower(), read_of("t", 0, nodes=["a"]))
    assert (piece.to_seq, seqs(body), piece.nodes) == (3, [2], None)


def test_a_read_of_another_life_starts_over(stage: Stage) -> None:
    stage.append("t", records(2))
    old = stage.topic().id
    stage.shard.drop("t")
    stage.append("t", records(5))
    piece, body = stage.ask(Op.READ, Follower(), read_of("t", 2, topic_id=old, limit=3))
    assert piece.gap == messages.Gap(1, 5, "recreated", 1)
    assert (piece.topic_id, piece.from_seq, piece.to_seq, seqs(body)) == (stage.topic().id, 0, 3, [1, 2, 3])
    piece, body = stage.ask(Op.READ, Follower(), read_of("t", 3, topic_id=piece.topic_id))
    assert (piece.gap, seqs(body)) == (None, [4, 5])


@pytest.mark.parametrize("head", [read_of("nothing", 0), Follow("nothing", 0, None, 1, 1, False, True, True, False)])
def test_no_topic(stage: Stage, head: Any) -> None:
    op = Op.READ if isinstance(head, Read) else Op.FOLLOW
    assert error_of(lambda: stage.ask(op, Follower(), head)).code == "topic_not_found"
    assert len(stage.tails) == 0


# --- following -----------------------------------------------------------------------------------------


def test_a_round_pushes_for_a_limited_time_and_the_next_one_to_the_others(stage: Stage) -> None:
    """With a clock that is moved by each push. All have the same topic, and follow it for themselves."""
    followers = [Follower() for _ in range(20)]
    stage.append("t", records(1))
    for follower in followers:
        stage.follow(follower)
        follower.take()
    now_ns = 0
    push = stage.tails._push

    def slow(tail: Any) -> int:
        nonlocal now_ns
        now_ns += 4_000_000
        taken: int = push(tail)
        return taken

    stage.tails._push, stage.tails._clock = slow, lambda: now_ns
    found = [1] * 20

    def take() -> list[int]:
        """Who was pushed to. Nobody misses anything."""
        served = []
        for at, follower in enumerate(followers):
            for piece, _ in follower.pieces():
                assert piece.from_seq == found[at]
                found[at] = piece.to_seq
                served.append(at)
        return served

    served = []
    for _ in range(4):
        stage.append("t", records(1))
        stage.tails.push()
        assert stage.tails.can_push()
        served.append(take())
    assert served == [[*range(16)], [*range(12), *range(16, 20)]] * 2  # those behind came first
    while stage.tails.can_push():
        stage.tails.push()
        assert 1 <= len(take()) <= 16
    assert found == [5] * 20
    assert len(stage.tails._behind) == 0


def test_what_is_published_is_pushed(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(3))
    correlation = stage.follow(follower)
    [(op, known, following, _)] = follower.take()
    assert (op, known, following) == (Op.FOLLOW, correlation, messages.Following(stage.topic().id, 3, 3))
    stage.tails.push()
    assert follower.take() == []
    stage.append("t", records(2))
    stage.append("t", records(1))
    stage.append("other", records(9))
    stage.tails.push()
    [(op, known, piece, body)] = follower.take()  # what a round published is one push
    assert (op, known, piece) == (Op.TAIL, correlation, Piece(stage.topic().id, 3, 6, 6))
    assert seqs(body) == [4, 5, 6]
    stage.tails.push()
    assert follower.take() == []
    assert stage.tails.pushes == 1


def test_from_where_it_was(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(5))
    stage.follow(follower, from_seq=2, topic_id=stage.topic().id)
    [(_, _, following, _)] = follower.take()
    assert following == messages.Following(stage.topic().id, 2, 5)
    stage.tails.push()
    [(piece, found)] = follower.pieces()
    assert (piece.from_seq, piece.to_seq, found) == (2, 5, [3, 4, 5])


def test_the_topic_that_was_followed_is_gone(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(5))
    old = stage.topic().id
    stage.shard.drop("t")
    stage.append("t", records(5))
    stage.follow(follower, from_seq=2, topic_id=old)
    [(_, _, error, _)] = follower.take()
    assert error.code == "topic_not_found"
    assert len(stage.tails) == 0


def test_a_cursor_ahead_of_the_topic_starts_over(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(2))
    stage.follow(follower, from_seq=9)
    stage.tails.push()
    [(piece, found)] = follower.pieces()
    assert piece.gap == messages.Gap(1, 2, "recreated", 1)
    assert (piece.from_seq, piece.to_seq, found) == (0, 2, [1, 2])


def test_options_shape_pushes(stage: Stage) -> None:
    full, bare = Follower(), Follower()
    stage.append("t", records(1))
    stage.follow(full, include_tags=True)
    stage.follow(bare, include_meta=False, include_data=False)
    full.take(), bare.take()
    stage.append("t", [Record(b'{"x": 1}', tag="g", node="n", meta=b'{"m":1}')])
    stage.tails.push()
    [(_, _, _, body)] = full.take()
    shown = json.loads(body)
    shown.pop("$ts")
    assert shown == {"$seq": 2, "$node": "n", "$tag": "g", "data": {"x": 1}, "meta": {"m": 1}}
    [(_, _, _, body)] = bare.take()
    assert sorted(json.loads(body)) == ["$node", "$seq", "$ts"]


def test_origins_come_with_pushes_if_asked_for(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower, with_nodes=True)
    follower.take()
    stage.append("t", [Record(b"1", node="a"), Record(b'"two"'), Record(b"3", node="")])
    stage.tails.push()
    [(_, _, piece, body)] = follower.take()
    assert piece.nodes == ["a", None, ""]
    parts = [body[start : end - 1] for start, end in zip([0, *piece.ends], piece.ends, strict=False)]
    assert [json.loads(part)["data"] for part in parts] == [1, "two", 3]
    stage.append("t", records(2))
    stage.tails.push()
    [(piece, found)] = follower.pieces()
    assert (piece.nodes, piece.ends, found) == (None, None, [5, 6])


def test_the_empty_node_is_a_node(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower, with_nodes=True)
    follower.take()
    stage.append("t", records(1, node=""))
    stage.tails.push()
    [(piece, _)] = follower.pieces()
    assert piece.nodes == [""]


def test_a_topic_that_opts_out_of_the_filter_names_no_origins(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1), config=TopicConfig(dedupe_node=False))
    stage.follow(follower, with_nodes=True)
    follower.take()
    stage.append("t", records(1, node="a"))
    stage.tails.push()
    [(piece, found)] = follower.pieces()
    assert (piece.nodes, found) == (None, [2])


def test_nothing_is_pushed_before_its_class_lets_it_be_read(stage: Stage) -> None:
    follower = Follower()
    stage.shard.put("t", TopicConfig(durability="fsync", durable=True))
    stage.follow(follower)
    follower.take()
    stage.shard.send_append("t", records(1))
    stage.shard.engine.commit.write()
    stage.tails.push()
    assert follower.take() == []
    stage.shard.settle()
    stage.tails.push()
    assert [found for _, found in follower.pieces()] == [[1]]


def test_deleted_records_are_passed_over(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower)
    follower.take()
    stage.append("t", records(3, tag="gone"))
    stage.shard.delete("t", tag="gone")
    stage.tails.push()
    [(piece, found)] = follower.pieces()
    assert (piece.from_seq, piece.to_seq, piece.gap, found) == (1, 4, None, [])


def test_what_was_lost_before_it_was_pushed_is_a_gap(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(2), config=TopicConfig(cap_records=3))
    stage.follow(follower)
    follower.take()
    stage.append("t", records(3))
    stage.append("t", records(2))
    stage.tails.push()
    [(piece, found)] = follower.pieces()
    assert piece.gap == messages.Gap(3, 4, "cap", 5)
    assert (piece.from_seq, piece.to_seq, found) == (4, 7, [5, 6, 7])


def test_no_push_goes_across_a_hole(stage: Stage) -> None:
    """Records that went with a process lie between others: each side of them is a push of its own."""
    stage.append("t", records(2))
    stage.shard.put("t", TopicConfig(durability="ephemeral"))
    stage.append("t", records(3))
    stage.shard.put("t", TopicConfig())
    stage.append("t", records(2))
    stage.shard.restart()
    follower = Follower()
    stage.follow(follower, from_seq=0)
    stage.tails.push()
    pushed = follower.pieces()
    assert [(piece.gap and (piece.gap.gap_from, piece.gap.gap_to), found) for piece, found in pushed] == [
        (None, [1, 2]),
        ((3, 5), [6, 7]),
    ]
    assert pushed[-1][0].to_seq == stage.topic().head_seq


# --- the pace ------------------------------------------------------------------------------------------


def test_the_next_push_waits_until_the_last_one_was_taken_and_grows_meanwhile(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower)
    follower.take()
    stage.append("t", records(1))
    stage.tails.push()
    for _ in range(3):
        stage.append("t", records(2))
        stage.tails.push()
        assert not stage.tails.can_push()
    assert follower.asked >= 3  # for a wake-up
    assert [found for _, found in follower.pieces()] == [[2]]
    assert stage.tails.can_push()
    stage.tails.push()
    assert [found for _, found in follower.pieces()] == [[3, 4, 5, 6, 7, 8]]
    assert not stage.tails.can_push()  # nothing is behind


def test_a_slow_follower_holds_up_nobody_else(stage: Stage) -> None:
    slow, quick = Follower(), Follower()
    stage.append("t", records(1))
    stage.follow(slow)
    stage.follow(quick)
    slow.take(), quick.take()
    for _ in range(4):
        stage.append("t", records(1))
        stage.tails.push()
        assert len(quick.take()) == 1
    assert len(slow.take()) == 1


def test_a_full_outbox_holds_back(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower)
    follower.take()
    stage.append("t", records(1))
    follower.outbox_bytes = limits.PUSH_BYTES + 1
    stage.tails.push()
    assert follower.take() == []
    assert not stage.tails.can_push()
    follower.outbox_bytes = 0
    assert stage.tails.can_push()
    stage.tails.push()
    assert len(follower.take()) == 1


def test_limit_cuts_a_round_into_pushes(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower, limit=2)
    follower.take()
    stage.append("t", records(5))
    stage.tails.push()
    pushed = follower.pieces()
    assert [found for _, found in pushed] == [[2, 3], [4, 5], [6]]
    assert [(piece.from_seq, piece.to_seq, piece.head_seq) for piece, _ in pushed] == [(1, 3, 6), (3, 5, 6), (5, 6, 6)]


def test_a_round_sends_a_follower_only_so_much(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PUSH_BYTES", 300)
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower, limit=1)
    follower.take()
    stage.append("t", records(12))
    got: list[int] = []
    rounds = 0
    while len(got) < 12:
        stage.tails.push()
        pushed = [seq for _, found in follower.pieces() for seq in found]
        assert 0 < len(pushed) < 12
        got += pushed
        rounds += 1
    assert got == list(range(2, 14))
    assert rounds > 2


def test_topics_take_turns(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is written faster than it is pushed does not keep the others waiting."""
    monkeypatch.setattr(limits, "PUSH_BYTES", 500)
    follower = Follower()
    for topic in ("busy", "quiet"):
        stage.append(topic, records(1))
    busy = stage.follow(follower, "busy", limit=1)
    quiet = stage.follow(follower, "quiet", limit=1)
    follower.take()
    stage.append("busy", records(30))
    stage.append("quiet", records(1))
    for _ in range(2):
        stage.append("busy", records(30))
        stage.tails.push()
        known = {correlation for _, correlation, _, _ in follower.take()}
        if quiet in known:
            break
    assert known == {busy, quiet}


# --- ends ----------------------------------------------------------------------------------------------


def test_unfollow(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    first, second = stage.follow(follower), stage.follow(follower)
    follower.take()
    stage.append("t", records(1))
    stage.send(Op.UNFOLLOW, follower, Unfollow(), correlation=first)
    stage.tails.push()
    assert [known for _, known, _, _ in follower.take()] == [second]
    stage.send(Op.UNFOLLOW, follower, Unfollow(), correlation=second)
    assert len(stage.tails) == 0
    stage.append("t", records(1))
    stage.tails.push()
    assert follower.take() == []


def test_nothing_to_unfollow(stage: Stage) -> None:
    one, two = Follower(), Follower()
    stage.append("t", records(1))
    correlation = stage.follow(one)
    for follower, number in ((two, correlation), (one, correlation + 1)):
        stage.send(Op.UNFOLLOW, follower, Unfollow(), correlation=number)
    assert len(stage.tails) == 1
    assert two.take() == []


def test_correlations_belong_to_their_followers(stage: Stage) -> None:
    one, two = Follower(), Follower()
    stage.append("a", records(1))
    stage.append("b", records(1))
    stage.follow(one, "a", correlation=5)
    stage.follow(two, "b", correlation=5)
    one.take(), two.take()
    stage.tails.follower_gone(one)
    assert len(stage.tails) == 1
    for topic in "ab":
        stage.append(topic, records(1))
    stage.tails.push()
    assert one.take() == []
    assert len(two.take()) == 1


def test_a_follower_dies_with_all_it_followed(stage: Stage) -> None:
    one, two = Follower(), Follower()
    for topic in "ab":
        stage.append(topic, records(1))
        stage.follow(one, topic)
    stage.follow(two, "a")
    stage.append("a", records(1))
    one.take(), two.take()
    stage.shard.engine.caller_gone(one)
    stage.shard.engine.caller_gone(one)
    assert len(stage.tails) == 1
    stage.tails.push()
    assert one.take() == []
    assert [found for _, found in two.pieces()] == [[2]]


def test_a_dropped_topic_ends_its_tails(stage: Stage) -> None:
    one, two = Follower(), Follower()
    for topic in "ab":
        stage.append(topic, records(3))
    gone = stage.follow(one, "a")
    stage.follow(one, "b")
    other = stage.follow(two, "a")
    one.take(), two.take()
    stage.append("a", records(1))
    stage.shard.drop("a")
    assert one.take() == [(Op.TOPIC_GONE, gone, messages.TopicGone(4), b"")]
    assert two.take() == [(Op.TOPIC_GONE, other, messages.TopicGone(4), b"")]
    assert len(stage.tails) == 1
    stage.append("a", records(1))  # another topic
    stage.append("b", records(1))
    stage.tails.push()
    assert [found for _, found in one.pieces()] == [[4]]
    assert two.take() == []
    stage.send(Op.UNFOLLOW, one, Unfollow(), correlation=gone)
    stage.shard.engine.caller_gone(two)


def test_damage_is_told_and_ends_one_tail_only(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cache_bytes=0)
    follower = Follower()
    for topic in ("bad", "good"):
        stage.append(topic, [Record(b'"' + b"x" * 100 + b'"')])
    row = stage.topic("bad").rows.back()
    row.body = row.rendered = None
    os.pwrite(row.source.fd, b"ZZZZ", row.offset + row.length - 60)
    bad = stage.follow(follower, "bad", from_seq=0)
    good = stage.follow(follower, "good", from_seq=0)
    follower.take()
    stage.tails.push()
    told = {correlation: (op, answer) for op, correlation, answer, _ in follower.take()}
    assert told[bad][0] == Op.TAIL
    assert told[bad][1].code == "internal"
    assert isinstance(told[good][1], Piece)
    assert len(stage.tails) == 1
    stage.append("good", records(1))
    stage.tails.push()
    assert [known for _, known, _, _ in follower.take()] == [good]


# --- a read that reaches the head ----------------------------------------------------------------------


def test_pushes_up_to_the_head_come_before_the_answer_of_a_read_that_reached_it(stage: Stage) -> None:
    one, two = Follower(), Follower()
    stage.append("t", records(2))
    plain, tagged = stage.follow(one), stage.follow(one, include_tags=True)
    stage.follow(two)
    one.take(), two.take()
    stage.append("t", records(3))
    reader = stage.send(Op.READ, one, read_of("t", 0))
    answered = one.take()
    assert [(op, known) for op, known, _, _ in answered] == [(Op.TAIL, plain), (Op.TAIL, tagged), (Op.READ, reader)]
    assert {piece.to_seq for _, _, piece, _ in answered} == {5}
    assert two.take() == []  # its tail is another link's
    stage.tails.push()
    assert one.take() == []
    assert [found for _, found in two.pieces()] == [[3, 4, 5]]


def test_a_read_that_does_not_reach_the_head_moves_no_tail(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(2))
    stage.follow(follower)
    follower.take()
    stage.append("t", records(3))
    stage.send(Op.READ, follower, read_of("t", 0, limit=4))
    assert [op for op, _, _, _ in follower.take()] == [Op.READ]


def test_a_tail_far_behind_catches_up_by_itself(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    correlation = stage.follow(follower, limit=1)
    follower.take()
    stage.append("t", records(40))
    stage.send(Op.READ, follower, read_of("t", 0))
    *pushed, (op, _, piece, _) = follower.take()
    assert (op, piece.to_seq) == (Op.READ, 41)
    assert 0 < len(pushed) < 40
    reached = pushed[-1][2].to_seq
    stage.tails.push()
    left = follower.pieces(correlation)
    assert [found for _, found in left] == [[seq] for seq in range(reached + 1, 42)]


def test_a_full_outbox_is_not_filled_by_a_read(stage: Stage) -> None:
    follower = Follower()
    stage.append("t", records(1))
    stage.follow(follower)
    follower.take()
    stage.append("t", records(1))
    follower.outbox_bytes = limits.PUSH_BYTES + 1
    stage.send(Op.READ, follower, read_of("t", 0))
    assert [op for op, _, _, _ in follower.take()] == [Op.READ]
    follower.outbox_bytes = 0
    stage.tails.push()
    assert [found for _, found in follower.pieces()] == [[2]]


def test_a_damaged_tail_does_not_spoil_another_s_read(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cache_bytes=0)
    follower = Follower()
    stage.append("t", [Record(b'"' + b"x" * 100 + b'"')])
    stage.append("t", records(2))
    row = stage.topic().rows.front()
    row.body = row.rendered = None
    os.pwrite(row.source.fd, b"ZZZZ", row.offset + row.length - 60)
    stage.follow(follower, from_seq=0)
    follower.take()
    piece, body = stage.ask(Op.READ, follower, read_of("t", 1))
    assert (piece.to_seq, seqs(body)) == (3, [2, 3])
    assert len(stage.tails) == 0


# --- over a real ring ----------------------------------------------------------------------------------


def test_over_a_ring_the_reader_s_drain_lets_the_next_push_go(stage: Stage) -> None:
    gateway_bell, shard_bell = Bell(), Bell()
    gateway, shard = join(gateway_bell, shard_bell)
    stage.append("t", records(1))
    stage.follow(shard.writer)
    stage.append("t", records(1))
    stage.tails.push()
    shard.flush()
    stage.append("t", records(1))
    assert not stage.tails.can_push()
    stage.tails.push()
    shard.flush()
    assert not shard_bell.rung
    first = gateway.drain()
    assert shard_bell.rung  # it was asked to
    assert [message[0] for message in first] == [Op.FOLLOW, Op.TAIL]
    assert stage.tails.can_push()
    stage.tails.push()
    shard.flush()
    assert [message[0] for message in gateway.drain()] == [Op.TAIL]


def test_over_a_ring_the_rest_of_a_burst_follows_when_the_first_part_was_taken(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes to sleep with more to push has asked to be woken."""
    monkeypatch.setattr(limits, "PUSH_BYTES", 100)
    gateway_bell, shard_bell = Bell(), Bell()
    gateway, shard = join(gateway_bell, shard_bell)
    stage.append("t", records(1))
    stage.follow(shard.writer, limit=1)
    stage.append("t", records(8))
    got: list[int] = []
    for _ in range(20):
        stage.tails.push()
        shard.flush()
        shard_bell.rung = False
        asleep = not stage.tails.can_push()  # the last look before it sleeps
        for message in gateway.drain():
            if message[0] == Op.TAIL:
                got += seqs(bytes(messages.decode_answer(message)[1]))
        if got == list(range(2, 10)):
            break
        assert not asleep or shard_bell.rung, f"asleep for good with {got}"
    assert got == list(range(2, 10))


@examples(60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 6)),
            st.tuples(st.just("push"), st.just(0)),
            st.tuples(st.just("take"), st.integers(0, 2)),
            st.tuples(st.just("read"), st.integers(0, 9)),
            st.tuples(st.just("follow"), st.integers(1, 4)),
        ),
        max_size=40,
    ),
    push_bytes=st.sampled_from([100, 400, 10_000]),
)
def test_pushes_are_a_topic_in_order_without_gap_or_repetition(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], push_bytes: int
) -> None:
    """And a reader whose answer reached the head stands where every tail that was aligned stands."""
    usual = limits.PUSH_BYTES
    limits.PUSH_BYTES = push_bytes
    try:
        stage = Stage(tmp_path_factory.mktemp("tails"))
        stage.append("t", records(1))
        followers = [Follower() for _ in range(3)]
        at: dict[tuple[int, int], int] = {}

        def take(which: int) -> None:
            for op, correlation, answer, body in followers[which].take():
                if op == Op.FOLLOW:
                    at[which, correlation] = answer.at
                elif op == Op.TAIL:
                    assert answer.from_seq == at[which, correlation]
                    assert seqs(body) == list(range(answer.from_seq + 1, answer.to_seq + 1))
                    at[which, correlation] = answer.to_seq

        for step, number in steps:
            which = number % 3
            if step == "append":
                stage.append("t", records(number))
            elif step == "push":
                stage.tails.push()
            elif step == "take":
                take(which)
            elif step == "read":
                stage.send(Op.READ, followers[which], read_of("t", number))
            else:
                stage.follow(followers[which], limit=number)
        for _ in range(200):
            for which in range(3):
                take(which)
            if not stage.tails.can_push():
                break
            stage.tails.push()
        assert set(at.values()) <= {stage.topic().head_seq}
        assert len(at) == len(stage.tails)
    finally:
        limits.PUSH_BYTES = usual
        stage.shard.crash()
