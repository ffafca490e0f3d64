"""Processors as engines run them: resolved, with the signatures of their functions and the filters of their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from cues import codec
from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.errors import CodecError
from cues.graphs.options import BATCH_SIZE as BATCH_SIZE
from cues.graphs.options import INHERIT, TABLES, Function, Kind, Options
from cues.graphs.outage import OutageRule
from cues.overrides import override

if TYPE_CHECKING:
    from cues.schemas import Schema


@dataclass(frozen=True)
class Port:
    binding: str
    queue: str


Mode = Literal["one", "join", "alts"]


@dataclass(frozen=True)
class Node:
    """A processor as engines run it, with every default resolved. It never changes."""

    id: ProcessorId
    """Processor id, ``graph.processor``."""
    kind: Kind
    fn: Function | None
    mode: Mode
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    returns_messages: bool
    """True if the function returns messages for every output; False if it returns a dict by binding."""
    errors: str | None
    strategy: str
    options: Options
    tailers: tuple[Port, ...] = ()
    """Queues that the function reads by itself, besides its inputs."""
    appenders: tuple[Port, ...] = ()
    """Queues that the function writes by itself, besides its outputs."""
    partition: int = 0
    """The partition of the inputs that this unit reads."""
    first_id: ProcessorKey | None = None
    """The id that its unit had at its first start, if ``renamed_from=`` has changed it since."""
    schemas: Mapping[str, Schema] = field(default_factory=dict, compare=False, repr=False)
    """Schemas that its messages must fit, by input binding; ``""`` is for every binding. The plan resolves annotations
    and ``schema=`` once, and every engine sends the results to the processes that call the function."""

    def unit(self, partition: int) -> Node:
        """The unit of the processor for one partition, with an owner and positions of its own."""
        return replace(self, id=ProcessorId(names.log_id(self.id, partition)), partition=partition)

    @property
    def input_partition(self) -> int:
        """The partition of the queues that this unit reads."""
        return self.partition

    @property
    def processor(self) -> ProcessorId:
        """The id of the processor to which this unit belongs."""
        return ProcessorId(self.id.rpartition("/")[0]) if self.partition else self.id

    @property
    def key(self) -> ProcessorKey:
        """The id under which stores and targets know this unit: the one of its first start, whatever its name is now.

        Its try log, state, fork queues, tailers and delivery hashes have it.
        """
        return self.first_id or ProcessorKey(self.id)

    def tailer(self, queue: str) -> str:
        """The id of the processor's position on a queue."""
        key = ProcessorKey(self.key.rpartition("/")[0]) if self.partition else self.key
        return names.tailer_id(key, queue, self.partition)

    @cached_property
    def imperative(self) -> bool:
        return bool(self.tailers or self.appenders)

    @property
    def takes_columns(self) -> bool:
        """True if the function is given messages as they lie on the queue: rows of columns are not made dicts.

        It takes tables, or is a batch function of a ready-made processor that says so in an attribute.
        """
        batch = self.options.batch
        return batch in TABLES or (batch is True and getattr(self.fn, "takes_columns", False))

    @property
    def reads(self) -> tuple[Port, ...]:
        """Every queue on which it has a position."""
        return self.inputs + self.tailers

    @property
    def writes(self) -> tuple[Port, ...]:
        """Every queue that it may write to, without error queues."""
        return self.outputs + self.appenders

    @cached_property
    def name(self) -> str:
        """The name without the graph: ``enrich``, or ``enrich/3`` for its unit on partition 3."""
        return self.id.rpartition(".")[2]

    @property
    def stored_kind(self) -> str:
        """The kind in stores and in error messages, where a frame is a stream whose ``batch`` is ``"frame"``."""
        return "stream" if self.kind == "frame" else self.kind

    @cached_property
    def side_effects(self) -> bool:
        """True if a snapshot is committed before the function runs."""
        return self.kind == "sink" or (self.kind == "stream" and self.options.side_effects)

    @cached_property
    def pending(self) -> bool:
        """True if its messages to other stores are pending until its step has committed."""
        return self.options.across == "pending"

    @property
    def outages(self) -> OutageRule:
        # A source that begins anew at each call would repeat its messages at each try.
        is_called_once = self.at_most_once or self.options.resume == "again"
        return OutageRule(self.options.outages, self.options.retry, is_called_once)

    @cached_property
    def at_most_once(self) -> bool:
        return self.kind != "source" and self.strategy == "at-most-once"

    @property
    def way_to_errors(self) -> str:
        """The advice to give it an error queue, if it has none: by the graph, or by its own option if that decides."""
        if self.options.errors == INHERIT:
            return "give the graph an error queue: cues.Graph(…, errors='errors')"
        return f"give it an error queue of its own: errors='errors-of-{self.name}'"

    @property
    def guarantee(self) -> str:
        """The guarantee of this processor, in one phrase."""
        if self.kind == "source":
            if self.fn is None:
                return "each send is one commit"
            if self.options.resume == "skip":
                return "exactly-once, if it yields the same messages at every start"
            if self.options.resume == "again":
                return "at-least-once: every start begins again"
            return "exactly-once: its position commits with its messages"
        if self.at_most_once:
            return "at-most-once: a death loses at most one step"
        if self.options.checkpoint is not None:
            return "exactly-once: its target commits the position with the rows"
        if self.kind == "sink":
            return "at-least-once; exactly-once if the target keeps process.delivery"
        if self.side_effects:
            return "exactly-once outputs and state; its side effects at-least-once"
        return "exactly-once"

    def config(self) -> dict[str, Any]:
        """Return the processor as plain data for its error messages."""
        options = self.options
        plain: dict[str, Any] = {
            "id": self.id,
            "kind": self.stored_kind,
            "function": function_name(self.fn),
            "inputs": {port.binding: port.queue for port in self.inputs},
            "outputs": {port.binding: port.queue for port in self.outputs},
            "errors": self.errors,
            "strategy": self.strategy,
            "batch": "frame" if self.kind == "frame" else options.batch,
            "attempts": options.retry.attempts,
        }
        if self.first_id is not None:
            plain["key"] = self.first_id  # its error messages belong to it after any number of renames
        for name in ("tailers", "appenders"):
            if getattr(options, name):
                plain[name] = dict(getattr(options, name))
        if options.opts is not None:
            try:
                codec.pack(options.opts)
                plain["opts"] = options.opts
            except CodecError:
                plain["opts"] = repr(options.opts)
        return plain


@dataclass(frozen=True)
class BesideNode(Node):
    """A node whose stepper is beside that of a unit, and takes messages of queues of its own (steps/beside.py)."""

    @override
    @property
    def input_partition(self) -> int:
        """0: its queues are those of one unit."""
        return 0

    @override
    def tailer(self, queue: str) -> str:
        """The id of its position on a queue, which is the id of that queue: it belongs to this unit."""
        return queue


@dataclass(frozen=True)
class RedriveNode(BesideNode):
    """A unit that takes redriven messages: the same function and outputs, with inputs of its own (steps/redrive.py).

    It has an id of its own, which is the ``process.id`` of its calls. So a target keeps a row of its own for them.
    """

    redrives: Node | None = None
    """The unit whose failed messages it takes."""

    @staticmethod
    def of(node: Node, id: ProcessorKey | None = None) -> RedriveNode:
        """Return the node for the redriven messages of a unit; with ``id``, for its delayed ones (steps/delays.py)."""
        id = id or names.redriver_id(node.key)
        shared = {field.name: getattr(node, field.name) for field in fields(Node)}
        inputs = tuple(Port(port.binding, f"{id}.{port.queue}") for port in node.inputs)
        # A message that was redriven and fails again is an error message again, whatever the first failure does.
        options = replace(node.options, isolation="uncommitted", linger_s=0, on_error=None, max_errors=None)
        own = {
            "id": ProcessorId(id),
            "first_id": None,
            "inputs": inputs,
            "options": options,
            "redrives": node,
        }
        return RedriveNode(**shared | own)

    @override
    def config(self) -> dict[str, Any]:
        """Return the processor of which it redrives messages. A message that fails again can be redriven again."""
        assert self.redrives is not None
        return self.redrives.config()


@dataclass(frozen=True)
class TimerNode(BesideNode):
    """A unit that takes its due timers: the function is ``timer=``, the outputs are the same (steps/timers.py)."""

    timers_of: Node | None = None
    """The unit whose timers it takes."""

    @staticmethod
    def of(node: Node) -> TimerNode:
        """Return the node for the timers of a unit."""
        assert node.options.timer is not None
        id = names.timer_id(node.key)
        port = Port("timer", names.timer_queue(node.key))
        return TimerNode(**_called_beside(node, id, _firing(node.options.timer), port), timers_of=node)

    @override
    def config(self) -> dict[str, Any]:
        """Return the processor whose timer failed, with the function of its timers."""
        assert self.timers_of is not None
        return self.timers_of.config() | {"timer": function_name(self.timers_of.options.timer)}


@dataclass(frozen=True)
class ClosingNode(BesideNode):
    """A unit that is asked to close what it keeps open: the outputs are those of the unit (steps/closing.py)."""

    @staticmethod
    def of(node: Node) -> ClosingNode:
        """Return the node for the requests of a unit whose function has :data:`CLOSE`."""
        port = Port("closing", names.closing_queue(node.key))
        return ClosingNode(**_called_beside(node, names.closer_id(node.key), getattr(node.fn, CLOSE), port))


CLOSE: Final = "__cues_close__"
"""The method of a function that closes what it keeps open: ``close(message, process)``; it returns what a call does.

A function that has it has ``__cues_open__(state)`` too, which tells from its state whether something is open, and
``at_end``: ``"close"`` it when all sources have ended, or ``"keep"`` it open for the next run.
"""

NOT_SHARED: Final = "__cues_not_shared__"
"""The attribute of a function with an option for which it needs the memory of its process from call to call.

It is the option, and the reason. A start with the queues in a shared directory refuses it, because tasks call the
function in several processes.
"""

REQUIRES: Final = "__cues_requires__"
"""The attribute of a function whose state a version without these features would misread (storage/datafile.py)."""


def _called_beside(node: Node, id: ProcessorKey, fn: Function, port: Port) -> dict[str, Any]:
    """Return the fields of a node that takes messages of its own queue, and calls another function than the unit."""
    shared = {field.name: getattr(node, field.name) for field in fields(Node)}
    options = replace(
        node.options,
        types=None,
        topics=None,
        where=None,
        isolation="uncommitted",
        linger_s=0,
        batch=False,
        concurrency=1,
        key=None if node.options.key is None else _key_of_timer,
    )
    own: dict[str, Any] = {
        "id": ProcessorId(id),
        "first_id": None,
        "fn": fn,
        "mode": "one",
        "inputs": (port,),
        "options": options,
        "schemas": {},
    }
    return shared | own


def _key_of_timer(timer: dict[str, Any]) -> Any:
    return timer["key"]


def _firing(fn: Function) -> Function:
    """Return a function that takes a due timer, and calls ``fn`` unless it was cancelled or replaced meanwhile."""
    given = wants_process(fn)

    def fire(timer: dict[str, Any], process: Any) -> Any:
        if process.core.fires(timer):
            return fn(timer, process=process) if given else fn(timer)
        return None

    async def fire_async(timer: dict[str, Any], process: Any) -> Any:
        if process.core.fires(timer):
            return await (fn(timer, process=process) if given else fn(timer))
        return None

    called = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    return fire_async if inspect.iscoroutinefunction(called) else fire


def function_name(fn: Function | None) -> str | None:
    """``module:qualname``, the form in which graphs as plain data hold functions."""
    if fn is None:
        return None
    module = getattr(fn, "__module__", None) or "?"
    return f"{module}:{getattr(fn, '__qualname__', type(fn).__qualname__)}"


# --- functions ----------------------------------------------------------------------------------


def parameters_of(fn: Function) -> list[inspect.Parameter] | None:
    """The parameters, or None if Python does not know them (some builtins)."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def wants_process(fn: Function) -> bool:
    """Return whether the function has a parameter called ``process``."""
    parameters = parameters_of(fn)
    return parameters is not None and any(p.name == "process" and p.kind not in VARIADIC for p in parameters)


def positional_order(fn: Function, bindings: Sequence[str]) -> list[int] | None:
    """The indices in ``bindings`` of the first parameters, if the function can be called with all by position."""
    parameters = (parameters_of(fn) or [])[: len(bindings)]
    if {p.name for p in parameters} != set(bindings) or any(p.kind != p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    return [bindings.index(p.name) for p in parameters]


def position_count(fn: Function) -> int:
    """The number of positional parameters of a source's function besides ``process``: 0 or 1."""
    parameters = parameters_of(fn)
    if parameters is None:
        return 1
    kinds = [p.kind for p in parameters if p.name != "process" or p.kind in VARIADIC]
    return int(any(kind is not inspect.Parameter.VAR_KEYWORD for kind in kinds))


# --- filters ------------------------------------------------------------------------------------


Filter = Callable[[dict[str, Any]], bool]


def is_expression(value: Any) -> bool:
    """Return whether a value is an expression of pyarrow over columns."""
    return type(value).__module__.startswith("pyarrow") and type(value).__name__ == "Expression"


class ByExpression:
    """The predicate of an expression over columns, for a message; steps of tables evaluate it on all rows at once."""

    def __init__(self, expression: Any, always: frozenset[Any] = frozenset()) -> None:
        """``always``: messages of these types pass always."""
        self.expression = expression
        self.always = always

    def __call__(self, message: dict[str, Any]) -> bool:
        from cues.queues import tables

        if self.always and _among(self.always, message.get(names.TYPE)):
            return True
        return bool(tables.chosen([message], self.expression)[0])

    def chosen(self, columns: Any) -> tuple[list[int], Any] | None:
        """Return the offsets of the rows that pass, and these as ``Columns``; None if rows may have types that count.

        Raises :class:`InvalidArgument` if the expression does not fit the columns.
        """
        return None if self.always and names.TYPE in columns.table.column_names else columns.where(self.expression)


def filter_of(options: Options, binding: str, fn: Function | None = None) -> Filter | None:
    """One predicate from ``types``, ``topics`` and ``where`` for one input; None if all messages pass.

    Messages with a type in the attribute ``never_filtered`` of the function pass always, such as watermarks to windows.
    """
    types, topics = _asked(options.types, binding), _asked(options.topics, binding)
    where = _for(options.where, binding)
    if types is None and topics is None and where is None:
        return None
    always: frozenset[Any] = frozenset(getattr(fn, "never_filtered", ()))
    if is_expression(where):
        where = ByExpression(where, always)
        if types is None and topics is None:
            return where

    def passes(message: dict[str, Any]) -> bool:
        if always and _among(always, message.get(names.TYPE)):
            return True
        # The message passes if its type is asked for,
        if types is not None and not _among(types, message.get(names.TYPE)):
            return False
        # if it has at least one topic that is asked for,
        if topics is not None and not any(_among(topics, topic) for topic in _topics(message.get(names.TOPICS))):
            return False
        # and if the user's own predicate returns true.
        return where is None or bool(where(message))

    return passes


def _among(asked: frozenset[Any], value: Any) -> bool:
    """Return whether a type or topic is asked for; a value that cannot be hashed (a list, a dict) never is."""
    try:
        return value in asked
    except TypeError:
        return False


def _topics(value: Any) -> Iterable[Any]:
    """Return the topics of a message: one text, or a collection of them; any other value is not a topic."""
    if isinstance(value, str):
        return (value,)
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def _for(option: Any, binding: str) -> Any:
    return option.get(binding) if isinstance(option, Mapping) else option


def _asked(option: Any, binding: str) -> frozenset[Any] | None:
    chosen = _for(option, binding)
    return None if chosen is None else frozenset((chosen,) if isinstance(chosen, str) else chosen)
