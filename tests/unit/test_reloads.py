"""Reloads that come while another one is under way: the keys are read again, nothing else is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import trio
import trio.testing

from topics.actors.log import Log
from topics.actors.supervisor.admin_socket import KeysRead, Order, Outcome
from topics.actors.supervisor.reload_requests import Reloads, unheard
from topics.actors.supervisor.rolling_restart import Reload
from topics.actors.supervisor.sd_notify import Bulletin, Informer
from topics.errors import SettingsError


class Endless:
    """A reload that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.begun = 0

    async def run(self) -> Outcome:
        self.begun += 1
        await trio.sleep_forever()
        return Outcome([])


class Scene:
    def __init__(self) -> None:
        self.read = 0
        self.broken = False
        self.endless = Endless()
        log = Log("supervisor", "error")
        self.reloads = Reloads(log=log, refusal=lambda: None, renew_keys=self._renew)
        bulletin = Bulletin([], serving="", clock=lambda: 0.0, heartbeat_s=1)
        self._informer = Informer(None, bulletin, log)

    def _renew(self) -> KeysRead:
        if self.broken:
            raise SettingsError("no keys")
        self.read += 1
        return KeysRead(self.read, [], [], [])

    async def serve(self) -> None:
        await self.reloads.serve(lambda order, report: cast(Reload, self.endless), self._informer)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.reloads.close()


async def _second(scene: Scene, order: Order, broken: bool = False) -> Outcome:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.serve)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(scene.reloads.reload, Order(), unheard)
        await trio.testing.wait_all_tasks_blocked()
        scene.broken = broken
        outcome = await scene.reloads.reload(order, unheard)
        assert scene.endless.begun == 1
        nursery.cancel_scope.cancel()
    return outcome


@pytest.mark.parametrize("only", [None, "gateway", "keys"])
def test_the_keys_are_read_again_while_another_is_under_way(scene: Scene, only: str | None) -> None:
    """SIGHUP is all that some have to revoke a key with, and it can come at any time."""
    outcome = trio.run(_second, scene, Order(only))
    assert scene.read == 2
    assert outcome.keys == KeysRead(2, [], [], [])
    assert outcome.refused == (only != "keys")
    assert ("another reload is under way" in outcome.error) == (only != "keys")


def test_a_file_that_is_not_right_is_what_is_told(scene: Scene) -> None:
    outcome = trio.run(_second, scene, Order(), True)
    assert outcome.refused
    assert outcome.error.startswith("no keys; the keys stay as they are")
