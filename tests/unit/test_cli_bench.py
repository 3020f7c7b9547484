"""`topics bench` in a checkout, and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from topics.cli.bench import bench, find


def test_in_a_checkout_it_is_the_benchmark() -> None:
    assert {"--only", "--quick", "--list"} <= {name for param in bench.params for name in param.opts}


@pytest.mark.parametrize("args", [[], ["--quick", "--only", "append-100"], ["nonsense"]])
def test_elsewhere_it_says_where_the_benchmark_is(tmp_path: Path, args: list[str]) -> None:
    done = CliRunner().invoke(find(tmp_path), args)
    assert done.exit_code == 2
    assert "make bench" in done.output


def test_elsewhere_help_says_it_too(tmp_path: Path) -> None:
    done = CliRunner().invoke(find(tmp_path), ["--help"])
    assert done.exit_code == 0
    assert "not installed" in done.output
