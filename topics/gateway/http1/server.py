"""The HTTP/1 lane: HTTP/1.1 in rounds over one epoll, without a task per connection.

A round receives from all sockets that are ready, turns what came into calls, pushes them into the rings and rings
each shard once; then takes the answers that have arrived and sends once per connection. Most of what is left is
system calls.

A stream (SSE, WebSocket) takes its connection over when its turn has come: from then on what it writes goes out with
the same rounds, once per connection, and what the socket does not take waits for it.

Per connection: answers go out in the order of the requests, whatever order shards answer in; a client that does not
read its answers, or sends too many requests ahead, is not read from; a fault in one connection ends that one alone.
What this lane does not speak, HTTP/2, is handed to the other with the bytes already read.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable
from operator import attrgetter

from topics import limits
from topics.errors import STATUS, ApiError, invalid
from topics.gateway.access_log import AccessLog
from topics.gateway.admission.budget import Budget
from topics.gateway.admission.places import Places
from topics.gateway.admission.pressure import Pressure, under_pressure
from topics.gateway.api.schemas import decode_plain
from topics.gateway.api.topics import Handlers, shutting_down, went_wrong
from topics.gateway.api.types import Call, Request, Response, Wait, error_response
from topics.gateway.auth import too_many_in_flight
from topics.gateway.calls import Calls
from topics.gateway.compression import gunzip
from topics.gateway.http1.append_batch import PlainAppend, PlainEntry, PlainRoute, PlainRun
from topics.gateway.http1.chunks import ChunkDecoder
from topics.gateway.http1.connection import EMPTY, INPUT, Connection, Exchange
from topics.gateway.http1.guests import TURNED_AWAY_H2, Guests
from topics.gateway.http1.head import Head, Heads
from topics.gateway.http1.response import Answers
from topics.gateway.http1.sender import NEVER_NS, RECEIVE_BYTES, Sender
from topics.gateway.http1.timeouts import Patience, Verdict
from topics.gateway.large.answer import LargeAnswer
from topics.gateway.large.append import LargeAppend
from topics.gateway.large.decoder import DIRECT_BYTES, opened
from topics.keys import Key
from topics.settings import Settings
from topics.shm.usage import Meter, Slots

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGE_BODY = limits.SMALL_BODY_BYTES  # from here on a body is gathered apart from the buffer
_RUN_BYTES = 128 * limits.KIB  # appends of one topic in one message: more is no cheaper per record
_RUN_REQUESTS = 256
# A round ends after 20 ms, but for the one thing that it has begun: then others get their turn. It takes requests for
# half of that time. Handing out answers and sending them have what is left, and a quarter at least.
_TAKE_NS = 10_000_000
SHARE_NS = 5_000_000
_COSTLY_NS = 200_000  # ten times what a request of one record takes
_HEAR_NS = 4_000_000  # the client of one stream, before others
_TURN_BYTES = 2 * limits.KIB  # of a stream's client, heard at once: of the smallest frames these take some milliseconds
_COST = attrgetter("costly")
_CR = 13
_BLANK_LINES = re.compile(rb"(?:\r\n)*")
_Batch = tuple[int, int, bytes]  # records, their size, their data


class HotLane:
    # No more than 30 attributes: beyond that CPython 3.11 finds each of them more slowly, which is 3 % of a request.

    def __init__(
        self,
        *,
        settings: Settings,
        heads: Heads,
        handlers: Handlers,
        calls: Calls,
        epoll: select.epoll,
        hand_over: Callable[[socket.socket, bytes], None],
        prefix: str = "",
        pressure: Pressure | None = None,
        slots: Slots | None = None,
        meter: Meter | None = None,
        access: AccessLog | None = None,
        budget: Budget | None = None,
        places: Places | None = None,
    ) -> None:
        self.settings = settings
        self.handlers = handlers
        self.meter = meter
        self.access = access
        self._pressure = pressure or Pressure()
        self._slots = slots
        self._patience = Patience(settings)
        self._held = slots.held if slots is not None and slots.alone else None
        self._most = slots.most if slots is not None else 0
        self.answers = Answers(prefix)
        self.answers.tick()
        self.budget = budget or Budget.of(settings)
        self.sender = Sender(
            epoll=epoll,
            slots=slots,
            meter=meter,
            close=self.close,
            fail=self.fail,
            resume=self._resume,
            budget=self.budget,
        )
        if places is None:
            places = Places.of(settings)
        self.guests = Guests(places, hear=self._hear, close=self.close, count=self._count_refused)
        self._guests = self.guests.addresses
        self.dirty = self.sender.dirty
        self.connections: dict[int, Connection] = {}
        self.unfinished: dict[Connection, None] = {}  # have sent requests that no round had time for yet
        self.requests = 0
        self._runs: dict[str, PlainRun] = {}  # by topic, gathered since they were last sent
        # One buffer for all: asking recv for a fresh one of this size costs more than the copy.
        self._arrived = memoryview(bytearray(RECEIVE_BYTES))
        self._heads = heads
        self._calls = calls
        self._epoll = epoll
        self._hand_over = hand_over
        self.begin_round()

    def send_dirty(self, until_ns: int = NEVER_NS) -> None:
        self.sender.send_dirty(until_ns)

    def listen(self, connection: Connection) -> None:
        self.sender.listen(connection)

    def begin_round(self) -> None:
        """One deadline for all plain appends of a round, and one until when it takes requests."""
        self.late = False
        self._until_ns = time.perf_counter_ns() + _TAKE_NS
        self.deadline_ms = time.monotonic_ns() // 1_000_000 + self._calls.timeout_ms

    def go_on(self) -> None:
        """Begin with those whose requests the last round had no time for: the one that waits longest, then those whose
        last request was done quickly, then the others: a crowd of costly ones holds a small one up for a round."""
        waiting = list(self.unfinished)
        if len(waiting) > 2:
            waiting[1:] = sorted(waiting[1:], key=_COST)
        for connection in waiting:
            if self.late:
                break
            self.unfinished.pop(connection, None)
            try:
                self._resume(connection)
            except Exception as error:
                self.fail(connection, error)
            if time.perf_counter_ns() > self._until_ns:
                self._be_late()

    def _resume(self, connection: Connection) -> None:
        if connection.stream is not None:
            self._listen(connection, bytes(connection.buffer))
            return
        self._understand(connection, connection.buffer)
        self.settle(connection)

    def settle(self, connection: Connection) -> None:
        """Account for what it holds now. Without room for more it is refused, and holds nothing."""
        if connection.closed:
            return
        if connection.head is None:
            connection.raw_head = EMPTY
        held = connection.held_bytes
        if not self.budget.settle(connection.booked, held, head=len(connection.raw_head)):
            refusal = self.budget.refusal()
            if connection.held:  # a stream is about to begin: there is no place for an answer behind it
                self.close(connection)
                return
            self._refuse(connection, refusal, connection.head)
            self.budget.give(connection.booked)
            held = 0
        connection.booked = held

    def _look_at_clock(self, connection: Connection, since_ns: int) -> None:
        now = time.perf_counter_ns()
        connection.costly = now - since_ns > _COSTLY_NS
        if now > self._until_ns:
            self._be_late()

    def _be_late(self) -> None:
        self.late = True
        self.on_late()

    on_late: Callable[[], None] = staticmethod(lambda: None)  # we are alive, and busy

    # --- connections ---------------------------------------------------------------------------------

    def adopt(self, sock: socket.socket, received: bytes = b"") -> None:
        """A new connection, or one that another process has begun to read from."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, sock)
        self.connections[connection.fd] = connection
        self._epoll.register(connection.fd, connection.interest)
        if received:
            connection.buffer = received
            self.unfinished[connection] = None

    def retire(self) -> None:
        """Requests that were taken are answered; no more are taken."""
        self.sender.stop_reading()
        self.unfinished.clear()
        for connection in self.connections.values():
            if (head := connection.passing) is not None:  # what was dropped of its body can't be passed on
                self._refuse(connection, head.error or shutting_down(), head)
            elif connection.stream is None and not connection.discarding:
                self.sender.set_interest(connection, connection.interest & ~INPUT)

    def revoke(self, refusal: Callable[[Key | None], ApiError | None]) -> None:
        """Keys have ended: heads are judged again, and whoever is sending a body with such a key need not go on."""
        self._heads.forget()
        for connection in list(self.connections.values()):
            head = connection.head
            if head is not None and not connection.closing and (error := refusal(head.key)) is not None:
                self._refuse(connection, error, head)
        self.send_dirty()

    def forget_counters(self) -> None:
        self.meter = None
        self._slots = self._held = None
        self.sender.forget_counters()

    def give_away(self, connection: Connection) -> None:
        """Somebody else has its socket, too: it goes on there."""
        connection.closed = True
        self._forget(connection)
        self.guests.places.give(connection.sock)
        self._epoll.unregister(connection.fd)
        self.dirty.discard(connection)
        connection.sock.close()

    def close(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = connection.closing = True
        self.unfinished.pop(connection, None)
        self._forget(connection)
        self.guests.places.give(connection.sock)
        try:
            if connection.starting is not None:
                connection.starting.discard()
            if connection.stream is not None:
                connection.stream.closed()
        except Exception as error:
            self._calls.on_fault(error, 0)
        connection.stream = None
        for exchange in connection.exchanges:
            if exchange.answer is None and isinstance(exchange, Exchange):
                self._calls.abandon(exchange)
        self.sender.drop_exchanges(connection)
        self._epoll.unregister(connection.fd)
        self.dirty.discard(connection)
        connection.sock.close()

    def _forget(self, connection: Connection) -> None:
        """It is not ours any more, and holds nothing of ours."""
        del self.connections[connection.fd]
        self.guests.forget(connection)
        self.budget.give(connection.booked + connection.owed)
        connection.booked = connection.owed = 0

    def fail(self, connection: Connection, error: Exception) -> None:
        """A fault in one connection ends that one alone; a socket's is none of ours."""
        if not isinstance(error, OSError):
            self._calls.on_fault(error, 0)
        self.close(connection)

    def handle(self, fd: int, event: int) -> None:
        """What epoll said about one connection."""
        connection = self.connections.get(fd)
        if connection is None:
            return
        try:
            if event & select.EPOLLOUT:
                self.sender.send(connection)
            if event & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                if connection in self.unfinished:
                    pass  # first what it has sent before
                elif connection.interest & select.EPOLLIN:
                    self._receive(connection)
                elif event & (select.EPOLLHUP | select.EPOLLERR):
                    self.close(connection)
        except Exception as error:
            self.fail(connection, error)

    def _hear(self, connection: Connection) -> bool:
        """Out of turn, a guest whose descriptor is wanted. True: it waits for nothing."""
        late, self.late = self.late, False  # it has no other turn: one request of its is looked at in any case
        self.handle(connection.fd, select.EPOLLIN)
        self.late = late or self.late
        if connection in self.dirty:
            self.dirty.discard(connection)
            try:
                self.sender.send(connection)
            except Exception as error:
                self.fail(connection, error)
        busy = connection.exchanges or connection.out or connection in self.unfinished
        return not busy and not connection.closed

    def sweep(self) -> None:
        """Once a second: end connections that keep us waiting."""
        self.answers.tick()
        now = time.monotonic_ns()
        for connection in list(self.connections.values()):
            if connection in self.unfinished:
                continue  # it waits for us
            try:
                if connection.booked:
                    self.settle(connection)
                verdict = self._patience.judge(connection, now)
                if verdict is Verdict.CLOSE:
                    self.close(connection)
                elif isinstance(verdict, ApiError):
                    self._refuse(connection, verdict, connection.head)
            except Exception as error:
                self.fail(connection, error)
        self.send_dirty()

    # --- receiving -----------------------------------------------------------------------------------

    def _receive(self, connection: Connection) -> None:
        if connection.large is not None:
            self._receive_large(connection)
            return
        if connection.discarding:
            self.sender.discard(connection)
            return
        try:
            received = connection.sock.recv_into(self._arrived)
        except BlockingIOError:
            return
        if not received:
            self._end_of_input(connection)
            return
        data = self._arrived[:received].tobytes()
        if connection.stream is not None:
            self._listen(connection, data)
            return
        buffered = connection.buffer
        if buffered:
            if not isinstance(buffered, bytearray):
                buffered = bytearray(buffered)
            buffered += data
            if connection.head is not None:
                connection.progress_ns = time.monotonic_ns()  # a body may be slow; a head has one deadline
            self._understand(connection, buffered)
            self.settle(connection)
        else:
            before, served = connection.progress_ns, self.requests
            connection.progress_ns = time.monotonic_ns()
            self._understand(connection, data)
            if served == self.requests:
                if not connection.buffer and connection.head is None:
                    connection.progress_ns = before  # empty lines before a request are no sign of life
                self.settle(connection)
            elif connection.buffer or connection.booked or connection.head is not None or connection.reading:
                self.settle(connection)

    def _listen(self, connection: Connection, data: bytes) -> None:
        """What the client of a stream says. Frames can be very small: then the rest waits until others had a turn, or
        until the client has taken its answers."""
        at = 0
        until_ns = time.perf_counter_ns() + _HEAR_NS
        while at < len(data) and not connection.closing and (stream := connection.stream) is not None:
            if connection.paused and connection.written - connection.sent > self.settings.stream_backlog_bytes:
                break  # it is resumed when the client has taken them
            now = time.perf_counter_ns()
            if self.late or now > until_ns:
                self.unfinished[connection] = None
                break
            stream.received(data[at : at + _TURN_BYTES])
            at += _TURN_BYTES
            self._look_at_clock(connection, now)
        connection.buffer = EMPTY if connection.closing else data[at:]
        if connection.buffer or connection.booked:
            self.settle(connection)

    def _receive_large(self, connection: Connection) -> None:
        large, head = connection.large, connection.head
        assert large is not None
        assert head is not None
        try:
            received = connection.sock.recv_into(self._arrived, min(RECEIVE_BYTES, connection.missing))
        except BlockingIOError:
            return
        if received == 0:
            self._end_of_input(connection)
            return
        connection.progress_ns = time.monotonic_ns()
        connection.missing -= received
        large += self._arrived[: received if head.reads_body else 0]
        if connection.missing == 0:
            connection.large = connection.head = None
            self._request(connection, head, large)
        self.settle(connection)

    def _end_of_input(self, connection: Connection) -> None:
        """The client sends no more: it has closed, most likely, and a half-close can't be told from that. What it
        asked is still answered, but nothing waits on its behalf. Half a request is nothing."""
        if connection.stream is not None and connection.frames:
            self.sender.send(connection)  # what it is told in this round: it may have waited for that
        if connection.stream is not None:
            connection.stream.received_end()
            return
        connection.closing = True
        connection.buffer = EMPTY
        connection.head = connection.chunks = connection.large = None
        self.settle(connection)
        if not connection.exchanges and not connection.out:
            self.close(connection)
            return
        self.sender.set_interest(connection, connection.interest & ~INPUT)
        for exchange in list(connection.exchanges):
            if exchange.answer is None and isinstance(exchange, Exchange):
                self._calls.leave(exchange)

    def _understand(self, connection: Connection, data: bytes | bytearray) -> None:
        """Take every complete request out of `data`; keep the rest."""
        at = 0
        size = len(data)
        while at < size and not connection.closing and not connection.held:
            if self.late:
                self.unfinished[connection] = None
                break
            head = connection.head
            if head is None:
                if (
                    len(connection.exchanges) >= limits.MAX_PIPELINED
                    or connection.asks >= limits.MAX_PIPELINED_ASKS
                    or connection.unread >= limits.UNREAD_BYTES
                ):
                    self.sender.set_interest(connection, connection.interest & ~INPUT)
                    break  # the rest waits in the buffer until answers are out
                # A client's next head is mostly as long as its last one, and known. Then its end need not be looked
                # for: what is known is a head and nothing else.
                end = at + connection.head_bytes
                raw = data[at:end]
                head = self._heads.known(raw if isinstance(raw, bytes) else bytes(raw))
                if head is None:
                    if data[at] == _CR and (blank := _BLANK_LINES.match(data, at)) is not None:
                        at = blank.end()  # empty lines before a request line mean nothing
                    end = data.find(b"\r\n\r\n", at)
                    if end < 0:
                        if not self._partial_head(connection, data, at):
                            return
                        break
                    end += 4
                    raw = data[at:end]
                    head = self._heads.get(raw if isinstance(raw, bytes) else bytes(raw))
                    connection.head_bytes = end - at
                elif end > size:  # known, and shorter than the last one: its body is still to come
                    end, connection.head_bytes = size, size - at
                if head.fatal:
                    if data[at : at + 14] == H2_PREFACE[:14]:
                        if not self._preface(connection, data, at):
                            return
                        break
                    assert head.error is not None
                    self._refuse(connection, head.error, head)
                    return
                at = end
                length = head.body_length
                if length == 0:
                    self._request(connection, head, EMPTY)
                    continue
                if 0 < length <= size - at:
                    self._request(connection, head, data[at : at + length])
                    at += length
                    continue
                if not self._begin_body(connection, head, data, at):
                    return
                if connection.large is not None:
                    at = size
                    break
                head = connection.head
            if connection.chunks is not None:
                try:
                    at, complete = connection.chunks.feed(data, at)
                except ApiError as error:
                    self._refuse(connection, error, head)
                    return
                if not complete:
                    if connection.chunks.tired:
                        self.unfinished[connection] = None
                    break
                body = connection.chunks.body
                connection.chunks = connection.head = None
                assert head is not None
                self._request(connection, head, body)
            else:
                assert head is not None
                if size - at < head.body_length:
                    break
                connection.head = None
                self._request(connection, head, data[at : at + head.body_length])
                at += head.body_length
        if connection.closing:
            connection.buffer = EMPTY
        elif at == 0 and isinstance(data, bytearray):
            connection.buffer = data
        else:
            connection.buffer = data[at:]

    def _begin_body(self, connection: Connection, head: Head, data: bytes | bytearray, at: int) -> bool:
        """The body is not all here yet. False: the connection is done for."""
        refusal = self.guests.refusal(connection, head) if self._guests else None
        if refusal is None and head.body_length > _LARGE_BODY and head.reads_body and self.budget.exhausted:
            refusal = self.budget.refusal()
        if refusal is not None:
            self._refuse(connection, refusal, head)
            return False
        connection.head = head
        connection.raw_head = bytes(data[at - connection.head_bytes : at])
        connection.body_ns = connection.progress_ns
        if head.error is not None and head.expect:
            self._refuse(connection, head.error, head)  # the client asked before it sends, and the answer is no
            return False
        if head.expect:
            connection.owes_continue = True  # sent when the answers before it are out
            self.dirty.add(connection)
        if head.chunked:
            most = head.route.most if head.reads_body and head.route is not None else self.settings.max_body_bytes
            connection.chunks = ChunkDecoder(most=most, keep=head.reads_body)
        elif head.body_length > _LARGE_BODY:
            connection.missing = head.body_length - (len(data) - at)
            kept = data[at:] if head.reads_body else EMPTY
            connection.large = bytearray(kept)  # grows as it arrives: a length is only a promise
        return True

    def _partial_head(self, connection: Connection, data: bytes | bytearray, at: int) -> bool:
        """No blank line yet. False: there is no use waiting for one."""
        part = bytes(data[at:])
        if H2_PREFACE.startswith(part[: len(H2_PREFACE)]):
            return True
        if len(part) > limits.MAX_HEAD_BYTES:
            if b"\r\n" not in part[: limits.MAX_URI_BYTES + 64]:
                error = ApiError("uri_too_long", f"the request target has more than {limits.MAX_URI_BYTES} bytes")
            else:
                error = ApiError("header_too_large", f"the request head has more than {limits.MAX_HEAD_BYTES} bytes")
            self._refuse(connection, error)
            return False
        if part.count(b"\n") != part.count(b"\r\n"):
            self._refuse(connection, invalid("lines of a request head end with CR LF"))
            return False
        return True

    def _preface(self, connection: Connection, data: bytes | bytearray, at: int) -> bool:
        """HTTP/2 by prior knowledge: the other lane takes the socket. True: wait for the rest of the preface."""
        if connection.exchanges or connection.out or at:
            self._refuse(connection, invalid("HTTP/2 starts on a fresh connection"))
            return False
        if connection in self.guests and self.guests.refusal(connection, None) is not None:
            self.guests.send_away(connection, TURNED_AWAY_H2)
            return False
        connection.closed = True  # for us
        self._forget(connection)
        self._epoll.unregister(connection.fd)
        self._hand_over(connection.sock, bytes(data))
        return False

    # --- requests ------------------------------------------------------------------------------------

    def _request(self, connection: Connection, head: Head, body: bytes | bytearray) -> None:
        self.requests += 1
        started_ns = time.perf_counter_ns()
        if started_ns > self._until_ns:
            self.late = True  # this one, and then others get their turn
        if self._guests and (refusal := self.guests.refusal(connection, head)) is not None:
            self._refuse(connection, refusal, head)
            return
        slot, free = head.slot, True
        if slot:
            held = self._held
            if held is None:
                slot, free = self._take(slot)
            elif held[slot] < self._most:
                held[slot] += 1
            else:
                slot, free = 0, False
        if (plain := head.plain) is not None and free and not self.handlers.draining:
            batch = decode_plain(body, self.settings)
            if batch is not None:
                self._plain(connection, plain, head.gzip_answer, slot, started_ns, batch)
                return
            head.plain = None  # this client sends more than data; don't try each time
        if self._runs:
            self.send_runs()  # what came before takes effect before
        exchange = Exchange(
            connection, head.keep_alive, head.gzip_answer, head.bodiless, self._calls.new_id(), started_ns, head.number
        )
        exchange.slot, exchange.request_id, exchange.line = slot, head.request_id, head.line
        exchange.key = head.slot or head.shown
        connection.exchanges.append(exchange)
        connection.asks += 1
        if not head.keep_alive:
            connection.closing = True
        if head.error is not None:
            exchange.finish(error_response(head.error))  # not raised: it is kept, and would gather frames
            return
        try:
            if not free:
                if self._slots is not None:
                    self._slots.refused()
                raise too_many_in_flight(self.settings.max_inflight_per_key)
            route = head.route
            assert route is not None
            if self.handlers.draining and not route.always:
                raise shutting_down()
            large, size = None, len(body)
            if route.large and (head.gzip_body or len(body) > DIRECT_BYTES):
                body, large = opened(body, self.settings, gzipped=head.gzip_body, most=route.most)
            elif head.gzip_body and body:
                body = gunzip(body, most=route.most)
            request = Request(route.name, route.shard, route.query, body, head.idempotency_key, started_ns)
            request.key = head.key
            if large is not None:
                connection.held = exchange.holds = True
                connection.reading = size
                self.sender.set_interest(connection, connection.interest & ~INPUT)
                self._calls.slices.add(LargeAppend(self.handlers, self._calls, exchange, request, large))
                self._look_at_clock(connection, started_ns)
                return
            if head.headers is not None:
                request.headers = head.headers
            exchange.again = route.again
            outcome = route.handler(request)
            if isinstance(outcome, Call) and outcome.most:
                self.budget.spare(outcome)
                exchange.most = outcome.most
                connection.unread += outcome.most
            if route.streams or outcome.__class__ is Wait:  # what follows a scrape waits with it
                connection.held = exchange.holds = True
                self.sender.set_interest(connection, connection.interest & ~INPUT)
            self._calls.submit(outcome, exchange, exchange.id)
        except ApiError as error:
            exchange.finish(error_response(error))
        except Exception as error:  # a bug costs one request, not the gateway
            self._calls.on_fault(error, exchange.id)
            exchange.finish(error_response(went_wrong()))
        self._look_at_clock(connection, started_ns)

    def _take(self, slot: int) -> tuple[int, bool]:
        """With a limit that is shared, or without one."""
        if self._slots is None:
            return 0, True
        return (slot, True) if self._slots.take(slot) else (0, False)

    def _plain(
        self, connection: Connection, route: PlainRoute, gzipped: bool, slot: int, started_ns: int, batch: _Batch
    ) -> None:
        count, size, data = batch
        entry = PlainAppend(
            connection, True, gzipped, route.topic, count, route.return_seqs, started_ns, self.deadline_ms, route.number
        )
        entry.slot = slot
        connection.exchanges.append(entry)
        refusing = self._pressure.refusing
        if refusing and route.shard in refusing:
            entry.id = self._calls.new_id()
            entry.finish(error_response(under_pressure(refusing[route.shard])))
            return
        self.add_plain(route, entry, size, data)

    def add_plain(self, route: PlainRoute, entry: PlainEntry, size: int, data: bytes) -> None:
        """Add an append to this round's run of its topic."""
        shard, topic, encoded = route[:3]
        run = self._runs.get(topic)
        if run is None:
            run = self._runs[topic] = PlainRun(shard, encoded)
        run.add(entry, size, data)
        if run.size > _RUN_BYTES or len(run.entries) >= _RUN_REQUESTS:
            del self._runs[topic]
            self._calls.send_plain(run)

    def send_runs(self) -> None:
        """Pass on the plain appends of this round."""
        runs, self._runs = self._runs, {}
        for run in runs.values():
            self._calls.send_plain(run)

    def pack(self, exchange: Exchange, value: Response) -> None:
        """Compress a large answer in slices; `exchange` is finished with it then."""
        self._calls.slices.add(LargeAnswer(exchange, value))

    def answered(self, exchange: Exchange | PlainAppend, value: Response) -> None:
        """For the counters and the log."""
        took_us = (time.perf_counter_ns() - exchange.started_ns) // 1_000
        if self.meter is not None:
            self.meter.count(exchange.number, value.status, took_us)
        if self.access is not None:
            method, path = exchange.line or ("-", "-")
            self.access.note(
                id=exchange.id,
                request_id=exchange.request_id,
                method=method,
                path=path,
                status=value.status,
                size=len(value.body) + len(value.tail),
                took_us=took_us,
                peer=exchange.connection.peer,
                key=exchange.key,
            )

    def _count_refused(self) -> None:
        if self.meter is not None:
            self.meter.count(0, STATUS["throttled"], 0)

    def _refuse(self, connection: Connection, error: ApiError, head: Head | None = None) -> None:
        """Answer and close: after this nothing the client sent is looked at."""
        connection.closing = True
        connection.buffer = EMPTY
        connection.head = connection.chunks = connection.large = None
        exchange = Exchange(connection, False, False, False, self._calls.new_id(), time.perf_counter_ns(), 0)
        if head is not None:
            exchange.request_id, exchange.line, exchange.number = head.request_id, head.line, head.number
            exchange.key = head.slot or head.shown
        connection.exchanges.append(exchange)
        connection.asks += 1
        exchange.finish(error_response(error, close=True))
        self.sender.set_interest(connection, connection.interest & ~INPUT)
