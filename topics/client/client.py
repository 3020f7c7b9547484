"""The client: appends, reads, subscriptions and the jobs of queues, at one server.

Appends are made in order, one at a time, over one connection. Each carries an idempotency key, so that one whose answer
was lost is sent again without being written twice. Order is why there is never more than one under way: of two, the
first could be refused for the moment and the second not.

What is said about jobs goes over the same connection and is repeated as well. A claim whose answer was lost may have
leased jobs that nobody knows of: they come back when their lease ends, as those of a worker that died.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import trio
from msgspec import Raw

from topics import limits
from topics.client.address import DEFAULT_URL, Address, parse_url
from topics.client.backoff import Backoff
from topics.client.events import Record, read_record
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
from topics.client.queue import Acked, Claimed, Extended, Jobs, Nacked, QueueCounts, claim_body, jobs_body
from topics.client.subscription import Subscription, open_subscription
from topics.client.work import Work, open_work
from topics.errors import ApiError

KEY_VARIABLE = "TOPICS_API_KEY"
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
    queue: QueueCounts | None = None  # None for a log


class TopicRow(msgspec.Struct, frozen=True, kw_only=True):
    """A topic in a listing."""

    topic: str
    count: int | None  # None: it can't be read at the moment ...
    queue: QueueCounts | None = None
    error: dict[str, Any] | None = None  # ... and why


class _Deleted(msgspec.Struct, frozen=True, kw_only=True):
    deleted: int


class _Listing(msgspec.Struct, frozen=True, kw_only=True):
    topics: list[TopicRow]
    next_cursor: str | None = None


class Missed(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader at this seq will not get, and nobody asked for its removal."""

    gap_from: int
    gap_to: int
    reason: str


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What a read found behind a seq."""

    raw: list[Raw] = msgspec.field(name="records")  # each as the server wrote it
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    tombstone: Missed | None = None

    def __iter__(self) -> Iterator[Record]:
        return map(read_record, self.raw)


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
        path = f"{_path(topic)}?return_seqs=false"
        try:
            answer = await self._until_done(path, msgspec.json.encode(body), patience_s=patience_s)
        except _Uncertain as uncertain:
            failure = uncertain.failure
            words = f"{failure}; whether it was written is not known"
            raise OutcomeUnknown(words, key=body.idempotency_key) from failure
        return self._decoded(answer, Receipt)

    async def create(self, topic: str, config: Mapping[str, Any], *, patience_s: float = PATIENCE_S) -> None:
        """Make a topic with this config. One that exists gets the config, and keeps its records."""
        await self._certainly(_path(topic), msgspec.json.encode(config), patience_s=patience_s, method="PUT")

    async def delete(
        self, topic: str, *, before_seq: int | None = None, tag: str | None = None, patience_s: float = PATIENCE_S
    ) -> int:
        """Remove records: those with a lower seq, those with a tag, or those with both. Returns how many went.

        A try whose answer was lost is repeated, and then counts only what was left.
        """
        body: dict[str, Any] = {} if before_seq is None else {"before_seq": before_seq}
        if tag is not None:
            body["match"] = ["tag", "Eq", tag]
        answer = await self._certainly(f"{_path(topic)}/delete", msgspec.json.encode(body), patience_s=patience_s)
        return self._decoded(answer, _Deleted).deleted

    async def _certainly(self, path: str, body: bytes, *, patience_s: float, method: str = "POST") -> bytes:
        """For what may happen twice: the last failure says it all."""
        try:
            return await self._until_done(path, body, patience_s=patience_s, method=method)
        except _Uncertain as uncertain:
            raise uncertain.failure from None

    async def _until_done(self, path: str, body: bytes, *, patience_s: float, method: str = "POST") -> bytes:
        backoff = Backoff()
        give_up_at = trio.current_time() + patience_s
        uncertain = False
        told = False
        while True:
            known = self._http.ever_connected
            try:
                return await self._http.ask(method, path, body, repeat_within_s=patience_s)
            except (ApiError, ClientError) as failure:
                if isinstance(failure, Unreachable) and not known:
                    raise  # the address may simply be wrong
                uncertain = uncertain or may_have_happened(failure)
                delay_s = backoff.next_s(at_least_s=at_least_s(failure))
                hopeless = not is_passing(failure)
                if hopeless or trio.current_time() + delay_s > give_up_at:
                    if uncertain:
                        raise _Uncertain(failure) from failure
                    raise
                if not told:
                    told = True
                    self._notice(f"trying again: {failure}")
            await trio.sleep(delay_s)

    # --- reading ---

    async def state(self, topic: str, *, patience_s: float = 0.0) -> TopicState:
        """Not counted as a read of the topic. What passes by itself is tried again only if there is patience."""
        path = f"{_path(topic)}?touch=false"
        if not patience_s:
            return self._decoded(await self._http.ask("GET", path), TopicState)
        return self._decoded(await self._certainly(path, b"", patience_s=patience_s, method="GET"), TopicState)

    async def topics(self) -> AsyncIterator[TopicRow]:
        """All topics, in the order of their names."""
        query: dict[str, str | int] = {"page_size": limits.MAX_PAGE_SIZE}
        while True:
            page = self._decoded(await self._http.ask("GET", f"/v0/topics?{urlencode(query)}"), _Listing)
            for row in page.topics:
                yield row
            if page.next_cursor is None:
                return
            query["cursor"] = page.next_cursor

    async def read(
        self, topic: str, from_seq: int = 0, *, limit: int = limits.MAX_LIMIT, tags: bool = True, meta: bool = True
    ) -> Page:
        """Records behind a seq, as many as one answer holds. Nothing is leased or changed by it, in a queue neither."""
        fields = {"from_seq": from_seq, "limit": limit, "include_tags": tags, "include_meta": meta}
        answer = await self._certainly(f"{_path(topic)}/diff", msgspec.json.encode(fields), patience_s=PATIENCE_S)
        return self._decoded(answer, Page)

    async def seq_before(self, topic: str, ts_ms: int) -> int:
        """The seq behind which the records from this time on lie: where to start reading.

        Times never fall along a topic, so this takes a handful of reads of one record each.
        """
        state = await self.state(topic)
        low, high = state.earliest_seq - 1, state.head_seq
        while low < high:
            # Everything up to `low` is older; the first record behind `high` is not, or there is none.
            middle = (low + high) // 2
            page = await self.read(topic, middle, limit=1, tags=False, meta=False)
            record = next(iter(page), None)
            if record is not None and record.ts_ms < ts_ms:
                low = record.seq
            else:
                high = middle
        return low

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

    # --- the jobs of a queue ---

    async def claim(
        self, queue: str, node: str, *, max: int = 1, lease_ms: int | None = None, patience_s: float = PATIENCE_S
    ) -> Claimed:
        """Lease up to `max` jobs to a node, for the queue's `lease_ms` unless said otherwise. There may be none."""
        body = claim_body(node, max=max, lease_ms=lease_ms)
        return self._decoded(await self._certainly(f"{_path(queue)}/claim", body, patience_s=patience_s), Claimed)

    async def ack(self, queue: str, node: str, jobs: Jobs, *, patience_s: float = PATIENCE_S) -> Acked:
        """Jobs that are done: they are removed. Give the jobs themselves and their leases are compared, too; with seqs
        alone the node has to be the holder.
        """
        body = jobs_body(node, jobs)
        return self._decoded(await self._certainly(f"{_path(queue)}/ack", body, patience_s=patience_s), Acked)

    async def nack(
        self, queue: str, node: str, jobs: Jobs, *, delay_ms: int = 0, patience_s: float = PATIENCE_S
    ) -> Nacked:
        """Jobs for somebody else, at once or after a while."""
        body = jobs_body(node, jobs, delay_ms=delay_ms)
        return self._decoded(await self._certainly(f"{_path(queue)}/nack", body, patience_s=patience_s), Nacked)

    async def extend(
        self, queue: str, node: str, jobs: Jobs, *, lease_ms: int, patience_s: float = PATIENCE_S
    ) -> Extended:
        """Keep jobs for so much longer from now on."""
        body = jobs_body(node, jobs, lease_ms=lease_ms)
        return self._decoded(await self._certainly(f"{_path(queue)}/extend", body, patience_s=patience_s), Extended)

    def work(
        self, queue: str, node: str, *, max: int = 1, lease_ms: int | None = None
    ) -> AbstractAsyncContextManager[Work]:
        """Jobs as they come: `async with client.work("jobs", "w1", max=8) as work: async for job in work: ...`

        Up to `max` are leased to this worker at a time; each that is acked makes room for the next. Jobs that are not
        done when the block is left, or when the connection is lost, are released at once. A connection that is lost is
        made again.
        """
        return open_work(self.address, queue, node=node, max=max, lease_ms=lease_ms, notice=self._notice)

    def _decoded(self, answer: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotTopics(f"{self.address} answers, but not as a topics server ({error})") from None

    async def aclose(self) -> None:
        await self._http.aclose()


class _Uncertain(Exception):
    """Given up; one of the tries may have taken effect."""

    def __init__(self, failure: ApiError | ClientError) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _path(topic: str) -> str:
    return f"/v0/topics/{quote(topic, safe='')}"


def _tagged(record: Any, tag: str | None) -> NewRecord:
    if not isinstance(record, NewRecord):
        return NewRecord(record, tag)
    return msgspec.structs.replace(record, tag=tag) if record.tag is None and tag is not None else record


def _silent(text: str) -> None:
    pass


@asynccontextmanager
async def connect(
    url: str = DEFAULT_URL, *, key: str | None = None, notice: Callable[[str], None] = _silent
) -> AsyncIterator[Client]:
    """A client of the server at this address. `notice` is told in words when something is lost and found again.

    The connection is made with the first request. If that fails it is an error; what is lost later is tried again.
    A server with API keys wants one: `key`, or else TOPICS_API_KEY of the environment.
    """
    client = Client(parse_url(url, key=key or os.environ.get(KEY_VARIABLE) or None), notice=notice)
    try:
        yield client
    finally:
        await client.aclose()
