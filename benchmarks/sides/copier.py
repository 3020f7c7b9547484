"""What a router is compared with on Redis: a client that copies one stream into another.

It does as little as a client can: it waits for entries with XREAD, turns the reply into XADDs without decoding a
record, sends them in one pipeline, asks for what comes next at once, and then takes the answers.

`python -m benchmarks.sides.copier PORT SOURCE DEST` copies what is written from its start on, and prints a line when it
is ready. It ends when it is ended, or when the server is.
"""

from __future__ import annotations

import re
import sys

from benchmarks.generators.deliveries import MARGIN, Xread
from benchmarks.generators.load import BUFFER_BYTES, connect
from benchmarks.generators.opening import open_watchers
from benchmarks.generators.payload import resp
from benchmarks.generators.replies import PipelineReplies

# An entry of a reply up to its one field: *2 $n id *2, and then $4 data $n value as in an XADD.
_ENTRY = re.compile(rb"\*2\r\n\$\d+\r\n\d+-\d+\r\n\*2\r\n(?=\$4\r\ndata\r\n)")
_HEAD_LINES = 5  # *1 *2 $n stream *entries


def xadds(reply: bytes, dest: str) -> bytes:
    """The pipeline that adds the entries of a whole reply to XREAD to another stream."""
    entries = reply.split(b"\r\n", _HEAD_LINES)[_HEAD_LINES]
    # An XADD of one field has five words, and the last two are the entry's own.
    begin = resp(b"XADD", dest.encode(), b"*").replace(b"*3", b"*5", 1)
    return _ENTRY.sub(lambda _: begin, entries)


def copy(*, port: int, source: str, dest: str) -> None:
    ((reading, deliveries),) = open_watchers(wire="redis", port=port, stream=source, count=1)
    assert isinstance(deliveries, Xread)
    writing = connect(port)
    print("copying", flush=True)
    for connection in (reading, writing):
        connection.settimeout(None)
    buffer = bytearray(MARGIN + BUFFER_BYTES)
    view = memoryview(buffer)[MARGIN:]
    pieces: list[bytes] = []
    copied = 0
    while n := reading.recv_into(view):
        pieces.append(bytes(view[:n]))
        if not deliveries.take(buffer, MARGIN + n):
            continue
        reading.sendall(deliveries.question())
        writing.sendall(xadds(b"".join(pieces), dest))
        pieces.clear()
        answers = PipelineReplies(deliveries.records - copied)
        copied = deliveries.records
        answered = bytearray(writing.recv(BUFFER_BYTES))
        while answered and not answers.take(answered, len(answered)):
            answered = bytearray(writing.recv(BUFFER_BYTES))


if __name__ == "__main__":
    copy(port=int(sys.argv[1]), source=sys.argv[2], dest=sys.argv[3])
