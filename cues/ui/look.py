"""One store or directory, as the API answers questions about it. Everything is read; nothing is claimed or written.

The answers are plain data. Messages in them are text (:mod:`cues.ui.text`). Each answer is bounded: a page of at most
:data:`PAGE_MAX` messages, a search of at most :data:`SEARCH_S`, steps and state a page at a time. So a question takes
well under a second, however long the queues are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from cues import jsontext
from cues.base import clock, names
from cues.base.names import ProcessorId
from cues.engine.status import processor_of
from cues.errors import BatchDamaged, CuesError, InvalidArgument, QueueNotFound
from cues.operate import history, positions
from cues.operate.failed import COUNTED_MAX, ErrorGroup, by_cause, with_sums
from cues.operate.place import Place, Reader, message_at, place_of
from cues.operate.shape import Shape
from cues.operate.target import Target
from cues.operate.where import Where
from cues.steps.error_records import ErrorRecord
from cues.tools.figures import FIGURES
from cues.ui import sample
from cues.ui.shape import layout
from cues.ui.text import pretty, preview, safe

PAGE_MAX: Final = 200
SEARCH_S: Final = 0.4
"""A search answers after this time with what it has, and says where to go on."""
_CHECK_EVERY: Final = 64
TEXT_CHARACTERS: Final = 200_000
"""The most text of one message in an answer; the rest is fetched in further answers."""
_SHAPE_S: Final = 5.0
"""A shape that is read from the place is read again after this time."""


def settings_of(place: str, shape: Shape | None, title: str) -> dict[str, Any]:
    """The settings of a look, as plain data for another process."""
    return {"place": place, "shape": shape.to_dict() if shape else None, "title": title}


def look_of(settings: dict[str, Any]) -> Look:
    """A look at the store or the directory that the settings name."""
    shape = Shape.from_dict(settings["shape"]) if settings["shape"] else None
    place = settings["place"]
    stores = shape.stores if shape is not None else {}
    return Look(place_of(Target(Path(place), None, "", place), stores), shape, settings["title"])


class Look:
    """A store or a directory, opened read-only, with the other stores that its queues are in."""

    def __init__(self, place: Place, shape: Shape | None, title: str) -> None:
        """Without a ``shape``, it is read from the place. Raises :class:`StoreNotFound` if there is no store."""
        self.title = title
        self._place = place
        self._declared = shape
        self._shape: tuple[float, Shape] | None = None
        self._seen: tuple[float, dict[str, Any]] | None = None
        self._history = sample.LagHistory()
        place.require()

    def close(self) -> None:
        self._place.close()

    @property
    def shape(self) -> Shape:
        if self._declared is not None:
            return self._declared
        now = time.monotonic()
        if self._shape is None or now - self._shape[0] > _SHAPE_S:
            self._shape = (now, self._place.shape())
        return self._shape[1]

    def settings(self) -> dict[str, Any]:
        """The settings of which another process makes the same look (:func:`look_of`)."""
        return settings_of(self._place.target.location, self._declared, self.title)

    # --- answers ---

    def overview(self) -> dict[str, Any]:
        """Processors, queues, groups, workers and problems."""
        now = time.monotonic()
        if self._seen is None or now - self._seen[0] > self._place.look_every_s:
            seen = sample.overview_of(self._place.measure(), self.shape, self._history)
            self._seen = (now, seen | {"title": self.title, "of": self._place.kind})
        return self._seen[1]

    def graph(self) -> dict[str, Any]:
        """The picture of the graph, and the figures of its processors that are columns."""
        figures = [{"name": each.name, "title": each.title, "text": each.text, "unit": each.unit} for each in FIGURES]
        return layout(self.shape) | {"figures": figures}

    def history(self, processor: str = "", span: str = "hour") -> dict[str, Any]:
        """The history of one processor, as columns; or the minutes of the last hour of every processor."""
        history.check_span(span)
        points = self._place.history(span if processor else "hour", processor_of(processor))
        now_s = clock.now_ns() / 1e9
        if processor:
            id = processor_of(processor)
            return {"processor": id, "span": span} | history.columns(points.get(id, []), span, now_s)
        return {"processors": {id: history.sparks(some, now_s) for id, some in points.items() if some}}

    def messages(
        self, queue: str, at: str = "", older: bool = False, count: int = 50, where: str = ""
    ) -> dict[str, Any]:
        """A page of messages, in the order of the queue.

        ``at`` is a place as in ``cues tail --from``, or the ``before`` or ``after`` of an earlier answer
        (``0:17,1:4``: indices by partition). ``older`` reads back from it. With ``where`` it is a search.
        """
        if not 1 <= count <= PAGE_MAX:
            raise InvalidArgument(f"count={count}: a page has 1 to {PAGE_MAX} messages.", "give a smaller number.")
        reader = self._place.reader_of(queue)
        _go(reader, at or ("end" if older else "start"))
        begin = reader.positions
        condition = Where(where) if where.strip() else None
        rows: list[dict[str, Any]] = []
        passed = 0
        deadline = time.monotonic() + SEARCH_S
        ended = False
        found = reader.backward() if older else reader.forward()
        while len(rows) < count and (passed % _CHECK_EVERY or time.monotonic() <= deadline):
            read = next(found, None)
            if read is None:
                ended = True
                break
            if isinstance(read, BatchDamaged):
                partition = names.split_log(read.queue)[1]
                rows.append({"damaged": read.message, "partition": partition, "index": read.first})
                passed += read.last + 1 - read.first
                continue
            passed += 1
            if condition is None or condition(read.message):
                text, cut = preview(read.message)
                row = {"index": read.index, "partition": read.partition, "time": read.time}
                rows.append(row | {"type": read.message.get(names.TYPE), "text": text, "cut": cut})
        low, high = (reader.positions, begin) if older else (begin, reader.positions)
        if older:
            rows.reverse()
        ends = reader.ends()
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
        reader = self._place.reader_of(queue, partition)
        found = message_at(reader, index)
        ((first, next_index),) = reader.ends().values()
        text = pretty(found.message)
        log = names.log_id(reader.name, partition)
        answer: dict[str, Any] = {
            "queue": reader.name,
            "partition": partition,
            "index": found.index,
            "time": found.time,
            "hash": found.hash,
            "uuid": found.uuid,
            "type": found.message.get(names.TYPE),
            "text": text[offset : offset + TEXT_CHARACTERS],
            "offset": offset,
            "characters": len(text),
            "first": first,
            "last": next_index - 1,
        }
        if offset:
            return answer
        metadata = found.metadata.get(names.QUEUE, {})
        others = {key: value for key, value in found.metadata.items() if key not in (names.QUEUE, names.HASH)}
        answer["metadata"] = preview(others, 2000)[0] if others else ""
        answer["from"] = [
            self._named(origin, at.get(names.T), at.get(names.TIME)) for origin, at in metadata.items() if origin != log
        ]
        answer["step"] = self._step_of(reader.name, found.hash)
        answer["error"] = error_of(found.message)
        if answer["error"] is not None:
            with self._place.errors([reader.name], log) as failed:
                records = failed.at(index) if failed.can_settle else []
            answer["error"] |= _error_row(records[0]) if records else {}
        return answer

    def became(self, queue: str, index: int, partition: int = 0) -> dict[str, Any]:
        """The readers of a message, and the messages that were made from it (see :mod:`cues.operate.lineage`)."""
        reader = self._place.reader_of(queue, partition)
        found = message_at(reader, index)
        readers, made = [], []
        for reading in self._place.readings(self.shape, names.log_id(reader.name, partition), found):
            taken = None if reading.position is None else index < reading.position
            row: dict[str, Any] = {"processor": reading.processor, "position": reading.position, "taken": taken}
            if reading.step is not None:
                row |= {"step": reading.step.hash, "outcome": reading.step.outcome}
            readers.append(row)
            made += [
                {"by": reading.processor, "how": each.how, "complete": each.complete}
                | {"log": each.log, "messages": [self._named(each.log, place, None) for place in each.places]}
                for each in reading.made
                if each.places or not each.complete
            ]
        return {"queue": reader.name, "partition": partition, "index": index, "readers": readers, "made": made}

    def steps(self, processor: str, count: int = 20) -> dict[str, Any]:
        """The last steps of a processor or of one unit of it, last first."""
        unit, units = self._units(processor)
        rows = []
        for step in reversed(self._place.steps(unit, count)):
            snapshot: dict[str, Any] = next((m for m in step["maps"] if names.TAILER_INDICES in m), {})
            attempt: dict[str, Any] = next((m for m in step["maps"] if m.get(names.TYPE) != names.SNAPSHOT), {})
            prefix = f"{processor_of(snapshot.get(names.PROCESSOR_ID, unit))}."
            ends = snapshot.get(names.TO_INDICES, {})
            taken = [
                {"log": tailer.removeprefix(prefix), "first": first, "last": ends.get(tailer, first) - 1}
                for tailer, first in snapshot.get(names.TAILER_INDICES, {}).items()
            ]
            wrote = [{"log": log, "first": first} for log, first in attempt.get(names.MESSAGE_INDEX, {}).items()]
            row = {"time": step["time"], "hash": step["hash"], "outcome": step["outcome"], "took": safe(step["took"])}
            row |= {"taken": taken, "wrote": [each for each in wrote if "." not in each["log"]]}
            rows.append(row | {"text": safe(step["wrote"])})
        return {"processor": unit, "units": units, "steps": rows}

    def state(self, processor: str, key: str = "", after: str = "", count: int = 50) -> dict[str, Any]:
        """The state of a processor: of one key (JSON, or plain text), or a page of rows in the order of the table."""
        unit, units = self._units(processor)
        answer: dict[str, Any] = {"processor": unit, "units": units, "key": key, "after": None}
        if key:
            value = _json_or_text(key)
            found = self._place.state_of(unit, value, PAGE_MAX)
            if not found and value != key:
                found = self._place.state_of(unit, key, PAGE_MAX)
            return answer | {"rows": [_state_row(*row) for row in found]}
        page = self._place.state(unit, bytes.fromhex(after) if after else b"", min(count, PAGE_MAX) + 1)
        if len(page) > count:
            answer["after"] = page[count - 1][0].hex()
        return answer | {"rows": [_state_row(key, field, value) for _, key, field, value in page[:count]]}

    def errors(self, processor: str = "", count: int = 100, settled: bool = False) -> dict[str, Any]:
        """The failed messages that need somebody, last first, and their groups by cause; of one processor, if named.

        ``settled``: also those that were redriven or discarded. ``complete`` is False if there are more messages than
        were read; then ``found`` and the counts of the groups are lower bounds.
        """
        rows: list[dict[str, Any]] = []
        groups: list[ErrorGroup] = []
        found, complete = 0, True
        with self._place.errors({shape.errors for shape in self.shape.processors if shape.errors}) as failed:
            for records in failed.logs():
                read = iter(records(settled))
                some = [each for each in islice(read, COUNTED_MAX) if processor in ("", processor_of(each.processor))]
                complete = complete and next(read, None) is None
                found += len(some)
                rows += map(_error_row, some[:count])
                groups += by_cause(each for each in some if not each.settled)
        rows.sort(key=lambda row: row["time"], reverse=True)
        return {
            "processor": processor,
            "groups": [_group_row(group) for group in with_sums(groups)],
            "errors": rows[:count],
            "found": found,
            "complete": complete,
        }

    # --- inside ---

    def _named(self, log: str, index: int | None, when: Any) -> dict[str, Any]:
        """A message that is named in an answer, with the beginning of its text if it is still there."""
        queue, partition = names.split_log(log)
        row: dict[str, Any] = {"queue": queue, "partition": partition, "index": index, "time": when, "text": None}
        if index is not None:
            with contextlib.suppress(CuesError):
                found = message_at(self._place.reader_of(queue, partition), index)
                row |= {"text": preview(found.message, 160)[0], "time": found.time}
        return row

    def _step_of(self, queue: str, hash: str | None) -> dict[str, Any] | None:
        """The step that wrote a message; None if no try log has it any more."""
        if hash is None:
            return None
        for shape in self.shape.writers(queue):
            step = self._place.step_that_wrote(shape.id, hash)
            if step is not None:
                taken = [{"log": log, "first": a, "last": b - 1} for log, (a, b) in step.taken.items() if b > a]
                return {"processor": shape.id, "unit": step.processor, "taken": taken}
        return None

    def _units(self, processor: str) -> tuple[ProcessorId, list[ProcessorId]]:
        """The unit of that name, or the first one of a processor; and all units of the processor."""
        units = [unit for unit in self._place.processors() if processor_of(unit) == processor_of(processor)]
        if not units:
            raise QueueNotFound(
                f"The processor {safe(processor)!r} has not run on this {self._place.kind}.",
                "run its graph.",
                queue=processor,
            )
        return next((unit for unit in units if unit == processor), units[0]), units


def _go(reader: Reader, at: str) -> None:
    """Move to a place of a question; an index that is not there means the nearest one."""
    if ":" in at and all(part.replace(":", "", 1).isdecimal() for part in at.split(",")):
        reader.go_to({int(number): int(index) for number, index in (part.split(":") for part in at.split(","))})
        return
    place = positions.parse(at, "the place")
    ends = reader.ends()
    if isinstance(place, int) and len(ends) == 1:
        reader.go_to(dict.fromkeys(ends, place))
    else:
        reader.go(place, "the place")


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
    queue, partition = names.split_log(record.queue)
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


def _group_row(group: ErrorGroup) -> dict[str, Any]:
    queue, partition = names.split_log(group.last.queue)
    last = {"queue": queue, "partition": partition, "index": group.last.index, "time": group.last.time}
    return {"processor": group.processor, "cause": group.cause, "shown": safe(group.cause)} | {
        "count": group.count,
        "messages": group.messages,
        "last": last,
    }


def _packed(positions: Mapping[int, int]) -> str:
    return ",".join(f"{number}:{index}" for number, index in sorted(positions.items()))


def _json_or_text(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return jsontext.decode(text, shown=True)
    return text


def _state_row(key: Any, field: Any, value: Any) -> dict[str, Any]:
    text, cut = preview(value, 2000)
    return {"key": preview(key)[0], "field": preview(field)[0], "text": text, "cut": cut}
