"""The settings of a server: one frozen struct, read from TOPICS_* once, in the supervisor.

Children receive the struct, never the environment, so that all processes agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import msgspec

from topics import limits
from topics.errors import SettingsError
from topics.keys import Key, parse_keys


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 4000
    port_file: str | None = None
    data_dir: str = "./topics-data"
    wal_shards: int = 1
    gateways: int = 1
    ring_bytes: int = limits.RING_BYTES
    spin_us: int = -1  # -1: automatic
    allow_insecure_no_auth: bool = False
    probe_auth: bool = False
    api_keys: tuple[Key, ...] = ()

    max_body_bytes: int = limits.MAX_BODY_BYTES
    max_batch_records: int = limits.MAX_BATCH_RECORDS
    max_record_bytes: int = limits.MAX_RECORD_BYTES
    max_meta_bytes: int = limits.MAX_META_BYTES
    max_tag_bytes: int = limits.MAX_TAG_BYTES
    max_node_bytes: int = limits.MAX_NODE_BYTES
    max_limit: int = limits.MAX_LIMIT
    max_claim: int = limits.MAX_CLAIM
    max_watch_topics: int = limits.MAX_WATCH_TOPICS

    session_ttl_ms: int = limits.SESSION_TTL_MS
    stream_backlog_bytes: int = limits.STREAM_BACKLOG_BYTES
    slow_consumer_timeout_ms: int = limits.SLOW_CONSUMER_TIMEOUT_MS
    allowed_origins: tuple[str, ...] = ()  # of web pages that may open a WebSocket, besides our own

    max_topics: int = limits.MAX_TOPICS
    max_routers: int = limits.MAX_ROUTERS
    max_watch_sessions: int = limits.MAX_WATCH_SESSIONS
    max_sse_connections: int = limits.MAX_SSE_CONNECTIONS
    max_sse_connections_per_key: int = limits.MAX_SSE_CONNECTIONS_PER_KEY
    max_inflight_per_key: int = limits.MAX_INFLIGHT_PER_KEY
    max_total_bytes: int = limits.MAX_TOTAL_BYTES

    wal_file_bytes: int = limits.WAL_FILE_BYTES
    segment_max_events: int = limits.SEGMENT_MAX_EVENTS
    segment_max_bytes: int = limits.SEGMENT_MAX_BYTES
    segment_max_age_ms: int = limits.SEGMENT_MAX_AGE_MS
    cold_dir: str | None = None
    hot_retain_segments: int = limits.HOT_RETAIN_SEGMENTS
    hot_retain_bytes: int = 0
    lease_history_bytes: int = limits.LEASE_HISTORY_BYTES
    disk_sync_ms: int = limits.DISK_SYNC_MS
    cache_bytes: int = limits.CACHE_BYTES
    call_timeout_ms: int = limits.CALL_TIMEOUT_MS
    head_timeout_ms: int = limits.HEAD_TIMEOUT_MS
    min_body_rate: int = limits.MIN_BODY_RATE
    body_timeout_ms: int = limits.BODY_TIMEOUT_MS
    idle_timeout_ms: int = limits.IDLE_TIMEOUT_MS
    heartbeat_ms: int = limits.HEARTBEAT_MS
    min_free_bytes: int = limits.MIN_FREE_BYTES
    elastic: bool = True
    pressure_lag_ms: int = limits.PRESSURE_LAG_MS
    pressure_commit_ms: int = limits.PRESSURE_COMMIT_MS
    request_metrics: bool = True
    log: str = "info"
    log_format: str = "logfmt"
    access_log: bool = False

    @property
    def loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def _integer(low: int, high: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise SettingsError(f"{name}={text!r}: expected a whole number from {low} to {high}") from None
        if not low <= value <= high:
            raise SettingsError(f"{name}={value}: expected a whole number from {low} to {high}")
        return value

    return parse


def _flag(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise SettingsError(f"{name}={text!r}: expected 1 or 0")


def _text(name: str, text: str) -> str | None:
    return text or None


def _level(name: str, text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise SettingsError(f"{name}={text!r}: expected debug, info, warning or error")
    return text.lower()


def _log_format(name: str, text: str) -> str:
    if text.lower() not in ("logfmt", "json"):
        raise SettingsError(f"{name}={text!r}: expected logfmt or json")
    return text.lower()


def _spin(name: str, text: str) -> int:
    return -1 if text == "auto" else _integer(0, 1_000)(name, text)


def _origins(name: str, text: str) -> tuple[str, ...]:
    """Comma separated: https://app.example.com, http://localhost:3000, or * for all."""
    origins = tuple(part.strip().lower().rstrip("/") for part in text.split(",") if part.strip())
    for origin in origins:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise SettingsError(f"{name}={text!r}: expected origins like https://app.example.com, or *")
    return origins


CREDENTIAL = "topics_api_keys"
_BYTES = _integer(1, 2**40)
_COUNT = _integer(0, 2**40)
_MS = _integer(0, 2**40)

# field -> how its TOPICS_<FIELD> is read
_READERS: dict[str, Callable[[str, str], object]] = {
    "port": _integer(0, 65_535),
    "port_file": _text,
    "data_dir": _text,
    "wal_shards": _integer(1, 64),
    "gateways": _integer(1, 16),
    "ring_bytes": _integer(limits.MIN_RING_BYTES, 2**30),
    "spin_us": _spin,
    "allow_insecure_no_auth": _flag,
    "probe_auth": _flag,
    "max_body_bytes": _integer(1, 2**30),
    "max_batch_records": _integer(1, 1_000_000),
    "max_record_bytes": _BYTES,
    "max_meta_bytes": _BYTES,
    "max_tag_bytes": _integer(1, 65_535),
    "max_node_bytes": _integer(1, 65_535),
    "max_limit": _integer(1, 100_000),
    "max_claim": _integer(1, 100_000),
    "max_watch_topics": _integer(1, 100_000),
    "session_ttl_ms": _integer(100, 2**40),
    "stream_backlog_bytes": _integer(4 * limits.KIB, 2**30),
    "slow_consumer_timeout_ms": _integer(100, 3_600_000),
    "allowed_origins": _origins,
    "max_topics": _COUNT,
    "max_routers": _COUNT,
    "max_watch_sessions": _COUNT,
    "max_sse_connections": _COUNT,
    "max_sse_connections_per_key": _COUNT,
    "max_inflight_per_key": _COUNT,
    "max_total_bytes": _COUNT,
    "wal_file_bytes": _integer(limits.MIB, 2**32),
    "segment_max_events": _integer(1, 2**31),
    "segment_max_bytes": _integer(4096, 2**40),
    "segment_max_age_ms": _MS,
    "cold_dir": _text,
    "hot_retain_segments": _COUNT,
    "hot_retain_bytes": _COUNT,
    "lease_history_bytes": _COUNT,
    "disk_sync_ms": _integer(1, 60_000),
    "cache_bytes": _COUNT,
    "call_timeout_ms": _integer(100, 600_000),
    "head_timeout_ms": _integer(100, 600_000),
    "body_timeout_ms": _integer(100, 600_000),
    "idle_timeout_ms": _integer(100, 3_600_000),
    "min_body_rate": _COUNT,
    "heartbeat_ms": _integer(50, 60_000),
    "min_free_bytes": _COUNT,
    "elastic": _flag,
    "pressure_lag_ms": _integer(1, 600_000),
    "pressure_commit_ms": _integer(1, 600_000),
    "request_metrics": _flag,
    "log": _level,
    "log_format": _log_format,
    "access_log": _flag,
}


def _split_host(host: str, values: dict[str, object]) -> None:
    """TOPICS_HOST may carry the port too: 0.0.0.0:4000, [::1]:4000."""
    if host.startswith("["):
        inner, bracket, rest = host[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise SettingsError(f"TOPICS_HOST={host!r}: expected [address] or [address]:port")
        values["host"] = inner
        if rest:
            values["port"] = _integer(0, 65_535)("TOPICS_HOST", rest[1:])
    elif host.count(":") == 1:
        name, _, port = host.partition(":")
        values["host"] = name
        values["port"] = _integer(0, 65_535)("TOPICS_HOST", port)
    else:
        values["host"] = host


def _api_keys(environ: Mapping[str, str]) -> tuple[Key, ...]:
    """From the environment, or better from a file: what is in the environment can be read by more people."""
    text, path = environ.get("TOPICS_API_KEYS"), environ.get("TOPICS_API_KEYS_FILE")
    if text is not None and path:
        raise SettingsError("TOPICS_API_KEYS and TOPICS_API_KEYS_FILE are both set: use one of them")
    if text is not None and text.strip():
        return parse_keys(text, source="TOPICS_API_KEYS")
    credentials = environ.get("CREDENTIALS_DIRECTORY")  # of systemd's LoadCredential
    if not path and credentials and os.path.exists(os.path.join(credentials, CREDENTIAL)):
        path = os.path.join(credentials, CREDENTIAL)
    if not path:
        return ()
    try:
        with open(path, encoding="utf-8") as source:
            content = source.read()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"TOPICS_API_KEYS_FILE: {path} can't be read: {error}") from None
    lines = [line for line in content.splitlines() if not line.lstrip().startswith("#")]
    return parse_keys("\n".join(lines), source=path)


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read TOPICS_*; a value that can't be used is an error that names the variable."""
    values: dict[str, object] = {"wal_shards": min(os.cpu_count() or 1, 8)}
    if host := environ.get("TOPICS_HOST"):
        _split_host(host, values)
    for field, read in _READERS.items():
        name = f"TOPICS_{field.upper()}"
        if (text := environ.get(name)) is None or text == "":
            continue
        values[field] = read(name, text)
    settings = msgspec.structs.replace(msgspec.convert(values, Settings), api_keys=_api_keys(environ))
    if not settings.loopback and not settings.api_keys and not settings.allow_insecure_no_auth:
        raise SettingsError(
            f"refusing to serve {settings.host} without API keys: anyone who reaches it could read and write. "
            "Set TOPICS_API_KEYS_FILE, bind to 127.0.0.1, or set TOPICS_ALLOW_INSECURE_NO_AUTH=1 on a network you "
            "trust."
        )
    return settings
