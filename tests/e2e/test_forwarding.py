"""What routers copy: every record of the source once, in its order, as it was; filters, loops, room, and what is lost.

Copies come behind the answer to the writer, so a test waits for them; what must not come is shown by what came later.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import livefiles
import pytest

from topics.actors.inspect.attach import open_board
from topics.actors.startup.datadir_lock import read_lock_info
from topics.shm.counters import Word

from .client import Client, unique
from .routing import (
    WITHIN_S,
    data_of,
    drained,
    drop_router,
    name_on,
    pass_through,
    put_router,
    read,
    route,
    wait_data,
    wait_forwarded,
    wait_head,
    wait_records,
)
from .server import Server, eventually
from .sockets import Socket, dialling
from .sse import Watching

pytestmark = pytest.mark.e2e

Start = Callable[..., Server]
CLASSES = ("fsync", "disk", "memory", "ephemeral")
KIB = 1024
MIB = 1024 * KIB


@pytest.fixture
def a() -> str:
    return unique("fa")


@pytest.fixture
def b() -> str:
    return unique("fb")


@pytest.fixture
def c() -> str:
    return unique("fc")


# --- what a copy is ----------------------------------------------------------------------------------


def test_a_copy_is_the_record_with_a_seq_and_time_of_its_own(api: Client, a: str, b: str) -> None:
    api.append(b, "first")
    route(api, a, b)
    before = api.state(b)["last_write_ts"]
    records: list[dict[str, Any]] = [
        {"data": {"x": [1, None]}, "tag": "t", "node": "n", "meta": {"m": {"k": 1}}},
        {"data": None},
        {"data": "only tag", "tag": "*"},
        {"data": "only node", "node": "é→"},
        {"data": "only meta", "meta": {}},
    ]
    api.append_records(a, records)
    copies = wait_records(api, b, 6)[1:]
    originals = read(api, a)
    assert [record["$seq"] for record in copies] == [2, 3, 4, 5, 6]
    for original, copied in zip(originals, copies, strict=True):
        assert copied["$ts"] >= max(original["$ts"], before)
        kept = {name: value for name, value in original.items() if name not in ("$seq", "$ts")}
        assert {name: value for name, value in copied.items() if name not in ("$seq", "$ts")} == kept
    assert (copies[0]["$tag"], copies[0]["$node"], copies[0]["meta"]) == ("t", "n", {"m": {"k": 1}})


def test_bytes_are_copied_as_they_were_sent(api: Client, a: str, b: str) -> None:
    route(api, a, b, name=f"{a}.1")
    route(api, a, b, name=f"{a}.2", preserve_tag=False)
    data, meta = rb'{"b": 1.50,  "a":[1E+2 , -0], "u":"\u00e9\/"}', rb'{ "k":1.0,"k" : 12345678901234567890 }'
    body = b'{"records":[{"data":%b,"tag":"x","meta":%b}]}' % (data, meta)
    api.send("POST", f"/v0/topics/{a}", content=body)
    wait_records(api, b, 2)
    raw = api.diff(b, include_meta=True).raw
    assert raw.count(data) == 2
    assert raw.count(meta) == 2


@pytest.mark.parametrize(("node", "tag"), [(True, False), (False, True), (False, False)])
def test_what_is_not_preserved_is_not_there(api: Client, a: str, b: str, node: bool, tag: bool) -> None:
    route(api, a, b, preserve_node=node, preserve_tag=tag)
    api.append_records(a, [{"data": 1, "tag": "t", "node": "n", "meta": {"m": 1}}, {"data": 2}], node="whole")
    first, second = wait_records(api, b, 2)
    assert first.get("$node") == ("n" if node else None)
    assert second.get("$node") == ("whole" if node else None)
    assert first.get("$tag") == ("t" if tag else None)
    assert (first["meta"], first["data"], second["data"]) == ({"m": 1}, 1, 2)
    assert ("$node" in first, "$tag" in first) == (node, tag)
    api.delete(b, match="t")
    assert data_of(api, b) == ([2] if tag else [1, 2])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, ["none", "a", "a:", "a:b", "a:b:c", "b", "A:b", "*"]),
        (["tag", "Eq", "a:b"], ["a:b"]),
        ("a:b", ["a:b"]),
        (["tag", "Eq", "*"], ["*"]),
        (["tag", "Glob", "a:*"], ["a:", "a:b", "a:b:c"]),
        (["tag", "Glob", "a*"], ["a", "a:", "a:b", "a:b:c"]),
        (["tag", "Glob", "*"], ["a", "a:", "a:b", "a:b:c", "b", "A:b", "*"]),
        (["tag", "Glob", "no*"], []),
    ],
)
def test_filters(api: Client, a: str, b: str, pattern: object, expected: list[str]) -> None:
    route(api, a, b, filter=pattern)
    tags = ["a", "a:", "a:b", "a:b:c", "b", "A:b", "*"]
    api.append_records(a, [{"data": "none"}, *({"data": tag, "tag": tag} for tag in tags)])
    last = {"data": "last", "tag": pattern[2] if isinstance(pattern, list) else pattern or "x"}
    api.append_records(a, [last])
    wait_data(api, b, [*expected, "last"])


def test_only_what_came_after_the_router(api: Client, a: str, b: str, c: str) -> None:
    api.append(a, *range(10))
    route(api, a, b)
    api.append(a, 10)
    route(api, a, c)
    api.append(a, 11)
    wait_data(api, b, [10, 11])
    wait_data(api, c, [11])


def test_a_second_router_of_a_pair_begins_when_it_is_made(api: Client, a: str, b: str) -> None:
    """Also if the pipe between the two stands further back by then."""
    api.put(b, cap_records=2, discard="reject")
    route(api, a, b, name=f"{a}.1")
    api.append(a, 1, 2)
    wait_data(api, b, [1, 2])
    api.append(a, 3, 4)
    route(api, a, b, name=f"{a}.2", preserve_tag=False)
    api.append_records(a, [{"data": 5, "tag": "x"}])
    api.put(b)
    copies = wait_records(api, b, 6)
    assert [record["data"] for record in copies] == [1, 2, 3, 4, 5, 5]
    assert [record.get("$tag") for record in copies[-2:]] == ["x", None]


def test_several_routers_of_one_pair_each_make_their_copy(api: Client, a: str, b: str) -> None:
    route(api, a, b, name=f"{a}.1")
    route(api, a, b, name=f"{a}.2", filter=["tag", "Glob", "p:*"], preserve_tag=False)
    route(api, a, b, name=f"{a}.3", filter=["tag", "Eq", "p:x"], guarantee="exactly_once")
    api.append_records(a, [{"data": 1}, {"data": 2, "tag": "p:x"}, {"data": 3, "tag": "p:y"}])
    copies = wait_records(api, b, 6)
    shown = sorted((record["data"], record.get("$tag", ""), "meta" in record) for record in copies)
    assert shown == [
        (1, "", False),
        (2, "", False),
        (2, "p:x", False),
        (2, "p:x", True),
        (3, "", False),
        (3, "p:y", False),
    ]
    assert [record["data"] for record in copies] == sorted(record["data"] for record in copies)


def test_a_change_counts_for_what_comes_after(api: Client, a: str, b: str) -> None:
    name = route(api, a, b)
    api.append_records(a, [{"data": 1, "tag": "x"}])
    wait_data(api, b, [1])
    put_router(api, name, a, b, filter=["tag", "Eq", "x"], preserve_tag=False, guarantee="exactly_once")
    api.append_records(a, [{"data": 2}, {"data": 3, "tag": "x"}])
    wait_data(api, b, [1, 3])
    put_router(api, name, a, b)
    api.append(a, 4)
    wait_data(api, b, [1, 3, 4])
    first, second, third = read(api, b)
    assert (first["$tag"], second.get("$tag")) == ("x", None)
    assert "_topics_router" in second["meta"]
    assert "meta" not in third


# --- exactly once ------------------------------------------------------------------------------------


def test_exactly_once_leaves_its_mark_in_meta(api: Client, a: str, b: str) -> None:
    name = route(api, a, b, guarantee="exactly_once")
    api.append(a, "before")
    metas: list[Any] = [None, {}, {"k": [1]}, {"_topics_router": "mine"}, {"x": {"_topics_router": 1}, "y": 2}]
    api.append_records(
        a, [{"data": number} if meta is None else {"data": number, "meta": meta} for number, meta in enumerate(metas)]
    )
    copies = wait_records(api, b, 6)
    marks = [record["meta"].pop("_topics_router") for record in copies]
    assert [record["meta"] for record in copies[1:]] == [{}, {}, {"k": [1]}, {}, {"x": {"_topics_router": 1}, "y": 2}]
    assert [mark["source_seq"] for mark in marks] == [1, 2, 3, 4, 5, 6]
    assert {mark["router"] for mark in marks} == {name}
    assert {mark["source_topic"] for mark in marks} == {a}
    keys = [mark["idempotency_key"] for mark in marks]
    assert len(set(keys)) == 6
    assert len({(mark["source_topic_id"], mark["source_epoch"]) for mark in marks}) == 1
    assert all(isinstance(key, str) and name in key for key in keys)
    assert [record.get("meta") for record in read(api, a)] == [None, *metas]  # the source is as it was


def test_the_key_is_that_of_the_source_record_whichever_router(api: Client, a: str, b: str, c: str) -> None:
    """Two destinations, two lives of the source: keys never meet."""
    keys: list[str] = []
    for _ in range(2):
        route(api, a, b, name=f"{a}.b", guarantee="exactly_once")
        route(api, a, c, name=f"{a}.c", guarantee="exactly_once")
        api.append(a, 1, 2)
        for dest in (b, c):
            keys += [record["meta"]["_topics_router"]["idempotency_key"] for record in wait_records(api, dest, 2)]
            api.delete(dest, before_seq=1_000)
        api.drop(a)
    assert len(set(keys)) == 8


def test_a_chain_of_exactly_once_shows_the_last_router(api: Client, a: str, b: str, c: str) -> None:
    route(api, a, b, guarantee="exactly_once")
    last = route(api, b, c, guarantee="exactly_once")
    api.append_records(a, [{"data": 1, "meta": {"k": 1}}])
    (record,) = wait_records(api, c, 1)
    assert record["meta"]["k"] == 1
    assert record["meta"]["_topics_router"]["router"] == last
    assert record["meta"]["_topics_router"]["source_topic"] == b


# --- graphs ------------------------------------------------------------------------------------------


def test_a_chain(api: Client) -> None:
    names = [name_on(number % 2, "chain") for number in range(6)]
    for source, dest in itertools.pairwise(names):
        route(api, source, dest)
    for number in range(20):
        api.append(names[0], number)
    wait_data(api, names[-1], list(range(20)))
    api.append(names[3], "from the middle")
    wait_data(api, names[-1], [*range(20), "from the middle"])
    assert data_of(api, names[2]) == list(range(20))


def test_a_wide_fan_out(api: Client, a: str) -> None:
    dests = [f"{a}.{number}" for number in range(20)]
    for dest in dests:
        route(api, a, dest)
    for start in range(0, 300, 30):
        api.append(a, *range(start, start + 30))
    for dest in dests:
        wait_data(api, dest, list(range(300)))


def test_a_mirror_of_two(api: Client, a: str, b: str) -> None:
    route(api, a, b, allow_cycle=True)
    route(api, b, a, allow_cycle=True)
    for number in range(10):
        api.append(a, f"a{number}")
        api.append(b, f"b{number}")
    everything = {f"{side}{number}" for side in "ab" for number in range(10)}
    for topic in (a, b):
        wait_records(api, topic, 20)
    drained(api, a, a, b, mark="from a")
    drained(api, b, a, b, mark="from b")
    for topic in (a, b):
        found = data_of(api, topic)
        assert sorted(found) == sorted([*everything, "from a", "from b"]), "each exactly once"
        for side in "ab":
            assert [value for value in found if value[0] == side] == [f"{side}{number}" for number in range(10)]
        for record in read(api, topic):
            assert set(record) == {"$seq", "$ts", "data"}, "nothing of the hops is shown"
    wait_forwarded(api, {f"{a}->{b}": 11, f"{b}->{a}": 11})


def test_a_ring_of_three(api: Client) -> None:
    names = [name_on(number % 2, "ring") for number in range(3)]
    for number, source in enumerate(names):
        route(
            api,
            source,
            names[(number + 1) % 3],
            allow_cycle=True,
            guarantee=("exactly_once" if number else "at_least_once"),
        )
    for number in range(8):
        for at, name in enumerate(names):
            api.append_records(name, [{"data": [at, number], "node": f"n{at}", "tag": "t"}])
    for name in names:
        wait_records(api, name, 24)
    for at, name in enumerate(names):
        drained(api, name, *names, mark=f"end {at}")
    for name in names:
        records = [record for record in read(api, name) if isinstance(record["data"], list)]
        assert sorted(record["data"] for record in records) == [[at, number] for at in range(3) for number in range(8)]
        for at in range(3):
            assert [record["data"][1] for record in records if record["data"][0] == at] == list(range(8))
        assert all(record["$node"] == f"n{record['data'][0]}" and record["$tag"] == "t" for record in records)
        assert len(read(api, name)) == 27


def test_a_ring_that_is_opened_and_closed_again(api: Client, a: str, b: str, c: str) -> None:
    route(api, a, b)
    route(api, b, c)
    back = route(api, c, a, allow_cycle=True)
    api.append(b, 1)
    for topic in (a, b, c):
        wait_data(api, topic, [1])
    drop_router(api, back)
    api.append(b, 2)
    wait_data(api, c, [1, 2])
    route(api, c, a, name=back, allow_cycle=True)
    api.append(b, 3)
    wait_data(api, c, [1, 2, 3])
    wait_data(api, a, [1, 3])
    drained(api, c, a, b)
    wait_data(api, b, [1, 2, 3, "mark"])


def test_out_of_a_ring_everything_goes(api: Client, a: str, b: str, c: str) -> None:
    """A destination beside the ring gets what was written anywhere in it."""
    route(api, a, b, allow_cycle=True)
    route(api, b, a, allow_cycle=True)
    route(api, b, c)
    api.append(a, 1)
    wait_data(api, c, [1])
    api.append(b, 2)
    wait_data(api, c, [1, 2])
    wait_data(api, a, [1, 2])
    wait_data(api, b, [1, 2])


def test_three_nodes_mirror_each_other(api: Client) -> None:
    """Each node writes to its own topic under its name and reads it without what is its own."""
    nodes = ["n0", "n1", "n2"]
    topics = [name_on(number % 2, "mirror") for number in range(3)]
    for number, topic in enumerate(topics):
        route(api, topic, topics[(number + 1) % 3], allow_cycle=True)
    cursors = dict.fromkeys(topics, 0)
    received: dict[str, list[Any]] = {node: [] for node in nodes}
    for turn in range(6):
        for node, topic in zip(nodes, topics, strict=True):
            api.append(topic, [node, turn], node=node)

    def poll() -> bool:
        for node, topic in zip(nodes, topics, strict=True):
            page = api.diff(topic, cursors[topic], node=node)
            received[node] += page.data
            cursors[topic] = page["next_from_seq"]
        return all(len(found) >= 12 for found in received.values())

    eventually(poll, within_s=WITHIN_S, what="all of the others' records")
    poll()
    for node in nodes:
        assert sorted(received[node]) == [[other, turn] for other in nodes if other != node for turn in range(6)]


# --- kinds of topics ---------------------------------------------------------------------------------


def test_every_class_on_either_shard(api1: Client) -> None:
    routed: list[tuple[str, list[str]]] = []
    for at, kind in enumerate(CLASSES):
        source = name_on(at % 2, f"from-{kind}")
        api1.put(source, durability=kind)
        dests = []
        for other in CLASSES:
            for shard in (0, 1):
                dests.append(name_on(shard, f"to-{other}"))
                api1.put(dests[-1], durability=other)
                route(api1, source, dests[-1])
        routed.append((source, dests))
    for turn in range(4):
        for source, _ in routed:
            api1.append(source, *range(turn * 5, turn * 5 + 5))
    for _, dests in routed:
        for dest in dests:
            wait_data(api1, dest, list(range(20)))


@pytest.mark.parametrize(("source_type", "dest_type"), [("queue", "log"), ("log", "queue"), ("queue", "queue")])
def test_queues_are_topics_here(api: Client, a: str, b: str, source_type: str, dest_type: str) -> None:
    api.put(a, type=source_type)
    api.put(b, type=dest_type)
    route(api, a, b)
    api.append_records(a, [{"data": 1, "tag": "x"}, {"data": 2}])
    wait_data(api, b, [1, 2])
    assert (api.state(a)["type"], api.state(b)["type"]) == (source_type, dest_type)


def test_large_batches_and_large_records(api1: Client, a: str, b: str) -> None:
    """More than one forward carries, in records and in bytes."""
    route(api1, a, b)
    api1.append(a, *range(10_000))
    big = ["x" * (MIB - 2 - len(str(number))) + str(number) for number in range(4)]
    api1.append(a, *big)
    api1.append(a, "end")
    wait_head(api1, b, 10_005)
    copies = read(api1, b)
    assert [record["data"] for record in copies[:10_000]] == list(range(10_000))
    assert [record["data"] for record in copies[10_000:]] == [*big, "end"]
    assert api1.state(b)["bytes"] == api1.state(a)["bytes"]


def test_a_deduplicated_append_is_copied_once(api: Client, a: str, b: str) -> None:
    route(api, a, b)
    for _ in range(3):
        api.append(a, 1, idempotency_key="k")
    api.append(a, 2)
    wait_data(api, b, [1, 2])


def test_direct_records_stand_between_copies(api: Client, a: str, b: str) -> None:
    route(api, a, b)
    other = api.twin()

    def write_directly() -> None:
        for number in range(40):
            other.append(b, f"direct {number}")

    thread = threading.Thread(target=write_directly)
    thread.start()
    for number in range(40):
        api.append(a, number)
    thread.join()
    other.close()
    wait_records(api, b, 80)
    found = data_of(api, b)
    assert [value for value in found if isinstance(value, int)] == list(range(40))
    assert [value for value in found if isinstance(value, str)] == [f"direct {number}" for number in range(40)]
    seqs = [record["$seq"] for record in read(api, b)]
    assert seqs == list(range(1, 81))


# --- deletes, caps, TTL ------------------------------------------------------------------------------


def test_deletes_are_each_topics_own(api: Client, a: str, b: str) -> None:
    route(api, a, b)
    api.append_records(a, [{"data": number, "tag": "x" if number % 2 else None} for number in range(6)])
    wait_data(api, b, list(range(6)))
    api.delete(a, match="x")
    api.delete(b, before_seq=2)
    api.append(a, 6)
    wait_data(api, b, [*range(1, 7)])
    assert data_of(api, a) == [0, 2, 4, 6]
    api.delete(b, match="x")
    assert data_of(api, b) == [2, 4, 6]


def test_what_the_source_deleted_before_it_was_copied_is_not_copied(api: Client, a: str, b: str) -> None:
    """And it is nobody's loss: no tombstone."""
    api.put(b, cap_records=2, discard="reject")
    route(api, a, b)
    api.append(a, 0, 1)
    wait_data(api, b, [0, 1])
    api.append_records(a, [{"data": number, "tag": "x" if number % 2 else None} for number in range(2, 8)])
    api.delete(a, match="x")
    pass_through(api, a, b)  # what was read before the delete has been refused
    api.put(b)
    wait_data(api, b, [0, 1, 2, 4, 6])
    assert [record["$seq"] for record in read(api, b)] == [1, 2, 3, 4, 5]


def test_what_others_have_read_before_is_read_again(api1: Client, a: str, b: str, c: str) -> None:
    """One destination has the record, the other is full; then it is deleted: the other does not get it any more."""
    api = api1
    api.put(b, cap_records=1, discard="reject")
    route(api, a, b)
    route(api, a, c)
    api.append(a, 1)
    wait_data(api, b, [1])
    api.append(a, 2)
    wait_data(api, c, [1, 2])
    api.delete(a, before_seq=3)
    pass_through(api, a, b)  # what was read before the delete has been refused
    api.put(b)
    api.append(a, 3)
    wait_data(api, b, [1, 3])
    wait_data(api, c, [1, 2, 3])


def test_a_destination_that_evicts(api: Client, a: str, b: str) -> None:
    api.put(b, cap_records=5, discard="old")
    route(api, a, b)
    for number in range(12):
        api.append(a, number)
    wait_head(api, b, 12)
    page = api.diff(b, 1)
    assert page.data == [7, 8, 9, 10, 11]
    assert (page["tombstone"]["reason"], page["tombstone"]["gap_from"], page["tombstone"]["gap_to"]) == ("cap", 2, 7)
    api.append(a, *range(12, 40))
    wait_head(api, b, 40)
    assert api.diff(b).data == [35, 36, 37, 38, 39]
    assert api.state(b)["count"] == 5
    assert len(data_of(api, a)) == 40


def test_a_destination_expires_by_the_time_of_the_copy(api: Client, a: str, b: str) -> None:
    api.put(b, ttl_ms=300)
    route(api, a, b)
    api.append(a, 1, 2)
    wait_head(api, b, 2)
    eventually(lambda: api.state(b)["count"] == 0, what="expiry")
    assert api.diff(b)["tombstone"]["reason"] == "ttl"
    assert data_of(api, a) == [1, 2]
    api.append(a, 3)
    wait_head(api, b, 3)


@pytest.mark.parametrize("batch", [1, 4, 25])
def test_a_destination_that_rejects_holds_and_loses_nothing(api: Client, a: str, b: str, batch: int) -> None:
    """Not even if the batch that waits is larger than the destination will ever be."""
    api.put(b, cap_records=10, discard="reject")
    route(api, a, b)
    for start in range(0, 50, batch):
        api.append(a, *range(start, min(start + batch, 50)))
    found: list[int] = []

    def take() -> bool:
        page = api.diff(b, 0)
        assert page["tombstone"] is None, page
        assert len(page.data) <= 10
        found.extend(page.data)
        if page.seqs:
            api.delete(b, before_seq=page.seqs[-1] + 1)
        return len(found) >= 50

    eventually(take, within_s=WITHIN_S, every_s=0.05, what="everything")
    assert found == list(range(50))


def test_a_destination_that_rejects_by_bytes(api: Client, a: str, b: str) -> None:
    api.put(b, cap_bytes=5_000, discard="reject")
    route(api, a, b)
    sent = ["x" * 900 + str(number) for number in range(12)]
    api.append(a, *sent)
    found: list[str] = []

    def take() -> bool:
        page = api.diff(b, 0)
        assert api.state(b)["bytes"] <= 5_000
        found.extend(page.data)
        if page.seqs:
            api.delete(b, before_seq=page.seqs[-1] + 1)
        return len(found) >= len(sent)

    eventually(take, within_s=WITHIN_S, every_s=0.05, what="everything")
    assert found == sent


def test_a_record_that_never_fits_is_waited_with(api: Client, a: str, b: str, c: str) -> None:
    """Nothing overtakes it; a larger cap lets it through."""
    api.put(b, cap_bytes=500, discard="reject")
    route(api, a, b)
    route(api, a, c)
    api.append(a, 1)
    wait_data(api, b, [1])
    api.append(a, "x" * 1_000)
    api.append(a, 2)
    wait_data(api, c, [1, "x" * 1_000, 2])  # there all of it fits
    pass_through(api, a, b)  # what it has read for this one is refused
    assert data_of(api, b) == [1]
    assert api.append(a, 3).status == 200  # the writer does not notice
    api.put(b)
    wait_data(api, b, [1, "x" * 1_000, 2, 3])


def test_others_go_on_while_one_destination_is_full(api: Client, a: str, b: str, c: str) -> None:
    api.put(b, cap_records=1, discard="reject")
    route(api, a, b)
    route(api, a, c)
    for number in range(10):
        api.append(a, number)
    wait_data(api, c, list(range(10)))
    wait_data(api, b, [0])


# --- what the source has lost ------------------------------------------------------------------------


def trimmed(server: Server, api: Client, a: str, b: str) -> None:
    """Two copies at 1 and 2, then thirteen that never were, the source holding five: the destination is full."""
    api.put(a, cap_records=5)
    api.put(b, cap_records=2, discard="reject")
    route(api, a, b)
    api.append(a, 1, 2)
    wait_data(api, b, [1, 2])
    for number in range(3, 21):
        api.append(a, number)
    assert api.state(a)["earliest_seq"] == 16
    pass_through(api, a, b)  # what was read before it was evicted has been refused


def test_what_the_source_evicted_first_is_a_tombstone(server: Server, api: Client, a: str, b: str) -> None:
    trimmed(server, api, a, b)
    assert data_of(api, b) == [1, 2]
    api.put(b)
    wait_data(api, b, [1, 2, "source_trim", 16, 17, 18, 19, 20])
    page = api.diff(b, 2)
    assert page.data == [16, 17, 18, 19, 20]
    assert page["tombstone"] == {
        "gap_from": 3,
        "gap_to": 15,
        "reason": "source_trim",
        "missed_estimate": 13,
        "earliest_seq": 1,
        "head_seq": 20,
    }
    assert page.seqs == [16, 17, 18, 19, 20]
    assert api.diff(b, 10)["tombstone"]["gap_from"] == 11
    assert api.diff(b, 15)["tombstone"] is None
    first = api.diff(b, 0)  # no reading goes across it
    assert (first.data, first["next_from_seq"], first["caught_up"]) == ([1, 2], 2, False)
    api.append(a, 21)
    wait_data(api, b, [1, 2, "source_trim", 16, 17, 18, 19, 20, 21])


def test_the_tombstone_goes_down_a_chain(server: Server, api: Client, a: str, b: str, c: str) -> None:
    route(api, b, c)
    trimmed(server, api, a, b)
    api.put(b)
    wait_data(api, c, [1, 2, "source_trim", 16, 17, 18, 19, 20])


def test_a_stream_gets_the_tombstone(server: Server, api: Client, lane: Any, a: str, b: str) -> None:
    trimmed(server, api, a, b)
    with Watching(server, lane) as watching:
        stream = watching.follow(b)
        assert stream.events(2) == [("record", b, [1, 2]), ("caught-up", b, 2)]
        api.put(b)
        stream.wait_records(b, 7)
        assert [frame.what for frame in stream.of("tombstone")] == [("tombstone", b, "source_trim", 3, 15)]
        assert stream.data(b) == [1, 2, 16, 17, 18, 19, 20]
        late = watching.follow({b: {"from_seq": 2}})
        late.wait_caught_up(b)
        (frame,) = late.of("tombstone")
        assert frame.what[2] in ("source_trim", "from_seq_too_old")
        assert frame.what[3:] == (3, 15)
        assert late.data(b) == [16, 17, 18, 19, 20]
        whole = watching.follow(b)
        whole.wait_caught_up(b)
        assert whole.data(b) == [1, 2, 16, 17, 18, 19, 20]
        assert [frame.what[3:] for frame in whole.of("tombstone")] == [(3, 15)]


@pytest.fixture
def ws(server: Server) -> Iterator[Socket]:
    with dialling(server.port) as dial:
        yield dial()


def test_a_socket_gets_the_tombstone(server: Server, ws: Socket, api1: Client, a: str, b: str) -> None:
    trimmed(server, api1, a, b)
    ws.subscribe(b)
    assert ws.receive().data == [1, 2]
    assert ws.receive().op == "caught_up"
    api1.put(b)
    gap = ws.receive()
    assert gap.without("earliest_seq", "head_seq") == {
        "op": "tombstone",
        "topic": b,
        "reason": "source_trim",
        "gap_from": 3,
        "gap_to": 15,
    }
    assert ws.data(b, 5) == [16, 17, 18, 19, 20]


# --- readers that wait -------------------------------------------------------------------------------


def test_a_long_poll_on_a_destination_wakes(api: Client, a: str, b: str) -> None:
    route(api, a, b)
    other = api.twin()
    timer = threading.Timer(0.3, lambda: other.append(a, "wake up"))
    timer.start()
    began = time.monotonic()
    page = api.diff(b, 0, wait_ms=30_000)
    timer.join()
    other.close()
    assert page.data == ["wake up"]
    assert time.monotonic() - began < 20


def test_a_watch_on_a_destination_sees_copies_in_a_moment(server: Server, api: Client, lane: Any, a: str) -> None:
    chain = [a, *(name_on(number % 2, "watched") for number in range(3))]
    for source, dest in itertools.pairwise(chain):
        route(api, source, dest)
    with Watching(server, lane) as watching:
        stream = watching.follow({name: {"tail": True} for name in chain[1:]})
        stream.wait_caught_up(*chain[1:])
        waits = []
        for number in range(30):
            began = time.monotonic()
            api.append(a, number)
            stream.wait_records(chain[-1], number + 1)
            waits.append(time.monotonic() - began)
        for name in chain[1:]:
            stream.wait_records(name, 30)
            assert stream.data(name) == list(range(30))
        assert sorted(waits)[len(waits) // 2] < 0.5, waits


def test_what_a_socket_publishes_is_forwarded(ws: Socket, api1: Client, a: str, b: str) -> None:
    route(api1, a, b)
    ws.settle(b)
    ws.publish(a, *range(5))
    assert ws.data(b, 5) == list(range(5))


# --- what it costs -----------------------------------------------------------------------------------


def logged(server: Server) -> tuple[int, int]:
    """How many frames and bytes all logs have taken."""
    board = open_board(read_lock_info(str(server.data_dir)))
    try:
        shards = [row for row in board.rows() if row.name.startswith("shard-")]
        return sum(row[Word.WAL_FRAMES] for row in shards), sum(row[Word.WAL_BYTES] for row in shards)
    finally:
        board.close()


def settled_log(server: Server) -> tuple[int, int]:
    """When the counters have come to rest."""
    seen = [logged(server)]

    def at_rest() -> bool:
        time.sleep(0.3)
        seen.append(logged(server))
        return seen[-1] == seen[-2]

    eventually(at_rest, what="logs at rest")
    return seen[-1]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cpu(server: Server, name: str, *, for_s: float = 2.0) -> float:
    pid = server.pid_of(name)
    before = cpu_seconds(pid)
    time.sleep(for_s)
    return cpu_seconds(pid) - before


@pytest.mark.full
def test_a_record_is_logged_once_however_many_destinations(start_server: Start) -> None:
    """Of its copies the log says only which seqs they have; a frame has those of all destinations of a round."""
    server = start_server()
    with server.client() as api:
        dests = [f"d{number}" for number in range(12)]
        for number, dest in enumerate(dests):
            api.put(dest, durability=CLASSES[number % 4])
            route(api, "s" if number < 8 else dests[number - 8], dest)  # some of them further on
        api.append("s", "first")
        for dest in dests:
            wait_data(api, dest, ["first"])
        before = settled_log(server)
        api.append("s", "x" * 200_000)
        for dest in dests:
            wait_head(api, dest, 2)
        frames, size = settled_log(server)
        assert size - before[1] < 202_000
        assert frames - before[0] <= 1 + len(dests)
        before = settled_log(server)
        api.append("s", *range(1_000))
        for dest in dests:
            wait_head(api, dest, 1_002)
        frames, size = settled_log(server)
        assert size - before[1] < 20_000, "of which the records are about 5,000"
        assert frames - before[0] < 50, "ceilings and lines: not one for each of 12,000 copies"


@pytest.mark.full
def test_forwarders_that_have_nothing_to_do_do_nothing(start_server: Start) -> None:
    server = start_server()
    with server.client() as api:
        for number in range(20):
            route(api, f"s{number}", f"d{number}")
        route(api, "ring-a", "ring-b", allow_cycle=True)
        route(api, "ring-b", "ring-a", allow_cycle=True)
        stop = threading.Event()

        def write() -> None:
            with server.client() as writer:
                number = 0
                while not stop.is_set():
                    number += 1
                    writer.append("busy", number)
                    writer.append("ring-a", number)

        thread = threading.Thread(target=write)
        thread.start()
        for number in range(40):  # routers that begin while their source moves
            route(api, "busy", f"busy-d{number}")
            if number % 2:
                drop_router(api, f"busy->busy-d{number}")
        stop.set()
        thread.join()
        api.append("busy", "end")
        for number in range(0, 40, 2):
            eventually(lambda n=number: data_of(api, f"busy-d{n}")[-1:] == ["end"], what="the end")
        eventually(lambda: api.state("ring-b")["head_seq"] == api.state("ring-a")["head_seq"], what="the mirror")
        eventually(lambda: idle_cpu(server, "router", for_s=0.5) < 0.05, what="rest")
        for name in ("router", "shard-0", "shard-1"):
            eventually(lambda name=name: idle_cpu(server, name, for_s=1.0) < 0.05, what=f"rest of {name}")


@pytest.mark.full
def test_copies_do_not_stay_in_memory(start_server: Start) -> None:
    """They reach segments by themselves, so that a restart has little to do."""
    server = start_server()
    with server.client() as api:
        route(api, "s", "d")
        for start in range(0, 30_000, 5_000):
            api.append("s", *range(start, start + 5_000))
        wait_head(api, "d", 30_000)

        def in_segments() -> int:
            return sum(livefiles.sizes(server.data_dir, "topics/*/*.data").values())

        eventually(lambda: in_segments() > 30_000 * 5, what="segments of the destination")
        assert data_of(api, "d") == list(range(30_000))


def test_the_metas_of_copies_are_bounded_by_nothing_but_the_source(api1: Client, a: str, b: str) -> None:
    """A record whose meta is as large as can be gets its mark all the same."""
    route(api1, a, b, guarantee="exactly_once")
    meta = {"a": "x" * (16 * KIB - 8)}
    assert len(json.dumps(meta, separators=(",", ":"))) == 16 * KIB
    content = json.dumps({"records": [{"data": 1, "meta": meta}]}, separators=(",", ":")).encode()
    assert api1.send("POST", f"/v0/topics/{a}", content=content).status == 200
    (record,) = wait_records(api1, b, 1)
    assert record["meta"]["a"] == meta["a"]
    assert "_topics_router" in record["meta"]
