"""The process that children are forked from.

`python -m topics.actors.forkserver <fd> <supervisor's pid> <1 if dumpable, else 0> <module>...`

It has imported trio and the roles. A fresh interpreter spends 0.2 to 0.4 s of processor time on that; a fork needs
milliseconds, so a process that died is back sooner, and children share the memory of what they have imported.

    supervisor ──► fork server   a packet with one descriptor: the child's end of its control channel
    fork server ──► supervisor   WARM once, then for each packet the pid of a new child, or why there is none

Rules: one thread, no event loop, no data and no secrets, so a fork copies imported code and nothing else. A child is
forked twice: its parent ends at once, and the kernel gives the child to the supervisor, which is a subreaper. So the
supervisor is every child's parent: it reaps the child, and its death ends the child. A role that can't be imported here
is left to the child, which says why. Who could change this process would change every child that comes from it: it is
not dumpable, so others of the same user can't. A child is, until it has read its settings: the supervisor looks at it
while it is just born (supervisor/vitals.py).

Crash: children go on; the supervisor starts another fork server when it next needs a child. The supervisor's death ends
this process (the kernel kills it, and end-of-file ends it too).
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys

from topics.actors import child
from topics.actors.context import EXIT_ORPHANED

WARM = b"warm"
FORK = b"fork"
REPLY_BYTES = 512


def main() -> None:
    child.leave_signals_to_supervisor()
    child.die_with_parent()
    if os.getppid() != int(sys.argv[2]):
        os._exit(EXIT_ORPHANED)
    child.name_process("forkserver")
    if sys.argv[3] == "0":
        child.show_memory(False)
    orders = socket.socket(fileno=int(sys.argv[1]))
    orders.set_inheritable(False)
    for module in sys.argv[4:]:
        try:
            importlib.import_module(module)
        except Exception:
            continue  # the child imports it again, and its error has the name of the child
    gc.collect()
    gc.freeze()  # a collection in a child does not touch, and so does not copy, what is shared
    orders.send(WARM)
    child.main(_serve(orders))


def _serve(orders: socket.socket) -> int:
    """Returns in a child, with the descriptor of its control channel."""
    while True:
        try:
            packet, rights, _, _ = orders.recvmsg(len(FORK), socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            os._exit(0)
        if not packet:
            os._exit(0)
        control = int.from_bytes(rights[0][2][:4], sys.byteorder)
        try:
            pid = _fork_twice()
        except OSError as exc:
            reply = str(exc).encode()[:REPLY_BYTES]
        else:
            if pid == 0:
                orders.close()
                return control
            reply = b"%d" % pid
        os.close(control)
        try:
            orders.send(reply)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


def _fork_twice() -> int:
    """0 in the child; its pid here, when the supervisor has become its parent."""
    said, say = socket.socketpair()
    middle = os.fork()
    if middle == 0:
        pid = 0
        try:
            child.show_memory(True)  # before it is known to the supervisor
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid == 0:
            said.close()
            say.close()
            return 0
        say.send(b"%d" % pid)
        os._exit(0)
    say.close()
    pid_text = said.recv(32)
    said.close()
    os.waitpid(middle, 0)
    if not pid_text:
        raise OSError("no process could be forked: the system's limit of processes or memory is reached")
    return int(pid_text)


if __name__ == "__main__":
    main()
