"""Limits on topics and bytes that shards hold together: exact, whoever races, whoever is being restarted.

Each racer is a real process on a real board. What is certainly there is counted under a lock: from after a claim that
was granted until before it is given back. So a count above the limit is a fault, whatever the timing was.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import examples

from topics.errors import ApiError
from topics.settings import Settings
from topics.shm.counters import Board, Row, State, Word
from topics.walshard.quota import Quota

FORK = multiprocessing.get_context("fork")  # children inherit the mapping


def settings(**limits: int) -> Settings:
    return Settings(**limits)  # type: ignore[arg-type]


def make_board(shards: int, state: State = State.READY) -> Board:
    board = Board.create([f"shard-{number}" for number in range(shards)])
    for row in board.rows():
        row.set(Word.STATE, state)
        row.set(Word.TOTALS_KNOWN, int(state is State.READY))
    return board


@pytest.fixture
def board() -> Iterator[Board]:
    made = make_board(3)
    yield made
    made.close()


def quota_of(board: Board, shard: int, **limits: int) -> Quota:
    rows = board.rows()
    return Quota(settings(**limits), rows[shard], [row for row in rows if row is not rows[shard]])


def refusal(quota: Quota, topics: int, size: int, *, new_topic: bool = False, more: int = 0) -> ApiError | None:
    try:
        quota.claim(topics, size, new_topic=new_topic, more=more)
    except ApiError as error:
        return error
    return None


def held(row: Row) -> tuple[int, int]:
    return row[Word.CLAIMED_TOPICS], row[Word.CLAIMED_BYTES]


# --- one shard ---------------------------------------------------------------------------------------


def test_a_shard_by_itself() -> None:
    quota = Quota(settings(max_topics=2, max_total_bytes=100))
    assert refusal(quota, 1, 0, new_topic=True) is None
    assert refusal(quota, 1, 60, more=40) is None
    quota.publish(2, 100)  # without a row there is nobody to tell


@pytest.mark.parametrize(
    ("limit", "claim", "most"),
    [
        ("max_topics", {"topics": 5, "size": 0, "new_topic": True}, 5),
        ("max_total_bytes", {"topics": 0, "size": 96, "more": 5}, 100),
    ],
)
def test_the_refusal_names_the_limit(limit: str, claim: dict[str, Any], most: int) -> None:
    error = refusal(Quota(settings(max_topics=5, max_total_bytes=100)), **claim)
    assert error is not None
    assert (error.code, error.status) == ("throttled", 429)
    assert error.detail == {"limit": limit, "max": most}
    assert error.retry_after_s is not None


def test_exactly_as_much_as_is_allowed(board: Board) -> None:
    quota = quota_of(board, 0, max_topics=5, max_total_bytes=100)
    assert refusal(quota, 4, 0, new_topic=True) is None
    assert refusal(quota, 5, 0, new_topic=True) is not None
    assert refusal(quota, 0, 99, more=1) is None
    assert refusal(quota, 0, 99, more=2) is not None
    assert refusal(quota, 0, 100, more=1) is not None


def test_no_limit_is_no_limit(board: Board) -> None:
    quota = quota_of(board, 0, max_topics=0, max_total_bytes=0)
    assert refusal(quota, 10**9, 10**15, new_topic=True, more=10**12) is None


def test_only_what_is_asked_for_is_looked_at(board: Board) -> None:
    quota = quota_of(board, 0, max_topics=1, max_total_bytes=10)
    assert refusal(quota, 7, 5, more=5) is None, "a write to a topic that exists does not care how many there are"
    assert refusal(quota, 0, 700, new_topic=True) is None, "an empty topic does not care how many bytes there are"
    assert refusal(quota, 7, 700) is None


def test_a_topic_and_bytes_at_once(board: Board) -> None:
    quota = quota_of(board, 0, max_topics=2, max_total_bytes=10)
    assert refusal(quota, 1, 5, new_topic=True, more=5) is None
    for topics, size, limit in ((2, 5, "max_topics"), (1, 6, "max_total_bytes")):
        error = refusal(quota, topics, size, new_topic=True, more=5)
        assert error is not None
        assert (error.detail or {})["limit"] == limit


# --- several -----------------------------------------------------------------------------------------


def test_what_the_others_hold_counts(board: Board) -> None:
    quotas = [quota_of(board, shard, max_topics=10, max_total_bytes=100) for shard in range(3)]
    quotas[1].publish(4, 30)
    quotas[2].publish(5, 60)
    assert refusal(quotas[0], 0, 0, new_topic=True) is None
    assert refusal(quotas[0], 1, 0, new_topic=True) is not None
    assert refusal(quotas[0], 0, 0, more=10) is None
    assert refusal(quotas[0], 0, 0, more=11) is not None


def test_a_claim_is_written_down_before_it_is_used(board: Board) -> None:
    quota = quota_of(board, 0, max_topics=10, max_total_bytes=100)
    assert refusal(quota, 3, 20, new_topic=True, more=5) is None
    assert held(board.rows()[0]) == (4, 25)
    other = quota_of(board, 1, max_topics=10, max_total_bytes=100)
    assert refusal(other, 0, 0, more=76) is not None


def test_a_refused_claim_leaves_nothing_behind(board: Board) -> None:
    quota = quota_of(board, 0, max_topics=3, max_total_bytes=100)
    assert refusal(quota, 3, 20, new_topic=True, more=5) is not None
    assert held(board.rows()[0]) == (3, 20)


def test_what_is_being_restarted_still_holds_what_it_held(board: Board) -> None:
    row = board.rows()[1]
    quota_of(board, 1).publish(9, 90)
    row.clear()
    for state in (State.STARTING, State.RECOVERING, State.BACKOFF, State.FAILED):
        row.set(Word.STATE, state)
        quota = quota_of(board, 0, max_topics=10, max_total_bytes=100)
        assert refusal(quota, 0, 0, new_topic=True, more=10) is None
        assert refusal(quota, 1, 0, new_topic=True) is not None
        assert refusal(quota, 0, 0, more=11) is not None


@pytest.mark.parametrize("state", [State.EMPTY, State.STARTING, State.RECOVERING, State.BACKOFF])
def test_one_that_has_never_said_what_it_holds_is_waited_for(state: State) -> None:
    board = make_board(2)
    row = board.rows()[1]
    row.set(Word.STATE, state)
    row.set(Word.TOTALS_KNOWN, 0)
    quota = quota_of(board, 0, max_topics=10, max_total_bytes=100)
    for claim in ({"new_topic": True}, {"more": 1}):
        error = refusal(quota, 2, 20, **claim)
        assert error is not None
        assert (error.code, error.status) == ("not_ready", 503)
        assert error.retry_after_s is not None
        assert held(board.rows()[0]) == (2, 20)
    assert refusal(quota, 2, 20) is None
    quota_of(board, 1).publish(1, 10)
    assert refusal(quota, 2, 20, new_topic=True, more=1) is None
    board.close()


def test_one_that_will_never_say_it_is_not_waited_for() -> None:
    """It is not started again before an operator has looked; the others go on."""
    board = make_board(2)
    row = board.rows()[1]
    row.set(Word.STATE, State.FAILED)
    row.set(Word.TOTALS_KNOWN, 0)
    assert refusal(quota_of(board, 0, max_topics=10, max_total_bytes=100), 2, 20, new_topic=True, more=1) is None
    board.close()


@pytest.mark.parametrize("shard", [0, 1])
def test_while_copies_are_made_again_nobody_takes_their_room(shard: int) -> None:
    """How many bytes they will be is not known yet; topics are."""
    board = make_board(2)
    board.rows()[shard].set(Word.DERIVING, 1)
    quota = quota_of(board, 0, max_topics=10, max_total_bytes=100)
    error = refusal(quota, 2, 20, more=1)
    assert error is not None
    assert (error.code, error.status) == ("not_ready", 503)
    assert error.retry_after_s is not None
    assert held(board.rows()[0]) == (2, 20)
    assert refusal(quota, 2, 20, new_topic=True) is None
    assert refusal(quota_of(board, 0, max_topics=10), 2, 20, new_topic=True, more=1) is None, "without a limit, no room"
    board.rows()[shard].set(Word.DERIVING, 0)
    assert refusal(quota, 2, 20, more=1) is None
    board.close()


# --- races -------------------------------------------------------------------------------------------


def race(
    board: Board, shard: int, most: dict[str, int], rounds: int, lock: Any, there: Any, go: Any, results: Any
) -> None:
    """One shard: it claims, sometimes keeps and sometimes gives back, and counts what it certainly has."""
    quota = quota_of(board, shard, **most)
    mine = granted = refused = over = 0
    go.wait(30)
    for number in range(rounds):
        if "max_topics" in most:
            error = refusal(quota, mine, 0, new_topic=True)
        else:
            error = refusal(quota, 0, mine, more=1)
        if error is None:
            granted += 1
            mine += 1
            with lock:
                there.value += 1
                over = max(over, there.value - next(iter(most.values())))
        else:
            refused += 1
        if mine and (error is not None or number % 3 == 0):
            with lock:
                there.value -= 1
            mine -= 1
            quota.publish(mine if "max_topics" in most else 0, mine if "max_total_bytes" in most else 0)
    results.put((shard, granted, refused, over, mine))


@pytest.mark.parametrize("limit", ["max_topics", "max_total_bytes"])
@pytest.mark.parametrize(("racers", "most"), [(2, 1), (3, 5)])
def test_racing_processes_never_have_more_together(limit: str, racers: int, most: int) -> None:
    board = make_board(racers)
    lock, there, go, results = FORK.Lock(), FORK.Value("q", 0, lock=False), FORK.Event(), FORK.Queue()
    children = [
        FORK.Process(target=race, args=(board, shard, {limit: most}, 20_000, lock, there, go, results), daemon=True)
        for shard in range(racers)
    ]
    for child in children:
        child.start()
    go.set()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert max(over for _, _, _, over, _ in found) <= 0, "more than allowed"
    assert sum(granted for _, granted, _, _, _ in found) > 50
    assert any(refused for _, _, refused, _, _ in found), f"it was no race: {found}"
    word = Word.CLAIMED_TOPICS if limit == "max_topics" else Word.CLAIMED_BYTES
    for shard, _, _, _, mine in found:
        assert board.rows()[shard][word] == mine
    board.close()


class Shards(RuleBasedStateMachine):
    """One after the other there is no edge: a claim is granted exactly if there is room for it."""

    MOST_TOPICS, MOST_BYTES = 6, 100

    @initialize()
    def begin(self) -> None:
        self.board = make_board(3)
        self.quotas = [
            quota_of(self.board, shard, max_topics=self.MOST_TOPICS, max_total_bytes=self.MOST_BYTES)
            for shard in range(3)
        ]
        self.topics, self.bytes = [0] * 3, [0] * 3

    @rule(shard=st.integers(0, 2), new_topic=st.booleans(), more=st.integers(0, 60))
    def claim(self, shard: int, new_topic: bool, more: int) -> None:
        error = refusal(self.quotas[shard], self.topics[shard], self.bytes[shard], new_topic=new_topic, more=more)
        fits = (not new_topic or sum(self.topics) < self.MOST_TOPICS) and (
            not more or sum(self.bytes) + more <= self.MOST_BYTES
        )
        assert (error is None) == fits, error
        if error is None:
            self.topics[shard] += new_topic
            self.bytes[shard] += more

    @rule(shard=st.integers(0, 2), topics=st.integers(0, 3), size=st.integers(0, 100))
    def remove(self, shard: int, topics: int, size: int) -> None:
        self.topics[shard] = max(self.topics[shard] - topics, 0)
        self.bytes[shard] = max(self.bytes[shard] - size, 0)
        self.quotas[shard].publish(self.topics[shard], self.bytes[shard])

    @rule(shard=st.integers(0, 2))
    def restart(self, shard: int) -> None:
        self.board.rows()[shard].clear()
        self.board.rows()[shard].set(Word.STATE, State.RECOVERING)

    @invariant()
    def the_board_says_what_is_there(self) -> None:
        if hasattr(self, "board"):
            assert [held(row) for row in self.board.rows()] == list(zip(self.topics, self.bytes, strict=True))
            assert sum(self.topics) <= self.MOST_TOPICS
            assert sum(self.bytes) <= self.MOST_BYTES

    def teardown(self) -> None:
        if hasattr(self, "board"):
            self.board.close()


TestShards: Any = Shards.TestCase
TestShards.settings = examples(40, stateful_step_count=40)
