"""Jobs of one queue in every state there is: what they must be again after an end, whoever ended."""

from __future__ import annotations

from typing import Any

from crash_queues import SLACK_MS, claim, counters, job, make_queue, now_ms, say
from crash_routers import World
from crash_server import eventually

Entry = dict[str, Any]
HELD = 3_600_000


class Scene:
    """Jobs of one queue in every state there is, and what has to become of them: nothing.

    1 2 3   held by a          7    delivered twice and too often: in the dead letter
    4       given back by b    8    done by f
    5       delayed by b       9    delayed by g, for a moment
    6       extended by d      10   held by x
    11      expired under c    12+  nobody's yet
    """

    def __init__(self, world: World, queue: str, *, leases_durable: bool) -> None:
        self._world = world
        self.queue = queue
        self._dead = f"{queue}.dead"
        self._leases: dict[int, Entry] = {}
        make_queue(
            world,
            queue,
            durability="fsync" if leases_durable else "disk",
            leases_durable=leases_durable,
            max_deliveries=2,
            dead_letter=self._dead,
        )
        assert world.client.append(queue, *map(job, range(13))).ok
        self._claim("a", [1, 2, 3])
        self._claim("b", [4, 5])
        self._claim("d", [6], lease_ms=2_000)
        self._extend_until = self._say("extend", "d", [6], lease_ms=HELD)["deadlines"]["6"]
        self._claim("e", [7])
        self._say("nack", "e", [7])
        self._claim("e", [7], deliveries=2)
        self._say("nack", "e", [7])
        self._claim("f", [8])  # and so the pass that takes 7 away
        eventually(lambda: counters(world, queue)["dead_lettered"] == 1, what="a dead letter")
        self._claim("g", [9])
        self._claim("x", [10])
        self._claim("c", [11], lease_ms=100)
        eventually(lambda: counters(world, queue)["ready"] == 3, what="an expired lease")
        self._say("nack", "b", [4])
        self._say("nack", "b", [5], delay_ms=HELD)
        self._delay_until = now_ms() + 2_000
        self._say("nack", "g", [9], delay_ms=2_000)
        # What the coordinator tells its shard stays in order: this is answered when all of the above is written.
        self._say("ack", "f", [8])
        self._before = counters(world, queue)
        assert self._before == {"ready": 4, "in_flight": 5, "dead_lettered": 1, "count": 11}

    def _claim(self, node: str, seqs: list[int], *, deliveries: int = 1, lease_ms: int = HELD) -> None:
        answer = claim(self._world.client, self.queue, node, max=len(seqs), lease_ms=lease_ms)
        assert answer.ok, answer
        claimed = answer.body["claimed"]
        assert [(entry["$seq"], entry["deliveries"]) for entry in claimed] == [(seq, deliveries) for seq in seqs]
        self._leases |= {entry["$seq"]: entry for entry in claimed}

    def _say(self, verb: str, node: str, seqs: list[int], **fields: Any) -> Entry:
        fields.setdefault("lease_ids", [self._leases[seq]["lease_id"] for seq in seqs])
        answer = say(self._world.client, verb, self.queue, node, seqs, **fields)
        assert answer.ok, answer
        assert answer.body["skipped"] == [], answer
        return dict(answer.body)

    def _skipped(self, verb: str, node: str, seqs: list[int], **fields: Any) -> None:
        answer = say(self._world.client, verb, self.queue, node, seqs, **fields)
        assert answer.ok, answer
        assert answer.body["skipped"] == seqs, answer

    def check(self) -> None:
        world, queue = self._world, self.queue
        eventually(lambda: now_ms() > self._leases[6]["deadline"], what="the end of a lease that was extended")
        seen = counters(world, queue)
        if now_ms() >= self._delay_until and seen["ready"] == 5:
            seen["ready"] = 4
        assert seen == self._before
        self._check_what_is_free()
        # Those who hold something still do.
        lease_ids = {seq: entry["lease_id"] for seq, entry in self._leases.items()}
        self._say("ack", "a", [1])
        self._skipped("ack", "a", [2], lease_ids=[lease_ids[1]])
        self._skipped("ack", "x", [2])
        answer = say(world.client, "ack", queue, "a", [2])
        assert answer.body["acked"] == 1, answer
        assert self._say("extend", "a", [3], lease_ms=2 * HELD)["deadlines"]["3"] > self._leases[3]["deadline"]
        assert self._extend_until > now_ms()
        self._say("ack", "d", [6])
        self._say("ack", "x", [10])
        # And those who don't, don't.
        for node, seq in (("b", 4), ("b", 5), ("e", 7), ("f", 8), ("g", 9), ("c", 11), ("a", 1)):
            self._skipped("ack", node, [seq])
            self._skipped("nack", node, [seq])
            self._skipped("extend", node, [seq], lease_ms=1_000)
        self._say("nack", "a", [3])
        self._claim("other", [3], deliveries=2)
        self._say("ack", "other", [3, 4, 11, 12, 13])
        eventually(self._comes_after_its_delay, what="the delayed job")
        self._say("ack", "other", [9])
        assert counters(world, queue) == {"ready": 0, "in_flight": 0, "dead_lettered": 1, "count": 1}
        ((record,),) = [[each for each in world.read(self._dead) if "data" in each]]
        assert record["data"] == job(6)
        assert record["meta"]["$dead_letter_deliveries"] == "2"
        assert record["meta"]["$dead_letter_src_seq"] == "7"

    def _check_what_is_free(self) -> None:
        before = dict(self._leases)
        answer = claim(self._world.client, self.queue, "other", max=100, lease_ms=HELD)
        assert answer.ok, answer
        claimed = {entry["$seq"]: entry for entry in answer.body["claimed"]}
        self._take_delayed(claimed)
        assert {seq: entry["deliveries"] for seq, entry in claimed.items()} == {4: 2, 11: 2, 12: 1, 13: 1}
        assert not {e["lease_id"] for e in claimed.values()} & {e["lease_id"] for e in before.values()}
        self._leases |= claimed

    def _take_delayed(self, claimed: dict[int, Entry]) -> bool:
        """Whether the delayed job is among these; not before its time."""
        if (entry := claimed.pop(9, None)) is None:
            return False
        assert now_ms() >= self._delay_until - SLACK_MS
        assert entry["deliveries"] == 2
        self._leases[9] = entry
        self._delay_until = 0.0
        return True

    def _comes_after_its_delay(self) -> bool:
        if not self._delay_until:
            return True
        answer = claim(self._world.client, self.queue, "other", max=100, lease_ms=HELD)
        claimed = {entry["$seq"]: entry for entry in answer.body["claimed"]}
        came = self._take_delayed(claimed)
        assert claimed == {}
        return came
