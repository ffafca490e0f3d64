"""Facts of a graph that decide how it is deployed: sources that end, ports, times, packages, command lines.

    facts = Deployment.of(file, store=None, workers=None, ui=None, metrics=None, min_free=None, user=None, python=None)
    facts.command()       the command line on this machine
    facts.contained()     the same in a container, whose volume is at /data

Nothing is opened or started. A graph is loaded as by ``cues show``.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import pwd
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cues.base.data import dataclass
from cues.graphs.graphfile import GraphFile, split
from cues.graphs.plan import Plan
from cues.graphs.schedules import Schedule
from cues.operate.target import store_of
from cues.tools import doctor

if TYPE_CHECKING:
    from cues.graphs.processor import Node

DRAIN_S: Final = 20
"""The shortest limit of a drain: most drains end in less than a second."""
STOP_S: Final = 40
"""Seconds after a drain: 30 for the steps under way, and 10 to close stores, page and metrics."""
VOLUME: Final = "/data"
"""The directory of the stores in a container."""

_EXTRAS: Final = {
    "cronsim": "time", "datasketches": "windows", "duckdb": "sql", "fsspec": "files", "jsonschema": "schemas",
    "numpy": "files", "pyarrow": "files", "sqlalchemy": "sql",
}  # fmt: skip
"""The extra that brings a package, for packages that a graph file imports."""

_READS: Final = ("os.environ.get", "environ.get", "os.getenv", "getenv")


@dataclass(frozen=True)
class Hook:
    """A webhook source: the name of the source, and its address."""

    name: str
    host: str
    port: int
    path: str


@dataclass(frozen=True)
class Deployment:
    """A graph, and how it is to be run."""

    id: str
    path: Path
    """The graph file, absolute."""
    target: str
    """The name of the graph after the path of the file: ``""`` or ``":name"``."""
    store: Path
    others: tuple[str, ...]
    """The stores of queues that have a path of their own."""
    hooks: tuple[Hook, ...]
    endless: tuple[str, ...]
    """The sources that do not end, by what their declarations say."""
    fed: tuple[str, ...]
    """The queues that are written from outside."""
    drain_s: int
    extras: tuple[str, ...]
    variables: tuple[str, ...]
    """The variables of the environment that the graph file reads by name; other files are not looked at."""
    user: str
    python: str
    workers: str | None
    ui: tuple[str, int] | None
    metrics: tuple[str, int] | None
    min_free: str | None
    network: str | None
    """The type of the file system of the store on this machine, if another machine serves it."""

    @staticmethod
    def of(
        file: GraphFile,
        *,
        store: str | None = None,
        user: str | None = None,
        python: str | None = None,
        workers: str | None = None,
        ui: tuple[str, int] | None = None,
        metrics: tuple[str, int] | None = None,
        min_free: str | None = None,
    ) -> Deployment:
        """Find the facts of a graph; the other arguments are those of ``cues run``, and the user that runs it."""
        plan = file.graph.plan()
        _, name, call = split(file.target)
        others = {os.path.abspath(file.graph.place(o.path)) for o in plan.queues.values() if o.path is not None}
        place = Path(os.path.abspath(store_of(file, store)))
        sources = [node for node in plan.running if node.kind == "source"]
        return Deployment(
            id=plan.id,
            path=file.path.resolve(),
            target=f":{name}{call}" if name else "",
            store=place,
            others=tuple(sorted(others)),
            hooks=tuple(hook for node in sources if (hook := _hook(node)) is not None),
            endless=tuple(node.name for node in sources if not ends(node.fn)),
            fed=plan.fed,
            drain_s=drain_of(plan),
            extras=_extras(plan, file.path, ui is not None, metrics is not None),
            variables=_variables(file.path),
            user=user or _user(),
            python=python or sys.executable,
            workers=workers,
            ui=ui,
            metrics=metrics,
            min_free=min_free,
            network=_network(place),
        )

    @property
    def name(self) -> str:
        """The name of the service: small letters, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", self.id.lower()).strip("-") or "graph"

    @property
    def environment(self) -> str:
        """The file with the variables of the graph, lines ``NAME=value``."""
        return f"/etc/{self.name}.env"

    @property
    def finite(self) -> bool:
        """True if a run ends by itself."""
        return not self.endless and not self.fed

    @property
    def stop_s(self) -> int:
        """Seconds after SIGTERM within which a run has ended."""
        return self.drain_s + STOP_S

    @property
    def inside(self) -> str:
        """The directory of the store in a container."""
        return f"{VOLUME}/{self.name}"

    def command(self) -> list[str]:
        """The command line on this machine, as a service."""
        run = [self.python, "-m", "cues", "run", f"{self.path}{self.target}", "--store", str(self.store)]
        return [*run, *self._options(self.ui, self.metrics)]

    def doubts(self) -> list[str]:
        """Return what would keep the user from the run on this machine, by its users and the modes of files alone."""
        try:
            user = pwd.getpwuid(int(self.user)) if self.user.isdecimal() else pwd.getpwnam(self.user)
        except (KeyError, OverflowError):
            return [f"This machine has no user {self.user}."]
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        python = Path(shutil.which(self.python) or self.python)
        store = next(part for part in (self.store, *self.store.parents) if os.path.exists(part))
        wanted = ((python, os.X_OK, "execute"), (self.path, os.R_OK, "read"), (store, os.W_OK, "write in"))
        return [
            f"The user {self.user} cannot {verb} {path}: {reason}."
            for path, mode, verb in wanted
            if (reason := _barrier(path, mode, user.pw_uid, groups)) is not None
        ]

    def contained(self) -> list[str]:
        """The command line in a container, where the other containers and the host reach the ports."""
        ui, metrics = ((at and ("0.0.0.0", at[1])) for at in (self.ui, self.metrics))
        run = ["cues", "run", f"{self.path.name}{self.target}", "--store", self.inside]
        return [*run, *self._options(ui, metrics)]

    def scheduled(self) -> list[str]:
        """The command line on this machine for a run that is started again and again."""
        words = self.command()
        at = words.index("--drain")
        idle = ["--idle-exit", "5"] if self.fed and not self.endless else []
        return [*words[:at], "--quiet", *idle, *words[at + 2 :]]

    def _options(self, ui: tuple[str, int] | None, metrics: tuple[str, int] | None) -> list[str]:
        words = ["--drain", str(self.drain_s)]
        for option, value in (
            ("--workers", self.workers),
            ("--min-free", self.min_free),
            ("--ui", address(ui)),
            ("--metrics", address(metrics)),
        ):
            words += [option, value] if value is not None else []
        return words

    @property
    def ports(self) -> dict[int, str]:
        """The ports that a run listens at, with their names."""
        found = {hook.port: hook.name for hook in self.hooks if hook.port}
        for name, at in (("page", self.ui), ("metrics", self.metrics)):
            if at is not None:
                found[at[1]] = name
        return found


def address(at: tuple[str, int] | None) -> str | None:
    """The text of a host and a port."""
    if at is None:
        return None
    return f"[{at[0]}]:{at[1]}" if ":" in at[0] else f"{at[0]}:{at[1]}"


def _barrier(path: Path, mode: int, uid: int, groups: list[int]) -> str | None:
    """Return why a user cannot use a path; None if nothing is known. ``mode`` is that of :func:`os.access`."""
    path = Path(os.path.abspath(path))
    ways = dict.fromkeys([path, path.resolve()])  # a virtual environment links to its Python: both ways must be open
    for step, bit in [*((step, os.X_OK) for way in ways for step in reversed(way.parents)), (path, mode)]:
        try:
            about = step.stat()
        except FileNotFoundError:
            return f"{step} is missing"
        except OSError:
            return None  # this process may not look there
        shift = 6 if about.st_uid == uid else 3 if about.st_gid in groups else 0
        if uid and not about.st_mode >> shift & bit:
            return f"the mode of {step} is {about.st_mode & 0o777:o}"
    return None


def drain_of(plan: Plan) -> int:
    """The limit of a drain in seconds: two steps of each processor, of ``step_s`` and one call of ``timeout_s``."""
    steps = sum((node.options.step_s or 0) + (node.options.timeout_s or 0) for node in plan.running)
    return max(DRAIN_S, math.ceil(2 * steps))


def ends(fn: Any) -> bool:
    """Return whether a source seems to end by itself, by its options or by the code of a function."""
    if isinstance(fn, Schedule):
        return fn.follow is False
    if hasattr(fn, "pending_max"):  # a webhook
        return False
    if hasattr(fn, "interval_s"):  # polling
        return fn.interval_s is None
    if getattr(fn, "follow", False) or getattr(fn, "watch", False):
        return getattr(fn, "idle_exit_s", None) is not None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        return True
    return not any(_goes_on(node) for node in ast.walk(tree))


def _goes_on(node: ast.AST) -> bool:
    """Return whether this is code of a source without an end: a loop for ever, a count, a look at the drain."""
    if isinstance(node, ast.While):
        leaves = any(isinstance(inner, (ast.Break, ast.Return)) for inner in ast.walk(node))
        return isinstance(node.test, ast.Constant) and bool(node.test.value) and not leaves
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("itertools.count", "count")
    return isinstance(node, ast.Attribute) and node.attr == "stopping"


def _hook(node: Node) -> Hook | None:
    fn: Any = node.fn
    return Hook(node.name, fn.host, fn.port, fn.path) if hasattr(fn, "pending_max") else None


def _extras(plan: Plan, path: Path, ui: bool, metrics: bool) -> tuple[str, ...]:
    """The extras that the graph needs: those of its ready-made processors, and of packages that its file imports."""
    found = {name for name, wanted in (("ui", ui), ("metrics", metrics)) if wanted}
    for part in ast.walk(ast.parse(path.read_bytes())):
        modules = [alias.name for alias in part.names] if isinstance(part, ast.Import) else []
        modules += [part.module or ""] if isinstance(part, ast.ImportFrom) else []
        found |= {_EXTRAS[root] for module in modules if (root := module.partition(".")[0]) in _EXTRAS}
    for node in plan.running:
        found |= set(re.findall(r"^ *Needs: extra `(\w+)`", inspect.getdoc(type(node.fn)) or "", re.M))
    return tuple(sorted(found))


def _variables(path: Path) -> tuple[str, ...]:
    """The names in ``os.environ["NAME"]``, ``os.environ.get("NAME")`` and ``os.getenv("NAME")`` of a file."""
    found = set()
    for part in ast.walk(ast.parse(path.read_bytes())):
        names: list[ast.expr] = []
        if isinstance(part, ast.Subscript) and ast.unparse(part.value) in ("os.environ", "environ"):
            names = [part.slice]
        elif isinstance(part, ast.Call) and ast.unparse(part.func) in _READS:
            names = part.args[:1]
        found |= {name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)}
    return tuple(sorted(found))


def _network(store: Path) -> str | None:
    kind, _ = doctor.file_system(store)
    return kind if doctor.NETWORK.fullmatch(kind) else None


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a number without a name, as in a container
        return str(os.getuid())
