"""Make a backup: a moment of the data folder, and every file of it that the repository does not have yet.

A crash leaves a part, which the same name goes on with. Copying may take longer than the server keeps a file: then
another moment is taken, and only what is new since is copied, so each round is shorter than the one before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from topics import __version__
from topics.backup import moment as moments
from topics.backup.catalog import FORMAT, Backup, Entry, Summary, encode_flags
from topics.backup.moment import Moment
from topics.backup.repository import Begun, Done, Part, Put, Repository
from topics.backup.source import Source, sources
from topics.datadir.files import Superseded
from topics.errors import TopicsError

Progress = Callable[[str, int, int], None]  # (file, bytes done, bytes in all)
_ROUNDS = 20
_THREADS = 8  # they wait for syncs, which the file system joins


def create(data_dir: str, repository: Repository, name: str, *, progress: Progress = lambda *_: None) -> Summary:
    source = os.path.abspath(data_dir)
    with repository.locked(writing=True):
        moment = moments.take(data_dir)  # what can't be read leaves nothing unfinished
        try:
            part = repository.begin(Begun(name=name, source=source, begun_ms=_now_ms()))
        except BaseException:
            moment.close()
            raise
        try:
            copying = _Copying(repository, part, source=source, progress=progress)
            for left in reversed(range(_ROUNDS)):
                with moment:
                    try:
                        entries = copying.run(sources(moment))
                        backup = _described(name, source, moment, entries, copied=copying.copied)
                        repository.commit(backup)
                        return backup.summary
                    except (FileNotFoundError, Superseded):
                        if not left:
                            break
                moment = moments.take(data_dir)
        finally:
            part.close()
    raise TopicsError(
        f"{data_dir}: files go faster than they can be copied; `topics backup create --name {name}` goes on with it"
    )


def _described(name: str, source: str, moment: Moment, entries: list[Entry], *, copied: dict[str, int]) -> Backup:
    manifest = moment.manifest
    named = {content: size for entry in entries for content, size in entry.objects()}
    summary = Summary(
        name=name,
        format=FORMAT,
        version=__version__,
        source=source,
        moment_ms=moment.at_ms,
        finished_ms=_now_ms(),
        data_format=manifest.format,
        layout=manifest.layout,
        shards=manifest.shards,
        topics=moment.topics,
        records=moment.records,
        files=len(entries),
        total_bytes=sum(named.values()),
        copied_bytes=sum(size for content, size in copied.items() if content in named),
    )
    return Backup(summary=summary, entries=entries)


class _Copying:
    def __init__(self, repository: Repository, part: Part, *, source: str, progress: Progress) -> None:
        self._repository = repository
        self._part = part
        self._progress = progress
        self._known = _known(repository, source)  # by identity: content that is in the repository
        self.copied: dict[str, int] = {}  # by object, with its bytes: what this backup has added
        for done in part.done:
            if repository.holds(done.object, done.bytes):
                self._learn(done)

    def _learn(self, done: Done) -> None:
        self.copied[done.object] = done.bytes
        if done.identity:
            self._known[done.identity] = (done.object, done.bytes)

    def run(self, wanted: list[Source]) -> list[Entry]:
        """In the order of `wanted`."""
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="copy")
        total, done = sum(source.size for source in wanted), 0
        try:
            entries = []
            for source, entry in zip(wanted, pool.map(self._keep, wanted), strict=True):
                done += source.size
                self._progress(source.file, done, total)
                entries.append(entry)
            return entries
        finally:
            pool.shutdown(cancel_futures=True)

    def _keep(self, source: Source) -> Entry:
        """On a thread."""
        content, size = self._content(source.identity, source.pieces)
        entry = Entry(file=source.file, bytes=size, object=content, identity=source.identity)
        if source.flags is None:
            return entry
        flags, flags_bytes = self._content("", partial(_flags, source))
        return Entry(
            file=entry.file,
            bytes=size,
            object=content,
            identity=entry.identity,
            flags=flags,
            flags_bytes=flags_bytes,
        )

    def _content(self, identity: str, pieces: Callable[[], Iterator[bytes]]) -> tuple[str, int]:
        known = self._known.get(identity)
        if known is not None and self._repository.holds(*known):
            return known
        put: Put = self._repository.put(pieces())
        if put.new:
            done = Done(identity=identity, object=put.object, bytes=put.bytes)
            self._part.add(done)
            self._learn(done)
        return put.object, put.bytes


def _flags(source: Source) -> Iterator[bytes]:
    if source.flags is not None:
        yield encode_flags(source.flags.deleted)


def _known(repository: Repository, source: str) -> dict[str, tuple[str, int]]:
    """From the newest backup of this folder; content that only others have is found when it has been read."""
    ours = [each for each in map(repository.summary, repository.names()) if each.source == source]
    if not ours:
        return {}
    newest = repository.load(max(ours, key=lambda each: each.moment_ms).name)
    return {entry.identity: (entry.object, entry.bytes) for entry in newest.entries if entry.identity}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
