"""Many small stories told in the same lives of one server: starting it is what takes time.

A story is a generator: it gets a Server, works on topics of its own, yields when the life is to end, and is given
the Server of the next life. Stories that end in the same way share a server; each fails on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

from crash_server import Server

Story = Generator[None, Server, None]
_Start = Callable[[Server], Story]


_by_ends: dict[tuple[str, ...], dict[str, _Start]] = {}  # of all modules that were collected
_told: dict[tuple[str, ...], dict[str, BaseException | None]] = {}


class Stories:
    """The stories of one module."""

    def __init__(self) -> None:
        self._mine: list[tuple[str, tuple[str, ...]]] = []

    def lives(self, *ends: str) -> Callable[[_Start], _Start]:
        """Register a story; ends: how its lives end, "kill" or "stop", in order. The last life just goes on."""

        def register(story: _Start) -> _Start:
            _by_ends.setdefault(ends, {})[story.__name__] = story
            self._mine.append((story.__name__, ends))
            return story

        return register

    @property
    def names(self) -> list[str]:
        return [f"{name}-{'-'.join(ends)}" for name, ends in self._mine]

    def tell(self, name: str, folder: Path) -> None:
        """Raise what became of this story; the first of a kind runs all that share its lives."""
        story, *rest = name.split("-")
        ends = tuple(rest)
        if ends not in _told:
            _told[ends] = self._run(ends, folder)
        failure = _told[ends][story]
        if failure is not None:
            raise failure

    def _run(self, ends: tuple[str, ...], folder: Path) -> dict[str, BaseException | None]:
        outcome: dict[str, BaseException | None] = {}
        running: dict[str, Story] = {}
        server = Server(folder / "data", shards=1)
        try:
            server.wait_ready()
            for name, start in _by_ends[ends].items():
                running[name] = start(server)
                self._advance(name, running, outcome, None)
            for end in ends:
                if end == "kill":
                    server.kill()
                else:
                    assert server.stop() == 0
                server = Server(folder / "data", shards=1)
                server.wait_ready()
                for name in list(running):
                    self._advance(name, running, outcome, server)
        finally:
            server.close()
        for name in running:
            outcome[name] = AssertionError(f"{name} wants more lives than {ends}")
        return outcome

    @staticmethod
    def _advance(
        name: str, running: dict[str, Story], outcome: dict[str, BaseException | None], server: Server | None
    ) -> None:
        try:
            if server is None:
                next(running[name])
            else:
                running[name].send(server)
        except StopIteration:
            outcome[name] = None
            del running[name]
        except Exception as failure:
            outcome[name] = failure
            del running[name]
