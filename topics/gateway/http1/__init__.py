"""HTTP/1.x: connections, heads, bodies, answers."""
