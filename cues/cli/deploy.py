"""``cues deploy``: print a unit, a Dockerfile, a compose file, a crontab or a StatefulSet for a graph."""

from __future__ import annotations

import click

from cues.base.texts import quoted
from cues.cli import options, page
from cues.cli.options import WrongUsage, command, option, store_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import out
from cues.graphs import graphfile
from cues.operate import units
from cues.operate.deployment import Deployment
from cues.operate.runs import RunRequest
from cues.queues.options import size_of


@command()
@click.argument("kind", metavar="KIND", type=click.Choice(tuple(units.KINDS)))
@click.argument("graph", metavar="GRAPH", shell_complete=options.candidates_of("names"))
@store_option
@option("--user", metavar="NAME", help="The user of the service or of the crontab.  [default: you]")
@option("--python", metavar="PATH", help="The Python that has Cues, for systemd and cron.  [default: this one]")
@option("--workers", metavar="N|auto", help="Run it with this number of worker processes.")
@click.option(
    "--ui",
    type=page.Address(),
    is_flag=False,
    flag_value=f"{page.HOST}:{page.PORT}",
    metavar="[ADDRESS]",
    help=f"Serve the page in the browser, by default at {page.HOST}:{page.PORT}.",
)
@option("--metrics", metavar="[HOST:]PORT", help="Answer Prometheus and readiness probes (/ready) at this address.")
@option("--min-free", metavar="SIZE", help="Wait while a disk has less free space.  [default: as cues run]")
@option(
    "--schedule",
    metavar="CRON",
    default="*/15 * * * *",
    show_default=True,
    help="With cron: minute, hour, day, month and weekday of the runs.",
)
@output_options
def deploy(
    kind: str,
    graph: str,
    store: str | None,
    user: str | None,
    python: str | None,
    workers: str | None,
    ui: tuple[str, int] | None,
    metrics: str | None,
    min_free: str | None,
    schedule: str,
    output: CommandOutput,
) -> None:
    """Print a text that deploys a graph; nothing is written or started.

    KIND is systemd (a unit), docker (a Dockerfile), compose, cron (a file for /etc/cron.d) or kubernetes (a
    StatefulSet). The text fits the graph: its store, the ports of its webhooks, the packages that it needs, and the
    time that it needs to end, by step_s and timeout_s of its processors. Comments in the text say why a line is there,
    and whether another kind would fit better. Read it, change what your machine needs, and keep it with your code.

    \b
      cues deploy systemd graph.py --user flights > flights.service
      cues deploy systemd graph.py --metrics 9464 --ui
      cues deploy docker graph.py --metrics 9464 > Dockerfile
      cues deploy compose graph.py --metrics 9464 > compose.yaml
      cues deploy cron graph.py --schedule '0 * * * *'
      cues deploy kubernetes graph.py --metrics 9464 --ui > flights.yaml

    systemd and cron run it on this machine: a user that does not exist here, or that may not execute the Python, read
    the graph file or write the store, is a warning on stderr.

    A graph whose sources end is run by cron, any other one is a service. In containers the stores are on a volume at
    /data, whatever --store is. docs/how-to/deploy.md is about backups, upgrades, logs and alerts too.
    """
    if not graphfile.is_file(graph):
        raise WrongUsage(f"{graph} is not a graph file.", f"cues deploy {quoted(kind)} graph.py")
    if len(schedule.split()) != 5 and not schedule.startswith("@"):
        raise WrongUsage(f"--schedule {schedule!r} does not have five fields.", "give one such as '*/15 * * * *'.")
    size_of(min_free)
    RunRequest("embedded", workers=workers).engine_options(graph)
    at = None
    if metrics is not None:
        from cues.tools import exporter

        at = exporter.parse(metrics)
    if any(given is not None and given[1] == 0 for given in (at, ui)):
        raise WrongUsage("Port 0 is another one in each run.", "give a port, such as --metrics 9464 or --ui 8420.")
    facts = Deployment.of(
        graphfile.load(graph),
        store=store if options.given("store") else None,
        user=user,
        python=python,
        workers=workers,
        ui=ui,
        metrics=at,
        min_free=min_free,
    )
    text = units.KINDS[kind](facts, schedule)
    for doubt in facts.doubts() if kind in units.LOCAL else ():
        options.note(f"Warning: {doubt}")
    if output.form == "json":
        output.rows([{"kind": kind, "graph": facts.id, "text": text}], ())
    else:
        out(text, end="")
