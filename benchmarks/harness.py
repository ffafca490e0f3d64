"""Races: contenders that do the same work, interleaved in one run, as ratios against targets.

    row          one race: Cues, its peers, and a target for the ratio to each peer that has one
    contender    a context manager that prepares its data, yields the work to be timed, and
                 checks afterwards that the work was done
    round        every contender once, in another order each time, on a store of its own

The ratio of a row is the median over the rounds of (Cues / peer) *within* a round, so that a machine
that is slower for a second slows both. CPU time is shown next to wall time. On a shared machine it is
the better figure, unless the work is waiting (for a disk, for another process).
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

Durability = Literal["process", "disk"]
BOTH: tuple[Durability, ...] = ("process", "disk")


class Sample(NamedTuple):
    """The two figures of one contender in one round, for the columns of the row."""

    first: float
    second: float


@dataclass(frozen=True)
class Room:
    """The directories and the size of one round of a contender."""

    path: Path
    """A directory of its own, fresh in every round."""
    count: int
    """Messages."""
    durability: Durability
    shared: Path
    """The same directory in all rounds, made ready by the row's ``prepare``."""
    keep: dict[str, Any] = field(default_factory=dict)

    @property
    def syncs(self) -> bool:
        return self.durability == "disk"


Work = Callable[[], Sample | None]
"""Returns its own figures, or None if the harness times it."""
Contender = Callable[[Room], AbstractContextManager[Work]]


@dataclass(frozen=True)
class Times:
    """A target: at most so many times the peer."""

    limit: float

    def missed_by(self, mine: float, peer: float) -> float:
        return mine / peer / self.limit - 1

    def __str__(self) -> str:
        return f"≤ x{self.limit:g}"


@dataclass(frozen=True)
class Plus:
    """A target: at most so much more than the peer, in the unit of the row."""

    limit: float

    def missed_by(self, mine: float, peer: float) -> float:
        return mine / (peer + self.limit) - 1

    def __str__(self) -> str:
        return f"≤ +{self.limit:g}"


@dataclass(frozen=True)
class Row:
    """A race. The first contender is Cues."""

    name: str
    what: str
    contenders: Mapping[str, Contender]
    counts: Mapping[Durability, int]
    """Messages by durability; a durability without an entry is not raced."""
    targets: Mapping[str, Times | Plus] = field(default_factory=dict)
    """By peer."""
    aims: tuple[Durability, ...] = BOTH
    """The durabilities for which the targets are set."""
    columns: tuple[str, str] = ("wall µs", "CPU µs")
    prepare: Callable[[Room], None] | None = None
    count_min: int = 100


@dataclass(frozen=True)
class Line:
    """One contender of one race."""

    row: str
    durability: str
    messages: int
    contender: str
    columns: tuple[str, str]
    figures: Sample
    spread: tuple[float, float]
    """Least and most of the first figure."""
    ratios: Sample | None
    """Cues against this peer, of both figures."""
    target: str | None
    missed_by: Sample | None
    """The share by which the target is missed (below 0: met), by the first and by the second figure."""

    @property
    def verdict(self) -> str:
        if self.missed_by is None:
            return ""
        first, second = self.missed_by
        verdict = _verdict(first)
        if self.columns[1].startswith("CPU") and (first > 0) != (second > 0):
            verdict += f" (by CPU time: {_verdict(second)})"
        return verdict

    def to_dict(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "durability": self.durability,
            "messages": self.messages,
            "contender": self.contender,
            **dict(zip(self.columns, self.figures)),
            "min": self.spread[0],
            "max": self.spread[1],
            "ratios": list(self.ratios) if self.ratios else None,
            "target": self.target,
            "verdict": self.verdict or None,
        }


def _verdict(missed_by: float) -> str:
    return "met" if missed_by <= 0 else f"not met by {missed_by:.0%}"


def race(row: Row, durability: Durability, rounds: int, scale: float, root: Path | None = None) -> list[Line]:
    """Run one row with one durability."""
    count = max(row.count_min, int(row.counts[durability] * scale))
    samples: dict[str, list[Sample]] = {name: [] for name in row.contenders}
    with tempfile.TemporaryDirectory(prefix="cues-bench-", dir=root) as made:
        base = Path(made)
        shared = base / "shared"
        keep: dict[str, Any] = {}
        shared.mkdir()
        if row.prepare is not None:
            row.prepare(Room(shared, count, durability, shared, keep))
        names = list(row.contenders)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                path = base / "room"
                path.mkdir()
                room = Room(path, count, durability, shared, keep)
                samples[name].append(_timed(row.contenders[name], room))
                shutil.rmtree(path)
    return _lines(row, durability, count, samples)


def _timed(contender: Contender, room: Room) -> Sample:
    with contender(room) as work:
        gc.collect()
        gc.freeze()
        wall, cpu = time.perf_counter(), time.process_time()
        sample = work()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        gc.unfreeze()
    return sample or Sample(wall * 1e6 / room.count, cpu * 1e6 / room.count)


def _lines(row: Row, durability: Durability, count: int, samples: dict[str, list[Sample]]) -> list[Line]:
    (_, mine), *_ = samples.items()
    lines = []
    for name, own in samples.items():
        ratios = missed = None
        target = row.targets.get(name) if durability in row.aims else None
        if own is not mine:
            pairs = list(zip(mine, own))
            ratios = Sample(
                _median(m.first / p.first for m, p in pairs), _median(m.second / p.second for m, p in pairs)
            )
            if target is not None:
                missed = Sample(
                    _median(target.missed_by(m.first, p.first) for m, p in pairs),
                    _median(target.missed_by(m.second, p.second) for m, p in pairs),
                )
        firsts = [sample.first for sample in own]
        figures = Sample(_median(firsts), _median(sample.second for sample in own))
        lines.append(
            Line(
                row.name,
                durability,
                count,
                name,
                row.columns,
                figures,
                (min(firsts), max(firsts)),
                ratios,
                str(target) if target else None,
                missed,
            )
        )
    return lines


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def print_lines(row: Row, lines: list[Line], out: TextIO) -> None:
    """One race as a table."""
    head = lines[0]
    first, second = row.columns
    print(f"\n{row.name} · {head.durability} · {head.messages:,} messages · {row.what}", file=out)
    print(f"  {'':44} {first:>10} {second:>10}  {'Cues is':>8} {second.split()[0]:>8}  {'target':9} verdict", file=out)
    for line in lines:
        ratios = f"x{line.ratios[0]:<7.2f} x{line.ratios[1]:<7.2f}" if line.ratios else " " * 17
        text = f"  {line.contender:44} {line.figures[0]:>10.2f} {line.figures[1]:>10.2f}  {ratios}"
        print(f"{text}  {line.target or '':9} {line.verdict}".rstrip(), file=out)
    out.flush()


def print_json(line: Line, out: TextIO) -> None:
    print(json.dumps(line.to_dict(), ensure_ascii=False), file=out, flush=True)
