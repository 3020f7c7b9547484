"""Long-lived connections: watches, WebSockets, work streams."""
