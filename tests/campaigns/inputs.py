"""Hostile input of clients: HTTP/1.1 heads and chunks, JSON bodies, WebSocket frames and commands, HTTP/2.

The inputs are those of tests/fuzz. A part is played against a real server, over sockets, with honest clients among them
(`live`): the server must answer or refuse each, lose nothing, neither grow nor hang. Many more are given to the very
functions that a gateway calls with what a socket gave it (`pure`):

    heads       gateway/http1/head.py: a head, or one that says how it is refused
    chunks      gateway/http1/chunks.py: bytes, or an ApiError
    bodies      gateway/api/schemas.py, gateway/api/watch_schemas.py: a request of every endpoint, or an ApiError
    frames      the protocol of websockets, as gateway/streams/websocket.py sets it up: frames, or a close with a code
    commands    gateway/api/watch_schemas.py: a command, or an ApiError

Any other exception would be a 500 or the end of a gateway. HTTP/2 is played live only: its decoder is one with its
connection.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import figures
import offspring
from fuzz import bodies as hostile
from fuzz import http1, websocket
from fuzz.mutations import mutate
from parts import metrics, queues, routers, watches
from websockets.protocol import OPEN, SERVER, Protocol

from topics.errors import ApiError
from topics.gateway.api import schemas, watch_schemas
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.http1.chunks import ChunkDecoder
from topics.gateway.http1.head import Heads
from topics.settings import Settings
from topics.shm.counters import Board

from .campaign import Campaign, Finding, Tally

ROOT = Path(__file__).resolve().parent.parent.parent
PURE = 20_000  # of one seed
LIVE = 2_000
EVERY_LIVE = 2  # seeds: one of so many is played against a server, too
SLOW_S = 2.0  # of processor time, for one input: a hang
SETTINGS = Settings()


# --- pure --------------------------------------------------------------------------------------------


@cache
def heads() -> Heads:
    handlers = Handlers(SETTINGS, shards=2, board=Board.create(["shard-0"]))
    routes = Routes(handlers, watches(shards=2), routers(shards=2), queues(shards=2), metrics(shards=2))
    return Heads(routes, max_body_bytes=1 << 22)


def take_request(dice: random.Random) -> tuple[bytes, Callable[[], object]]:
    """A hostile request: its head, and its body as chunks if it says so."""
    sent = http1.case(dice, 0, "wid_AAAAAAAAAAAAAAAAAAAAAA").sent

    def take() -> object:
        at = sent.find(b"\r\n\r\n")
        head = heads().get(sent[: at + 4] if at >= 0 else sent)
        if head.chunked and at >= 0:
            return _take_chunks(sent[at + 4 :])
        return head

    return sent, take


def _take_chunks(data: bytes) -> bytes:
    decoder = ChunkDecoder(most=1 << 20)
    rest = bytearray(data)
    decoder.feed(rest, 0)
    return bytes(rest)


def take_chunks(dice: random.Random) -> tuple[bytes, Callable[[], object]]:
    parts = []
    for _ in range(dice.randint(1, 4)):
        data = dice.randbytes(dice.choice((0, 1, 7, 300)))
        parts.append(b"%x\r\n%b\r\n" % (len(data), data))
    sent = b"".join([*parts, b"0\r\n\r\n"])
    sent = mutate(dice, sent) if dice.random() < 0.9 else sent
    return sent, lambda: _take_chunks(sent)


_DECODERS: tuple[Callable[[bytes], object], ...] = (
    lambda body: schemas.decode_config(body, "t"),
    lambda body: schemas.decode_append(body, "t", SETTINGS, key=None),
    lambda body: schemas.decode_plain(body, SETTINGS),
    lambda body: schemas.decode_diff(body, "t", SETTINGS),
    lambda body: schemas.decode_delete(body, "t"),
    lambda body: schemas.decode_router(body, "r"),
    lambda body: schemas.decode_claim(body, "t", SETTINGS),
    lambda body: schemas.decode_ack(body, "t", SETTINGS),
    lambda body: schemas.decode_nack(body, "t", SETTINGS),
    lambda body: schemas.decode_extend(body, "t", SETTINGS),
    lambda body: watch_schemas.decode_watch(body, SETTINGS),
)


def take_body(dice: random.Random) -> tuple[bytes, Callable[[], object]]:
    _, _, body = hostile.hostile_request(dice)
    sent = body or b""
    decode = dice.choice(_DECODERS)
    return sent, lambda: decode(sent)


def take_frames(dice: random.Random) -> tuple[bytes, Callable[[], object]]:
    sent = b"".join(dice.choice(websocket.FRAMES)(dice) for _ in range(dice.randint(1, 3)))

    def take() -> object:
        protocol = Protocol(SERVER, state=OPEN, max_size=1 << 20)
        protocol.receive_data(sent)
        protocol.receive_eof()
        return protocol.events_received(), protocol.data_to_send()

    return sent, take


def take_command(dice: random.Random) -> tuple[bytes, Callable[[], object]]:
    sent = websocket.hostile_command(dice, "id") if dice.random() < 0.8 else websocket.hostile_request_id(dice)
    decode: Callable[[bytes], object] = watch_schemas.decode_command
    if dice.random() < 0.3:
        decode = lambda text: watch_schemas.decode_publish(text, most=1 << 20)  # noqa: E731
    return sent, lambda: decode(sent)


Maker = Callable[[random.Random], tuple[bytes, Callable[[], object]]]
KINDS: dict[str, tuple[Maker, int]] = {
    "heads": (take_request, 30),
    "chunks": (take_chunks, 10),
    "bodies": (take_body, 35),
    "frames": (take_frames, 15),
    "commands": (take_command, 10),
}


def play_pure(seed: int, tally: Tally, *, inputs: int, only: str | None, kinds: dict[str, tuple[Maker, int]]) -> None:
    dice = random.Random(f"inputs/{seed}")
    names = dice.choices(list(kinds), [weight for _, weight in kinds.values()], k=inputs)
    for number, name in enumerate(names):
        own = random.Random(f"inputs/{seed}/{number}")
        if only is not None and only != str(number):
            continue
        sent, take = kinds[name][0](own)
        began = time.thread_time()  # not of the wall: other work may stop this process for seconds
        wrong = None
        try:
            take()
        except ApiError as error:
            if error.status >= 500:
                wrong = f"{error.status} {error.code}: {error}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is None and (took := time.thread_time() - began) > SLOW_S:
            wrong = f"it took {took:.1f} s"
        if wrong is not None:
            tally.find(Finding(seed, str(number), f"{name}: {wrong}\n    input: {sent[:600]!r}"))
        tally.add(f"pure_{name}")
        tally.add("inputs")


# --- live --------------------------------------------------------------------------------------------


def play_live(seed: int, tally: Tally, *, cases: int = LIVE) -> None:
    """The families of tests/fuzz with another seed; they judge."""
    with tempfile.TemporaryDirectory(prefix="topics-inputs-") as folder:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("TOPICS_", "PYTEST_"))}
        environ |= {
            "TOPICS_FUZZ_SEED": str(seed),
            "TOPICS_FUZZ_CASES": str(cases),
            figures.FOLDER: os.path.join(folder, "figures"),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
        done = subprocess.run(
            offspring.led([*command, "-m", "gate or not full", "tests/fuzz"], signal.SIGINT),
            cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        told = figures.read(sorted(Path(folder, "figures").glob("*.json")))
    tally.add("inputs", told.figures["fuzzed"])
    tally.add("live", told.figures["fuzzed"])
    if done.returncode:
        again = f"TOPICS_FUZZ_SEED={seed} TOPICS_FUZZ_CASES={cases} .venv/bin/pytest tests/fuzz"
        tally.find(Finding(seed, "live", f"{told.failed}: {done.stdout[-2_000:]}\n    or: {again}"))


def run(
    seed: int, only: str | None = None, *, inputs: int = PURE, kinds: dict[str, tuple[Maker, int]] | None = None
) -> Tally:
    """only: the number of a pure one, or `live`."""
    tally = Tally()
    if only != "live":
        play_pure(seed, tally, inputs=inputs, only=only, kinds=kinds or KINDS)
    if only == "live" or (only is None and seed % EVERY_LIVE == 0):
        play_live(seed, tally)
    return tally


CAMPAIGN = Campaign(
    name="inputs",
    title="fuzzed HTTP/1, HTTP/2, WebSocket and JSON inputs",
    goal=1_000_000,
    figure="inputs",
    run=run,
    meaning="`live`: against a real server; `pure`: given to the functions that a gateway gives them to",
)
