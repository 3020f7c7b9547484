"""`topics repair`: makes a damaged data folder whole, and says exactly what that loses.

The plan is topics/datadir/repair/plan.py's. Here it is shown; or carried out in a copy, and the folder stays as it is;
or in place. Nobody else may be at work in the folder. Every file is written beside the old one, synced and renamed, in
an order that can be cut off anywhere: run it again and it goes on. In place nothing is deleted: whatever is replaced or
removed is moved into a folder `damaged-TIME` beside the data. A copy gets its name when it is whole.

Exit codes: 0 whole, or repaired; 1 there is something to repair, or it can't be repaired; 2 the command was not
understood; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import click
import msgspec

from topics import __version__
from topics.actors.startup.datadir_lock import DataDir, LockInfo
from topics.cli.shared import terminal
from topics.cli.shared.place import data_dir_option, failures_told, folder_name, json_option, print_json, server_of
from topics.datadir.files import Files
from topics.datadir.fsck import verify as proving
from topics.datadir.fsck.verify import Verdict
from topics.datadir.repair import plan as plans
from topics.datadir.repair.plan import Loss, Plan, Step
from topics.errors import TopicsError
from topics.storage.manifest import MANIFEST_NAME, SNAPSHOT_NOTE, encode_manifest
from topics.storage.routers import routers_path
from topics.walshard.log.disk import Disk

_ROUNDS = 4  # a manifest that is made again shows the rest, and a new snapshot which files nobody names
_UNFINISHED = ".tmp"


class Done(msgspec.Struct, frozen=True):
    """A file that was, or would be, replaced or removed."""

    file: str
    action: str  # replace, remove
    what: str


class Report(msgspec.Struct, kw_only=True):
    data_dir: str
    repaired: bool = False
    whole: bool = False  # nothing is wrong, or nothing is any more
    into: str | None = None  # the copy
    aside: str | None = None  # where the damaged files are
    files: list[Done] = []
    lost: list[Loss] = []
    restored: list[Loss] = []
    also_lost: list[str] = []
    hopeless: list[str] = []

    def add(self, plan: Plan) -> None:
        self.files += [Done(step.file, "remove" if step.make is None else "replace", step.what) for step in plan.steps]
        self.lost += [loss for loss in plan.losses if loss not in self.lost]
        self.restored += plan.restored
        self.also_lost += plan.untold


@click.command()
@click.option("--to", "target", metavar="DIR", help="Make a repaired copy here; the folder itself is not touched.")
@click.option("--yes", is_flag=True, help="Repair the folder itself. What was damaged is kept beside it.")
@data_dir_option
@json_option
def repair(target: str | None, yes: bool, data_dir: str | None, as_json: bool) -> None:
    """Make a damaged data folder whole, and say what is lost.

    Without --to or --yes it only says what it would do. The server must be stopped.

    \b
      topics repair                          # what is wrong, and what would be done
      topics repair --to /data/repaired      # into a copy; the folder stays as it is
      topics repair --yes                    # in place; damaged files are kept in damaged-TIME

    Indexes are made again, good records are kept, and what was in a damaged place is taken from the log where it still
    stands there. What is lost is named by topic and seq, and whoever reads across it gets a tombstone. What can't be
    repaired is said, and then nothing is written: restore that from a backup.

    Exit codes: 0 whole or repaired, 1 something to repair or beyond repair, 2 usage.
    """
    if target is not None and yes:
        raise click.UsageError("Give --to or --yes, not both.")
    folder = folder_name(data_dir)
    if not os.path.isdir(os.path.join(folder, "wal")) and not os.path.exists(os.path.join(folder, MANIFEST_NAME)):
        raise click.UsageError(f"{folder} is no data folder ({MANIFEST_NAME} is missing): name one with --data-dir")
    with failures_told():
        report = _repair(folder, target, yes)
        if as_json:
            print_json(report)
        else:
            _print(report, asked=bool(yes or target))
    sys.exit(0 if report.whole else 1)


def _repair(folder: str, target: str | None, yes: bool) -> Report:
    _refuse_held(folder)
    if yes:
        if os.path.exists(os.path.join(folder, SNAPSHOT_NOTE)):
            raise TopicsError(f"{folder} is a snapshot: its files are links to those of its folder. Use --to")
        with _claimed(folder):
            return _in_place(folder, report=Report(data_dir=folder))
    report, plan, verdict = _look(folder)
    if target is None or report.hopeless or not plan.steps:
        report.whole = not plan.steps and verdict.clean
        return report
    return _into(folder, target)


def _refuse_held(folder: str) -> None:
    if (holder := server_of(folder)) is not None:
        raise TopicsError(
            f"the data folder {folder} is in use by the server with pid {holder.pid} on {holder.address}: stop it first"
        )


@contextmanager
def _claimed(folder: str) -> Iterator[None]:
    now_ms = time.time_ns() // 1_000_000
    info = LockInfo(pid=os.getpid(), started_ms=now_ms, host="localhost", version=__version__)
    claimed = DataDir.claim(folder, info, wait_ms=0)
    try:
        yield
    finally:
        claimed.close()


def _look(folder: str) -> tuple[Report, Plan, Verdict]:
    """What there is to do, and what can't be done."""
    with _shown("looking at every record") as say:
        verdict = proving.verify(folder, deep=True, running=False, progress=lambda file, *_: say(file))
        report = Report(data_dir=folder)
        plan = plans.plan(folder, now_ms=time.time_ns() // 1_000_000, progress=say)
    report.add(plan)
    report.hopeless += plan.hopeless
    if MANIFEST_NAME not in plan.files and not plan.hopeless:
        left = [trouble for trouble in verdict.problems if not plans.covers(plan, trouble.file)]
        report.hopeless += [f"{one.file}: {one.text}: restore the folder from a backup" for one in left]
    return report, plan, verdict


def _in_place(folder: str, *, report: Report, aside: bool = True) -> Report:
    """The folder is nobody else's."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    kept = os.path.join(folder, f"damaged-{moment}") if aside else None
    for _ in range(_ROUNDS):
        found, plan, verdict = _look(folder)
        report.hopeless = found.hopeless
        if report.hopeless or not plan.steps:
            report.whole = verdict.clean and not report.hopeless
            return report
        report.add(plan)
        with _shown("writing") as say:
            for step in plan.steps:
                say(step.file)
                _carry_out(folder, step, kept)
        report.repaired = True
        report.aside = kept
    raise TopicsError(
        f"{folder}: still not whole after {_ROUNDS} rounds; please report this, with what topics verify says"
    )


def _carry_out(folder: str, step: Step, kept: str | None) -> None:
    disk = Disk()
    path = _place(folder, step.file)
    data = None if step.make is None else step.make()
    if kept is not None and os.path.exists(path):
        _keep(disk, path, os.path.join(kept, step.file))
    if data is not None:
        disk.make_dir(os.path.dirname(path))
        disk.write_whole(path, data)
    elif os.path.exists(path):
        disk.unlink(path)
        disk.sync_dir(os.path.dirname(path))


def _place(folder: str, file: str) -> str:
    """Where a file is, in whichever tier."""
    try:
        return Files(folder).find(file)[1]
    except (FileNotFoundError, TopicsError):
        return os.path.join(folder, file)


def _keep(disk: Disk, path: str, target: str) -> None:
    """A damaged file stays, under another name; of one that is kept already the first counts."""
    disk.make_dir(os.path.dirname(target))
    try:
        os.link(path, target)
    except FileExistsError:
        return
    except OSError:  # another disk, or one without links
        shutil.copyfile(path, target)
    disk.sync_dir(os.path.dirname(target))


# --- into a copy -------------------------------------------------------------------------------------


def _into(folder: str, target: str) -> Report:
    work = target.rstrip(os.sep) + _UNFINISHED
    if os.path.lexists(target):
        raise TopicsError(f"{target} is there already: name a folder that is not")
    shutil.rmtree(work, ignore_errors=True)  # of a try that was cut off
    try:
        with _shown("copying") as say:
            _copy(folder, work, say)
        report = _in_place(work, report=Report(data_dir=folder), aside=False)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if not report.whole:
        shutil.rmtree(work, ignore_errors=True)
        return report
    os.rename(work, target)
    Disk().sync_dir(os.path.dirname(os.path.abspath(target)))
    report.into = target
    return report


def _copy(folder: str, work: str, say: plans.Progress) -> None:
    """All that may count, of both tiers, as plain files of one; the manifest last."""
    disk = Disk()
    disk.make_dir(os.path.abspath(work))
    os.chmod(work, os.stat(folder).st_mode & 0o777)
    try:
        files = Files(folder)
        roots = [root for _, root in files.roots()]
    except TopicsError:
        files, roots = None, [folder]
    for root in roots:
        for part in ("wal", "topics"):
            for place, _, names in os.walk(os.path.join(root, part)):
                home = os.path.join(work, os.path.relpath(place, root))
                disk.make_dir(os.path.abspath(home))
                for name in names:
                    if not name.endswith(_UNFINISHED) and not os.path.exists(os.path.join(home, name)):
                        say(name)
                        _copy_file(os.path.join(place, name), os.path.join(home, name))
                disk.sync_dir(home)
    if os.path.exists(routers_path(folder)):
        _copy_file(routers_path(folder), routers_path(work))
    if files is not None:
        manifest = msgspec.structs.replace(files.manifest, cold=None, cold_id=None)
        disk.write_whole(os.path.join(work, MANIFEST_NAME), encode_manifest(manifest))


def _copy_file(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    shutil.copymode(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


# --- what is said ------------------------------------------------------------------------------------


@contextmanager
def _shown(text: str) -> Iterator[plans.Progress]:
    """What is being done, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield lambda file: status.update(f"{text}  {terminal.plain(file, err=True)}")


def _print(report: Report, *, asked: bool) -> None:
    would = not report.repaired
    for done in report.files:
        terminal.say(f"{'would ' if would else ''}{done.action} {done.file}: {done.what}")
    for found in report.restored:
        terminal.say(f"{'would restore' if would else 'restored'} from the log: topic {_span(found)}")
    for loss in report.lost:
        terminal.say(f"lost: topic {_span(loss)} at most")
    for text in report.also_lost:
        terminal.say(f"lost: {text}")
    for text in report.hopeless:
        terminal.say(f"can't be repaired: {text}")
    terminal.say(f"{report.data_dir}: {_verdict(report, asked=asked)}")


def _span(loss: Loss) -> str:
    seqs = f"seq {loss.first}" if loss.first == loss.last else f"seq {loss.first}..{loss.last}"
    count = loss.last - loss.first + 1
    return f"{loss.topic} {seqs}, {count:,} {'record' if count == 1 else 'records'}"


def _verdict(report: Report, *, asked: bool) -> str:
    if report.hopeless:
        return "beyond repair; " + ("more is to be restored" if report.repaired else "nothing was written")
    if report.repaired:
        into = f"repaired into {report.into}" if report.into else f"repaired; the damaged files are in {report.aside}"
        return f"{into}; topics verify --deep finds nothing"
    if report.whole:
        return "whole, nothing to repair"
    assert not asked
    return "can be repaired: into a copy with --to DIR, or in place with --yes"
