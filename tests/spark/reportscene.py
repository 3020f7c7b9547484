"""A server with something of everything that reports count, written over HTTP and then stopped in order.

Two lives: the first ends with kill -9, which takes what an ephemeral topic held.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import livefiles
from e2e.client import Client
from e2e.queues import Queue, make_queue, seqs_of
from e2e.routing import drained, route
from e2e.server import Server, eventually

from .reportplay import Truth, look
from .sourceplay import flushed

SMALL_SEGMENTS = {"TOPICS_SEGMENT_MAX_EVENTS": 40, "TOPICS_SEGMENT_MAX_AGE_MS": 300}


class Scene(NamedTuple):
    data_dir: Path
    truth: Truth
    now_ms: int  # when the truth was looked at


def play(folder: Path) -> Scene:
    server = Server(folder / "data", log=folder / "first.log", **SMALL_SEGMENTS)
    try:
        server.wait_ready()
        with server.client() as api:
            _first_life(api, server.data_dir)
        server.kill()
        server = Server(folder / "data", log=folder / "second.log", **SMALL_SEGMENTS)
        server.wait_ready()
        with server.client() as api:
            _second_life(api)
            truth = look(api)
            now_ms = time.time_ns() // 1_000_000
        assert server.stop() == 0, server.output()[-2_000:]
        return Scene(server.data_dir, truth, now_ms)
    finally:
        server.close()


def _first_life(api: Client, data_dir: Path) -> None:
    for node in ("till-1", "till-2", "till-3"):
        for at in range(10):
            records = [
                {"data": {"n": number, "pad": "x" * (number * 7 % 300)}, "tag": f"order:{number % 12}"}
                for number in range(at * 10, at * 10 + 10)
            ]
            api.append_records("orders", records, node=node)
    eventually(lambda: livefiles.find(data_dir, "topics/*/*.idx"), what="a sealed segment of orders")
    flushed(api, data_dir, "orders")  # named by a snapshot: others would not outlast the kill
    assert api.delete("orders", match="order:3")["deleted"] > 0
    assert api.delete("orders", before_seq=15)["deleted"] > 0
    api.append("notes", *({"text": "y" * (size * 11)} for size in range(60)))
    api.put("flash", durability="ephemeral")
    api.append("flash", *range(25))
    api.put("ticks", cap_records=20)
    for at in range(10):
        api.append("ticks", *range(at * 10, at * 10 + 10), node="clock")
    api.put("brief", ttl_ms=400)
    api.append("brief", *range(30))
    eventually(lambda: api.state("brief")["count"] == 0, what="everything in brief expired")


def _second_life(api: Client) -> None:
    _route(api)
    _trim(api)
    _stick(api)
    _work(api)


def _route(api: Client) -> None:
    route(api, "orders", "copies")
    route(api, "orders", "some", filter=["tag", "Glob", "order:1*"], guarantee="exactly_once")
    api.append_records("orders", [{"data": n, "tag": f"order:{n}"} for n in range(20)], node="till-2")
    drained(api, "orders", "copies")
    eventually(lambda: api.state("some")["count"] == 11, what="order:1 and order:10 to order:19 in some")


def _trim(api: Client) -> None:
    """A dest that is full while its source loses records."""
    api.put("feed", cap_records=2)
    api.put("mirror", cap_records=2, discard="reject")
    route(api, "feed", "mirror")
    api.append("feed", 1, 2)
    eventually(lambda: api.state("mirror")["count"] == 2, what="a full mirror")
    for number in range(3, 9):
        api.append("feed", number)
    api.delete("mirror", before_seq=2)
    api.put("mirror")  # room for whatever the router has in hand, and for the rest
    eventually(lambda: api.state("mirror")["head_seq"] == 8, what="the rest in mirror")


def _stick(api: Client) -> None:
    """A router that waits for room in its dest, which nobody makes."""
    api.put("full", cap_records=1, discard="reject")
    route(api, "plenty", "full")
    api.append("plenty", *range(5))
    eventually(lambda: api.state("full")["count"] == 1, what="one copy")


def _work(api: Client) -> None:
    jobs = make_queue(api, "jobs", max_deliveries=2, dead_letter="jobs.dead")
    for at in range(3):
        jobs.produce_records([{"data": n, "tag": f"user:{n % 4}"} for n in range(at * 10, at * 10 + 10)])
    first = seqs_of(jobs.take(12, node="w1"))
    jobs.ack(first[:8], node="w1")
    jobs.nack(first[8:], node="w1")
    again = seqs_of(jobs.take(6, node="w2"))
    assert again[:4] == first[8:]
    jobs.ack(again[:2], node="w2")
    jobs.ack(again[4:], node="w2")
    jobs.nack(again[2:4], node="w2")  # delivered twice: the next claim sends them away
    kept = jobs.take(3, node="w3", lease_ms=600_000)
    eventually(lambda: jobs.counters().dead_lettered == 2, what="two dead letters")
    jobs.extend(seqs_of(kept)[:1], node="w3", lease_ms=900_000)
    _expire(jobs)
    waits = seqs_of(jobs.take(1, node="w5", lease_ms=600_000))
    jobs.nack(waits, node="w5", delay_ms=600_000)
    idle = make_queue(api, "idle")
    idle.produce(*range(5))
    other = make_queue(api, "other", max_deliveries=1, dead_letter="jobs.dead")
    other.produce_records([{"data": "bad", "tag": "user:1"}, {"data": "worse"}])
    other.wear(other.left(), 1)
    other.claim(5)
    eventually(lambda: other.counters().dead_lettered == 2, what="two more dead letters")


def _expire(jobs: Queue) -> None:
    """One lease that ends by itself, and is taken by somebody else."""
    (lost,) = jobs.take(1, node="w4", lease_ms=100)
    found = eventually(
        lambda: [job for job in jobs.claim(1, node="w6", lease_ms=600_000)["claimed"] if job["$seq"] == lost["$seq"]],
        what="the job of w4",
    )
    jobs.ack(seqs_of(found), node="w6")
