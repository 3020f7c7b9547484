"""The first steps of a child, driven by hand over its control channel."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from topics.actors.child import adopt_orphans
from topics.actors.context import EXIT_FAILED, EXIT_ORPHANED
from topics.actors.control import (
    Boot,
    Failed,
    LayoutCommitted,
    LinkDown,
    LinkGrant,
    LinkUp,
    Message,
    Prepare,
    Ready,
    Stop,
    Stopped,
)
from topics.actors.link import Link
from topics.actors.supervisor.process import ChildProcess
from topics.actors.supervisor.spawner import Spawner
from topics.settings import Settings
from topics.shm.counters import Board, State, Word
from topics.shm.doorbell import Doorbell
from topics.shm.layout import link_bytes
from topics.shm.region import Region
from topics.shm.ring import format_link

RING_BYTES = 65_536


class Parent:
    """What a supervisor gives to one child, and nothing else."""

    def __init__(self, tmp_path: Any, module: str, process: ChildProcess) -> None:
        self.board = Board.create(["echo-0", "peer-0"])
        self.bell_fds = [Doorbell.create_fd(), Doorbell.create_fd()]
        self.settings = Settings(
            data_dir=str(tmp_path), ring_bytes=RING_BYTES, heartbeat_ms=50, dumpable=os.geteuid() != 0
        )
        self.module = module
        self.process = process
        self.is_reaped = False

    @property
    def row(self) -> Any:
        return self.board.row("echo-0")

    def boot(self, *, supervisor_pid: int | None = None) -> None:
        boot = Boot(
            name="echo-0",
            module=self.module,
            index=0,
            supervisor_pid=supervisor_pid or os.getpid(),
            settings=self.settings,
            board_size=self.board.region.size,
            bells=["echo-0", "peer-0"],
            links=[],
            listener=False,
            holds_lock=False,
            layout=1,
            shards=1,
        )
        self.process.channel.send_nowait(boot, [self.board.region.fd, *self.bell_fds])

    def link(self, generation: int) -> Link:
        region = Region.create(link_bytes(RING_BYTES))
        format_link(region.view, generation=generation, ring_bytes=RING_BYTES)
        grant = LinkGrant(peer="peer-0", side=0, generation=generation, size=region.size)
        self.process.channel.send_nowait(LinkUp(grant), [region.fd])
        bell = Doorbell(self.bell_fds[0], self.board.words, self.board.sleeping_index("echo-0"))
        return Link("echo-0", region.view, side=1, generation=generation, bell=bell)

    async def hear(self) -> Message:
        with trio.fail_after(30):
            await trio.lowlevel.wait_readable(self.process.channel.sock)
            return self.process.channel.receive()[0]

    async def exit(self) -> str:
        with trio.fail_after(30):
            await self.process.wait_exit()
        self.is_reaped = True
        return self.process.reap()


@pytest.fixture
def run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def drive(script: Callable[[Parent], Any], module: str = "roles.echo") -> None:
        async def main() -> None:
            spawner = Spawner()
            parent = Parent(tmp_path, module, await spawner.spawn())
            try:
                await script(parent)
            finally:
                spawner.close()
                adopt_orphans(False)  # what other tests leave is not ours
                if not parent.is_reaped:
                    parent.process.kill()
                    await parent.exit()

        trio.run(main)

    return drive


def test_what_a_role_imports_later_is_prepared_too(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.process.channel.send_nowait(Prepare(parent.module))
        heard = await parent.hear()
        assert isinstance(heard, Failed)
        assert "roles.broken" in heard.reason
        await parent.exit()

    run(script, "roles.loads_later")


async def until(look: Callable[[], Any]) -> Any:
    with trio.fail_after(30):
        while not (answer := look()):
            await trio.sleep(0.005)
        return answer


def test_exits_when_the_supervisor_goes_before_boot(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.process.channel.close()
        assert await parent.exit() == f"exit code {EXIT_ORPHANED}"

    run(script)


def test_exits_when_its_parent_is_not_the_supervisor(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.boot(supervisor_pid=1)
        assert await parent.exit() == f"exit code {EXIT_ORPHANED}"

    run(script)


def test_exits_at_once_when_the_channel_closes(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.boot()
        assert await parent.hear() == Ready()
        parent.process.channel.close()
        assert await parent.exit() == f"exit code {EXIT_ORPHANED}"

    run(script)


def test_nonsense_instead_of_boot(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.process.channel.send_nowait(Stop())
        assert await parent.exit() == "exit code 1"

    run(script)


def test_beats_serves_links_and_stops(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.boot()
        assert await parent.hear() == Ready()
        assert parent.row.state is State.READY
        beat = parent.row[Word.HEARTBEAT]
        await until(lambda: parent.row[Word.HEARTBEAT] > beat)
        for generation in (1, 2):
            link = parent.link(generation)
            link.writer.send(b"hello %d" % generation)
            link.flush()
            assert await until(link.drain) == [b"hello %d" % generation]
            if generation == 1:
                parent.process.channel.send_nowait(LinkDown("echo-0"))  # not one of its peers: no matter
                parent.process.channel.send_nowait(LinkDown("peer-0"))
        # A link that comes up while the old one is still there replaces it.
        third = parent.link(3)
        third.writer.send(b"third")
        third.flush()
        assert await until(third.drain) == [b"third"]
        parent.process.channel.send_nowait(LayoutCommitted())
        parent.process.channel.send_nowait(Stop())
        assert await parent.hear() == Stopped()
        assert await parent.exit() == "exit code 0"
        assert State(parent.row.words[Word.STATE]) is State.STOPPING  # the rest is the supervisor's to write

    run(script)


def test_process_is_named_after_its_role(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.boot()
        await parent.hear()
        with open(f"/proc/{parent.process.pid}/comm") as file:
            assert file.read() == "echo-0\n"

    run(script)


@pytest.mark.parametrize("dumpable", [False, True])
def test_what_others_may_see_of_it_and_its_death_signal(
    run: Callable[..., None], tmp_path: Path, dumpable: bool
) -> None:
    async def script(parent: Parent) -> None:
        parent.settings = msgspec.structs.replace(parent.settings, dumpable=dumpable)
        parent.boot()
        assert await parent.hear() == Ready()
        line = json.loads((tmp_path / "trace.jsonl").read_text())
        assert (line["dumpable"], line["death_signal"]) == (int(dumpable), signal.SIGKILL)
        vitals = parent.process.vitals()
        assert vitals is not None
        assert vitals.cpu_s > 0
        assert vitals.state is not None  # seen through what was opened when it was born
        assert await until(lambda: parent.row[Word.RESIDENT_BYTES]) > 1_000_000

    run(script, "roles.confides")


def test_holds_no_more_fds_than_it_was_given(run: Callable[..., None]) -> None:
    """A link's memory must go with the link, or every restart of a peer would cost an fd."""

    async def script(parent: Parent) -> None:
        parent.boot()
        await parent.hear()

        def fds() -> int:
            return len(os.listdir(f"/proc/{parent.process.pid}/fd"))

        def mappings() -> int:
            with open(f"/proc/{parent.process.pid}/maps") as file:
                return sum("/dev/shm" in line for line in file)

        # The least of some looks: at each beat it opens a file of /proc for a moment.
        looks = []
        for _ in range(40):
            looks.append((fds(), mappings()))
            await trio.sleep(0.005)
        before = min(looks)
        for generation in range(1, 6):
            link = parent.link(generation)
            link.writer.send(b"x")
            link.flush()
            await until(link.drain)
        # Python's mmap keeps an fd of its own for as long as the mapping lives.
        await until(lambda: (fds(), mappings()) == (before[0] + 1, before[1] + 1))
        parent.process.channel.send_nowait(LinkDown("peer-0"))
        await until(lambda: (fds(), mappings()) == before)

    run(script)


def test_failure_is_reported_and_ends_it(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.boot()
        message = await parent.hear()
        assert isinstance(message, Failed)
        assert "corrupt" in message.reason
        assert await parent.exit() == f"exit code {EXIT_FAILED}"

    run(script, "roles.refuses")


def test_unknown_module_is_a_death(run: Callable[..., None]) -> None:
    async def script(parent: Parent) -> None:
        parent.boot()
        assert await parent.exit() == "exit code 1"

    run(script, "roles.nowhere")
