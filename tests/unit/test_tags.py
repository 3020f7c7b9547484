from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.walshard.topic.tags import TagIndex

TAGS = st.text(st.sampled_from("ab:*é😀~"), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.none() | TAGS, max_size=50)),
        st.tuples(st.just("equal"), TAGS),
        st.tuples(st.just("prefix"), TAGS),
    ),
    max_size=20,
)


@examples(200)
@given(steps=STEPS)
def test_as_a_search_through_all_records(steps: list[tuple[str, object]]) -> None:
    index = TagIndex()
    records: list[tuple[int, str]] = []
    seq = 1
    for step, value in steps:
        if step == "add":
            assert isinstance(value, list)
            index.add(seq, value)
            records += [(at, tag) for at, tag in enumerate(value, seq) if tag is not None]
            seq += len(value)
            continue
        assert isinstance(value, str)
        if step == "equal":
            assert list(index.equal(value)) == [at for at, tag in records if tag == value]
        else:
            assert index.with_prefix(value) == [at for at, tag in records if tag.startswith(value)]
    assert len(index) == len({tag for _, tag in records})


def test_a_prefix_is_literal() -> None:
    index = TagIndex()
    index.add(1, ["a*", "ab", "a", "b", None, "A"])
    assert index.with_prefix("a*") == [1]
    assert index.with_prefix("a") == [1, 2, 3]
    assert index.with_prefix("") == [1, 2, 3, 4, 6]
    assert list(index.equal("a*")) == [1]
    assert list(index.equal("")) == []


def test_many_new_tags_between_searches() -> None:
    index = TagIndex()
    for start in range(0, 300, 60):
        index.add(start, [f"t{number:03d}" for number in range(start, start + 60)])
        assert index.with_prefix("t") == list(range(start + 60))
    assert index.with_prefix("t29") == list(range(290, 300))
