"""`topics export` and `topics import`: what goes out comes in again, to the byte, and nothing comes twice."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from topics.tools.import_log import path_of

from .client import Client, unique
from .server import TOPICS, Server, clean_environment, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]

# Spellings that a careless program would change: numbers, escapes, order, spaces, line breaks.
SPELLINGS = [
    "1.50",
    "1e3",
    "-0.0",
    "12345678901234567890123",
    '"a\\u0062\\/c"',
    '{"b":1,"a":2,"b":3}',
    '{ "x" :  [1 ,2] }',
    '{\n  "pretty": true\n}',
    '"ü 😀"',
    "null",
    '{"seq":9,"topic":"other"}',
]


@pytest.fixture(scope="module")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def tool(server: Server, state_home: Path) -> Tool:
    return Tool(server, state_home)


class Tool:
    def __init__(self, server: Server, state_home: Path) -> None:
        self.server = server
        self.state_home = state_home

    def run(self, *args: str, code: int = 0, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [TOPICS, *args],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env=clean_environment(TOPICS_URL=self.server.url, XDG_STATE_HOME=self.state_home),
            timeout=60,
        )
        assert done.returncode == code, (done.stderr, done.stdout[:1_000])
        assert b"Traceback" not in done.stderr
        return done

    def export(self, *args: str) -> list[bytes]:
        return self.run("export", *args).stdout.splitlines()


def fill(api: Client, name: str) -> None:
    """Every shape of a record, in both spellings of an append; some deleted, some evicted."""
    api.put(name, cap_records=40, durability="fsync", idempotency_window_ms=60_000)
    parts = [f'{{"data":{text}}}' for text in SPELLINGS]
    parts += [
        '{"data":1,"tag":"t ü","node":"n1","meta":{"a" : 1.0}}',
        '{"data":2,"meta":{"m":\n[1]}}',
        '{"data":3,"node":"n2"}',
    ]
    body = ('{"records":[' + ",".join(parts) + "]}").encode()
    assert api.send("POST", f"/v0/topics/{name}", content=body).status == 200
    api.append(name, *range(20))
    api.append_records(name, [{"data": n, "tag": "gone"} for n in range(10)])
    api.delete(name, match=["tag", "Eq", "gone"])
    api.append(name, "last")


def raw_records(api: Client, name: str) -> list[dict[str, Any]]:
    """What a reader gets, but for seqs and times; data as its bytes would be decoded from them again."""
    found = []
    at = 0
    while True:
        answer = api.diff(name, at, include_tags=True)
        for record in answer["records"]:
            found.append({key: value for key, value in record.items() if key not in ("$seq", "$ts")})
        if answer["caught_up"]:
            return found
        at = answer["next_from_seq"]


def data_bytes(tool: Tool, name: str) -> list[tuple[str, ...]]:
    """Data and meta, as they are spelt in an export."""
    found: list[tuple[str, ...]] = []
    for line in tool.export(name):
        text = line.decode()
        entry = json.loads(text)
        if "seq" in entry:
            rest = text.partition('"ts":')[2].partition(",")[2]
            found.append((rest,))
    return found


@pytest.mark.gate
def test_there_and_back_to_the_byte(api1: Client, tool: Tool, topic: str, tmp_path: Path) -> None:
    fill(api1, topic)
    out = tmp_path / "out.jsonl"
    done = tool.run("export", topic, "--out", str(out))
    assert done.stdout == b""
    assert b"exported" in done.stderr
    assert list(tmp_path.iterdir()) == [out]
    copy = f"{topic}-copy"
    done = tool.run("import", str(out), "--map", f"{topic}={copy}")
    assert b"imported" in done.stderr
    assert raw_records(api1, copy) == raw_records(api1, topic)
    assert data_bytes(tool, copy) == data_bytes(tool, topic)
    assert api1.state(copy)["config"] == api1.state(topic)["config"]


@pytest.mark.gate
def test_the_lines(api1: Client, tool: Tool, topic: str) -> None:
    api1.put(topic, cap_records=3)
    api1.append_records(topic, [{"data": n, "tag": "a", "node": "w", "meta": {"k": n}} for n in range(5)])
    head, gap, *records, end = map(json.loads, tool.export(topic))
    assert (head["export"], head["topic"], head["head_seq"], head["count"]) == (1, topic, 5, 3)
    assert head["config"]["cap_records"] == 3
    assert gap == {"topic": topic, "tombstone": {"gap_from": 1, "gap_to": 2, "reason": "cap"}}
    assert [record["seq"] for record in records] == [3, 4, 5]
    state = api1.diff(topic, 2)
    assert records[0] == {
        "topic": topic,
        "seq": 3,
        "ts": state["records"][0]["$ts"],
        "tag": "a",
        "node": "w",
        "meta": {"k": 2},
        "data": 2,
    }
    assert end == {"topic": topic, "end": {"records": 3, "gaps": 1}}


def test_a_folder_says_what_its_server_says(api1: Client, tool: Tool, topic: str) -> None:
    fill(api1, topic)
    online = tool.export(topic)
    offline = eventually(
        lambda: (lines := tool.export(topic, "--data-dir", str(tool.server.data_dir)))[1:] == online[1:] and lines,
        what="the same lines",
    )
    first, second = json.loads(online[0]), json.loads(offline[0])
    assert first.pop("id") != second.pop("id")
    assert first == second


def test_several_topics_into_one(api1: Client, tool: Tool, topic: str) -> None:
    api1.append(f"{topic}-a", 1, 2)
    api1.append(f"{topic}-b", 3)
    exported = tool.run("export", f"{topic}-a", f"{topic}-b").stdout
    tool.run("import", "--into", topic, stdin=exported)
    assert api1.diff(topic).data == [1, 2, 3]


def test_every_topic(api1: Client, tool: Tool, topic: str) -> None:
    api1.put(topic)
    heads = [json.loads(line) for line in tool.export("--all") if b'"export"' in line]
    listed = [row["topic"] for row in api1.list(page_size=1000)["topics"]]
    assert topic in [head["topic"] for head in heads]
    assert set(listed) <= {head["topic"] for head in heads}


def test_an_empty_topic_is_made(api1: Client, tool: Tool, topic: str) -> None:
    api1.put(topic, type="queue", lease_ms=5_000)
    exported = tool.run("export", topic).stdout
    api1.drop(topic)
    tool.run("import", stdin=exported)
    assert api1.state(topic)["config"]["lease_ms"] == 5_000


def test_a_topic_that_is_there_keeps_its_config(api1: Client, tool: Tool, topic: str) -> None:
    api1.put(topic, cap_records=7)
    api1.append(topic, 1)
    exported = tool.run("export", topic).stdout
    other = f"{topic}-2"
    api1.put(other, cap_records=9)
    tool.run("import", "--into", other, stdin=exported)
    assert api1.state(other)["config"]["cap_records"] == 9
    jobs = f"{topic}-jobs"
    api1.put(jobs, type="queue")
    done = tool.run("import", "--map", f"{topic}={jobs}", stdin=exported, code=1)
    assert b"is a queue and was a log" in done.stderr


def test_twice_is_once_unless_it_is_wanted(api1: Client, tool: Tool, topic: str) -> None:
    api1.append(topic, 1, 2)
    exported = tool.run("export", topic).stdout
    target = f"{topic}-t"
    for _ in range(2):
        done = tool.run("import", "--into", target, stdin=exported)
    assert b"--again" in done.stderr
    assert api1.diff(target).data == [1, 2]
    tool.run("import", "--into", target, "--again", stdin=exported)
    assert api1.diff(target).data == [1, 2, 1, 2]


# --- interruptions -------------------------------------------------------------------------------------


def export_of(topic: str, count: int, *, id: str) -> bytes:
    head = {"export": 1, "id": id, "topic": topic, "config": {}, "head_seq": count, "earliest_seq": 1, "count": count}
    lines = [json.dumps(head)]
    lines += [json.dumps({"topic": topic, "seq": n, "ts": 1, "data": n}) for n in range(1, count + 1)]
    lines.append(json.dumps({"topic": topic, "end": {"records": count}}))
    return ("\n".join(lines) + "\n").encode()


def test_killed_anywhere_it_goes_on(api1: Client, tool: Tool, topic: str, tmp_path: Path) -> None:
    """The command is killed again and again while it works; each time it is run again."""
    count = 6_000
    path = tmp_path / "in.jsonl"
    path.write_bytes(export_of(topic, count, id=unique()))
    kills = 0
    for goal in itertools.count(400, 1_100):
        popen = subprocess.Popen(
            [TOPICS, "import", str(path)],
            stderr=subprocess.DEVNULL,
            env=clean_environment(TOPICS_URL=tool.server.url, XDG_STATE_HOME=tool.state_home),
        )

        def over(goal: int = goal, popen: subprocess.Popen[bytes] = popen) -> bool:
            answer = api1.send("GET", f"/v0/topics/{topic}")
            return popen.poll() is not None or (answer.status == 200 and answer["head_seq"] >= goal)

        eventually(over, every_s=0.002, what=f"{goal} records")
        popen.send_signal(signal.SIGKILL)
        code = popen.wait()
        if code == 0:
            break
        kills += code == -signal.SIGKILL
    assert kills >= 2
    records = raw_records(api1, topic)
    assert [record["data"] for record in records] == list(range(1, count + 1))


def doubtful(tool: Tool, topic: str, exported: bytes, *, head_seq: int, last: int) -> None:
    """As if the command had died after it sent its first append, long ago."""
    id = json.loads(exported.splitlines()[0])["id"]
    os.environ["XDG_STATE_HOME"] = str(tool.state_home)
    try:
        path = path_of(tool.server.url, id, {}, None)
    finally:
        del os.environ["XDG_STATE_HOME"]
    begun: dict[str, Any] = {
        "type": "begun",
        "topic": topic,
        "target": topic,
        "first": 1,
        "last": last,
        "head_seq": head_seq,
        "at_ms": 1,
    }
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(json.dumps({"type": "run", "key": "k", "at_ms": 1}) + "\n" + json.dumps(begun) + "\n")


@pytest.mark.parametrize("written", [True, False])
def test_an_append_without_an_answer_is_looked_for(api1: Client, tool: Tool, topic: str, written: bool) -> None:
    """Its key is forgotten; others have written meanwhile."""
    exported = export_of(topic, 8, id=unique())
    api1.append(topic, "before")
    doubtful(tool, topic, exported, head_seq=1, last=5)
    api1.append(topic, 1, 2)  # looks like it, and is not
    if written:
        api1.append(topic, 1, 2, 3, 4, 5)
    api1.append(topic, "other")
    tool.run("import", stdin=exported)
    found = api1.diff(topic).data
    mine = found[3:8] if written else found[4:9]
    assert mine == [1, 2, 3, 4, 5]
    assert found[-3:] == [6, 7, 8]
    assert len(found) == 12


def test_an_append_is_found_behind_a_beginning_that_looks_like_it(api1: Client, tool: Tool, topic: str) -> None:
    """A record of another one, then the batch: the search must not go past where that begins."""
    head, *_, end = export_of(topic, 3, id=unique()).splitlines()
    lines = [json.dumps({"topic": topic, "seq": n, "data": data}).encode() for n, data in enumerate([1, 1, 2], 1)]
    exported = b"\n".join([head, *lines, end])
    api1.append(topic, "before")
    doubtful(tool, topic, exported, head_seq=1, last=3)
    api1.append(topic, 1)
    api1.append(topic, 1, 1, 2)
    done = tool.run("import", stdin=exported)
    assert b"3 were there already" in done.stderr
    assert api1.diff(topic).data == ["before", 1, 1, 1, 2]


def test_a_person_is_asked_where_nobody_can_tell(api1: Client, tool: Tool, topic: str) -> None:
    api1.put(topic, cap_records=2)
    api1.append(topic, "a", "b", "c", "d")
    exported = export_of(topic, 8, id=unique())
    doubtful(tool, topic, exported, head_seq=1, last=5)
    done = tool.run("import", stdin=exported, code=1)
    assert b"--in-doubt write or --in-doubt skip" in done.stderr
    assert api1.state(topic)["head_seq"] == 4
    tool.run("import", "--in-doubt", "skip", stdin=exported)
    assert api1.state(topic)["head_seq"] == 7


# --- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", b"line 3 is not JSON: it ends too early"),
        (b"[1]", b"line 3 is no line of an export"),
        (b'{"data":1}', b"line 3 is no line of an export"),
        (b'{"topic":"T","seq":"x","data":1}', b"line 3 is no line of an export"),
        (b'{"topic":"T"}', b"line 3 has no data"),
        (b'{"topic":"T","seq":1,"data":1}', b"line 3 has seq 1, which does not follow 1"),
        (b'{"topic":"T","seq":3,"data":"\xff"}', b"line 3 is not UTF-8"),
        (b'{"export":2,"topic":"T"}', b"export format 2"),
        (b'{"topic":"T","seq":3,"data":1,"meta":[1]}', b"line 3 has a meta that is no object"),
        (b'{"topic":"T","seq":3,"data":1,"tag":"%b"}' % (b"x" * 5_000), b"line 3 is refused"),
    ],
    ids=itertools.count(),
)
def test_bad_lines_are_named(api1: Client, tool: Tool, topic: str, line: bytes, says: bytes) -> None:
    first, record, *_ = export_of(topic, 1, id=unique()).splitlines()
    bad = line.replace(b'"T"', json.dumps(topic).encode())
    done = tool.run("import", stdin=b"\n".join([first, record, bad, b""]), code=1)
    assert says in done.stderr, done.stderr
    assert api1.diff(topic).data == [1]  # what stands before it is there


def test_a_bad_line_can_be_mended_and_gone_on_with(api1: Client, tool: Tool, topic: str) -> None:
    lines = export_of(topic, 5, id=unique()).splitlines()
    bad = [*lines[:3], b"oops", *lines[3:]]
    tool.run("import", stdin=b"\n".join(bad), code=1)
    assert api1.diff(topic).data == [1, 2]
    tool.run("import", stdin=b"\n".join(lines))
    assert api1.diff(topic).data == [1, 2, 3, 4, 5]


def test_an_export_that_was_cut_short(api1: Client, tool: Tool, topic: str) -> None:
    lines = export_of(topic, 3, id=unique()).splitlines()
    done = tool.run("import", stdin=b"\n".join(lines[:3]), code=1)
    assert b"was cut short" in done.stderr
    assert api1.diff(topic).data == [1, 2]


def test_two_exports_of_one_topic_in_one_input(api1: Client, tool: Tool, topic: str) -> None:
    """The seqs of the second are none that the first has written."""
    first, second = export_of(topic, 3, id=unique()), export_of(topic, 4, id=unique())
    done = tool.run("import", stdin=first + second, code=1)
    assert f"line 6 begins another export, of {topic}: import one after the other".encode() in done.stderr
    assert api1.diff(topic).data == [1, 2, 3]
    tool.run("import", stdin=first)
    tool.run("import", stdin=first + second, code=1)  # the first is there; that does not hide the second
    tool.run("import", stdin=second)
    assert api1.diff(topic).data == [1, 2, 3, 1, 2, 3, 4]


def test_records_twice_without_a_head_between(api1: Client, tool: Tool, topic: str) -> None:
    """The `end` of the first is a line that sends what there is: seq 2 is written when it comes again."""
    head, *records, end = export_of(topic, 3, id=unique()).splitlines()
    done = tool.run("import", stdin=b"\n".join([head, *records, end, *records[1:]]), code=1)
    assert b"line 6 has seq 2, which does not follow 3" in done.stderr
    assert api1.diff(topic).data == [1, 2, 3]


def test_lines_without_a_seq_behind_an_export(api1: Client, tool: Tool, topic: str) -> None:
    """The number of their line is below the seqs of an export whose first records were evicted."""
    head, end = export_of(topic, 0, id=unique()).splitlines()
    old = [json.dumps({"topic": topic, "seq": n, "data": n}).encode() for n in (1_001, 1_002)]
    new = [json.dumps({"topic": topic, "data": n}).encode() for n in (1, 2)]
    tool.run("import", stdin=b"\n".join([head, *old, end, *new]))
    assert api1.diff(topic).data == [1_001, 1_002, 1, 2]


def test_lines_that_came_to_a_file_after_it_was_imported(api1: Client, tool: Tool, topic: str) -> None:
    exported = export_of(topic, 2, id=unique())
    tool.run("import", stdin=exported)
    added = json.dumps({"topic": topic, "data": "new"}).encode()
    done = tool.run("import", stdin=exported + added, code=1)
    assert b"line 5 was not there when this was imported" in done.stderr
    assert api1.diff(topic).data == [1, 2]


def test_a_topic_named_twice_is_exported_once(api1: Client, tool: Tool, topic: str) -> None:
    api1.append(topic, 1, 2)
    exported = tool.run("export", topic, topic).stdout
    assert len(exported.splitlines()) == 4
    tool.run("import", "--into", f"{topic}-2", stdin=exported)
    assert api1.diff(f"{topic}-2").data == [1, 2]


def test_lines_of_any_program(api1: Client, tool: Tool, topic: str) -> None:
    """A topic and data are all that a line needs."""
    text = f'{{"topic":"{topic}","data":1}}\n\n{{"data":{{"b" : 2}},"topic":"{topic}","tag":"x"}}'
    tool.run("import", stdin=text.encode())
    assert api1.diff(topic).data == [1, {"b": 2}]


def test_usage(tool: Tool, tmp_path: Path) -> None:
    for args in (
        ["export"],
        ["export", "--all", "t"],
        ["export", "t", "--data-dir", "x", "--url", "http://localhost:1"],
        ["import", "--into", "x", "--map", "a=b"],
        ["import", "--map", "ab"],
    ):
        tool.run(*args, code=2)
    done = tool.run("export", "no-such-topic", "--out", str(tmp_path / "x"), code=1)
    assert b"no-such-topic" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = tool.run("import", str(tmp_path / "nowhere"), code=1)
    assert b"can't read" in done.stderr
    done = run_topics("export", "t", "--url", "http://127.0.0.1:9")  # type: ignore[assignment]
    assert done.returncode == 1
    assert "Is a server running there?" in done.stderr  # type: ignore[operator]


def test_a_reader_that_has_seen_enough(api1: Client, tool: Tool, topic: str) -> None:
    api1.append(topic, *["x" * 1_000] * 500)
    done = subprocess.run(
        f"{TOPICS} export {topic} | head -1",
        shell=True,
        capture_output=True,
        env=clean_environment(TOPICS_URL=tool.server.url),
        timeout=60,
    )
    assert json.loads(done.stdout)["topic"] == topic
    assert b"Traceback" not in done.stderr
    assert b"Broken" not in done.stderr
