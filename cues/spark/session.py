"""Spark sessions: the user's own if there is one, else a quiet one that Cues makes.

    with session(master="local[*]") as spark: ...      stopped at the end, if it was made here
    with session(spark=mine) as spark: ...             the user's, never stopped

Quiet means: no progress bars and no warnings of Spark's start. Errors are shown. Local sessions use
only the loopback interface, show Spark's web page there on a free port, and run Python workers with
this interpreter, not with the ``python3`` of the PATH. On a cluster Spark chooses web pages and ports. If the
master is on the loopback interface, so is the driver.

Not guaranteed: silence. Java itself prints a line about incubator modules before Spark starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from cues.base.logs import logger
from cues.errors import CuesError, NotInstalled, Unsupported
from cues.spark import conf as settings_of
from cues.spark import java
from cues.spark.failures import in_short
from cues.spark.installed import DAEMON, require_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECT: Final = settings_of.CONNECT
EXECUTORS_LATE_S: Final = 20.0
"""Time without executors after which a warning says so. Spark itself waits without end, and logs it in a log that few
people read."""
_CONNECT_PORT: Final = 15002
_STANDALONE: Final = "spark://"
ANSWER_S: Final = 5.0
"""Time for which a server or a master is asked again until it answers. Spark itself tries for minutes."""
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_DAEMON_SETTING: Final = "spark.python.daemon.module"
_LOG_SETTINGS: Final = """\
# Made by Cues: errors only, on the standard error.
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
# The same level as the root's, or Spark announces that it sets another.
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
# An error of the start, and of a task, is in the exception that the driver raises, or the task was repeated.
logger.context.name = org.apache.spark.SparkContext
logger.context.level = off
logger.task.name = org.apache.spark.executor.Executor
logger.task.level = off
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = off
logger.python.name = org.apache.spark.api.python.PythonRunner
logger.python.level = off
logger.aborted.name = org.apache.spark.util.Utils
logger.aborted.level = off
logger.files.name = org.apache.spark.sql.execution.datasources.FileFormatWriter
logger.files.level = off
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""
_opening: Final = threading.Lock()
"""Held while a session is found or made. Two threads that start a graph use one session."""
_asked: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""The contexts, and the sessions of Spark Connect, whose workers have the right Python."""


@contextlib.contextmanager
def session(
    master: str | None = None,
    name: str = "cues",
    *,
    spark: SparkSession | None = None,
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """A session as a context manager, with the format ``cues`` registered.

    ``spark`` is used if it is given, else the process's active session. Else a session is made, for ``master``
    (default: that of ``spark-submit``, else ``local[*]``), and stopped at the end. ``conf`` has settings of Spark by
    name. With them, a session that runs already is copied: the copy has the settings, and the session keeps its own.
    Before Spark is used, raises :class:`NotInstalled` if pyspark, and :class:`JavaNotFound` if Java is missing or too
    old, and :class:`InvalidArgument` for a setting that Cues must set itself, or a value that Spark refuses. Raises
    :class:`Unsupported` if the workers of the session have another Python or no Cues, and for a setting that a session
    that runs cannot change.
    """
    with opened_session(master, name, spark, conf) as used:
        require_workers(used)
        yield used


@contextlib.contextmanager
def opened_session(
    master: str | None, name: str, spark: SparkSession | None = None, conf: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """The session of :func:`session`, before its workers are looked at."""
    mine = None
    given = settings_of.checked(conf)
    with _opening:
        used = spark or active()
        if used is None:
            used = mine = start(master, name, given)
        elif given:
            used = settings_of.copy_with(used, given)
    try:
        if mine is not None:
            try:
                settings_of.set_in(mine, given)
            except CuesError:
                raise
            except Exception as error:  # Spark looks at some values at the first use of the session
                raise not_started(error, master, given) from None
        from cues.spark.datasource import source_for

        used.dataSource.register(source_for(used))
        yield used
    finally:
        if mine is not None:
            mine.stop()


def require_workers(spark: SparkSession, say: Callable[[str], None] | None = None) -> None:
    """Raise :class:`Unsupported` if the workers of a session have another Python or no Cues. They are asked once.

    ``say`` gets a warning if the session has no executors yet; without it the warning is logged.
    """
    context = getattr(spark, "sparkContext", None)
    if (context or spark) in _asked:
        return
    master = getattr(context, "master", None) or "Spark Connect"
    try:
        with _late(master, say or logger("cues.spark").warning):
            if context is not None:
                found = context.parallelize([0], 1).map(_looking()).first()
            else:
                (row,) = spark.range(1).mapInArrow(_looking_in_arrow(), "found string").collect()
                found = row.found
    except Exception as error:
        lacking = "ModuleNotFoundError" in (why := in_short(error))
        found = f"cannot {'import Cues' if lacking else 'run its tasks'}: {why}"
    if found:
        raise Unsupported(
            f"The Python of the workers of {master} {found}.",
            f"set PYSPARK_PYTHON={sys.executable} before the session is made; on another machine, install Python"
            f" {sys.version_info[0]}.{sys.version_info[1]} and cues-streams there, and name that Python.",
        )
    _asked.add(context or spark)


def _looking() -> Callable[[int], str]:
    """A task that says what its Python lacks. It is pickled by value, because a worker may have no Cues."""

    def look(_: int) -> str:
        import sys

        try:
            import cues.spark.datasource  # noqa: F401
        except ImportError as error:
            return f"({sys.executable}) cannot import Cues: {error}"
        return ""

    return look


def _looking_in_arrow() -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The same task for a session of Spark Connect, which has only DataFrames."""
    look = _looking()

    def look_in_arrow(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"found": [look(0)]})

    return look_in_arrow


@contextlib.contextmanager
def _late(master: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say so if a cluster does not give executors soon."""
    text = (
        f"{master} gives no executors yet: no free core (spark.cores.max), or no worker with"
        " enough memory (spark.executor.memory, SPARK_EXECUTOR_MEMORY)"
    )
    late = threading.Timer(EXECUTORS_LATE_S, say, [text])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def require() -> None:
    """Raise the error of :func:`session` if something is not installed. Nothing is started."""
    if active() is None and not _submitted():
        java.find()


def active() -> SparkSession | None:
    """The session that this process already has, if any. It may be of another thread."""
    require_pyspark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()  # of this thread, or of the thread that started it
    if session is None and SparkContext._active_spark_context is not None:
        session = SparkSession.builder.getOrCreate()
    return session


def start(master: str | None = None, name: str = "cues", conf: Mapping[str, str] | None = None) -> SparkSession:
    """Make a quiet session; the caller stops it. Raises the errors of :func:`session`."""
    require_pyspark()
    from pyspark.sql import SparkSession

    submitted = _submitted()
    settings_of.require_master(master)
    if submitted:
        settings_of.require_before_java(conf or {})
    if master is None and not submitted:
        master = "local[*]"
    if master is not None and master.startswith(CONNECT):
        return _connect(master, name)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    chosen = {**settings(master or ""), **(conf or {})}
    with contextlib.ExitStack() as during:
        if os.environ.setdefault("PYSPARK_PYTHON", sys.executable) == sys.executable and is_local(master or ""):
            chosen = {_DAEMON_SETTING: DAEMON, **chosen}
        if not submitted:
            during.enter_context(_environment("JAVA_HOME", str(java.find().home)))
            if master is not None and master.startswith(_STANDALONE):
                hosts = [place.rpartition(":") for place in master.removeprefix(_STANDALONE).split(",")]
                places = [(host.strip("[]"), int(port)) for host, _, port in hosts]
                _require_answer("master of Spark", master, places, "7077")
            if stays_here(master or ""):
                during.enter_context(_environment("SPARK_LOCAL_IP", os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")))
            options = during.enter_context(_log_settings())
            chosen[_JAVA_OPTIONS] = f"{options} {chosen.get(_JAVA_OPTIONS, '')}".strip()
        for key, value in chosen.items():
            builder = builder.config(key, value)
        # pyspark also logs each error that it raises, with a page of Java's stack.
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
        during.enter_context(_own_interrupt())
        try:
            return builder.getOrCreate()
        except Exception as error:
            raise not_started(error, master, conf or {}) from None


def not_started(error: Exception, master: str | None, conf: Mapping[str, str]) -> Unsupported:
    """The error for a session that Spark could not make; it names the settings of which Spark or Java speaks."""
    why = in_short(error)
    guilty = [name for name, value in conf.items() if name in why or value in why]
    hint = "use the address that the master's log and web page show, spark://host:7077."
    if "stopped SparkContext" in why:
        why = "no master answers there, or it refused"
    elif "JAVA_GATEWAY_EXITED" in why:
        why = "Java ended, and the lines before this one say why"
        guilty = guilty or [name for name in conf if settings_of.is_for_java(name)]
        hint = "do what these lines say; java -version shows whether Java runs at all."
    elif master is None or not master.startswith(_STANDALONE):
        hint = "check the master, and the variables SPARK_… of this process."
    if guilty:
        hint = f"check {'the setting' if len(guilty) == 1 else 'the settings'} {', '.join(guilty)}."
    return Unsupported(f"Spark did not start with the master {master or 'of spark-submit'}: {why}.", hint)


def _connect(url: str, name: str) -> SparkSession:
    """A session on a Spark Connect server. This machine needs no Java for it."""
    from pyspark.sql import SparkSession

    server = urlsplit(url)
    _require_answer("Spark Connect server", url, [(server.hostname or "", server.port or _CONNECT_PORT)], "15002")
    try:
        return SparkSession.builder.remote(url).appName(name).getOrCreate()
    except ImportError as error:
        raise NotInstalled(
            f"Spark Connect needs more packages ({in_short(error)}).", "run pip install 'pyspark[connect]'."
        ) from None


def _require_answer(what: str, url: str, places: Iterable[tuple[str, int]], port: str) -> None:
    """Raise :class:`Unsupported` if nothing listens at any of these places for :data:`ANSWER_S`."""
    until = time.monotonic() + ANSWER_S
    while True:
        for place in places:
            try:
                return socket.create_connection(place, ANSWER_S).close()
            except OSError as error:
                why = error
        if time.monotonic() >= until:
            raise Unsupported(
                f"No {what} answers at {url} ({why}).",
                f"check that it runs, the address (its log and its web page show it), and the port, mostly {port}.",
            )
        time.sleep(0.5)


def _submitted() -> bool:
    """Return True if ``spark-submit`` started this process. It has started Java, and knows the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_local(master: str) -> bool:
    """Return True if executors of this master are threads of the driver's process."""
    return master.startswith("local") and not master.startswith("local-cluster")


def stays_here(master: str) -> bool:
    """Return True if no other machine needs to reach the driver."""
    return is_local(master) or master.startswith(("spark://127.", "spark://localhost:"))


def settings(master: str) -> dict[str, str]:
    """The settings of a session made here that differ from Spark's defaults."""
    chosen = {
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Processors share the executors: with FIFO, a processor with many tasks holds up the others.
        "spark.scheduler.mode": "FAIR",
    }
    if stays_here(master):
        chosen |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    if is_local(master):
        chosen |= {
            "spark.ui.port": "0",  # a free port: with 4040 a second session would warn that it is taken
            # The value is written into a stream's checkpoint at its first start.
            settings_of.SHUFFLES: settings_of.shuffles(_cores(master)),
        }
    return chosen


def _cores(master: str) -> int:
    """The cores of a local master: ``local``, ``local[4]``, ``local[*]``, ``local[4,2]``."""
    count = re.fullmatch(r"local(?:\[(\d+|\*).*\])?", master)
    if count is None or count[1] is None:
        return 1
    return int(count[1]) if count[1] != "*" else os.cpu_count() or 1


@contextlib.contextmanager
def _log_settings() -> Iterator[str]:
    """Java's option for a log4j file. Spark's own setting is too late for the first lines, and writes a line itself."""
    with tempfile.TemporaryDirectory(prefix="cues-log4j-") as folder:
        file = Path(folder) / "log4j2.properties"
        file.write_text(_LOG_SETTINGS)
        options = f"-Dlog4j2.configurationFile={file.as_uri()}"
        with _environment("SPARK_LAUNCHER_OPTS", options):
            yield options


@contextlib.contextmanager
def _own_interrupt() -> Iterator[None]:
    """Put back the program's own handler of Ctrl-C, if it has one.

    pyspark sets another handler, which cancels every job. With it the steps of ``cues run`` would fail instead of
    draining.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before not in (None, signal.default_int_handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable while Java is started, and restore its old value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
