"""The actor that owns topics: WAL, index, retention, segments, snapshots. One process per shard."""
