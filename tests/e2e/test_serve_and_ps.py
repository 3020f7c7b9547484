"""`topics serve` and `topics ps` as somebody meets them who has just installed the thing."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .server import Server, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Start = Callable[..., Server]


# --- help --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--help"], ["serve", "ps", "bench", "Usage: topics"]),
        (["serve", "--help"], ["--port", "--data-dir", "--host", "--shards", "TOPICS_PORT", "4000", "TOPICS_DATA_DIR"]),
        (["ps", "--help"], ["--json", "--data-dir", "TOPICS_DATA_DIR"]),
        (["--version"], ["topics 0.1.0"]),
    ],
    ids=" ".join,
)
def test_help(args: list[str], words: list[str]) -> None:
    done = run_topics(*args)
    assert done.returncode == 0
    assert done.stderr == ""
    for word in words:
        assert word in done.stdout


def test_without_a_verb_there_is_help() -> None:
    done = run_topics()
    assert "Usage: topics" in done.stdout + done.stderr
    assert "serve" in done.stdout + done.stderr


@pytest.mark.parametrize("args", [["sevre"], ["serve", "--prot", "1"], ["serve", "--port", "many"], ["ps", "extra"]])
def test_a_slip_is_pointed_out(args: list[str]) -> None:
    done = run_topics(*args)
    assert done.returncode == 2
    assert "Usage: topics" in done.stderr
    assert args[-1] in done.stderr or args[1] in done.stderr
    assert "Traceback" not in done.stderr


# --- a server and its processes ----------------------------------------------------------------------


def test_the_server_says_where_it_is(server: Server) -> None:
    line = f"topics 0.1.0 ready on {server.url} (2 shards, data in {server.data_dir})"
    eventually(lambda: line in server.output(), what=line)


@pytest.mark.gate
def test_ps_as_json(server: Server) -> None:
    done = run_topics("ps", "--json", TOPICS_DATA_DIR=server.data_dir)
    assert done.returncode == 0, done.stderr
    listing = json.loads(done.stdout)
    assert listing["address"] == server.url
    assert listing["version"] == "0.1.0"
    lines = {line["name"]: line for line in listing["processes"]}
    assert set(lines) == {"supervisor", "gateway-0", "router", "queue", "shard-0", "shard-1"}
    assert lines["supervisor"]["pid"] == server.pid
    for line in lines.values():
        assert os.path.exists(f"/proc/{line['pid']}")
        assert line["state"] == "ready"
        assert isinstance(line["restarts"], int)
        assert line["uptime_ms"] >= 0
        assert line["rss_bytes"] > 5_000_000


@pytest.mark.gate
def test_ps_as_a_table(server: Server) -> None:
    done = run_topics("ps", "--data-dir", str(server.data_dir), COLUMNS=200)
    assert done.returncode == 0, done.stderr
    for word in ("name", "pid", "state", "restarts", "uptime", "memory", "gateway-0", "shard-1", "ready", server.url):
        assert word in done.stdout


def test_a_second_server_on_the_folder_is_refused(server: Server) -> None:
    done = run_topics("serve", "--port", "0", TOPICS_DATA_DIR=server.data_dir)
    assert done.returncode == 2
    assert str(server.pid) in done.stderr
    assert str(server.data_dir) in done.stderr
    assert "Traceback" not in done.stderr
    with server.client() as client:
        assert client.get("/v0/ready").status == 200


@pytest.mark.gate
def test_a_port_in_use_is_refused(server: Server, tmp_path: Path) -> None:
    done = run_topics("serve", "--port", str(server.port), TOPICS_DATA_DIR=tmp_path / "data")
    assert done.returncode == 2
    assert str(server.port) in done.stderr
    assert "Traceback" not in done.stderr


# --- without a server --------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False])
def test_ps_without_a_server(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "data"
    if exists:
        folder.mkdir()
    done = run_topics("ps", TOPICS_DATA_DIR=folder)
    assert done.returncode == 1
    assert "no server is running" in done.stderr
    assert str(folder) in done.stderr
    assert done.stdout == ""


def test_ps_looks_where_serve_puts_its_data_by_default(tmp_path: Path) -> None:
    assert "topics-data" in run_topics("ps", cwd=tmp_path).stderr


# --- what is refused at the start --------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, object], list[str]]] = {
    "public without keys": ({"TOPICS_HOST": "0.0.0.0"}, ["0.0.0.0", "TOPICS_ALLOW_INSECURE_NO_AUTH", "API keys"]),
    "keys": ({"TOPICS_API_KEYS": "secret-key:reed"}, ["TOPICS_API_KEYS", "key 1", "read, write, delete and admin"]),
    "port too large": ({"TOPICS_PORT": 70_000}, ["TOPICS_PORT", "70000", "65535"]),
    "no shards": ({"TOPICS_WAL_SHARDS": 0}, ["TOPICS_WAL_SHARDS", "1 to 64"]),
    "log level": ({"TOPICS_LOG": "loud"}, ["TOPICS_LOG", "loud", "debug"]),
    "size with a unit": ({"TOPICS_MAX_RECORD_BYTES": "1MiB"}, ["TOPICS_MAX_RECORD_BYTES", "1MiB"]),
}


@pytest.mark.gate
@pytest.mark.parametrize(("environ", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_say_what_and_why(tmp_path: Path, environ: dict[str, Any], words: list[str]) -> None:
    folder = tmp_path / "data"
    done = run_topics("serve", **{"TOPICS_DATA_DIR": folder, "TOPICS_PORT": 0, **environ})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("topics: ")
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    assert not folder.exists()


def test_a_file_is_no_data_folder(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("precious")
    done = run_topics("serve", "--port", "0", TOPICS_DATA_DIR=file)
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr
    assert file.read_text() == "precious"


def test_public_is_possible_for_whoever_insists(start_server: Start) -> None:
    server = start_server(ready=False, TOPICS_HOST="0.0.0.0", TOPICS_ALLOW_INSECURE_NO_AUTH=1, TOPICS_WAL_SHARDS=1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass


def test_options_win_over_variables(tmp_path: Path) -> None:
    done = run_topics("serve", "--port", "99999", TOPICS_PORT=0, TOPICS_DATA_DIR=tmp_path)
    assert done.returncode == 2
    assert "99999" in done.stderr
