"""MQTT: a source of the messages of topics, acknowledged after their commit, and a sink that publishes.

    graph.add(cues.Source("readings", Mqtt("mqtts://broker:8883", "plant/+/temperature", user="a", password="b")))
    graph.add(Publisher("mqtt://broker", "alerts", shape="value").sink("alerts"))

The client is paho-mqtt, the extra ``mqtt``.

**The source** has a session that the broker keeps while the source is away, under a client id that stays the same over
restarts. It subscribes with QoS 1:

    1. receive       the broker has at most ``in_flight`` messages on the way, and keeps the others
    2. commit        by the engine: the message, a row of state (packet id, checksum) and the position at once
    3. acknowledge   in the order of receipt, all but the last committed message

So nothing is lost, wherever this process is killed: a message that was not committed was not acknowledged, and the
broker sends it again. The same holds a queue with ``max_lag=``: what is not acknowledged stays at the broker.

**Once.** A message that was committed and perhaps not acknowledged is sent again after a reconnect, with the flag DUP
and its packet id. A packet id alone proves nothing: when the broker has the acknowledgement, it may use the id for
another message, perhaps with the same text. The last committed message is therefore never acknowledged before the next
one is committed. The broker sends unacknowledged messages again in their first order (MQTT-4.6.0-1), so all messages
up to that one are repetitions for certain, and all after it are new. A message is dropped if it has the flag DUP,
comes in a resumed session before that one or is that one, and a row has its packet id and checksum. In all other cases
it is a message. A repetition within a connection, of a message that was not acknowledged, is dropped too.

QoS 2 is not used: paho acknowledges such a message before anybody can store it, and a kill then loses it.

**Not guaranteed.** A message that its publisher sent with QoS 0 has no acknowledgement: it may be lost with the
connection. The broker drops messages by its own limits (mosquitto: ``max_queued_messages``, 1,000 by default), and with
its session (``session_s``; a crash of a broker that does not store sessions). A session that is gone is a warning in
the log. The broker must let two messages be in flight. A client id belongs to one source: a second source with the same
id gets messages of the first one.

**The sink** publishes with QoS 1, and the step commits after the broker has acknowledged all messages of it: at least
once. After a kill, or a lost connection, the messages of that step are published again.

**Failures.** A broker that cannot be reached, or that ends a connection, is away: the processor waits for it. A wrong
password, a refused client id or subscription, and a wrong certificate stop the processor.
"""

from cues.processors.mqtt_client import VERSIONS
from cues.processors.mqtt_sink import Publisher
from cues.processors.mqtt_source import Mqtt, Reading

__all__ = ["VERSIONS", "Mqtt", "Publisher", "Reading"]
