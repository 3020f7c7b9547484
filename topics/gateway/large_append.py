"""A large append on its way from its body to its shard, in slices: read, checked and packed, sent.

Each of the last two copies the records once, which takes some ten milliseconds for 64 MiB: others get their turn in
between. If the connection closes, the rest is left undone: nothing was sent. The same if the key of the request ends
meanwhile, which is looked at before every slice and before the last step; then it is answered 401.
"""

from __future__ import annotations

from typing import Protocol

from topics.errors import ApiError
from topics.gateway.bodies import AppendIn
from topics.gateway.calls import Calls
from topics.gateway.exchange import Outcome, Request, Response, error_response
from topics.gateway.handlers import Handlers
from topics.gateway.large import LargeBody


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
        self._outcome: Outcome | None = None

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
        if self._outcome is not None:
            self._calls.submit(self._outcome, asker, asker.id)
            return True
        assert body is not None
        try:
            if body.step():
                self._body = None
                asker.let_go()
                self._outcome = self._handlers.append_given(self._request, body.given, size=body.size)
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
