"""Ready-made ends for graphs: sources and sinks for files, databases and other systems.

Installed as ``cues.processors``. Each module stands on its own, needs nothing but the standard
library (what needs more says so and loads it on first use), and is written with the public names of
:mod:`cues` only: anything here could have been written in a graph file, and may be copied into one.

    files.py   sources that read CSV and JSON lines and go on where the store says they stopped
    sql.py     a sink's transaction in SQLite that takes every message exactly once
"""
