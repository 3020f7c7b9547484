"""Hostile HTTP/1.1: well-formed requests to every endpoint, and everything that can go wrong with their bytes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from . import pages
from .mutations import in_pieces, mutate, splice
from .player import Case, Leaving

_TOPICS = ("log", "log", "jobs", "full", "in:one", "absent", "new-1", "new-2")
_APPEND = b'{"records":[{"data":{"n":1},"tag":"a:1","node":"n1","meta":{"k":"v"}},{"data":2}],"node":"n2"}'
_SSE = ("Accept", b"text/event-stream")
# method, path, body, headers
ENDPOINTS: tuple[tuple[str, str, bytes | None, tuple[tuple[str, bytes], ...]], ...] = (
    ("GET", "/v0/health", None, ()),
    ("GET", "/healthz", None, ()),
    ("GET", "/v0/ready", None, ()),
    ("GET", "/v0/metrics", None, ()),
    ("GET", "/v0/metrics?topic=log", None, (("Accept", b"application/json"),)),
    ("GET", "/v0/topics", None, ()),
    ("GET", "/v0/topics?prefix=l&page_size=2", None, (("Accept-Encoding", b"gzip"),)),
    ("GET", "/v0/topics/{t}", None, ()),
    ("HEAD", "/v0/topics/{t}", None, ()),
    ("PUT", "/v0/topics/{t}", b'{"cap_records":50,"ttl_ms":0}', ()),
    ("DELETE", "/v0/topics/new-1", None, ()),
    ("POST", "/v0/topics/{t}", _APPEND, ()),
    ("POST", "/v0/topics/{t}", b'{"records":[{"data":1}]}', ()),
    ("POST", "/v0/topics/{t}?return_seqs=false", b'{"records":[{"data":1},{"data":2}]}', ()),
    ("POST", "/v0/topics/{t}", b'{"records":[{"data":1}]}', (("Idempotency-Key", b"k-1"),)),
    ("POST", "/v0/topics/{t}/diff", b'{"from_seq":0,"limit":3}', (("Accept-Encoding", b"gzip"),)),
    ("POST", "/v0/topics/log/diff", b'{"from_seq":1000000,"wait_ms":20}', ()),
    ("POST", "/v0/topics/still/diff", b'{"from_seq":1,"wait_ms":150}', ()),
    ("POST", "/v0/topics/{t}/delete", b'{"before_seq":2,"match":["tag","Glob","a:*"]}', ()),
    ("POST", "/v0/topics/{t}/claim", b'{"node":"w","max":2,"lease_ms":100}', ()),
    ("POST", "/v0/topics/{t}/ack", b'{"node":"w","seqs":[1],"lease_ids":["lease_1"]}', ()),
    ("POST", "/v0/topics/{t}/nack", b'{"node":"w","seqs":[1,2],"delay_ms":0}', ()),
    ("POST", "/v0/topics/{t}/extend", b'{"node":"w","seqs":[1],"lease_ms":100}', ()),
    ("GET", "/v0/topics/jobs/work?node=w&max=2", None, (_SSE,)),
    ("GET", "/v0/routers", None, ()),
    ("GET", "/v0/routers?prefix=l&source=log&page_size=1", None, ()),
    ("PUT", "/v0/routers/r-1", b'{"source":"log","dest":"copy-1"}', ()),
    ("GET", "/v0/routers/log-%3Ecopy", None, ()),
    ("DELETE", "/v0/routers/r-1", None, ()),
    ("POST", "/v0/watch", b'{"topics":{"log":{"from_seq":0}},"heartbeat_ms":1000}', ()),
    ("POST", "/v0/watch?lenient=true", b'{"topics":{"log":{"tail":true},"absent":{}}}', ()),
    ("GET", "/v0/watch/{w}", None, (_SSE,)),
    ("GET", "/v0/watch/{w}?token=full-access-key", None, (_SSE, ("Last-Event-ID", b"eyJsb2ciOjF9"))),
    (
        "GET",
        "/v0/ws",
        None,
        (
            ("Upgrade", b"websocket"),
            ("Connection", b"Upgrade"),
            ("Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ=="),
            ("Sec-WebSocket-Version", b"13"),
        ),
    ),
    ("GET", "/nowhere", None, ()),
)
KEYS = (b"Bearer full-access-key",) * 30 + (
    b"Bearer reader-key",
    b"Bearer insider-key",
    b"bearer  full-access-key",
    b"Bearer wrong",
    b"Bearer",
    b"Basic Zm9vOmJhcg==",
    b"",
    b"Bearer \xff\xfe",
    b"Bearer " + b"k" * 5_000,
)


@dataclass(slots=True)
class Draft:
    """A request in its parts, so that one of them can be wrong while the rest is right."""

    method: bytes
    target: bytes
    version: bytes = b"HTTP/1.1"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes | None = None
    raw_lines: list[bytes] = field(default_factory=list)  # lines of the head that are no headers
    length: bytes | None = None  # what Content-Length says instead of the truth
    framed: bytes | None = None  # the body as it goes out instead of itself

    def encode(self) -> bytes:
        lines = [b"%b %b %b" % (self.method, self.target, self.version)]
        lines += [b"%b: %b" % header for header in self.headers]
        if self.framed is not None:
            lines.append(b"Transfer-Encoding: chunked")
        elif self.body is not None or self.length is not None:
            lines.append(b"Content-Length: %b" % (self.length or b"%d" % len(self.body or b"")))
        lines += self.raw_lines
        return b"\r\n".join([*lines, b"", b""]) + (self.framed if self.framed is not None else self.body or b"")


def draft(dice: Random, wid: str, *, keyed: bool = True) -> Draft:
    method, path, body, more = dice.choice(ENDPOINTS)
    target = path.replace("{t}", dice.choice(_TOPICS)).replace("{w}", wid)
    headers = [(b"Host", pages.HOST)]
    if body is not None:
        headers.append((b"Content-Type", b"application/json"))
    if keyed and dice.random() < 0.93:
        headers.append((b"Authorization", dice.choice(KEYS)))
    headers += [(name.encode(), value) for name, value in more]
    return Draft(method.encode(), target.encode(), headers=headers, body=body)


# --- what may be wrong -------------------------------------------------------------------------------

_METHODS: tuple[bytes, ...] = (
    b"get",
    b"GETT",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"PATCH",
    b"PRI",
    b"HEAD",
    b"",
    b"X" * 40,
    b"P\0ST",
)
_METHODS += (
    b"POST",
    b"PUT",
    b"DELETE",
    b"MKCOL",
    b"GET\t",
    b" GET",
    b"\r\nGET",
    b"M-SEARCH",
    b"SOURCE",
    b"\x16\x03\x01",
)
_VERSIONS: tuple[bytes, ...] = (
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"HTTP/9.9",
    b"http/1.1",
    b"HTTP/1.1 ",
    b"",
    b"HTTP/",
)
_VERSIONS += (b"HTTP/11", b"HTTP/1.10", b"HTTP/1,1", b"ICE/1.0", b"RTSP/1.0", b"HTTP/1.1\tx", b"HTTP/-1.1")
_LENGTHS: tuple[bytes, ...] = (
    b"-1",
    b"+5",
    b"0x5",
    b"5 5",
    b"5,5",
    b"",
    b" ",
    b"1e1",
    b"99999999999999999999",
    b"9" * 400,
    b"18446744073709551617",
)
_LENGTHS += (b"1048577", b"1048576", b"0", b"00000000000000000005", b"5;q=1", b"\xb2", b"1\0")
_TARGETS = (
    b"*",
    b"/",
    b"//",
    b"",
    b"?",
    b"/?",
    b"/v0",
    b"/v0/",
    b"/v0/topics/",
    b"/v0/topics//diff",
    b"/v0/topics/a/b/c/d",
    b"/v0/topics/../../etc/passwd",
    b"/v0/topics/%2e%2e%2f",
    b"/v0/topics/%00",
    b"/v0/topics/%",
    b"/v0/topics/%zz",
    b"/v0/topics/%ff%fe",
    b"/v0/topics/%ed%a0%80",
    b"/v0/topics/\xc3\xa9",
    b"/v0/topics/" + b"a" * 255,
    b"/v0/topics/" + b"a" * 256,
    b"/v0/topics/" + b"%61" * 255,
    b"/v0/topics/-x",
    b"/v0/topics/log#frag",
    b"/v0/topics/log;x=1",
    b"/v0/topics/log%0d%0aX-Evil:%201",
    b"/v0/topics/log%20x",
    b"/v0/topics/lo\x00g",
    b"/v0/topics/log/work",
    b"/v0/topics/jobs/work?node=",
    b"/v0/topics/jobs/work?node=w&max=0",
    b"/v0/topics/jobs/work?node=w&max=-1&lease_ms=x",
    b"/v0/topics/jobs/work?node=w&max=999999999999999999999999",
    b"/v0/topics/jobs/work?node=w&max=%D9%A1",
    b"/v0/topics/jobs/work?node=" + b"w" * 129,
    b"/v0/topics/jobs/work?node=w&token=%ff",
    b"/v0/topics?page_size=-1",
    b"/v0/topics?page_size=1e3",
    b"/v0/topics?page_size=" + b"9" * 5_000,
    b"/v0/topics?page_size=%D9%A3",
    b"/v0/topics?cursor=%00",
    b"/v0/topics?cursor=!!!!",
    b"/v0/topics?cursor=eyJhZnRlciI6MX0=",
    b"/v0/topics?cursor=eyJhZnRlciI6IlxkODAwIn0=",
    b"/v0/topics?cursor=W1tbW1tb",
    b"/v0/topics?prefix=%ed%a0%80",
    b"/v0/topics?prefix=\xff",
    b"/v0/topics?prefix=" + b"p" * 7_000,
    b"/v0/topics?" + b"&".join(b"a%d=1" % n for n in range(100)),
    b"/v0/topics?=&=&&;;&%3D=%26",
    b"/v0/routers?source=%00&dest=%ff&cursor=e30=",
    b"/v0/routers/%3E",
    b"/v0/routers/a%3E%3Eb",
    b"/v0/watch/wid_" + b"A" * 300,
    b"/v0/watch/%00",
    b"/v0/watch?lenient=maybe",
    b"/v0/metrics?topic=%ff",
    b"/v0/metrics?topic=" + b"x" * 300,
    b"/" + b"a" * 8_100,
    b"/" + b"a" * 8_300,
    b"/" + b"a" * 40_000,
    b"http://t/v0/health",
    b"http://",
    b"HTTP://t",
    b"https://t?x",
    b"ftp://t/v0/health",
    b"http:/v0/health",
    b"/v0/health x",
    b"/v0/health\tx",
    b"t:80",
)
_ODD_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"Host", b"other"),
    (b"Host", b""),
    (b"Content-Length", b"3"),
    (b"Content-Length", b"0"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Transfer-Encoding", b"gzip, chunked"),
    (b"Transfer-Encoding", b"identity"),
    (b"Transfer-Encoding", b"chunked, chunked"),
    (b"Transfer-Encoding", b"xchunked"),
    (b"transfer-encoding ", b"chunked"),
    (b"Transfer-Encoding", b"\x0bchunked"),
    (b"Content-Encoding", b"gzip"),
    (b"Content-Encoding", b"gzip, gzip"),
    (b"Content-Encoding", b"br"),
    (b"Content-Encoding", b"deflate"),
    (b"Content-Type", b"text/plain"),
    (b"Content-Type", b"application/json; charset=latin1"),
    (b"Content-Type", b"application/json;" + b";" * 1_000),
    (b"Content-Type", b"\xff\xfe"),
    (b"Accept", b"text/event-stream"),
    (b"Accept", b"application/json;q=x, */*;q=-1"),
    (b"Accept", b"," * 3_000),
    (b"Accept-Encoding", b"gzip;q=0"),
    (b"Accept-Encoding", b"gzip;q=nan, *"),
    (b"Connection", b"close"),
    (b"Connection", b"keep-alive, close"),
    (b"Connection", b"upgrade"),
    (b"Connection", b"Upgrade, HTTP2-Settings"),
    (b"Upgrade", b"h2c"),
    (b"Upgrade", b"websocket"),
    (b"Upgrade", b"TLS/1.0"),
    (b"HTTP2-Settings", b"AAMAAABkAAQAAP__"),
    (b"Expect", b"100-continue"),
    (b"Expect", b"200-ok"),
    (b"Expect", b""),
    (b"Authorization", b"Bearer other"),
    (b"Idempotency-Key", b""),
    (b"Idempotency-Key", b"k" * 300),
    (b"Idempotency-Key", b"\xc3\x28"),
    (b"Idempotency-Key", b"\xc3\xa9"),
    (b"X-Request-Id", b"abc-1"),
    (b"X-Request-Id", b"a b"),
    (b"X-Request-Id", b"\xff" * 10),
    (b"X-Request-Id", b"x" * 129),
    (b"X-Request-Id", b""),
    (b"Last-Event-ID", b"\xff"),
    (b"Last-Event-ID", b"eyJsb2ciOi0xfQ"),
    (b"Last-Event-ID", b"eyJsb2ciOjFlOTk5fQ"),
    (b"Last-Event-ID", b"WzEsMl0"),
    (b"Last-Event-ID", b"A" * 5_000),
    (b"Sec-WebSocket-Key", b"short"),
    (b"Sec-WebSocket-Version", b"12"),
    (b"Sec-WebSocket-Protocol", b"a,b,,c"),
    (b"Sec-WebSocket-Extensions", b"permessage-deflate; server_max_window_bits=99"),
    (b"Origin", b"null"),
    (b"Origin", b"http://evil.example"),
    (b"Range", b"bytes=0-"),
    (b"Cookie", b"a=b; " * 500),
    (b"X-Long", b"v" * 9_000),
    (b"X-Longer", b"v" * 33_000),
    (b"N" * 3_000, b"v"),
    (b"", b"no name"),
    (b"Bad Name", b"v"),
    (b"Bad\0Name", b"v"),
    (b"X-Nul", b"a\0b"),
    (b"X-Ctl", b"\x01\x02\x7f"),
    (b"X-Lf", b"a\nInjected: 1"),
    (b"X-Cr", b"a\rInjected: 1"),
    (b"X-Fold", b"a\r\n b"),
    (b"Trailer", b"X-T"),
    (b"TE", b"trailers"),
    (b"Proxy-Connection", b"close"),
    (b"Via", b"1.1 x"),
)
_RAW_LINES = (
    b"no colon",
    b":",
    b": v",
    b" leading: v",
    b"\tx: y",
    b"x:y:z",
    b"x\x00",
    b"\xff\xff",
    b"x" * 2_000,
    b"GET / HTTP/1.1",
)


def wrong_method(dice: Random, one: Draft) -> Draft:
    return replace(one, method=dice.choice(_METHODS))


def wrong_target(dice: Random, one: Draft) -> Draft:
    return replace(one, target=dice.choice(_TARGETS))


def mutated_target(dice: Random, one: Draft) -> Draft:
    return replace(one, target=mutate(dice, one.target, times=1))


def wrong_version(dice: Random, one: Draft) -> Draft:
    return replace(one, version=dice.choice(_VERSIONS))


def odd_headers(dice: Random, one: Draft) -> Draft:
    headers = list(one.headers)
    for _ in range(dice.choice((1, 1, 2, 4))):
        headers.insert(dice.randrange(len(headers) + 1), dice.choice(_ODD_HEADERS))
    return replace(one, headers=headers)


def changed_header(dice: Random, one: Draft) -> Draft:
    """One of its own headers with another value, twice, or missing."""
    headers = list(one.headers) or [(b"Host", pages.HOST)]
    at = dice.randrange(len(headers))
    name, value = headers[at]
    match dice.randrange(5):
        case 0:
            del headers[at]
        case 1:
            headers.append((name, value))
        case 2:
            headers[at] = (name, mutate(dice, value or b"v", times=1))
        case 3:
            headers[at] = (mutate(dice, name, times=1), value)
        case _:
            headers[at] = (dice.choice((name.lower(), name.upper(), name + b" ", b" " + name)), value)
    return replace(one, headers=headers)


def _on(page: tuple[bytes, pages.Headers], one: Draft) -> Draft:
    host, headers = page
    kept = [(name, value) for name, value in one.headers if name != b"Host"]
    return replace(one, headers=[(b"Host", host), *kept, *headers])


def on_some_page(dice: Random, one: Draft) -> Draft:
    return _on(pages.some_page(dice), one)


def on_a_foreign_page(dice: Random, one: Draft) -> Draft:
    return _on(pages.foreign_page(dice), one)


def raw_line(dice: Random, one: Draft) -> Draft:
    return replace(one, raw_lines=[dice.choice(_RAW_LINES)])


def many_headers(dice: Random, one: Draft) -> Draft:
    count = dice.choice((95, 98, 101, 150, 1_000))
    return replace(one, headers=[*one.headers, *((b"X-%d" % n, b"v") for n in range(count))])


def wrong_length(dice: Random, one: Draft) -> Draft:
    body = one.body or b"{}"
    near = (b"%d" % (len(body) - 1), b"%d" % (len(body) + 1), b"%d" % (len(body) * 2))
    return replace(one, body=body, length=dice.choice(near * 3 + _LENGTHS))


def mutated_body(dice: Random, one: Draft) -> Draft:
    return replace(one, body=mutate(dice, one.body or b"{}"))


def _chunk(part: bytes, size: bytes | None = None, extension: bytes = b"") -> bytes:
    return b"%b%b\r\n%b\r\n" % (b"%x" % len(part) if size is None else size, extension, part)


_SIZES = (
    b"-1",
    b"g",
    b"0x5",
    b"",
    b" 5",
    b"5 ",
    b"+5",
    b"ffffffff",
    b"100000000",
    b"7fffffffffffffff",
    b"F" * 40,
    b"1;" + b"e" * 300,
)


def chunked(dice: Random, one: Draft) -> Draft:
    """Well-formed or nearly."""
    body = one.body or b'{"records":[{"data":1}]}'
    cuts = sorted(dice.randrange(len(body) + 1) for _ in range(dice.choice((0, 1, 3, 12))))
    parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    chunks = [_chunk(part) for part in parts if part]
    end = b"0\r\n\r\n"
    if dice.random() < 0.7:
        at = dice.randrange(len(chunks))
        match dice.randrange(9):
            case 0:
                chunks[at] = _chunk(parts[0], dice.choice(_SIZES))
            case 1:
                chunks[at] = _chunk(b"x", extension=dice.choice((b";a=b", b";" * 200, b' ; q="\x00"', b";\n")))
            case 2:
                chunks[at] = chunks[at].replace(b"\r\n", b"\n")
            case 3:
                chunks[at] = chunks[at][:-2]
            case 4:
                end = dice.choice((b"", b"0\r\n", b"0", b"00000000\r\n\r\n", b"0\n\n", b"-0\r\n\r\n", b"0;x\r\n\r\n"))
            case 5:
                end = b"0\r\nX-T: " + b"t" * dice.choice((1, 8_000, 9_000)) + b"\r\n\r\n"
            case 6:
                end = b"0\r\n" + b"A: b\r\n" * dice.choice((1, 50, 3_000)) + b"\r\n"
            case 7:
                chunks[at] = mutate(dice, chunks[at], times=1)
            case _:
                chunks.insert(at, b"0\r\n\r\n")
    return replace(one, body=None, framed=b"".join(chunks) + end)


@cache
def _bomb(size: int, level: int = 9) -> bytes:
    return gzip.compress(b"[" * size, level, mtime=0)


_MANY = (
    (b'{"match":[', b"{},", b"{}]}"),
    (b'{"node":[', b'"a",', b'"a"]}'),
    (b'{"topics":{', b'"a":{},', b'"a":{}}}'),
    (b'{"node":"w","seqs":[', b"1,", b"1]}"),
    (b'{"records":[', b'{"data":1},', b'{"data":1}]}'),
    (b'{"records":[', b"{},", b"{}]}"),
    (b'{"records":[{"data":[', b"{},", b"{}]}]}"),
    (b'{"x":[', b"[],", b'[]],"records":[{"data":1}]}'),
    (b"{", b'"records":[],', b'"records":[{"data":1}]}'),
    (b"{", b'"":0,', b'"records":[{"data":1}]}'),
)


@cache
def _many(which: int, size: int) -> bytes:
    """Of one kind of value so many that they are a body of this size, packed."""
    before, unit, after = _MANY[which]
    return gzip.compress(before + unit * (size // len(unit)) + after, mtime=0)


def bombs() -> list[bytes]:
    """One of each kind: small when packed, far over the limit of any route when not."""
    return [
        _bomb(1 << 24),
        gzip.compress(_bomb(1 << 24), mtime=0),
        *(_many(which, 1 << 23) for which in range(len(_MANY))),
    ]


def pack(dice: Random, body: bytes) -> bytes:
    """A gzip body: this one, or one that is not what it seems."""
    packed = gzip.compress(body, mtime=0)
    match dice.randrange(12):
        case 0:
            pass  # as it should be
        case 1:
            packed = mutate(dice, packed)
        case 2:
            packed = packed[: dice.randrange(len(packed))]
        case 3:
            packed += dice.choice((b"\0", b"more", packed))
        case 4:
            packed = zlib.compress(body)
        case 5:
            packed = body
        case 6:
            packed = _bomb(dice.choice((1 << 20, (1 << 20) + 1, 1 << 24)))
        case 7:
            packed = gzip.compress(_bomb(1 << 22), mtime=0)
        case 8:
            packed = b"\x1f\x8b\x08" + dice.randbytes(40)
        case 9 | 10:
            packed = _many(dice.randrange(len(_MANY)), dice.choice((1 << 17, 1 << 19, 1 << 21, 1 << 23)))
        case _:
            packed = gzip.compress(b" " * (1 << 19) + body, mtime=0)
    return packed


def gzipped(dice: Random, one: Draft) -> Draft:
    packed = pack(dice, one.body or b"{}")
    headers = [*one.headers, (b"Content-Encoding", dice.choice((b"gzip", b"gzip", b"x-gzip", b"GZIP", b"gzip,")))]
    return replace(one, headers=headers, body=packed)


def large_body(dice: Random, one: Draft) -> Draft:
    size = dice.choice((64 << 10, (64 << 10) + 1, 200_000, 1 << 20, (1 << 20) + 1, (1 << 22) + 1))
    body = b'{"records":[{"data":"' + b"x" * (size - 24) + b'"}]}'
    if size == (1 << 20) + 1:  # read in slices
        record = b'{"data":"%b"}' % (b"x" * dice.choice((100, 3_000, 200_000)))
        body = mutate(dice, b'{"records":[%b]}' % b",".join([record] * (size // len(record) + 1)))
    return replace(one, body=body)


STRUCTURAL: tuple[Callable[[Random, Draft], Draft], ...] = (
    wrong_method,
    wrong_target,
    wrong_target,
    mutated_target,
    wrong_version,
    odd_headers,
    odd_headers,
    odd_headers,
    changed_header,
    on_some_page,
    on_a_foreign_page,
    on_a_foreign_page,
    raw_line,
    many_headers,
    wrong_length,
    wrong_length,
    mutated_body,
    chunked,
    chunked,
    chunked,
    gzipped,
    gzipped,
    large_body,
)


# --- cases -------------------------------------------------------------------------------------------


def _one(dice: Random, wid: str) -> tuple[str, bytes]:
    one = draft(dice, wid)
    roll = dice.random()
    if roll < 0.08:
        return "as it should be", one.encode()
    if roll < 0.70:
        names = []
        for _ in range(dice.choice((1, 1, 1, 2))):
            change = dice.choice(STRUCTURAL)
            if change is large_body and dice.random() < 0.7:
                change = odd_headers
            names.append(change.__name__)
            one = change(dice, one)
        return "+".join(names), one.encode()
    if roll < 0.92:
        return "mutate", mutate(dice, one.encode())
    return "splice", splice(dice, one.encode(), draft(dice, wid).encode())


def _leaving(dice: Random) -> Leaving:
    roll = dice.random()
    return "half" if roll < 0.72 else "wait" if roll < 0.84 else "reset" if roll < 0.92 else "close"


def is_stream(received: bytes) -> bytes | None:
    """The farewell of a client that has got what may go on for ever: nothing but its leaving."""
    return b"" if b"text/event-stream" in received or b"HTTP/1.1 101" in received else None


def case(dice: Random, number: int, wid: str) -> Case:
    roll = dice.random()
    if roll < 0.03:
        label, data = "noise", dice.randbytes(dice.choice((1, 10, 100, 1_000, 40_000)))
    elif roll < 0.05:
        label = "flood"  # more than may be in flight
        data = draft(dice, wid).encode() * dice.choice((100, 128, 129, 200))
    elif roll < 0.20:
        several = [_one(dice, wid) for _ in range(dice.choice((2, 3, 8)))]
        label, data = " | ".join(name for name, _ in several), b"".join(part for _, part in several)
    else:
        label, data = _one(dice, wid)
    pause_s = dice.choice((0.0, 0.0, 0.0, 0.03, 0.1))
    return Case(number, label, in_pieces(dice, data), _leaving(dice), pause_s, is_stream)
