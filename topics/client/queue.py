"""Jobs of a queue as their worker sees them, and what the calls about them are answered. Pure.

A job is a record that is leased to a node for a time. Whoever gives back the job itself, and not only its seq, is
protected from itself: `lease_id` goes along, so that a worker that was too slow neither completes nor releases what
somebody else holds by now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from topics.client.events import Record


class Job(Record, frozen=True, kw_only=True):
    lease_id: str
    deadline_ms: int = msgspec.field(name="deadline")
    deliveries: int  # this one counted


# One job or several; a number is a seq.
Jobs = Job | int | Iterable[Job | int]


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    jobs: list[Job] = msgspec.field(name="claimed")  # in the order of their seqs
    ready: int  # what a further claim could get


class Acked(msgspec.Struct, frozen=True, kw_only=True):
    """`skipped` are those that the node does not hold, or no longer; so are those that an earlier try completed."""

    topic: str
    acked: int
    skipped: list[int]
    ready: int
    in_flight: int


class Nacked(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    nacked: int
    skipped: list[int]
    ready: int
    in_flight: int


class Extended(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    extended: int
    skipped: list[int]
    deadlines_ms: dict[int, int] = msgspec.field(name="deadlines")  # by seq


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    ready: int
    in_flight: int
    dead_lettered: int  # moved away since the queue was made


def claim_body(node: str, *, max: int, lease_ms: int | None) -> bytes:
    body: dict[str, Any] = {"node": node, "max": max}
    if lease_ms is not None:
        body["lease_ms"] = lease_ms
    return msgspec.json.encode(body)


def jobs_body(node: str, jobs: Jobs, **fields: Any) -> bytes:
    """The body of an ack, nack or extend."""
    given = [jobs] if isinstance(jobs, Job | int) else list(jobs)
    body: dict[str, Any] = {"node": node, "seqs": [job.seq if isinstance(job, Job) else job for job in given]}
    leased = [job.lease_id for job in given if isinstance(job, Job)]
    if leased and len(leased) == len(given):
        body["lease_ids"] = leased
    return msgspec.json.encode(body | fields)
