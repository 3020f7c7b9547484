"""The access log: one line per answered request, written once a round. Exists only where it was asked for."""

from __future__ import annotations

from collections.abc import Mapping

from topics.actors.log import Log

_LONGEST_PATH = 512  # a longer line than a pipe takes in one piece could be torn


class AccessLog:
    def __init__(self, log: Log, *, prefix: str, names: Mapping[int, str] | None = None) -> None:
        self._log = log
        self._prefix = prefix  # of request ids
        self._names = {} if names is None else names  # of keys, by number
        self._lines: list[str] = []

    def note(
        self,
        *,
        id: int,
        request_id: bytes | None,
        method: str,
        path: str,
        status: int,
        size: int,
        took_us: int,
        peer: str,
        key: int | str,
    ) -> None:
        fields: dict[str, object] = {"id": f"{self._prefix}{id:x}"}
        if request_id is not None:
            fields["request_id"] = request_id.decode()
        fields |= {
            "method": method,
            "path": path[:_LONGEST_PATH],
            "status": status,
            "bytes": size,
            "ms": took_us / 1_000,
            "peer": peer,
        }
        if key:
            fields["key"] = key if isinstance(key, str) else self._names.get(key, key)
        self._lines.append(self._log.line("info", "request", fields))

    def flush(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            self._log.put(*lines)
