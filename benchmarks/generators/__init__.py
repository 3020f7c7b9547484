"""Load generators, each a process of its own."""
