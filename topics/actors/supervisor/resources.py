"""What must outlive a child and is passed to each of them: the listening socket, the board, the bells, the usage page,
and the regions of its links.

Rules: the regions are made for one start, and unmapped here when both ends have them; the rest is made once, before
any child starts, and closed when none is left.

Crash: of a child, nothing of this changes; of the supervisor, all of it goes, because nothing of it has a name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import msgspec

from topics import limits
from topics.actors.control import Boot
from topics.actors.startup.datadir_lock import LayoutPlan
from topics.actors.startup.listener import bind_listener
from topics.actors.supervisor.process import ProcessSpec
from topics.actors.supervisor.process_table import Child, Link
from topics.keys import Key
from topics.settings import Settings
from topics.shm.counters import Board
from topics.shm.doorbell import Doorbell
from topics.shm.layout import link_bytes
from topics.shm.region import Region
from topics.shm.ring import format_link
from topics.shm.usage import Usage


class Estate:
    def __init__(
        self, settings: Settings, specs: Sequence[ProcessSpec], *, own_name: str, listener: socket.socket | None
    ) -> None:
        self._settings = settings
        self.listener = listener or bind_listener(settings.host, settings.port)
        self.board = Board.create([own_name, *(spec.name for spec in specs)])
        doors = sum(spec.listener for spec in specs)
        # They are numbered from 1. A reload may bring as many as there are, and numbers of before are not used again.
        keys = 2 * limits.MAX_API_KEYS if settings.api_keys else 0
        self.usage = Usage.create(gateways=doors, keys=keys + 1)
        self._bell_fds = {spec.name: Doorbell.create_fd() for spec in specs}
        self.link_bytes = link_bytes(settings.ring_bytes)

    def take_keys(self, keys: tuple[Key, ...]) -> None:
        """Processes that start from now on get these."""
        self._settings = msgspec.structs.replace(self._settings, api_keys=keys)

    def make_regions(self, child: Child) -> dict[Link, Region]:
        """Fresh memory for every link whose other end lives; the rest is made when that end starts."""
        regions: dict[Link, Region] = {}
        try:
            for link in child.links:
                if link.peer_of(child).process is None:
                    continue
                link.generation += 1
                region = regions[link] = Region.create(self.link_bytes, link.label)
                format_link(region.view, generation=link.generation, ring_bytes=self._settings.ring_bytes)
        except BaseException:
            for region in regions.values():
                region.close()
            raise
        return regions

    def boot(self, child: Child, regions: dict[Link, Region], plan: LayoutPlan) -> Boot:
        return Boot(
            name=child.name,
            module=child.spec.module,
            index=child.spec.index,
            supervisor_pid=os.getpid(),
            settings=self._settings,
            board_size=self.board.region.size,
            bells=list(self._bell_fds),
            links=[link.grant_for(child, region.size) for link, region in regions.items()],
            listener=child.spec.listener,
            holds_lock=child.spec.stores,
            layout=plan.layout,
            shards=plan.shards,
            old_layout=plan.old_layout,
            old_shards=plan.old_shards,
            usage_size=self.usage.region.size if child.spec.listener else 0,
            cold=plan.cold if child.spec.stores else None,
            cold_id=plan.cold_id if child.spec.stores else None,
            inherits=child.inheritance is not None,
        )

    def boot_fds(self, child: Child, regions: dict[Link, Region], *, lock_fd: int) -> list[int]:
        fds = [self.board.region.fd]
        if child.spec.listener:
            fds.append(self.usage.region.fd)
        fds += [*self._bell_fds.values(), *(region.fd for region in regions.values())]
        if child.spec.listener:
            fds.append(self.listener.fileno())
        if child.spec.stores:
            fds.append(lock_fd)
        if child.inheritance is not None:
            fds.append(child.inheritance.fileno())
        return fds

    def close(self) -> None:
        self.listener.close()
        for fd in self._bell_fds.values():
            os.close(fd)
        self.board.close()
        self.usage.close()
