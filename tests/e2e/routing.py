"""Routers as a test uses them: make one, read what came of it, and wait for it.

Forwarding happens behind the answer, so everything about a destination is waited for, with a deadline. What must not
come is shown by a later record that has come: copies of one source keep its order.
"""

from __future__ import annotations

import itertools
from typing import Any

from topics.storage.config import owner_of_name

from .client import Answer, Client
from .server import eventually

WITHIN_S = 30.0
SHARDS = 2  # of the servers that the tests start unless they say otherwise

_numbers = itertools.count(1)


def name_on(shard: int, stem: str = "on") -> str:
    """A topic name nobody else uses, on that shard."""
    while owner_of_name(name := f"{stem}-{next(_numbers)}", SHARDS) != shard:
        pass
    return name


def put_router(api: Client, router: str, source: str, dest: str, **options: object) -> Answer:
    return api.send("PUT", f"/v0/routers/{router}", {"source": source, "dest": dest, **options})


def route(api: Client, source: str, dest: str, *, name: str | None = None, **options: object) -> str:
    """A router that must be new; its name."""
    name = name or f"{source}->{dest}"
    answer = put_router(api, name, source, dest, **options)
    assert (answer.status, answer["created"]) == (201, True), answer
    return name


def get_router(api: Client, router: str) -> Answer:
    return api.send("GET", f"/v0/routers/{router}")


def drop_router(api: Client, router: str) -> Answer:
    return api.send("DELETE", f"/v0/routers/{router}")


def list_routers(api: Client, **query: Any) -> Answer:
    return api.send("GET", "/v0/routers", **query)


def topic_names(api: Client, prefix: str) -> list[str]:
    return [row["topic"] for row in api.list(prefix=prefix)["topics"]]


def read(api: Client, topic: str, from_seq: int = 0, **fields: object) -> list[dict[str, Any]]:
    """Every record behind a cursor; tombstones stand between them as they are."""
    found: list[dict[str, Any]] = []
    while True:
        page = api.diff(topic, from_seq, limit=1_000, include_tags=True, include_meta=True, **fields)
        assert page.status == 200, page
        if page["tombstone"] is not None:
            found.append(page["tombstone"])
        found += page["records"]
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return found


def data_of(api: Client, topic: str, from_seq: int = 0) -> list[Any]:
    """The data of every record; a tombstone is shown by its reason."""
    return [record.get("data", record.get("reason")) for record in read(api, topic, from_seq)]


def wait_forwarded(api: Client, totals: dict[str, int]) -> None:
    """Until routers say so. Copies are readable a moment before their router hears of it."""

    def told() -> bool:
        found = {router: get_router(api, router)["forwarded_total"] for router in totals}
        assert all(found[router] <= total for router, total in totals.items()), found
        return found == totals

    eventually(told, within_s=WITHIN_S, what=f"{totals}")


def wait_data(api: Client, topic: str, expected: list[Any], *, within_s: float = WITHIN_S) -> None:
    """Until a topic holds exactly this."""
    found: list[Any] = []

    def there() -> bool:
        nonlocal found
        if api.state(topic, touch=False).status != 200:
            return False
        found = data_of(api, topic)
        return found == expected or len(found) > len(expected)

    try:
        eventually(there, within_s=within_s, every_s=0.02)
    except AssertionError:
        pass
    assert found == expected, f"{topic} holds {found!s:.500}"


def wait_records(api: Client, topic: str, count: int, *, within_s: float = WITHIN_S) -> list[dict[str, Any]]:
    """Until a topic holds so many; what it holds."""
    eventually(lambda: api.state(topic)["count"] >= count, within_s=within_s, what=f"{count} records in {topic}")
    return read(api, topic)


def wait_head(api: Client, topic: str, head_seq: int, *, within_s: float = WITHIN_S) -> None:
    eventually(lambda: api.state(topic)["head_seq"] >= head_seq, within_s=within_s, what=f"{topic} at {head_seq}")


def pass_through(api: Client, source: str, dest: str) -> None:
    """Until what the router has read of the source before is with the destination, which has taken or refused it. What
    it reads later shows the topics as they are by then.

    One question after the other along the way. A process answers link by link: that an answer is here says only that
    what it did in the round before has reached everyone. The router hands what it has read to a task, which runs before
    the router answers a question that comes later; some rounds more cost nothing.
    """
    assert api.state(source, touch=False).status == 200
    for _ in range(10):
        assert list_routers(api, source=source).status == 200
    assert api.state(dest, touch=False).status == 200


def drained(api: Client, source: str, *dests: str, mark: str = "mark") -> None:
    """Write a last record and wait until it has been copied: all before it have been looked at by then."""
    api.append(source, mark)
    for dest in dests:
        eventually(lambda dest=dest: mark in data_of(api, dest), within_s=WITHIN_S, what=f"{mark!r} in {dest}")
