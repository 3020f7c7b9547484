"""A server with something of everything that the views show. Written over HTTP; what HTTP said is kept as the truth.

The scene ends with nobody writing, every router's copies on the disk, and the server as the test wants to meet its
folder: running, killed with -9, or stopped in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from e2e.client import Client
from e2e.queues import make_queue
from e2e.routing import route, wait_records
from e2e.server import Server

from .sourceplay import Row, append_raw, flushed, on_disk, said, topic_names

SMALL_SEGMENTS = {"TOPICS_SEGMENT_MAX_EVENTS": 50, "TOPICS_WAL_FILE_BYTES": 1 << 20}

PAD = "z" * 2_000  # so that a few batches fill a block
# Each is kept as it is spelt.
SPELLINGS = [
    b'{"a": 1,  "b":\t[1,2 , 3]}',
    b"1.50",
    b"1e2",
    b"-0",
    b"-0.0E+1",
    b"123456789012345678901234567890.000",
    '"zürich \U0001f642 東京"'.encode(),
    b'"z\\u00fcrich \\ud83d\\ude42 \\/ \\" \\\\ \\u001e \\u0000"',
    b"null",
    b"true",
    b'""',
    b"{}",
    b"[ ]",
    b'{"":{"":[[[]]]}}',
    b'"' + b"x" * 200_000 + b'"',
]


class World(NamedTuple):
    data_dir: Path
    records: list[Row]  # live ones, by topic and offset
    lost: dict[str, list[Row]]  # tombstones that a reader from the beginning gets
    states: dict[str, Row]  # of topics
    routers: dict[str, Row]
    leases: list[Row]  # what workers were told, in order
    deleted: dict[str, dict[int, bytes]]  # what clients deleted and is still on the disk


@contextmanager
def world(folder: Path, *, end: str) -> Iterator[World]:
    server = Server(folder / "data", log=folder / "server.log", **SMALL_SEGMENTS)
    try:
        server.wait_ready()
        with server.client() as api:
            deleted = _write(api)
            leases = _work(api)
            _forward(api, server.data_dir)
            flushed(api, server.data_dir, "large", segments=10)
            made = _truth(api, server.data_dir, leases, deleted)
        if end == "killed":
            server.kill()
        elif end == "stopped":
            assert server.stop() == 0, server.output()
        yield made
        assert "Traceback" not in server.output(), server.output()[-3_000:]
    finally:
        server.close()


def _write(api: Client) -> dict[str, dict[int, bytes]]:
    append_raw(api, "spellings", [b'{"data":' + spelling + b"}" for spelling in SPELLINGS])
    _sides(api)
    for batch in range(60):
        numbers = range(batch * 20, batch * 20 + 20)
        records = [{"data": {"n": n, "pad": PAD}, "tag": f"key:{n % 7}" if batch % 3 else None} for n in numbers]
        assert api.append_records("large", records, node="bulk").status in (200, 201)
    for name in ("empty", "emptied", "capped", "slim", "again"):
        caps = {"capped": {"cap_records": 5}, "slim": {"cap_bytes": 400}}.get(name, {})
        assert api.put(name, **caps).status == 201
    for n in range(4):
        api.append("capped", *range(n * 3, n * 3 + 3))
        api.append("slim", *("y" * (10 * k) for k in range(n * 3, n * 3 + 3)))
    api.append("emptied", 1, 2, 3)
    assert api.delete("emptied", before_seq=4)["deleted"] == 3
    api.append("again", "of the first life", "and one more")
    assert api.drop("again")["deleted"]
    api.append("again", "of the second life")
    return _delete(api)


def _sides(api: Client) -> None:
    """Tags, nodes and meta: on none, on some and on all records of a batch."""
    append_raw(api, "sides", [b'{"data":1}', b'{"data":2}'])
    append_raw(api, "sides", [b'{"data":3,"tag":"t"}', b'{"data":4}', '{"data":5,"tag":"ключ \\u0001\\""}'.encode()])
    append_raw(api, "sides", [b'{"data":6}', b'{"data":7}'], more=b',"node":"one for all"')
    append_raw(
        api,
        "sides",
        [
            b'{"data":8,"node":"n8","meta":{"a": 1,  "b":"\xc3\xa9\\u00e9"}}',
            b'{"data":9,"meta":{}}',
            b'{"data":10,"node":"n10","tag":"all","meta":{"x":null}}',
            b'{"data":11}',
        ],
    )


def _delete(api: Client) -> dict[str, dict[int, bytes]]:
    """From a segment and from the log."""
    api.append_records("erased", [{"data": n, "tag": f"g{n % 3}"} for n in range(1, 61)])
    flushed_by = [{"data": n, "tag": f"g{n % 3}"} for n in range(61, 71)]
    api.append_records("erased", flushed_by)
    assert api.delete("erased", before_seq=4)["deleted"] == 3
    assert api.delete("erased", match=["tag", "Eq", "g1"])["deleted"] == 23
    return {"erased": {n: str(n).encode() for n in range(1, 71) if n < 4 or n % 3 == 1}}


def _work(api: Client) -> list[Row]:
    """What each lease event must be, from what the workers were told."""
    found: list[Row] = []

    def note(event: str, node: str, jobs: list[dict[str, Any]], **more: Any) -> None:
        """Deadlines of all jobs in an event are one."""
        for job in jobs:
            fields = {"event": event, "node": node, "seq": job["$seq"], "lease": job["lease_id"]}
            found.append({**fields, "deliveries": None, "deadline": None, "stream": False, "reason": None, **more})

    assert api.put("mail.dead").status == 201
    queue = make_queue(api, "mail", max_deliveries=2, dead_letter="mail.dead")
    queue.produce(*(f"job {n}" for n in range(1, 9)))
    taken = queue.take(4, node="w1", lease_ms=600_000)
    note("claimed", "w1", taken, deliveries=1, deadline=taken[0]["deadline"])
    queue.ack([1], node="w1")
    note("acked", "w1", taken[:1])
    answer = queue.extend([2], node="w1", lease_ms=900_000)
    note("extended", "w1", taken[1:2], deadline=answer["deadlines"]["2"])
    queue.nack([3, 4], node="w1")
    note("released", "w1", taken[2:], reason="nack")
    again = queue.take(2, node="w2", lease_ms=700_000)
    assert [job["$seq"] for job in again] == [3, 4]
    note("claimed", "w2", again, deliveries=2, deadline=again[0]["deadline"])
    queue.nack([4], node="w2")
    note("released", "w2", again[1:], reason="nack")
    (fresh,) = queue.take(1, node="w1", lease_ms=600_000)  # the claim that finds 4 worn out
    assert fresh["$seq"] == 5
    wait_records(api, "mail.dead", 1)
    note("claimed", "w1", [fresh], deliveries=1, deadline=fresh["deadline"])
    note("dead_lettered", "w2", again[1:])
    return found


def _forward(api: Client, data_dir: Path) -> None:
    api.append("orders", "before the routers")
    route(api, "orders", "archive")
    route(api, "orders", "vip", filter=["tag", "Glob", "vip:*"], preserve_node=False, preserve_tag=False)
    records = [{"data": n, "tag": f"vip:{n}" if n % 4 == 0 else "std", "meta": {"n": n}} for n in range(40)]
    assert api.append_records("orders", records, node="till").status == 200
    wait_records(api, "archive", 40)
    wait_records(api, "vip", 10)
    on_disk(data_dir, "archive", head=40)
    on_disk(data_dir, "vip", head=10)


def _truth(api: Client, data_dir: Path, leases: list[Row], deleted: dict[str, dict[int, bytes]]) -> World:
    records: list[Row] = []
    lost: dict[str, list[Row]] = {}
    states: dict[str, Row] = {}
    for name in sorted(topic_names(api)):
        found, gone = said(api, name)
        records += found
        if gone:
            lost[name] = gone
        states[name] = api.state(name, touch=False).json
    listed = api.send("GET", "/v0/routers")["routers"]
    routers = {row["router"]: api.send("GET", f"/v0/routers/{row['router']}").json for row in listed}
    assert json.dumps(lost), "capped topics leave tombstones"
    return World(data_dir, records, lost, states, routers, leases, deleted)
