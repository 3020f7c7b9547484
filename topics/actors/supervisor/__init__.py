"""Starts, connects, replaces and stops the processes."""
