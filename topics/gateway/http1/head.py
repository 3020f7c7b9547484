"""HTTP/1.1 request heads: from bytes to a decision, remembered by their bytes.

A head is a pure function of its bytes, and clients on a kept-alive connection send the same one again and again. So
it is parsed once (by httptools, strictly) and looked up after that: what is left per request is one dictionary
access.

Ambiguous framing is refused before anything else looks at it: a length with a transfer coding, two lengths, bare CR or
LF, folded lines. The connection closes after such a head, because where the next request starts is anybody's guess.
"""

from __future__ import annotations

import re

import httptools
import msgspec

from topics import limits
from topics.errors import ApiError, invalid
from topics.gateway.api.routes import Route, Routes
from topics.gateway.auth import Guard
from topics.gateway.compression import too_large
from topics.gateway.http1.append_batch import PlainRoute
from topics.gateway.origins import Origins, Visit
from topics.keys import Key
from topics.settings import Settings

_CACHED_HEADS = 4_096
_CACHED_HEAD_BYTES = 2_048
_TOKEN = re.compile(rb"[A-Z]{1,32} ")
_PLAIN_QUERIES = {("return_seqs", "false")}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,%d}" % limits.MAX_REQUEST_ID_CHARS)
_CHUNKED = -1  # body_length of a chunked body


class Head(msgspec.Struct, gc=False):
    route: Route | None
    error: ApiError | None  # what to answer, once the body has passed by
    body_length: int  # or _CHUNKED
    keep_alive: bool
    expect: bool
    gzip_body: bool
    gzip_answer: bool
    idempotency_key: str | None
    plain: PlainRoute | None = None  # an append that may turn out to be nothing but data
    bodiless: bool = False  # HEAD: the answer's head without its body
    fatal: bool = False  # the connection can't go on after the answer
    headers: dict[bytes, bytes] | None = None  # for routes that look at them
    key: Key | None = None  # whose it is
    slot: int = 0  # that key's number
    shown: int | str = 0  # if it is refused, for the access log: the key that it shows, by name or number
    request_id: bytes | None = None  # the client's own
    number: int = 0  # of its route
    line: tuple[str, str] | None = None  # method and path, for the access log

    @property
    def chunked(self) -> bool:
        return self.body_length == _CHUNKED

    @property
    def reads_body(self) -> bool:
        """Somebody will look at the body. Otherwise it passes by: who has no key must not fill our memory with it."""
        return self.error is None and self.route is not None and self.route.takes_body


def _refusal(error: ApiError, events: _Events | None = None) -> Head:
    """`events`: what was read of the request before it was refused."""
    request_id = None if events is None else valid_request_id(events.headers.get(b"x-request-id", []))
    return Head(None, error, 0, False, False, False, False, None, fatal=True, request_id=request_id)


class Heads:
    def __init__(
        self,
        routes: Routes,
        *,
        max_body_bytes: int,
        guard: Guard | None = None,
        origins: Origins | None = None,
        lines: bool = False,
    ) -> None:
        self._lines = lines  # somebody wants to see method and path
        self._routes = routes
        self._guard = guard or Guard((), probes=False)
        self._origins = origins or Origins(Settings())
        self._secret = self._guard.on
        self._max_body_bytes = max_body_bytes
        self._known: dict[bytes | int, Head] = {}

    def forget(self) -> None:
        """A key has ended or has other rights: what was decided with it is decided again."""
        self._known.clear()

    def known(self, raw: bytes) -> Head | None:
        return self._known.get(hash(raw) if self._secret else raw)

    def get(self, raw: bytes) -> Head:
        """The head whose bytes these are, through the blank line."""
        # Where there are keys, heads hold secrets, and are known by a keyed digest (SipHash, keyed by the process):
        # whoever has no such head can't tell what would collide with it.
        known_by = hash(raw) if self._secret else raw
        head = self._known.get(known_by)
        if head is None:
            head = self._parse(raw)
            once = head.fatal or head.headers is not None or head.request_id is not None
            if not once and len(raw) <= _CACHED_HEAD_BYTES:
                if len(self._known) >= _CACHED_HEADS:
                    self._known.clear()
                self._known[known_by] = head
        return head

    def _parse(self, raw: bytes) -> Head:
        lines = raw.count(b"\r\n")
        if raw.count(b"\n") != lines or raw.count(b"\r") != lines or b"\0" in raw:
            return _refusal(invalid("lines of a request head end with CR LF, and contain neither"))
        if b"\r\n " in raw or b"\r\n\t" in raw:
            return _refusal(invalid("folded header lines are obsolete"))
        if lines - 2 > limits.MAX_HEADERS:
            return _refusal(ApiError("header_too_large", f"more than {limits.MAX_HEADERS} header lines"))
        if len(raw) > limits.MAX_HEAD_BYTES:
            return _refusal(ApiError("header_too_large", f"more than {limits.MAX_HEAD_BYTES} bytes of request head"))
        events = _Events()
        parser = events.parser = httptools.HttpRequestParser(events)
        try:
            parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass  # an upgrade we don't speak: answered as the plain request it also is
        except httptools.HttpParserInvalidMethodError:
            if _TOKEN.match(raw):
                return _refusal(
                    ApiError("method_not_allowed", "unknown method", {"allow": ["DELETE", "GET", "POST", "PUT"]})
                )
            return _refusal(invalid("the request line does not start with a method"))
        except httptools.HttpParserError as error:
            return _refusal(invalid(f"not a valid HTTP/1.1 request: {error}"))
        finally:
            events.parser = None  # the two know each other, and would wait for a collection with all they have read
        if not events.complete:
            return _refusal(invalid("not a valid HTTP/1.1 request head"))
        version = parser.get_http_version()
        if version not in ("1.1", "1.0") or b" HTTP/1." not in raw[: raw.index(b"\r\n")]:
            return _refusal(
                ApiError("http_version_not_supported", "only HTTP/1.1, HTTP/1.0 and HTTP/2 are spoken here")
            )
        method = parser.get_method().decode("ascii")
        try:
            return self._judge(method, events, keep_alive=events.keep_alive and version == "1.1", old=version == "1.0")
        except ApiError as error:
            head = _refusal(error, events)
            if self._lines:
                head.line = _line(method, events)
            return head

    def _judge(self, method: str, events: _Events, *, keep_alive: bool, old: bool) -> Head:
        """Framing first: what is wrong with it is fatal. The rest is answered after the body."""
        headers = events.headers
        if len(events.url) > limits.MAX_URI_BYTES:
            raise ApiError("uri_too_long", f"the request target has more than {limits.MAX_URI_BYTES} bytes")
        hosts = headers.get(b"host", [])
        if len(hosts) > 1 or (not hosts and not old):
            raise invalid("exactly one Host header is required")
        lengths, codings = headers.get(b"content-length", []), headers.get(b"transfer-encoding", [])
        if lengths and codings:
            raise invalid("Content-Length and Transfer-Encoding together are ambiguous")
        length = 0
        if codings:
            if old or [coding.lower() for coding in codings] != [b"chunked"]:
                raise invalid("the only transfer coding is chunked, in HTTP/1.1")
            length = _CHUNKED
        elif lengths:
            if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 19:
                raise invalid("exactly one Content-Length is required, a plain number")
            length = int(lengths[0])
            if length > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
        expect = False
        if expectations := headers.get(b"expect"):
            if [value.lower() for value in expectations] != [b"100-continue"]:
                raise ApiError("expectation_failed", "the only expectation known is 100-continue")
            expect = not old
        route, error = None, None
        shown: int | str = 0
        gzip_body, key, owner, found = False, None, None, None
        try:
            authority, target = _split_target(events.url.decode("ascii"))
            visit = _visit(headers, hosts if authority is None else [*hosts, authority])
            found = self._origins.find(self._routes, method, target, visit)
            # Heads are kept: without the token that a query may hold.
            route = found._replace(query={name: text for name, text in found.query.items() if name != "token"})
            self._origins.admit(method, found, visit)
            owner = self._guard.admit(found, headers.get(b"authorization", []))
            if route.takes_body and length != 0:
                if length > route.most:
                    raise too_large(route.most)
                check_content_type(headers.get(b"content-type", [b""])[-1])
            gzip_body = _gzipped(headers.get(b"content-encoding", [])) and route.takes_body
            if keys := headers.get(b"idempotency-key"):
                key = keys[-1].decode()
        except ApiError as refused:
            # Heads are kept: not with the frames of this call, which hold the secrets of the request.
            error = refused.with_traceback(None)
            error.__context__ = None
            if self._lines and found is not None and owner is None:
                shown = self._guard.shown_by(found, headers.get(b"authorization", []))
        except UnicodeDecodeError:
            error = invalid("the request target and header values must be valid text")
        plain = None
        request_id = valid_request_id(headers.get(b"x-request-id", []))
        if route is not None and error is None and keep_alive and not gzip_body and key is None and request_id is None:
            plain = self._plain(route)
        return Head(
            plain=plain,
            route=route,
            error=error,
            body_length=length,
            keep_alive=keep_alive,
            expect=expect,
            gzip_body=gzip_body,
            gzip_answer=accepts_gzip(b",".join(headers.get(b"accept-encoding", []))),
            idempotency_key=key,
            bodiless=method == "HEAD",
            headers=_joined(headers, old=old) if route is not None and (route.streams or route.looks) else None,
            key=owner,
            slot=0 if owner is None else owner.number,
            shown=shown,
            request_id=request_id,
            number=0 if route is None else route.number,
            line=_line(method, events) if self._lines else None,
        )

    def _plain(self, route: Route) -> PlainRoute | None:
        if route.handler != self._routes.append or not set(route.query.items()) <= _PLAIN_QUERIES:
            return None
        return PlainRoute(route.shard, route.name, route.name.encode(), not route.query, route.number)


class _Events:
    """What httptools calls back."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[bytes, list[bytes]] = {}
        self.complete = False
        self.keep_alive = False
        self.parser: httptools.HttpRequestParser = None

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.setdefault(name.lower(), []).append(value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        self.complete = True
        self.keep_alive = self.parser.should_keep_alive()  # once the message is complete it no longer knows


def _line(method: str, events: _Events) -> tuple[str, str]:
    """For the access log: the path alone. What stands around it may hold a secret."""
    url = events.url.partition(b"?")[0].partition(b"#")[0].decode("latin-1")
    _, scheme, rest = url.partition("://")
    return method, "/" + rest.partition("/")[2] if scheme and not url.startswith("/") else url


def _joined(headers: dict[bytes, list[bytes]], *, old: bool) -> dict[bytes, bytes]:
    """HTTP/1.0 has no upgrades: what looks like one is not looked at."""
    return {name: b",".join(values) for name, values in headers.items() if not (old and name == b"upgrade")}


def _split_target(target: str) -> tuple[bytes | None, str]:
    """The path of a target; one with scheme and host, as proxies send it, is accepted too, and its host comes first."""
    if target.startswith("/"):
        return None, target
    for scheme in ("http://", "https://"):
        if target.lower().startswith(scheme):
            authority, slash, path = target[len(scheme) :].partition("/")
            return authority.encode(), slash + path or "/"
    raise invalid("the request target must be a path")


def _visit(headers: dict[bytes, list[bytes]], hosts: list[bytes]) -> Visit:
    """What stands there twice is joined, so that it is nothing known."""
    return Visit(hosts, b",".join(headers.get(b"sec-fetch-site", [])), b",".join(headers.get(b"origin", [])))


# --- rules that the other lane applies too -----------------------------------------------------------


def valid_request_id(values: list[bytes]) -> bytes | None:
    """A client's own name for its request; what could do harm in a log is not taken."""
    return values[0] if len(values) == 1 and _REQUEST_ID.fullmatch(values[0]) else None


def check_content_type(value: bytes) -> None:
    kind, _, parameters = value.partition(b";")
    charset = parameters.strip().lower().replace(b'"', b"")
    if kind.strip().lower() != b"application/json" or (charset and charset not in (b"charset=utf-8", b"charset=utf8")):
        raise ApiError("unsupported_media_type", "send Content-Type: application/json; charset=utf-8 with a body")


def _gzipped(codings: list[bytes]) -> bool:
    named = [coding.strip().lower() for value in codings for coding in value.split(b",")]
    named = [coding for coding in named if coding not in (b"", b"identity")]
    if named not in ([], [b"gzip"], [b"x-gzip"]):
        raise ApiError("unsupported_media_type", "the only Content-Encoding is gzip")
    return bool(named)


def is_gzipped(value: bytes) -> bool:
    return _gzipped([value])


def accepts_gzip(value: bytes) -> bool:
    for part in value.lower().split(b","):
        coding, _, quality = part.partition(b";")
        if coding.strip() in (b"gzip", b"x-gzip"):
            return quality.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
    return False
