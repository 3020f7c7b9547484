"""Campaigns: measured searches for loss and corruption, each with a figure that has a goal (docs/RELIABILITY.md).

A campaign is a function from a seed to a Tally. campaign.py runs seeds in worker processes until a goal or a deadline,
tests/exhaustive.py --campaign NAME is how to call one. Each finding carries the command that repeats it, and each
campaign has a test in tests/unit/test_campaign_*.py that plants a fault and expects it to be found.

    crashpoints.py  every crash point of a shard with every damage      tape.py      calls of a shard to its disk
    ioerrors.py     calls of the disk that fail                         platter.py   what a disk may hold after them
    kills.py        processes of a real server killed under load        stepped.py   histories of a shard, by hand
    walks.py        random histories of a real server                   shrinking.py a failing list made shorter
    inputs.py       hostile input of clients                            ledger.py    what all runs did together
    decoders.py     bytes of files and rings that nobody wrote          registry.py  all campaigns, and their time
    bitflips.py     a bit of a folder changed                           driver.py    the command
                                                                        copies.py    routers in those histories
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

# Modules of families that are no packages, by plain names, as pytest finds them.
for _folder in (TESTS / "golden", TESTS / "recovery", TESTS / "unit", TESTS):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
