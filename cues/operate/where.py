"""The expressions of ``--where``: Python's syntax over the fields of a message, without side effects.

    dep_delay > 60 and carrier in ("UA", "B6")
    weather.wind_speed >= 30 or not has("weather")
    name.startswith("A") and len(tags) > 2
    get("q/type") == "order"

A name is a field, ``a.b`` and ``a["b"]`` the field of a field; a missing one is None. An expression may use
numbers, text, True, False, None, tuples and lists; comparisons, ``in``, and, or, not, if-else,
arithmetic; the functions below, and the methods of text in :data:`_METHODS`. If a comparison is not
possible for a message (``None > 3``), the message does not match. Every operation is bounded in its work, by the
digits of ``round``, the length of texts that are put together, and the bits of a product. Other parts of Python are not
allowed: calls of other functions, attributes of objects, powers.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, Final

from cues.base.checks import nearest
from cues.operate.refused import Refused

Value = Callable[[dict[str, Any]], Any]

CHARACTERS_MAX: Final = 10_000
"""Characters of an expression."""
DIGITS_MAX: Final = 308
"""Digits to which ``round`` rounds: those of the largest float. Python computes 10 ** digits."""
BITS_MAX: Final = 4_096
"""Bits of a product of integers; those of a message have 64."""
ITEMS_MAX: Final = 1 << 20
"""Characters or items of a sum of texts or lists."""

_BINARY: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: Final[dict[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_UNARY: Final[dict[type[ast.AST], Callable[[Any], Any]]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "abs": abs,
    "bool": bool,
    "float": float,
    "int": int,
    "len": len,
    "max": max,
    "min": min,
    "round": lambda number, digits=None: round(number, _within(digits, DIGITS_MAX)),
    "str": str,
    "sum": sum,
    "match": lambda text, pattern: re.search(pattern, text) is not None,
}
_METHODS: Final = frozenset(("startswith", "endswith", "lower", "upper", "strip", "split", "isdigit"))
_OF_THE_MESSAGE: Final = ("get", "has")


class Where:
    """A parsed expression; call it with a message."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.missing: set[str] = set()
        """Fields of the expression that no message had."""
        self.fields: set[str] = set()
        """The fields of the first message that lacked a field of the expression."""
        self._names: set[str] = set()
        if len(text) > CHARACTERS_MAX:
            raise Refused(f"--where has {len(text):,} characters; {CHARACTERS_MAX:,} are read.", "write less.")
        try:
            self._value = self._compile(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError) as error:
            raise Refused(
                f"--where {text!r} is not an expression: {error}.", "write it like this: --where 'x > 3 and y == \"a\"'"
            ) from None
        except (RecursionError, MemoryError):
            raise Refused(f"--where {text[:60]!r}… is nested too deeply.", "write a simpler one.") from None
        self.missing = set(self._names)

    def __call__(self, message: dict[str, Any]) -> bool:
        if self.missing:
            self.missing -= message.keys()
            if self.missing and len(self.fields) < 1000:
                self.fields |= {key for key in message if isinstance(key, str)}
        try:
            return bool(self._value(message))
        except Exception:  # a comparison that is not possible for this message
            return False

    def explain(self) -> str:
        """A hint for an empty result: a field that no message had; ``""`` if all fields were found."""
        if not self.missing or not self.fields:
            return ""
        name = min(self.missing)
        others = f"there are {', '.join(sorted(self.fields)[:12])}."
        return f"No message has a field {name!r}; {nearest(name, self.fields, 'did you mean {!r}?', others)}"

    def _compile(self, node: ast.expr) -> Value:
        compile = self._compile
        match node:
            case ast.Constant(value=value):
                return lambda message: value
            case ast.Name(id=name):
                self._names.add(name)
                return lambda message: message.get(name)
            case ast.Attribute(value=inner, attr=name):
                return _item(compile(inner), lambda message: name)
            case ast.Subscript(value=inner, slice=place) if not isinstance(place, ast.Slice):
                return _item(compile(inner), compile(place))
            case ast.Tuple(elts=items) | ast.List(elts=items):
                values = [compile(item) for item in items]
                return lambda message: tuple([value(message) for value in values])
            case ast.BoolOp(op=ast.And(), values=parts):
                values = [compile(part) for part in parts]
                return lambda message: all(value(message) for value in values)
            case ast.BoolOp(op=ast.Or(), values=parts):
                values = [compile(part) for part in parts]
                return lambda message: _any(values, message)
            case ast.UnaryOp(op=op, operand=inner) if type(op) in _UNARY:
                unary, operand = _UNARY[type(op)], compile(inner)
                return lambda message: unary(operand(message))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _arithmetic(_BINARY[type(op)], compile(left), compile(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return _comparison(compile(left), [_COMPARE[type(op)] for op in ops], [compile(o) for o in others])
            case ast.IfExp(test=test, body=then, orelse=other):
                values = [compile(test), compile(then), compile(other)]
                return lambda message: (values[1] if values[0](message) else values[2])(message)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(name, [compile(argument) for argument in arguments])
            case ast.Call(func=ast.Attribute(value=inner, attr=name), args=arguments, keywords=[]) if name in _METHODS:
                return _method(compile(inner), name, [compile(argument) for argument in arguments])
        raise Refused(
            f"--where {self.text!r}: {ast.unparse(node)!r} is not allowed in an expression.",
            f"use fields, numbers, text, comparisons, and, or, not, {', '.join((*_OF_THE_MESSAGE, *_FUNCTIONS))}().",
        )

    def _call(self, name: str, arguments: list[Value]) -> Value:
        if name == "get" and 1 <= len(arguments) <= 2:
            return lambda message: message.get(*[argument(message) for argument in arguments])
        if name == "has" and len(arguments) == 1:
            return lambda message: arguments[0](message) in message
        function = _FUNCTIONS.get(name)
        if function is None:
            known = (*_OF_THE_MESSAGE, *_FUNCTIONS)
            raise Refused(
                f"--where {self.text!r}: there is no function {name!r}.",
                nearest(name, known, "use {}().", f"use one of {', '.join(known)}."),
            )
        return lambda message: function(*[argument(message) for argument in arguments])


def _item(inner: Value, place: Value) -> Value:
    def item(message: dict[str, Any]) -> Any:
        value, key = inner(message), place(message)
        if isinstance(value, dict):
            return value.get(key)
        if isinstance(value, (list, tuple, str)) and isinstance(key, int):
            return value[key]
        return None

    return item


def _any(values: list[Value], message: dict[str, Any]) -> bool:
    """Evaluate an ``or``: an error on one side must not hide the other."""
    for value in values:
        try:
            if value(message):
                return True
        except Exception:
            continue
    return False


def _arithmetic(operation: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    def value(message: dict[str, Any]) -> Any:
        a, b = left(message), right(message)
        if operation is operator.mul and not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
            raise TypeError  # such as "a" * 10**9, which is not a test of a message
        if operation is operator.mod and isinstance(a, (str, bytes)):
            raise TypeError
        if operation is operator.mul and isinstance(a, int) and isinstance(b, int):
            _within(a.bit_length() + b.bit_length(), BITS_MAX)
        if operation is operator.add and not isinstance(a, (int, float)):
            _within(len(a) + len(b), ITEMS_MAX)
        return operation(a, b)

    return value


def _within(size: int | None, limit: int) -> int | None:
    """Return a size. Raises ValueError, so the message does not match, if it is beyond the limit."""
    if size is not None and abs(size) > limit:
        raise ValueError
    return size


def _comparison(first: Value, operations: list[Callable[[Any, Any], Any]], others: list[Value]) -> Value:
    def value(message: dict[str, Any]) -> bool:
        left = first(message)
        for operation, other in zip(operations, others):
            right = other(message)
            if not operation(left, right):
                return False
            left = right
        return True

    return value


def _method(inner: Value, name: str, arguments: list[Value]) -> Value:
    def value(message: dict[str, Any]) -> Any:
        text = inner(message)
        if not isinstance(text, str):
            raise TypeError
        return getattr(text, name)(*[argument(message) for argument in arguments])

    return value
