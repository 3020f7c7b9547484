"""`topics shards`, `top` and `rings` on a server under load: figures that are true, in a real terminal, and a process
that hangs is found."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from topics.cli.server.shards import quantile_us
from topics.shm.counters import SYNC_BUCKET_COUNT

from .client import Lost
from .server import TOPICS, Server, clean_environment, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that somebody writes to, all the time."""
    home = tmp_path_factory.mktemp("loaded")
    server = Server(home / "data", log=home / "server.log")
    over = threading.Event()

    def work() -> None:
        with server.client() as api:
            while not over.is_set():
                for name in ("a", "b", "c", "d"):  # both shards have some
                    api.append(name, *["x" * 100] * 10)

    try:
        server.wait_ready()
        with server.client() as api:
            for name in ("a", "b", "c", "d"):
                api.put(name, durability="fsync")
        worker = threading.Thread(target=work)
        worker.start()
        yield server
        over.set()
        worker.join()
    finally:
        over.set()
        server.close()


def figures(server: Server, *args: str) -> Any:
    done = run_topics(*args, "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.gate
def test_shards(loaded: Server) -> None:
    def busy() -> Any:
        seen = figures(loaded, "shards", "--interval", "2.5")
        return all(one["records_per_s"] and one["sync_p99_us"] for one in seen["shards"]) and seen

    found = eventually(busy, what="load on both shards")
    assert [shard["process"]["name"] for shard in found["shards"]] == ["shard-0", "shard-1"]
    assert sum(shard["topics"] for shard in found["shards"]) == 4
    for shard in found["shards"]:
        assert shard["bytes_per_s"] > 100 * shard["records_per_s"] * 0.5  # a record takes more than its 100 bytes
        assert shard["frames_per_write"] >= 1
        assert 50 <= shard["sync_p50_us"] <= shard["sync_p99_us"]
        assert shard["wal_lsn"] > 0
        assert shard["wal_backlog"] > 0
        assert shard["process"]["rss_bytes"] > 1_000_000
        assert shard["process"]["state"] == "ready"
    assert {process["name"] for process in found["processes"]} == set(loaded.pids())
    text = run_topics("shards", "--data-dir", str(loaded.data_dir), COLUMNS=220).stdout
    assert "sync p99" in text
    assert "pressure" in text


def test_what_is_added_is_counted(tmp_path: Path) -> None:
    """The rate is exact when all of it falls between two readings."""
    server = Server(tmp_path / "data", log=tmp_path / "server.log", TOPICS_WAL_SHARDS=1)
    try:
        server.wait_ready()
        done = subprocess.Popen(
            [TOPICS, "shards", "--json", "--interval", "6", "--data-dir", server.data_dir],
            stdout=subprocess.PIPE,
            env=clean_environment(),
        )
        # Its first reading is taken when it has opened the board.
        eventually(lambda: _holds_shared_memory(done.pid), what="a first reading")
        with server.client() as api:
            api.append("t", *range(300))
            api.delete("t", before_seq=101)
        out, _ = done.communicate(timeout=60)
        (shard,) = json.loads(out)["shards"]
        assert shard["records"] == 200
        assert 300 / 7.5 <= shard["records_per_s"] <= 300 / 6
    finally:
        server.close()


def _holds_shared_memory(pid: int) -> bool:
    try:
        return "/memfd:topics-sealed" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def test_quantiles() -> None:
    assert quantile_us([0] * SYNC_BUCKET_COUNT, 0.5) is None
    buckets = [90, 0, 9, 1, *[0] * (SYNC_BUCKET_COUNT - 4)]
    assert quantile_us(buckets, 0.5) == 50
    assert quantile_us(buckets, 0.99) == 250
    assert quantile_us(buckets, 1.0) == 500
    assert quantile_us([*[0] * (SYNC_BUCKET_COUNT - 1), 1], 0.5) == 5_000_000


def test_top_once(loaded: Server) -> None:
    assert len(figures(loaded, "top", "--once")["processes"]) == 6
    text = run_topics("top", "--data-dir", str(loaded.data_dir), COLUMNS=220).stdout  # no terminal: once
    for name in ("supervisor", "gateway-0", "shard-1", "heartbeat"):
        assert name in text


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, 230, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [TOPICS, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=clean_environment(TERM="xterm-256color"),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs  # kept open, so that its settings can be looked at in the end
        self.shown = b""

    def wait_for(self, text: bytes, *, times: int = 1) -> None:
        deadline = time.monotonic() + 30
        while self.shown.count(text) < times:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} was not shown {times} times: {self.shown[-2_000:]!r}"
            if select.select([self._ours], [], [], left)[0]:
                self.shown += os.read(self._ours, 65_536)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        deadline = time.monotonic() + 30
        while (code := self.process.poll()) is None or select.select([self._ours], [], [], 0)[0]:
            assert time.monotonic() < deadline, self.shown[-2_000:]
            if select.select([self._ours], [], [], 0.05)[0]:  # a terminal that nobody reads holds its writer up
                self.shown += os.read(self._ours, 65_536)
        assert termios.tcgetattr(self._theirs)[3] == self.before[3]  # it echoes again
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.mark.parametrize(("keys", "code"), [(b"q", 0), (b"\x03", 130)])
def test_top_in_a_terminal(loaded: Server, keys: bytes, code: int) -> None:
    terminal = Terminal("top", "--interval", "0.2", "--data-dir", str(loaded.data_dir))
    try:
        terminal.wait_for(b"\x1b[?1049h")  # the other screen
        terminal.wait_for(b"heartbeat", times=3)  # refreshed in place
        assert b"gateway-0" in terminal.shown
        terminal.press(b"x")  # means nothing
        terminal.wait_for(b"heartbeat", times=5)
        terminal.press(keys)
        assert terminal.end() == code
        assert b"\x1b[?1049l" in terminal.shown  # and back
        assert b"Traceback" not in terminal.shown
    finally:
        terminal.close()


def test_top_ends_with_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "server.log", TOPICS_WAL_SHARDS=1)
    terminal = None
    try:
        server.wait_ready()
        terminal = Terminal("top", "--interval", "0.2", "--data-dir", str(server.data_dir))
        terminal.wait_for(b"heartbeat")
        server.stop()
        assert terminal.end() == 1
        assert b"has stopped" in terminal.shown
    finally:
        if terminal is not None:
            terminal.close()
        server.close()


@pytest.mark.gate
def test_rings(loaded: Server) -> None:
    done = run_topics("rings", "--json", "--interval", "1", "--data-dir", str(loaded.data_dir))
    assert done.returncode == 0, done.stdout
    found = {(line["ring"]["writer"], line["ring"]["reader"]): line for line in json.loads(done.stdout)}
    links = {("gateway-0", peer) for peer in ("shard-0", "shard-1", "router", "queue")}
    links |= {(peer, shard) for peer in ("router", "queue") for shard in ("shard-0", "shard-1")}
    assert set(found) == links | {(b, a) for a, b in links}
    for line in found.values():
        assert line["ring"]["generation"] >= 1
        assert line["ring"]["depth"] <= line["ring"]["capacity"]
        assert line["problem"] is None
    assert sum(found["gateway-0", shard]["moved"] for shard in ("shard-0", "shard-1")) > 0
    # What is asked is larger than what is answered: the two rings of a link are told apart.
    for shard in ("shard-0", "shard-1"):
        assert found["gateway-0", shard]["ring"]["written"] > 2 * found[shard, "gateway-0"]["ring"]["written"]
    assert "gateway-0 → shard-0" in run_topics("rings", "--data-dir", str(loaded.data_dir), COLUMNS=200).stdout


def test_a_process_that_hangs_is_found(tmp_path: Path) -> None:
    # Until the ring is looked at, the supervisor does not replace the shard and the call does not end.
    patient = {"TOPICS_CALL_TIMEOUT_MS": 60_000, "TOPICS_HEARTBEAT_MS": 60_000}
    server = Server(tmp_path / "data", log=tmp_path / "server.log", TOPICS_WAL_SHARDS=1, **patient)
    stopped = 0
    try:
        server.wait_ready()
        stopped = server.signal_child("shard-0", signal.SIGSTOP)
        writer = threading.Thread(target=_append_and_give_up, args=(server,))
        writer.start()

        def stuck() -> Any:
            done = run_topics("rings", "--json", "--interval", "0.2", "--data-dir", str(server.data_dir))
            lines = json.loads(done.stdout)
            return done.returncode == 1 and [line for line in lines if line["problem"]]

        found = eventually(stuck, what="a stuck ring")
        assert (found[0]["ring"]["writer"], found[0]["ring"]["reader"]) == ("gateway-0", "shard-0")
        assert "stuck: shard-0 took nothing" in found[0]["problem"]
        os.kill(stopped, signal.SIGCONT)
        writer.join()
    finally:
        server.close()


def _append_and_give_up(server: Server) -> None:
    with server.client() as api:
        try:
            api.append("t", 1)
        except Lost:
            pass  # the ring was what mattered


@pytest.mark.parametrize("verb", ["shards", "top", "rings"])
def test_without_a_server(tmp_path: Path, verb: str) -> None:
    done = run_topics(verb, "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"topics: no server is running on {tmp_path}; start one with `topics serve`\n"
