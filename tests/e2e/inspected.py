"""A data folder with something of everything in it, made by a real server and stopped in order or killed; for the
commands that look at folders. Made once; who wants to damage it takes a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

from topics.datadir.view.folder import Folder
from topics.datadir.view.topic import Topic

from .server import Server, eventually

SMALL_SEGMENTS = {
    "TOPICS_SEGMENT_MAX_EVENTS": 40,
    "TOPICS_SEGMENT_MAX_AGE_MS": 200,
    "TOPICS_WAL_FILE_BYTES": 1 << 20,
}
_made: dict[str, Path] = {}


def topic_in(folder: Folder, name: str) -> Topic:
    return next(topic for topic in folder.topics if topic.name == name)


def fill(server: Server) -> None:
    with server.client() as api:
        api.put("jobs", type="queue", durability="fsync")
        api.put("capped", cap_records=25)
        for first in range(0, 200, 10):
            records = [{"data": {"n": n, "pad": "x" * 12_000}, "tag": f"t{n % 7}"} for n in range(first, first + 10)]
            api.append_records("orders", records)
            api.append("capped", *range(first, first + 10))
        api.append("jobs", *range(5))
        assert api.send("POST", "/v0/topics/jobs/claim", {"node": "w1"}).status == 200
        eventually(
            lambda: sum(known.sealed for known in topic_in(Folder(str(server.data_dir)), "orders").segments) >= 2,
            what="sealed segments in a snapshot",
        )
        assert api.delete("orders", match=["tag", "Eq", "t3"])["deleted"]
        api.append("late", "one", "two")


def golden(base: Path, *, kind: str = "stopped") -> Path:
    """A folder that nobody serves: "stopped" in order, or "killed"."""
    if kind not in _made:
        home = base / f"golden-{kind}"
        home.mkdir()
        server = Server(home / "data", log=home / "server.log", **SMALL_SEGMENTS)
        try:
            server.wait_ready()
            fill(server)
            server.stop() if kind == "stopped" else server.kill()
        finally:
            server.close()
        _made[kind] = home / "data"
    return _made[kind]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
