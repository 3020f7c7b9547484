"""Who wants jobs: a claim that waits for its pass, or a /work connection, which always wants some; and the pass that
is under way for them."""

from __future__ import annotations

from typing import Any, Protocol

from topics.actors import messages
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.errors import ApiError


class Caller(Protocol):
    """Where an answer goes: a gateway's link and the request's correlation."""

    def answer(self, op: Op, head: Any, body: bytes = b"") -> None: ...
    def fail(self, op: Op, error: ApiError) -> None: ...


class LinkCaller:
    """A gateway that waits for an answer; one that is gone gets none."""

    __slots__ = ("_correlation", "_link")

    def __init__(self, link: Link, correlation: int) -> None:
        self._link = link
        self._correlation = correlation

    def answer(self, op: Op, head: Any, body: bytes = b"") -> None:
        if not self._link.closed:
            self._link.writer.send_always(messages.pack(op, self._correlation, head, body))

    def fail(self, op: Op, error: ApiError) -> None:
        if not self._link.closed:
            self._link.writer.send_always(messages.pack_failure(op, self._correlation, error))


class Claimer:
    __slots__ = ("caller", "gone", "key", "lease_ms", "max", "moving", "node")

    stream = 0

    def __init__(self, caller: Caller, request: messages.Claim) -> None:
        self.caller = caller
        self.node = request.node
        self.max = request.max
        self.lease_ms = request.lease_ms
        self.key = request.key
        self.gone = False  # nobody waits for the answer any more
        self.moving: set[int] = set()  # jobs that its passes have sent to the dead letters


class Worker:
    __slots__ = ("caller", "gone", "lease_ms", "max", "node", "pushed", "sent", "stream")

    key = ""

    def __init__(self, caller: Caller, request: messages.OpenWork) -> None:
        self.caller = caller
        self.node = request.node
        self.max = request.max
        self.lease_ms = request.lease_ms
        self.stream = request.stream
        self.pushed = 0  # bytes of jobs sent to it ...
        self.sent = 0  # ... and taken by its socket, as far as we were told
        self.gone = False

    @property
    def unsent(self) -> int:
        return self.pushed - self.sent


Member = Claimer | Worker


class Taking:
    """A pass that waits for the shard."""

    __slots__ = ("after", "cohort", "evenly", "picked", "wanted")

    def __init__(self, cohort: list[Member], wanted: list[int], picked: list[int], *, after: int, evenly: bool) -> None:
        self.cohort = cohort
        self.wanted = wanted  # how many jobs by each
        self.picked = picked  # free jobs that were asked for
        self.after = after  # where the fresh ones begin
        self.evenly = evenly

    def present(self) -> tuple[list[Member], list[int]]:
        """Those who are still there, and what they want."""
        there = [(member, want) for member, want in zip(self.cohort, self.wanted, strict=True) if not member.gone]
        return [member for member, _ in there], [want for _, want in there]
