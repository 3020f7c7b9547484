"""WebSockets: openings that must not be, frames that must not be, and commands that are not what they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from .dials import batches, cases_of, dice, time_limit_s
from .handshakes import NEVER, Opening
from .player import Case, Outcome
from .scene import scene
from .verdict import Wrong, read_replies, read_socket
from .websocket import Commands, frames_case, whole_binary

pytestmark = pytest.mark.e2e

FAMILY = "websocket"
CASES = cases_of(FAMILY)
BATCH = 200
WARM_UP = 0.3  # of all cases


def judge_frames(outcome: Outcome) -> None:
    if outcome.left or not outcome.received:
        return
    replies, rest = read_replies(outcome.received, clean=False)
    if replies and replies[-1].status == 101:
        talk = read_socket(rest)
        if outcome.case.label == whole_binary.__name__:
            said = [message.get("code") for message in talk.messages]
            if (said, talk.close_code) != (["unsupported_message"], 1003):
                raise Wrong(f"a binary message got {said}, closed with {talk.close_code}")


def judge_commands(outcome: Outcome, said: Commands) -> None:
    replies, rest = read_replies(outcome.received, clean=False)
    if not replies or replies[-1].status != 101:
        raise Wrong(f"no socket was opened: {[reply.status for reply in replies]}")
    talk = read_socket(rest, clean=outcome.clean)
    if missing := said.missing(talk):
        raise Wrong(f"not answered: {sorted(missing)}, closed with {talk.close_code}")
    if done := said.wrongly_done(talk):
        raise Wrong(f"configured without the right to: {sorted(done)}")


@pytest.mark.gate
@pytest.mark.timeout(time_limit_s())
def test_mutated_frames_and_commands(tmp_path: Path) -> None:
    with scene(tmp_path, FAMILY, keys=True) as stage:
        warm_at = int(CASES * WARM_UP)
        for batch in batches(CASES, BATCH):
            stage.furnish()
            said: dict[int, Commands | Opening] = {}
            cases: list[Case] = []
            for number in batch:
                lot = dice(FAMILY, number)
                roll = lot.random()
                if roll < 0.4:
                    cases.append(frames_case(lot, number))
                elif roll < 0.8:
                    cases.append((commands := Commands(lot, number)).case(number))
                    said[number] = commands
                else:
                    cases.append((opening := Opening(lot, number)).case())
                    said[number] = opening

            def judge(outcome: Outcome, said: dict[int, Commands | Opening] = said) -> None:
                what = said.get(outcome.case.number)
                if isinstance(what, Opening):
                    what.judge(outcome)
                elif what is not None:
                    judge_commands(outcome, what)
                else:
                    judge_frames(outcome)

            stage.play(cases, judge)
            if batch.start <= warm_at < batch.stop:
                stage.warm()
        stage.finish()
        assert stage.ask("GET", f"/v0/topics/{NEVER}").status == 404, "published from a page that may not"
        stage.come_again()
