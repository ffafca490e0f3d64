"""The verbs of an operator, on a store or a directory, as functions that the commands and the page draw.

    place.py            a store or a directory of ``cues run --queues``: one set of methods for both
    stores.py           a store                            directories.py      a directory
    reading.py          messages of a queue in a store     directory_reader.py the same in a directory
    steps.py            steps of a processor               runs.py, fresh.py   a run, and its new beginning
    target.py           what a command line names          positions.py        places on a queue in texts
    failed.py           failed messages, counted           where.py            expressions over messages
    seeking.py, processors.py    moves of positions, and processors that are deleted
    changes.py          purges and new partitions, planned
    shape.py            processors and queues of a graph   lineage.py          where messages come from
    form.py             a measurement as JSON, and its first lines

Nothing here prints, asks or knows a terminal. A request that cannot be meant as it is written raises
:class:`cues.operate.refused.Refused`. Spark is imported only for a directory.
"""
