"""The router process and a shard in one process, stepped by hand: who gets which message when is the test's to say.

Nothing runs by itself. What the router has sent waits until the shard is told to take it, and what the shard has
answered or pushed waits until it is delivered; sleeps end when the clock is moved. When one of the two dies, the link
goes with everything in it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from pipeshard import PipeShard

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.router.process import Router
from topics.settings import Settings
from topics.shm.counters import ROW_WORDS, Word


class Link:
    """The router's side of its link to the shard, and the shard's writer of the same link."""

    peer = "shard-0"
    outbox_bytes = 0
    position = 0

    def __init__(self) -> None:
        self.sent: list[bytes] = []  # by the router
        self.answered: list[bytes] = []  # by the shard
        self.arrived: list[bytes] = []  # what the router finds when it looks
        self.writer = SimpleNamespace(send_always=self.sent.append, flush=lambda: 0, outbox_bytes=0)

    def flush(self) -> None:
        pass

    def last_words(self) -> list[bytes]:
        return self.drain()

    def drain(self) -> list[bytes]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def has_work(self) -> bool:
        return bool(self.arrived)

    # --- as the shard sees it ---

    def send_always(self, message: bytes) -> None:
        self.answered.append(message)

    def wake_after(self, position: int) -> bool:
        return True


class Play:
    def __init__(self, shard: PipeShard, nursery: trio.Nursery, clock: trio.testing.MockClock, **settings: Any) -> None:
        self.shard = shard
        self.clock = clock
        self._nursery = nursery
        self._settings = Settings(data_dir=os.fspath(shard.settings.data_dir), **settings)
        self.link = Link()
        self.asked: list[Op] = []  # what the shard was asked for, in order
        self.begin()

    def begin(self) -> None:
        """A router process starts."""
        context = SimpleNamespace(
            held=lambda peer: None,
            settings=self._settings,
            shards=1,
            links={"shard-0": self.link},
            row=SimpleNamespace(words=[0] * ROW_WORDS),
            log=SimpleNamespace(debugging=False, info=lambda *_, **__: None, error=lambda *_, **__: None),
        )
        self.words = context.row.words
        self._scope = trio.CancelScope()
        self.router = Router(context)  # type: ignore[arg-type]
        self._nursery.start_soon(self._live)

    async def _live(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                self.router.start(nursery)
                await trio.sleep_forever()

    # --- steps ---

    async def rest(self) -> None:
        """Until the router waits for something."""
        await trio.testing.wait_all_tasks_blocked()

    def serve(self, most: int | None = None) -> int:
        """The shard takes what was sent to it, and answers and pushes into the link."""
        taken, self.link.sent[:] = self.link.sent[:most], self.link.sent[most:] if most is not None else []
        for message in taken:
            self.asked.append(Op(message[0]))
            self.shard.engine.handle(message, self.link)
        self.shard.work()
        self.shard.engine.tails.push()
        return len(taken)

    async def deliver(self, most: int | None = None) -> int:
        """The router finds what the shard has said."""
        answered = self.link.answered
        moved, answered[:] = answered[:most], answered[most:] if most is not None else []
        self.link.arrived += moved
        self.router._asks.drain()
        await self.rest()
        return len(moved)

    async def turn(self) -> int:
        await self.rest()
        return self.serve() + await self.deliver()

    async def pass_time(self, seconds: float) -> None:
        """Whatever happens in this time; whoever is refused tries again every second at the latest."""
        for _ in range(round(seconds / 0.1)):
            await self.drain()
            self.clock.jump(0.1)

    async def settle(self) -> None:
        """Until nothing moves, not even as time goes by."""
        quiet = 0
        for _ in range(600):
            asked = len(self.asked)
            await self.drain()
            quiet = quiet + 1 if len(self.asked) == asked else 0
            if quiet > 15:
                return
            self.clock.jump(0.1)
        raise AssertionError(f"it never comes to rest; lately: {self.asked[-12:]}")

    async def drain(self) -> None:
        """Until nothing moves at this moment."""
        for _ in range(400):
            if not await self.turn():
                return
        raise AssertionError(f"it never comes to rest; lately: {self.asked[-12:]}")

    # --- deaths ---

    async def crash_shard(self) -> None:
        self.router._link_down("shard-0")
        self.shard.restart()
        self.link = Link()
        self.router._link_up("shard-0", self.link)  # type: ignore[arg-type]
        await self.rest()

    async def crash_router(self) -> None:
        self._scope.cancel()
        self.shard.engine.tails.follower_gone(self.link)
        self.link = Link()
        await self.rest()
        self.begin()
        await self.rest()

    # --- commands ---

    async def command(self, handler: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        """A gateway's request, with turns until it is answered: the answer or the error."""
        outcome: list[Any] = []

        async def run() -> None:
            try:
                outcome.append(await handler(request))
            except ApiError as error:
                outcome.append(error)

        self._nursery.start_soon(run)
        for _ in range(1_000):
            await self.rest()
            if outcome:
                return outcome[0]
            if not self.serve() + await self.deliver():
                self.clock.jump(0.05)
        raise AssertionError("no answer")

    async def put(self, router: str, source: str, dest: str, **options: Any) -> Any:
        fields: dict[str, Any] = {
            "preserve_node": True,
            "preserve_tag": True,
            "create_dest": True,
            "filter": None,
            "allow_cycle": False,
            "guarantee": "at_least_once",
            **options,
        }
        request = messages.PutRouter(router=router, source=source, dest=dest, **fields)
        return await self.command(self.router._put, request)

    async def drop(self, router: str) -> Any:
        return await self.command(self.router._drop, messages.DropRouter(router))

    async def drop_topic(self, topic: str) -> list[str]:
        self.shard.drop(topic)
        dropped = await self.command(self.router._drop_of, messages.DropRoutersOf(topic))
        removed: list[str] = dropped.routers
        return removed

    async def total(self, router: str) -> int:
        row = await self.command(self.router._get, messages.GetRouter(router))
        total: int = row.forwarded_total
        return total

    @property
    def routers(self) -> list[str]:
        return sorted(rule.router for rule in self.router._rules)

    @property
    def counted(self) -> int:
        """What the process says how many routers there are."""
        return int(self.words[Word.ROUTERS])


def run(folder: os.PathLike[str], play: Callable[[Play], Awaitable[None]], **settings: Any) -> None:
    """One play on a new shard."""
    shard = PipeShard(folder, segment_max_events=25)
    clock = trio.testing.MockClock()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            stage = Play(shard, nursery, clock, **settings)
            await play(stage)
            nursery.cancel_scope.cancel()

    try:
        trio.run(main, clock=clock)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None
    finally:
        shard.crash()
