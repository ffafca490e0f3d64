"""Settings of Spark that a user gives with ``conf=`` and ``--conf NAME=VALUE``.

    parsed(texts)             NAME=VALUE of a command line
    require_master(master)    refuses what is no master of a graph
    checked(conf)             the settings as text; before Spark starts, those that Cues must set are refused by name
    set_in(session, conf)     set them in a session that was made here
    copy_with(session, conf)  a copy of the session of the user that has them
    shown(conf)               the settings for people, without secrets

Names that neither Cues nor Spark knows are accepted for a session that is made here: connectors have settings of their
own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from cues.base.texts import quoted
from cues.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECT: Final = "sc://"
"""The scheme of Spark Connect servers."""
_MASTER: Final = re.compile(
    r"local(\[([1-9]\d*|\*)\s*(,\s*\d+\s*)?\])?|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]"
    r"|spark://[^\s/,]+:\d+(,[^\s/,]+:\d+)*|yarn|k8s://\S+|sc://\S+"
)
"""The masters that Spark's launcher accepts. It refuses others after seconds, with a page of Java."""
SHUFFLES: Final = "spark.sql.shuffle.partitions"
"""The number of partitions after a shuffle, and of the state of a query."""
SHUFFLES_PER_CORE: Final = 2
"""Partitions for each core, unless a user says otherwise. Spark's 200 are for a cluster: each costs a task in every
batch, even with few rows, and of a query with state also a file. With one for each core, a slow one is waited for."""
MERGE_FILES: Final = "spark.cues.mergeFiles"
_ONE_PLACE: Final = "a graph has its driver in this process."
MINE: Final = {
    "spark.master": ("the session is made for one master.", "use --master URL; in Python, master=URL."),
    "spark.remote": (_ONE_PLACE, "use --master URL; in Python, master=URL."),
    "spark.api.mode": (_ONE_PLACE, "leave it out."),
    "spark.submit.deployMode": (_ONE_PLACE, "run spark-submit --deploy-mode cluster with the program."),
    "spark.pyspark.python": (
        "PYSPARK_PYTHON comes first, and Cues sets it to this Python, because functions are sent to the same one.",
        "set the variable PYSPARK_PYTHON.",
    ),
    "spark.pyspark.driver.python": ("the driver is this process.", "start this program with that Python."),
    "spark.sql.streaming.noDataMicroBatches.enabled": (
        "Cues plans the batches of a frame itself, also the one without messages that closes windows.",
        "leave it out.",
    ),
}
"""Settings that Cues must set itself, each with the reason and with what to do instead."""
_OWN: Final = (MERGE_FILES,)
"""The settings of Cues."""
_OF_JAVA: Final = (
    "spark.driver.memory",
    "spark.driver.extraJavaOptions",
    "spark.driver.extraClassPath",
    "spark.driver.extraLibraryPath",
)
"""Settings that Java gets when it starts."""
_SECRET: Final = re.compile(r"secret|password|passwd|token|access[._]?key|credential", re.IGNORECASE)
"""Names of settings whose values nobody should read; after Spark's own spark.redaction.regex."""


def parsed(texts: Iterable[str]) -> dict[str, str]:
    """Settings from texts such as ``"spark.executor.memory=2g"``, checked. Raises :class:`InvalidArgument`."""
    conf: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name:
            raise InvalidArgument(
                f"--conf {quoted(text)} is not a setting of Spark.", "write --conf NAME=VALUE, once for each setting."
            )
        if conf.setdefault(name, value) != value:
            raise InvalidArgument(
                f"--conf gives {name} twice, with different values: {shown({name: conf[name]})[name]} and"
                f" {shown({name: value})[name]}.",
                "give it once.",
            )
    return checked(conf)


def require_master(master: str | None) -> None:
    """Raise :class:`InvalidArgument` if this is not the URL of a master. Nothing is started, and nothing is asked."""
    if master is not None and not _MASTER.fullmatch(master):
        raise InvalidArgument(
            f"{quoted(master)} is not a master of Spark.",
            "give local[*], local[4], spark://host:7077, yarn or k8s://https://host:443.",
        )


def no_driver() -> Unsupported:
    """The error for a graph on Spark Connect."""
    return Unsupported(
        "A graph needs the driver of Spark in this process, and a session of Spark Connect has only a client here.",
        "use a master such as local[*] or spark://host:7077; or read and write queues through Spark Connect, with the"
        " format cues.",
    )


def checked(conf: Mapping[str, Any] | None) -> dict[str, str]:
    """The settings as text. Nothing is started.

    Raises :class:`InvalidArgument` for a name or a value that cannot be a setting, and for a setting that Cues must set
    itself.
    """
    if conf is None:
        return {}
    if not isinstance(conf, Mapping):
        raise InvalidArgument(
            f"conf= is {type(conf).__name__}, and names with values are expected.",
            'pass a dict, such as conf={"spark.executor.memory": "2g"}.',
        )
    return {_name(name): _text(name, value) for name, value in conf.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"spark\.[^\s=]+", name):
        raise InvalidArgument(
            f"{name!r} is not a name of a setting of Spark: these begin with 'spark.'.",
            "write names as in Spark's documentation; a setting of Hadoop, such as fs.s3a.endpoint, is"
            " spark.hadoop.fs.s3a.endpoint.",
        )
    if name in MINE:
        why, instead = MINE[name]
        raise InvalidArgument(f"{name} is not a setting that can be given here: {why}", instead)
    if name.startswith("spark.cues.") and name not in _OWN:
        raise InvalidArgument(f"Cues has no setting {name}.", f"use {' or '.join(_OWN)}, or leave it out.")
    return name


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise InvalidArgument(
            f"{name} is {type(value).__name__}, and a text or a number is expected.", "pass the value as text."
        )
    if name == MERGE_FILES and not re.fullmatch(r"\d+", str(value)):
        raise InvalidArgument(f"{name} is {value!r}, and a number of files is expected.", "pass 64, or 0 for no merge.")
    return str(value)


def shown(conf: Mapping[str, str]) -> dict[str, str]:
    """Settings for people: values of secrets are ``***``."""
    return {name: "***" if _SECRET.search(name) else value for name, value in conf.items()}


def is_for_java(name: str) -> bool:
    """Return True if Spark's launcher uses the setting, and can end with it before there is a session."""
    return name in _OF_JAVA or name.startswith(("spark.jars", "spark.submit."))


def require_before_java(conf: Mapping[str, str]) -> None:
    """Raise :class:`Unsupported` if a setting is too late, because ``spark-submit`` has started Java."""
    late = [name for name in _OF_JAVA if name in conf]
    if late:
        raise Unsupported(
            f"{late[0]} is too late: spark-submit has started the Java of this process.",
            f"give it to spark-submit: --conf {late[0]}=….",
        )


def set_in(session: SparkSession, conf: Mapping[str, str]) -> None:
    """Set, in a session that was made with them, the settings that can change while it runs. Spark checks the values.

    Raises :class:`InvalidArgument` for a value that Spark refuses, and :class:`Unsupported` for a setting that a server
    of Spark Connect has for all its sessions.
    """
    for name, value in conf.items():
        if session.conf.isModifiable(name) or name in _OWN:
            _set(session, name, value)
        elif not hasattr(session, "_jsparkSession"):
            raise Unsupported(
                f"{name} cannot be set: Spark reads it only when the server of Spark Connect starts.",
                "give it to start-connect-server.sh, or leave it out.",
            )


def copy_with(session: SparkSession, conf: Mapping[str, str]) -> SparkSession:
    """A copy of a session of the user, with these settings. The session itself is not changed.

    Raises :class:`Unsupported` for a setting that Spark reads only when a session starts, unless it has this value,
    and :class:`InvalidArgument` for a value that Spark refuses.
    """
    for name, value in conf.items():
        now = session.conf.get(name, None)
        if now == value or session.conf.isModifiable(name) or name in _OWN:
            continue
        has = f"the session that runs has {now}" if now is not None else "the session that runs does not have it"
        raise Unsupported(
            f"{name}={shown({name: value})[name]} cannot be set: Spark reads it only when a session starts, and {has}.",
            "set it where that session is made; or let Cues make the session, without spark= and with no active one.",
        )
    copy = copy_of(session)
    for name, value in conf.items():
        if session.conf.get(name, None) != value:
            _set(copy, name, value)
    return copy


def copy_of(session: Any) -> SparkSession:
    """A session with the settings, views and listeners of another one, and queries and settings of its own."""
    from pyspark.sql import SparkSession

    if not hasattr(session, "_jsparkSession"):
        raise Unsupported(
            "The session belongs to Spark Connect, and Cues does not change its settings.",
            "set them in the session, with spark.conf.set, and leave conf= out.",
        )
    copy = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
    for listener in session._jsparkSession.streams().listListeners():
        copy._jsparkSession.streams().addListener(listener)
    return copy


def _set(session: SparkSession, name: str, value: str) -> None:
    from cues.spark.failures import in_short

    try:
        session.conf.set(name, value)
    except Exception as error:
        raise InvalidArgument(
            f"Spark refuses {name}={shown({name: value})[name]}: {in_short(error)}.",
            "give a value that Spark's documentation allows.",
        ) from None


def shuffles(cores: int) -> str:
    """The value of :data:`SHUFFLES` for this number of cores."""
    return str(SHUFFLES_PER_CORE * max(1, cores))


def said(session: Any, name: str) -> bool:
    """Return True if a session has a value of its own for a setting, and not Spark's default."""
    return name in session.conf.getAll
