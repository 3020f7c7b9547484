"""Bytes that nobody wrote, given to the decoders of files and rings: millions of mutations of golden bytes.

A decoder answers with what was written, or refuses with a documented exception; nothing else, and at once.

    target        the input is a mutation of                     what may come out
    frame         one frame of a log                             None, or a golden frame, whole
    log           a log file, scanned, and searched behind holes golden frames only
    wal_header    the header of a log file                       the golden one; FormatError, CorruptData
    segment_header the header of a segment                       the same
    blocks        a segment                                      golden blocks only; CorruptData
    index         the index of a segment                         the golden one; FormatError, CorruptData
    tag_page      a page of its tags                             the same
    snapshot      a snapshot                                     the same
    rules         the file of routers                            the same
    columns       the body of a batch, as if its frame were good any columns; CorruptData
    lease_event   an event of a leases log, likewise             any event; CorruptData
    ring_header   frame headers and control words of a ring      the golden messages, or a part of them from the
                                                                 first one on; RingPoisoned
    ring_payload  any byte of a ring                             messages of these lengths; RingPoisoned

The last three can't tell a changed value from another: frames carry the checksum of what is in them, and the payload of
a ring has none (its two ends are processes of one server; the headers of its frames are checked).
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import generate
import msgspec
from figures import DECODED
from generate import SALT

from topics.errors import CorruptData, FormatError, RingPoisoned
from topics.shm import layout
from topics.shm.ring import RingReader, RingWriter, format_link
from topics.storage.columns import Columns
from topics.storage.format import FILE_HEADER_BYTES
from topics.storage.frames import Frame, decode_frame, decode_wal_header, frames_after, scan
from topics.storage.leases import decode_event
from topics.storage.routers import Rule, decode_rules, encode_rules
from topics.storage.segment import decode_index, decode_segment_header, decode_tag_page, scan_blocks
from topics.storage.snapshot import decode_snapshot

from .campaign import Campaign, Finding, Tally

INPUTS = 100_000  # of one seed
SLOW_S = 1.0  # of processor time, for one input: a hang


class Accepted(AssertionError):
    """Something came out that was never written."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    samples: Sequence[bytes]
    take: Callable[[bytes], object]  # decodes, and raises Accepted
    refuses: tuple[type[Exception], ...]
    weight: int = 10
    mutate: Callable[[random.Random, bytes, Sequence[bytes]], bytes] | None = None


# --- mutations ---------------------------------------------------------------------------------------


def mutated(dice: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to three changes."""
    changed = bytearray(data)
    for _ in range(1 if dice.random() < 0.7 else dice.randint(2, 3)):
        _change(dice, changed, others)
    return bytes(changed)


def _change(dice: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    size = len(data)
    if not size:
        data.extend(dice.randbytes(8))
        return
    at = int(dice.random() * size)
    roll = int(dice.random() * 12)
    if roll < 4:
        data[at] ^= 1 << int(dice.random() * 8)
    elif roll == 4:
        data[at] = int(dice.random() * 256)
    elif roll == 5:
        data[at : at + 8] = dice.randbytes(len(data[at : at + 8]))
    elif roll == 6:
        length = min(size - at, 1 << dice.randrange(10))
        data[at : at + length] = bytes(length)
    elif roll == 7:
        del data[at:]
    elif roll == 8:
        del data[at : at + dice.choice((1, 2, 4, 8, 16))]
    elif roll == 9:
        data[at:at] = dice.randbytes(dice.choice((1, 4, 8))) if dice.random() < 0.5 else bytes(8)
    elif roll == 10:
        word = dice.choice((0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1))
        data[at : at + 8] = word.to_bytes(8, "little")[: len(data[at : at + 8])]
    else:
        other = dice.choice(others)
        start = int(dice.random() * len(other))
        data[at:] = other[start:]


# --- files -------------------------------------------------------------------------------------------


def _placeless(frame: Frame) -> Frame:
    return frame._replace(offset=0)


_WAL = generate.wal()
_SEGMENT = generate.segment()
_INDEX = generate.index()
_SNAPSHOT = generate.snapshot()
_RULES = encode_rules([Rule("r", "source", "destination", 7, 5, 0, 0), Rule("s", "a", "b", 8, 5, 0, 1)])
_FRAMES = list(scan(_WAL, salt=SALT))
_BLOCKS = [frame for _, frame in scan_blocks(_SEGMENT, salt=SALT, path="golden")]
_KNOWN = {_placeless(frame) for frame in (*_FRAMES, *_BLOCKS)}
_FRAME_BYTES = [_WAL[frame.offset : frame.offset + frame.length] for frame in _FRAMES]
_BODIES = [(frame.body, frame.count, frame.ts) for frame in (*_FRAMES, *_BLOCKS) if frame.type in (1, 16)]
_GOLDEN_INDEX = decode_index(_INDEX, path="golden")
_PAGES = [
    _INDEX[_GOLDEN_INDEX.pages_offset + at : _GOLDEN_INDEX.pages_offset + at + length]
    for _, at, length in _GOLDEN_INDEX.directory
]
_EVENTS = [
    b'{"e":"claimed","node":"n","seqs":[1,2,3],"until_ms":1700000000000}',
    b'{"e":"acked","seqs":[1]}',
    b'{"e":"checkpoint","jobs":[[1,2,"n",3,4]]}',
]


def _only_known(frames: Sequence[Frame]) -> None:
    for frame in frames:
        if _placeless(frame) not in _KNOWN:
            raise Accepted(f"a frame that nobody wrote: {frame}")


def _take_frame(data: bytes) -> None:
    frame = decode_frame(data, 0, salt=SALT)
    if frame is not None:
        _only_known([frame])


def _take_log(data: bytes) -> None:
    good = list(scan(data, salt=SALT))
    _only_known(good)
    _only_known(list(frames_after(data, salt=SALT, start=FILE_HEADER_BYTES)))


def _same_as(expected: Sequence[object], decode: Callable[..., object]) -> Callable[[bytes], None]:
    known = [msgspec.msgpack.encode(value) for value in expected]

    def take(data: bytes) -> None:
        found = decode(data, path="golden")
        if msgspec.msgpack.encode(found) not in known:
            raise Accepted(f"it was decoded as {found!r}")

    return take


def _take_blocks(data: bytes) -> None:
    _only_known([frame for _, frame in scan_blocks(data, salt=SALT, path="golden")])


def _take_columns(data: bytes) -> None:
    columns = Columns(data, count=4, ts=1)
    for look in (
        columns.data, columns.runs, columns.tags, columns.tags_json, columns.nodes, columns.nodes_json,
        columns.metas, columns.sizes, columns.data_text,
    ):  # fmt: skip
        try:
            look()
        except CorruptData:
            pass  # the other columns may be good
    _ = columns.size


# --- a ring ------------------------------------------------------------------------------------------

_RING_BYTES = 4_096
_GENERATION = 7
_MESSAGES = [b"first", b"x" * 100, b"", bytes(range(200)), b"y" * 1_200, b"last"]


def _make_ring() -> tuple[bytes, list[int]]:
    """A ring with messages of all kinds, and where the headers of its frames are."""
    span = layout.ring_span(_RING_BYTES)
    region = memoryview(bytearray(2 * span))
    format_link(region, generation=_GENERATION, ring_bytes=_RING_BYTES)
    writer = RingWriter(region[:span], generation=_GENERATION)
    for message in _MESSAGES:
        writer.send(message)
        if message in (b"first", b"last"):
            writer.flush()
    writer.flush()
    data = bytes(region[:span])
    tail = writer.position
    headers = []
    at = 0
    while at < tail:
        headers.append(layout.HEADER_BYTES + at)
        length = struct.unpack_from("<I", data, layout.HEADER_BYTES + at)[0]
        at += layout.frame_span(length)
    return data, headers


_RING, _RING_HEADERS = _make_ring()


def _drain(data: bytes) -> list[bytes]:
    reader = RingReader(memoryview(bytearray(data)), generation=_GENERATION, max_message=1 << 20)
    found = []
    for _ in range(8):
        more = reader.drain(1_000)
        if not more and reader.empty():
            break
        found += more
    return found


def _take_ring_headers(data: bytes) -> None:
    found = _drain(data)
    if found != _MESSAGES[: len(found)]:
        raise Accepted(f"messages that nobody sent: {[bytes(one[:20]) for one in found]}")


def _take_ring(data: bytes) -> None:
    found = _drain(data)
    if sum(map(len, found)) > len(data):
        raise Accepted("more than the ring holds")


def _mutate_ring_header(dice: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One byte of each header or word that is changed: the check of a header is a sum without carry (XOR), so a change
    of a field and the same change of the check would cancel out."""
    changed = bytearray(data)
    words = [8 * word for word in (layout.WORD_TAIL, layout.WORD_MAGIC, layout.WORD_CAPACITY)]
    for start in dice.sample([*_RING_HEADERS, *words], 1 if dice.random() < 0.7 else 2):
        at = start + dice.randrange(8 if start in words else layout.FRAME_HEADER.size)
        changed[at] = changed[at] ^ (1 << dice.randrange(8)) if dice.random() < 0.7 else dice.randrange(256)
    return bytes(changed)


def _mutate_ring(dice: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = layout.HEADER_BYTES + int(dice.random() * 2_000)
        changed[at] ^= 1 << int(dice.random() * 8)
    return bytes(changed)


_FILES = (FormatError, CorruptData)
TARGETS: tuple[Target, ...] = (
    Target("frame", _FRAME_BYTES, _take_frame, (), 30),
    Target("log", [_WAL], _take_log, (), 10),
    Target("wal_header", [_WAL[:FILE_HEADER_BYTES]], _same_as([generate.WAL_HEADER], decode_wal_header), _FILES, 5),
    Target(
        "segment_header",
        [_SEGMENT[:FILE_HEADER_BYTES]],
        _same_as([generate.SEGMENT_HEADER], decode_segment_header),
        _FILES,
        5,
    ),
    Target("blocks", [_SEGMENT], _take_blocks, _FILES, 15),
    Target("index", [_INDEX], _same_as([_GOLDEN_INDEX], decode_index), _FILES, 5),
    Target(
        "tag_page", _PAGES, _same_as([decode_tag_page(page, path="") for page in _PAGES], decode_tag_page), _FILES, 5
    ),
    Target("snapshot", [_SNAPSHOT], _same_as([decode_snapshot(_SNAPSHOT, path="")], decode_snapshot), _FILES, 15),
    Target("rules", [_RULES], _same_as([decode_rules(_RULES, path="")], decode_rules), _FILES, 3),
    Target("columns", [body for body, _, _ in _BODIES], _take_columns, (CorruptData,), 7),
    Target("lease_event", _EVENTS, decode_event, (CorruptData,), 3),
    Target("ring_header", [_RING], _take_ring_headers, (RingPoisoned,), 8, _mutate_ring_header),
    Target("ring_payload", [_RING], _take_ring, (RingPoisoned,), 4, _mutate_ring),
)


# --- the campaign ------------------------------------------------------------------------------------


def judge(target: Target, data: bytes) -> str | None:
    """What is wrong with how it was taken."""
    try:
        target.take(data)
    except target.refuses:
        return None
    except Accepted as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run(seed: int, only: str | None = None, *, inputs: int = INPUTS, targets: Sequence[Target] = TARGETS) -> Tally:
    tally = Tally()
    dice = random.Random(f"decoders/{seed}")
    weights = [target.weight for target in targets]
    clock = time.thread_time  # not that of the wall: other work may stop this process for seconds
    for number, target in enumerate(dice.choices(targets, weights, k=inputs)):
        sample = target.samples[int(dice.random() * len(target.samples))]
        data = (target.mutate or mutated)(dice, sample, target.samples)
        if only is not None and only != str(number):
            continue
        began = clock()
        wrong = judge(target, data)
        took = clock() - began
        if took > SLOW_S and wrong is None:
            wrong = f"it took {took:.1f} s"
        if wrong is not None:
            tally.find(Finding(seed, str(number), f"{target.name}: {wrong}\n    input: {data.hex()[:4_000]}"))
        tally.counts[target.name] += 1
    tally.add("inputs", inputs if only is None else 1)
    DECODED.add(tally.counts["inputs"])
    return tally


CAMPAIGN = Campaign(
    name="decoders",
    title="fuzzed frames, blocks, snapshots and ring bytes",
    goal=10_000_000,
    figure="inputs",
    run=run,
    meaning="mutations of golden bytes, given to the decoders of files and rings themselves",
)
