"""A TCP proxy before a server, which loses answers: the server does what it was asked, and nobody is told."""

from __future__ import annotations

import contextlib
import select
import socket
import threading


class Proxy:
    """A proxy on loopback. ``armed``: so often the connection ends after a request with ``word`` was answered.

    The answer does not reach the client. ``at``: the port of the proxy; 0: a free one. ``seen``: how often the word was
    in requests.
    """

    def __init__(self, port: int, word: bytes, at: int = 0) -> None:
        self._server, self._word, self.armed, self.lost, self.seen = port, word, 0, 0, 0
        self._listener = socket.create_server(("127.0.0.1", at))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server)) as server, contextlib.suppress(OSError):
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for one in ready:
                    data = one.recv(1 << 20)
                    if not data:
                        return
                    (server if one is client else client).sendall(data)
                    self.seen += one is client and self._word in data
                    if one is client and self.armed and self._word in data:
                        self.armed -= 1
                        server.recv(1)  # it is done
                        self.lost += 1
                        return

    def close(self) -> None:
        """Take no connections any more."""
        self._listener.close()
