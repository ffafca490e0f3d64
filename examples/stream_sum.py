"""Checksums of many interleaved streams, each chunk counted once: ``python examples/stream_sum.py``.

    files ──chunks──► chunks-0 … chunks-3 ──► summer ──► sums (in another store) ──► verified

Sixty files are cut into chunks. A producer publishes them interleaved over four queues; each file is on one
queue. A transaction has chunks of many files, and becomes visible at once. Every third transaction is abandoned:
its producer ends before it acknowledges, and another one publishes those chunks again. The summer keeps a running
CRC-32 of each file in a JSON file, and publishes it to another store when a file has ended. It is stopped in the
middle, and a second one continues. A chunk that was seen twice, or never, or in another order, would change the
sum of its file.
"""

import random
import sys
import tempfile
import zlib
from pathlib import Path

import cues
from cues.checkpoints import JSONFileCheckpoint
from cues.txn import Consumer, Publisher, ReadCommitted, rendezvous_mapping

FILES, CHUNKS, PARTITIONS = 60, 20, 4


class Summer:
    """Keeps the CRC-32 of each file that has not ended."""

    def __init__(self, checkpoint, sums):
        self.checkpoint, self.sums = checkpoint, sums
        self.crc = {}

    def start(self):
        self.crc = dict(self.checkpoint.state)

    def consume(self, envelope, publisher):
        chunk = envelope.message
        self.crc[chunk["file"]] = zlib.crc32(chunk["bytes"], self.crc.get(chunk["file"], 0))
        if chunk["last"]:
            done = {"file": chunk["file"], "crc": self.crc.pop(chunk["file"])}
            publisher.publish_uncommitted(lambda _: self.sums, done)

    def finalize(self, publisher):
        crc = dict(self.crc)

        def work(state):
            state.clear()
            state.update(crc)

        return work


def cut(files, chance):
    """The chunks of all files, interleaved; the chunks of one file keep their order."""
    left = {name: [content[at::CHUNKS] for at in range(CHUNKS)] for name, content in files.items()}
    while left:
        name = chance.choice(sorted(left))
        chunk = left[name].pop(0)
        yield {"file": name, "bytes": chunk, "last": not left[name]}
        if not left[name]:
            del left[name]


def publish(chunks, to_partition, chance):
    """Publish in transactions of any length; every third is abandoned, and published again by another producer."""
    chunks = list(chunks)
    given_up = transaction = 0
    while chunks:
        some = chunks[: chance.randrange(1, 200)]
        with Publisher() as publisher:
            for chunk in some:
                publisher.publish_uncommitted(to_partition, chunk)
            transaction += 1
            if transaction % 3 == 0:
                given_up += len(some)
                continue
            publisher.append_ack_intents(publisher.build_ack_intents())
        del chunks[: len(some)]
    return given_up


def main() -> int:
    chance = random.Random(1)
    files = {f"file-{number}": chance.randbytes(1_000 + number) for number in range(FILES)}
    wanted = dict.fromkeys(files, 0)
    for name, content in files.items():
        for at in range(CHUNKS):
            wanted[name] = zlib.crc32(content[at::CHUNKS], wanted[name])

    with (
        tempfile.TemporaryDirectory() as name,
        cues.open(f"{name}/chunks") as store,
        cues.open(f"{name}/sums") as other,
    ):
        partitions = [store.queue(f"chunks-{number}") for number in range(PARTITIONS)]
        to_partition = rendezvous_mapping(lambda chunk: chunk["file"].encode(), partitions)
        given_up = publish(cut(files, chance), to_partition, chance)
        print(f"{FILES * CHUNKS:,} chunks of {FILES} files published, and {given_up:,} in abandoned transactions")

        path = Path(name, "summer.json")
        for stops_at in (FILES * CHUNKS // 2, None):
            checkpoint = JSONFileCheckpoint(path)
            app = Summer(checkpoint, other.queue("sums"))
            with Consumer(app, partitions, checkpoint) as consumer:
                if stops_at is not None:
                    stop_after(stops_at, app, consumer)
                consumer.drain()
        sums = [e.message for e in ReadCommitted(other.queue("sums")) if not e.acknowledgement]
    found = {message["file"]: message["crc"] for message in sums}
    print(f"{len(sums)} sums, {sum(found.get(file) == crc for file, crc in wanted.items())} of them right")
    return 0 if found == wanted and len(sums) == FILES else 1


def stop_after(count, app, consumer):
    """Let the consumer end after ``count`` chunks."""
    consume, seen = app.consume, iter(range(count))

    def counted(envelope, publisher):
        consume(envelope, publisher)
        if next(seen, None) is None:
            consumer.stop()

    app.consume = counted


if __name__ == "__main__":
    sys.exit(main())
