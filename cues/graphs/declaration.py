"""Declarations of processors: sources, streams, frames and sinks.

    Source(id, fn=None)                messages come in; its id is the queue that it feeds
    Stream(fn, inputs, outputs)        queues to queues
    Frame(fn, inputs, outputs)         queues to a queue, from DataFrame to DataFrame on Spark
    Sink(fn, inputs)                   queues to outside

A declaration is plain data. It is checked when it is made: wrong parameters of the function and wrong
options raise at the user's own line, not when the graph runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Unpack

from cues.base import names
from cues.base.checks import nearest
from cues.errors import GraphError, InvalidArgument, InvalidName
from cues.graphs import typed
from cues.graphs.options import (
    ALLOWED,
    FRAME_SIZE,
    OPTION_NAMES,
    TABLES,
    FrameOptions,
    Function,
    Kind,
    Options,
    SinkOptions,
    SourceOptions,
    StreamOptions,
    lists_options,
    refusal_of,
)
from cues.graphs.processor import VARIADIC, is_expression, parameters_of, position_count, wants_process
from cues.overrides import override


class _Bound:
    """Queues by binding; positional queue names are bound under their own names."""

    def __init__(self, *queues: str, **bindings: str) -> None:
        for queue in (*queues, *bindings.values()):
            if not isinstance(queue, str):
                raise GraphError(
                    f"{type(self).__name__} has {queue!r:.60}, a {type(queue).__name__}.", "give names of queues."
                )
        for queue in queues:
            if queue in bindings or queues.count(queue) > 1:
                raise GraphError(
                    f"{type(self).__name__} has two queues under the name {queue!r}.", "give one of them another name."
                )
        self.bindings: dict[str, str] = {**{queue: queue for queue in queues}, **bindings}

    @override
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.bindings == other.bindings

    @override
    def __hash__(self) -> int:
        return hash(tuple(self.bindings.items()))

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.bindings.items())})"


class AnyOf(_Bound):
    """Several inputs; a message can come from any of them: ``AnyOf(a="crawl-1", b="crawl-2")``.

    Positional queue names are bound under their own names. ``process.binding`` is the input of the
    message. Fair: a busy input does not starve the others.
    """


class AllOf(_Bound):
    """Outputs that all get every message of the function: ``AllOf("archive", "index")``.

    The function returns a message, a list of messages or None, as with one output. Each queue
    keeps its own copy. See :func:`cues.broadcast` for copies of the input.
    """


class Processor:
    """Base of the four declarations."""

    kind: Kind
    instead = ""
    """The way to do what options of other kinds do."""
    id: str
    fn: Function | None
    inputs: str | AnyOf | dict[str, str] | None
    outputs: str | AllOf | dict[str, str] | None
    options: Options

    def _wrong(self, message: str, hint: str) -> GraphError:
        return GraphError(message, hint, processor=self.id)

    def _check_name(self, kind: str, name: str, where: str) -> str:
        try:
            return names.check(kind, name)
        except InvalidName as error:
            raise self._wrong(f"{where}: {error.message}", error.hint) from None

    def _options(self, options: Mapping[str, Any]) -> Options:
        where, allowed = f"The {self.kind} {self.id!r}", ", ".join(ALLOWED[self.kind])
        for name in options:
            if name not in OPTION_NAMES:
                raise self._wrong(
                    f"{where} has no option {name!r}; it has {allowed}.",
                    nearest(name, OPTION_NAMES, "use {}= instead.", "use one of those."),
                )
            if name not in ALLOWED[self.kind]:
                raise self._wrong(f"{where} takes no option {name!r}.", f"use one of {allowed}{self.instead}.")
        self._check_taken(options)
        given = Options(**options)
        given = replace(
            given,
            tailers=_imperative(self, "tailers", given.tailers),
            appenders=_imperative(self, "appenders", given.appenders),
        )
        self._check_options(given)
        if given.renamed_from == self.id:
            hint = "give the name that it had before, or leave it out."
            raise self._wrong(f"{where} has renamed_from={self.id!r}.", hint)
        return given

    def given(self) -> dict[str, Any]:
        """Return the options without ``id`` that make this declaration again."""
        return self.options.given()

    def _check_options(self, options: Options) -> None:
        refusal = refusal_of(options, self.kind, self.id)
        if refusal is not None:
            raise self._wrong(*refusal)

    def _check_taken(self, options: Mapping[str, Any]) -> None:
        """Refuse options that a ready-made function does not take, by its attribute ``takes``.

        ``takes`` is a dict: the name of each option that the function takes, and the value that it needs, or its class;
        ``...`` if it takes every value.
        """
        takes: Any = getattr(self.fn, "takes", None)
        for name, value in options.items() if isinstance(takes, Mapping) else ():
            default = getattr(Options, name)
            need = takes.get(name, default)
            if need is ... or value is need or (type(value) is type(need) and value == need):
                continue
            if isinstance(need, type) and isinstance(value, need):
                continue
            here = f"The ready-made function of the {self.kind} {self.id!r}"
            if name in takes:
                shown = "True or False" if need is bool else getattr(need, "__name__", repr(need))
                raise self._wrong(f"{here} needs {name}={shown}, and was given {value!r}.", f"leave {name}= out.")
            raise self._wrong(
                f"{here} takes no option {name!r}; it takes {', '.join(sorted(takes))}.",
                f"leave {name}= out; a stream of your own before it or after it can have it.",
            )

    def _check_schema(self) -> None:
        """Refuse a schema that cannot be compiled, and inputs that cannot be a table."""
        options, here = self.options, f"The {self.kind} {self.id!r}"
        if options.batch in TABLES and not isinstance(self.inputs, (str, AnyOf)):
            raise self._wrong(
                f"{here} is a join and has batch={options.batch!r}, which gives a table of one input.",
                "read one queue, or cues.AnyOf(…); or set batch=True.",
            )
        try:
            typed.check(options, self.fn, bindings(self.inputs), isinstance(self.inputs, dict))
        except InvalidArgument as error:
            raise self._wrong(f"{here}: {error.message}", error.hint) from None

    def set_timer(self, fn: Function) -> None:
        """Declare the function of its timers (:meth:`Graph.timer`)."""
        self._check_taken({"timer": fn})
        before, self.options = self.options, replace(self.options, timer=fn)
        try:
            _check_timer(self)
            self._check_options(self.options)
        except BaseException:
            self.options = before
            raise

    @override
    def __repr__(self) -> str:
        return f"<cues.{type(self).__name__} {self.id}>"


@lists_options(SourceOptions)
class Source(Processor):
    """Bring messages in. The id of a source is the queue that it feeds.

    ``fn(position)`` is called once for each start, with the position of the last commit (None for the first start),
    and yields ``(position, message)``. The position is committed together with the messages, so a restart continues
    after the last committed message. A function that yields bare messages needs ``resume="skip"`` (it yields the same
    messages again, and those that are committed are skipped) or ``resume="again"`` (at-least-once). It can be an async
    generator. ``yield position, None`` moves the position without a message. A source that waits for something calls
    ``process.wait(seconds)``. Ready-made sources are :func:`cues.every`, :func:`cues.cron` and those of
    :mod:`cues.processors`. Without a function the queue is fed by ``send``.

    An object with a method ``committed(position)`` is a function that is told of each commit: after it, in another
    thread, with the position of the last message. So it can acknowledge messages where they came from.
    """

    kind = "source"

    def __init__(self, id: str, fn: Function | None = None, **options: Unpack[SourceOptions]) -> None:
        self.id = names.check("queue", id)
        self.fn = fn
        self.inputs = None
        self.outputs = self.id
        self.options = self._options(options)
        if self.options.id not in (None, self.id):
            raise self._wrong(
                f"The source {self.id!r} has id={self.options.id!r}; a source's id is its queue.", "leave id= out."
            )
        self._check_schema()
        if fn is not None:
            _check_callable(self, fn)
            extra = _required_after_first(self, fn, parameters_of(fn) or [])
            if extra:
                raise self._wrong(
                    f"The function of source {self.id!r} asks for {', '.join(extra)}; a source gets its position and,"
                    " if it asks, `process`.",
                    f"write {_def(fn, 'position')}",
                )
            if not position_count(fn) and self.options.resume is None:
                raise self._wrong(
                    f"The function of source {self.id!r} takes no position, so every start would write all its"
                    " messages again.",
                    f"write {_def(fn, 'position')}, with `yield position, message`; or give resume='skip' (it yields"
                    " the same messages again, and those that are committed are skipped: exactly-once); or"
                    " resume='again' (at-least-once).",
                )


@lists_options(StreamOptions)
class Stream(Processor):
    """Move messages from queues to queues.

    ``inputs`` is a queue name (one message in), an :class:`AnyOf` (one message from any) or a dict of bindings (a join:
    one message from each, a parameter per binding). ``outputs`` is a queue name (the function returns a message, a list
    of messages or None), an :class:`AllOf` (the same, and each queue gets it) or a dict of bindings (it returns a dict
    by binding). A parameter called ``process`` gets the :class:`Process`.

    Over inputs with several partitions it runs as one unit for each partition, with its own positions and state.
    ``instances=n`` divides the units over n threads (default: one thread runs them in turn); the function must then be
    safe to call from several threads at once.

    A step takes up to ``batch_size`` messages (1,000), and ends when its calls have taken ``step_s`` seconds (0.25;
    None: no limit). A batch function gets as many messages as it can process in that time; with ``linger_s`` it waits
    up to that many seconds for ``batch_size`` messages. See docs/guarantees.md, "How many messages a step takes".

    A batch function that fails, and has an error queue, is called again with the halves of its batch, until the
    messages that fail alone are known; only these are error messages. Each half is a step of its own. ``bisect=False``
    makes the whole batch one error message. See docs/how-to/errors.md, "Batch functions".

    ``async def`` functions run on an event loop that lives as long as the processor. With
    ``concurrency=n`` up to n calls run at once; outputs stay in input order.

    ``timeout_s=`` is the longest time of one call, in seconds: a longer call counts as a failed attempt
    (:class:`CallTimedOut`). An ``async def`` is then cancelled; a plain function continues in its thread, and its
    result is dropped.

    ``tailers={binding: queue}`` and ``appenders={binding: queue}`` (or queue names) make the function
    imperative: it can also read from ``process.tailers[binding]`` at any time, and write with
    ``process.appenders[binding]``, and ``outputs`` may be None. See :mod:`cues.steps.imperative`.

    With ``across="pending"`` its messages to queues of other stores (error messages too) are written there directly,
    and are pending until the step has committed; readers of committed messages do not see them before. By default they
    are forwarded after the commit. See :mod:`cues.steps.pending`.
    """

    kind = "stream"

    def __init__(
        self,
        fn: Function,
        inputs: str | AnyOf | Mapping[str, str],
        outputs: str | AllOf | Mapping[str, str] | Iterable[str] | None,
        **options: Unpack[StreamOptions],
    ) -> None:
        self.id = _id(self.kind, fn, options)
        self.fn = fn
        self.inputs = _inputs(self, inputs)
        self.options = self._options(options)
        self.outputs = _outputs(self, outputs)
        _check_callable(self, fn)
        _check_parameters(self, fn)
        _check_filters(self)
        _check_imperative(self, fn)
        self._check_schema()
        _check_timer(self)


@lists_options(FrameOptions)
class Frame(Processor):
    """Move messages from queues to a queue on Spark, by a function from DataFrame to DataFrame.

    ``inputs`` is a queue name, or a dict of bindings: the function gets a DataFrame for each. ``fields`` are the
    columns of the DataFrame besides ``index``, ``time``, ``hash`` and ``value``; a dict gives them by binding.
    ``batch_size`` is 50,000 by default. See :meth:`Graph.frame`.
    """

    kind = "frame"
    instead = "; the function does everything else with its DataFrame"

    def __init__(
        self,
        fn: Function,
        inputs: str | Mapping[str, str],
        outputs: str,
        fields: str | Mapping[str, str] | None = None,
        **options: Unpack[FrameOptions],
    ) -> None:
        self.id = _id(self.kind, fn, options)
        self.fn = fn
        self.inputs = _inputs(self, inputs)
        self.options = self._options({"batch_size": FRAME_SIZE, "fields": fields, **options})
        self.outputs = _outputs(self, outputs)
        _check_callable(self, fn)
        _check_parameters(self, fn)
        here, read = f"The frame {self.id!r}", bindings(self.inputs)
        if isinstance(self.inputs, AnyOf) or not isinstance(self.outputs, str):
            raise self._wrong(
                f"{here} reads {self.inputs!r} and writes {self.outputs!r}.",
                "give one queue as input, or a dict {binding: queue}, and one queue as output.",
            )
        unknown = [name for name in fields if name not in read] if isinstance(fields, Mapping) else []
        if unknown:
            raise self._wrong(
                f"{here} has fields= of {', '.join(map(repr, unknown))}, which it does not read.",
                f"name bindings: {', '.join(map(repr, read))}.",
            )

    @override
    def given(self) -> dict[str, Any]:
        return {**super().given(), "batch_size": self.options.batch_size}


@lists_options(SinkOptions)
class Sink(Processor):
    """Take messages out. Effects outside the store can be repeated after a crash; ``process.delivery`` identifies them.

    With ``checkpoint=SQLCheckpoint(…)`` it is exactly-once into that database: each call is one
    transaction of the database, ``process.connection``, which ends with the call and also holds the position. Messages
    that the database already has are not delivered again. A call that raises is rolled back. A failure of the database
    stops the sink, and nothing is written to the error queue.
    """

    kind = "sink"

    def __init__(self, fn: Function, inputs: str | AnyOf | Mapping[str, str], **options: Unpack[SinkOptions]) -> None:
        self.id = _id(self.kind, fn, options)
        self.fn = fn
        self.inputs = _inputs(self, inputs)
        self.outputs = None
        self.options = self._options(options)
        _check_callable(self, fn)
        _check_parameters(self, fn)
        _check_filters(self)
        _check_imperative(self, fn)
        _check_checkpoint(self, fn)
        self._check_schema()
        _check_timer(self)


DECLARATIONS: Final[dict[Kind, Any]] = {each.kind: each for each in (Source, Stream, Frame, Sink)}
"""The class of each kind."""


# --- checks -------------------------------------------------------------------------------------


def _id(kind: str, fn: Function, options: Mapping[str, Any]) -> str:
    id = options.get("id")
    if id is None:
        id = getattr(fn, "__name__", None)
        if id is None or id == "<lambda>":
            raise GraphError(f"A {kind} whose function has no name ({fn!r}) needs an id.", "give it with id='…'.")
    return names.check(kind, id)


def bindings(ports: str | AnyOf | AllOf | Mapping[str, str] | None) -> dict[str, str]:
    """Return the queues by binding, from any form of inputs or outputs."""
    if ports is None:
        return {}
    if isinstance(ports, str):
        return {ports: ports}
    return dict(ports.bindings if isinstance(ports, (AnyOf, AllOf)) else ports)


def _inputs(processor: Processor, inputs: Any) -> str | AnyOf | dict[str, str]:
    if not isinstance(inputs, (str, AnyOf, Mapping)):
        raise processor._wrong(
            f"The inputs of {processor.id!r} are {type(inputs).__name__} ({inputs!r}).",
            "give a queue name, cues.AnyOf(a=…, b=…), or a dict {binding: queue}.",
        )
    queues = bindings(inputs)
    if not queues:
        raise processor._wrong(f"{processor.id!r} has no inputs.", "give a queue name.")
    _check_bindings(processor, queues)
    seen: dict[str, str] = {}
    for binding, queue in queues.items():
        first = seen.setdefault(queue, binding)
        if first != binding:
            raise processor._wrong(
                f"{processor.id!r} reads the queue {queue!r} under two bindings, {first!r} and {binding!r};"
                " a processor has one position on a queue.",
                "use one binding, or a second processor.",
            )
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _outputs(processor: Processor, outputs: Any) -> str | AllOf | dict[str, str] | None:
    if processor.options.appenders and outputs in (None, (), [], {}):
        return None
    if isinstance(outputs, (str, AllOf)):
        ports: Any = outputs
    elif isinstance(outputs, Mapping):
        ports = dict(outputs)
    elif isinstance(outputs, (list, tuple)):
        ports = {processor._check_name("queue", queue, repr(processor.id)): queue for queue in outputs}
    else:
        raise processor._wrong(
            f"The outputs of {processor.id!r} are {type(outputs).__name__} ({outputs!r}).",
            "give a queue name, cues.AllOf('a', 'b'), a dict {binding: queue}, or None with appenders=.",
        )
    queues = bindings(ports)
    if not queues:
        raise processor._wrong(
            f"{processor.id!r} has no outputs.", "give a queue name or appenders=, or declare a Sink."
        )
    _check_bindings(processor, queues)
    for queue in queues.values() if isinstance(ports, AllOf) else ():
        if list(queues.values()).count(queue) > 1:
            raise processor._wrong(
                f"{processor.id!r} writes every message to the queue {queue!r} twice.", "name each queue once."
            )
    return ports  # type: ignore[no-any-return]


def _imperative(processor: Processor, option: str, value: Any) -> dict[str, str] | None:
    """``tailers`` or ``appenders`` as queue by binding."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        pairs = [(processor._check_name("queue", queue, f"{option}= of {processor.id!r}"), queue) for queue in value]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise processor._wrong(
            f"{option}= of {processor.id!r} is {type(value).__name__} ({value!r}).",
            "give a dict {binding: queue}, or queue names.",
        )
    queues: dict[str, str] = {}
    for binding, queue in pairs:
        _check_bindings(processor, {binding: queue})
        if queue in queues.values():
            twice = f"{option}= of {processor.id!r} names the queue {queue!r} twice."
            raise processor._wrong(twice, "name each queue once.")
        queues[binding] = queue
    return queues or None


def _check_imperative(processor: Processor, fn: Function) -> None:
    options = processor.options
    if not (options.tailers or options.appenders):
        return
    inputs = {queue: binding for binding, queue in bindings(processor.inputs).items()}
    for queue in (options.tailers or {}).values():
        if queue in inputs:
            raise processor._wrong(
                f"{processor.id!r} reads the queue {queue!r} as input {inputs[queue]!r} and in tailers=;"
                " a processor has one position on a queue.",
                "use one of the two, or a second processor.",
            )
    options_given = " and ".join(f"{name}=" for name in ("tailers", "appenders") if getattr(options, name))
    if not wants_process(fn) and parameters_of(fn) is not None:
        raise processor._wrong(
            f"{processor.id!r} has {options_given}, but its function has no parameter 'process' with which to use"
            " them.",
            f"write {_def(fn, '…, process')}",
        )


def _check_bindings(processor: Processor, queues: Mapping[str, str]) -> None:
    for binding, queue in queues.items():
        processor._check_name("binding", binding, repr(processor.id))
        processor._check_name("queue", queue, repr(processor.id))


def _check_callable(processor: Processor, fn: object) -> None:
    if not callable(fn):
        raise processor._wrong(
            f"The function of {processor.id!r} is {type(fn).__name__} ({fn!r}), which cannot be called.",
            "give a function.",
        )
    if processor.kind == "source" and inspect.iscoroutinefunction(fn):
        raise processor._wrong(
            f"The source {processor.id!r} is `async def` and yields nothing.",
            "declare it with def or as an async generator, and yield position, message.",
        )
    if processor.kind != "source" and (inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)):
        raise processor._wrong(
            f"The function of {processor.id!r} is a generator; only sources yield.", "return a list of messages."
        )


def _def(fn: Function, parameters: str, body: str = "…") -> str:
    """The function declaration for the hint of an error."""
    return f"def {getattr(fn, '__name__', 'f')}({parameters}): {body}"


def _required(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind not in VARIADIC and p.default is inspect.Parameter.empty]


def _required_after_first(processor: Processor, fn: Function, parameters: list[inspect.Parameter]) -> list[str]:
    """Return the required parameters after the first. Refuse ``process`` as the first, which is passed by position."""
    rest = [p.name for p in parameters[1:]]
    if rest and parameters[0].name == "process" and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY:
        raise processor._wrong(
            f"The first parameter of the function of {processor.id!r} is 'process', but {rest[0]!r} is expected first.",
            f"write {_def(fn, ', '.join([*rest, 'process']))}",
        )
    return [p.name for p in _required(parameters) if p.name != "process"][1:]


def _check_parameters(processor: Processor, fn: Function) -> None:
    parameters = parameters_of(fn)
    if parameters is None:
        return
    here = f"The function of {processor.id!r}"
    plain = [p.name for p in parameters if p.kind not in VARIADIC and p.name != "process"]
    kinds = {p.kind for p in parameters}
    inputs = processor.inputs
    if not isinstance(inputs, dict):
        if not plain and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise processor._wrong(f"{here} has no parameter for the message.", f"write {_def(fn, 'message')}")
        extra = _required_after_first(processor, fn, parameters)
        if extra:
            raise processor._wrong(
                f"{here} asks for {', '.join(map(repr, extra))} besides the message; with one input it gets the"
                " message and, if it asks, `process`.",
                "use process.opts, process.system, or a dict of inputs for a join.",
            )
        return
    for parameter in _required(parameters):
        if parameter.name != "process" and parameter.name not in inputs:
            raise processor._wrong(
                f"{here} has a parameter {parameter.name!r} that names no binding; its inputs are"
                f" {', '.join(map(repr, inputs))}.",
                f"rename it to {nearest(parameter.name, inputs, '{!r}', repr(next(iter(inputs))))}.",
            )
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise processor._wrong(
                f"{here} takes {parameter.name!r} by position only; bindings are passed by name.", "remove the '/'."
            )
    for binding in inputs if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if binding not in plain:
            raise processor._wrong(
                f"{here} has no parameter for the binding {binding!r}; it has {', '.join(map(repr, plain)) or 'none'}.",
                f"write {_def(fn, ', '.join(inputs))}"
                if all(b.isidentifier() for b in inputs)
                else "use binding names that are Python names.",
            )


def _check_checkpoint(processor: Processor, fn: Function) -> None:
    """Refuse a function that a sink with ``checkpoint=`` cannot have."""
    options = processor.options
    if options.checkpoint is None:
        return
    here = f"The sink {processor.id!r} has checkpoint="
    if inspect.iscoroutinefunction(fn):
        raise processor._wrong(
            f"{here} and is `async def`; a transaction needs a plain function.", "declare it with def."
        )
    if not wants_process(fn):
        raise processor._wrong(
            f"{here}, but its function has no parameter 'process', through which it uses the transaction.",
            f"write {_def(fn, '…, process', 'process.connection.execute(…).')}",
        )


def _check_timer(processor: Processor) -> None:
    """Refuse a function that is not one for timers."""
    fn = processor.options.timer
    if fn is None:
        return
    here = f"The {processor.kind} {processor.id!r} has timer="
    if "timer" not in ALLOWED[processor.kind]:
        raise processor._wrong(f"{here}, and is a {processor.kind}.", "set timers in a stream that reads its queue.")
    parameters = parameters_of(fn)
    if parameters is not None and (not parameters or _required_after_first(processor, fn, parameters)):
        raise processor._wrong(
            f"{here}{getattr(fn, '__name__', fn)!r}, whose parameters are not a timer and `process`.",
            f"write {_def(fn, 'timer, process')}",
        )


def _check_filters(processor: Processor) -> None:
    inputs = bindings(processor.inputs)
    for name in ("types", "topics", "where"):
        value = getattr(processor.options, name)
        here = f"{name}= of {processor.id!r}"
        for binding in value if isinstance(value, Mapping) else ():
            if binding not in inputs:
                raise processor._wrong(
                    f"{here} names {binding!r}, which is not an input; the inputs are {', '.join(map(repr, inputs))}.",
                    f"name {nearest(binding, inputs, '{!r}', repr(next(iter(inputs))))}.",
                )
        for each in value.values() if isinstance(value, Mapping) else [value]:
            if each is None:
                continue
            if name == "where":
                if is_expression(each):
                    if processor.options.batch not in TABLES and getattr(processor.fn, "by_columns", None) is None:
                        raise processor._wrong(
                            f"{here} is an expression over columns, and the function takes messages.",
                            "give a function of a message; or take tables, with batch='arrow'.",
                        )
                    continue
                if not callable(each):
                    raise processor._wrong(f"{here} is {each!r}.", "give a function of a message.")
                _check_plain(processor, name, each)
            elif not isinstance(each, (str, list, tuple, set, frozenset)) or not all(isinstance(e, str) for e in each):
                raise processor._wrong(f"{here} is {each!r}.", f"give {name}='a', or {name}={{'a', 'b'}}.")
    _check_plain(processor, "key", processor.options.key)


def _check_plain(processor: Processor, option: str, fn: Any) -> None:
    """Refuse an `async def`: its call returns a coroutine, which is always true and never the same key."""
    if inspect.iscoroutinefunction(fn):
        raise processor._wrong(
            f"{option}= of {processor.id!r} is `async def`, and is called without await.", "declare it with def."
        )
