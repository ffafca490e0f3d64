"""Python's cyclic garbage collector, in processes that run nothing but a graph: ``cues run`` and its workers.

    begin()         in the command line's own process: no looks while the code of a command is imported
    imported()      freeze that code for ever, and let the collector look again
    choose(2000)    before the graph file is imported: the count, which workers get with their graph
    settle()        after the start (in a worker, after the import): freeze what exists, and collect after 2000 new
                    containers instead of 700. After imported() only a graph file with many modules is worth it: to
                    take back the freeze costs the end of the process a look at everything
    restore()       after the run: the settings of before
    end()           before the process exits

Messages are plain data without cycles, which reference counting frees. The collector looks at them nevertheless, again
and again. ``gc.freeze`` exempts modules and the graph, and a larger threshold makes the looks rarer. Garbage with
cycles is still collected: at most about the count of dead containers waits.

Other processes are not touched: a program that calls ``graph.run()``, and Spark's workers. Settings that the graph file
has changed stay. Python 3.13 and later collect after 2000 by themselves; there the default only freezes.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

DEFAULT: Final = 2000

chosen: int = 0
"""The threshold of the youngest generation; 0 leaves Python's settings."""
_before: tuple[bool, tuple[int, ...]] | None = None
_settled: bool = False
_has_frozen: bool = False
_begun: bool = False
_known: int = 0
"""The number of modules that :func:`imported` froze; 0: none."""
_MANY: Final = 250
"""The number of further modules above which :func:`settle` freezes them; numpy alone has 150, pandas 600."""


def begin() -> None:
    """Switch the collector off until :func:`imported`: imports leave next to no garbage with cycles."""
    global _begun
    if gc.isenabled():
        gc.disable()
        _begun = True


def imported() -> None:
    """End what :func:`begin` did; without it do nothing."""
    global _begun, _known
    if _begun:
        gc.freeze()
        gc.enable()
        _begun, _known = False, len(sys.modules)


def end() -> None:
    """Leave the last look to Python, which looks after it has emptied the modules.

    With the collector on it would look at everything before that too.
    """
    gc.disable()


def choose(count: int) -> None:
    """Note the count, and the settings that the graph file finds."""
    global chosen, _before
    chosen, _before = count, _state()


def settle() -> None:
    """Apply the count, unless the graph file has changed the settings itself."""
    global _settled, _has_frozen
    if chosen and _before == _state():
        if not _known or len(sys.modules) - _known > _MANY:
            gc.collect(1)  # a look at the old objects, which were imported, takes as long as the start of a graph
            gc.freeze()
            _has_frozen = True
        gc.set_threshold(chosen, *gc.get_threshold()[1:])
        _settled = True


def restore() -> None:
    """Take back what :func:`settle` did."""
    global chosen, _before, _settled, _has_frozen
    if _has_frozen:
        gc.unfreeze()
    if _settled and _before is not None:
        gc.set_threshold(*_before[1])
    chosen, _before, _settled, _has_frozen = 0, None, False, False


def _state() -> tuple[bool, tuple[int, ...]]:
    return gc.isenabled(), gc.get_threshold()
