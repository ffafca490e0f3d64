"""Graphs whose queues are directories of Parquet on a filesystem that driver and executors share.

    files.py        a directory on any Hadoop filesystem, and *put if absent*, which makes commits exact
    directory.py    a queue: data files, and the log that names the files that count
    ledger.py       a processor's steps, its owner and its positions; each record is one commit
    rows.py         messages as rows, as a step takes them
    tasks.py        the work of an executor on its part of a step
    step.py         take → run → commit
    feeder.py       from a source's queue, in the driver's store, into its directory
    maintenance.py  small files are merged, old files are removed, orphans are swept
    engine.py       the engine of a running graph

    DIR/_cues/id.json                           the id that ``process.delivery.store`` has
    DIR/_cues/<graph>.driver.json               the lease of the driver that runs the graph
    DIR/_cues/steps/<processor id>/<n>.json     record n of a processor (ledger.py)
    DIR/_cues/work/<graph>/<owner>/             files of steps that are not committed
    DIR/_cues/state/<processor id>/             keyed state
    DIR/<queue>/_cues/queue.json                the queue's identity
    DIR/<queue>/_cues/writer.json               the graph that writes the queue
    DIR/<queue>/_spark_metadata/<n>             the queue's log, as Spark's own file sink writes it
    DIR/<queue>/<first>-<count>-….parquet       messages

Not guaranteed: that the queues of one step change at the same moment. They change one after another, but all of them
or none.
"""
