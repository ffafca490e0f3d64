"""The messages that a call returned: checked, placed and packed when the call returns.

    keep       one result, packed: a message, a list of them, or a dict of these by binding
    collect    the kept results of all calls of a step, sorted by output binding

A result is packed at once because the function may change the dict afterwards, and because a wrong result is the
failure of this call (:class:`cues.errors.ReturnError`) and of no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final

from cues import codec
from cues.errors import ReturnError
from cues.graphs.processor import Node
from cues.queues.tables import Returned, is_table
from cues.records import batch as batches
from cues.steps.failure import Failure
from cues.steps.imperative import Imperative
from cues.steps.outgoing import Packer
from cues.steps.results import Output, Results, TableOutput

if TYPE_CHECKING:
    from cues.records.provenance import Provenance


def message_of(value: Any) -> dict[str, Any] | None:
    """Return the message for a dict or an object of a class with fields; None for any other value."""
    if isinstance(value, dict):
        return value
    from cues import schemas

    return schemas.message_of(value)


Kept = Any
"""The packed result of a call: a message or a list of them, for each output; a dict of these by binding; or None.

Or :data:`IN_COLUMNS`: one message for each binding, in the columns of :class:`ReturnedMessages`.
"""


class _InColumns:
    """The type of :data:`IN_COLUMNS`."""


IN_COLUMNS: Final = _InColumns()

_UNSTARTED: Final = (CoroutineType, GeneratorType, AsyncGeneratorType)
"""Results of a function whose body has not run."""


class ReturnedMessages:
    """The results of the calls of one processor."""

    def __init__(self, node: Node, packers: dict[str, Packer], imperative: Imperative | None) -> None:
        self._node = node
        self._packers = packers
        self._bindings = list(packers)
        self._imperative = imperative
        self._only = next(iter(packers.values())) if node.returns_messages and len(packers) == 1 else None
        """The packer of the one output, if a function returns its messages as they are."""
        self._by_output = not node.returns_messages
        self._columns: dict[str, list[bytes]] = {}
        """By binding, the messages of the results that are :data:`IN_COLUMNS`, in their order; empty between steps."""
        self.provenance: Provenance | None = None
        """The provenance of the step's messages, if that of one may be too large for a page."""
        self.careful = False
        """True if each result is checked at once: a result of this step was refused after later calls."""

    def begin(self, provenance: Provenance | None) -> None:
        """Begin a step."""
        self.careful = False
        self.provenance = provenance
        if self._by_output:
            self._columns = {binding: [] for binding in self._bindings}

    def keep_all(self, kept: list[Kept], returned: Iterable[Any]) -> None:
        """Append to ``kept`` what :meth:`keep` makes of each result; an exception leaves the results before it there.

        For functions that are given messages and nothing else. Most results are single messages of which only the
        size and the keys are checked; these checks are made once for all of them. So a message that is refused may
        be found after later calls. These are then repeated, once a step at most (:attr:`careful`).
        """
        start = len(kept)
        if not self._bindings:
            for result in returned:
                kept.append(None if result is None else self.keep(result))
            return
        if (
            self.careful
            or self._node.at_most_once
            or not (plain := [p for p in self._packers.values() if not p.places])
        ):
            self._keep_each(kept, returned)
            return
        try:
            if not self._node.returns_messages:
                self._keep_by_binding(kept, returned)
            elif len(plain) == len(self._packers):
                self._keep_messages(kept, returned)
            else:
                self._keep_each(kept, returned)
        except Exception:
            self._examine(kept, start, plain)
            raise
        self._examine(kept, start, plain)

    def _keep_each(self, kept: list[Kept], returned: Iterable[Any]) -> None:
        for result in returned:  # compiled, extend() would lose the results before an exception
            kept.append(self.keep(result))

    def _keep_messages(self, kept: list[Kept], returned: Iterable[Any]) -> None:
        """Pack the results of a function whose messages go to its output, or to each of its outputs, as they are."""
        pack = codec.thread_packer()
        for result in returned:
            if type(result) is dict:
                try:
                    kept.append(pack(result))
                    continue
                except Exception:
                    pack = codec.thread_packer(renew=True)
            kept.append(self.keep(result))

    def _keep_by_binding(self, kept: list[Kept], returned: Iterable[Any]) -> None:
        """Pack the results of a function that returns a dict of messages by binding."""
        pack = codec.thread_packer()
        plain = {binding for binding, packer in self._packers.items() if not packer.places}
        columns = self._columns
        filled = [(binding, column) for binding, column in columns.items() if binding in plain]
        whole = len(columns) if len(filled) == len(columns) else -1
        for result in returned:
            if type(result) is dict:
                if len(result) == whole:  # the usual case: a message for each binding
                    try:
                        for binding, column in filled:
                            message = result[binding]
                            if type(message) is not dict:
                                break
                            column.append(pack(message))
                        else:
                            kept.append(IN_COLUMNS)
                            continue
                    except Exception:
                        pack = codec.thread_packer(renew=True)
                    _cut(columns, min(map(len, columns.values())))
                some: dict[str, bytes] = {}
                for binding, message in result.items():
                    if type(message) is not dict or binding not in plain:
                        break
                    try:
                        some[binding] = pack(message)
                    except Exception:
                        pack = codec.thread_packer(renew=True)
                        break
                else:
                    kept.append(some)
                    continue
            kept.append(self.keep(result))

    def _examine(self, kept: list[Kept], start: int, plain: list[Packer]) -> None:
        """Make the checks of :meth:`keep` for results that were packed without them.

        The first that is refused is removed with all after it, and its error is raised.
        """
        packed = kept[start:] if start else kept
        in_columns = packed.count(IN_COLUMNS) if self._columns else 0
        try:
            if in_columns:
                whole = in_columns == len(packed)
                packed = [] if whole else [result for result in packed if result is not IN_COLUMNS]
            if packed and type(packed[0]) is dict:
                packed = list(chain.from_iterable(map(dict.values, packed)))
            joined = b"".join(packed)
        except TypeError:  # some results are no single message
            packed = list(chain.from_iterable(map(_items, packed)))
            joined = b"".join(packed)
        if in_columns:
            packed = packed + list(chain.from_iterable(column[-in_columns:] for column in self._columns.values()))
            joined = b"".join(packed)
        limit_bytes = min(packer.limit_bytes for packer in plain)
        small = len(joined) <= limit_bytes or max(map(len, packed)) <= limit_bytes
        if small and not (batches.SLASH in joined and batches.has_mark(joined)):
            return
        self._leave_columns(kept, start)
        for at in range(start, len(kept)):
            if any(len(item) > limit_bytes or batches.has_mark(item) for item in _items(kept[at])):
                try:
                    kept[at] = self.keep(_unpacked(kept[at]))
                except BaseException:
                    self.careful = True
                    del kept[at:]
                    raise

    def _leave_columns(self, kept: list[Kept], start: int) -> None:
        """Give the results from ``start`` on that are in columns the form of the others."""
        before = kept[:start].count(IN_COLUMNS)
        rows = zip(*[column[before:] for column in self._columns.values()])
        for at in range(start, len(kept)):
            if kept[at] is IN_COLUMNS:
                kept[at] = dict(zip(self._bindings, next(rows)))
        _cut(self._columns, before)

    def keep(self, result: Any, offset: int = 0) -> Kept:
        """Check, place and pack the result of the call for the message at ``offset``.

        The function may change the returned dict afterwards. A wrong result is a failure of this call.
        """
        provenance = self.provenance
        if provenance is None and type(result) is dict and self._only is not None:
            return self._only.pack(result)
        if type(result) is Returned:
            return self._tables(result.value)
        if provenance is not None:
            provenance = provenance.slice(offset, offset + 1)
            if self._imperative is not None:
                self._imperative.check(provenance)
        if result is None:
            return None
        messages = self._by_binding(result)
        if self._node.returns_messages and len(messages) == 1:
            ((binding, items),) = messages.items()
            packer = self._packers[binding]
            packed = [packer.pack(item, provenance) for item in items]
            return packed[0] if len(packed) == 1 else packed
        return {name: [self._packers[name].pack(item, provenance) for item in some] for name, some in messages.items()}

    def _tables(self, value: Any) -> dict[str, TableOutput]:
        """Check and place the tables that a call returned. A wrong one is a failure of this call, as any result is."""
        if not self._bindings:
            self._by_binding([])  # raises; a sink ignores its result
            return {}
        if self._node.returns_messages:
            by_binding = dict.fromkeys(self._bindings, value)
        else:
            by_binding = {name: each for name, each in self._by_output_of(value).items() if each is not None}
        return {name: TableOutput(*self._packers[name].table(each)) for name, each in by_binding.items()}

    def keep_columns(self, result: Any, offsets: list[int] | None) -> dict[str, Output]:
        """Check, place and pack the result of a function of columns (:class:`cues.queues.tables.Columns`).

        ``offsets``: of the messages that it was given, if a filter took others away.
        """
        outputs: dict[str, Output] = {}
        if self._node.returns_messages:
            result = dict.fromkeys(self._bindings, result)
        for binding, (made, origins) in self._by_output_of(result).items():
            packer = self._packers[binding]
            if offsets is not None:
                origins = [offsets[origin] for origin in origins]
            if is_table(made):
                outputs[binding] = TableOutput(*packer.table(made), origins)
            else:
                outputs[binding] = Output([packer.pack(message) for message in made], origins)
        return outputs

    def collect(self, kept: list[Kept], failures: dict[int, Failure], closed: int | None = None) -> Results:
        """Sort the kept results of the calls by output binding."""
        columns, self._columns = self._columns, {}
        outputs: dict[str, Output] = {}
        for binding in self._bindings:
            outputs[binding] = _column(binding, kept, columns[binding] if columns else [])
        return Results(outputs, failures, len(kept), closed)

    def _by_binding(self, result: Any) -> dict[str, list[Any]]:
        """The messages that a call returned, by binding; raises :class:`ReturnError`."""
        if result is None:
            return {}
        if not isinstance(result, (dict, list, tuple)):
            message = message_of(result) if self._bindings else None
            if message is None:
                self.check_ran(result)
            elif self._node.returns_messages:
                result = message
        if not self._bindings:
            if self._node.kind == "sink":
                return {}  # any other result of a sink is ignored
            raise ReturnError(
                f"{self._node.id} returned {type(result).__name__}, but it has no outputs.",
                "use process.appenders[…].write(message) and return None; or declare outputs.",
            )
        if self._node.returns_messages:
            return dict.fromkeys(self._bindings, self._messages(result, ""))
        messages: dict[str, list[Any]] = {}
        for binding, value in self._by_output_of(result).items():
            if value is not None:
                messages[binding] = self._messages(value, f" for {binding!r}")
        return messages

    def _by_output_of(self, result: Any) -> dict[str, Any]:
        """A result for several outputs: a dict by binding. Raises :class:`ReturnError`."""
        if not isinstance(result, dict):
            raise ReturnError(
                f"{self._node.id} returned {type(result).__name__}; with several outputs a function returns"
                f" a dict by binding ({', '.join(map(repr, self._bindings))}) or None.",
                f"return {{{self._bindings[0]!r}: message}}.",
            )
        for binding in result:
            if binding not in self._bindings:
                raise ReturnError(
                    f"{self._node.id} returned a message for {binding!r}, which is not an output; its outputs are"
                    f" {', '.join(map(repr, self._bindings))}.",
                    "return one of those bindings.",
                )
        return result

    def check_ran(self, result: Any) -> None:
        """Refuse the result of a function whose body has not run: a sink that returns one has done nothing."""
        if isinstance(result, _UNSTARTED) or hasattr(type(result), "__await__"):
            if isinstance(result, (CoroutineType, GeneratorType)):
                result.close()
            raise ReturnError(
                f"{self._node.id} returned a {type(result).__name__}, which Cues neither awaits nor iterates,"
                " because the function is not an `async def`.",
                "declare async def f(message): return await g(message); or do all the work before returning.",
            )

    def _messages(self, value: Any, where: str) -> list[Any]:
        if isinstance(value, dict):
            return [value]
        if isinstance(value, (list, tuple)):
            messages = list(map(message_of, value))
            for item, message in zip(value, messages):
                if message is None:
                    raise ReturnError(
                        f"{self._node.id} returned a list{where} with {type(item).__name__} in it; messages are dicts.",
                        "return a list of dicts.",
                    )
            return messages
        message = message_of(value)
        if message is not None:
            return [message]
        raise ReturnError(
            f"{self._node.id} returned {type(value).__name__}{where}; a message is a dict.",
            "return a dict, a list of dicts, or None.",
        )


def _cut(columns: dict[str, list[bytes]], size: int) -> None:
    for column in columns.values():
        del column[size:]


def _column(binding: str, kept: list[Kept], in_columns: list[bytes]) -> Output:
    """The messages for one binding, and the offset of the call of each."""
    if in_columns and kept.count(IN_COLUMNS) == len(kept):  # the usual case
        return Output(in_columns)
    kinds = set(map(type, kept))
    column: list[Any] = kept
    if _InColumns in kinds:
        rest = iter(in_columns)
        column = [next(rest) if some is IN_COLUMNS else some for some in kept]
        kinds = set(map(type, column))
    if dict in kinds:
        if len(kinds) == 1:
            column = [some.get(binding) for some in column]
        else:
            column = [some.get(binding) if type(some) is dict else some for some in column]
        kinds = set(map(type, column))
    if kinds == {bytes}:
        return Output(column)
    items: list[bytes] = []
    origins: list[int] = []
    for offset, mine in enumerate(column):
        if type(mine) is list:
            items += mine
            origins += [offset] * len(mine)
        elif mine is not None:
            items.append(mine)
            origins.append(offset)
    return Output(items, origins)


def _items(kept: Kept) -> list[bytes]:
    """The messages of a result that were packed without a check."""
    if type(kept) is bytes:
        return [kept]
    return [item for item in kept.values() if type(item) is bytes] if type(kept) is dict else []


def _unpacked(kept: Kept) -> Any:
    """The result that was packed."""
    if type(kept) is bytes:
        return codec.unpack_known(kept)
    return {binding: codec.unpack_known(item) for binding, item in kept.items()}
