"""docs/OPERATIONS.md for real: every ```sh block is run, in order, on one machine: a folder that stands for its root, a
server that `systemctl` of this test starts and stops. And the names in alerts and dashboard are those of a server.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from alertrules import used_names
from prometheus_client.parser import text_string_to_metric_families
from test_docs import needs_curl, read

from topics.storage.format import FrameType
from topics.storage.frames import decode_wal_header, scan

from .client import unique
from .queues import make_queue
from .server import TOPICS, Server, clean_environment, eventually, gone
from .test_proxy import _free_port

pytestmark = [pytest.mark.e2e, pytest.mark.full]
DOCUMENT = read("docs/OPERATIONS.md")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
# What is not run: it needs root, systemd, Spark, node_exporter, a network, or something broken. By its first line.
NOT_RUN = {
    "python3 -m venv /opt/topics",
    "systemctl enable --now topics-report.timer",
    "promtool check rules /etc/prometheus/alerts.yml",
    "/opt/topics/bin/pip install --upgrade topicsd",
    "topics queue peek transcode.dlq",
    "systemctl status topics-report",
    "systemctl list-timers topics-report.timer",
    "grep -A3 breaches /var/lib/topics-report/summary.json",
    "chown -R topics:topics /var/lib/topics",
    "chown topics:topics /mnt/cold/topics",
    "kill -9 PID",
    "umask 077",
    "sed -i '/ name=worker-2026\\( \\|$\\)/d' /etc/topics/api-keys",
    "systemctl stop topics",
}

STOP = "systemctl stop topics\n"  # before the folder is damaged
REPAIR = "topics repair\n"  # of a folder that is damaged by then, so it ends with 1
CHANGES = re.compile(
    r"systemctl (?!status)|mv |mkdir |sed |echo |/delete|PUT|topics (publish|export|import|backup|repair|reload)"
)

SYSTEMCTL = """#!/bin/bash
# The part of systemd that the document needs: a service called topics.
set -e
here={here}
start() {{
    setsid topics serve </dev/null >>"$here/journal" 2>&1 & echo $! >"$here/pid"
    for _ in $(seq 600); do
        curl -sf localhost:4000/v0/ready >/dev/null && return
        kill -0 "$(cat "$here/pid")" || break
        sleep 0.05
    done
    tail "$here/journal"; exit 1
}}
stop() {{
    kill -TERM "$(cat "$here/pid")"
    for _ in $(seq 600); do kill -0 "$(cat "$here/pid")" 2>/dev/null || return 0; sleep 0.05; done
    exit 1
}}
[ "$2" = topics ]
case "$1" in
    start) start ;;
    stop) stop ;;
    restart) stop; start ;;
    status) kill -0 "$(cat "$here/pid")" && echo "topics: active" ;;
    *) exit 1 ;;
esac
"""
JOURNALCTL = """#!/bin/bash
[ "$1 $2" = "-u topics" ] && cat {here}/journal
"""


class Machine:
    """Its root is a folder; what the document calls /etc/topics, /var/lib, /mnt and /backup is in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = _free_port()
        for folder in ("etc/topics", "var/lib", "bin", "backup"):
            (root / folder).mkdir(parents=True)
        self.config = root / "etc/topics/topics.toml"
        self.config.write_text(
            f'data_dir = "{root}/var/lib/topics"\nport = {self.port}\nwal_shards = 2\nwal_file_bytes = 8388608\n'
        )
        for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
            (root / "bin" / name).write_text(self.placed(text.format(here=root)))
            (root / "bin" / name).chmod(0o755)

    def placed(self, text: str) -> str:
        """As the document says it -> as it is here."""
        text = re.sub(r"(?<![\w./-])/(etc/topics|var/lib/topics|backup/topics|mnt/cold)", rf"{self.root}/\1", text)
        text = re.sub(r"--interval \d+", "--interval 0.3", text)  # nobody looks at what they say
        return text.replace("localhost:4000", f"127.0.0.1:{self.port}")

    def run(self, script: str, *, code: int = 0) -> None:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", self.placed(script)],
            capture_output=True,
            text=True,
            cwd=self.root,
            env=clean_environment(
                TOPICS_CONFIG=self.config,
                TOPICS_URL=f"http://127.0.0.1:{self.port}",
                XDG_STATE_HOME=self.root / "state",
                PATH=f"{self.root / 'bin'}:{TOPICS.parent}:{clean_environment()['PATH']}",
            ),
            timeout=120,
        )
        assert done.returncode == code, f"{script}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr

    def close(self) -> None:
        pid = int((self.root / "pid").read_text())
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: gone(pid), what="the end of the server")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    made.run("systemctl start topics")
    try:
        yield made
    finally:
        made.close()


def damage(folder: Path) -> None:
    """One byte of a batch that is not the last in its log: nobody could take it for a write that was cut short."""
    for path in sorted(folder.glob("wal/*/*.wal")):
        data = bytearray(path.read_bytes())
        frames = list(scan(bytes(data), salt=decode_wal_header(bytes(data), path=path.name).salt))
        batches = [frame for frame in frames[:-1] if frame.type == FrameType.APPEND]
        if batches:
            data[batches[0].offset + batches[0].length - 1] ^= 0xFF
            path.write_bytes(data)
            return
    raise AssertionError(f"no log in {folder} to damage")


@needs_curl
@pytest.mark.timeout(400)
def test_every_command_of_the_document(machine: Machine) -> None:
    blocks = _BLOCK.findall(DOCUMENT)
    assert {text.partition("\n")[0] for kind, text in blocks if kind == "console"} == NOT_RUN
    assert {kind for kind, _ in blocks} == {"sh", "console", "text"}
    scripts = [text for kind, text in blocks if kind == "sh"]
    assert len(scripts) > 40
    seen: set[str] = set()
    for script in scripts:
        if script == STOP:
            machine.run("for n in 1 2 3; do topics publish operations.check $n; done")
        if script == REPAIR:
            damage(machine.root / "var/lib/topics")
        lines = script.splitlines(keepends=True)
        changes = [CHANGES.search(line) is not None for line in lines]
        # A look that several sections share is taken once, unless something has just been changed.
        todo = [line for at, line in enumerate(lines) if any(changes[: at + 1]) or line not in seen]
        machine.run("".join(todo), code=1 if script == REPAIR else 0)
        seen.update(lines)
    assert "wal_shards = 3" in machine.config.read_text()


@pytest.mark.gate
def test_the_names_of_the_metrics(server: Server) -> None:
    """Of alerts and dashboard, against what a server says that has a topic, a queue and a router."""
    source, dest = unique(), unique()
    with server.client() as api:
        api.append(source, 1)
        make_queue(api).produce("job")
        assert api.send("PUT", f"/v0/routers/{unique()}", {"source": source, "dest": dest}).status == 201
        assert api.send("POST", f"/v0/topics/{source}/diff", {}).status == 200
    done = subprocess.run(["curl", "-s", f"{server.url}/v0/metrics"], capture_output=True, text=True, check=True)
    said: set[str] = set()
    for family in text_string_to_metric_families(done.stdout):
        said |= {sample.name for sample in family.samples} | {family.name}
    used = {name for name in used_names() if not name.startswith("topics_report_")}
    assert len(used) > 20
    assert used <= said, used - said
