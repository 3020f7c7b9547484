from __future__ import annotations

import msgspec
import pytest

from topics import settings as settings_module
from topics.errors import SettingsError
from topics.settings import Settings, from_environment


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
    assert set(settings_module._READERS) | {"host", "api_keys"} == set(Settings.__struct_fields__)


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
