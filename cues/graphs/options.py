"""The options of processors and of a start: names, types, defaults and texts.

    Options            the options of one processor: a frozen dataclass with the defaults
    SourceOptions, StreamOptions, SinkOptions, FrameOptions, BroadcastOptions
                       the keyword arguments of a declaration, for type checkers and editors
    GraphOptions       the keyword arguments of a graph, as ``Graph.from_dict`` takes them
    EngineOptions, StartOptions
                       the keyword arguments of ``Graph.start`` and ``Graph.run``
    OPTION_TEXTS, START_TEXTS
                       the effect of each, for docstrings and for docs/options.md

Tests assert that these have the same names, and that the signatures of the engines have them too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypedDict, TypeVar

from cues.base.option_texts import OptionText, describes
from cues.errors import InvalidArgument
from cues.graphs.retry import Retry
from cues.queues.options import duration_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.base import events
    from cues.queues.options import QueueOptions
    from cues.queues.store import Store

T = TypeVar("T")
Isolation = Literal["uncommitted", "committed"]
ISOLATIONS: Final = ("uncommitted", "committed")
Function = Callable[..., Any]
Kind = Literal["source", "stream", "sink"]
Strategy = Literal["exactly-once", "at-most-once"]
STRATEGIES: Final = ("exactly-once", "at-most-once")
ACROSS: Final = ("forwarded", "pending")
"""The ways in which messages of a stream get to other stores."""
FRAME: Final = "frame"
"""The value of ``batch`` of a stage that is a function from DataFrame to DataFrame (:meth:`Graph.frame`)."""
OUTPUT_MODES: Final = ("append", "update", "complete", "step")
"""The rows that a frame writes: those of Spark's output modes, or those of each step on their own."""
TABLES: Final = ("arrow", "pandas", "polars")
"""The values of ``batch`` of a function that takes the messages of a step as a table, and returns one."""
FRAME_SIZE: Final = 50_000
"""The most messages of one DataFrame by default. Each DataFrame is a Spark job of half a second."""
BATCH_SIZE: Final = 1000
"""The most messages of one step by default. A step waits for more messages only with ``linger_s=``."""
STEP_S: Final = 0.25
"""The time limit of the calls of one step by default, in seconds."""

INHERIT: Final = "inherit"
"""The value of ``errors`` that means: the error queue of the graph."""


class CheckpointTarget(Protocol):
    """The duties of ``checkpoint=`` of a sink: ``cues.checkpoints.SQLCheckpoint``, ``cues.processors.sql.SQLite``.

    ``transaction(process)`` returns a context manager. Leaving it commits the user's writes together with a row for
    ``process.delivery``; an exception rolls both back. It refuses a delivery of a former owner (:class:`Fenced`), and
    raises :class:`CheckpointError` for a failure of the target itself. The object that it enters has a
    ``connection``, and ``known``: the number of messages at the start of the delivery that the target already has.

    If only one process can have the target open, its attribute ``one_process`` is the place, as text. Then a start
    with workers is refused if two of them need that place. A source that reads there has the same attribute.
    """

    def transaction(self, process: Any) -> AbstractContextManager[Any]:
        """Return the transaction that takes the delivery of ``process``."""


@dataclass(frozen=True)
class Options:
    """The options of a processor, with their defaults."""

    id: str | None = None
    opts: Any = None
    types: Any = None
    topics: Any = None
    where: Any = None
    errors: str | None = INHERIT
    strategy: str | None = None
    retries: int | Retry = 0
    batch: bool | str = False
    bisect: bool = True
    fields: str | Mapping[str, str] | None = None
    output_mode: str | None = None
    trigger: str | None = None
    batch_size: int = BATCH_SIZE
    step_s: float | None = STEP_S
    linger_s: float = 0.0
    key: str | Function | None = None
    instances: int = 1
    concurrency: int = 1
    timeout_s: float | None = None
    side_effects: bool = False
    resume: str | None = None
    tailers: Any = None
    appenders: Any = None
    checkpoint: CheckpointTarget | None = None
    across: str = "forwarded"
    isolation: Isolation = "uncommitted"
    renamed_from: str | None = None
    schema: Any = None
    timer: Function | None = None
    ttl: str | float | timedelta | None = None
    rate: str | None = None
    on_error: str | None = None
    max_errors: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, without ``id``."""
        given = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "id" and not (type(value) is type(field.default) and value == field.default):
                given[field.name] = value
        return given

    @property
    def retry(self) -> Retry:
        return self.retries if isinstance(self.retries, Retry) else Retry(self.retries + 1)

    @property
    def calls_per_s(self) -> float | None:
        """The calls a second of ``rate``. Raises :class:`InvalidArgument` if it is not a rate."""
        return None if self.rate is None else calls_per_s(self.rate)


def calls_per_s(rate: str) -> float:
    """Return the calls a second of a rate such as ``"10/s"``, ``"600/m"`` or ``"5/10s"``."""
    count, slash, per = rate.partition("/") if isinstance(rate, str) else ("", "", "")
    try:
        calls, seconds = int(count), duration_of(per if per[:1].isdigit() else f"1{per}", "The time of a rate")
    except (ValueError, InvalidArgument):
        calls = 0
    if not slash or calls < 1:
        raise InvalidArgument(f"rate is {rate!r}.", "give calls by time, such as '10/s', '600/m' or '5/10s'.")
    return calls / seconds


OPTION_NAMES: Final = tuple(field.name for field in fields(Options))

Predicate = Callable[[Any], Any]
Queues = str | Sequence[str] | Mapping[str, str]
"""Queue names, or a dict {binding: queue}."""


class _Common(TypedDict, total=False):
    """Options of all processors."""

    opts: Any
    errors: str | None
    strategy: Strategy | None
    retries: int | Retry
    batch_size: int
    renamed_from: str | None
    schema: Any


class _Taking(_Common, total=False):
    """Options of all processors that read queues."""

    types: Collection[str] | Mapping[str, Collection[str]] | None
    topics: Collection[str] | Mapping[str, Collection[str]] | None
    where: Predicate | Mapping[str, Predicate] | None
    batch: bool | Literal["frame", "arrow", "pandas", "polars"]
    bisect: bool
    fields: str | Mapping[str, str] | None
    output_mode: Literal["append", "update", "complete", "step"] | None
    trigger: str | None
    step_s: float | None
    linger_s: float
    key: str | Predicate | None
    instances: int
    concurrency: int
    timeout_s: float | None
    side_effects: bool
    tailers: Queues | None
    isolation: Isolation
    timer: Function | None
    ttl: str | float | timedelta | None
    rate: str | None
    on_error: Literal["pause"] | None
    max_errors: str | None


class SourceOptions(_Common, total=False):
    """The keyword arguments of :class:`Source` and :meth:`Graph.source`."""

    resume: Literal["skip", "again"] | None


class BroadcastOptions(_Taking, total=False):
    """The keyword arguments of :meth:`Graph.broadcast` besides ``id``."""

    appenders: Queues | None
    across: Literal["forwarded", "pending"]


class StreamOptions(BroadcastOptions, total=False):
    """The keyword arguments of :class:`Stream`, :meth:`Graph.stream` and :func:`cues.broadcast`."""

    id: str | None


class SinkOptions(_Taking, total=False):
    """The keyword arguments of :class:`Sink` and :meth:`Graph.sink`."""

    id: str | None
    checkpoint: CheckpointTarget | None


class FrameOptions(_Common, total=False):
    """The keyword arguments of :meth:`Graph.frame`."""

    id: str | None
    output_mode: Literal["append", "update", "complete", "step"] | None
    trigger: str | None
    step_s: float | None
    instances: int
    across: Literal["forwarded", "pending"]


class GraphOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Graph.from_dict`, which replace values of the plain data."""

    store: str | os.PathLike[str] | Store | None
    errors: str | None
    strategy: Strategy
    system: Any
    source: str | None
    queues: Mapping[str, QueueOptions | Mapping[str, Any]] | None
    durability: str | None


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of :meth:`Graph.start` that only some engines take."""

    listeners: tuple[events.Listener, ...]
    target: str | None
    spark: SparkSession | None
    master: str | None
    queues: str | os.PathLike[str] | None
    backfill: bool


class StartOptions(EngineOptions, total=False):
    """The keyword arguments of :meth:`Graph.start` and :meth:`Graph.run`."""

    engine: Literal["embedded", "spark"]
    workers: int | Literal["auto"] | None
    store: str | os.PathLike[str] | Store | None
    accept_topology: bool
    take_over: bool
    min_free: int | str | None


def names_of(options: type) -> tuple[str, ...]:
    """Return the options of a processor that a TypedDict has, in the order of :class:`Options`."""
    return tuple(name for name in OPTION_NAMES if name in options.__annotations__)


ALLOWED: Final[dict[Kind, tuple[str, ...]]] = {
    "source": ("id", *names_of(SourceOptions)),
    "stream": names_of(StreamOptions),
    "sink": names_of(SinkOptions),
}
"""The options that a processor of each kind takes. The ``id`` of a source is its first argument."""

_TEXTS: Final = {
    "id": "The name of the processor; None: the name of the function. Positions and state are kept under `graph.id`,"
    " so with an `id=` the function can be renamed.",
    "opts": "Any object; the function reads it as `process.opts`.",
    "types": "Take only messages whose `q/type` is this one, or one of these; a dict gives them by binding.",
    "topics": "Take only messages that have one of these topics in `q/topics` (a text, or a list of texts); a dict"
    " gives them by binding.",
    "where": "Take only messages for which this function returns true; a dict gives functions by binding. An exception"
    " in the function is a failure of the message.",
    "errors": '`"inherit"`: the error queue of the graph. A queue name: messages that failed for good are written to'
    " it. None: an error stops the processor.",
    "strategy": '`"exactly-once"` or `"at-most-once"`; None: the strategy of the graph.',
    "retries": "The number of further calls after a failure, or `cues.Retry(…)`.",
    "batch": "True: the function takes the list of the messages of a step, which succeeds or fails as a whole; see"
    " `bisect`."
    ' `"arrow"`, `"pandas"` or `"polars"`: it takes a table of them, and may return one; each row is a message.',
    "bisect": "True: the messages of a batch function that fails for good are run again in halves, until those that"
    " fail alone are known; only these are written to the error queue. False: the whole batch is one error message.",
    "fields": "The columns of the DataFrame besides index, time, hash and value, such as"
    ' `"origin string, delay double"`.',
    "output_mode": 'The rows that a frame with state writes after a batch, as Spark has it: `"append"` (rows that are'
    ' final), `"update"` (changed rows) or `"complete"` (all). `"step"`: the plan is applied to the messages of'
    ' each step on their own. None: `"append"`, or steps if the plan keeps no state.',
    "trigger": 'The time between two batches of a frame with state, such as `"10 seconds"`; None: as soon as there are'
    " messages.",
    "batch_size": "The most messages of one step. A step takes the messages that are there and does not wait for more."
    " For a message function it changes only the speed. `graph.frame` has 50000.",
    "step_s": "Seconds: a step of a message function ends after this time; None: no limit.",
    "linger_s": "Seconds: a batch function waits so long for `batch_size` messages when fewer are there.",
    "timeout_s": "Seconds: a call that has not returned after this time is a failure; None: no limit.",
    "key": "A field, or a function of the message: `process.state` belongs to this key, and calls of one key run one"
    " after another. A message without the field, or with None in it, fails.",
    "instances": "The number of threads (or worker processes) that share the partitions of the inputs.",
    "concurrency": "The number of calls that run at once: threads, or tasks of an `async def`. Outputs keep the order"
    " of the inputs.",
    "side_effects": "True: the function has effects outside the store, so the messages of a step are recorded before"
    " the function is called. Always so for a sink.",
    "resume": 'For a function that yields bare messages. `"skip"`: it yields the same messages at each start, and those'
    ' that are committed are skipped. `"again"`: at-least-once.',
    "tailers": "Queues that the function reads by itself: a dict by binding, or names.",
    "appenders": "Queues that the function writes by itself: a dict by binding, or names.",
    "checkpoint": "The target that keeps the position together with the rows: `cues.checkpoints.SQLCheckpoint(…)` or"
    " `cues.processors.sql.SQLite(…)`.",
    "across": '`"forwarded"`: messages are copied to other stores after the commit. `"pending"`: they are written there'
    " at once, and become visible with the commit.",
    "isolation": '`"committed"`: messages of transactions (`cues.txn`) are taken after they are committed, in the order'
    " of the commits. It holds for all inputs and `tailers`.",
    "renamed_from": "The name that the processor had before. The next start gives it the positions, the state and the"
    " records of the processor of that name. Later starts ignore the option.",
    "schema": "What the messages that a source yields, or that a function takes, must fit: a dataclass, a pydantic"
    " model, a msgspec Struct, a TypedDict, a JSON Schema, or `cues.schemas.parsed(…)`; a dict gives them by binding. A"
    " message that does not fit fails, with the path of the offence. A function gets objects of the class. None: the"
    ' classes in the annotations of its parameters. With `batch="arrow"` and the like: the columns of the table, as for'
    " `cues.QueueOptions(schema=…)`.",
    "timer": "The function that is called when a timer of `process.timer(key, at)` is due. It gets the timer, a dict"
    " of `key`, `name` and `at`, and returns what the function of the processor returns.",
    "ttl": "A value of the state that was not written for this time expires: `process.state` does not have it any more."
    ' Seconds, a timedelta, or a text such as `"30m"` or `"7d"`. None: values stay.',
    "rate": 'The most calls of the function by time, such as `"10/s"`, `"600/m"` or `"5/10s"`, evenly spread; a batch'
    " is one call. It is for the processor as a whole: each of n partitions has 1/n of it. None: no limit.",
    "on_error": '`"pause"`: before a message that failed for good, the processor pauses until `cues resume`, and'
    " nothing is written to an error queue. The other processors go on. None: the message goes to the error queue.",
    "max_errors": 'The number of error messages within a time, such as `"100/min"`, `"20/10s"` or `"1000/h"`, at'
    " which the processor pauses until `cues resume`. The last of them is still written. A start goes on counting,"
    " and a failed batch counts as one. None: no limit.",
}

OPTION_TEXTS: Final = {field.name: OptionText(field.default, _TEXTS[field.name]) for field in fields(Options)}


def lists_options(options: type) -> Callable[[T], T]:
    """Append the options of a TypedDict to the docstring of the function or class that takes them."""
    return describes(OPTION_TEXTS, names_of(options))


START_TEXTS: Final = {
    "engine": OptionText("embedded", '`"embedded"` or `"spark"`.'),
    "workers": OptionText(
        None, 'The number of processes that run the processors, or `"auto"`; None: threads of this process.'
    ),
    "store": OptionText(None, "A directory or a `Store`; None: the store of the graph."),
    "accept_topology": OptionText(
        False, "True: accept changed inputs and renamed processors; new inputs begin at the start of their queue."
    ),
    "take_over": OptionText(
        False,
        "True: take the graph from a process that no longer answers; with `queues=`, from a driver"
        " with another store at once.",
    ),
    "min_free": OptionText(
        None,
        "The run stops with `DiskLow` if the disk of a store has less free space: bytes, or a size such as"
        ' `"500MB"`; 0: never. None: 1 % of the disk, from 64 MiB to 1 GiB (of a small disk at most a tenth).',
    ),
    "listeners": OptionText((), "Functions that are called with each `cues.base.events.Event`."),
    "target": OptionText(
        None, 'With `workers`, for a graph that a function returns: how a worker gets it, as `"graph.py:make(3)"`.'
    ),
    "spark": OptionText(None, "With Spark: your session, which is not stopped; None: a session is made."),
    "master": OptionText(None, "With Spark: the URL of the cluster; None: `local[*]`."),
    "queues": OptionText(
        None, "With Spark: a directory that all executors can read; queues and positions are kept in it."
    ),
    "backfill": OptionText(
        False, "With Spark: True processes all messages of the queues in large steps, runs no source, and ends."
    ),
}
"""The options of :meth:`Graph.start` and :meth:`Graph.run`."""


def kinds(name: str) -> str:
    """Return the declarations that take an option, as docs/options.md shows them."""
    if name in ("fields", "output_mode", "trigger"):
        return "`graph.frame`"
    kinds = [kind for kind, allowed in ALLOWED.items() if name in allowed and (kind, name) != ("source", "id")]
    return "all" if len(kinds) == len(ALLOWED) else ", ".join(kinds)
