"""Deleting records: by seq, by tag, by both; immediate, silent, point in time, and exactly counted; in both lanes."""

from __future__ import annotations

import pytest

from .client import Client

pytestmark = pytest.mark.e2e


@pytest.fixture
def tagged(api: Client, topic: str) -> str:
    """Eight records in three batches: a:1 a:2 b:1 - | a:1 ab | - a:*"""
    for batch in (["a:1", "a:2", "b:1", None], ["a:1", "ab"], [None, "a:*"]):
        api.append_records(topic, [{"data": f"{tag}", "tag": tag} for tag in batch])
    return topic


def test_the_answer(api: Client, tagged: str) -> None:
    answer = api.delete(tagged, before_seq=4)
    assert answer.status == 200
    state = api.state(tagged)
    assert answer.without_performance() == {
        "topic": tagged,
        "deleted": 3,
        "earliest_seq": 4,
        "head_seq": 8,
        "count": 5,
        "bytes": state["bytes"],
    }
    assert (state["earliest_seq"], state["head_seq"], state["count"]) == (4, 8, 5)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ({"before_seq": 0}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"before_seq": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"before_seq": 2}, [2, 3, 4, 5, 6, 7, 8]),
        ({"before_seq": 5}, [5, 6, 7, 8]),
        ({"before_seq": 6}, [6, 7, 8]),
        ({"before_seq": 8}, [8]),
        ({"before_seq": 9}, []),
        ({"before_seq": 2**64 - 1}, []),
        ({"match": ["tag", "Eq", "a:1"]}, [2, 3, 4, 6, 7, 8]),
        ({"match": "a:1"}, [2, 3, 4, 6, 7, 8]),
        ({"match": "a:*"}, [1, 2, 3, 4, 5, 6, 7]),
        ({"match": ["tag", "Eq", "a:*"]}, [1, 2, 3, 4, 5, 6, 7]),
        ({"match": ["tag", "Eq", "a"]}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"match": ["tag", "Eq", ""]}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"match": ["tag", "Eq", "None"]}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"match": ["tag", "Glob", "a:*"]}, [3, 4, 6, 7]),
        ({"match": ["tag", "Glob", "a*"]}, [3, 4, 7]),
        ({"match": ["tag", "Glob", "*"]}, [4, 7]),
        ({"match": ["tag", "Glob", "c*"]}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"match": ["tag", "Glob", "A*"]}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"match": ["tag", "Eq", "a:1"], "before_seq": 5}, [2, 3, 4, 5, 6, 7, 8]),
        ({"match": ["tag", "Eq", "a:1"], "before_seq": 6}, [2, 3, 4, 6, 7, 8]),
        ({"match": ["tag", "Glob", "a*"], "before_seq": 6}, [3, 4, 6, 7, 8]),
        ({"match": "a:1", "before_seq": 0}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"match": "a:1", "before_seq": 2**64 - 1}, [2, 3, 4, 6, 7, 8]),
        ({"match": None, "before_seq": 3}, [3, 4, 5, 6, 7, 8]),
        ({"match": "a:1", "before_seq": None}, [2, 3, 4, 6, 7, 8]),
    ],
    ids=str,
)
def test_what_goes_and_what_stays(api: Client, tagged: str, body: dict[str, object], left: list[int]) -> None:
    answer = api.delete(tagged, **body)
    assert answer["deleted"] == 8 - len(left)
    assert answer["earliest_seq"] == (left[0] if left else 9)
    assert answer["head_seq"] == 8
    assert answer["count"] == len(left)
    read = api.diff(tagged)
    assert read.seqs == left
    assert read["tombstone"] is None
    assert (read["next_from_seq"], read["caught_up"]) == (8, True)


def test_counts_and_bytes_are_exact(api: Client, topic: str) -> None:
    sizes = []
    for number, length in enumerate((1, 10, 100, 1_000)):
        before = api.state(topic)["bytes"] if number else 0
        api.append_records(topic, [{"data": "x" * length, "tag": f"t{number}", "meta": {"n": "y" * length}}])
        sizes.append(api.state(topic)["bytes"] - before)
    assert sizes == sorted(sizes)
    assert sizes[3] - sizes[2] == 2 * 900
    assert api.delete(topic, match="t2")["bytes"] == sum(sizes) - sizes[2]
    assert api.delete(topic, before_seq=2)["bytes"] == sizes[1] + sizes[3]
    empty = api.delete(topic, before_seq=100)
    assert (empty["bytes"], empty["count"], empty["earliest_seq"]) == (0, 0, 5)


def test_bytes_do_not_depend_on_how_records_are_batched(api: Client, topic: str) -> None:
    records = [{"data": [n] * n, "tag": f"t{n % 3}", "meta": {"n": n}} for n in range(20)]
    api.append_records(f"{topic}.one", records)
    for record in records:
        api.append_records(f"{topic}.many", [record])
    for body in ({"before_seq": 4}, {"match": "t1"}, {"match": "t2", "before_seq": 12}):
        one, many = api.delete(f"{topic}.one", **body), api.delete(f"{topic}.many", **body)
        for field in ("deleted", "count", "bytes", "earliest_seq", "head_seq"):
            assert one[field] == many[field], (body, field)


def test_deleting_again_deletes_nothing(api: Client, tagged: str) -> None:
    assert api.delete(tagged, match="a:1")["deleted"] == 2
    again = api.delete(tagged, match="a:1")
    assert (again["deleted"], again["count"]) == (0, 6)
    assert api.delete(tagged, before_seq=4)["deleted"] == 2
    assert api.delete(tagged, before_seq=4)["deleted"] == 0


def test_a_delete_knows_nothing_of_what_comes_later(api: Client, tagged: str) -> None:
    api.delete(tagged, match=["tag", "Glob", "a*"])
    api.append_records(tagged, [{"data": "late", "tag": "a:1"}])
    assert api.diff(tagged).data[-1] == "late"
    api.delete(tagged, before_seq=1_000)
    api.append(tagged, "later")
    read = api.diff(tagged)
    assert (read.seqs, read.data) == ([10], ["later"])


def test_a_gap_that_was_deleted_is_silent_from_every_cursor(api: Client, tagged: str) -> None:
    api.delete(tagged, before_seq=7)
    for cursor in range(9):
        read = api.diff(tagged, cursor)
        assert read["tombstone"] is None
        assert read.seqs == [seq for seq in (7, 8) if seq > cursor]
        assert read["earliest_seq"] == 7


def test_holes_do_not_count_against_the_limit(api: Client, tagged: str) -> None:
    api.delete(tagged, match=["tag", "Glob", "a*"])
    read = api.diff(tagged, limit=2)
    assert (read.seqs, read["next_from_seq"], read["caught_up"]) == ([3, 4], 4, False)
    read = api.diff(tagged, 4, limit=2)
    assert (read.seqs, read["next_from_seq"], read["caught_up"]) == ([7], 8, True)


def test_seqs_go_on_after_everything_was_deleted(api: Client, topic: str) -> None:
    api.append(topic, 1, 2)
    api.delete(topic, before_seq=3)
    state = api.state(topic)
    assert (state["earliest_seq"], state["next_seq"], state["count"], state["bytes"]) == (3, 3, 0, 0)
    assert api.append(topic, 3)["seqs"] == [3]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_every_class_deletes(api: Client, topic: str, durability: str) -> None:
    api.put(topic, durability=durability)
    api.append_records(topic, [{"data": n, "tag": f"t{n}"} for n in range(4)])
    assert api.delete(topic, match="t1")["deleted"] == 1
    assert api.delete(topic, before_seq=2)["deleted"] == 1
    assert api.diff(topic).data == [2, 3]


def test_tags_are_compared_by_their_text(api: Client, topic: str) -> None:
    api.send("POST", f"/v0/topics/{topic}", content=rb'{"records":[{"data":1,"tag":"\u00e9:1"},{"data":2}]}')
    assert api.delete(topic, match="é:1")["deleted"] == 1


def test_a_prefix_ends_where_the_next_tag_begins(api: Client, topic: str) -> None:
    tags = ["a", "a\u0000", "a:", "a:\uffff", "a:\U0010ffff", "a;", "b", "\U0010ffff"]
    api.append_records(topic, [{"data": tag, "tag": tag} for tag in tags])
    assert api.delete(topic, match=["tag", "Glob", "a:*"])["deleted"] == 3
    assert api.diff(topic).data == ["a", "a\u0000", "a;", "b", "\U0010ffff"]
    assert api.delete(topic, match=["tag", "Glob", "\U0010ffff*"])["deleted"] == 1


def test_a_delete_frees_room_in_a_full_topic(api: Client, topic: str) -> None:
    api.put(topic, cap_records=2, discard="reject")
    api.append(topic, 1, 2)
    assert api.append(topic, 3).status == 422
    api.delete(topic, before_seq=2)
    assert api.append(topic, 3)["seqs"] == [3]


def test_a_topic_must_exist(api: Client, topic: str) -> None:
    assert api.delete(topic, before_seq=5).refusal == (404, "topic_not_found")
    assert api.state(topic).status == 404


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"before_seq": None},
        {"match": None},
        {"before_seq": -1},
        {"before_seq": 2**64},
        {"before_seq": 1.5},
        {"before_seq": "5"},
        {"before_seq": True},
        {"match": 5},
        {"match": {"tag": "x"}},
        {"match": []},
        {"match": ["tag"]},
        {"match": ["tag", "Eq"]},
        {"match": ["tag", "Eq", "x", "y"]},
        {"match": ["node", "Eq", "x"]},
        {"match": ["tag", "eq", "x"]},
        {"match": ["tag", "Like", "x*"]},
        {"match": ["tag", "Eq", 5]},
        {"match": ["tag", "Glob", "x"]},
        {"match": ["tag", "Glob", ""]},
        {"match": ["tag", "Glob", "*x"]},
        {"match": ["tag", "Glob", "x*y*"]},
        {"match": ["tag", "Glob", "x**"]},
        {"match": "x", "before_seq": -1},
        {"match": 5, "before_seq": 5},
        [],
        "x",
    ],
    ids=str,
)
def test_what_is_refused_deletes_nothing(api: Client, tagged: str, body: object) -> None:
    assert api.send("POST", f"/v0/topics/{tagged}/delete", body).refusal == (400, "invalid_request")
    assert api.state(tagged)["count"] == 8


def test_without_a_body_a_delete_is_refused(api: Client, tagged: str) -> None:
    assert api.send("POST", f"/v0/topics/{tagged}/delete").refusal == (400, "invalid_request")
    assert api.state(tagged)["count"] == 8
