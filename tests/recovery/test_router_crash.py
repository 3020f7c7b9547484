"""Processes die while routers copy: nothing is missing at a destination, nothing is there twice, the source's order
holds, and a seq that was seen keeps its meaning."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator

import pytest
from crash_folder import newest_snapshot
from crash_routers import Reader, Watcher, World, Writer, name_on
from crash_server import EXHAUSTIVE, SMALL, NoAnswer, Server, eventually

from topics.shm.counters import State

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 180)]

Start = Callable[..., Server]
GUARANTEES = ("at_least_once", "exactly_once")


# --- under load --------------------------------------------------------------------------------------


@pytest.mark.gate
def test_one_process_after_another_dies(serve: Start, seed: int) -> None:
    """The router, the shard of the source, the shards of the destinations: writers, readers and streams go on."""
    rng = random.Random(seed)
    world = World(serve)
    source = name_on(0, "source")
    dests = {name_on(shard, f"{guarantee}-{shard}"): guarantee for shard in (0, 1) for guarantee in GUARANTEES}
    behind = name_on(0, "behind")
    for dest, guarantee in dests.items():
        world.route(source, dest, guarantee=guarantee)
    world.route(name_on(1, "exactly_once-1"), behind)
    topics = [*dests, behind]
    readers = [Reader(world, topic, seed=rng.randrange(1 << 30)) for topic in topics]
    watchers = [Watcher(world, topic) for topic in (*list(dests)[1:3], behind)]
    writers = [Writer(world, source, f"w{at}", seed=rng.randrange(1 << 30)) for at in range(2)]
    for victim in ("router", "shard-1", "shard-0") * (4 if EXHAUSTIVE else 1):
        for writer in writers:
            writer.wait_sent(rng.randint(100, 300))
        world.kill_process(victim)
    for writer in writers:
        writer.wait_sent(100)
        writer.finish()
    expected = world.data(source)
    assert len(expected) == sum(writer.sent for writer in writers)
    for topic in topics:
        world.wait_data(topic, expected)
        assert list(world.seqs(topic)) == list(range(1, len(expected) + 1)), "no seq was left out"
    for reader in readers:
        reader.wait_got(expected)
    for watcher in watchers:
        watcher.wait_got(expected)
    world.wait_forwarded(dict.fromkeys(world.routers(), len(expected)))


@pytest.mark.parametrize(
    ("env", "rounds"),
    [({}, 10 if EXHAUSTIVE else 1), (SMALL, 20 if EXHAUSTIVE else 2)],
    ids=["defaults", "small-files"],
)
def test_the_whole_tree_dies(serve: Start, seed: int, env: dict[str, str], rounds: int) -> None:
    rng = random.Random(seed)
    world = World(serve, env=env)
    source = name_on(1, "source")
    dests = [name_on(0, "other"), name_on(1, "same"), name_on(0, "fsync"), name_on(1, "memory")]
    for at, (dest, kind) in enumerate(zip(dests, ("disk", "disk", "fsync", "memory"), strict=True)):
        assert world.client.put(dest, durability=kind).ok
        world.route(source, dest, guarantee=GUARANTEES[at % 2])
    readers = [Reader(world, dest, seed=rng.randrange(1 << 30)) for dest in dests]
    writers = [Writer(world, source, f"w{at}", seed=rng.randrange(1 << 30)) for at in range(2)]
    for _ in range(rounds):
        for writer in writers:
            writer.wait_sent(rng.randint(50, 600))
        time.sleep(rng.random() * 0.05)
        world.restart("kill")
    for writer in writers:
        writer.wait_sent(50)
        writer.finish()
    expected = world.data(source)
    assert len(expected) == sum(writer.sent for writer in writers)
    for dest in dests:
        world.wait_data(dest, expected)
    for reader in readers:
        reader.wait_got(expected)


def test_a_mirror_in_which_processes_die(serve: Start, seed: int) -> None:
    """Both sides are written to: every record is on both exactly once, and each side's order holds on the other."""
    rng = random.Random(seed)
    world = World(serve)
    sides = [name_on(0, "left"), name_on(1, "right")]
    for source, dest in (sides, reversed(sides)):
        world.route(source, dest, allow_cycle=True, guarantee=rng.choice(GUARANTEES))
    readers = [Reader(world, side, seed=rng.randrange(1 << 30)) for side in sides]
    writers = [Writer(world, side, side, seed=rng.randrange(1 << 30), most=4) for side in sides]
    for victim in ("shard-1", "tree", "router") * (4 if EXHAUSTIVE else 1):
        for writer in writers:
            writer.wait_sent(rng.randint(50, 200))
        if victim == "tree":
            world.restart("kill")
        else:
            world.kill_process(victim)
    for writer in writers:
        writer.wait_sent(50)
        writer.finish()
    expected = sorted([writer.label, number] for writer in writers for number in range(writer.sent))
    for side in sides:
        eventually(lambda side=side: world.state(side)["count"] >= len(expected), what=f"everything in {side}")
        found = [each for each in world.data(side) if isinstance(each, list)]
        assert sorted(found) == expected, f"{side}: {len(found)} of {len(expected)}"
        for writer in writers:
            assert [number for label, number in found if label == writer.label] == list(range(writer.sent))
    for reader in readers:
        reader.finish()  # a seq meant the same all the time


# --- at every boundary -------------------------------------------------------------------------------

# Where the destination's shard dies.
POINTS = ["forward:3", "forwarded:4", "flushed:1", "snapshot:1"]
MORE_POINTS = ["forward:1", "forward:9", "forwarded:1", "forwarded:10", "publish:1", "publish:5", "flushed:2"]
MORE_POINTS += ["flushed:3", "rename:1", "rename:2", "renamed:1", "renamed:2", "snapshot:2"]


def append_until_a_death(server: Server, sent: list[int], *, batches: int) -> None:
    client = server.client()
    for _ in range(batches):
        if server.deaths():
            return
        try:
            batch = list(range(len(sent), len(sent) + 1 + len(sent) % 7))
            if client.append("source", *batch, idempotency_key=f"k{len(sent)}").ok:
                sent += batch
        except NoAnswer:
            client = server.client()
        time.sleep(0.005)


def test_dying_at_one_boundary_after_another(serve: Start, seed: int) -> None:
    """Source and destination in one shard, on one folder; one life to die in, the next one has to cope."""
    rng = random.Random(seed)
    points = POINTS + (MORE_POINTS if EXHAUSTIVE else [])
    rng.shuffle(points)
    world = World(serve, shards=1, env=SMALL)
    for guarantee in GUARANTEES:
        world.route("source", guarantee, guarantee=guarantee)
    readers = [Reader(world, guarantee, seed=rng.randrange(1 << 30), pause_s=0.05) for guarantee in GUARANTEES]
    world.server.kill()
    sent: list[int] = []
    for point in points:
        world.server = serve(shards=1, env={**SMALL, "TOPICS_KILL_POINT": point}, wait=False)
        eventually(lambda: world.server.deaths() or world.server.state("shard-0") is State.READY, what="a start")
        for _ in range(10):
            append_until_a_death(world.server, sent, batches=40)
            with contextlib.suppress(AssertionError):  # in the quiet after load the mover does its part
                eventually(world.server.deaths, within_s=4)
                break
        assert world.server.deaths(), f"nobody came by {point}\n{world.server.log()}"
        world.server.kill()
    world.server = serve(shards=1, env=SMALL)
    world.client = world.new_client()
    expected = world.data("source")
    assert expected[: len(sent)] == sent
    for guarantee, reader in zip(GUARANTEES, readers, strict=True):
        world.wait_data(guarantee, expected)
        reader.wait_got(expected)


# --- clean restarts, other shard counts --------------------------------------------------------------


def test_restarts_and_other_shard_counts(serve: Start) -> None:
    """Rules, positions, totals and seqs go with the topics, however they are spread."""
    world = World(serve, env=SMALL)
    routes = [("s", "a"), ("s", "b"), ("a", "c"), ("m", "n"), ("n", "m")]
    for at, (source, dest) in enumerate(routes):
        world.route(source, dest, guarantee=GUARANTEES[at % 2], allow_cycle=source in "mn")
    readers = [Reader(world, topic) for topic in "abc"]
    written = 0
    for end, shards in (("kill", 3), ("stop", 1), ("kill", 2)):
        for _ in range(6):
            for topic in "sm":
                assert world.client.append(topic, *range(written, written + 10)).ok
            written += 10
        if end == "stop":  # and otherwise at any moment
            for topic in "abcn":
                world.wait_data(topic, range(written))
        world.restart(end, shards=shards)
        assert set(world.routers()) == {f"{source}->{dest}" for source, dest in routes}
        for topic in "abcn":
            world.wait_data(topic, range(written))
        assert world.data("m") == list(range(written))
        world.wait_forwarded({"s->a": written, "s->b": written, "a->c": written, "m->n": written, "n->m": 0})
    for reader in readers:
        reader.wait_got(list(range(written)))


@pytest.mark.gate
def test_copies_in_memory_go_with_their_topic_to_another_shard(serve: Start) -> None:
    """Killed, and started with other shard counts: copies that no segment holds yet, records of clients among them, and
    what was deleted are as they were. Twice, because the second move finds what the first one logged again."""
    world = World(serve)
    world.route("s", "d")
    tagged(world, "s", *range(4))
    world.wait_data("d", range(4))
    assert world.client.append("d", "direct").ok
    tagged(world, "s", *range(4, 8))
    world.wait_data("d", [*range(4), "direct", *range(4, 8)])
    assert world.client.delete("d", match="2").ok
    assert world.client.delete("d", match="5").ok
    before = world.read("d")
    for shards in (3, 1):
        world.restart("kill", shards=shards)
        assert world.read("d") == before, "times too"
    tagged(world, "s", 8)
    world.wait_data("d", [0, 1, 3, "direct", 4, 6, 7, 8])
    assert world.state("d")["head_seq"] == 10


def test_a_clean_restart_copies_nothing_again(serve: Start) -> None:
    world = World(serve, shards=1)
    world.route("s", "d")
    for number in range(50):
        assert world.client.append("s", number).ok
    world.wait_data("d", range(50))
    before = world.read("d")
    world.restart("stop")
    assert world.read("d") == before, "times too: they are the same records"
    snapshot = newest_snapshot(world.server.data_dir)
    assert snapshot is not None
    (pipe,) = [topic.pipe for topic in snapshot[1] if topic.name == "d"]
    assert pipe is not None
    assert (pipe.at, pipe.forwarded) == (50, {"s->d": 50})


# --- stories of one kill -----------------------------------------------------------------------------

Story = Generator[None, None, None]
_stories: dict[str, Callable[[World, str], Story]] = {}


def story(start: Callable[[World, str], Story]) -> Callable[[World, str], Story]:
    """Told with all others around the same kill: up to its yield within a second, so that copies are in memory."""
    _stories[start.__name__] = start
    return start


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, BaseException | None], None, None]:
    folder = tmp_path_factory.mktemp("stories")
    servers: list[Server] = []

    def start(**how: object) -> Server:
        servers.append(Server(folder / "data", **how))  # type: ignore[arg-type]
        return servers[-1].wait_ready()

    outcome: dict[str, BaseException | None] = {}
    running: dict[str, Story] = {}
    world = World(start)
    try:
        for name, begin in _stories.items():
            running[name] = begin(world, name)
            _advance(name, running, outcome)
        world.restart("kill")
        for name in list(running):
            _advance(name, running, outcome)
        yield outcome
    finally:
        for server in servers:
            server.close()


def _advance(name: str, running: dict[str, Story], outcome: dict[str, BaseException | None]) -> None:
    try:
        next(running[name])
    except StopIteration:
        running.pop(name)
        outcome[name] = None
    except BaseException as error:
        running.pop(name)
        outcome[name] = error


def wait_for(world: World, topic: str, data: object) -> None:
    eventually(lambda: data in world.data(topic), what=f"{data} in {topic}")


def tagged(world: World, topic: str, *numbers: int) -> None:
    """Records whose tag is their number."""
    body = {"records": [{"data": number, "tag": str(number)} for number in numbers]}
    assert world.client.call("POST", f"/v0/topics/{topic}", body).ok


def check_meanings(world: World, topic: str, before: dict[int, object]) -> None:
    """Seqs that were seen mean what they meant, or nothing."""
    for seq, data in world.seqs(topic).items():
        assert before.get(seq, data) == data, f"{topic}: seq {seq} was {before[seq]} and is {data}"


def check_kept(world: World, topic: str, before: dict[int, object], *, deleted: set[object], head: int) -> None:
    """Everything is where it was, but for copies whose source deleted them: those are there, if they were in a segment
    when the kill came, as on a busy machine, or are told as lost. And no seq was skipped."""
    found = world.seqs(topic)
    assert world.state(topic)["head_seq"] == head
    assert found.items() <= before.items()
    gone = {seq: data for seq, data in before.items() if seq not in found}
    assert set(gone.values()) in (set(), deleted & set(before.values()))
    told = [record for record in world.read(topic) if "gap_from" in record]
    assert {seq for seq in gone if any(gap["gap_from"] <= seq <= gap["gap_to"] for gap in told)} == set(gone)
    assert {gap["reason"] for gap in told} <= {"source_trim"}


@story
def copies_come_back_where_they_were(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d)
    tagged(world, s, *range(5))
    world.wait_data(d, range(5))
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    tagged(world, s, 5)
    world.wait_data(d, range(6))
    assert max(world.seqs(d)) == 6


@story
def deleted_copies_stay_deleted(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d)
    tagged(world, s, *range(6))
    world.wait_data(d, range(6))
    assert world.client.delete(d, match="3").ok
    assert world.client.delete(d, before_seq=2).ok
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    tagged(world, s, 6)
    world.wait_data(d, [1, 2, 4, 5, 6])


@story
def all_copies_deleted(world: World, name: str) -> Story:
    """As a quick worker leaves a queue: nothing is there, but its seqs were given out."""
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(d, type="queue").ok
    world.route(s, d)
    tagged(world, s, *range(5))
    world.wait_data(d, range(5))
    assert world.client.delete(d, before_seq=6).ok
    yield
    assert world.data(d) == []
    assert world.state(d)["head_seq"] >= 5
    assert world.client.diff(d, 5).body["tombstone"] is None
    tagged(world, s, 5)
    world.wait_data(d, [5])
    assert min(world.seqs(d)) >= 6


@story
def all_copies_deleted_and_a_snapshot(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d)
    tagged(world, s, *range(5))
    world.wait_data(d, range(5))
    assert world.client.delete(d, before_seq=6).ok
    world.route(s, d, f"{name}.2", filter=["tag", "Eq", "none"])  # a change of rules writes one
    yield
    assert world.state(d)["head_seq"] >= 5
    assert world.client.diff(d, 5).body["tombstone"] is None
    tagged(world, s, 5)
    world.wait_data(d, [5])
    assert min(world.seqs(d)) >= 6


@story
def the_source_deleted_what_was_copied(world: World, name: str) -> Story:
    """What the source has no more is told as lost; all else is where it was."""
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(s, durability="fsync").ok
    assert world.client.put(d, durability="fsync").ok
    world.route(s, d)
    tagged(world, s, *range(5))
    world.wait_data(d, range(5))
    before = world.seqs(d)
    assert world.client.delete(s, before_seq=3).ok
    yield
    check_kept(world, d, before, deleted={0, 1}, head=5)
    tagged(world, s, 5)
    wait_for(world, d, 5)
    assert world.seqs(d)[6] == 5


@story
def the_source_deleted_everything(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d)
    tagged(world, s, *range(5))
    world.wait_data(d, range(5))
    before = world.seqs(d)
    assert world.client.delete(s, before_seq=6).ok
    yield
    check_kept(world, d, before, deleted={0, 1, 2, 3, 4}, head=5)
    tagged(world, s, 5)
    wait_for(world, d, 5)
    assert world.seqs(d)[6] == 5


@story
def deletes_on_both_sides(world: World, name: str) -> Story:
    """What was deleted at the destination does not come back because the source deleted something else."""
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d)
    tagged(world, s, *range(5))
    world.wait_data(d, range(5))
    assert world.client.delete(d, match="1").ok
    before = world.seqs(d)
    assert world.client.delete(s, match="3").ok
    yield
    check_kept(world, d, before, deleted={3}, head=5)
    tagged(world, s, 5)
    wait_for(world, d, 5)
    assert world.seqs(d)[6] == 5


@story
def the_source_deleted_what_was_copied_before_a_direct_record(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(d, durability="fsync").ok
    world.route(s, d)
    tagged(world, s, *range(5))
    world.wait_data(d, range(5))
    assert world.client.append(d, "direct").ok
    before = world.seqs(d)
    assert world.client.delete(s, before_seq=4).ok
    yield
    check_kept(world, d, before, deleted={0, 1, 2}, head=6)
    assert world.seqs(d)[6] == "direct"


@story
def two_hops_and_a_direct_record(world: World, name: str) -> Story:
    """The second hop knows what it has copied by the seqs of the first: they are the same."""
    a, b, c = f"{name}-a", f"{name}-b", f"{name}-c"
    world.route(a, b, guarantee="exactly_once")
    world.route(b, c, guarantee="exactly_once")
    tagged(world, a, *range(3))
    world.wait_data(c, range(3))
    assert world.client.append(b, "direct").ok
    tagged(world, a, *range(3, 6))
    world.wait_data(c, [0, 1, 2, "direct", 3, 4, 5])
    before = {topic: world.seqs(topic) for topic in (b, c)}
    yield
    for topic in (b, c):
        assert world.seqs(topic) == before[topic]
    tagged(world, a, 6)
    world.wait_data(c, [0, 1, 2, "direct", 3, 4, 5, 6])
    assert world.state(c)["head_seq"] == 8


@story
def a_direct_record_between_copies(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d)
    tagged(world, s, *range(3))
    world.wait_data(d, range(3))
    assert world.client.append(d, "direct").ok
    tagged(world, s, *range(3, 6))
    world.wait_data(d, [0, 1, 2, "direct", 3, 4, 5])
    assert world.client.delete(d, match="1").ok
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    tagged(world, s, 6)
    world.wait_data(d, [0, 2, "direct", 3, 4, 5, 6])
    assert world.state(d)["head_seq"] == 8


@story
def a_direct_record_that_was_deleted(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d)
    tagged(world, s, *range(3))
    world.wait_data(d, range(3))
    assert world.client.call("POST", f"/v0/topics/{d}", {"records": [{"data": "direct", "tag": "direct"}]}).ok
    tagged(world, s, *range(3, 6))
    world.wait_data(d, [0, 1, 2, "direct", 3, 4, 5])
    assert world.client.delete(d, match="direct").ok
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    tagged(world, s, 6)
    world.wait_data(d, [0, 1, 2, 3, 4, 5, 6])
    assert world.state(d)["head_seq"] == 8


@story
def a_destination_with_a_cap(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(d, cap_records=3).ok
    world.route(s, d)
    tagged(world, s, *range(10))
    world.wait_data(d, ["cap", 7, 8, 9])
    before = world.read(d)
    yield
    assert [record.get("$seq") for record in world.read(d)] == [record.get("$seq") for record in before]
    tagged(world, s, 10)
    world.wait_data(d, ["cap", 8, 9, 10])


@story
def a_cap_and_deletes(world: World, name: str) -> Story:
    """What was deleted took no room when the rest was kept."""
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(d, cap_records=3).ok
    world.route(s, d)
    tagged(world, s, 0, 1, 2)
    world.wait_data(d, range(3))
    assert world.client.delete(d, match="1").ok
    tagged(world, s, 3)
    world.wait_data(d, [0, 2, 3])
    before = world.seqs(d)
    yield
    world.wait_data(d, [0, 2, 3])
    assert world.seqs(d) == before


@story
def one_of_two_copies_deleted(world: World, name: str) -> Story:
    """Two routers copied the record; a delete took the one that has kept its tag."""
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d, f"{name}.1")
    world.route(s, d, f"{name}.2", preserve_tag=False)
    tagged(world, s, 1, 2)
    world.wait_data(d, [1, 1, 2, 2])
    assert world.client.delete(d, match="1").ok
    world.wait_data(d, [1, 2, 2])
    before = world.seqs(d)
    yield
    world.wait_data(d, [1, 2, 2])
    assert world.seqs(d) == before


@story
def a_destination_that_rejects(world: World, name: str) -> Story:
    """Full when the process died, after some had been taken from it."""
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(d, cap_records=3, discard="reject").ok
    world.route(s, d)
    for number in range(10):
        tagged(world, s, number)
    world.wait_data(d, range(3))
    assert world.client.delete(d, before_seq=3).ok
    world.wait_data(d, [2, 3, 4])
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    for start in (2, 5, 8):
        expected = list(range(start, min(start + 3, 10)))
        world.wait_data(d, expected)
        assert world.client.delete(d, before_seq=max(world.seqs(d)) + 1).ok
    assert world.data(d) == []


@story
def a_rejecting_destination_full_of_one_large_batch(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(d, cap_records=4, discard="reject").ok
    world.route(s, d)
    tagged(world, s, *range(30))
    world.wait_data(d, range(4))
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    assert world.client.delete(d, before_seq=sorted(world.seqs(d))[2]).ok
    world.wait_data(d, [2, 3, 4, 5])


@story
def a_mirror_at_rest(world: World, name: str) -> Story:
    """Nobody has written anything: nobody waits for anybody."""
    a, b = f"{name}-a", f"{name}-b"
    world.route(a, b, allow_cycle=True)
    world.route(b, a, allow_cycle=True)
    yield
    tagged(world, a, 1)
    world.wait_data(b, [1])
    tagged(world, b, 2)
    world.wait_data(a, [1, 2])
    world.wait_data(b, [1, 2])


@story
def a_ring_with_records(world: World, name: str) -> Story:
    topics = [f"{name}-{at}" for at in range(3)]
    for at in range(3):
        world.route(topics[at], topics[(at + 1) % 3], allow_cycle=True)
    tagged(world, topics[0], 1, 2)
    for topic in topics:
        world.wait_data(topic, [1, 2])
    tagged(world, topics[1], 3, 4)
    for topic in topics:
        world.wait_data(topic, [1, 2, 3, 4])
    before = {topic: world.seqs(topic) for topic in topics}
    yield
    for topic in topics:
        assert world.seqs(topic) == before[topic]
    tagged(world, topics[2], 5)
    for topic in topics:
        wait_for(world, topic, 5)
    tagged(world, topics[1], 6)
    for topic in topics:
        world.wait_data(topic, [1, 2, 3, 4, 5, 6])
        assert world.state(topic)["head_seq"] == 6


@story
def an_ephemeral_destination(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(d, durability="ephemeral").ok
    world.route(s, d)
    tagged(world, s, *range(3))
    world.wait_data(d, range(3))
    before = world.seqs(d)
    yield
    tagged(world, s, 3)
    wait_for(world, d, 3)
    check_meanings(world, d, before)
    numbers = [number for number in world.data(d) if isinstance(number, int)]
    assert numbers == sorted(set(numbers)), "in order and not twice"


@story
def an_ephemeral_source(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(s, durability="ephemeral").ok
    world.route(s, d)
    tagged(world, s, *range(3))
    world.wait_data(d, range(3))
    before = world.seqs(d)
    yield
    assert world.state(d)["head_seq"] >= 3
    tagged(world, s, 3)
    wait_for(world, d, 3)
    check_meanings(world, d, before)
    assert "source_trim" in world.data(d) or world.data(d) == [0, 1, 2, 3], "never a silent loss"


@story
def several_routers_of_one_pair(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d, f"{name}.1")
    tagged(world, s, 0)
    world.wait_data(d, [0])
    world.route(s, d, f"{name}.2", filter=["tag", "Glob", "1*"], guarantee="exactly_once")
    tagged(world, s, 1, 2, 12)
    world.wait_data(d, [0, 1, 1, 2, 12, 12])
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    world.wait_forwarded({f"{name}.1": 4, f"{name}.2": 2})


@story
def a_rule_that_changed(world: World, name: str) -> Story:
    """What was made by the old rule is not made again by the new one."""
    s, d = f"{name}-s", f"{name}-d"
    world.route(s, d, name)
    tagged(world, s, 1, 2)
    world.wait_data(d, [1, 2])
    world.route(s, d, name, filter=["tag", "Eq", "3"], preserve_tag=False)
    tagged(world, s, 4, 3)
    world.wait_data(d, [1, 2, 3])
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before
    tags = [record.get("$tag") for record in world.read(d)]
    assert tags == ["1", "2", None]
    tagged(world, s, 5, 3)
    world.wait_data(d, [1, 2, 3, 3])


@story
def a_router_that_was_deleted(world: World, name: str) -> Story:
    """Its copies stay, and nothing more comes."""
    s, d = f"{name}-s", f"{name}-d"
    router = world.route(s, d)
    tagged(world, s, 1, 2)
    world.wait_data(d, [1, 2])
    before = world.read(d)
    world.unroute(router)
    tagged(world, s, 3)
    yield
    assert router not in world.routers()
    assert world.read(d) == before
    world.route(s, d)
    tagged(world, s, 4)
    world.wait_data(d, [1, 2, 4])


@story
def a_router_made_again(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    world.unroute(world.route(s, d))
    router = world.route(s, d)
    tagged(world, s, 1)
    world.wait_data(d, [1])
    world.unroute(router)
    tagged(world, s, 2)
    world.route(s, d)
    tagged(world, s, 3)
    world.wait_data(d, [1, 3])
    yield
    world.wait_data(d, [1, 3])
    world.wait_forwarded({router: 1})


@story
def another_source_since(world: World, name: str) -> Story:
    s, other, d = f"{name}-s", f"{name}-o", f"{name}-d"
    world.unroute(world.route(s, d))
    world.route(s, d)
    tagged(world, s, 1)
    world.wait_data(d, [1])
    world.unroute(f"{s}->{d}")
    world.route(other, d)
    tagged(world, s, 2)
    tagged(world, other, 3)
    world.wait_data(d, [1, 3])
    before = world.seqs(d)
    yield
    assert world.seqs(d) == before


@story
def what_the_source_evicted(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    assert world.client.put(s, cap_records=3).ok
    assert world.client.put(d, cap_records=1, discard="reject").ok
    world.route(s, d)
    tagged(world, s, 0)
    world.wait_data(d, [0])
    tagged(world, s, *range(1, 10))
    assert world.client.put(d).ok
    world.wait_data(d, [0, "source_trim", 7, 8, 9])
    before = world.seqs(d)
    yield
    check_kept(world, d, before, deleted={0}, head=10)


@story
def totals_go_on(world: World, name: str) -> Story:
    s, d = f"{name}-s", f"{name}-d"
    router = world.route(s, d)
    tagged(world, s, *range(7))
    world.wait_data(d, range(7))
    yield
    world.wait_data(d, range(7))
    world.wait_forwarded({router: 7})


@pytest.mark.gate
@pytest.mark.parametrize("name", list(_stories))
def test_after_a_kill(told: dict[str, BaseException | None], name: str) -> None:
    failure = told[name]
    if failure is not None:
        raise failure


# --- between two steps of one command ----------------------------------------------------------------


def test_topics_go_and_their_routers_do_not_hear_of_it(serve: Start) -> None:
    """The router process stands still while topics are dropped, and never gets to do its part."""
    world = World(serve)
    for x in "pq":
        world.route(f"{x}-source", f"{x}-dest")
        world.route(f"{x}-dest", f"{x}-behind")
        world.route(f"{x}-source", f"{x}-other")
        assert world.client.append(f"{x}-source", 1, 2, 3).ok
    for x in "pq":
        for topic in ("dest", "behind", "other"):
            world.wait_data(f"{x}-{topic}", [1, 2, 3])
    world.server.signal_child("router", signal.SIGSTOP)
    for topic in ("p-source", "q-dest"):
        with pytest.raises(NoAnswer):
            world.server.client(timeout_s=0.5).call("DELETE", f"/v0/topics/{topic}")
    world.restart("kill")
    left = {"p-dest->p-behind", "q-source->q-other"}
    eventually(lambda: set(world.routers()) == left, what="the rules without those of the topics")
    assert world.server.restarts("router") == 0
    for topic in ("p-source", "q-dest"):
        assert world.insist(lambda client, topic=topic: client.get(topic)).status == 404  # type: ignore[misc]
        assert world.client.append(topic, "new").ok  # another topic of the same name
    assert world.client.append("p-dest", "direct").ok
    wait_for(world, "p-behind", "direct")
    assert world.client.append("q-source", "more").ok
    wait_for(world, "q-other", "more")
    assert world.data("q-dest") == ["new"]
    for x in "pq":
        world.route(f"{x}-source", f"{x}-dest")
        assert world.client.append(f"{x}-source", "last").ok
        wait_for(world, f"{x}-dest", "last")
    assert "new" not in world.data("p-dest")


def test_a_topic_is_deleted_while_the_router_process_is_away(serve: Start) -> None:
    """The answer says that the routers are still to go; asked again later it says that they are gone."""
    world = World(serve)
    world.route("s", "d")
    os.kill(world.server.pid_of("router"), signal.SIGKILL)
    answer = world.client.call("DELETE", "/v0/topics/s")
    assert answer.status in (200, 503), answer
    assert world.client.get("s").status == 404
    assert world.insist(lambda client: client.call("DELETE", "/v0/topics/s")).ok
    eventually(lambda: world.routers() == {}, what="no router")
    world.route("s", "d")
    assert world.client.append("s", 1).ok
    world.wait_data("d", [1])


class Administrator(threading.Thread):
    """Makes and deletes routers until the server is gone, and knows of each what must be true of it."""

    def __init__(self, server: Server, there: set[str], rng: random.Random) -> None:
        super().__init__(daemon=True)
        self._client = server.client(timeout_s=10)
        self._rng = rng
        self.sure = {name: name in there for name in NAMES}
        self.done = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(NoAnswer):
            while True:
                name = self._rng.choice(NAMES)
                there = self._rng.random() < 0.6
                self.sure.pop(name, None)
                body = {"source": f"{name}-s", "dest": f"{name}-d"} if there else None
                answer = self._client.call("PUT" if there else "DELETE", f"/v0/routers/{name}", body)
                if answer.ok:
                    self.sure[name] = there
                    self.done += 1


NAMES = [f"r{number}" for number in range(12)]


def test_rules_are_there_or_not(serve: Start, seed: int) -> None:
    """Routers made and deleted while everything is killed: what was answered holds, and every rule works."""
    rng = random.Random(seed)
    world = World(serve)
    there: set[str] = set()
    for life in range(8 if EXHAUSTIVE else 2):
        work = Administrator(world.server, there, random.Random(rng.random()))
        eventually(lambda work=work: work.done >= 30, what="some changes")
        if rng.random() < 0.5:
            world.server.signal_child(rng.choice(["router", "shard-0", "shard-1"]))
        time.sleep(rng.random() * 0.1)
        world.restart("kill")
        work.join(20)
        assert not work.is_alive()
        there = set(world.routers())
        for name, expected in work.sure.items():
            assert (name in there) == expected, f"{name} in life {life}"
        for name in NAMES:
            assert world.client.append(f"{name}-s", [life, name in there]).ok
        for name in sorted(there):
            wait_for(world, f"{name}-d", [life, True])
    for name in NAMES:
        if world.client.get(f"{name}-d").ok:
            copies = [each for each in world.data(f"{name}-d") if isinstance(each, list)]
            assert all(routed for _, routed in copies), "a router that was not there has copied"


# --- damage ------------------------------------------------------------------------------------------


def test_damaged_rules_are_refused_and_everything_else_serves(serve: Start) -> None:
    world = World(serve)
    world.route("s", "d")
    assert world.client.append("s", 1).ok
    world.wait_data("d", [1])
    assert world.server.stop() == 0
    path = world.server.data_dir / "routers"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    server = serve(wait=False)
    server.wait_state("router", State.FAILED)
    assert f"{path}: " in server.log()
    assert server.ready().status == 503
    client = server.client()
    assert client.call("GET", "/v0/routers").status == 503
    eventually(lambda: client.append("s", 2).ok, what="the source served")
    assert client.diff("d").ok
    assert path.read_bytes() != good, "nobody has touched it"
    server.kill()
    path.write_bytes(good)
    world.server = serve()
    world.client = world.server.client()
    world.wait_data("d", [1, 2])
