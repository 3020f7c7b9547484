"""One topic in memory: its index, and how it is read."""
