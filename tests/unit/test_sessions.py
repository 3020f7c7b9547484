"""The life of a watch session at its home: every state with every event; takeovers, deaths, restores, limits, TTL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model import error_of, examples

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.errors import ApiError
from topics.router.mirror import Mirror
from topics.settings import Settings
from topics.walshard.sessions import Sessions

TTL_MS = 10_000


class Gateway:
    """A link's writer, and what came through it."""

    def __init__(self, name: str = "gateway") -> None:
        self.name = name
        self.got: list[tuple[int, int, Any]] = []  # op, correlation, message

    def __repr__(self) -> str:
        return self.name

    def send_always(self, message: bytes) -> None:
        correlation = messages.unpack(message).correlation
        self.got.append((message[0], correlation, messages.decode_answer(message)[0]))

    def taken(self) -> list[int]:
        """Streams it was told to close, since it was last asked."""
        taken = [said.stream for op, _, said in self.got if op == Op.TAKE_STREAM]
        self.got = [said for said in self.got if said[0] != Op.TAKE_STREAM]
        return taken

    def granted(self) -> list[tuple[int, messages.StreamOpened]]:
        """Opens that were answered late."""
        granted = [(correlation, said) for op, correlation, said in self.got if op == Op.OPEN_STREAM]
        self.got = [said for said in self.got if said[0] != Op.OPEN_STREAM]
        return granted


class Home:
    """The table, with its questions as methods."""

    def __init__(self, *, gateways: int = 1, now_ms: int = 1_000_000, restarted: bool = False, **settings: Any) -> None:
        self.now_ms = now_ms
        self.settings = Settings(session_ttl_ms=TTL_MS, gateways=gateways, **settings)
        self.table = Sessions(self.settings, now_ms=lambda: self.now_ms, restarted=restarted)
        self._correlation = 0

    def ask(self, op: Op, gateway: Gateway, request: Any) -> Any:
        self._correlation += 1
        answer = self.table.handlers[op](request, gateway, self._correlation)
        if answer is None:
            return None
        assert messages.unpack(answer).correlation == self._correlation
        return messages.decode_answer(answer)[0]

    def create(self, wid: str, gateway: Gateway, *, cursors: list[int] | None = None) -> None:
        cursors = [0] if cursors is None else cursors
        made = self.ask(
            Op.CREATE_SESSION, gateway, messages.CreateSession(wid, wid.encode(), cursors, [7] * len(cursors))
        )
        assert made == messages.SessionCreated()

    def open(self, wid: str | None, gateway: Gateway) -> Any:
        """StreamOpened, or the correlation under which it will come."""
        answer = self.ask(Op.OPEN_STREAM, gateway, messages.OpenStream(wid))
        return self._correlation if answer is None else answer

    def save(self, stream: int, gateway: Gateway, *cursors: int) -> None:
        assert self.ask(Op.SAVE_CURSORS, gateway, messages.SaveCursors(stream, list(cursors), [8])) is None

    def close(self, stream: int, gateway: Gateway, *cursors: int) -> None:
        at = list(cursors) if cursors else None
        assert self.ask(Op.CLOSE_STREAM, gateway, messages.CloseStream(stream, at, [8] if cursors else None)) is None

    def restore(
        self, wid: str | None, gateway: Gateway, *cursors: int, stream: int = 0, epoch: int = 0, idle_ms: int = 0
    ) -> None:
        definition = b"" if wid is None else wid.encode()
        request = messages.RestoreSession(wid, stream, epoch, definition, list(cursors), [8] * len(cursors), idle_ms)
        assert self.ask(Op.RESTORE_SESSION, gateway, request) is None

    def all_restored(self, *gateways: Gateway) -> None:
        for gateway in gateways:
            self.restore(None, gateway)

    def books(self) -> tuple[int, int]:
        return self.table.sessions, self.table.streams


@pytest.fixture
def one() -> Gateway:
    return Gateway("one")


@pytest.fixture
def two() -> Gateway:
    return Gateway("two")


@pytest.fixture
def home(one: Gateway) -> Home:
    home = Home()
    home.all_restored(one)
    return home


# --- one stream ----------------------------------------------------------------------------------------


def test_open_close_open(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one, cursors=[4])
    assert home.books() == (1, 0)
    opened = home.open("w", one)
    assert (opened.definition, opened.cursors, opened.topic_ids, opened.stale) == (b"w", [4], [7], False)
    assert home.books() == (1, 1)
    home.close(opened.stream, one, 9)
    assert home.books() == (1, 0)
    again = home.open("w", two)
    assert (again.cursors, again.topic_ids, again.stale) == ([9], [8], False)
    assert again.stream != opened.stream
    assert again.epoch == opened.epoch + 1


def test_a_close_without_cursors_leaves_them(home: Home, one: Gateway) -> None:
    home.create("w", one, cursors=[4])
    opened = home.open("w", one)
    home.save(opened.stream, one, 6)
    home.close(opened.stream, one)
    again = home.open("w", one)
    assert (again.cursors, again.topic_ids) == ([6], [8])


def test_a_socket_has_no_session(home: Home, one: Gateway) -> None:
    opened = home.open(None, one)
    assert (opened.definition, opened.cursors, opened.stale) == (b"", [], False)
    assert home.books() == (0, 1)
    other = home.open(None, one)
    assert other.stream != opened.stream
    home.close(opened.stream, one)
    home.close(opened.stream, one)
    assert home.books() == (0, 1)
    assert one.got == []


def test_an_unknown_session(home: Home, one: Gateway) -> None:
    assert error_of(lambda: home.open("nothing", one)).code == "not_found"
    assert home.books() == (0, 0)


@pytest.mark.parametrize("event", ["save", "close", "close nothing"])
def test_only_the_gateway_that_holds_a_stream_moves_it(home: Home, one: Gateway, two: Gateway, event: str) -> None:
    home.create("w", one, cursors=[4])
    opened = home.open("w", one)
    if event == "save":
        home.save(opened.stream, two, 9)
    elif event == "close":
        home.close(opened.stream, two, 9)
    else:
        home.close(opened.stream, two)
    assert home.books() == (1, 1)
    home.close(opened.stream, one)
    assert home.open("w", one).cursors == [4]


@pytest.mark.parametrize("number", [0, 1, 2**40])
def test_a_stream_that_nobody_has(home: Home, one: Gateway, number: int) -> None:
    home.create("w", one, cursors=[4])
    home.save(number, one, 9)
    home.close(number, one, 9)
    assert home.books() == (1, 0)
    assert home.open("w", one).cursors == [4]


def test_a_stream_that_was_closed_is_closed(home: Home, one: Gateway) -> None:
    home.create("w", one, cursors=[4])
    first = home.open("w", one)
    home.close(first.stream, one, 5)
    second = home.open("w", one)
    home.save(first.stream, one, 99)
    home.close(first.stream, one, 99)
    assert home.books() == (1, 1)
    home.close(second.stream, one)
    assert home.open("w", one).cursors == [5]


# --- takeovers -----------------------------------------------------------------------------------------


def test_a_second_open_waits_until_the_first_has_said_where_it_was(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    first = home.open("w", one)
    waiting = home.open("w", two)
    assert isinstance(waiting, int)
    assert one.taken() == [first.stream]
    assert two.got == []
    assert home.books() == (1, 1)
    home.save(first.stream, one, 2)
    home.close(first.stream, one, 3)
    [(correlation, opened)] = two.granted()
    assert (correlation, opened.cursors, opened.stale) == (waiting, [3], False)
    assert opened.epoch == first.epoch + 1
    assert home.books() == (1, 1)
    home.save(first.stream, one, 99)
    home.close(opened.stream, two)
    assert home.open("w", one).cursors == [3]


def test_a_chain_of_takeovers(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    first = home.open("w", one)
    order = [home.open("w", gateway) for gateway in (two, one, two)]
    assert one.taken() == [first.stream]  # once, however many wait
    home.close(first.stream, one, 1)
    [(correlation, second)] = two.granted()
    assert correlation == order[0]
    assert two.taken() == [second.stream]  # others wait already
    home.close(second.stream, two, 2)
    [(correlation, third)] = one.granted()
    assert (correlation, third.cursors) == (order[1], [2])
    assert one.taken() == [third.stream]
    home.close(third.stream, one, 3)
    [(correlation, fourth)] = two.granted()
    assert (correlation, fourth.cursors) == (order[2], [3])
    assert two.taken() == []
    assert home.books() == (1, 1)
    assert fourth.epoch == first.epoch + 3
    home.close(fourth.stream, two, 4)
    assert home.books() == (1, 0)


def test_a_takeover_by_the_same_gateway(home: Home, one: Gateway) -> None:
    home.create("w", one)
    first = home.open("w", one)
    home.open("w", one)
    assert one.taken() == [first.stream]
    home.close(first.stream, one, 1)
    [(_, second)] = one.granted()
    assert home.books() == (1, 1)
    assert second.cursors == [1]


def test_sessions_do_not_wait_for_each_other(home: Home, one: Gateway) -> None:
    home.create("w", one)
    home.create("v", one)
    home.open("w", one)
    home.open("w", one)
    assert home.open("v", one).definition == b"v"
    assert home.books() == (2, 2)


# --- gateways die --------------------------------------------------------------------------------------


def test_the_gateway_of_a_stream_dies(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    home.create("idle", one)
    opened = home.open("w", one)
    socket = home.open(None, one)
    other = home.open(None, two)
    home.save(opened.stream, one, 5)
    home.table.gateway_gone(one)
    assert home.books() == (2, 1)
    again = home.open("w", two)
    assert (again.cursors, again.stale) == ([5], True)
    assert not home.open("idle", two).stale
    home.close(socket.stream, one)
    home.close(other.stream, two)
    assert home.books() == (2, 2)


def test_a_session_is_stale_until_somebody_got_it(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    home.open("w", one)
    home.table.gateway_gone(one)
    discarded = home.open("w", two)
    assert discarded.stale
    home.close(discarded.stream, two)  # its client had left before it began
    served = home.open("w", two)
    assert served.stale
    home.close(served.stream, two, 3)
    assert not home.open("w", two).stale


def test_a_gateway_dies_while_others_wait_for_its_stream(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    home.open("w", one)
    waiting = home.open("w", two)
    home.table.gateway_gone(one)
    [(correlation, opened)] = two.granted()
    assert (correlation, opened.stale) == (waiting, True)
    assert home.books() == (1, 1)


def test_a_gateway_that_waits_dies(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    first = home.open("w", one)
    home.open("w", two)
    home.table.gateway_gone(two)
    assert home.books() == (1, 1)
    assert one.taken() == [first.stream]
    home.close(first.stream, one, 2)  # it was told to, whoever still wants it
    assert two.got == []
    assert home.books() == (1, 0)
    assert home.open("w", one).cursors == [2]


def test_the_first_of_two_that_wait_dies(home: Home, one: Gateway, two: Gateway) -> None:
    three = Gateway("three")
    home.create("w", one)
    first = home.open("w", one)
    home.open("w", two)
    waiting = home.open("w", three)
    home.table.gateway_gone(two)
    home.close(first.stream, one, 2)
    assert two.got == []
    [(correlation, opened)] = three.granted()
    assert (correlation, opened.cursors) == (waiting, [2])


def test_a_gateway_that_waits_for_its_own_stream_dies(home: Home, one: Gateway) -> None:
    home.create("w", one)
    home.open("w", one)
    home.open("w", one)
    one.got.clear()
    home.table.gateway_gone(one)
    assert one.got == []
    assert home.books() == (1, 0)


def test_it_dies_twice(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    home.open("w", one)
    home.table.gateway_gone(one)
    home.table.gateway_gone(one)
    assert home.books() == (1, 0)
    assert home.open("w", two).stale


# --- the home died: restores ---------------------------------------------------------------------------


def test_what_gateways_remember_comes_back(one: Gateway, two: Gateway) -> None:
    home = Home(gateways=2)
    home.restore("idle", one, 3, epoch=2, idle_ms=1_000)
    home.restore("open", one, 5, epoch=4, stream=77)
    home.restore(None, two, stream=78)
    home.all_restored(one, two)
    assert home.books() == (2, 2)
    opened = home.open("idle", two)
    assert (opened.cursors, opened.epoch, opened.definition) == ([3], 3, b"idle")
    home.save(77, one, 6)
    home.close(77, one, 7)
    home.close(78, two)
    assert home.books() == (2, 1)
    assert home.open("open", two).cursors == [7]


@pytest.mark.parametrize("late", [False, True])
def test_the_later_epoch_wins(one: Gateway, two: Gateway, late: bool) -> None:
    home = Home(gateways=2)
    known = [(one, 3, 10), (two, 5, 20)]
    for gateway, epoch, cursor in reversed(known) if late else known:
        home.restore("w", gateway, cursor, epoch=epoch)
    home.all_restored(one, two)
    opened = home.open("w", one)
    assert (opened.cursors, opened.epoch) == ([20], 6)
    assert home.books() == (1, 1)


@pytest.mark.parametrize("late", [False, True])
def test_a_stream_wins_over_what_is_remembered_of_before(one: Gateway, two: Gateway, late: bool) -> None:
    home = Home(gateways=2)
    steps: list[Callable[[], object]] = [
        lambda: home.restore("w", one, 10, epoch=3),
        lambda: home.restore("w", two, 20, epoch=4, stream=77),
    ]
    for step in reversed(steps) if late else steps:
        step()
    home.all_restored(one, two)
    assert home.books() == (1, 1)
    home.open("w", one)
    assert two.taken() == [77]
    assert one.taken() == []


def test_a_stream_of_a_session_that_was_opened_since_is_taken(one: Gateway, two: Gateway) -> None:
    home = Home(gateways=2)
    home.restore("w", one, 10, epoch=5)
    home.all_restored(one, two)
    opened = home.open("w", one)
    home.restore("w", two, 20, epoch=4, stream=77)
    assert two.taken() == [77]
    home.close(77, two, 20)
    assert home.books() == (1, 1)
    home.close(opened.stream, one, 11)
    assert home.open("w", one).cursors == [11]


def test_an_unknown_session_may_still_come(one: Gateway, two: Gateway) -> None:
    home = Home(gateways=2)
    home.restore(None, one)
    error = error_of(lambda: home.open("w", one))
    assert (error.code, error.retry_after_s) == ("shard_unavailable", 1)
    home.restore("w", two, 3)
    home.restore(None, two)
    assert home.open("w", one).cursors == [3]
    assert error_of(lambda: home.open("nothing", one)).code == "not_found"


def test_what_one_gateway_restored_waits_for_what_others_know(one: Gateway, two: Gateway) -> None:
    """Else an open through the gateway that is quicker would begin where the session was long ago."""
    home = Home(gateways=2)
    home.restore("w", one, 3, epoch=1)
    home.restore(None, one)
    assert error_of(lambda: home.open("w", one)).code == "shard_unavailable"
    home.restore("w", two, 9, epoch=2, stream=77)
    home.restore(None, two)
    assert isinstance(home.open("w", one), int)
    assert two.taken() == [77]
    home.close(77, two, 12)
    [(_, opened)] = one.granted()
    assert (opened.cursors, opened.epoch, opened.stale) == ([12], 3, False)


def test_a_session_made_meanwhile_does_not_wait(one: Gateway) -> None:
    home = Home(gateways=2)
    home.restore(None, one)
    home.create("w", one)
    assert home.open("w", one).epoch == 1


def test_nobody_waits_for_ever_for_a_gateway(one: Gateway) -> None:
    home = Home(gateways=2)
    home.restore(None, one)
    home.now_ms += limits.RESTORE_WAIT_MS - 1
    assert error_of(lambda: home.open("w", one)).code == "shard_unavailable"
    home.now_ms += 1
    assert error_of(lambda: home.open("w", one)).code == "not_found"


def test_a_gateway_that_restored_and_died_has_nothing_more_to_say(one: Gateway, two: Gateway) -> None:
    home = Home(gateways=1)
    home.restore(None, one)
    home.table.gateway_gone(one)
    home.restore(None, two)
    assert error_of(lambda: home.open("w", two)).code == "not_found"


# --- the mirror ------------------------------------------------------------------------------------------


class Router(Gateway):
    """As much of the router process as keeps copies."""

    def __init__(self, home: Home) -> None:
        super().__init__("router")
        self.home = home
        self.mirror = Mirror(ttl_ms=TTL_MS, now_ms=lambda: self.home.now_ms)
        self.introduce(home)

    def introduce(self, home: Home) -> None:
        """This home is there; it may be another than before."""
        self.home = home
        for session in list(self.mirror.told()):
            assert home.ask(Op.RESTORE_SESSION, self, session) is None

    def send_always(self, message: bytes) -> None:
        assert message[0] == Op.KEEP_SESSION
        self.mirror.keep(messages.decode_answer(message)[0])


def next_home(router: Router) -> Home:
    """Shard 0 has died, and so has every gateway that knew something."""
    home = Home(now_ms=router.home.now_ms, restarted=True)
    home.restore(None, Gateway("another"))
    return home


@pytest.mark.parametrize("router_came", ["before", "after"])
def test_sessions_outlive_their_home_and_their_gateway(
    home: Home, one: Gateway, two: Gateway, router_came: str
) -> None:
    router = Router(home) if router_came == "before" else None
    home.create("unopened", one, cursors=[1])
    home.create("closed", one, cursors=[2])
    home.close(home.open("closed", one).stream, one, 5)
    home.create("open", one, cursors=[3])
    home.open("open", one)
    router = router or Router(home)
    home.now_ms += TTL_MS - 1
    again = next_home(router)
    assert error_of(lambda: again.open("closed", two)).code == "shard_unavailable", "the mirror has not spoken yet"
    router.introduce(again)
    found = {wid: again.open(wid, two) for wid in ("unopened", "closed", "open")}
    assert {wid: (got.cursors, got.epoch, got.stale) for wid, got in found.items()} == {
        "unopened": ([1], 1, False),
        "closed": ([5], 2, False),
        "open": ([3], 2, True),
    }
    assert found["closed"].definition == b"closed"
    assert error_of(lambda: again.open("nothing", two)).code == "not_found"


def test_a_copy_that_was_stale_is(home: Home, one: Gateway, two: Gateway) -> None:
    router = Router(home)
    home.create("w", one)
    stream = home.open("w", one).stream
    home.save(stream, one, 7)
    home.table.gateway_gone(one)
    again = next_home(router)
    router.introduce(again)
    opened = again.open("w", two)
    assert (opened.cursors, opened.stale) == ([7], True)


@pytest.mark.parametrize("first", ["mirror", "gateway"])
@pytest.mark.parametrize("stream", [0, 77])
def test_a_gateway_knows_more_than_a_copy(home: Home, one: Gateway, two: Gateway, first: str, stream: int) -> None:
    router = Router(home)
    home.create("w", one)
    home.open("w", one)
    again = next_home(router)
    if first == "mirror":
        router.introduce(again)
    again.restore("w", one, 9, epoch=1, stream=stream)
    if first == "gateway":
        router.introduce(again)
    if stream:
        assert isinstance(again.open("w", two), int)
        again.close(stream, one, 9)
        [(_, opened)] = two.granted()
    else:
        opened = again.open("w", two)
    assert (opened.cursors, opened.epoch, opened.stale) == ([9], 2, False)


def test_a_copy_of_a_later_opening_counts(home: Home, one: Gateway, two: Gateway) -> None:
    router = Router(home)
    home.create("w", one)
    home.close(home.open("w", two).stream, two, 4)
    again = next_home(router)
    again.restore("w", one, 0, epoch=0)
    router.introduce(again)
    assert again.open("w", one).cursors == [4]


def test_copies_end_with_the_ttl(home: Home, one: Gateway) -> None:
    router = Router(home)
    home.create("w", one)
    home.create("open", one)
    home.open("open", one)
    home.now_ms += TTL_MS
    home.create("later", one)
    assert len(router.mirror) == 2
    again = next_home(router)
    router.introduce(again)
    assert error_of(lambda: again.open("w", one)).code == "not_found"
    assert again.books() == (2, 0)


def test_nothing_is_kept_for_a_mirror_that_has_gone(home: Home, one: Gateway) -> None:
    router = Router(home)
    home.table.gateway_gone(router)
    home.create("w", one)
    assert len(router.mirror) == 0
    assert len(Router(home).mirror) == 1


def test_nobody_waits_for_ever_for_the_mirror(one: Gateway) -> None:
    home = Home(restarted=True)
    home.restore(None, one)
    home.now_ms += limits.RESTORE_WAIT_MS - 1
    assert error_of(lambda: home.open("w", one)).code == "shard_unavailable"
    home.now_ms += 1
    assert error_of(lambda: home.open("w", one)).code == "not_found"


def test_numbers_of_restored_streams_are_not_given_out_again(one: Gateway) -> None:
    before = Home()
    before.all_restored(one)
    old = [before.open(None, one).stream for _ in range(100)]
    home = Home()
    for number in old:
        home.restore(None, one, stream=number)
    home.all_restored(one)
    assert not {home.open(None, one).stream for _ in range(100)} & set(old)
    assert home.books() == (0, 200)


def test_a_close_with_cursors_is_exact_again(one: Gateway) -> None:
    home = Home()
    home.restore("w", one, 3, epoch=1, stream=77)
    home.all_restored(one)
    home.close(77, one, 9)
    opened = home.open("w", one)
    assert (opened.cursors, opened.stale) == ([9], False)


# --- limits --------------------------------------------------------------------------------------------


def test_sessions_are_counted_exactly(one: Gateway, two: Gateway) -> None:
    home = Home(max_watch_sessions=3)
    home.all_restored(one)
    for number in range(3):
        home.create(f"w{number}", one if number else two)
    error = error_of(lambda: home.create("w3", two))
    assert (error.code, error.detail) == ("throttled", {"limit": "max_watch_sessions", "max": 3})
    assert error.retry_after_s is not None
    assert home.books() == (3, 0)
    home.now_ms += TTL_MS
    home.create("w3", two)
    assert home.books() == (1, 0)


def test_streams_are_counted_exactly(one: Gateway, two: Gateway) -> None:
    home = Home(max_sse_connections=2)
    home.all_restored(one)
    home.create("w", one)
    home.create("v", one)
    first = home.open("w", one)
    socket = home.open(None, two)
    for wid in ("v", None):
        error = error_of(lambda wid=wid: home.open(wid, two))
        assert (error.code, error.detail) == ("throttled", {"limit": "max_sse_connections", "max": 2})
    home.open("w", two)  # a takeover adds none
    home.close(first.stream, one, 1)
    assert len(two.granted()) == 1
    assert home.books() == (2, 2)
    home.close(socket.stream, two)
    assert home.open("v", one).definition == b"v"
    assert error_of(lambda: home.open(None, one)).code == "throttled"
    home.table.gateway_gone(two)
    home.open(None, one)
    assert home.table.streams == 2


def test_no_limit() -> None:
    one = Gateway()
    home = Home(max_watch_sessions=0, max_sse_connections=0)
    for number in range(50):
        home.create(f"w{number}", one)
        home.open(f"w{number}", one)
    assert home.books() == (50, 50)


def test_an_unknown_session_is_not_throttled(one: Gateway) -> None:
    home = Home(max_sse_connections=1)
    home.all_restored(one)
    home.open(None, one)
    assert error_of(lambda: home.open("nothing", one)).code == "not_found"


# --- the TTL -------------------------------------------------------------------------------------------


def test_idle_sessions_are_forgotten(home: Home, one: Gateway) -> None:
    home.create("w", one)
    home.now_ms += TTL_MS - 1
    opened = home.open("w", one)
    home.now_ms += 10 * TTL_MS
    assert isinstance(home.open("w", one), int)  # streaming is not idle
    home.close(opened.stream, one, 1)
    [(_, second)] = one.granted()
    home.close(second.stream, one, 1)
    home.now_ms += TTL_MS
    assert error_of(lambda: home.open("w", one)).code == "not_found"
    assert home.books() == (0, 0)


def test_a_close_starts_the_ttl_again(home: Home, one: Gateway) -> None:
    home.create("w", one)
    for _ in range(5):
        home.now_ms += TTL_MS - 1
        opened = home.open("w", one)
        home.now_ms += TTL_MS
        home.close(opened.stream, one, 1)
    home.now_ms += TTL_MS - 1
    assert home.open("w", one)


def test_the_death_of_a_gateway_starts_the_ttl(home: Home, one: Gateway, two: Gateway) -> None:
    home.create("w", one)
    home.open("w", one)
    home.now_ms += 5 * TTL_MS
    home.table.gateway_gone(one)
    home.now_ms += TTL_MS - 1
    assert home.open("w", two).stale


def test_restored_sessions_go_on_being_idle(one: Gateway, two: Gateway) -> None:
    home = Home(gateways=2)
    home.restore("young", one, 1, idle_ms=0)
    home.restore("old", two, 1, idle_ms=TTL_MS - 10)
    home.restore("middle", one, 1, idle_ms=TTL_MS // 2)
    home.restore("dead", two, 1, idle_ms=TTL_MS + 5)
    home.all_restored(one, two)
    assert error_of(lambda: home.open("dead", one)).code == "not_found"
    home.now_ms += 10
    assert error_of(lambda: home.open("old", one)).code == "not_found"
    home.now_ms += TTL_MS // 2
    assert error_of(lambda: home.open("middle", one)).code == "not_found"
    assert home.table.sessions == 1
    assert home.open("young", one)


# --- any mix -------------------------------------------------------------------------------------------


@examples(200)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["create", "open", "open", "open", "socket", "close", "close", "save", "die", "time"]),
            st.integers(0, 3),
            st.integers(0, 2),
        ),
        max_size=60,
    )
)
def test_books_are_kept_in_any_mix(steps: list[tuple[str, int, int]]) -> None:
    """Every open is answered once, in order, at most one stream of a session is open, and the counts are exact."""
    home = Home(max_sse_connections=5, max_watch_sessions=3)
    gateways = [Gateway(f"g{number}") for number in range(3)]
    home.all_restored(*gateways)
    alive: dict[int, tuple[Gateway, str | None]] = {}  # what gateways believe is open
    told: set[int] = set()
    waiting: dict[str, list[tuple[Gateway, int]]] = {}
    cursors: dict[str, int] = {}
    stale: set[str] = set()

    def receive() -> None:
        for gateway in gateways:
            told.update(gateway.taken())
            for correlation, opened in gateway.granted():
                wid = opened.definition.decode()
                assert waiting[wid].pop(0) == (gateway, correlation)
                begin(gateway, wid, opened)

    def begin(gateway: Gateway, wid: str, opened: messages.StreamOpened) -> None:
        assert wid not in [known for _, known in alive.values()]
        assert opened.cursors == [cursors[wid]]
        assert opened.stale == (wid in stale)
        stale.discard(wid)
        alive[opened.stream] = (gateway, wid)

    for position, (step, which, where) in enumerate(steps, 1):
        gateway = gateways[where]
        wid = f"w{which}"
        try:
            if step == "create" and wid not in cursors:
                home.create(wid, gateway, cursors=[position])
                cursors[wid] = position
                waiting[wid] = []
            elif step == "open":
                opened = home.open(wid, gateway)
                if isinstance(opened, int):
                    waiting[wid].append((gateway, opened))
                else:
                    begin(gateway, wid, opened)
            elif step == "socket":
                alive[home.open(None, gateway).stream] = (gateway, None)
            elif step in ("close", "save") and alive:
                number = sorted(alive)[which % len(alive)]
                owner, served = alive[number]
                if served is not None:
                    cursors[served] = position
                if step == "save":
                    home.save(number, owner, position)
                else:
                    del alive[number]
                    home.close(number, owner, position)
            elif step == "die":
                for number, (owner, served) in list(alive.items()):
                    if owner is gateway:
                        del alive[number]
                        if served is not None:
                            stale.add(served)
                for queue in waiting.values():
                    queue[:] = [entry for entry in queue if entry[0] is not gateway]
                home.table.gateway_gone(gateway)
                gateway.got.clear()
                home.all_restored(gateway)  # the one that takes its place
        except ApiError as error:
            full = len(alive) >= 5 or len(cursors) >= 3
            wanted = "throttled" if full and (wid in cursors or step != "open") else "not_found"
            if error.code != wanted:
                raise
        receive()
        assert home.books() == (len(cursors), len(alive))
        for name, queue in waiting.items():
            if queue:
                [number] = [number for number, (_, known) in alive.items() if known == name]
                assert number in told, "somebody waits for a stream that was not told to close"


def consistent(home: Home) -> None:
    table = home.table
    for number, (_, session) in table._streams.items():
        if session is not None:
            assert session.stream == number
            assert table._sessions[session.wid] is session
    for wid, session in table._sessions.items():
        assert (session.stream in table._streams) == bool(session.stream)
        assert (wid in table._idle) == (not session.stream)
        assert session.stream or not session.waiting, "somebody waits for nobody"
    assert set(table._idle) <= set(table._sessions)


@examples(200)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(
                ["create", "open", "open", "socket", "close", "discard", "save", "die", "time", "restore", "stream"]
            ),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(0, 4),
        ),
        max_size=60,
    )
)
def test_any_event_in_any_state_leaves_the_table_whole(steps: list[tuple[str, int, int, int]]) -> None:
    home = Home(gateways=3)
    gateways = [Gateway(f"g{number}") for number in range(3)]
    asked: set[tuple[str, int]] = set()
    numbers: list[int] = []
    for at, (step, which, where, more) in enumerate(steps):
        gateway, wid = gateways[where], f"w{which}"
        number = numbers[more % len(numbers)] if numbers else 5
        try:
            if step == "create":
                home.create(f"{wid}.{at}", gateway)
            elif step == "open":
                opened = home.open(wid, gateway)
                if isinstance(opened, int):
                    asked.add((gateway.name, opened))
                else:
                    numbers.append(opened.stream)
            elif step == "socket":
                numbers.append(home.open(None, gateway).stream)
            elif step == "close":
                home.close(number, gateway, at)
            elif step == "discard":
                home.close(number, gateway)
            elif step == "save":
                home.save(number, gateway, at)
            elif step == "die":
                home.table.gateway_gone(gateway)
                asked = {(name, correlation) for name, correlation in asked if name != gateway.name}
                home.all_restored(gateway)
            elif step == "time":
                home.now_ms += TTL_MS // 3 * more
            elif step == "restore":
                home.restore(wid, gateway, at, epoch=more, idle_ms=TTL_MS // 3 * more)
            else:
                numbers.append(1_000 + at)
                home.restore(wid, gateway, at, epoch=more, stream=1_000 + at)
        except ApiError as error:
            if error.code not in ("not_found", "shard_unavailable"):
                raise
        for each in gateways:
            for correlation, opened in each.granted():
                assert (each.name, correlation) in asked, "answered, but not asked, or not any more"
                asked.remove((each.name, correlation))
                numbers.append(opened.stream)
        consistent(home)
