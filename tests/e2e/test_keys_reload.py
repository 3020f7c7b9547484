"""Keys that come and go while the server runs: `topics reload` and SIGHUP read the key file again, all or nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from .client import unique
from .keyed import Keyed, KeyedWatching, KeyedWorking, bearer
from .logged import parse_logfmt
from .server import Server, eventually, run_topics
from .sockets import Socket

pytestmark = pytest.mark.e2e

STAYS, GOES, COMES = "Zq9stays-11aa", "Zq9goes-22bb", "Zq9comes-33cc"
SECRETS = (STAYS, GOES, COMES)
TOPIC = "in:watched"


class Keys:
    """A server with two gateways, and the file that it reads its keys from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys"
        self.write(f"{STAYS} name=stays", f"{GOES}:rw:in: name=goes")
        self.server = Server(
            folder / "data",
            log=folder / "server.log",
            TOPICS_API_KEYS_FILE=self.path,
            TOPICS_GATEWAYS=2,
            TOPICS_ACCESS_LOG=1,
        )

    def write(self, *lines: str) -> None:
        self.path.write_text("\n".join(lines))
        self.path.chmod(0o600)

    def reload(self, *args: str) -> CompletedProcess[str]:
        return run_topics("reload", "--data-dir", str(self.server.data_dir), *(args or ("--only", "keys")))

    def reset(self) -> None:
        self.write(f"{STAYS} name=stays", f"{GOES}:rw:in: name=goes")
        assert self.reload().returncode == 0

    def statuses(self, secret: str) -> set[int]:
        """Over so many connections that both gateways are asked, more likely than not."""
        found = set()
        for _ in range(8):
            with Keyed(self.server.port, "http1", secret) as api:
                found.add(api.diff(TOPIC).status)
        return found

    def logged(self, event: str) -> list[dict[str, str]]:
        lines = [line for line in self.server.output().splitlines() if f" event={event}" in line]
        return [{name: str(value) for name, value in parse_logfmt(line).items()} for line in lines]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    keys = Keys(tmp_path_factory.mktemp("keys"))
    try:
        keys.server.wait_ready()
        with Keyed(keys.server.port, "http1", STAYS) as api:
            api.put(TOPIC)
        yield keys
        output = keys.server.output()
        assert "Traceback" not in output
        assert not [secret for secret in SECRETS if secret in output]
    finally:
        keys.server.close()


@pytest.mark.parametrize("how", ["--only keys", pytest.param("SIGHUP", marks=pytest.mark.full)])
def test_a_key_that_is_gone_takes_its_streams_along(keys: Keys, how: str) -> None:
    keys.reset()
    server = keys.server
    asked = len(keys.logged("request"))
    queue = f"in:{unique('q')}"
    with (
        KeyedWatching(server, "http1", GOES) as watching,
        KeyedWatching(server, "http2", GOES) as beside,
        KeyedWorking(server, "http1", GOES) as working,
        KeyedWatching(server, "http1", STAYS) as staying,
        Keyed(server.port, "http1", STAYS) as api,
        Socket(server.port, **bearer(GOES)) as socket,
        Socket(server.port, **bearer(STAYS)) as other,
    ):
        api.put(queue, type="queue")
        session = watching.create(TOPIC)
        streams = [watching.open(session), beside.open(beside.create(TOPIC))]
        stays = staying.open(staying.create(TOPIC))
        for stream in (*streams, stays):
            stream.wait_caught_up(TOPIC)
        work = working.get(f"/v0/topics/{queue}/work?node=w")
        assert work.status == 200
        for each in (socket, other):
            each.subscribe(TOPIC)

        keys.write(f"{STAYS} name=stays", f"{COMES}:read name=comes")
        if how == "SIGHUP":
            before = server.pids()
            os.kill(server.pid, signal.SIGHUP)
            eventually(lambda: keys.logged("reloaded"), within_s=90, what="a reload")
            assert all(pid != before[name] for name, pid in server.pids().items() if name != "supervisor")
        else:
            done = keys.reload()
            assert done.returncode == 0, done.stderr
            assert "keys: 2 in effect; added: comes; removed: goes\n" in done.stdout

        for stream in streams:
            assert [(frame.event, frame["code"]) for frame in stream.rest()][-1] == ("error", 401)
        assert work.last_word() == 401
        assert socket.wait_closed().code == 1008
        assert watching.get(session["stream_url"]).status == 401
        if how == "--only keys":  # otherwise all of them end, and come back
            api.append(TOPIC, mark := unique("mark"))
            stays.until(lambda: mark in stays.data(TOPIC))
            other.records(TOPIC, 1)
    assert keys.statuses(GOES) == {401}
    assert keys.statuses(COMES) == {200}
    assert keys.statuses(STAYS) == {200}
    assert {line["key"] for line in keys.logged("request") if "key" in line} >= {"stays", "goes", "comes"}
    if how == "--only keys":  # other gateways have not known it
        refused = [line for line in keys.logged("request")[asked:] if line["status"] == "401"]
        assert {line.get("key") for line in refused} == {"goes"}, "who is refused is said, in the log alone"
    assert keys.logged("keys_reloaded")[-1]["removed"] == "goes"


def test_a_file_that_is_not_right_changes_nothing(keys: Keys) -> None:
    """How it may be wrong is for tests/unit/test_keyfile.py."""
    keys.reset()
    before = keys.server.pids()
    for lines in ([f"{STAYS} name=stays", f"{COMES}:reed"], None):
        if lines is None:
            keys.path.unlink()
        else:
            keys.write(*lines)
        done = keys.reload("--json")
        assert done.returncode == 2
        assert str(keys.path) in done.stderr
        assert "the keys stay as they are, and nothing was replaced" in done.stderr
        assert json.loads(done.stdout)["refused"]
        assert not [secret for secret in SECRETS if secret in done.stdout + done.stderr]
        assert keys.logged("keys_not_reloaded")[-1]["level"] == "error"
    assert keys.server.pids() == before
    with Keyed(keys.server.port, "http1", GOES) as api:
        assert api.diff(TOPIC).status == 200
    with Keyed(keys.server.port, "http1", COMES) as api:
        assert api.diff(TOPIC).status == 401


def test_a_key_ends_by_itself(keys: Keys) -> None:
    """Without a reload, also on a connection whose head is known, and its streams with it."""
    keys.reset()
    end_s = int(time.time()) + 4
    at = datetime.fromtimestamp(end_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with Keyed(keys.server.port, "http1", GOES) as api, KeyedWatching(keys.server, "http1", GOES) as watching:
        stream = watching.open(watching.create(TOPIC))
        stream.wait_caught_up(TOPIC)
        keys.write(f"{STAYS} name=stays", f"{GOES}:rw:in: name=goes expires={at}")
        assert keys.reload().returncode == 0
        assert stream.rest()[-1]["code"] == 401
        assert time.time() >= end_s
        refused = eventually(lambda: (answer := api.diff(TOPIC)).status == 401 and answer, what="the end of a key")
        assert "has expired" in refused["error"]["message"]
        assert refused.detail == {"expired": at}
        id = refused.headers["x-request-id"]
        eventually(lambda: [line.get("key") for line in keys.logged("request") if line["id"] == id] == ["goes"])
    assert keys.statuses(STAYS) == {200}


def test_a_file_that_others_can_read(keys: Keys, tmp_path: Path) -> None:
    keys.reset()
    keys.path.chmod(0o644)
    assert keys.reload().returncode == 0
    warned = keys.logged("key_file_exposed")[-1]
    assert (warned["level"], "mode 0644" in warned["file"]) == ("warning", True)
    refused = run_topics(
        "serve", TOPICS_API_KEYS_FILE=keys.path, TOPICS_STRICT_FILES=1, TOPICS_DATA_DIR=tmp_path / "data"
    )
    assert refused.returncode == 2
    assert "TOPICS_STRICT_FILES" in refused.stderr


@pytest.mark.full
def test_keys_of_the_environment_are_not_read_again(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", log=tmp_path / "server.log", TOPICS_API_KEYS=STAYS, TOPICS_WAL_SHARDS=1)
    try:
        server.wait_ready()
        done = run_topics("reload", "--data-dir", str(server.data_dir), "--only", "keys")
        assert done.returncode == 2
        assert "no file" in done.stderr
    finally:
        server.close()
