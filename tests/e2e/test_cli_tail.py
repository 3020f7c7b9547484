"""`topics tail` against a real server: what it prints, and that nothing is lost or doubled whatever dies."""

from __future__ import annotations

import http.server
import json
import os
import pty
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from .client import Client, Lost, unique
from .commands import Command, StartCommand, command, read_all
from .server import TOPICS, Server, clean_environment, eventually, run_topics

__all__ = ["command"]

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Start = Callable[..., Server]


def seqs(lines: list[str]) -> list[int]:
    """Of the records among JSON lines."""
    return [parsed["$seq"] for parsed in map(json.loads, lines) if "$seq" in parsed]


def tail_to_end(server: Server, *args: object) -> subprocess.CompletedProcess[str]:
    return run_topics("tail", *map(str, args), "--until-head", TOPICS_URL=server.url)


def append_until(client: Client, topic: str, done: Callable[[], bool]) -> int:
    """Numbers from where the topic stands, until the condition holds; the last seq. A tail that has just been started
    begins somewhere among them."""
    last = 0

    def once() -> bool:
        nonlocal last
        last = client.append(topic, "n")["last_seq"]
        return done()

    eventually(once, what="the condition while appending")
    return last


# --- where it begins and ends ------------------------------------------------------------------------


@pytest.mark.gate
def test_everything_there_is(server: Server, api1: Client, topic: str) -> None:
    api1.append(topic, {"n": 1}, "two", None)
    done = tail_to_end(server, topic, "--from", 0)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [line.split("  ")[1:] for line in done.stdout.splitlines()] == [
        ["1", '{"n":1}'],
        ["2", '"two"'],
        ["3", "null"],
    ]


def test_from_is_the_last_seq_one_has(server: Server, api1: Client, topic: str) -> None:
    api1.append(topic, *range(10))
    assert seqs(tail_to_end(server, topic, "--from", 7, "--json").stdout.splitlines()) == [8, 9, 10]
    assert tail_to_end(server, topic, "--from", 10).stdout == ""


@pytest.mark.gate
def test_without_from_only_what_is_new(server: Server, api1: Client, topic: str, command: StartCommand) -> None:
    old = api1.append(topic, *range(5))["last_seq"]
    tail = command("tail", topic, "--json", url=server.url)
    last = append_until(api1, topic, lambda: bool(tail.lines()))
    eventually(lambda: seqs(tail.lines())[-1] == last, what=f"seq {last}")
    found = seqs(tail.lines())
    assert found[0] > old
    assert found == list(range(found[0], last + 1))
    assert tail.running


def test_since(server: Server, api1: Client, topic: str) -> None:
    api1.append(topic, *range(300))
    for since in ("1d", "1h30m"):
        assert len(tail_to_end(server, topic, "--since", since).stdout.splitlines()) == 300
    assert tail_to_end(server, topic, "--since", "0s").stdout == ""


def test_until_head_without_anything(server: Server, api1: Client, topic: str) -> None:
    api1.put(topic)
    done = tail_to_end(server, topic)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_until_head_ends_under_a_writer(server: Server, api1: Client, topic: str, command: StartCommand) -> None:
    head = api1.append(topic, *range(2_000))["last_seq"]
    tail = command("tail", topic, "--from", 0, "--until-head", "--json", url=server.url)
    last = append_until(api1, topic, lambda: not tail.running)
    assert tail.wait() == 0
    found = seqs(tail.lines())
    assert found == list(range(1, len(found) + 1))
    assert head <= len(found) < last  # what came after it had subscribed was not waited for


def test_until_head_when_the_last_records_were_deleted(server: Server, api1: Client, topic: str) -> None:
    api1.append_records(topic, [{"data": n, "tag": "old" if n < 5 else "new"} for n in range(10)])
    api1.delete(topic, match="new")
    done = tail_to_end(server, topic, "--from", 0, "--json")
    assert done.returncode == 0
    assert seqs(done.stdout.splitlines()) == [1, 2, 3, 4, 5]


def test_several_topics(server: Server, api1: Client) -> None:
    names = [unique() for _ in range(3)]
    for name in names:
        api1.append(name, name, name)
    done = tail_to_end(server, *names, names[0], "--from", 1)
    assert sorted(line.split("  ")[1:] for line in done.stdout.splitlines()) == sorted(
        [name, "2", f'"{name}"'] for name in names
    )


# --- what it prints ----------------------------------------------------------------------------------

SPELLINGS = ["1.50", "1e400", "-0", "12345678901234567890123", '{"b": 1.0, "a": [1E+2]}', '"\\u00e9\\/é"', "null"]


@pytest.mark.gate
def test_json_is_verbatim(server: Server, api1: Client, topic: str) -> None:
    records = ",".join(f'{{"data":{text},"tag":"t","node":"n","meta":{{"m": 1.0}}}}' for text in SPELLINGS)
    api1.send("POST", f"/v0/topics/{topic}", content=f'{{"records":[{records}]}}'.encode())
    lines = tail_to_end(server, topic, "--from", 0, "--json").stdout.splitlines()
    for seq, (text, line) in enumerate(zip(SPELLINGS, lines, strict=True), 1):
        assert line.startswith(f'{{"topic":"{topic}","$seq":{seq},"$ts":')
        assert line.endswith(f'"$node":"n","data":{text},"meta":{{"m": 1.0}}}}')
    with_tags = tail_to_end(server, topic, "--from", 0, "--json", "--tags").stdout.splitlines()
    assert all('"$tag":"t"' in line for line in with_tags)


def test_data_with_line_breaks_stays_on_its_line(server: Server, api1: Client, topic: str) -> None:
    api1.send("POST", f"/v0/topics/{topic}", content=b'{"records":[{"data":{\n  "a": 1.50,\n  "b": "x\\ny"\n}}]}')
    for options in ([], ["--json"]):
        done = tail_to_end(server, topic, "--from", 0, *options)
        assert len(done.stdout.splitlines()) == 1
        assert '{"a":1.50,"b":"x\\ny"}' in done.stdout


def test_node_and_tag(server: Server, api1: Client, topic: str) -> None:
    api1.append_records(topic, [{"data": 1, "tag": "a:b", "node": "w1"}, {"data": 2, "node": "w2"}, {"data": 3}])
    lines = tail_to_end(server, topic, "--from", 0, "--tags").stdout.splitlines()
    assert [line.split("  ")[1:] for line in lines] == [
        ["1", "node=w1", "tag=a:b", "1"],
        ["2", "node=w2", "2"],
        ["3", "3"],
    ]
    without = tail_to_end(server, topic, "--from", 0, "--json", "--node", "w1", "--node", "w2")
    assert seqs(without.stdout.splitlines()) == [3]


def test_a_terminal_gets_colours_and_lines_that_fit(server: Server, api1: Client, topic: str) -> None:
    api1.append(topic, "x" * 300)
    ours, theirs = pty.openpty()
    popen = subprocess.Popen(
        [TOPICS, "tail", topic, "--from", "0", "--until-head"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=clean_environment(TOPICS_URL=server.url, COLUMNS="60", TERM="xterm"),
    )
    os.close(theirs)
    shown = read_all(ours).decode()
    os.close(ours)
    popen.communicate(timeout=30)
    assert popen.returncode == 0
    assert "\x1b[" in shown
    plain = "".join(part.partition("m")[2] if at else part for at, part in enumerate(shown.split("\x1b[")))
    assert len(plain.rstrip("\r\n")) == 60
    assert plain.rstrip("\r\n").endswith("x…")
    assert "x" * 300 in tail_to_end(server, topic, "--from", 0).stdout


# --- what was lost -----------------------------------------------------------------------------------


@pytest.mark.gate
def test_losses_in_words(server: Server, api1: Client, topic: str) -> None:
    api1.put(topic, cap_records=3)
    api1.append(topic, *range(10))
    done = tail_to_end(server, topic, "--from", 2)
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first == f"-- missed 3..7 of {topic}: no longer kept"
    assert [line.split("  ")[1] for line in rest] == ["8", "9", "10"]
    parsed = json.loads(tail_to_end(server, topic, "--from", 2, "--json").stdout.splitlines()[0])
    assert parsed["topic"] == topic
    assert (parsed["tombstone"]["gap_from"], parsed["tombstone"]["gap_to"]) == (3, 7)


def test_losses_while_it_follows(server: Server, api1: Client, topic: str, command: StartCommand) -> None:
    """Of a batch that is larger than the cap, the first ones are gone as soon as it is there."""
    api1.put(topic, cap_records=3)
    api1.append(topic, "first")
    tail = command("tail", topic, "--from", 0, url=server.url)
    tail.wait_lines(1)
    api1.append(topic, *range(10))
    lines = tail.wait_lines(5)
    assert lines[1] == f"-- missed 2..8 of {topic}: evicted by the cap"
    assert [line.split("  ")[1] for line in lines[2:]] == ["9", "10", "11"]


def test_a_topic_made_again(server: Server, api1: Client, topic: str) -> None:
    api1.append(topic, *range(10))
    api1.drop(topic)
    api1.append(topic, "new")
    first, second = tail_to_end(server, topic, "--from", 10).stdout.splitlines()
    assert first == f"-- {topic} was deleted and made again: reading on from its start"
    assert second.endswith('  1  "new"')


def test_deletions_in_words(server: Server, api1: Client, command: StartCommand) -> None:
    first, second = unique(), unique()
    api1.append(first, 1)
    api1.append(second, 1)
    tail = command("tail", first, second, "--from", 0, url=server.url)
    tail.wait_lines(2)
    api1.drop(first)
    assert f"-- {first} was deleted" in tail.wait_lines(3)
    api1.append(second, 2)
    assert second in tail.wait_lines(4)[3]
    api1.drop(second)
    assert tail.wait() == 1
    assert tail.lines()[-1] == f"-- {second} was deleted"
    assert "no topic is left to follow" in tail.stderr()


# --- whatever dies -----------------------------------------------------------------------------------


def start_tail(command: StartCommand, server: Server, topic: str) -> Command:
    tail = command("tail", topic, "--from", 0, "--json", url=server.url)
    tail.wait_lines(1)
    return tail


def check_exact(tail: Command, last: int) -> None:
    """Everything up to a seq came once and in order."""
    eventually(lambda: seqs(tail.lines())[-1] >= last, what=f"seq {last} (stderr: {tail.stderr()!r})")
    found = seqs(tail.lines())
    assert found == list(range(1, len(found) + 1))
    assert tail.running
    assert "Traceback" not in tail.stderr()


class Writer:
    """Appends one by one, over whatever connection there is, until it is told to stop."""

    def __init__(self, port: int, topic: str) -> None:
        self._client = Client(port, "http1")
        self._topic = topic
        self._stop = threading.Event()
        self.acked = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in count():
            while not self._stop.is_set():
                try:
                    answer = self._client.append(self._topic, number, idempotency_key=f"w-{number}")
                except (Lost, OSError):
                    continue
                if answer.status in (200, 201):
                    self.acked = answer["last_seq"]
                    break
            if self._stop.is_set():
                return

    def wait_more(self, number: int) -> None:
        goal = self.acked + number
        eventually(lambda: self.acked >= goal, within_s=60, what=f"{goal} appends")

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()
        return self.acked


@pytest.fixture
def write() -> Iterator[Callable[[Server, str], Writer]]:
    writers: list[Writer] = []

    def start(server: Server, topic: str) -> Writer:
        writers.append(Writer(server.port, topic))
        writers[-1].wait_more(1)
        return writers[-1]

    yield start
    for writer in writers:
        writer.stop()


@pytest.mark.parametrize("victim", ["gateway-0", "shard"])
def test_a_process_dies_under_it(
    start_server: Start, command: StartCommand, write: Callable[[Server, str], Writer], victim: str
) -> None:
    server = start_server(TOPICS_WAL_SHARDS=1)
    with server.client() as client:
        client.put("jobs", durability="fsync")
    writer = write(server, "jobs")
    tail = start_tail(command, server, "jobs")
    for _ in range(3):
        writer.wait_more(20)
        killed = server.signal_child("shard-0" if victim == "shard" else victim)
        eventually(lambda killed=killed: killed not in server.pids().values(), what="its end")
    writer.wait_more(20)
    check_exact(tail, writer.stop())
    if victim == "gateway-0":
        tail.wait_stderr("connected again")


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_the_server_is_restarted_under_it(
    start_server: Start, command: StartCommand, write: Callable[[Server, str], Writer], how: str
) -> None:
    server = start_server()
    with server.client() as client:
        client.put("jobs", durability="fsync")
    writer = write(server, "jobs")
    tail = start_tail(command, server, "jobs")
    writer.wait_more(20)
    if how == "stop":
        assert server.stop() == 0
    else:
        server.kill()
    tail.wait_stderr("trying again")
    tail.wait_stderr("no connection to")  # it has tried, and waits
    start_server(data_dir=server.data_dir, TOPICS_PORT=server.port)
    tail.wait_stderr("connected again")
    writer.wait_more(20)
    check_exact(tail, writer.stop())


def test_a_gateway_dies_in_the_middle_of_a_backlog(start_server: Start, command: StartCommand) -> None:
    server = start_server()
    with server.client() as client:
        for _ in range(20):
            client.append("jobs", *[{"n": n, "pad": "x" * 200} for n in range(2_000)])
    ours, theirs = os.pipe()
    tail = command("tail", "jobs", "--from", 0, "--json", "--until-head", url=server.url, stdout=theirs)
    os.close(theirs)
    with os.fdopen(ours) as lines:
        found = seqs([next(lines) for _ in range(2_000)])  # the rest fills the pipe: it is in the middle
        server.signal_child("gateway-0")
        found += seqs(list(lines))
    assert found == list(range(1, 40_001))
    assert tail.wait() == 0


def test_a_reader_that_pauses(start_server: Start, command: StartCommand) -> None:
    """Like a pager: the server gives up on it, and it goes on when it is read again."""
    server = start_server(TOPICS_SLOW_CONSUMER_TIMEOUT_MS=500, TOPICS_STREAM_BACKLOG_BYTES=65_536)
    with server.client() as client:
        for _ in range(20):
            client.append("jobs", *[{"n": n, "pad": "x" * 1_000} for n in range(1_000)])
        without = server.sockets_of("gateway-0")
        ours, theirs = os.pipe()
        tail = command("tail", "jobs", "--from", 0, "--json", "--until-head", url=server.url, stdout=theirs)
        os.close(theirs)
        with os.fdopen(ours) as lines:
            found = seqs([next(lines)])
            eventually(lambda: server.sockets_of("gateway-0") == without + 1, what="its connection alone")
            eventually(lambda: server.sockets_of("gateway-0") == without, what="the end of patience")
            found += seqs(list(lines))
    assert found == list(range(1, 20_001))
    assert tail.wait() == 0
    assert "trying again" in tail.stderr()  # the server's reason may or may not get through
    assert "connected again" in tail.stderr()


def test_a_topic_deleted_while_nobody_was_there(start_server: Start, command: StartCommand) -> None:
    server = start_server()
    with server.client() as client:
        client.append("jobs", 1)
        client.append("events", 1)
        tail = command("tail", "jobs", "events", "--from", 0, url=server.url)
        tail.wait_lines(2)
    assert server.stop() == 0
    elsewhere = start_server(data_dir=server.data_dir)  # on another port, so that the tail does not see it
    with elsewhere.client() as client:
        client.drop("jobs")
    assert elsewhere.stop() == 0
    start_server(data_dir=server.data_dir, TOPICS_PORT=server.port)
    assert tail.wait_lines(3)[2] == "-- jobs was deleted"
    assert tail.running


# --- how it ends -------------------------------------------------------------------------------------


def test_interrupted(server: Server, api1: Client, topic: str, command: StartCommand) -> None:
    api1.append(topic, 1)
    tail = command("tail", topic, "--from", 0, url=server.url)
    tail.wait_lines(1)
    assert tail.interrupt() == 130
    assert tail.stderr() == ""


def test_a_pipe_that_closes(server: Server, api1: Client, topic: str, command: StartCommand) -> None:
    """Also if nothing is written any more."""
    api1.append(topic, *range(10))
    ours, theirs = os.pipe()
    tail = command("tail", topic, "--from", 0, url=server.url, stdout=theirs)
    os.close(theirs)
    with os.fdopen(ours) as lines:
        assert "  1  " in next(lines)
    assert tail.wait() == 0
    assert tail.stderr() == ""


def test_a_pipe_that_closes_under_a_flood(server: Server, api1: Client, topic: str) -> None:
    for _ in range(5):
        api1.append(topic, *["x" * 100] * 2_000)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{TOPICS} tail {topic} --from 0 | head -n 3"],
        capture_output=True,
        text=True,
        env=clean_environment(TOPICS_URL=server.url),
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3


# --- what can't be done ------------------------------------------------------------------------------


def test_an_unknown_topic(server: Server, api1: Client, topic: str) -> None:
    api1.append(topic, 1)
    for options in ([], ["--since", "1h"]):
        done = run_topics("tail", topic, "no-such-topic", *options, TOPICS_URL=server.url)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == 'topics: topic "no-such-topic" does not exist\n'


def test_no_server() -> None:
    done = run_topics("tail", "jobs", TOPICS_URL="http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stdout == ""
    for words in ("http://127.0.0.1:1", "connection refused", "topics serve", "--url"):
        assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_server_of_something_else() -> None:
    """Neither a hang nor a retry: it will never be ours."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail ready\r\n")
                connection.recv(65_536)

        thread = threading.Thread(target=greet)
        thread.start()
        done = run_topics("tail", "jobs", TOPICS_URL=f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert done.returncode == 1
    assert "does not speak HTTP" in done.stderr


def test_some_other_server() -> None:
    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        done = run_topics("tail", "jobs", TOPICS_URL=f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
        thread.join()
    assert done.returncode == 1
    assert "not as a topics server" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["tail"], "TOPIC"),
        (["tail", "jobs", "--from", "1", "--since", "1h"], "--since"),
        (["tail", "jobs", "--since", "soon"], "10m"),
        (["tail", "jobs", "--from", "-1"], "--from"),
        (["tail", "jobs", "--url", "ftp://host"], "ftp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_slips(args: list[str], word: str) -> None:
    done = run_topics(*args)
    assert done.returncode == 2
    assert "Usage: topics tail" in done.stderr
    assert word in done.stderr


def test_help_teaches() -> None:
    done = run_topics("tail", "--help")
    assert done.returncode == 0
    for word in ("--from", "--since", "--until-head", "--json", "--node", "--tags", "TOPICS_URL", "topics tail jobs"):
        assert word in done.stdout


def test_ctrl_c_while_it_waits_for_the_server(start_server: Start, command: StartCommand, tmp_path: Path) -> None:
    server = start_server()
    with server.client() as client:
        client.append("jobs", 1)
    tail = command("tail", "jobs", "--from", 0, url=server.url)
    tail.wait_lines(1)
    server.kill()
    tail.wait_stderr("trying again")
    tail.popen.send_signal(signal.SIGINT)
    assert tail.wait() == 130
    assert "Traceback" not in tail.stderr()
