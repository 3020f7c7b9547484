"""The `topics` command. Verbs are imported when they are called, so that none waits for the others'
libraries.
"""

from __future__ import annotations

import importlib

import click

from topics import __version__

# verb -> the line that `topics --help` shows; the command is topics.cli.<verb>.<verb>, with _ for -
VERBS: dict[str, str] = {
    "serve": "Run the server until it is told to stop.",
    "config": "Check a file of settings, and show which are in effect.",
    "install-service": "Write the units that let systemd run the server.",
    "ps": "Show the processes of a running server.",
    "shards": "Show how the shards of a running server do.",
    "top": "Watch a running server live: shards and processes.",
    "rings": "Show the rings between processes, for one that is stuck.",
    "publish": "Append records from the command line, a file or standard input.",
    "tail": "Follow topics: print records as they are written.",
    "queue": "Look at queues, and put dead letters back.",
    "snapshot": "Make, list and remove stable views of a data folder.",
    "topic": "Look at topics, and remove one.",
    "shard": "Look into a shard: its files, and what keeps their space.",
    "wal": "Look into the log, frame by frame.",
    "segment": "Look at segments, block by block.",
    "verify": "Prove that a data folder is whole.",
    "report": "Report about a data folder: traffic, storage, queues, losses and more.",
    "bench": "Measure this machine and print the numbers.",
}


def command_of(verb: str) -> click.Command:
    name = verb.replace("-", "_")
    command: click.Command = getattr(importlib.import_module(f"topics.cli.{name}"), name)
    return command


class Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return command_of(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="topics", message="%(prog)s %(version)s")
def main() -> None:
    """A persistent event engine for one machine behind a JSON HTTP API."""


if __name__ == "__main__":
    main()
