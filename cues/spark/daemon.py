"""The process from which Spark forks the Python workers of a local master. It has the modules that every worker needs.

Spark's own daemon (:mod:`pyspark.daemon`) imports nothing, because a module may start a thread, and a fork copies only
the thread that forks. So each worker imports for itself, which takes 0.8 s of CPU. Of the modules here only Arrow's
allocator starts a thread, and it is made for forks. A test fails if a module here starts another thread.

A fork also copies the state of random numbers. Python's own is seeded again in each worker; numpy's is seeded here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys

import pyspark.worker  # noqa: F401
from pyspark import daemon

import cues.spark.cluster.tasks
import cues.spark.datasource
import cues.spark.stretches  # noqa: F401

with contextlib.suppress(ImportError):  # Arrow imports it when a function of tables uses a number of Python
    import pandas  # type: ignore[import-untyped]  # noqa: F401


def _seed() -> None:
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def main() -> None:
    """Fork workers until Spark closes the standard input."""
    os.register_at_fork(after_in_child=_seed)
    gc.collect()
    gc.freeze()  # a collection in a worker would otherwise write to each page, and so copy it
    daemon.manager()


if __name__ == "__main__":
    main()
