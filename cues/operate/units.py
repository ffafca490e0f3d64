"""Texts that deploy a graph: a unit of systemd, a crontab, a Dockerfile, a compose file, objects of Kubernetes.

Each is a function of a :class:`~cues.operate.deployment.Deployment`; :data:`KINDS` has them by name. Comments in the
texts say why a line is there.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from typing import Final

from cues.base.texts import quoted
from cues.operate.deployment import VOLUME, Deployment

_EXTRAS_OF: Final = "cues-streams"
_UID: Final = 10001


def systemd(facts: Deployment, schedule: str) -> str:
    """A unit for a service."""
    name = facts.name
    lines = [
        f"# /etc/systemd/system/{name}.service: systemctl daemon-reload && systemctl enable --now {name}",
        f"# Logs: journalctl -u {name}. After new code: systemctl restart {name}.",
        *_choice(facts, "a service", endless=True),
        *_network(facts),
        *([f"# The user is root: --user NAME gives another one, who owns {facts.store}."] * (facts.user == "root")),
        "",
        "[Unit]",
        f"Description=Cues graph {facts.id}",
        "After=network-online.target",
        "Wants=network-online.target",
        "# The file systems of the stores are mounted first.",
        "RequiresMountsFor=" + " ".join(map(_quoted, (str(facts.store), *facts.others))),
        "# A start is tried for ever: a disk or a database may be back at any time.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "# cues run sends READY=1 when the graph runs. A start may copy files and repair a store.",
        "Type=notify",
        "TimeoutStartSec=300",
        f"User={facts.user}",
        f"WorkingDirectory={_percent(str(facts.path.parent))}",
        "ExecStart=" + " ".join(_quoted(word).replace("$", "$$") for word in facts.command()),
        "# Exit codes: 1 failure, 3 low disk, 6 an error stopped a processor. A start continues after the last commit.",
        "Restart=on-failure",
        "RestartSec=10",
        "# 2 wrong usage, 7 the graph runs already: a restart would not help.",
        "RestartPreventExitStatus=2 7",
        "# 130: it ended after SIGTERM, as it was asked to.",
        "SuccessExitStatus=130",
        "# SIGTERM is for the run, which tells its workers; what is left after the time-out gets SIGKILL.",
        "KillMode=mixed",
        f"# It drains for at most {facts.drain_s} s (--drain), waits 30 s for the steps under way, and closes.",
        f"TimeoutStopSec={facts.stop_s}",
    ]
    if facts.workers is not None:
        lines += ["# A worker that uses too much memory is started again; the others go on.", "OOMPolicy=continue"]
    lines += _reads(facts)
    is_reached = facts.ui is not None and facts.ui[0] not in ("127.0.0.1", "::1", "localhost")
    if is_reached:
        lines.append("# CUES_UI_TOKEN=… of the page, which other machines reach.")
    if is_reached or facts.variables:
        lines.append(f"EnvironmentFile={facts.environment}")
    lines += ["NoNewPrivileges=yes", "ProtectSystem=full", "", "[Install]", "WantedBy=multi-user.target"]
    return _text(lines)


def cron(facts: Deployment, schedule: str) -> str:
    """A file for /etc/cron.d that starts a run again and again."""
    name = facts.name
    run = f"cd {shlex.quote(str(facts.path.parent))} && {shlex.join(facts.scheduled())}"
    if facts.variables:
        run = f"set -a && . {facts.environment} && {run}"
    lines = [
        f"# /etc/cron.d/{name}: a run each time; each takes what is new. Logs: journalctl -t {name}",
        "# The exit status of the line is that of the run: descriptor 3 carries it past the pipe to logger.",
        "# Without logger, or a log for it, cron gets the output, and mails it.",
        "# A run that is still busy is not disturbed: the next one ends with exit code 7.",
        *_choice(facts, "a schedule", endless=False),
        *_network(facts),
        *_reads(facts),
        "SHELL=/bin/sh",
        f"{schedule} {facts.user} {{ {{ ({_cron_percent(run)}) 2>&1 3>&-; echo $? >&3; }}"
        f" | {{ logger -t {name} 2>/dev/null || cat >&2; }}; }} 3>&1 | (read -r status; exit $status)",
    ]
    return _text(lines)


def docker(facts: Deployment, schedule: str) -> str:
    """A Dockerfile."""
    extras = f"[{','.join(facts.extras)}]" if facts.extras else ""
    lines = [
        f"# Dockerfile: docker build -t {facts.name} .",
        f"#   docker run --init --stop-timeout {facts.stop_s} -v {facts.name}:{VOLUME}"
        f" {_published(facts)}{_env_file(facts)}{facts.name}",
        "# --init reaps processes that functions leave behind. Two containers with one volume: the second ends with"
        " exit code 7.",
        *_reads(facts),
        *_remarks(facts),
        f"FROM python:{sys.version_info.major}.{sys.version_info.minor}-slim",
        f"RUN useradd --uid {_UID} --create-home cues && install -d -o cues {VOLUME}",
        f"RUN pip install --no-cache-dir '{_EXTRAS_OF}{extras}'",
        "WORKDIR /app",
    ]
    if (facts.path.parent / "requirements.txt").is_file():
        lines += ["COPY requirements.txt .", "RUN pip install --no-cache-dir -r requirements.txt"]
    lines += [
        "# Your code and its data; .dockerignore names what stays out, such as data/.",
        "COPY . .",
        "USER cues",
        f"VOLUME {VOLUME}",
    ]
    if facts.ports:
        lines.append("EXPOSE " + " ".join(map(str, facts.ports)))
    probe = _probe(facts)
    if probe is not None:
        lines += [f"HEALTHCHECK --interval=10s --start-period=60s CMD {json.dumps(probe)}"]
    lines += [
        "# A list, not a shell: SIGTERM reaches the run, which drains. It has ended after"
        f" {facts.stop_s} s at the latest.",
        "STOPSIGNAL SIGTERM",
        f"ENTRYPOINT {json.dumps(facts.contained(), ensure_ascii=False)}",
    ]
    return _text(lines)


def compose(facts: Deployment, schedule: str) -> str:
    """A compose file for the Dockerfile."""
    name = facts.name
    lines = [
        f"# compose.yaml: cues deploy docker {facts.path.name} > Dockerfile; docker compose up -d --build",
        *_choice(facts, "a service", endless=True),
        *_remarks(facts),
        "services:",
        f"  {name}:",
        "    build: .",
        "    # Reaps processes that functions leave behind, and passes SIGTERM on.",
        "    init: true",
    ]
    if facts.finite:
        lines += ["    # Exit code 0: it is done.", "    restart: on-failure"]
    else:
        lines += ["    # A start continues after the last commit.", "    restart: unless-stopped"]
    lines += [
        f"    # It drains for at most {facts.drain_s} s, waits 30 s for the steps under way, and closes.",
        f"    stop_grace_period: {facts.stop_s}s",
        "    volumes:",
        f"      - {name}:{VOLUME}",
    ]
    if facts.variables:
        lines += [f"    {line}" for line in _reads(facts)] + [f"    env_file: {facts.environment}"]
    if facts.ports:
        lines.append("    ports:")
        for port, what in facts.ports.items():
            host = "127.0.0.1:" if what in ("page", "metrics") else ""
            lines.append(f"      - {_yaml(f'{host}{port}:{port}')}  # {what}")
    if facts.ui is not None:
        lines += [
            "    environment:",
            "      # The page answers only with it.",
            "      CUES_UI_TOKEN: ${CUES_UI_TOKEN:?at least 16 characters}",
        ]
    lines += [
        "    # Without a bound the log of a container fills the disk.",
        "    logging:",
        "      driver: json-file",
        '      options: {max-size: "10m", max-file: "3"}',
        "volumes:",
        f"  {name}:",
    ]
    return _text(lines)


def kubernetes(facts: Deployment, schedule: str) -> str:
    """A StatefulSet of one pod with a volume, and a Service for its ports."""
    name = facts.name
    lines = [
        f"# {name}.yaml: kubectl apply -f {name}.yaml, with the image of cues deploy docker",
        *_choice(facts, "a StatefulSet, which starts a run again when it has ended,", endless=True),
        *_remarks(facts),
        "apiVersion: apps/v1",
        "kind: StatefulSet",
        f"metadata: {{name: {name}}}",
        "spec:",
        "  # One process runs a graph. A StatefulSet ends the old pod before it starts the new one.",
        "  replicas: 1",
        f"  serviceName: {name}",
        f"  selector: {{matchLabels: {{app: {name}}}}}",
        "  template:",
        "    metadata:",
        f"      labels: {{app: {name}}}",
    ]
    if facts.metrics is not None:
        scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(facts.metrics[1])}
        lines.append(f"      annotations: {json.dumps(scrape)}")
    lines += [
        "    spec:",
        f"      # It drains for at most {facts.drain_s} s, waits 30 s for the steps under way, and closes.",
        f"      terminationGracePeriodSeconds: {facts.stop_s}",
        "      # Processes that functions leave behind are reaped; kubectl debug sees the readers of the store.",
        "      shareProcessNamespace: true",
        f"      securityContext: {{runAsNonRoot: true, runAsUser: {_UID}, runAsGroup: {_UID}, fsGroup: {_UID}}}",
        "      containers:",
        f"        - name: {name}",
        f"          image: {name}:latest",
        f"          command: {json.dumps(facts.contained(), ensure_ascii=False)}",
    ]
    if facts.ports:
        lines.append("          ports:")
        lines += [
            f"            - {{name: {_port_name(what)}, containerPort: {at}}}" for at, what in facts.ports.items()
        ]
    lines += _kubernetes_probe(facts)
    if facts.variables:
        made = f"kubectl create secret generic {name}-env --from-env-file={facts.environment}"
        lines += [f"          {line}" for line in (*_reads(facts), f"# {made}")]
        lines += ["          envFrom:", f"            - secretRef: {{name: {name}-env}}"]
    if facts.ui is not None:
        secret = {"secretKeyRef": {"name": name, "key": "ui-token"}}
        lines += [
            f"          # kubectl create secret generic {name} --from-literal=ui-token=…",
            "          env:",
            f"            - {{name: CUES_UI_TOKEN, valueFrom: {json.dumps(secret)}}}",
        ]
    lines += [
        "          volumeMounts:",
        f"            - {{name: data, mountPath: {VOLUME}}}",
        "  volumeClaimTemplates:",
        "    - metadata: {name: data}",
        "      spec:",
        "        # A disk of one node, not a network file system: LMDB needs locks and shared memory.",
        "        accessModes: [ReadWriteOnce]",
        "        resources: {requests: {storage: 10Gi}}",
    ]
    if facts.ports:
        lines += ["---", "apiVersion: v1", "kind: Service", f"metadata: {{name: {name}}}", "spec:"]
        lines += [f"  selector: {{app: {name}}}", "  ports:"]
        lines += [f"    - {{name: {_port_name(what)}, port: {at}}}" for at, what in facts.ports.items()]
    return _text(lines)


KINDS: Final[dict[str, Callable[[Deployment, str], str]]] = {
    "systemd": systemd, "docker": docker, "compose": compose, "cron": cron, "kubernetes": kubernetes,
}  # fmt: skip
"""The texts by the name of their kind. The second argument is the schedule of cron."""
LOCAL: Final = ("systemd", "cron")
"""Kinds that run the graph with a user and a Python of this machine."""


def _choice(facts: Deployment, what: str, *, endless: bool) -> list[str]:
    """A comment if ``what`` is an odd choice for the graph; ``endless``: it is meant for graphs that do not end."""
    if facts.finite == (not endless):
        return []
    if facts.finite:
        other = f"cues deploy cron {facts.path.name}"
        return [f"# The sources of this graph seem to end, and {what} is made for others: see {other}."]
    if facts.endless:
        other = f"cues deploy systemd {quoted(facts.path.name)}"
        goes_on = f"{', '.join(facts.endless)} {'does' if len(facts.endless) == 1 else 'do'} not end"
        return [f"# {goes_on}, and {what} is made for graphs that do: see {other}."]
    return [f"# {', '.join(facts.fed)}: fed by cues send, so each run ends when it was idle for 5 s."]


def _reads(facts: Deployment) -> list[str]:
    """A comment on the variables that the graph reads: no service has those of your shell."""
    if not facts.variables:
        return []
    return [f"# The graph reads {', '.join(facts.variables)}: {facts.environment} has a line NAME=value for each."]


def _env_file(facts: Deployment) -> str:
    return f"--env-file {facts.environment} " if facts.variables else ""


def _network(facts: Deployment) -> list[str]:
    """A comment on a store whose file system another machine serves."""
    if facts.network is None:
        return []
    return [
        f"# WARNING: {facts.store} is on {facts.network}: locks of two machines do not meet there. Use a local disk."
    ]


def _remarks(facts: Deployment) -> list[str]:
    """Comments on parts of a graph that do not fit into a container as they are."""
    lines = [
        f"# The webhook {hook.name} listens at {hook.host}, which only its own container reaches: give it"
        ' host="0.0.0.0".'
        for hook in facts.hooks
        if hook.host in ("127.0.0.1", "localhost", "::1")
    ]
    lines += [
        f"# The webhook {hook.name} has port 0: give it one that is known." for hook in facts.hooks if not hook.port
    ]
    lines += [f"# {other} has queues of this graph too: it must be on a volume." for other in facts.others]
    return lines


def _probe(facts: Deployment) -> list[str] | None:
    """The command of a health check, which needs only Python; None if the graph listens at no port."""
    if facts.metrics is not None:
        url = f"http://127.0.0.1:{facts.metrics[1]}/ready"
        return ["python", "-c", f"import urllib.request as r; r.urlopen('{url}', timeout=5)"]
    if facts.ports:
        port = next(iter(facts.ports))
        return ["python", "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"]
    return None


def _kubernetes_probe(facts: Deployment) -> list[str]:
    if facts.metrics is not None:
        test = f"httpGet: {{path: /ready, port: {facts.metrics[1]}}}"
    elif facts.ports:
        test = f"tcpSocket: {{port: {next(iter(facts.ports))}}}"
    else:
        return ["          # No port, so no probe: a pod is ready when it runs. --metrics 9464 brings /ready."]
    return [
        "          # No livenessProbe: a run that cannot go on ends by itself, and one that waits must not be killed.",
        "          readinessProbe:",
        f"            {test}",
        "            periodSeconds: 10",
    ]


def _published(facts: Deployment) -> str:
    return "".join(f"-p {port}:{port} " for port in facts.ports)


def _port_name(what: str) -> str:
    """A name of at most 15 small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")[:15].strip("-")


def _yaml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of a list of systemd; a command line has ``$$`` for ``$`` too."""
    text = _percent(word).replace("\\", "\\\\").replace('"', '\\"')
    return text if re.fullmatch(r"[\w@%+=:,./\\$-]+", text) else f'"{text}"'


def _cron_percent(command: str) -> str:
    """A command of a crontab, where ``%`` is a new line."""
    return command.replace("%", r"\%")


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
