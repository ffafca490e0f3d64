"""Dataclasses that cost a start little: their methods are made at the first use of the class.

    from cues.base.data import dataclass

``dataclasses.dataclass`` compiles up to eight methods of each class, which takes as long as the import of three
modules, and most dataclasses of Cues have no instance in a given run. Here a class gets a descriptor in the place of
each method. The first access to one of them (by an instance, ``help()``, ``dataclasses.fields``, …) makes all of them.
From then on the class is as if ``dataclasses.dataclass`` had decorated it, with three differences:

1. Only ``__init__`` is compiled. The other methods are closures over the names of the fields.
2. A class without a docstring gets none.
3. That a frozen class and its bases are all frozen is not checked.

Until the first access, a field with ``field(…)`` has this description as its class attribute, and not its default.
Threads may come to it at the same time: each makes equal methods. Of the options there are ``frozen`` and
``kw_only``, and no ``InitVar``. A class of a compiled module is made by ``dataclasses`` at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, Final

from cues.overrides import override

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """Make a class a dataclass, as :func:`dataclasses.dataclass` does, but at its first use."""
        return _deferred(cls, **options) if cls is not None else lambda cls: _deferred(cls, **options)


_set: Final = object.__setattr__


class _Factory:
    """The default that a signature shows for ``default_factory``."""

    @override
    def __repr__(self) -> str:
        return "<factory>"


_FACTORY: Final = _Factory()


def _deferred(cls: type, frozen: bool = False, kw_only: bool = False) -> type:
    own = dict(vars(cls))
    if "__mypyc_attrs__" in own:  # the compiler shows what a dataclass needs only during this call
        return dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(cls)
    # A class with an __eq__ of its own has the hash None from Python, which counts as none.
    has_hash = "__hash__" in own and not (own["__hash__"] is None and "__eq__" in own)
    names = [name for name in ("__init__", "__repr__", "__eq__") if name not in own]
    names += ["__dataclass_fields__", "__dataclass_params__", "__match_args__"]
    if frozen:
        names += ["__setattr__", "__delattr__", *([] if has_hash else ["__hash__"])]
    elif not has_hash:
        cls.__hash__ = None  # type: ignore[assignment]
    methods = _Methods(cls, own, names, frozen, kw_only)
    for name in names:
        setattr(cls, name, _Pending(methods, name))
    return cls


class _Methods:
    """The methods of one class, before they are made."""

    def __init__(self, cls: type, own: dict[str, Any], names: list[str], frozen: bool, kw_only: bool) -> None:
        self.cls = cls
        self._own = own
        """The attributes that the class has without them."""
        self._names = names
        self._frozen, self._kw_only = frozen, kw_only

    def make(self) -> None:
        """Give the class its methods."""
        cls, own, frozen = self.cls, self._own, self._frozen
        annotations = inspect.get_annotations(cls)
        described = {name: own[name] for name in annotations if name in own}
        # dataclasses describes the fields, of a class that has nothing else and is not kept.
        bare: Any = type(cls.__name__, (), {**described, "__annotations__": annotations, "__module__": cls.__module__})
        bare.__doc__ = "…"  # else its signature would be made for it
        bare = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=self._kw_only)(bare)
        found = vars(bare)
        params = found["__dataclass_params__"]
        params.init = params.repr = params.eq = True
        params.frozen = frozen
        known: dict[str, Any] = {}
        for base in cls.__mro__[:0:-1]:
            known.update(getattr(base, "__dataclass_fields__", {}))
        known.update(found["__dataclass_fields__"])
        fields = [known[field.name] for field in _fields(known)]
        made: dict[str, Any] = {
            "__init__": _init(cls, fields, frozen),
            "__repr__": _repr([field.name for field in fields if field.repr]),
            "__eq__": _eq([field.name for field in fields if field.compare]),
            "__hash__": _hash([f.name for f in fields if (f.compare if f.hash is None else f.hash)]),
            "__setattr__": _refusal(cls, fields, "__setattr__", "assign to"),
            "__delattr__": _refusal(cls, fields, "__delattr__", "delete"),
            "__match_args__": tuple(field.name for field in fields if field.init and not field.kw_only),
            "__dataclass_fields__": known,
            "__dataclass_params__": params,
        }
        for name, description in described.items():
            if isinstance(description, dataclasses.Field):
                if name in found:
                    setattr(cls, name, found[name])
                elif name in vars(cls):
                    with contextlib.suppress(AttributeError):  # another thread was first
                        delattr(cls, name)
        if "__replace__" in found and "__replace__" not in own:
            cls.__replace__ = found["__replace__"]  # type: ignore[attr-defined]
        for name in self._names:
            method = made[name]
            if inspect.isfunction(method):
                method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
                method.__module__ = cls.__module__
            setattr(cls, name, method)


def _fields(known: dict[str, Any]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields among all descriptions, without the class variables."""
    return dataclasses.fields(type("_", (), {"__dataclass_fields__": known}))


def _init(cls: type, fields: list[dataclasses.Field[Any]], frozen: bool) -> Any:
    scope: dict[str, Any] = {"_set": _set, "_FACTORY": _FACTORY}
    ordered = [f for f in fields if f.init and not f.kw_only]
    named = [f for f in fields if f.init and f.kw_only]
    parameters, lines = ["self"], []
    for field in [*ordered, *named]:
        if field in named[:1]:
            parameters.append("*")
        text = field.name
        if field.default is not dataclasses.MISSING:
            scope[f"_default_{field.name}"] = field.default
            text += f"=_default_{field.name}"
        elif field.default_factory is not dataclasses.MISSING:
            text += "=_FACTORY"
        parameters.append(text)
    for field in fields:
        value = field.name
        if field.default_factory is not dataclasses.MISSING:
            scope[f"_make_{value}"] = field.default_factory
            value = f"_make_{value}()" + (f" if {value} is _FACTORY else {value}" if field.init else "")
        elif not field.init:
            continue
        lines.append(f"_set(self, {field.name!r}, {value})" if frozen else f"self.{field.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), scope)
    made = scope["__init__"]
    made.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return made


def _values(names: list[str]) -> Callable[[Any], Any]:
    """The values of these attributes of an object, as a tuple if there is not exactly one."""
    return attrgetter(*names) if names else lambda instance: ()


def _repr(names: list[str]) -> Any:
    @recursive_repr()
    def shown(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return shown


def _eq(names: list[str]) -> Any:
    values = _values(names)

    def equal(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return equal


def _hash(names: list[str]) -> Any:
    values = _values(names)
    return lambda self: hash(values(self))


def _refusal(cls: type, fields: list[dataclasses.Field[Any]], method: str, change: str) -> Any:
    """The method of a frozen class that refuses changes, with the words of ``dataclasses``."""
    names = frozenset(field.name for field in fields)

    def refuse(self: object, name: str, *value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot {change} field {name!r}")
        getattr(super(cls, self), method)(name, *value)

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
