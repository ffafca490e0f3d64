"""Lines about a processor or a queue, with the command that does more about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues.base.texts import ago, quoted
from cues.graphs.pause import ProcessorPause

if TYPE_CHECKING:
    from cues.tools.measurement import LastError


def last_error(processor: str, last: LastError, text: str, store: str | None) -> str:
    """The last error of a processor, and the command that prints it."""
    return (
        f"Last error of {processor}, {ago(last.time)}: {last.type}: {last.text}"
        f"\n  {errors_of(f'{text}#{last.queue}', store)} --index {last.index}"
    )


def paused(pause: ProcessorPause, text: str, store: str | None) -> str:
    """A line about a paused processor, and the command that resumes it."""
    again = f"cues resume {quoted(text)}" + (f" --store {quoted(store)}" if store else "")
    return (
        f"{pause.processor} is paused, {ago(pause.time)}, {pause.text}\n  {again} --processor {quoted(pause.processor)}"
    )


def errors_of(text: str, store: str | None) -> str:
    """The command that lists the error messages of a graph file, a store or a directory."""
    return f"cues errors {quoted(text)}" + (f" --store {quoted(store)}" if store else "")


def run_again(graph: str, queues: str | None, store: str | None) -> str:
    """The command that continues a run of a graph file; ``queues`` is the directory of its queues, if it has one."""
    command = f"cues run {quoted(graph)}" + (f" --engine spark --queues {quoted(queues)}" if queues else "")
    return command + (f" --store {quoted(store)}" if store else "")
