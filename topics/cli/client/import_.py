"""`topics import`: appends what `topics export` wrote, over HTTP.

```
file ─► lines ─► entries ─► batches of one topic ─► log: begun ─► append, with a key ─► the next one
```

Rules. Records go in the order of the file, one append at a time. Everything before a bad line is imported, nothing
behind it. What was written is known by the log of the import (tools/import_log.py): running it again goes on behind
that. An append without an answer is sent again with its key while the topic remembers it; later it is looked for behind
the head that the topic had before, and if that does not tell, a person is asked (--in-doubt).

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO, cast

import click
import msgspec
from msgspec import Raw

from topics import limits
from topics.cli.shared import reach
from topics.cli.shared.terminal import say
from topics.cli.shared.ticker import Ticker
from topics.client import ApiError, Client, NewRecord, OutcomeUnknown, Record, connect
from topics.client.batches import BATCH_BYTES, BATCH_RECORDS, BadLine, Line, Lines
from topics.client.client import PATIENCE_S
from topics.errors import TopicsError
from topics.tools.export_lines import Entry, read_entry
from topics.tools.import_log import Begun, ImportLog, path_of

_CHUNK_BYTES = 256 * limits.KIB
_MARGIN_MS = 5_000  # a key that is about to be forgotten is not relied on
_ABOUT_RECORDS = ("invalid_request", "record_too_large", "batch_too_large", "payload_too_large")


def _pairs(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in value:
        old, sign, new = pair.partition("=")
        if not old or not sign or not new:
            raise click.BadParameter(f"{pair!r} is not OLD=NEW")
        found[old] = new
    return found


@click.command("import")
@click.argument("path", metavar="[FILE]", required=False)
@click.option("--into", metavar="NAME", help="Put the records of all topics into this one.")
@click.option("--map", "names", metavar="OLD=NEW", multiple=True, callback=_pairs, help="Another name for a topic.")
@click.option("--again", is_flag=True, help="Import what was imported completely a second time.")
@click.option(
    "--in-doubt",
    type=click.Choice(["write", "skip"]),
    help="What to do with a batch that may or may not have been written before an interruption.",
)
@reach.url_option
def import_(
    path: str | None, into: str | None, names: dict[str, str], again: bool, in_doubt: str | None, url: str
) -> None:
    """Append what `topics export` wrote: FILE, or standard input.

    Topics that do not exist are created with the config they had; others keep theirs. Tags, nodes, meta and data come
    out as they went in, to the byte, in the same order.

    \b
      topics import orders.jsonl
      topics import orders.jsonl --map orders=orders-2025
      zcat both.jsonl.gz | topics import --into everything --url http://other:4000

    What can't be kept: seqs and times are given anew, as for every append. Gaps that the export marks are not made
    again. Leases, deliveries and idempotency keys are not in an export.

    After an interruption run it again: it goes on where it was and appends nothing twice.

    Exit codes: 0 done, 1 it failed and stderr says why, 2 usage.
    """
    if into is not None and names:
        raise click.UsageError("Give --into or --map, not both.")
    with ExitStack() as stack:
        work = Work(_opened(path, stack), into=into, names=names, again=again, in_doubt=in_doubt, url=url)
        stack.callback(work.close)
        code = reach.run(work.run)
    say(work.words(code), err=True)
    sys.exit(code)


def _opened(path: str | None, stack: ExitStack) -> BinaryIO:
    if path is None or path == "-":
        if sys.stdin.isatty():
            reach.notice("reading from the terminal; Ctrl-D ends it")
        return sys.stdin.buffer
    try:
        return stack.enter_context(open(path, "rb"))
    except OSError as exc:
        reach.notice(f"can't read {path}: {(exc.strerror or str(exc)).lower()}")
        sys.exit(1)


class Entries:
    """The lines of the input, taken apart: one export, in which the seqs of each topic grow.

    What is written is known by seq, so a record that does not follow would count as one that is there already.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._lines = Lines()
        self._begun: dict[str, str | None] = {}  # by topic: the id in its head
        self._seqs: dict[str, int] = {}  # by topic: the last one
        self.taken_bytes = 0
        self._first = self._read()

    @property
    def id(self) -> str:
        """Which export this is: it says so, or its first bytes tell."""
        try:
            head = msgspec.json.decode(self._first.partition(b"\n")[0], type=Entry)
        except (msgspec.DecodeError, UnicodeDecodeError):
            head = None
        return hashlib.sha256(self._first).hexdigest() if head is None or head.id is None else head.id

    def __iter__(self) -> Iterator[tuple[Line, Entry, int]]:
        """With the seq of each record; 0 for other lines."""
        chunk = self._first
        while chunk:
            yield from self._entries(self._lines.feed(chunk))
            chunk = self._read()
        yield from self._entries(self._lines.finish())

    def _entries(self, lines: list[Line]) -> Iterator[tuple[Line, Entry, int]]:
        for line in lines:
            if (entry := read_entry(line)) is None:
                continue
            if entry.is_record:
                yield line, entry, self._follow(line, entry)
                continue
            if entry.export is not None:
                self._begin(line, entry)
            yield line, entry, 0

    def _begin(self, line: Line, head: Entry) -> None:
        if head.topic in self._begun or head.id != next(iter(self._begun.values()), head.id):
            raise BadLine(line.number, f"begins another export, of {head.topic}: import one after the other")
        self._begun[head.topic] = head.id

    def _follow(self, line: Line, entry: Entry) -> int:
        last = self._seqs.get(entry.topic, 0)
        seq = max(line.number, last + 1) if entry.seq is None else entry.seq
        if seq <= last:
            raise BadLine(line.number, f"has seq {seq}, which does not follow {last} of {entry.topic}")
        self._seqs[entry.topic] = seq
        return seq

    def _read(self) -> bytes:
        try:
            chunk = self._source.read(_CHUNK_BYTES)
        except OSError as exc:
            raise TopicsError(f"reading failed: {(exc.strerror or str(exc)).lower()}") from None
        self.taken_bytes += len(chunk)
        return chunk


class Batch(msgspec.Struct):
    """Records of one topic that go together."""

    topic: str
    records: list[NewRecord] = []
    seqs: list[int] = []
    lines: list[int] = []
    bytes: int = 0

    def add(self, record: NewRecord, *, seq: int, line: Line) -> None:
        self.records.append(record)
        self.seqs.append(seq)
        self.lines.append(line.number)
        self.bytes += len(line.text)

    def part(self, start: int, stop: int | None) -> Batch:
        return Batch(self.topic, self.records[start:stop], self.seqs[start:stop], self.lines[start:stop])


class Work:
    def __init__(
        self,
        source: BinaryIO,
        *,
        into: str | None,
        names: dict[str, str],
        again: bool,
        in_doubt: str | None,
        url: str,
    ) -> None:
        self._source = source
        self._into = into
        self._names = names
        self._again = again
        self._in_doubt = in_doubt
        self._url = url
        self._log: ImportLog | None = None
        self._windows_ms: dict[str, int] = {}  # by target: how long it remembers keys
        self._heads: dict[str, int] = {}
        self._ended: set[str] = set()
        self._begun: set[str] = set()
        self._ticker = Ticker()
        self.records = self.skipped = self.gaps = 0
        self._already = False

    def close(self) -> None:
        self._ticker.close()
        if self._log is not None:
            self._log.close()

    # --- the whole ---

    async def run(self) -> int:
        entries = Entries(self._source)
        path = path_of(self._url, entries.id, self._names, self._into)
        log = self._log = ImportLog(path, again=self._again)
        if log.finished is not None:
            for line, entry, seq in entries:
                if entry.is_record and not log.is_written(entry.topic, seq):
                    raise BadLine(line.number, "was not there when this was imported: put what is new into a new file")
            self._already = True
            return 0
        async with connect(self._url, notice=reach.notice) as client:
            log.start()
            await self._take(client, log, entries)
        if short := sorted(self._begun - self._ended):
            raise TopicsError(f"the export was cut short: {', '.join(short)} may have more records than it holds")
        log.finish(topics=len(self._heads), records=self.records + self.skipped)
        return 0

    async def _take(self, client: Client, log: ImportLog, entries: Entries) -> None:
        batch: Batch | None = None
        try:
            for line, entry, seq in entries:
                if batch is not None and (batch.topic != entry.topic or not entry.is_record):
                    await self._send(client, log, batch)
                    batch = None
                if not entry.is_record:
                    await self._heed(client, entry)
                    continue
                if log.is_written(entry.topic, seq):
                    self.skipped += 1
                    continue
                batch = batch or Batch(entry.topic)
                batch.add(entry.record(), seq=seq, line=line)
                if self._is_full(log, batch):
                    await self._send(client, log, batch)
                    batch = None
        except BadLine:
            if batch is not None and log.doubt is None:
                await self._send(client, log, batch)
            raise
        if batch is not None:
            await self._send(client, log, batch)

    @staticmethod
    def _is_full(log: ImportLog, batch: Batch) -> bool:
        """A batch in doubt is made of the same records again."""
        if log.doubt is not None and log.doubt.topic == batch.topic:
            return batch.seqs[-1] >= log.doubt.last
        return len(batch.records) >= BATCH_RECORDS or batch.bytes >= BATCH_BYTES

    def _target(self, topic: str) -> str:
        return self._into or self._names.get(topic, topic)

    async def _heed(self, client: Client, entry: Entry) -> None:
        """A line that is no record."""
        if entry.tombstone is not None:
            self.gaps += 1
        elif entry.end is not None:
            self._ended.add(entry.topic)
        elif entry.export is not None:
            self._begun.add(entry.topic)
            await self._known(client, self._target(entry.topic), entry.config)

    async def _known(self, client: Client, target: str, config: dict[str, Any] | None) -> None:
        """Make sure that a topic is there, and learn where it stands."""
        if target in self._heads:
            return
        try:
            state = await client.state(target, patience_s=PATIENCE_S)
        except ApiError as exc:
            if exc.code != "topic_not_found":
                raise
            config = dict(config or {})
            if (letters := config.get("dead_letter")) is not None:
                config["dead_letter"] = self._names.get(letters, letters)
            await client.create(target, config)
            state = await client.state(target, patience_s=PATIENCE_S)
        kind = state.config.get("type")
        if config is not None and config.get("type", kind) != kind:
            raise TopicsError(f"{target} is a {kind} and was a {config['type']}: choose another name with --map")
        self._heads[target] = state.head_seq
        self._windows_ms[target] = int(state.config.get("idempotency_window_ms", 0))

    # --- one batch ---

    async def _send(self, client: Client, log: ImportLog, batch: Batch) -> None:
        target = self._target(batch.topic)
        await self._known(client, target, None)
        doubt = log.doubt if log.doubt is not None and log.doubt.topic == batch.topic else None
        if doubt is not None and (batch.seqs[0], batch.seqs[-1]) != (doubt.first, doubt.last):
            raise TopicsError(
                f"the export is not what it was before the interruption: seq {doubt.first} to {doubt.last} of "
                f"{doubt.topic} are not in it. Import the same file again"
            )
        if doubt is not None and await self._was_written(client, doubt, batch):
            log.answered()
            self.skipped += len(batch.records)
            return
        if doubt is None:
            log.begin(batch.topic, target, first=batch.seqs[0], last=batch.seqs[-1], head_seq=self._heads[target])
        assert log.doubt is not None
        window_s = self._windows_ms[target] / 1_000
        try:
            receipt = await client.publish(
                target,
                batch.records,
                key=log.key_of(log.doubt),
                create=False,
                patience_s=min(PATIENCE_S, window_s / 2),
            )
        except OutcomeUnknown:
            raise
        except ApiError as exc:
            log.refused()
            if exc.code not in _ABOUT_RECORDS:
                raise
            if len(batch.records) == 1:
                raise BadLine(batch.lines[0], f"is refused: {exc}") from None
            # Nothing of the batch was written. Halves lead to the culprit, and what lies before it is written.
            half = len(batch.records) // 2
            await self._send(client, log, batch.part(0, half))
            await self._send(client, log, batch.part(half, None))
            return
        log.answered()
        self._heads[target] = receipt.head_seq
        self.records += len(batch.records)
        self._ticker.show(target, self.records)

    async def _was_written(self, client: Client, doubt: Begun, batch: Batch) -> bool:
        """Of a batch that was begun before an interruption. While its key is remembered it is simply sent again."""
        age_ms = time.time_ns() // 1_000_000 - doubt.at_ms
        if 0 <= age_ms < self._windows_ms[doubt.target] - _MARGIN_MS:
            return False
        state = await client.state(doubt.target, patience_s=PATIENCE_S)
        if state.head_seq <= doubt.head_seq:
            return False
        if await _find(client, doubt, batch):
            return True
        if state.earliest_seq <= doubt.head_seq + 1:
            return False
        if self._in_doubt is not None:
            return self._in_doubt == "skip"
        raise TopicsError(
            f"seq {doubt.first} to {doubt.last} of {doubt.topic} may have been written to {doubt.target} before the "
            f"interruption, and of what came behind {doubt.head_seq} there some is gone: say --in-doubt write or "
            "--in-doubt skip"
        )

    # --- words ---

    def words(self, code: int) -> str:
        if self._already:
            return "nothing was imported: this export is there already; --again imports it a second time"
        if code and not self.records and not self.skipped:
            return "nothing was imported"
        text = f"imported {self.records:,} records in {self._ticker.seconds:.1f} s"
        if self.skipped:
            text += f"; {self.skipped:,} were there already"
        if self.gaps:
            text += f"; {self.gaps:,} gaps of the export are not marked here"
        return f"{text}; run it again to go on" if code else text


async def _find(client: Client, doubt: Begun, batch: Batch) -> bool:
    """Whether the batch stands behind the head that the topic had before: whole, and its records side by side."""
    at = doubt.head_seq
    wanted = batch.records
    last: deque[Record] = deque(maxlen=len(wanted))  # side by side
    while True:
        page = await client.read(doubt.target, at)
        for record in page:
            if last and record.seq != last[-1].seq + 1:
                last.clear()
            last.append(record)
            if len(last) == len(wanted) and all(map(_same, last, wanted)):
                return True
        if page.caught_up:
            return False
        at = page.next_from_seq


def _same(record: Record, wanted: NewRecord) -> bool:
    meta = b"" if wanted.meta is None else bytes(cast(Raw, wanted.meta))
    return (bytes(record.data), record.tag, record.node, bytes(record.meta)) == (
        bytes(wanted.data),
        wanted.tag,
        wanted.node,
        meta,
    )
