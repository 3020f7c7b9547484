"""The actor that owns leases: its room in the house. Claims come with the queue coordinator process."""
