"""Streams step by step, without Spark: where they begin, what a batch holds, and what happens to topics meanwhile."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import livefiles
import pytest
from e2e.client import Client, unique
from e2e.queues import make_queue
from e2e.routing import route, wait_records
from e2e.server import Server, eventually

from spark_pipeline.options import OptionError
from spark_pipeline.plan import DataLoss
from spark_pipeline.source import TopicsSource

from .sourceplay import Row, StreamPlay, on_disk, places, said, schema_of, snapshots, stream_reader

StartServer = Callable[..., Server]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stream")
    server = Server(folder / "data", log=folder / "server.log", TOPICS_SEGMENT_MAX_EVENTS=50)
    try:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.output(), server.output()[-3_000:]
    finally:
        server.close()


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def stem() -> str:
    """What the topics of one test begin with."""
    return unique("s") + "."


def span(topic: str, first: int, last: int) -> list[tuple[str, int]]:
    return [(topic, seq) for seq in range(first, last + 1)]


# --- where it begins ---


def test_a_new_query_begins_with_what_comes(server: Server, api: Client, stem: str) -> None:
    api.append(stem + "a", 1, 2, 3)
    query = StreamPlay(server.data_dir, subscribePattern=stem + ".*")
    assert query.step() is None
    api.append(stem + "a", 4, 5)
    assert places(query.step() or []) == span(stem + "a", 4, 5)
    assert query.step() is None


def test_other_beginnings(server: Server, api: Client, stem: str) -> None:
    a, b = stem + "a", stem + "b"
    api.append(a, *range(10))
    api.append(b, *range(5))

    def begin(**options: Any) -> list[tuple[str, int]]:
        return places(StreamPlay(server.data_dir, subscribe=f"{a},{b}", **options).drain())

    assert begin(startingOffsets="earliest") == span(a, 1, 10) + span(b, 1, 5)
    assert begin(startingOffsets="latest") == []
    assert begin(startingOffsets=f'{{"{a}": 8, "{b}": -1}}') == span(a, 8, 10)
    assert begin(startingOffsets=f'{{"{a}": {{"0": 8}}}}') == span(a, 8, 10) + span(b, 1, 5)
    late = said(api, b)[0][0]["timestamp"]
    early = [row for row in said(api, a)[0] if row["timestamp"] >= late]
    assert begin(startingTimestamp=str(late)) == places(early) + span(b, 1, 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"view": "topics"}, "option view: topics can't be streamed; records, leases and tombstones can"),
        ({"endingOffsets": '{"x": 3}'}, "a stream has no end: leave out endingOffsets and endingTimestamp"),
        ({"topicIds": "{}"}, "option topicIds is for spark.read: a stream knows the topics that it has begun with"),
        ({"endingTimestamp": "5"}, "a stream has no end: leave out endingOffsets and endingTimestamp"),
    ],
)
def test_what_can_not_be_streamed(server: Server, options: dict[str, str], said: str) -> None:
    given = {"path": str(server.data_dir), **options}
    refused = TopicsSource(given).streamReader(schema_of(given))
    for ask in (refused.initialOffset, lambda: refused.partitions({}, {})):
        with pytest.raises(OptionError) as caught:
            ask()
        assert str(caught.value) == said


def test_a_topic_that_is_not_there(server: Server) -> None:
    with pytest.raises(OptionError, match="option subscribe: there is no topic nobody"):
        StreamPlay(server.data_dir, subscribe="nobody")


# --- batches ---


def test_a_batch_never_holds_more_than_allowed_and_no_topic_waits_for_another(
    server: Server, api: Client, stem: str
) -> None:
    sizes = {stem + "large": 200, stem + "middle": 40, stem + "small": 3}
    for name, count in sizes.items():
        api.append(name, *range(count))
    query = StreamPlay(
        server.data_dir, subscribePattern=stem + ".*", startingOffsets="earliest", maxOffsetsPerTrigger="25"
    )
    batches = []
    while (batch := query.step()) is not None:
        assert 0 < len(batch) <= 25
        batches.append(places(batch))
    assert {topic for topic, _ in batches[0]} == set(sizes)
    found = sorted(place for batch in batches for place in batch)
    assert found == sorted(place for name, count in sizes.items() for place in span(name, 1, count))
    assert len(batches) <= 16


def test_topics_take_turns_where_there_are_more_than_records(server: Server, api: Client, stem: str) -> None:
    names = [f"{stem}{n}" for n in range(7)]
    for name in names:
        api.append(name, *range(50))
    query = StreamPlay(
        server.data_dir, subscribePattern=stem + ".*", startingOffsets="earliest", maxOffsetsPerTrigger="3"
    )
    seen: dict[str, int] = dict.fromkeys(names, 0)
    for _ in range(14):
        for name in names:
            api.append(name, "and on")
        batch = query.step() or []
        assert 0 < len(batch) <= 3
        for topic, seq in places(batch):
            assert seq == seen[topic] + 1
            seen[topic] = seq
    assert set(seen.values()) == {6}


def test_what_is_there_now_ends(server: Server, api: Client, stem: str) -> None:
    api.append(stem + "a", *range(30))
    query = StreamPlay(
        server.data_dir,
        available_now=True,
        subscribePattern=stem + ".*",
        startingOffsets="earliest",
        maxOffsetsPerTrigger="8",
    )
    found = []
    for _ in range(100):
        api.append(stem + "a", "later")
        api.append(stem + "b", "a new topic")
        batch = query.step()
        if batch is None:
            break
        found += places(batch)
    assert found == span(stem + "a", 1, 30)


def test_deleted_records_count_as_read(server: Server, api: Client, stem: str) -> None:
    api.append_records(stem + "a", [{"data": n, "tag": "x" if n < 8 else None} for n in range(10)])
    query = StreamPlay(server.data_dir, subscribePattern=stem + ".*", startingOffsets="earliest")
    api.delete(stem + "a", match=["tag", "Eq", "x"])
    assert places(query.drain()) == span(stem + "a", 9, 10)
    api.append(stem + "a", 1)
    api.delete(stem + "a", before_seq=12)
    assert query.drain() == []


def test_a_batch_is_the_same_whenever_it_is_read(start_server: StartServer) -> None:
    """Also by another process after a kill, from segments instead of the log, and with more written since."""
    server = start_server(TOPICS_SEGMENT_MAX_EVENTS=100_000)
    with server.client() as api:
        for n in range(10):
            api.append("a", *range(n * 10, n * 10 + 10))
            api.append("b", n)
    query = StreamPlay(server.data_dir, startingOffsets="earliest", maxOffsetsPerTrigger="37")
    start, end = query.at, query.next_offset()
    first = query.batch(start, end)
    assert len(first) == 36
    server.kill()
    assert query.batch(start, end) == first
    again = start_server(data_dir=server.data_dir, TOPICS_SEGMENT_MAX_EVENTS=1)
    with again.client() as api:
        api.append("a", "later")
        api.append("c", "another")
        snapshots(api)
        for _ in range(3):
            assert query.batch(start, end) == first
            query.restart()
        eventually(
            lambda: not livefiles.find(server.data_dir, "wal/*/00000001-000000000001.wal"), what="an absorbed log"
        )
        assert query.batch(start, end) == first


def test_a_reader_travels_without_what_it_has_seen(server: Server, api: Client, stem: str) -> None:
    api.append(stem + "a", *range(500))
    query = StreamPlay(server.data_dir, subscribePattern=stem + ".*", startingOffsets="earliest")
    end = query.next_offset()
    parts = query.reader.partitions(query.at, end)
    packed = pickle.dumps(query.reader)
    assert len(packed) < 2_000
    copy = pickle.loads(packed)
    assert sum(batch.num_rows for part in parts for batch in copy.read(part)) == 500


# --- topics that come and go ---


def test_new_topics_are_read_from_their_first_record(server: Server, api: Client, stem: str) -> None:
    api.append(stem + "a", 1)
    query = StreamPlay(server.data_dir, subscribePattern=stem + ".*")
    api.append(stem + "b", 1, 2)
    api.put(stem + "c")
    assert places(query.drain()) == span(stem + "b", 1, 2)
    api.append(stem + "c", 1)
    assert places(query.drain()) == span(stem + "c", 1, 1)


def test_what_a_new_topic_lost_before_its_first_batch_is_a_loss(server: Server, api: Client, stem: str) -> None:
    options: dict[str, Any] = {"subscribePattern": stem + ".*"}
    query = StreamPlay(server.data_dir, **options)
    forgiving = StreamPlay(server.data_dir, failOnDataLoss="false", **options)
    api.put(stem + "a", cap_records=2)
    api.append(stem + "a", *range(5))
    with pytest.raises(DataLoss, match=rf"^topic {stem}a: records 1 to 3 are gone \(reason: cap\)"):
        query.drain()
    with pytest.warns(UserWarning, match=r"records 1 to 3 are gone \(reason: cap\)"):
        assert places(forgiving.drain()) == span(stem + "a", 4, 5)


def test_what_a_cap_took_of_the_unread_is_a_loss(server: Server, api: Client, stem: str) -> None:
    api.put(stem + "a", cap_records=3)
    options: dict[str, Any] = {"subscribePattern": stem + ".*"}
    query = StreamPlay(server.data_dir, **options)
    forgiving = StreamPlay(server.data_dir, failOnDataLoss="false", **options)
    api.append(stem + "a", *range(10))
    with pytest.raises(DataLoss, match=rf"^topic {stem}a: records 1 to 7 are gone \(reason: cap\)"):
        query.drain()
    with pytest.warns(UserWarning, match=r"records 1 to 7 are gone \(reason: cap\)"):
        assert places(forgiving.drain()) == span(stem + "a", 8, 10)


def test_a_topic_that_is_deleted_is_left_out(server: Server, api: Client, stem: str) -> None:
    for name in "ab":
        api.append(stem + name, 1, 2, 3)
    query = StreamPlay(server.data_dir, subscribePattern=stem + ".*", startingOffsets="earliest")
    end = query.next_offset()
    api.drop(stem + "a")
    assert places(query.batch(query.at, end)) == span(stem + "b", 1, 3)  # between planning an offset and a batch
    assert places(query.drain()) == span(stem + "b", 1, 3)
    assert list(query.at) == [stem + "b"]


def test_a_topic_that_is_deleted_while_a_batch_is_read_is_left_out(start_server: StartServer) -> None:
    server = start_server(TOPICS_SEGMENT_MAX_EVENTS=10)
    with server.client() as api:
        api.append("a", *range(100))
        api.append("b", 1)
        query = StreamPlay(server.data_dir, startingOffsets="earliest")
        eventually(lambda: livefiles.find(server.data_dir, "topics/**/*.data"), what="a segment")
        snapshots(api)

        def planned_from_segments() -> bool:
            query.restart()
            parts = query.reader.partitions(query.at, query.next_offset())
            return not any(piece.file.startswith("wal/") for part in parts for piece in part.parts[0].pieces)

        eventually(planned_from_segments, what="a plan without the log")
        parts = query.reader.partitions(query.at, query.next_offset())
        api.drop("a")
        snapshots(api)
        eventually(lambda: not livefiles.find(server.data_dir, "topics/**/*.data"), what="no segment")
        assert sum(batch.num_rows for part in parts for batch in query.reader.read(part)) == 1


@pytest.mark.parametrize("noticed", [False, True])
def test_a_topic_that_is_made_again(server: Server, api: Client, stem: str, noticed: bool) -> None:
    """Asked for by name it is told, whether or not a batch came in between."""
    a, b = stem + "a", stem + "b"
    for name in (a, b):
        api.append(name, 1, 2, 3)
    options: dict[str, Any] = {"subscribe": f"{a},{b}", "startingOffsets": "earliest"}
    query = StreamPlay(server.data_dir, **options)
    forgiving = StreamPlay(server.data_dir, failOnDataLoss="false", **options)
    for each in (query, forgiving):
        assert len(each.drain()) == 6
    api.drop(a)
    if noticed:
        api.append(b, 4)
        for each in (query, forgiving):
            assert places(each.drain()) == span(b, 4, 4)
    api.append(a, "new", "newer")
    with pytest.raises(
        DataLoss, match=f"^topic {a} was deleted and made again; what was not read of it before is gone"
    ):
        query.drain()
    with pytest.warns(UserWarning, match=f"topic {a} was deleted and made again"):
        assert places(forgiving.drain()) == span(a, 1, 2)


# --- copies of routers ---


def test_copies_are_read_when_they_are_on_the_disk(server: Server, api: Client, stem: str) -> None:
    source, dest = stem + "source", stem + "dest"
    api.append(source, 0)
    route(api, source, dest)
    query = StreamPlay(server.data_dir, subscribePattern=stem + ".*", startingOffsets="earliest")
    assert places(query.drain()) == span(source, 1, 1)
    found = []
    for n in range(5):
        api.append(source, n)
        api.append(dest, f"direct {n}")  # logged at once, behind copies that are not
        wait_records(api, dest, 2 * n + 2)
        found += places(query.drain())
    on_disk(server.data_dir, dest, head=10)
    found += places(query.drain())
    assert sorted(found) == span(dest, 1, 10) + span(source, 2, 6)
    assert len(set(found)) == len(found)


# --- the other views ---


def test_leases(server: Server, api: Client, stem: str) -> None:
    """An event reaches the log a moment after the worker was answered."""
    query = StreamPlay(server.data_dir, view="leases", subscribePattern=stem + ".*")
    queue = make_queue(api, stem + "q")
    queue.produce(*range(5))
    assert query.drain() == []
    events: list[Row] = []

    def wait_events(count: int) -> None:
        events.clear()

        def enough() -> bool:
            events.extend(query.drain())
            return len(events) >= count

        eventually(enough, what=f"{count} events")

    queue.take(3, node="w1")
    wait_events(3)
    assert [(row["queue"], row["event"], row["node"], row["seq"]) for row in events] == [
        (stem + "q", "claimed", "w1", seq) for seq in (1, 2, 3)
    ]
    queue.ack([1, 2], node="w1")
    queue.nack([3], node="w1")
    wait_events(3)
    assert [(row["event"], row["seq"]) for row in events] == [("acked", 1), ("acked", 2), ("released", 3)]
    assert query.drain() == []


def test_tombstones(server: Server, api: Client, stem: str) -> None:
    a = stem + "a"
    api.put(a, cap_records=5)
    api.append(a, *range(8))
    query = StreamPlay(server.data_dir, view="tombstones", subscribePattern=stem + ".*")

    def told() -> list[tuple[str, str, int, int, int]]:
        return [tuple(row[k] for k in ("topic", "reason", "gap_from", "gap_to", "missed")) for row in query.drain()]

    assert told() == [(a, "cap", 1, 3, 3)]
    assert told() == []
    api.delete(a, before_seq=6)  # 4 and 5: nobody lost them
    api.append(a, *range(4))
    assert told() == [(a, "cap", 4, 7, 2)]
    query.restart()
    api.append(a, 1)
    assert told() == [(a, "cap", 8, 8, 1)]
    api.drop(a)
    assert told() == []
    api.put(a, cap_records=1)
    api.append(a, 1, 2)
    assert told() == [(a, "cap", 1, 1, 1)]


def test_tombstones_that_are_there_now_end(server: Server, api: Client, stem: str) -> None:
    api.put(stem + "a", cap_records=1)
    api.append(stem + "a", 1, 2)
    options = {"view": "tombstones", "subscribePattern": stem + ".*"}
    query = StreamPlay(server.data_dir, available_now=True, **options)
    api.append(stem + "a", 3)
    assert [(row["gap_from"], row["gap_to"]) for row in query.drain()] == [(1, 1)]
    assert stream_reader(server.data_dir, **options).reportLatestOffset()[stem + "a"]["floor"] == 3


def test_the_folder_is_never_written(start_server: StartServer) -> None:
    """A folder that nobody serves is the same afterwards, to the byte and to the time of each file."""
    server = start_server()
    with server.client() as api:
        api.append("a", 1, 2, 3)
    server.kill()

    def state() -> dict[str, tuple[int, int, bytes]]:
        files = [path for path in livefiles.find(Path(server.data_dir), "**/*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size, path.read_bytes()) for path in files}

    before = state()
    assert len(StreamPlay(server.data_dir, startingOffsets="earliest").drain()) == 3
    assert StreamPlay(server.data_dir, view="tombstones").drain() == []
    assert state() == before
