"""`tests/exhaustive.py --campaign NAME`: run campaigns, say how they go, and write down what they did."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import ledger
from .campaign import Campaign, Outcome, Say, run
from .platter import POWER
from .registry import CAMPAIGNS, SHARES

ROOT = Path(__file__).resolve().parent.parent.parent

HELP = """examples:
  .venv/bin/python tests/exhaustive.py --campaign crashpoints --hours 0.1
  .venv/bin/python tests/exhaustive.py --campaign decoders --goal 1000000 --seed 5 --ledger
  .venv/bin/python tests/exhaustive.py --campaign crashpoints --unit 17 --only 55/torn/0    one case again
  .venv/bin/python tests/exhaustive.py --table                                             only write the table

Without --seed a run goes on behind the seeds that the ledger has of the campaign. Figures count for the goal if they
are of the same code: the last commit that changed topics/. With --ledger what was done is added to
docs/reliability-runs.json, and docs/RELIABILITY.md gets its table anew. Exit code: 1 if anything was found.
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:12} {each.title}; goal {each.goal:,}" for name, each in CAMPAIGNS.items())
    parser = argparse.ArgumentParser(
        prog="tests/exhaustive.py --campaign",
        description=f"{__doc__}\n\ncampaigns:\n{listed}",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--campaign", action="append", choices=[*CAMPAIGNS, "all"], help="which; may be given several times"
    )
    parser.add_argument("--hours", type=float, default=1.0, help="for all of them together; default 1")
    parser.add_argument(
        "--goal", type=int, help="end when so much is done; default: what the ledger lacks of this code"
    )
    parser.add_argument("--seed", type=int, help="the first one; default: behind those of the ledger")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="worker processes; default: one a core"
    )
    parser.add_argument("--unit", type=int, help="run this seed alone, and say everything that was found")
    parser.add_argument("--only", help="with --unit: this case of it")
    parser.add_argument("--ledger", action="store_true", help="add what was done to docs/reliability-runs.json")
    parser.add_argument("--table", action="store_true", help="write the table of docs/RELIABILITY.md, run nothing")
    asked = parser.parse_args(argv)
    if not asked.table and not asked.campaign:
        parser.error("--campaign or --table expected")
    if asked.unit is not None and len(asked.campaign) != 1:
        parser.error("--unit belongs to one campaign")
    if asked.hours <= 0 or asked.jobs < 1:
        parser.error("--hours must be above 0, --jobs at least 1")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    asked = arguments(argv)
    if asked.table:
        write_table(ledger.read())
        return 0
    chosen = [CAMPAIGNS[name] for name in (CAMPAIGNS if "all" in asked.campaign else asked.campaign)]
    if asked.unit is not None:
        return again(chosen[0], asked.unit, asked.only)
    outcomes = run_all(chosen, hours=asked.hours, goal=asked.goal, seed=asked.seed, jobs=asked.jobs, say=_say)
    if asked.ledger:
        note(outcomes, jobs=asked.jobs)
    for outcome in outcomes:
        print(summary(outcome))
    return 1 if any(outcome.tally.found for outcome in outcomes) else 0


def run_all(
    chosen: Sequence[Campaign], *, hours: float, goal: int | None, seed: int | None, jobs: int, say: Say
) -> list[Outcome]:
    """One after the other, each with its share of the time that is left."""
    end = time.monotonic() + hours * 3_600
    known = ledger.read()
    outcomes = []
    for at, campaign in enumerate(chosen):
        left = max(0.0, end - time.monotonic())
        share = SHARES[campaign.name] / sum(SHARES[each.name] for each in chosen[at:])
        done = ledger.sum_up(known, campaign.name, version=version_of(ROOT)).counts[campaign.figure]
        wanted = goal if goal is not None else campaign.goal - done
        if wanted <= 0:
            wanted = campaign.goal  # the ledger has it: once more, with other seeds
        first = seed if seed is not None else next_seed(known, campaign.name)
        say(
            f"{campaign.name}: {wanted:,} {campaign.figure} wanted, {left * share / 60:.0f} minutes, seeds from {first}"
        )
        outcomes.append(
            run(campaign, goal=wanted, until=time.monotonic() + left * share, first_seed=first, jobs=jobs, say=say)
        )
    return outcomes


# What a campaign counts, as a figure of tests/figures.py.
FIGURES: dict[str, dict[str, str]] = {
    "crashpoints": {"cases_killed": "crash_points", "cases_half": "crash_points", "histories": "histories"}
    | dict.fromkeys([f"cases_{damage}" for damage in POWER], "power_cuts")
    | {"cases": "recoveries", "checked": "checked"},
    "ioerrors": {"errors": "disk_faults", "cases": "recoveries"},
    "kills": {"kills": "kills", "records": "acknowledged", "checked": "checked"},
    "walks": {"runs": "histories", "fault_pause": "stops", "checked": "checked"},
    "inputs": {"inputs": "fuzzed"},
    "decoders": {"inputs": "decoded"},
    "bitflips": {"flips": "damages"},
}


def figures_of(outcomes: Sequence[Outcome]) -> Counter[str]:
    found: Counter[str] = Counter()
    for outcome in outcomes:
        for count, figure in FIGURES[outcome.campaign.name].items():
            found[figure] += outcome.tally.counts[count]
    return found


def next_seed(entries: Sequence[ledger.Entry], campaign: str) -> int:
    return max((entry.first_seed + entry.units for entry in entries if entry.campaign == campaign), default=1)


def again(campaign: Campaign, seed: int, only: str | None) -> int:
    tally = campaign.run(seed, only)
    print(", ".join(f"{name} {count:,}" for name, count in sorted(tally.counts.items())))
    for finding in tally.findings:
        print(f"FOUND {finding.what}\n    again: {finding.repeat(campaign.name)}")
    print(f"{tally.found} found")
    return 1 if tally.found else 0


def summary(outcome: Outcome) -> str:
    campaign, tally = outcome.campaign, outcome.tally
    lines = [
        f"{campaign.name}: {outcome.count:,} {campaign.figure} in {outcome.took_s:,.0f} s, {outcome.rate:,.1f}/s, "
        f"seeds {outcome.first_seed} to {outcome.first_seed + outcome.units - 1}, {tally.found} found",
        "    " + ", ".join(f"{name} {count:,}" for name, count in sorted(tally.counts.items())),
    ]
    for kind, count in tally.kinds.most_common():
        lines.append(f"  {count} times: {kind}")
    for finding in tally.findings:
        lines.append(f"FOUND {finding.what}\n    again: {finding.repeat(campaign.name)}")
    return "\n".join(lines)


def note(outcomes: Sequence[Outcome], *, jobs: int) -> None:
    version = version_of(ROOT)
    write_table(ledger.add([ledger.entry_of(each, version=version, cores=jobs) for each in outcomes if each.units]))


def version_of(tree: Path) -> str:
    """The last commit that changed the program, and whether it has been changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "topics")
    return git("log", "-1", "--format=%h", "--", "topics") + ("-dirty" if changed else "")


def write_table(entries: Sequence[ledger.Entry]) -> None:
    path = ROOT / "docs" / "RELIABILITY.md"
    path.write_text(ledger.put_into(path.read_text(), ledger.table(list(CAMPAIGNS.values()), entries)))


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:6.0f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
