"""Commands that an operator types after a run has died and before the next start, over the graphs of scenarios.py.

They run in children of forks.py. A row of :data:`SAME` is one or several commands, as they are typed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import scenarios

from cues.cli import app

ABROAD = "abroad"


def restored(path: str, *more: list[str]) -> None:
    """Both stores from one backup, in their old places."""
    backups, new = path + "-backups", path + "-new"
    run(["backup", path, backups], *(["backup", path, backups, *words] for words in more), ["restore", backups, new])
    shutil.rmtree(path)
    os.rename(new, path)


def promoted(path: str) -> None:
    """Both stores from one copy. The other one is moved to where the graph looks for it."""
    copy = path + "-copy"
    run(["follow", path, copy, "--once"], ["follow", "--promote", copy, "--yes"])
    shutil.rmtree(path)
    os.rename(copy, path)
    if os.path.isdir(f"{path}/others"):
        os.rename(f"{path}/others/{ABROAD}", f"{path}/{ABROAD}")


def salvaged(path: str) -> None:
    """Each store by itself: nothing is damaged."""
    for store in (path, f"{path}/{ABROAD}"):
        if os.path.isdir(store):
            run(["salvage", store, path + "-new"])
            os.rename(f"{path}-new/data.mdb", f"{path}-data")
            shutil.rmtree(path + "-new")
            for left in Path(store).iterdir():
                if left.name != ABROAD:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            os.rename(f"{path}-data", f"{store}/data.mdb")


def typed(*lines: str) -> Callable[[str], None]:
    """Commands about each of the two stores."""

    def command(path: str) -> None:
        for store in (path, f"{path}/{ABROAD}"):
            if os.path.isdir(store):
                run(*([word.replace("STORE", store) for word in line.split()] for line in lines))

    return command


def run(*lines: list[str]) -> None:
    for words in lines:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run(words)
        assert code == 0, f"cues {' '.join(words)}: exit code {code}\n{out.getvalue()}{err.getvalue()}"


LOOK = ["check STORE", "status STORE", "metrics STORE", "queues STORE", "errors STORE", "history STORE"]

SAME: dict[str, Callable[[str], None]] = {
    "look": typed(*LOOK),
    "pause and resume": typed("pause STORE --reason tried", "status STORE", "resume STORE"),
    "compact": typed("compact STORE"),
    "restore": restored,
    "restore of changes": lambda path: restored(path, ["--since", "auto"]),
    "promote": promoted,
    "salvage": salvaged,
}
"""Commands that change no message. All but the first two may begin a timeline."""


def crash_and_command(name: str, made: str, cases: list[tuple[tuple[str, int], str]]) -> Iterator[dict[str, Any]]:
    """For each case a copy of the store ``made``: a crash, a command, and a start that finishes."""
    for number, ((point, hit), command) in enumerate(cases):
        path = scenarios.copy(made, f"case-{number}")
        died = scenarios._in_child(scenarios.crash, name, path, point, hit)
        try:
            SAME[command](path)
            scenarios.drive(name, path)
            yield {"died": [died], "error": "", **scenarios.examine(name, path)}
        except Exception:
            yield {"died": [died], "error": traceback.format_exc()}
        for left in Path(path).parent.glob(f"case-{number}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
