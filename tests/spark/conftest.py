"""One Spark and one server for all tests of this folder. Without Java or PySpark they are skipped, and say so."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from e2e.client import Client, unique
from e2e.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TESTS = Path(__file__).parent.parent


def _missing() -> str | None:
    if importlib.util.find_spec("pyspark") is None or importlib.util.find_spec("pyarrow") is None:
        return "PySpark is not installed: pip install 'topicsd[spark]'"
    home = os.environ.get("JAVA_HOME")
    if shutil.which(f"{home}/bin/java" if home else "java") is None:
        return "there is no Java: install a JRE 17 (or newer), or set JAVA_HOME"
    return None


class _Skipped(pytest.Module):
    """Stands for a module that could not even be imported."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip(str(_missing()), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.is_relative_to(Path(__file__).parent) and _missing() is not None:
        return _Skipped.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.spark)
            # Who comes first waits for Spark to start, and one that is interrupted within a call spoils the session.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores, and four attempts for a task, as on a cluster; one attempt is what local[2] would give."""
    from pyspark.sql import SparkSession

    for name in [name for name in os.environ if name.startswith("TOPICS_")]:
        del os.environ[name]  # of whoever runs the tests
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # Functions of test modules are known to the workers by their names.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("topics tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server, for all that asks for nothing special."""
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder / "data", log=folder / "server.log")
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output(), server.output()[-3_000:]
    finally:
        server.close()


@pytest.fixture(scope="session")
def api(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def topic() -> str:
    return unique("spark")
