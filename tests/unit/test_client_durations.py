"""Durations as people write them."""

from __future__ import annotations

import pytest

from topics.client.durations import parse_ms


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("250ms", 250),
        ("30s", 30_000),
        ("10m", 600_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("1w", 604_800_000),
        ("1h30m", 5_400_000),
        (" 1h 30m ", 5_400_000),
        ("1.5h", 5_400_000),
        ("0s", 0),
    ],
)
def test_durations(text: str, ms: int) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["", "10", "m", "10x", "-5m", "1h30", "1,5h", "5 minutes", "٣s", "1e3s", "NaNs"])
def test_what_is_none_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="30s, 10m, 2h") as caught:
        parse_ms(text)
    assert repr(text) in str(caught.value)
