"""A client for either lane that checks on every answer what all answers have in common.

2xx: a JSON object with `performance.server_total_ms` and no `error`. Anything else: exactly the error envelope, with
the status that belongs to its code. So a test of one behaviour says nothing about shapes.
"""

from __future__ import annotations

import gzip
import http.client
import itertools
import json
import select
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlencode

from topics.errors import STATUS

from .h2wire import H2Wire

TIMEOUT_S = 60.0
Headers = dict[str, Any]  # values are str or bytes
Lane = Literal["http1", "http2"]
LANES: tuple[Lane, ...] = ("http1", "http2")
JSON = {"Content-Type": "application/json"}

_numbers = itertools.count(1)


def unique(prefix: str = "t") -> str:
    """A topic name nobody else uses."""
    return f"{prefix}-{next(_numbers)}"


class Answer:
    def __init__(self, *, status: int, headers: dict[str, str], raw: bytes) -> None:
        self.status = status
        self.headers = headers  # names in lower case
        self.raw = raw
        assert headers["content-type"].partition(";")[0] == "application/json", headers
        self.json: dict[str, Any] = json.loads(raw)
        if 200 <= status < 300:
            self._check_success()
        else:
            self._check_envelope()

    def _check_success(self) -> None:
        assert "error" not in self.json
        performance = self.json["performance"]
        assert all(isinstance(value, int | float) and value >= 0 for value in performance.values()), performance
        assert "server_total_ms" in performance

    def _check_envelope(self) -> None:
        assert set(self.json) == {"error"}, self.json
        error = self.json["error"]
        assert set(error) - {"detail"} == {"code", "message"}, error
        assert STATUS[error["code"]] == self.status, error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error.get("detail", {}), dict)
        if self.status in (429, 503):
            assert int(self.headers["retry-after"]) >= 1

    def __getitem__(self, name: str) -> Any:
        return self.json[name]

    def __repr__(self) -> str:
        return f"<{self.status} {self.raw[:400]!r}>"

    @property
    def error(self) -> str | None:
        """The error code, None for a success."""
        return self.json["error"]["code"] if "error" in self.json else None

    @property
    def detail(self) -> dict[str, Any]:
        detail: dict[str, Any] = self.json["error"]["detail"]
        return detail

    @property
    def refusal(self) -> tuple[int, str | None]:
        return self.status, self.error

    @property
    def seqs(self) -> list[int]:
        """Of the records of a diff."""
        return [record["$seq"] for record in self.json["records"]]

    @property
    def data(self) -> list[Any]:
        """Of the records of a diff."""
        return [record["data"] for record in self.json["records"]]

    def without_performance(self) -> dict[str, Any]:
        return {name: value for name, value in self.json.items() if name != "performance"}


class Lost(Exception):
    """The connection ended before the answer."""


class _Http1:
    """The standard library's client, which knows nothing of this project."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def ask(self, method: str, path: str, content: bytes | None, headers: Headers) -> tuple[int, dict[str, str], bytes]:
        sock = self._connection.sock
        if sock is not None and select.select([sock], [], [], 0)[0]:
            self._connection.close()  # the server has closed it since
        self._connection.request(method, path, body=content, headers=headers)
        response = self._connection.getresponse()
        body = response.read()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, body

    def close(self) -> None:
        self._connection.close()


class _Http2:
    """One HTTP/2 connection by prior knowledge, one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._wire: H2Wire | None = None

    def ask(self, method: str, path: str, content: bytes | None, headers: Headers) -> tuple[int, dict[str, str], bytes]:
        wire = self._connected()
        given = [(name.lower(), value) for name, value in headers.items() if name != "Host"]
        if content is not None:
            given.append(("content-length", str(len(content))))
        number = wire.open(method, path, *given, end=content is None, authority=headers.get("Host", "localhost"))
        if content is not None:
            wire.send(number, content, end=True)
        stream = wire.finish(number)
        return int(stream.headers[":status"]), stream.headers, stream.body

    def _connected(self) -> H2Wire:
        if self._wire is not None and not self._wire.is_alive():
            self.close()
        if self._wire is None:
            self._wire = H2Wire(self._port)
        return self._wire

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class Client:
    """One lane of a server, over one connection that is made anew when it has ended. Each thread needs its own."""

    def __init__(self, port: int, lane: Lane) -> None:
        self.lane = lane
        self._port = port
        self._transport = _Http1(port) if lane == "http1" else _Http2(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def twin(self) -> Client:
        """Another connection by the same lane."""
        return Client(self._port, self.lane)

    # --- requests ---

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content: bytes | None = None,
        headers: Headers | None = None,
        **query: Any,
    ) -> Answer:
        """`body` is sent as JSON, `content` as it is; both with our content type unless `headers` say otherwise."""
        if body is not None:
            content = json.dumps(body).encode()
        given: Headers = {**(JSON if content is not None else {}), **(headers or {})}
        if query:
            path = f"{path}?{urlencode({name: _query_text(value) for name, value in query.items()})}"
        try:
            status, received, raw = self._transport.ask(method, path, content, given)
        except (OSError, EOFError, http.client.HTTPException) as error:
            self._transport.close()
            raise Lost(f"{method} {path[:80]}: {error!r}") from error
        if received.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        return Answer(status=status, headers=received, raw=raw)

    def get(self, path: str, **query: Any) -> Answer:
        return self.send("GET", path, **query)

    # --- the endpoints ---

    def put(self, topic: str, **config: object) -> Answer:
        return self.send("PUT", f"/v0/topics/{topic}", config)

    def state(self, topic: str, **query: Any) -> Answer:
        return self.send("GET", f"/v0/topics/{topic}", **query)

    def drop(self, topic: str, **query: Any) -> Answer:
        return self.send("DELETE", f"/v0/topics/{topic}", **query)

    def append(self, topic: str, *data: object, **fields: object) -> Answer:
        """Records that are data alone."""
        return self.append_records(topic, [{"data": value} for value in data], **fields)

    def append_records(self, topic: str, records: list[dict[str, Any]], **fields: object) -> Answer:
        return self.send("POST", f"/v0/topics/{topic}", {"records": records, **fields})

    def diff(self, topic: str, from_seq: int = 0, **fields: object) -> Answer:
        return self.send("POST", f"/v0/topics/{topic}/diff", {"from_seq": from_seq, **fields})

    def delete(self, topic: str, **fields: object) -> Answer:
        return self.send("POST", f"/v0/topics/{topic}/delete", fields)

    def list(self, **query: Any) -> Answer:  # last: in what follows, `list` means this one
        return self.send("GET", "/v0/topics", **query)


def _query_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
