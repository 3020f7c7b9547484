"""`topics shard`: one shard of a data folder from the inside, on a running or a stopped server.

Reads and never writes.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import time

import click

from topics.cli.shared import tables
from topics.cli.shared.place import (
    bytes_text,
    data_dir_option,
    failures_told,
    folder_name,
    json_option,
    print_json,
    server_of,
    time_text,
)
from topics.cli.shared.tables import Column, show, wide_option
from topics.cli.shared.terminal import plain
from topics.datadir.files import Files
from topics.datadir.view.space import ShardSpace, look_at, space_of


@click.group()
def shard() -> None:
    """Look into a shard.

    \b
      topics shard inspect 0
    """


@shard.command()
@click.argument("number", type=click.IntRange(0))
@wide_option
@data_dir_option
@json_option
def inspect(number: int, wide: bool, data_dir: str | None, as_json: bool) -> None:
    """Show the files of a shard, what is live in them, and why space is not coming back.

    A segment goes when none of its records is live; a log file when a snapshot covers it, no live record is read from
    it and the files before it are gone. "kept by" says what each one waits for. Of a block's bytes each record counts
    for the same: what is live, deleted and dead is about right.

    \b
      topics shard inspect 0
      topics shard inspect 0 --json | jq '[.segments[].deleted_bytes] | add'
    """
    with failures_told():
        files = Files(folder_name(data_dir))
        if number >= files.manifest.shards:
            raise click.BadParameter(f"there are shards 0 to {files.manifest.shards - 1}", param_hint="NUMBER")
        space = _look(files, number)
        if as_json:
            print_json(space)
        else:
            _print(space, running=server_of(files.data_dir) is not None, wide=wide)


def _look(files: Files, number: int) -> ShardSpace:
    """A server may remove a file between the look and the question how large it is."""
    for left in reversed(range(5)):
        try:
            return space_of(files, look_at(files, number, now_ms=time.time_ns() // 1_000_000))
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


_LOGS = (
    Column("file", justify="left", folds=True),
    Column("on disk"),
    Column("used", 3),
    Column("frames", 2),
    Column("live records", 1),
    Column("kept by", justify="left", folds=True),
)
_SEGMENTS = (
    Column("topic", justify="left", folds=True),
    Column("first seq", 3),
    Column("on disk"),
    Column("live", 2),
    Column("deleted", 1),
    Column("dead", 1),
    Column("kept by", justify="left", folds=True),
)


def _print(space: ShardSpace, *, running: bool, wide: bool) -> None:
    from rich.text import Text

    console = tables.console()
    state = "running" if running else "stopped in order" if space.clean else "stopped"
    console.print(
        f"shard {space.shard}, {state}: {space.topics:,} topics, {space.records:,} live records", highlight=False
    )
    if space.snapshot is None:
        console.print("no snapshot yet: a start reads the whole log", highlight=False)
    else:
        console.print(
            f"snapshot {os.path.basename(space.snapshot)} of {time_text(space.snapshot_ms)} UTC covers the log up to "
            f"frame {space.covered_lsn:,}; {space.last_lsn - space.covered_lsn:,} frames follow",
            highlight=False,
        )
    for place in space.torn:
        console.print(f"torn: {plain(place)}: a write that is under way or was cut short", highlight=False)
    logs: list[list[str | Text]] = [
        [
            os.path.basename(log.file),
            bytes_text(log.disk_bytes),
            bytes_text(log.used_bytes),
            f"{log.first_lsn}..{log.last_lsn}" if log.first_lsn else "none",
            f"{log.live:,}",
            Text(log.kept_by),
        ]
        for log in space.logs
    ]
    show(_LOGS, logs, wide=wide, heading="log files")
    segments: list[list[str | Text]] = [
        [
            Text(one.topic),
            str(one.first_seq),
            bytes_text(one.disk_bytes),
            bytes_text(one.live_bytes),
            bytes_text(one.deleted_bytes),
            bytes_text(one.dead_bytes),
            Text(one.kept_by),
        ]
        for one in space.segments
    ]
    if segments:
        show(_SEGMENTS, segments, wide=wide, heading="segments")
    disk = sum(one.disk_bytes for one in space.segments)
    live = sum(one.live_bytes for one in space.segments)
    console.print(
        f"segments: {bytes_text(disk)} on disk, about {bytes_text(live)} of it live; "
        f"log: {bytes_text(sum(log.disk_bytes for log in space.logs))}",
        highlight=False,
    )
