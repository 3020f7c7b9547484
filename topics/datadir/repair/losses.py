"""What the missing frames of a log may have held, topic by topic. Pure.

A batch that follows a gap begins where the missing one of its topic ended, so what lies between is lost. A topic of
which nothing follows leaves only a bound: a record takes two bytes in the log at least, and no seq above the ceiling
was given out unless a missing frame raised it. Where the head of the missing frame can be read, no other topic is in
doubt. `suspect` is all that may be lost; what of it is in a segment, or known to be gone, is for others to say.
"""

from __future__ import annotations

import msgspec

from topics import limits
from topics.datadir.ranges import Ranges
from topics.datadir.repair.log_salvage import Gap, SalvagedLog
from topics.storage.config import TopicConfig, bucket_of
from topics.storage.control import CopiesLine, DeleteFrame, HeadFrame, TopicFrame, decode_copies
from topics.storage.format import FrameType, frame_bytes
from topics.storage.frames import Frame
from topics.storage.snapshot import TopicState

_LEAST_FRAME_BYTES = frame_bytes(key_len=0, body_len=0)
_LEAST_RECORD_BYTES = 2  # a digit, and what parts it from the next


class Tale(msgspec.Struct, kw_only=True):
    """What the log tells of one topic."""

    id: int
    name: str | None  # None: the frame that named it is missing
    config: TopicConfig = TopicConfig()
    state: TopicState | None = None  # of the snapshot
    known: int = 0  # seqs up to here are accounted for
    ceiling: int = 0
    in_log: Ranges = []
    suspect: Ranges = []
    deleted: Ranges = []  # by frames that the snapshot has counted: nobody misses it
    raised: int = 0  # the head must be here at least; 0: it is where the log says
    made_ms: int = 0
    nameless_since: int = 0  # the last frame before the gap in which it was named
    gaps_seen: int = 0
    copied: bool = False  # it is the destination of routers: frames of no topic may have given out seqs of it

    @property
    def head_seq(self) -> int:
        return max(self.known, self.state.head_seq if self.state is not None else 0)


class Tales(msgspec.Struct, kw_only=True):
    topics: dict[int, Tale]
    untold: list[str]  # what can't be said in seqs


def tell(log: SalvagedLog, states: list[TopicState], *, covered: int) -> Tales:
    return _Telling(states, covered=covered).run(log)


class _Telling:
    def __init__(self, states: list[TopicState], *, covered: int) -> None:
        self._covered = covered
        self._gaps: list[Gap] = []
        self._untold: list[str] = []
        self._topics = {
            state.id: Tale(
                id=state.id,
                name=state.name,
                config=state.config,
                state=state,
                known=max(state.flushed_seq, state.floor - 1),
                ceiling=state.ceiling,
                copied=state.pipe is not None,
            )
            for state in states
        }

    def run(self, log: SalvagedLog) -> Tales:
        for piece in log.pieces():
            if isinstance(piece, Gap):
                gap = piece if self._trusted(piece) else msgspec.structs.replace(piece, frame=None)
                self._gaps.append(gap)
                self._tell_of(gap)
            else:
                self._take(piece)
        for tale in self._topics.values():
            self._end(tale)
        return Tales(topics=self._topics, untold=self._untold)

    def _trusted(self, gap: Gap) -> bool:
        """Whether the head of the missing frame fits what is known: a damaged one would clear those it belongs to."""
        frame = gap.frame
        tale = None if frame is None else self._topics.get(frame.topic_id)
        if frame is not None and tale is None and frame.type == FrameType.TOPIC:
            return _name_in(frame) is not None
        if frame is None or tale is None:
            return False
        if frame.type != FrameType.APPEND or (tale.state is not None and tale.state.pipe is not None):
            return True
        return frame.first_seq == tale.known + 1

    def _tell_of(self, gap: Gap) -> None:
        """Deletes, configs and topics that did not happen now."""
        numbers = f"frame {gap.after + 1}" if gap.count == 1 else f"frames {gap.after + 1} to {gap.before - 1}"
        if gap.frame is None:
            if gap.count:
                self._untold.append(f"{gap.file}: {numbers} can't be told: deletes and changes of topics in it, too")
            return
        tale = self._topics.get(gap.frame.topic_id)
        name = _name_in(gap.frame) if tale is None else tale.name
        name = name or f"{gap.frame.topic_id:016x}"
        kinds = {
            FrameType.DELETE: f"a delete in topic {name}: its records are there again",
            FrameType.TOPIC: f"a change of topic {name}, or its creation",
            FrameType.DROP: f"the removal of topic {name}: it is there again",
        }
        if (what := kinds.get(FrameType(gap.frame.type))) is not None:
            self._untold.append(f"{gap.file}: {numbers} was {what}")

    def _doubts(self, tale: Tale) -> list[Gap]:
        """The gaps since its last frame that may have held more of it."""
        return [
            gap
            for gap in self._gaps[tale.gaps_seen :]
            if gap.frame is None or gap.frame.topic_id == tale.id or (tale.copied and _may_copy(gap.frame))
        ]

    def _met(self, tale: Tale, upto: int) -> None:
        """A frame says that seqs up to here were given out before it."""
        if upto > tale.known and self._doubts(tale):
            tale.suspect.append((tale.known + 1, upto))
        tale.known = max(tale.known, upto)
        tale.gaps_seen = len(self._gaps)

    def _take(self, frame: Frame) -> None:
        tale = self._topics.get(frame.topic_id)
        fresh = frame.lsn > self._covered
        if frame.type == FrameType.TOPIC:
            if fresh:
                self._configured(tale, frame)
        elif frame.type == FrameType.DROP:
            if fresh:
                self._topics.pop(frame.topic_id, None)
        elif frame.type == FrameType.APPEND:
            if tale is None:
                if not fresh or not self._gaps:
                    return
                tale = self._topics[frame.topic_id] = Tale(
                    id=frame.topic_id, name=None, made_ms=frame.ts, nameless_since=self._gaps[-1].after
                )
            self._met(tale, frame.first_seq - 1)
            tale.known = max(tale.known, frame.last_seq)
            tale.in_log.append((frame.first_seq, frame.last_seq))
        elif frame.type == FrameType.HEAD and not frame.first_seq:
            self._copied(decode_copies(frame))
        elif tale is not None and frame.type == FrameType.HEAD:
            tale.ceiling = max(tale.ceiling, frame.first_seq)
            self._met(tale, msgspec.msgpack.decode(frame.body, type=HeadFrame).head_seq)
        elif tale is not None and frame.type == FrameType.DELETE:
            body = msgspec.msgpack.decode(frame.body, type=DeleteFrame)
            tale.known = max(tale.known, (body.before_seq or 0) - 1)
            if not fresh:
                tale.deleted += [(seq, seq) for seq in body.seqs or ()]

    def _copied(self, lines: list[CopiesLine]) -> None:
        for line in lines:
            if line.names_seqs and (tale := self._topics.get(line.topic_id)) is not None:
                self._met(tale, line.first_seq - 1)
                tale.known = max(tale.known, line.last_seq)
                tale.in_log.append((line.first_seq, line.last_seq))

    def _configured(self, tale: Tale | None, frame: Frame) -> None:
        body = msgspec.msgpack.decode(frame.body, type=TopicFrame)
        if tale is None:
            tale = self._topics[frame.topic_id] = Tale(id=frame.topic_id, name=body.name, gaps_seen=len(self._gaps))
        tale.name = body.name
        tale.config = body.config
        tale.copied = body.pipe is not None
        tale.ceiling = max(tale.ceiling, body.ceiling)
        if tale.nameless_since:
            tale.nameless_since = 0

    def _end(self, tale: Tale) -> None:
        doubts = self._doubts(tale)
        later = [gap for gap in doubts if gap.open or gap.before > self._covered + 1]
        if tale.config.durability == "ephemeral":
            tale.raised = self._promised(tale, later)
            return
        if not doubts:
            return
        head = tale.head_seq
        most = max((self._most(tale, gap, head) for gap in later), default=head)
        if len(later) > 1:
            most = head + sum(self._most(tale, gap, head) - head for gap in later)
        if most > head:
            tale.raised = most
        tale.suspect.append((tale.known + 1, max(head, most)))
        tale.known = max(head, most)

    @staticmethod
    def _promised(tale: Tale, gaps: list[Gap]) -> int:
        """Of a topic whose seqs are in no frame: how far missing promises may have gone; 0 if none is missing."""
        if any(gap.frame is None for gap in gaps):
            return tale.ceiling + limits.LOST_SEQS
        heads = [gap.frame.first_seq for gap in gaps if gap.frame is not None and gap.frame.type == FrameType.HEAD]
        return max([tale.ceiling, *heads]) if heads else 0

    def _most(self, tale: Tale, gap: Gap, head: int) -> int:
        """The highest seq that a gap may have given out."""
        if gap.frame is not None:
            if tale.copied and _may_copy(gap.frame):
                return max(head, tale.ceiling)
            return max(head, gap.frame.last_seq) if gap.frame.type == FrameType.APPEND else head
        bound = max(head, tale.ceiling) + limits.LOST_SEQS
        if gap.room is None or tale.copied:  # a line for any number of copies takes little room
            return bound
        room = gap.room - gap.count * _LEAST_FRAME_BYTES
        return min(bound, head + max(0, room) // _LEAST_RECORD_BYTES + 1)


def _name_in(frame: Frame) -> str | None:
    """Of a topic, from a damaged frame, if the id belongs to it."""
    try:
        name = msgspec.msgpack.decode(frame.body, type=TopicFrame).name
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return name if bucket_of(name) == frame.topic_id & 0xFFFF else None


def _may_copy(frame: Frame) -> bool:
    """Whether a frame, of which only the head is known, may tell of routers' copies."""
    return frame.type == FrameType.HEAD and not frame.first_seq
