"""The rules of the tree, checked: who imports whom, who writes files, how large folders get, how modules are named.

Only the syntax tree is looked at, so a rule holds for code that no test happens to run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Who may import whom, downwards only. A room not listed here fails the test until somebody decides.
BASE = {"errors", "hosts", "keyfile", "keys", "limits", "settings", "__init__"}
ROOMS: dict[str, set[str]] = {
    "storage": set(),
    "shm": set(),
    "datadir": {"storage"},
    "actors": {"storage", "shm"},
    "walshard": {"storage", "shm", "actors"},
    "gateway": {"storage", "shm", "actors"},
    "queue": {"storage", "shm", "actors"},
    "router": {"storage", "shm", "actors"},
    "backup": {"storage", "datadir", "actors", "walshard"},
    "client": set(),
    "tools": {"storage", "datadir", "actors", "client"},
    "cli": {
        "storage",
        "shm",
        "datadir",
        "actors",
        "walshard",
        "gateway",
        "queue",
        "router",
        "backup",
        "client",
        "tools",
    },
}

# Inside a room: which packages the modules beside them may import (""), and which ones a package may. All of them may
# import the modules beside them, but for those that run a process. A package not listed here fails.
PARTS: dict[str, dict[str, set[str]]] = {
    "actors": {
        "": {"messages"},
        "messages": set(),
        "startup": set(),
        "inspect": {"startup"},
        "supervisor": {"startup", "inspect"},
    },
    "gateway": {
        "": {"admission", "api", "http1", "http2", "large", "metrics", "streams"},
        "metrics": {"api"},
        "admission": {"api", "metrics"},
        "large": {"api"},
        "api": {"admission", "large", "metrics", "streams"},
        "streams": {"admission", "api", "http1", "large"},
        "http1": {"admission", "api", "large", "metrics", "streams"},
        "http2": {"admission", "api", "http1", "large", "streams"},
    },
    "walshard": {
        "": {"forwards", "live", "log", "segments", "tiering", "topic"},
        "topic": {"forwards", "segments", "tiering"},
        "forwards": {"log", "tiering", "topic"},
        "live": {"log", "tiering", "topic"},
        "log": {"forwards", "segments", "tiering", "topic"},
        "segments": {"forwards", "log", "tiering", "topic"},
        "tiering": {"log", "segments", "topic"},
    },
    "datadir": {
        "": set(),
        "view": set(),
        "fsck": {"view"},
        "repair": {"view", "fsck"},
    },
    "cli": {
        "": {"shared"},
        "shared": set(),
        "server": {"shared"},
        "client": {"shared", "server"},
        "datadir": {"shared"},
    },
}
PROCESSES = {"process", "coordinator"}
MOST_MODULES = 16  # of a folder

# Third-party modules that belong to one room alone.
OWNED = {
    "posix_ipc": {"shm"},
    "quart": {"gateway"},
    "quart_trio": {"gateway"},
    "hypercorn": {"gateway"},
    "h2": {"gateway"},
    "hyperframe": {"gateway"},
    "httptools": {"gateway"},
    "websockets": {"gateway"},
    "click": {"benchmarks", "cli"},
    "prometheus_client": {"gateway"},
    "rich": {"benchmarks", "cli"},
}
NEVER = {"asyncio", "multiprocessing"}
STORAGE_NEEDS = {"msgspec", "xxhash"}  # all that an executor of Spark has

# What changes files, and where that may happen.
WRITES = {
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "fsync",
    "fdatasync",
    "rename",
    "renames",
    "replace",
    "posix_fallocate",
    "ftruncate",
    "truncate",
    "link",
    "symlink",
    "sendfile",
}
MAY_WRITE = {
    "topics/backup/disk.py",
    "topics/walshard/log/disk.py",
    "topics/actors/startup/coldtier.py",
    "topics/actors/startup/datadir_lock.py",
    "topics/actors/startup/listener.py",
    "topics/router/store.py",
    # Notes of a verb beside the data, and links of a snapshot.
    "topics/tools/import_log.py",
    "topics/tools/redrive_journal.py",
    "topics/tools/snapshot_links.py",
}
# Shared memory is reserved with fallocate too, but it is no file of ours.
MAY_RESERVE = {"topics/shm/region.py"}

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def for_each_module(*folders: str) -> Callable[[Callable[[Path], None]], Callable[..., None]]:
    """A rule of one module as one test of all of them, which names every module that breaks it."""

    def decorate(rule: Callable[[Path], None]) -> Callable[..., None]:
        @wraps(rule, assigned=("__name__", "__doc__"))
        def check(only: Path | None = None) -> None:
            faults = []
            paths = [only] if only is not None else [path for folder in folders for path in modules(folder)]
            assert paths, folders
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    faults.append(f"{name_of(path)}: {error}")
            assert not faults, "\n".join(faults)

        del check.__wrapped__  # pytest would look for its arguments
        return check

    return decorate


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1].removesuffix(".py") if parts[0] == "topics" else parts[0]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module a file imports, also inside functions, as dotted names with their line."""
    package = path.relative_to(ROOT).parent.as_posix().replace("/", ".")
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield base, node.lineno
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def rooms_imported(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imports(path):
        parts = name.split(".")
        if parts[0] == "topics" and len(parts) > 1:
            yield parts[1], line


def test_every_room_is_known() -> None:
    found = {room_of(path) for path in modules("topics")}
    assert found <= set(ROOMS) | BASE


@for_each_module("topics")
def test_imports_go_downwards(path: Path) -> None:
    room = room_of(path)
    allowed = BASE | {"__version__", room} | ROOMS.get(room, set())
    if room in BASE:
        allowed = BASE | {"__version__"}
    wrong = [f"line {line}: topics.{other}" for other, line in rooms_imported(path) if other not in allowed]
    assert not wrong, f"{name_of(path)} may import {sorted(allowed)}"


def package_of(names: Sequence[str], room: str) -> str:
    """The package inside a room that a dotted name leads to; "" is a module beside the packages."""
    inner = names[2] if len(names) > 2 and list(names[:2]) == ["topics", room] else ""
    return inner if (ROOT / "topics" / room / inner / "__init__.py").exists() else ""


def test_every_package_of_a_room_is_known() -> None:
    found = {(path.parent.parent.name, path.parent.name) for path in (ROOT / "topics").glob("*/*/__init__.py")}
    assert found == {(room, package) for room, parts in PARTS.items() for package in parts if package}


@for_each_module("topics")
def test_packages_import_what_is_theirs(path: Path) -> None:
    room = room_of(path)
    if room in BASE:
        return
    package = package_of(path.relative_to(ROOT).parts[:-1], room)
    allowed = PARTS.get(room, {}).get(package, set()) | {package, ""}
    for name, line in imports(path):
        parts = name.split(".")
        if parts[:2] == ["topics", room] and len(parts) > 2:
            assert package_of(parts, room) in allowed, f"line {line}: {name}"
            assert parts[2] not in PROCESSES, f"line {line}: {name}"


def test_no_folder_has_too_many_modules() -> None:
    for tree in ("topics", "spark_pipeline", "pyspark_topics", "benchmarks"):
        for folder in {path.parent for path in modules(tree)}:
            count = len(list(folder.glob("*.py")))
            assert count <= MOST_MODULES, f"{name_of(folder)} has {count} modules: sort them into packages"


@for_each_module("topics", "benchmarks")
def test_third_party_modules_stay_in_their_room(path: Path) -> None:
    room = room_of(path)
    wrong = []
    for name, line in imports(path):
        top = name.split(".")[0]
        if top in NEVER or (top in OWNED and room not in OWNED[top]):
            wrong.append(f"line {line}: {name}")
    assert not wrong


@for_each_module("topics/storage", "topics/datadir")
def test_storage_needs_only_what_spark_has(path: Path) -> None:
    for name, line in imports(path):
        top = name.split(".")[0]
        known = top in sys.stdlib_module_names or top in STORAGE_NEEDS or top == "topics"
        assert known, f"line {line}: {name}"


@for_each_module("topics/storage")
def test_storage_opens_no_file_and_asks_no_time(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("open", "io.open"), f"line {node.lineno}"
            assert not called.startswith(("time.", "random.", "datetime.")), f"line {node.lineno}: {called}"
            assert not (called.startswith("os.") and not called.startswith("os.path.")), f"line {node.lineno}: {called}"


def calls_that_write(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.startswith("os.") and called[3:] in WRITES:
                yield f"line {node.lineno}: {called}"
            elif called in ("open", "io.open") and _writes(node):
                yield f"line {node.lineno}: {called} for writing"
            elif called.endswith((".write_text", ".write_bytes")) or called.startswith("shutil."):
                yield f"line {node.lineno}: {called}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in WRITES:
                    yield f"line {node.lineno}: from os import {alias.name}"


def _writes(call: ast.Call) -> bool:
    mode = call.args[1] if len(call.args) > 1 else None
    for keyword in call.keywords:
        if keyword.arg == "mode":
            mode = keyword.value
    if mode is None:
        return False
    return not isinstance(mode, ast.Constant) or any(letter in str(mode.value) for letter in "wax+")


@for_each_module("topics")
def test_files_are_written_in_one_module_alone(path: Path) -> None:
    if name_of(path) in MAY_WRITE or room_of(path) == "cli":
        return
    found = list(calls_that_write(path))
    if name_of(path) in MAY_RESERVE:
        found = [call for call in found if "posix_fallocate" not in call]
    assert not found


@for_each_module("benchmarks")
def test_the_benchmark_stands_outside_the_server(path: Path) -> None:
    allowed = BASE | {"storage", "shm", "actors"}
    wrong = [f"line {line}: topics.{other}" for other, line in rooms_imported(path) if other not in allowed]
    assert not wrong


@for_each_module("topics", "spark_pipeline", "pyspark_topics")
def test_the_benchmark_is_imported_by_nothing_that_is_installed(path: Path) -> None:
    assert "benchmarks" not in {name.split(".")[0] for name, _ in imports(path)}


def test_spark_imports_what_reads_files_alone() -> None:
    for path in modules("spark_pipeline"):
        rooms = {room for room, _ in rooms_imported(path)}
        assert rooms <= {"storage", "datadir", "errors"}, name_of(path)


@for_each_module("topics", "benchmarks")
def test_names_say_what_is_inside(path: Path) -> None:
    words = {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")}
    assert not words & FORBIDDEN_NAMES


@for_each_module("topics", "benchmarks")
def test_every_module_says_what_it_owns(path: Path) -> None:
    text = ast.get_docstring(tree_of(path))
    assert text, "a module opens with a docstring"


@for_each_module("topics")
def test_foreign_bytes_are_refused_by_exception_and_not_by_assert(path: Path) -> None:
    """asserts state what the types can't; in the modules that read bytes of others there are none."""
    if room_of(path) in ("storage", "shm"):
        found = [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
        assert not found


def test_the_rules_notice_what_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that never fires is no rule."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    bad = tmp_path / "topics" / "walshard" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "import os\nfrom os import fsync\nfrom topics.gateway import auth\nfrom . import x\nimport quart\n"
        "def f():\n    from topics import queue\n    os.pwrite(1, b'', 0)\n    open('x', mode='ab')\n    open('x')\n"
        "    os.replace('a', 'b')\n"
    )
    assert {room for room, _ in rooms_imported(bad)} == {"gateway", "queue", "walshard"}
    found = [call.split(": ")[1] for call in calls_that_write(bad)]
    assert sorted(found) == ["from os import fsync", "open for writing", "os.pwrite", "os.replace"]
    with pytest.raises(AssertionError):
        test_imports_go_downwards(bad)
    with pytest.raises(AssertionError):
        test_third_party_modules_stay_in_their_room(bad)
    with pytest.raises(AssertionError):
        test_files_are_written_in_one_module_alone(bad)
    with pytest.raises(AssertionError):
        test_every_module_says_what_it_owns(bad)
    for package in ("log", "topic", "unheard_of"):
        (bad.parent / package).mkdir()
        (bad.parent / package / "__init__.py").write_text("")
    for number, wrong in enumerate(
        ("topics.walshard.log.wal import Wal", "topics.walshard import log", ".. import process")
    ):
        inner = bad.parent / "topic" / f"bad{number}.py"
        inner.write_text(f"from {wrong}\n")
        with pytest.raises(AssertionError):
            test_packages_import_what_is_theirs(inner)
    good = bad.parent / "topic" / "good.py"
    good.write_text("from topics.walshard.engine import Engine\nfrom topics.walshard.topic import tags\n")
    test_packages_import_what_is_theirs(good)
    with pytest.raises(AssertionError):
        test_every_package_of_a_room_is_known()
    test_no_folder_has_too_many_modules()
    for number in range(MOST_MODULES):
        (bad.parent / "topic" / f"m{number}.py").write_text("")
    with pytest.raises(AssertionError):
        test_no_folder_has_too_many_modules()
