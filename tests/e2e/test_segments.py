"""Records that have left the log for segment files read, count and delete like any other.

The server with small limits seals segments early and keeps next to nothing in memory. The topics for all tests are
written at once, so that all wait together for their records to be moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import livefiles
import pytest

from .client import Answer, Client, unique
from .server import Server, eventually

pytestmark = pytest.mark.e2e

COUNT = 100
SEGMENTS = 2
TOPICS = 10  # at least as many as tests


def _segments(server: Server) -> set[Path]:
    return set(livefiles.find(server.data_dir, "topics/*/*.idx"))


def _read_all(api: Client, topic: str, **fields: Any) -> list[Answer]:
    answers = [api.diff(topic, **fields)]
    while not answers[-1]["caught_up"]:
        answers.append(api.diff(topic, answers[-1]["next_from_seq"], **fields))
    return answers


def _seqs(answers: list[Answer]) -> list[int]:
    return [seq for answer in answers for seq in answer.seqs]


@pytest.fixture
def small1(small_clients: dict[str, Client]) -> Client:
    return small_clients["http1"]


@pytest.fixture(scope="module")
def sealed_topics(small_server: Server, small_clients: dict[str, Client]) -> Iterator[str]:
    """Topics of 100 records in two segment files; record n is tagged tn%10."""
    topics = [unique("sealed") for _ in range(TOPICS)]
    client = small_clients["http1"]
    per_segment = COUNT // SEGMENTS
    for number in range(SEGMENTS):
        before = _segments(small_server)
        for topic in topics:
            for start in range(number * per_segment + 1, (number + 1) * per_segment + 1, 5):
                records = [
                    {"data": {"n": n}, "tag": f"t{n % 10}", "node": f"n{n % 2}", "meta": {"sq": n * n}}
                    for n in range(start, start + 5)
                ]
                client.append_records(topic, records)
        eventually(lambda before=before: len(_segments(small_server) - before) >= TOPICS, what="segments")
    return iter(topics)


@pytest.fixture
def sealed(sealed_topics: Iterator[str]) -> str:
    return next(sealed_topics)


def test_everything_is_read_back(small: Client, sealed: str) -> None:
    records = [record for answer in _read_all(small, sealed, include_tags=True) for record in answer["records"]]
    assert [record["$seq"] for record in records] == list(range(1, COUNT + 1))
    for record in records:
        n = record["$seq"]
        assert record["data"] == {"n": n}
        assert (record["$tag"], record["$node"], record["meta"]) == (f"t{n % 10}", f"n{n % 2}", {"sq": n * n})


def test_the_node_filter(small1: Client, sealed: str) -> None:
    assert _seqs(_read_all(small1, sealed, node="n0")) == list(range(1, COUNT + 1, 2))


def test_new_records_follow_the_old(small1: Client, sealed: str) -> None:
    small1.append(sealed, "new")
    assert _seqs(_read_all(small1, sealed)) == list(range(1, COUNT + 2))


def test_deletes_by_tag_prefix_and_seq(small1: Client, sealed: str) -> None:
    bytes_per_record = small1.state(sealed)["bytes"] / COUNT
    answer = small1.delete(sealed, match="t3")
    assert (answer["deleted"], answer["count"], answer["earliest_seq"]) == (10, 90, 1)
    answer = small1.delete(sealed, match=["tag", "Glob", "t4*"], before_seq=50)
    assert (answer["deleted"], answer["count"]) == (5, 85)
    answer = small1.delete(sealed, before_seq=31)
    left = [n for n in range(31, COUNT + 1) if n % 10 != 3 and not (n % 10 == 4 and n < 50)]
    assert (answer["count"], answer["earliest_seq"]) == (len(left), 31)
    assert abs(answer["bytes"] / len(left) - bytes_per_record) < 4
    answers = _read_all(small1, sealed)
    assert _seqs(answers) == left
    assert all(answer["tombstone"] is None for answer in answers)
    assert small1.delete(sealed, match="t3")["deleted"] == 0


def test_a_delete_counts_what_is_in_files_and_what_is_not(small1: Client, sealed: str) -> None:
    small1.append_records(sealed, [{"data": "fresh", "tag": "t3"}])
    answer = small1.delete(sealed, match="t3")
    assert (answer["deleted"], answer["count"]) == (11, 90)


def test_a_cap_evicts_from_files(small1: Client, sealed: str) -> None:
    small1.put(sealed, cap_records=7)
    state = small1.state(sealed)
    assert (state["count"], state["earliest_seq"], state["head_seq"]) == (7, 94, COUNT)
    answers = _read_all(small1, sealed)
    assert _seqs(answers) == list(range(94, COUNT + 1))
    assert (answers[0]["tombstone"]["gap_from"], answers[0]["tombstone"]["gap_to"]) == (1, 93)


def test_an_emptied_topic_gives_its_files_back(small_server: Server, small1: Client, sealed: str) -> None:
    files = _segments(small_server)
    small1.delete(sealed, before_seq=COUNT + 1)
    eventually(lambda: len(files - _segments(small_server)) >= SEGMENTS, what="fewer files")
    assert small1.append(sealed, "next")["seqs"] == [COUNT + 1]


def test_a_deleted_topic_gives_its_files_back(small_server: Server, small1: Client, sealed: str) -> None:
    files = _segments(small_server)
    small1.drop(sealed)
    eventually(lambda: len(files - _segments(small_server)) >= SEGMENTS, what="fewer files")
    small1.append(sealed, "again")
    assert small1.diff(sealed).data == ["again"]
