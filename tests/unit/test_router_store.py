"""The file of rules: what is saved is what is loaded, a crash leaves the old rules or the new, damage is refused."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import examples

from topics.errors import CorruptData, FormatError
from topics.router.rules import Rules
from topics.router.store import RuleStore
from topics.storage.format import FORMAT_VERSION, SNAPSHOT_HEADER
from topics.storage.manifest import MANIFEST_NAME, Manifest, encode_manifest
from topics.storage.routers import ROUTERS_MAGIC, Past, Rule, decode_rules, encode_rules, routers_path

NAMES = st.text("abcXYZ019._:->", min_size=1, max_size=12)


def a_past(before: st.SearchStrategy[Past | None]) -> st.SearchStrategy[Past]:
    return st.builds(
        Past,
        hops=st.none() | st.integers(1, 9),
        until=st.integers(0, 2**53),
        passed=st.integers(0, 9),
        last=st.none() | st.integers(1, 9),
        before=before,
    )


RULES = st.builds(
    Rule,
    router=NAMES,
    source=NAMES,
    dest=NAMES,
    source_id=st.integers(0, 2**64 - 1),
    dest_id=st.integers(0, 2**64 - 1),
    since=st.integers(0, 2**53),
    created_ms=st.integers(0, 2**45),
    preserve_node=st.booleans(),
    preserve_tag=st.booleans(),
    filter=st.none() | st.tuples(st.just("tag"), st.sampled_from(["Eq", "Glob"]), st.text(max_size=5)).map(list),
    allow_cycle=st.booleans(),
    guarantee=st.sampled_from(["at_least_once", "exactly_once"]),
    past=st.recursive(st.none(), a_past, max_leaves=3),
)


def a_rule(number: int = 1) -> Rule:
    return Rule(f"r{number}", f"s{number}", f"d{number}", 1, 2, 3, 4)


def contents(rules: Rules) -> dict[str, Rule]:
    return {rule.router: rule for rule in rules}


@examples(100)
@given(rules=st.lists(RULES, max_size=6, unique_by=lambda rule: rule.router))
def test_what_is_encoded_is_decoded(rules: list[Rule]) -> None:
    assert decode_rules(encode_rules(rules), path="x") == rules


def test_a_new_folder_has_no_rules(tmp_path: Path) -> None:
    assert len(RuleStore(os.fspath(tmp_path)).load()) == 0
    assert list(tmp_path.iterdir()) == []


def test_rules_that_went_are_missed(tmp_path: Path) -> None:
    """The manifest knows that there were some: a process without them would close every pipe."""
    folder = os.fspath(tmp_path)
    for routers in (True, False):
        manifest = Manifest(format=FORMAT_VERSION, layout=1, shards=1, routers=routers)
        (tmp_path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
        if routers:
            with pytest.raises(CorruptData, match="routers: the rules of all routers are missing"):
                RuleStore(folder).load()
        else:
            assert len(RuleStore(folder).load()) == 0
    assert not os.path.exists(routers_path(folder)), "nothing is made in its place"


def test_a_rule_without_a_past_is_written_as_before(tmp_path: Path) -> None:
    rules = [msgspec.structs.replace(a_rule(), past=past) for past in (None, Past(2), Past(2, before=Past(1)))]
    fields = msgspec.msgpack.decode(encode_rules(rules)[SNAPSHOT_HEADER.size :])
    assert [len(each) for each in fields] == [12, 13, 13]
    assert [len(each[12]) for each in fields[1:]] == [4, 5]


def test_saved_and_loaded_again_and_again(tmp_path: Path) -> None:
    store = RuleStore(os.fspath(tmp_path))
    rules = Rules()
    for number in range(5):
        rules.put(a_rule(number))
        store.save(rules)
        assert contents(RuleStore(os.fspath(tmp_path)).load()) == contents(rules)
    for number in range(5):
        rules.remove(f"r{number}")
        store.save(rules)
        assert contents(store.load()) == contents(rules)
    assert [path.name for path in tmp_path.iterdir()] == [Path(routers_path(os.fspath(tmp_path))).name]


def test_a_crash_on_the_way_leaves_the_old_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RuleStore(os.fspath(tmp_path))
    store.save(Rules([a_rule(1)]))

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    for call in ("write", "fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, dies)
            with pytest.raises(KeyboardInterrupt):
                store.save(Rules([a_rule(2)]))
        assert contents(store.load()) == {"r1": a_rule(1)}
    store.save(Rules([a_rule(2)]))
    assert contents(store.load()) == {"r2": a_rule(2)}


def test_it_is_on_the_platter_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before it takes the name, the folder after."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def replaced(source: str, dest: str) -> None:
        done.append("replace")
        replace(source, dest)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    RuleStore(os.fspath(tmp_path)).save(Rules([a_rule()]))
    assert done == ["file", "replace", "folder"]


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    RuleStore(os.fspath(tmp_path)).save(Rules([a_rule(1), a_rule(2)]))
    monkeypatch.undo()
    assert len(RuleStore(os.fspath(tmp_path)).load()) == 2


# --- damage ------------------------------------------------------------------------------------------


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    good = encode_rules([a_rule()])
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x20
        if at in range(12, 16):
            continue  # reserved
        with pytest.raises((CorruptData, FormatError)):
            decode_rules(bytes(bad), path="x")
    for length in range(len(good)):
        with pytest.raises((CorruptData, FormatError)):
            decode_rules(good[:length], path="x")


def test_what_is_wrong_is_said_in_order() -> None:
    good = encode_rules([a_rule()])
    with pytest.raises(FormatError, match="not a file of router rules"):
        decode_rules(b"NOTOURS!" + good[8:], path="x")
    newer = SNAPSHOT_HEADER.pack(ROUTERS_MAGIC, FORMAT_VERSION + 1, 0, 0, 0)
    with pytest.raises(FormatError, match="x: "):
        decode_rules(newer, path="x")


def test_a_rule_of_an_older_version_takes_defaults() -> None:
    """Fields are only ever added at the end."""
    full = msgspec.msgpack.decode(msgspec.msgpack.encode([a_rule()]))
    assert len(full[0]) == 13
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode([full[0][:7]]), type=list[Rule])
    assert decoded == [a_rule()]
    longer = msgspec.msgpack.decode(msgspec.msgpack.encode([[*full[0], "later"]]), type=list[Rule])
    assert longer == [a_rule()]
