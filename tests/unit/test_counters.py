from __future__ import annotations

import pytest

from topics.errors import TopicsError
from topics.shm import counters
from topics.shm.counters import KEPT, ROW_BYTES, ROW_WORDS, SYNC_BUCKET_US, TABLE, Board, State, Word, sync_bucket
from topics.shm.region import Region


def test_table_names_every_word_once_and_none_overlap() -> None:
    positions = {name.lower(): value for name, value in vars(Word).items() if name.isupper()}
    assert {info.name: info.index for info in TABLE} == positions
    taken: set[int] = set()
    for info in TABLE:
        span = set(range(info.index, info.index + info.width))
        assert not span & taken, info.name
        taken |= span
        assert info.meaning
    assert max(taken) == ROW_WORDS - 1


def test_rows_are_found_by_name_and_apart() -> None:
    board = Board.create(["supervisor", "gateway-0", "shard-0"])
    assert [row.name for row in board.rows()] == ["supervisor", "gateway-0", "shard-0"]
    board.row("gateway-0").add(Word.REQUESTS, 3)
    board.row("gateway-0").add(Word.REQUESTS)
    assert board.row("gateway-0")[Word.REQUESTS] == 4
    assert board.row("shard-0")[Word.REQUESTS] == 0
    board.close()


def test_another_mapping_sees_the_same_words_and_may_be_read_only() -> None:
    board = Board.create(["shard-0"])
    other = Board.attach(_duplicate(board), board.region.size, writable=False)
    board.row("shard-0").set(Word.STATE, State.RECOVERING)
    board.words[board.sleeping_index("shard-0")] = 1
    assert other.row("shard-0").state is State.RECOVERING
    assert other.row("shard-0")[Word.SLEEPING] == 1
    with pytest.raises(TypeError):
        other.row("shard-0").set(Word.PID, 1)
    other.close()
    board.close()


def test_clear_keeps_the_name_and_what_outlives_a_process() -> None:
    board = Board.create(["a", "b"])
    for word in range(Word.NAME):
        board.row("a").set(word, 7)
        board.row("b").set(word, 7)
    board.row("a").clear()
    again = Board.attach(_duplicate(board), board.region.size)
    assert again.row("a").words[: Word.NAME].tolist() == [7 if word in KEPT else 0 for word in range(Word.NAME)]
    assert again.row("b").words[: Word.NAME].tolist() == [7] * Word.NAME
    again.close()
    board.close()


def test_high_water_only_rises() -> None:
    board = Board.create(["a"])
    row = board.row("a")
    for value in (5, 9, 3):
        row.raise_to(Word.RING_HIGH_WATER, value)
    assert row[Word.RING_HIGH_WATER] == 9
    board.close()


def test_a_gauge_goes_down_but_not_below_zero() -> None:
    board = Board.create(["a"])
    row = board.row("a")
    row.add(Word.CONNECTIONS, 2)
    row.add(Word.CONNECTIONS, -2)
    with pytest.raises(ValueError, match=r"format|range|int"):
        row.add(Word.CONNECTIONS, -1)
    board.close()


@pytest.mark.parametrize("names", [["a", "a"], [""], ["x" * 33]])
def test_names_that_do_not_fit_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="names"):
        Board.create(names)


def test_longest_name_fits() -> None:
    board = Board.create(["x" * 32])
    assert board.rows()[0].name == "x" * 32
    board.close()


def test_foreign_and_newer_memory_is_refused() -> None:
    region = Region.create(ROW_BYTES)
    with pytest.raises(TopicsError, match="not a counter board"):
        Board(region)
    with region.view.cast("Q") as words:
        words[0] = counters.MAGIC
        words[1] = counters.BOARD_VERSION + 1
    with pytest.raises(TopicsError, match="version"):
        Board(region)


def test_sync_buckets_hold_what_their_bounds_say() -> None:
    for number, bound in enumerate(SYNC_BUCKET_US):
        assert sync_bucket(bound) == number
        assert sync_bucket(bound + 1) == number + 1
    assert SYNC_BUCKET_US[:6] == (50, 100, 250, 500, 1_000, 2_500)
    assert SYNC_BUCKET_US[-1] == 2_500_000
    assert len(SYNC_BUCKET_US) == counters.SYNC_BUCKET_COUNT - 1, "the last has no bound"
    assert sync_bucket(0) == 0
    assert sync_bucket(10**12) == counters.SYNC_BUCKET_COUNT - 1


def _duplicate(board: Board) -> int:
    import os

    return os.dup(board.region.fd)
