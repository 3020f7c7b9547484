"""The ledgers of the crash tests find what is missing: a loss that is planted fails the check and is counted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
import pytest
from crash_oracle import Oracle, Record, TopicLedger
from crash_queues import Ledger
from crash_routers import reckon
from crash_server import SMALL, Answer, Client, Server, eventually
from figures import ACKNOWLEDGED, CHECKED, CRASH_POINTS, KILLS, LOST, RECOVERIES, STOPS

pytestmark = pytest.mark.gate

CONFIG = {"durability": "fsync"}


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    with figures.apart():
        for figure in figures.FIGURES.values():
            figure.count = 0
        yield


class Shelf(Client):
    """What a server shows of one topic, without a server."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}  # by seq
        self.head = 0

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        fields: dict[str, Any] = {"head_seq": self.head, "earliest_seq": min(self.records, default=self.head + 1)}
        if path.endswith("/diff"):
            fields |= {"next_from_seq": self.head, "caught_up": True, "tombstone": None}
            shown = b",".join(
                b'{"$seq":%d,"$ts":1,"$tag":%b,"data":%b}' % (seq, json.dumps(record.tag).encode(), record.data)
                for seq, record in self.records.items()
            )
            return Answer(200, json.dumps(fields).encode()[:-1] + b',"records":[' + shown + b"]}", None)
        size = sum(record.size for record in self.records.values())
        state = fields | {"config": CONFIG, "count": len(self.records), "bytes": size}
        return Answer(200, json.dumps(state).encode(), None)


@pytest.fixture
def owed() -> tuple[TopicLedger, Shelf]:
    """A ledger of two batches, and a shelf that shows them."""
    ledger = Oracle().topic("t", "fsync")
    ledger.config = dict(CONFIG)
    shelf = Shelf()
    for count in (2, 3):
        batch = ledger.new_batch([("", None, None)] * count)
        seqs = range(shelf.head + 1, shelf.head + count + 1)
        shelf.head = seqs[-1]
        shelf.records |= dict(zip(seqs, batch.records, strict=True))
        answer = {"count": count, "first_seq": seqs[0], "last_seq": seqs[-1], "seqs": [*seqs], "head_seq": seqs[-1]}
        ledger.settle(batch, Answer(201, json.dumps(answer).encode(), None))
    return ledger, shelf


def test_what_is_there_is_checked_and_not_lost(owed: tuple[TopicLedger, Shelf]) -> None:
    ledger, shelf = owed
    assert ledger.check(shelf) is not None
    assert (ACKNOWLEDGED.count, CHECKED.count, LOST.count) == (5, 5, 0)


@pytest.mark.parametrize("gone", [1, 3, 5])
def test_a_record_that_is_gone_is_a_loss(owed: tuple[TopicLedger, Shelf], gone: int) -> None:
    ledger, shelf = owed
    del shelf.records[gone]
    with pytest.raises(AssertionError, match="1 records missing"):
        ledger.check(shelf)
    assert (CHECKED.count, LOST.count) == (5, 1)


def test_a_topic_that_is_empty_has_lost_all(owed: tuple[TopicLedger, Shelf]) -> None:
    ledger, shelf = owed
    shelf.records = {}
    with pytest.raises(AssertionError, match="5 records missing"):
        ledger.check(shelf)
    assert LOST.count == 5


def test_a_record_that_changed_is_a_loss(owed: tuple[TopicLedger, Shelf]) -> None:
    ledger, shelf = owed
    shelf.records[2] = Record(shelf.records[2].data, tag="another")
    with pytest.raises(AssertionError, match="was changed"):
        ledger.check(shelf)
    assert LOST.count == 1


def test_a_job_that_is_nowhere_is_a_loss() -> None:
    ledger = Ledger("jobs", leases_durable=True, dead_letter="dead")
    ledger.acknowledged(ledger.numbers(4), 1)
    ledger.check_fates(left=[0, 1, 2], dead=[3])
    assert (ACKNOWLEDGED.count, CHECKED.count, LOST.count) == (4, 4, 0)
    with pytest.raises(AssertionError, match="1 of 4 jobs are nowhere"):
        ledger.check_fates(left=[0, 1], dead=[3])
    assert (CHECKED.count, LOST.count) == (8, 1)


@pytest.mark.parametrize(
    ("found", "lost"),
    [([["w", 1], ["w", 2], ["w", 2]], 0), ([["w", 2], ["w", 1]], 1), ([["w", 1], ["w", 1], ["w", 9]], 2), ([], 3)],
)
def test_a_copy_that_did_not_arrive_is_a_loss(found: list[Any], lost: int) -> None:
    reckon(found, [["w", 1], ["w", 2], ["w", 2]])
    assert (CHECKED.count, LOST.count) == (3, lost)


def test_kills_stops_and_kill_points_of_a_server(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(shards=1, env=SMALL)
    stopped = server.signal_child("router", signal.SIGSTOP)
    server.signal_child("router", signal.SIGKILL)
    eventually(lambda: server.pid_of("router") != stopped, what="another router")
    assert (KILLS.count, STOPS.count, RECOVERIES.count, CRASH_POINTS.count) == (1, 1, 0, 0)
    server.kill()
    assert KILLS.count > 2  # the tree
    dying = serve(shards=1, env={**SMALL, "TOPICS_KILL_POINT": "rotated:1"}, wait=False)
    eventually(lambda: dying.deaths() >= 2, what="deaths at the point")
    dying.kill()
    assert CRASH_POINTS.count >= 2
    assert RECOVERIES.count == 1
