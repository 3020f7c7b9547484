"""Processes that own state: how they are started, watched, replaced and connected."""
