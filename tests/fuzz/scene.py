"""The server of a family, what lives in it, and how one sees that nobody hurt it.

Between hostile cases honest ones append numbered records to a topic that no hostile case names; whatever happens, each
of them is answered, and in the end all are there, in order. After every batch: a fresh connection is served, no process
was started again, and no fault is in the log. In the end, after a while without clients: no descriptor more than
before, no stream counted, nobody busy, and as much memory as after the warm-up.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.client import Answer
from e2e.h2wire import H2Wire
from e2e.server import Server, eventually
from e2e.wire import Wire, request
from prometheus_client.parser import text_string_to_metric_families

from . import pages
from .dials import SEED
from .player import Case, Outcome, Player
from .verdict import Wrong, read_replies

CANARY = "honest-Zq7Vw"
HONEST, FULL, READER, INSIDER = "honest-key", "full-access-key", "reader-key", "insider-key"
WRITER = "writer-key"
KEYS = f"{HONEST},{FULL},{READER}:read,{INSIDER}::in:,{WRITER}:read+write"  # the first is not known to hostile clients
SLOTS = 100  # requests of one key at the same time

# Short patience, so that a connection that the server has to give up is given up soon; small limits, so that what
# hostile requests may create legitimately has an end, and memory can be compared.
SETTINGS: dict[str, object] = {
    "TOPICS_WAL_SHARDS": 2,
    "TOPICS_GATEWAYS": 1,
    "TOPICS_ACCESS_LOG": 1,
    "TOPICS_HEAD_TIMEOUT_MS": 400,
    "TOPICS_BODY_TIMEOUT_MS": 600,
    "TOPICS_IDLE_TIMEOUT_MS": 800,
    "TOPICS_MAX_BODY_BYTES": 1 << 22,
    "TOPICS_MAX_RECORD_BYTES": 1 << 18,
    "TOPICS_CACHE_BYTES": 1 << 20,
    "TOPICS_MAX_TOPICS": 300,
    "TOPICS_MAX_ROUTERS": 100,
    "TOPICS_MAX_WATCH_SESSIONS": 200,
    "TOPICS_SESSION_TTL_MS": 5_000,
    "TOPICS_MAX_TOTAL_BYTES": 64 << 20,
    "TOPICS_MAX_INFLIGHT_PER_KEY": SLOTS,
    **pages.ENVIRON,
}

# For families whose clients keep their connections: a busy machine must not make them look slow.
PATIENT: dict[str, Any] = {
    "TOPICS_HEAD_TIMEOUT_MS": 20_000,
    "TOPICS_BODY_TIMEOUT_MS": 20_000,
    "TOPICS_IDLE_TIMEOUT_MS": 20_000,
}

# What memory may grow by between the warm-up and the end. The gateway remembers up to 4096 request heads of up to
# 2 KiB with what they mean, some 6 KiB each, and forgets all of them when there are more: up to 24 MiB that come and
# go. The others keep what was created, which the limits above bound. What the allocator keeps of freed blocks is in
# here too; a leak of one small body per case is not, over some thousands of cases.
MAY_GROW = {"gateway-0": 40 << 20}
MAY_GROW_ELSE = 24 << 20
SETTLE_S = 20.0

_LOG_LINE = re.compile(
    rb'time=\S+Z level=(debug|info|warning|error) process=[a-z0-9-]+ event=([^\s"]+|"[^"]*")'
    rb'( [a-z_]+=([^\s"=]+|"([^"\\]|\\.)*"))*\Z'
    rb"|topics \S+ ready on http://"
)
_LOG_FIELDS = {"time", "level", "process", "event"}
MOST_SERIES = 1_500  # of counters and histograms about requests: all routes, statuses and buckets, and no more


def _is_log_line(line: bytes) -> bool:
    """In either form; nothing that a client sends may look like one or break one."""
    if not line.startswith(b"{"):
        return _LOG_LINE.match(line) is not None
    return bool(json.loads(line).keys() >= _LOG_FIELDS)


def memory_of(pid: int) -> int:
    """Bytes that are the process's own. The rings, which all map, have a fixed size and count when first touched."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def ticks_of(pid: int) -> int:
    """Processor time, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class Findings:
    """What was wrong, case by case; said all together when the family is through."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self._folder = folder
        self.found: list[str] = []

    def add(self, case: Case, what: object, received: bytes = b"") -> None:
        kept = self._folder / f"{self.family}-{case.number}.bytes"
        kept.write_bytes(case.sent)
        sent = base64.b64encode(case.sent[:300]).decode()
        self.found.append(
            f"--- case {case.number} ({case.label}, leaves by {case.leaving}): {what}\n"
            f"    received, its end: {received[-300:]!r}\n"
            f"    sent, {len(case.sent)} bytes, in {kept}; the first as base64: {sent}"
        )

    def _one_of_each(self) -> list[str]:
        """The first of each kind, by what was said about it, then the others."""
        kinds = {text.partition("): ")[2][:40]: text for text in reversed(self.found)}
        first = [text for text in self.found if text in kinds.values()]
        return first + [text for text in self.found if text not in first]

    def say(self) -> None:
        if self.found:
            shown = "\n".join(self._one_of_each()[:8])
            raise AssertionError(
                f"{len(self.found)} wrong in family {self.family}; again: TOPICS_FUZZ_SEED={SEED}\n{shown}"
            )


class Scene:
    def __init__(self, server: Server, family: str, *, key: str | None = None, **environ: object) -> None:
        self.server = server
        self._environ = environ
        self.findings = Findings(family, server.log.parent)
        self.player = Player(server.port)
        self.bearer = () if key is None else (f"Authorization: Bearer {key}",)
        self.honest: dict[int, str] = {}  # what was appended, by seq
        self._numbers = 0
        self._log_read = 0
        self._lives = {line.name: (line.pid, line.restarts) for line in server.ps().processes}
        self._memory: dict[str, int] = {}
        self.ask("PUT", f"/v0/topics/{CANARY}", {})
        self.ask("POST", "/v0/topics/still", {"records": [{"data": "to wait behind"}]})
        with H2Wire(server.port) as wire:  # what is opened on first use is open now
            wire.finish(wire.ask("GET", "/v0/health"))
        self._descriptors = self._count_descriptors()

    # --- honest requests ---

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        content = None if body is None else json.dumps(body).encode()
        with Wire(self.server.port) as wire:
            return wire.ask(request(method, path, content, headers=self.bearer))

    def furnish(self) -> None:
        """What hostile requests find: a log with records, a queue with jobs, a full topic, routers of both kinds."""
        self.ask("PUT", "/v0/topics/log", {"cap_records": 50})
        queue = {"type": "queue", "cap_records": 50, "lease_ms": 100, "max_deliveries": 3, "dead_letter": "dead"}
        self.ask("PUT", "/v0/topics/jobs", queue)
        self.ask("PUT", "/v0/topics/dead", {"cap_records": 50})
        self.ask("PUT", "/v0/topics/full", {"cap_records": 2, "discard": "reject"})
        records = [{"data": {"n": 1}, "tag": "a:1", "node": "n1", "meta": {"k": "v"}}, {"data": [1, "é", None]}]
        for topic in ("log", "jobs"):
            self.ask("POST", f"/v0/topics/{topic}", {"records": records})
        self.ask("PUT", "/v0/routers/log->copy", {"source": "log", "dest": "copy"})
        self.ask("PUT", "/v0/routers/log->once", {"source": "log", "dest": "once", "guarantee": "exactly_once"})

    def open_session(self) -> str:
        answer = self.ask("POST", "/v0/watch", {"topics": {"log": {"from_seq": 0}}})
        return str(answer.json.get("wid", "wid_AAAAAAAAAAAAAAAAAAAAAA"))

    def honest_case(self) -> Case:
        self._numbers += 1
        body = json.dumps({"records": [{"data": f"honest {self._numbers}"}]}).encode()
        return Case(-self._numbers, "honest", [request("POST", f"/v0/topics/{CANARY}", body, headers=self.bearer)])

    def take_honest(self, outcome: Outcome) -> None:
        case = outcome.case
        try:
            replies, _ = read_replies(outcome.received, clean=outcome.clean)
            if outcome.hung or len(replies) != 1 or replies[0].status not in (200, 201):
                raise Wrong(f"an honest append got {[reply.status for reply in replies]}")
            self.honest[replies[0].json["first_seq"]] = f"honest {-case.number}"
        except Wrong as error:
            self.findings.add(case, error, outcome.received)

    # --- a batch ---

    def play(self, cases: list[Case], judge: Callable[[Outcome], None]) -> None:
        """Cases with honest ones among them, all judged, and a look at the server afterwards."""
        mixed = list(cases)
        mixed.insert(len(mixed) // 2, self.honest_case())
        for outcome in self.player.play([self.honest_case(), *mixed]):
            if outcome.case.number < 0:
                self.take_honest(outcome)
                continue
            try:
                if outcome.hung:
                    raise Wrong(f"still open after {outcome.took_s:.1f} s")
                judge(outcome)
            except (Wrong, UnicodeDecodeError) as error:
                self.findings.add(outcome.case, error, outcome.received)
        self.check_alive()

    def check_alive(self) -> None:
        """Raises at once: there is no use in going on."""
        try:
            assert self.ask("GET", "/v0/health").status == 200
            lives = {line.name: (line.pid, line.restarts) for line in self.server.ps().processes}
            assert lives == self._lives, f"processes were started again: {self._lives} is now {lives}"
            with open(self.server.log, "rb") as log:
                log.seek(self._log_read)
                said = log.read()
            said = said[: said.rfind(b"\n") + 1]  # the last line may be on its way
            self._log_read += len(said)
            lines = said.splitlines()
            faults = [line for line in lines if b"Traceback" in line]
            assert not faults, f"{len(faults)} faults in the log: {faults[0][-1_500:].decode(errors='replace')}"
            forged = [line for line in lines if not _is_log_line(line)]
            assert not forged, f"lines in the log that are none: {forged[:3]}"
        except Exception as error:
            self.findings.found.insert(0, f"the server after this batch: {error!r}")
            self.findings.say()

    # --- the end ---

    def warm(self) -> None:
        """From here on memory is compared."""
        self._memory = self._settled()

    def _pids(self) -> dict[str, int]:
        return {name: pid for name, (pid, _) in self._lives.items() if pid is not None}

    def _settled(self) -> dict[str, int]:
        """Memory of all processes once it does not fall any more."""
        now = {name: memory_of(pid) for name, pid in self._pids().items()}
        for _ in range(10):
            time.sleep(0.1)
            before, now = now, {name: memory_of(pid) for name, pid in self._pids().items()}
            if all(now[name] >= before[name] for name in now):
                break
        return now

    def _count_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._pids()['gateway-0']}/fd"))

    def finish(self) -> None:
        """Everything that must be true when the family is through."""
        self.check_alive()
        self.findings.say()
        self._check_honest()
        self._check_everybody_works()
        self._check_metrics()
        if self.bearer:
            eventually(self._all_slots_are_free, within_s=SETTLE_S, every_s=0.2, what="all slots of the key")
        eventually(
            lambda: self._count_descriptors() <= self._descriptors,
            within_s=SETTLE_S,
            what=f"no more descriptors in the gateway than the {self._descriptors} at first",
        )
        eventually(lambda: self.streams() == 0, within_s=SETTLE_S, what="no stream counted any more")
        eventually(self._is_idle, within_s=SETTLE_S, what="nobody busy without clients")
        if self._memory:
            self._check_memory()

    def come_again(self) -> None:
        """All that hostile requests left behind is read again by a new life of the server, which has the honest records
        as the old one had them."""
        assert self.server.stop() == 0, self.server.output()[-2_000:]
        log = self.server.log.with_name("again.log")
        self.server = Server(self.server.data_dir, log=log, **self._environ)
        try:
            self.server.wait_ready()
            self._lives = {line.name: (line.pid, line.restarts) for line in self.server.ps().processes}
            self._log_read = 0
            self.check_alive()
            self._check_honest()
        finally:
            self.server.close()

    def _check_honest(self) -> None:
        found: dict[int, Any] = {}
        cursor = 0
        while True:
            page = self.ask("POST", f"/v0/topics/{CANARY}/diff", {"from_seq": cursor, "limit": 1_000})
            assert page.status == 200, page
            assert "tombstone" not in page.json or page["tombstone"] is None, page
            found |= dict(zip(page.seqs, page.data, strict=True))
            cursor = page["next_from_seq"]
            if page["caught_up"]:
                break
        assert list(found) == list(range(1, len(self.honest) + 1))
        assert found == self.honest

    def _check_everybody_works(self) -> None:
        """Routers copy what comes now, of both kinds, and a job that comes now is given to a worker."""
        for topic in ("log", "jobs"):  # a hostile request may have removed it, and another made one of another type
            self.ask("DELETE", f"/v0/topics/{topic}")
        self.furnish()
        text = f"after all that {time.monotonic_ns()}"
        for topic in ("log", "jobs"):
            assert self.ask("POST", f"/v0/topics/{topic}", {"records": [{"data": text}]}).status == 200
        for copy in ("copy", "once"):
            eventually(lambda copy=copy: text in self._last_of(copy), every_s=0.1, what=f"a copy in {copy}")

        def claimed() -> bool:
            answer = self.ask("POST", "/v0/topics/jobs/claim", {"node": "honest", "max": 100, "lease_ms": 60_000})
            return text in [job["data"] for job in answer["claimed"]]

        eventually(claimed, every_s=0.1, what="the new job")

    def _all_slots_are_free(self) -> bool:
        """The key of the hostile clients may have as many requests in flight as ever: they left none behind."""
        head_seq = self.ask("GET", "/v0/topics/still")["head_seq"]
        body = b'{"from_seq":%d,"wait_ms":1000}' % head_seq
        poll = request("POST", "/v0/topics/still/diff", body, headers=(f"Authorization: Bearer {FULL}",))
        outcomes = Player(self.server.port, width=SLOTS).play(Case(number, "poll", [poll]) for number in range(SLOTS))
        return all(read_replies(outcome.received, clean=True)[0][0].status == 200 for outcome in outcomes)

    def _last_of(self, topic: str) -> list[Any]:
        """Page by page: a hostile request may have written a record of 1 MB, which fills one alone."""
        found: list[Any] = []
        cursor = max(self.ask("GET", f"/v0/topics/{topic}")["head_seq"] - 20, 0)
        while True:
            page = self.ask("POST", f"/v0/topics/{topic}/diff", {"from_seq": cursor})
            found += page.data
            cursor = page["next_from_seq"]
            if page["caught_up"]:
                return found

    def _check_metrics(self) -> None:
        """They can be read, and nothing that a client sends makes a series of its own."""
        about = [
            sample
            for family in text_string_to_metric_families(self._metrics())
            for sample in family.samples
            if sample.name.startswith("topics_http_")
        ]
        assert len(about) <= MOST_SERIES, len(about)
        methods = {sample.labels.get("method", "") for sample in about}
        assert all(len(method) <= 10 for method in methods), methods
        assert len(methods) <= 8, methods

    def streams(self) -> float:
        """As the metrics count them."""
        text = self._metrics()
        counted = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("topics_sse_connections ")]
        return float(counted[0])

    def _metrics(self) -> str:
        with Wire(self.server.port) as wire:
            wire.send(request("GET", "/v0/metrics", headers=self.bearer))
            status, headers = wire.head()
            text = wire.body(headers).decode()
        assert status == 200
        return text

    def _is_idle(self) -> bool:
        """Over a while, all processes together take less than half a processor."""
        pids = self._pids().values()
        before = sum(ticks_of(pid) for pid in pids)
        time.sleep(0.5)
        return sum(ticks_of(pid) for pid in pids) - before < 0.25 * os.sysconf("SC_CLK_TCK")

    def _check_memory(self) -> None:
        def over() -> dict[str, str]:
            now = {name: memory_of(pid) for name, pid in self._pids().items()}
            return {
                name: f"{self._memory[name] >> 20} MiB after the warm-up, {now[name] >> 20} MiB now"
                for name in now
                if now[name] - self._memory[name] > MAY_GROW.get(name, MAY_GROW_ELSE)
            }

        last: dict[str, str] = {}

        def fits() -> bool:
            last.clear()
            last.update(over())
            return not last

        try:
            eventually(fits, within_s=SETTLE_S, every_s=0.2)
        except AssertionError:
            raise AssertionError(f"memory has grown: {last}") from None


@contextmanager
def scene(folder: Path, family: str, *, keys: bool = False, **environ: object) -> Iterator[Scene]:
    """A server of its own for one family."""
    environ = {**SETTINGS, **({"TOPICS_API_KEYS": KEYS} if keys else {}), **environ}
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield Scene(server, family, key=HONEST if keys else None, **environ)
    finally:
        server.close()
