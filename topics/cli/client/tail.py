"""`topics tail`: follow topics over a WebSocket and print what is written to them.

One line per event on stdout; notes about the connection go to stderr. Exit codes: 0 with --until-head when all was
read, and when the reader of the pipe has gone; 1 when it can't be done or a topic was deleted under it; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping

import click
import msgspec
import trio
from msgspec import Raw

from topics.cli.completion import topic_names
from topics.cli.shared import reach
from topics.cli.shared.terminal import harmless, stdout
from topics.client import CaughtUp, Client, Event, Position, Record, Records, Tombstone, TopicDeleted, connect
from topics.client.durations import parse_ms

_PIPE_CHECK_S = 0.5


@click.command()
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True, shell_complete=topic_names)
@click.option(
    "--from",
    "from_seq",
    metavar="SEQ",
    type=click.IntRange(0),
    help="Begin behind this seq: 0 is the beginning; with the last seq you have, it goes on from there.",
)
@click.option("--since", metavar="DURATION", help="Begin with what was written in the last 30s, 10m, 2h, 1d.")
@click.option(
    "--until-head", is_flag=True, help="End when what was there at the start is printed; use it with --from or --since."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("--node", metavar="ID", multiple=True, help="Leave out what this node wrote; may be repeated.")
@click.option("--tags", is_flag=True, help="Show tags.")
@reach.url_option
def tail(
    topics: tuple[str, ...],
    from_seq: int | None,
    since: str | None,
    until_head: bool,
    as_json: bool,
    node: tuple[str, ...],
    tags: bool,
    url: str,
) -> None:
    """Follow topics: print each record as it is written, until Ctrl-C.

    \b
      topics tail jobs                            # new records only
      topics tail jobs events --since 10m         # two topics, from ten minutes ago
      topics tail jobs --from 0 --until-head      # all there is, and end
      topics tail jobs --json | jq .data          # for programs

    A line shows time, topic (if there are several), seq, node, tag and data. Lines that begin with -- tell of records
    that were evicted or expired before they could be read, and of deleted topics. A connection that is lost is made
    again, and reading goes on exactly where it was.
    """
    if from_seq is not None and since is not None:
        raise click.UsageError("Use --from or --since, not both.")
    since_ms = None if since is None else _duration(since)
    names = list(dict.fromkeys(topics))
    printer: Printer = JsonPrinter() if as_json else LinePrinter(several=len(names) > 1)

    async def main() -> int:
        async with connect(url, notice=reach.notice) as client, trio.open_nursery() as nursery:
            nursery.start_soon(_watch_stdout)
            starts = await _starts(client, names, from_seq=from_seq, since_ms=since_ms)
            code = await _follow(client, starts, printer, until_head=until_head, node=node, tags=tags, meta=as_json)
            nursery.cancel_scope.cancel()
        return code

    code = 0
    try:
        code = reach.run(main)
        sys.stdout.flush()
    except* BrokenPipeError:
        # Whoever read has read enough. Python would complain about the flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _duration(text: str) -> int:
    try:
        return parse_ms(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None


async def _starts(
    client: Client, names: list[str], *, from_seq: int | None, since_ms: int | None
) -> dict[str, int | None]:
    if since_ms is None:
        return dict.fromkeys(names, from_seq)
    begin_ms = time.time_ns() // 1_000_000 - since_ms
    return {name: await client.seq_before(name, begin_ms) for name in names}


async def _follow(
    client: Client,
    starts: Mapping[str, int | None],
    printer: Printer,
    *,
    until_head: bool,
    node: tuple[str, ...],
    tags: bool,
    meta: bool,
) -> int:
    deleted = False
    async with client.subscribe(starts, node=node, tags=tags, meta=meta) as events:
        goal = Goal(events.first) if until_head else None
        while goal is None or not goal.reached:
            try:
                event = await anext(events)
            except StopAsyncIteration:
                reach.notice("no topic is left to follow")
                break
            shown = event if goal is None else goal.take(event)
            deleted = deleted or isinstance(shown, TopicDeleted)
            printer.show(shown)
    return 1 if deleted else 0


async def _watch_stdout() -> None:
    """Ends the command when nobody reads any more, also while there is nothing to write."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
    while True:
        if any(flags & select.POLLERR for _, flags in poll.poll(0)):
            raise BrokenPipeError
        await trio.sleep(_PIPE_CHECK_S)


class Goal:
    """--until-head: what there was at the start, and nothing beyond it."""

    def __init__(self, first: Mapping[str, Position]) -> None:
        self._heads = {topic: at.head_seq for topic, at in first.items()}
        # A start beyond the head is one in a topic that was made again: there is something to tell.
        self._open = {topic for topic, at in first.items() if at.from_seq != at.head_seq}

    @property
    def reached(self) -> bool:
        return not self._open

    def take(self, event: Event) -> Event | None:
        """The part of an event that is to be printed."""
        if event.topic not in self._open:
            return None
        head_seq = self._heads[event.topic]
        if isinstance(event, CaughtUp | TopicDeleted):
            self._open.discard(event.topic)
        elif isinstance(event, Tombstone):
            if event.resume_seq >= head_seq:
                self._open.discard(event.topic)
        elif event.to_seq >= head_seq:
            self._open.discard(event.topic)
            kept = [raw for raw, record in zip(event.raw, event, strict=True) if record.seq <= head_seq]
            return msgspec.structs.replace(event, raw=kept)
        return event


# --- printing ----------------------------------------------------------------------------------------


class Printer:
    """Writes events to stdout, each batch at once."""

    def show(self, event: Event | None) -> None:
        lines = [] if event is None else list(self.lines(event))
        if lines:
            self._write(b"".join(lines))

    def _write(self, data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def lines(self, event: Event) -> Iterator[bytes]:
        raise NotImplementedError


class JsonPrinter(Printer):
    """Records as the server wrote them, with the topic in front. What is no record has no `$seq`."""

    def _write(self, data: bytes) -> None:
        out = stdout()
        out.write(data)
        out.flush()

    def lines(self, event: Event) -> Iterator[bytes]:
        name = msgspec.json.encode(event.topic)
        if isinstance(event, Records):
            for raw in event.raw:
                yield b'{"topic":%b,%b\n' % (name, _one_line(raw)[1:])
        elif isinstance(event, Tombstone):
            yield b'{"topic":%b,"tombstone":%b}\n' % (name, _without_topic(event))
        elif isinstance(event, TopicDeleted):
            yield b'{"topic":%b,"deleted":%b}\n' % (name, _without_topic(event))


def _one_line(raw: Raw) -> bytes:
    """Verbatim, but for line breaks between tokens: those would break the record in two."""
    text = bytes(raw)
    return msgspec.json.format(text, indent=-1) if b"\n" in text or b"\r" in text else text


def _without_topic(event: Tombstone | TopicDeleted) -> bytes:
    fields = msgspec.structs.asdict(event)
    del fields["topic"]
    return msgspec.json.encode(fields)


class LinePrinter(Printer):
    """time, topic (if there are several), seq, node, tag, data: cut to the width of the terminal, if it is one."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._terminal = sys.stdout.isatty()
        self._colours = self._terminal and not os.environ.get("NO_COLOR")

    def lines(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Records):
            width = shutil.get_terminal_size().columns if self._terminal else None
            for record in event:
                yield self._record(event.topic, record, width)
        elif isinstance(event, Tombstone | TopicDeleted):
            yield self._styled(f"-- {harmless(str(event))}", "yellow") + b"\n"

    def _record(self, topic: str, record: Record, width: int | None) -> bytes:
        fields = [(clock_text(record.ts_ms), "bright_black"), (str(record.seq), "green")]
        if self._several:
            fields.insert(1, (harmless(topic), "cyan"))
        if record.node is not None:
            fields.append((f"node={harmless(record.node)}", "magenta"))
        if record.tag is not None:
            fields.append((f"tag={harmless(record.tag)}", "magenta"))
        data = harmless(msgspec.json.format(bytes(record.data), indent=-1).decode())
        if width is not None:
            data = cut(data, width - sum(cells(text) + 2 for text, _ in fields))
        return b"  ".join([*(self._styled(text, colour) for text, colour in fields), data.encode()]) + b"\n"

    def _styled(self, text: str, colour: str) -> bytes:
        return (click.style(text, fg=colour) if self._colours else text).encode()


def clock_text(ts_ms: int) -> str:
    """Local time; with the date unless it is today's."""
    then = time.localtime(ts_ms // 1_000)
    text = f"{time.strftime('%H:%M:%S', then)}.{ts_ms % 1_000:03}"
    return text if then[:3] == time.localtime()[:3] else f"{time.strftime('%Y-%m-%d', then)} {text}"


def cells(text: str) -> int:
    """How wide a terminal shows it."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cut(text: str, width: int) -> str:
    if cells(text) <= width:
        return text
    kept = text[: max(width - 1, 0)]
    while cells(kept) > max(width - 1, 0):
        kept = kept[:-1]
    return kept + "…"
