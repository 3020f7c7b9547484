"""`topics top` and a progress bar in a real terminal (tmux): what stands on the screen at 80x24 and 120x40, after the
terminal has changed its size, and after the end, when the terminal is as it was. Skipped where there is no tmux.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import TOPICS, Server, clean_environment, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"), pytest.mark.full]


class Tmux:
    """A terminal with a shell in it, of a tmux server of our own."""

    def __init__(self, folder: Path, *, width: int, height: int) -> None:
        self._socket = folder / "tmux"
        self._tmux(
            *("-f", "/dev/null", "new-session", "-d", "-s", "t", "-c", folder, "-x", width, "-y", height),
            "env -i PATH=$PATH TERM=screen-256color PS1='ready> ' LANG=C.UTF-8 bash --norc --noprofile -i",
        )
        self.wait_for("ready>")

    def _tmux(self, *args: object) -> str:
        command = ["tmux", "-S", str(self._socket), *map(str, args)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, env=clean_environment(LANG="C.UTF-8")
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def screen(self) -> list[str]:
        return self._tmux("capture-pane", "-p", "-t", "t").splitlines()

    def wait_for(self, *words: str) -> list[str]:
        def there() -> list[str] | None:
            shown = self.screen()
            return shown if all(word in "\n".join(shown) for word in words) else None

        try:
            return eventually(there, every_s=0.05) or []
        except AssertionError:
            raise AssertionError("not shown: {}\n{}".format(words, "\n".join(self.screen()))) from None

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-t", "t", "-l", text)

    def press(self, *keys: str) -> None:
        """By their names, as tmux knows them."""
        self._tmux("send-keys", "-t", "t", *keys)

    def enter(self, line: str) -> None:
        self.type(line)
        self.press("Enter")

    def resize(self, *, width: int, height: int) -> None:
        self._tmux("resize-window", "-t", "t", "-x", width, "-y", height)

    def other_screen(self) -> bool:
        return self._tmux("display-message", "-p", "-t", "t", "#{alternate_on}").strip() == "1"

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True, timeout=30)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Tmux]:
    tmux = Tmux(tmp_path, width=80, height=24)
    yield tmux
    tmux.close()


def top(server: Server) -> str:
    return f"{TOPICS} top --interval 0.2 --data-dir {server.data_dir}"


def fits(screen: list[str], *, width: int) -> bool:
    """Nothing is cut but the line on top, which holds the path of the data."""
    return max(map(len, screen)) <= width and not any("…" in line for line in screen[1:])


PROCESSES = ["supervisor", "gateway-0", "router", "queue", "shard-0", "shard-1"]


def rows(screen: list[str]) -> list[str]:
    return [line.split()[0] for line in screen if line.split() and line.split()[0] in PROCESSES]


def test_top_at_80_and_120_columns(terminal: Tmux, server: Server) -> None:
    terminal.enter("echo bef''ore; stty -g > before")
    terminal.wait_for("before\nready>")
    terminal.enter(top(server))
    narrow = terminal.wait_for("sync p99", "heartbeat", "shard-1")
    assert terminal.other_screen()
    assert fits(narrow, width=80)
    assert rows(narrow) == PROCESSES
    text = "\n".join(narrow)
    assert "pressure" in text
    assert "memory" in text
    assert "ring high" not in text  # not that important

    terminal.resize(width=120, height=40)
    wide = terminal.wait_for("requests/s", "log/s", " topics ")
    assert fits(wide, width=120)
    assert rows(wide) == PROCESSES

    terminal.resize(width=60, height=20)
    eventually(lambda: "restarts" not in "\n".join(terminal.screen()), what="fewer columns")
    small = terminal.wait_for("heartbeat", "shard-1", "sync p99")
    assert fits(small, width=60)
    assert rows(small) == PROCESSES

    terminal.resize(width=80, height=24)
    terminal.type("q")
    eventually(lambda: not terminal.other_screen(), what="the first screen")
    terminal.wait_for("before\nready>")  # what was there before is there again
    terminal.enter("stty -g > after; cmp before after && echo sa''me; tput cnorm; echo code=$?")
    terminal.wait_for("same", "code=0")


def test_it_echoes_again_after_ctrl_c(terminal: Tmux, server: Server) -> None:
    terminal.enter(top(server))
    terminal.wait_for("heartbeat")
    terminal.press("C-c")
    eventually(lambda: not terminal.other_screen(), what="the first screen")
    terminal.enter("echo code=$?")
    screen = terminal.wait_for("code=130", "echo code=")
    assert not any("Traceback" in line for line in screen)


def test_a_question_that_is_not_answered(terminal: Tmux, server: Server) -> None:
    """No is no success; Ctrl-C is what it is everywhere."""
    for keys, code in (("n", 1), ("C-c", 130)):
        terminal.enter(f"clear; {TOPICS} topic rm nothing --url {server.url}")
        terminal.wait_for("for good? [y/N]")
        terminal.press(keys, *(["Enter"] if keys == "n" else []))
        terminal.wait_for("ready>")
        terminal.enter("echo code=$?")
        screen = terminal.wait_for(f"code={code}")
        assert not any("Traceback" in line for line in screen)


def test_a_progress_bar_that_fits_and_goes(terminal: Tmux, server: Server, tmp_path: Path) -> None:
    """Of a publish that takes a moment: it fits the terminal while it runs, and the last words stay."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"n": n, "pad": "x" * 100}) + "\n" for n in range(60_000)))
    command = f"{TOPICS} publish progress.bar --batch 20 --file {shlex.quote(str(lines))} --url {server.url}"
    terminal.enter(f"clear; {command}")
    during = terminal.wait_for("━", " records ", "/s 0:")
    assert fits(during, width=80)
    after = terminal.wait_for("published 60,000 records", "ready>")
    assert not any("━" in line for line in after)
    assert not terminal.other_screen()
