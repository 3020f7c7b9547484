"""`topics serve`: settings, the process table, and the supervisor that runs it.

Exit codes: 0 stopped as asked; 1 stopped, but not everything went well; 2 refused to start, and stderr
says why.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import click
import trio

from topics import __version__
from topics.actors.child import show_memory
from topics.actors.startup.datadir_lock import DataDir, LockInfo
from topics.actors.startup.listener import given_listener
from topics.actors.startup.secrecy import conceal
from topics.actors.supervisor.process import ProcessSpec
from topics.actors.supervisor.sd_notify import ServiceManager
from topics.actors.supervisor.supervisor import Supervisor
from topics.errors import SettingsError, StartRefused
from topics.keyfile import KeyFile
from topics.settings import Settings, load, require_keys

EXIT_REFUSED = 2
# What the service manager passes to one process is not for its children.
FOR_US_ALONE = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),
    *("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"),
)


def process_table(settings: Settings) -> list[ProcessSpec]:
    """Everything that runs beside the supervisor. Those who talk to clients stop first, shards last."""
    return [
        *(
            ProcessSpec(f"gateway-{i}", "topics.gateway.process", i, listener=True, stop_order=0)
            for i in range(settings.gateways)
        ),
        ProcessSpec("router", "topics.router.process", 0, stop_order=1),
        ProcessSpec("queue", "topics.queue.coordinator", 0, stop_order=1),
        *(
            ProcessSpec(f"shard-{i}", "topics.walshard.process", i, stores=True, stop_order=9)
            for i in range(settings.wal_shards)
        ),
    ]


def link_table(settings: Settings) -> list[tuple[str, str]]:
    """Who talks to whom."""
    shards = [f"shard-{i}" for i in range(settings.wal_shards)]
    gateways = [f"gateway-{i}" for i in range(settings.gateways)]
    return [
        *((gateway, peer) for gateway in gateways for peer in (*shards, "router", "queue")),
        *((peer, shard) for peer in ("router", "queue") for shard in shards),
    ]


@click.command()
@click.option("--config", help="A TOML file with settings (TOPICS_CONFIG).")
@click.option("--host", help="Address to listen on (TOPICS_HOST; default 127.0.0.1).")
@click.option("--port", type=int, help="Port to listen on, 0 for a free one (TOPICS_PORT; default 4000).")
@click.option("--data-dir", help="Where the data lives (TOPICS_DATA_DIR; default ./topics-data).")
@click.option("--shards", type=int, help="Number of shards (TOPICS_WAL_SHARDS; default one per core, up to 8).")
def serve(config: str | None, host: str | None, port: int | None, data_dir: str | None, shards: int | None) -> None:
    """Run the server until it is told to stop (Ctrl-C or SIGTERM).

    Everything else is set by a TOML file and TOPICS_* variables. Variables win over the file, the options here over
    both; `topics config show` says what comes of it.

    \b
      topics serve
      topics serve --port 4001 --data-dir /srv/topics
      topics serve --config /etc/topics/topics.toml
    """
    options = {
        "TOPICS_HOST": host,
        "TOPICS_PORT": port,
        "TOPICS_DATA_DIR": data_dir,
        "TOPICS_WAL_SHARDS": shards,
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    try:
        show_memory(False)  # until the settings say otherwise
        environ = conceal(os.environ)  # first: it may start us anew
        listener = given_listener(os.environ, os.getpid())
        address = None if listener is None else listener.getsockname()[:2]
        found = load(environ, config=config, options=given, socket=address)
        settings = found.settings
        show_memory(settings.dumpable)
        require_keys(settings)
        manager = ServiceManager.from_environment(os.environ)
        for name in FOR_US_ALONE:
            os.environ.pop(name, None)
        code = _run(settings, listener, manager, found.key_file)
    except (SettingsError, StartRefused) as exc:
        click.echo(f"topics: {exc}", err=True)
        sys.exit(EXIT_REFUSED)
    sys.exit(code)


def _run(
    settings: Settings, listener: socket.socket | None, manager: ServiceManager | None, key_file: KeyFile | None
) -> int:
    claim = LockInfo(
        pid=os.getpid(),
        started_ms=time.time_ns() // 1_000_000,
        host=settings.host,
        version=__version__,
    )
    folder = DataDir.claim(settings.data_dir, claim)
    try:
        processes = process_table(settings)
        supervisor = Supervisor(
            settings,
            processes,
            link_table(settings),
            folder,
            listener=listener,
            manager=manager,
            key_file=key_file,
            preload=sorted({spec.module for spec in processes}),
        )
        return trio.run(supervisor.run)
    finally:
        folder.close()
