"""`topics topic`: what it shows is what the server shows; `rm` removes by the server."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .client import unique
from .inspected import golden
from .server import TOPICS, Server, clean_environment, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp())


def topic(folder: Path, *args: str) -> Any:
    done = run_topics("topic", *args, "--json", "--data-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_of_a_stopped_server(whole: Path) -> None:
    found = {line["topic"]: line for line in topic(whole, "ls")}
    assert set(found) == {"jobs", "capped", "orders", "late"}
    assert (found["capped"]["count"], found["capped"]["head_seq"], found["capped"]["earliest_seq"]) == (25, 200, 176)
    assert found["jobs"]["type"] == "queue"
    assert found["orders"]["count"] == 200 - len([n for n in range(200) if n % 7 == 3])
    assert [line["topic"] for line in topic(whole, "ls", "--prefix", "or")] == ["orders"]
    assert "jobs#leases" in [line["topic"] for line in topic(whole, "ls", "--internal")]
    shown = topic(whole, "show", "orders")
    assert shown["line"] == found["orders"]
    assert shown["deleted_total"] == len([n for n in range(200) if n % 7 == 3])
    assert shown == topic(whole, "show", found["orders"]["id"])
    assert topic(whole, "show", "capped")["evicted_total"] == 175
    text = run_topics("topic", "show", "capped", "--data-dir", str(whole)).stdout
    assert '"cap_records":25' in text
    assert "25 live records" in text
    assert "orders" in run_topics("topic", "ls", "--data-dir", str(whole), COLUMNS=160).stdout


@pytest.mark.gate
def test_of_a_running_server(server: Server) -> None:
    name = unique("shown")
    with server.client() as api:
        api.append(name, *range(7))
        api.delete(name, before_seq=3)
        state = api.state(name)
    (line,) = topic(server.data_dir, "ls", "--prefix", name)
    for field in ("count", "bytes", "head_seq", "earliest_seq"):
        assert line[field] == state[field]


def test_rm(server: Server) -> None:
    name = unique("removed")
    with server.client() as api:
        api.append(name, 1)
        done = run_topics("topic", "rm", name, "--yes", "--if-empty", TOPICS_URL=server.url)
        assert done.returncode == 1
        assert "holds 1 records" in done.stderr
        done = run_topics("topic", "rm", name, "--yes", TOPICS_URL=server.url)
        assert (done.returncode, done.stdout) == (0, f"removed {name} by {server.url}\n")
        assert api.state(name).status == 404
        done = run_topics("topic", "rm", name, "--yes", "--json", TOPICS_URL=server.url)
        assert done.returncode == 1
        assert json.loads(done.stdout)["deleted"] is False
        assert "does not exist" in done.stderr


def test_rm_asks(server: Server) -> None:
    name = unique("asked")
    with server.client() as api:
        api.append(name, 1)
        done = run_topics("topic", "rm", name, TOPICS_URL=server.url)
        assert done.returncode == 2
        assert "--yes" in done.stderr
        for answer, status in ((b"n\n", 200), (b"y\n", 404)):
            ours, theirs = pty.openpty()
            process = subprocess.Popen(
                [TOPICS, "topic", "rm", name],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=clean_environment(TOPICS_URL=server.url),
            )
            os.close(theirs)
            shown = b""
            while b"for good?" not in shown:
                shown += os.read(ours, 1024)
            os.write(ours, answer)
            process.wait(30)
            os.close(ours)
            eventually(lambda status=status: api.state(name).status == status)


def test_mistakes(whole: Path, tmp_path: Path) -> None:
    done = run_topics("topic", "show", "nobody", "--data-dir", str(whole))
    assert done.returncode == 1
    assert done.stderr == f'topics: there is no topic "nobody" in {whole}; `topics topic ls` lists them\n'
    done = run_topics("topic", "ls", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert "is no data folder" in done.stderr
    done = run_topics("topic", "rm", "x", "--yes", "--url", "localhost:1")
    assert done.returncode == 1
    assert "no connection" in done.stderr
