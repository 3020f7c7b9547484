"""The actor that owns forwarding: its room in the house. Routers come with the forwarder process."""
