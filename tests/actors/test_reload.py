"""Reloads by a real supervisor over real processes: what is replaced, in which order, and what becomes of a bad one."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from effort import EXHAUSTIVE
from harness import RoleServer, children, eventually, gone

from topics.actors.child import adopt_orphans
from topics.actors.control import PROTOCOL, Message
from topics.actors.log import Log
from topics.actors.startup.datadir_lock import read_lock_info
from topics.actors.supervisor import rolling_restart
from topics.actors.supervisor.admin_socket import Order, Outcome, Progress, give_order
from topics.actors.supervisor.process import ChildProcess, ProcessSpec
from topics.actors.supervisor.process_table import Child
from topics.actors.supervisor.restarts import Life
from topics.actors.supervisor.spawner import Spawner
from topics.errors import ServerNotRunning
from topics.shm.counters import State, Word

Start = Callable[..., RoleServer]

GATEWAY = ProcessSpec("gateway-0", "roles.pinger", 0, listener=True)
ROUTER = ProcessSpec("router", "roles.echo", 0, stop_order=1)
SHARDS = [ProcessSpec(f"shard-{i}", "roles.changes", i, stores=True, stop_order=9) for i in range(2)]
TABLE = [GATEWAY, ROUTER, *SHARDS]
LINKS = [("gateway-0", "shard-0"), ("gateway-0", "shard-1"), ("gateway-0", "router")]
ORDER = ["shard-0", "shard-1", "router", "gateway-0"]


@pytest.fixture(scope="module")
def _wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("reload") / "wrong"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLES_WRONG", str(path))
        yield path


@pytest.fixture
def wrong(_wrong: Path) -> Iterator[Path]:
    """Write into it what the next version of the shards does wrong."""
    yield _wrong
    _wrong.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def _shared(_wrong: Path) -> Iterator[RoleServer]:
    server = RoleServer(_wrong.parent / "data", TABLE, LINKS, wal_shards=2)
    yield server
    server.close()


@pytest.fixture
def server(_shared: RoleServer) -> RoleServer:
    """One for all tests that leave it as good as they find it."""
    _shared.wait_all_ready()
    return _shared


@pytest.fixture
def own_server(start: Start, wrong: Path) -> RoleServer:
    server = start(TABLE, LINKS, wal_shards=2)
    server.wait_all_ready()
    return server


def order(server: RoleServer, only: str | None = None, timeout_s: float = 30.0) -> tuple[list[Progress], Outcome]:
    *steps, outcome = give_order(read_lock_info(str(server.data_dir)).orders, Order(only, timeout_s))
    assert isinstance(outcome, Outcome)
    return [step for step in steps if isinstance(step, Progress)], outcome


def pings_on(server: RoleServer, more: int = 20) -> None:
    before = server.word("gateway-0", Word.REQUESTS)
    eventually(lambda: server.word("gateway-0", Word.REQUESTS) >= before + more, what="answers to pings")


def test_everyone_is_replaced_in_order(server: RoleServer) -> None:
    before = server.pids()
    lives = {row.name: row[Word.GENERATION] for row in server.board.rows()}
    restarts = {row.name: row[Word.RESTARTS] for row in server.board.rows()}
    steps, outcome = order(server)
    assert outcome == Outcome(ORDER)
    assert [(step.process, step.stage) for step in steps] == [
        (name, stage) for name in ORDER for stage in ("preparing", "stopping", "starting", "ready")
    ]
    assert {(step.at, step.of) for step in steps} == {(at, 4) for at in range(1, 5)}
    after = server.pids()
    assert {step.process: step.pid for step in steps if step.stage == "ready"} == {name: after[name] for name in ORDER}
    assert after.pop("supervisor") == before.pop("supervisor")
    assert not after.keys() ^ before.keys()
    assert not set(after.values()) & set(before.values())
    assert all(eventually(lambda pid=pid: gone(pid)) for pid in before.values())
    pings_on(server)
    for row in server.board.rows():
        assert row[Word.RESTARTS] == restarts[row.name]
        assert row[Word.GENERATION] == lives[row.name] + (row.name != "supervisor")


def test_each_finds_its_peers_again(server: RoleServer) -> None:
    """Links of both ends are of the same generation, and those of the dead are gone."""
    _, outcome = order(server, "shard")
    assert outcome == Outcome(["shard-0", "shard-1"])
    for name in outcome.replaced:
        born = server.trace(name, "born_with")[-1]
        assert born["peer"] == "gateway-0"

        def told(name: str = name, born: dict[str, Any] = born) -> bool:
            heard = [line for line in server.trace("gateway-0") if line.get("peer") == name]
            last = [(line["event"], line.get("generation")) for line in heard[-2:]]
            return last == [("link_down", None), ("link_up", born["generation"])]

        eventually(told, what="news of the link")
    pings_on(server)


def test_sighup_is_the_same_order(server: RoleServer) -> None:
    before = server.pids()
    reloads = server.stderr().count("event=reloaded processes=4")
    os.kill(server.pid, signal.SIGHUP)
    eventually(lambda: server.stderr().count("event=reloaded processes=4") > reloads, within_s=90, what="a reload")
    assert not {pid for name, pid in server.pids().items() if name != "supervisor"} & set(before.values())
    assert server.popen.poll() is None


def test_sighup_of_a_terminal_that_is_gone_is_a_stop(start: Start) -> None:
    ours, theirs = os.openpty()
    server = start([GATEWAY, ROUTER], [("gateway-0", "router")], terminal=theirs)
    os.close(theirs)
    server.wait_all_ready()
    os.kill(server.pid, signal.SIGHUP)
    eventually(lambda: "event=reloaded processes=2" in server.stderr(), what="a reload")
    os.close(ours)
    assert server.popen.wait(30) == 0
    assert "event=stopping signal=SIGHUP" in server.stderr()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("import", "shard-0: the new process can't start: ImportError: no module named nonsense; shard-0 still runs"),
        ("protocol", rf"can't work beside this one \(protocol {PROTOCOL + 1}, not {PROTOCOL}\): restart the server"),
    ],
)
def test_new_code_that_can_not_be_used_costs_nothing(server: RoleServer, wrong: Path, what: str, says: str) -> None:
    before = server.pids()
    retired = len(server.trace(event="told_to_retire"))
    wrong.write_text(what)
    steps, outcome = order(server)
    assert [(step.process, step.stage) for step in steps] == [("shard-0", "preparing")]
    assert outcome.replaced == []
    assert re.search(says, outcome.error), outcome.error
    assert "4 of 4 processes were not replaced" in outcome.error
    assert server.pids() == before
    assert len(server.trace(event="told_to_retire")) == retired
    pings_on(server)
    wrong.unlink()
    assert order(server)[1] == Outcome(ORDER)


def test_one_that_refuses_to_serve_ends_the_reload_and_stays_down(own_server: RoleServer, wrong: Path) -> None:
    server = own_server
    before = server.pids()
    wrong.write_text("refuse")
    _, outcome = order(server)
    assert outcome.replaced == []
    assert outcome.error.startswith("shard-0 did not come up: this disk is of another house; it is down for good; ")
    server.wait_state("shard-0", State.FAILED, generation=2)
    after = server.pids()
    assert {name: after[name] for name in ("shard-1", "router", "gateway-0")} == {
        name: before[name] for name in ("shard-1", "router", "gateway-0")
    }
    pings_on(server)
    wrong.unlink()
    assert order(server)[1].error.startswith("shard-0 does not serve (failed), and only what serves is replaced")
    assert order(server, "router")[1] == Outcome(["router"])


def test_one_that_dies_ends_the_reload_and_is_started_again(server: RoleServer, wrong: Path) -> None:
    wrong.write_text("die")
    _, outcome = order(server)
    assert outcome.error.startswith("shard-0 did not come up: exit code 3; it is being started again; ")
    wrong.unlink()
    eventually(lambda: server.state("shard-0") is State.READY, what="shard-0 again")
    assert server.word("shard-0", Word.RESTARTS) >= 1
    pings_on(server)
    assert order(server)[1] == Outcome(ORDER)


def test_a_second_one_is_refused_and_a_slow_one_is_given_up_on(server: RoleServer, wrong: Path) -> None:
    life = server.word("shard-0", Word.GENERATION) + 1
    wrong.write_text("slow")
    first: list[Outcome] = []
    thread = threading.Thread(target=lambda: first.append(order(server, "shard", 3)[1]))
    thread.start()
    server.wait_state("shard-0", State.RECOVERING, generation=life)
    _, second = order(server)
    assert second.refused
    assert second.error.startswith("another reload is under way")
    thread.join(30)
    assert first[0].error.startswith("shard-0 is not ready after 3 s; it goes on starting, and serves then; ")
    wrong.unlink()
    server.wait_state("shard-0", State.READY, generation=life)
    pings_on(server)


def test_a_child_that_waits_for_the_fork_server_of_before_gets_the_new_one(own_server: RoleServer) -> None:
    server = own_server
    (forks,) = [pid for pid, name in children(server.pid).items() if name == "forkserver"]
    os.kill(forks, signal.SIGSTOP)
    server.kill_child("router")
    eventually(lambda: "event=child_died child=router" in server.stderr(), what="a death")
    _, outcome = order(server, "shard")
    assert outcome == Outcome(["shard-0", "shard-1"])
    server.wait_state("router", State.READY, generation=2)
    assert gone(forks)
    pings_on(server)


def test_a_successor_that_dies_at_once_ends_the_reload_alone() -> None:
    class Stillborn(Spawner):
        async def spawn(self) -> ChildProcess:
            process = await super().spawn()
            process.kill()
            await process.wait_exit()
            return process

    async def main() -> Outcome:
        child: Any = SimpleNamespace(name="router", spec=ROUTER, life=Life.READY)
        spawner = Stillborn()
        news: list[Progress] = []
        log = Log("supervisor", "error", "logfmt")
        with trio.fail_after(30):
            run = rolling_restart.Reload(
                Order(), [child], tell=_untold, log=log, report=news.append, spawner=spawner, adopt=lambda spawner: None
            )
            return await run.run()

    try:
        outcome = trio.run(main)
    finally:
        adopt_orphans(False)
    assert outcome.replaced == []
    assert "the new process ended before it began" in outcome.error


def _untold(child: Child, message: Message, fds: Sequence[int] = ()) -> None:
    raise AssertionError(f"{child.name} was told {message}")


def test_a_stop_ends_a_reload(own_server: RoleServer, wrong: Path) -> None:
    server = own_server
    wrong.write_text("slow")
    failures: list[BaseException] = []
    outcomes: list[Outcome] = []

    def ask() -> None:
        try:
            outcomes.append(order(server, "shard")[1])
        except ServerNotRunning as exc:
            failures.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_state("shard-0", State.RECOVERING, generation=2)
    pids = server.pids()
    name = read_lock_info(str(server.data_dir)).orders
    server.popen.send_signal(signal.SIGTERM)
    wrong.unlink()
    assert server.popen.wait(30) == 0
    thread.join(30)
    assert failures or "told to stop" in outcomes[0].error
    assert all(gone(pid) for pid in pids.values())
    with pytest.raises(ServerNotRunning, match="can't be reached"):
        list(give_order(name, Order()))
    with pytest.raises(ServerNotRunning, match="takes no orders"):
        list(give_order(None, Order()))


def test_one_that_does_not_stop_is_killed_and_replaced(start: Start) -> None:
    stubborn = ProcessSpec("shard-0", "roles.stubborn", 0, stores=True)
    server = start([GATEWAY, stubborn], [("gateway-0", "shard-0")], stop_timeout_ms=500)
    server.wait_all_ready()
    before = server.pids()
    assert order(server, "shard")[1] == Outcome(["shard-0"])
    assert "event=child_does_not_retire child=shard-0" in server.stderr()
    assert server.pids()["shard-0"] != before["shard-0"]
    assert gone(before["shard-0"])


def successor_of(server: RoleServer) -> int:
    """The child that has no name of its own yet."""

    def spare() -> int:
        return next((pid for pid, name in children(server.pid).items() if name == "child"), 0)

    return eventually(spare, what="a successor")


def test_a_successor_that_dies_while_its_peers_hold(start: Start, wrong: Path) -> None:
    """Nothing new is asked of the old one, and only a new link ends that: another one gets it."""
    wrong.write_text("tardy")
    tardy = ProcessSpec("gateway-1", "roles.changes", 1, listener=True)
    links = [("gateway-0", "router"), ("gateway-1", "router")]
    server = start([GATEWAY, tardy, ROUTER], links)
    server.wait_all_ready()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(order(server, "router")[1]))
    thread.start()
    eventually(lambda: server.trace("gateway-1", "told_to_hold"), what="a hold")
    dead = successor_of(server)
    os.kill(dead, signal.SIGKILL)
    eventually(lambda: gone(dead))
    wrong.unlink()
    thread.join(30)
    replaced_without_a_death(server, "router", outcomes, dead)


def test_a_successor_that_dies_while_the_old_one_retires(start: Start) -> None:
    stubborn = ProcessSpec("shard-0", "roles.stubborn", 0, stores=True)
    server = start(
        [GATEWAY, ROUTER, stubborn], [("gateway-0", "router"), ("gateway-0", "shard-0")], stop_timeout_ms=2_000
    )
    server.wait_all_ready()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(order(server, "shard")[1]))
    thread.start()
    eventually(lambda: server.trace("shard-0", "told_to_stop"), what="a stop")
    dead = successor_of(server)
    os.kill(dead, signal.SIGKILL)
    thread.join(30)
    replaced_without_a_death(server, "shard-0", outcomes, dead)


def replaced_without_a_death(server: RoleServer, name: str, outcomes: list[Outcome], dead: int) -> None:
    assert outcomes == [Outcome([name])]
    assert server.word(name, Word.GENERATION) == 2
    assert server.word(name, Word.RESTARTS) == 0
    assert server.pids()[name] != dead
    assert "event=child_died" not in server.stderr()
    assert not Path(f"/proc/{dead}").exists(), "nobody has taken note of its end"
    down = [line["event"] for line in server.trace("gateway-0") if line.get("peer") == name]
    assert down[-2:] == ["link_down", "link_up"]
    assert down.count("link_down") == 1
    if name == "router":
        pings_on(server)


@pytest.mark.skipif(
    not EXHAUSTIVE, reason="TOPICS_TEST_EXHAUSTIVE is not set: it takes as long as a peer is waited for"
)
def test_a_peer_that_does_not_hold_is_not_waited_for_long(start: Start, wrong: Path) -> None:
    wrong.write_text("deaf")
    deaf = ProcessSpec("gateway-0", "roles.changes", 0)
    server = start([deaf, ROUTER], [("gateway-0", "router")])
    server.wait_all_ready()
    assert order(server, "router")[1] == Outcome(["router"])
    assert "event=hold_overdue child=router peers=gateway-0" in server.stderr()
    assert server.trace("gateway-0", "told_to_hold")[0]["peer"] == "router"
    assert rolling_restart.HOLD_TIMEOUT_S <= 5


def test_before_it_is_ready_there_is_nothing_to_reload(start: Start, wrong: Path) -> None:
    wrong.write_text("slow")
    server = start(TABLE, LINKS, wal_shards=2)
    server.wait_state("shard-0", State.RECOVERING)
    _, outcome = order(server)
    assert outcome.refused
    assert outcome.error.startswith("the server has not been ready yet")
    os.kill(server.pid, signal.SIGHUP)
    eventually(lambda: server.stderr().count("event=reload_refused") == 2, what="a refusal")
    wrong.unlink()
    server.wait_all_ready()
    assert all(row[Word.GENERATION] == 1 for row in server.board.rows())
