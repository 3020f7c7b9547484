"""The actor that owns sockets: terminates HTTP, validates, dispatches to shards, renders. Owns no data."""
