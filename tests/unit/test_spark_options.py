"""The options of the data source: what each accepts, what contradicts what, and that a mistake is one line which names
its option."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.options import EARLIEST, LATEST, Bound, OptionError, Options, milliseconds, parse
from spark_pipeline.schemas import VIEWS, columns, ddl
from topics.errors import TopicsError


def parsed(**options: str) -> Options:
    return parse({"path": "/data", **options})


def refusal(**options: str) -> str:
    with pytest.raises(OptionError) as caught:
        parsed(**options)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- what is accepted ---


def test_defaults() -> None:
    found = parsed()
    assert found == Options(path="/data")
    assert (found.view, found.start, found.end) == ("records", Bound(EARLIEST), Bound(LATEST))
    assert found.fail_on_loss
    assert found.data
    assert (found.headers, found.deleted, found.start_given) == (False, False, False)
    assert found.wants("anything")


def test_names_in_any_case() -> None:
    found = parse({"PATH": "/d", "startingoffsets": "latest", "INCLUDEHEADERS": "TRUE", "minPartitions": " 7 "})
    assert (found.path, found.start.default, found.headers, found.min_partitions) == ("/d", LATEST, True, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", Bound(EARLIEST)),
        (" Latest ", Bound(LATEST)),
        ('{"a": 17}', Bound(EARLIEST, {"a": 17})),
        ('{"a": {"0": 17}, "b": -1, "c": -2}', Bound(EARLIEST, {"a": 17, "b": LATEST, "c": EARLIEST})),
        ('{"a": 0}', Bound(EARLIEST, {"a": 0})),
        ("{}", Bound(EARLIEST)),
    ],
)
def test_starting_offsets(text: str, expected: Bound) -> None:
    found = parsed(startingOffsets=text)
    assert found.start == expected
    assert found.start_given


def test_a_bound_is_for_each_topic_or_for_the_others() -> None:
    found = parsed(endingOffsets='{"a": 17}').end
    assert (found.of("a"), found.of("b")) == (17, LATEST)


def test_subscriptions() -> None:
    by_name = parsed(subscribe=" a, b ,")
    assert [name for name in ("a", "b", "ab", "") if by_name.wants(name)] == ["a", "b"]
    by_pattern = parsed(subscribePattern="order.*|x")
    assert [name for name in ("orders", "my-orders", "x", "xx") if by_pattern.wants(name)] == ["orders", "x"]


def test_topics_by_id() -> None:
    found = parsed(topicIds='{"a": "00000000000000a1", "b": "00000000000000b2"}', subscribe="b,c")
    assert found.ids == {"a": "00000000000000a1", "b": "00000000000000b2"}
    assert [name for name in ("a", "b", "c") if found.wants(name)] == ["b"]
    assert not parsed(topicIds="{}").wants("a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1794805542231", 1794805542231),
        ("2026-11-16T12:00:00Z", 1794830400000),
        ("2026-11-16", 1794787200000),
        ("2026-11-16T12:00:00.007+02:00", 1794823200007),
        ("2026-11-16 12:00:00", 1794830400000),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert parsed(startingTimestamp=text).start_ms == expected
    assert parsed(endingTimestamp=text).end_ms == expected


@given(ms=st.integers(0, 10**14), hours=st.integers(-14, 14), micros=st.integers(0, 999))
def test_no_millisecond_is_missed_by_one(ms: int, hours: int, micros: int) -> None:
    zone = timezone(timedelta(hours=hours))
    moment = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms, microseconds=micros)).astimezone(zone)
    assert milliseconds(moment) == ms


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": ""}, "option path is missing"),
        ({"view": "jobs"}, "option view: 'jobs' is none of records, topics"),
        ({"subscribe": " , "}, "option subscribe is empty"),
        ({"subscribe": ""}, "option subscribe is empty"),
        ({"subscribePattern": "("}, "option subscribePattern: '(' is no regular expression"),
        ({"subscribe": "a", "subscribePattern": "b"}, "options subscribe and subscribePattern contradict"),
        ({"topicIds": "orders"}, "option topicIds: 'orders' is no JSON such as"),
        ({"topicIds": '{"a": "a1"}'}, 'option topicIds: \'{"a": "a1"}\' is no JSON such as'),
        ({"topicIds": "{}", "view": "topics"}, "option topicIds is for view=records and view=leases"),
        ({"topicIds": "{}", "endingOffsets": '{"a": 1}'}, "option endingOffsets names a, which is not subscribed"),
        ({"startingOffsets": "first"}, "option startingOffsets: 'first' is neither earliest nor latest nor JSON"),
        ({"startingOffsets": "[1]"}, "option startingOffsets: '[1]' is neither"),
        ({"startingOffsets": '{"a": -3}'}, "option startingOffsets: -3 for a is no offset"),
        ({"startingOffsets": '{"a": 1.5}'}, "option startingOffsets: 1.5 for a is no offset"),
        ({"startingOffsets": '{"a": true}'}, "option startingOffsets: True for a is no offset"),
        ({"startingOffsets": '{"a": {"1": 5}}'}, "option startingOffsets: {'1': 5} for a is no offset"),
        ({"startingOffsets": '{"a": {"0": 5, "1": 5}}'}, "option startingOffsets: {'0': 5, '1': 5} for a is"),
        ({"endingOffsets": "earliest"}, "option endingOffsets: earliest is no end"),
        ({"endingOffsets": '{"a": -2}'}, "option endingOffsets: earliest is no end"),
        ({"startingOffsets": '{"b": 1}', "subscribe": "a"}, "option startingOffsets names b, which is not subscribed"),
        ({"endingOffsets": '{"b": 1}', "subscribePattern": "a"}, "option endingOffsets names b, which is not"),
        ({"startingOffsets": "earliest", "startingTimestamp": "1"}, "options startingOffsets and startingTimestamp"),
        ({"endingOffsets": "latest", "endingTimestamp": "1"}, "options endingOffsets and endingTimestamp"),
        ({"startingTimestamp": "2", "endingTimestamp": "1"}, "options startingTimestamp and endingTimestamp: the star"),
        ({"startingTimestamp": "yesterday"}, "option startingTimestamp: 'yesterday' is neither epoch milliseconds"),
        ({"endingTimestamp": "-5"}, "option endingTimestamp: '-5' is neither"),
        ({"minPartitions": "0"}, "option minPartitions: '0' is no number from 1 on"),
        ({"minPartitions": "many"}, "option minPartitions: 'many' is no number"),
        ({"maxOffsetsPerTrigger": "-1"}, "option maxOffsetsPerTrigger: '-1' is no number"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss: 'maybe' is neither true nor false"),
        ({"includeData": "0"}, "option includeData: '0' is neither"),
        ({"includeHeaders": "true", "view": "topics"}, "option includeHeaders is for view=records, not for view=top"),
        ({"includeDeleted": "true", "view": "leases"}, "option includeDeleted is for view=records, not for view=lea"),
        ({"includeData": "false", "view": "routers"}, "option includeData is for view=records"),
        ({"startingOffsets": "earliest", "view": "tombstones"}, "option startingOffsets is for view=records and vie"),
        ({"minPartitions": "2", "view": "segments"}, "option minPartitions is for view=records and view=leases"),
        ({"maxOffsetsPerTrigger": "2", "view": "tombstones"}, "option maxOffsetsPerTrigger is for view=records and"),
        ({"subscribes": "a"}, "option subscribes is unknown; did you mean subscribe?"),
        ({"kafka.bootstrap.servers": "x:9092"}, "option kafka.bootstrap.servers is unknown: the options are path"),
    ],
)
def test_mistakes_name_their_option(options: dict[str, str], said: str) -> None:
    assert refusal(**options).startswith(said)


def test_without_a_path() -> None:
    with pytest.raises(OptionError, match=r"^option path is missing: the data folder of the server"):
        parse({})


# --- columns ---


def test_the_first_columns_are_those_of_kafka() -> None:
    assert [name for name, _ in columns("records")] == ["topic", "partition", "offset", "timestamp", "key", "value"]
    assert ddl("records").startswith("`topic` string, `partition` int, `offset` bigint, `timestamp` timestamp, ")


def test_flags_add_columns() -> None:
    plain = columns("records")
    assert columns("records", headers=True) == [*plain, ("shard", "int"), ("node", "string"), ("meta", "string")]
    assert columns("records", deleted=True) == [*plain, ("deleted", "boolean")]
    assert columns("records", data=False) == [*plain[:-1], ("size", "int")]


def test_every_view_has_columns_and_no_column_twice() -> None:
    for view in VIEWS:
        names = [name for name, _ in columns(view)]
        assert names
        assert len(set(names)) == len(names)
    with pytest.raises(TopicsError, match="option view: 'jobs' is none of records"):
        columns("jobs")
