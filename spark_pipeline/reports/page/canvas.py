"""What every chart is drawn on: a frame with axes, and letters that stay inside it.

A drawing is made for a width in pixels and shown at that width, so that letters keep their size. Text never overlaps:
widths are estimated on the safe side, labels are cut or left out where there is no room, and the whole of a label that
was cut stands in its <title>. Colours are the page's: series n has the class `sn`, which sets the variable `--c`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from html import escape

import msgspec

from .. import units
from ..report import Kind

WIDE_PX, NARROW_PX = 532, 340  # two beside each other on a desk; a phone

_HEIGHT_PX = {WIDE_PX: 220, NARROW_PX: 190}
_FONT_PX = 11
_LETTER_PX = 7.0  # of DejaVu Sans, which is wider than what most machines have
_APART_PX = 6  # between two labels
_PER_TIME_PX = 70  # what a label of a time axis wants


class Axis(msgspec.Struct, frozen=True):
    """Of the values: its ticks and what they are called."""

    ticks: list[float]
    labels: list[str]

    @classmethod
    def fitting(cls, low: float, high: float, kind: Kind, *, at_most: int = 6) -> Axis:
        ticks = units.ticks(low, high, kind, at_most=at_most)
        return cls(ticks, [units.short(tick, kind) for tick in ticks])

    def share(self, value: float) -> float:
        """Where a value lies between the ends, from 0 to 1."""
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def beside(cls, axis: Axis, width: int) -> Frame:
        """With room for an upright axis on the left and two lines of text below."""
        left = max(text_px(label) for label in axis.labels) + 10
        return cls(width=width, height=_HEIGHT_PX.get(width, 220), left=left, right=12, top=10, bottom=42)

    @property
    def inner(self) -> float:
        return self.width - self.left - self.right

    @property
    def floor(self) -> float:
        return self.height - self.bottom

    def x(self, share: float) -> float:
        return self.left + share * self.inner

    def y(self, share: float) -> float:
        return self.floor - share * (self.floor - self.top)

    def svg(self, title: str, parts: Iterable[str]) -> str:
        return (
            f'<svg role="img" aria-label="{escape(title)}" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}">{"".join(parts)}</svg>'
        )


# --- axes --------------------------------------------------------------------------------------------


def upright(frame: Frame, axis: Axis) -> Iterator[str]:
    """Values from the bottom to the top, with lines across."""
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        y = frame.y(axis.share(tick))
        yield stroke("zero" if tick == 0 else "grid", frame.left, y, frame.width - frame.right, y)
        yield text(frame.left - 6, y + 4, label, "end")


def sideways(frame: Frame, axis: Axis) -> Iterator[str]:
    """Values from left to right, with lines from top to bottom."""
    for tick in axis.ticks:
        x = frame.x(axis.share(tick))
        yield stroke("zero" if tick == 0 else "grid", x, frame.top, x, frame.floor)
    yield from _beside_each_other(
        frame, ((frame.x(axis.share(tick)), label) for tick, label in zip(axis.ticks, axis.labels, strict=True))
    )


def times(frame: Frame, low_ms: int, high_ms: int, *, last_ms: int) -> Iterator[str]:
    """Moments along the bottom, and below them which days these are, up to that of `last_ms`."""
    ticks = units.time_ticks(low_ms, high_ms, at_most=max(int(frame.inner // _PER_TIME_PX), 2))
    at = [(frame.x((ms - low_ms) / (high_ms - low_ms)), label) for ms, label in ticks]
    for x, _ in at:
        yield stroke("tick", x, frame.floor, x, frame.floor + 4)
    yield from _beside_each_other(frame, at)
    yield text(frame.width - frame.right, frame.floor + 35, units.span_text(low_ms, last_ms), "end", css="axis")


def names(frame: Frame, labels: list[str], place: Callable[[str], float]) -> Iterator[str]:
    """Labels below their points, every n-th where there is no room for all."""
    slot = frame.inner / len(labels)
    widest = max(text_px(label) for label in labels)
    every = math.ceil(max(slot, min(widest, 90.0) + 8) / slot)
    for label in labels[::every]:
        x = place(label)
        room = min(slot * every - 8, 2 * min(x, frame.width - x))  # the outermost must not be cut off
        yield text(x, frame.floor + 17, label, "middle", room_px=room)


def _beside_each_other(frame: Frame, at: Iterable[tuple[float, str]]) -> Iterator[str]:
    """Labels below the floor, without those that would touch the one before or the edge."""
    taken = -math.inf
    for x, label in at:
        half = text_px(label) / 2
        if x - half > taken + _APART_PX and x - half >= 0 and x + half <= frame.width:
            yield text(x, frame.floor + 17, label, "middle")
            taken = x + half


# --- marks -------------------------------------------------------------------------------------------


def stroke(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def bar(css: str, title: str, *, x: float, y: float, width: float, height: float) -> str:
    """A box. The smallest value is still seen."""
    width, height = max(width, 0.6), max(height, 0.6)
    radius = ' rx="1.5"' if min(width, height) >= 5 else ""
    return (
        f'<rect class="bar {css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{radius}>'
        f"<title>{escape(title)}</title></rect>"
    )


def dot(css: str, title: str, *, x: float, y: float, radius: float) -> str:
    return f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(title)}</title></circle>'


def text(x: float, y: float, label: str, anchor: str, *, css: str = "", room_px: float = math.inf) -> str:
    shown = cut(label, room_px)
    title = "" if shown == label else f"<title>{escape(label)}</title>"
    named = f' class="{css}"' if css else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}{title}</text>'


# --- letters -----------------------------------------------------------------------------------------


def text_px(label: str) -> float:
    """How wide a label is at most, near enough."""
    return sum(map(_letter_px, label))


def _letter_px(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return _FONT_PX + 1.0
    if letter in "mwMW@%…":
        return _LETTER_PX * 1.6
    return _LETTER_PX * (1.15 if letter.isupper() else 0.62 if letter in "iljtfI.,:;|'! " else 1.0)


def cut(label: str, room_px: float) -> str:
    """The label, shortened in its middle if there is no room: names of topics differ at both ends."""
    if text_px(label) <= room_px:
        return label
    for keep in range(len(label) - 1, 1, -1):
        head = (keep + 1) // 2
        shown = f"{label[:head]}…{label[len(label) - (keep - head) :]}"
        if text_px(shown) <= room_px:
            return shown
    return "…" if room_px >= text_px("…") else ""
