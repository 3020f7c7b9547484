"""The campaign of bit flips: a flip that is served wrongly is found, and those that it has found are refused now."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from campaigns import bitflips
from campaigns.stepped import small_limits
from figures import apart
from xxhash import xxh3_64_intdigest

from topics.errors import CorruptData, FormatError
from topics.storage import frames
from topics.storage.manifest import Manifest, decode_manifest, encode_manifest


def test_some_flips_of_every_kind_of_file() -> None:
    with apart():
        tally = bitflips.run(3, every=5)
    assert not tally.findings, tally.findings[0].what
    for kind in ("flips_wal", "flips_data", "flips_idx", "flips_snap", "flips_json", "flips_routers"):
        assert tally.counts[kind], kind
    for verdict in ("refused", "told", "harmless"):
        assert tally.counts[verdict], verdict
    assert not tally.counts["wrongly"]


@pytest.mark.full
def test_a_checksum_that_is_not_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "xxh3_64_intdigest", lambda data: xxh3_64_intdigest(data[:56]))
    with apart():
        tally = bitflips.run(3, every=5)
    assert tally.counts["wrongly"] == tally.found > 0


def test_the_goal_is_every_bit_of_every_byte_and_no_less(tmp_path: Path) -> None:
    with small_limits(), apart():
        whole = bitflips.build(tmp_path / "one")
        again = bitflips.build(tmp_path / "two")
    found: Counter[tuple[str, int, int]] = Counter()
    sizes = []
    for seed in range(1_000, 1_000 + bitflips.ROW):
        bit, chosen = bitflips.chosen_by(seed, whole)
        found.update((file, at, bit) for _, (file, at) in chosen)
        sizes.append(len(chosen))
    everything = {(file, at, bit) for file, at in bitflips.places(whole) for bit in range(8)}
    assert found == Counter(everything), "each bit once"
    assert list(bitflips.places(whole)) == list(bitflips.places(again)), "units of one row mean the same bytes"
    goal = bitflips.CAMPAIGN.goal
    assert len(everything) - min(sizes) < goal <= len(everything), "set the goal of the campaign anew"
    on_disk = {
        os.path.relpath(path, tmp_path / "one"): path for path in (tmp_path / "one").rglob("*") if path.is_file()
    }
    assert set(on_disk) == set(whole.contents)
    kinds = {path.suffix or path.name for path in on_disk.values()}
    assert kinds == {".wal", ".snap", ".data", ".idx", ".json", "routers"}


def test_a_copy_is_the_folder(tmp_path: Path) -> None:
    with small_limits(), apart():
        whole = bitflips.build(tmp_path / "one")
    bitflips.copy(whole, tmp_path / "two")

    def tree(folder: Path) -> dict[str, bytes | None]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
            for path in folder.rglob("*")
        }

    assert tree(tmp_path / "one") == tree(tmp_path / "two")


# --- what it has found ---


def test_every_flipped_bit_of_a_manifest_is_refused_or_changes_nothing() -> None:
    """A changed layout made a start take the files of the right one for leftovers, and remove them."""
    manifest = Manifest(format=1, layout=1, shards=2, cold="/cold", cold_id="c01d", routers=True)
    text = encode_manifest(manifest)
    assert decode_manifest(text, path="topics.json") == manifest
    for at in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[at] ^= 1 << bit
            try:
                assert decode_manifest(bytes(changed), path="topics.json") == manifest
            except (CorruptData, FormatError):
                pass


def test_a_manifest_without_a_checksum_is_read() -> None:
    assert decode_manifest(b'{"format":1,"layout":3,"shards":2}', path="") == Manifest(format=1, layout=3, shards=2)


def test_a_field_of_a_newer_program_is_covered_too() -> None:
    text = encode_manifest(Manifest(format=1, layout=1, shards=2)).replace(b'"shards":2', b'"shards":2,"new":1')
    with pytest.raises(CorruptData):
        decode_manifest(text, path="")


def test_an_index_that_asks_for_more_than_there_is_is_damage(tmp_path: Path) -> None:
    """Its lengths are believed before its checksum can be looked at: they asked for terabytes."""
    with small_limits(), apart():
        whole = bitflips.build(tmp_path)
        index = next(file for file in whole.files if file.endswith(".idx"))
        data = bytearray((tmp_path / index).read_bytes())
        data[46] ^= 2
        (tmp_path / index).write_bytes(data)
        with pytest.raises(CorruptData, match="cut short"):
            bitflips.open_shard(tmp_path)
