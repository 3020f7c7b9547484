"""The campaign of I/O errors finds a shard that goes on as if nothing had failed."""

from __future__ import annotations

import pytest
from campaigns import ioerrors, stepped
from campaigns.stepped import Step
from figures import apart

from topics.walshard.log import disk
from topics.walshard.log.disk import Disk
from topics.walshard.log.wal import Wal

STEPS = [
    Step("put", "f"),
    Step("append", "f", 3, "key-1"),
    Step("round", number=2, others=("f", "d")),
    Step("flush", "f"),
    Step("checkpoint"),
    Step("append", "d", 2),
    Step("delete_tag", "f", 3),
    Step("kill"),
    Step("append", "f", 2),
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepped, "plan", lambda seed: (STEPS, False))
    monkeypatch.setattr(ioerrors, "plan", lambda seed: (STEPS, False))


def test_a_good_shard_passes() -> None:
    with apart():
        tally = ioerrors.run(1)
    assert not tally.findings, tally.findings[0].what
    assert tally.counts["cases"] > 100
    assert tally.counts["errors"] >= tally.counts["cases"]
    for error in ("eio", "enospc", "short", "short_enospc"):
        assert tally.counts[f"cases_{error}_once"]
        assert tally.counts[f"cases_{error}_always"]


def test_copies_of_a_good_shard_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        *(Step("put", name) for name in ("s", "cf", "cd", "cc")),
        Step("append", "s", 3),
        Step("copy", "cf", 9),
        Step("round", number=2, others=("s", "cf")),
        Step("copy", "cc", 9),
        Step("delete_tag", "s", 3),
        Step("kill"),
        Step("flush", "cf"),
        Step("copy", "cf", 9),
    ]
    monkeypatch.setattr(ioerrors, "plan", lambda seed: (steps, False))
    with apart():
        tally = ioerrors.run(1)
    assert not tally.findings, tally.findings[0].what
    assert tally.counts["cases"] > 100


@pytest.mark.full
def test_a_short_write_that_is_taken_for_a_whole_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Disk, fd: int, data: bytes, offset: int) -> None:
        vars(disk)["os"].pwrite(fd, data, offset)

    monkeypatch.setattr(Disk, "write", write)
    with apart():
        assert ioerrors.run(1).findings


@pytest.mark.full
def test_a_failed_write_that_is_not_taken_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wal, "_cut", lambda self: None)
    monkeypatch.setattr(Wal, "discard", lambda self: None)
    with apart():
        assert ioerrors.run(1).findings
