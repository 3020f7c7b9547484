"""Every crash point of random histories, with every kind of damage: what was acknowledged is there.

A history (stepped.py) is played once, on a tape. For every number of calls on it, and for every kind of damage
(platter.py), the disk is made as it may be found then; a shard recovers from it and is held to what a client was told.
Of damages that leave the same bytes only one is tried, and only one counts.

    after a kill       everything answered is there, and exactly that; the step that was under way is done or not
    after a power cut  what is there is what was there after some step, not before the last one that was promised: the
                       last answered by `fsync`, of a config or a drop, or covered by a sync. All topics agree on it
    always             no seq that was answered is given out again, but in the memory class by a power cut; records that
                       are gone have a tombstone; keys of batches that are there are known; a second start sees the same
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from model import Record, Shard

from topics.errors import ApiError, TopicsError

from .campaign import Campaign, Finding, Tally
from .copies import ROUTES, Wrong, check_copies, plain
from .platter import KILLS, POWER, Damage, Image, Platter, read_image, write_image
from .shrinking import shrink
from .stepped import History, Life, Sight, Sights, Step, look, plan, prepare, record, scratch, small_limits
from .tape import Call

DICE = 2  # throws for each kind of damage that depends on dice
THROWN: tuple[Damage, ...] = ("half", "torn", "reordered", "zeroed", "garbled", "names")
NEXT_BOOT = bytes(16)
TRIES = 25  # to make a failing history shorter


class Kept(msgspec.Struct):
    """A history in a file."""

    steps: list[Step]
    cold: bool


@dataclass(frozen=True, slots=True)
class Point:
    """One case of a history."""

    calls: int
    damage: Damage
    throw: int = 0

    def __str__(self) -> str:
        return f"{self.calls}/{self.damage}/{self.throw}"

    @staticmethod
    def parse(text: str) -> Point:
        calls, damage, throw = text.split("/")
        assert damage in (*KILLS, *POWER), damage
        return Point(int(calls), damage, int(throw))


def points_of(history: History) -> list[Point]:
    return [
        Point(calls, damage, throw)
        for calls in range(len(history.calls) + 1)
        for damage in (*KILLS, *POWER)
        for throw in range(DICE if damage in THROWN else 1)
    ]


def initial(cold: bool) -> Image:
    base = scratch()
    try:
        prepare(base, cold=cold)
        return read_image(base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def images(history: History, only: Point | None = None) -> list[tuple[Point, Image]]:
    """What may be found at each point; each content once."""
    platter = Platter(initial(history.cold))
    found = []
    for calls in range(len(history.calls) + 1):
        under_way: Call | None = history.calls[calls] if calls < len(history.calls) else None
        seen: set[tuple[bool, bytes]] = set()
        if only is None or only.calls == calls:
            for damage in (*KILLS, *POWER):
                if damage == "half" and (under_way is None or under_way.kind != "write"):
                    continue
                for throw in range(DICE if damage in THROWN else 1):
                    point = Point(calls, damage, throw)
                    if only is not None and point != only:
                        continue
                    image = platter.image(damage, random.Random(f"{history.seed}/{point}"), under_way=under_way)
                    same = (damage in KILLS, _digest(image))
                    if same not in seen:
                        seen.add(same)
                        found.append((point, image))
        if under_way is not None:
            platter.do(under_way)
    return found


def _digest(image: Image) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for path, content in sorted(image.items()):
        digest.update(path.encode() + b"\0" + (b"/" if content is None else len(content).to_bytes(8, "little")))
        digest.update(content or b"")
    return digest.digest()


# --- the oracle --------------------------------------------------------------------------------------


def check(history: History, point: Point, image: Image, base: Path) -> int:
    """Raises Wrong; returns how many records were owed and found."""
    done = history.moment_of(point.calls)
    told = history.moments[done]
    killed = point.damage in KILLS
    write_image(image, base)
    last = history.moments[min(done + 1, len(history.moments) - 1)]
    boot = _boot_at(history, point) if killed else NEXT_BOOT
    try:
        life = Recovered(base, cold=history.cold, boot=boot)
    except (TopicsError, ApiError, OSError, ValueError, KeyError, AssertionError) as error:
        raise Wrong(f"it does not start: {type(error).__name__}: {error}") from error
    try:
        found = life.sights
        if killed:
            _one_of(plain(found), [plain(told.sights), plain(last.sights)], "after a kill")
        else:
            moments = history.moments[told.durable : min(done + 2, len(history.moments))]
            _same_moment(plain(found), [plain(moment.sights) for moment in moments])
            life.forwarders.pump()
            found = look(life.shard)
        seen = [moment.sights for moment in history.moments[: done + 1]]
        check_copies(life.shard, seen, done if killed else told.durable, found, under_way=last.sights, killed=killed)
        for name, sight in told.sights.items():
            now = found.get(name)
            if now is not None and now.id == sight.id:
                _check_topic(life.shard, name, sight, now, last.sights.get(name), killed=killed)
        _check_keys(life.shard, told.keys, found)
        _check_seqs(life.shard, told.sights, found, killed=killed)
        _check_again(life)
        return sum(len(sight.records) for sight in found.values())
    finally:
        life.shard.crash()


def _boot_at(history: History, point: Point) -> bytes:
    """Of the boot that was running: a step that reboots does so with its first call."""
    done = history.moment_of(point.calls)
    after = history.moments[min(done + 1, len(history.moments) - 1)]
    before = history.moments[done]
    return after.boot if point.calls > before.calls else before.boot


class Recovered(Life):
    """A shard on what was found."""

    def __init__(self, base: Path, *, cold: bool, boot: bytes) -> None:
        self._first_boot = boot
        super().__init__(base, cold=cold, boot=boot)
        self.sights = look(self.shard)


def _alike(found: Sight | None, expected: Sight | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.id != expected.id or found.config != expected.config:
        return False
    if expected.durability == "ephemeral":
        return not found.records
    return found.records == expected.records


def _between(found: Sight | None, before: Sight | None, after: Sight | None) -> bool:
    """A topic that is being made, by an append, is there before its records."""
    if _alike(found, before) or _alike(found, after):
        return True
    return before is None and found is not None and after is not None and found.id == after.id and not found.records


def _one_of(found: Sights, moments: list[Sights], when: str) -> None:
    before, after = moments[0], moments[-1]
    for name in sorted(found.keys() | before.keys() | after.keys()):
        now, was, will = found.get(name), before.get(name), after.get(name)
        if not _between(now, was, will):
            raise Wrong(f"{when} {name} is {_told(now)}; answered was {_told(was)}, under way {_told(will)}")


def _same_moment(found: Sights, moments: list[Sights]) -> None:
    problems = []
    for at, before in enumerate(moments):
        try:
            _one_of(found, [before, moments[min(at + 1, len(moments) - 1)]], f"{at} behind what was promised")
            return
        except Wrong as wrong:
            problems.append(str(wrong))
    raise Wrong(
        "after a power cut there is no moment since the last promise that all topics agree on:\n    "
        + ("\n    ".join(problems))
    )


def _told(sight: Sight | None) -> str:
    if sight is None:
        return "absent"
    seqs = [stored.seq for stored in sight.records]
    return f"id {sight.id:x} head {sight.head} seqs {seqs} config {sight.config.durability}/{sight.config.priority}"


def _check_topic(shard: Shard, name: str, told: Sight, now: Sight, next: Sight | None, *, killed: bool) -> None:
    """next: after the step under way, which may delete."""
    exact = (killed and told.durability != "ephemeral") or name in ROUTES
    if not exact and told.durability == "memory":
        return
    if now.head < told.head:
        raise Wrong(f"{name}: head_seq went from {told.head} back to {now.head}")
    there = {stored.seq for stored in now.records}
    kept = set() if next is None else {stored.seq for stored in next.records}
    gone = [stored.seq for stored in told.records if stored.seq in kept - there]
    if exact:
        return  # what is gone was deleted by the step under way, or _one_of has found it
    for seq in {*gone[:1], *gone[-1:]}:
        gap = shard.diff(name, seq - 1, limit=1).tombstone
        if gap is None or not gap.gap_from <= seq <= gap.gap_to:
            raise Wrong(f"{name}: seq {seq} was answered, is gone, and a reader is told {gap}")


def _check_keys(shard: Shard, keys: dict[tuple[str, int], dict[str, int]], found: Sights) -> None:
    for (name, id), known in keys.items():
        sight = found.get(name)
        if sight is None or sight.id != id or sight.durability == "ephemeral":
            continue
        there = {stored.seq for stored in sight.records}
        for key, first_seq in known.items():
            if first_seq in there:
                answer = shard.append(name, [Record(b"0")], key=key)
                if not answer.deduped or answer.first_seq != first_seq:
                    raise Wrong(f"{name}: the key {key} of seq {first_seq} is forgotten, though its batch is there")
                break


def _check_seqs(shard: Shard, told: Sights, found: Sights, *, killed: bool) -> None:
    for name, now in found.items():
        was = told.get(name)
        first = shard.append(name, [Record(b'"next"')]).first_seq
        if first <= now.head:
            raise Wrong(f"{name}: seq {first} is given out, the head was {now.head}")
        if was is not None and was.id == now.id and first <= was.head and (killed or was.durability != "memory"):
            raise Wrong(f"{name}: seq {first} is given out again, {was.head} had been answered")


def _check_again(life: Recovered) -> None:
    """What this life has written survives its own death, and nothing else has changed."""
    life.forwarders.pump()
    before = look(life.shard)
    life.restart()
    after = look(life.shard)
    for name in sorted(before.keys() | after.keys()):
        if not _alike(after.get(name), before.get(name)):
            raise Wrong(
                f"the second start sees {name} as {_told(after.get(name))}, the first {_told(before.get(name))}"
            )


# --- the campaign ------------------------------------------------------------------------------------


def run(seed: int, only: str | None = None, *, tries: int = TRIES) -> Tally:
    """All points of one history; only: one of them, or a file of steps instead of those of the seed."""
    if only is not None and only.endswith(".json"):
        kept = msgspec.json.decode(Path(only).read_bytes(), type=Kept)
        return _run(seed, kept.steps, kept.cold, None)
    steps, cold = plan(seed)
    tally = _run(seed, steps, cold, only)
    if only is None and tally.findings and tries:
        tally.findings[0] = _shorter(tally.findings[0], steps, cold, tries)
    return tally


def _shorter(finding: Finding, steps: list[Step], cold: bool, tries: int) -> Finding:
    """The same with the shortest history that was found to fail too, kept as a file."""

    def fails(fewer: list[Step]) -> bool:
        return bool(_run(finding.seed, fewer, cold, None).findings)

    short, used = shrink(steps, fails, tries=tries)
    path = Path(tempfile.gettempdir()) / f"topics-crashpoints-{finding.seed}.json"
    path.write_bytes(msgspec.json.encode(Kept(short, cold)))
    told = "".join(f"\n        {step}" for step in short)
    return replace(
        finding,
        what=f"{finding.what}\n    {len(short)} of {len(steps)} steps still fail, after {used} tries:{told}\n"
        f"    .venv/bin/python tests/exhaustive.py --campaign crashpoints --unit {finding.seed} --only {path}",
    )


def _run(seed: int, steps: list[Step], cold: bool, only: str | None) -> Tally:
    tally = Tally()
    try:
        history = record(seed, steps=steps, cold=cold)
    except AssertionError as error:
        tally.find(Finding(seed, "", f"while it was recorded: {error}"))
        return tally
    chosen = Point.parse(only) if only else None
    base = scratch()
    kinds: Counter[str] = Counter()
    try:
        with small_limits():
            for number, (point, image) in enumerate(images(history, chosen)):
                place = base / str(number)
                place.mkdir()
                try:
                    tally.add("checked", check(history, point, image, place))
                except Wrong as wrong:
                    tally.find(Finding(seed, str(point), _explain(history, point, wrong)))
                finally:
                    Shard.forget_all()
                    shutil.rmtree(place, ignore_errors=True)
                kinds[point.damage] += 1
    finally:
        shutil.rmtree(base, ignore_errors=True)
    tally.add("cases", sum(kinds.values()))
    for damage, count in kinds.items():
        tally.add(f"cases_{damage}", count)
    tally.add("histories", 1)
    return tally


def _explain(history: History, point: Point, wrong: Wrong) -> str:
    done = history.moment_of(point.calls)
    step = history.steps[done] if done < len(history.steps) else "the end"
    around = [str(call) for call in history.calls[max(0, point.calls - 3) : point.calls + 1]]
    return f"{wrong}\n    step {done} was under way: {step}\n    calls around it: {'; '.join(around)}"


CAMPAIGN = Campaign(
    name="crashpoints",
    title="crash points x kinds of damage x seeds on the simulated disk",
    goal=200_000,
    figure="cases",
    run=run,
    meaning="a stepped shard recovers from what a disk may hold after the n-th write, sync, rename or sync of a folder",
)

if __name__ == "__main__":
    sys.exit("run it as tests/exhaustive.py --campaign crashpoints")
