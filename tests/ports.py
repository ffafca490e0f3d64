"""Ports for servers that begin later, or again: such that the kernel gives to no other socket meanwhile.

A port of ``bind(0)`` that was closed may be given to the next socket of any process, and a server that is killed and
started again would not get it back. These are below the range of the kernel, and each worker of pytest has its own.
"""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

LOWEST, HIGHEST = 12_000, 32_000
LANES = 16
"""Workers of pytest that have ports of their own."""
_given: set[int] = set()


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens, another one at each call."""
    kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
    highest = min(HIGHEST, int(kernel.read_text().split()[0]) if kernel.exists() else HIGHEST)
    width = (highest - LOWEST) // LANES
    lowest = LOWEST + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % LANES * width
    # Another run of the tests has the same lanes: so at random, and not the next one.
    for port in random.SystemRandom().sample(range(lowest, lowest + width), width):
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise AssertionError(f"no port is free between {lowest} and {lowest + width}")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
