"""Leased jobs as JSON. Pure: the record comes from the shard as it is, the lease from the coordinator."""

from __future__ import annotations

from itertools import repeat

from topics.actors.messages import Claimed

_BEFORE_SEQ = len(b'{"$seq":')


def rendered(claimed: Claimed, body: bytes | memoryview) -> list[bytes]:
    """Each job with its lease, in the order of the answer."""
    text = bytes(body)
    pieces = []
    start = 0
    deadlines = claimed.deadlines or repeat(claimed.deadline, len(claimed.seqs))
    jobs = zip(claimed.seqs, claimed.ends, claimed.leases, claimed.deliveries, deadlines, strict=True)
    for seq, end, lease, deliveries, deadline in jobs:
        rest = start + _BEFORE_SEQ + len(str(seq))
        pieces.append(
            b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"deliveries":%d%b'
            % (seq, lease, deadline, deliveries, text[rest : end - 1])
        )
        start = end
    return pieces


def sse_job(topic: bytes, seq: int, job: bytes) -> bytes:
    data = b'{"topic":"%b",%b' % (topic, job[1:])
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(data.splitlines())
    return b"id: %d\nevent: job\ndata: %b\n\n" % (seq, data)
