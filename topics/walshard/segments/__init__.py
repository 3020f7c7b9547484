"""From the log to segments and snapshots."""
