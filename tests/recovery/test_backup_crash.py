"""`topics backup` killed at every step of create, restore and rm: whatever is left never looks complete when it is not,
can be gone on with or thrown away, and never costs another backup anything.

A step is a passage of a kill point: before and after each write, sync and rename, after each folder and each removal.
Each round runs in a child of its own, which ends itself there as kill -9 would. By default a sample of the steps, with
TOPICS_TEST_EXHAUSTIVE=1 all of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import livefiles
import pytest
from crash_server import EXHAUSTIVE, SMALL, Server, eventually
from figures import CRASH_POINTS

from topics.actors.startup.datadir_lock import DataDir, LockInfo
from topics.backup import create as creating
from topics.backup import disk as backup_disk
from topics.backup import restore as restoring
from topics.backup.create import create
from topics.backup.repository import Repository
from topics.backup.restore import restore
from topics.backup.verify import verify
from topics.datadir.fsck.verify import verify as verify_folder
from topics.datadir.view.folder import Folder
from topics.errors import StartRefused
from topics.walshard.log import disk as shard_disk

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 120)]

SAMPLE = 14
SOME_INFO = LockInfo(pid=1, started_ms=1, host="127.0.0.1", version="0")
FINISHED, FAILED = 0, 1


class Steps:
    """Takes the place of kill_point: counts, and ends the process at one of them."""

    def __init__(self, last: int | None) -> None:
        self._last = last
        self._lock = threading.Lock()
        self.count = 0

    def __call__(self, name: str) -> None:
        with self._lock:  # no other thread takes another step
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()


def in_child(work: Callable[[], object], *, last: int | None) -> tuple[bool, int]:
    """(whether it came to its end, the steps it took, if it did)"""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            steps = Steps(last)
            for module in (backup_disk, shard_disk, restoring):
                module.kill_point = steps  # type: ignore[attr-defined]
            creating._THREADS = restoring._THREADS = 2
            work()
            os.write(writer, str(steps.count).encode())
            code = FINISHED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as source:
        told = source.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        CRASH_POINTS.add()
        return False, 0
    assert os.WEXITSTATUS(status) == FINISHED, "it failed; the output above says why"
    return True, int(told)


def sampled(steps: int) -> list[int]:
    """Which of so many steps to die at; the first and the last always."""
    assert steps > SAMPLE
    if EXHAUSTIVE:
        return list(range(1, steps + 1))
    return sorted({1 + at * (steps - 1) // (SAMPLE - 1) for at in range(SAMPLE)} | set(range(steps - 6, steps + 1)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a killed server: segments, deletes in them, a log, a queue."""
    folder = tmp_path_factory.mktemp("source") / "data"
    server = Server(folder, shards=2, env=SMALL)
    try:
        client = server.wait_ready().client()
        client.put("jobs", type="queue")
        client.append("jobs", *range(10))
        for number in range(40):
            assert client.append("many", *({"n": number, "pad": "x" * 3_000} for _ in range(12))).ok
        sealed = lambda: livefiles.find(folder, "topics/*/*.idx") and livefiles.find(folder, "wal/*/*.snap")  # noqa: E731
        eventually(sealed, what="segments")
        assert client.delete("many", before_seq=7).ok
        assert client.append("few", 1, 2, 3).ok
    finally:
        server.close()
    return folder


@pytest.fixture(scope="module")
def later(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder in its next life, with more in it and other deletes."""
    folder = tmp_path_factory.mktemp("later") / "data"
    shutil.copytree(data, folder)
    server = Server(folder, shards=2, env=SMALL)
    try:
        client = server.wait_ready().client()
        assert client.append("few", *range(60)).ok
        assert client.delete("many", before_seq=40).ok
        assert client.append("new", "x").ok
    finally:
        server.close()
    return folder


def told(folder: Path) -> dict[str, Any]:
    seen = Folder(str(folder))
    return {topic.name: (topic.id, topic.head_seq, topic.low, topic.count) for topic in seen.topics}


def opened(place: Path) -> Repository:
    return Repository.made(str(place))


def files_of(folder: Path) -> dict[str, bytes]:
    left = (path for path in folder.rglob("*") if path.is_file() and path.name != "LOCK")
    return {str(path.relative_to(folder)): path.read_bytes() for path in left}


def check_restorable(place: Path, name: str, source: Path, target: Path) -> None:
    restore(opened(place), name, str(target))
    assert told(target) == told(source)
    assert verify_folder(str(target), deep=True, running=False).clean
    shutil.rmtree(target)


@pytest.mark.gate
def test_create(data: Path, tmp_path: Path) -> None:
    place = tmp_path / "repository"
    finished, steps = in_child(lambda: create(str(data), opened(place), "one"), last=None)
    assert finished
    whole = {path.name for path in place.glob("objects/*/*")}
    deaths = 0
    for number, last in enumerate(sampled(steps)):
        shutil.rmtree(place)
        finished, _ = in_child(lambda: create(str(data), opened(place), "one"), last=last)
        deaths += not finished
        repository = opened(place)
        assert verify(repository, [], deep=False).clean
        if repository.names():  # the last steps come after the one that counts
            check_restorable(place, "one", data, tmp_path / "back")
            continue
        if number % 3 == 0 and repository.unfinished():
            repository.remove(["one"])
            assert not [path for path in place.glob("objects/**/*") if path.is_file()]
        kept = {path: path.stat().st_ino for path in place.glob("objects/*/*")}
        create(str(data), repository, "one")
        assert {path: path.stat().st_ino for path in kept} == kept  # nothing was copied again
        assert {path.name for path in place.glob("objects/*/*")} == whole
        assert repository.unfinished() == []
        check_restorable(place, "one", data, tmp_path / "back")
    assert deaths > SAMPLE // 2


def test_killed_again_and_again_it_still_gets_there(data: Path, tmp_path: Path) -> None:
    place = tmp_path / "repository"
    for last in range(3, 2_000, 6):
        in_child(lambda: create(str(data), opened(place), "one"), last=last)
        if opened(place).names():  # it may have died right behind the step that counts
            break
    else:
        raise AssertionError("it never came to its end")
    assert last > 20
    check_restorable(place, "one", data, tmp_path / "back")


def test_a_second_one_never_harms_the_first(data: Path, later: Path, tmp_path: Path) -> None:
    place, begun = tmp_path / "repository", tmp_path / "begun"
    create(str(data), opened(begun), "one")
    shutil.copytree(begun, place)
    _, steps = in_child(lambda: create(str(later), opened(place), "two"), last=None)
    for last in sampled(steps)[:: 1 if EXHAUSTIVE else 3]:
        shutil.rmtree(place)
        shutil.copytree(begun, place)
        in_child(lambda: create(str(later), opened(place), "two"), last=last)
        assert verify(opened(place), ["one"], deep=True).clean
        if "two" not in opened(place).names():
            create(str(later), opened(place), "two")
        check_restorable(place, "one", data, tmp_path / "back")
        check_restorable(place, "two", later, tmp_path / "back")


@pytest.mark.parametrize("shards", [2, 3])
def test_restore(data: Path, tmp_path: Path, shards: int) -> None:
    place, target = tmp_path / "repository", tmp_path / "back"
    create(str(data), opened(place), "one")

    def run() -> None:
        restore(opened(place), "one", str(target), shards=shards)

    _, steps = in_child(run, last=None)
    whole = files_of(target)
    expected = told(target)
    assert {name: value for name, value in expected.items() if name in told(data)} == told(data)
    deaths = 0
    for last in sampled(steps) if shards == 2 else sorted({*range(1, 30), *sampled(steps)}):  # dividing comes first
        shutil.rmtree(target)
        finished, _ = in_child(run, last=last)
        deaths += not finished
        if not (target / "topics.json").exists() and target.exists():
            check_nobody_starts(target)
        elif target.exists():
            assert told(target) == expected
        if (target / "restore.json").exists() or not (target / "topics.json").exists():
            run()
        assert told(target) == expected
        verdict = verify_folder(str(target), deep=True, running=False)
        assert (verdict.problems, verdict.notes) == ([], [])
        if shards == 2:
            assert files_of(target) == whole
        assert not list(target.rglob("*.tmp"))
    assert deaths > SAMPLE // 2


def check_nobody_starts(target: Path) -> None:
    """Unless nothing at all was restored yet."""
    claimed = DataDir.claim(str(target), SOME_INFO)
    try:
        if any((target / name).exists() for name in ("wal", "topics", "routers")):
            with pytest.raises(StartRefused, match="restore"):
                claimed.plan_layout(2)
    finally:
        claimed.close()


def test_rm(data: Path, later: Path, tmp_path: Path) -> None:
    place, begun = tmp_path / "repository", tmp_path / "begun"
    create(str(data), opened(begun), "one")
    create(str(later), opened(begun), "two")
    for victim, other, source in (("one", "two", later), ("two", "one", data)):

        def run(victim: str = victim) -> None:
            opened(place).remove([victim])

        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(begun, place)
        finished, steps = in_child(run, last=None)
        assert finished
        whole = {path.name for path in place.glob("objects/*/*")}
        for last in range(1, steps + 1):
            shutil.rmtree(place)
            shutil.copytree(begun, place)
            in_child(run, last=last)
            repository = opened(place)
            assert verify(repository, [other], deep=False).clean
            if victim in repository.names():
                assert verify(repository, [victim], deep=False).clean
                repository.remove([victim])
            else:
                # What is left over goes with the next one that is removed.
                create(str(source), repository, "three")
                repository.remove(["three"])
            assert {path.name for path in place.glob("objects/*/*")} == whole
        check_restorable(place, other, source, tmp_path / "back")
