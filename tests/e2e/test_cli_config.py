"""`topics config`, and `topics serve --config`: the settings that a running server really has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .server import Server, run_topics

pytestmark = pytest.mark.e2e


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "topics.toml"
    path.write_text(text)
    return str(path)


def test_check_names_every_fault(tmp_path: Path) -> None:
    path = write(tmp_path, 'prot = 1\nport = 2\nelastic = "no"\n')
    done = run_topics("config", "check", path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f'topics: {path}, line 1: there is no setting "prot"; did you mean port?',
        f'topics: {path}, line 3: elastic = "no": expected true or false; write false',
    ]


def test_check_of_a_file_that_is_right_looks_at_the_environment_too(tmp_path: Path) -> None:
    path = write(tmp_path, "port = 2\n")
    done = run_topics("config", "check", TOPICS_CONFIG=path, TOPICS_GATEWAY=3)
    assert (done.returncode, done.stdout) == (0, f"{path}: right (1 setting in effect)\n")
    assert done.stderr == "note: TOPICS_GATEWAY is no setting; did you mean TOPICS_GATEWAYS?\n"
    done = run_topics("config", "check", path, TOPICS_GATEWAYS="many")
    assert (done.returncode, done.stdout) == (1, "")
    assert "TOPICS_GATEWAYS='many'" in done.stderr
    assert run_topics("config", "check", cwd=tmp_path).stdout.startswith("the environment: right (0 settings)")


def test_check_says_what_a_server_would_refuse(tmp_path: Path) -> None:
    done = run_topics("config", "check", write(tmp_path, 'host = "0.0.0.0"\n'))
    assert done.returncode == 0  # the keys may come with the service
    assert "note: started like this, a server would refuse" in done.stderr


def test_show_says_where_values_came_from_and_no_secret(tmp_path: Path) -> None:
    path = write(tmp_path, "port = 2\ngateways = 2\n")
    environ: dict[str, Any] = {"TOPICS_GATEWAYS": 3, "TOPICS_API_KEYS": "hunter2:read,hunter3"}
    done = run_topics("config", "show", "--config", path, "--json", **environ)
    assert done.returncode == 0, done.stderr
    assert "hunter" not in done.stdout
    shown = json.loads(done.stdout)
    assert shown["file"] == path
    assert shown["settings"]["port"] == {"value": 2, "from": "file", "where": f"{path}, line 1"}
    assert shown["settings"]["gateways"] == {"value": 3, "from": "environment", "where": "TOPICS_GATEWAYS"}
    assert shown["settings"]["api_keys"] == {"value": 2, "from": "environment", "where": "TOPICS_API_KEYS"}
    assert shown["settings"]["max_limit"] == {"value": 1000, "from": "default", "where": ""}
    table = run_topics("config", "show", "--config", path, **environ, COLUMNS=200).stdout
    assert "hunter" not in table
    lines = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}
    assert lines["gateways"] == ["3", "TOPICS_GATEWAYS"]
    assert set(shown["settings"]) <= set(lines)


@pytest.mark.full
def test_a_server_runs_with_the_file(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """Its variables (the harness sets some) win over the file; what only the file says counts."""
    path = write(tmp_path, "wal_shards = 7\nmax_batch_records = 2\n")
    server = start_server(TOPICS_CONFIG=path)
    assert [name for name in server.pids() if name.startswith("shard-")] == ["shard-0", "shard-1"]
    with server.client() as client:
        assert client.append("a", 1, 2, 3).refusal == (400, "batch_too_large")
        assert client.append("a", 1, 2).status == 201


def test_a_server_refuses_a_file_that_is_wrong(tmp_path: Path) -> None:
    path = write(tmp_path, "prot = 1\nport = -1")
    done = run_topics("serve", "--config", path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f'topics: {path}, line 1: there is no setting "prot"; did you mean port? (1 more: see `topics config check`)\n'
    )
    assert not (tmp_path / "topics-data").exists()


@pytest.mark.full
@pytest.mark.parametrize("verb", [("verify",), ("repair",), ("shards",), ("segment", "ls"), ("snapshot", "ls")])
@pytest.mark.parametrize("text", [None, "port = [", "prot = 1"])
def test_a_wrong_file_is_one_line_for_every_verb(tmp_path: Path, verb: tuple[str, ...], text: str | None) -> None:
    path = tmp_path / "topics.toml"
    if text is not None:
        path.write_text(text)
    done = run_topics(*verb, "--config", str(path))
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert str(path) in done.stderr
