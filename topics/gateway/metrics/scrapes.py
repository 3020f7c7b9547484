"""Scrapes of the metrics: requests that come together are answered together.

Making the metrics takes milliseconds in which a gateway does nothing else, and a client may ask thousands of times.
Rules:

    fresh      what a request is answered with was begun after it came: it shows every write that was answered before
    shared     requests that wait while a wave is made, or until the next one may begin, are the next wave: the page is
               made once for all of them, the block about topics once for each set of options
    paced      from wave to wave at least SCRAPE_MS, and SCRAPE_CROWD_MS if more than SCRAPE_CROWD requests wait
    bounded    SCRAPES_WAITING requests wait at most; more are refused

Why not one in a second for all, and no more. What was answered before a request came is to be in its page; so after a
write the page of less than a second ago won't do, and the request would have to wait for the rest of the second. What
does not change from one page to the next is not made again (answered.py), and a crowd does wait for its second.

A wave whose shards don't answer keeps the next one waiting for SCRAPE_CROWD_MS at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from topics import limits
from topics.errors import ApiError, throttled_by
from topics.gateway.api.types import Outcome, Request, Response, Sink, Wait, error_response
from topics.gateway.calls import Calls
from topics.gateway.metrics.page import MetricsHandlers
from topics.gateway.metrics.refusals import Refused, uncounted

_PACE_NS = limits.SCRAPE_MS * 1_000_000
_CROWD_NS = limits.SCRAPE_CROWD_MS * 1_000_000


class Scrapes:
    def __init__(
        self,
        metrics: MetricsHandlers,
        calls: Calls,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        refused: Refused = uncounted,
    ) -> None:
        self._refused = refused
        self._metrics = metrics
        self._calls = calls
        self._clock = clock
        self._groups: dict[tuple[Any, ...], _Group] = {}  # by their options: the next wave
        self.waiting = 0  # requests of the next wave, and of the one that is being made
        self._making = 0  # groups that are not answered yet
        self._began_ns = -_CROWD_NS
        self._next_ns = 0  # when the next wave may begin
        self._stops = False

    def get(self, request: Request) -> Outcome:
        options = self._metrics.options(request)
        if self.waiting >= limits.SCRAPES_WAITING:
            self._refused("scrapes")
            raise throttled_by("scrapes", limits.SCRAPES_WAITING, "ask for metrics less often", whose="the gateway")
        return Wait(lambda sink: self._join(options, request, sink))

    def _join(self, options: tuple[Any, ...], request: Request, sink: Sink) -> None:
        if (group := self._groups.get(options)) is None:
            group = self._groups[options] = _Group(self, request)
        group.sinks.append(sink)
        self.waiting += 1
        self.step()

    before_wave: Callable[[], None] = staticmethod(lambda: None)  # figures of this process are to be those of now

    def step(self) -> None:
        """Begin a wave if it is time; called whenever it may be."""
        if not self._groups:
            return
        now = self._clock()
        if not self._stops and now < self._due_ns:
            return
        groups, self._groups = self._groups, {}
        crowd = sum([len(group.sinks) for group in groups.values()]) > limits.SCRAPE_CROWD
        self._began_ns = now
        self._next_ns = now + (_CROWD_NS if crowd else _PACE_NS)
        self.before_wave()
        self._metrics.page = {}
        self._making += len(groups)
        for group in groups.values():
            try:
                outcome = self._metrics.get(group.request)
            except ApiError as error:
                outcome = error_response(error)
            self._calls.submit(outcome, group)

    @property
    def _due_ns(self) -> int:
        return max(self._next_ns, self._began_ns + _CROWD_NS) if self._making else self._next_ns

    @property
    def next_due_ns(self) -> int | None:
        return self._due_ns if self._groups else None

    def hurry(self) -> None:
        """The gateway stops: none waits for a later wave."""
        self._stops = True
        self.step()

    def answered(self, group: _Group, value: Response) -> None:
        self._making -= 1
        for sink in group.sinks:
            self.waiting -= 1
            try:
                sink.finish(value)
            except Exception as error:  # one connection's fault is its own
                self._calls.failed(sink, error)
        self.step()


class _Group:
    """Requests with the same options. The sink of their answer."""

    def __init__(self, scrapes: Scrapes, request: Request) -> None:
        self._scrapes = scrapes
        self.request = request  # of the first of them
        self.sinks: list[Sink] = []

    def finish(self, value: Response) -> None:
        self._scrapes.answered(self, value)

    def abort(self) -> None:
        for sink in self.sinks:
            sink.abort()
