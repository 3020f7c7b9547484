"""What `topics queue` says, what a dead letter is and becomes, and what the journal of a redrive remembers."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from topics.cli.client.queue import JobPrinter, config_rows, duration_text, jobs_rows, view_of
from topics.cli.client.queue_redrive import redriven_words
from topics.client import QueueCounts, Record, TopicState
from topics.tools import redrive_journal as journal_module
from topics.tools.dead_letters import CannotMove, DeadLetter
from topics.tools.redrive import Tally
from topics.tools.redrive_journal import (
    Append,
    Journal,
    JournalError,
    Open,
    Planned,
    Settled,
    boot_id,
    path_of,
    peek,
    replay,
)
from topics.tools.tag_glob import TagGlob

CONFIG: dict[str, Any] = {
    "type": "queue",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durability": "disk",
    "idempotency_window_ms": 120_000,
    "lease_ms": 30_000,
    "claim_jitter_ms": 0,
    "max_deliveries": 0,
    "dead_letter": None,
    "leases_durable": False,
}
STAMP = b'"$dead_letter_deliveries":"5","$dead_letter_src_seq":"17"'
META = b'{"a":  1.50, "$dead_letter_from":"jobs", "z": {"k": [1e3]}, %b}' % STAMP


def record(seq: int = 7, *, data: bytes = b'{"n": 1.50}', meta: bytes = META, **fields: Any) -> Record:
    return Record(seq=seq, ts_ms=fields.pop("ts_ms", 1_000), data=Raw(data), meta=Raw(meta), **fields)


def letter(seq: int = 7, *, topic: str = "jobs.dlq", **fields: Any) -> DeadLetter:
    return DeadLetter(topic, record(seq, **fields))


# --- dead letters ------------------------------------------------------------------------------------


def test_a_redriven_job_is_what_it_was() -> None:
    job = letter(tag="t", node="n").job
    assert (job.tag, job.node, bytes(job.data)) == ("t", "n", b'{"n": 1.50}')
    assert job.meta is not None
    assert {name: bytes(value) for name, value in job.meta.items()} == {"a": b"1.50", "z": b'{"k": [1e3]}'}
    assert list(job.meta) == ["a", "z"]


def test_meta_that_was_provenance_alone_is_gone() -> None:
    assert letter(meta=b'{"$dead_letter_from":"jobs","$dead_letter_src_seq":1}').job.meta is None
    assert letter(meta=b"").job.meta is None


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        (STAMP, "from=jobs:17 deliveries=5"),
        (b'"$dead_letter_deliveries":5,"$dead_letter_src_seq":17', "from=jobs:17 deliveries=5"),  # of older servers
        (
            rb'"$dead_letter_deliveries":null,"$dead_letter_src_seq":"\u001b[2J"',
            r'from=jobs:"\u001b[2J" deliveries=null',
        ),
    ],
)
def test_letters_of_older_servers_are_told_alike(stamp: bytes, words: str) -> None:
    meta = b'{"$dead_letter_from":"jobs",%b}' % stamp
    assert letter(meta=meta).provenance == words
    assert letter(meta=meta).job.meta is None


def test_where_it_goes() -> None:
    assert letter().target(None) == "jobs"
    assert letter().target("other") == "other"
    with pytest.raises(CannotMove, match=r"record 9 of jobs\.dlq does not say which queue it comes from"):
        letter(9, meta=b"").target(None)
    with pytest.raises(CannotMove, match="does not say"):
        letter(meta=b'{"$dead_letter_from":5}').target(None)
    with pytest.raises(CannotMove, match="would go where it is"):
        letter(topic="jobs").target(None)


def test_the_key_is_everything_it_is() -> None:
    """Also its place and time: two equal ones are two."""
    same = letter().key
    assert same == letter().key
    assert len(same) <= 256
    others = [
        letter(8),
        letter(topic="other.dlq"),
        letter(ts_ms=1_001),
        letter(tag=""),
        letter(node=""),
        letter(tag="t"),
        letter(node="t"),
        letter(data=b'{"n": 1.5}'),
        letter(meta=b"{}"),
    ]
    assert len({same, *(other.key for other in others)}) == len(others) + 1


def test_parts_of_the_key_do_not_flow_into_one_another() -> None:
    assert letter(tag="ab", node="c").key != letter(tag="a", node="bc").key


def test_where_it_comes_from_in_words() -> None:
    assert letter().provenance == "from=jobs:17 deliveries=5"
    assert letter(meta=b'{"$dead_letter_from":"jobs"}').provenance == "from=jobs"
    assert letter(meta=b'{"other":1}').provenance is None


@pytest.mark.parametrize(
    ("glob", "tag", "matches"),
    [
        ("a", "a", True),
        ("a", "ab", False),
        ("a*", "ab", True),
        ("a*", "a", True),
        ("a*", "b", False),
        ("*", "", True),
        ("*", None, False),
        ("a", None, False),
        ("a?", "ab", False),
        ("[a]", "[a]", True),
    ],
)
def test_globs(glob: str, tag: str | None, matches: bool) -> None:
    assert TagGlob(glob).matches(tag) is matches


@pytest.mark.parametrize("glob", ["", "a*b", "**", "*a"])
def test_globs_that_a_delete_would_not_take(glob: str) -> None:
    with pytest.raises(ValueError, match=r"empty|one \*"):
        TagGlob(glob)


# --- the journal -------------------------------------------------------------------------------------


def append(key: str, seq: int = 1, **fields: Any) -> Append:
    return Append(key=key, seq=seq, **{"target": "jobs", "head_seq": 0, "at_ms": 5, **fields})


def keys(found: list[Append]) -> list[str]:
    return [entry.key for entry in found]


def test_a_journal_remembers_what_is_open(tmp_path: Path) -> None:
    path = str(tmp_path / "state" / "topics" / "j.jsonl")
    journal = Journal(path)
    journal.begin(append("a"))
    journal.write("a")
    journal.begin(append("b", 2))
    assert journal.is_written("a")
    assert not journal.is_written("b")
    journal.close()

    again = Journal(path)
    assert keys(again.unremoved()) == ["a"]
    assert again.doubts() == [append("b", 2)]
    again.settle(["a"])
    assert keys(again.unremoved()) == []
    assert os.path.getsize(path) > 0
    again.settle(["b"])
    assert os.path.getsize(path) == 0
    again.close()
    assert oct(os.stat(path).st_mode & 0o777) == "0o600"


def test_the_first_beginning_counts(tmp_path: Path) -> None:
    """The target has remembered the key since then, if at all."""
    journal = Journal(str(tmp_path / "j"))
    journal.begin(append("a", at_ms=5))
    journal.begin(append("a", at_ms=900))
    assert journal.doubts() == [append("a", at_ms=5)]
    journal.close()


def test_it_is_synced_before_the_append_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(str(tmp_path / "j"))
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: sizes.append(os.fstat(fd).st_size))
    journal.plan([append("a"), append("b")])
    assert sizes == [os.path.getsize(journal.path)]
    journal.close()


def test_a_plan_is_no_question_unless_the_machine_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "j")
    journal = Journal(path)
    journal.plan([append("a"), append("b"), append("c")])
    journal.begin(append("a"))
    journal.write("a")
    journal.begin(append("b"))
    journal.close()
    same = Journal(path)
    assert (keys(same.unremoved()), keys(same.doubts())) == (["a"], ["b"])
    same.close()
    monkeypatch.setattr(journal_module, "boot_id", lambda: "another")
    other = Journal(path)
    assert (keys(other.unremoved()), keys(other.doubts())) == (["a"], ["b", "c"])
    other.settle(["a", "b", "c"])
    assert os.path.getsize(path) == 0
    other.close()


def test_a_plan_that_ends_early(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    journal = Journal(path)
    journal.plan([append("a"), append("b")])
    journal.begin(append("a"))
    journal.end_plan()
    assert os.path.getsize(path) > 0
    journal.settle(["a"])
    assert os.path.getsize(path) == 0
    journal.plan([])
    assert os.path.getsize(path) == 0
    journal.close()


def test_boots_have_names() -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}", boot_id())


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    journal = Journal(str(path))
    journal.begin(append("a"))
    whole = path.stat().st_size
    journal.begin(append("b"))
    journal.close()
    os.truncate(path, path.stat().st_size - cut)
    again = Journal(str(path))
    assert keys(again.doubts()) == ["a"]
    assert path.stat().st_size == whole
    again.begin(append("c"))
    again.close()
    assert set(peek(str(path)).begun) == {"a", "c"}


def test_a_line_that_is_none_is_not_passed_over() -> None:
    with pytest.raises(JournalError, match="line 2 of the journal j can't be read"):
        replay(b'{"type":"written","key":"a"}\nnonsense\n', path="j")
    with pytest.raises(JournalError, match="line 1"):
        replay(b'{"type":"unheard of"}\n', path="j")


def test_one_at_a_time(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "j"))
    with pytest.raises(JournalError, match="another redrive"):
        Journal(str(tmp_path / "j"))
    journal.close()
    Journal(str(tmp_path / "j")).close()


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="XDG_STATE_HOME"):
        Journal(str(tmp_path / "file" / "j"))


def test_looking_at_a_journal_changes_nothing(tmp_path: Path) -> None:
    assert peek(str(tmp_path / "none")).begun == {}
    assert list(tmp_path.iterdir()) == []


def test_where_journals_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    one = path_of("http://a:1", "jobs:dlq")
    assert re.fullmatch(r"/state/topics/redrive-jobs_dlq-[0-9a-f]{12}\.jsonl", one)
    names = {
        one,
        path_of("http://a:2", "jobs:dlq"),
        path_of("http://a:1", "jobs_dlq"),
        path_of("http://a:1", "x" * 255),
    }
    assert len(names) == 4
    assert all(len(os.path.basename(name)) < 200 for name in names)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert path_of("http://a:1", "x").startswith("/home/somebody/.local/state/topics/")


def test_settling_what_is_not_known() -> None:
    found = Open("boot")
    found.apply(Planned(boot="boot", appends=[append("a")]))
    found.apply(Settled(keys=["b"]))
    assert set(found.planned) == {"a"}


# --- words -------------------------------------------------------------------------------------------


def view(first: Record | None, *, count: int = 5, waiting: int | None = None, **config: Any) -> Any:
    state = TopicState(topic="jobs", head_seq=20, earliest_seq=16, count=count, bytes=500, config={**CONFIG, **config})
    counts = QueueCounts(ready=2, in_flight=1, dead_lettered=4)
    return view_of(state, counts, first, waiting, now_ms=61_000)


def test_the_view_of_a_queue() -> None:
    found = view(record(16))
    assert (found.delayed, found.lag) == (2, 5)
    assert (found.oldest.seq, found.oldest.age_ms) == (16, 60_000)
    assert dict(jobs_rows(found))["oldest"] == "seq 16, 1m 0s ago"


def test_the_view_of_an_empty_queue() -> None:
    found = view(None, count=0)
    assert (found.delayed, found.lag, found.oldest) == (0, 0, None)
    assert "oldest" not in dict(jobs_rows(found))


def test_a_clock_behind_the_servers() -> None:
    assert view(record(16, ts_ms=99_000)).oldest.age_ms == 0


@pytest.mark.parametrize(
    ("config", "waiting", "row", "words"),
    [
        ({}, None, "given up after", "never"),
        ({"max_deliveries": 5}, None, "given up after", "never"),
        ({"max_deliveries": 5, "dead_letter": "d"}, None, "given up after", "5 deliveries"),
        ({"max_deliveries": 1, "dead_letter": "d"}, None, "given up after", "1 delivery"),
        ({}, None, "dead letters to", "nowhere"),
        ({"dead_letter": "d"}, None, "dead letters to", "d"),
        ({"dead_letter": "d"}, 1_200, "dead letters to", "d (1,200 there now)"),
        ({"ttl_ms": 3_600_000}, None, "jobs expire after", "1h 0m"),
        ({"cap_records": 1_000}, None, "full at", "1,000 jobs: the oldest go"),
        (
            {"cap_records": 10, "cap_bytes": 9_999, "discard": "reject"},
            None,
            "full at",
            "10 jobs or 9,999 bytes: new ones are refused",
        ),
    ],
)
def test_config_in_words(config: dict[str, Any], waiting: int | None, row: str, words: str) -> None:
    assert dict(config_rows(view(None, waiting=waiting, **config)))[row] == words


def test_config_that_is_off_is_not_shown() -> None:
    assert {"jobs expire after", "full at"}.isdisjoint(dict(config_rows(view(None))))


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0 ms"), (100, "100 ms"), (1_000, "1s"), (1_500, "1,500 ms"), (30_000, "30s"), (90_000, "1m 30s")],
)
def test_durations(ms: int, text: str) -> None:
    assert duration_text(ms) == text


def tally(finished: int = 0, **moved: int) -> Tally:
    found = Tally()
    found.moved.update(moved)
    found.finished = finished
    return found


@pytest.mark.parametrize(
    ("found", "code", "left", "words"),
    [
        (tally(), 0, 0, "nothing was redriven from d"),
        (tally(), 1, None, "nothing was redriven from d"),
        (tally(), 0, 3, "nothing was redriven from d; 3 left"),
        (tally(jobs=1), 0, 0, "redrove 1 dead letter of d: 1 to jobs"),
        (tally(mail=2, jobs=1_000), 0, 7, "redrove 1,002 dead letters of d: 1,000 to jobs, 2 to mail; 7 left"),
        (tally(jobs=2), 130, 5, "redrove 2 dead letters of d: 2 to jobs before it was interrupted"),
        (tally(jobs=2), 1, None, "redrove 2 dead letters of d: 2 to jobs before that"),
        (tally(3), 0, 0, "redrove 0 dead letters of d; removed 3 that an earlier redrive had written"),
    ],
)
def test_the_last_line(found: Tally, code: int, left: int | None, words: str) -> None:
    assert redriven_words("d", found, code, left) == words


def test_a_line_of_peek() -> None:
    now = time.time_ns() // 1_000_000
    shown = JobPrinter(as_json=False).line(letter(data=b'{"a" : "\\u001b[31m\x7f"}', tag="t\x1b", node="n", ts_ms=now))
    assert shown.split("  ")[1:] == [
        "7",
        "node=n",
        "tag=t\\u001b",
        "from=jobs:17 deliveries=5",
        '{"a":"\\u001b[31m\\u007f"}',
    ]


def test_json_of_peek_is_as_it_was_sent(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = JobPrinter(as_json=True)
    for raw in (b'{"$seq":7,"$ts":1,"data":{"n":  1.50}}', b'{"$seq":8,"$ts":1,"data":{"n":\n1.50}}'):
        printer.show("jobs", Raw(raw), record())
    sys.stdout.flush()
    first, second = capfdbinary.readouterr().out.splitlines()
    assert first == b'{"topic":"jobs","$seq":7,"$ts":1,"data":{"n":  1.50}}'
    assert json.loads(second)["data"] == {"n": 1.5}
