"""`topics queue redrive`: the dead letters of a topic back into their queues. What is done is tools/redrive.py's; here
it is asked for, shown and interrupted. Progress and the last words go to stderr.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 130 Ctrl-C, after what was begun is finished.
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack

import click
import msgspec
import trio

from topics.cli.completion import topic_names
from topics.cli.shared import reach
from topics.cli.shared.exits import EXIT_INTERRUPTED
from topics.cli.shared.place import json_option
from topics.cli.shared.tag_glob import tag_option
from topics.cli.shared.terminal import cell, plain, say
from topics.client import connect
from topics.tools import redrive_journal
from topics.tools.dead_letters import CannotMove
from topics.tools.redrive import InDoubt, Redrive, Survey, Tally, survey
from topics.tools.tag_glob import TagGlob

PROGRESS_AFTER_S = 0.5  # what takes less needs none
PROGRESS_EVERY_S = 1.0  # lines, where there is no terminal
FINISH_WITHIN_S = 5.0  # what is under way at Ctrl-C


@click.command()
@click.argument("topic", metavar="DLQ", shell_complete=topic_names)
@click.option("--to", metavar="QUEUE", help="Where to, instead of the queue that each comes from.")
@tag_option
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Move so many at most, the oldest first.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--in-doubt",
    type=click.Choice(["write", "remove"]),
    help="What to do with one of which it can't be found out whether an interrupted redrive has moved it.",
)
@json_option
@reach.url_option
def redrive(
    topic: str,
    to: str | None,
    glob: TagGlob | None,
    limit: int | None,
    dry_run: bool,
    in_doubt: InDoubt | None,
    as_json: bool,
    url: str,
) -> None:
    """Put the dead letters of DLQ back into their queues.

    \b
      topics queue redrive transcode.dlq --dry-run          # what would go where
      topics queue redrive transcode.dlq                    # do it
      topics queue redrive transcode.dlq --tag 'user:9:*' --limit 10
      topics queue redrive transcode.dlq --to transcode-slow

    Each is appended to its queue as it was before it died, and removed from DLQ after that. Interrupted at any point,
    it loses nothing and doubles nothing: run it again. What fails again and dies again meanwhile stays for next time.
    """
    if to == topic:
        raise click.UsageError("--to is where they are.")

    async def look() -> int:
        async with connect(url, notice=reach.notice) as client:
            left_open = redrive_journal.peek(redrive_journal.path_of(str(client.address), topic))
            found = await survey(client, topic, left_open, to=to, glob=glob, limit=limit)
        if as_json:
            say(msgspec.json.encode(found))
        else:
            _print_survey(topic, found)
        if found.obstacle is not None:
            raise CannotMove(f"it would end there: {found.obstacle}")
        return 0

    if dry_run:
        sys.exit(reach.run(look))
    code, tally, left = _run_redrive(url, topic, to=to, glob=glob, limit=limit, in_doubt=in_doubt)
    if as_json:
        moved = {"dead_letter": topic, "moved": tally.moved.total(), "to": tally.moved, "finished": tally.finished}
        say(msgspec.json.encode(moved | {"left": left}))
    say(redriven_words(topic, tally, code, left), err=True)
    sys.exit(code)


def _run_redrive(
    url: str, topic: str, *, to: str | None, glob: TagGlob | None, limit: int | None, in_doubt: InDoubt | None
) -> tuple[int, Tally, int | None]:
    """The exit code, what was done, and how many dead letters are left if that is known."""
    tally = Tally()
    left: int | None = None
    with ExitStack() as stack:

        async def main() -> int:
            nonlocal left
            async with connect(url, notice=reach.notice) as client, trio.open_nursery() as nursery:
                count = (await client.state(topic)).count  # before the journal: the address may be wrong
                book = redrive_journal.Journal(redrive_journal.path_of(str(client.address), topic))
                stack.callback(book.close)
                job = Redrive(client, topic, book, tally, to=to, glob=glob, limit=limit, in_doubt=in_doubt)
                total = None if glob is not None else count if limit is None else min(count, limit)
                nursery.start_soon(_heed_signals, job, nursery.cancel_scope)
                nursery.start_soon(stack.enter_context(Progress(tally, total)).run)
                await job.run()
                left = (await client.state(topic, patience_s=FINISH_WITHIN_S)).count
                nursery.cancel_scope.cancel()
            return EXIT_INTERRUPTED if job.stop else 0

        code = reach.run(main)
    return code, tally, left


async def _heed_signals(job: Redrive, scope: trio.CancelScope) -> None:
    """The first one lets what was begun be finished; the journal covers the rest."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if job.stop:
                break
            job.stop = True
            scope.deadline = trio.current_time() + FINISH_WITHIN_S
    scope.cancel()


def redriven_words(topic: str, tally: Tally, code: int, left: int | None) -> str:
    """The last line, which depends on how it ended."""
    if not tally.done:
        return f"nothing was redriven from {topic}" + (f"; {left:,} left" if left else "")
    by_target = ", ".join(f"{count:,} to {target}" for target, count in sorted(tally.moved.items()))
    text = f"redrove {_counted(tally.moved.total())} of {topic}" + (f": {by_target}" if by_target else "")
    if tally.finished:
        text += f"; removed {tally.finished:,} that an earlier redrive had written"
    if code:
        return text + (" before it was interrupted" if code == EXIT_INTERRUPTED else " before that")
    return text + (f"; {left:,} left" if left else "")


def _counted(letters: int) -> str:
    return f"{letters:,} dead letter{'' if letters == 1 else 's'}"


def _print_survey(topic: str, found: Survey) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=plain(f"redrive of {topic}"))
    table.add_column("to", overflow="fold")
    table.add_column("dead letters", justify="right")
    table.add_column("seqs", justify="right")
    for share in found.shares:
        seqs = f"{share.first_seq}..{share.last_seq}" if share.last_seq > share.first_seq else f"{share.last_seq}"
        table.add_row(cell(share.target), f"{share.dead_letters:,}", seqs if share.dead_letters else "")
    if found.shares:
        Console().print(table)
    else:
        reach.notice(f"{topic} has nothing to redrive")
    if found.finish:
        reach.notice(f"{found.finish:,} were written by an earlier redrive and would only be removed")


class Progress:
    """A bar on a terminal while it takes long; elsewhere a line now and then."""

    def __init__(self, tally: Tally, total: int | None) -> None:
        self._tally = tally
        self._total = total
        self._stack = ExitStack()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    async def run(self) -> None:
        if sys.stderr.isatty():
            await trio.sleep(PROGRESS_AFTER_S)
            await self._show_bar()
        else:
            told = 0
            while True:
                await trio.sleep(PROGRESS_EVERY_S)
                if self._tally.done > told:
                    told = self._tally.done
                    reach.notice(f"redrove {told:,}" + ("" if self._total is None else f" of {self._total:,}"))

    async def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Display

        columns = [TextColumn("dead letters"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        display = Display(*columns, console=Console(stderr=True), transient=True)
        self._stack.enter_context(display)
        task = display.add_task("", total=self._total)
        while True:
            display.update(task, completed=self._tally.done)
            await trio.sleep(0.1)
