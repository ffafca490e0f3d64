"""Checks of the machine and of the place of a store: whether Cues can work here, and what to do if not.

    findings = examine(place("data/flights"))
    if any(finding.state == "problem" for finding in findings): ...

Each check is one function of a :class:`Place`, in the order of :data:`CHECKS`. Nothing of a store is written: the
probes (a write, a sync, locks, shared memory) use a temporary folder beside the store, which is removed at the end. The
folder is inside the directory of the store only if that directory is a mount of its own.

Not guaranteed: that a place without a finding is durable. A disk may report that data is stored before it is.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from cues.base import clock
from cues.base.data import dataclass
from cues.engine import standing
from cues.errors import CuesError, JavaNotFound
from cues.native import implementation
from cues.queues.store import Store
from cues.spark import java
from cues.storage import datafile, free_space, lmdb_map, locks
from cues.tools import metrics
from cues.tools.measurement import Owner

State = Literal["ok", "warning", "problem"]

PYTHON_MIN: Final = (3, 11)
FILES_MIN: Final = 256
"""Open files: a store takes six, and each worker process has its own."""
FREE_LOW: Final = 1 << 30
"""Free bytes below which a warning is given."""
FREE_LEAST: Final = 64 << 20
"""Free bytes below which the next allocation of a store may fail: it grows by up to 64 MiB at a time."""
SYNC_SLOW_S: Final = 0.05
SKEW_S: Final = 2.0
"""File times have a granularity of up to 2 s (FAT)."""
_CHILD_TIMEOUT_S: Final = 30
_PROBES: Final = 3

NETWORK: Final = re.compile(
    "nfs4?|cifs|smb3|smbfs|afpfs|webdav|davfs|9p|afs|ceph|lustre|gpfs|beegfs|ocfs2|gfs2|glusterfs|sshfs|s3fs|gcsfuse|"
    "goofys|rclone|blobfuse2?|mountpoint-s3|juicefs|grpcfuse|osxfs|vboxsf|vmhgfs-fuse|virtiofs|drvfs"
)
"""File systems that another machine, or the host of a virtual machine, serves."""
MEMORY: Final = frozenset(("tmpfs", "ramfs", "devtmpfs"))
LAYERED: Final = frozenset(("overlay", "aufs"))
FAT: Final = frozenset(("vfat", "msdos", "exfat"))

_CHILD: Final = """
import fcntl, json, mmap, os, sys, time
folder, offset, word = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fd = os.open(os.path.join(folder, "locks"), os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    locked = True
except OSError:
    locked = False
with mmap.mmap(os.open(os.path.join(folder, "wake"), os.O_RDWR), mmap.PAGESIZE) as shared:
    seen = shared[0]
    shared[1] = word
print(json.dumps({"locked": locked, "seen": seen, "monotonic_ns": time.monotonic_ns()}))
"""
"""The other process: it asks for a lock that we hold or have given back, and shares a word of memory."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    state: State
    text: str
    hint: str = ""
    """The thing to do; empty if the state is ``"ok"``, except for packages that may be installed."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The measured values, as plain data."""


@dataclass(frozen=True)
class Place:
    """A directory to examine, and the folder for the probes."""

    path: Path
    """The store, or the directory in which it will be."""
    probes: Path | None
    """A temporary folder in the same file system; None if this user cannot write there."""
    reason: str = ""
    """Why there is no folder for probes."""

    @property
    def has_store(self) -> bool:
        return (self.path / "data.mdb").exists()


@contextlib.contextmanager
def place(path: str | os.PathLike[str]) -> Iterator[Place]:
    """The place of a store, which may not exist yet; its temporary folder is removed after the block."""
    chosen = Path(path).absolute()
    folder = chosen
    while not folder.is_dir():
        folder = folder.parent
    if (folder / "data.mdb").exists() and folder.parent.stat().st_dev == folder.stat().st_dev:
        folder = folder.parent
    try:
        probes = tempfile.TemporaryDirectory(prefix=".cues-doctor-", dir=folder)
    except OSError as error:
        yield Place(chosen, None, f"{folder}: {error.strerror}")
        return
    with probes as made:
        yield Place(chosen, Path(made))


def examine(where: Place) -> list[Finding]:
    """Run every check. A check that fails with an error of the system is a problem, and the others are still run."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings += check(where)
        except (OSError, subprocess.SubprocessError) as error:
            findings.append(
                Finding(name, "problem", f"The check failed: {error}.", "look at the message of the system.")
            )
    return findings


# --- the machine ----------------------------------------------------------------------------------


def _platform(where: Place) -> Iterator[Finding]:
    system, release, machine = platform.system(), platform.release(), platform.machine()
    text = f"{system} {release}, {machine}"
    facts = {"system": system, "release": release, "machine": machine}
    if sys.maxsize < 1 << 32:
        hint = "install a Python of 64 bits: a store is mapped into the address space."
        yield Finding("platform", "problem", f"{text}, a Python of 32 bits", hint, facts)
    elif system not in ("Linux", "Darwin"):
        yield Finding("platform", "warning", f"{text}: not tested", "use Linux or macOS.", facts)
    elif release.endswith("-Microsoft"):
        hint = "convert it to WSL 2 (wsl --set-version DISTRIBUTION 2)."
        yield Finding("platform", "warning", f"{text}: WSL 1, whose locks and memory maps are not tested", hint, facts)
    else:
        yield Finding("platform", "ok", text, facts=facts)


def _python(where: Place) -> Iterator[Finding]:
    core = implementation()
    text = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable}), core: {core}"
    facts = {"version": platform.python_version(), "implementation": platform.python_implementation(), "core": core}
    if sys.version_info < PYTHON_MIN:
        needed = ".".join(map(str, PYTHON_MIN))
        yield Finding("python", "problem", text, f"install Python {needed} or newer.", facts)
    elif platform.python_implementation() != "CPython":
        yield Finding("python", "warning", f"{text}: only CPython is tested", "use CPython.", facts)
    else:
        yield Finding("python", "ok", text, facts=facts)


_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[^]]*])?\s*([^;]*)(?:;.*extra == [\"']([\w.-]+)[\"'])?")
_BOUND: Final = re.compile(r"(>=|<)\s*([\d.]+)")
_NOT_FOR_USERS: Final = ("docs", "test", "dev")


def _packages(where: Place) -> Iterator[Finding]:
    """The dependencies, and each extra with the line that installs it."""
    try:
        needed = metadata.requires("cues-streams") or []
    except metadata.PackageNotFoundError:
        hint = "run pip install cues-streams, so that its dependencies are known."
        yield Finding("packages", "warning", "Cues is not installed as a package.", hint)
        return
    groups: dict[str, list[tuple[str, str, str | None]]] = {"": []}
    for line in needed:
        match = _REQUIREMENT.match(line)
        if match is not None and match[3] not in _NOT_FOR_USERS and match[1] != "cues-streams":
            groups.setdefault(match[3] or "", []).append((match[1], match[2].strip(), _version(match[1])))
    for extra, packages in groups.items():
        yield _group(extra, packages)


def _group(extra: str, packages: list[tuple[str, str, str | None]]) -> Finding:
    """The finding about the packages of one extra, or of Cues itself (``""``)."""
    name = f"extra {extra}" if extra else "packages"
    facts = {package: version for package, _, version in packages}
    listed = ", ".join(f"{package} {version}" for package, version in facts.items() if version)
    wrong = [
        f"{package} {version} (needed: {bounds})" if version else f"{package} is missing"
        for package, bounds, version in packages
        if version is None or not fits(version, bounds)
    ]
    line = f"run pip install -U 'cues-streams{f'[{extra}]' if extra else ''}'."
    if not wrong:
        return Finding(name, "ok", listed, facts=facts)
    if not extra:
        return Finding(name, "problem", "; ".join(wrong), line, facts)
    if not listed:
        return Finding(name, "ok", "not installed", f"if you need it, {line}", facts)
    return Finding(name, "warning", f"installed in part: {'; '.join(wrong)}", f"if you need it, {line}", facts)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def fits(version: str, bounds: str) -> bool:
    """Return whether a version satisfies bounds such as ``>=2.2,<3``. Only the numbers of a version are compared."""
    found = _numbers(version)
    return all(found >= _numbers(b) if kind == ">=" else found < _numbers(b) for kind, b in _BOUND.findall(bounds))


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:  # 4.2.0 is 4.2
        numbers.pop()
    return numbers


def _java(where: Place) -> Iterator[Finding]:
    """The Java for Spark, if pyspark is installed."""
    spark = _version("pyspark")
    if spark is None:
        return
    try:
        chosen = java.find()
    except JavaNotFound as error:
        yield Finding("java", "warning", error.message, error.hint, {"looked": error.looked})
        return
    facts = {"version": chosen.version, "home": str(chosen.home), "origin": chosen.origin}
    yield Finding("java", "ok", f"Java {chosen.version} of {chosen.origin}, for Spark {spark}", facts=facts)


def _limits(where: Place) -> Iterator[Finding]:
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts: dict[str, Any] = {"files": _limit(files), "files_hard": _limit(files_hard)}
    text = f"{_shown(files)} open files"
    if 0 <= files < FILES_MIN:
        yield Finding("open files", "warning", f"at most {text}", f"run ulimit -n {max(1024, FILES_MIN)}.", facts)
    else:
        yield Finding("open files", "ok", text, facts=facts)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = 0
    with contextlib.suppress(CuesError):  # the check of the store names the damage
        used = datafile.used(where.path)
    facts = {"address_space": _limit(space), "map": lmdb_map.MAP_BYTES}
    text = f"{_bytes(space)} of address space"
    if 0 <= space < used + lmdb_map.SPARE_BYTES:
        hint = "run ulimit -v unlimited."
        yield Finding("address space", "problem", f"{text}, and the store uses {_bytes(used)}", hint, facts)
    elif 0 <= space < lmdb_map.MAP_BYTES:
        hint = "run ulimit -v unlimited, or pass map_size= to cues.open."
        yield Finding("address space", "warning", f"{text}: the map of a store shrinks until it fits", hint, facts)
    else:
        yield Finding("address space", "ok", text, facts=facts)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        state: State = "problem" if size < used + FREE_LEAST else "warning"
        hint = "run ulimit -f unlimited."
        yield Finding("file size", state, f"a file may have at most {_bytes(size)}", hint, {"file_size": size})


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _shown(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else f"{value:,}"


def _bytes(value: int) -> str:
    if value == resource.RLIM_INFINITY:
        return "any amount"
    return f"{value / (1 << 30):,.1f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):,.0f} MiB"


# --- the place ------------------------------------------------------------------------------------


def file_system(path: Path) -> tuple[str, str]:
    """Return the type of the file system of a path and its mount point; ("unknown", "") if unknown.

    The path need not exist yet. A file system of FUSE is named without its prefix: ``fuse.sshfs`` is ``sshfs``.
    """
    return longest_mount(path, _mounts())


def _mounts() -> list[tuple[str, str]]:
    """The point and the type of each mount, in the order in which they were made."""
    table = Path("/proc/self/mountinfo")
    if table.exists():
        return linux_mounts(table.read_text())
    listed = subprocess.run(["mount"], capture_output=True, text=True, errors="replace", timeout=_CHILD_TIMEOUT_S)
    return re.findall(r" on (.*) \((\w+)[,)]", listed.stdout)


def linux_mounts(text: str) -> list[tuple[str, str]]:
    """The mount points and types of ``/proc/self/mountinfo``, in which spaces are written as ``\\040``."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        mounts.append((point, after.split()[0]))
    return mounts


def longest_mount(path: Path, mounts: list[tuple[str, str]]) -> tuple[str, str]:
    """The last mount whose point is the longest one above ``path``."""
    real = path.resolve()
    best = ("unknown", "")
    for point, kind in mounts:
        if real.is_relative_to(point) and len(point) >= len(best[1]):
            best = (kind.removeprefix("fuse."), point)
    return best


def _file_system(where: Place) -> Iterator[Finding]:
    folder = _existing(where.path)
    kind, mount = file_system(folder)
    facts = {"type": kind, "mount": mount, "path": str(folder)}
    text = f"{kind} at {mount or folder}"
    if NETWORK.fullmatch(kind):
        hint = "put the store on a local disk; a directory of cues run --queues may be here."
        text += ": served by another machine, where memory maps and locks of two machines do not meet"
        yield Finding("file system", "problem", text, hint, facts)
    elif kind in MEMORY:
        hint = "put the store on a disk if it must outlive this machine's next start."
        yield Finding("file system", "warning", f"{text}: in memory", hint, facts)
    elif kind in LAYERED:
        hint = "put the store on a volume if it must outlive the container."
        yield Finding("file system", "warning", f"{text}: a layer of a container, deleted with it", hint, facts)
    elif kind in FAT:
        hint = "put the store on another file system, such as ext4, XFS, Btrfs, ZFS or APFS."
        yield Finding("file system", "warning", f"{text}: no journal, and no sparse files", hint, facts)
    else:
        yield Finding("file system", "ok", text, facts=facts)


def _existing(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path


def _write(where: Place) -> Iterator[Finding]:
    if where.probes is None:
        hint = "check the permissions of the directory; a store can be read without them only while nobody writes it."
        yield Finding("write", "problem", f"This user cannot write here: {where.reason}.", hint)
        return
    taken = []
    fd = os.open(where.probes / "write", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        for number in range(_PROBES):
            begun = time.perf_counter()
            os.pwrite(fd, b"\0" * datafile.PAGE_BYTES, number * datafile.PAGE_BYTES)
            os.fsync(fd)
            taken.append(time.perf_counter() - begun)
        datafile.sync_directory(where.probes)
        reserves = _reserves(fd)
    finally:
        os.close(fd)
    middle = sorted(taken)[_PROBES // 2]
    facts = {"sync_s": round(middle, 6), "reserves": reserves}
    text = f"a page is written and synced in {middle * 1000:.1f} ms"
    if middle > SYNC_SLOW_S:
        hint = 'write in batches, or use durability="process", which a power cut may take back.'
        yield Finding("write", "warning", f'{text}, so a "disk" store commits slowly', hint, facts)
    elif not reserves:
        hint = "keep enough space free: a full disk may end a process that writes."
        yield Finding("write", "warning", f"{text}; this file system cannot reserve space for a file", hint, facts)
    else:
        yield Finding("write", "ok", text, facts=facts)


def _reserves(fd: int) -> bool:
    """Return whether the file system can reserve space; macOS has no such call, and there a store does not use it."""
    if not hasattr(os, "posix_fallocate"):
        return True
    try:
        os.posix_fallocate(fd, _PROBES * datafile.PAGE_BYTES, datafile.PAGE_BYTES)
    except OSError:
        return False
    return True


def _sharing(where: Place) -> Iterator[Finding]:
    """Locks and memory, shared with another process; and the clock that leases are compared by."""
    if where.probes is None:
        return
    lock_path, memory_path = where.probes / "locks", where.probes / "wake"
    memory_path.write_bytes(bytes(mmap.PAGESIZE))
    word = 1 + os.getpid() % 200
    offset = locks.offset_of("cues doctor")  # high, as the offsets of processors are
    lock_file = locks.open_locks(lock_path)
    try:
        held = lock_file.try_lock(offset)
        with memory_path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as shared:
            shared[0] = word
            before = clock.monotonic_ns()
            first = other_process(where.probes, offset, word)
            after = clock.monotonic_ns()
            returned = shared[1]
        lock_file.unlock(offset)
        second = other_process(where.probes, offset, word)
    except OSError as error:
        yield _no_locks(f"the system refuses a lock or a memory map ({error.strerror})")
        return
    finally:
        lock_file.close()
    if not held or first["locked"] or not second["locked"]:
        yield _no_locks("two processes do not see each other's locks")
    else:
        yield Finding("locks", "ok", "POSIX locks exclude other processes")
    if first["seen"] != word or returned != word:
        hint = "put the store on a local disk."
        yield Finding("shared memory", "problem", "two processes do not see the same memory map", hint)
    else:
        yield Finding("shared memory", "ok", "processes see the same memory map")
    if not before <= first["monotonic_ns"] <= after:
        hint = "run all processes of a store on one machine, and outside time namespaces."
        yield Finding("monotonic clock", "problem", "two processes do not have the same one", hint)
    else:
        yield Finding("monotonic clock", "ok", "the same in two processes")


def _no_locks(why: str) -> Finding:
    hint = "put the store on a local disk: without locks two processes would write at once."
    return Finding("locks", "problem", why, hint)


def other_process(folder: Path, offset: int, word: int) -> dict[str, Any]:
    """The answer of :data:`_CHILD`. Raises SubprocessError if it fails."""
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _CHILD, str(folder), str(offset), str(word)],
        capture_output=True,
        text=True,
        timeout=_CHILD_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def _wall_clock(where: Place) -> Iterator[Finding]:
    """The wall clock beside the clock of the file system, which on a mount is that of another machine."""
    if where.probes is None:
        return
    probe = where.probes / "time"
    before_s = time.time()
    probe.write_bytes(b"")
    written_s = probe.stat().st_mtime
    after_s = time.time()
    skew_s = min(0.0, written_s - before_s) + max(0.0, written_s - after_s)
    facts = {"skew_s": round(skew_s, 3), "now": clock.to_datetime(round(after_s * 1e9))}
    newest_s = _last_write_s(where)
    if abs(skew_s) > SKEW_S:
        text = f"the times of files differ from the clock by {skew_s:+.1f} s"
        hint = "synchronise the clocks (NTP), or put the store on a local disk."
        yield Finding("clock", "warning", text, hint, facts)
    elif newest_s is not None and newest_s > after_s + SKEW_S:
        text = f"the store was written {newest_s - after_s:,.0f} s in the future"
        hint = "set the clock; until that time, new messages have the time of the last one."
        yield Finding("clock", "warning", text, hint, facts)
    else:
        yield Finding("clock", "ok", "it agrees with the times of files", facts=facts)


def _last_write_s(where: Place) -> float | None:
    """The time of the last change of the data file, in seconds since the epoch; None without a store."""
    return (where.path / "data.mdb").stat().st_mtime if where.has_store else None


def _space(where: Place) -> Iterator[Finding]:
    folder = _existing(where.path)
    counts = os.statvfs(folder)
    space = free_space.look(folder)
    free = space.free
    facts: dict[str, Any] = {"free_bytes": free, "free_files": counts.f_favail if counts.f_files else None}
    text = f"{_bytes(free)} free"
    hint = "free space on the disk, or move the store; cues purge and cues compact make a store smaller."
    if counts.f_files and not counts.f_favail:
        yield Finding("disk", "problem", f"{text}, but no file can be made (no inode is free)", hint, facts)
    elif space.is_low:
        text += f", less than min_free ({_bytes(space.limit)}): runs and appends stop"
        yield Finding("disk", "problem", text, hint, facts)
    elif space.is_near or free < FREE_LOW:
        yield Finding("disk", "warning", f"{text}; runs and appends stop below {_bytes(space.limit)}", hint, facts)
    else:
        yield Finding("disk", "ok", text, facts=facts)


# --- the store ------------------------------------------------------------------------------------


def _store(where: Place) -> Iterator[Finding]:
    """Format, room and owners of the store, which is opened read-only."""
    if not where.has_store:
        yield Finding("store", "ok", f"there is none yet at {where.path}", facts={"path": str(where.path)})
        return
    try:
        with Store(where.path, readonly=True) as store:
            yield from _opened(where, store)
    except CuesError as error:
        yield Finding("store", "problem", error.message, error.hint, {"path": str(where.path)})


def _opened(where: Place, store: Store) -> Iterator[Finding]:
    sizes = store.info()
    facts: dict[str, Any] = {
        "path": str(where.path),
        "format": datafile.FORMAT,
        "durability": store.durability,
        **sizes,
    }
    text = (
        f'{where.path}: format {datafile.FORMAT}, durability "{store.durability}", {_bytes(sizes["disk"])} on the disk'
    )
    mine = [where.path / name for name in ("data.mdb", "lock.mdb", "locks", "wake")]
    closed = [file.name for file in mine if file.exists() and not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        text = f"{text}; this user may not write {', '.join(closed)}"
        hint = "run as the owner of the files, or give this user permission (chmod, chown), in order to run a graph."
        yield Finding("store", "warning", text, hint, facts)
    else:
        yield Finding("store", "ok", text, facts=facts)
    free = shutil.disk_usage(where.path).free
    limit = store.max_map_size
    rest = (limit or sizes["map"]) - sizes["used"]
    text = f"{_bytes(rest)} of {_bytes(limit or sizes['map'])} left"
    facts = {"map": sizes["map"], "max": limit, "left": rest}
    if limit is not None and rest < FREE_LEAST and rest < free:
        hint = "open the store with a larger max_map_size=, once; the store keeps it."
        yield Finding("map", "warning", text, hint, facts)
    else:
        yield Finding("map", "ok", text, facts=facts)
    old = store.core.old_read()
    if old is not None:
        yield Finding("readers", "warning", old.text, old.hint, old._asdict())
    else:
        yield Finding("readers", "ok", "no read transaction keeps many freed pages")
    owners: dict[int, tuple[Owner, list[str]]] = {}
    for processor in standing.processors(store):
        owner = metrics.owner(store, processor)
        if owner is not None:
            owners.setdefault(owner.pid, (owner, []))[1].append(processor)
    if not owners:
        yield Finding("owner", "ok", "no process runs its processors", facts={"pids": []})
    for pid, (owner, processors) in owners.items():
        text = f"process {pid} ({owner.state}) runs {', '.join(processors)}"
        facts = {"pids": [pid], "state": owner.state, "processors": processors}
        if owner.state == "stopped" or not owner.lease_s:
            hint = f"continue it (kill -CONT {pid}) or end it; cues run --take-over replaces it."
            yield Finding("owner", "warning", f"{text}, and does not answer", hint, facts)
        else:
            yield Finding("owner", "ok", text, facts=facts)


CHECKS: Final[dict[str, Callable[[Place], Iterator[Finding]]]] = {
    "platform": _platform,
    "python": _python,
    "packages": _packages,
    "java": _java,
    "limits": _limits,
    "file system": _file_system,
    "write": _write,
    "locks": _sharing,
    "clock": _wall_clock,
    "disk": _space,
    "store": _store,
}
"""The checks, by the name that a failure of the check itself has."""
