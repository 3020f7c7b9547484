"""Which routers there are, and which may be added: the graph. Pure.

Every destination has one source, so walking against the arrows is never ambiguous: from a topic there is at most one
way back, and a cycle is a simple ring. A record that is written into a ring goes round it until it has been in every
topic once; `ring_hops` is how many routers that are.

When a ring is closed or opened, some records are on their way. `turn` notes in the rules what counts for them, so that
the file that changes the ring holds that, too: what was written before a ring was closed does not pass the router that
closed it, and what had been round before a ring was opened goes nowhere a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

import msgspec

from topics.errors import ApiError
from topics.keys import seen
from topics.storage.routers import Past, Rule

_NONE: Mapping[tuple[str, str], int] = MappingProxyType({})
_RINGS = 16  # that a rule remembers: as many have been closed over a pair that copies nothing


class Rules:
    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules: dict[str, Rule] = {rule.router: rule for rule in rules}
        self._sources: dict[str, str] = {rule.dest: rule.source for rule in self._rules.values()}

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules.values())

    def get(self, router: str) -> Rule | None:
        return self._rules.get(router)

    def put(self, rule: Rule) -> None:
        self._rules[rule.router] = rule
        self._sources[rule.dest] = rule.source

    def remove(self, router: str) -> Rule | None:
        rule = self._rules.pop(router, None)
        if rule is not None and not self.between(rule.source, rule.dest):
            self._sources.pop(rule.dest, None)
        return rule

    def between(self, source: str, dest: str) -> list[Rule]:
        """The routers of one pipe, in the order their copies are made."""
        if self._sources.get(dest) != source:
            return []
        found = [rule for rule in self._rules.values() if rule.dest == dest and rule.source == source]
        return sorted(found, key=lambda rule: rule.router)

    def touching(self, topic: str) -> list[Rule]:
        return sorted(
            (rule for rule in self._rules.values() if topic in (rule.source, rule.dest)), key=lambda rule: rule.router
        )

    def meaning(self, topic: str, life: int) -> list[Rule]:
        """Those that touch this life of a topic."""
        return [rule for rule in self.touching(topic) if _life_of(topic, rule) == life]

    def not_meaning(self, topic: str, life: int) -> list[Rule]:
        """Those that touch another."""
        return [rule for rule in self.touching(topic) if _life_of(topic, rule) != life]

    def check_new(self, *, source: str, dest: str, allow_cycle: bool, prefixes: tuple[str, ...] = ()) -> None:
        """Refuse a second source for a destination, and a cycle that was not asked for. Whoever asks is told names with
        these prefixes alone."""
        known = self._sources.get(dest)
        if known is not None and known != source:
            known = seen(known, prefixes)
            raise ApiError(
                "topic_exists_incompatible",
                f'"{dest}" already gets its records from "{known}"; a destination has one source',
                {"reason": "router_dest_fan_in", "dest": dest, "source": known},
            )
        if not allow_cycle and (cycle := self.cycle(source, dest)) is not None:
            cycle = [seen(topic, prefixes) for topic in cycle]
            raise ApiError(
                "router_cycle",
                f"this router would close a cycle: {' -> '.join(cycle)}. Set allow_cycle if that is meant",
                {"cycle": cycle},
            )

    def cycle(self, source: str, dest: str) -> list[str] | None:
        """The ring that an arrow from source to dest is part of, or would be: [source, dest, ..., source]."""
        back = [source]
        at = source
        while at != dest:
            before = self._sources.get(at)
            if before is None or before in back:
                return None
            back.append(before)
            at = before
        return [source, *reversed(back)]

    def ring_hops(self, source: str, dest: str) -> int | None:
        """In a ring: how many routers a record may pass before it comes back to where it was written. None: no ring."""
        cycle = self.cycle(source, dest)
        return None if cycle is None else len(cycle) - 2

    def closed_by(self, source: str, dest: str) -> list[tuple[str, str]]:
        """The pairs that an arrow from source to dest would join to a ring, in the order that records pass them."""
        cycle = None if self.between(source, dest) else self.cycle(source, dest)
        return [] if cycle is None else list(pairwise(cycle[1:]))

    def turn(self, before: Rules, *, heads: Mapping[str, int], copied: Mapping[tuple[str, str], int] = _NONE) -> None:
        """Note what has become of rings since `before`. heads: of the sources in a ring that is closed, when none of
        its pairs copied. copied: how far pairs have come for good, where that is known."""
        for rule in list(self):
            if not before.between(rule.source, rule.dest):
                closed = before.closed_by(rule.source, rule.dest)
                distances = {pair: distance for distance, pair in enumerate(closed)}
                ring = {topic for pair in closed for topic in pair}
                for other in list(before):
                    distance = distances.get((other.source, other.dest))
                    last = None if other.past is None else other.past.last
                    # One that leads out holds back what has passed more routers than anything will in this ring.
                    out = last is not None and last <= len(closed) and other.source in ring
                    if distance is not None or out:
                        at = copied.get((other.source, other.dest), 0)
                        past = Past(last, heads[other.source], distance or 0, before=_left(other.past, at=at))
                        if past.before and (past.before.hops, past.before.passed) == (past.hops, past.passed):
                            past = msgspec.structs.replace(past, before=past.before.before)
                        self.put(msgspec.structs.replace(other, past=past))
            elif self.ring_hops(rule.source, rule.dest) is None:
                hops = before.ring_hops(rule.source, rule.dest)
                if hops is not None:
                    past = msgspec.structs.replace(rule.past or Past(), last=hops)
                    self.put(msgspec.structs.replace(rule, past=past))


def _left(past: Past | None, *, at: int, most: int = _RINGS) -> Past | None:
    """What counts of it, and of those before it, for seqs that are not copied yet."""
    if past is None or past.until <= at or most == 0:
        return None
    return msgspec.structs.replace(past, last=None, before=_left(past.before, at=at, most=most - 1))


def _life_of(topic: str, rule: Rule) -> int:
    return rule.source_id if rule.source == topic else rule.dest_id
