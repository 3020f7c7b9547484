"""What `topics snapshot rm` removes, and what it leaves alone whatever snapshot.json says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from topics.actors.startup.datadir_lock import write_manifest
from topics.cli.datadir.snapshot import listed, make, snapshot
from topics.errors import TopicsError
from topics.storage.manifest import Manifest
from topics.tools import snapshot_links

DIGITS = "0123456789ab"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a cold tier and no records."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (tmp_path / "cold" / "snapshots").mkdir(parents=True)
    write_manifest(str(folder), Manifest(format=1, layout=1, shards=1, cold=str(tmp_path / "cold"), cold_id="1"))
    return folder


@pytest.fixture
def cold(data: Path) -> Path:
    return data.parent / "cold" / "snapshots"


def view(data: Path, *, cold: Path | str | None, name: str = "s") -> Path:
    """A snapshot as `create` leaves it, its segments in `cold`."""
    path = data / "snapshots" / name
    (path / "wal").mkdir(parents=True)
    (path / "topics.json").write_text('{"format":1,"layout":1,"shards":1}')
    note = {"name": name, "created_ms": 1, "data_dir": str(data), "topics": 0, "records": 0}
    note |= {"linked_files": 0, "copied_bytes": 0, "cold": None if cold is None else str(cold)}
    (path / "snapshot.json").write_text(json.dumps(note))
    return path


def links(path: Path, *, marker: str | None = DIGITS) -> Path:
    (path / "topics" / "1").mkdir(parents=True)
    (path / "topics" / "1" / "1.data").write_text("kept")
    if marker is not None:
        (path / "links.json").write_text(json.dumps({"id": marker}))
    return path


def rm(data: Path, *names: str) -> Result:
    return CliRunner().invoke(snapshot, ["rm", *(names or ("s",)), "--data-dir", str(data)])


def everything(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*")}


def test_its_links_go_with_it(data: Path, cold: Path) -> None:
    path = view(data, cold=links(cold / f"s-{DIGITS}"))
    done = rm(data)
    assert (done.exit_code, done.output) == (0, "removed s\n")
    assert not path.exists()
    assert not list(cold.iterdir())


def test_one_that_was_renamed_has_its_marker(data: Path, cold: Path) -> None:
    view(data, cold=links(cold / f"s-{DIGITS}"), name="renamed")
    assert rm(data, "renamed").exit_code == 0
    assert not list(cold.iterdir())


def test_earlier_versions_wrote_no_marker(data: Path, cold: Path) -> None:
    """The folder with the snapshot's own name is accepted; that of another one is not."""
    view(data, cold=links(cold / f"s-{DIGITS}", marker=None))
    other = view(data, cold=links(cold / f"t-{DIGITS}", marker=None), name="u")
    assert rm(data).exit_code == 0
    done = rm(data, "u")
    assert done.exit_code == 1
    assert f"{other}: its segments in the cold tier are said to be in {cold}/t-{DIGITS}" in done.output
    assert "no links.json" in done.output
    assert f"remove {other} alone by hand" in done.output
    assert other.exists()
    assert [path.name for path in cold.iterdir()] == [f"t-{DIGITS}"]


@pytest.mark.parametrize("left", ["nothing", "empty", "marker"])
def test_what_was_half_removed_can_be_removed_again(data: Path, cold: Path, left: str) -> None:
    path, part = view(data, cold=cold / f"t-{DIGITS}"), cold / f"t-{DIGITS}"
    (path / "topics.json").unlink()
    if left != "nothing":
        part.mkdir()
    if left == "marker":
        (part / "links.json").write_text("")  # a crash came while it was written
    assert rm(data).exit_code == 0
    assert not path.exists()
    assert not part.exists()


def elsewhere(data: Path, cold: Path) -> Iterator[tuple[str, Path | str]]:
    """Paths that snapshot.json must not be believed about, each with something there."""
    outside = links(data.parent / "precious" / "snapshots" / f"s-{DIGITS}")
    inside = links(cold / f"s-{DIGITS}")
    yield "absolute", outside
    yield "dots", f"{cold}/x/../s-{DIGITS}"
    yield "up", f"{cold}/../../precious/snapshots/s-{DIGITS}"
    yield "parent", f"{inside}/.."
    yield "the tier", cold.parent
    yield "the snapshots", cold
    yield "the data", data
    yield "deeper", inside / "topics"
    yield "another name", links(cold / "s-precious")
    yield "relative", os.path.relpath(outside)
    yield "slash", f"{inside}/"
    yield "another marker", links(cold / f"t-{DIGITS}", marker="ba9876543210")
    link = cold / "l-0123456789ab"
    link.symlink_to(outside)
    yield "link", link
    file = cold / "f-0123456789ab"
    file.write_text("a file")
    yield "file", file
    yield "null", "/\0"
    marked = links(cold / "m-0123456789ab", marker=None)
    (marked / "links.json").symlink_to(outside / "links.json")
    yield "marker by a link", marked


def test_nothing_else_is_removed(data: Path, cold: Path) -> None:
    (cold / "x").mkdir()
    for number, (what, path) in enumerate(list(elsewhere(data, cold))):
        name = f"n{number}"
        view(data, cold=path, name=name)
        before = everything(data.parent)
        done = rm(data, name)
        assert done.exit_code == 1, what
        assert "Nothing was removed" in done.output, what
        assert everything(data.parent) == before, what


def test_the_folder_of_links_is_no_link_itself(data: Path, cold: Path) -> None:
    outside = data.parent / "outside"
    cold.rename(outside)
    cold.symlink_to(outside)
    links(outside / f"s-{DIGITS}")
    view(data, cold=cold / f"s-{DIGITS}")
    before = everything(data.parent)
    done = rm(data)
    assert (done.exit_code, "symbolic link" in done.output) == (1, True)
    assert everything(data.parent) == before


def test_a_data_folder_without_a_cold_tier_has_no_links(data: Path, cold: Path) -> None:
    write_manifest(str(data), Manifest(format=1, layout=1, shards=1))
    view(data, cold=links(cold / f"s-{DIGITS}"))
    before = everything(data.parent)
    done = rm(data)
    assert (done.exit_code, "has no cold tier" in done.output) == (1, True)
    assert everything(data.parent) == before


def test_a_snapshot_that_is_a_link_stays(data: Path, tmp_path: Path) -> None:
    path = view(data, cold=None)
    path.rename(tmp_path / "precious")
    path.symlink_to(tmp_path / "precious")
    before = everything(tmp_path)
    done = rm(data)
    assert (done.exit_code, "is a symbolic link" in done.output) == (1, True)
    assert everything(tmp_path) == before


def test_links_in_a_snapshot_go_and_what_they_lead_to_stays(data: Path, cold: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    path = view(data, cold=links(cold / f"s-{DIGITS}"))
    for folder in (path, path / "wal", cold / f"s-{DIGITS}", cold / f"s-{DIGITS}" / "topics"):
        (folder / "folder").symlink_to(precious)
        (folder / "file").symlink_to(precious / "file")
    assert rm(data).exit_code == 0
    assert not path.exists()
    assert (precious / "file").read_text() == "kept"


def test_one_refusal_keeps_all_of_them(data: Path, cold: Path) -> None:
    view(data, cold=None, name="good")
    view(data, cold=links(data.parent / f"s-{DIGITS}"), name="bad")
    before = everything(data.parent)
    assert rm(data, "good", "bad").exit_code == 1
    assert everything(data.parent) == before


def test_what_an_unfinished_one_names_is_not_believed_either(data: Path, cold: Path) -> None:
    outside = links(data.parent / "precious" / "snapshots" / f"s-{DIGITS}")
    work = data / "snapshots" / "s.tmp"
    work.mkdir(parents=True)
    (work / "apart").write_text(str(outside))
    before = everything(data.parent)
    with pytest.raises(TopicsError, match="Nothing was removed"):
        make(str(data), str(data / "snapshots"), "s")
    assert everything(data.parent) == before
    (work / "apart").write_text(str(links(cold / f"s-{DIGITS}", marker=None)))  # of an earlier version
    make(str(data), str(data / "snapshots"), "s")
    assert not list(cold.iterdir())
    assert outside.exists()
    assert [each.snapshot.name for each in listed(str(data / "snapshots"))] == ["s"]


def test_links_that_are_made_can_be_removed(data: Path, cold: Path) -> None:
    path = snapshot_links.new_links(str(cold.parent), "s")
    for _ in range(2):
        snapshot_links.begin_links(path)
    (Path(path) / "topics").mkdir()
    view(data, cold=path, name="renamed")
    assert rm(data, "renamed").exit_code == 0
    assert not list(cold.iterdir())
