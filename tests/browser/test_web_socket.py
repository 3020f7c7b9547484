"""The browser's own WebSocket on `/v0/ws`: a conversation, ways to end it, and pages that may not open one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from e2e.client import unique
from e2e.server import Server, eventually

from .chromium import Page

pytestmark = pytest.mark.browser

# Opens a socket and waits until it is open or not; what arrives is kept in `seen`, how it ended in `ended`.
DIAL = """
(url) => new Promise((resolve) => {
  window.seen = [];
  window.ended = null;
  window.socket = new WebSocket(url || `ws://${location.host}/v0/ws`);
  socket.onmessage = (event) => { seen.push(typeof event.data === 'string' ? event.data : '<binary>'); };
  socket.onclose = (event) => {
    window.ended = {code: event.code, reason: event.reason, clean: event.wasClean};
    resolve(false);
  };
  socket.onopen = () => { resolve(true); };
})
"""


class Dialled:
    """A socket in a page."""

    def __init__(self, page: Page, url: str | None = None) -> None:
        self.page = page
        self.opened: bool = page.call(DIAL, url)

    def tell(self, op: str, **fields: object) -> None:
        self.send(json.dumps({"op": op, **fields}))

    def send(self, text: str) -> None:
        self.page.call("(text) => { socket.send(text); }", text)

    def frames(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.page.run("seen")]

    def wait_frames(self, count: int) -> list[dict[str, Any]]:
        """The first so many, when they are there; they are all there is."""
        frames = eventually(
            lambda: found if len(found := self.frames()) >= count else None, every_s=0.02, what=f"{count} frames"
        )
        assert frames is not None
        assert len(frames) == count, frames
        return frames

    def wait_ended(self) -> dict[str, Any]:
        ended: dict[str, Any] = eventually(lambda: self.page.run("ended"), every_s=0.02, what="the close event")
        return ended


@pytest.mark.gate
def test_a_conversation(page: Page) -> None:
    topic = unique()
    ws = Dialled(page)
    assert ws.opened
    assert page.run("[socket.extensions, socket.protocol]") == ["", ""]
    ws.tell("publish", request_id="p1", topic=topic, records=[{"data": {"text": "é 🎈"}, "node": "me"}])
    (ack,) = ws.wait_frames(1)
    assert (ack["op"], ack["request_id"], ack["seqs"], ack["created"]) == ("ack", "p1", [1], True)
    ws.tell("subscribe", request_id="s1", topic=topic)
    _, subscribed, record, caught_up = ws.wait_frames(4)
    place = {"from_seq": 0, "head_seq": 1, "earliest_seq": 1}
    assert subscribed == {"op": "subscribed", "request_id": "s1", "topics": {topic: place}}
    assert (record["op"], record["records"][0]["data"]) == ("record", {"text": "é 🎈"})
    assert caught_up == {"op": "caught_up", "topic": topic, "head_seq": 1}
    ws.send("{this is not JSON")
    error = ws.wait_frames(5)[-1]
    assert (error["op"], error["code"]) == ("error", "invalid_json")
    ws.tell("ping", request_id=7)  # it goes on
    pong = ws.wait_frames(6)[-1]
    assert (pong["op"], pong["request_id"]) == ("pong", 7)
    ws.tell("publish", topic=topic, records=[{"data": 2}])
    assert {frame["op"] for frame in ws.wait_frames(8)[-2:]} == {"ack", "record"}
    ws.tell("unsubscribe", request_id="u1", topic=topic)
    assert ws.wait_frames(9)[-1] == {"op": "unsubscribed", "request_id": "u1", "topic": topic, "topics": [topic]}
    page.run("socket.close(1000, 'done')")
    assert ws.wait_ended() == {"code": 1000, "reason": "done", "clean": True}


def test_a_flood_both_ways(page: Page, server: Server) -> None:
    """Hundreds of publishes without waiting, each of them received again."""
    topic = unique()
    ws = Dialled(page)
    ws.tell("publish", request_id="first", topic=topic, records=[{"data": "first"}])
    ws.tell("ping")
    ws.wait_frames(2)
    ws.tell("subscribe", topic=topic, tail=True)
    ws.wait_frames(4)
    page.call(
        """(topic) => {
          for (let n = 0; n < 500; n += 1) {
            socket.send(JSON.stringify({
              op: 'publish', request_id: n, topic, records: [{data: [n, 'x'.repeat(1000)]}], return_seqs: false,
            }));
          }
        }""",
        topic,
    )

    def received() -> list[int]:
        frames = [frame for frame in ws.frames() if frame["op"] == "record"]
        return [record["data"][0] for frame in frames for record in frame["records"]]

    eventually(lambda: len(received()) >= 500, every_s=0.2)
    assert received() == list(range(500))
    eventually(lambda: sum(frame["op"] == "ack" for frame in ws.frames()) == 501, every_s=0.2)
    assert [frame["request_id"] for frame in ws.frames() if frame["op"] == "ack"][1:] == list(range(500))
    page.run("socket.close()")
    assert ws.wait_ended()["clean"] is True


def test_two_tabs_talk(open_page: Callable[..., Page]) -> None:
    topic = unique()
    tabs = {name: Dialled(open_page()) for name in ("ann", "ben")}
    tabs["ann"].tell("publish", topic=topic, records=[{"data": "opened"}])
    tabs["ann"].wait_frames(1)
    for name, ws in tabs.items():
        ws.tell("subscribe", topic=topic, tail=True, node=name)
    tabs["ann"].wait_frames(3)
    tabs["ben"].wait_frames(2)
    for name, ws in tabs.items():
        ws.tell("publish", topic=topic, records=[{"data": f"from {name}"}], node=name)
    for name, other, frames in (("ann", "ben", 5), ("ben", "ann", 4)):
        said = [frame for frame in tabs[name].wait_frames(frames) if frame["op"] == "record"]
        assert [record["data"] for frame in said for record in frame["records"]] == [f"from {other}"]


def test_a_binary_message_ends_it(page: Page) -> None:
    ws = Dialled(page)
    page.run("socket.send(new Uint8Array([1, 2, 3]))")
    ended = ws.wait_ended()
    assert (ended["code"], ended["clean"]) == (1003, True)


def test_a_stop_of_the_server_is_a_clean_close(page: Page, server: Server) -> None:
    ws = Dialled(page)
    assert server.stop() == 0
    ended = ws.wait_ended()
    assert (ended["code"], ended["clean"]) == (1001, True)


def test_the_death_of_the_gateway_is_not(page: Page, server: Server) -> None:
    ws = Dialled(page)
    server.signal_child("gateway-0")
    ended = ws.wait_ended()
    assert (ended["code"], ended["clean"]) == (1006, False)
    again = Dialled(page)
    assert again.opened
    again.tell("ping", request_id="again")
    assert again.wait_frames(1)[0]["request_id"] == "again"


@pytest.mark.gate
def test_a_page_from_elsewhere_can_not_open_one(open_page: Callable[..., Page], server: Server) -> None:
    """`localhost` and `127.0.0.1` are the same machine, but not the same origin."""
    page = open_page(f"http://localhost:{server.port}/v0/health")
    foreign = Dialled(page, f"ws://127.0.0.1:{server.port}/v0/ws")
    assert not foreign.opened
    assert foreign.wait_ended()["code"] == 1006
    assert Dialled(page).opened  # to where it came from
