"""Every host against every address that a server may listen on, with and without keys and lists; every page against
every kind of route; who is given an event stream. The tables are those of the module, written down a second time."""

from __future__ import annotations

import itertools

import pytest
from parts import metrics, queues, routers, watches

from topics.errors import ApiError
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.origins import Kind, Origins, Page, Visit, accepts_events, check_events, kind_of
from topics.keys import parse_keys
from topics.settings import Settings
from topics.shm.counters import Board

KEYS = parse_keys("secret", source="a test")
SETTINGS = Settings()
ROUTES = Routes(
    Handlers(SETTINGS, shards=1, board=Board.create(["shard-0"])),
    watches(shards=1),
    routers(shards=1),
    queues(shards=1),
    metrics(shards=1),
)
REQUESTS: dict[Kind, list[tuple[str, str]]] = {
    Kind.PROBE: [
        *(("GET", path) for path in ("/v0/health", "/v0/ready", "/health", "/ready", "/healthz", "/readyz")),
        ("HEAD", "/v0/health"),
    ],
    Kind.READ: [
        ("GET", "/v0/topics"),
        ("GET", "/v0/topics/t"),
        ("HEAD", "/v0/topics/t"),
        ("GET", "/v0/routers"),
        ("GET", "/v0/routers/r"),
        ("GET", "/v0/metrics"),
    ],
    Kind.SOCKET: [("GET", "/v0/ws")],
    Kind.STREAM: [("GET", "/v0/topics/t/work"), ("GET", "/v0/watch/wid_x")],
    Kind.CHANGE: [
        ("PUT", "/v0/topics/t"),
        ("DELETE", "/v0/topics/t"),
        ("POST", "/v0/topics/t"),
        *(("POST", f"/v0/topics/t/{verb}") for verb in ("diff", "delete", "claim", "ack", "nack", "extend")),
        ("PUT", "/v0/routers/r"),
        ("DELETE", "/v0/routers/r"),
        ("POST", "/v0/watch"),
    ],
}
READ = ROUTES.find("GET", "/v0/topics")


def refusal(origins: Origins, method: str, path: str, visit: Visit) -> str | None:
    try:
        origins.admit(method, ROUTES.find(method, path), visit)
    except ApiError as error:
        return error.code
    return None


def test_every_route_has_a_kind() -> None:
    """And the lists above have every route."""
    for kind, requests in REQUESTS.items():
        for method, path in requests:
            assert kind_of(method, ROUTES.find(method, path)) is kind, (method, path)
    asked = {ROUTES.find(method, path).number for requests in REQUESTS.values() for method, path in requests}
    assert asked == set(range(1, len(ROUTES.labels)))


# --- hosts -------------------------------------------------------------------------------------------

LOOPBACK = [
    *("localhost", "LOCALHOST:4000", "localhost.", "app.localhost", "a.b.localhost:1"),
    *("127.0.0.1", "127.0.0.1:4000", "127.8.9.10", "[::1]", "[::1]:4000", "[0::1]", "[::ffff:127.0.0.1]:1"),
]
LAN = ["10.0.0.7", "10.0.0.7:4000", "[::ffff:10.0.0.7]"]
OTHER_ADDRESSES = ["10.0.0.8", "6.6.6.6:4000", "[2001:db8::1]:4000", "0.0.0.0", "[::]"]
BOUND_NAME = ["topics.internal", "Topics.Internal:4000", "topics.internal."]
LISTED = ["app.example.com", "APP.example.com.:80", "x.wild.example", "a.b.wild.example", "192.0.2.1:9"]
STRANGE = [
    *("evil.example", "evil.example:4000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost"),
    *("wild.example", "evilwild.example", "app.example.com.evil.example", "sub.app.example.com", "internal"),
    *("", " ", "a b", "localhost,evil.example", "user@localhost", "localhost:x", "127.1", "2130706433", "[::1", "\xff"),
    "x" * 5_000,
]
EVERY_HOST = [*LOOPBACK, *LAN, *OTHER_ADDRESSES, *BOUND_NAME, *LISTED, *STRANGE]
ENTRIES = ("app.example.com", "*.wild.example", "192.0.2.1")
BOUND: dict[str, list[str]] = {  # what a server knows besides loopback
    "127.0.0.1": [],
    "127.0.0.2": [],
    "::1": [],
    "localhost": [],
    "10.0.0.7": LAN,
    "0.0.0.0": [*LAN, *OTHER_ADDRESSES, LISTED[-1]],
    "::": [*LAN, *OTHER_ADDRESSES, LISTED[-1]],
    "": [*LAN, *OTHER_ADDRESSES, LISTED[-1]],
    "topics.internal": [*LAN, *OTHER_ADDRESSES, LISTED[-1], *BOUND_NAME],
    "fe80::1%eth0": [],
}


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("bound", BOUND)
def test_hosts(bound: str, listed: bool, keyed: bool) -> None:
    origins = Origins(
        Settings(host=bound, api_keys=KEYS if keyed else (), allowed_hosts=ENTRIES if listed else ()),
    )
    known = {*LOOPBACK, *BOUND[bound], *(LISTED if listed else [])}
    for host in EVERY_HOST:
        allowed = host in known or (keyed and not listed)
        for _ in range(2):  # the second verdict is one that was kept
            expected = None if allowed else "misdirected_request"
            assert refusal(origins, "GET", "/v0/topics", Visit([host.encode("latin-1")])) == expected, host


def test_the_link_local_address_that_it_listens_on() -> None:
    origins = Origins(Settings(host="fe80::1%eth0"))
    assert origins.knows(b"[fe80::1]:4000")
    assert not origins.knows(b"[fe80::2]:4000")


@pytest.mark.parametrize("keyed", [False, True])
def test_every_host_can_be_allowed(keyed: bool) -> None:
    origins = Origins(Settings(api_keys=KEYS if keyed else (), allowed_hosts=("*", "app.example.com")))
    for host in EVERY_HOST:
        assert refusal(origins, "POST", "/v0/topics/t", Visit([host.encode("latin-1")])) is None


@pytest.mark.parametrize("kind", Kind)
def test_the_host_counts_for_every_route_but_probes(kind: Kind) -> None:
    origins = Origins(Settings())
    for method, path in REQUESTS[kind]:
        expected = None if kind is Kind.PROBE else "misdirected_request"
        assert refusal(origins, method, path, Visit([b"evil.example:4000"])) == expected
        assert refusal(origins, method, path, Visit([b"localhost:4000"])) is None


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("GET", "/", "not_found"),
        ("GET", "/v0/nothing", "not_found"),
        ("PATCH", "/v0/topics/t", "method_not_allowed"),
        ("POST", "/v0/health", "method_not_allowed"),
        ("GET", "/v0/topics/%20", "invalid_request"),
        ("GET", "/v0/topics?a=%ff", "invalid_request"),
    ],
)
def test_the_host_counts_before_what_is_not_there(method: str, target: str, code: str) -> None:
    def found(hosts: list[bytes], *allowed: str) -> str:
        with pytest.raises(ApiError) as caught:
            Origins(Settings(allowed_hosts=allowed)).find(ROUTES, method, target, Visit(hosts))
        return caught.value.code

    assert found([b"evil.example:4000"]) == "misdirected_request"
    assert found([b"localhost:4000"]) == found([]) == found([b"evil.example"], "*") == code


def test_a_target_with_a_host_names_two() -> None:
    origins = Origins(Settings())
    for first, second in itertools.product((b"localhost", b"evil.example"), repeat=2):
        expected = None if (first, second) == (b"localhost", b"localhost") else "misdirected_request"
        assert refusal(origins, "GET", "/v0/topics", Visit([first, second])) == expected


def test_no_host_at_all_is_http_1_0() -> None:
    assert refusal(Origins(Settings()), "GET", "/v0/topics", Visit([])) is None


def test_a_refused_host_says_what_allows_it() -> None:
    with pytest.raises(ApiError) as caught:
        Origins(Settings()).admit("GET", READ, Visit([b"evil.example:4000"]))
    assert caught.value.status == 421
    assert caught.value.detail == {"host": "evil.example:4000"}
    assert "TOPICS_ALLOWED_HOSTS" in caught.value.message


def test_verdicts_are_not_kept_for_ever() -> None:
    origins = Origins(Settings())
    for number in range(10_000):
        assert not origins.knows(b"%d.evil.example" % number)
    assert len(origins._verdicts) <= 256
    assert origins.knows(b"localhost")


# --- pages -------------------------------------------------------------------------------------------

SITES = ["", "none", "same-origin", "same-site", "cross-site", "Cross-Site", "nonsense", "same-origin,same-origin"]
OWN = ["", "http://127.0.0.1:4000", "HTTP://127.0.0.1:4000"]
LISTED_ORIGINS = ["https://app.example.com", "HTTPS://App.example.com", "http://localhost:3000"]
FOREIGN = [
    *("null", "http://evil.example", "http://127.0.0.1", "http://127.0.0.1:4001", "http://localhost:4000"),
    *("http://127.0.0.1:4000.evil.example", "http://127.0.0.1:4000@evil.example", "http://evil.example/127.0.0.1:4000"),
    *("http://app.example.com", "https://app.example.com:8443", "file://", "ftp://127.0.0.1:4000", "127.0.0.1:4000"),
    *("http://127.0.0.1:4000, http://127.0.0.1:4000", "chrome-extension://abc", "nonsense", "\xff"),
]
LIST = ("https://app.example.com", "http://localhost:3000")


def page(site: str, origin: str, allowed: tuple[str, ...]) -> Page:
    if site == "same-origin" or (site in ("", "none") and origin in OWN):
        return Page.OWN
    if "*" in allowed or (allowed and origin in LISTED_ORIGINS):
        return Page.LISTED
    return Page.FOREIGN


MAY = {
    Page.OWN: {Kind.PROBE, Kind.READ, Kind.SOCKET, Kind.STREAM, Kind.CHANGE},
    Page.LISTED: {Kind.PROBE, Kind.READ, Kind.SOCKET},
    Page.FOREIGN: {Kind.PROBE},
}


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("allowed", [(), LIST, ("*",)])
@pytest.mark.parametrize("site", SITES)
def test_pages(site: str, allowed: tuple[str, ...], keyed: bool) -> None:
    origins = Origins(Settings(allowed_origins=allowed, api_keys=KEYS if keyed else ()))
    for origin in (*OWN, *LISTED_ORIGINS, *FOREIGN):
        visit = Visit([b"127.0.0.1:4000"], site.encode(), origin.encode("latin-1"))
        is_page = page(site, origin, allowed)
        assert origins.page_of(visit) is is_page, origin
        for kind, requests in REQUESTS.items():
            for method, path in requests:
                expected = None if kind in MAY[is_page] else "forbidden"
                assert refusal(origins, method, path, visit) == expected, (origin, method, path)


@pytest.mark.parametrize(
    ("host", "origin", "own"),
    [
        ("topics.example", "http://topics.example", True),
        ("topics.example", "https://topics.example", True),  # behind a proxy that ends TLS
        ("topics.example:443", "https://topics.example", True),
        ("topics.example:80", "http://topics.example", True),
        ("topics.example", "https://topics.example:443", True),
        ("topics.example.", "https://topics.example", True),
        ("topics.example:80", "https://topics.example", False),
        ("topics.example", "https://topics.example:8443", False),
        ("topics.example:8443", "https://topics.example", False),
        ("topics.example", "https://sub.topics.example", False),
        ("topics.example", "https://eviltopics.example", False),
        ("[::1]:4000", "http://[::1]:4000", True),
        ("[0::1]:4000", "http://[::1]:4000", True),
        ("a b", "http://a b", False),
        ("", "http://", False),
        ("", "null", False),
    ],
)
def test_a_page_is_compared_with_the_host_that_it_asks(host: str, origin: str, own: bool) -> None:
    expected = Page.OWN if own else Page.FOREIGN
    assert Origins(Settings(api_keys=KEYS)).page_of(Visit([host.encode()], b"", origin.encode())) is expected


def test_a_page_of_a_target_with_a_host() -> None:
    origins = Origins(Settings())
    assert origins.page_of(Visit([b"localhost:1", b"localhost:2"], b"", b"http://localhost:2")) is Page.OWN
    assert origins.page_of(Visit([b"localhost:1", b"localhost:2"], b"", b"http://localhost:1")) is Page.FOREIGN
    assert origins.page_of(Visit([], b"", b"http://localhost")) is Page.FOREIGN  # HTTP/1.0


def test_the_host_of_a_rebound_name_is_refused_before_its_page_is_its_own() -> None:
    visit = Visit([b"evil.example:4000"], b"same-origin", b"http://evil.example:4000")
    for kind in (Kind.READ, Kind.SOCKET, Kind.STREAM, Kind.CHANGE):
        for method, path in REQUESTS[kind]:
            assert refusal(Origins(Settings()), method, path, visit) == "misdirected_request"


@pytest.mark.parametrize(
    ("visit", "detail"),
    [
        (Visit([b"localhost"], b"cross-site", b"http://Evil.example"), {"origin": "http://evil.example"}),
        (Visit([b"localhost"], b"cross-site"), {"site": "cross-site"}),
        (Visit([b"localhost"], b"", b"x" * 5_000), {"origin": "x" * 256}),
    ],
)
def test_a_refused_page_is_told_who_it_is(visit: Visit, detail: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        Origins(Settings()).admit("GET", READ, visit)
    assert (caught.value.status, caught.value.detail) == (403, detail)
    assert "TOPICS_ALLOWED_ORIGINS" in caught.value.message


# --- event streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (b"", True),
        (b" ", True),
        (b"*/*", True),
        (b"*/*;q=0.8", True),
        (b"text/*", True),
        (b"text/*, */*;q=0.1", True),
        (b"text/event-stream", True),
        (b"TEXT/Event-Stream", True),
        (b"text/event-stream; charset=utf-8", True),
        (b"text/html, text/event-stream;q=0.5", True),
        (b"application/json, text/event-stream, */*", True),
        (b"application/json", False),
        (b"application/json,*/*;q=0.1", False),
        (b"image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8", False),
        (b"image/avif,image/webp,*/*", False),
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
        (b"text/css,*/*;q=0.1", False),
        (b"*/*, image/png", False),
        (b"text/html", False),
        (b"text/event-streams", False),
        (b"application/*", False),
        (b"text/event-stream;q=0", False),
        (b"text/event-stream; q=0.000, */*", False),
        (b"*/*;q=0", False),
        (b",", False),
    ],
)
def test_what_clients_accept(accept: bytes, expected: bool) -> None:
    assert accepts_events(accept) is expected
    for destination in (b"", b"empty", b"EMPTY", b"image", b"document", b"iframe", b"script", b"empty,empty", b"x"):
        headers = {b"accept": accept} | ({b"sec-fetch-dest": destination} if destination else {})
        if expected and destination.lower() in (b"", b"empty"):
            check_events(headers)
            continue
        with pytest.raises(ApiError) as caught:
            check_events(headers)
        assert (caught.value.code, caught.value.status) == ("not_acceptable", 406)
