from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from topics import settings as settings_module
from topics.errors import SettingsError
from topics.settings import Origin, Settings, from_environment, load, read_config, require_keys, strangers


def test_defaults_bind_to_loopback() -> None:
    settings = from_environment({})
    assert settings.host == "127.0.0.1"
    assert settings.port == 4000
    assert settings.loopback
    assert 1 <= settings.wal_shards <= 8


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1", "127.0.0.1", 4000),
        ("127.0.0.1:5000", "127.0.0.1", 5000),
        ("localhost:0", "localhost", 0),
        ("::1", "::1", 4000),
        ("[::1]", "::1", 4000),
        ("[::1]:5000", "::1", 5000),
    ],
)
def test_host_may_carry_the_port(text: str, host: str, port: int) -> None:
    settings = from_environment({"TOPICS_HOST": text})
    assert (settings.host, settings.port) == (host, port)


def test_port_wins_over_the_port_in_host() -> None:
    assert from_environment({"TOPICS_HOST": "127.0.0.1:1", "TOPICS_PORT": "2"}).port == 2


@pytest.mark.parametrize("text", ["[::1", "[::1]x", "[::1]:x", "127.0.0.1:99999"])
def test_host_that_can_not_be_read(text: str) -> None:
    with pytest.raises(SettingsError, match="TOPICS_HOST"):
        from_environment({"TOPICS_HOST": text})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TOPICS_PORT", "http"),
        ("TOPICS_PORT", "65536"),
        ("TOPICS_PORT", "-1"),
        ("TOPICS_WAL_SHARDS", "0"),
        ("TOPICS_WAL_SHARDS", "65"),
        ("TOPICS_GATEWAYS", "1.5"),
        ("TOPICS_RING_BYTES", "10"),
        ("TOPICS_LOG", "loud"),
        ("TOPICS_ALLOW_INSECURE_NO_AUTH", "perhaps"),
        ("TOPICS_SPIN_US", "soon"),
        ("TOPICS_HEARTBEAT_MS", "1"),
    ],
)
def test_value_that_can_not_be_used_names_its_variable(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=name):
        from_environment({name: text})


def test_empty_means_unset() -> None:
    assert from_environment({"TOPICS_PORT": "", "TOPICS_COLD_DIR": ""}) == from_environment({})


def test_every_reader_belongs_to_a_field_and_every_field_has_one() -> None:
    assert set(settings_module._READERS) | {"api_keys"} == set(Settings.__struct_fields__)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.test"])
def test_a_public_address_without_keys_is_refused_unless_insisted(host: str) -> None:
    with pytest.raises(SettingsError, match="TOPICS_ALLOW_INSECURE_NO_AUTH"):
        from_environment({"TOPICS_HOST": host})
    assert from_environment({"TOPICS_HOST": host, "TOPICS_ALLOW_INSECURE_NO_AUTH": "1"}).host == host


def test_spin_auto() -> None:
    assert from_environment({"TOPICS_SPIN_US": "auto"}).spin_us == -1
    assert from_environment({"TOPICS_SPIN_US": "50"}).spin_us == 50


def test_settings_travel_to_children_unchanged() -> None:
    settings = from_environment({"TOPICS_DATA_DIR": "/tmp/ä b", "TOPICS_COLD_DIR": "cold"})
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


# --- the file ------------------------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "topics.toml"
    path.write_text(text)
    return str(path)


EVERY_KIND = """\
host = "127.0.0.1"
port = 4001
elastic = false
log = "debug"
spin_us = "auto"
data_dir = "/srv/ä b"
allowed_hosts = ["App.example.com.", "*.Internal", "[2001:DB8:0::1]"]
allowed_origins = ["https://App.example.com/", "http://localhost:3000"]
cold_dir = ""
"""


def test_a_file_with_every_kind_of_value(tmp_path: Path) -> None:
    found = load({}, config=write(tmp_path, EVERY_KIND))
    settings = found.settings
    assert (settings.host, settings.port, settings.elastic, settings.log) == ("127.0.0.1", 4001, False, "debug")
    assert (settings.spin_us, settings.data_dir, settings.cold_dir) == (-1, "/srv/ä b", None)
    assert settings.allowed_hosts == ("app.example.com", "*.internal", "2001:db8::1")
    assert settings.allowed_origins == ("https://app.example.com", "http://localhost:3000")
    assert found.origins["port"] == Origin("file", f"{found.file}, line 2")
    assert found.origins["cold_dir"] == found.origins["gateways"] == Origin("default")


def test_every_setting_can_stand_in_the_file_with_its_default(tmp_path: Path) -> None:
    """Written as a file and read again, the defaults are the defaults."""
    defaults = {field: getattr(Settings(), field) for field in settings_module._READERS}
    lines = [f"{field} = {_toml(value)}" for field, value in defaults.items() if value not in (None, -1)]
    found = load({}, config=write(tmp_path, "\n".join(lines)))
    assert found.settings == Settings()
    assert {field for field, origin in found.origins.items() if origin.kind == "file"} >= set(defaults) - {
        *("port_file", "cold_dir", "spin_us"),
    }


def _toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def test_variables_win_over_the_file_and_options_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "port = 1\ngateways = 2\nmax_topics = 3\n")
    found = load({"TOPICS_PORT": "10", "TOPICS_GATEWAYS": "11"}, config=path, options={"TOPICS_PORT": "100"})
    assert (found.settings.port, found.settings.gateways, found.settings.max_topics) == (100, 11, 3)
    kinds = {field: found.origins[field].kind for field in ("port", "gateways", "max_topics", "max_limit")}
    assert kinds == {"port": "option", "gateways": "environment", "max_topics": "file", "max_limit": "default"}


def test_a_port_in_the_host_of_a_variable_wins_over_the_port_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'port = 1\nhost = "127.0.0.1:2"\n')
    assert load({}, config=path).settings.port == 1
    assert load({"TOPICS_HOST": "127.0.0.9:3"}, config=path).settings.port == 3
    assert load({"TOPICS_PORT": "5"}, config=path, options={"TOPICS_HOST": "localhost:6"}).settings.port == 6


def test_the_file_may_be_named_by_a_variable_over_which_the_option_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "port = 7\n")
    assert from_environment({"TOPICS_CONFIG": path}).port == 7
    assert load({"TOPICS_CONFIG": "/nowhere"}, config=path).settings.port == 7
    assert from_environment({"TOPICS_CONFIG": ""}).port == 4000
    with pytest.raises(SettingsError, match=r"/nowhere: can't be read: .*TOPICS_CONFIG"):
        from_environment({"TOPICS_CONFIG": "/nowhere"})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("prot = 1", ["no setting", '"prot"', "did you mean port?"]),
        ("max-topics = 1", ["did you mean max_topics?"]),
        ("TOPICS_PORT = 1", ["did you mean port?"]),
        ("xyzzy = 1", ["no setting", "CONFIGURATION.md"]),
        ('port = "4001"', ["expected a whole number from 0 to 65535", "write 4001"]),
        ("port = 65536", ["port = 65536", "from 0 to 65535"]),
        ("port = 4000.5", ["4000.5", "a whole number"]),
        ("port = true", ["a whole number"]),
        ("port = 2026-01-01", ["a whole number"]),
        ("elastic = 1", ["true or false", "write true"]),
        ('elastic = "no"', ["true or false", "write false"]),
        ('log = "loud"', ['"debug", "info", "warning" or "error"']),
        ("log = 3", ['"debug"']),
        ("spin_us = 1001", ['"auto"', "from 0 to 1000"]),
        ("data_dir = 3", ["text in quotes", 'write "3"']),
        ('host = "[::1"', ["[::1]:4000"]),
        ('allowed_origins = "https://a.example"', ['write ["https://a.example"]']),
        ('allowed_origins = ["a.example"]', ["a list of origins"]),
        ("allowed_origins = [1]", ["a list of origins"]),
        ('allowed_hosts = "a.example"', ["a list of hosts", 'write ["a.example"]']),
        ('allowed_hosts = ["http://a.example"]', ["a list of hosts", "without scheme and port"]),
        ('allowed_hosts = ["a.example:4000"]', ["without scheme and port"]),
        ("allowed_hosts = [1]", ["a list of hosts"]),
        ("[server]\nport = 1", ["[server]", "top level"]),
        ("server.port = 1", ["[server]", "top level"]),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_its_line(line: str, words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, f"# settings\ngateways = 2\n{line}\n")
    with pytest.raises(SettingsError) as caught:
        load({}, config=path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 3: ")
    assert "\n" not in text
    for word in words:
        assert word in text


def test_all_faults_of_a_file_are_found(tmp_path: Path) -> None:
    path = write(tmp_path, "prot = 1\ngateways = 2\nport = -1\nelastic = 3\n")
    assert [fault.partition(": ")[0] for fault in read_config(path).faults] == [
        f"{path}, line {number}" for number in (1, 3, 4)
    ]
    with pytest.raises(SettingsError, match=r"prot.*\(2 more: see `topics config check`\)"):
        load({}, config=path)


def test_no_line_rather_than_a_wrong_one(tmp_path: Path) -> None:
    path = write(tmp_path, 'data_dir = """\nport = 3\n"""\nport = "x"\n')
    assert read_config(path).faults == [f'{path}: port = "x": expected a whole number from 0 to 65535']


@pytest.mark.parametrize("text", ["port 4000", "port = ", "port = 1\nport = 2", "host = localhost", '"'])
def test_what_is_no_toml_says_where(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError, match="not TOML") as caught:
        read_config(path)
    assert path in str(caught.value)
    assert "line" in str(caught.value) or "its end" in str(caught.value)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, words in (("missing", "can't be read"), (".", "can't be read"), ("binary", "not UTF-8")):
        with pytest.raises(SettingsError, match=words) as caught:
            read_config(str(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("key", ["api_keys", "api_key"])
def test_secrets_are_refused_in_the_file_and_not_repeated(key: str, tmp_path: Path) -> None:
    path = write(tmp_path, f'{key} = "hunter2-the-secret"')
    with pytest.raises(SettingsError, match="TOPICS_API_KEYS_FILE") as caught:
        load({}, config=path)
    assert "hunter2" not in str(caught.value)


def test_unknown_settings_are_named_without_their_value(tmp_path: Path) -> None:
    fault = read_config(write(tmp_path, 'apikeys = "hunter2-the-secret"')).faults[0]
    assert "apikeys" in fault
    assert "hunter2" not in fault


def test_the_file_may_name_the_file_of_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one:read\n")
    path = write(tmp_path, f'host = "0.0.0.0"\napi_keys_file = "{keys}"\n')
    found = load({}, config=path)
    assert len(found.settings.api_keys) == 1
    assert found.origins["api_keys"] == Origin("file", f"{path}, line 2")
    other = tmp_path / "other"
    other.write_text("one\ntwo\n")
    assert len(from_environment({"TOPICS_CONFIG": path, "TOPICS_API_KEYS_FILE": str(other)}).api_keys) == 2
    keys.unlink()
    with pytest.raises(SettingsError, match=f"{path}, line 2: api_keys_file: {keys} can't be read"):
        load({}, config=path)


def test_a_public_address_in_the_file_needs_keys_too(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="without API keys"):
        from_environment({"TOPICS_CONFIG": write(tmp_path, 'host = "0.0.0.0"')})


def test_a_socket_that_was_given_wins_over_everything(tmp_path: Path) -> None:
    path = write(tmp_path, 'host = "10.0.0.7"')
    found = load({"TOPICS_PORT": "1"}, config=path, options={"TOPICS_PORT": "2"}, socket=("127.0.0.1", 4711))
    assert (found.settings.host, found.settings.port) == ("127.0.0.1", 4711)
    require_keys(found.settings)
    with pytest.raises(SettingsError, match="without API keys"):
        require_keys(load({}, socket=("0.0.0.0", 4711)).settings)


def test_variables_that_nobody_reads() -> None:
    assert strangers({"TOPICS_PROT": "1", "TOPICS_PORT": "1", "PROT": "1"}) == [
        "TOPICS_PROT is no setting; did you mean TOPICS_PORT?"
    ]
    assert strangers({"TOPICS_URL": "", "TOPICS_API_KEY": "", "TOPICS_SERVICE_HOST": "", "TOPICS_CONFIG": ""}) == []
