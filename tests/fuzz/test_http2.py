"""HTTP/2, frame by frame, and a client that does nothing wrong in the middle of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.h2wire import H2Wire

from .dials import batches, cases_of, dice, time_limit_s
from .http2 import case
from .player import Outcome
from .scene import CANARY, HONEST, Scene, scene
from .verdict import read_h2, read_replies

pytestmark = pytest.mark.e2e

FAMILY = "http2"
CASES = cases_of(FAMILY)
BATCH = 120
WARM_UP = 0.3  # of all cases


def judge(outcome: Outcome) -> None:
    if outcome.left or not outcome.received:
        return
    if outcome.received.startswith(b"HTTP/1.1"):  # the preface was not one
        read_replies(outcome.received, clean=outcome.clean, may_be_bodiless=True)
    else:
        read_h2(outcome.received, clean=False)  # the client may have left in the middle of a frame


def append_honestly(stage: Scene) -> None:
    """Over HTTP/2 too."""
    case = stage.honest_case()
    text = f"honest {-case.number}"
    with H2Wire(stage.server.port) as wire:
        stream = wire.open(
            "POST",
            f"/v0/topics/{CANARY}",
            ("content-type", "application/json"),
            ("authorization", f"Bearer {HONEST}"),
        )
        wire.send(stream, json.dumps({"records": [{"data": text}]}).encode(), end=True)
        answer = json.loads(wire.finish(stream).body)
    stage.honest[answer["first_seq"]] = text


@pytest.mark.gate
@pytest.mark.timeout(time_limit_s())
def test_mutated_frames(tmp_path: Path) -> None:
    with scene(tmp_path, FAMILY, keys=True, TOPICS_LOG="debug") as stage:
        warm_at = int(CASES * WARM_UP)
        for batch in batches(CASES, BATCH):
            stage.furnish()
            wid = stage.open_session()
            stage.play([case(dice(FAMILY, number), number, wid) for number in batch], judge)
            append_honestly(stage)
            if batch.start <= warm_at < batch.stop:
                stage.warm()
        stage.finish()
