"""What processes say to each other: one struct per request and answer, in the file of whoever they serve, and the
envelope around them. Everybody says `messages.Append`, whichever file that is in."""

from topics.actors.messages.envelope import *
from topics.actors.messages.op import *
from topics.actors.messages.queues import *
from topics.actors.messages.routers import *
from topics.actors.messages.streams import *
from topics.actors.messages.topics import *
