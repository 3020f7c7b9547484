"""A real `topics serve` to be killed: start, wait, kill by pid, start again on the same folder; and a small client.

Rules: a request ends in an Answer or in NoAnswer, and after NoAnswer nobody knows whether it took effect. Only pids
that this server's supervisor started are ever signalled.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import effort
from figures import CRASH_POINTS, KILLS, RECOVERIES, STOPS

from topics.actors.inspect.attach import open_board
from topics.actors.inspect.rings import links_of, look_at_rings
from topics.actors.startup.datadir_lock import read_lock_info
from topics.errors import TopicsError
from topics.shm.counters import Board, State, Word

EXHAUSTIVE = effort.EXHAUSTIVE
TOPICS = str(Path(sys.executable).with_name("topics"))
DEADLINE_S = 40.0
# Small enough that a second of load rotates, flushes, seals, snapshots and trims, and that reads go to the files.
SMALL = {
    "TOPICS_WAL_FILE_BYTES": str(1 << 20),
    "TOPICS_SEGMENT_MAX_EVENTS": "50",
    "TOPICS_CACHE_BYTES": str(64 << 10),
}
T = TypeVar("T")


def eventually(look: Callable[..., T | Literal[False] | None], *, within_s: float = DEADLINE_S, what: str = "") -> T:
    """Poll until `look` gives something true; fail with its last answer.

    In a loop it is a lambda that binds the loop's variable by a default: mypy takes that for `...` only.
    """
    deadline = time.monotonic() + within_s
    while True:
        answer = look()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what or look} (last: {answer!r})")
        time.sleep(0.01)


def eventually_nudged(
    look: Callable[..., T | Literal[False] | None], nudge: Callable[[], object], *, what: str = ""
) -> T:
    """Poll like eventually(); now and then give the server something to do, and then the quiet in which it moves
    payloads and writes snapshots."""
    nudged_at = 0.0

    def look_or_nudge() -> T | Literal[False] | None:
        nonlocal nudged_at
        if time.monotonic() > nudged_at + 1.5:
            nudge()
            nudged_at = time.monotonic()
        return look()

    return eventually(look_or_nudge, what=what)


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


# --- the client ---------------------------------------------------------------------------------------


class NoAnswer(Exception):
    """The connection ended first: the request may have taken effect or not."""


class Answer(NamedTuple):
    status: int
    raw: bytes
    retry_after: str | None

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"]) if not self.ok else ""

    @property
    def outcome_unknown(self) -> bool:
        """An error that does not promise that nothing was done."""
        if self.status < 500:
            return False
        error = self.body["error"]
        return bool(error.get("detail", {}).get("outcome") == "unknown" or error["code"] == "internal")


class Client:
    """One keep-alive connection; after NoAnswer the next call opens a new one. It is closed with the client."""

    def __init__(self, port: int, *, timeout_s: float = 30.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        weakref.finalize(self, self._connection.close)

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        payload = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {} if payload is None else {"Content-Type": "application/json"}
        try:
            self._connection.request(method, path, payload, headers)
            response = self._connection.getresponse()
            return Answer(response.status, response.read(), response.headers.get("Retry-After"))
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise NoAnswer(f"{method} {path}: {error!r}") from error

    def get(self, topic: str) -> Answer:
        return self.call("GET", f"/v0/topics/{topic}")

    def put(self, topic: str, **config: Any) -> Answer:
        return self.call("PUT", f"/v0/topics/{topic}", config)

    def append(self, topic: str, *data: Any, **fields: Any) -> Answer:
        return self.call("POST", f"/v0/topics/{topic}", {"records": [{"data": each} for each in data], **fields})

    def diff(self, topic: str, from_seq: int = 0, **fields: Any) -> Answer:
        return self.call("POST", f"/v0/topics/{topic}/diff", {"from_seq": from_seq, **fields})

    def delete(self, topic: str, **fields: Any) -> Answer:
        return self.call("POST", f"/v0/topics/{topic}/delete", fields)

    def close(self) -> None:
        self._connection.close()


# --- the server ---------------------------------------------------------------------------------------


class Server:
    """One life of a server on a folder. Its port file and log lie beside the folder, or in `beside`."""

    def __init__(
        self, data_dir: Path, *, shards: int = 2, env: Mapping[str, str] | None = None, beside: Path | None = None
    ) -> None:
        self.data_dir = data_dir
        self.shards = shards
        beside = beside or data_dir.parent
        self._port_file = beside / f"{data_dir.name}.port"
        self._port_file.unlink(missing_ok=True)
        self._log_path = beside / f"{data_dir.name}.log"
        self._log_from = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._dies_at_a_point = "TOPICS_KILL_POINT" in (env or {})
        self._killed_shards = 0  # by us, so not at a point
        RECOVERIES.add((data_dir / "topics.json").exists())
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOPICS_")}
        settings = {
            "TOPICS_DATA_DIR": str(data_dir),
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": str(self._port_file),
            "TOPICS_WAL_SHARDS": str(shards),
            "TOPICS_RING_BYTES": str(1 << 20),
        }
        with self._log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [TOPICS, "serve"],
                env={**inherited, **settings, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.popen.pid
        self._board: Board | None = None

    # --- looking ---

    def log(self) -> str:
        """What this life has written to stdout and stderr."""
        return self._log_path.read_bytes()[self._log_from :].decode()

    @property
    def port(self) -> int:
        return int(eventually(self._read_port, what="a port file"))

    def _read_port(self) -> str:
        if self.popen.poll() is not None:
            raise AssertionError(f"the server ended with {self.popen.returncode}:\n{self.log()}")
        return self._port_file.read_text().strip() if self._port_file.exists() else ""

    def client(self, *, timeout_s: float = 30.0) -> Client:
        return Client(self.port, timeout_s=timeout_s)

    def listens(self) -> bool:
        """Whether anybody holds the listening socket."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def board(self) -> Board:
        if self._board is None:
            self._board = eventually(self._find_board, what="a board")
        return self._board

    def _find_board(self) -> Board | None:
        if self.popen.poll() is not None:
            raise AssertionError(f"the server ended with {self.popen.returncode}:\n{self.log()}")
        try:
            info = read_lock_info(str(self.data_dir))
            return open_board(info) if info.pid == self.pid and info.port is not None else None
        except TopicsError:
            return None

    def pid_of(self, name: str) -> int:
        return eventually(lambda: self.board.row(name)[Word.PID], what=f"a pid of {name}")

    def state(self, name: str) -> State:
        return self.board.row(name).state

    def restarts(self, name: str) -> int:
        return self.board.row(name)[Word.RESTARTS]

    def sent(self, writer: str, reader: str) -> int:
        """The bytes that one process has put into its ring to another, taken or not."""
        rings = look_at_rings(links_of(self.board.row("supervisor")[Word.PID]), self.board)
        return next(ring.written for ring in rings if (ring.writer, ring.reader) == (writer, reader))

    def deaths(self) -> int:
        """How often shards of this life have died so far."""
        rows = [row for row in self.board.rows() if row.name.startswith("shard-")]
        return sum(row[Word.RESTARTS] + (row.state in (State.BACKOFF, State.FAILED)) for row in rows)

    def ready(self) -> Answer:
        client = self.client(timeout_s=10)
        try:
            return client.call("GET", "/v0/ready")
        finally:
            client.close()

    def ps(self) -> dict[str, dict[str, Any]]:
        """`topics ps --json`, by process name."""
        shown = subprocess.run(
            [TOPICS, "ps", "--json", "--data-dir", str(self.data_dir)], capture_output=True, check=True, timeout=30
        )
        return {line["name"]: line for line in json.loads(shown.stdout)["processes"]}

    # --- waiting ---

    def wait_ready(self, *, within_s: float = DEADLINE_S) -> Server:
        def ready() -> bool:
            if self.popen.poll() is not None:
                raise AssertionError(f"the server ended with {self.popen.returncode}:\n{self.log()}")
            try:
                return self.ready().ok
            except NoAnswer:
                return False

        try:
            eventually(ready, within_s=within_s, what="ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None
        return self

    def wait_state(self, name: str, state: State, *, within_s: float = DEADLINE_S) -> None:
        eventually(lambda: self.state(name) is state, within_s=within_s, what=f"{name} {state.name}\n{self.log()}")

    # --- ending ---

    def signal_child(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.pid_of(name)
        os.kill(pid, number)
        KILLS.add(number == signal.SIGKILL)
        STOPS.add(number == signal.SIGSTOP)
        self._killed_shards += number == signal.SIGKILL and name.startswith("shard-")
        return pid

    def kill(self) -> None:
        """kill -9 of the whole tree, as closely together as can be."""
        tree = [self.pid, *children_of(self.pid)]
        for pid in tree:
            if pid == self.pid and self.popen.poll() is not None:
                continue
            try:
                os.kill(pid, signal.SIGKILL)
                KILLS.add()
            except ProcessLookupError:
                pass
        self.popen.wait()
        eventually(lambda: all(map(gone, tree)), what="the whole tree gone")
        self._forget()

    def stop(self, *, within_s: float = DEADLINE_S) -> int:
        self.popen.send_signal(signal.SIGTERM)
        code = self.popen.wait(within_s)
        self._forget()
        return code

    def wait_exit(self, *, within_s: float = DEADLINE_S) -> int:
        code = self.popen.wait(within_s)
        self._forget()
        return code

    def _forget(self) -> None:
        if self._board is not None:
            if self._dies_at_a_point:
                CRASH_POINTS.add(max(self.deaths() - self._killed_shards, 0))
            self._board.close()
            self._board = None

    def close(self) -> None:
        if self.popen.poll() is None:
            self.kill()
