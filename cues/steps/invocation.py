"""One call of a user's function: its arguments, and the transaction of ``checkpoint=`` around it.

:func:`invocation` returns a function of three arguments: the step's messages, the columns or messages to give to
the user's function, and the process. It is made for one of these cases, so the case is found only once:

    one input                 fn(message)             or fn(message, process=process)
    a join                    fn(a=message, ...)      or fn(a=message, ..., process=process)
    with checkpoint=target    one of these in a transaction of the target, with the messages that are new to it
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cues.errors import CheckpointError, Diverged, Fenced
from cues.graphs.options import CheckpointTarget, Function
from cues.graphs.processor import (
    Node,
    wants_process,
)
from cues.queues.tables import Chosen
from cues.steps.failure import named
from cues.steps.process import Process
from cues.steps.taking import Taken

if TYPE_CHECKING:
    from cues.steps.eventloop import EventLoop


Invocation = Callable[[Taken, list[Any], Process], Any]
"""Calls the user's function with one item for each slice: a message, or the list of a batch function."""


def invocation(node: Node, fn: Function, check_ran: Callable[[Any], None]) -> Invocation:
    """Return the way to call ``fn``. ``check_ran`` refuses the result of a function whose body has not run."""
    call = _plainly(node, fn)
    target = node.options.checkpoint
    return call if target is None else _in_transaction(node, target, call, check_ran)


def _in_transaction(
    node: Node, target: CheckpointTarget, call: Invocation, check_ran: Callable[[Any], None]
) -> Invocation:
    def in_transaction(taken: Taken, given: list[Any], process: Process) -> Any:
        core, before = process.core, process.core.chosen
        with ExitStack() as opened:
            transaction = _begun(node, target, process, opened)
            known = transaction.known
            if known:
                if not node.options.batch:
                    return None
                chosen = core.chosen if core.chosen is not None else range(taken.count)
                fresh = [place for place, offset in enumerate(chosen) if offset >= known]
                if not fresh:
                    return None
                core.chosen = [chosen[place] for place in fresh]
                given = [column.messages() if isinstance(column, Chosen) else column for column in given]
                given = [[column[place] for place in fresh] for column in given]
            core.connection = transaction.connection
            try:
                result = call(taken, given, process)
                if not node.outputs:
                    check_ran(result)  # inside the transaction: its commit would record the messages as done
                return result
            finally:
                core.connection, core.chosen = None, before

    return in_transaction


def _begun(node: Node, target: CheckpointTarget, process: Process, opened: ExitStack) -> Any:
    """Begin the transaction of a target. A failure is one of the target: no message has a part in it."""
    try:
        return opened.enter_context(target.transaction(process))
    except (Fenced, Diverged, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"The target of {node.id} cannot begin a transaction: {named(error)}",
            "correct the options of the target, or install its driver, then start again.",
            where=getattr(target, "where", ""),
        ) from error


def prepare(node: Node) -> None:
    """Let the target and the function open what they need, before a message is taken.

    A missing driver, a wrong URL or a wrong option is an error that no message can mend: the processor stops here, and
    no message is charged. The hook is a method ``__cues_prepare__()`` of ``checkpoint=``, or of the function or the
    object that the function is a method of. A target that leaves something open for a later time, such as a file, has
    a hook ``__cues_continue__(unit)`` too: a process that was killed cannot do it when the time has come.
    """
    for part in (node.options.checkpoint, getattr(node.fn, "__self__", node.fn)):
        hook = getattr(part, "__cues_prepare__", None)
        if hook is not None:
            hook()
    resume = getattr(node.options.checkpoint, "__cues_continue__", None)
    if resume is not None:
        resume(node.key)


def _plainly(node: Node, fn: Function) -> Invocation:
    process_too = wants_process(node.fn)  # type: ignore[arg-type]

    def with_bindings(taken: Taken, given: list[Any], process: Process) -> Any:
        arguments = {piece.binding: column for piece, column in zip(taken.slices, given)}
        return fn(**arguments, process=process) if process_too else fn(**arguments)

    if node.mode == "join":
        return with_bindings
    if process_too:
        return lambda taken, given, process: fn(given[0], process=process)
    return lambda taken, given, process: fn(given[0])


def waiting(fn: Function, loop: EventLoop, limit_s: float | None) -> Function:
    """Return a plain function that runs an `async def` on the loop and waits for it, at most ``limit_s``."""
    if limit_s is not None:
        return lambda *arguments, **keywords: loop.run(loop.within(fn(*arguments, **keywords), limit_s))
    return lambda *arguments, **keywords: loop.run(fn(*arguments, **keywords))
