"""A reload: every process is replaced by another of its name, one after the other, while clients are served.

For each of them:

    prepare   fork the successor, from a fork server that has imported the new code. What is broken in it shows here,
              and costs nothing: the old process has not been touched. The first that is prepared makes this fork
              server the one from which the supervisor starts everything from now on
    hold      its peers keep back what they would ask it, and say when all that they have asked is in its ring
    retire    it answers what it was asked, stops in order and ends; one with clients may leave some for its successor
    start     the successor is booted: new links for its peers, which send what they have kept back
    ready     the next one

Shards come first, then the router and the queue process, then gateways: whoever asks outlives whom it asks, so what is
kept back is kept by a process that has nothing else to think about.

Rules: one reload at a time; it ends with the first process that is not replaced, and what has not been replaced by then
goes on. A successor that dies is started again like any child: the reload has failed, the server has not.

Crash of the successor before it is started: another is spawned when its turn comes, for its peers hold already, and
only a new link ends that. Of the process that retires: its successor is started as if it had ended. Of a peer that
should hold: nobody waits for it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import trio

from topics import limits
from topics.actors.control import PROTOCOL, ChannelClosed, Failed, Hold, Message, Prepare, Prepared, Retire
from topics.actors.log import Log
from topics.actors.supervisor.admin_socket import Order, Outcome, Progress
from topics.actors.supervisor.heartbeat import START_TIMEOUT_MS
from topics.actors.supervisor.process import ChildProcess
from topics.actors.supervisor.process_table import Child
from topics.actors.supervisor.restarts import Action, Event, Life
from topics.actors.supervisor.spawner import Spawner
from topics.errors import TopicsError

HOLD_TIMEOUT_S = 5.0
_UNDECIDED = (Life.WAITING, Life.STARTING, Life.REFUSING, Life.KILLED)
_PREPARE_S = START_TIMEOUT_MS / 1_000
_RANKS = ("shard", "router", "queue")  # then all others

Report = Callable[[Progress], None]


class Tell(Protocol):
    def __call__(self, child: Child, message: Message, fds: Sequence[int] = ()) -> None: ...


class NotReplaced(TopicsError):
    """Why a reload ends early, in words for the operator."""


def kind_of(child: Child) -> str:
    return child.name.partition("-")[0]


class Reload:
    """One run. `run` always returns an Outcome."""

    def __init__(
        self,
        order: Order,
        children: Sequence[Child],
        *,
        tell: Tell,
        log: Log,
        report: Report,
        spawner: Spawner,
        adopt: Callable[[Spawner], None],
        stop_timeout_s: float = limits.STOP_TIMEOUT_MS / 1_000,
    ) -> None:
        self._order = order
        self._tell = tell
        self._log = log
        self._report = report
        self._spawner = spawner
        self._adopt: Callable[[Spawner], None] | None = adopt
        self._stop_timeout_s = stop_timeout_s
        chosen = [child for child in children if order.only in (None, kind_of(child))]
        self._children = sorted(chosen, key=_rank)
        self._began = 0.0

    async def run(self) -> Outcome:
        try:
            return await self._run()
        finally:
            if self._adopt is not None:
                self._spawner.close()

    async def _run(self) -> Outcome:
        replaced: list[str] = []
        for at, child in enumerate(self._children, 1):
            self._began = trio.current_time()
            try:
                await self._replace(child, at)
            except NotReplaced as failure:
                left = len(self._children) - len(replaced)
                advice = f"{left} of {len(self._children)} processes were not replaced; `topics ps` shows what runs"
                return Outcome(replaced, f"{failure}; {advice}")
            replaced.append(child.name)
        return Outcome(replaced)

    async def _replace(self, child: Child, at: int) -> None:
        def report(stage: str, pid: int) -> None:
            took_ms = round((trio.current_time() - self._began) * 1_000)
            self._report(Progress(child.name, stage, at, len(self._children), pid, took_ms))

        def life() -> Life:
            return child.life

        if life() is not Life.READY:
            raise NotReplaced(f"{child.name} does not serve ({child.life.value}), and only what serves is replaced")
        report("preparing", 0)
        successor = await self._prepare(child)
        starts = child.starts
        try:
            await self._hold(child)
            if child.starts != starts or life() is not Life.READY:
                raise NotReplaced(f"{child.name} died before it was replaced, and is started again")
            report("stopping", 0)
            self._retire(child)
        except BaseException:
            await successor.discard()
            raise
        child.successor = successor
        with trio.move_on_after(self._stop_timeout_s):
            await child.wait_until(lambda: life() is not Life.RETIRING)
        if life() is Life.RETIRING and child.handle(Event.OVERDUE) is Action.KILL and child.process is not None:
            self._log.error("child_does_not_retire", child=child.name, pid=child.process.pid)
            child.process.kill()
            await child.wait_until(lambda: life() is not Life.RETIRING)
        report("starting", _pid(child))
        with trio.move_on_after(self._order.timeout_s):
            await child.wait_until(lambda: life() not in _UNDECIDED or child.starts > starts + 1)
        if life() in _UNDECIDED and child.starts == starts + 1:
            raise NotReplaced(
                f"{child.name} is not ready after {self._order.timeout_s:g} s; it goes on starting, and serves then"
            )
        if life() is not Life.READY or child.starts != starts + 1:
            raise NotReplaced(f"{child.name} did not come up: {child.reason or child.ending}; it is {_fate(child)}")
        report("ready", _pid(child))

    async def _prepare(self, child: Child) -> ChildProcess:
        try:
            process = await self._spawner.spawn()
        except OSError as exc:
            raise NotReplaced(f"{child.name} could not be replaced: {exc}") from None
        try:
            try:
                process.channel.send_nowait(Prepare(child.spec.module))
            except ChannelClosed:
                pass  # it has ended already, which is what will be heard of it
            with trio.move_on_after(_PREPARE_S):
                await self._wait_prepared(child, process)
                if self._adopt is not None:
                    self._adopt(self._spawner)
                    self._adopt = None
                return process
            raise NotReplaced(f"{child.name}: the new process was not ready to start after {_PREPARE_S:g} s")
        except BaseException:
            await process.discard()
            raise

    async def _wait_prepared(self, child: Child, process: ChildProcess) -> None:
        untouched = f"{child.name} still runs as before"
        while True:
            await trio.lowlevel.wait_readable(process.channel.sock)
            try:
                message, _ = process.channel.receive()
            except BlockingIOError:
                continue
            except (ChannelClosed, TopicsError, msgspec.DecodeError) as exc:
                raise NotReplaced(f"{child.name}: the new process ended before it began ({exc}); {untouched}") from None
            match message:
                case Prepared(protocol) if protocol == PROTOCOL:
                    return
                case Prepared(protocol):
                    raise NotReplaced(
                        f"the installed version can't work beside this one (protocol {protocol}, not {PROTOCOL}): "
                        f"restart the server; {untouched}"
                    )
                case Failed(reason):
                    raise NotReplaced(f"{child.name}: the new process can't start: {reason}; {untouched}")
                case _:
                    raise NotReplaced(f"{child.name}: the new process talks nonsense; {untouched}")

    async def _hold(self, child: Child) -> None:
        lives = {peer: peer.process for peer in child.peers}
        for peer in lives:
            peer.held.discard(child.name)
            self._tell(peer, Hold(child.name))
        with trio.move_on_after(HOLD_TIMEOUT_S):
            for peer, process in lives.items():
                await peer.wait_until(
                    lambda peer=peer, process=process: child.name in peer.held or peer.process is not process  # type: ignore[misc]
                )
            return
        late = [peer.name for peer in lives if child.name not in peer.held]
        self._log.warning("hold_overdue", child=child.name, peers=",".join(late))

    def _retire(self, child: Child) -> None:
        fds: list[int] = []
        ours: socket.socket | None = None
        if child.spec.listener:
            child.inheritance, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds = [ours.fileno()]
        child.handle(Event.RETIRE)
        self._tell(child, Retire(), fds)
        if ours is not None:
            ours.close()


def _pid(child: Child) -> int:
    return 0 if child.process is None else child.process.pid


def _rank(child: Child) -> tuple[int, int]:
    kind = kind_of(child)
    return (_RANKS.index(kind) if kind in _RANKS else len(_RANKS)), child.spec.index


def _fate(child: Child) -> str:
    return "down for good" if child.life is Life.FAILED else "being started again"
