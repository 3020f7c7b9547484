"""Drives a server of test roles from outside: what it shows on its board, in its trace and on stderr."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from figures import KILLS, STOPS

from topics.actors.inspect.attach import open_board
from topics.actors.startup.datadir_lock import read_lock_info
from topics.actors.supervisor.process import ProcessSpec
from topics.errors import TopicsError
from topics.settings import Settings
from topics.shm.counters import Board, State, Word

HERE = Path(__file__).parent
DEADLINE_S = 30.0
T = TypeVar("T")


def eventually(look: Callable[..., T | Literal[False] | None], *, within_s: float = DEADLINE_S, what: str = "") -> T:
    """Poll until `look` gives something true; fail with its last answer.

    In a loop it is a lambda that binds the loop's variable by a default: mypy takes that for `...` only.
    """
    deadline = time.monotonic() + within_s
    while True:
        answer = look()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or look} (last: {answer!r})")
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def children(pid: int) -> dict[int, str]:
    """Of a process, with the names that the kernel shows."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found[int(child)] = Path(f"/proc/{child}/comm").read_text().strip()
        except OSError:
            continue  # it has ended since
    return found


def _sit_down_at(terminal: int) -> None:
    """Be a session of its own on this terminal."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    os.dup2(terminal, 0)


class RoleServer:
    def __init__(
        self,
        data_dir: Path,
        specs: Sequence[ProcessSpec],
        links: Sequence[tuple[str, str]] = (),
        *,
        stop_timeout_ms: int = 5_000,
        terminal: int | None = None,
        **settings: Any,
    ) -> None:
        self.data_dir = data_dir
        values = {"port": 0, "heartbeat_ms": 200, "ring_bytes": 65_536, "dumpable": os.geteuid() != 0, **settings}
        self.settings = Settings(data_dir=str(data_dir), **values)
        plan = {"settings": self.settings, "specs": specs, "links": links, "stop_timeout_ms": stop_timeout_ms}
        self._stderr = open(data_dir.parent / f"{data_dir.name}.stderr", "wb")  # noqa: SIM115
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "serve_roles.py"), msgspec.json.encode(plan).decode()],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=terminal is None,  # a process group of its own, as a terminal gives it
            preexec_fn=None if terminal is None else lambda: _sit_down_at(terminal),
        )
        self.pid = self.popen.pid
        self._board: Board | None = None

    @property
    def board(self) -> Board:
        if self._board is None:
            self._board = eventually(self._find_board, what="a board")
        return self._board

    def _find_board(self) -> Board | None:
        if self.popen.poll() is not None:
            raise AssertionError(f"the server ended with {self.popen.returncode}: {self.stderr()}")
        try:
            info = read_lock_info(str(self.data_dir))
            return open_board(info) if info.pid == self.pid else None
        except TopicsError:
            return None

    def state(self, name: str) -> State:
        return self.board.row(name).state

    def word(self, name: str, word: int) -> int:
        return self.board.row(name)[word]

    def pids(self) -> dict[str, int]:
        return {row.name: row[Word.PID] for row in self.board.rows()}

    def wait_state(self, name: str, state: State, *, generation: int = 1) -> None:
        eventually(
            lambda: self.state(name) is state and self.word(name, Word.GENERATION) >= generation,
            what=f"{name} {state.name} in life {generation}\n{self.stderr()}",
        )

    def wait_all_ready(self) -> None:
        for row in self.board.rows():
            self.wait_state(row.name, State.READY)

    def trace(self, name: str | None = None, event: str | None = None) -> list[dict[str, Any]]:
        try:
            text = (self.data_dir / "trace.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if name in (None, line["name"]) and event in (None, line["event"])]

    def stderr(self) -> str:
        return (self.data_dir.parent / f"{self.data_dir.name}.stderr").read_text()

    def kill_child(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.word(name, Word.PID)
        os.kill(pid, number)
        KILLS.add(number == signal.SIGKILL)
        STOPS.add(number == signal.SIGSTOP)
        return pid

    def stop(self, *, within_s: float = DEADLINE_S) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(within_s)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self._stderr.close()
        if self._board is not None:
            self._board.close()
