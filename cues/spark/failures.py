"""Failures inside Spark, in words for people: one line, and what to try. The whole text is in the log at debug.

Spark's errors have up to sixty lines of Java. The cause is in one of them, mostly not in the first.
"""

from __future__ import annotations

import re
from typing import Final

from cues.base.logs import logger

_log: Final = logger("cues.spark")
UNBORN: Final = "Python worker failed to connect back"
"""The text of Spark's error for a Python worker that did not start within ten seconds."""
_ADVICE: Final = (
    (
        UNBORN,
        "give Spark fewer cores (--conf spark.executor.cores=2, or the master local[2]), or the machine less"
        " other work; then start again. A worker process of Python did not start within Spark's ten seconds.",
    ),
    (
        "Python worker exited unexpectedly|EOFException",
        "give a call fewer messages (batch_size=), or workers more memory; then start again. A worker process ended in"
        " the function: it took more memory than there is, or ended itself.",
    ),
    (
        "OutOfMemoryError|Java heap space|GC overhead limit|exited with code 137|OOM",
        "give Java more memory, --conf spark.executor.memory=4g (with a local master: --conf spark.driver.memory=4g);"
        " then start again.",
    ),
    (
        "ExecutorLostFailure|Executor heartbeat timed out|FetchFailed|Remote RPC client disassociated",
        "look at the log of the executor on Spark's page; if it had too little memory, give --conf"
        " spark.executor.memory=4g. Then start again. The executor was lost, and its tasks failed again on others.",
    ),
    ("spark.driver.maxResultSize", "give --conf spark.driver.maxResultSize=4g, and start again."),
    (
        "No space left on device|ENOSPC",
        "free space on the disks of the executors, or give another folder with --conf spark.local.dir=DIR; then start"
        " again.",
    ),
    (
        "ModuleNotFoundError|ImportError|ClassNotFoundException|NoClassDefFoundError",
        "install what is missing on every machine, or send it (--py-files, --conf spark.jars.packages=…); then start"
        " again.",
    ),
    (
        "AccessDenied|Access Denied|InvalidAccessKeyId|SignatureDoesNotMatch|NoCredentials|Status Code: 403"
        "|PermissionDenied|Unauthenticated",
        "give the driver and every executor the variables with the credentials of the object store; then start again.",
    ),
    (
        "SparkContext (?:was|is) (?:being )?(?:shut ?down|stopped)|stopped SparkContext",
        "start again with a session that lives as long as the graph. This one was stopped while the graph used it.",
    ),
)
"""Hints by the text of an error; the first that is found counts."""


def in_short(error: Exception) -> str:
    """The one line that explains a failure inside Spark, without a full stop at its end.

    It is taken from the output of a worker that could not start, else from Python's traceback, else from an error of
    Cues without one, else from Java's. The whole text goes to the log, at debug.
    """
    text = str(error)
    _, python, trace = text.rpartition("Traceback (most recent call last):\n")
    own = re.search(r"\bcues\.errors\.\w+: .*", text)
    unborn = re.search(r"Error from python worker:\n(?:.*\n)*?(.+)\nPYTHONPATH was:", text)
    if unborn:
        line = unborn[1]
    elif own and not python:
        line = own[0]
    elif python:
        line = next((line for line in trace.splitlines() if line and not line[0].isspace()), "")
    else:
        cause = re.search(r"most recent failure: (?:Lost task .*?\): )?(.*)", text) or re.search(r"^: (.*)", text, re.M)
        line = cause[1] if cause else text.partition("\n")[0]
        line = re.sub(r"^(?:[a-z]\w*\.)+[A-Z]\w*: ", "", line).partition(". Consider setting ")[0]
    line = line.strip().rstrip(".") or type(error).__name__
    if "\n" in text:
        _log.debug("%s; in full: %s", line, text)
    return line


def advice(error: Exception, otherwise: str) -> str:
    """Return the hint for a failure inside Spark; ``otherwise`` if nothing is known about it."""
    text = str(error)
    return next((hint for pattern, hint in _ADVICE if re.search(pattern, text)), otherwise)
