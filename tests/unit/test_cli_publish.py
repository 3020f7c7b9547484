"""The last line of `topics publish`."""

from __future__ import annotations

import re

import pytest

from topics.cli.client.publish import Tally
from topics.client import Receipt


def tally(*batches: tuple[int, int], unsure: int = 0) -> Tally:
    found = Tally("jobs")
    for first, last in batches:
        found.add(
            Receipt(
                topic="jobs",
                first_seq=first,
                last_seq=last,
                head_seq=last,
                count=last - first + 1,
                created=False,
                deduped=False,
            )
        )
    found.unsure = unsure
    return found


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (tally((1, 12_345)), 0, r"published 12,345 records to jobs \(seq 1\.\.12345\) in \d+\.\d s"),
        (tally((5, 9), (10, 14)), 0, r"published 10 records to jobs \(seq 5\.\.14\) in \d+\.\d s"),
        (tally((7, 7)), 0, r"published 1 record to jobs \(seq 7\) in \d+\.\d s"),
        (tally(), 0, r"published 0 records to jobs in \d+\.\d s"),
        (tally((1, 16)), 1, r"published 16 records to jobs \(seq 1\.\.16\) before that"),
        (tally((1, 2)), 130, r"published 2 records to jobs \(seq 1\.\.2\) before it was interrupted"),
        (tally(), 1, "nothing was published"),
        (tally(unsure=1), 1, "published 0 records to jobs before that; 1 record more may have been"),
        (tally((1, 2), unsure=500), 1, r"published 2 .* before that; 500 records more may have been"),
    ],
)
def test_the_last_line(found: Tally, code: int, words: str) -> None:
    assert re.fullmatch(words, found.words(code))
