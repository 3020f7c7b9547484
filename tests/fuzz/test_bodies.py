"""JSON bodies and query strings of every endpoint: the HTTP is right, what it carries is not.

Here every request has exactly one answer, and the connection goes on to the next. What an append was told is stored is
read back, to the byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e.h2wire import H2Wire
from e2e.wire import Wire, request
from figures import FUZZED
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .bodies import ENDPOINTS, hostile_request
from .dials import SEED, batches, cases_of, dice, time_limit_s
from .player import Case, Outcome, Player
from .scene import PATIENT, Scene, scene
from .verdict import Reply, Wrong, check_reply, read_replies

pytestmark = pytest.mark.e2e

FAMILY = "bodies"
CASES = cases_of(FAMILY)
TOGETHER = 12  # requests of one connection, one behind the other
BATCH = 240
WARM_UP = 0.3  # of all cases
SOME_BY_HTTP2 = 24  # of each batch

Asked = list[tuple[str, str, bytes | None]]


class _Stored(msgspec.Struct):
    data: msgspec.Raw


class _Page(msgspec.Struct):
    records: list[_Stored]


def to_bytes(asked: Asked) -> bytes:
    return b"".join(request(method, target, body) for method, target, body in asked)


def judge(outcome: Outcome, asked: Asked) -> None:
    replies, _ = read_replies(outcome.received, clean=outcome.clean)
    if len(replies) != len(asked):
        raise Wrong(f"{len(asked)} requests, {len(replies)} answers")


def ask_by_http2(stage: Scene, number: int, asked: Asked) -> None:
    """The same through the other lane, one stream each on one connection."""
    FUZZED.add(len(asked))
    with H2Wire(stage.server.port) as wire:
        streams = [wire.ask(method, target, body) for method, target, body in asked]
        for stream, (method, target, body) in zip(streams, asked, strict=True):
            try:
                answer = wire.finish(stream)
                reply = Reply(int(answer.headers[":status"]), answer.headers, answer.body)
                check_reply(reply, bodiless=method == "HEAD")
            except (Wrong, EOFError) as error:
                stage.findings.add(Case(number, f"by HTTP/2: {method} {target[:300]}", [body or b""]), error)


@pytest.mark.gate
@pytest.mark.timeout(time_limit_s())
def test_hostile_bodies(tmp_path: Path) -> None:
    talkative: dict[str, Any] = {"TOPICS_LOG": "debug", "TOPICS_LOG_FORMAT": "json"}
    with scene(tmp_path, FAMILY, **PATIENT, **talkative) as stage:
        # A read of a log that somebody has emptied may wait for 30 s, if it was told to.
        stage.player = Player(stage.server.port, deadline_s=45.0)
        warm_at = int(CASES * WARM_UP)
        for batch in batches(CASES, BATCH):
            stage.furnish()
            asked = {number: hostile_request(dice(FAMILY, number)) for number in batch}
            by_http2 = list(batch)[:SOME_BY_HTTP2]
            rest = list(batch)[SOME_BY_HTTP2:]
            groups = {rest[at]: [asked[n] for n in rest[at : at + TOGETHER]] for at in range(0, len(rest), TOGETHER)}
            cases = [Case(number, "bodies", [to_bytes(group)], inputs=len(group)) for number, group in groups.items()]

            def judge_group(outcome: Outcome, groups: dict[int, Asked] = groups) -> None:
                judge(outcome, groups[outcome.case.number])

            stage.play(cases, judge_group)
            ask_by_http2(stage, batch.start, [asked[number] for number in by_http2])
            if batch.start <= warm_at < batch.stop:
                stage.warm()
        stage.finish()
        stage.come_again()


# --- values, grown and shrunk by Hypothesis ----------------------------------------------------------

VALUES = cases_of("values")
_text = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _text
)
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4), max_leaves=12
)


@st.composite
def _requests(draw: st.DrawFn) -> tuple[str, str, bytes | None]:
    """An endpoint with one field, or all, of a value that is any JSON at all."""
    endpoint = draw(st.sampled_from([one for one in ENDPOINTS if one.fields]))
    body: dict[str, Any] = dict(endpoint.fields)
    for name in draw(st.sets(st.sampled_from(sorted(body)), min_size=1, max_size=3)):
        body[name] = draw(_json)
    if "wait_ms" in body:
        body["wait_ms"] = 0
    path = endpoint.path.replace("{t}", "log").replace("{p}", "put-1").replace("{r}", "r-1")
    return endpoint.method, path, json.dumps(body, ensure_ascii=draw(st.booleans())).encode()


@pytest.mark.timeout(time_limit_s())
def test_any_value_in_any_field(tmp_path: Path) -> None:
    """One answer, and one below 500."""
    with scene(tmp_path, "values", **PATIENT) as stage:
        stage.furnish()

        @seed(SEED)
        @settings(
            max_examples=VALUES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(asked=_requests())
        def ask(asked: tuple[str, str, bytes | None]) -> None:
            FUZZED.add()
            wire = connection[0]
            try:
                wire.send(request(*asked))
                status, headers = wire.head()
                reply = Reply(status, headers, wire.body(headers))
            except (OSError, EOFError):
                connection[0].close()
                connection[0] = Wire(stage.server.port)
                raise
            check_reply(reply)

        connection = [Wire(stage.server.port)]
        try:
            ask()
        finally:
            connection[0].close()
        stage.finish()


@pytest.mark.timeout(time_limit_s())
def test_any_data_comes_back_as_it_was(tmp_path: Path) -> None:
    """Data is kept to the byte, however odd: spaces, number spellings, escapes, what can't be read as text."""
    with scene(tmp_path, "data", **PATIENT) as stage:
        wire = Wire(stage.server.port)
        numbers = iter(range(10**9))

        @seed(SEED)
        @settings(
            max_examples=max(VALUES // 4, 1),
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            values=st.lists(_json, min_size=1, max_size=8),
            spaces=st.sampled_from(["", " ", "\t", "\n ", " \r\n"]),
            escaped=st.booleans(),
        )
        def keep(values: list[Any], spaces: str, escaped: bool) -> None:
            FUZZED.add()
            separators = (f"{spaces},{spaces}", f"{spaces}:{spaces}")
            texts = [json.dumps(value, ensure_ascii=escaped, separators=separators).encode() for value in values]
            topic = f"data-{next(numbers) % 50}"
            wire.send(request("DELETE", f"/v0/topics/{topic}"))
            wire.answer()
            records = b",".join(b'{"data":' + text + b"}" for text in texts)
            assert wire.ask(request("POST", f"/v0/topics/{topic}", b'{"records":[' + records + b"]}")).status == 201
            page = wire.ask(request("POST", f"/v0/topics/{topic}/diff", b'{"limit":1000}'))
            found = [bytes(record.data) for record in msgspec.json.decode(page.raw, type=_Page).records]
            assert found == texts

        try:
            keep()
        finally:
            wire.close()
        stage.finish()
