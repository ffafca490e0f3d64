"""``cues run``: run a graph, show its progress, and print a summary at the end.

    main thread     sleeps on an inbox; draws; counts signals
    waiter          wait_done(), then drain() after the first signal
    processors      as in any start of the graph (engine/threads.py)

The first Ctrl-C (or SIGTERM) ends the sources and lets the other processors finish their messages. The second
stops every processor after its current step. The third ends the process at once, which loses nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from cues.base import collector, events
from cues.base.texts import quoted
from cues.cli import options, page
from cues.cli.again import run_again
from cues.cli.options import command, local, option, store_option, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import is_terminal
from cues.cli.progress import Progress, progress_for
from cues.cli.summary import Before, Ending, Summary
from cues.engine import record
from cues.errors import CuesError, DiskLow, Fenced, InvalidArgument, ProcessorStopped
from cues.graphs import graphfile
from cues.graphs.graph import ENGINES
from cues.graphs.graphfile import shown
from cues.graphs.running import Running
from cues.operate.runs import RunRequest
from cues.operate.target import store_of
from cues.overrides import override
from cues.queues.options import size_of
from cues.queues.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from cues.cli.reload import Watcher
    from cues.graphs.plan import Plan
    from cues.tools.exporter import MetricsServer

_STARTS: Final = "The run ends when Spark has started. Ctrl-C again ends at once, which loses nothing.\n"
"""It is printed after a signal during the start, which takes seconds."""
ABORT_WAIT_S: Final = 2.0
"""Seconds for which an abort waits for the steps under way."""


@command()
@click.argument("graph", metavar="GRAPH", shell_complete=options.candidates_of("names"))
@store_option
@option("--idle-exit", type=click.FloatRange(min=0), metavar="SECONDS", help="End after this idle time.")
@option(
    "--fresh",
    is_flag=True,
    help="Delete the store first, and start over; with --queues also the queues and records of this graph.",
)
@option(
    "--accept-topology",
    is_flag=True,
    help="Accept changed inputs and renamed processors; new inputs begin at the start of their queue.",
)
@option(
    "--take-over",
    is_flag=True,
    help="Take the graph from a process that no longer answers; with --queues, from another driver at once.",
)
@option("--durability", type=click.Choice(("disk", "process")), help="Durability of a new store; the default is disk.")
@option(
    "--engine",
    type=click.Choice(tuple(ENGINES)),
    default="embedded",
    show_default=True,
    help="The engine that calls the functions: this process, or Spark's executors.",
)
@option(
    "--workers",
    metavar="N|auto",
    help="The number of processes that run the processors; one that dies is started again.",
)
@option("--master", metavar="URL", help="Spark's cluster.  [default: local[*]]")
@option("--conf", metavar="NAME=VALUE", multiple=True, help="A setting of Spark; can be repeated.")
@option(
    "--backfill",
    is_flag=True,
    help="Process the messages that are on the queues, in large steps, and end. Needs Spark.",
)
@option(
    "--queues",
    metavar="DIR",
    help="A directory that all executors see, for queues and positions: a path, or a URL such as s3://bucket/queues.",
)
@option(
    "--fail-on-errors",
    is_flag=True,
    help="Exit code 1 if messages failed in this run, or if failed messages of earlier runs are unresolved.",
)
@option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Answer Prometheus at this address; without a host only this machine reaches it. Port 0 is a free one.",
)
@click.option(
    "--ui",
    type=page.Address(),
    is_flag=False,
    flag_value=f"{page.HOST}:{page.PORT}",
    metavar="[ADDRESS]",
    help=f"Serve a page in the browser meanwhile, by default at {page.HOST}:{page.PORT} (see cues ui).",
)
@option(
    "--replicate",
    metavar="DIR",
    help="Keep a copy of the stores in this directory (see cues follow); at the end it has every commit.",
)
@option(
    "--max-lag",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="With --replicate: warn when the copy is further behind than this.",
)
@option(
    "--min-free",
    metavar="SIZE",
    help="Wait while the disk of a store has less free space: 500MB, 0 for never.  [default: 1 %, 64 MiB to 1 GiB]",
)
@option(
    "--gc",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=collector.DEFAULT,
    show_default=True,
    metavar="COUNT",
    help="Look for garbage with cycles after this number of new objects; 0 leaves Python's own settings.",
)
@option(
    "--drain",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="After the first Ctrl-C or SIGTERM finish messages for at most this time, then stop after the current steps.",
)
@option("--reload", is_flag=True, help="When the graph file or an imported local module changes, start anew.")
@option("--dry-run", is_flag=True, help="Check the graph, print what would run where, and start nothing.")
@option("--quiet", "-q", is_flag=True, help="Print warnings and errors only, no progress.")
@option("--verbose", "-v", is_flag=True, help="Also print where each processor starts, and why.")
@yes_option
@output_options
def run(
    graph: str,
    store: str | None,
    idle_exit: float | None,
    fresh: bool,
    accept_topology: bool,
    take_over: bool,
    durability: str | None,
    engine: str,
    workers: str | None,
    master: str | None,
    conf: tuple[str, ...],
    backfill: bool,
    queues: str | None,
    fail_on_errors: bool,
    metrics: str | None,
    ui: tuple[str, int] | None,
    replicate: str | None,
    max_lag: float,
    min_free: str | None,
    gc: int,
    drain: float | None,
    reload: bool,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    yes: bool,
    output: CommandOutput,
) -> int:
    """Run a graph until every source has ended and every queue is drained.

    A graph with a source that does not end, or that is fed by `cues send`, runs until Ctrl-C. Ctrl-C lets the
    processors finish the messages that have arrived; a second Ctrl-C stops them after their current steps. A run
    may be killed at any instant: the next run continues after the last commit. Nothing is lost, and nothing is
    committed twice. A sink without checkpoint= may repeat its last call.

    \b
      cues run graph.py                    the only graph of the file
      cues run graph.py:orders             the one of that name
      cues run 'graph.py:make("x")'        the one that a function returns
      cues run graph.py --idle-exit 5      a graph fed by send, until it was idle for 5 s
      cues run graph.py --fresh --yes      delete the store, and start over
      cues run graph.py --metrics 9464     with metrics for Prometheus at http://127.0.0.1:9464/metrics
      cues run graph.py --workers auto     in worker processes, started again when they die
      cues run graph.py --replicate /mnt/other/flights    with a copy on another disk, at most --max-lag behind
      cues run graph.py --ui               with a page in the browser
      cues run graph.py --drain 30         as a service: end in time when it is stopped
      cues run graph.py --reload           while you write it: each save starts the new code
      cues run graph.py --engine spark     Spark's executors call the functions; queues and positions stay in the store
      cues run graph.py --engine spark --backfill
      cues run graph.py --engine spark --conf spark.executor.memory=2g --conf spark.cores.max=8
      cues run graph.py --engine spark --queues s3://bucket/flights    queues and positions are in this directory
      cues run graph.py --engine spark --dry-run    which functions run on executors, and which in the driver

    Progress is printed on stderr: a table on a terminal; elsewhere a line for what happens, and one a minute when
    something moved; with --json one object a second. The summary is printed on stdout. While something outside is
    away (a database, an API, space on the disk), the processors that need it wait, and the others go on; one line
    says so when it begins, and one when it ends. The exit code is 6 if an error stopped a processor (a start
    continues there), 3 if the disk had less than --min-free at the start, 7 if another process runs the graph, and
    130 after Ctrl-C. With --fail-on-errors it is also 1 if messages failed, if error queues have failed messages of
    earlier runs, or if a processor is paused.
    """
    if not graphfile.is_file(graph):
        raise options.WrongUsage(f"{graph} is not a graph file.", "cues run graph.py")
    request = RunRequest(engine, master, queues, backfill, workers, fresh, idle_exit, replicate, reload, dry_run, conf)
    if ui is not None:
        page.need()
    least = size_of(min_free)
    watcher = _watcher()
    if reload and watcher is None:
        from cues.cli import reload as reloading

        say = (lambda text: None) if quiet else progress_for(graph, quiet=quiet, verbose=False).say
        return reloading.watch(click.get_current_context().find_root().obj, graph, say)
    if watcher is not None:
        fresh = fresh and not watcher.started_before
        watcher.follow_imports(graph)
    click.get_current_context().call_on_close(collector.restore)
    collector.choose(gc)
    file = graphfile.load(graph)
    request.require()  # before --fresh deletes anything
    if dry_run:
        from cues.cli.show import draw_plan

        draw_plan(file.graph.plan(), request.places(file.graph.plan()), "text", output, request.shown_settings())
        return 0
    chosen = store if options.given("store") else None
    path = store_of(file, chosen)
    plan = file.graph.plan()
    server = _metrics_server(metrics, path, plan)  # before --fresh deletes anything: the port may be in use
    elsewhere = {name: file.graph.place(o.path) for name, o in plan.queues.items() if o.path is not None}
    if fresh:
        from cues.operate import fresh as fresh_start

        is_open = isinstance(file.graph.store, Store) and not chosen
        with fresh_start.shared_files(queues, file.graph.id) as shared:
            ask = functools.partial(options.confirm, question="Delete it?", yes=yes)
            fresh_start.clear(path, ask, is_open, elsewhere, fresh_start.filled(plan, path), shared)
    if durability is not None:
        file.graph.durability = durability
    if engine == "spark" and not quiet and is_terminal("stderr"):
        # A session takes longer to start than most runs of the embedded engine.
        options.note(f"{file.graph.id}: starting Spark, which takes some 10 s.")
    engine_options = request.engine_options(file.target)
    declared = file.graph.store is not None and chosen is None
    before, is_new = Before.of(path, elsewhere), not (path / "data.mdb").exists()
    progress = progress_for(file.graph.id, quiet=quiet, verbose=verbose, json=output.form == "json")
    noted = request.noted(path, file.graph.id)
    with (
        server or contextlib.nullcontext(),
        progress,
        _logs_to(progress),
        contextlib.ExitStack() as pages,
        _Signals(watcher, _STARTS if engine == "spark" else "") as signals,
    ):
        if noted is not None:
            text = (
                f"the last run had its queues in {noted.directory}. This one has them in the store"
                f" {shown(path)}: its streams and sinks do not continue there, but after their last steps in the"
                f" store, or at the start. To continue: {run_again(graph, noted.directory, chosen)}"
            )
            progress.event(events.Event("", text, logging.WARNING))
        running = file.graph.start(
            store=None if declared else path,
            accept_topology=accept_topology,
            take_over=take_over,
            listeners=(progress.event,),
            min_free=least,
            **engine_options,
        )
        collector.settle()
        if watcher is not None:
            watcher.started()
        if is_new:
            progress.event(events.Placed(file.graph.id, f"made the store {shown(running.store.path)}"))
        if server is not None:
            server.source = running
            progress.event(events.Placed("", f"metrics: {server.url}", url=server.url))
        if noted is not None:
            record.note_queues(str(path), file.graph.id, None)
        copy = None
        if replicate is not None:
            from cues.cli.replicate import Replication

            try:
                copy = Replication(running.store.directory, str(local(replicate)), max_lag, progress.say)
            except BaseException:
                running.close()
                raise
        if ui is not None:
            pages.enter_context(page.of_run(file.graph, request.location(path), ui, progress.say))
        session = _Session(running, progress, signals, idle_exit, drain, Summary(running, graph, before, chosen))
        _notify("READY=1")
        try:
            ending = session.watch()
        finally:
            is_copied = copy is None or copy.close()
    session.summary.show(output, ending, (lambda text: None) if quiet else progress.say)
    if ending == "stopped":
        session.report_stops()
    low = any(isinstance(error, DiskLow) for error in session.running.stopped)
    code = (
        options.LOW_DISK if low else {"done": 0, "idle": 0, "stopped": options.STOPPED}.get(ending, options.INTERRUPTED)
    )
    left = session.summary.failed or session.summary.unresolved or session.summary.paused
    if fail_on_errors and not code and left:
        code = options.FAILED
    if not is_copied:
        once = f"cues follow {quoted(path)} {quoted(replicate)} --once"
        options.note(f"The copy in {replicate} does not have the last commits: {once}")
        code = code or options.FAILED
    if session.stuck:
        # A user's function does not return. Nothing is lost: its step did not commit.
        os._exit(options.finish(code))
    return code


def _watcher() -> Watcher | None:
    """The watcher of ``--reload`` that started this process; None in a process that the user started."""
    if options.WATCHER not in os.environ:
        return None
    from cues.cli.reload import watcher

    return watcher()


def _notify(state: str) -> None:
    """Tell the service manager, if one started this process and wants to know (a unit with ``Type=notify``)."""
    if "NOTIFY_SOCKET" in os.environ:
        from cues.base import service

        service.notify(state)


def _metrics_server(address: str | None, path: Path, plan: Plan) -> MetricsServer | None:
    """The server of ``--metrics``, bound but without a source; None without the option."""
    if address is None:
        return None
    from cues.tools.exporter import MetricsServer

    try:
        return MetricsServer(address)
    except InvalidArgument:
        # A second run of a service: the first one has its port. A unit starts a run that failed again and again, and
        # not one of a graph that runs already.
        from cues.operate.processors import refuse_running

        refuse_running(path, plan)
        raise


class _Session:
    """One run, from its start to its end."""

    def __init__(
        self,
        running: Running,
        progress: Progress,
        signals: _Signals,
        idle_exit_s: float | None,
        drain_s: float | None,
        summary: Summary,
    ) -> None:
        self.running = running
        self.progress = progress
        self.idle_exit_s = idle_exit_s
        self.drain_s = drain_s
        self.summary = summary
        self.stuck = False
        self._inbox = signals.inbox
        self._signals = 0
        signals.most = 2

    def watch(self) -> Ending:
        """Wait for the end of the run, and close everything."""
        try:
            ending = self._watch()
        finally:
            _notify("STOPPING=1")
            self.summary.finish()
            self.running.close(ABORT_WAIT_S if self._signals > 1 else 30.0)
        self.stuck = self.running.stuck
        return ending

    def _watch(self) -> Ending:
        self._in_background("done", lambda: self.running.wait_done(self.idle_exit_s))
        stopped = False
        while True:
            news, value = self._next()
            if news == "tick":
                self.progress.tick(self.running)
            elif news == "signal":
                self._signals += 1
                if self._signals == 1 and not stopped:
                    self.progress.say("Draining: the sources end, the other processors finish. Ctrl-C again stops now.")
                    _notify("STOPPING=1")
                    self._in_background("drained", self.running.drain)
                    self._later("late", self.drain_s)
                else:
                    self._signals = max(2, self._signals)
                    self.progress.say(
                        "Stopping after the steps under way. Ctrl-C again ends at once, which loses nothing."
                    )
                    self.running.halt()
                    return "stopped" if stopped else "aborted"
            elif news == "late":
                self.progress.say(f"Stopping after the steps under way: the drain took {self.drain_s:g} s.")
                self.running.halt()
                return "aborted"
            elif news == "failed":
                if not isinstance(value, (ProcessorStopped, Fenced)) and not self.running.stopped:
                    raise value
                if not stopped:
                    # The others finish their messages, so that a start after the repair has little to do.
                    stopped = True
                    self._in_background("drained", self.running.drain)
            elif news == "drained":
                return "stopped" if stopped or self.running.stopped else "drained"
            elif news == "done" and not self._signals and not stopped:
                return "done" if self.idle_exit_s is None or not self.running.plan.fed else "idle"

    def _next(self) -> tuple[str, Any]:
        try:
            return self._inbox.get(timeout=self.progress.interval_s)
        except queue.Empty:
            return "tick", None

    def _later(self, news: str, after_s: float | None) -> None:
        """Put news into the inbox after some seconds; None: never."""
        if after_s is not None:
            timer = threading.Timer(after_s, self._inbox.put, ((news, None),))
            timer.daemon = True
            timer.start()

    def _in_background(self, news: str, work: Callable[[], Any]) -> None:
        def call() -> None:
            try:
                self._inbox.put((news, work()))
            except BaseException as error:
                self._inbox.put(("failed", error))

        threading.Thread(target=call, name=f"cues {news}", daemon=True).start()

    def report_stops(self) -> None:
        """Print the errors that stopped processors: the user's traceback, and one line for each."""
        for error in self.running.stopped:
            cause = error.__cause__
            trace = getattr(error, "trace", "")  # of a worker
            if not trace and cause is not None and not isinstance(cause, CuesError):
                trace = graphfile.users_trace(cause)
            message = getattr(error, "message", str(error))
            options.report(message, getattr(error, "hint", ""), before=trace)


class _Signals:
    """Puts SIGINT and SIGTERM into an inbox, inside the block; after the last allowed one, the process ends at once.

    They are caught before the graph is started, so that a signal during the start drains it. A run that is watched
    gets SIGTERM from its watcher for each Ctrl-C.
    """

    def __init__(self, watcher: Watcher | None = None, starts: str = "") -> None:
        """``starts`` is printed at the first signal during the start."""
        self._starts = starts
        self._numbers = (signal.SIGTERM,) if watcher is not None else (signal.SIGINT, signal.SIGTERM)
        # SimpleQueue.put may be called from a signal handler; Event.set and Condition may not.
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.most = 1
        """The number of signals that are put into the inbox: during the start, the second ends the process."""
        self._count = 0
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in self._numbers:
            self._kept[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        self._count += 1
        if self._count > self.most:
            os._exit(options.INTERRUPTED)
        if self.most == 1:
            os.write(2, self._starts.encode())  # not print(), which may be in the middle of a line of this thread
        self.inbox.put(("signal", number))

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _logs_to(progress: Progress) -> Iterator[None]:
    """Sends log records (a user's logging.warning) to the progress display, unless the file configured logging."""
    handler = _Handler(progress)
    if not logging.root.handlers:
        logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self._progress = progress

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "cues" and record.module == "events":
            return  # the progress display has it as an event
        self._progress.log(record.levelname.lower(), self.format(record))
