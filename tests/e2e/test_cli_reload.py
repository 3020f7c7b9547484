"""`topics reload`: every process is replaced under a crowd of clients, and none of them notices."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from effort import EXHAUSTIVE

from topics.actors.inspect.attach import open_board
from topics.actors.startup.datadir_lock import read_lock_info
from topics.shm.counters import Word

from .client import Client, unique
from .crowd import Cohort, Http1, Http2, Keeper, Keyed, Looker, Member, Reader, Talker, Watcher, Worker, Writer
from .routing import data_of, name_on, route, wait_data
from .server import Server, eventually, run_topics
from .wire import Wire, append_request, chunked, request
from .working import Working

pytestmark = pytest.mark.full

SUPERVISOR = "supervisor"


@pytest.fixture(scope="module")
def _manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """A service manager that listens."""
    address = str(tmp_path_factory.mktemp("manager") / "notify")
    told: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address)

        def listen() -> None:
            while data := listening.recv(65_536):
                told.extend(data.decode().split("\n"))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield address, told
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", address)
        thread.join()


@pytest.fixture
def told(_manager: tuple[str, list[str]]) -> list[str]:
    return _manager[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, _manager: tuple[str, list[str]]) -> Iterator[Server]:
    """One for all tests here: a reload leaves it as good as new."""
    folder = tmp_path_factory.mktemp("reload")
    server = Server(folder / "data", log=folder / "server.log", NOTIFY_SOCKET=_manager[0])
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
    crowded(server, api, lambda: reload(server))


def crowded(server: Server, api: Client, reloads: Callable[[], dict[str, Any]]) -> None:
    with ExitStack() as opened:
        go_on_through(server, api, reloads, opened)


def go_on_through(server: Server, api: Client, reloads: Callable[[], dict[str, Any]], opened: ExitStack) -> None:
    port = server.port
    moving = Http2(port)
    writers: list[Writer] = [
        Writer(server, Http1(port)),
        Writer(server, Http1(port), durability="fsync"),
        Writer(server, moving),
        Keyed(server, Http1(port)),
    ]
    copies = unique("copies")
    route(api, writers[0].topic, copies)
    readers = [Reader(server, writers[0].topic, Http1(port)), Reader(server, writers[2].topic, Http2(port))]
    watcher = Watcher(server, writers[0].topic)
    talker = Talker(server)
    workers = [Worker(server, Http1(port)), Worker(server, Http1(port), leases_durable=True)]
    looker = Looker(server, writers[0].topic, Http1(port))
    others = [looker, Keeper(server, Http1(port)), Cohort(server, Http1(port))]
    crowd: list[Member] = [*writers, *readers, watcher, talker, *workers, *others]
    for member in crowd:
        opened.callback(member.close)

    def goes_on(more: int = 5) -> None:
        there = {member: member.rounds for member in crowd}
        eventually(
            lambda: all(member.rounds > there[member] + more or member.failure for member in crowd),
            what="a busy crowd",
        )

    for member in crowd:
        member.start()
    goes_on()
    before = server.pids()
    result = reloads()
    after = server.pids()
    goes_on()
    for member in crowd:
        member.dismiss()
    for member in crowd:
        member.stop()

    replaced = [line["name"] for line in result["replaced"]]
    assert set(replaced) == before.keys() - {SUPERVISOR}
    assert {line["name"]: line["pid"] for line in result["replaced"]} == {name: after[name] for name in replaced}
    assert after.keys() == before.keys()
    assert all((after[name] == before[name]) == (name == SUPERVISOR) for name in after), (before, after)
    for writer in writers:
        writer.check(data_of(api, writer.topic))
    for reader, writer in zip(readers, (writers[0], writers[2]), strict=True):
        reader.step()  # what was written after its last look
        writer.check(reader.found)
    wait_data(api, copies, list(range(writers[0].rounds)))
    assert watcher.found == list(range(len(watcher.found)))
    gateways = sum(name.startswith("gateway-") for name in replaced)  # whoever moves may come to the next one
    assert all(1 <= ends <= gateways for ends in (watcher.ends, talker.ends, moving.moved))
    assert data_of(api, talker.topic) == list(range(talker.rounds))
    assert talker.found == list(range(len(talker.found)))
    for worker in workers:
        assert worker.done == list(range(worker.rounds))
    pauses = {type(member).__name__: round(member.worst_s, 3) for member in crowd}
    print(f"longest pause of an append: {max(writer.worst_s for writer in writers):.3f} s; of others: {pauses}")
    assert all(line.restarts == 0 for line in server.ps().processes)


@pytest.mark.skipif(not EXHAUSTIVE, reason="TOPICS_TEST_EXHAUSTIVE is not set")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gateways", [1, 3])
def test_nobody_notices_a_signal_again_and_again(tmp_path: Path, gateways: int) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "log", TOPICS_GATEWAYS=gateways, TOPICS_WAL_SHARDS=3)
    try:
        server.wait_ready()
        with server.client() as api:
            for _ in range(5):
                crowded(server, api, lambda: signalled(server))
    finally:
        server.close()


def signalled(server: Server) -> dict[str, Any]:
    """A reload by SIGHUP, and what became of it."""
    done = server.output().count("event=reloaded")
    server.popen.send_signal(signal.SIGHUP)
    eventually(lambda: server.output().count("event=reloaded") > done, what="a reload")
    return {"replaced": [{"name": name, "pid": pid} for name, pid in server.pids().items() if name != SUPERVISOR]}


# --- connections that go on in another gateway --------------------------------------------------------


@pytest.mark.gate
def test_connections_go_on_with_what_they_have_sent(server: Server, api: Client) -> None:
    topic = unique()
    api.put(topic)
    large = json.dumps({"records": [{"data": "x" * 1_000} for _ in range(200)]}).encode()
    streamed = request(
        "POST", f"/v0/topics/{topic}", headers=("Content-Type: application/json", "Transfer-Encoding: chunked")
    )
    whole = {
        "nothing": append_request(topic),
        "half a head": append_request(topic),
        "a head": append_request(topic),
        "half a body": append_request(topic, '"' + "y" * 500 + '"'),
        "half a large body": request("POST", f"/v0/topics/{topic}", large),
        "half a chunk": streamed + chunked(large, 100, 1_000),
        "a chunk": streamed + chunked(large, 100, 1_000),
        "all chunks but the end": streamed + chunked(large, 100, 1_000),
        "a waiting continue": request(
            "POST", f"/v0/topics/{topic}", b'{"records":[{"data":1}]}', headers=("Expect: 100-continue",)
        ),
    }
    head = {name: raw.index(b"\r\n\r\n") + 4 for name, raw in whole.items()}
    sent = {
        "nothing": 0,
        "half a head": 30,
        "a head": head["a head"],
        "half a body": head["half a body"] + 200,
        "half a large body": head["half a large body"] + 150_000,
        "half a chunk": head["half a chunk"] + 50,
        "a chunk": head["a chunk"] + len("64\r\n") + 100 + 2,
        "all chunks but the end": len(whole["all chunks but the end"]) - len("0\r\n\r\n"),
        "a waiting continue": head["a waiting continue"],
    }
    wires = {name: Wire(server.port) for name in whole}
    for name, wire in wires.items():
        assert wire.ask(append_request(topic)).status == 200  # the connection is known to be served
        wire.send(whole[name][: sent[name]])
    eventually(lambda: server.sockets_of("gateway-0") > len(wires))
    reload(server, "--only", "gateway")
    before = api.state(topic)["count"]
    for name, wire in wires.items():
        wire.send(whole[name][sent[name] :])
        status, headers = wire.head()
        while status == 100:
            status, headers = wire.head()
        assert status == 200, (name, wire.body(headers))
        wire.body(headers)
        assert wire.ask(append_request(topic)).status == 200, name
        wire.close()
    assert api.state(topic)["count"] == before + 2 * len(wires) + 4 * 199


def test_a_slow_reader_gets_its_answer_from_the_old_gateway_and_the_next_from_the_new(
    server: Server, api: Client
) -> None:
    topic = unique()
    text = "z" * 100_000
    for _ in range(2):
        api.append(topic, *[text] * 10)
    wire = Wire(server.port)
    old = server.pid_of("gateway-0")
    body = json.dumps({"from_seq": 0, "limit": 1_000}).encode()
    asked = 40  # more than the kernel keeps for us, and more than one gateway takes at a time
    for _ in range(asked):
        wire.send(request("POST", f"/v0/topics/{topic}/diff", body))
    _, headers = wire.head()  # they come
    reload(server, "--only", "gateway")
    assert server.pid_of("gateway-0") != old
    first = json.loads(wire.body(headers))
    assert [record["data"] for record in first["records"]] == [text] * 10  # one more would exceed 1 MiB
    for _ in range(asked - 1):
        assert wire.answer()["records"] == first["records"]
    assert wire.ask(append_request(topic)).status == 200
    wire.close()
    eventually(lambda: not Path(f"/proc/{old}").exists(), what="the end of the old gateway")


@pytest.mark.parametrize("only", ["gateway", "shard"])
def test_a_long_poll_is_answered_as_if_its_time_were_up(server: Server, api: Client, only: str) -> None:
    topic = name_on(0)
    seq = api.append(topic, 1)["last_seq"]
    board = open_board(read_lock_info(str(server.data_dir)))
    asked = board.row("shard-0")[Word.REQUESTS]
    body = json.dumps({"from_seq": seq, "wait_ms": 30_000}).encode()
    with Wire(server.port) as wire:
        wire.send(request("POST", f"/v0/topics/{topic}/diff", body))
        eventually(lambda: board.row("shard-0")[Word.REQUESTS] > asked, what="a poll that waits at the shard")
        board.close()
        reload(server, "--only", only)
        answer = wire.answer()  # waits for less than the poll would
        assert answer.status == 200
        assert (answer["records"], answer["next_from_seq"]) == ([], seq)
        assert wire.ask(append_request(topic)).status == 200


def test_a_work_stream_stays_while_the_queue_and_its_shard_are_replaced(server: Server) -> None:
    with Working(server) as working:
        queue = working.queue()
        stream = working.open(queue, max=10)
        jobs = []
        for number, only in enumerate(("queue", "shard", "router")):
            working.client.append(queue.name, number)
            jobs.append(stream.job())
            reload(server, "--only", only)
        assert [(job["data"], job["deliveries"]) for job in jobs] == [(0, 1), (1, 1), (2, 1)]
        working.ack(stream)


# --- the command --------------------------------------------------------------------------------------


def test_for_people(server: Server) -> None:
    done = run_topics("reload", "--only", "router", "--data-dir", str(server.data_dir))
    assert done.returncode == 0, done.stderr
    line, last = done.stdout.splitlines()
    assert line.startswith(f"router: replaced by pid {server.pid_of('router')} in ")
    assert last == "1 processes were replaced"


def test_without_a_server(tmp_path: Path) -> None:
    done = run_topics("reload", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "no server is running" in done.stderr
    assert run_topics("reload", "--only", "supervisor", "--data-dir", str(tmp_path)).returncode == 2


def test_the_service_manager_is_told(server: Server, told: list[str]) -> None:
    before = len(told)
    began_us = time.monotonic_ns() // 1_000
    reload(server, "--only", "router")
    eventually(lambda: "READY=1" in told[before:], what="READY=1")
    news = told[before:]
    at = news.index("RELOADING=1")
    stamp = int(news[at + 1].removeprefix("MONOTONIC_USEC="))
    assert began_us <= stamp <= time.monotonic_ns() // 1_000
    assert news.index("READY=1") > at
    assert news.count("RELOADING=1") == news.count("READY=1") == 1
