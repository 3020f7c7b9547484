"""The service manager's side of a real `topics serve`: a socket that it notifies, and a socket that it is given."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.client import Client
from e2e.server import TOPICS, Server, clean_environment, eventually, gone

pytestmark = pytest.mark.e2e


class Manager:
    """Receives what a server says, with the time at which it came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self.heard: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while data := self._socket.recv(65_536):
            now = time.monotonic()
            self.heard += [(now, line) for line in data.decode().split("\n")]

    def lines(self, start: str = "") -> list[str]:
        return [line for _, line in list(self.heard) if line.startswith(start)]

    def statuses(self) -> list[tuple[float, str]]:
        return [(at, line) for at, line in list(self.heard) if line.startswith("STATUS=")]

    def times(self, line: str) -> list[float]:
        return [at for at, each in list(self.heard) if each == line]

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())  # ends the thread
        self._thread.join()
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify"))
    yield found
    found.close()


def test_a_whole_life(start_server: Callable[..., Server], manager: Manager) -> None:
    server = start_server(ready=False, NOTIFY_SOCKET=manager.name)
    eventually(lambda: manager.lines("READY=1"), what="READY=1")
    with server.client() as client:
        assert client.get("/v0/ready").status == 200
    assert manager.lines("STATUS=")[-1] == f"STATUS=serving {server.url} from {server.data_dir}"
    assert manager.lines("STATUS=")[0].startswith("STATUS=starting: ")
    assert manager.lines()[0].startswith("EXTEND_TIMEOUT_USEC=")
    assert manager.lines("WATCHDOG") == []  # nobody asked
    # What is for one process alone did not go on to its children.
    environ = Path(f"/proc/{server.pid_of('shard-0')}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environ
    assert server.stop() == 0
    lines = manager.lines()
    assert lines.count("READY=1") == lines.count("STOPPING=1") == 1
    assert lines[-2:] == ["STOPPING=1", "STATUS=stopping"]
    assert not [line for line in server.output().splitlines() if "manager_not_told" in line]


@pytest.mark.full
def test_recovery_is_reported_and_ready_waits_for_it(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """On an abstract socket. The shard that recovers is held for a while: nothing is ready before it is."""
    with socket.socket() as free:  # unique on this machine while we have it
        free.bind(("127.0.0.1", 0))
        manager = Manager(f"@topics-test-{free.getsockname()[1]}-{os.getpid()}")
    try:
        first = start_server()
        with first.client() as client:
            for n in range(100):
                assert client.append("a", *[n] * 50).status in (200, 201)
        first.kill()
        server = start_server(ready=False, NOTIFY_SOCKET=manager.name, TOPICS_HEARTBEAT_MS=5_000)
        shard = server.signal_child("shard-0", signal.SIGSTOP)
        others = ("gateway-0", "router", "shard-1")

        def states() -> dict[str, str]:
            return {line.name: line.state for line in server.ps().processes}

        eventually(lambda: all(states()[name] == "ready" for name in others), what="the others")
        eventually(lambda: "shard-0" in manager.lines("STATUS=")[-1], what="word of the one that is missing")
        assert manager.lines("READY=1") == []
        os.kill(shard, signal.SIGCONT)
        eventually(lambda: manager.lines("READY=1"), what="READY=1")
        with server.client() as client:
            assert client.get("/v0/ready").status == 200
            assert client.state("a")["count"] == 5_000
    finally:
        manager.close()


@pytest.mark.full
def test_no_ping_while_a_shard_hangs(start_server: Callable[..., Server], manager: Manager) -> None:
    server = start_server(ready=False, NOTIFY_SOCKET=manager.name, WATCHDOG_USEC=1_000_000, TOPICS_HEARTBEAT_MS=1_000)
    eventually(lambda: len(manager.times("WATCHDOG=1")) >= 4, what="pings")
    assert min(manager.times("WATCHDOG=1")) > min(manager.times("READY=1"))
    hung = server.signal_child("shard-0", signal.SIGSTOP)
    eventually(lambda: "shard-0 does not respond" in manager.lines("STATUS=")[-1], what="word of it")
    noticed_at = max(at for at, line in manager.statuses() if "shard-0 does not respond" in line)
    # The supervisor kills it after five heartbeats that did not come; until then there is silence.
    eventually(lambda: gone(hung), what="its end")
    eventually(lambda: "shard-0 does not respond" not in manager.lines("STATUS=")[-1], what="word of its end")
    replaced_at = min(at for at, line in manager.statuses() if at > noticed_at and "shard-0 does not" not in line)
    assert replaced_at - noticed_at > 1.0, "no time was left in which a ping could have been missed"
    assert [at for at in manager.times("WATCHDOG=1") if noticed_at < at < replaced_at] == []
    eventually(lambda: max(manager.times("WATCHDOG=1")) > replaced_at, what="pings after it was replaced")
    eventually(lambda: manager.lines("STATUS=")[-1].endswith(str(server.data_dir)), what="word that all is well")


def test_a_watchdog_of_another_process_is_none_of_ours(start_server: Callable[..., Server], manager: Manager) -> None:
    start_server(NOTIFY_SOCKET=manager.name, WATCHDOG_USEC=100_000, WATCHDOG_PID=1)
    eventually(lambda: manager.lines("READY=1"), what="READY=1")
    at = manager.times("READY=1")[0]
    eventually(lambda: time.monotonic() > at + 0.5, what="five times the watchdog's time")
    assert manager.lines("WATCHDOG=1") == []


def test_a_manager_that_is_not_there_is_logged_once_and_no_reason_not_to_serve(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server = start_server(NOTIFY_SOCKET=tmp_path / "nobody")
    assert server.output().count("manager_not_told") == 1
    assert server.stop() == 0


# --- a socket that we are given -----------------------------------------------------------------------

# As a service manager starts a service: the socket as fd 3, and the pid of the process that will be the server.
SHIM = """
import os, sys
given = int(sys.argv[1])
if given != 3:
    os.dup2(given, 3)
os.set_inheritable(3, True)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_with(sock: socket.socket, tmp_path: Path, *, count: int = 1) -> subprocess.Popen[str]:
    given = {"TOPICS_DATA_DIR": tmp_path / "data", "TOPICS_WAL_SHARDS": 1, "TOPICS_WAL_FILE_BYTES": 1 << 20}
    secret = "of a client: the server starts itself anew for it, and the socket comes along"
    return subprocess.Popen(
        [sys.executable, "-c", SHIM, str(sock.fileno()), str(TOPICS), "serve"],
        pass_fds=[sock.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**given, LISTEN_FDS=count, TOPICS_PORT=1, TOPICS_API_KEY=secret),
    )


def test_a_given_socket_is_used_and_outlives_the_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        for life in (1, 2):
            # Connects before anybody is there to accept: it waits in the backlog.
            with Client(port, "http1") as client:
                popen = start_with(sock, tmp_path)
                try:
                    eventually(lambda: client.get("/v0/ready").status == 200, what="readiness")
                    assert client.append("a", life).status in (200, 201)
                    assert client.state("a")["count"] == life
                    assert popen.stdout is not None
                    assert f"ready on http://127.0.0.1:{port} " in popen.stdout.readline()
                finally:
                    popen.terminate()
                    popen.communicate(timeout=30)
                assert popen.returncode == 0


@pytest.mark.parametrize("kind", ["datagrams", "unix", "not listening", "a file", "two", "public"])
def test_what_can_not_be_listened_on_is_refused(kind: str, tmp_path: Path) -> None:
    match kind:
        case "datagrams":
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        case "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(str(tmp_path / "socket"))
            sock.listen()
        case "public":
            sock = socket.create_server(("0.0.0.0", 0))
        case _:
            sock = socket.socket()
    words = {"two": "LISTEN_FDS=2: expected one socket", "public": "without API keys", "a file": "is no socket"}
    with sock:
        if kind == "a file":
            file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
            os.dup2(file, sock.fileno())
            os.close(file)
        popen = start_with(sock, tmp_path, count=2 if kind == "two" else 1)
        output, errors = popen.communicate(timeout=30)
    assert popen.returncode == 2, errors
    assert output == ""
    assert words.get(kind, "expected a listening TCP socket") in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_sockets_for_another_process_are_none_of_ours(start_server: Callable[..., Server]) -> None:
    server = start_server(LISTEN_FDS=1, LISTEN_PID=1)
    assert server.port != 0
