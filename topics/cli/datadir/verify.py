"""`topics verify`: proves that a data folder is whole, or says where it is not.

Reads and never writes. Problems go to stdout, one a line, each with its file and offset; progress goes to a terminal.

Exit codes: 0 whole; 1 problems; 2 the command was not understood, or --data-dir is no data folder; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys

import click
import msgspec

from topics.cli.shared.place import (
    bytes_text,
    data_dir_option,
    failures_told,
    folder_name,
    json_option,
    print_json,
    server_of,
)
from topics.cli.shared.terminal import plain, say
from topics.datadir.fsck import verify as proving
from topics.datadir.fsck.verify import Trouble, Verdict
from topics.storage.manifest import MANIFEST_NAME
from topics.storage.paths import topics_dir


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    data_dir: str
    running: bool
    clean: bool
    verdict: Verdict


@click.command()
@click.option("--deep", is_flag=True, help="Read every block and record too, not only what describes them.")
@data_dir_option
@json_option
def verify(deep: bool, data_dir: str | None, as_json: bool) -> None:
    """Prove that a data folder is whole.

    Checks the manifest, snapshots and indexes, every frame of the log, and that all of it fits together: no frame is
    missing, no seq is unaccounted for, every topic is on its shard. With --deep every block of every segment is read,
    too, which takes as long as the disk needs for all the data. Nothing is written, and a server may be running.

    \b
      topics verify                        # the folder of TOPICS_DATA_DIR
      topics verify --deep --data-dir /backup/topics
      topics verify --json | jq .verdict.problems

    A note loses nobody anything: a write that a crash cut short, files that the next start removes.

    The exit code is 1 if there are problems.
    """
    folder = folder_name(data_dir)
    if not os.path.exists(os.path.join(folder, MANIFEST_NAME)) and not os.path.isdir(topics_dir(folder)):
        raise click.UsageError(f"{folder} is no data folder ({MANIFEST_NAME} is missing): name one with --data-dir")
    with failures_told():
        running = server_of(folder) is not None
        verdict = _with_progress(folder, deep=deep, running=running, shown=not as_json and sys.stderr.isatty())
        if as_json:
            print_json(Shown(data_dir=folder, running=running, clean=verdict.clean, verdict=verdict))
        else:
            _print(verdict, folder, running)
    sys.exit(0 if verdict.clean else 1)


def _with_progress(folder: str, *, deep: bool, running: bool, shown: bool) -> Verdict:
    if not shown:
        return proving.verify(folder, deep=deep, running=running)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        return proving.verify(
            folder,
            deep=deep,
            running=running,
            progress=lambda file, done, total: bar.update(
                task, description=plain(file, err=True), completed=done, total=total
            ),
        )


def _print(verdict: Verdict, folder: str, running: bool) -> None:
    for trouble in verdict.problems:
        say(_line("problem", trouble))
    if verdict.problem_count > len(verdict.problems):
        say(f"problem: {verdict.problem_count - len(verdict.problems):,} more")
    for trouble in verdict.notes:
        say(_line("note", trouble))
    read = (
        f"{verdict.files:,} files, {bytes_text(verdict.bytes)} read, {verdict.frames:,} frames, "
        f"{verdict.blocks:,} blocks, {verdict.live_records:,} live records of {verdict.topics:,} topics"
    )
    server = ", a server is running" if running else ""
    if verdict.clean:
        depth = "" if verdict.deep else "; --deep reads every record, too"
        say(f"{folder}: whole ({read}{server}{depth})")
    else:
        word = "problem" if verdict.problem_count == 1 else "problems"
        say(f"{folder}: {verdict.problem_count:,} {word} ({read}{server}); topics repair says what can be done")


def _line(kind: str, trouble: Trouble) -> str:
    return f"{kind}: {trouble.file} at offset {trouble.offset}: {trouble.text}"
