"""The campaign over crash points finds what it is there for: faults that are planted into the disk and the shard."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from campaigns import crashpoints
from campaigns.campaign import Tally
from campaigns.platter import KILLS, POWER, Platter
from campaigns.stepped import Step
from campaigns.tape import Call
from figures import apart
from model import Record, Shard
from xxhash import xxh3_64_intdigest

from topics.storage import frames
from topics.walshard.log import recovery
from topics.walshard.log.disk import Disk
from topics.walshard.log.recovery import Recovery

STEPS = [
    Step("put", "f"),
    Step("append", "f", 3, "key-1"),
    Step("append", "d", 2),
    Step("flush", "f"),
    Step("checkpoint"),
    Step("append", "f", 2),
    Step("large", "f", 3),
    Step("delete_tag", "f", 3),
    Step("append", "e", 2),
    Step("append", "d", 2),
]


SOURCE_DELETE = Step("delete_tag", "s", 3)
ROUTED = [
    *(Step("put", name) for name in ("s", "cf", "cd", "cc")),
    Step("append", "s", 5, "key-1"),
    Step("copy", "cf", 9),
    Step("copy", "cd", 9),
    Step("append", "cf", 2),
    Step("copy", "cc", 9),
    Step("delete_tag", "cf", 1),
    Step("flush", "cf"),
    SOURCE_DELETE,
    Step("kill"),
    Step("append", "s", 2),
    Step("copy", "cf", 9),
    Step("copy", "cd", 9),
    Step("append", "cd", 1),
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashpoints, "plan", lambda seed: (STEPS, False))


def run() -> Tally:
    with apart():
        return crashpoints.run(1, tries=0)


def kinds_of(tally: Tally) -> str:
    return "\n".join(finding.what for finding in tally.findings)


# A new file's header that a crash cut short keeps a shard from starting: reported, and not what is looked for here.
def others(tally: Tally) -> list[str]:
    return [kind for kind in tally.kinds if "header" not in kind and "not a topics WAL" not in kind]


def test_a_good_shard_passes_every_point() -> None:
    tally = run()
    assert others(tally) == [], kinds_of(tally)
    assert tally.counts["cases"] > 200
    assert all(tally.counts[f"cases_{damage}"] for damage in (*KILLS, *POWER))


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("sync", lambda self, fd: None),
        ("sync_dir", lambda self, path: None),
    ],
)
@pytest.mark.full
def test_a_sync_that_is_left_out_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, instead: Callable[..., None]
) -> None:
    monkeypatch.setattr(Disk, method, instead)
    assert others(run())


@pytest.mark.full
def test_a_torn_frame_that_is_taken_for_good_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "xxh3_64_intdigest", lambda data: xxh3_64_intdigest(data[:56]))
    assert others(run())


@pytest.mark.full
def test_a_seq_that_is_given_out_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Recovery._settle

    def settle(self: Recovery, topics: list[object], *, folder_clean: bool, same_boot: bool) -> None:
        real(self, topics, folder_clean=True, same_boot=True)  # type: ignore[arg-type]

    monkeypatch.setattr(Recovery, "_settle", settle)
    assert any("head" in kind or "seq" in kind for kind in others(run()))


def test_a_finding_is_repeated_by_its_command_and_made_shorter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with monkeypatch.context() as planted:
        planted.setattr(Recovery, "_delete", lambda self, *args, **more: None)
        with apart():
            finding = crashpoints.run(1).findings[0]
            assert crashpoints.run(1, finding.only).findings[0].kind == finding.kind
            file = finding.what.split()[-1]
            assert 0 < len(msgspec.json.decode(Path(file).read_bytes())["steps"]) < len(STEPS)
            assert crashpoints.run(1, file).findings
    with apart():
        assert not crashpoints.run(1, file).findings


# --- routers' copies ---


@pytest.fixture
def _routed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashpoints, "plan", lambda seed: (ROUTED, False))


@pytest.mark.usefixtures("_routed")
def test_copies_of_a_good_shard_pass() -> None:
    tally = run()
    assert others(tally) == [], kinds_of(tally)
    assert tally.counts["cases"] > 200


@pytest.mark.usefixtures("_routed")
def test_copies_that_are_not_in_the_log_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "decode_copies", lambda frame: [])
    assert any("cf" in kind or "cd" in kind or "cc" in kind for kind in others(run()))


@pytest.mark.usefixtures("_routed")
def test_deletes_of_copies_that_a_recovery_forgets_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashpoints, "plan", lambda seed: ([step for step in ROUTED if step != SOURCE_DELETE], False))
    monkeypatch.setattr(Recovery, "_delete", lambda self, *args, **more: None)
    assert any("cf" in kind for kind in others(run()))


# --- what it has found ---


@pytest.mark.parametrize("rubbish", [b"TOPICWAL", bytes(range(64))], ids=["torn", "garbled"])
def test_a_header_that_never_got_to_the_disk_whole_is_no_damage(tmp_path: Path, rubbish: bytes) -> None:
    """A crash between the making of a log file and the sync of its header: nothing was ever written behind it."""
    shard = Shard(tmp_path, wal_file_bytes=8_192)
    shard.append("t", [Record(b"1")])
    current = Path(shard.engine.wal.current.path)
    shard.crash()
    fresh = current.with_name(current.name.replace("0001.wal", "0002.wal"))
    fresh.write_bytes(rubbish.ljust(8_192, b"\0"))
    shard.open(boot=bytes(16))
    assert len(shard.everything("t")) == 1


def test_nor_behind_a_frame_that_went_with_the_power(tmp_path: Path) -> None:
    shard = Shard(tmp_path, wal_file_bytes=8_192)
    shard.append("t", [Record(b"1")])
    shard.sync()
    current = shard.engine.wal.current
    end = current.end
    shard.append("t", [Record(b"2")])
    shard.crash()
    with open(current.path, "r+b") as torn:
        torn.seek(end)
        torn.write(b"rubbish")
    fresh = Path(current.path.replace("0001.wal", "0002.wal"))
    fresh.write_bytes(b"TOPICWAL".ljust(8_192, b"\0"))
    shard.open(boot=bytes(16))
    assert [stored.record.data for stored in shard.everything("t")] == [b"1"]


# --- the platter ---


def test_what_was_synced_is_there_and_what_was_not_may_go() -> None:
    platter = Platter()
    for call in (
        Call("create", path="a", file=1),
        Call("sync_dir", path="."),
        Call("write", file=1, offset=0, data=b"synced"),
        Call("sync", file=1),
        Call("write", file=1, offset=6, data=b" not"),
        Call("create", path="b", file=2),
    ):
        platter.do(call)
    dice = random.Random(1)
    assert platter.image("lost", dice) == {"a": b"synced"}
    assert platter.image("kept", dice) == platter.image("killed", dice) == {"a": b"synced not", "b": b""}
    found = {platter.image("torn", dice)["a"] for _ in range(200)}
    assert found == {b"synced not"[:length] for length in range(6, 11)}
    assert {frozenset(platter.image("names", dice)) for _ in range(50)} == {frozenset("a"), frozenset("ab")}
    assert all((content := platter.image("garbled", dice)["a"]) and content.startswith(b"synced") for _ in range(50))


def test_a_rename_without_a_sync_of_its_folder_may_be_undone() -> None:
    platter = Platter({"old": b"1"})
    platter.do(Call("create", path="old.tmp", file=1))
    platter.do(Call("write", file=1, data=b"2"))
    platter.do(Call("sync", file=1))
    platter.do(Call("rename", path="old", old_path="old.tmp"))
    dice = random.Random(1)
    assert platter.image("lost", dice) == {"old": b"1"}
    assert platter.image("killed", dice) == {"old": b"2"}
    assert {platter.image("names", dice)["old"] for _ in range(50)} == {b"1", b"2"}
