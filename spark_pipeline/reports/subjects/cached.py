"""A frame that is used several times and computed once: it reads files that may be gone a moment later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import StorageLevel
from pyspark.sql import DataFrame


@contextmanager
def kept(frame: DataFrame) -> Iterator[DataFrame]:
    found = frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield found
    finally:
        found.unpersist()
