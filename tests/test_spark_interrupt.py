"""Ctrl-C belongs to the program: pyspark's own handler, which cancels every job, does not replace it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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


GRAPH = """
import cues
graph = cues.Graph("g", [cues.Source("in")], durability="process")
"""
JAVA = """#!/bin/sh
case "$*" in *-version*) echo 'openjdk version "17.0.2"' >&2; exit 0;; esac
echo java >&2
exec cat  # it never answers, and ends with the driver
"""


@pytest.mark.fast
def test_ctrl_c_during_the_start_is_answered_at_once_and_the_second_ends_it(tmp_path: Path) -> None:
    """Java here starts for ever. Nothing was made."""
    (tmp_path / "graph.py").write_text(GRAPH)
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(JAVA)
    java.chmod(0o755)
    words = [sys.executable, "-m", "cues", "run", "graph.py", "--engine", "spark", "--queues", "queues"]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        env={**os.environ, "JAVA_HOME": str(tmp_path / "java")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stderr is not None and "g: started" in started.stderr.readline()
        assert started.stderr.readline() == "java\n"
        started.send_signal(signal.SIGINT)
        assert started.stderr.readline() == (
            "The run ends when Spark has started. Ctrl-C again ends at once, which loses nothing.\n"
        )
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 130
    assert not (tmp_path / "queues").exists()
