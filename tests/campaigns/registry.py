"""All campaigns, in the order in which a run takes them, and what part of its time each may use."""

from __future__ import annotations

from . import bitflips, crashpoints, decoders, inputs, ioerrors, kills, walks
from .campaign import Campaign

CAMPAIGNS: dict[str, Campaign] = {
    campaign.name: campaign
    for campaign in (
        crashpoints.CAMPAIGN,
        ioerrors.CAMPAIGN,
        kills.CAMPAIGN,
        walks.CAMPAIGN,
        inputs.CAMPAIGN,
        decoders.CAMPAIGN,
        bitflips.CAMPAIGN,
    )
}

# Of the time of a run; what one leaves over is the next one's.
SHARES: dict[str, int] = {
    "crashpoints": 20,
    "ioerrors": 3,
    "kills": 15,
    "walks": 40,
    "inputs": 12,
    "decoders": 4,
    "bitflips": 6,
}
