"""Where secrets are not: environments, command lines and memory, shared memory, logs, the data folder.

A secret that no request has carried is in no child at all, because children get digests. One that was carried went
through a gateway's buffers and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import livefiles
import pytest

from .client import LANES, Lane, unique
from .h2ws import H2Sockets
from .keyed import Keyed, KeyedWatching, KeyedWorking, bearer
from .server import Server, eventually
from .sockets import Socket

pytestmark = [pytest.mark.e2e, pytest.mark.full]

SILENT = "Zq9silent-1f0e8a77c3"  # configured, and never sent by anybody
SPOKEN = "Zq9spoken-5b29d1e604"  # configured, and used in every way
STRANGE = "Zq9strange-aa03f2b9"  # sent by somebody, and not known
SECRETS = (SILENT, SPOKEN, STRANGE)
ENTRIES = f"{SILENT}:read,{SPOKEN}"

_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r(\S)(\S)(\S) \S+ \S+ \S+ *(.*)")
_PIECE = 1 << 22


@pytest.fixture(scope="module", params=["TOPICS_API_KEYS", "TOPICS_API_KEYS_FILE"])
def used(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has been asked for all kinds of things, and had a child replaced."""
    folder = tmp_path_factory.mktemp("used")
    keys = folder / "keys"
    keys.write_text(ENTRIES)
    given = {request.param: ENTRIES if request.param == "TOPICS_API_KEYS" else keys, "TOPICS_LOG": "debug"}
    given["TOPICS_API_KEY"] = SILENT  # for commands in the same shell
    server = Server(folder / "data", log=folder / "server.log", TOPICS_GATEWAYS=2, **given)
    try:
        server.wait_ready()
        pid = server.signal_child("gateway-1")
        eventually(lambda: server.pid_of("gateway-1") != pid)
        server.wait_ready()
        for lane in LANES:
            for _ in range(3):  # so that each gateway is asked, more likely than not
                _use(server, lane)
        yield server
    finally:
        server.close()


def _use(server: Server, lane: Lane) -> None:
    name = unique("in:")
    with (
        Keyed(server.port, lane, SPOKEN) as api,
        KeyedWatching(server, lane, SPOKEN) as watching,
        KeyedWorking(server, lane, SPOKEN) as working,
    ):
        api.append(name, 1)
        api.put(name)
        api.diff(name)
        api.list()
        api.state("in:missing")
        api.get("/v0/nothing")
        api.send("PUT", f"/v0/routers/{name}", {"source": name, "dest": f"{name}-d"})
        session = watching.create(name)
        watching.open(session).wait_caught_up(name)
        assert watching.get(f"{session['stream_url']}?token={SPOKEN}", key=None).status == 200
        queue = working.queue(f"{name}-q")
        queue.produce(1)
        working.open(queue).job()
        for headers in (bearer(STRANGE), {"Authorization": STRANGE}, {"Authorization": f"Basic {STRANGE}"}):
            assert api.send("GET", "/v0/topics", headers=headers).status == 401
        assert watching.get(f"{session['stream_url']}?token={STRANGE}", key=None).status == 401
        assert api.get("/v0/topics", token=STRANGE).status == 200
    if lane == "http1":
        with Socket(server.port, **bearer(SPOKEN)) as socket:
            socket.publish(name, 1)
            socket.subscribe(name)
    else:
        with H2Sockets(server.port) as wire:
            wire.socket(("authorization", f"Bearer {SPOKEN}")).publish(name, 1)


def secrets_in(content: bytes) -> set[str]:
    return {secret for secret in SECRETS if secret.encode() in content}


def children(server: Server) -> dict[str, int]:
    """Those who serve. The supervisor reads the keys: they have been in its memory."""
    pids = server.pids()
    assert pids.pop("supervisor") == server.pid
    assert {"gateway-0", "gateway-1", "queue", "router", "shard-0", "shard-1"} == pids.keys()
    return pids


def memory_of(pid: int, *, shared: bool | None = None) -> Iterator[tuple[str, bytes]]:
    """Everything a process can write to, in pieces that overlap."""
    try:
        memory = open(f"/proc/{pid}/mem", "rb", buffering=0)  # noqa: SIM115
    except PermissionError:
        pytest.skip("this system does not let a process look at its children's memory")
    with memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            region = _REGION.match(line)
            if region is None or region[3] != "w" or (shared is not None and (region[5] == "s") is not shared):
                continue
            at, end = int(region[1], 16), int(region[2], 16)
            while at < end:
                try:
                    content = os.pread(memory.fileno(), min(_PIECE, end - at), at)
                except OSError:
                    break  # gone since, or nobody may look
                yield region[6] or "heap", content
                at += max(len(content) - 64, 1) if at + len(content) < end else len(content)


def test_the_search_finds_what_is_there(used: Server) -> None:
    """Otherwise the tests below would prove nothing: names of topics are where secrets must not be."""
    with Keyed(used.port, "http1", SPOKEN) as api:
        mark = unique("in:Yp8mark-")
        api.append(mark, 1)
    assert any(mark.encode() in content for _, content in memory_of(used.pid_of("shard-0"))) or any(
        mark.encode() in content for _, content in memory_of(used.pid_of("shard-1"))
    )
    shared = [content for pid in used.pids().values() for _, content in memory_of(pid, shared=True)]
    assert any(mark.encode() in content for content in shared), "the rings are among what is looked at"


def test_not_in_environments_nor_command_lines(used: Server) -> None:
    for name, pid in {**children(used), "supervisor": used.pid}.items():
        for what in ("environ", "cmdline"):
            content = Path(f"/proc/{pid}/{what}").read_bytes()
            assert content, (name, what)
            found = secrets_in(content)
            assert not found, (name, what)


def test_not_in_logs_nor_files(used: Server) -> None:
    assert used.output()
    found = secrets_in(used.output().encode())
    assert not found
    looked = 0
    for path in livefiles.find(used.data_dir, "**/*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found = secrets_in(path.read_bytes())
            assert not found, path
            looked += 1
    assert looked


def test_not_in_what_processes_share(used: Server) -> None:
    """The board and the rings, by their descriptors and by their mappings."""
    looked = 0
    for name, pid in used.pids().items():
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
                if target.startswith(("/memfd:", "/dev/shm/")):
                    looked += 1
                    found = secrets_in(entry.read_bytes())
                    assert not found, (name, target)
            except FileNotFoundError:
                pass  # closed since
        for region, content in memory_of(pid, shared=True):
            looked += 1
            found = secrets_in(content)
            assert not found, (name, region)
    assert looked


def test_what_was_never_sent_is_in_no_child(used: Server) -> None:
    for name, pid in children(used).items():
        for region, content in memory_of(pid):
            found = SILENT in secrets_in(content)
            assert not found, (name, region)


def test_what_was_sent_is_in_no_process_behind_the_gateways(used: Server) -> None:
    for name, pid in children(used).items():
        if not name.startswith("gateway-"):
            for region, content in memory_of(pid):
                found = secrets_in(content)
                assert not found, (name, region)
