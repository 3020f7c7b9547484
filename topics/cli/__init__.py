"""The `topics` command: one file per verb."""
