"""Campaigns: measured searches for loss and corruption, each with a figure that has a goal (docs/RELIABILITY.md).

A campaign is a function from a seed to a Tally. campaign.py runs seeds in worker processes until a goal or a deadline,
tests/exhaustive.py --campaign NAME is how to call one. Each finding carries the command that repeats it, and each
campaign has a test in tests/unit/test_campaign_*.py that plants a fault and expects it to be found.

    tape.py        the calls that a shard makes to its disk, recorded      crashpoints.py  every crash point, every damage
    platter.py     what a disk may hold after them                         ioerrors.py     calls that fail
    stepped.py     random histories of a shard stepped by hand             decoders.py     bytes that nobody wrote
    ledger.py      what was done so far, in all runs                       bitflips.py     a bit of a folder changed
    kills.py       processes of a real server killed under load            inputs.py       hostile input of clients
    walks.py       random histories of a real server
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

# Modules of families that are no packages, by plain names, as pytest finds them.
for _folder in (TESTS / "golden", TESTS / "recovery", TESTS / "unit", TESTS):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
