"""NATS JetStream, exactly once: a source of the messages of a stream, and a subject as the target of sinks.

    graph.add(cues.Source("orders", NatsStream("nats://localhost:4222", "ORDERS", follow=True)))
    graph.add(NatsSubject("nats://localhost:4222", "PRICED", "priced").sink("prices"))

The client is nats-py, the extra ``nats``. It is imported on first use, and runs in a thread of its own.

**The source** keeps its position in Cues, in the commit of the messages: ``[version, time of creation, sequence]`` of
the stream. Each start reads after it through a consumer of its own, which acknowledges nothing and which the server
forgets. The consumer numbers what it delivers, so a message that the client dropped is noticed and read again.

**Lost messages.** If messages after the position left the front of the stream before they were read (limits, a purge),
the source stops with :class:`cues.MessagesPurged`, which names them. With ``on_gap="fail"`` this error is a failed
message, and the source continues after the gap. A stream that was created again, or that ends before the position, is
:class:`cues.errors.Diverged`. A message that was deleted between others (``max_msgs_per_subject``, a purge of a
subject) is not told.

**The sink** follows :mod:`cues.checkpoints.deliveries`, but without a transaction: each published message carries the
row of the processor *up to this message* in its header ``Cues-Position``. So the last message of the subject has the
row, and message and row are one write.

    1. read      the last message of the subject: its row, its sequence
    2. admit     accept the delivery or refuse it; find the messages that are new
    3. publish   the new messages in order, the first on the condition that the sequence of 1 is still the last one of
                 the subject, each other that the message before it is the last one of the stream
                 (``Nats-Expected-Last-Subject-Sequence``, ``Nats-Expected-Last-Msg-Id``)
    4. repeat    from the first message that was refused, if one of another subject came between

A crash in 3 leaves the first messages of a step, and 2 finds where they end. So the subject belongs to one processor,
and is its log; partition n of a partitioned queue has the subject ``<subject>.<n>``. The function of the sink writes
each message that it is given, once, in order: a stream before it changes messages. ``Nats-Msg-Id`` is the identity of
the message in Cues, by which the server drops repetitions within the duplicate window of the stream, too.

Not guaranteed: more than the stream keeps. If limits or a purge remove the *last* message of the subject while the sink
is stopped, the row is gone: what a crash left uncommitted is then published again, unless the duplicate window (two
minutes by default) has its id. A server acknowledges before it syncs its files (``sync_interval``): a power loss can
take messages that Cues has committed.
"""

from cues.processors.nats_client import Connection, Servers, is_away, library
from cues.processors.nats_sink import NatsSubject, Writer, write
from cues.processors.nats_source import DECODERS, NatsStream, Reading, Record

__all__ = [
    "DECODERS",
    "Connection",
    "NatsStream",
    "NatsSubject",
    "Reading",
    "Record",
    "Servers",
    "Writer",
    "is_away",
    "library",
    "write",
]  # fmt: skip
