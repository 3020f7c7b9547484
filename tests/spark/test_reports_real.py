"""Every number of every report against a real server: counted in plain Python from what clients see, and where clients
see nothing, from the files."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_pipeline.reports.subjects import integrity, letters, loss, producers, queues, routers, skew, storage, traffic
from spark_pipeline.reports.subjects.hours import DAY_MS, HOUR_MS, day_of, millis
from spark_pipeline.source import register
from topics.storage.config import owner_of_name
from topics.storage.leases import log_name

from . import reportscene
from .reportplay import Play, Stored, findings, lease_events, metrics, percentile, size_of, stored, table
from .reportscene import Scene

pytestmark = pytest.mark.timeout(600)  # a Spark on a busy machine

SHARDS = 2
QUEUES = ("jobs", "idle", "other")
WORKED = ("jobs", "other")  # those with a leases log


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return reportscene.play(tmp_path_factory.mktemp("scene"))


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


@pytest.fixture
def play(session: SparkSession, scene: Scene, tmp_path: Path) -> Play:
    return Play(session, tmp_path, data_dir=scene.data_dir)


class Written:
    """A record that was written and can still be read by somebody who asks for deleted ones, too."""

    def __init__(self, topic: str, seq: int, ts: int, size: int, node: str | None) -> None:
        self.topic, self.seq, self.ts, self.size, self.node = topic, seq, ts, size, node


@pytest.fixture(scope="module")
def written(scene: Scene) -> list[Written]:
    """What is live, from HTTP; what was deleted and is still on the disk, from there."""
    found = []
    for topic, records in scene.truth.records.items():
        for record in records:
            found.append(Written(topic, record["$seq"], record["$ts"], size_of(record), record.get("$node")))
        evicted = max(
            (gap["gap_to"] for gap in scene.truth.tombstones[topic] if gap["reason"] != "source_trim"), default=0
        )
        gone = [record for record in stored(scene.data_dir, topic) if record.deleted and record.seq > evicted]
        found += [Written(topic, record.seq, record.ts, len(record.data), record.node) for record in gone]
    return found


def test_the_scene_has_something_of_everything(scene: Scene, written: list[Written]) -> None:
    """Otherwise the comparisons below would compare nothing."""
    states = scene.truth.states
    live = sum(state["count"] for state in states.values())
    assert live > 400
    assert len(written) > live, "no deleted record is on the disk any more"
    assert {shard_of(topic) for topic in states} == {0, 1}
    reasons = {gap["reason"] for gaps in scene.truth.tombstones.values() for gap in gaps}
    assert reasons == {"cap", "ttl", "source_trim"}
    assert list((scene.data_dir / "topics").glob("*/*.data"))
    assert list((scene.data_dir / "topics").glob("*/*.idx"))
    assert states["jobs"]["queue"]["in_flight"] > 0


def shard_of(topic: str) -> int:
    return owner_of_name(topic, SHARDS)


# --- traffic -----------------------------------------------------------------------------------------


def test_traffic_counts_every_record_in_its_hour(play: Play, scene: Scene, written: list[Written]) -> None:
    result = play.run(traffic, now_ms=scene.now_ms)
    expected: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for record in written:
        sums = expected[record.topic, record.ts - record.ts % HOUR_MS]
        sums[0] += 1
        sums[1] += record.size
    saved = {
        (row["topic"], round(row["hour"].timestamp() * 1_000)): [row["records"], row["bytes"]]
        for row in play.saved("traffic", "hourly")
    }
    assert saved == dict(expected)
    summary = result.summary
    assert (summary["records"], summary["bytes"]) == (len(written), sum(record.size for record in written))
    assert (summary["day_records"], summary["day_bytes"]) == (summary["records"], summary["bytes"])
    assert summary["topics"] == len({record.topic for record in written})
    assert summary["change_percent"] is None
    by_topic = Counter(record.topic for record in written)
    rows = table(result, "Busiest topics")
    assert {row["topic"]: row["records, 24 h"] for row in rows} == by_topic
    assert [row["topic"] for row in rows] == sorted(by_topic, key=lambda topic: (-by_topic[topic], topic))
    assert metrics(result, "traffic_topic_day_records") == {(topic,): count for topic, count in by_topic.items()}
    (series,) = result.charts[0].series
    assert sum(count for _, count in series.points) == len(written)
    stacked = result.charts[2]
    assert sum(count for each in stacked.series for _, count in each.points) == len(written)


def test_traffic_knows_how_much_it_has_not_seen(play: Play, scene: Scene, written: list[Written]) -> None:
    heads = {topic: state["head_seq"] for topic, state in scene.truth.states.items() if topic != "flash"}
    result = play.run(traffic, now_ms=scene.now_ms)
    assert result.summary["written_since_last_run"] == sum(heads.values())
    assert result.summary["read_since_last_run"] == len(written)
    assert result.summary["unseen_since_last_run"] == sum(heads.values()) - len(written)
    again = play.run(traffic, now_ms=scene.now_ms + 1)
    assert again.summary["records"] == len(written), "a second run counted records again, or lost some"
    assert again.summary["written_since_last_run"] == 0
    assert again.summary["unseen_since_last_run"] == 0
    assert again.summary["last_run_ms"] == scene.now_ms


def test_traffic_three_days_later(play: Play, scene: Scene, written: list[Written]) -> None:
    """Nothing came since: every topic is silent, and a usual day had what was written, over the days that are known."""
    now_ms = scene.now_ms + 3 * DAY_MS
    result = play.run(traffic, now_ms=now_ms)
    first = min(record.ts for record in written)
    first -= first % HOUR_MS
    days = (now_ms - now_ms % HOUR_MS - 23 * HOUR_MS - first) / DAY_MS
    assert result.summary["day_records"] == 0
    assert result.summary["week_records"] == len(written)
    assert result.summary["usual_day_records"] == pytest.approx(len(written) / days)
    assert result.summary["change_percent"] == -100
    assert result.summary["silent_topics"] == len({record.topic for record in written})
    assert any("Silent for a day" in text for text in findings(result, "notice"))


def test_since_leaves_out_what_is_older(play: Play, scene: Scene) -> None:
    result = play.run(traffic, now_ms=scene.now_ms, since_ms=scene.now_ms + DAY_MS)
    assert result.summary["records"] == 0
    assert result.tables[0].rows == []
    assert play.run(traffic, now_ms=scene.now_ms).summary["records"] > 0, "what was left out must not be forgotten"


# --- storage -----------------------------------------------------------------------------------------


def test_storage(play: Play, scene: Scene, written: list[Written]) -> None:
    result = play.run(storage, now_ms=scene.now_ms)
    summary = result.summary
    logs = [record for queue in WORKED for record in stored(scene.data_dir, log_name(queue))]
    states = scene.truth.states
    assert summary["live_records"] == sum(state["count"] for state in states.values()) + len(logs)
    assert summary["live_bytes"] == sum(state["bytes"] for state in states.values()) + sum(
        len(record.data) + 32 for record in logs
    )
    assert summary["topics"] == len(states)
    data = list((scene.data_dir / "topics").glob("*/*.data"))
    log_files = list((scene.data_dir / "wal").glob("*/*.wal"))
    assert summary["segments"] == len(data)
    assert summary["sealed_segments"] == len(list((scene.data_dir / "topics").glob("*/*.idx")))
    assert summary["segment_bytes"] == sum(path.stat().st_blocks * 512 for path in data) == summary["hot_bytes"]
    assert summary["cold_bytes"] == 0
    assert summary["wal_files"] == len(log_files)
    assert summary["wal_bytes"] == sum(path.stat().st_blocks * 512 for path in log_files)
    assert summary["disk_bytes"] == summary["segment_bytes"] + summary["wal_bytes"]
    disk = os.statvfs(scene.data_dir)
    assert summary["disk_size_bytes"] == disk.f_blocks * disk.f_frsize
    assert summary["free_bytes"] == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.05)
    assert (summary["daily_growth_bytes"], summary["days_to_full"]) == (None, None)
    rows = {row["topic"]: row for row in table(result, "Largest topics")}
    for topic, state in states.items():
        assert (rows[topic]["live records"], rows[topic]["live"]) == (state["count"], state["bytes"])
    (chart,) = [chart for chart in result.charts if chart.title == "Written by day"]
    by_day: Counter[int] = Counter()
    for record in written:
        by_day[record.ts - record.ts % DAY_MS] += record.size + 32
    assert {day: count for day, count in chart.series[0].points if count} == by_day


def test_storage_tells_what_lies_dead_in_segments(play: Play, scene: Scene) -> None:
    result = play.run(storage, now_ms=scene.now_ms)
    rows = {row["topic"]: row for row in table(result, "Largest topics")}
    live = {record["$seq"] for record in scene.truth.records["orders"]}
    in_segments = _in_segments(scene, "orders")
    gone = [record for record in in_segments if record.seq not in live]
    assert gone
    assert all(record.deleted for record in gone)
    assert rows["orders"]["records deleted"] == len(gone)
    assert rows["orders"]["records dead"] == 0
    assert rows["orders"]["deleted or dead"] == sum(len(record.data) + 32 for record in gone)
    names = ("deleted_bytes", "dead_bytes", "deleted_or_dead_bytes")
    (total,) = metrics(result, "storage_gone_bytes").values()
    assert sum(result.summary[name] for name in names) == total
    assert total == sum(row["deleted or dead"] for row in rows.values())


def _in_segments(scene: Scene, topic: str) -> list[Stored]:
    """Of a topic all of whose records have been moved there."""
    found = stored(scene.data_dir, topic)
    assert list((scene.data_dir / "topics").glob(f"{_id_of(scene, topic)}/*.data"))
    return found


def _id_of(scene: Scene, topic: str) -> str:
    from topics.storage.paths import parse_topic_dir

    for folder in (scene.data_dir / "topics").iterdir():
        topic_id = parse_topic_dir(folder.name)
        assert topic_id is not None
        if topic_id & 0xFFFF == _bucket(topic):
            return folder.name
    raise AssertionError(f"{topic} has no folder")


def _bucket(topic: str) -> int:
    from topics.storage.config import bucket_of

    return bucket_of(topic)


# --- queues ------------------------------------------------------------------------------------------


class Worked:
    """The truth about a queue, from its leases log and the jobs on the disk."""

    def __init__(self, data_dir: Path, queue: str) -> None:
        posted = {record.seq: record.ts for record in stored(data_dir, queue)}
        self.waits: list[int] = []
        self.services: list[int] = []
        self.unknown = 0
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        claimed: dict[int, int] = {}
        for ts, event in lease_events(data_dir, queue) if queue in WORKED else []:
            seqs, numbers = event.get("seqs", []), event.get("leases", [])
            if event["event"] not in ("checkpoint", "extended"):
                self.counts[event["event"]] += len(seqs)
            self.reasons[event.get("reason", "")] += len(seqs)
            for at, (seq, lease) in enumerate(zip(seqs, numbers, strict=True)):
                if event["event"] == "claimed":
                    claimed[lease] = ts
                    if event.get("deliveries", [1] * len(seqs))[at] > 1:
                        self.counts["redelivered"] += 1
                    elif seq in posted:
                        self.waits.append(ts - posted[seq])
                    else:
                        self.unknown += 1
                elif event["event"] == "acked":
                    self.services.append(ts - claimed[lease])
        self.counts.update(dict.fromkeys(("claimed", "redelivered", "acked", "released", "dead_lettered"), 0))


def test_queues(play: Play, scene: Scene) -> None:
    result = play.run(queues, now_ms=scene.now_ms)
    times = {row["queue"]: row for row in table(result, "Times, last seven days")}
    jobs = {row["queue"]: row for row in table(result, "Jobs, last seven days and now")}
    assert set(times) == set(jobs) == set(QUEUES)
    truth = {queue: Worked(scene.data_dir, queue) for queue in QUEUES}
    for queue in QUEUES:
        worked = truth[queue]
        for kind, values in (("waiting", worked.waits), ("service", worked.services)):
            for label, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                expected = pytest.approx(percentile(values, share)) if values else None
                assert times[queue][f"{kind} {label}"] == expected, (queue, kind, label)
        assert times[queue]["waits not known"] == worked.unknown
        assert times[queue]["services not known"] == 0
        assert {name: jobs[queue][name.replace("_", " ")] for name in worked.counts} == dict(worked.counts)
        state = scene.truth.states[queue]
        assert jobs[queue]["ready"] == state["queue"]["ready"]
        assert jobs[queue]["in flight"] == state["queue"]["in_flight"]
        assert jobs[queue]["delayed"] == state["count"] - state["queue"]["ready"] - state["queue"]["in_flight"]
    waits = [wait for worked in truth.values() for wait in worked.waits]
    assert result.summary["wait_p95_ms"] == pytest.approx(percentile(waits, 0.95))
    assert result.summary["wait_jobs"] == len(waits)
    assert result.summary["released_by_reason"] == {
        reason: sum(worked.reasons[reason] for worked in truth.values()) for reason in ("nack", "expired")
    }
    assert result.summary["dead_lettered"] == 4
    assert truth["jobs"].counts["redelivered"] >= 5


def test_the_oldest_ready_job(play: Play, scene: Scene) -> None:
    """Idle's first job has never been claimed; jobs' are known to HTTP by claiming them only."""
    now_ms = scene.now_ms + 2 * HOUR_MS
    result = play.run(queues, now_ms=now_ms)
    jobs = {row["queue"]: row for row in table(result, "Jobs, last seven days and now")}
    first = min(record["$ts"] for record in scene.truth.records["idle"])
    assert jobs["idle"]["oldest ready since"] == first
    assert jobs["idle"]["that is"] == now_ms - first
    assert jobs["other"]["oldest ready since"] is None
    # Two hours later every lease has ended, and so has the delay: all that is left can be claimed.
    assert jobs["jobs"]["ready"] == scene.truth.states["jobs"]["count"]
    assert jobs["jobs"]["oldest ready since"] == min(record["$ts"] for record in scene.truth.records["jobs"])
    assert any("has been ready for 2h" in text for text in findings(result, "notice"))


def test_queues_again_count_nothing_twice(play: Play, scene: Scene) -> None:
    once = play.run(queues, now_ms=scene.now_ms)
    twice = play.run(queues, now_ms=scene.now_ms)
    assert twice.summary == once.summary


# --- letters -----------------------------------------------------------------------------------------


def test_letters(play: Play, scene: Scene) -> None:
    result = play.run(letters, now_ms=scene.now_ms)
    expected: dict[tuple[str, str, str | None], list[dict[str, Any]]] = defaultdict(list)
    for topic, records in scene.truth.records.items():
        for record in records:
            source = record.get("meta", {}).get("$dead_letter_from")
            if source is not None:
                expected[source, topic, record.get("$tag")].append(record)
    assert {key[0] for key in expected} == {"jobs", "other"}
    rows = table(result, "By queue and tag")
    assert {(row["queue"], row["now in topic"], row["tag"]) for row in rows} == set(expected)
    for row in rows:
        found = expected[row["queue"], row["now in topic"], row["tag"]]
        assert (row["letters"], row["still there"]) == (len(found), len(found))
        times = [record["$ts"] for record in found]
        assert (row["first seen"], row["last seen"]) == (min(times), max(times))
        assert row["most deliveries"] == max(int(record["meta"]["$dead_letter_deliveries"]) for record in found)
    assert result.summary["letters"] == sum(len(found) for found in expected.values())
    assert metrics(result, "letters_queue_present") == {
        (queue,): sum(len(found) for key, found in expected.items() if key[0] == queue) for queue in ("jobs", "other")
    }
    again = play.run(letters, now_ms=scene.now_ms)
    assert again.summary == result.summary


# --- loss --------------------------------------------------------------------------------------------


def test_loss_tells_every_tombstone_that_readers_get(play: Play, scene: Scene) -> None:
    result = play.run(loss, now_ms=scene.now_ms)
    rows = {
        (row["topic"], row["reason"], row["from seq"], row["to seq"]): row["records missed"]
        for row in table(result, "Tombstones")
    }
    expected = {
        (topic, gap["reason"], gap["gap_from"], gap["gap_to"]): gap["missed_estimate"]
        for topic, gaps in scene.truth.tombstones.items()
        for gap in gaps
    }
    assert rows == expected
    by_reason = Counter[str]()
    for key, count in rows.items():
        by_reason[key[1]] += count
    assert metrics(result, "loss_tombstone_records") == {(reason,): count for reason, count in by_reason.items()}


def test_the_books_balance(play: Play, scene: Scene) -> None:
    result = play.run(loss, now_ms=scene.now_ms)
    audit = {row["topic"]: row for row in play.saved("loss", "audit")}
    assert set(audit) == set(scene.truth.states) | {log_name(queue) for queue in WORKED}
    for topic, state in scene.truth.states.items():
        row = audit[topic]
        gaps = scene.truth.tombstones[topic]
        missed = Counter[str]()
        for gap in gaps:
            missed[gap["reason"]] += gap["missed_estimate"]
        assert (row["assigned"], row["live"]) == (state["head_seq"], state["count"])
        assert row["unexplained"] == 0
        # To a reader it is a cap that took what went with a process; here it is what it is.
        crashed = missed["cap"] if state["config"]["durability"] == "ephemeral" else 0
        evicted = missed["cap"] - crashed
        assert (row["evicted"], row["expired"], row["trimmed"]) == (evicted, missed["ttl"], missed["source_trim"])
        assert row["deleted"] == state["head_seq"] - state["count"] - sum(missed.values())
        assert (row["lost"], row["skipped"], row["uncounted"]) == (crashed, 0, 0)
    assert findings(result, "breach") == []
    assert metrics(result, "loss_unexplained_seqs") == {(): 0}
    assert result.summary["assigned"] == sum(row["assigned"] for row in audit.values())


# --- integrity ---------------------------------------------------------------------------------------


def test_everything_is_whole(play: Play, scene: Scene) -> None:
    result = play.run(integrity, now_ms=scene.now_ms)
    assert result.summary["problems"] == 0
    assert findings(result, "breach") == []
    data = list((scene.data_dir / "topics").glob("*/*.data"))
    log_files = list((scene.data_dir / "wal").glob("*/*.wal"))
    indexes = list((scene.data_dir / "topics").glob("*/*.idx"))
    assert result.summary["files"] == len(data) + len(log_files)
    assert result.summary["bytes"] == sum(path.stat().st_size for path in [*data, *log_files, *indexes])
    assert [row["shard"] for row in result.summary["by_shard"]] == [0, 1]
    assert result.summary["orphans"] == 0


# --- skew --------------------------------------------------------------------------------------------


def test_skew(play: Play, scene: Scene) -> None:
    result = play.run(skew, now_ms=scene.now_ms)
    expected: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
    for topic, state in scene.truth.states.items():
        sums = expected[shard_of(topic)]
        sums["topics"] += 1
        sums["records"] += state["count"]
        sums["bytes"] += state["bytes"]
        sums["written"] += 0 if topic == "flash" else state["head_seq"]
    for queue in WORKED:
        records = stored(scene.data_dir, log_name(queue))
        sums = expected[shard_of(queue)]
        sums["records"] += len(records)
        sums["bytes"] += sum(len(record.data) + 32 for record in records)
        sums["written"] += records[-1].seq
    for row in result.summary["by_shard"]:
        sums = expected[row["shard"]]
        for name in ("topics", "records", "bytes", "written"):
            assert row[name] == sums[name], (row["shard"], name)
            if name != "topics":
                total = sum(each[name] for each in expected.values())
                assert row[f"{name}_share"] == pytest.approx(100 * sums[name] / total)
        folder = scene.data_dir / "wal" / f"shard-{row['shard']:02d}"
        assert row["wal_bytes"] == sum(path.stat().st_blocks * 512 for path in folder.glob("*.wal"))
    for name in ("written", "records", "bytes"):
        values = [sums[name] for sums in expected.values()]
        mean = sum(values) / len(values)
        apart = sum(abs(one - other) for one in values for other in values)
        assert metrics(result, "skew_max_mean")[(name,)] == pytest.approx(max(values) / mean)
        assert metrics(result, "skew_gini")[(name,)] == pytest.approx(apart / (2 * len(values) ** 2 * mean))
    hot = [row for row in table(result, "Hottest topics") if row["shard"] == shard_of("orders")]
    assert hot[0]["topic"] == "orders"
    assert hot[0]["share of its shard"] == pytest.approx(
        100 * scene.truth.states["orders"]["head_seq"] / expected[shard_of("orders")]["written"]
    )
    again = play.run(skew, now_ms=scene.now_ms + 1)
    assert [row["written"] for row in again.summary["by_shard"]] == [0, 0]
    assert again.summary["written_since_ms"] == scene.now_ms


# --- producers ---------------------------------------------------------------------------------------


def test_producers(play: Play, scene: Scene, written: list[Written]) -> None:
    result = play.run(producers, now_ms=scene.now_ms)
    by_node: dict[str | None, list[Written]] = defaultdict(list)
    for record in written:
        by_node[record.node].append(record)
    assert {"till-1", "till-2", "till-3", "clock", None} <= set(by_node)
    rows = {row["node"]: row for row in table(result, "Volume by node")}
    assert set(rows) == {node or "(no node)" for node in by_node}
    for node, records in by_node.items():
        row = rows[node or "(no node)"]
        sizes = [record.size for record in records]
        assert (row["records"], row["data"], row["largest"]) == (len(records), sum(sizes), max(sizes))
        assert row["last seen"] == max(record.ts for record in records)
        for label, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            assert row[f"size {label}"] == pytest.approx(percentile(sizes, share))
    sizes = [record.size for record in written]
    assert metrics(result, "producers_data_bytes") == {
        ("p50",): pytest.approx(percentile(sizes, 0.5)),
        ("p95",): pytest.approx(percentile(sizes, 0.95)),
        ("p99",): pytest.approx(percentile(sizes, 0.99)),
        ("max",): max(sizes),
    }
    assert result.summary["nodes"] == len(by_node) - 1
    assert result.summary["records_without_node"] == len(by_node[None])
    assert result.summary["silent_nodes"] == 0


def test_nodes_fall_silent_after_a_day(play: Play, scene: Scene, written: list[Written]) -> None:
    nodes = sorted({record.node for record in written if record.node is not None})
    after = play.run(producers, now_ms=scene.now_ms + DAY_MS + HOUR_MS)
    assert sorted(row["node"] for row in table(after, "Silent nodes")) == nodes
    assert after.summary["silent_nodes"] == len(nodes)
    forgotten = play.run(producers, now_ms=scene.now_ms + 9 * DAY_MS)
    assert forgotten.summary["silent_nodes"] == 0
    assert forgotten.summary["records"] == len(written)


# --- routers -----------------------------------------------------------------------------------------


def test_routers(play: Play, scene: Scene) -> None:
    result = play.run(routers, now_ms=scene.now_ms)
    rows = {row["router"]: row for row in table(result, "Routers")}
    assert set(rows) == set(scene.truth.routers)
    for name, router in scene.truth.routers.items():
        assert rows[name]["copies"] == router["forwarded_total"]
        assert (rows[name]["source"], rows[name]["dest"]) == (router["source"], router["dest"])
    copied = scene.truth.states["full"]["head_seq"]
    behind = scene.truth.states["plenty"]["head_seq"] - copied
    assert behind == 4
    assert {name: row["lag"] for name, row in rows.items()} == {
        name: behind if name == "plenty->full" else 0 for name in scene.truth.routers
    }
    assert result.summary["lag"] == behind
    assert result.summary["forwarded"] == sum(router["forwarded_total"] for router in scene.truth.routers.values())
    assert result.summary["stalled"] == 0, "its source was written to a moment ago"
    later = play.run(routers, now_ms=scene.now_ms + 5 * 60_000)
    assert [row["router"] for row in table(later, "Routers") if row["stands still"]] == ["plenty->full"]
    assert metrics(later, "routers_stalled") == {(): 1}
    assert any("plenty->full" in text for text in findings(later, "notice"))
    assert [row["since the last run"] for row in table(later, "Routers")] == [0] * len(rows)


# --- days and hours ----------------------------------------------------------------------------------


def test_days_are_those_of_utc_whatever_the_session_says(session: SparkSession) -> None:
    from pyspark.sql import functions as F

    from spark_pipeline.reports.subjects.hours import date_of, hour_of

    moments = [1_794_787_199_999, 1_794_787_200_000, 1_794_864_785_213]
    before = session.conf.get("spark.sql.session.timeZone")
    session.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        frame = session.createDataFrame([(ms,) for ms in moments], "ms bigint")
        time = F.timestamp_millis("ms")
        rows = frame.select("ms", date_of(time).alias("date"), millis(hour_of(time)).alias("hour")).collect()
    finally:
        session.conf.set("spark.sql.session.timeZone", before)
    for row in rows:
        assert row["date"] == day_of(row["ms"])
        assert row["hour"] == row["ms"] - row["ms"] % HOUR_MS
    assert [row["date"].isoformat() for row in rows] == ["2026-11-15", "2026-11-16", "2026-11-16"]
