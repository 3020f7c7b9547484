"""`topics backup`: copies of a data folder that live in a repository, made while the server runs.

The first one copies everything, each later one what is new; every one can be restored alone. On a terminal a bar shows
the progress, otherwise there is a line on stderr now and then.

Exit codes: 0 done; 1 it could not be done, or `verify` found problems; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec

from topics.backup.catalog import NAME, NAME_RULE, Summary
from topics.backup.create import create as make
from topics.backup.repository import Repository
from topics.backup.restore import restore as put_back
from topics.backup.verify import Trouble, Verdict
from topics.backup.verify import verify as prove
from topics.cli.shared.place import (
    bytes_text,
    data_dir_option,
    failures_told,
    folder_name,
    json_option,
    print_json,
    time_text,
)
from topics.cli.shared.tables import Column, wide_option
from topics.cli.shared.tables import show as show_table
from topics.cli.shared.terminal import cell, say
from topics.datadir.files import Files
from topics.errors import TopicsError

if TYPE_CHECKING:
    from rich.text import Text

Progress = Callable[[str, int, int], None]
_LINE_EVERY_S = 10.0
_COLUMNS = (
    Column("backup", justify="left", folds=True),
    Column("state", justify="left"),
    Column("moment (UTC)", justify="left"),
    Column("topics", 3),
    Column("records", 1),
    Column("total"),
    Column("copied"),
    Column("shards", 4),
    Column("source", 2, justify="left", folds=True),
)


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str  # complete, unfinished, damaged
    moment_ms: int  # of an unfinished one: when it was begun
    source: str
    copied_bytes: int
    topics: int = 0
    records: int = 0
    files: int = 0
    total_bytes: int = 0
    shards: int = 0


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    repository: str
    clean: bool
    verdict: Verdict


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    removed: list[str]
    freed_bytes: int


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    data_dir: str
    shards: int
    backup: Summary


@click.group()
def backup() -> None:
    """Make, list, prove, restore and remove backups of a data folder.

    A repository is a folder, best on another disk, that holds many backups. Content that several have in common is
    there once: after the first backup only what is new is copied. The server may run meanwhile and is not asked.

    \b
      topics backup create --to /backup/topics --name monday
      topics backup ls --from /backup/topics
      topics backup verify --from /backup/topics
      topics backup restore monday --from /backup/topics --data-dir /srv/topics
      topics backup rm monday --from /backup/topics
    """


def _name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not NAME.fullmatch(value):
        raise click.BadParameter(NAME_RULE)
    return value


_from = click.option("--from", "place", metavar="DIR", required=True, help="The repository.")


@backup.command()
@click.option("--to", "place", metavar="DIR", required=True, help="The repository; made if it is not there.")
@click.option("--name", callback=_name, help="What to call it (default: the time). One that was cut off goes on.")
@data_dir_option
@json_option
def create(place: str, name: str | None, data_dir: str | None, as_json: bool) -> None:
    """Back up the data folder as it is now. The server may be running.

    Everything that was acknowledged before the command began is in it, except records of `ephemeral` topics. If it is
    interrupted, the same command with the same --name goes on where it was.

    \b
      topics backup create --to /backup/topics
      topics backup create --to /backup/topics --name monday --data-dir /srv/topics
    """
    name = name or datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    with failures_told():
        started = time.monotonic()
        folder = Files(folder_name(data_dir)).data_dir  # or there is no need for a repository
        with _progress("copying") as progress:
            made = make(folder, Repository.made(place), name, progress=progress)
        if as_json:
            print_json(made)
            return
        say(
            f"{made.name}: {made.records:,} records of {made.topics:,} topics in {made.files:,} files, "
            f"{bytes_text(made.total_bytes)}: {bytes_text(made.copied_bytes)} copied, "
            f"{bytes_text(made.total_bytes - made.copied_bytes)} shared, in {time.monotonic() - started:.1f} s"
        )


@backup.command()
@_from
@wide_option
@json_option
def ls(place: str, wide: bool, as_json: bool) -> None:
    """List backups, oldest first. One that is unfinished can be gone on with, or removed.

    \b
      topics backup ls --from /backup/topics
      topics backup ls --from /backup/topics --json | jq -r '.[] | select(.state == "unfinished") | .name'
    """
    with failures_told():
        found = sorted(_listed(Repository(place)), key=lambda each: each.moment_ms)
        if as_json:
            print_json(found)
            return
        if not found:
            say(f"no backups in {place}; make one with `topics backup create --to {place}`")
            return
        show_table(_COLUMNS, [_cells(each) for each in found], wide=wide)


def _cells(each: Listed) -> list[str | Text]:
    known = each.state == "complete"
    sizes = [f"{each.topics:,}", f"{each.records:,}", bytes_text(each.total_bytes)] if known else [""] * 3
    shards = str(each.shards) if known else ""
    return [
        each.name,
        each.state,
        time_text(each.moment_ms),
        *sizes,
        bytes_text(each.copied_bytes),
        shards,
        cell(each.source),
    ]


def _listed(repository: Repository) -> Iterator[Listed]:
    for name in repository.names():
        try:
            known = repository.summary(name)
        except TopicsError:
            yield Listed(name=name, state="damaged", moment_ms=0, source="", copied_bytes=0)
            continue
        yield Listed(
            name=name,
            state="complete",
            moment_ms=known.moment_ms,
            source=known.source,
            copied_bytes=known.copied_bytes,
            topics=known.topics,
            records=known.records,
            files=known.files,
            total_bytes=known.total_bytes,
            shards=known.shards,
        )
    for name in repository.unfinished():
        begun, done = repository.part(name)
        yield Listed(
            name=name,
            state="unfinished",
            moment_ms=begun.begun_ms if begun else 0,
            source=begun.source if begun else "",
            copied_bytes=sum(each.bytes for each in done),
        )


@backup.command()
@click.argument("name")
@_from
@click.option("--shards", type=click.IntRange(1, 64), help="Divide the topics among so many shards (as it was).")
@data_dir_option
@json_option
def restore(name: str, place: str, shards: int | None, data_dir: str | None, as_json: bool) -> None:
    """Make a data folder of the backup NAME, in a folder that is empty or does not exist.

    Every checksum is checked on the way. If it is interrupted, the same command goes on where it was; until it is done
    no server starts on the folder.

    \b
      topics backup restore monday --from /backup/topics --data-dir /srv/topics
      topics backup restore monday --from /backup/topics --data-dir /srv/topics --shards 8
    """
    with failures_told():
        folder = folder_name(data_dir)
        started = time.monotonic()
        with _progress("restoring") as progress:
            done = put_back(Repository(place), name, folder, shards=shards, progress=progress)
        shards = shards or done.shards
        if as_json:
            print_json(Restored(data_dir=folder, shards=shards, backup=done))
            return
        say(
            f"{folder}: {done.records:,} records of {done.topics:,} topics as of {time_text(done.moment_ms)} UTC, "
            f"{bytes_text(done.total_bytes)}, {shards} shards, in {time.monotonic() - started:.1f} s"
        )
        say(f"start a server on it: topics serve --data-dir {folder} --shards {shards}")


@backup.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_from
@click.option("--deep", is_flag=True, help="Also prove each as a data folder: every block and record.")
@json_option
def verify(names: tuple[str, ...], place: str, deep: bool, as_json: bool) -> None:
    """Prove that backups can be restored: every checksum of all of them, or of NAME.

    With --deep each is also proved as `topics verify --deep` proves a data folder; segments with deleted records are
    copied for that, one backup at a time, to where TMPDIR says.

    \b
      topics backup verify --from /backup/topics
      topics backup verify monday --from /backup/topics --deep

    Exit codes: 0 whole, 1 problems, 2 usage.
    """
    with failures_told():
        with _progress("verifying") as progress:
            verdict = prove(Repository(place), list(names), deep=deep, progress=progress)
        if as_json:
            print_json(Proved(repository=place, clean=verdict.clean, verdict=verdict))
        else:
            _print(verdict, place)
    sys.exit(0 if verdict.clean else 1)


def _print(verdict: Verdict, place: str) -> None:
    for trouble in verdict.problems:
        say(_line("problem", trouble))
    for trouble in verdict.notes:
        say(_line("note", trouble))
    for name in verdict.unfinished:
        say(f"note: {name} was not finished; `topics backup create --name {name}` goes on with it")
    read = f"{len(verdict.backups):,} backups, {verdict.objects:,} objects, {bytes_text(verdict.bytes)} read"
    if verdict.clean:
        say(f"{place}: whole ({read}{'' if verdict.deep else '; --deep reads every record, too'})")
        return
    broken = ", ".join(sorted(verdict.broken))
    say(f"{place}: {len(verdict.problems):,} problems ({read}); can't be restored: {broken}")


def _line(kind: str, trouble: Trouble) -> str:
    needed = f" (needed by {', '.join(trouble.backups)})" if trouble.backups else ""
    return f"{kind}: {trouble.path}: {trouble.text}{needed}"


@backup.command()
@click.argument("names", nargs=-1, required=True)
@_from
@json_option
def rm(names: tuple[str, ...], place: str, as_json: bool) -> None:
    """Remove backups, finished or not, and the content that no other one needs.

    \b
      topics backup rm monday --from /backup/topics
    """
    with failures_told():
        repository = Repository(place)
        with repository.locked(writing=True):
            freed = repository.remove(names)
        if as_json:
            print_json(Removed(removed=list(names), freed_bytes=freed))
        else:
            say(f"removed {', '.join(names)}: {bytes_text(freed)} freed")


@contextmanager
def _progress(verb: str) -> Iterator[Progress]:
    """A bar on a terminal, a line now and then elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        yield _Lines(verb).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda _, done, total: bar.update(task, completed=done, total=total)


class _Lines:
    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._next = time.monotonic() + _LINE_EVERY_S

    def show(self, _: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_EVERY_S
            say(f"{self._verb}: {bytes_text(done)} of {bytes_text(total)}", err=True)
