"""Random histories of a real server, with a checker: all operations, all classes, and everything that can happen to it.

A history is a list of operations that grows from a seed, each with the client that does it and the time at which it is
due. Clients write, delete, configure, drop and make topics again, read, claim and ack; routers copy in a chain and in a
ring. Somebody kills processes, lets them stand still, fills the disk, reloads, restarts and changes the number of
shards. When it is quiet again everything is checked, then all processes are killed, and it is checked once more.

    topic                            held to
    log of any class                 crash_oracle.py: acknowledged batches, deletes, configs, drops; ephemeral ones: no
                                     seq is given to two batches
    a -> b -> c                      b: each record of a once, in order, and each that was written to b; c: as b
    r1 <-> r2                        each record that was written to either is once in both
    queue                            a job is acked by one answer at most, and delivered until then
    a copy that was read             keeps its seq
    every request                    is answered within 20 s, and with a 5xx only while something is away

The same seed is the same list. What the kernel does in which order is not repeated: a failure may need several runs.
A history that fails is run again, shorter and shorter, some times, and the shortest that failed is kept as JSON:
`--only FILE` runs it. The log of its server lies beside it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from crash_oracle import Fate, Oracle, TopicLedger
from crash_server import TOPICS, Answer, Client, NoAnswer, Server, eventually

from topics.shm.counters import State, Word

from .campaign import Campaign, Finding, Tally
from .shrinking import shrink

SECONDS = 30.0
CLIENTS = 4
EVERY_MS = 25  # of a client
DISK_BYTES = 96 << 20
PATIENCE_S = 20.0
TRIES = 6  # to make a failing history shorter
CALM_AFTER_S = 1.0  # when everything is ready again: until everybody has heard of it
MOST_DEATHS = 4  # of one process in one life: after that it stays down

LOGS = {"f0": "fsync", "f1": "fsync", "d0": "disk", "d1": "disk", "m0": "memory", "e0": "ephemeral", "cap0": "disk"}
AGAIN = ("again0", "again1")  # dropped and made again
DIRECT = ("a", "b", "r1", "r2")
COPIES = "c"  # written by a router only
ROUTES = (("a", "b"), ("b", "c"), ("r1", "r2"), ("r2", "r1"))
QUEUE = "jobs"
HOUR_MS = 3_600_000


class Wrong(AssertionError):
    pass


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    at_ms: int
    who: int  # a client; -1: whoever makes trouble
    what: str
    topic: str = ""
    number: int = 0


# --- the list ----------------------------------------------------------------------------------------


def plan(seed: int, seconds: float = SECONDS) -> list[Operation]:
    dice = random.Random(f"walks/{seed}")
    found: list[Operation] = []
    homes = {name: at % CLIENTS for at, name in enumerate((*LOGS, *AGAIN, *DIRECT, QUEUE, COPIES))}
    for who in range(CLIENTS):
        mine = [name for name, home in homes.items() if home == who]
        at = 0.0
        while at < seconds * 1_000:
            topic = dice.choice(mine)
            found.append(Operation(int(at), who, _what(dice, topic), topic, dice.randint(1, 12)))
            at += dice.expovariate(1 / EVERY_MS)
    at = dice.uniform(500, 2_500)
    while at < seconds * 1_000:
        what = dice.choices(
            ("kill", "pair", "tree", "pause", "fill", "reload", "restart", "reshard"), (30, 10, 6, 14, 8, 6, 4, 4)
        )[0]
        found.append(Operation(int(at), -1, what, number=dice.randrange(1 << 16)))
        at += dice.uniform(600, 3_500)
    return sorted(found, key=lambda each: each.at_ms)


def _what(dice: random.Random, topic: str) -> str:
    if topic == QUEUE:
        return dice.choice(("produce", "claim", "claim"))
    if topic == COPIES:
        return "look"
    if topic in DIRECT:
        return dice.choices(("write", "look"), (6, 1))[0]
    if topic == "cap0":
        return dice.choice(("append", "append", "read"))
    if topic in AGAIN:
        return dice.choices(("append", "recreate", "read"), (20, 1, 3))[0]
    return dice.choices(
        ("append", "keyed", "delete_tag", "delete_before", "put", "read", "long"), (40, 15, 5, 2, 2, 10, 3)
    )[0]


# --- the world ---------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class World:
    """The folder, perhaps on a small disk of its own, and the server that there is now."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.mount = base / "disk"
        self.mount.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "topics-walk", str(self.mount)]
        try:
            self.small = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            self.small = False
        self.port = free_port()
        self.shards = 2
        self.deaths: Counter[str] = Counter()
        self._server: Server | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    def _start(self) -> None:
        env = {
            "TOPICS_PORT": str(self.port),
            "TOPICS_WAL_FILE_BYTES": str(1 << 20),
            "TOPICS_SEGMENT_MAX_EVENTS": "200",
            "TOPICS_MIN_FREE_BYTES": "0",
            "TOPICS_CACHE_BYTES": str(256 << 10),
        }
        self.deaths.clear()
        self._server = Server(self.mount / "data", shards=self.shards, env=env, beside=self.base)
        self._server.wait_ready()

    def restart(self, *, kill: bool, shards: int | None = None) -> None:
        if kill:
            self.server.kill()
        elif (code := self.server.stop()) != 0:
            raise Wrong(f"a stop ended with {code}:\n{self.server.log()[-2_000:]}")
        self.shards = shards or self.shards
        self._start()

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.mount / "filler").open("ab", buffering=0) as file:
            while file.write(bytes(65_536)):
                pass

    def free(self) -> None:
        (self.mount / "filler").unlink(missing_ok=True)

    def level(self, killed: set[int]) -> bool:
        """Whether nothing is away: all processes are there, not those that were killed, and clients are served."""
        rows = [row for row in self.server.board.rows() if row.name]
        if any(row.state is not State.READY or row[Word.PID] in killed for row in rows if row.name != "supervisor"):
            return False
        try:
            return self.server.ready().ok
        except NoAnswer:
            return False

    def close(self) -> None:
        try:
            if self._server is not None:
                self._server.close()
        finally:
            if self.small:
                subprocess.run(["umount", "--lazy", str(self.mount)], check=False)


class Refusal(msgspec.Struct, frozen=True):
    """An answer with a 5xx."""

    sent: float
    answered: float
    what: str


class Witness(Client):
    """A client that notes which answers blame the server."""

    def __init__(self, port: int, refusals: list[Refusal], *, timeout_s: float) -> None:
        super().__init__(port, timeout_s=timeout_s)
        self._refusals = refusals

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        sent = time.monotonic()
        answer = super().call(method, path, body)
        if answer.status >= 500:
            what = f"{method} {path}: {answer.status} {answer.raw[:200]!r}"
            self._refusals.append(Refusal(sent, time.monotonic(), what))
        return answer


def unexcused(refusals: Sequence[Refusal], away: Sequence[tuple[float, float]]) -> list[Refusal]:
    """Those that were given while nothing was away; away: from, until."""
    return [
        each
        for each in refusals
        if not any(since <= each.answered and each.sent <= until + CALM_AFTER_S for since, until in away)
    ]


# --- who does it -------------------------------------------------------------------------------------


class Walk:
    def __init__(self, operations: list[Operation], base: Path, tally: Tally) -> None:
        self.operations = operations
        self.tally = tally
        self.world = World(base)
        self.oracle = Oracle()
        self.ledgers: dict[str, TopicLedger] = {}
        self.written: dict[str, list[str]] = {name: [] for name in DIRECT}  # answered, in order
        self.produced: dict[int, int] = {}
        self.acked: dict[int, float] = {}
        self.unsure: set[int] = set()
        self.stopping = threading.Event()
        self.seen: dict[str, dict[int, str]] = {name: {} for name in (*DIRECT, COPIES)}
        self.refusals: list[Refusal] = []
        self.away: list[tuple[float, float]] = []
        self._away_since: float | None = None
        self._killed: set[int] = set()  # pids
        self._errors: list[BaseException] = []
        self._generation: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._tags: dict[str, list[str]] = {}

    def run(self) -> None:
        try:
            self._furnish()
            began = time.monotonic()
            threads = [
                threading.Thread(target=self._follow, args=(who, began), daemon=True) for who in range(-1, CLIENTS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SECONDS + 120)
                if thread.is_alive():
                    raise Wrong("a client hangs")
            if self._errors:
                raise self._errors[0]
            self.tally.add("seconds", round(time.monotonic() - began))
            self._quiet()
            self._check_refusals()
            self._check("when it was quiet")
            self.world.restart(kill=True)
            self.oracle.restarted()
            self._check("after a kill of all")
        finally:
            self.stopping.set()
            self.world.close()

    def _furnish(self) -> None:
        client = self.world.server.client()
        for name, durability in {**LOGS, **dict.fromkeys(AGAIN, "disk"), "a": "fsync"}.items():
            config = {"cap_records": 37} if name == "cap0" else {}
            if name == "a":
                assert client.put(name, durability=durability).ok
            else:
                self.ledgers[name] = self.oracle.create(
                    client, name, durability, idempotency_window_ms=HOUR_MS, **config
                )
        for name in ("b", "c", "r1", "r2"):
            assert client.put(name, durability="disk", idempotency_window_ms=HOUR_MS).ok
        assert client.put(
            QUEUE, type="queue", durability="fsync", lease_ms=1_500, leases_durable=True, idempotency_window_ms=HOUR_MS
        ).ok
        for source, dest in ROUTES:
            body = {"source": source, "dest": dest, **({"allow_cycle": True} if source.startswith("r") else {})}
            answer = client.call("PUT", f"/v0/routers/{source}-{dest}", body)
            assert answer.ok, answer.raw
        client.close()

    def _follow(self, who: int, began: float) -> None:
        client = Witness(self.world.port, self.refusals, timeout_s=PATIENCE_S)
        try:
            for operation in self.operations:
                if operation.who != who:
                    continue
                if who < 0:
                    self._wait_level(began + operation.at_ms / 1_000)
                delay = began + operation.at_ms / 1_000 - time.monotonic()
                if self.stopping.wait(max(0.0, delay)):
                    return
                if who < 0:
                    if self._away_since is None:
                        self._away_since = time.monotonic()
                    self._trouble(operation)
                    continue
                sent = time.monotonic()
                try:
                    self._do(client, operation)
                except NoAnswer as error:
                    if time.monotonic() - sent > PATIENCE_S - 0.5:
                        raise Wrong(f"{operation}: no answer within {PATIENCE_S:.0f} s: {error}") from error
                    time.sleep(0.02)
                self.tally.add(f"op_{operation.what}")
        except BaseException as error:
            self._errors.append(error)
            self.stopping.set()
        finally:
            client.close()

    def _wait_level(self, until: float) -> None:
        """Until nothing is away, or somebody makes trouble again."""
        while self._away_since is not None and time.monotonic() < until and not self.stopping.wait(0.02):
            if self.world.level(self._killed):
                self.away.append((self._away_since, time.monotonic()))
                self._away_since = None

    def _check_refusals(self) -> None:
        if self._away_since is not None:
            self.away.append((self._away_since, time.monotonic()))
        self.tally.add("refusals", len(self.refusals))
        self.tally.add("away_ms", round(1_000 * sum(until - since for since, until in self.away)))
        if found := unexcused(self.refusals, self.away):
            raise Wrong(f"a request is refused while nothing is away: {found[0].what}; {len(found)} of them")

    # --- clients ---

    def _do(self, client: Client, operation: Operation) -> None:
        name, number = operation.topic, operation.number
        ledger = self.ledgers.get(name)
        match operation.what:
            case "append" | "keyed" | "long":
                assert ledger is not None
                tag = f"{name}/{self._generation[name]}" if number % 3 == 0 else None
                padding = "x" * (4_000 if operation.what == "long" else number * 7)
                key = None
                if operation.what == "keyed":
                    self._sent[name] += 1
                    key = f"{name}-{self._sent[name]}"
                if tag is not None:
                    self._tags.setdefault(name, []).append(tag)
                batch = ledger.append(client, [(padding, tag, None)] * number, key)
                if batch.fate is not Fate.ACKED:
                    self._generation[name] += 1
                    time.sleep(0.02)
            case "delete_tag":
                assert ledger is not None
                if tags := self._tags.pop(name, []):
                    self._generation[name] += 1
                    ledger.delete(client, tags=[tags[-1]], match=["tag", "Eq", tags[-1]])
            case "delete_before":
                assert ledger is not None
                if ledger.highest_acked > 100:
                    ledger.delete(client, before_seq=ledger.highest_acked - 100 + number)
            case "put":
                assert ledger is not None
                ledger.put(client, idempotency_window_ms=HOUR_MS, priority=number)
            case "read":
                self._read(client, name)
            case "look":
                self._look(client, name, number)
            case "recreate":
                self._recreate(client, name)
            case "write":
                self._sent[name] += 1
                text = f"{name}-{self._sent[name]}"
                body = {"records": [{"data": text}], "idempotency_key": text}
                answer = self._insist(client, lambda: client.call("POST", f"/v0/topics/{name}", body))
                if answer is not None and answer.ok:
                    self.written[name].append(text)
            case "produce":
                self._sent[name] += 1
                number = self._sent[name]
                key = f"job-{number}"
                body = {"records": [{"data": key}], "idempotency_key": key}
                answer = self._insist(client, lambda: client.call("POST", f"/v0/topics/{QUEUE}", body))
                if answer is not None and answer.ok:
                    self.produced[number] = answer.body["first_seq"]
            case "claim":
                self._claim(client)

    def _insist(self, client: Client, call: Callable[[], Answer]) -> Answer | None:
        """Until it is answered with yes or no; None: the run is over."""
        while not self.stopping.is_set():
            try:
                answer = call()
                if answer.status < 500 and answer.status != 429:
                    return answer
            except NoAnswer:
                pass
            time.sleep(0.03)
        return None

    def _read(self, client: Client, name: str) -> None:
        answer = client.diff(name, 0, limit=50)
        if answer.ok:
            seqs = [record["$seq"] for record in answer.body["records"]]
            if seqs != sorted(set(seqs)):
                raise Wrong(f"{name}: a read answers with seqs {seqs}")

    def _look(self, client: Client, name: str, number: int) -> None:
        """At the last records, and some that were read before."""
        seen = self.seen[name]
        answer = client.diff(name, max(0, max(seen, default=0) - number), limit=100)
        if answer.ok:
            if answer.body["tombstone"] is not None:
                raise Wrong(f"{name}: {answer.body['tombstone']} though nothing may have gone")
            self._see(name, [(record["$seq"], record["data"]) for record in answer.body["records"]])

    def _see(self, name: str, records: list[tuple[int, str]]) -> None:
        for seq, text in records:
            if self.seen[name].setdefault(seq, text) != text:
                raise Wrong(f"{name}: seq {seq} is {text}, and was {self.seen[name][seq]}")

    def _recreate(self, client: Client, name: str) -> None:
        gone = self._insist(client, lambda: client.call("DELETE", f"/v0/topics/{name}"))
        if gone is None:
            return
        if not gone.ok and gone.status != 404:
            raise Wrong(f"{name}: a drop is answered with {gone.status} {gone.raw!r}")
        fresh = TopicLedger(self.oracle, name, "disk")
        made = self._insist(client, lambda: fresh.put(client, idempotency_window_ms=HOUR_MS))
        if made is not None:
            self.ledgers[name] = self.oracle.topics[name] = fresh

    def _claim(self, client: Client) -> None:
        sent = time.monotonic()
        claimed = client.call("POST", f"/v0/topics/{QUEUE}/claim", {"node": "w", "max": 5})
        if not claimed.ok:
            return
        seqs = [each["$seq"] for each in claimed.body["claimed"]]
        for seq in seqs:
            if self.acked.get(seq, sent) < sent:
                raise Wrong(f"{QUEUE}: seq {seq} was acked and is delivered again")
        if not seqs:
            return
        self.unsure.update(seqs)
        acked = client.call("POST", f"/v0/topics/{QUEUE}/ack", {"node": "w", "seqs": seqs})
        if acked.ok:
            counted = set(seqs) - set(acked.body["skipped"])
            if twice := counted & self.acked.keys():
                raise Wrong(f"{QUEUE}: {twice} were acked twice")
            self.acked.update(dict.fromkeys(counted, time.monotonic()))
            self.unsure -= counted

    # --- trouble ---

    def _trouble(self, operation: Operation) -> None:
        dice = random.Random(operation.number)
        world = self.world
        names = [row.name for row in world.server.board.rows() if row.name and row.name != "supervisor"]
        self.tally.add("faults")
        self.tally.add(f"fault_{operation.what}")
        match operation.what:
            case "kill" | "pair":
                victims = dice.sample(names, 2 if operation.what == "pair" else 1)
                for name in victims:
                    self._kill(name)
            case "pause":
                name = dice.choice(names)
                pid = world.server.signal_child(name, signal.SIGSTOP)
                self.stopping.wait(dice.choice((0.05, 0.3, 1.0)))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            case "fill" if world.small:
                world.fill()
                self.stopping.wait(dice.uniform(0.2, 1.5))
                if dice.random() < 0.3 and self._kill("shard-0"):
                    self.stopping.wait(0.3)
                world.free()
            case "reload":
                subprocess.run(
                    [TOPICS, "reload", "--data-dir", str(world.server.data_dir)],
                    capture_output=True, timeout=60, check=False,
                )  # fmt: skip
            case "tree":
                world.restart(kill=True)
            case "restart":
                world.restart(kill=False)
            case "reshard":
                world.restart(
                    kill=bool(dice.getrandbits(1)), shards=dice.choice([n for n in (1, 2, 3) if n != world.shards])
                )
            case _:
                pass

    def _kill(self, name: str) -> bool:
        """Unless one more death would keep it down."""
        if self.world.deaths[name] >= MOST_DEATHS:
            return False
        self.world.deaths[name] += 1
        self._killed.add(self.world.server.signal_child(name))
        return True

    # --- the check ---

    def _quiet(self) -> None:
        self.world.free()
        server = self.world.server
        # A gateway that has not heard of a death yet still says that it is ready.
        eventually(
            lambda: not self._killed & {row[Word.PID] for row in server.board.rows()},
            within_s=60,
            what="the killed replaced",
        )
        server.wait_ready(within_s=60)
        for row in server.board.rows():
            if row.name and row.state is State.FAILED:
                raise Wrong(f"{row.name} was given up:\n{server.log()[-2_000:]}")

    def _check(self, when: str) -> None:
        client = self.world.server.client()
        try:
            for ledger in self.ledgers.values():
                if ledger.durability == "ephemeral":
                    continue  # what is left depends on who died when; its seqs were looked at all the time
                try:
                    reading = ledger.check(client)
                except AssertionError as error:
                    raise Wrong(f"{when}: {error}") from error
                self.tally.add("checked", 0 if reading is None else len(reading.records))
            self._check_copies(client, when)
            self._check_jobs(client, when)
        finally:
            client.close()

    def _all(self, client: Client, name: str) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        at = 0
        while True:
            answer = client.diff(name, at, limit=1_000)
            if not answer.ok:
                raise Wrong(f"{name}: a read is answered with {answer.status} {answer.raw[:200]!r}")
            found += [(record["$seq"], record["data"]) for record in answer.body["records"]]
            at = answer.body["next_from_seq"]
            if answer.body["caught_up"]:
                return found

    def _check_copies(self, client: Client, when: str) -> None:
        wanted = {
            "a": self.written["a"],
            "b": self.written["a"] + self.written["b"],
            "c": self.written["a"] + self.written["b"],
            "r1": self.written["r1"] + self.written["r2"],
            "r2": self.written["r1"] + self.written["r2"],
        }

        def there() -> bool:
            return all(len(self._all(client, name)) >= len(texts) for name, texts in wanted.items())

        with contextlib.suppress(AssertionError):
            eventually(there, within_s=20.0, what="copies")
        for name, texts in wanted.items():
            rows = self._all(client, name)
            found = [text for _, text in rows]
            lacking, surplus = Counter(texts) - Counter(found), Counter(found) - Counter(texts)
            if lacking or surplus:
                raise Wrong(
                    f"{when}: destination {name} lacks {len(lacking)} of {len(texts)} records, {sorted(lacking)[:3]}, "
                    f"and has {sum(surplus.values())} too many, {sorted(surplus)[:3]}"
                )
            for source in DIRECT:
                mine = [text for text in found if text.startswith(f"{source}-")]
                if mine != self.written[source] and mine:
                    raise Wrong(f"{when}: {name} has the records of {source} in another order")
            self._see(name, rows)  # each is there once: one at another seq is another record at its own
            if moved := self.seen[name].keys() - dict(rows).keys():
                raise Wrong(f"{when}: {name}: seqs {sorted(moved)[:3]} have been read, and are nobody's now")
            self.tally.add("checked", len(found))

    def _check_jobs(self, client: Client, when: str) -> None:
        left = set(self.produced.values()) - self.acked.keys() - self.unsure
        deadline = time.monotonic() + 20
        while left and time.monotonic() < deadline:
            claimed = client.call("POST", f"/v0/topics/{QUEUE}/claim", {"node": "last", "max": 100})
            seqs = [each["$seq"] for each in claimed.body["claimed"]] if claimed.ok else []
            if again := set(seqs) & self.acked.keys():
                raise Wrong(f"{when}: {QUEUE}: {again} were acked and are delivered again")
            if seqs:
                acked = client.call("POST", f"/v0/topics/{QUEUE}/ack", {"node": "last", "seqs": seqs})
                if acked.ok:
                    self.acked.update(dict.fromkeys(set(seqs) - set(acked.body["skipped"]), time.monotonic()))
            else:
                time.sleep(0.1)
            left.difference_update(seqs)
        if left:
            raise Wrong(f"{when}: {QUEUE}: jobs are lost: {sorted(left)[:5]}")
        self.tally.add("checked", len(self.produced))


# --- the campaign ------------------------------------------------------------------------------------


def play(operations: list[Operation], tally: Tally, *, keep_log: Path | None = None) -> str | None:
    """What was wrong. keep_log: where to put the server's log then."""
    base = Path(tempfile.mkdtemp(prefix="topics-walk-"))
    try:
        Walk(operations, base, tally).run()
    except (Wrong, AssertionError, NoAnswer, subprocess.TimeoutExpired) as wrong:
        with contextlib.suppress(OSError):
            if keep_log is not None:
                shutil.copyfile(base / "data.log", keep_log)
        return f"{wrong}"
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return None


def run(seed: int, only: str | None = None, *, tries: int = TRIES) -> Tally:
    """only: a file of operations instead of those of the seed."""
    tally = Tally()
    operations = plan(seed) if only is None else msgspec.json.decode(Path(only).read_bytes(), type=list[Operation])
    log = Path(tempfile.gettempdir()) / f"topics-walk-{seed}.log"
    wrong = play(operations, tally, keep_log=log)
    tally.add("runs")
    tally.add("operations", len(operations))
    if wrong is None:
        return tally
    if only is not None:
        tally.find(Finding(seed, only, wrong))
        return tally
    # Its operations don't count: they are the same ones again.
    short, used = shrink(operations, lambda fewer: play(fewer, Tally()) is not None, tries=tries)
    kept = Path(tempfile.gettempdir()) / f"topics-walk-{seed}.json"
    kept.write_bytes(msgspec.json.encode(short))
    tally.find(
        Finding(
            seed,
            "",
            f"{wrong}\n    {len(short)} of {len(operations)} operations still fail, after {used} tries:\n"
            f"    .venv/bin/python tests/exhaustive.py --campaign walks --unit {seed} --only {kept}\n"
            f"    the log of the server: {log}",
        )
    )
    return tally


CAMPAIGN = Campaign(
    name="walks",
    title="random histories of a real server with a checker, of at least 30 s each",
    goal=200,
    figure="runs",
    run=run,
    meaning="all operations and classes, routers in a chain and a ring, queues, kills, pauses, full disks, reshards",
)
