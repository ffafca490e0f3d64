"""Tables of PostgreSQL as ``postgres_changes.py`` reads them: their keys, the order of a snapshot, what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from cues.errors import CuesError
from cues.processors import databases

_WHOLE: Final = ("int2", "int4", "int8")
_NATIVE: Final = (*_WHOLE, "uuid")
"""Types whose order in PostgreSQL is that of their values here. All others are ordered as bytes of text."""


class Table(NamedTuple):
    """A table as the catalogue has it now.

    ``key`` has the name and the type of each column, and the name of the type in the catalogue ("": not a type of
    PostgreSQL itself).
    """

    oid: int
    name: str
    identity: str
    kind: str
    key: list[tuple[str, str, str]]


class View(NamedTuple):
    """The transactions that a snapshot sees: ``pg_current_snapshot``."""

    first: int
    """The first transaction that was not over when the snapshot was taken: all before it are seen."""
    end: int
    running: frozenset[int]
    """Transactions from ``first`` on that the snapshot does not see. It sees none from ``end`` on."""

    def sees(self, transaction: int) -> bool:
        """Return whether the snapshot has the changes of a transaction, whose id has 32 bits."""
        whole = (self.end & ~0xFFFFFFFF) | transaction
        if whole - self.end > 1 << 31:
            whole -= 1 << 32
        elif self.end - whole > 1 << 31:
            whole += 1 << 32
        return whole < self.end and (whole < self.first or whole not in self.running)


def slot_of(session: Any, name: str) -> dict[str, Any] | None:
    found = session.execute(
        "select plugin, database, wal_status, safe_wal_size, confirmed_flush_lsn::text,"
        " pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn) from pg_replication_slots where slot_name = %s",
        [name],
    ).fetchone()
    return dict(zip(("plugin", "database", "wal_status", "safe", "confirmed", "kept"), found)) if found else None


def table_of(session: Any, name: str) -> Table:
    """Return a table of the catalogue. Raises :class:`CuesError` if there is none, or it is a view."""
    found = session.execute(
        "select c.oid::bigint, n.nspname || '.' || c.relname, c.relreplident::text, c.relkind::text from pg_class c"
        " join pg_namespace n on n.oid = c.relnamespace where c.oid = to_regclass(%s)",
        [databases.quoted_table(name)],
    ).fetchone()
    if found is None or found[3] not in "rp":
        problem = "does not exist" if found is None else "is not a table"
        raise CuesError(
            f"{name!r} {problem}; expected a table.", "use its name with its capital letters: schema.table."
        )
    oid, whole, identity, kind = found
    key = session.execute(
        "select a.attname, format_type(a.atttypid, -1),"
        " case when t.typnamespace = 'pg_catalog'::regnamespace then t.typname::text else '' end from pg_index i"
        " cross join lateral unnest(i.indkey) with ordinality k(attnum, place)"
        " join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum join pg_type t on t.oid = a.atttypid"
        " where i.indrelid = %s and k.place <= i.indnkeyatts"
        f" and {'i.indisreplident' if identity == 'i' else 'i.indisprimary'}"
        # PostgreSQL takes no deferrable key as the replica identity
        f" and (i.indimmediate or {identity == 'f'}) order by k.place",
        [oid],
    ).fetchall()
    return Table(oid, whole, identity, kind, [(column, type, kind) for column, type, kind in key])


def quoted(table: str) -> str:
    return ".".join(f'"{part}"' for part in table.split(".", 1))


def from_clause(table: Table) -> str:
    """Return a table as a query names it: without the tables that inherit from it, but with its partitions."""
    return ("only " if table.kind == "r" else "") + quoted(table.name)


def ordered(name: str, kind: str) -> str:
    column = databases.quoted(name)
    return column if kind in _NATIVE else f'{column}::text collate "C"'


def bound(text: str, type: str, kind: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'::{type}" + ("" if kind in _NATIVE else '::text collate "C"')


def comparable(key: Sequence[Any], table: Table) -> list[Any]:
    """Return the texts of a key as values that have the order of the snapshot."""
    return [
        int(text) if kind in _WHOLE else text.rstrip(" ") if kind == "bpchar" else text
        for text, (_, _, kind) in zip(key, table.key)
    ]


def view_of(snapshot: str) -> View:
    first, end, running = snapshot.split(":")
    return View(int(first), int(end), frozenset(map(int, filter(None, running.split(",")))))
