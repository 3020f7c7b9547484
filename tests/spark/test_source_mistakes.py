"""Wrong options and damaged folders: one line that names the option, or the file and the offset, and no stack of Java
or Python beside it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.server import Server
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_pipeline.source import register
from topics.errors import TopicsError
from topics.storage.manifest import MANIFEST_NAME
from topics.storage.segment import decode_segment_header, scan_blocks

from .sourceplay import flushed, frame, rows
from .sourceworld import PAD, SMALL_SEGMENTS

pytestmark = pytest.mark.timeout(400)  # the first query of a session takes long on a busy machine

STACK = re.compile(r"^\s+at [\w.$]+\(|Traceback|^  File |Caused by", re.M)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with segments, stopped in order."""
    folder = tmp_path_factory.mktemp("mistakes")
    server = Server(folder / "data", log=folder / "server.log", **SMALL_SEGMENTS)
    try:
        server.wait_ready()
        with server.client() as api:
            for batch in range(20):
                api.append("t", *({"n": batch * 10 + n, "pad": PAD} for n in range(10)))
            api.append("u", 1, 2, 3)
            flushed(api, server.data_dir, "t", segments=2)
        assert server.stop() == 0
    finally:
        server.close()
    return folder / "data"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(whole, tmp_path / "data"))


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


def complaint(read: Callable[[], object]) -> str:
    """The line of ours in what Spark raises."""
    with pytest.raises(PySparkException) as caught:
        read()
    text = str(caught.value)
    assert not STACK.search(text), text
    (line,) = [line for line in text.splitlines() if re.search(r"(spark_pipeline|topics)\.\w+\.?\w*: ", line)]
    return line.partition("Error: ")[2] or line.partition("DataLoss: ")[2] or line.partition("CorruptData: ")[2]


def refusal(data_dir: Path, **options: str) -> str:
    with pytest.raises(TopicsError) as caught:
        rows(data_dir, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- options, at each step where they are looked at ---


def test_when_the_query_is_made(session: SparkSession, whole: Path) -> None:
    assert complaint(lambda: frame(session, whole, startingOffset="latest")).startswith(
        "option startingoffset is unknown; did you mean startingOffsets?"
    )
    assert complaint(lambda: frame(session, whole, view="jobs")).startswith("option view: 'jobs' is none of records, ")
    assert complaint(lambda: session.read.format("topics").load()).startswith("option path is missing: the data folder")
    assert complaint(lambda: session.readStream.format("topics").option("includeData", "no").load("/x")).startswith(
        "option includeData: 'no' is neither true nor false"
    )


def test_when_it_is_planned(session: SparkSession, whole: Path) -> None:
    assert complaint(lambda: frame(session, whole, maxOffsetsPerTrigger="5").count()).startswith(
        "option maxOffsetsPerTrigger is for streams (spark.readStream), not for spark.read"
    )
    assert complaint(lambda: frame(session, whole, subscribe="t,nope,never").count()).startswith(
        f"option subscribe: there is no topic never, nope in {whole}"
    )
    assert complaint(lambda: frame(session, whole, schema="topic string, size int").count()).startswith(
        "view records has no column size: it has topic, partition, offset, timestamp, key, value"
    )
    assert complaint(lambda: frame(session, whole, schema="value string").count()).startswith(
        "column value of view records is binary, not string"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"view": "routers"}, "option view: routers can't be streamed; records, leases and tombstones can"),
        ({"endingOffsets": '{"t": 5}'}, "a stream has no end: leave out endingOffsets and endingTimestamp"),
        ({"subscribe": "nope"}, "option subscribe: there is no topic nope in "),
    ],
)
def test_when_a_stream_starts(
    session: SparkSession, whole: Path, tmp_path: Path, options: dict[str, str], said: str
) -> None:
    def run() -> None:
        df = session.readStream.format("topics").options(**options).load(str(whole))
        query = df.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    assert complaint(run).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "nope"}, "option subscribe: there is no topic nope in"),
        ({"startingOffsets": '{"tt": 5}'}, "option startingOffsets: there is no topic tt in"),
        ({"endingOffsets": '{"t": 5, "tt": 5}'}, "option endingOffsets: there is no topic tt in"),
        ({"view": "leases", "subscribe": "nope"}, "option subscribe: there is no topic nope in"),
        ({"view": "topics", "subscribe": "nope"}, "option subscribe: there is no topic nope in"),
    ],
)
def test_topics_that_are_not_there(whole: Path, options: dict[str, str], said: str) -> None:
    assert refusal(whole, **options).startswith(said)


def test_offsets_of_a_topic_that_is_gone_are_passed_over_by_who_minds_no_loss(whole: Path) -> None:
    options = {"startingOffsets": '{"gone": 5, "t": 191}', "endingOffsets": '{"gone": 7}', "failOnDataLoss": "false"}
    with (
        pytest.warns(UserWarning, match="option startingOffsets: there is no topic gone in "),
        pytest.warns(UserWarning, match="option endingOffsets: there is no topic gone in "),
    ):
        found = rows(whole, **options)
    assert {row["topic"]: row["offset"] for row in found} == {"t": 200, "u": 3}
    with pytest.raises(TopicsError, match="option subscribe: there is no topic gone"):
        rows(whole, subscribe="gone,t", **options)


def test_a_topic_without_leases_has_none(whole: Path) -> None:
    assert rows(whole, view="leases", subscribe="t") == []


# --- folders ---


def test_no_folder_and_no_data_folder(session: SparkSession, tmp_path: Path) -> None:
    missing = tmp_path / "nope"
    assert complaint(lambda: frame(session, missing).count()).startswith(
        f"{missing}: does not exist or is no folder of topics (topics.json is missing): name the folder that the server"
    )
    assert refusal(tmp_path).startswith(f"{tmp_path}: is no data folder of topics (topics.json is missing)")
    file = tmp_path / "file"
    file.write_text("x")
    assert refusal(file).startswith(f"{file}: does not exist or is no folder of topics")


def test_a_newer_format(session: SparkSession, copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    (copy / MANIFEST_NAME).write_text(json.dumps({**manifest, "format": 99}))
    said = complaint(lambda: frame(session, copy).count())
    assert re.search(rf"{MANIFEST_NAME}: written in format 99, this program reads up to 1: use the newer", said), said


def test_a_manifest_that_is_none(copy: Path) -> None:
    (copy / MANIFEST_NAME).write_text("{")
    assert MANIFEST_NAME in refusal(copy)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def _second_block(data_dir: Path) -> tuple[str, int]:
    """(file, offset) of a block of t that is not the first of the topic."""
    path = sorted((data_dir / "topics").rglob("*.data"))[1]
    data = path.read_bytes()
    salt = decode_segment_header(data, path="").salt
    entry, _ = next(iter(scan_blocks(data, salt=salt, path="")))
    return str(path.relative_to(data_dir)), entry.offset


def test_a_damaged_block_is_found_by_its_task(session: SparkSession, copy: Path) -> None:
    file, offset = _second_block(copy)
    _flip(copy / file, offset + 500)
    expected = f"{file}: checksum of the batch at offset {offset} fails"
    assert refusal(copy) == expected
    assert complaint(lambda: frame(session, copy).count()) == expected
    # What does not read the block does not mind.
    assert [row["offset"] for row in rows(copy, subscribe="u")] == [1, 2, 3]
    assert len(rows(copy, startingOffsets='{"t": 1}', endingOffsets='{"t": 11}', subscribe="t")) == 10


def test_a_truncated_segment(copy: Path) -> None:
    file, offset = _second_block(copy)
    with (copy / file).open("r+b") as target:
        target.truncate(offset + 300)
    assert refusal(copy).startswith(f"{file}: ")


def test_a_missing_segment(session: SparkSession, copy: Path) -> None:
    file, _ = _second_block(copy)
    (copy / file).unlink()
    assert Path(file).name in complaint(lambda: frame(session, copy).count())


def test_a_damaged_snapshot(copy: Path) -> None:
    path = next(path for path in sorted((copy / "wal").rglob("*.snap")) if path.stat().st_size > 200)
    _flip(path, 100)
    assert str(path.relative_to(copy)) in refusal(copy)
