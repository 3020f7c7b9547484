"""How many cases a run has, and from which seed they grow.

TOPICS_FUZZ_CASES is the number of cases of the whole run, divided among the families; TOPICS_FUZZ_SEED makes a run
again, and TOPICS_FUZZ_CASE plays one case of it alone. A case is a function of seed, family and its number, so the case
that a failure names is the same one in a run of any size.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

DEFAULT_CASES = 16_000
CASES = int(os.environ.get("TOPICS_FUZZ_CASES") or DEFAULT_CASES)
_asked = os.environ.get("TOPICS_FUZZ_SEED") or "3788856066"  # the same in every usual run
SEED = random.SystemRandom().randrange(2**32) if _asked == "random" else int(_asked)
ONLY = os.environ.get("TOPICS_FUZZ_CASE")  # its number

# Out of 100. HTTP/2 has fewer: it is the slow lane, and a case of it costs as much as twenty others.
SHARES = {"http1": 38, "http2": 12, "websocket": 20, "bodies": 28, "values": 2}
assert sum(SHARES.values()) == 100


def cases_of(family: str) -> int:
    return max(CASES * SHARES[family] // 100, 1)


def dice(family: str, number: int) -> random.Random:
    """What decides about one case."""
    return random.Random(f"{SEED}/{family}/{number}")


def batches(count: int, size: int) -> Iterator[range]:
    if ONLY:
        yield range(int(ONLY), int(ONLY) + 1)
        return
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def time_limit_s() -> float:
    """For pytest: two minutes for a family, and more in runs that are longer than the usual one."""
    return 120.0 * max(CASES / DEFAULT_CASES, 1.0)
