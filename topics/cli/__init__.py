"""The `topics` command: one module per verb."""
