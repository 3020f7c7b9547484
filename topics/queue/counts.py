"""How many jobs of a queue are ready: the topic's live records, less those that the table holds or hides.

A live count always comes from the shard, together with `removals`: how many records left otherwise than by an ack. If
that has changed since the table was last compared, some of its jobs may be gone, and the shard is asked which.
"""

from __future__ import annotations

from collections.abc import Callable

from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import Asks, as_api_error
from topics.queue.lease_log import Answer, Failed
from topics.queue.lease_table import Leases, State


class Counts:
    def __init__(
        self, asks: Asks, leases: Leases, topic: str, *, shard: int, on_gone: Callable[[list[int]], None]
    ) -> None:
        self._asks = asks
        self._leases = leases
        self._topic = topic
        self._shard = shard
        self._on_gone = on_gone
        self.topic_id = 0
        self.passing = False  # the shard is being asked for jobs ...
        self._passed = -1  # ... and the removals when it was last
        self._removals = -1  # when the table was last compared

    def forget(self) -> None:
        """The shard has been away: it counts anew."""
        self._removals = -1

    def taken(self, removals: int) -> None:
        self.passing = False
        self._passed = removals

    def ready(self, live: int) -> int:
        return max(0, live - self._leases.in_flight - self._leases.hidden)

    def of(self, row: messages.QueueRow, *, dead_lettered: int) -> messages.QueueCounts:
        """From what a shard said a moment ago. Those whose delete waits for its sync are held here still, but not among
        its records any more."""
        completing = min(row.completing, self._leases.ending)
        ready = self.ready(row.count + completing)
        return messages.QueueCounts(ready, self._leases.in_flight - completing, dead_lettered)

    def ask(self, then: Callable[[int], None], failed: Failed) -> None:
        """Go on with the live count as it is now, when the table has been compared."""

        def checked(answer: messages.JobsChecked, _: bytes | memoryview, error: Exception | None) -> None:
            if error is not None:
                failed(as_api_error(error))
            else:
                self.compare(answer.removals, lambda: then(answer.live), failed)

        self._check([], checked)

    def compare(self, removals: int, then: Answer, failed: Failed) -> None:
        """Go on when the table knows no job that somebody removed."""
        if removals == self._removals:
            then()
            return
        passing = self.passing

        def checked(answer: messages.JobsChecked, _: bytes | memoryview, error: Exception | None) -> None:
            if error is not None:
                failed(as_api_error(error))
                return
            # Jobs of a pass that was under way are in the table by now, and were not asked for.
            sure = not passing or self._passed == answer.removals
            self._removals = answer.removals if sure else -1
            self._on_gone(answer.gone)
            then()

        # What ends or moves is left out: whoever does that will be told.
        self._check(self._leases.seqs(but=(State.ENDING, State.MOVING)), checked)

    def find_gone(self, seqs: list[int], then: Callable[[list[int]], None]) -> None:
        """Which of these are not there any more."""

        def checked(answer: messages.JobsChecked, _: bytes | memoryview, error: Exception | None) -> None:
            if error is None:
                then(answer.gone)

        if seqs:
            self._check(seqs, checked)

    def _check(
        self, seqs: list[int], then: Callable[[messages.JobsChecked, bytes | memoryview, Exception | None], None]
    ) -> None:
        self._asks.call(self._shard, Op.CHECK_JOBS, messages.CheckJobs(self._topic, self.topic_id, seqs), then)
