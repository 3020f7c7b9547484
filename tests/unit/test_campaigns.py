"""How campaigns are run: seeds, goals, deadlines, findings; the ledger of what was done, and its table."""

from __future__ import annotations

import itertools
import subprocess
import time
from pathlib import Path

import figures
import pytest
from campaigns import campaign, driver, ledger
from campaigns.campaign import Campaign, Finding, Outcome, Tally
from campaigns.registry import CAMPAIGNS, SHARES


def count(seed: int, only: str | None = None) -> Tally:
    """A campaign that finds something in each tenth seed."""
    tally = Tally()
    tally.add("things", 10)
    tally.times_ms.append(float(seed))
    if seed % 10 == 0:
        tally.find(Finding(seed, "7", f"seed {seed} of /tmp/x/{seed} is wrong"))
    if seed == 13:
        raise ValueError("unlucky")
    return tally


COUNTING = Campaign("counting", "things that are counted", 1_000, "things", count, "things")


def run(goal: int, *, seconds: float = 60.0, first_seed: int = 1) -> Outcome:
    said: list[str] = []
    outcome = campaign.run(
        COUNTING,
        goal=goal,
        until=time.monotonic() + seconds,
        seeds=itertools.count(first_seed),
        jobs=2,
        say=said.append,
    )
    assert said, "long work says how it goes"
    return outcome


def test_seeds_are_taken_until_the_goal_and_findings_stop_nothing() -> None:
    outcome = run(250)
    assert 250 <= outcome.count <= 270
    assert outcome.units * 10 - outcome.count <= 10, "the unlucky one has counted nothing"
    assert sorted(finding.seed for finding in outcome.tally.findings) == [10, 13, 20]
    assert any("unlucky" in finding.what for finding in outcome.tally.findings)
    assert outcome.tally.found == 3
    repeat = next(finding for finding in outcome.tally.findings if finding.seed == 10).repeat("counting")
    assert repeat == ".venv/bin/python tests/exhaustive.py --campaign counting --unit 10 --only 7"


def test_the_time_is_up() -> None:
    assert run(250, seconds=0.0).units == 0


def test_findings_of_one_kind_are_shown_some_times_and_counted_always() -> None:
    tally = Tally()
    for number in range(10):
        tally.find(Finding(number, "", f"seq {number} of /tmp/folder-{number}/x is gone"))
    other = Tally()
    other.find(Finding(99, "", "seq 99 of /tmp/folder-99/x is gone"))
    other.find(Finding(99, "", "something else"))
    tally.take(other)
    assert len(tally.findings) == campaign.EXAMPLES + 1
    assert sorted(tally.kinds.values()) == [1, 11]
    assert tally.found == 12


def test_figures_of_runs_add_up_and_a_run_that_is_repeated_replaces_itself(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    entry = ledger.entry_of(run(100), version="v", cores=2)
    ledger.add([entry], path)
    ledger.add([entry], path)
    later = ledger.entry_of(run(50, first_seed=100), version="v", cores=2)
    entries = ledger.add([later], path)
    assert entries == ledger.read(path)
    assert len(entries) == 2
    total = ledger.sum_up(entries, "counting")
    assert total.counts["things"] == entry.counts["things"] + later.counts["things"]
    assert total.worst_p99_ms >= 100
    assert next(ledger.seeds_left(entries, "counting", version="v")) == later.first_seed + later.units
    [row] = ledger.table([COUNTING], entries).splitlines()[2:]
    assert f"| `v` | {total.counts['things']:,} | {total.findings} |" in row


def test_figures_of_older_code_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    ledger.add([ledger.entry_of(run(100), version="old", cores=2)], path)
    fresh = ledger.entry_of(run(50, first_seed=100), version="new", cores=2)
    entries = ledger.add([fresh], path)
    assert ledger.newest(entries, "counting") == "new"
    assert ledger.sum_up(entries, "counting", version="new").counts["things"] == fresh.counts["things"]
    assert ledger.sum_up(entries, "counting", version="newer").counts["things"] == 0
    [row] = ledger.table([COUNTING], entries).splitlines()[2:]
    assert f"| `new` | {fresh.counts['things']:,} | " in row
    assert f"| {entries[0].counts['things']:,} | " in row


def test_seeds_of_units_that_were_cut_are_done_by_the_next_run_of_the_same_code(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    outcome = Outcome(COUNTING, Tally(), done={3, 4, 6, 9})
    entry = ledger.entry_of(outcome, version="v", cores=2)
    assert (entry.first_seed, entry.units, entry.left_out) == (3, 4, [5, 7, 8])
    assert entry.seeds == outcome.done
    entries = ledger.add([entry], path)
    assert list(itertools.islice(ledger.seeds_left(entries, "counting", version="v"), 5)) == [5, 7, 8, 10, 11]
    assert next(ledger.seeds_left(entries, "counting", version="newer")) == 10, (
        "the cases of a row of seeds are one code"
    )
    assert next(ledger.seeds_left(entries, "another", version="v")) == 1
    more = ledger.entry_of(Outcome(COUNTING, Tally(), done={5, 8, 10}), version="v", cores=2)
    entries = ledger.add([more], path)
    assert list(itertools.islice(ledger.seeds_left(entries, "counting", version="v"), 2)) == [7, 11]


def test_a_run_that_writes_again_replaces_what_it_has_written(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    others = ledger.entry_of(Outcome(COUNTING, Tally(), done={1}), version="v", cores=2)
    ledger.add([others], path)
    first = ledger.entry_of(Outcome(COUNTING, Tally(), done={6}), version="v", cores=2)
    ledger.add([first], path)
    second = ledger.entry_of(Outcome(COUNTING, Tally(), done={5, 6}), version="v", cores=2)
    assert ledger.add([second], path, instead_of=[first]) == [others, second]
    assert [each.name for each in tmp_path.iterdir()] == ["runs.json"]


def test_code_is_named_by_the_last_commit_that_changed_the_program(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        git("add", "-A")

    git("init", "-q")
    write("topics/a.py", "1")
    git("commit", "-qm", "one")
    first = driver.version_of(tmp_path)
    write("docs/runs.json", "[]")
    assert driver.version_of(tmp_path) == first
    git("commit", "-qm", "two")
    assert driver.version_of(tmp_path) == first
    write("topics/a.py", "2")
    assert driver.version_of(tmp_path) == f"{first}-dirty"
    git("commit", "-qm", "three")
    assert driver.version_of(tmp_path) not in (first, f"{first}-dirty", "")


def test_the_table_of_the_document_is_made_of_the_ledger() -> None:
    text = (driver.ROOT / "docs" / "RELIABILITY.md").read_text()
    assert ledger.put_into(text, ledger.table(list(CAMPAIGNS.values()), ledger.read())) == text, (
        "run tests/exhaustive.py --table"
    )
    with pytest.raises(ValueError, match="no place"):
        ledger.put_into("no marks", "table")


def test_every_campaign_has_its_time_its_figures_and_its_test() -> None:
    assert set(SHARES) == set(CAMPAIGNS) == set(driver.FIGURES)
    for name, each in CAMPAIGNS.items():
        assert set(driver.FIGURES[name].values()) <= set(figures.FIGURES)
        assert each.name == name
        assert (Path(__file__).parent / f"test_campaign_{name}.py").exists()


def test_a_campaign_must_be_named() -> None:
    for wrong in ([], ["--campaign", "nothing"], ["--campaign", "kills", "--campaign", "walks", "--unit", "1"]):
        with pytest.raises(SystemExit):
            driver.arguments(wrong)
    with pytest.raises(SystemExit) as ended:
        driver.arguments(["--campaign", "kills", "--help"])
    assert ended.value.code == 0
