"""The supervisor: starts the process table, connects it, replaces what dies or hangs, stops it in order.

On SIGHUP, or by order of `topics reload`, it replaces all of it (rolling_restart.py).

It owns what must outlive a child: the listening socket, the board, the bells, the data folder's lock. Rules:

- a link exists while both its processes do. When one dies the peers hear of it at once; when it starts
  again every link it has gets a fresh region with the next generation. The supervisor keeps no mapping of
  a region it handed out, and its descriptor only while the link is up.
- what happens to a child on which event is restarts.py's table; this file only carries it out.
- a change of the shard count is committed when all processes that store have reported ready, and nobody
  who could show its data to a client is started before that.
- nothing here waits for a child: orders are sent without blocking, and a child that does not take them is
  killed.

Crash: the kernel kills the children, the regions have no names, the lock goes with the last writer.
Nothing is left.
"""

from __future__ import annotations

import enum
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec
import trio

from topics import __version__, limits
from topics.actors.child import show_memory
from topics.actors.control import (
    ChannelClosed,
    Failed,
    Held,
    LayoutCommitted,
    Left,
    LinkDown,
    LinkUp,
    Message,
    NewKeys,
    Ready,
    Stop,
    Stopped,
)
from topics.actors.inspect.inspect_socket import InspectSocket, LinkSample
from topics.actors.log import Log, announce
from topics.actors.startup.datadir_lock import DataDir, LockInfo, url
from topics.actors.startup.listener import write_port_file
from topics.actors.startup.preflight import forbid_core_dumps, raise_open_files_limit, require_shared_memory
from topics.actors.supervisor.admin_socket import KeysRead, Order
from topics.actors.supervisor.process import ChildProcess, ProcessSpec
from topics.actors.supervisor.process_table import Child, Link
from topics.actors.supervisor.pulse import Pulse
from topics.actors.supervisor.reload_requests import Reloads
from topics.actors.supervisor.resources import Estate
from topics.actors.supervisor.restarts import OVER, Action, Event, Life
from topics.actors.supervisor.rolling_restart import Reload, Report
from topics.actors.supervisor.sd_notify import Bulletin, Informer, ServiceManager
from topics.actors.supervisor.spawner import Spawner
from topics.errors import StartRefused, TopicsError
from topics.keyfile import KeyFile
from topics.keys import difference, moment_text, renumbered
from topics.settings import Settings
from topics.shm.counters import Board, State, Word
from topics.shm.layout import require_supported_machine
from topics.shm.region import sweep_leftovers

NAME = "supervisor"


class _Heard(enum.Enum):
    MESSAGE = 1
    NOTHING = 2
    END = 3  # there will be nothing any more


class Supervisor:
    """Built before trio runs: what refuses to start is raised from here. Then `trio.run(supervisor.run)`."""

    def __init__(
        self,
        settings: Settings,
        specs: Sequence[ProcessSpec],
        links: Iterable[tuple[str, str]],
        folder: DataDir,
        *,
        stop_timeout_ms: int = limits.STOP_TIMEOUT_MS,
        listener: socket.socket | None = None,  # one that we were given; else we bind our own
        manager: ServiceManager | None = None,
        key_file: KeyFile | None = None,  # where the keys of the settings can be read again
        preload: Sequence[str] = (),  # modules that children are forked with
    ) -> None:
        require_supported_machine()
        sweep_leftovers()
        raise_open_files_limit(settings.max_connections)
        if not settings.dumpable:
            forbid_core_dumps()
            show_memory(False)
        self._settings = settings
        self._folder = folder
        self._stop_timeout_s = stop_timeout_ms / 1_000
        self._log = Log(NAME, settings.log, settings.log_format)
        self._plan = folder.plan_layout(settings.wal_shards, cold_dir=settings.cold_dir)
        if self._plan.cold_away is not None:
            self._log.error("cold tier away", reason=self._plan.cold_away)
        self._estate = Estate(settings, specs, own_name=NAME, listener=listener)
        self.port: int = self._estate.listener.getsockname()[1]
        self._row = self.board.row(NAME)
        self._children = {spec.name: Child(spec, self.board) for spec in specs}
        self._doors = [child for child in self._children.values() if child.spec.listener]
        self._links = [Link(self._children[a], self._children[b]) for a, b in links]
        for link in self._links:
            for end in link.ends:
                end.links.append(link)
        self._pulse = Pulse(
            list(self._children.values()), interval_ms=settings.heartbeat_ms, log=self._log, clock=trio.current_time
        )
        require_shared_memory(len(self._links) * self._estate.link_bytes)
        self._spawner = Spawner(preload, dumpable=settings.dumpable)
        self._stop_asked = trio.Event()
        self._announced = False
        self._exit_code = 0
        self._key_file = key_file
        self._reloads = Reloads(log=self._log, refusal=self._no_reload, renew_keys=self._renew_keys)
        self._terminal = os.isatty(0)
        self._manager = manager
        self._inspect = InspectSocket(self._show_board, self._show_links)
        self._announce()

    @property
    def board(self) -> Board:
        return self._estate.board

    def _show_board(self) -> bytes:
        return bytes(self.board.region.view)

    def _show_links(self) -> list[LinkSample]:
        samples = [link.sample() for link in self._links]
        return [sample for sample in samples if sample is not None]

    def _announce(self) -> None:
        now_ms = time.time_ns() // 1_000_000
        self._row.set(Word.PID, os.getpid())
        self._row.set(Word.STARTED_MS, now_ms)
        self._row.set(Word.GENERATION, 1)
        self._row.set(Word.STATE, State.STARTING)
        self._folder.announce(
            LockInfo(
                pid=os.getpid(),
                started_ms=now_ms,
                host=self._settings.host,
                port=self.port,
                board_fd=self.board.region.fd,
                board_size=self.board.region.size,
                version=__version__,
                orders=self._reloads.address,
                inspect=self._inspect.name,
            )
        )
        if self._settings.port_file is not None:
            write_port_file(self._settings.port_file, self.port)

    async def run(self) -> int:
        """Until a signal says stop; returns the exit code."""
        # SIGHUP that was ignored when we started (nohup) stays ignored.
        heard = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            heard.append(signal.SIGHUP)
        with trio.open_signal_receiver(*heard) as arrivals:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._obey_signals, arrivals)
                nursery.start_soon(self._watch_heartbeats)
                self._informer = self._begin_informing(self._manager)
                nursery.start_soon(self._informer.run)
                nursery.start_soon(self._reloads.serve, self._begin_reload, self._informer)
                if not self._settings.api_keys:
                    self._log.warning("no_api_keys", means="everyone who reaches this server may read and write")
                self._look_at_keys()
                if self._plan.changes:
                    self._log.info(
                        "shard_count_changes",
                        old_shards=self._plan.old_shards,
                        shards=self._plan.shards,
                        layout=self._plan.layout,
                    )
                for child in self._children.values():
                    if child.spec.stores or not self._plan.changes:
                        self._keep_soon(child)
                await self._stop_asked.wait()
                await self._stop_all()
                nursery.cancel_scope.cancel()
        self._spawner.close()
        self._row.set(Word.STATE, State.STOPPED)
        self._log.info("stopped", exit_code=self._exit_code)
        return self._exit_code

    # --- one child's life ---------------------------------------------------------------------------

    def _keep_soon(self, child: Child) -> None:
        child.kept = True
        self._nursery.start_soon(self._keep, child)

    async def _keep(self, child: Child) -> None:
        """Start it, see it end, start it again, as long as the table says so."""
        while child.life in (Life.WAITING, Life.BACKOFF):
            if child.life is Life.BACKOFF:
                with child.pause:
                    await trio.sleep(child.pause_s)
                if child.life in OVER:
                    break
            process = await self._new_process(child)
            if process is None:
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, child, process)
                await process.wait_gone()
                nursery.cancel_scope.cancel()
            # Its last words may still be in the channel, and they decide whether it is started again.
            while self._hear_nowait(child, process) is _Heard.MESSAGE:
                pass
            child.process = None
            if process.left.is_set():
                self._nursery.start_soon(self._see_off, child.name, process)
                self._ended(child, "left")
            else:
                self._ended(child, process.reap())
        child.drop_successor()
        child.over.set()

    async def _new_process(self, child: Child) -> ChildProcess | None:
        """Started; None: it is not, and its life says what becomes of it."""
        process: ChildProcess | None = None
        try:
            process = child.take_successor()
            if process is None:
                with trio.CancelScope() as child.pause:  # a stop does not wait for this either
                    process = await self._spawner.spawn()
            if process is not None and child.life not in OVER:  # or we were told to stop meanwhile
                self._start(child, process)
                return process
        except (OSError, TopicsError) as exc:
            if child.life in (Life.WAITING, Life.BACKOFF):
                child.handle(Event.START)
            if child.life not in OVER:
                self._ended(child, f"could not be started: {exc}")
        if process is not None:
            child.process = None
            await process.discard()
        return None

    async def _see_off(self, name: str, process: ChildProcess) -> None:
        """It has another in its place, and some clients that have not read everything yet."""
        try:
            with trio.move_on_after(limits.LEAVE_MS / 1_000):
                await process.wait_exit()
        finally:
            process.kill()
            self._log.info("child_left", child=name, pid=process.pid, how=process.reap())

    def _start(self, child: Child, process: ChildProcess) -> None:
        child.handle(Event.START)
        child.reason = ""
        child.row.clear()
        child.row.set(Word.STATE, State.STARTING)
        child.row.set(Word.GENERATION, child.starts)
        child.row.set(Word.RESTARTS, child.starts - 1 - child.replaced)
        child.row.set(Word.STARTED_MS, time.time_ns() // 1_000_000)
        self._pulse.begin(child)
        regions = self._estate.make_regions(child)
        try:
            child.process = process
            child.row.set(Word.PID, process.pid)
            boot = self._estate.boot(child, regions, self._plan)
            self._tell(child, boot, self._estate.boot_fds(child, regions, lock_fd=self._folder.lock_fd))
            for link, region in regions.items():
                link.keep(region.fd)
                peer = link.peer_of(child)
                self._tell(peer, LinkUp(link.grant_for(peer, region.size)), [region.fd])
        finally:
            for region in regions.values():
                region.close()
            if child.inheritance is not None:
                child.inheritance.close()
                child.inheritance = None
        self._log.info("child_started", child=child.name, pid=process.pid, start=child.starts)

    def _ended(self, child: Child, how: str) -> None:
        for link in child.links:
            if link.up:
                link.down()
                self._tell(link.peer_of(child), LinkDown(child.name))
        child.ending = how
        hung = child.life is Life.KILLED
        action = child.handle(Event.EXIT)
        child.row.set(Word.PID, 0)
        if child.spec.listener:
            self._estate.usage.give_back(child.spec.index)
        match action:
            case Action.RETRY:
                child.row.set(Word.STATE, State.BACKOFF)
                self._log.warning(
                    "child_died",
                    child=child.name,
                    how="hung, killed" if hung else child.reason or how,
                    restart_in_ms=round(child.pause_s * 1_000),
                )
                child.pause = trio.CancelScope()
            case Action.REPLACE:
                child.replaced += 1
                child.row.set(Word.STATE, State.STARTING)
                self._log.info("child_retired", child=child.name, how=how)
            case Action.GIVE_UP:
                child.row.set(Word.STATE, State.FAILED)
                reason = child.reason or f"died {child.starts} times, last: {how}"
                self._log.error("child_failed", child=child.name, reason=reason, stays="down")
                self._judge_failure(child)
            case _:
                child.row.set(Word.STATE, State.STOPPED)
                self._log.info("child_stopped", child=child.name, how=how)

    def _judge_failure(self, child: Child) -> None:
        """The rest goes on serving, unless there is no rest that could: no gateway has ever served then."""
        if self._plan.changes:
            self._fatal(
                "layout_change_failed",
                advice=f"nothing was changed; TOPICS_WAL_SHARDS={self._plan.old_shards} serves as before",
            )
        if self._doors and all(door.life is Life.FAILED for door in self._doors):
            self._fatal("no_gateway_left")

    def _fatal(self, event: str, **fields: object) -> None:
        self._log.error(event, **fields)
        self._exit_code = 1
        self._stop_asked.set()

    # --- talking with children ------------------------------------------------------------------------

    def _tell(self, child: Child, message: Message, fds: Sequence[int] = ()) -> None:
        if child.process is None:
            return
        try:
            child.process.channel.send_nowait(message, fds)
        except ChannelClosed:
            pass  # its death is being noticed elsewhere
        except OSError as exc:
            # A child that missed news about its links would talk into the void: better a fresh one.
            self._log.error("child_does_not_listen", child=child.name, error=exc)
            child.process.kill()

    async def _listen(self, child: Child, process: ChildProcess) -> None:
        while True:
            await trio.lowlevel.wait_readable(process.channel.sock)
            if self._hear_nowait(child, process) is _Heard.END:
                # It can't be told anything any more; mostly this is only the first sign of its death.
                process.kill()
                return

    def _hear_nowait(self, child: Child, process: ChildProcess) -> _Heard:
        """Handle one message if there is one."""
        try:
            message, _ = process.channel.receive()
        except BlockingIOError:
            return _Heard.NOTHING
        except ChannelClosed:
            return _Heard.END
        except (TopicsError, msgspec.DecodeError, OSError) as exc:
            self._log.error("child_talks_nonsense", child=child.name, error=exc)
            return _Heard.END
        match message:
            case Ready():
                if child.life is Life.STARTING:
                    took_ms = time.time_ns() // 1_000_000 - child.row[Word.STARTED_MS]
                    self._log.info("child_ready", child=child.name, pid=process.pid, took_ms=took_ms)
                child.handle(Event.READY)
                self._on_ready()
            case Failed(reason, again):
                child.reason = reason
                child.handle(Event.POSTPONED if again else Event.REFUSED)
            case Held(peer):
                child.held.add(peer)
                child.changed()
            case Left():
                process.left.set()
            case Stopped():
                pass  # its exit follows
            case _:
                self._log.error("child_talks_nonsense", child=child.name, message=type(message).__name__)
        return _Heard.MESSAGE

    def _on_ready(self) -> None:
        def ready(child: Child) -> bool:
            return child.life is Life.READY

        if self._stop_asked.is_set():
            return
        if any(map(ready, self._doors)):
            for door in self._doors:  # the settings are good: what ends a gateway from now on, clients may have sent
                if door.persist():
                    self._keep_soon(door)
        stores = [child for child in self._children.values() if child.spec.stores]
        if self._plan.changes and all(map(ready, stores)):
            self._commit_layout(stores)
        if not self._announced and all(map(ready, self._children.values())):
            self._announced = True
            self._row.set(Word.STATE, State.READY)
            shards = f"{self._plan.shards} shard{'' if self._plan.shards == 1 else 's'}"
            announce(
                f"topics {__version__} ready on {url(self._settings.host, self.port)} "
                f"({shards}, data in {self._settings.data_dir})"
            )

    def _commit_layout(self, stores: list[Child]) -> None:
        try:
            self._plan = self._folder.commit_layout(self._plan)
        except StartRefused as exc:
            self._fatal("layout_change_failed", error=exc)
            return
        self._log.info("shard_count_changed", shards=self._plan.shards, layout=self._plan.layout)
        for child in stores:
            self._tell(child, LayoutCommitted())
        for child in self._children.values():
            if not child.kept:
                self._keep_soon(child)

    # --- watching and stopping ------------------------------------------------------------------------

    async def _watch_heartbeats(self) -> None:
        while True:
            self._row.set(Word.HEARTBEAT, time.monotonic_ns())
            await trio.sleep(self._settings.heartbeat_ms / 1_000)
            self._pulse.look()

    def _begin_informing(self, manager: ServiceManager | None) -> Informer:
        bulletin = Bulletin(
            [child.row for child in self._children.values()],
            serving=f"serving {url(self._settings.host, self.port)} from {self._settings.data_dir}",
            clock=trio.current_time,
            heartbeat_s=self._settings.heartbeat_ms / 1_000,
            watchdog_us=None if manager is None else manager.address.watchdog_us,
            busy=self._pulse.busy,
        )
        return Informer(manager, bulletin, self._log)

    async def _obey_signals(self, arrivals: AsyncIterator[int]) -> None:
        async for number in arrivals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP and not (self._terminal and _terminal_is_gone()):
                self._reloads.start_soon()
            elif self._stop_asked.is_set():
                self._log.warning("already_stopping", signal=name)
            else:
                self._log.info("stopping", signal=name)
                self._stop_asked.set()

    async def _stop_all(self) -> None:
        """Rank by rank: those who talk to clients first, those who write the last snapshots at the end."""
        self._row.set(Word.STATE, State.STOPPING)
        self._reloads.cancel()
        self._informer.stopping()
        self._estate.listener.close()
        for order in sorted({child.spec.stop_order for child in self._children.values()}):
            rank = [child for child in self._children.values() if child.spec.stop_order == order]
            for child in rank:
                self._stop(child)
            with trio.move_on_after(self._stop_timeout_s):
                for child in rank:
                    await child.over.wait()
            for child in rank:
                if child.process is not None and child.handle(Event.OVERDUE) is Action.KILL:
                    self._log.error("child_does_not_stop", child=child.name, pid=child.process.pid)
                    self._exit_code = 1
                    child.process.kill()
            for child in rank:
                await child.over.wait()

    def _stop(self, child: Child) -> None:
        match child.handle(Event.STOP):
            case Action.SEND_STOP:
                self._tell(child, Stop())
            case Action.DONE:
                child.row.set(Word.STATE, State.STOPPED)
                child.pause.cancel()
        if not child.kept:
            child.over.set()

    # --- reloading ------------------------------------------------------------------------------------

    def _begin_reload(self, order: Order, report: Report) -> Reload:
        return Reload(
            order,
            list(self._children.values()),
            tell=self._tell,
            log=self._log,
            report=report,
            spawner=self._spawner.another(),
            adopt=self._adopt,
            stop_timeout_s=self._stop_timeout_s,
        )

    def _adopt(self, spawner: Spawner) -> None:
        """What is started from now on runs the code that a reload has brought."""
        self._spawner.close()
        self._spawner = spawner

    def _renew_keys(self) -> KeysRead | None:
        """All gateways get the same keys, now or when they start; SettingsError: none does."""
        if self._key_file is None:
            return None
        before = self._settings.api_keys
        keys = renumbered(self._key_file.read(again=True), before)
        self._settings = msgspec.structs.replace(self._settings, api_keys=keys)
        self._estate.take_keys(keys)
        for child in self._children.values():
            if child.spec.listener:
                self._tell(child, NewKeys(keys))
        found = KeysRead.of(len(keys), difference(before, keys))
        changes = {"added": found.added, "removed": found.removed, "changed": found.changed}
        told = {what: ",".join(labels) for what, labels in changes.items() if labels}
        self._log.info("keys_reloaded", keys=len(keys), **told)
        self._look_at_keys()
        return found

    def _look_at_keys(self) -> None:
        if self._key_file is not None and (exposure := self._key_file.exposure()):
            self._log.warning("key_file_exposed", file=exposure)
        for key in self._settings.api_keys:
            if key.expired(time.time_ns() // 1_000_000):
                self._log.warning("key_expired", key=key.label, since=moment_text(key.expires_ms))

    def _no_reload(self) -> str | None:
        if self._stop_asked.is_set():
            return "the server is stopping"
        if not self._announced:
            return "the server has not been ready yet; wait until it is (`topics ps`), then try again"
        return None

    def close(self) -> None:
        """After run(); the folder stays with whoever claimed it."""
        self._reloads.close()
        self._inspect.close()
        self._estate.close()


def _terminal_is_gone() -> bool:
    """Whether a SIGHUP means what it is named after."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return True
    return False
