"""Kinds of graphs × modes of running: each leaves what the embedded engine leaves, or is refused by name.

    KINDS    the graphs of spark_graphs.py; a new one there is in the matrix
    MODES    ways to run a graph; a new one is an entry here

The slow set has a third of the cells (``Mode.third``), and the long set has all of them. This command writes the
table of docs/spark-reference.md, ``python tests/test_spark_matrix.py``: it says what the tests hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("grpc", reason="Spark Connect is not installed (pip install 'cues-streams[test]')")

import pyspark
import seeds
import test_spark_engine as stores
import test_spark_queues as directories
from children import Child
from directory_steps import messages_of
from spark_cluster import Cluster, command_of, connect_server, until
from test_spark_three_graphs import above, killed_one

import cues
from cues.errors import CuesError
from cues.queues.base import views_of
from cues.spark import java
from cues.spark.cluster import inspection
from cues.spark.cluster.directory import QueueDirectory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KINDS = stores.IN_STORE
LINE = "READY"
Request = pytest.FixtureRequest


# --- how a graph is run -------------------------------------------------------------------------


def run(kind: str, place: Path, **how: Any) -> None:
    """Run a graph to its end, with its store in ``place``, and with its queues where ``queues`` says."""
    if "queues" in how:
        running = KINDS[kind]().start(store=place / "store", **how)
        directories.to_the_end(running)
    else:
        stores.run(KINDS[kind](), place / "store", **how)


def with_workers(request: Request, kind: str, place: Path) -> None:
    """Worker processes import the graph from a file."""
    file = place / "graph.py"
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    file.write_text(f"{path}\nimport test_spark_matrix\ngraph = test_spark_matrix.KINDS[{kind!r}]()\n")
    run(kind, place, workers=2, target=f"{file}:graph")


def in_this_process(request: Request, kind: str, place: Path, **how: Any) -> None:
    run(kind, place, engine="spark", spark=request.getfixturevalue("spark"), **how)


def with_queues(request: Request, kind: str, place: Path) -> None:
    in_this_process(request, kind, place, queues=place / "queues")


def in_an_object_store(request: Request, kind: str, place: Path) -> None:
    url = request.getfixturevalue("object_store")
    (place / "queues.url").write_text(url)
    files = directories.open_files(url)
    for identity in place.glob("queues/*/_cues/queue.json"):
        files.write(str(identity.relative_to(place / "queues")), identity.read_bytes())
    in_this_process(request, kind, place, queues=url)


def in_two_sessions(request: Request, kind: str, place: Path) -> None:
    """Each in a session of its own, at the same time, with stores of their own."""
    spark: SparkSession = request.getfixturevalue("spark")
    both(kind, place, spark, spark.newSession())


def in_two_threads(request: Request, kind: str, place: Path) -> None:
    """Started by two threads, in one session."""
    spark: SparkSession = request.getfixturevalue("spark")
    both(kind, place, spark, spark)


def both(kind: str, place: Path, *sessions: SparkSession) -> None:
    other = place / "other"
    shutil.copytree(place / "store", other / "store", ignore=stores.IGNORED)
    failed: list[BaseException] = []

    def one(where: Path, spark: SparkSession) -> None:
        try:
            run(kind, where, engine="spark", spark=spark)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=pair) for pair in zip((place, other), sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    assert compared(kind, stores.left(other / "store")) == compared(kind, stores.left(place / "store"))


DRIVER = f"""
import json, sys
from pathlib import Path
import cues.spark, test_spark_matrix
from cues.errors import CuesError

with cues.spark.session(sys.argv[1] or None) as spark:
    print("{LINE}", flush=True)
    for line in sys.stdin:
        kind, place, queues = json.loads(line)
        how = {{"queues": queues}} if queues else {{}}
        try:
            test_spark_matrix.run(kind, Path(place), engine="spark", spark=spark, **how)
            print(flush=True)
        except CuesError as error:
            print(f"{{type(error).__name__}}: {{error}}".replace(chr(10), " "), flush=True)
"""
"""A driver of its own. It runs each graph that it is told, and says how that ended."""


class Driver:
    """A driver that runs until the end of the module: its session starts once."""

    def __init__(self, child: Child) -> None:
        self.child = child
        while child.line() != LINE:
            pass

    def begin(self, kind: str, place: Path, queues: bool = False) -> None:
        self.child.say(json.dumps([kind, str(place), str(place / "queues") if queues else ""]))

    def run(self, kind: str, place: Path, queues: bool = False) -> None:
        self.begin(kind, place, queues)
        self.end()

    def ended(self) -> bool:
        """True if it has said how the graph ended."""
        return self.child.speaks()

    def end(self) -> None:
        ended = self.child.line()
        if ended:
            raise CuesError(ended)


@pytest.fixture(scope="module")
def standalone() -> Iterator[Driver]:
    with Cluster() as cluster, Child(DRIVER, cluster.master, **cluster.environment) as child:
        yield Driver(child)


@pytest.fixture(scope="module")
def local_cluster() -> Iterator[Driver]:
    home = str(Path(pyspark.__file__).parent)
    with Child(DRIVER, "local-cluster[2,1,600]", SPARK_HOME=home, SPARK_EXECUTOR_MEMORY="512m") as child:
        yield Driver(child)


SUBMITTED = """
import sys
from pathlib import Path
import test_spark_matrix

test_spark_matrix.run(sys.argv[1], Path(sys.argv[2]), engine="spark")
"""


def by_spark_submit(request: Request, kind: str, place: Path) -> None:
    """Run a graph by a Java of its own, whose driver has no input."""
    script = place / "driver.py"
    script.write_text(SUBMITTED)
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    variables = {"PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(java.find().home)}
    command = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    done = subprocess.run(
        [command, "--master", "local[2]", script, kind, place],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def connected() -> Iterator[Driver]:
    with connect_server() as url, Child(DRIVER, url) as child:
        yield Driver(child)


def by(fixture: str, queues: bool = False) -> Callable[[Request, str, Path], None]:
    """Run a graph by a driver of its own."""
    return lambda request, kind, place: request.getfixturevalue(fixture).run(kind, place, queues)


ATTACHED = """
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

gateway = launch_gateway()
java = gateway.jvm.JavaSparkContext.fromSparkContext(gateway.jvm.org.apache.spark.SparkContext.getOrCreate())
SparkSession(SparkContext(gateway=gateway, jsc=java, conf=SparkConf(_jconf=java.getConf())))
"""
"""Uses the Java process of another driver, as the Python of a notebook does."""


def descendants(pid: int, command: str) -> list[int]:
    """The processes below this one whose command line has ``command``."""
    found = [int(place.name) for place in Path("/proc").glob("[0-9]*")]
    return [each for each in found if command in command_of(each) and pid in above(each)]


def killed_later(chance: random.Random, whole: int, place: Path, queues: bool) -> None:
    """Wait until a run has written some of its messages."""
    goal = chance.randrange(1, whole // 2)  # the later messages are written in few steps
    until(lambda: written(place, queues) >= goal, timeout_s=240)
    time.sleep(chance.uniform(0, 0.2))


@contextlib.contextmanager
def halfway(child: Child, chance: random.Random, whole: int, place: Path) -> Iterator[None]:
    """Stop a driver at a random moment after it has written some of its messages; at the end it continues.

    It is stopped for each look too, so that it cannot write all others between the look and the next line of a test.
    """
    goal = chance.randrange(1, whole // 3)  # "broadcast" writes the other two thirds in one step

    def reached() -> bool:
        child.signal(signal.SIGCONT)
        time.sleep(chance.uniform(0, 0.1))
        child.signal(signal.SIGSTOP)
        return written(place, queues=True) >= goal

    try:
        until(reached, timeout_s=240)
        yield
    finally:
        child.signal(signal.SIGCONT)


def executor_killed(request: Request, kind: str, place: Path) -> None:
    """``kill -9`` of one of two executors at a random moment, before all messages are written. Its driver finishes."""
    driver, chance = request.getfixturevalue("local_cluster"), random.Random(seeds.new())
    if kind in REFUSED_WITH_QUEUES:
        return driver.run(kind, place, queues=True)
    whole = written(request.getfixturevalue("expected")(kind) / "embedded", queues=False)

    def executors() -> list[int]:
        return descendants(driver.child.pid, "CoarseGrainedExecutorBackend")

    until(lambda: len(executors()) == 2)  # also after the kill of the cell before
    driver.begin(kind, place, queues=True)
    try:
        with halfway(driver.child, chance, whole, place):
            killed = chance.choice(executors())
            os.kill(killed, signal.SIGKILL)
            until(lambda: killed not in executors())
            at, ended = written(place, queues=True), driver.ended()
    finally:
        driver.end()
    print(f"killed: an executor, at {at} of {whole} messages")
    assert not ended, "the executor was killed after the run"
    assert at < whole or kind == "all filtered out"  # which writes nothing but the messages of its source


def killed(queues: bool = False, java_too: bool = False) -> Callable[[Request, str, Path], None]:
    """``kill -9`` of a driver at a random moment, in one of two cells of its workers too; a second driver finishes.

    Both use the Java process of this session, because the start of another one is most of the time of a cell. So what
    the first driver has begun in Java continues while the second one runs. ``java_too``: the first driver has a Java
    process of its own, which dies with it.
    """

    def run_twice(request: Request, kind: str, place: Path) -> None:
        spark, chance = request.getfixturevalue("spark"), random.Random(seeds.new())
        how = {"queues": place / "queues"} if queues else {}
        if queues and kind in REFUSED_WITH_QUEUES:
            return in_this_process(request, kind, place, **how)
        whole = written(request.getfixturevalue("expected")(kind) / "embedded", queues=False)
        parameters = spark.sparkContext._gateway.gateway_parameters
        gateway = {"PYSPARK_GATEWAY_PORT": str(parameters.port), "PYSPARK_GATEWAY_SECRET": parameters.auth_token}
        own: tuple[str, str, dict[str, str]] = (DRIVER, "local[2]", {})
        code, master, variables = own if java_too else (ATTACHED + DRIVER, "", gateway)
        with Child(code, master, **variables) as child:
            Driver(child).begin(kind, place, queues)
            killed_later(chance, whole, place, queues)
            javas = descendants(child.pid, "SparkSubmit")
            assert len(javas) == java_too
            if chance.random() < 0.5:
                daemons = [pid for java in javas for pid in descendants(java, ".daemon pyspark.worker")]
                killed_one(chance, daemons or directories.python_workers(spark))
            for java in javas:
                os.kill(java, signal.SIGKILL)
            child.kill()
        print(f"killed: at {written(place, queues)} of {whole} messages")
        return in_this_process(request, kind, place, **how)

    return run_twice


def written(place: Path, queues: bool) -> int:
    """The number of messages that a run has written until now."""
    if queues:
        at = place / "queues"
        return sum(log.next - 1 for queue in inspection.queues_of(at) for log in inspection.logs_of(at, queue))
    with cues.open(place / "store", readonly=True) as store:
        return sum(len(view) for queue in store.queues() for view in views_of(store.queue(queue)))


# --- the matrix ---------------------------------------------------------------------------------


class Mode(NamedTuple):
    run: Callable[[Request, str, Path], None]
    queues: bool = False
    """True if the queues are in a directory."""
    refusal: str = ""
    """A part of the error, if this mode refuses every graph."""
    killed: bool = False
    """True if a driver or an executor dies in it."""
    third: int | None = 0
    """The first kind of the slow set, which has every third one from there; None: no kind, as a cell takes 15 s of CPU.

    The numbers differ from mode to mode, so that each kind is in several modes.
    """


MODES = {
    "embedded, 2 workers": Mode(with_workers, third=0),
    "a store": Mode(in_this_process, third=2),
    "--queues": Mode(with_queues, queues=True, third=1),
    "object store": Mode(in_an_object_store, queues=True, third=0),
    "two sessions": Mode(in_two_sessions, third=1),
    "two threads": Mode(in_two_threads, third=2),
    "local-cluster": Mode(by("local_cluster", queues=True), queues=True, third=0),
    "spark-submit": Mode(by_spark_submit, third=None),
    "standalone": Mode(by("standalone"), third=1),
    "standalone, --queues": Mode(by("standalone", queues=True), queues=True, third=2),
    "Connect": Mode(by("connected"), refusal="Spark Connect", third=0),
    "a store, driver killed": Mode(killed(), killed=True, third=1),
    "--queues, driver killed": Mode(killed(queues=True), queues=True, killed=True, third=2),
    "a store, Java killed": Mode(killed(java_too=True), killed=True, third=None),
    "--queues, Java killed": Mode(killed(queues=True, java_too=True), queues=True, killed=True, third=None),
    "local-cluster, executor killed": Mode(executor_killed, queues=True, killed=True, third=None),
}
REFUSED_WITH_QUEUES = {
    "rate": "rate=",
    "imperative": "tailers=",
    "committed messages only": "isolation=",
    "pause": "on_error=",
    "pause of a batch": "on_error=",
    "pause at the first message": "on_error=",
    "pause after some errors": "max_errors=",
    "pause after the errors of a batch": "max_errors=",
    "errors below the limit": "max_errors=",
}
"""By kind: the option that the error names. No other kind is refused."""
KEYED = {"partitions": ("in", "out", "counts"), "keyed state": ("out",), "tables in a fork": ("odd",)}
"""By kind: queues whose messages are in order only by the key n."""

LOST = {"at most once": "out"}
"""By kind: the queue that lacks messages after the death of a driver: those of the step in which it died."""


def refusal(kind: str, mode: str) -> str:
    """The part of the error by which a cell is refused; empty if it runs."""
    return MODES[mode].refusal or (REFUSED_WITH_QUEUES.get(kind, "") if MODES[mode].queues else "")


def cells() -> list[Any]:
    """Every cell, mode by mode."""
    found, kinds = [], list(KINDS)
    for mode, how in MODES.items():
        slow = () if how.third is None else kinds[how.third :: 3]
        for kind in kinds:
            marks = () if kind in slow else pytest.mark.long
            found.append(pytest.param(kind, mode, marks=marks, id=f"{kind}, {mode}"))
    return found


def compared(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """What a store holds, without what is free: times, and the sizes of some steps."""
    queues, hashes = found["queues"], found["hashes"]
    if kind == "alts":  # which input is served first
        queues["tagged"].sort(key=lambda m: (m["from"], m["n"]))
        del hashes["tagged"]
        for message in queues["tagged"]:
            message.pop("hash", None)
    if kind == "batch function":  # a step takes what is there when it begins
        queues["out"] = sum(m["count"] for m in queues["out"])
        del hashes["out"]
    if kind == "batch function that fails":
        failed = [m for error in queues["errors"] for m in error.pop("err.proc/messages")["in"]]
        queues["errors"] = [failed, {repr(stores.without_times(error)) for error in queues["errors"]}]
        del hashes["errors"]
    found["queues"] = stores.without_times(queues)
    return {name: found[name] for name in ("queues", "hashes", "state", "positions", "sources")}


def without_lost(kind: str, mode: str, expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The expected messages; in a mode that may lose a step with its driver, without those of one step."""
    if MODES[mode].killed and (queue := LOST.get(kind, "")):
        messages, hashes = expected["queues"][queue], expected["hashes"][queue]
        lost = [message for message in messages if message not in found["queues"][queue]]
        low = messages.index(lost[0]) if lost else 0
        assert messages[low : low + len(lost)] == lost
        del messages[low : low + len(lost)], hashes[len(messages) :]
    return expected


def compared_queues(kind: str, queues: dict[str, Any]) -> dict[str, Any]:
    """The messages of queues; those of different keys are in no order."""
    for queue in KEYED.get(kind, ()):
        queues[queue].sort(key=lambda m: m["n"])
    return compared(
        kind, {"queues": queues, "hashes": {queue: [] for queue in queues}, "state": 0, "positions": 0, "sources": 0}
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By kind: a folder with an empty store, and one with what the embedded engine leaves."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("expected")
            stores.template(made[kind] / "empty", KINDS[kind]())
            shutil.copytree(made[kind] / "empty", made[kind] / "embedded/store", ignore=stores.IGNORED)
            run(kind, made[kind] / "embedded")
        return made[kind]

    return of


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "mode"), cells())
def test_a_mode_leaves_what_the_embedded_engine_leaves(
    kind: str, mode: str, expected: Callable[[str], Path], request: Request, tmp_path: Path
) -> None:
    """Messages, order, hashes, state and positions; or the cell is refused by name before anything is written."""
    how, kept = MODES[mode], expected(kind)
    if how.queues and not refusal(kind, mode):
        directories.copy_of(kept / "empty", tmp_path)
    else:
        shutil.copytree(kept / "empty", tmp_path / "store", ignore=stores.IGNORED)
    if text := refusal(kind, mode):
        before = stores.left(tmp_path / "store")
        with pytest.raises(CuesError, match=text):
            how.run(request, kind, tmp_path)
        assert stores.left(tmp_path / "store") == before and not (tmp_path / "queues").exists()
        return
    how.run(request, kind, tmp_path)
    if how.queues:
        made = KINDS[kind]()
        by_embedded = directories.left_embedded(kept / "embedded/store", made)
        found, wanted = compared_queues(kind, queues_of(tmp_path, made)), compared_queues(kind, by_embedded)
    else:
        found = compared(kind, stores.left(tmp_path / "store"))
        wanted = compared(kind, stores.left(kept / "embedded/store"))
    assert found == without_lost(kind, mode, wanted, found)


def queues_of(place: Path, made: Any) -> dict[str, Any]:
    """The messages by queue, partition by partition."""
    files = directories.open_files(directories.queues_at(place))
    found = {queue: messages_of(QueueDirectory(files, queue, cues.QueueOptions())) for queue in made.plan().queues}
    for messages in found.values():
        for message in messages:
            for cause in message.get("err/cause", ()):
                cause["trace"] = cause["trace"].splitlines()[-1]
    return found


PAGE = Path(__file__).parents[1] / "docs" / "spark-reference.md"


def with_table(page: str) -> str:
    """The page with the table of kinds × modes. Kinds with the same results share a row."""

    def told(kind: str, mode: str) -> str:
        if text := refusal(kind, mode):
            return f"refused: {f'`{text}`' if text.endswith('=') else text}"
        return "equal, without one step" if MODES[mode].killed and kind in LOST else "equal"

    rows: dict[tuple[str, ...], list[str]] = {}
    for kind in KINDS:
        rows.setdefault(tuple(told(kind, mode) for mode in MODES), []).append(kind)
    lines = [f"| graphs | {' | '.join(MODES)} |", f"|---|{'---|' * len(MODES)}"]
    lines += [f"| {', '.join(kinds)} | {' | '.join(cells)} |" for cells, kinds in rows.items()]
    table = "".join(f"{line}\n" for line in lines)
    replaced, count = re.subn(r"^\| graphs \|.*\n(?:\|.*\n)+", lambda _: table, page, flags=re.M)
    assert count == 1
    return replaced


@pytest.mark.fast
def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python tests/test_spark_matrix.py"
    cells = len(KINDS) * len(MODES)
    assert f"{len(KINDS)} kinds of graphs and {len(MODES)} modes are {cells} cells" in page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
