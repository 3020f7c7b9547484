"""Checks whether a folder is whole."""
