"""The inspect socket with both ends in one process, or with an end that misbehaves."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from topics.actors.inspect import inspect_socket
from topics.actors.inspect.attach import look_at, look_inside
from topics.actors.inspect.inspect_socket import Impostor, InspectSocket, LinkSample, NoAnswer, RingSample, ask
from topics.actors.startup.datadir_lock import LOCK_NAME, LockInfo, alive, is_running
from topics.errors import ServerNotRunning
from topics.shm.counters import Board

LINKS = [LinkSample("a", "b", [RingSample(b"h", b"f", b"h")])]


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(["supervisor", "shard-0"])
    yield board
    board.close()


@pytest.fixture
def server(board: Board) -> Iterator[InspectSocket]:
    server = InspectSocket(lambda: bytes(board.region.view), lambda: LINKS)
    yield server
    server.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def connect(name: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inspect_socket._connect(peer, name, 10.0)  # waits where the queue is full
    return peer


def test_each_answer_is_the_board_of_that_moment(server: InspectSocket, board: Board) -> None:
    for value in (7, 8):
        board.row("shard-0").set(3, value)
        seen, links = ask(server.name, os.getpid())
        assert (seen.row("shard-0")[3], links) == (value, LINKS)
        seen.close()


def test_what_arrives_can_be_written_by_nobody(server: InspectSocket) -> None:
    with connect(server.name) as peer:
        _, fds, _, _ = socket.recv_fds(peer, 4096, 1)
    fd = fds[0]
    try:
        for attempt in (
            lambda: mmap.mmap(fd, 8),
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), b"x", 0),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
        ):
            with pytest.raises(OSError, match=r"not permitted|denied") as refused:
                attempt()
            assert refused.value.errno in (errno.EPERM, errno.EACCES)
    finally:
        os.close(fd)


def test_another_pid_than_the_one_in_lock_is_an_impostor(server: InspectSocket) -> None:
    with pytest.raises(Impostor, match=f"LOCK names pid 1, but the process with pid {os.getpid()} listens"):
        ask(server.name, 1)


def test_an_impostor_is_no_reason_to_look_elsewhere(server: InspectSocket) -> None:
    info = LockInfo(pid=1, started_ms=0, host="h", version="v", board_fd=0, board_size=1, inspect=server.name)
    with pytest.raises(Impostor):
        look_inside(info)


def test_who_does_not_answer_is_waited_for_a_bounded_time() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind("")
        deaf.listen(0)
        name = deaf.getsockname()[1:].decode()
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=r"did not answer within 0\.2 s"):  # accepted by the kernel
            ask(name, os.getpid(), patience_s=0.2)
        with pytest.raises(NoAnswer, match=r"did not answer within 0\.2 s"):  # who left fills its queue
            ask(name, os.getpid(), patience_s=0.2)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("packet", [b"", b"nonsense", b"{}", b'{"board_bytes": -1}'])
def test_an_end_or_nonsense_instead_of_an_answer(packet: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen(1)
        name = listener.getsockname()[1:].decode()
        program = (
            "import sys; from topics.actors.inspect.inspect_socket import ask, NoAnswer\n"
            "try: ask(sys.argv[1], int(sys.argv[2]))\n"
            "except NoAnswer as exc: print(exc)"
        )
        command = [sys.executable, "-c", program, name, str(os.getpid())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            peer, _ = listener.accept()
            with peer:
                if packet:
                    peer.send(packet)
            said = asking.communicate(timeout=20)[0]
    assert ("does not understand" if packet else "hung up") in said


def test_nobody_there() -> None:
    with pytest.raises(NoAnswer, match="nobody listens"):
        ask("topics-inspect-none", os.getpid())
    info = LockInfo(pid=os.getpid(), started_ms=0, host="h", version="v", inspect="topics-inspect-none")
    with pytest.raises(ServerNotRunning):
        look_inside(info)


DIES_WHEN_ASKED = """
import os, socket
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("")
    listener.listen(1)
    print(listener.getsockname()[1:].decode(), flush=True)
    peer = listener.accept()  # which the kernel closes, when the process is ending
    os._exit(0)
"""


def test_a_server_that_ends_while_it_is_asked_was_none(tmp_path: Path) -> None:
    """The kernel closes the files of a killed process one by one: LOCK may be held when the sockets are gone."""
    with (tmp_path / LOCK_NAME).open("w+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-c", DIES_WHEN_ASKED], stdout=subprocess.PIPE, text=True) as dying:
            assert dying.stdout is not None
            name = dying.stdout.readline().strip()
            info = LockInfo(
                pid=dying.pid, started_ms=0, host="h", version="v", board_fd=99, board_size=4096, inspect=name
            )
            lock.write(msgspec.json.encode(info) + b"\n")
            lock.flush()
            with pytest.raises(ServerNotRunning, match="no server is running on"):
                look_at(str(tmp_path))


@pytest.mark.parametrize(
    ("stat", "runs"),
    [
        (b"1 (a) b) S 0 1 1 0 -1 4194560 0 0", True),
        (b"1 (a) R 0 1 1 0 -1 4194564 0 0", False),  # it ends
        (b"1 (a) Z 0 1 1 0 -1 4227084 0 0", False),
        (b"", False),
    ],
)
def test_what_the_kernel_says_of_a_process(stat: bytes, runs: bool) -> None:
    assert is_running(stat) is runs


def test_a_thousand_silent_clients_keep_nobody_waiting_and_no_descriptor(server: InspectSocket) -> None:
    before = open_fds()
    for _ in range(1_000):
        connect(server.name).close()
    silent = [connect(server.name) for _ in range(50)]
    try:
        board, _ = ask(server.name, os.getpid())
        board.close()
    finally:
        for peer in silent:
            peer.close()
    deadline = time.monotonic() + 10
    while open_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_fds() <= before


def test_an_idle_socket_takes_no_processor_time(server: InspectSocket) -> None:
    ask(server.name, os.getpid())[0].close()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_a_supervisor_without_descriptors_says_so(server: InspectSocket) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(5)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        peer.connect(f"\0{server.name}")
        packet = peer.recv(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        peer.close()
        for fd in taken:
            os.close(fd)
    assert b"Too many open files" in packet
    ask(server.name, os.getpid())[0].close()


def test_a_failure_while_it_looks_is_told_and_it_goes_on(board: Board) -> None:
    def broken() -> list[LinkSample]:
        raise OSError(errno.EIO, "input/output error")

    server = InspectSocket(lambda: bytes(board.region.view), broken)
    try:
        for _ in range(2):
            with pytest.raises(NoAnswer, match="could not answer: input/output error"):
                ask(server.name, os.getpid())
    finally:
        server.close()


def test_strangers_get_nothing(server: InspectSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_socket, "_credentials", lambda sock: (os.getpid(), 4_711, 0))
    with pytest.raises(NoAnswer, match="neither its user nor root"):
        ask(server.name, os.getpid())


def test_a_process_that_proc_hides_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*args: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", hidden)
    assert alive(os.getpid())
    assert not alive(0)
    assert not alive(2**30)
