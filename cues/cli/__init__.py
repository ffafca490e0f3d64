"""The command line: ``cues run graph.py``, and commands that inspect its store.

    app.py         the group of commands; turns every error into a text and an exit code
    options.py     the decorators for the options that all commands have
    output.py      tables for a terminal, JSON lines for a pipe
    target.py      the target of a command: graph file, store, store#queue
    live.py        a display that is redrawn while other code prints
    where.py       the expressions of ``tail --where``
    run.py, …      a file for each command

Results are printed on stdout, everything else on stderr. Exit codes: 0, 1 failed, 2 wrong usage, 130 interrupted.
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
