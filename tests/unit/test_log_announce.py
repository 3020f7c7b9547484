"""The ready line: one write, also where Python does not buffer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def test_one_write_without_buffering() -> None:
    """A write to this socket is one packet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        program = "from topics.actors.log import announce; announce('topics is ready')"
        subprocess.run([sys.executable, "-u", "-c", program], stdout=theirs.fileno(), check=True)
        theirs.close()
        packets = list(iter(lambda: ours.recv(4_096), b""))
    assert packets == [b"topics is ready\n"]


def test_nobody_reads_it() -> None:
    """Neither an error nor a message of the interpreter about what it could not flush at its end."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "import os; from topics.actors.log import announce; announce('topics is ready'); os.write(2, b'alive')"
    try:
        done = subprocess.run([sys.executable, "-u", "-c", program], stdout=writing, stderr=subprocess.PIPE, check=True)
    finally:
        os.close(writing)
    assert done.stderr == b"alive"
