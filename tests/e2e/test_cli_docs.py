"""docs/CLI.md says what is so: its commands are run, and print what is shown; every command and option is in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from test_docs import block_after, needs_curl, read, steps, without_numbers

from topics.cli.main import VERBS, command_of

from .server import TOPICS, Server, clean_environment

DOCUMENT = read("docs/CLI.md")


def plain(text: str) -> str:
    return without_numbers(text.replace(",", ""))


@pytest.mark.full
@needs_curl
@pytest.mark.e2e
def test_the_commands(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server(data_dir=tmp_path / "topics-data")
    found = [step for step in steps(DOCUMENT) if step.kind == "text"]
    assert len(found) >= 9
    for step in found:
        done = subprocess.run(
            ["bash", "-c", step.command.replace("localhost:4000", f"127.0.0.1:{server.port}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=clean_environment(
                TOPICS_URL=server.url,
                COLUMNS="120",
                PATH=f"{TOPICS.parent}:{clean_environment()['PATH']}",
                XDG_STATE_HOME=tmp_path / "state",
            ),
            timeout=60,
        )
        assert plain(done.stdout) == plain(step.expected), step.command


@pytest.mark.e2e
@pytest.mark.parametrize("heading", ["## From Python", "### Jobs"])
def test_the_python_programs(server: Server, heading: str) -> None:
    program = block_after(DOCUMENT, f"\n{heading}\n", "python").replace("http://127.0.0.1:4000", server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == block_after(DOCUMENT, f"\n{heading}\n", "text"), done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_in_the_document(verb: str) -> None:
    section = DOCUMENT.partition(f"\n## topics {verb}\n")[2].partition("\n## ")[0]
    assert section
    command = command_of(verb)
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    params = [param for each in commands for param in each.params if isinstance(param, click.Option)]
    options = {name for param in params for name in param.opts if name.startswith("--")}
    documented = set(re.findall(r"--[a-z-]+", "".join(re.findall(r"^\| (`--.+?) \|", section, re.M))))
    # --config is explained once, for all that look at a data folder.
    assert documented | {"--config"} == options | {"--config"}
