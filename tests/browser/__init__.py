"""What a real browser makes of the streams."""
