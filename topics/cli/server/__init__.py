"""Verbs that run a server, and look at a running one."""
