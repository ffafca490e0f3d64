"""Messages to the service manager that started this process: the protocol of systemd, ``sd_notify``.

A message is one datagram to the socket that NOTIFY_SOCKET names: a path, or ``@name`` for a name that is in no file
system. Source: the manual page sd_notify(3) of systemd.
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send ``READY=1`` or ``STOPPING=1`` to the service manager; without NOTIFY_SOCKET do nothing.

    A message that cannot be sent is dropped: the manager then sees a start that takes too long, and says so.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        name = f"\0{address[1:]}" if address.startswith("@") else address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(state.encode(), name)
