"""Who may do what: a request's key, its scope, and the names it may touch.

The lanes ask once per request head, before the body is looked at. Names in bodies are checked by the handler that reads
them, with the key that the request carries. Without keys everyone may do everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from topics.errors import ApiError, throttled_by
from topics.keys import Key, Keyring, Scope
from topics.storage.config import TopicConfig

if TYPE_CHECKING:
    from topics.gateway.routes import Route

_CHALLENGE = "send Authorization: Bearer <key>"


class Guard:
    def __init__(self, keys: Sequence[Key], *, probes: bool) -> None:
        self._ring = Keyring(keys)
        self._probes = probes  # liveness and readiness need a key too

    @property
    def on(self) -> bool:
        return bool(self._ring)

    def admit(self, route: Route, authorization: Sequence[bytes]) -> Key | None:
        """The request's key; None: there are none, or this route needs none."""
        if not self._ring or (route.probe and not self._probes):
            return None
        key = self._ring.find(_token(authorization, route.query if route.token else {}))
        if key is None:
            raise ApiError("unauthorized", "this key is not known here")
        if not key.allows(route.scope):
            raise lacks(route.scope & ~key.scopes)
        if route.name and route.named and not key.covers(route.name):
            raise outside(route.name)
        return key


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


def lacks(scopes: int) -> ApiError:
    names = [scope.name.lower() for scope in Scope if scope in Scope(scopes) and scope.name]
    return ApiError("forbidden", f"this key lacks the scope {' and '.join(names)}", {"scopes": names})


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


def check_scope(key: Key | None, scope: int) -> None:
    if key is not None and not key.allows(scope):
        raise lacks(scope & ~key.scopes)


def owner_of(key: Key | None) -> bytes:
    """What a session or stream is counted and recognised by."""
    return b"" if key is None else key.digest


def too_many_in_flight(most: int) -> ApiError:
    return throttled_by("max_inflight_per_key", most, "wait for answers before you send more", whose="this key")
