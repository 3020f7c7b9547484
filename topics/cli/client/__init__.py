"""Verbs that are clients of a server."""
