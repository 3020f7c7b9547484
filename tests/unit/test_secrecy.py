"""Secrets leave the environment block: what is handed over, what is started anew, and what comes back."""

from __future__ import annotations

import os
import sys

import pytest

from topics.actors.startup.secrecy import HANDOVER, SECRETS, conceal
from topics.errors import StartRefused

SECRET = "Zq9unit-0af1,other:read"


class StartedAnew(Exception):
    """In place of execve, which does not return either."""

    def __init__(self, program: str, arguments: list[str], environ: dict[str, str]) -> None:
        self.program, self.arguments, self.environ = program, arguments, environ


def execute(program: str, arguments: list[str], environ: dict[str, str]) -> object:
    raise StartedAnew(program, arguments, environ)


@pytest.mark.parametrize("more", [{}, {"TOPICS_API_KEY": "Zq9client-77"}])
@pytest.mark.parametrize("keys", [SECRET, "k" * 100_000, "\udcff\udcfe not UTF-8"])
def test_keys_come_through_and_the_environment_is_without_them(keys: str, more: dict[str, str]) -> None:
    first = {"TOPICS_API_KEYS": keys, "TOPICS_PORT": "0", "PATH": "/bin", **more}
    with pytest.raises(StartedAnew) as started:
        conceal(first, execute=execute)
    new = started.value
    assert new.program == new.arguments[0] == sys.executable
    assert new.arguments[1:] == sys.orig_argv[1:]
    assert new.environ.keys() == {"TOPICS_PORT", "PATH", HANDOVER}
    fd = int(new.environ[HANDOVER])
    assert os.get_inheritable(fd)
    second = dict(new.environ)
    assert conceal(second, execute=execute) == {"TOPICS_API_KEYS": keys, "TOPICS_PORT": "0", "PATH": "/bin"}
    assert second == {"TOPICS_PORT": "0", "PATH": "/bin"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_key_of_a_client_is_dropped() -> None:
    with pytest.raises(StartedAnew) as started:
        conceal({"TOPICS_API_KEY": "Zq9client-77", "PATH": "/bin"}, execute=execute)
    assert started.value.environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "environ", [{}, {"TOPICS_API_KEYS": " "}, {"TOPICS_API_KEYS_FILE": "/k", "TOPICS_API_KEY": ""}]
)
def test_without_secrets_nothing_is_started_anew(environ: dict[str, str]) -> None:
    """What is empty stays as it is: the settings judge it."""
    given = dict(environ)
    assert conceal(environ, execute=execute) == given
    assert not environ.keys() & set(SECRETS)


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "99999"])
def test_a_descriptor_that_is_not_ours_is_refused(value: str) -> None:
    with pytest.raises(StartRefused, match=HANDOVER):
        conceal({HANDOVER: value}, execute=execute)
