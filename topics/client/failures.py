"""What can go wrong between a client and a server, and which of it is worth another try.

A refusal by the server is `topics.errors.ApiError`, with the server's own code and words. What stands here is
everything that is no answer of the server.
"""

from __future__ import annotations

from topics.errors import ApiError, TopicsError

# Refusals that say "later": the same request may succeed in a moment.
PASSING = frozenset({"throttled", "not_ready", "shutting_down", "shard_unavailable", "storage_full"})


class ClientError(TopicsError):
    """Base of what this package raises on its own."""


class BadUrl(ClientError):
    """The address of the server can't be used; the text says why."""


class Unreachable(ClientError):
    """No connection could be made, so nothing was asked."""


class ConnectionLost(ClientError):
    """The connection ended or stayed silent before the answer: whether the request took effect is not known."""


class NotTopics(ClientError):
    """Somebody answers there, but not as this server would."""


class OutcomeUnknown(ClientError):
    """Gave up on a write that may have taken effect. The same records with the same key would be safe to send."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


def is_passing(failure: Exception) -> bool:
    """Whether to try again."""
    if isinstance(failure, ApiError):
        return failure.code in PASSING
    return isinstance(failure, Unreachable | ConnectionLost)


def may_have_happened(failure: Exception) -> bool:
    """Whether a write that failed so may be in the log all the same."""
    if isinstance(failure, ApiError):
        return (failure.detail or {}).get("outcome") == "unknown"
    return isinstance(failure, ConnectionLost)


def at_least_s(failure: Exception) -> float:
    """How long the server asked to be left alone."""
    if not isinstance(failure, ApiError):
        return 0.0
    asked_ms = (failure.detail or {}).get("retry_after_ms")
    if isinstance(asked_ms, int | float) and asked_ms >= 0:
        return asked_ms / 1_000  # finer than the whole seconds of the header
    return float(failure.retry_after_s or 0)
