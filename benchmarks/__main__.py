"""Cues and what a Python user could take instead, in one run.

python -m benchmarks prepare              make the environments of the peers (PyPI; Redis, NATS and Java if installed)
python -m benchmarks                      all rows, in rounds, then a result file, tables and plots
python -m benchmarks --only pipeline      rows whose name begins so (repeatable)
python -m benchmarks --compiled PYTHON    also "Cues, compiled": the wheel that is installed for this Python
python -m benchmarks --only start --add   put the rows of this run into the newest result file, in the place of its own
python -m benchmarks --quick              small and once, to see that everything runs; writes nothing
python -m benchmarks report               tables and plots again, from the newest result file
python -m benchmarks list                 rows and contestants, and which of them cannot run here
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import report
from .contest import (
    HEAVY,
    NOT_RUN,
    ROWS,
    NotCompiled,
    Result,
    Row,
    chosen,
    contest,
    core_of,
    missing,
    prepare,
    with_compiled,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=("run", "prepare", "report", "list"), default="run")
    parser.add_argument("file", nargs="?", type=Path, help="for report: the result file (default: the newest)")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="rows whose name begins so")
    parser.add_argument("--durability", choices=("process", "disk"), help="one of the two classes (default: both)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every row (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="times the messages of every row (default: 1)")
    parser.add_argument("--quick", action="store_true", help="one small round of everything, to see that it runs")
    parser.add_argument("--compiled", default="", metavar="PYTHON", help="python with a compiled wheel of Cues")
    parser.add_argument("--add", action="store_true", help="add the rows to the newest result file")
    options = parser.parse_args()
    if options.action == "prepare":
        prepare(_say)
    elif options.action == "list":
        _list()
    elif options.action == "report":
        path = options.file or report.newest()
        if path is None:
            parser.error("there is no result file. Try: python -m benchmarks")
        print("\n".join(str(written) for written in report.write(path)))
    else:
        rows = chosen(options.only)
        if not rows:
            parser.error(f"no row of that name; there are {', '.join(row.name for row in ROWS)}")
        core = ""
        if options.compiled:
            options.compiled = str(Path(options.compiled).absolute())  # not resolved: the link tells the environment
            try:
                core = core_of(options.compiled)
                _say(f"{options.compiled}: {core}")
            except (NotCompiled, OSError) as error:
                parser.error(str(error))
        if options.add and report.newest() is None:
            parser.error("--add found no result file. Try: python -m benchmarks, without --add")
        _run(rows, options, core)


def _run(rows: list[Row], options: argparse.Namespace, core: str) -> None:
    rounds, scale = (1, 0.005) if options.quick else (options.rounds, options.scale)
    results: list[Result] = []
    for row in rows:
        row = with_compiled(row, options.compiled)
        for durability in row.durabilities:
            if options.durability in (None, durability):
                # a sync takes so long that fewer messages do
                part = scale if durability == "process" else scale / 10
                results += contest(row, durability, rounds, part, _say)
                print(report.table([result.to_dict() for result in results], row.name, durability) + "\n", flush=True)
    wrong = [result for result in results if result.fault]
    for result in wrong:
        print(f"{result.row} · {result.contestant}: {result.fault}", file=sys.stderr)
    if not options.quick:
        path = report.add(results, core) if options.add else report.save(results, core)
        print(f"{path}\nTry: python -m benchmarks report   (tables, plots, and the README's part)")
    if any(result.contestant.startswith("Cues") for result in wrong):
        sys.exit(1)


def _list() -> None:
    for row in ROWS:
        print(f"{row.name:16} {row.title}" + ("  (only when it is named)" if row.name in HEAVY else ""))
        for each in row.contestants:
            why = missing(each.module)
            print(f"    {each.name}" + (f": {why}" if why else ""))
    for name, why in NOT_RUN.items():
        print(f"not run: {name}: {why}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
