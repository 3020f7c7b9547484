"""How far a subscription has come in each topic: what to ask for on the first connection and on every later one.

Pure. The rule that makes resuming exact: a position moves when an event is handed to the reader, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topics.client.events import CaughtUp, Event, Position, Records, Tombstone, TopicDeleted


class Positions:
    def __init__(self, starts: Mapping[str, int | None]) -> None:
        """The seq behind which to begin; None for "only what is new"."""
        self._seqs: dict[str, int | None] = dict(starts)
        self.first: dict[str, Position] = {}  # what the server said when the subscription began

    def __bool__(self) -> bool:
        """Whether any topic is left."""
        return bool(self._seqs)

    def command(self, request_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The subscribe command that continues here."""
        return {
            "op": "subscribe",
            "request_id": request_id,
            "topics": {
                topic: {"tail": True} if seq is None else {"from_seq": seq} for topic, seq in self._seqs.items()
            },
            # A topic that is unknown at the start is a slip; one that is gone later was deleted meanwhile, and the
            # others go on.
            "lenient": bool(self.first),
            **options,
        }

    def subscribed(self, topics: Mapping[str, Position]) -> list[TopicDeleted]:
        """The server's answer to `command`; returns what has gone since."""
        if not self.first:
            self.first = dict(topics)
        gone = [
            TopicDeleted(topic=topic, head_seq=seq or 0) for topic, seq in self._seqs.items() if topic not in topics
        ]
        for topic, seq in self._seqs.items():
            if seq is None and topic in topics:
                self._seqs[topic] = topics[topic].from_seq
        return gone

    def moved(self, event: Event) -> None:
        """The reader has this event."""
        if isinstance(event, TopicDeleted):
            self._seqs.pop(event.topic, None)
        elif event.topic not in self._seqs:
            return
        elif isinstance(event, Records):
            self._seqs[event.topic] = event.to_seq
        elif isinstance(event, CaughtUp):
            self._seqs[event.topic] = event.head_seq  # beyond the last record if its successors were filtered out
        elif isinstance(event, Tombstone):
            self._seqs[event.topic] = event.resume_seq
