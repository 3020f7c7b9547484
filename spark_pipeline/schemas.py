"""The columns of every view, as Spark's DDL. docs/SPARK.md describes them; readers produce exactly these.

Kafka's connector lends the names of the first six columns of `records`, so that jobs written for it need few changes.
"""

from __future__ import annotations

from topics.errors import TopicsError

VIEWS = ("records", "topics", "segments", "leases", "tombstones", "routers")

_RECORDS = [
    ("topic", "string"),
    ("partition", "int"),  # always 0
    ("offset", "bigint"),  # the seq
    ("timestamp", "timestamp"),  # $ts
    ("key", "string"),  # the tag
    ("value", "binary"),  # data, as it was sent
]
_HEADERS = [("shard", "int"), ("node", "string"), ("meta", "string")]

_TABLES: dict[str, list[tuple[str, str]]] = {
    "topics": [
        ("topic", "string"),
        ("id", "string"),  # hex, the name of its folder
        ("shard", "int"),
        ("type", "string"),  # log or queue
        ("internal", "boolean"),  # the leases log of a queue
        ("durability", "string"),
        ("config", "string"),  # JSON, all fields
        ("created", "timestamp"),
        ("head_seq", "bigint"),
        ("disk_seq", "bigint"),  # the highest seq that is on the disk; copies of routers reach it later
        ("earliest_seq", "bigint"),
        ("evict_floor", "bigint"),
        ("count", "bigint"),  # live records
        ("bytes", "bigint"),  # what they count for
        ("deleted", "bigint"),  # ever, by clients
        ("evicted", "bigint"),  # ever, by caps
        ("expired", "bigint"),  # ever, by TTL
        ("lost", "bigint"),  # seqs whose records were in memory only and went with a process or the power
        ("trimmed", "bigint"),  # seqs that stand for what a router's source had lost
        ("skipped", "bigint"),  # seqs that have no record: the server went on above them after a crash
        ("unsettled", "bigint"),  # seqs of routers' copies that may be in memory, or came and went there
        ("last_write", "timestamp"),
        ("last_read", "timestamp"),
        ("segments", "int"),
        ("source", "string"),  # the topic that routers copy into this one
    ],
    "segments": [
        ("shard", "int"),
        ("topic", "string"),  # null for a WAL file, which holds many
        ("kind", "string"),  # segment or wal
        ("tier", "string"),  # hot or cold
        ("file", "string"),  # below the data folder
        ("first_seq", "bigint"),
        ("last_seq", "bigint"),
        ("sealed", "boolean"),
        ("file_bytes", "bigint"),  # of the disk
        ("records", "bigint"),
        ("live", "bigint"),
        ("deleted", "bigint"),  # flagged, but still there
        ("dead", "bigint"),  # evicted or expired, but still there
        ("live_bytes", "bigint"),  # what live records count for
        ("total_bytes", "bigint"),  # what all its records count for; of a WAL file, those in no segment
        ("first_time", "timestamp"),
        ("last_time", "timestamp"),
    ],
    "leases": [
        ("queue", "string"),
        ("shard", "int"),
        ("offset", "bigint"),  # of the event in the leases log
        ("timestamp", "timestamp"),
        ("event", "string"),  # claimed, extended, released, acked, dead_lettered, checkpoint
        ("node", "string"),
        ("seq", "bigint"),  # the job
        ("lease", "string"),  # as over HTTP
        ("deliveries", "int"),
        ("deadline", "timestamp"),
        ("stream", "boolean"),  # pushed, not claimed
        ("reason", "string"),  # of a release
        ("state", "string"),  # in a checkpoint: leased, expired, free, delayed
    ],
    "tombstones": [
        ("topic", "string"),
        ("shard", "int"),
        ("reason", "string"),  # cap, ttl, mixed, lost, source_trim
        ("gap_from", "bigint"),
        ("gap_to", "bigint"),
        ("missed", "bigint"),  # records lost in there; the rest was deleted by clients
    ],
    "routers": [
        ("router", "string"),
        ("source", "string"),
        ("dest", "string"),
        ("shard", "int"),  # of dest
        ("guarantee", "string"),
        ("filter", "string"),  # JSON
        ("preserve_node", "boolean"),
        ("preserve_tag", "boolean"),
        ("allow_cycle", "boolean"),
        ("created", "timestamp"),
        ("since", "bigint"),  # the source's head when it was made
        ("source_head", "bigint"),
        ("copied_to", "bigint"),  # the source's seq up to which copies are on the disk
        ("lag", "bigint"),  # source_head - copied_to
        ("forwarded", "bigint"),  # copies made, up to there
    ],
}


def columns(view: str, *, headers: bool = False, data: bool = True, deleted: bool = False) -> list[tuple[str, str]]:
    """(name, type) of a view's columns; the flags are for `records`."""
    if view not in VIEWS:
        raise TopicsError(f"option view: {view!r} is none of {', '.join(VIEWS)}")
    if view != "records":
        return _TABLES[view]
    found = list(_RECORDS) if data else [*_RECORDS[:-1], ("size", "int")]  # size: how long data is, in bytes
    if headers:
        found += _HEADERS
    if deleted:
        found.append(("deleted", "boolean"))
    return found


def ddl(view: str, *, headers: bool = False, data: bool = True, deleted: bool = False) -> str:
    found = columns(view, headers=headers, data=data, deleted=deleted)
    return ", ".join(f"`{name}` {kind}" for name, kind in found)
