"""Reports as a test runs them, and the truth to hold them against.

A Play gives reports a folder through the real data source, with the runner's own pins and shelf; `run` is one run of
one report, at any time the test likes. Truth is read over HTTP while the server runs. What HTTP does not show (events
of leases, jobs that are done) is read from the stopped server's files as docs/FORMAT.md says, without topics.datadir.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
from e2e.client import Client
from e2e.routing import read
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_pipeline import schemas
from spark_pipeline.reports import outputs
from spark_pipeline.reports.ledger import Counted, View
from spark_pipeline.reports.offsets import Pin, Pins
from spark_pipeline.reports.parquet_store import Shelf
from spark_pipeline.reports.report import Finding, Metric, Result, Table
from spark_pipeline.reports.run import ReportJob
from topics.storage import format, frames, paths, segment, snapshot
from topics.storage.columns import Columns
from topics.storage.control import DeleteFrame
from topics.storage.leases import log_name

# --- runs --------------------------------------------------------------------------------------------


class Play:
    """The runs of one output folder, by the runner's own parts; a run is of one report."""

    def __init__(self, spark: SparkSession, out: Path, *, data_dir: Path | None = None, frames: Frames | None = None):
        self.spark = spark
        self._data_dir = data_dir
        self._out = out
        self._frames = frames
        self._counted: dict[str, Counted] = {}
        self._number = 0

    def run(self, module: ModuleType, *, now_ms: int, since_ms: int | None = None) -> Result:
        name: str = module.NAME
        self._number += 1
        shelf = Shelf(self._out, f"{self._number:04d}")
        pins: Any = self._frames
        if pins is None:
            pins = Pins(self.spark, str(self._data_dir), shelf)
        job = ReportJob(
            name,
            self.spark,
            pins,
            shelf,
            before=self._counted.get(name, Counted()),
            now_ms=now_ms,
            since_ms=since_ms,
            data_dir=str(self._data_dir or self._out),
        )
        result: Result = module.compute(job)
        outputs.check_metrics(result.metrics, taken=set())
        msgspec.json.encode(result)
        self._counted[name] = job.counted(gone_for_good=True)
        shelf.publish(name)
        shelf.clear()
        return result

    def saved(self, report: str, table: str) -> list[dict[str, Any]]:
        path = self._out / "parquet" / report / table
        return [row.asDict() for row in self.spark.read.parquet(str(path)).collect()]


class Frames:
    """Stands for the folder where no server can have written it: last week, say. Views are made of rows that a test
    gives, with times in epoch milliseconds; what is behind a mark is chosen by offset, as the runner does."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.rows: dict[str, list[dict[str, Any]]] = {}

    @property
    def ids(self) -> set[str]:
        return {pin.id for pins in self.of.values() for pin in pins.values()}

    @property
    def of(self) -> dict[View, dict[str, Pin]]:
        return {"records": self._ends("records", "topic"), "leases": self._ends("leases", "queue")}

    def _ends(self, view: str, name: str) -> dict[str, Pin]:
        rows = sorted(self.rows.get(view, []), key=lambda row: row["offset"])
        return {row[name]: Pin(f"{view}:{row[name]}", row["offset"] + 1) for row in rows}

    def since(self, view: View, marks: dict[str, int], **options: str) -> DataFrame:
        name = "topic" if view == "records" else "queue"
        rows = [row for row in self.rows.get(view, []) if row["offset"] >= marks.get(f"{view}:{row[name]}", 0)]
        return self._frame(view, rows, options)

    def view(self, view: str, **options: str) -> DataFrame:
        wanted = options["subscribe"].split(",") if "subscribe" in options else None
        rows = [row for row in self.rows.get(view, []) if wanted is None or row["topic"] in wanted]
        return self._frame(view, rows, options)

    def _frame(self, view: str, rows: list[dict[str, Any]], options: dict[str, str]) -> DataFrame:
        columns = schemas.columns(
            view,
            headers=options.get("includeHeaders") == "true",
            data=options.get("includeData") != "false",
            deleted=options.get("includeDeleted") == "true",
        )
        ddl = ", ".join(f"`{name}` {'bigint' if kind == 'timestamp' else kind}" for name, kind in columns)
        frame = self._spark.createDataFrame([tuple(row.get(name) for name, _ in columns) for row in rows], ddl)
        times = {name: F.timestamp_millis(name) for name, kind in columns if kind == "timestamp"}
        return frame.withColumns(times) if times else frame


# --- looking at results ------------------------------------------------------------------------------


def table(result: Result, title: str) -> list[dict[str, Any]]:
    found: Table = next(each for each in result.tables if each.title == title)
    return [{column.name: value for column, value in zip(found.columns, row, strict=True)} for row in found.rows]


def metrics(result: Result, name: str) -> dict[tuple[str, ...], float]:
    """By the values of its labels."""
    found: list[Metric] = [metric for metric in result.metrics if metric.name == name]
    return {tuple(metric.labels.values()): metric.value for metric in found}


def findings(result: Result, level: str) -> list[str]:
    told: list[Finding] = result.findings
    return [finding.text for finding in told if finding.level == level]


def percentile(values: list[int], share: float) -> float:
    """Exact, between neighbours by distance."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


# --- the truth over HTTP -----------------------------------------------------------------------------


class Truth(NamedTuple):
    """What clients can see, at one moment."""

    states: dict[str, dict[str, Any]]
    records: dict[str, list[dict[str, Any]]]  # live ones; `size` is how long data is
    tombstones: dict[str, list[dict[str, Any]]]
    routers: dict[str, dict[str, Any]]


def look(api: Client) -> Truth:
    names = [row["topic"] for row in api.list(page_size=1_000)["topics"]]
    states = {name: api.state(name, touch=False).without_performance() for name in names}
    found: dict[str, list[dict[str, Any]]] = {}
    tombstones: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        both = read(api, name)
        found[name] = [record for record in both if "$seq" in record]
        tombstones[name] = [entry for entry in both if "$seq" not in entry]
    routers = {row["router"]: row for row in api.send("GET", "/v0/routers", page_size=1_000)["routers"]}
    return Truth(states, found, tombstones, routers)


def size_of(record: dict[str, Any]) -> int:
    """Of data as these tests send it: with json.dumps, so as it is sent is as it is encoded again."""
    return len(json.dumps(record["data"]).encode())


# --- the truth on the disk ---------------------------------------------------------------------------


class Stored(NamedTuple):
    seq: int
    ts: int
    tag: str | None
    node: str | None
    data: bytes
    deleted: bool


def stored(data_dir: Path, name: str) -> list[Stored]:
    """Every record of a topic that is on the disk of a server that was stopped in order, deleted ones too."""
    manifest = json.loads((data_dir / "topics.json").read_text())
    for shard in range(manifest["shards"]):
        folder = Path(paths.shard_dir(str(data_dir), shard))
        snapshots, wals = (sorted(folder.glob(f"{manifest['layout']:08x}-*.{kind}")) for kind in ("snap", "wal"))
        state = snapshot.decode_snapshot(snapshots[-1].read_bytes(), path="")
        for topic in map(snapshot.decode_topic, state.topics):
            if topic.name == name:
                return _stored(data_dir, topic, wals)
    raise AssertionError(f"no topic {name}")


def _stored(data_dir: Path, topic: snapshot.TopicState, wals: list[Path]) -> list[Stored]:
    found: dict[int, Stored] = {}

    def take(frame: frames.Frame, flags: bytes) -> None:
        columns = Columns(frame.body, count=frame.count, ts=frame.ts)
        values = zip(columns.times(), columns.tags(), columns.nodes(), columns.data(), flags, strict=True)
        for seq, (ts, tag, node, data, flag) in enumerate(values, frame.first_seq):
            found[seq] = Stored(seq, ts, tag, node, data, flag == format.DELETED)

    for known in topic.segments:
        path = os.path.join(paths.topic_dir(str(data_dir), topic.id), paths.segment_name(known.first_seq))
        data = Path(path).read_bytes()[: known.data_bytes]
        salt = segment.decode_segment_header(data, path=path).salt
        for block, frame in segment.scan_blocks(data, salt=salt, path=path):
            take(frame, data[block.flags_offset : block.flags_offset + block.count])
    for wal in wals:
        data = wal.read_bytes()
        for frame in frames.scan(data, salt=frames.decode_wal_header(data, path=str(wal)).salt):
            if frame.topic_id != topic.id:
                continue
            if frame.type == format.FrameType.APPEND and frame.last_seq > topic.flushed_seq:
                take(frame, bytes(frame.count))
            elif frame.type == format.FrameType.DELETE:
                body = msgspec.msgpack.decode(frame.body, type=DeleteFrame)
                gone = body.seqs if body.seqs is not None else [seq for seq in found if seq < (body.before_seq or 0)]
                for seq in gone:
                    if seq in found:
                        found[seq] = found[seq]._replace(deleted=True)
    return [found[seq] for seq in sorted(found)]


def lease_events(data_dir: Path, queue: str) -> list[tuple[int, dict[str, Any]]]:
    """(time, event) of a queue's leases log, in order."""
    return [(record.ts, json.loads(record.data)) for record in stored(data_dir, log_name(queue))]
