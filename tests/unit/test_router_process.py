"""The router process, message by message: its commands, its forwarders, and what it does when others die."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from model import EXHAUSTIVE, examples
from pipeshard import numbers
from routerplay import Play, run

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError, being_rebuilt
from topics.storage.config import TopicConfig

Script = Callable[[Play], Awaitable[None]]


def on_stage(tmp_path: Path, script: Script, **settings: Any) -> None:
    run(tmp_path, script, **settings)


def ints(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# --- a life without incidents ------------------------------------------------------------------------


def test_a_router_is_made_and_copies(tmp_path: Path) -> None:
    async def script(play: Play) -> None:
        row = await play.put("r", "s", "d")
        assert (row.created, row.router, row.source, row.dest) == (True, "r", "s", "d")
        play.shard.append("s", numbers(1, 3))
        await play.drain()
        assert [play.shard.report(topic).last_read_ts for topic in "sd"] == [None, None], "a router is no reader"
        assert play.shard.data("d") == ints(1, 3)
        assert await play.total("r") == 3
        assert (play.routers, play.counted) == (["r"], 1)

    on_stage(tmp_path, script)


def test_who_is_up_to_date_asks_for_nothing(tmp_path: Path) -> None:
    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        play.shard.append("s", numbers(1, 3))
        await play.settle()
        asked = len(play.asked)
        for _ in range(100):
            play.clock.jump(1)
            await play.turn()
        assert play.asked[asked:] == []

    on_stage(tmp_path, script)


def test_one_append_is_one_read_and_one_forward(tmp_path: Path) -> None:
    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        await play.put("q", "s", "e")
        await play.settle()
        asked = len(play.asked)
        play.shard.append("s", numbers(1, 3))
        await play.drain()
        play.clock.jump(1)
        await play.settle()
        assert sorted(play.asked[asked:]) == sorted([Op.READ_RAW, Op.FORWARD, Op.FORWARD]), "the read is shared"

    on_stage(tmp_path, script)


# --- pushes that come at a bad moment ----------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, 10])
@pytest.mark.parametrize("together", [True, False])
def test_a_push_that_comes_with_the_answer_of_the_follow(tmp_path: Path, cap: int, together: bool) -> None:
    """Whether the batch is taken or only a part of it: nobody sleeps on what is there, and nobody turns in circles."""

    async def script(play: Play) -> None:
        shard = play.shard
        shard.put("d", TopicConfig(cap_records=cap, discard="reject" if cap else "old"))
        await play.put("r", "s", "d")
        while Op.FOLLOW_HEAD not in play.asked:
            await play.rest()
            assert play.serve(1)
            if Op.FOLLOW_HEAD not in play.asked:
                await play.deliver()
        shard.append("s", numbers(1, 25))
        play.serve(0)  # the push, behind the answer
        assert len(play.link.answered) == 2
        await play.deliver(None if together else 1)
        if cap:
            await play.pass_time(3)
            assert shard.data("d") == ints(1, 10)
            shard.delete("d", before_seq=11)
            await play.pass_time(3)
            assert shard.data("d") == ints(11, 10)
            shard.put("d", TopicConfig())
        await play.settle()
        assert shard.data("d")[-1:] == [b"25"]
        asked = len(play.asked)
        for _ in range(50):
            play.clock.jump(0.1)
            await play.turn()
        assert play.asked[asked:] == [], "it is idle"

    on_stage(tmp_path, script)


# --- totals ------------------------------------------------------------------------------------------


def test_a_total_never_goes_back(tmp_path: Path) -> None:
    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        play.shard.append("s", numbers(1, 5))
        await play.settle()
        await play.put("r", "s", "d", guarantee="exactly_once")
        assert await play.total("r") == 5, "changed"
        await play.put("q", "s", "d")
        assert (await play.total("r"), await play.total("q")) == (5, 0), "another of the same pair"
        await play.settle()
        assert await play.total("r") == 5

    on_stage(tmp_path, script)


# --- deaths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["shard", "router"])
@pytest.mark.parametrize("after", range(8))
def test_a_death_after_each_message(tmp_path: Path, who: str, after: int) -> None:
    """Of a forward: the other side goes on, nothing is missing and nothing is there twice."""

    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        await play.settle()
        play.shard.append("s", numbers(1, 3))
        for step in range(after):
            if step % 2:
                await play.deliver()
            else:
                await play.rest()
                play.serve(1)
        before = {} if play.shard.topic("d").rebuilding else play.shard.seqs("d")
        await (play.crash_shard() if who == "shard" else play.crash_router())
        await play.settle()
        assert play.shard.data("d") == ints(1, 3)
        assert play.shard.seqs("d").items() >= before.items()
        play.shard.append("s", numbers(4, 2))
        await play.settle()
        assert play.shard.seqs("d") == {number: b"%d" % number for number in range(1, 6)}
        assert await play.total("r") == 5

    on_stage(tmp_path, script)


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("who", ["shard", "router"])
def test_a_death_in_the_middle_of_a_command(tmp_path: Path, who: str, after: int) -> None:
    """The rule is there or not; if it is, it works; and the command can be repeated."""

    async def script(play: Play) -> None:
        await play.put("old", "s", "d")
        play.shard.append("s", numbers(1, 3))
        await play.settle()
        outcome: list[Any] = []

        async def change() -> None:
            try:
                outcome.append(await play.router._put(_request("new", "s", "d")))
            except (ApiError, Exception) as error:
                outcome.append(error)

        play._nursery.start_soon(change)
        for step in range(after):
            if step % 2:
                await play.deliver()
            else:
                await play.rest()
                play.serve(1)
        await (play.crash_shard() if who == "shard" else play.crash_router())
        await play.settle()
        assert play.shard.data("d") == ints(1, 3)
        there = "new" in play.routers
        if outcome and not isinstance(outcome[0], Exception):
            assert there
        play.shard.append("s", numbers(4, 1))
        await play.settle()
        assert play.shard.data("d") == ints(1, 3) + [b"4"] * (2 if there else 1)
        again = await play.put("new", "s", "d")
        assert again.created is not there
        play.shard.append("s", numbers(5, 1))
        await play.settle()
        assert play.shard.data("d")[-2:] == [b"5", b"5"]

    on_stage(tmp_path, script)


def _request(router: str, source: str, dest: str) -> Any:
    return messages.PutRouter(router, source, dest, True, True, True, None, False, "at_least_once")


def test_topics_that_go(tmp_path: Path) -> None:
    async def script(play: Play) -> None:
        for source, dest in (("a", "b"), ("b", "c"), ("b", "d"), ("x", "y")):
            await play.put(f"{source}->{dest}", source, dest)
        play.shard.append("a", numbers(1, 3))
        await play.settle()
        assert await play.drop_topic("b") == ["a->b", "b->c", "b->d"]
        assert (play.routers, play.counted) == (["x->y"], 1)
        await play.settle()
        assert play.shard.data("c") == ints(1, 3)
        play.shard.append("b", numbers(7, 1))
        play.shard.append("a", numbers(7, 1))
        await play.settle()
        assert play.shard.data("c") == ints(1, 3)

    on_stage(tmp_path, script)


@pytest.mark.parametrize("router", ["q", "x"])
@pytest.mark.parametrize(("source", "dest"), [("s", "e"), ("s", "d"), ("e", "s")])
def test_a_router_of_the_next_life_stays(tmp_path: Path, source: str, dest: str, router: str) -> None:
    """It was made before the router process was told that the life before had ended."""

    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        await play.settle()
        play.shard.drop("s")
        play.shard.put("s", TopicConfig())
        assert (await play.put(router, source, dest)).created
        dropped = await play.command(play.router._drop_of, messages.DropRoutersOf("s"))
        assert dropped.routers == ["r"]
        await play.settle()
        assert play.routers == [router]
        play.shard.append(source, numbers(1, 3))
        await play.settle()
        assert play.shard.data(dest) == ints(1, 3)
        assert await play.total(router) == 3

    on_stage(tmp_path, script)


@pytest.mark.parametrize("made_again", [True, False])
@pytest.mark.parametrize("topic", ["s", "d"])
def test_a_router_that_is_put_again_is_bound_to_the_topics_of_now(tmp_path: Path, topic: str, made_again: bool) -> None:
    """The router process has not been told that the life before had ended; what a PUT has answered stays."""

    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        await play.put("other", "s", "e")
        await play.settle()
        play.shard.drop(topic)
        if made_again:
            play.shard.put(topic, TopicConfig())
        assert (await play.put("r", "s", "d")).created
        dropped = await play.command(play.router._drop_of, messages.DropRoutersOf(topic))
        assert dropped.routers == (["other", "r"] if topic == "s" else ["r"])
        await play.settle()
        assert play.routers == (["r"] if topic == "s" else ["other", "r"])
        play.shard.append("s", numbers(1, 3))
        await play.settle()
        assert play.shard.data("d") == ints(1, 3)
        again = await play.put("r", "s", "d")
        assert not again.created

    on_stage(tmp_path, script)


@pytest.mark.parametrize("router", ["r", "q"])
def test_a_topic_has_no_source_from_its_life_before(tmp_path: Path, router: str) -> None:
    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        await play.settle()
        play.shard.drop("d")
        play.shard.put("d", TopicConfig())
        assert (await play.put(router, "x", "d")).created
        await play.settle()
        assert play.routers == [router]

    on_stage(tmp_path, script)


def test_a_life_that_ended_while_nobody_was_told_is_made_up_for(tmp_path: Path) -> None:
    """The gateway died between the two steps, the source is idle, and a client deletes the topic once more."""

    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        await play.settle()
        play.shard.drop("d")
        await play.settle()
        assert play.routers == ["r"]
        assert await play.drop_topic("d") == ["r"]
        assert play.routers == []

    on_stage(tmp_path, script)


@pytest.mark.parametrize("topic", ["s", "d"])
def test_a_topic_that_went_while_nobody_was_there_to_hear_it(tmp_path: Path, topic: str) -> None:
    async def script(play: Play) -> None:
        await play.put("r", "s", "d")
        play.shard.append("s", numbers(1, 3))
        await play.settle()
        play.shard.drop(topic)
        play.shard.put(topic, TopicConfig())
        await play.crash_router()
        await play.settle()
        assert play.routers == []
        play.shard.append("s", numbers(4, 1))
        await play.settle()
        assert play.shard.data("d") == (ints(1, 3) if topic == "s" else [])
        assert play.shard.topic("d").pipe is None

    on_stage(tmp_path, script)


# --- any order of everything -------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("ab"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["serve", "deliver", "serve", "deliver"]), st.just(""), st.integers(1, 3)),
        st.tuples(st.just("time"), st.just(""), st.sampled_from([1, 20, 1_000])),
        st.tuples(st.just("crash"), st.sampled_from(["shard", "router"]), st.just(0)),
        st.tuples(st.sampled_from(["flush", "checkpoint"]), st.sampled_from("bcd"), st.just(0)),
        st.tuples(st.just("change"), st.sampled_from(["a->b", "a->c", "b->d"]), st.integers(0, 1)),
    ),
    max_size=40,
)


@pytest.mark.timeout(3_600 if EXHAUSTIVE else 1_200)
@examples(60)
@given(events=EVENTS)
def test_any_order(tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str, int]]) -> None:
    """a -> b -> d and a -> c; only a is written to behind them. In the end all have what a has, in its order, and no
    seq has ever meant two things."""
    seen: dict[tuple[str, int], bytes] = {}

    async def script(play: Play) -> None:
        for arrow in ("a->b", "a->c", "b->d"):
            await play.put(arrow, arrow[0], arrow[-1])
        written = 0

        def look() -> None:
            for topic in "bcd":
                if not play.shard.topic(topic).rebuilding:
                    for seq, data in play.shard.seqs(topic).items():
                        assert seen.setdefault((topic, seq), data) == data

        for action, name, size in events:
            await play.rest()
            if action == "append":
                play.shard.append("a", numbers(written, size))
                written += size
            elif action == "serve":
                play.serve(size)
            elif action == "deliver":
                await play.deliver(size)
            elif action == "time":
                play.clock.jump(size / 1_000)
            elif action == "flush":
                play.shard.flush(name)
            elif action == "checkpoint":
                play.shard.checkpoint()
            elif action == "crash":
                await (play.crash_shard() if name == "shard" else play.crash_router())
            else:
                guarantee = ("at_least_once", "exactly_once")[size]
                outcome = await play.put(name, name[0], name[-1], guarantee=guarantee)
                assert not isinstance(outcome, ApiError) or outcome.code == "shard_unavailable", outcome
            look()
        await play.settle()
        look()
        for topic in "bcd":
            assert play.shard.data(topic) == ints(0, written), topic
            assert list(play.shard.seqs(topic)) == list(range(1, written + 1))
        assert play.routers == ["a->b", "a->c", "b->d"]
        for router in play.routers:
            assert await play.total(router) == written

    run(tmp_path_factory.mktemp("play"), script)


# --- rings that are closed and opened ----------------------------------------------------------------


def loaded(play: Play, topic: str) -> list[bytes]:
    """Have something written to a topic before each round of the shard; returns what was."""
    written: list[bytes] = []
    serve = play.serve

    def serve_loaded(most: int | None = None) -> int:
        if len(written) < 200 and not play.shard.topic(topic).rebuilding:
            made = numbers(len(written), 1)
            play.shard.append(topic, made)
            written.extend(record.data for record in made)
            play.clock.jump(0.01)
        return serve(most)

    play.serve = serve_loaded  # type: ignore[method-assign]
    return written


def test_a_ring_that_is_closed_under_load_brings_nothing_back(tmp_path: Path) -> None:
    async def script(play: Play) -> None:
        await play.put("s->d", "s", "d")
        written = loaded(play, "s")
        await play.turn()
        row = await play.put("d->s", "d", "s", allow_cycle=True)
        assert row.created
        await play.drain()
        await play.settle()
        assert len(written) == 200
        assert play.shard.data("s") == written
        assert play.shard.data("d") == written
        play.shard.append("d", numbers(1_000, 1))
        await play.settle()
        assert play.shard.data("s") == play.shard.data("d") == [*written, b"1000"]

    on_stage(tmp_path, script)


@pytest.mark.parametrize("who", [None, "shard", "router"])
def test_a_ring_that_is_opened_brings_nothing_back(tmp_path: Path, who: str | None) -> None:
    """What d wrote itself is in s, and the router that leads on from there has not come to it yet, for d is full. The
    process may die when the rule is out of the file and nobody else has been told."""

    async def script(play: Play) -> None:
        full = TopicConfig(cap_records=4, discard="reject")
        play.shard.put("d", full)
        for router in ("s->d", "d->s"):
            await play.put(router, router[0], router[-1], allow_cycle=True)
        play.shard.append("s", numbers(1, 1))
        play.shard.append("d", numbers(2, 4))
        await play.pass_time(2)
        assert (play.shard.data("s"), play.shard.data("d")) == (ints(1, 5), ints(2, 4))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(play.router._drop, messages.DropRouter("d->s"))
            await play.rest()
            while play.routers != ["s->d"]:
                if not await play.turn():
                    play.clock.jump(0.05)
            if who is not None:
                await (play.crash_shard() if who == "shard" else play.crash_router())
                nursery.cancel_scope.cancel()
            await play.pass_time(2)
        play.shard.put("d", TopicConfig())
        play.shard.append("s", numbers(6, 2))
        await play.settle()
        assert play.shard.data("s") == ints(1, 7)
        assert play.shard.data("d") == [b"2", b"3", b"4", b"5", b"1", b"6", b"7"]

    on_stage(tmp_path, script)


def test_a_ring_is_not_closed_while_a_shard_of_it_is_away(tmp_path: Path) -> None:
    """What it has copied can't be told from what it has not; the others go on as before."""

    async def script(play: Play) -> None:
        await play.put("s->d", "s", "d")
        await play.put("d->e", "d", "e")
        play.shard.append("s", numbers(1, 5))
        await play.settle()
        close = play.router._close

        async def away(pipe: messages.PipeRow, *, keep: bool) -> int:
            if pipe.topic == "e":
                raise being_rebuilt("e")
            return await close(pipe, keep=keep)

        play.router._close = away  # type: ignore[method-assign]
        refused = await play.put("e->s", "e", "s", allow_cycle=True)
        assert isinstance(refused, ApiError)
        assert refused.code == "shard_unavailable"
        assert play.routers == ["d->e", "s->d"]
        play.router._close = close  # type: ignore[method-assign]
        play.shard.append("s", numbers(6, 1))
        await play.settle()
        assert play.shard.data("s") == play.shard.data("d") == play.shard.data("e") == ints(1, 6)
        assert (await play.put("e->s", "e", "s", allow_cycle=True)).created
        play.shard.append("e", numbers(7, 1))
        await play.settle()
        assert play.shard.data("s") == play.shard.data("d") == play.shard.data("e") == ints(1, 7)

    on_stage(tmp_path, script)


TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("abc"), st.integers(1, 4)),
        st.tuples(st.just("append"), st.sampled_from("abc"), st.integers(1, 4)),
        st.tuples(st.sampled_from(["serve", "deliver"]), st.just(""), st.integers(1, 4)),
        st.tuples(st.just("time"), st.just(""), st.sampled_from([1, 20, 1_000])),
        st.tuples(st.just("crash"), st.sampled_from(["shard", "router"]), st.just(0)),
        st.tuples(st.sampled_from(["flush", "checkpoint"]), st.sampled_from("abc"), st.just(0)),
        st.tuples(
            st.sampled_from(["put", "put", "drop"]),
            st.sampled_from(["a->b", "b->c", "c->a", "b->a"]),
            st.integers(0, 12),
        ),
    ),
    max_size=40,
)


@pytest.mark.timeout(3_600 if EXHAUSTIVE else 1_200)
@examples(40)
@given(turns=TURNS)
def test_rings_come_and_go(tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str, int]]) -> None:
    """Whatever is closed, opened and killed, also while something is written: no topic has a record twice."""

    async def script(play: Play) -> None:
        written = busy = 0
        serve = play.serve

        def serve_busily(most: int | None = None) -> int:
            nonlocal written, busy
            topic = "abc"[busy % 3]
            if busy and not play.shard.topic(topic).rebuilding:
                play.shard.append(topic, numbers(written, 1))
                play.clock.jump(0.01)
                written, busy = written + 1, busy - 1
            return serve(most)

        play.serve = serve_busily  # type: ignore[method-assign]

        def look() -> None:
            for topic in "abc":
                if not play.shard.topic(topic).rebuilding:
                    data = play.shard.data(topic)
                    assert len(data) == len(set(data)), f"{topic}: {data}"

        for topic in "abc":
            play.shard.put(topic, TopicConfig())
        for router in ("a->b", "b->c"):
            await play.put(router, router[0], router[-1])
        for action, name, size in turns:
            await play.rest()
            if action == "append":
                if not play.shard.topic(name).rebuilding:
                    play.shard.append(name, numbers(written, size))
                    written += size
            elif action == "serve":
                play.serve(size)
            elif action == "deliver":
                await play.deliver(size)
            elif action == "time":
                play.clock.jump(size / 1_000)
            elif action == "flush":
                play.shard.flush(name)
            elif action == "checkpoint":
                play.shard.checkpoint()
            elif action == "crash":
                await (play.crash_shard() if name == "shard" else play.crash_router())
            else:
                busy = size
                if action == "put":
                    await play.put(name, name[0], name[-1], allow_cycle=True)
                else:
                    await play.drop(name)
            look()
        busy = 0
        await play.settle()
        look()

    run(tmp_path_factory.mktemp("play"), script)
