"""The data source with tasks that fail on purpose, in the process that writes, after what they have sent until then.

Options: `after`: fail when so many rows of the partition were sent; -1: when all were, before Spark hears of it.
`attempts`: so many attempts of each task fail (1 unless said). `unless`: a file; when it exists nobody fails.
`reversed`: attempts that do not fail give the rows in the opposite order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_pipeline.source import TopicsSource
from spark_pipeline.writer import TopicsStreamWriter, TopicsWriter

OURS = ("after", "attempts", "unless", "reversed")


class FailedOnPurpose(Exception):
    pass


class _Faltering:
    """Before a writer in the order of bases."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        rest = {name: value for name, value in options.items() if name not in OURS}
        super().__init__(rest, schema, overwrite)  # type: ignore[call-arg]
        self._after = int(options.get("after", -1))
        self._attempts = int(options.get("attempts", 1))
        self._unless = options.get("unless")
        self._reversed = "reversed" in options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        failing = context.attemptNumber() < self._attempts and not (self._unless and Path(self._unless).exists())
        written: WriterCommitMessage = super().write(self._passed_on(iterator, failing))  # type: ignore[misc]
        if failing:
            raise FailedOnPurpose("after the last row")
        return written

    def _passed_on(self, iterator: Iterator[pa.RecordBatch], failing: bool) -> Iterator[pa.RecordBatch]:
        if self._reversed and not failing:
            table = pa.Table.from_batches(list(iterator))
            yield from table.take(list(range(table.num_rows - 1, -1, -1))).to_batches()
            return
        left = self._after
        for batch in iterator:
            if failing and 0 <= left < batch.num_rows:
                yield batch.slice(0, left)
                raise FailedOnPurpose("between two rows")
            yield batch
            left -= batch.num_rows if left >= 0 else 0


class FalteringWriter(_Faltering, TopicsWriter):
    pass


class FalteringStreamWriter(_Faltering, TopicsStreamWriter):
    pass


class FalteringSource(TopicsSource):
    @classmethod
    def name(cls) -> str:
        return "faltering"

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        return FalteringWriter(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        return FalteringStreamWriter(dict(self.options), schema, overwrite)
