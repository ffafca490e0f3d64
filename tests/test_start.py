"""The modules that a plain ``cues run`` loads before its first message: a start takes as long as their imports.

A new import of a module that few runs need fails here. Import it in the function that needs it, or with
``cues.base.lazy.module`` where a file names it in several places.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GRAPH = """
import json, sys
import cues

graph = cues.Graph("g")

@graph.source("numbers", resume="skip")
def numbers():
    yield {"n": 1}

@graph.stream("numbers", "doubled")
def double(message):
    with open("modules.json", "w") as file:
        json.dump(sorted(sys.modules), file)
    return {"n": 2 * message["n"]}
"""

CUES_MAX = 169
"""Modules of Cues, of about 430."""
OTHERS_MAX = 165
"""Modules of Python and of other packages, beside those that ``python -c pass`` has."""

NEVER = {
    # rooms of Cues, and modules of rooms that are used
    *("cues.ui", "cues.spark", "cues.groups", "cues.txn.operate", "cues.txn.consumer", "cues.txn.writer"),
    *("cues.checkpoints", "cues.processors", "cues.testing", "cues.schemas", "cues.tools.metrics"),
    *("cues.tools.measurement", "cues.tools.follower", "cues.tools.backup", "cues.tools.check", "cues.tools.doctor"),
    *("cues.operate.fresh", "cues.operate.place", "cues.operate.stores", "cues.operate.directories"),
    *("cues.cli.reload", "cues.cli.replicate", "cues.cli.show", "cues.cli.live", "cues.cli.candidates", "cues.cli.top"),
    *("cues.engine.workers", "cues.engine.supervisor", "cues.engine.redriving", "cues.engine.child"),
    *("cues.forwarding.forwarder", "cues.forwarding.fork", "cues.forwarding.low_water", "cues.queues.retention"),
    *("cues.queues.appender", "cues.graphs.topology", "cues.graphs.compose", "cues.graphs.draw"),
    *("cues.steps.eventloop", "cues.steps.transaction"),
    # Python
    *("asyncio", "multiprocessing", "concurrent", "subprocess", "socket", "ssl", "http", "email", "xml", "sqlite3"),
    *("decimal", "zoneinfo", "tempfile", "random", "shutil", "difflib", "tomllib", "csv", "getpass", "argparse"),
    *("importlib.metadata", "importlib.resources", "unittest", "pdb", "ctypes", "locale", "statistics", "fractions"),
    # other packages
    *(
        "pyarrow",
        "pandas",
        "numpy",
        "polars",
        "duckdb",
        "pyspark",
        "py4j",
        "sqlalchemy",
        "fsspec",
        "rich",
        "jsonschema",
    ),
    *(
        "prometheus_client",
        "opentelemetry",
        "starlette",
        "uvicorn",
        "httpx",
        "deltalake",
        "confluent_kafka",
        "paho",
        "boto3",
    ),
}
"""Neither these modules nor modules inside of them are loaded."""


def roots(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The modules at the first message that the interpreter itself does not load, nor a tool that watches it."""
    path = tmp_path_factory.mktemp("start")
    (path / "graph.py").write_text(GRAPH)
    subprocess.run([sys.executable, "-m", "cues", "run", "graph.py"], cwd=path, check=True, capture_output=True)
    bare = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", bare], check=True, capture_output=True, text=True)
    return set(json.loads((path / "modules.json").read_text())) - set(json.loads(found.stdout)) - {"json"}


def test_a_run_loads_nothing_that_few_runs_need(loaded: set[str]) -> None:
    assert {name for name in loaded if roots(name) & NEVER} == set()


def test_a_run_loads_a_bounded_number_of_modules(loaded: set[str]) -> None:
    own = {name for name in loaded if name.split(".")[0] == "cues"}
    assert 100 < len(own) <= CUES_MAX
    others = {name for name in loaded - own if "__mypyc" not in name}
    assert len(others) <= OTHERS_MAX, sorted(others)


def test_ready_made_processors_load_nothing_that_their_use_does_not_need() -> None:
    code = "import sys; import cues.processors.files, cues.processors.sql, cues.processors.windows; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"importlib.metadata", "email", "asyncio", "pyarrow", "numpy", "pandas", "sqlalchemy", "fsspec", "http"}
    bare = subprocess.run([sys.executable, "-c", "import sys; print(*sys.modules)"], check=True, capture_output=True)
    assert {name for name in set(found) - set(bare.stdout.decode().split()) if roots(name) & heavy} == set()


def test_the_names_of_the_list_exist() -> None:
    """A module that was renamed would leave the list without an effect."""
    root = Path(__file__).parent.parent
    for name in NEVER:
        if name.startswith("cues."):
            path = root.joinpath(*name.split("."))
            assert path.is_dir() or path.with_suffix(".py").is_file(), name


# --- tables ---------------------------------------------------------------------------------------

TABLES = """
import atexit, json, os, sys
import cues
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

queues = {"rows": cues.QueueOptions(partitions=2, key="id")} if os.environ["PARTITIONS"] else {}
graph = cues.Graph("t", queues=queues)
source, form = os.environ["SOURCE"], os.environ["FORM"]
graph.add(cues.Source("rows", Files(source, schema="infer" if source.endswith("csv") else None)))

@graph.stream("rows", "kept", batch="arrow")
def keep(rows):
    return rows.filter(rows["good"])

graph.add(FileSink("out", form).sink("kept"))

@atexit.register
def tell():
    import pyarrow
    with open("modules.json", "w") as file:
        json.dump([sorted(sys.modules), pyarrow.default_memory_pool().backend_name], file)
"""


@pytest.mark.parametrize(
    ("source", "form", "partitions"),
    [("in.csv", "parquet", ""), ("in.csv", "csv", "2"), ("in.parquet", "parquet", "2"), ("in.parquet", "jsonl", "")],
)
def test_a_run_of_tables_does_not_import_pandas(tmp_path: Path, source: str, form: str, partitions: str) -> None:
    """pyarrow imports it, if it is installed, to convert values of Python. It takes longer than a thousand rows."""
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("pandas")
    rows = [f"{n},{n / 4},{'true' if n % 2 else 'false'},name {n},2026-01-{n % 28 + 1:02}" for n in range(200)]
    (tmp_path / "in.csv").write_text("\n".join(["id,price,good,name,day", *rows, ""]))
    parquet.write_table(csv.read_csv(tmp_path / "in.csv"), tmp_path / "in.parquet")
    (tmp_path / "graph.py").write_text(TABLES)
    env = {**os.environ, "SOURCE": source, "FORM": form, "PARTITIONS": partitions}
    command = [sys.executable, "-m", "cues", "run", "graph.py", "--json"]
    run = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert json.loads(run.stdout)["queues"]["kept"]["messages"] == 100
    assert len([path for path in (tmp_path / "out").iterdir() if path.suffix == f".{form}"]) == 1
    loaded, pool = json.loads((tmp_path / "modules.json").read_text())
    assert "pyarrow" in loaded and "pandas" not in loaded
    assert pool == os.environ.get("ARROW_DEFAULT_MEMORY_POOL", "system")
