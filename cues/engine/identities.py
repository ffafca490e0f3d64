"""The processors of a graph in its store: keys, renames, and processors that the graph has no more.

    keyed      the units of a plan, with the keys under which the store keeps them
    rename     a start: the renames that ``renamed_from=`` asks for
    note       a start: the processors that the graph has now, and their key=
    orphans    the processors in a store that their graph has no more

A processor has an id and a *key*. The id is its name in the graph. The key is the id of its first start: its try log,
state, fork queues, tailer ids and delivery hashes have it, and so has its row in a target. A rename changes only the
id. It moves the row and the topology record, which names the key, in one commit; nothing else is copied or renamed.
So other stores, targets and hashes are the same before and after it.

A new processor whose id is the key of another one, or of one that was deleted, gets a key of its own: ``shop.price~2``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from cues import codec, faults
from cues.base import events, names
from cues.base.names import ProcessorId, ProcessorKey
from cues.base.texts import quoted
from cues.engine.growth import Emit
from cues.engine.status import processor_of
from cues.errors import QueueNotFound, TopologyChanged
from cues.graphs import processor_rows
from cues.graphs.plan import Plan
from cues.graphs.processor import Node
from cues.graphs.processor_rows import ProcessorInputs
from cues.queues.log import read_row
from cues.queues.store import Store
from cues.records import sealed
from cues.steps.ownership import Claimant, Ownership, inputs_changed
from cues.storage import transaction
from cues.storage.transaction import StoreTransaction

# --- keys -----------------------------------------------------------------------------------------


def keyed(home: Store, nodes: Sequence[Node]) -> list[Node]:
    """Return the units with their keys. Changes nothing: the claim compares the keys again."""
    with home.core.view() as txn:
        known = processor_rows.all_keys(txn)
        used = set(known.values())
        units = []
        for node in nodes:
            key = known.get(node.id)
            if key is None:
                key = _free_key(txn, node, used)
                used.add(key)
            units.append(replace(node, first_id=None if key == ProcessorKey(node.id) else key))
    return units


def _free_key(txn: StoreTransaction, node: Node, used: Collection[ProcessorKey]) -> ProcessorKey:
    """Return a key for a new unit: its id, unless another unit has it, or a unit that was deleted has had it."""
    suffix = node.id[len(node.processor) :]
    for number in count(1):
        key = ProcessorKey(node.id if number == 1 else f"{node.processor}~{number}{suffix}")
        if key not in used and not _has_steps(txn, key):
            return key
    raise AssertionError


def _has_steps(txn: StoreTransaction, key: ProcessorKey) -> bool:
    try:
        return read_row(txn, key, 0).next > 1
    except QueueNotFound:
        return False


# --- a start --------------------------------------------------------------------------------------


def rename(
    home: Store,
    plan: Plan,
    units: Sequence[Node],
    claimants_of: Callable[[Sequence[Node]], list[Claimant]],
    accept_topology: bool,
    take_over: bool,
    emit: Emit,
) -> None:
    """Rename processors as ``renamed_from=`` says, in one commit. Nothing is written if there are none to rename.

    ``units`` are all units of the graph. Raises :class:`AlreadyRunning` while a process runs a processor under its
    former name; and :class:`TopologyChanged` if a renamed processor has other inputs too, or if a new processor seems
    to be renamed and does not say so. Then nothing is renamed.
    """
    with home.core.view() as txn:
        known = _topologies(txn, plan.id)
    renames = _renames(home, plan, known, emit)
    if not accept_topology:
        _compare(home, units, claimants_of, known, renames)
        _refuse_unnamed(home, plan, claimants_of(units), known, renames)
    if not renames:
        return
    # No process runs them under their former names.
    owned = Ownership(home, [Claimant(old, known[old].kind, {}) for old in renames], take_over)
    try:
        home.core.commit(_rename, renames)
        faults.point("rename.after")
    finally:
        owned.release()
    for old, new in renames.items():
        emit(events.Event(new, f"was {old}, and continues at its positions, with its state", logging.INFO))


def _rename(txn: StoreTransaction, renames: Mapping[ProcessorId, ProcessorId]) -> None:
    for old, new in renames.items():
        row, inputs = processor_rows.read_row(txn, old), processor_rows.read_topology(txn, old)
        if row is None or inputs is None or txn.get(names.processor_key(new)) is not None:
            continue  # another start has done it meanwhile
        processor_rows.forget(txn, old)
        # The row of an owner that was stopped is gone, and a later row of that name has another epoch.
        sealed.put(txn, names.processor_key(new), row._replace(epoch=row.epoch + 1).pack())
        key = inputs.key_of(old)
        inputs = replace(inputs, key=None if key == ProcessorKey(new) else key)
        sealed.put(txn, names.topology_key(new), inputs.pack())
        for queue, store in zip(inputs.queues, inputs.stores):
            if not store:
                txn.put(names.subscription_key(queue, new), b"")
    faults.point("rename.inside")


def note(home: Store, plan: Plan, emit: Emit) -> None:
    """Note the processors of a graph that was started (see :func:`orphans`), and the ``key=`` of each.

    Warn of those that have state and had another ``key=`` at the last start.
    """
    keys = {node.id: _shown(getattr(node.fn, "state_key", node.options.key)) for node in plan.running}
    body = codec.pack({"processors": sorted(keys), "keys": keys})
    place = names.graph_key(plan.id)
    with home.core.view() as txn:
        known = txn.get(place)
    if known == sealed.seal(place, body):
        return
    before = _notes(home).get(plan.id, {}).get("keys", {})
    for node in plan.running:
        former = names.processor_id(plan.id, node.options.renamed_from or node.name)
        was = before.get(node.id, before.get(former, keys[node.id]))
        if was != keys[node.id] and _has_state(home, node.id):
            text = (
                f"key= was {was} at the last start, and is {keys[node.id]}: state that was kept under other keys stays"
                " in the store, is not found any more, and begins anew"
            )
            emit(events.Event(node.id, text, logging.WARNING))
    home.core.commit(lambda txn: sealed.put(txn, place, body))


def _shown(key: Any) -> str:
    """A ``key=`` as a text that a restart does not change; of a lambda, with the texts in it, such as its field.

    Ready-made processors may also have several fields, or a key for each input.
    """
    if key is None or isinstance(key, str):
        return "None" if key is None else repr(key)
    if isinstance(key, (list, tuple)):
        return f"[{', '.join(map(_shown, key))}]"
    if isinstance(key, Mapping):
        return f"{{{', '.join(f'{name!r}: {_shown(each)}' for name, each in sorted(key.items()))}}}"
    name = getattr(key, "__qualname__", type(key).__qualname__).rpartition(".")[2]
    code = getattr(key, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"a lambda of {', '.join(repr(each) for each in code.co_consts if isinstance(each, str)) or 'no text'}"
    return f"the function {name}"


def _has_state(home: Store, processor: ProcessorId) -> bool:
    with home.core.view() as txn:
        units = {key for id, key in processor_rows.all_keys(txn).items() if processor_of(id) == processor}
    tables = {names.state_database(key) for key in units}
    return any(entries for name, entries in home.core.entries() if name in tables)


def _refuse_unnamed(
    home: Store,
    plan: Plan,
    claimants: Sequence[Claimant],
    known: Mapping[ProcessorId, ProcessorInputs],
    renames: Mapping[ProcessorId, ProcessorId],
) -> None:
    """Refuse a new processor that reads a queue of a processor which is gone: probably it was renamed.

    It would begin at the start of its queues, and process all messages again. A sink would deliver them again.
    """
    present = {node.id for node in plan.running}
    gone = {id: inputs for id, inputs in known.items() if processor_of(id) not in present and id not in renames}
    renamed = {processor_of(new) for new in renames.values()}
    for claimant in claimants if gone else ():
        name = processor_of(claimant.processor)
        if name in known or name in renamed:
            continue
        topology = claimant.topology(home)
        reads = set(zip(topology.queues, topology.stores))
        for id, before in gone.items():
            both = sorted(queue for queue, _ in reads & set(zip(before.queues, before.stores)))
            if both:
                old = processor_of(id)
                raise TopologyChanged(
                    f"{name} is new and reads {', '.join(both)}, which {old} has read; the graph has no {old} any"
                    " more.",
                    f"give it renamed_from={old.partition('.')[2]!r} if it was renamed: it then continues at the"
                    f" positions of {old}, with its state. If it is another processor, start with --accept-topology"
                    " (graph.start(accept_topology=True)): it then begins at the start of its queues. --fresh starts"
                    " everything over.",
                    processor=name,
                )


def _renames(
    home: Store, plan: Plan, known: Mapping[ProcessorId, ProcessorInputs], emit: Emit
) -> dict[ProcessorId, ProcessorId]:
    """The new ids of units by their ids in the store."""
    renames: dict[ProcessorId, ProcessorId] = {}
    for node in plan.running:
        if node.options.renamed_from is None:
            continue
        old = names.processor_id(plan.id, node.options.renamed_from)
        units = [id for id in known if processor_of(id) == old]
        if units and any(processor_of(id) == node.id for id in known):
            text = (
                f"renamed_from={node.options.renamed_from!r} has no effect: it has positions of its own, and {old} is"
                f" still in the store; cues forget {quoted(home.path)} {quoted(old)} deletes it"
            )
            emit(events.Event(node.id, text, logging.WARNING))
            continue
        renames |= {id: ProcessorId(node.id + id[len(old) :]) for id in units}
    return renames


def _compare(
    home: Store,
    units: Sequence[Node],
    claimants_of: Callable[[Sequence[Node]], list[Claimant]],
    known: Mapping[ProcessorId, ProcessorInputs],
    renames: Mapping[ProcessorId, ProcessorId],
) -> None:
    """Raise :class:`TopologyChanged` if a renamed unit would be refused by the claim: then it keeps its former name."""
    former = {new: old for old, new in renames.items()}
    for unit in units:
        if unit.id in former:
            before = known[former[unit.id]]
            (claimant,) = claimants_of([replace(unit, first_id=before.key_of(former[unit.id]))])
            now = claimant.topology(home)
            if (before.kind, before.places) != (now.kind, now.places):
                raise inputs_changed(unit.id, before, now, ())


# --- orphans --------------------------------------------------------------------------------------


def _topologies(txn: StoreTransaction, graph: str) -> dict[ProcessorId, ProcessorInputs]:
    """The topologies of a graph's units, by id."""
    return {id: topology for id, topology in processor_rows.topologies(txn) if id.startswith(f"{graph}.")}


def _notes(store: Store) -> dict[str, dict[str, Any]]:
    """The note of each graph's last start in this store, by graph id."""
    with store.core.view() as txn:
        rows = list(transaction.named_rows(txn, names.graph_key("")))
    return {id: unpack_note(key, raw, id) for id, key, raw in rows}


def unpack_note(key: bytes, raw: bytes, graph: str) -> dict[str, Any]:
    """Decode the note of a graph's last start. Raises :class:`StoreDamaged`."""
    form = {"processors": [str, ...], "keys?": dict}
    note: dict[str, Any] = sealed.unseal_value(key, raw, f"note of the processors of the graph {graph}", form)
    return note


def graphs(store: Store) -> dict[str, set[ProcessorId]]:
    """Return the processors of each graph at its last start in this store, by graph id."""
    return {id: set(note["processors"]) for id, note in _notes(store).items()}


def orphans(store: Store, plan: Plan | None = None) -> list[ProcessorId]:
    """Return the units in the store whose processors their graph has no more, by id.

    Of the graph of ``plan`` the processors are those of the plan, of other graphs those of their last start. Nothing
    is known of a graph that was started last by a version that noted none.
    """
    present = graphs(store)
    if plan is not None:
        present[plan.id] = {node.id for node in plan.running}
    with store.core.view() as txn:
        units = processor_rows.all_ids(txn)
    return [id for id in units if processor_of(id) not in present.get(id.partition(".")[0], {processor_of(id)})]
