"""Transactions across stores, machines and foreign databases.

Within one store LMDB's own transaction is enough, and a graph uses nothing else. This package is for transactions over
several stores: producers with ids, messages that are pending until they are acknowledged, and a sequencer that selects
the committed ones. docs/transactions.md says when a program needs them.

    records.identity    producers, clocks and flags, which make the UUID of a message
    producers.sequencer the selection of committed messages
    txn.reader          readers of a log: every message, or the committed ones
    txn.mapping         the choice of a partition for a message
    txn.framing         messages in files and streams
    txn.journals        the import and export of such files
    txn.publisher       writes messages with identities, pending until they are acknowledged
    txn.barrier         waits until a consumer has processed given messages
    txn.consumer        reads and writes messages and rows, in transactions that a checkpoint decides

Each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues.base.lazy import loader

if TYPE_CHECKING:
    from cues.errors import Desynchronised, FramingError, Gap, NoPartitions, SequenceError, UnexpectedEOF, WaitTimeout
    from cues.producers.sequencer import AckIntent, Checkpoint, Envelope, Outcome, ProducerState, Sequencer
    from cues.queues.base import journal_of
    from cues.queues.partitioners import fnv1a32
    from cues.queues.stamped import append_stamped
    from cues.records.identity import ZERO_UUID, Clock, Flags, ProducerID, build_uuid, parse_uuid
    from cues.txn.barrier import wait_read_through
    from cues.txn.consumer import Abort, App, Consumer, Defer
    from cues.txn.framing import FrameReader, Framing, framing_for, register_framing
    from cues.txn.mapping import modulo_mapping, random_mapping, rendezvous_mapping
    from cues.txn.messages import DICT, MessageType, dicts
    from cues.txn.publisher import Publisher
    from cues.txn.reader import ReadCommitted, ReadUncommitted
    from cues.txn.sources import MessageSource, ReadFrom
    from cues.txn.writer import Append

# fmt: off
__all__ = [
    "DICT", "ZERO_UUID", "Abort", "AckIntent", "App", "Append", "Checkpoint", "Clock", "Consumer", "Defer",
    "Desynchronised", "Envelope", "Flags", "FrameReader", "Framing", "FramingError", "Gap", "MessageSource",
    "MessageType", "NoPartitions", "Outcome", "ProducerID", "ProducerState", "Publisher", "ReadCommitted", "ReadFrom",
    "ReadUncommitted", "SequenceError", "Sequencer", "UnexpectedEOF", "WaitTimeout", "append_stamped", "build_uuid",
    "dicts", "fnv1a32", "framing_for", "journal_of", "modulo_mapping", "parse_uuid", "random_mapping",
    "register_framing", "rendezvous_mapping", "wait_read_through",
]
# fmt: on

if not TYPE_CHECKING:  # for a type checker it would define every name
    __getattr__, __dir__ = loader(
        __name__,
        {
            "errors": "Desynchronised FramingError Gap NoPartitions SequenceError UnexpectedEOF WaitTimeout",
            "txn.barrier": "wait_read_through",
            "txn.consumer": "Abort App Consumer Defer",
            "txn.framing": "FrameReader Framing framing_for register_framing",
            "records.identity": "Clock Flags ProducerID ZERO_UUID build_uuid parse_uuid",
            "queues.partitioners": "fnv1a32",
            "queues.base": "journal_of",
            "txn.mapping": "modulo_mapping random_mapping rendezvous_mapping",
            "txn.messages": "DICT MessageType dicts",
            "txn.publisher": "Publisher",
            "txn.sources": "MessageSource ReadFrom",
            "txn.writer": "Append",
            "txn.reader": "ReadCommitted ReadUncommitted",
            "queues.stamped": "append_stamped",
            "producers.sequencer": "AckIntent Checkpoint Envelope Outcome ProducerState Sequencer",
        },
    )
