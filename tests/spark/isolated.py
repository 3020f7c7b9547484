"""A Python that has what the source needs and nothing of this project, as on a machine of a cluster; and a Spark whose
workers leave their files in the test's folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("pyspark", "py4j", "pyarrow", "msgspec", "xxhash")
OURS = ("topics", "spark_pipeline")


def python(folder: Path) -> Path:
    """Without the site packages of the environment that runs the tests, in which this project is installed."""
    site = folder / "site"
    site.mkdir()
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        (place,) = spec.submodule_search_locations or [""]
        (site / name).symlink_to(place)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    found = subprocess.run([script, "-c", "import topics"], capture_output=True, text=True, cwd=folder)
    assert "No module named 'topics'" in found.stderr, "it must not have the project"
    return script


def spark_home(folder: Path) -> Path:
    """Workers of a local cluster write below SPARK_HOME."""
    home = folder / "spark"
    home.mkdir()
    for path in Path(pyspark.__path__[0]).iterdir():
        (home / path.name).symlink_to(path)
    return home


def archive(path: Path, *packages: str) -> Path:
    """The project as --py-files takes it."""
    with zipfile.ZipFile(path, "w") as made:
        for package in packages or OURS:
            for file in sorted((ROOT / package).rglob("*.py")):
                made.write(file, file.relative_to(ROOT))
    return path


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of a job: nothing of whoever runs the tests but where Java is."""
    interpreter = str(python(folder))
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME", "TMPDIR", "LANG") if name in os.environ}
    return {
        **kept,
        "SPARK_HOME": str(spark_home(folder)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": interpreter,
        "PYSPARK_DRIVER_PYTHON": interpreter,
        **more,
    }
