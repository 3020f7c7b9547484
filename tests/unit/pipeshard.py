"""A shard that is a router's source and destination, and a forwarder worked by hand.

Forwarder does what the router process does, one step at a time, by the real copying; it keeps nothing that the shard
does not tell it, so a test may throw it away at any moment as a kill of the router process would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model import Record, Shard, Stored, batch_of

from topics.actors import messages
from topics.actors.messages import Op, RawPiece
from topics.errors import ApiError
from topics.router.copying import copy
from topics.storage.columns import Columns
from topics.storage.routers import Rule


class PipeShard(Shard):
    def open(self, *args: Any, **more: Any) -> None:
        super().open(*args, **more)
        self.engine.pipes.settle = self.mover.settle

    def work(self) -> None:
        """Commit, and let the mover do what it was asked for, as the process does now and then."""
        self.settle()
        while self.mover._settling or self.mover.busy:
            self.mover.step(quiet=False)
            self.mover.wait()
            self.settle()

    def ask(self, op: Op, head: Any, body: bytes = b"") -> Any:
        """Like call, for what the mover has to do before it is answered."""
        sent = self.send(op, head, body)
        self.work()
        return self.answer(sent)

    def outcome(self, correlation: int) -> Any:
        """The answer or the error; None if there is none yet."""
        if not self.answered(correlation):
            return None
        try:
            return self.answer(correlation)
        except ApiError as error:
            return error

    def id_of(self, name: str) -> int:
        return self.topic(name).id

    # --- requests of a forwarder ---

    def open_pipe(
        self, source: str, dest: str, at: int = 0, *, routers: tuple[str, ...] = ("r",), ring: bool = False
    ) -> messages.PipeOpened:
        head = messages.OpenPipe(dest, self.id_of(dest), self.id_of(source), at, list(routers), ring)
        answer: messages.PipeOpened = self.ask(Op.OPEN_PIPE, head)
        return answer

    def close_pipe(self, source: str, dest: str, *, keep: bool = False) -> messages.PipeClosed:
        head = messages.ClosePipe(dest, self.id_of(dest), self.id_of(source), keep)
        answer: messages.PipeClosed = self.ask(Op.CLOSE_PIPE, head)
        return answer

    def read_raw(
        self, source: str, from_seq: int, *, limit: int = 1_000, max_bytes: int = 2**20, ring: bool = False
    ) -> tuple[RawPiece, list[Record]]:
        sent = self.send(Op.READ_RAW, messages.ReadRaw(source, self.id_of(source), from_seq, limit, max_bytes, ring))
        piece, body = messages.decode_answer(self.answers.messages.pop(sent))
        return piece, records_of(bytes(body), piece.count)

    def send_forward(self, source: str, dest: str, records: list[Record], **more: Any) -> int:
        """Made by hand; from_seq and to_seq unless the pipe's own are meant."""
        pipe = self.topic(dest).pipe
        at = pipe.at if pipe is not None else 0
        body, size = batch_of(records) if records else (b"", 0)
        from_seq = more.pop("from_seq", at)
        fields: dict[str, Any] = {
            "topic_id": self.id_of(dest),
            "source_id": self.id_of(source),
            "to_seq": from_seq + max(len(records), 1),
            "lost": 0,
            "complete": True,
            "level": True,
            "counts": {"r": len(records)} if records else {},
            "sources": [(from_seq + 1, len(records))] if records else [],
            "hops": None,
            **more,
        }
        head = messages.Forward(topic=dest, from_seq=from_seq, count=len(records), size=size, **fields)
        return self.send(Op.FORWARD, head, body)

    def forward(self, source: str, dest: str, records: list[Record], **more: Any) -> int:
        """Where the pipe stands afterwards."""
        sent = self.send_forward(source, dest, records, **more)
        self.work()
        at: int = self.answer(sent).at
        return at

    def seqs(self, topic: str) -> dict[int, bytes]:
        return {stored.seq: stored.record.data for stored in self.everything(topic)}

    def data(self, topic: str) -> list[bytes]:
        return [stored.record.data for stored in self.everything(topic)]


def records_of(body: bytes, count: int) -> list[Record]:
    if not count:
        assert body == b""
        return []
    columns = Columns(body, count=count, ts=0)
    assert list(columns.times()) == [0] * count, "times stay behind"
    fields = zip(columns.data(), columns.tags(), columns.nodes(), columns.metas(), strict=True)
    return [Record(*each) for each in fields]


def rule(shard: PipeShard, source: str, dest: str, router: str = "r", **more: Any) -> Rule:
    return Rule(
        router,
        source,
        dest,
        shard.id_of(source),
        shard.id_of(dest),
        more.pop("since", 0),
        0,
        **more,
    )


class Forwarder:
    """One pair of topics. `step` moves one batch; it says whether there was anything to do."""

    def __init__(
        self, shard: PipeShard, source: str, dest: str, rules: list[Rule] | None = None, *, ring_hops: int | None = None
    ) -> None:
        self.shard = shard
        self.source = source
        self.dest = dest
        self.rules = rules or [rule(shard, source, dest)]
        self.ring_hops = ring_hops
        self.at: int | None = None
        self.until: int | None = None
        self.together: Callable[[], object] = lambda: None  # done in the round of the next forward, behind it

    def step(self, *, limit: int = 1_000) -> bool:
        shard = self.shard
        try:
            if self.at is not None and self.until is None and shard.topic(self.source).head_seq == self.at:
                return False  # only whoever has just opened the pipe says so
            if self.at is None:
                routers = tuple(each.router for each in self.rules)
                since = min(each.since for each in self.rules)
                ring = self.ring_hops is not None
                opened = shard.open_pipe(self.source, self.dest, since, routers=routers, ring=ring)
                self.at, self.until = opened.at, opened.until
            return self._forward(limit)
        except ApiError as error:
            if error.code not in ("topic_full", "record_too_large", "throttled", "shard_unavailable"):
                raise
            self.at = None
            return False

    def _forward(self, limit: int) -> bool:
        shard = self.shard
        assert self.at is not None
        request = messages.ReadRaw(
            self.source, shard.id_of(self.source), self.at, limit, 2**20, self.ring_hops is not None, self.until
        )
        sent = shard.send(Op.READ_RAW, request)
        shard.engine.fetcher.wait()
        piece, body = messages.decode_answer(shard.answers.messages.pop(sent))
        copied = copy(self.rules, piece, bytes(body), ring_hops=self.ring_hops)
        head = messages.Forward(
            topic=self.dest,
            topic_id=shard.id_of(self.dest),
            source_id=shard.id_of(self.source),
            from_seq=self.at,
            to_seq=piece.to_seq,
            count=copied.count,
            size=copied.size,
            lost=piece.lost,
            complete=piece.complete,
            level=piece.to_seq == piece.head_seq,
            counts=copied.counts,
            sources=copied.sources,
            hops=copied.hops,
            told=copied.told,
        )
        before = self.at
        sent = shard.send(Op.FORWARD, head, copied.body)
        self.together()
        shard.work()
        answer = shard.answer(sent)
        filled = self.until is not None
        self.at, self.until = answer.at if filled or answer.at == piece.to_seq else None, answer.until
        return filled or bool(answer.at != before)

    def pump(self, *, limit: int = 1_000) -> None:
        """Until there is nothing to do."""
        for _ in range(10_000):
            if not self.step(limit=limit) and self.at is not None:
                return
        raise AssertionError("it never ends")


def numbers(first: int, count: int, **more: Any) -> list[Record]:
    """Records whose data is their number."""
    return [Record(b"%d" % number, **more) for number in range(first, first + count)]


__all__ = ["Forwarder", "PipeShard", "Record", "Stored", "numbers", "records_of", "rule"]
