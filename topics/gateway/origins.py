"""Which names this server answers to, and what web pages may do with it. Pure rules, asked once per request head.

A browser sends requests for every page that it shows, to loopback too. Without keys that alone would let any website
use a developer's server: with a name of its own that suddenly resolves to 127.0.0.1 (DNS rebinding), with an <img>, a
form, a WebSocket. What a page can't forge is Host, Origin and Sec-Fetch-*; programs other than browsers send no Origin
and no Sec-Fetch-*, and nothing changes for them.

Host (`Origins.knows`). Checked if there are no keys, or if TOPICS_ALLOWED_HOSTS is set; a target with a host in it
names two, and both count. Ports are not compared. Refused: 421 misdirected_request.

    host                               TOPICS_HOST: loopback   an address       0.0.0.0, ::, a name
    localhost, *.localhost, 127/8, ::1       yes                   yes                 yes
    an address                               no                    if it is that       any: rebinding needs a name
    the name that TOPICS_HOST is             -                     -                   yes
    an entry of TOPICS_ALLOWED_HOSTS         yes                   yes                 yes
    any other, or nothing that is a host     no                    no                  no
    none (HTTP/1.0)                          yes                   yes                 yes

Page (`Origins.page_of`). With keys and without.

    Sec-Fetch-Site            Origin                                               the page is
    same-origin               any                                                  OWN
    none, absent              absent                                               OWN (or no page at all)
    none, absent              host and port are those that the request names       OWN
    any other                 in TOPICS_ALLOWED_ORIGINS, or that is *              LISTED
    any other                 any other                                            FOREIGN

What it may do (`Origins.admit`). Refused: 403 forbidden.

                                              OWN   LISTED   FOREIGN
    probe   health, readiness                 yes    yes      yes       tells nothing; Host is not looked at, either
    read    GET, HEAD                         yes    yes      no
    socket  /v0/ws                            yes    yes      no
    stream  /work, /watch/:wid                yes    no       no        could not be read: there are no CORS headers
    change  everything else                   yes    no       no

Event streams (`check_events`). Leases and cursors move as soon as one is opened, so it is given only to a reader of
events, whatever page it is on. Refused: 406 not_acceptable.

    Sec-Fetch-Dest other than `empty`                                  no     an <img>, a frame, a navigation
    Accept: absent or empty                                            yes
    Accept names text/event-stream                                     yes    unless with q=0
    Accept has nothing but */* and text/*                              yes    curl
    Accept names other types, */* at its end or not                    no     an <img>, a navigation
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from topics.errors import ApiError
from topics.hosts import Address, address_of, split_authority
from topics.settings import Settings

if TYPE_CHECKING:
    from topics.gateway.api.routes import Route, Routes

_KEPT_HOSTS = 256  # verdicts; clients name a few hosts, and an attacker's are forgotten
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_NEVER = (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")


class Page(enum.Enum):
    OWN = "own"
    LISTED = "listed"
    FOREIGN = "foreign"


class Kind(enum.Enum):
    PROBE = "probe"
    READ = "read"
    SOCKET = "socket"
    STREAM = "stream"
    CHANGE = "change"


_ADMITTED = {
    Page.OWN: frozenset(Kind),
    Page.LISTED: frozenset({Kind.PROBE, Kind.READ, Kind.SOCKET}),
    Page.FOREIGN: frozenset({Kind.PROBE}),
}


class Visit(NamedTuple):
    """What a request says of where it comes from and goes to."""

    hosts: Sequence[bytes]  # of Host or :authority, then of the target if that has one
    site: bytes = b""  # Sec-Fetch-Site
    origin: bytes = b""


class Origins:
    def __init__(self, settings: Settings) -> None:
        listed = settings.allowed_hosts
        self.checks_hosts = (bool(listed) or not settings.api_keys) and "*" not in listed
        self._names = frozenset(entry for entry in listed if not entry.startswith("*."))
        self._below = tuple(entry[1:] for entry in listed if entry.startswith("*."))
        self._origins = frozenset(settings.allowed_origins)
        bound = settings.host.partition("%")[0].lower()  # without the interface of a link-local address
        self._bound: Address | None = address_of(bound)
        self._any_address = (self._bound is None and bound != "localhost") or (
            self._bound is not None and self._bound.is_unspecified
        )
        if bound and self._bound is None:
            self._names |= {bound.rstrip(".")}
        self._verdicts: dict[bytes, bool] = {}

    # --- rules ---

    def find(self, routes: Routes, method: str, target: str, visit: Visit) -> Route:
        """The route of a request. What is not there is refused for its host first, as what is there."""
        try:
            return routes.find(method, target)
        except ApiError:
            self._check_hosts(visit)
            raise

    def admit(self, method: str, route: Route, visit: Visit) -> None:
        """Raises what to answer if this request may not be."""
        kind = kind_of(method, route)
        if kind is Kind.PROBE:
            return
        self._check_hosts(visit)
        if (visit.site or visit.origin) and kind not in _ADMITTED[self.page_of(visit)]:
            raise _foreign(visit, kind)

    def _check_hosts(self, visit: Visit) -> None:
        if self.checks_hosts:
            for host in visit.hosts:
                if not self.knows(host):
                    raise _misdirected(host)

    def knows(self, host: bytes) -> bool:
        """This is a name of ours."""
        verdict = self._verdicts.get(host)
        if verdict is None:
            verdict = self._is_ours(host)
            if len(self._verdicts) >= _KEPT_HOSTS:
                self._verdicts.clear()
            if len(host) <= _KEPT_HOSTS:
                self._verdicts[host] = verdict
        return verdict

    def _is_ours(self, authority: bytes) -> bool:
        found = split_authority(authority.decode("latin-1"))
        if found is None:
            return False
        host = found[0]
        if host in self._names or host == "localhost" or host.endswith((".localhost", *self._below)):
            return True
        address = address_of(host)
        return address is not None and (self._any_address or address.is_loopback or address == self._bound)

    def page_of(self, visit: Visit) -> Page:
        site, origin = visit.site.lower(), visit.origin.decode("latin-1").lower()
        if site == b"same-origin":
            return Page.OWN
        if site in (b"", b"none") and (not origin or (visit.hosts and _same(origin, visit.hosts[-1]))):
            return Page.OWN
        return Page.LISTED if "*" in self._origins or origin in self._origins else Page.FOREIGN


def kind_of(method: str, route: Route) -> Kind:
    if route.probe:
        return Kind.PROBE
    if route.socket:
        return Kind.SOCKET
    if route.streams:
        return Kind.STREAM
    return Kind.READ if method in ("GET", "HEAD") else Kind.CHANGE


def _same(origin: str, host: bytes) -> bool:
    """The page is served under the very host and port that it asks. Its scheme may differ: a proxy ends TLS."""
    scheme, _, authority = origin.partition("://")
    usual = _DEFAULT_PORTS.get(scheme)
    asked = split_authority(host.decode("latin-1"))
    ours = split_authority(authority)
    if usual is None or asked is None or ours is None:
        return False
    return (ours[0], ours[1] or usual) == (asked[0], asked[1] or usual)


def check_events(headers: Mapping[bytes, bytes]) -> None:
    """Raises if this is no reader of an event stream."""
    destination = headers.get(b"sec-fetch-dest", b"").strip().lower()
    if destination not in (b"", b"empty"):
        raise ApiError(
            "not_acceptable",
            "this is an event stream: it is not for an image, a frame or a navigation. Open it with an EventSource",
            {"destination": destination[:64].decode("latin-1")},
        )
    if not accepts_events(headers.get(b"accept", b"")):
        raise ApiError("not_acceptable", "this is an event stream: send Accept: text/event-stream")


def accepts_events(accept: bytes) -> bool:
    if not accept.strip():
        return True
    taken = True
    for part in accept.lower().split(b","):
        kind, _, parameters = part.partition(b";")
        never = parameters.replace(b" ", b"") in _NEVER
        if kind.strip() == b"text/event-stream":
            return not never
        taken = taken and kind.strip() in (b"*/*", b"text/*") and not never
    return taken


# --- refusals ---


def _misdirected(host: bytes) -> ApiError:
    named = host[:256].decode("latin-1")
    return ApiError(
        "misdirected_request",
        f'"{named}" is not a name of this server. It answers to loopback names, to its own address and to what '
        "TOPICS_ALLOWED_HOSTS lists: behind a reverse proxy list the public name there",
        {"host": named},
    )


def _foreign(visit: Visit, kind: Kind) -> ApiError:
    if kind in _ADMITTED[Page.LISTED]:
        remedy = "TOPICS_ALLOWED_ORIGINS lists those that may read and open a WebSocket"
    else:
        remedy = "only pages of the server's own origin may do this"
    origin, site = visit.origin[:256].decode("latin-1").lower(), visit.site[:64].decode("latin-1").lower()
    return ApiError(
        "forbidden",
        f"this comes from a web page of another origin, which may not: {remedy}",
        {"origin": origin} if origin else {"site": site},
    )
