"""RabbitMQ: a source of the messages of a queue, acknowledged after their commit, and a sink that publishes.

    graph.add(cues.Source("orders", RabbitQueue("amqps://broker:5671/shop", "orders", user="a", password="b")))
    graph.add(RabbitPublisher("amqp://broker", "events", "order.paid", shape="value").sink("paid"))

The protocol is AMQP 0.9.1, the client is pika, the extra ``rabbitmq``.

**The source** consumes one queue. A connection has a thread of its own, so heartbeats are answered while a message
waits for its place on the queue:

    1. receive       the broker has at most ``in_flight`` messages on the way, and keeps the others
    2. commit        by the engine: the message, a row of state with its id, and the position at once
    3. acknowledge   all that is committed

So nothing is lost, wherever this process is killed: a message that was not committed was not acknowledged, and the
broker sends it again. The same holds for a queue with ``max_lag=``: what is not acknowledged stays at the broker.

**Once.** A message that was committed, and whose acknowledgement the broker does not have, is sent again on the next
connection, with the flag ``redelivered``. At most ``in_flight`` messages can be in this state, because the broker sends
no more without an acknowledgement. The rows have the ids of the last ``in_flight`` messages. A message is dropped if it
has the flag and its id is in a row; the order of the repetitions does not matter. A message without the flag is always
a message, also one that its publisher sent twice with one id.

The id is the property ``message_id``; or what a function gives (``identity=``). Of a message without an id nobody can
say whether it is a repetition: the broker has no name for a message that remains over connections, and when it has all
acknowledgements, the next message with the flag may be a new one with the same bytes. Such a message is never dropped:
it comes at least once, and again only if a connection ended between its commit and its acknowledgement.
``identity="content"`` drops it if all of it is equal to a message in the rows; this loses one of two equal messages if
the connection ends between their acknowledgements, so it is right only if no two messages are equal.

**Not guaranteed.** Exactly once needs ids that are unique, and one consumer (``exclusive=True``): what another consumer
has taken and not acknowledged comes here with the flag. A publisher decides about a loss before the queue (confirms,
persistent messages, a durable queue). The broker removes messages by its own rules: expiry, ``x-max-length``, purges,
and the delivery limit of a quorum queue, which counts each connection that ended with the message on the way. A classic
queue whose broker is killed forgets acknowledgements and flags, and repeats messages. Order is that of the queue; after
an end of a connection a quorum queue may send returned messages in another order. If a message is not acknowledged for
longer than ``consumer_timeout`` of the broker (30 minutes), because the queue of the graph is full, the broker ends the
channel, and sends the messages again.

**The sink** publishes with confirms, and the step commits after the broker has confirmed all messages of it: at least
once. After a kill, or a lost connection, the messages of that step are published again, with the same ``message_id``,
a hash of the processor and of the place of the message, so that a consumer can drop repetitions.

**Failures.** A broker that cannot be reached, ends a connection or does not answer, another consumer of an exclusive
source, and a queue that is full (``x-overflow: reject-publish``) are away: the processor waits. A refused log-in,
virtual host or permission, a queue or exchange that is missing or was declared differently, and a wrong certificate
stop the processor. A message that comes to no queue is a failed message (``mandatory=True``).
"""

from cues.processors.rabbitmq_client import Refused
from cues.processors.rabbitmq_sink import RabbitPublisher
from cues.processors.rabbitmq_source import IDENTITIES, RabbitQueue, Reading

__all__ = ["IDENTITIES", "RabbitPublisher", "RabbitQueue", "Reading", "Refused"]
