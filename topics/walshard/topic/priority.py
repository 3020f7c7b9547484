"""A topic's effective priority: the operator's number, or how recently somebody read from it."""

from __future__ import annotations

from topics.storage.config import TopicConfig

AUTO_MAX = 500
HALF_LIFE_MS = 30_000
AUTO_FLOOR_MS = 300_000


def effective_priority(config: TopicConfig, *, last_read_ts: int | None, now_ms: int) -> int:
    if config.priority is not None:
        return config.priority
    if not config.auto_priority or last_read_ts is None:
        return 0
    idle = max(0, now_ms - last_read_ts)
    if idle >= AUTO_FLOOR_MS:
        return 0
    return int(AUTO_MAX * 2.0 ** (-idle / HALF_LIFE_MS) + 0.5)
