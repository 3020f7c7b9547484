"""`topics report`: reports about a data folder, computed with Spark.

Where the reports are goes to stdout; progress, findings and failures to stderr. Exit codes: 0 done; 1 a report failed,
or could not be written; 2 the command was not understood, or there is nothing to report about; 3 a threshold was
breached; 130 Ctrl-C.
"""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from topics import __version__
from topics.cli.shared import reach
from topics.cli.shared.exits import EXIT_INTERRUPTED
from topics.cli.shared.place import data_dir_option, folder_name
from topics.errors import TopicsError

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import TaskID

    from spark_pipeline.reports.outcome import Entry, Outcome

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_BREACH = 3

_SPAN = re.compile(r"(\d+)\s*([smhdw])\Z")
_SPAN_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def _since(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    if (span := _SPAN.match(value.strip())) is not None:
        return int((time.time() - int(span[1]) * _SPAN_S[span[2]]) * 1_000)
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a span (7d, 36h, 90m) nor a time (2026-11-16, in UTC)"
        ) from None
    return int((moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).timestamp() * 1_000)


@click.command()
@data_dir_option
@click.option("--snapshot", metavar="DIR", help="A snapshot of it instead: see `topics snapshot`.")
@click.option("--out", default="topics-reports", show_default=True, metavar="DIR", help="Where the reports go.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this report; may be given several times.")
@click.option("--since", callback=_since, metavar="TIME", help="Leave out what is older: 7d, 36h, or 2026-11-16 (UTC).")
@click.option("--master", metavar="URL", help="Spark's master (default: spark-submit's, else local[*]).")
@click.option("--thresholds", metavar="FILE", help="Limits for metrics, in TOML; a breach is exit code 3.")
@click.option("--textfile", metavar="FILE", help="Also write the metrics for node_exporter; name it *.prom.")
@click.option("--fresh", is_flag=True, help="Forget what earlier runs counted in --out, and count everything again.")
@click.option("--list", "listing", is_flag=True, help="Say which reports there are.")
def report(
    data_dir: str | None,
    snapshot: str | None,
    out: str,
    only: tuple[str, ...],
    since: int | None,
    master: str | None,
    thresholds: str | None,
    textfile: str | None,
    fresh: bool,
    listing: bool,
) -> None:
    """Report about a data folder: traffic, storage, queues, losses and more.

    \b
      topics report                                   # ./topics-data, into ./topics-reports
      topics report --only queues --only letters      # two of them
      topics report --thresholds limits.toml --textfile /var/lib/node_exporter/topics.prom

    The page is OUT/index.html; summary.json and Parquet files lie beside it. The server may run or not: nothing asks
    it. A second run into the same folder reads only what is new.
    """
    if data_dir is not None and snapshot is not None:
        raise click.UsageError("Give --data-dir or --snapshot, not both.")
    try:
        folder = snapshot or folder_name(data_dir)
        sys.exit(_list() if listing else _run(folder, out, only, since, master, thresholds, textfile, fresh))
    except TopicsError as error:
        reach.notice(str(error))
        sys.exit(EXIT_REFUSED)
    except OSError as error:  # a full disk, a folder of somebody else's
        reach.notice(f"{error.filename or out}: {(error.strerror or str(error)).lower()}")
        sys.exit(EXIT_FAILED)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("pyspark", "pyarrow", "py4j", "jinja2"):
            raise
        reach.notice(f"reports need {missing}, which is not installed: pip install 'topicsd[spark]'")
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        reach.notice("interrupted; nothing of this run counts")
        sys.exit(EXIT_INTERRUPTED)


def _list() -> int:
    from spark_pipeline.reports import registry

    for name in registry.NAMES:
        click.echo(f"{name:<10}  {registry.load(name).QUESTION}")
    return 0


def _run(
    folder: str,
    out: str,
    only: tuple[str, ...],
    since_ms: int | None,
    master: str | None,
    thresholds: str | None,
    textfile: str | None,
    fresh: bool,
) -> int:
    from spark_pipeline.reports import registry
    from spark_pipeline.reports.run import Request, run

    request = Request(
        folder=folder,
        out=Path(out),
        version=__version__,
        names=registry.chosen(name for given in only for name in given.split(",")),
        since_ms=since_ms,
        master=master,
        thresholds=thresholds,
        textfile=_writable(textfile),
        fresh=fresh,
    )
    with _watcher(len(request.names)) as watcher:
        outcome = run(request, watcher)
    return _tell(outcome, request.out)


def _writable(textfile: str | None) -> Path | None:
    if textfile is None:
        return None
    path = Path(textfile)
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}", param_hint="--textfile")
    return path


def _tell(outcome: Outcome, out: Path) -> int:
    """The last words, and the exit code."""
    for finding in outcome.notices:
        reach.notice(finding.text)
    for entry in outcome.entries:
        for finding in entry.result.findings if entry.result is not None else ():
            if finding.level == "breach":
                reach.notice(f"{entry.name}: {finding.text}")
    for breach in outcome.breaches:
        reach.notice(f"threshold: {breach.text}")
    for entry in outcome.failed:
        reach.notice(f"{entry.name} failed: {entry.error} (more in {out / 'spark.log'})")
    click.echo(out / "index.html")
    if outcome.failed:
        return EXIT_FAILED
    return EXIT_BREACH if outcome.breaches else 0


# --- progress ----------------------------------------------------------------------------------------


class _Watcher(Protocol):
    def __enter__(self) -> _Watcher: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def say(self, text: str) -> None: ...
    def begin(self, name: str, title: str) -> None: ...
    def tick(self, done: int, total: int) -> None: ...
    def end(self, entry: Entry) -> None: ...


def _watcher(reports: int) -> _Watcher:
    return _Screen(reports) if sys.stderr.isatty() else _Lines()


class _Lines:
    """For a log: a line when something has happened."""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        reach.notice(text)

    def begin(self, name: str, title: str) -> None:
        pass

    def tick(self, done: int, total: int) -> None:
        pass

    def end(self, entry: Entry) -> None:
        state = "done" if entry.error is None else "failed"
        reach.notice(f"{entry.name} {state} in {entry.seconds:.1f} s")


class _Screen:
    """For a person: a line for each report that is done, and one that moves."""

    def __init__(self, reports: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._reports = reports
        self._done = 0
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[tasks]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("", total=reports, tasks="")

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text, tasks="")

    def begin(self, name: str, title: str) -> None:
        self._progress.update(self._task, description=title, tasks="")

    def tick(self, done: int, total: int) -> None:
        self._progress.update(self._task, tasks=f"{done} of {total} tasks" if total else "")

    def end(self, entry: Entry) -> None:
        self._done += 1
        self._progress.update(self._task, completed=self._done)
        levels = {finding.level for finding in entry.result.findings} if entry.result is not None else set()
        if entry.error is not None:
            mark, style = "✗", "red"
        elif "breach" in levels:
            mark, style = "!", "red"
        elif "notice" in levels:
            mark, style = "•", "yellow"
        else:
            mark, style = "✓", "green"
        self._console.print(f"[{style}]{mark}[/] {entry.title:<22} [dim]{entry.seconds:6.1f} s", highlight=False)
