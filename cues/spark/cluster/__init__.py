"""Graphs whose queues are in a directory that driver and executors share.

    files.py        a directory on a mount or in an object store, and *put if absent*, which makes commits exact
    directory.py    a queue: a Delta table, whose log names the files that count
    data.py         data files: messages and their provenance as columns
    typed.py        fields of messages as columns beside them
    ledger.py       a processor's steps, its owner and its positions; each record is one commit
    state_files.py  keyed state: files by the hash of the key
    rows.py         messages as a step takes them
    tasks.py        the work of an executor: read, call, write
    step.py         take → run → commit
    publish.py      commit → forward
    delays.py       delayed messages: hold → move → deliver
    feeder.py       from a source's queue, in the driver's store, into its directory
    ingest.py       from a Spark stream into a queue
    frames.py       stages from DataFrame to DataFrame
    maintenance.py  small files are merged, old files are removed, orphans are swept
    inspection.py   reading without Spark
    operations.py   changes of an operator: seek, purge, and the removal of a graph's files
    shared.py       reading with the format ``cues``
    engine.py       the engine of a running graph; lease.py: which driver runs it

    DIR/_cues/id.json                           the id that ``process.delivery.store`` has
    DIR/_cues/<graph>.id.json                   the same, after cues run --fresh of this graph
    DIR/_cues/<graph>.driver.json               the lease of the driver that runs the graph
    DIR/_cues/<graph>.store.json                the store of the graph's sources, for the lag of feeders in cues status
    DIR/_cues/<graph>.vacuum.json               the time of the last vacuum of its queues (maintenance.py)
    DIR/_cues/steps/<processor id>/<n>.json     record n of a processor (ledger.py)
    DIR/_cues/state/<processor id>/             keyed state
    DIR/_cues/delayed/<processor id>/           delayed messages (delays.py)
    DIR/<queue>/_cues/queue.json                the queue's identity
    DIR/<queue>/_cues/writer.json               the graph that writes the queue
    DIR/<queue>/_cues/delays/<time>.json        no message of the queue has a later time of delivery
    DIR/<queue>/_delta_log/<version>.json       the queue's log
    DIR/<queue>/<processor>-<record>-….parquet  messages

The last field of each JSON file of Cues but the lease and that time is the checksum of the rest, ``"seal"``; an
earlier version wrote none. A batch or a block of batches is the field ``"list"`` of such a file.

Not guaranteed: that the queues of one step change at the same moment. They change one after another, but all of them
or none.
"""
