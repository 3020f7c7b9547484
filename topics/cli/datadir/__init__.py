"""Verbs that read a data folder."""
