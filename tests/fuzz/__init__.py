"""Hostile bytes at every door of a real server: it may refuse, it may close, it may not break."""
