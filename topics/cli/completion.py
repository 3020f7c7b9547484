"""`topics completion`: what a shell has to know to complete verbs, options and names of topics.

The shell runs `topics` at every press of TAB, so this has to be quick: no verb is imported but the one that is typed,
and names of topics come from the data folder, as far as they can be read within a second. Nothing that goes wrong here
may show: then there is nothing to choose from.

Exit codes: 0 done; 2 the command was not understood.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import click
from click.shell_completion import CompletionItem, get_completion_class

_PATIENCE_S = 1.0
_MOST = 500  # names; nobody reads more
_VARIABLE = "_TOPICS_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that lets SHELL complete commands, options and names of topics.

    Names of topics are those of the data folder that the command would look at, so TOPICS_DATA_DIR or TOPICS_CONFIG
    should be set in the shell.

    \b
      topics completion bash > ~/.local/share/bash-completion/completions/topics
      topics completion zsh > ~/.zfunc/_topics
      topics completion fish > ~/.config/fish/completions/topics.fish
      eval "$(topics completion bash)"                # in this shell only
    """
    from topics.cli.main import main

    found = get_completion_class(shell)
    assert found is not None  # click has all three
    click.echo(found(main, {}, "topics", _VARIABLE).source())


def topic_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For `shell_complete=` of an argument or option that takes the name of a topic."""
    from topics.cli.shared.place import folder_name
    from topics.datadir.view.folder import Folder
    from topics.errors import TopicsError

    taken = ctx.params.get(param.name or "")
    typed = set(taken) if isinstance(taken, tuple) else set()
    try:
        with _patience(_PATIENCE_S):
            topics = Folder(folder_name(ctx.params.get("data_dir"), ctx)).topics
    except (TopicsError, click.ClickException, OSError, TimeoutError):
        return []
    names = [topic.name for topic in topics if not topic.internal and topic.name.startswith(incomplete)]
    return [CompletionItem(name) for name in names if name not in typed][:_MOST]


@contextlib.contextmanager
def _patience(seconds: float) -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


topic_option = click.option(
    "--topic",
    metavar="NAME",
    shell_complete=topic_names,
    help="Of this topic alone; a name, or an id of 16 hex digits.",
)
