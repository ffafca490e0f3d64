"""The command line: ``cues run graph.py`` and what looks at the store that it leaves.

    app.py         the group of commands; every error becomes words and an exit code here
    options.py     the decorators that give all commands the same manners
    output.py      tables for a terminal, JSON lines for a pipe
    target.py      graph file, store, store#queue: what a command is pointed at
    live.py        a display that is redrawn, around which others may print
    where.py       the expressions of ``tail --where``
    run.py, …      a file for each command

Results go to stdout, all else to stderr. Exit codes: 0, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    if os.name != "posix":
        print("Cues runs on Linux and macOS; on Windows it runs inside WSL (wsl --install).", file=sys.stderr)
        sys.exit(2)
    from cues.cli.app import run

    sys.exit(run(arguments))
