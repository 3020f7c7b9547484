"""What a subscription delivers, and how it is read from the server's frames. Pure.

A record's `data` stays as the bytes that were sent: numbers keep their spelling, keys their order. `decode()` turns it
into a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, overload

import msgspec
from msgspec import Raw

T = TypeVar("T")
_NOTHING = Raw(b"")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    data: Raw = _NOTHING  # empty if the subscription asked for none
    meta: Raw = _NOTHING  # empty if there is none

    @overload
    def decode(self) -> Any: ...
    @overload
    def decode(self, type: type[T]) -> T: ...
    def decode(self, type: Any = Any) -> Any:
        """`data` as a Python value, or checked and converted to a type that msgspec knows."""
        return msgspec.json.decode(self.data, type=type)


read_record = msgspec.json.Decoder(Record).decode


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """Some records of one topic, in the order of their seqs. Iterate over it for typed ones."""

    topic: str
    raw: list[Raw] = msgspec.field(name="records")  # each as the server wrote it
    from_seq: int
    to_seq: int
    head_seq: int

    def __len__(self) -> int:
        return len(self.raw)

    def __iter__(self) -> Iterator[Record]:
        return map(read_record, self.raw)


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """Records that this reader will not get, and nobody asked for their removal."""

    topic: str
    reason: str
    gap_from: int
    gap_to: int
    earliest_seq: int
    head_seq: int

    @property
    def resume_seq(self) -> int:
        """The cursor behind the gap."""
        return self.earliest_seq - 1 if self.reason == "recreated" else self.gap_to

    def __str__(self) -> str:
        if self.reason == "recreated":
            return f"{self.topic} was deleted and made again: reading on from its start"
        gap = str(self.gap_from) if self.gap_from == self.gap_to else f"{self.gap_from}..{self.gap_to}"
        return f"missed {gap} of {self.topic}: {_REASONS.get(self.reason, self.reason)}"


_REASONS = {
    "cap": "evicted by the cap",
    "ttl": "expired",
    "mixed": "evicted by the cap or expired",
    "from_seq_too_old": "no longer kept",
    "source_trim": "no longer kept where they were to be forwarded from",
}


class CaughtUp(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to the head was delivered; what comes now is new."""

    topic: str
    head_seq: int


class TopicDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The last word about a topic: the subscription goes on without it."""

    topic: str
    head_seq: int
    reason: str = "deleted"

    def __str__(self) -> str:
        return f"{self.topic} was deleted" + ("" if self.reason == "deleted" else f" ({self.reason})")


Event = Records | Tombstone | CaughtUp | TopicDeleted


class Position(msgspec.Struct, frozen=True):
    """Where a subscription to a topic begins, and what there is."""

    from_seq: int
    head_seq: int
    earliest_seq: int


class Subscribed(msgspec.Struct, frozen=True):
    topics: dict[str, Position]


class Refused(msgspec.Struct, frozen=True):
    """An error frame."""

    code: str
    message: str
    request_id: str | int | None = None
    detail: dict[str, Any] | None = None


class _Op(msgspec.Struct):
    op: str


_op_decoder = msgspec.json.Decoder(_Op)
_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    "record": msgspec.json.Decoder(Records),
    "tombstone": msgspec.json.Decoder(Tombstone),
    "caught_up": msgspec.json.Decoder(CaughtUp),
    "topic_deleted": msgspec.json.Decoder(TopicDeleted),
    "subscribed": msgspec.json.Decoder(Subscribed),
    "error": msgspec.json.Decoder(Refused),
}


def read_frame(text: str | bytes) -> Event | Subscribed | Refused | None:
    """A message of the server; None for one that is of no interest here. Raises msgspec.DecodeError."""
    op = _op_decoder.decode(text).op
    decoder = _decoders.get(op)
    return None if decoder is None else decoder.decode(text)
