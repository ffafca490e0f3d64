"""The options of processors and of a start: names, types, defaults and texts.

    Options            the options of one processor: a frozen dataclass, which is the table of them all
    refusal_of, exclusion_of, refusal_of_shared
                       the refusals of declarations, of a start, and of Spark with the queues in a shared directory
    why_in_driver      the options with which the driver of Spark calls the function
    ready_made         the options that ready-made processors take
    SourceOptions, StreamOptions, SinkOptions, FrameOptions, BroadcastOptions
                       the keyword arguments of a declaration, for type checkers and editors
    GraphOptions       the keyword arguments of a graph, as ``Graph.from_dict`` takes them
    EngineOptions, StartOptions
                       the keyword arguments of ``Graph.start`` and ``Graph.run``
    OPTION_TEXTS, START_TEXTS
                       the effect of each, for docstrings and for docs/options.md

A new option is a field of ``Options`` and a key of the TypedDict of each kind that takes it. Tests assert that these
have the same names, and that the signatures of the engines have them too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypedDict, TypeVar

from cues.base import names
from cues.base.checks import is_count, is_number
from cues.base.data import dataclass
from cues.base.option_texts import OptionText, describes
from cues.errors import InvalidArgument
from cues.graphs.error_rate import ErrorRate
from cues.graphs.option import NotShared, Option, Ready, one_of, option, shown, without
from cues.graphs.outage import WAIT, Outage, outage_of
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
Kind = Literal["source", "stream", "frame", "sink"]
Strategy = Literal["exactly-once", "at-most-once"]
STRATEGIES: Final = ("exactly-once", "at-most-once")
ACROSS: Final = ("forwarded", "pending")
"""The ways in which messages of a stream get to other stores."""
OUTPUT_MODES: Final = ("append", "update", "complete", "step")
"""The rows that a frame writes: those of Spark's output modes, or those of each step on their own."""
TABLES: Final = ("arrow", "pandas", "polars")
"""The values of ``batch`` of a function that takes the messages of a step as a table, and returns one."""
FRAME_SIZE: Final = 50_000
"""The most messages of one DataFrame by default. Each DataFrame is a Spark job of half a second."""
BATCH_SIZE: Final = 1000
"""The most messages of one step by default. A step waits for more messages only with ``linger_s=``."""
TABLE_SIZE: Final = 65_535
"""The ``batch_size`` of functions of tables that name none: the rows of one record. The time of a step bounds it."""
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


def _is_at_most_once(strategy: object) -> bool:
    return strategy == "at-most-once"


_NOT_SHARED: Final = "{id} has {name}={value!r}, which a processor with its queues in a shared directory cannot have."
_IN_STORE: Final = "run the graph without --queues"
_STATE: Final = "its state is in the driver's store"
_TIMER_AND: Final = "{where} has timer= and {other}={other_value!r}."
_NO_PAUSES: Final = NotShared(
    "{id} has {name}={value!r}, and a processor with its queues in a shared directory does not pause.",
    f"{_IN_STORE}, or leave {{name}}= out.",
)
_IN_PERSON: Final = "it reads and writes queues by itself"
_IMPERATIVE: Final = NotShared(
    "{id} is imperative (tailers=, appenders=), which it cannot be with its queues in a shared directory: its function"
    " would read and write queues from an executor.",
    f"{_IN_STORE}, or declare inputs and outputs.",
)
_NO_PAUSES_AT_MOST_ONCE: Final = without(
    "{node} has {name}={value!r} and is at-most-once, which takes no message a second time.",
    "leave {name}= out, or set strategy='exactly-once'.",
    strategy=_is_at_most_once,
)


@dataclass(frozen=True)
class Options:
    """The options of a processor, with their defaults: the table of them all."""

    id: str | None = option(
        None,
        "The name of the processor; None: the name of the function. Positions and state are kept under `graph.id`,"
        " so with an `id=` the function can be renamed.",
        ready="all",
    )
    opts: Any = option(None, "Any object; the function reads it as `process.opts`.", ready="all")
    types: Any = option(
        None,
        "Take only messages whose `q/type` is this one, or one of these; a dict gives them by binding.",
        ready="reading",
    )
    topics: Any = option(
        None,
        "Take only messages that have one of these topics in `q/topics` (a text, or a list of texts); a dict"
        " gives them by binding.",
        ready="reading",
    )
    where: Any = option(
        None,
        "Take only messages for which this function returns true; a dict gives functions by binding. An exception"
        " in the function is a failure of the message. A function of tables, or a window, may have a pyarrow expression"
        " over the columns, for which no dict is made: `where=pc.field('total') > 9`.",
        ready="reading",
    )
    errors: str | None = option(
        INHERIT,
        '`"inherit"`: the error queue of the graph. A queue name: messages that failed for good are written to'
        " it. None: an error stops the processor.",
        lambda name: name is None or name == INHERIT or names.check("queue", name),
        wrong="{where}, errors=: {error}",
        ready="all",
    )
    strategy: str | None = option(
        None,
        '`"exactly-once"` or `"at-most-once"`; None: the strategy of the graph.',
        one_of(*STRATEGIES),
        f"give {shown(STRATEGIES)}.",
        without=(
            without(
                "The frame {id!r} is at-most-once.",
                "set strategy='exactly-once': a frame has no other guarantee.",
                own=_is_at_most_once,
                kind=lambda kind: kind == "frame",
            ),
        ),
        ready="all",
    )
    retries: int | Retry = option(
        0,
        "The number of further calls after a failure, or `cues.Retry(…)`.",
        lambda value: isinstance(value, Retry) or is_count(value, 0),
        "give a count from 0, or cues.Retry(...).",
        without=(
            without(
                "The {kind} {id!r} is at-most-once, which never calls a function twice, and has retries.",
                "set retries=0, or strategy='exactly-once'.",
                own=lambda retries: retries.attempts > 1 if isinstance(retries, Retry) else retries > 0,
                strategy=_is_at_most_once,
            ),
        ),
        ready="all",
    )
    outage: Outage | str | float | timedelta = option(
        WAIT,
        "When something outside is away (a refused connection, a timeout, a database that starts, a full disk):"
        ' `"wait"` until it is there again, for ever; a time such as `"30m"`: wait so long, then stop the processor;'
        ' `"stop"` at once; `"fail"`: the message fails, as with any exception. Or `cues.Outage(…)`, which names'
        " further exceptions. An at-most-once processor does not wait: the message fails.",
        outage_of,
        wrong="{where} has outage={value!r}: {error}",
        ready="all",
    )
    batch: bool | str = option(
        False,
        "True: the function takes the list of the messages of a step, which succeeds or fails as a whole; see"
        " `bisect`."
        ' `"arrow"`, `"pandas"` or `"polars"`: it takes a table of them, and may return one; each row is a message.'
        " Rows that are tables on the queue, and the table that it returns, stay columns.",
        lambda batch: isinstance(batch, bool) or batch in TABLES,
        f"give True (lists of messages), {shown(TABLES, ', ')}, or False. A frame is declared with @graph.frame(…).",
        ready="sink",
    )
    bisect: bool = option(
        True,
        "True: the messages of a batch function that fails for good are run again in halves, until those that"
        " fail alone are known; only these are written to the error queue. False: the whole batch is one error"
        " message.",
        lambda value: value is True or value is False,
        "give True; or False, to a batch function.",
        without=(
            without(
                "{where} has bisect={value!r}.",
                "give True; or False, to a batch function.",
                batch=lambda batch: batch is False,
            ),
        ),
        ready="sink",
    )
    fields: str | Mapping[str, str] | None = option(
        None,
        'The columns of the DataFrame besides index, time, hash and value, such as `"origin string, delay double"`.',
        lambda value: value is None or isinstance(value, (str, Mapping)),
        "declare it with @graph.frame(…, fields='name type, …').",
    )
    output_mode: str | None = option(
        None,
        'The rows that a frame with state writes after a batch, as Spark has it: `"append"` (rows that are'
        ' final), `"update"` (changed rows) or `"complete"` (all). `"step"`: the plan is applied to the messages of'
        ' each step on their own. None: `"append"`, or steps if the plan keeps no state.',
        one_of(*OUTPUT_MODES),
        f"give {shown(OUTPUT_MODES, ', ')}, to a frame.",
    )
    trigger: str | None = option(
        None,
        'The time between two batches of a frame with state, such as `"10 seconds"`; None: as soon as there are'
        " messages.",
        lambda value: value is None or isinstance(value, str),
        "give an interval such as '10 seconds', to a frame.",
        without=(
            without(
                "The frame {id!r} has trigger= and runs in steps.",
                "leave trigger= out.",
                output_mode=lambda mode: mode == "step",
            ),
        ),
    )
    batch_size: int = option(
        BATCH_SIZE,
        "The most messages of one step. A step takes the messages that are there and does not wait for more."
        " For a message function it changes only the speed. `graph.frame` has 50000.",
        is_count,
        "give a count of messages from 1.",
        ready="all",
    )
    step_s: float | None = option(
        STEP_S,
        "Seconds: a step of a message function ends after this time; None: no limit.",
        lambda value: value is None or (is_number(value) and value > 0),
        "give a number of seconds above 0, or None for no bound.",
        ready="reading",
    )
    linger_s: float = option(
        0.0,
        "Seconds: a batch function waits so long for `batch_size` messages when fewer are there.",
        lambda value: is_number(value) and value >= 0,
        "give a number of seconds from 0.",
        without=(
            without(
                "{where} has linger_s={value!r} and is called for one message at a time.",
                "write batch=True with it, or leave linger_s= out.",
                batch=lambda batch: batch is False,
            ),
        ),
        ready="sink",
    )
    key: str | Function | None = option(
        None,
        "A field, or a function of the message: `process.state` belongs to this key, and calls of one key run one"
        " after another. A message without the field, or with None in it, fails.",
        lambda key: key is None or isinstance(key, str) or callable(key),
        "give the name of a field, or a function of a message.",
        ready="free",
        in_driver=_STATE,
    )
    instances: int = option(
        1,
        "The number of threads (or worker processes) that share the partitions of the inputs.",
        is_count,
        "give a count of threads from 1.",
        ready="reading",
    )
    concurrency: int = option(
        1,
        "The number of calls that run at once: threads, or tasks of an `async def`. Outputs keep the order"
        " of the inputs.",
        is_count,
        "give a count of calls from 1.",
        without=(
            without(
                "{where} has concurrency={value} and is a batch function, which is called once a step.",
                "leave concurrency= out, or set batch=False.",
                "batch",
            ),
            without(
                "{id!r} has concurrency={value} and {others}: messages that concurrent calls read and write by"
                " themselves have no order.",
                "set concurrency=1.",
                "tailers",
                "appenders",
            ),
        ),
        ready="free",
    )
    timeout_s: float | None = option(
        None,
        "Seconds: a call that has not returned after this time is a failure; None: no limit.",
        lambda value: value is None or (is_number(value) and value > 0),
        "give the seconds that one call may take, more than 0.",
        without=(
            without(
                "{where} has timeout_s={value} and {other}=: a call that is not waited for any longer could still read,"
                " write or commit by itself.",
                "leave timeout_s= out, and set a timeout where the function waits; or leave {other}= out.",
                "tailers",
                "appenders",
                "checkpoint",
            ),
        ),
        ready="free",
    )
    side_effects: bool = option(
        False,
        "True: the function has effects outside the store, so the messages of a step are recorded before"
        " the function is called. Always so for a sink.",
        lambda value: isinstance(value, bool),
        "give True or False.",
        ready="reading",
    )
    resume: str | None = option(
        None,
        'For a function that yields bare messages. `"skip"`: it yields the same messages at each start, and those'
        ' that are committed are skipped. `"again"`: at-least-once.',
        one_of("skip", "again"),
        "give 'skip' or 'again'.",
    )
    tailers: Any = option(
        None,
        "Queues that the function reads by itself: a dict by binding, or names.",
        in_driver=_IN_PERSON,
        shared=_IMPERATIVE,
    )
    appenders: Any = option(
        None,
        "Queues that the function writes by itself: a dict by binding, or names.",
        in_driver=_IN_PERSON,
        shared=_IMPERATIVE,
    )
    checkpoint: CheckpointTarget | None = option(
        None,
        "The target that keeps the position together with the rows: `cues.checkpoints.SQLCheckpoint(…)` or"
        " `cues.processors.sql.SQLite(…)`.",
        lambda target: (
            target is None or (not isinstance(target, type) and callable(getattr(target, "transaction", None)))
        ),
        "give cues.checkpoints.SQLCheckpoint(…), or cues.processors.sql.SQLite(…).",
        without=(
            without(
                "The sink {id!r} has checkpoint= and concurrency={other_value}: a message that is written first makes"
                " earlier ones count as written.",
                "set concurrency=1, and batch=True.",
                "concurrency",
            ),
            without(
                "The sink {id!r} has checkpoint= and is at-most-once: no message is repeated.",
                "set strategy='exactly-once'.",
                strategy=_is_at_most_once,
            ),
            without(
                "The sink {id!r} has checkpoint= and tailers=: messages that the function reads by itself are not in a"
                " delivery.",
                "read only inputs.",
                "tailers",
            ),
        ),
        wrong="The sink {id!r} has checkpoint={value!r}, which is not an object with transaction(process).",
        ready="sink",
    )
    across: str = option(
        "forwarded",
        '`"forwarded"`: messages are copied to other stores after the commit. `"pending"`: they are written there'
        " at once, and become visible with the commit.",
        lambda value: value in ACROSS,
        f"give {shown(ACROSS)}.",
        ready="stream",
        in_driver="its messages for other stores are written by the driver",
        shared=NotShared(_NOT_SHARED, f"{_IN_STORE}, or with across='forwarded'."),
    )
    isolation: Isolation = option(
        "uncommitted",
        '`"committed"`: messages of transactions (`cues.txn`) are taken after they are committed, in the order'
        " of the commits. It holds for all inputs and `tailers`.",
        lambda value: value in ISOLATIONS,
        f"give {shown(ISOLATIONS)}.",
        ready="reading",
        in_driver="the driver reads committed messages in the order of their commits",
        shared=NotShared(
            _NOT_SHARED, f"{_IN_STORE}; or read the queue in Spark with option('isolation', 'committed')."
        ),
    )
    renamed_from: str | None = option(
        None,
        "The name that the processor had before. The next start gives it the positions, the state and the"
        " records of the processor of that name. Later starts ignore the option.",
        lambda name: name is None or names.check("processor", name),
        wrong="{where}, renamed_from=: {error}",
        ready="all",
    )
    schema: Any = option(
        None,
        "What the messages that a source yields, or that a function takes, must fit: a dataclass, a pydantic"
        " model, a msgspec Struct, a TypedDict, a JSON Schema, or `cues.schemas.parsed(…)`; a dict gives them by"
        " binding. A message that does not fit fails, with the path of the offence. A function gets objects of the"
        ' class. None: the classes in the annotations of its parameters. With `batch="arrow"` and the like: the'
        " columns of the table, as for `cues.QueueOptions(schema=…)`.",
        ready="source",
    )
    timer: Function | None = option(
        None,
        "The function that is called when a timer of `process.timer(key, at)` is due. It gets the timer, a dict"
        " of `key`, `name` and `at`, and returns what the function of the processor returns.",
        lambda fn: (
            fn is None or (callable(fn) and not inspect.isgeneratorfunction(fn) and not inspect.isasyncgenfunction(fn))
        ),
        "give a function of a timer, which returns messages.",
        without=(
            without(_TIMER_AND, "set the timers in a stream before it.", "checkpoint"),
            without(_TIMER_AND, "declare the queues as inputs.", "tailers"),
            without(_TIMER_AND, "declare the queues as outputs.", "appenders"),
            without(_TIMER_AND, "leave across= out.", "across"),
            without(
                _TIMER_AND,
                "declare a stream beside the frame, and set the timers there.",
                batch=lambda batch: not isinstance(batch, bool),
            ),
            without(
                "{node} has timer= and is at-most-once, and timers are exactly-once.",
                "set strategy='exactly-once'.",
                strategy=_is_at_most_once,
            ),
        ),
        in_driver=_STATE,
    )
    ttl: str | float | timedelta | None = option(
        None,
        "A value of the state that was not written for this time expires: `process.state` does not have it any more."
        ' Seconds, a timedelta, or a text such as `"30m"` or `"7d"`. None: values stay.',
        lambda ttl: ttl is None or duration_of(ttl, "The time"),
        without=(
            without(
                "{where} has ttl={value!r}, and it is with checkpoint=, which has no state in the store.",
                "declare ttl= on a stream or sink.",
                "checkpoint",
            ),
        ),
        wrong="{where} has ttl={value!r}: {error}",
        in_driver=_STATE,
    )
    rate: str | None = option(
        None,
        'The most calls of the function by time, such as `"10/s"`, `"600/m"` or `"5/10s"`, evenly spread; a batch'
        " is one call. It is for the processor as a whole: each of n partitions has 1/n of it. None: no limit.",
        lambda rate: rate is None or calls_per_s(rate),
        ready="reading",
        in_driver="its calls have a rate",
        shared=NotShared(_NOT_SHARED, f"{_IN_STORE}."),
    )
    on_error: str | None = option(
        None,
        '`"pause"`: before a message that failed for good, the processor pauses until `cues resume`, and'
        " nothing is written to an error queue. The other processors go on. None: the message goes to the error queue.",
        one_of("pause"),
        "give 'pause', or leave it out.",
        without=(_NO_PAUSES_AT_MOST_ONCE,),
        ready="reading",
        shared=_NO_PAUSES,
    )
    max_errors: str | None = option(
        None,
        'The number of error messages within a time, such as `"100/min"`, `"20/10s"` or `"1000/h"`, at'
        " which the processor pauses until `cues resume`. The last of them is still written. A start goes on counting,"
        " and a failed batch counts as one. None: no limit.",
        lambda limit: limit is None or ErrorRate.parse(limit),
        without=(
            without(
                "{where} has max_errors={value!r} and on_error='pause', which pauses at the first failure.",
                "leave one of the two out.",
                "on_error",
            ),
            _NO_PAUSES_AT_MOST_ONCE,
        ),
        ready="reading",
        shared=_NO_PAUSES,
    )

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, without ``id``."""
        given = {}
        for name in OPTION_NAMES:
            value, default = getattr(self, name), getattr(Options, name)
            if name != "id" and not (type(value) is type(default) and value == default):
                given[name] = value
        return given

    @property
    def retry(self) -> Retry:
        return self.retries if isinstance(self.retries, Retry) else Retry(self.retries + 1)

    @property
    def outages(self) -> Outage:
        return outage_of(self.outage)

    @property
    def ttl_ns(self) -> int | None:
        """The time of ``ttl`` in nanoseconds; None if values stay."""
        return None if self.ttl is None else round(duration_of(self.ttl, "The time") * 1e9)

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


TABLE: Final[dict[str, Option]] = {each.name: each.metadata["option"] for each in fields(Options)}
OPTION_NAMES: Final = tuple(TABLE)


def refusal_of(options: Options, kind: Kind, id: str) -> tuple[str, str] | None:
    """Return text and hint for the first option with a wrong value, or with one that it excludes; None if all fit."""
    facts = {"id": id, "where": f"The {kind} {id!r}"}
    for name, entry in TABLE.items():
        value = getattr(options, name)
        try:
            error, hint = "" if entry.fits(value) else "{where} has {name}={value!r}.", entry.hint
        except InvalidArgument as raised:
            error, hint, facts["error"] = "{where}: {error}", raised.hint, raised.message
        if error:
            return (entry.wrong or error).format(**facts, name=name, value=value), hint
    return exclusion_of(options, kind, id)


def exclusion_of(options: Options, kind: Kind, id: str, node: str = "") -> tuple[str, str] | None:
    """Return text and hint for the first two options that a processor cannot have together; None if there are none.

    ``node`` is the id with that of the graph. A declaration does not know it, nor the strategy of the graph.
    """

    def value_of(name: str) -> Any:
        return kind if name == "kind" else getattr(options, name)

    def has(name: str, refused: Callable[[Any], object] | None) -> object:
        value = value_of(name)
        return _is_given(name, value) if refused is None else refused(value)

    for name, entry in TABLE.items():
        for each in entry.without:
            if ("strategy" in each.others and kind == "source") or ("{node}" in each.wrong and not node):
                continue  # a source has no calls that are repeated
            found = [other for other, refused in each.others.items() if has(name, each.own) and has(other, refused)]
            if found:
                facts = {"id": id, "node": node, "kind": kind, "where": f"The {kind} {id!r}", "name": name}
                facts |= {"other": found[0], "others": " and ".join(f"{other}=" for other in found)}
                values = {"value": getattr(options, name), "other_value": value_of(found[0])}
                return each.wrong.format(**facts, **values), each.hint.format(**facts)
    return None


def refusal_of_shared(options: Options, id: str) -> tuple[str, str] | None:
    """Return text and hint for the first option that is refused with the queues in a shared directory; else None."""
    for name, entry in TABLE.items():
        value = getattr(options, name)
        if entry.shared is not None and _is_given(name, value):
            return (
                entry.shared.wrong.format(id=id, name=name, value=value),
                entry.shared.hint.format(name=name),
            )
    return None


def why_in_driver(options: Options) -> str | None:
    """Return why the driver of Spark calls a function, with the queues in a store; None if executors may call it."""
    reasons = (entry.in_driver for name, entry in TABLE.items() if _is_given(name, getattr(options, name)))
    return next(filter(None, reasons), None)


def ready_made(*groups: Ready) -> dict[str, Any]:
    """Return the options that groups of ready-made processors take, each with any value."""
    return {name: ... for name, entry in TABLE.items() if entry.ready in groups}


def _is_given(name: str, value: Any) -> bool:
    default = getattr(Options, name)
    return value is not None if default is None else bool(value != default)


Predicate = Callable[[Any], Any]
Queues = str | Sequence[str] | Mapping[str, str]
"""Queue names, or a dict {binding: queue}."""


class _Common(TypedDict, total=False):
    """Options of all processors."""

    opts: Any
    errors: str | None
    strategy: Strategy | None
    retries: int | Retry
    outage: Outage | str | float | timedelta
    batch_size: int
    renamed_from: str | None


class _Taking(_Common, total=False):
    """Options of all processors that read queues."""

    types: Collection[str] | Mapping[str, Collection[str]] | None
    topics: Collection[str] | Mapping[str, Collection[str]] | None
    where: Predicate | Mapping[str, Predicate] | None
    batch: bool | Literal["arrow", "pandas", "polars"]
    bisect: bool
    schema: Any
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
    schema: Any


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
    """The keyword arguments of :class:`Frame` and :meth:`Graph.frame` besides ``fields``."""

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
    conf: Mapping[str, str]
    sources: bool


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
    "frame": ("fields", *names_of(FrameOptions)),
    "sink": names_of(SinkOptions),
}
"""The options that a processor of each kind takes. The ``id`` of a source is its first argument."""

OPTION_TEXTS: Final = {name: OptionText(getattr(Options, name), entry.text) for name, entry in TABLE.items()}


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
        "The run waits while the disk of a store has less free space; a run that starts there stops with `DiskLow`."
        ' Bytes, or a size such as `"500MB"`; 0: never. None: 1 % of the disk, from 64 MiB to 1 GiB (of a small disk at'
        " most a tenth).",
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
    "conf": OptionText(
        None,
        'With Spark: its settings, as `{"spark.executor.memory": "2g"}`. A setting that Cues must set itself, or that'
        " your running session cannot change, is refused by name.",
    ),
    "sources": OptionText(True, "In this process: False runs no source; what is on the queues is processed."),
}
"""The options of :meth:`Graph.start` and :meth:`Graph.run`."""


def kinds(name: str) -> str:
    """Return the declarations that take an option, as docs/options.md shows them."""
    kinds = [kind for kind, allowed in ALLOWED.items() if name in allowed and (kind, name) != ("source", "id")]
    return "all" if len(kinds) == len(ALLOWED) else ", ".join(kinds)


def engines(name: str) -> str:
    """Return the engines that have an option, as docs/options.md shows them."""
    if kinds(name) == "frame":
        return "Spark"
    return "all" if TABLE[name].shared is None else "all, without `--queues`"
