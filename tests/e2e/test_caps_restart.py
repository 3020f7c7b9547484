"""Caps of the whole server while a part of it is away: what a dead or recovering shard holds still counts.

A shard that is away can not be asked, so what it holds is either remembered for it or waited for. Either way whoever
else writes meanwhile never gets more than the cap; and when all are back, nothing that was reserved by one that died
keeps a place: the server can be filled to exactly its cap again.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from topics.storage.format import RECORD_OVERHEAD

from .client import Answer, Client, Lost
from .racing import (
    BACK_S,
    Racers,
    append_request,
    assert_capped,
    fresh,
    fresh_on,
    insist,
    kill,
    kill_and_wait,
    live_bytes,
    names,
    put_request,
    still,
    until,
    wait_ready_everywhere,
    wire_to,
)
from .routing import put_router
from .server import Server, eventually
from .wire import Wire, request

pytestmark = [pytest.mark.e2e, pytest.mark.full]

GATEWAYS = 2
SHARDS = 3
TOPICS = 9
BYTES = 30_000
Start = Callable[..., Server]


@pytest.fixture
def start(start_server: Start) -> Iterator[Start]:
    """Servers with both caps, which show no fault. Standing still for a moment is no pressure."""
    servers: list[Server] = []

    def started(**environ: object) -> Server:
        given = {
            "TOPICS_GATEWAYS": GATEWAYS,
            "TOPICS_WAL_SHARDS": SHARDS,
            "TOPICS_MAX_TOPICS": TOPICS,
            "TOPICS_MAX_TOTAL_BYTES": BYTES,
            "TOPICS_ELASTIC": 0,
        }
        servers.append(start_server(**{**given, **environ}))
        if environ.get("ready", True):
            wait_ready_everywhere(servers[-1])
        return servers[-1]

    yield started
    for server in servers:
        assert "Traceback" not in server.output()


def text(size: int) -> str:
    """Data whose record counts for so many bytes."""
    return "x" * (size - RECORD_OVERHEAD - 2)


def fill_topics(api: Client) -> list[str]:
    """All places that are left, wherever; what was made for it."""
    made: list[str] = []
    while (answer := insist(lambda: api.put(fresh("fill")))).status != 429:
        assert answer.status == 201, answer
        made.append(answer["topic"])
    assert_capped(answer, "max_topics", TOPICS)
    return made


def assert_room(api: Client, topic: str, room: int) -> None:
    """So many bytes are left, and not one more; takes them, if a record can be so small."""
    if room >= RECORD_OVERHEAD + 3:
        assert_capped(insist(lambda: api.append(topic, text(room + 1))), "max_total_bytes", BYTES)
        assert insist(lambda: api.append(topic, text(room))).status == 200
    assert_capped(insist(lambda: api.append(topic, 1)), "max_total_bytes", BYTES)


def refused_or_away(answer: Answer, limit: str, most: int) -> None:
    """What may be said to who wants more than there is, while a shard is away."""
    if answer.status == 503:
        assert answer.error in ("shard_unavailable", "not_ready"), answer
    else:
        assert_capped(answer, limit, most)


# --- a shard that dies -------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, SHARDS - 1])
def test_the_topics_of_a_dead_shard_still_count(start: Start, victim: int) -> None:
    """While it is away, while it recovers, and after; one client per gateway tries all the time."""
    server = start()
    others = [shard for shard in range(SHARDS) if shard != victim]
    with server.client() as api, wire_to(server, "gateway-0") as zero, wire_to(server, "gateway-1") as one:
        made = {fresh_on(shard, SHARDS) for shard in [victim] * (TOPICS - 2) + others}
        for name in made:
            assert api.put(name).status == 201
        for _ in range(2):
            pid = server.pid_of(f"shard-{victim}")
            kill(server, f"shard-{victim}")
            back = False
            while not back:
                back = server.pid_of(f"shard-{victim}") != pid and _is_ready(server)
                for wire in (zero, one):
                    for raw in (
                        put_request(fresh_on(others[0], SHARDS)),
                        append_request(fresh_on(others[1], SHARDS), 1),
                    ):
                        refused_or_away(wire.ask(raw), "max_topics", TOPICS)
            assert names(api) == made
            for shard in range(SHARDS):
                assert_capped(api.put(fresh_on(shard, SHARDS)), "max_topics", TOPICS)
        gone = made.pop()
        assert insist(lambda: api.drop(gone))["deleted"] is True
        assert len(fill_topics(api)) == 1


def _is_ready(server: Server) -> bool:
    return all(line.state == "ready" for line in server.ps().processes)


@pytest.mark.parametrize("victim", [0, SHARDS - 1])
def test_the_bytes_of_a_dead_shard_still_count(start: Start, victim: int) -> None:
    server = start()
    topics = [fresh_on(shard, SHARDS) for shard in range(SHARDS)]
    others = [topic for shard, topic in enumerate(topics) if shard != victim]
    with server.client() as api, wire_to(server, "gateway-0") as zero, wire_to(server, "gateway-1") as one:
        for topic in topics:
            api.put(topic, durability="fsync")
        assert api.append(topics[victim], text(BYTES - 1_000)).status == 200
        for _ in range(2):
            pid = server.pid_of(f"shard-{victim}")
            kill(server, f"shard-{victim}")
            back = False
            while not back:
                back = server.pid_of(f"shard-{victim}") != pid and _is_ready(server)
                for wire, topic in zip((zero, one), others, strict=True):
                    refused_or_away(wire.ask(append_request(topic, text(1_001))), "max_total_bytes", BYTES)
            assert live_bytes(api) == BYTES - 1_000
        assert_room(api, others[0], 1_000)
        insist(lambda: api.drop(topics[victim]))
        assert_room(api, others[1], BYTES - 1_000)


def test_what_fits_is_let_in_while_a_shard_is_away(start: Start) -> None:
    """A dead shard stops nobody else: writes to topics that are there go on, and are not counted twice later."""
    server = start()
    topics = [fresh_on(shard, SHARDS) for shard in range(SHARDS)]
    with server.client() as api:
        for topic in topics:
            api.put(topic, durability="fsync")
        kill(server, "shard-1")
        assert insist(lambda: api.append(topics[0], text(1_000))).status == 200
        assert insist(lambda: api.append(topics[2], text(1_000))).status == 200
        wait_ready_everywhere(server)
        assert insist(lambda: api.append(topics[1], text(1_000))).status == 200
        assert live_bytes(api) == 3_000
        assert_room(api, topics[1], BYTES - 3_000)


def test_a_shard_that_dies_in_a_race_for_topics_leaves_nothing_behind(start: Start) -> None:
    """What it was making may be there or not, but what was answered is, and all places can be had afterwards."""
    server = start()
    with server.client() as api, Racers(server, 15) as racers:
        for number in range(4):
            before = names(api)
            for name in before:
                assert insist(lambda name=name: api.drop(name)).status == 200  # type: ignore[misc]
            wanted = [fresh_on(at % SHARDS, SHARDS) for at in range(15)]
            random.shuffle(wanted)
            victim = f"shard-{number % SHARDS}"
            with racers.sent([put_request(name) for name in wanted], hold=(None, "shard")[number % 2]):
                kill_and_wait(server, victim)
            answers = dict(zip(wanted, [wire.answer() for wire in racers.wires], strict=True))
            made = {name for name, answer in answers.items() if answer.status == 201}
            unknown = {name for name, answer in answers.items() if answer.status == 503}
            for name in answers.keys() - made:
                refused_or_away(answers[name], "max_topics", TOPICS)
            there = names(api)
            assert made <= there <= made | unknown
            assert len(there) <= TOPICS
            assert len(there) + len(fill_topics(api)) == TOPICS
            assert len(names(api)) == TOPICS


def test_a_shard_that_dies_in_a_race_for_bytes_leaves_nothing_behind(start: Start) -> None:
    server = start()
    topics = [fresh_on(shard, SHARDS) for shard in range(SHARDS)]
    classes = ("fsync", "disk", "memory")
    with server.client() as api, Racers(server, 15) as racers:
        for topic, durability in zip(topics, classes, strict=True):
            api.put(topic, durability=durability)
        for number in range(4):
            victim = f"shard-{number % SHARDS}"
            raw = [append_request(topics[at % SHARDS], text(4_000)) for at in range(15)]
            with racers.sent(raw, hold=(None, "shard")[number % 2]):
                kill_and_wait(server, victim)
            answers = [wire.answer() for wire in racers.wires]
            written = sum(answer.status == 200 for answer in answers)
            unknown = sum(answer.status == 503 for answer in answers)
            for answer in answers:
                if answer.status != 200:
                    refused_or_away(answer, "max_total_bytes", BYTES)
            there = live_bytes(api)
            assert written * 4_000 <= there <= min((written + unknown) * 4_000, BYTES)
            assert_room(api, topics[number % SHARDS], BYTES - there)
            for topic in topics:
                insist(lambda topic=topic: api.delete(topic, before_seq=10**9))  # type: ignore[misc]


@contextmanager
def full_of_copies(start: Start) -> Iterator[tuple[Server, str, str]]:
    """Half of the bytes in a topic of shard-0, the other half their copies on shard-1, which are in memory for now."""
    server = start()
    source, dest = fresh_on(0, SHARDS), fresh_on(1, SHARDS)
    with server.client() as api:
        assert put_router(api, "router", source, dest).status == 201
        for shard in range(SHARDS):
            api.put(f"{OTHERS[shard]}", durability="fsync")
        for number in range(1, 6):
            assert api.append(source, text(3_000)).status == 200
            eventually(lambda number=number: api.state(dest)["count"] == number)
        assert live_bytes(api) == BYTES
    yield server, source, dest


OTHERS = [fresh_on(shard, SHARDS, "other") for shard in range(SHARDS)]


def write_where_there_is_no_room(server: Server) -> int:
    """To every shard, for a while; how often it was let through."""
    written = 0
    with wire_to_whoever_is_there(server) as wire:
        for topic in OTHERS:  # its shard is there
            asked = request("GET", f"/v0/topics/{topic}")
            assert insist(lambda asked=asked: wire.ask(asked)).status == 200  # type: ignore[misc]
        for _ in until(0.5):
            for topic in OTHERS:
                answer = wire.ask(append_request(topic, text(1_000)))
                if answer.status == 200:
                    written += 1
                else:
                    refused_or_away(answer, "max_total_bytes", BYTES)
    return written


def assert_full_of_copies(server: Server, source: str, dest: str) -> None:
    wait_ready_everywhere(server)
    with server.client() as api:
        assert live_bytes(api) == BYTES
        assert (api.state(source)["count"], api.state(dest)["count"]) == (5, 5)
        for topic in OTHERS:
            assert_capped(api.append(topic, 1), "max_total_bytes", BYTES)


def test_copies_that_are_made_again_have_their_room(start: Start) -> None:
    """They are lost with their shard. Nobody gets the room that they need to come back: they would be too many then,
    or their topic would stay shut until somebody makes room. The router is slow, so that there is time to try."""
    with full_of_copies(start) as (server, source, dest):
        pid = server.pid_of("shard-1")
        with still(server, ["router"]):
            kill(server, "shard-1")
            eventually(lambda: server.pid_of("shard-1") != pid)
            eventually(lambda: {line.name: line.state for line in server.ps().processes}["shard-1"] == "ready")
            written = write_where_there_is_no_room(server)
        assert not written, f"{written} writes of 1000 bytes were let through"
        assert_full_of_copies(server, source, dest)


def test_copies_that_are_made_again_by_the_next_server_have_their_room(start: Start) -> None:
    """Likewise, where nobody is left who remembers how much there was."""
    with full_of_copies(start) as (server, source, dest):
        server.kill()
        again = start(data_dir=server.data_dir, ready=False, TOPICS_HEARTBEAT_MS=10_000)
        with slow_to_start(again, "router"):
            eventually(
                lambda: {line.state for line in again.ps().processes if line.name.startswith("shard")} == {"ready"}
            )
            written = write_where_there_is_no_room(again)
        assert not written, f"{written} writes of 1000 bytes were let through"
        assert_full_of_copies(again, source, dest)


def test_a_gateway_that_dies_in_a_race_leaves_nothing_behind(start: Start) -> None:
    """What it had asked for may have been done, but no place is lost with it."""
    server = start()
    with server.client() as api:
        for number in range(3):
            for name in names(api):
                assert insist(lambda name=name: api.drop(name)).status == 200  # type: ignore[misc]
            with Racers(server, 12) as racers:
                wanted = [fresh_on(at % SHARDS, SHARDS) for at in range(12)]
                with racers.sent([put_request(name) for name in wanted], hold="shard"):
                    kill_and_wait(server, f"gateway-{number % GATEWAYS}")
            (there,) = eventually(lambda: tried_names(api), within_s=BACK_S)
            assert len(there) <= TOPICS
            assert len(there) + len(fill_topics(api)) == TOPICS


def tried_names(api: Client) -> list[set[str]]:
    """All topics, or nothing: the connection may have been the dead gateway's."""
    try:
        return [names(api)]
    except Lost:
        return []


# --- a server that starts ----------------------------------------------------------------------------


HOLD = """
import os, time
_fdatasync = os.fdatasync
def fdatasync(fd):
    while os.path.exists({hold!r}) and {folder!r} in os.readlink(f"/proc/self/fd/{{fd}}"):
        time.sleep(0.01)
    _fdatasync(fd)
os.fdatasync = fdatasync
"""


@contextmanager
def held_in_recovery(start: Start, server: Server, shard: int) -> Iterator[Server]:
    """The next server on this folder. Until this is left, the shard waits for its first sync, which is before it says
    what it holds."""
    modules = server.log.parent / "held"
    modules.mkdir()
    hold = modules / "hold"
    hold.touch()
    (modules / "sitecustomize.py").write_text(HOLD.format(hold=str(hold), folder=f"/shard-{shard:02}/"))
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    again = start(data_dir=server.data_dir, ready=False, TOPICS_HEARTBEAT_MS=10_000, PYTHONPATH=path)
    try:
        yield again
    finally:
        hold.unlink()


@contextmanager
def slow_to_start(server: Server, name: str) -> Iterator[int]:
    """Stop this process of a server that is just starting."""
    pid = server.pid_of(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def wire_to_whoever_is_there(server: Server) -> Wire:
    """To a server that is starting. Its port is open before anybody is there to answer."""
    wire = Wire(server.port)
    wire.sock.settimeout(BACK_S)
    assert wire.ask(request("GET", "/v0/health")).status == 200
    return wire


@pytest.mark.parametrize(("ending", "slow"), [("stop", 0), ("kill", SHARDS - 1)])
def test_nothing_is_made_before_all_shards_have_said_what_they_hold(start: Start, ending: str, slow: int) -> None:
    """The one that is slow holds nearly everything; the others have room of their own, and do not use it."""
    server = start()
    holds = [fresh_on(slow, SHARDS) for _ in range(TOPICS)]
    other = (slow + 1) % SHARDS
    with server.client() as api:
        for name in holds:
            assert api.append(name, text(3_000)).status == 201
    server.stop() if ending == "stop" else server.kill()
    with held_in_recovery(start, server, slow) as again, wire_to_whoever_is_there(again) as wire:
        assert wire.ask(request("GET", "/v0/ready")).refusal == (503, "not_ready")
        statuses = set()
        for _ in until(1.0):
            for raw in (put_request(fresh_on(other, SHARDS)), append_request(fresh_on(other, SHARDS), 1)):
                answer = wire.ask(raw)
                assert answer.status == 503, answer
                assert answer.error in ("not_ready", "shard_unavailable"), answer
                statuses.add(answer.error)
        assert "not_ready" in statuses
    wait_ready_everywhere(again)
    with again.client() as api:
        assert names(api) == set(holds)
        for shard in range(SHARDS):
            assert_capped(api.put(fresh_on(shard, SHARDS)), "max_topics", TOPICS)
        api.drop(holds[0])
        assert api.put(fresh_on(other, SHARDS)).status == 201
        assert_capped(api.put(fresh_on(other, SHARDS)), "max_topics", TOPICS)


def test_a_shard_that_dies_before_it_has_said_what_it_holds_still_makes_others_wait(start: Start) -> None:
    """Killed while it recovers, at the start of the server; between its two lives nobody knows what it holds."""
    server = start()
    holds = [fresh_on(1, SHARDS) for _ in range(TOPICS)]
    with server.client() as api:
        for name in holds:
            assert api.append(name, text(3_000)).status == 201
    server.kill()
    with ExitStack() as stack:
        with held_in_recovery(start, server, 1) as again:
            wire = stack.enter_context(wire_to_whoever_is_there(again))
            for _ in range(2):
                before = pid = again.pid_of("shard-1")
                os.kill(pid, signal.SIGKILL)
                while (pid := again.pids().get("shard-1", before)) == before:
                    for raw in (put_request(fresh_on(0, SHARDS)), append_request(fresh_on(2, SHARDS), text(3_001))):
                        answer = wire.ask(raw)
                        assert answer.status == 503, answer
        while not _is_ready(again):
            refused_or_away(wire.ask(put_request(fresh_on(0, SHARDS))), "max_topics", TOPICS)
    wait_ready_everywhere(again)
    with again.client() as api:
        assert names(api) == set(holds)
        assert_capped(api.put(fresh_on(0, SHARDS)), "max_topics", TOPICS)


def test_no_bytes_are_written_beyond_the_cap_before_all_shards_have_said_what_they_hold(start: Start) -> None:
    """A topic that is there is of a shard that is ready; the quota is not its alone."""
    server = start()
    heavy, light = fresh_on(0, SHARDS), fresh_on(1, SHARDS)
    with server.client() as api:
        api.put(heavy, durability="fsync")
        api.put(light, durability="fsync")
        assert api.append(heavy, text(BYTES - 1_000)).status == 200
    server.kill()
    with held_in_recovery(start, server, 0) as again, wire_to_whoever_is_there(again) as wire:
        for _ in until(1.0):
            answer = wire.ask(append_request(light, text(1_001)))
            if answer.status == 200:
                break  # it counts below
            refused_or_away(answer, "max_total_bytes", BYTES)
    wait_ready_everywhere(again)
    with again.client() as api:
        assert live_bytes(api) <= BYTES, "more than there may be"
        assert_room(api, light, 1_000)


@pytest.mark.gate
def test_what_was_there_before_a_restart_counts(start: Start) -> None:
    server = start()
    topics = [fresh_on(at % SHARDS, SHARDS) for at in range(TOPICS - 1)]
    with server.client() as api:
        for topic in topics:
            api.put(topic, durability="fsync")
            assert api.append(topic, text(3_000)).status == 200
    server.stop()
    server = start(data_dir=server.data_dir)
    server.kill()
    server = start(data_dir=server.data_dir)
    with server.client() as api:
        assert live_bytes(api) == 3_000 * len(topics)
        assert len(fill_topics(api)) == 1
        assert_room(api, topics[0], BYTES - 3_000 * len(topics))


def test_a_smaller_cap_takes_nothing_away(start: Start) -> None:
    """What is there stays, can be changed and read; nothing new is made until there is room again."""
    server = start()
    topics = [fresh_on(at % SHARDS, SHARDS) for at in range(TOPICS)]
    with server.client() as api:
        for topic in topics:
            assert api.append(topic, text(2_000)).status == 201
    server.stop()
    server = start(data_dir=server.data_dir, TOPICS_MAX_TOPICS=4, TOPICS_MAX_TOTAL_BYTES=9_000)
    with server.client() as api:
        assert names(api) == set(topics)
        for topic in topics:
            assert api.put(topic, ttl_ms=10**9).status == 200
            assert api.diff(topic).data == [text(2_000)]
            assert_capped(api.append(topic, 1), "max_total_bytes", 9_000)
        for left in range(TOPICS - 1, 3, -1):
            assert_capped(api.put(fresh()), "max_topics", 4)
            assert api.drop(topics.pop())["deleted"] is True
            assert len(names(api)) == left
        assert_capped(api.put(fresh()), "max_topics", 4)
        api.drop(topics.pop())
        assert api.put(fresh()).status == 201
        assert_capped(api.put(fresh()), "max_topics", 4)
        assert api.append(topics[0], text(3_000)).status == 200
        assert_capped(api.append(topics[0], 1), "max_total_bytes", 9_000)
    server.stop()
    server = start(data_dir=server.data_dir, TOPICS_MAX_TOPICS=0, TOPICS_MAX_TOTAL_BYTES=0)
    with server.client() as api:
        for _ in range(20):
            assert api.append(fresh(), text(5_000)).status == 201


def test_another_number_of_shards_counts_the_same(start: Start) -> None:
    server = start()
    with server.client() as api:
        for _ in range(TOPICS):
            assert api.append(fresh(), text(3_000)).status == 201
        before = names(api)
    for shards in (1, 4):
        server.stop()
        server = start(data_dir=server.data_dir, TOPICS_WAL_SHARDS=shards)
        with server.client() as api:
            assert names(api) == before
            assert live_bytes(api) == TOPICS * 3_000
            for shard in range(shards):
                assert_capped(api.put(fresh_on(shard, shards)), "max_topics", TOPICS)
            assert_capped(api.append(min(before), text(BYTES - TOPICS * 3_000 + 1)), "max_total_bytes", BYTES)


# --- sessions and streams whose keeper dies ----------------------------------------------------------


def test_streams_are_not_let_in_before_all_gateways_have_said_what_they_hold(start: Start) -> None:
    """shard-0 keeps count of them. Started again it knows nothing, and the gateway that has them all is slow."""
    most = 3
    server = start(TOPICS_MAX_SSE_CONNECTIONS=most)
    with server.client() as api:
        api.put("queue", type="queue")
    asked = request("GET", "/v0/topics/queue/work?node=w", headers=("Accept: text/event-stream",))
    open_wires = [wire_to(server, "gateway-1") for _ in range(most)]
    with wire_to(server, "gateway-0") as late:
        for wire in open_wires:
            wire.send(asked)
            assert wire.head()[0] == 200
        assert_capped(late.ask(asked), "max_sse_connections", most)
        pid = server.pid_of("shard-0")
        with still(server, ["gateway-1"]):
            kill(server, "shard-0")
            eventually(lambda: server.pid_of("shard-0") != pid)
            eventually(lambda: {line.name: line.state for line in server.ps().processes}["shard-0"] == "ready")
            for _ in until(0.8):
                late.send(asked)
                status, headers = late.head()
                assert status != 200, "one more than there may be"
                refused_or_away(
                    Answer(status=status, headers=headers, raw=late.body(headers)), "max_sse_connections", most
                )
        wait_ready_everywhere(server)
        eventually(lambda: late.ask(asked).status == 429)
        assert_capped(late.ask(asked), "max_sse_connections", most)
    for wire in open_wires:
        wire.close()


def test_sessions_are_not_made_before_all_gateways_have_said_what_they_hold(start: Start) -> None:
    most = 3
    server = start(TOPICS_MAX_WATCH_SESSIONS=most)
    with server.client() as api:
        api.put("topic")
    asked = request("POST", "/v0/watch", b'{"topics":{"topic":{}}}')
    with wire_to(server, "gateway-0") as late, wire_to(server, "gateway-1") as early:
        for _ in range(most):
            assert early.ask(asked).status == 200
        assert_capped(late.ask(asked), "max_watch_sessions", most)
        pid = server.pid_of("shard-0")
        with still(server, ["gateway-1"]):
            kill(server, "shard-0")
            eventually(lambda: server.pid_of("shard-0") != pid)
            eventually(lambda: {line.name: line.state for line in server.ps().processes}["shard-0"] == "ready")
            for _ in until(0.8):
                answer = late.ask(asked)
                assert answer.status != 200, "one more than there may be"
                refused_or_away(answer, "max_watch_sessions", most)
        wait_ready_everywhere(server)
        for wire in (late, early):
            assert_capped(insist(lambda wire=wire: wire.ask(asked)), "max_watch_sessions", most)  # type: ignore[misc]
