"""Declarations of processors, and the ``process`` object that their functions see.

    Source(id, fn=None)                messages come in; its id is the queue that it feeds
    Stream(fn, inputs, outputs)        queues to queues
    Sink(fn, inputs)                   queues to outside

A declaration is plain data and is checked when it is made: what a function's parameters ask for and
what its options allow is said there, at the user's own line, not when the graph runs.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, Protocol

from cues import codec, names
from cues.errors import CodecError, GraphError, InvalidName

Function = Callable[..., Any]
Kind = Literal["source", "stream", "sink"]
STRATEGIES: Final = ("exactly-once", "at-most-once")
ACROSS: Final = ("forwarded", "pending")
"""How a stream's messages get to other stores."""
FRAME: Final = "frame"
"""The value of ``batch`` of a stage that is a function from DataFrame to DataFrame (:meth:`Graph.frame`)."""
FRAME_SIZE: Final = 50_000
"""Most messages of one DataFrame by default: each is a Spark job of half a second."""
BATCH_SIZE: Final = 1000
"""Most messages of one step by default; a step takes what is there and never waits for more."""

INHERIT: Final = "inherit"
"""The value of ``errors`` that means: as the graph says."""


class _Bound:
    """Queues by binding; positional queue names are bound under their own names."""

    def __init__(self, *queues: str, **bindings: str) -> None:
        for queue in queues:
            if queue in bindings or queues.count(queue) > 1:
                raise _wrong(
                    "",
                    f"{type(self).__name__} has two queues under the name {queue!r}.",
                    "another name for one of them.",
                )
        self.bindings: dict[str, str] = {**{queue: queue for queue in queues}, **bindings}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.bindings == other.bindings

    def __hash__(self) -> int:
        return hash(tuple(self.bindings.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.bindings.items())})"


class AnyOf(_Bound):
    """Inputs of which a step takes one message from any (alts): ``AnyOf(a="crawl-1", b="crawl-2")``.

    Positional queue names are bound under their own names. ``process.binding`` says which one the
    message came from. Fair: a busy input does not starve the others.
    """


class AllOf(_Bound):
    """Outputs that each get everything the function returns: ``AllOf("archive", "index")``.

    The function returns a message, a list of messages or None, as with one output. Each queue
    keeps a copy of its own. See :func:`cues.broadcast` for copying what comes in.
    """


@dataclass(frozen=True)
class Retry:
    """How often a failing function is called, and how long to wait in between.

    ``attempts`` counts all calls; the wait before retry k is ``backoff_s * 2**(k-1)``, at most
    ``max_s``; ``on`` limits it to some exceptions.
    """

    attempts: int = 1
    backoff_s: float = 0.1
    max_s: float = 30.0
    on: type[BaseException] | tuple[type[BaseException], ...] = Exception

    def wait_s(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        return float(min(self.max_s, self.backoff_s * 2.0 ** min(failures - 1, 60)))


class Target(Protocol):
    """What ``checkpoint=`` of a sink asks for: ``cues.checkpoints.SQLCheckpoint``, ``cues.processors.sql.SQLite``.

    ``transaction(process)`` gives a context manager: leaving it commits the user's writes together with
    a row for ``process.delivery``, an exception rolls both back. It refuses a delivery that is no longer the owner's
    (:class:`Fenced`), and raises :class:`CheckpointError` for a failure of the target itself. What it enters
    has a ``connection``, and ``known``: how many messages of the delivery, from its start, the target has.
    """

    def transaction(self, process: Any) -> AbstractContextManager[Any]:
        """See above."""


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
    fields: str | None = None
    batch_size: int = BATCH_SIZE
    key: str | Function | None = None
    instances: int = 1
    concurrency: int = 1
    side_effects: bool = False
    resume: str | None = None
    tailers: Any = None
    appenders: Any = None
    checkpoint: Target | None = None
    across: str = "forwarded"

    def given(self) -> dict[str, Any]:
        """What was asked for: the options that differ from their defaults, without ``id``."""
        found = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "id" and not (type(value) is type(field.default) and value == field.default):
                found[field.name] = value
        return found

    @property
    def retry(self) -> Retry:
        return self.retries if isinstance(self.retries, Retry) else Retry(self.retries + 1)


OPTION_NAMES: Final = tuple(field.name for field in fields(Options))

_ALLOWED: Final[dict[Kind, tuple[str, ...]]] = {
    "source": ("id", "opts", "errors", "strategy", "retries", "batch_size", "resume"),
    "stream": tuple(name for name in OPTION_NAMES if name not in ("resume", "checkpoint")),
    "sink": tuple(name for name in OPTION_NAMES if name not in ("resume", "appenders", "across")),
}


class Processor:
    """Base of the three declarations."""

    kind: Kind
    id: str
    fn: Function | None
    inputs: str | AnyOf | dict[str, str] | None
    outputs: str | AllOf | dict[str, str] | None
    options: Options

    def _options(self, options: dict[str, Any], id: str) -> Options:
        where = f"The {self.kind} {id!r}"
        for name in options:
            if name not in OPTION_NAMES:
                near = difflib.get_close_matches(name, OPTION_NAMES, 1)
                raise _wrong(
                    id,
                    f"{where} has no option {name!r}; it has {', '.join(_ALLOWED[self.kind])}.",
                    f"{near[0]}=" if near else "one of those.",
                )
            if name not in _ALLOWED[self.kind]:
                raise _wrong(id, f"{where} takes no option {name!r}.", f"one of {', '.join(_ALLOWED[self.kind])}.")
        found = Options(**options)
        if found.strategy not in (None, *STRATEGIES):
            raise _wrong(id, f"{where} has strategy {found.strategy!r}.", " or ".join(map(repr, STRATEGIES)) + ".")
        if not isinstance(found.retries, Retry) and (
            not isinstance(found.retries, int) or isinstance(found.retries, bool) or found.retries < 0
        ):
            raise _wrong(id, f"{where} has retries={found.retries!r}.", "a count from 0, or cues.Retry(...).")
        if found.retry.attempts < 1:
            raise _wrong(id, f"{where} makes {found.retry.attempts} attempts.", "attempts=1 or more.")
        check_retries(id, self.kind, found.strategy, found)
        if not isinstance(found.batch, bool) and found.batch != FRAME:
            raise _wrong(id, f"{where} has batch={found.batch!r}.", "True (lists of messages) or False.")
        if found.fields is not None and (not isinstance(found.fields, str) or found.batch != FRAME):
            raise _wrong(id, f"{where} has fields={found.fields!r}.", "@graph.frame(…, fields='name type, …').")
        if not isinstance(found.batch_size, int) or isinstance(found.batch_size, bool) or found.batch_size < 1:
            raise _wrong(id, f"{where} has batch_size={found.batch_size!r}.", "a count of messages from 1.")
        if not isinstance(found.concurrency, int) or isinstance(found.concurrency, bool) or found.concurrency < 1:
            raise _wrong(id, f"{where} has concurrency={found.concurrency!r}.", "a count of calls from 1.")
        if not isinstance(found.instances, int) or isinstance(found.instances, bool) or found.instances < 1:
            raise _wrong(id, f"{where} has instances={found.instances!r}.", "a count of threads from 1.")
        if found.concurrency > 1 and found.batch:
            raise _wrong(
                id,
                f"{where} has concurrency={found.concurrency} and is a batch function, which is called once a step.",
                "no concurrency=, or batch=False.",
            )
        if found.across not in ACROSS:
            raise _wrong(id, f"{where} has across={found.across!r}.", " or ".join(map(repr, ACROSS)) + ".")
        if found.resume not in (None, "skip", "again"):
            raise _wrong(id, f"{where} has resume={found.resume!r}.", "'skip' or 'again'.")
        if not (found.key is None or isinstance(found.key, str) or callable(found.key)):
            raise _wrong(id, f"{where} has key={found.key!r}.", "the name of a field, or a function of a message.")
        if found.errors is not None and found.errors != INHERIT:
            try:
                names.check("queue", found.errors)
            except InvalidName as error:
                raise _wrong(id, f"{where}, errors=: {error.message}", error.hint) from None
        return replace(
            found,
            tailers=_imperative(self, "tailers", found.tailers),
            appenders=_imperative(self, "appenders", found.appenders),
        )

    def __repr__(self) -> str:
        return f"<cues.{type(self).__name__} {self.id}>"


class Source(Processor):
    """Brings messages in. Its id is the queue that it feeds.

    ``fn(position)`` is called once a start with the position that its last commit left (None at
    first) and yields ``(position, message)``; the position commits with the messages, so a restart
    goes on where the queue ends. A function that yields bare messages must say what a restart
    means: ``resume="skip"`` (it yields the same again: as many as are committed are skipped) or
    ``resume="again"`` (at-least-once). It may be an async generator. Without a function the queue is fed
    by ``send``.
    """

    kind = "source"

    def __init__(self, id: str, fn: Function | None = None, **options: Any) -> None:
        self.id = names.check("queue", id)
        self.fn = fn
        self.inputs = None
        self.outputs = self.id
        self.options = self._options(options, self.id)
        if self.options.id not in (None, self.id):
            raise _wrong(
                self.id, f"The source {self.id!r} has id={self.options.id!r}; a source's id is its queue.", "no id=."
            )
        if fn is not None:
            _check_callable(self, fn)
            parameters = _parameters(fn)
            if parameters is not None:
                _check_process_behind(self, fn, parameters)
                extra = [p.name for p in _required(parameters) if p.name != "process"][1:]
                if extra:
                    raise _wrong(
                        self.id,
                        f"The function of source {self.id!r} asks for {', '.join(extra)}; a source gets its"
                        " position and, if it asks, `process`.",
                        f"def {getattr(fn, '__name__', 'f')}(position): ...",
                    )


class Stream(Processor):
    """Moves messages from queues to queues.

    ``inputs`` is a queue name (one message in), an :class:`AnyOf` (one message from any) or a dict
    of bindings (a join: one message from each, a parameter per binding). ``outputs`` is a queue
    name (the function returns a message, a list of messages or None), an :class:`AllOf` (the same,
    and each queue gets it) or a dict of bindings (it returns a dict by binding). A parameter
    called ``process`` gets the :class:`Process`.

    Over inputs with several partitions it runs as a unit for each, with positions and state of its own;
    ``instances=n`` divides the units over n threads (default: one steps them in turn), so the function must
    stand being called by several at once.

    ``async def`` functions run on an event loop that lives as long as the processor. With
    ``concurrency=n`` up to n calls run at once; outputs stay in input order.

    ``tailers={binding: queue}`` and ``appenders={binding: queue}`` (or queue names) make the function
    imperative: it may also read as it likes from ``process.tailers[binding]`` and write through
    ``process.appenders[binding]``, and ``outputs`` may be None. See :mod:`cues.imperative`.

    ``across="pending"``: what it writes to queues of other stores (errors too) goes there directly, pending until the
    step has committed, for readers of what is committed; by default it is forwarded. See :mod:`cues.pending`.
    """

    kind = "stream"

    def __init__(
        self,
        fn: Function,
        inputs: str | AnyOf | Mapping[str, str],
        outputs: str | AllOf | Mapping[str, str] | Iterable[str] | None,
        **options: Any,
    ) -> None:
        self.id = _id(self.kind, fn, options)
        self.fn = fn
        self.inputs = _inputs(self, inputs)
        self.options = self._options(options, self.id)
        self.outputs = _outputs(self, outputs)
        _check_callable(self, fn)
        _check_parameters(self, fn)
        _check_filters(self)
        _check_imperative(self, fn)
        _check_frame(self)


class Sink(Processor):
    """Takes messages out. What it does outside may be repeated after a crash; ``process.delivery`` tells.

    With ``checkpoint=SQLCheckpoint(…)`` it is exactly-once into that database: each call is one
    transaction there, ``process.connection``, which ends with the call and holds the position as well. What the
    database has already is not presented again. A call that raises is rolled back; a database that
    fails stops the sink, and nothing goes to the error queue.
    """

    kind = "sink"

    def __init__(self, fn: Function, inputs: str | AnyOf | Mapping[str, str], **options: Any) -> None:
        self.id = _id(self.kind, fn, options)
        self.fn = fn
        self.inputs = _inputs(self, inputs)
        self.outputs = None
        self.options = self._options(options, self.id)
        _check_callable(self, fn)
        _check_parameters(self, fn)
        _check_filters(self)
        _check_imperative(self, fn)
        _check_checkpoint(self, fn)


# --- resolved -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Port:
    """A binding and the queue behind it."""

    binding: str
    queue: str


Mode = Literal["one", "join", "alts"]


@dataclass(frozen=True)
class Node:
    """A processor as engines run it: every default resolved, nothing of it changes."""

    id: str
    """Processor id, ``graph.processor``."""
    kind: Kind
    fn: Function | None
    mode: Mode
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    returns_messages: bool
    """The function returns messages, which go to every output, and not a dict by binding."""
    errors: str | None
    strategy: str
    options: Options
    tailers: tuple[Port, ...] = ()
    """What the function reads by itself, besides its inputs."""
    appenders: tuple[Port, ...] = ()
    """What the function writes by itself, besides what it returns."""
    partition: int = 0
    """Of its inputs, that this unit of the processor reads."""

    def unit(self, partition: int) -> Node:
        """The part of the processor that works on one partition, with an owner and positions of its own."""
        return replace(self, id=names.log_id(self.id, partition), partition=partition)

    @property
    def processor(self) -> str:
        """The processor's id, whichever unit of it this is."""
        return self.id.rpartition("/")[0] if self.partition else self.id

    def tailer(self, queue: str) -> str:
        """The id of its position on a queue."""
        return names.tailer_id(self.processor, queue, self.partition)

    @property
    def imperative(self) -> bool:
        return bool(self.tailers or self.appenders)

    @property
    def reads(self) -> tuple[Port, ...]:
        """Every queue that it has a position on."""
        return self.inputs + self.tailers

    @property
    def writes(self) -> tuple[Port, ...]:
        """Every queue that it may write to, error queues aside."""
        return self.outputs + self.appenders

    @property
    def name(self) -> str:
        """Without the graph: ``enrich``, and ``enrich/3`` of its unit on partition 3."""
        return self.id.rpartition(".")[2]

    @property
    def side_effects(self) -> bool:
        """Whether a snapshot is committed before the function runs."""
        return self.kind == "sink" or (self.kind == "stream" and self.options.side_effects)

    @property
    def pending(self) -> bool:
        """Whether what it writes to other stores is pending there until its step has committed."""
        return self.options.across == "pending"

    @property
    def at_most_once(self) -> bool:
        return self.kind != "source" and self.strategy == "at-most-once"

    @property
    def guarantee(self) -> str:
        """What holds for this processor whatever is killed when, in one sentence."""
        if self.kind == "source":
            if self.fn is None:
                return "each send is one commit"
            if self.options.resume == "skip":
                return "exactly-once, if it yields the same messages at every start"
            if self.options.resume == "again":
                return "at-least-once: it begins anew at every start"
            return "exactly-once: its position commits with its messages"
        if self.at_most_once:
            return "at-most-once: a death loses at most one step"
        if self.options.checkpoint is not None:
            return "exactly-once: its target commits the position with the rows"
        if self.kind == "sink":
            return "at-least-once; exactly-once where the target keeps process.delivery"
        if self.side_effects:
            return "exactly-once outputs and state; its side effects at-least-once"
        return "exactly-once"

    def config(self) -> dict[str, Any]:
        """What an error message says of the processor: plain data that can be encoded."""
        options = self.options
        found: dict[str, Any] = {
            "id": self.id,
            "kind": self.kind,
            "function": function_name(self.fn),
            "inputs": {port.binding: port.queue for port in self.inputs},
            "outputs": {port.binding: port.queue for port in self.outputs},
            "errors": self.errors,
            "strategy": self.strategy,
            "batch": options.batch,
            "attempts": options.retry.attempts,
        }
        for name in ("tailers", "appenders"):
            if getattr(options, name):
                found[name] = dict(getattr(options, name))
        if options.opts is not None:
            try:
                codec.pack(options.opts)
                found["opts"] = options.opts
            except CodecError:
                found["opts"] = repr(options.opts)
        return found


def function_name(fn: Function | None) -> str | None:
    """``module:qualname``, the form in which graphs as plain data hold functions."""
    if fn is None:
        return None
    module = getattr(fn, "__module__", None) or "?"
    return f"{module}:{getattr(fn, '__qualname__', type(fn).__qualname__)}"


# --- checks -------------------------------------------------------------------------------------


def _wrong(processor: str, message: str, hint: str) -> GraphError:
    return GraphError(message, hint, processor=processor)


def check_retries(id: str, kind: Kind, strategy: str | None, options: Options) -> None:
    """Refuse retries under at-most-once; ``strategy`` may be the graph's. Sources have none."""
    if kind != "source" and strategy == "at-most-once" and options.retry.attempts > 1:
        raise _wrong(
            id,
            f"The {kind} {id!r} is at-most-once, which never calls a function twice, and has retries.",
            "retries=0, or strategy='exactly-once'.",
        )


def _id(kind: str, fn: Function, options: Mapping[str, Any]) -> str:
    id = options.get("id")
    if id is None:
        id = getattr(fn, "__name__", None)
        if id is None or id == "<lambda>":
            raise _wrong("", f"A {kind} whose function has no name ({fn!r}) needs an id.", "id='…'.")
    return names.check(kind, id)


def bindings(ports: str | AnyOf | AllOf | Mapping[str, str] | None) -> dict[str, str]:
    """Queue by binding, whatever the form."""
    if ports is None:
        return {}
    if isinstance(ports, str):
        return {ports: ports}
    return dict(ports.bindings if isinstance(ports, (AnyOf, AllOf)) else ports)


def _inputs(processor: Processor, inputs: Any) -> str | AnyOf | dict[str, str]:
    if not isinstance(inputs, (str, AnyOf, Mapping)):
        raise _wrong(
            processor.id,
            f"The inputs of {processor.id!r} are {type(inputs).__name__} ({inputs!r}).",
            "a queue name, cues.AnyOf(a=…, b=…), or a dict {binding: queue}.",
        )
    found = bindings(inputs)
    if not found:
        raise _wrong(processor.id, f"{processor.id!r} has no inputs.", "a queue name.")
    _check_bindings(processor, found)
    seen: dict[str, str] = {}
    for binding, queue in found.items():
        if queue in seen:
            raise _wrong(
                processor.id,
                f"{processor.id!r} reads the queue {queue!r} under two bindings, {seen[queue]!r} and {binding!r};"
                " a position is kept once a queue.",
                "one binding, or a second processor.",
            )
        seen[queue] = binding
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _outputs(processor: Processor, outputs: Any) -> str | AllOf | dict[str, str] | None:
    if processor.options.appenders and (outputs is None or outputs == () or outputs == [] or outputs == {}):
        return None
    if isinstance(outputs, (str, AllOf)):
        found: Any = outputs
    elif isinstance(outputs, Mapping):
        found = dict(outputs)
    elif isinstance(outputs, (list, tuple)):
        found = {queue: queue for queue in outputs}
    else:
        raise _wrong(
            processor.id,
            f"The outputs of {processor.id!r} are {type(outputs).__name__} ({outputs!r}).",
            "a queue name, cues.AllOf('a', 'b'), a dict {binding: queue}, or None with appenders=.",
        )
    queues = bindings(found)
    if not queues:
        raise _wrong(processor.id, f"{processor.id!r} has no outputs.", "a queue name, appenders=, or a Sink.")
    _check_bindings(processor, queues)
    if isinstance(found, AllOf):
        for queue in queues.values():
            if list(queues.values()).count(queue) > 1:
                raise _wrong(
                    processor.id,
                    f"{processor.id!r} writes every message to the queue {queue!r} twice.",
                    "each queue once.",
                )
    return found  # type: ignore[no-any-return]


def _imperative(processor: Processor, option: str, value: Any) -> dict[str, str] | None:
    """``tailers`` or ``appenders`` as queue by binding."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        pairs = [(queue, queue) for queue in value]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise _wrong(
            processor.id,
            f"{option}= of {processor.id!r} is {type(value).__name__} ({value!r}).",
            "a dict {binding: queue}, or queue names.",
        )
    found: dict[str, str] = {}
    for binding, queue in pairs:
        _check_bindings(processor, {binding: queue})
        if queue in found.values():
            raise _wrong(processor.id, f"{option}= of {processor.id!r} names the queue {queue!r} twice.", "it once.")
        found[binding] = queue
    return found or None


def _check_imperative(processor: Processor, fn: Function) -> None:
    options = processor.options
    if not (options.tailers or options.appenders):
        return
    inputs = {queue: binding for binding, queue in bindings(processor.inputs).items()}
    for queue in (options.tailers or {}).values():
        if queue in inputs:
            raise _wrong(
                processor.id,
                f"{processor.id!r} reads the queue {queue!r} as input {inputs[queue]!r} and in tailers=;"
                " a position is kept once a queue.",
                "one of both, or a second processor.",
            )
    options_given = " and ".join(f"{name}=" for name in ("tailers", "appenders") if getattr(options, name))
    if options.concurrency > 1:
        raise _wrong(
            processor.id,
            f"{processor.id!r} has concurrency={options.concurrency} and {options_given}: what calls that run at once"
            " read and write by themselves has no order.",
            "concurrency=1.",
        )
    if not wants_process(fn) and _parameters(fn) is not None:
        raise _wrong(
            processor.id,
            f"{processor.id!r} has {options_given}, and its function has no parameter 'process' to use them by.",
            f"def {getattr(fn, '__name__', 'f')}(…, process): …",
        )


def _check_bindings(processor: Processor, found: Mapping[str, str]) -> None:
    for binding, queue in found.items():
        try:
            names.check("binding", binding)
            names.check("queue", queue)
        except InvalidName as error:
            raise _wrong(processor.id, f"{processor.id!r}: {error.message}", error.hint) from None


def _check_callable(processor: Processor, fn: object) -> None:
    if not callable(fn):
        raise _wrong(
            processor.id,
            f"The function of {processor.id!r} is {type(fn).__name__} ({fn!r}), which cannot be called.",
            "a function.",
        )
    if processor.kind == "source" and inspect.iscoroutinefunction(fn):
        raise _wrong(
            processor.id, f"The source {processor.id!r} is `async def` and yields nothing.", "yield position, message."
        )
    if processor.kind != "source" and (inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)):
        raise _wrong(
            processor.id,
            f"The function of {processor.id!r} is a generator; only sources yield.",
            "return a list of messages.",
        )


def _parameters(fn: Function) -> list[inspect.Parameter] | None:
    """The parameters, or None where Python cannot tell (some builtins)."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _required(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind not in _VARIADIC and p.default is inspect.Parameter.empty]


def wants_process(fn: Function) -> bool:
    """Whether the function has a parameter called ``process``."""
    parameters = _parameters(fn)
    return parameters is not None and any(p.name == "process" and p.kind not in _VARIADIC for p in parameters)


def positional_order(fn: Function, bindings: Sequence[str]) -> list[int] | None:
    """The places in ``bindings`` of the function's first parameters, if it can be called with all by position."""
    parameters = (_parameters(fn) or [])[: len(bindings)]
    if {p.name for p in parameters} != set(bindings) or any(p.kind != p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    return [bindings.index(p.name) for p in parameters]


def position_count(fn: Function) -> int:
    """How many positional parameters a source's function has besides ``process``: 0 or 1."""
    parameters = _parameters(fn)
    if parameters is None:
        return 1
    plain = [p for p in parameters if p.name != "process" and p.kind not in _VARIADIC]
    return min(1, len(plain)) if not any(p.kind == _VARIADIC[0] for p in parameters) else 1


def _check_process_behind(processor: Processor, fn: Function, parameters: list[inspect.Parameter]) -> None:
    """What is passed by place comes first, so ``process`` cannot."""
    if len(parameters) > 1 and parameters[0].name == "process" and parameters[0].kind is not _KEYWORD_ONLY:
        rest = ", ".join(p.name for p in parameters[1:])
        raise _wrong(
            processor.id,
            f"The first parameter of the function of {processor.id!r} is 'process', where"
            f" {parameters[1].name!r} should stand.",
            f"def {getattr(fn, '__name__', 'f')}({rest}, process): …",
        )


def _check_parameters(processor: Processor, fn: Function) -> None:
    parameters = _parameters(fn)
    if parameters is None:
        return
    here = f"The function of {processor.id!r}"
    if isinstance(processor.inputs, dict):
        found = bindings(processor.inputs)
        named = [p.name for p in parameters if p.kind not in _VARIADIC and p.name != "process"]
        for parameter in _required(parameters):
            if parameter.name != "process" and parameter.name not in found:
                near = difflib.get_close_matches(parameter.name, found, 1)
                raise _wrong(
                    processor.id,
                    f"{here} has a parameter {parameter.name!r} that names no binding; its inputs are"
                    f" {', '.join(map(repr, found))}.",
                    f"{near[0] if near else next(iter(found))!r}.",
                )
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise _wrong(
                    processor.id,
                    f"{here} takes {parameter.name!r} by place only; bindings are passed by name.",
                    "no '/'.",
                )
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            for binding in found:
                if binding not in named:
                    raise _wrong(
                        processor.id,
                        f"{here} has no parameter for the binding {binding!r}; it has"
                        f" {', '.join(map(repr, named)) or 'none'}.",
                        f"def {getattr(fn, '__name__', 'f')}({', '.join(found)}): …"
                        if all(b.isidentifier() for b in found)
                        else "binding names that are Python names.",
                    )
        return
    plain = [p for p in parameters if p.kind not in _VARIADIC and p.name != "process"]
    if not plain and not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        raise _wrong(
            processor.id, f"{here} has no parameter for the message.", f"def {getattr(fn, '__name__', 'f')}(message): …"
        )
    _check_process_behind(processor, fn, parameters)
    extra = [p.name for p in _required(parameters) if p.name != "process"][1:]
    if extra:
        raise _wrong(
            processor.id,
            f"{here} asks for {', '.join(map(repr, extra))} besides the message; with one input it gets the"
            " message and, if it asks, `process`.",
            "process.opts, process.system, or a dict of inputs for a join.",
        )


def _check_frame(processor: Processor) -> None:
    """What a stage for Spark cannot have besides its DataFrames."""
    options = processor.options
    if options.batch != FRAME:
        return
    if not isinstance(processor.inputs, str) or not isinstance(processor.outputs, str):
        raise _wrong(
            processor.id,
            f"The frame {processor.id!r} goes from {processor.inputs!r} to {processor.outputs!r}.",
            "one queue in, one queue out.",
        )
    unfit = ("types", "topics", "where", "key", "tailers", "appenders", "side_effects")
    for name in unfit:
        if name in options.given():
            raise _wrong(processor.id, f"The frame {processor.id!r} has {name}=.", "that inside the DataFrame.")
    if options.strategy == "at-most-once":
        raise _wrong(processor.id, f"The frame {processor.id!r} is at-most-once.", "exactly-once, which it is anyway.")


def _check_checkpoint(processor: Processor, fn: Function) -> None:
    """What a sink that keeps its position in its target cannot be besides."""
    options = processor.options
    if options.checkpoint is None:
        return
    here = f"The sink {processor.id!r} has checkpoint="
    if isinstance(options.checkpoint, type) or not callable(getattr(options.checkpoint, "transaction", None)):
        raise _wrong(
            processor.id,
            f"{here}{options.checkpoint!r}, which is no object with transaction(process).",
            "cues.checkpoints.SQLCheckpoint(…), or cues.processors.sql.SQLite(…).",
        )
    if inspect.iscoroutinefunction(fn):
        raise _wrong(processor.id, f"{here} and is `async def`; the transaction is not.", "def.")
    if options.concurrency > 1:
        raise _wrong(
            processor.id,
            f"{here} and concurrency={options.concurrency}: one written early would hide those before it.",
            "concurrency=1, and batch=True.",
        )
    if options.strategy == "at-most-once":
        raise _wrong(processor.id, f"{here} and is at-most-once, which repeats nothing.", "exactly-once.")
    if options.tailers:
        raise _wrong(
            processor.id,
            f"{here} and tailers=: what the function reads by itself is in no delivery.",
            "inputs only.",
        )
    if not wants_process(fn):
        raise _wrong(
            processor.id,
            f"{here}, and its function has no parameter 'process' to reach the transaction by.",
            f"def {getattr(fn, '__name__', 'f')}(…, process): process.connection.execute(…).",
        )


def _check_filters(processor: Processor) -> None:
    found = bindings(processor.inputs)
    for name in ("types", "topics", "where"):
        value = getattr(processor.options, name)
        if isinstance(value, Mapping):
            for binding in value:
                if binding not in found:
                    near = difflib.get_close_matches(str(binding), found, 1)
                    raise _wrong(
                        processor.id,
                        f"{name}= of {processor.id!r} names {binding!r}, which is no input; there are"
                        f" {', '.join(map(repr, found))}.",
                        f"{near[0] if near else next(iter(found))!r}.",
                    )
        if name == "where":
            for one in value.values() if isinstance(value, Mapping) else [value]:
                if one is not None and not callable(one):
                    raise _wrong(processor.id, f"where= of {processor.id!r} is {one!r}.", "a function of a message.")


Filter = Callable[[dict[str, Any]], bool]


def filter_of(options: Options, binding: str) -> Filter | None:
    """One predicate from ``types``, ``topics`` and ``where`` for one input; None lets all through."""
    types = _names_of(_for(options.types, binding))
    topics = _names_of(_for(options.topics, binding))
    where = _for(options.where, binding)
    if types is None and topics is None and where is None:
        return None

    def passes(message: dict[str, Any]) -> bool:
        # The message's type is one of those asked for,
        if types is not None and message.get(names.TYPE) not in types:
            return False
        # it has at least one of the topics asked for,
        if topics is not None:
            found = message.get(names.TOPICS) or ()
            if topics.isdisjoint((found,) if isinstance(found, str) else found):
                return False
        # and the user's own predicate says yes.
        return where is None or bool(where(message))

    return passes


def _for(option: Any, binding: str) -> Any:
    return option.get(binding) if isinstance(option, Mapping) else option


def _names_of(option: Any) -> frozenset[Any] | None:
    if option is None:
        return None
    return frozenset((option,) if isinstance(option, str) else option)
