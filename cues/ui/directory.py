"""A shared directory of ``cues run --queues``, as the API answers questions about it.

It has what ``cues status``, ``cues tail`` and ``cues tries`` know of a directory: queues with messages, lag and rates
of processors, drivers, failures and steps. State is in files of its own form and messages carry no metadata along, so
questions about these are refused by name.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from itertools import islice
from typing import Any, Final

from cues.base import clock, names
from cues.cli import place as places
from cues.cli import shared
from cues.cli.tries import steps_of_records
from cues.errors import InvalidArgument, QueueNotFound, Unsupported
from cues.spark.cluster import inspection, lease
from cues.spark.cluster.files import open_files
from cues.tools import metrics
from cues.ui import sample
from cues.ui.look import PAGE_MAX, SEARCH_S, TEXT_CHARACTERS, condition_of, error_of
from cues.ui.shape import ProcessorShape, Shape, layout, settings_of
from cues.ui.text import pretty, preview, safe

_REFRESH_S: Final = 2.0
"""The overview of a directory is read at most this often: in an object store each look is many requests."""


class DirectoryLook:
    """A directory by its place, a path or a URL."""

    def __init__(self, place: str, shape: Shape | None, title: str) -> None:
        self.place = place
        self.title = title
        self._declared = shape
        self._seen: tuple[float, dict[str, Any]] | None = None
        self._history = sample.LagHistory()

    def settings(self) -> dict[str, Any]:
        """What another process makes the same look of (:func:`cues.ui.looks.look_of`)."""
        return settings_of(self.place, True, self._declared, self.title)

    def close(self) -> None:
        """Nothing is open between two answers."""

    @property
    def shape(self) -> Shape:
        if self._declared is not None:
            return self._declared
        shapes = []
        for last in inspection.processors_of(self.place):
            if last.is_feeder:
                continue
            inputs = [names.log_parts(log)[0] for log in last.positions]
            outputs = [names.log_parts(log)[0] for log in last.record.ends_after()]
            kind = "stream" if outputs else "sink"
            shapes.append(
                ProcessorShape(last.processor, kind, list(dict.fromkeys(inputs)), list(dict.fromkeys(outputs)))
            )
        return Shape(None, shapes)

    def overview(self) -> dict[str, Any]:
        """Queues, processors with lag and rates, drivers and problems."""
        now = time.monotonic()
        if self._seen is None or now - self._seen[0] > _REFRESH_S:
            self._seen = (now, self._overview())
        return self._seen[1]

    def graph(self) -> dict[str, Any]:
        """The picture of the graph."""
        return layout(self.shape)

    def messages(
        self, queue: str, at: str = "", older: bool = False, count: int = 50, where: str = ""
    ) -> dict[str, Any]:
        """A page of messages; as :meth:`cues.ui.look.StoreLook.messages`."""
        if not 1 <= count <= PAGE_MAX:
            raise InvalidArgument(f"count={count}: a page has 1 to {PAGE_MAX} messages.", "give a smaller number.")
        self._need(queue)
        reader = inspection.QueueReader(self.place, queue)
        numbers = [log.partition for log in reader.logs]
        firsts, nexts = [log.first for log in reader.logs], [log.next for log in reader.logs]
        condition = condition_of(where)
        if ":" in at and all(part.replace(":", "", 1).isdecimal() for part in at.split(",")):
            named = {int(number): int(index) for number, index in (part.split(":") for part in at.split(","))}
            begin = [max(a, min(b, named.get(n, b))) for n, a, b in zip(numbers, firsts, nexts)]
        else:
            begin = reader.place_of(places.parse(at or ("end" if older else "start"), "the place"), "the place")
        deadline = time.monotonic() + SEARCH_S
        kept: deque[inspection.InspectedMessage] = deque(maxlen=count if older else None)
        low, high = list(begin), list(begin)
        passed = 0
        if older:  # the messages before a place: with a search, a stretch of them that an answer has time for
            stretch = count if condition is None else 20 * PAGE_MAX
            low = [max(first, index - stretch) for first, index in zip(firsts, begin)]
        for read in reader.read(low):
            number = numbers.index(read.partition)
            if older and read.index >= begin[number]:
                continue
            if not older and (len(kept) == count or (passed % 64 == 63 and time.monotonic() > deadline)):
                break
            passed += 1
            if not older:
                high[number] = read.index + 1
            if condition is None or condition(read.message):
                kept.append(read)
        if older and len(kept) == count:
            for number, partition in enumerate(numbers):
                mine = [read.index for read in kept if read.partition == partition]
                low[number] = min(mine, default=begin[number])
        left = sum(map(operator.sub, low, firsts)) if older else sum(map(operator.sub, nexts, high))
        rows = [
            {"index": read.index, "partition": read.partition, "time": read.time, "type": read.message.get(names.TYPE)}
            | dict(zip(("text", "cut"), preview(read.message)))
            for read in kept
        ]
        packed = [",".join(f"{n}:{index}" for n, index in zip(numbers, place)) for place in (low, high)]
        return {
            "queue": queue,
            "messages": rows,
            "before": packed[0],
            "after": packed[1],
            "at_start": low == firsts,
            "at_end": high == nexts,
            "ended": low == firsts if older else high == nexts,
            "searched": passed,
            "left": left,
            "total": sum(next - first for first, next in zip(firsts, nexts)),
            "hint": condition.explain() if condition is not None and not rows else "",
        }

    def message(self, queue: str, index: int, partition: int = 0, offset: int = 0) -> dict[str, Any]:
        """One message: its text from a character on, time and hash."""
        self._need(queue)
        reader = inspection.QueueReader(self.place, queue)
        log = next((log for log in reader.logs if log.partition == partition), None)
        if log is None or not log.first <= index < log.next:
            raise QueueNotFound(f"{safe(queue)} has no message {index:,}.", "go to another one.", queue=queue)
        place = [each.next if each is not log else index for each in reader.logs]
        read = next(iter(reader.read(place)))
        text = pretty(read.message)
        return {
            "queue": queue,
            "partition": partition,
            "index": index,
            "time": read.time,
            "hash": read.hash,
            "uuid": None,
            "type": read.message.get(names.TYPE),
            "text": text[offset : offset + TEXT_CHARACTERS],
            "offset": offset,
            "characters": len(text),
            "first": log.first,
            "last": log.next - 1,
            "metadata": "",
            "from": [],
            "step": None,
            "error": error_of(read.message),
        }

    def became(self, queue: str, index: int, partition: int = 0) -> dict[str, Any]:
        """Refused: :class:`Unsupported`."""
        raise Unsupported(
            "Messages of a shared directory carry no metadata along, so nothing says what was made from them.",
            "look at the steps of the processors that read the queue.",
        )

    def steps(self, processor: str, count: int = 20) -> dict[str, Any]:
        """The last steps of a processor, last first."""
        if processor not in [last.processor for last in inspection.processors_of(self.place)]:
            raise QueueNotFound(
                f"The processor {safe(processor)!r} has not run on this directory.", "run its graph.", queue=processor
            )
        steps = steps_of_records(inspection.records_of(self.place, processor, 2 * count + 1))[-count:]
        rows = [
            {"time": step["time"], "hash": step["hash"], "outcome": step["outcome"], "took": safe(step["took"])}
            | {"taken": [], "wrote": [], "text": safe(step["wrote"])}
            for step in reversed(steps)
        ]
        return {"processor": processor, "units": [processor], "steps": rows}

    def state(self, processor: str, key: str = "", after: str = "", count: int = 50) -> dict[str, Any]:
        """Refused: :class:`Unsupported`."""
        raise Unsupported("The state of a processor on Spark is in files that the page does not read.", "")

    def errors(self, processor: str = "", count: int = 100, settled: bool = False) -> dict[str, Any]:
        """The failed messages on error queues, last first."""
        rows: list[dict[str, Any]] = []
        complete = True
        for queue in inspection.queues_of(self.place):
            logs = inspection.logs_of(self.place, queue)
            for log in logs:
                some = list(islice(inspection.backwards(self.place, [log], metrics.ERRORS_MAX), metrics.ERRORS_MAX))
                for index, time_ns, message in some:
                    told = error_of(message)
                    if told is None:
                        break
                    if processor and told["processor"].partition("/")[0] != processor:
                        continue
                    cause = told["causes"][0] if told["causes"] else {"type": "", "message": ""}
                    row = {"queue": queue, "partition": log.partition, "index": index, "processor": told["processor"]}
                    about = {"type": cause["type"], "message": cause["message"][:500]}
                    rows.append(
                        row | about | {"time": clock.to_datetime(time_ns), "state": "unresolved", "settled": False}
                    )
                else:
                    complete = complete and len(some) < metrics.ERRORS_MAX
        rows.sort(key=lambda row: row["time"], reverse=True)
        return {"processor": processor, "errors": rows[:count], "found": len(rows), "complete": complete}

    # --- inside ---

    def _need(self, queue: str) -> None:
        if queue.partition("/")[0] not in inspection.queues_of(self.place):
            raise QueueNotFound(f"The directory has no queue {safe(queue)!r}.", "go to another one.", queue=queue)

    def _overview(self) -> dict[str, Any]:
        place, shape = self.place, self.shape
        logs = {queue: inspection.logs_of(place, queue) for queue in inspection.queues_of(place)}
        ends = {log.id: log.next for parts in logs.values() for log in parts}
        failures: dict[str, metrics.Failures] = {}
        for queue, parts in logs.items():
            metrics.count_failures(queue, inspection.backwards(place, parts, metrics.ERRORS_MAX), failures)
        holders = list(lease.holders(open_files(place)))
        running = {holder.graph for holder in holders if holder.state == "runs"}
        known = {each.id: each for each in shape.processors}
        rows = []
        for last in inspection.processors_of(place):
            failed = failures.get(last.processor, metrics.Failures())
            inputs: dict[str, dict[str, Any]] = {}
            for log, position in last.positions.items():
                row = inputs.setdefault(names.log_parts(log)[0], {"position": None, "lag": 0, "store": ""})
                row["queue"] = names.log_parts(log)[0]
                lag = inspection.feeder_lag(place, last, log) if last.is_feeder else ends.get(log, 0) - position
                row["lag"] += max(0, lag or 0)
                row["position"] = position if len(last.positions) == 1 else None
            shaped = known.get(last.processor) or ProcessorShape(last.processor, "feeder" if last.is_feeder else "")
            rows.append(
                {
                    "id": last.processor,
                    "name": last.processor.partition(".")[2],
                    "kind": shaped.kind,
                    "state": "running" if last.processor.partition(".")[0] in running else "off",
                    "stopped": None,
                    "paused": [],
                    "units": [],
                    "unit_ids": [last.processor],
                    "owners": [],
                    "rate": inspection.rate_of(place, last),
                    "lag": sum(row["lag"] for row in inputs.values()),
                    "errors": failed.count,
                    "last_error": vars(failed.last) if failed.last else None,
                    "stepped": last.committed,
                    "epoch": last.record.epoch,
                    "source_position": None,
                    "calls": None,
                    "in_flight": 0,
                    "call_s": None,
                    "inputs": list(inputs.values()),
                    "outputs": shaped.outputs,
                    "error_queue": shaped.errors,
                    "guarantee": shaped.guarantee,
                    "function": shaped.function,
                    "growing": False,
                }
            )
        self._history.add({row["id"]: row["lag"] for row in rows})
        for row in rows:
            row["growing"] = self._history.grows(row["id"])
        figures = {queue: shared.figures_of(parts) for queue, parts in logs.items()}
        overview = {
            "title": self.title,
            "place": place,
            "of": "directory",
            "time": clock.to_datetime(clock.now_ns()),
            "durability": "shared directory",
            "disk_bytes": sum(row["bytes"] for row in figures.values()),
            "map_bytes": None,
            "used_bytes": None,
            "messages": sum(row["messages"] for row in figures.values()),
            "running": bool(running),
            "processors": rows,
            "queues": [
                {"name": queue, "rate": None, "options": {}} | row | {"partitions": row.get("partitions", 1)}
                for queue, row in figures.items()
            ],
            "workers": [],
            "drivers": [vars(holder) for holder in holders],
            "groups": [],
            "consumers": [],
            "transactions": [],
            "readers": [],
            "forwards": [],
        }
        return overview | {"problems": sample.problems(overview)}
