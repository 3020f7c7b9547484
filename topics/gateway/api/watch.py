"""The endpoints of live delivery: create a watch session, open its stream, open a WebSocket.

A session is made in two steps: the shards say where its topics stand, then the sessions' home takes it in. Opening
asks the home alone, which counts streams over all gateways and hands a session over from whoever holds it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any

import msgspec

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, invalid, session_not_found
from topics.gateway.api.positions import Found, described, locate, start_of
from topics.gateway.api.topics import flag, with_performance
from topics.gateway.api.types import Call, Outcome, Request, Response
from topics.gateway.api.watch_schemas import decode_watch
from topics.gateway.auth import check_names, owner_of
from topics.gateway.origins import check_events
from topics.gateway.streams import frames
from topics.gateway.streams.registry import HOME, Remembered, Streams
from topics.gateway.streams.sse import Definition, SseStream
from topics.gateway.streams.websocket import Socket
from topics.keys import Key

SSE_HEADERS = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("Connection", "keep-alive"),
    ("X-Accel-Buffering", "no"),
)
_WID = re.compile(r"wid_[A-Za-z0-9_-]{22}\Z")
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Watches:
    def __init__(self, streams: Streams, *, shards: int) -> None:
        self.streams = streams
        self._settings = streams.settings
        self._shards = shards

    # --- SSE ---

    def create(self, request: Request) -> Outcome:
        given = decode_watch(request.body, self._settings)
        check_names(request.key, given.topics)
        owner = owner_of(request.key)
        lenient = flag(request, "lenient", False)

        def register(found: Found) -> Outcome:
            topics = [name for name in given.topics if name in found]
            cursors = [start_of(given.topics[name], found[name]) for name in topics]
            definition = Definition(
                topics=topics,
                nodes=given.nodes,
                limit=given.limit,
                max_bytes=given.max_bytes,
                include_tags=given.include_tags,
                include_meta=given.include_meta,
                include_data=given.include_data,
                heartbeat_ms=given.heartbeat_ms,
            )
            wid = "wid_" + base64.urlsafe_b64encode(os.urandom(16)).rstrip(b"=").decode()
            content = {
                "wid": wid,
                "stream_url": f"/v0/watch/{wid}",
                "session_ttl_ms": self._settings.session_ttl_ms,
                "topics": described(topics, cursors, found),
            }
            head = messages.CreateSession(
                wid, msgspec.msgpack.encode(definition), cursors, [found[name].topic_id for name in topics], owner
            )

            def render(answer: messages.SessionCreated, body: bytes | memoryview) -> Response:
                streams = self.streams
                streams.remember(wid, Remembered(0, head.definition, cursors, head.topic_ids, streams.now_ns, owner))
                return Response(200, with_performance(content, request.started_ns))

            return _HomeCall(shard=HOME, op=Op.CREATE_SESSION, head=head, rendered=render)

        return locate(list(given.topics), self._shards, lenient=lenient, then=register)

    def open(self, request: Request) -> Outcome:
        wid = request.name
        if _WID.match(wid) is None:
            raise session_not_found()  # clients answer that with another POST, and a 400 with giving up
        check_events(request.headers)
        last_id = _last_id(request.headers.get(b"last-event-id"))

        def render(opened: messages.StreamOpened, body: bytes | memoryview) -> Response:
            stream = SseStream(self.streams, wid, opened, shards=self._shards, last_id=last_id, key=request.key)
            try:
                check_names(request.key, stream.topics)  # a reload may have taken prefixes from the key since
            except ApiError:
                stream.discard()
                raise
            return Response(200, b"", SSE_HEADERS, stream=stream)

        owner = owner_of(request.key)
        return _HomeCall(shard=HOME, op=Op.OPEN_STREAM, head=messages.OpenStream(wid, owner), rendered=render)

    # --- WebSocket ---

    def socket(self, request: Request) -> Outcome:
        accept = self.handshake(request.headers)

        def render(opened: messages.StreamOpened, body: bytes | memoryview) -> Response:
            headers = (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept))
            return Response(101, b"", headers, stream=self.new_socket(opened, request.key))

        return self.open_socket(render, request.key)

    def open_socket(
        self, render: Callable[[messages.StreamOpened, bytes | memoryview], Response], key: Key | None
    ) -> Outcome:
        head = messages.OpenStream(None, owner_of(key))
        return _HomeCall(shard=HOME, op=Op.OPEN_STREAM, head=head, rendered=render)

    def new_socket(self, opened: messages.StreamOpened, key: Key | None) -> Socket:
        return Socket(self.streams, opened.stream, shards=self._shards, key=key)

    def handshake(self, headers: Any) -> str:
        """Check an upgrade; returns what proves that we understood it."""
        upgrade = _tokens(headers.get(b"upgrade", b""))
        if b"websocket" not in upgrade or b"upgrade" not in _tokens(headers.get(b"connection", b"")):
            raise ApiError("upgrade_required", "this is a WebSocket endpoint: connect with a WebSocket client")
        if headers.get(b"sec-websocket-version", b"") != b"13":
            raise ApiError("upgrade_required", "only WebSocket version 13 is spoken here")
        key = headers.get(b"sec-websocket-key", b"")
        try:
            if len(base64.b64decode(key, validate=True)) != 16:
                raise ValueError
        except ValueError:
            raise invalid("Sec-WebSocket-Key must be 16 bytes in base64") from None
        return base64.b64encode(hashlib.sha1(key + _WEBSOCKET_GUID).digest()).decode()


class _HomeCall(Call, kw_only=True, gc=False, eq=False):
    rendered: Callable[[Any, bytes | memoryview], Response]

    def render(self, answer: Any, body: bytes | memoryview) -> Response:
        return self.rendered(answer, body)


# --- headers ---


def _last_id(raw: bytes | None) -> dict[str, int] | None:
    """A browser sends back whatever id it last saw, and an EventSource that is refused never connects again: what is no
    id of ours is left aside, and the session's own cursors count."""
    if not raw:
        return None
    try:
        return frames.parse_composite(raw.decode("latin-1"), field="Last-Event-ID")
    except ApiError:
        return None


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]
