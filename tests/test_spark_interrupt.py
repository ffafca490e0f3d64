"""Ctrl-C belongs to the program: pyspark's own handler, which cancels every job, does not replace it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

PROGRAM = """
import signal
import cues.spark
told = []
signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
with cues.spark.session("local[1]") as spark:
    signal.raise_signal(signal.SIGINT)
    print(told, spark.range(3).count())
"""


@pytest.mark.timeout(300)
def test_a_handler_of_ctrl_c_stays_when_a_session_is_made() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280)
    assert done.stdout.strip() == "[2] 3", done.stderr
