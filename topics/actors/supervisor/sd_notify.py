"""What the service manager is told: the sd_notify protocol, one datagram of assignments to $NOTIFY_SOCKET.

    starting ──everything serves──► serving ──stop──► stopping
       STATUS, EXTEND_TIMEOUT_USEC     STATUS, WATCHDOG=1     STOPPING=1, then silence
                        READY=1, once ─┘       │ ▲
                      RELOADING=1, MONOTONIC_USEC└─┘READY=1; EXTEND_TIMEOUT_USEC meanwhile

`Bulletin` decides what to say from looks at the board, with a clock that is passed in; `ServiceManager` sends it;
`Informer` does both for a supervisor.

- READY=1 means what /v0/ready means: every process serves, recovery is done, and so are the copies of routers. A server
  of which a part stays down for good never gets there; it says who it is and goes on asking for time, because what
  remains of it serves.
- A sign of life, which is EXTEND_TIMEOUT_USEC at first and during a reload, and WATCHDOG=1 later, is only given if
  nobody has stalled: a process that has begun to beat must beat. One that waits to be started again, that has not
  begun, that is busy, or that stays down is the supervisor's to judge, which has deadlines of its own for these.
- The manager never holds us up: what it does not take is sent again with the next look, but for signs of life, which
  would be out of date.

Crash: the manager sees our exit itself.
"""

from __future__ import annotations

import enum
import math
import os
import socket
import time
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec
import trio

from topics.actors.log import Log
from topics.errors import StartRefused
from topics.shm.counters import Row, State, Word

EXTEND_US = 30_000_000  # asked for again and again: long enough for a machine that is busy
_EXTEND_EVERY_S = 5.0
_LOOK_STARTING_S = 0.1
_LOOK_SERVING_S = 1.0
_SIGNS = frozenset({"WATCHDOG", "EXTEND_TIMEOUT_USEC"})
# In these there is nobody who could beat.
_NOBODY = frozenset({State.EMPTY, State.STOPPED, State.FAILED, State.BACKOFF})


class Phase(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


class Address(msgspec.Struct, frozen=True):
    """From the environment: where to send to, and how often the manager wants a sign of life."""

    socket: str
    watchdog_us: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], pid: int) -> Address | None:
        """None if nobody wants to be told."""
        path = environ.get("NOTIFY_SOCKET")
        if not path:
            return None
        if not path.startswith(("/", "@")) or len(path.encode()) > 107:
            raise StartRefused(
                f"NOTIFY_SOCKET={path!r}: expected the path of a socket, or @ and an abstract name; "
                "unset it if no service manager runs this server"
            )
        watchdog: int | None = None
        # For another process: whoever started us forgot to take it away.
        if (text := environ.get("WATCHDOG_USEC")) and environ.get("WATCHDOG_PID", str(pid)) == str(pid):
            if not text.isdecimal() or int(text) == 0:
                raise StartRefused(f"WATCHDOG_USEC={text!r}: expected microseconds, a whole number above 0")
            watchdog = int(text)
        return cls(path, watchdog)


class Bulletin:
    """One server's news. Each method gives the assignments to send now; none if there is nothing new."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        serving: str,
        clock: Callable[[], float],
        heartbeat_s: float,
        watchdog_us: int | None = None,
        busy: Container[str] = (),
    ) -> None:
        self._rows = rows
        self._busy = busy
        self._serving = serving
        self._clock = clock
        self._half_s = None if watchdog_us is None else watchdog_us / 2_000_000
        # A heart that beats once a second can't be asked twice a second.
        self._patience_s = max(self._half_s or 0.0, 2 * heartbeat_s)
        self._beats = {row.name: ((0, 0), clock()) for row in rows}
        self._status = ""
        self._pinged_at = clock()
        self._extended_at: float | None = None
        self._reloading = False
        self.phase = Phase.STARTING

    @property
    def pause_s(self) -> float:
        """Until the next look: it falls on the moment at which half the watchdog's time is over."""
        if self.phase is Phase.STARTING:
            return _LOOK_STARTING_S
        half_s = self._half_s or _LOOK_SERVING_S
        return half_s / math.ceil(half_s / _LOOK_SERVING_S)

    def look(self) -> list[str]:
        if self.phase is Phase.STOPPING:
            return []
        now = self._clock()
        stalled = self._stalled(now)
        news: list[str] = []
        if self.phase is Phase.STARTING and all(map(_serves, self._rows)):
            self.phase = Phase.SERVING
            self._pinged_at = now  # the manager counts from here
            news.append("READY=1")
        elif not stalled:
            news += self._signs_due(now)
        if (status := self._describe(stalled)) != self._status:
            self._status = status
            news.append(f"STATUS={status}")
        return news

    def reloading(self, *, monotonic_us: int) -> list[str]:
        self._reloading = True
        self._extended_at = None
        return ["RELOADING=1", f"MONOTONIC_USEC={monotonic_us}"]

    def reloaded(self) -> list[str]:
        """It serves, whatever became of the reload."""
        self._reloading = False
        return ["READY=1"]

    def stopping(self) -> list[str]:
        self.phase = Phase.STOPPING
        return ["STOPPING=1", "STATUS=stopping"]

    def _stalled(self, now: float) -> list[str]:
        found = []
        for row in self._rows:
            beat = (row[Word.GENERATION], row[Word.HEARTBEAT])
            last, seen = self._beats[row.name]
            if beat != last or not beat[1] or row.state in _NOBODY or row.name in self._busy:
                self._beats[row.name] = (beat, now)
            elif now - seen > self._patience_s:
                found.append(row.name)
        return found

    def _signs_due(self, now: float) -> list[str]:
        signs = []
        if (self.phase is Phase.STARTING or self._reloading) and (
            self._extended_at is None or now - self._extended_at >= _EXTEND_EVERY_S
        ):
            self._extended_at = now
            signs.append(f"EXTEND_TIMEOUT_USEC={EXTEND_US}")
        # A hair early is on time: sleeping and counting don't use the same arithmetic.
        half_s = self._half_s if self.phase is Phase.SERVING else None
        if half_s is not None and now - self._pinged_at >= half_s * 0.99:
            self._pinged_at = now
            signs.append("WATCHDOG=1")
        return signs

    def _describe(self, stalled: Sequence[str]) -> str:
        waiting = [row for row in self._rows if not _serves(row)]
        parts = [_describe(row) for row in waiting if row.name not in stalled]
        parts += [f"{name} does not respond" for name in stalled]
        parts += [f"{row.name} is busy and can't be asked" for row in self._rows if row.name in self._busy]
        if self.phase is Phase.SERVING:
            reloading = ["processes are replaced one by one"] if self._reloading else []
            return _line("; but ".join([self._serving, *([", ".join(reloading + parts)] if reloading + parts else [])]))
        replaying = [row for row in self._rows if row[Word.PROGRESS_PERMILLE] or row.state is State.RECOVERING]
        if any(row.state is State.RECOVERING for row in replaying):
            done = sum(row[Word.PROGRESS_PERMILLE] for row in replaying) / len(replaying)
            return _line(f"replaying the log, {done / 10:.0f} % done: {', '.join(parts)}")
        return _line(f"starting: {', '.join(parts)}")


def _serves(row: Row) -> bool:
    return row.state is State.READY and not row[Word.DERIVING]


def _describe(row: Row) -> str:
    match row.state:
        case State.RECOVERING:
            return f"{row.name} {row[Word.PROGRESS_PERMILLE] / 10:.0f} %"
        case State.FAILED:
            return f"{row.name} failed and stays down, see the log"
        case State.BACKOFF:
            return f"{row.name} is about to be started again"
        case State.READY:
            return f"{row.name} makes copies for {row[Word.DERIVING]} topics again"
        case State.EMPTY:
            return f"{row.name} has not begun"
        case state:
            return f"{row.name} is {state.name.lower()}"


def _line(text: str) -> str:
    """A datagram's assignments end at line breaks."""
    return " ".join(text.split())[:500]


class ServiceManager:
    """The other end of the socket."""

    def __init__(self, address: Address) -> None:
        self.address = address
        path = address.socket
        self._to = "\0" + path[1:] if path.startswith("@") else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._owed: list[str] = []

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ServiceManager | None:
        address = Address.from_environment(environ, os.getpid())
        return None if address is None else cls(address)

    def tell_nowait(self, news: Sequence[str]) -> OSError | None:
        """Send what is new, and what was not taken before; the error if it was not taken now."""
        lines = [*self._owed, *news]
        if not lines:
            return None
        try:
            self._socket.sendto("\n".join(lines).encode(errors="replace"), self._to)
        except OSError as exc:
            owed = {line.partition("=")[0]: line for line in lines}  # of two about the same the newer
            self._owed = [line for name, line in owed.items() if name not in _SIGNS]
            return exc
        self._owed = []
        return None

    def close(self) -> None:
        self._socket.close()


class Informer:
    """Keeps the service manager informed; without one it has nothing to do."""

    def __init__(self, manager: ServiceManager | None, bulletin: Bulletin, log: Log) -> None:
        self._manager = manager
        self._bulletin = bulletin
        self._log = log
        self._deaf = False

    async def run(self) -> None:
        while self._manager is not None:
            self._tell(self._bulletin.look())
            await trio.sleep(self._bulletin.pause_s)

    def reloading(self) -> None:
        self._tell(self._bulletin.reloading(monotonic_us=time.monotonic_ns() // 1_000))

    def reloaded(self) -> None:
        self._tell(self._bulletin.reloaded())

    def stopping(self) -> None:
        self._tell(self._bulletin.stopping())

    def _tell(self, news: Sequence[str]) -> None:
        if self._manager is None:
            return
        error = self._manager.tell_nowait(news)
        if error is not None and not self._deaf:
            self._log.warning("manager_not_told", socket=self._manager.address.socket, error=error)
        self._deaf = error is not None
