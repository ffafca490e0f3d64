"""The overview that the page shows live: figures of processors and queues, and what is wrong.

A problem has a level ("error" or "warning"), a sentence, and the part of the page that shows more. Every problem is
found here, so that the page, the API and the tests say the same.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from cues.base import clock
from cues.base.texts import count, duration
from cues.engine.record import RecordedFailure
from cues.groups.operate import GroupMetrics
from cues.operate.shape import Shape
from cues.tools.figures import values
from cues.tools.measurement import Measurement, ProcessorFigures, ProcessorMetrics, QueueMetrics
from cues.txn.operate import ConsumerMetrics
from cues.ui.text import preview, safe

GROWING_S: Final = 5.0
"""A lag that grew over this time, in both halves of it, is growing."""
_GROWING_MESSAGES: Final = 100
"""A lag that grew by less is noise: one step of a batch function takes as many."""
_PENDING_S: Final = 60.0
"""A transaction that no process has is told of after this time: its consumer may just start again."""


class LagHistory:
    """The lags of the last seconds, by processor."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=64)

    def add(self, lags: dict[str, int]) -> None:
        now = time.monotonic()
        self._samples.append((now, lags))
        while self._samples[0][0] < now - 4 * GROWING_S:
            self._samples.popleft()

    def grows(self, processor: str) -> bool:
        """Return True if the lag of a processor grew in both halves of the last :data:`GROWING_S` or more."""
        seen = [(when, lags[processor]) for when, lags in self._samples if processor in lags]
        if len(seen) < 3 or seen[-1][0] - seen[0][0] < GROWING_S:
            return False
        first, middle, last = seen[0][1], seen[len(seen) // 2][1], seen[-1][1]
        return first < middle < last and last - first >= max(_GROWING_MESSAGES, first // 20)


def overview_of(seen: Measurement, shape: Shape, history: LagHistory) -> dict[str, Any]:
    """The overview of a store or a directory."""
    known = {each.id: each for each in shape.processors}
    figures = seen.figures(known)
    history.add({each.processor: each.lag for each in figures if each.units})
    workers = _workers(seen)
    processors = []
    for each in figures:
        row = _processor(each, workers) | {"growing": history.grows(each.processor)}
        if each.processor in known:
            shaped = known[each.processor]
            row |= {"kind": shaped.kind, "outputs": shaped.outputs, "error_queue": shaped.errors}
            row |= {"guarantee": shaped.guarantee, "function": shaped.function}
            row["inputs"] = row["inputs"] or [
                {"queue": queue, "position": None, "lag": None} for queue in shaped.inputs
            ]
        processors.append(row)
    overview = {
        "place": seen.path,
        "time": clock.to_datetime(clock.now_ns()),
        "durability": seen.durability,
        "disk_bytes": seen.disk_bytes,
        "map_bytes": seen.map_bytes,
        "used_bytes": seen.used_bytes,
        "messages": seen.messages,
        "running": any(each.is_running for each in figures),
        "processors": processors,
        "queues": [_queue(queue) for queue in seen.queues],
        "workers": workers,
        "drivers": [vars(driver) for driver in seen.drivers],
        "groups": [_group(group) for group in seen.groups],
        "consumers": [_consumer(consumer) for consumer in seen.consumers],
        "transactions": [vars(pending) for pending in seen.transactions],
        "readers": [vars(reader) for reader in seen.readers],
        "forwards": [vars(forward) for forward in seen.forwards if forward.waiting != 0],
    }
    return overview | {"problems": problems(overview)}


def problems(overview: dict[str, Any]) -> list[dict[str, str]]:
    """Problems, errors first."""
    found: list[dict[str, str]] = []

    def add(level: str, text: str, link: str) -> None:
        found.append({"level": level, "text": text, "link": link})

    for row in overview["processors"]:
        name, link = row["name"], f"processor/{row['id']}"
        if row["state"] == "stopped":
            add("error", f"{name} stopped: {row['stopped']['text']}", link)
        elif row["state"] == "silent":
            add("error", f"{name} does not answer (process {row['owners'][0]['pid']})", link)
        elif row["state"] == "off" and row["lag"] and overview["running"]:
            add("warning", f"{name} does not run, and {count(row['lag'], 'message')} wait for it", link)
        if row["away"]:
            add("error", f"{name} waits for {safe(row['away'])}", link)
        for pause in row["paused"]:
            add("error", f"{name} is paused {safe(pause['text'])}", link)
        if row["errors"]:
            failed = count(row["errors"], "failed message")
            failed = failed.replace(" ", "+ ", 1) if row["errors_more"] else failed
            add("error", f"{name}: {failed}", f"errors/{row['id']}")
        if row["growing"]:
            add("warning", f"{name} falls behind: {count(row['lag'], 'message')} wait, and more every second", link)
    if not overview["running"] and (left := sum(row["lag"] or 0 for row in overview["processors"])):
        add("warning", f"Nothing runs, and {count(left, 'message')} wait", "")
    for worker in overview["workers"]:
        if worker["restarts"] and worker["last_failure"]:
            text = f"{worker['worker']} was started again {count(worker['restarts'], 'time')}"
            add("warning", f"{text}: {worker['last_failure']['text']}", "")
    for group in overview["groups"]:
        if group["idle"] and group["lag"]:
            add("warning", f"Group {group['group']} has no members, and {count(group['lag'], 'message')} wait", "")
    for consumer in overview["consumers"]:
        if consumer["pid"] is None and consumer["lag"]:
            add(
                "warning",
                f"Consumer {consumer['consumer']} does not run, and {count(consumer['lag'], 'message')} wait",
                "",
            )
    for pending in overview["transactions"]:
        age_s = (overview["time"] - pending["since"]).total_seconds()
        if pending["pid"] is None and age_s > _PENDING_S:
            who = pending["owner"] or f"publisher {pending['publisher']}"
            text = (
                f"A transaction of {who} on {pending['log']} is pending since {duration(age_s)}, and no process has it"
            )
            add("warning", text, "")
    for forward in overview["forwards"]:
        if forward["waiting"] is None:
            add("error", f"{forward['processor']} writes for {forward['store']}, which cannot be opened", "")
    return sorted(found, key=lambda problem: problem["level"] != "error")


def _processor(figures: ProcessorFigures, workers: list[dict[str, Any]]) -> dict[str, Any]:
    of_pid = {worker["pid"]: worker["worker"] for worker in workers}
    units, owners, last = figures.units, figures.owners, figures.last_error
    stop = figures.stop if figures.stop is not None and not figures.stop.restarted else None
    state = "stopped" if stop else "silent" if any(not owner.lease_s for owner in owners) else ""
    return {
        "id": figures.processor,
        "name": figures.processor.partition(".")[2] or figures.processor,
        "kind": figures.kind,
        "state": state or ("running" if figures.is_running else "off" if units else "new"),
        "stopped": stop and _failure(stop),
        "away": figures.away,
        "paused": [pause.facts() for pause in figures.paused],
        "units": [_unit(unit) for unit in units] if len(units) > 1 else [],
        "unit_ids": [unit.processor for unit in units],
        "owners": [vars(owner) | {"worker": of_pid.get(owner.pid)} for owner in owners],
        **values(figures),
        "lag": figures.lag if units else None,
        "last_error": vars(last) | {"text": safe(last.text[:500])} if last else None,
        "stepped": figures.stepped,
        "timer": figures.timer,
        "epoch": figures.epoch,
        "source_position": _text(units[0].source_position) if units else None,
        "calls": figures.calls or None,
        "in_flight": figures.in_flight,
        "call_s": figures.call_s,
        "inputs": [vars(each) for each in figures.inputs],
        "outputs": [],
        "error_queue": None,
        "guarantee": "",
        "function": "",
    }


def _text(value: Any) -> str | None:
    return None if value is None else preview(value)[0]


def _unit(unit: ProcessorMetrics) -> dict[str, Any]:
    return {
        "id": unit.processor,
        "lag": unit.lag,
        "rate": unit.rate,
        "errors": unit.errors,
        "errors_more": unit.errors_more,
        "stepped": unit.stepped,
        "pid": unit.owner.pid if unit.owner else None,
    }


def _workers(seen: Measurement) -> list[dict[str, Any]]:
    """The workers of supervisors."""
    workers: list[dict[str, Any]] = []
    for supervisor in seen.supervisors:
        for name, worker in supervisor.record.workers.items():
            last = worker.last_failure and _failure(worker.last_failure)
            row = {"worker": name, "graph": supervisor.record.graph, "alive": supervisor.alive}
            workers.append(row | vars(worker) | {"last_failure": last})
    return workers


def _failure(failure: RecordedFailure) -> dict[str, Any]:
    return {"time": failure.time, "text": safe(failure.text[:500])}


def _queue(queue: QueueMetrics) -> dict[str, Any]:
    return {
        "name": queue.queue,
        "messages": queue.messages,
        "first": queue.first,
        "last": queue.last,
        "bytes": queue.bytes,
        "rate": queue.rate,
        "appended": queue.appended,
        "partitions": len(queue.partitions) or 1,
        "options": queue.options.to_dict() if queue.options is not None else {},
    }


def _consumer(consumer: ConsumerMetrics) -> dict[str, Any]:
    return vars(consumer) | {"lag": consumer.lag, "sources": [vars(source) for source in consumer.sources]}


def _group(group: GroupMetrics) -> dict[str, Any]:
    return {
        "group": group.group,
        "lag": group.lag,
        "generation": group.generation,
        "idle": group.idle,
        "idle_since": group.idle_since,
        "expires": None if group.expire_s is None else duration(group.expire_s),
        "members": [vars(member) for member in group.members],
        "partitions": [vars(partition) for partition in group.partitions],
    }
