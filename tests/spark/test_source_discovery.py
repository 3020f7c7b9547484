"""Where the wheel is installed, format("topics") is known without a word in the session; PySpark finds the package
pyspark_topics by its name. In a process of its own, because Spark looks once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.server import Server

from .isolated import OURS, ROOT, environment

SCRIPT = """
import sys, warnings
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
assert "spark_pipeline" not in sys.modules
read = spark.read.format("topics").option("startingOffsets", '{"t": 2}').option("failOnDataLoss", "false")
print("before:", sorted(row["offset"] for row in read.load(sys.argv[1]).collect()))
from spark_pipeline.source import register
register(spark)
register(spark)
print("after:", read.load(sys.argv[1]).count())
"""


@pytest.mark.timeout(400)
def test_it_is_known_where_it_is_installed(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server()
    with server.client() as api:
        api.put("t", cap_records=3)
        api.append("t", *range(10))
    installed = tmp_path / "installed"
    installed.mkdir()
    for package in (*OURS, "pyspark_topics"):
        (installed / package).symlink_to(ROOT / package)
    environ = environment(tmp_path, PYTHONPATH=str(installed))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (script := elsewhere / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [environ["PYSPARK_PYTHON"], script, server.data_dir],
        capture_output=True,
        text=True,
        env=environ,
        cwd=elsewhere,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout.splitlines() == ["before: [8, 9, 10]", "after: 3"]
    assert "UserWarning: topic t: records 2 to 7 are gone (reason: cap)" in done.stderr  # where a person sees it
