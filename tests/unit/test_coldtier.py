"""Whose a cold folder is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topics.actors.startup.coldtier import settle_cold
from topics.errors import StartRefused
from topics.storage.manifest import Manifest

NEW = Manifest(format=1, layout=1, shards=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def settle(data: Path, manifest: Manifest, cold: Path | None) -> Manifest:
    return settle_cold(str(data), manifest, None if cold is None else str(cold))


def add_segment(cold: Path) -> None:
    folder = cold / "topics" / "00000000000000aa"
    folder.mkdir(parents=True)
    (folder / "00000000000000000001.data").write_bytes(b"x")


def test_without_one_nothing_changes(data: Path) -> None:
    assert settle(data, NEW, None) is NEW


def test_a_new_one_is_made_and_marked(data: Path, tmp_path: Path) -> None:
    cold = tmp_path / "a" / "cold"
    manifest = settle(data, NEW, cold)
    assert manifest.cold == str(cold)
    assert json.loads((cold / "cold.json").read_bytes()) == {"id": manifest.cold_id}
    assert settle(data, manifest, cold) == manifest
    assert settle(data, manifest, None) == manifest, "what is there is still read"


def test_it_is_known_again_where_it_was_moved_to(data: Path, tmp_path: Path) -> None:
    manifest = settle(data, NEW, tmp_path / "cold")
    add_segment(tmp_path / "cold")
    (tmp_path / "cold").rename(tmp_path / "moved")
    assert settle(data, manifest, None) == manifest, "it may come back"
    assert settle(data, manifest, tmp_path / "cold") == manifest
    assert not (tmp_path / "cold").exists()
    moved = settle(data, manifest, tmp_path / "moved")
    assert moved.cold == str(tmp_path / "moved")
    assert moved.cold_id == manifest.cold_id


def test_another_one_while_segments_are_in_the_old_one(data: Path, tmp_path: Path) -> None:
    manifest = settle(data, NEW, tmp_path / "cold")
    changed = settle(data, manifest, tmp_path / "other")
    assert changed.cold == str(tmp_path / "other"), "nothing was there yet"
    add_segment(tmp_path / "other")
    with pytest.raises(StartRefused, match=r"segments of .* are in the cold tier .*/other"):
        settle(data, changed, tmp_path / "third")


@pytest.mark.parametrize("known", [True, False])
def test_that_of_another_data_folder(data: Path, tmp_path: Path, known: bool) -> None:
    settle(data, NEW, tmp_path / "theirs")
    add_segment(tmp_path / "theirs")
    mine = settle(data, NEW, tmp_path / "mine") if known else NEW
    with pytest.raises(StartRefused, match="cold tier of another data folder"):
        settle(data, mine, tmp_path / "theirs")


def test_segments_without_a_mark(data: Path, tmp_path: Path) -> None:
    add_segment(tmp_path / "cold")
    with pytest.raises(StartRefused, match="another data folder"):
        settle(data, NEW, tmp_path / "cold")


@pytest.mark.parametrize("below", [".", "cold"])
def test_not_inside_the_data_folder(data: Path, below: str) -> None:
    with pytest.raises(StartRefused, match="inside the data folder"):
        settle(data, NEW, data / below)


def test_a_damaged_mark(data: Path, tmp_path: Path) -> None:
    manifest = settle(data, NEW, tmp_path / "cold")
    (tmp_path / "cold" / "cold.json").write_bytes(b"{")
    with pytest.raises(StartRefused, match=r"cold\.json"):
        settle(data, manifest, tmp_path / "cold")


def test_a_place_where_none_can_be(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartRefused, match="TOPICS_COLD_DIR"):
        settle(data, NEW, tmp_path / "file" / "cold")
