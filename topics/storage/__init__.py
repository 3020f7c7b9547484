"""The bytes on disk. Pure: nothing here opens a file or asks the time, so that Spark, the ops CLI and
recovery read the same format through the same code. docs/FORMAT.md is its public description."""
