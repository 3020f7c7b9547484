"""Completion by a real shell: verbs, options and names of topics, and nothing at all where something is wrong."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from topics.cli.main import VERBS

from .inspected import golden
from .server import TOPICS, clean_environment, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash"), pytest.mark.full]


def environment(**environ: object) -> dict[str, str]:
    return clean_environment(PATH=f"{TOPICS.parent}:{clean_environment()['PATH']}", **environ)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp())


def completed(*words: str, cwd: Path | None = None, **environ: object) -> list[str]:
    """What bash would offer for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(topics completion bash)"\n'
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        "_topics_completion topics\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=cwd, env=environment(**environ), timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.gate
def test_verbs_and_options() -> None:
    assert completed("topics", "") == list(VERBS)
    assert completed("topics", "sha") == ["shards", "shard"]
    assert completed("topics", "completion", "") == ["bash", "zsh", "fish"]
    assert "--topic" in completed("topics", "wal", "dump", "--t")


def test_names_of_topics(folder: Path, tmp_path: Path) -> None:
    everything = {"jobs", "capped", "orders", "late"}
    assert set(completed("topics", "topic", "show", "", TOPICS_DATA_DIR=folder)) == everything
    assert completed("topics", "tail", "orders", "l", TOPICS_DATA_DIR=folder) == ["late"]
    assert completed("topics", "tail", "orders", "o", TOPICS_DATA_DIR=folder) == []  # it is there already
    assert completed("topics", "wal", "dump", "--data-dir", str(folder), "--topic", "ord") == ["orders"]
    config = tmp_path / "topics.toml"
    config.write_text(f'data_dir = "{folder}"\n')
    assert completed("topics", "queue", "show", "jo", TOPICS_CONFIG=config) == ["jobs"]
    assert completed("topics", "export", "--data-dir", str(folder), "late", "o") == ["orders"]
    assert completed("topics", "segment", "ls", "--config", str(config), "--topic", "cap") == ["capped"]


@pytest.mark.parametrize("wrong", ["nowhere", "damaged"])
def test_nothing_to_offer(tmp_path: Path, wrong: str) -> None:
    if wrong == "damaged":
        (tmp_path / wrong).mkdir()
        (tmp_path / wrong / "topics.json").write_text("{")
    assert completed("topics", "topic", "show", "", TOPICS_DATA_DIR=tmp_path / wrong) == []
    assert completed("topics", "topic", "show", "", TOPICS_CONFIG=tmp_path / wrong / "topics.json") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_read_by_their_shells(shell: str, tmp_path: Path) -> None:
    done = run_topics("completion", shell)
    assert done.returncode == 0
    assert "_TOPICS_COMPLETE" in done.stdout
    script = tmp_path / "script"
    script.write_text(done.stdout)
    if shutil.which(shell):
        subprocess.run([shell, "-n", script], check=True, capture_output=True)


def test_the_tab_key(folder: Path) -> None:
    """An interactive bash in a terminal: TAB writes the rest of the word."""
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(PS1="ready> ", TERM="dumb", TOPICS_DATA_DIR=folder),
        start_new_session=True,
    )
    os.close(theirs)
    try:
        _wait_for(ours, b"ready> ")
        os.write(ours, b'eval "$(topics completion bash)"; echo lo""aded\n')
        _wait_for(ours, b"loaded\r\nready> ")
        os.write(ours, b"topics topic sh\t")
        _wait_for(ours, b"topics topic show ")
        os.write(ours, b"cap\t")
        _wait_for(ours, b"capped ")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def _wait_for(fd: int, text: bytes) -> None:
    deadline = time.monotonic() + 30
    shown = b""
    while text not in shown:
        left = deadline - time.monotonic()
        assert left > 0, shown
        if select.select([fd], [], [], left)[0]:
            shown += os.read(fd, 65_536)
