"""`topics queue`: what an operator asks of queues, and dead letters back into them.

Tables and lines for people go to stdout, as does --json; notes, progress and the last words of a redrive to stderr.
Looking never leases a job. Exit codes: 0 done; 1 it could not be done, and stderr says why; 130 Ctrl-C, after what was
begun is finished.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import click
import msgspec
from msgspec import Raw

from topics import limits
from topics.cli.client.queue_redrive import redrive
from topics.cli.client.tail import cells, clock_text, cut
from topics.cli.completion import topic_names
from topics.cli.server.ps import uptime_text
from topics.cli.shared import reach
from topics.cli.shared.place import json_option
from topics.cli.shared.tag_glob import tag_option
from topics.cli.shared.terminal import cell, harmless, plain, say, stdout
from topics.client import ApiError, Client, QueueCounts, Record, TopicState, connect
from topics.errors import not_a_queue
from topics.tools.dead_letters import DeadLetter
from topics.tools.tag_glob import TagGlob


@click.group()
def queue() -> None:
    """Look at queues, and put dead letters back.

    \b
      topics queue ls                             # all queues and how full they are
      topics queue show transcode                 # one of them in detail
      topics queue peek transcode -n 3            # the oldest jobs, without leasing them
      topics queue redrive transcode.dlq          # every dead letter back to where it came from

    `topics publish` adds jobs. Workers take them by HTTP or with the Python client.
    """


# --- ls ----------------------------------------------------------------------------------------------


class QueueLine(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    ready: int
    in_flight: int
    dead_lettered: int
    count: int
    dead_letter: str | None
    lease_ms: int


@queue.command()
@json_option
@reach.url_option
def ls(as_json: bool, url: str) -> None:
    """All queues.

    \b
      topics queue ls
      topics queue ls --json | jq -r '.queues[] | select(.ready > 1000) | .queue'

    ready: jobs that a worker would get now. in flight: jobs that workers hold. died: how many became dead letters since
    the queue was made. jobs: all there are, with those that wait for the delay of a nack.
    """

    async def main() -> int:
        async with connect(url, notice=reach.notice) as client:
            found = [line async for line in _lines(client)]
        if as_json:
            say(msgspec.json.encode({"queues": found}))
        elif found:
            _print_lines(found)
        else:
            reach.notice("there are no queues")
        return 0

    sys.exit(reach.run(main))


async def _lines(client: Client) -> AsyncIterator[QueueLine]:
    async for row in client.topics():
        if row.queue is None and row.error is None:
            continue
        try:
            state = await client.state(row.topic)
        except ApiError as error:
            if error.code != "topic_not_found":
                raise
            continue  # deleted since
        if (counts := state.queue) is not None:
            yield QueueLine(
                queue=state.topic,
                ready=counts.ready,
                in_flight=counts.in_flight,
                dead_lettered=counts.dead_lettered,
                count=state.count,
                dead_letter=state.config["dead_letter"],
                lease_ms=state.config["lease_ms"],
            )


def _print_lines(found: Iterable[QueueLine]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("queue", overflow="fold")
    for name in ("ready", "in flight", "died", "jobs"):
        table.add_column(name, justify="right")
    table.add_column("dead letters to", overflow="fold")
    table.add_column("lease", justify="right")
    for line in found:
        table.add_row(
            cell(line.queue),
            f"{line.ready:,}",
            f"{line.in_flight:,}",
            f"[red]{line.dead_lettered:,}" if line.dead_lettered else "0",
            f"{line.count:,}",
            cell(line.dead_letter or ""),
            duration_text(line.lease_ms),
        )
    Console().print(table)


def duration_text(ms: int) -> str:
    """Whole seconds as a clock would say them; anything finer in milliseconds."""
    return uptime_text(ms) if ms >= 1_000 and ms % 1_000 == 0 else f"{ms:,} ms"


# --- show --------------------------------------------------------------------------------------------


class Oldest(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    ts: int
    age_ms: int


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    ready: int
    in_flight: int
    delayed: int
    dead_lettered: int
    count: int
    bytes: int
    head_seq: int
    lag: int
    oldest: Oldest | None
    waiting_dead_letters: int | None  # in the dead-letter topic now; None if there is no such topic
    config: dict[str, Any]


@queue.command()
@click.argument("name", shell_complete=topic_names)
@json_option
@reach.url_option
def show(name: str, as_json: bool, url: str) -> None:
    """One queue: its jobs, how far its workers are behind, and its config.

    \b
      topics queue show transcode
      topics queue show transcode --json | jq .oldest.age_ms

    The lag is the distance in seqs from the oldest job that is not done to the newest one.
    """

    async def main() -> int:
        async with connect(url, notice=reach.notice) as client:
            view = await _view(client, name)
        if as_json:
            say(msgspec.json.encode(view))
        else:
            _print_view(view)
        return 0

    sys.exit(reach.run(main))


async def _view(client: Client, name: str) -> QueueView:
    state = await client.state(name)
    counts = state.queue
    if counts is None:
        raise not_a_queue(name)
    first = next(iter(await client.read(name, limit=1, meta=False)), None)
    return view_of(state, counts, first, await _waiting(client, state), now_ms=time.time_ns() // 1_000_000)


def view_of(
    state: TopicState, counts: QueueCounts, first: Record | None, waiting: int | None, *, now_ms: int
) -> QueueView:
    oldest = None
    if first is not None:
        oldest = Oldest(seq=first.seq, ts=first.ts_ms, age_ms=max(now_ms - first.ts_ms, 0))
    return QueueView(
        queue=state.topic,
        ready=counts.ready,
        in_flight=counts.in_flight,
        delayed=max(state.count - counts.ready - counts.in_flight, 0),
        dead_lettered=counts.dead_lettered,
        count=state.count,
        bytes=state.bytes,
        head_seq=state.head_seq,
        lag=0 if first is None else max(state.head_seq - first.seq + 1, 0),
        oldest=oldest,
        waiting_dead_letters=waiting,
        config=state.config,
    )


async def _waiting(client: Client, state: TopicState) -> int | None:
    dead_letter = state.config["dead_letter"]
    if dead_letter is None:
        return None
    try:
        return (await client.state(dead_letter)).count
    except ApiError as error:
        if error.code != "topic_not_found":
            raise
        return None


def _print_view(view: QueueView) -> None:
    from rich.console import Console
    from rich.table import Table

    jobs = Table(title=plain(view.queue))
    jobs.add_column("jobs")
    jobs.add_column("", justify="right")
    for name, value in jobs_rows(view):
        jobs.add_row(name, value)
    config = Table()
    config.add_column("config")
    config.add_column("", overflow="fold")
    for name, value in config_rows(view):
        config.add_row(name, cell(value))
    console = Console()
    console.print(jobs)
    console.print(config)


def jobs_rows(view: QueueView) -> list[tuple[str, str]]:
    rows = [
        ("ready", f"{view.ready:,}"),
        ("in flight", f"{view.in_flight:,}"),
        ("delayed", f"{view.delayed:,}"),
        ("all", f"{view.count:,}"),
        ("bytes", f"{view.bytes:,}"),
        ("lag", f"{view.lag:,}"),
    ]
    if view.oldest is not None:
        rows.append(("oldest", f"seq {view.oldest.seq}, {uptime_text(view.oldest.age_ms)} ago"))
    return [*rows, ("newest", f"seq {view.head_seq}"), ("died so far", f"{view.dead_lettered:,}")]


def config_rows(view: QueueView) -> list[tuple[str, str]]:
    config = view.config
    deliveries, dead_letter = config["max_deliveries"], config["dead_letter"]
    gives_up = bool(deliveries) and dead_letter is not None
    held = "" if view.waiting_dead_letters is None else f" ({view.waiting_dead_letters:,} there now)"
    rows = [
        ("lease", duration_text(config["lease_ms"])),
        ("given up after", f"{deliveries:,} deliver{'y' if deliveries == 1 else 'ies'}" if gives_up else "never"),
        ("dead letters to", "nowhere" if dead_letter is None else f"{dead_letter}{held}"),
        ("claims gathered for", duration_text(config["claim_jitter_ms"])),
        ("leases synced", "yes" if config["leases_durable"] else "no"),
        ("durability", config["durability"]),
        ("keys remembered for", duration_text(config["idempotency_window_ms"])),
    ]
    if config["ttl_ms"]:
        rows.append(("jobs expire after", duration_text(config["ttl_ms"])))
    caps = [
        f"{config[name]:,} {what}" for name, what in (("cap_records", "jobs"), ("cap_bytes", "bytes")) if config[name]
    ]
    if caps:
        full = "the oldest go" if config["discard"] == "old" else "new ones are refused"
        rows.append(("full at", f"{' or '.join(caps)}: {full}"))
    return rows


# --- peek --------------------------------------------------------------------------------------------


@queue.command()
@click.argument("name", shell_complete=topic_names)
@click.option("-n", "count", metavar="N", type=click.IntRange(1), default=10, show_default=True, help="How many.")
@tag_option
@click.option("--from", "from_seq", metavar="SEQ", type=click.IntRange(0), default=0, help="Begin behind this seq.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@reach.url_option
def peek(name: str, count: int, glob: TagGlob | None, from_seq: int, as_json: bool, url: str) -> None:
    """The oldest jobs of a queue, or of any topic, without leasing them.

    \b
      topics queue peek transcode                 # ten of them, whoever holds them
      topics queue peek transcode -n 5 --tag 'user:9:*'
      topics queue peek transcode.dlq             # dead letters, with where they come from
      topics queue peek transcode --from 480101   # those behind a seq

    A line shows time, seq, node, tag, for a dead letter its origin, and the data.
    """

    async def main() -> int:
        async with connect(url, notice=reach.notice) as client:
            more_behind = await _peek(client, name, from_seq, count, glob, JobPrinter(as_json=as_json))
        if more_behind is not None:
            reach.notice(f"there is more: go on with --from {more_behind}")
        return 0

    code = 0
    try:
        code = reach.run(main)
        sys.stdout.flush()
    except* BrokenPipeError:
        # Whoever read has read enough. Python would complain about the flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


async def _peek(
    client: Client, name: str, from_seq: int, count: int, glob: TagGlob | None, printer: JobPrinter
) -> int | None:
    """Prints jobs; returns the seq behind which there may be more."""
    left = count
    while True:
        limit = min(left, limits.MAX_LIMIT) if glob is None else limits.MAX_LIMIT
        page = await client.read(name, from_seq, limit=limit)
        for raw, record in zip(page.raw, page, strict=True):
            if glob is not None and not glob.matches(record.tag):
                continue
            if not left:
                return from_seq
            printer.show(name, raw, record)
            from_seq = record.seq
            left -= 1
        if page.caught_up:
            return None
        if not left:
            return from_seq
        from_seq = page.next_from_seq


class JobPrinter:
    """time, seq, node, tag, origin, data: cut to the width of the terminal, if it is one. Or JSON, as it was sent."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._terminal = sys.stdout.isatty()
        self._colours = self._terminal and not os.environ.get("NO_COLOR")

    def show(self, topic: str, raw: Raw, record: Record) -> None:
        if self._as_json:
            text = bytes(raw)
            if b"\n" in text or b"\r" in text:
                text = msgspec.json.format(text, indent=-1)
            line = b'{"topic":%b,%b\n' % (msgspec.json.encode(topic), text[1:])
        else:
            line = self.line(DeadLetter(topic, record)).encode() + b"\n"
        (stdout() if self._as_json else sys.stdout.buffer).write(line)

    def line(self, letter: DeadLetter) -> str:
        record = letter.record
        fields = [(clock_text(record.ts_ms), "bright_black"), (str(record.seq), "green")]
        if record.node is not None:
            fields.append((f"node={harmless(record.node)}", "magenta"))
        if record.tag is not None:
            fields.append((f"tag={harmless(record.tag)}", "magenta"))
        if (origin := letter.provenance) is not None:
            fields.append((harmless(origin), "yellow"))
        data = harmless(msgspec.json.format(bytes(record.data), indent=-1).decode())
        if self._terminal:
            data = cut(data, shutil.get_terminal_size().columns - sum(cells(text) + 2 for text, _ in fields))
        styled = [click.style(text, fg=colour) if self._colours else text for text, colour in fields]
        return "  ".join([*styled, data])


queue.add_command(redrive)
