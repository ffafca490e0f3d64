"""Worker processes: the gain of a second core, the cost of a supervisor, the time of a restart after a kill.

    python benchmarks/workers.py                 all three, five rounds, medians
    python benchmarks/workers.py --quick --json  to see that it works

throughput   two chains with a function that only computes, in one worker and in two, in turns; the time is
             that from the first commit to the last, by the messages' own times; target: 1.8 times. Two cores that
             others use as well do not show it: then "twice the CPU a message costs in one worker, in terms of what
             it costs in two" says what there would be
idle         CPU time of the supervisor while nothing happens, and of its workers; target: under 2 %
restart      from the spawn of a worker that takes the place of one killed by `kill -9`, to its first commit, beside
             the time that a process takes to start and import what a worker imports; target: that + 20 ms
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cues
from cues.graphs.graphfile import load

GRAPH = """
import os
import cues

keeps = cues.QueueOptions(metadata={"t", "time"})
graph = cues.Graph("bench", store=os.environ["CUES_BENCH_STORE"], durability="process", queues={"*": keeps})

def compute(message):
    total = 0
    for n in range(20_000):  # about a millisecond
        total += n * n
    return {"n": message["n"], "total": total}

for chain in ("a", "b"):
    graph.source(f"{chain}-in")
    graph.add(cues.Stream(compute, f"{chain}-in", f"{chain}-out", id=f"{chain}-compute", batch_size=20))
    graph.add(cues.Sink(lambda message: None, f"{chain}-out", id=f"{chain}-end"))
"""
CHAINS = ("a", "b")
START_CPU_S = 0.15
"""CPU time of a worker before its first step."""


def start(folder: Path, workers: int, messages: int) -> Any:
    """The graph on a new store, with messages that wait for it."""
    os.environ["CUES_BENCH_STORE"] = str(folder / "store")
    path = folder / f"bench_{folder.name}.py"
    path.write_text(GRAPH)
    with cues.open(folder / "store", durability="process") as store:
        for chain in CHAINS if messages else ():
            store.queue(f"{chain}-in").appender().write_many([{"n": n} for n in range(messages)])
    return load(str(path)).graph.start(workers=workers)


def times(running: Any, queue: str) -> list[float]:
    """The time at which each message was committed, in seconds since the epoch."""
    tailer = running.store.queue(queue).tailer()
    moments = []
    while tailer.read() is not None:
        moments.append(tailer.envelope.time.timestamp())
    return moments


def throughput(folder: Path, workers: int, messages: int) -> tuple[float, float]:
    """Messages a second, and seconds of CPU a message."""
    with start(folder, workers, messages) as running:
        assert running.wait_idle(timeout=600)
        spent = sum(map(cpu_s, running.pids.values())) - workers * START_CPU_S
        done = [moment for chain in CHAINS for moment in times(running, f"{chain}-out")]
    assert len(done) == messages * len(CHAINS)
    return len(done) / (max(done) - min(done)), spent / len(done)


def idle(folder: Path, seconds: float) -> dict[str, float]:
    """CPU time as a share of the time that passed, in percent."""
    with start(folder, 2, 0) as running:
        assert running.wait_idle(timeout=600)
        pids = list(running.pids.values())
        before, workers, begun = time.process_time(), [cpu_s(pid) for pid in pids], time.monotonic()
        running.wait_done(idle_exit_s=seconds)  # waiting for the end is what `cues run` does
        passed = time.monotonic() - begun
        return {
            "supervisor_percent": 100 * (time.process_time() - before) / passed,
            "worker_percent": 100 * max(cpu_s(p) - b for p, b in zip(pids, workers)) / passed,
        }


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def restart(folder: Path) -> float:
    """Milliseconds from the spawn to the first commit."""
    running = start(folder, 1, 5_000)
    try:
        queue = running.store.queue("a-out")
        until(lambda: queue.last_index > 20)
        (pid,) = running.pids.values()
        os.kill(pid, signal.SIGKILL)
        until(lambda: running.pids.get("worker-1", pid) != pid)
        child = running.engine._supervisor.slots[0].child
        spawned = time.time() - (time.monotonic() - child.started_at)
        reached = queue.last_index
        until(lambda: queue.last_index > reached)
        return 1000 * (next(moment for moment in times(running, "a-out") if moment > spawned) - spawned)
    finally:
        running.close()


def imports() -> float:
    """Milliseconds of a process that imports what a worker does, and nothing else."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import cues.engine.workers, ctypes, cues.graphs.graphfile"], check=True)
    return 1000 * (time.monotonic() - begun)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=2_000, help="in each chain")
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true", help="one small round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.messages, options.idle_s = 1, 100, 0.5
    one, two, back, imported = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="cues-bench-") as made:
        for number in range(options.rounds):

            def room(name: str, number: int = number) -> Path:
                path = Path(made) / f"{name}{number}"
                path.mkdir()
                return path

            one.append(throughput(room("one"), 1, options.messages))
            two.append(throughput(room("two"), 2, options.messages))
            imported.append(imports())
            back.append(restart(room("restart")))
        quiet = idle(room("idle"), options.idle_s)
    ratio = statistics.median(b[0] / a[0] for a, b in zip(one, two))
    free = statistics.median(2 * a[1] / b[1] for a, b in zip(one, two))
    over = statistics.median(b - i for b, i in zip(back, imported))
    rows: list[dict[str, Any]] = [
        {
            "row": "throughput",
            "one_per_s": round(statistics.median(rate for rate, _ in one), 1),
            "two_per_s": round(statistics.median(rate for rate, _ in two), 1),
            "ratio": round(ratio, 2),
            "ratio_by_cpu": round(free, 2),
            "target": 1.8,
        },
        {"row": "idle", **{name: round(value, 3) for name, value in quiet.items()}, "target": 2.0},
        {
            "row": "restart",
            "spawn_to_commit_ms": round(statistics.median(back), 1),
            "import_ms": round(statistics.median(imported), 1),
            "over_ms": round(over, 1),
            "target": 20.0,
        },
    ]
    for row in rows:
        print(json.dumps(row) if options.json else "  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
