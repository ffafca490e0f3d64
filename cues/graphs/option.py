"""An entry of the table of options, which is :class:`cues.graphs.options.Options`.

    option(default, text, …)     the field of an option, with its :class:`Option`
    Without, without             a refusal of the option together with others
    NotShared                    its refusal with `--queues DIR` of Spark

The texts of refusals are formats: ``"{where} has {name}={value!r}."``. :data:`FACTS` are the names in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Final, Literal, NamedTuple, TypeVar

from cues.base.data import dataclass

T = TypeVar("T")
Ready = Literal["all", "reading", "source", "stream", "free", "sink"]
"""Ready-made processors that take an option: all; those that read; sources; streams; streams without state; sinks."""


class Without(NamedTuple):
    """A refusal of an option together with others. Its texts are formats over ``FACTS``."""

    wrong: str
    hint: str
    others: Mapping[str, Callable[[Any], object] | None]
    """The other options, each with the values that are refused; None: all but the default. ``kind`` is a name too."""
    own: Callable[[Any], object] | None = None
    """The values of the option itself that are refused; None: all but the default."""


class NotShared(NamedTuple):
    """A refusal of an option by Spark with the queues in a shared directory. Its texts are formats over ``FACTS``."""

    wrong: str
    hint: str


FACTS: Final = ("id", "kind", "where", "node", "name", "value", "other", "others", "other_value")
"""The facts that texts of refusals name: the processor, the option and its value, the options that it excludes."""


@dataclass(frozen=True)
class Option:
    """Everything about an option of processors but its type, its default and the code that does what it says.

    The TypedDicts of ``cues.graphs.options`` give the kinds of processors that take the option. Declarations, engines,
    docs/options.md and ready-made processors read the table.
    """

    text: str
    """The effect, in one or two sentences of Markdown."""
    fits: Callable[[Any], object]
    """False for a value that is refused. It may raise :class:`InvalidArgument` instead."""
    hint: str
    wrong: str
    """The refusal of a value that does not fit. ``{error}`` is the message of the exception."""
    ready: Ready | None
    """The ready-made processors that take the option; None: only functions of the user."""
    in_driver: str
    """The reason why the driver of Spark calls the function, with the queues in a store; "": executors call it."""
    shared: NotShared | None
    """The refusal of Spark with the queues in a shared directory (``--queues DIR``); None: the option works there."""
    without: tuple[Without, ...]
    """The options that it excludes."""


def option(
    default: T,
    text: str,
    fits: Callable[[Any], object] = lambda value: True,
    hint: str = "",
    *,
    without: tuple[Without, ...] = (),
    wrong: str = "",
    ready: Ready | None = None,
    in_driver: str = "",
    shared: NotShared | None = None,
) -> T:
    """Return the field of an option: its default, with an :class:`Option`."""
    entry = Option(text, fits, hint, wrong, ready, in_driver, shared, without)
    return field(default=default, metadata={"option": entry})


def without(
    wrong: str, hint: str, *others: str, own: Callable[[Any], object] | None = None, **values: Callable[[Any], object]
) -> Without:
    """Return the refusal together with ``others``, or with some ``values`` of others."""
    return Without(wrong, hint, {**dict.fromkeys(others), **values}, own)


def one_of(*choices: object) -> Callable[[Any], object]:
    """Return a check for one of the choices, or None."""
    return lambda value: value is None or value in choices


def shown(choices: Iterable[object], between: str = " or ") -> str:
    """Return choices as Python source, for a hint."""
    return between.join(map(repr, choices))
