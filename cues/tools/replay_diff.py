"""The comparison of a replay with the old store, queue by queue.

Messages are compared by content, without ``q/meta``; the order of fields does not count. Of error messages, processor,
inputs, and types and texts of the causes are compared, not traces and attempts. Both queues are read side by side.
A message waits in memory (as a hash) until its equal one comes from the other side. Those that are left are paired:

    provenance    with the message that came from the same messages of the copied queues, where queues keep ``"t"``
    order         else by place between equal messages, if one unit writes the queue from one ordered queue
    multiset      else not at all: they are only in one of the stores

Not counted as differences: messages that the old store has not processed (``beyond``) or has written since the replay
(``since``), and messages that retention has removed from it (``lost``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

import xxhash

from cues import codec
from cues.base import names
from cues.base.data import dataclass
from cues.engine.replays import ReplayNote
from cues.graphs import processor_rows
from cues.graphs.plan import Plan, written
from cues.graphs.processor import Node
from cues.queues.base import partitions_of, unpack_record
from cues.queues.committed import CommittedLog
from cues.queues.log import Log, read_row
from cues.queues.store import Store
from cues.records.batch import ACKNOWLEDGEMENT
from cues.storage.transaction import named_rows

Basis = Literal["order", "provenance", "multiset"]


@dataclass(frozen=True)
class Difference:
    """Two messages that differ, or one that has no partner."""

    kind: Literal["different", "only old", "only new"]
    old_index: int | None
    new_index: int | None
    partition: int
    fields: dict[str, list[Any]]
    """By path of the field ``[old, new]``: each a list with the value, empty if the field is missing."""


@dataclass
class QueueDiff:
    """The comparison of one queue."""

    queue: str
    basis: Basis
    equal: int = 0
    different: int = 0
    only_old: int = 0
    only_new: int = 0
    beyond: int = 0
    """Messages of the new store for which the old one has not processed everything."""
    since: int = 0
    """Messages that the old store wrote after the replay took its ends."""
    lost: int = 0
    """Messages that retention has removed from the old store."""
    examples: list[Difference] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not (self.different or self.only_old or self.only_new)


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay."""

    graph: str
    source: str
    store: str
    copied: dict[str, int]
    """Messages that were copied, by queue."""
    queues: list[QueueDiff]
    whole: bool
    """True if the store can take the place of the old one."""

    @property
    def equal(self) -> bool:
        """True if no queue differs."""
        return all(queue.same for queue in self.queues)


class _Ref(NamedTuple):
    """A message that has no equal one yet."""

    partition: int
    place: int
    """Its index."""
    came_from: tuple[tuple[str, int], ...]


def compare(old: Store, new: Store, plan: Plan, nodes: Sequence[Node], note: ReplayNote, limit: int) -> ReplayReport:
    """Compare every queue that the processors write."""
    progress = _Progress(old, nodes, note)
    queues = dict.fromkeys(queue for node in nodes for queue in written(node))
    diffs = [_Comparison(old, new, queue, nodes, note, progress, limit).run() for queue in queues]
    counts = {queue: sum(end - first for first, end in parts) for queue, parts in note.copied.items()}
    return ReplayReport(plan.id, note.source, new.path, counts, diffs, note.whole)


class _Progress:
    """The positions up to which the old store has processed its messages, in one transaction."""

    def __init__(self, old: Store, nodes: Sequence[Node], note: ReplayNote) -> None:
        self._nodes = nodes
        self.ends: dict[str, list[int]] = {}
        """By queue, the next index of each partition."""
        lagging: set[str] = set()
        present = set(old.queues())
        committed = {port.queue for node in nodes if node.options.isolation == "committed" for port in node.reads}
        logs = {
            queue: [CommittedLog(old, queue, partition) for partition in range(old.queue(queue).partitions)]
            for queue in committed & present
        }
        with old.core.view() as txn:
            for queue, _, raw in named_rows(txn, names.queue_key("")):
                count = unpack_record(queue, raw)["partitions"]
                self.ends[queue] = [read_row(txn, queue, partition).next for partition in range(count)]
            units = processor_rows.all_ids(txn)
            for node in nodes:
                former = node.options.renamed_from
                ids = {node.id} if node.id in units or former is None else {names.processor_id(note.graph, former)}
                positions: dict[str, int] = {}
                for unit in units:
                    row = processor_rows.read_row(txn, unit) if unit.partition("/")[0] in ids else None
                    topology = processor_rows.read_topology(txn, unit)
                    if row is not None and topology is not None:
                        positions |= {q: p.next for q, p in zip(topology.queues, row.positions)}
                for port in node.reads:
                    ends = self.ends.get(port.queue, [])
                    if node.options.isolation == "committed":  # its positions are places
                        ends = [log.row(txn).next for log in logs.get(port.queue, [])]
                    for partition, end in enumerate(ends):
                        if positions.get(names.log_id(port.queue, partition), 1) < end:
                            lagging.add(node.id)
        went_on = {
            queue
            for queue, parts in note.copied.items()
            if any(now > end for now, (_, end) in zip(self.ends.get(queue, []), parts))
        }
        self.unfinished = self._downstream({q for n in nodes if n.id in lagging for q in written(n)})
        self.went_on = self._downstream(went_on)

    def _downstream(self, queues: set[str]) -> set[str]:
        """The queues, and all that are computed from them."""
        result = set(queues)
        while True:
            more = {
                queue
                for node in self._nodes
                if any(port.queue in result for port in node.reads)
                for queue in written(node)
            } - result
            if not more:
                return result
            result |= more


class _Comparison:
    """One queue of both stores."""

    def __init__(
        self,
        old: Store,
        new: Store,
        queue: str,
        nodes: Sequence[Node],
        note: ReplayNote,
        progress: _Progress,
        limit: int,
    ) -> None:
        self._queue = queue
        self._sources = note.copied.keys()
        self._limit = limit
        self._stores = (old, new)
        ends = progress.ends.get(queue, [])
        with new.core.view() as txn:
            new_ends = [read_row(txn, queue, partition).next for partition in range(partitions_of(txn, queue))]
        self._ends = (ends, new_ends)
        with new.core.view() as txn:
            records = {name: unpack_record(name, raw) for name, _, raw in named_rows(txn, names.queue_key(""))}
        split = {name for name, record in records.items() if record["partitions"] > 1}
        split |= {name for name, parts in progress.ends.items() if len(parts) > 1}
        self._is_ordered = _ordered(queue, nodes, note, frozenset(split))
        self._unfinished = queue in progress.unfinished
        self._went_on = queue in progress.went_on
        self._firsts_old = self._firsts_of_old()

    def run(self) -> QueueDiff:
        diff = QueueDiff(self._queue, "order" if self._is_ordered else "multiset")
        left: tuple[dict[bytes, deque[_Ref]], dict[bytes, deque[_Ref]]] = (defaultdict(deque), defaultdict(deque))
        last = [0, 0]
        first_new = 0
        sides = [self._messages(0), self._messages(1)]
        while sides:
            for messages in list(sides):
                step = next(messages, None)
                if step is None:
                    sides = [side for side in sides if side is not messages]
                    continue
                digest, ref, side = step
                partners = left[1 - side].get(digest)
                if not partners:
                    left[side][digest].append(ref)
                    continue
                partner = partners.popleft()
                if not partners:
                    del left[1 - side][digest]
                diff.equal += 1
                pair = (ref, partner) if side == 0 else (partner, ref)
                last = [max(last[0], pair[0].place), max(last[1], pair[1].place)]
                first_new = min(first_new or pair[1].place, pair[1].place)
        rests = [sorted(ref for refs in side.values() for ref in refs) for side in left]
        pairs, only_old, only_new = self._paired(rests[0], rests[1])
        if any(ref.came_from for rest in rests for ref in rest):
            diff.basis = "provenance"
        diff.different = len(pairs)
        for old_ref, new_ref in pairs:
            last = [max(last[0], old_ref.place), max(last[1], new_ref.place)]
        examples: list[tuple[_Ref | None, _Ref | None]] = list(pairs)
        lost = sum(first - 1 for first in self._firsts_old)
        for ref in only_new:
            if lost > diff.lost and (not first_new or ref.place < first_new or not self._is_ordered):
                diff.lost += 1
            elif self._unfinished and (not self._is_ordered or ref.place > last[1]):
                diff.beyond += 1
            else:
                diff.only_new += 1
                examples.append((None, ref))
        for ref in only_old:
            if self._went_on and (not self._is_ordered or ref.place > last[0]):
                diff.since += 1
            else:
                diff.only_old += 1
                examples.append((ref, None))
        diff.examples = [self._example(*pair) for pair in examples[: self._limit]]
        return diff

    def _paired(
        self, old: Sequence[_Ref], new: Sequence[_Ref]
    ) -> tuple[list[tuple[_Ref, _Ref]], list[_Ref], list[_Ref]]:
        """Pair the messages that have no equal one."""
        groups: dict[Any, tuple[deque[_Ref], deque[_Ref]]] = defaultdict(lambda: (deque(), deque()))
        alone: tuple[list[_Ref], list[_Ref]] = ([], [])
        for side, rest in enumerate((old, new)):
            for number, ref in enumerate(rest):
                if ref.came_from:
                    groups["from", ref.came_from][side].append(ref)
                elif self._is_ordered:  # the number of equal messages before it
                    groups["place", ref.place - number - (self._firsts_old[0] if side == 0 else 1)][side].append(ref)
                else:
                    alone[side].append(ref)
        pairs: list[tuple[_Ref, _Ref]] = []
        for olds, news in groups.values():
            while olds and news:
                pairs.append((olds.popleft(), news.popleft()))
            alone[0].extend(olds)
            alone[1].extend(news)
        return sorted(pairs), sorted(alone[0]), sorted(alone[1])

    # --- reading ---

    def _firsts_of_old(self) -> list[int]:
        with self._stores[0].core.view() as txn:
            return [read_row(txn, self._queue, partition).first for partition in range(len(self._ends[0]))]

    def _messages(self, side: int) -> Iterator[tuple[bytes, _Ref, int]]:
        """The messages of all partitions, one partition after the other: digest, place, side."""
        for partition, end in enumerate(self._ends[side]):
            log = Log(self._stores[side], self._queue, partition)
            at = 0
            while True:
                with log.store.core.view() as txn:
                    row = log.row(txn)
                    at = max(at, row.first)
                    raws = log.read(txn, row, at, max(0, end - at))
                if at >= end or not raws:
                    break
                for batch in log.batches(raws):
                    columns = batch.provenance(self._queue, frozenset()).columns
                    for offset, message in enumerate(batch.messages()):
                        index = batch.first + offset
                        if message is ACKNOWLEDGEMENT or not at <= index < end:
                            continue
                        yield _digest(message), _Ref(partition, index, self._came_from(columns, offset)), side
                    at = max(at, batch.next)

    def _came_from(self, columns: Any, offset: int) -> tuple[tuple[str, int], ...]:
        """The indices of the message on the copied queues."""
        places = []
        for queue in sorted(self._sources & columns.keys()):
            indices = columns[queue][0]
            index = indices[offset] if isinstance(indices, (range, list)) else indices
            if index:
                places.append((queue, index))
        return tuple(places)

    def _read(self, side: int, ref: _Ref | None) -> dict[str, Any]:
        if ref is None:
            return {}
        log = Log(self._stores[side], self._queue, ref.partition)
        with log.store.core.view() as txn:
            raws = log.read(txn, log.row(txn), ref.place, 1)
        if not raws:  # it was purged meanwhile
            return {}
        batch = log.batches(raws)[0]
        return content(batch.messages()[ref.place - batch.first])

    def _example(self, old: _Ref | None, new: _Ref | None) -> Difference:
        return Difference(
            "different" if old and new else "only old" if old else "only new",
            old.place if old else None,
            new.place if new else None,
            (old or new or _Ref(0, 0, ())).partition,
            fields_of(self._read(0, old), self._read(1, new)),
        )


def _ordered(queue: str, nodes: Sequence[Node], note: ReplayNote, excluded: frozenset[str]) -> bool:
    """Return whether the order of the queue's messages follows from the order of the copied queues.

    ``excluded`` are queues with several partitions, and in recursion those that the queue is computed into.
    """
    if queue in excluded or queue in note.copied:
        return queue not in excluded
    writers = [node for node in nodes if queue in written(node)]
    if len(writers) != 1:
        return False
    (node,) = writers
    if len(node.reads) != 1 or node.options.instances != 1 or node.appenders:
        return False
    return _ordered(node.reads[0].queue, nodes, note, excluded | {queue})


def content(message: dict[str, Any]) -> dict[str, Any]:
    """The part of a message that is compared."""
    if message.get(names.TYPE) != names.PROCESSOR_ERROR:
        return {key: value for key, value in message.items() if key != names.META}
    inputs = message.get(names.ERR_MESSAGES) or {}
    return {
        names.TYPE: names.PROCESSOR_ERROR,
        "processor": (message.get(names.ERR_CONFIG) or {}).get("id"),
        names.ERR_MESSAGES: {binding: [content(one) for one in taken] for binding, taken in inputs.items()},
        names.ERR_CAUSE: [
            {name: cause.get(name) for name in ("type", "message")} for cause in message.get(names.ERR_CAUSE) or ()
        ],
    }


def _digest(message: dict[str, Any]) -> bytes:
    return xxhash.xxh3_128_digest(codec.pack(_canonical(content(message))))


def _canonical(value: Any) -> Any:
    """The value with the keys of its maps in one order."""
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value, key=lambda key: (type(key).__name__, repr(key)))}
    return [_canonical(item) for item in value] if type(value) is list else value


def fields_of(old: Any, new: Any, path: str = "") -> dict[str, list[Any]]:
    """The fields in which two messages differ, by path: ``[old, new]``, each a list that is empty if it is missing."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if codec.pack([_canonical(old)]) == codec.pack([_canonical(new)]) else {path: [[old], [new]]}
    fields: dict[str, list[Any]] = {}
    for key in dict.fromkeys([*old, *new]):
        inside = f"{path}.{key}" if path else str(key)
        if key in old and key in new:
            fields |= fields_of(old[key], new[key], inside)
        else:
            fields[inside] = [[old[key]] if key in old else [], [new[key]] if key in new else []]
    return fields
