"""From method and path to a handler: one table, used by both lanes.

A path that exists with another method is 405 and says which; anything else is 404. Percent-escapes are decoded
once, after the path is cut at its slashes, so an escaped slash is part of a name (and then refused there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from topics.errors import ApiError, invalid
from topics.gateway.bodies import check_name, check_router_name
from topics.gateway.exchange import Outcome, Request
from topics.gateway.handlers import Handlers
from topics.gateway.queues import QueueHandlers
from topics.gateway.routers import RouterHandlers
from topics.gateway.watches import Watches
from topics.storage.config import owner_of_name

Handler = Callable[[Request], Outcome]


class Route(NamedTuple):
    handler: Handler
    name: str
    shard: int
    query: dict[str, str]
    takes_body: bool
    streams: bool = False  # its answer may go on for as long as the connection lives


_NAME = "\0"  # stands for a topic's name in the table; no request target can contain it


class Routes:
    def __init__(self, handlers: Handlers, watches: Watches, routers: RouterHandlers, queues: QueueHandlers) -> None:
        self._shards = handlers.shards
        self._streaming = (watches.open, watches.socket, queues.work)
        self.append: Handler = handlers.append
        self._table: dict[tuple[str, ...], dict[str, Handler]] = {
            ("v0", "topics"): {"GET": handlers.list_topics},
            ("v0", "topics", _NAME): {
                "PUT": handlers.put_topic,
                "GET": handlers.get_topic,
                "DELETE": routers.drop_topic,
                "POST": handlers.append,
            },
            ("v0", "topics", _NAME, "diff"): {"POST": handlers.diff},
            ("v0", "topics", _NAME, "delete"): {"POST": handlers.delete_records},
            ("v0", "topics", _NAME, "claim"): {"POST": queues.claim},
            ("v0", "topics", _NAME, "ack"): {"POST": queues.ack},
            ("v0", "topics", _NAME, "nack"): {"POST": queues.nack},
            ("v0", "topics", _NAME, "extend"): {"POST": queues.extend},
            ("v0", "topics", _NAME, "work"): {"GET": queues.work},
            ("v0", "routers"): {"GET": routers.list},
            ("v0", "routers", _NAME): {
                "PUT": routers.put,
                "GET": routers.get,
                "DELETE": routers.drop,
            },
            ("v0", "watch"): {"POST": watches.create},
            ("v0", "watch", _NAME): {"GET": watches.open},
            ("v0", "ws"): {"GET": watches.socket},
            ("v0", "health"): {"GET": handlers.health},
            ("v0", "ready"): {"GET": handlers.ready},
            ("healthz",): {"GET": handlers.health},
            ("health",): {"GET": handlers.health},
            ("readyz",): {"GET": handlers.ready},
            ("ready",): {"GET": handlers.ready},
        }

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
        handler = methods.get("GET" if method == "HEAD" else method)
        streams = any([known in self._streaming for known in methods.values()])
        if handler is None or (streams and method == "HEAD"):
            allow = sorted({*methods, "HEAD"} if "GET" in methods and not streams else methods)
            raise ApiError(
                "method_not_allowed", f"{method} is not for {path[:256]}; use {' or '.join(allow)}", {"allow": allow}
            )
        if name or (len(parts) >= 3 and parts[2] == ""):
            try:
                name = unquote(name, errors="strict")
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
        return Route(handler, name, shard, query, method in ("POST", "PUT"), streams)
