"""API keys: what a key may do, how keys are written, and which key a token is. Pure.

    secret                  everything
    secret:scopes           these scopes, any name
    secret:scopes:prefixes  these scopes, names with one of these prefixes
    secret::prefixes        all scopes

Scopes are joined by + (read, write, delete, admin; r, w, d, a; rw), prefixes by |. A line of a key file that holds one
key may go on with the key's name and its end, in either order:

    secret:scopes:prefixes name=ci expires=2027-01-01T00:00:00Z

What can't be read is refused as a whole: a key must never be worth more than its owner meant. Only the SHA-256 digest
of a secret is kept; a token is compared with every key's digest, whichever it is, so that time tells nothing. A key has
a number as long as the server runs, through reloads too: it is the key's slot in the usage page.
"""

from __future__ import annotations

import enum
import hmac
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256

import msgspec

from topics import limits
from topics.errors import SettingsError


class Scope(enum.IntFlag):
    READ = 1
    WRITE = 2
    DELETE = 4
    ADMIN = 8
    ALL = 15


HIDDEN = "(hidden)"  # stands for a name that a key may not touch; no name has brackets
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]*")
# It begins with a letter, so that no log line takes it for the number of a key without a name.
_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9._-]{{0,{limits.MAX_KEY_NAME_CHARS - 1}}}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
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


def seen(name: str, prefixes: tuple[str, ...]) -> str:
    """A name as a key with these prefixes is told it."""
    return name if not prefixes or name.startswith(prefixes) else HIDDEN


class Key(msgspec.Struct, frozen=True, eq=False):
    digest: bytes
    scopes: int = int(Scope.ALL)
    prefixes: tuple[str, ...] = ()  # none: any name
    number: int = 0  # from 1: its place in the list, or the next free number if it came with a reload
    name: str = ""  # what logs call it; none: its number
    expires_ms: int = 0  # when it ends; 0: never

    @property
    def label(self) -> str:
        return self.name or str(self.number)

    def expired(self, now_ms: int) -> bool:
        return 0 < self.expires_ms <= now_ms

    def same_rights(self, other: Key) -> bool:
        return self.scopes == other.scopes and set(self.prefixes) == set(other.prefixes)

    def allows(self, scope: int) -> bool:
        return self.scopes & scope == scope

    def covers(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)

    def __repr__(self) -> str:
        """Digests are no secrets, but they are nobody's business either."""
        return f"Key(scopes={Scope(self.scopes)!r}, prefixes={self.prefixes!r})"


def digest_of(token: bytes) -> bytes:
    return sha256(token).digest()


def parse_keys(text: str, *, source: str, attributes: bool = False) -> tuple[Key, ...]:
    """The keys of a comma-separated list, or of the lines of a file, where keys may have `attributes`. An error never
    repeats a secret."""
    keys: list[Key] = []
    for line in text.splitlines():
        entries = [entry for part in line.split(",") if (entry := part.strip())]
        for entry in entries:
            number = len(keys) + 1
            where = f"{source}, key {number}"
            words = entry.split() if attributes and len(entries) == 1 else [entry]
            key = _with_attributes(_parse(words[0], where=where), words[1:], secret=words[0], where=where)
            if any(hmac.compare_digest(key.digest, known.digest) for known in keys):
                raise SettingsError(f"{where}: this secret stands there twice")
            if key.name and any(key.name == known.name for known in keys):
                raise SettingsError(f"{where}: another key has this name already")
            keys.append(msgspec.structs.replace(key, number=number))
    if not keys:
        raise SettingsError(f"{source}: there is no key in it; unset it, or write secret[:scopes[:prefixes]]")
    if len(keys) > limits.MAX_API_KEYS or len(msgspec.json.encode(keys)) > limits.MAX_API_KEYS_BYTES:
        raise SettingsError(
            f"{source}: too much: up to {limits.MAX_API_KEYS} keys, with their prefixes and names up to "
            f"{limits.MAX_API_KEYS_BYTES} bytes"
        )
    return tuple(keys)


def _with_attributes(key: Key, words: list[str], *, secret: str, where: str) -> Key:
    name, expires_ms = "", 0
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or field not in ("name", "expires"):
            raise SettingsError(f"{where}: what follows the key is neither name=... nor expires=...")
        if name if field == "name" else expires_ms:
            raise SettingsError(f"{where}: {field}= stands there twice")
        if field == "expires":
            expires_ms = _moment(value, where=where)
            continue
        if not _NAME.fullmatch(value):
            raise SettingsError(
                f"{where}: a name begins with a letter and has up to {limits.MAX_KEY_NAME_CHARS} letters, digits and "
                ". _ -"
            )
        if secret.partition(":")[0] in value:
            raise SettingsError(f"{where}: its name holds its secret, and names are logged")
        name = value
    return msgspec.structs.replace(key, name=name, expires_ms=expires_ms)


def _moment(text: str, *, where: str) -> int:
    try:
        if not _TIME.fullmatch(text):
            raise ValueError
        at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        if at.timestamp() <= 0:
            raise ValueError
    except ValueError:
        raise SettingsError(f"{where}: expires= takes a time in UTC like 2027-01-01T00:00:00Z") from None
    return int(at.timestamp()) * 1_000


def moment_text(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def renumbered(keys: Sequence[Key], before: Sequence[Key]) -> tuple[Key, ...]:
    """Keys that were read again: a secret that was known keeps its number, a new one gets a number that none of either
    list has. Requests under way hold slots of the old numbers."""
    known = {key.digest: key.number for key in before}
    taken = set(known.values())
    free = iter(number for number in range(1, len(before) + len(keys) + 1) if number not in taken)
    return tuple(
        msgspec.structs.replace(key, number=known[key.digest] if key.digest in known else next(free)) for key in keys
    )


class Difference(msgspec.Struct, frozen=True):
    """What a reload has changed, by label."""

    added: list[str]
    removed: list[str]
    changed: list[str]  # the secret stayed; rights, name or end are others


def difference(before: Sequence[Key], after: Sequence[Key]) -> Difference:
    old, new = ({key.digest: key for key in keys} for keys in (before, after))
    return Difference(
        added=[key.label for digest, key in new.items() if digest not in old],
        removed=[key.label for digest, key in old.items() if digest not in new],
        changed=[key.label for digest, key in new.items() if digest in old and _content(key) != _content(old[digest])],
    )


def _content(key: Key) -> tuple[object, ...]:
    return key.scopes, set(key.prefixes), key.name, key.expires_ms


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
        self._by_digest = {key.digest: key for key in self._keys}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def now(self, key: Key) -> Key | None:
        """What has become of a key that was found before."""
        return self._by_digest.get(key.digest)

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
