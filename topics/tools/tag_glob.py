"""One tag, or all that begin so."""

from __future__ import annotations


class TagGlob:
    """A tag, or with a * at its end all tags that begin so: what a delete takes."""

    def __init__(self, text: str) -> None:
        self._prefix = text.removesuffix("*")
        self._exact = self._prefix == text
        if not self._prefix and self._exact:
            raise ValueError("is empty")
        if "*" in self._prefix:
            raise ValueError("may have one *, at its end")

    def matches(self, tag: str | None) -> bool:
        if tag is None:
            return False
        return tag == self._prefix if self._exact else tag.startswith(self._prefix)
