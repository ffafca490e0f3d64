"""The mark of a method that replaces a method of a base class: ``typing.override``, also for Python 3.11.

The type checker refuses the mark where a base class has no such method, and a method that replaces another one and has
no mark. So a method that was renamed in a base class cannot be missed in a subclass. A call of the method costs the
same with the mark and without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

Method = TypeVar("Method")

if TYPE_CHECKING:
    from typing_extensions import override  # type checkers bring it; it is not needed at run time
elif sys.version_info >= (3, 12):
    from typing import override
else:

    def override(method: Method, /) -> Method:
        """Return the method unchanged."""
        return method


__all__ = ["override"]
