"""Two workers with an executor each, in processes of their own, on the files of a running server. The executors' Python
has PySpark, pyarrow, msgspec and xxhash; the project reaches it as a zip."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.server import Server

from .isolated import archive, environment

MASTER = "local-cluster[2,1,1024]"
JOB = Path(__file__).with_name("clusterjob.py")


@pytest.mark.timeout(900)
def test_a_cluster_of_two_workers(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server()
    with server.client() as api:
        for batch in range(50):
            api.append("large", *({"n": batch * 10 + n, "pad": "z" * 2_000} for n in range(10)))
        api.append("small", 1, 2, 3)
    environ = environment(tmp_path)
    (out := tmp_path / "out").mkdir()
    command = [
        f"{environ['SPARK_HOME']}/bin/spark-submit",
        *("--master", MASTER),
        *("--py-files", str(archive(tmp_path / "topics.zip"))),
        *("--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.sql.shuffle.partitions=2"),
        *("--conf", f"spark.local.dir={tmp_path / 'local'}"),
        *("--conf", f"spark.sql.warehouse.dir={tmp_path / 'warehouse'}"),
        # A task waits for no executor: whichever is free gets it, so that both have work.
        *("--conf", "spark.locality.wait=0s"),
        *("--conf", "spark.scheduler.minRegisteredResourcesRatio=1.0"),
        *("--conf", "spark.scheduler.maxRegisteredResourcesWaitingTime=120s"),
        str(JOB),
        str(server.data_dir),
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=800)
    assert done.returncode == 0, f"{done.stdout[:4_000]}\n{done.stderr[-3_000:]}"
    answer = json.loads((out / "answer.json").read_text())
    assert answer["master"] == MASTER
    assert "[DATA_SOURCE_NOT_FOUND]" in answer["before"], "it is known by register() alone"
    assert answer["counts"] == {"large": 500, "small": 3}
    folders = {folder for folder, _, _ in answer["tasks"]}
    assert len(folders) == 2, folders
    assert all("/work/app-" in folder for folder in folders), "executors, not the driver"
    assert all("topics.zip" in file for _, file, _ in answer["tasks"])
    assert len(answer["tasks"]) >= 6
    assert sum(count for _, _, count in answer["tasks"]) == 503
    assert answer["views"]["topics"] == 2
    assert answer["views"]["segments"] >= 2  # a log file of each shard
    assert answer["copied"] == [*(["large", seq] for seq in range(1, 501)), *(["small", seq] for seq in (1, 2, 3))]
    assert answer["same values"]
