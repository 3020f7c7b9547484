"""What to watch, as clients say it: the body of POST /v0/watch and the commands of a WebSocket. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw

from topics import limits
from topics.actors.messages import Append
from topics.errors import ApiError, invalid
from topics.gateway.api import schemas
from topics.gateway.api.schemas import check_name, decode_json, unsigned
from topics.gateway.large.packing import Packing
from topics.gateway.streams.frames import parse_composite
from topics.settings import Settings


class Start(msgspec.Struct, frozen=True):
    """Where to begin in a topic."""

    from_seq: int = 0
    tail: bool = False


class _Wanted(msgspec.Struct, kw_only=True):
    """The options that SSE and WebSocket have in common."""

    node: str | list[str] | None = None
    limit: int = limits.DEFAULT_LIMIT
    max_batch_bytes: int = limits.DEFAULT_WATCH_BATCH_BYTES
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True
    consistency: Literal["eventual", "strong"] = "eventual"


class _WatchIn(_Wanted, kw_only=True):
    topics: dict[str, Start]
    heartbeat_ms: int = limits.DEFAULT_HEARTBEAT_MS
    cursor: str | None = None


class Subscription(msgspec.Struct):
    """Checked and clamped."""

    topics: dict[str, Start]
    nodes: list[str] | None
    limit: int
    max_bytes: int
    include_tags: bool
    include_meta: bool
    include_data: bool
    heartbeat_ms: int = 0


_watch_decoder = msgspec.json.Decoder(_WatchIn)


def decode_watch(body: bytes | bytearray, settings: Settings) -> Subscription:
    given = decode_json(_watch_decoder, body or b"{}")
    topics = given.topics
    if given.cursor is not None:
        positions = parse_composite(given.cursor, field="cursor")
        topics = {name: Start(positions[name]) if name in positions else start for name, start in topics.items()}
    subscription = _checked(given, topics, settings)
    low, high = limits.HEARTBEAT_MS_RANGE
    if given.heartbeat_ms < 0:
        raise invalid("heartbeat_ms must not be negative", field="heartbeat_ms")
    subscription.heartbeat_ms = min(max(given.heartbeat_ms, low), high)
    return subscription


def _checked(given: _Wanted, topics: dict[str, Start], settings: Settings) -> Subscription:
    if not topics:
        raise invalid("topics must name at least one topic", field="topics")
    if len(topics) > settings.max_watch_topics:
        raise invalid(
            f"{len(topics)} topics; one stream watches at most {settings.max_watch_topics}",
            field="topics",
            max=settings.max_watch_topics,
        )
    for name, start in topics.items():
        check_name(name)
        unsigned(start.from_seq, "from_seq")
    if given.limit < 0:
        raise invalid("limit must not be negative", field="limit")
    if given.max_batch_bytes < 0:
        raise invalid("max_batch_bytes must not be negative", field="max_batch_bytes")
    nodes = [given.node] if isinstance(given.node, str) else given.node
    if nodes is not None and len(nodes) > limits.MAX_READ_NODES:
        raise invalid(f"node lists more than {limits.MAX_READ_NODES} ids", field="node")
    return Subscription(
        topics=topics,
        nodes=nodes or None,
        limit=min(given.limit or limits.DEFAULT_LIMIT, settings.max_limit),
        max_bytes=min(given.max_batch_bytes or limits.DEFAULT_BATCH_BYTES, limits.MAX_BATCH_BYTES),
        include_tags=given.include_tags,
        include_meta=given.include_meta,
        include_data=given.include_data,
    )


# --- commands of a WebSocket ---

# Any JSON value as it was written; None: there is none. An answer carries the same bytes.
RequestId = Raw | None


class Subscribe(_Wanted, tag_field="op", tag="subscribe", kw_only=True):
    request_id: Raw = None  # type: ignore[assignment]  # absent; msgspec has no union with Raw
    topic: str | None = None
    topics: dict[str, Start] | None = None
    from_seq: int = 0
    tail: bool = False
    lenient: bool = False

    def subscription(self, settings: Settings) -> Subscription:
        if (self.topic is None) == (self.topics is None):
            raise invalid("subscribe takes either topic or topics", field="topic")
        topics = {self.topic: Start(self.from_seq, self.tail)} if self.topic is not None else self.topics
        assert topics is not None
        return _checked(self, topics, settings)


class Unsubscribe(msgspec.Struct, tag_field="op", tag="unsubscribe", kw_only=True):
    request_id: Raw = None  # type: ignore[assignment]  # absent; msgspec has no union with Raw
    topic: str | None = None
    topics: list[str] | None = None

    def names(self) -> list[str]:
        if (self.topic is None) == (self.topics is None):
            raise invalid("unsubscribe takes either topic or topics", field="topic")
        return [self.topic] if self.topic is not None else self.topics or []


class Publish(msgspec.Struct, tag_field="op", tag="publish", kw_only=True):
    topic: str
    records: list[schemas.RecordIn]
    request_id: Raw = None  # type: ignore[assignment]  # absent; msgspec has no union with Raw
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: schemas.ConfigIn | None = None
    disable_backpressure: bool = False
    return_seqs: bool = True

    def plain(self, settings: Settings, *, size: int) -> tuple[int, int, bytes] | None:
        """(count, size, joined data) if it is nothing but data and needs no closer look."""
        if (
            self.node is not None
            or self.idempotency_key is not None
            or self.create is not None
            or self.config is not None
            or self.disable_backpressure
            or size > settings.max_record_bytes
        ):
            return None
        return schemas.plain_records(self.records, settings)

    def append(self, settings: Settings, *, size: int) -> tuple[Append, bytes]:
        return schemas.resolve_append(self._given(), self.topic, settings, key=None, size=size)

    def packing(self, settings: Settings) -> Packing:
        """The same in slices, for a large one."""
        return Packing(self._given(), self.topic, settings, key=None)

    def _given(self) -> schemas.AppendIn:
        return schemas.AppendIn(
            records=self.records,
            node=self.node,
            idempotency_key=self.idempotency_key,
            create=self.create,
            config=self.config,
            disable_backpressure=self.disable_backpressure,
        )


class Ping(msgspec.Struct, tag_field="op", tag="ping", kw_only=True):
    request_id: Raw = None  # type: ignore[assignment]  # absent; msgspec has no union with Raw


Command = Subscribe | Unsubscribe | Publish | Ping


class _Named(msgspec.Struct):
    """What can be read of a command that is wrong otherwise."""

    op: Raw = None  # type: ignore[assignment]
    request_id: Raw = None  # type: ignore[assignment]


OPS = ("subscribe", "unsubscribe", "publish", "ping")
_OPS = frozenset(b'"%b"' % op.encode() for op in OPS)
_command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_named_decoder = msgspec.json.Decoder(_Named)
_raw_decoder = msgspec.json.Decoder(Raw)


def decode_command(text: bytes, *, most: int = limits.CONTROL_BODY_BYTES) -> Command:
    """`most`: bytes of every command but a publish."""
    command = _decode_command(text)
    if len(text) > most and not isinstance(command, Publish):
        raise _too_large(most)
    return command


def decode_publish(text: bytes, *, most: int) -> Publish:
    """A command that was too large for any other."""
    command = _decode_command(text)
    if not isinstance(command, Publish):
        raise _too_large(most)
    return command


def _too_large(most: int) -> ApiError:
    return ApiError("payload_too_large", f"a command other than publish has at most {most} bytes", {"max": most})


def _decode_command(text: bytes) -> Command:
    try:
        command = decode_json(_command_decoder, text)
    except ApiError as error:
        command = _decode_closely(text, error)
    # A shorter message has no longer id, and it may be kept as a whole until the answer.
    if len(text) > limits.WS_REQUEST_ID_BYTES and command.request_id is not None:
        if len(command.request_id) > limits.WS_REQUEST_ID_BYTES:
            raise invalid(
                f"request_id is longer than {limits.WS_REQUEST_ID_BYTES} bytes",
                field="request_id",
                max=limits.WS_REQUEST_ID_BYTES,
            )
        command.request_id = command.request_id.copy()  # without the message around it
    return command


def _decode_closely(text: bytes, error: ApiError) -> Command:
    """What `error` refused: a command after all, or the reason in the words of the contract."""
    try:
        op: Raw | None = decode_json(_named_decoder, text).op
    except ApiError:
        try:
            decode_json(_raw_decoder, text)
        except ApiError as unreadable:
            raise ApiError("invalid_json", unreadable.message) from None
        op = None  # JSON, but no object
    if op is None or bytes(op) not in _OPS:
        raise ApiError(
            "unsupported_message", f"a command is an object whose op is one of {', '.join(OPS)}", {"field": "op"}
        )
    if text.count(b'"op"') < 2:
        raise error
    # The decoder picks a command by the first op; of a key that is there twice the last one counts.
    fields = decode_json(_fields_decoder, text)
    return decode_json(_command_decoder, msgspec.json.encode(fields))


def request_id_of(text: bytes) -> RequestId:
    """Of a command that can't be read otherwise, if that much can."""
    try:
        given = _named_decoder.decode(text).request_id
    except (msgspec.MsgspecError, RecursionError):
        return None
    return None if given is None or len(given) > limits.WS_REQUEST_ID_BYTES else given
