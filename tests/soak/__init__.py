"""The soak: the graph of flights for hours, with everything at once, and a judge.

    python -m tests.soak --minutes 120          two hours; exit status 1 if anything is wrong
    python -m tests.soak --seconds 20           as in the slow set
    python -m tests.soak --minutes 9 --seed 7   the choices of this seed; times are those of the machine

    writer ─► rows ─► check ─► flights ─┐              ┌─► sort ─► cancelled, delayed, on-time
                        │               ├─► enrich ─► enriched ─► save ─► flights.db
                     errors  weather ───┘              ├─► measure ─► figures ─┐
                        ├─► reject ─► flights.db       ├─► audit ─► audited    ├─► report
                        └──────────────────────────────┼───────────────────────┘
                                                       ├─► ship ─► shipped, in another store
                                                       └─► a group of members ─► seen
    publisher ─► booked ─► confirm ─► confirmed        booked is also in the other store: one transaction over both

``graph.py`` is run by ``cues run --workers``; the writer, the members and the publisher are processes of their own
(``roles.py``). ``operator.py`` does to them what operators and machines do: kills, stops, backups, restores, seeks,
purges, checks, compaction, restarts with other workers, queries with Spark.

A run is a row of lives. At the end of a life the writer and the publisher pause, all messages come through, and
``judge.py`` compares all queues, the tables and the counts with those that ``model.py`` computes without Cues. The
store is checked. Queues keep their last messages and what is unread, so that the store does not grow.
"""
