"""A cold disk that goes away while a shard serves: nothing moves to what lies below it, and nothing hot goes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from model import Record, Shard, error_of, marked
from test_relocator import fill, forget_log, seqs, settings, tiers

from topics import limits
from topics.errors import ColdTierGone, DiskFull

ALL = list(range(1, 101))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


class Disk:
    """The cold disk: what is at its place while it is away is as an unmounted one leaves it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.real = place.with_name("unmounted")
        self.below: list[Path] = []

    def go(self, *, leaving: str) -> None:
        self.place.rename(self.real)
        if leaving == "an empty folder":
            self.place.mkdir()
        elif leaving == "a copy without the marker":
            shutil.copytree(self.real, self.place)
            (self.place / "cold.json").unlink()
        elif leaving == "that of another":
            shutil.copytree(self.real, self.place)
            (self.place / "cold.json").write_text('{"id":"other"}')

    def found_below(self) -> list[str]:
        return sorted(str(path.relative_to(self.place)) for path in self.place.rglob("*.data*"))

    def come_back(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.real.rename(self.place)


LEFT = ["nothing", "an empty folder", "a copy without the marker", "that of another"]


class Story:
    def __init__(self, shard: Shard, disk: Disk) -> None:
        self.shard = shard
        self.disk = disk
        self.said: list[str] = []
        assert shard.relocator is not None
        self.relocator = shard.relocator
        self.relocator.on_trouble = self.said.append
        self.relocator.on_back = lambda: self.said.append("back")

    def pass_time(self) -> None:
        """Longer than any retry."""
        for _ in range(3):
            self.shard.wall.pass_ms(40_000)
            self.relocator.look()
            self.relocator.wait()
            self.relocator.step()
            self.relocator.wait()
            self.shard.checkpoint()

    def hot(self) -> list[str]:
        return sorted(path.name for path in Path(self.shard.settings.data_dir).rglob("topics/*/*.data"))


@pytest.fixture
def story(tmp_path: Path) -> Story:
    shard = Shard(tmp_path / "data", **settings(tmp_path))
    fill(shard)
    return Story(shard, Disk(tmp_path / "cold"))


@pytest.mark.parametrize("leaving", LEFT)
def test_a_disk_that_is_gone_stops_the_moving_and_nothing_else(story: Story, leaving: str) -> None:
    shard = story.shard
    before = story.hot()
    story.disk.go(leaving=leaving)
    below = story.disk.found_below()
    assert shard.relocator is not None
    shard.relocator.consider(shard.topic("t"))
    story.pass_time()
    assert story.disk.place.exists() == (leaving != "nothing"), "it does not make the place again"
    assert story.disk.found_below() == below, "nor writes there"
    assert (tiers(shard), story.hot()) == ("hhhhh", before)
    assert len(story.said) == 1
    assert str(story.disk.place) in story.said[0]
    assert "mount its disk" in story.said[0]
    assert story.relocator.gone
    covered = shard.mover.snapshot_lsn
    shard.append("t", [Record(b"1")])
    shard.checkpoint()
    assert shard.mover.snapshot_lsn > covered
    story.disk.come_back()
    story.pass_time()
    assert story.said[1:] == ["back"]
    assert not story.relocator.gone
    shard.relocate()
    assert tiers(shard) == "cccch"
    shard.restart()
    assert seqs(shard) == [*ALL, 101]


@pytest.mark.parametrize("leaving", LEFT)
def test_it_goes_between_the_copy_and_the_end_of_the_hot_file(story: Story, leaving: str) -> None:
    shard = story.shard
    before = story.hot()
    shard.copy_to_cold()
    story.disk.go(leaving=leaving)
    covered = shard.mover.snapshot_lsn
    shard.delete("t", tag="fifth", before_seq=12)
    shard.checkpoint()
    assert shard.mover.snapshot_lsn > covered, "a snapshot is written all the same"
    assert (tiers(shard), story.hot()) == ("hhhhh", before)
    left = [seq for seq in ALL if seq not in (5, 10)]
    assert seqs(shard) == left
    assert len(story.said) == 1
    forget_log(shard)
    shard.crash()
    story.disk.come_back()
    shard.open()
    assert seqs(shard) == left, "flags went to the file that counts"
    shard.relocate()
    assert tiers(shard) == "cccch"
    forget_log(shard)
    shard.restart()
    assert seqs(shard) == left


def test_a_copy_that_is_no_longer_whole_takes_nobodys_place(story: Story) -> None:
    """The disk that came back is an older image of itself."""
    shard = story.shard
    shard.copy_to_cold()
    first, *_ = sorted(story.disk.place.rglob("*.data"))
    os.truncate(first, 100)
    shard.checkpoint()
    assert tiers(shard) == "hccch"
    assert "is not what it was" in story.said[0] or "part of one" in story.said[0]
    assert seqs(shard) == ALL
    shard.wall.pass_ms(40_000)
    shard.relocate()
    assert tiers(shard) == "cccch"
    shard.restart()
    assert seqs(shard) == ALL


def test_readers_are_told_where_it_is_and_what_to_do(story: Story) -> None:
    shard = story.shard
    shard.relocate()
    story.disk.go(leaving="an empty folder")
    error = error_of(lambda: shard.diff("t", 0))
    assert (error.status, error.code, error.retry_after_s) == (503, "shard_unavailable", 5)
    assert f"the cold tier {story.disk.place} is not there" in error.message
    assert "mount its disk" in error.message
    assert shard.append("t", [Record(b"1")]).records == 1
    assert [one.seq for one in shard.diff("t", 80).stored] == list(range(81, 102)), "what is hot is read"
    assert shard.delete("t", before_seq=5).deleted == 4, "a delete needs no bytes"
    story.disk.come_back()
    assert seqs(shard) == [*ALL[4:], 101]


def test_a_single_file_that_is_missing_is_named(story: Story) -> None:
    shard = story.shard
    shard.relocate()
    first, *_ = sorted(story.disk.place.rglob("*.data"))
    first.unlink()
    error = error_of(lambda: shard.diff("t", 0))
    assert error.status == 503
    assert str(first) in error.message
    assert "the cold tier is there" in error.message


def test_a_file_that_ends_before_the_block_is_as_good_as_missing(story: Story) -> None:
    shard = story.shard
    shard.relocate()
    first, *_ = sorted(story.disk.place.rglob("*.data"))
    os.truncate(first, 100)
    error = error_of(lambda: shard.diff("t", 0))
    assert error.status == 503
    assert str(first) in error.message
    assert "the cold tier is there" in error.message


@pytest.mark.parametrize("leaving", LEFT)
def test_flags_wait_for_the_marked_disk(story: Story, leaving: str) -> None:
    """What is deleted stays deleted when it is back."""
    shard = story.shard
    shard.relocate()
    shard.delete("t", tag="fifth", before_seq=12)
    story.disk.go(leaving=leaving)
    covered = shard.mover.snapshot_lsn
    shard.checkpoint()
    assert shard.mover.snapshot_lsn > covered, "the snapshot has them meanwhile"
    shard.crash()
    story.disk.come_back()
    shard.open()
    assert seqs(shard) == [seq for seq in ALL if seq not in (5, 10)]


@pytest.mark.parametrize("leaving", LEFT)
def test_a_start_without_it_names_the_disk(story: Story, leaving: str) -> None:
    shard = story.shard
    shard.relocate()
    story.disk.go(leaving=leaving)
    below = story.disk.found_below()
    shard.crash()
    shard.open()
    error = error_of(lambda: shard.diff("t", 0))
    assert error.status == 503
    assert f"cold tier {story.disk.place} is not there" in error.message
    assert story.disk.found_below() == below, "nothing of another is removed"
    story.disk.come_back()
    assert seqs(shard) == ALL


def test_what_was_dropped_meanwhile_goes_with_the_next_start(story: Story) -> None:
    shard = story.shard
    shard.relocate()
    story.disk.go(leaving="a copy without the marker")
    below = story.disk.found_below()
    assert below
    shard.drop("t")
    shard.checkpoint()
    story.relocator.wait()
    assert story.disk.found_below() == below
    story.disk.come_back()
    assert story.disk.found_below()
    shard.restart()
    assert story.disk.found_below() == []


def test_the_name_may_lead_elsewhere_while_it_is_open(tmp_path: Path) -> None:
    place = tmp_path / "cold"
    tier = marked(str(place))
    with tier.opened() as root:
        place.rename(tmp_path / "moved")
        place.mkdir()
        Path(root, "x").write_text("1")
    assert (tmp_path / "moved" / "x").exists()
    assert list(place.iterdir()) == []
    with pytest.raises(ColdTierGone, match=r"has no cold\.json"):
        tier.look()


def test_what_goes_wrong_there_is_told_by_its_name(tmp_path: Path) -> None:
    tier = marked(str(tmp_path))
    with pytest.raises(FileNotFoundError) as found, tier.opened() as root:
        os.stat(os.path.join(root, "x"))
    assert found.value.filename == str(tmp_path / "x")
    with pytest.raises(DiskFull, match=f"^no space at {tmp_path}/x$"), tier.opened() as root:
        raise DiskFull(f"no space at {root}/x")


@pytest.mark.parametrize("note", ["", "{", '{"id":1}', '{"id":"c01d2"}'])
def test_a_marker_that_is_not_ours(tmp_path: Path, note: str) -> None:
    tier = marked(str(tmp_path))
    tier.look()
    (tmp_path / "cold.json").write_text(note)
    assert str(tier.why_not()).startswith(f"the cold tier {tmp_path} is not there (")
