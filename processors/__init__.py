"""Ready-made sources and sinks for files, databases and other systems.

Installed as ``cues.processors``. Each module is independent of the others and needs only the standard
library. A module that needs more says so, and loads it on first use. The modules use only public names
of :mod:`cues`, so you can copy them into a graph file.

    files.py   sources that read CSV and JSON lines, and continue at the committed position
    sql.py     transactions of sinks in SQLite, which take every message exactly once
"""
