"""The connections by which MySQL streams its log, for ``mysql_changes.py``: replication on top of PyMySQL."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final

from cues.errors import CuesError
from cues.processors.mysql_binlog import FORMAT, Header, Packets, pymysql
from cues.processors.mysql_tables import Server, ask, place_of, run, same

_COMMAND_DUMP: Final = 0x12
_HEADER: Final = struct.Struct("<IBIIIH")
_HEARTBEAT_S: Final = 0.2
"""Seconds after which a server with nothing new says so: the source then looks whether it ends."""


class Wires:
    """The connections of one reading, which are closed together."""

    def __init__(self, source: Any, server: Server) -> None:
        self._source, self._server = source, server
        self._open: list[Any] = []
        self.file, self.gtids = "", ""
        """The file of the log that is read, and the GTIDs of all that was read; the reading sets them."""

    def connect(self, **options: Any) -> Any:
        """Return a new connection."""
        connection = self._source.connect(**options)
        self._open.append(connection)
        return connection

    def drop(self, connection: Any) -> None:
        """Close a connection at once: what is sent is not read."""
        connection._force_close()
        if connection in self._open:
            self._open.remove(connection)

    def close(self) -> None:
        """Close all connections at once."""
        for connection in self._open:
            connection._force_close()

    def dump(self, file: str, place: int, server_id: int | None = None, gtids: str = "") -> Any:
        """Return a connection that streams the log from a place on, or what follows GTIDs of MariaDB."""
        wire = self.connect()
        heartbeat = round(_HEARTBEAT_S * 1e9)
        for setting in (
            f"master_heartbeat_period = {heartbeat}", f"source_heartbeat_period = {heartbeat}",
            "master_binlog_checksum = @@global.binlog_checksum", "source_binlog_checksum = @@global.binlog_checksum",
            "slave_uuid = uuid()", "replica_uuid = uuid()", "mariadb_slave_capability = 4",
        ):  # fmt: skip
            run(wire, f"set @{setting}")
        if gtids:
            run(wire, f"set @slave_connect_state = '{gtids}', @slave_gtid_strict_mode = 1")
        server_id = server_id or random.randrange(1 << 31, 1 << 32)
        wire._execute_command(_COMMAND_DUMP, struct.pack("<IHI", place, 0, server_id) + file.encode())
        return wire

    def packets(self, wire: Any, server_id: int | None, session: Any) -> Packets:
        """Yield the events of a stream, over the end of a file that a killed server left.

        MariaDB keeps half an event there, and refuses to read it. Nothing of it was committed if the next file
        begins with the GTIDs that were read so far.
        """
        while True:
            try:
                yield from _packets(wire)
            except pymysql().err.OperationalError as error:
                if error.args[0] != 1236 or "truncated in the middle of event" not in error.args[1]:
                    raise
                files = [str(row[0]) for row in ask(session, "show binary logs")]
                after = [each for each in files if place_of(each, 0) > place_of(self.file, 0)]
                if not after or not same(self._server.gtids_at(session, after[0], 4), self.gtids):
                    raise
                self.drop(wire)
                wire = self.dump(after[0], 4, server_id)


def _packets(connection: Any) -> Iterator[tuple[Header, bytes]]:
    """Yield each event: its header, and all after it without its checksum. Raises errors of PyMySQL."""
    has_checksum: bool | None = None
    while True:
        data = connection._read_packet().get_all_data()
        if data[0] == 0xFE and len(data) < 9:
            raise pymysql().err.OperationalError(2013, "the server ended the log")
        time, kind, server, size, end, _ = _HEADER.unpack_from(data, 1)
        # The first event comes before the one that says whether there are checksums.
        is_right = int.from_bytes(data[-4:], "little") == zlib.crc32(memoryview(data)[1:-4])
        if kind == FORMAT:
            has_checksum = data[-5] == 1
        if has_checksum and not is_right:
            raise CuesError(
                "An event of the log has a wrong checksum: it was damaged.", "look at the disk of the server."
            )
        last = -4 if has_checksum or (has_checksum is None and is_right) else len(data)
        yield Header(kind, time, server, end, end - size), data[1 + _HEADER.size : last]
