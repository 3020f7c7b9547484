"""Links: the supervisor holds one descriptor of each region that is in use, under a label that tells its ends."""

from __future__ import annotations

import os

from topics.actors.supervisor.process import ProcessSpec
from topics.actors.supervisor.process_table import Child, Link
from topics.shm.counters import Board
from topics.shm.region import Region


def held(link: Link) -> list[str]:
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            pass  # the one by which the folder was read
    return [target for target in targets if target.endswith(f"-{link.label} (deleted)")]


def test_a_link_holds_the_region_it_is_up_with_and_no_other() -> None:
    board = Board.create(["gateway-0", "shard-0"])
    link = Link(*(Child(ProcessSpec(row.name, "none", 0), board) for row in board.rows()))
    assert link.label == "gateway-0+shard-0"
    link.down()  # it never was up
    for _ in range(3):
        region = Region.create(4_096, link.label)
        link.keep(region.fd)
        region.close()
        assert link.up
        assert len(held(link)) == 1
    link.down()
    assert not link.up
    assert held(link) == []
    board.close()


def test_a_link_works_without_a_descriptor() -> None:
    """None was left: `topics rings` does not show it, and nothing else is lost."""
    board = Board.create(["gateway-0", "shard-0"])
    link = Link(*(Child(ProcessSpec(row.name, "none", 0), board) for row in board.rows()))
    link.keep(-1)
    assert link.up
    link.down()
    board.close()
