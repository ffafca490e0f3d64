"""The memory of the processes of a soak and the bytes of its stores, over time."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

EVERY_S: Final = 5.0
SAMPLES_MIN: Final = 100
"""With fewer samples nothing can be said about growth."""
GROWTH: Final = 1.4
"""The quotient of two medians, of the second and the last quarter of a run, above which something grows."""
SMALL_MB: Final = {"memory": 15.0, "store": 8.0}
"""Differences below these are none."""


def anonymous_mb(pid: int | str) -> float | None:
    """The memory that belongs to a process alone, without mapped files."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return int(found[1]) / 1024 if found else None


def disk_mb(path: Path) -> float:
    """The space that a directory takes on the disk."""
    total = 0
    for file in path.iterdir():
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total / (1 << 20)


class Measures:
    """Samples by name, one in :data:`EVERY_S` seconds; of processes of one kind the largest."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        self._at = 0.0

    def take(self, pids: Mapping[str, int], stores: Sequence[Path]) -> None:
        if time.monotonic() < self._at:
            return
        self._at = time.monotonic() + EVERY_S
        largest: dict[str, float] = {"memory of the operator": anonymous_mb(os.getpid()) or 0.0}
        for name, pid in pids.items():
            kind = f"memory of the {name.partition('-')[0]}"
            largest[kind] = max(largest.get(kind, 0.0), anonymous_mb(pid) or 0.0)
        for store in stores:
            if store.exists():
                largest[f"store {store.name}"] = disk_mb(store)
        for name, value in largest.items():
            self.samples[name].append(value)

    def last(self) -> str:
        return ", ".join(
            f"{name.removeprefix('memory of the ')} {values[-1]:.0f}" for name, values in self.samples.items()
        )

    def table(self) -> list[str]:
        """For each series its medians in the four quarters of the run, and its largest value, in MB."""
        return [
            f"{name:26} {'  '.join(f'{median:7.1f}' for median in quarters(values))}   max {max(values):7.1f} MB"
            for name, values in sorted(self.samples.items())
        ]

    def growths(self) -> list[str]:
        """The series that grow."""
        found = []
        for name, values in self.samples.items():
            _, second, _, last = quarters(values)
            small = SMALL_MB[name.partition(" ")[0]]
            if len(values) >= SAMPLES_MIN and last > GROWTH * second and last - second > small:
                found.append(
                    f"{name} grows: {second:.1f} MB in the second quarter of the run, {last:.1f} MB in the last"
                )
        return found


def quarters(values: Sequence[float]) -> list[float]:
    """The medians of the four quarters; empty ones are those of all."""
    size = len(values)
    parts = [values[size * n // 4 : size * (n + 1) // 4] or values for n in range(4)]
    return [statistics.median(part) for part in parts]
