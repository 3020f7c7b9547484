"""The router process: the rules, one forwarder per pair of topics, and the commands that change them.

Rules change one at a time, and only after everything copied under the old ones is in segments at the destination: what
a crash makes copy again is then made by the same rules. A rule counts from the moment it is in the file.

A ring is closed while none of its pairs copies, and after all that they have copied is in segments; if a shard of it is
away, it is not closed. It may be opened at any time: how far its records go is in the rules that stay (Past), and what
their forwarders do is the same before and after.

    crash between                       at the next start
    topics made, rule not in the file   a pipe without a rule is closed; the topics stay
    rule in the file, pipe not open     the forwarder opens it
    topic dropped, rules not            its forwarders find it gone, and the rules go

Retiring, in a reload: commands under way are finished, forwarders just end; the next process goes on where the
destinations say.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import trio

from topics.actors import messages
from topics.actors.context import Context
from topics.actors.idle import Idle
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.actors.rpc import Asks, Unavailable
from topics.errors import ApiError, CorruptData, FormatError, throttled_by, topic_not_found
from topics.keys import seen
from topics.router.forwarder import Forwarder, TopicGone
from topics.router.mirror import HOME, Mirror
from topics.router.rules import Rules
from topics.router.source import Source
from topics.router.store import RuleStore
from topics.shm.counters import Word
from topics.storage.config import TopicConfig, owner_of_name
from topics.storage.routers import Rule

_RECONCILE_RETRY_S = 0.2
_TOLD_LATER_S = 10.0
_OPENING_S = 1.0
_RETIRE_S = 5.0  # for commands that are under way when a reload replaces this process
_LOOK_NS = 10_000_000
_NICE = 10  # forwarding is off the acknowledgement's path: whoever is on it goes first where processors are few
_NO_HEADS: Mapping[str, int] = MappingProxyType({})
_NONE_COPIED: Mapping[tuple[str, str], int] = MappingProxyType({})
_OPTIONS = ("preserve_node", "preserve_tag", "filter", "allow_cycle", "guarantee")


async def run(context: Context) -> None:
    os.nice(_NICE)
    try:
        router = Router(context)
    except (CorruptData, FormatError) as error:
        context.log.error("rules refused", reason=str(error))
        context.fail(str(error))
    async with trio.open_nursery() as nursery:
        router.start(nursery)
        context.ready()
        await router.serve()
        nursery.cancel_scope.cancel()


class Router:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._shards = context.shards
        self._store = RuleStore(context.settings.data_dir)
        self._rules = self._store.load()
        self._asks = Asks(shards=context.shards)
        self._asks.on_unasked = self._unasked
        self._gateways: dict[str, Link] = {}
        self._mirror = Mirror(ttl_ms=context.settings.session_ttl_ms, now_ms=lambda: time.monotonic_ns() // 1_000_000)
        self._sources: dict[int, Source] = {}  # by topic id
        self._forwarders: dict[tuple[str, str], Forwarder] = {}
        self._ended_records = 0
        self._gone_with: dict[str, tuple[float, list[str]]] = {}  # when a topic was found gone, and what went with it
        self._changes = trio.Lock()
        self._stopping = False
        for peer, link in context.links.items():
            self._link_up(peer, link)
        context.on_link_up = self._link_up
        context.on_link_down = self._link_down
        context.on_stop = self._stop
        context.on_hold = self._hold
        context.on_retire = self._retire
        context.on_beat = self.publish_counters  # not in each round: there may be thousands of routers
        self._holds: list[str] = []  # shards that have not been told yet that all is in their rings
        self._obeying = 0
        self._retire_by: float | None = None
        self._handlers: dict[int, Callable[[Any], Awaitable[Any]]] = {
            Op.PUT_ROUTER: self._put,
            Op.GET_ROUTER: self._get,
            Op.DROP_ROUTER: self._drop,
            Op.LIST_ROUTERS: self._list,
            Op.DROP_ROUTERS_OF: self._drop_of,
        }

    # --- serving ---

    def start(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._context.row.words[Word.ROUTERS] = len(self._rules)
        for source, dest in {(rule.source, rule.dest) for rule in self._rules}:
            self._begin(source, dest)
        for shard in range(self._shards):
            nursery.start_soon(self._reconcile, shard)

    async def serve(self) -> None:
        context = self._context
        idle = Idle(
            context.bell, spin_us=0, has_work=self._has_work, next_deadline_ns=self._next_deadline_ns, row=context.row
        )
        while not self._stopping and not self._has_retired():
            await idle.wait(expecting=False, linger=False)
            self._asks.drain()
            for link in list(self._gateways.values()):
                taken = link.drain()
                if context.log.debugging:
                    context.trace(link, taken)
                for message in taken:
                    self._obeying += 1  # before the task begins: whoever looks in between must know
                    self._nursery.start_soon(self._obey, message, link)
            self._say_held()
            await trio.lowlevel.checkpoint()
        idle.close()

    def publish_counters(self) -> None:
        words = self._context.row.words
        forwarders = self._forwarders.values()
        words[Word.FORWARDED] = self._ended_records + sum([forwarder.records for forwarder in forwarders])
        words[Word.ROUTER_LAG] = max([forwarder.lag for forwarder in forwarders], default=0)

    def _has_work(self) -> bool:
        return self._asks.has_answers() or any([link.has_work() for link in self._gateways.values()])

    def _next_deadline_ns(self) -> int | None:
        return time.monotonic_ns() + _LOOK_NS if self._retire_by is not None or self._holds else None

    async def _obey(self, message: bytes, link: Link) -> None:
        try:
            await self._carry_out(message, link)
        finally:
            self._obeying -= 1

    async def _carry_out(self, message: bytes, link: Link) -> None:
        op, _, correlation, _, head, _ = messages.unpack(message)
        try:
            answer = await self._handlers[op](messages.decode_request(op, head))
            reply = messages.pack(Op(op), correlation, answer)
        except ApiError as error:
            reply = messages.pack_failure(op, correlation, error)
        except Unavailable:
            away = ApiError("shard_unavailable", "a shard that this needs is not serving. Retry", retry_after_s=1)
            reply = messages.pack_failure(op, correlation, away)
        if self._gateways.get(link.peer) is link:
            link.writer.send_always(reply)
            link.flush()

    # --- links ---

    def _link_up(self, peer: str, link: Link) -> None:
        if peer.startswith("shard-"):
            shard = int(peer.removeprefix("shard-"))
            self._asks.link_up(shard, link)
            if shard == HOME:
                for session in self._mirror.told():
                    link.writer.send_always(messages.pack(Op.RESTORE_SESSION, 0, session))
                link.flush()
        else:
            self._gateways[peer] = link

    def _link_down(self, peer: str) -> None:
        if peer.startswith("shard-"):
            shard = int(peer.removeprefix("shard-"))
            self._asks.link_down(shard)
            for source in self._sources.values():
                if source.shard == shard:
                    source.unfollowed()
            for forwarder in self._forwarders.values():
                if forwarder.dest_shard == shard:
                    forwarder.dest_gone()
        else:
            self._gateways.pop(peer, None)

    def _hold(self, peer: str) -> None:
        if peer.startswith("shard-"):
            self._asks.hold(int(peer.removeprefix("shard-")))
            self._holds.append(peer)
        else:
            self._context.held(peer)
        self._say_held()
        self._context.bell.ring_always()

    def _say_held(self) -> None:
        for peer in [peer for peer in self._holds if self._asks.has_sent_all(int(peer.removeprefix("shard-")))]:
            self._holds.remove(peer)
            self._context.held(peer)

    def _retire(self, _: object) -> None:
        self._retire_by = trio.current_time() + _RETIRE_S
        self._context.bell.ring_always()

    def _has_retired(self) -> bool:
        if self._retire_by is None:
            return False
        links = self._gateways.values()
        asked = self._obeying or any([link.has_work() or link.writer.outbox_bytes for link in links])
        return not asked or trio.current_time() > self._retire_by

    def _stop(self) -> None:
        self._stopping = True
        self._context.bell.ring_always()

    def _unasked(self, shard: int, message: bytes) -> None:
        op = message[0]
        if op == Op.KEEP_SESSION:
            self._mirror.keep(messages.decode_answer(message)[0])
            return
        _, correlation = messages.unpack_correlation(message)
        for source in self._sources.values():
            if source.shard == shard and source.correlation == correlation:
                if op == Op.HEAD_MOVED:
                    source.moved(messages.decode_answer(message)[0].head_seq)
                elif op == Op.TOPIC_GONE:
                    source.unfollowed()  # its forwarders will find out
                return

    # --- forwarders ---

    def _begin(self, source: str, dest: str) -> None:
        """Start copying from one topic to another, by the rules as they are now."""
        rules = self._rules.between(source, dest)
        known = self._sources.get(rules[0].source_id)
        if known is None:
            known = self._sources[rules[0].source_id] = Source(
                self._asks, topic=source, topic_id=rules[0].source_id, shard=owner_of_name(source, self._shards)
            )
        known.users += 1
        forwarder = Forwarder(
            self._asks,
            known,
            rules,
            dest_shard=owner_of_name(dest, self._shards),
            ring_hops=self._rules.ring_hops(source, dest),
        )
        self._forwarders[source, dest] = forwarder
        self._nursery.start_soon(self._forward, forwarder, known)

    async def _forward(self, forwarder: Forwarder, source: Source) -> None:
        try:
            await forwarder.run()
        except TopicGone as gone:
            self._nursery.start_soon(self._topic_gone, gone.topic, forwarder)
        finally:
            source.users -= 1
            if source.users == 0:
                self._sources.pop(source.topic_id, None)
                if source.correlation:
                    self._asks.unfollow(source.shard, source.correlation)

    async def _end(self, source: str, dest: str, *, forced: bool = False) -> int:
        """Stop copying, and see that all that was copied is on disk: the rules may change then. Forced: even if it
        can't be. Returns up to which seq of the source that is."""
        forwarder = self._forwarders.pop((source, dest), None)
        if forwarder is None:
            return 0
        await forwarder.stop()
        self._ended_records += forwarder.records
        try:
            return await self._close(forwarder.pipe, keep=True)
        except (Unavailable, ApiError):
            if not forced:
                self._begin(source, dest)  # nothing has changed
                raise
            return 0

    async def _close_for_good(self, pipe: messages.PipeRow) -> None:
        """Its rules are gone. The lock is held: nobody makes new ones for it meanwhile."""
        try:
            await self._close(pipe, keep=False)
        except (Unavailable, ApiError):
            self._nursery.start_soon(self._close_later, pipe)

    async def _close_later(self, pipe: messages.PipeRow) -> None:
        """When its shard is back, unless it is in use again by then."""
        while True:
            await trio.sleep(_RECONCILE_RETRY_S)
            async with self._changes:
                if any((rule.dest_id, rule.source_id) == (pipe.topic_id, pipe.source_id) for rule in self._rules):
                    return
                try:
                    await self._close(pipe, keep=False)
                    return
                except (Unavailable, ApiError):
                    continue

    async def _close(self, pipe: messages.PipeRow, *, keep: bool) -> int:
        head = messages.ClosePipe(pipe.topic, pipe.topic_id, pipe.source_id, keep)
        closed, _ = await self._asks.ask(owner_of_name(pipe.topic, self._shards), Op.CLOSE_PIPE, head)
        return closed.at or 0

    async def _update_rings(self) -> None:
        """A router that came or went may have closed or opened a ring: the others in it, or behind it, go on by what
        their rules say now. Nothing has to be settled for that, and a shard of the ring may be away."""
        for (source, dest), forwarder in list(self._forwarders.items()):
            rules = self._rules.between(source, dest)
            now = self._rules.ring_hops(source, dest), [rule.past for rule in rules]
            if rules and now != (forwarder.ring_hops, [rule.past for rule in forwarder.rules]):
                await forwarder.stop()
                self._ended_records += forwarder.records
                self._begin(source, dest)

    async def _topic_gone(self, topic: str, forwarder: Forwarder) -> None:
        """Its rules meant a life of the topic that is over."""
        async with self._changes:
            pipe = forwarder.pipe
            gone = self._rules.meaning(topic, pipe.topic_id if topic == pipe.topic else pipe.source_id)
            self._note_gone(topic, await self._remove(gone, forced=True))

    async def _remove_past(self, topic: str) -> list[str]:
        """Rules that mean a life of this topic which is over go; those of the next life, which may be there already,
        have nothing to do with it. The lock is held."""
        if not self._rules.touching(topic):
            return []
        life = await self._position(topic)
        gone = self._rules.not_meaning(topic, 0 if life is None else life.topic_id)
        return await self._remove(gone, forced=True) if gone else []

    def _note_gone(self, topic: str, removed: list[str]) -> None:
        """Whoever deleted the topic is about to ask what went with it."""
        if removed:
            self._context.log.info("routers removed with their topic", topic=topic, routers=",".join(removed))
            since, before = self._gone_with.get(topic, (0.0, []))
            lately = before if trio.current_time() - since < _TOLD_LATER_S else []
            self._gone_with[topic] = (trio.current_time(), [*lately, *removed])

    async def _reconcile(self, shard: int) -> None:
        """Close pipes that no rule knows: a crash came between."""
        while True:
            await self._asks.wait_linked(shard)
            try:
                listed, _ = await self._asks.ask(shard, Op.LIST_PIPES, messages.ListPipes())
                for row in listed.rows:
                    async with self._changes:
                        if not any(
                            (rule.dest_id, rule.source_id) == (row.topic_id, row.source_id) for rule in self._rules
                        ):
                            self._context.log.info("closing a pipe without a router", topic=row.topic)
                            await self._close(row, keep=False)
                return
            except (Unavailable, ApiError):
                await trio.sleep(_RECONCILE_RETRY_S)

    # --- commands ---

    async def _put(self, request: messages.PutRouter) -> messages.RouterRow:
        async with self._changes:
            topics = {request.source: None, request.dest: None}
            if (existing := self._rules.get(request.router)) is not None:
                topics |= {existing.source: None, existing.dest: None}
            for topic in topics:  # a rule whose topic has gone is none, though nobody may have told us yet
                self._note_gone(topic, await self._remove_past(topic))
            existing = self._rules.get(request.router)
            if existing is None:
                return await self._create(request)
            if (existing.source, existing.dest) != (request.source, request.dest):
                source, dest = seen(existing.source, request.prefixes), seen(existing.dest, request.prefixes)
                raise ApiError(
                    "topic_exists_incompatible",
                    f'router "{request.router}" goes from "{source}" to "{dest}"; delete it and create another',
                    {"reason": "router_repoint_forbidden", "source": source, "dest": dest},
                )
            changed = msgspec.structs.replace(existing, **{option: getattr(request, option) for option in _OPTIONS})
            if changed != existing:
                if existing.allow_cycle and not changed.allow_cycle:
                    self._rules.check_new(
                        source=changed.source, dest=changed.dest, allow_cycle=False, prefixes=request.prefixes
                    )
                await self._end(changed.source, changed.dest)
                try:
                    self._save([changed], gone=[])
                finally:
                    self._begin(changed.source, changed.dest)
            return self._row(changed)

    async def _create(self, request: messages.PutRouter) -> messages.RouterRow:
        source, dest = request.source, request.dest
        most = self._context.settings.max_routers
        if most and len(self._rules) >= most:
            raise throttled_by("max_routers", most, "delete routers you no longer need")
        self._rules.check_new(source=source, dest=dest, allow_cycle=request.allow_cycle, prefixes=request.prefixes)
        if await self._position(dest) is None and not request.create_dest:
            raise topic_not_found(dest)
        found = await self._ensure_both(source, dest)
        same = self._rules.between(source, dest)
        rule = Rule(
            router=request.router,
            source=source,
            dest=dest,
            source_id=found[0].topic_id,
            dest_id=found[1].topic_id,
            since=found[0].head_seq,
            created_ms=time.time_ns() // 1_000_000,
            past=same[0].past if same else None,
            **{option: getattr(request, option) for option in _OPTIONS},
        )
        ring = self._rules.closed_by(source, dest)
        ended: dict[tuple[str, str], int] = {}
        copied = {pair: forwarder.at for pair, forwarder in self._forwarders.items()} if ring else {}
        try:
            for pair in [(source, dest), *ring]:
                ended[pair] = await self._end(*pair)
            heads = {topic: await self._head(topic) for topic in {topic for pair in ring for topic in pair}}
            if ring:
                rule = msgspec.structs.replace(rule, since=heads[source])
            self._save([rule], gone=[], heads=heads, copied=copied | ended)
            await self._update_rings()
        finally:
            for pair in ended:
                if self._rules.between(*pair):
                    self._begin(*pair)
        return self._row(rule, created=True)

    async def _get(self, request: messages.GetRouter) -> messages.RouterRow:
        rule = self._rules.get(request.router)
        if rule is None:
            raise ApiError("router_not_found", f'router "{request.router}" does not exist', {"router": request.router})
        if (forwarder := self._forwarders.get((rule.source, rule.dest))) is not None:
            with trio.move_on_after(_OPENING_S):  # the destination knows how much was forwarded
                await forwarder.opened.wait()
        return self._row(rule)

    async def _drop(self, request: messages.DropRouter) -> messages.RoutersDropped:
        async with self._changes:
            rule = self._rules.get(request.router)
            if rule is None:
                return messages.RoutersDropped([])
            return messages.RoutersDropped(await self._remove([rule], forced=False))

    async def _drop_of(self, request: messages.DropRoutersOf) -> messages.RoutersDropped:
        async with self._changes:
            removed = await self._remove_past(request.topic)
            since, before = self._gone_with.pop(request.topic, (0.0, []))
            if trio.current_time() - since < _TOLD_LATER_S:
                removed = sorted({*removed, *before})  # forwarders were quicker to notice than we were to be told
            return messages.RoutersDropped(removed)

    async def _list(self, request: messages.ListRouters) -> messages.RoutersListed:
        # Seen names are compared: who asks for a name that it may not touch would learn whether there is such a topic.
        found = sorted(
            (
                rule
                for rule in self._rules
                if rule.router > request.after
                and rule.router.startswith(request.prefix)
                and rule.router.startswith(request.prefixes or ("",))
                and request.source in (None, seen(rule.source, request.prefixes))
                and request.dest in (None, seen(rule.dest, request.prefixes))
            ),
            key=lambda rule: rule.router,
        )
        page = [self._row(rule) for rule in found[: request.limit]]
        return messages.RoutersListed(page, len(found) > request.limit)

    # --- what commands are made of ---

    async def _remove(self, rules: list[Rule], *, forced: bool) -> list[str]:
        """Take rules out; those that shared a pipe with them go on. Forced: their topic is gone already."""
        pairs = {(rule.source, rule.dest): rule for rule in rules}
        for source, dest in pairs:
            await self._end(source, dest, forced=forced)
        try:
            self._save([], gone=rules)
        except ApiError:
            for source, dest in pairs:
                self._begin(source, dest)
            raise
        for (source, dest), rule in pairs.items():
            if self._rules.between(source, dest):
                self._begin(source, dest)
            else:
                await self._close_for_good(messages.PipeRow(dest, rule.dest_id, rule.source_id, 0))
        await self._update_rings()
        return sorted(rule.router for rule in rules)

    def _save(
        self,
        put: list[Rule],
        *,
        gone: list[Rule],
        heads: Mapping[str, int] = _NO_HEADS,
        copied: Mapping[tuple[str, str], int] = _NONE_COPIED,
    ) -> None:
        """Change the rules, here and on disk; or neither. heads: of the sources in a ring that is closed by it; copied:
        how far pairs have come then."""
        changed = Rules(self._rules)
        for rule in put:
            changed.put(rule)
        for rule in gone:
            changed.remove(rule.router)
        changed.turn(self._rules, heads=heads, copied=copied)
        try:
            self._store.save(changed)
        except OSError as error:
            self._context.log.error("rules not saved", reason=str(error))
            raise ApiError("storage_full", f"the rules could not be saved: {error.strerror}", retry_after_s=5) from None
        self._rules = changed
        self._context.row.words[Word.ROUTERS] = len(changed)

    def _row(self, rule: Rule, *, created: bool = False) -> messages.RouterRow:
        forwarder = self._forwarders.get((rule.source, rule.dest))
        total = forwarder.forwarded.get(rule.router, 0) if forwarder is not None else 0
        return messages.RouterRow(
            router=rule.router,
            source=rule.source,
            dest=rule.dest,
            preserve_node=rule.preserve_node,
            preserve_tag=rule.preserve_tag,
            filter=rule.filter,
            allow_cycle=rule.allow_cycle,
            guarantee=rule.guarantee,
            forwarded_total=total,
            created=created,
        )

    async def _position(self, topic: str) -> messages.Position | None:
        head = messages.Positions([topic], touch=False)
        found, _ = await self._asks.ask(owner_of_name(topic, self._shards), Op.POSITIONS, head)
        position: messages.Position | None = found.found[0]
        return position

    async def _head(self, topic: str) -> int:
        position = await self._position(topic)
        return 0 if position is None else position.head_seq

    async def _ensure_both(self, source: str, dest: str) -> tuple[messages.Position, messages.Position]:
        existed = await self._position(source) is not None
        first = await self._ensure(source)
        try:
            return first, await self._ensure(dest)
        except ApiError:
            if not existed:  # no phantom of a router that was refused
                head = messages.DropTopic(source, True, undo=True)
                await self._asks.ask(owner_of_name(source, self._shards), Op.DROP_TOPIC, head)
            raise

    async def _ensure(self, topic: str) -> messages.Position:
        """Where a topic stands; it is made if there is none."""
        position = await self._position(topic)
        if position is None:
            head = messages.PutTopic(topic, TopicConfig(), None, create_only=True)
            await self._asks.ask(owner_of_name(topic, self._shards), Op.PUT_TOPIC, head)
            position = await self._position(topic)
        if position is None:
            raise topic_not_found(topic)
        return position
