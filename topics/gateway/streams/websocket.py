"""A WebSocket: subscribe, unsubscribe, publish and ping over one connection.

RFC 6455 is the business of the `websockets` package, as a state machine without IO, which is given large frames in
pieces (cutting.py); what we send to many is framed once (frames.py). Rules: what can't be understood is answered with
an error frame and the socket stays usable; commands are taken in order, and a subscribe is complete before the next one
is looked at; publishes may be out in numbers, and a client with too many of them, or that does not read its answers, is
not read from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import OPEN, SERVER, Protocol

from topics import limits
from topics.actors import messages
from topics.actors.messages import Gap, Op
from topics.errors import ApiError, invalid
from topics.gateway.api import positions
from topics.gateway.api.schemas import check_name
from topics.gateway.api.topics import append_json
from topics.gateway.api.types import Call, Outcome, Response
from topics.gateway.api.watch_schemas import (
    Command,
    Ping,
    Publish,
    RequestId,
    Subscribe,
    Unsubscribe,
    decode_command,
    decode_publish,
    request_id_of,
)
from topics.gateway.auth import check_names, check_scope, owner_of
from topics.gateway.http1.append_batch import PlainRoute
from topics.gateway.large.decoder import DIRECT_BYTES, LargeBody
from topics.gateway.large.packing import Packing
from topics.gateway.streams import frames
from topics.gateway.streams.cutting import Cutter, Text
from topics.gateway.streams.feeds import Options
from topics.gateway.streams.frames import Batch
from topics.gateway.streams.registry import Streams, is_slow
from topics.gateway.streams.watcher import Cursor, Outlet, Watcher
from topics.keys import Key, Scope
from topics.settings import Settings
from topics.storage.config import owner_of_name

_encode = msgspec.json.Encoder().encode
_PING_NS = limits.WS_PING_MS * 1_000_000
_SILENCE_NS = limits.WS_SILENCE_MS * 1_000_000


class Socket:
    def __init__(self, streams: Streams, number: int, *, shards: int, key: Key | None = None) -> None:
        self.number = number
        self.key = key  # whose commands these are
        self.due_ns = 0
        self._streams = streams
        self._shards = shards
        self._protocol = Protocol(SERVER, state=OPEN, max_size=streams.settings.max_body_bytes)
        self._cutter = Cutter(most=streams.settings.max_body_bytes)
        self._fragments: Text | None = None  # of a message that goes on
        self._cursors: dict[str, Cursor] = {}
        # Commands behind one that is not complete: a subscribe, a large publish ...
        self._held: deque[bytes | bytearray] = deque()
        self._held_bytes = 0  # ... and their size
        self._booked = 0  # what the budget knows of the bytes that we hold
        self._busy = False
        self._reading = 0  # bytes of a large publish that is read in slices
        self._catching_up = False
        self._in_flight = 0
        self._paused = False
        self._parting: tuple[CloseCode, str] | None = None  # said when all that was published is acknowledged
        self._heard_ns = 0
        self._outlet: Outlet | None = None
        self._watcher: Watcher | None = None
        self._refused = False  # the client broke a rule: what came behind that is not looked at
        self._over = False  # nothing more is said or heard
        self._reported = False  # the home knows that it is closed
        streams.granted(self)

    @property
    def over(self) -> bool:
        return self._over

    @property
    def outlet(self) -> Outlet:
        assert self._outlet is not None
        return self._outlet

    @property
    def watcher(self) -> Watcher:
        assert self._watcher is not None
        return self._watcher

    # --- the lane says ---

    def start(self, outlet: Outlet, received: bytes) -> None:
        streams = self._streams
        self._outlet = outlet
        self._heard_ns = streams.now_ns
        self.due_ns = streams.now_ns + _PING_NS
        self._watcher = Watcher(
            calls=streams.calls,
            feeds=streams.feeds,
            outlet=outlet,
            voice=self,
            backlog_bytes=streams.settings.stream_backlog_bytes,
            now_ns=lambda: streams.now_ns,
        )
        streams.schedule(self)
        if streams.draining:
            self.end()
        elif (error := streams.refusal(self)) is not None:
            self.revoke(error)
        elif received:
            self.received(received)

    def received(self, data: bytes) -> None:
        """Bytes of the connection."""
        if self._over:
            return
        self._heard_ns = self._streams.now_ns
        protocol = self._protocol
        protocol.receive_data(self._cutter.cut(data))
        for event in protocol.events_received():
            if isinstance(event, Frame):
                self._take_frame(event, protocol)
        self._send_protocol()
        self._settle()
        self._watch_pace()

    def _settle(self) -> None:
        """Account for what we hold: messages that have not come whole, or wait for a subscribe."""
        if self._over:
            return
        fragments = self._fragments
        held = len(self._protocol.reader.buffer) + self._held_bytes + self._reading
        held += 0 if fragments is None else len(fragments.data)
        budget = self._streams.budget
        if held == self._booked:
            return
        if budget.settle(self._booked, held):
            self._booked = held
        else:
            self._tell_error(None, budget.refusal())
            self._close(CloseCode.TRY_AGAIN_LATER, "too many bytes of requests")

    def received_end(self) -> None:
        self.outlet.abort()

    def drained(self) -> None:
        watcher = self._watcher
        if watcher is not None and watcher.full_since_ns and watcher.is_drained:
            watcher.drained()
            self._watch_pace()

    def closed(self) -> None:
        self._stop()
        if not self._reported:
            self._reported = True
            self._streams.closed(self.number, None, None)
            # They know us as we know them, and would wait for a collection.
            self._watcher = None
            self._protocol.parser.close()

    def abort(self) -> None:
        if self._outlet is not None:
            self._outlet.abort()
        else:
            self.discard()

    def discard(self) -> None:
        self.closed()

    def _stop(self) -> None:
        self._over = True
        self._streams.calls.slices.drop(self)
        self._forget()

    def _forget(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
        self._held.clear()
        self._streams.budget.give(self._booked)
        self._booked = 0

    # --- the registry says ---

    def tick(self, now_ns: int) -> None:
        self.due_ns = now_ns + _PING_NS
        protocol = self._protocol
        silent_ns = now_ns - self._heard_ns
        if silent_ns >= _SILENCE_NS:
            self.outlet.abort()
        elif silent_ns >= _PING_NS and protocol.state is OPEN:
            protocol.send_ping(b"")
            self._send_protocol()

    def sweep(self, now_ns: int) -> None:
        if self._watcher is None or self._over:
            return
        self.watcher.sweep()
        if is_slow(self.watcher.full_since_ns, now_ns, self._streams.settings):
            self._tell_error(
                None, ApiError("request_timeout", "this client reads more slowly than it is sent to; connect again")
            )
            self._close(CloseCode.TRY_AGAIN_LATER, "too slow")

    def taken(self) -> None:
        """A WebSocket has no session that somebody could take."""

    def end(self) -> None:
        self._part(CloseCode.GOING_AWAY, "the server is shutting down")

    def revoke(self, error: ApiError) -> None:
        """Nothing more is delivered, and what it has sent since is not looked at."""
        if self._outlet is None or self._over or self._parting is not None:
            return
        self._refused = True
        self._streams.calls.slices.drop(self)  # a large publish that is being read: nothing of it was sent
        self._reading = 0
        self._forget()
        self._tell_error(None, error)
        self._part(CloseCode.POLICY_VIOLATION, "this key has ended")

    def _part(self, code: CloseCode, reason: str) -> None:
        """What was published is acknowledged first; nothing more is heard."""
        if self._in_flight and self._outlet is not None:
            self._parting = code, reason
            self.outlet.pause()
        else:
            self._close(code, reason)

    def restored(self) -> messages.RestoreSession:
        return messages.RestoreSession(None, self.number, 0, b"", [], [], 0, owner_of(self.key))

    def _close(self, code: CloseCode, reason: str) -> None:
        if self._over or self._outlet is None:
            return
        outlet = self.outlet
        if self._protocol.state is OPEN:
            self._protocol.send_close(code, reason)
        for data in self._protocol.data_to_send():
            if data:
                outlet.write(data)
        self._stop()
        outlet.finish()

    # --- frames ---

    def _take_frame(self, frame: Frame, protocol: Protocol) -> None:
        if self._over or self._refused:
            return
        opcode = frame.opcode
        fragments = self._fragments
        if opcode is Opcode.TEXT or (opcode is Opcode.CONT and fragments is not None):
            try:
                if fragments is None and frame.fin:
                    text: bytes | bytearray = bytes(frame.data)
                    if not text.isascii():
                        text.decode()
                else:
                    if fragments is None:
                        fragments = self._fragments = Text()
                    fragments.add(bytes(frame.data), last=frame.fin)
                    if not frame.fin:
                        return
                    self._fragments = None
                    text = fragments.data
            except UnicodeDecodeError:
                self._refused = True
                protocol.fail(CloseCode.INVALID_DATA, "text must be UTF-8")
                return
            self._take_text(text)
        elif opcode is Opcode.BINARY:
            self._refused = True
            self._tell_error(None, ApiError("unsupported_message", "this is a binary message; commands are JSON text"))
            protocol.fail(CloseCode.UNSUPPORTED_DATA, "commands are JSON text")

    def _send_protocol(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self.outlet.write(data)
            else:  # the end: both sides have said goodbye, or the other broke the rules
                self._stop()
                self.outlet.finish()

    def _watch_pace(self) -> None:
        """Read from the client only as fast as it takes its answers."""
        if self._over:
            return
        if self._watcher is None:
            return
        full = self.watcher.full
        if full:
            self.watcher.note_full()
        busy = full or self._in_flight >= limits.MAX_PIPELINED or len(self._held) >= limits.MAX_PIPELINED
        if busy != self._paused:
            self._paused = busy
            if busy:
                self.outlet.pause()
            else:
                self.outlet.resume()

    # --- commands ---

    def _take_text(self, text: bytes | bytearray) -> None:
        if self._busy:
            self._held.append(text)
            self._held_bytes += len(text)
            return
        settings = self._streams.settings
        if len(text) > DIRECT_BYTES:
            self._busy = True
            self._reading = len(text)
            decode = partial(decode_publish, most=settings.control_body_bytes)
            self._streams.calls.slices.add(
                _LargePublish(self, LargeBody(text, decode, settings, malformed="invalid_json"), settings)
            )
            return
        text = bytes(text)
        try:
            command = decode_command(text, most=settings.control_body_bytes)
        except ApiError as error:
            self._tell_error(request_id_of(text), error)
            return
        try:
            self._obey(command, size=len(text))
        except ApiError as error:
            self._tell_error(command.request_id, error)

    def _obey(self, command: Command, *, size: int) -> None:
        match command:
            case Publish():
                self._publish(command, size=size)
            case Subscribe():
                self._subscribe(command)
            case Unsubscribe():
                self._unsubscribe(command)
            case Ping():
                self._say(b'{"op":"pong"%b,"ts":%d}' % (_echo(command.request_id), time.time_ns() // 1_000_000))

    def _authorize(self, scope: Scope, topics: Iterable[str]) -> None:
        check_scope(self.key, scope)
        check_names(self.key, topics)

    def _publish(self, command: Publish, *, size: int, packing: Packing | None = None) -> None:
        check_name(command.topic)
        self._authorize(Scope.WRITE, [command.topic])
        if command.config is not None:
            dead_letter = command.config.dead_letter
            self._authorize(Scope.ADMIN, [command.topic] if dead_letter is None else [command.topic, dead_letter])
        topic = command.topic
        shard = owner_of_name(topic, self._shards)
        settings = self._streams.settings
        if not command.disable_backpressure:
            self._streams.calls.pressure.check(shard)
        deadline_ms = self._streams.now_ns // 1_000_000 + settings.call_timeout_ms
        plain = command.plain(settings, size=size) if packing is None else None
        entry = _Publishing(
            self,
            command.request_id,
            topic,
            len(command.records),
            command.return_seqs,
            time.perf_counter_ns(),
            deadline_ms,
        )
        if plain is not None:
            self._in_flight += 1
            _, weight, data = plain
            self._streams.publish(PlainRoute(shard, topic, topic.encode(), command.return_seqs), entry, weight, data)
            return
        if packing is None:
            head, batch = command.append(settings, size=size)
            call = _AppendCall(shard=shard, op=Op.APPEND, head=head, body=batch)
        else:
            # Others overtake a large one on its way: what came behind it waits until it is answered.
            self._busy = entry.long = True
            call = _AppendCall(shard=shard, op=Op.APPEND, head=packing.head, pieces=packing.pieces)
        self._in_flight += 1
        self._streams.send_runs()  # what came before takes effect before
        entry.call = call
        self._streams.calls.ask(call, entry, waits=True)

    def published(self, *, long: bool = False) -> None:
        self._in_flight -= 1
        if long:
            self._busy = False
        if self._parting is not None:
            if not self._in_flight:
                self._close(*self._parting)
        elif self._paused and self._in_flight <= limits.MAX_PIPELINED // 2:
            self._watch_pace()
        if long and not self._over:
            self._go_on()

    def _unsubscribe(self, command: Unsubscribe) -> None:
        names = command.names()
        for name in names:
            if (cursor := self._cursors.pop(name, None)) is not None:
                cursor.close()
        alone = b"" if command.topic is None else b',"topic":%b' % _encode(command.topic)
        self._say(b'{"op":"unsubscribed"%b%b,"topics":%b}' % (_echo(command.request_id), alone, _encode(names)))

    def _subscribe(self, command: Subscribe) -> None:
        settings = self._streams.settings
        wanted = command.subscription(settings)
        self._authorize(Scope.READ, wanted.topics)
        if len(self._cursors.keys() | wanted.topics.keys()) > settings.max_watch_topics:
            raise invalid(
                f"one socket watches at most {settings.max_watch_topics} topics", max=settings.max_watch_topics
            )
        options = Options(wanted.limit, wanted.max_bytes, wanted.include_tags, wanted.include_meta, wanted.include_data)

        def begin(found: positions.Found) -> Outcome:
            if not self._over and not self._refused:
                topics = [name for name in wanted.topics if name in found]
                starts = [positions.start_of(wanted.topics[name], found[name]) for name in topics]
                described = _encode(positions.described(topics, starts, found))
                self._say(b'{"op":"subscribed"%b,"topics":%b}' % (_echo(command.request_id), described))
                for name, at in zip(topics, starts, strict=True):
                    if (old := self._cursors.pop(name, None)) is not None:
                        old.close()
                    cursor = self._cursors[name] = Cursor(
                        self.watcher,
                        topic=name,
                        shard=owner_of_name(name, self._shards),
                        at=at,
                        topic_id=found[name].topic_id,
                        options=options,
                        nodes=wanted.nodes,
                    )
                    cursor.feed_moved()
            return Response(200, b"")

        self._busy = True
        self._streams.send_runs()
        outcome = positions.locate(list(wanted.topics), self._shards, lenient=command.lenient, then=begin)
        self._streams.calls.submit(outcome, _Subscribing(self, command.request_id))

    def subscribed(self, request_id: RequestId, value: Response) -> None:
        """A subscribe is complete, or failed: go on with what came behind it."""
        self._busy = False
        if self._over:
            return
        if value.status >= 400:
            self._tell_response(request_id, value)
        self._go_on()

    def read_publish(self, body: LargeBody[Publish], packing: Packing | None, error: ApiError | None) -> None:
        """A large publish is decoded and packed, or refused."""
        self._busy = False
        self._reading = 0
        if self._over:
            return
        try:
            if error is not None:
                raise error
            self._publish(body.given, size=body.size, packing=packing)
        except ApiError as refused:
            self._tell_error(request_id_of(body.fields), refused)
        self._go_on()

    def _go_on(self) -> None:
        """With what came behind a command that is complete now."""
        if self._catching_up:
            return  # it was complete at once: the loop below goes on
        self._catching_up = True
        while self._held and not self._busy:
            text = self._held.popleft()
            self._held_bytes -= len(text)
            self._take_text(text)
        self._catching_up = False
        self._settle()
        self._watch_pace()

    # --- telling ---

    def tell_records(self, cursor: Cursor, batch: Batch) -> None:
        self.outlet.write(batch.websocket())

    def tell_gap(self, cursor: Cursor, gap: Gap, head_seq: int, reason: bytes) -> None:
        self._say(frames.websocket_gap(cursor.name, gap, head_seq, reason))

    def tell_caught_up(self, cursor: Cursor, head_seq: int) -> None:
        self._say(frames.websocket_caught_up(cursor.name, head_seq))

    def tell_gone(self, cursor: Cursor, head_seq: int) -> None:
        if self._cursors.get(cursor.topic) is cursor:
            del self._cursors[cursor.topic]
        cursor.close()
        self._say(frames.websocket_gone(cursor.name, head_seq))

    def acknowledge(self, request_id: RequestId, answer: bytes) -> None:
        if not self._over:
            self._say(b'{"op":"ack"%b,%b' % (_echo(request_id), answer[1:]))

    def _tell_error(self, request_id: RequestId, error: ApiError) -> None:
        content: dict[str, Any] = {"code": error.code, "message": error.message}
        if error.detail is not None:
            content["detail"] = error.detail
        self._say(b'{"op":"error"%b,%b' % (_echo(request_id), _encode(content)[1:]))

    def _tell_response(self, request_id: RequestId, value: Response) -> None:
        """An answer that HTTP would have given."""
        if not self._over:
            error = msgspec.json.decode(value.body)["error"]
            self._say(b'{"op":"error"%b,%b' % (_echo(request_id), _encode(error)[1:]))

    def refused(self, request_id: RequestId, value: Response) -> None:
        self._tell_response(request_id, value)

    def tell_paced(self, topics: list[str], retry_after_ms: int) -> None:
        content = {"op": "error", "code": "throttled", "message": frames.PACED}
        self._say(_encode({**content, "retry_after_ms": retry_after_ms, "topics": topics}))

    def _say(self, text: bytes) -> None:
        if not self._over:
            self.outlet.write(frames.text_frame(text))


class _Publishing(msgspec.Struct, gc=False, eq=False):
    """A publish that is out; a plain one travels with others (http1/append_batch.py)."""

    socket: Any  # a Socket
    request_id: RequestId
    topic: str
    records: int
    return_seqs: bool
    started_ns: int
    deadline_ms: int
    id: int = 0
    call: Any = None  # if it is no plain one
    long: bool = False  # what came behind it waits for it

    def take(self, message: bytes) -> None:
        try:
            answer, _ = messages.decode_answer(message)
        except ApiError as error:
            self.socket._tell_error(self.request_id, error)
            self.socket.published()
            return
        self.take_fields(answer)

    def take_fields(self, fields: tuple[int, int, int, bool, bool, int, int]) -> None:
        spent_us = (time.perf_counter_ns() - self.started_ns) // 1_000
        throttle_us = 0 if self.call is None else self.call.throttle_us
        answer = append_json(self.topic, fields, self.return_seqs, spent_us, throttle_us)
        self.socket.acknowledge(self.request_id, answer)
        self.socket.published(long=self.long)

    def finish(self, value: Any) -> None:
        """The answer of an append with options, or why there is none."""
        if isinstance(value, Response):
            self.socket.refused(self.request_id, value)
            self.socket.published(long=self.long)
        else:
            self.take_fields(value)

    def abort(self) -> None:
        self.socket.abort()


class _LargePublish:
    """Decoded (large/decoder.py) and packed (large/packing.py) in slices."""

    def __init__(self, socket: Socket, body: LargeBody[Publish], settings: Settings) -> None:
        self.asker = self._socket = socket
        self._body = body
        self._settings = settings
        self._packing: Packing | None = None

    def step(self) -> bool:
        if self._socket.over:
            self.drop()
            return True
        error = None
        try:
            if self._packing is None:
                if self._body.step():
                    self._packing = self._body.given.packing(self._settings)
                return False
            if not self._packing.step():
                return False
        except ApiError as refused:
            error = refused
        self._socket.read_publish(self._body, self._packing, error)
        return True

    def drop(self) -> None:
        self._body.close()

    def abort(self) -> None:
        self._socket.abort()


class _AppendCall(Call, kw_only=True, gc=False, eq=False):
    pass


class _Subscribing(msgspec.Struct, gc=False, eq=False):
    socket: Any
    request_id: RequestId

    def finish(self, value: Response) -> None:
        self.socket.subscribed(self.request_id, value)

    def abort(self) -> None:
        self.socket.abort()


def _echo(request_id: RequestId) -> bytes:
    return b"" if request_id is None else b',"request_id":%b' % request_id
