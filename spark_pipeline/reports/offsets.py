"""What a run sees of the folder: every topic's head at its beginning, and nothing behind it.

The view `topics` is read once and stored; its heads are the ends of every later read, so that all reports of a run
count the same records while the server goes on writing. A topic that is made after that is not seen, also under the
name of one that was there; one that is deleted is missing. The other small views are stored when they are first asked
for.

A folder that can't be read as a whole has no pins: whoever asks for a view is told why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

import msgspec
from pyspark.sql import DataFrame, SparkSession

from spark_pipeline.source import FORMAT
from topics.errors import TopicsError
from topics.storage.leases import SUFFIX, is_log_name

from .ledger import View
from .parquet_store import Shelf

_LOGS = ("records", "leases")  # views with offsets
_EARLIEST = -2


class Pin(msgspec.Struct, frozen=True):
    """A topic, or the leases log of a queue, as far as a run reads it."""

    id: str
    end: int  # the first seq not to read


class Pins:
    def __init__(self, spark: SparkSession, folder: str, shelf: Shelf) -> None:
        self._spark = spark
        self._folder = folder
        self._shelf = shelf
        self._stored: dict[tuple[str, tuple[tuple[str, str], ...]], DataFrame] = {}
        self.of: dict[View, dict[str, Pin]] = {"records": {}, "leases": {}}
        for row in self.view("topics").select("topic", "id", "disk_seq").collect():
            pin = Pin(row["id"], row["disk_seq"] + 1)
            if is_log_name(row["topic"]):
                self.of["leases"][row["topic"].removesuffix(SUFFIX)] = pin
            else:
                self.of["records"][row["topic"]] = pin

    @property
    def ids(self) -> set[str]:
        return {pin.id for pins in self.of.values() for pin in pins.values()}

    def view(self, name: str, **options: str) -> DataFrame:
        if name in _LOGS:
            return self._read(cast(View, name), options, starts=None)
        key = (name, tuple(sorted(options.items())))
        if key not in self._stored:
            frame = self._spark.read.format(FORMAT).options(path=self._folder, view=name, **options).load()
            self._stored[key] = self._shelf.pin(f"{name}-{len(self._stored)}", frame)
        return self._stored[key]

    def since(self, view: View, marks: Mapping[str, int], **options: str) -> DataFrame:
        """What is behind the marks; topics without one from their beginning."""
        for name in ("subscribe", "subscribePattern", "startingOffsets", "endingOffsets"):
            if name in options:
                raise ValueError(
                    f"fresh() reads every topic from its mark to its pin: option {name} would skip records"
                )
        starts = {
            # A mark behind the pin is that of a later look than this one, which is over an older snapshot.
            name: min(marks.get(pin.id, _EARLIEST), pin.end)
            for name, pin in self.of[view].items()
        }
        return self._read(view, options, starts=starts)

    def _read(self, view: View, options: dict[str, str], *, starts: dict[str, int] | None) -> DataFrame:
        pins = {name: pin for name, pin in self.of[view].items() if _subscribed(name, options)}
        bounds = {
            # Topics that came after the pins would be read, and read again by the next run; also under an old name.
            "topicIds": _json({name: pin.id for name, pin in pins.items()}),
            "endingOffsets": _json({name: pin.end for name, pin in pins.items()}),
        }
        if starts is not None:
            bounds["startingOffsets"] = _json(starts)
        # What caps and TTL took between two runs is reported as loss; it must not fail the report.
        whole = {"path": self._folder, "view": view, "failOnDataLoss": "false", **bounds, **options}
        return self._spark.read.format(FORMAT).options(**whole).load()


class NoPins(Pins):
    """Of a damaged folder. ids: those of the last run, which this one adds nothing to."""

    def __init__(self, why: str, *, ids: Iterable[str]) -> None:
        self._why = why
        self._ids = set(ids)
        self.of = {"records": {}, "leases": {}}

    @property
    def ids(self) -> set[str]:
        return self._ids

    def view(self, name: str, **options: str) -> DataFrame:
        raise TopicsError(self._why)

    def since(self, view: View, marks: Mapping[str, int], **options: str) -> DataFrame:
        raise TopicsError(self._why)


def _subscribed(name: str, options: Mapping[str, str]) -> bool:
    if "subscribe" in options:
        return name in [one.strip() for one in options["subscribe"].split(",")]
    return "subscribePattern" not in options or re.fullmatch(options["subscribePattern"], name) is not None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
