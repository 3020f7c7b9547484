"""Names in order, page by page, against a sorted list that is filtered by hand."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import examples

from topics.walshard.listing import Listing

# Few letters, so that prefixes hit; `~` sorts behind all of them, `.` before.
NAMES = st.text("ab.~", min_size=1, max_size=5)
PREFIXES = st.text("ab.~", max_size=3)
ALLOWED = st.lists(PREFIXES, max_size=4).map(tuple)


def brute(names: set[str], *, after: str, prefix: str, allowed: tuple[str, ...], limit: int) -> list[str]:
    fitting = [
        name
        for name in sorted(names)
        if name > after and name.startswith(prefix) and (not allowed or name.startswith(allowed))
    ]
    return fitting[:limit]


@given(st.sets(NAMES, max_size=40), NAMES | st.just(""), PREFIXES, ALLOWED, st.integers(0, 50))
@examples(600)
def test_a_page_is_what_a_search_through_all_finds(
    names: set[str], after: str, prefix: str, allowed: tuple[str, ...], limit: int
) -> None:
    asked: dict[str, Any] = {"after": after, "prefix": prefix, "allowed": allowed, "limit": limit}
    assert Listing(names).page(**asked) == brute(names, **asked)


@given(st.sets(NAMES, max_size=40), PREFIXES, ALLOWED, st.integers(1, 7))
@examples(200)
def test_pages_together_are_everything_once(names: set[str], prefix: str, allowed: tuple[str, ...], limit: int) -> None:
    listing = Listing(names)
    found: list[str] = []
    after = ""
    while page := listing.page(after=after, prefix=prefix, allowed=allowed, limit=limit):
        assert len(page) <= limit
        found += page
        after = page[-1]
    assert found == brute(names, after="", prefix=prefix, allowed=allowed, limit=10**6)


@pytest.mark.parametrize(
    ("prefix", "allowed", "expected"),
    [
        ("", (), ["a", "ab", "ab.c", "b", "b.c"]),
        ("", ("",), ["a", "ab", "ab.c", "b", "b.c"]),
        ("a", (), ["a", "ab", "ab.c"]),
        ("ab", ("a",), ["ab", "ab.c"]),
        ("a", ("ab",), ["ab", "ab.c"]),
        ("a", ("b",), []),
        ("", ("b", "a"), ["a", "ab", "ab.c", "b", "b.c"]),
        ("", ("ab", "a", "ab.c"), ["a", "ab", "ab.c"]),
        ("", ("b.", "ab."), ["ab.c", "b.c"]),
        ("a", ("a", "a", "ab"), ["a", "ab", "ab.c"]),
        ("zz", (), []),
        ("", ("zz",), []),
    ],
)
def test_prefixes(prefix: str, allowed: tuple[str, ...], expected: list[str]) -> None:
    listing = Listing(["b", "ab", "b.c", "a", "ab.c"])
    assert listing.page(after="", prefix=prefix, allowed=allowed, limit=100) == expected


def test_a_page_goes_on_behind_a_name_that_is_gone() -> None:
    listing = Listing(["a", "b", "c"])
    listing.remove("b")
    assert listing.page(after="b", prefix="", allowed=(), limit=10) == ["c"]


def test_removing_what_is_not_there_is_nothing() -> None:
    listing = Listing(["a", "c"])
    for name in ("", "b", "d", "A"):
        listing.remove(name)
    assert len(listing) == 2


def test_a_page_of_many_looks_at_few() -> None:
    """Names that count how often they are looked at: a page costs what it shows, not what there is."""

    class Counted(str):
        looks = 0

        def startswith(self, *args: Any) -> bool:
            Counted.looks += 1
            return super().startswith(*args)

    names = [Counted(f"{letter}{number:05d}") for letter in string.ascii_lowercase for number in range(1_000)]
    listing = Listing(names)
    page = listing.page(after="m00500", prefix="m", allowed=(), limit=10)
    assert page == [f"m{number:05d}" for number in range(501, 511)]
    assert Counted.looks <= 20


class Churn(RuleBasedStateMachine):
    """Topics come and go."""

    @initialize(names=st.sets(NAMES, max_size=20))
    def begin(self, names: set[str]) -> None:
        self.names = set(names)
        self.listing = Listing(names)

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        if name not in self.names:  # a topic is made once
            self.names.add(name)
            self.listing.add(name)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.names.discard(name)
        self.listing.remove(name)

    @rule(after=NAMES | st.just(""), prefix=PREFIXES, allowed=ALLOWED, limit=st.integers(0, 10))
    def look(self, after: str, prefix: str, allowed: tuple[str, ...], limit: int) -> None:
        asked: dict[str, Any] = {"after": after, "prefix": prefix, "allowed": allowed, "limit": limit}
        assert self.listing.page(**asked) == brute(self.names, **asked)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "names"):
            assert len(self.listing) == len(self.names)
            everything = self.listing.page(after="", prefix="", allowed=(), limit=10**6)
            assert everything == sorted(self.names)


TestChurn: Any = Churn.TestCase
TestChurn.settings = examples(40, stateful_step_count=40)
