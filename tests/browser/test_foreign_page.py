"""A page of another origin and a server without keys: images, forms, fetches, sockets and event streams of a real
browser get nothing, and a name that resolves to loopback gets nothing either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from e2e.queues import make_queue
from e2e.server import Server

from .chromium import Page

pytestmark = pytest.mark.browser

# Everything that a page can send to another origin without being asked; resolves when all of it is over.
ATTACK = """
async ({base, queue}) => {
  const over = (element, attribute, url) => new Promise((resolve) => {
    element.onload = () => resolve('load');
    element.onerror = () => resolve('error');
    element[attribute] = url;
    document.body.append(element);
  });
  const fetched = (url, options) => fetch(url, options).then((answer) => answer.type, () => 'error');
  const work = `${base}/v0/topics/${queue}/work?node=x&max=1000`;
  const append = {method: 'POST', body: '{"records": [{"data": "evil"}]}'};
  const json = {'Content-Type': 'application/json'};
  const source = new EventSource(work);
  const socket = new WebSocket(`${base.replace('http', 'ws')}/v0/ws`);
  const result = {
    image: await over(document.createElement('img'), 'src', work),
    script: await over(document.createElement('script'), 'src', work),
    style: await over(Object.assign(document.createElement('link'), {rel: 'stylesheet'}), 'href', work),
    stream: await new Promise((resolve) => {
      if (source.readyState === EventSource.CLOSED) resolve('closed');
      source.onerror = () => resolve('closed');
      source.onopen = () => resolve('open');
    }),
    socket: await new Promise((resolve) => {
      if (socket.readyState === WebSocket.CLOSED) resolve('closed');
      socket.onclose = () => resolve('closed');
      socket.onopen = () => resolve('open');
    }),
    opaque: await fetched(work, {mode: 'no-cors'}),
    read: await fetched(`${base}/v0/topics`),
    append: await fetched(`${base}/v0/topics/${queue}`, {mode: 'no-cors', ...append}),
    json: await fetched(`${base}/v0/topics/${queue}`, {...append, headers: json}),
  };
  source.close();
  return result;
}
"""


@pytest.mark.gate
def test_a_page_of_another_origin_gets_nothing(open_page: Callable[..., Page], server: Server) -> None:
    with server.client() as client:
        queue = make_queue(client)
        queue.produce(1, 2, 3)
        page = open_page(f"http://localhost:{server.port}/v0/health")  # another site than 127.0.0.1
        result: dict[str, Any] = page.call(ATTACK, {"base": server.url, "queue": queue.name})
        assert result == {
            "image": "error",
            "script": "error",
            "style": "error",
            "stream": "closed",
            "socket": "closed",
            "opaque": "opaque",  # a refusal that the page can't read
            "read": "error",
            "append": "opaque",
            "json": "error",
        }
        queue.assert_counters(3, 0)
        own = open_page(f"{server.url}/v0/topics/{queue.name}/work?node=x")  # a navigation
        assert "not_acceptable" in own.run("document.body.innerText")
        queue.assert_counters(3, 0)
