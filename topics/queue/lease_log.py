"""What happens to the leases of one queue, on its way into their log (storage/leases.py).

Events of a round go out as one batch, in the order they happened, before anything that depends on them. With
`leases_durable` an answer waits until its event is synced; if that fails nothing of it counts, and it is answered so.
Now and then the whole table is written down, so that a restart need not read far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import Asks, as_api_error
from topics.errors import ApiError
from topics.queue.lease_table import Lease
from topics.storage import columns
from topics.storage.format import RECORD_OVERHEAD
from topics.storage.leases import CHECKPOINT_TAG, EventName, JobState, LeaseEvent, encode_event

_COMPANY_MS = 20

Answer = Callable[[], None]
Failed = Callable[[ApiError], None]


class Journal:
    def __init__(self, asks: Asks, topic: str, *, shard: int) -> None:
        self._asks = asks
        self._topic = topic
        self._shard = shard
        self.topic_id = 0
        self.durable = False
        self._events: list[LeaseEvent] = []
        self._waiting: list[tuple[Answer, Failed]] = []  # for these events to be synced
        self._named = 0  # jobs in events since the last checkpoint
        self.due_ms = 0  # when the shard is woken for what lies in its ring; 0: there is nothing

    @property
    def has_news(self) -> bool:
        """Whether a checkpoint would say something that the last one did not."""
        return self._named > 0

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiting)

    def replayed(self, event: LeaseEvent) -> None:
        self._named = 0 if event.event == "checkpoint" else self._named + len(event.seqs)

    def record(
        self,
        event: EventName,
        node: str,
        leases: list[Lease],
        *,
        deadline: int = 0,
        stream: int = 0,
        reason: str = "",
        key: str = "",
    ) -> None:
        if not leases:
            return
        deliveries: list[int] = []
        if event == "claimed" and any([lease.deliveries > 1 for lease in leases]):
            deliveries = [lease.deliveries for lease in leases]
        seqs, numbers = [lease.seq for lease in leases], [lease.number for lease in leases]
        self._events.append(LeaseEvent(event, node, seqs, numbers, deadline, deliveries, stream, reason, key=key))
        self._named += len(leases)

    def when_logged(self, answer: Answer, failed: Failed, *, changed: bool) -> None:
        """Answer now, or when what was recorded for it is synced."""
        if changed and self.durable:
            self._waiting.append((answer, failed))
        else:
            answer()

    def fail(self, error: ApiError) -> None:
        """The topic is gone, and its log with it."""
        waiting, self._waiting = self._waiting, []
        self._events = []
        for _, failed in waiting:
            failed(error)

    # --- sending ---

    def step(self, now_ms: int) -> None:
        """At the end of a round everything is in the ring. For what nobody waits for the shard is not woken at once:
        the next question will do that, and if none comes soon, a timer. Should this process die, the shard empties
        the ring."""
        if self.due_ms and now_ms >= self.due_ms:
            self.due_ms = 0
            self._asks.wake(self._shard)
        if self._events:
            self.due_ms = self.due_ms or now_ms + _COMPANY_MS
        self.flush()

    def flush_awaited(self) -> None:
        """Before events that belong to a delete are recorded: a delete counts also if those can't be written."""
        if self._waiting:
            self.flush()

    def flush(self) -> None:
        events, size, body = self._pack()
        waiting, self._waiting = self._waiting, []
        head = messages.LogLeases(self._topic, self.topic_id, self.durable or bool(waiting), events, size, False)
        if waiting:

            def synced(_: Any, __: bytes | memoryview, error: Exception | None) -> None:
                for answer, failed in waiting:
                    if error is None:
                        answer()
                    else:
                        failed(as_api_error(error))

            self._asks.call(self._shard, Op.LOG_LEASES, head, synced, body)
        elif events:
            self._asks.tell(self._shard, Op.LOG_LEASES, head, body, quietly=True)

    def with_delete(self, seqs: list[int]) -> tuple[messages.CompleteJobs, bytes]:
        """What is to be said goes along with a delete."""
        events, size, body = self._pack()
        return messages.CompleteJobs(self._topic, self.topic_id, seqs, self.durable, events, size), body

    def _pack(self) -> tuple[int, int, bytes]:
        events, self._events = self._events, []
        if not events:
            return 0, 0, b""
        encoded = [encode_event(event) for event in events]
        return len(encoded), sum(map(len, encoded)) + len(encoded) * RECORD_OVERHEAD, columns.pack(encoded)

    def checkpoint_is_due(self, table: int) -> bool:
        return self._named > max(limits.LEASE_CHECKPOINT_EVENTS, 4 * table)

    def checkpoint(self, jobs: list[JobState], *, dead_lettered: int, keys: dict[str, list[int]]) -> None:
        """Whoever reads the log starts here."""
        self.flush()
        self._named = 0
        data = encode_event(LeaseEvent("checkpoint", dead_lettered=dead_lettered, jobs=jobs, keys=keys))
        body = columns.pack([data], tags=[CHECKPOINT_TAG])
        head = messages.LogLeases(self._topic, self.topic_id, self.durable, 1, len(data) + RECORD_OVERHEAD, True)
        self._asks.tell(self._shard, Op.LOG_LEASES, head, body)
