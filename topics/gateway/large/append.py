"""A large append on its way from its body to its shard, in slices: read, checked and packed, sent.

Others get their turn in between, and the last step only hands over what is packed: the ring takes it fragment by
fragment (shm/long.py). If the connection closes, the rest is left undone: nothing was sent. The same if the key of the
request ends meanwhile, which is looked at before every slice and before the last step; then it is answered 401.
"""

from __future__ import annotations

from typing import Protocol

from topics.errors import ApiError
from topics.gateway.api.schemas import AppendIn
from topics.gateway.api.topics import Handlers
from topics.gateway.api.types import Request, Response, error_response
from topics.gateway.calls import Calls
from topics.gateway.large.decoder import LargeBody
from topics.gateway.large.packing import Packing


class Asker(Protocol):
    """Waits for the answer: a request of either lane."""

    id: int

    @property
    def gone(self) -> bool: ...
    def let_go(self) -> None: ...  # of the body, which was accounted for until now
    def finish(self, value: Response) -> None: ...
    def abort(self) -> None: ...


class LargeAppend:
    def __init__(
        self, handlers: Handlers, calls: Calls, asker: Asker, request: Request, body: LargeBody[AppendIn]
    ) -> None:
        self._handlers = handlers
        self._calls = calls
        self.asker = asker
        self._request = request
        self._body: LargeBody[AppendIn] | None = body
        self._packing: Packing | None = None

    def step(self) -> bool:
        asker, body = self.asker, self._body
        if asker.gone:
            self.drop()
            return True
        if (refused := self._handlers.refusal(self._request.key)) is not None:
            self.drop()
            asker.let_go()
            asker.finish(error_response(refused))
            return True
        try:
            if self._packing is not None:
                if self._packing.step():
                    asker.let_go()
                    self._calls.submit(self._handlers.append_packed(self._request, self._packing), asker, asker.id)
                    return True
            else:
                assert body is not None
                if body.step():
                    self._packing = self._handlers.packing(self._request, body.given)
                    self._body = None
        except ApiError as error:
            asker.let_go()
            asker.finish(error_response(error))
            return True
        return False

    def drop(self) -> None:
        if self._body is not None:
            self._body.close()

    def abort(self) -> None:
        self.asker.abort()
