"""Where a single-record append spends its time: the whole path in one process, step by step, without the network.

Run it as `.venv/bin/python tests/profile_append.py`. Sixteen connections send one request each per round, over
socket pairs; gateway and shard share the process, so no step waits for another one and what is left is the work
itself. docs/BENCHMARKS.md holds figures made with it.
"""

from __future__ import annotations

import gc
import select
import socket
import tempfile
import time
from collections.abc import Callable

from topics.actors.clock import Clock
from topics.actors.link import Link
from topics.actors.messages import Op, PutTopic, pack
from topics.gateway.api.queues import QueueHandlers
from topics.gateway.api.routers import RouterHandlers
from topics.gateway.api.routes import Routes
from topics.gateway.api.topics import Handlers
from topics.gateway.api.watch import Watches
from topics.gateway.calls import Calls
from topics.gateway.http1.head import Heads
from topics.gateway.http1.server import HotLane
from topics.gateway.metrics.page import MetricsHandlers
from topics.gateway.streams.feeds import Feeds
from topics.gateway.streams.registry import Streams
from topics.settings import Settings
from topics.shm import layout
from topics.shm.counters import Board
from topics.shm.doorbell import Doorbell
from topics.shm.ring import format_link
from topics.storage.config import TopicConfig
from topics.walshard.engine import Engine
from topics.walshard.log.disk import Disk
from topics.walshard.log.syncer import Syncer
from topics.walshard.log.wal import Wal
from topics.walshard.topic.topic import Totals

CONNECTIONS = 16
ROUNDS = 3_000
RECORD = b'{"data":{"type":"resize","url":"s3://bucket/image-000123.png","w":256,"h":256,"q":"hi"}}'
BODY = b'{"records":[' + RECORD + b"]}"
REQUEST = (
    b"POST /v0/topics/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class Path:
    """A gateway's HTTP/1 lane and a shard's engine on one link over plain memory."""

    def __init__(self, folder: str) -> None:
        settings = Settings(data_dir=folder)
        board = Board.create(["gateway-0", "shard-0"])
        view = memoryview(bytearray(layout.link_bytes(settings.ring_bytes)))
        format_link(view, generation=1, ring_bytes=settings.ring_bytes)
        bells = [
            Doorbell(Doorbell.create_fd(), board.words, board.sleeping_index(name)) for name in ("gateway-0", "shard-0")
        ]
        self.shard_link = Link("gateway-0", view, side=1, generation=1, bell=bells[0])
        self.calls = Calls(shards=1, timeout_ms=60_000)
        self.calls.link_up(0, Link("shard-0", view, side=0, generation=1, bell=bells[1]))
        handlers = Handlers(settings, shards=1, board=board)
        streams = Streams(settings=settings, calls=self.calls, feeds=Feeds(self.calls, shards=1))
        routes = Routes(
            handlers,
            Watches(streams, shards=1),
            RouterHandlers(peer=1, board=board),
            QueueHandlers(streams, peer=2),
            MetricsHandlers(board, shards=1),
        )
        self.lane = HotLane(
            settings=settings,
            heads=Heads(routes, max_body_bytes=settings.max_body_bytes),
            handlers=handlers,
            calls=self.calls,
            epoll=select.epoll(),
            hand_over=lambda sock, first: None,
        )
        disk = Disk()
        syncer = Syncer(disk)
        wal = Wal(
            disk,
            folder,
            shard=0,
            layout=1,
            boot_id=bytes(16),
            file_bytes=settings.wal_file_bytes,
            next_lsn=1,
            next_file_no=1,
            recovered=[],
        )
        self.engine = Engine(settings=settings, topics={}, totals=Totals(), wal=wal, syncer=syncer, clock=Clock())
        self.engine.handle(pack(Op.PUT_TOPIC, 2**40, PutTopic("orders", TopicConfig(), None)), self.shard_link.writer)
        self.engine.commit.synced(syncer.wait())
        self.shard_link.flush()
        self.calls.drain()
        self.clients: list[socket.socket] = []
        for _ in range(CONNECTIONS):
            server = socket.create_server(("127.0.0.1", 0))
            self.clients.append(socket.create_connection(server.getsockname()))
            self.lane.adopt(server.accept()[0])
            server.close()
        self.messages: list[bytes] = []

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        lane, calls, engine, link = self.lane, self.calls, self.engine, self.shard_link
        connections = list(lane.connections)

        def receive() -> None:
            for fd in connections:
                lane.handle(fd, select.EPOLLIN)
            while lane.unfinished:  # the machine was busy with something else
                lane.begin_round()
                lane.go_on()

        def push() -> None:
            lane.send_runs()
            calls.flush()

        def drain() -> None:
            self.messages = link.drain()

        def handle() -> None:
            for message in self.messages:
                engine.handle(message, link.writer)

        def write() -> None:
            engine.commit.write()

        return [
            ("gateway: receive, look up the head, decode the body", receive),
            ("gateway: join the round's appends, push into the ring", push),
            ("shard: take from the ring", drain),
            ("shard: topic, seqs, frame, checksum", handle),
            ("shard: write the WAL, publish, build the answer", write),
            ("shard: push the answer into the ring", link.flush),
            ("gateway: take the answer, render JSON and HTTP", calls.drain),
            ("gateway: send", lane.send_dirty),
        ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        steps = path.steps()
        spent = dict.fromkeys((name for name, _ in steps), 0)
        gc.collect()
        gc.freeze()
        for number in range(ROUNDS):
            for client in path.clients:
                client.sendall(REQUEST)
            path.lane.begin_round()
            path.engine.begin_round(time.monotonic_ns())
            for name, step in steps:
                started = time.perf_counter_ns()
                step()
                if number >= ROUNDS // 10:
                    spent[name] += time.perf_counter_ns() - started
            for client in path.clients:
                assert client.recv(65_536).startswith(b"HTTP/1.1 200")
    requests = (ROUNDS - ROUNDS // 10) * CONNECTIONS
    for name, nanoseconds in spent.items():
        print(f"{nanoseconds / requests / 1_000:6.2f} µs  {name}")
    print(f"{sum(spent.values()) / requests / 1_000:6.2f} µs  altogether, per request")


if __name__ == "__main__":
    main()
