"""HTTP/1.1, byte by byte: mutated requests to every endpoint, with keys and without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e.h2wire import H2Wire
from e2e.wire import Wire, request

from .dials import batches, cases_of, dice, time_limit_s
from .http1 import ENDPOINTS, bombs, case, on_a_foreign_page
from .player import Outcome
from .scene import FULL, PATIENT, scene
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


@pytest.mark.timeout(time_limit_s())
def test_every_bomb_at_every_route(tmp_path: Path) -> None:
    """Of every route that takes a body, in both lanes; with the dice above, some route would be left out."""
    routes = sorted({(method, path.replace("{t}", "log")) for method, path, body, _ in ENDPOINTS if body is not None})
    assert len(routes) >= 12
    gzipped = (("content-encoding", "gzip"), ("content-type", "application/json"), ("authorization", f"Bearer {FULL}"))
    with scene(tmp_path, "bombs", keys=True, **PATIENT) as stage:
        stage.furnish()
        with Wire(stage.server.port) as wire, H2Wire(stage.server.port) as framed:
            for method, path in routes:
                for body in bombs():
                    lines = tuple(f"{name}: {value}" for name, value in gzipped if name != "content-type")
                    answer = wire.ask(request(method, path, body, headers=lines))
                    stream = framed.open(method, path, *gzipped)
                    framed.send(stream, body, end=True)
                    statuses = {answer.status, int(framed.finish(stream).headers[":status"])}
                    assert statuses <= {400, 413}, (method, path, body[:20], statuses)
        stage.finish()
