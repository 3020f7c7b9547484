"""How many topics there are of each durability class and type, kept as they come and go: nobody walks them to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from topics.storage.config import TopicConfig
from topics.storage.leases import is_log_name
from topics.walshard.topic.topic import Topic


class Kinds:
    def __init__(self, topics: Iterable[Topic]) -> None:
        self.by_class: Counter[str] = Counter()
        self.queues = 0
        for topic in topics:
            if not is_log_name(topic.name):
                self.add(topic.config)

    def add(self, config: TopicConfig) -> None:
        self.by_class[config.durability] += 1
        self.queues += config.type == "queue"

    def remove(self, config: TopicConfig) -> None:
        self.by_class[config.durability] -= 1
        self.queues -= config.type == "queue"

    def change(self, before: TopicConfig, after: TopicConfig) -> None:
        self.remove(before)
        self.add(after)
