"""The page in the browser: ``cues ui``, and ``cues run --ui``.

    shape.py        the graph: processors, queues, edges, and their places in the picture
    text.py         messages as text: whole, or cut
    sample.py       the overview that the page shows live, and what is wrong in it
    look.py         one store, as the API answers questions about it
    lineage.py      where a message came from, and what became of it
    directory.py    the same for a shared directory of ``cues run --queues``
    guard.py        who may ask: token, host, origin; the headers of every answer
    looks.py        what the API asks; which of the two answers
    search.py       searches, in a process that the kernel ends after a time
    server.py       routes, live events, and the process that serves them
    static/         the page: HTML, one CSS file, ES modules; nothing is built, nothing comes from other hosts

It needs the extra ``ui`` (Starlette and uvicorn), so ``cues.cli`` loads it by name. Stores are opened read-only.
"""
