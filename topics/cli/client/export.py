"""`topics export`: topics as JSON lines, of a running server or of a data folder.

What was there at the start is exported: records that come meanwhile are not. One page or block is in memory at a time.
With --out the file gets its name when it is complete; on a pipe the `end` line of each topic tells that.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from topics.actors.startup.datadir_lock import new_file
from topics.cli.completion import topic_names
from topics.cli.shared import reach
from topics.cli.shared.place import failures_told, find_topic, folder_name
from topics.cli.shared.terminal import Output, say, stdout
from topics.cli.shared.ticker import Ticker
from topics.client import Client, TopicState, connect
from topics.datadir.batch import Batch
from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic
from topics.errors import TopicsError
from topics.tools.export_lines import End, Gap, RecordLines, end_line, gap_line, head_line

_LOOKS = 20  # at a folder whose files go while they are read


@click.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1, shell_complete=topic_names)
@click.option("--all", "everything", is_flag=True, help="Every topic.")
@click.option("--out", "path", metavar="FILE", help="Where the lines go (default: standard output).")
@click.option("--data-dir", metavar="DIR", help="Read this data folder or snapshot; no server is asked.")
@reach.url_option
def export(topics: tuple[str, ...], everything: bool, path: str | None, data_dir: str | None, url: str) -> None:
    """Write topics as JSON lines, for `topics import` and for other programs.

    Records come from the server, or with --data-dir from a folder, whether or not its server runs. Each line is a
    record with its topic, seq, time, tag, node, meta and data; data is spelt as it was sent. A line before them has
    the topic's config, lines between them name what was lost, and one behind them says that the topic is complete.

    \b
      topics export orders --out orders.jsonl
      topics export orders payments | gzip > both.jsonl.gz
      topics export --all --data-dir /data/topics --out everything.jsonl

    Leases, idempotency keys, deleted records and routers are not exported. Of ephemeral topics, and of what routers
    have just copied, a folder has nothing: ask the server.

    Exit codes: 0 done, 1 it failed and stderr says why, 2 usage.
    """
    if bool(topics) == everything:
        raise click.UsageError("Name topics, or give --all.")
    url_given = click.get_current_context().get_parameter_source("url") is click.core.ParameterSource.COMMANDLINE
    if data_dir is not None and url_given:
        raise click.UsageError("Give --data-dir or --url, not both.")
    topics = tuple(dict.fromkeys(topics))
    with failures_told(), _opened(path) as out, Tally(out) as tally:
        if data_dir is not None:
            _from_folder(folder_name(data_dir), topics, tally)
            code = 0
        else:
            code = reach.run(lambda: _from_server(url, topics, tally))
        if code:
            raise _Failed(code)
    say(tally.words(), err=True)


class _Failed(SystemExit):
    """Said already; what is half written goes."""


@contextmanager
def _opened(path: str | None) -> Iterator[Output]:
    if path is None:
        yield stdout()
        return
    unfinished = f"{path}.tmp"
    file = new_file(unfinished)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


class Tally:
    """Where lines go, and how many there were; shown on a terminal while it takes long."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._ticker = Ticker()
        self.id = uuid.uuid4().hex
        self.topics = self.records = self.gaps = 0

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ticker.close()

    def begin(self, topic: str, *, config: Any, head_seq: int, earliest_seq: int, count: int) -> None:
        self._now = topic
        self._before = (self.records, self.gaps)
        self._out.write(
            head_line(topic, id=self.id, config=config, head_seq=head_seq, earliest_seq=earliest_seq, count=count)
        )

    def add(self, lines: list[bytes]) -> None:
        self._out.write(b"".join(lines))
        self.records += len(lines)
        self._ticker.show(self._now, self.records)

    def lost(self, gap: Gap) -> None:
        self._out.write(gap_line(self._now, gap))
        self.gaps += 1

    def end(self) -> None:
        records, gaps = self._before
        self._out.write(end_line(self._now, End(records=self.records - records, gaps=self.gaps - gaps)))
        self.topics += 1

    def words(self) -> str:
        text = f"exported {self.records:,} records of {self.topics:,} topics in {self._ticker.seconds:.1f} s"
        return f"{text}; {self.gaps:,} gaps are marked" if self.gaps else text


# --- from a server -----------------------------------------------------------------------------------


async def _from_server(url: str, topics: tuple[str, ...], tally: Tally) -> int:
    async with connect(url, notice=reach.notice) as client:
        names = topics or [row.topic async for row in client.topics()]
        states = [await client.state(name) for name in names]  # before a line is written: do they exist?
        for state in states:
            await _read_topic(client, state, tally)
    return 0


async def _read_topic(client: Client, state: TopicState, tally: Tally) -> None:
    tally.begin(
        state.topic,
        config=state.config,
        head_seq=state.head_seq,
        earliest_seq=state.earliest_seq,
        count=state.count,
    )
    lines = RecordLines(state.topic)
    at = 0
    while at < state.head_seq:
        page = await client.read(state.topic, at)
        if (stone := page.tombstone) is not None:
            if stone.reason == "recreated":
                raise TopicsError(f"{state.topic} was deleted and made again while it was exported: export it again")
            tally.lost(Gap(gap_from=stone.gap_from, gap_to=stone.gap_to, reason=stone.reason))
        tally.add(
            [
                lines.line(
                    seq=record.seq,
                    ts=record.ts_ms,
                    tag=None if record.tag is None else msgspec.json.encode(record.tag),
                    node=None if record.node is None else msgspec.json.encode(record.node),
                    meta=bytes(record.meta) or None,
                    data=bytes(record.data),
                )
                for record in page
                if record.seq <= state.head_seq
            ]
        )
        if page.caught_up:
            break
        at = page.next_from_seq
    tally.end()


# --- from a folder -----------------------------------------------------------------------------------


def _from_folder(data_dir: str, topics: tuple[str, ...], tally: Tally) -> None:
    folder = Folder(data_dir)
    chosen = [find_topic(folder, name) for name in topics] or [each for each in folder.topics if not each.internal]
    for topic in chosen:
        tally.begin(
            topic.name,
            config=topic.config,
            head_seq=topic.head_seq,
            earliest_seq=topic.earliest_seq,
            count=topic.count,
        )
        _walk(folder, topic, tally)
        tally.end()


def _walk(folder: Folder, topic: Topic, tally: Tally) -> None:
    lines = RecordLines(topic.name)
    at, head, topic_id, left = 1, topic.head_seq, topic.id, _LOOKS
    while at <= head:
        gap = topic.find_gap(at, head)
        if gap is not None and gap[0] == at:
            first, last, reason = gap
            if first < topic.evict_floor:
                last = max(last, min(topic.earliest_seq - 1, head))  # as a client is told
            tally.lost(Gap(gap_from=first, gap_to=last, reason=reason))
            at = last + 1
            continue
        end = head if gap is None else gap[0] - 1
        try:
            for batch in topic.select(at, end):
                tally.add(_lines(folder, topic, batch, lines, first=at, last=end))
                at = max(at, min(batch.last, end) + 1)
            at = end + 1
        except FileNotFoundError as exc:
            # The server has made a newer snapshot, and the file went.
            left -= 1
            folder.look()
            found = folder.topic(topic_id)
            if found is None:
                raise TopicsError(f"{topic.name} was deleted while it was exported") from None
            if not left:
                raise TopicsError(f"{exc.filename}: files go faster than they can be read; try again") from None
            topic = found


def _lines(folder: Folder, topic: Topic, batch: Batch, lines: RecordLines, *, first: int, last: int) -> list[bytes]:
    wanted = [seq for seq in batch.live_seqs(max(first, topic.low)) if first <= seq <= last]
    if not wanted:
        return []
    columns = folder.columns(batch)
    times, tags, nodes = list(columns.times()), columns.tags_json(), columns.nodes_json()
    metas, data = columns.metas(), columns.data()
    return [
        lines.line(seq=seq, ts=times[n], tag=tags[n], node=nodes[n], meta=metas[n], data=data[n])
        for seq in wanted
        for n in (seq - batch.first,)
    ]
