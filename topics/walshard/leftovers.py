"""Files that nothing names any more: of dropped topics, unfinished flushes, other layouts. Removed at start.

Only after recovery has succeeded: what it refused to read may be what an operator needs. Removing is idempotent.
"""

from __future__ import annotations

import os

from topics.settings import Settings
from topics.storage.config import owner_of_id
from topics.storage.paths import parse_numbered, parse_topic_dir, shard_dir, topics_dir
from topics.walshard.disk import Disk
from topics.walshard.recovery import Recovered


def remove_leftovers(recovered: Recovered, root: str, *, cold: bool, shard: int, shards: int, disk: Disk) -> int:
    """Files of this shard's topics that nothing names: dropped topics, unfinished flushes, temporary files. `root` is
    the data folder, or the cold tier: there also copies whose hot files are still the ones that count."""
    folder = topics_dir(root)
    known = {topic.id: topic for topic in recovered.topics.values()}
    dropped = {topic.id for topic in recovered.dropped}
    removed = 0
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        topic_id = parse_topic_dir(name)
        if topic_id is None or owner_of_id(topic_id, shards) != shard or topic_id in dropped:
            continue
        topic = known.get(topic_id)
        if topic is None:
            disk.remove_dir(os.path.join(folder, name))
            removed += 1
            continue
        named = {os.path.basename(segment.path) for segment in topic.segments if segment.cold == cold}
        if not cold:
            named |= {os.path.basename(segment.index_path) for segment in topic.segments}
        for entry in os.listdir(os.path.join(folder, name)):
            if entry not in named:
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
