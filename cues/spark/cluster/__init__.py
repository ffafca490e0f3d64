"""Graphs whose queues are directories of Parquet on a filesystem that driver and executors share.

    files.py        a directory on any Hadoop filesystem, and *put if absent*, on which everything rests
    directory.py    a queue: data files, and the log that says which of them count
    ledger.py       a processor's steps: who owns it, where it stands; each record is one commit
    rows.py         messages as rows, as a step takes them
    tasks.py        what an executor does with its part of a step
    step.py         take → run → commit
    feeder.py       from a source's queue, in the driver's store, into its directory
    keeping.py      small files become large ones, old ones go, orphans are swept
    engine.py       a running graph

    DIR/_cues/id.json                           the id that ``process.delivery.store`` says
    DIR/_cues/<graph>.driver.json               who runs the graph, and that it still does
    DIR/_cues/steps/<processor id>/<n>.json     record n of a processor (ledger.py)
    DIR/_cues/work/<epoch>-<token>/             what a step is made of before it is committed
    DIR/_cues/state/<processor id>/             keyed state
    DIR/<queue>/_cues/queue.json                the queue's identity
    DIR/<queue>/_spark_metadata/<n>             the queue's log, as Spark's own file sink writes it
    DIR/<queue>/<first>-<count>-….parquet       messages

Not guaranteed: that the queues of one step change at the same moment. They change all or not at all,
one after another.
"""
