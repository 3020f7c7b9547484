"""Producers and workers of queues while processes die, and a ledger that knows what the server owes them.

Every job carries a number. A Producer repeats a batch under its key until it is acknowledged, so each number is in its
queue exactly once. What a Ledger holds the server to:

    what                                  must be
    job that was acknowledged             acked by one answer, or in the queue, or in its dead letter; never nowhere
    ack that was answered as counted      final: no second one counts, and no claim that is sent later delivers the job
    ack whose answer is unknown           either
    lease whose deadline lies ahead       exclusive, and an ack of its holder counts
    nack with a delay                     nobody gets the job before
    deliveries of a job                   each has a lease_id of its own and a higher counter than the one before

The last three hold for leases that survive. With leases_durable they all do; without, what was told around the death
of the coordinator or a shard may be forgotten, and then the job is claimable or waits for its deadline.

Times are those of this machine's clock, which the server goes by too.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from crash_routers import PAUSE_S, World
from crash_routers import _Actor as Actor
from crash_server import Answer, Client, NoAnswer, Server, children_of, eventually, gone
from figures import ACKNOWLEDGED, CHECKED, KILLS, LOST

from topics.shm.counters import State

HOUR_MS = 3_600_000
SLACK_MS = 30
# What is told without being synced is on its way to the log for a moment.
FORGETFUL_MS = 500
MOST_OPEN = 200  # jobs of a queue that wait to be done; a producer waits too then


def now_ms() -> float:
    return time.time() * 1_000


def job(number: int) -> dict[str, Any]:
    return {"n": number, "pad": "x" * (number % 50)}


# --- one request -------------------------------------------------------------------------------------


def make_queue(world: World, name: str, **config: Any) -> None:
    config = {"type": "queue", "idempotency_window_ms": HOUR_MS, **config}
    answer = world.insist(lambda client: client.put(name, **config))
    assert answer.ok, answer


def claim(client: Client, queue: str, node: str, **fields: Any) -> Answer:
    return client.call("POST", f"/v0/topics/{queue}/claim", {"node": node, **fields})


def say(client: Client, verb: str, queue: str, node: str, seqs: Sequence[int], **fields: Any) -> Answer:
    """ack, nack or extend."""
    return client.call("POST", f"/v0/topics/{queue}/{verb}", {"node": node, "seqs": list(seqs), **fields})


def counters(world: World, queue: str) -> dict[str, int]:
    """ready, in_flight, dead_lettered, and how many jobs there are."""
    state = eventually(
        lambda: shown if "queue" in (shown := world.state(queue)) else None,  # not while the coordinator is away
        what=f"the counters of {queue}",
    )
    return {**state["queue"], "count": state["count"]}


# --- the ledger --------------------------------------------------------------------------------------


class Delivery(msgspec.Struct, eq=False):
    seq: int
    number: int
    lease_id: str
    node: str
    deliveries: int
    sent_ms: float  # when the claim was sent ...
    got_ms: float  # ... and when its answer was here
    until_ms: float  # held until then at least
    told: list[float]  # when answers about it came
    stream: bool = False
    given_up_ms: float | None = None  # when a nack or an ack of it was first sent, or its stream ended
    not_before_ms: float = 0.0  # the next one may have it then
    ack_lost: bool = False  # an ack was sent and its outcome is unknown

    def __str__(self) -> str:
        return (
            f"job {self.number} (seq {self.seq}) to {self.node} as {self.lease_id}, delivery {self.deliveries}, "
            f"claimed in {self.sent_ms:.0f}..{self.got_ms:.0f}, held until {self.until_ms:.0f}, given up at "
            f"{self.given_up_ms or 0:.0f}"
        )


class Ledger:
    """One queue."""

    def __init__(
        self,
        queue: str,
        *,
        leases_durable: bool,
        dead_letter: str | None = None,
        poison: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.queue = queue
        self.leases_durable = leases_durable
        self.dead_letter = dead_letter
        self.poison = poison  # numbers of jobs that no worker can do
        self._lock = threading.Lock()
        self._next = 0
        self.produced: dict[int, int] = {}  # number -> seq, once acknowledged
        self.deliveries: dict[int, list[Delivery]] = {}  # by seq
        self.done: dict[int, tuple[Delivery, float]] = {}  # seq -> whose ack counted, and when its answer came
        self.resting = False  # nobody does anything: quiet, in which a shard moves payloads and writes snapshots
        self.dead = 0  # in the dead letter, when somebody last looked
        self.ack_sent: set[int] = set()  # seqs of which at least one ack was sent
        self._lease_ids: set[str] = set()
        self.upsets: list[tuple[float, float]] = []  # when a process was away that takes part in writing leases down
        self.stream_cuts: list[float] = []  # when streams were cut, with their gateway

    # --- producing ---

    def numbers(self, count: int) -> list[int]:
        with self._lock:
            self._next += count
            return list(range(self._next - count, self._next))

    def acknowledged(self, numbers: Sequence[int], first_seq: int) -> None:
        ACKNOWLEDGED.add(len(numbers))
        with self._lock:
            for at, number in enumerate(numbers):
                self.produced[number] = first_seq + at

    @property
    def open(self) -> int:
        return len(self.produced) - len(self.done) - self.dead

    # --- leases ---

    def delivered(
        self, entry: dict[str, Any], node: str, *, sent_ms: float, got_ms: float, stream: bool = False
    ) -> Delivery:
        seq, number = entry["$seq"], entry["data"]["n"]
        delivery = Delivery(
            seq,
            number,
            entry["lease_id"],
            node,
            entry["deliveries"],
            sent_ms,
            got_ms,
            entry["deadline"],
            [got_ms],
            stream=stream,
        )
        assert entry["data"] == job(number), entry
        with self._lock:
            assert number < self._next, f"{self.queue}: nobody made {delivery}"
            assert self.produced.get(number, seq) == seq, (
                f"{self.queue}: job {number} is {self.produced[number]} and {seq}"
            )
            if (end := self.done.get(seq)) is not None and sent_ms > end[1]:
                raise AssertionError(f"{self.queue}: {delivery}, but the ack of {end[0]} was answered at {end[1]:.0f}")
            assert delivery.lease_id not in self._lease_ids, f"{self.queue}: a lease_id for the second time: {delivery}"
            self._lease_ids.add(delivery.lease_id)
            self.deliveries.setdefault(seq, []).append(delivery)
        return delivery

    def acking(self, deliveries: Sequence[Delivery]) -> None:
        self._give_up(deliveries)
        self.ack_sent.update(delivery.seq for delivery in deliveries)

    def acked(self, deliveries: Sequence[Delivery], skipped: Sequence[int]) -> None:
        answered = now_ms()
        with self._lock:
            for delivery in deliveries:
                if delivery.seq in skipped:
                    self._check_skipped(delivery, answered)
                elif (before := self.done.get(delivery.seq)) is not None:
                    raise AssertionError(f"{self.queue}: acked twice: {delivery}, before that {before[0]}")
                else:
                    self.done[delivery.seq] = (delivery, answered)

    def _check_skipped(self, delivery: Delivery, answered_ms: float) -> None:
        """Whoever surely holds a lease is not passed over."""
        if (
            delivery.ack_lost
            or answered_ms > delivery.until_ms - SLACK_MS
            or self._may_be_forgotten(delivery)
            or self._cut(delivery, answered_ms)
        ):
            return
        others = "; ".join(map(str, self.deliveries[delivery.seq]))
        raise AssertionError(f"{self.queue}: skipped at {answered_ms:.0f}, but held: {delivery}; of the seq: {others}")

    def nacking(self, deliveries: Iterable[Delivery]) -> None:
        self._give_up(deliveries)

    def nacked(self, deliveries: Sequence[Delivery], skipped: Sequence[int], *, sent_ms: float, delay_ms: int) -> None:
        with self._lock:
            for delivery in deliveries:
                delivery.told.append(now_ms())
                if delivery.seq not in skipped and delay_ms:
                    delivery.not_before_ms = sent_ms + delay_ms

    def extending(self, deliveries: Iterable[Delivery], *, lease_ms: int) -> None:
        with self._lock:
            for delivery in deliveries:
                delivery.until_ms = min(delivery.until_ms, now_ms() + lease_ms)

    def extended(self, deliveries: Sequence[Delivery], deadlines: dict[str, int]) -> None:
        with self._lock:
            for delivery in deliveries:
                if (deadline := deadlines.get(str(delivery.seq))) is not None:
                    delivery.told.append(now_ms())
                    delivery.until_ms = deadline

    def stream_ended(self, deliveries: Iterable[Delivery]) -> None:
        """Nobody knows when the server noticed."""
        with self._lock:
            for delivery in deliveries:
                delivery.given_up_ms = delivery.until_ms = delivery.got_ms

    def _give_up(self, deliveries: Iterable[Delivery]) -> None:
        with self._lock:
            for delivery in deliveries:
                if delivery.given_up_ms is None:
                    delivery.given_up_ms = now_ms()

    def _may_be_forgotten(self, delivery: Delivery) -> bool:
        if self.leases_durable:
            return False
        times = [(start - FORGETFUL_MS, end + FORGETFUL_MS) for start, end in self.upsets]
        return any(start <= told <= end for start, end in times for told in delivery.told)

    def _cut(self, delivery: Delivery, before_ms: float) -> bool:
        return delivery.stream and any(delivery.sent_ms <= at <= before_ms for at in self.stream_cuts)

    # --- the reckoning ---

    def check_leases(self) -> None:
        for deliveries in self.deliveries.values():
            for delivery in deliveries:
                for other in deliveries:
                    if other is not delivery and not self._may_be_forgotten(delivery):
                        self._check_pair(delivery, other)
        for seq, (delivery, _) in self.done.items():
            for other in self.deliveries[seq]:
                if other.deliveries > delivery.deliveries and not self._may_be_forgotten(other):
                    raise AssertionError(f"{self.queue}: {delivery} was acked and counted, but there was {other}")

    def _check_pair(self, delivery: Delivery, other: Delivery) -> None:
        case = f"{self.queue}: {delivery}; and {other}"
        if other.sent_ms >= delivery.got_ms:
            assert other.deliveries > delivery.deliveries, f"the counter does not count. {case}"
        if other.deliveries <= delivery.deliveries:
            return
        held = delivery.given_up_ms is None or delivery.given_up_ms > other.got_ms
        if held and other.got_ms < delivery.until_ms - SLACK_MS and not self._cut(delivery, other.got_ms):
            raise AssertionError(f"two holders at once. {case}")
        if other.got_ms < delivery.not_before_ms - SLACK_MS:
            raise AssertionError(f"before its delay was over, at {delivery.not_before_ms:.0f}. {case}")

    def check_fates(self, *, left: Iterable[int] = (), dead: Iterable[int] = ()) -> None:
        """left, dead: numbers of the jobs in the queue and in its dead letter."""
        left, dead = set(left), set(dead)
        lost = []
        for number, seq in self.produced.items():
            acked = seq in self.done
            assert not (acked and number in left), f"{self.queue}: acked and still there: {self.done[seq][0]}"
            if acked and number in dead:
                self._check_dead(self.done[seq][0], self.done[seq][1])
            maybe = any(delivery.ack_lost for delivery in self.deliveries.get(seq, ()))
            if not (acked or maybe or number in left or number in dead):
                lost.append((number, [str(each) for each in self.deliveries.get(seq, ())]))
        CHECKED.add(len(self.produced))
        LOST.add(len(lost))
        assert not lost, f"{self.queue}: {len(lost)} of {len(self.produced)} jobs are nowhere: {lost[:5]}"
        assert left | dead <= self.produced.keys(), "jobs that nobody was told of"

    def _check_dead(self, delivery: Delivery, answered_ms: float) -> None:
        """A late ack of an expired lease may count after a move that was begun and cut short by a death."""
        late = answered_ms > delivery.until_ms - SLACK_MS
        assert late and self.upsets, f"{self.queue}: acked and in the dead letter: {delivery}"  # noqa: PT018

    def statistics(self) -> str:
        lost = sum(each.ack_lost for some in self.deliveries.values() for each in some)
        again = sum(len(some) > 1 for some in self.deliveries.values())
        return (
            f"{self.queue}: {len(self.produced)} produced, {len(self.done)} acked, {lost} acks without an answer, "
            f"{again} jobs delivered again"
        )


# --- who takes part ----------------------------------------------------------------------------------


class Producer(Actor):
    def __init__(self, world: World, ledger: Ledger, *, seed: int, pace_s: float = 0.01, most_open: int = MOST_OPEN):
        super().__init__(world)
        self._ledger = ledger
        self._rng = random.Random(seed)
        self._pace_s = pace_s
        self._most_open = most_open
        self._batch: list[int] = []
        self.start()

    def step(self, client: Client) -> None:
        ledger = self._ledger
        if not self._batch:
            if ledger.resting or ledger.open > self._most_open:
                time.sleep(PAUSE_S)
                return
            self._batch = ledger.numbers(self._rng.choice((1, 1, 3, 12)))
        answer = client.append(ledger.queue, *map(job, self._batch), idempotency_key=f"k{self._batch[0]}")
        if answer.ok:
            ledger.acknowledged(self._batch, answer.body["first_seq"])
            self._batch = []
            time.sleep(self._pace_s)
        else:
            assert answer.status in (429, 503), answer
            time.sleep(PAUSE_S)

    def finish(self) -> None:
        """What was sent once is sent until it is known."""
        eventually(lambda: self.error or self._at_rest(), what="a batch acknowledged")
        super().finish()

    def _at_rest(self) -> bool:
        self._most_open = -1
        return not self._batch


class _Holder(Actor):
    """Whoever holds leases, and says what becomes of them."""

    def __init__(self, world: World, ledger: Ledger, node: str, *, seed: int) -> None:
        super().__init__(world)
        self.ledger = ledger
        self.node = node
        self._rng = random.Random(seed)
        self._again: list[list[Delivery]] = []  # acks to be repeated
        self.acked = 0

    def _claim(self, client: Client, **fields: Any) -> list[Delivery]:
        sent = now_ms()
        answer = claim(client, self.ledger.queue, self.node, **fields)
        got = now_ms()
        if not answer.ok:
            assert answer.status in (429, 503), answer
            time.sleep(PAUSE_S)
            return []
        page = answer.body
        assert page["count"] == len(page["claimed"])
        seqs = [entry["$seq"] for entry in page["claimed"]]
        assert seqs == sorted(seqs), seqs
        return [self.ledger.delivered(entry, self.node, sent_ms=sent, got_ms=got) for entry in page["claimed"]]

    def _say(
        self, client: Client, verb: str, deliveries: Sequence[Delivery], *, late: bool = False, **fields: Any
    ) -> Answer:
        # Without its lease_id a late word would be taken for a later delivery to the same node.
        if late or self._rng.random() < 0.6:
            fields["lease_ids"] = [delivery.lease_id for delivery in deliveries]
        return say(client, verb, self.ledger.queue, self.node, [each.seq for each in deliveries], **fields)

    def _ack(self, client: Client, deliveries: list[Delivery], *, late: bool = False) -> bool:
        """Whether there was an answer; otherwise it is tried again."""
        self.ledger.acking(deliveries)
        try:
            answer = self._say(client, "ack", deliveries, late=late)
        except NoAnswer:
            self._lost(deliveries)
            raise
        if answer.ok:
            page = answer.body
            skipped = page["skipped"]
            assert page["acked"] == len(deliveries) - len(skipped), page
            assert set(skipped) <= {delivery.seq for delivery in deliveries}, page
            self.ledger.acked(deliveries, skipped)
            self.acked += page["acked"]
            return True
        assert answer.status in (429, 503), answer
        if answer.outcome_unknown:
            self._lost(deliveries)
        else:
            self._again.append(deliveries)
        time.sleep(PAUSE_S)
        return False

    def _lost(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            delivery.ack_lost = True
        self._again.append(deliveries)

    def _nack(self, client: Client, deliveries: list[Delivery], delay_ms: int) -> None:
        self.ledger.nacking(deliveries)
        sent = now_ms()
        answer = self._say(client, "nack", deliveries, delay_ms=delay_ms)
        if answer.ok:
            self.ledger.nacked(deliveries, answer.body["skipped"], sent_ms=sent, delay_ms=delay_ms)
        else:
            assert answer.status in (429, 503), answer
            time.sleep(PAUSE_S)

    def _extend(self, client: Client, deliveries: list[Delivery], lease_ms: int) -> None:
        self.ledger.extending(deliveries, lease_ms=lease_ms)
        answer = self._say(client, "extend", deliveries, lease_ms=lease_ms)
        if answer.ok:
            page = answer.body
            assert len(page["deadlines"]) == page["extended"] == len(deliveries) - len(page["skipped"]), page
            self.ledger.extended(deliveries, page["deadlines"])
        else:
            assert answer.status in (429, 503), answer
            time.sleep(PAUSE_S)

    def wait_acked(self, more: int) -> None:
        goal = self.acked + more
        eventually(lambda: self.error or self.acked >= goal, what=f"{more} more acks of {self.node}")
        if self.error is not None:
            raise self.error


class Worker(_Holder):
    """Polls. Most jobs are done; some are given back, some kept for longer, some forgotten, some done too late."""

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        node: str,
        *,
        seed: int,
        leases_ms: Sequence[int] = (300, 1_000, 2_500),
        pace_s: float = 0.01,
    ) -> None:
        super().__init__(world, ledger, node, seed=seed)
        self._leases_ms = leases_ms
        self._pace_s = pace_s
        self._late: list[tuple[float, list[Delivery]]] = []
        self.start()

    def step(self, client: Client) -> None:
        rng = self._rng
        if self.ledger.resting:
            time.sleep(PAUSE_S)
            return
        if self._again:
            self._ack(client, self._again.pop(0), late=True)
            return
        if self._late and now_ms() > self._late[0][0]:
            self._ack(client, self._late.pop(0)[1], late=True)
            return
        lease_ms = rng.choice(self._leases_ms)
        held = self._claim(client, max=rng.choice((1, 1, 4, 16)), lease_ms=lease_ms)
        bad = [delivery for delivery in held if self.ledger.poison(delivery.number)]
        good = [delivery for delivery in held if not self.ledger.poison(delivery.number)]
        if bad and rng.random() < 0.8:  # others expire
            self._nack(client, bad, 0)
        if good:
            self._work(client, good)
        time.sleep(self._pace_s)

    def _work(self, client: Client, held: list[Delivery]) -> None:
        dice = self._rng.random()
        if dice < 0.08:
            self._nack(client, held, self._rng.choice((0, 0, 300)))
        elif dice < 0.16:
            self._extend(client, held, self._rng.choice((600, 2_000)))
            self._ack(client, held)
        elif dice < 0.20:
            return
        elif dice < 0.24:
            self._late.append((held[0].until_ms + 20, held))
            self._late.sort(key=lambda due: due[0])
        elif dice < 0.5 and len(held) > 1:
            self._ack(client, held[1::2])
            self._ack(client, held[::2])
        else:
            self._ack(client, held)


class Streamer(_Holder):
    """Has jobs pushed over /work. Its stream outlives everything but its gateway; then it opens another one."""

    def __init__(self, world: World, ledger: Ledger, node: str, *, seed: int, most: int = 5) -> None:
        super().__init__(world, ledger, node, seed=seed)
        self._most = most
        self._stream: Stream | None = None
        self._held: list[Delivery] = []
        self.streams = 0
        self.start()

    def step(self, client: Client) -> None:
        if self.ledger.resting:
            time.sleep(PAUSE_S)
            return
        if self._again:
            self._ack(client, self._again.pop(0), late=True)
            return
        if self._stream is None:
            self._stream = Stream(self.world.server, self.ledger.queue, self.node, max=self._most, lease_ms=20_000)
            self.streams += 1
        try:
            entries = self._stream.jobs()
        except NoAnswer:
            self._stream.close()
            self._stream = None
            self.ledger.stream_ended(self._held)
            self._held = []
            return
        got = now_ms()
        for entry in entries:
            opened = self._stream.opened_ms
            self._held.append(self.ledger.delivered(entry, self.node, sent_ms=opened, got_ms=got, stream=True))
        if self._held and self._rng.random() < 0.7:
            some = self._held[: self._rng.randint(1, len(self._held))]
            del self._held[: len(some)]
            bad = [delivery for delivery in some if self.ledger.poison(delivery.number)]
            good = [delivery for delivery in some if not self.ledger.poison(delivery.number)]
            if self._rng.random() < 0.1:
                bad, good = some, []
            if bad:
                self._nack(client, bad, 0)
            if good:
                self._ack(client, good)

    def finish(self) -> None:
        super().finish()
        if self._stream is not None:
            self.ledger.stream_ended(self._held)
            self._stream.close()


class Stream:
    """One /work stream over HTTP/1.1; NoAnswer when it has ended."""

    def __init__(self, server: Server, queue: str, node: str, *, patience_s: float = 10, **query: Any) -> None:
        options = "".join(f"&{name}={value}" for name, value in query.items())
        self.opened_ms = now_ms()
        self._raw = b""
        port = server.port
        self._socket = socket.socket()
        try:
            self._socket.settimeout(patience_s)
            self._socket.connect(("127.0.0.1", port))
            self._socket.sendall(
                f"GET /v0/topics/{queue}/work?node={node}{options} HTTP/1.1\r\nHost: localhost\r\n"
                "Accept: text/event-stream\r\n\r\n".encode()
            )
            while b"\r\n\r\n" not in self._raw:
                self._receive()
        except OSError as error:
            self.close()
            raise NoAnswer(f"work: {error!r}") from error
        except NoAnswer:
            self.close()
            raise
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            self.close()
            assert status in (429, 503), (head, self._raw)
            time.sleep(PAUSE_S)
            raise NoAnswer(f"work: {head!r}")
        assert b"transfer-encoding" not in head.lower(), head  # it ends with its connection

    def _receive(self) -> None:
        if not (data := self._socket.recv(1 << 16)):
            raise NoAnswer("work: the stream has ended")
        self._raw += data

    def jobs(self, *, within_s: float = 0.05) -> list[dict[str, Any]]:
        """What is there now; waits a moment for the first of it."""
        self._socket.settimeout(within_s)
        try:
            self._receive()
        except TimeoutError:
            pass
        except OSError as error:
            raise NoAnswer(f"work: {error!r}") from error
        *frames, self._raw = self._raw.split(b"\n\n")
        return [entry for frame in frames if (entry := self._job(frame)) is not None]

    @staticmethod
    def _job(frame: bytes) -> dict[str, Any] | None:
        fields = dict(line.split(b": ", 1) for line in frame.split(b"\n") if not line.startswith(b":"))
        if fields.get(b"event") == b"job":
            entry: dict[str, Any] = json.loads(fields[b"data"])
            assert int(fields[b"id"]) == entry["$seq"], frame
            return entry
        if b"event" in fields:
            raise NoAnswer(f"work: {frame!r}")
        return None

    def wait_jobs(self, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def enough() -> bool:
            found.extend(self.jobs())
            return len(found) >= count

        eventually(enough, what=f"{count} jobs on a stream")
        assert len(found) == count, found
        return found

    def has_ended(self) -> bool:
        """Whatever still comes is not looked at."""
        try:
            self.jobs()
        except NoAnswer:
            return True
        return False

    def close(self) -> None:
        self._socket.close()


# --- all of it ---------------------------------------------------------------------------------------


class Fleet:
    """Queues of one world, each with its ledger, producers and workers."""

    def __init__(self, world: World, *, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.ledgers: list[Ledger] = []
        self.producers: list[Producer] = []
        self.holders: list[_Holder] = []

    def _seed(self) -> int:
        return self.rng.randrange(1 << 30)

    def queue(
        self,
        name: str,
        *,
        leases_durable: bool,
        workers: int = 2,
        streams: int = 1,
        producers: int = 1,
        pace_s: float = 0.01,
        poison: Callable[[int], bool] = lambda number: False,
        leases_ms: Sequence[int] = (300, 1_000, 2_500),
        **config: Any,
    ) -> Ledger:
        make_queue(self.world, name, leases_durable=leases_durable, **config)
        ledger = Ledger(name, leases_durable=leases_durable, dead_letter=config.get("dead_letter"), poison=poison)
        self.ledgers.append(ledger)
        for _ in range(producers):
            self.producers.append(Producer(self.world, ledger, seed=self._seed(), pace_s=pace_s))
        for at in range(workers):
            self.holders.append(
                Worker(self.world, ledger, f"worker-{at}", seed=self._seed(), leases_ms=leases_ms, pace_s=pace_s)
            )
        for at in range(streams):
            self.holders.append(Streamer(self.world, ledger, f"stream-{at}", seed=self._seed()))
        return ledger

    def raise_errors(self) -> None:
        for actor in (*self.producers, *self.holders):
            if actor.error is not None:
                raise actor.error

    def wait_acked(self, more: int) -> None:
        """So many more jobs done in every queue."""
        goals = {ledger: len(ledger.done) + more for ledger in self.ledgers}

        def enough() -> bool:
            self.raise_errors()
            return all(len(ledger.done) >= goal for ledger, goal in goals.items())

        eventually(enough, what=f"{more} more acks in each queue")

    def moved(self, ledger: Ledger) -> int:
        """How many jobs are in the dead letter."""
        self.raise_errors()
        answer = self.world.insist(lambda client: client.get(ledger.dead_letter or ""))
        if answer.ok:
            ledger.dead = answer.body["count"]
        return ledger.dead

    def kill(self, victims: str, **how: Any) -> None:
        """Processes joined by "+", `tree` or `supervisor`; until everything is there again. how: of the next life."""
        start = now_ms()
        whole = victims in ("tree", "supervisor")
        names = victims.split("+")
        upset = (start, float("inf"))
        for ledger in self.ledgers:
            if whole or any(name.startswith("gateway") for name in names):
                ledger.stream_cuts.append(start)
            ledger.upsets.append(upset)
        if whole:
            if victims == "supervisor":
                end_supervisor(self.world.server)
            self.world.restart("kill", **how)
        else:
            kill_processes(self.world, names)
        for ledger in self.ledgers:
            ledger.upsets.remove(upset)
            if whole or not all(name.startswith(("gateway", "router")) for name in names):
                ledger.upsets.append((start, now_ms()))

    def finish(self) -> None:
        for actor in (*self.producers, *self.holders):
            actor.finish()

    def drain(self, *, within_s: float = 30.0) -> None:
        """Do what is left, wait for what is still leased, and settle the accounts."""
        for ledger in self.ledgers:
            drainer = Drainer(self.world, ledger, "drainer", seed=self._seed())
            try:
                eventually(
                    lambda ledger=ledger, drainer=drainer: (
                        drainer.error or counters(self.world, ledger.queue)["count"] == 0
                    ),
                    within_s=within_s,
                )
            except AssertionError:
                shown = counters(self.world, ledger.queue)
                raise AssertionError(f"{ledger.queue} does not get empty: {shown}\n{ledger.statistics()}") from None
            finally:
                drainer.finish()
            shown = counters(self.world, ledger.queue)
            assert (shown["ready"], shown["in_flight"], shown["count"]) == (0, 0, 0), shown
            self.settle(ledger)

    def settle(self, ledger: Ledger) -> None:
        """An empty queue."""
        dead: list[int] = []
        if ledger.dead_letter is not None:
            dead = [number for number, _ in dead_jobs(self.world, ledger)]
            assert len(dead) == len(set(dead)), f"twice in {ledger.dead_letter}: {sorted(dead)}"
        print(ledger.statistics(), f"{len(dead)} in the dead letter")
        ledger.check_fates(dead=dead)
        ledger.check_leases()


class Drainer(_Holder):
    def __init__(self, world: World, ledger: Ledger, node: str, *, seed: int) -> None:
        super().__init__(world, ledger, node, seed=seed)
        self.start()

    def step(self, client: Client) -> None:
        if self._again:
            self._ack(client, self._again.pop(0), late=True)
            return
        held = self._claim(client, max=100, lease_ms=10_000)
        bad = [delivery for delivery in held if self.ledger.poison(delivery.number)]
        good = [delivery for delivery in held if not self.ledger.poison(delivery.number)]
        if bad:
            self._nack(client, bad, 0)
        if good:
            self._ack(client, good)
        time.sleep(PAUSE_S)


class Auditor(Actor):
    """A job that nobody has tried to ack is in the queue or in its dead letter, whenever one looks: there first, and
    here after that, because a move writes before it deletes."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        super().__init__(world)
        self._ledger = ledger
        self.audits = 0
        self.start()

    def step(self, client: Client) -> None:
        ledger = self._ledger
        known = dict(ledger.produced)
        found = set(self._numbers(client, ledger.queue))
        if ledger.dead_letter is not None:
            found.update(self._numbers(client, ledger.dead_letter))
        missing = [number for number, seq in known.items() if number not in found and seq not in ledger.ack_sent]
        LOST.add(len(missing))  # looked for again and again: check_fates counts how many are owed
        assert not missing, f"{ledger.queue}: neither there nor in {ledger.dead_letter}: {missing[:10]}"
        self.audits += 1
        time.sleep(PAUSE_S)

    @staticmethod
    def _numbers(client: Client, topic: str) -> list[int]:
        numbers: list[int] = []
        at = 0
        while True:
            answer = client.diff(topic, at, limit=1_000)
            if answer.status == 404:
                return numbers
            if not answer.ok:
                assert answer.status in (429, 503), answer
                raise NoAnswer(f"{answer}")  # another time
            page = answer.body
            numbers += [record["data"]["n"] for record in page["records"]]
            at = page["next_from_seq"]
            if page["caught_up"]:
                return numbers


def kill_processes(world: World, names: Sequence[str]) -> None:
    """kill -9 of all of these at once, until their successors serve."""
    server = world.server
    before = {name: server.restarts(name) for name in names}
    for name in names:
        server.signal_child(name)
    for name in names:
        eventually(
            lambda name=name: server.restarts(name) > before[name] and server.state(name) is State.READY,
            what=f"{name} back",
        )
    server.wait_ready()


def end_supervisor(server: Server) -> None:
    """kill -9 of the supervisor alone; its children have to follow."""
    children = children_of(server.pid)
    server.popen.kill()
    KILLS.add()
    server.popen.wait()
    eventually(lambda: all(map(gone, children)), what="the children gone")


def numbers_in(world: World, topic: str) -> list[int]:
    return [record["data"]["n"] for record in world.read(topic) if "data" in record]


def dead_jobs(world: World, ledger: Ledger) -> list[tuple[int, dict[str, Any]]]:
    """The jobs in a queue's dead letter, with their meta: where each one came from."""
    assert ledger.dead_letter is not None
    if world.insist(lambda client: client.get(ledger.dead_letter or "")).status == 404:
        return []
    found = []
    for record in world.read(ledger.dead_letter):
        number, meta = record["data"]["n"], record["meta"]
        assert record["data"] == job(number)
        assert meta["$dead_letter_from"] == ledger.queue, record
        source_seq = int(meta["$dead_letter_src_seq"])
        assert ledger.produced.get(number, source_seq) == source_seq, record
        found.append((number, meta))
    return found
