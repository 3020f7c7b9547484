"""Children that are forked from a fork server: whose they are, and what becomes of them when it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from figures import KILLS, STOPS
from harness import RoleServer, children, eventually, gone

from topics.actors.child import adopt_orphans, name_process
from topics.actors.context import EXIT_ORPHANED
from topics.actors.supervisor import spawner as spawner_module
from topics.actors.supervisor.process import ChildProcess, ProcessSpec
from topics.actors.supervisor.spawner import Spawner
from topics.shm.counters import State, Word


def fork_servers(pid: int) -> list[int]:
    return [child for child, name in children(pid).items() if name == "forkserver"]


def the_fork_server(pid: int) -> int:
    """A child has its name for a moment, too."""
    eventually(lambda: len(fork_servers(pid)) == 1, what="one fork server")
    return fork_servers(pid)[0]


Script = Callable[[Spawner], Awaitable[None]]


@pytest.fixture
def run() -> Iterator[Callable[..., None]]:
    def drive(script: Script, modules: Sequence[str] = (), *, dumpable: bool = False) -> None:
        async def main() -> None:
            spawner = Spawner(modules, dumpable=dumpable)
            try:
                with trio.fail_after(60):
                    await script(spawner)
            finally:
                spawner.close()

        trio.run(main)

    yield drive
    adopt_orphans(False)  # what other tests leave is not ours
    assert not fork_servers(os.getpid()), "a fork server was left"


async def end(process: ChildProcess) -> str:
    process.kill()
    await process.wait_exit()
    return process.reap()


def test_a_child_is_ours_and_no_child_of_the_fork_server(run: Callable[[Script], None]) -> None:
    async def script(spawner: Spawner) -> None:
        process = await spawner.spawn()
        eventually(lambda: children(os.getpid())[process.pid] == "child")
        server = the_fork_server(os.getpid())
        assert children(server) == {}
        assert not process.ended
        assert await end(process) == "SIGKILL"
        assert not Path(f"/proc/{process.pid}").exists()

    run(script)


@pytest.mark.parametrize("dumpable", [False, True])
@pytest.mark.parametrize("other", [False, True], ids=["the first", "another"])
def test_what_others_may_see_of_a_fork_server(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dumpable: bool, other: bool
) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv("TOPICS_TEST_WITNESS", str(seen))

    async def script(spawner: Spawner) -> None:
        one = spawner.another() if other else spawner
        try:
            await end(await one.spawn())
        finally:
            one.close()
        assert seen.read_text() == f"forkserver {int(dumpable)}\n"

    run(script, ["roles.witness"], dumpable=dumpable)


def test_one_fork_server_serves_all(run: Callable[[Script], None]) -> None:
    async def script(spawner: Spawner) -> None:
        processes: list[ChildProcess] = []

        async def spawn() -> None:
            processes.append(await spawner.spawn())

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(spawn)
        assert len({process.pid for process in processes}) == 5
        eventually(lambda: len(fork_servers(os.getpid())) == 1, what="children that have a name of their own")
        for process in processes:
            await end(process)

    run(script)


def test_a_child_that_is_never_booted_ends_with_its_channel(run: Callable[[Script], None]) -> None:
    """The supervisor's end is nowhere else: neither in the fork server nor in another child."""

    async def script(spawner: Spawner) -> None:
        first, second = await spawner.spawn(), await spawner.spawn()
        first.channel.close()
        await first.wait_exit()
        assert first.reap() == f"exit code {EXIT_ORPHANED}"
        await end(second)

    run(script)


def test_a_fork_server_that_was_killed_is_replaced(run: Callable[[Script], None]) -> None:
    async def script(spawner: Spawner) -> None:
        before = await spawner.spawn()
        server = the_fork_server(os.getpid())
        os.kill(server, signal.SIGKILL)
        KILLS.add()
        eventually(lambda: gone(server))
        after = await spawner.spawn()
        assert not before.ended, "its children live on"
        for process in (before, after):
            await end(process)

    run(script)


def test_a_fork_server_that_does_not_answer_is_given_up(
    run: Callable[[Script], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(spawner: Spawner) -> None:
        await end(await spawner.spawn())
        server = the_fork_server(os.getpid())
        os.kill(server, signal.SIGSTOP)
        STOPS.add()
        monkeypatch.setattr(spawner_module, "_PATIENCE_S", 0.1)
        with pytest.raises(OSError, match="did not answer"):
            await spawner.spawn()
        assert gone(server)
        monkeypatch.undo()
        await end(await spawner.spawn())

    run(script)


def test_whoever_stops_waiting_leaves_nothing_to_the_next(run: Callable[[Script], None]) -> None:
    """The answer to a request that was given up must not be taken for the answer to another."""

    async def script(spawner: Spawner) -> None:
        await end(await spawner.spawn())
        server = the_fork_server(os.getpid())
        os.kill(server, signal.SIGSTOP)
        STOPS.add()
        with trio.move_on_after(0.1):
            await spawner.spawn()
        process = await spawner.spawn()
        assert server not in fork_servers(os.getpid())
        eventually(lambda: children(os.getpid())[process.pid] == "child")
        await end(process)

    run(script)


def test_what_a_killed_fork_server_has_forked_is_reaped(run: Callable[[Script], None]) -> None:
    """It became ours, and its pid was never told."""

    async def script(spawner: Spawner) -> None:
        lost = os.fork()
        if lost == 0:
            name_process("child")
            os._exit(EXIT_ORPHANED)
        os.waitid(os.P_PID, lost, os.WEXITED | os.WNOWAIT)
        dead = await spawner.spawn()
        assert not Path(f"/proc/{lost}").exists()
        dead.kill()
        await dead.wait_exit()
        await end(await spawner.spawn())
        assert dead.reap() == "SIGKILL", "others are left to those who wait for them"

    run(script)


def test_a_close_ends_every_wait(run: Callable[[Script], None]) -> None:
    """A descriptor that is closed under a task that waits for it is given to somebody else, who can't wait for it."""

    async def script(spawner: Spawner) -> None:
        await end(await spawner.spawn())
        server = the_fork_server(os.getpid())
        os.kill(server, signal.SIGSTOP)
        STOPS.add()

        async def refused() -> None:
            with pytest.raises(OSError, match="closed"):
                await spawner.spawn()

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused)  # its request is out
                nursery.start_soon(refused)  # and this one's turn has not come
                await trio.testing.wait_all_tasks_blocked()
                spawner.close()
        assert gone(server)

    run(script)


GATEWAY = ProcessSpec("gateway-0", "roles.echo", 0, listener=True)


@pytest.fixture
def server(start: Callable[..., RoleServer]) -> RoleServer:
    server = start([GATEWAY])
    server.wait_all_ready()
    return server


def test_a_dead_fork_server_costs_the_server_nothing(server: RoleServer) -> None:
    forks = the_fork_server(server.pid)
    os.kill(forks, signal.SIGKILL)
    KILLS.add()
    eventually(lambda: gone(forks))
    os.kill(server.pids()["gateway-0"], signal.SIGKILL)
    KILLS.add()
    server.wait_state("gateway-0", State.READY, generation=2)
    assert server.word("gateway-0", Word.RESTARTS) == 1


def test_the_fork_server_ends_with_its_supervisor(server: RoleServer) -> None:
    forks = the_fork_server(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    KILLS.add()
    eventually(lambda: gone(forks), what="an end")


def test_a_stopped_supervisor_leaves_no_fork_server(server: RoleServer) -> None:
    forks = the_fork_server(server.pid)
    server.popen.send_signal(signal.SIGTERM)
    assert server.popen.wait(30) == 0
    assert not Path(f"/proc/{forks}").exists()


def test_a_stop_does_not_wait_for_a_fork(server: RoleServer) -> None:
    forks = the_fork_server(server.pid)
    os.kill(forks, signal.SIGSTOP)
    STOPS.add()
    os.kill(server.pids()["gateway-0"], signal.SIGKILL)
    KILLS.add()
    eventually(lambda: "event=child_died child=gateway-0" in server.stderr(), what="a death")
    server.popen.send_signal(signal.SIGTERM)
    assert server.popen.wait(20) == 0
    assert gone(forks)


def test_a_fork_is_quick(server: RoleServer) -> None:
    """The point of it: a fresh interpreter needs 0.2 s of processor time at least."""
    forks = the_fork_server(server.pid)

    def ticks() -> int:
        fields = Path(f"/proc/{forks}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    os.kill(server.pids()["gateway-0"], signal.SIGKILL)
    KILLS.add()
    server.wait_state("gateway-0", State.READY, generation=2)
    assert (ticks() - before) / os.sysconf("SC_CLK_TCK") < 0.1
