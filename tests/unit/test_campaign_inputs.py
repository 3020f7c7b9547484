"""The campaign of hostile inputs finds a decoder that answers with what would be a 500."""

from __future__ import annotations

import random
import time

import pytest
from campaigns import inputs
from campaigns.inputs import KINDS

from topics.errors import ApiError


@pytest.mark.parametrize("name", [*KINDS])
def test_every_kind_passes(name: str) -> None:
    tally = inputs.run(1, inputs=300, kinds={name: KINDS[name]})
    assert not tally.findings, tally.findings[0].what
    assert tally.counts["inputs"] == tally.counts[f"pure_{name}"] == 300


def breaks(error: Exception) -> inputs.Maker:
    def make(dice: random.Random) -> tuple[bytes, object]:
        text = b"%d" % dice.randrange(50)

        def take() -> object:
            if text == b"7":
                raise error
            return text

        return text, take

    return make  # type: ignore[return-value]


@pytest.mark.parametrize(
    "error", [KeyError("seq"), UnicodeDecodeError("utf-8", b"", 0, 1, ""), ApiError("internal", "oh")]
)
def test_an_exception_that_no_client_may_see_is_found(error: Exception) -> None:
    found = inputs.run(1, inputs=300, kinds={"planted": (breaks(error), 1)}).findings
    assert found
    again = inputs.run(1, found[0].only, inputs=300, kinds={"planted": (breaks(error), 1)})
    assert again.findings == [found[0]]
    assert again.counts["inputs"] == 1


def test_a_refusal_is_none() -> None:
    assert not inputs.run(1, inputs=300, kinds={"fine": (breaks(ApiError("invalid_request", "no")), 1)}).findings


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "SLOW_S", 0.01)
    found = inputs.run(1, inputs=1, kinds={"slow": (lambda dice: (b"", lambda: spin(0.02)), 1)}).findings
    assert "took" in found[0].what
