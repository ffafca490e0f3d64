"""The process that Spark forks workers from has imported what they need, and nothing that harms a fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

FORKS = """
import json, os
from pathlib import Path
from cues.spark import daemon
import numpy.random

def forks():
    print(json.dumps([(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]), flush=True)
    for _ in range(2):
        if not os.fork():
            print(numpy.random.random(), flush=True)
            os._exit(0)
        os.wait()

daemon.daemon.manager = forks
daemon.main()
"""


@pytest.mark.slow
def test_before_a_fork_no_thread_runs_but_the_allocators_and_forks_have_their_own_random_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as Spark sets it for its workers
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    threads, *numbers = done.stdout.splitlines()
    assert set(json.loads(threads)) <= {"python", "python3", "jemalloc_bg_thd"} and len(json.loads(threads)) <= 2
    assert len(set(numbers)) == 2


@pytest.mark.slow
def test_workers_of_a_local_master_are_forks_of_it(spark: SparkSession) -> None:
    def parent(_: int) -> str:
        import os
        from pathlib import Path

        return Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\0", " ")

    assert "-m cues.spark.daemon pyspark.worker" in spark.sparkContext.parallelize([0], 1).map(parent).first()
