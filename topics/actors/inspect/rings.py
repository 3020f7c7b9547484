"""The rings of a running server seen from outside: where writer and reader of each stand, for a process that is stuck.

Read-only. A link's region has no name, but the supervisor holds a descriptor of it, and its inspect socket gives copies
of the ring headers (inspect_socket.py). Root can open the descriptor in /proc/<pid>/fd instead: its target is labelled
with both ends. The first of them writes the first of its two rings.

Positions are read one after the other while both sides go on: a ring that moves may look a little off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

import msgspec

from topics.actors.inspect.inspect_socket import LinkSample, RingSample
from topics.shm import layout
from topics.shm.counters import Board, Word

# What /proc shows for the descriptor of a link's region: region.py's name, with the label of
# supervisor/process_table.py's Link.
_LINK = re.compile(r"/dev/shm/topics-\d+-[0-9a-f]+-([^+]+)\+(\S+) \(deleted\)")


class RingState(msgspec.Struct, frozen=True, kw_only=True):
    writer: str
    reader: str
    generation: int
    capacity: int
    written: int  # bytes since the ring was made
    taken: int
    depth: int
    writer_waits: bool  # for room: it wants its bell rung
    reader_sleeps: bool  # it waits for its bell
    problem: str | None  # what is wrong with the frame that comes next


def look_at_rings(links: Sequence[LinkSample], board: Board) -> list[RingState]:
    """Every ring of every link, in the order of the board."""
    places = {row.name: place for place, row in enumerate(board.rows())}
    known = [link for link in links if link.first in places and link.second in places]
    known.sort(key=lambda link: (places[link.first], places[link.second]))
    found = [
        _ring(ring, writer, reader, board)
        for link in known
        for ring, (writer, reader) in zip(
            link.rings, ((link.first, link.second), (link.second, link.first)), strict=False
        )
    ]
    return [ring for ring in found if ring is not None]


def sample_link(fd: int, first: str, second: str) -> LinkSample:
    """Of a link's region: what tells where its rings stand, and no message."""
    size = os.fstat(fd).st_size
    span = size // 2
    return LinkSample(first, second, [_sample(fd, at, span) for at in (0, span)] if span > layout.HEADER_BYTES else [])


def _sample(fd: int, at: int, span: int) -> RingSample:
    header = os.pread(fd, layout.HEADER_BYTES, at)
    words = memoryview(header).cast("Q")
    capacity = words[layout.WORD_CAPACITY]
    frame = b""
    if 0 < capacity <= span:
        place = at + layout.HEADER_BYTES + words[layout.WORD_HEAD] % capacity
        frame = os.pread(fd, layout.FRAME_HEADER.size, place)
    return RingSample(header, frame, os.pread(fd, layout.HEADER_BYTES, at))


def links_of(pid: int) -> list[LinkSample]:
    """Through /proc, where the kernel allows it."""
    return [sample for first, second, path in _links(pid) if (sample := _link(path, first, second)) is not None]


def _links(pid: int) -> Iterator[tuple[str, str, str]]:
    """Both ends, and the path of the descriptor."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder) if pid else []
    except OSError:
        return  # it has just ended, or is another user's
    for name in names:
        path = os.path.join(folder, name)
        try:
            found = _LINK.fullmatch(os.readlink(path))
        except OSError:
            continue  # closed meanwhile
        if found is not None:
            yield found[1], found[2], path


def _link(path: str, first: str, second: str) -> LinkSample | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return sample_link(fd, first, second)
    finally:
        os.close(fd)


def _ring(sample: RingSample, writer: str, reader: str, board: Board) -> RingState | None:
    if len(sample.header) != layout.HEADER_BYTES or len(sample.header_after) != layout.HEADER_BYTES:
        return None
    words = memoryview(sample.header).cast("Q")
    if words[layout.WORD_MAGIC] != layout.MAGIC:
        return None
    tail, head = words[layout.WORD_TAIL], words[layout.WORD_HEAD]
    return RingState(
        writer=writer,
        reader=reader,
        generation=words[layout.WORD_GENERATION],
        capacity=words[layout.WORD_CAPACITY],
        written=tail,
        taken=head,
        depth=tail - head,
        writer_waits=bool(words[layout.WORD_WANTS]),
        reader_sleeps=bool(board.row(reader)[Word.SLEEPING]),
        problem=_problem(
            sample,
            tail=tail,
            head=head,
            capacity=words[layout.WORD_CAPACITY],
            generation=words[layout.WORD_GENERATION] & 0xFFFF,
        ),
    )


def _problem(sample: RingSample, *, tail: int, head: int, capacity: int, generation: int) -> str | None:
    if not 0 <= tail - head <= capacity:
        return f"written {tail} and taken {head} are further apart than the ring is long"
    if tail == head or len(sample.frame) != layout.FRAME_HEADER.size:
        return None
    if memoryview(sample.header_after).cast("Q")[layout.WORD_HEAD] != head:
        return None  # it was taken while we looked
    length, flags, found, check = layout.FRAME_HEADER.unpack(sample.frame)
    if found != generation or check != layout.frame_check(head, length, flags, generation):
        return f"the frame at {head} fails its checks: the reader will give this link up"
    return None
