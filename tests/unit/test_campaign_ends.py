"""However a run of campaigns ends, it leaves no process behind, and what was done until then is in the ledger."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from campaigns import ledger

TESTS = Path(__file__).resolve().parent.parent
WITHIN_S = 60.0

# Odd seeds are done at once. Even ones start what stands for a server, in a session of its own, and never end.
PROGRAM = """
import signal, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, {tests!r})
import offspring
from campaigns import campaign, driver, ledger, registry

HERE = Path({here!r})


def unit(seed, only=None):
    tally = campaign.Tally()
    if seed % 2 == 0:
        server = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (HERE / f"{{seed}}.pid.new").write_text(str(server.pid))
        (HERE / f"{{seed}}.pid.new").rename(HERE / f"{{seed}}.pid")
        try:
            time.sleep(600)
        finally:
            (HERE / f"{{seed}}.left").touch()
    tally.add("things")
    return tally


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # whoever runs this may ignore them
    registry.CAMPAIGNS["stuck"] = campaign.Campaign("stuck", "units that never end", 100, "things", unit, "things")
    registry.SHARES["stuck"] = 1
    ledger.PATH = HERE / "runs.json"
    driver.DOCUMENT = HERE / "document.md"
    driver.DOCUMENT.write_text(ledger.BEGIN + ledger.END)
    words = ["--campaign", "stuck", "--seed", "1", "--jobs", "2", "--ledger"]
    sys.exit(offspring.contained(lambda: driver.main(words)))
"""


def until(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def workers_of(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextlib.contextmanager
def stuck(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run with two units that never end, and the pids of their servers."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(tests=os.fspath(TESTS), here=os.fspath(folder)))
    command = [sys.executable, os.fspath(program)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    servers: list[int] = []
    workers: list[int] = []
    try:
        until(lambda: len(list(folder.glob("*.pid"))) == 2, "two units that are stuck")
        servers += [int(file.read_text()) for file in folder.glob("*.pid")]
        workers += workers_of(run.pid)
        assert all(map(is_there, [*servers, *workers]))
        yield run, servers
    finally:
        for pid in [run.pid, *workers, *servers]:  # a worker that is left holds the pipe
            if is_there(pid):
                os.kill(pid, signal.SIGKILL)
        run.communicate()


@pytest.mark.parametrize("to_group", [False, True], ids=["alone", "group"])  # as a terminal and `timeout` do
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_told_to_end_ends_its_servers_and_writes_down_what_was_done(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    with stuck(tmp_path) as (run, servers):
        workers = workers_of(run.pid)
        assert len(workers) == 2
        (os.killpg if to_group else os.kill)(run.pid, number)
        out, _ = run.communicate(timeout=WITHIN_S)
        assert run.returncode == 128 + number, out
        assert not [pid for pid in (*workers, *servers) if is_there(pid)]
    assert {file.name for file in tmp_path.glob("*.left")} == {"2.left", "4.left"}, "units clean up"
    [entry] = msgspec.json.decode((tmp_path / "runs.json").read_bytes(), type=list[ledger.Entry])
    assert (entry.first_seed, entry.units, entry.counts) == (1, 2, {"things": 2})
    assert next(ledger.seeds_left([entry], "stuck", version=entry.version)) == 2
    assert "2 things in" in out
    assert "cut short in 2, 4" in out


def test_workers_of_a_run_that_is_killed_end_their_servers(tmp_path: Path) -> None:
    with stuck(tmp_path) as (run, servers):
        workers = workers_of(run.pid)
        run.kill()
        until(lambda: not any(map(is_there, [*workers, *servers])), "all of them gone")


def test_what_a_killed_worker_leaves_is_ended_with_the_run_and_its_unit_has_not_passed(tmp_path: Path) -> None:
    with stuck(tmp_path) as (run, servers):
        os.kill(workers_of(run.pid)[0], signal.SIGKILL)
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 3, "the run goes on")
        servers += [int(file.read_text()) for file in tmp_path.glob("*.pid")]
        run.terminate()
        out, _ = run.communicate(timeout=WITHIN_S)
        assert run.returncode == 1
        assert "the worker died with -9" in out
        assert not [pid for pid in servers if is_there(pid)]
