"""Bodies about jobs, and server-sent events cut anywhere."""

from __future__ import annotations

import json

import msgspec
import pytest

from topics.client.queue import Claimed, Extended, Job, claim_body, jobs_body
from topics.client.sse import EventStream, Message

JOB = b'{"topic":"q","$seq":5,"lease_id":"lease_1a","deadline":9,"deliveries":2,"$ts":1,"$tag":"t","data":{"n": 1.50}}'


def job(seq: int) -> Job:
    return msgspec.structs.replace(msgspec.json.decode(JOB, type=Job), seq=seq, lease_id=f"lease_{seq}")


def test_a_job_is_a_record_with_a_lease() -> None:
    found = msgspec.json.decode(JOB, type=Job)
    assert (found.seq, found.lease_id, found.deadline_ms, found.deliveries, found.tag) == (5, "lease_1a", 9, 2, "t")
    assert bytes(found.data) == b'{"n": 1.50}'
    assert found.decode() == {"n": 1.5}


def test_answers() -> None:
    claimed = msgspec.json.decode(
        b'{"topic":"q","claimed":[%b],"count":1,"ready":3,"performance":{}}' % JOB, type=Claimed
    )
    assert ([found.seq for found in claimed.jobs], claimed.ready) == ([5], 3)
    extended = b'{"topic":"q","extended":1,"skipped":[6],"deadlines":{"5":99},"performance":{}}'
    assert msgspec.json.decode(extended, type=Extended).deadlines_ms == {5: 99}


def test_bodies() -> None:
    assert json.loads(claim_body("n", max=3, lease_ms=None)) == {"node": "n", "max": 3}
    assert json.loads(claim_body("n", max=3, lease_ms=50)) == {"node": "n", "max": 3, "lease_ms": 50}
    fenced = {"node": "n", "seqs": [1, 2], "lease_ids": ["lease_1", "lease_2"]}
    assert json.loads(jobs_body("n", [job(1), job(2)])) == fenced
    assert json.loads(jobs_body("n", job(1))) == {"node": "n", "seqs": [1], "lease_ids": ["lease_1"]}
    assert json.loads(jobs_body("n", 4, lease_ms=7)) == {"node": "n", "seqs": [4], "lease_ms": 7}
    assert json.loads(jobs_body("n", [job(1), 2])) == {"node": "n", "seqs": [1, 2]}
    assert json.loads(jobs_body("n", [])) == {"node": "n", "seqs": []}


STREAM = (
    b'retry: 2000\n\n: hb 17\n\nid: 5\nevent: job\ndata: {"a":1}\n\n: hb 18\n\n'
    b"event: job\r\ndata: x\r\ndata:y\r\n\r\ndata: plain\n\nevent: empty\n\nevent: error\ndata: {}\n\ndata: cut off"
)
MESSAGES = [Message("job", b'{"a":1}'), Message("job", b"x\ny"), Message("message", b"plain"), Message("error", b"{}")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30, 1_000])
def test_events_however_they_are_cut(size: int) -> None:
    stream = EventStream()
    found = [message for at in range(0, len(STREAM), size) for message in stream.feed(STREAM[at : at + size])]
    assert found == MESSAGES
