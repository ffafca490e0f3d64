"""Names and addresses under which a server of this machine may be asked: against DNS rebinding.

A page of another site can point its own name to an address of this machine. Its requests then count as requests of one
site, and the browser lets it read the answers. The name in their ``Host`` gives them away.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Set
from typing import Final
from urllib.parse import urlsplit

LOCAL: Final = frozenset({"localhost"})


def is_loopback(host: str) -> bool:
    """Return True if an address to listen on can only be reached from this machine."""
    if host in LOCAL:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_ours(host: str, names: Set[str] = LOCAL) -> bool:
    """Return whether the header ``Host`` of a request is an address, which cannot be rebound, or one of the names."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
