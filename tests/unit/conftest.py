"""Folders that several families of tests damage: made once, copied by whoever wants to change one."""

from __future__ import annotations

from pathlib import Path

import pytest

from topics import limits
from topics.datadir.fsck import checking
from topics.datadir.view import folder as folder_module


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, and nobody waits before a second look."""
    _make_small(monkeypatch)
    monkeypatch.setattr(folder_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(checking, "_PAUSE_S", 0.0)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mended.py says what is in it. Not to be written to."""
    from mended import build

    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        folder = tmp_path_factory.mktemp("whole")
        build(folder)
    return folder


def _make_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    patch.setattr(limits, "BLOCK_RECORDS", 8)


@pytest.fixture(autouse=True)
def _rounds_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of a gateway ends after some milliseconds of the real clock, which a busy machine takes for nothing.
    Tests of that bound set their own."""
    monkeypatch.setattr("topics.gateway.http1.server._TAKE_NS", 60_000_000_000)
