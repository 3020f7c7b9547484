"""Names of hosts, as they stand in a Host header, in an Origin and in TOPICS_ALLOWED_HOSTS: read in one way everywhere.

A name is kept in small letters, without the dot that may end it, an address in its shortest form and without brackets.
Only what a browser would send is read: other ways to write an address (127.1, 0x7f000001) and escapes are no host.
"""

from __future__ import annotations

import ipaddress
import re

_NAME = r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?"
_DOTTED = rf"{_NAME}(?:\.{_NAME})*"
_AUTHORITY = re.compile(rf"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>{_DOTTED})\.?)(?::(?P<port>[0-9]{{0,5}}))?")
_ENTRY = re.compile(rf"(?P<any>\*\.)?(?P<name>{_DOTTED})\.?")
_LONGEST = 255 + 6  # a name of DNS, a port

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def address_of(host: str) -> Address | None:
    """None: it is a name. An IPv4 address in the clothes of IPv6 is what it stands for."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def split_authority(authority: str) -> tuple[str, str] | None:
    """Host and port of `host`, `host:port` or `[address]:port`; None: it is nothing of these. No port is ""."""
    found = _AUTHORITY.fullmatch(authority.lower()) if len(authority) <= _LONGEST else None
    if found is None:
        return None
    host = found["name"] or found["v6"]
    address = address_of(host)
    if (address is None and found["v6"]) or (address is None and _looks_like_an_address(host)):
        return None
    return host if address is None else str(address), found["port"] or ""


def read_entry(text: str) -> str:
    """An entry of a list: a name, `*.` and a name for all names below it, an address, or `*`. ValueError: none of
    these, for instance because it has a scheme or a port."""
    lowered = text.strip().lower()
    if lowered == "*":
        return lowered
    if (address := address_of(lowered.removeprefix("[").removesuffix("]"))) is not None:
        return str(address)
    found = _ENTRY.fullmatch(lowered) if len(lowered) <= _LONGEST else None
    if found is None or _looks_like_an_address(found["name"]):
        raise ValueError
    return f"{found['any'] or ''}{found['name']}"


def _looks_like_an_address(name: str) -> bool:
    """No top-level domain is a number: browsers take such a name for an IPv4 address, or for a mistake."""
    last = name.rpartition(".")[2]
    return last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last) is not None
