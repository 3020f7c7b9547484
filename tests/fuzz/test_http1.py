"""HTTP/1.1, byte by byte: mutated requests to every endpoint, with keys and without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .dials import batches, cases_of, dice, time_limit_s
from .http1 import case, on_a_foreign_page
from .player import Outcome
from .scene import scene
from .verdict import Wrong, check_events, read_replies, read_socket

pytestmark = pytest.mark.e2e

FAMILY = "http1"
CASES = cases_of(FAMILY)
BATCH = 500
WARM_UP = 0.3  # of all cases
PROBE = re.compile(rb"(?:GET|HEAD) /(?:v0/)?(?:health|ready)z? ")


def judge(outcome: Outcome) -> None:
    if outcome.left:
        return
    sent = outcome.case.sent
    if outcome.received.startswith(b"\0\0") and b"PRI * HTTP/2" in sent:
        return  # it became HTTP/2: another family's
    replies, rest = read_replies(outcome.received, clean=outcome.clean, may_be_bodiless=b"HEAD" in sent)
    if outcome.case.label == on_a_foreign_page.__name__ and PROBE.match(sent) is None:
        for reply in replies:
            if reply.status < 400:
                raise Wrong(f"{reply.status} for a page that may not")
    if replies and replies[-1].is_stream:
        check_events(rest)
    elif rest:
        read_socket(rest)


@pytest.mark.gate
@pytest.mark.timeout(time_limit_s())
def test_mutated_requests(tmp_path: Path) -> None:
    with scene(tmp_path, FAMILY, keys=True) as stage:
        warm_at = int(CASES * WARM_UP)
        for batch in batches(CASES, BATCH):
            stage.furnish()
            wid = stage.open_session()
            stage.play([case(dice(FAMILY, number), number, wid) for number in batch], judge)
            if batch.start <= warm_at < batch.stop:
                stage.warm()
        stage.finish()
        stage.come_again()
