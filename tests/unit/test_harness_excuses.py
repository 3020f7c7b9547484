"""What the clients of the tests let pass while processes die under them: silence and a lost connection, and no wrong
answer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.client import Answer, Lost
from e2e.crowd import Watcher
from e2e.sse import EventStream, Silence
from spark.sourcechaos import Writers


class Script:
    """A response that brings these pieces, and then nothing more."""

    status = 200

    def __init__(self, *pieces: bytes) -> None:
        self.headers: dict[str, str] = {}
        self._pieces = [b"retry: 2000\n\n", *pieces]

    def more(self, within_s: float) -> bytes:
        if not self._pieces:
            raise TimeoutError
        return self._pieces.pop(0)

    def close(self) -> None: ...
    def reset(self) -> None: ...


UNKNOWN = b"id: e30\nevent: surprise\ndata: {}\n\n"


def test_silence_is_a_failure_of_its_own() -> None:
    with pytest.raises(Silence, match="no frame came in time"):
        EventStream(Script()).frame(0.01)
    with pytest.raises(AssertionError) as wrong:
        EventStream(Script(UNKNOWN)).frame(0.01)
    assert not isinstance(wrong.value, Silence)


@pytest.mark.parametrize(("pieces", "fails"), [((), False), ((UNKNOWN,), True)])
def test_a_watcher_that_was_dismissed_excuses_silence_alone(pieces: tuple[bytes, ...], fails: bool) -> None:
    watcher = Watcher(SimpleNamespace(), "topic")  # type: ignore[arg-type]
    watcher._stream = EventStream(Script(*pieces))
    watcher.dismiss()
    if fails:
        with pytest.raises(AssertionError, match="surprise"):
            watcher.step()
    else:
        watcher.step()


class Api:
    """Its first answer is what a test wants to see excused, or not."""

    def __init__(self, first: Callable[[], Any]) -> None:
        self._answers = [first, self._appended]

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None: ...

    @staticmethod
    def _appended() -> Answer:
        raw = b'{"seqs":[7],"performance":{"server_total_ms":1}}'
        return Answer(status=200, headers={"content-type": "application/json"}, raw=raw)

    def append_records(self, topic: str, records: list[dict[str, Any]], **fields: object) -> Any:
        return self._answers.pop(0)()


def _lost() -> Answer:
    raise Lost("the connection ended")


def _wrong() -> Answer:
    """A success that names an error."""
    raw = b'{"seqs":[7],"error":{},"performance":{"server_total_ms":1}}'
    return Answer(status=200, headers={"content-type": "application/json"}, raw=raw)


def _writers(client: Callable[[], Api]) -> Writers:
    return Writers(SimpleNamespace(server=SimpleNamespace(client=client)), "topic")  # type: ignore[arg-type]


def test_a_writer_repeats_what_was_lost_and_nothing_else() -> None:
    lost, wrong = Api(_lost), Api(_wrong)
    assert _writers(lambda: lost)._append("topic", [1]) == [7]
    with pytest.raises(AssertionError):
        _writers(lambda: wrong)._append("topic", [1])


def test_a_writer_waits_for_a_port() -> None:
    ended = [AssertionError("the server ended with -9")]
    api = Api(Api._appended)

    def client() -> Api:
        if ended:
            raise ended.pop()
        return api

    assert _writers(client)._append("topic", [1]) == [7]
