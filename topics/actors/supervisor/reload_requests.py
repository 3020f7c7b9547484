"""Who may ask for a reload, and when: one at a time, of a server that is ready.

It listens for orders (admin_socket.py) and carries each out with rolling_restart.py. Whoever asked is told what happens
as it happens; SIGHUP is the order without anybody who listens. The keys are read again first, and are in effect in all
gateways before any process is replaced: what is replaced, or fails to be, has no part in who may do what. If they can't
be read, those of before stay and nothing is replaced. An order that comes while another one is carried out reads the
keys all the same: else a key that was revoked would go on, and after SIGHUP the log alone would say so.

Crash: with the supervisor. A command that waits sees the socket close.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import trio

from topics.actors.log import Log
from topics.actors.supervisor import admin_socket
from topics.actors.supervisor.admin_socket import KEYS, Desk, KeysRead, Order, Outcome, Progress
from topics.actors.supervisor.rolling_restart import Reload, Report
from topics.actors.supervisor.sd_notify import Informer
from topics.errors import SettingsError


def unheard(news: Progress) -> None:
    """Nobody is told but the log."""


class Reloads:
    def __init__(
        self, *, log: Log, refusal: Callable[[], str | None], renew_keys: Callable[[], KeysRead | None]
    ) -> None:
        self._log = log
        self._renew_keys = renew_keys  # None: they are in no file; SettingsError: they stay as they are
        self._refusal = refusal  # why there can't be one now
        self._desk = Desk()
        self._scope: trio.CancelScope | None = None  # of the one under way

    @property
    def address(self) -> str:
        return self._desk.name

    async def serve(self, begin: Callable[[Order, Report], Reload], informer: Informer) -> None:
        self._begin = begin
        self._informer = informer
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await trio.lowlevel.wait_readable(self._desk.sock)
                if (peer := self._desk.accept()) is not None:
                    nursery.start_soon(self._obey, peer)

    def start_soon(self) -> None:
        self._nursery.start_soon(self.reload, Order(), unheard)

    async def _obey(self, peer: socket.socket) -> None:
        with peer:
            await trio.lowlevel.wait_readable(peer)
            if (order := admin_socket.receive_order(peer)) is not None:
                admin_socket.tell(peer, await self.reload(order, lambda news: admin_socket.tell(peer, news)))

    async def reload(self, order: Order, report: Report) -> Outcome:
        if (refusal := self._refusal()) is not None:
            return self._refused(refusal)
        self._log.info("reload", only=order.only or "all")
        try:
            keys = self._renew_keys()
        except SettingsError as error:
            self._log.error("keys_not_reloaded", error=error, keys="as before")
            return Outcome([], f"{error}; the keys stay as they are, and nothing was replaced", refused=True)
        if order.only == KEYS:  # also while processes are replaced: those that start get the new ones
            missing = "" if keys is not None else "the keys come from no file that could be read again"
            return Outcome([], missing, refused=keys is None, keys=keys)
        if self._scope is not None:
            return self._refused(
                "another reload is under way; wait for its end (`topics ps` shows the processes), then try again", keys
            )
        self._informer.reloading()
        outcome = msgspec.structs.replace(await self._replace(order, report), keys=keys)
        if outcome.error:
            self._log.error("reload_failed", error=outcome.error, replaced=",".join(outcome.replaced))
        else:
            self._log.info("reloaded", processes=len(outcome.replaced))
        self._informer.reloaded()
        return outcome

    def _refused(self, reason: str, keys: KeysRead | None = None) -> Outcome:
        self._log.warning("reload_refused", reason=reason)
        return Outcome([], reason, refused=True, keys=keys)

    async def _replace(self, order: Order, report: Report) -> Outcome:
        outcome = Outcome([], "the server was told to stop")
        with trio.CancelScope() as self._scope:
            outcome = await self._begin(order, report).run()
        self._scope = None
        return outcome

    def cancel(self) -> None:
        """The server stops: what is under way is not finished."""
        if self._scope is not None:
            self._scope.cancel()

    def close(self) -> None:
        self._desk.close()
