"""A server made of test roles, as a process of its own: `python serve_roles.py '<json>'`."""

from __future__ import annotations

import os
import sys
import time

import msgspec
import trio

from topics.actors.startup.datadir_lock import DataDir, LockInfo
from topics.actors.supervisor.process import ProcessSpec
from topics.actors.supervisor.supervisor import Supervisor
from topics.errors import StartRefused
from topics.settings import Settings


class Plan(msgspec.Struct, kw_only=True):
    settings: Settings
    specs: list[ProcessSpec]
    links: list[tuple[str, str]] = []
    stop_timeout_ms: int = 5_000


def main() -> int:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    claim = LockInfo(pid=os.getpid(), started_ms=time.time_ns() // 1_000_000, host=plan.settings.host, version="test")
    try:
        folder = DataDir.claim(plan.settings.data_dir, claim)
        supervisor = Supervisor(plan.settings, plan.specs, plan.links, folder, stop_timeout_ms=plan.stop_timeout_ms)
    except StartRefused as exc:
        print(exc, file=sys.stderr)
        return 2
    return trio.run(supervisor.run)


if __name__ == "__main__":
    sys.exit(main())
