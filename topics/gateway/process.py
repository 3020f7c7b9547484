"""The gateway process: accept, serve both lanes, dispatch to shards, until told to stop.

Stopping: requests that come now, but for health and metrics, are answered 503 shutting_down and their connections
closed; those under way are answered. Then the listening socket, which the supervisor holds too, is left alone.

Retiring, in a reload: nothing is accepted or read any more, long polls are answered with what there is, streams end as
at a stop, HTTP/2 clients are sent elsewhere. When everything that was asked is answered this process leaves its name to
its successor, which inherits the connections (http1/handover.py), and stays only for clients that read slowly.

Crash: connections break, new ones wait in the backlog of the listening socket.
"""

from __future__ import annotations

import gc
import select
import socket
import time
import traceback
from typing import TYPE_CHECKING

import trio

from topics import limits
from topics.actors.context import Context
from topics.actors.governor import Governor
from topics.actors.idle import Idle, spin_us
from topics.actors.link import Link
from topics.errors import RingPoisoned
from topics.gateway.access_log import AccessLog
from topics.gateway.admission.budget import Budget
from topics.gateway.admission.places import Places
from topics.gateway.admission.pressure import Pressure
from topics.gateway.api.queues import QueueHandlers
from topics.gateway.api.routers import RouterHandlers
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers, shutting_down
from topics.gateway.api.watch import Watches
from topics.gateway.auth import Guard
from topics.gateway.calls import Calls
from topics.gateway.http1 import handover
from topics.gateway.http1.door import Door
from topics.gateway.http1.head import Heads
from topics.gateway.http1.server import SHARE_NS, HotLane
from topics.gateway.http2.lane_loader import MODULE, LateLane
from topics.gateway.metrics.page import MetricsHandlers
from topics.gateway.metrics.refusals import Refusals
from topics.gateway.metrics.scrapes import Scrapes
from topics.gateway.origins import Origins
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.keys import Key
from topics.shm.counters import State, Word

if TYPE_CHECKING:
    from topics.gateway.http2.lane import ColdLane

LATER = (MODULE,)  # imported before this process takes the place of another, else while it serves
_GATHER = 3  # how often a round looks for more requests before it passes them on
_SWEEP_NS = 1_000_000_000
_SLICES_NS = 5_000_000  # what a round gives to large bodies and answers, beyond the first slice
_UNLIMITED = 2**62
_LAST_WORDS_NS = 300_000_000
_DRAIN_NS = 10_000_000_000  # how long requests under way may keep a stopping gateway
_RETIRING_LOOK_NS = 1_000_000
_TURNS = 10
_LEAVING_LOOK_S = 0.1
_LINKS_S = 0.3  # how long a gateway that begins waits for those that it can ask


async def run(context: Context) -> None:
    gateway = Gateway(context)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)  # requests make no cycles; what does is rare
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.cold.run)
        if context.inheritance is not None:
            nursery.start_soon(handover.inherit, context.inheritance, gateway.adopt)
        await gateway.wait_linked()
        context.ready()
        await gateway.serve()
        nursery.cancel_scope.cancel()


class Gateway:
    def __init__(self, context: Context) -> None:
        settings = context.settings
        self._context = context
        self._governor = Governor(
            lag_ms=settings.pressure_lag_ms, commit_ms=settings.pressure_commit_ms, on=settings.elastic
        )
        pressure = Pressure()
        if settings.elastic:
            rows = [context.board.row(f"shard-{shard}") for shard in range(context.shards)]
            pressure = Pressure(rows, self._governor)
        self._pressure = pressure
        peers = [*(f"shard-{shard}" for shard in range(context.shards)), "router", "queue"]
        self._all_linked = trio.Event()
        self._peer_rows = [context.board.row(name) for name in peers]
        self._calls = Calls(
            shards=context.shards,
            timeout_ms=settings.call_timeout_ms,
            pressure=pressure,
            state_of=lambda peer: self._peer_rows[peer].state,
        )
        self._feeds = Feeds(self._calls, shards=context.shards)
        self._slices = self._calls.slices
        self._guard = Guard(settings.api_keys, probes=settings.probe_auth)
        self._streams = Streams(settings=settings, calls=self._calls, feeds=self._feeds, guard=self._guard)
        self._refusals = Refusals(context.row)
        self._budget = self._streams.budget = Budget.of(settings, self._refusals.count)
        self._places = Places.of(settings, context.index)
        self._calls.on_unasked = self._streams.unasked
        self._calls.on_fault = self._fault
        for peer, link in context.links.items():
            self._link_up(peer, link)
        context.on_link_up = self._link_up
        context.on_link_down = self._link_down
        context.on_stop = self._stop
        context.on_hold = self._hold
        context.on_retire = self._retire
        self._holds: list[str] = []  # peers that we ask nothing new; they are not told yet that all is in their rings
        self._bequest: handover.Bequest | None = None
        self._turns = 0  # of other tasks, since we retire: a request that has just come is known after a few
        self._handlers = Handlers(
            settings,
            shards=context.shards,
            board=context.board,
            linked=self._calls.reachable,
            replacing=self._calls.holding.replacing,
            pressure=pressure,
            refusal=self._guard.refusal,
        )
        watches = Watches(self._streams, shards=context.shards)
        routers = RouterHandlers(peer=self._calls.router, board=context.board, linked=self._calls.reachable)
        queues = QueueHandlers(self._streams, peer=self._calls.queue, pressure=pressure)
        assert context.usage is not None
        metrics = MetricsHandlers(
            context.board,
            shards=context.shards,
            linked=self._calls.reachable,
            usage=context.usage,
            data_dir=settings.data_dir,
        )
        self._scrapes = Scrapes(metrics, self._calls, refused=self._refusals.count)
        self._scrapes.before_wave = self._say_occupancy
        routes = Routes(self._handlers, watches, routers, queues, self._scrapes)
        metrics.name_routes(routes.labels)
        self._key_names: dict[int, str] = {}
        self._name_keys(settings.api_keys)
        context.on_keys = self._take_keys
        slots = None
        if settings.api_keys:
            slots = context.usage.slots(context.index, most=settings.max_inflight_per_key or _UNLIMITED)
            slots.refused = lambda: self._refusals.count("max_inflight_per_key")
        meter = context.usage.meter(context.index) if settings.request_metrics else None
        self._prefix = f"{context.index}.{context.row[Word.GENERATION]}."
        logs_requests = settings.access_log or context.log.debugging
        self._access = AccessLog(context.log, prefix=self._prefix, names=self._key_names) if logs_requests else None

        def build_cold() -> ColdLane:
            from topics.gateway.http2.lane import ColdLane

            lane = ColdLane(
                settings=settings,
                routes=routes,
                handlers=self._handlers,
                calls=self._calls,
                watches=watches,
                guard=self._guard,
                prefix=self._prefix,
                slots=slots,
                meter=meter,
                access=self._access,
                budget=self._budget,
                places=self._places,
            )
            lane.flush = self._flush  # type: ignore[method-assign]
            lane.on_closed = self._say_occupancy  # type: ignore[method-assign]
            return lane

        self.cold = LateLane(build_cold, places=self._places)
        processes = len(context.board.rows())
        self._idle = Idle(
            context.bell,
            spin_us=spin_us(settings.spin_us, processes=processes),
            has_work=self._has_work,
            next_deadline_ns=self._next_due_ns,
            row=context.row,
        )
        self._hot = HotLane(
            settings=settings,
            heads=Heads(
                routes,
                max_body_bytes=settings.max_body_bytes,
                guard=self._guard,
                origins=Origins(settings),
                lines=logs_requests,
            ),
            handlers=self._handlers,
            calls=self._calls,
            epoll=self._idle.epoll,
            hand_over=self.cold.hand_over,
            prefix=self._prefix,
            pressure=pressure,
            slots=slots,
            meter=meter,
            access=self._access,
            budget=self._budget,
            places=self._places,
        )
        self._hot.on_late = context.beat
        self._streams.publish = self._hot.add_plain
        self._streams.send_runs = self._hot.send_runs
        assert context.listener is not None
        self._listener = context.listener
        self._listener.setblocking(False)
        self._others = [
            row for row in context.board.rows() if row.name.startswith("gateway-") and row.name != context.row.name
        ]
        self._door = Door(
            self._listener,
            self._hot,
            self._places,
            most=self._places.most,
            log=context.log,
            leave_to_others=self._others_have_room,
            refused=self._refusals.count,
        )
        self._refused_before = context.row[Word.RING_FULL]  # by processes before this one
        self._accepting = False
        self._stop_by_ns = 0
        self._stop_from_ns = 0  # the other lane's last words take a moment to get to their sockets
        self._sweep_ns = 0
        self._say_occupancy()

    async def wait_linked(self) -> None:
        """Processes that started after us have said so while we were being imported. Whoever hears that we are ready
        may ask for any of them at once; one that is down is not waited for."""
        with trio.move_on_after(_LINKS_S):
            await self._all_linked.wait()

    def _set_accepting(self, accepting: bool) -> None:
        if accepting != self._accepting:
            self._accepting = accepting
            if accepting:
                self._idle.register(self._listener.fileno(), select.EPOLLIN | select.EPOLLEXCLUSIVE)
            else:
                self._idle.epoll.unregister(self._listener.fileno())

    async def serve(self) -> None:
        calls, hot, idle, streams = self._calls, self._hot, self._idle, self._streams
        listener_fd = self._listener.fileno()
        self._set_accepting(True)
        self._sweep_ns = time.monotonic_ns() + _SWEEP_NS
        while not (self._stop_by_ns and self._stopped()):
            if self._bequest is not None:
                await trio.lowlevel.checkpoint()
                self._turns += 1
            events = await idle.wait(expecting=len(calls) > 0, linger=not self.cold.connections)
            hot.begin_round()
            streams.now_ns = time.monotonic_ns()
            self._govern(streams.now_ns)
            if self._guard.has_news():
                self._revoke()
            hot.go_on()
            for _ in range(_GATHER):
                for fd, event in events:
                    if fd == listener_fd:
                        if not self._door.accept():
                            self._set_accepting(False)
                    else:
                        hot.handle(fd, event)
                # What arrived meanwhile joins this round: larger rounds, fewer wake-ups of the shards.
                if len(events) < 2 or hot.late or not (events := idle.poll()):
                    break
            hot.send_runs()
            calls.flush()
            try:
                calls.drain(time.perf_counter_ns() + SHARE_NS)
            except RingPoisoned as error:
                self._context.log.error("ring poisoned", reason=str(error))
                raise
            if hot.dirty:
                hot.send_dirty(time.perf_counter_ns() + SHARE_NS)
                hot.send_runs()  # an answer that went out may have let more requests in
                calls.flush()
            if self._slices:
                self._context.beat()
                self._slices.run(time.perf_counter_ns() + _SLICES_NS)
                hot.send_dirty()
                calls.flush()
            if self._holds:
                self._say_held()
            if self._access is not None:
                self._access.flush()
            now = time.monotonic_ns()
            if (due := streams.next_due_ns) is not None and now >= due:
                streams.tick(now)
                hot.send_dirty()
            if now >= self._sweep_ns:
                self._sweep_ns = now + _SWEEP_NS
                self._sweep(now)
        hot.send_dirty()  # what the last round had no time for
        if self._bequest is not None:
            await self._leave(self._bequest)
        self._door.close()
        idle.close()

    def _has_work(self) -> bool:
        return bool(self._hot.unfinished or self._hot.dirty or self._slices) or self._calls.has_answers()

    def _next_due_ns(self) -> int | None:
        """A gateway without connections need not sweep."""
        if self._bequest is not None:
            return time.monotonic_ns() + _RETIRING_LOOK_NS
        calm = self._accepting and not self._hot.connections and not len(self._streams)
        calm = calm and not self._calls.holding.busy and not self._scrapes.waiting
        words = self._context.row.words  # one more sweep says that nobody is here any more
        calm = calm and words[Word.CONNECTIONS] == self.cold.connections and not words[Word.BUFFERED_BYTES]
        if calm and not self._stop_by_ns and not len(self._calls.parking) and not self._governor.level:
            return None
        waits = (
            self._streams.next_due_ns,
            self._calls.parking.next_due_ns,
            self._calls.holding.next_due_ns,
            self._governor.next_tick_ns,
            self._scrapes.next_due_ns,
        )
        soonest = min([self._sweep_ns, *(due for due in waits if due is not None)])
        return min(soonest, self._stop_from_ns) if self._stop_from_ns > time.monotonic_ns() else soonest

    def _govern(self, now_ns: int) -> None:
        governor, pressure = self._governor, self._pressure
        governor.round(self._idle.round_us)
        if governor.tick(now_ns):
            self._context.row.words[Word.PRESSURE] = governor.level
        if governor.has_news(now_ns):
            self._context.log.info("pressure", step=governor.level.name.lower(), pressure=round(governor.pressure, 2))
        pressure.look()
        self._calls.release(now_ns)
        self._scrapes.step()

    def _flush(self) -> None:
        """What was asked outside of a round goes out now."""
        self._hot.send_runs()
        self._calls.flush()
        if len(self._calls.parking) or self._slices or self._scrapes.waiting:
            self._context.bell.ring_always()  # the loop may sleep for longer than these should wait

    def _sweep(self, now: int) -> None:
        self._calls.expire()
        self._streams.sweep(now)
        self._hot.sweep()
        self._calls.flush()
        self._door.sweep()
        self._set_accepting(not self._stop_by_ns and not self._door.is_full)
        words = self._context.row.words
        words[Word.STREAMS] = len(self._streams)
        words[Word.FEEDS] = len(self._feeds)
        words[Word.PUSHES] = self._feeds.pushes
        self._say_occupancy()
        words[Word.REQUESTS] = self._hot.requests + self.cold.requests
        words[Word.RING_FULL] = self._refused_before + self._calls.refused

    def _say_occupancy(self) -> None:
        """Of budgets that clients share: how much of each is taken, and of how much."""
        if self._context.left:
            return  # the row is our successor's
        words = self._context.row.words
        words[Word.CONNECTIONS] = len(self._hot.connections) + self.cold.connections
        words[Word.CONNECTIONS_LIMIT] = self._places.most
        words[Word.BUFFERED_BYTES] = self._budget.held
        words[Word.BUFFERED_BYTES_LIMIT] = self._budget.most

    def _others_have_room(self) -> bool:
        """All gateways listen to the same socket: what finds no place here finds one there."""
        return any(
            [row.state is State.READY and row[Word.CONNECTIONS] < row[Word.CONNECTIONS_LIMIT] for row in self._others]
        )

    # --- callbacks ---

    def _link_up(self, peer: str, link: Link) -> None:
        if peer == "router":
            self._calls.link_up(self._calls.router, link)
        elif peer == "queue":
            self._calls.link_up(self._calls.queue, link)
            self._streams.works.link_up()
            self._calls.flush()
        elif peer.startswith("shard-"):
            shard = int(peer.removeprefix("shard-"))
            self._calls.link_up(shard, link)
            self._streams.link_up(shard)
            self._calls.flush()
        if self._calls.holding.busy:
            self._calls.release(time.monotonic_ns())
            self._calls.flush()
        if all([self._calls.linked(number) for number in range(len(self._peer_rows))]):
            self._all_linked.set()

    def _link_down(self, peer: str) -> None:
        if peer in ("router", "queue"):
            self._calls.link_down(self._calls.router if peer == "router" else self._calls.queue)
            self._hot.send_dirty()
        elif peer.startswith("shard-"):
            shard = int(peer.removeprefix("shard-"))
            self._calls.link_down(shard)
            self._streams.link_down(shard)
            self._hot.send_dirty()

    def _hold(self, peer: str) -> None:
        """A peer is about to be replaced: what clients want of it waits here."""
        self._hot.send_runs()
        self._calls.hold(self._calls.number(peer))
        self._holds.append(peer)
        self._say_held()
        self._context.bell.ring_always()

    def _say_held(self) -> None:
        self._calls.flush()
        for peer in [peer for peer in self._holds if self._calls.has_sent_all(self._calls.number(peer))]:
            self._holds.remove(peer)
            self._context.held(peer)

    def _take_keys(self, keys: tuple[Key, ...]) -> None:
        """The supervisor has read them again."""
        self._name_keys(keys)
        self._guard.replace(keys)
        self._revoke()

    def _name_keys(self, keys: tuple[Key, ...]) -> None:
        """Those of before stay: requests under way have their numbers."""
        for key in keys:
            self._key_names.pop(key.number, None)
            if key.name:
                self._key_names[key.number] = key.name

    def _revoke(self) -> None:
        """Keys have ended, or have other rights: so has what was opened with them, and long polls are asked again."""
        self._hot.revoke(self._guard.refusal)
        streams = self._streams.revoke()
        self._calls.answer_polls()
        self._calls.flush()
        self._hot.send_dirty()
        self._context.log.info("keys_judged_again", streams_ended=streams)
        self._context.bell.ring_always()

    def adopt(self, sock: socket.socket, received: bytes) -> None:
        """A connection that our predecessor has passed on."""
        try:
            self._places.take(sock, sock.getpeername()[0], always=True)
        except OSError:
            pass  # it has left, and is closed when that is noticed
        self._hot.adopt(sock, received)
        self._context.bell.ring_always()

    def _retire(self, heir: socket.socket | None) -> None:
        self._set_accepting(False)
        self._hot.retire()
        self.cold.retire()
        self._calls.answer_polls()
        self._scrapes.hurry()
        self._streams.end_all()
        self._hot.send_runs()
        self._calls.flush()
        self._hot.send_dirty()
        self._bequest = handover.Bequest(self._hot, heir)
        self._stop_from_ns = time.monotonic_ns()
        self._stop_by_ns = self._stop_from_ns + _DRAIN_NS
        self._context.bell.ring_always()

    async def _leave(self, bequest: handover.Bequest) -> None:
        """Everything is answered. The name goes to our successor, and clients with it as soon as they have read all."""
        hot, epoll = self._hot, self._idle.epoll
        for peer in range(len(self._peer_rows)):
            self._calls.link_down(peer)
        hot.send_dirty()
        self._sweep(time.monotonic_ns())
        hot.forget_counters()
        self._refusals.forget()
        self.cold.forget_counters()
        self._idle.mute()
        self._context.leave()
        until = trio.current_time() + limits.LEAVE_MS / 1_000
        swept = trio.current_time()
        while trio.current_time() < until:
            await bequest.step()
            if not hot.connections and not self.cold.connections:
                break
            with trio.move_on_after(_LEAVING_LOOK_S):
                await trio.lowlevel.wait_readable(epoll.fileno())
            for fd, event in epoll.poll(0):
                hot.handle(fd, event)
            hot.send_dirty()
            if trio.current_time() - swept > 1:
                swept = trio.current_time()
                hot.sweep()
        bequest.close()

    def _stop(self) -> None:
        if self._context.left:
            return
        self._handlers.draining = True
        self._calls.end_polls(shutting_down())
        self._scrapes.hurry()
        self._streams.end_all()
        self._calls.flush()
        self._hot.send_dirty()
        now = time.monotonic_ns()
        self._stop_by_ns = now + _DRAIN_NS
        self._stop_from_ns = now + _LAST_WORDS_NS if self.cold.connections else now
        self._context.bell.ring_always()

    def _stopped(self) -> bool:
        """Everything asked is answered, and streams of the other lane have said their last word, or too late."""
        now = time.monotonic_ns()
        if self._bequest is not None:
            done = len(self._calls) == 0 and not self.cold.unanswered and self._turns >= _TURNS
        else:
            done = len(self._calls) == 0 and not self.cold.streams and now >= self._stop_from_ns
        return done or now > self._stop_by_ns

    def _fault(self, error: Exception, id: int) -> None:
        trace = "".join(traceback.format_exception(error))
        if id:
            self._context.log.error("request failed", id=f"{self._prefix}{id:x}", trace=trace)
        else:
            self._context.log.error("connection failed", trace=trace)
