"""The Python client as a worker uses it, against a real server: jobs by claim and by stream, whatever dies."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import trio

from topics.client import ApiError, Client, Job, NotTopics, Unreachable, Work, connect
from topics.client import work as work_module

from .client import Client as RawClient
from .queues import Queue, make_queue
from .server import Server

pytestmark = pytest.mark.e2e

T = TypeVar("T")
Start = Callable[..., Server]


def run(url: str, use: Callable[[Client], Awaitable[T]], **options: Any) -> T:
    """A program that uses the client."""

    async def main() -> T:
        with trio.fail_after(90):
            async with connect(url, **options) as client:
                return await use(client)

    return trio.run(main)


async def take(work: Work, count: int) -> list[Job]:
    return [await anext(work) for _ in range(count)]


async def until(probe: Callable[[], Awaitable[bool]]) -> None:
    """Poll; the deadline is that of the program."""
    while not await probe():
        await trio.sleep(0.01)


def seqs(jobs: list[Job]) -> list[int]:
    return [job.seq for job in jobs]


# --- claims ------------------------------------------------------------------------------------------


def test_the_life_of_a_job(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce_records([{"data": {"n": n}, "tag": "t", "node": "web", "meta": {"m": n}} for n in range(3)])

    async def use(client: Client) -> None:
        claimed = await client.claim(queue.name, "w", max=2)
        first, second = claimed.jobs
        assert (claimed.topic, claimed.ready) == (queue.name, 1)
        assert (first.seq, first.decode(), first.tag, first.node, first.deliveries) == (1, {"n": 0}, "t", "web", 1)
        assert bytes(first.meta) == b'{"m": 0}'
        assert first.lease_id.startswith("lease_")
        assert first.deadline_ms > first.ts_ms
        acked = await client.ack(queue.name, "w", first)
        assert (acked.acked, acked.skipped, acked.ready, acked.in_flight) == (1, [], 1, 1)
        extended = await client.extend(queue.name, "w", second, lease_ms=3_600_000)
        assert (extended.extended, extended.skipped) == (1, [])
        assert extended.deadlines_ms[2] > second.deadline_ms + 3_000_000
        nacked = await client.nack(queue.name, "w", second)
        assert (nacked.nacked, nacked.ready, nacked.in_flight) == (1, 2, 0)
        again = (await client.claim(queue.name, "w", max=9)).jobs
        assert [(job.seq, job.deliveries) for job in again] == [(2, 2), (3, 1)]
        assert (await client.ack(queue.name, "w", again)).acked == 2
        assert (await client.claim(queue.name, "w")).jobs == []
        state = await client.state(queue.name)
        assert state.queue is not None
        assert (state.count, state.queue.ready, state.queue.in_flight) == (0, 0, 0)

    run(server.url, use)


def test_the_lease_fences_a_worker_that_was_too_slow(server: Server, api1: RawClient) -> None:
    """Both have the same name; only the seq alone would pass."""
    queue = make_queue(api1)
    queue.produce(1)

    async def use(client: Client) -> None:
        (old,) = (await client.claim(queue.name, "w", lease_ms=100)).jobs

        async def claimed_again() -> bool:
            return bool((await client.claim(queue.name, "w")).jobs)

        await until(claimed_again)
        for answer in (
            await client.ack(queue.name, "w", old),
            await client.nack(queue.name, "w", [old]),
            await client.extend(queue.name, "w", old, lease_ms=1_000),
        ):
            assert answer.skipped == [1]
        assert (await client.ack(queue.name, "w", 1)).acked == 1

    run(server.url, use)


def test_a_delay(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce(1)

    async def use(client: Client) -> None:
        (job,) = (await client.claim(queue.name, "w")).jobs
        nacked = await client.nack(queue.name, "w", job, delay_ms=3_600_000)
        assert (nacked.nacked, nacked.ready) == (1, 0)

    run(server.url, use)


def test_refusals_are_the_servers_own(server: Server, api1: RawClient, topic: str) -> None:
    queue = make_queue(api1)

    async def use(client: Client) -> list[str]:
        found = []
        for call in (
            lambda: client.claim(topic, "w"),
            lambda: client.ack(topic, "w", 1),
            lambda: client.claim(queue.name, ""),
            lambda: client.claim(queue.name, "w", max=0),
            lambda: client.ack(queue.name, "w", []),
            lambda: client.nack(queue.name, "w", list(range(1, 1_002))),
        ):
            with pytest.raises(ApiError) as caught:
                await call()
            found.append(caught.value.code)
        return found

    refused = "invalid_request"
    assert run(server.url, use) == ["topic_not_found"] * 2 + [refused] * 3 + ["batch_too_large"]
    api1.append(topic, 1)

    async def on_a_log(client: Client) -> None:
        with pytest.raises(ApiError) as caught:
            await client.claim(topic, "w")
        assert caught.value.code == "not_a_queue"

    run(server.url, on_a_log)


def test_reading_leases_nothing(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce_records([{"data": n, "tag": f"t{n}"} for n in range(1, 2_001)])

    async def use(client: Client) -> None:
        page = await client.read(queue.name)
        assert [(record.seq, record.tag) for record in page][:2] == [(1, "t1"), (2, "t2")]
        assert (page.next_from_seq, page.head_seq, page.caught_up) == (1_000, 2_000, False)
        assert (await client.read(queue.name, 1_999)).caught_up
        names = [row.topic async for row in client.topics() if row.queue is not None]
        assert queue.name in names

    run(server.url, use)
    queue.assert_counters(2_000, 0)


def test_deletes(server: Server, api1: RawClient, topic: str) -> None:
    api1.append_records(topic, [{"data": n, "tag": "ab"[n % 2]} for n in range(10)])

    async def use(client: Client) -> None:
        assert await client.delete(topic, before_seq=6, tag="a") == 3
        assert await client.delete(topic, before_seq=3) == 1
        assert await client.delete(topic, tag="a") == 2

    run(server.url, use)
    assert api1.diff(topic).seqs == [4, 6, 8, 10]


# --- streams -----------------------------------------------------------------------------------------


def test_jobs_come_as_others_are_done(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce(*range(50))

    async def use(client: Client) -> list[int]:
        found = []
        async with client.work(queue.name, "w", max=4) as work:
            async for job in work:
                found.append(job.decode())
                state = await client.state(queue.name)
                assert state.queue is not None
                assert state.queue.in_flight <= 4
                assert (await client.ack(queue.name, "w", job)).acked == 1
                if len(found) == 25:
                    queue.produce("late")
                if job.decode() == "late":
                    return found
        raise AssertionError("it never ends by itself")

    assert run(server.url, use) == [*range(50), "late"]
    queue.wait_counters(0, 0)


def test_a_stream_waits_for_what_is_not_there_yet(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)

    async def use(client: Client) -> None:
        async with client.work(queue.name, "w", lease_ms=60_000) as work:
            assert work.take_nowait() is None
            queue.produce("x")
            job = await anext(work)
            assert (job.decode(), job.deliveries) == ("x", 1)
            assert 50_000 < job.deadline_ms - job.ts_ms < 120_000
            queue.produce("y")
            await client.nack(queue.name, "w", job)
            again = await anext(work)
            assert (again.decode(), again.deliveries) == ("x", 2)

    run(server.url, use)


def test_leaving_gives_everything_back(server: Server, api1: RawClient) -> None:
    """Also what was sent and not taken; but not what was claimed."""
    queue = make_queue(api1)
    queue.produce(*range(10))

    async def use(client: Client) -> None:
        claimed = (await client.claim(queue.name, "w")).jobs
        async with client.work(queue.name, "w", max=5) as work:
            jobs = await take(work, 2)
            await client.ack(queue.name, "w", jobs[0])

        async def given_back() -> bool:
            state = await client.state(queue.name)
            return state.queue is not None and (state.queue.ready, state.queue.in_flight) == (8, 1)

        await until(given_back)
        assert (await client.ack(queue.name, "w", jobs[1])).skipped == [jobs[1].seq]
        assert (await client.ack(queue.name, "w", claimed)).acked == 1

    run(server.url, use)


def test_the_workers_own_exceptions_leave_as_they_are(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce(1)

    async def use(client: Client) -> None:
        async with client.work(queue.name, "w") as work:
            async for _ in work:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(server.url, use)


def test_many_workers_share(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce(*range(400))
    found: Counter[int] = Counter()
    busy: set[str] = set()

    async def use(client: Client) -> None:
        async def worker(node: str, scope: trio.CancelScope) -> None:
            async with connect(server.url) as own, own.work(queue.name, node, max=8) as work:
                async for job in work:
                    found[job.decode()] += 1
                    busy.add(node)
                    await own.ack(queue.name, node, job)
                    if len(found) == 400:
                        scope.cancel()

        async with trio.open_nursery() as nursery:
            for n in range(4):
                nursery.start_soon(worker, f"w{n}", nursery.cancel_scope)

    run(server.url, use)
    assert set(found.values()) == {1}
    assert len(found) == 400
    assert len(busy) == 4


@pytest.mark.full
def test_a_worker_that_does_not_take_its_jobs_keeps_its_stream(start_server: Start) -> None:
    """Jobs are read as they come, so the server does not find it slow although it takes none of them."""
    server = start_server(TOPICS_SLOW_CONSUMER_TIMEOUT_MS=1_000)
    notices: list[str] = []
    with server.client() as api:
        queue = make_queue(api)
        queue.produce(*("x" * 700_000 for _ in range(20)))

        async def use(client: Client) -> None:
            async with client.work(queue.name, "w", max=20) as work:
                await trio.sleep(3)  # three times what the server bears with
                jobs = await take(work, 20)
                assert (await client.ack(queue.name, "w", jobs)).acked == 20

        run(server.url, use, notice=notices.append)
    assert notices == []


def test_streams_that_can_not_be(server: Server, api1: RawClient, topic: str) -> None:
    api1.append(topic, 1)
    queue = make_queue(api1)

    async def use(client: Client) -> list[str]:
        found = []
        for name, node, most in ((topic, "w", 1), ("never-was", "w", 1), (queue.name, "", 1), (queue.name, "w", 0)):
            with pytest.raises(ApiError) as caught:
                async with client.work(name, node, max=most):
                    raise AssertionError("not reached")
            found.append(caught.value.code)
        return found

    assert run(server.url, use) == ["not_a_queue", "topic_not_found", "invalid_request", "invalid_request"]


def test_names_are_quoted(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce(1)
    node = "a&max=7 /?é%"

    async def use(client: Client) -> None:
        async with client.work(queue.name, node) as work:
            job = await anext(work)
            assert (await client.ack(queue.name, node, job)).acked == 1

    run(server.url, use)


def test_a_queue_that_is_deleted(server: Server, api1: RawClient) -> None:
    queue = make_queue(api1)
    queue.produce(1)

    async def use(client: Client) -> None:
        async with client.work(queue.name, "w") as work:
            await anext(work)
            api1.drop(queue.name)
            with pytest.raises(ApiError) as caught:
                await anext(work)
            assert caught.value.code == "topic_not_found"

    run(server.url, use)


@pytest.mark.full
def test_a_queue_that_is_made_again_as_a_log(start_server: Start) -> None:
    server = start_server()
    with server.client() as api:
        make_queue(api, "q")

        async def use(client: Client) -> None:
            async with client.work("q", "w") as work:
                api.drop("q")
                api.append("q", 1)
                with pytest.raises(ApiError) as caught:
                    await anext(work)
                assert caught.value.code in ("topic_not_found", "not_a_queue")

        run(server.url, use)


# --- whatever dies -----------------------------------------------------------------------------------


def drain(
    server: Server, queue: Queue, total: int, *, at: dict[int, Callable[[], object]]
) -> tuple[Counter[Any], list[str]]:
    """Work until every job is done; something happens after some of them. How often each was done, and the notices."""
    notices: list[str] = []
    done: Counter[Any] = Counter()

    async def use(client: Client) -> None:
        async with client.work(queue.name, "w", max=10, lease_ms=60_000) as work:
            async for job in work:
                if (happens := at.pop(sum(done.values()), None)) is not None:
                    await trio.to_thread.run_sync(happens)
                done[job.decode()] += (await client.ack(queue.name, "w", job)).acked
                if sum(done.values()) == total:
                    return

    run(server.url, use, notice=notices.append)
    return done, notices


@pytest.mark.full
@pytest.mark.parametrize("victim", ["gateway-0", "queue", "shard-0"])
def test_a_process_dies_under_a_worker(start_server: Start, victim: str) -> None:
    """Each job is acked once, and none is forgotten. A job that comes again is one whose ack did not count."""
    server = start_server(TOPICS_WAL_SHARDS=1)
    with server.client() as api:
        queue = make_queue(api)
        queue.produce(*range(300))

        def kill() -> None:
            server.signal_child(victim)
            server.wait_ready()

        done, notices = drain(server, queue, 300, at={50: kill, 150: kill})
    assert done == Counter(range(300))
    if victim == "gateway-0":
        assert "connected again" in notices
    with server.client() as api:
        assert queue.by(api).left() == []


@pytest.mark.full
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_the_server_is_restarted_under_a_worker(start_server: Start, how: str) -> None:
    server = start_server()
    with server.client() as api:
        queue = make_queue(api, durability="fsync")
        queue.produce(*range(200))

    def restart() -> None:
        if how == "stop":
            assert server.stop() == 0
        else:
            server.kill()
        start_server(data_dir=server.data_dir, TOPICS_PORT=server.port)

    done, notices = drain(server, queue, 200, at={60: restart})
    assert done == Counter(range(200))
    assert "connected again" in notices


@pytest.mark.full
def test_what_was_not_taken_is_dropped_with_its_connection(start_server: Start) -> None:
    """Its leases have ended: others may have it. It comes again with a new lease."""
    server = start_server()
    with server.client() as api:
        queue = make_queue(api)
        queue.produce(*range(5))

        async def use(client: Client) -> None:
            async with client.work(queue.name, "w", max=5) as work:
                old = await anext(work)

                async def all_sent() -> bool:
                    state = await client.state(queue.name)
                    return state.queue is not None and state.queue.ready == 0

                await until(all_sent)
                again = trio.Event()
                client._notice = lambda text: again.set() if "connected again" in text else None
                work._feed._notice = client._notice
                server.signal_child("gateway-0")
                await again.wait()
                jobs = await take(work, 5)
                assert sorted(seqs(jobs)) == [1, 2, 3, 4, 5]
                assert {job.deliveries for job in jobs} == {2}
                assert (await client.ack(queue.name, "w", old)).skipped == [old.seq]
                assert (await client.ack(queue.name, "w", jobs)).acked == 5

        run(server.url, use)


def test_nobody_there() -> None:
    async def use(client: Client) -> None:
        with pytest.raises(Unreachable):
            async with client.work("q", "w"):
                raise AssertionError("not reached")
        with pytest.raises(Unreachable):
            await client.claim("q", "w")

    run("http://127.0.0.1:1", use)


def served(answer: bytes, *, times: int = 1) -> tuple[str, Callable[[], None]]:
    """Somebody who answers every connection so, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(times):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", listener.close


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example ESMTP\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nhi",
    ],
)
def test_somebody_else_answers(answer: bytes) -> None:
    url, close = served(answer)

    async def use(client: Client) -> None:
        with pytest.raises(NotTopics):
            async with client.work("q", "w"):
                raise AssertionError("not reached")

    run(url, use)
    close()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b'event: error\ndata: {"code":404,"error":"gone"}\n\n', "topic_not_found"),
        (b'event: error\ndata: {"code":409,"error":"a log now"}\n\n', "not_a_queue"),
    ],
)
def test_errors_that_end_it(frame: bytes, code: str) -> None:
    url, close = served(HEAD + b"retry: 2000\n\n: hb 1\n\n" + frame)

    async def use(client: Client) -> None:
        async with client.work("q", "w") as work:
            with pytest.raises(ApiError) as caught:
                await anext(work)
            assert caught.value.code == code

    run(url, use)
    close()


JOB = (
    b'event: job\ndata: {"topic":"q","$seq":%d,"lease_id":"lease_1","deadline":2,"deliveries":1,"$ts":1,"data":%d}\n\n'
)


@pytest.mark.parametrize(
    "frame",
    [
        b'event: error\ndata: {"code":503,"error":"stopping"}\n\n',
        b'event: error\ndata: {"code":408,"error":"slow"}\n\n',
        b"",
    ],
)
def test_errors_that_pass(frame: bytes) -> None:
    """The second connection is as good as the first. What the first sent and nobody took is gone with it."""
    url, close = served(HEAD + JOB % (1, 1) + frame, times=50)
    notices: list[str] = []

    async def use(client: Client) -> None:
        async with client.work("q", "w", max=3) as work:
            while "connected again" not in notices:
                await trio.sleep(0.01)
            assert (await anext(work)).seq == 1

    run(url, use, notice=notices.append)
    assert notices[0].startswith("trying again: ")
    close()


def test_advice_about_pace_is_no_end() -> None:
    pacing = b'event: error\ndata: {"code":429,"error":"slowly"}\n\n'
    url, close = served(HEAD + pacing + JOB % (7, 7), times=50)

    async def use(client: Client) -> None:
        async with client.work("q", "w") as work:
            assert (await anext(work)).seq == 7

    run(url, use)
    close()


def test_a_server_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "LOST_AFTER_S", 0.2)
    notices: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def serve() -> None:
            for n in range(2):
                connection, _ = listener.accept()
                kept.append(connection)
                connection.recv(65_536)
                connection.sendall(HEAD + (JOB % (n, n) if n else b""))

        threading.Thread(target=serve, daemon=True).start()

        async def use(client: Client) -> None:
            async with client.work("q", "w") as work:
                assert (await anext(work)).seq == 1

        run(f"http://127.0.0.1:{listener.getsockname()[1]}", use, notice=notices.append)
        for connection in kept:
            connection.close()
    assert "has said nothing for" in notices[0]
