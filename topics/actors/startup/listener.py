"""The listening socket: bound once by the supervisor, which holds it so that no connection is lost with a
gateway. Or given to us by a service manager, which holds it so that none is lost with us either.

While no gateway lives, connections wait in the backlog.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping

from topics.errors import StartRefused

BACKLOG = 4096
GIVEN_FD = 3  # where sd_listen_fds(3) says that sockets begin


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening, non-blocking socket. Port 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise StartRefused(
            f"can't listen on {host!r}: {exc.strerror}. Set TOPICS_HOST to an address of this machine"
        ) from None
    # A name like localhost may have both; a client that tries only one of them tries IPv4.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            advice = "Stop whatever listens there, or choose another port with TOPICS_PORT (0 takes a free one)"
        elif exc.errno == errno.EACCES:
            advice = "Ports below 1024 need a privilege: choose another with TOPICS_PORT"
        else:
            advice = "Set TOPICS_HOST to an address of this machine"
        raise StartRefused(f"can't listen on {host} port {port}: {os.strerror(exc.errno or 0)}. {advice}") from None
    return sock


def given_listener(environ: Mapping[str, str], pid: int) -> socket.socket | None:
    """The listening socket that whoever started us has passed on (LISTEN_FDS, LISTEN_PID), ready for use.

    Variables that are meant for another process are none of our business: they are inherited by accident.
    """
    count = environ.get("LISTEN_FDS")
    if not count or environ.get("LISTEN_PID") != str(pid) or count == "0":
        return None
    if count != "1":
        raise StartRefused(f"LISTEN_FDS={count}: expected one socket; leave one ListenStream= in the socket unit")
    advice = "expected a listening TCP socket, as ListenStream=127.0.0.1:4000 in a socket unit with Accept=no makes it"
    try:
        sock = socket.socket(fileno=GIVEN_FD)
    except OSError as exc:
        raise StartRefused(
            f"LISTEN_FDS={count}: file descriptor {GIVEN_FD} is no socket ({exc.strerror}): {advice}"
        ) from None
    internet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not internet or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        what = f"{sock.family.name}, {sock.type.name}{'' if not internet else ', not listening'}"
        sock.close()
        raise StartRefused(f"LISTEN_FDS={count}: file descriptor {GIVEN_FD} is something else ({what}): {advice}")
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def write_port_file(path: str, port: int) -> None:
    """For whoever started us with port 0; appears whole or not at all."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w") as file:
            file.write(f"{port}\n")
        os.replace(temporary, path)
    except OSError as exc:
        raise StartRefused(f"can't write TOPICS_PORT_FILE={path}: {exc.strerror}") from None
