"""The reports, one module each, and what they share."""
