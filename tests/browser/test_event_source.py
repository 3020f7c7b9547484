"""The browser's own EventSource on `/v0/watch`: what it receives, and that it comes back by itself after everything
that can end its connection, with nothing missed and nothing repeated."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from e2e.client import Client, unique
from e2e.server import Server, eventually, gone

from .chromium import Page

pytestmark = pytest.mark.browser

# Makes a watch and an EventSource on it; what arrives is kept in `seen`.
WATCH = """
async (body) => {
  const answer = await fetch('/v0/watch', {
    method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body),
  });
  const watch = await answer.json();
  if (!answer.ok) throw new Error(JSON.stringify(watch));
  window.seen = [];
  window.opened = window.broken = 0;
  window.source = new EventSource(watch.stream_url);
  source.onopen = () => { window.opened += 1; };
  source.onerror = (event) => { if (event.data === undefined) window.broken += 1; };
  for (const name of ['record', 'tombstone', 'caught-up', 'topic-deleted']) {
    source.addEventListener(name, (event) => {
      seen.push({event: event.type, id: event.lastEventId, data: JSON.parse(event.data)});
    });
  }
  return watch;
}
"""
OPEN, CLOSED = 1, 2  # of readyState

Event = dict[str, Any]


class Watching:
    """What a page that watches has received."""

    def __init__(self, page: Page, **body: object) -> None:
        self.page = page
        self.watch = page.call(WATCH, body)

    def events(self) -> list[Event]:
        events: list[Event] = self.page.run("seen")
        return events

    def records(self, topic: str) -> list[Event]:
        frames = [seen["data"] for seen in self.events() if seen["event"] == "record"]
        return [record for frame in frames if frame["topic"] == topic for record in frame["records"]]

    def wait_for(self, topic: str, *data: object) -> None:
        """Until exactly these records have come, in this order."""
        expected = list(data)
        eventually(
            lambda: len(self.records(topic)) >= len(expected), every_s=0.05, what=f"{len(expected)} records of {topic}"
        )
        assert [record["data"] for record in self.records(topic)] == expected
        seqs = [record["$seq"] for record in self.records(topic)]
        assert seqs == sorted(set(seqs))

    def wait_event(self, name: str) -> Event:
        def find() -> Event | None:
            return next((event for event in self.events() if event["event"] == name), None)

        found = eventually(find, every_s=0.05, what=name)
        assert found is not None
        return found

    def wait_reopened(self, times: int) -> None:
        eventually(
            lambda: self.page.run("opened") >= times and self.page.run("source.readyState") == OPEN, every_s=0.05
        )


def cursor(event: Event) -> dict[str, int]:
    """The places that an id stands for."""
    text = event["id"]
    places: dict[str, int] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return places


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


def test_what_an_event_source_receives(page: Page, client: Client) -> None:
    log, capped = unique(), unique()
    client.append_records(log, [{"data": "é 🎈\n", "node": "n", "meta": {"m": 1}}, {"data": [1, {"a": None}]}])
    client.append(capped, *range(10), config={"cap_records": 3})
    watching = Watching(page, topics={log: {}, capped: {"from_seq": 2}})
    assert watching.watch["topics"][log] == {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}
    watching.wait_for(log, "é 🎈\n", [1, {"a": None}])
    watching.wait_for(capped, 7, 8, 9)
    first = watching.records(log)[0]
    assert (first["$seq"], first["$node"], first["meta"]) == (1, "n", {"m": 1})
    tombstone = watching.wait_event("tombstone")
    assert tombstone["data"] == {
        "topic": capped,
        "reason": "from_seq_too_old",
        "gap_from": 3,
        "gap_to": 7,
        "earliest_seq": 8,
        "head_seq": 10,
    }
    assert cursor(tombstone)[capped] == 7
    eventually(lambda: [event["event"] for event in watching.events()].count("caught-up") == 2)
    assert cursor(watching.events()[-1]) == {log: 2, capped: 10}
    client.append(log, "live")
    watching.wait_for(log, "é 🎈\n", [1, {"a": None}], "live")
    assert cursor(watching.events()[-1]) == {log: 3, capped: 10}
    client.drop(capped)
    assert watching.wait_event("topic-deleted")["data"] == {"topic": capped, "head_seq": 10, "reason": "deleted"}
    client.append(log, "after")
    watching.wait_for(log, "é 🎈\n", [1, {"a": None}], "live", "after")
    assert (page.run("opened"), page.run("broken")) == (1, 0)  # one connection all the time
    page.run("source.close()")


@pytest.mark.gate
def test_it_comes_back_by_itself_when_the_gateway_dies(page: Page, server: Server, client: Client) -> None:
    """Killed at rest, and killed in the middle of a flow of appends."""
    topic = unique()
    client.append(topic, 0)
    watching = Watching(page, topics={topic: {}})
    expected: list[int] = [0]
    watching.wait_for(topic, *expected)
    for life in (1, 2):
        killed = server.signal_child("gateway-0")
        eventually(lambda pid=killed: gone(pid))
        for _ in range(20):  # while it waits to reconnect
            with server.client() as fresh:
                expected.append(len(expected))
                fresh.append(topic, expected[-1])
        watching.wait_for(topic, *expected)
        watching.wait_reopened(life + 1)
        with server.client() as fresh:
            expected.append(len(expected))
            fresh.append(topic, expected[-1])
        watching.wait_for(topic, *expected)
    assert page.run("broken") >= 2
    page.run("source.close()")
    assert page.run("source.readyState") == CLOSED


def test_it_goes_on_when_a_shard_dies(page: Page, server: Server, client: Client) -> None:
    topic = unique()
    client.append(topic, 0, config={"durable": True})
    watching = Watching(page, topics={topic: {}})
    watching.wait_for(topic, 0)
    for name in ("shard-0", "shard-1"):
        server.signal_child(name)
        server.wait_ready()
    eventually(lambda: client.append(topic, 1, idempotency_key="k").status == 200)
    watching.wait_for(topic, 0, 1)
    page.run("source.close()")


def test_two_tabs_on_one_watch(open_page: Callable[..., Page], client: Client) -> None:
    """The second one takes over; the first one would take it back, so it is closed when it has noticed."""
    topic = unique()
    client.append(topic, 0)
    first, second = open_page(), open_page()
    watching = Watching(first, topics={topic: {}})
    watching.wait_for(topic, 0)
    first.run("source.onerror = () => { window.broken += 1; source.close(); }")
    second.call(
        """(url) => {
          window.seen = []; window.opened = window.broken = 0;
          window.source = new EventSource(url);
          source.addEventListener('record', (event) => {
            seen.push({event: 'record', id: event.lastEventId, data: JSON.parse(event.data)});
          });
        }""",
        watching.watch["stream_url"],
    )
    eventually(lambda: first.run("source.readyState") == CLOSED, every_s=0.05)
    client.append(topic, 1)

    def data() -> list[Any]:
        return [record["data"] for event in second.run("seen") for record in event["data"]["records"]]

    eventually(lambda: data() == [1], every_s=0.05)
    assert [record["data"] for record in watching.records(topic)] == [0]
    second.run("source.close()")
