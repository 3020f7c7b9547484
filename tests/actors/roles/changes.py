"""A role whose code an upgrade has changed: what is wrong with the new version stands in a file. It answers like echo.

import    can't be imported
protocol  is of another protocol
refuse    can't serve, and says so
die       dies before it serves
slow      does not serve as long as this stands there
deaf      holds nobody
tardy     holds nobody as long as this stands there
"""

import os
import socket
import time

from roles import echo, trace
from topics.actors import child
from topics.actors.context import Context


def wrong() -> str:
    try:
        with open(os.environ["ROLES_WRONG"]) as file:
            return file.read()
    except FileNotFoundError:
        return ""


if wrong() == "import":
    raise ImportError("no module named nonsense")
if wrong() == "protocol":
    child.PROTOCOL += 1  # type: ignore[attr-defined]


def hold_late(context: Context, peer: str) -> None:
    trace(context, "told_to_hold", peer=peer)
    while wrong():
        context.beat()
        time.sleep(0.05)
    context.held(peer)


async def run(context: Context) -> None:
    what = wrong()
    if what == "refuse":
        context.fail("this disk is of another house")
    if what == "die":
        trace(context, "dies")
        os._exit(3)
    if what == "slow":
        while wrong():
            context.recovering(1)
            time.sleep(0.05)
    if what == "deaf":
        context.on_hold = lambda peer: trace(context, "told_to_hold", peer=peer)
    if what == "tardy":
        context.on_hold = lambda peer: hold_late(context, peer)

    def retire(heir: socket.socket | None) -> None:
        trace(context, "told_to_retire")
        context.on_stop()

    context.on_retire = retire
    await echo.run(context)
