"""The settings of a server: one frozen struct, read once, in the supervisor.

They come from a TOML file (--config, TOPICS_CONFIG), from TOPICS_* variables and from options, and each of these wins
over those before it. Children receive the struct, never the environment, so that all processes agree. Rules: whatever
is not understood is an error that says where it stands and what would be; secrets are never in the file, and no message
repeats what might be one.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping

import msgspec

from topics import limits
from topics.errors import SettingsError
from topics.hosts import read_entry
from topics.keyfile import KeyFile
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
    strict_files: bool = False

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
    allowed_hosts: tuple[str, ...] = ()  # names of ours, besides loopback and the address that we listen on
    allowed_origins: tuple[str, ...] = ()  # of web pages that may read and open a WebSocket, besides our own

    max_topics: int = limits.MAX_TOPICS
    max_routers: int = limits.MAX_ROUTERS
    max_watch_sessions: int = limits.MAX_WATCH_SESSIONS
    max_sse_connections: int = limits.MAX_SSE_CONNECTIONS
    max_sse_connections_per_key: int = limits.MAX_SSE_CONNECTIONS_PER_KEY
    max_inflight_per_key: int = limits.MAX_INFLIGHT_PER_KEY
    max_total_bytes: int = limits.MAX_TOTAL_BYTES
    max_buffered_bytes: int = limits.MAX_BUFFERED_BYTES
    max_connections: int = limits.MAX_CONNECTIONS
    max_connections_per_peer: int = limits.MAX_CONNECTIONS_PER_PEER

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
    dumpable: bool = False
    min_free_bytes: int = limits.MIN_FREE_BYTES
    elastic: bool = True
    pressure_lag_ms: int = limits.PRESSURE_LAG_MS
    pressure_commit_ms: float = limits.PRESSURE_COMMIT_MS
    request_metrics: bool = True
    log: str = "info"
    log_format: str = "logfmt"
    access_log: bool = False

    @property
    def control_body_bytes(self) -> int:
        """Of bodies that name things: as many as an operator allows must fit."""
        named = max(48 * self.max_claim, 320 * self.max_watch_topics)
        return min(max(limits.CONTROL_BODY_BYTES, named), self.max_body_bytes)

    @property
    def loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def _shown(value: object) -> str:
    """A value as it would stand in the file; of a long one the beginning."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Kind:
    """How the values of one kind are written: as text in a variable, as a value in the file. ValueError: not so."""

    accepts = "text"  # in a variable
    toml = "text in quotes"  # in the file

    def read(self, text: str) -> object:
        return text

    def take(self, value: object) -> object:
        if not isinstance(value, str):
            raise ValueError
        return self.read(value)


class _Integer(_Kind):
    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high
        self.accepts = self.toml = f"a whole number from {low} to {high}"

    def read(self, text: str) -> int:
        return self.take(int(text))

    def take(self, value: object) -> int:
        if type(value) is not int or not self._low <= value <= self._high:
            raise ValueError
        return value


class _Number(_Kind):
    def __init__(self, low: float, high: int) -> None:
        self._low, self._high = low, high
        self.accepts = self.toml = f"a number from {low} to {high}"

    def read(self, text: str) -> float:
        return self.take(float(text))

    def take(self, value: object) -> float:
        if type(value) not in (int, float) or not self._low <= value <= self._high:  # type: ignore[operator]
            raise ValueError
        return value  # type: ignore[return-value]


class _Flag(_Kind):
    accepts = "1 or 0"
    toml = "true or false"

    def read(self, text: str) -> bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off", ""):
            return False
        raise ValueError

    def take(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


class _Choice(_Kind):
    def __init__(self, *words: str) -> None:
        self._words = words
        self.accepts = f"{', '.join(words[:-1])} or {words[-1]}"
        self.toml = f"{', '.join(map(_shown, words[:-1]))} or {_shown(words[-1])}"

    def read(self, text: str) -> str:
        if text.lower() not in self._words:
            raise ValueError
        return text.lower()


class _Spin(_Kind):
    _number = _Integer(0, 1_000)
    accepts = f"auto, or {_number.accepts}"
    toml = f'"auto", or {_number.accepts}'

    def read(self, text: str) -> int:
        return -1 if text == "auto" else self._number.read(text)

    def take(self, value: object) -> int:
        return -1 if value == "auto" else self._number.take(value)


class _Host(_Kind):
    accepts = "a name or an address, perhaps with a port: 0.0.0.0:4000, [::1]:4000"
    toml = 'a name or an address, perhaps with a port: "0.0.0.0:4000", "[::1]:4000"'

    def read(self, text: str) -> str:
        _split_host(text)
        return text


class _List(_Kind):
    """Comma separated, or `*`; in the file a list, or "*"."""

    def read(self, text: str) -> tuple[str, ...]:
        return self.take(text.split(","))

    def take(self, value: object) -> tuple[str, ...]:
        if value == "*":
            value = ["*"]
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise ValueError
        return tuple(self._entry(part.strip()) for part in value if part.strip())

    def _entry(self, text: str) -> str:
        raise NotImplementedError


class _Hosts(_List):
    accepts = "hosts like topics.example.com, *.example.com or 10.0.0.7, without scheme and port, comma separated, or *"
    toml = 'a list of hosts like ["topics.example.com", "*.example.com"], without scheme and port, or "*"'

    def _entry(self, text: str) -> str:
        return read_entry(text)


class _Origins(_List):
    accepts = "origins like https://app.example.com, comma separated, or *"
    toml = 'a list of origins like ["https://app.example.com"], or "*"'

    def _entry(self, text: str) -> str:
        origin = text.lower().rstrip("/")
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise ValueError
        return origin


CREDENTIAL = "topics_api_keys"
_TEXT = _Kind()
_FLAG = _Flag()
_PORT = _Integer(0, 65_535)
_BYTES = _Integer(1, 2**40)
_COUNT = _Integer(0, 2**40)
_MS = _Integer(0, 2**40)

# field -> how it is written, in TOPICS_<FIELD> and in the file
_READERS: dict[str, _Kind] = {
    "host": _Host(),  # first: a port beside it wins over a port in it
    "port": _PORT,
    "port_file": _TEXT,
    "data_dir": _TEXT,
    "wal_shards": _Integer(1, 64),
    "gateways": _Integer(1, 16),
    "ring_bytes": _Integer(limits.MIN_RING_BYTES, 2**30),
    "spin_us": _Spin(),
    "allow_insecure_no_auth": _FLAG,
    "probe_auth": _FLAG,
    "strict_files": _FLAG,
    "max_body_bytes": _Integer(1, 2**30),
    "max_batch_records": _Integer(1, 1_000_000),
    "max_record_bytes": _BYTES,
    "max_meta_bytes": _BYTES,
    "max_tag_bytes": _Integer(1, 65_535),
    "max_node_bytes": _Integer(1, 65_535),
    "max_limit": _Integer(1, 100_000),
    "max_claim": _Integer(1, 100_000),
    "max_watch_topics": _Integer(1, 100_000),
    "session_ttl_ms": _Integer(100, 2**40),
    "stream_backlog_bytes": _Integer(4 * limits.KIB, 2**30),
    "slow_consumer_timeout_ms": _Integer(100, 3_600_000),
    "allowed_hosts": _Hosts(),
    "allowed_origins": _Origins(),
    "max_topics": _COUNT,
    "max_routers": _COUNT,
    "max_watch_sessions": _COUNT,
    "max_sse_connections": _COUNT,
    "max_sse_connections_per_key": _COUNT,
    "max_inflight_per_key": _COUNT,
    "max_total_bytes": _COUNT,
    "max_buffered_bytes": _BYTES,
    "max_connections": _Integer(1, 1_000_000),
    "max_connections_per_peer": _Integer(0, 1_000_000),
    "wal_file_bytes": _Integer(limits.MIB, 2**32),
    "segment_max_events": _Integer(1, 2**31),
    "segment_max_bytes": _Integer(4096, 2**40),
    "segment_max_age_ms": _MS,
    "cold_dir": _TEXT,
    "hot_retain_segments": _COUNT,
    "hot_retain_bytes": _COUNT,
    "lease_history_bytes": _COUNT,
    "disk_sync_ms": _Integer(1, 60_000),
    "cache_bytes": _COUNT,
    "call_timeout_ms": _Integer(100, 600_000),
    "head_timeout_ms": _Integer(100, 600_000),
    "body_timeout_ms": _Integer(100, 600_000),
    "idle_timeout_ms": _Integer(100, 3_600_000),
    "min_body_rate": _COUNT,
    "heartbeat_ms": _Integer(50, 60_000),
    "dumpable": _FLAG,
    "min_free_bytes": _COUNT,
    "elastic": _FLAG,
    "pressure_lag_ms": _Integer(1, 600_000),
    "pressure_commit_ms": _Number(0.01, 600_000),
    "request_metrics": _FLAG,
    "log": _Choice("debug", "info", "warning", "error"),
    "log_format": _Choice("logfmt", "json"),
    "access_log": _FLAG,
}
# What the file may hold beside these.
_IN_FILE: dict[str, _Kind] = {"api_keys_file": _TEXT}
_SECRETS = frozenset({"api_keys", "api_key", "keys", "secret", "secrets"})
# Variables of commands other than `topics serve`, that are near to one of ours.
_OF_OTHERS = frozenset({"TOPICS_API_KEY", "TOPICS_URL"})


class Origin(msgspec.Struct, frozen=True):
    """Where a value came from."""

    kind: str  # default, file, environment, option or socket
    where: str = ""  # what to look for there


class Configured(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in effect, and where each came from."""

    settings: Settings
    origins: dict[str, Origin]
    file: str | None = None
    key_file: KeyFile | None = None  # where the keys were read, if they can be read there again


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a TOML file says; what is wrong with it is in `faults`, one line each, and not in `values`."""

    path: str
    values: dict[str, object]
    lines: dict[str, int]
    faults: list[str]

    def place(self, key: str) -> str:
        return _place(self.path, self.lines.get(key))


def _place(path: str, line: int | None) -> str:
    return path if line is None else f"{path}, line {line}"


def read_config(path: str) -> ConfigFile:
    """Read and check a file; only one that can't be read as TOML at all raises."""
    try:
        with open(path, encoding="utf-8") as source:
            text = source.read()
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not UTF-8, so not TOML") from None
    except OSError as error:
        raise SettingsError(
            f"{path}: can't be read: {error.strerror}. It was named by --config or TOPICS_CONFIG"
        ) from None
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).partition(" (at ")
        hint = "; text needs quotes around it" if what == "Invalid value" else ""
        where = where.rstrip(")").replace("end of document", "its end")
        raise SettingsError(f"{path}, {where}: not TOML: {what[:1].lower()}{what[1:]}{hint}") from None
    lines = {key: line for key in content if (line := _line_of(key, text)) is not None}
    values: dict[str, object] = {}
    faults = []
    for key, value in content.items():
        try:
            values[key] = _from_file(key, value)
        except SettingsError as error:
            faults.append(f"{_place(path, lines.get(key))}: {error}")
    return ConfigFile(path=path, values=values, lines=lines, faults=faults)


def _line_of(key: str, text: str) -> int | None:
    """The parser keeps no lines. Where two could be meant, none is named: better no line than a wrong one."""
    name = re.escape(key)
    begins = re.compile(rf"""\s*\[?\[?\s*(?:{name}|"{name}"|'{name}')\s*[=.\]]""")
    found = [number for number, line in enumerate(text.splitlines(), 1) if begins.match(line)]
    return found[0] if len(found) == 1 else None


def _from_file(key: str, value: object) -> object:
    kind = _READERS.get(key) or _IN_FILE.get(key)
    if key in _SECRETS:
        raise SettingsError(
            f"{key}: secrets don't belong into this file. Put them into one that only the server may read, and name "
            "that with TOPICS_API_KEYS_FILE or api_keys_file"
        )
    if kind is None and isinstance(value, dict):
        raise SettingsError(f"[{key}]: settings stand at the top level of the file, without a table")
    if kind is None:
        raise SettingsError(f"there is no setting {_shown(key)}{_suggestion(key)}")
    try:
        return kind.take(value)
    except ValueError:
        raise SettingsError(f"{key} = {_shown(value)}: expected {kind.toml}{_repair(kind, value)}") from None


def _suggestion(key: str) -> str:
    plain = key.lower().replace("-", "_").removeprefix("topics_")
    near = difflib.get_close_matches(plain, [*_READERS, *_IN_FILE], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "; docs/CONFIGURATION.md lists them"


def _repair(kind: _Kind, value: object) -> str:
    """For a value that would do if it were written otherwise."""
    if not isinstance(value, str | int):
        return ""
    try:
        meant = kind.read(str(value))
    except ValueError:
        return ""
    written: object = list(meant) if isinstance(meant, tuple) else meant
    return f"; write {_shown(written)}"


def strangers(environ: Mapping[str, str]) -> list[str]:
    """Variables that nobody reads although they look like settings, with the one that may be meant. No error: an
    orchestrator puts names of its own into the environment."""
    known = {f"TOPICS_{field.upper()}" for field in (*_READERS, *_IN_FILE, "api_keys", "config")}
    found = []
    for name in sorted(environ):
        if name.startswith("TOPICS_") and name not in known | _OF_OTHERS:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            if near:
                found.append(f"{name} is no setting; did you mean {near[0]}?")
    return found


def _split_host(text: str) -> tuple[str, int | None]:
    """It may carry the port too: 0.0.0.0:4000, [::1]:4000."""
    port: str | None = None
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError
        port = rest[1:] if rest else None
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host = text
    return host, None if port is None else _PORT.read(port)


def _api_keys(
    environ: Mapping[str, str], file: ConfigFile | None, *, strict: bool
) -> tuple[tuple[Key, ...], Origin, KeyFile | None]:
    """From the environment, or better from a file: what is in the environment can be read by more people."""
    text, path = environ.get("TOPICS_API_KEYS"), environ.get("TOPICS_API_KEYS_FILE")
    if text is not None and path:
        raise SettingsError("TOPICS_API_KEYS and TOPICS_API_KEYS_FILE are both set: use one of them")
    if text is not None and text.strip():
        return parse_keys(text, source="TOPICS_API_KEYS"), Origin("environment", "TOPICS_API_KEYS"), None
    named, origin = "TOPICS_API_KEYS_FILE", Origin("environment", f"TOPICS_API_KEYS_FILE={path}")
    if not path and file is not None and (configured := file.values.get("api_keys_file")):
        path, named = str(configured), f"{file.place('api_keys_file')}: api_keys_file"
        origin = Origin("file", file.place("api_keys_file"))
    credentials = environ.get("CREDENTIALS_DIRECTORY")  # of systemd's LoadCredential
    if not path and credentials and os.path.exists(os.path.join(credentials, CREDENTIAL)):
        path = os.path.join(credentials, CREDENTIAL)
        origin = Origin("credential", path)
    if not path:
        return (), Origin("default"), None
    # A later chdir must not change which file is read again.
    source = KeyFile(os.path.abspath(path), shown=path, named=named, strict=strict, kept=origin.kind == "credential")
    return source.read(), origin, source if source.lasting else None


def load(
    environ: Mapping[str, str],
    *,
    config: str | None = None,
    options: Mapping[str, str] | None = None,
    socket: tuple[str, int] | None = None,
) -> Configured:
    """Everything together. `options` are named like variables; `socket` is the address of one that we were given."""
    values: dict[str, object] = {"wal_shards": min(os.cpu_count() or 1, 8)}
    origins: dict[str, Origin] = {}

    def place(field: str, value: object, origin: Origin) -> None:
        if field == "host" and isinstance(value, str):
            value, port = _split_host(value)
            if port is not None:
                place("port", port, origin)
        values[field] = value
        origins[field] = origin

    file = None
    if path := config or environ.get("TOPICS_CONFIG"):
        file = read_config(path)
        if file.faults:
            more = f" ({len(file.faults) - 1} more: see `topics config check`)" if len(file.faults) > 1 else ""
            raise SettingsError(file.faults[0] + more)
        for field in _READERS:
            if (value := file.values.get(field)) is not None and value != "":
                place(field, value, Origin("file", file.place(field)))
    for kind, layer in (("environment", environ), ("option", options or {})):
        for field, reader in _READERS.items():
            name = f"TOPICS_{field.upper()}"
            if not (text := layer.get(name)):
                continue
            try:
                place(field, reader.read(text), Origin(kind, name))
            except ValueError:
                raise SettingsError(f"{name}={text!r}: expected {reader.accepts}") from None
    if socket is not None:
        values["host"], values["port"] = socket
        origins["host"] = origins["port"] = Origin("socket", "the socket that was passed to us")
    keys, origins["api_keys"], key_file = _api_keys(environ, file, strict=values.get("strict_files") is True)
    settings = msgspec.structs.replace(msgspec.convert(values, Settings), api_keys=keys)
    return Configured(
        settings=settings,
        origins={field: origins.get(field, Origin("default")) for field in Settings.__struct_fields__},
        file=path,
        key_file=key_file,
    )


def require_keys(settings: Settings) -> None:
    """Nobody serves the world by accident."""
    if not settings.loopback and not settings.api_keys and not settings.allow_insecure_no_auth:
        raise SettingsError(
            f"refusing to serve {settings.host} without API keys: anyone who reaches it could read and write. "
            "Set TOPICS_API_KEYS_FILE, bind to 127.0.0.1, or set TOPICS_ALLOW_INSECURE_NO_AUTH=1 on a network you "
            "trust."
        )


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """What a server started with this environment would run with."""
    settings = load(environ).settings
    require_keys(settings)
    return settings
