"""Caps, TTL and deletes across restarts: floors never go back, tombstones are told again, deletes stay."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_folder import blocks, frames, newest_snapshot, segments, wal_files
from crash_lives import Stories, Story
from crash_oracle import Oracle, read_all
from crash_server import SMALL, Client, Server, eventually, eventually_nudged

from topics.storage.format import DELETED, FrameType

pytestmark = pytest.mark.recovery

Start = Callable[..., Server]
PADDING = "x" * 4_000
stories = Stories()


def floors(client: Client, topic: str) -> dict[str, Any]:
    """What a reader from the very beginning is told."""
    body = client.diff(topic, 0, limit=1).body
    return {"earliest_seq": body["earliest_seq"], "head_seq": body["head_seq"], "tombstone": body["tombstone"]}


def caps_leave_the_same_floor_and_tombstone(server: Server) -> Story:
    oracle = Oracle()
    client = server.client()
    by_count = oracle.create(client, "by-count", "disk", cap_records=10)
    for count in (7, 7, 7, 7):  # the floor cuts through a batch
        by_count.append_plain(client, count)
    assert client.put("by-bytes", cap_bytes=500).ok
    for at in range(20):
        assert client.append("by-bytes", "x" * at).ok
    before = {name: floors(client, name) for name in ("by-count", "by-bytes")}
    assert before["by-count"]["tombstone"] == {
        "gap_from": 1,
        "gap_to": 18,
        "reason": "cap",
        "missed_estimate": 18,
        "earliest_seq": 19,
        "head_seq": 28,
    }
    for _ in range(2):
        server = yield
        oracle.restarted()
        client = server.client()
        assert {name: floors(client, name) for name in before} == before
        oracle.check(server)
    by_count.append_plain(client, 4)
    assert floors(client, "by-count")["earliest_seq"] == 23


stories.lives("kill", "kill")(caps_leave_the_same_floor_and_tombstone)
stories.lives("stop", "kill")(caps_leave_the_same_floor_and_tombstone)


def a_cap_that_was_lifted_brings_nothing_back(server: Server) -> Story:
    client = server.client()
    assert client.put("lifted-cap").ok
    for _ in range(10):
        assert client.append("lifted-cap", 1, 2, 3).ok
    assert client.put("lifted-cap", cap_records=5).ok
    before = floors(client, "lifted-cap")
    assert before["earliest_seq"] == 26
    assert client.put("lifted-cap").ok
    assert floors(client, "lifted-cap") == before
    for _ in range(2):
        server = yield
        assert floors(server.client(), "lifted-cap") == before


stories.lives("kill", "kill")(a_cap_that_was_lifted_brings_nothing_back)
stories.lives("stop", "kill")(a_cap_that_was_lifted_brings_nothing_back)


def a_ttl_leaves_its_floor_even_when_it_was_lifted(server: Server) -> Story:
    client = server.client()
    for name in ("kept", "lifted"):
        assert client.put(name, ttl_ms=300).ok
        assert client.append(name, 1, 2, 3).ok
    eventually(lambda: all(floors(client, name)["earliest_seq"] == 4 for name in ("kept", "lifted")), what="expiry")
    before = floors(client, "lifted")
    assert before["tombstone"]["reason"] == "ttl"
    assert before["tombstone"]["gap_to"] == 3
    assert client.put("lifted").ok
    assert client.append("lifted", 4).ok
    for _ in range(2):
        server = yield
        client = server.client()
        assert floors(client, "kept") == before
        after = floors(client, "lifted")
        assert after["earliest_seq"] == 4, "expired records are back"
        assert after["tombstone"]["gap_to"] == 3
        assert [record["data"] for record in client.diff("lifted").body["records"]] == [4]


stories.lives("kill", "kill")(a_ttl_leaves_its_floor_even_when_it_was_lifted)
stories.lives("stop", "kill")(a_ttl_leaves_its_floor_even_when_it_was_lifted)


@stories.lives("kill", "kill")
def what_expired_while_nobody_looked_is_gone_at_once(server: Server) -> Story:
    client = server.client()
    assert client.put("unseen", ttl_ms=400).ok
    assert client.append("unseen", 1, 2).ok
    written = time.monotonic()
    for _ in range(2):
        server = yield
        eventually(lambda: time.monotonic() > written + 0.5, what="time to pass")
        shown = server.client().diff("unseen").body
        assert shown["records"] == []
        assert shown["tombstone"]["gap_to"] == 2
        assert shown["tombstone"]["reason"] == "ttl"


@stories.lives("kill", "kill")
def a_cap_and_a_delete_at_once_lose_nothing_that_was_kept(server: Server) -> Story:
    """One more record than the cap allows is on its way to the disk when a delete makes room for it: nothing is
    evicted, and the same must come out when the log is replayed."""
    client = server.client()
    assert client.put("room", durability="fsync", cap_records=10).ok
    records = [{"data": at, "tag": f"tag-{at}"} for at in range(1, 11)]
    assert client.call("POST", "/v0/topics/room", {"records": records}).ok
    answers = pipelined(
        server.port,
        [
            ("/v0/topics/room", {"records": [{"data": 11}]}),
            ("/v0/topics/room/delete", {"match": "tag-5"}),
        ],
    )
    assert answers[1]["deleted"] == 1
    before = [record["data"] for record in client.diff("room").body["records"]]
    assert len(before) in (9, 10)  # 9: the append was published first, after all
    for _ in range(2):
        server = yield
        assert [record["data"] for record in server.client().diff("room").body["records"]] == before


def everything_deleted(server: Server) -> Story:
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "all", "fsync")
    topic.append_plain(client, 10)
    assert topic.delete(client, before_seq=11).body["deleted"] == 10
    for _ in range(2):
        server = yield
        oracle.restarted()
        oracle.check(server)
        client = server.client()
        state = client.get("all").body
        assert (state["count"], state["bytes"], state["earliest_seq"]) == (0, 0, state["head_seq"] + 1)
        assert read_all(client, "all").tombstone is None
        topic.append_plain(client, 3)
        assert topic.delete(client, before_seq=topic.highest_acked + 1).ok


stories.lives("kill", "kill")(everything_deleted)
stories.lives("stop", "kill")(everything_deleted)


@pytest.mark.gate
@pytest.mark.parametrize("name", stories.names)
def test_story(name: str, tmp_path: Path) -> None:
    stories.tell(name, tmp_path)


def pipelined(port: int, requests: list[tuple[str, Any]]) -> list[Any]:
    """All requests in one packet; their answers."""
    sent = b""
    for path, body in requests:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n"
        sent += head.encode() + b"Content-Type: application/json\r\n\r\n" + payload
    answers: list[Any] = []
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)
        received = b""
        while len(answers) < len(requests):
            chunk = connection.recv(65_536)
            assert chunk, "closed too early"
            received += chunk
            while (at := received.find(b"\r\n\r\n")) >= 0:
                length = next(
                    int(line.split(b":")[1])
                    for line in received[:at].split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                )
                if len(received) < at + 4 + length:
                    break
                answers.append(json.loads(received[at + 4 : at + 4 + length]))
                received = received[at + 4 + length :]
    return answers


# --- deletes ------------------------------------------------------------------------------------------


def deleted_on_disk(server: Server) -> set[int]:
    """Seqs whose flag in a segment says that they are deleted."""
    return {
        entry.first_seq + index
        for path in segments(server.data_dir)
        for entry, flags in blocks(path)
        for index, flag in enumerate(flags)
        if flag == DELETED
    }


def test_deletes_of_sealed_records_outlive_the_log(serve: Start) -> None:
    server = serve(shards=1, env=SMALL)
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "t", "fsync")
    for at in range(30):
        topic.append(client, [(PADDING, f"even.{at}" if index % 2 == 0 else "odd", None) for index in range(12)])
    eventually(lambda: len(segments(server.data_dir)) >= 3, what="segments")
    assert topic.delete(client, tags=["even.2", "even.3"], match=["tag", "Eq", "even.2"]).ok
    assert topic.delete(client, tags=["even.3"], match="even.3").ok
    assert topic.delete(client, tags=[f"even.{at}" for at in range(10, 20)], match=["tag", "Glob", "even.1*"]).ok
    wanted = {
        batch.first_seq + index
        for batch in topic.batches.values()
        for index, record in enumerate(batch.records)
        if record.tag in {"even.2", "even.3", *(f"even.{at}" for at in range(10, 20))}
    }
    # even.1 itself matches even.1* too
    wanted |= {
        batch.first_seq + index
        for batch in topic.batches.values()
        for index, record in enumerate(batch.records)
        if record.tag == "even.1"
    }
    topic.deletions[-1].tags = frozenset([*(f"even.{at}" for at in range(10, 20)), "even.1"])

    def frames_of_deletes() -> int:
        return sum(frame.type == FrameType.DELETE for path in wal_files(server.data_dir) for frame in frames(path))

    def more() -> None:
        for _ in range(25):
            topic.append_plain(client, 12, padding=PADDING)

    eventually_nudged(lambda: frames_of_deletes() == 0, more, what="the frames of the deletes trimmed")
    assert deleted_on_disk(server) == wanted
    server.kill()
    oracle.restarted()
    server = serve(shards=1, env=SMALL)
    oracle.check(server)
    assert floors(server.client(), "t")["tombstone"] is None, "a delete is no loss"
    assert deleted_on_disk(server) == wanted


def test_a_segment_cleared_by_a_delete_is_dropped_and_does_not_come_back(serve: Start) -> None:
    server = serve(shards=1, env=SMALL)
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "t", "disk")
    for _ in range(30):
        topic.append_plain(client, 12, padding=PADDING)
    eventually(lambda: len(segments(server.data_dir)) >= 3, what="segments")
    assert topic.delete(client, before_seq=topic.highest_acked - 20).ok
    first = segments(server.data_dir)[0]

    def more() -> None:
        for _ in range(25):
            topic.append_plain(client, 12, padding=PADDING)

    eventually_nudged(lambda: not first.exists(), more, what="the first segment gone")
    server.kill()
    oracle.restarted()
    server = serve(shards=1, env=SMALL)
    oracle.check(server)
    assert floors(server.client(), "t")["tombstone"] is None
    assert not first.exists()


def test_a_cap_over_segments_and_snapshots(serve: Start) -> None:
    server = serve(shards=1, env=SMALL)
    folder = server.data_dir
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "t", "disk", cap_records=130)
    for _ in range(2):
        for _ in range(30):
            topic.append_plain(client, 11, padding=PADDING)
        eventually(lambda: newest_snapshot(folder) and segments(folder), what="segments")
        before = floors(client, "t")
        assert before["tombstone"]["gap_to"] == before["head_seq"] - 130
        server.kill()
        oracle.restarted()
        server = serve(shards=1, env=SMALL)
        client = server.client()
        assert floors(client, "t") == before
        oracle.check(server)
