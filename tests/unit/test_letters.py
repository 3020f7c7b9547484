"""Dead letters: what a moved record looks like, and moves that fail at each of their steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import Record, examples
from queueplay import House, run

from topics import limits
from topics.actors.messages import Op
from topics.queue.dead_letters import stamped
from topics.shm.counters import Word
from topics.storage.config import TopicConfig, owner_of_name

QUEUE, DEAD = "jobs", "jobs.dead"  # of two shards each has one


def stamp(seq: int = 7, deliveries: int = 3) -> dict[str, Any]:
    return {"$dead_letter_from": "q", "$dead_letter_deliveries": str(deliveries), "$dead_letter_src_seq": str(seq)}


def stamped_q(meta: bytes | None) -> bytes:
    return stamped(meta, source="q", deliveries=3, seq=7)


# --- the stamp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", [None, b"{}", b" { } ", b"{\n}"])
def test_a_record_without_meta_gets_the_stamp_alone(meta: bytes | None) -> None:
    assert json.loads(stamped_q(meta)) == stamp()


@pytest.mark.parametrize(
    "inside",
    [
        b'"a":1',
        b'"a" : 1e2 ,"b":  [1,  2]',
        b'"\\u0061":"\\u00e9", "\xc3\xa9":1.0',
        b'"deep":{"x":{"y":"}"}}',
        b'"dead_letter_from":"no mark"',
    ],
)
def test_what_a_client_wrote_stays_as_it_is(inside: bytes) -> None:
    meta = b"{" + inside + b"}"
    found = stamped_q(meta)
    assert found.startswith(b"{" + inside + b",")
    assert json.loads(found) == {**json.loads(meta), **stamp()}


@pytest.mark.parametrize(
    ("meta", "kept"),
    [
        (stamped(None, source="before", deliveries=9, seq=1), {}),
        (stamped(b'{"a":1}', source="before", deliveries=9, seq=1), {"a": 1}),
        (b'{"$dead_letter_from":"q","$dead_letter_deliveries":2,"$dead_letter_src_seq":4,"a":1}', {"a": 1}),  # older
        (b'{"$dead_letter_from":null,"z":1e2}', {"z": 100.0}),
        (b'{"\\u0024dead_letter_from":"escaped","z":1}', {"z": 1}),
        (b'{"$dead_letter_note":"mine"}', {"$dead_letter_note": "mine"}),
        (b'{"about":"$dead_letter_from","$dead_letter_src_seq":5}', {"about": "$dead_letter_from"}),
        (b'{"deep":{"$dead_letter_from":"inside"}}', {"deep": {"$dead_letter_from": "inside"}}),
    ],
)
def test_what_an_earlier_move_stamped_is_replaced(meta: bytes, kept: dict[str, Any]) -> None:
    assert json.loads(stamped_q(meta)) == {**kept, **stamp()}


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_keys = st.text(max_size=6) | st.sampled_from([*stamp(), "$dead_letter_", "$dead_letter_x"])


@examples(200)
@given(meta=st.dictionaries(_keys, _json, max_size=5), spaces=st.booleans(), ascii_only=st.booleans())
def test_any_meta(meta: dict[str, Any], spaces: bool, ascii_only: bool) -> None:
    text = json.dumps(meta, indent=1 if spaces else None, ensure_ascii=ascii_only).encode()
    assert json.loads(stamped_q(text)) == {**meta, **stamp()}


# --- moves -------------------------------------------------------------------------------------------


def play(tmp_path: Path, script: Any, **settings: Any) -> None:
    run(tmp_path, script, shards=2, **settings)


def make(house: House, jobs: int = 1, **config: Any) -> None:
    assert owner_of_name(QUEUE, 2) != owner_of_name(DEAD, 2)
    config = {"max_deliveries": 1, "dead_letter": DEAD, **config}
    house.make(QUEUE, **config)
    house.owner(QUEUE).shard.append(
        QUEUE, [Record(b"%d" % number, tag=f"t{number}", node="n", meta=b'{"m":1}') for number in range(1, jobs + 1)]
    )


async def wear_out(house: House, jobs: int = 1) -> None:
    """Delivered as often as the queue allows; the next claim moves it."""
    claimed = await house.claim(QUEUE, "w", jobs, 100)
    assert len(claimed) == jobs
    await house.pass_time(200)


def letters(house: House) -> list[int]:
    return house.live(DEAD) if DEAD in house.owner(DEAD).engine.topics else []


def refusals(house: House) -> int:
    assert house.queue is not None
    return sum(text == "dead letters refused" for text, _ in house.queue.warnings)


def nothing_is_kept(house: House) -> None:
    asks = house.coordinator._asks
    assert not any(asks._waiting), "answers that nobody takes"
    assert not any(asks._called)


def test_a_move(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        make(house, 3, durability="memory")
        await wear_out(house, 3)
        assert await house.counts(QUEUE) == (3, 0, 0)
        assert await house.claim(QUEUE, "w", 2) == [], "not delivered once more"
        await house.settle()
        moved = house.owner(DEAD).shard.everything(DEAD)
        assert [stored.record.data for stored in moved] == [b"1", b"2", b"3"]
        for number, stored in enumerate(moved, 1):
            assert (stored.record.tag, stored.record.node) == (f"t{number}", "n")
            expected = {
                "m": 1,
                "$dead_letter_from": QUEUE,
                "$dead_letter_deliveries": "1",
                "$dead_letter_src_seq": str(number),
            }
            assert json.loads(stored.record.meta or b"") == expected
        assert house.owner(DEAD).shard.topic(DEAD).config.durability == "memory", "its queue's class"
        assert house.live(QUEUE) == []
        assert await house.counts(QUEUE) == (0, 0, 3)
        nothing_is_kept(house)

    play(tmp_path, script)


async def until_done(house: House, sink: Any) -> None:
    """Rounds of everyone until this is answered, and no more."""
    for _ in range(100):
        await house.rest()
        if sink.done:
            return
        for process in house._everyone():
            process.round()
    raise AssertionError("no answer")


def test_a_claim_is_answered_when_its_dead_letters_are_there(tmp_path: Path) -> None:
    """What the answer implies is what the next read shows."""

    async def script(house: House) -> None:
        make(house, 3)
        await wear_out(house, 3)
        claim = house.gateway.claim(QUEUE, "w", 2)
        await until_done(house, claim)
        assert claim.value.jobs == []
        assert (house.live(QUEUE), letters(house)) == ([], [1, 2, 3])
        words = house.process.context.row.words
        assert (words[Word.DEAD_LETTERED], words[Word.LEASES], words[Word.JOBS_CLAIMED]) == (3, 0, 3)
        assert await house.counts(QUEUE) == (0, 0, 3)
        nothing_is_kept(house)

    play(tmp_path, script)


def test_a_claim_does_not_wait_for_dead_letters_that_are_refused(tmp_path: Path) -> None:
    """Neither for the first try, longer than it takes, nor for a later one."""

    async def script(house: House) -> None:
        make(house, 2, auto_create=False)
        await wear_out(house, 1)
        await until_done(house, house.gateway.claim(QUEUE, "w", 1, 100))  # the other job
        assert refusals(house) == 1
        await house.pass_time(200, step_ms=200)
        claim = house.gateway.claim(QUEUE, "w", 1)  # while the queue pauses before it tries again
        await until_done(house, claim)
        assert claim.value.jobs == []
        assert letters(house) == []

    play(tmp_path, script)


def test_a_claim_does_not_wait_for_ever_for_its_dead_letters(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        make(house, 2)
        await wear_out(house, 1)
        house.owner(DEAD).links["queue"].allowed = 0  # its shard hears nothing
        claim = house.gateway.claim(QUEUE, "w", 1)
        await house.settle()
        assert not claim.done
        await house.pass_time(1_100)
        assert [job.seq for job in claim.value.jobs] == [2]
        house.release()
        await house.settle()
        assert letters(house) == [1]
        nothing_is_kept(house)

    play(tmp_path, script)


@pytest.mark.parametrize("after", range(14))
@pytest.mark.parametrize("who", ["queue's shard", "dead letters' shard", "queue"])
@pytest.mark.parametrize("durable", [False, True])
def test_a_death_after_each_message_of_a_move(tmp_path: Path, who: str, after: int, durable: bool) -> None:
    """Two jobs go there once, and are counted once."""

    async def script(house: House) -> None:
        make(house, 2, leases_durable=durable)
        await wear_out(house, 2)
        source, target = house.owner(QUEUE), house.owner(DEAD)
        house.hold()
        claim = house.gateway.claim(QUEUE, "w", 5)
        await house.step((house.queue, "gateway-0"))
        hops = [(source, "queue"), (house.queue, source.name), (target, "queue"), (house.queue, target.name)]
        done = 0
        for turn in range(200):
            if done == after:
                break
            if house.let(*hops[turn % 4], 1):
                done += 1
            await house.rest()
        if who == "queue":
            await house.queue_dies_and_returns()
        else:
            number = house.shards.index(source if who == "queue's shard" else target)
            house.shard_dies(number)
            await house.rest()
            house.shard_returns(number)
        house.release()
        await house.pass_time(3_000)
        assert claim.done
        house.gateway.claim(QUEUE, "w", 5)
        await house.pass_time(3_000)
        assert sorted(letters(house)) == [1, 2]
        assert house.live(QUEUE) == []
        assert await house.counts(QUEUE) == (0, 0, 2)
        await house.pass_time(100)
        await house.queue_dies_and_returns()
        assert await house.counts(QUEUE) == (0, 0, 2), "and the next one knows"
        nothing_is_kept(house)

    play(tmp_path, script)


@pytest.mark.parametrize("why", ["full", "not to be made", "too large", "away"])
def test_a_move_that_is_refused_is_tried_again(tmp_path: Path, why: str) -> None:
    """With pauses that grow; meanwhile the job is nobody's."""

    async def script(house: House) -> None:
        make(house, 1, auto_create=why != "not to be made")
        target = house.owner(DEAD)
        if why == "full":
            target.shard.put(DEAD, TopicConfig(cap_records=1, discard="reject"))
            target.shard.append(DEAD, [Record(b"0")])
        elif why == "too large":
            target.shard.put(DEAD, TopicConfig(cap_bytes=20, discard="reject"))
        elif why == "away":
            house.shard_dies(house.shards.index(target))
        await wear_out(house)
        assert await house.claim(QUEUE, "w") == []
        times = []
        for ms in range(0, 70_000, 100):
            before = refusals(house)
            await house.pass_time(100)
            times += [ms] * (refusals(house) - before)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert gaps[:5] == pytest.approx([1_000, 2_000, 4_000, 8_000, 16_000], abs=200)
        assert max(gaps) <= 30_200
        assert await house.counts(QUEUE) == (0, 0, 0)
        assert await house.claim(QUEUE, "w") == []
        assert house.live(QUEUE) == [1]
        nothing_is_kept(house)
        if why == "full":
            target.shard.delete(DEAD, before_seq=2)
        elif why == "away":
            house.shard_returns(house.shards.index(target))
        else:
            target.shard.put(DEAD, TopicConfig())
        await house.pass_time(31_000, step_ms=500)
        assert letters(house) == [1]
        assert await house.counts(QUEUE) == (0, 0, 1)

    play(tmp_path, script)


def test_a_queue_that_becomes_more_patient_delivers_again(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        make(house, 1, auto_create=False)
        await wear_out(house)
        assert await house.claim(QUEUE, "w") == []
        await house.pass_time(5_000)
        assert await house.counts(QUEUE) == (0, 0, 0)
        config = TopicConfig(type="queue", max_deliveries=5, dead_letter=DEAD, auto_create=False)
        house.owner(QUEUE).shard.put(QUEUE, config)
        await house.settle()
        assert await house.counts(QUEUE) == (1, 0, 0), "at once"
        assert [(job.seq, job.deliveries) for job in await house.claim(QUEUE, "w")] == [(1, 2)]
        nothing_is_kept(house)

    play(tmp_path, script)


@pytest.mark.parametrize("how", ["one", "all"])
def test_jobs_that_are_deleted_while_they_wait_to_be_moved(tmp_path: Path, how: str) -> None:
    async def script(house: House) -> None:
        make(house, 2, auto_create=False)
        await wear_out(house, 2)
        assert await house.claim(QUEUE, "w") == []
        await house.pass_time(1_000)
        if how == "one":
            house.owner(QUEUE).shard.delete(QUEUE, tag="t1")
        else:
            house.owner(QUEUE).shard.drop(QUEUE)
        house.owner(DEAD).shard.put(DEAD, TopicConfig())
        await house.pass_time(3_000)
        if how == "one":
            assert letters(house) == [2]
            assert await house.counts(QUEUE) == (0, 0, 1)
        else:
            assert letters(house) == []
        assert house.coordinator._letters._moving == {}
        nothing_is_kept(house)

    play(tmp_path, script)


def test_what_never_fits_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEAD_LETTER_BATCH", 2)

    async def script(house: House) -> None:
        make(house, 0)
        large = [Record(b'"%b"' % (b"x" * 2_000)) for _ in range(4)]
        house.owner(QUEUE).shard.append(QUEUE, large)
        house.owner(QUEUE).shard.append(QUEUE, [Record(b"%d" % number) for number in range(5, 8)])
        house.owner(DEAD).shard.put(DEAD, TopicConfig(cap_bytes=1_500, discard="reject"))
        await wear_out(house, 7)
        await house.claim(QUEUE, "w", 10)
        await house.pass_time(10_000)
        assert sorted(letters(house)) == [5, 6, 7]
        assert await house.counts(QUEUE) == (0, 0, 3)
        nothing_is_kept(house)

    play(tmp_path, script)


def test_what_could_not_be_moved_costs_nothing(tmp_path: Path) -> None:
    """Jobs are read for a move; if nothing comes of it nobody keeps them."""

    async def script(house: House) -> None:
        make(house, 30)
        await wear_out(house, 30)
        house.shard_dies(house.shards.index(house.owner(DEAD)))
        await house.claim(QUEUE, "w", 1)
        await house.pass_time(5_000)
        nothing_is_kept(house)
        house.shard_returns(house.shards.index(house.owner(DEAD)))
        await house.pass_time(20_000, step_ms=500)
        assert sorted(letters(house)) == list(range(1, 31))

    play(tmp_path, script)


def test_an_append_that_came_but_was_not_answered_is_not_repeated(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        make(house, 1)
        await wear_out(house)
        target = house.owner(DEAD)
        house.hold()
        house.gateway.claim(QUEUE, "w", 5)
        for _ in range(4):
            for owner, peer in [(house.queue, "gateway-0"), (house.owner(QUEUE), "queue")]:
                await house.step((owner, peer))
            await house.step((house.queue, house.owner(QUEUE).name))
        assert target.links["queue"].peek() == [Op.APPEND]
        house.let(target, "queue")
        assert letters(house) == [1]
        house.shard_dies(house.shards.index(target))
        await house.rest()
        house.shard_returns(house.shards.index(target))
        house.release()
        await house.pass_time(5_000)
        assert letters(house) == [1]
        assert await house.counts(QUEUE) == (0, 0, 1)

    play(tmp_path, script)
