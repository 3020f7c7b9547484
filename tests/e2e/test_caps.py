"""Every cap of the server at its edge, reached by one client and by many at once, over two gateways and four shards.

What was let through is counted by its answers and looked for in lists and metrics; the two must agree and stay within
the cap. Racing for the very last place may leave it to nobody, but never lose it: alone, a client gets it afterwards.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from topics.storage.format import RECORD_OVERHEAD

from .client import LANES, Answer, Client, Lane
from .h2ws import H2Sockets
from .keyed import Keyed, KeyedWatching, KeyedWorking, bearer
from .queues import Queue, make_queue
from .racing import (
    Account,
    Racers,
    all_at_once,
    append_request,
    assert_capped,
    drop_request,
    fresh,
    fresh_on,
    kill,
    live_bytes,
    metric,
    names,
    put_request,
    router_request,
    split,
    still,
    until,
    wait_ready_everywhere,
    wire_to,
)
from .routing import data_of, drop_router, get_router, list_routers, put_router, route, wait_data
from .server import Server, eventually
from .sockets import Socket, handshake
from .sse import Http2Source
from .wire import Wire, request
from .working import WorkStream

pytestmark = pytest.mark.e2e

GATEWAYS = 2
SHARDS = 4
TOPICS = 8
ROUTERS = 3
RACERS = 16
HOLDS = (None, "gateway", "shard")
Start = Callable[..., Server]


def _serve(factory: pytest.TempPathFactory, name: str, **environ: object) -> Iterator[Server]:
    folder = factory.mktemp(name)
    # What stands still for a moment is not under pressure: that has refusals of its own.
    given = {"TOPICS_GATEWAYS": GATEWAYS, "TOPICS_WAL_SHARDS": SHARDS, "TOPICS_ELASTIC": 0, **environ}
    server = Server(folder / "data", log=folder / "server.log", **given)
    try:
        wait_ready_everywhere(server)
        yield server
        assert "Traceback" not in server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Eight topics and three routers at a time."""
    yield from _serve(tmp_path_factory, "few", TOPICS_MAX_TOPICS=TOPICS, TOPICS_MAX_ROUTERS=ROUTERS)


@pytest.fixture(scope="module")
def racers(few: Server) -> Iterator[Racers]:
    with Racers(few, RACERS) as racers:
        yield racers


def clear(api: Client) -> None:
    """Without a topic there is no router either."""
    for name in names(api):
        assert api.drop(name).status == 200
    assert names(api) == set()
    assert list_routers(api)["routers"] == []


@pytest.fixture
def one(few: Server, lane: Lane) -> Iterator[Client]:
    """The server of few topics, empty, by one lane and then by the other."""
    with few.client(lane) as client:
        clear(client)
        yield client
        clear(client)


@pytest.fixture
def one1(few: Server) -> Iterator[Client]:
    """Likewise, by the fast lane alone."""
    with few.client() as client:
        clear(client)
        yield client
        clear(client)


def create(api: Client, how: str, name: str) -> Answer:
    return api.put(name) if how == "put" else api.append(name, 1)


def fill(api: Client, how: str = "put") -> list[str]:
    """All places that are left, one after the other; what was made for it."""
    made: list[str] = []
    while (answer := create(api, how, name := fresh())).status != 429:
        assert answer.status == 201, answer
        made.append(name)
    assert_capped(answer, "max_topics", TOPICS)
    return made


# --- topics, one client ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["put", "append"])
def test_so_many_topics_and_not_one_more(few: Server, one: Client, how: str) -> None:
    """Wherever they live: the first to be refused is tried on every shard."""
    made = {fresh_on(at % SHARDS, SHARDS) for at in range(TOPICS)}
    for name in made:
        assert create(one, how, name).status == 201
    for shard in range(SHARDS):
        late = fresh_on(shard, SHARDS)
        for way in ("put", "append"):
            assert_capped(create(one, way, late), "max_topics", TOPICS)
        assert one.state(late).refusal == (404, "topic_not_found")
    assert names(one) == made
    assert one.get("/v0/ready")["topics"] == TOPICS
    eventually(lambda: metric(few, "topics_topics") == TOPICS)


@pytest.mark.parametrize("lonely", range(SHARDS))
def test_all_of_them_may_be_of_one_shard(one1: Client, lonely: int) -> None:
    for _ in range(TOPICS):
        assert one1.put(fresh_on(lonely, SHARDS)).status == 201
    for shard in range(SHARDS):
        assert_capped(one1.put(fresh_on(shard, SHARDS)), "max_topics", TOPICS)


def test_what_exists_can_still_be_changed_and_written(one: Client) -> None:
    made = fill(one)
    for name in made:
        assert one.put(name, ttl_ms=1_000_000).status == 200
        assert one.append(name, 1, 2).status == 200
        assert one.state(name)["config"]["ttl_ms"] == 1_000_000
        assert one.diff(name).data == [1, 2]
    assert_capped(one.put(fresh()), "max_topics", TOPICS)


def test_a_dropped_topic_gives_its_place_to_any_shard(one: Client) -> None:
    made = fill(one)
    for at, name in enumerate(made):
        one.drop(name)
        assert one.put(fresh_on(at % SHARDS, SHARDS)).status == 201, "the place was not free when the drop was answered"
        assert_capped(one.append(fresh(), 1), "max_topics", TOPICS)
    assert len(names(one)) == TOPICS


def test_dropping_what_is_not_there_frees_nothing(one: Client) -> None:
    fill(one)
    for shard in range(SHARDS):
        assert one.drop(fresh_on(shard, SHARDS))["deleted"] is False
        assert_capped(one.put(fresh_on(shard, SHARDS)), "max_topics", TOPICS)


def test_a_full_topic_refused_by_if_empty_keeps_its_place(one: Client) -> None:
    made = fill(one, "append")
    assert one.drop(made[0], if_empty=True).refusal == (409, "topic_not_empty")
    assert_capped(one.put(fresh()), "max_topics", TOPICS)


@pytest.mark.parametrize("wrong", [{"durability": "x"}, {"type": "queue", "dead_letter": "!"}, {"cap_records": -1}])
def test_what_is_refused_for_another_reason_takes_no_place(one: Client, wrong: dict[str, object]) -> None:
    for _ in range(TOPICS):
        assert one.put(fresh(), **wrong).status == 400
    assert len(fill(one)) == TOPICS


def test_a_write_that_must_not_create_is_told_that_there_is_nothing(one: Client) -> None:
    """It asks for no place, so there being none is not its reason."""
    for full in (False, True):
        answer = one.append(fresh(), 1, create=False)
        assert answer.refusal == (404, "topic_not_found"), f"full: {full}"
        if not full:
            fill(one)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_topics_of_every_class_count(one1: Client, durability: str) -> None:
    for shard in range(SHARDS):
        assert one1.put(fresh_on(shard, SHARDS), durability=durability).status == 201
        answer = one1.append(fresh_on(shard, SHARDS), 1, config={"durability": durability})
        assert answer.status == 201
    for shard in range(SHARDS):
        answer = one1.append(fresh_on(shard, SHARDS), 1, config={"durability": durability})
        assert_capped(answer, "max_topics", TOPICS)


def test_a_socket_is_refused_with_the_same_words(few: Server, one1: Client) -> None:
    made = fill(one1)
    with Socket(few.port) as socket:
        late = fresh()
        refused = socket.call("publish", topic=late, records=[{"data": 1}])
        assert refused.error == "throttled"
        assert refused["detail"] == {"limit": "max_topics", "max": TOPICS}
        assert socket.publish(made[0], 1)["head_seq"] == 1
        one1.drop(made[1])
        assert socket.publish(late, 1)["created"] is True
    assert names(one1) == {*made, late} - {made[1]}


# --- topics, many clients ----------------------------------------------------------------------------


def spread(count: int) -> list[str]:
    """Names by turns on each shard, in an order that is another one each time."""
    found = [fresh_on(at % SHARDS, SHARDS, "race") for at in range(count)]
    random.shuffle(found)
    return found


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("how", ["put", "append", "both"])
def test_a_crowd_never_makes_more_topics_than_there_may_be(
    racers: Racers, one1: Client, how: str, hold: str | None
) -> None:
    for number in range(6):
        before = {fresh_on(at % SHARDS, SHARDS) for at in range(number % TOPICS)}
        for name in before:
            assert one1.put(name).status == 201
        wanted = spread(RACERS)
        puts = [how == "put" or (how == "both" and at % 2 == 0) for at in range(RACERS)]
        answers = racers.volley(
            [put_request(name) if put else append_request(name, 1) for name, put in zip(wanted, puts, strict=True)],
            hold=hold,
        )
        made, _ = split(answers, "max_topics", TOPICS)
        assert len(before) + len(made) <= TOPICS, f"{len(made)} made where {len(before)} were"
        assert all(answer.status == 201 for answer in made)
        kept = {name for name, answer in zip(wanted, answers, strict=True) if answer.status == 201}
        assert names(one1) == before | kept, "the list is not what was answered"
        assert len(before) + len(made) + len(fill(one1)) == TOPICS, "a place was lost in the race"
        clear(one1)


@pytest.mark.parametrize("hold", HOLDS)
def test_a_crowd_that_wants_the_same_topic_makes_it_once(racers: Racers, one1: Client, hold: str | None) -> None:
    """One place is left, and it is enough for all of them."""
    for number in range(4):
        for _ in range(TOPICS - 1):
            one1.put(fresh())
        name = fresh_on(number % SHARDS, SHARDS)
        raw = [put_request(name), append_request(name, 1)]
        answers = racers.volley([raw[at % 2] for at in range(RACERS)], hold=hold)
        assert [answer.status for answer in answers].count(201) == 1, answers
        assert {answer.status for answer in answers} <= {200, 201}
        assert len(names(one1)) == TOPICS
        clear(one1)


@pytest.mark.parametrize("hold", HOLDS)
def test_the_last_place_is_never_given_twice(racers: Racers, one1: Client, hold: str | None) -> None:
    """Two shards, two gateways, two clients, one place; again and again."""
    taken = 0
    for number in range(25):
        while len(names(one1)) < TOPICS - 1:
            one1.put(fresh())
        first = number % SHARDS
        pair = [fresh_on(first, SHARDS), fresh_on((first + 1 + number % (SHARDS - 1)) % SHARDS, SHARDS)]
        answers = racers.volley([put_request(name) for name in pair], hold=hold)
        made, _ = split(answers, "max_topics", TOPICS)
        assert len(made) <= 1, "both got the last place"
        taken += len(made)
        for name, answer in zip(pair, answers, strict=True):
            if answer.status == 201:
                assert one1.drop(name)["deleted"] is True
    assert len(fill(one1)) == 1
    assert taken, "nobody ever got it"


def test_topics_that_come_and_go_stay_within_the_cap(few: Server, one1: Client) -> None:
    account = Account(TOPICS)

    def live(seed: int) -> None:
        chance = random.Random(seed)
        mine: list[str] = []
        with few.client(LANES[seed % 2]) as api:
            for _ in until(2.5):
                if mine and chance.random() < 0.4:
                    account.going()
                    assert api.drop(mine.pop(chance.randrange(len(mine))))["deleted"] is True
                    continue
                name = fresh_on(chance.randrange(SHARDS), SHARDS)
                answer = create(api, chance.choice(("put", "append")), name)
                if answer.status == 201:
                    mine.append(name)
                    account.came()
                else:
                    assert_capped(answer, "max_topics", TOPICS)

    all_at_once([lambda seed=seed: live(seed) for seed in range(6)])  # type: ignore[misc]
    assert account.highest >= TOPICS - 1, "the edge was never reached"
    there = len(names(one1))
    assert there + len(fill(one1)) == TOPICS


def test_drops_and_creations_that_cross(racers: Racers, one1: Client) -> None:
    """As many places are freed as are wanted, at the same moment: whatever order they meet in, no more than the cap."""
    for hold in HOLDS * 3:
        made = fill(one1)
        leaving, wanted = made[: TOPICS // 2], spread(RACERS - TOPICS // 2)
        raw = [drop_request(name) for name in leaving] + [put_request(name) for name in wanted]
        answers = racers.volley(raw, hold=hold)
        assert all(answer.status == 200 and answer["deleted"] for answer in answers[: len(leaving)])
        created, _ = split(answers[len(leaving) :], "max_topics", TOPICS)
        assert len(created) <= len(leaving)
        assert len(names(one1)) == TOPICS - len(leaving) + len(created)
        assert len(fill(one1)) == len(leaving) - len(created)
        clear(one1)


# --- topics that others make -------------------------------------------------------------------------


def test_a_router_takes_as_many_places_as_it_needs_topics(one: Client) -> None:
    made = {fresh() for _ in range(TOPICS - 3)}
    for name in made:
        one.put(name)
    some = min(made)
    route(one, some, "dest-1", name="one-new")
    route(one, "source-2", "dest-2", name="two-new")
    assert len(names(one)) == TOPICS
    refused = put_router(one, "three", some, "dest-3")
    assert_capped(refused, "max_topics", TOPICS)
    assert get_router(one, "three").status == 404
    assert names(one) == made | {"dest-1", "source-2", "dest-2"}
    route(one, "source-2", max(made), name="none-new")
    assert put_router(one, "none-new", "source-2", max(made)).status == 200


def test_a_router_that_finds_one_place_for_two_topics_leaves_it_free(one: Client) -> None:
    """And leaves nothing else: the topic that could have been made is not."""
    made = {fresh() for _ in range(TOPICS - 1)}
    for name in made:
        one.put(name)
    for at in range(SHARDS):
        source, dest = fresh_on(at, SHARDS), fresh_on((at + 1) % SHARDS, SHARDS)
        assert_capped(put_router(one, "r", source, dest), "max_topics", TOPICS)
        assert names(one) == made
        assert get_router(one, "r").status == 404
    assert len(fill(one)) == 1


@pytest.mark.parametrize("hold", HOLDS)
def test_routers_and_topics_that_race_leave_no_phantoms(racers: Racers, one1: Client, hold: str | None) -> None:
    """A topic is there if its own creation was answered so, or if a router that was made needs it."""
    for _ in range(5):
        pairs = [(fresh_on(at % SHARDS, SHARDS), fresh_on((at + 1) % SHARDS, SHARDS)) for at in range(ROUTERS)]
        wanted = spread(RACERS - ROUTERS - 2)
        raw = [router_request(f"r{at}", *pair) for at, pair in enumerate(pairs)]
        raw += [put_request(name) for name in wanted]
        order = list(range(len(raw)))
        random.shuffle(order)
        shuffled = racers.volley([raw[at] for at in order], hold=hold)
        answers = [answer for _, answer in sorted(zip(order, shuffled, strict=True), key=lambda pair: pair[0])]
        split(answers, "max_topics", TOPICS)
        expected = {name for name, answer in zip(wanted, answers[ROUTERS:], strict=True) if answer.status == 201}
        for pair, answer in zip(pairs, answers, strict=False):
            expected |= set(pair) if answer.status == 201 else set()
        assert names(one1) == expected
        assert len(expected) <= TOPICS
        routers = {row["router"] for row in list_routers(one1)["routers"]}
        assert routers == {f"r{at}" for at in range(ROUTERS) if answers[at].status == 201}
        assert len(expected) + len(fill(one1)) == TOPICS
        clear(one1)


@pytest.mark.parametrize("hold", [*HOLDS, "router"])
def test_a_refused_router_takes_no_topic_away_that_a_client_has_made(
    racers: Racers, one1: Client, hold: str | None
) -> None:
    """It may have made the same topic a moment before; whoever was told that it is there finds it."""
    for number in range(20):
        while len(names(one1)) < TOPICS - 1:
            one1.put(fresh())
        source, dest = fresh_on(number % SHARDS, SHARDS), fresh_on((number + 1) % SHARDS, SHARDS)
        raw = [router_request("r", source, dest), put_request(source)]
        answers = racers.volley(raw if number % 2 else raw[::-1], hold=hold)
        router, put = answers if number % 2 else answers[::-1]
        assert_capped(router, "max_topics", TOPICS)
        if put.status == 429:
            assert_capped(put, "max_topics", TOPICS)
            continue
        state = one1.state(source)
        assert state.status == 200, f"PUT was answered {put.status}, and the topic is gone (round {number})"
        one1.drop(source)


def test_dead_letters_wait_for_a_place(one: Client) -> None:
    """The job is neither lost nor delivered, and what it waits for comes with the next topic that goes."""
    dead = fresh("dead")
    queue = make_queue(one, fresh("queue"), max_deliveries=1, dead_letter=dead)
    made = fill(one)
    queue.produce("poison", "fine")
    queue.wear([1], 1)
    assert queue.claim()["claimed"][0]["data"] == "fine"
    assert one.state(dead).status == 404
    assert one.state(queue.name)["count"] == 2
    assert_capped(one.put(fresh()), "max_topics", TOPICS)
    assert len(names(one)) == TOPICS
    one.drop(made[0])
    eventually(lambda: one.state(dead).status == 200, what="a topic for the dead letters")
    wait_data(one, dead, ["poison"])
    assert_capped(one.put(fresh()), "max_topics", TOPICS)
    queue.wait_counters(0, 1, 1)


def test_dead_letters_and_clients_race_for_the_last_place(racers: Racers, one1: Client) -> None:
    for number in range(3):
        queues = [make_queue(one1, fresh("q"), max_deliveries=1, dead_letter=fresh("dead")) for _ in range(3)]
        for queue in queues:
            queue.produce("poison")
            queue.wear([1], 1)
        dead = {str(one1.state(queue.name)["config"]["dead_letter"]) for queue in queues}
        filling = {fresh() for _ in range(TOPICS - 4)}
        for name in filling:
            assert one1.put(name).status == 201
        raw = [append_request(name, 1) for name in spread(6)]
        raw += [_claim_request(queue) for queue in queues]
        answers = racers.volley(raw, hold=HOLDS[number])
        split(answers[:6], "max_topics", TOPICS)
        assert all(answer.status == 200 for answer in answers[6:])
        assert len(names(one1)) <= TOPICS
        fill(one1)
        assert len(names(one1)) <= TOPICS
        for name in names(one1) - dead - {queue.name for queue in queues}:
            one1.drop(name)
        eventually(lambda dead=dead: dead <= names(one1), what="all dead letters")
        for name in dead:
            wait_data(one1, name, ["poison"])
        clear(one1)


def _claim_request(queue: Queue) -> bytes:
    return request("POST", f"/v0/topics/{queue.name}/claim", json.dumps({"node": "w"}).encode())


# --- routers -----------------------------------------------------------------------------------------


def test_so_many_routers_and_not_one_more(few: Server, one: Client) -> None:
    one.put("a")
    made = [route(one, "a", f"b{at}", name=f"r{at}") for at in range(ROUTERS)]
    before = names(one)
    for source, dest in (("a", "c"), ("c", "a"), ("c", "d"), ("a", "b0")):
        assert_capped(put_router(one, "late", source, dest), "max_routers", ROUTERS)
        assert names(one) == before, "a refused router made a topic"
    assert get_router(one, "late").refusal == (404, "router_not_found")
    assert [row["router"] for row in list_routers(one)["routers"]] == made
    assert metric(few, "topics_routers") == ROUTERS
    for at, name in enumerate(made):
        assert put_router(one, name, "a", f"b{at}", preserve_tag=False).status == 200
    one.append("a", "through")
    for at in range(ROUTERS):
        wait_data(one, f"b{at}", ["through"])


def test_a_router_that_goes_gives_its_place_back(one: Client) -> None:
    one.put("a")
    for at in range(ROUTERS):
        route(one, "a", f"b{at}", name=f"r{at}")
    drop_router(one, "r0")
    route(one, "a", "b0", name="again")
    assert_capped(put_router(one, "late", "a", "c"), "max_routers", ROUTERS)
    assert one.drop("b1")["routers_removed"] == ["r1"]  # by the cascade
    route(one, "a", "c", name="late")
    assert_capped(put_router(one, "later", "a", "d"), "max_routers", ROUTERS)
    for wrong in ({"source": "a", "dest": "a"}, {"source": "!", "dest": "b"}):
        assert one.send("PUT", "/v0/routers/wrong", wrong).status == 400
    drop_router(one, "unknown")
    assert_capped(put_router(one, "later", "a", "d"), "max_routers", ROUTERS)


@pytest.mark.parametrize("hold", [*HOLDS, "router"])
def test_a_crowd_never_makes_more_routers_than_there_may_be(racers: Racers, one1: Client, hold: str | None) -> None:
    """One process makes them all, so of those who come exactly as many get one as there are places."""
    for number in range(5):
        one1.put("a")
        for at in range(number % ROUTERS):
            route(one1, "a", "b", name=f"old{at}")
        before = names(one1)
        answers = racers.volley([router_request(f"r{at}", "a", f"d{at}") for at in range(RACERS)], hold=hold)
        made, _ = split(answers, "max_routers", ROUTERS)
        assert len(made) == ROUTERS - number % ROUTERS
        got = {f"d{at}" for at, answer in enumerate(answers) if answer.status == 201}
        assert names(one1) == before | got, "a refused router made a topic"
        assert len(list_routers(one1)["routers"]) == ROUTERS
        clear(one1)


def test_the_routers_are_counted_again_after_their_process_died(few: Server, one1: Client) -> None:
    one1.put("a")
    for at in range(ROUTERS):
        route(one1, "a", f"b{at}", name=f"r{at}")
    before = names(one1)
    kill(few, "router")
    answer = eventually(lambda: _not_503(put_router(one1, "late", "a", "c")))
    assert_capped(answer, "max_routers", ROUTERS)
    assert names(one1) == before
    few.wait_ready()
    drop_router(one1, "r1")
    route(one1, "a", "c", name="late")


def _not_503(answer: Answer) -> Answer | None:
    return None if answer.status == 503 else answer


# --- bytes -------------------------------------------------------------------------------------------

BYTES = 10_000
CLASSES = ("ephemeral", "memory", "disk", "fsync")


LEAST = RECORD_OVERHEAD + 1  # what the smallest record counts for


def text(size: int, start: str = "") -> str:
    """Data whose record counts for so many bytes: what every record costs, the quotes, and the rest."""
    return start + "x" * (size - RECORD_OVERHEAD - 2 - len(start))


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ten thousand bytes at a time, in as many topics as anybody likes."""
    yield from _serve(tmp_path_factory, "tight", TOPICS_MAX_TOTAL_BYTES=BYTES)


@pytest.fixture(scope="module")
def writers(tight: Server) -> Iterator[Racers]:
    with Racers(tight, RACERS) as racers:
        yield racers


@pytest.fixture
def scarce(tight: Server, lane: Lane) -> Iterator[Client]:
    """The server of few bytes, empty, by one lane and then by the other."""
    with tight.client(lane) as client:
        clear(client)
        yield client
        clear(client)


@pytest.fixture
def scarce1(tight: Server) -> Iterator[Client]:
    with tight.client() as client:
        clear(client)
        yield client
        clear(client)


def one_per_shard(api: Client) -> list[str]:
    """A topic on each shard, each of another class."""
    made = [fresh_on(shard, SHARDS) for shard in range(SHARDS)]
    for name, durability in zip(made, CLASSES, strict=True):
        assert api.put(name, durability=durability).status == 201
    return made


def assert_room(api: Client, topic: str, room: int) -> None:
    """So much is left and not a byte more. Takes it, if a record can be so small."""
    if room > LEAST:
        assert_capped(api.append(topic, text(room + 1)), "max_total_bytes", BYTES)
        assert api.append(topic, text(room)).status == 200
        room = 0
    if room < LEAST:
        assert_capped(api.append(topic, 1), "max_total_bytes", BYTES)


def test_bytes_up_to_the_last_one(tight: Server, scarce: Client) -> None:
    topics = one_per_shard(scarce)
    for name in topics:
        assert scarce.append(name, text(2_000), text(500 - LEAST)).status == 200
    assert live_bytes(scarce) == BYTES - SHARDS * LEAST
    for name in topics:
        assert_capped(scarce.append(name, text(SHARDS * LEAST + 1)), "max_total_bytes", BYTES)
        assert scarce.state(name)["head_seq"] == 2
    for left, name in zip(range(SHARDS, 0, -1), topics, strict=True):
        assert_capped(scarce.append(name, *[1] * (left + 1)), "max_total_bytes", BYTES)  # whole or not at all
        assert scarce.append(name, 1).status == 200
    assert live_bytes(scarce) == BYTES
    for name in topics:
        assert_capped(scarce.append(name, 1), "max_total_bytes", BYTES)
        assert scarce.state(name)["head_seq"] == 3
    eventually(lambda: metric(tight, "topics_bytes_live") == BYTES)


def test_a_write_that_can_not_be_makes_no_topic(scarce: Client) -> None:
    scarce.append(topic := fresh(), text(BYTES))
    for shard in range(SHARDS):
        assert_capped(scarce.append(fresh_on(shard, SHARDS), 1), "max_total_bytes", BYTES)
    assert names(scarce) == {topic}
    assert scarce.put(fresh()).status == 201  # empty, it costs nothing
    assert scarce.put(topic, ttl_ms=1_000_000).status == 200
    clear(scarce)
    assert_capped(scarce.append(fresh(), text(BYTES + 1)), "max_total_bytes", BYTES)
    assert names(scarce) == set()


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.parametrize("way", ["match", "before", "drop", "cap", "ttl", "ack"])
def test_what_is_removed_makes_room_on_every_shard(scarce1: Client, way: str, durability: str) -> None:
    for shard in range(SHARDS):
        topic, other = fresh_on(shard, SHARDS), fresh_on((shard + 1) % SHARDS, SHARDS)
        config: dict[str, Any] = {"durability": durability, "ttl_ms": 50 if way == "ttl" else 0}
        scarce1.put(topic, type="queue" if way == "ack" else "log", **config)
        scarce1.put(other)
        assert scarce1.append_records(topic, [{"data": text(6_000), "tag": "goes"}]).status == 200
        if way == "ttl":
            eventually(lambda topic=topic: scarce1.state(topic)["count"] == 0)
        else:
            assert_capped(scarce1.append(other, text(6_000)), "max_total_bytes", BYTES)
        if way == "match":
            scarce1.delete(topic, match="goes")
        elif way == "before":
            scarce1.delete(topic, before_seq=2)
        elif way == "drop":
            scarce1.drop(topic)
        elif way == "cap":
            scarce1.put(topic, cap_bytes=1_000, **config)
        elif way == "ack":
            queue = Queue(scarce1, topic)
            queue.take()
            assert queue.ack([1])["acked"] == 1
        assert scarce1.append(other, text(6_000)).status == 200, "the room was not there when the answer was"
        assert_room(scarce1, other, BYTES - 6_000)
        clear(scarce1)


@pytest.mark.full
@pytest.mark.parametrize("durability", CLASSES)
def test_what_has_expired_makes_room_though_nobody_looks(scarce1: Client, durability: str) -> None:
    """The refused write is not about the topic whose records have expired, and perhaps not even of its shard."""
    for away in (0, 1):
        topic, other = fresh_on(0, SHARDS), fresh_on(away, SHARDS)
        scarce1.put(topic, durability=durability, ttl_ms=100)
        scarce1.put(other)
        assert scarce1.append(topic, text(6_000)).status == 200
        eventually(lambda other=other: scarce1.append(other, text(6_000)).status == 200)
        clear(scarce1)


def test_a_repeated_write_needs_no_room(scarce: Client) -> None:
    topic = fresh()
    first = scarce.append(topic, text(BYTES), idempotency_key="k")
    again = scarce.append(topic, text(BYTES), idempotency_key="k")
    assert (again.status, again["deduped"], again["seqs"]) == (200, True, first["seqs"])
    refused = scarce.append(topic, 1, idempotency_key="other")
    assert_capped(refused, "max_total_bytes", BYTES)
    scarce.delete(topic, before_seq=2)
    assert scarce.append(topic, 1, idempotency_key="other")["deduped"] is False, "a refused write is not remembered"


@pytest.mark.parametrize("durability", CLASSES)
def test_appends_in_one_go_fill_it_to_the_edge(tight: Server, scarce1: Client, durability: str) -> None:
    """Of one connection, so each is judged by what is before it."""
    topic = fresh()
    scarce1.put(topic, durability=durability)
    with Wire(tight.port) as wire:
        wire.send(b"".join(append_request(topic, text(600)) for _ in range(20)))
        answers = [wire.answer() for _ in range(20)]
    assert [answer.status for answer in answers] == [200] * 16 + [429] * 4
    split(answers, "max_total_bytes", BYTES)
    assert live_bytes(scarce1) == 16 * 600


def test_a_socket_is_refused_for_bytes_with_the_same_words(tight: Server, scarce1: Client) -> None:
    with Socket(tight.port) as socket:
        topic = fresh()
        socket.publish(topic, text(BYTES))
        refused = socket.call("publish", topic=topic, records=[{"data": 1}])
        assert refused.error == "throttled"
        assert refused["detail"] == {"limit": "max_total_bytes", "max": BYTES}
        scarce1.delete(topic, before_seq=2)
        socket.publish(topic, 1)


@pytest.mark.parametrize("hold", HOLDS)
def test_a_crowd_never_writes_more_bytes_than_there_may_be(writers: Racers, scarce1: Client, hold: str | None) -> None:
    for number in range(8):
        topics = one_per_shard(scarce1)
        before = 700 * number
        if before:
            assert scarce1.append(topics[number % SHARDS], text(before)).status == 200
        sizes = [random.choice((400, 900, 1_700)) for _ in range(RACERS)]
        raw = [append_request(topics[at % SHARDS], text(size)) for at, size in enumerate(sizes)]
        answers = writers.volley(raw, hold=hold)
        split(answers, "max_total_bytes", BYTES)
        written = sum(size for size, answer in zip(sizes, answers, strict=True) if answer.status == 200)
        assert before + written <= BYTES, f"{written} written where {before} were"
        assert live_bytes(scarce1) == before + written, "what is there is not what was answered"
        assert_room(scarce1, topics[number % SHARDS], BYTES - before - written)
        clear(scarce1)


@pytest.mark.parametrize("hold", HOLDS)
def test_the_last_bytes_are_never_given_twice(writers: Racers, scarce1: Client, hold: str | None) -> None:
    topics = one_per_shard(scarce1)
    assert scarce1.append(fresh(), text(BYTES - 150)).status == 201
    taken = 0
    for number in range(25):
        pair = [topics[number % SHARDS], topics[(number + 1 + number % (SHARDS - 1)) % SHARDS]]
        answers = writers.volley([append_request(name, text(100)) for name in pair], hold=hold)
        made, _ = split(answers, "max_total_bytes", BYTES)
        assert len(made) <= 1, "both got the last bytes"
        taken += len(made)
        for name, answer in zip(pair, answers, strict=True):
            if answer.status == 200:
                assert scarce1.delete(name, before_seq=answer["last_seq"] + 1)["deleted"] == 1
    assert_room(scarce1, topics[1], 150)
    assert taken, "nobody ever got them"


def test_bursts_at_all_shards_never_write_beyond_the_cap(writers: Racers, scarce1: Client) -> None:
    """Each shard has a hundred writes to do, as fast as it can; together they reach the cap while all are at it."""
    size, burst = 50, 100
    for number in range(25):
        topics = [fresh_on(shard, SHARDS) for shard in range(SHARDS)]
        for topic in topics:
            scarce1.put(topic, durability="memory")
        answers = writers.bursts([append_request(topic, text(size)) * burst for topic in topics], burst, hold="shard")
        passed, _ = split(answers, "max_total_bytes", BYTES)
        assert len(passed) * size <= BYTES, f"{len(passed)} writes, in round {number}"
        assert live_bytes(scarce1) == len(passed) * size
        clear(scarce1)


def test_bytes_that_come_and_go_stay_within_the_cap(tight: Server, scarce1: Client) -> None:
    topics = one_per_shard(scarce1)
    account = Account(BYTES)

    def live(seed: int) -> None:
        chance = random.Random(seed)
        mine: list[tuple[str, str, int]] = []
        with tight.client(LANES[seed % 2]) as api:
            for _ in until(2.5):
                if mine and chance.random() < 0.4:
                    topic, tag, size = mine.pop(chance.randrange(len(mine)))
                    account.going(size)
                    assert api.delete(topic, match=tag)["deleted"] == 1
                    continue
                topic, tag, size = chance.choice(topics), fresh("tag"), chance.choice((300, 800, 1_500))
                answer = api.append_records(topic, [{"data": text(size), "tag": tag}])
                if answer.status == 200:
                    account.came(size)
                    mine.append((topic, tag, size))
                else:
                    assert_capped(answer, "max_total_bytes", BYTES)

    all_at_once([lambda seed=seed: live(seed) for seed in range(6)])  # type: ignore[misc]
    assert account.highest > BYTES - 1_000, "the edge was never reached"
    assert_room(scarce1, topics[0], BYTES - live_bytes(scarce1))


def test_copies_wait_for_room(tight: Server, scarce: Client) -> None:
    """A router writes like anybody else; what does not fit is copied when there is room."""
    source, dest = fresh_on(0, SHARDS), fresh_on(1, SHARDS)
    route(scarce, source, dest)
    with still(tight, ["router"]):  # or it would take the room before they are all there
        for number in range(7):
            assert scarce.append(source, text(1_000, str(number))).status == 200
    eventually(lambda: live_bytes(scarce) == BYTES, what="as many copies as there is room for")
    assert [value[0] for value in data_of(scarce, dest)] == ["0", "1", "2"]
    assert_capped(scarce.append(source, 1), "max_total_bytes", BYTES)
    scarce.delete(source, before_seq=4)
    eventually(lambda: scarce.state(dest)["count"] == 6)
    assert live_bytes(scarce) == BYTES
    scarce.delete(dest, before_seq=3)
    eventually(lambda: scarce.state(dest)["head_seq"] == 7)
    assert [value[0] for value in data_of(scarce, dest)] == ["2", "3", "4", "5", "6"]


def test_copies_and_clients_race_for_the_last_bytes(tight: Server, scarce1: Client) -> None:
    """Four routers across the shards and four writers: the sum stays within the cap, wherever it is looked at."""
    sources = [fresh_on(shard, SHARDS) for shard in range(SHARDS)]
    dests = [fresh_on((shard + 1) % SHARDS, SHARDS) for shard in range(SHARDS)]
    for source, dest in zip(sources, dests, strict=True):
        route(scarce1, source, dest)

    def write(at: int) -> int:
        written = 0
        with tight.client(LANES[at % 2]) as api:
            for _ in until(1.0):
                answer = api.append(sources[at], text(200))
                if answer.status == 200:
                    written += 1
                else:
                    assert_capped(answer, "max_total_bytes", BYTES)
                assert live_bytes(api) <= BYTES  # nothing is removed meanwhile, so a sum can only be too low
        return written

    written = all_at_once([lambda at=at: write(at) for at in range(SHARDS)])  # type: ignore[misc]
    assert sum(written) * 200 <= BYTES
    assert live_bytes(scarce1) <= BYTES
    for at, source in enumerate(sources):
        assert scarce1.state(source)["count"] == written[at]
    for source in sources:
        scarce1.delete(source, before_seq=10**9)
    for dest in dests:  # what was deleted before there was room for its copy has none; what comes now does
        scarce1.delete(dest, before_seq=10**9)
    for source, dest in zip(sources, dests, strict=True):
        assert scarce1.append(source, "now").status == 200

        def last_of(dest: str = dest) -> list[Any]:
            return scarce1.diff(dest, max(scarce1.state(dest)["head_seq"] - 1, 0)).data

        eventually(lambda last_of=last_of: last_of() == ["now"], what="a copy of the last one")
        assert scarce1.state(dest)["head_seq"] <= scarce1.state(source)["head_seq"]


def test_dead_letters_wait_for_room(scarce: Client) -> None:
    """A move is an append before it is a delete, so it needs room of its own for a moment."""
    dead = fresh("dead")
    queue = make_queue(scarce, fresh("queue"), max_deliveries=1, dead_letter=dead)
    queue.produce(text(1_000))
    queue.wear([1], 1)
    scarce.append(filler := fresh(), text(BYTES - 1_000))
    assert queue.claim()["claimed"] == []
    assert_capped(scarce.append(filler, 1), "max_total_bytes", BYTES)
    assert live_bytes(scarce) <= BYTES
    assert scarce.state(queue.name)["count"] == 1
    scarce.drop(filler)
    eventually(lambda: scarce.state(dead).status == 200, what="dead letters")
    wait_data(scarce, dead, [text(1_000)])
    queue.wait_counters(0, 0, 1)


# --- sessions and streams ----------------------------------------------------------------------------

ALL = 5  # streams of the server
EACH = 3  # of one key
SESSIONS = 6
TTL_MS = 1_200
SECRETS = ("key-a", "key-b", "key-c")
WATCHED = "watched"
WORKED = "worked"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three keys, five streams of which a key may have three, six sessions that are soon forgotten."""
    given = {
        "TOPICS_API_KEYS": ",".join(SECRETS),
        "TOPICS_MAX_SSE_CONNECTIONS": ALL,
        "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": EACH,
        "TOPICS_MAX_WATCH_SESSIONS": SESSIONS,
        "TOPICS_SESSION_TTL_MS": TTL_MS,
        "TOPICS_WAL_SHARDS": 2,
    }
    for server in _serve(tmp_path_factory, "narrow", **given):
        with Keyed(server.port, "http1", SECRETS[0]) as api:
            api.put(WATCHED)
            api.put(WORKED, type="queue")
        yield server


@pytest.fixture(scope="module")
def comers(narrow: Server) -> Iterator[Racers]:
    with Racers(narrow, RACERS) as racers:
        yield racers


def key_of(at: int) -> str:
    return f"Authorization: Bearer {SECRETS[at % 2]}"


def session_request(at: int = 0) -> bytes:
    return request("POST", "/v0/watch", json.dumps({"topics": {WATCHED: {}}}).encode(), headers=(key_of(at),))


def no_sessions(server: Server) -> None:
    """Those that were there have been forgotten, as they are when their time is up and somebody asks for a stream."""
    time.sleep(TTL_MS / 1_000 + 0.05)

    def none_left() -> bool:
        with Wire(server.port) as wire:
            wire.ask(request("GET", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA", headers=(key_of(0),)))
        return metric(server, "topics_watch_sessions", key_of(0)) == 0

    eventually(none_left, every_s=0.05, what="no session")


@pytest.mark.full
@pytest.mark.parametrize("hold", HOLDS)
def test_a_crowd_never_makes_more_sessions_than_there_may_be(narrow: Server, comers: Racers, hold: str | None) -> None:
    """One process keeps them all, so as many as there are places. All come back, whoever left them behind."""
    for _ in range(3):
        no_sessions(narrow)
        answers = comers.volley([session_request(at) for at in range(RACERS)], hold=hold)
        made, _ = split(answers, "max_watch_sessions", SESSIONS)
        assert len(made) == SESSIONS
        assert len({answer["wid"] for answer in made}) == SESSIONS


def test_what_makes_no_session_takes_no_place(narrow: Server) -> None:
    no_sessions(narrow)
    with KeyedWatching(narrow, "http1", SECRETS[0]) as watching:
        for _ in range(SESSIONS):
            assert watching.create("absent").status == 404
            assert watching.create({}).status == 400
        answers = [watching.create(WATCHED) for _ in range(SESSIONS + 1)]
    assert [answer.status for answer in answers] == [200] * SESSIONS + [429]
    assert_capped(answers[-1], "max_watch_sessions", SESSIONS)


def stream_request(at: int, wid: str) -> bytes:
    """A stream of one kind after the other, with one key after the other."""
    if at // 2 % 3 == 0:
        return request("GET", f"/v0/watch/{wid}", headers=(key_of(at), "Accept: text/event-stream"))
    if at // 2 % 3 == 1:
        return request("GET", f"/v0/topics/{WORKED}/work?node=w{at}", headers=(key_of(at), "Accept: text/event-stream"))
    return handshake()[:-2] + f"{key_of(at)}\r\n\r\n".encode()


class Comer:
    """A raw connection that asks for a stream."""

    def __init__(self, at: int, wire: Wire) -> None:
        self.at = at
        self.wire = wire
        self.status = 0

    def take_head(self) -> None:
        self.status, headers = self.wire.head()
        if self.status not in (200, 101):
            self.refusal = Answer(status=self.status, headers=headers, raw=self.wire.body(headers))


def open_streams(server: Server, comers: list[Comer], wids: list[str]) -> list[Comer]:
    """All at once; those that were opened."""
    for comer in comers:
        comer.wire.send(stream_request(comer.at, wids[comer.at % len(wids)]))
    for comer in comers:
        comer.take_head()
    return [comer for comer in comers if comer.status in (200, 101)]


@pytest.mark.full
@pytest.mark.parametrize("ending", ["close", "reset", "both"])
def test_streams_of_all_kinds_and_keys_race_for_the_places(narrow: Server, ending: str) -> None:
    """As many as the server has, no key more than it may have, and each refusal names the cap that was reached."""
    no_sessions(narrow)
    gateways = [f"gateway-{at}" for at in range(GATEWAYS)]
    with ExitStack() as stack:
        owners = [stack.enter_context(KeyedWatching(narrow, "http1", secret)) for secret in SECRETS[:2]]
        for _ in range(3):
            crowd = [Comer(at, stack.enter_context(wire_to(narrow, gateways[at // 2 % GATEWAYS]))) for at in range(18)]
            random.shuffle(crowd)
            wids = [str(owners[at % 2].create(WATCHED)["wid"]) for at in range(SESSIONS)]
            opened = open_streams(narrow, crowd, wids)
            by_key = [sum(comer.at % 2 == key for comer in opened) for key in (0, 1)]
            # Opening a session's stream again takes no place of its own: two comers share one.
            held = [len({_place_of(comer, wids) for comer in opened if comer.at % 2 == key}) for key in (0, 1)]
            assert sum(held) == ALL, by_key
            assert max(held) == EACH
            for comer in crowd:
                if comer.status in (200, 101):
                    continue
                if held[comer.at % 2] < EACH or comer.refusal.detail["limit"] == "max_sse_connections":
                    assert_capped(comer.refusal, "max_sse_connections", ALL)
                else:
                    assert_capped(comer.refusal, "max_sse_connections_per_key", EACH)
            assert metric(narrow, "topics_sse_connections", key_of(0)) <= ALL
            for number, comer in enumerate(crowd):
                if ending == "reset" or (ending == "both" and number % 2):
                    comer.wire.reset()
                else:
                    comer.wire.close()
            no_streams(narrow)
            no_sessions(narrow)


def _place_of(comer: Comer, wids: list[str]) -> object:
    return wids[comer.at % len(wids)] if comer.at // 2 % 3 == 0 else comer.at


def no_streams(server: Server) -> None:
    eventually(lambda: metric(server, "topics_sse_connections", key_of(0)) == 0, what="no stream")


def test_streams_that_come_and_go_stay_within_the_caps(narrow: Server) -> None:
    """A place is given again at the earliest when its holder began to leave, and at the latest soon after."""
    no_streams(narrow)
    every = Account(ALL)
    of_key = [Account(EACH), Account(EACH)]

    def live(seed: int) -> None:
        chance = random.Random(seed)
        for _ in until(2.5):
            at = 2 * chance.choice((1, 2)) + seed % 2  # work streams and sockets
            with Wire(narrow.port) as wire:
                comer = Comer(at, wire)
                wire.send(stream_request(at, ""))
                comer.take_head()
                if comer.status not in (200, 101):
                    assert comer.refusal.refusal == (429, "throttled")
                    continue
                every.came()
                of_key[seed % 2].came()
                wire.sock.settimeout(chance.random() / 50)
                try:
                    wire.sock.recv(1)
                except TimeoutError:
                    pass
                of_key[seed % 2].going()
                every.going()
                if chance.random() < 0.5:
                    wire.reset()

    all_at_once([lambda seed=seed: live(seed) for seed in range(10)])  # type: ignore[misc]
    assert every.highest == ALL
    assert max(account.highest for account in of_key) == EACH
    no_streams(narrow)


def test_the_cap_of_the_server_and_that_of_a_key_are_told_apart(narrow: Server, lane: Lane) -> None:
    no_streams(narrow)
    with ExitStack() as stack:
        working = [stack.enter_context(KeyedWorking(narrow, lane, secret)) for secret in SECRETS]
        for _ in range(EACH):
            working[0].open(WORKED)
        assert_capped(working[0].attempt(WORKED).answer(), "max_sse_connections_per_key", EACH)
        for _ in range(ALL - EACH):
            working[1].open(WORKED)
        for key in (1, 2):
            assert_capped(working[key].attempt(WORKED).answer(), "max_sse_connections", ALL)
        working[0].close()  # its three are free, and only two of them are of use to one key
        streams = [eventually(lambda: _opened(working[2])) for _ in range(EACH)]
        assert len(streams) == EACH
        working[1].close()
        eventually(lambda: metric(narrow, "topics_sse_connections", key_of(0)) == EACH)
        assert_capped(working[2].attempt(WORKED).answer(), "max_sse_connections_per_key", EACH)
    no_streams(narrow)


def _opened(working: KeyedWorking) -> WorkStream | None:
    stream = working.attempt(WORKED)
    return stream if stream.status == 200 else None


@pytest.mark.full
def test_cancelled_streams_of_all_kinds_give_their_places_back(narrow: Server) -> None:
    """Over HTTP/2 the connection goes on, and so do its other streams."""
    no_streams(narrow)
    no_sessions(narrow)
    headers = [(name.lower(), value) for name, value in bearer(SECRETS[0]).items()]
    path = f"/v0/topics/{WORKED}/work?node=w"
    with H2Sockets(narrow.port) as wire, KeyedWatching(narrow, "http2", SECRETS[0]) as watching:
        for _ in range(4):
            session = watching.create(WATCHED)
            watched = watching.open(session, on=Http2Source(wire, owns=False))
            work = wire.open("GET", path, *headers, ("accept", "text/event-stream"), end=True)
            socket = wire.socket(*headers)
            while not wire.streams[work].headers:
                assert wire.receive()
            assert wire.streams[work].headers[":status"] == "200"
            assert_capped(watching.get(path).answer(), "max_sse_connections_per_key", EACH)
            watched.close()
            wire.cancel(work)
            wire.cancel(socket.number)
            no_streams(narrow)
            no_sessions(narrow)


# --- no caps -----------------------------------------------------------------------------------------


def test_zero_is_no_cap(start_server: Start) -> None:
    caps = ("TOPICS", "ROUTERS", "WATCH_SESSIONS", "SSE_CONNECTIONS", "SSE_CONNECTIONS_PER_KEY", "TOTAL_BYTES")
    server = start_server(
        TOPICS_GATEWAYS=GATEWAYS,
        TOPICS_API_KEYS=SECRETS[0],
        TOPICS_MAX_INFLIGHT_PER_KEY=0,
        TOPICS_ELASTIC=0,
        **{f"TOPICS_MAX_{cap}": 0 for cap in caps},
    )
    count = 30
    with Keyed(server.port, "http1", SECRETS[0]) as api, KeyedWatching(server, "http1", SECRETS[0]) as watching:
        for at in range(count):
            assert api.append(f"t{at}", text(100_000)).status == 201
            assert put_router(api, f"r{at}", "t0", f"d{at}").status == 201
        streams = [watching.open(watching.create("t1")) for _ in range(count)]
        assert len(names(api)) == 2 * count
        assert len(list_routers(api, page_size=100)["routers"]) == count
        api.append("t1", "last")
        for stream in streams:
            stream.wait_records("t1", 2)
