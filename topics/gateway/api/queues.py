"""The endpoints of queues; the coordinator answers them. A claim may have to wait for its cohort, so a client that
leaves meanwhile is taken out of it.
"""

from __future__ import annotations

from collections import Counter

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import invalid
from topics.gateway.admission.pressure import Pressure
from topics.gateway.api import jobs, schemas
from topics.gateway.api.topics import RenderedCall, elapsed_ms, with_performance
from topics.gateway.api.types import Call, Gather, Outcome, Request, Response
from topics.gateway.api.watch import SSE_HEADERS
from topics.gateway.auth import owner_of
from topics.gateway.origins import check_events
from topics.gateway.streams.registry import HOME, Streams
from topics.gateway.streams.work_stream import WorkStream


class QueueHandlers:
    def __init__(self, streams: Streams, *, peer: int, pressure: Pressure | None = None) -> None:
        self._pressure = pressure or Pressure()
        self._streams = streams
        self._settings = streams.settings
        self._peer = peer  # the coordinator's number among those we ask

    def claim(self, request: Request) -> Outcome:
        head = schemas.decode_claim(request.body, request.name, self._settings, key=request.idempotency_key)
        self._pressure.check(request.shard)
        return _ClaimCall(
            shard=self._peer,
            op=Op.CLAIM,
            head=head,
            timeout_ms=limits.CLAIM_JITTER_MS_RANGE[1],
            most=min(head.max * self._settings.max_record_bytes, limits.CLAIM_BYTES),
            started_ns=request.started_ns,
        )

    def ack(self, request: Request) -> Outcome:
        head = schemas.decode_ack(request.body, request.name, self._settings)

        def render(answer: messages.Acked, _: bytes | memoryview) -> Response:
            content = {
                "topic": request.name,
                "acked": len(head.seqs) - len(answer.skipped),
                "skipped": answer.skipped,
                "ready": answer.ready,
                "in_flight": answer.in_flight,
            }
            return Response(200, with_performance(content, request.started_ns, fsync_ms=answer.fsync_us / 1_000))

        return RenderedCall(rendered=render, shard=self._peer, op=Op.ACK, head=head)

    def nack(self, request: Request) -> Outcome:
        head = schemas.decode_nack(request.body, request.name, self._settings)

        def render(answer: messages.Nacked, _: bytes | memoryview) -> Response:
            content = {
                "topic": request.name,
                "nacked": len(head.seqs) - len(answer.skipped),
                "skipped": answer.skipped,
                "ready": answer.ready,
                "in_flight": answer.in_flight,
            }
            return Response(200, with_performance(content, request.started_ns))

        return RenderedCall(rendered=render, shard=self._peer, op=Op.NACK, head=head)

    def extend(self, request: Request) -> Outcome:
        head = schemas.decode_extend(request.body, request.name, self._settings)

        def render(answer: messages.Extended, _: bytes | memoryview) -> Response:
            content = {
                "topic": request.name,
                "extended": len(head.seqs) - len(answer.skipped),
                "skipped": answer.skipped,
                "deadlines": {str(seq): answer.deadline for seq in _but(head.seqs, answer.skipped)},
            }
            return Response(200, with_performance(content, request.started_ns))

        return RenderedCall(rendered=render, shard=self._peer, op=Op.EXTEND, head=head)

    def work(self, request: Request) -> Outcome:
        """First whether there is such a queue, then whether there is room for one more stream."""
        head = self._work_head(request)
        owner = owner_of(request.key)
        check_events(request.headers)

        def opened(answer: messages.StreamOpened, _: bytes | memoryview) -> Response:
            stream = WorkStream(self._streams, answer.stream, head, key=request.key)
            return Response(200, b"", SSE_HEADERS, stream=stream)

        def found(_: list[messages.WorkOpened]) -> Outcome:
            head = messages.OpenStream(None, owner)
            return RenderedCall(rendered=opened, shard=HOME, op=Op.OPEN_STREAM, head=head)

        return Gather([Call(shard=self._peer, op=Op.OPEN_WORK, head=head)], found)

    def _work_head(self, request: Request) -> messages.OpenWork:
        query = request.query
        if "node" not in query:
            raise invalid("node must name the worker: ?node=...", field="node")
        node = schemas.check_node(query["node"], self._settings)
        most = schemas.claim_size(_number(query.get("max", "1"), "max"), self._settings)
        lease_ms = None
        if "lease_ms" in query:
            lease_ms = schemas.lease_time(_number(query["lease_ms"], "lease_ms"))
        return messages.OpenWork(request.name, node, most, lease_ms, 0)


class _ClaimCall(Call, kw_only=True, gc=False, eq=False):
    started_ns: int

    def render(self, answer: messages.Claimed, body: bytes | memoryview) -> Response:
        content = b'{"topic":"%b","claimed":[%b],"count":%d,"ready":%d' % (
            self.head.topic.encode(),
            b",".join(jobs.rendered(answer, body)),
            len(answer.seqs),
            answer.ready,
        )
        spent = elapsed_ms(self.started_ns)
        return Response(200, content, tail=b',"performance":{"server_total_ms":%.3f,"throttle_wait_ms":0.0}}' % spent)


def _but(seqs: list[int], skipped: list[int]) -> list[int]:
    """Those that were not skipped; one that stands twice is skipped once."""
    return list(Counter(seqs) - Counter(skipped)) if skipped else seqs


def _number(text: str, field: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise invalid(f"{field} must be a whole number", field=field)
    return int(text)
