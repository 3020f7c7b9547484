"""A real supervisor over real processes: starting, replacing, giving up, stopping."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
from harness import RoleServer, eventually, gone
from sharedmemory import names_of

from topics import limits
from topics.actors.supervisor.process import ProcessSpec
from topics.shm.counters import State, Word

Start = Callable[..., RoleServer]

PINGER = ProcessSpec("ping-0", "roles.pinger", 0, listener=True)
ECHOES = [ProcessSpec(f"echo-{i}", "roles.echo", i, stores=True, stop_order=9) for i in range(2)]
STAR = [("ping-0", "echo-0"), ("ping-0", "echo-1")]


def pings_on(server: RoleServer, name: str = "ping-0", more: int = 20) -> None:
    """Messages go back and forth, now."""
    before = server.word(name, Word.REQUESTS)
    eventually(lambda: server.word(name, Word.REQUESTS) >= before + more, what="answers to pings")


def test_starts_connects_and_says_so_once(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR, wal_shards=2)
    server.wait_all_ready()
    pings_on(server)
    assert server.word("ping-0", Word.CONNECTIONS) == 2
    assert server.popen.stdout is not None
    line = server.popen.stdout.readline()
    port = int(line.split("127.0.0.1:")[1].split()[0])
    assert line == f"topics 0.1.0 ready on http://127.0.0.1:{port} (2 shards, data in {server.data_dir})\n"
    server.kill_child("echo-0")
    server.wait_state("echo-0", State.READY, generation=2)
    assert server.stop() == 0
    assert server.popen.stdout.read() == ""
    booted = {line["name"]: line["listener"] for line in server.trace(event="booted")}
    assert booted == {"ping-0": True, "echo-0": False, "echo-1": False}


def test_the_supervisor_holds_the_listening_socket_while_no_gateway_lives(start: Start) -> None:
    server = start([ProcessSpec("gateway-0", "roles.dies", 0, listener=True), ECHOES[0]])
    server.wait_state("gateway-0", State.BACKOFF)
    port = int(eventually(lambda: _port(server)))
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def _port(server: RoleServer) -> int | None:
    from topics.actors.startup.datadir_lock import read_lock_info

    return read_lock_info(str(server.data_dir)).port


def test_killed_child_comes_back_with_a_new_generation_and_peers_are_told(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR, heartbeat_ms=60_000)
    server.wait_all_ready()
    pings_on(server)
    bystander = server.word("echo-1", Word.PID)
    killed = server.kill_child("echo-0")
    at = time.monotonic_ns()
    server.wait_state("echo-0", State.READY, generation=2)
    assert server.word("echo-0", Word.PID) != killed
    assert server.word("echo-0", Word.RESTARTS) == 1
    pings_on(server)
    down = server.trace("ping-0", "link_down")
    assert [line["peer"] for line in down] == ["echo-0"]
    assert down[0]["at_ns"] - at < 10e9, "a death is told at once, not found by heartbeats that do not come"
    generations = [
        line["generation"]
        for line in server.trace("ping-0")
        if line["event"] in ("born_with", "link_up") and line["peer"] == "echo-0"
    ]
    assert generations == [1, 2]
    assert server.word("ping-0", Word.CONNECTIONS) == 2
    assert server.word("echo-1", Word.PID) == bystander
    assert not server.trace("echo-1", "link_down")


def test_the_middle_of_the_star_dies_and_all_its_links_are_renewed(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR)
    server.wait_all_ready()
    server.kill_child("ping-0")
    server.wait_state("ping-0", State.READY, generation=2)
    pings_on(server)
    born = [line for line in server.trace("ping-0", "born_with") if line["generation"] == 2]
    assert {line["peer"] for line in born} == {"echo-0", "echo-1"}
    for name in ("echo-0", "echo-1"):
        assert len(server.trace(name, "link_down")) == 1


def test_both_ends_of_a_link_die_at_once(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR)
    server.wait_all_ready()
    pings_on(server)
    server.kill_child("ping-0")
    server.kill_child("echo-0")
    server.wait_state("ping-0", State.READY, generation=2)
    server.wait_state("echo-0", State.READY, generation=2)
    eventually(lambda: server.word("ping-0", Word.CONNECTIONS) == 2, what="both links")
    pings_on(server)


def test_a_child_that_dies_again_and_again_stays_down_and_the_rest_serves(start: Start) -> None:
    dying = ProcessSpec("dying-0", "roles.dies", 0)
    server = start([PINGER, ECHOES[0], dying], [("ping-0", "echo-0"), ("ping-0", "dying-0")])
    server.wait_state("dying-0", State.FAILED)
    assert len(server.trace("dying-0", "booted")) == limits.RESTARTS_PER_MINUTE + 1
    assert server.word("dying-0", Word.PID) == 0
    pings_on(server)
    assert server.state("ping-0") is State.READY
    assert server.word("ping-0", Word.RESTARTS) == 0
    log = server.stderr()
    assert log.count("no use for this life") >= limits.RESTARTS_PER_MINUTE + 1  # a traceback for each death
    assert log.count("child_failed child=dying-0") == 1
    assert server.stop() == 0


def test_a_child_that_refuses_is_not_started_again(start: Start) -> None:
    refusing = ProcessSpec("shard-0", "roles.refuses", 0, stores=True)
    server = start([PINGER, ECHOES[0], refusing], [("ping-0", "echo-0")])
    server.wait_state("shard-0", State.FAILED)
    pings_on(server)
    assert len(server.trace("shard-0", "booted")) == 1
    assert 'reason="frame 7 of file 3 is corrupt: run the repair command"' in server.stderr()
    assert server.stop() == 0


def test_no_gateway_left_ends_the_server(start: Start) -> None:
    server = start([ProcessSpec("gateway-0", "roles.refuses", 0, listener=True), ECHOES[0]])
    assert server.popen.wait(30) == 1
    assert "no_gateway_left" in server.stderr()
    assert server.trace("echo-0", "stopping") or not server.trace("echo-0", "ready")


def test_a_gateway_that_has_served_is_started_again_however_often_it_dies(start: Start) -> None:
    server = start([PINGER, ECHOES[0]], [("ping-0", "echo-0")])
    server.wait_all_ready()
    deaths = limits.RESTARTS_PER_MINUTE + 1
    for death in range(1, deaths + 1):
        server.kill_child("ping-0")
        server.wait_state("ping-0", State.READY, generation=death + 1)
    assert server.word("ping-0", Word.RESTARTS) == deaths
    assert server.word("echo-0", Word.RESTARTS) == 0
    pings_on(server)
    pauses = [line.partition("restart_in_ms=")[2] for line in server.stderr().splitlines() if "child_died" in line]
    assert [int(pause) for pause in pauses] == [0, 100, 200, 400, 800, 1_600]
    assert server.stop() == 0


def test_a_gateway_that_has_served_is_tried_again_whatever_it_says_of_its_failure(start: Start) -> None:
    server = start([ProcessSpec("gateway-0", "roles.refuses_for_a_while", 0, listener=True), ECHOES[0]])
    server.wait_all_ready()
    server.kill_child("gateway-0")
    server.wait_state("gateway-0", State.READY, generation=4)
    assert server.stderr().count('child_died child=gateway-0 how="no memory left" ') == 2
    assert server.stop() == 0


def test_a_gateway_that_was_given_up_is_tried_again_when_another_has_served(start: Start) -> None:
    doors = [
        ProcessSpec(f"gateway-{i}", f"roles.{role}", i, listener=True)
        for i, role in enumerate(("outlasts", "refuses_at_first"))
    ]
    server = start([*doors, ECHOES[0]])
    server.wait_state("gateway-1", State.READY, generation=2)
    server.wait_all_ready()
    assert server.stderr().count("child_failed child=gateway-1") == 1
    assert "no_gateway_left" not in server.stderr()
    assert server.stop() == 0


def test_a_blocked_loop_is_a_hang(start: Start) -> None:
    server = start([ProcessSpec("hang-0", "roles.hangs", 0)])
    server.wait_state("hang-0", State.READY, generation=2)
    assert "child_hangs child=hang-0" in server.stderr()
    assert server.word("hang-0", Word.RESTARTS) == 1


def test_a_child_that_works_without_a_beat_is_busy_and_lives_on(start: Start) -> None:
    server = start([ProcessSpec("toil-0", "roles.toils", 0)])
    eventually(lambda: server.trace("toil-0", "toiled"), what="its work done")
    beat = server.word("toil-0", Word.HEARTBEAT)
    eventually(lambda: server.word("toil-0", Word.HEARTBEAT) > beat, what="another beat")
    eventually(lambda: "child_beats_again child=toil-0" in server.stderr(), what="word that it is back")
    assert server.stderr().count("child_busy child=toil-0") == 1
    assert "child_hangs" not in server.stderr()
    assert server.word("toil-0", Word.RESTARTS) == 0
    assert server.stop() == 0


def test_a_stopped_process_is_a_hang(start: Start) -> None:
    server = start([PINGER, ECHOES[0]], [("ping-0", "echo-0")])
    server.wait_all_ready()
    stopped = server.kill_child("echo-0", signal.SIGSTOP)
    server.wait_state("echo-0", State.READY, generation=2)
    assert gone(stopped)
    pings_on(server)


def test_a_stuck_thread_is_no_hang_and_does_not_delay_the_stop(start: Start) -> None:
    server = start([ProcessSpec("disk-0", "roles.busy_thread", 0)])
    server.wait_all_ready()
    beats = set()

    def beaten() -> bool:
        beats.add(server.word("disk-0", Word.HEARTBEAT))
        return len(beats) > 2 * limits.HEARTBEAT_MISSES

    eventually(beaten, what="heartbeats beyond the limit")
    assert server.word("disk-0", Word.RESTARTS) == 0
    assert server.stop() == 0


def test_a_long_recovery_that_reports_progress_is_no_hang(start: Start) -> None:
    server = start([ProcessSpec("shard-0", "roles.recovers", 0)])
    server.wait_state("shard-0", State.RECOVERING)
    eventually(lambda: server.word("shard-0", Word.PROGRESS_PERMILLE) > 0, what="progress")
    server.wait_state("shard-0", State.READY)
    assert server.word("shard-0", Word.RESTARTS) == 0
    assert server.word("shard-0", Word.PROGRESS_PERMILLE) == 1_000


def test_supervisor_stopped_for_a_while_kills_nobody(start: Start) -> None:
    """It counts its own looks: the children must not pay for the time that it was not running."""
    server = start([PINGER, ECHOES[0]], [("ping-0", "echo-0")])
    silence_s = 1.5 * limits.HEARTBEAT_MISSES * server.settings.heartbeat_ms / 1_000  # a hang, if it were counted
    server.wait_all_ready()
    pids = server.pids()
    os.kill(server.pid, signal.SIGSTOP)
    beat = server.word("ping-0", Word.HEARTBEAT)
    eventually(lambda: server.word("ping-0", Word.HEARTBEAT) > beat + silence_s * 1e9, what="a silence")
    for name in ("ping-0", "echo-0"):
        os.kill(pids[name], signal.SIGSTOP)
    stopped_at = time.monotonic()
    eventually(lambda: time.monotonic() > stopped_at + silence_s, what="another silence")
    for pid in (pids["ping-0"], pids["echo-0"], server.pid):
        os.kill(pid, signal.SIGCONT)
    beat = server.word("supervisor", Word.HEARTBEAT)
    eventually(lambda: server.word("supervisor", Word.HEARTBEAT) > beat + 0.5e9, what="the supervisor awake")
    assert server.pids() == pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_in_order(start: Start, number: int) -> None:
    middle = ProcessSpec("router", "roles.echo", 0, stop_order=5)
    server = start([ECHOES[0], middle, PINGER], [("ping-0", "echo-0"), ("ping-0", "router")])
    server.wait_all_ready()
    pids = server.pids()
    os.kill(server.pid, number)
    assert server.popen.wait(30) == 0
    assert [line["name"] for line in server.trace(event="stopping")] == ["ping-0", "router", "echo-0"]
    assert all(gone(pid) for pid in pids.values())
    assert server.board.row("supervisor").state is State.STOPPED
    assert server.board.row("echo-0").state is State.STOPPED


def test_more_signals_while_stopping_change_nothing(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR)
    server.wait_all_ready()
    for _ in range(5):
        os.kill(server.pid, signal.SIGTERM)
        os.kill(server.pid, signal.SIGINT)
    assert server.popen.wait(30) == 0
    assert {line["name"] for line in server.trace(event="stopping")} == {"ping-0", "echo-0", "echo-1"}


def test_signals_to_the_whole_group_reach_children_only_through_the_supervisor(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR)
    server.wait_all_ready()
    for name in ("echo-0", "echo-1", "ping-0"):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            server.kill_child(name, number)
    pings_on(server)
    os.killpg(server.pid, signal.SIGINT)
    assert server.popen.wait(30) == 0
    assert all(row[Word.RESTARTS] == 0 for row in server.board.rows())


def test_ctrl_c_while_children_are_born(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR)
    eventually(lambda: server.word("echo-1", Word.PID), what="a child being born")
    os.killpg(server.pid, signal.SIGINT)
    assert server.popen.wait(30) == 0
    assert "KeyboardInterrupt" not in server.stderr()
    assert "child_died" not in server.stderr()


def test_nobody_reads_stdout(start: Start) -> None:
    server = start([PINGER, ECHOES[0]], [("ping-0", "echo-0")])
    assert server.popen.stdout is not None
    server.popen.stdout.close()
    server.wait_all_ready()
    pings_on(server)
    assert server.stop() == 0


def test_signal_during_the_start_stops_cleanly(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR)
    eventually(lambda: server.word("echo-0", Word.PID), what="a child being born")
    assert server.stop() == 0
    assert "died" not in server.stderr()


def test_a_child_that_does_not_stop_is_killed(start: Start) -> None:
    server = start([ProcessSpec("stubborn-0", "roles.stubborn", 0), ECHOES[0]], stop_timeout_ms=300)
    server.wait_all_ready()
    assert server.stop() == 1
    assert server.trace("stubborn-0", "told_to_stop")
    assert "child_does_not_stop child=stubborn-0" in server.stderr()
    assert server.trace("echo-0", "stopping")


def test_stop_while_a_child_waits_for_its_restart(start: Start) -> None:
    server = start([ProcessSpec("dying-0", "roles.dies", 0), ECHOES[0]], stop_timeout_ms=600_000)
    eventually(lambda: server.word("dying-0", Word.RESTARTS) >= 2, what="a few deaths")
    server.wait_state("dying-0", State.BACKOFF)
    assert server.stop() == 0


def test_supervisor_killed_takes_everything_with_it(start: Start) -> None:
    server = start([PINGER, *ECHOES, ProcessSpec("disk-0", "roles.busy_thread", 0)], STAR)
    server.wait_all_ready()
    pings_on(server)
    pids = server.pids()
    everybody = [server.pid, *pids.values()]
    eventually(lambda: not names_of(everybody), what="no names while it runs")
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: all(gone(pid) for pid in pids.values()), what="children gone")
    assert names_of(everybody) == set()


def test_supervisor_killed_while_children_are_born(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR)
    pids = eventually(lambda: p if all((p := server.pids()).values()) else None, what="children")
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: all(gone(pid) for pid in pids.values()), what="children gone")


def test_a_stopped_child_goes_with_its_supervisor_too(start: Start) -> None:
    server = start([ECHOES[0]], heartbeat_ms=60_000)
    server.wait_state("echo-0", State.READY)
    pid = server.kill_child("echo-0", signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: gone(pid), what="the child gone")


def test_next_server_starts_at_once_after_a_kill(start: Start) -> None:
    first = start([PINGER, *ECHOES], STAR)
    first.wait_all_ready()
    os.kill(first.pid, signal.SIGKILL)
    second = start([PINGER, *ECHOES], STAR)
    second.wait_all_ready()
    pings_on(second)
    assert second.stop() == 0


def test_second_server_on_the_same_folder_is_refused(start: Start) -> None:
    first = start([ECHOES[0]])
    first.wait_all_ready()
    port = _port(first)
    second = RoleServer(first.data_dir, [ECHOES[0]])
    assert second.popen.wait(30) == 2
    text = second.stderr()
    second.close()
    assert f"pid {first.pid}" in text
    assert f"http://127.0.0.1:{port}" in text
    assert "TOPICS_DATA_DIR" in text
    assert first.state("echo-0") is State.READY


def test_port_in_use_is_refused(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start([ECHOES[0]], port=taken.getsockname()[1])
        assert server.popen.wait(30) == 2
    assert "TOPICS_PORT" in server.stderr()


def test_ipv6_and_port_file(start: Start, tmp_path: object) -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    port_file = f"{tmp_path}/port"
    server = start([PINGER], host="::1", port_file=port_file)
    server.wait_all_ready()
    with open(port_file) as file:
        port = int(file.read())
    with socket.create_connection(("::1", port), timeout=5):
        pass
    assert server.popen.stdout is not None
    assert f"http://[::1]:{port} " in server.popen.stdout.readline()
    assert not [name for name in os.listdir(str(tmp_path)) if name.endswith(".tmp")]


def test_too_little_shared_memory_is_refused_at_the_start(start: Start) -> None:
    server = start([PINGER, *ECHOES], STAR, ring_bytes=2**40)
    assert server.popen.wait(30) == 2
    assert "TOPICS_RING_BYTES" in server.stderr()
