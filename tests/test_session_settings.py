"""Settings of Spark: those refused before it starts, those that a running session changes, those that a state keeps."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from ports import free_port
from terminal import cues as command

import cues
from cues import Graph
from cues.cli.purge import purge
from cues.errors import CuesError, InvalidArgument, MessagesPurged, TopologyChanged, Unsupported
from cues.spark import conf
from cues.spark.cluster.files import require_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

session = importlib.import_module("cues.spark.session")  # cues.spark.session is the function
GRAPH = """
import cues
graph = cues.Graph("g", durability="process")

@graph.source("numbers", resume="skip")
def numbers():
    yield {"n": 1}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.py").write_text(GRAPH)
    return tmp_path / "graph.py"


@pytest.mark.parametrize("name", conf.MINE)
def test_a_setting_that_cues_must_set_is_refused_by_name_with_the_reason(name: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        Graph("g", [cues.Source("in")]).start(engine="spark", conf={name: "x"})
    assert raised.value.message.startswith(f"{name} is not a setting that can be given here: ")
    assert raised.value.hint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("2g", "conf= is str"),
        ({"executor.memory": "2g"}, "begin with 'spark.'"),
        ({"spark.executor.memory": None}, "spark.executor.memory is NoneType"),
        ({"spark.cues.mergeFiles": "many"}, "a number of files is expected"),
        ({"spark.cues.mergefiles": "3"}, "use spark.cues.mergeFiles"),
        ({7: "3"}, "7 is not a name"),
    ],
)
def test_what_cannot_be_a_setting_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        conf.checked(given)
    assert said in str(raised.value)


def test_values_of_python_become_text_and_secrets_are_not_shown() -> None:
    given = conf.checked({"spark.a": True, "spark.b": 3, "spark.hadoop.fs.s3a.secret.key": "s3cr3t"})
    assert given == {"spark.a": "true", "spark.b": "3", "spark.hadoop.fs.s3a.secret.key": "s3cr3t"}
    assert conf.shown(given)["spark.hadoop.fs.s3a.secret.key"] == "***"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--conf", "spark.a=1"], "--conf spark.a is an option of Spark.\nTry: add --engine spark."),  # a secret?
        (["--workers", "2", "--conf", "spark.a=1"], "--conf spark.a is an option of Spark."),
        (["--engine", "spark", "--conf", "spark.a"], "--conf spark.a is not a setting of Spark."),
        (["--engine", "spark", "--conf", "spark.a=1", "--conf", "spark.a=2"], "values: 1 and 2."),
        (["--engine", "spark", "--conf", "spark.master=local"], "spark.master is not a setting that can be given here"),
        (["--engine", "spark", "--conf", "a=1"], "'a' is not a name of a setting of Spark"),
        (["--engine", "spark", "--master", "local[x]"], "'local[x]' is not a master of Spark.\nTry: give local[*]"),
        (["--engine", "spark", "--master", "sparc://host:7077", "--dry-run"], "is not a master of Spark."),
    ],
)
def test_a_command_with_a_wrong_setting_ends_before_anything_is_made(
    arguments: list[str], said: str, file: Path
) -> None:
    done = command("run", file, *arguments)
    assert done.code == 2, done
    assert said in done.err
    assert "Try: " in done.err
    assert not (file.parent / "data").exists()


MASTERS = ("local", "local[*]", "local[2]", "local[2, 3]", "local-cluster[2,1,1024]", "yarn", "k8s://https://host:443")


@pytest.mark.parametrize("master", [*MASTERS, "spark://host:7077", "spark://a:7077,b:7077", "spark://[::1]:7077"])
def test_the_masters_of_spark_are_accepted(master: str) -> None:
    conf.require_master(master)


@pytest.mark.parametrize("master", ["", "local[0]", "local[]", "spark://host", "host:7077", "mesos://host:5050", "k8s"])
def test_another_master_is_refused_before_java_starts(master: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"is not a master of Spark\.\n?.*give local\[\*\]"):
        session.start(master)


def test_a_master_that_does_not_answer_is_named_before_java_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_S", 0.1)
    monkeypatch.setenv("SPARK_HOME", "/nowhere")  # Spark could not be started at all
    address = f"spark://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(Unsupported, match=rf"No master of Spark answers at {address} \(.*refused.*mostly 7077"):
        session.start(address)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "the name is empty"),
        ("dbfs:/flights", "dbfs:/ is not supported"),
        ("s3:/bucket/flights", "s3:/ is not supported"),
        ("graph.py", "graph.py is not a directory"),
        ("graph.py/queues", "graph.py is not a directory"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_place_that_cannot_hold_queues_is_refused_before_spark_starts(
    place: str, said: str, more: list[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", "/nowhere")
    done = command("run", file, "--engine", "spark", "--queues", place, *more)
    assert done.code == 1 and said in done.err and "Try: " in done.err, done
    assert {each.name for each in file.parent.iterdir()} <= {"graph.py", "__pycache__"}, "nothing was made"


def test_a_directory_that_does_not_exist_yet_is_not_made_by_a_check(tmp_path: Path) -> None:
    for place in (str(tmp_path / "a" / "b"), f"file:{tmp_path}/a", f"file://{tmp_path}/a"):
        require_place(place)
    assert not (tmp_path / "a").exists()


def test_the_embedded_engine_refuses_options_of_spark_in_python() -> None:
    given: Any
    for given in ({"conf": {"spark.a": "1"}}, {"conf": {"spark.a": "1"}, "workers": 2}, {"master": "local"}):
        with pytest.raises(InvalidArgument, match=r"is an option of Spark.*\n?.*add engine='spark'") as raised:
            Graph("g", [cues.Source("in")]).start(**given)
        assert next(iter(given)) + "= is" in raised.value.message


def test_a_dry_run_shows_the_settings_without_secrets(file: Path) -> None:
    given = ["--conf", "spark.executor.memory=2g", "--conf", "spark.hadoop.fs.s3a.secret.key=s3cr3t=="]
    text = command("run", file, "--engine", "spark", "--dry-run", *given).out
    assert "Settings of Spark:\n  spark.executor.memory = 2g\n  spark.hadoop.fs.s3a.secret.key = ***\n" in text
    shown = command("run", file, "--engine", "spark", "--dry-run", "--json", *given).out
    (row,) = map(json.loads, shown.splitlines())
    assert row["conf"] == {"spark.executor.memory": "2g", "spark.hadoop.fs.s3a.secret.key": "***"}


def test_settings_of_a_file_are_a_list(file: Path) -> None:
    (file.parent / "cues.toml").write_text('[run]\nengine = "spark"\nconf = ["spark.cores.max=3", "spark.b=1=2"]\n')
    text = command("run", file, "--dry-run").out
    assert "  spark.cores.max = 3\n  spark.b = 1=2\n" in text


def test_a_start_that_fails_names_the_settings_that_spark_or_java_did_not_take() -> None:
    said = {
        "The value 'abc' in the config \"spark.sql.shuffle.partitions\" is invalid": "check the setting spark.sql.shuf",
        "[JAVA_GATEWAY_EXITED] Java gateway process exited": "check the setting spark.driver.memory.",
    }
    given = {"spark.sql.shuffle.partitions": "abc", "spark.driver.memory": "lots", "spark.cores.max": "2"}
    for text, hint in said.items():
        assert session.not_started(RuntimeError(text), "local[2]", given).hint.startswith(hint)
    assert "java -version" in session.not_started(RuntimeError("[JAVA_GATEWAY_EXITED] x"), None, {}).hint


# --- with Spark ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_value_that_spark_does_not_understand_ends_the_start_with_the_name(file: Path) -> None:
    """Spark looks at this one when the session is first used."""
    words = ["run", str(file), "--engine", "spark", "--conf", "spark.sql.shuffle.partitions=abc"]
    done = subprocess.run([sys.executable, "-m", "cues", *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "check the setting spark.sql.shuffle.partitions." in done.stderr, done
    assert "Traceback" not in done.stderr and "\tat " not in done.stderr, done


def test_a_session_that_runs_changes_only_what_it_can(spark: SparkSession) -> None:
    import cues.spark

    before = dict(spark.conf.getAll)
    with cues.spark.session(spark=spark, conf={"spark.sql.shuffle.partitions": 7, "spark.cues.mergeFiles": "9"}) as own:
        assert (own.conf.get("spark.sql.shuffle.partitions"), own.conf.get("spark.cues.mergeFiles")) == ("7", "9")
        assert own.sparkContext is spark.sparkContext
        assert dict(spark.conf.getAll) == before  # the session of the user keeps its own
    assert spark.range(3).count() == 3
    with cues.spark.session(spark=spark, conf={"spark.driver.memory": "1g"}):
        pass  # it has this value already
    for name in ("spark.executor.memory", "spark.sql.warehouse.dir", "spark.hadoop.fs.s3a.endpoint"):
        with (
            pytest.raises(Unsupported, match=f"{name}=x cannot be set: Spark reads it only when a session starts"),
            cues.spark.session(spark=spark, conf={name: "x"}),
        ):
            raise AssertionError
    for value in ("abc", "-3"):
        with (
            pytest.raises(InvalidArgument, match=f"Spark refuses spark.sql.shuffle.partitions={value}: "),
            cues.spark.session(spark=spark, conf={"spark.sql.shuffle.partitions": value}),
        ):
            raise AssertionError


def partitions(place: Path) -> str:
    """The number of partitions in the newest checkpoint."""
    folder = place / "queues" / "_cues" / "checkpoints" / "g.windows"
    (epoch,) = folder.iterdir()
    newest = max((epoch / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    return str(json.loads(newest.read_text().splitlines()[1])["conf"]["spark.sql.shuffle.partitions"])


@pytest.mark.timeout(900)
def test_the_partitions_of_a_state_fit_the_cores_and_may_change_later(spark: SparkSession, tmp_path: Path) -> None:
    """Two for each core, unless somebody said otherwise. A later start with another number makes the state again."""
    from test_spark_frames import expect_windows, graph, play

    expect_windows(play(spark, tmp_path, graph(), range(250)), 250)
    assert partitions(tmp_path) == "4"
    other = {"spark.sql.shuffle.partitions": "3"}
    expect_windows(play(spark, tmp_path, graph(), range(250, 400), conf=other), 400)
    assert partitions(tmp_path) == "3"
    expect_windows(play(spark, tmp_path, graph(), range(400, 500)), 500)
    assert partitions(tmp_path) == "3"  # it stays
    with pytest.raises(TopologyChanged, match=r"has begun with spark.sql.session.timeZone=UTC"):
        play(spark, tmp_path, graph(), conf={"spark.sql.session.timeZone": "Europe/Berlin"})
    with pytest.raises(CuesError, match=r"Spark refuses spark.sql.shuffle.partitions=none"):
        play(spark, tmp_path, graph(), conf={"spark.sql.shuffle.partitions": "none"})
    expect_windows(play(spark, tmp_path, graph(), range(500, 550)), 550)


@pytest.mark.timeout(900)
def test_a_state_that_cannot_be_made_again_keeps_its_partitions(spark: SparkSession, tmp_path: Path) -> None:
    from test_spark_frames import expect_windows, graph, play

    expect_windows(play(spark, tmp_path, graph(), range(250)), 250)
    done = CliRunner().invoke(purge, [f"{tmp_path / 'queues'}#in", "--before", "100", "--yes"])
    assert done.exit_code == 0, done.output
    with pytest.raises(MessagesPurged, match=r"has another value of spark.sql.shuffle.partitions") as raised:
        play(spark, tmp_path, graph(), conf={"spark.sql.shuffle.partitions": "8"})
    assert "leave spark.sql.shuffle.partitions out" in str(raised.value)
    expect_windows(play(spark, tmp_path, graph(), range(250, 400)), 400)
