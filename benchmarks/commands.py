"""``cues run graph.py`` from the spawn of its process to its first message: ``python benchmarks/commands.py [TREE …]``.

    python benchmarks/commands.py                          this clone
    python benchmarks/commands.py ../before . --rounds 20  two clones in turns: the second as a ratio of the first

Each round starts ``python -c pass``, then each clone on a new store, with the compiled files of Python in a cache. The
figures are medians over the rounds: milliseconds to the first message, CPU milliseconds of the whole process, and
modules that are loaded at the first message. The ratio is the median of the ratios in a round. On a machine with other
work the CPU time is the better figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRAPH = """
import json, sys, time
import cues

graph = cues.Graph("g")

@graph.source("numbers", resume="skip")
def numbers():
    yield {"n": 1}

@graph.stream("numbers", "doubled")
def double(message):
    with open("first.json", "w") as file:
        json.dump([time.monotonic_ns(), len(sys.modules)], file)
    return {"n": 2 * message["n"]}
"""

PASS = "python -c pass"
Figures = dict[str, float]


def measured(command: list[str], path: Path, env: dict[str, str]) -> Figures:
    """The figures of one process."""
    (path / "graph.py").write_text(GRAPH)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic_ns()
    subprocess.run(command, cwd=path, env=env, check=True, capture_output=True)
    ended, after = time.monotonic_ns(), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    first, modules = json.loads((path / "first.json").read_text()) if (path / "first.json").exists() else (ended, 0)
    return {"first_ms": (first - begun) / 1e6, "cpu_ms": cpu_s * 1e3, "modules": modules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parent.parent])
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    trees = {str(tree): tree.resolve() for tree in given.trees}
    found: dict[str, list[Figures]] = {name: [] for name in (PASS, *trees)}
    with tempfile.TemporaryDirectory() as cache:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = cache
        for number in range(given.rounds + 1):
            for name in found:
                # The clone is put before the paths of an editable installation.
                code = f"import sys; sys.path.insert(0, {str(trees.get(name))!r}); import cues.cli; cues.cli.main()"
                command = ["-c", "pass"] if name == PASS else ["-c", code, "run", "graph.py"]
                with tempfile.TemporaryDirectory() as path:
                    figures = measured([sys.executable, *command], Path(path), env)
                if number:  # the first round fills the cache
                    found[name].append(figures)
    first = next(iter(trees))
    for name, rounds in found.items():
        median = {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        text = f"{median['first_ms']:7.1f} ms to the first message {median['cpu_ms']:7.1f} ms CPU"
        text += f" {median['modules']:4.0f} modules"
        if name not in (PASS, first):
            ratios = {
                figure: statistics.median(a[figure] / b[figure] for a, b in zip(rounds, found[first]))
                for figure in ("first_ms", "cpu_ms")
            }
            text += f"   × {ratios['first_ms']:.2f}, CPU × {ratios['cpu_ms']:.2f}"
        print(f"{name:24} {text}")


if __name__ == "__main__":
    main()
