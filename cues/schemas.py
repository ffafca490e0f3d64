"""Schemas of messages: the types of their fields, checked, and objects of these types in place of dicts.

    @dataclass
    class Order:                                     a pydantic model, a msgspec Struct, a TypedDict or a
        id: int                                      JSON Schema (a dict) can be used in the same way
        price: float | None = None

    graph.source("orders", schema=Order)             what the source yields is checked
    @graph.stream("orders", "priced")
    def price(order: Order) -> Priced: ...           the function gets an Order, and returns an object of its own
    queue.appender(schema=Order)                     what a program writes is checked

    dict of the queue ──► Schema.load ──► Order ──► the function ──► Priced ──► plain ──► dict of the queue
                               │
                               └─► SchemaError: $.items[3].price: expected number, found "x"

A message is checked where it enters a program, and the queue itself stores any message: it keeps no schema. So a store
opens as before, and a changed schema needs no migration. Old messages that do not fit a new schema fail in the reader,
and are written to its error queue, like every message that fails.

Fields that a schema does not name are allowed, unless the schema itself refuses them (``additionalProperties``,
``forbid``). Keys that begin with ``q/`` belong to Cues, and no schema sees them.

Not guaranteed: that a queue holds only messages of a schema. A writer without ``schema=`` can append others. An object
that a function returns is converted, and its values are not checked again; use a static type checker for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from uuid import UUID

from cues.errors import InvalidArgument, SchemaError
from cues.imported import loaded, package
from cues.overrides import override

Load = Callable[[Any], Any]
"""Checks a value and converts it; raises :class:`_Misfit`."""
Hints = dict[Any, dict[str, Any]]
"""The resolved types of the fields, by dataclass or TypedDict."""

_SHOWN_CHARACTERS_MAX: Final = 60
_MISSING: Final = object()
_RESERVED: Final = "q/"
_NATIVE: Final = (datetime, date, time, timedelta, Decimal, UUID, bytes)
"""Types that messages may have and JSON has not."""
_TRUTH: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class _Misfit(Exception):
    """A value that does not fit. ``path`` is collected from the inside to the outside."""

    def __init__(self, expected: str, value: Any, path: Sequence[Any] = ()) -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.path = list(path)


class _Unresolved(InvalidArgument):
    """An annotation has a name that is not known."""


class Parsed:
    """A type whose values may come as text; made by :func:`parsed`."""

    def __init__(self, type: Any) -> None:
        self.type = type

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parsed) and other.type == self.type

    @override
    def __hash__(self) -> int:
        return hash((Parsed, self.type))

    @override
    def __repr__(self) -> str:
        return f"parsed({getattr(self.type, '__name__', self.type)})"


def parsed(type: Any) -> Any:
    """Return a schema that takes texts for numbers, booleans, dates and the like, as CSV files have them.

    ``"12"`` fits an int, ``"true"`` a bool, ``"2026-11-23"`` a date; an empty text is None where None fits. With it a
    source writes the converted values. ``type`` is a dataclass, a pydantic model, a msgspec Struct or a TypedDict.
    """
    if isinstance(type, Mapping) or (not _is_object(type) and not typing.is_typeddict(type)):
        raise InvalidArgument(
            f"parsed({type!r:.60}): texts are converted to the types of a class.",
            "pass a dataclass, a pydantic model, a msgspec Struct or a TypedDict.",
        )
    return Parsed(type)


class Schema:
    """A compiled schema. Make it with :func:`schema_of`; safe from any thread.

    Its pickle has the resolved types of the fields of each class. So another process needs no module that resolves
    annotations that are text.
    """

    def __init__(self, given: Any, names: Mapping[str, Any] | None = None, hints: Hints | None = None) -> None:
        """``names``: more names for annotations that are text, besides those of the modules of the classes."""
        self.given = given
        self.parses = isinstance(given, Parsed)
        kind = given.type if isinstance(given, Parsed) else given
        self._hints: Hints = {} if hints is None else hints
        self._convert: Load = (
            _json_schema(kind) if isinstance(kind, Mapping) else _Compiler(self.parses, names, self._hints).load(kind)
        )

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Schema, (self.given, None, self._hints)

    def load(self, message: Any) -> Any:
        """Return the object for a message; of a JSON Schema, the message. Raises :class:`SchemaError`."""
        if type(message) is dict and any(type(key) is str and key.startswith(_RESERVED) for key in message):
            fields = {key: value for key, value in message.items() if not str(key).startswith(_RESERVED)}
            loaded = self._load(fields)
            rest = {key: value for key, value in message.items() if key not in fields}
            return {**loaded, **rest} if type(loaded) is dict else loaded
        return self._load(message)

    def _load(self, message: Any) -> Any:
        try:
            return self._convert(message)
        except _Misfit as misfit:
            path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in reversed(misfit.path))
            raise SchemaError(
                f"{path}: expected {misfit.expected}, found {_shown(misfit.value)}.",
                "correct the writer of the message, or the schema; then redrive the message (cues redrive).",
                path=path,
                expected=misfit.expected,
            ) from None

    def written(self, message: Any) -> Any:
        """Return the message to append for a dict or an object, after its check. Raises :class:`SchemaError`.

        A dict is returned as it is, unless the schema is :func:`parsed`.
        """
        plainly = message_of(message)
        if plainly is None:
            raise SchemaError(
                f"$: expected object, found {type(message).__name__}.", "write a dict.", path="$", expected="object"
            )
        loaded = self.load(plainly)
        return {**plainly, **typing.cast("dict[str, Any]", message_of(loaded))} if self.parses else plainly


def schema_of(given: Any, fn: Callable[..., Any] | None = None) -> Schema:
    """Return the compiled schema of a class or of a JSON Schema. Raises :class:`InvalidArgument` for anything else.

    The names that ``fn`` sees resolve annotations of classes that are not at the top of a module.
    """
    if isinstance(given, Schema):
        return given
    if isinstance(given, Mapping):
        if not is_json_schema(given):
            raise InvalidArgument(
                f"schema is {given!r:.80}, which is not a JSON Schema.",
                "pass {'type': 'object', 'properties': {…}}, or a dataclass.",
            )
        return Schema(given)
    kind = given.type if isinstance(given, Parsed) else given
    if not all(_is_object(member) or typing.is_typeddict(member) for member in _members(kind)):
        raise _unknown(kind)
    try:
        return _compiled(given)
    except _Unresolved:
        if fn is None:
            raise
        return Schema(given, _names_seen(inspect.unwrap(fn)))


@functools.lru_cache(256)
def _compiled(given: Any) -> Schema:
    return Schema(given)


def is_json_schema(given: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is a JSON Schema, and not names of columns with their types."""
    return given.get("type") == "object" or any(
        str(name).startswith("$") or isinstance(value, (Mapping, list, bool)) for name, value in given.items()
    )


def message_of(value: Any) -> dict[str, Any] | None:
    """Return the message for a dict or an object of a class with fields; None for any other value."""
    if isinstance(value, dict):
        return value
    return typing.cast("dict[str, Any]", _plain(value)) if _is_object(type(value)) else None


def annotated(fn: Callable[..., Any], names: Sequence[str], batch: bool) -> dict[str, Any]:
    """Return the types that a function declares for its messages, by parameter; only classes of objects.

    ``names`` are the bindings of a join, or empty: then the first parameter counts, under the name ``""``. An
    annotation that cannot be resolved (a name that only the type checker sees) counts as none.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return {}
    chosen = {p.name: p for p in parameters if p.name in names} if names else dict(zip([""], parameters))
    typed = {}
    for binding, parameter in chosen.items():
        kind = _resolved(inspect.unwrap(fn), parameter.annotation)
        if batch:
            arguments = typing.get_args(kind)
            kind = arguments[0] if typing.get_origin(kind) in (list, Sequence) and arguments else None
        if any(map(_is_object, _members(kind))):
            typed[binding] = kind
    return typed


def _resolved(fn: Any, annotation: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, _names_seen(fn))
    except Exception:
        return None


def _names_seen(fn: Any) -> dict[str, Any]:
    """The global names of a function, and those of the functions around it that it uses."""
    seen = dict(getattr(fn, "__globals__", {}))
    for name, cell in zip(
        getattr(getattr(fn, "__code__", None), "co_freevars", ()), getattr(fn, "__closure__", None) or ()
    ):
        with contextlib.suppress(ValueError):  # not assigned yet
            seen[name] = cell.cell_contents
    return seen


# --- compilation of classes --------------------------------------------------------------------------------------


class _Compiler:
    """Makes functions that load values of types."""

    def __init__(self, parses: bool, names: Mapping[str, Any] | None, hints: Hints) -> None:
        self._parses = parses
        self._names = dict(names or {})
        self._hints = hints
        self._known: dict[Any, Load] = {}

    def load(self, kind: Any) -> Load:
        """Return the function for a type. Raises :class:`InvalidArgument`, which names a type that is not known."""
        if isinstance(kind, Parsed):
            return _Compiler(True, self._names, self._hints).load(kind.type)
        if _hashable(kind) and kind in self._known:
            return self._known[kind]
        if isinstance(kind, typing.TypeVar):
            raise _unknown(kind)
        kind = getattr(kind, "__supertype__", kind)  # NewType
        if type(kind).__name__ == "TypeAliasType":
            return self.load(kind.__value__)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Annotated, typing.Required, typing.NotRequired, getattr(typing, "ReadOnly", ())):
            return self.load(arguments[0])
        if kind is Any or kind is object:
            return lambda value: value
        if kind is None or kind is type(None):
            return _exactly((type(None),), "null")
        if origin is typing.Literal:
            return _among({value: value for value in arguments})
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments)
        outer = origin or kind
        if outer in (list, dict, tuple, set, frozenset, Mapping, Sequence) or (
            isinstance(origin, type) and issubclass(origin, (Mapping, Sequence, Set))
        ):
            return self._container(outer, arguments)
        if not isinstance(kind, type):
            raise _unknown(kind)
        if _is_pydantic(kind):
            return _pydantic(kind)
        if _is_msgspec(kind):
            return _msgspec(kind, self._parses)
        if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
            return self._fields(kind)
        if issubclass(kind, enum.Enum):
            return _among({member.value: member for member in kind})
        return self._atom(kind)

    def _atom(self, kind: type) -> Load:
        if kind is float:
            load: Load = _number
        elif kind in _EXPECTED:
            load = _exactly((kind,), _EXPECTED[kind])
        else:
            raise _unknown(kind)
        if not self._parses or kind in (str, bytes):
            return load
        parse, expected = _PARSERS[kind], _EXPECTED[kind]

        def from_text(value: Any) -> Any:
            if type(value) is str:
                try:
                    return parse(value)
                except (ValueError, KeyError, InvalidOperation):
                    raise _Misfit(expected, value) from None
            return load(value)

        return from_text

    def _union(self, arguments: tuple[Any, ...]) -> Load:
        some = [argument for argument in arguments if argument is not type(None)]
        nullable, parses = len(some) < len(arguments), self._parses
        if len(some) == 1:
            (only,) = map(self.load, some)
            holds_text = some[0] is str

            def optional(value: Any) -> Any:
                if value is None or (parses and value == "" and not holds_text):
                    return None
                return only(value)

            return optional
        loads = [self.load(argument) for argument in some]

        def any_of(value: Any) -> Any:
            if nullable and value is None:
                return None
            misfits = []
            for load in loads:
                try:
                    return load(value)
                except _Misfit as misfit:
                    misfits.append(misfit)
            deepest = max(misfits, key=lambda misfit: len(misfit.path))
            if deepest.path:
                raise deepest
            raise _Misfit(" or ".join(dict.fromkeys(misfit.expected for misfit in misfits)), value)

        return any_of

    def _container(self, origin: type, arguments: tuple[Any, ...]) -> Load:
        if issubclass(origin, Mapping):
            load_key, load_item = map(self.load, arguments or (Any, Any))

            def mapping(value: Any) -> Any:
                if not isinstance(value, dict):
                    raise _Misfit("object", value)
                loaded = {}
                for key, item in value.items():
                    try:
                        loaded[load_key(key)] = load_item(item)
                    except _Misfit as misfit:
                        misfit.path.append(key)
                        raise
                return loaded

            return mapping
        make = origin if origin in (list, tuple, set, frozenset) else frozenset if issubclass(origin, Set) else list
        takes = (list, tuple, set, frozenset)
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            loads = [self.load(argument) for argument in arguments]

            def fixed(value: Any) -> Any:
                if not isinstance(value, (list, tuple)) or len(value) != len(loads):
                    raise _Misfit(f"array of {len(loads)} values", value)
                return tuple(_items(value, loads))

            return fixed
        load_one = self.load(arguments[0] if arguments else Any)

        def several(value: Any) -> Any:
            if not isinstance(value, takes):
                raise _Misfit("array", value)
            try:
                return make(map(load_one, value))
            except _Misfit:
                return make(_items(value, [load_one] * len(value)))  # once more, to name the place

        return several

    def _fields(self, kind: type) -> Load:
        """The function for a dataclass or a TypedDict, which may contain itself."""
        inner: list[Load] = []
        self._known[kind] = lambda value: inner[0](value)
        if kind not in self._hints:
            with _resolving(kind):
                self._hints[kind] = typing.get_type_hints(kind, localns=self._names, include_extras=True)
        hints = self._hints[kind]
        if dataclasses.is_dataclass(kind):
            entries = [field for field in dataclasses.fields(kind) if field.init]
            required = {
                field.name
                for field in entries
                if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            }
            fields = [(field.name, self.load(hints[field.name]), field.name in required) for field in entries]
            make: Callable[[dict[str, Any]], Any] = lambda values: kind(**values)  # noqa: E731
            extras = False
        else:
            # __required_keys__ does not see NotRequired[…] in an annotation that is text.
            wrapped: dict[Any, bool] = {typing.Required: True, typing.NotRequired: False}
            needed: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
            fields = [
                (name, self.load(hint), wrapped.get(typing.get_origin(hint), name in needed))
                for name, hint in hints.items()
            ]
            make, extras = dict, True

        def load(value: Any) -> Any:
            if type(value) is not dict:
                raise _Misfit("object", value)
            values = dict(value) if extras else {}
            name = ""
            try:
                for name, convert, is_needed in fields:
                    item = value.get(name, _MISSING)
                    if item is not _MISSING:
                        values[name] = convert(item)
                    elif is_needed:
                        raise _Misfit(_expectation(convert), _MISSING)
            except _Misfit as misfit:
                misfit.path.append(name)
                raise
            try:
                return make(values)
            except (TypeError, ValueError) as error:  # __post_init__ refuses the values
                raise _Misfit(f"{kind.__name__} ({error})", value) from error

        inner.append(load)
        return load


@contextlib.contextmanager
def _resolving(kind: type) -> Iterator[None]:
    """Name the class if an annotation of its fields cannot be resolved."""
    try:
        yield
    except NameError as error:  # also pydantic's
        raise _Unresolved(
            f"The types of {kind.__name__} cannot be resolved: {error}.",
            "define the class, and the names that it uses, at the top of a module.",
        ) from None


_EXPECTED: Final[dict[type, str]] = {
    bool: "boolean", int: "integer", float: "number", str: "string", bytes: "bytes", datetime: "datetime",
    date: "date", time: "time", timedelta: "duration", Decimal: "decimal number", UUID: "UUID",
}  # fmt: skip
_PARSERS: Final[dict[type, Load]] = {
    bool: lambda text: _TRUTH[text.strip().lower()],
    int: int,
    float: float,
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    timedelta: lambda text: timedelta(seconds=float(text)),
    Decimal: Decimal,
    UUID: UUID,
}


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            pass
    raise _Misfit("number", value)


def _exactly(kinds: tuple[type, ...], expected: str) -> Load:
    kind = kinds[0]

    def load(value: Any) -> Any:
        if type(value) is not kind:
            raise _Misfit(expected, value)
        return value

    return load


def _among(members: Mapping[Any, Any]) -> Load:
    expected = "one of " + ", ".join(map(_shown, members))

    def load(value: Any) -> Any:
        # 1 == True == 1.0 in Python; in a message they are three values.
        for known, member in members.items():
            if type(known) is type(value) and known == value:
                return member
        raise _Misfit(expected, value)

    return load


def _items(values: Any, loads: Sequence[Load]) -> list[Any]:
    loaded = []
    for place, (value, load) in enumerate(zip(values, loads)):
        try:
            loaded.append(load(value))
        except _Misfit as misfit:
            misfit.path.append(place)
            raise
    return loaded


def _expectation(convert: Load) -> str:
    """The words for what a missing field should have had."""
    try:
        convert(_MISSING)
    except _Misfit as misfit:
        return misfit.expected
    except Exception:
        pass
    return "a value"


def _unknown(kind: Any) -> InvalidArgument:
    return InvalidArgument(
        f"A schema cannot have the type {getattr(kind, '__name__', None) or repr(kind)}.",
        "pass a dataclass, a pydantic model, a msgspec Struct, a TypedDict or a JSON Schema; their fields are bool,"
        " int, float, str, bytes, dates, Decimal, UUID, Literal, an Enum, unions, lists, dicts and other such classes.",
    )


def _hashable(kind: Any) -> bool:
    try:
        hash(kind)
    except TypeError:
        return False
    return True


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif value is None or isinstance(value, bool):
        text = json.dumps(value)
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "…"


# --- other libraries ---------------------------------------------------------------------------------------------


def _is_pydantic(kind: Any) -> bool:
    model = loaded("pydantic", "BaseModel")
    return model is not None and isinstance(kind, type) and issubclass(kind, model)


def _is_msgspec(kind: Any) -> bool:
    struct = loaded("msgspec", "Struct")
    return struct is not None and isinstance(kind, type) and issubclass(kind, struct)


def _is_object(kind: Any) -> bool:
    """True for a class whose objects have fields, and are not dicts."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or _is_pydantic(kind) or _is_msgspec(kind))


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


_PYDANTIC: Final = {
    "missing": "a value", "float": "number", "int": "integer", "bool": "boolean", "string": "string", "list": "array",
    "dict": "object", "model": "object", "int_from_float": "integer",
}  # fmt: skip
"""Our words, by the type of an error. Its own text is used for the others."""


def _pydantic(kind: Any) -> Load:
    import pydantic

    with _resolving(kind):
        kind.model_rebuild(raise_errors=True)

    def load(value: Any) -> Any:
        try:
            return kind.model_validate(value)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            value = _MISSING if first["type"] == "missing" else first["input"]
            text = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            known = _PYDANTIC.get(first["type"].removesuffix("_type").removesuffix("_parsing"))
            expected = known or text[:1].lower() + text[1:]
            raise _Misfit(expected, value, list(reversed(first["loc"]))) from None

    return load


def _msgspec(kind: Any, parses: bool) -> Load:
    import msgspec

    with _resolving(kind):
        msgspec.inspect.type_info(kind)

    def load(value: Any) -> Any:
        try:
            return msgspec.convert(value, kind, strict=not parses)
        except msgspec.ValidationError as error:
            text, _, place = str(error).partition(" - at `$")
            path = _places(value, kind, not parses, re.findall(r"\[(.+?)\]|\.([^.\[`]+)", place))
            missing = re.search(r"missing required field `(.+)`", text)
            if missing:
                raise _Misfit("a value", _MISSING, [missing[1], *reversed(path)]) from None
            wanted = re.sub(r"^Expected ", "", text.partition(", got")[0]).replace("`", "")
            words = {"float": "number", "int": "integer", "str": "string", "bool": "boolean"}
            expected = " or ".join(words.get(word, word) for word in wanted.split(" | "))
            raise _Misfit(expected, _at(value, path), list(reversed(path))) from None

    return load


def _places(value: Any, kind: Any, strict: bool, parts: list[tuple[str, str]]) -> list[Any]:
    """The path to an offence. msgspec does not say which item of a list it is in, so each item is tried alone."""
    import msgspec

    path: list[Any] = []
    for _, name in parts:
        there = _at(value, path)
        if name and isinstance(there, dict):
            path.append(name)
            continue
        for place in there if isinstance(there, dict) else range(len(there) if isinstance(there, list) else 0):
            alone = {place: there[place]} if isinstance(there, dict) else [there[place]]
            try:
                msgspec.convert(_with(value, path, alone), kind, strict=strict)
            except msgspec.ValidationError:
                path.append(place)
                break
    return path


def _with(value: Any, path: Sequence[Any], inner: Any) -> Any:
    """A copy of a value with another part at a path."""
    if not path:
        return inner
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = _with(copied[path[0]], path[1:], inner)
    return copied


def _at(value: Any, path: Sequence[Any]) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return value
    return value


def _json_schema(given: Mapping[str, Any]) -> Load:
    jsonschema = package("A JSON Schema needs jsonschema", "schemas", "jsonschema")
    kind = jsonschema.validators.validator_for(given, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(given)
    except jsonschema.SchemaError as error:
        raise InvalidArgument(
            f"The JSON Schema is wrong at {error.json_path}: {error.message:.200}.", "correct the schema."
        ) from None
    validator = kind(given)

    def load(value: Any) -> Any:
        for error in validator.iter_errors(value):
            error = jsonschema.exceptions.best_match([error])
            path = list(reversed(error.absolute_path))
            if error.validator == "required":
                name = next((name for name in error.validator_value if name not in error.instance), "?")
                inner = error.schema.get("properties", {}).get(name, {})
                raise _Misfit(_words(inner.get("type", "a value")), _MISSING, [name, *path])
            if error.validator == "type":
                raise _Misfit(_words(error.validator_value), error.instance, path)
            raise _Misfit(f"{error.validator} {json.dumps(error.validator_value):.80}", error.instance, path)
        return value

    return load


def _words(type: Any) -> str:
    return " or ".join(type) if isinstance(type, list) else str(type)


# --- objects to messages -----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Return objects with fields as dicts, at any depth, and members of enumerations as their values."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    names = _names_of(typing.cast("typing.Hashable", kind))
    if names is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if kind in (list, tuple, set, frozenset):
        return kind(map(_plain, value))
    if isinstance(value, enum.Enum):
        return value.value
    if _is_pydantic(kind):
        return {name: _plain(item) for name, item in value.model_dump(by_alias=True).items()}
    if _is_msgspec(kind):
        import msgspec

        return _plain(msgspec.to_builtins(value, builtin_types=_NATIVE, str_keys=False))
    return value


_ATOMS: Final = frozenset((str, int, float, bool, type(None), *_NATIVE))


@functools.lru_cache(1_000)
def _names_of(kind: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass that are arguments of it, so that the message makes an equal object."""
    return (
        tuple(field.name for field in dataclasses.fields(kind) if field.init)
        if dataclasses.is_dataclass(kind)
        else None
    )
