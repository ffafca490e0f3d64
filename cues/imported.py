"""Modules of others: those that an extra installs, and names of those that are imported already."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from cues.errors import NotInstalled


def package(what: str, extra: str, *modules: str) -> Any:
    """Import modules that an extra of Cues installs, and return the first one.

    ``what`` begins the error, such as "MQTT needs paho-mqtt". Raises :class:`NotInstalled` if one cannot be imported.
    """
    try:
        first, *_ = [import_module(module) for module in modules]
    except ImportError as error:
        raise NotInstalled(f"{what} ({error}).", f"run pip install 'cues-streams[{extra}]'.") from None
    return first


def loaded(module: str, name: str) -> Any:
    """Return a name of a module that is imported; None if it is not.

    Also None while another thread imports the module and the name is not there yet: a class has no instances then.
    """
    return getattr(sys.modules.get(module), name, None)
