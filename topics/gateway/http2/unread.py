"""Answers of one HTTP/2 connection that its client has not taken.

Streams are answered side by side, and a client may take nothing. Rules: while UNREAD_BYTES wait, no call is asked whose
answer may be large, and one that comes all the same is dropped and asked for again later. Those that wait for that go
on in the order in which they came, one at a time: each sees what the answer before it has left.

When an answer is given up because its client takes nothing, those that have long waited behind it are 408: they would
be given up one after the other. A request that is cancelled when its turn has come ends like any other, and the end of
each lets the next one go on.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from topics import limits
from topics.errors import ApiError
from topics.gateway.admission.budget import Budget


class Unread:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0
        self._waiting: OrderedDict[trio.Event, float] = OrderedDict()  # since when
        self._too_long: set[trio.Event] = set()

    @property
    def full(self) -> bool:
        return self.held >= limits.UNREAD_BYTES

    async def wait_room(self) -> None:
        since, woken = trio.current_time(), False
        while self.full or (self._waiting and not woken):
            turn = trio.Event()
            self._waiting[turn] = since
            self._waiting.move_to_end(turn, last=not woken)
            try:
                await turn.wait()
            finally:
                self._waiting.pop(turn, None)
            if turn in self._too_long:
                self._too_long.discard(turn)
                raise ApiError("request_timeout", "the answers before this one were not taken in time")
            await trio.lowlevel.checkpoint_if_cancelled()  # the end of one before it, which went with the connection
            woken = True

    def let_go_on(self) -> None:
        """The next one, if there is room."""
        if self._waiting and not self.full:
            turn, _ = self._waiting.popitem(last=False)
            turn.set()

    def give_up(self, before: float) -> None:
        """Those that have waited since then."""
        for turn in [turn for turn, since in self._waiting.items() if since <= before]:
            del self._waiting[turn]
            self._too_long.add(turn)
            turn.set()

    def settle(self, before: int, now: int) -> None:
        self._budget.book(before, now)
        self.held += now - before
        self.let_go_on()
