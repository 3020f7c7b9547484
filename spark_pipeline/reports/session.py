"""A Spark session for reports: quiet, on UTC, with the data source registered and, on a cluster, the code shipped.

A session that is there is used as it is (a notebook, a test). Under spark-submit its settings win; ours only fill in
what nobody has set. Everything that the JVM and its workers say goes to a log file: it is for whoever looks for it, not
for the terminal of someone who wants a report.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

import spark_pipeline
import topics
from topics.errors import TopicsError

JAVA_FROM = 17
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

_DEFAULTS = {
    "spark.app.name": "topics report",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
}
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}


class NoSpark(TopicsError):
    """Spark can't be started here. Says what is missing."""


@contextmanager
def opened(master: str | None, *, log: Path) -> Iterator[SparkSession]:
    """A session; one that is made here is also ended here."""
    active = SparkSession.getActiveSession()
    session = _made(master, log) if active is None else active
    try:
        with tempfile.TemporaryDirectory(prefix="topics-report-") as folder:  # executors fetch from it until the end
            _prepare(session, Path(folder))
            yield session
    finally:
        if active is None:
            session.stop()


def _made(master: str | None, log: Path) -> SparkSession:
    if master is not None and master.startswith("sc://"):
        raise NoSpark(f"--master {master}: Spark Connect has no way to ship the code; give the address of a master")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        _check_java()
    if master is None or master.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # `python3` of the PATH may be another one
    with open(log, "ab") as file:
        try:
            gateway = launch_gateway(popen_kwargs={"stdout": file, "stderr": file})
        except PySparkRuntimeError:
            raise NoSpark(f"the JVM of Spark ended at once; {log} says why: {_complaint(log)}") from None
    conf = SparkConf(_jvm=gateway.jvm)
    if master is not None:
        conf.setMaster(master)
    conf.setIfMissing("spark.master", "local[*]")
    local = is_local(conf.get("spark.master") or "")
    for name, value in {**_DEFAULTS, **(_LOOPBACK if local else {})}.items():
        conf.setIfMissing(name, value)
    conf.set("spark.ui.showConsoleProgress", "false")  # spark-submit turns it on where nobody asked for it
    # Counts by topic and hour are small: with Spark's 200 the starts of tasks are most of the work.
    conf.setIfMissing("spark.sql.shuffle.partitions", str(max(2 * (os.cpu_count() or 1), 4)) if local else "32")
    try:
        SparkContext(conf=conf, gateway=gateway)
        return SparkSession.builder.getOrCreate()
    except Exception as error:
        gateway.shutdown()
        raise NoSpark(f"Spark could not be started on {conf.get('spark.master')}: {_first_line(error)}") from None


def _prepare(session: SparkSession, folder: Path) -> None:
    from spark_pipeline.source import register

    context = session.sparkContext
    context.setLogLevel(session.conf.get("spark.log.level", "ERROR") or "ERROR")
    if not is_local(context.master):
        context.addPyFile(str(_packed(folder)))
    register(session)


def is_local(master: str) -> bool:
    """Whether executors are this very process."""
    return master == "local" or master.startswith("local[")


def _packed(folder: Path) -> Path:
    """Both packages in one file for the executors. They need pyarrow, msgspec and xxhash of their own."""
    path = folder / "topics.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (topics, spark_pipeline):
            root = Path(next(iter(package.__path__)))
            for file in sorted(root.rglob("*.py")):
                archive.write(file, f"{package.__name__}/{file.relative_to(root)}")
    return path


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    need = f"Spark needs Java {JAVA_FROM} or newer"
    hint = "install it (on Debian: apt-get install openjdk-17-jre-headless), or point JAVA_HOME to one"
    if program is None or not os.access(program, os.X_OK):
        raise NoSpark(f"{need}, and there is none{f' in JAVA_HOME ({home})' if home else ''}: {hint}")
    said = subprocess.run([program, "-version"], capture_output=True, text=True)
    found = _JAVA_VERSION.search(said.stderr + said.stdout)
    if found is not None and int(found[1]) < JAVA_FROM:
        raise NoSpark(f"{need}, and {program} is version {found[1]}: {hint}")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


def _complaint(log: Path) -> str:
    """The line that says what went wrong, of a log that is otherwise a stack."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if "Exception" in line or "rror" in line), lines[-1] if lines else "nothing")
