"""Count words over four partitions, with a consumer for each: ``python examples/word_count_partitioned.py``.

    lines ──► split ──► words/0 … words/3 ──► count, four of them ──► counts of each partition's words

``split`` publishes the words of a line in one transaction, each to the partition of the word: the one with the
highest hash of its name and the word (rendezvous hashing). So all occurrences of a word are on one partition, and
a further partition would take only few words from the others. Each partition has a consumer, which could run in a
process or on a machine of its own. The consumers keep their counts in one database, one row for each word, in the
same transaction as their checkpoints.
"""

import tempfile
from collections import Counter

import sqlalchemy as sa

import cues
from cues.checkpoints import LMDBCheckpoint, SQLCheckpoint
from cues.txn import Consumer, rendezvous_mapping

PARTITIONS = 4
TEXT = """\
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light,
it was the season of Darkness, it was the spring of hope, it was the winter of despair.
"""
COUNTS = "create table if not exists counts (word text primary key, times integer)"
ADD = sa.text(
    "insert into counts values (:word, :times) on conflict (word) do update set times = counts.times + excluded.times"
)


class Split:
    """Publishes the words of each line."""

    def __init__(self, to_partition):
        self.to_partition = to_partition

    def consume(self, envelope, publisher):
        for word in envelope.message["line"].split():
            publisher.publish_uncommitted(self.to_partition, {"word": word.strip(",.").lower()})

    def finalize(self, publisher):
        return None


class Count:
    """Counts the words of one partition."""

    def __init__(self):
        self.times = Counter()

    def consume(self, envelope, publisher):
        self.times[envelope.message["word"]] += 1

    def finalize(self, publisher):
        rows = [{"word": word, "times": times} for word, times in self.times.items()]
        self.times.clear()
        return lambda connection: connection.execute(ADD, rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, cues.open(f"{name}/store") as store:
        store.queue("lines").appender().write_many([{"line": line} for line in TEXT.splitlines()])
        store.queue("words", partitions=PARTITIONS)
        partitions = [store.queue(partition) for partition in store.matching("words/*")]
        to_partition = rendezvous_mapping(lambda message: message["word"].encode(), partitions)

        with Consumer(Split(to_partition), [store.queue("lines")], LMDBCheckpoint(store, "split")) as split:
            split.drain()
        for partition in partitions:
            checkpoint = SQLCheckpoint(f"{name}/counts.db", f"count {partition.id}", COUNTS)
            with checkpoint, Consumer(Count(), [partition], checkpoint) as count:
                count.drain()

        spread = [len({m["word"] for m in partition.tailer(isolation="committed")}) for partition in partitions]
        print(f"{sum(spread)} words on {PARTITIONS} partitions: {', '.join(map(str, spread))}")
        with SQLCheckpoint(f"{name}/counts.db") as counts, counts.engine.connect() as connection:
            for word, times in connection.execute(sa.text("select * from counts order by times desc, word limit 5")):
                print(f"{times:3} {word}")


if __name__ == "__main__":
    main()
