"""The supervisor: starts the process table, connects it, replaces what dies or hangs, stops it in order.

It owns what must outlive a child: the listening socket, the board, the bells, the data folder's lock. Rules:

- a link exists while both its processes do. When one dies the peers hear of it at once; when it starts
  again every link it has gets a fresh region with the next generation. The supervisor keeps no mapping of
  a region it handed out.
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
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec
import trio

from topics import __version__, limits
from topics.actors.control import (
    Boot,
    ChannelClosed,
    Failed,
    LayoutCommitted,
    LinkDown,
    LinkGrant,
    LinkUp,
    Message,
    Ready,
    Stop,
    Stopped,
)
from topics.actors.datadir import DataDir, LockInfo, url
from topics.actors.heartbeat import HeartbeatWatch
from topics.actors.listener import bind_listener, write_port_file
from topics.actors.log import Log
from topics.actors.notify import Bulletin, ServiceManager
from topics.actors.process import ChildProcess, ProcessSpec
from topics.actors.restarts import OVER, Action, ChildLife, Event, Life
from topics.errors import StartRefused, TopicsError
from topics.settings import Settings
from topics.shm.counters import Board, State, Word
from topics.shm.doorbell import Doorbell
from topics.shm.layout import link_bytes, require_supported_machine
from topics.shm.region import Region, free_bytes, sweep_leftovers
from topics.shm.ring import format_link
from topics.shm.usage import Usage

NAME = "supervisor"


class _Heard(enum.Enum):
    MESSAGE = 1
    NOTHING = 2
    END = 3  # there will be nothing any more


class _Child:
    """A line of the process table and what became of it."""

    def __init__(self, spec: ProcessSpec, board: Board) -> None:
        self.spec = spec
        self.name = spec.name
        self.row = board.row(spec.name)
        self.life = ChildLife(trio.current_time)
        self.links: list[_Link] = []
        self.process: ChildProcess | None = None
        self.watch: HeartbeatWatch | None = None
        self.kept = False  # a task looks after it
        self.pause = trio.CancelScope()
        self.over = trio.Event()
        self.reason = ""


class _Link:
    def __init__(self, a: _Child, b: _Child) -> None:
        self.ends = (a, b)
        self.generation = 0
        self.up = False

    def peer_of(self, child: _Child) -> _Child:
        return self.ends[1] if child is self.ends[0] else self.ends[0]

    def grant_for(self, child: _Child, size: int) -> LinkGrant:
        return LinkGrant(
            peer=self.peer_of(child).name,
            side=0 if child is self.ends[0] else 1,
            generation=self.generation,
            size=size,
        )


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
    ) -> None:
        require_supported_machine()
        sweep_leftovers()
        _raise_open_files_limit()
        self._settings = settings
        self._folder = folder
        self._stop_timeout_s = stop_timeout_ms / 1_000
        self._log = Log(NAME, settings.log, settings.log_format)
        self._plan = folder.plan_layout(settings.wal_shards, cold_dir=settings.cold_dir)
        self._listener = listener or bind_listener(settings.host, settings.port)
        self.port: int = self._listener.getsockname()[1]
        self._board = Board.create([NAME, *(spec.name for spec in specs)])
        self._row = self._board.row(NAME)
        doors = sum(spec.listener for spec in specs)
        self._usage = Usage.create(gateways=doors, keys=len(settings.api_keys) + 1)  # they are numbered from 1
        self._bell_fds = {spec.name: Doorbell.create_fd() for spec in specs}
        self._children = {spec.name: _Child(spec, self._board) for spec in specs}
        self._links = [_Link(self._children[a], self._children[b]) for a, b in links]
        for link in self._links:
            for end in link.ends:
                end.links.append(link)
        self._link_bytes = link_bytes(settings.ring_bytes)
        _require_shared_memory(len(self._links) * self._link_bytes)
        self._stop_asked = trio.Event()
        self._announced = False
        self._exit_code = 0
        self._manager = manager
        self._manager_deaf = False
        self._announce()

    @property
    def board(self) -> Board:
        return self._board

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
                board_fd=self._board.region.fd,
                board_size=self._board.region.size,
                version=__version__,
            )
        )
        if self._settings.port_file is not None:
            write_port_file(self._settings.port_file, self.port)

    async def run(self) -> int:
        """Until a signal says stop; returns the exit code."""
        # SIGHUP that was ignored when we started (nohup) stays ignored.
        stops = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            stops.append(signal.SIGHUP)
        with trio.open_signal_receiver(*stops) as arrivals:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._obey_signals, arrivals)
                nursery.start_soon(self._watch_heartbeats)
                if self._manager is not None:
                    self._bulletin = self._begin_bulletin(self._manager)
                    nursery.start_soon(self._inform_manager, self._manager)
                if not self._settings.api_keys:
                    self._log.warning("no_api_keys", means="everyone who reaches this server may read and write")
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
        self._row.set(Word.STATE, State.STOPPED)
        self._log.info("stopped", exit_code=self._exit_code)
        return self._exit_code

    # --- one child's life ---------------------------------------------------------------------------

    def _keep_soon(self, child: _Child) -> None:
        child.kept = True
        self._nursery.start_soon(self._keep, child)

    async def _keep(self, child: _Child) -> None:
        """Start it, see it end, start it again, as long as the table says so."""
        while child.life.life in (Life.WAITING, Life.BACKOFF):
            if child.life.life is Life.BACKOFF:
                with child.pause:
                    await trio.sleep(child.life.pause_s)
                if child.life.life in OVER:
                    break
            try:
                process = self._start(child)
            except (OSError, TopicsError) as exc:
                self._ended(child, f"could not be started: {exc}")
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, child, process)
                await process.wait_exit()
                nursery.cancel_scope.cancel()
            # Its last words may still be in the channel, and they decide whether it is started again.
            while self._hear_nowait(child, process) is _Heard.MESSAGE:
                pass
            child.process = None
            self._ended(child, process.reap())
        child.over.set()

    def _start(self, child: _Child) -> ChildProcess:
        child.life.handle(Event.START)
        child.reason = ""
        child.row.clear()
        child.row.set(Word.STATE, State.STARTING)
        child.row.set(Word.GENERATION, child.life.starts)
        child.row.set(Word.RESTARTS, child.life.starts - 1)
        child.row.set(Word.STARTED_MS, time.time_ns() // 1_000_000)
        child.watch = HeartbeatWatch(interval_ms=self._settings.heartbeat_ms)
        regions = self._make_regions(child)
        try:
            process = ChildProcess.spawn()
            child.process = process
            child.row.set(Word.PID, process.pid)
            self._tell(child, self._boot(child, regions), self._boot_fds(child, regions))
            for link, region in regions.items():
                link.up = True
                peer = link.peer_of(child)
                self._tell(peer, LinkUp(link.grant_for(peer, region.size)), [region.fd])
        finally:
            for region in regions.values():
                region.close()
        self._log.info("child_started", child=child.name, pid=process.pid, start=child.life.starts)
        return process

    def _make_regions(self, child: _Child) -> dict[_Link, Region]:
        """Fresh memory for every link whose other end lives; the rest is made when that end starts."""
        regions: dict[_Link, Region] = {}
        try:
            for link in child.links:
                if link.peer_of(child).process is None:
                    continue
                link.generation += 1
                region = regions[link] = Region.create(self._link_bytes)
                format_link(region.view, generation=link.generation, ring_bytes=self._settings.ring_bytes)
        except BaseException:
            for region in regions.values():
                region.close()
            raise
        return regions

    def _boot(self, child: _Child, regions: dict[_Link, Region]) -> Boot:
        return Boot(
            name=child.name,
            module=child.spec.module,
            index=child.spec.index,
            supervisor_pid=os.getpid(),
            settings=self._settings,
            board_size=self._board.region.size,
            bells=list(self._bell_fds),
            links=[link.grant_for(child, region.size) for link, region in regions.items()],
            listener=child.spec.listener,
            holds_lock=child.spec.stores,
            layout=self._plan.layout,
            shards=self._plan.shards,
            old_layout=self._plan.old_layout,
            old_shards=self._plan.old_shards,
            usage_size=self._usage.region.size if child.spec.listener else 0,
            cold=self._plan.cold if child.spec.stores else None,
        )

    def _boot_fds(self, child: _Child, regions: dict[_Link, Region]) -> list[int]:
        fds = [self._board.region.fd]
        if child.spec.listener:
            fds.append(self._usage.region.fd)
        fds += [*self._bell_fds.values(), *(region.fd for region in regions.values())]
        if child.spec.listener:
            fds.append(self._listener.fileno())
        if child.spec.stores:
            fds.append(self._folder.lock_fd)
        return fds

    def _ended(self, child: _Child, how: str) -> None:
        for link in child.links:
            if link.up:
                link.up = False
                self._tell(link.peer_of(child), LinkDown(child.name))
        hung = child.life.life is Life.KILLED
        action = child.life.handle(Event.EXIT)
        child.row.set(Word.PID, 0)
        if child.spec.listener:
            self._usage.give_back(child.spec.index)
        match action:
            case Action.RETRY:
                child.row.set(Word.STATE, State.BACKOFF)
                self._log.warning(
                    "child_died",
                    child=child.name,
                    how="hung, killed" if hung else how,
                    restart_in_ms=round(child.life.pause_s * 1_000),
                )
                child.pause = trio.CancelScope()
            case Action.GIVE_UP:
                child.row.set(Word.STATE, State.FAILED)
                reason = child.reason or f"died {child.life.starts} times, last: {how}"
                self._log.error("child_failed", child=child.name, reason=reason, stays="down")
                self._judge_failure(child)
            case _:
                child.row.set(Word.STATE, State.STOPPED)
                self._log.info("child_stopped", child=child.name, how=how)

    def _judge_failure(self, child: _Child) -> None:
        """The rest goes on serving, unless there is no rest that could."""
        if self._plan.changes:
            self._fatal(
                "layout_change_failed",
                advice=f"nothing was changed; TOPICS_WAL_SHARDS={self._plan.old_shards} serves as before",
            )
        doors = [each for each in self._children.values() if each.spec.listener]
        if doors and all(each.life.life is Life.FAILED for each in doors):
            self._fatal("no_gateway_left")

    def _fatal(self, event: str, **fields: object) -> None:
        self._log.error(event, **fields)
        self._exit_code = 1
        self._stop_asked.set()

    # --- talking with children ------------------------------------------------------------------------

    def _tell(self, child: _Child, message: Message, fds: Sequence[int] = ()) -> None:
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

    async def _listen(self, child: _Child, process: ChildProcess) -> None:
        while True:
            await trio.lowlevel.wait_readable(process.channel.sock)
            if self._hear_nowait(child, process) is _Heard.END:
                # It can't be told anything any more; mostly this is only the first sign of its death.
                process.kill()
                return

    def _hear_nowait(self, child: _Child, process: ChildProcess) -> _Heard:
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
                if child.life.life is Life.STARTING:
                    took_ms = time.time_ns() // 1_000_000 - child.row[Word.STARTED_MS]
                    self._log.info("child_ready", child=child.name, pid=process.pid, took_ms=took_ms)
                child.life.handle(Event.READY)
                self._on_ready()
            case Failed(reason):
                child.reason = reason
                child.life.handle(Event.REFUSED)
            case Stopped():
                pass  # its exit follows
            case _:
                self._log.error("child_talks_nonsense", child=child.name, message=type(message).__name__)
        return _Heard.MESSAGE

    def _on_ready(self) -> None:
        def ready(child: _Child) -> bool:
            return child.life.life is Life.READY

        if self._stop_asked.is_set():
            return
        stores = [child for child in self._children.values() if child.spec.stores]
        if self._plan.changes and all(map(ready, stores)):
            self._commit_layout(stores)
        if not self._announced and all(map(ready, self._children.values())):
            self._announced = True
            self._row.set(Word.STATE, State.READY)
            shards = f"{self._plan.shards} shard{'' if self._plan.shards == 1 else 's'}"
            line = (
                f"topics {__version__} ready on {url(self._settings.host, self.port)} "
                f"({shards}, data in {self._settings.data_dir})"
            )
            try:
                print(line, flush=True)
            except OSError:
                pass  # nobody reads our stdout; that is no reason not to serve

    def _commit_layout(self, stores: list[_Child]) -> None:
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
            for child in self._children.values():
                if child.process is None or child.watch is None:
                    continue
                if child.watch.look(child.row[Word.HEARTBEAT]) and (child.life.handle(Event.HUNG) is Action.KILL):
                    self._log.warning("child_hangs", child=child.name, pid=child.process.pid)
                    child.process.kill()

    def _begin_bulletin(self, manager: ServiceManager) -> Bulletin:
        return Bulletin(
            [child.row for child in self._children.values()],
            serving=f"serving {url(self._settings.host, self.port)} from {self._settings.data_dir}",
            clock=trio.current_time,
            heartbeat_s=self._settings.heartbeat_ms / 1_000,
            watchdog_us=manager.address.watchdog_us,
        )

    async def _inform_manager(self, manager: ServiceManager) -> None:
        while True:
            self._tell_manager(manager, self._bulletin.look())
            await trio.sleep(self._bulletin.pause_s)

    def _tell_manager(self, manager: ServiceManager, news: Sequence[str]) -> None:
        error = manager.tell_nowait(news)
        if error is not None and not self._manager_deaf:
            self._log.warning("manager_not_told", socket=manager.address.socket, error=error)
        self._manager_deaf = error is not None

    async def _obey_signals(self, arrivals: AsyncIterator[int]) -> None:
        async for number in arrivals:
            name = signal.Signals(number).name
            if self._stop_asked.is_set():
                self._log.warning("already_stopping", signal=name)
            else:
                self._log.info("stopping", signal=name)
                self._stop_asked.set()

    async def _stop_all(self) -> None:
        """Rank by rank: those who talk to clients first, those who write the last snapshots at the end."""
        self._row.set(Word.STATE, State.STOPPING)
        if self._manager is not None:
            self._tell_manager(self._manager, self._bulletin.stopping())
        self._listener.close()
        for order in sorted({child.spec.stop_order for child in self._children.values()}):
            rank = [child for child in self._children.values() if child.spec.stop_order == order]
            for child in rank:
                self._stop(child)
            with trio.move_on_after(self._stop_timeout_s):
                for child in rank:
                    await child.over.wait()
            for child in rank:
                if child.process is not None and child.life.handle(Event.OVERDUE) is Action.KILL:
                    self._log.error("child_does_not_stop", child=child.name, pid=child.process.pid)
                    self._exit_code = 1
                    child.process.kill()
            for child in rank:
                await child.over.wait()

    def _stop(self, child: _Child) -> None:
        match child.life.handle(Event.STOP):
            case Action.SEND_STOP:
                self._tell(child, Stop())
            case Action.DONE:
                child.row.set(Word.STATE, State.STOPPED)
                child.pause.cancel()
        if not child.kept:
            child.over.set()

    def close(self) -> None:
        """After run(); the folder stays with whoever claimed it."""
        self._listener.close()
        for fd in self._bell_fds.values():
            os.close(fd)
        self._board.close()
        self._usage.close()


def _require_shared_memory(needed: int) -> None:
    if needed > free_bytes():
        raise StartRefused(
            f"the rings need {needed} bytes of shared memory and {free_bytes()} are free: enlarge /dev/shm "
            "(in a container --shm-size), or make the rings smaller with TOPICS_RING_BYTES"
        )


def _raise_open_files_limit() -> None:
    """As far as we may and need: each client connection is one, and children inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * limits.MAX_CONNECTIONS
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (ValueError, OSError) as exc:
        sys.stderr.write(f"could not raise the open files limit beyond {soft}: {exc}\n")
