"""The lines about the guard: what keys, limits and metrics cost an append, and what a scrape of many topics costs.

The peer of these lines is our own server. Rules: with and without are measured in the same run, in turns, and a turn is
compared with the other one of its round, so that a machine that is slow for a while is slow for both. A scrape asks as
Prometheus does, for text and gzip.
"""

from __future__ import annotations

import http.client
import itertools
import re
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks import BenchFailed
from benchmarks.figures import Beside, Figures, Line, beside, line, percentile, rates
from benchmarks.generators import load, payload, scrapes
from benchmarks.generators.load import Job, Outcome
from benchmarks.generators.scrapes import Scraped, ScrapeJob
from benchmarks.measure import Measurement, Pace
from benchmarks.scenarios import RECORD_BYTES, Scenario
from benchmarks.sides.ours import Ours
from benchmarks.sides.side import STREAMS

KEYS = tuple(f"bench-key-{number:02d}-0123456789abcdef" for number in range(20))
SCRAPE_EVERY_S = 1.0  # beside saturated appends
SCRAPES_APART_S = 0.5  # where the scrapes are what is measured
FILL_DEPTH = 100
FILL_CONNECTIONS = 4
ACCEPT = "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
_KEY_VARIABLES = ("TOPICS_API_KEYS", "TOPICS_API_KEYS_FILE", "CREDENTIALS_DIRECTORY")
_TOPICS = re.compile(rb"^topics_topics ([\d.e+]+)$", re.MULTILINE)


class Guarded(Ours):
    """Our server with these variables, asked with the key if there is one."""

    def __init__(
        self,
        *,
        name: str,
        settings: dict[str, str],
        key: str | None = None,
        durability: str = "disk",
        parent: Path | None = None,
        command: list[str] | None = None,
    ) -> None:
        super().__init__(durability=durability, parent=parent, command=command)
        self.name = name
        self._key = key
        for variable in _KEY_VARIABLES:
            self._environ.pop(variable, None)
        self._environ |= settings

    def _call(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        head = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        if body is not None:
            head["Content-Type"] = "application/json"
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body), head)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def scrape_job(self, job: Job, *, rate: float = 0.0) -> ScrapeJob:
        """The same job with the key on every request, and with a scraper who has no times yet."""
        asked = payload.http_get("/v0/metrics", accept=f"{ACCEPT}\r\nAccept-Encoding: gzip")
        fields = msgspec.structs.asdict(job) | {"requests": [signed(request, self._key) for request in job.requests]}
        return ScrapeJob(**fields, scrape=signed(asked, self._key), rate=rate)

    def fill_topics(self, count: int) -> None:
        """Make that many topics or a few more, in whole batches, with a record in each."""
        batches = -(-count // FILL_DEPTH)
        record = payload.record(0, size=RECORD_BYTES)
        names = iter(f"filled-{number:06d}" for number in range(batches * FILL_DEPTH))
        job = Job(
            port=self.port,
            requests=[
                b"".join(payload.ws_publish(name, record) for name in itertools.islice(names, FILL_DEPTH))
                for _ in range(batches)
            ],
            plans=[list(range(first, batches, FILL_CONNECTIONS)) for first in range(FILL_CONNECTIONS)],
            replies="ws",
            depth=FILL_DEPTH,
            once=True,
        )
        load.run_apart(job)
        if self.topics() < count:
            raise BenchFailed(f"{self.name}: {count:,} topics were made, and the metrics say {self.topics():,}")

    def topics(self) -> int:
        found = _TOPICS.search(self._must("GET", "/v0/metrics"))
        return int(float(found[1])) if found else 0


def signed(request: bytes, key: str | None) -> bytes:
    if key is None:
        return request
    line, _, rest = request.partition(b"\r\n")
    return b"%b\r\nAuthorization: Bearer %b\r\n%b" % (line, key.encode(), rest)


def scrapes_of(turn: int, *, seconds: float, every_s: float) -> tuple[float, ...]:
    """When to scrape within this turn, if the turns of a side were one long one with a scrape every so often."""
    # In whole microseconds: a scrape at the border of two turns belongs to exactly one of them.
    turn_us, every_us = round(seconds * 1e6), round(every_s * 1e6)
    begin_us = turn * turn_us
    first = max(0, -(-(begin_us - every_us // 2) // every_us))
    return tuple(
        (at_us - begin_us) / 1e6 for at_us in range(every_us // 2 + first * every_us, begin_us + turn_us, every_us)
    )


class GuardMeasurement(Measurement):
    """Knows the kinds of this file besides the others."""

    def run(self, scenario: Scenario) -> Line:
        kinds = {"guard": self._guard, "scrape": self._scrape, "scrape-appends": self._scrape_appends}
        if scenario.kind not in kinds:
            return super().run(scenario)
        with ExitStack() as stack:
            return line(scenario, kinds[scenario.kind](scenario, stack), None)

    def _started(self, side: Guarded, stack: ExitStack) -> Guarded:
        stack.callback(side.close)
        self._tell(f"starting {side.name}")
        side.start()
        side.declare()
        return side

    def _guard(self, scenario: Scenario, stack: ExitStack) -> Figures:
        keys = {"TOPICS_API_KEYS": ",".join(KEYS), "TOPICS_REQUEST_METRICS": "1"}
        sides = [
            self._started(side, stack)
            for side in (
                Guarded(name="guarded", settings=keys, key=KEYS[-1], parent=self._parent, command=self._command),
                Guarded(
                    name="unguarded",
                    settings={"TOPICS_REQUEST_METRICS": "0"},
                    parent=self._parent,
                    command=self._command,
                ),
            )
        ]
        turns = []
        for side in sides:
            job = side.append_job(connections=scenario.connections, batch=1, record_bytes=RECORD_BYTES)
            turns.append((side, side.scrape_job(job)))
        pace = often(self._pace)
        numbers = itertools.count()

        def scraped(side: Guarded, job: Job) -> Job:
            if side is not sides[0]:
                return job
            at = scrapes_of(next(numbers), seconds=pace.seconds, every_s=SCRAPE_EVERY_S)
            return msgspec.structs.replace(job, scrapes_at=at)

        taken = self._take_turns(turns, scrapes.run_apart, pace, prepare=scraped)
        for side, outcomes in zip(sides, taken, strict=True):
            _check_stored(side, outcomes)
        return kept(*taken)

    def _scrape(self, scenario: Scenario, stack: ExitStack) -> Figures:
        (taken,) = self._scraping(scenario, stack, with_scrapes=[True])
        return scrape_s(taken)

    def _scrape_appends(self, scenario: Scenario, stack: ExitStack) -> Figures:
        return delayed_ms(*self._scraping(scenario, stack, with_scrapes=[True, False]))

    def _scraping(self, scenario: Scenario, stack: ExitStack, *, with_scrapes: list[bool]) -> list[list[Scraped]]:
        """Appends at their rate to a server of many topics, in turns with scrapes and without."""
        room = {"TOPICS_MAX_TOPICS": str(scenario.records + FILL_DEPTH + len(STREAMS))}
        side = self._started(
            Guarded(name="topics", settings=room, parent=self._parent, command=self._command),
            stack,
        )
        self._tell(f"making {scenario.records:,} topics")
        side.fill_topics(scenario.records)
        job = side.scrape_job(
            side.append_job(connections=scenario.connections, batch=1, record_bytes=RECORD_BYTES), rate=scenario.rate
        )
        pace = self._pace
        apart_s = min(SCRAPES_APART_S, pace.seconds)
        scraping = msgspec.structs.replace(job, scrapes_at=scrapes_of(0, seconds=pace.seconds, every_s=apart_s))
        turns = [(side, scraping if each else job) for each in with_scrapes]
        taken = self._take_turns(turns, scrapes.run_apart, pace)
        _check_stored(side, [outcome for outcomes in taken for outcome in outcomes])
        return taken


def often(pace: Pace) -> Pace:
    """For a ratio near one: more turns, by default of a second, so that there is a scrape in each."""
    return Pace(rounds=pace.rounds * 4, seconds=pace.seconds * 2 / 3, warm_s=pace.warm_s / 3)


# --- arithmetic -------------------------------------------------------------------------------------------


def kept(on: Sequence[Scraped], off: Sequence[Scraped]) -> Figures:
    """The share of the rate that is left with the guard."""
    guarded, bare = (rates(outcomes, records_per_request=1) for outcomes in (on, off))
    shares = [with_it / without for with_it, without in zip(guarded.slices, bare.slices, strict=True)]
    # Beside it, because whatever else runs on the machine takes from the rate, but not from this.
    used = [_cpu_per_append(with_it) / _cpu_per_append(without) for with_it, without in zip(on, off, strict=True)]
    return Figures(
        value=statistics.median(shares),
        slices=shares,
        generator_cpu=guarded.generator_cpu,
        server_cpu=guarded.server_cpu,
        beside=[
            beside("with", guarded, "records/s"),
            beside("without", bare, "records/s"),
            Beside(what="processor time per append", value=statistics.median(used), unit="times", slices=used),
        ],
    )


def _cpu_per_append(outcome: Scraped) -> float:
    # One tick at least: a slice too short to see any use is not worth a failure.
    return max(outcome.watched_cpu_s, 0.01) / max(1, outcome.requests)


def scrape_s(taken: Sequence[Scraped]) -> Figures:
    """How long a scrape takes: the median of all, and the longest."""
    found = [time_ns / 1e9 for outcome in taken for time_ns in outcome.scrapes_ns]
    longest = percentile(found, 1.0)
    return Figures(
        value=statistics.median(found), slices=found, beside=[Beside(what="longest", value=longest, unit="s")]
    )


def delayed_ms(on: Sequence[Scraped], off: Sequence[Scraped]) -> Figures:
    """By how much the longest append of a turn with scrapes is longer than that of the turn without."""
    longest = [[percentile(outcome.times_ns, 1.0) / 1e6 for outcome in taken] for taken in (on, off)]
    more = [with_it - without for with_it, without in zip(*longest, strict=True)]
    notes = []
    for what, taken in (("with scrapes", on), ("without", off)):
        times = [time_ns / 1e6 for outcome in taken for time_ns in outcome.times_ns]
        notes.append(Beside(what=f"longest {what}", value=percentile(times, 1.0), unit="ms"))
        notes.append(Beside(what=f"p99 {what}", value=percentile(times, 0.99), unit="ms"))
    return Figures(value=statistics.median(more), slices=more, beside=notes)


def _check_stored(side: Guarded, outcomes: Sequence[Outcome]) -> None:
    acknowledged, stored = sum(outcome.acknowledged for outcome in outcomes), side.stored()
    if stored != acknowledged:
        raise BenchFailed(f"{side.name} acknowledged {acknowledged:,} records and holds {stored:,}")
