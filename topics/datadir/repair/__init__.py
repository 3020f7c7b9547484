"""Makes a damaged folder whole."""
