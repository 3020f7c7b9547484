"""Runs one after the other: every record counts once, whatever happened to the runs, the topics or the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.client import Client, unique
from e2e.queues import make_queue
from e2e.server import Server, eventually
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_pipeline.reports import ledger, parquet_store, units
from spark_pipeline.reports.ledger import LedgerError
from spark_pipeline.reports.report import Job, Result
from spark_pipeline.reports.run import Request, run
from topics.cli.datadir.snapshot import make
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic

from .reportrun import Silent, counting, counting_leases, files, run_once, stand_in, summary
from .reportscene import SMALL_SEGMENTS
from .sourceplay import flushed, snapshots

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For this module alone: its runs look at every topic there is."""
    folder = tmp_path_factory.mktemp("reports")
    server = Server(folder / "data", log=folder / "server.log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_second_run_reads_only_what_is_new(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, traffic=counting)
    old, new = unique("old"), unique("new")
    api.append(old, *range(70))
    first = summary(run_once(server.data_dir, out))
    assert first["read"][old] == first["all"][old] == 70
    api.append(old, 70, 71)
    api.append(new, *range(5))
    second = summary(run_once(server.data_dir, out))
    assert second["read"] == {old: 2, new: 5}
    assert {name: second["all"][name] for name in (old, new)} == {old: 72, new: 5}
    third = summary(run_once(server.data_dir, out))
    assert third["read"] == {}
    assert third["all"] == second["all"]


def test_lease_events_too(server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, queues=counting_leases)
    queue = make_queue(api, unique("queue"))
    api.append(queue.name, *range(10))
    queue.take(4, lease_ms=600_000)
    first = summary(run_once(server.data_dir, out, "queues"), "queues")
    assert first["read"][queue.name] == 4
    queue.take(3, lease_ms=600_000)
    second = summary(run_once(server.data_dir, out, "queues"), "queues")
    assert second["read"] == {queue.name: 3}
    assert second["all"][queue.name] == 7


def test_a_report_that_fails_has_counted_nothing(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = unique()
    api.append(topic, *range(9))

    def failing(job: Job) -> Result:
        counting(job)
        job.save("counts", job.view("topics").select("topic", F.lit("2026-11-16").alias("date")))
        raise RuntimeError("not today\nand a stack")

    stand_in(monkeypatch, traffic=failing, loss=counting)
    outcome = run_once(server.data_dir, out, "traffic", "loss")
    assert [(entry.name, entry.error) for entry in outcome.failed] == [("traffic", "RuntimeError: not today")]
    assert summary(outcome, "loss")["read"][topic] == 9
    assert not files(out / "history" / "traffic")
    assert not files(out / "parquet")
    assert "not today" in (out / "spark.log").read_text()
    assert json.loads((out / "summary.json").read_text())["reports"]["traffic"]["error"] == "RuntimeError: not today"
    assert "RuntimeError: not today" in (out / "index.html").read_text()

    stand_in(monkeypatch, traffic=counting, loss=counting)
    outcome = run_once(server.data_dir, out, "traffic", "loss")
    assert summary(outcome)["all"][topic] == 9
    assert summary(outcome, "loss")["read"] == {}
    assert summary(outcome, "loss")["all"][topic] == 9


def test_a_run_that_died_is_as_if_it_had_not_been(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of the steps between the first file and the ledger."""
    stand_in(monkeypatch, traffic=counting)
    topic = unique()
    api.append(topic, *range(3))
    run_once(server.data_dir, out)
    for number, step in enumerate(("publish", "save"), 4):
        api.append(topic, number)
        with monkeypatch.context() as context:

            def dies(*_: Any) -> None:
                raise KeyboardInterrupt

            if step == "publish":
                context.setattr(parquet_store.Shelf, "publish", dies)
            else:
                context.setattr(ledger, "save", dies)
            context.setattr(parquet_store.Shelf, "clear", lambda _: None)  # a dead run tidies nothing up
            with pytest.raises(KeyboardInterrupt):
                run_once(server.data_dir, out)
        left = files(out / "history") if step == "save" else files(out / "staging")
        assert len(left) > 1, "it left something behind"
        after = summary(run_once(server.data_dir, out))
        assert after["read"] == {topic: 1}
        assert after["all"][topic] == number
        assert not (out / "staging").exists()
    known = ledger.load(out)
    assert known is not None
    runs = {path.name.removeprefix("run=") for path in (out / "history").glob("*/*/run=*")}
    assert runs == set(known.reports["traffic"].tables["counts"])


def test_a_topic_that_was_made_again_begins_at_its_beginning(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, traffic=counting)
    topic = unique()
    api.append(topic, *range(8))
    run_once(server.data_dir, out)
    api.send("DELETE", f"/v0/topics/{topic}")
    api.append(topic, *range(11))
    second = summary(run_once(server.data_dir, out))
    assert second["read"] == {topic: 11}
    assert second["all"][topic] == 19, "those of the old one were written, too"


@pytest.mark.gate
def test_all_reports_of_a_run_see_the_same_heads(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, late = unique(), unique("late")
    api.append(topic, *range(6))

    def writing(job: Job) -> Result:
        """While the report looks, somebody writes, and makes a topic."""
        api.append(topic, *range(100))
        api.append(late, *range(100))
        return counting(job)

    def looking(job: Job) -> Result:
        heads = {row["topic"]: row["head_seq"] for row in job.view("topics").collect()}
        records = {row["topic"]: row["count"] for row in job.view("records").groupBy("topic").count().collect()}
        some = job.view("records", subscribe=topic).count(), job.view("records", subscribePattern="late.*").count()
        return Result(summary={"heads": heads, "records": records, "some": some})

    stand_in(monkeypatch, traffic=writing, loss=looking)
    outcome = run_once(server.data_dir, out, "traffic", "loss")
    assert summary(outcome)["read"][topic] == 6
    assert late not in summary(outcome)["all"]
    seen = summary(outcome, "loss")
    assert (seen["heads"][topic], seen["records"][topic], seen["some"]) == (6, 6, (6, 0))
    assert late not in seen["heads"]
    assert late not in seen["records"]

    stand_in(monkeypatch, traffic=counting)
    second = summary(run_once(server.data_dir, out))
    assert second["read"] == {topic: 100, late: 100}
    assert second["all"][topic] == 106


def test_a_topic_that_goes_while_a_run_looks_is_missing_and_its_name_is_not_it(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, again = make_queue(api, unique("gone")), make_queue(api, unique("again"))
    for queue in (gone, again):
        queue.produce(*range(9))
        queue.take(4, lease_ms=600_000)

    def late(job: Job) -> Result:
        """Between the pins and the first look one queue is deleted, and one of the same name is made."""
        for queue in (gone, again):
            api.send("DELETE", f"/v0/topics/{queue.name}")
        make_queue(api, again.name).produce(*range(50))
        again.take(7, lease_ms=600_000)
        records = counting(job).summary
        some = job.view("records", subscribe=f"{gone.name},{again.name}")
        leases = job.fresh("leases").groupBy("queue").count().collect()
        return Result(
            summary={**records, "some": some.count(), "leases": {row["queue"]: row["count"] for row in leases}}
        )

    stand_in(monkeypatch, traffic=late, queues=counting_leases)
    outcome = run_once(server.data_dir, out, "traffic", "queues")
    first = summary(outcome)
    assert first["some"] == 0
    for found in (first["read"], first["leases"], summary(outcome, "queues")["read"]):
        assert not {gone.name, again.name} & set(found)

    stand_in(monkeypatch, traffic=counting, queues=counting_leases)
    second = run_once(server.data_dir, out, "traffic", "queues")
    assert summary(second)["read"] == {again.name: 50}
    assert summary(second)["all"][again.name] == 50
    assert summary(second, "queues")["read"] == {again.name: 7}


@pytest.mark.gate
def test_what_is_evicted_between_runs_fails_nothing(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, traffic=counting)
    topic = unique()
    api.put(topic, cap_records=5)
    api.append(topic, *range(5))
    run_once(server.data_dir, out)
    api.append(topic, *range(40))
    assert summary(run_once(server.data_dir, out))["read"] == {topic: 5}


def test_many_runs_become_one(server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, traffic=counting)
    monkeypatch.setattr(parquet_store, "COMPACT_AT", 2)
    topic = unique()
    for number in range(4):
        api.append(topic, number)
        assert summary(run_once(server.data_dir, out))["all"][topic] == number + 1
    known = ledger.load(out)
    assert known is not None
    kept = known.reports["traffic"].tables["counts"]
    assert len(kept) == 2, "three became one, and one came after"
    assert {path.name.removeprefix("run=") for path in (out / "history").glob("*/*/run=*")} == set(kept)


def test_saved_tables_are_replaced_date_by_date(
    server: Server, spark: SparkSession, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days: list[tuple[str, int]] = []

    def saving(job: Job) -> Result:
        job.save("days", job.spark.createDataFrame(days, "date string, n int"))
        return Result(summary={})

    stand_in(monkeypatch, traffic=saving)
    days = [("2026-11-14", 1), ("2026-11-15", 2), ("2026-11-15", 3)]
    run_once(server.data_dir, out)
    days = [("2026-11-15", 4), ("2026-11-16", 5)]
    run_once(server.data_dir, out)
    place = out / "parquet" / "traffic" / "days"
    assert files(place) == [f"date=2026-11-{day}/part-0.parquet" for day in (14, 15, 16)]
    rows = spark.read.parquet(str(place)).collect()
    assert sorted((str(row["date"]), row["n"]) for row in rows) == [
        ("2026-11-14", 1),
        ("2026-11-15", 4),
        ("2026-11-16", 5),
    ]


def test_columns_of_history_may_come_and_go(server: Server, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def having(*columns: str) -> list[tuple[Any, ...]]:
        def compute(job: Job) -> Result:
            frame = job.spark.createDataFrame([("2026-11-16", 1, "x")], "date string, n int, word string")
            rows = job.accumulate("rows", frame.select("date", *columns)).collect()
            return Result(summary={"rows": sorted((tuple(row[name] for name in columns) for row in rows), key=str)})

        stand_in(monkeypatch, traffic=compute)
        found: list[tuple[Any, ...]] = summary(run_once(server.data_dir, out))["rows"]
        return found

    assert having("n") == [(1,)]
    assert having("n", "word") == [(1, "x"), (1, None)]
    assert having("word") == [("x",), ("x",), (None,)]


def test_other_folders_and_snapshots(
    start_server: Callable[..., Server], tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, traffic=counting)
    server = start_server()
    with server.client() as api:
        api.append("a", *range(4))
    server.stop()
    early = tmp_path / "early"
    shutil.copytree(server.data_dir, early)
    server = start_server()
    with server.client() as api:
        api.append("a", *range(6))
    server.stop()
    assert summary(run_once(server.data_dir, out))["all"] == {"a": 10}
    # An earlier look at the same folder: nothing new, and nothing twice afterwards.
    assert summary(run_once(early, out)) == {"read": {}, "all": {"a": 10}}
    assert summary(run_once(server.data_dir, out)) == {"read": {}, "all": {"a": 10}}

    other = start_server(data_dir=tmp_path / "other")
    with other.client() as api:
        api.append("a", 1)
    before = (out / "ledger.json").read_bytes()
    with pytest.raises(LedgerError, match="holds the reports of another folder") as refused:
        run_once(other.data_dir, out)
    assert "--fresh" in str(refused.value)
    assert (out / "ledger.json").read_bytes() == before
    assert summary(run_once(other.data_dir, out, fresh=True)) == {"read": {"a": 1}, "all": {"a": 1}}
    assert summary(run_once(other.data_dir, out)) == {"read": {}, "all": {"a": 1}}


def test_a_snapshot_is_reported_as_of_when_it_was_made(
    start_server: Callable[..., Server], tmp_path: Path, out: Path
) -> None:
    """Two hours later, and while the server deletes from segments that both share."""
    server = start_server(**SMALL_SEGMENTS)
    frozen = tmp_path / "frozen" / "early"

    def notes(folder: Path) -> Topic:
        return next(topic for topic in Folder(str(folder)).topics if topic.name == "notes")

    with server.client() as api:

        def flagged() -> bool:
            snapshots(api)
            return any(segment.flagged and segment.sealed for segment in notes(server.data_dir).segments)

        def shared() -> bool:
            snapshots(api)
            return notes(frozen).count == 77

        jobs = make_queue(api, "jobs")
        jobs.produce(*range(3))
        jobs.take(2, lease_ms=600_000)
        for tag in ("", "a", "b", "b", *[""] * 76):
            api.append_records("notes", [{"data": 1, "tag": tag}])
        flushed(api, server.data_dir, "notes")
        assert api.delete("notes", match="a")["deleted"] == 1
        eventually(flagged, every_s=0.2, what="a flag in a segment that a snapshot knows")
        made = make(str(server.data_dir), str(frozen.parent), frozen.name)
        assert notes(frozen).count == 79
        assert api.delete("notes", match="b")["deleted"] == 2
        eventually(shared, every_s=0.2, what="their flags in a file that both share")
    request = Request(folder=str(frozen), out=out, version="test", names=("queues", "loss", "traffic"))
    outcome = run(request, Silent(), clock=lambda: made.created_ms / 1_000 + 7_200)
    queues = summary(outcome, "queues")
    assert (queues["ready"], queues["in_flight"]) == (1, 2)
    loss = summary(outcome, "loss")
    assert (loss["unexplained"], loss["deleted"]) == (0, 3)
    assert (outcome.now_ms - made.created_ms, outcome.snapshot_ms) == (7_200_000, made.created_ms)
    assert json.loads((out / "summary.json").read_text())["snapshot_ms"] == made.created_ms
    assert f"as it was at {units.time_text(made.created_ms)} UTC" in (out / "index.html").read_text()
    again = run(request, Silent(), clock=lambda: made.created_ms / 1_000 + 7_300)
    assert summary(again, "traffic")["unseen_since_last_run"] == 0
    assert summary(again, "traffic")["day_records"] == summary(outcome, "traffic")["day_records"]


def test_history_that_somebody_removed_is_missed(
    server: Server, api: Client, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, traffic=counting)
    topic = unique()
    api.append(topic, *range(3))
    run_once(server.data_dir, out)
    shutil.rmtree(out / "history" / "traffic")
    with pytest.raises(LedgerError, match="is gone, and what it counted with it"):
        run_once(server.data_dir, out)
    assert summary(run_once(server.data_dir, out, fresh=True))["all"][topic] == 3


def test_fresh_may_skip_nothing(server: Server, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choosy(job: Job) -> Result:
        job.fresh("records", subscribe="a")
        return Result(summary={})

    stand_in(monkeypatch, traffic=choosy)
    outcome = run_once(server.data_dir, out)
    assert [entry.error for entry in outcome.failed] == [
        "ValueError: fresh() reads every topic from its mark to its pin: option subscribe would skip records"
    ]
