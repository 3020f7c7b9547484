"""`topics publish` against a real server: what arrives, in which order, and exactly once whatever dies."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .client import Client, unique
from .commands import StartCommand, command, read_all
from .server import TOPICS, Server, clean_environment, eventually, run_topics

__all__ = ["command"]

pytestmark = [pytest.mark.e2e, pytest.mark.full]

Start = Callable[..., Server]


def publish(server: Server, *args: object, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    given = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [TOPICS, "publish", *map(str, args)],
        input=given,
        capture_output=True,
        env=clean_environment(TOPICS_URL=server.url),
        timeout=60,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def stored(client: Client, topic: str) -> list[Any]:
    """All of a topic's data."""
    found: list[Any] = []
    from_seq = 0
    while True:
        page = client.diff(topic, from_seq, limit=1_000)
        found += page.data
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return found


# --- what arrives ------------------------------------------------------------------------------------


@pytest.mark.gate
def test_arguments(server: Server, api1: Client, topic: str) -> None:
    done = publish(server, topic, '{"n": 1}', '"two"', "null")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith(f"published 3 records to {topic} (seq 1..3) in ")
    assert stored(api1, topic) == [{"n": 1}, "two", None]
    assert publish(server, topic, "4").stderr.startswith(f"published 1 record to {topic} (seq 4) in ")


def test_numbers_keep_their_spelling(server: Server, api1: Client, topic: str) -> None:
    spellings = ["1.50", "1e400", "-0", "12345678901234567890123", '{"b": 1.0,  "a": [1E+2]}', '"\\u00e9\\/é"']
    assert publish(server, topic, *["--", *spellings]).returncode == 0
    assert publish(server, topic, stdin="\n".join(spellings)).returncode == 0
    raw = api1.diff(topic).raw.decode()
    for text in spellings:
        assert raw.count(f'"data":{text}}}') == 2


@pytest.mark.gate
def test_standard_input(server: Server, api1: Client, topic: str) -> None:
    done = publish(server, topic, stdin='1\n\n  {"a": [2]}  \r\n"drei"')
    assert done.returncode == 0
    assert "published 3 records" in done.stderr
    assert stored(api1, topic) == [1, {"a": [2]}, "drei"]


def test_a_file(server: Server, api1: Client, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(f'{{"n": {n}}}\n' for n in range(3_000)))
    done = publish(server, topic, "--file", file)
    assert done.returncode == 0
    assert f"published 3,000 records to {topic} (seq 1..3000) in " in done.stderr
    assert [record["n"] for record in stored(api1, topic)] == list(range(3_000))
    assert publish(server, topic, "--file", "-", stdin="1\n").stderr.startswith("published 1 record ")


def test_text(server: Server, api1: Client, topic: str) -> None:
    lines = ['say "hi"', "", "\\n is not a newline", "grüße\t日本"]
    assert publish(server, topic, "--text", stdin="\r\n".join(lines) + "\n").returncode == 0
    assert publish(server, topic, "--text", "not json", "").returncode == 0
    assert stored(api1, topic) == [*lines, "not json", ""]


def test_tag_node_and_durability(server: Server, api1: Client, topic: str) -> None:
    assert publish(server, topic, "1", "--tag", "a:b", "--node", "w1", "--durability", "fsync").returncode == 0
    record = api1.diff(topic, include_tags=True)["records"][0]
    assert (record["$tag"], record["$node"]) == ("a:b", "w1")
    assert api1.state(topic)["config"]["durability"] == "fsync"
    assert publish(server, topic, "2", "--durability", "fsync").returncode == 0
    done = publish(server, topic, "3", "--durability", "disk")
    assert done.returncode == 1
    assert f"{topic} exists with durability fsync, not disk" in done.stderr
    assert stored(api1, topic) == [1, 2]


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_batches(server: Server, api1: Client, topic: str, batch: int) -> None:
    """A batch has one time, so times tell batches apart; and none is larger than asked for."""
    done = publish(server, topic, "--batch", batch, stdin="".join(f"{n}\n" for n in range(50)))
    assert done.returncode == 0
    assert stored(api1, topic) == list(range(50))
    times = [record["$ts"] for record in api1.diff(topic)["records"]]
    assert len(set(times)) <= -(-50 // batch)


def test_a_batch_is_no_larger_than_asked_for(small_server: Server, topic: str) -> None:
    """The server takes five at most."""
    done = publish(small_server, topic, "--batch", 5, stdin="".join(f"{n}\n" for n in range(23)))
    assert done.returncode == 0, done.stderr
    with small_server.client() as client:
        assert client.state(topic)["head_seq"] == 23


def test_much_data_is_cut_by_bytes(server: Server, api1: Client, topic: str) -> None:
    """Fifty records of 200 KB would be ten megabytes in one append otherwise; the order stays."""
    lines = "".join(json.dumps({"n": n, "pad": "x" * 200_000}) + "\n" for n in range(50))
    assert publish(server, topic, stdin=lines).returncode == 0
    assert [record["n"] for record in stored(api1, topic)] == list(range(50))


def test_nothing(server: Server, topic: str) -> None:
    done = publish(server, topic, stdin="")
    assert done.returncode == 0
    assert done.stderr.startswith(f"published 0 records to {topic} in ")


# --- a stream that goes on ---------------------------------------------------------------------------


def test_a_slow_stream_is_not_kept_waiting(server: Server, topic: str, command: StartCommand, api1: Client) -> None:
    running = command("publish", topic, url=server.url, stdin=True)
    for n in range(3):
        running.write(f"{n}\n")
        eventually(lambda n=n: api1.state(topic).json.get("head_seq") == n + 1, what=f"record {n}")
    running.write("3")  # a line that has not ended is not a record yet
    assert running.running
    running.close_stdin()
    assert running.wait() == 0
    assert stored(api1, topic) == [0, 1, 2, 3]
    assert f"published 4 records to {topic} (seq 1..4)" in running.stderr()


def test_a_stream_is_not_read_into_memory(start_server: Start, command: StartCommand) -> None:
    """While the server does not answer, little is read ahead; then everything arrives."""
    server = start_server(TOPICS_HEARTBEAT_MS=60_000)  # nobody minds that the gateway stands still
    line = json.dumps({"pad": "x" * 1_000}) + "\n"
    running = command("publish", "jobs", url=server.url, stdin=True)
    running.write(line)
    with server.client() as client:
        eventually(lambda: client.state("jobs").json.get("head_seq") == 1, what="the first record")
        server.signal_child("gateway-0", signal.SIGSTOP)
        assert running.popen.stdin is not None
        pipe = running.popen.stdin.fileno()
        os.set_blocking(pipe, False)
        written = 0
        quiet = 0

        def stuck() -> bool:
            """Nothing was taken any more, twenty times in a row."""
            nonlocal written, quiet
            try:
                written += os.write(pipe, (line * 64).encode()[written % len(line) :])
                quiet = 0
            except BlockingIOError:
                quiet += 1
            return quiet >= 20

        eventually(stuck, every_s=0.02, what="the end of its appetite")
        assert written < 8 * 2**20
        server.signal_child("gateway-0", signal.SIGCONT)
        os.set_blocking(pipe, True)
        rest = -written % len(line)
        os.write(pipe, line.encode()[-rest:] if rest else b"")
        running.close_stdin()
        assert running.wait() == 0, running.stderr()
        records = (written + rest) // len(line) + 1
        assert client.state("jobs")["head_seq"] == records
        assert f"published {records:,} records" in running.stderr()


# --- whatever dies -----------------------------------------------------------------------------------


def feed(running: Any, total: int, *, at: dict[int, Callable[[], object]]) -> None:
    """Numbers to its standard input; something happens at some of them."""
    for n in range(total):
        if n in at:
            at[n]()
        running.write(f"{n}\n")
    running.close_stdin()


@pytest.mark.parametrize("victim", ["gateway-0", "shard-0"])
def test_a_process_dies_under_it(start_server: Start, command: StartCommand, victim: str) -> None:
    server = start_server(TOPICS_WAL_SHARDS=1)
    running = command("publish", "jobs", "--batch", 20, "--durability", "fsync", url=server.url, stdin=True)

    def kill() -> None:
        with server.client() as client:
            eventually(lambda: client.state("jobs").json.get("head_seq", 0) > 0, what="the first batch")
        server.signal_child(victim)

    feed(running, 30_000, at={2_000: kill, 15_000: kill})
    assert running.wait(within_s=90) == 0, running.stderr()
    assert "published 30,000 records to jobs (seq 1..30000) in " in running.stderr()
    server.wait_ready()
    with server.client() as client:
        assert stored(client, "jobs") == list(range(30_000))


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_the_server_is_restarted_under_it(start_server: Start, command: StartCommand, how: str) -> None:
    server = start_server()
    running = command("publish", "jobs", "--batch", 20, "--durability", "fsync", url=server.url, stdin=True)
    with server.client() as client:
        running.write("".join(f"{n}\n" for n in range(5_000)))
        eventually(lambda: client.state("jobs").json.get("head_seq", 0) > 100, what="some batches")
    if how == "stop":
        assert server.stop() == 0
    else:
        server.kill()
    running.write("".join(f"{n}\n" for n in range(5_000, 10_000)))
    running.wait_stderr("trying again")
    again = start_server(data_dir=server.data_dir, TOPICS_PORT=server.port)
    running.close_stdin()
    assert running.wait() == 0, running.stderr()
    with again.client() as client:
        assert stored(client, "jobs") == list(range(10_000))


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize("batch", [1, 4, 500])
def test_a_line_that_is_no_json(server: Server, api1: Client, topic: str, batch: int) -> None:
    lines = [*[str(n) for n in range(1, 17)], '{"half":', *[str(n) for n in range(18, 40)]]
    done = publish(server, topic, "--batch", batch, stdin="\n".join(lines))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "topics: line 17 is not JSON: it ends too early",
        f"published 16 records to {topic} (seq 1..16) before that",
    ]
    assert stored(api1, topic) == list(range(1, 17))


def test_the_first_line_is_no_json(server: Server, api1: Client, topic: str) -> None:
    done = publish(server, topic, stdin="hello\n1\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("topics: line 1 is not JSON: ")
    assert done.stderr.splitlines()[1:] == ["nothing was published"]
    assert api1.state(topic).error == "topic_not_found"


def test_text_that_is_no_text(server: Server, topic: str) -> None:
    done = publish(server, topic, "--text", stdin=b"fine\n\xff\xfe\n")
    assert done.returncode == 1
    assert "line 2 is not UTF-8" in done.stderr
    assert "published 1 record" in done.stderr


def test_a_record_that_the_server_refuses(small_server: Server) -> None:
    """It takes a thousand bytes a record."""
    topic = unique()
    lines = ["1", "2", "", "3", json.dumps("x" * 2_000), "5"]
    done = publish(small_server, topic, "--batch", 5, stdin="\n".join(lines))
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("topics: line 5 is refused: ")
    assert second == f"published 3 records to {topic} (seq 1..3) before that"
    with small_server.client() as client:
        assert stored(client, topic) == [1, 2, 3]


def test_a_full_topic(server: Server, api1: Client, topic: str) -> None:
    api1.put(topic, cap_records=25, discard="reject")
    done = publish(server, topic, "--batch", 10, stdin="\n".join(map(str, range(100))))
    assert done.returncode == 1
    assert "topic_full" in done.stderr
    assert f"published 20 records to {topic} (seq 1..20) before that" in done.stderr
    assert stored(api1, topic) == list(range(20))


def test_no_server() -> None:
    done = run_topics("publish", "jobs", "1", TOPICS_URL="http://127.0.0.1:1")
    assert done.returncode == 1
    for words in ("http://127.0.0.1:1", "connection refused", "topics serve", "--url", "nothing was published"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", ["no-such-file", "."])
def test_no_file(server: Server, topic: str, path: str) -> None:
    done = publish(server, topic, "--file", path)
    assert done.returncode == 1
    assert done.stderr.startswith("topics: ")
    assert "Traceback" not in done.stderr


def test_a_bad_name(server: Server) -> None:
    done = publish(server, "not a name", "1")
    assert done.returncode == 1
    assert "not a name" in done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["publish"], "TOPIC"),
        (["publish", "jobs", "hello"], "--text"),
        (["publish", "jobs", ""], "RECORD"),
        (["publish", "jobs", "1", "--file", "x"], "--file"),
        (["publish", "jobs", "1", "--durability", "paper"], "ephemeral"),
        (["publish", "jobs", "1", "--batch", "0"], "--batch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_slips(args: list[str], word: str) -> None:
    done = run_topics(*args)
    assert done.returncode == 2
    assert "Usage: topics publish" in done.stderr
    assert word in done.stderr


def test_help_teaches() -> None:
    done = run_topics("publish", "--help")
    assert done.returncode == 0
    for word in ("--file", "--text", "--tag", "--node", "--batch", "--durability", "TOPICS_URL", "topics publish jobs"):
        assert word in done.stdout


# --- how it ends -------------------------------------------------------------------------------------


def test_interrupted(server: Server, api1: Client, topic: str, command: StartCommand) -> None:
    running = command("publish", topic, url=server.url, stdin=True)
    running.write("1\n2\n")
    eventually(lambda: api1.state(topic).json.get("head_seq") == 2, what="two records")
    assert running.interrupt() == 130
    assert running.stderr() == f"published 2 records to {topic} (seq 1..2) before it was interrupted\n"


def test_progress_on_a_terminal(server: Server, api1: Client, topic: str) -> None:
    """Only where it takes longer than a moment, and not in the way of the last line."""
    ours, theirs = pty.openpty()
    popen = subprocess.Popen(
        [TOPICS, "publish", topic],
        stdin=subprocess.PIPE,
        stderr=theirs,
        env=clean_environment(TOPICS_URL=server.url, TERM="xterm", COLUMNS="100"),
    )
    os.close(theirs)
    assert popen.stdin is not None
    popen.stdin.write(b"1\n2\n3\n")
    popen.stdin.flush()
    shown = b""
    while b"3 records" not in shown:
        chunk = os.read(ours, 4_096)
        assert chunk
        shown += chunk
    assert popen.poll() is None
    popen.stdin.close()
    shown += read_all(ours)
    os.close(ours)
    assert popen.wait(30) == 0
    assert f"published 3 records to {topic} (seq 1..3)".encode() in shown
    assert stored(api1, topic) == [1, 2, 3]
