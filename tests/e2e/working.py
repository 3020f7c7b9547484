"""Work streams by either lane, and what their workers say.

- `WorkStream` reads one response. On every job frame it checks what all of them have in common: its fields,
  its id, and that the stream never holds more jobs than its `max`, nor one job twice. So a test has to say when
  a job is no longer held, before it can be replaced: `forget`, which `Working.ack` and the like call.
- `Working` opens streams and closes all of them at the end. Its queues lease for an hour unless a test says otherwise,
  so that nothing comes back by itself.
"""

from __future__ import annotations

import re
import time
from collections import deque
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from .client import Answer, Client, Lane
from .h2wire import H2Wire
from .queues import LEASE_ID, Job, Queue, make_queue, now_ms
from .server import Server, eventually
from .sse import WITHIN_S, Ended, Frame, Http1Source, Http2Source, Parser, Source

HOUR_MS = 3_600_000
MOST = 1_000  # jobs of one stream
FIELDS = {"topic", "$seq", "lease_id", "deadline", "$ts", "$tag", "$node", "deliveries", "data", "meta"}
OPTIONAL = {"$tag", "$node", "meta"}
HEARTBEAT = re.compile(r"hb \d{13}")


def claim_within(queue: Queue, count: int, *, node: str = "other", within_s: float = WITHIN_S) -> list[Job]:
    """So many jobs by polling, which have to become claimable in that time, whatever their leases say."""
    got: list[Job] = []

    def all_there() -> bool:
        answer = queue.post("claim", {"node": node, "max": count - len(got)})
        assert answer.status in (200, 503), answer  # while a process is away
        if answer.status == 200:
            got.extend(answer["claimed"])
        return len(got) >= count

    eventually(all_there, within_s=within_s, what=f"{count} claimable jobs")
    return got


class WorkStream:
    """An opened stream. Everything read from it is kept: `frames` and `jobs` in order, `held` by seq."""

    def __init__(self, source: Source, *, queue: str = "", node: str = "", most: int = MOST) -> None:
        self.source = source
        self.queue = queue
        self.node = node
        self.most = most
        self.status = source.status
        self.headers = source.headers
        self.frames: list[Frame] = []
        self.jobs: list[Job] = []
        self.held: dict[int, Job] = {}
        self.ended = False
        self._parser = Parser()
        self._parsed: deque[Frame] = deque()
        if self.status == 200:
            first = self._next(time.monotonic() + WITHIN_S)
            assert first.fields == [("retry", "2000")], first
            second = self.frame()
            assert second.comment is not None, second

    def answer(self) -> Answer:
        """Of a stream that was refused."""
        assert self.status != 200, "the stream was opened"
        body = b""
        length = int(self.headers["content-length"])
        while len(body) < length:
            body += self.source.more(WITHIN_S)
        return Answer(status=self.status, headers=self.headers, raw=body)

    def close(self) -> None:
        self.source.close()

    def reset(self) -> None:
        self.source.reset()

    # --- reading ---

    def _next(self, deadline: float) -> Frame:
        while not self._parsed:
            if self.ended:
                raise Ended
            try:
                data = self.source.more(deadline - time.monotonic())
            except TimeoutError:
                raise AssertionError(f"no frame came in time; the last ones: {self.frames[-3:]}") from None
            except ConnectionResetError:
                data = b""
            if not data:
                self.ended = True
            self._parsed.extend(self._parser.feed(data))
            if time.monotonic() > deadline + 1 and not self._parsed:
                raise AssertionError(f"no whole frame came in time; the last ones: {self.frames[-3:]}")
        return self._parsed.popleft()

    def frame(self, within_s: float = WITHIN_S) -> Frame:
        """The next frame, heartbeats too."""
        frame = self._next(time.monotonic() + within_s)
        names = [name for name, _ in frame.fields]
        if frame.comment is not None:
            assert HEARTBEAT.fullmatch(frame.comment), frame
        elif frame.event == "error":
            assert names == ["event", "data"], frame
            assert isinstance(frame["code"], int), frame
            assert isinstance(frame["error"], str), frame
            assert frame["error"], frame
        else:
            assert frame.event == "job", frame
            assert names == ["id", "event"] + ["data"] * names.count("data"), frame  # its JSON may have several lines
            self._take(frame)
        self.frames.append(frame)
        return frame

    def _take(self, frame: Frame) -> None:
        job = frame.json
        assert FIELDS - OPTIONAL <= job.keys() <= FIELDS, frame
        assert frame.id == str(job["$seq"]), frame
        assert LEASE_ID.fullmatch(job["lease_id"]), frame
        assert job["deliveries"] >= 1, frame
        assert not self.queue or job["topic"] == self.queue, frame
        self.held = {seq: held for seq, held in self.held.items() if held["deadline"] >= now_ms()}
        assert job["$seq"] not in self.held, f"delivered again while it is held: {frame}"
        self.held[job["$seq"]] = job
        assert len(self.held) <= self.most, f"more than {self.most} at once: {sorted(self.held)}"
        self.jobs.append(job)

    def event(self, within_s: float = WITHIN_S) -> Frame:
        """The next frame that is not a heartbeat."""
        deadline = time.monotonic() + within_s
        while (frame := self.frame(deadline - time.monotonic())).comment is not None:
            pass
        return frame

    def job(self, within_s: float = WITHIN_S) -> Job:
        """The next job; nothing else may come before it but heartbeats."""
        frame = self.event(within_s)
        assert frame.event == "job", frame
        return frame.json

    def take(self, count: int, *, within_s: float = WITHIN_S) -> list[Job]:
        deadline = time.monotonic() + within_s
        return [self.job(deadline - time.monotonic()) for _ in range(count)]

    def seqs(self, count: int, *, within_s: float = WITHIN_S) -> list[int]:
        """Of the next so many jobs."""
        return [job["$seq"] for job in self.take(count, within_s=within_s)]

    def stays_silent(self, for_s: float = 0.3) -> bool:
        """Whether no job and no word comes for a while. Only ever beside a check that counts: it may miss something."""
        deadline = time.monotonic() + for_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._parsed:
                try:
                    data = self.source.more(left)
                except TimeoutError:
                    break
                self.ended = not data
                self._parsed.extend(self._parser.feed(data))
            if self.ended or any(frame.comment is None for frame in self._parsed):
                return False
        return True

    def rest(self, *, within_s: float = WITHIN_S) -> list[Frame]:
        """Everything up to the end of the response, which must come, and not in the middle of a frame."""
        deadline = time.monotonic() + within_s
        frames: list[Frame] = []
        try:
            while True:
                frames.append(self.frame(deadline - time.monotonic()))
        except Ended:
            assert self._parser.between_frames, "the stream ended in the middle of a frame"
            return frames

    def last_word(self, *, within_s: float = WITHIN_S) -> int:
        """Read to the end; the code of the error frame that must stand there, and only there."""
        self.rest(within_s=within_s)
        errors = [frame for frame in self.frames if frame.event == "error"]
        assert len(errors) == 1, errors
        assert errors[0] is self.frames[-1], self.frames[-3:]
        code: int = errors[0]["code"]
        return code

    def forget(self, *seqs: int) -> None:
        """These are about to be acked, nacked or deleted; none at all: whatever is held."""
        for seq in seqs or tuple(self.held):
            self.held.pop(seq, None)


class Working:
    """Work streams on one server by one lane, and a client by the same lane."""

    def __init__(self, server: Server, lane: Lane = "http1") -> None:
        self._server = server
        self.lane = lane
        self.client = Client(server.port, lane)
        self._sources: list[Source] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        for source in self._sources:
            try:
                source.close()
            except OSError:
                pass

    def queue(self, name: str | None = None, **config: object) -> Queue:
        """A new one."""
        return make_queue(self.client, name, **{"lease_ms": HOUR_MS, **config})

    def connect(self, *, receive_buffer: int | None = None) -> Http1Source | Http2Source:
        """A connection that has not asked for anything yet."""
        source: Http1Source | Http2Source
        if self.lane == "http1":
            source = Http1Source(self._server.port, receive_buffer=receive_buffer)
        else:
            source = Http2Source(H2Wire(self._server.port), owns=True)
        self._sources.append(source)
        return source

    def get(
        self, path: str, *headers: tuple[str, str], on: Http1Source | Http2Source | None = None, **how: Any
    ) -> WorkStream:
        """GET a stream, whether it will be one or not."""
        receive_buffer = how.pop("receive_buffer", None)
        source = on or self.connect(receive_buffer=receive_buffer)
        known = {name: how.pop(name) for name in ("queue", "node", "most") if name in how}
        source.get(path, headers, **how)
        return WorkStream(source, **known)

    def attempt(self, queue: Queue | str, node: str = "w", *, on: Any = None, **query: Any) -> WorkStream:
        """A stream, or its refusal."""
        name = queue if isinstance(queue, str) else queue.name
        receive_buffer = query.pop("receive_buffer", None)
        most = min(int(query.get("max", 1)), MOST)
        path = f"/v0/topics/{name}/work?{urlencode({'node': node, **query})}"
        accept = ("Accept", "text/event-stream")
        return self.get(path, accept, on=on, receive_buffer=receive_buffer, queue=name, node=node, most=most)

    def open(self, queue: Queue | str, node: str = "w", **query: Any) -> WorkStream:
        """A stream, which must open."""
        stream = self.attempt(queue, node, **query)
        assert stream.status == 200, stream.answer()
        return stream

    # --- what its worker says ---

    def ack(self, stream: WorkStream, *seqs: int, **fields: object) -> Answer:
        """Exactly these, which all must be held; without any: all that the stream holds."""
        seqs = seqs or tuple(stream.held)
        stream.forget(*seqs)
        answer = Queue(self.client, stream.queue).ack(seqs, node=stream.node, **fields)
        assert (answer["acked"], answer["skipped"]) == (len(seqs), []), answer
        return answer

    def nack(self, stream: WorkStream, *seqs: int, **fields: object) -> Answer:
        seqs = seqs or tuple(stream.held)
        stream.forget(*seqs)
        answer = Queue(self.client, stream.queue).nack(seqs, node=stream.node, **fields)
        assert (answer["nacked"], answer["skipped"]) == (len(seqs), []), answer
        return answer
