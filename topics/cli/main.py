"""The `topics` command. Verbs are imported when they are called, so that none waits for the others'
libraries.
"""

from __future__ import annotations

import importlib
import keyword
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from topics import __version__
from topics.cli.shared.examples import with_examples
from topics.cli.shared.exits import EXIT_CODES, EXIT_INTERRUPTED

# verb -> the line that `topics --help` shows
VERBS: dict[str, str] = {
    "serve": "Run the server until it is told to stop.",
    "config": "Check a file of settings, and show which are in effect.",
    "install-service": "Write the units that let systemd run the server.",
    "reload": "Replace the processes of a running server while clients keep working.",
    "ps": "Show the processes of a running server.",
    "shards": "Show how the shards of a running server do.",
    "top": "Watch a running server live: shards and processes.",
    "rings": "Show the rings between processes, for one that is stuck.",
    "publish": "Append records from the command line, a file or standard input.",
    "tail": "Follow topics: print records as they are written.",
    "queue": "Look at queues, and put dead letters back.",
    "export": "Write topics as JSON lines.",
    "import": "Append what an export holds.",
    "snapshot": "Make, list and remove stable views of a data folder.",
    "backup": "Back a data folder up, and restore it.",
    "topic": "Look at topics, and remove one.",
    "shard": "Look into a shard: its files, and what keeps their space.",
    "wal": "Look into the log, frame by frame.",
    "segment": "Look at segments, block by block.",
    "verify": "Prove that a data folder is whole.",
    "repair": "Make a damaged data folder whole, and say what is lost.",
    "report": "Report about a data folder: traffic, storage, queues, losses and more.",
    "bench": "Measure this machine and print the numbers.",
    "completion": "Let bash, zsh or fish complete commands and topics.",
}
# package -> its verbs; the command is topics.cli.<package>.<verb>.<verb>, with _ for -, and behind a word that Python
# keeps for itself. The others are beside this file.
PACKAGES: dict[str, tuple[str, ...]] = {
    "server": ("serve", "config", "install-service", "reload", "ps", "shards", "top", "rings"),
    "client": ("publish", "tail", "queue", "export", "import"),
    "datadir": ("snapshot", "backup", "topic", "shard", "wal", "segment", "verify", "repair", "report"),
}
EPILOG = """\b
Exit codes:
{codes}

\b
Examples:
  topics serve
  topics publish jobs '{{"do": "resize"}}'
  topics tail jobs --from 0
  topics top
  topics verify --deep
""".format(codes="\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()))


def command_of(verb: str) -> click.Command:
    name = verb.replace("-", "_") + ("_" if keyword.iskeyword(verb) else "")
    path = "".join(f"{package}." for package, verbs in PACKAGES.items() if verb in verbs)
    command: click.Command = getattr(importlib.import_module(f"topics.cli.{path}{name}"), name)
    return with_examples(command)


class Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return command_of(cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name, help=line) for name, line in VERBS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.Abort as exc:
            if not isinstance(exc.__context__, KeyboardInterrupt):
                raise  # somebody said no, and that is no interruption
            sys.exit(EXIT_INTERRUPTED)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="topics", message="%(prog)s %(version)s")
def main() -> None:
    """A persistent event engine for one machine behind a JSON HTTP API."""


if __name__ == "__main__":
    main()
