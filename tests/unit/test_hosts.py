"""Names of hosts: what a Host header and an entry of TOPICS_ALLOWED_HOSTS are read as, and what is neither."""

from __future__ import annotations

import pytest

from topics.errors import SettingsError
from topics.hosts import address_of, read_entry, split_authority
from topics.settings import from_environment


@pytest.mark.parametrize(
    ("authority", "expected"),
    [
        ("localhost", ("localhost", "")),
        ("LocalHost:4000", ("localhost", "4000")),
        ("localhost.", ("localhost", "")),
        ("localhost.:80", ("localhost", "80")),
        ("localhost:", ("localhost", "")),
        ("a_b.example-1.com", ("a_b.example-1.com", "")),
        ("xn--bcher-kva.example", ("xn--bcher-kva.example", "")),
        ("127.0.0.1:1", ("127.0.0.1", "1")),
        ("[::1]", ("::1", "")),
        ("[0:0:0:0:0:0:0:1]:4000", ("::1", "4000")),
        ("[2001:DB8::1]:65535", ("2001:db8::1", "65535")),
        ("[::ffff:127.0.0.1]", ("127.0.0.1", "")),
        ("a" * 255, ("a" * 255, "")),
    ],
)
def test_an_authority(authority: str, expected: tuple[str, str]) -> None:
    assert split_authority(authority) == expected


@pytest.mark.parametrize(
    "authority",
    [
        "",
        ":",
        ":4000",
        ".",
        "..",
        ".localhost",
        "a..b",
        "localhost..",
        "-a",
        "a-",
        "a b",
        " localhost",
        "localhost ",
        "localhost,evil.example",
        "localhost/",
        "localhost?",
        "localhost#",
        "localhost\\",
        "user@localhost",
        "localhost@evil.example",
        "localhost:4000:4000",
        "localhost:x",
        "localhost:-1",
        "localhost:123456",
        "local%68ost",
        "locälhost",
        "\xff",
        "localhost\0",
        "::1",
        "[::1",
        "::1]",
        "[::1]x",
        "[::1]:x",
        "[localhost]",
        "[127.0.0.1]x",
        "[]",
        "[:]",
        "[fe80::1%25lo]",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "127.0.0.0x1",
        "127.0.0.01",
        "256.0.0.1",
        "1.2.3.4.5",
        "a" * 300,
    ],
)
def test_what_is_no_authority(authority: str) -> None:
    assert split_authority(authority) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", "*"),
        ("Topics.Example.com", "topics.example.com"),
        (" topics ", "topics"),
        ("topics.example.com.", "topics.example.com"),
        ("*.Example.com", "*.example.com"),
        ("10.0.0.7", "10.0.0.7"),
        ("::1", "::1"),
        ("[2001:db8:0:0::7]", "2001:db8::7"),
    ],
)
def test_an_entry(text: str, expected: str) -> None:
    assert read_entry(text) == expected
    assert from_environment({"TOPICS_ALLOWED_HOSTS": f"{text}, ,other"}).allowed_hosts == (expected, "other")


@pytest.mark.parametrize(
    "text",
    [
        "http://topics.example.com",
        "topics.example.com:4000",
        "[::1]:4000",
        "topics.example.com/",
        "*example.com",
        "topics.*",
        "*.*",
        "*.",
        "a.*.b",
        "**",
        "*.10.0.0.7",
        "10.0.0",
        "10.0.0.0/8",
        "a b",
        "a..b",
        "é.example",
        "a" * 300,
    ],
)
def test_what_is_no_entry_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({"TOPICS_ALLOWED_HOSTS": f"fine.example,{text}"})
    assert "TOPICS_ALLOWED_HOSTS=" in str(caught.value)
    assert "without scheme and port, comma separated, or *" in str(caught.value)


def test_addresses() -> None:
    assert str(address_of("::ffff:10.0.0.7")) == "10.0.0.7"
    assert address_of("localhost") is address_of("") is None
