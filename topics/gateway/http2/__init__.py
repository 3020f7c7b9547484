"""HTTP/2: Hypercorn and Quart-Trio."""
