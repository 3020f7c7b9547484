"""`topics publish`: append records from the command line, a file or standard input.

```
thread: read() ─ chunks ─► lines ─► records ─► batches ─► one append at a time, in order
```

Everything before a record that is refused is published, nothing behind it. Each batch has an idempotency key, so that a
retry writes nothing twice. A batch is sent when it is full, or a moment after its first record: whatever feeds a pipe
slowly is not kept waiting. What is read ahead is bounded.
"""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import click
import trio
from msgspec import Raw

from topics import limits
from topics.cli.completion import topic_names
from topics.cli.shared import reach
from topics.cli.shared.exits import EXIT_INTERRUPTED
from topics.cli.shared.terminal import say
from topics.client import ApiError, Client, ClientError, OutcomeUnknown, Receipt, Unreachable, connect
from topics.client.batches import BATCH_RECORDS, BadLine, Batch, Batcher, Line, Lines, json_of, text_of
from topics.client.client import PATIENCE_S
from topics.client.failures import is_passing
from topics.errors import TopicsError

LINGER_S = 0.05  # how long a record waits for company
PROGRESS_AFTER_S = 0.5  # what takes less needs none
CLASSES = ("ephemeral", "memory", "disk", "fsync")
_CHUNK_BYTES = 256 * limits.KIB

Parse = Callable[[Line], Raw | None]


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("records", metavar="[RECORD]...", nargs=-1)
@click.option("--file", "path", metavar="PATH", help="Read records from a file, one per line; - is standard input.")
@click.option("--text", is_flag=True, help="Records are plain text: each is stored as a JSON string.")
@click.option("--tag", help="Give every record this tag.")
@click.option("--node", help="Say that the records come from this node.")
@click.option(
    "--batch",
    "batch_records",
    type=click.IntRange(1),
    default=BATCH_RECORDS,
    show_default=True,
    help="Most records in one append; each append is all or nothing.",
)
@click.option(
    "--durability",
    type=click.Choice(CLASSES),
    metavar="CLASS",
    help=f"Of the topic if this creates it: {', '.join(CLASSES)}.",
)
@reach.url_option
def publish(
    topic: str,
    records: tuple[str, ...],
    path: str | None,
    text: bool,
    tag: str | None,
    node: str | None,
    batch_records: int,
    durability: str | None,
    url: str,
) -> None:
    """Append records to TOPIC, which is created if it does not exist.

    Each RECORD is a JSON value. Without any they are read from --file or standard input: one JSON value per line;
    empty lines are skipped.

    \b
      topics publish jobs '{"do": "resize", "w": 256}' '[1, 2.50]'
      topics publish jobs --tag nightly --file records.jsonl
      tail -f app.log | topics publish logs --text

    The order of the records is kept. What is refused for the moment or gets lost on the way is tried again for a
    minute, and nothing is written twice. The last line on stderr says what was published.
    """
    if records and path is not None:
        raise click.UsageError("Give records as arguments or with --file, not both.")
    parse: Parse = text_of if text else json_of
    for record in records:
        _check_argument(record, parse)
    tally = Tally(topic)
    job = Job(topic, tally, tag=tag, node=node, durability=durability)
    intake = Intake(parse, Batcher(max_records=batch_records))
    with ExitStack() as stack:

        async def main() -> int:
            async with connect(url, notice=reach.notice) as client, trio.open_nursery() as nursery:
                await job.look(client)
                send, receive = trio.open_memory_channel[Batch](1)
                if records:
                    nursery.start_soon(intake.take, records, send)
                else:
                    source = _opened(path, stack)
                    nursery.start_soon(intake.read, source, send)
                    if sys.stderr.isatty():
                        nursery.start_soon(stack.enter_context(Progress(tally, intake, source)).run)
                async for batch in receive:
                    await job.send(client, batch)
                nursery.cancel_scope.cancel()
            if intake.failure is not None:
                raise intake.failure
            return 0

        code = reach.run(main)
    say(tally.words(code), err=True)
    sys.exit(code)


def _check_argument(record: str, parse: Parse) -> None:
    try:
        if parse(Line(1, record.encode(errors="surrogateescape"))) is None:
            raise BadLine(1, "is empty")
    except BadLine as error:
        shown = record if len(record) <= 40 else record[:37] + "..."
        hint = "; for a string write '\"...\"' or use --text" if parse is json_of else ""
        raise click.BadParameter(f"{shown!r} {error.reason}{hint}", param_hint="RECORD") from None


def _opened(path: str | None, stack: ExitStack) -> int:
    """A descriptor to read from."""
    if path is None or path == "-":
        if sys.stdin.isatty():
            reach.notice("reading from the terminal, one record per line; Ctrl-D ends it")
        return sys.stdin.fileno()
    try:
        return stack.enter_context(open(path, "rb", buffering=0)).fileno()
    except OSError as error:
        raise CannotRead(f"can't read {path}: {(error.strerror or str(error)).lower()}") from None


class CannotRead(TopicsError):
    """The source of the records fails."""


class Tally:
    """What was published so far, in words."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._started_s = time.monotonic()
        self.records = 0
        self.first_seq = 0
        self.last_seq = 0
        self.unsure = 0  # records whose append has no answer

    def add(self, receipt: Receipt) -> None:
        self.first_seq = self.first_seq or receipt.first_seq
        self.last_seq = receipt.last_seq
        self.records += receipt.count

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def words(self, code: int) -> str:
        """The last line, which depends on how it ended."""
        if code and not self.records and not self.unsure:
            return "nothing was published"
        seqs = f"{self.first_seq}..{self.last_seq}" if self.last_seq > self.first_seq else f"{self.last_seq}"
        text = f"published {_counted(self.records)} to {self._topic}" + (f" (seq {seqs})" if self.records else "")
        if code == 0:
            return f"{text} in {self.elapsed_s:.1f} s"
        text += " before it was interrupted" if code == EXIT_INTERRUPTED else " before that"
        return f"{text}; {_counted(self.unsure)} more may have been" if self.unsure else text


def _counted(records: int) -> str:
    return f"{records:,} record{'' if records == 1 else 's'}"


class Job:
    """Sends batches, one after the other."""

    def __init__(self, topic: str, tally: Tally, *, tag: str | None, node: str | None, durability: str | None) -> None:
        self._topic = topic
        self._tally = tally
        self._tag = tag
        self._node = node
        self._durability = durability
        self._patience_s = PATIENCE_S

    async def look(self, client: Client) -> None:
        """Before anything is read: is there a server, and would the topic be what was asked for?"""
        try:
            state = await client.state(self._topic)
        except Unreachable:
            raise
        except (ApiError, ClientError) as error:
            if is_passing(error) or (isinstance(error, ApiError) and error.code == "topic_not_found"):
                return
            raise
        # A retry is safe as long as the topic remembers the key.
        window_ms = state.config.get("idempotency_window_ms", limits.DEFAULT_IDEMPOTENCY_WINDOW_MS)
        self._patience_s = min(PATIENCE_S, window_ms / 2_000)
        if self._durability not in (None, state.config.get("durability")):
            raise WrongClass(
                f"{self._topic} exists with durability {state.config.get('durability')}, not {self._durability}; "
                "--durability only says what a new topic is to be"
            )

    async def send(self, client: Client, batch: Batch) -> None:
        try:
            await self._append(client, batch.data)
        except ApiError as error:
            at = (error.detail or {}).get("record")
            if not isinstance(at, int) or not 0 <= at < len(batch.data):
                raise
            # Nothing of the batch was written. What lies before the culprit goes alone.
            if batch.data[:at]:
                await self._append(client, batch.data[:at])
            raise BadLine(batch.lines[at], f"is refused: {error}") from None

    async def _append(self, client: Client, data: Sequence[Raw]) -> None:
        config: dict[str, Any] | None = None if self._durability is None else {"durability": self._durability}
        self._tally.unsure = len(data)
        try:
            receipt = await client.publish(
                self._topic, data, tag=self._tag, node=self._node, config=config, patience_s=self._patience_s
            )
        except OutcomeUnknown:
            raise
        except TopicsError:
            self._tally.unsure = 0
            raise
        self._tally.unsure = 0
        self._tally.add(receipt)


class WrongClass(TopicsError):
    """The topic exists and is not what was asked for."""


class Intake:
    """Makes batches of what comes in. A failure ends it; what came before is still delivered."""

    def __init__(self, parse: Parse, batcher: Batcher) -> None:
        self._parse = parse
        self._batcher = batcher
        self.failure: TopicsError | None = None
        self.taken_bytes = 0

    async def take(self, records: Sequence[str], out: trio.MemorySendChannel[Batch]) -> None:
        """From the command line."""
        async with out:
            await self._add([Line(number, record.encode()) for number, record in enumerate(records, 1)], out)
            await self._flush(out)

    async def read(self, source: int, out: trio.MemorySendChannel[Batch]) -> None:
        """From a descriptor, to its end."""
        send, chunks = trio.open_memory_channel[bytes](1)
        async with out, trio.open_nursery() as nursery:
            nursery.start_soon(self._read_chunks, source, send)
            try:
                await self._gather(chunks, out)
            except BadLine as error:
                self.failure = error
            await self._flush(out)
            nursery.cancel_scope.cancel()

    async def _read_chunks(self, source: int, out: trio.MemorySendChannel[bytes]) -> None:
        async with out:
            while True:
                try:
                    # A thread, because a file or a terminal can't be waited for otherwise. One that waits for input
                    # when the command ends is left behind.
                    chunk = await trio.to_thread.run_sync(os.read, source, _CHUNK_BYTES, abandon_on_cancel=True)
                except OSError as error:
                    self.failure = CannotRead(f"reading failed: {(error.strerror or str(error)).lower()}")
                    return
                if not chunk:
                    return
                await out.send(chunk)

    async def _gather(self, chunks: trio.MemoryReceiveChannel[bytes], out: trio.MemorySendChannel[Batch]) -> None:
        lines = Lines()
        send_at = math.inf  # when the batch that is being gathered has waited long enough
        while True:
            with trio.move_on_at(send_at) as waiting:
                try:
                    chunk = await chunks.receive()
                except trio.EndOfChannel:
                    await self._add(lines.finish(), out)
                    return
            if waiting.cancelled_caught:
                await self._flush(out)
            else:
                self.taken_bytes += len(chunk)
                await self._add(lines.feed(chunk), out)
            if not self._batcher:
                send_at = math.inf
            elif send_at == math.inf:
                send_at = trio.current_time() + LINGER_S

    async def _add(self, lines: Sequence[Line], out: trio.MemorySendChannel[Batch]) -> None:
        for line in lines:
            data = self._parse(line)
            if data is not None and (batch := self._batcher.add(line.number, data)) is not None:
                await out.send(batch)

    async def _flush(self, out: trio.MemorySendChannel[Batch]) -> None:
        if (batch := self._batcher.take()) is not None:
            await out.send(batch)


class Progress:
    """A line on the terminal while it takes long."""

    def __init__(self, tally: Tally, intake: Intake, source: int) -> None:
        status = os.fstat(source)
        self._total = status.st_size if stat.S_ISREG(status.st_mode) and status.st_size else None
        self._tally = tally
        self._intake = intake
        self._stack = ExitStack()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    async def run(self) -> None:
        await trio.sleep(PROGRESS_AFTER_S)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Display

        columns = [TextColumn("{task.fields[records]:,} records"), TextColumn("{task.fields[rate]:,.0f}/s")]
        bar = [BarColumn()] if self._total else []
        display = Display(*bar, *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._stack.enter_context(display)
        task = display.add_task("", total=self._total, records=0, rate=0.0)
        while True:
            records = self._tally.records
            display.update(
                task, completed=self._intake.taken_bytes, records=records, rate=records / self._tally.elapsed_s
            )
            await trio.sleep(0.1)
