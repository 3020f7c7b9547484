"""The examples of a verb stand in its docstring, as a paragraph that begins with \\b. In --help they come last, where
the eye ends up, under a heading of their own.
"""

from __future__ import annotations

import inspect

import click

_VERBATIM = "\b"


def with_examples(command: click.Command) -> click.Command:
    """The command, and those below it, with their examples at the end of --help."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            with_examples(each)
    if command.help and not command.epilog:
        words, lines = _parted(command.help)
        if lines:
            command.help = words
            command.epilog = "\n".join([_VERBATIM, "Examples:", *(f"  {line}" for line in lines)])
    return command


def examples_of(command: click.Command) -> list[str]:
    """Its command lines, without what is said about them."""
    _, _, text = (command.epilog or "").partition("Examples:\n")
    return [line.partition("  #")[0].strip() for line in text.splitlines()]


def _parted(text: str) -> tuple[str, list[str]]:
    words, lines = [], []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith(_VERBATIM):
            lines += [line.strip() for line in paragraph.splitlines()[1:]]
        else:
            words.append(paragraph)
    return "\n\n".join(words), lines
