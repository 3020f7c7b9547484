"""GET /v0/metrics."""
