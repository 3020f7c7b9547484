"""How much a run of the tests tries, and whether it tries something new: the variables that say so are read here alone.

TOPICS_TEST_EXHAUSTIVE    many more examples and rounds, each time new ones
TOPICS_TEST_GATE          of `make test`: half of the examples
TOPICS_TEST_SEED          another run than usual; "random": property tests draw a seed of their own

Of the first two, 0 is the same as nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def is_set(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(name, "") not in ("", "0")


EXHAUSTIVE = is_set("TOPICS_TEST_EXHAUSTIVE")
GATE = is_set("TOPICS_TEST_GATE")
SEED = os.environ.get("TOPICS_TEST_SEED") or None


def draws_anew(hypothesis_seed: str | None) -> bool:
    """Whether property tests draw other examples than in every usual run: by that seed, or by one of their own."""
    return EXHAUSTIVE or SEED is not None or hypothesis_seed is not None
