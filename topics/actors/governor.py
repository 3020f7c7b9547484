"""The governor of a process: how pressed it is, and which step of the ladder that means. Pure, with an injected clock.

    level   what the process does about it           each on top of those below
    0       nothing: calm
    1       coalesce: fewer and larger pushes
    2       widen the commit window: more batches share a sync
    3       defer: the lowest priorities wait
    4       refuse: new work gets 429 and is told when to come back

Pressure is the largest of what is measured: rings that fill up (from half on), rounds of the loop that take long, and
syncs that take long; 1.0 is as much as is bearable, and each quarter of it is a level. The ladder is climbed one step
per tick, so that one slow round refuses nobody, and left step by step when the pressure has been lower for a while, so
that it does not flutter. Steps 1 to 3 cost latency alone.
"""

from __future__ import annotations

import enum

from topics import limits

_TICK_NS = limits.PRESSURE_TICK_MS * 1_000_000
_HOLD_NS = limits.PRESSURE_HOLD_MS * 1_000_000
_NEWS_NS = 10_000_000_000
_LEAST_MS, _MOST_MS = limits.THROTTLE_RETRY_MS


class Level(enum.IntEnum):
    CALM = 0
    COALESCE = 1
    WIDEN = 2
    DEFER = 3
    REFUSE = 4


class Governor:
    """Fed with what is measured, asked for its level once a tick."""

    def __init__(self, *, lag_ms: int, commit_ms: float, on: bool = True) -> None:
        self.level = Level.CALM
        self.pressure = 0.0
        self._on = on
        self._lag_us = lag_ms * 1_000
        self._commit_us = commit_ms * 1_000
        self._fill = 0.0  # the worst since the last tick
        self._round_us = 0
        self._sync_us = 0
        self._ticked_ns = 0
        self._told = Level.CALM
        self._silent_ns = 0
        self._below_ns: int | None = None  # since when the pressure is less than the level says

    def ring(self, waiting: int, capacity: int) -> None:
        fill = waiting / capacity
        if fill > self._fill:
            self._fill = fill

    def round(self, took_us: int) -> None:
        if took_us > self._round_us:
            self._round_us = took_us

    def sync(self, took_us: int) -> None:
        if took_us > self._sync_us:
            self._sync_us = took_us

    def due(self, now_ns: int) -> bool:
        return self._on and now_ns - self._ticked_ns >= _TICK_NS

    def tick(self, now_ns: int) -> bool:
        """Judge what was measured since the last tick; whether the level changed."""
        if not self.due(now_ns):
            return False
        self._ticked_ns = now_ns
        self.pressure = max(
            (self._fill - 0.5) / 0.5, self._round_us / self._lag_us, self._sync_us / self._commit_us, 0.0
        )
        self._fill, self._round_us, self._sync_us = 0.0, 0, 0
        wanted = min(int(self.pressure * 4), int(Level.REFUSE))
        before = self.level
        if wanted > before:
            self.level = Level(before + 1)
            self._below_ns = None
        elif wanted == before:
            self._below_ns = None
        elif self._below_ns is None:
            self._below_ns = now_ns
        elif now_ns - self._below_ns >= _HOLD_NS:
            self.level = Level(before - 1)
            self._below_ns = now_ns
        return self.level is not before

    def has_news(self, now_ns: int) -> bool:
        """Whether a log should say where it stands: when it leaves calm or returns to it, and now and then when it
        refuses. Between that it may go up and down several times a second."""
        kind = min(self.level, Level.COALESCE) if self.level is not Level.REFUSE else Level.REFUSE
        if kind == self._told or (kind is not Level.CALM and (kind < self._told or now_ns < self._silent_ns)):
            return False
        if kind is Level.REFUSE:
            self._silent_ns = now_ns + _NEWS_NS
        self._told = kind
        return True

    @property
    def next_tick_ns(self) -> int | None:
        """When it wants to be asked again though nothing happens: to come down."""
        return self._ticked_ns + _TICK_NS if self.level else None

    @property
    def retry_after_ms(self) -> int:
        """What a refused client is told: the longer the more is too much."""
        return min(max(int(self.pressure * 500), _LEAST_MS), _MOST_MS)
