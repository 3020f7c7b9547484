"""The bytes in memory that processes share: rings, counters, and the two OS objects beneath them."""
