"""The Python client, for trio.

```python
from topics.client import Records, connect

async with connect("http://127.0.0.1:4000") as client:
    receipt = await client.publish("jobs", [{"do": "resize"}], tag="user:9")
    async with client.subscribe({"jobs": 0}) as events:
        async for event in events:
            if isinstance(event, Records):
                for record in event:
                    print(record.seq, record.decode())
    async with client.work("thumbnails", "worker-1", max=8) as work:
        async for job in work:
            print(job.seq, job.deliveries, job.decode())
            await client.ack("thumbnails", "worker-1", job)
```

It imports nothing of the server but error codes, bounds and the default address.
"""

from topics.client.address import DEFAULT_URL
from topics.client.client import Client, NewRecord, Page, Receipt, TopicRow, TopicState, connect
from topics.client.events import CaughtUp, Event, Position, Record, Records, Tombstone, TopicDeleted
from topics.client.failures import BadUrl, ClientError, ConnectionLost, NotTopics, OutcomeUnknown, Unreachable
from topics.client.queue import Acked, Claimed, Extended, Job, Nacked, QueueCounts
from topics.client.subscription import Subscription
from topics.client.work import Work
from topics.errors import ApiError

__all__ = [
    "DEFAULT_URL",
    "Acked",
    "ApiError",
    "BadUrl",
    "CaughtUp",
    "Claimed",
    "Client",
    "ClientError",
    "ConnectionLost",
    "Event",
    "Extended",
    "Job",
    "Nacked",
    "NewRecord",
    "NotTopics",
    "OutcomeUnknown",
    "Page",
    "Position",
    "QueueCounts",
    "Receipt",
    "Record",
    "Records",
    "Subscription",
    "Tombstone",
    "TopicDeleted",
    "TopicRow",
    "TopicState",
    "Unreachable",
    "Work",
    "connect",
]
