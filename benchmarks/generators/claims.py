"""What a worker of a queue says, and how little of the answers it has to read: claim, acknowledge, on three wires.

One of these per worker. `claim` is the bytes that ask for up to `size` jobs; `claimed(buffer, n)` is told that the
first n bytes of the buffer are the next bytes that came, and gives the ids of the jobs once the answer is whole;
`ack(ids)` is the bytes that complete them, and `acked` says when the answer to it is whole. Nothing but the ids is
decoded. An answer that is no success stops the run, and so does one that acknowledges fewer jobs than were named:
a job that was given to two workers is seen here.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

import msgspec

from benchmarks import BenchFailed
from benchmarks.generators import payload
from benchmarks.generators.replies import HttpReplies

Wire = Literal["http", "redis", "beanstalkd"]
GROUP = b"workers"  # of consumers, on Redis
LEASE_MS = 60_000  # longer than any slice: no lease runs out

_SEQ = re.compile(rb'"\$seq":\s*(\d+)')
_COUNT = re.compile(rb'"count":\s*(\d+)')
_ACKED = re.compile(rb'"acked":\s*(\d+)')


class Claims(Protocol):
    claim: bytes

    def claimed(self, buffer: bytearray, n: int) -> list[bytes] | None: ...

    def ack(self, ids: list[bytes]) -> bytes: ...

    def acked(self, buffer: bytearray, n: int) -> bool: ...


def claims(wire: Wire, *, queue: str, node: str, size: int) -> Claims:
    made: dict[Wire, type[HttpClaims] | type[RedisClaims] | type[BeanstalkdClaims]] = {
        "http": HttpClaims,
        "redis": RedisClaims,
        "beanstalkd": BeanstalkdClaims,
    }
    return made[wire](queue=queue, node=node, size=size)


class HttpClaims:
    __slots__ = ("_ack_begin", "_ack_path", "_asked", "_partial", "_replies", "claim")

    def __init__(self, *, queue: str, node: str, size: int) -> None:
        self.claim = payload.http_post(
            f"/v0/topics/{queue}/claim", msgspec.json.encode({"node": node, "max": size, "lease_ms": LEASE_MS})
        )
        self._ack_path = f"/v0/topics/{queue}/ack"
        self._ack_begin = b'{"node":%b,"seqs":[' % msgspec.json.encode(node)
        self._replies = HttpReplies()
        self._partial = b""
        self._asked = 0

    def _whole(self, buffer: bytearray, n: int) -> bytes | None:
        complete = self._replies.take(buffer, n)
        data = self._partial + bytes(memoryview(buffer)[:n])
        self._partial = b"" if complete else data
        return data if complete else None

    def claimed(self, buffer: bytearray, n: int) -> list[bytes] | None:
        data = self._whole(buffer, n)
        if data is None:
            return None
        ids: list[bytes] = _SEQ.findall(data)
        if _number(_COUNT, data) != len(ids):
            raise BenchFailed(f"{len(ids)} jobs in a claim whose count is another: {data[-300:]!r}")
        return ids

    def ack(self, ids: list[bytes]) -> bytes:
        self._asked = len(ids)
        return payload.http_post(self._ack_path, self._ack_begin + b",".join(ids) + b"]}")

    def acked(self, buffer: bytearray, n: int) -> bool:
        data = self._whole(buffer, n)
        if data is None:
            return False
        if _number(_ACKED, data) != self._asked:
            raise BenchFailed(f"{self._asked} jobs were to be acknowledged: {data[-300:]!r}")
        return True


def _number(field: re.Pattern[bytes], data: bytes) -> int:
    found = field.findall(data)
    if not found:
        raise BenchFailed(f"no {field.pattern!r} in {data[:300]!r}")
    return int(found[-1])  # the last: a job may have a field of that name, and stands before


class Pushed:
    """The event stream of `/work`: the ids of the jobs in it, however it is cut."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def take(self, data: bytes) -> list[bytes]:
        data = self._tail + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._tail = data
            return []
        self._tail = data[end:]
        if data.find(b"event: error", 0, end) >= 0:
            raise BenchFailed(f"an error on a stream of jobs: {data[:end][-300:]!r}")
        return _SEQ.findall(data[:end])


class RedisClaims:
    """A consumer of a group. To acknowledge is to delete as well: XACK alone keeps the entry."""

    __slots__ = ("_begin", "_expected", "_partial", "_queue", "claim")

    # *1 *2 $n stream *entries, then for each entry *2 $n id *2 $4 data $n value
    _HEAD_LINES = 5
    _ENTRY_LINES = 8
    _ID = re.compile(rb"\r\n(\d+-\d+)\r\n\*2\r\n")
    _NOTHING = b"*-1\r\n"

    def __init__(self, *, queue: str, node: str, size: int) -> None:
        self._queue = queue.encode()
        count = b"%d" % size
        read = (b"XREADGROUP", b"GROUP", GROUP, node.encode(), b"COUNT", count, b"STREAMS", self._queue, b">")
        self.claim = payload.resp(*read)
        self._begin = b"*1\r\n*2\r\n$%d\r\n%b\r\n*" % (len(self._queue), self._queue)
        self._expected = b""
        self._partial = b""

    def claimed(self, buffer: bytearray, n: int) -> list[bytes] | None:
        data = self._partial + bytes(memoryview(buffer)[:n])
        self._partial = data
        begin = self._begin
        if data == self._NOTHING:
            self._partial = b""
            return []
        if not data.startswith(begin[: len(data)]) and not self._NOTHING.startswith(data):
            raise BenchFailed(f"not a reply to XREADGROUP: {data[:300]!r}")
        line_end = data.find(b"\r\n", len(begin))
        if line_end < 0:
            return None
        entries = int(data[len(begin) : line_end])
        missing = self._HEAD_LINES + self._ENTRY_LINES * entries - data.count(b"\n")
        if missing > 0:
            return None
        ids: list[bytes] = self._ID.findall(data)
        if missing < 0 or len(ids) != entries:
            raise BenchFailed(f"not {entries} entries in a reply to XREADGROUP: {data[-300:]!r}")
        self._partial = b""
        return ids

    def ack(self, ids: list[bytes]) -> bytes:
        self._expected = b":%d\r\n" % len(ids) * 2
        return payload.resp(b"XACK", self._queue, GROUP, *ids) + payload.resp(b"XDEL", self._queue, *ids)

    def acked(self, buffer: bytearray, n: int) -> bool:
        data = self._partial + bytes(memoryview(buffer)[:n])
        if not self._expected.startswith(data):
            raise BenchFailed(f"{self._expected!r} was to come from Redis, not {data[:300]!r}")
        whole = len(data) == len(self._expected)
        self._partial = b"" if whole else data
        return whole


class BeanstalkdClaims:
    """It gives one job for each question, so `size` questions are sent together."""

    __slots__ = ("_expected", "_partial", "_size", "claim")

    _ID = re.compile(rb"RESERVED (\d+) \d+\r\n")
    _NOTHING = b"TIMED_OUT\r\n"
    _FIRST = b"RT"

    def __init__(self, *, queue: str, node: str, size: int) -> None:
        # The tube is the server's first one and the worker is its connection: neither is named here.
        self.claim = b"reserve-with-timeout 0\r\n" * size
        self._size = size
        self._expected = b""
        self._partial = b""

    def claimed(self, buffer: bytearray, n: int) -> list[bytes] | None:
        data = self._partial + bytes(memoryview(buffer)[:n])
        self._partial = data
        # Fact: it answers in many small pieces. A reserved job is a line that names it and a line that holds it, and
        # when there are no more jobs all further answers say so: only then or with two lines for each it may be whole.
        if data[0] not in self._FIRST:
            raise BenchFailed(f"not an answer to reserve: {data[-300:]!r}")
        lines = data.count(b"\n")
        if lines < 2 * self._size and not data.endswith(self._NOTHING):
            return None
        ids: list[bytes] = self._ID.findall(data)
        answers = len(ids) + data.count(self._NOTHING)
        if lines > len(ids) + answers or answers > self._size:
            raise BenchFailed(f"not an answer to reserve: {data[-300:]!r}")
        if answers < self._size or not data.endswith(b"\n"):
            return None
        self._partial = b""
        return ids

    def ack(self, ids: list[bytes]) -> bytes:
        self._expected = b"DELETED\r\n" * len(ids)
        return b"".join([b"delete %b\r\n" % each for each in ids])

    def acked(self, buffer: bytearray, n: int) -> bool:
        data = self._partial + bytes(memoryview(buffer)[:n])
        if not self._expected.startswith(data):
            raise BenchFailed(f"not an answer to delete: {data[-300:]!r}")
        whole = len(data) == len(self._expected)
        self._partial = b"" if whole else data
        return whole
