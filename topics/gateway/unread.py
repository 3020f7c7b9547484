"""Answers of one HTTP/2 connection that its client has not taken.

Streams are answered side by side, and a client may take nothing. Rules: while UNREAD_BYTES wait, no call is asked whose
answer may be large, and one that comes all the same is dropped and asked for again later. Those that wait for that go
on in the order in which they came, one at a time: each sees what the answer before it has left.

A request that is cancelled when its turn has come ends like any other, and the end of each lets the next one go on.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from topics import limits
from topics.gateway.budget import Budget


class Unread:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0
        self._waiting: OrderedDict[trio.Event, None] = OrderedDict()

    @property
    def full(self) -> bool:
        return self.held >= limits.UNREAD_BYTES

    async def wait_room(self) -> None:
        woken = False
        while self.full or (self._waiting and not woken):
            turn = trio.Event()
            self._waiting[turn] = None
            self._waiting.move_to_end(turn, last=not woken)
            try:
                await turn.wait()
            finally:
                self._waiting.pop(turn, None)
            await trio.lowlevel.checkpoint_if_cancelled()  # the end of one before it, which went with the connection
            woken = True

    def let_go_on(self) -> None:
        """The next one, if there is room."""
        if self._waiting and not self.full:
            turn, _ = self._waiting.popitem(last=False)
            turn.set()

    def settle(self, before: int, now: int) -> None:
        self._budget.book(before, now)
        self.held += now - before
        self.let_go_on()
