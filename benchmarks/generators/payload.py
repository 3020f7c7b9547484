"""The bytes that are sent: records of a given size, and the requests that carry them.

Both sides get the same record bytes: ours as the JSON value `data`, Redis as the value of one field.
Everything here runs before the clock starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_PADDING = "abcdefghijklmnopqrstuvwxyz0123456789"


def record(number: int, *, size: int) -> bytes:
    """One JSON object of exactly `size` bytes, different for each number."""
    head = f'{{"id":"{number:09d}","kind":"order","total":{number % 9973}.25,"note":"'
    room = size - len(head) - 2
    if room < 0:
        raise ValueError(f"a record of {size} bytes has no room for its fields: at least {len(head) + 2}")
    turn = number % len(_PADDING)
    note = (_PADDING[turn:] + _PADDING[:turn]) * (room // len(_PADDING) + 1)
    return f'{head}{note[:room]}"}}'.encode()


def records(count: int, *, first: int, size: int) -> list[bytes]:
    return [record(number, size=size) for number in range(first, first + count)]


def http_post(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def http_get(path: str, *, accept: str = "application/json") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n".encode()


def http_append(topic: str, batch: Sequence[bytes]) -> bytes:
    body = b'{"records":[' + b",".join(b'{"data":' + data + b"}" for data in batch) + b"]}"
    path = f"/v0/topics/{topic}"
    return http_post(path if len(batch) == 1 else path + "?return_seqs=false", body)


def http_diff(topic: str, *, from_seq: int, limit: int) -> bytes:
    body = msgspec.json.encode({"from_seq": from_seq, "limit": limit})
    return http_post(f"/v0/topics/{topic}/diff", body)


def resp(*words: bytes) -> bytes:
    """One Redis command."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def resp_append(stream: str, batch: Sequence[bytes]) -> bytes:
    """One XADD per record, sent together: the pipeline is Redis's batch."""
    return b"".join(resp(b"XADD", stream.encode(), b"*", b"data", data) for data in batch)


def resp_range(stream: str, *, start: bytes, count: int) -> bytes:
    return resp(b"XRANGE", stream.encode(), start, b"+", b"COUNT", b"%d" % count)


def resp_xread(stream: str, *, after: bytes, count: int) -> bytes:
    """Everything after that id, waiting for it without end."""
    return resp(b"XREAD", b"COUNT", b"%d" % count, b"BLOCK", b"0", b"STREAMS", stream.encode(), after)


# --- watching ---------------------------------------------------------------------------------------------
# A record that is timed carries the time it was sent at, filled in at that moment: as many bytes, whatever
# the clock says, so that everything around it is made before.
STAMP = b'"at":"'
STAMP_DIGITS = 20


def stamped_record(*, size: int) -> bytes:
    """One JSON object of exactly `size` bytes with a stamp of zeros."""
    head = b'{"id":"000000000","kind":"order",' + STAMP + b"0" * STAMP_DIGITS + b'","note":"'
    room = size - len(head) - 2
    if room < 0:
        raise ValueError(f"a record of {size} bytes has no room for a stamp: at least {len(head) + 2}")
    return head + _PADDING.encode()[:1] * room + b'"}'


def batches(count: int, *, timed: bool, variants: int, size: int) -> list[list[bytes]]:
    """The records of `variants` different writes; timed ones carry a stamp."""
    if timed:
        return [[stamped_record(size=size)] * count] * variants
    return [records(count, first=variant * count, size=size) for variant in range(variants)]


def around_stamp(request: bytes) -> tuple[bytes, bytes]:
    """What stands before and after the digits of the one stamp in the request."""
    before, mark, after = request.partition(STAMP)
    if not mark or STAMP in after:
        raise ValueError("not one stamp in the request")
    return before + mark, after[STAMP_DIGITS:]


def http_watch(topic: str, *, limit: int) -> bytes:
    """The request for a session that begins at the head of the topic."""
    return http_post("/v0/watch", msgspec.json.encode({"topics": {topic: {"tail": True}}, "limit": limit}))


def http_stream(path: str) -> bytes:
    return http_get(path, accept="text/event-stream")


# --- WebSocket --------------------------------------------------------------------------------------------
# Key and answer of the handshake and the mask are those of the examples in RFC 6455.
WS_HANDSHAKE = (
    b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
WS_ACCEPT = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
_WS_MASK = b"\x37\xfa\x21\x3d"


def ws_text(message: bytes) -> bytes:
    """One whole text message of a client: masked, as a client must."""
    size = len(message)
    if size < 126:
        head = bytes([0x81, 0x80 | size])
    elif size < 1 << 16:
        head = bytes([0x81, 0x80 | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([0x81, 0x80 | 127]) + size.to_bytes(8, "big")
    mask = (_WS_MASK * (size // 4 + 1))[:size]
    masked = (int.from_bytes(message, "big") ^ int.from_bytes(mask, "big")).to_bytes(size, "big")
    return head + _WS_MASK + masked


def ws_publish(topic: str, data: bytes) -> bytes:
    return ws_text(b'{"op":"publish","topic":"%b","records":[{"data":%b}]}' % (topic.encode(), data))


def ws_subscribe(topic: str, *, limit: int) -> bytes:
    return ws_text(msgspec.json.encode({"op": "subscribe", "topic": topic, "tail": True, "limit": limit}))
