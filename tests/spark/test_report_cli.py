"""`topics report` as people and timers call it: what it says, how it ends, and what it is when Spark is elsewhere."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from e2e.server import TOPICS, Server, clean_environment, eventually, run_topics
from pyspark.sql import SparkSession

from spark_pipeline.reports import ledger
from spark_pipeline.reports.report import Finding, Job, Metric
from spark_pipeline.reports.report import Result as ReportResult
from topics.cli.datadir.report import report

from .reportrun import counting, files, stand_in

pytestmark = pytest.mark.timeout(900)

RECORDS = 2_000


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a server that goes on running."""
    folder = tmp_path_factory.mktemp("cli")
    server = Server(folder / "data", log=folder / "server.log")
    try:
        server.wait_ready()
        with server.client() as api:
            for _ in range(RECORDS // 500):
                api.append("orders", *range(500))
        yield server.data_dir
    finally:
        server.close()


def call(*args: object) -> Result:
    return CliRunner().invoke(report, [str(arg) for arg in args])


# --- in this process, with the tests' own Spark ---


def test_fine(spark: SparkSession, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, traffic=counting)
    out = tmp_path / "out"
    done = call("--data-dir", data_dir, "--out", out, "--only", "traffic")
    assert done.exit_code == 0
    assert done.stdout == f"{out / 'index.html'}\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "topics: starting Spark"
    assert lines[1] == f"topics: looking at {data_dir}"
    assert re.fullmatch(r"topics: traffic done in \d+\.\d s", lines[2])
    assert lines[3] == f"topics: writing {out}"
    assert spark.range(3).count() == 3, "a session that was there is left there"


def test_breach_and_failure(
    spark: SparkSession, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measuring(job: Job) -> ReportResult:
        return ReportResult(
            summary={},
            findings=[Finding("breach", "A block is damaged.")],
            metrics=[Metric("traffic_day_records", "Records of a day.", 7)],
        )

    def failing(job: Job) -> ReportResult:
        job.spark.read.format("topics").option("path", "/nowhere").option("view", "topics").load().count()
        raise AssertionError("not reached")

    limits = tmp_path / "limits.toml"
    limits.write_text("traffic_day_records = { max = 5 }\nloss_unbalanced_topics = { max = 0 }\n")
    stand_in(monkeypatch, traffic=measuring, loss=failing)
    common = ["--data-dir", data_dir, "--out", tmp_path / "out", "--thresholds", limits]
    done = call(*common, "--only", "traffic", "--textfile", tmp_path / "t.prom")
    assert done.exit_code == 3
    assert "topics: traffic: A block is damaged.\n" in done.stderr
    assert "topics: threshold: traffic_day_records is 7, beyond the max of 5. Records of a day.\n" in done.stderr
    assert "topics_report_traffic_day_records 7\n" in (tmp_path / "t.prom").read_text()
    assert "loss_unbalanced_topics" not in done.stderr, "that report was not asked for"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "traffic_day_records is 7, beyond the max of 5" in page

    done = call(*common, "--only", "loss,traffic")
    assert done.exit_code == 1, "a failure weighs more than a breach"
    failed = next(line for line in done.stderr.splitlines() if "loss failed:" in line)
    assert "/nowhere" in failed
    assert "Traceback" not in done.stderr
    assert "\tat " not in done.stderr
    assert "threshold: traffic_day_records is 7" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--data-dir", "/nowhere"], "/nowhere"),
        (["--only", "trafic"], "--only trafic: there is no such report; did you mean traffic?"),
        (["--only", "x"], "--only x: there is no such report; there are integrity, letters, loss,"),
        (["--thresholds", "/nowhere/limits.toml"], "--thresholds /nowhere/limits.toml: no such file"),
        (["--textfile", "/nowhere/t.prom"], "there is no folder /nowhere"),
        (["--since", "yesterday"], "'yesterday' is neither a span (7d, 36h, 90m) nor a time"),
        (["--data-dir", "a", "--snapshot", "b"], "Give --data-dir or --snapshot, not both."),
        (["--out", "/proc/none"], "--out /proc/none:"),
    ],
)
def test_mistakes(data_dir: Path, tmp_path: Path, args: list[str], said: str) -> None:
    given = args if "--data-dir" in args else ["--data-dir", str(data_dir), *args]
    done = call(*given, *([] if "--out" in args else ["--out", tmp_path / "out"]))
    assert done.exit_code == 2
    assert said in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_thresholds_for_what_no_report_has(data_dir: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("traffic_day_record = { max = 5 }\n")
    done = call("--data-dir", data_dir, "--out", tmp_path / "out", "--thresholds", limits)
    assert done.exit_code == 2
    assert done.stderr == (
        f"topics: --thresholds {limits}: no report has a metric traffic_day_record; did you mean traffic_day_records"
        f"{done.stderr.partition('traffic_day_records')[2]}"
    )


def test_a_textfile_that_cannot_be_written(
    spark: SparkSession, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, traffic=counting)
    (tmp_path / "t.prom").mkdir()
    done = call(
        "--data-dir", data_dir, "--out", tmp_path / "out", "--only", "traffic", "--textfile", tmp_path / "t.prom"
    )
    assert done.exit_code == 1
    assert "is a directory" in done.stderr.splitlines()[-1]
    assert (tmp_path / "out" / "ledger.json").exists(), "it counts all the same"


def test_two_at_once(data_dir: Path, tmp_path: Path) -> None:
    with ledger.locked(tmp_path / "out"):
        done = call("--data-dir", data_dir, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "another run is writing there" in done.stderr


def test_the_list() -> None:
    done = call("--list")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    assert lines[0].startswith("traffic     How much is written")


@pytest.mark.parametrize(
    ("given", "back_ms"), [("7d", 7 * 86_400_000), ("36h", 129_600_000), ("90m", 5_400_000), ("2w", 14 * 86_400_000)]
)
def test_since(spark: SparkSession, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
               given: str, back_ms: int) -> None:  # fmt: skip
    seen: list[int | None] = []

    def looking(job: Job) -> ReportResult:
        seen.append(job.since_ms)
        return ReportResult(summary={})

    stand_in(monkeypatch, traffic=looking)
    now_ms = int(time.time() * 1_000)
    out = tmp_path / "out"
    assert call("--data-dir", data_dir, "--out", out, "--only", "traffic", "--since", given).exit_code == 0
    assert call("--data-dir", data_dir, "--out", out, "--only", "traffic", "--since", "2026-11-16T01:00").exit_code == 0
    assert seen[0] is not None
    assert now_ms - back_ms <= seen[0] <= now_ms - back_ms + 120_000
    assert seen[1] == 1_794_790_800_000


# --- processes of their own ---


def test_without_pyspark(data_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None; from topics.cli.main import main; "
        "main(['report', '--data-dir', sys.argv[1], '--out', sys.argv[2]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(data_dir), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "topics: reports need pyspark, which is not installed: pip install 'topicsd[spark]'\n"


def test_without_java(data_dir: Path, tmp_path: Path) -> None:
    done = run_topics(
        "report", "--data-dir", str(data_dir), "--out", str(tmp_path / "out"), JAVA_HOME=tmp_path / "no-java"
    )
    assert done.returncode == 2
    assert "Spark needs Java 17 or newer, and there is none in JAVA_HOME" in done.stderr
    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    old.chmod(0o755)
    done = run_topics("report", "--data-dir", str(data_dir), "--out", str(tmp_path / "o"), JAVA_HOME=tmp_path / "old")
    assert done.returncode == 2
    assert f"Spark needs Java 17 or newer, and {old} is version 8" in done.stderr
    assert len(done.stderr.splitlines()) == 2, "starting Spark, and why not"


def test_killed_in_the_middle_and_run_again_on_a_terminal(data_dir: Path, tmp_path: Path) -> None:
    """kill -9 when some of its tables are written; the next run, watched by a person, counts every record once."""
    out = tmp_path / "out"
    command = [str(TOPICS), "report", "--data-dir", str(data_dir), "--out", str(out), "--only", "traffic,loss"]
    with open(tmp_path / "first.log", "wb") as log:
        first = subprocess.Popen(
            command, stdout=log, stderr=log, env=clean_environment(), cwd=tmp_path, start_new_session=True
        )
    try:
        eventually(lambda: files(out / "staging" / "history"), within_s=300, what="tables that are not published")
    finally:
        os.killpg(first.pid, signal.SIGKILL)  # its own session: itself and its JVM
        first.wait()
    assert not (out / "ledger.json").exists()
    assert files(out / "staging" / "history")

    parent, child = pty.openpty()
    second = subprocess.Popen(
        command, stdin=child, stdout=subprocess.PIPE, stderr=child, env=clean_environment(COLUMNS=100), cwd=tmp_path
    )
    os.close(child)
    shown = _read_all(parent)
    stdout, _ = second.communicate()
    assert second.returncode == 0, shown
    assert stdout.decode() == f"{out / 'index.html'}\n"
    assert "Traffic" in shown
    assert re.search("✓|•", shown)
    assert "WARN" not in shown
    assert "Stage" not in shown
    told = (out / "summary.json").read_text()
    assert f'"records": {RECORDS}' in told
    assert not files(out / "staging")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.log", "out"], "nothing else is left lying about"


def _read_all(descriptor: int) -> str:
    found = b""
    while True:
        try:
            chunk = os.read(descriptor, 65_536)
        except OSError:  # whoever wrote to the terminal is gone
            chunk = b""
        if not chunk:
            os.close(descriptor)
            return found.decode(errors="replace")
        found += chunk


def test_on_a_cluster_whose_machines_do_not_have_the_code(data_dir: Path, tmp_path: Path) -> None:
    """Two workers as processes of their own. Their Python has the libraries, but not this project: it is shipped."""
    python = tmp_path / "python"
    libraries = sysconfig.get_paths()["purelib"]
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{libraries}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    alone = subprocess.run([python, "-c", "import pyspark, msgspec; import topics"], capture_output=True, text=True,
                           cwd=tmp_path)  # fmt: skip
    assert "No module named 'topics'" in alone.stderr
    out = tmp_path / "out"
    done = subprocess.run(
        [TOPICS, "report", "--data-dir", data_dir, "--out", out, "--only", "traffic", "--only", "integrity",
         "--master", "local-cluster[2,1,1024]"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(PYSPARK_PYTHON=python, SPARK_LOCAL_IP="127.0.0.1"),
        timeout=600,
    )  # fmt: skip
    log = (out / "spark.log").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{log[-3_000:]}"
    assert f'"records": {RECORDS}' in (out / "traffic.json").read_text()
