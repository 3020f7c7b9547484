"""The endpoints of topics, records, health and readiness: one row in the table of routes, one function.

A handler gets a checked Request and returns a Response, or the Call or Gather whose answer becomes one. The JSON of
hot answers is formatted by hand: topic names and numbers need no escaping.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from topics import __version__, limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, being_rebuilt, invalid
from topics.gateway.admission.pressure import Pressure
from topics.gateway.api import schemas
from topics.gateway.api.types import Call, Gather, Outcome, Request, Response, error_content, error_response
from topics.gateway.auth import check_config, may_configure, seen_config
from topics.gateway.large.packing import Packing
from topics.keys import Key
from topics.settings import Settings
from topics.shm.counters import Board, State, Word

_encode = msgspec.json.Encoder().encode
_MS = 1_000_000


def elapsed_ms(started_ns: int) -> float:
    return (time.perf_counter_ns() - started_ns) / _MS


def with_performance(content: dict[str, Any], started_ns: int, **more: float) -> bytes:
    content["performance"] = {"server_total_ms": round(elapsed_ms(started_ns), 3), **more}
    return _encode(content)


class Handlers:
    """The handlers and what they know: settings, the shard count, the counter board."""

    def __init__(
        self,
        settings: Settings,
        *,
        shards: int,
        board: Board,
        linked: Callable[[int], bool] = lambda shard: True,
        replacing: Collection[int] = (),
        pressure: Pressure | None = None,
        refusal: Callable[[Key | None], ApiError | None] = lambda key: None,
    ) -> None:
        self.settings = settings
        self.refusal = refusal  # why a key that was let through is not good any more: for requests that take long
        self._pressure = pressure or Pressure()
        self._linked = linked  # whether this gateway can reach a shard: it may be up before its link is
        self._replacing = replacing  # peers for which requests wait
        self.shards = shards
        self._queue = shards + 1  # the coordinator's number among those we ask
        self.board = board
        self.started_ns = time.monotonic_ns()
        self.draining = False

    # --- records ---

    def append(self, request: Request) -> Outcome:
        given = schemas.decode_json(schemas.append_decoder, request.body)
        return self.append_given(request, given, size=len(request.body))

    def append_given(self, request: Request, given: schemas.AppendIn, *, size: int) -> Outcome:
        """The same for a body that is decoded; `size` is how many bytes it was."""
        head, batch = schemas.resolve_append(given, request.name, self.settings, key=request.idempotency_key, size=size)
        return self._append_call(request, head, batch, None)

    def packing(self, request: Request, given: schemas.AppendIn) -> Packing:
        """A large append is packed in slices; append_packed goes on from there."""
        return Packing(given, request.name, self.settings, key=request.idempotency_key)

    def append_packed(self, request: Request, packing: Packing) -> Outcome:
        return self._append_call(request, packing.head, b"", packing.pieces)

    def _append_call(
        self, request: Request, head: messages.Append, batch: bytes, pieces: list[bytes] | None
    ) -> Outcome:
        if head.config is not None:
            check_config(request.key, head.config)
            if not may_configure(request.key):
                head = msgspec.structs.replace(head, modest=True)
        if not head.patient:
            self._pressure.check(request.shard)
        return _AppendCall(
            shard=request.shard,
            op=Op.APPEND,
            head=head,
            body=batch,
            pieces=pieces,
            return_seqs=not request.query or flag(request, "return_seqs", True),
            started_ns=request.started_ns,
        )

    def diff(self, request: Request) -> Outcome:
        head = schemas.decode_diff(request.body, request.name, self.settings)
        self._pressure.check(request.shard)
        return _DiffCall(
            shard=request.shard,
            op=Op.DIFF,
            head=head,
            timeout_ms=head.wait_ms,
            most=head.max_bytes,
            started_ns=request.started_ns,
        )

    def delete_records(self, request: Request) -> Outcome:
        head = schemas.decode_delete(request.body, request.name)

        def render(answer: messages.RecordsDeleted, _: bytes | memoryview) -> Response:
            content = {
                "topic": request.name,
                "deleted": answer.deleted,
                "earliest_seq": answer.earliest_seq,
                "head_seq": answer.head_seq,
                "count": answer.count,
                "bytes": answer.bytes,
            }
            return Response(200, with_performance(content, request.started_ns, fsync_ms=answer.fsync_us / 1_000))

        return RenderedCall(rendered=render, shard=request.shard, op=Op.DELETE_RECORDS, head=head)

    # --- topics ---

    def put_topic(self, request: Request) -> Outcome:
        config, kind = schemas.decode_config(request.body, request.name)
        check_config(request.key, config)

        def render(answer: messages.TopicPut, _: bytes | memoryview) -> Response:
            content = {"topic": request.name, "created": answer.created, "config": answer.config}
            return Response(201 if answer.created else 200, with_performance(content, request.started_ns))

        head = messages.PutTopic(request.name, config, kind)
        return RenderedCall(rendered=render, shard=request.shard, op=Op.PUT_TOPIC, head=head)

    def get_topic(self, request: Request) -> Outcome:
        return self._get_topic(request, tries=3)

    def _get_topic(self, request: Request, *, tries: int) -> Outcome:
        def render(answer: messages.TopicReport, counts: dict[str, int] | None) -> Response:
            content = {
                "topic": request.name,
                "type": answer.config.type,
                "head_seq": answer.head_seq,
                "earliest_seq": answer.earliest_seq,
                "next_seq": answer.head_seq + 1,
                "count": answer.count,
                "bytes": answer.bytes,
                "config": seen_config(request.key, answer.config),
                **({} if counts is None else {"queue": counts}),
                "effective_priority": answer.effective_priority,
                "last_write_ts": answer.last_write_ts,
                "last_read_ts": answer.last_read_ts,
            }
            return Response(200, with_performance(content, request.started_ns))

        def count(answers: list[messages.TopicReport]) -> Outcome:
            report = answers[0]
            if report.config.type != "queue":
                return render(report, None)
            row = messages.QueueRow(request.name, report.topic_id, report.count, report.removals, report.completing)

            def counted(counts: dict[str, dict[str, int]]) -> Outcome:
                if request.name not in counts and tries > 1:
                    return self._get_topic(request, tries=tries - 1)  # it was made again meanwhile
                if request.name not in counts:
                    raise ApiError(
                        "shard_unavailable", "this queue's counters are not to be had now. Retry", retry_after_s=1
                    )
                return render(report, counts[request.name])

            return self._counted([row], counted)

        head = messages.GetTopic(request.name, flag(request, "touch", True))
        return Gather([Call(shard=request.shard, op=Op.GET_TOPIC, head=head)], count)

    def _counted(
        self, rows: list[messages.QueueRow], render: Callable[[dict[str, dict[str, int]]], Outcome]
    ) -> Outcome:
        """Ask the coordinator for the counters of these queues; one that is gone by now has none."""

        def counted(answers: list[messages.QueuesCounted]) -> Outcome:
            return render(
                {
                    row.topic: {"ready": one.ready, "in_flight": one.in_flight, "dead_lettered": one.dead_lettered}
                    for row, one in zip(rows, answers[0].counts, strict=True)
                    if one is not None
                }
            )

        head = messages.CountQueues(rows)
        return Gather([Call(shard=self._queue, op=Op.COUNT_QUEUES, head=head)], counted)

    def list_topics(self, request: Request) -> Outcome:
        size = page_size(request)
        touch = flag(request, "touch", False)
        head = messages.ListTopics(
            prefix=request.query.get("prefix", ""),
            after=after(request.query.get("cursor")),
            limit=size,
            touch=False,
            prefixes=request.key.prefixes if request.key else (),
        )

        def merge(answers: list[messages.TopicsListed]) -> Outcome:
            rows = heapq.merge(*(answer.rows for answer in answers), key=lambda row: row.topic)
            page = [row for _, row in zip(range(size), rows, strict=False)]
            more = any(answer.more for answer in answers) or sum(len(a.rows) for a in answers) > size
            if not touch or not page:
                return show(page, more)
            # Every shard has said what it has for a whole page: what is shown of that is asked for again, and read.
            shown = {row.topic for row in page}
            calls = []
            for shard, answer in enumerate(answers):
                if part := sum(row.topic in shown for row in answer.rows):
                    again = msgspec.structs.replace(head, limit=part, touch=True)
                    calls.append(Call(shard=shard, op=Op.LIST_TOPICS, head=again))

            def touched(answers: list[messages.TopicsListed]) -> Outcome:
                now = {row.topic: row for answer in answers for row in answer.rows}
                return show([now.get(row.topic, row) for row in page], more)

            return Gather(calls, touched)

        def show(page: list[messages.TopicRow], more: bool) -> Outcome:
            def answer(counts: dict[str, dict[str, int]]) -> Response:
                content: dict[str, Any] = {"topics": [_listed(row, counts.get(row.topic)) for row in page]}
                if more and page:
                    content["next_cursor"] = cursor(page[-1].topic)
                return Response(200, with_performance(content, request.started_ns))

            queues = [row for row in page if row.topic_id and not row.rebuilding]
            if not queues or not self._linked(self._queue):
                return answer({})
            return self._counted([messages.QueueRow.of(row) for row in queues], answer)

        calls = [Call(shard=shard, op=Op.LIST_TOPICS, head=head) for shard in range(self.shards)]
        return Gather(calls, merge)

    # --- probes ---

    def health(self, request: Request) -> Outcome:
        uptime_ms = (time.monotonic_ns() - self.started_ns) // _MS
        content = {"status": "ok", "version": __version__, "uptime_ms": uptime_ms}
        return Response(200, with_performance(content, request.started_ns))

    def ready(self, request: Request) -> Outcome:
        if self.draining:
            return error_response(shutting_down())
        rows = [row for row in self.board.rows() if row.name.startswith("shard-")]
        others = {"router": self.shards, "queue": self._queue}
        peers = dict(enumerate(rows)) | {others[row.name]: row for row in self.board.rows() if row.name in others}
        waiting = [
            row
            for at, row in peers.items()
            if at not in self._replacing and (row.state != State.READY or row[Word.DERIVING] or not self._linked(at))
        ]
        without = [row.name for row in rows if row[Word.COLD_GONE]]
        if waiting:
            progress = sum(row[Word.PROGRESS_PERMILLE] for row in rows) / (1_000 * len(rows))
            states = {row.name: row.state.name.lower() for row in waiting}
            detail: dict[str, Any] = {"replay_progress": round(progress, 3), "waiting_for": states}
            if without:
                detail["cold_tier_missing"] = without
            return error_response(
                ApiError("not_ready", f"not ready: {', '.join(states)} not serving yet", detail, retry_after_s=1)
            )
        content: dict[str, Any] = {
            "status": "ready",
            "wal_replay_complete": True,
            "topics": sum(row[Word.TOPICS] for row in rows),
        }
        if without:
            content["degraded"] = {"cold_tier_missing": without}
        return Response(200, with_performance(content, request.started_ns))


_LISTED = ("topic", "head_seq", "earliest_seq", "count", "bytes", "durable", "effective_priority")
_UNKNOWN = dict.fromkeys(("head_seq", "earliest_seq", "count", "bytes"))


def _listed(row: messages.TopicRow, counts: dict[str, int] | None) -> dict[str, Any]:
    shown = {name: getattr(row, name) for name in _LISTED}
    if row.rebuilding:  # it has some of its records: a number of them would be wrong
        return {**shown, **_UNKNOWN, "error": error_content(being_rebuilt(row.topic))}
    return shown if counts is None else {**shown, "queue": counts}


def shutting_down() -> ApiError:
    return ApiError("shutting_down", "the server is shutting down", retry_after_s=2)


def went_wrong() -> ApiError:
    return ApiError("internal", "something went wrong in the server; it is logged")


# --- calls whose answers are formatted by hand, and the others ----------------------------------------


class RenderedCall(Call, kw_only=True, gc=False, eq=False):
    rendered: Callable[[Any, bytes | memoryview], Response]

    def render(self, answer: Any, body: bytes | memoryview) -> Response:
        return self.rendered(answer, body)


# Microseconds as text in milliseconds: formatting a float costs more than all the rest of an answer.
_MS_TEXTS = 4_096
_MS_TEXT = [f"{us / 1000}" for us in range(_MS_TEXTS)]


def append_json(
    topic: str,
    answer: tuple[int, int, int, bool, bool, int, int],
    return_seqs: bool,
    spent_us: int,
    throttle_us: int = 0,
) -> bytes:
    """An append's answer; the fields are those of messages.Appended."""
    first, count, head_seq, created, deduped, wal_us, fsync_us = answer
    last = first + count - 1
    if not return_seqs:
        seqs = ""
    elif count == 1:
        seqs = f'"seqs":[{first}],'
    else:
        seqs = f'"seqs":{_encode(list(range(first, last + 1))).decode()},'
    spent = _MS_TEXT[spent_us] if spent_us < _MS_TEXTS else f"{spent_us / 1000}"
    wal = _MS_TEXT[wal_us] if wal_us < _MS_TEXTS else f"{wal_us / 1000}"
    fsync = _MS_TEXT[fsync_us] if fsync_us < _MS_TEXTS else f"{fsync_us / 1000}"
    throttle = f"{throttle_us / 1000}" if throttle_us else "0.0"
    return (
        f'{{"topic":"{topic}","first_seq":{first},"last_seq":{last},{seqs}"head_seq":{head_seq},'
        f'"count":{count},"created":{"true" if created else "false"},"deduped":{"true" if deduped else "false"},'
        f'"performance":{{"server_total_ms":{spent},"wal_append_ms":{wal},"fsync_ms":{fsync},'
        f'"throttle_wait_ms":{throttle}}}}}'
    ).encode()


class _AppendCall(Call, kw_only=True, gc=False, eq=False):
    return_seqs: bool
    started_ns: int

    def render(self, answer: messages.Appended, body: bytes | memoryview) -> Response:
        spent_us = (time.perf_counter_ns() - self.started_ns) // 1_000
        content = append_json(self.head.topic, answer, self.return_seqs, spent_us, self.throttle_us)
        return Response(201 if answer.created else 200, content)


class _DiffCall(Call, kw_only=True, gc=False, eq=False):
    started_ns: int

    def lessen(self) -> None:
        """To what makes a small answer, with what stands around its records."""
        max_bytes = min(self.head.max_bytes, limits.SMALL_BODY_BYTES // 2)
        limit = min(self.head.limit, limits.DEFAULT_LIMIT)
        self.head = msgspec.structs.replace(self.head, max_bytes=max_bytes, limit=limit)

    def render(self, answer: messages.Diffed, body: bytes | memoryview) -> Response:
        spent = elapsed_ms(self.started_ns)
        tail = b',"performance":{"server_total_ms":%.3f,"records_scanned":%d,"throttle_wait_ms":0.0}}' % (
            spent,
            answer.scanned,
        )
        return Response(200, body, tail=tail)


# --- query parameters --------------------------------------------------------------------------------


def flag(request: Request, name: str, default: bool) -> bool:
    text = request.query.get(name)
    if text is None:
        return default
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise invalid(f"{name} must be true or false", field=name)


def page_size(request: Request) -> int:
    text = request.query.get("page_size")
    if text is None:
        return limits.DEFAULT_PAGE_SIZE
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) == 0:
        raise invalid(f"page_size must be a number from 1 to {limits.MAX_PAGE_SIZE}", field="page_size")
    return min(int(text), limits.MAX_PAGE_SIZE)


class _Cursor(msgspec.Struct):
    after: str


def cursor(after: str) -> str:
    return base64.b64encode(_encode(_Cursor(after))).decode()


def after(cursor: str | None) -> str:
    if cursor is None:
        return ""
    try:
        # The alphabet of URLs is accepted too: a client may have changed + and / on the way.
        raw = base64.b64decode(cursor.replace("-", "+").replace("_", "/").replace(" ", "+"), validate=True)
        return msgspec.json.decode(raw, type=_Cursor).after
    except (binascii.Error, msgspec.MsgspecError, ValueError, RecursionError):
        raise invalid("cursor is not one that this server gave out", field="cursor") from None
