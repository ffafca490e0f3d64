"""``cues init``: a project to start from."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

import click

from cues.cli.options import CommandFailed, command
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import out

_GRAPH: Final = '''\
"""Orders from a file, their totals, and the sum of each customer: ``cues run graph.py``."""

from pathlib import Path

import cues
from cues.processors import files

ORDERS = Path(__file__).parent / "orders.csv"

graph = cues.Graph("{name}", errors="errors")


@graph.source("orders")
def orders(position):
    yield from files.read_csv(ORDERS, position=position)


@graph.stream("orders", "priced")
def price(order):
    return {{**order, "total": int(order["count"]) * int(order["cents"])}}


@graph.stream("priced", "sums", key="customer")
def add_up(order, process):
    total = process.state.get("total", 0) + order["total"]
    process.state["total"] = total
    return {{"customer": order["customer"], "sum": total}}
'''

_ORDERS: Final = """\
id,customer,count,cents
1,ada,2,250
2,grace,1,1999
3,ada,10,99
4,edsger,3,500
5,grace,2,1200
6,ada,1,4250
"""

_TEST: Final = '''\
"""The graph processes each order once, also if it crashes: ``pytest``. The fixtures are those of Cues."""

import pytest
from graph import graph

SUMS = [("ada", 500), ("grace", 1999), ("ada", 1490), ("edsger", 1500), ("grace", 4399), ("ada", 5740)]
EXPECTED = [{{"customer": customer, "sum": total}} for customer, total in SUMS]


def test_the_sums_of_all_customers(cues_run, cues_expect):
    cues_run(graph)
    cues_expect("sums", EXPECTED)
    cues_expect("errors", [])


@pytest.mark.parametrize("point", ["take.after", "function.after", "commit.inside", "commit.after"])
def test_a_crash_loses_and_repeats_nothing(point, cues_run, cues_crash, cues_expect):
    cues_crash(graph, point)
    cues_run(graph)
    cues_expect("sums", EXPECTED)
'''

_PYPROJECT: Final = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["cues-streams"]

[project.optional-dependencies]
test = ["pytest>=8"]

[tool.setuptools]
py-modules = ["graph"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_README: Final = """\
# {name}

`graph.py` reads `orders.csv`, and adds up the orders of each customer, exactly once.

    pip install -e '.[test]'
    pytest                       # also with crashes
    cues run graph.py            # until every order is processed
    cues tail graph.py#sums      # the results
    cues status graph.py         # positions, lag and errors

The messages, positions and sums are in `data/{name}`. `cues run graph.py --fresh` starts over.
"""

_IGNORED: Final = """\
/data/
__pycache__/
.pytest_cache/
.venv/
*.egg-info/
"""

FILES: Final = {
    "graph.py": _GRAPH,
    "orders.csv": _ORDERS,
    "test_graph.py": _TEST,
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    ".gitignore": _IGNORED,
}
"""The templates. In each of them ``{name}`` is replaced by the name of the project."""


@command()
@click.argument("directory", metavar="[DIR]", required=False, default=".", type=click.Path(path_type=Path))
@output_options
def init(directory: Path, output: CommandOutput) -> None:
    """Make a project to start from: a graph, sample data, tests, pyproject.toml, README and .gitignore.

    The directory (default: this one) is made if it is missing; its name is the name of the project and of the graph.
    If it has one of the files, nothing is written.

    \b
      cues init orders
      cues init
    """
    name = project_name(directory)
    if directory.exists() and not directory.is_dir():
        raise CommandFailed(f"{directory} is a file.", "name a directory, which may be missing: cues init DIR.")
    present = [file for file in FILES if (directory / file).exists() or (directory / file).is_symlink()]
    if present:
        raise CommandFailed(
            f"{directory} has {', '.join(present)}; nothing was written.", "name another directory: cues init DIR."
        )
    write(directory, name)
    if output.json:
        output.say("", directory=str(directory), name=name, files=list(FILES))
        return
    out(f"{directory}: {', '.join(FILES)}")
    out(f"Next: {'' if directory == Path('.') else f'cd {directory}; '}cues run graph.py; pytest")


def project_name(directory: Path) -> str:
    """The name of a directory as the name of a package: lower-case ASCII letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")
    return name or "pipeline"


def write(directory: Path, name: str) -> None:
    """Write the files of the project. After an error none of them is left; a file that is there stays as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        for file, template in FILES.items():
            path = directory / file
            with path.open("x") as opened:
                undo.callback(path.unlink)
                opened.write(template.format(name=name))
        undo.pop_all()
