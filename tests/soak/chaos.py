"""The processes of a soak, the choices of its operator, and their counts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import cues
from cues import testing
from cues.storage import locks

from . import model
from .graph import PARTITIONS, kept
from .judge import Bounds, Judge
from .measures import Measures
from .model import Place

HERE: Final = Path(__file__).parent
GOLDEN: Final = HERE.parent / "golden"
BEGINNINGS: Final = ("process", "disk", "v1", "v1-seals", "v1-unread", "v1-columns")
"""Beginnings of the store: a durability, or a store of an earlier format."""
MEMBERS: Final = 2
SPARK_EVERY_S: Final = 600
END_S: Final = 600
"""Seconds in which a process must end; the machine may be starved."""
CALM_S: Final = 900
"""The longest time until all messages of a life have come through."""
BACKUPS_MAX: Final = 8
"""Backups in a directory, before another one begins with a whole backup."""


class Wrong(Exception):
    """Something is not as it should be."""


class Soak:
    """One run. ``pace_s`` is the mean time between two actions of the operator, ``rate`` the rows a second."""

    def __init__(
        self, place: Place, seed: int, *, pace_s: float, rate: float, pythons: list[str], begins: str | None = None
    ) -> None:
        self.place = place
        self.chance = random.Random(seed)
        self.pace_s, self.rate = pace_s, rate
        self.pythons = [os.path.abspath(python) for python in pythons] or [sys.executable]
        self.python = self.pythons[0]
        self.began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.decisions: deque[str] = deque(maxlen=60)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.workers = self.chance.randrange(4)
        self.batch = 50
        self.judge = Judge(place)
        self.measures = Measures()
        self.backup_number = 0
        self.spark_at = time.monotonic() + min(SPARK_EVERY_S / 2, 60)
        self.begins = begins or self.chance.choice(BEGINNINGS)
        self.left: dict[str, list[Callable[[], object]]] = {}
        """The actions that are still to come in this round, by the first action of their list."""
        self.disturb_at = 0.0
        self.tell_at = self.began + 60
        self.spark: subprocess.Popen[bytes] | None = None
        self.works = True
        """False while everything is ended on purpose."""
        self.rests = False
        """True while a life ends: nothing is disturbed."""
        place.logs.mkdir(parents=True)
        self.make_stores()

    def make_stores(self) -> None:
        self.place.main.parent.mkdir(exist_ok=True)
        durability = "process"
        if (GOLDEN / self.begins).exists():
            self.place.main.mkdir()
            shutil.copy(GOLDEN / self.begins / "data.mdb", self.place.main)
        else:
            durability = self.begins
            cues.open(self.place.main, durability=durability).close()
        with cues.open(self.place.main) as main, cues.open(self.place.other, durability="process") as other:
            for name in model.PLAIN:
                main.queue(name, retention=kept(name))
            for name in model.SPREAD:
                main.queue(name, partitions=PARTITIONS, key="origin", retention=kept(name))
            for name in ("shipped", "booked"):
                other.queue(name, retention=kept(name))
        with contextlib.closing(sqlite3.connect(self.place.table)) as db:
            db.executescript(model.TABLES)
        # A starved run may start late: its queues would by then have deleted messages, because nobody had read any.
        command = [self.python, "-m", "soak.roles", "register", str(self.place.root), "0", "1"]
        subprocess.run(command, env=self.environment, cwd=self.place.root, check=True, timeout=CALM_S)
        self.note(f"the store begins as {self.begins}")

    def note(self, text: str) -> None:
        """Write down a decision."""
        line = f"{time.monotonic() - self.began:8.1f} {text}"
        self.decisions.append(line)
        with (self.place.root / "decisions").open("a") as file:
            file.write(line + "\n")

    # --- processes --------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("CUES_")},
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONHASHSEED": str(self.chance.randrange(1000)),
            "PYSPARK_PYTHON": sys.executable,
            "SOAK_PLACE": str(self.place.root),
            "SOAK_BATCH": str(self.batch),
        }

    def command(self, *arguments: object) -> list[str]:
        return [self.python, "-c", "from cues.cli import main; main()", *map(str, arguments)]

    def start(self, role: str) -> None:
        if role == "run":
            workers = ["--workers", self.workers] if self.workers else []
            command = self.command("run", "--quiet", *workers, HERE / "graph.py")
        else:
            kind = role.partition("-")[0]
            seed = self.chance.randrange(1 << 30)
            command = [self.python, "-m", "soak.roles", kind, str(self.place.root), str(seed), str(self.rate)]
        with (self.place.logs / role).open("wb") as log:
            self.processes[role] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, cwd=self.place.root, start_new_session=True
            )
        self.counts["processes started"] += 1

    @property
    def roles(self) -> list[str]:
        return ["run", "writer", "publisher", *(f"member-{n}" for n in range(MEMBERS))]

    def tend(self) -> None:
        """Start again those that have ended."""
        if not self.works:
            return
        for role in self.roles:
            process = self.processes.get(role)
            if process is None or process.poll() is not None:
                if process is not None:
                    self.reap(role)
                self.start(role)

    def reap(self, role: str) -> None:
        """Look at the end of a process."""
        process = self.processes.pop(role)
        code = process.wait()
        said = (self.place.logs / role).read_text(errors="replace")[-4000:]
        if role == "run" and code == 7:
            self.counts["starts while its workers were alive"] += 1
            time.sleep(0.2)
        elif code not in (0, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):  # the last before it catches it
            raise Wrong(f"{role} ended with {code}:\n{said}")

    def send(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def everyone(self) -> dict[str, int]:
        """The pids of all processes by name, workers of the run too."""
        found = {role: process.pid for role, process in self.processes.items() if process.poll() is None}
        if "run" in found:
            children = Path(f"/proc/{found['run']}/task/{found['run']}/children")
            with contextlib.suppress(OSError):
                found |= {f"worker-{n}": int(pid) for n, pid in enumerate(children.read_text().split())}
        return found

    def end(self, number: int = signal.SIGTERM) -> None:
        """End all processes."""
        everyone = self.everyone()
        for name, pid in everyone.items():
            self.send(pid, signal.SIGCONT)
            if number == signal.SIGKILL or not name.startswith("worker"):
                self.send(pid, signal.SIGINT if name == "run" and number == signal.SIGTERM else number)
        for role in list(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[role].wait(timeout=END_S)
            if self.processes[role].poll() is None:
                raise Wrong(f"{role} does not end after signal {number}")
            self.reap(role)
        deadline = time.monotonic() + 60
        while any(locks.process_state(pid) not in ("gone", "dead, not reaped") for pid in everyone.values()):
            if time.monotonic() > deadline:
                raise Wrong("a worker outlives its run")
            time.sleep(0.02)

    # --- actions -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Tend the processes, and disturb one when it is time: also while a command runs."""
        self.tend()
        self.reap_query()
        self.tell()
        if self.works and not self.rests and time.monotonic() >= self.disturb_at:
            self.disturb_at = time.monotonic() + self.chance.uniform(0.3, 1.7) * self.pace_s
            self.draw([self.kill, self.kill, self.kill, self.stop, self.stop, self.quit])

    def tell(self) -> None:
        """Print a line of counts each minute."""
        if time.monotonic() >= self.tell_at:
            self.tell_at += 60
            counts = ", ".join(f"{name} {count:,}" for name, count in self.totals().items())
            print(f"{(time.monotonic() - self.began) / 60:5.1f} min: {counts}; MB: {self.measures.last()}", flush=True)

    def draw(self, actions: list[Callable[[], object]]) -> None:
        """Do one action. All come before any of them comes again, so that a short run has each."""
        left = self.left.setdefault(actions[0].__name__, [])
        if not left:
            left += self.chance.sample(actions, len(actions))
        action = left.pop()
        action()
        self.counts[action.__name__.replace("_", " ")] += 1

    def operate(self) -> None:
        """One action of the operator."""
        seeks = [self.seek] * 3
        self.draw([*seeks, self.back_up, self.back_up_and_restore, self.check, self.purge, self.restart])

    def kill(self) -> None:
        name, pid = self.chance.choice(sorted(self.everyone().items()))
        self.note(f"kill -9 {name}")
        self.send(pid, signal.SIGKILL)

    def quit(self) -> None:
        """Ask a process to end."""
        name, pid = self.chance.choice(sorted(self.everyone().items()))
        self.note(f"SIGTERM {name}")
        self.send(pid, signal.SIGTERM)

    def stop(self) -> None:
        name, pid = self.chance.choice(sorted(self.everyone().items()))
        seconds = self.chance.uniform(0.1, 4)
        self.note(f"SIGSTOP {name} for {seconds:.1f} s")
        self.send(pid, signal.SIGSTOP)
        # In a thread: the operator itself may wait for the lock of a process that is stopped.
        timer = threading.Timer(seconds, self.send, (pid, signal.SIGCONT))
        timer.daemon = True
        timer.start()

    def cues(self, *arguments: object, refused: str = "") -> bool:
        """Run a command; False if it is refused with this text. Everything else goes on meanwhile."""
        with (self.place.logs / "command").open("wb+") as out, (self.place.logs / "errors").open("wb+") as errors:
            process = subprocess.Popen(
                self.command(*arguments), env=self.environment, stdout=out, stderr=errors, cwd=self.place.root
            )
            deadline = time.monotonic() + CALM_S
            while process.poll() is None:
                self.tick()
                if time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    raise Wrong(f"cues {arguments} takes longer than {CALM_S} s")
                time.sleep(0.02)
            out.seek(0)
            errors.seek(0)
            text = out.read().decode()
            text += errors.read().decode()
            if process.returncode and not (refused and refused in text):
                raise Wrong(f"cues {arguments} ended with {process.returncode}: {text}")
        return not process.returncode

    def killed(self, *arguments: object) -> None:
        """Run a command, and kill it in the middle."""
        process = subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.place.root,
        )
        deadline = time.monotonic() + self.chance.uniform(0.2, 2)
        while process.poll() is None and time.monotonic() < deadline:
            self.tick()
            time.sleep(0.02)
        self.counts["commands killed"] += process.poll() is None
        process.kill()
        process.wait()

    def seek(self) -> None:
        """Move a unit of ``audit`` back. What it does to ``audited`` is known."""
        number = self.chance.randrange(PARTITIONS)
        part = self.judge.partitions[number]
        if part.seeks or part.next < 3:
            return
        place = max(1, part.next - self.chance.randint(1, 200))
        if place < self.judge.main.queue("enriched").partition(number).first_index:
            return
        self.note(f"seek audit/{number} from about {part.next} to {place}")
        self.cues("seek", f"{self.place.main}#soak.audit/{number}", "--to", place, "--yes")
        part.seeks.append(place)
        self.counts["messages sought back"] += part.next - place

    def back_up(self) -> Path:
        dest = self.place.root / "backups" / str(self.backup_number // BACKUPS_MAX)
        if self.backup_number % BACKUPS_MAX == 0:
            shutil.rmtree(dest.parent, ignore_errors=True)
            dest.mkdir(parents=True)
        self.backup_number += 1
        self.note(f"backup {self.backup_number}")
        if self.chance.random() < 0.3:
            self.killed("backup", self.place.main, dest, "--since", "auto")
        self.cues("backup", self.place.main, dest, "--since", "auto")
        return dest

    def back_up_and_restore(self) -> None:
        """Restore a backup elsewhere: it is whole, of one moment, and a prefix of what the queues have now."""
        dest = self.back_up()
        at = self.chance.randint(1, len([d for d in dest.iterdir() if d.name.isdigit()]))
        restored = Place(self.place.root / "restored")
        shutil.rmtree(restored.root, ignore_errors=True)
        restored.main.parent.mkdir(parents=True)
        self.note(f"restore {at}")
        self.cues("restore", dest, restored.main, "--at", at)
        with cues.open(restored.main) as main, cues.open(restored.other) as other:
            for store in (main, other):
                if problems := store.check():
                    raise Wrong(f"the restored store {store.path}: {problems}")
            self.compare(main, self.judge.main)
            self.compare(other, self.judge.other)
            self.weigh(main)
        shutil.rmtree(restored.root)

    def compare(self, restored: cues.Store, running: cues.Store) -> None:
        """The messages of a backup are those that the queue still has at the same indices."""
        for name in restored.queues():
            for number in range(restored.queue(name).partitions):
                now = running.queue(name).partition(number)
                then = dict(indexed(restored.queue(name).partition(number)))
                if max(then, default=0) > now.last_index:
                    raise Wrong(f"the backup has {name}/{number} up to {max(then)}, the store to {now.last_index}")
                for index, message in indexed(now):
                    if index in then and then[index] != message:
                        raise Wrong(f"the backup has {then[index]} at {index} of {name}/{number}, the store {message}")
                    self.counts["messages of backups compared"] += index in then

    def weigh(self, store: cues.Store) -> None:
        """A backup is of one moment: as many messages were written as were taken."""
        positions = testing.contents(store)["positions"]

        def taken(processor: str) -> int:
            return sum(next - 1 for tailer, next in positions.items() if tailer.startswith(f"soak.{processor}."))

        def written(*queues: str) -> int:
            return sum(store.queue(q).partition(n).last_index for q in queues for n in range(store.queue(q).partitions))

        for processor, queues in (("check", ("flights", "errors")), ("sort", model.RESULTS)):
            if taken(processor) != written(*queues):
                raise Wrong(f"the backup: {processor} took {taken(processor)} and wrote {written(*queues)}")

    def check(self) -> None:
        """``cues check`` while everything runs."""
        self.note("check")
        self.cues("check", self.place.main)

    def purge(self) -> None:
        """Delete messages that all have read."""
        name = self.chance.choice(("rows", "flights/1", "weather/0", "figures", *model.RESULTS))
        queue, _, number = name.partition("/")
        part = self.judge.main.queue(queue).partition(int(number or 0))
        before = max(1, part.first_index + (part.last_index - part.first_index) // 4)
        self.note(f"purge {name} before {before}")
        if not self.cues("purge", f"{self.place.main}#{name}", "--before", before, "--yes", refused="not read"):
            self.counts["purges refused for a reader"] += 1

    def restart(self) -> None:
        """End all, perhaps compact the stores, and go on with other workers, another Python, other sizes of steps."""
        self.workers = self.chance.choice([n for n in range(4) if n != self.workers])
        self.batch = self.chance.choice((1, 7, 50, 300))
        self.python = self.chance.choice(self.pythons)
        compacts = self.chance.random() < 0.5 and self.spark is None  # which has the store open
        how = signal.SIGKILL if self.chance.random() < 0.3 else signal.SIGTERM
        python = f"Python {self.pythons.index(self.python)}"
        self.note(f"restart after signal {how:d}: {self.workers} workers, steps of {self.batch}, {python}")
        self.works = False
        self.end(how)
        if compacts:
            self.note("compact")
            self.judge.__exit__()
            for store in (self.place.main, self.place.other):
                if self.chance.random() < 0.3:
                    self.killed("compact", store, "--yes")
                self.cues("compact", store, "--yes")
                self.cues("check", store)
            self.judge.__enter__()
            self.counts["compactions"] += 1
        self.works = True

    def query(self) -> None:
        """Read queues with Spark, in a process of its own, while they are written."""
        self.spark_at = time.monotonic() + SPARK_EVERY_S
        self.note("Spark")
        command = [sys.executable, "-m", "soak.roles", "spark", str(self.place.root), "0", "1"]
        with (self.place.logs / "spark").open("wb") as log, (self.place.logs / "spark.out").open("wb") as out:
            self.spark = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=log, cwd=self.place.root, start_new_session=True
            )

    def reap_query(self) -> None:
        """Look at the result of Spark."""
        if self.spark is None or self.spark.poll() is None:
            return
        code, self.spark = self.spark.returncode, None
        said = (self.place.logs / "spark").read_text(errors="replace")
        if code and "MessagesPurged" in said:
            self.counts["messages purged under Spark"] += 1
        elif code:
            raise Wrong(f"Spark ended with {code}:\n{said[-4000:]}")
        else:
            self.counts["messages compared with Spark"] += sum(
                map(int, (self.place.logs / "spark.out").read_text().split())
            )
            self.counts["queries of Spark"] += 1

    def finish(self) -> None:
        """Wait for Spark, and end all processes."""
        deadline = time.monotonic() + CALM_S
        while self.spark is not None:
            if time.monotonic() > deadline:
                raise Wrong(f"Spark takes longer than {CALM_S} s")
            self.tick()
            time.sleep(0.1)
        self.works = False
        self.end()

    def close(self) -> None:
        """Kill everything that is left, whatever happened."""
        for process in [*self.processes.values(), *filter(None, [self.spark])]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # --- a life ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Let the judge read, and measure."""
        if problems := self.judge.collect():
            raise Wrong("\n".join(problems))
        self.measures.take(self.everyone(), [self.place.main, self.place.other])

    def live(self, seconds: float) -> None:
        """A life: work and faults, then rest, and the judgement."""
        self.place.pause.unlink(missing_ok=True)
        for role in ("writer", "publisher"):
            self.place.idle(role).unlink(missing_ok=True)
        deadline = time.monotonic() + seconds
        act_at = time.monotonic() + self.pace_s
        look_at = 0.0
        self.rests = False
        while (now := time.monotonic()) < deadline:
            self.tick()
            if now >= look_at:
                self.look()
                look_at = now + min(1.0, self.pace_s)
            if now >= self.spark_at and has_spark():
                self.query()
            elif now >= act_at:
                self.operate()
                act_at = time.monotonic() + self.chance.uniform(0.5, 3.5) * self.pace_s
            time.sleep(min(0.1, self.pace_s / 4))
        self.rest()

    def rest(self) -> None:
        self.note("rest")
        self.rests = True
        model.put(self.place.pause, "")
        for pid in self.everyone().values():
            self.send(pid, signal.SIGCONT)
        deadline = time.monotonic() + CALM_S
        missing: dict[str, str] = {}
        noted = time.monotonic() + CALM_S / 10
        while True:
            self.tick()
            self.look()
            if (end := self.bounds()) and not (missing := self.judge.missing(end)):
                break
            if time.monotonic() > noted:
                self.note(f"not there yet: {missing or 'writer or publisher is not idle'}")
                noted += CALM_S / 10
            if time.monotonic() > deadline:
                raise Wrong(f"not all came through: {missing or 'writer or publisher is not idle'}")
            time.sleep(0.2)
        if problems := self.judge.judge(end):
            raise Wrong("\n".join(problems))
        self.counts["lives"] += 1

    def bounds(self) -> Bounds | None:
        """The numbers that the paused writer and publisher have reached."""
        files = [self.place.idle(role) for role in ("writer", "publisher")]
        if not all(file.exists() for file in files):
            return None
        rows, bookings = (int(file.read_text()) for file in files)
        return Bounds(rows, int(self.place.hour.read_text()) * len(model.ORIGINS), bookings)

    def totals(self) -> dict[str, int]:
        begin = self.judge.begin
        judged = {"rows": begin.rows, "transactions": begin.bookings, "messages judged": self.judge.judged}
        return {**judged, **{name: count for name, count in sorted(self.counts.items()) if count}}


def indexed(queue: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The messages that a log has, with their indices."""
    tailer = queue.tailer()
    for message in tailer:
        yield tailer.last_read_index, message


def has_spark() -> bool:
    return bool(shutil.which("java") and importlib.util.find_spec("pyspark"))
