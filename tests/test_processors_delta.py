"""Delta tables as targets: appended, upserted and deleted exactly once; values of each type; two owners; kill -9.

The contracts of all sinks (test_contracts_sinks.py) run over a Delta table, too.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import mirrors
import object_store
import pyarrow as pa
import pytest
from contracts_sinks import delta_rows
from mirrors import deliver, run
from sets import bounded

import cues
from cues import testing
from cues.base.away import is_away
from cues.errors import CheckpointError, Diverged, Fenced, InvalidArgument
from cues.processors.delta import DeltaTarget

deltalake = pytest.importorskip("deltalake")

N = pa.schema({"n": pa.int64()})


def rows(target: DeltaTarget) -> list[dict[str, Any]]:
    return sorted(delta_rows(target), key=repr)


def numbers(target: DeltaTarget) -> list[int]:
    return sorted(row["n"] for row in delta_rows(target))


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tables", [False, True], ids=["dicts", "tables"])
def test_messages_are_added_as_rows(tmp_path: Path, store: cues.Store, tables: bool) -> None:
    target = DeltaTarget(tmp_path / "t", schema=pa.schema({"n": pa.int64(), "s": pa.string()}))
    given = [{"n": n, "s": str(n)} for n in range(50)]
    assert run(target, pa.Table.from_pylist(given) if tables else given, store) == []
    assert sorted(rows(target), key=lambda row: row["n"]) == given


@pytest.mark.slow
@pytest.mark.parametrize("tables", [False, True], ids=["dicts", "tables"])
@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_upserts_and_deletes_leave_what_a_dict_has(
    tmp_path: Path, store: cues.Store, tables: bool, batch_size: int
) -> None:
    dice = random.Random(batch_size)
    schema = pa.schema({"Some Key": pa.string(), "b": pa.int64(), "v": pa.float64()})
    upserts = DeltaTarget(tmp_path / "t", schema=schema, mode="upsert", key=["Some Key", "b"])
    given = [{"Some Key": dice.choice("xyz'"), "b": dice.randrange(3), "v": dice.random()} for _ in range(40)]
    wanted = {(row["Some Key"], row["b"]): row for row in given}
    assert run(upserts, pa.Table.from_pylist(given) if tables else given, store, batch_size=batch_size) == []
    assert rows(upserts) == sorted(wanted.values(), key=repr)

    deletes = DeltaTarget(tmp_path / "t", mode="delete", key=["Some Key", "b"])
    gone = [{"Some Key": key, "b": b, "more": 1} for key, b in list(wanted)[::2]] + [{"Some Key": "none", "b": 1}]
    with testing.temporary_store() as other:
        given_too = [{**row, "more": 1} for row in gone] if tables else gone
        run(deletes, pa.Table.from_pylist(given_too) if tables else given_too, other, batch_size=batch_size, id="away")
    left = [row for at, row in wanted.items() if at not in {(row["Some Key"], row["b"]) for row in gone}]
    assert rows(deletes) == sorted(left, key=repr)


VALUES = [
    (pa.int8(), -5), (pa.int64(), -(1 << 63)), (pa.uint32(), (1 << 32) - 1), (pa.uint64(), (1 << 64) - 1),
    (pa.float64(), 0.1), (pa.float64(), float("inf")), (pa.bool_(), True), (pa.string(), "é\0"),
    (pa.binary(), b"\0\xff"),
    (pa.date32(), date(1, 1, 1)), (pa.timestamp("us"), datetime(2024, 2, 29, 1, 2, 3, 4)),
    (pa.timestamp("us", "UTC"), datetime(2024, 2, 29, 1, 2, 3, 4, timezone(timedelta(hours=2)))),
    (pa.decimal128(38, 4), Decimal("123456789.1234")), (pa.list_(pa.int32()), [1, None]), (pa.list_(pa.int32()), []),
    (pa.struct({"x": pa.string()}), {"x": None}), (pa.string(), None),
]  # fmt: skip


def test_a_value_is_the_same_in_the_table(tmp_path: Path) -> None:
    """In a column for each type: one table costs as much as a table of one type."""
    schema = pa.schema([("n", pa.int64()), *((f"v{n}", kind) for n, (kind, _) in enumerate(VALUES))])
    values = {f"v{n}": value for n, (_, value) in enumerate(VALUES)}
    given = [{"n": n, **values} for n in (1, 2)]
    for name, messages in (("dicts", given), ("tables", pa.Table.from_pylist(given, schema))):
        target = DeltaTarget(tmp_path / name, schema=schema)
        with testing.temporary_store() as own:
            assert run(target, messages, own) == []
        assert sorted(rows(target), key=lambda row: row["n"]) == given


def test_a_value_that_the_column_does_not_hold_fails_its_message_alone(tmp_path: Path, store: cues.Store) -> None:
    target = DeltaTarget(tmp_path / "t", schema=pa.schema({"n": pa.int8(), "s": pa.string()}))
    given = [{"n": 1}, {"n": 300}, {"n": "2"}, {"n": 3, "s": "x"}, {"n": 4, "other": 1}, {"n": 5.5}, {"n": 6.0}]
    failed = run(target, given, store)
    assert [row["n"] for row in rows(target)] == [1, 3, 6]
    texts = [record["err/cause"][0]["message"] for record in failed]
    assert [message["n"] for record in failed for message in record["err.proc/messages"]["q"]] == [300, "2", 4, 5.5]
    assert "'other', which is not a column" in texts[2] and "evolve=True" in texts[2]


def test_a_table_gets_the_columns_of_new_fields(tmp_path: Path, store: cues.Store) -> None:
    target = DeltaTarget(tmp_path / "t", evolve=True)
    given: list[Any] = [
        {"n": 1, "later": None},
        {"n": 2, "t": date(2024, 1, 1)},
        {"n": 3, "later": "x"},
    ]
    assert run(target, given, store, batch_size=1) == []
    table = pa.table({"n": [4], "kind": pa.array(["y"]).dictionary_encode(), "nothing": pa.nulls(1)})
    failed = run(target, table, store)
    assert failed == []
    names = {"n": None, "t": None, "later": None, "kind": None}
    wanted = [{**names, **{k: v for k, v in row.items() if v is not None}} for row in [*given, {"n": 4, "kind": "y"}]]
    assert sorted(rows(target), key=lambda row: row["n"]) == wanted
    failed = run(target, [{"n": 5, "w": time(1)}, {"n": 6, "v": UUID(int=7)}], store)
    assert [record["err.proc/messages"]["q"][0]["n"] for record in failed] == [5]
    assert "has no such type" in failed[0]["err/cause"][0]["message"]
    assert {row["n"]: row.get("v") for row in rows(target)}[6] == str(UUID(int=7))


def test_a_constraint_and_an_empty_directory_name_fail_the_message(tmp_path: Path, store: cues.Store) -> None:
    schema = pa.schema({"n": pa.int64(), "city": pa.string()})
    target = DeltaTarget(tmp_path / "t", schema=schema, partition_by="city")
    target.__cues_prepare__()
    target.open().alter.add_constraint({"positive": "n > 0"})
    failed = run(target, [{"n": 1, "city": "a/b=c ü"}, {"n": -2, "city": "x"}, {"n": 3, "city": ""}, {"n": 4}], store)
    assert [record["err.proc/messages"]["q"][0]["n"] for record in failed] == [-2, 3]
    assert "refuses the message" in failed[0]["err/cause"][0]["message"]
    assert rows(target) == [{"n": 1, "city": "a/b=c ü"}, {"n": 4, "city": None}]
    assert (tmp_path / "t" / "city=__HIVE_DEFAULT_PARTITION__").is_dir()


OTHER_KINDS = [
    (pa.array(["2"]), pa.int64()), (pa.array([7]), pa.string()), (pa.array([True]), pa.int64()),
    (pa.array([b"x"]), pa.string()), (pa.array([Decimal("0.12345678901234567890")]), pa.float64()),
    (pa.array([datetime(2024, 1, 1)], pa.timestamp("us")), pa.timestamp("us", "UTC")),
    (pa.array([datetime(2024, 1, 1)], pa.timestamp("us", "+02:00")), pa.timestamp("us")),
    (pa.array([date(2024, 1, 1)]), pa.timestamp("us")), (pa.array([["2"]]), pa.list_(pa.int64())),
    (pa.array([{"x": "2"}]), pa.struct({"x": pa.int64()})),
    (pa.array([{"x": 1, "y": 2}]), pa.struct({"x": pa.int64()})),
]  # fmt: skip


@pytest.mark.parametrize(("values", "kind"), OTHER_KINDS, ids=lambda each: str(getattr(each, "type", each)))
def test_a_table_of_another_kind_fails_as_the_same_rows_do(
    tmp_path: Path, store: cues.Store, values: Any, kind: Any
) -> None:
    """A cast of Arrow takes texts for integers and local times for instants, and rows do not."""
    target = DeltaTarget(tmp_path / "t", schema=pa.schema({"v": kind}))
    table = pa.table({"v": values})
    texts = []
    for messages in (table, table.to_pylist()):
        with testing.temporary_store() as own:
            texts += [record["err/cause"][0]["message"] for record in run(target, messages, own, id=f"s{len(texts)}")]
    assert len(texts) == 2 and texts[0] == texts[1] and rows(target) == []


@pytest.mark.parametrize("batch_size", [1, 1000])
def test_zeros_of_both_signs_are_one_key(tmp_path: Path, store: cues.Store, batch_size: int) -> None:
    schema = pa.schema({"k": pa.float64(), "v": pa.int64()})
    target = DeltaTarget(tmp_path / "t", schema=schema, mode="upsert", key="k")
    nan = float("nan")
    given = [{"k": key, "v": v} for v, key in enumerate([0.0, nan, -0.0, nan, 0.0, -0.0])]
    assert run(target, given, store, batch_size=batch_size) == []
    assert [row["v"] for row in sorted(rows(target), key=lambda row: row["v"])] == [3, 5]


def test_a_text_that_cannot_name_a_directory_fails_its_message_alone(tmp_path: Path, store: cues.Store) -> None:
    """Delta has null for the first one; a disk takes 255 bytes, and delta-rs makes six of an e with an accent."""
    target = DeltaTarget(tmp_path / "t", schema=pa.schema({"p": pa.string(), "n": pa.int64()}), partition_by="p")
    kept = [{"p": "x" * 250}, {"p": "%41"}, {"p": "null"}, {"p": None}]
    failed = run(target, [{"p": "__HIVE_DEFAULT_PARTITION__"}, {"p": "x" * 256}, {"p": "é" * 60}, *kept], store)
    assert len(failed) == 3 and all("Try: divide" in record["err/cause"][0]["message"] for record in failed)
    assert sorted(map(repr, (row["p"] for row in rows(target)))) == sorted(repr(row["p"]) for row in kept)


def test_a_number_that_cannot_name_a_directory_fails_its_message_alone(tmp_path: Path, store: cues.Store) -> None:
    """delta-rs writes no exponents, so some floats are longer than a name; and -0.5 as 0.-50, which nobody reads."""
    floats = [0.0, -0.0, 1e22, 0.1, 1e200, float("inf"), None, 1e300, -1e-300, 5e-324]
    decimals = [Decimal("-1.00"), Decimal("0.50"), None, Decimal("-0.50"), Decimal("-1.05")]
    for kind, values, bad in ((pa.float64(), floats, 3), (pa.decimal128(5, 2), decimals, 2)):
        target = DeltaTarget(tmp_path / str(bad), schema=pa.schema({"p": kind, "n": pa.int64()}), partition_by="p")
        with testing.temporary_store() as own:
            failed = run(target, [{"p": value, "n": n} for n, value in enumerate(values)], own)
        assert len(failed) == bad and all("Try: divide" in record["err/cause"][0]["message"] for record in failed)
        assert rows(target) == sorted(({"p": p, "n": n} for n, p in enumerate(values[:-bad])), key=repr)


def test_a_table_that_never_takes_the_commit_is_not_waited_for(tmp_path: Path, store: cues.Store) -> None:
    """Such a commit is no conflict: to repeat it would write its files again and again, for ever."""
    deltalake.DeltaTable.create(tmp_path / "t", N)
    log = tmp_path / "t" / "_delta_log" / f"{0:020}.json"
    asked = ',"minWriterVersion":7,"writerFeatures":["inCommitTimestamp"]}'
    text = re.sub(r'(?<="protocol":)\{[^}]*\}', '{"minReaderVersion":1' + asked, log.read_text())
    log.write_text(text)
    target = DeltaTarget(tmp_path / "t")
    with pytest.raises(CheckpointError, match="Unsupported table features") as error:
        deliver(target, 1, 2)
    assert not error.value.again and not is_away(error.value)
    assert numbers(target) == []


# --- deliveries ---------------------------------------------------------------------------------


def test_a_delivery_again_adds_what_is_new(tmp_path: Path) -> None:
    target = DeltaTarget(tmp_path / "t", schema=N)
    target.__cues_prepare__()
    deliver(target, 1, 4)
    deliver(target, 1, 4)
    deliver(target, 2, 6)
    assert numbers(target) == [1, 2, 3, 4, 5]
    deliver(target, 4, 8, epoch=2)
    with pytest.raises(Fenced):
        deliver(target, 8, 9, epoch=1)
    deliver(target, 1, 3, epoch=2, generation=1)  # asked for again
    assert numbers(target) == [1, 1, 2, 2, 3, 4, 5, 6, 7]
    assert target.holds(["g.save", "g.other"]) == ["g.save"]


def test_an_owner_that_was_overtaken_between_read_and_commit_adds_nothing(tmp_path: Path) -> None:
    """Delta refuses the second of two commits that set the numbers of one processor; each mode does."""
    for mode in ("append", "upsert", "delete"):
        path = tmp_path / mode
        target = DeltaTarget(path, schema=N, mode=mode, key=() if mode == "append" else "n")
        other = DeltaTarget(path, mode="append")
        target.__cues_prepare__()

        def overtaken(connection: Any, fresh: Any, other: DeltaTarget = other) -> None:
            deliver(other, 1, 4, epoch=2)
            connection.write(fresh)

        with pytest.raises(CheckpointError) as error:
            deliver(target, 1, 4, inside=overtaken)
        assert error.value.again and is_away(error.value)
        assert numbers(target) == [1, 2, 3]
        with pytest.raises(Fenced):
            deliver(target, 1, 4)


def test_two_owners_that_make_the_table_make_one(tmp_path: Path) -> None:
    target, other = DeltaTarget(tmp_path / "t", evolve=True), DeltaTarget(tmp_path / "t", evolve=True)

    def overtaken(connection: Any, fresh: Any) -> None:
        deliver(other, 1, 4)
        connection.write(fresh)

    with pytest.raises(CheckpointError) as error:
        deliver(target, 1, 4, inside=overtaken)
    assert error.value.again
    deliver(target, 1, 4)
    assert numbers(target) == [1, 2, 3]


def test_a_table_of_another_store_is_refused(tmp_path: Path) -> None:
    target = DeltaTarget(tmp_path / "t", schema=N)
    target.__cues_prepare__()
    deliver(target, 1, 4)
    with pytest.raises(Diverged):
        deliver(target, 1, 4, store="ff" * 8)


def test_the_numbers_outlive_checkpoints_and_compaction(tmp_path: Path, store: cues.Store) -> None:
    target = DeltaTarget(tmp_path / "t", schema=N)
    run(target, [{"n": n} for n in range(30)], store, batch_size=1)
    table = target.open()
    table.create_checkpoint()
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    table.create_checkpoint()
    for file in sorted((tmp_path / "t" / "_delta_log").glob("*.json"))[:-1]:
        file.unlink()
    assert target.holds(["g.save"]) == ["g.save"]
    run(target, [{"n": n} for n in range(30, 40)], store)
    assert numbers(target) == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_another_writer_that_commits_in_the_middle_of_a_step_is_no_loss(
    tmp_path: Path, store: cues.Store, mode: str
) -> None:
    """Rows, an overwrite, compaction, a vacuum, a checkpoint: between the look at the table and the commit."""
    target = DeltaTarget(tmp_path / "t", schema=N, mode=mode, key="n" if mode == "upsert" else ())
    target.__cues_prepare__()
    acts = [
        lambda table: deltalake.write_deltalake(table, pa.table({"n": [-1]}), mode="append"),
        lambda table: table.optimize.compact(),
        lambda table: table.optimize.z_order(["n"]),
        lambda table: table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False),
        lambda table: table.delete("n = 1"),
        lambda table: (table.create_checkpoint(), table.cleanup_metadata()),
        lambda table: deltalake.write_deltalake(table, pa.table({"n": [-2]}), mode="overwrite"),
        lambda table: deltalake.write_deltalake(
            table, pa.table({"n": [-3], "more": ["x"]}), mode="append", schema_mode="merge"
        ),
    ]
    left, overtaken = iter(acts), []

    def save(messages: list[Any], process: cues.Process) -> None:
        act = next(left, lambda _: None)
        if act is acts[6]:
            overtaken.append(messages[0]["n"])
        act(target.open())
        process.connection.write(messages)

    graph = cues.Graph("g", [cues.Source("q"), cues.Sink(save, "q", id="save", checkpoint=target, batch=True)])
    for n in range(len(acts) + 1):
        store.queue("q").appender().write({"n": n})
        with testing.Clock() as clock:
            for _ in range(5):
                testing.run_until_idle(graph, store)
                clock.advance(100)
    assert next(left, None) is None
    # Rows before the overwrite are gone. The step that it overtook is there, after it.
    assert numbers(target) == [-3, -2, *range(overtaken[0], len(acts) + 1)]


def test_partitions_of_a_sink_write_one_table_at_the_same_time(tmp_path: Path, store: cues.Store) -> None:
    store.queue("q", partitions=4, key="n").appender().write_many([{"n": n} for n in range(400)])
    target = DeltaTarget(tmp_path / "t", schema=N)
    graph = cues.Graph("g", [cues.Source("q"), target.sink("q", batch_size=20)])
    testing.run_until_idle(graph, store)
    assert numbers(target) == list(range(400))
    assert target.holds(["g.save"]) == ["g.save"]


# --- declarations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "replace"}, "unknown"),
        ({"mode": "upsert"}, "key="),
        ({"key": "n"}, "key="),
        ({"schema": {"n": "int64"}}, "pyarrow.Schema"),
        ({"schema": pa.schema({"n": pa.time64("us")})}, "has no such type"),
        ({"schema": N, "mode": "upsert", "key": "id"}, "'id' is not a column"),
        ({"schema": N, "partition_by": "city"}, "'city' is not a column"),
        ({"evolve": 1}, "True or False"),
        ({"mode": "upsert", "key": "a`b"}, "rename"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        DeltaTarget(tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_a_table_that_does_not_fit_is_told_before_the_first_message(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for target in (DeltaTarget(path), DeltaTarget(path, mode="delete", key="n", evolve=True)):
        with pytest.raises(CheckpointError, match="is not there"):
            target.__cues_prepare__()
    DeltaTarget(path, schema=N).__cues_prepare__()
    for options, text in [
        ({"schema": pa.schema({"n": pa.string()})}, "n is int64, not string"),
        ({"schema": pa.schema({"n": pa.int64(), "m": pa.int64()})}, "m is missing"),
        ({"schema": N, "partition_by": "n"}, r"divided by \[\]"),
        ({"mode": "upsert", "key": "id"}, "id of key= is missing"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            DeltaTarget(path, **options).__cues_prepare__()  # type: ignore[arg-type]
    DeltaTarget(path).open().alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 1 day"})
    with pytest.raises(CheckpointError, match="forgets"):
        DeltaTarget(path).__cues_prepare__()


def test_names_that_differ_in_case_and_a_table_of_directories_only_are_refused(
    tmp_path: Path, store: cues.Store
) -> None:
    target = DeltaTarget(tmp_path / "t", evolve=True)
    failed = run(target, [{"n": 1}, {"N": 2}, {"m": 3, "M": 4}, {"n": 5}], store, batch_size=1)
    assert numbers(target) == [1, 5]
    assert all("in case only" in record["err/cause"][0]["message"] for record in failed) and len(failed) == 2
    with pytest.raises(CheckpointError, match="all its columns divide it"):
        DeltaTarget(tmp_path / "u", schema=N, partition_by="n").__cues_prepare__()


def test_a_table_that_is_removed_stops_the_sink(tmp_path: Path) -> None:
    target = DeltaTarget(tmp_path / "t", schema=N)
    target.__cues_prepare__()
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(CheckpointError, match="not there any more"):
        deliver(DeltaTarget(tmp_path / "t"), 1, 4)
    deliver(target, 1, 4)  # schema= makes it
    assert numbers(target) == [1, 2, 3]


# --- an object store, and kill -9 ---------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with object_store.bucket("lake") as variables:
        yield variables


@pytest.mark.slow
def test_a_table_in_an_object_store(s3: dict[str, str], store: cues.Store) -> None:
    target = DeltaTarget("s3://lake/t", schema=N, storage_options=s3)
    assert run(target, [{"n": n} for n in range(20)], store, batch_size=5) == []
    assert numbers(target) == list(range(20))


def test_an_object_store_that_does_not_answer_is_away(tmp_path: Path) -> None:
    options = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "x",
               "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1", "max_retries": "0"}  # fmt: skip
    target = DeltaTarget("s3://lake/none", schema=N, storage_options=options)
    with pytest.raises(CheckpointError) as error:
        target.__cues_prepare__()
    assert is_away(error.value) and "\x1b" not in str(error.value) and "Connection refused" in str(error.value)


def mirror(path: str, mode: str, count: str) -> None:
    """Write numbers into the table in this process; a test kills it on the way."""

    def count_up(position: int | None) -> Iterator[Any]:
        for n in range(position or 0, int(count)):
            yield n + 1, {"n": n, "twice": 2 * n}

    target = DeltaTarget(Path(path, "t"), evolve=True, mode=mode, key="n" if mode == "upsert" else ())
    graph = cues.Graph("g", [cues.Source("q", count_up, batch_size=20), target.sink("q", batch_size=10)])
    graph.add(cues.Sink(lambda message: print(".", flush=True) if message["n"] % 10 == 0 else None, "q", id="tell"))
    with cues.open(Path(path, "store"), durability="process") as store:
        testing.run_until_idle(graph, store)
    os._exit(0)


CODE = "import sys; from test_processors_delta import mirror; mirror(*sys.argv[1:])"


@bounded("rounds", 5, 25)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_table_whose_writer_is_killed_at_any_time_has_each_row_once(rounds: int, tmp_path: Path, mode: str) -> None:
    mirrors.killed(CODE, tmp_path, mode, 600, rounds=rounds)
    assert numbers(DeltaTarget(tmp_path / "t")) == list(range(600))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["checkpoint.inside", "checkpoint.after", "commit.inside", "commit.after"])
def test_a_writer_that_is_killed_at_a_point_leaves_each_row_once(tmp_path: Path, point: str) -> None:
    mirrors.killed_at(point, CODE, tmp_path, "append", 60, hits=(1,))
    assert numbers(DeltaTarget(tmp_path / "t")) == list(range(60))


@pytest.mark.slow
def test_100_000_messages(tmp_path: Path, store: cues.Store) -> None:
    target = DeltaTarget(tmp_path / "t", schema=N)
    run(target, [{"n": n} for n in range(100_000)], store)
    assert numbers(target) == list(range(100_000))


def test_a_reader_beside_the_writer_sees_whole_steps(tmp_path: Path, store: cues.Store) -> None:
    target, seen, done = DeltaTarget(tmp_path / "t", schema=N), [], threading.Event()
    target.__cues_prepare__()

    def watch() -> None:
        while not done.is_set():
            seen.append(numbers(target))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run(target, [{"n": n} for n in range(200)], store, batch_size=10)
    finally:
        done.set()
        thread.join()
    assert all(found == list(range(len(found))) and len(found) % 10 == 0 for found in seen)
    assert numbers(target) == list(range(200))
