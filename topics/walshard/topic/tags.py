"""The tags of records that are not in a sealed segment yet: tag -> seqs, and tags by prefix.

Sealed segments carry their own tag pages on disk (storage/segment.py), so this holds at most about a segment's worth
of records, and is built only when a topic sees its first delete by tag: appends to other topics pay nothing for it.
Entries may outlive their records; who deletes checks liveness.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator


class TagIndex:
    def __init__(self) -> None:
        self._seqs: dict[str, list[int]] = {}
        self._ordered: list[str] = []  # sorted; tags that came since the last prefix search are in _new
        self._new: list[str] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, first_seq: int, tags: Iterable[str | None]) -> None:
        seqs = self._seqs
        for seq, tag in enumerate(tags, first_seq):
            if tag is None:
                continue
            known = seqs.get(tag)
            if known is None:
                seqs[tag] = [seq]
                self._new.append(tag)
            else:
                known.append(seq)

    def equal(self, tag: str) -> list[int]:
        return self._seqs.get(tag, [])

    def with_prefix(self, prefix: str) -> list[int]:
        found: list[int] = []
        for tag in self._tags_with_prefix(prefix):
            found.extend(self._seqs[tag])
        found.sort()
        return found

    def _tags_with_prefix(self, prefix: str) -> Iterator[str]:
        if len(self._new) < 32:
            for tag in self._new:
                insort(self._ordered, tag)
        else:
            self._ordered = sorted(self._ordered + self._new)  # two runs: linear in practice
        self._new = []
        for at in range(bisect_left(self._ordered, prefix), len(self._ordered)):
            if not self._ordered[at].startswith(prefix):
                return
            yield self._ordered[at]
