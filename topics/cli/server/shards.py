"""`topics shards`: how the shards of a running server do, from the counters page, which the supervisor shows.

Rates come from two readings. Figures are up to a second old, because that is how often the processes write them.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import msgspec

from topics.actors.inspect.attach import look_at, look_inside
from topics.actors.startup.datadir_lock import LockInfo, alive
from topics.cli.server.ps import rss_bytes, uptime_text
from topics.cli.shared.place import bytes_text, data_dir_option, failures_told, folder_name, json_option, print_json
from topics.cli.shared.tables import Column, console, fitted, turned
from topics.cli.shared.terminal import plain, shown
from topics.shm.counters import SYNC_BUCKET_COUNT, SYNC_BUCKET_US, Board, Row, State, Word

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_LEVELS = ("calm", "coalesce", "widen", "defer", "refuse")
interval_option = click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3_600),
    default=1.0,
    metavar="SECONDS",
    help="Time between two readings (default 1).",
)


class Reading(msgspec.Struct, frozen=True):
    """The words of one process at one moment."""

    at_ns: int
    words: list[int]

    def __getitem__(self, word: int) -> int:
        return self.words[word]


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int | None
    state: str
    restarts: int
    uptime_ms: int | None
    rss_bytes: int | None
    busy_percent: float | None  # share of the time that its loop did something
    loop_lag_us: int  # the longest round of about the last second
    requests_per_s: float | None
    connections: int
    ring_depth: int
    ring_high_water: int
    outbox_depth: int
    ring_full: int
    pressure: int
    heartbeat_age_ms: int | None


class ShardFigures(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessFigures
    topics: int
    records: int
    bytes: int
    records_per_s: float | None
    bytes_per_s: float | None  # to the log
    writes_per_s: float | None
    frames_per_write: float | None  # how many batches share a write
    syncs_per_s: float | None
    sync_p50_us: int | None  # upper bounds: syncs are counted in buckets
    sync_p99_us: int | None
    wal_lsn: int
    wal_backlog: int
    snapshot_age_ms: int | None
    read_only: bool
    cold_tier_missing: bool
    disk_free: int
    progress_permille: int | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    version: str
    data_dir: str
    shards: list[ShardFigures]
    processes: list[ProcessFigures]


class Watched:
    """A running server, read again and again."""

    def __init__(self, data_dir: str) -> None:
        self.data_dir = data_dir
        self.info: LockInfo
        self.info, sight = look_at(data_dir)
        self.board: Board = sight.board
        self._before = self._read()

    def _read(self) -> dict[str, Reading]:
        return {row.name: Reading(time.monotonic_ns(), row.words.tolist()) for row in self.board.rows()}

    def _look_again(self) -> None:
        board = look_inside(self.info).board
        self.board.close()
        self.board = board

    @property
    def running(self) -> bool:
        return bool(self.board.row("supervisor")[Word.PID]) and alive(self.info.pid)

    def figures(self) -> Figures:
        """What has been so since the last call."""
        self._look_again()
        before, now = self._before, self._read()
        self._before = now
        processes = [_process(row, before[row.name], now[row.name]) for row in self.board.rows()]
        return Figures(
            address=self.info.address,
            version=self.info.version,
            data_dir=self.data_dir,
            shards=[
                _shard(process, before[process.name], now[process.name])
                for process in processes
                if process.name.startswith("shard-")
            ],
            processes=processes,
        )

    def close(self) -> None:
        self.board.close()


@click.command()
@interval_option
@data_dir_option
@json_option
def shards(interval_s: float, data_dir: str | None, as_json: bool) -> None:
    """Show how the shards of a running server do.

    Only the supervisor is asked, so this works while the others hang. Rates are those of --interval. frames/write: how
    many batches share a write. sync p50 and p99: what half and 99 of 100 syncs took at most. backlog: what the log
    holds, which a start would have to read. pressure: calm, coalesce, widen, defer or refuse.

    \b
      topics shards
      topics shards --interval 10
      topics shards --json | jq '.shards[] | {n: .process.name, p99: .sync_p99_us}'
    """
    with failures_told():
        watched = Watched(folder_name(data_dir))
        try:
            time.sleep(interval_s)
            figures = watched.figures()
        finally:
            watched.close()
        if as_json:
            print_json(figures)
        else:
            out = console()
            out.print(plain(_heading(figures)), highlight=False)
            for table in shard_tables(figures, width=out.width):
                out.print(table)


# --- from words to figures ---------------------------------------------------------------------------


def _per_s(before: Reading, now: Reading, word: int) -> float | None:
    """None: another process has taken the row over, or counts from zero again."""
    grown = now[word] - before[word]
    if grown < 0 or before[Word.GENERATION] != now[Word.GENERATION] or now.at_ns <= before.at_ns:
        return None
    return grown * 1e9 / (now.at_ns - before.at_ns)


def _process(row: Row, before: Reading, now: Reading) -> ProcessFigures:
    pid = now[Word.PID]
    busy_us = _per_s(before, now, Word.BUSY_US)
    beat = now[Word.HEARTBEAT]
    return ProcessFigures(
        name=row.name,
        pid=pid or None,
        state=State(now[Word.STATE]).name.lower(),
        restarts=now[Word.RESTARTS],
        uptime_ms=max(time.time_ns() // 1_000_000 - now[Word.STARTED_MS], 0) if pid else None,
        rss_bytes=rss_bytes(pid) if pid else None,
        busy_percent=None if busy_us is None else round(min(busy_us / 10_000, 100.0), 1),
        loop_lag_us=now[Word.LOOP_LAG_US],
        requests_per_s=_rounded(_per_s(before, now, Word.REQUESTS)),
        connections=now[Word.CONNECTIONS],
        ring_depth=now[Word.RING_DEPTH],
        ring_high_water=now[Word.RING_HIGH_WATER],
        outbox_depth=now[Word.OUTBOX_DEPTH],
        ring_full=now[Word.RING_FULL],
        pressure=now[Word.PRESSURE],
        heartbeat_age_ms=max(now.at_ns - beat, 0) // 1_000_000 if pid and beat else None,
    )


def _shard(process: ProcessFigures, before: Reading, now: Reading) -> ShardFigures:
    writes = now[Word.WAL_BATCHES] - before[Word.WAL_BATCHES]
    frames = now[Word.WAL_FRAMES] - before[Word.WAL_FRAMES]
    start, stop = Word.SYNC_BUCKETS, Word.SYNC_BUCKETS + SYNC_BUCKET_COUNT
    lately = [late - early for late, early in zip(now.words[start:stop], before.words[start:stop], strict=True)]
    syncs = lately if any(lately) else now.words[start:stop]  # none lately: those of its whole life
    snapshot_ms = now[Word.SNAPSHOT_MS]
    return ShardFigures(
        process=process,
        topics=now[Word.TOPICS],
        records=now[Word.RECORDS_LIVE],
        bytes=now[Word.BYTES_LIVE],
        records_per_s=_rounded(_per_s(before, now, Word.RECORDS_ADDED)),
        bytes_per_s=_rounded(_per_s(before, now, Word.WAL_BYTES)),
        writes_per_s=_rounded(_per_s(before, now, Word.WAL_BATCHES)),
        frames_per_write=round(frames / writes, 1) if writes > 0 and frames >= 0 else None,
        syncs_per_s=_rounded(_per_s(before, now, Word.WAL_FSYNCS)),
        sync_p50_us=quantile_us(syncs, 0.5),
        sync_p99_us=quantile_us(syncs, 0.99),
        wal_lsn=now[Word.WAL_LSN],
        wal_backlog=now[Word.WAL_BACKLOG],
        snapshot_age_ms=max(time.time_ns() // 1_000_000 - snapshot_ms, 0) if snapshot_ms else None,
        read_only=bool(now[Word.WAL_READ_ONLY]),
        cold_tier_missing=bool(now[Word.COLD_GONE]),
        disk_free=now[Word.DISK_FREE],
        progress_permille=now[Word.PROGRESS_PERMILLE] if process.state == "recovering" else None,
    )


def quantile_us(buckets: list[int], share: float) -> int | None:
    """The bound of the bucket that holds it; the last bucket has none, and gives twice the one before."""
    total = sum(buckets)
    if total <= 0:
        return None
    seen = 0
    for bound, count in zip((*SYNC_BUCKET_US, 2 * SYNC_BUCKET_US[-1]), buckets, strict=True):
        seen += count
        if seen >= share * total:
            return bound
    return None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


# --- as tables ---------------------------------------------------------------------------------------


def _state(figures: ProcessFigures, progress: int | None = None) -> str:
    colour = {"ready": "green", "failed": "red", "backoff": "red", "stopped": "dim"}.get(figures.state, "yellow")
    text = figures.state if progress is None else f"{figures.state} {progress / 10:.0f} %"
    return f"[{colour}]{text}[/]"


def _shard_state(each: ShardFigures) -> str:
    if each.process.state == "ready" and each.read_only:
        return "[red]read-only[/]"
    if each.process.state == "ready" and each.cold_tier_missing:
        return "[red]no cold disk[/]"
    return _state(each.process, each.progress_permille)


def _pressure(level: int) -> str:
    name = _LEVELS[level] if level < len(_LEVELS) else str(level)
    return name if not level else f"[{'red' if level == 4 else 'yellow'}]{name}[/]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _micros(us: int | None) -> str:
    return "" if us is None else f"{us} µs" if us < 1_000 else f"{us / 1_000:.1f} ms"


def _rate(size: float | None) -> str:
    return "" if size is None else f"{bytes_text(size)}/s"


_SHARD = (
    Column("shard", justify="left"),
    Column("state", justify="left", at_least=9),
    Column("topics", 6),
    Column("records", 5),
    Column("bytes", 7, at_least=10),
    Column("records/s", 1, at_least=9),
    Column("log/s", 4, at_least=11),
    Column("frames/write", 9),
    Column("sync p50", 8, at_least=8),
    Column("sync p99", 1, at_least=8),
    Column("lsn", 12),
    Column("backlog", 6, at_least=10),
    Column("snapshot", 10),
    Column("ring", 2, at_least=10),
    Column("ring high", 11),
    Column("restarts", 3),
    Column("memory", 5, at_least=10),
    Column("pressure", justify="left", at_least=8),
)
_PROCESS = (
    Column("process", justify="left"),
    Column("state", justify="left", at_least=9),
    Column("pid", 6),
    Column("uptime", 10),
    Column("restarts", 4),
    Column("memory", 5, at_least=10),
    Column("busy", 3, at_least=5),
    Column("lag", 2, at_least=8),
    Column("requests/s", 8),
    Column("connections", 11),
    Column("ring", 9, at_least=10),
    Column("ring high", 14),
    Column("outbox", 12),
    Column("refused", 13),
    Column("heartbeat", 1, at_least=10),
    Column("pressure", 7, justify="left", at_least=8),
)


def _heading(figures: Figures) -> str:
    return f"topics {figures.version} on {figures.address}, data in {figures.data_dir}"


def shard_tables(figures: Figures, *, width: int) -> list[Table]:
    """Everything about the shards: a row for each, or a column for each where rows don't fit."""
    return turned(_SHARD, [_shard_cells(each) for each in figures.shards], width=width)


def screen(figures: Figures, *, width: int) -> Group:
    """What matters most about shards and processes, a line each."""
    from rich.console import Group
    from rich.text import Text

    of_shards, _ = fitted(_SHARD, [_shard_cells(each) for each in figures.shards], width=width, compact=True)
    of_processes, _ = fitted(_PROCESS, [_process_cells(each) for each in figures.processes], width=width, compact=True)
    # A second line would push the last one out.
    heading = Text(shown(_heading(figures)), no_wrap=True, overflow="ellipsis")
    return Group(heading, of_shards, Text(""), of_processes)


def _shard_cells(each: ShardFigures) -> list[str]:
    process = each.process
    return [
        process.name.removeprefix("shard-"),
        _shard_state(each),
        f"{each.topics:,}",
        f"{each.records:,}",
        bytes_text(each.bytes),
        _number(each.records_per_s),
        _rate(each.bytes_per_s),
        _number(each.frames_per_write),
        _micros(each.sync_p50_us),
        _micros(each.sync_p99_us),
        str(each.wal_lsn),
        bytes_text(each.wal_backlog),
        "" if each.snapshot_age_ms is None else f"{uptime_text(each.snapshot_age_ms)} ago",
        bytes_text(process.ring_depth),
        bytes_text(process.ring_high_water),
        str(process.restarts),
        "" if process.rss_bytes is None else bytes_text(process.rss_bytes),
        _pressure(process.pressure),
    ]


def _process_cells(each: ProcessFigures) -> list[str]:
    return [
        each.name,
        _state(each),
        "" if each.pid is None else str(each.pid),
        "" if each.uptime_ms is None else uptime_text(each.uptime_ms),
        str(each.restarts),
        "" if each.rss_bytes is None else bytes_text(each.rss_bytes),
        "" if each.busy_percent is None else f"{each.busy_percent:.0f} %",
        _micros(each.loop_lag_us),
        _number(each.requests_per_s),
        str(each.connections),
        bytes_text(each.ring_depth),
        bytes_text(each.ring_high_water),
        bytes_text(each.outbox_depth),
        str(each.ring_full),
        "" if each.heartbeat_age_ms is None else f"{each.heartbeat_age_ms / 1_000:.1f} s ago",
        _pressure(each.pressure),
    ]
