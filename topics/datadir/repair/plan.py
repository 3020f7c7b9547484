"""What can be made whole of a damaged data folder, and what that loses: a plan. Nothing is written here.

    damaged                           what becomes of it
    an index                          made again from its segment
    a block, a header, a segment      the good blocks stay; what is gone comes from the log, or is lost
    the log                           the good frames stay; what stood in the others is lost
    the newest snapshot               an older one, or none, if the log goes back far enough
    the manifest                      made again, if the files leave no doubt
    the rules of routers              none: the routers have to be made again, and copies in memory are gone
    delete flags of no meaning        cleared: the records are live
    files that nobody names           removed

What is lost is never passed over: its seqs become holes of the topic, and whoever reads across them gets a tombstone.
Seqs that may have been given out are not given out again.

The steps can be cut off anywhere and begun again: segments, the snapshot that knows the holes, the log, indexes, and
last what goes. Until the log is written it shows its damage; from the snapshot on the loss is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec

from topics.datadir import inventory
from topics.datadir.files import ColdTierAway, Files, Superseded
from topics.datadir.fsck.checking import UNREADABLE
from topics.datadir.ranges import Ranges, both
from topics.datadir.repair.shard_plan import ShardPlan, mend_shard
from topics.datadir.view.shard import Shard
from topics.datadir.view.topic import Topic
from topics.errors import CorruptData, FormatError
from topics.storage.config import owner_of_id
from topics.storage.format import FORMAT_VERSION
from topics.storage.manifest import MANIFEST_NAME, RESTORE_NOTE, Manifest, encode_manifest
from topics.storage.paths import index_path, parse_numbered, shard_dir
from topics.storage.routers import ROUTERS_MAGIC, decode_rules, encode_rules, routers_path
from topics.storage.snapshot import decode_snapshot, decode_topic, with_header

Progress = Callable[[str], None]  # what is being looked at


class Step(msgspec.Struct, kw_only=True):
    """A file to be replaced, or removed."""

    file: str  # below the data folder
    what: str
    make: Callable[[], bytes] | None = None  # its bytes, asked for once and in order; None: it goes


class Loss(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Seqs of a topic that are gone, or were the most that may be."""

    topic: str
    first: int
    last: int


class Plan(msgspec.Struct, kw_only=True):
    steps: list[Step] = []
    losses: list[Loss] = []
    restored: list[Loss] = []  # seqs whose block was gone and that stand in the log
    untold: list[str] = []  # what is lost and can't be said in seqs
    hopeless: list[str] = []

    @property
    def files(self) -> set[str]:
        return {step.file for step in self.steps}


def plan(data_dir: str, *, now_ms: int, progress: Progress = lambda _: None) -> Plan:
    """Nobody may be at work in the folder. Raises what makes it no folder of ours."""
    found = Plan()
    try:
        files = Files(data_dir)
    except CorruptData:
        _mend_manifest(data_dir, found)
        return found
    except FormatError:
        if not os.path.isdir(os.path.join(data_dir, "wal")):
            raise
        if any(os.path.exists(os.path.join(data_dir, name)) for name in (MANIFEST_NAME, RESTORE_NOTE)):
            raise
        _mend_manifest(data_dir, found)
        return found
    _refuse_without_cold(files)
    for shard in range(files.manifest.shards):
        progress(f"shard {shard}")
        try:
            _take(found, mend_shard(files, shard))
        except FormatError as exc:
            found.hopeless.append(str(exc))
    _mend_routers(files, found)
    _remove_orphans(files, found, now_ms=now_ms)
    return found


def _take(found: Plan, shard: ShardPlan) -> None:
    for replaced in shard.replaced:
        found.steps.append(Step(file=replaced.file, what=replaced.what, make=replaced.make))
    for file, what in shard.removed:
        found.steps.append(Step(file=file, what=what))
    for topic, ranges in shard.lost.items():
        found.losses += [Loss(topic=topic, first=first, last=last) for first, last in ranges]
    for topic, ranges in shard.restored.items():
        found.restored += [Loss(topic=topic, first=first, last=last) for first, last in ranges]
    found.untold += shard.untold
    found.hopeless += shard.hopeless


def _refuse_without_cold(files: Files) -> None:
    """Segments on a disk that is not mounted are not lost."""
    if (away := files.cold_away()) is not None:
        raise ColdTierAway(f"{away}, then repair")


# --- the folder's own files --------------------------------------------------------------------------


def _mend_manifest(data_dir: str, found: Plan) -> None:
    layouts = {(layout, shard) for layout, shard, _ in _numbered(data_dir)}
    numbers = {layout for layout, _ in layouts}
    if len(numbers) != 1:
        several = f"files of {len(numbers)} layouts are there" if numbers else "there is no log"
        found.hopeless.append(f"{MANIFEST_NAME}: can't be read, and {several}: restore it from a backup")
        return
    manifest = Manifest(
        format=FORMAT_VERSION,
        layout=numbers.pop(),
        shards=max(shard for _, shard in layouts) + 1,
        routers=os.path.exists(routers_path(data_dir)),
    )
    for layout, shard, path in _numbered(data_dir):
        if path.endswith(".snap") and not _fits(path, manifest, shard):
            name = os.path.relpath(path, data_dir)
            found.hopeless.append(f"{MANIFEST_NAME}: can't be read, and {name} does not tell: restore it from a backup")
            return
        assert layout == manifest.layout
    what = f"made again: layout {manifest.layout}, {manifest.shards} shards. A cold tier is not in it"
    found.steps.append(Step(file=MANIFEST_NAME, what=what, make=lambda: encode_manifest(manifest)))


def _numbered(data_dir: str) -> Iterator[tuple[int, int, str]]:
    """(layout, shard, path) of every log file and snapshot."""
    root = os.path.join(data_dir, "wal")
    for folder in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        number = folder.removeprefix("shard-")
        if not number.isdigit():
            continue
        for name in sorted(os.listdir(os.path.join(root, folder))):
            if (parsed := parse_numbered(name)) is not None:
                yield parsed[0], int(number), os.path.join(root, folder, name)


def _fits(path: str, manifest: Manifest, shard: int) -> bool:
    """Whether the topics of a snapshot are where this number of shards puts them."""
    try:
        with open(path, "rb") as source:
            state = decode_snapshot(source.read(), path=path)
        ids = [decode_topic(raw).id for raw in state.topics]
    except UNREADABLE:
        return False
    owners = {owner_of_id(topic_id, manifest.shards) for topic_id in ids}
    return (state.shard, state.layout) == (shard, manifest.layout) and owners <= {shard}


def _mend_routers(files: Files, found: Plan) -> None:
    path = routers_path(files.data_dir)
    name = files.relative(path)
    try:
        with open(path, "rb") as source:
            data = source.read()
    except FileNotFoundError:
        if not files.manifest.routers:
            return
        data = b""
    try:
        decode_rules(data, path=name)
    except UNREADABLE as exc:
        whole = with_header(data, ROUTERS_MAGIC)
        if whole is not None:
            found.steps.append(Step(file=name, what=str(exc).removeprefix(f"{name}: "), make=lambda: whole))
            return
        what = "is missing" if not data else "can't be read"
        found.steps.append(Step(file=name, what=f"{what}; one without a rule", make=lambda: encode_rules([])))
        found.untold.append(f"{name}: all routers; make them again with PUT /v0/routers/NAME")
        found.untold += _copies_lost(files, name)


def _copies_lost(files: Files, name: str) -> Iterator[str]:
    """What went with the rules. A copy is in a segment, or was to be made again by its rule; a router that a client
    makes again begins at the head of its source."""
    topics: dict[int, Topic] = {}
    for number in range(files.manifest.shards):
        shard = Shard(files, number, layout=files.manifest.layout, shards=files.manifest.shards)
        try:
            shard.look()
        except (FileNotFoundError, Superseded, *UNREADABLE):
            yield f"{name}: which copies is no telling for shard {number}, which is damaged; repair names what it can"
        topics |= shard.topics
    for topic in sorted(topics.values(), key=lambda topic: topic.name):
        pipe = topic.pipe
        if pipe is None:
            continue
        source = topics.get(pipe.source_id)
        came = "" if source is None else f" from topic {source.name}"
        routers = f" ({', '.join(sorted(pipe.forwarded))})" if pipe.forwarded else ""
        text = f"{name}: what copied{came} into topic {topic.name}{routers}"
        if source is not None and source.config.durability != "ephemeral" and source.head_seq > pipe.at:
            first, last = pipe.at + 1, source.head_seq
            text += (
                f"; copies of {source.name} seq {_listed([(first, last)])} that were in memory only are not made again."
                f" {_originals(source, first, last)}"
            )
        elif lost := topic.unsettled_seqs:
            text += (
                f"; {topic.name} seq {_listed(lost)} were copies in memory only and are not made again. "
                f"{_no_originals(source)}"
            )
        yield text


def _no_originals(source: Topic | None) -> str:
    if source is None:
        return "The topic of their originals is gone"
    if source.config.durability == "ephemeral":
        return f"Their originals in {source.name} were in memory only, too"
    return f"Their originals are not in {source.name}"


def _listed(ranges: Ranges) -> str:
    return ", ".join(f"{low}" if low == high else f"{low}..{high}" for low, high in ranges)


def _originals(source: Topic, first: int, last: int) -> str:
    """Where what copies were made of is. A source that is a destination itself has lost what it had in memory only."""
    gone = both(source.unsettled_seqs, [(first, last)])
    if not gone:
        return f"The originals are in {source.name}"
    if gone == [(first, last)]:
        return f"They were made of such copies in {source.name}, which are lost themselves"
    return f"The originals are in {source.name}, but for seq {_listed(gone)}: those were such copies themselves"


def _remove_orphans(files: Files, found: Plan, *, now_ms: int) -> None:
    if found.hopeless:
        return  # what nobody names may be what somebody needs
    taken = found.files
    doubtful = {shard for shard in range(files.manifest.shards) if _touched(taken, shard)}
    for orphan in inventory.take(files.data_dir, now_ms=now_ms, settled_ms=0).orphans:
        foreign = orphan.shard is None or orphan.why == "not a file of topics"
        if foreign or orphan.file in taken or orphan.shard in doubtful:
            continue
        found.steps.append(Step(file=orphan.file, what=f"counts for nothing ({orphan.why})"))


def _touched(files: set[str], shard: int) -> bool:
    """Whether a shard's list of segments changes: what is an orphan shows only then."""
    return any(file.startswith(shard_dir("", shard) + os.sep) and file.endswith(".snap") for file in files)


def covers(plan: Plan, file: str) -> bool:
    """Whether something is done about a file, or about what it belongs to."""
    files = plan.files
    if file in files or index_path(file) in files or file.removesuffix(".idx") + ".data" in files:
        return True
    return file.startswith("wal") and any(os.path.dirname(other) in (file, os.path.dirname(file)) for other in files)
