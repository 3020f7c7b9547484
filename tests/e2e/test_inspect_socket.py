"""A server of a user without privileges: its own commands work, and no process of it can be looked into."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server import TOPICS, clean_environment, eventually

NOBODY = 65_534
# The interpreter may be in a home that is closed to others. This capability reads files and lets nobody into a process;
# the processes that try have it, too, for else the kernel would keep them out for want of it.
BECOME = [
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *(
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=-all,+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    ),
]
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a server as another user"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv"),
]


def as_nobody(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BECOME, *command], capture_output=True, text=True, cwd="/", env=clean_environment(), timeout=60
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("nobody") / "data"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    if as_nobody(TOPICS, "--version").returncode:
        pytest.skip("the user nobody can't run the program")
    environ = clean_environment(TOPICS_DATA_DIR=folder, TOPICS_PORT=0, TOPICS_WAL_SHARDS=1, TOPICS_LOG="error")
    with subprocess.Popen([*BECOME, TOPICS, "serve"], cwd="/", env=environ, start_new_session=True) as server:
        try:
            eventually(lambda: states(folder) == {"ready"}, within_s=60, what="ready processes")
            yield folder
        finally:
            server.send_signal(signal.SIGCONT)
            server.terminate()


def processes(folder: Path) -> dict[str, int]:
    done = as_nobody(TOPICS, "ps", "--json", "--data-dir", str(folder))
    return {line["name"]: line["pid"] for line in json.loads(done.stdout)["processes"]} if done.stdout else {}


def states(folder: Path) -> set[str]:
    done = as_nobody(TOPICS, "ps", "--json", "--data-dir", str(folder))
    assert "Traceback" not in done.stderr
    return {line["state"] for line in json.loads(done.stdout)["processes"]} if done.stdout else set()


def forks_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def assert_closed(folder: Path) -> None:
    supervisor = processes(folder)["supervisor"]
    pids = [supervisor, *forks_of(supervisor)]  # with the fork server
    assert len(pids) >= 6
    script = (
        "import os, sys\n"
        "for pid in sys.argv[1:]:\n"
        "    for what in ('fd', 'environ', 'mem', 'maps'):\n"
        "        try: os.readlink(f'/proc/{pid}/fd/0') if what == 'fd' else open(f'/proc/{pid}/{what}', 'rb').read(1)\n"
        "        except PermissionError: continue\n"
        "        print(pid, what)\n"
    )
    done = as_nobody(sys.executable, "-c", script, *map(str, pids))
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_commands_of_its_user_work_and_nothing_else_does_also_after_a_reload(folder: Path) -> None:
    assert_closed(folder)
    before = processes(folder)
    assert as_nobody(TOPICS, "reload", "--data-dir", str(folder)).returncode == 0
    after = processes(folder)
    assert before["supervisor"] == after["supervisor"]
    assert before["shard-0"] != after["shard-0"]
    assert_closed(folder)
    rings = as_nobody(TOPICS, "rings", "--json", "--interval", "0.05", "--data-dir", str(folder))
    assert {line["ring"]["writer"] for line in json.loads(rings.stdout)} >= {"shard-0", "router", "queue"}
    for command in (["top", "--once"], ["shards"]):
        done = as_nobody(TOPICS, *command, "--json", "--interval", "0.1", "--data-dir", str(folder))
        assert (done.returncode, done.stderr) == (0, "")
        assert "shard-0" in done.stdout


def test_a_stopped_supervisor_is_reported_and_root_looks_all_the_same(folder: Path) -> None:
    supervisor = processes(folder)["supervisor"]
    os.kill(supervisor, signal.SIGSTOP)
    try:
        theirs = as_nobody(TOPICS, "ps", "--data-dir", str(folder))
        ours = subprocess.run([TOPICS, "ps", "--data-dir", str(folder)], capture_output=True, text=True, timeout=60)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert theirs.returncode == 1
    assert "did not answer within 2 s" in theirs.stderr
    assert "root" in theirs.stderr
    assert ours.returncode == 0
    assert "shard-0" in ours.stdout


@pytest.mark.parametrize("limit", [4, 5, 6, 8])
def test_a_command_with_few_descriptors_gives_no_traceback(folder: Path, limit: int) -> None:
    script = (
        "import os, resource, sys\n"
        "from topics.cli.server import ps; from topics.cli.shared import place\n"
        "from rich import console, table\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))\n"
        "ps.ps(['--json', '--data-dir', sys.argv[2]])\n"
    )
    done = as_nobody(sys.executable, "-c", script, str(limit), str(folder))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or "descriptor" in done.stderr or "open files" in done.stderr
