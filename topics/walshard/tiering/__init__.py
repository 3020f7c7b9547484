"""The cold tier: segments that are moved to another disk."""
