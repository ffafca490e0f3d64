"""The page in the browser: ``cues ui``, and ``cues run --ui``.

    shape.py        the picture of the graph: places of processors, queues and edges
    text.py         messages as text: whole, or cut
    sample.py       the overview that the page shows live, and what is wrong in it
    look.py         one store or directory (cues/operate), as the API answers questions about it
    guard.py        who may ask: token, host, origin; the headers of every answer
    search.py       searches, in a process that the kernel ends after a time
    server.py       routes, live events, and the process that serves them
    static/         the page: HTML, one CSS file, ES modules; nothing is built, nothing comes from other hosts

It needs the extra ``ui`` (Starlette and uvicorn), so ``cues.cli`` loads it by name. Stores are opened read-only.
"""
