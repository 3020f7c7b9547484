"""Spark on the files of `topics`: a data source for the log, and the reports made with it.

The source never asks the server for anything and takes no lock: it reads the data folder through topics.datadir and
topics.storage. Executors need pyarrow, msgspec and xxhash beside PySpark.
"""
