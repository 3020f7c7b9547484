"""What restarts do to topics that keep nothing: their records go, their seqs, keys, deletes and configs stay honest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from crash_folder import newest_snapshot
from crash_lives import Stories, Story
from crash_oracle import Oracle, read_all
from crash_server import Client, Server, eventually

from topics import limits

pytestmark = pytest.mark.recovery

HOUR_MS = 3_600_000
stories = Stories()


def force_snapshot(server: Server, client: Client) -> None:
    """Dropping a topic is a reason for the next quiet moment to write one."""
    before = newest_snapshot(server.data_dir)
    assert client.put("dropped").ok
    assert client.call("DELETE", "/v0/topics/dropped").ok

    def newer() -> bool:
        now = newest_snapshot(server.data_dir)
        return now is not None and (before is None or now[0].lsn > before[0].lsn)

    eventually(newer, what="a snapshot")


@stories.lives("stop", "kill")
def a_clean_stop_keeps_the_exact_head(server: Server) -> Story:
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "exact", "ephemeral", priority=7)
    topic.append_plain(client, 5)
    server = yield
    oracle.restarted()
    client = server.client()
    oracle.check(server)
    assert client.get("exact").body["head_seq"] == 5
    assert client.get("exact").body["config"]["priority"] == 7
    assert topic.append_plain(client, 2).first_seq == 6
    server = yield
    oracle.restarted()
    oracle.check(server)
    topic.append_plain(server.client(), 1)


@stories.lives("stop", "kill")
def clean_stop_and_kill_of_classes_that_are_logged_do_not_jump(server: Server) -> Story:
    oracle = Oracle()
    topics = [oracle.create(server.client(), f"jump.{name}", name) for name in ("disk", "fsync", "memory")]
    for topic in topics:
        topic.append_plain(server.client(), 5)
    for following in (6, 7):
        server = yield
        oracle.restarted()
        oracle.check(server)
        for topic in topics:
            assert topic.append_plain(server.client(), 1).first_seq == following


@stories.lives("kill", "kill")
def kills_never_give_a_seq_out_again(server: Server) -> Story:
    oracle = Oracle()
    topic = oracle.create(server.client(), "twice", "ephemeral")
    for _ in range(2):
        topic.append_plain(server.client(), 5)
        server = yield
        oracle.restarted()
        oracle.check(server)
        assert server.client().get("twice").body["head_seq"] <= topic.highest_acked + limits.SEQ_RESERVE
    topic.append_plain(server.client(), 5)


def keys_go_with_their_records(server: Server) -> Story:
    client = server.client()
    assert client.put("keys", durability="ephemeral", idempotency_window_ms=HOUR_MS).ok
    assert client.append("keys", 1, idempotency_key="k").ok
    assert client.append("keys", 1, idempotency_key="k").body["deduped"]
    force_snapshot(server, client)
    server = yield
    client = server.client()
    again = client.append("keys", 1, idempotency_key="k")
    assert not again.body["deduped"], "told that it was written before, but it is nowhere"
    assert len(client.diff("keys").body["records"]) == 1
    yield


stories.lives("kill", "kill")(keys_go_with_their_records)
stories.lives("stop", "kill")(keys_go_with_their_records)


def lost_records_are_a_gap_and_not_silence(server: Server) -> Story:
    client = server.client()
    assert client.put("gap", durability="ephemeral").ok
    assert client.append("gap", 1, 2, 3).ok
    server = yield
    gap = server.client().diff("gap", 1).body["tombstone"]
    assert gap is not None
    assert gap["gap_from"] == 2
    assert gap["gap_to"] >= 3
    yield


stories.lives("kill", "kill")(lost_records_are_a_gap_and_not_silence)
stories.lives("stop", "kill")(lost_records_are_a_gap_and_not_silence)


def a_name_used_again_is_another_topic(server: Server) -> Story:
    client = server.client()
    for name in ("reborn", "gone"):
        assert client.put(name, durability="fsync", priority=3, idempotency_window_ms=HOUR_MS).ok
        assert client.append(name, "old", "old", idempotency_key="k").ok
        assert client.call("DELETE", f"/v0/topics/{name}").ok
    assert client.append("reborn", "new", idempotency_key="k").body["first_seq"] == 1
    for life in range(2):
        server = yield
        client = server.client()
        assert client.get("gone").status == 404
        shown = client.diff("reborn").body
        assert [record["data"] for record in shown["records"]] == ["new"] * (life + 1)
        assert client.get("reborn").body["config"]["priority"] is None
        assert client.append("reborn", "new", idempotency_key="k").body["deduped"]
        assert client.append("reborn", "new").body["first_seq"] == life + 2


stories.lives("kill", "kill")(a_name_used_again_is_another_topic)
stories.lives("stop", "kill")(a_name_used_again_is_another_topic)


# --- the class changes in place ------------------------------------------------------------------------


@stories.lives("kill", "kill")
def a_delete_while_ephemeral_of_records_that_are_not_stays_a_delete(server: Server) -> Story:
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "deleted", "fsync")
    topic.append_plain(client, 10)
    topic.durability = "ephemeral"
    assert topic.put(client).ok
    assert topic.delete(client, before_seq=6).body["deleted"] == 5
    assert client.diff("deleted").body["earliest_seq"] == 6
    for _ in range(2):
        server = yield
        assert server.client().diff("deleted").body["earliest_seq"] >= 6, "deleted records are back"


def classes_of_one_topic(server: Server) -> Story:
    """Records from before a topic became ephemeral and after it stopped being so, and a hole between them."""
    client = server.client()
    assert client.put("classes", durability="fsync").ok
    assert client.append("classes", "a", "b").ok
    assert client.put("classes", durability="ephemeral").ok
    assert client.append("classes", "c", "d").ok
    assert client.put("classes", durability="fsync").ok
    assert client.append("classes", "e", "f").body["first_seq"] == 5
    for _ in range(2):
        server = yield
        client = server.client()
        reading = read_all(client, "classes")
        shown = {record.seq: bytes(record.data) for record in reading.records}
        assert {5: b'"e"', 6: b'"f"'}.items() <= shown.items()
        assert b'"c"' not in shown.values()
        assert reading.tombstone is not None, "records 3 and 4 were lost without a word"
        assert client.diff("classes", 2).body["tombstone"] is not None
        assert client.append("classes", "g").body["first_seq"] > 6


stories.lives("kill", "kill")(classes_of_one_topic)
stories.lives("stop", "kill")(classes_of_one_topic)


@pytest.mark.gate
@pytest.mark.parametrize("name", stories.names)
def test_story(name: str, tmp_path: Path) -> None:
    stories.tell(name, tmp_path)


@pytest.mark.gate
def test_a_kill_in_the_life_after_a_clean_stop_never_gives_a_seq_out_again(serve: Callable[..., Server]) -> None:
    """That life writes nothing to the log, so the clean snapshot looks like the last word. A server of its own: other
    topics' frames would tell."""
    oracle = Oracle()
    server = serve(shards=1)
    topic = oracle.create(server.client(), "after-clean", "ephemeral")
    topic.append_plain(server.client(), 5)
    assert server.stop() == 0
    oracle.restarted()
    server = serve(shards=1)
    topic.append_plain(server.client(), 5)
    server.kill()
    oracle.restarted()
    server = serve(shards=1)
    oracle.check(server)
    topic.append_plain(server.client(), 1)
