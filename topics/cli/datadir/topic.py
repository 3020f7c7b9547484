"""`topics topic`: the topics of a data folder. `ls` and `show` read the folder, so they work on a stopped server and on
one that hangs; `rm` asks a running server, by HTTP.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click
import msgspec

from topics.cli.completion import topic_names
from topics.cli.shared import reach
from topics.cli.shared.place import (
    bytes_text,
    data_dir_option,
    failures_told,
    find_topic,
    folder_name,
    json_option,
    print_json,
    time_text,
)
from topics.cli.shared.tables import Column, wide_option
from topics.cli.shared.tables import show as show_table
from topics.cli.shared.terminal import say
from topics.client.address import parse_url
from topics.client.http import HttpConnection
from topics.datadir.view.folder import Folder
from topics.datadir.view.space import SegmentSpace, segments_of
from topics.datadir.view.topic import Topic
from topics.storage.config import TopicConfig

if TYPE_CHECKING:
    from rich.text import Text


class TopicLine(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    id: str
    shard: int
    type: str
    durability: str
    count: int
    bytes: int
    head_seq: int
    earliest_seq: int
    segments: int
    last_write_ms: int | None


class TopicShown(msgspec.Struct, frozen=True, kw_only=True):
    line: TopicLine
    config: TopicConfig
    created_ms: int
    evict_floor: int
    cap_seq: int
    ttl_seq: int
    flushed_seq: int
    deleted_total: int
    evicted_total: int
    expired_total: int
    holes: list[tuple[int, int]]
    trims: list[tuple[int, int]]
    copies_of: str | None  # the id of the topic that routers copy from
    segments: list[SegmentSpace]
    batches_in_log: int


@click.group()
def topic() -> None:
    """Look at topics, and remove one.

    \b
      topics topic ls                       # from the data folder: a server need not run
      topics topic show orders
      topics topic rm orders                # asks the running server
    """


@topic.command("ls")
@click.option("--prefix", default="", help="Only names that begin so.")
@click.option("--internal", is_flag=True, help="The leases logs of queues too.")
@wide_option
@data_dir_option
@json_option
def ls(prefix: str, internal: bool, wide: bool, data_dir: str | None, as_json: bool) -> None:
    """List topics, from the data folder.

    Records of ephemeral topics are on no disk: they count as none here. The same goes for copies that routers have not
    written to segments yet.

    \b
      topics topic ls --prefix orders.
      topics topic ls --json | jq -r '.[] | select(.bytes > 1e9) | .topic'
    """
    with failures_told():
        folder = Folder(folder_name(data_dir))
        found = [
            _line(folder, each)
            for each in folder.topics
            if each.name.startswith(prefix) and (internal or not each.internal)
        ]
        if as_json:
            print_json(found)
        elif found:
            show_table(_COLUMNS, [_cells(line) for line in found], wide=wide)
        else:
            say(f"no topics in {folder.files.data_dir}" + (f" that begin with {prefix}" if prefix else ""))


@topic.command()
@click.argument("name", shell_complete=topic_names)
@data_dir_option
@json_option
def show(name: str, data_dir: str | None, as_json: bool) -> None:
    """Show all that the data folder says about a topic. NAME may be an id of 16 hex digits, too.

    \b
      topics topic show orders
      topics topic show orders --json | jq .config
    """
    with failures_told():
        folder = Folder(folder_name(data_dir))
        shown = _shown(folder, find_topic(folder, name))
        if as_json:
            print_json(shown)
        else:
            _print_shown(shown)


@topic.command()
@click.argument("name", shell_complete=topic_names)
@click.option("--if-empty", is_flag=True, help="Only if it holds no record.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@reach.url_option
@json_option
def rm(name: str, if_empty: bool, yes: bool, url: str, as_json: bool) -> None:
    """Remove a topic and everything in it, for good.

    This asks the running server at --url; the data folder is not touched from here. Routers from or to the topic go
    with it.

    \b
      topics topic rm orders
      topics topic rm orders --if-empty --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nobody is there to be asked: --yes removes the topic without a question")
        click.confirm(f"Remove topic {name} and all its records from the server at {url}, for good?", abort=True)

    async def main() -> int:
        address = parse_url(url, key=os.environ.get("TOPICS_API_KEY") or None)
        connection = HttpConnection(address)
        try:
            query = "?if_empty=true" if if_empty else ""
            answer = await connection.ask("DELETE", f"/v0/topics/{quote(name, safe='')}{query}")
        finally:
            await connection.aclose()
        removed: dict[str, Any] = msgspec.json.decode(answer)
        removed.pop("performance", None)
        if as_json:
            print_json(removed)
        elif removed["deleted"]:
            routers = removed["routers_removed"]
            say(f"removed {name} by {url}" + (f", and its routers {', '.join(routers)}" if routers else ""))
        if not removed["deleted"]:
            reach.notice(f'topic "{name}" does not exist at {url}')
            return 1
        return 0

    sys.exit(reach.run(main))


def _line(folder: Folder, found: Topic) -> TopicLine:
    return TopicLine(
        topic=found.name,
        id=f"{found.id:016x}",
        shard=found.shard,
        type=found.config.type,
        durability=found.config.durability,
        count=found.count,
        bytes=found.bytes(folder.columns),
        head_seq=found.head_seq,
        earliest_seq=found.earliest_seq,
        segments=len(found.segments),
        last_write_ms=found.last_write_ms,
    )


def _shown(folder: Folder, found: Topic) -> TopicShown:
    return TopicShown(
        line=_line(folder, found),
        config=found.config,
        created_ms=found.created_ms,
        evict_floor=found.evict_floor,
        cap_seq=found.cap_seq,
        ttl_seq=found.ttl_seq,
        flushed_seq=found.flushed_seq,
        deleted_total=found.deleted_total,
        evicted_total=found.evicted_total,
        expired_total=found.expired_total,
        holes=found.holes,
        trims=found.trims,
        copies_of=None if found.pipe is None else f"{found.pipe.source_id:016x}",
        segments=segments_of(folder.files, found),
        batches_in_log=sum(batch.wal for batch in found.batches),
    )


_COLUMNS = (
    Column("topic", justify="left", folds=True),
    Column("type", 4, justify="left"),
    Column("class", 6, justify="left"),
    Column("shard", 5),
    Column("records", 1),
    Column("bytes", 2),
    Column("earliest", 8),
    Column("head", 3),
    Column("segments", 7),
    Column("last write", 3, justify="left"),
)


def _cells(line: TopicLine) -> list[str | Text]:
    from rich.text import Text

    return [
        Text(line.topic),
        line.type,
        line.durability,
        str(line.shard),
        f"{line.count:,}",
        bytes_text(line.bytes),
        str(line.earliest_seq),
        str(line.head_seq),
        str(line.segments),
        time_text(line.last_write_ms),
    ]


def _print_shown(shown: TopicShown) -> None:
    line = shown.line
    say(f"{line.topic} ({line.type}, {line.durability}), id {line.id}, on shard {line.shard}")
    say(f"  made {time_text(shown.created_ms)}, last write {time_text(line.last_write_ms)} (UTC)")
    say(f"  {line.count:,} live records, {bytes_text(line.bytes)}, seq {line.earliest_seq} to {line.head_seq}")
    say(
        f"  {shown.deleted_total:,} deleted, {shown.evicted_total:,} evicted by caps, "
        f"{shown.expired_total:,} expired; evict_floor {shown.evict_floor}"
    )
    if shown.holes:
        say(f"  lost with a process or the power: {_ranges(shown.holes)}")
    if shown.trims:
        say(f"  gone at the source before they were copied: {_ranges(shown.trims)}")
    if shown.copies_of:
        say(f"  routers copy into it from {shown.copies_of}")
    defaults = TopicConfig()
    changed = {
        name: value
        for name in TopicConfig.__struct_fields__
        if (value := getattr(shown.config, name)) != getattr(defaults, name)
    }
    say(f"  config: {msgspec.json.encode(changed).decode() if changed else 'all defaults'}")
    say(
        f"  on disk: {len(shown.segments):,} segments up to seq {shown.flushed_seq}, "
        f"{shown.batches_in_log:,} batches in the log"
    )
    for segment in shown.segments:
        say(
            f"    {os.path.basename(segment.file)} seq {segment.first_seq}..{segment.last_seq}, "
            f"{bytes_text(segment.disk_bytes)}: {segment.live:,} live, {segment.deleted:,} deleted, "
            f"{segment.dead:,} dead"
        )


def _ranges(ranges: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{first}..{last}" for first, last in ranges[:10])
    return shown + (f" and {len(ranges) - 10} more" if len(ranges) > 10 else "")
