"""API keys: what a key may do, how keys are written, and which key a token is. Pure.

    secret                  everything
    secret:scopes           these scopes, any name
    secret:scopes:prefixes  these scopes, names with one of these prefixes
    secret::prefixes        all scopes

Scopes are joined by + (read, write, delete, admin; r, w, d, a; rw), prefixes by |. What can't be read refuses to start:
a key must never be worth more than its owner meant. Only the SHA-256 digest of a secret is kept; a token is compared
with every key's digest, whichever it is, so that time tells nothing.
"""

from __future__ import annotations

import enum
import hmac
import re
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from topics.errors import SettingsError


class Scope(enum.IntFlag):
    READ = 1
    WRITE = 2
    DELETE = 4
    ADMIN = 8
    ALL = 15


_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]*")
_NAMES = {
    "read": Scope.READ,
    "r": Scope.READ,
    "write": Scope.WRITE,
    "w": Scope.WRITE,
    "rw": Scope.READ | Scope.WRITE,
    "delete": Scope.DELETE,
    "d": Scope.DELETE,
    "admin": Scope.ADMIN,
    "a": Scope.ADMIN,
}


class Key(msgspec.Struct, frozen=True, eq=False):
    digest: bytes
    scopes: int = int(Scope.ALL)
    prefixes: tuple[str, ...] = ()  # none: any name
    number: int = 0  # its place in the list, from 1

    def allows(self, scope: int) -> bool:
        return self.scopes & scope == scope

    def covers(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)

    def __repr__(self) -> str:
        """Digests are no secrets, but they are nobody's business either."""
        return f"Key(scopes={Scope(self.scopes)!r}, prefixes={self.prefixes!r})"


def digest_of(token: bytes) -> bytes:
    return sha256(token).digest()


def parse_keys(text: str, *, source: str) -> tuple[Key, ...]:
    """The keys of a comma-separated list, or of the lines of a file. An error never repeats a secret."""
    keys: list[Key] = []
    entries = [entry.strip() for line in text.splitlines() for entry in line.split(",")]
    entries = [entry for entry in entries if entry]
    for number, entry in enumerate(entries, 1):
        key = _parse(entry, where=f"{source}, key {number}")
        if any(hmac.compare_digest(key.digest, known.digest) for known in keys):
            raise SettingsError(f"{source}, key {number}: this secret stands there twice")
        keys.append(msgspec.structs.replace(key, number=number))
    if not keys:
        raise SettingsError(f"{source}: there is no key in it; unset it, or write secret[:scopes[:prefixes]]")
    return tuple(keys)


def _parse(entry: str, *, where: str) -> Key:
    secret, *rest = entry.split(":", 2)
    if not secret:
        raise SettingsError(f"{where}: the secret before the first colon is empty")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise SettingsError(f"{where}: a secret has printable ASCII characters without blanks only")
    scopes = int(Scope.ALL)
    if rest and rest[0]:
        scopes = 0
        for name in rest[0].split("+"):
            if name not in _NAMES:
                raise SettingsError(  # without what stands there: it may be the rest of a secret with a colon
                    f"{where}: what follows the first colon is no set of scopes; they are read, write, delete and "
                    "admin (r, w, d, a, rw), joined by +"
                )
            scopes |= _NAMES[name]
    prefixes: tuple[str, ...] = ()
    if len(rest) == 2 and rest[1]:
        prefixes = tuple(rest[1].split("|"))
        if "" in prefixes:
            raise SettingsError(f"{where}: an empty prefix would stand for every name; leave it out")
        if not all(_PREFIX.fullmatch(prefix) for prefix in prefixes):
            raise SettingsError(f"{where}: one of its prefixes is none that a name could begin with")
    return Key(digest_of(secret.encode()), scopes, prefixes)


class Keyring:
    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, token: bytes) -> Key | None:
        """The key that this token is. Every key is looked at, also behind the one that fits."""
        digest = digest_of(token)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found
