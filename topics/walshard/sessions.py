"""Watch sessions at home, and the count of all long-lived streams. Pure.

Sessions outlive the gateways that serve them: they live in one shard's process, shard 0's, so that every gateway finds
every session, a gateway's death loses none, and the limits are exact whatever gateway a client comes to. Rules:

    session   idle --open--> streaming --close--> idle --TTL--> forgotten
                               |  another open: the stream's gateway is told to close it and to say how far it got;
                               |  the new one is answered then, so that nothing is delivered twice
                               +- its gateway died: idle, and stale: its cursors may lie behind what was delivered

The TTL is looked at when a session is made or opened. A crash of this process loses the table; gateways remember
what they serve and have served, and restore it (the later epoch wins: every open begins one). What only gateways knew
that died as well is known to the mirror (router/mirror.py), which is told of every session. Until all of them have
spoken a session that is not known may still come, and who asks for it is asked to wait.
"""

from __future__ import annotations

import hmac
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, session_not_found, throttled_by
from topics.settings import Settings

Gateway = Any  # a link's writer: send_always(message)


class _Session:
    __slots__ = (
        "begun_stale",
        "cursors",
        "definition",
        "epoch",
        "idle_since_ms",
        "owner",
        "restored",
        "stale",
        "stream",
        "topic_ids",
        "waiting",
        "wid",
    )

    def __init__(
        self,
        wid: str,
        definition: bytes,
        cursors: list[int],
        topic_ids: list[int],
        *,
        epoch: int,
        owner: bytes,
    ) -> None:
        self.wid = wid
        self.owner = owner  # the digest of the key that made it; only that key may open it
        self.definition = definition
        self.cursors = cursors
        self.topic_ids = topic_ids
        self.epoch = epoch
        self.stream = 0
        self.stale = False
        self.restored = False  # known from a gateway, after we died
        self.begun_stale = False  # whether it was when its stream was opened
        self.idle_since_ms = 0
        self.waiting: list[tuple[Gateway, int]] = []  # opens that wait for the stream before them to close


class Sessions:
    def __init__(
        self,
        settings: Settings,
        *,
        now_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        restarted: bool = False,
    ) -> None:
        self._settings = settings
        self._restarted = restarted  # gateways may hold what a process before this one has granted
        self._now_ms = now_ms
        self._sessions: dict[str, _Session] = {}
        self._idle: OrderedDict[str, _Session] = OrderedDict()  # the longest idle first
        self._unsorted = False
        self._started_ms = now_ms()
        self._restored: list[Gateway] = []  # have told us what they know
        self._mirror: Gateway | None = None
        self._mirror_is_late = restarted  # it may know of sessions from before us
        self._streams: dict[int, tuple[Gateway, _Session | None]] = {}
        self._owners: dict[int, bytes] = {}  # whose each stream is, if there are keys
        self._of_owner: Counter[bytes] = Counter()
        # Streams keep their numbers when this process dies, so the next one must not give them out again.
        self._next_stream = time.monotonic_ns()
        self.handlers: dict[int, Callable[[Any, Any, int], bytes | None]] = {
            Op.CREATE_SESSION: self._create,
            Op.OPEN_STREAM: self._open,
            Op.SAVE_CURSORS: self._save,
            Op.CLOSE_STREAM: self._close,
            Op.RESTORE_SESSION: self._restore,
        }

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def streams(self) -> int:
        return len(self._streams)

    # --- what gateways ask ---

    def _create(self, request: messages.CreateSession, gateway: Gateway, correlation: int) -> bytes:
        self._forget_expired()
        most = self._settings.max_watch_sessions
        if most:
            self._check_counts()
        if most and len(self._sessions) >= most:
            raise throttled_by("max_watch_sessions", most, "close watch sessions, or wait until idle ones expire")
        session = _Session(
            request.wid, request.definition, request.cursors, request.topic_ids, epoch=0, owner=request.owner
        )
        self._sessions[session.wid] = session
        self._rest(session)
        return messages.pack(Op.CREATE_SESSION, correlation, messages.SessionCreated())

    def _open(self, request: messages.OpenStream, gateway: Gateway, correlation: int) -> bytes | None:
        self._forget_expired()
        session = None
        if request.wid is not None:
            session = self._sessions.get(request.wid)
            if (session is None or session.restored) and self._may_come():
                raise being_restored()
            if session is not None and session.restored and len(self._restored) < self._settings.gateways:
                session.stale = True  # not all have said what they know, and we have waited long enough
            if session is None:
                raise session_not_found()
            if not hmac.compare_digest(session.owner, request.owner):
                raise ApiError("unauthorized", "this watch session belongs to another key")
        most = self._settings.max_sse_connections
        if session is not None and session.stream:
            session.waiting.append((gateway, correlation))
            if len(session.waiting) == 1:
                self._take(session)
            return None
        if most or self._settings.max_sse_connections_per_key:
            self._check_counts()
        if most and len(self._streams) >= most:
            raise throttled_by("max_sse_connections", most, "close streams that are not needed")
        of_key = self._settings.max_sse_connections_per_key
        if of_key and request.owner and self._of_owner[request.owner] >= of_key:
            raise throttled_by("max_sse_connections_per_key", of_key, "close streams of this key that are not needed")
        return self._grant(session, gateway, correlation, request.owner)

    def _save(self, request: messages.SaveCursors, gateway: Gateway, correlation: int) -> None:
        owner, session = self._streams.get(request.stream, (None, None))
        if session is not None and owner is gateway:
            session.cursors, session.topic_ids = request.cursors, request.topic_ids

    def _close(self, request: messages.CloseStream, gateway: Gateway, correlation: int) -> None:
        owner, session = self._streams.get(request.stream, (None, None))
        if owner is not gateway:
            return
        self._forget_stream(request.stream)
        if session is not None:
            if request.cursors is not None and request.topic_ids is not None:
                session.cursors, session.topic_ids = request.cursors, request.topic_ids
                session.stale = False
            else:
                session.stale = session.begun_stale  # it never got to its client
            self._released(session)

    def _check_counts(self) -> None:
        """What is open is not known before all gateways have said what they hold."""
        if self._restarted and self._may_come():
            raise being_restored()

    def _may_come(self) -> bool:
        """Whether a gateway, or the mirror, has still to say what it knows; one that is away has nothing to say."""
        late = len(self._restored) < self._settings.gateways or self._mirror_is_late
        return late and self._now_ms() - self._started_ms < limits.RESTORE_WAIT_MS

    def _restore(self, request: messages.RestoreSession, gateway: Gateway, correlation: int) -> None:
        """Nothing is refused: these were admitted before. Without a session and a stream it is the end of the list."""
        session = None
        if request.wid is None and not request.stream:
            if request.mirrored:
                self._mirror, self._mirror_is_late = gateway, False
                for known in self._sessions.values():
                    self._keep(known)
            else:
                self._restored.append(gateway)
            return
        if request.wid is not None:
            session = self._sessions.get(request.wid)
            if session is not None and (_is_older(request, session) or session.stream):
                if request.stream:
                    # Somebody has opened it since; this stream is not the session's any more.
                    gateway.send_always(messages.pack(Op.TAKE_STREAM, 0, messages.TakeStream(request.stream)))
                return
            session = _Session(
                request.wid,
                request.definition,
                request.cursors,
                request.topic_ids,
                epoch=request.epoch,
                owner=request.owner,
            )
            session.restored = True  # somebody else may know better, and is only slower to say so
            session.stale = request.stale
            self._sessions[session.wid] = session
            self._idle.pop(session.wid, None)
            if request.stream:
                session.stream = request.stream
                self._keep(session)
            else:
                self._rest(session, since_ms=self._now_ms() - request.idle_ms)
        if request.stream:
            self._note_stream(request.stream, gateway, session, request.owner)

    def _keep(self, session: _Session) -> None:
        """Tell the mirror."""
        if self._mirror is not None:
            idle_ms = 0 if session.stream else self._now_ms() - session.idle_since_ms
            copy = messages.RestoreSession(
                wid=session.wid,
                stream=session.stream,
                epoch=session.epoch,
                definition=session.definition,
                cursors=session.cursors,
                topic_ids=session.topic_ids,
                idle_ms=idle_ms,
                owner=session.owner,
                stale=session.stale,
            )
            self._mirror.send_always(messages.pack(Op.KEEP_SESSION, 0, copy))

    def gateway_gone(self, gateway: Gateway) -> None:
        if gateway is self._mirror:
            self._mirror = None
        self._restored = [known for known in self._restored if known is not gateway]
        for session in self._sessions.values():
            session.waiting = [waiter for waiter in session.waiting if waiter[0] is not gateway]
        for stream, (owner, served) in list(self._streams.items()):
            if owner is gateway:
                self._forget_stream(stream)
                if served is not None:
                    served.stale = True
                    self._released(served)

    # --- the count of streams ---

    def _note_stream(self, stream: int, gateway: Gateway, session: _Session | None, owner: bytes) -> None:
        self._forget_stream(stream)
        self._streams[stream] = (gateway, session)
        if owner:
            self._owners[stream] = owner
            self._of_owner[owner] += 1

    def _forget_stream(self, stream: int) -> None:
        self._streams.pop(stream, None)
        if (owner := self._owners.pop(stream, None)) is not None:
            self._of_owner[owner] -= 1
            if not self._of_owner[owner]:
                del self._of_owner[owner]

    # --- the life of a session ---

    def _grant(self, session: _Session | None, gateway: Gateway, correlation: int, owner: bytes) -> bytes:
        stream = self._next_stream
        self._next_stream += 1
        self._note_stream(stream, gateway, session, owner)
        if session is None:
            opened = messages.StreamOpened(stream, 0, b"", [], [], False)
        else:
            self._idle.pop(session.wid, None)
            session.stream = stream
            session.epoch += 1
            opened = messages.StreamOpened(
                stream, session.epoch, session.definition, session.cursors, session.topic_ids, session.stale
            )
            session.begun_stale, session.stale = session.stale, False
            session.restored = False
            self._keep(session)
        return messages.pack(Op.OPEN_STREAM, correlation, opened)

    def _take(self, session: _Session) -> None:
        owner, _ = self._streams[session.stream]
        owner.send_always(messages.pack(Op.TAKE_STREAM, 0, messages.TakeStream(session.stream)))

    def _released(self, session: _Session) -> None:
        """Its stream has ended: whoever waits for it is next."""
        session.stream = 0
        if not session.waiting:
            self._rest(session)
            return
        gateway, correlation = session.waiting.pop(0)
        gateway.send_always(self._grant(session, gateway, correlation, session.owner))
        if session.waiting:
            self._take(session)

    def _rest(self, session: _Session, *, since_ms: int | None = None) -> None:
        session.idle_since_ms = self._now_ms() if since_ms is None else since_ms
        self._idle[session.wid] = session
        self._unsorted = self._unsorted or since_ms is not None
        self._keep(session)

    def _forget_expired(self) -> None:
        oldest = self._now_ms() - self._settings.session_ttl_ms
        if self._unsorted:
            self._idle = OrderedDict(sorted(self._idle.items(), key=lambda entry: entry[1].idle_since_ms))
            self._unsorted = False
        while self._idle:
            session = next(iter(self._idle.values()))
            if session.idle_since_ms > oldest:
                return
            del self._idle[session.wid]
            del self._sessions[session.wid]


def _is_older(request: messages.RestoreSession, session: _Session) -> bool:
    """Of the same opening a gateway knows more than the mirror, and the one that speaks last as much as the others."""
    return request.epoch < session.epoch or (request.mirrored and request.epoch == session.epoch)


def being_restored() -> ApiError:
    return ApiError("shard_unavailable", "sessions are being restored after a restart", retry_after_s=1)
