"""Where things are in a data folder. Topic files are named by number, never by name.

<data>/topics.json                              format, layout, shard count
<data>/LOCK                                     who serves it
<data>/wal/shard-NN/LLLLLLLL-FFFFFFFFFFFF.wal   layout and file number, in hex
<data>/wal/shard-NN/LLLLLLLL-FFFFFFFFFFFF.snap  likewise; the highest number is current
<data>/topics/<id>/<first seq>.data .idx        segments of a topic
"""

from __future__ import annotations

import os
import re

_NUMBERED = re.compile(r"^([0-9a-f]{8})-([0-9a-f]{12})\.(wal|snap)$")
_TOPIC = re.compile(r"^[0-9a-f]{16}$")
_SEGMENT = re.compile(r"^([0-9]{20})\.data$")


def shard_dir(data_dir: str, shard: int) -> str:
    return os.path.join(data_dir, "wal", f"shard-{shard:02d}")


def numbered_name(layout: int, number: int, kind: str) -> str:
    return f"{layout:08x}-{number:012x}.{kind}"


def parse_numbered(name: str) -> tuple[int, int, str] | None:
    """(layout, number, kind) of a WAL or snapshot file name, or None."""
    if (match := _NUMBERED.match(name)) is None:
        return None
    return int(match[1], 16), int(match[2], 16), match[3]


def topics_dir(data_dir: str) -> str:
    return os.path.join(data_dir, "topics")


def topic_dir(data_dir: str, topic_id: int) -> str:
    return os.path.join(data_dir, "topics", f"{topic_id:016x}")


def parse_topic_dir(name: str) -> int | None:
    """The topic id that a folder name stands for, or None."""
    return int(name, 16) if _TOPIC.match(name) else None


def segment_name(first_seq: int) -> str:
    return f"{first_seq:020d}.data"


def parse_segment(name: str) -> int | None:
    match = _SEGMENT.match(name)
    return int(match[1]) if match else None


def index_path(segment_path: str) -> str:
    return segment_path.removesuffix(".data") + ".idx"
