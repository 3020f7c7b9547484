"""A data folder seen from outside: which records it holds, and where their bytes are. Reads, never writes, asks no
process and takes no lock. Spark and the ops commands look through this; docs/FORMAT.md says why it may."""
