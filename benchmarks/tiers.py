"""What readers of the cold tier cost those who write and those who follow: `python -m benchmarks.tiers`.

Two servers, one with a cold tier that holds all but the newest segment of an old topic, one with everything hot. On
each, appends come at a steady rate to another topic of the same shard, and a stream follows them, while nobody, or a
few readers, go through the old topic again and again. Before each pass the kernel is told to forget the old segments,
in both tiers, so that reads go to the disk. Rounds take turns, and are compared within the run.
"""

from __future__ import annotations

import argparse
import http.client
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from benchmarks import BenchFailed, child_environment
from benchmarks.figures import percentile
from benchmarks.sides.ours import Ours

RECORDS = 200_000
BATCH = 1_000
SEGMENT = 10_000
READERS = 2
RATE = 200  # appends per second
OLD, NEW = "old", "new"


class _Page(msgspec.Struct):
    next_from_seq: int
    caught_up: bool


class _Took(msgspec.Struct):
    """Of one slice, in milliseconds."""

    appends: list[float] = msgspec.field(default_factory=list)
    deliveries: list[float] = msgspec.field(default_factory=list)
    pages: int = 0  # that the readers got


class Tiered(Ours):
    def __init__(self, *, name: str, cold: bool, parent: Path | None) -> None:
        super().__init__(durability="disk", parent=parent)
        self.name = name
        self._environ |= {"TOPICS_WAL_SHARDS": "1", "TOPICS_CACHE_BYTES": "1000000"}
        if cold:
            self._environ |= {"TOPICS_COLD_DIR": str(self.folder / "cold"), "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
        self.cold = cold

    def fill(self) -> None:
        for first in range(0, RECORDS, BATCH):
            records = [{"data": f"{first + at:0100d}"} for at in range(BATCH)]
            self._must("POST", f"/v0/topics/{OLD}", {"records": records})
        self._must("PUT", f"/v0/topics/{NEW}", {})
        deadline = time.monotonic() + 120
        where = self.folder / ("cold" if self.cold else "data")
        wanted = (RECORDS // SEGMENT - 1) * SEGMENT if self.cold else 1
        while sum(path.stat().st_size for path in where.rglob("*.data")) < wanted * 100:
            if time.monotonic() > deadline:
                raise BenchFailed(f"segments of {self.name} did not get where they belong within two minutes")
            time.sleep(0.2)

    def slice(self, *, readers: int, seconds: float) -> _Took:
        """Appends and a follower in this process; readers in others, whose work is not on our clock."""
        over = threading.Event()
        took = _Took()
        sent: dict[int, float] = {}
        head = self.held(NEW)

        def follow() -> None:
            at = head
            while not over.is_set():
                body = {"from_seq": at, "limit": 100, "wait_ms": 1_000}
                answer = msgspec.json.decode(self._must("POST", f"/v0/topics/{NEW}/diff", body))
                now = time.perf_counter()
                for record in answer["records"]:
                    took.deliveries.append((now - sent.get(record["$seq"], now)) * 1_000)
                at = answer["next_from_seq"]

        command = [sys.executable, "-m", "benchmarks.tiers", "--read", str(self.port), str(self.folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": child_environment()}
        processes = [subprocess.Popen(command, **pipes) for _ in range(readers)]  # type: ignore[call-overload]
        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        time.sleep(1.0 if readers else 0.2)
        started = time.perf_counter()
        number = 0
        while (due := started + number / RATE) < started + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            number += 1
            before = sent[head + number] = time.perf_counter()
            self._must("POST", f"/v0/topics/{NEW}", {"records": [{"data": number}]})
            took.appends.append((time.perf_counter() - before) * 1_000)
        over.set()
        follower.join()
        for process in processes:
            took.pages += int(process.communicate()[0])  # closes its input: that is its end
        return took


def _forget(folder: str) -> None:
    """Out of the page cache with all segments."""
    for path in Path(folder).rglob("*.data"):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_through(port: int, folder: str) -> int:
    """The old topic from its beginning to its end, again and again, until our input ends; how many pages."""
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    at = pages = 0
    while not ended.is_set():
        if at == 0:
            _forget(folder)
        body = msgspec.json.encode({"from_seq": at, "limit": 1_000})
        connection.request("POST", f"/v0/topics/{OLD}/diff", body, {"Content-Type": "application/json"})
        page = msgspec.json.decode(connection.getresponse().read(), type=_Page)
        at = 0 if page.caught_up else page.next_from_seq
        pages += 1
    return pages


def _figures(slices: list[_Took]) -> str:
    appends = [took for each in slices for took in each.appends]
    deliveries = [took for each in slices for took in each.deliveries]
    words = []
    for what in (appends, deliveries):
        words.append(f"{statistics.median(what):.2f} | {percentile(what, 0.99):.2f} | {max(what):.1f}")
    return " | ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Appends and deliveries beside readers of old records, hot and cold.")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each slice (5)")
    parser.add_argument("--rounds", type=int, default=4, help="slices of each kind (4)")
    parser.add_argument("--dir", type=Path, help="where the temporary folders are made")
    parser.add_argument("--read", nargs=2, metavar=("PORT", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read is not None:
        print(read_through(int(given.read[0]), given.read[1]))
        return
    folder, rounds, seconds = given.dir, given.rounds, given.seconds
    sides = [Tiered(name="hot", cold=False, parent=folder), Tiered(name="cold", cold=True, parent=folder)]
    found: dict[tuple[str, int], list[_Took]] = {}
    try:
        for side in sides:
            side.start()
            side.fill()
        for _ in range(rounds):
            for side in sides:
                for readers in (0, READERS):
                    found.setdefault((side.name, readers), []).append(side.slice(readers=readers, seconds=seconds))
    finally:
        for side in sides:
            side.close()
    print("| old records | readers | append ms: p50 | p99 | longest | delivery ms: p50 | p99 | longest | pages/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, readers), slices in found.items():
        pages = sum(each.pages for each in slices) / (seconds + 1) / rounds
        print(f"| {name} | {readers} | {_figures(slices)} | {pages:.0f} |")


if __name__ == "__main__":
    main()
