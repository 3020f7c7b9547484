"""WebSockets when something breaks or does not keep up: a client that does not read, a shard or a gateway that dies, a
server that stops. What is delivered afterwards has no gap that was not reported, and nothing twice."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from topics.storage.config import owner_of_name

from .client import unique
from .conftest import SMALL
from .server import Server, eventually, gone
from .sockets import CLOSE, Closed, Frame, RawSocket, Socket, close_reason, dialling, text_frame

pytestmark = [pytest.mark.e2e, pytest.mark.full]

SHARDS = 2
MIB = 1024 * 1024
Dial = Callable[..., Socket]
Start = Callable[..., Server]


def topic_on(shard: int) -> str:
    """A new topic that this shard owns."""
    return next(name for name in iter(lambda: unique("on"), "") if owner_of_name(name, SHARDS) == shard)


def _served(factory: pytest.TempPathFactory, name: str, **environ: object) -> Iterator[Server]:
    folder = factory.mktemp(name)
    server = Server(folder / "data", log=folder / "server.log", TOPICS_WAL_SHARDS=SHARDS, **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps little for those who do not read, and not for long."""
    environ = {"TOPICS_STREAM_BACKLOG_BYTES": 65_536, "TOPICS_SLOW_CONSUMER_TIMEOUT_MS": 2_000}
    yield from _served(tmp_path_factory, "impatient", **environ)


@pytest.fixture(scope="module")
def hardy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose processes are killed; in between tests it is whole again."""
    yield from _served(tmp_path_factory, "hardy", TOPICS_HEARTBEAT_MS=600)


@pytest.fixture
def dial(hardy: Server) -> Iterator[Dial]:
    hardy.wait_ready()
    with dialling(hardy.port) as dial:
        yield dial


def is_held(server: Server, raw: RawSocket) -> bool:
    """Whether the server still has this connection open; what the kernel has yet to send for it does not count."""
    ours = raw.sock.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, _, _, _, _, _, inode, *_ = line.split()
        if (int(local[9:], 16), int(remote[9:], 16)) == (server.port, ours):
            return inode != "0"
    return False


def memory_of(server: Server, name: str = "gateway-0") -> int:
    """Resident bytes."""
    pages = int(Path(f"/proc/{server.pid_of(name)}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- a client that does not read ---------------------------------------------------------------------


def publish_until(writer: Socket, topic: str, enough: Callable[[int], bool], *, size: int = 100_000) -> int:
    """Records of that size, numbered from 1, while others watch; how many."""
    number = 0
    while not enough(number):
        number += 1
        ack = writer.publish(topic, [number, "x" * size], return_seqs=False)
        assert ack["performance"]["server_total_ms"] < 10_000
    return number


def stalled_subscriber(server: Server, topic: str) -> RawSocket:
    """It has subscribed, and reads nothing from now on."""
    slow = RawSocket(server.port, receive_buffer=131_072)
    slow.subscribe(topic, tail=True)
    slow.until("caught_up")
    return slow


def test_a_subscriber_that_never_reads_is_let_go(impatient: Server) -> None:
    topic = unique()
    with dialling(impatient.port) as dial:
        writer, reader = dial(), dial()
        writer.publish(topic, [0, ""])
        reader.settle(topic, tail=True)
        slow = stalled_subscriber(impatient, topic)
        assert is_held(impatient, slow)
        before, deadline = memory_of(impatient), time.monotonic() + 20
        published = 0
        while is_held(impatient, slow) and time.monotonic() < deadline:
            writer.publish(topic, [published, "x" * 100_000], return_seqs=False)
            assert reader.records(topic, 1)[0]["data"][0] == published  # others are not held up by it
            published += 1
        assert not is_held(impatient, slow)
        assert memory_of(impatient) - before < 24 * MIB
        slow.close()


def test_it_is_told_why_if_it_reads_at_last(impatient: Server) -> None:
    """Records up to some point, then the error, then 1013; a new socket takes over where it was."""
    topic = unique()
    with dialling(impatient.port) as dial:
        writer = dial()
        writer.publish(topic, [0, ""])
        slow = stalled_subscriber(impatient, topic)
        started = time.monotonic()
        published = publish_until(writer, topic, lambda count: count > 150 and time.monotonic() - started > 4.5)
        closed = slow.wait_closed()
        assert closed.code == 1013
        *frames, error = slow.kept()
        assert error.error is not None, error
        assert "request_id" not in error
        seqs = [seq for frame in frames for seq in frame.seqs]
        assert seqs == list(range(2, len(seqs) + 2))
        assert len(seqs) < published
        again = dial()
        again.subscribe(topic, from_seq=seqs[-1] if seqs else 1)
        assert [number for number, _ in again.data(topic, published - len(seqs))] == list(
            range(len(seqs) + 1, published + 1)
        )
        slow.close()


def test_a_pause_that_is_short_enough_costs_nothing(impatient: Server) -> None:
    """It falls behind by far more than its backlog holds, reads on from the log, and is told when it has caught up."""
    topic = unique()
    with dialling(impatient.port) as dial:
        writer = dial()
        writer.publish(topic, [0, ""])
        slow = stalled_subscriber(impatient, topic)
        published = publish_until(writer, topic, lambda count: count == 40)
        seqs: list[int] = []
        ops: list[str] = []
        while not seqs or seqs[-1] < published + 1:
            frame = slow.receive()
            ops.append(frame.op)
            seqs += frame.seqs if frame.op == "record" else []
        assert seqs == list(range(2, published + 2))
        assert set(ops) <= {"record", "caught_up"}
        writer.publish(topic, "live")
        tail = [frame for frame in slow.until("record") if frame.op == "record"]
        assert [frame.data for frame in tail] == [["live"]]
        slow.close()


@pytest.mark.gate
def test_a_slow_reader_of_a_topic_with_a_cap_is_told_of_the_gap(impatient: Server) -> None:
    topic = unique()
    with dialling(impatient.port) as dial:
        writer = dial()
        writer.publish(topic, [0, ""], config={"cap_records": 5})
        slow = stalled_subscriber(impatient, topic)
        started = time.monotonic()
        published = publish_until(
            writer, topic, lambda count: count >= 200 or time.monotonic() - started > 1.5, size=200_000
        )
        position, gaps = 1, []
        while position < published + 1:
            frame = slow.receive()
            if frame.op == "tombstone":
                assert frame["gap_from"] == position + 1
                gaps.append(frame["reason"])
                position = frame["gap_to"]
            elif frame.op == "record":
                assert frame.seqs == list(range(position + 1, frame.seqs[-1] + 1))
                position = frame.seqs[-1]
        assert gaps
        assert set(gaps) <= {"cap", "from_seq_too_old"}
        slow.close()


def flood(raw: RawSocket, topic: str) -> tuple[int, bytes]:
    """Publish without reading a reply until the server takes no more: how many went out whole, the rest of the next.

    The request ids are as long as they may be, so the acks are large.
    """
    most = 60_000
    raw.sock.settimeout(0.5)
    for number in range(most):
        request_id = f"{number}:".ljust(250, "x")
        command = {"op": "publish", "request_id": request_id, "topic": topic, "records": [{"data": number}]}
        rest = memoryview(text_frame(json.dumps(command)))
        while rest:
            try:
                rest = rest[raw.sock.send(rest) :]
            except TimeoutError:
                return number, bytes(rest)
    raise AssertionError(f"{most} publishes and no end of the server's patience")


def test_a_publisher_that_reads_no_acks_is_not_read_from(impatient: Server) -> None:
    topic = unique()
    with dialling(impatient.port) as dial, RawSocket(impatient.port, receive_buffer=131_072) as greedy:
        other = dial()
        other.publish(topic, 0)
        before = memory_of(impatient)
        sent, _ = flood(greedy, topic)
        assert memory_of(impatient) - before < 24 * MIB
        for _ in range(50):
            other.publish(topic, "other")
        # It reads at last: nothing was lost, nothing done twice, everything in order.
        numbers: list[int] = []
        try:
            while len(numbers) < sent:
                reply = greedy.receive()
                if reply.op == "ack":
                    numbers.append(int(str(reply.request_id).partition(":")[0]))
        except Closed as closed:
            assert closed.code == 1013  # noqa: PT017 - too slow is a way to end as well
        assert numbers == list(range(len(numbers)))
        with impatient.client() as client:
            written = client.state(topic)["head_seq"] - 51
        assert len(numbers) <= written <= sent + 1


def test_a_publisher_may_pause_reading(server: Server) -> None:
    """With the usual patience nothing is closed: every ack arrives."""
    topic = unique()
    with RawSocket(server.port, receive_buffer=131_072) as greedy:
        sent, rest = flood(greedy, topic)
        replies = [greedy.receive() for _ in range(sent)]
        assert [reply.op for reply in replies] == ["ack"] * sent
        assert [reply["first_seq"] for reply in replies] == list(range(1, sent + 1))
        greedy.send(rest)
        assert greedy.receive()["first_seq"] == sent + 1


# --- a shard dies ------------------------------------------------------------------------------------


def until_acked(ws: Socket, topic: str, data: object, **fields: object) -> list[Frame]:
    """Publish it until it is acknowledged; all replies. The key makes that safe."""
    replies: list[Frame] = []

    def acked() -> bool:
        replies.append(ws.call("publish", topic=topic, records=[{"data": data}], idempotency_key=str(data), **fields))
        return replies[-1].op == "ack"

    eventually(acked, every_s=0.005)
    return replies


@pytest.mark.gate
@pytest.mark.parametrize("shard", [0, 1])
def test_a_subscription_survives_the_death_of_its_shard(hardy: Server, dial: Dial, shard: int) -> None:
    lost, kept = topic_on(shard), topic_on(1 - shard)
    watcher, writer = dial(), dial()
    for topic in (lost, kept):
        writer.publish(topic, "before")
        watcher.subscribe(topic)
        assert watcher.data(topic, 1) == ["before"]
    killed = hardy.signal_child(f"shard-{shard}")
    eventually(lambda: gone(killed))
    writer.publish(kept, "during")
    assert watcher.data(kept, 1) == ["during"]
    watcher.ping()
    replies = until_acked(writer, lost, "after")
    assert {reply.error for reply in replies[:-1]} <= {"shard_unavailable"}
    assert watcher.data(lost, 1) == ["after"]
    for number in range(20):
        writer.publish(lost, number)
    assert watcher.data(lost, 20) == list(range(20))
    hardy.wait_ready()
    watcher.assert_quiet()


def test_a_backlog_is_delivered_across_the_death_of_its_shard(hardy: Server, dial: Dial) -> None:
    topic = topic_on(0)
    watcher, writer = dial(), dial()
    for turn in range(20):
        writer.publish(topic, *[[turn, number, "x" * 2_000] for number in range(100)])
    watcher.subscribe(topic, limit=10)
    first = watcher.records(topic, 50)
    killed = hardy.signal_child("shard-0")
    eventually(lambda: gone(killed))
    received = first + watcher.records(topic, 1_950)
    assert [record["$seq"] for record in received] == list(range(1, 2_001))
    hardy.wait_ready()


def test_publishing_while_the_shard_dies(hardy: Server, dial: Dial) -> None:
    """Every request gets exactly one reply; what failed is tried again by its key; the watcher sees the log."""
    topic = topic_on(1)
    watcher, writer = dial(), dial()
    writer.publish(topic, "first")
    watcher.subscribe(topic)
    total = 600

    def send(number: int) -> None:
        records = [{"data": number}]
        writer.tell("publish", request_id=number, topic=topic, records=records, idempotency_key=f"k{number}")

    for number in range(200):
        send(number)
    killed = hardy.signal_child("shard-1")
    for number in range(200, 400):
        send(number)
    eventually(lambda: gone(killed))
    for number in range(400, total):
        send(number)
    replies = {int(reply["request_id"]): reply for reply in writer.replies(total)}
    assert sorted(replies) == list(range(total))
    failed = [number for number, reply in replies.items() if reply.op == "error"]
    assert {replies[number].error for number in failed} <= {"shard_unavailable"}
    hardy.wait_ready()
    for number in failed:
        ack = writer.publish(topic, number, idempotency_key=f"k{number}")
        assert ack["count"] == 1
    with hardy.client() as client:
        log = client.diff(topic, limit=1_000)
    assert log.seqs == list(range(1, total + 2))
    assert sorted(log.data[1:]) == list(range(total))
    received = watcher.records(topic, total + 1)
    assert [record["$seq"] for record in received] == log.seqs
    assert [record["data"] for record in received] == log.data
    watcher.assert_quiet()


def test_commands_to_a_shard_that_is_down(hardy: Server, dial: Dial) -> None:
    """Told at once or when it is back; never silence."""
    lost, kept = topic_on(0), topic_on(1)
    ws = dial()
    ws.publish(lost, 1)
    ws.publish(kept, 1)
    hardy.signal_child("shard-0")
    seen: list[Frame] = []

    def subscribed() -> bool:
        seen.append(ws.call("subscribe", topics={lost: {}, kept: {}}))
        return seen[-1].op == "subscribed"

    eventually(subscribed, every_s=0.005)
    assert {frame.error for frame in seen[:-1]} <= {"shard_unavailable"}
    assert ws.data(lost, 1) == [1]
    assert ws.data(kept, 1) == [1]
    assert ws.unsubscribe(lost)["topic"] == lost
    hardy.wait_ready()


def test_a_topic_deleted_and_made_again_around_the_death_of_its_shard(hardy: Server, dial: Dial) -> None:
    """The watcher can't take the new topic for the old one."""
    topic = topic_on(0)
    ws = dial()
    ws.publish(topic, "old 1", "old 2")
    ws.subscribe(topic)
    assert ws.data(topic, 2) == ["old 1", "old 2"]
    ws.until("caught_up")
    killed = hardy.signal_child("shard-0")
    eventually(lambda: gone(killed))
    with hardy.client() as client:
        eventually(lambda: client.drop(topic).status == 200)
        client.append(topic, "new 1", "new 2", "new 3")
    frames = [ws.receive()]
    if frames[0].op == "tombstone":
        assert frames[0]["reason"] == "recreated"
        assert ws.data(topic, 3) == ["new 1", "new 2", "new 3"]
    else:
        assert frames[0].op == "topic_deleted"
        ws.assert_quiet()
    hardy.wait_ready()


@contextmanager
def paused(server: Server, name: str) -> Iterator[int]:
    """A process that stands still; it goes on afterwards, if it has not been replaced."""
    pid = server.signal_child(name, signal.SIGSTOP)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


def test_a_command_has_a_deadline_of_its_own(small_server: Server) -> None:
    """A shard that stands still for a while: the publish fails in time, the subscription goes on where it was."""
    topic, other = topic_on(0), topic_on(1)
    timeout_s = SMALL["TOPICS_CALL_TIMEOUT_MS"] / 1_000
    with dialling(small_server.port) as dial:
        ws, watcher = dial(), dial()
        ws.publish(topic, 0)
        watcher.subscribe(topic)
        assert watcher.data(topic, 1) == [0]
        with paused(small_server, "shard-0") as pid:
            started = time.monotonic()
            ws.tell("publish", request_id="late", topic=topic, records=[{"data": 1}], idempotency_key="k")
            assert ws.publish(other, 1)["seqs"] == [1]  # nobody waits behind it
            late = ws.reply_to("late")
            assert late.error == "shard_unavailable"
            assert late["detail"]["outcome"] == "unknown"
            assert timeout_s - 0.1 < time.monotonic() - started < timeout_s + 3
        assert ws.publish(topic, 1, idempotency_key="k")["last_seq"] == 2
        assert watcher.data(topic, 1) == [1]
        watcher.assert_quiet()
        assert small_server.pid_of("shard-0") == pid


# --- a gateway dies ----------------------------------------------------------------------------------


@pytest.mark.gate
def test_after_the_death_of_the_gateway_a_new_socket_goes_on(hardy: Server, dial: Dial) -> None:
    topic = topic_on(0)
    watcher, writer = dial(), dial()
    for number in range(10):
        writer.publish(topic, number)
    watcher.subscribe(topic)
    received = watcher.records(topic, 10)
    killed = hardy.signal_child("gateway-0")
    eventually(lambda: gone(killed))
    for socket in (watcher, writer):
        assert socket.wait_closed().code == 1006
    with hardy.client() as client:
        client.append(topic, *range(10, 20))
    again = dial()  # connects while the next gateway starts
    again.subscribe(topic, from_seq=received[-1]["$seq"])
    received += again.records(topic, 10)
    assert [record["data"] for record in received] == list(range(20))
    again.publish(topic, 20)
    assert again.data(topic, 1) == [20]
    hardy.wait_ready()


def test_publishing_while_the_gateway_dies(hardy: Server, dial: Dial) -> None:
    """What was acknowledged is there once; what was not is tried again by its key."""
    topic = topic_on(1)
    writer = dial()
    writer.publish(topic, "first")
    acked: set[int] = set()
    total = 300
    for number in range(total):
        writer.tell("publish", request_id=number, topic=topic, records=[{"data": number}], idempotency_key=f"k{number}")
        if number == total // 2:
            for ack in writer.replies(total // 3):
                acked.add(int(str(ack.request_id)))
            hardy.signal_child("gateway-0")
            break
    try:
        while True:
            acked.add(int(str(writer.receive().request_id)))
    except Closed:
        pass
    again = dial()
    for number in range(total):
        ack = again.publish(topic, number, idempotency_key=f"k{number}")
        assert ack["deduped"] or number not in acked
    with hardy.client() as client:
        assert sorted(client.diff(topic, 1, limit=1_000).data) == list(range(total))
    hardy.wait_ready()


def test_with_two_gateways_one_goes_on(start_server: Start) -> None:
    server = start_server(TOPICS_GATEWAYS=2)
    topic = unique()
    with dialling(server.port) as dial, server.client() as client:
        client.append(topic, 0)
        sockets = [dial() for _ in range(24)]
        for socket in sockets:
            socket.settle(topic, tail=True)
        killed = server.signal_child("gateway-0")
        eventually(lambda: gone(killed))
        server.wait_ready()
        with server.client() as fresh:
            fresh.append(topic, 1)
        for socket in sockets:
            try:
                assert socket.data(topic, 1) == [1]
            except Closed as closed:
                assert closed.code == 1006  # noqa: PT017
                again = dial()
                again.subscribe(topic, from_seq=1)
                assert again.data(topic, 1) == [1]


# --- the server stops --------------------------------------------------------------------------------


def test_a_stop_closes_every_socket_with_1001(start_server: Start) -> None:
    server = start_server()
    topic = unique()
    with dialling(server.port) as dial:
        idle, watcher, writer = dial(), dial(), dial()
        silent = RawSocket(server.port)
        writer.publish(topic, 1)
        watcher.subscribe(topic)
        watcher.until("caught_up")
        codes: dict[str, Closed] = {}
        threads = [
            threading.Thread(target=lambda name=name, ws=ws: codes.update({name: ws.wait_closed()}))
            for name, ws in (("idle", idle), ("watcher", watcher), ("writer", writer))
        ]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 25
        for thread in threads:
            thread.join(15)
        assert {name: closed.code for name, closed in codes.items()} == dict.fromkeys(
            ("idle", "watcher", "writer"), 1001
        )
        last = silent.take()  # never answered, and did not hold up the stop
        assert (last.opcode, close_reason(last.payload).code) == (CLOSE, 1001)
        silent.assert_ended()
        silent.close()
        assert not any(socket.kept() for socket in (idle, watcher, writer))


def test_publishes_in_flight_at_a_stop_are_answered_or_not_done(start_server: Start, tmp_path: Path) -> None:
    server = start_server(data_dir=tmp_path / "kept")
    topic = unique()
    acked: list[int] = []
    with dialling(server.port) as dial:
        writer = dial()
        writer.publish(topic, "first")
        for number in range(300):
            writer.tell("publish", request_id=number, topic=topic, records=[{"data": number}])
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        try:
            while True:
                reply = writer.receive()
                if reply.op == "ack":
                    acked.append(int(str(reply.request_id)))
                else:
                    assert reply.error == "shutting_down"
        except Closed as closed:
            assert closed.code == 1001  # noqa: PT017
        stopping.join(30)
    again = start_server(data_dir=tmp_path / "kept")
    with again.client() as client:
        stored: list[Any] = client.diff(topic, 1, limit=1_000).data
    assert acked == stored[: len(acked)]
    assert stored == list(range(len(stored)))


def test_after_a_restart_a_socket_goes_on_from_its_seq(start_server: Start, tmp_path: Path) -> None:
    server = start_server(data_dir=tmp_path / "kept")
    topic = unique()
    with dialling(server.port) as dial:
        dial().publish(topic, 1, 2, 3, config={"durable": True})
    server.kill()
    again = start_server(data_dir=tmp_path / "kept")
    with dialling(again.port) as dial:
        ws = dial()
        ws.subscribe(topic, from_seq=1)
        assert ws.data(topic, 2) == [2, 3]
