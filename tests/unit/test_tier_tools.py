"""Every tool that reads a data folder, after a kill at each step of a relocation, and while the cold disk is away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from folderplay import write_manifest
from model import Record, Shard
from test_relocator import fill, forget_log, run_inline, seqs, settings

from topics import limits
from topics.cli.main import main
from topics.walshard.log import disk
from topics.walshard.segments import checkpointer, segments

# in the order in which they come
POINTS = ["copied", "relocate", "relocated", "snapshot", "leave", "left"]
TOOLS = [
    ("verify",),
    ("verify", "--deep", "--json"),
    ("repair",),
    ("repair", "--to", "COPY"),
    ("segment", "ls"),
    ("segment", "ls", "--json"),
    ("segment", "dump"),
    ("wal", "dump"),
    ("shard", "inspect", "0"),
    ("topic", "ls"),
    ("topic", "show", "t"),
    ("export", "t", "--data-dir", "DATA"),
    ("snapshot", "create", "s"),
    ("snapshot", "ls"),
    ("backup", "create", "--to", "REPOSITORY"),
]


class Killed(BaseException):
    """Not an Exception: nobody may go on after it."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


def kill_at(monkeypatch: pytest.MonkeyPatch, wanted: str, times: int) -> None:
    left = times

    def kill_point(name: str) -> None:
        nonlocal left
        left -= name == wanted
        if name == wanted and left == 0:
            raise Killed

    for module in (disk, checkpointer, segments):
        monkeypatch.setattr(module, "kill_point", kill_point)


def run(folder: Path, tool: tuple[str, ...]) -> tuple[int, str]:
    """The exit code, and all that was said; a stack is a failure of the test."""
    beside = {"COPY": "copy", "REPOSITORY": "repository"}
    places = {"DATA": str(folder)} | {word: str(folder.with_name(name)) for word, name in beside.items()}
    env = {"TOPICS_DATA_DIR": str(folder), "TOPICS_CONFIG": None, "COLUMNS": "200"}
    done = CliRunner().invoke(main, [places.get(word, word) for word in tool], env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout + done.stderr


def move(shard: Shard) -> None:
    shard.copy_to_cold()
    shard.mover.checkpoint()


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    shard = Shard(tmp_path / "data", **settings(tmp_path))
    fill(shard, count=60)
    shard.delete("t", tag="fifth", before_seq=12)
    shard.append("t", [Record(b"1", tag="y")])
    forget_log(shard)
    write_manifest(tmp_path / "data", cold=str(tmp_path / "cold"), cold_id="c01d")
    return shard


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_each_step(
    shard: Shard, point: str, times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = seqs(shard)
    run_inline(shard)
    with monkeypatch.context() as patched:
        kill_at(patched, point, 1 if point == "snapshot" else times)
        with pytest.raises(Killed):
            move(shard)
    shard.crash()
    if point in ("copied", "relocate"):  # an exception takes the temporary file along, a kill does not
        home = tmp_path / "cold" / "topics" / f"{shard.topic('t').id:016x}"
        (home / f"{41:020d}.data.tmp").write_bytes(b"half of it")
    for tool in TOOLS:
        code, said = run(tmp_path / "data", tool)
        expected = 1 if tool == ("repair",) and "would remove" in said else 0
        assert code == expected, (tool, said)
    verdict = json.loads(run(tmp_path / "data", ("verify", "--deep", "--json"))[1])
    assert verdict["clean"], verdict
    shard.open()
    assert seqs(shard) == before


@pytest.mark.parametrize("below", [True, False])
def test_the_disk_is_away(shard: Shard, tmp_path: Path, below: bool) -> None:
    """It is named, not the place in the data folder where its segments once were; nobody is sent to a backup."""
    shard.relocate()
    shard.crash()
    cold = tmp_path / "cold"
    cold.rename(tmp_path / "unmounted")
    if below:
        cold.mkdir()
    for tool in TOOLS:
        code, said = run(tmp_path / "data", tool)
        assert "restore" not in said, (tool, said)
        if tool[0] in ("wal",) or tool[:2] == ("snapshot", "ls"):
            assert code == 0, (tool, said)
        elif tool == ("segment", "ls"):
            assert "cold tier is away" in said
        else:
            assert f"the cold tier {cold} of this folder is not there" in said or tool[0] in ("segment",), (tool, said)
            assert "mount its disk" in said or tool[0] == "segment", (tool, said)
            assert code == 1 or tool[0] == "segment", (tool, said)
    found = json.loads(run(tmp_path / "data", ("verify", "--json"))[1])["verdict"]
    assert found["problem_count"] == 1, found
    assert "2 segments are in it" in found["problems"][0]["text"], found
    (tmp_path / "cold").rmdir() if below else None
    (tmp_path / "unmounted").rename(cold)
    assert run(tmp_path / "data", ("verify", "--deep"))[0] == 0


@pytest.mark.parametrize("tool", [("backup", "create", "--to", "REPOSITORY"), ("topic", "show", "t"), ("verify",)])
def test_one_file_of_it_is_missing(shard: Shard, tmp_path: Path, tool: tuple[str, ...]) -> None:
    """The cold tier is named, for that is where it was."""
    shard.relocate()
    shard.crash()
    sorted((tmp_path / "cold").rglob("*.data"))[0].unlink()
    code, said = run(tmp_path / "data", tool)
    assert code == 1, said
    assert f"in the cold tier {tmp_path / 'cold'}" in said, said
