"""Every column of every view against what HTTP said, on the folder of a server that runs, was killed, or was stopped.

Each view is read twice: by the source's classes in this process, and by Spark, which must give the same rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_pipeline.schemas import VIEWS
from spark_pipeline.source import register
from topics.storage.config import owner_of_name
from topics.storage.format import DELETED, FILE_HEADER_BYTES, FrameType
from topics.storage.frames import decode_wal_header, scan
from topics.storage.segment import decode_segment_header, scan_blocks
from topics.storage.snapshot import TopicState, decode_snapshot, decode_topic

from .sourceplay import Row, collected, frame, in_order, rows
from .sourceworld import SPELLINGS, World, world

pytestmark = pytest.mark.timeout(400)  # the first query of a session takes long on a busy machine

SHARDS = 2


@pytest.fixture(scope="module", params=["running", "killed", "stopped"])
def end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def scene(end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp(end), end=end) as made:
        yield made


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


def shard_of(topic: str) -> int:
    return owner_of_name(topic, SHARDS)


def stripped(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


# --- records ---


def test_records_are_what_http_says(scene: World) -> None:
    found = rows(scene.data_dir, includeHeaders="true")
    assert [stripped(row, "shard") for row in found] == scene.records
    assert {row["topic"]: row["shard"] for row in found} == {row["topic"]: shard_of(row["topic"]) for row in found}
    columns = ["topic", "partition", "offset", "timestamp", "key", "value", "shard", "node", "meta"]
    assert list(found[0]) == columns


def test_values_are_spelt_as_they_were_sent(scene: World) -> None:
    assert [row["value"] for row in rows(scene.data_dir, subscribe="spellings")] == SPELLINGS


def test_tags_nodes_and_meta_are_null_or_not_by_record(scene: World) -> None:
    found = rows(scene.data_dir, subscribe="sides", includeHeaders="true")
    assert [row["key"] for row in found] == [None, None, "t", None, 'ключ \x01"', *[None] * 4, "all", None]
    assert [row["node"] for row in found] == [*[None] * 5, *["one for all"] * 2, "n8", None, "n10", None]
    assert [row["meta"] for row in found] == [*[None] * 7, '{"a": 1,  "b":"é\\u00e9"}', "{}", '{"x":null}', None]


def test_without_data_there_is_its_size(scene: World) -> None:
    found = rows(scene.data_dir, includeData="false")
    assert list(found[0]) == ["topic", "partition", "offset", "timestamp", "key", "size"]
    assert [row["size"] for row in found] == [len(row["value"]) for row in scene.records]
    assert [row["offset"] for row in found] == [row["offset"] for row in scene.records]


def test_deleted_records_are_shown_as_such_if_they_are_wanted(scene: World) -> None:
    found = rows(scene.data_dir, subscribe="erased", includeDeleted="true")
    assert [row["offset"] for row in found] == list(range(1, 71))
    assert {row["offset"]: row["value"] for row in found if row["deleted"]} == scene.deleted["erased"]
    live = [stripped(row, "deleted") for row in found if not row["deleted"]]
    assert live == rows(scene.data_dir, subscribe="erased")


def test_evicted_records_are_not_shown_as_deleted(scene: World) -> None:
    found = rows(scene.data_dir, subscribe="capped,slim", includeDeleted="true")
    assert not any(row["deleted"] for row in found)
    assert [(row["topic"], row["offset"]) for row in found] == [
        (row["topic"], row["offset"]) for row in scene.records if row["topic"] in ("capped", "slim")
    ]


# --- the other views ---


def test_topics(scene: World) -> None:
    found = {row["topic"]: row for row in rows(scene.data_dir, view="topics")}
    assert set(found) == {*scene.states, "mail#leases"}
    assert [name for name, row in found.items() if row["internal"]] == ["mail#leases"]
    deleted = {"erased": 26, "emptied": 3, "mail": 2}
    for name, state in scene.states.items():
        row = found[name]
        for field in ("head_seq", "earliest_seq", "count", "bytes", "type"):
            assert row[field] == state[field], (name, field)
        assert row["disk_seq"] == state["head_seq"]
        assert json.loads(row["config"]) == state["config"]
        assert row["durability"] == state["config"]["durability"]
        assert row["shard"] == shard_of(name)
        assert row["last_write"] == state["last_write_ts"]
        assert row["last_read"] is None or row["last_read"] <= state["last_read_ts"]  # not each read is written down
        lost = scene.lost.get(name, [])
        assert row["evict_floor"] == max((each["gap_to"] + 1 for each in lost), default=1)
        assert row["evicted"] == sum(each["missed_estimate"] for each in lost)
        assert row["deleted"] == deleted.get(name, 0)
        assert (row["expired"], row["lost"], row["trimmed"]) == (0, 0, 0)
        assert row["created"] is not None
        assert row["source"] == {"archive": "orders", "vip": "orders"}.get(name)
        assert row["segments"] == len(_segment_files(scene.data_dir, row["id"]))


def _segment_files(data_dir: Path, topic_id: str) -> list[str]:
    folder = data_dir / "topics" / topic_id
    return sorted(path.name for path in folder.glob("*.data")) if folder.is_dir() else []


def test_tombstones(scene: World) -> None:
    expected = [
        {
            "topic": name,
            "shard": shard_of(name),
            "reason": each["reason"],
            "gap_from": each["gap_from"],
            "gap_to": each["gap_to"],
            "missed": each["missed_estimate"],
        }
        for name, lost in sorted(scene.lost.items())
        for each in lost
    ]
    assert rows(scene.data_dir, view="tombstones") == expected
    assert {row["topic"] for row in expected} == {"capped", "slim"}


def test_routers(scene: World) -> None:
    found = {row["router"]: row for row in rows(scene.data_dir, view="routers")}
    assert set(found) == set(scene.routers) == {"orders->archive", "orders->vip"}
    for name, told in scene.routers.items():
        row = found[name]
        for field in ("source", "dest", "guarantee", "preserve_node", "preserve_tag", "allow_cycle"):
            assert row[field] == told[field], (name, field)
        assert (None if row["filter"] is None else json.loads(row["filter"])) == told["filter"]
        assert row["forwarded"] == told["forwarded_total"]
        assert row["shard"] == shard_of(told["dest"])
        head = scene.states["orders"]["head_seq"]
        assert (row["since"], row["source_head"], row["copied_to"], row["lag"]) == (1, head, head, 0)
        assert row["created"] is not None


def test_leases(scene: World, end: str) -> None:
    found = rows(scene.data_dir, view="leases")
    assert {(row["queue"], row["shard"]) for row in found} == {("mail", shard_of("mail"))}
    offsets = [row["offset"] for row in found]
    assert offsets == sorted(offsets)
    assert offsets[0] == 1
    assert [row["timestamp"] for row in found] == sorted(row["timestamp"] for row in found)
    events = [row for row in found if row["event"] != "checkpoint"]
    assert [row["state"] for row in events] == [None] * len(events)
    bare = [stripped(row, "queue", "shard", "offset", "timestamp", "state") for row in events]
    assert in_order(bare, "seq") == in_order(scene.leases, "seq")  # sorted stably: in order for each job
    table = [
        (row["seq"], row["node"], row["deliveries"], row["state"]) for row in found if row["event"] == "checkpoint"
    ]
    if end == "stopped":
        assert table == [(2, "w1", 1, "leased"), (3, "w2", 2, "leased"), (5, "w1", 1, "leased")]
    else:
        assert table == []


def test_segments(scene: World) -> None:
    """Against the files, taken apart here by what docs/FORMAT.md says."""
    found = rows(scene.data_dir, view="segments")
    names = {state.id: state.name for _, state in _snapshot_topics(scene.data_dir)}
    expected = [row for shard, state in _snapshot_topics(scene.data_dir) for row in _segments(scene, shard, state)]
    by_file = {row["file"]: row for row in found if row["kind"] == "segment"}
    assert len(expected) >= 23
    assert len(set(names.values())) == len(names)
    assert by_file == {row["file"]: row for row in expected}
    _check_wals(scene.data_dir, [row for row in found if row["kind"] == "wal"])


def _snapshot_topics(data_dir: Path) -> list[tuple[int, TopicState]]:
    found = []
    for shard in range(SHARDS):
        for path in sorted((data_dir / "wal" / f"shard-{shard:02d}").glob("*.snap"))[-1:]:
            state = decode_snapshot(path.read_bytes(), path=str(path))
            found += [(shard, decode_topic(raw)) for raw in state.topics]
    return found


def _segments(scene: World, shard: int, state: TopicState) -> Iterator[Row]:
    live_seqs = {row["offset"] for row in scene.records if row["topic"] == state.name}
    for known in state.segments:
        file = f"topics/{state.id:016x}/{known.first_seq:020d}.data"
        path = scene.data_dir / file
        data = path.read_bytes()[: known.data_bytes]
        salt = decode_segment_header(data, path=file).salt
        blocks = list(scan_blocks(data, salt=salt, path=file))
        seqs = [seq for entry, _ in blocks for seq in range(entry.first_seq, entry.first_seq + entry.count)]
        flags = b"".join(data[entry.flags_offset : entry.flags_offset + entry.count] for entry, _ in blocks)
        live = [seq for seq in seqs if seq in live_seqs]
        sizes = {row["offset"]: _counted(row) for row in scene.records if row["topic"] == state.name}
        yield {
            "shard": shard,
            "topic": state.name,
            "kind": "segment",
            "tier": "hot",
            "file": file,
            "first_seq": seqs[0],
            "last_seq": seqs[-1],
            "sealed": known.sealed,
            "file_bytes": os.stat(path).st_blocks * 512,
            "records": len(seqs),
            "live": len(live),
            "deleted": flags.count(DELETED),
            "dead": len(seqs) - len(live) - flags.count(DELETED),
            "live_bytes": sum(sizes[seq] for seq in live),
            "total_bytes": sum(entry.bytes for entry, _ in blocks),
            "first_time": blocks[0][0].first_ts,
            "last_time": blocks[-1][0].last_ts,
        }


def _counted(row: Row) -> int:
    return len(row["value"]) + len((row["meta"] or "").encode()) + 32


def _check_wals(data_dir: Path, found: list[Row]) -> None:
    files = sorted(str(path.relative_to(data_dir)) for path in (data_dir / "wal").rglob("*.wal"))
    assert [row["file"] for row in found] == files
    for row in found:
        data = (data_dir / row["file"]).read_bytes()
        header = decode_wal_header(data[:FILE_HEADER_BYTES], path=row["file"])
        frames = [each for each in scan(data, salt=header.salt) if each.type == FrameType.APPEND]
        assert (row["shard"], row["tier"], row["topic"]) == (header.shard, "hot", None)
        assert row["records"] == sum(each.count for each in frames)
        assert 0 <= row["live"] <= row["records"]
        assert row["file_bytes"] == os.stat(data_dir / row["file"]).st_blocks * 512
        newest = [each for each in files if os.path.dirname(each) == os.path.dirname(row["file"])][-1]
        assert row["sealed"] is (row["file"] != newest)


# --- through Spark ---


@pytest.mark.parametrize("view", VIEWS)
def test_spark_gives_the_same_rows(session: SparkSession, scene: World, view: str) -> None:
    options = {"includeHeaders": "true", "includeDeleted": "true"} if view == "records" else {"view": view}
    key = {
        "records": ("topic", "offset"),
        "topics": ("topic",),
        "segments": ("file",),
        "leases": ("offset", "seq"),
        "tombstones": ("topic",),
        "routers": ("router",),
    }[view]
    df = frame(session, scene.data_dir, **options)
    expected = rows(scene.data_dir, **options)
    assert in_order(collected(df), *key) == in_order(expected, *key)
    assert expected
