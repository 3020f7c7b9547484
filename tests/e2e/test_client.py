"""The Python client as a program uses it, against a real server."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import trio

from topics.client import (
    ApiError,
    CaughtUp,
    Client,
    Event,
    NewRecord,
    NotTopics,
    OutcomeUnknown,
    Records,
    Subscription,
    Tombstone,
    TopicDeleted,
    Unreachable,
    connect,
    subscription,
)

from .client import Client as RawClient
from .server import Server

pytestmark = pytest.mark.e2e

T = TypeVar("T")
Start = Callable[..., Server]


def run(url: str, use: Callable[[Client], Awaitable[T]], **options: Any) -> T:
    """A program that uses the client."""

    async def main() -> T:
        with trio.fail_after(30):
            async with connect(url, **options) as client:
                return await use(client)

    return trio.run(main)


async def until(events: Subscription, enough: Callable[[list[Event]], bool]) -> list[Event]:
    found: list[Event] = []
    async for event in events:
        found.append(event)
        if enough(found):
            break
    return found


def values(events: list[Event]) -> list[Any]:
    return [record.decode() for event in events if isinstance(event, Records) for record in event]


# --- writing -----------------------------------------------------------------------------------------


def test_publish(server: Server, api1: RawClient, topic: str) -> None:
    async def use(client: Client) -> None:
        receipt = await client.publish(topic, [{"n": 1}, NewRecord(2, tag="own", node="w2", meta={"m": 1})], tag="all")
        assert (receipt.first_seq, receipt.last_seq, receipt.count) == (1, 2, 2)
        assert receipt.created
        assert not receipt.deduped
        again = await client.publish(topic, [3], node="w1", key="k")
        repeated = await client.publish(topic, ["not looked at"], node="w1", key="k")
        assert (again.last_seq, again.deduped) == (3, False)
        assert (repeated.last_seq, repeated.deduped) == (3, True)

    run(server.url, use)
    first, second, third = api1.diff(topic, include_tags=True)["records"]
    assert (first["data"], first["$tag"]) == ({"n": 1}, "all")
    assert (second["data"], second["$tag"], second["$node"], second["meta"]) == (2, "own", "w2", {"m": 1})
    assert (third["data"], third["$node"]) == (3, "w1")


def test_refusals_are_the_servers_own(server: Server, topic: str) -> None:
    async def use(client: Client) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await client.publish(topic, [1], create=False)
        return caught.value

    error = run(server.url, use)
    assert (error.code, error.detail) == ("topic_not_found", {"topic": topic})


def test_config_for_a_new_topic(server: Server, topic: str) -> None:
    async def use(client: Client) -> Any:
        await client.publish(topic, [1], config={"durability": "fsync", "cap_records": 5})
        return (await client.state(topic)).config

    config = run(server.url, use)
    assert (config["durability"], config["cap_records"]) == ("fsync", 5)


@pytest.mark.full
def test_an_idle_connection_may_end(small_server: Server, topic: str) -> None:
    """The server closes it after one and a half seconds; the next request is made as if nothing had happened."""
    notices: list[str] = []

    async def use(client: Client) -> None:
        await client.publish(topic, [1])
        await trio.sleep(2.0)
        assert (await client.publish(topic, [2])).last_seq == 2

    run(small_server.url, use, notice=notices.append)
    assert notices == []


@pytest.mark.full
def test_patience_ends(start_server: Start) -> None:
    server = start_server()

    async def use(client: Client) -> None:
        await client.publish("jobs", [1])
        server.kill()
        with pytest.raises((Unreachable, OutcomeUnknown)):
            await client.publish("jobs", [2], patience_s=0.5)

    run(server.url, use)


def test_an_answer_that_never_comes_leaves_the_outcome_open() -> None:
    """Whoever listens takes the request and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(20):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65_536)

        thread = threading.Thread(target=hang_up)
        thread.start()

        async def use(client: Client) -> OutcomeUnknown:
            with pytest.raises(OutcomeUnknown) as caught:
                await client.publish("jobs", [1], key="k-1", patience_s=0.5)
            return caught.value

        assert run(f"http://127.0.0.1:{listener.getsockname()[1]}", use).key == "k-1"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_a_first_connection_that_is_refused_is_an_error_at_once() -> None:
    async def use(client: Client) -> None:
        with pytest.raises(Unreachable, match="connection refused"):
            await client.publish("jobs", [1])
        with pytest.raises(Unreachable, match="connection refused"):
            async with client.subscribe({"jobs": None}):
                raise AssertionError("there is nobody")

    run("http://127.0.0.1:1", use)


def test_somebody_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in (b"220 mail ready\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(reply)
                    connection.recv(65_536)

        thread = threading.Thread(target=answer)
        thread.start()

        async def use(client: Client) -> None:
            for _ in range(2):
                with pytest.raises(NotTopics):
                    await client.state("jobs")

        run(f"http://127.0.0.1:{listener.getsockname()[1]}", use)
        thread.join(10)


# --- reading -----------------------------------------------------------------------------------------


def test_subscribe(server: Server, api1: RawClient, topic: str) -> None:
    api1.append(topic, 1, 2)

    async def use(client: Client) -> None:
        async with client.subscribe({topic: 0}) as events:
            assert (events.first[topic].from_seq, events.first[topic].head_seq) == (0, 2)
            found = await until(events, lambda found: isinstance(found[-1], CaughtUp))
            assert values(found) == [1, 2]
            await client.publish(topic, [3])
            assert values(await until(events, lambda found: bool(values(found)))) == [3]
            await trio.to_thread.run_sync(api1.drop, topic)
            assert [event async for event in events][-1] == TopicDeleted(topic=topic, head_seq=3)

    run(server.url, use)


def test_only_what_is_new(server: Server, api1: RawClient, topic: str) -> None:
    api1.append(topic, 1, 2)

    async def use(client: Client) -> list[Any]:
        async with client.subscribe({topic: None}, node="me", tags=True) as events:
            await client.publish(topic, [3], node="me")
            await client.publish(topic, [4], tag="t")
            found = await until(events, lambda found: bool(values(found)))
            record = next(iter(next(event for event in found if isinstance(event, Records))))
            assert record.tag == "t"
            return values(found)

    assert run(server.url, use) == [4]


def test_a_subscription_survives_a_gateway(start_server: Start) -> None:
    server = start_server()
    notices: list[str] = []

    async def use(client: Client) -> list[Any]:
        await client.publish("jobs", range(100))
        async with client.subscribe({"jobs": 0}) as events:
            found = await until(events, lambda found: len(values(found)) == 100)
            server.signal_child("gateway-0")
            await client.publish("jobs", range(100, 200))
            return values(found + await until(events, lambda more: len(values(more)) == 100))

    assert run(server.url, use, notice=notices.append) == list(range(200))
    assert any("trying again" in text for text in notices)
    assert "connected again" in notices


@pytest.mark.full
def test_a_server_that_falls_silent_is_found_out(start_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is closed and nothing is said: only asking helps."""
    for name in ("PING_AFTER_S", "LOST_AFTER_S", "CONNECT_TIMEOUT_S"):
        monkeypatch.setattr(subscription, name, 0.3)
    server = start_server(TOPICS_HEARTBEAT_MS=60_000)  # nobody minds that the gateway stands still
    with server.client() as raw:
        raw.append("jobs", 1)
    notices: list[str] = []

    async def use(client: Client) -> list[Any]:
        async with client.subscribe({"jobs": 0}) as events:
            found = await until(events, lambda found: bool(values(found)))
            with trio.move_on_after(1.0):  # it answers when asked: silence alone is no reason
                await until(events, lambda found: bool(values(found)))
            assert notices == []
            server.signal_child("gateway-0", signal.SIGSTOP)
            with trio.move_on_after(3.0):
                await until(events, lambda found: bool(values(found)))
            assert "has not answered" in notices[0]
            server.signal_child("gateway-0", signal.SIGCONT)
            await client.publish("jobs", [2])
            return values(found + await until(events, lambda found: bool(values(found))))

    assert run(server.url, use, notice=notices.append) == [1, 2]
    assert notices[-1] == "connected again"


def test_losses_are_told(server: Server, api1: RawClient, topic: str) -> None:
    api1.put(topic, cap_records=2)
    api1.append(topic, *range(10))

    async def use(client: Client) -> list[Event]:
        async with client.subscribe({topic: 0}) as events:
            return await until(events, lambda found: isinstance(found[-1], CaughtUp))

    first, *rest = run(server.url, use)
    assert isinstance(first, Tombstone)
    assert (first.gap_from, first.gap_to) == (1, 8)
    assert values(rest) == [8, 9]


def test_an_unknown_topic_is_refused_before_the_first_event(server: Server) -> None:
    async def use(client: Client) -> None:
        with pytest.raises(ApiError, match="no-such-topic") as caught:
            async with client.subscribe({"no-such-topic": 0}):
                raise AssertionError("there is nothing to read")
        assert caught.value.code == "topic_not_found"

    run(server.url, use)


def test_exceptions_of_the_reader_are_not_wrapped(server: Server, api1: RawClient, topic: str) -> None:
    api1.append(topic, 1)

    async def use(client: Client) -> None:
        async with client.subscribe({topic: 0}) as events:
            async for _ in events:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(server.url, use)


def test_a_wait_for_an_event_may_be_cancelled(server: Server, api1: RawClient, topic: str) -> None:
    api1.append(topic, 1)

    async def use(client: Client) -> None:
        async with client.subscribe({topic: 1}) as events:
            with trio.move_on_after(0.3):
                await until(events, lambda found: bool(values(found)))
            await client.publish(topic, [2])
            assert values(await until(events, lambda found: bool(values(found)))) == [2]

    run(server.url, use)


def test_a_slow_reader_gets_everything(server: Server, api1: RawClient, topic: str) -> None:
    for _ in range(10):
        api1.append(topic, *[{"pad": "x" * 500}] * 1_000)

    async def use(client: Client) -> int:
        seen = 0
        async with client.subscribe({topic: 0}) as events:
            async for event in events:
                if isinstance(event, Records):
                    assert event.from_seq == seen
                    seen = event.to_seq
                await trio.sleep(0.01)
                if seen == 10_000:
                    return seen
        raise AssertionError("it ended")

    assert run(server.url, use) == 10_000


@pytest.mark.parametrize("deleted", [(), (1, 5, 6, 30)], ids=["whole", "with holes"])
def test_where_a_time_begins(server: Server, api1: RawClient, topic: str, deleted: tuple[int, ...]) -> None:
    """Against every record's own time, and the moments around it."""
    for n in range(1, 31):
        api1.append_records(topic, [{"data": n, "tag": f"n:{n}"}] * 2)
    for n in deleted:
        api1.delete(topic, match=f"n:{n}")
    records = api1.diff(topic, limit=1_000)["records"]

    async def use(client: Client) -> None:
        for ts_ms in sorted({record["$ts"] + offset for record in records for offset in (-1, 0, 1)}):
            start = await client.seq_before(topic, ts_ms)
            assert all((record["$seq"] > start) == (record["$ts"] >= ts_ms) for record in records), ts_ms

    run(server.url, use)


def test_where_a_time_begins_in_an_empty_topic(server: Server, api1: RawClient, topic: str) -> None:
    api1.put(topic)
    assert run(server.url, lambda client: client.seq_before(topic, 0)) == 0
