"""The rings of a running server seen from outside: where writer and reader of each stand, for a process that is stuck.

Read-only, and no process is asked. A link's region has no name, but the supervisor holds a descriptor of it, and
/proc/<pid>/fd opens that from any process of the same user. Its target is labelled with both ends; the first of them
writes the first of its two rings.

Positions are read one after the other while both sides go on: a ring that moves may look a little off.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator

import msgspec

from topics.shm import layout
from topics.shm.counters import Board, Word

# What /proc shows for the descriptor of a link's region: region.py's name, with the label of children.py's Link.
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


def look_at_rings(board: Board) -> list[RingState]:
    """Every ring of every link, in the order of the board."""
    places = {row.name: place for place, row in enumerate(board.rows())}
    links = sorted(_links(board.row("supervisor")[Word.PID]), key=lambda link: (places[link[0]], places[link[1]]))
    return [ring for first, second, path in links for ring in _link(path, first, second, board)]


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


def _link(path: str, first: str, second: str, board: Board) -> list[RingState]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        size = os.fstat(fd).st_size
        if size < 2 * layout.HEADER_BYTES:
            return []
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
            span = size // 2
            rings = [
                _ring(memory[at : at + layout.HEADER_BYTES], memory, at, writer, reader, board)
                for at, writer, reader in ((0, first, second), (span, second, first))
            ]
        return [ring for ring in rings if ring is not None]
    finally:
        os.close(fd)


def _ring(header: bytes, memory: mmap.mmap, at: int, writer: str, reader: str, board: Board) -> RingState | None:
    words = memoryview(header).cast("Q")
    if words[layout.WORD_MAGIC] != layout.MAGIC:
        return None
    capacity, generation = words[layout.WORD_CAPACITY], words[layout.WORD_GENERATION]
    tail, head = words[layout.WORD_TAIL], words[layout.WORD_HEAD]
    return RingState(
        writer=writer,
        reader=reader,
        generation=generation,
        capacity=capacity,
        written=tail,
        taken=head,
        depth=tail - head,
        writer_waits=bool(words[layout.WORD_WANTS]),
        reader_sleeps=bool(board.row(reader)[Word.SLEEPING]),
        problem=_problem(memory, at, tail=tail, head=head, capacity=capacity, generation=generation & 0xFFFF),
    )


def _problem(memory: mmap.mmap, at: int, *, tail: int, head: int, capacity: int, generation: int) -> str | None:
    if not 0 <= tail - head <= capacity:
        return f"written {tail} and taken {head} are further apart than the ring is long"
    if tail == head:
        return None
    place = at + layout.HEADER_BYTES + head % capacity
    length, flags, found, check = layout.FRAME_HEADER.unpack(memory[place : place + layout.FRAME_HEADER.size])
    word = at + layout.WORD_HEAD * 8
    if int.from_bytes(memory[word : word + 8], "little") != head:
        return None  # it was taken while we looked
    if found != generation or check != layout.frame_check(head, length, flags, generation):
        return f"the frame at {head} fails its checks: the reader will give this link up"
    return None
