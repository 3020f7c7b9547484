"""Which /work stream a push of the coordinator is for. If the coordinator dies, the streams stay and ask the next one
to go on: the leases delivered on them are theirs still."""

from __future__ import annotations

from typing import Protocol

from topics.actors import messages
from topics.actors.messages import Op
from topics.gateway.api.types import Call, Response
from topics.gateway.calls import Calls


class Work(Protocol):
    """A stream, as far as it matters here."""

    head: messages.OpenWork

    def again(self) -> messages.OpenWork: ...
    def jobs(self, claimed: messages.Claimed, body: bytes | memoryview) -> None: ...
    def ended(self, code: int, error: str) -> None: ...
    def abort(self) -> None: ...


class _Opened:
    """Takes the answer to OPEN_WORK."""

    def __init__(self, works: Works, work: Work) -> None:
        self._works = works
        self._work = work

    def finish(self, value: Response | messages.WorkOpened) -> None:
        if isinstance(value, Response):
            self._works.refused(self._work, value)

    def abort(self) -> None:
        self._work.abort()


class Works:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._open: dict[int, Work] = {}  # by the coordinator's correlation
        self._numbers: dict[Work, int] = {}

    def open(self, work: Work) -> None:
        call = Call(shard=self._calls.queue, op=Op.OPEN_WORK, head=work.again())
        self._numbers[work] = 0  # as long as nobody serves it
        if self._calls.linked(self._calls.queue) and (correlation := self._calls.ask(call, _Opened(self, work))):
            self._open[correlation] = work
            self._numbers[work] = correlation

    def close(self, work: Work) -> None:
        if (correlation := self._numbers.pop(work, None)) is not None:
            self._open.pop(correlation, None)
            head = messages.CloseWork(work.head.topic, work.head.stream)
            self._calls.tell(self._calls.queue, messages.pack(Op.CLOSE_WORK, 0, head))

    def sent(self, work: Work, size: int) -> None:
        if self._numbers.get(work):
            head = messages.WorkSent(work.head.stream, size)
            self._calls.tell(self._calls.queue, messages.pack(Op.WORK_SENT, 0, head))

    def refused(self, work: Work, response: Response) -> None:
        """It was a queue a moment ago. If it is only not to be had now, the next coordinator is asked."""
        self._open.pop(self._numbers.get(work, 0), None)
        if work not in self._numbers:
            return
        if response.status not in (404, 409):
            self._numbers[work] = 0
            return
        del self._numbers[work]
        work.ended(response.status, "this topic is not a queue any more")

    def retry(self) -> None:
        """Now and then: those that nobody serves."""
        if self._calls.linked(self._calls.queue):
            for work in [work for work, correlation in self._numbers.items() if not correlation]:
                self._open_again(work)

    def link_up(self) -> None:
        """Another coordinator: it knows the leases from their log, but not whose connection is open."""
        self._open.clear()
        for work in list(self._numbers):
            self._open_again(work)

    def _open_again(self, work: Work) -> None:
        try:
            self.open(work)
        except Exception as error:
            self._failed(work, error)

    def _failed(self, work: Work, error: Exception) -> None:
        """One stream's fault is its own."""
        self._calls.failed(work, error)

    def unasked(self, message: bytes) -> None:
        _, correlation = messages.unpack_correlation(message)
        work = self._open.get(correlation)
        if work is None or message[1]:
            return
        try:
            self._take(work, correlation, message)
        except Exception as error:
            self._failed(work, error)

    def _take(self, work: Work, correlation: int, message: bytes) -> None:
        op = message[0]
        answer, body = messages.decode_answer(message)
        if op == Op.JOBS:
            work.jobs(answer, body)
        elif op == Op.WORK_ENDED:
            del self._open[correlation]
            del self._numbers[work]
            work.ended(answer.code, answer.error)
