"""What the verbs that talk to a server have in common: its address, and what is said when it can't be reached.

Exit codes: 0 done; 1 it could not be done, and stderr says why; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import click
import trio

from topics.cli.shared.exits import EXIT_INTERRUPTED
from topics.cli.shared.terminal import say
from topics.client import DEFAULT_URL, ApiError, BadUrl, Unreachable
from topics.client.address import parse_url
from topics.errors import TopicsError


def _checked(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        parse_url(value)
    except BadUrl as error:
        raise click.BadParameter(str(error)) from None
    return value


url_option = click.option(
    "--url",
    envvar="TOPICS_URL",
    default=DEFAULT_URL,
    callback=_checked,
    metavar="URL",
    help=f"Address of the server (TOPICS_URL; default {DEFAULT_URL}).",
)


def notice(text: str) -> None:
    """A word to whoever watches, beside the output."""
    say(f"topics: {text}", err=True)


def run(main: Callable[[], Awaitable[int]]) -> int:
    """The exit code of an async main, with every failure of the trade in words."""
    code = 1
    try:
        code = trio.run(main)
    except* KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except* TopicsError as group:
        notice(words(_first(group)))
    return code


def words(failure: BaseException) -> str:
    if isinstance(failure, Unreachable):
        return f"{failure}. Is a server running there? Start one with `topics serve`, or name another with --url."
    if isinstance(failure, ApiError) and failure.code == "unauthorized":
        return f"{failure}. Put a key into TOPICS_API_KEY."
    if isinstance(failure, ApiError) and failure.code not in ("topic_not_found", "invalid_request"):
        return f"{failure} ({failure.code})"
    return str(failure)


def _first(group: BaseExceptionGroup[TopicsError]) -> BaseException:
    failure: BaseException = group
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
