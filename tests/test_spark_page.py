"""The pages of Spark: the commands of the first page run, on a real cluster with an object store; manifests fit."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.cli.app import COMMANDS
from cues.errors import CuesError

DOCS = Path(__file__).parents[1] / "docs"
CUES = str(Path(sys.executable).with_name("cues"))

GRAPH = """
import cues

graph = cues.Graph("flights")


@graph.source("raw")
def rows(position):
    for n in range(position or 0, 500):
        yield n + 1, {"n": n}


@graph.stream("raw", "enriched")
def enrich(message):
    return {"n": message["n"], "double": message["n"] * 2}
"""


def commands() -> list[str]:
    (block,) = re.findall(r"```sh\n(.*?)```", (DOCS / "spark.md").read_text(), re.S)
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line.startswith("cues ")]


@pytest.mark.slow
def test_each_command_of_the_first_page_runs(tmp_path: Path) -> None:
    """The bucket and the cluster of the page are a real S3 server and a standalone cluster of two workers."""
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    import object_store
    from spark_cluster import Cluster

    (tmp_path / "graph.py").write_text(GRAPH)
    said: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        storage = stack.enter_context(object_store.running())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in storage.items():
            patch.setenv(name, value)
        object_store.make_bucket("bucket")
        cluster = stack.enter_context(Cluster())
        for command in commands():
            words = shlex.split(command.replace("spark://host:7077", cluster.master))
            if "--master" in words:  # the first runs of the page keep their queues in the store
                words += ["--store", "another"]
            done = subprocess.run(
                [CUES, *words[1:]],
                cwd=tmp_path,
                env={**os.environ, **cluster.environment},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, command + done.stdout[-2000:] + done.stderr[-2000:]
            said[command] = done.stdout + done.stderr
    runs = [text for command, text in said.items() if command.startswith("cues run")]
    assert len(runs) == 4 and len(said) == 5
    assert "500" in runs[1] and "500" in runs[3]
    (status,) = [text for command, text in said.items() if command.startswith("cues status")]
    assert "enriched" in status and "500" in status


def options() -> set[str]:
    from cues.cli.app import load

    return {name for parameter in load("run").params for name in parameter.opts}


def test_the_manifest_for_kubernetes_starts_a_command_that_exists() -> None:
    yaml: Any = pytest.importorskip("yaml")
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "spark-platforms.md").read_text(), re.S)
    by_kind = {each["kind"]: each for each in yaml.safe_load_all(block)}
    assert set(by_kind) == {"Service", "ServiceAccount", "Role", "RoleBinding", "StatefulSet"}
    service, stateful = by_kind["Service"], by_kind["StatefulSet"]
    assert service["spec"]["clusterIP"] == "None", "a service without an address, which names the pod"
    pod = stateful["spec"]["template"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"] == stateful["spec"]["selector"]["matchLabels"]
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"] and stateful["spec"]["replicas"] == 1
    (container,) = pod["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["cues", "run"] and "run" in COMMANDS
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= options(), given - options()
    conf = dict(word.removeprefix("--conf=").split("=", 1) for word in words if word.startswith("--conf="))
    ports = {port["name"]: str(port["port"]) for port in service["spec"]["ports"]}
    assert ports == {"driver": conf["spark.driver.port"], "blocks": conf["spark.blockManager.port"]}
    assert conf["spark.driver.host"] == service["metadata"]["name"]
    assert conf["spark.kubernetes.container.image"] == container["image"]
    require_rights(by_kind, pod["spec"]["serviceAccountName"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]
    }


def require_rights(by_kind: dict[str, Any], account: str) -> None:
    """The account of the driver's pod is bound to a role that may do what Spark does to pods and their settings."""
    assert by_kind["ServiceAccount"]["metadata"]["name"] == account
    role, binding = by_kind["Role"], by_kind["RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"] == {
        "apiGroup": role["apiVersion"].partition("/")[0],
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    (rule,) = role["rules"]
    assert rule["apiGroups"] == [""], "the group of pods has no name"
    assert {"pods", "configmaps"} <= set(rule["resources"])
    assert {"create", "get", "list", "watch", "delete", "deletecollection"} <= set(rule["verbs"])


@pytest.mark.timeout(300)
def test_speculation_is_refused_for_functions_with_effects(spark: Any, tmp_path: Path) -> None:
    """The directory is not made."""
    settings = {"spark.sql.legacy.setCommandRejectsSparkCoreConfs": "false", "spark.speculation": "true"}
    sinks = cues.Sink(print, "in", id="s"), cues.Stream(print, "in", "out", id="t", side_effects=True)
    graph = cues.Graph("g", [cues.Source("in"), *sinks])
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        with pytest.raises(
            CuesError, match=r"spark\.speculation .* functions of g\.s, g\.t .*twice.*Try: set spark\.spec"
        ):
            graph.start(engine="spark", spark=spark, queues=tmp_path / "queues", store=tmp_path / "store")
    finally:
        for name in reversed(settings):
            spark.conf.unset(name)
    assert not (tmp_path / "queues").exists()


def test_the_options_of_the_pages_exist() -> None:
    for page in ("spark.md", "spark-platforms.md"):
        for line in re.findall(r"^(?:\w+=\S+ )?cues run .*", (DOCS / page).read_text(), re.M):
            given = set(re.findall(r"(?<=\s)--[\w-]+", line.partition("#")[0]))
            assert given <= options(), (page, given - options())
