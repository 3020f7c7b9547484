"""Server-sent events, from bytes to messages. Pure.

Comments and `retry` are passed over: a comment says only that the connection lives, and when to come back is decided by
backoff.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    event: str
    data: bytes


class EventStream:
    """What is kept is one unfinished line, and the fields of one unfinished message."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[Message]:
        *whole, rest = chunk.split(b"\n")
        found = []
        if whole:
            whole[0] = b"".join([*self._rest, whole[0]])
            self._rest.clear()
            found = [message for line in whole if (message := self._line(line.removesuffix(b"\r"))) is not None]
        if rest:
            self._rest.append(rest)
        return found

    def _line(self, line: bytes) -> Message | None:
        if not line:
            event, data = self._event or "message", b"\n".join(self._data)
            empty = not self._data
            self._event, self._data = "", []
            return None if empty else Message(event, data)
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode(errors="replace")
        return None
