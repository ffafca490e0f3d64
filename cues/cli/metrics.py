"""``cues metrics``: the measurements of a store in the text format of Prometheus, once or over HTTP."""

from __future__ import annotations

import threading

from cues.cli.options import command, note, option
from cues.cli.printing import out
from cues.cli.target import takes_store
from cues.operate import target as targets
from cues.tools import exporter


@command()
@takes_store("[GRAPH | STORE]")
@option(
    "--listen",
    metavar="[HOST:]PORT",
    help="Answer Prometheus at this address until Ctrl-C; without a host only this machine reaches it.",
)
def metrics(target: targets.Target, listen: str | None) -> None:
    """Print the measurements of a store for Prometheus, or answer scrapes.

    A graph answers scrapes itself with cues run --metrics. This command is for stores whose programs do not, and for
    the textfile collector of the node exporter. docs/how-to/metrics.md lists names and labels.

    \b
      cues metrics graph.py
      cues metrics data/flights > /var/lib/node_exporter/flights.prom
      cues metrics data/flights --listen 9464
    """
    with target.open() as store:
        if listen is None:
            out(exporter.text(store), end="")
            return
        with exporter.serve(store, listen) as server:
            note(f"metrics: {server.url}")
            threading.Event().wait()
