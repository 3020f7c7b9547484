"""Hostile openings of WebSockets, over both lanes: names that are not the server's, pages of other origins, fetch
metadata that contradicts itself, each of them also twice, in other letters, or beside the right value.

Every opening has a key that may do everything and is otherwise as it should be, so the page alone decides.
What must not be opened publishes all the same, to NEVER, which nobody else names: it must not be there in the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from e2e.sockets import HEADERS as RIGHT

from . import pages
from .http2 import END_HEADERS, Fields, Frame, Talk, encode_fields, settings
from .mutations import in_pieces
from .player import Case, Outcome
from .scene import FULL
from .verdict import DATA, HEADERS, Wrong, read_h2, read_head, read_replies, read_socket
from .websocket import close_frame, text_frame

NEVER = "never-Xk4Tt"
_LISTED = b"https://listed.example"
_WEB = (b"origin", b"sec-fetch-site")
_STREAM = 1
_PATH = b"/v0/ws"
_KEY = (b"Authorization", b"Bearer " + FULL.encode())


class Opening:
    """One handshake and what may become of it."""

    def __init__(self, dice: Random, number: int) -> None:
        self.framed = dice.random() < 0.25  # HTTP/2: the slow lane
        self.foreign = dice.random() < 0.6
        self.host, self.headers = pages.foreign_page(dice) if self.foreign else pages.some_page(dice)
        self.proxied: bytes | None = None  # the host in the target
        self.label = "a foreign page" if self.foreign else "some page"
        if self.foreign and dice.random() < 0.5:
            change = dice.choice(_CHANGES)
            self.label += f", {change.__name__}"
            change(dice, self)
        self.number = number
        self._dice = dice

    @property
    def must_not(self) -> bool:
        """What it says of its page is refused, however ports and letters are compared."""
        hosts = [self.host] if self.proxied is None else [self.host, self.proxied]
        if any(host in pages.EVIL for host in hosts):
            return True
        origin, site = self._said(b"origin"), self._said(b"sec-fetch-site").lower()
        if site == b"same-origin" or origin == _LISTED:
            return False
        return site not in (b"", b"none") or origin not in pages.OWN_ORIGINS

    @property
    def must(self) -> bool:
        """It is no page at all, or one of our own."""
        bare = not any(name.lower() in _WEB for name, _ in self.headers)
        return bare and self.host in pages.OURS and self.proxied is None

    def _said(self, name: bytes) -> bytes:
        return b",".join(value.strip() for given, value in self.headers if given.lower() == name)

    # --- as a case ---

    def case(self) -> Case:
        parts = self._h2() if self.framed else self._h1()
        label = f"{self.label}{' over HTTP/2' if self.framed else ''}"
        return Case(self.number, label, parts, "wait", farewell=self._farewell)

    def _publish(self) -> bytes:
        topic = NEVER if self.must_not else "ws-1"
        command = {"op": "publish", "topic": topic, "records": [{"data": 1}], "request_id": 1}
        return text_frame(json.dumps(command).encode())

    def _h1(self) -> list[bytes]:
        target = _PATH if self.proxied is None else b"http://" + self.proxied + _PATH
        kept = [(name.encode(), value.encode()) for name, value in RIGHT.items() if name != "Host"]
        fields = [(b"Host", self.host), *kept, _KEY, *self.headers]
        lines = [b"GET %b HTTP/1.1" % target, *(b"%b: %b" % field for field in fields), b"", b""]
        return in_pieces(self._dice, b"\r\n".join(lines) + self._publish())

    def _h2(self) -> list[bytes]:
        fields: Fields = [
            (b":method", b"CONNECT"),
            (b":protocol", b"websocket"),
            (b":scheme", b"http"),
            (b":path", _PATH),
            (b":authority", self.host),
            (b"sec-websocket-version", b"13"),
            *((name.lower(), value) for name, value in (_KEY, *self.headers)),
        ]
        talk = Talk([settings((4, 1 << 20))])
        talk.frames.append(Frame(HEADERS, END_HEADERS, _STREAM, encode_fields(talk, fields)))
        talk.frames.append(Frame(DATA, 0, _STREAM, self._publish()))
        return in_pieces(self._dice, talk.encode())

    def _farewell(self, received: bytes) -> bytes | None:
        """As soon as the opening is answered."""
        try:
            if self.framed:
                talk = read_h2(received, clean=False)
                return b"" if talk.replies or talk.resets or talk.goaway is not None else None
            head = read_head(received, 0)
        except Wrong:
            return b""
        return None if head is None else close_frame(1000) if head[0] == 101 else b""

    # --- what it was answered ---

    def judge(self, outcome: Outcome) -> None:
        statuses = self._statuses(outcome.received)
        if failed := [status for status in statuses if status >= 500]:
            raise Wrong(f"{failed} for a handshake")
        opened = (200 if self.framed else 101) in statuses
        if opened and self.must_not:
            raise Wrong(f"opened for {self.host!r}, {self.headers!r}, target {self.proxied!r}")
        if self.must and not opened:
            raise Wrong(f"not opened, but {statuses}: {self.host!r}, {self.headers!r}")

    def _statuses(self, received: bytes) -> list[int]:
        if self.framed:
            return [reply.status for reply in read_h2(received, clean=False).replies.values()]
        replies, rest = read_replies(received, clean=False)
        if replies and replies[-1].status == 101:
            read_socket(rest)
        return [reply.status for reply in replies]


# --- what is done to a foreign page: it stays one ----------------------------------------------------


def other_letters(dice: Random, one: Opening) -> None:
    one.headers = [(dice.choice((name.upper(), name.lower())), value) for name, value in one.headers]


def padded(dice: Random, one: Opening) -> None:
    one.headers = [(name, dice.choice((b" ", b"\t", b"  \t ")) + value + b" ") for name, value in one.headers]


def beside_the_right_value(dice: Random, one: Opening) -> None:
    """Whoever looks at the first alone, or at the last, takes it for one of ours."""
    right = {b"Origin": (b"http://t", _LISTED), b"Sec-Fetch-Site": (b"same-origin", b"none")}
    for name, values in right.items():
        if name in dict(one.headers):
            one.headers.insert(dice.choice((0, len(one.headers))), (name, dice.choice(values)))


def right_host_beside(dice: Random, one: Opening) -> None:
    one.headers.insert(dice.choice((0, len(one.headers))), (b"Host", pages.HOST))


def named_in_the_target(dice: Random, one: Opening) -> None:
    """Over HTTP/2 there is no such target: the name stands in the header."""
    if not one.framed:
        one.host, one.proxied = dice.choice(((one.host, pages.HOST), (pages.HOST, one.host)))


def own_by_metadata(dice: Random, one: Opening) -> None:
    """As a browser says it after DNS was rebound: the page has the very name that it asks."""
    one.host = dice.choice(pages.EVIL)
    one.headers = [(b"Origin", b"http://" + one.host), (b"Sec-Fetch-Site", b"same-origin")]


_CHANGES: tuple[Callable[[Random, Opening], None], ...] = (
    other_letters,
    padded,
    beside_the_right_value,
    right_host_beside,
    named_in_the_target,
    own_by_metadata,
)
