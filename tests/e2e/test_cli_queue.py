"""`topics queue` against a real server: what it shows, and dead letters that come back exactly once whatever dies."""

from __future__ import annotations

import json
import os
import pty
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .client import Client, unique
from .commands import Command, read_all
from .queues import Queue, make_queue
from .routing import read, route
from .server import TOPICS, Server, clean_environment, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Start = Callable[..., Server]
StartCommand = Callable[..., Command]
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where journals go: not to whoever runs the tests."""
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def run_queue(server: Server, *args: object, **environ: object) -> Done:
    return subprocess.run(
        [TOPICS, "queue", *map(str, args)],
        capture_output=True,
        text=True,
        env=clean_environment(TOPICS_URL=server.url, **environ),
        timeout=100,
    )


@pytest.fixture
def run(server: Server) -> Run:
    return lambda *args, **environ: run_queue(server, *args, **environ)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[StartCommand]:
    started: list[Command] = []

    def start(server: Server, *args: object) -> Command:
        started.append(Command(tmp_path, "queue", *map(str, args), url=server.url))
        return started[-1]

    yield start
    for running in started:
        running.close()


def words(text: str) -> str:
    """What a table says, without its lines."""
    return " ".join("".join(" " if ord(letter) in range(0x2500, 0x2580) else letter for letter in text).split())


def dead(queue: str, data: object, *, seq: int = 1, deliveries: int = 5, **fields: Any) -> dict[str, Any]:
    """A record as the server moves it to the dead letters."""
    stamp = {"$dead_letter_from": queue, "$dead_letter_deliveries": str(deliveries), "$dead_letter_src_seq": str(seq)}
    return {"data": data, **fields, "meta": {**fields.get("meta", {}), **stamp}}


def put_dead(api: Client, dlq: str, records: list[dict[str, Any]], *, kind: str = "log") -> None:
    assert api.put(dlq, type=kind).status in (200, 201)
    for first in range(0, len(records), 1_000):
        assert api.append_records(dlq, records[first : first + 1_000]).status == 200


def data_in(api: Client, topic: str) -> list[Any]:
    return [record["data"] for record in read(api, topic)]


# --- ls ----------------------------------------------------------------------------------------------


@pytest.mark.gate
def test_ls(start_server: Start) -> None:
    server = start_server()
    assert run_queue(server, "ls").stderr == "topics: there are no queues\n"
    assert json.loads(run_queue(server, "ls", "--json").stdout) == {"queues": []}
    with server.client() as api:
        api.append("a-log", 1)
        queue = make_queue(api, "mail", lease_ms=45_500)
        other = make_queue(api, "transcode", max_deliveries=1, dead_letter="transcode.dlq")
        queue.produce(1, 2, 3)
        queue.take(2)
        other.produce("x", "y")
        other.wear([1, 2], 1)
        other.claim(2)
        other.wait_counters(0, 0, 2)
        done = run_queue(server, "ls", "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["queues"] == [
            {
                "queue": "mail",
                "ready": 1,
                "in_flight": 2,
                "dead_lettered": 0,
                "count": 3,
                "dead_letter": None,
                "lease_ms": 45_500,
            },
            {
                "queue": "transcode",
                "ready": 0,
                "in_flight": 0,
                "dead_lettered": 2,
                "count": 0,
                "dead_letter": "transcode.dlq",
                "lease_ms": 30_000,
            },
        ]
    shown = run_queue(server, "ls", COLUMNS=80).stdout
    assert words(shown) == (
        "queue ready in flight died jobs dead letters to lease mail 1 2 0 3 45,500 ms "
        "transcode 0 0 2 0 transcode.dlq 30s"
    )


def test_ls_reads_every_page(start_server: Start) -> None:
    server = start_server()
    with server.client() as api:
        for n in range(1_030):
            api.put(f"log-{n}" if n % 100 else f"queue-{n:04}", type="log" if n % 100 else "queue")
        api.put("zz", type="queue")
    found = [line["queue"] for line in json.loads(run_queue(server, "ls", "--json").stdout)["queues"]]
    assert found == [*(f"queue-{n:04}" for n in range(0, 1_030, 100)), "zz"]


def test_a_long_name_is_whole(run: Run, api1: Client) -> None:
    name = unique("q") + "x" * 200
    make_queue(api1, name)
    shown = run("ls", COLUMNS=80).stdout
    assert words(shown.replace("\n", "")).replace(" ", "").count("x") >= 200


# --- show --------------------------------------------------------------------------------------------


@pytest.mark.gate
def test_show(run: Run, api1: Client) -> None:
    dlq = unique("dlq")
    queue = make_queue(api1, max_deliveries=2, dead_letter=dlq, claim_jitter_ms=0)
    queue.produce(*range(6))
    queue.wear([1], 2)
    queue.take(1)  # moves the first away
    queue.wait_counters(4, 1, 1)
    queue.take(2)
    queue.nack([3], delay_ms=60_000)
    view = json.loads(run("show", queue.name, "--json").stdout)
    assert view["oldest"]["seq"] == 2
    assert 0 <= view["oldest"]["age_ms"] < 60_000
    assert view["oldest"]["ts"] == queue.records()[0]["$ts"]
    assert view["config"]["dead_letter"] == dlq
    expected = {"ready": 2, "in_flight": 2, "delayed": 1, "dead_lettered": 1, "count": 5, "head_seq": 6, "lag": 5}
    assert {name: view[name] for name in expected} == expected
    assert view["waiting_dead_letters"] == 1
    done = run("show", queue.name)
    assert done.returncode == 0
    said = words(done.stdout)
    for part in (
        queue.name,
        "ready 2",
        "in flight 2",
        "delayed 1",
        "all 5",
        "lag 5",
        "oldest seq 2, ",
        "died so far 1",
        "given up after 2 deliveries",
        f"dead letters to {dlq} (1 there now)",
    ):
        assert part in said


def test_show_of_an_empty_queue(run: Run, api1: Client) -> None:
    queue = make_queue(api1)
    view = json.loads(run("show", queue.name, "--json").stdout)
    assert (view["oldest"], view["lag"], view["count"]) == (None, 0, 0)
    assert "given up after never" in words(run("show", queue.name).stdout)


def test_show_of_what_is_no_queue(run: Run, api1: Client, topic: str) -> None:
    done = run("show", topic)
    assert (done.returncode, done.stderr) == (1, f'topics: topic "{topic}" does not exist\n')
    api1.append(topic, 1)
    done = run("show", topic)
    assert done.returncode == 1
    assert f'"{topic}" is a log' in done.stderr
    assert done.stdout == ""


# --- peek --------------------------------------------------------------------------------------------


@pytest.mark.gate
def test_peek_leases_nothing(run: Run, api1: Client) -> None:
    queue = make_queue(api1)
    queue.produce_records([{"data": {"n": n}, "tag": f"t:{n % 2}", "node": "w"} for n in range(1, 16)])
    held = queue.take(3)
    done = run("peek", queue.name)
    assert done.returncode == 0
    assert [line.split("  ", 1)[1] for line in done.stdout.splitlines()] == [
        f'{n}  node=w  tag=t:{n % 2}  {{"n":{n}}}' for n in range(1, 11)
    ]
    assert done.stderr == "topics: there is more: go on with --from 10\n"
    queue.assert_counters(12, 3)
    assert queue.ack([job["$seq"] for job in held])["acked"] == 3
    assert queue.take(1)[0]["deliveries"] == 1


def test_peek_options(run: Run, api1: Client) -> None:
    queue = make_queue(api1)
    queue.produce_records([{"data": n, "tag": f"t:{n % 3}:{n}"} for n in range(1, 2_501)])

    def peek(*options: object) -> tuple[list[int], str]:
        done = run("peek", queue.name, *options, "--json")
        assert done.returncode == 0
        return [json.loads(line)["$seq"] for line in done.stdout.splitlines()], done.stderr

    assert peek("-n", 2) == ([1, 2], "topics: there is more: go on with --from 2\n")
    assert peek("-n", 3, "--from", 2_498) == ([2_499, 2_500], "")
    assert peek("--from", 2_500) == ([], "")
    assert peek("-n", 2, "--tag", "t:0:*") == ([3, 6], "topics: there is more: go on with --from 6\n")
    assert peek("--tag", "t:1:2500") == ([2_500], "")
    assert peek("--tag", "none*") == ([], "")
    assert peek("-n", 1_700, "--tag", "t:*")[0] == list(range(1, 1_701))
    assert peek("-n", 5, "--tag", "t:2:*", "--from", 6)[0] == [8, 11, 14, 17, 20]
    assert peek("-n", 3_000) == (list(range(1, 2_501)), "")


def test_peek_goes_on_where_it_says(run: Run, api1: Client) -> None:
    queue = make_queue(api1)
    queue.produce_records([{"data": n, "tag": "a" if n % 7 == 0 else "b"} for n in range(1, 60)])
    found: list[int] = []
    from_seq: str | None = "0"
    while from_seq is not None:
        done = run("peek", queue.name, "-n", 3, "--tag", "a", "--json", "--from", from_seq)
        found += [json.loads(line)["data"] for line in done.stdout.splitlines()]
        from_seq = done.stderr.split()[-1] if done.stderr else None
    assert found == [7, 14, 21, 28, 35, 42, 49, 56]


def test_peek_at_dead_letters(run: Run, api1: Client) -> None:
    dlq = unique("dlq")
    put_dead(api1, dlq, [dead("jobs", {"n": 1.5}, seq=17)])
    assert run("peek", dlq).stdout.split("  ")[1:] == ["1", "from=jobs:17 deliveries=5", '{"n":1.5}\n']
    record = json.loads(run("peek", dlq, "--json").stdout)
    assert (record["topic"], record["meta"]["$dead_letter_from"]) == (dlq, "jobs")


def test_peek_into_a_pipe_that_is_closed(server: Server, api1: Client) -> None:
    queue = make_queue(api1)
    queue.produce_records([{"data": "x" * 1_000} for _ in range(3_000)])
    shell = f"{TOPICS} queue peek {queue.name} -n 3000 | head -n 1 | wc -l; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell],
        capture_output=True,
        text=True,
        env=clean_environment(TOPICS_URL=server.url),
        timeout=60,
    )
    assert done.stdout.split() == ["1", "0"]
    assert done.stderr == ""


def test_peek_on_a_terminal_is_cut(server: Server, api1: Client) -> None:
    queue = make_queue(api1)
    queue.produce("x" * 500)
    main, child = pty.openpty()
    with subprocess.Popen(
        [TOPICS, "queue", "peek", queue.name],
        stdout=child,
        env=clean_environment(TOPICS_URL=server.url, COLUMNS=60, NO_COLOR=1),
    ) as running:
        os.close(child)
        shown = read_all(main).decode()
        assert running.wait(60) == 0
    os.close(main)
    assert len(shown.rstrip()) == 60
    assert shown.rstrip().endswith("…")


# --- redrive: what arrives ---------------------------------------------------------------------------


@pytest.mark.gate
def test_a_job_that_died_is_what_it_was(run: Run, api1: Client, server: Server) -> None:
    """The whole way: delivered too often, moved by the server, put back."""
    dlq = unique("dlq")
    queue = make_queue(api1, max_deliveries=1, dead_letter=dlq)
    body = (
        b'{"records":[{"data":{"n":  1.50, "big": 12345678901234567890123},"tag":"user:9","node":"web-1",'
        b'"meta":{"trace": 1.0,  "list":[1,  2]}},{"data":null},{"data":"two","meta":{}}]}'
    )
    assert api1.send("POST", f"/v0/topics/{queue.name}", content=body).status == 200
    before = [{**record, "$seq": 0, "$ts": 0} for record in queue.records()]
    queue.wear([1, 2, 3], 1)
    queue.claim(10)
    queue.wait_counters(0, 0, 3)
    assert api1.state(dlq)["count"] == 3

    done = run("redrive", dlq)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"redrove 3 dead letters of {dlq}: 3 to {queue.name}\n"
    assert api1.state(dlq)["count"] == 0
    assert [record["$seq"] for record in queue.records()] == [4, 5, 6]
    after = [{**record, "$seq": 0, "$ts": 0} for record in queue.records()]
    assert [record | {"meta": record.get("meta") or None} for record in after] == [
        record | {"meta": record.get("meta") or None} for record in before
    ]
    raw = api1.diff(queue.name, include_tags=True).raw
    assert b'"data":{"n":  1.50, "big": 12345678901234567890123}' in raw
    assert b'"list":[1,  2]' in raw
    assert b'"trace":1.0' in raw
    assert queue.take(3)[0]["deliveries"] == 1
    assert run("redrive", dlq).stderr == f"nothing was redriven from {dlq}\n"


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_each_goes_where_it_came_from(run: Run, api1: Client, kind: str) -> None:
    first, second = make_queue(api1), make_queue(api1)
    dlq = unique("dlq")
    put_dead(api1, dlq, [dead([first.name, second.name][n % 2], n) for n in range(250)], kind=kind)
    done = run("redrive", dlq, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "dead_letter": dlq,
        "moved": 250,
        "to": {first.name: 125, second.name: 125},
        "finished": 0,
        "left": 0,
    }
    assert data_in(api1, first.name) == list(range(0, 250, 2))
    assert data_in(api1, second.name) == list(range(1, 250, 2))
    assert data_in(api1, dlq) == []


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_to_another_queue(run: Run, api1: Client, kind: str) -> None:
    """Also what does not say where it comes from."""
    other = make_queue(api1)
    dlq = unique("dlq")
    put_dead(api1, dlq, [dead("gone", 1), {"data": 2}], kind=kind)
    done = run("redrive", dlq, "--to", other.name)
    assert done.returncode == 0, done.stderr
    assert data_in(api1, other.name) == [1, 2]
    assert data_in(api1, dlq) == []


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["log", "queue"])
def test_by_tag(run: Run, api1: Client, kind: str) -> None:
    """Several have the same tag, and what lies between them stays."""
    queue = make_queue(api1)
    dlq = unique("dlq")
    tags = ["a:1", "b", "a:1", None, "a:2", "c:1", "a:1", "b"]
    fields: list[dict[str, Any]] = [{} if tag is None else {"tag": tag} for tag in tags]
    records = [dead(queue.name, n, **tagged) for n, tagged in enumerate(fields)]
    put_dead(api1, dlq, records, kind=kind)
    done = run("redrive", dlq, "--tag", "a:*", "--limit", 2)
    assert done.stderr == f"redrove 2 dead letters of {dlq}: 2 to {queue.name}; 6 left\n"
    assert data_in(api1, dlq) == [1, 3, 4, 5, 6, 7]
    assert run("redrive", dlq, "--tag", "a:*").returncode == 0
    assert data_in(api1, queue.name) == [0, 2, 4, 6]
    assert data_in(api1, dlq) == [1, 3, 5, 7]
    assert run("redrive", dlq, "--tag", "b").returncode == 0
    assert data_in(api1, queue.name) == [0, 2, 4, 6, 1, 7]
    assert data_in(api1, dlq) == [3, 5]
    assert run("redrive", dlq, "--tag", "nobody*").stderr == f"nothing was redriven from {dlq}; 2 left\n"


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_so_many_at_most(run: Run, api1: Client, kind: str) -> None:
    queue = make_queue(api1)
    dlq = unique("dlq")
    put_dead(api1, dlq, [dead(queue.name, n) for n in range(300)], kind=kind)
    for limit in (1, 99, 150):
        assert run("redrive", dlq, "--limit", limit).returncode == 0
    assert data_in(api1, queue.name) == list(range(250))
    assert data_in(api1, dlq) == list(range(250, 300))
    if kind == "queue":
        Queue(api1, dlq).wait_counters(50, 0)


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["log", "queue"])
def test_dry_run(run: Run, api1: Client, kind: str) -> None:
    first, second = make_queue(api1), make_queue(api1)
    dlq = unique("dlq")
    records = [dead(first.name, n, tag=f"t:{n % 2}") for n in range(5)] + [dead(second.name, "x")]
    put_dead(api1, dlq, records, kind=kind)
    before = read(api1, dlq)
    done = run("redrive", dlq, "--dry-run")
    assert done.returncode == 0
    assert words(done.stdout) == f"redrive of {dlq} to dead letters seqs {first.name} 5 1..5 {second.name} 1 6"
    found = json.loads(run("redrive", dlq, "--dry-run", "--tag", "t:1", "--limit", 1, "--json").stdout)
    share = {"target": first.name, "dead_letters": 1, "first_seq": 2, "last_seq": 2, "exists": True}
    assert found == {"shares": [share], "finish": 0, "obstacle": None}
    assert run("redrive", dlq, "--dry-run", "--tag", "no").stderr == f"topics: {dlq} has nothing to redrive\n"
    assert read(api1, dlq) == before
    assert (data_in(api1, first.name), data_in(api1, second.name)) == ([], [])
    if kind == "queue":
        Queue(api1, dlq).assert_counters(6, 0)


def test_dry_run_says_where_it_would_end(run: Run, api1: Client) -> None:
    queue = make_queue(api1)
    dlq = unique("dlq")
    put_dead(api1, dlq, [dead(queue.name, 1), {"data": 2}, dead("never-was", 3)])
    done = run("redrive", dlq, "--dry-run")
    assert done.returncode == 1
    assert f"{queue.name} 1 1" in words(done.stdout)
    assert f"it would end there: record 2 of {dlq} does not say which queue it comes from" in done.stderr
    api1.delete(dlq, before_seq=3)
    done = run("redrive", dlq, "--dry-run", "--json")
    assert done.returncode == 1
    share = {"target": "never-was", "dead_letters": 0, "first_seq": 0, "last_seq": 0, "exists": False}
    found = json.loads(done.stdout)
    assert found["shares"] == [share]
    assert "which does not exist" in found["obstacle"]


def test_what_dies_again_is_not_moved_for_ever(run: Run, api1: Client) -> None:
    """Everything that is put back is a dead letter again in no time; a router sees to it."""
    queue = make_queue(api1)
    for kind in ("log", "queue"):
        dlq = unique("dlq")
        put_dead(api1, dlq, [dead(queue.name, n) for n in range(300)], kind=kind)
        route(api1, queue.name, dlq)
        done = run("redrive", dlq, "--to", queue.name)
        assert done.returncode == 0
        assert f"redrove 300 dead letters of {dlq}" in done.stderr
        eventually(lambda: data_in(api1, dlq) == list(range(300)), what="the copies")  # noqa: B023
        api1.send("DELETE", f"/v0/routers/{queue.name}->{dlq}")


# --- dead letters in a queue -------------------------------------------------------------------------


def test_what_workers_hold_is_left_alone(run: Run, api1: Client) -> None:
    queue, dlq = make_queue(api1), make_queue(api1)
    put_dead(api1, dlq.name, [dead(queue.name, n) for n in range(10)], kind="queue")
    held = dlq.take(3)
    dlq.nack([held[2]["$seq"]], delay_ms=3_600_000)
    done = run("redrive", dlq.name)
    assert done.stderr.splitlines()[-1] == f"redrove 7 dead letters of {dlq.name}: 7 to {queue.name}; 3 left"
    assert data_in(api1, queue.name) == list(range(3, 10))
    assert dlq.ack([1, 2])["acked"] == 2
    assert dlq.left() == [3]


def test_by_tag_nobody_may_hold_any(run: Run, api1: Client) -> None:
    queue, dlq = make_queue(api1), make_queue(api1)
    put_dead(api1, dlq.name, [dead(queue.name, n, tag="t") for n in range(3)], kind="queue")
    dlq.take(1)
    done = run("redrive", dlq.name, "--tag", "t")
    assert done.returncode == 1
    assert "workers hold 1 of its jobs" in done.stderr
    assert data_in(api1, queue.name) == []
    assert len(dlq.left()) == 3


# --- redrive: what ends it ---------------------------------------------------------------------------


def obstacles(api: Client) -> dict[str, tuple[dict[str, Any], str]]:
    """A dead letter that can't be moved, and what is said."""
    full = make_queue(api, cap_records=1, discard="reject")
    full.produce("is full")
    return {
        "no origin": ({"data": "x"}, "does not say which queue it comes from; name one with --to"),
        "no queue": (dead("never-was", "x"), 'would go to "never-was", which does not exist; create it, or'),
        "full": (dead(full.name, "x"), f"{full.name} does not take record 4 of "),
    }


@pytest.mark.parametrize("what", ["no origin", "no queue", "full"])
@pytest.mark.parametrize("kind", ["log", "queue"])
def test_the_first_that_can_not_be_moved(run: Run, api1: Client, kind: str, what: str) -> None:
    """Before it everything is moved and removed, behind it nothing; and never is a queue made for it."""
    queue = make_queue(api1)
    dlq = unique("dlq")
    record, said = obstacles(api1)[what]
    put_dead(api1, dlq, [*(dead(queue.name, n) for n in range(3)), record, dead(queue.name, 4)], kind=kind)
    done = run("redrive", dlq)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.splitlines()[-1] == f"redrove 3 dead letters of {dlq}: 3 to {queue.name} before that"
    assert data_in(api1, queue.name) == [0, 1, 2]
    assert data_in(api1, dlq) == ["x", 4]
    assert api1.state("never-was").status == 404
    assert run("redrive", dlq, "--to", queue.name).returncode == 0
    assert data_in(api1, queue.name) == [0, 1, 2, "x", 4]


def test_what_is_not_understood(run: Run, api1: Client, topic: str) -> None:
    assert run("redrive", topic, "--to", topic).returncode == 2
    for glob in ("a*b", "", "*x"):
        done = run("redrive", topic, "--tag", glob)
        assert done.returncode == 2
        assert "--tag" in done.stderr
    assert run("redrive", topic, "--limit", 0).returncode == 2
    assert run("peek", topic, "-n", 0).returncode == 2
    done = run("redrive", topic)
    assert done.returncode == 1
    assert f'topics: topic "{topic}" does not exist\n' in done.stderr
    for verb in ("show", "peek"):
        assert run(verb, topic).stderr == f'topics: topic "{topic}" does not exist\n'


def test_nobody_there(tmp_path: Path) -> None:
    for args in (["ls"], ["show", "x"], ["peek", "x"], ["redrive", "x"], ["redrive", "x", "--dry-run"]):
        done = subprocess.run(
            [TOPICS, "queue", *args, "--url", "localhost:1"],
            capture_output=True,
            text=True,
            env=clean_environment(),
            timeout=60,
        )
        assert done.returncode == 1
        assert "no connection to http://localhost:1: connection refused. Is a server running there?" in done.stderr


def test_a_state_folder_that_can_not_be_written(run: Run, api1: Client, tmp_path: Path) -> None:
    queue = make_queue(api1)
    dlq = unique("dlq")
    put_dead(api1, dlq, [dead(queue.name, 1)])
    (tmp_path / "file").write_text("")
    done = run("redrive", dlq, XDG_STATE_HOME=tmp_path / "file")
    assert done.returncode == 1
    assert "can't write the journal" in done.stderr
    assert data_in(api1, dlq) == [1]


# --- redrive: interrupted ----------------------------------------------------------------------------


def many(api: Client, dlq: str, count: int, *, kind: str, window_ms: int = 120_000) -> Queue:
    queue = make_queue(api, idempotency_window_ms=window_ms)
    put_dead(api, dlq, [dead(queue.name, n, tag=f"t:{n % 5}", meta={"n": n}) for n in range(count)], kind=kind)
    return queue


def wait_moved(api: Client, queue: Queue, running: Command, count: int) -> None:
    """Until the queue has so many, or it has ended."""
    eventually(lambda: not running.running or queue.state()["head_seq"] >= count, every_s=0.002, what=f"{count} moved")


@pytest.mark.parametrize("forget", ["keep the journal", "lose the journal"])
@pytest.mark.parametrize(("kind", "options"), [("log", []), ("log", ["--tag", "t:*"]), ("queue", [])])
def test_killed_at_any_moment(
    server: Server, api1: Client, command: StartCommand, state_home: Path, kind: str, options: list[str], forget: str
) -> None:
    """kill -9, again and again, and each time another one takes over."""
    chance = random.Random(f"{kind}{options}{forget}")
    dlq = unique("dlq")
    queue = many(api1, dlq, 600, kind=kind)
    kills = 0
    while api1.state(dlq)["count"]:
        running = command(server, "redrive", dlq, *options)
        wait_moved(api1, queue, running, queue.state()["head_seq"] + chance.randint(1, 150))
        if running.running:
            running.popen.kill()
            kills += 1
        running.wait()
        if forget == "lose the journal":
            for file in state_home.rglob("*.jsonl"):
                file.unlink()
    assert kills >= 3
    assert run_queue(server, "redrive", dlq, *options).returncode == 0
    found = read(api1, queue.name)
    assert sorted(record["data"] for record in found) == list(range(600))
    assert all(record["meta"] == {"n": record["data"]} for record in found)
    assert data_in(api1, dlq) == []
    if forget == "keep the journal":
        (file,) = state_home.rglob("*.jsonl")
        assert file.stat().st_size == 0


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_killed_where_no_key_is_remembered(server: Server, api1: Client, command: StartCommand, kind: str) -> None:
    """Then it asks about the one that was under way; the test has the answer from looking at the queue."""
    chance = random.Random(kind)
    dlq = unique("dlq")
    queue = many(api1, dlq, 400, kind=kind, window_ms=0)
    answer: list[str] = []
    while api1.state(dlq)["count"]:
        running = command(server, "redrive", dlq, *answer)
        wait_moved(api1, queue, running, queue.state()["head_seq"] + chance.randint(1, 120))
        if running.running:
            running.popen.kill()
        answer = []
        if running.wait() == 1:
            said = running.stderr()
            assert "--in-doubt write" in said
            seq = int(said.partition("while it wrote record ")[2].split()[0])
            data = api1.diff(dlq, seq - 1, limit=1)["records"][0]["data"]
            answer = ["--in-doubt", "remove" if data in data_in(api1, queue.name) else "write"]
    assert run_queue(server, "redrive", dlq).returncode == 0
    assert sorted(data_in(api1, queue.name)) == list(range(400))


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_ctrl_c_finishes_what_was_begun(
    server: Server, api1: Client, command: StartCommand, state_home: Path, kind: str
) -> None:
    dlq = unique("dlq")
    queue = many(api1, dlq, 3_000, kind=kind)
    running = command(server, "redrive", dlq)
    wait_moved(api1, queue, running, 150)
    assert running.interrupt() == 130
    moved = data_in(api1, queue.name)
    assert 150 <= len(moved) < 3_000
    said = running.stderr().splitlines()[-1]
    assert (
        said
        == f"redrove {len(moved):,} dead letters of {dlq}: {len(moved):,} to {queue.name} before it was interrupted"
    )
    assert sorted(moved + data_in(api1, dlq)) == list(range(3_000))
    (file,) = state_home.rglob("*.jsonl")
    assert file.stat().st_size == 0
    assert run_queue(server, "redrive", dlq).returncode == 0
    assert sorted(data_in(api1, queue.name)) == list(range(3_000))


@pytest.mark.parametrize(
    ("kind", "victim"),
    [("log", "gateway-0"), ("log", "shard-0"), ("queue", "gateway-0"), ("queue", "queue"), ("queue", "shard-0")],
)
def test_a_process_dies_under_it(start_server: Start, command: StartCommand, kind: str, victim: str) -> None:
    server = start_server(TOPICS_WAL_SHARDS=1)
    with server.client() as api:
        queue = many(api, "jobs.dlq", 2_000, kind=kind)
        running = command(server, "redrive", "jobs.dlq")
        wait_moved(api, queue, running, 200)
        server.signal_child(victim)
        server.wait_ready()
        assert running.wait(within_s=90) == 0, running.stderr()
    with server.client() as api:
        assert sorted(data_in(api, queue.name)) == list(range(2_000))
        assert data_in(api, "jobs.dlq") == []


@pytest.mark.parametrize("kind", ["log", "queue"])
def test_the_server_is_restarted_under_it(start_server: Start, command: StartCommand, kind: str) -> None:
    server = start_server()
    with server.client() as api:
        queue = many(api, "jobs.dlq", 2_000, kind=kind)
        running = command(server, "redrive", "jobs.dlq")
        wait_moved(api, queue, running, 200)
    server.kill()
    running.wait_stderr("trying again")
    again = start_server(data_dir=server.data_dir, TOPICS_PORT=server.port)
    assert running.wait(within_s=90) == 0, running.stderr()
    with again.client() as api:
        assert sorted(data_in(api, queue.name)) == list(range(2_000))
        assert data_in(api, "jobs.dlq") == []


def test_two_at_the_same_time(server: Server, api1: Client, command: StartCommand, state_home: Path) -> None:
    """On one machine the second is refused; two machines do no harm."""
    dlq = unique("dlq")
    queue = many(api1, dlq, 2_000, kind="log")
    first = command(server, "redrive", dlq)
    wait_moved(api1, queue, first, 1)
    second = run_queue(server, "redrive", dlq)
    assert second.returncode == 1
    assert "another redrive of the same dead letters is running" in second.stderr
    elsewhere = run_queue(server, "redrive", dlq, XDG_STATE_HOME=state_home / "elsewhere")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert first.wait() == 0, first.stderr()
    assert sorted(data_in(api1, queue.name)) == list(range(2_000))
    assert data_in(api1, dlq) == []


def test_dry_run_knows_what_an_earlier_one_wrote(server: Server, api1: Client, command: StartCommand, run: Run) -> None:
    dlq = unique("dlq")
    queue = many(api1, dlq, 2_000, kind="log")
    running = command(server, "redrive", dlq)
    wait_moved(api1, queue, running, 1)
    running.popen.kill()
    running.wait()
    moved = len(data_in(api1, queue.name))
    found = json.loads(run("redrive", dlq, "--dry-run", "--json").stdout)
    left = len(data_in(api1, dlq))
    assert found["finish"] + found["shares"][0]["dead_letters"] == left
    assert found["finish"] in (moved - (2_000 - left), moved - (2_000 - left) - 1)  # the last may not be noted


# --- progress ----------------------------------------------------------------------------------------


def test_lines_of_progress(server: Server, api1: Client, run: Run) -> None:
    dlq = unique("dlq")
    many(api1, dlq, 5_000, kind="log")
    lines = run("redrive", dlq).stderr.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("topics: redrove ") and line.endswith(" of 5,000") for line in lines[:-1])
    assert lines[-1].startswith("redrove 5,000 dead letters of ")


def test_a_bar_on_a_terminal(server: Server, api1: Client) -> None:
    dlq = unique("dlq")
    queue = many(api1, dlq, 5_000, kind="log")
    main, child = pty.openpty()
    with subprocess.Popen(
        [TOPICS, "queue", "redrive", dlq],
        stderr=child,
        env=clean_environment(TOPICS_URL=server.url, COLUMNS=100, TERM="xterm"),
    ) as running:
        os.close(child)
        shown = read_all(main).decode()
        assert running.wait(60) == 0
    os.close(main)
    assert "/5000" in shown
    assert shown.rstrip().endswith(f"redrove 5,000 dead letters of {dlq}: 5,000 to {queue.name}")
