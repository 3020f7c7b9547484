from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topics.actors.startup.datadir_lock import (
    DataDir,
    LayoutPlan,
    LockInfo,
    read_lock_info,
    read_manifest,
    url,
    write_manifest,
)
from topics.errors import DataDirLocked, ServerNotRunning, StartRefused
from topics.storage.format import FORMAT_VERSION
from topics.storage.manifest import Manifest
from topics.storage.routers import encode_rules


def info(pid: int | None = None, port: int | None = 4000) -> LockInfo:
    return LockInfo(pid=pid or os.getpid(), started_ms=1, host="127.0.0.1", version="0.1.0", port=port)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_missing_folder_is_made_for_its_owner_only(tmp_path: Path) -> None:
    folder = DataDir.claim(str(tmp_path / "a" / "b"), info())
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert not os.get_inheritable(folder.lock_fd)
    folder.close()


def test_second_claim_names_the_holder_and_what_to_do(tmp_path: Path) -> None:
    folder = DataDir.claim(str(tmp_path), info(port=4321))
    with pytest.raises(DataDirLocked) as refused:
        DataDir.claim(str(tmp_path), info())
    text = str(refused.value)
    assert str(os.getpid()) in text
    assert "http://127.0.0.1:4321" in text
    assert "TOPICS_DATA_DIR" in text
    folder.close()
    DataDir.claim(str(tmp_path), info()).close()


def test_a_refused_claim_leaves_no_fd_and_the_holder_s_words(tmp_path: Path) -> None:
    folder = DataDir.claim(str(tmp_path), info(port=4321))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataDirLocked):
        DataDir.claim(str(tmp_path), info(port=1))
    assert len(os.listdir("/proc/self/fd")) == before
    assert read_lock_info(str(tmp_path)).port == 4321
    folder.close()


def test_folder_stays_locked_while_a_copy_of_the_lock_lives(tmp_path: Path) -> None:
    """What a shard holds that outlived its supervisor by a moment."""
    folder = DataDir.claim(str(tmp_path), info(pid=dead_pid()))
    copy = os.dup(folder.lock_fd)
    folder.close()
    with pytest.raises(DataDirLocked, match="is gone"):
        DataDir.claim(str(tmp_path), info(), wait_ms=50)
    os.close(copy)
    DataDir.claim(str(tmp_path), info()).close()


def test_claim_waits_for_the_last_writer_of_a_dead_server(tmp_path: Path) -> None:
    folder = DataDir.claim(str(tmp_path), info(pid=dead_pid()))
    # Holds the same lock for a moment after we have let go.
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=[folder.lock_fd],
    )
    folder.close()
    assert holder.stdin is not None
    start = time.monotonic()
    holder.stdin.close()
    DataDir.claim(str(tmp_path), info(), wait_ms=30_000).close()
    assert time.monotonic() - start < 30
    holder.wait()


def test_a_shorter_line_replaces_a_longer_one(tmp_path: Path) -> None:
    folder = DataDir.claim(str(tmp_path), info(port=65_535))
    folder.announce(info(port=1))
    assert read_lock_info(str(tmp_path)).port == 1
    assert (tmp_path / "LOCK").read_bytes().count(b"\n") == 1
    folder.close()


def test_no_server_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ServerNotRunning, match="no server is running"):
        read_lock_info(str(tmp_path))
    DataDir.claim(str(tmp_path), info()).close()
    with pytest.raises(ServerNotRunning, match="no server is running"):
        read_lock_info(str(tmp_path))
    with pytest.raises(ServerNotRunning):
        read_lock_info(str(tmp_path / "LOCK"))


def test_looking_does_not_keep_the_lock(tmp_path: Path) -> None:
    DataDir.claim(str(tmp_path), info()).close()
    with pytest.raises(ServerNotRunning):
        read_lock_info(str(tmp_path))
    DataDir.claim(str(tmp_path), info(), wait_ms=0).close()


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(StartRefused, match="TOPICS_DATA_DIR"):
        DataDir.claim(str(tmp_path / "data"), info())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StartRefused, match="writable"):
        DataDir.claim(str(tmp_path), info())


def test_unwritable_filesystem() -> None:
    with pytest.raises(StartRefused, match="TOPICS_DATA_DIR"):
        DataDir.claim("/proc/no-data-here", info())


def test_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StartRefused, match="local disk"):
        DataDir.claim(str(tmp_path), info())


def test_first_start_writes_the_manifest_at_once(tmp_path: Path) -> None:
    folder = DataDir.claim(str(tmp_path), info())
    assert folder.plan_layout(3) == LayoutPlan(layout=1, shards=3)
    assert read_manifest(str(tmp_path)) == Manifest(format=FORMAT_VERSION, layout=1, shards=3, routers=True)
    assert folder.plan_layout(3) == LayoutPlan(layout=1, shards=3)
    folder.close()


@pytest.mark.parametrize("rules", [True, False])
def test_a_folder_of_an_earlier_version_gets_its_rules_proved(tmp_path: Path, rules: bool) -> None:
    write_manifest(str(tmp_path), Manifest(format=FORMAT_VERSION, layout=1, shards=1))
    if rules:
        (tmp_path / "routers").write_bytes(b"whatever is in it")
    folder = DataDir.claim(str(tmp_path), info())
    folder.plan_layout(1)
    manifest = read_manifest(str(tmp_path))
    assert manifest is not None
    assert manifest.routers
    known = b"whatever is in it" if rules else encode_rules([])
    assert (tmp_path / "routers").read_bytes() == known
    (tmp_path / "routers").unlink()
    folder.plan_layout(1)
    assert not (tmp_path / "routers").exists(), "one that is missing is not made good in silence"
    folder.close()


def test_the_rules_are_there_before_the_manifest_knows_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a crash in between tells of no loss."""
    write_manifest(str(tmp_path), Manifest(format=FORMAT_VERSION, layout=1, shards=1))
    folder = DataDir.claim(str(tmp_path), info())

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("topics.actors.startup.datadir_lock.write_manifest", die)
        with pytest.raises(KeyboardInterrupt):
            folder.plan_layout(1)
    assert (tmp_path / "routers").exists()
    assert read_manifest(str(tmp_path)) == Manifest(format=FORMAT_VERSION, layout=1, shards=1)
    folder.plan_layout(1)
    folder.close()


def test_changed_shard_count_plans_a_new_layout_and_commits_it_once(tmp_path: Path) -> None:
    folder = DataDir.claim(str(tmp_path), info())
    folder.plan_layout(2)
    plan = folder.plan_layout(5)
    assert plan == LayoutPlan(layout=2, shards=5, old_layout=1, old_shards=2)
    assert plan.changes
    # A crash before the commit: the next start plans the same again.
    assert folder.plan_layout(5) == plan
    assert folder.commit_layout(plan) == LayoutPlan(layout=2, shards=5)
    assert folder.plan_layout(5) == LayoutPlan(layout=2, shards=5)
    folder.close()


def test_crash_before_the_rename_leaves_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Manifest(format=1, layout=1, shards=2)
    write_manifest(str(tmp_path), old)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_manifest(str(tmp_path), Manifest(format=1, layout=2, shards=3))
    assert read_manifest(str(tmp_path)) == old


def test_newer_format_is_refused(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), Manifest(format=FORMAT_VERSION + 1, layout=1, shards=1))
    with pytest.raises(StartRefused, match="newer"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format":1,"layout":0,"shards":1}', b'{"format":1}'])
def test_damaged_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "topics.json").write_bytes(text)
    with pytest.raises(StartRefused, match="damaged"):
        read_manifest(str(tmp_path))


def test_data_without_a_manifest_is_not_taken_for_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "wal" / "shard-00").mkdir(parents=True)
    folder = DataDir.claim(str(tmp_path), info())
    with pytest.raises(StartRefused, match=r"topics\.json"):
        folder.plan_layout(1)
    folder.close()


def test_addresses() -> None:
    assert url("127.0.0.1", 4000) == "http://127.0.0.1:4000"
    assert url("::1", 4000) == "http://[::1]:4000"
