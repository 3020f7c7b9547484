"""What takes days, and what must never happen: rows of our own instead of a server's, at times that a test chooses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_pipeline.reports.subjects import letters, loss, producers, queues, routers, skew, storage, traffic
from spark_pipeline.reports.subjects.hours import DAY_MS, HOUR_MS, MINUTE_MS
from topics.storage.manifest import MANIFEST_NAME, Manifest, encode_manifest

from .reportplay import Frames, Play, findings, metrics, table

pytestmark = pytest.mark.timeout(600)  # a Spark on a busy machine

NOW = 1_794_864_785_213  # 2026-11-16 21:33 UTC
HOUR = NOW - NOW % HOUR_MS
TODAY = NOW - NOW % DAY_MS


@pytest.fixture
def frames(spark: SparkSession) -> Frames:
    return Frames(spark)


@pytest.fixture
def play(spark: SparkSession, frames: Frames, tmp_path: Path) -> Play:
    return Play(spark, tmp_path, frames=frames)


def records(topic: str, times: list[int], *, first: int = 1, **fields: Any) -> list[dict[str, Any]]:
    found = {"size": 10, "deleted": False, **fields}
    return [{"topic": topic, "offset": seq, "timestamp": ts, **found} for seq, ts in enumerate(times, first)]


def topic(name: str, head: int, **fields: Any) -> dict[str, Any]:
    """A topic that holds all that it was given."""
    usual = {
        "topic": name,
        "id": f"{name}-1",
        "shard": 0,
        "type": "log",
        "internal": False,
        "durability": "disk",
        "head_seq": head,
        "disk_seq": head,
        "evict_floor": 1,
        "count": head,
        "bytes": head * 42,
        **dict.fromkeys(("deleted", "evicted", "expired", "lost", "trimmed", "skipped", "unsettled"), 0),
    }
    return {**usual, **fields}


# --- traffic -----------------------------------------------------------------------------------------


def test_a_day_is_compared_with_the_week_before(play: Play, frames: Frames) -> None:
    week = [HOUR - 23 * HOUR_MS - day * DAY_MS for day in range(1, 8) for _ in range(4)]  # 4 on each of seven days
    day = [HOUR - 23 * HOUR_MS, *[NOW] * 5]  # the first moment of the day, and now
    older = [HOUR - 30 * DAY_MS] * 9
    frames.rows = {"records": records("t", sorted([*older, *week, *day])), "topics": [topic("t", 43)]}
    summary = play.run(traffic, now_ms=NOW).summary
    assert (summary["day_records"], summary["week_records"], summary["records"]) == (6, 28, 43)
    assert summary["usual_day_records"] == pytest.approx(4)
    assert summary["change_percent"] == pytest.approx(50)


def test_the_day_begins_with_its_first_hour(play: Play, frames: Frames) -> None:
    times = [HOUR - 23 * HOUR_MS - 1, HOUR - 23 * HOUR_MS]
    frames.rows = {"records": records("t", times), "topics": [topic("t", 2)]}
    summary = play.run(traffic, now_ms=NOW).summary
    assert (summary["week_records"], summary["day_records"]) == (1, 1)


def test_a_young_topic_is_compared_with_the_days_it_has(play: Play, frames: Frames) -> None:
    old = records("old", [HOUR - 6 * DAY_MS] * 7 + [NOW] * 2)
    young = records("young", [HOUR - 23 * HOUR_MS - 2 * DAY_MS] * 10 + [NOW] * 20)
    newest = records("newest", [HOUR - 30 * HOUR_MS, NOW])
    frames.rows = {"records": old + young + newest, "topics": []}
    rows = {row["topic"]: row for row in table(play.run(traffic, now_ms=NOW), "Busiest topics")}
    assert rows["young"]["records a day, week before"] == pytest.approx(5)
    assert rows["young"]["change"] == pytest.approx(300)
    assert rows["newest"]["records a day, week before"] is None
    assert rows["newest"]["change"] is None


def test_hours_of_two_runs_add_up(play: Play, frames: Frames) -> None:
    frames.rows = {"records": records("t", [HOUR] * 3), "topics": [topic("t", 3)]}
    assert play.run(traffic, now_ms=HOUR + 1).summary["records"] == 3
    frames.rows["records"] += records("t", [HOUR + 5] * 4, first=4)
    frames.rows["topics"] = [topic("t", 9)]
    result = play.run(traffic, now_ms=NOW)
    assert result.summary["records"] == 7
    (row,) = play.saved("traffic", "hourly")
    assert (row["topic"], row["records"], row["bytes"]) == ("t", 7, 70)
    assert (result.summary["written_since_last_run"], result.summary["unseen_since_last_run"]) == (6, 2)
    assert any("2 records came and went" in text for text in findings(result, "ok"))


def test_a_topic_that_was_made_again_has_written_anew(play: Play, frames: Frames) -> None:
    frames.rows = {"topics": [topic("t", 50)]}
    play.run(traffic, now_ms=NOW - 1)
    frames.rows["topics"] = [topic("t", 7, id="t-2")]
    assert play.run(traffic, now_ms=NOW).summary["written_since_last_run"] == 7


def test_an_empty_folder_has_reports_too(play: Play, frames: Frames) -> None:
    for module in (traffic, storage, queues, letters, loss, skew, producers, routers):
        result = play.run(module, now_ms=NOW)
        assert findings(result, "breach") == []
        assert all(series.points for chart in result.charts for series in chart.series)
        again = play.run(module, now_ms=NOW + 1)
        assert findings(again, "breach") == []


# --- storage -----------------------------------------------------------------------------------------


def segment(**fields: Any) -> dict[str, Any]:
    usual = {"shard": 0, "topic": "t", "kind": "segment", "tier": "hot", "sealed": True, "deleted": 0, "dead": 0}
    return {**usual, "records": 10, "live": 10, "live_bytes": 420, "total_bytes": 420, "file_bytes": 4_096, **fields}


def test_growth_is_what_the_folder_grew(play: Play, frames: Frames, tmp_path: Path) -> None:
    frames.rows = {"topics": [topic("t", 10)], "segments": [segment()]}
    play.run(storage, now_ms=NOW - 2 * DAY_MS)
    frames.rows["segments"] = [segment(), segment(file_bytes=2_000_000)]
    result = play.run(storage, now_ms=NOW)
    assert result.summary["daily_growth_bytes"] == pytest.approx(1_000_000)
    assert result.summary["growth_basis"] == "size of earlier runs"
    disk = os.statvfs(tmp_path)
    days = disk.f_bavail * disk.f_frsize / 1_000_000
    assert result.summary["days_to_full"] == pytest.approx(days, rel=0.05)
    assert metrics(result, "storage_days_to_full") == {(): result.summary["days_to_full"]}
    (chart,) = [chart for chart in result.charts if chart.title == "Size by day"]
    assert [size for _, size in chart.series[0].points] == [4_096, 2_004_096]


@pytest.mark.parametrize("on_one_disk", [False, True])
def test_growth_on_another_disk_does_not_fill_this_one(
    play: Play, frames: Frames, tmp_path: Path, on_one_disk: bool
) -> None:
    cold = tmp_path if on_one_disk else Path("/dev/shm")
    if not on_one_disk and cold.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    manifest = Manifest(format=1, layout=1, shards=1, cold=str(cold))
    (tmp_path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    frames.rows = {"topics": [topic("t", 10)], "segments": [segment(), segment(tier="cold")]}
    play.run(storage, now_ms=NOW - DAY_MS)
    frames.rows["segments"][1] = segment(tier="cold", file_bytes=9_000_000)
    result = play.run(storage, now_ms=NOW)
    assert result.summary["disk_bytes"] == 9_004_096
    if on_one_disk:
        assert result.summary["daily_growth_bytes"] == pytest.approx(9_000_000 - 4_096)
        assert result.summary["days_to_full"] > 0
    else:
        assert (result.summary["daily_growth_bytes"], result.summary["days_to_full"]) == (0, None)
        assert metrics(result, "storage_days_to_full") == {}


def test_a_folder_that_shrinks_is_never_full(play: Play, frames: Frames) -> None:
    frames.rows = {"topics": [topic("t", 10)], "segments": [segment(file_bytes=9_000_000)]}
    play.run(storage, now_ms=NOW - 2 * DAY_MS)
    frames.rows["segments"] = [segment()]
    result = play.run(storage, now_ms=NOW)
    assert result.summary["daily_growth_bytes"] < 0
    assert result.summary["days_to_full"] is None
    assert any("not growing" in text for text in findings(result, "ok"))


def test_without_history_growth_is_what_was_written(play: Play, frames: Frames) -> None:
    times = [TODAY - 4 * DAY_MS] * 6 + [TODAY - 1] * 2 + [TODAY] * 100
    frames.rows = {"topics": [topic("t", 108)], "records": records("t", times, size=68)}
    result = play.run(storage, now_ms=NOW)
    assert result.summary["daily_growth_bytes"] == pytest.approx(8 * 100 / 4)
    assert result.summary["growth_basis"] == "records written before today"


def test_a_disk_that_is_full_tomorrow_is_a_breach(
    play: Play, frames: Frames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = os.statvfs(tmp_path)
    much = disk.f_bavail * disk.f_frsize  # in a day
    frames.rows = {"topics": [topic("t", 10)], "segments": [segment(file_bytes=0)]}
    play.run(storage, now_ms=NOW - DAY_MS)
    frames.rows["segments"] = [segment(file_bytes=much)]
    result = play.run(storage, now_ms=NOW)
    assert result.summary["days_to_full"] == pytest.approx(1, rel=0.1)
    assert len(findings(result, "breach")) == 1


def test_bytes_that_are_gone_are_told_apart_where_they_can_be(play: Play, frames: Frames) -> None:
    frames.rows["topics"] = [topic("t", 40)]
    frames.rows["segments"] = [
        segment(deleted=2, live=8, live_bytes=300),
        segment(dead=5, live=5, live_bytes=200, tier="cold", file_bytes=8_192),
        segment(deleted=1, dead=1, live=8, live_bytes=320),
        segment(),
        {"shard": 0, "kind": "wal", "tier": "hot", "sealed": False, "file_bytes": 1_000, "total_bytes": 77},
    ]
    summary = play.run(storage, now_ms=NOW).summary
    found = {name: summary[name] for name in ("deleted_bytes", "dead_bytes", "deleted_or_dead_bytes")}
    assert found == {"deleted_bytes": 120, "dead_bytes": 220, "deleted_or_dead_bytes": 100}
    assert (summary["deleted_records"], summary["dead_records"]) == (3, 6)
    assert (summary["segments"], summary["cold_segments"], summary["wal_bytes"]) == (4, 1, 1_000)
    assert (summary["hot_bytes"], summary["cold_bytes"], summary["disk_bytes"]) == (3 * 4_096, 8_192, 21_480)


# --- queues ------------------------------------------------------------------------------------------


def event(offset: int, ts: int, name: str, seq: int | None, lease: str | None, **fields: Any) -> dict[str, Any]:
    usual = {"queue": "q", "shard": 0, "offset": offset, "timestamp": ts, "event": name, "seq": seq, "lease": lease}
    return {**usual, "node": "w", **({"deliveries": 1} if name == "claimed" else {}), **fields}


def queue_frames(frames: Frames, jobs: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    live = len([job for job in jobs if not job["deleted"]])
    frames.rows = {"topics": [topic("q", len(jobs), type="queue", count=live)], "records": jobs, "leases": events}


def test_an_ack_finds_a_claim_of_an_earlier_run(play: Play, frames: Frames) -> None:
    jobs = records("q", [NOW - 1_000] * 2)
    queue_frames(frames, jobs, [event(1, NOW - 400, "claimed", 1, "l1", deadline=NOW + MINUTE_MS)])
    first = play.run(queues, now_ms=NOW).summary
    assert (first["wait_p50_ms"], first["service_p50_ms"], first["in_flight"]) == (600, None, 1)
    later = [event(2, NOW + 300, "acked", 1, "l1"), event(3, NOW + 500, "acked", 2, "unheard of")]
    queue_frames(frames, [{**job, "deleted": True} for job in jobs], [*frames.rows["leases"], *later])
    second = play.run(queues, now_ms=NOW + 1_000).summary
    assert (second["service_p50_ms"], second["service_jobs"]) == (700, 1)
    assert second["service_unknown"] == 1, "an ack without a claim is counted and not guessed"
    assert (second["wait_p50_ms"], second["wait_jobs"]) == (600, 1), "a wait was counted again"
    assert (second["acked"], second["ready"], second["in_flight"]) == (2, 0, 0)
    third = play.run(queues, now_ms=NOW + 2_000).summary
    assert {**third, "oldest_ready_since_ms": None} == {**second, "oldest_ready_since_ms": None}


def test_a_job_that_left_the_disk_has_no_known_wait(play: Play, frames: Frames) -> None:
    queue_frames(frames, records("q", [NOW], first=2), [event(1, NOW, "claimed", 1, "l1")])
    result = play.run(queues, now_ms=NOW + 1)
    assert (result.summary["wait_unknown"], result.summary["wait_jobs"], result.summary["wait_p50_ms"]) == (1, 0, None)
    assert metrics(result, "queues_unknown_wait_jobs") == {(): 1}


def test_only_a_first_delivery_is_a_wait(play: Play, frames: Frames) -> None:
    events = [
        event(1, NOW + 10, "claimed", 1, "l1"),
        event(2, NOW + 20, "released", 1, "l1", reason="nack"),
        event(3, NOW + 90, "claimed", 1, "l2", deliveries=2),
        event(4, NOW + 99, "acked", 1, "l2"),
    ]
    queue_frames(frames, records("q", [NOW], deleted=True), events)
    summary = play.run(queues, now_ms=NOW + 100).summary
    assert (summary["wait_p99_ms"], summary["wait_jobs"], summary["redelivered"]) == (10, 1, 1)
    assert (summary["service_p50_ms"], summary["service_jobs"]) == (9, 1)
    assert summary["released_by_reason"] == {"nack": 1}


def test_who_holds_what_now(play: Play, frames: Frames) -> None:
    """docs/FORMAT.md: nothing before the last checkpoint counts, and only events of a job's last lease do."""
    past, later = NOW - 1, NOW + MINUTE_MS
    checkpoint = [
        event(5, NOW - 50, "checkpoint", 2, "l2", deadline=later, deliveries=1, state="leased"),
        event(5, NOW - 50, "checkpoint", 3, "l3", deadline=past, deliveries=1, state="expired"),
        event(5, NOW - 50, "checkpoint", 4, "l4", deadline=later, deliveries=1, state="delayed"),
        event(5, NOW - 50, "checkpoint", 5, "l5", deadline=None, deliveries=1, state="free"),
    ]
    events = [
        event(1, NOW - 90, "claimed", 1, "l1", deadline=later),  # before the checkpoint, which does not know it
        event(2, NOW - 80, "claimed", 2, "l2", deadline=past),
        *checkpoint,
        event(6, NOW - 40, "claimed", 6, "l6", deadline=later),
        event(7, NOW - 39, "claimed", 7, "l7", deadline=past),
        event(8, NOW - 38, "claimed", 8, "l8", deadline=past),
        event(9, NOW - 37, "extended", 8, "l8", deadline=later),
        event(10, NOW - 36, "claimed", 9, "l9", deadline=later),
        event(11, NOW - 35, "released", 9, "l9", deadline=later, reason="nack"),
        event(12, NOW - 34, "claimed", 10, "l10", deadline=later),
        event(13, NOW - 33, "released", 10, "l10", reason="disconnect"),
        event(14, NOW - 32, "claimed", 11, "l11", deadline=later, deliveries=2),
        event(15, NOW - 31, "released", 11, "of an earlier lease", reason="nack"),
    ]
    jobs = records("q", [NOW - 1_000 + seq for seq in range(12)])  # 12 is fresh
    queue_frames(frames, jobs, events)
    result = play.run(queues, now_ms=NOW)
    (row,) = play.saved("queues", "state")
    in_flight, delayed = {2, 6, 8, 11}, {4, 9}
    ready = set(range(1, 13)) - in_flight - delayed
    assert (row["in_flight"], row["delayed"], row["ready"]) == (len(in_flight), len(delayed), len(ready))
    assert row["oldest_ready"] == NOW - 1_000
    assert result.summary["claimed"] == 8
    assert result.summary["oldest_ready_since_ms"] == NOW - 1_000


def test_old_days_leave_the_week(play: Play, frames: Frames) -> None:
    queue_frames(frames, records("q", [NOW]), [event(1, NOW + 5, "claimed", 1, "l1")])
    assert play.run(queues, now_ms=NOW + 6).summary["claimed"] == 1
    assert play.run(queues, now_ms=NOW + 6 * DAY_MS).summary["claimed"] == 1
    assert play.run(queues, now_ms=NOW + 7 * DAY_MS).summary["claimed"] == 0


def test_the_oldest_ready_job_may_be_in_a_queue_that_no_table_shows(play: Play, frames: Frames) -> None:
    names = [f"q{number:02d}" for number in range(21)]
    held = [event(1, NOW - MINUTE_MS, "claimed", 1, "l1", queue=name, deadline=NOW + 1) for name in names[:20]]
    held += [event(2, NOW, "claimed", 2, "l2", queue=name, deadline=NOW + 1) for name in names[:20]]
    last = [
        event(1, NOW - HOUR_MS, "claimed", 1, "l1", queue="q20"),
        event(2, NOW - HOUR_MS + 500, "acked", 1, "l1", queue="q20"),
    ]
    jobs = [job for name in names[:20] for job in records(name, [NOW - MINUTE_MS] * 2)]
    jobs += records("q20", [NOW - 3 * HOUR_MS], deleted=True) + records("q20", [NOW - 2 * HOUR_MS], first=2)
    topics = [topic(name, 2, type="queue") for name in names]
    frames.rows = {"topics": topics, "records": jobs, "leases": held + last}
    result = play.run(queues, now_ms=NOW)
    assert "q20" not in [row["queue"] for row in table(result, "Times, last seven days")]
    assert findings(result, "notice") == ["Queue q20 has a job that has been ready for 2h."]
    assert (result.summary["oldest_ready_since_ms"], result.summary["ready"]) == (NOW - 2 * HOUR_MS, 1)
    assert metrics(result, "queues_wait_seconds")[("q20", "p95")] == 2 * 3_600
    assert metrics(result, "queues_service_seconds") == {("q20", label): 0.5 for label in ("p50", "p95", "p99")}


# --- letters -----------------------------------------------------------------------------------------


def test_letters_that_were_redriven_stay_in_the_history(play: Play, frames: Frames) -> None:
    meta = '{"trace": "$dead_letter_from", "$dead_letter_from": "mail", "$dead_letter_deliveries": 3}'
    dead = records("mail.dead", [NOW - 9, NOW - 5], meta=meta, key="user:1")
    other = records("chat", [NOW], meta='{"deep": {"$dead_letter_from": "nobody"}}')
    frames.rows = {"records": dead + other, "topics": [topic("mail.dead", 2), topic("chat", 1)]}
    (row,) = table(play.run(letters, now_ms=NOW), "By queue and tag")
    assert (row["queue"], row["tag"], row["letters"], row["still there"]) == ("mail", "user:1", 2, 2)
    frames.rows["records"] = dead[1:] + records("mail.dead", [NOW + 3], first=3, meta=meta) + other
    result = play.run(letters, now_ms=NOW + 10)
    rows = {row["tag"]: row for row in table(result, "By queue and tag")}
    assert (rows["user:1"]["letters"], rows["user:1"]["still there"]) == (2, 1)
    assert (rows["user:1"]["first seen"], rows["user:1"]["last seen"]) == (NOW - 9, NOW - 5)
    assert (rows[None]["letters"], rows[None]["still there"]) == (1, 1)
    assert metrics(result, "letters_seen") == {(): 3}
    frames.rows = {"topics": [topic("chat", 1)]}  # the topic is gone, and its letters with it
    assert play.run(letters, now_ms=NOW + 20).summary["present"] == 0


# --- loss --------------------------------------------------------------------------------------------


@pytest.mark.gate
def test_a_seq_without_an_explanation_is_a_breach(play: Play, frames: Frames) -> None:
    frames.rows["topics"] = [
        topic("fine", 10),
        topic("short", 10, count=6, deleted=1),
        topic("long", 10, count=10, deleted=2),
        topic("all", 28, count=1, deleted=2, evicted=3, expired=4, lost=5, trimmed=6, skipped=7, evict_floor=8),
    ]
    result = play.run(loss, now_ms=NOW)
    assert findings(result, "breach") == [
        "3 seqs of topic short have no explanation.",
        "Topic long accounts for 2 seqs more than were given out.",
    ]
    off = {row["topic"]: row["unexplained"] for row in table(result, "Topics whose books do not balance")}
    assert off == {"short": 3, "long": -2}
    assert metrics(result, "loss_unexplained_seqs") == {(): 5}
    assert metrics(result, "loss_unbalanced_topics") == {(): 2}


def test_what_was_in_memory_only_is_not_unexplained(play: Play, frames: Frames) -> None:
    frames.rows["topics"] = [
        topic("flash", 100, durability="ephemeral", count=0),
        topic("copies", 100, disk_seq=90, count=90, unsettled=10),
        topic("between", 100, disk_seq=90, count=93, unsettled=7),  # clients wrote some of the last ten
        topic("short", 100, disk_seq=90, count=80, unsettled=10),  # and ten below them are missing
    ]
    result = play.run(loss, now_ms=NOW)
    audit = {row["topic"]: (row["uncounted"], row["unexplained"]) for row in play.saved("loss", "audit")}
    assert audit == {"flash": (100, 0), "copies": (10, 0), "between": (7, 0), "short": (10, 10)}
    assert findings(result, "breach") == ["10 seqs of topic short have no explanation."]


@pytest.mark.gate
def test_neither_a_floor_nor_deletes_hide_what_is_missing(play: Play, frames: Frames) -> None:
    frames.rows["topics"] = [
        topic("skips", 100_010, count=10, skipped=100_000),
        topic("capped", 100, count=10, evicted=70, evict_floor=91),
        topic("deleted", 100, count=60, deleted=30, evict_floor=41),
    ]
    result = play.run(loss, now_ms=NOW)
    off = {row["topic"]: row["unexplained"] for row in table(result, "Topics whose books do not balance")}
    assert off == {"capped": 20, "deleted": 10}
    assert "100,000 seqs were skipped by a crash: no record had or will have them." in findings(result, "ok")
    assert metrics(result, "loss_records")[("skipped",)] == 100_000


@pytest.mark.gate
def test_tombstones_are_summed_by_reason(play: Play, frames: Frames) -> None:
    def gap(name: str, reason: str, first: int, last: int, missed: int) -> dict[str, Any]:
        return {"topic": name, "shard": 0, "reason": reason, "gap_from": first, "gap_to": last, "missed": missed}

    frames.rows["tombstones"] = [
        gap("a", "cap", 1, 100, 90),
        gap("b", "cap", 1, 10, 10),
        gap("b", "lost", 20, 24, 5),
        gap("c", "mixed", 1, 7, 7),
    ]
    result = play.run(loss, now_ms=NOW)
    assert metrics(result, "loss_tombstone_records") == {("cap",): 100, ("lost",): 5, ("mixed",): 7}
    assert [row["topic"] for row in table(result, "Tombstones")] == ["a", "b", "c", "b"]
    assert result.summary["ranges"] == 4


# --- skew --------------------------------------------------------------------------------------------


def test_skew_looks_back_a_week(play: Play, frames: Frames) -> None:
    def heads(hot: int, cold: int) -> list[dict[str, Any]]:
        return [topic("hot", hot), topic("cold", cold, shard=1), topic("log", 7, shard=1, internal=True)]

    for days, hot, cold in ((20, 100, 1_000), (8, 500, 2_000), (3, 5_000, 2_100)):
        frames.rows["topics"] = heads(hot, cold)
        play.run(skew, now_ms=NOW - days * DAY_MS)
    frames.rows["topics"] = heads(9_500, 3_000)
    result = play.run(skew, now_ms=NOW)
    assert [row["written"] for row in result.summary["by_shard"]] == [9_000, 1_000]
    assert [row["topics"] for row in result.summary["by_shard"]] == [1, 1]
    assert result.summary["written_since_ms"] == NOW - 8 * DAY_MS
    assert metrics(result, "skew_max_mean")[("written",)] == pytest.approx(1.8)
    assert any("topic is hot" in text for text in findings(result, "notice"))


# --- producers ---------------------------------------------------------------------------------------


def test_producers_over_runs(play: Play, frames: Frames) -> None:
    frames.rows["records"] = [
        *records("t", [NOW - 3 * DAY_MS] * 5, node="old", size=100),
        *records("u", [NOW - 3 * DAY_MS] * 5, node="steady", size=1),
        *records("v", [NOW - 10 * DAY_MS] * 2, node="gone"),
    ]
    play.run(producers, now_ms=NOW - DAY_MS)
    frames.rows["records"] += records("u", [NOW] * 95, first=6, node="steady", size=3)
    result = play.run(producers, now_ms=NOW)
    assert [row["node"] for row in table(result, "Silent nodes")] == ["old"]
    rows = {row["node"]: row for row in table(result, "Volume by node")}
    assert (rows["steady"]["records"], rows["steady"]["data"]) == (100, 5 + 95 * 3)
    assert (rows["steady"]["size p50"], rows["steady"]["largest"]) == (3, 3)
    assert rows["old"]["last seen"] == NOW - 3 * DAY_MS
    assert result.summary["nodes"] == 3


@pytest.mark.gate
def test_no_node_is_not_the_node_without_a_name(play: Play, frames: Frames) -> None:
    names: list[str | None] = [None, "", "(no node)", "others", "a", "b", "c"]
    nodes = [(name, 2**place) for place, name in enumerate(names)]
    frames.rows["records"] = [
        record for node, count in nodes for record in records(f"t{count}", [NOW] * count, node=node, size=1)
    ]
    result = play.run(producers, now_ms=NOW)
    rows = [(row["node"], row["records"]) for row in table(result, "Volume by node")]
    assert rows[-4:] == [("others", 8), ("(no node)", 4), ("", 2), ("(no node)", 1)]
    assert metrics(result, "producers_node_bytes") == {(node,): count for node, count in nodes if node is not None}
    assert (result.summary["nodes"], result.summary["records_without_node"]) == (6, 1)
    (chart,) = [chart for chart in result.charts if chart.title == "Records by node and day"]
    drawn = [(series.name, sum(count for _, count in series.points)) for series in chart.series]
    assert drawn == [("c", 64), ("b", 32), ("a", 16), ("others", 8), ("(no node)", 4), ("others", 3)]


# --- routers -----------------------------------------------------------------------------------------


def router(name: str, *, copied_to: int, head: int, **fields: Any) -> dict[str, Any]:
    usual = {"router": name, "source": "s", "dest": "d", "created": 1_000, "source_head": head, "copied_to": copied_to}
    return {**usual, "lag": head - copied_to, "forwarded": copied_to, "guarantee": "at_least_once", **fields}


def test_a_router_that_has_not_moved_between_two_runs_stands_still(play: Play, frames: Frames) -> None:
    busy = topic("s", 100, last_write=NOW)
    frames.rows["topics"] = [busy, topic("d", 10), topic("flash", 0, durability="ephemeral")]
    frames.rows["routers"] = [
        router("stuck", copied_to=10, head=100),
        router("slow", copied_to=10, head=100),
        router("anew", copied_to=10, head=100),
        router("memory", copied_to=0, head=100, dest="flash"),
    ]
    first = play.run(routers, now_ms=NOW - DAY_MS)
    assert first.summary["stalled"] == 0
    assert first.summary["unknown"] == 1
    frames.rows["routers"][1] = router("slow", copied_to=11, head=100)
    frames.rows["routers"][2] = router("anew", copied_to=10, head=100, created=2_000)
    result = play.run(routers, now_ms=NOW)
    rows = {row["router"]: row for row in table(result, "Routers")}
    assert [name for name, row in rows.items() if row["stands still"]] == ["stuck"]
    assert (rows["slow"]["since the last run"], rows["stuck"]["since the last run"]) == (1, 0)
    assert rows["anew"]["since the last run"] is None
    assert rows["memory"]["lag"] is None
    assert result.summary["lag"] == 90 + 89 + 90
    assert metrics(result, "routers_router_lag_records") == {("stuck",): 90, ("slow",): 89, ("anew",): 90}
