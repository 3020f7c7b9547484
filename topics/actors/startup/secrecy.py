"""Secrets that came with the environment: out of the block that /proc/<pid>/environ shows, for as long as we run.

The kernel shows the block with which a program was started, whatever the program does to its variables later, and a
process without privileges can't name another block. So the supervisor starts itself anew, by execve: the same pid and
arguments, the same open sockets of a service manager, an environment without secrets; what it needs of them waits in
shared memory without a name, whose descriptor a variable tells. This happens once, before anything else is done, and
only if there is a secret in the environment. A key file needs none of this.

Crash between the two: the memory goes with the descriptor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping

from topics.errors import StartRefused, TopicsError
from topics.shm.region import Region

KEYS = "TOPICS_API_KEYS"
# The second is a client's; a server has no use for it.
SECRETS = (KEYS, "TOPICS_API_KEY")
HANDOVER = "TOPICS_HANDOVER_FD"  # of us, for us

Execute = Callable[[str, list[str], dict[str, str]], object]


def conceal(environ: MutableMapping[str, str], *, execute: Execute = os.execve) -> dict[str, str]:
    """The variables with the keys in them; `environ` and our environment block are without, or we are started anew."""
    handed = environ.pop(HANDOVER, None)
    if any(environ.get(name, "").strip() for name in SECRETS):
        _start_anew(environ, execute)
    variables = dict(environ)
    for name in SECRETS:
        environ.pop(name, None)
    if handed is not None:
        variables[KEYS] = _take(handed)
    return variables


def _start_anew(environ: MutableMapping[str, str], execute: Execute) -> None:
    if not sys.executable:
        return  # a program that embeds Python: it has to see to its environment itself
    variables = {name: value for name, value in environ.items() if name not in SECRETS}
    keys = os.fsencode(environ.get(KEYS, ""))
    if keys.strip():
        try:
            region = Region.create(len(keys))
        except TopicsError as exc:
            raise StartRefused(str(exc)) from None
        region.view[:] = keys
        os.set_inheritable(region.fd, True)
        variables[HANDOVER] = str(region.fd)
    sys.stdout.flush()
    sys.stderr.flush()
    execute(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def _take(text: str) -> str:
    """Read what was handed over, and wipe it."""
    try:
        fd = int(text)
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/topics-"):
            raise ValueError
        region = Region.attach(fd, os.fstat(fd).st_size)
    except (ValueError, OSError):
        raise StartRefused(f"{HANDOVER} is set by the server for itself: unset it") from None
    keys = os.fsdecode(bytes(region.view))
    region.view[:] = bytes(region.size)
    region.close()
    return keys
