"""Jobs that are done a slice at a time: in order, and let go of when their askers are gone."""

from __future__ import annotations

import pytest

from topics.gateway.large.slices import Job, Slices


class Work:
    """So many slices."""

    def __init__(self, asker: object, slices: int, done: list[object]) -> None:
        self.asker = asker
        self._left = slices
        self._done = done
        self.dropped = False

    def step(self) -> bool:
        self._left -= 1
        if not self._left:
            self._done.append(self.asker)
        return not self._left

    def drop(self) -> None:
        self.dropped = True

    def abort(self) -> None: ...


def failed(job: Job, error: Exception) -> None:
    raise error


@pytest.fixture
def slices() -> Slices:
    return Slices(failed)


def test_jobs_are_done_in_the_order_in_which_they_came(slices: Slices) -> None:
    done: list[object] = []
    for asker in ("a", "b", "c"):
        slices.add(Work(asker, 3, done))
    rounds = 0
    while len(slices):
        slices.run(0)
        rounds += 1
    assert (done, rounds) == (["a", "b", "c"], 9)


def test_what_a_job_holds_is_let_go_of_with_its_asker(slices: Slices) -> None:
    """Its bytes are not counted any more, and the job before it may take long."""
    done: list[object] = []
    slices.add(Work("first", 100, done))
    waiting = Work("gone", 1, done)
    slices.add(waiting)
    slices.drop("gone")
    slices.drop("unknown")
    assert (waiting.dropped, len(slices)) == (True, 1)


def test_an_asker_may_leave_or_ask_again_while_its_job_is_done(slices: Slices) -> None:
    done: list[object] = []

    class Leaves(Work):
        def step(self) -> bool:
            slices.drop(self.asker)
            return super().step()

    class AsksAgain(Work):
        def step(self) -> bool:
            slices.add(Work(self.asker, 1, done))
            return super().step()

    slices.add(Leaves("leaves", 1, done))
    slices.add(AsksAgain("again", 1, done))
    slices.add(Work("other", 1, done))
    for _ in range(4):
        slices.run(0)
    assert done == ["leaves", "again", "other", "again"]
    assert not len(slices)
