"""The graph of routers against one that is walked naively: who may be added, which ring it is in, who shares a pipe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import error_of, examples

from topics.errors import ApiError
from topics.keys import HIDDEN
from topics.router.rules import Rules
from topics.storage.routers import Rule


def rule(source: str, dest: str, router: str | None = None, **more: object) -> Rule:
    return Rule(
        router=router or f"{source}->{dest}",
        source=source,
        dest=dest,
        source_id=1,
        dest_id=2,
        since=0,
        created_ms=0,
        **more,  # type: ignore[arg-type]
    )


def rules(*arrows: str) -> Rules:
    """From "ab": a router from a to b."""
    return Rules(rule(arrow[0], arrow[1]) for arrow in arrows)


def refused(known: Rules, arrow: str, *, allow_cycle: bool = False) -> ApiError:
    return error_of(lambda: known.check_new(source=arrow[0], dest=arrow[1], allow_cycle=allow_cycle))


# --- what may be added -------------------------------------------------------------------------------


@pytest.mark.parametrize("arrow", ["ab", "ad", "bd", "cd", "da"])
def test_anything_goes_that_has_one_source_and_closes_nothing(arrow: str) -> None:
    rules("ab", "bc").check_new(source=arrow[0], dest=arrow[1], allow_cycle=False)


@pytest.mark.parametrize("allow_cycle", [False, True])
@pytest.mark.parametrize("arrow", ["cb", "db", "dc", "ac"])
def test_a_second_source_is_refused(arrow: str, allow_cycle: bool) -> None:
    error = refused(rules("ab", "bc"), arrow, allow_cycle=allow_cycle)
    assert error.code == "topic_exists_incompatible"
    assert error.detail is not None
    assert error.detail["reason"] == "router_dest_fan_in"


@pytest.mark.parametrize(
    ("arrow", "cycle"), [("ba", ["b", "a", "b"]), ("ca", ["c", "a", "b", "c"]), ("da", ["d", "a", "b", "c", "d"])]
)
def test_a_cycle_is_named_from_its_source_around(arrow: str, cycle: list[str]) -> None:
    known = rules("ab", "bc", "cd")
    error = refused(known, arrow)
    assert (error.code, error.detail) == ("router_cycle", {"cycle": cycle})
    known.check_new(source=arrow[0], dest=arrow[1], allow_cycle=True)


def test_names_outside_of_the_prefixes_are_not_told() -> None:
    known = rules("ab", "bc", "cd")

    def told(arrow: str, *prefixes: str) -> ApiError:
        return error_of(
            lambda: known.check_new(source=arrow[0], dest=arrow[1], allow_cycle=False, prefixes=tuple(prefixes))
        )

    cycle = told("da", "a", "d")
    assert cycle.detail == {"cycle": ["d", "a", HIDDEN, HIDDEN, "d"]}
    assert f"d -> a -> {HIDDEN} -> {HIDDEN} -> d" in cycle.message
    fan_in = told("db", "b", "d")
    assert fan_in.detail == {"reason": "router_dest_fan_in", "dest": "b", "source": HIDDEN}
    assert '"a"' not in fan_in.message
    assert told("db", "a", "b", "d").detail == {"reason": "router_dest_fan_in", "dest": "b", "source": "a"}


def test_a_router_of_a_ring_may_not_take_its_permission_back() -> None:
    assert refused(rules("ab", "ba"), "ba").code == "router_cycle"
    assert refused(rules("ab", "ba"), "ab").code == "router_cycle"


def test_beside_a_ring_there_is_no_ring() -> None:
    known = rules("ab", "ba", "bc")
    known.check_new(source="c", dest="d", allow_cycle=False)
    assert known.cycle("b", "c") is None
    assert known.cycle("c", "d") is None
    assert refused(known, "ca", allow_cycle=True).code == "topic_exists_incompatible"


# --- rings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_in_a_ring_a_record_passes_all_but_one(size: int) -> None:
    names = "abcdefg"[:size]
    known = rules(*(names[at] + names[(at + 1) % size] for at in range(size)))
    for at in range(size):
        assert known.ring_hops(names[at], names[(at + 1) % size]) == size - 1
    known.remove(f"{names[1]}->{names[2 % size]}")
    for at in range(size):
        if at != 1:
            assert known.ring_hops(names[at], names[(at + 1) % size]) is None


# --- pipes -------------------------------------------------------------------------------------------


def test_routers_of_one_pair_share_a_pipe_in_the_order_of_their_names() -> None:
    known = rules("ab", "bc")
    for name in ("z", "m", "a"):
        known.put(rule("a", "b", name))
    assert [each.router for each in known.between("a", "b")] == ["a", "a->b", "m", "z"]
    assert known.between("b", "a") == known.between("a", "c") == []
    for name in ("a", "z", "a->b"):
        known.remove(name)
        assert refused(known, "cb").code == "topic_exists_incompatible"
    known.remove("m")
    known.check_new(source="c", dest="b", allow_cycle=True)


def test_touching_is_either_end() -> None:
    known = rules("ab", "bc", "bd", "xy")
    assert [each.router for each in known.touching("b")] == ["a->b", "b->c", "b->d"]
    assert [each.router for each in known.touching("c")] == ["b->c"]
    assert known.touching("q") == []


def test_removing_what_is_not_there_is_nothing() -> None:
    known = rules("ab")
    assert known.remove("x") is None
    removed = known.remove("a->b")
    assert removed is not None
    assert (removed.source, len(known), known.get("a->b")) == ("a", 0, None)


# --- against a naive graph ---------------------------------------------------------------------------

TOPICS = "abcde"
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "remove"]),
        st.sampled_from(TOPICS),
        st.sampled_from(TOPICS),
        st.sampled_from(["", ".2"]),
        st.booleans(),
    ),
    max_size=25,
)


class Naive:
    """Arrows as a list; every question is answered by walking all paths."""

    def __init__(self) -> None:
        self.arrows: dict[str, tuple[str, str]] = {}

    def pairs(self) -> set[tuple[str, str]]:
        return set(self.arrows.values())

    def paths(self, start: str, end: str) -> Iterator[list[str]]:
        def walk(path: list[str]) -> Iterator[list[str]]:
            if path[-1] == end:
                yield path
                return
            for source, dest in self.pairs():
                if source == path[-1] and dest not in path:
                    yield from walk([*path, dest])

        return walk([start])

    def verdict(self, source: str, dest: str, allow_cycle: bool) -> str | None:
        if any(other == dest and known != source for known, other in self.pairs()):
            return "topic_exists_incompatible"
        if not allow_cycle and any(self.paths(dest, source)):
            return "router_cycle"
        return None

    def spread(self, start: str) -> dict[str, int]:
        """How often a record written to a topic comes to each: copied on until it is back where it was written."""
        found = {start: 1}
        queue = [start]
        while queue:
            at = queue.pop(0)
            for source, dest in self.pairs():
                if source == at and dest not in found:
                    found[dest] = 1
                    queue.append(dest)
        return found


def spread_by_hops(known: Rules, start: str) -> dict[str, int]:
    """The same as the forwarders do it: by the hops of each record."""
    found: dict[str, int] = {}
    queue = [(start, 0)]
    while queue:
        at, hops = queue.pop(0)
        found[at] = found.get(at, 0) + 1
        assert sum(found.values()) < 100, "it goes round for ever"
        for source, dest in {(each.source, each.dest) for each in known}:
            if source == at:
                most = known.ring_hops(source, dest)
                if most is None:
                    queue.append((dest, 0))
                elif hops < most:
                    queue.append((dest, hops + 1))
    return found


@examples(300)
@given(steps=STEPS)
def test_like_a_naive_graph(steps: list[tuple[str, str, str, str, bool]]) -> None:
    known, naive = Rules(), Naive()
    for action, source, dest, suffix, allow_cycle in steps:
        name = f"{source}->{dest}{suffix}"
        if action == "remove":
            removed = known.remove(name)
            assert (removed is not None) == (naive.arrows.pop(name, None) is not None)
        elif source != dest:
            expected = naive.verdict(source, dest, allow_cycle)
            verdict = cycle = None
            try:
                known.check_new(source=source, dest=dest, allow_cycle=allow_cycle)
            except ApiError as error:
                verdict, cycle = error.code, (error.detail or {}).get("cycle")
            assert verdict == expected
            if verdict == "router_cycle":
                assert cycle is not None
                assert cycle[0] == source
                assert cycle[1:] in list(naive.paths(dest, source))
            if expected is None:
                known.put(rule(source, dest, name))
                naive.arrows[name] = (source, dest)
        assert len(known) == len(naive.arrows)
        assert {each.router: (each.source, each.dest) for each in known} == naive.arrows
    for source, dest in naive.pairs():
        ring = next(naive.paths(dest, source), None)
        assert known.ring_hops(source, dest) == (None if ring is None else len(ring) - 1)
    for topic in TOPICS:
        assert spread_by_hops(known, topic) == naive.spread(topic)
        touching = sorted(name for name, pair in naive.arrows.items() if topic in pair)
        assert [each.router for each in known.touching(topic)] == touching
    again = Rules(known)
    assert [again.cycle(a, b) for a in TOPICS for b in TOPICS if a != b] == [
        known.cycle(a, b) for a in TOPICS for b in TOPICS if a != b
    ]
