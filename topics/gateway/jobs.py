"""Leased jobs as JSON. Pure: the record comes from the shard as it is, the lease from the coordinator."""

from __future__ import annotations

from topics.actors.messages import Claimed

_BEFORE_SEQ = len(b'{"$seq":')


def rendered(claimed: Claimed, body: bytes | memoryview) -> list[bytes]:
    """Each job with its lease, in the order of the answer."""
    text = bytes(body)
    pieces = []
    start = 0
    deadline = claimed.deadline
    for seq, end, lease, deliveries in zip(claimed.seqs, claimed.ends, claimed.leases, claimed.deliveries, strict=True):
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
