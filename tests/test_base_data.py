"""``cues.base.data.dataclass``: at each first use the class becomes what ``dataclasses.dataclass`` would have made."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from abc import ABC
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest

from cues.base.data import dataclass


def classes(decorate: Any) -> dict[str, Any]:
    @decorate(frozen=True)
    class Base:
        """A frozen class."""

        a: int
        b: str = "x"

        def both(self) -> Any:
            return super().__repr__() and (self.a, self.b)

    @decorate(frozen=True)
    class Sub(Base):
        """A subclass."""

        c: list[int] = field(default_factory=list, compare=False, repr=False)
        d: int = field(default=3)

    class Plain(Sub):
        def __init__(self, a: int) -> None:
            super().__init__(a, "q")

    @decorate
    class Mutable:
        """A class with other methods."""

        a: int
        y: dict[str, int] = field(default_factory=dict)

        def __post_init__(self) -> None:
            self.a += 1

        def __eq__(self, other: object) -> bool:
            return True

    @decorate(kw_only=True)
    class Abstract(ABC):
        """A class with names only."""

        a: int

    return {"Base": Base, "Sub": Sub, "Plain": Plain, "Mutable": Mutable, "Abstract": Abstract}


USES: dict[str, Callable[[Any], Any]] = {
    "signature": lambda kind: str(inspect.signature(kind)),
    "doc": lambda kind: kind(a=1) and kind.__doc__,
    "help": lambda kind: inspect.getdoc(kind.__init__),
    "match": lambda kind: kind.__match_args__,
    "is": dataclasses.is_dataclass,
    "fields": lambda kind: [(each.name, each.type, each.default) for each in dataclasses.fields(kind)],
    "repr": lambda kind: repr(kind(1)),
    "keyword": lambda kind: repr(kind(a=1)),
    "equal": lambda kind: (kind(a=1) == kind(a=1), kind(a=1) == kind(a=2)),
    "hash": lambda kind: hash(kind(a=1)) == hash(kind(a=1)),
    "hashable": lambda kind: kind.__hash__ is None,
    "assign": lambda kind: setattr(kind(a=1), "a", 2),
    "assign another": lambda kind: setattr(kind(a=1), "other", 2),
    "delete": lambda kind: delattr(kind(a=1), "a"),
    "replace": lambda kind: repr(dataclasses.replace(kind(a=1))),
    "as a dict": lambda kind: dataclasses.asdict(kind(a=1)),
    "copy": lambda kind: repr(copy.deepcopy(kind(a=1))),
    "defaults": lambda kind: kind(a=1) and (getattr(kind, "c", None), getattr(kind, "d", None)),
    "super": lambda kind: kind(a=1).both(),
    "name": lambda kind: kind.__init__.__qualname__.rpartition(".")[2],
    "names": lambda kind: kind(a=1) and [name for name in dir(kind) if not name.startswith("__static")],
}


@pytest.mark.parametrize("kind", list(classes(dataclasses.dataclass)))
@pytest.mark.parametrize("use", list(USES))
def test_a_class_is_after_its_first_use_what_dataclasses_makes(kind: str, use: str) -> None:
    def result(decorate: Any) -> Any:
        try:
            return USES[use](classes(decorate)[kind])
        except (TypeError, AttributeError) as error:  # FrozenInstanceError is an AttributeError
            return type(error), str(error)

    expected: Any = result(dataclasses.dataclass)
    assert result(dataclass) == expected


def test_nothing_is_made_before_the_first_use() -> None:
    kinds = classes(dataclass)
    assert not any("__replace__" in vars(kind) or inspect.isfunction(vars(kind)["__init__"]) for kind in kinds.values()
                   if kind is not kinds["Plain"])  # fmt: skip
    kinds["Sub"](1)
    assert inspect.isfunction(vars(kinds["Base"])["__init__"])  # a base class is made for its subclass
    assert not inspect.isfunction(vars(kinds["Mutable"])["__init__"])


@dataclass(frozen=True)
class Kept:
    a: int


def test_an_instance_may_come_from_another_process() -> None:
    """pickle makes instances without a call of ``__init__``."""
    raw = pickle.dumps(Kept(1))
    assert pickle.loads(raw) == Kept(1)


def test_threads_may_use_a_class_first_at_the_same_time() -> None:
    for _ in range(50):
        sub = classes(dataclass)["Sub"]
        gate, found = threading.Barrier(4), []

        def use(sub: Any = sub, gate: threading.Barrier = gate, found: list[Any] = found) -> None:
            gate.wait()
            found.append((sub(1, c=[2]), sub(1).c))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [(sub(1, c=[2]), [])] * 4


def test_other_options_are_refused() -> None:
    with pytest.raises(TypeError, match="slots"):
        dataclass(slots=True)(type("Slotted", (), {"__annotations__": {"a": "int"}}))  # type: ignore[call-overload]


def test_a_class_of_a_compiled_module_is_made_at_once() -> None:
    """The compiler shows what a dataclass needs only while its decorator runs."""
    kind = dataclass(type("Compiled", (), {"__annotations__": {"a": "int"}, "__mypyc_attrs__": ("a",)}))
    assert inspect.isfunction(vars(kind)["__init__"])
