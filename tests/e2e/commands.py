"""A `topics` command that runs beside the test: what it has printed so far, and how it ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .server import DEADLINE_S, TOPICS, clean_environment, eventually

_numbers = itertools.count(1)


class Command:
    """Its output goes to files, so that nobody waits for anybody; stdin is a pipe, or nothing."""

    def __init__(self, folder: Path, *args: str, url: str, stdin: bool = False, stdout: int | None = None) -> None:
        number = next(_numbers)
        self._stdout = folder / f"command-{number}.out"
        self._stderr = folder / f"command-{number}.err"
        with open(self._stdout, "wb") as out, open(self._stderr, "wb") as err:
            self.popen = subprocess.Popen(
                [TOPICS, *args],
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                env=clean_environment(TOPICS_URL=url, COLUMNS=80),
                start_new_session=True,
            )

    def lines(self) -> list[str]:
        """Whole ones only."""
        text = self._stdout.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_lines(self, count: int, *, within_s: float = DEADLINE_S) -> list[str]:
        def enough() -> bool:
            assert self.running or len(self.lines()) >= count, f"ended too early: {self.stderr()}"
            return len(self.lines()) >= count

        eventually(enough, within_s=within_s, what=f"{count} lines (stderr: {self.stderr()!r})")
        return self.lines()

    def wait_stderr(self, text: str) -> None:
        eventually(lambda: text in self.stderr(), what=f"{text!r} on stderr")

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def write(self, text: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text.encode())
        self.popen.stdin.flush()

    def close_stdin(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def interrupt(self) -> int:
        self.popen.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self, *, within_s: float = DEADLINE_S) -> int:
        return self.popen.wait(within_s)

    def close(self) -> None:
        if self.running:
            self.popen.kill()
        self.popen.wait()
        if self.popen.stdin is not None:
            try:
                self.popen.stdin.close()
            except BrokenPipeError:
                pass


StartCommand = Callable[..., Command]


def commands_fixture(tmp_path: Path) -> Iterator[StartCommand]:
    """Body of the `command` fixture: start commands, of which none outlives the test."""
    started: list[Command] = []

    def start(*args: object, url: str, stdin: bool = False, stdout: int | None = None) -> Command:
        started.append(Command(tmp_path, *map(str, args), url=url, stdin=stdin, stdout=stdout))
        return started[-1]

    yield start
    for command in started:
        command.close()


def read_all(fd: int) -> bytes:
    """From a pseudo-terminal or pipe, until its other end is closed."""
    found = b""
    while True:
        try:
            chunk = os.read(fd, 65_536)
        except OSError:  # how a pseudo-terminal says it
            return found
        if not chunk:
            return found
        found += chunk


command = pytest.fixture(commands_fixture)
