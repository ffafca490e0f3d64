"""The contract of windows and joins: what each of them shows by one line in :data:`WINDOWS`.

A case has the stream, the messages of its input queues, and a naive model: plain lists, which are searched from the
beginning for each message. The model says what is on the queue of results and on the queue of late messages. The tests
in test_contracts_windows.py run over all cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cues
from cues import testing
from cues.processors import aggregates, joins, windows
from cues.processors.event_time import moment
from cues.processors.reducers import (
    count,
    distinct,
    earliest,
    latest,
    max,
    mean,
    min,
    quantiles,
    reducer,
    sum,
    top,
)

Message = dict[str, Any]
Taken = list[tuple[str, Message]]
"""The messages in the order in which they were taken, each with its input."""
Model = Callable[[Taken], tuple[list[Any], list[Any]]]
"""Returns the results, and the late messages."""

REDUCE = {
    "n": count(),
    "some": count("v"),
    "sum": sum("v"),
    "mean": mean("v"),
    "min": min("v"),
    "max": max("v"),
    "median": quantiles("v", at=(0.5,), exact=None),
    "different": distinct("v", exact=None),
    "top": top("v", 2),
    "latest": latest("v", "i"),
    "earliest": earliest(lambda m: m["v"], "i"),
    "all": lambda messages: sorted(m["i"] for m in messages),
    "last": reducer(lambda: None, lambda _, message: message["i"], merge=lambda one, other: one or other),
}
DELAY_S = 5


def reduced(messages: list[Message]) -> Message:
    """The results of :data:`REDUCE`, from the list of the messages."""
    values = sorted(m["v"] for m in messages if m["v"] is not None)
    counts = sorted((-values.count(v), v) for v in set(values))
    low, high = (float(values[place]) for place in ((len(values) - 1) // 2, len(values) // 2)) if values else (0, 0)
    return {
        "n": len(messages),
        "some": len(values),
        "sum": _plus(values) if values else None,
        "mean": _plus(values) / len(values) if values else None,
        "min": values[0] if values else None,
        "max": values[-1] if values else None,
        "median": [(low + high) / 2] if values else None,
        "different": len(set(values)),
        "top": [[v, -n] for n, v in counts[:2]],
        "latest": next((m["v"] for m in sorted(messages, key=_place, reverse=True) if m["v"] is not None), None),
        "earliest": next((m["v"] for m in sorted(messages, key=_place) if m["v"] is not None), None),
        "all": sorted(map(_place, messages)),
        "last": messages[-1]["i"],
    }


def _place(message: Message) -> int:
    place: int = message["i"]
    return place


def _plus(values: list[int]) -> int:
    total = 0
    for value in values:
        total += value
    return total


def moments(pair: tuple[float, float]) -> list[Any]:
    return [moment(round(time * 1_000_000)) for time in pair]


# --- naive models ---------------------------------------------------------------------------------


class Tops:
    """The watermark, from all times so far."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.times: dict[str, list[float]] = {}

    @property
    def watermark(self) -> float | None:
        if len(self.times) < self.inputs:
            return None
        tops = [sorted(times)[-1] - DELAY_S for times in self.times.values()]
        return sorted(tops)[0]

    def add(self, binding: str, time: float) -> None:
        self.times.setdefault(binding, []).append(time)


def fixed(size: float, every: float, inputs: int = 1, early: bool = False) -> Model:
    """Windows of one size: each message is in those that contain its time. ``early``: with a result at each update."""

    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        tops = Tops(inputs)
        open: dict[Any, list[Message]] = {}
        results: list[Any] = []
        late: list[Any] = []
        for binding, message in taken:
            time = message["t"]
            starts = [n * every for n in range(int(time // every) - int(size // every) - 2, int(time // every) + 1)]
            ends = [start + size for start in starts if start <= time < start + size]
            mark = tops.watermark
            missed = [end for end in ends if mark is not None and end <= mark]
            for end in ends:
                if end not in missed:
                    open.setdefault((end, message["k"]), []).append(message)
            if missed:
                late.append((message, [moments((end - size, end)) for end in missed]))
            for end in ends if early else ():
                if end not in missed:
                    window = open[end, message["k"]]
                    results.append(_window(message["k"], end - size, end, window, final=False))
            tops.add(binding, time)
            results += _closed(
                open, tops.watermark, lambda end: (end - size, end), **({"final": True} if early else {})
            )
        return results, late

    return model


def _closed(
    open: dict[Any, list[Message]], mark: float | None, times: Callable[[float], Any], **marks: Any
) -> list[Any]:
    done = sorted(window for window in open if mark is not None and window[0] <= mark)
    return [_window(key, *times(end), open.pop((end, key)), **marks) for end, key in done]


def _window(key: Any, start: float, end: float, messages: list[Message], **marks: Any) -> Message:
    start, end = moments((start, end))
    return {"k": key, "start": start, "end": end, **marks, **reduced(messages)}


def session_model(gap: float, early: bool = False) -> Model:
    """Sessions: the open messages of a key, grouped again for each message.

    ``early``: with a result at each update. A start that had one and is in the middle of a session is withdrawn.
    """
    marks: Callable[[bool], Any] = lambda final: {"final": final, "withdrawn": False} if early else {}  # noqa: E731

    def groups(messages: list[Message]) -> list[list[Message]]:
        found: list[list[Message]] = []
        for message in sorted(messages, key=lambda m: m["t"]):
            if found and message["t"] - found[-1][-1]["t"] < gap:
                found[-1].append(message)
            else:
                found.append([message])
        return found

    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        tops = Tops(1)
        open: dict[Any, list[Message]] = {}
        told: set[tuple[Any, float]] = set()
        results: list[Any] = []
        late: list[Any] = []
        for binding, message in taken:
            mark = tops.watermark
            own = open.setdefault(message["k"], [])
            (mine,) = [group for group in groups([*own, message]) if message in group]
            if mark is not None and mine[-1]["t"] + gap <= mark:
                late.append((message, [moments((mine[0]["t"], mine[-1]["t"] + gap))]))
            else:
                own.append(message)
                if early:
                    first, last = mine[0]["t"], mine[-1]["t"]
                    mine = [m for m in own if m in mine]
                    gone = sorted(t for k, t in told if k == message["k"] and first < t <= last)
                    told.difference_update((message["k"], t) for t in gone)
                    told.add((message["k"], first))
                    results += [
                        {"k": message["k"], "start": moments((t, t))[0], "final": False, "withdrawn": True}
                        for t in gone
                    ]
                    results.append(_window(message["k"], first, last + gap, mine, **marks(False)))
            tops.add(binding, message["t"])
            mark = tops.watermark
            done = []
            for key, own in open.items():
                for group in groups(own):
                    if mark is not None and group[-1]["t"] + gap <= mark:
                        arrived = [m for m in own if m in group]
                        done.append(_window(key, group[0]["t"], group[-1]["t"] + gap, arrived, **marks(True)))
                        own[:] = [m for m in own if m not in group]
            results += sorted(done, key=lambda window: (window["end"], window["k"]))
        return results, late

    return model


def counted_model(size: int) -> Model:
    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        open: dict[Any, list[Message]] = {}
        results = []
        for _, message in taken:
            own = open.setdefault(message["k"], [])
            own.append(message)
            if len(own) == size:
                times = [m["t"] for m in own]
                results.append(_window(message["k"], sorted(times)[0], sorted(times)[-1], own))
                del open[message["k"]]
        return results, []

    return model


def overlapping_model(size: int, every: int, within: float | None, early: bool = False) -> Model:
    """Counted windows: each is the list of its messages. A message that would be in none begins one."""

    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        tops = Tops(1)
        open: list[tuple[str, float | None, int, list[Message]]] = []
        since: dict[str, int] = {}
        results: list[Any] = []
        begun = 0

        def end(window: Any, final: bool = True) -> None:
            key, _, number, own = window
            times = sorted(m["t"] for m in own)
            marks = {"number": number, "final": final} if early else {}
            results.append(_window(key, times[0], times[-1], own, **marks))
            if final:
                open.remove(window)

        for binding, message in taken:
            key, mark = message["k"], tops.watermark
            if not any(window[0] == key for window in open) or since[key] == every:
                since[key], begun = 0, begun + 1
                first = message["t"] if mark is None else sorted((message["t"], mark))[-1]
                open.append((key, None if within is None else first + within, begun, []))
            since[key] += 1
            for window in [window for window in open if window[0] == key]:
                window[3].append(message)
            for window in [window for window in open if len(window[3]) == size]:
                end(window)
            for window in [window for window in open if window[0] == key] if early else ():
                end(window, final=False)
            tops.add(binding, message["t"])
            mark = tops.watermark
            over = [window for window in open if None not in (mark, window[1]) and window[1] <= mark]  # type: ignore[operator]
            for window in sorted(over, key=lambda window: window[1] or 0):
                end(window)
        return results, []

    return model


def within_model(size: int, within: float) -> Model:
    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        tops = Tops(1)
        open: dict[Any, tuple[float, list[Message]]] = {}
        results = []
        for binding, message in taken:
            mark = tops.watermark
            first = message["t"] if mark is None else sorted((message["t"], mark))[-1]
            _, own = open.setdefault(message["k"], (first + within, []))
            own.append(message)
            tops.add(binding, message["t"])
            mark = tops.watermark
            full = [message["k"]] if len(own) == size else []
            over = sorted((due, key) for key, (due, _) in open.items() if mark is not None and due <= mark)
            for key in [*full, *(key for _, key in over if key not in full)]:
                _, own = open.pop(key)
                times = sorted(m["t"] for m in own)
                results.append(_window(key, times[0], times[-1], own))
        return results, []

    return model


def totals_model(every: float | None, inputs: int = 1, early: bool = False) -> Model:
    """All messages of a key so far: after each, or when the watermark has passed a multiple of ``every``."""

    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        tops = Tops(inputs)
        keys: dict[str, list[Message]] = {}
        waits: set[tuple[float, str]] = set()
        results: list[Any] = []
        for binding, message in taken:
            tops.add(binding, message["t"])
            mark = tops.watermark
            for pair in sorted(waits):
                if mark is not None and pair[0] <= mark:
                    waits.remove(pair)
                    end = moment(round(pair[0] * 1_000_000))
                    results.append(
                        {"k": pair[1], "end": end, **({"final": True} if early else {}), **reduced(keys[pair[1]])}
                    )
            keys.setdefault(message["k"], []).append(message)
            if every is None:
                results.append({"k": message["k"], **reduced(keys[message["k"]])})
            else:
                due = ((message["t"] if mark is None else mark) // every + 1) * every
                waits.add((due, message["k"]))
                if early:
                    end = moment(round(due * 1_000_000))
                    results.append({"k": message["k"], "end": end, "final": False, **reduced(keys[message["k"]])})
        return results, []

    return model


def lookup_model(deletes: bool) -> Model:
    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        results = []
        for n, (binding, message) in enumerate(taken):
            rows = [m for b, m in taken[:n] if b == "right" and m["k"] == message["k"]]
            row = None if not rows or (deletes and rows[-1]["v"] is None) else rows[-1]
            if binding == "left":
                results.append({"left": message, "right": row})
        return results, []

    return model


def latest_model(emit: str, how: str, deletes: bool = False) -> Model:
    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        results = []
        sides: dict[str, dict[str, Message]] = {}
        for binding, message in taken:
            newest = sides.setdefault(message["k"], {})
            if deletes and message["v"] is None:
                if newest.pop(binding, None) is None:
                    continue
            else:
                newest[binding] = message
            if len(newest) == 2 or how == "full":
                results.append({side: newest.get(side) for side in TWO})
                if emit == "complete":
                    newest.clear()
        return results, []

    return model


def _not_late(taken: Taken) -> tuple[Taken, list[Any], float | None]:
    """The messages that are not late, those that are, and the last watermark."""
    tops = Tops(2)
    kept: Taken = []
    late: list[Any] = []
    for binding, message in taken:
        mark = tops.watermark
        if mark is not None and message["t"] < mark:
            late.append((message, None))
        else:
            kept.append((binding, message))
        tops.add(binding, message["t"])
    return kept, late, tops.watermark


def as_of_model(tolerance: float | None, outer: bool) -> Model:
    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        kept, late, mark = _not_late(taken)
        results = []
        lefts = sorted((m for b, m in kept if b == "left"), key=lambda m: m["t"])
        for left in lefts:
            if mark is None or left["t"] >= mark:
                continue
            rows = [m for b, m in kept if b == "right" and m["k"] == left["k"] and m["t"] <= left["t"]]
            row = sorted(rows, key=lambda m: m["t"])[-1] if rows else None
            if row is not None and tolerance is not None and left["t"] - row["t"] > tolerance:
                row = None
            if row is not None or outer:
                results.append({"left": left, "right": row})
        return results, late

    return model


def interval_model(before: float, after: float, how: str) -> Model:
    def model(taken: Taken) -> tuple[list[Any], list[Any]]:
        kept, late, mark = _not_late(taken)
        lefts, rights = ([m for b, m in kept if b == side] for side in ("left", "right"))
        fits = lambda a, b: a["k"] == b["k"] and -before <= b["t"] - a["t"] <= after  # noqa: E731
        results = [{"left": a, "right": b} for a in lefts for b in rights if fits(a, b)]
        over = lambda time: mark is not None and time < mark  # noqa: E731
        if how in ("left", "full"):
            lone = [a for a in lefts if over(a["t"] + after) and not any(fits(a, b) for b in rights)]
            results += [{"left": a, "right": None} for a in lone]
        if how in ("right", "full"):
            lone = [b for b in rights if over(b["t"] + before) and not any(fits(a, b) for a in lefts)]
            results += [{"left": None, "right": b} for b in lone]
        return results, late

    return model


# --- the cases ------------------------------------------------------------------------------------


class WindowCase(NamedTuple):
    """One processor. ``stream`` makes it anew; ``inputs`` are its queues by binding."""

    stream: Callable[[], cues.Stream]
    model: Model
    inputs: tuple[str, ...] = ("m",)
    ordered: bool = True
    """False if the order of results of one moment is not promised."""
    stays: tuple[bytes, ...] = ()
    """The kinds of rows that stay after the end of the inputs, one for each key."""


TIMED: Mapping[str, Any] = {"time": "t", "key": "k", "delay": DELAY_S, "late": "late"}
TWO = {"left": "left", "right": "right"}

WINDOWS = {
    "tumbling": WindowCase(
        lambda: windows.tumbling("m", "out", 10, reduce=REDUCE, **TIMED), fixed(10, 10), ordered=False
    ),
    "hopping": WindowCase(
        lambda: windows.hopping("m", "out", 10, 4, reduce=REDUCE, **TIMED), fixed(10, 4), ordered=False
    ),
    "tumbling-of-two": WindowCase(
        lambda: windows.tumbling(cues.AnyOf(**TWO), "out", 10, reduce=REDUCE, **TIMED),
        fixed(10, 10, 2),
        ("left", "right"),
        False,
    ),
    "sessions": WindowCase(
        lambda: windows.sessions("m", "out", 6, reduce=REDUCE, **TIMED), session_model(6), ordered=False
    ),
    "counted": WindowCase(
        lambda: windows.counted("m", "out", 3, time="t", key="k", reduce=REDUCE), counted_model(3), stays=(b"c",)
    ),
    "counted-within": WindowCase(
        lambda: windows.counted("m", "out", 3, time="t", key="k", reduce=REDUCE, within=8, delay=DELAY_S),
        within_model(3, 8),
        ordered=False,
    ),
    "counted-every": WindowCase(
        lambda: windows.counted("m", "out", 5, every=2, time="t", key="k", reduce=REDUCE),
        overlapping_model(5, 2, None),
        stays=(b"o",),
    ),
    "counted-every-within": WindowCase(
        lambda: windows.counted("m", "out", 4, every=3, time="t", key="k", reduce=REDUCE, within=8, delay=DELAY_S),
        overlapping_model(4, 3, 8),
        ordered=False,
    ),
    "tumbling-early": WindowCase(
        lambda: windows.tumbling("m", "out", 10, reduce=REDUCE, early="update", **TIMED),
        fixed(10, 10, early=True),
        ordered=False,
    ),
    "hopping-early": WindowCase(
        lambda: windows.hopping("m", "out", 10, 4, reduce=REDUCE, early="update", **TIMED),
        fixed(10, 4, early=True),
        ordered=False,
    ),
    "tumbling-of-two-early": WindowCase(
        lambda: windows.tumbling(cues.AnyOf(**TWO), "out", 10, reduce=REDUCE, early="update", **TIMED),
        fixed(10, 10, 2, early=True),
        ("left", "right"),
        False,
    ),
    "sessions-early": WindowCase(
        lambda: windows.sessions("m", "out", 6, reduce=REDUCE, early="update", **TIMED),
        session_model(6, early=True),
        ordered=False,
    ),
    "counted-early": WindowCase(
        lambda: windows.counted("m", "out", 3, time="t", key="k", reduce=REDUCE, early="update"),
        overlapping_model(3, 3, None, early=True),
        stays=(b"c",),
    ),
    "counted-within-early": WindowCase(
        lambda: windows.counted(
            "m", "out", 3, time="t", key="k", reduce=REDUCE, within=8, delay=DELAY_S, early="update"
        ),
        overlapping_model(3, 3, 8, early=True),
        ordered=False,
    ),
    "counted-every-early": WindowCase(
        lambda: windows.counted(
            "m", "out", 4, every=3, time="t", key="k", reduce=REDUCE, within=8, delay=DELAY_S, early="update"
        ),
        overlapping_model(4, 3, 8, early=True),
        ordered=False,
    ),
    "aggregate-every-early": WindowCase(
        lambda: aggregates.aggregate(
            "m", "out", by="k", reduce=REDUCE, every=7, time="t", delay=DELAY_S, early="update"
        ),
        totals_model(7, early=True),
        ordered=False,
        stays=(b"a",),
    ),
    "aggregate": WindowCase(
        lambda: aggregates.aggregate("m", "out", by="k", reduce=REDUCE), totals_model(None), stays=(b"a",)
    ),
    "aggregate-every": WindowCase(
        lambda: aggregates.aggregate("m", "out", by="k", reduce=REDUCE, every=7, time="t", delay=DELAY_S),
        totals_model(7),
        ordered=False,
        stays=(b"a",),
    ),
    "aggregate-every-of-two": WindowCase(
        lambda: aggregates.aggregate(cues.AnyOf(**TWO), "out", by="k", reduce=REDUCE, every=7, time="t", delay=DELAY_S),
        totals_model(7, 2),
        ("left", "right"),
        ordered=False,
        stays=(b"a",),
    ),
    "lookup": WindowCase(
        lambda: joins.lookup(TWO, "out", key="k", how="left", delete=lambda row: row["v"] is None),
        lookup_model(deletes=True),
        ("left", "right"),
        stays=(b"t",),
    ),
    "lookup-left": WindowCase(
        lambda: joins.lookup(TWO, "out", key="k", how="left"),
        lookup_model(deletes=False),
        ("left", "right"),
        stays=(b"t",),
    ),
    "latest": WindowCase(
        lambda: joins.latest(TWO, "out", key="k", delete=lambda message: message["v"] is None),
        latest_model("change", "inner", deletes=True),
        ("left", "right"),
        stays=(b"n", b"n"),
    ),
    "latest-full": WindowCase(
        lambda: joins.latest(TWO, "out", key="k", how="full", delete=lambda message: message["v"] is None),
        latest_model("change", "full", deletes=True),
        ("left", "right"),
        stays=(b"n", b"n"),
    ),
    "latest-complete": WindowCase(
        lambda: joins.latest(TWO, "out", key="k", emit="complete"),
        latest_model("complete", "inner"),
        ("left", "right"),
        stays=(b"n", b"n"),
    ),
    "as-of": WindowCase(
        lambda: joins.as_of(TWO, "out", how="left", **TIMED),
        as_of_model(None, True),
        ("left", "right"),
        stays=(b"t",),
    ),
    "as-of-tolerance": WindowCase(
        lambda: joins.as_of(TWO, "out", tolerance=7, **TIMED), as_of_model(7, False), ("left", "right")
    ),
}
for _how in ("inner", "left", "right", "full"):
    WINDOWS[f"interval-{_how}"] = WindowCase(
        lambda how=_how: joins.interval(TWO, "out", before=3, after=6, how=how, **TIMED),  # type: ignore[misc]
        interval_model(3, 6, _how),
        ("left", "right"),
        False,
    )
"""A new processor joins here."""


def messages(seed: int, count: int, inputs: tuple[str, ...], disorder: float = 8) -> dict[str, list[Message]]:
    """Messages for each queue, in a random order of time; some are late."""
    chance = random.Random(seed)
    each = {}
    for name in inputs:
        times = sorted(chance.randint(0, count * 3) for _ in range(count // len(inputs)))
        arrival = sorted(times, key=lambda time: time + chance.uniform(0, disorder))
        each[name] = [
            {"t": time, "k": chance.choice("ab"), "v": chance.choice([None, 1, 2, 3, 5]), "i": f"{name} {n}"}
            for n, time in enumerate(arrival)
        ]
    return each


def resized(stream: cues.Stream, size: int, fn: Any = None) -> cues.Stream:
    """The stream with another size of its steps, and another function if one is given."""
    assert stream.inputs is not None
    return cues.Stream(fn or stream.fn, stream.inputs, stream.outputs, id=stream.id, batch_size=size)


class Noted:
    """A function that notes the messages of its calls that returned, in order."""

    def __init__(self, fn: Any, taken: Taken) -> None:
        self.fn, self.taken = fn, taken

    def __call__(self, message: Message, process: cues.Process) -> Any:
        result = self.fn(message, process)
        self.taken.append((process.binding, message))
        return result

    @property
    def by_columns(self) -> Any:
        return None if getattr(self.fn, "by_columns", None) is None else self._noted

    def _noted(self, columns: Any, process: cues.Process) -> Any:
        result = self.fn.by_columns(columns, process)
        self.taken += [(process.binding, message) for message in columns.messages(range(len(columns)))]
        return result


def graph_of(stream: cues.Stream, inputs: tuple[str, ...], taken: Taken | None = None) -> cues.Graph:
    """The graph of a case. ``taken`` gets the messages of all calls that returned, in order."""
    graph = cues.Graph("g")
    for name in inputs:
        graph.source(name)
    if taken is not None:
        stream = resized(stream, stream.options.batch_size, Noted(stream.fn, taken))
    graph.add(stream)
    return graph


def found(store: cues.Store) -> tuple[list[Any], list[Any]]:
    """The results and the late messages that are on the queues, in the form of a model."""
    late = testing.messages(store, "late") if "late" in store.queues() else []
    assert [message["number"] for message in late] == list(range(1, len(late) + 1))
    return testing.messages(store, "out"), [(m["message"], m.get("windows")) for m in late]


def as_set(results: list[Any]) -> list[str]:
    """The results without their order."""
    return sorted(map(repr, results))


def run_child(name: str, path: str, seed: str, count: str) -> None:
    """Run a case in this process, which a test kills on the way."""
    case = WINDOWS[name]
    graph = graph_of(resized(case.stream(), 10), case.inputs)
    with cues.open(path, durability="process") as store:
        for queue, given in messages(int(seed), int(count), case.inputs, disorder=DELAY_S).items():
            rest = given[store.queue(queue).last_index :]
            store.queue(queue).appender().write_many(rest)
        for _ in range(10_000):
            if not any(testing.run_until_idle(graph, store, steps_max=3).steps.values()):
                return
            print("steps", flush=True)
