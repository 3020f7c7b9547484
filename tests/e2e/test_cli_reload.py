"""`topics reload`: every process is replaced under a crowd of clients, and none of them notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .client import Client, unique
from .crowd import Http1, Http2, Keyed, Looker, Member, Reader, Talker, Watcher, Worker, Writer
from .routing import data_of, route, wait_data
from .server import Server, eventually, run_topics

SUPERVISOR = "supervisor"
ORDER = ["shard-0", "shard-1", "router", "queue", "gateway-0"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests here: a reload leaves it as good as new."""
    folder = tmp_path_factory.mktemp("reload")
    server = Server(folder / "data", log=folder / "server.log")
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output(), server.output()[-4_000:]
    finally:
        server.close()


@pytest.fixture
def api(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


def reload(server: Server, *args: str) -> dict[str, Any]:
    done = run_topics("reload", "--data-dir", str(server.data_dir), "--json", *args)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.output()[-3_000:]}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_nobody_in_a_crowd_notices(server: Server, api: Client) -> None:
    port = server.port
    writers: list[Writer] = [
        Writer(server, Http1(port)),
        Writer(server, Http1(port), durability="fsync"),
        Writer(server, Http2(port)),
        Keyed(server, Http1(port)),
    ]
    copies = unique("copies")
    route(api, writers[0].topic, copies)
    readers = [Reader(server, writers[0].topic, Http1(port)), Reader(server, writers[2].topic, Http2(port))]
    watcher = Watcher(server, writers[0].topic)
    talker = Talker(server)
    workers = [Worker(server, Http1(port)), Worker(server, Http1(port), leases_durable=True)]
    looker = Looker(server, writers[0].topic, Http1(port))
    crowd: list[Member] = [*writers, *readers, watcher, talker, *workers, looker]
    for member in crowd:
        member.start()
    eventually(lambda: all(member.rounds > 5 or member.failure for member in crowd), what="a busy crowd")
    before = server.pids()

    result = reload(server)

    after = server.pids()
    there = {member: member.rounds for member in crowd}
    eventually(
        lambda: all(member.rounds > there[member] + 5 or member.failure for member in crowd), what="a busy crowd"
    )
    for member in crowd:
        member.dismiss()
    for member in crowd:
        member.stop()
    assert [line["name"] for line in result["replaced"]] == ORDER
    assert {line["name"]: line["pid"] for line in result["replaced"]} == {name: after[name] for name in ORDER}
    assert after.keys() == before.keys()
    assert all((after[name] == before[name]) == (name == SUPERVISOR) for name in after), (before, after)
    for writer in writers:
        writer.check(data_of(api, writer.topic))
    for reader, writer in zip(readers, (writers[0], writers[2]), strict=True):
        reader.step()  # what was written after its last look
        writer.check(reader.found)
    wait_data(api, copies, list(range(writers[0].rounds)))
    assert watcher.found == list(range(len(watcher.found)))
    assert watcher.ends == 1
    assert talker.ends == 1
    assert data_of(api, talker.topic) == list(range(talker.rounds))
    assert talker.found == list(range(len(talker.found)))
    for worker in workers:
        assert worker.done == list(range(worker.rounds))
    pauses = {type(member).__name__: round(member.worst_s, 3) for member in crowd}
    print(f"longest pause of an append: {max(w.worst_s for w in writers):.3f} s; all: {pauses}")
    assert max(writer.worst_s for writer in writers) < 15
    assert all(line.restarts == 0 for line in server.ps().processes)
