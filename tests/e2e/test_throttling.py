"""Elastic throttling: what a server under pressure refuses, what it lets wait, what it puts off, and that it loses
nothing by it.

Levels are reached with marks that anything exceeds: ten microseconds for a sync (a good disk takes a hundred), a
millisecond for a round of a process's loop. How high a process has climbed is read from the board; no test depends on
how long a level lasts.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from topics import limits

from .client import LANES, Answer, Client, Lane
from .pressing import (
    DEFER,
    REFUSE,
    Threads,
    assert_all_there,
    assert_throttled,
    busy_gateway,
    fresh_on,
    gauges,
    http_writer,
    levels,
    pressed,
    socket_writer,
    wait_calm,
    wait_level,
)
from .queues import make_queue
from .routing import data_of, read
from .server import Server, eventually
from .sockets import Socket
from .sse import Silence, Watching
from .wire import Wire, request

pytestmark = pytest.mark.e2e

SHARD = 1  # the one that is pressed
OTHER = 0
WITHIN_S = 30.0


def start(folder: Path, **environ: object) -> Iterator[Server]:
    server = Server(folder / "data", log=folder / "server.log", **environ)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output(), server.output()[-3_000:]
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Any sync is too slow for its shards."""
    yield from start(tmp_path_factory.mktemp("slow-syncs"), TOPICS_PRESSURE_COMMIT_MS=0.01)


@pytest.fixture(scope="module")
def laggard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Any round is too slow for its gateway."""
    yield from start(tmp_path_factory.mktemp("slow-rounds"), TOPICS_PRESSURE_LAG_MS=1)


@pytest.fixture
def api(server: Server, lane: Lane) -> Iterator[Client]:
    """By one lane and then by the other, to a server that has calmed down."""
    wait_calm(server)
    with server.client(lane) as client:
        yield client


@pytest.fixture
def api1(server: Server) -> Iterator[Client]:
    wait_calm(server)
    with server.client() as client:
        yield client


def made(api: Client, topic: str, **config: object) -> str:
    answer = api.put(topic, **config)
    assert answer.status == 201, answer
    return topic


def insist(ask: Callable[[], Answer], *, within_s: float = WITHIN_S) -> Answer:
    """Ask until it is let through; it may be throttled before."""

    def taken() -> Answer | None:
        answer = ask()
        if answer.status == 429:
            assert_throttled(answer)
            return None
        return answer

    answer = eventually(taken, within_s=within_s, what="an answer that is not 429")
    assert answer is not None
    return answer


def until_refused(ask: Callable[[], Answer], *, within_s: float = WITHIN_S) -> Answer:
    answer = eventually(
        lambda: found if (found := ask()).status == 429 else None, within_s=within_s, every_s=0.005, what="a refusal"
    )
    assert answer is not None
    assert_throttled(answer)
    return answer


# --- calm --------------------------------------------------------------------------------------------


def test_a_calm_server_says_that_nobody_waited(api: Client, topic: str) -> None:
    queue = make_queue(api)
    queue.produce(1)
    answers = [
        api.append(topic, 1),
        api.append(topic, 2, disable_backpressure=True),
        api.append(topic, 3, idempotency_key="k"),
        api.diff(topic),
        queue.claim(1),
    ]
    for answer in answers:
        assert answer["performance"]["throttle_wait_ms"] == 0.0, answer


def test_a_calm_server_shows_no_pressure(server: Server, api1: Client) -> None:
    assert gauges(server, "topics_process_pressure").keys() >= {"gateway-0", "shard-0", "shard-1", "router", "queue"}
    eventually(lambda: not any(gauges(server, "topics_process_pressure").values()))


# --- refusing ----------------------------------------------------------------------------------------


def test_overload_ends_in_refusals_and_nothing_is_lost_doubled_or_reordered(server: Server, api1: Client) -> None:
    """Writers of all kinds, impolite ones and patient ones, on two topics of the pressed shard."""
    topics = [made(api1, fresh_on(SHARD), durability="fsync"), made(api1, fresh_on(SHARD), durability="disk")]
    threads = Threads()
    sockets = [Socket(server.port) for _ in topics]
    writers = []
    for topic, socket in zip(topics, sockets, strict=True):
        for lane in LANES:
            for patient in (False, True):
                client = server.client(lane)
                writer = http_writer(f"{lane}-{patient}", topic, client)
                writers.append(writer)
                fields = {"disable_backpressure": True} if patient else {}
                threads.start(client, lambda _, writer=writer, fields=fields: writer.step(**fields))  # type: ignore[misc]
        writer = socket_writer("socket", topic, socket)
        writers.append(writer)
        threads.start(server.client(), lambda _, writer=writer: writer.step())  # type: ignore[misc]

    def enough() -> bool:
        threads.check()
        total = sum((writer.statuses for writer in writers), Counter())
        return total[429] >= 100 and all(len(writer.acked) >= 10 for writer in writers)

    try:
        eventually(enough, within_s=60)
    finally:
        threads.end()
        for socket in sockets:
            socket.close()
    wait_calm(server)
    for topic in topics:
        assert_all_there(api1, topic, [writer for writer in writers if writer.topic == topic])
    for writer in writers:
        if writer.name.endswith("True"):
            assert not writer.statuses[429], "a patient one was refused"
        else:
            assert not any(writer.waits_ms), "one that would rather be refused had to wait"


def test_idempotent_retries_of_what_was_refused_are_written_once(server: Server, api1: Client) -> None:
    topic = made(api1, fresh_on(SHARD), durability="fsync")
    refused = number = 0
    with pressed(server, SHARD), server.client() as client:
        while number < 20 or (not refused and number < 500):
            key = f"k{number}"
            while (answer := client.append(topic, number, idempotency_key=key)).status == 429:
                assert_throttled(answer)
                refused += 1
                time.sleep(0.005)
            assert answer["deduped"] is False, "what was refused was not done"
            again = insist(lambda key=key, number=number: client.append(topic, number, idempotency_key=key))  # type: ignore[misc]
            assert again["deduped"] is True
            assert again["seqs"] == answer["seqs"]
            number += 1
    assert refused > 0
    wait_calm(server)
    assert data_of(api1, topic) == list(range(number))


def test_what_relieves_a_server_is_never_refused(server: Server, api: Client) -> None:
    """All the while that appends, diffs and claims are refused, on the same shard."""
    topic = made(api, fresh_on(SHARD))
    assert api.append(topic, *range(500)).status == 200
    queue = make_queue(api, fresh_on(SHARD), default_lease_ms=60_000)
    seqs = queue.produce(*range(300))
    jobs = queue.take(300)
    assert [job["$seq"] for job in jobs] == seqs
    refused: Counter[str] = Counter()
    done = 0

    def relieve(number: int) -> None:
        nonlocal done
        first, second, third = seqs[3 * number : 3 * number + 3]
        done += 1
        assert queue.ack([first])["acked"] == 1
        assert queue.nack([second], delay_ms=60_000)["nacked"] == 1
        assert queue.extend([third])["extended"] == 1
        deleted = api.delete(topic, before_seq=number + 2)
        assert (deleted.status, deleted["deleted"]) == (200, 1), deleted
        for answer in (
            api.state(topic),
            api.state(queue.name),
            api.list(prefix=topic),
            api.get("/v0/health"),
            api.get("/v0/ready"),
            api.get("/v0/routers"),
            api.send("POST", "/v0/watch", {"topics": {topic: {}}}),
            api.put(topic, cap_records=10_000),
        ):
            assert answer.status in (200, 201), answer
        other = made(api, fresh_on(SHARD))
        assert api.drop(other).status == 200

    def offer() -> None:
        for name, answer in (
            ("append", api.append(topic, "more")),
            ("diff", api.diff(topic)),
            ("claim", queue.post("claim", {"node": "late"})),
        ):
            if answer.status == 429:
                assert_throttled(answer)
                refused[name] += 1
            else:
                assert answer.status == 200, answer

    with pressed(server, SHARD) as pressing:
        wait_level(server, f"shard-{SHARD}", REFUSE)
        for number in range(100):
            pressing.check()
            relieve(number)
            offer()
            if done >= 15 and all(refused[name] >= 3 for name in ("append", "diff", "claim")):
                break
    assert all(refused[name] for name in ("append", "diff", "claim")), refused


def test_a_calm_shard_goes_on_taking_work(server: Server, api: Client) -> None:
    topic = made(api, fresh_on(OTHER), durability="ephemeral")
    refused = made(api, fresh_on(SHARD))
    count = 0
    with pressed(server, SHARD):
        for _ in range(5):
            until_refused(lambda: api.append(refused, 1))
            for _ in range(10):
                count += 1
                answer = api.append(topic, count)
                assert answer.status == 200, answer
                assert api.diff(topic, count - 1).data == [count]


def test_a_batch_that_is_refused_creates_nothing(server: Server, api: Client) -> None:
    topic = made(api, fresh_on(SHARD))
    with pressed(server, SHARD):
        for _ in range(3):
            until_refused(lambda: api.append(topic, "probe"))
            new = fresh_on(SHARD)
            answer = api.append(new, 1)
            if answer.status == 429:
                assert api.state(new).refusal == (404, "topic_not_found")


# --- waiting instead ---------------------------------------------------------------------------------


def test_patient_writes_are_kept_back_and_then_done_in_order(server: Server, api: Client) -> None:
    topic = made(api, fresh_on(SHARD))
    waited: list[float] = []
    with pressed(server, SHARD):
        number = 0
        while len([wait for wait in waited if wait > 0]) < 5 and number < 500:
            if number % 5 == 0:
                wait_level(server, f"shard-{SHARD}", REFUSE)
            answer = api.append(topic, number, disable_backpressure=True)
            assert answer.status == 200, answer
            wait = answer["performance"]["throttle_wait_ms"]
            assert wait <= answer["performance"]["server_total_ms"] + 1, "it waits no longer than it takes"
            assert wait <= limits.PARK_MS + 1_000
            waited.append(wait)
            number += 1
    assert len([wait for wait in waited if wait > 0]) >= 5, "none of them had to wait"
    wait_calm(server)
    assert data_of(api, topic) == list(range(number))


def test_patient_writes_of_one_connection_keep_their_order(server: Server, api1: Client) -> None:
    """Sent one behind the other without waiting for answers; each answer says where its record is."""
    topic = made(api1, fresh_on(SHARD))
    numbers = itertools.count()
    kept_back = 0
    with pressed(server, SHARD), Wire(server.port) as wire:
        for _ in range(10):
            wait_level(server, f"shard-{SHARD}", REFUSE)
            batch = [next(numbers) for _ in range(20)]
            for number in batch:
                body = json.dumps({"records": [{"data": number}], "disable_backpressure": True}).encode()
                wire.send(request("POST", f"/v0/topics/{topic}", body))
            for number in batch:
                answer = wire.answer()
                assert answer.status == 200, answer
                assert answer["seqs"] == [number + 1]
                kept_back += answer["performance"]["throttle_wait_ms"] > 0
    assert kept_back
    wait_calm(server)
    assert data_of(api1, topic) == list(range(next(numbers)))


@pytest.mark.full
def test_patient_publishes_of_one_socket_keep_their_order(server: Server, api1: Client) -> None:
    topic = made(api1, fresh_on(SHARD))
    kept_back = 0
    numbers = itertools.count()
    with pressed(server, SHARD), Socket(server.port) as socket:
        for _ in range(10):
            wait_level(server, f"shard-{SHARD}", REFUSE)
            batch = [next(numbers) for _ in range(10)]
            for number in batch:
                records = [{"data": number}]
                socket.tell("publish", topic=topic, request_id=number, records=records, disable_backpressure=True)
            for number in batch:
                answer = json.loads(socket.receive_text(WITHIN_S))
                assert (answer["op"], answer["request_id"], answer["seqs"]) == ("ack", number, [number + 1]), answer
                kept_back += answer["performance"]["throttle_wait_ms"] > 0
    assert kept_back
    wait_calm(server)
    assert data_of(api1, topic) == list(range(next(numbers)))


def test_a_publish_is_refused_like_an_append(server: Server, api1: Client) -> None:
    topic = made(api1, fresh_on(SHARD))
    with pressed(server, SHARD), Socket(server.port) as socket:

        def refused() -> dict[str, Any] | None:
            socket.tell("publish", topic=topic, request_id=1, records=[{"data": 1}])
            answer: dict[str, Any] = json.loads(socket.receive_text(WITHIN_S))
            return answer if answer["op"] == "error" else None

        answer = eventually(refused, every_s=0.005)
        assert answer is not None
        assert answer["code"] == "throttled"
        assert 0 < answer["detail"]["retry_after_ms"] <= 5_000
        assert "limit" not in answer["detail"]
        socket.tell("ping", request_id=2)
        assert json.loads(socket.receive_text(WITHIN_S))["op"] == "pong", "the socket goes on"


@pytest.mark.full
def test_a_patient_write_waits_five_seconds_at_most(laggard: Server) -> None:
    """However long the pressure lasts: here a gateway's own, which speaks for all shards."""
    with laggard.client() as client, busy_gateway(laggard) as pressing:
        topics = [fresh_on(shard, stem="long") for shard in range(2)]
        for topic in topics:
            made(client, topic)
        wait_level(laggard, "gateway-0", REFUSE)
        for topic in topics:
            until_refused(lambda topic=topic: client.append(topic, "no"))  # type: ignore[misc]
        began = time.monotonic()
        answer = client.append(topics[0], "patient", disable_backpressure=True)
        took_ms = (time.monotonic() - began) * 1_000
        pressing.check()
        assert answer.status == 200, answer
        waited_ms = answer["performance"]["throttle_wait_ms"]
        assert 0 < waited_ms <= took_ms
        # The level may have fallen for a moment; if not, its time was up.
        assert waited_ms <= 2 * limits.PARK_MS, "it went on although nothing had changed"
    wait_calm(laggard)
    with laggard.client() as client:
        assert "patient" in data_of(client, topics[0])


def test_a_gateway_under_pressure_refuses_for_all_shards(laggard: Server, lane: Lane) -> None:
    wait_calm(laggard)
    with laggard.client(lane) as client:
        topics = [made(client, fresh_on(shard, stem=f"all-{lane}"), durability="ephemeral") for shard in range(2)]
        with busy_gateway(laggard):
            wait_level(laggard, "gateway-0", REFUSE)
            for topic in topics:
                until_refused(lambda topic=topic: client.append(topic, 1))  # type: ignore[misc]
                until_refused(lambda topic=topic: client.diff(topic))  # type: ignore[misc]
                assert client.state(topic).status == 200
                assert client.list(prefix=topic).status == 200
            assert client.get("/v0/health").status == 200


# --- coming down -------------------------------------------------------------------------------------


def test_it_falls_back_by_itself_and_the_gauge_says_so(server: Server, api: Client) -> None:
    topic = made(api, fresh_on(SHARD))
    with pressed(server, SHARD):
        eventually(lambda: gauges(server, "topics_process_pressure")[f"shard-{SHARD}"] >= DEFER, every_s=0.02)
        until_refused(lambda: api.append(topic, 1))
    wait_calm(server)
    assert not any(gauges(server, "topics_process_pressure").values())
    for answer in (api.append(topic, 2), api.diff(topic)):
        assert answer.status == 200, answer
    eventually(lambda: levels(server)[f"shard-{SHARD}"] == 0, what="calm")  # these two may have pressed it a little


def test_the_log_says_when_it_refuses_and_when_it_is_over(server: Server, api1: Client) -> None:
    """Not every step, and not all too often; but its last word is the truth."""

    def said() -> list[str]:
        lines = [line for line in server.output().splitlines() if f"process=shard-{SHARD} event=pressure " in line]
        return [field.removeprefix("step=") for line in lines for field in line.split() if field.startswith("step=")]

    with pressed(server, SHARD):
        eventually(lambda: "refuse" in said(), within_s=20)
    wait_calm(server)
    eventually(lambda: said()[-1] == "calm", within_s=20, what="a word that it is over")


@pytest.mark.full
def test_when_it_is_over_the_first_request_of_http2_is_taken(server: Server, api1: Client) -> None:
    """With nobody else around: a gateway must not go by what it saw when it was last awake."""
    topic = made(api1, fresh_on(SHARD), durability="memory")
    api1.close()
    with server.client("http2") as client:
        for _ in range(6):
            with pressed(server, SHARD, lane="http2"):
                until_refused(lambda: client.append(topic, "perhaps"))
            answer = client.append(topic, "at once")  # may be refused, and be the last thing that it sees
            if answer.status == 429:
                assert_throttled(answer)
            wait_calm(server)
            answer = client.append(topic, "now")
            assert answer.status == 200, answer


def test_patient_writes_by_http2_alone_go_on_when_it_is_over(server: Server, api1: Client) -> None:
    topic = made(api1, fresh_on(SHARD))
    api1.close()
    longest = 0.0
    with server.client("http2") as client:
        for _ in range(5):
            with pressed(server, SHARD, lane="http2"):
                wait_level(server, f"shard-{SHARD}", REFUSE)
            began = time.monotonic()
            answer = client.append(topic, 1, disable_backpressure=True)
            assert answer.status == 200, answer
            longest = max(longest, time.monotonic() - began)
    assert longest < 10, "the pressure ends a few hundred milliseconds after the load, more on a busy machine"


def test_a_shard_that_dies_under_pressure_comes_back_calm(server: Server, api1: Client) -> None:
    topic = made(api1, fresh_on(SHARD), durability="fsync")
    with server.client() as client:
        writer = http_writer("w", topic, client)
        while not writer.statuses[429]:
            with pressed(server, SHARD):
                for _ in range(30):
                    writer.step()
        threads = Threads()
        survivor = server.client()
        body = {"records": [{"data": "x" * 60_000}], "disable_backpressure": True}

        def press(client: Client) -> None:
            answer = client.send("POST", f"/v0/topics/{fill}", body)
            assert answer.status in (200, 503), answer

        fill = made(api1, fresh_on(SHARD), durability="fsync", cap_records=50)
        for _ in range(4):
            threads.start(server.client(), press)
        wait_level(server, f"shard-{SHARD}", REFUSE)
        before = server.pid_of(f"shard-{SHARD}")
        server.signal_child(f"shard-{SHARD}")
        threads.end()
        eventually(lambda: server.pids().get(f"shard-{SHARD}", before) != before, what="its next life")
        server.wait_ready()
        wait_calm(server)
        assert insist(lambda: survivor.append(topic, ["w", len(writer.acked)])).status == 200
        survivor.close()
    found = [record["data"][1] for record in read(api1, topic)]
    assert found == list(range(len(writer.acked) + 1))


# --- putting off -------------------------------------------------------------------------------------


def low_and_high(api: Client, stem: str) -> tuple[str, str]:
    low = made(api, fresh_on(SHARD, stem=f"{stem}-low"), priority=-1_000, durability="memory")
    high = made(api, fresh_on(SHARD, stem=f"{stem}-high"), priority=1_000, durability="memory")
    return low, high


def patiently(api: Client, topic: str, *data: object) -> None:
    answer = api.append(topic, *data, disable_backpressure=True)
    assert answer.status == 200, answer


@pytest.mark.parametrize("lane", LANES)
def test_a_stream_is_told_that_it_is_paced_and_gets_everything(server: Server, api1: Client, lane: Lane) -> None:
    low, high = low_and_high(api1, "sse")
    numbers = itertools.count()
    with Watching(server, lane) as watching:
        stream = watching.follow([low, high])
        stream.wait_caught_up(low, high)
        with pressed(server, SHARD):
            wait_level(server, f"shard-{SHARD}", DEFER)

            def told() -> bool:
                number = next(numbers)
                patiently(api1, low, number)
                patiently(api1, high, number)
                stream.wait_records(high, number + 1)
                return bool(stream.of("error"))

            eventually(told, within_s=20, every_s=0.05)
        written = next(numbers)
        wait_calm(server)
        assert stream.wait_records(low, written) == list(range(written))
        assert stream.wait_records(high, written) == list(range(written))
        for advice in stream.of("error"):
            assert advice.json.keys() == {"code", "error", "retry_after_ms", "topics"}
            assert (advice["code"], advice["retry_after_ms"], advice["topics"]) == (429, limits.PACE_RETRY_MS, [low])
        patiently(api1, low, "after")
        assert stream.wait_records(low, written + 1)[-1] == "after", "the stream goes on"


def test_a_socket_is_told_that_it_is_paced_and_gets_everything(server: Server, api1: Client) -> None:
    low, high = low_and_high(api1, "ws")
    numbers = itertools.count()
    got: dict[str, list[int]] = {low: [], high: []}
    advice: list[dict[str, Any]] = []
    with Socket(server.port) as socket:
        socket.settle(low)
        socket.settle(high)

        def listen(done: Callable[[], bool], within_s: float = WITHIN_S) -> None:
            deadline = time.monotonic() + within_s
            while not done():
                frame = json.loads(socket.receive_text(max(deadline - time.monotonic(), 0.01)))
                if frame["op"] == "record":
                    got[frame["topic"]] += [record["data"] for record in frame["records"]]
                elif frame["op"] == "error":
                    advice.append(frame)
                else:
                    assert frame["op"] == "caught_up", frame

        with pressed(server, SHARD):
            wait_level(server, f"shard-{SHARD}", DEFER)

            def told() -> bool:
                number = next(numbers)
                patiently(api1, low, number)
                patiently(api1, high, number)
                listen(lambda: len(got[high]) == number + 1)
                return bool(advice)

            eventually(told, within_s=20, every_s=0.05)
        written = next(numbers)
        wait_calm(server)
        listen(lambda: len(got[low]) >= written)
        assert got == {low: list(range(written)), high: list(range(written))}
        for frame in advice:
            assert frame.keys() == {"op", "code", "message", "retry_after_ms", "topics"}, frame
            assert (frame["code"], frame["retry_after_ms"]) == ("throttled", limits.PACE_RETRY_MS)
            assert frame["topics"] == [low]
            assert frame["message"]
        patiently(api1, low, -1)
        listen(lambda: got[low][-1] == -1)


@pytest.mark.full
def test_a_stream_is_told_once_in_five_seconds_at_most(server: Server, api1: Client) -> None:
    """Two topics that are put off, again and again, for longer than that; another stream has its own five seconds."""
    lows = [made(api1, fresh_on(SHARD, stem="often"), priority=-1_000, durability="memory") for _ in range(2)]
    numbers = itertools.count()
    told: list[float] = []
    with Watching(server) as watching:
        stream = watching.follow(lows)
        stream.wait_caught_up(*lows)
        with pressed(server, SHARD):
            until = time.monotonic() + 13
            while time.monotonic() < until:
                number = next(numbers)
                for low in lows:
                    patiently(api1, low, number)
                try:
                    frame = stream.frame(0.2)
                except Silence:
                    continue
                if frame.event == "error":
                    told.append(time.monotonic())
                    assert set(frame["topics"]) <= set(lows)
        written = next(numbers)
        wait_calm(server)
        for low in lows:
            assert stream.wait_records(low, written) == list(range(written))
    assert told
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    # Half of it, because a frame may wait until it is read: without the rule it would come with every write.
    assert all(gap > limits.PACE_FRAME_MS / 2_000 for gap in gaps), gaps


def test_high_priorities_are_delivered_before_low_ones(server: Server, api1: Client) -> None:
    """The low one is written first each time, and comes last as long as the pressure holds."""
    low, high = low_and_high(api1, "race")
    first: Counter[str] = Counter()
    rounds = 12
    with Watching(server) as watching:
        stream = watching.follow([low, high])
        stream.wait_caught_up(low, high)
        with pressed(server, SHARD):
            for number in range(rounds):
                wait_level(server, f"shard-{SHARD}", DEFER)
                seen = len(stream.frames)
                patiently(api1, low, number)
                patiently(api1, high, number)
                stream.wait_records(high, number + 1)
                held = levels(server)[f"shard-{SHARD}"] >= DEFER
                came = {frame["topic"] for frame in stream.frames[seen:] if frame.event == "record"}
                if held:
                    first["low" if low in came else "high"] += 1
        wait_calm(server)
        assert stream.wait_records(low, rounds) == list(range(rounds))
        assert stream.data(high) == list(range(rounds))
    assert first["high"] >= 3, first
    assert first["high"] > 2 * first["low"], first


@pytest.mark.full
def test_what_is_put_off_comes_after_ten_seconds_at_the_latest(server: Server, api1: Client) -> None:
    """Though the pressure never ends."""
    low, _ = low_and_high(api1, "aged")
    with Watching(server) as watching:
        stream = watching.follow(low)
        stream.wait_caught_up(low)
        with pressed(server, SHARD):
            wait_level(server, f"shard-{SHARD}", DEFER)
            patiently(api1, low, "old")
            assert stream.wait_records(low, 1) == ["old"]


# --- off ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_switched_off_nobody_is_ever_refused(tmp_path: Path) -> None:
    environ = {"TOPICS_PRESSURE_LAG_MS": 1, "TOPICS_PRESSURE_COMMIT_MS": 0.01, "TOPICS_ELASTIC": 0}
    with contextmanager(start)(tmp_path, **environ) as server, server.client() as api:
        topic = made(api, fresh_on(SHARD), durability="fsync")
        threads = Threads()
        writers = []
        for lane in LANES:
            client = server.client(lane)
            writer = http_writer(lane, topic, client)
            writers.append(writer)
            threads.start(client, lambda _, writer=writer: writer.step())  # type: ignore[misc]
        seen: set[tuple[str, int]] = set()

        def enough() -> bool:
            threads.check()
            seen.update(levels(server).items())
            return all(len(writer.acked) >= 100 for writer in writers)

        with pressed(server, SHARD), busy_gateway(server):
            eventually(enough, within_s=60)
        threads.end()
        assert {level for _, level in seen} == {0}, seen
        assert not any(gauges(server, "topics_process_pressure").values())
        for writer in writers:
            assert not writer.statuses[429]
            assert not any(writer.waits_ms)
        assert_all_there(api, topic, writers)
