"""A real server as a child of the test: `topics serve` on a free port and a folder of its own.

Only its pid is ever signalled, and those of its children as its own board shows them. Whatever is left when the test
ends is killed; the supervisor's death takes the children with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from figures import CRASH_POINTS, KILLS, RECOVERIES, STOPS

from topics.cli.server.ps import Listing, look
from topics.errors import TopicsError

from .client import Client, Lane

TOPICS = Path(sys.executable).with_name("topics")
DEADLINE_S = 30.0
T = TypeVar("T")


def eventually(
    probe: Callable[..., T | Literal[False] | None],
    *,
    within_s: float = DEADLINE_S,
    every_s: float = 0.01,
    what: str = "",
) -> T:
    """Poll until the probe gives something true; fail with its last answer.

    In a loop it is a lambda that binds the loop's variable by a default: mypy takes that for `...` only.
    """
    deadline = time.monotonic() + within_s
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or probe} (last: {answer!r})")
        time.sleep(every_s)


def clean_environment(**environ: object) -> dict[str, str]:
    """The environment without the TOPICS_* of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
    return kept | {name: str(value) for name, value in environ.items()}


def run_topics(*args: str, cwd: Path | None = None, **environ: object) -> subprocess.CompletedProcess[str]:
    """A `topics` command to its end."""
    done = subprocess.run(
        [TOPICS, *args], capture_output=True, text=True, cwd=cwd, env=clean_environment(**environ), timeout=60
    )
    if "TOPICS_KILL_POINT" in environ and done.returncode == -signal.SIGKILL:
        CRASH_POINTS.add()
    return done


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


class Server:
    def __init__(self, data_dir: Path, *, log: Path, **environ: object) -> None:
        self.data_dir = data_dir
        self.log = log
        self._port_file = log.with_suffix(".port")
        self._port_file.unlink(missing_ok=True)
        RECOVERIES.add((data_dir / "topics.json").exists())
        self._port: int | None = None
        self._clients: list[Client] = []
        given = {
            "TOPICS_DATA_DIR": data_dir,
            "TOPICS_PORT": 0,
            "TOPICS_PORT_FILE": self._port_file,
            "TOPICS_WAL_SHARDS": 2,
            "TOPICS_WAL_FILE_BYTES": 8 << 20,  # each life reserves one for each shard
            # A machine that is busy with other tests is no reason to refuse requests; test_throttling.py sets its own.
            "TOPICS_PRESSURE_LAG_MS": 60_000,
            "TOPICS_PRESSURE_COMMIT_MS": 60_000,
            # Tests look at descriptors and memory of processes, which a user other than root may not.
            "TOPICS_DUMPABLE": int(os.geteuid() != 0),
            **environ,
        }
        with open(log, "wb") as file:
            self.popen = subprocess.Popen(
                [TOPICS, "serve"],
                stdout=file,
                stderr=file,
                cwd=log.parent,
                env=clean_environment(**given),
                start_new_session=True,  # Ctrl-C of whoever runs the tests is not for it
            )
        self.pid = self.popen.pid

    # --- starting ---

    @property
    def port(self) -> int:
        if self._port is None:
            self._port = int(eventually(self._read_port, what="a port file"))
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _read_port(self) -> str:
        if self.popen.poll() is not None:
            raise AssertionError(f"the server ended with {self.popen.returncode}:\n{self.output()}")
        try:
            return self._port_file.read_text().strip()
        except FileNotFoundError:
            return ""

    def wait_ready(self) -> None:
        """Whoever answers says so, and so do all processes."""
        with self.client() as client:
            eventually(lambda: client.get("/v0/ready").status == 200, what="readiness")
        eventually(lambda: all(line.state == "ready" for line in self.ps().processes), what="ready processes")

    def client(self, lane: Lane = "http1") -> Client:
        """A connection, which close() closes if the test does not."""
        self._clients.append(Client(self.port, lane))
        return self._clients[-1]

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    # --- looking at its processes ---

    def ps(self) -> Listing:
        return look(str(self.data_dir))

    def pid_of(self, name: str) -> int:
        """The pid of a child that runs now."""

        def find() -> int | None:
            try:
                return {line.name: line.pid for line in self.ps().processes}[name]
            except TopicsError:
                return None

        pid = eventually(find, what=f"a pid for {name}")
        assert pid is not None
        return pid

    def pids(self) -> dict[str, int]:
        return {line.name: line.pid for line in self.ps().processes if line.pid is not None}

    def sockets_of(self, name: str) -> int:
        """How many sockets a child holds open."""
        count = 0
        for entry in Path(f"/proc/{self.pid_of(name)}/fd").iterdir():
            try:
                count += os.readlink(entry).startswith("socket:")
            except FileNotFoundError:
                pass
        return count

    # --- ending ---

    def signal_child(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.pid_of(name)
        os.kill(pid, number)
        KILLS.add(number == signal.SIGKILL)
        STOPS.add(number == signal.SIGSTOP)
        return pid

    def stop(self, *, within_s: float = DEADLINE_S) -> int:
        """Ask it to stop; the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(within_s)

    def kill(self) -> None:
        """kill -9 of the supervisor; its children follow it."""
        children = self.pids()
        self.popen.kill()
        KILLS.add()
        self.popen.wait()
        for name, pid in children.items():
            eventually(lambda pid=pid: gone(pid), what=f"the end of {name}")

    def close(self) -> None:
        """However the test ended, nothing of it runs on."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for client in self._clients:
            client.close()
