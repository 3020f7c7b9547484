"""Copies that routers forward into a topic."""
