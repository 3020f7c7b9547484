"""Answers that are large are compressed in slices; a gateway that is replaced gives them out before it leaves."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from .h2wire import H2Wire
from .server import Server, run_topics

pytestmark = pytest.mark.e2e

RECORDS, RECORD = 8, 1_000_000
BODY = b'{"max_batch_bytes":8388608}'
AT_ONCE = 4
WINDOW = 16 * 1024 * 1024


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reload")
    server = Server(folder / "data", log=folder / "log", TOPICS_WAL_SHARDS=1)
    with closing(server):
        server.wait_ready()
        with server.client() as client:
            for _ in range(RECORDS):
                assert client.append("large", "x" * RECORD).error is None
        yield server
        assert "Traceback" not in server.output()


def ask(wire: H2Wire) -> int:
    head = (("content-type", "application/json"), ("accept-encoding", "gzip"))
    stream = wire.open("POST", "/v0/topics/large/diff", *head)
    wire.send(stream, BODY, end=True)
    return stream


def test_streams_that_were_begun_get_their_large_answers(server: Server) -> None:
    """What is begun after the gateway has begun to leave is for another connection."""
    with H2Wire(server.port, window=WINDOW) as wire, ThreadPoolExecutor() as pool:
        reload = pool.submit(run_topics, "reload", "--only", "gateway", "--data-dir", str(server.data_dir))
        asked: list[int] = []
        while not wire.goodbye:
            while sum([not wire.streams[stream].ended for stream in asked]) < AT_ONCE and not reload.done():
                asked.append(ask(wire))
            wire.receive()
        assert wire.last_stream is not None
        served = [wire.finish(stream) for stream in asked if stream <= wire.last_stream]
        done = reload.result()
    assert done.returncode == 0, done.stderr
    assert len(served) > AT_ONCE
    for stream in served:
        assert stream.headers[":status"] == "200"
        assert len(json.loads(gzip.decompress(stream.body))["records"]) == RECORDS
