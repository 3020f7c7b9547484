"""`topics install-service`: writes the units that let systemd run the server, and says what to do then.

The files in deploy/systemd are the source; only the path of the program is put in. Nothing is started or enabled, and
no user is made: the commands for that are printed. A file that is there and differs is somebody's work: nothing is
written unless --force is given, and settings and keys are not even overwritten then. Each file appears whole or not at
all.

Exit codes: 0 written, or nothing to do; 1 not, and stderr says why; 2 the command was not understood.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import NoReturn

import click
import msgspec

PROGRAM = "/opt/topics/bin/topics"  # as the sources have it
_UNITS = "etc/systemd/system"
# What is in the sources -> where it goes
PLACES = {
    "topics.service": f"{_UNITS}/topics.service",
    "topics.socket": f"{_UNITS}/topics.socket",
    "topics-report.service": f"{_UNITS}/topics-report.service",
    "topics-report.timer": f"{_UNITS}/topics-report.timer",
    "topics.sysusers": "etc/sysusers.d/topics.conf",
    "topics.tmpfiles": "etc/tmpfiles.d/topics.conf",
    "topics.toml": "etc/topics/topics.toml",
}
_MAY_BE_MISSING = frozenset({"topics-report.service", "topics-report.timer"})
_OF_THE_OPERATOR = frozenset({"topics.toml"})
KEYS = "etc/topics/api-keys"
_KEYS_TEXT = """\
# Who may use the server: secret[:scopes[:prefixes]], one to a line. This one may do everything. `systemctl restart
# topics` makes a change count.
{secret}
"""


class Planned(msgspec.Struct, frozen=True):
    """A file that belongs there, and what will become of it."""

    path: str
    text: str
    fate: str  # new, same, changed or kept
    mode: int = 0o644


@click.command("install-service")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("--prefix", default="/", show_default=True, help="Write below this folder, as packagers do.")
@click.option("--program", help="The topics program that the units start (default: this one).")
@click.option("--force", is_flag=True, help="Overwrite units that were changed; settings and keys never are.")
def install_service(dry_run: bool, prefix: str, program: str | None, force: bool) -> None:
    """Write the systemd units of the server, and say what to run next.

    \b
      topics install-service --dry-run
      sudo /opt/topics/bin/topics install-service
      topics install-service --prefix ./image --program /usr/bin/topics
    """
    program = program or _own_program()
    if not os.path.isabs(program) or re.search(r"[\s%\"'\\$;]", program):
        _fail(f"--program {program}: expected an absolute path without blanks, quotes, % and $, as units need it")
    try:
        files = plan(prefix, program)
    except OSError as exc:
        _fail(f"--prefix {prefix}: {exc.filename} can't be read: {exc.strerror}")
    changed = [file.path for file in files if file.fate == "changed"]
    for file in files if dry_run else ():
        click.echo(f"{_WORDS[file.fate]:<14} {file.path}")
    if changed and not force:
        _fail(
            f"changed since it was written: {', '.join(changed)}. Nothing was written. Move your changes to a drop-in "
            "(`systemctl edit`) and use --force, or leave it as it is"
        )
    if not dry_run:
        for file in files:
            _carry_out(file)
    if program.startswith(("/home/", "/root/", "/run/user/")):
        click.echo(
            f"topics: the service can't see {program}: its unit has ProtectHome=yes. Install the program elsewhere, "
            "for example with `python3 -m venv /opt/topics`, or name it with --program",
            err=True,
        )
    if os.path.abspath(prefix) == "/":
        click.echo(_NEXT.format(keys=f"/{KEYS}"), nl=False)


_WORDS = {"new": "would write", "same": "is there", "changed": "was changed", "kept": "stays as it is"}
_NEXT = """
Next, as root:
  systemd-sysusers                                   # the users topics and topics-report
  systemd-tmpfiles --create topics.conf              # /var/lib/topics
  systemctl daemon-reload
  systemctl enable --now topics.socket topics.service
  systemctl status topics                            # how far it is, and who is missing

The address is in topics.socket, settings are in /etc/topics/topics.toml (`topics config check` reads them), a key is in
{keys}. For a report every night, with Java and topicsd[spark] there: systemctl enable --now topics-report.timer
"""


def plan(prefix: str, program: str) -> list[Planned]:
    """Every file that belongs there; nothing is written."""
    files = []
    for name, text in sources(program).items():
        path = os.path.join(prefix, PLACES[name])
        there = _read(path)
        if there is None:
            fate = "new"
        elif there == text:
            fate = "same"
        else:
            fate = "kept" if name in _OF_THE_OPERATOR else "changed"
        files.append(Planned(path, text, fate))
    keys = os.path.join(prefix, KEYS)
    exists = os.path.lexists(keys)
    secret = secrets.token_urlsafe(32)
    files.append(Planned(keys, "" if exists else _KEYS_TEXT.format(secret=secret), "kept" if exists else "new", 0o600))
    return files


def sources(program: str) -> dict[str, str]:
    """Name -> text, with the program's path put in."""
    folder = _source_folder()
    found = {}
    for name in PLACES:
        path = folder / name
        if name in _MAY_BE_MISSING and not path.exists():
            continue
        found[name] = path.read_text().replace(PROGRAM, program)
    return found


def _source_folder() -> Path:
    """In a checkout it is deploy/systemd; an installation has it among its data."""
    checkout = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
    installed = Path(sys.prefix) / "share" / "topics" / "systemd"
    for folder in (checkout, installed):
        if (folder / "topics.service").exists():
            return folder
    _fail(f"the units are missing from this installation: looked in {checkout} and {installed}. Install topics again")


def _own_program() -> str:
    """The script beside the interpreter that runs this: what a service needs is the installation, not the shell's path
    to it."""
    return str(Path(sys.executable).with_name("topics"))


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _carry_out(file: Planned) -> None:
    if file.fate in ("same", "kept"):
        click.echo(f"{_WORDS[file.fate]:<14} {file.path}")
        return
    temporary = f"{file.path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(file.path), exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode)
        with open(fd, "w", encoding="utf-8") as out:
            os.fchmod(fd, file.mode)
            out.write(file.text)
            out.flush()
            os.fsync(fd)
        os.replace(temporary, file.path)
    except OSError as exc:
        hint = "run it as root, or choose another --prefix" if isinstance(exc, PermissionError) else "see --prefix"
        _fail(f"can't write {file.path}: {exc.strerror}; {hint}")
    click.echo(f"{'wrote':<14} {file.path}")


def _fail(text: str) -> NoReturn:
    click.echo(f"topics: {text}", err=True)
    sys.exit(1)
