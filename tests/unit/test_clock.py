"""The clock that never goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from model import Wall, examples


def test_follows_the_wall() -> None:
    wall = Wall()
    clock = wall.clock()
    assert clock.now_ms() == wall.wall_ms
    wall.pass_ms(123)
    assert clock.now_ms() == wall.wall_ms


def test_a_wall_set_back_is_not_followed() -> None:
    wall = Wall()
    clock = wall.clock()
    before = clock.now_ms()
    wall.set_back_ms(60_000)
    assert clock.now_ms() == before


def test_time_still_passes_at_half_speed_while_the_wall_is_behind() -> None:
    wall = Wall()
    clock = wall.clock()
    before = clock.now_ms()
    wall.set_back_ms(60_000)
    clock.now_ms()
    for _ in range(100):
        wall.pass_ms(10)
        clock.now_ms()
    assert before + 400 <= clock.now_ms() <= before + 500


def test_the_wall_catches_up_and_is_followed_again() -> None:
    wall = Wall()
    clock = wall.clock()
    clock.now_ms()
    wall.set_back_ms(1_000)
    clock.now_ms()
    wall.pass_ms(2_100)  # half of it brings us to +1050 of where the wall is at +1100
    assert clock.now_ms() == wall.wall_ms
    wall.pass_ms(5)
    assert clock.now_ms() == wall.wall_ms


def test_a_wrong_clock_that_was_set_right_is_forgotten() -> None:
    """A year ahead, then right: it takes a year to be right again, and time passes all the while."""
    wall = Wall()
    clock = wall.clock()
    wall.wall_ms += 365 * 86_400_000
    ahead = clock.now_ms()
    wall.wall_ms -= 365 * 86_400_000
    clock.now_ms()
    wall.pass_ms(3_600_000)
    assert ahead < clock.now_ms() < ahead + 3_600_000


def test_recovery_starts_it_from_what_is_on_disk() -> None:
    wall = Wall()
    clock = wall.clock()
    clock.at_least(wall.wall_ms + 500)
    assert clock.now_ms() == wall.wall_ms + 500
    wall.pass_ms(100)
    assert clock.now_ms() == wall.wall_ms - 100 + 500 + 50
    clock.at_least(5)
    assert clock.now_ms() > wall.wall_ms


def test_an_older_time_on_disk_changes_nothing() -> None:
    wall = Wall()
    clock = wall.clock()
    clock.at_least(5)
    assert clock.now_ms() == wall.wall_ms


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(0, 5_000)),
        st.tuples(st.just("jump"), st.integers(-100_000, 100_000)),
        st.tuples(st.just("least"), st.integers(-10_000, 10_000)),
        st.tuples(st.just("ask"), st.just(0)),
    ),
    max_size=40,
)


@examples(200)
@given(steps=STEPS)
def test_it_never_goes_back_never_stands_still_and_never_overtakes(steps: list[tuple[str, int]]) -> None:
    wall = Wall()
    clock = wall.clock()
    last = clock.now_ms()
    highest = wall.wall_ms  # of all that anybody claimed the time to be
    for step, ms in steps:
        if step == "pass":
            wall.pass_ms(ms)
            highest += ms
        elif step == "jump":
            wall.wall_ms += ms
        elif step == "least":
            clock.at_least(wall.wall_ms + ms)
            highest = max(highest, wall.wall_ms + ms)
        highest = max(highest, wall.wall_ms)
        now = clock.now_ms()
        assert now >= last
        assert now >= wall.wall_ms
        assert now <= highest
        if step == "pass" and ms >= 4 and now != wall.wall_ms:
            assert now > last, "time stood still"
        assert clock.now_ms() == now
        last = now
