"""An archive of the classes that a driver of Spark loads, from which each later Java of the tests starts.

``python tests/java_archive.py`` makes it, in the folder for temporary files. Java uses the archive only if it
was made by the same version of Java, of the same jars. Without an archive the tests run too, and take longer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "JAVA_TOOL_OPTIONS"
QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A Java of the tests lives a minute. CPU of a session of Spark that starts and runs ten jobs, in seconds: 35 with the
optimizing compiler, 21 without it, 13 with the archive too."""
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""A Java that has other jars, like the one that computes the command of the driver, would warn on each start."""

SESSION = """
import cues.spark
from pyspark import SparkContext

with cues.spark.session("local[2]") as spark:
    spark.range(1000).selectExpr("id", "id % 7 as k").groupBy("k").count().collect()
    spark.range(100).repartition(3).rdd.mapPartitions(lambda rows: [sum(row[0] for row in rows)]).collect()
    java = SparkContext._gateway.proc
java.stdin.close()  # it ends, and writes the archive at its end
java.wait()
"""


def archive() -> Path | None:
    """The file of the archive for the installed Spark, which need not be there; None without Spark."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    jars = Path(found.origin).parent / "jars"
    named = hashlib.sha256(f"{jars} {jars.stat().st_mtime_ns} {os.getuid()}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"cues-java-{named}.jsa"


def options() -> str:
    """The options of each Java of the tests."""
    made = archive()
    # An archive holds code that Java runs, so one that another user has made is not used.
    if made is None or not made.exists() or made.stat().st_uid != os.getuid():
        return QUICK
    return f"{QUICK} {QUIET} -XX:SharedArchiveFile={made}"


def make() -> None:
    """Make the archive, if it is not there."""
    made = archive()
    if made is None or made.exists():
        return
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        new = Path(folder) / made.name
        given = {**os.environ, VARIABLE: f"{QUICK} {QUIET} -XX:ArchiveClassesAtExit={new}"}
        subprocess.run([sys.executable, "-c", SESSION], env=given, check=True, timeout=300)
        new.replace(made)


if __name__ == "__main__":
    make()
