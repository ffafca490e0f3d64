"""The command line: ``cues run graph.py``, and commands that inspect its store.

Each command is a file. What they have in common is in ``app.py`` (the group, errors as exit codes), ``target.py``
(graph files, stores, queues), ``options.py`` and ``output.py`` (tables for a terminal, JSON lines for a pipe).

Results are printed on stdout, everything else on stderr. Exit codes: 0, 1 failed, 2 wrong usage,
3 low disk, 4 full queue, 5 output that could not be written, 6 stopped run, 7 running graph, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from cues.base import collector

ARROW_POOL: Final = ("ARROW_DEFAULT_MEMORY_POOL", "system")
"""The variable by which Arrow chooses its allocator when it is imported, and our choice. Arrow's choice, mimalloc,
keeps 60 to 90 MB more for a pipeline of tables that uses 30 MB, and takes a tenth more CPU. Workers inherit it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    if os.name != "posix":
        from cues.cli.printing import err

        err("Cues runs on Linux and macOS; on Windows it runs inside WSL (wsl --install).")
        sys.exit(2)
    if os.getpid() == 1:
        # The kernel drops signals that the first process of a container does not handle. A run has handlers of its own.
        import signal

        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(130))
    os.environ.setdefault(*ARROW_POOL)
    collector.begin()
    from cues.cli.app import run

    code = run(arguments)
    collector.end()
    sys.exit(code)
