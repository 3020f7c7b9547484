"""--help teaches: every command ends with examples, which parse, and run; exit codes are the same everywhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from effort import EXHAUSTIVE
from test_docs import read, rows

from topics.cli.main import VERBS, command_of, main
from topics.cli.shared.examples import examples_of
from topics.cli.shared.exits import EXIT_CODES

from .server import TOPICS, Server, clean_environment, eventually, run_topics


def commands() -> Iterator[tuple[str, click.Command]]:
    for verb in VERBS:
        command = command_of(verb)
        yield verb, command
        if isinstance(command, click.Group):
            for name, each in command.commands.items():
                yield f"{verb} {name}", each


COMMANDS = dict(commands())


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a pipeline; those in $(...) too, without redirections."""
    for part in re.findall(r"\$\((.*?)\)", line):
        yield from simple_commands(part)
    lexer = shlex.shlex(re.sub(r'"?\$\(.*?\)"?', "", line), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word in ("|", "&&", "&", ";"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def of_topics(line: str) -> Iterator[list[str]]:
    """The arguments of each `topics` in it."""
    for words in simple_commands(line):
        while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] == "sudo"):
            words = words[1:]
        if words and words[0].rpartition("/")[2] == "topics":
            args = words[1:]
            yield args[: args.index(">")] if ">" in args else args


def parse(args: list[str]) -> click.Command:
    """As the program would; raises what it would complain about."""
    command: click.Command = main
    ctx = main.make_context("topics", args)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        assert found is not None
        ctx = found.make_context(name, rest, parent=ctx)
        command = found
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_parse(name: str) -> None:
    command = COMMANDS[name]
    text = command.get_help(click.Context(command, info_name=f"topics {name}"))
    shown = text.partition("Examples:\n")[2].rstrip("\n").splitlines()
    lines = examples_of(command)
    assert lines, f"topics {name} --help has no examples"
    assert [line.partition("  #")[0].strip() for line in shown] == lines  # and nothing comes behind them
    used = [parse(args) for line in lines for args in of_topics(line)]
    assert all(list(of_topics(line)) or line.startswith("systemctl ") for line in lines)
    below = list(command.commands.values()) if isinstance(command, click.Group) else []
    assert command in used or any(each in used for each in below)


@pytest.mark.parametrize("line", ["topics tail --frm 0 jobs", "topics nothing", "topics wal dump --type x"])
def test_what_does_not_parse_is_noticed(line: str) -> None:
    (args,) = of_topics(line)
    with pytest.raises(click.UsageError):
        parse(args)


def test_the_exit_codes_of_the_document() -> None:
    table = read("docs/CLI.md").partition("| exit code | meaning |\n")[2].partition("\n\n")[0]
    documented = {int(cells[0]): cells[1] for cells in rows(table, start="") if cells[0].isdigit()}
    assert documented == EXIT_CODES
    text = run_topics("--help").stdout
    for code, meaning in EXIT_CODES.items():
        assert f"{code}  {meaning}" in text


def test_the_exit_codes_that_modules_name() -> None:
    """What a verb says of its exit codes at the top of its file is what the table has."""
    for path in (Path(__file__).parents[2] / "topics/cli").rglob("*.py"):
        said = re.search(r"Exit codes: (.*?)(?:\n\n|\"\"\")", path.read_text(), re.S)
        codes = {int(code) for code in re.findall(r"(?:^|; |, )(\d+) ", said[1].replace("\n", " "))} if said else set()
        assert codes <= set(EXIT_CODES), path.name


# --- they run ------------------------------------------------------------------------------------------

# Of these verbs every example can be run, but for those that need more than a server.
RUN = ("config", "ps", "shards", "rings", "publish", "queue", "snapshot", "topic", "shard", "wal", "segment", "verify")
NOT_RUN = {
    "topics report --snapshot topics-data/snapshots/nightly": "needs Spark",
    "tail -f app.log | topics publish logs --text": "does not end",
    "topics topic rm orders": "asks a person",
    "topics topic rm orders --if-empty --yes": "refuses: it is not empty",
    "topics snapshot create --dir /mnt/other/snapshots": "needs another disk",
    "topics snapshot rm monday tuesday": "needs two more snapshots",
    "topics segment dump 00000000000000000001.data --json": "needs a file of that name",
    "topics wal dump broken.wal --json | jq 'select(.damage)'": "needs a file of that name",
    "topics queue redrive transcode.dlq --to transcode-slow": "has nothing to move by then",
    "topics rings --interval 5 --json | jq '.[] | select(.problem)'": "is slow",
    "topics shards --interval 10": "is slow",
}
LAST = ("topics snapshot rm", "topics topic rm")


@pytest.mark.full
@pytest.mark.e2e
def test_the_examples_run(tmp_path: Path) -> None:
    server = Server(tmp_path / "topics-data", log=tmp_path / "server.log")
    try:
        server.wait_ready()
        with server.client() as api:
            api.put("transcode", type="queue", dead_letter="transcode.dlq", max_deliveries=1)
            api.append("transcode", 1, 2)
            api.append("orders", *range(30))
            (job,) = api.send("POST", "/v0/topics/transcode/claim", {"node": "w1", "max": 1})["claimed"]
            api.send("POST", "/v0/topics/transcode/nack", {"node": "w1", "seqs": [job["$seq"]]})
            api.send("POST", "/v0/topics/transcode/claim", {"node": "w1", "max": 1})  # the second time it is given up
            eventually(lambda: api.state("transcode.dlq").status == 200, what="a dead letter")
        (tmp_path / "records.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
        (tmp_path / "topics.toml").write_text(f'data_dir = "{server.data_dir}"\n')
        lines = [examples_of(COMMANDS[name]) for name in COMMANDS if name.split()[0] in RUN]
        assert set(NOT_RUN) <= {line for each in lines for line in each}
        runnable = [[line for line in each if line not in NOT_RUN] for each in lines]
        # All examples, or only the first of each command.
        todo = list(dict.fromkeys(line for each in runnable for line in (each if EXHAUSTIVE else each[:1])))
        todo.sort(key=lambda line: (line.startswith(LAST), "snapshot create" not in line))
        script = "set -o pipefail\njq() { cat >/dev/null; }\nseen=\n"  # what jq would print is not ours
        for line in todo:
            line = line.replace("/etc/topics/topics.toml", "topics.toml")
            line = line.replace("snapshot create nightly --json", "snapshot create again --json")
            line = line.replace(" --data-dir /backup/topics", "").replace(
                "shards --json", "shards --interval 0.1 --json"
            )
            script += f"{line} >out 2>&1 || {{ echo {shlex.quote(line)}; cat out; }}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=clean_environment(TOPICS_URL=server.url, PATH=f"{TOPICS.parent}:{clean_environment()['PATH']}"),
            timeout=120,
        )
        assert done.stdout + done.stderr == ""
    finally:
        server.close()
