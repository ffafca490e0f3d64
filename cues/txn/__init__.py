"""Transactions across stores, machines and foreign databases.

Inside one store LMDB's own transaction is enough, and a graph uses nothing else. What is here is
for the rest: identified producers, pending and acknowledged messages, a sequencer that turns what was
written into what was committed. docs/transactions.md says when that is needed and when not.

    identity    producers, clocks, flags: the UUID of a message
    stamps      the identities of a run of messages, as record batches keep them
    mapping     which partition a message belongs to
    framing     messages in files and streams
    sequencer   from what was written to what was committed
    publisher   writes messages with identities, pending until they are acknowledged
    reader      reads logs: everything, or what is committed
    consumer    messages in, messages and rows out, in transactions that a checkpoint decides

Each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues.errors import Desynchronised, FramingError, Gap, NoPartitions, SequenceError, UnexpectedEOF, WaitTimeout
    from cues.partitioners import fnv1a32
    from cues.txn.consumer import App, Consumer, Defer
    from cues.txn.framing import FrameReader, Framing, framing_for, register_framing
    from cues.txn.identity import ZERO_UUID, Clock, Flags, ProducerID, build_uuid, parse_uuid
    from cues.txn.mapping import journal_of, modulo_mapping, random_mapping, rendezvous_mapping
    from cues.txn.messages import DICT, MessageType, dicts
    from cues.txn.publisher import Append, Publisher
    from cues.txn.reader import ReadCommitted, ReadUncommitted
    from cues.txn.sequencer import AckIntent, Checkpoint, Envelope, Outcome, ProducerState, Sequencer
    from cues.txn.stamped import append_stamped

_HOMES = {
    "errors": "Desynchronised FramingError Gap NoPartitions SequenceError UnexpectedEOF WaitTimeout",
    "partitioners": "fnv1a32",
    "txn.consumer": "App Consumer Defer",
    "txn.framing": "FrameReader Framing framing_for register_framing",
    "txn.identity": "Clock Flags ProducerID ZERO_UUID build_uuid parse_uuid",
    "txn.mapping": "journal_of modulo_mapping random_mapping rendezvous_mapping",
    "txn.messages": "DICT MessageType dicts",
    "txn.publisher": "Append Publisher",
    "txn.reader": "ReadCommitted ReadUncommitted",
    "txn.stamped": "append_stamped",
    "txn.sequencer": "AckIntent Checkpoint Envelope Outcome ProducerState Sequencer",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "DICT",
    "ZERO_UUID",
    "AckIntent",
    "App",
    "Append",
    "Checkpoint",
    "Clock",
    "Consumer",
    "Defer",
    "Desynchronised",
    "Envelope",
    "Flags",
    "FrameReader",
    "Framing",
    "FramingError",
    "Gap",
    "MessageType",
    "NoPartitions",
    "Outcome",
    "ProducerID",
    "ProducerState",
    "Publisher",
    "ReadCommitted",
    "ReadUncommitted",
    "SequenceError",
    "Sequencer",
    "UnexpectedEOF",
    "WaitTimeout",
    "append_stamped",
    "build_uuid",
    "dicts",
    "fnv1a32",
    "framing_for",
    "journal_of",
    "modulo_mapping",
    "parse_uuid",
    "random_mapping",
    "register_framing",
    "rendezvous_mapping",
]


def __getattr__(name: str) -> Any:
    """Load a name on its first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'cues.txn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cues.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
