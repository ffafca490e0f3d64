"""Names of modules that somebody else has imported, or not."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str, name: str) -> Any:
    """Return a name of a module that is imported; None if it is not.

    Also None while another thread imports the module and the name is not there yet: a class has no instances then.
    """
    return getattr(sys.modules.get(module), name, None)
