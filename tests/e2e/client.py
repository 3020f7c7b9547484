"""A client for either lane that checks on every answer what all answers have in common.

2xx: a JSON object with `performance.server_total_ms` and no `error`. Anything else: exactly the error envelope, with
the status that belongs to its code. So a test of one behaviour says nothing about shapes.
"""

from __future__ import annotations

import itertools
import json
from types import TracebackType
from typing import Any, Literal

import httpx

from topics.errors import STATUS

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


class Client:
    """One lane of a server. Safe to use from several threads: each request takes a connection of the pool."""

    def __init__(self, url: str, lane: Lane, **options: Any) -> None:
        self.lane = lane
        self._url = url
        self._http = httpx.Client(
            base_url=url,
            http1=lane == "http1",
            http2=lane == "http2",
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
            verify=False,  # no TLS here, and loading certificates takes longer than a request
            timeout=60.0,
            **options,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def twin(self) -> Client:
        """Another connection by the same lane. For threads: over one HTTP/2 connection, a thread that waits keeps the
        others from reading their answers (the client library's lock, not the server's doing)."""
        return Client(self._url, self.lane)

    # --- requests ---

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        **query: object,
    ) -> Answer:
        """`body` is sent as JSON, `content` as it is; both with our content type unless `headers` say otherwise."""
        if body is not None:
            content = json.dumps(body).encode()
        given = {**(JSON if content is not None else {}), **(headers or {})}
        params = {name: _query_text(value) for name, value in query.items()}
        response = self._http.request(method, path, content=content, headers=given, params=params or None)
        assert response.http_version == {"http1": "HTTP/1.1", "http2": "HTTP/2"}[self.lane]
        return Answer(
            status=response.status_code,
            headers={name.lower(): value for name, value in response.headers.items()},
            raw=response.content,
        )

    def get(self, path: str, **query: object) -> Answer:
        return self.send("GET", path, **query)

    # --- the endpoints ---

    def put(self, topic: str, **config: object) -> Answer:
        return self.send("PUT", f"/v0/topics/{topic}", config)

    def state(self, topic: str, **query: object) -> Answer:
        return self.send("GET", f"/v0/topics/{topic}", **query)

    def drop(self, topic: str, **query: object) -> Answer:
        return self.send("DELETE", f"/v0/topics/{topic}", **query)

    def list(self, **query: object) -> Answer:
        return self.send("GET", "/v0/topics", **query)

    def append(self, topic: str, *data: object, **fields: object) -> Answer:
        """Records that are data alone."""
        return self.append_records(topic, [{"data": value} for value in data], **fields)

    def append_records(self, topic: str, records: list[dict[str, Any]], **fields: object) -> Answer:
        return self.send("POST", f"/v0/topics/{topic}", {"records": records, **fields})

    def diff(self, topic: str, from_seq: int = 0, **fields: object) -> Answer:
        return self.send("POST", f"/v0/topics/{topic}/diff", {"from_seq": from_seq, **fields})

    def delete(self, topic: str, **fields: object) -> Answer:
        return self.send("POST", f"/v0/topics/{topic}/delete", fields)


def _query_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
