"""The files that make up a data folder at one moment: what has to be kept so that somebody can read it later.

Most of them are final and can be linked. The rest is the tail: a log file that grows, segments that are not sealed; of
those a known number of bytes counts, and just those are copied. Delete flags are the exception to "final": they change
in place, so a link shows what clients delete later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from topics.datadir.view.folder import Folder
from topics.storage.paths import index_path, segment_name, topic_dir
from topics.storage.routers import routers_path


class Holding(msgspec.Struct, frozen=True):
    file: str  # below the data folder
    bytes: int | None = None  # of a file that grows: how many count. None: it is final


def holdings(folder: Folder) -> Iterator[Holding]:
    """All but the manifest, which whoever makes a copy writes last."""
    files = folder.files
    for shard in folder.shards:
        if shard.snapshot is not None:
            yield Holding(files.relative(shard.snapshot))
        for wal in shard.wals:
            yield Holding(wal.file, wal.end if wal is shard.wals[-1] else None)
        for topic in [*shard.topics.values(), *shard.dropped]:
            home = files.relative(topic_dir(files.data_dir, topic.id))
            for segment in topic.segments:
                file = os.path.join(home, segment_name(segment.first_seq))
                yield Holding(file, None if segment.sealed else segment.data_bytes)
                if segment.sealed:
                    yield Holding(index_path(file))
    if folder.rules or files.manifest.routers:
        yield Holding(files.relative(routers_path(files.data_dir)))
