"""A folder that changes between planning and reading: log files are absorbed, segments dropped or moved, topics
deleted, shards renumbered. A query gets the records that it planned, or the exact range that is gone.

The reader is used without Spark, so that a test decides what happens between its steps.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from e2e.client import Client, Lost
from e2e.server import Server, eventually
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_pipeline import batches
from spark_pipeline.plan import DataLoss
from spark_pipeline.source import SlicePartition, TopicsReader, register
from topics.datadir.files import Files
from topics.storage.manifest import MANIFEST_NAME

from .sourceplay import flushed, frame, reader, rows, rows_of, snapshots

pytestmark = pytest.mark.timeout(400)  # the first query of a session takes long on a busy machine

StartServer = Callable[..., Server]
SMALL = {"TOPICS_SEGMENT_MAX_EVENTS": 50, "TOPICS_WAL_FILE_BYTES": 1 << 20}
PAD = "z" * 2_000


class Planned:
    """A query between its planning and its tasks."""

    def __init__(self, data_dir: Path, **options: str) -> None:
        self.data_dir = data_dir
        self.reader: TopicsReader = reader(data_dir, **options)
        self.parts = list(self.reader.partitions())

    @property
    def files(self) -> set[str]:
        return {
            piece.file
            for part in self.parts
            if isinstance(part, SlicePartition)
            for each in part.parts
            for piece in each.pieces
        }

    def batches(self) -> Iterator[pa.RecordBatch]:
        for part in self.parts:
            yield from self.reader.read(part)

    def offsets(self) -> list[int]:
        return [row["offset"] for row in rows_of(self.batches())]

    def wait_gone(self, *, at_least: int = 1) -> None:
        """Until so many of the planned files are no longer there."""
        eventually(
            lambda: sum(not (self.data_dir / file).exists() for file in self.files) >= at_least,
            what=f"{at_least} of {sorted(self.files)} to go",
        )

    def wait_all_gone(self, *, at_least: int) -> None:
        """Until none of the planned files is there that a plan of now would not name, so many at least."""

        def are_gone() -> bool:
            useless = self.files - Planned(self.data_dir).files
            return len(useless) >= at_least and not any((self.data_dir / file).exists() for file in useless)

        eventually(are_gone, what=f"{at_least} of {sorted(self.files)} to go")


def write(api: Client, topic: str, count: int, *, by: int = 10) -> None:
    """Batches of which a few fill a block."""
    head = api.state(topic).json.get("head_seq", 0)
    for first in range(head + 1, head + count + 1, by):
        records = [{"data": {"n": n, "pad": PAD}} for n in range(first, first + by)]
        assert api.append_records(topic, records).status in (200, 201)


@pytest.fixture
def batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch on the disk becomes one of Arrow, so that a reader can be stopped between any two."""
    monkeypatch.setattr(batches, "_GROUP_ROWS", 1)


# --- log files that are absorbed into segments ---


def in_the_log(start_server: StartServer) -> Server:
    """1,000 records in three log files and in no segment."""
    server = start_server(TOPICS_WAL_SHARDS=1, TOPICS_WAL_FILE_BYTES=1 << 20)
    with server.client() as api:
        write(api, "t", 1_000)
    return server


def absorb(server: Server, start_server: StartServer) -> Server:
    """The next life moves all of it into segments."""
    assert server.stop() == 0
    return start_server(data_dir=server.data_dir, TOPICS_WAL_SHARDS=1, **SMALL)


def test_the_log_is_absorbed_before_it_is_read(start_server: StartServer) -> None:
    server = in_the_log(start_server)
    planned = Planned(server.data_dir)
    assert all(file.startswith("wal/") for file in planned.files)
    assert len(planned.files) == 3
    absorb(server, start_server)
    planned.wait_gone(at_least=3)
    assert planned.offsets() == list(range(1, 1_001))


@pytest.mark.usefixtures("batch_by_batch")
@pytest.mark.parametrize("taken", [1, 20, 33])
def test_the_log_is_absorbed_while_it_is_read(start_server: StartServer, taken: int) -> None:
    """The blocks begin elsewhere than the batches did, and no record may come twice for it."""
    server = in_the_log(start_server)
    planned = Planned(server.data_dir)
    reading = planned.batches()
    found = [row["offset"] for row in rows_of(next(reading) for _ in range(taken))]
    assert found == list(range(1, 10 * taken + 1))
    absorb(server, start_server)
    planned.wait_gone(at_least=3)
    found += [row["offset"] for row in rows_of(reading)]
    assert found == list(range(1, 1_001))


def test_what_was_planned_stays_bounded_when_it_is_looked_up_again(start_server: StartServer) -> None:
    """Neither records that came later nor such as the query did not ask for."""
    server = in_the_log(start_server)
    bounds = {"startingOffsets": '{"t": 101}', "endingOffsets": '{"t": 900}'}
    planned = Planned(server.data_dir, **bounds)
    everything = Planned(server.data_dir)
    again = absorb(server, start_server)
    with again.client() as api:
        write(api, "t", 50)
    everything.wait_gone(at_least=3)
    assert planned.offsets() == list(range(101, 900))
    assert everything.offsets() == list(range(1, 1_001))


def test_shards_are_renumbered(start_server: StartServer) -> None:
    server = start_server(TOPICS_WAL_SHARDS=2, **SMALL)
    with server.client() as api:
        for name in ("a", "b", "c"):
            write(api, name, 30)
    planned = Planned(server.data_dir)
    assert server.stop() == 0
    start_server(data_dir=server.data_dir, TOPICS_WAL_SHARDS=3, **SMALL)
    planned.wait_gone(at_least=len(planned.files))
    assert planned.offsets() == [*range(1, 31)] * 3


# --- segments that are dropped or moved ---


@pytest.fixture
def segmented(start_server: StartServer) -> Server:
    """t holds 600 records in at least ten segments."""
    server = start_server(**SMALL)
    with server.client() as api:
        write(api, "t", 600)
        flushed(api, server.data_dir, "t", segments=8)
        eventually(lambda: not any(file.startswith("wal/") for file in Planned(server.data_dir).files))
    return server


def test_deletes_that_empty_segments_are_no_loss(segmented: Server) -> None:
    planned = Planned(segmented.data_dir)
    with segmented.client() as api:
        api.delete("t", before_seq=301)
        snapshots(api)
    planned.wait_gone(at_least=3)
    assert planned.offsets() == list(range(301, 601))


@pytest.mark.usefixtures("batch_by_batch")
def test_what_was_read_before_it_was_deleted_has_been_read(segmented: Server) -> None:
    planned = Planned(segmented.data_dir)
    reading = planned.batches()
    found = [row["offset"] for row in rows_of([next(reading)])]
    assert found[-1] < 300
    with segmented.client() as api:
        api.delete("t", before_seq=301)
        snapshots(api)
    planned.wait_gone(at_least=3)
    found += [row["offset"] for row in rows_of(reading)]
    assert found[-300:] == list(range(301, 601))
    assert found[:-300] == list(range(1, found[-301] + 1))


def test_a_cap_that_drops_segments_is_an_exact_loss(segmented: Server) -> None:
    planned, forgiving = Planned(segmented.data_dir), Planned(segmented.data_dir, failOnDataLoss="false")
    from_401 = Planned(segmented.data_dir, startingOffsets='{"t": 401}')
    with segmented.client() as api:
        api.put("t", cap_records=250)
        snapshots(api)
    planned.wait_gone(at_least=3)
    with pytest.raises(DataLoss) as caught:
        planned.offsets()
    assert str(caught.value) == (
        "topic t: records 1 to 350 are gone (reason: cap, while they were read). Set failOnDataLoss to false to go on "
        "without them"
    )
    with pytest.warns(UserWarning, match=r"topic t: records 1 to 350 are gone \(reason: cap, while they were read\)"):
        assert forgiving.offsets() == list(range(351, 601))
    assert from_401.offsets() == list(range(401, 601))


@pytest.mark.usefixtures("batch_by_batch")
def test_only_what_was_not_read_yet_is_lost(segmented: Server) -> None:
    planned = Planned(segmented.data_dir)
    reading = planned.batches()
    found = [row["offset"] for row in rows_of(next(reading) for _ in range(3))]
    with segmented.client() as api:
        api.put("t", cap_records=250)
        snapshots(api)
    planned.wait_all_gone(at_least=3)
    assert found[-1] < 350
    with pytest.raises(DataLoss) as caught:
        found.extend(row["offset"] for batch in reading for row in rows_of([batch]))  # a run may have been read ahead
    assert found == list(range(1, len(found) + 1))
    assert str(caught.value).startswith(f"topic t: records {len(found) + 1} to 350 are gone (reason: cap, ")


def test_what_is_in_memory_when_the_next_file_is_gone_counts(
    segmented: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two segments are read, then the cap takes them and more."""
    planned = Planned(segmented.data_dir, minPartitions="1", failOnDataLoss="false")
    opened: list[str] = []
    plain = Files.open

    def open_and_change(files: Files, file: str) -> int:
        if file in planned.files:
            opened.append(file)
        if len(opened) == 3 and opened[-1] == file:
            with segmented.client() as api:
                api.put("t", cap_records=250)
                snapshots(api)
            planned.wait_gone(at_least=4)
        return plain(files, file)

    monkeypatch.setattr(Files, "open", open_and_change)
    with pytest.warns(UserWarning, match=r"records \d+ to 350 are gone \(reason: cap, while they were read\)") as told:
        found = planned.offsets()
    first = int(str(told[0].message).split()[3])
    assert first > 60
    assert found == [*range(1, first), *range(351, 601)]


def test_what_nobody_asked_for_may_go(segmented: Server) -> None:
    """A query for late records does not mind that early ones of the same topic went."""
    offsets = rows(segmented.data_dir, columns=["offset", "timestamp"])
    late = next(row["timestamp"] for row in offsets if row["offset"] == 500)
    planned = Planned(segmented.data_dir, startingTimestamp=str(late))
    expected = [row["offset"] for row in offsets if row["timestamp"] >= late]
    assert expected == list(range(expected[0], 601))
    assert 451 < expected[0] <= 500
    with segmented.client() as api:
        api.delete("t", before_seq=451)  # of the blocks that are read, so that they are looked up again
        api.put("t", cap_records=len(expected))  # batches before 500 may be of the same millisecond
        snapshots(api)
    eventually(lambda: len(Planned(segmented.data_dir).files) <= 4)
    assert planned.offsets() == expected


def test_a_topic_is_deleted(segmented: Server) -> None:
    with segmented.client() as api:
        write(api, "u", 10)
        planned = Planned(segmented.data_dir, minPartitions="1")
        forgiving = Planned(segmented.data_dir, minPartitions="1", failOnDataLoss="false")
        api.drop("t")
        snapshots(api)
    planned.wait_gone(at_least=8)
    with pytest.raises(DataLoss) as caught:
        planned.offsets()
    assert str(caught.value) == (
        "topic t: records 1 to 600 are gone (the topic was deleted while it was read). Set failOnDataLoss to false to "
        "go on without them"
    )
    with pytest.warns(UserWarning, match="records 1 to 600 are gone"):
        assert forgiving.offsets() == list(range(1, 11))


def test_a_topic_is_deleted_and_made_again(segmented: Server) -> None:
    """Records of the new one are not those that were planned."""
    planned = Planned(segmented.data_dir, minPartitions="1", failOnDataLoss="false")
    with segmented.client() as api:
        api.drop("t")
        write(api, "t", 20)
        snapshots(api)
    planned.wait_gone(at_least=8)
    with pytest.warns(UserWarning, match="records 1 to 600 are gone"):
        assert planned.offsets() == []


def move(data_dir: Path, cold: Path) -> int:
    """All sealed segments, with their indexes."""
    moved = 0
    for index in sorted((data_dir / "topics").rglob("*.idx")):
        for path in (index.with_suffix(".data"), index):
            target = cold / path.relative_to(data_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        moved += 1
    return moved


@pytest.mark.parametrize("told", ["by option", "by the manifest"])
def test_segments_move_to_the_cold_folder(segmented: Server, tmp_path: Path, told: str) -> None:
    assert segmented.stop() == 0
    data_dir, cold = segmented.data_dir, tmp_path / "cold"
    cold.mkdir()
    options = {}
    if told == "by option":
        options["coldPath"] = str(cold)
    else:
        manifest = json.loads((data_dir / MANIFEST_NAME).read_text())
        (data_dir / MANIFEST_NAME).write_text(json.dumps({**manifest, "cold": str(cold)}))
    planned = Planned(data_dir, **options)
    assert move(data_dir, cold) >= 8
    planned.wait_gone(at_least=8)
    assert planned.offsets() == list(range(1, 601))
    assert [row["offset"] for row in rows(data_dir, **options)] == list(range(1, 601))
    tiers = {row["tier"] for row in rows(data_dir, view="segments", **options) if row["sealed"] and row["topic"]}
    assert tiers == {"cold"}


# --- a server that writes all the time ---


class Writers:
    """So many at full speed, each to a topic of its own and all to a common one."""

    def __init__(self, server: Server, count: int) -> None:
        self._stop = threading.Event()
        self.acked: dict[str, int] = {}
        self._server = server
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(count)]

    def _write(self, number: int) -> None:
        with self._server.client() as api:
            while not self._stop.is_set():
                for topic in (f"own-{number}", "common"):
                    try:
                        answer = api.append(topic, *range(20))
                    except Lost:
                        continue
                    if answer.status in (200, 201):
                        self.acked[topic] = max(self.acked.get(topic, 0), answer["last_seq"])

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def check_prefixes(found: dict[str, list[int]], acked: dict[str, int]) -> None:
    for topic, head in acked.items():
        seqs = found[topic]
        assert seqs == list(range(1, len(seqs) + 1)), topic
        assert len(seqs) >= head, topic


def test_a_query_sees_a_prefix_of_every_topic_that_is_being_written(start_server: StartServer) -> None:
    server = start_server(**SMALL)
    with Writers(server, 3) as writers, warnings.catch_warnings():
        warnings.simplefilter("error")
        began = time.monotonic()
        looks = 0
        while time.monotonic() < began + 6 or looks < 5:
            acked = dict(writers.acked)
            found: dict[str, list[int]] = {}
            for row in rows(server.data_dir, columns=["topic", "offset"]):
                found.setdefault(row["topic"], []).append(row["offset"])
            check_prefixes(found, acked)
            for view in ("topics", "segments", "tombstones", "routers"):
                rows(server.data_dir, view=view)
            looks += 1
    assert sum(writers.acked.values()) > 1_000


def test_spark_sees_a_prefix_of_every_topic_that_is_being_written(
    spark: SparkSession, start_server: StartServer
) -> None:
    register(spark)
    server = start_server(**SMALL)
    with Writers(server, 2) as writers:
        eventually(lambda: len(writers.acked) == 3)
        for _ in range(4):
            acked = dict(writers.acked)
            counted = (
                frame(spark, server.data_dir, minPartitions="4")
                .groupBy("topic")
                .agg(F.count("*").alias("n"), F.min("offset").alias("first"), F.max("offset").alias("last"))
                .collect()
            )
            assert {row["topic"] for row in counted} >= set(acked)
            for row in counted:
                assert (row["n"], row["first"]) == (row["last"], 1), row
                assert row["last"] >= acked.get(row["topic"], 0)
