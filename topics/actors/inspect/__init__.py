"""A running server seen from outside, by commands."""
