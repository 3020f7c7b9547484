"""The Parquet of a run, below its output folder.

    OUT/parquet/<report>/<table>/date=.../part-N.parquet          saved tables, for whoever wants to read them
    OUT/history/<report>/<table>/run=<id>/date=.../*.parquet      accumulated tables; the ledger says which runs count
    OUT/staging/                                                  what a run has not published yet

Spark writes below staging/ alone. Publishing is renaming: a folder of history at once, a saved table date by date, file
over file. Dates that a saved table does not have this time stay as earlier runs left them. Whatever lies in staging/ or
is named by no ledger belongs to a run that died, and is removed by the next.

Executors write here, so on a cluster the folder must be the same on all machines, as the data folder must. A column of
an accumulated table may come or go; one that changes its type wants another table name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from topics.errors import TopicsError

from .ledger import Ledger, LedgerError

COMPACT_AT = 60  # runs; then they are written as one


class NotShared(TopicsError):
    """What executors wrote is not where the driver looks."""


class Shelf:
    def __init__(self, out: Path, run: str) -> None:
        self.out = out
        self.run = run
        self._staging = out / "staging"
        self._history = out / "history"
        self._parquet = out / "parquet"

    def sweep(self, ledger: Ledger | None) -> None:
        """Remove what no ledger names, and make sure that what counts is there."""
        counted = {} if ledger is None else ledger.reports
        for folder in self._history.glob("*/*/run=*"):
            report, table = folder.parent.parent.name, folder.parent.name
            known = counted[report].tables.get(table, []) if report in counted else []
            if folder.name.removeprefix("run=") not in known:
                shutil.rmtree(folder, ignore_errors=True)
        for report, state in counted.items():
            for table, runs in state.tables.items():
                for run in runs:
                    if not self._counted(report, table, run).is_dir():
                        raise LedgerError(
                            f"{self._counted(report, table, run)} is gone, and what it counted with it: "
                            "restore it, or start over with --fresh"
                        )

    # --- pinned views ---

    def pin(self, name: str, frame: DataFrame) -> DataFrame:
        """A frame as it is now, however often it is read."""
        path = self._staging / "pinned" / name
        _write(frame, path)
        return _read(frame.sparkSession, path, frame.schema)

    # --- accumulated tables ---

    def accumulate(
        self, report: str, table: str, partial: DataFrame, *, runs: list[str]
    ) -> tuple[DataFrame, list[str]]:
        """Stage this run's share. Returns that of all runs, and the runs that count once it is published."""
        spark = partial.sparkSession
        schema = partial.schema
        path = self._staged("history", report, table)
        if len(runs) >= COMPACT_AT:
            whole = self._earlier(spark, report, table, runs, schema).unionByName(partial)
            _write(whole, path, by_date=True)
            return _read(spark, path, schema), [self.run]
        _write(partial, path, by_date=True)
        mine = _read(spark, path, schema)
        if not runs:
            return mine, [self.run]
        return self._earlier(spark, report, table, runs, schema).unionByName(mine), [*runs, self.run]

    def _earlier(self, spark: SparkSession, report: str, table: str, runs: list[str], schema: StructType) -> DataFrame:
        folders = [str(self._counted(report, table, run)) for run in runs]
        base = str(self._history / report / table)
        found = spark.read.schema(schema).option("basePath", base).parquet(*folders)
        return found.select(*schema.names)

    def _counted(self, report: str, table: str, run: str) -> Path:
        return self._history / report / table / f"run={run}"

    # --- saved tables ---

    def save(self, report: str, table: str, frame: DataFrame) -> None:
        _write(frame, self._staged("parquet", report, table), by_date=True)

    # --- publishing ---

    def publish(self, report: str) -> None:
        """Put a report's staged tables into their places. Folders of history count only once the ledger names them."""
        for staged in self._tables("history", report):
            place = self._counted(report, staged.name, self.run)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.rename(staged, place)
        for staged in self._tables("parquet", report):
            for dated in staged.glob("date=*"):
                _replace(dated, self._parquet / report / staged.name / dated.name)

    def discard(self, report: str) -> None:
        """Of a report that failed."""
        for kind in ("history", "parquet"):
            shutil.rmtree(self._staging / kind / report, ignore_errors=True)

    def empty(self) -> None:
        """Saved tables of another folder must not stay beside those of this one."""
        shutil.rmtree(self._parquet, ignore_errors=True)

    def clear(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self._staging, ignore_errors=True)

    def _staged(self, kind: str, report: str, table: str) -> Path:
        return self._staging / kind / report / table

    def _tables(self, kind: str, report: str) -> list[Path]:
        folder = self._staging / kind / report
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _write(frame: DataFrame, path: Path, *, by_date: bool = False) -> None:
    """One file for each date. A table that was staged before is replaced: the last word counts."""
    rows = Observation()
    writer = frame.repartition(F.col("date")) if by_date else frame
    written = writer.observe(rows, F.count(F.lit(1)).alias("rows")).write.mode("overwrite")
    (written.partitionBy("date") if by_date else written).parquet(str(path))
    if rows.get["rows"] and not any(path.rglob("*.parquet")):
        # Executors that have a folder of their own under that name write into it, and nothing says so.
        raise NotShared(f"{path} is empty after it was written: --out must be one folder for driver and executors")


def _read(spark: SparkSession, path: Path, schema: StructType) -> DataFrame:
    return spark.read.schema(schema).parquet(str(path)).select(*schema.names)


def _replace(dated: Path, place: Path) -> None:
    """The files of one date: each takes the place of the one of its number."""
    place.mkdir(parents=True, exist_ok=True)
    fresh = [f"part-{number}.parquet" for number, _ in enumerate(sorted(dated.glob("*.parquet")))]
    for name, file in zip(fresh, sorted(dated.glob("*.parquet")), strict=True):
        os.replace(file, place / name)
    for file in place.glob("*.parquet"):
        if file.name not in fresh:
            file.unlink()
