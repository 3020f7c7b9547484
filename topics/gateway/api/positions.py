"""Where topics stand, asked of the shards that own them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import topic_not_found
from topics.gateway.api.types import Call, Gather, Outcome
from topics.gateway.api.watch_schemas import Start
from topics.storage.config import owner_of_name

Found = dict[str, messages.Position]


def locate(names: list[str], shards: int, *, lenient: bool, then: Callable[[Found], Outcome]) -> Outcome:
    """Ask the shards about topics; an unknown one is 404, or left out."""
    by_shard: dict[int, list[str]] = {}
    for name in names:
        by_shard.setdefault(owner_of_name(name, shards), []).append(name)
    calls = [Call(shard=shard, op=Op.POSITIONS, head=messages.Positions(asked)) for shard, asked in by_shard.items()]

    def combine(answers: list[messages.PositionsFound]) -> Outcome:
        found: Found = {}
        for asked, answer in zip(by_shard.values(), answers, strict=True):
            for name, position in zip(asked, answer.found, strict=True):
                if position is not None:
                    found[name] = position
                elif not lenient:
                    raise topic_not_found(name)
        return then(found)

    return Gather(calls, combine)


def start_of(start: Start, position: messages.Position) -> int:
    return position.head_seq if start.tail else start.from_seq


def described(topics: Iterable[str], cursors: Iterable[int], found: Found) -> dict[str, Any]:
    """The topics of an answer: where the watcher begins, and what there is."""
    return {
        name: {"from_seq": at, "head_seq": found[name].head_seq, "earliest_seq": found[name].earliest_seq}
        for name, at in zip(topics, cursors, strict=True)
    }
