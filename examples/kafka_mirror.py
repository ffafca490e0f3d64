"""A Kafka topic mirrored exactly once: ``python examples/kafka_mirror.py SERVERS TOPIC SERVERS TOPIC``.

Kill it, start it again: each record is in the other topic once, with its partition, key, headers and time. It ends at
the end of the topic; with ``cues run examples/kafka_mirror.py`` and FOLLOW=1 it waits for more.
"""

import os
import sys

import cues
from cues.processors.kafka_sink import Topic
from cues.processors.kafka_source import Records

servers, topic, other_servers, other_topic = (
    sys.argv[1:5] if len(sys.argv) == 5 else ["localhost:9092", "orders", "localhost:9092", "copy"]
)

graph = cues.Graph("mirror", store="data", queues={"records": cues.QueueOptions(retention="read")})
graph.add(cues.Source("records", Records(servers, topic, follow="FOLLOW" in os.environ)))
graph.add(Topic(other_servers, other_topic, partition="same").sink("records", batch_size=500))

if __name__ == "__main__":
    with graph.start() as running:
        running.wait_done()
    print(f"{topic} is mirrored to {other_topic}")
