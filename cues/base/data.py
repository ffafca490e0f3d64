"""Dataclasses whose methods are compiled at their first use.

    from cues.base.data import dataclass

``dataclasses.dataclass`` compiles up to eight methods of each class, which takes as long as the import of two modules.
Most dataclasses of Cues have no instance in a given run, and its start would wait for their methods. Here a class gets
a descriptor in the place of each method. The first access to one of them (by an instance, ``help()``,
``dataclasses.fields``, …) puts the methods of ``dataclasses.dataclass`` in their places. From then on the class is as
if ``dataclasses.dataclass`` had decorated it. Threads may come to this at the same time: each makes the same methods.

Until the first access, a field with ``field(…)`` has this description as its class attribute, and not its default.
Of the options there are ``frozen`` and ``kw_only``. Compiled modules (``[tool.cues.compile]``) use ``dataclasses``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """Make a class a dataclass, as :func:`dataclasses.dataclass` does, but at its first use."""
        return _deferred(cls, options) if cls is not None else lambda cls: _deferred(cls, options)


_FROZEN: Final = ("__setattr__", "__delattr__")
_MADE: Final = (
    *("__init__", "__repr__", "__eq__", "__hash__", "__match_args__"),
    *("__dataclass_fields__", "__dataclass_params__"),
)


def _deferred(cls: type, options: dict[str, bool]) -> type:
    if options.keys() - {"frozen", "kw_only"}:
        raise TypeError(f"{cls.__qualname__}: options {', '.join(options)}")
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", "_abc_impl")}
    methods = _Methods(cls, own, options)
    for name in (*_MADE, *(_FROZEN if options.get("frozen") else ())):
        if name not in own:
            setattr(cls, name, _Pending(methods, name))
    return cls


class _Methods:
    """The methods of one class, before they are made."""

    def __init__(self, cls: type, own: dict[str, Any], options: dict[str, bool]) -> None:
        self.cls = cls
        self._own = own
        """The attributes that the class has without them."""
        self._options = options

    def make(self) -> None:
        """Give the class its methods, which are those of an equal class that ``dataclasses`` has made."""
        cls, own = self.cls, {**self._own, "__qualname__": self.cls.__qualname__}
        made: Any = dataclasses.dataclass(**self._options)(type(cls)(cls.__name__, cls.__bases__, own))
        found = vars(made)
        fields = dataclasses.fields(made)
        for field in fields:
            if isinstance(own.get(field.name), dataclasses.Field):
                if field.name in found:
                    setattr(cls, field.name, found[field.name])
                elif field.name in vars(cls):
                    delattr(cls, field.name)
        if self._options.get("frozen"):
            names = frozenset(field.name for field in fields)
            found = {**found, **{name: _refusal(cls, names, name) for name in _FROZEN}}
        for name in ("__doc__", "__replace__", *_FROZEN, *_MADE):
            if name in found and found[name] is not own.get(name, self):
                setattr(cls, name, found[name])


def _refusal(cls: type, names: frozenset[str], method: str) -> Any:
    """The method of a frozen class that refuses changes, with the words of ``dataclasses``."""
    change = "delete" if method == "__delattr__" else "assign to"

    def refuse(self: object, name: str, *value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot {change} field {name!r}")
        getattr(super(cls, self), method)(name, *value)

    refuse.__name__, refuse.__qualname__ = method, f"{cls.__qualname__}.{method}"
    return refuse


class _Pending:
    """An attribute of a dataclass that is made when it is read."""

    __slots__ = ("_methods", "_name")

    def __init__(self, methods: _Methods, name: str) -> None:
        self._methods = methods
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        cls = self._methods.cls
        if vars(cls)[self._name] is self:
            self._methods.make()
        value = vars(cls)[self._name]
        get = getattr(type(value), "__get__", None)
        return value if get is None else get(value, instance, owner)


__all__ = ["dataclass"]
