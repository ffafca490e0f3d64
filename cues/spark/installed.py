"""The version of pyspark that is installed, what it is too old for, and where its workers come from."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any, Final

from cues.errors import NotInstalled, Unsupported

DAEMON: Final = "cues.spark.daemon"
"""The module from which the Python workers of a local master are forked; like those of Spark, a program of its own."""
_EXTRA: Final = (
    "run pip install 'cues-streams[spark]', or 'cues-streams[cluster]' where a cluster has a pyspark of its own."
)


def require_packages(what: str, *names: str) -> None:
    """Raise :class:`NotInstalled` if a package is not installed that ``what`` needs, such as ``"--queues"``."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        needed = "a package that is" if len(missing) == 1 else "packages that are"
        raise NotInstalled(f"{what} needs {needed} not installed: {', '.join(missing)}.", _EXTRA)


def require_pyspark() -> None:
    """Raise :class:`NotInstalled` without a pyspark that Cues works with."""
    try:
        from pyspark.sql.datasource import DataSourceArrowWriter  # noqa: F401
    except ImportError:
        raise NotInstalled(
            f"Spark needs pyspark 4.0 or newer; {_installed()}.", "run pip install 'cues-streams[spark]'."
        ) from None


def require_streams(what: str) -> None:
    """Raise :class:`Unsupported` if ``what`` reads a queue as a stream, and this Spark is older than 4.2.

    An older one asks a source in Python for no limit of a batch, and calls none for its trigger "available now".
    """
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow  # noqa: F401
    except ImportError:
        raise Unsupported(
            f"{what} needs Spark 4.2 or newer; {_installed()}.",
            "use a cluster with Spark 4.2; all else of Cues works from Spark 4.0 on.",
        ) from None


def _installed() -> str:
    try:
        import pyspark
    except ImportError:
        return "pyspark is not installed"
    return f"pyspark {pyspark.__version__} is installed"


def times_in_utc() -> dict[str, Any]:
    """Return the argument of pyspark's functions for types of Arrow that makes times UTC: before Spark 4.2 they are."""
    from pyspark.sql.pandas.types import to_arrow_type

    return {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_type).parameters else {}
