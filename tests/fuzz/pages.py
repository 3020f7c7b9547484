"""Requests as browsers send them for pages: hosts, origins and fetch metadata, of this server's pages, of others, and
of no page at all. ENVIRON says which names and origins the server of the scene knows."""

from __future__ import annotations

from random import Random

Headers = list[tuple[bytes, bytes]]

HOST = b"t"
ENVIRON: dict[str, object] = {
    "TOPICS_ALLOWED_HOSTS": "t, *.fuzz.example",
    "TOPICS_ALLOWED_ORIGINS": "https://listed.example",
}
OURS = (HOST, b"T:4000", b"t.", b"localhost:4000", b"a.localhost", b"127.9.9.9", b"[::1]:1", b"x.fuzz.example")
EVIL = (
    b"evil.example",
    b"evil.example:4000",
    b"t.evil.example",
    b"fuzz.example",
    b"evilfuzz.example",
    b"localhost.evil.example",
    b"10.0.0.1",
    b"[2001:db8::1]:4000",
    b"127.1",
    b"2130706433",
    b"t, t",
    b"t@evil.example",
    b"evil.example#t",
    b"t:port",
    b"[::1",
    b"::1",
    b"..",
    b"-",
    b"%74",
    b"\xff",
    b"h" * 300,
    b"[" + b":" * 2_000 + b"]",
    b"1" * 5_000,
    b"a." * 120 + b"fuzz.example.evil",
)
OWN_ORIGINS = (b"", b"http://t", b"HTTPS://T")
ORIGINS = (
    b"null",
    b"http://evil.example",
    b"https://listed.example",
    b"https://listed.example:8443",
    b"http://t:4001",
    b"http://t.evil.example",
    b"http://",
    b"://t",
    b"file://",
    b"http://t, http://t",
    b"http://[::1",
    b"http://\xff",
    b"o" * 5_000,
)
SITES = (b"same-site", b"cross-site", b"CROSS-SITE", b"none, none", b"elsewhere", b"\xff", b"s" * 3_000)
DESTINATIONS = (b"empty", b"image", b"document", b"iframe", b"websocket", b"", b"\xff", b"empty, empty")
ACCEPTS = (
    b"*/*",
    b"text/event-stream",
    b"image/avif,image/webp,image/*,*/*;q=0.8",
    b"text/html,application/xhtml+xml,*/*;q=0.8",
    b"*/*;q=0",
    b";;,;q=,*",
    b"text/event-stream;q=\xff",
)


def some_page(dice: Random) -> tuple[bytes, Headers]:
    """Host and headers that say anything, or nothing, about a page."""
    host = dice.choice(OURS if dice.random() < 0.6 else EVIL)
    headers: Headers = []
    for name, values in (
        (b"Origin", (*OWN_ORIGINS[1:], *ORIGINS)),
        (b"Sec-Fetch-Site", (b"same-origin", b"none", *SITES)),
        (b"Sec-Fetch-Dest", DESTINATIONS),
        (b"Accept", ACCEPTS),
    ):
        headers += [(name, dice.choice(values)) for _ in range(dice.choice((0, 0, 1, 1, 1, 2)))]
    dice.shuffle(headers)
    return host, headers


def foreign_page(dice: Random) -> tuple[bytes, Headers]:
    """What only probes may answer with a success: a name that is not ours, or a page of neither our origin nor a listed
    one."""
    if dice.random() < 0.4:
        host = dice.choice(EVIL)
        return host, [(b"Origin", b"http://" + host), (b"Sec-Fetch-Site", b"same-origin")][: dice.randrange(3)]
    origins = [origin for origin in ORIGINS if origin != b"https://listed.example"]
    headers = [(b"Origin", dice.choice(origins))]
    if dice.random() < 0.6:
        headers = [*headers[: dice.randrange(2)], (b"Sec-Fetch-Site", dice.choice(SITES))]
    return HOST, headers
