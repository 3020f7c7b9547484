"""A repository of backups: what is in it, what is not, who may work on it; and what a backup says about itself."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from topics.backup.catalog import (
    Backup,
    Entry,
    Summary,
    decode_backup,
    decode_flags,
    decode_summary,
    encode_backup,
    encode_flags,
)
from topics.backup.repository import Begun, Done, Repository
from topics.backup.verify import verify
from topics.errors import CorruptData, FormatError, TopicsError

SUMMARY = Summary(
    name="one",
    format=1,
    version="0",
    source="/data",
    moment_ms=1_000,
    finished_ms=2_000,
    data_format=1,
    layout=1,
    shards=2,
    topics=3,
    records=4,
    files=1,
    total_bytes=10,
    copied_bytes=10,
)
SEGMENT = "topics/00000000000000aa/00000000000000000001.data"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository.made(str(tmp_path / "repository"))
    (tmp_path / "repository" / "objects").mkdir()
    return made


def add(repository: Repository, name: str, *contents: bytes) -> Backup:
    part = repository.begin(Begun(name=name, source="/data", begun_ms=1))
    entries = []
    for number, content in enumerate(contents):
        put = repository.put([content[:3], content[3:]])
        part.add(Done(identity=content.decode(), object=put.object, bytes=put.bytes))
        file = SEGMENT.replace("00aa", f"{number:04x}")
        entries.append(Entry(file=file, bytes=put.bytes, object=put.object, identity=content.decode()))
    part.close()
    backup = Backup(summary=msgspec.structs.replace(SUMMARY, name=name), entries=entries)
    repository.commit(backup)
    return backup


def objects(repository: Repository) -> set[bytes]:
    return {Path(repository.object_path(name)).read_bytes() for name in repository.objects()}


# --- content -------------------------------------------------------------------------------------------


def test_content_is_named_by_its_checksum_and_there_once(repository: Repository) -> None:
    add(repository, "one", b"first", b"second")
    again = repository.put([b"first"])
    assert not again.new
    assert again.object == hashlib.sha256(b"first").hexdigest()
    assert repository.read(again.object, 5) == b"first"
    assert objects(repository) == {b"first", b"second"}
    assert not list(Path(repository.path, "objects").glob("*.tmp"))


def test_what_is_damaged_or_missing_is_never_read(repository: Repository) -> None:
    put = repository.put([b"content"])
    path = Path(repository.object_path(put.object))
    for broken in (b"contenX", b"conten", b"content more"):
        path.write_bytes(broken)
        with pytest.raises(CorruptData, match="damaged"):
            repository.read(put.object, put.bytes)
    path.unlink()
    with pytest.raises(CorruptData, match="missing"):
        repository.read(put.object, put.bytes)


def test_pieces_that_fail_leave_nothing(repository: Repository) -> None:

    def pieces() -> Iterator[bytes]:
        yield b"begun"
        raise CorruptData("damaged")

    with pytest.raises(CorruptData):
        repository.put(pieces())
    assert not list(Path(repository.path, "objects").iterdir())


# --- removing ------------------------------------------------------------------------------------------


def test_what_others_need_stays(repository: Repository) -> None:
    add(repository, "one", b"both", b"only one")
    add(repository, "two", b"both", b"only two")
    assert repository.remove(["one"]) == len(b"only one")
    assert repository.names() == ["two"]
    assert objects(repository) == {b"both", b"only two"}
    repository.remove(["two"])
    assert objects(repository) == set()


def test_what_an_unfinished_one_has_copied_stays(repository: Repository) -> None:
    add(repository, "one", b"old")
    part = repository.begin(Begun(name="two", source="/data", begun_ms=1))
    put = repository.put([b"new"])
    part.add(Done(identity="x", object=put.object, bytes=put.bytes))
    part.close()
    repository.put([b"nobody's"])
    repository.remove(["one"])
    assert objects(repository) == {b"new"}
    assert repository.unfinished() == ["two"]
    repository.remove(["two"])
    assert objects(repository) == set()
    assert repository.unfinished() == []


def test_if_another_one_can_not_be_read_nothing_goes(repository: Repository) -> None:
    add(repository, "one", b"first")
    add(repository, "two", b"second")
    path = Path(repository.path, "backups", "two.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"records":4', b'"records":5'))
    with pytest.raises(CorruptData, match=r"two\.jsonl: damaged"):
        repository.remove(["one"])
    assert repository.names() == ["one", "two"]
    assert objects(repository) == {b"first", b"second"}
    repository.remove(["two"])  # itself it may be as damaged as it likes
    assert objects(repository) == {b"first"}


def test_what_is_not_there_is_not_removed(repository: Repository) -> None:
    add(repository, "one", b"first")
    with pytest.raises(TopicsError, match="there is no backup two"):
        repository.remove(["one", "two"])
    assert repository.names() == ["one"]


# --- one that is under way -----------------------------------------------------------------------------


def test_a_line_that_was_cut_short_is_forgotten_and_the_next_one_is_not(repository: Repository) -> None:
    begun = Begun(name="one", source="/data", begun_ms=7)
    part = repository.begin(begun)
    first = Done(identity="a", object="0" * 64, bytes=1)
    part.add(first)
    part.close()
    path = Path(repository.path, "backups", "one.part")
    path.write_bytes(path.read_bytes() + b'{"identity":"b","obj')
    part = repository.begin(Begun(name="one", source="/data", begun_ms=9))
    assert part.done == [first]
    second = Done(identity="c", object="1" * 64, bytes=2)
    part.add(second)
    part.close()
    assert repository.part("one") == (begun, [first, second])


def test_it_is_of_one_folder(repository: Repository) -> None:
    repository.begin(Begun(name="one", source="/data", begun_ms=1)).close()
    with pytest.raises(TopicsError, match="begun from /data"):
        repository.begin(Begun(name="one", source="/other", begun_ms=1))


def test_a_name_is_taken_once(repository: Repository) -> None:
    add(repository, "one", b"first")
    with pytest.raises(TopicsError, match="there is a backup one"):
        repository.begin(Begun(name="one", source="/data", begun_ms=1))
    for name in ("../up", "", "a/b", ".hidden", "x" * 101):
        with pytest.raises(TopicsError, match="can't be called"):
            repository.begin(Begun(name=name, source="/data", begun_ms=1))


def test_an_unfinished_one_is_not_restored_and_not_called_absent(repository: Repository) -> None:
    repository.begin(Begun(name="one", source="/data", begun_ms=1)).close()
    with pytest.raises(TopicsError, match="was not finished"):
        repository.load("one")
    assert repository.names() == []


# --- the folder ----------------------------------------------------------------------------------------


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(TopicsError, match="not empty and no repository"):
        Repository.made(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(FormatError, match="is no repository"):
        Repository(str(tmp_path))
    with pytest.raises(FormatError, match="does not exist"):
        Repository(str(tmp_path / "nowhere"))


def test_a_newer_repository_is_left_alone(repository: Repository) -> None:
    Path(repository.path, "repository.json").write_text('{"format":2}')
    with pytest.raises(FormatError, match="format 2"):
        Repository.made(repository.path)


def test_one_writes_or_many_read(repository: Repository) -> None:
    with repository.locked(writing=True):
        for writing in (True, False):
            with pytest.raises(TopicsError, match="at work"), repository.locked(writing=writing):
                pass
    with (
        repository.locked(writing=False),
        repository.locked(writing=False),
        pytest.raises(TopicsError, match="at work"),
        repository.locked(writing=True),
    ):
        pass


def test_several_threads_put_the_same(repository: Repository) -> None:
    gate = threading.Barrier(8)

    def put() -> None:
        gate.wait()
        repository.put([b"x" * 100_000])

    threads = [threading.Thread(target=put) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert objects(repository) == {b"x" * 100_000}
    assert not list(Path(repository.path, "objects").glob("*.tmp"))


# --- proving -------------------------------------------------------------------------------------------


def _flipped(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize(
    ("harm", "says"),
    [(_flipped, "damaged"), (lambda path: path.write_bytes(b""), "damaged"), (lambda path: path.unlink(), "missing")],
)
def test_every_harm_is_found_and_who_suffers_is_named(
    repository: Repository, harm: Callable[[Path], object], says: str
) -> None:
    first = add(repository, "one", b"both", b"only one")
    add(repository, "two", b"both", b"only two")
    add(repository, "three", b"else")
    assert verify(repository, [], deep=False).clean
    harm(Path(repository.object_path(first.entries[0].object)))
    verdict = verify(repository, [], deep=False)
    assert [(says in trouble.text, sorted(trouble.backups)) for trouble in verdict.problems] == [(True, ["one", "two"])]
    assert verify(repository, ["three"], deep=False).clean
    assert not verify(repository, ["two"], deep=False).clean


def test_a_damaged_list_is_a_problem_and_leftovers_are_none(repository: Repository) -> None:
    add(repository, "one", b"first")
    repository.put([b"nobody's"])
    verdict = verify(repository, [], deep=False)
    assert verdict.clean
    assert [trouble.text.partition(";")[0] for trouble in verdict.notes] == ["no backup needs it"]
    _flipped(Path(repository.path, "backups", "one.jsonl"))
    verdict = verify(repository, [], deep=False)
    assert verdict.broken == {"one"}


# --- what a backup says --------------------------------------------------------------------------------


def _backup(**more: str) -> Backup:
    fields = {"file": SEGMENT, "object": "ab" * 32, **more}
    return Backup(summary=SUMMARY, entries=[Entry(bytes=10, **fields)])  # type: ignore[arg-type]


def test_it_comes_back_as_it_was() -> None:
    backup = _backup(flags="cd" * 32)
    data = encode_backup(backup)
    assert decode_backup(data, path="x") == backup
    assert decode_summary(data.partition(b"\n")[0], path="x") == SUMMARY
    runs = [(64, 3), (1_000_000, 1)]
    assert decode_flags(encode_flags(runs)) == runs


def test_every_changed_byte_is_noticed() -> None:
    data = encode_backup(_backup())
    for at in range(len(data) - 1):
        broken = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((CorruptData, FormatError)):
            decode_backup(broken, path="x")
    for length in range(0, len(data) - 1, 7):
        with pytest.raises(CorruptData):
            decode_backup(data[:length], path="x")


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "topics/x", "topics.json", "wal/shard-00/../../x"])
def test_only_files_of_a_data_folder_are_named(file: str) -> None:
    with pytest.raises(CorruptData, match="no file of a data folder"):
        decode_backup(encode_backup(_backup(file=file)), path="x")


@pytest.mark.parametrize("field", ["object", "flags"])
def test_only_checksums_name_content(field: str) -> None:
    with pytest.raises(CorruptData, match="no checksum"):
        decode_backup(encode_backup(_backup(**{field: "../../../etc/passwd"})), path="x")


def test_a_newer_one_is_refused_by_its_format() -> None:
    data = encode_backup(_backup()).replace(b'"format":1', b'"format":2', 1).replace(b'"layout":1,', b"", 1)
    with pytest.raises(FormatError, match="format 2"):
        decode_backup(data, path="x")
