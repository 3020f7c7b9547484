from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from model import examples

from topics.storage.format import DELETED
from topics.walshard.topic.index import Row, RowList


def row(first: int, count: int) -> Row:
    return Row(first, count, 0, 0, count, None, 0, 0, count, b"")


# --- one row ---


@examples(100)
@given(
    count=st.integers(1, 12),
    skip=st.integers(0, 12),
    deleted=st.sets(st.integers(0, 11)),
    start=st.integers(0, 12),
)
def test_live_is_neither_skipped_nor_deleted(count: int, skip: int, deleted: set[int], start: int) -> None:
    subject = row(100, count)
    subject.skip = min(skip, count)
    for index in deleted:
        if index < count:
            subject.mark_deleted(index)
    live = [index for index in range(count) if index >= skip and index not in deleted]
    assert [index for index in range(count) if subject.is_live(index)] == live
    assert list(subject.live_indexes()) == live
    assert list(subject.live_indexes(start)) == [index for index in live if index >= start]
    if live:
        assert subject.first_live() == 100 + live[0]


def test_only_one_value_of_a_flag_means_deleted() -> None:
    subject = row(1, 256)
    subject.flags = bytearray(range(256))
    assert [index for index in range(256) if not subject.is_live(index)] == [DELETED]


def test_a_row_is_its_first_seq_and_a_count() -> None:
    subject = row(7, 3)
    assert (subject.first, subject.last, subject.whole) == (7, 9, True)
    subject.live = 2
    assert not subject.whole


def test_rows_are_told_apart_by_what_they_are_and_not_by_what_they_hold() -> None:
    first, second = row(1, 1), row(1, 1)
    assert first != second
    assert len({first, second}) == 2


# --- many ---


class RowListMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rows = RowList()
        self.model: list[Row] = []
        self.next = 1

    @rule(count=st.integers(1, 4), gap=st.sampled_from([0, 0, 0, 3]), many=st.sampled_from([1, 1, 1, 600]))
    def append(self, count: int, gap: int, many: int) -> None:
        for _ in range(many):
            added = row(self.next + gap, count)
            self.rows.append(added)
            self.model.append(added)
            self.next = added.last + 1

    @precondition(lambda self: self.model)
    @rule(many=st.integers(1, 700))
    def pop_front(self, many: int) -> None:
        for _ in range(min(many, len(self.model))):
            assert self.rows.pop_front() is self.model.pop(0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """A run of neighbours becomes one row, of which the first ones may have gone already."""
        start = data.draw(st.integers(0, len(self.model) - 1))
        stop = data.draw(st.integers(start + 1, min(len(self.model), start + 5)))
        old = self.model[start:stop]
        gone = [row(0, 1)] if data.draw(st.booleans()) and start == 0 else []
        new = [row(old[0].first, old[-1].last - old[0].first + 1)] if data.draw(st.booleans()) else []
        self.rows.replace(gone + old, new)
        self.model[start:stop] = new

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        for one in self.model[:: data.draw(st.integers(2, 5))]:
            one.live = 0
        self.rows.compact()
        self.model = [one for one in self.model if one.live]

    @invariant()
    def same(self) -> None:
        assert len(self.rows) == len(self.model)
        assert self.rows.front() is (self.model[0] if self.model else None)
        assert self.rows.back() is (self.model[-1] if self.model else None)
        assert all(one is other for one, other in zip(self.rows, self.model, strict=True))
        seqs = {0, 1, self.next, self.next + 5}
        for one in (*self.model[:3], *self.model[-3:]):
            seqs |= {one.first - 1, one.first, one.last, one.last + 1}
        for seq in seqs:
            holder = next((one for one in self.model if one.first <= seq <= one.last), None)
            assert self.rows.find(seq) is holder
            following = [one for one in self.model if one.last >= seq]
            found = list(self.rows.since(self.rows.position(seq)))
            assert len(found) == len(following)
            assert all(one is other for one, other in zip(found, following, strict=True))


def test_a_list_of_rows() -> None:
    run_state_machine_as_test(RowListMachine, settings=examples(40, stateful_step_count=20))
