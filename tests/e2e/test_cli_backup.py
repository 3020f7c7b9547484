"""`topics backup` on the folder of a running server under load: everything that was acknowledged, of one moment, and a
server on what was restored tells its clients the same. And the command itself: what it lists, finds, refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import livefiles
import pytest
from onlooker import live_records, named

from topics.datadir.fsck.verify import verify
from topics.datadir.view.folder import Folder

from .client import Client
from .commands import read_all
from .inspected import SMALL_SEGMENTS, copied, golden
from .routing import name_on, read, route
from .server import TOPICS, Server, clean_environment, eventually, run_topics

pytestmark = [pytest.mark.e2e, pytest.mark.full]

BACKUPS = 3
WRITERS = 3


def topics_backup(*args: object, code: int = 0, **environ: Any) -> Any:
    done = run_topics("backup", *map(str, args), "--json", **environ)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def refused(*args: object, code: int = 1, **environ: Any) -> str:
    """The one line that says why."""
    done = run_topics("backup", *map(str, args), **environ)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    return line


# --- under load ----------------------------------------------------------------------------------------


class Load:
    """Writers, a queue whose jobs all go to the dead letters of another shard, a router to another shard; and what has
    been acknowledged to them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.acknowledged = [0] * WRITERS
        self.jobs = 0
        self.queue, self.letters = name_on(0, "jobs"), name_on(1, "letters")
        self.source, self.mirror = name_on(1, "source"), name_on(0, "mirror")
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(at,)) for at in range(WRITERS)]
        self._threads += [threading.Thread(target=self._produce), threading.Thread(target=self._fail)]
        self._faults: list[BaseException] = []

    def __enter__(self) -> Load:
        with self.server.client() as api:
            api.put("t1", durability="fsync")
            api.put(self.queue, type="queue", max_deliveries=1, dead_letter=self.letters)
            api.append(self.source, "first")
            route(api, self.source, self.mirror)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
        assert not self._faults

    def _write(self, at: int) -> None:
        with self.server.client() as api:
            while not self._done.is_set():
                first = self.acknowledged[at]
                records = [{"data": {"n": n, "pad": "x" * 1_500}, "tag": f"g{n // 7}"} for n in range(first, first + 7)]
                assert api.append_records(f"t{at}", records).status < 300
                self.acknowledged[at] = first + 7
                if at == 0:
                    api.append(self.source, first)
                if at == 2 and first % 35 == 0:
                    api.delete("t2", match=f"g{first // 7}")

    def _produce(self) -> None:
        with self.server.client() as api:
            while not self._done.is_set():
                assert api.append(self.queue, *range(self.jobs, self.jobs + 5)).status < 300
                self.jobs += 5
                time.sleep(0.002)  # the one who fails has to keep up

    def _fail(self) -> None:
        """Whoever is claimed and given back twice is moved."""
        path = f"/v0/topics/{self.queue}"
        with self.server.client() as api:
            while not self._done.is_set():
                jobs = api.send("POST", f"{path}/claim", {"node": "w", "max": 50})["claimed"]
                seqs, leases = [job["$seq"] for job in jobs], [job["lease_id"] for job in jobs]
                if seqs:
                    api.send("POST", f"{path}/nack", {"node": "w", "seqs": seqs, "lease_ids": leases})


class Scene:
    """A server with two tiers that was under load while it was backed up, and is quiet now."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.repository = base / "repository"
        self.cold = base / "cold"
        tiers = {"TOPICS_COLD_DIR": self.cold, "TOPICS_HOT_RETAIN_SEGMENTS": 2}
        self.server = Server(base / "data", log=base / "server.log", **SMALL_SEGMENTS, **tiers)
        self.before: list[tuple[list[int], int]] = []  # what had been acknowledged when each backup was begun
        self.summaries: list[Any] = []

    def run(self) -> Scene:
        self.server.wait_ready()
        with Load(self.server) as self.load:
            for number in range(BACKUPS):
                written = sum(self.load.acknowledged) + 600
                eventually(lambda: sum(self.load.acknowledged) > written, what="more records")  # noqa: B023
                self.before.append((list(self.load.acknowledged), self.load.jobs))
                self.summaries.append(self.back_up(f"busy-{number}"))
        self.lease = self._settle()
        self.summaries.append(self.back_up("quiet"))
        return self

    def _settle(self) -> dict[str, Any]:
        """No more moves and copies; one job is leased, some are not."""
        with self.server.client() as api:
            api.put("leased", type="queue", lease_ms=600_000, leases_durable=True)
            api.append("leased", "a", "b", "c")
            job: dict[str, Any] = api.send("POST", "/v0/topics/leased/claim", {"node": "w"})["claimed"][0]
            api.put("capped", cap_records=5)
            api.append("capped", *range(20))
            api.append("keyed", 1, idempotency_key="again")
            eventually(lambda: self._mirrored(api), what="all copies on the disk")
        return job

    def _mirrored(self, api: Client) -> bool:
        mirror = named(Folder(str(self.server.data_dir)), self.load.mirror)
        return mirror.pipe is not None and mirror.pipe.at == api.state(self.load.source)["head_seq"]

    def back_up(self, name: str) -> Any:
        return topics_backup("create", "--to", self.repository, "--name", name, "--data-dir", self.server.data_dir)

    def restored(self, name: str, *more: object) -> Path:
        target = self.base / "-".join(map(str, (name, *more)))
        topics_backup("restore", name, "--from", self.repository, "--data-dir", target, *more)
        return target


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("backup"))
    try:
        yield made.run()
    finally:
        made.server.close()


def numbers(folder: Folder, name: str) -> list[int]:
    found = [json.loads(seen.data) for seen in live_records(folder, named(folder, name))]
    return [value["n"] if isinstance(value, dict) else value for value in found]


@pytest.mark.gate
@pytest.mark.parametrize("number", range(BACKUPS))
def test_everything_that_was_acknowledged_and_of_one_moment(scene: Scene, number: int) -> None:
    target = scene.restored(f"busy-{number}")
    folder = Folder(str(target))
    acknowledged, jobs = scene.before[number]
    for at in range(WRITERS):
        found = numbers(folder, f"t{at}")
        assert len(found) == len(set(found))
        if at == 2:
            gone = {n for first in range(0, found[-1] + 1, 35) for n in range(first, first + 7)}
            missing = set(range(found[-1] + 1)) - set(found)
            assert missing <= gone
            continue
        assert found == list(range(len(found)))
        assert len(found) >= acknowledged[at]
    # A job is in its queue until it is in the dead letters, in every backup.
    letters = numbers(folder, scene.load.letters)
    kept = [*numbers(folder, scene.load.queue), *letters]
    assert letters
    assert set(range(jobs)) <= set(kept)
    # And no copy is ahead of its original.
    mirror, source = named(folder, scene.load.mirror), named(folder, scene.load.source)
    assert mirror.pipe is not None
    assert mirror.pipe.at <= source.head_seq
    verdict = verify(str(target), deep=True, running=False)
    assert verdict.clean, verdict.problems


def test_later_ones_copy_what_is_new(scene: Scene) -> None:
    assert len(livefiles.find(scene.server.data_dir, "topics/*/*.idx")) > 10
    first = scene.summaries[0]
    assert first["copied_bytes"] == first["total_bytes"]
    for summary in scene.summaries[1:]:
        assert 0 < summary["copied_bytes"] < summary["total_bytes"]

    made: list[str] = []

    def little() -> bool:
        """Once the server has moved its log into segments nothing is new."""
        made.append(f"again-{len(made)}")
        again = scene.back_up(made[-1])
        return bool(again["copied_bytes"] < again["total_bytes"] // 20)

    eventually(little, every_s=0.2, what="a backup that copies next to nothing")
    topics_backup("rm", *made, "--from", scene.repository)


def told(api: Client) -> dict[str, Any]:
    """Everything that a client can ask for."""
    found: dict[str, Any] = {}
    for row in api.list(limit=1_000)["topics"]:
        name = row["topic"]
        state = api.state(name).without_performance()
        found[name] = ({key: value for key, value in state.items() if key != "last_read_ts"}, read(api, name))
    found["routers"] = [
        {key: value for key, value in router.items() if key != "lag"} for router in api.get("/v0/routers")["routers"]
    ]
    return found


@pytest.mark.parametrize("shards", [2, 3])
def test_a_server_on_it_tells_the_same(scene: Scene, tmp_path: Path, shards: int) -> None:
    with scene.server.client() as api:
        expected = told(api)
    assert livefiles.find(scene.cold, "topics/*/*.data")
    target = scene.restored("quiet", *(() if shards == 2 else ("--shards", shards)))
    server = Server(target, log=tmp_path / "log", **{**SMALL_SEGMENTS, "TOPICS_WAL_SHARDS": shards})
    try:
        server.wait_ready()
        assert "layout" not in server.output()  # nothing had to be moved
        with server.client() as api:
            found = told(api)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == value, name
            # Leases, keys and routers go on where they were.
            lease = {"node": "w", "seqs": [scene.lease["$seq"]], "lease_ids": [scene.lease["lease_id"]]}
            assert api.send("POST", "/v0/topics/leased/ack", lease)["acked"] == 1
            assert api.append("keyed", 1, idempotency_key="again")["seqs"] == [1]
            assert api.state("keyed")["head_seq"] == 1
            head = api.state(scene.load.mirror)["head_seq"]
            api.append(scene.load.source, "once more")
            eventually(lambda: api.state(scene.load.mirror)["head_seq"] == head + 1, what="a copy")
            assert api.append("t0", "next")["seqs"] == [expected["t0"][0]["head_seq"] + 1]
    finally:
        server.close()


def test_the_repository_is_whole(scene: Scene) -> None:
    names = [each["name"] for each in topics_backup("ls", "--from", scene.repository)]
    assert names == ["busy-0", "busy-1", "busy-2", "quiet"]
    proved = topics_backup("verify", "--from", scene.repository, "--deep")
    assert proved["clean"]
    assert proved["verdict"]["backups"] == sorted(names)
    assert not proved["verdict"]["notes"]


def test_a_folder_that_is_served_is_not_restored_into(scene: Scene) -> None:
    line = refused("restore", "quiet", "--from", scene.repository, "--data-dir", scene.server.data_dir)
    assert f"in use by the server with pid {scene.server.pid} on {scene.server.url}" in line


# --- the command ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server that was killed."""
    return golden(tmp_path_factory.getbasetemp(), kind="killed")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    place = tmp_path_factory.mktemp("shared") / "repository"
    topics_backup("create", "--to", place, "--name", "one", TOPICS_DATA_DIR=source)
    return place


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_create_reads_and_never_writes(source: Path, tmp_path: Path) -> None:
    before = files_of(source)
    topics_backup("create", "--to", tmp_path / "r", "--data-dir", source)
    assert files_of(source) == before


def test_what_people_see(source: Path, repository: Path, tmp_path: Path) -> None:
    made = run_topics("backup", "create", "--to", str(tmp_path / "r"), "--name", "a", TOPICS_DATA_DIR=source)
    assert made.stdout.startswith("a: 2")
    assert "topics in" in made.stdout
    assert "0 B shared" in made.stdout
    listed = run_topics("backup", "ls", "--from", str(repository), COLUMNS=100).stdout
    assert "one" in listed
    assert "complete" in listed
    proved = run_topics("backup", "verify", "--from", str(repository))
    assert proved.stdout.startswith(f"{repository}: whole (1 backups, ")
    target = tmp_path / "back"
    back = run_topics("backup", "restore", "one", "--from", str(repository), "--data-dir", str(target))
    assert f"topics serve --data-dir {target} --shards 2" in back.stdout
    assert run_topics("verify", "--deep", "--data-dir", str(target)).returncode == 0
    gone = run_topics("backup", "rm", "a", "--from", str(tmp_path / "r"))
    assert gone.stdout.startswith("removed a: ")
    assert "no backups" in run_topics("backup", "ls", "--from", str(tmp_path / "r")).stdout


def test_a_terminal_gets_a_bar_and_no_rubbish(source: Path, tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    args = [str(TOPICS), "backup", "create", "--to", str(tmp_path / "r"), "--data-dir", str(source)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=theirs, env=clean_environment(TERM="xterm")) as running:
        os.close(theirs)
        shown = read_all(mine)
        assert running.stdout is not None
        printed = running.stdout.read()
    os.close(mine)
    assert running.returncode == 0
    assert b"copying" in shown
    assert b"\x1b" not in printed


def test_one_that_was_cut_off_goes_on(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "r"
    args = ("backup", "create", "--to", str(place), "--name", "a", "--data-dir", str(source))
    assert run_topics(*args, TOPICS_KILL_POINT="renamed:6").returncode == -9
    (listed,) = topics_backup("ls", "--from", place)
    assert (listed["name"], listed["state"]) == ("a", "unfinished")
    assert listed["copied_bytes"] > 0
    assert "was not finished" in refused("restore", "a", "--from", place, "--data-dir", tmp_path / "back")
    noted = run_topics("backup", "verify", "--from", str(place))
    assert "note: a was not finished" in noted.stdout
    done = {path for path in place.glob("objects/*/*")}
    times = {path: path.stat().st_mtime_ns for path in done}
    assert run_topics(*args).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in done} == times  # none of them was copied again
    assert topics_backup("verify", "--from", place, "--deep")["clean"]


def test_one_that_was_cut_off_can_be_thrown_away(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "r"
    args = ("backup", "create", "--to", str(place), "--name", "a", "--data-dir", str(source))
    assert run_topics(*args, TOPICS_KILL_POINT="renamed:6").returncode == -9
    topics_backup("rm", "a", "--from", place)
    assert topics_backup("ls", "--from", place) == []
    assert not [path for path in place.glob("objects/**/*") if path.is_file()]


def test_a_restore_that_was_cut_off_is_no_data_folder_and_goes_on(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "back"
    args = ("backup", "restore", "one", "--from", str(repository), "--data-dir", str(target))
    assert run_topics(*args, TOPICS_KILL_POINT="renamed:4").returncode == -9
    started = run_topics("serve", TOPICS_DATA_DIR=target, TOPICS_PORT=0)
    assert started.returncode == 2
    assert "restore that was not finished" in started.stderr
    assert "another restore" in refused(*args[1:], "--shards", 5)
    assert run_topics(*args).returncode == 0
    assert not (target / "restore.json").exists()
    assert verify(str(target), deep=True, running=False).clean


def test_a_restore_that_was_cut_off_is_nothing_to_repair(repository: Path, tmp_path: Path) -> None:
    """Made whole as it is, it would be a data folder without the rest of its records."""
    target = tmp_path / "back"
    args = ("backup", "restore", "one", "--from", str(repository), "--data-dir", str(target))
    assert run_topics(*args, TOPICS_KILL_POINT="renamed:4").returncode == -9
    for way in ((), ("--yes",), ("--to", str(tmp_path / "copy"))):
        repaired = run_topics("repair", "--data-dir", str(target), *way)
        assert repaired.returncode == 1
        assert "restore that was not finished" in repaired.stderr
    assert not (target / "topics.json").exists()
    assert not (tmp_path / "copy").exists()
    assert run_topics(*args).returncode == 0
    assert verify(str(target), deep=True, running=False).clean


def test_a_restore_that_got_no_further_than_its_note_makes_room_for_another(source: Path, tmp_path: Path) -> None:
    place, target = tmp_path / "r", tmp_path / "back"
    for name in ("one", "two"):
        topics_backup("create", "--to", place, "--name", name, "--data-dir", source)
    target.mkdir()
    (target / "restore.json").write_text('{"backup":"one","sha256":"00","shards":2}')
    args = ("backup", "restore", "two", "--from", str(place), "--data-dir", str(target))
    assert run_topics(*args, TOPICS_KILL_POINT="renamed:4").returncode == -9
    assert json.loads((target / "restore.json").read_text())["backup"] == "two"
    assert "another restore" in refused("restore", "one", "--from", place, "--data-dir", target)
    assert run_topics(*args).returncode == 0
    assert verify(str(target), deep=True, running=False).clean


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_repository_is_found_and_never_restored(repository: Path, tmp_path: Path, harm: str) -> None:
    place = copied(repository, tmp_path / "r")
    victim = max(place.glob("objects/*/*"), key=lambda path: path.stat().st_size)
    if harm == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif harm == "cut":
        os.truncate(victim, victim.stat().st_size - 1)
    else:
        victim.unlink()
    found = run_topics("backup", "verify", "--from", str(place))
    assert found.returncode == 1
    assert f"problem: {victim}: this content is {'missing' if harm == 'remove' else 'damaged'}" in found.stdout
    assert "can't be restored: one" in found.stdout
    target = tmp_path / "back"
    assert victim.name in refused("restore", "one", "--from", place, "--data-dir", target)
    assert not (target / "topics.json").exists()


def test_a_damaged_folder_is_not_backed_up(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path / "data")
    segment = max(folder.glob("topics/*/*.data"), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)
    line = refused("create", "--to", tmp_path / "r", "--name", "a", "--data-dir", folder)
    assert f"{segment.relative_to(folder)}: no good block at offset 64" in line
    segment.unlink()
    assert "is missing" in refused("create", "--to", tmp_path / "r", "--name", "a", "--data-dir", folder)
    (folder / "topics.json").write_text('{"format":9,"layout":1,"shards":2}')
    assert "format 9" in refused("create", "--to", tmp_path / "r", "--name", "a", "--data-dir", folder)


def test_segments_of_the_cold_tier_come_back_hot(source: Path, tmp_path: Path) -> None:
    folder, cold = copied(source, tmp_path / "data"), tmp_path / "cold"
    moved = sorted(folder.glob("topics/*/*.idx"))[:2]
    assert moved
    for index in moved:
        segment = index.with_suffix(".data")
        target = cold / segment.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        segment.rename(target)
    manifest = json.loads((folder / "topics.json").read_text())
    (folder / "topics.json").write_text(json.dumps({**manifest, "cold": str(cold)}))
    topics_backup("create", "--to", tmp_path / "r", "--name", "a", "--data-dir", folder)
    topics_backup("restore", "a", "--from", tmp_path / "r", "--data-dir", tmp_path / "back")
    assert "cold" not in json.loads((tmp_path / "back" / "topics.json").read_text())
    assert verify(str(tmp_path / "back"), deep=True, running=False).clean
    ours, theirs = Folder(str(tmp_path / "back")), Folder(str(source))
    for topic in theirs.topics:
        assert live_records(ours, named(ours, topic.name)) == live_records(theirs, topic)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("create", "--to", "R", "--name", "one"), "there is a backup one"),
        (("create", "--to", "SOURCE"), "is not empty and no repository"),
        (("create", "--to", "R", "--data-dir", "NOWHERE"), "does not exist"),
        (("ls", "--from", "NOWHERE"), "does not exist"),
        (("ls", "--from", "SOURCE"), "is no repository"),
        (("restore", "two", "--from", "R", "--data-dir", "NOWHERE"), "there is no backup two"),
        (("restore", "one", "--from", "R", "--data-dir", "SOURCE"), "is not empty"),
        (("verify", "two", "--from", "R"), "there is no backup two"),
        (("rm", "one", "two", "--from", "R"), "there is no backup two"),
    ],
)
def test_what_it_refuses(source: Path, repository: Path, tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    places = {"R": str(repository), "SOURCE": str(source), "NOWHERE": str(tmp_path / "nowhere")}
    before = sorted(path.name for path in repository.rglob("*"))
    assert says in refused(*(places.get(arg, arg) for arg in args), TOPICS_DATA_DIR=source)
    assert sorted(path.name for path in repository.rglob("*")) == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("args", ["create", "create --to r --name ../up", "rm --from r", "restore --from r", "ls"])
def test_what_it_does_not_understand(args: str, tmp_path: Path) -> None:
    assert run_topics("backup", *args.split(), cwd=tmp_path).returncode == 2
    assert not list(tmp_path.iterdir())
