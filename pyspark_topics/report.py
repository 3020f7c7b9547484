"""`topics report` as a file, because spark-submit takes nothing else:

    spark-submit --master spark://host:7077 .../pyspark_topics/report.py --data-dir DIR --out DIR

The options are those of `topics report`; what spark-submit sets about Spark wins over what the reports would choose.
"""

from topics.cli.datadir.report import report

if __name__ == "__main__":
    report(prog_name="topics report")
