"""The user's function with objects or tables in place of dicts: the schema of a processor, applied around each call.

    adapted(node, fn)    the function to call with messages; ``fn`` itself if it takes dicts

    message function     fn(Order)               a message that does not fit is the failure of its call
    batch=True           fn([Order, …])          one that does not fit is the failure of its step, as any error is
    batch="arrow"        fn(pyarrow.Table)       a table that is returned is written as one, without dicts

Objects that a function returns are made messages by :mod:`cues.steps.returned`. Both are inside the call, so filters,
retries, error queues and transactions of sinks treat a message that does not fit like any other failure, on every
engine. It is not tried again: it would be refused again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cues.errors import SchemaError
from cues.graphs import typed
from cues.graphs.options import TABLES, Function
from cues.graphs.processor import Node

if TYPE_CHECKING:
    from cues.schemas import Schema


class TypedFunction:
    """A function that is called with objects of its schemas."""

    def __init__(self, node: Node, fn: Function, schemas: Mapping[str, Schema]) -> None:
        self._fn = fn
        self._schemas = schemas
        self._names = [port.binding for port in node.inputs] if node.mode == "join" else None
        self._load = self._load_batch if node.options.batch else self._load_message
        self.binding = ""
        """The input of the step, of a processor over several queues (AnyOf)."""

    def __call__(self, *messages: Any, process: Any = None, **bound: Any) -> Any:
        if process is not None:
            bound["process"] = process
        if self._names is None:
            return self._fn(self._load(self.binding, messages[0]), **bound)
        loaded = {name: self._load(name, value) for name, value in bound.items() if name in self._names}
        return self._fn(**{**bound, **loaded})

    def _load_message(self, binding: str, message: Any) -> Any:
        schema = self._schemas.get(binding) or self._schemas.get("")
        if schema is None or message is None:
            return message
        try:
            return schema.load(message)
        except SchemaError as error:
            error.__dict__["of_input"] = True
            raise

    def _load_batch(self, binding: str, messages: list[Any]) -> list[Any]:
        loaded = []
        for place, message in enumerate(messages):
            try:
                loaded.append(self._load_message(binding, message))
            except SchemaError as error:
                error.message = f"messages[{place}]: {error.message}"
                raise
        return loaded


class TableFunction:
    """A batch function that is called with a table."""

    def __init__(self, node: Node, fn: Function, keeps_tables: bool = False) -> None:
        from cues.queues import tables

        self._fn = fn
        self._kind = str(node.options.batch)
        self._schema = tables.arrow_schema(typed.table_schema(node.options), self._kind)
        self._table_of = tables.table_of
        self._made = tables.returned if keeps_tables else tables.messages_of

    def __call__(self, messages: Any, **keywords: Any) -> Any:
        if isinstance(messages, list):
            table = self._table_of(self._kind, messages, self._schema)
        else:
            table = messages.table(self._kind, self._schema)
        return self._made(self._fn(table, **keywords))


def adapted(node: Node, fn: Function, keeps_tables: bool = False) -> Function | TypedFunction | TableFunction:
    """Return the function that takes messages, for a function that takes objects or tables.

    ``keeps_tables``: the table that a function returns is written as one, and is not made messages.
    """
    if node.options.batch in TABLES:
        return TableFunction(node, fn, keeps_tables)
    return TypedFunction(node, fn, node.schemas) if node.schemas else fn


def of_input(error: BaseException) -> bool:
    """Return whether the error says that a message does not fit, so that another call cannot succeed."""
    return isinstance(error, SchemaError) and error.__dict__.get("of_input", False)
