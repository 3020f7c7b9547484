"""Who gets a place at a gateway, who is only a guest, and what is done when descriptors run out."""

from __future__ import annotations

import errno
import resource
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from delivery import Answer, House, Pipe, parse_answer

from topics import limits
from topics.actors.log import Log
from topics.gateway.admission.places import Places, peer_of
from topics.gateway.http1.door import Door
from topics.gateway.http1.server import H2_PREFACE
from topics.settings import Settings

APPEND = (
    b"POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 24\r\n\r\n"
    b'{"records":[{"data":1}]}'
)
HEALTH = b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SCRAPE = b"GET /v0/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


# --- places ---


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_who_is_one_peer(address: str, peer: str) -> None:
    assert peer_of(address) == peer


def test_places_are_counted_in_all_and_per_peer() -> None:
    places = Places(most=4, per_peer=2)
    socks: list[Any] = [Pipe() for _ in range(6)]
    assert [places.take(sock, "a") is None for sock in socks[:3]] == [True, True, False]
    assert [places.take(sock, "b") is None for sock in socks[3:5]] == [True, True]
    refused = places.take(socks[5], "c")
    assert refused is not None
    assert (refused.status, refused.detail) == (429, {"limit": "max_connections", "max": 4})
    places.give(socks[0])
    refused = places.take(socks[5], "b")
    assert refused is not None
    assert refused.detail == {"limit": "max_connections_per_peer", "max": 2}
    assert places.take(socks[5], "a") is None
    places.give(socks[2])  # it has none
    for sock in socks * 2:
        places.give(sock)
    assert (len(places), places._counts) == (0, {})


@pytest.mark.parametrize("gateways", [1, 2, 3, 16])
@pytest.mark.parametrize(("most", "per_peer"), [(20_000, 10_000), (17, 16), (100, 33)])
def test_gateways_share_the_places_of_all(gateways: int, most: int, per_peer: int) -> None:
    settings = Settings(max_connections=most, max_connections_per_peer=per_peer, gateways=gateways)
    shares = [Places.of(settings, gateway) for gateway in range(gateways)]
    assert sum(places.most for places in shares) == most
    assert sum(places.per_peer for places in shares) == per_peer
    assert max(places.most for places in shares) - min(places.most for places in shares) <= 1


def test_every_gateway_has_a_place_and_no_limit_stays_none() -> None:
    settings = Settings(max_connections=1, max_connections_per_peer=1, gateways=4)
    assert [(places.most, places.per_peer) for places in (Places.of(settings, at) for at in range(4))] == [(1, 1)] * 4
    unbounded = Settings(max_connections_per_peer=0, gateways=4)
    assert [Places.of(unbounded, at).per_peer for at in range(4)] == [0] * 4


def test_0_is_no_limit_for_a_peer() -> None:
    places = Places(most=1_000, per_peer=0)
    socks: list[Any] = [Pipe() for _ in range(1_000)]
    assert all(places.take(sock, "a") is None for sock in socks)


# --- the door ---


class Listener:
    """What knocks, and how many descriptors there are."""

    def __init__(self) -> None:
        self.knocking: deque[tuple[Pipe, str]] = deque()
        self.let_in: list[Pipe] = []
        self.descriptors = 10**6
        self.spare: Callable[[], bool] = lambda: False  # one was given up
        self.failed = 0

    def accept(self) -> tuple[Pipe, tuple[str, int]]:
        if sum(not pipe.closed for pipe in self.let_in) >= self.descriptors + self.spare():
            self.failed += 1
            raise OSError(errno.EMFILE, "Too many open files")  # as the kernel does, whether one knocks or not
        if not self.knocking:
            raise BlockingIOError
        pipe, address = self.knocking.popleft()
        self.let_in.append(pipe)
        return pipe, (address, 1)


class Scene:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.house = House(folder, **settings)
        self.lane = self.house.gateways[0].lane
        self.listener = Listener()
        self.others_have_room = False
        self.refused: list[str] = []
        self.door = Door(
            self.listener,  # type: ignore[arg-type]
            self.lane,
            self.lane.guests.places,
            most=self.house.settings.max_connections,
            log=Log("gateway-0", "error", "logfmt"),
            leave_to_others=lambda: self.others_have_room,
            refused=self.refused.append,
        )
        self.door._is_knocked_at = lambda: bool(self.listener.knocking)  # type: ignore[method-assign]
        self.listener.spare = lambda: self.door._spare < 0

    def knock(self, raw: bytes = b"", address: str = "10.0.0.1") -> Pipe:
        pipe = Pipe()
        pipe.inbox += raw
        self.listener.knocking.append((pipe, address))
        self.door.accept()
        self.house.settle()
        return pipe

    def say(self, pipe: Pipe, raw: bytes) -> Answer:
        pipe.took.clear()
        pipe.inbox += raw
        self.house.settle()
        return answer(pipe)


def answer(pipe: Pipe) -> Answer:
    found = parse_answer(bytes(pipe.took))
    assert found is not None
    return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, max_connections=3, max_connections_per_peer=2)
    yield scene
    scene.door.close()
    scene.house.crash()


def full(scene: Scene) -> list[Pipe]:
    return [scene.knock(address=f"10.0.1.{number}") for number in range(3)]


def test_beyond_the_limit_only_probes_and_scrapes_are_answered(scene: Scene) -> None:
    first = full(scene)
    refused = answer(scene.knock(APPEND))
    assert (refused.status, refused.headers["connection"]) == (429, "close")
    assert refused.json["error"]["detail"] == {"limit": "max_connections", "max": 3}
    assert answer(scene.knock(HEALTH)).status == 200
    assert answer(scene.knock(SCRAPE)).status == 200
    guest = scene.knock()
    assert scene.say(guest, HEALTH).status == 200
    assert scene.say(guest, HEALTH).status == 200
    assert scene.say(guest, APPEND).status == 429
    assert scene.say(first[0], APPEND).status == 201
    assert scene.refused == ["max_connections"] * 4, "each connection that found no place, once"


def test_a_guest_gets_the_place_that_becomes_free(scene: Scene) -> None:
    first = full(scene)
    guest = scene.knock()
    first[0].ended = True
    scene.house.settle()
    assert scene.say(guest, APPEND).status == 201
    assert len(scene.lane.guests) == 0
    assert answer(scene.knock(APPEND)).status == 429


def test_one_address_has_places_of_its_own(scene: Scene) -> None:
    pipes = [scene.knock(address="10.0.0.1") for _ in range(3)]
    assert [scene.say(pipe, APPEND).status for pipe in pipes] == [201, 200, 429]
    assert answer(pipes[2]).json["error"]["detail"] == {"limit": "max_connections_per_peer", "max": 2}
    assert answer(scene.knock(APPEND, address="10.0.0.2")).status == 200
    assert scene.refused == ["max_connections_per_peer"]


def test_a_guest_sends_no_body(scene: Scene) -> None:
    """It is refused before it has come, and nothing of it is kept."""
    full(scene)
    large = APPEND.replace(b"Content-Length: 24", b"Content-Length: 9999999")
    assert answer(scene.knock(large)).status == 429
    assert answer(scene.knock(APPEND[:-10])).status == 429
    chunked = APPEND.replace(b"Content-Length: 24", b"Transfer-Encoding: chunked")
    assert answer(scene.knock(chunked)).status == 429


def test_guests_that_say_nothing_make_room_for_others(scene: Scene) -> None:
    full(scene)
    silent = [scene.knock() for _ in range(limits.GUESTS + 5)]
    assert [pipe.closed for pipe in silent] == [True] * 5 + [False] * limits.GUESTS
    assert answer(silent[0]).json["error"]["code"] == "throttled"
    assert answer(scene.knock(HEALTH)).status == 200
    assert silent[5].closed
    assert len(scene.lane.guests) == limits.GUESTS


def test_guests_that_never_stop_asking_make_room_after_a_while(scene: Scene) -> None:
    """They ask ahead and don't read: all of them wait for something, for as long as they like."""
    full(scene)
    now_ns = 0
    scene.lane.guests._clock = lambda: now_ns
    greedy = [scene.knock(HEALTH) for _ in range(limits.GUESTS)]
    for pipe in greedy:
        pipe.window = 0
        pipe.inbox += HEALTH * 3
    scene.house.settle()
    assert answer(scene.knock(HEALTH)).status == 429
    now_ns = limits.GUEST_STAY_MS * 1_000_000
    assert answer(scene.knock(HEALTH)).status == 200
    assert [pipe.closed for pipe in greedy] == [True] + [False] * (limits.GUESTS - 1)
    assert len(scene.lane.guests) == limits.GUESTS


def test_an_http2_client_is_told_in_its_own_words(scene: Scene) -> None:
    full(scene)
    pipe = scene.knock(H2_PREFACE)
    assert pipe.closed
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    events = client.receive_data(bytes(pipe.took))
    [end] = [event for event in events if isinstance(event, h2.events.ConnectionTerminated)]
    assert end.error_code == 0xB  # ENHANCE_YOUR_CALM


def test_an_http2_connection_keeps_its_place(scene: Scene) -> None:
    pipe = scene.knock(H2_PREFACE)
    assert not scene.lane.connections
    assert len(scene.lane.guests.places) == 1
    scene.lane.guests.places.give(pipe)  # type: ignore[arg-type]
    assert len(scene.lane.guests.places) == 0


def test_another_gateway_that_has_room_takes_them(scene: Scene) -> None:
    full(scene)
    scene.others_have_room = True
    pipe = Pipe()
    scene.listener.knocking.append((pipe, "10.0.0.1"))
    assert not scene.door.accept()
    assert scene.listener.knocking


# --- descriptors ---


def test_without_descriptors_probes_are_answered_one_after_the_other(tmp_path: Path) -> None:
    scene = Scene(tmp_path, max_connections=100)
    scene.listener.descriptors = 4
    pipes = [scene.knock(address=f"10.0.1.{number}") for number in range(4)]
    for _ in range(3):
        assert answer(scene.knock(HEALTH)).status == 200
        assert answer(scene.knock(SCRAPE)).status == 200
        silent = scene.knock()
        assert not silent.closed
        refused = answer(scene.knock(APPEND))
        assert (refused.status, refused.json["error"]["detail"]["limit"]) == (429, "open_files")
        assert silent.closed
    assert scene.say(pipes[0], APPEND).status == 201
    assert scene.listener.failed > 0
    scene.listener.descriptors = 100
    scene.door.sweep()
    assert answer(scene.knock(APPEND)).status == 200
    scene.door.close()
    scene.house.crash()


def test_a_probe_is_heard_before_its_descriptor_is_given_to_the_next(tmp_path: Path) -> None:
    """Though both are accepted in the same round."""
    scene = Scene(tmp_path, max_connections=100)
    scene.listener.descriptors = 0
    pipes = [Pipe() for _ in range(6)]
    for number, pipe in enumerate(pipes):
        pipe.inbox += HEALTH if number % 2 else b""
        scene.listener.knocking.append((pipe, "10.0.0.1"))
    assert scene.door.accept()
    scene.house.settle()
    assert [answer(pipe).status for pipe in pipes] == [429, 200] * 3
    assert [pipe.closed for pipe in pipes] == [True] * 5 + [False]
    assert all(pipe.took.count(b"HTTP/1.1 ") == 1 for pipe in pipes)
    scene.door.close()
    scene.house.crash()


def test_with_nothing_to_give_up_it_waits_for_the_next_sweep(tmp_path: Path) -> None:
    scene = Scene(tmp_path, max_connections=100)
    scene.listener.descriptors = -1
    scene.listener.knocking += [(Pipe(), "10.0.0.1")] * 5
    assert not scene.door.accept()
    assert scene.listener.failed == 2  # with the spare one, and without
    assert not scene.door.accept()
    assert scene.listener.failed == 3
    scene.door.close()
    scene.house.crash()


def test_places_leave_room_for_guests_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics.gateway.http1.door._count_open_files", lambda: 50)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (200, 200))
    scene = Scene(tmp_path, max_connections=1_000)
    assert scene.lane.guests.places.most == 200 - 50 - limits.GUESTS - limits.SPARE_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10_000, 10_000))
    scene.door.sweep()
    assert scene.lane.guests.places.most == 1_000
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    scene.door.sweep()
    assert scene.lane.guests.places.most == 1_000
    scene.door.close()
    scene.house.crash()
