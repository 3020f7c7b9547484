"""`make bench-spark`: scan and aggregate a topic's segments with Spark, beside Parquet and JSON lines of the same rows.

    python -m benchmarks.spark [--records N] [--rounds N] [--keep DIR] [--json FILE]

A real server writes the records and is stopped; Spark's own readers get the same rows in their own formats. Each round
asks every reader in turn, in one session that has been warmed up; figures are medians. Every query loads its frame
anew: Spark keeps the plan of a frame of ours, so a frame that is used again would be read without planning. What is
timed is loading, planning and reading, of all readers. One session per number of cores, each in a process of its own,
because a JVM has one for life.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import child_environment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPICS = 4
BATCH = 10_000
RECORD_BYTES = 100
NARROW = "topic string, timestamp timestamp"
WHOLE = "topic string, timestamp timestamp, value binary"
TEXT = "topic string, timestamp timestamp, value string"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", help="a folder for the files, kept for the next run")
    parser.add_argument("--json", dest="figures", help="write all figures to this file")
    parser.add_argument("--measure", metavar="CORES", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(Path(given.keep), int(given.measure), given.records, given.rounds)))
        return
    with tempfile.TemporaryDirectory(prefix="topics-bench-spark-") as scratch:
        place = Path(given.keep or scratch)
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "data" / "topics.json").exists():
            say(f"writing {given.records:,} records of {RECORD_BYTES} bytes through a server")
            write(place, given.records)
        results: dict[str, Any] = {}
        for cores in (2, 1):
            say(f"measuring on local[{cores}]")
            results[str(cores)] = in_a_process(place, cores, given)
    show(results, given.records)
    if given.figures:
        Path(given.figures).write_text(json.dumps(results, indent=1) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def in_a_process(place: Path, cores: int, given: argparse.Namespace) -> Any:
    command = [sys.executable, "-m", "benchmarks.spark", "--measure", str(cores), "--keep", str(place)]
    command += ["--records", str(given.records), "--rounds", str(given.rounds)]
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


# --- the rows ---


def write(place: Path, records: int) -> None:
    """Through the API, so that the files are what a server writes."""
    port_file = place / "port"
    port_file.unlink(missing_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    environ |= {"TOPICS_DATA_DIR": str(place / "data"), "TOPICS_PORT": "0", "TOPICS_PORT_FILE": str(port_file)}
    server = subprocess.Popen(
        [Path(sys.executable).with_name("topics"), "serve"],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (port_file.exists() and port_file.read_text().strip()):
            if server.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.05)
        connection = http.client.HTTPConnection("127.0.0.1", int(port_file.read_text()))
        for number in range(0, records, BATCH):
            body = batch(number, min(BATCH, records - number))
            path = f"/v0/topics/bench-{number // BATCH % TOPICS}"
            while True:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status in (200, 201):
                    break
                if answer.status not in (429, 503):
                    sys.exit(f"the server refused: {text[:500].decode()}")
                time.sleep(0.2)
    finally:
        server.terminate()
        server.wait()


def batch(first: int, count: int) -> bytes:
    values = []
    for number in range(first, first + count):
        head = f'{{"n":{number},"user":"u-{number % 9973}","page":"/products/{number % 401}","pad":"'
        values.append(f'{{"data":{head}{"x" * (RECORD_BYTES - len(head) - 2)}"}}}}')
    return ('{"records":[' + ",".join(values) + '],"return_seqs":false}').encode()


# --- the readers ---


def session(cores: int) -> SparkSession:
    from pyspark.sql import SparkSession

    from spark_pipeline.source import register

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("bench")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def topics(spark: SparkSession, place: Path, schema: str, **options: str) -> DataFrame:
    return spark.read.format("topics").schema(schema).options(path=str(place / "data"), **options).load()


def ends(spark: SparkSession, place: Path, share: float) -> str:
    """`endingOffsets` for a part of every topic."""
    heads = spark.read.format("topics").options(path=str(place / "data"), view="topics").load()
    return json.dumps({row.topic: int(row.head_seq * share) + 1 for row in heads.collect()})


def hourly(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return frame.groupBy("topic", f.date_trunc("hour", "timestamp").alias("hour")).agg(f.count("*").alias("records"))


def bytes_hourly(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return frame.groupBy("topic", f.date_trunc("hour", "timestamp").alias("hour")).agg(
        f.sum(f.length("value")).alias("b")
    )


def measure(place: Path, cores: int, records: int, rounds: int) -> dict[str, Any]:
    spark = session(cores)
    peers(spark, place)
    half, quarter = ends(spark, place, 0.5), ends(spark, place, 0.25)

    def parquet() -> DataFrame:
        return spark.read.schema(TEXT).parquet(str(place / "parquet"))

    def lines() -> DataFrame:
        return spark.read.schema(TEXT).json(str(place / "json"))

    work = {
        "count: topics": lambda: hourly(topics(spark, place, NARROW)),
        "count: parquet": lambda: hourly(parquet()),
        "count: json": lambda: hourly(lines()),
        "bytes: topics": lambda: bytes_hourly(topics(spark, place, WHOLE)),
        "bytes: parquet": lambda: bytes_hourly(parquet()),
        "bytes: json": lambda: bytes_hourly(lines()),
        "count: topics, half": lambda: hourly(topics(spark, place, NARROW, endingOffsets=half)),
        "count: topics, a quarter": lambda: hourly(topics(spark, place, NARROW, endingOffsets=quarter)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, query in work.items():
            begin = time.perf_counter()
            found = query().collect()
            took = time.perf_counter() - begin
            if name.startswith("count") and "," not in name:
                counted = sum(row.records for row in found)
                if counted != records:
                    sys.exit(f"{name}: {counted:,} records found, {records:,} written")
            if turn:  # the first one warms up
                seconds[name].append(took)
    spark.stop()
    return {name: {"median_s": statistics.median(took), "all_s": took} for name, took in seconds.items()}


def peers(spark: SparkSession, place: Path) -> None:
    """The same rows as Parquet and as JSON lines, once."""
    rows = None
    for kind in ("parquet", "json"):
        if (place / kind / "_SUCCESS").exists():
            continue
        rows = rows if rows is not None else topics(spark, place, WHOLE)
        frame = rows.selectExpr("topic", "timestamp", "cast(value as string) value")
        getattr(frame.write.mode("overwrite"), kind)(str(place / kind))


# --- the table ---


def show(results: dict[str, Any], records: int) -> None:
    two, one = results["2"], results["1"]

    def rate(figures: dict[str, Any], name: str, share: float = 1.0) -> float:
        return records * share / float(figures[name]["median_s"])

    def line(*cells: str) -> None:
        print("| " + " | ".join(cells) + " |")

    line("work, local[2]", "topics", "Parquet", "JSON lines", "against JSON", "wanted", "met")
    line(*["---"] * 7)
    for name, text, wanted in (
        ("count", "count by topic and hour", 1.5e6),
        ("bytes", "bytes of data by topic and hour", 0.0),
    ):
        ours, parquet, lines = (rate(two, f"{name}: {kind}") for kind in ("topics", "parquet", "json"))
        met = ours >= wanted and ours >= 3 * lines if wanted else None
        line(
            text,
            *(f"{value / 1e6:.2f} M records/s" for value in (ours, parquet, lines)),
            f"{ours / lines:.2f}x",
            "≥ 1.5 M/s and ≥ 3x" if wanted else "none fixed",
            "–" if met is None else "yes" if met else "NO",
        )
    print()
    line("count by topic and hour", "1 core", "2 cores", "how much faster")
    line(*["---"] * 4)
    for name, share in (("", 1.0), (", half", 0.5), (", a quarter", 0.25)):
        both = [figures[f"count: topics{name}"]["median_s"] for figures in (one, two)]
        line(f"{records * share:,.0f} records", f"{both[0]:.2f} s", f"{both[1]:.2f} s", f"{both[0] / both[1]:.2f}x")


if __name__ == "__main__":
    main()
