"""PySpark imports every installed package whose name begins with `pyspark_` and registers its DefaultSource: so
`spark.read.format("topics")` works wherever this is installed, without a word in the session."""

from spark_pipeline.source import TopicsSource as DefaultSource

__all__ = ["DefaultSource"]
