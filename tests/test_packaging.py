"""What the distribution says of itself is so: every package that is imported is declared where it is needed, and what
a wheel carries beside modules is in it.

Only syntax trees and pyproject.toml are looked at, and the metadata that the installation was built with.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

# Which extras a tree may rely on beside the dependencies of the distribution itself.
TREES: dict[str, set[str]] = {
    "topics": set(),
    "spark_pipeline": {"spark"},
    "pyspark_topics": {"spark"},
    "benchmarks": {"spark"},
    "tests": {"spark", "dev"},
}
PACKAGES = [tree for tree in TREES if tree not in ("benchmarks", "tests")]  # of the wheel

# Modules whose distribution has another name. Written down, because those of an extra need not be installed here.
DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "quart_trio": "quart-trio",
    "trio_websocket": "trio-websocket",
    "posix_ipc": "posix-ipc",
    "xdist": "pytest-xdist",
}
# Modules that a declared distribution always brings in a version of its choosing: two declarations could disagree.
BROUGHT = {"py4j": "pyspark"}


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def normalized(name: str) -> str:
    """As PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    assert match is not None, requirement
    return normalized(match[0])


def declared(tree: str) -> set[str]:
    """The distributions that a tree may import."""
    stated = project()["project"]
    requirements = list(stated["dependencies"])
    for extra in TREES[tree]:
        requirements += stated["optional-dependencies"][extra]
    return {name_of(requirement) for requirement in requirements}


def own_modules(root: Path) -> set[str]:
    """What an import in this repository means before any installed package: the trees, and in tests every file and
    folder of a family, which pytest and the children of a test put on the path."""
    return {*TREES, "__main__"} | {path.stem for path in (root / "tests").rglob("*") if path.suffix in ("", ".py")}


@cache
def mentioned(tree: str, root: Path) -> dict[Path, set[str]]:
    """By file, the names at the beginning of lines that look like an import: every import, because ruff (E401, E701,
    E702) gives each one a line of its own, and some lines of prose. Parsing the whole repository takes seconds."""
    looks_like = re.compile(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_]\w*)", re.M)
    return {path: set(looks_like.findall(path.read_text())) for path in sorted((root / tree).rglob("*.py"))}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """The top-level names of what a file imports, also inside functions, with their line."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0], node.lineno


def distribution_of(module: str) -> str:
    return DISTRIBUTIONS.get(module, BROUGHT.get(module, normalized(module)))


def undeclared(tree: str, root: Path, allowed: set[str]) -> list[str]:
    """The syntax tree decides, of files in which a name that is not allowed stands where an import would."""
    own = own_modules(root) if tree == "tests" else set(TREES)
    known = own | set(sys.stdlib_module_names)
    found = []
    for path, names in mentioned(tree, root).items():
        if all(name in known or distribution_of(name) in allowed for name in names):
            continue
        for module, line in imports(path):
            if module not in known and distribution_of(module) not in allowed:
                found.append(f"{path.relative_to(root)}, line {line}: {module} of {distribution_of(module)}")
    return found


@pytest.mark.parametrize("tree", TREES)
def test_every_imported_package_is_declared(tree: str) -> None:
    assert not undeclared(tree, ROOT, declared(tree))


def test_the_names_of_distributions_are_the_real_ones() -> None:
    """A declared module that is installed comes from the distribution that the table, or its own name, says."""
    installed = metadata.packages_distributions()
    modules = set.union(*(names for tree in TREES for names in mentioned(tree, ROOT).values()))
    foreign = {module for module in modules if distribution_of(module) in declared("tests")} - set(BROUGHT)
    known = foreign & set(installed)
    assert len(known) > 15
    for module in known:
        assert distribution_of(module) in {normalized(name) for name in installed[module]}, module


def test_the_rule_notices_what_it_is_for(tmp_path: Path) -> None:
    """A rule that never fires is no rule."""
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "model.py").write_text("")
    (tmp_path / "tests" / "unit" / "test_it.py").write_text("import model\nimport absent.part\n")
    (tmp_path / "topics").mkdir()
    (tmp_path / "topics" / "it.py").write_text(
        "import os.path\nimport model\nfrom . import near\nfrom topics import far\n"
        "def f():\n    from quart_trio.app import QuartTrio\n    import pyspark.sql\n    import msgspec\n"
        '    """\nimport absent\n"""\n'
    )
    allowed = {"msgspec"}
    assert undeclared("tests", tmp_path, allowed) == ["tests/unit/test_it.py, line 2: absent of absent"]
    assert undeclared("topics", tmp_path, allowed) == [
        "topics/it.py, line 2: model of model",
        "topics/it.py, line 6: quart_trio of quart-trio",
        "topics/it.py, line 7: pyspark of pyspark",
    ]


def test_nothing_is_declared_twice() -> None:
    """Two bounds of one package could disagree."""
    stated = project()["project"]
    groups = [stated["dependencies"], *stated["optional-dependencies"].values()]
    names = [name_of(requirement) for group in groups for requirement in group]
    assert sorted(names) == sorted(set(names))


# --- insides of packages -------------------------------------------------------------------------------

# What relies on something that a package does not document: its next version may have changed it, so that a version
# which is not known to work is not installed.
INSIDES = {
    "hypercorn": "topics/gateway/http2/h2.py",  # overrides methods of its protocol
    "h2": "topics/gateway/http2/h2.py",  # wraps its table of frames
    "hyperframe": "topics/gateway/http2/h2.py",
    "priority": "topics/gateway/http2/h2.py",
    "quart": "topics/gateway/http2/lane.py",  # quart-trio imports what newer ones lack
    "quart-trio": "topics/gateway/http2/lane.py",
    "websockets": "topics/gateway/streams/websocket.py",  # looks at its parser
    "msgspec": "topics/gateway/large/decoder.py",  # reads its error messages, which say where a value ends
    "pyspark": "spark_pipeline/source.py",
}
DOCUMENTED = {"_replace", "_make", "_asdict", "_fields", "_exit"}  # of the standard library, in spite of their names


def requirement_of(name: str) -> str:
    stated = project()["project"]
    groups = [stated["dependencies"], *stated["optional-dependencies"].values()]
    (found,) = [str(requirement) for group in groups for requirement in group if name_of(requirement) == name]
    return found


def private_names_of_others(paths: list[Path], root: Path) -> dict[str, set[str]]:
    """By file, private names that are used there and that none of the files defines, and private modules."""
    used: dict[str, set[str]] = {}
    own, known = set(DOCUMENTED), {"", *TREES, *sys.stdlib_module_names}
    for path in paths:
        file = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(), filename=file)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.setdefault(file, set()).add(node.attr)
            elif isinstance(node, ast.Attribute):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.ImportFrom) and (module := node.module or "").partition(".")[0] not in known:
                used.setdefault(file, set()).update([*module.split("."), *(each.name for each in node.names)])
    private = re.compile(r"_[a-zA-Z]\w*")
    found = {file: {name for name in names if private.fullmatch(name)} - own for file, names in used.items()}
    return {file: names for file, names in found.items() if names}


def test_what_is_not_documented_has_an_upper_bound() -> None:
    unbounded = [name for name in INSIDES if not re.search(r"<=?\s*\d", requirement_of(name))]
    assert not unbounded, "tests/test_packaging.py says who looks into them"
    for name, file in INSIDES.items():
        modules = {module for module, _ in imports(ROOT / file)}
        assert name in {distribution_of(module) for module in modules}, f"{file} does not import {name} any more"


def test_private_names_of_packages_are_used_where_it_is_known() -> None:
    """Whoever looks into another package names the file above, and the package gets an upper bound."""
    paths = [path for tree in PACKAGES for path in sorted((ROOT / tree).rglob("*.py"))]
    found = private_names_of_others(paths, ROOT)
    assert set(found) <= set(INSIDES.values()), found
    assert found["topics/gateway/http2/h2.py"] >= {"_frame_dispatch_table", "_headers_buffer"}


def test_private_names_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    def _b(self):\n        self._c = other._b()._replace(d=1)\n")
    (tmp_path / "e.py").write_text("from click._compat import x\nfrom rich import _y\nthing._z()\nthing._c\n")
    found = private_names_of_others([tmp_path / "a.py", tmp_path / "e.py"], tmp_path)
    assert found == {"e.py": {"_compat", "_y", "_z"}}


# --- what a wheel carries ------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in project()["tool"]["setuptools"]["package-data"][package]


@pytest.mark.parametrize("package", PACKAGES)
def test_files_beside_the_modules_are_in_the_wheel(package: str) -> None:
    patterns = project()["tool"]["setuptools"]["package-data"][package]
    carried = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    beside = {
        path
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md") and "__pycache__" not in path.parts
    }
    assert beside == carried


def test_the_wheel_has_these_packages_and_no_other() -> None:
    patterns = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {name for name in found if any(fnmatch(name, pattern) for pattern in patterns)} == set(PACKAGES)


def test_the_metadata_are_those_of_pyproject() -> None:
    """A wheel's, too: the installation was built from one. `make setup` builds it again when pyproject.toml changes."""
    stated = project()["project"]
    built = metadata.metadata(stated["name"])
    assert built.get_all("Classifier") == stated["classifiers"]
    assert built["Keywords"].split(",") == stated["keywords"]
    assert built["License-Expression"] == stated["license"] == "MIT"
    assert built["Requires-Python"] == stated["requires-python"]
    required = {name_of(line) for line in built.get_all("Requires-Dist") or []}
    groups = [stated["dependencies"], *stated["optional-dependencies"].values()]
    assert required == {name_of(requirement) for group in groups for requirement in group}


# --- what it is called ---------------------------------------------------------------------------------

OLD = "topics"  # on PyPI another project's; ours is called topicsd
OLD_FORMS = [
    rf"\b(?:pip[x3]?|uvx?)\b(?: +[\w-]+)* +(?:install|add|run|upgrade)\b[^\n`&;|#]*?(?<![\w./@-]){OLD}(?![\w.-])",
    rf"(?<![\w./]){OLD}\[(?:spark|dev)\b",
    rf"(?<![\w./]){OLD}(?:==|>=|~=|<)\d",
    rf"\b(?:version|metadata|distribution|requires|files|require|get_distribution)\(\s*['\"]{OLD}['\"]",
    rf"pypi\.org/\w+/{OLD}\b",
]
HISTORY = {"CHANGELOG.md"}  # what was so when it was written


def named_by_the_old_name(text: str) -> list[str]:
    return [found[0] for form in OLD_FORMS for found in re.finditer(form, text)]


def texts() -> Iterator[Path]:
    """Every file of the repository that people or programs read."""
    for name in (*TREES, "docs", "deploy", ".github", ".ci"):
        yield from (path for path in sorted((ROOT / name).rglob("*")) if "__pycache__" not in path.parts)
    yield from (path for path in sorted(ROOT.iterdir()) if path.name not in HISTORY)


def test_nothing_is_installed_or_looked_up_under_the_old_name() -> None:
    assert project()["project"]["name"] == "topicsd"
    found = []
    for path in texts():
        if path.is_file() and path.name != Path(__file__).name:
            try:
                text = path.read_text()
            except UnicodeDecodeError:
                continue
            found += [f"{path.relative_to(ROOT)}: {form}" for form in named_by_the_old_name(text)]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "pip install topics",
        "/opt/topics/bin/pip install --upgrade topics",
        "pip install -U 'topics'",
        "pipx install topics",
        "pipx upgrade topics",
        "uv pip install topics",
        "uv tool install topics",
        "uvx run topics",
        "uv add topics",
        "python3 -m pip install topics",
        "an image with `topics[spark]`",
        "pip install 'topics[spark]'",
        'metadata.version("topics")',
        "version('topics')",
        'importlib.metadata.distribution("topics")',
        "topics>=0.1",
        "topics==0.1.0",
        "https://pypi.org/project/topics/",
    ],
)
def test_the_old_form_is_noticed(text: str) -> None:
    assert named_by_the_old_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "/opt/topics/bin/pip install 'topicsd[spark]'",
        "pip install topicsd && topics serve",
        "pip install -e '.[dev]'",
        "pip install ./topics",
        "(`pip install 'topicsd[spark]'` on every node); `topics report` ships it",
        "pip uninstall topics",
        "apt install redis-server",
        "self.topics[name]",
        "topics[0]",
        'metadata.version("topicsd")',
    ],
)
def test_the_new_form_is_not(text: str) -> None:
    assert not named_by_the_old_name(text)


def test_the_classifiers_say_what_is_so() -> None:
    stated = project()["project"]
    assert len(stated["classifiers"]) == len(set(stated["classifiers"]))
    assert {"Framework :: Trio", "Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(stated["classifiers"])
    versions = [line.rpartition(" ")[2] for line in stated["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    assert versions, "no version of Python is named"
    assert f">={versions[0]}" == stated["requires-python"]
    assert sorted(versions, key=lambda version: int(version.partition(".")[2])) == versions
