"""Which data folder a verb looks at: the option, the variable, the file of settings, the default, in this order."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from topics.cli.shared.place import data_dir_option, failures_told, folder_name


@click.command()
@data_dir_option
def look(data_dir: str | None) -> None:
    with failures_told():
        click.echo(folder_name(data_dir))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "topics.toml"
    path.write_text('port = 4001\ndata_dir = "/of/the/file"\n')
    return str(path)


@pytest.mark.parametrize(
    ("args", "environ", "folder"),
    [
        ([], {}, "./topics-data"),
        (["--config", "FILE"], {}, "/of/the/file"),
        ([], {"TOPICS_CONFIG": "FILE"}, "/of/the/file"),
        (["--config", "FILE"], {"TOPICS_CONFIG": "/nowhere"}, "/of/the/file"),
        (["--config", "FILE"], {"TOPICS_DATA_DIR": "/of/the/variable"}, "/of/the/variable"),
        (["--config", "FILE", "--data-dir", "/given"], {"TOPICS_DATA_DIR": "/of/the/variable"}, "/given"),
    ],
)
def test_who_wins(file: str, args: list[str], environ: dict[str, str], folder: str) -> None:
    unset: dict[str, str | None] = {"TOPICS_DATA_DIR": None, "TOPICS_CONFIG": None}
    given = {name: value.replace("FILE", file) for name, value in environ.items()}
    done = CliRunner(env={**unset, **given}).invoke(look, [arg.replace("FILE", file) for arg in args])
    assert (done.exit_code, done.stdout) == (0, f"{folder}\n")


def test_a_fault_elsewhere_in_the_file_keeps_nobody_from_looking(tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    path.write_text('prot = 4001\ndata_dir = "/of/the/file"\n')
    assert CliRunner(env={"TOPICS_DATA_DIR": None}).invoke(look, ["--config", str(path)]).stdout == "/of/the/file\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("data_dir = 7\n", "line 1"),
        ("data_dir = \n", "topics.toml"),
    ],
)
def test_a_folder_that_the_file_does_not_say(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "topics.toml"
    path.write_text(content)
    done = CliRunner(env={"TOPICS_DATA_DIR": None}).invoke(look, ["--config", str(path)])
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
