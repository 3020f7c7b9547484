"""The endpoints of routers; the router process answers them. Deleting a topic takes its routers along, in a second
step: should the router process not get to know, it finds the topic gone by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.gateway.api import schemas
from topics.gateway.api.topics import RenderedCall, after, cursor, flag, page_size, with_performance
from topics.gateway.api.types import Call, Gather, Outcome, Request, Response
from topics.gateway.auth import check_names, seen_name
from topics.keys import Key
from topics.shm.counters import Board, State, Word

_SHOWN = ("source", "dest", "preserve_node", "preserve_tag", "filter", "allow_cycle", "guarantee")


class RouterHandlers:
    def __init__(self, *, peer: int, board: Board, linked: Callable[[int], bool] = lambda peer: True) -> None:
        self._peer = peer  # the router process's number among those we ask
        self._board = board
        self._linked = linked

    def put(self, request: Request) -> Outcome:
        head = schemas.decode_router(request.body, request.name)
        check_names(request.key, [head.source, head.dest])
        if request.key is not None:
            head = msgspec.structs.replace(head, prefixes=request.key.prefixes)

        def render(row: messages.RouterRow, _: bytes | memoryview) -> Response:
            content = {"router": row.router, "created": row.created, **_described(row, request.key)}
            return Response(201 if row.created else 200, with_performance(content, request.started_ns))

        return RenderedCall(rendered=render, shard=self._peer, op=Op.PUT_ROUTER, head=head)

    def get(self, request: Request) -> Outcome:
        def render(row: messages.RouterRow, _: bytes | memoryview) -> Response:
            content = {"router": row.router, **_described(row, request.key), "forwarded_total": row.forwarded_total}
            return Response(200, with_performance(content, request.started_ns))

        head = messages.GetRouter(request.name)
        return RenderedCall(rendered=render, shard=self._peer, op=Op.GET_ROUTER, head=head)

    def drop(self, request: Request) -> Outcome:
        def render(answer: messages.RoutersDropped, _: bytes | memoryview) -> Response:
            content = {"router": request.name, "deleted": bool(answer.routers)}
            return Response(200, with_performance(content, request.started_ns))

        head = messages.DropRouter(request.name)
        return RenderedCall(rendered=render, shard=self._peer, op=Op.DROP_ROUTER, head=head)

    def list(self, request: Request) -> Outcome:
        head = messages.ListRouters(
            prefix=request.query.get("prefix", ""),
            source=request.query.get("source"),
            dest=request.query.get("dest"),
            after=after(request.query.get("cursor")),
            limit=page_size(request),
            prefixes=request.key.prefixes if request.key else (),
        )

        def render(answer: messages.RoutersListed, _: bytes | memoryview) -> Response:
            rows = [
                {
                    "router": row.router,
                    "source": seen_name(request.key, row.source),
                    "dest": seen_name(request.key, row.dest),
                    "guarantee": row.guarantee,
                    "forwarded_total": row.forwarded_total,
                }
                for row in answer.rows
            ]
            content: dict[str, Any] = {"routers": rows}
            if answer.more and rows:
                content["next_cursor"] = cursor(answer.rows[-1].router)
            return Response(200, with_performance(content, request.started_ns))

        return RenderedCall(rendered=render, shard=self._peer, op=Op.LIST_ROUTERS, head=head)

    def drop_topic(self, request: Request) -> Outcome:
        def answer(deleted: bool, removed: list[str]) -> Response:
            shown = [router for router in removed if request.key is None or request.key.covers(router)]
            content = {"topic": request.name, "deleted": deleted, "routers_removed": shown}
            return Response(200, with_performance(content, request.started_ns))

        def cascade(answers: list[messages.TopicDropped]) -> Outcome:
            deleted = answers[0].deleted
            row = self._board.row("router")
            if row.state == State.READY and not row[Word.ROUTERS]:
                return answer(deleted, [])

            def render(dropped: messages.RoutersDropped, _: bytes | memoryview) -> Response:
                return answer(deleted, dropped.routers)

            if not self._linked(self._peer):
                raise ApiError(
                    "shard_unavailable",
                    f'topic "{request.name}" is deleted; its routers go as soon as the router process is back',
                    {"topic": request.name, "deleted": deleted},
                    retry_after_s=1,
                )
            head = messages.DropRoutersOf(request.name)
            return RenderedCall(rendered=render, shard=self._peer, op=Op.DROP_ROUTERS_OF, head=head)

        head = messages.DropTopic(request.name, flag(request, "if_empty", False))
        return Gather([Call(shard=request.shard, op=Op.DROP_TOPIC, head=head)], cascade)


def _described(row: messages.RouterRow, key: Key | None) -> dict[str, Any]:
    """A router under a prefix of the key may join topics that are not."""
    described = {name: getattr(row, name) for name in _SHOWN}
    return described | {"source": seen_name(key, row.source), "dest": seen_name(key, row.dest)}
