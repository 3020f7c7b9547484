"""Addresses of servers."""

from __future__ import annotations

import pytest

from topics.client.address import DEFAULT_URL, Address, parse_url
from topics.client.failures import BadUrl


@pytest.mark.parametrize(
    ("url", "address", "authority"),
    [
        (DEFAULT_URL, Address(host="127.0.0.1", port=4000), "127.0.0.1:4000"),
        ("localhost:4000", Address(host="localhost", port=4000), "localhost:4000"),
        ("http://example.org", Address(host="example.org", port=80), "example.org"),
        ("https://example.org/", Address(host="example.org", port=443, tls=True), "example.org"),
        ("https://example.org:80/t/", Address(host="example.org", port=80, tls=True, prefix="/t"), "example.org:80"),
        ("http://[::1]:4000", Address(host="::1", port=4000), "[::1]:4000"),
    ],
)
def test_addresses(url: str, address: Address, authority: str) -> None:
    assert parse_url(url) == address
    assert address.authority == authority


@pytest.mark.parametrize(
    "url",
    ["ftp://example.org", "http://", "http://host:many", "http://host:70000", "http://host/?a=1", "http://me@host"],
)
def test_what_is_no_address_is_refused_and_named(url: str) -> None:
    with pytest.raises(BadUrl) as caught:
        parse_url(url)
    assert repr(url) in str(caught.value)


def test_an_address_is_written_as_it_was_given() -> None:
    for url in (DEFAULT_URL, "https://example.org/t", "http://[::1]:4000"):
        assert str(parse_url(url)) == url
