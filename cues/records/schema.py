"""Schemas of queues: the names and the types of fields of messages.

    @dataclass                         {"id": int, "price": float}          pyarrow.schema(…)
    class Order:                       {"id": "long", "price": "double"}
        id: int                                       │
        price: float | None                           ▼
                                       (("id", "long"), ("price", "double"))

A type is written as in a Delta table: boolean, byte, short, integer, long, float, double, decimal(p,s), string, binary,
date, timestamp, array<T>, map<K,V>, struct<name:T,…>. The names of Spark's SQL (int, bigint, …) mean the same.

Not guaranteed: that a message fits. A schema here describes columns, and checks nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from datetime import date, datetime
from typing import Any, Final
from uuid import UUID

from cues.errors import InvalidArgument

INFER: Final = "infer"
"""The schema is that of the first messages."""
Schema = tuple[tuple[str, str], ...]
"""Names and types of fields."""

_NAMES: Final = {
    **{name: name for name in ("boolean", "byte", "short", "integer", "long", "float", "double", "string")},
    **{name: name for name in ("binary", "date", "timestamp")},
    "bool": "boolean",
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
}
_CLASSES: Final[dict[Any, str]] = {
    bool: "boolean",
    int: "long",
    float: "double",
    str: "string",
    UUID: "string",
    bytes: "binary",
    date: "date",
    datetime: "timestamp",
}
_ARROW: Final = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "uint8": "short",
    "uint16": "integer",
    "uint32": "long",
    "float": "float",
    "double": "double",
    "date32[day]": "date",
    **{f"{size}{name}": name for name in ("string", "binary") for size in ("", "large_")},
}
_TYPES: Final = "boolean, byte, short, integer, long, float, double, decimal(p,s), string, binary, date, timestamp"
_NO_NAME: Final = r"[ ,;{}()\n\t=]|^$"
"""Delta tables have no columns with such names."""
_PARTS: Final = r"[A-Za-z_]\w*|\d+|[<>,:()]"


class _Unknown(Exception):
    """A type that no column can have, and why."""


def schema_of(given: Any) -> Schema | str | None:
    """The schema that a user gives: a dataclass, a TypedDict, a mapping of names to types, a pyarrow schema,
    ``"infer"`` or None. A result of this function is returned as it is.

    Raises :class:`InvalidArgument`, which names the field.
    """
    if given is None or given == INFER:
        return given  # type: ignore[no-any-return]
    fields = _fields(given, ())
    if not fields:
        raise InvalidArgument(
            f"schema is {given!r:.80}, which has no fields.",
            "pass a dataclass, a TypedDict, {'id': int, 'price': 'double'}, a pyarrow schema, or 'infer'.",
        )
    schema = []
    known: dict[str, str] = {}
    for name, kind in fields.items():
        if not isinstance(name, str) or re.search(_NO_NAME, name):
            raise InvalidArgument(
                f"The field {name!r} of the schema cannot be the name of a column.",
                "leave it out of the schema; it stays in the message. A name has no space and none of ,;{}()=.",
            )
        other = known.setdefault(name.lower(), name)
        if other != name:
            raise InvalidArgument(
                f"The fields {other!r} and {name!r} of the schema differ only in upper and lower case, and the columns"
                " of a table do not.",
                "leave one of them out of the schema; it stays in the message.",
            )
        try:
            schema.append((name, _shown(kind, ())))
        except _Unknown as unknown:
            raise InvalidArgument(
                f"The field {name!r} of the schema has a type that no column has: {unknown}.",
                f"use one of {_TYPES}, array<…>, map<…>, struct<…>; or name only the other fields, such as"
                " schema={'id': int}.",
            ) from None
    return tuple(schema)


def _fields(given: Any, inside: tuple[Any, ...]) -> dict[str, Any]:
    """The names and types of the fields of a class, a mapping or a pyarrow schema; empty if it is none of these."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        return dict(given)
    if type(given).__module__.startswith("pyarrow"):
        return {field.name: field.type for field in given}
    if isinstance(given, type) and (dataclasses.is_dataclass(given) or typing.is_typeddict(given)):
        if given in inside:
            raise _Unknown(f"{given.__name__} inside itself")
        hints = typing.get_type_hints(given)
        names = [f.name for f in dataclasses.fields(given)] if dataclasses.is_dataclass(given) else hints
        return {name: hints[name] for name in names}
    return {}


def _shown(kind: Any, inside: tuple[Any, ...]) -> str:
    """A type as text. Raises :class:`_Unknown`."""
    if isinstance(kind, str):
        return shown(parse(kind))
    if isinstance(kind, Hashable) and kind in _CLASSES:
        return _CLASSES[kind]
    if type(kind).__module__.startswith("pyarrow"):
        return _of_arrow(kind)
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        some = {_shown(argument, inside) for argument in arguments if argument is not type(None)}
        if len(some) == 1:
            return some.pop()
    elif isinstance(origin, type) and arguments:
        texts = [_shown(argument, inside) for argument in arguments]
        if issubclass(origin, Mapping) and len(texts) == 2:
            return f"map<{texts[0]},{texts[1]}>"
        if issubclass(origin, (Sequence, Set)) and len(set(texts)) == 1:
            return f"array<{texts[0]}>"
    fields = _fields(kind, inside)
    if isinstance(kind, type) and fields:
        inner = (f"{name}:{_shown(field, (*inside, kind))}" for name, field in fields.items())
        return f"struct<{','.join(inner)}>"
    raise _Unknown(getattr(kind, "__name__", None) or repr(kind))


def of_table(schema: Any) -> Schema:
    """The names and types of the columns of a pyarrow schema that have one; without those that no column may have."""
    lower = [name.lower() for name in schema.names]
    fields = []
    for field in schema:
        with contextlib.suppress(_Unknown):
            if not re.search(_NO_NAME, field.name) and lower.count(field.name.lower()) == 1:
                fields.append((field.name, _of_arrow(field.type)))
    return tuple(fields)


def _of_arrow(kind: Any) -> str:
    text = str(kind)
    if text in _ARROW:
        return _ARROW[text]
    if text.startswith("timestamp") and kind.tz is not None:
        return "timestamp"
    if text.startswith("decimal"):
        return f"decimal({kind.precision},{kind.scale})"
    if text.startswith(("list", "large_list", "fixed_size_list")):
        return f"array<{_of_arrow(kind.value_type)}>"
    if text.startswith("map"):
        return f"map<{_of_arrow(kind.key_type)},{_of_arrow(kind.item_type)}>"
    if text.startswith("struct"):
        fields = (f"{field.name}:{_of_arrow(field.type)}" for field in kind)
        return f"struct<{','.join(fields)}>"
    raise _Unknown(text)


# --- types as text ------------------------------------------------------------------------------


def parse(text: str) -> Any:
    """A type in JSON, as the log of a Delta table has it. Raises :class:`_Unknown`."""
    parts = iter(re.findall(_PARTS, text))
    if "".join(re.findall(_PARTS, text)) != re.sub(r"\s", "", text):
        raise _Unknown(repr(text))
    try:
        kind = _parse(parts)
    except (StopIteration, ValueError):
        raise _Unknown(repr(text)) from None
    if next(parts, None) is not None:
        raise _Unknown(repr(text))
    return kind


def _parse(parts: Iterator[str]) -> Any:
    name = next(parts).lower()
    if name in _NAMES:
        return _NAMES[name]
    if name == "decimal":
        _expect(parts, "(")
        precision = int(next(parts))
        _expect(parts, ",")
        scale = int(next(parts))
        _expect(parts, ")")
        if not 0 <= scale <= precision <= 38 or not precision:
            raise _Unknown(f"decimal({precision},{scale})")
        return f"decimal({precision},{scale})"
    if name not in ("array", "map", "struct"):
        raise _Unknown(name)
    _expect(parts, "<")
    if name == "array":
        kind: dict[str, Any] = {"type": "array", "elementType": _parse(parts), "containsNull": True}
        _expect(parts, ">")
    elif name == "map":
        key = _parse(parts)
        _expect(parts, ",")
        kind = {"type": "map", "keyType": key, "valueType": _parse(parts), "valueContainsNull": True}
        _expect(parts, ">")
    else:
        fields = []
        end = ","
        while end == ",":
            field = next(parts)
            _expect(parts, ":")
            fields.append({"name": field, "type": _parse(parts), "nullable": True, "metadata": {}})
            end = next(parts)
        if end != ">":
            raise _Unknown(end)
        kind = {"type": "struct", "fields": fields}
    return kind


def _expect(parts: Iterator[str], sign: str) -> None:
    part = next(parts)
    if part != sign:
        raise _Unknown(f"{part!r} instead of {sign!r}")


def shown(kind: Any) -> str:
    """The text of a type in JSON."""
    if isinstance(kind, str):
        return kind
    if kind["type"] == "array":
        return f"array<{shown(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{shown(kind['keyType'])},{shown(kind['valueType'])}>"
    fields = (f"{field['name']}:{shown(field['type'])}" for field in kind["fields"])
    return f"struct<{','.join(fields)}>"


# --- inference ----------------------------------------------------------------------------------


def infer(messages: Sequence[Mapping[str, Any]]) -> Schema:
    """The schema of messages: the fields whose values are all of one type, in the order in which they appear.

    Integers and floats together are double. Other fields (of mixed types, of no value, or with inner fields) have no
    column.
    """
    seen: dict[str, set[str | None]] = {}
    for message in messages:
        for name, value in message.items():
            if value is not None and value not in ([], ()):
                seen.setdefault(name, set()).add(_of_value(value))
    schema = []
    lower = [name.lower() for name in seen]
    for name, kinds in seen.items():
        if re.search(_NO_NAME, name) or lower.count(name.lower()) > 1:
            continue
        if kinds == {"long", "double"}:
            kinds = {"double"}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            schema.append((name, kind))
    return tuple(schema)


def _of_value(value: Any) -> str | None:
    """The type of a value; None if no column is made for it."""
    if isinstance(value, (list, tuple)):
        kinds = {_of_value(inner) for inner in value if inner is not None}
        kind = kinds.pop() if len(kinds) == 1 else None
        return f"array<{kind}>" if kind and "<" not in kind else None
    if isinstance(value, datetime) and value.utcoffset() is None:
        return None
    return _CLASSES.get(type(value))
