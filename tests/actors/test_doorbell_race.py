"""A sender and a sleeper in two processes, without any backstop: a lost wake-up ends in the timeout."""

from __future__ import annotations

import os
import select
import signal

from topics.shm.doorbell import Doorbell
from topics.shm.region import Region

ROUNDS = 20_000
PUBLISHED, ANSWERED, PING_ASLEEP, PONG_ASLEEP = 0, 8, 16, 24


def sleep_until(words: memoryview, bell: Doorbell, word: int, number: int) -> bool:
    poller = select.poll()
    poller.register(bell.fileno(), select.POLLIN)
    while words[word] < number:
        bell.arm()
        if words[word] < number and not poller.poll(20_000):
            return False
        bell.disarm()
        bell.clear()
    return True


def test_two_processes_wake_each_other_every_time() -> None:
    region = Region.create(4_096)
    words = region.view.cast("Q")
    ping = Doorbell(Doorbell.create_fd(), words, PING_ASLEEP)
    pong = Doorbell(Doorbell.create_fd(), words, PONG_ASLEEP)
    child = os.fork()
    if child == 0:
        # Only plain calls until _exit: this is a copy of the test process.
        for number in range(1, ROUNDS + 1):
            if not sleep_until(words, pong, PUBLISHED, number):
                os._exit(1)
            words[ANSWERED] = number
            ping.ring()
        os._exit(0)
    try:
        for number in range(1, ROUNDS + 1):
            words[PUBLISHED] = number
            pong.ring()
            assert sleep_until(words, ping, ANSWERED, number), f"wake-up {number} was lost"
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
