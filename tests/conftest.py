"""What every family of tests may use: whole servers, started on demand, of which none outlives its test; and what
belongs to `make test`.

`full` is what `make test-full` alone runs: tests and files that are marked so, of the slow families all that is not
marked `gate`, and of a test for both lanes the one over HTTP/2. The lanes share their handlers, and e2e/test_lanes.py
asks every route over HTTP/2.

This folder is on the path because of this file, so the harness is `e2e.server` and `e2e.client` from anywhere.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import effort
import figures
import pytest
from accounting import Accounting
from e2e.server import Server
from hypothesis import settings
from scheduling import FamilyScheduling, family_of, rank_of
from tracing import is_traced
from xdist.remote import Producer

# Families whose tests start and kill whole servers, a Spark or a browser: `make test` runs what proves each feature.
SLOW = ("browser", "fuzz", "recovery", "spark")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever started us may ignore signals (nohup, the background of a shell), and what is ignored is inherited: no
    server under test could be interrupted then."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if effort.EXHAUSTIVE and config.getoption("timeout", None) is None:
        config.option.timeout = 3_600  # twenty times the examples; what carries a limit of its own keeps it
    _load_profile(config)
    figures.attend(config)
    if not hasattr(config, "workerinput"):  # the process that prints the result
        config.pluginmanager.register(Accounting())


def _load_profile(config: pytest.Config) -> None:
    """The settings of property tests, before any of them is imported. Hypothesis draws by the test's name if it
    derandomizes, and ignores its seed then. How long an example takes on a machine that is busy says nothing."""
    anew = effort.draws_anew(config.getoption("--hypothesis-seed", None))
    settings.register_profile("topics", settings(), deadline=None, database=None, derandomize=not anew)
    settings.load_profile("topics")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FamilyScheduling:
    return FamilyScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {item.nodeid for item in items}
    for item in items:
        if effort.GATE and not is_traced(item.nodeid):
            item.add_marker(pytest.mark.no_cover)
        twice = "http2" in item.nodeid and item.nodeid.replace("http2", "http1") in names
        slow = family_of(item.nodeid) in SLOW and item.get_closest_marker("gate") is None
        if twice or slow:
            item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server: `start_server(data_dir=..., TOPICS_WAL_SHARDS=2)`. The same folder again is a restart."""
    servers: list[Server] = []

    def start(*, data_dir: Path | None = None, ready: bool = True, **environ: object) -> Server:
        server = Server(data_dir or tmp_path / "data", log=tmp_path / f"server-{len(servers)}.log", **environ)
        servers.append(server)
        if ready:
            server.wait_ready()
        return server

    yield start
    for server in servers:
        server.close()
