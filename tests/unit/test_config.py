from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.storage.config import bucket_of, owner_of_id, owner_of_name, topic_id

NAMES = st.text(st.sampled_from("abzAZ019._:-"), min_size=1, max_size=30)


@examples(200)
@given(name=NAMES, entropy=st.integers(0, 2**64 - 1), shards=st.integers(1, 64))
def test_a_topics_id_names_the_same_owner_as_its_name(name: str, entropy: int, shards: int) -> None:
    """Recovery knows only ids, the gateway only names."""
    id = topic_id(name, entropy)
    assert 0 <= id < 2**64
    assert owner_of_id(id, shards) == owner_of_name(name, shards)
    assert 0 <= owner_of_name(name, shards) < shards


@pytest.mark.parametrize(("name", "bucket"), [("a", 0x4E1F), ("jobs", 0x480F), ("render-queue:tenantA", 0x1251)])
def test_the_hash_is_stable(name: str, bucket: int) -> None:
    """Data folders depend on it."""
    assert bucket_of(name) == bucket


@examples(50)
@given(name=NAMES, entropies=st.lists(st.integers(0, 2**48 - 1), min_size=2, max_size=2, unique=True))
def test_instances_of_a_name_have_different_ids(name: str, entropies: list[int]) -> None:
    first, second = (topic_id(name, entropy) for entropy in entropies)
    assert first != second
    assert first & 0xFFFF == second & 0xFFFF


def test_names_spread_over_shards() -> None:
    owners = [owner_of_name(f"topic-{number}", 4) for number in range(4_000)]
    for shard in range(4):
        assert 800 < owners.count(shard) < 1_200
