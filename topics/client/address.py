"""Where the server is: a URL taken apart, and a stream to it."""

from __future__ import annotations

import os
import socket
import ssl
from urllib.parse import urlsplit

import msgspec
import trio

from topics.client.failures import BadUrl, Unreachable
from topics.settings import Settings

CONNECT_TIMEOUT_S = 10.0
SocketStream = trio.SocketStream | trio.SSLStream[trio.SocketStream]
DEFAULT_URL = f"http://{Settings().host}:{Settings().port}"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    tls: bool = False  # the server itself speaks none; a proxy before it may
    prefix: str = ""  # of every path, if a proxy serves us below one
    key: str | None = None  # what every request is signed with

    @property
    def authority(self) -> str:
        """As in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def credentials(self) -> list[tuple[str, str]]:
        """As headers."""
        return [("Authorization", f"Bearer {self.key}")] if self.key else []

    def __repr__(self) -> str:
        return f"Address({self})"  # a key is not to be printed by accident

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    async def open_stream(self) -> SocketStream:
        try:
            with trio.fail_after(CONNECT_TIMEOUT_S):
                if self.tls:
                    stream = await trio.open_ssl_over_tcp_stream(self.host, self.port, https_compatible=True)
                    await stream.do_handshake()
                    return stream
                return await trio.open_tcp_stream(self.host, self.port)
        except trio.TooSlowError:
            raise Unreachable(f"no connection to {self} within {CONNECT_TIMEOUT_S:.0f} s") from None
        except (OSError, ssl.SSLError, trio.BrokenResourceError) as error:
            raise Unreachable(f"no connection to {self}: {_words(error)}") from None


def parse_url(url: str, *, key: str | None = None) -> Address:
    """`http://host:port`; the scheme may be left out."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise BadUrl(f"{url!r} is no address of a server: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise BadUrl(f"{url!r} is no address of a server: it begins with {parts.scheme}://, not http:// or https://")
    if not parts.hostname:
        raise BadUrl(f"{url!r} is no address of a server: it names no host")
    if parts.query or parts.fragment or parts.username:
        raise BadUrl(f"{url!r} is no address of a server: only a host, a port and a path are expected")
    tls = parts.scheme == "https"
    if port is None:
        port = 443 if tls else 80
    return Address(host=parts.hostname, port=port, tls=tls, prefix=parts.path.rstrip("/"), key=key)


def _words(error: BaseException) -> str:
    """The reason beneath "all attempts failed"."""
    while isinstance(error, BaseExceptionGroup) or error.__cause__ is not None:
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error
    if isinstance(error, socket.gaierror):
        return (error.strerror or str(error)).lower()
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
