"""The systemd units: what they promise about the server is so, systemd finds nothing wrong with them, and
`topics install-service` writes them without treading on anybody's work."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from topics import limits
from topics.cli.server.install_service import PLACES, PROGRAM, install_service, sources
from topics.settings import CREDENTIAL, load

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


class Unit:
    """A unit file: names may stand several times, and an empty value begins anew."""

    def __init__(self, text: str) -> None:
        self.values: dict[str, list[str]] = {}
        for line in text.splitlines():
            if line and not line.startswith(("#", "[")):
                name, _, value = line.partition("=")
                self.values.setdefault(name, []).append(value)

    def __getitem__(self, name: str) -> str:
        (value,) = self.values[name]
        return value


@pytest.fixture
def service() -> Unit:
    return Unit(sources(PROGRAM)["topics.service"])


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|min|h)?", text)
    assert match, text
    return int(match[1]) * {"s": 1, "min": 60, "h": 3600, None: 1}[match[2]]


def test_the_units_and_the_server_mean_the_same(service: Unit) -> None:
    assert service["Type"] == "notify"
    assert service["ExecStart"] == f"{PROGRAM} serve"
    assert service["ExecReload"] == f"{PROGRAM} reload"
    assert service["LoadCredential"].partition(":")[0] == CREDENTIAL
    assert f"/{PLACES['topics.toml']}" in service["Environment"]
    # Three ranks are stopped one after the other; being killed meanwhile would cost the shards' last snapshots.
    assert seconds(service["TimeoutStopSec"]) > 3 * limits.STOP_TIMEOUT_MS / 1_000
    # The server replaces a process that hangs long before the manager replaces the server.
    assert seconds(service["WatchdogSec"]) > 3 * limits.HEARTBEAT_MISSES * limits.HEARTBEAT_MS / 1_000
    assert int(service["LimitNOFILE"]) >= 4 * limits.MAX_CONNECTIONS
    assert service["RestartPreventExitStatus"] == "2"


def test_the_settings_that_come_with_the_units_are_right(tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    text = sources(PROGRAM)["topics.toml"]
    path.write_text(text)
    assert load({}, config=str(path)).settings.data_dir == "/var/lib/topics"
    # And so are those that an operator would uncomment.
    path.write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.M))
    found = load({}, config=str(path))
    assert sum(origin.kind == "file" for origin in found.origins.values()) >= 6


def test_the_socket_is_one_that_the_server_takes() -> None:
    unit = Unit(sources(PROGRAM)["topics.socket"])
    assert unit["ListenStream"] == "127.0.0.1:4000"
    assert "Accept" not in unit.values


@needs_systemd
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    for name, text in sources("/bin/true").items():
        if name.endswith((".service", ".socket", ".timer")):
            (tmp_path / name).write_text(text)
    units = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "topics" in line]
    assert (done.returncode, said) == (0, [])


@needs_systemd
def test_the_service_is_locked_up(tmp_path: Path) -> None:
    path = tmp_path / "topics.service"
    path.write_text(sources("/bin/true")["topics.service"])
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    level = re.search(r"exposure level for topics.service: ([\d.]+)", done.stdout)
    assert level, done.stdout + done.stderr
    assert float(level[1]) <= 2.0
    assert done.returncode == 0


# --- topics install-service ---------------------------------------------------------------------------


def install(prefix: Path, *args: str, program: str = "/srv/topics/bin/topics") -> Result:
    return CliRunner().invoke(install_service, ["--prefix", str(prefix), "--program", program, *args])


def files(prefix: Path) -> dict[str, str]:
    return {str(path.relative_to(prefix)): path.read_text() for path in prefix.rglob("*") if path.is_file()}


def test_everything_is_written_with_the_path_of_the_program(tmp_path: Path) -> None:
    done = install(tmp_path)
    assert done.exit_code == 0, done.output
    found = files(tmp_path)
    assert set(found) == {*PLACES.values(), "etc/topics/api-keys"}
    assert "ExecStart=/srv/topics/bin/topics serve" in found["etc/systemd/system/topics.service"]
    assert not [path for path, text in found.items() if PROGRAM in text and path.startswith("etc/systemd")]
    assert (tmp_path / "etc/topics/api-keys").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "etc/systemd/system/topics.service").stat().st_mode & 0o777 == 0o644


def test_the_first_key_can_be_read_by_the_server_and_is_never_the_same(tmp_path: Path) -> None:
    keys = []
    for name in ("a", "b"):
        assert install(tmp_path / name).exit_code == 0
        path = tmp_path / name / "etc/topics/api-keys"
        (key,) = load({"TOPICS_API_KEYS_FILE": str(path)}).settings.api_keys
        keys.append(key.digest)
        assert path.read_text().splitlines()[-1] not in install(tmp_path / name).output
    assert keys[0] != keys[1]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = install(tmp_path, "--dry-run")
    assert done.exit_code == 0
    assert files(tmp_path) == {}
    assert done.output.count("would write") == len(PLACES) + 1


def test_again_changes_nothing(tmp_path: Path) -> None:
    install(tmp_path)
    before = files(tmp_path)
    done = install(tmp_path)
    assert (done.exit_code, files(tmp_path)) == (0, before)
    assert "wrote" not in done.output


def test_what_somebody_changed_is_not_overwritten(tmp_path: Path) -> None:
    install(tmp_path)
    unit = tmp_path / "etc/systemd/system/topics.service"
    ours = unit.read_text()
    unit.write_text(ours + "# mine\n")
    (tmp_path / "etc/systemd/system/topics.socket").unlink()
    done = install(tmp_path)
    assert done.exit_code == 1
    assert str(unit) in done.output
    assert "--force" in done.output
    assert unit.read_text().endswith("# mine\n")
    assert not (tmp_path / "etc/systemd/system/topics.socket").exists(), "all or nothing"
    assert install(tmp_path, "--force").exit_code == 0
    assert unit.read_text() == ours


def test_settings_and_keys_of_the_operator_stay_even_so(tmp_path: Path) -> None:
    install(tmp_path)
    for name in ("topics.toml", "api-keys"):
        (tmp_path / "etc/topics" / name).write_text("# mine\n")
    assert install(tmp_path, "--force").exit_code == 0
    for name in ("topics.toml", "api-keys"):
        assert (tmp_path / "etc/topics" / name).read_text() == "# mine\n"


@pytest.mark.parametrize("program", ["topics", "./topics", "/srv/my topics", "/srv/%h/topics"])
def test_programs_that_a_unit_can_not_name(program: str, tmp_path: Path) -> None:
    done = install(tmp_path, program=program)
    assert done.exit_code == 1
    assert "--program" in done.output
    assert files(tmp_path) == {}


def test_a_program_in_a_home_is_written_with_a_warning(tmp_path: Path) -> None:
    done = install(tmp_path, program="/home/ada/venv/bin/topics")
    assert done.exit_code == 0
    assert "ProtectHome" in done.output


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file where a folder should be")
    done = install(tmp_path)
    assert done.exit_code == 1
    assert "--prefix" in done.output
    assert "Traceback" not in done.output
