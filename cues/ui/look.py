"""One store, as the API answers questions about it. Everything is read; nothing is claimed, moved or written.

The answers are plain data. Messages in them are text (:mod:`cues.ui.text`). Each answer is bounded: a page of at most
:data:`PAGE_MAX` messages, a search of at most :data:`SEARCH_S`, steps and state a page at a time. So a question takes
well under a second, however long the queues are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

from cues import jsontext
from cues.base import clock, names
from cues.base.names import ProcessorId
from cues.cli import place as places
from cues.cli.tries import steps_of_log
from cues.cli.where import Where
from cues.engine.status import processor_of
from cues.errors import BatchDamaged, CuesError, InvalidArgument, QueueNotFound
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.queues.tailer import Tailer
from cues.steps.error_records import ErrorLogs, ErrorRecord
from cues.steps.state import StateTable, rows_under
from cues.storage.environment import file_key
from cues.tools import metrics
from cues.ui import lineage, sample
from cues.ui.shape import Shape, layout, settings_of, shape_of_store
from cues.ui.text import pretty, preview, safe

PAGE_MAX: Final = 200
SEARCH_S: Final = 0.4
"""A search answers after this time with what it has, and says where to go on."""
_CHECK_EVERY: Final = 64
TEXT_CHARACTERS: Final = 200_000
"""The most text of one message in an answer; the rest is fetched in further answers."""
_SHAPE_S: Final = 5.0
"""A shape that is read from the store is read again after this time."""


class StoreLook:
    """The store of a graph, opened read-only, with the other stores that its queues are in."""

    def __init__(self, path: Path, shape: Shape | None, title: str) -> None:
        """Without a ``shape``, it is read from the store."""
        self.path = path
        self.title = title
        self._declared = shape
        self._guard = threading.Lock()
        self._opened: dict[str, tuple[Store, Any]] = {}
        self._shape: tuple[float, Shape] | None = None
        self._history = sample.LagHistory()
        self._open(str(path))

    def close(self) -> None:
        with self._guard:
            for store, _ in self._opened.values():
                store.close()
            self._opened.clear()

    def _open(self, path: str) -> Store:
        """Open a store once; again after it was replaced (``cues run --fresh``)."""
        with self._guard:
            known = self._opened.get(path)
            key = file_key(Path(path))
            if known is not None and known[1] == key and not known[0].closed:
                return known[0]
            if known is not None:
                known[0].close()
                self._shape = None
            store = Store(path, readonly=True)
            self._opened[path] = (store, key)
            return store

    @property
    def store(self) -> Store:
        return self._open(str(self.path))

    @property
    def shape(self) -> Shape:
        if self._declared is not None:
            return self._declared
        now = time.monotonic()
        if self._shape is None or now - self._shape[0] > _SHAPE_S:
            self._shape = (now, shape_of_store(self.store))
        return self._shape[1]

    def settings(self) -> dict[str, Any]:
        """What another process makes the same look of (:func:`cues.ui.looks.look_of`)."""
        return settings_of(str(self.path), False, self._declared, self.title)

    # --- answers ---

    def overview(self) -> dict[str, Any]:
        """Processors, queues, groups, workers and problems."""
        return sample.of_store(self.store, self.shape, self.title, self._history)

    def graph(self) -> dict[str, Any]:
        """The picture of the graph."""
        return layout(self.shape)

    def messages(
        self, queue: str, at: str = "", older: bool = False, count: int = 50, where: str = ""
    ) -> dict[str, Any]:
        """A page of messages, in the order of the queue.

        ``at`` is a place as in ``cues tail --from``, or the ``before`` or ``after`` of an earlier answer
        (``0:17,1:4``: indices by partition). ``older`` reads back from it. With ``where`` it is a search.
        """
        if not 1 <= count <= PAGE_MAX:
            raise InvalidArgument(f"count={count}: a page has 1 to {PAGE_MAX} messages.", "give a smaller number.")
        opened = self._queue(queue)
        tailer: Any = opened.tailer(meta=False)
        self._go(tailer, opened, at or ("end" if older else "start"))
        begin = dict(tailer.positions)
        condition = condition_of(where)
        rows: list[dict[str, Any]] = []
        passed = 0
        if older:
            tailer.direction = "backward"
        deadline = time.monotonic() + SEARCH_S
        ended = False
        while len(rows) < count:
            if passed % _CHECK_EVERY == 0 and time.monotonic() > deadline:
                break
            try:
                message = tailer.read()
            except BatchDamaged as error:
                partition = names.log_parts(error.queue)[1]
                to = error.first if older else error.last + 1
                tailer.to_index({partition: to} if opened.is_partitioned else to)
                rows.append({"damaged": error.message, "partition": partition, "index": error.first})
                passed += error.last + 1 - error.first
                continue
            if message is None:
                ended = True
                break
            passed += 1
            if condition is not None and not condition(message):
                continue
            envelope = tailer.envelope
            assert envelope is not None
            text, cut = preview(message)
            row = {"index": envelope.index, "partition": envelope.partition, "time": envelope.time}
            rows.append(row | {"type": message.get(names.TYPE), "text": text, "cut": cut})
        end = dict(tailer.positions)
        ends = {number: (row.first, row.next) for number, row in enumerate(opened._rows())}
        if opened._whole is not None:
            ends = {opened._log.partition: next(iter(ends.values()))}
            begin = {opened._log.partition: next(iter(begin.values()))}
            end = {opened._log.partition: next(iter(end.values()))}
        if older:
            rows.reverse()
            low, high = end, begin
        else:
            low, high = begin, end
        left = sum(max(0, low[n] - first if older else next - high[n]) for n, (first, next) in ends.items() if n in low)
        return {
            "queue": queue,
            "messages": rows,
            "before": _packed(low),
            "after": _packed(high),
            "at_start": all(low.get(n, first) <= first for n, (first, _) in ends.items()),
            "at_end": all(high.get(n, next) >= next for n, (_, next) in ends.items()),
            "ended": ended,
            "searched": passed,
            "left": left,
            "total": sum(next - first for first, next in ends.values()),
            "hint": condition.explain() if condition is not None and not rows and ended else "",
        }

    def message(self, queue: str, index: int, partition: int = 0, offset: int = 0) -> dict[str, Any]:
        """One message: its text from a character on, its envelope, and the step that wrote it."""
        view, tailer = self._tailer_of(queue, partition)
        message, envelope = _read_at(tailer, index, view.id)
        text = pretty(message)
        log = names.log_id(view.name, partition)
        answer: dict[str, Any] = {
            "queue": view.name,
            "partition": partition,
            "index": envelope.index,
            "time": envelope.time,
            "hash": envelope.hash,
            "uuid": envelope.uuid,
            "type": message.get(names.TYPE),
            "text": text[offset : offset + TEXT_CHARACTERS],
            "offset": offset,
            "characters": len(text),
            "first": view._row().first,
            "last": view._row().next - 1,
        }
        if offset:
            return answer
        metadata = envelope.metadata.get(names.QUEUE, {})
        others = {key: value for key, value in envelope.metadata.items() if key not in (names.QUEUE, names.HASH)}
        answer["metadata"] = preview(others, 2000)[0] if others else ""
        answer["from"] = [
            self._place(origin, at.get(names.T), at.get(names.TIME)) for origin, at in metadata.items() if origin != log
        ]
        answer["step"] = self._step_of(view.name, envelope.hash)
        answer["error"] = error_of(message)
        if answer["error"] is not None:
            with ErrorLogs(self.store, [view.name], log) as logs:
                record = next((record for each in logs.logs if (record := each.record(index)) is not None), None)
            answer["error"] |= _error_row(record) if record is not None else {}
        return answer

    def became(self, queue: str, index: int, partition: int = 0) -> dict[str, Any]:
        """The readers of a message, and the messages that were made from it (see :mod:`cues.ui.lineage`)."""
        view, tailer = self._tailer_of(queue, partition)
        _, envelope = _read_at(tailer, index, view.id)
        log = names.log_id(view.name, partition)
        readers, made = [], []
        for shape in self.shape.readers(view.name):
            unit, position = self._position(shape.id, log)
            row: dict[str, Any] = {"processor": shape.id, "position": position, "taken": None}
            readers.append(row)
            if position is not None:
                row["taken"] = index < position
            if not row["taken"] or unit is None:
                continue
            found: list[lineage.Descendants] = []
            for output in [*shape.outputs, *filter(None, [shape.errors])]:
                with contextlib.suppress(CuesError):  # a queue that nobody has written yet
                    found += lineage.by_metadata(self._queue(output), log, index, clock.to_ns(envelope.time))
            if not any(each.places for each in found):
                steps = islice(lineage.steps_of(self.store, unit), 2000)
                step = next((s for s in steps if low_of(s.taken, log) <= index < high_of(s.taken, log)), None)
                if step is not None:
                    row["step"] = step.hash
                    row["outcome"] = step.outcome
                    found = lineage.by_step(self.store, step)
            made += [
                {"by": shape.id, "how": each.how, "complete": each.complete}
                | {"log": each.log, "messages": [self._place(each.log, place, None) for place in each.places]}
                for each in found
                if each.places or not each.complete
            ]
        return {"queue": view.name, "partition": partition, "index": index, "readers": readers, "made": made}

    def steps(self, processor: str, count: int = 20) -> dict[str, Any]:
        """The last steps of a processor or of one unit of it, last first."""
        unit = self._unit(processor)
        key = lineage.unit_key(self.store, unit)
        steps = steps_of_log(self.store.queue(key).tailer())
        rows = []
        for step in reversed(steps[-count:] if count else []):
            snapshot: dict[str, Any] = next((m for m in step["maps"] if names.TAILER_INDICES in m), {})
            attempt: dict[str, Any] = next((m for m in step["maps"] if m.get(names.TYPE) != names.SNAPSHOT), {})
            prefix = f"{processor_of(key)}."
            ends = snapshot.get(names.TO_INDICES, {})
            taken = [
                {"log": tailer.removeprefix(prefix), "first": first, "last": ends.get(tailer, first) - 1}
                for tailer, first in snapshot.get(names.TAILER_INDICES, {}).items()
            ]
            wrote = [{"log": log, "first": first} for log, first in attempt.get(names.MESSAGE_INDEX, {}).items()]
            row = {"time": step["time"], "hash": step["hash"], "outcome": step["outcome"], "took": safe(step["took"])}
            rows.append(row | {"taken": taken, "wrote": [each for each in wrote if "." not in each["log"]]})
        return {"processor": unit, "units": self._units(processor), "steps": rows}

    def state(self, processor: str, key: str = "", after: str = "", count: int = 50) -> dict[str, Any]:
        """The state of a processor: of one key (JSON, or plain text), or a page of rows in the order of the table."""
        unit = self._unit(processor)
        unit_key = lineage.unit_key(self.store, unit)
        answer: dict[str, Any] = {"processor": unit, "units": self._units(processor), "key": key, "after": None}
        if key:
            candidates = [_json_or_text(key)]
            if candidates[0] != key:
                candidates.append(key)
            rows: list[dict[str, Any]] = []
            for each in candidates:
                fields = StateTable(self.store, unit_key).view(each)
                rows = [_state_row(each, field, fields[field]) for field in islice(fields, PAGE_MAX)]
                if rows:
                    break
            return answer | {"rows": rows}
        start = bytes.fromhex(after) if after else b""
        page = list(islice(rows_under(self.store, unit_key, start), min(count, PAGE_MAX) + 1))
        if len(page) > count:
            answer["after"] = page[count - 1][0].hex()
        return answer | {"rows": [_state_row(key, field, value) for _, key, field, value in page[:count]]}

    def errors(self, processor: str = "", count: int = 100, settled: bool = False) -> dict[str, Any]:
        """The failed messages that need somebody, last first; of one processor, if it is named.

        ``settled``: also those that were redriven or discarded.
        """
        rows: list[dict[str, Any]] = []
        complete = True
        declared = {shape.errors for shape in self.shape.processors if shape.errors}
        with ErrorLogs(self.store, declared) as logs:
            for log in logs.logs:
                for number, record in enumerate(log.records(settled)):
                    if number == metrics.ERRORS_MAX:
                        complete = False
                        break
                    if not processor or processor_of(record.processor) == processor:
                        rows.append(_error_row(record))
        rows.sort(key=lambda row: row["time"], reverse=True)
        return {"processor": processor, "errors": rows[:count], "found": len(rows), "complete": complete}

    # --- inside ---

    def _queue(self, name: str) -> Queue:
        base, _, _ = name.partition("/")
        path = self.shape.stores.get(base)
        store = self.store
        if path is not None and base not in store.queues():
            store = self._open(path)
        if "." in name:
            raise QueueNotFound(f"{name!r} is a try log.", "look at the steps of the processor.", queue=name)
        return store.queue(name)

    def _tailer_of(self, queue: str, partition: int) -> tuple[Queue, Tailer]:
        opened = self._queue(queue)
        if not 0 <= partition < opened.partitions:
            raise QueueNotFound(
                f"{queue!r} has no partition {partition}.", f"give one from 0 to {opened.partitions - 1}.", queue=queue
            )
        view = opened.partition(partition) if opened.is_partitioned else opened
        return view, view.tailer(meta=False)

    def _go(self, tailer: Any, queue: Queue, at: str) -> None:
        if ":" in at and all(part.replace(":", "", 1).isdecimal() for part in at.split(",")):
            indices = {int(number): int(index) for number, index in (part.split(":") for part in at.split(","))}
            rows = dict(enumerate(queue._rows()))
            if not queue.is_partitioned:
                row, index = rows[0], next(iter(indices.values()))
                tailer.to_index(max(row.first, min(row.next, index)))
                return
            tailer.to_start()
            tailer.to_index({n: max(rows[n].first, min(rows[n].next, i)) for n, i in indices.items() if n in rows})
            return
        place = places.parse(at, "the place")
        if isinstance(place, int):
            if queue.is_partitioned:
                raise InvalidArgument(
                    f"{queue.id} has {queue.partitions} partitions, and an index belongs to one.",
                    "give a time, or choose a partition.",
                )
            place = min(place, queue.last_index + 1)
            tailer.to_index(max(place, queue.first_index))
        elif isinstance(place, datetime):
            tailer.to_time(place)
        else:
            tailer.to_start() if place == "start" else tailer.to_end()

    def _place(self, log: str, index: int | None, when: Any) -> dict[str, Any]:
        """A message that is named in an answer, with the beginning of its text if it is still there."""
        queue, partition = names.log_parts(log)
        row: dict[str, Any] = {"queue": queue, "partition": partition, "index": index, "time": when, "text": None}
        if index is not None:
            with contextlib.suppress(CuesError):
                _, tailer = self._tailer_of(queue, partition)
                message, envelope = _read_at(tailer, index, log)
                row |= {"text": preview(message, 160)[0], "time": envelope.time}
        return row

    def _step_of(self, queue: str, hash: str | None) -> dict[str, Any] | None:
        """The step that wrote a message; None if no try log of the store has it any more."""
        if hash is None:
            return None
        for shape in self.shape.writers(queue):
            step = lineage.step_that_wrote(self.store, self._units(shape.id), hash)
            if step is not None:
                taken = [{"log": log, "first": a, "last": b - 1} for log, (a, b) in step.taken.items() if b > a]
                return {"processor": shape.id, "unit": step.processor, "taken": taken}
        return None

    def _units(self, processor: str) -> list[ProcessorId]:
        base = processor_of(processor)
        return [unit for unit in metrics.processors(self.store) if processor_of(unit) == base]

    def _unit(self, processor: str) -> ProcessorId:
        """The unit of that name; the first one of a processor."""
        units = self._units(processor)
        if not units:
            raise QueueNotFound(
                f"The processor {safe(processor)!r} has not run on this store.", "run its graph.", queue=processor
            )
        return next((unit for unit in units if unit == processor), units[0])

    def _position(self, processor: str, log: str) -> tuple[ProcessorId | None, int | None]:
        """The unit of a processor that reads a log, and the index that it takes next."""
        for unit in self._units(processor):
            for tailer in metrics.tailers(self.store, unit):
                if tailer.queue == log:
                    return unit, tailer.position
        return None, None


def condition_of(where: str) -> Where | None:
    """The search expression of a question; None if there is none."""
    if not where.strip():
        return None
    return Where(where)


def error_of(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a failure, as text; None for another message."""
    if message.get(names.TYPE) != names.PROCESSOR_ERROR:
        return None
    config = message.get(names.ERR_CONFIG)
    config = config if isinstance(config, dict) else {}
    causes = message.get(names.ERR_CAUSE)
    inputs = message.get(names.ERR_MESSAGES)
    context = message.get(names.ERR_CONTEXT)
    return {
        "processor": str(config.get("id")),
        "attempts": config.get("attempt") if isinstance(config.get("attempt"), int) else None,
        "causes": [
            {name: safe(str(cause.get(name, ""))) for name in ("type", "message", "trace")}
            for cause in (causes if isinstance(causes, list) else [])
            if isinstance(cause, dict)
        ],
        "context": pretty(context) if context else "",
        "inputs": [
            {"binding": safe(str(binding)), "text": preview(message, 20_000)[0]}
            for binding, some in (inputs.items() if isinstance(inputs, dict) else ())
            for message in islice(some if isinstance(some, list) else [some], 20)
        ],
    }


def _error_row(record: ErrorRecord) -> dict[str, Any]:
    """An error message in a list, with what was done about it."""
    queue, partition = names.log_parts(record.queue)
    done = record.resolution
    return {
        "queue": queue,
        "partition": partition,
        "index": record.index,
        "time": record.time,
        "processor": record.processor,
        "type": safe(record.type),
        "message": safe(record.text[:500]),
        "state": record.state,
        "settled": record.settled,
        "done": None if done is None else {"time": done.time, "by": done.by, "reason": safe(done.reason)},
        "again": [] if done is None else list(done.again),
    }


def low_of(taken: Mapping[str, tuple[int, int]], log: str) -> int:
    return taken.get(log, (1, 0))[0]


def high_of(taken: Mapping[str, tuple[int, int]], log: str) -> int:
    return taken.get(log, (1, 0))[1]


def _read_at(tailer: Tailer, index: int, log: str) -> tuple[dict[str, Any], Any]:
    """The message at an index, and its envelope. Raises :class:`QueueNotFound` if it is not there."""
    row = tailer.queue._row()
    if not row.first <= index < row.next:
        there = f"it has {row.first:,} to {row.next - 1:,}" if row.next > row.first else "it is empty"
        raise QueueNotFound(f"{safe(log)} has no message {index:,}; {there}.", "go to another one.", queue=log)
    tailer.to_index(index)
    message = tailer.read()
    envelope = tailer.envelope
    if message is None or envelope is None or envelope.index != index:
        raise QueueNotFound(f"{safe(log)} has no message at {index:,}.", "go to another one.", queue=log)
    return message, envelope


def _packed(positions: Mapping[int, int]) -> str:
    return ",".join(f"{number}:{index}" for number, index in sorted(positions.items()))


def _json_or_text(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return jsontext.decode(text, shown=True)
    return text


def _state_row(key: Any, field: Any, value: Any) -> dict[str, Any]:
    text, cut = preview(value, 2000)
    return {"key": preview(key)[0], "field": preview(field)[0], "text": text, "cut": cut}
