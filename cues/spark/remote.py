"""A step's function on Spark: executors call it over parts of the step's range, the driver commits.

    driver                                  executors
    takes a range (delivery.py)
    cuts it into parts, one a core    ──▶   read their part from the store, call the function, encode
    puts what came of them together   ◀──   outputs with the offsets of their messages, failures
    commits (delivery.py)

Everything durable happens in the driver, by the same code as in the embedded engine: a step is what it
was, with the same hash, and an executor that dies has done nothing that counts; Spark runs its part
again. Within a part messages are called one after another, by the same :class:`Runner`.

Not guaranteed: that a function is called once. Whatever has effects outside, or needs the processor's
state, therefore stays in the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import xxhash

from cues import batch as batches
from cues import events, faults
from cues.errors import CuesError, Diverged, Fenced, GraphError, ProcessorStopped, ReturnError, Unsupported
from cues.failure import Failure, words
from cues.hashes import Hasher
from cues.imperative import Imperative
from cues.options import QueueOptions
from cues.process import Process
from cues.processor import FRAME, Node
from cues.results import Output, Results
from cues.runner import Interrupted, Runner
from cues.spark.place import Site
from cues.spark.session import in_short
from cues.state import Layer, Table
from cues.store import Store
from cues.taking import Input, Taken

STEP_MESSAGES: Final = 50_000
"""Most messages of a step of a message function: a job costs some 50 ms, whatever it does."""
JOBS_MAX: Final = 64
"""Processors whose functions a worker process keeps unpickled."""


class Piece(NamedTuple):
    """What a part takes from one input: the messages from ``start`` on."""

    binding: str
    tailer: str
    site: Site
    queue: str
    identity: bytes
    start: int


class Part(NamedTuple):
    """A part of a step's range."""

    offset: int
    """Of its first message in the step."""
    messages: int
    pieces: tuple[Piece, ...]
    hash: bytes | None
    """The step's, where the part is all of it (batch functions)."""


@dataclass(frozen=True)
class Job:
    """What does not change from step to step."""

    node: Node
    system: Any
    generation: int
    epoch: int
    store_id: str
    options: dict[str, QueueOptions]
    """By output binding."""


@dataclass
class Told:
    """What an executor says of a part, whatever came of it."""

    retries: int = 0
    declined: str = ""
    """"state": the function asked for the processor's, which is the driver's; "purged": the messages are gone,
    and the driver has a copy; "failures": more than an answer should hold. Nothing else counts then."""
    fatal: BaseException | None = None


Answering = TypeVar("Answering", bound=Told)


@dataclass
class Answer(Told):
    """What came of a part; offsets are the part's own."""

    outputs: dict[str, tuple[list[bytes | dict[str, Any]], list[int] | None]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    ran: int = 0


# --- in an executor -----------------------------------------------------------------------------


class NeedsState(BaseException):
    """No ``Exception``: the user's own handlers, and retries, are not to take it for a failure."""


class _RemoteProcess(Process):
    """``process`` without state."""

    def _states(self) -> Layer:
        raise NeedsState


_jobs: dict[bytes, Job] = {}
_stores: dict[tuple[int, Site, tuple[int, int]], Store] = {}
"""By process (workers are forked), place, and device and inode."""


def run_part(packed: bytes, part: Part) -> Answer:
    """Call the function over a part."""
    job = job_of(packed)
    try:
        taken = _take(part)
    except (Diverged, Unsupported) as error:
        return Answer(fatal=error)
    if taken is None:
        return Answer(declined="purged")
    runner, counters = runner_of(job, part)
    try:
        results = runner.run(taken)
    except NeedsState:
        return Answer(declined="state")
    except (Fenced, Diverged) as error:
        return Answer(fatal=error)
    finally:
        runner.close()
    answer = _encoded(results, job.options)
    answer.retries = counters.retries
    return answer


def job_of(packed: bytes) -> Job:
    """The job, unpickled once a process."""
    key = xxhash.xxh3_128_digest(packed)
    job = _jobs.get(key)
    if job is None:
        if len(_jobs) >= JOBS_MAX:
            _jobs.clear()
        job = _jobs[key] = pickle.loads(packed)
    return job


def runner_of(job: Job, part: Part) -> tuple[Runner, events.Counters]:
    """What calls the job's function, and what it counts."""
    counters = events.Counters()
    process = _RemoteProcess(
        job.node,
        job.system,
        Hasher(job.node.id, job.generation),
        job.epoch,
        job.store_id,
        None,
        lambda: False,
        Imperative(job.node.id, {}, {}),
    )
    state = Table(_store(part.pieces[0].site), job.node.id)  # not looked into
    options_of = job.options.__getitem__
    runner = Runner(job.node, process, state, _pause, lambda event: None, counters, options_of, process._imperative)
    return runner, counters


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def inputs_of(part: Part) -> list[Input]:
    """The inputs of a part, standing at its first message. Raises :class:`Diverged` and :class:`Unsupported`."""
    inputs = []
    for piece in part.pieces:
        one = Input(piece.binding, piece.tailer, _store(piece.site).queue(piece.queue))
        one.identity = piece.identity
        row = one.queue.row()
        if row.identity != piece.identity:
            raise Diverged(
                f"The queue {piece.queue!r} of {piece.site.path} is another one here than in the driver.",
                "a store that driver and executors share.",
                processor=piece.tailer.rpartition(".")[0],
            )
        one.go(piece.start)
        inputs.append(one)
    return inputs


def _take(part: Part) -> Taken | None:
    """The messages of a part as they lie on the queues; None where some were purged since the driver took them."""
    slices = []
    for piece, one in zip(part.pieces, inputs_of(part)):
        while one.ahead < part.messages:
            before = one.ahead
            one.fill(part.messages)
            if one.ahead == before or one.index != piece.start:
                return None
        slices.append(one.take(part.messages))
    return Taken(slices, part.messages, part.hash)


def _store(site: Site) -> Store:
    key = os.getpid(), site, site.inode()
    if key not in _stores:
        _stores[key] = site.open()
    return _stores[key]


def _look(sites: Sequence[Site]) -> Unsupported | None:
    """Why this process cannot read the stores; None where it can."""
    try:
        for site in sites:
            _store(site)
    except Unsupported as error:
        return error
    return None


def _encoded(results: Results, options: dict[str, QueueOptions]) -> Answer:
    """What came of the part as bytes; a message that cannot be encoded is the failure of the one it came from."""
    while True:
        answer = Answer(failures=dict(results.failures), ran=results.ran)
        try:
            for binding, output in results.outputs.items():
                answer.outputs[binding] = (_packed(output, options[binding]), output.origins)
        except _Unwritable as found:
            results.fail(found.offset, Failure(found.error, 1))
            continue
        answer.failures = {offset: travelling(failure) for offset, failure in answer.failures.items()}
        return answer


class _Unwritable(Exception):
    def __init__(self, offset: int, error: Exception) -> None:
        super().__init__(words(error))
        self.offset = offset
        self.error = error


def _packed(output: Output, options: QueueOptions) -> list[bytes | dict[str, Any]]:
    packed: list[bytes | dict[str, Any]] = []
    for at, item in enumerate(output.items):
        if isinstance(item, bytes):
            packed.append(item)
            continue
        try:
            packed.append(batches.pack_one(item, options.max_message_bytes, options.strips))
        except CuesError as error:
            raise _Unwritable(at if output.origins is None else output.origins[at], error) from error
    return packed


def travelling(failure: Failure) -> Failure:
    """The failure with its account as plain data, and an exception that can be pickled."""
    account = failure.account()
    error: BaseException = failure.error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(failure.error).__name__}: {words(failure.error)}")
    return Failure(error, failure.attempts, account)


# --- in the driver ------------------------------------------------------------------------------


class SparkRunner(Runner):
    """Calls a function on the executors of a SparkSession, where that changes nothing but the place."""

    def __init__(self, session: Any, system: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._session = session
        self._context = session.sparkContext
        self._system = system
        self._group = f"cues {self._node.id} {id(self)}"
        self._local = why_local(self._node) is not None
        self._closed = False
        self._sites: dict[Store, Site] = {}
        if not self._local and not self._node.options.batch:
            self.step_messages = max(self.step_messages, STEP_MESSAGES)
        self._job: tuple[tuple[int, int], bytes] | None = None
        """Generation and epoch, and the job packed under them."""

    def run(self, taken: Taken) -> Results:
        if self._local:
            return super().run(taken)
        try:
            found = self._on_executors(taken)
        except BaseException:
            self.forget()
            raise
        return super().run(taken) if found is None else found

    def close(self) -> None:
        """Let a step under way go: executors end what they call."""
        self._closed = True
        super().close()
        if not self._local:
            with contextlib.suppress(Exception):  # the session was stopped, and its jobs with it
                self._context.cancelJobGroup(self._group)

    def _call_batch(self, taken: Taken) -> Any:
        """Of a frame, its DataFrame of the step's range; the rows of what it returns are messages."""
        if self._node.options.batch != FRAME:
            return super()._call_batch(taken)
        from cues.spark.columns import Encoder

        (piece,) = taken.slices
        queue = piece.one.queue
        reader = self._session.read.format("cues")
        reader = reader.option("startingPosition", piece.start).option("endingPosition", piece.stop)
        if self._node.options.fields:
            reader = reader.option("fields", self._node.options.fields)
        given = reader.load(f"{os.path.abspath(queue.store.path)}#{queue.id}")
        faults.point("function.before")
        result = self._invoke(taken, [given], self._process)
        if not hasattr(result, "toArrow"):
            raise ReturnError(
                f"{self._node.id} returned {type(result).__name__}; a frame returns a DataFrame.", "the DataFrame."
            )
        encoder = Encoder(result.schema)
        found = [message for rows in result.toArrow().to_batches() for message in encoder.messages(rows)]
        faults.point("function.after")
        return found

    def _on_executors(self, taken: Taken) -> Results | None:
        """What came of the step; None where the driver has to do it."""
        count = 1 if self._node.options.batch else min(taken.count, self.parallelism)
        parts = self.cut(taken, [taken.count * number // count for number in range(count + 1)])
        answers = self.gather(_Call(self.packed_job()), parts)
        return None if answers is None else together(self._bindings, parts, answers)

    @property
    def on_executors(self) -> bool:
        """Whether executors call the function, a part of the messages each."""
        return not self._local and self._node.options.batch != FRAME

    @property
    def parallelism(self) -> int:
        """Tasks that run at once."""
        return int(self._context.defaultParallelism)

    def gather(self, call: Callable[[Part], Answering], parts: list[Part]) -> list[Answering] | None:
        """What executors say of the parts; None where one declined, and the driver has to do it.

        Raises what was fatal to one, :class:`ProcessorStopped` where Spark could not do it, and
        :class:`Interrupted` where this runner was closed meanwhile.
        """
        count = sum(part.messages for part in parts)
        self._context.setJobGroup(self._group, f"{self._node.id}: {count} messages", True)
        try:
            answers: list[Answering] = self._context.parallelize(parts, len(parts)).map(call).collect()
        except Exception as error:
            if self._closed:
                raise Interrupted from error
            raise ProcessorStopped(
                f"{self._node.id} stopped: Spark could not do its step of {count} messages: {in_short(error)}.",
                "start again when the cause is gone; it goes on where it stands.",
                processor=self._node.id,
            ) from None
        for answer in answers:
            self._counters.retries += answer.retries
            if answer.fatal is not None:
                raise answer.fatal
            if answer.declined == "state":
                self._local = True
                self._emit(
                    events.Event(
                        self._node.id,
                        "uses the processor's state, which is the driver's: it runs there, one call after another",
                    )
                )
                return None
        return None if any(answer.declined for answer in answers) else answers

    def cut(self, taken: Taken, edges: list[int]) -> list[Part]:
        """The parts of what was taken that begin and end at these offsets."""
        return [
            Part(
                low,
                high - low,
                tuple(
                    Piece(
                        piece.binding,
                        piece.tailer,
                        self._site(piece.one.queue.store),
                        piece.one.queue.id,
                        piece.one.identity,
                        piece.start + low,
                    )
                    for piece in taken.slices
                ),
                taken.hash if len(edges) == 2 else None,
            )
            for low, high in itertools.pairwise(edges)
        ]

    def _site(self, store: Store) -> Site:
        if store not in self._sites:
            self._sites[store] = Site.of(store)
        return self._sites[store]

    def packed_job(self) -> bytes:
        process = self._process
        under = (process._hasher.generation, process._epoch)
        if self._job is None or self._job[0] != under:
            options = {binding: self._options_of(binding) for binding in self._bindings}
            job = Job(self._node, self._system, *under, process._store_id, options)
            self._job = under, pack_job(job)
        return self._job[1]


class _Call:
    """:func:`run_part` with its job, as Spark pickles it."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def __call__(self, part: Part) -> Answer:
        return run_part(self.packed, part)


def require_sight(context: Any, stores: Iterable[Store]) -> None:
    """Raise :class:`Unsupported` where an executor cannot read the stores: a look from as many as there are cores."""
    sites = [Site.of(store) for store in stores]
    cores = int(context.defaultParallelism)
    try:
        found: list[Unsupported | None] = context.parallelize([sites] * cores, cores).map(_look).collect()
    except Exception as error:
        raise Unsupported(
            f"The executors of {context.master} cannot run what is to run there: {in_short(error)}.",
            "the driver's Python and packages on every machine, cues among them.",
        ) from None
    for unseen in found:
        if unseen is not None:
            raise unseen


def why_local(node: Node) -> str | None:
    """Why a processor's function runs in the driver; None where executors call it."""
    if node.kind == "source":
        return "a source's generator is one"
    if node.kind == "sink" or node.side_effects:
        return "its effects outside happen in order"
    if node.at_most_once:
        return "executors repeat what failed"
    if node.options.key is not None:
        return "its state is in the driver's store"
    if node.options.batch == FRAME:
        return "it makes a plan, which executors carry out"
    return None


class Travels(Protocol):
    """What is the same from step to step, in whatever form."""

    @property
    def node(self) -> Node: ...

    @property
    def system(self) -> Any: ...


def pack_job(job: Travels) -> bytes:
    """A job as executors unpickle it; raises :class:`GraphError` naming what cannot travel."""
    from pyspark import cloudpickle

    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    try:
        return dumps(job)
    except Exception:
        require_travel(job.node, job.system)
        raise


def require_travel(node: Node, system: Any) -> None:
    """Raise :class:`GraphError` where something of a processor cannot be sent to executors."""
    from pyspark import cloudpickle

    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    for what, value in (("function", node.fn), ("opts", node.options.opts), ("system", system)):
        try:
            dumps(value)
        except Exception as error:
            raise GraphError(
                f"The {what} of {node.id} cannot be sent to Spark's executors"
                f" ({type(error).__name__}: {words(error)}).",
                "connections and files opened inside the function, not beside it.",
                processor=node.name,
            ) from error


def together(bindings: Iterable[str], parts: Sequence[Part], answers: Sequence[Answer]) -> Results:
    """What came of the parts, as if one call after another had been made."""
    failures = {
        part.offset + offset: failure
        for part, answer in zip(parts, answers)
        for offset, failure in answer.failures.items()
    }
    outputs: dict[str, Output] = {}
    for binding in bindings:
        items: list[Any] = []
        origins: list[int] | None = []
        if not failures and all(answer.outputs[binding][1] is None for answer in answers):
            origins = None
        for part, answer in zip(parts, answers):
            found, came = answer.outputs[binding]
            items += found
            if origins is not None:
                offsets = range(len(found)) if came is None else came
                origins += [part.offset + offset for offset in offsets]
        outputs[binding] = Output(items, origins)
    return Results(outputs, failures, ran=sum(answer.ran for answer in answers))
