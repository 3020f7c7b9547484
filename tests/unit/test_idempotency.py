from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.walshard.topic.idempotency import IdempotencyKeys, Remembered


def test_found_within_its_window_and_not_a_moment_longer() -> None:
    keys = IdempotencyKeys()
    keys.remember("k", Remembered(5, 2, 1_000))
    assert keys.find("k", now_ms=1_000, window_ms=100) == Remembered(5, 2, 1_000)
    assert keys.find("k", now_ms=1_100, window_ms=100) == Remembered(5, 2, 1_000)
    assert keys.find("k", now_ms=1_101, window_ms=100) is None
    assert keys.find("other", now_ms=1_000, window_ms=100) is None


def test_a_key_used_again_after_its_window_is_the_newest() -> None:
    keys = IdempotencyKeys()
    keys.remember("k", Remembered(1, 1, 0))
    keys.remember("l", Remembered(2, 1, 50))
    keys.remember("k", Remembered(3, 1, 200))
    assert [key for key, _ in keys] == ["l", "k"]
    keys.expire(now_ms=200, window_ms=100)
    assert [key for key, _ in keys] == ["k"]


def test_forgotten_as_if_never_seen() -> None:
    keys = IdempotencyKeys()
    keys.remember("k", Remembered(1, 1, 0))
    keys.forget("k")
    keys.forget("never there")
    assert "k" not in keys
    assert len(keys) == 0


@examples(100)
@given(
    steps=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30)), max_size=40),
    window_ms=st.integers(0, 60),
)
def test_expiry_takes_exactly_what_find_would_not_find(steps: list[tuple[str, int]], window_ms: int) -> None:
    keys = IdempotencyKeys()
    model: dict[str, Remembered] = {}
    now = 0
    for number, (key, later) in enumerate(steps):
        now += later
        kept = Remembered(number, 1, now)
        keys.remember(key, kept)
        model[key] = kept
        keys.expire(now_ms=now, window_ms=window_ms)
        model = {key: kept for key, kept in model.items() if now - kept.ts <= window_ms}
        assert dict(keys) == model
        for key in "abcdef":
            assert keys.find(key, now_ms=now, window_ms=window_ms) == model.get(key)
