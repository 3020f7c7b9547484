"""Request bodies: decoded, checked, and turned into what shards understand. Every refusal is an ApiError.

`data` and `meta` stay raw JSON bytes and are never interpreted. What is unknown is ignored; what is known and of
the wrong type is refused; a duplicate key's last value counts.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from topics import limits
from topics.actors.messages import Ack, Append, Claim, DeleteRecords, Diff, Extend, Nack, PutRouter
from topics.errors import ApiError, invalid
from topics.settings import Settings
from topics.storage import columns
from topics.storage.config import Discard, Durability, TopicConfig, TopicType
from topics.storage.format import RECORD_OVERHEAD, RECORD_SEPARATOR
from topics.storage.routers import Guarantee

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}\Z")
_ROUTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}\Z")
_T = TypeVar("_T")
CUT = "Input data was truncated"  # as the decoder says it
_PLACE = re.compile(r" \(byte \d+\)\Z")
_LONE_SURROGATE = (
    r"a lone surrogate (\ud800 to \udfff without its other half) is not text; escape both halves, like \ud83d\ude00, "
    "or send the character as UTF-8"
)
_LONE_AT_END = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u|\\?\Z)")  # not one whose other half is cut off
_CUT_BYTES = 11  # such an escape, and one byte less than its other half has: then the decoder looks no further
_NEAR_END = 512


def check_name(name: str, *, what: str = "topic name", known: re.Pattern[str] = _NAME, signs: str = ". _ : -") -> str:
    if known.match(name) is None:
        shown = name if len(name) <= 64 else name[:61] + "..."
        raise invalid(
            f"{what} {shown!r} is not valid: 1 to 255 characters, letters, digits and {signs} only, starting with a "
            "letter or digit"
        )
    return name


def check_router_name(name: str) -> str:
    return check_name(name, what="router name", known=_ROUTER_NAME, signs=". _ : - >")


class RecordIn(msgspec.Struct, gc=False):
    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: Raw = None  # type: ignore[assignment]  # absent; msgspec has no union with Raw


class ConfigIn(msgspec.Struct):
    type: TopicType | UnsetType = UNSET
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: Discard = "old"
    durable: bool = False
    durability: Durability | UnsetType = UNSET
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = limits.DEFAULT_IDEMPOTENCY_WINDOW_MS
    dedupe_node: bool = True
    lease_ms: int = limits.DEFAULT_LEASE_MS
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    leases_durable: bool = False


class AppendIn(msgspec.Struct):
    records: list[RecordIn]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: ConfigIn | None = None
    disable_backpressure: bool = False


Match = str | tuple[str, str, str]  # "X", ["tag","Eq","X"] or ["tag","Glob","X*"]


class _DiffIn(msgspec.Struct):
    from_seq: int = 0
    limit: int = limits.DEFAULT_LIMIT
    node: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: int = 0
    max_batch_bytes: int = 0


class _DeleteIn(msgspec.Struct):
    before_seq: int | None = None
    match: Match | None = None


class _RouterIn(msgspec.Struct):
    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Match | None = None
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"


_router_decoder = msgspec.json.Decoder(_RouterIn)
append_decoder = msgspec.json.Decoder(AppendIn)
_diff_decoder = msgspec.json.Decoder(_DiffIn)
_delete_decoder = msgspec.json.Decoder(_DeleteIn)
_config_decoder = msgspec.json.Decoder(ConfigIn)
_NULL = Raw(b"null")
_keys_decoder = msgspec.json.Decoder(dict[str, Raw])
_DEEP = 500  # levels that a meta leaves to those who read it: they stand elsewhere in their stacks


def decode_json(decoder: msgspec.json.Decoder[_T], body: bytes | bytearray) -> _T:
    try:
        if not body.isascii():
            body.decode()  # raw values are passed through, so nobody else would look
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(f"the body does not fit: {_short(error)}") from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not valid JSON: {json_problem(_short(error), body)}") from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not valid UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def json_problem(problem: str, body: bytes | bytearray) -> str:
    """What the decoder says, in words that help. Of a surrogate without its other half it says this and that, and if
    that stands near the end of the body, that the body is cut."""
    if "surrogate pair" in problem or "end of hex escape" in problem:
        place = _PLACE.search(problem)
        return _LONE_SURROGATE + (place[0] if place is not None else "")
    if problem != CUT:
        return problem
    return _LONE_SURROGATE if _ends_in_lone_surrogate(body) else "it ends too early"


def _ends_in_lone_surrogate(body: bytes | bytearray) -> bool:
    end = bytes(body[-_NEAR_END:])
    found = _LONE_AT_END.search(end, max(len(end) - _CUT_BYTES, 0))
    if found is None:
        return False
    before = end[: found.start()]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0  # otherwise the backslash is text, and what follows too


def _short(error: Exception) -> str:
    """It may quote what was sent, which has no bound."""
    text = str(error)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"


def unsigned(value: int, field: str) -> int:
    if not 0 <= value <= limits.U64_MAX:
        raise invalid(f"{field} must be from 0 to 2^64-1", field=field)
    return value


def _clamped(value: int, bounds: tuple[int, int], field: str) -> int:
    low, high = bounds
    if low >= 0 and value < 0:
        raise invalid(f"{field} must not be negative", field=field)
    return min(max(value, low), high)


# --- config ------------------------------------------------------------------------------------------


def decode_config(body: bytes | bytearray, topic: str) -> tuple[TopicConfig, TopicType | None]:
    """A PUT's body: the config it declares, and the type only if it was said."""
    given = decode_json(_config_decoder, body) if body else ConfigIn()
    return resolve_config(given, topic), None if given.type is UNSET else given.type


def resolve_config(given: ConfigIn, topic: str) -> TopicConfig:
    durability: Durability
    if given.durability is not UNSET:
        durability = given.durability
    else:
        durability = "fsync" if given.durable else "disk"
    if given.dead_letter is not None:
        check_name(given.dead_letter, what="dead_letter")
        if given.dead_letter == topic:
            raise invalid("dead_letter must name another topic than this one", field="dead_letter")
    priority = given.priority
    if priority is not None:
        low, high = limits.PRIORITY_RANGE
        priority = min(max(priority, low), high)
    return TopicConfig(
        type="log" if given.type is UNSET else given.type,
        ttl_ms=unsigned(given.ttl_ms, "ttl_ms"),
        cap_records=unsigned(given.cap_records, "cap_records"),
        cap_bytes=unsigned(given.cap_bytes, "cap_bytes"),
        discard=given.discard,
        durable=durability == "fsync",
        durability=durability,
        priority=priority,
        auto_priority=given.auto_priority,
        auto_create=given.auto_create,
        idempotency_window_ms=unsigned(given.idempotency_window_ms, "idempotency_window_ms"),
        dedupe_node=given.dedupe_node,
        lease_ms=_clamped(given.lease_ms, limits.LEASE_MS_RANGE, "lease_ms"),
        claim_jitter_ms=_clamped(given.claim_jitter_ms, limits.CLAIM_JITTER_MS_RANGE, "claim_jitter_ms"),
        max_deliveries=unsigned(given.max_deliveries, "max_deliveries"),
        dead_letter=given.dead_letter,
        leases_durable=given.leases_durable,
    )


# --- append ------------------------------------------------------------------------------------------


def decode_append(body: bytes | bytearray, topic: str, settings: Settings, *, key: str | None) -> tuple[Append, bytes]:
    """The message head and the batch body. `key` is the Idempotency-Key header; the body's field wins."""
    return resolve_append(decode_json(append_decoder, body), topic, settings, key=key, size=len(body))


def _check_key(key: str) -> None:
    if not 1 <= len(key) <= limits.MAX_KEY_CHARS:
        raise invalid(f"idempotency_key must have 1 to {limits.MAX_KEY_CHARS} characters", field="idempotency_key")


def resolve_append(
    given: AppendIn, topic: str, settings: Settings, *, key: str | None, size: int
) -> tuple[Append, bytes]:
    """The same for what is decoded already; `size` is how many bytes it was."""
    records = given.records
    count = len(records)
    key = check_batch(given, settings, key=key)
    data = RECORD_SEPARATOR.join([record.data for record in records])
    weight = len(data) - (count - 1) + count * RECORD_OVERHEAD
    tags = nodes = metas = None
    common = given.node
    if any([record.tag is not None or record.meta is not None or record.node is not None for record in records]):
        tags, nodes, metas, meta_bytes = side_columns(records, common, settings)
        weight += meta_bytes
    else:
        nodes = common
    if size > settings.max_record_bytes:
        check_record_sizes(records, settings.max_record_bytes)
    config = None if given.config is None else resolve_config(given.config, topic)
    packed = columns.pack_joined(data, tags=tags, nodes=nodes, metas=metas)
    return Append(topic, count, weight, given.create, config, key, given.disable_backpressure), packed


def check_batch(given: AppendIn, settings: Settings, *, key: str | None) -> str | None:
    """What can be checked without looking at the records; the idempotency key, which the body or a header gives."""
    count = len(given.records)
    if count == 0:
        raise invalid("records must hold at least one record", field="records")
    if count > settings.max_batch_records:
        raise batch_too_large(count, settings.max_batch_records)
    if given.idempotency_key is not None:
        key = given.idempotency_key
    if key is not None:
        _check_key(key)
    if given.node is not None:
        _check_text(given.node, settings.max_node_bytes, "node")
    return key


def batch_too_large(count: int, most: int) -> ApiError:
    return ApiError(
        "batch_too_large",
        f"{count} records in one write; the most is {most}. Split it",
        {"count": count, "max": most},
    )


class _PlainRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    data: Raw


class _PlainIn(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    records: list[_PlainRecord]


_decode_plain = msgspec.json.Decoder(_PlainIn).decode


def decode_plain(body: bytes | bytearray, settings: Settings) -> tuple[int, int, bytes] | None:
    """(count, size, joined data) of an append that is nothing but data and needs no closer look; None: look closer."""
    if len(body) > settings.max_record_bytes or not body.isascii():
        return None
    try:
        records = _decode_plain(body).records
    except (msgspec.MsgspecError, RecursionError):
        return None
    count = len(records)
    if count == 1:
        data = bytes(records[0].data)
        return 1, len(data) + RECORD_OVERHEAD, data
    if not 1 < count <= settings.max_batch_records:
        return None
    data = RECORD_SEPARATOR.join([record.data for record in records])
    return count, len(data) - (count - 1) + count * RECORD_OVERHEAD, data


def plain_records(records: list[RecordIn], settings: Settings) -> tuple[int, int, bytes] | None:
    """The same for records that are decoded already."""
    count = len(records)
    if not 1 <= count <= settings.max_batch_records or any(
        [record.tag is not None or record.meta is not None or record.node is not None for record in records]
    ):
        return None
    data = bytes(records[0].data) if count == 1 else RECORD_SEPARATOR.join([record.data for record in records])
    return count, len(data) - (count - 1) + count * RECORD_OVERHEAD, data


def side_columns(
    records: list[RecordIn], common: str | None, settings: Settings
) -> tuple[list[str | None] | None, str | list[str | None] | None, list[Raw | None] | None, int]:
    """Tags, nodes and metas of a batch that has any, checked; a column nobody uses is None."""
    tags = [record.tag for record in records]
    nodes = [record.node for record in records]
    metas = [None if record.meta is None or record.meta == _NULL else record.meta for record in records]
    meta_bytes = 0
    used_tags = [tag for tag in tags if tag is not None]
    for tag in used_tags:
        _check_text(tag, settings.max_tag_bytes, "tag")
    used_nodes = [node for node in nodes if node is not None]
    for node in used_nodes:
        _check_text(node, settings.max_node_bytes, "node")
    used_metas = [meta for meta in metas if meta is not None]
    for meta in used_metas:
        meta_bytes += _check_meta(meta, settings)
    all_nodes: str | list[str | None] | None = common
    if used_nodes:
        all_nodes = [common if node is None else node for node in nodes]
    return tags if used_tags else None, all_nodes, metas if used_metas else None, meta_bytes


def _check_text(text: str, most: int, field: str) -> None:
    if len(text) > most or (not text.isascii() and len(text.encode()) > most):
        raise invalid(f"{field} is longer than {most} bytes", field=field, max=most)


def _check_meta(meta: Raw, settings: Settings) -> int:
    raw = bytes(meta)
    if raw[:1] != b"{":
        raise invalid("meta must be an object", field="meta")
    if len(raw) > settings.max_meta_bytes:
        raise invalid(f"meta is longer than {settings.max_meta_bytes} bytes", field="meta", max=settings.max_meta_bytes)
    if raw.count(b"{") + raw.count(b"[") > limits.META_DEPTH:
        try:
            msgspec.json.decode(b"%b%b%b" % (b"[" * _DEEP, raw, b"]" * _DEEP), type=Raw)
        except RecursionError:
            raise invalid("meta is nested too deeply", field="meta", max=limits.META_DEPTH) from None
    if raw.count(b":") > limits.MAX_META_KEYS and len(_keys_decoder.decode(raw)) > limits.MAX_META_KEYS:
        raise invalid(f"meta has more than {limits.MAX_META_KEYS} keys", field="meta", max=limits.MAX_META_KEYS)
    return len(raw)


def check_record_sizes(records: list[RecordIn], most: int, *, first: int = 0) -> None:
    for at, record in enumerate(records, first):
        size = len(record.data) + (len(record.meta) if record.meta is not None else 0)
        if size > most:
            raise ApiError(
                "record_too_large",
                f"record {at} has {size} bytes of data and meta; the most is {most}",
                {"record": at, "bytes": size, "max": most},
            )


# --- diff and delete ---------------------------------------------------------------------------------


def decode_diff(body: bytes | bytearray, topic: str, settings: Settings) -> Diff:
    given = decode_json(_diff_decoder, body) if body else _DiffIn()
    if given.limit < 0:
        raise invalid("limit must not be negative", field="limit")
    if given.wait_ms < 0:
        raise invalid("wait_ms must not be negative", field="wait_ms")
    if given.max_batch_bytes < 0:
        raise invalid("max_batch_bytes must not be negative", field="max_batch_bytes")
    nodes = [given.node] if isinstance(given.node, str) else given.node
    if nodes is not None and len(nodes) > limits.MAX_READ_NODES:
        raise invalid(f"node lists more than {limits.MAX_READ_NODES} ids", field="node")
    return Diff(
        topic=topic,
        from_seq=unsigned(given.from_seq, "from_seq"),
        limit=min(given.limit or limits.DEFAULT_LIMIT, settings.max_limit),
        max_bytes=min(given.max_batch_bytes or limits.DEFAULT_BATCH_BYTES, limits.MAX_BATCH_BYTES),
        nodes=nodes,
        include_tags=given.include_tags,
        include_meta=given.include_meta,
        wait_ms=min(given.wait_ms, limits.MAX_WAIT_MS),
    )


def decode_delete(body: bytes | bytearray, topic: str) -> DeleteRecords:
    given = decode_json(_delete_decoder, body or b"{}")
    if given.before_seq is None and given.match is None:
        raise invalid("a delete needs before_seq, match or both")
    before = None if given.before_seq is None else unsigned(given.before_seq, "before_seq")
    if given.match is None:
        return DeleteRecords(topic, before, None, False)
    tag, prefix = decode_match(given.match)
    return DeleteRecords(topic, before, tag, prefix)


def decode_match(match: Match, *, field: str = "match") -> tuple[str, bool]:
    """(tag, whether it is a prefix) from "X", ["tag","Eq","X"] or ["tag","Glob","X*"]."""
    if isinstance(match, str):
        return match, False
    if match[0] != "tag":
        raise invalid(f'{field} must be a string, ["tag","Eq","X"] or ["tag","Glob","X*"]', field=field)
    _, operator, pattern = match
    if operator == "Eq":
        return pattern, False
    if operator != "Glob":
        raise invalid(f"{field} knows Eq and Glob, not {operator[:32]!r}", field=field)
    if not pattern.endswith("*") or "*" in pattern[:-1]:
        raise invalid("a Glob pattern is a literal prefix followed by a single *", field=field)
    return pattern[:-1], True


# --- routers -----------------------------------------------------------------------------------------


def decode_router(body: bytes | bytearray, router: str) -> PutRouter:
    given = decode_json(_router_decoder, body or b"{}")
    check_name(given.source, what="source")
    check_name(given.dest, what="dest")
    if given.source == given.dest:
        raise invalid("source and dest must be two topics", field="dest")
    pattern = None
    if given.filter is not None:
        tag, prefix = decode_match(given.filter, field="filter")
        pattern = ["tag", "Glob", tag + "*"] if prefix else ["tag", "Eq", tag]
    return PutRouter(
        router=router,
        source=given.source,
        dest=given.dest,
        preserve_node=given.preserve_node,
        preserve_tag=given.preserve_tag,
        create_dest=given.create_dest,
        filter=pattern,
        allow_cycle=given.allow_cycle,
        guarantee=given.guarantee,
    )


# --- queues ------------------------------------------------------------------------------------------


class _ClaimIn(msgspec.Struct):
    node: str
    max: int | None = None
    lease_ms: int | None = None
    idempotency_key: str | None = None


class _AckIn(msgspec.Struct):
    node: str
    seqs: list[int]
    lease_ids: list[str] | None = None


class _NackIn(_AckIn):
    delay_ms: int | None = None


class _ExtendIn(_AckIn, kw_only=True):
    lease_ms: int


_claim_decoder = msgspec.json.Decoder(_ClaimIn)
_ack_decoder = msgspec.json.Decoder(_AckIn)
_nack_decoder = msgspec.json.Decoder(_NackIn)
_extend_decoder = msgspec.json.Decoder(_ExtendIn)
_LEASE_ID = re.compile(r"lease_([0-9a-f]{1,16})\Z")


def decode_claim(body: bytes | bytearray, topic: str, settings: Settings, *, key: str | None = None) -> Claim:
    given = decode_json(_claim_decoder, body or b"{}")
    if given.idempotency_key is not None:
        key = given.idempotency_key
    if key is not None:
        _check_key(key)
    return Claim(
        topic,
        check_node(given.node, settings),
        claim_size(1 if given.max is None else given.max, settings),
        None if given.lease_ms is None else lease_time(given.lease_ms),
        key or "",
    )


def decode_ack(body: bytes | bytearray, topic: str, settings: Settings) -> Ack:
    given = decode_json(_ack_decoder, body or b"{}")
    return Ack(topic, *_held(given, settings))


def decode_nack(body: bytes | bytearray, topic: str, settings: Settings) -> Nack:
    given = decode_json(_nack_decoder, body or b"{}")
    delay_ms = given.delay_ms or 0
    if delay_ms < 0:
        raise invalid("delay_ms must not be negative", field="delay_ms")
    return Nack(topic, *_held(given, settings), min(delay_ms, limits.DELAY_MS_RANGE[1]))


def decode_extend(body: bytes | bytearray, topic: str, settings: Settings) -> Extend:
    given = decode_json(_extend_decoder, body or b"{}")
    return Extend(topic, *_held(given, settings), lease_time(given.lease_ms))


def check_node(node: str, settings: Settings) -> str:
    if not node:
        raise invalid("node must name the worker", field="node")
    _check_text(node, settings.max_node_bytes, "node")
    return node


def claim_size(most: int, settings: Settings) -> int:
    if most < 1:
        raise invalid("max must be at least 1", field="max")
    return min(most, settings.max_claim)


def lease_time(lease_ms: int) -> int:
    if lease_ms < 0:
        raise invalid("lease_ms must not be negative", field="lease_ms")
    low, high = limits.LEASE_MS_RANGE
    return min(max(lease_ms, low), high)


def _held(given: _AckIn, settings: Settings) -> tuple[str, list[int], list[int] | None]:
    """Who speaks of which jobs; a token that is none of ours is one that matches no lease."""
    node = check_node(given.node, settings)
    seqs = given.seqs
    if not seqs:
        raise invalid("seqs must name at least one job", field="seqs")
    if len(seqs) > settings.max_claim:
        raise ApiError(
            "batch_too_large",
            f"{len(seqs)} seqs in one request; the most is {settings.max_claim}",
            {"count": len(seqs), "max": settings.max_claim},
        )
    for seq in seqs:
        unsigned(seq, "seqs")
    if given.lease_ids is None:
        return node, seqs, None
    if len(given.lease_ids) != len(seqs):
        raise invalid("lease_ids must have one token for each of seqs", field="lease_ids")
    found = [_LEASE_ID.match(token) for token in given.lease_ids]
    return node, seqs, [int(token[1], 16) if token else 0 for token in found]
