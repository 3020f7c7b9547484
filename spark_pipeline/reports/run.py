"""One run of the reports: from a folder to everything that is written about it.

    lock OUT, load the ledger      refuse a folder that is not the ledger's
    start Spark, pin the heads     all reports see the same; on a damaged folder only integrity sees anything
    compute each report            one that fails does not keep the others from being written
    thresholds
    publish tables, save ledger    from here on the run counts
    JSON, textfile, page

A run that dies anywhere before the ledger is saved has not happened: the next one removes what it left and reads the
same records again. One that dies after it has counted, and only its page is missing until the next.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from pyspark.sql import DataFrame, SparkSession

from topics.datadir.files import Files
from topics.errors import TopicsError

from . import ledger, outputs, registry, session, thresholds, units
from .ledger import Counted, Ledger, View
from .offsets import NoPins, Pins
from .outcome import Entry, Outcome
from .page import page
from .parquet_store import Shelf
from .report import Finding, Result

LOG = "spark.log"
_TICK_S = 0.5
_FILES_ALONE = {"integrity"}  # reports that ask the data source for nothing


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody asked for."""

    folder: str
    out: Path
    version: str  # of the program
    names: tuple[str, ...] = registry.NAMES
    since_ms: int | None = None
    master: str | None = None
    thresholds: str | None = None
    textfile: Path | None = None
    fresh: bool = False


class Watcher(Protocol):
    """Whoever wants to know how far a run is."""

    def say(self, text: str) -> None:
        """What is being done."""
        ...

    def begin(self, name: str, title: str) -> None: ...

    def tick(self, done: int, total: int) -> None:
        """Spark's tasks of the moment."""
        ...

    def end(self, entry: Entry) -> None: ...


def run(request: Request, watcher: Watcher, *, clock: Callable[[], float] = time.time) -> Outcome:
    """Raises TopicsError for what is wrong with the request; a report that fails is part of the outcome."""
    folder = str(Path(request.folder).resolve())
    frozen_ms = Files(folder).frozen_ms()  # no data folder, or a newer format: said before a JVM is started
    limits = [] if request.thresholds is None else thresholds.read(request.thresholds, suggest=registry.suggest_metric)
    with ledger.locked(request.out):
        return _Run(request, folder, limits, watcher, now_ms=int(clock() * 1_000), frozen_ms=frozen_ms).go()


class _Run:
    def __init__(
        self,
        request: Request,
        folder: str,
        limits: list[thresholds.Threshold],
        watcher: Watcher,
        *,
        now_ms: int,
        frozen_ms: int | None,
    ) -> None:
        self._request = request
        self._folder = folder
        self._limits = limits
        self._watcher = watcher
        self._now_ms = now_ms
        self._frozen_ms = frozen_ms
        self._began = time.monotonic()
        self._id = f"{units.moment(now_ms):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
        self._log = request.out / LOG
        self._shelf = Shelf(request.out, self._id)
        self._samples: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def go(self) -> Outcome:
        before = None if self._request.fresh else ledger.load(self._request.out)
        self._shelf.clear()
        if not self._request.fresh:  # otherwise what counted goes when the new ledger counts
            self._shelf.sweep(before)
        self._log.write_bytes(b"")
        try:
            return self._computed(before)
        finally:
            self._shelf.clear()

    def _computed(self, before: Ledger | None) -> Outcome:
        self._watcher.say("starting Spark")
        with session.opened(self._request.master, log=self._log) as spark:
            self._watcher.say(f"looking at {self._folder}")
            try:
                pins = Pins(spark, self._folder, self._shelf)
            except Exception as error:
                self._note(f"{self._folder} could not be looked at")
                pins = self._without_pins(words(error), before)
            if before is not None:
                ledger.check_folder(before, out=self._request.out, folder=self._folder, ids=pins.ids)
            now = self._next(before, pins)
            same_folder = before is not None and before.folder == self._folder
            entries = [self._report(name, spark, pins, now, same_folder) for name in self._request.names]
        outcome = self._outcome(entries)
        self._commit(outcome, now)
        return outcome

    def _without_pins(self, why: str, before: Ledger | None) -> Pins:
        """A damaged folder: a report that looks at files alone is computed all the same, the others say why not."""
        moved = before is not None and before.folder != self._folder  # nobody can tell whether it is the same folder
        if moved or not _FILES_ALONE & set(self._request.names):
            raise TopicsError(why)
        return NoPins(why, ids=() if before is None else before.ids)

    def _next(self, before: Ledger | None, pins: Pins) -> Ledger:
        """The ledger that this run will leave; reports advance in it one by one."""
        return Ledger(
            folder=self._folder,
            ids=sorted(pins.ids),
            run=self._id,
            now_ms=self._now_ms,
            reports={} if before is None else dict(before.reports),
        )

    # --- reports ---

    def _report(self, name: str, spark: SparkSession, pins: Pins, now: Ledger, same_folder: bool) -> Entry:
        module = registry.load(name)
        self._watcher.begin(name, module.TITLE)
        began = time.monotonic()
        job = ReportJob(
            name,
            spark,
            pins,
            self._shelf,
            before=now.reports.get(name, Counted()),
            now_ms=self._frozen_ms or self._now_ms,
            since_ms=self._request.since_ms,
            data_dir=self._folder,
            run_ms=self._now_ms,
            frozen=self._frozen_ms is not None,
        )
        result: Result | None = None
        error: str | None = None
        try:
            with _ticking(spark, self._watcher):
                result = module.compute(job)
            outputs.check_metrics(result.metrics, taken=self._samples)
        except Exception as failure:
            result, error = None, words(failure)
            self._note(f"the report {name} failed")
            self._shelf.discard(name)
        else:
            now.reports[name] = job.counted(gone_for_good=same_folder)
        entry = Entry(
            name=name,
            title=module.TITLE,
            question=module.QUESTION,
            seconds=time.monotonic() - began,
            result=result,
            error=error,
        )
        self._watcher.end(entry)
        return entry

    def _outcome(self, entries: list[Entry]) -> Outcome:
        metrics = [metric for entry in entries if entry.result is not None for metric in entry.result.metrics]
        breaches, idle = thresholds.check(self._limits, metrics)
        computed = [entry.name for entry in entries if entry.result is not None]
        notices = [
            Finding("notice", f"The threshold for {limit} applied to nothing: there is no such metric in this run.")
            for limit in idle
            if registry.report_of(limit.metric) in computed
        ]
        return Outcome(
            run=self._id,
            version=self._request.version,
            folder=self._folder,
            now_ms=self._now_ms,
            since_ms=self._request.since_ms,
            snapshot_ms=self._frozen_ms,
            seconds=time.monotonic() - self._began,
            entries=entries,
            breaches=breaches,
            notices=notices,
        )

    def _commit(self, outcome: Outcome, now: Ledger) -> None:
        out = self._request.out
        self._watcher.say(f"writing {out}")
        if self._request.fresh:
            self._shelf.empty()
        for entry in outcome.entries:
            if entry.result is not None:
                self._shelf.publish(entry.name)
        ledger.save(out, now)
        self._shelf.sweep(now)  # what this run replaced
        outputs.write_json(out, outcome)
        if self._request.textfile is not None:
            outputs.write_textfile(self._request.textfile, outcome)
        page.write(out, outcome)

    def _note(self, what: str) -> None:
        """The whole story, for whoever wants more than a line."""
        with open(self._log, "a") as log:
            log.write(f"\n{what}:\n{traceback.format_exc()}\n")


class ReportJob:
    """What run.py gives one report: the folder as far as this run sees it, and what earlier runs counted."""

    def __init__(
        self,
        name: str,
        spark: SparkSession,
        pins: Pins,
        shelf: Shelf,
        *,
        before: Counted,
        now_ms: int,
        since_ms: int | None,
        data_dir: str,
        run_ms: int | None = None,
        frozen: bool = False,
    ) -> None:
        self.spark = spark
        self.now_ms = now_ms
        self.run_ms = now_ms if run_ms is None else run_ms
        self.frozen = frozen
        self.since_ms = since_ms
        self.data_dir = data_dir
        self._name = name
        self._pins = pins
        self._shelf = shelf
        self._before = before
        self._tables = dict(before.tables)
        self._read: set[View] = set()

    def view(self, name: str, **options: str) -> DataFrame:
        return self._pins.view(name, **options)

    def fresh(self, view: Literal["records", "leases"], **options: str) -> DataFrame:
        self._read.add(view)
        return self._pins.since(view, self._before.marks(view), **options)

    def accumulate(self, name: str, partial: DataFrame) -> DataFrame:
        earlier = self._before.tables.get(name, [])
        whole, self._tables[name] = self._shelf.accumulate(self._name, name, partial, runs=earlier)
        return whole

    def save(self, name: str, frame: DataFrame) -> None:
        self._shelf.save(self._name, name, frame)

    def counted(self, *, gone_for_good: bool) -> Counted:
        """The ledger's part once this run counts."""
        ids = self._pins.ids
        marks: dict[View, dict[str, int]] = {}
        for view in ("records", "leases"):
            read_to = {pin.id: pin.end for pin in self._pins.of[view].values()} if view in self._read else {}
            marks[view] = ledger.advanced(self._before.marks(view), read_to, gone_for_good=gone_for_good, ids=ids)
        return Counted(records=marks["records"], leases=marks["leases"], tables=self._tables)


# --- Spark, in words ---------------------------------------------------------------------------------

_RAISED = re.compile(r"([A-Za-z_][\w.]*): (.+)\Z")
_CONDITION = re.compile(r"\[[A-Z_.]+\] ")  # Spark's name for what happened, before its sentence


def words(error: BaseException) -> str:
    """One line for a person. What Python raised in a worker of Spark's is in a traceback, in a stack of Java's."""
    text = str(error).strip()
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    if "Traceback (most recent call last)" in text:
        tail = text.rpartition("Traceback (most recent call last)")[2].splitlines()
        raised = next((found for line in tail if (found := _RAISED.match(line)) and found[1] != "SQLSTATE"), None)
        if raised is not None:
            ours = raised[1].startswith(("topics.", "spark_pipeline."))
            return raised[2] if ours else f"{raised[1].rpartition('.')[2]}: {raised[2]}"
    first = _CONDITION.sub("", lines[0].strip(), count=1)
    return first if isinstance(error, TopicsError) else f"{type(error).__name__}: {first}".removesuffix(": ")


@contextmanager
def _ticking(spark: SparkSession, watcher: Watcher) -> Iterator[None]:
    """Tell the watcher about Spark's tasks while a report is computed."""
    over = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def watch() -> None:
        while not over.wait(_TICK_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            known = [stage for stage in stages if stage is not None]
            watcher.tick(sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known))

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
