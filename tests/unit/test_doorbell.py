from __future__ import annotations

import os
import select
import threading

import pytest

from topics.shm.doorbell import Doorbell


@pytest.fixture
def words() -> memoryview:
    return memoryview(bytearray(64)).cast("Q")


@pytest.fixture
def bell(words: memoryview) -> Doorbell:
    return Doorbell(Doorbell.create_fd(), words, 3)


def rung(bell: Doorbell) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def test_nobody_sleeps_nobody_is_woken(bell: Doorbell) -> None:
    bell.ring()
    assert not rung(bell)
    assert bell.rung == 0


def test_a_sleeper_is_woken_once(bell: Doorbell, words: memoryview) -> None:
    bell.arm()
    assert words[3] == 1
    bell.ring()
    bell.ring()
    assert words[3] == 0
    assert bell.rung == 1
    assert rung(bell)
    bell.clear()
    assert not rung(bell)


def test_clear_never_blocks(bell: Doorbell) -> None:
    bell.clear()
    bell.clear()


def test_disarmed_is_awake(bell: Doorbell) -> None:
    bell.arm()
    bell.disarm()
    bell.ring()
    assert not rung(bell)


def test_ring_always_wakes_whatever_the_flag_says(bell: Doorbell, words: memoryview) -> None:
    bell.ring_always()
    assert rung(bell)
    assert words[3] == 0


def test_flag_is_cleared_before_the_write(bell: Doorbell, words: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver may arm again the moment it is woken: that must not be undone by the sender."""
    monkeypatch.setattr(os, "eventfd_write", lambda fd, count: bell.arm())
    bell.arm()
    bell.ring()
    assert words[3] == 1


def test_no_wake_up_is_lost(bell: Doorbell) -> None:
    """A sender and a sleeper race; the sleeper has no backstop here, so one lost bell ends in the timeout."""
    rounds = 20_000
    published = memoryview(bytearray(8)).cast("Q")

    def send() -> None:
        for number in range(1, rounds + 1):
            published[0] = number
            bell.ring()

    sender = threading.Thread(target=send)
    sender.start()
    poller = select.poll()
    poller.register(bell.fileno(), select.POLLIN)
    while published[0] < rounds:
        bell.arm()
        if published[0] < rounds:
            assert poller.poll(30_000), "a wake-up was lost"
        bell.disarm()
        bell.clear()
    sender.join()
