"""What restarts do to topics that keep nothing: their records go, their seqs, keys, deletes and configs stay honest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from crash_folder import newest_snapshot
from crash_oracle import Oracle
from crash_server import Client, Server, eventually

from topics import limits

pytestmark = pytest.mark.recovery

Start = Callable[..., Server]
HOUR_MS = 3_600_000


def force_snapshot(server: Server, client: Client) -> None:
    """Dropping a topic is a reason for the next quiet moment to write one."""
    before = newest_snapshot(server.data_dir)
    assert client.put("dropped").ok
    assert client.call("DELETE", "/v0/topics/dropped").ok

    def newer() -> bool:
        now = newest_snapshot(server.data_dir)
        return now is not None and (before is None or now[0].lsn > before[0].lsn)

    eventually(newer, what="a snapshot")


def test_clean_stop_keeps_the_exact_head(serve: Start) -> None:
    server = serve(shards=1)
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "e", "ephemeral", priority=7)
    topic.append_plain(client, 5)
    assert server.stop() == 0
    oracle.restarted()
    server = serve(shards=1)
    client = server.client()
    oracle.check(server)
    assert client.get("e").body["head_seq"] == 5
    assert client.get("e").body["config"]["priority"] == 7
    assert topic.append_plain(client, 2).first_seq == 6
    assert server.stop() == 0
    oracle.restarted()
    server = serve(shards=1)
    assert topic.append_plain(server.client(), 1).first_seq == 8


def test_kill_never_gives_a_seq_out_again(serve: Start) -> None:
    server = serve(shards=1)
    oracle = Oracle()
    topic = oracle.create(server.client(), "e", "ephemeral")
    for _ in range(3):
        topic.append_plain(server.client(), 5)
        server.kill()
        oracle.restarted()
        server = serve(shards=1)
        oracle.check(server)
        assert server.client().get("e").body["head_seq"] <= topic.highest_acked + 2 * limits.SEQ_RESERVE


def test_kill_in_the_life_after_a_clean_stop_never_gives_a_seq_out_again(serve: Start) -> None:
    """That life writes nothing to the log, so the clean snapshot looks like the last word."""
    server = serve(shards=1)
    oracle = Oracle()
    topic = oracle.create(server.client(), "e", "ephemeral")
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


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_keys_go_with_their_records(serve: Start, how: str) -> None:
    server = serve(shards=1)
    client = server.client()
    assert client.put("e", durability="ephemeral", idempotency_window_ms=HOUR_MS).ok
    assert client.append("e", 1, idempotency_key="k").ok
    assert client.append("e", 1, idempotency_key="k").body["deduped"]
    force_snapshot(server, client)
    if how == "kill":
        server.kill()
    else:
        assert server.stop() == 0
    client = serve(shards=1).client()
    again = client.append("e", 1, idempotency_key="k")
    assert not again.body["deduped"], "told that it was written before, but it is nowhere"
    assert len(client.diff("e").body["records"]) == 1


def test_lost_records_are_a_gap_and_not_silence(serve: Start) -> None:
    server = serve(shards=1)
    client = server.client()
    assert client.put("e", durability="ephemeral").ok
    assert client.append("e", 1, 2, 3).ok
    server.kill()
    client = serve(shards=1).client()
    gap = client.diff("e", 1).body["tombstone"]
    assert gap is not None
    assert gap["gap_from"] == 2
    assert gap["gap_to"] >= 3


# --- the class changes in place ------------------------------------------------------------------------


def test_a_delete_while_ephemeral_of_records_that_are_not_stays_a_delete(serve: Start) -> None:
    server = serve(shards=1)
    oracle = Oracle()
    client = server.client()
    topic = oracle.create(client, "t", "fsync")
    topic.append_plain(client, 10)
    topic.durability = "ephemeral"
    assert topic.put(client).ok
    assert topic.delete(client, before_seq=6).body["deleted"] == 5
    assert client.diff("t").body["earliest_seq"] == 6
    server.kill()
    client = serve(shards=1).client()
    assert client.diff("t").body["earliest_seq"] >= 6, "deleted records are back"


def test_records_written_before_a_topic_became_ephemeral_or_after_it_stopped_being(serve: Start) -> None:
    server = serve(shards=1)
    client = server.client()
    assert client.put("t", durability="fsync").ok
    assert client.append("t", "a", "b").ok
    assert client.put("t", durability="ephemeral").ok
    assert client.append("t", "c", "d").ok
    assert client.put("t", durability="fsync").ok
    assert client.append("t", "e", "f").body["first_seq"] == 5
    server.kill()
    client = serve(shards=1).client()
    shown = client.diff("t").body
    seqs = {record["$seq"]: record["data"] for record in shown["records"]}
    assert {5: "e", 6: "f"}.items() <= seqs.items()
    assert "c" not in seqs.values()
    assert client.append("t", "g").body["first_seq"] > 6
    gap = client.diff("t", 2).body["tombstone"]
    assert gap is not None, "records 3 and 4 were lost without a word"


@pytest.mark.parametrize("durability", ["disk", "fsync", "memory"])
def test_clean_stop_does_not_jump(serve: Start, durability: str) -> None:
    server = serve(shards=1)
    oracle = Oracle()
    topic = oracle.create(server.client(), "t", durability)
    topic.append_plain(server.client(), 5)
    assert server.stop() == 0
    server = serve(shards=1)
    oracle.restarted()
    oracle.check(server)
    assert topic.append_plain(server.client(), 1).first_seq == 6
    server.kill()
    server = serve(shards=1)
    oracle.restarted()
    oracle.check(server)
    assert topic.append_plain(server.client(), 1).first_seq == 7
