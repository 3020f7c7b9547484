"""The options of `spark.read.format("topics")`: parsed once, wrong ones refused by name. Pure.

Names and meanings follow Spark's Kafka connector where it has them. An offset is the first seq to read; an ending
offset is the first one not to read. Spark hands over option names in any case and values as text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec

from spark_pipeline.schemas import VIEWS, columns
from topics.errors import TopicsError

EARLIEST, LATEST = -2, -1  # as numbers in JSON, Kafka's too

READING = (
    "path",
    "coldPath",
    "view",
    "subscribe",
    "subscribePattern",
    "topicIds",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "minPartitions",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
    "includeHeaders",
    "includeDeleted",
    "includeData",
)
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_FROM_LOGS = ("records", "leases")  # views that have offsets ...
_OF_LOGS = (  # ... and what is for them alone
    "topicIds",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "minPartitions",
    "maxOffsetsPerTrigger",
)
_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class OptionError(TopicsError, ValueError):
    """An option that can't be used; names it and says what it accepts."""


class Bound(msgspec.Struct, frozen=True):
    """Where to start or to end: for all topics, or for each by name."""

    default: int
    by_topic: dict[str, int] = {}

    def of(self, topic: str) -> int:
        return self.by_topic.get(topic, self.default)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    cold_path: str | None = None
    view: str = "records"
    names: frozenset[str] | None = None
    pattern: str | None = None
    ids: dict[str, str] | None = None  # topics by name; another instance of one is not meant
    start: Bound = Bound(EARLIEST)
    start_given: bool = False
    end: Bound = Bound(LATEST)
    start_ms: int | None = None
    end_ms: int | None = None
    min_partitions: int = 0
    max_per_trigger: int = 0
    fail_on_loss: bool = True
    headers: bool = False
    deleted: bool = False
    data: bool = True

    def wants(self, topic: str) -> bool:
        if self.ids is not None and topic not in self.ids:
            return False
        if self.names is not None:
            return topic in self.names
        return self.pattern is None or re.fullmatch(self.pattern, topic) is not None

    @property
    def columns(self) -> list[tuple[str, str]]:
        return columns(self.view, headers=self.headers, data=self.data, deleted=self.deleted)


def parse(given: Mapping[str, str]) -> Options:
    values = {name.lower(): value for name, value in given.items()}
    known = {name.lower(): name for name in READING}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {known[near[0]]}?" if near else f": the options are {', '.join(READING)}"
            raise OptionError(f"option {name} is unknown{hint}")
    if not values.get("path"):
        raise OptionError("option path is missing: the data folder of the server, or a snapshot of it")
    view = values.get("view", "records")
    if view not in VIEWS:
        raise OptionError(f"option view: {view!r} is none of {', '.join(VIEWS)}")
    options = Options(
        path=values["path"],
        cold_path=values.get("coldpath"),
        view=view,
        names=_names(values.get("subscribe")),
        pattern=_pattern(values.get("subscribepattern")),
        ids=_ids(values.get("topicids")),
        start=_bound("startingOffsets", values.get("startingoffsets"), EARLIEST),
        start_given="startingoffsets" in values,
        end=_bound("endingOffsets", values.get("endingoffsets"), LATEST),
        start_ms=_time("startingTimestamp", values.get("startingtimestamp")),
        end_ms=_time("endingTimestamp", values.get("endingtimestamp")),
        min_partitions=_number("minPartitions", values.get("minpartitions")),
        max_per_trigger=_number("maxOffsetsPerTrigger", values.get("maxoffsetspertrigger")),
        fail_on_loss=_truth("failOnDataLoss", values.get("failondataloss"), True),
        headers=_truth("includeHeaders", values.get("includeheaders"), False),
        deleted=_truth("includeDeleted", values.get("includedeleted"), False),
        data=_truth("includeData", values.get("includedata"), True),
    )
    _agree(options, values)
    return options


def _agree(options: Options, values: Mapping[str, str]) -> None:
    if options.names is not None and options.pattern is not None:
        raise OptionError("options subscribe and subscribePattern contradict each other: give one of them")
    if options.start_ms is not None and "startingoffsets" in values:
        raise OptionError("options startingOffsets and startingTimestamp contradict each other: give one of them")
    if options.end_ms is not None and "endingoffsets" in values:
        raise OptionError("options endingOffsets and endingTimestamp contradict each other: give one of them")
    if options.end.default == EARLIEST or EARLIEST in options.end.by_topic.values():
        raise OptionError("option endingOffsets: earliest is no end; give latest or the first offset not to read")
    if options.start_ms is not None and options.end_ms is not None and options.start_ms > options.end_ms:
        raise OptionError("options startingTimestamp and endingTimestamp: the start is after the end")
    for bounds, name in ((options.start, "startingOffsets"), (options.end, "endingOffsets")):
        for topic in bounds.by_topic:
            if not options.wants(topic):
                raise OptionError(f"option {name} names {topic}, which is not subscribed to")
    if options.view == "records":
        return
    for name in ("includeHeaders", "includeDeleted", "includeData"):
        if name.lower() in values:
            raise OptionError(f"option {name} is for view=records, not for view={options.view}")
    if options.view not in _FROM_LOGS:
        for name in _OF_LOGS:
            if name.lower() in values:
                raise OptionError(f"option {name} is for view=records and view=leases, not for view={options.view}")


def _names(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise OptionError("option subscribe is empty: name topics, with commas between them")
    return names


def _pattern(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        re.compile(text)
    except re.error as exc:
        raise OptionError(f"option subscribePattern: {text!r} is no regular expression ({exc})") from None
    return text


def _ids(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, _Id])
    except msgspec.DecodeError:
        raise OptionError(
            f'option topicIds: {text!r} is no JSON such as {{"orders": "00000000000000a1"}}, with ids of view=topics'
        ) from None


def _bound(name: str, text: str | None, default: int) -> Bound:
    if text is None:
        return Bound(default)
    word = text.strip()
    if word.lower() in _WORDS:
        return Bound(_WORDS[word.lower()])
    try:
        given = msgspec.json.decode(word, type=dict[str, Any])
    except msgspec.DecodeError:
        raise OptionError(
            f'option {name}: {text!r} is neither earliest nor latest nor JSON such as {{"orders": 17}}'
        ) from None
    return Bound(default, {topic: _offset(name, topic, value) for topic, value in given.items()})


def _offset(name: str, topic: str, value: object) -> int:
    if isinstance(value, dict) and list(value) == ["0"]:  # Kafka's form, by partition
        value = value["0"]
    if isinstance(value, bool) or not isinstance(value, int) or value < EARLIEST:
        raise OptionError(f"option {name}: {value!r} for {topic} is no offset: a seq, -1 for latest, -2 for earliest")
    return value


def _time(name: str, text: str | None) -> int | None:
    """Epoch milliseconds, or a date and time in ISO 8601 (without a zone: UTC)."""
    if text is None:
        return None
    if re.fullmatch(r"\d{1,15}", text.strip()):
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise OptionError(
            f"option {name}: {text!r} is neither epoch milliseconds nor a time such as 2026-11-16T12:00:00Z"
        ) from None
    return milliseconds(moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment)


def milliseconds(moment: datetime) -> int:
    """Since 1970, rounded down. A float of seconds would miss some milliseconds by one."""
    return (moment - _EPOCH) // _MILLISECOND


def _number(name: str, text: str | None) -> int:
    if text is None:
        return 0
    if not re.fullmatch(r"\d{1,15}", text.strip()) or int(text) < 1:
        raise OptionError(f"option {name}: {text!r} is no number from 1 on")
    return int(text)


def _truth(name: str, text: str | None, default: bool) -> bool:
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise OptionError(f"option {name}: {text!r} is neither true nor false")
    return text.strip().lower() == "true"
