"""Bytes of clients in the memory of one gateway: heads and bodies that have not come whole, requests that wait to be
read, heads of open HTTP/2 streams, and answers that wait for their clients.

Each gateway has its share of what all of them may hold, so that their number does not raise the limit of the server.

One sum over all connections of both lanes and all WebSockets. Each holder settles what it holds now against what it
held when it settled last, so an account can't drift; a holder that ends settles to nothing. Rules: a holder of no more
than SMALL_BODY_BYTES may use all of it; the others leave a quarter, so that large bodies can't keep out small requests.
A request that comes whole with one read is never held, and never refused for this.

Answers are made before they are counted. One is refused when there is no room left, not when it is larger than the
room: a small share would never let it pass. Only answers that can be asked for again are refused; what else was done
is said. While room for large ones is short, reads ask for small batches, so readers go on.
"""

from __future__ import annotations

from topics import limits
from topics.errors import ApiError, throttled_by
from topics.gateway.api.types import Call
from topics.gateway.metrics.refusals import Refused, uncounted
from topics.settings import Settings

_BEHIND = 256 * limits.KIB  # read with the end of a body


class Budget:
    __slots__ = ("_large", "_refused", "held", "most")

    def __init__(self, most: int, refused: Refused = uncounted) -> None:
        self.most = most
        self._refused = refused
        self.held = 0
        self._large = most - most // 4

    @classmethod
    def of(cls, settings: Settings, refused: Refused = uncounted) -> Budget:
        """This gateway's share. Never so small that a body of the largest size is always refused: it may use three
        quarters, and what came behind it in the same read counts as well."""
        largest = settings.max_body_bytes
        share = max(settings.max_buffered_bytes, 2 * largest) // settings.gateways
        return cls(share if settings.gateways == 1 else max(share, (largest + _BEHIND) * 4 // 3 + 1), refused)

    @property
    def exhausted(self) -> bool:
        """There is no room for another large body."""
        return self.held >= self._large

    def settle(self, before: int, now: int, *, head: int = 0) -> bool:
        """A holder of `before` bytes holds `now`; so many of these are a request's head, which makes none large.
        False: there is no room, and it is still booked with `before`."""
        grown = now - before
        if grown > 0 and self.held + grown > (self.most if now - head <= limits.SMALL_BODY_BYTES else self._large):
            return False
        self.held += grown
        return True

    @property
    def full(self) -> bool:
        return self.held >= self.most

    def takes_answer(self, size: int) -> bool:
        """There is room left for an answer. It is booked with `book`, and may be larger than the room."""
        return self.held < (self.most if size <= limits.SMALL_BODY_BYTES else self._large)

    def book(self, before: int, now: int) -> None:
        """The same as `settle`, for what can't be refused."""
        self.held += now - before

    def spare(self, call: Call) -> None:
        """Before a call with a large answer is asked."""
        if self.full:
            raise self.refusal()
        if self.exhausted:
            call.lessen()

    def take(self, size: int) -> bool:
        return self.settle(0, size)

    def give(self, size: int) -> None:
        self.held -= size

    def refusal(self) -> ApiError:
        """For one request that is refused now: it is counted."""
        self._refused("max_buffered_bytes")
        return throttled_by("max_buffered_bytes", self.most, "send the request again later", whose="the gateway")
