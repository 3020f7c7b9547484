"""How long a killed server takes to serve again. Printed; the bound is generous, benchmarks are elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from crash_server import EXHAUSTIVE, Server

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 300)]

RECORDS = 1_000_000 if EXHAUSTIVE else 200_000
PER_BATCH = 500
BOUND_S = 15.0


def test_records_of_a_hundred_bytes(serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(shards=2)
    client = server.client()
    record = {"data": {"text": "x" * 89}}
    body = json.dumps({"records": [record] * PER_BATCH}).encode()
    for at in range(RECORDS // PER_BATCH):
        assert client.call("POST", f"/v0/topics/t-{at % 8}?return_seqs=false", body).ok
    heads = {f"t-{at}": client.get(f"t-{at}").body["head_seq"] for at in range(8)}
    assert sum(heads.values()) == RECORDS
    server.kill()
    started = time.monotonic()
    server = serve(shards=2)
    took = time.monotonic() - started
    recovered = [line for line in server.log().splitlines() if " recovered " in line]
    with capsys.disabled():
        print(f"\n{RECORDS} records of 100 bytes: ready after {took:.2f} s", *recovered, sep="\n  ")
    client = server.client()
    assert {name: client.get(name).body["head_seq"] for name in heads} == heads
    assert {name: client.get(name).body["count"] for name in heads} == heads
    assert took < BOUND_S
