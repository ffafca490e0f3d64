"""The page of a run, in a process of its own: nothing that a client does takes time from the graph.

    parent                                         child (python -m cues.ui.process)
    starts it, writes one line of JSON to it   →   opens the store read-only, listens
    prints the address                         ←   one line of JSON: the address, or the reason why there is none
    ends, however                              →   reads the end of its standard input, and ends

The child does not import the graph file: the parent tells it the shape of the graph. It runs at a lower priority.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from cues.errors import CuesError
from cues.ui.guard import Guard
from cues.ui.look import look_of
from cues.ui.server import Server, address_of, listen

_NICE = 5
_END_S = 5.0


class PageProcess:
    """The process that serves the page of a run."""

    def __init__(self, settings: dict[str, Any], say: Callable[[str], None]) -> None:
        """Start it. ``say`` is called, in a thread, with the address or with the reason why there is none."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cues.ui.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the run; the page is there until the run has ended
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(settings) + "\n")
            self._process.stdin.flush()
        threading.Thread(target=self._tell, args=(say,), name="cues page", daemon=True).start()

    def _tell(self, say: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told = json.loads(line) if line else {"failed": "its process ended"}
        say(f"Page: {told['address']}" if "address" in told else f"There is no page: {told['failed']}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def guard_of(settings: dict[str, Any], port: int) -> Guard:
    return Guard.of(settings["host"], port, settings["token"], settings["allow_write"])


def main() -> None:
    """Serve until standard input ends."""
    settings = json.loads(sys.stdin.readline())
    os.nice(_NICE)
    try:
        listener = listen(settings["host"], settings["port"])
        guard = guard_of(settings, listener.getsockname()[1])
        server = Server(look_of(settings), guard, listener)
    except CuesError as error:
        print(json.dumps({"failed": error.message}), flush=True)
        return
    print(json.dumps({"address": address_of(listener, guard)}), flush=True)

    def wait_for_the_end() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=wait_for_the_end, name="cues page end", daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
