"""A data folder seen from outside while nobody serves it: its files, frames and flags, damage, and a recovery in
this process for sweeps that would take too many servers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import livefiles
import msgspec

from topics.actors.clock import Clock
from topics.settings import Settings
from topics.storage.format import FILE_HEADER_BYTES
from topics.storage.frames import Frame, decode_wal_header, scan
from topics.storage.paths import parse_numbered
from topics.storage.segment import BlockEntry, decode_segment_header, scan_blocks
from topics.storage.snapshot import ShardState, TopicState, decode_snapshot, decode_topic
from topics.walshard.log.disk import Disk
from topics.walshard.log.recovery import Recovered, Recovery, boot_id
from topics.walshard.segments.segments import OpenFiles


def shard_folder(data_dir: Path, shard: int) -> Path:
    return data_dir / "wal" / f"shard-{shard:02d}"


def wal_files(data_dir: Path, shard: int = 0) -> list[Path]:
    """Oldest first."""
    return livefiles.find(shard_folder(data_dir, shard), "*.wal")


def snapshots(data_dir: Path, shard: int = 0) -> list[Path]:
    return livefiles.find(shard_folder(data_dir, shard), "*.snap")


def newest_snapshot(data_dir: Path, shard: int = 0) -> tuple[ShardState, list[TopicState]] | None:
    """Of a running server too: snapshots are replaced as a whole, and one may go while we look."""
    for path in reversed(snapshots(data_dir, shard)):
        try:
            state = decode_snapshot(path.read_bytes(), path=str(path))
        except FileNotFoundError:
            continue
        return state, [decode_topic(raw) for raw in state.topics]
    return None


def segments(data_dir: Path) -> list[Path]:
    return livefiles.find(data_dir, "topics/*/*.data")


def indexes(data_dir: Path) -> list[Path]:
    return livefiles.find(data_dir, "topics/*/*.idx")


def layouts(data_dir: Path) -> dict[str, set[int]]:
    """Shard folder -> the layouts whose files it holds."""
    found: dict[str, set[int]] = {}
    for folder in sorted((data_dir / "wal").glob("shard-*")):
        parsed = [parse_numbered(name) for name in os.listdir(folder)]
        found[folder.name] = {each[0] for each in parsed if each is not None}
    return found


def frames(path: Path) -> list[Frame]:
    data = path.read_bytes()
    if len(data) < FILE_HEADER_BYTES or not any(data[:FILE_HEADER_BYTES]):
        return []
    return list(scan(data, salt=decode_wal_header(data[:FILE_HEADER_BYTES], path=str(path)).salt))


def blocks(path: Path) -> list[tuple[BlockEntry, bytes]]:
    """Blocks of a sealed segment with their delete flags."""
    data = path.read_bytes()
    header = decode_segment_header(data[:FILE_HEADER_BYTES], path=str(path))
    found = scan_blocks(data, salt=header.salt, path=str(path))
    return [(entry, data[entry.flags_offset : entry.flags_offset + entry.count]) for entry, _ in found]


def another_boot(path: Path) -> None:
    """As if the machine had restarted since this WAL file was written: its header names another boot."""
    data = path.read_bytes()[:FILE_HEADER_BYTES]
    header = decode_wal_header(data, path=str(path))
    overwrite(path, 0, msgspec.structs.replace(header, boot_id=bytes(16)).encode())


def flip(path: Path, offset: int, mask: int = 0x40) -> None:
    """Damage one byte; doing it again mends it."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def contents(data_dir: Path, *, without_zeros: bool = False) -> dict[str, str]:
    """Every file but the lock, and what is in it: to see what changed. without_zeros: but for the unused end of WAL
    files, which a start gives back."""
    return {
        str(path.relative_to(data_dir)): hashlib.sha256(
            path.read_bytes().rstrip(b"\0") if without_zeros else path.read_bytes()
        ).hexdigest()
        for path in sorted(data_dir.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def recover_here(data_dir: Path, *, shard: int = 0, shards: int = 1) -> Recovered:
    """What a shard would find, without a process. Cuts torn tails, as a shard does."""
    disk = Disk()
    recovery = Recovery(
        settings=Settings(data_dir=str(data_dir)),
        disk=disk,
        files=OpenFiles(disk),
        clock=Clock(),
        shard=shard,
        shards=shards,
        boot=boot_id(),
        progress=lambda permille: None,
    )
    recovered = recovery.run(layout=1, old_shards=shards)
    for file in recovered.wal_files:
        os.close(file.fd)
    return recovered
