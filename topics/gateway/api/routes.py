"""From method and path to a handler: one table, used by both lanes.

A path that exists with another method is 405 and says which; anything else is 404. Percent-escapes are decoded
once, after the path is cut at its slashes, so an escaped slash is part of a name (and then refused there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from topics import limits
from topics.errors import ApiError, invalid
from topics.gateway.api.queues import QueueHandlers
from topics.gateway.api.routers import RouterHandlers
from topics.gateway.api.schemas import check_name, check_router_name
from topics.gateway.api.topics import Handlers
from topics.gateway.api.types import Outcome, Request
from topics.gateway.api.watch import Watches
from topics.gateway.metrics.page import MetricsHandlers
from topics.gateway.metrics.scrapes import Scrapes
from topics.keys import Scope
from topics.shm.usage import ROUTES
from topics.storage.config import owner_of_name

Handler = Callable[[Request], Outcome]


class Route(NamedTuple):
    handler: Handler
    name: str
    shard: int
    query: dict[str, str]
    takes_body: bool
    scope: int = 0  # what a key must allow
    named: bool = True  # the name is one that a key's prefixes are about
    probe: bool = False  # answers without a key, unless probes need one too
    token: bool = False  # the key may stand in the query: browsers can't send headers with an EventSource
    streams: bool = False  # its answer may go on for as long as the connection lives
    socket: bool = False  # and is a WebSocket
    looks: bool = False  # its handler looks at headers
    always: bool = False  # answered while the server stops, too
    number: int = 0  # of its row, for counters
    most: int = limits.MAX_BODY_BYTES  # bytes of its body, as sent and as inflated
    large: bool = False  # its body may be so large that it is decoded in slices
    again: bool = False  # its answer may be large, and asking for it again does no harm


class Row(NamedTuple):
    """A method of a path."""

    handler: Handler
    scope: Scope = Scope(0)
    named: bool = True
    probe: bool = False
    token: bool = False
    streams: bool = False
    socket: bool = False
    looks: bool = False
    always: bool = False
    number: int = 0
    large: bool = False
    again: bool = False


_WITH_BODY = ("POST", "PUT")  # what comes with others passes by
_NAME = "\0"  # stands for a topic's name in the table; no request target can contain it
_READ, _WRITE, _DELETE, _ADMIN = Scope.READ, Scope.WRITE, Scope.DELETE, Scope.ADMIN


class Routes:
    def __init__(
        self,
        handlers: Handlers,
        watches: Watches,
        routers: RouterHandlers,
        queues: QueueHandlers,
        metrics: MetricsHandlers | Scrapes,
    ) -> None:
        self._shards = handlers.shards
        self.append: Handler = handlers.append
        self._most = handlers.settings.max_body_bytes
        self._most_control = handlers.settings.control_body_bytes
        health = {"GET": Row(handlers.health, probe=True, always=True)}
        ready = {"GET": Row(handlers.ready, probe=True, always=True)}
        self._table: dict[tuple[str, ...], dict[str, Row]] = {
            ("v0", "topics"): {"GET": Row(handlers.list_topics, _READ, again=True)},
            ("v0", "topics", _NAME): {
                "PUT": Row(handlers.put_topic, _ADMIN),
                "GET": Row(handlers.get_topic, _READ),
                "DELETE": Row(routers.drop_topic, _DELETE),
                "POST": Row(handlers.append, _WRITE, large=True),
            },
            ("v0", "topics", _NAME, "diff"): {"POST": Row(handlers.diff, _READ, again=True)},
            ("v0", "topics", _NAME, "delete"): {"POST": Row(handlers.delete_records, _DELETE)},
            ("v0", "topics", _NAME, "claim"): {"POST": Row(queues.claim, _READ | _WRITE)},
            ("v0", "topics", _NAME, "ack"): {"POST": Row(queues.ack, _WRITE)},
            ("v0", "topics", _NAME, "nack"): {"POST": Row(queues.nack, _WRITE)},
            ("v0", "topics", _NAME, "extend"): {"POST": Row(queues.extend, _WRITE)},
            ("v0", "topics", _NAME, "work"): {"GET": Row(queues.work, _READ | _WRITE, token=True, streams=True)},
            ("v0", "routers"): {"GET": Row(routers.list, _READ, again=True)},
            ("v0", "routers", _NAME): {
                "PUT": Row(routers.put, _ADMIN),
                "GET": Row(routers.get, _READ),
                "DELETE": Row(routers.drop, _DELETE),
            },
            ("v0", "watch"): {"POST": Row(watches.create, _READ)},
            ("v0", "watch", _NAME): {"GET": Row(watches.open, _READ, named=False, token=True, streams=True)},
            ("v0", "ws"): {"GET": Row(watches.socket, streams=True, socket=True)},
            ("v0", "metrics"): {"GET": Row(metrics.get, _READ, looks=True, always=True)},
            ("v0", "health"): health,
            ("v0", "ready"): ready,
            ("healthz",): health,
            ("health",): health,
            ("readyz",): ready,
            ("ready",): ready,
        }
        self.labels = [("-", "none")]  # method and path of every row, by number; the first is for what is in no row
        for path, methods in self._table.items():
            self._table[path] = {
                method: row._replace(number=len(self.labels) + at) for at, (method, row) in enumerate(methods.items())
            }
            self.labels += [(method, _template(path)) for method in methods]
        assert len(self.labels) <= ROUTES

    def find(self, method: str, target: str) -> Route:
        path, _, query_text = target.partition("?")
        parts = tuple(path.split("/")[1:])
        methods = self._table.get(parts)
        name = ""
        if methods is None and len(parts) >= 3:
            methods = self._table.get((*parts[:2], _NAME, *parts[3:]))
            name = parts[2]
        if methods is None:
            raise ApiError("not_found", f"there is nothing at {path[:256]}", {"path": path[:256]})
        row = methods.get("GET" if method == "HEAD" else method)
        streams = any([known.streams for known in methods.values()])
        if row is None or (streams and method == "HEAD"):
            allow = sorted({*methods, "HEAD"} if "GET" in methods and not streams else methods)
            raise ApiError(
                "method_not_allowed", f"{method} is not for {path[:256]}; use {' or '.join(allow)}", {"allow": allow}
            )
        if name or (len(parts) >= 3 and parts[2] == ""):
            try:
                # A watch that nobody knows is not found, whatever it is called.
                name = unquote(name, errors="replace" if parts[1] == "watch" else "strict")
                if parts[1] == "topics":
                    check_name(name)
                elif parts[1] == "routers":
                    check_router_name(name)
            except UnicodeDecodeError:
                raise invalid("the name in the path is not valid UTF-8") from None
        query: dict[str, str] = {}
        if query_text:
            try:
                for key, value in parse_qsl(query_text, keep_blank_values=True, max_num_fields=64, errors="strict"):
                    query.setdefault(key, value)
            except ValueError:
                raise invalid("the query string can't be read") from None
        shard = owner_of_name(name, self._shards)
        return Route(
            handler=row.handler,
            name=name,
            shard=shard,
            query=query,
            takes_body=method in _WITH_BODY,
            scope=row.scope,
            named=row.named,
            probe=row.probe,
            token=row.token,
            streams=streams,
            socket=row.socket,
            looks=row.looks,
            always=row.always,
            number=row.number,
            most=self._most if row.large or method not in _WITH_BODY else self._most_control,
            large=row.large,
            again=row.again,
        )


def _template(path: tuple[str, ...]) -> str:
    names = {"topics": ":topic", "routers": ":router", "watch": ":wid"}
    return "/" + "/".join(names[path[1]] if part == _NAME else part for part in path)
