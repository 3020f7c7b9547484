"""Who may do what: a request's key, its scope, and the names it may touch.

The lanes ask once per request head, before the body is looked at. Names in bodies are checked by the handler that reads
them, with the key that the request carries. Without keys everyone may do everything.

Keys end while the server runs: a reload takes them away or gives them other rights, and their time comes. What was
decided with a key before that (heads that are remembered, streams, bodies on their way) is decided again (`refusal`).

Names that a key may not touch are not told to it either: answers say HIDDEN in their place, which is no name. A client
that sends back what it was told is refused, and does not configure something else by mistake.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from topics import limits
from topics.errors import ApiError, lacks_scopes, throttled_by
from topics.keys import Key, Keyring, Scope, moment_text, seen
from topics.storage.config import TopicConfig

if TYPE_CHECKING:
    from topics.gateway.api.routes import Route

_CHALLENGE = "send Authorization: Bearer <key>"


class Guard:
    def __init__(
        self,
        keys: Sequence[Key],
        *,
        probes: bool,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._now_ms = now_ms
        self._probes = probes  # liveness and readiness need a key too
        self._ring = self._gone = Keyring(())
        self.replace(keys)

    def replace(self, keys: Sequence[Key]) -> None:
        # Of keys that are gone those with a name are remembered, for the log: numbers are given to others.
        here = {key.digest for key in keys}
        gone = [key for key in (*self._gone, *self._ring) if key.name and key.digest not in here]
        self._gone = Keyring(gone[-limits.MAX_API_KEYS :])
        self._ring = Keyring(keys)
        self._ends_ms = sorted(key.expires_ms for key in keys if key.expires_ms)
        self._ended = bisect_right(self._ends_ms, self._now_ms())

    @property
    def on(self) -> bool:
        return bool(self._ring)

    def has_news(self) -> bool:
        """Whether the time of a key has come since this was last asked. Once a round: it looks at the clock only if
        there are keys that end."""
        if not self._ends_ms:
            return False
        before, self._ended = self._ended, bisect_right(self._ends_ms, self._now_ms())  # clocks are set back, too
        return self._ended > before

    def refusal(self, key: Key | None) -> ApiError | None:
        """Why what this key was let through with is not true any more: it is gone, it has other rights, or its time has
        come. None: it is true."""
        if key is None:
            return None
        now = self._ring.now(key)
        if now is None:
            return ApiError("unauthorized", "this key was revoked")
        if now.expired(self._now_ms()):
            return _expired(now)
        return None if now.same_rights(key) else ApiError("unauthorized", "the rights of this key have changed; retry")

    def admit(self, route: Route, authorization: Sequence[bytes]) -> Key | None:
        """The request's key; None: there are none, or this route needs none."""
        if not self._ring or (route.probe and not self._probes):
            return None
        key = self._ring.find(_token(authorization, route.query if route.token else {}))
        if key is None:
            raise ApiError("unauthorized", "this key is not known here")
        if key.expired(self._now_ms()):
            raise _expired(key)
        if not key.allows(route.scope):
            raise lacks(route.scope & ~key.scopes)
        if route.name and route.named and not key.covers(route.name):
            raise outside(route.name)
        return key

    def shown_by(self, route: Route, authorization: Sequence[bytes]) -> int | str:
        """For the log alone, of a request that is refused: which key it has shown, by name or else by number; also one
        that has expired, or that is gone and had a name. 0: none of these. All are looked at, whichever it is."""
        try:
            token = _token(authorization, route.query if route.token else {})
        except ApiError:
            return 0
        key, gone = self._ring.find(token), self._gone.find(token)
        if key is not None:
            return key.name or key.number
        return 0 if gone is None else gone.name


def _token(authorization: Sequence[bytes], query: Mapping[str, str]) -> bytes:
    if len(authorization) > 1:
        raise ApiError("unauthorized", "more than one Authorization header")
    if authorization:
        scheme, _, token = authorization[0].partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise ApiError("unauthorized", f"this is not a bearer token: {_CHALLENGE}")
        return token.strip()
    if "token" in query:
        return query["token"].encode()
    raise ApiError("unauthorized", f"a key is needed: {_CHALLENGE}")


def _expired(key: Key) -> ApiError:
    """Told to who has the secret alone."""
    at = moment_text(key.expires_ms)
    return ApiError("unauthorized", f"this key has expired: it was good until {at}", {"expired": at})


def lacks(scopes: int) -> ApiError:
    return lacks_scopes([scope.name.lower() for scope in Scope if scope in Scope(scopes) and scope.name])


def outside(name: str) -> ApiError:
    return ApiError("forbidden", f'"{name}" is outside of what this key may touch', {"name": name})


def check_names(key: Key | None, names: Iterable[str]) -> None:
    if key is not None:
        for name in names:
            if not key.covers(name):
                raise outside(name)


def check_config(key: Key | None, config: TopicConfig) -> None:
    """A queue's dead letters are written on behalf of whoever configured it."""
    if config.dead_letter is not None:
        check_names(key, [config.dead_letter])


def may_configure(key: Key | None) -> bool:
    """Whether an append of this key may make a topic with a config. The shard decides with it: whether there is such a
    topic, whose config then stays as it is, is known there alone."""
    return key is None or key.allows(Scope.ADMIN)


def seen_name(key: Key | None, name: str) -> str:
    return name if key is None else seen(name, key.prefixes)


def seen_config(key: Key | None, config: TopicConfig) -> TopicConfig:
    """A config as its reader may see it: someone with other prefixes may have named the dead letters."""
    if config.dead_letter is None or (shown := seen_name(key, config.dead_letter)) == config.dead_letter:
        return config
    return msgspec.structs.replace(config, dead_letter=shown)


def check_scope(key: Key | None, scope: int) -> None:
    if key is not None and not key.allows(scope):
        raise lacks(scope & ~key.scopes)


def owner_of(key: Key | None) -> bytes:
    """What a session or stream is counted and recognised by."""
    return b"" if key is None else key.digest


def too_many_in_flight(most: int) -> ApiError:
    return throttled_by("max_inflight_per_key", most, "wait for answers before you send more", whose="this key")
