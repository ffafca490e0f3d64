"""One contestant of one row, once: ``python contestant.py MODULE ROW NAME DIRECTORY COUNT DURABILITY``.

It prints one line of JSON: figures in the columns of the row, memory, bytes on disk, versions, and the fault if the
result is wrong. ``MODULE`` is ``core`` or a module of ``peers``; the interpreter is that of the peer's environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import Contender, Room
from work import Fault

TICKS_S = os.sysconf("SC_CLK_TCK")


def contender(module: str, row: str, name: str) -> Contender:
    loaded: Any = importlib.import_module(module)
    if module == "core":
        return next(each for each in loaded.ROWS if each.name == row).contenders[name]  # type: ignore[no-any-return]
    return loaded.CONTENDERS[row][name]  # type: ignore[no-any-return]


def run(module: str, row: str, name: str, room: Room) -> dict[str, Any]:
    contend = contender(module, row, name)
    figures: dict[str, Any] = {}
    fault = None
    try:
        with contend(room) as work:
            servers = room.keep.get("servers", ())
            gc.collect()
            gc.freeze()
            wall, cpu = time.perf_counter(), _cpu_s(servers)
            sample = work()
            cpu, wall = _cpu_s(servers) - cpu, time.perf_counter() - wall
            figures = {
                "wall_us": wall * 1e6 / room.count,
                "cpu_us": cpu * 1e6 / room.count,
                "own_mb": _own_mb(),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "disk_mb": _disk_mb(room.path),
            }
            if sample is not None:
                figures["first"], figures["second"] = sample
            figures.update(room.keep.setdefault("figures", {}))
        figures.update(room.keep["figures"])  # of a check
    except Fault as error:
        fault = str(error)
    except AssertionError:
        fault = traceback.format_exc(limit=-1)
    return {"row": row, "contestant": name, "messages": room.count, **figures, "fault": fault}


def _cpu_s(servers: Iterable[int]) -> float:
    """Processor seconds of this process, its ended children, and the servers that work for it."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = time.process_time() + ended.ru_utime + ended.ru_stime
    for pid in servers:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        spent += (int(fields[11]) + int(fields[12])) / TICKS_S
    return spent


def _own_mb() -> float:
    """Memory that is not a mapped file."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024


def _disk_mb(path: Path) -> float:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()) / (1 << 20)


def main() -> None:
    module, row, name, directory, count, durability = sys.argv[1:]
    room = Room(Path(directory), int(count), durability, Path(directory))  # type: ignore[arg-type]
    print(json.dumps(run(module, row, name, room)), flush=True)
    os._exit(0)  # some peers leave threads that do not end


if __name__ == "__main__":
    main()
