"""The client: appends, reads and subscriptions to one server.

Appends are made in order, one at a time, over one connection. Each carries an idempotency key, so that one whose answer
was lost is sent again without being written twice. Order is why there is never more than one under way: of two, the
first could be refused for the moment and the second not.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import trio

from topics.client.address import DEFAULT_URL, Address, parse_url
from topics.client.backoff import Backoff
from topics.client.events import Record
from topics.client.failures import (
    ClientError,
    NotTopics,
    OutcomeUnknown,
    Unreachable,
    at_least_s,
    is_passing,
    may_have_happened,
)
from topics.client.http import HttpConnection
from topics.client.subscription import Subscription, open_subscription
from topics.errors import ApiError

_T = TypeVar("_T")

# How long one append is tried. Less than the two minutes for which a server remembers a key by default: a try that
# came later could write the records a second time.
PATIENCE_S = 60.0


class NewRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A record to append, where more than its data is to be said. `data` may be msgspec.Raw: it is sent as it is."""

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: Mapping[str, Any] | None = None


class _Append(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    records: list[NewRecord]
    idempotency_key: str
    node: str | None = None
    create: bool | None = None
    config: Mapping[str, Any] | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What an append was answered."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    count: int
    created: bool
    deduped: bool


class TopicState(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    config: dict[str, Any]


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    records: list[Record]
    head_seq: int


class Client:
    """Made by `connect`."""

    def __init__(self, address: Address, *, notice: Callable[[str], None]) -> None:
        self.address = address
        self._notice = notice
        self._http = HttpConnection(address)

    # --- writing ---

    async def publish(
        self,
        topic: str,
        records: Iterable[Any],
        *,
        tag: str | None = None,
        node: str | None = None,
        key: str | None = None,
        create: bool | None = None,
        config: Mapping[str, Any] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Receipt:
        """Append records, all or none. Each is a value for `data`, or a `NewRecord`.

        `tag` is for those that have none of their own; `config` is used only if this creates the topic. What passes by
        itself (429, 503, a lost connection) is tried again for `patience_s`. If it does not pass: OutcomeUnknown when
        the records may have been written, otherwise the last failure.
        """
        body = _Append(
            records=[_tagged(record, tag) for record in records],
            idempotency_key=key or uuid.uuid4().hex,
            node=node,
            create=create,
            config=config,
        )
        path = f"/v0/topics/{quote(topic, safe='')}?return_seqs=false"
        return await self._until_done(path, msgspec.json.encode(body), key=body.idempotency_key, patience_s=patience_s)

    async def _until_done(self, path: str, body: bytes, *, key: str, patience_s: float) -> Receipt:
        backoff = Backoff()
        give_up_at = trio.current_time() + patience_s
        uncertain = False
        told = False
        while True:
            known = self._http.ever_connected
            try:
                answer = await self._http.ask("POST", path, body)
            except (ApiError, ClientError) as failure:
                if isinstance(failure, Unreachable) and not known:
                    raise  # the address may simply be wrong
                uncertain = uncertain or may_have_happened(failure)
                delay_s = backoff.next_s(at_least_s=at_least_s(failure))
                hopeless = not is_passing(failure)
                if hopeless or trio.current_time() + delay_s > give_up_at:
                    if uncertain:
                        raise OutcomeUnknown(f"{failure}; whether it was written is not known", key=key) from failure
                    raise
                if not told:
                    told = True
                    self._notice(f"trying again: {failure}")
            else:
                return self._decoded(answer, Receipt)
            await trio.sleep(delay_s)

    # --- reading ---

    async def state(self, topic: str) -> TopicState:
        """Not counted as a read of the topic."""
        return self._decoded(await self._http.ask("GET", f"/v0/topics/{quote(topic, safe='')}?touch=false"), TopicState)

    async def seq_before(self, topic: str, ts_ms: int) -> int:
        """The seq behind which the records from this time on lie: where to start reading.

        Times never fall along a topic, so this takes a handful of reads of one record each.
        """
        state = await self.state(topic)
        low, high = state.earliest_seq - 1, state.head_seq
        while low < high:
            # Everything up to `low` is older; the first record behind `high` is not, or there is none.
            middle = (low + high) // 2
            record = await self._first_behind(topic, middle)
            if record is not None and record.ts_ms < ts_ms:
                low = record.seq
            else:
                high = middle
        return low

    async def _first_behind(self, topic: str, seq: int) -> Record | None:
        body = msgspec.json.encode({"from_seq": seq, "limit": 1, "include_meta": False})
        page = self._decoded(await self._http.ask("POST", f"/v0/topics/{quote(topic, safe='')}/diff", body), _Page)
        return page.records[0] if page.records else None

    def subscribe(
        self,
        topics: Mapping[str, int | None],
        *,
        node: str | Sequence[str] | None = None,
        tags: bool = False,
        meta: bool = True,
        data: bool = True,
    ) -> AbstractAsyncContextManager[Subscription]:
        """Follow topics: `async with client.subscribe({"jobs": 0}) as events: async for event in events: ...`

        The value of a topic is the seq behind which to begin: 0 for everything that is kept, None for new records only.
        Records written by `node` are left out. Connections that are lost are made again, and reading goes on exactly
        where it was.
        """
        options: dict[str, Any] = {"include_tags": tags, "include_meta": meta, "include_data": data}
        if node:
            options["node"] = node if isinstance(node, str) else list(node)
        return open_subscription(self.address, topics, options=options, notice=self._notice)

    def _decoded(self, answer: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotTopics(f"{self.address} answers, but not as a topics server ({error})") from None

    async def aclose(self) -> None:
        await self._http.aclose()


def _tagged(record: Any, tag: str | None) -> NewRecord:
    if not isinstance(record, NewRecord):
        return NewRecord(record, tag)
    return msgspec.structs.replace(record, tag=tag) if record.tag is None and tag is not None else record


def _silent(text: str) -> None:
    pass


@asynccontextmanager
async def connect(url: str = DEFAULT_URL, *, notice: Callable[[str], None] = _silent) -> AsyncIterator[Client]:
    """A client of the server at this address. `notice` is told in words when something is lost and found again.

    The connection is made with the first request. If that fails it is an error; what is lost later is tried again.
    """
    client = Client(parse_url(url), notice=notice)
    try:
        yield client
    finally:
        await client.aclose()
