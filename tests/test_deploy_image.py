"""The printed Dockerfile is built, and its image runs: with Docker if its daemon answers, else with podman or buildah.

No registry is needed: the base image that FROM names is made of the Python and the packages of this machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from small import until
from test_deploy import graph, text

import cues
from cues.errors import StoreNotFound

TOOLS = ("docker", "podman", "buildah")
PACKAGES = ("click", "lmdb", "msgpack", "xxhash", "pip", "setuptools")
PROGRAMS = ("sh", "useradd", "install", "env")
COUNTING = """
import time
import cues
graph = cues.Graph("counting")

@graph.source("numbers")
def numbers(position):
    n = position or 0
    while True:
        n += 1
        time.sleep(0.01)
        yield n, {"n": n}

@graph.stream("numbers", "squares")
def square(message):
    return {"n": message["n"], "square": message["n"] ** 2}
"""


def works(tool: str) -> bool:
    """Return whether a tool is installed and can build. A Docker client without a daemon cannot."""
    if shutil.which(tool) is None or (tool != "docker" and os.geteuid() != 0):
        return False
    return subprocess.run([tool, "info"], capture_output=True, timeout=60, check=False).returncode == 0


TOOL = next(filter(works, TOOLS), None) if sys.platform == "linux" else None
MISSING = "IMAGES MISSING: neither a daemon of Docker, nor podman or buildah (as root), to build the printed Dockerfile"


def libraries(path: Path) -> set[str]:
    """The shared libraries that a program or an extension loads."""
    found = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", found))


def make_root(root: Path) -> None:
    """Make a small root file system: Python in /usr/local with Cues installed, and what the Dockerfile calls."""
    python, local = Path(sys.base_prefix), root / "usr/local"
    version = f"python3.{sys.version_info.minor}"
    left_out = shutil.ignore_patterns("__pycache__", "test", "tests", "idlelib", "tkinter", "site-packages", "*.a")
    shutil.copytree(sysconfig.get_path("stdlib"), local / "lib" / version, ignore=left_out)
    site = local / "lib" / version / "site-packages"
    for package in PACKAGES:
        for file in importlib.metadata.files(package) or []:
            source, target = Path(str(file.locate())), site / file
            if source.suffix != ".pyc" and ".." not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    tree, installed = Path(cues.__file__).parent, importlib.metadata.distribution("cues-streams")
    shutil.copytree(tree, site / "cues", ignore=left_out, symlinks=False)
    if not (site / "cues/processors").exists():
        shutil.copytree(tree.parent / "processors", site / "cues/processors", ignore=left_out)
    info = Path(str(installed.locate_file(f"cues_streams-{installed.version}.dist-info")))
    shutil.copytree(info, site / info.name)
    found = {name: shutil.which(name, path="/usr/bin:/usr/sbin:/bin") for name in PROGRAMS}
    programs = {name: Path(os.path.realpath(str(path))) for name, path in found.items()}
    (root / "usr/bin").mkdir(parents=True)
    for name, program in programs.items():
        shutil.copy(program, root / "usr/bin" / name)
    (local / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), local / "bin" / version)
    (local / "bin" / "python").symlink_to(version)
    shebang = f"#!/usr/local/bin/{version}\n"
    (local / "bin/pip").write_text(shebang + "from pip._internal.cli.main import main\nraise SystemExit(main())\n")
    (local / "bin/cues").write_text(shebang + "from cues.cli import main\nraise SystemExit(main())\n")
    needed = [*programs.values(), Path(sys.executable).resolve(), *root.rglob("*.so")]
    for library in set().union(*map(libraries, needed)):
        # The loader is found by its whole path, and the other libraries by LD_LIBRARY_PATH.
        target = root / (library[1:] if "ld-linux" in library else f"usr/lib/all/{Path(library).name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(os.path.realpath(library), target)
    assert python.exists()
    (root / "bin").symlink_to("usr/bin")
    for folder in ("etc", "tmp", "root", "home", "var/log", "dev", "proc", "sys"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/shadow").write_text("root:*:19000:0:99999:7:::\n")
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\n")
    for file in [*(local / "bin").iterdir(), *(root / "usr/bin").iterdir()]:
        if not file.is_symlink():
            file.chmod(0o755)


class Images:
    """Builds and runs images with the tool that is here."""

    def __init__(self, tool: str, place: Path) -> None:
        self.tool, self.place, self.base = tool, place, f"cues-test-{uuid.uuid4().hex[:12]}"
        own = ["--root", str(place / "root"), "--runroot", str(place / "run"), "--storage-driver", "vfs"]
        self.command = [tool, *(own if tool != "docker" else [])]
        self._runs: list[subprocess.Popen[str]] = []
        self._container = ""

    def call(self, *arguments: object) -> str:
        ran = subprocess.run(
            [*self.command, *map(str, arguments)], capture_output=True, text=True, timeout=500, check=False
        )
        assert ran.returncode == 0, f"{arguments}: {ran.stdout[-2000:]} {ran.stderr[-3000:]}"
        return ran.stdout.strip()

    def build(self, folder: Path, name: str) -> None:
        chroot = ["--isolation", "chroot"] if self.tool != "docker" else []
        self.call("build", *chroot, "-t", name, folder)

    def start(self, image: str, volume: Path) -> tuple[subprocess.Popen[str], int | None]:
        """Run an image; return the process, and with buildah the number of the run inside."""
        mount = f"{volume}:/data"
        if self.tool != "buildah":
            command = [*self.command, "run", "--rm", "--init", "--name", image, "-v", mount, image]
            return self._popen(command), None
        self._container = self._container or self.call("from", image)
        told = json.loads(self.call("inspect", self._container))["OCIv1"]["config"]
        run = [*self.command, "run", "--isolation", "chroot", self._container, "--", *told["Entrypoint"]]
        process = self._popen(run)
        return process, until(lambda: self._inside(process), limit_s=120)

    def volume(self, given: Path) -> Path:
        """The directory of the volume: buildah has one of its own for each container, which stays between its runs."""
        made = self.place.glob("root/vfs-containers/*/userdata/buildah-volumes/*")
        return given if self.tool != "buildah" else next(made)

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._runs.append(process)
        return process

    def _inside(self, process: subprocess.Popen[str]) -> int | None:
        """The run of Cues below a process of buildah, which passes no signal on."""
        if process.poll() is not None:
            pytest.fail(f"exit code {process.returncode}: {process.communicate()[0]}")
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if child.cmdline()[1:2] == ["/usr/local/bin/cues"] and "python" in child.cmdline()[0]:
                    return int(child.pid)
        return None

    def terminate(self, image: str, inside: int | None) -> None:
        if inside is None:
            self.call("kill", "--signal", "TERM", image)
        else:
            os.kill(inside, signal.SIGTERM)

    def close(self) -> None:
        for process in self._runs:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        names = [self.base, f"{self.base}-app"]
        if self.tool == "docker":
            subprocess.run(["docker", "rmi", "-f", *names], capture_output=True, timeout=120, check=False)
        else:
            subprocess.run([*self.command, "rm", "-a"], capture_output=True, timeout=120, check=False)
            subprocess.run([*self.command, "rmi", "-a", "-f"], capture_output=True, timeout=120, check=False)


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    assert TOOL is not None
    found = Images(TOOL, tmp_path / "images")
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.skipif(TOOL is None, reason=MISSING)
def test_the_printed_dockerfile_builds_and_its_image_drains_and_continues(images: Images, tmp_path: Path) -> None:
    """SIGTERM ends the run with what it has taken processed, and the next container continues after it."""
    base, app, volume = tmp_path / "base", tmp_path / "app", tmp_path / "volume"
    make_root(base / "root")
    (base / "Dockerfile").write_text(
        "FROM scratch\nCOPY root /\nENV PATH=/usr/local/bin:/usr/bin LD_LIBRARY_PATH=/usr/lib/all PIP_NO_INDEX=1\n"
    )
    images.build(base, images.base)
    printed = text("docker", graph(app, COUNTING))
    changed, count = re.subn(r"(?m)^FROM \S+$", f"FROM {images.base}", printed)
    assert count == 1
    (app / "Dockerfile").write_text(changed)
    images.build(app, f"{images.base}-app")
    volume.mkdir()
    volume.chmod(0o777)
    ended = 0
    for _ in range(2):
        process, inside = images.start(f"{images.base}-app", volume)
        store = images.volume(volume) / "counting"

        def squares(least: int) -> bool:
            if process.poll() is not None:
                pytest.fail(f"exit code {process.returncode}: {process.communicate()[0]}")
            with suppress(StoreNotFound), cues.open(store, readonly=True) as found:  # it may be in the making
                return "squares" in found.queues() and len(found.queue("squares")) >= least
            return False

        until(lambda least=ended + 20: squares(least), limit_s=180)
        images.terminate(f"{images.base}-app", inside)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 130 and "is processed" in said, said
        with cues.open(store, readonly=True) as found:
            numbers = [message["n"] for message in found.queue("numbers").tailer()]
            squared = [message["n"] for message in found.queue("squares").tailer()]
        assert numbers == squared == list(range(1, len(numbers) + 1)) and len(numbers) >= ended + 20
        ended = len(numbers)
