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
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


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
