"""The schemas of a processor, from ``schema=`` and from the annotations of its function.

resolved(options, fn, …)             for a plan: the schemas of the messages, and options that executors understand
schemas_of(options, fn, …)           {binding: Schema}; of one input {"": Schema}
table_schema(options)                the columns of ``batch="arrow"`` and the like
check                                the same for a declaration: what is wrong raises there
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cues.errors import InvalidArgument
from cues.graphs.options import TABLES, Function, Options
from cues.graphs.processor import function_name, parameters_of
from cues.records import schema as columns

if TYPE_CHECKING:
    from cues.schemas import Schema


def check(options: Options, fn: Function | None, bindings: Iterable[str], is_join: bool) -> None:
    """Raise :class:`InvalidArgument` for a schema that cannot be used."""
    if options.batch in TABLES:
        table_schema(options)
    else:
        schemas_of(options, fn, bindings, is_join)


def resolved(
    options: Options, fn: Function | None, bindings: Iterable[str], is_join: bool
) -> tuple[dict[str, Schema], Options]:
    """Return the schemas of a processor, and its options with the columns of a table as plain data."""
    if options.batch in TABLES:
        return {}, replace(options, schema=table_schema(options))
    return schemas_of(options, fn, bindings, is_join), options


def schemas_of(options: Options, fn: Function | None, bindings: Iterable[str], is_join: bool) -> dict[str, Schema]:
    """Return the schemas of the messages that a function takes, by binding; ``""`` is for every binding."""
    given = options.schema
    bindings = list(bindings)
    if given is None and (fn is None or not bindings or not _is_annotated(fn)):
        return {}
    from cues import schemas

    if isinstance(given, Mapping) and given and set(given) <= set(bindings):
        return {binding: schemas.schema_of(one, fn) for binding, one in given.items()}
    if given is not None:
        return {"": schemas.schema_of(given, fn)}
    assert fn is not None
    kinds = schemas.annotated(fn, bindings if is_join else [], bool(options.batch))
    return {binding: schemas.schema_of(kind, fn) for binding, kind in kinds.items()}


def _is_annotated(fn: Function) -> bool:
    return any(parameter.annotation is not parameter.empty for parameter in parameters_of(fn) or ())


def table_schema(options: Options) -> columns.Schema | None:
    """Return names and types of the columns of a table; None: they are those of the messages of each step."""
    given = columns.schema_of(options.schema)
    if isinstance(given, str):
        raise InvalidArgument(
            f"schema={given!r}: the columns of a table are inferred without it.", "leave schema= out, or name columns."
        )
    return given


def to_plain(given: Any) -> Any:
    """Return ``schema=`` as plain data: classes as ``"module:qualname"``."""
    if given is None:
        return None
    from cues import schemas

    if isinstance(given, schemas.Parsed):
        return {"parsed": function_name(given.type)}
    if isinstance(given, type):
        return function_name(given)
    if isinstance(given, Mapping) and not schemas.is_json_schema(given):
        return {name: to_plain(value) for name, value in given.items()}
    return given


def from_plain(plain: Any, load: Callable[[str], Any]) -> Any:
    """Return ``schema=`` from a result of :func:`to_plain`; ``load`` returns what ``"module:qualname"`` names."""
    if isinstance(plain, str) and ":" in plain:
        return load(plain)
    if not isinstance(plain, Mapping):
        return plain
    from cues import schemas

    if set(plain) == {"parsed"} and isinstance(plain["parsed"], str):
        return schemas.parsed(load(plain["parsed"]))
    if not schemas.is_json_schema(plain):
        return {name: from_plain(value, load) for name, value in plain.items()}
    return plain
