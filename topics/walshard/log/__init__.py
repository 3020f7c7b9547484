"""The write-ahead log: from a staged batch to the disk, and back after a crash."""
