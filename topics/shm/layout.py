"""The bytes of a link in shared memory; ring.py holds the algorithm.

A link joins two processes, A and B, and is one region with two rings:

    0                       ring_span               2 * ring_span
    | ring A -> B           | ring B -> A           |

    ring:   0          64         128        192        256                    256 + capacity
            | identity | tail     | head     | wants    | frames ...            |
              magic      bytes      bytes      producer
              capacity   ever       ever       waits for
              generation written    read       room

    frame, 16-byte aligned, never across the end of the ring:
            0        4        6            8        16
            | length | flags  | generation | check  | payload, padded to 16
            | u32    | u16    | u16        | u64    |

Each control word has a line of its own and one writer (tail, wants: the producer; head: the consumer;
the consumer also clears wants). Positions are bytes since the ring was made and never wrap.

Python has no memory fences. What makes the rings sound is x86-64: aligned 8-byte stores are not torn and are
seen in program order by every other core. Other machines don't promise that, so they are refused.
"""

from __future__ import annotations

import platform
import struct

from topics.errors import StartRefused

MAGIC = 0x544F5049_43525247  # "TOPICRRG"
HEADER_BYTES = 256
FRAME_HEADER = struct.Struct("<IHHQ")
ALIGN = 16

WORD_MAGIC = 0
WORD_CAPACITY = 1
WORD_GENERATION = 2
WORD_TAIL = 8
WORD_HEAD = 16
WORD_WANTS = 24

FIRST = 1
LAST = 2
WHOLE = FIRST | LAST
PAD = 4
BATCH = 8  # several messages: their number and lengths as u32, then the messages
LONG = 16  # with FIRST and LAST: a fragment of a long message, with other frames between it and the next one
LONG_FRAGMENTS = 4  # of long messages, in the ring at a time

CHECK_SALT = 0x9E3779B97F4A7C15
CHECK_MASK = 2**64 - 1


def frame_check(position: int, length: int, flags: int, generation: int) -> int:
    """Ties a frame header to its place and its ring's generation: a stale or stray header does not fit."""
    return (position ^ (length << 32 | flags << 16 | generation) ^ CHECK_SALT) & CHECK_MASK


def frame_span(length: int) -> int:
    """Bytes that a frame with this much payload takes."""
    return (FRAME_HEADER.size + length + ALIGN - 1) & -ALIGN


def ring_span(ring_bytes: int) -> int:
    return HEADER_BYTES + (ring_bytes & -4096)


def link_bytes(ring_bytes: int) -> int:
    return 2 * ring_span(ring_bytes)


def max_payload(capacity: int) -> int:
    """A larger message is cut into fragments, so that one never needs the ring to be empty."""
    return capacity // 4


def long_payload(capacity: int) -> int:
    """A fragment of a long message. LONG_FRAGMENTS of them take a quarter of the ring: the rest is the others'."""
    return capacity // 4 // LONG_FRAGMENTS - ALIGN


def require_supported_machine() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise StartRefused(
            f"topics needs an x86-64 machine (this is {platform.machine()}): its shared-memory rings rely on "
            "that processor's store order"
        )
