"""The options of queues: what a message carries along, how long it stays, how large it may be."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, TypedDict, Unpack

from cues.base import clock, names
from cues.base.checks import is_count, is_number, nearest
from cues.base.data import dataclass
from cues.base.option_texts import OptionText, describes
from cues.base.texts import duration, size
from cues.errors import InvalidArgument
from cues.queues import partitioners
from cues.queues.partitioners import PARTITIONS_MAX, Key, Missing, Placement
from cues.records.batch import not_a_dict
from cues.records.columns import COMPRESSIONS
from cues.records.schema import Schema, schema_of

MESSAGE_BYTES_MAX: Final = 64 << 20
COMPRESSION: Final = "zstd"
METADATA: Final = frozenset({"t", "time", "tx"})

FUNCTIONS: Final = ("key", "partitioner")
"""Options that may be functions; their plain data is ``{"function": "module:qualname"}``."""

_PLACING: Final = ("partitions", *FUNCTIONS)
"""Options that decide the partition of a message."""

_UNITS_S: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNITS_BYTES: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True)
class Retention:
    """The messages that a queue may delete from its front by itself.

    ``count`` keeps that many of the last messages, and up to a 64th more (1,000 at most). ``age`` (``"10d"``, seconds
    or a timedelta) keeps messages younger than that. ``bytes`` (``"500MB"``) keeps about that size. ``read`` keeps
    messages that some known reader (a processor, a named tailer or a consumer group) has not read. With several, a
    message is deleted if any of them allows it. ``unread`` is no limit of its own: with it no message is deleted that
    a known reader has not read, whatever the limits allow. Messages are deleted at an append, as whole record batches,
    so up to one batch more than that stays. Messages of a step that is under way or will be repeated stay, whatever
    the policy.
    """

    count: int | None = None
    age: float | str | timedelta | None = None
    bytes: int | str | None = None
    read: bool = False
    unread: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "age", seconds_of(self.age))
        object.__setattr__(self, "bytes", bytes_of(self.bytes))
        for name in ("count", "age", "bytes"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise InvalidArgument(f"Retention({name}={value!r}) keeps nothing.", "pass a number above 0, or None.")
        if self.unread and not (self.read or self.only_age or self.count or self.bytes):
            raise InvalidArgument(
                "Retention(unread=True) has no limit, so it deletes nothing.",
                "pass a limit too, such as age='7d'; or read=True, which deletes what all readers have read.",
            )

    @property
    def only_age(self) -> bool:
        """True if nothing but the age of a message lets it be deleted."""
        return self.age is not None and self.count is None and self.bytes is None and not self.read

    @property
    def age_ns(self) -> int:
        assert isinstance(self.age, (int, float))  # in seconds, whatever form it was given in
        return int(self.age * 1e9)

    @staticmethod
    def of(value: Retention | str | int | None) -> Retention | None:
        """Return the retention for ``"10d"``, ``"500MB"``, a count, ``"read"``, a Retention or None."""
        if value is None or isinstance(value, Retention):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return Retention(count=value)
        if value == "read":
            return Retention(read=True)
        if isinstance(value, str):
            if re.fullmatch(r"\d+", value.replace("_", "")):
                return Retention(count=int(value))
            if re.fullmatch(r"[\d._]+\s*[smhdw]", value):
                return Retention(age=value)
            return Retention(bytes=value)
        raise InvalidArgument(f"retention is {value!r}.", "pass '10d', '500MB', a count, or cues.Retention(count=…).")


_KEPT: Final[dict[str, Callable[[Any], str]]] = {
    "count": lambda value: f"{value:,} messages",
    "age": lambda value: f"those of the last {duration(value)}",
    "bytes": lambda value: f"about {size(value)}",
    "read": lambda value: "messages that a reader has not read",
    "unread": lambda value: "and messages that a reader has not read",
}


def kept(retention: Mapping[str, Any] | None) -> str | None:
    """The messages that a retention policy keeps, as text; ``retention`` is plain data, None keeps all."""
    return ", ".join(_KEPT[name](value) for name, value in retention.items()) if retention else None


class QueueKeywords(TypedDict, total=False):
    """The keyword arguments of :meth:`Store.queue`: the options of a queue without ``path`` and ``schema``."""

    metadata: Iterable[str] | bool
    retention: Retention | str | int | None
    max_message_bytes: int
    partitions: int
    key: str | Key | None
    partitioner: str | Placement | None
    max_lag: int | None
    max_bytes: int | str | None
    compression: str | None


class AllKeywords(QueueKeywords, total=False):
    """The keyword arguments of :class:`QueueOptions`."""

    path: str | os.PathLike[str] | None
    schema: Any


def _about(convert: Callable[[str, Any], object], text: str) -> dict[str, Any]:
    """What a field of :class:`QueueOptions` has besides its type and its default.

    ``convert`` returns the value of an option, from its name and an argument, or raises :class:`InvalidArgument`.
    ``text`` is its effect, for docs/options.md.
    """
    return {"convert": convert, "text": text}


def _fits(test: Callable[[Any], object], hint: str, none: bool = False) -> Callable[[str, Any], object]:
    """An argument that passes a test is the value; ``none``: None too."""

    def convert(name: str, value: Any) -> object:
        if not (test(value) or (none and value is None)):
            raise InvalidArgument(f"{name} is {value!r}.", hint)
        return value

    return convert


def _metadata(name: str, value: Any) -> frozenset[str] | bool:
    if isinstance(value, bool):
        return value and frozenset({"t", "time"})
    hint = "pass a set of 't', 'time' and 'tx', or True, or False."
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"metadata is {value!r:.60}.", hint)
    fields = frozenset(names)
    unknown = fields - METADATA
    if unknown:
        raise InvalidArgument(f"Unknown metadata {', '.join(map(repr, sorted(unknown, key=str)))}.", hint)
    return fields


def _partitioner(name: str, value: Any) -> object:
    if value is None or callable(value) or (isinstance(value, str) and value in partitioners.NAMES):
        return value
    raise InvalidArgument(
        f"partitioner is {value!r}; there are {', '.join(map(repr, partitioners.NAMES))}.",
        nearest(value, partitioners.NAMES, "pass {!r}.", "pass one, or a function (message, n) -> partition."),
    )


def _path(name: str, value: Any) -> object:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return _A_PATH(name, path)


def _max_bytes(name: str, value: Any) -> object:
    return _A_SIZE(name, bytes_of(value))


_A_PATH: Final = _fits(
    lambda path: isinstance(path, str) and path and "\0" not in path,
    "pass the directory of a store, such as 'data/shared'.",
    none=True,
)
_A_SIZE: Final = _fits(lambda size: is_count(size, 1, 1 << 62), "pass a size such as '500MB', or None.", none=True)


@dataclass(frozen=True)
class QueueOptions:
    """The options of a queue, with their defaults."""

    metadata: frozenset[str] | bool = field(
        default=frozenset(),
        metadata=_about(
            _metadata,
            'The metadata that messages carry along: a set of `"t"` (index), `"time"` (append time) and `"tx"`'
            " (index of the journey's first message). True: t and time. The empty set: only the metadata that a"
            " message came with. False: all metadata is dropped, except the delivery hash.",
        ),
    )
    retention: Retention | None = field(
        default=None,
        metadata=_about(
            lambda name, value: Retention.of(value),
            'A `cues.Retention(…)`, or short: `"10d"`, `"500MB"`, a count, `"read"` (waits for the slowest'
            " processor, named tailer and consumer group); None keeps all messages. Where a graph says nothing, a new"
            " queue of its store that one processor writes and another reads keeps 7 days, and what is unread; other"
            " queues keep all.",
        ),
    )
    max_message_bytes: int = field(
        default=MESSAGE_BYTES_MAX,
        metadata=_about(
            _fits(lambda value: is_count(value, 1, (1 << 32) - 1), "pass a number of bytes below 4 GiB."),
            "Bytes of the largest encoded message.",
        ),
    )
    partitions: int = field(
        default=1,
        metadata=_about(
            _fits(lambda value: is_count(value, 1, PARTITIONS_MAX), f"pass a count from 1 to {PARTITIONS_MAX}."),
            "The number of logs, 1 to 256; `Queue.grow` makes it larger.",
        ),
    )
    path: str | None = field(
        default=None,
        metadata=_about(
            _path,
            "The directory of another store that holds the queue, made when it is missing (graphs only). A"
            " relative path is relative to the graph file under `cues run`, else to the current directory; `~` is"
            " your home. Messages are committed in the graph's own store first.",
        ),
    )
    key: str | Key | None = field(
        default=None,
        metadata=_about(
            _fits(
                lambda value: callable(value) or (isinstance(value, str) and value),
                "pass the name of a field, or a function of a message.",
                none=True,
            ),
            "For several partitions: a field, or a function of the message. Messages with one key are on one partition,"
            " in their order.",
        ),
    )
    partitioner: str | Placement | None = field(
        default=None,
        metadata=_about(
            _partitioner,
            '`"murmur2"` (the default with a key; as Kafka places keys), `"murmur2-sticky"` (the same, and'
            ' messages without a key as `"sticky"`), `"fnv1a-modulo"`, `"rendezvous"`, `"round-robin"`, `"sticky"`'
            " (the default without a key), or a function `(message, n) -> int`.",
        ),
    )
    schema: Schema | str | None = field(
        default=None,
        metadata=_about(
            lambda name, value: schema_of(value),
            "Fields of messages that are columns of the queue's table in a shared directory (`--queues DIR`;"
            ' graphs only): a dataclass, a TypedDict, `{"id": int, "price": "double"}`, a pyarrow schema, or'
            ' `"infer"`, from the first messages. A value that does not fit is NULL there, and stays in the'
            " message.",
        ),
    )
    max_lag: int | None = field(
        default=None,
        metadata=_about(
            _fits(
                lambda value: is_count(value, 1, (1 << 62) - 1),
                "pass a number of messages, 1 or more, or None.",
                none=True,
            ),
            "Writers of the queue wait while a known reader (a processor, a named tailer or a consumer group) has"
            " not read this many messages; None for no bound.",
        ),
    )
    max_bytes: int | None = field(
        default=None,
        metadata=_about(
            _max_bytes,
            'The same for about this many bytes that a reader has not read: `"500MB"`, or a number.',
        ),
    )
    compression: str | None = field(
        default=COMPRESSION,
        metadata=_about(
            _fits(lambda value: value in COMPRESSIONS, "pass 'zstd', 'lz4' or None.", none=True),
            'How rows that are written as tables are compressed: `"zstd"`, `"lz4"` (less small, faster to read),'
            " or None. Messages that are written as dicts are not compressed.",
        ),
    )

    keeps_all: ClassVar[bool] = False
    """True if ``retention=None`` was given. If nothing was given, a graph may have a default."""

    def __init__(self, **options: Unpack[AllKeywords]) -> None:
        check_names(options)
        if options.get("retention", 0) is None:
            object.__setattr__(self, "keeps_all", True)
        for one in dataclasses.fields(self):
            given = options.get(one.name, one.default)
            object.__setattr__(self, one.name, one.metadata["convert"](one.name, given))
        if self.partitioner in partitioners.KEYED and self.key is None:
            raise InvalidArgument(
                f"partitioner={self.partitioner!r} places messages by their key.", "pass key='…' with it."
            )

    @property
    def kept(self) -> frozenset[str]:
        """The fields that the queue adds to the metadata of its messages."""
        return self.metadata if isinstance(self.metadata, frozenset) else frozenset()

    @property
    def bounded(self) -> bool:
        """True if writers of the queue wait for its readers."""
        return self.max_lag is not None or self.max_bytes is not None

    @property
    def strips(self) -> bool:
        """True if the queue drops the metadata that messages come with."""
        return self.metadata is False

    @property
    def placing(self) -> tuple[str | None, str | None]:
        """The names of key and partitioner. Queues with the same names place equal keys alike."""
        default = "sticky" if self.key is None else "murmur2"
        return partitioners.name_of(self.key), partitioners.name_of(self.partitioner) or default

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as plain data; also a given ``retention=None``."""
        plain: dict[str, Any] = {"retention": None} if self.keeps_all else {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                if isinstance(value, frozenset):
                    value = sorted(value)
                elif isinstance(value, Retention):
                    value = {k: v for k, v in dataclasses.asdict(value).items() if v}
                elif one.name == "schema" and not isinstance(value, str):
                    value = dict(value)
                elif one.name in FUNCTIONS and not isinstance(value, str):
                    value = {"function": partitioners.name_of(value)}
                plain[one.name] = value
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> QueueOptions:
        """Return the options from a result of :meth:`to_dict`."""
        options = dict(plain)
        if isinstance(options.get("retention"), dict):
            options["retention"] = Retention(**options["retention"])
        for name in FUNCTIONS:
            if isinstance(options.get(name), dict):
                options[name] = Missing(options[name]["function"])
        check_names(options)
        return QueueOptions(**options)


QUEUE_TEXTS: Final = {
    one.name: OptionText(one.default, one.metadata["text"]) for one in dataclasses.fields(QueueOptions)
}
describes(QUEUE_TEXTS, QUEUE_TEXTS)(QueueOptions)


def changed(options: QueueOptions, changes: Mapping[str, Any]) -> QueueOptions:
    """Return a copy with the given options changed; raise for an unknown name."""
    check_names(changes)
    return QueueOptions(**{**_stated(options), **changes})


def _stated(options: QueueOptions) -> dict[str, Any]:
    """Return the options by name, without a retention that was not given."""
    stated = {one.name: getattr(options, one.name) for one in dataclasses.fields(options)}
    if options.retention is None and not options.keeps_all:
        del stated["retention"]
    return stated


def kept_in_store(options: QueueOptions) -> QueueOptions:
    """Return the options as the queue's own store keeps them: without the path, and without the schema."""
    return changed(options, {"path": None, "schema": None})


def to_open(options: QueueOptions) -> dict[str, Any]:
    """Return the arguments to open a queue that may exist.

    Default partitions, key and partitioner are left out, and so is a retention that was not given.
    """
    given = options.to_dict()
    return {name: value for name, value in _stated(options).items() if name not in _PLACING or name in given}


def placing_to_dict(options: QueueOptions) -> dict[str, Any]:
    """Return partitions, key and partitioner as plain data, without those that have their defaults."""
    return {name: value for name, value in options.to_dict().items() if name in _PLACING}


def check_names(options: Iterable[str]) -> None:
    """Raise for an unknown option name; the hint has the nearest known one."""
    known = [one.name for one in dataclasses.fields(QueueOptions)]
    for name in options:
        if name not in known:
            raise InvalidArgument(
                f"A queue has no option {name!r}; it has {', '.join(known)}.",
                nearest(name, known, "pass {}= instead.", f"pass one of those, such as {known[0]}=."),
            )


def _measured(value: str, units: Mapping[str, float], what: str, hint: str) -> float:
    """Return the value of a number with its unit."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)", value, re.ASCII)
    unit = units.get(match[2], units.get(match[2].upper())) if match else None
    if not match or not unit:
        raise InvalidArgument(f"{value!r} is not {what}.", hint)
    return float(match[1].replace("_", "")) * unit


def seconds_of(value: float | str | timedelta | None) -> float | None:
    if isinstance(value, str):
        return _measured(value, _UNITS_S, "a length of time", "write '90s', '15m', '12h', '10d' or '2w'.")
    return value.total_seconds() if isinstance(value, timedelta) else value


def duration_of(value: float | str | timedelta, name: str, *, zero: bool = False) -> float:
    """Return the seconds of a duration: of seconds, a timedelta, or a text such as ``"250ms"``, ``"90s"`` or ``"2w"``.

    It is more than 0 (with ``zero`` it may be 0), and less than 2³³ seconds, which are 272 years. ``name`` begins the
    error. Raises :class:`InvalidArgument` for everything else.
    """
    hint = "pass seconds, a timedelta, or a text such as '250ms', '90s', '15m', '12h', '10d' or '2w'."
    try:
        seconds = seconds_of(value)
    except InvalidArgument:
        seconds = None
    if not is_number(seconds) or not 0 <= seconds < 1 << 33 or (seconds == 0 and not zero):  # type: ignore[operator]
        least = "from 0 on" if zero else "above 0"
        raise InvalidArgument(f"{name} is {value!r:.60}, not a duration {least}.", hint)
    return float(seconds)  # type: ignore[arg-type]


def size_of(value: int | str | None) -> int | None:
    """Return the bytes of a size such as ``"500MB"``; 0 and None stay. Raises :class:`InvalidArgument`."""
    if value is not None and not isinstance(value, str) and not is_count(value, 0, 1 << 62):
        raise InvalidArgument(f"{value!r} is not a size.", "pass a number of bytes, or a size such as '500MB'.")
    return 0 if value in ("0", 0) else bytes_of(value)


def bytes_of(value: int | str | None) -> int | None:
    if not isinstance(value, str):
        return value
    return int(_measured(value, _UNITS_BYTES, "a size", "write '500MB' or '2GiB', or '10d' for an age."))


At = datetime | float | None
Delay = str | timedelta | float | None


def delayed(message: dict[str, Any], deliver_at: At = None, delay: Delay = None) -> dict[str, Any]:
    """Return a copy of a message with a time before which no processor gets it, for any way to write a message.

    ``deliver_at`` is an aware datetime, or seconds since the epoch. ``delay`` counts from now: seconds, a timedelta,
    or a text such as ``"10m"`` (``s``, ``m``, ``h``, ``d``, ``w``). A time in the past delivers at once. The time is
    the key ``q/deliver-at`` of the metadata of the message, and is not passed on to messages that are made of it.

    Only processors of graphs wait. Tailers, and consumers of :mod:`cues.txn` and :mod:`cues.groups`, read the message
    at once. Raises :class:`InvalidArgument` unless one of both times is given, and is one.
    """
    if not isinstance(message, dict):
        raise not_a_dict(message)
    meta = message.get(names.META, {})
    if not isinstance(meta, dict):
        return message  # refused where it is written
    return {**message, names.META: {**meta, names.DELIVER_AT: clock.to_datetime(_time_ns(deliver_at, delay))}}


def _time_ns(deliver_at: At, delay: Delay) -> int:
    if (deliver_at is None) == (delay is None):
        given = "both" if delay is not None else "none"
        raise InvalidArgument(
            f"A delayed message has deliver_at= or delay=, and {given} of them is given.",
            "give one: delay='10m', or deliver_at=datetime.now(timezone.utc) + timedelta(days=1).",
        )
    if deliver_at is not None:
        return clock.instant_ns(deliver_at, "deliver_at")
    seconds = duration_of(delay, "delay", zero=True)  # type: ignore[arg-type]
    return clock.instant_ns(clock.now_ns() / 1e9 + seconds, "The time after the delay")
