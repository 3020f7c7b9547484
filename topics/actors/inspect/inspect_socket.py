"""What `topics ps`, `top`, `shards` and `rings` see of a server whose processes let nobody look into them.

    command ──► supervisor   connects, and says nothing
    supervisor ──► command   Answer, with one descriptor: memory that holds a copy of the board and of the ring headers

A SOCK_SEQPACKET socket in the abstract namespace, whose name LOCK says. Why a copy, and not the board itself opened for
reading: whoever owns a file may open /proc/self/fd/<n> anew for writing, and a process of the server's user owns its
shared memory. The copy is a memfd with all seals, so nobody can write to it, and it holds no message of a ring.

Rules: only the user of the server and root get an answer. Nothing is read from whoever connects and no send waits, so a
client that is silent or slow keeps nobody waiting. One connection is open at a time, and a pause follows each, so a
flood of them costs a bounded share of the supervisor's time. A thread of its own answers, also while the event loop is
stuck. The command checks that the other end is the process that LOCK names, and waits a bounded time.

Crash: the socket and all copies have no names; nothing is left.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from topics.errors import TopicsError
from topics.shm.counters import Board
from topics.shm.region import is_sealed, sealed_copy

PATIENCE_S = 2.0
_PAUSE_S = 0.002
_BACKLOG = 64
_MAX_PACKET = 4_096
_MAX_BYTES = 64 << 20
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TIMEVAL = struct.Struct("ll")


class RingSample(msgspec.Struct, frozen=True):
    """The bytes of a ring that say where it stands."""

    header: bytes
    frame: bytes  # header of the frame that comes next
    header_after: bytes  # read after the frame


class LinkSample(msgspec.Struct, frozen=True):
    first: str
    second: str
    rings: list[RingSample]


class Answer(msgspec.Struct, frozen=True):
    board_bytes: int = 0
    links_bytes: int = 0
    error: str = ""  # there is no descriptor then


class NoAnswer(TopicsError):
    """Why the supervisor could not be asked; the board may be reached by other means."""


class Impostor(TopicsError):
    """The other end is not the process that LOCK names."""


class InspectSocket:
    """The supervisor's end. `board` and `links` are called in the thread."""

    def __init__(self, board: Callable[[], bytes], links: Callable[[], Sequence[LinkSample]]) -> None:
        self._board = board
        self._links = links
        self.name = f"topics-inspect-{os.getpid()}-{secrets.token_hex(8)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._sock.setblocking(False)
        self._sock.bind(f"\0{self.name}")
        self._sock.listen(_BACKLOG)
        self._wake, self._woken = socket.socketpair()
        self._reserve = _spare()  # given up to accept whoever comes when no descriptor is left
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inspect", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Signals are the event loop's.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while not self._stopping.is_set():
            poll.poll()
            if self._stopping.is_set():
                return
            if not self._serve_next():
                self._stopping.wait(0.5)  # who could not be accepted still waits, and poll would return at once
            self._stopping.wait(_PAUSE_S)

    def _serve_next(self) -> bool:
        try:
            peer, _ = self._sock.accept()
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                return exc.errno in (errno.EAGAIN, errno.ECONNABORTED, errno.EINTR)
            return self._refuse_next(exc)
        with peer:
            try:
                if _credentials(peer)[1] in (0, os.geteuid()):
                    self._answer(peer)
            except Exception as exc:  # the thread has to live; whoever asked is told
                _tell(peer, Answer(error=_reason(exc)))
        return True

    def _refuse_next(self, exc: OSError) -> bool:
        if self._reserve < 0:
            self._reserve = _spare()
            return False
        os.close(self._reserve)
        try:
            with self._sock.accept()[0] as peer:
                if _credentials(peer)[1] in (0, os.geteuid()):
                    _tell(peer, Answer(error=_reason(exc)))
            return True
        except OSError:
            return False  # the limit was lowered, or another thread was quicker
        finally:
            self._reserve = _spare()

    def _answer(self, peer: socket.socket) -> None:
        board, links = self._board(), msgspec.msgpack.encode(self._links())
        fd = sealed_copy(board + links)
        try:
            packet = msgspec.json.encode(Answer(len(board), len(links)))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            with suppress(BrokenPipeError, ConnectionResetError):
                peer.sendmsg([packet], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Before what `board` and `links` read is closed."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._wake.send(b"x")
        self._thread.join()
        for sock in (self._sock, self._wake, self._woken):
            sock.close()
        if self._reserve >= 0:
            os.close(self._reserve)


def _spare() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _reason(exc: Exception) -> str:
    return (exc.strerror if isinstance(exc, OSError) and exc.strerror else f"{type(exc).__name__}: {exc}")[:500]


def _tell(peer: socket.socket, answer: Answer) -> None:
    with suppress(OSError):
        peer.send(msgspec.json.encode(answer), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, user, group = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user, group


def ask(name: str, pid: int, *, patience_s: float = PATIENCE_S) -> tuple[Board, list[LinkSample]]:
    """A copy of the board and of the ring headers, from the supervisor with this pid. NoAnswer, Impostor."""
    deadline = time.monotonic() + patience_s
    try:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as exc:
        raise NoAnswer(f"this command can't open a socket: {exc.strerror}") from None
    with peer:
        try:
            _connect(peer, name, patience_s)
            found = _credentials(peer)[0]
            if found != pid:
                raise Impostor(_impostor(found, pid))
            # Not blocking for ever on a stopped process: what it has accepted or not makes no difference here.
            peer.settimeout(max(deadline - time.monotonic(), 0.001))
            packet, rights, flags, _ = peer.recvmsg(_MAX_PACKET, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except (TimeoutError, BlockingIOError):
            raise NoAnswer(
                f"the supervisor with pid {pid} did not answer within {patience_s:g} s: "
                "it is stopped (SIGSTOP) or hangs"
            ) from None
        except ConnectionRefusedError:
            raise NoAnswer(
                f"nobody listens on the socket of the server with pid {pid}: it has just stopped, or is in a container "
                "or network namespace of its own, where this command has to run, too"
            ) from None
        except OSError as exc:
            raise NoAnswer(f"the server with pid {pid} could not be asked: {exc.strerror or exc}") from None
    fds = [
        fd
        for level, kind, data in rights
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for fd in _ints(data)
    ]
    try:
        return _understood(packet, fds, flags, pid)
    finally:
        for fd in fds:
            os.close(fd)


def _connect(peer: socket.socket, name: str, patience_s: float) -> None:
    # With the timeout of Python a connect to a full queue would fail at once, and not wait for room.
    whole = int(patience_s)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, int((patience_s - whole) * 1e6)))
    peer.connect(f"\0{name}")


def _ints(data: bytes) -> list[int]:
    found = array.array("i")
    found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def _impostor(found: int, pid: int) -> str:
    who = f"the process with pid {found}" if found else "a process of another pid namespace"
    return (
        f"LOCK names pid {pid}, but {who} listens on its socket, so what it says is not believed: if the server "
        "runs in a container, run this command in it"
    )


def _understood(packet: bytes, fds: list[int], flags: int, pid: int) -> tuple[Board, list[LinkSample]]:
    if not packet:
        raise NoAnswer(f"the server with pid {pid} hung up: it is stopping, or this is neither its user nor root")
    nonsense = NoAnswer(f"the server with pid {pid} gave an answer that this command does not understand")
    try:
        answer = msgspec.json.decode(packet, type=Answer)
        if answer.error:
            raise NoAnswer(f"the supervisor with pid {pid} could not answer: {answer.error}")
        if not fds:
            if flags & socket.MSG_CTRUNC:
                raise NoAnswer("this command has no file descriptor left for the answer: raise its limit (ulimit -n)")
            raise nonsense
        fd, size = fds[0], answer.board_bytes + answer.links_bytes
        if min(answer.board_bytes, answer.links_bytes) < 0 or size > _MAX_BYTES or os.fstat(fd).st_size != size:
            raise nonsense
        if not is_sealed(fd):
            raise nonsense  # memory that could shrink below us
        text = os.pread(fd, answer.links_bytes, answer.board_bytes)
        links = msgspec.msgpack.decode(text, type=list[LinkSample])
        return Board.attach(_dup(fd), answer.board_bytes, writable=False), links
    except (msgspec.DecodeError, ValueError, IndexError, TypeError):
        raise nonsense from None
    except OSError as exc:
        raise NoAnswer(f"the answer of the server could not be read: {exc.strerror}") from None


def _dup(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
