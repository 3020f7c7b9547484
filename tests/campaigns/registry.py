"""All campaigns, in the order in which a run takes them, and what part of its time each may use."""

from __future__ import annotations

from . import crashpoints, decoders
from .campaign import Campaign

CAMPAIGNS: dict[str, Campaign] = {module.CAMPAIGN.name: module.CAMPAIGN for module in (crashpoints, decoders)}

# Of the time of a run; what one leaves over is the next one's.
SHARES: dict[str, int] = {"crashpoints": 20, "decoders": 3}
