"""A page that works: the browser's own EventSource on `/work` brings the jobs, fetch acks them. What a page leaves
undone, because it was closed or because its connection broke, is there for others at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from e2e.queues import Queue, make_queue, seqs_of
from e2e.server import Server, eventually, gone
from e2e.working import HOUR_MS, claim_within

from .chromium import Browser, Page

pytestmark = pytest.mark.browser

# Opens a stream of jobs; what arrives is kept in `jobs`, how many were in hand at a time in `most`. With `acks` each
# job is acked after a moment, as if it had been worked on; otherwise the page only collects.
WORK = """
({queue, node, max, acks}) => {
  window.jobs = [];
  window.acked = [];
  window.skipped = [];
  window.errors = [];
  window.held = new Set();
  window.most = window.opened = window.broken = 0;
  const base = `/v0/topics/${queue}`;
  window.source = new EventSource(`${base}/work?node=${encodeURIComponent(node)}&max=${max}`);
  source.onopen = () => { window.opened += 1; window.held.clear(); };
  source.onerror = (event) => {
    if (event.data === undefined) window.broken += 1; else window.errors.push(JSON.parse(event.data));
  };
  const ack = async (job) => {
    await new Promise((resolve) => setTimeout(resolve, job.$seq % 5));
    window.held.delete(job.$seq);
    const answer = await fetch(`${base}/ack`, {
      method: 'POST',
      headers: {'Content-Type': 'application/json'},
      body: JSON.stringify({node, seqs: [job.$seq], lease_ids: [job.lease_id]}),
    });
    const result = await answer.json();
    if (!answer.ok) throw new Error(JSON.stringify(result));
    (result.acked === 1 ? window.acked : window.skipped).push(job.$seq);
  };
  source.addEventListener('job', (event) => {
    const job = JSON.parse(event.data);
    jobs.push({id: event.lastEventId, ...job});
    held.add(job.$seq);
    window.most = Math.max(most, held.size);
    if (acks) ack(job);
  });
}
"""
CLOSED = 2  # of readyState

Job = dict[str, Any]


class Worker:
    """A page that works on a queue."""

    def __init__(self, page: Page, queue: Queue, *, node: str = "page", most: int = 1, acks: bool = True) -> None:
        self.page = page
        page.call(WORK, {"queue": queue.name, "node": node, "max": most, "acks": acks})

    def jobs(self) -> list[Job]:
        jobs: list[Job] = self.page.run("jobs")
        return jobs

    def acked(self) -> list[int]:
        acked: list[int] = self.page.run("acked")
        return acked

    def wait_jobs(self, count: int) -> list[Job]:
        eventually(lambda: len(self.jobs()) >= count, every_s=0.05, what=f"{count} jobs in the page")
        return self.jobs()

    def wait_acked(self, count: int) -> list[int]:
        eventually(lambda: len(self.acked()) >= count, every_s=0.05, what=f"{count} jobs acked by the page")
        return self.acked()


@pytest.fixture
def queue(server: Server) -> Queue:
    return make_queue(server.client(), lease_ms=HOUR_MS)


@pytest.mark.gate
def test_a_page_works_off_a_queue(page: Page, queue: Queue) -> None:
    """What was there and what comes, each job once, never more in hand than it asked for."""
    queue.produce_records([{"data": {"n": n, "text": "é 🎈\n"}, "tag": f"t{n}", "meta": {"m": n}} for n in range(50)])
    worker = Worker(page, queue, node="a page & its node", most=4)
    worker.wait_acked(50)
    for n in range(50, 100):
        queue.produce({"n": n, "text": "é 🎈\n"})
    assert sorted(worker.wait_acked(100)) == list(range(1, 101))
    jobs = worker.jobs()
    assert [job["data"] for job in jobs] == [{"n": n, "text": "é 🎈\n"} for n in range(100)]
    assert [job["id"] for job in jobs] == [str(seq) for seq in range(1, 101)]
    assert (jobs[7]["$tag"], jobs[7]["meta"], jobs[7]["topic"]) == ("t7", {"m": 7}, queue.name)
    assert {job["deliveries"] for job in jobs} == {1}
    assert page.run("most") == 4
    assert page.run("skipped") == []
    assert (page.run("opened"), page.run("broken")) == (1, 0)  # one connection all the time
    queue.wait_counters(0, 0)
    page.run("source.close()")


def test_two_tabs_share_the_work(open_page: Callable[..., Page], queue: Queue) -> None:
    tabs = [Worker(open_page(), queue, node="same", most=3) for _ in range(2)]
    queue.produce(*range(100))
    eventually(lambda: sum(len(tab.acked()) for tab in tabs) >= 100, every_s=0.05)
    assert sorted(seq for tab in tabs for seq in tab.acked()) == list(range(1, 101))
    assert all(tab.page.run("most") <= 3 and tab.page.run("skipped") == [] for tab in tabs)
    assert all(tab.acked() for tab in tabs)
    queue.wait_counters(0, 0)


@pytest.mark.parametrize("how", ["the source is closed", "the tab is closed"])
def test_what_a_page_leaves_undone_is_anybodys_at_once(
    browser: Browser, server: Server, queue: Queue, how: str
) -> None:
    page = browser.open(f"{server.url}/v0/health")
    queue.produce(*range(5))
    worker = Worker(page, queue, most=5, acks=False)
    worker.wait_jobs(5)
    queue.assert_counters(0, 5)
    if how == "the source is closed":
        page.run("source.close()")
    else:
        page.close()
    jobs = claim_within(queue, 5)
    assert seqs_of(jobs) == [1, 2, 3, 4, 5]
    assert {job["deliveries"] for job in jobs} == {2}
    if how == "the source is closed":
        page.close()


def test_it_comes_back_by_itself_when_the_gateway_dies(page: Page, server: Server, queue: Queue) -> None:
    """With what it held and could not ack, and then goes on."""
    queue.produce(*range(3))
    worker = Worker(page, queue, most=3, acks=False)
    worker.wait_jobs(3)
    killed = server.signal_child("gateway-0")
    eventually(lambda: gone(killed))
    jobs = worker.wait_jobs(6)
    assert [(job["$seq"], job["deliveries"]) for job in jobs] == [(seq, n) for n in (1, 2) for seq in (1, 2, 3)]
    assert page.run("opened") >= 2
    with server.client() as fresh:
        again = queue.by(fresh)
        assert again.ack([1, 2, 3], node="page", lease_ids=[job["lease_id"] for job in jobs[3:]])["acked"] == 3
        again.produce("late")
        assert worker.wait_jobs(7)[-1]["data"] == "late"
    page.run("source.close()")


def test_it_goes_on_when_the_coordinator_dies(page: Page, server: Server, queue: Queue) -> None:
    """On the same connection, without doing anything twice."""
    queue.produce(*range(3))
    worker = Worker(page, queue, most=2)
    worker.wait_acked(3)
    killed = server.signal_child("queue")
    eventually(lambda: gone(killed))
    server.wait_ready()
    queue.produce(*range(20))
    assert sorted(worker.wait_acked(23)) == list(range(1, 24))
    assert len(worker.jobs()) == 23
    assert (page.run("opened"), page.run("broken")) == (1, 0)
    page.run("source.close()")


def test_a_queue_that_is_deleted_ends_it(page: Page, queue: Queue) -> None:
    """The page is told why; its browser tries again, is refused, and gives up."""
    worker = Worker(page, queue, acks=False)
    queue.produce(1)
    worker.wait_jobs(1)
    queue.api.drop(queue.name)
    eventually(lambda: page.run("errors"), every_s=0.05)
    assert [error["code"] for error in page.run("errors")] == [404]
    eventually(lambda: page.run("source.readyState") == CLOSED, every_s=0.05)
