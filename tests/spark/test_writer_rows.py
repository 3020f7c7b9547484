"""Options, columns and rows: what a write is planned as, and what its rows become. Nothing is written here."""

from __future__ import annotations

import datetime
import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from spark_pipeline.delivery import Record
from spark_pipeline.outbound import BadRow, Shape, records_of
from spark_pipeline.writer import Plan, TopicsStreamWriter, TopicsWriter, plan_of, stream_write
from topics.errors import TopicsError

pytestmark = pytest.mark.gate

pytestmark = pytest.mark.usefixtures("spark")  # it reads the DDL


def schema_of(ddl: str) -> StructType:
    return StructType.fromDDL(ddl)


def plan(ddl: str = "value string", *, overwrite: bool = False, **options: Any) -> Plan:
    return plan_of({"topic": "t", **options}, schema_of(ddl), overwrite)


def refusal(ddl: str = "value string", *, overwrite: bool = False, **options: Any) -> str:
    with pytest.raises(TopicsError) as caught:
        plan(ddl, overwrite=overwrite, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- options ---


def test_defaults() -> None:
    made = plan()
    assert str(made.target) == "http://127.0.0.1:4000"
    assert (made.batch_records, made.batch_bytes, made.shape.topic, made.shape.value_format) == (
        1_000,
        1 << 20,
        "t",
        "json",
    )
    assert made.prefix is made.target.api_key is None


def test_options_are_found_however_they_are_spelt() -> None:
    made = plan(BATCHRECORDS="7", timeoutms="1500", Retries="0", URL="box:4001/below/")
    assert (made.batch_records, made.target.timeout_s, made.target.retries) == (7, 1.5, 0)
    assert str(made.target) == "http://box:4001/below"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("batchRecords", "0"),
        ("batchRecords", "10001"),
        ("batchRecords", "many"),
        ("batchRecords", "-1"),
        ("batchRecords", "1.5"),
        ("batchBytes", "0"),
        ("timeoutMs", "0"),
        ("retries", "1001"),
        ("retries", ""),
    ],
)
def test_numbers_out_of_range_name_their_option(name: str, text: str) -> None:
    option: dict[str, Any] = {name: text}
    assert refusal(**option).startswith(f"option {name}: {text!r} is no whole number from")


@pytest.mark.parametrize("url", ["ftp://box", "http://", "http://box:99999", "http://box/?a=1", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    assert refusal(url=url).startswith(f"option url: {url!r} is no address of a server")


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    assert "hunter2" not in refusal(url="http://me:hunter2@box")


def test_an_ipv6_address_is_shown_as_one() -> None:
    assert str(plan(url="https://[::1]").target) == "https://[::1]:443"


@pytest.mark.parametrize(
    ("ddl", "options", "said"),
    [
        ("value string", {"topic": ""}, "option topic: is empty"),
        ("value string", {"batchRecord": "5"}, "option batchrecord is unknown; did you mean batchRecords?"),
        ("value string", {"subscribe": "x"}, "option subscribe is unknown: the options are url, topic, apiKey"),
        ("value string", {"path": "/x"}, "option path: records are written over HTTP"),
        ("value string", {"valueFormat": "xml"}, "option valueFormat: 'xml' is none of json, text, base64"),
        ("a int", {"valueFormat": "text"}, "option valueFormat: is for a column value"),
        ("value string, extra int", {}, "column extra: would not be written"),
        ("value string, deleted boolean", {}, "column deleted: would not be written"),
        ("value struct<a:int>", {}, "column value: is of type struct<a:int>; it must be string or binary. Use to_json"),
        ("value string, key int", {}, "column key: is of type int; it must be string or binary"),
        ("a int, node bigint", {}, "column node: is of type bigint"),
        ("a int, meta struct<a:int>", {}, "column meta: is of type struct<a:int>"),
        ("a int, meta map<string,int>", {}, "column meta: is of type map<string,int>"),
        ("key string, topic string", {}, "there is no column to write"),
        ("a int, a string", {}, "column a: is there twice"),
        ("a interval year to month", {}, "column a: interval year to month does not become JSON here"),
        ("a struct<b:array<interval day>>", {}, "column a.b: interval day does not become JSON"),
        ("a variant", {}, "column a: variant does not become JSON"),
        ("a map<date,int>", {}, "column a: keys of a map must be strings or whole numbers"),
        ("value string", {"idempotencyPrefix": ""}, "option idempotencyPrefix: it has 1 to 128"),
        ("value string", {"idempotencyPrefix": "x" * 129}, "option idempotencyPrefix: it has 1 to 128"),
        ("value string", {"idempotencyPrefix": "a\nb"}, "option idempotencyPrefix: it has 1 to 128"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(ddl: str, options: dict[str, Any], said: str) -> None:
    assert refusal(ddl, **options).startswith(said)


def test_without_a_topic() -> None:
    with pytest.raises(TopicsError, match=r"^option topic: is missing, and there is no column topic"):
        plan_of({}, schema_of("value string"), False)
    assert plan_of({}, schema_of("value string, topic string"), False).shape.topic is None


def test_what_spark_adds_to_the_options_of_a_stream_is_passed_over() -> None:
    assert plan(checkpointLocation="/x", queryName="q") == plan()


def test_overwriting_is_refused() -> None:
    assert refusal(overwrite=True).startswith('topics are append only: write with mode("append")')


def test_what_was_read_can_be_written() -> None:
    made = plan(
        "topic string, partition int, offset bigint, timestamp timestamp, key string, value binary, shard int, "
        "node string, meta string"
    )
    assert made.shape.value_format == "json"


def test_without_a_value_a_timestamp_is_data() -> None:
    made = plan("id int, timestamp timestamp, key string, partition int")
    assert (made.shape.value_format, made.shape.columns) == (None, ("id", "timestamp", "partition"))


# --- keys ---


def test_a_key_comes_from_a_file_from_an_option_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOPICS_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert plan(apiKeyFile=str(file)).target.api_key == "from-file"
    assert plan(apiKey="from-option").target.api_key == "from-option"
    monkeypatch.setenv("TOPICS_API_KEY", "from-environment")
    assert plan().target.api_key == "from-environment"
    assert plan(apiKeyFile=str(file)).target.api_key == "from-file"


def test_a_key_is_not_shown(tmp_path: Path) -> None:
    made = plan(apiKey="s3cret")
    assert "s3cret" not in repr(made)
    assert "s3cret" not in f"{made.target} {made.target!r}"
    assert "s3cret" not in refusal(apiKey="s3cret", apiKeyFile="x")
    assert "s3cret" not in refusal(apiKey="s3cret with a blank")
    file = tmp_path / "key"
    file.write_text("s3cret\nsecond line")
    assert "s3cret" not in refusal(apiKeyFile=str(file))


def test_key_files_that_are_none(tmp_path: Path) -> None:
    missing = str(tmp_path / "nope")
    assert refusal(apiKeyFile=missing) == f"option apiKeyFile: {missing}: no such file or directory"
    empty = tmp_path / "empty"
    empty.write_text("\n")
    assert refusal(apiKeyFile=str(empty)).endswith("a key is one word of printable ASCII")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    assert refusal(apiKeyFile=str(binary)).endswith("is no text")


# --- who writes ---


def test_a_writer_is_the_same_after_its_journey() -> None:
    for kind in (TopicsWriter, TopicsStreamWriter):
        writer = kind({"topic": "t", "apiKey": "k"}, schema_of("a int"), False)
        assert vars(pickle.loads(pickle.dumps(writer))) == vars(writer)


def test_two_writes_are_two() -> None:
    first, second = (TopicsWriter({"topic": "t"}, schema_of("a int"), False) for _ in range(2))
    assert vars(first) != vars(second)


def test_a_micro_batch_is_known_by_its_query_and_number() -> None:
    assert stream_write("q", "7", drawn="d") == "q/7"
    assert stream_write(None, "7", drawn="d") == stream_write("q", None, drawn="d") == "d"


# --- rows ---


VALUES = Shape(topic="t", value_format="json")


def objects(*columns: str) -> Shape:
    return Shape(topic="t", value_format=None, columns=columns)


def made_of(rows: pa.RecordBatch, ddl: str, **options: Any) -> list[tuple[str, Record]]:
    return list(records_of(plan(ddl, **options).shape, rows))


def data_of(values: list[Any], kind: pa.DataType, **options: str) -> list[bytes]:
    rows = pa.record_batch({"value": pa.array(values, kind)})
    return [bytes(record.data) for _, record in made_of(rows, "value binary", **options)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_json_is_spelt_as_it_came(kind: pa.DataType) -> None:
    texts = ['{"b": 1.50, "a":1e2}', '"é"', "null", "[ ]", " 1 "]
    values = texts if "string" in str(kind) else [text.encode() for text in texts]
    assert data_of([*values, None], kind) == [*(text.strip().encode() for text in texts), b"null"]


def test_text_and_base64() -> None:
    assert data_of(['say "é"', None, ""], pa.string(), valueFormat="text") == ['"say \\"é\\""'.encode(), b"null", b'""']
    assert data_of([b"\x00\xff", None, b""], pa.binary(), valueFormat="BASE64") == [b'"AP8="', b"null", b'""']


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        (b"{", {}, "column value: is not JSON: it ends too early. Option valueFormat"),
        (b"", {}, "column value: is not JSON: it ends too early"),
        (b"{} x", {}, "column value: is not JSON: trailing characters (byte 4)"),
        (b"hello", {}, "column value: is not JSON: invalid character (byte 0)"),
        (b'"\xff"', {}, "column value: is not UTF-8 (byte 2)"),
        (b"[" * 5_000, {}, "column value: is nested too deeply"),
        (b"a\xff", {"valueFormat": "text"}, "column value: is not UTF-8 (byte 2)"),
    ],
)
def test_values_that_are_not_what_they_should_be(value: bytes, options: dict[str, str], said: str) -> None:
    with pytest.raises(BadRow) as caught:
        data_of([value], pa.binary(), **options)
    assert str(caught.value).startswith(said)


def test_a_bad_row_comes_after_the_good_ones_before_it() -> None:
    rows = pa.record_batch({"value": pa.array([b"1", b"2", b"x", b"4"])})
    records = records_of(VALUES, rows)
    assert [bytes(next(records)[1].data) for _ in range(2)] == [b"1", b"2"]
    with pytest.raises(BadRow):
        next(records)


def test_side_columns() -> None:
    rows = pa.record_batch(
        {
            "value": pa.array(["1", "2"]),
            "topic": pa.array(["a", "b"]),
            "key": pa.array([b"k\xc3\xa9", None], pa.binary()),
            "node": pa.array([None, "n"]),
            "meta": pa.array(['{"x": 1}', None]),
            "offset": pa.array([5, 6]),
        }
    )
    ddl = "value string, topic string, key binary, node string, meta string, offset bigint"
    (name, first), (_, second) = made_of(rows, ddl)
    assert name == "t"  # the option wins, as with Kafka's connector
    assert (first.tag, first.node, bytes(first.meta or b"")) == ("ké", None, b'{"x": 1}')
    assert (second.tag, second.node, second.meta) == (None, "n", None)
    assert [name for name, _ in records_of(Shape(topic=None, value_format="json"), rows)] == ["a", "b"]


def test_meta_may_be_a_map() -> None:
    kind = pa.map_(pa.string(), pa.string())
    rows = pa.record_batch({"value": pa.array(["1", "2"]), "meta": pa.array([[("a", "1"), ("b", None)], None], kind)})
    (_, first), (_, second) = made_of(rows, "value string, meta map<string,string>")
    assert json.loads(bytes(first.meta or b"")) == {"a": "1", "b": None}
    assert second.meta is None


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("meta", ["[1]"], "column meta: is no JSON object"),
        ("meta", ["{"], "column meta: is not JSON: it ends too early"),
        ("key", [b"\xff"], "column key: is not UTF-8 (byte 1)"),
        ("topic", [None], "column topic: is null or empty"),
        ("topic", [""], "column topic: is null or empty"),
    ],
)
def test_side_columns_that_are_not_what_they_should_be(name: str, values: list[Any], said: str) -> None:
    rows = pa.record_batch({"value": pa.array(["1"]), name: pa.array(values)})
    with pytest.raises(BadRow) as caught:
        list(records_of(Shape(topic=None if name == "topic" else "t", value_format="json"), rows))
    assert str(caught.value).startswith(said)


def test_objects_need_no_tables_of_time_zones() -> None:
    """A zone that no table knows: it is never looked up."""
    moment = datetime.datetime(2024, 2, 29, 23, 30, 0, 5)
    zone = pa.timestamp("us", "Nowhere/Nothing")
    inner = pa.struct([("list", pa.list_(zone)), ("map", pa.map_(pa.string(), zone))])
    micros = int(moment.replace(tzinfo=datetime.UTC).timestamp() * 1_000_000)
    flat = pa.array([micros], pa.int64()).cast(pa.timestamp("us")).cast(zone)
    nested = pa.StructArray.from_arrays(
        [
            pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), flat, type=inner[0].type),
            pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["k"]), flat, type=inner[1].type),
        ],
        fields=list(inner),
    )
    rows = pa.record_batch({"at": flat, "deep": nested})
    ((_, record),) = records_of(objects("at", "deep"), rows)
    said = "2024-02-29T23:30:00.000005Z"
    assert json.loads(bytes(record.data)) == {"at": said, "deep": {"list": [said], "map": {"k": said}}}


def test_floats_and_decimals_keep_their_digits() -> None:
    rows = pa.record_batch(
        {
            "f": pa.array([0.1, 3.4028235e38, 1.17549435e-38, 16777216.0, float("nan"), -float("inf")], pa.float32()),
            "d": pa.array([0.1, 1e300, -0.0, 1 / 3, float("inf"), None]),
            "n": pa.array([Decimal("1.50"), Decimal("-0.05"), None, None, None, None], pa.decimal128(38, 2)),
        }
    )
    found = [bytes(record.data) for _, record in records_of(objects("f", "d", "n"), rows)]
    assert found[0] == b'{"f":0.1,"d":0.1,"n":1.50}'
    assert [json.loads(raw).get("f") for raw in found] == [
        0.1,
        3.4028235e38,
        1.1754944e-38,
        16777216.0,
        "NaN",
        "-Infinity",
    ]
    assert [json.loads(raw).get("d") for raw in found] == [0.1, 1e300, -0.0, 1 / 3, "Infinity", None]
    assert found[1].endswith(b'"n":-0.05}')
