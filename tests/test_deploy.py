"""``cues deploy``: its texts fit the graph, the tools that read them accept them, and their command lines run."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from terminal import Command, cues, environment

import cues as library
from cues.cli.options import INTERRUPTED, WRONG_USAGE
from cues.graphs import graphfile
from cues.graphs.graph import Graph
from cues.operate import units
from cues.operate.deployment import DRAIN_S, STOP_S, Deployment, drain_of, ends
from cues.processors.file_source import Files
from cues.tools import doctor

FLIGHTS = Path(__file__).parent.parent / "examples" / "flights.py"
FLAGS = ("--metrics", "9464", "--ui", "--workers", "2", "--min-free", "1MB", "--user", "ada")

FINITE = """
import cues
graph = cues.Graph("squares")

@graph.source("numbers", resume="skip")
def numbers():
    yield from ({"n": n} for n in range(100))

@graph.stream("numbers", "squares")
def square(number):
    return {"n": number["n"] ** 2}
"""

FED = """
import cues
graph = cues.Graph("orders")
graph.source("orders")

@graph.stream("orders", "priced")
def price(order):
    return order
"""

HOOK = """
import cues
from cues.processors.webhook import Webhook
graph = cues.Graph("Git hub", errors="errors", queues={"mails": {"path": "../mail store"}})
graph.add(cues.Source("events", Webhook(port=8099, path="/github")))

@graph.stream("events", "mails", timeout_s=30)
def call(event):
    return event
"""


def graph(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "graph.py"
    path.write_text(text)
    return path


def text(kind: str, path: object, *options: object) -> str:
    printed = cues("deploy", kind, path, *options)
    assert printed.code == 0, printed.err
    assert all(line.startswith("Warning: ") for line in printed.err.splitlines())
    return printed.out


def unit(text: str) -> dict[str, str]:
    lines = [line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#")]
    assert len({name for name, _, _ in lines}) == len(lines)
    return {name: value for name, _, value in lines}


def words(line: str) -> list[str]:
    """The words of a command line of a unit, as systemd gives them to the program."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def dry(command: list[str], cwd: Path) -> str:
    """The output of a printed command line, with ``--dry-run``."""
    ran = subprocess.run(
        [*command, "--dry-run"], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def outside(command: list[str], data: Path) -> list[str]:
    """A command line of a container, as it runs here: with this Python, and another directory for the volume."""
    assert command[0] == "cues"
    return [sys.executable, "-m", "cues", *(word.replace("/data/", f"{data}/") for word in command[1:])]


@pytest.mark.slow
def test_a_unit_fits_its_graph_and_systemd_accepts_it(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    for path, options in ((FLIGHTS, ()), (graph(tmp_path / "a b%n$HOME", HOOK), FLAGS)):
        printed = text("systemd", path, "--store", tmp_path / "store", *options)
        has = unit(printed)
        assert (has["Type"], has["Restart"], has["KillMode"]) == ("notify", "on-failure", "mixed")
        assert (has["RestartPreventExitStatus"], has["SuccessExitStatus"]) == ("2 7", "130")
        assert has["WorkingDirectory"].replace("%%", "%") == str(path.parent)
        command = words(has["ExecStart"])
        drain = int(command[command.index("--drain") + 1])
        assert int(has["TimeoutStopSec"]) == drain + STOP_S
        assert command[:5] == [sys.executable, "-m", "cues", "run", str(path)]
        assert ("OOMPolicy" in has, "seem to end" in printed) == ((False, True) if path is FLIGHTS else (True, False))
        if path is FLIGHTS:
            assert drain == DRAIN_S
        else:
            assert drain == 61  # twice 0.25 s of two processors, and 30 s of one call
            assert has["User"] == "ada"
            assert has["RequiresMountsFor"] == f'{tmp_path}/store "{tmp_path}/mail store"'
            assert set(FLAGS[:2]) - {"9464"} <= set(command)
            assert "127.0.0.1:9464" in command and "127.0.0.1:8420" in command and "1MB" in command
        assert dry([*command, "--json"], tmp_path)
        if shutil.which("systemd-analyze"):
            file = tmp_path / "cues-test.service"
            file.write_text(printed)
            verified = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
            assert (verified.returncode, [line for line in verified.stderr.splitlines() if "cues-test" in line]) == (
                0,
                [],
            )


def test_a_page_that_others_reach_gets_its_token_from_a_file(tmp_path: Path) -> None:
    assert unit(text("systemd", graph(tmp_path, FED), "--ui", "0.0.0.0:8420"))["EnvironmentFile"] == "/etc/orders.env"
    assert "EnvironmentFile" not in text("systemd", graph(tmp_path, FED), "--ui")


def test_a_dockerfile_has_ports_packages_and_a_probe(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    (tmp_path / "requirements.txt").write_text("six\n")
    printed = text("docker", graph(tmp_path, HOOK), *FLAGS)
    lines = [line.partition(" ") for line in printed.splitlines() if not line.startswith("#")]
    steps = [(step, rest) for step, _, rest in lines]
    assert steps[0] == ("FROM", f"python:3.{sys.version_info.minor}-slim")
    assert ("RUN", "pip install --no-cache-dir 'cues-streams[http,metrics,ui]'") in steps
    assert steps.index(("COPY", "requirements.txt .")) < steps.index(("COPY", ". .")) < steps.index(("USER", "cues"))
    assert ("EXPOSE", "8099 8420 9464") in steps
    assert ("STOPSIGNAL", "SIGTERM") in steps and ("VOLUME", "/data") in steps
    entry = json.loads(dict(steps)["ENTRYPOINT"])
    assert "0.0.0.0:9464" in entry and "0.0.0.0:8420" in entry
    assert entry[:5] == ["cues", "run", "graph.py", "--store", "/data/git-hub"]
    assert "# The webhook events listens at 127.0.0.1" in printed
    assert f"# {tmp_path.parent}/mail store has queues" in printed
    assert f"--stop-timeout {61 + STOP_S} " in printed
    assert dry(outside(entry, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [True, False], ids=["ready", "connect"])
def test_an_entry_point_is_healthy_while_it_runs_and_ends_in_time(tmp_path: Path, metrics: bool) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("starlette")
    port, hook = free_port(), free_port()
    source = (
        HOOK.replace("8099", str(hook))
        .replace("Git hub", "hub")
        .replace(', queues={"mails": {"path": "../mail store"}}', "")
    )
    printed = text("docker", graph(tmp_path, source), *(["--metrics", port] if metrics else []))
    probe = json.loads(re.findall(r"^HEALTHCHECK .*? CMD (.*)", printed, re.M)[0])
    entry = outside(json.loads(re.findall(r"^ENTRYPOINT (.*)", printed, re.M)[0]), tmp_path)

    def healthy() -> bool:
        return (
            subprocess.run([sys.executable, *probe[1:]], capture_output=True, timeout=60, check=False).returncode == 0
        )

    assert not healthy()
    with Command(*entry[3:], "--json", cwd=tmp_path) as run:
        run.until(f"{port}/metrics" if metrics else '"type": "progress"')
        run.until('"type": "progress"')
        assert healthy()
        run.signal(signal.SIGTERM)
        assert run.wait() == INTERRUPTED
    assert not healthy()


def parsed(printed: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(printed))


def test_a_compose_file_restarts_services_and_not_what_is_done(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    (finite,) = parsed(text("compose", graph(tmp_path / "finite", FINITE)))
    service = finite["services"]["squares"]
    assert (service["restart"], service["init"], service["stop_grace_period"]) == ("on-failure", True, "60s")
    assert "ports" not in service and "environment" not in service
    (hooked,) = parsed(text("compose", graph(tmp_path / "hook", HOOK), *FLAGS))
    service = hooked["services"]["git-hub"]
    assert (service["restart"], service["stop_grace_period"]) == ("unless-stopped", f"{61 + STOP_S}s")
    assert service["ports"] == ["8099:8099", "127.0.0.1:8420:8420", "127.0.0.1:9464:9464"]
    assert service["volumes"] == ["git-hub:/data"] and "git-hub" in hooked["volumes"]
    assert service["environment"]["CUES_UI_TOKEN"].startswith("${CUES_UI_TOKEN:?")


def test_a_stateful_set_has_one_pod_that_ends_in_time_and_is_probed(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pods, service = parsed(text("kubernetes", graph(tmp_path, HOOK), *FLAGS))
    spec = pods["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (pods["kind"], pods["spec"]["replicas"], service["kind"]) == ("StatefulSet", 1, "Service")
    assert (spec["terminationGracePeriodSeconds"], spec["shareProcessNamespace"]) == (61 + STOP_S, True)
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 9464}
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
        "events": 8099,
        "page": 8420,
        "metrics": 9464,
    }
    assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == {"events": 8099, "page": 8420, "metrics": 9464}
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert labels == pods["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    (mount,), (claim,) = container["volumeMounts"], pods["spec"]["volumeClaimTemplates"]
    assert (mount["mountPath"], mount["name"]) == ("/data", claim["metadata"]["name"])
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "git-hub", "key": "ui-token"}
    assert dry(outside(container["command"], tmp_path), tmp_path)
    (alone,) = parsed(text("kubernetes", graph(tmp_path / "finite", FINITE)))
    (container,) = alone["spec"]["template"]["spec"]["containers"]
    assert "readinessProbe" not in container and "ports" not in container
    assert "seem to end" in text("kubernetes", tmp_path / "finite" / "graph.py")


def test_the_line_of_a_crontab_runs_the_graph(tmp_path: Path) -> None:
    path = graph(tmp_path / "50% of it's", FINITE)
    printed = text("cron", path, "--schedule", "5 4 * * 1-5", "--user", "ada")
    *comments, shell, line = printed.splitlines()
    assert all(comment.startswith("#") for comment in comments) and shell == "SHELL=/bin/sh"
    *when, user, command = line.split(" ", 6)
    assert (when, user) == (["5", "4", "*", "*", "1-5"], "ada")
    assert not re.search(r"(?<!\\)%", command)  # cron makes a new line of it
    logger = tmp_path / "bin" / "logger"
    logger.parent.mkdir()
    logger.write_text(f'#!/bin/sh\ncat > "{tmp_path}/log"\necho "$@" > "{tmp_path}/arguments"\n')
    logger.chmod(0o755)
    path_of = {"PATH": f"{logger.parent}:{environment()['PATH']}"}
    for new in (100, 0):
        ran = subprocess.run(
            ["/bin/sh", "-c", command.replace(r"\%", "%")],
            env=environment(**path_of),
            capture_output=True,
            text=True,
            timeout=60,
        )
        logged = (tmp_path / "log").read_text()
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", ""), logged
        assert json.loads(logged)["queues"]["squares"] == {"messages": 100, "new": new}
    assert (tmp_path / "arguments").read_text() == "-t squares\n"
    with library.open(path.parent / "data" / "squares", readonly=True) as store:
        assert len(store.queue("squares")) == 100
    assert "seem to end" not in printed and "does not end" not in printed
    path.write_text("import cues\nnumber = 1 / 0\n")
    for shell in filter(shutil.which, ("sh", "bash", "dash", "busybox")):  # the status is that of cues, not of logger
        line = [shell, *["sh"] * (shell == "busybox"), "-c", command.replace(r"\%", "%")]
        ran = subprocess.run(line, env=environment(**path_of), capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stdout) == (1, ""), (shell, ran.stderr)
        assert "ZeroDivisionError" in (tmp_path / "log").read_text()
    (logger.parent / "cat").symlink_to(shutil.which("cat") or "")
    for found in ("#!/bin/sh\necho no log >&2; exit 1\n", None):  # no /dev/log; no logger: the output is cron's
        logger.unlink()
        if found:
            logger.write_text(found)
            logger.chmod(0o755)
        ran = subprocess.run(
            ["/bin/sh", "-c", command.replace(r"\%", "%")],
            env=environment(PATH=str(logger.parent)),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ran.returncode, ran.stdout) == (1, "") and "ZeroDivisionError" in ran.stderr
        assert "no log" not in ran.stderr and "not found" not in ran.stderr, ran.stderr


def test_a_crontab_for_a_graph_that_does_not_end_says_so(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    fed, hooked = text("cron", graph(tmp_path / "f", FED)), text("cron", graph(tmp_path / "h", HOOK))
    assert "--idle-exit 5" in fed and "orders: fed by cues send" in fed
    assert "--idle-exit" not in hooked and "# events does not end" in hooked
    command = re.findall(r"\((cd .*)\) 2>&1", fed)[0]
    ran = subprocess.run(
        ["/bin/sh", "-c", command.replace("--idle-exit 5", "--idle-exit 0")], env=environment(), timeout=60
    )
    assert ran.returncode == 0


READS = FINITE.replace("import cues", "import os\nimport cues\nSIZE = int(os.environ['READS_SIZE'])", 1).replace(
    "import cues", "import cues\nNAME, PLACE = os.environ.get('READS_NAME'), os.getenv('READS_PLACE', 'here')", 1
)


def test_variables_that_a_graph_reads_come_from_a_file(tmp_path: Path) -> None:
    """A service has no variable of a shell: a graph that ran by hand would not start."""
    path, file = graph(tmp_path, READS), "/etc/squares.env"
    printed = {kind: cues("deploy", kind, path, READS_SIZE="7").out for kind in units.KINDS}
    for each in printed.values():
        assert f"# The graph reads READS_NAME, READS_PLACE, READS_SIZE: {file} has a line NAME=value for each." in each
    assert unit(printed["systemd"])["EnvironmentFile"] == file
    assert f"--env-file {file} squares" in printed["docker"]
    (service,) = parsed(printed["compose"])
    assert service["services"]["squares"]["env_file"] == file
    pods, *_ = parsed(printed["kubernetes"])
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "squares-env"}}]
    (run,) = re.findall(r"\((set .*)\) 2>&1", printed["cron"])
    (tmp_path / "env").write_text("READS_SIZE=7\n")
    here = run.replace(file, str(tmp_path / "env"))
    assert subprocess.run(["/bin/sh", "-c", here], env=environment(), timeout=60).returncode == 0
    assert "EnvironmentFile" not in text("systemd", graph(tmp_path / "none", FINITE))


def for_ever():  # type: ignore[no-untyped-def]
    while True:
        yield {}


def until_the_end(position):  # type: ignore[no-untyped-def]
    while True:
        if position:
            return
        yield {}


def until_the_drain(position, process):  # type: ignore[no-untyped-def]
    while not process.stopping:
        yield 1, {}


def test_sources_that_end_and_sources_that_do_not() -> None:
    assert [ends(fn) for fn in (for_ever, until_the_end, until_the_drain)] == [False, True, False]
    assert ends(print)  # no code of Python
    every = library.every("1h")
    assert [ends(library.every("1h", follow=False, missed="last")), ends(every)] == [True, False]
    files = [
        Files("*.csv"),
        Files("*.csv", watch=True),
        Files("a.log", follow=True),
        Files("*.csv", watch=True, idle_exit_s=0),
    ]
    assert [ends(each) for each in files] == [True, False, False, True]
    http_source = pytest.importorskip("cues.processors.http_source")
    polls = [http_source.Poll("http://h/", id="id", interval_s=interval) for interval in (None, 60.0)]
    assert [ends(poll) for poll in polls] == [True, False]


def test_a_drain_has_time_for_two_steps_of_each_processor() -> None:
    graph = Graph("g")
    graph.source("a")
    graph.stream("a", "b", id="slow", step_s=5.0, timeout_s=20.0)(dict)
    graph.sink("b", step_s=None)(print)
    assert drain_of(graph.plan()) == 50
    assert drain_of(graphfile.load(str(FLIGHTS)).graph.plan()) == DRAIN_S


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["systemd", "data/shop"], "data/shop is not a graph file."),
        (["upstart", "graph.py"], "'upstart' is not one of"),
        (["cron", "graph.py", "--schedule", "hourly"], "does not have five fields"),
        (["docker", "graph.py", "--workers", "many"], "--workers many is not a number of processes."),
        (["docker", "graph.py", "--metrics", "0"], "Port 0 is another one in each run."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], said: str) -> None:
    graph(tmp_path, FED)
    refused = cues("deploy", *arguments, cwd=tmp_path)
    assert (refused.code, refused.out) == (WRONG_USAGE, "")
    assert said in refused.err
    assert "Try: " in refused.err


def test_as_json_it_is_one_object(tmp_path: Path) -> None:
    path = graph(tmp_path, FED)
    said = json.loads(text("systemd", path, "--json"))
    assert said == {"kind": "systemd", "graph": "orders", "text": text("systemd", path)}
    assert not (tmp_path / "data").exists()


def test_a_store_on_a_network_file_system_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = graphfile.load(str(graph(tmp_path, FED)))
    monkeypatch.setattr(doctor, "file_system", lambda path: ("nfs4", "/mnt"))
    for kind in ("systemd", "cron"):
        assert f"# WARNING: {tmp_path}/data/orders is on nfs4" in units.KINDS[kind](Deployment.of(file), "@daily")
    monkeypatch.setattr(doctor, "file_system", lambda path: ("ext4", "/"))
    assert "WARNING" not in units.systemd(Deployment.of(file), "@daily")


def test_a_user_that_cannot_run_the_graph_is_a_warning(tmp_path: Path) -> None:
    path = graph(tmp_path, FINITE)
    for kind in units.KINDS:
        said = cues("deploy", kind, path, "--user", "no-such-user")
        is_local = kind in ("systemd", "cron")
        assert (said.code, said.err) == (0, "Warning: This machine has no user no-such-user.\n" * is_local)
    assert cues("deploy", "systemd", path).err == ""
    missing = cues("deploy", "systemd", path, "--python", tmp_path / "python").err
    assert missing.endswith(f"cannot execute {tmp_path}/python: {tmp_path}/python is missing.\n")


@pytest.mark.skipif(os.getuid() != 0, reason="another user is tried")
def test_the_warnings_are_the_refusals_of_the_system() -> None:
    """The modes of a directory, of a file, and of the target of a link in a virtual environment."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        home, user = Path(place), "nobody"
        python, link, path, store = home / "real" / "python", home / "venv" / "python", home / "code", home / "data"
        path = graph(path, FINITE)
        for folder in (python.parent, link.parent, store):
            folder.mkdir()
        shutil.copy("/bin/sh", python)
        link.symlink_to(python)
        wanted = {link: ("-x", "execute"), path: ("-r", "read"), store: ("-w", "write in")}
        closings = ((None, 0), (python, 0o700), (python.parent, 0o750), (link.parent, 0o700), (path, 0o640))
        for closed, mode in closings:
            for part in (home, python, python.parent, link.parent, path, path.parent):
                part.chmod(0o755)
            store.chmod(0o777 if closed is None else 0o755)
            if closed is not None:
                closed.chmod(mode)
            tries = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
            tried = {
                f"The user nobody cannot {verb} {each}"
                for each, (flag, verb) in wanted.items()
                if subprocess.run([shutil.which("test") or "test", flag, each], **tries).returncode
            }
            facts = Deployment.of(graphfile.load(str(path)), store=str(store), user=user, python=str(link))
            assert {said.partition(":")[0] for said in facts.doubts()} == tried
            assert len(tried) == (0 if closed is None else 2)
