"""Files that nothing names any more: of dropped topics, unfinished flushes, other layouts. Removed at start, and those
of the cold tier also when its disk comes back.

Only after recovery has succeeded: what it refused to read may be what an operator needs. Removing is idempotent.
"""

from __future__ import annotations

import os

from topics.settings import Settings
from topics.storage.config import owner_of_id
from topics.storage.paths import parse_numbered, parse_topic_dir, shard_dir, topics_dir
from topics.walshard.log.disk import Disk
from topics.walshard.log.recovery import Recovered
from topics.walshard.topic.topic import Topic


def remove_leftovers(recovered: Recovered, root: str, *, cold: bool, shard: int, shards: int, disk: Disk) -> int:
    """Files of this shard's topics that nothing names: dropped topics, unfinished flushes, temporary files. `root` is
    the data folder, or the cold tier: there also copies whose hot files are still the ones that count. What a cold disk
    does not let go, because it is read-only or broken, stays until a later start: it counts for nothing."""
    named = {topic.id: files_of(topic, cold=cold) for topic in recovered.topics.values()}
    spared = {topic.id for topic in recovered.dropped}
    try:
        return remove_unnamed(root, named, spared, shard=shard, shards=shards, disk=disk)
    except OSError:
        if not cold:
            raise
        return 0


def files_of(topic: Topic, *, cold: bool) -> set[str]:
    """Names of its files in the cold tier, or in the data folder."""
    named = {os.path.basename(segment.path) for segment in topic.segments if segment.cold == cold}
    if not cold:
        named |= {os.path.basename(segment.index_path) for segment in topic.segments}
    return named


def remove_unnamed(
    root: str, named: dict[int, set[str]], spared: set[int], *, shard: int, shards: int, disk: Disk
) -> int:
    """`named`: the files that count, by topic id; `spared`: topics of which nothing goes."""
    folder = topics_dir(root)
    removed = 0
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        topic_id = parse_topic_dir(name)
        if topic_id is None or owner_of_id(topic_id, shards) != shard or topic_id in spared:
            continue
        known = named.get(topic_id)
        if known is None:
            disk.remove_dir(os.path.join(folder, name))
            removed += 1
            continue
        for entry in os.listdir(os.path.join(folder, name)):
            if entry not in known:
                disk.unlink(os.path.join(folder, name, entry))
                removed += 1
    return removed


def remove_stale(settings: Settings, *, layout: int, shard: int, shards: int, disk: Disk) -> None:
    """WAL and snapshot files of layouts other than the one in force, in this shard's folder; the first shard also
    clears the folders of shards that are no more."""
    root = os.path.join(settings.data_dir, "wal")
    mine = {os.path.basename(shard_dir(settings.data_dir, shard))}
    current: set[str] = set()
    if shard == 0:
        current = {os.path.basename(shard_dir(settings.data_dir, number)) for number in range(shards)}
        mine |= {name for name in os.listdir(root) if name not in current}
    for name in mine:
        folder = os.path.join(root, name)
        gone = shard == 0 and name not in current
        for entry in os.listdir(folder):
            parsed = parse_numbered(entry)
            if gone or (parsed is not None and parsed[0] != layout) or entry.endswith(".tmp"):
                disk.unlink(os.path.join(folder, entry))
        if gone:
            disk.remove_dir(folder)
