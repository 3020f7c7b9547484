"""`tests/exhaustive.py --campaign NAME`: run campaigns, say how they go, and write down what they did."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from offspring import Ending

from . import ledger
from .campaign import Campaign, Outcome, Say, run
from .platter import POWER
from .registry import CAMPAIGNS, SHARES

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "RELIABILITY.md"

HELP = """examples:
  .venv/bin/python tests/exhaustive.py --campaign crashpoints --hours 0.1
  .venv/bin/python tests/exhaustive.py --campaign decoders --goal 1000000 --seed 5 --ledger
  .venv/bin/python tests/exhaustive.py --campaign crashpoints --unit 17 --only 55/torn/0    one case again
  .venv/bin/python tests/exhaustive.py --table                                             only write the table

Without --seed a run goes on behind the seeds that the ledger has of the campaign. Figures count for the goal if they
are of the same code: the last commit that changed topics/. With --ledger what was done is added to
docs/reliability-runs.json, and docs/RELIABILITY.md gets its table anew, every minute and in the end. A run that gets
SIGTERM or SIGINT leaves the units that are under way, which a later run does again, and writes down the others. Exit
code: 1 if anything was found, 128 + n if signal n cut the run short.
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
        write_table(ledger.read(ledger.PATH))
        return 0
    chosen = [CAMPAIGNS[name] for name in (CAMPAIGNS if "all" in asked.campaign else asked.campaign)]
    if asked.unit is not None:
        return again(chosen[0], asked.unit, asked.only)
    ending = Ending()
    ending.watch()
    outcomes = run_all(
        chosen, hours=asked.hours, goal=asked.goal, seed=asked.seed, jobs=asked.jobs, say=_say, ending=ending,
        to_ledger=asked.ledger,
    )  # fmt: skip
    for outcome in outcomes:
        print(summary(outcome))
    if any(outcome.tally.found for outcome in outcomes):
        return 1
    return ending.code if ending else 0


def run_all(
    chosen: Sequence[Campaign],
    *,
    hours: float,
    goal: int | None,
    seed: int | None,
    jobs: int,
    say: Say,
    ending: Ending,
    to_ledger: bool,
) -> list[Outcome]:
    """One after the other, each with its share of the time that is left."""
    end = time.monotonic() + hours * 3_600
    outcomes: list[Outcome] = []
    for at, campaign in enumerate(chosen):
        if ending:
            break
        known = ledger.read(ledger.PATH)
        version = version_of(ROOT)
        left = max(0.0, end - time.monotonic())
        share = SHARES[campaign.name] / sum(SHARES[each.name] for each in chosen[at:])
        done = ledger.sum_up(known, campaign.name, version=version).counts[campaign.figure]
        wanted = goal if goal is not None else campaign.goal - done
        if wanted <= 0:
            wanted = campaign.goal  # the ledger has it: once more, with other seeds
        seeds = itertools.count(seed) if seed is not None else ledger.seeds_left(known, campaign.name, version=version)
        first = next(seeds)
        say(
            f"{campaign.name}: {wanted:,} {campaign.figure} wanted, {left * share / 60:.0f} minutes, seeds from {first}"
        )
        outcomes.append(
            run(
                campaign,
                goal=wanted,
                until=time.monotonic() + left * share,
                seeds=itertools.chain([first], seeds),
                jobs=jobs,
                say=say,
                ending=ending,
                note=Noted(version, jobs).note if to_ledger else lambda outcome: None,
            )
        )
    return outcomes


class Noted:
    """What one run has in the ledger of a campaign."""

    def __init__(self, version: str, jobs: int) -> None:
        self._version = version
        self._jobs = jobs
        self._before: list[ledger.Entry] = []

    def note(self, outcome: Outcome) -> None:
        version = self._version
        if version_of(ROOT) != version:  # servers that were started since are of other code
            version = f"{version.removesuffix('-dirty')}-dirty"
        entry = ledger.entry_of(outcome, version=version, cores=self._jobs)
        write_table(ledger.add([entry], ledger.PATH, instead_of=self._before))
        self._before = [entry]


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


def again(campaign: Campaign, seed: int, only: str | None) -> int:
    tally = campaign.run(seed, only)
    print(", ".join(f"{name} {count:,}" for name, count in sorted(tally.counts.items())))
    for finding in tally.findings:
        print(f"FOUND {finding.what}\n    again: {finding.repeat(campaign.name)}")
    print(f"{tally.found} found")
    return 1 if tally.found else 0


def told_seeds(outcome: Outcome) -> str:
    told = f"seeds {min(outcome.done)} to {max(outcome.done)}" if outcome.done else "no seed"
    return told + (f", cut short in {', '.join(map(str, sorted(outcome.cut)))}" if outcome.cut else "")


def summary(outcome: Outcome) -> str:
    campaign, tally = outcome.campaign, outcome.tally
    lines = [
        f"{campaign.name}: {outcome.count:,} {campaign.figure} in {outcome.took_s:,.0f} s, {outcome.rate:,.1f}/s, "
        f"{told_seeds(outcome)}, {tally.found} found",
        "    " + ", ".join(f"{name} {count:,}" for name, count in sorted(tally.counts.items())),
    ]
    if tally.times_ms:
        lines.append(f"    back after {outcome.median_ms:,.0f} ms (median), {outcome.p99_ms:,.0f} ms (p99)")
    for kind, count in tally.kinds.most_common():
        lines.append(f"  {count} times: {kind}")
    for finding in tally.findings:
        lines.append(f"FOUND {finding.what}\n    again: {finding.repeat(campaign.name)}")
    return "\n".join(lines)


def version_of(tree: Path) -> str:
    """The last commit that changed the program, and whether it has been changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "topics")
    return git("log", "-1", "--format=%h", "--", "topics") + ("-dirty" if changed else "")


def write_table(entries: Sequence[ledger.Entry]) -> None:
    made = ledger.put_into(DOCUMENT.read_text(), ledger.table(list(CAMPAIGNS.values()), entries))
    ledger.write_whole(DOCUMENT, made.encode())


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:6.0f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
