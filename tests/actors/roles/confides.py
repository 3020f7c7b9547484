"""Tells what the kernel lets others see of it, and what it dies with."""

import ctypes

import trio

from roles import trace
from topics.actors.context import Context

_PR_GET_PDEATHSIG = 2
_PR_GET_DUMPABLE = 3


async def run(context: Context) -> None:
    stop = trio.Event()
    context.on_stop = stop.set
    libc = ctypes.CDLL(None)
    number = ctypes.c_int()
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    trace(context, "booted", dumpable=libc.prctl(_PR_GET_DUMPABLE), death_signal=number.value)
    context.ready()
    await stop.wait()
