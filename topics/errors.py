"""Every error the system raises on purpose.

ApiError is what a client sees: a status, a stable code, a sentence, optional detail. The others stop a
process or refuse an operator's command; their text says what to do next.
"""

from __future__ import annotations

from typing import Any

# code -> HTTP status: the whole vocabulary of the contract, in one table.
STATUS: dict[str, int] = {
    "invalid_request": 400,
    "batch_too_large": 400,
    "record_too_large": 400,
    "invalid_json": 400,  # these two in frames of a WebSocket alone
    "unsupported_message": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "topic_not_found": 404,
    "router_not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "request_timeout": 408,
    "router_cycle": 409,
    "topic_exists_incompatible": 409,
    "topic_not_empty": 409,
    "not_a_queue": 409,
    "payload_too_large": 413,
    "uri_too_long": 414,
    "unsupported_media_type": 415,
    "expectation_failed": 417,
    "misdirected_request": 421,
    "topic_full": 422,
    "upgrade_required": 426,
    "throttled": 429,
    "header_too_large": 431,
    "internal": 500,
    "not_ready": 503,
    "shutting_down": 503,
    "shard_unavailable": 503,
    "storage_full": 503,
    "http_version_not_supported": 505,
}


class TopicsError(Exception):
    """Base of everything raised on purpose."""


class ApiError(TopicsError):
    """An answer other than 2xx. Crosses process borders as (code, message, detail, retry_after_s)."""

    def __init__(
        self, code: str, message: str, detail: dict[str, Any] | None = None, *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return STATUS[self.code]


def invalid(message: str, **detail: Any) -> ApiError:
    return ApiError("invalid_request", message, detail or None)


def topic_not_found(topic: str) -> ApiError:
    return ApiError("topic_not_found", f'topic "{topic}" does not exist', {"topic": topic})


def session_not_found() -> ApiError:
    return ApiError("not_found", "this watch session is unknown or has expired; POST /v0/watch again")


def not_a_queue(topic: str) -> ApiError:
    return ApiError(
        "not_a_queue",
        f'topic "{topic}" is a log: jobs are leased from topics of type "queue" only',
        {"topic": topic},
    )


def being_rebuilt(topic: str) -> ApiError:
    return ApiError(
        "shard_unavailable",
        f'topic "{topic}" holds copies of another topic, which are being made again after a restart. Retry',
        {"topic": topic},
        retry_after_s=1,
    )


def client_left() -> ApiError:
    """Seldom read: whoever ends its input has mostly closed the connection."""
    return ApiError("request_timeout", "the client ended its input while this request waited; nothing was done")


def unreadable(error: Exception) -> ApiError:
    """Stored records that a reader can't have. Where their disk is away they are not lost: it may ask again."""
    if isinstance(error, Unreachable):
        return ApiError("shard_unavailable", f"stored records are out of reach: {error}", retry_after_s=5)
    return ApiError("internal", f"stored data is damaged: {error}")


def lacks_scopes(names: list[str]) -> ApiError:
    return ApiError("forbidden", f"this key lacks the scope {' and '.join(names)}", {"scopes": names})


def throttled_by(limit: str, most: int, remedy: str, *, whose: str = "the instance") -> ApiError:
    """A resource of the whole instance, or of a key, is used up."""
    return ApiError(
        "throttled",
        f"{whose} has reached {limit} ({most}); {remedy}",
        {"limit": limit, "max": most},
        retry_after_s=5 if whose == "the instance" else 1,
    )


class SettingsError(TopicsError):
    """A TOPICS_* variable that can't be used; names the variable and what it accepts."""


class StartRefused(TopicsError):
    """The server will not start; the text says why and what to do."""


class DataDirLocked(StartRefused):
    """Another server holds the data folder."""


class FormatError(TopicsError):
    """Bytes on disk that are not ours, or of a version this program does not read."""


class CorruptData(TopicsError):
    """A checksum or structure that fails where good data follows: never repaired silently."""


class Unreachable(TopicsError):
    """Stored bytes that can't be read just now, because the disk they are on is gone or fails. The text names the
    place and what to do."""


class DiskFull(TopicsError):
    """No space for the write; nothing of it was kept."""


class ColdTierGone(DiskFull):
    """The folder of the cold tier is not at its place, or is another: nothing is written there, and nothing was."""


class RingPoisoned(TopicsError):
    """A ring frame that fails its checks. The link is abandoned, never repaired in place."""


class RingFull(TopicsError):
    """No room in the ring and its outbox: backpressure."""


class ServerNotRunning(TopicsError):
    """An ops command found no server on the data folder."""
