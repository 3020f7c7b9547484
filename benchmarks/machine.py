"""What the numbers were measured on: a figure without its machine says nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    processor: str
    cores: int
    memory_gb: int
    kernel: str
    python: str
    filesystem: str
    redis: str | None

    def __str__(self) -> str:
        parts = [
            f"{self.processor}, {self.cores} cores, {self.memory_gb} GB",
            f"Linux {self.kernel}",
            f"Python {self.python}",
            f"data on {self.filesystem}",
            f"Redis {self.redis}" if self.redis else "no Redis",
        ]
        return " · ".join(parts)


def describe(folder: Path | None) -> Machine:
    return Machine(
        processor=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 1e6),
        kernel=platform.release(),
        python=platform.python_version(),
        filesystem=filesystem_of(folder or Path(tempfile.gettempdir())),
        redis=_redis_version(),
    )


def filesystem_of(folder: Path) -> str:
    """The type of the file system that holds the folder: on tmpfs an fsync costs nothing."""
    path = str(folder.resolve())
    best, kind = "", "unknown"
    for row in Path("/proc/mounts").read_text().splitlines():
        mount, fstype = row.split()[1:3]
        inside = mount == "/" or path == mount or path.startswith(mount + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fstype
    return kind


def _field(file: str, name: str) -> str | None:
    for row in Path(file).read_text().splitlines():
        key, _, value = row.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _redis_version() -> str | None:
    if shutil.which("redis-server") is None:
        return None
    text = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=False).stdout
    return next((word[2:] for word in text.split() if word.startswith("v=")), "of unknown version")
