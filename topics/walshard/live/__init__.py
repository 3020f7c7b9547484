"""Who waits for records, and pushes to them."""
