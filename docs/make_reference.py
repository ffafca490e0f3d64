"""Make the pages of the reference from the code.

The site has them under reference/ (site_hooks.py). ``python docs/make_reference.py DIRECTORY`` writes them as files.

    module     __all__, in order of the alphabet
    class      signature, docstring, fields, then its public methods and properties
    function   signature, docstring

All text comes from docstrings and signatures. It does not depend on the version of Python: signatures and defaults
are formatted here.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = {
    "cues": "stores, queues and graphs",
    "cues.errors": "every error, in one tree",
    "cues.testing": "help for tests of graphs",
    "cues.testing_plugin": "fixtures of pytest",
    "cues.codec": "messages to bytes and back",
    "cues.groups": "consumer groups",
    "cues.txn": "transactions across stores",
    "cues.checkpoints": "checkpoints in databases, files and stores",
    "cues.processors": "ready-made sources and sinks",
    "cues.processors.files": "sources that read files",
    "cues.processors.file_source": "sources over many files, and logs that grow",
    "cues.processors.families": "names of logs and of their rotated files",
    "cues.processors.file_sink": "sinks that write files",
    "cues.processors.sql": "a sink into SQLite",
    "cues.processors.sql_source": "a source of the rows of a table",
    "cues.processors.sql_sink": "sinks into tables",
    "cues.processors.postgres_changes": "a source of the changes of PostgreSQL tables",
    "cues.processors.mysql_changes": "a source of the changes of MySQL and MariaDB tables",
    "cues.processors.pgoutput": "the messages and values of PostgreSQL's logical replication",
    "cues.processors.delta": "Delta tables as targets of sinks",
    "cues.processors.iceberg": "Iceberg tables as targets of sinks",
    "cues.processors.delta_source": "Delta tables as sources: snapshots, versions, changes",
    "cues.processors.columns": "types of the columns of tables in files",
    "cues.processors.sql_values": "values in the columns of databases",
    "cues.processors.foreign": "reserved keys that messages from outside may not set",
    "cues.processors.kafka_source": "a source of the records of a Kafka topic",
    "cues.processors.kafka_sink": "a sink into a Kafka topic",
    "cues.processors.redis_streams": "Redis streams as a source, and Redis as the target of sinks",
    "cues.processors.link": "a queue continued on another machine, exactly once",
    "cues.processors.mqtt": "messages of MQTT topics as a source, and a publisher",
    "cues.processors.rabbitmq": "messages of a queue of RabbitMQ as a source, and a publisher",
    "cues.processors.nats_streams": "NATS streams as a source, and a subject as the target of sinks",
    "cues.processors.sqs": "messages of Amazon SQS as a source, and a sender",
    "cues.processors.kinesis": "records of an Amazon Kinesis stream as a source, and a sender",
    "cues.processors.databases": "SQLite, PostgreSQL and DuckDB in one form",
    "cues.processors.http": "answers, failures, rates and signatures of the HTTP processors",
    "cues.processors.http_sink": "a request for each message",
    "cues.processors.http_source": "a source of the items of a resource",
    "cues.processors.event_stream": "a source of server-sent events",
    "cues.processors.websocket": "a source of the messages of a WebSocket",
    "cues.processors.webhook": "a source that is a server",
    "cues.processors.shape": "dedupe, flat map, split, sample, merge",
    "cues.schemas": "types of messages",
    "cues.processors.windows": "windows of event time",
    "cues.processors.joins": "joins by key and time",
    "cues.processors.aggregates": "totals of all messages of a key",
    "cues.processors.reducers": "what windows and aggregates compute",
    "cues.processors.event_time": "watermarks and late messages",
    "cues.spark": "Spark",
    "cues.faults": "named crash points",
    "cues.base.events": "events of a running graph",
}
"""The public modules, and a title for each."""

SHOWN_DUNDERS = {"__len__", "__iter__", "__getitem__", "__contains__", "__enter__", "__call__"}


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    written = {f"{name}.md": module_page(name, title) for name, title in MODULES.items()}
    opening = "Every public name, from the code. See also [options](../options.md) and [commands](../cli.md).\n"
    lines = ["# Reference\n", opening]
    lines += ["| page | content |", "|---|---|"]
    lines += [f"| [{name}]({name}.md) | {title} |" for name, title in MODULES.items()]
    written["index.md"] = "\n".join(lines) + "\n"
    return written


# Modules


def module_page(name: str, title: str) -> str:
    module = importlib.import_module(name)
    names = public_names(module)
    if name == "cues":
        errors = importlib.import_module("cues.errors")
        of_errors = [n for n in names if getattr(getattr(module, n), "__module__", "") == "cues.errors"]
        names = [n for n in names if n not in of_errors and not isinstance(getattr(module, n), types.ModuleType)]
        exported = ", ".join(f"[`{n}`](cues.errors.md#{anchor(n)})" for n in of_errors if hasattr(errors, n))
    lines = [f"# {name}: {title}\n", markdown(inspect.getdoc(module) or ""), ""]
    if name == "cues" and exported:
        lines += [f"Errors that are names of `cues` as well: {exported}.\n"]
    notes = attribute_notes(tree_of(name).body)
    for public in names:
        lines += describe(public, getattr(module, public), notes.get(public, ""))
    return "\n".join(lines).rstrip() + "\n"


def public_names(module: types.ModuleType) -> list[str]:
    """The names of ``__all__``; of a module without one the public names that it defines."""
    declared = getattr(module, "__all__", None)
    if declared is None:
        declared = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return sorted(declared, key=lambda name: (name.lower(), name))


def anchor(name: str) -> str:
    return name.lower()


def describe(name: str, value: Any, note: str) -> Iterator[str]:
    yield f"## {name}\n"
    if inspect.isclass(value):
        yield from describe_class(name, value)
    elif callable(value) and hasattr(value, "__name__"):
        yield fenced(f"{name}{signature(value)}")
        yield markdown(inspect.getdoc(value) or "") + "\n"
    elif note:
        yield markdown(note) + "\n"
    else:
        yield f"A `{type(value).__name__}`.\n"


def describe_class(name: str, cls: type[Any]) -> Iterator[str]:
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    if issubclass(cls, BaseException):
        yield fenced(f"class {name}({', '.join(bases)})")
    elif issubclass(cls, enum.Enum) or getattr(cls, "_is_protocol", False) or hasattr(cls, "__total__"):
        yield fenced(f"class {name}")
    else:
        yield fenced(f"{name}{signature(cls)}")
    text = vars(cls).get("__doc__") or ""
    if text and not text.startswith(f"{cls.__name__}("):  # a dataclass without docstring is given its signature
        yield markdown(inspect.cleandoc(text)) + "\n"
    yield from fields(cls)
    for member, owner in members(cls):
        yield from describe_member(name, member, inspect.getattr_static(owner, member))


def members(cls: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    """Public methods and properties, also of bases that are part of Cues, in the order of the source."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        if not owner.__module__.startswith("cues") or (owner.__name__ == "CuesError" and cls is not owner):
            continue
        for member, value in vars(owner).items():
            if member in seen or (member.startswith("_") and member not in SHOWN_DUNDERS):
                continue
            if isinstance(value, (types.FunctionType, property, classmethod, staticmethod)):
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if not (getattr(function, "__module__", "") or "").startswith("cues"):
                    continue  # made by dataclasses or NamedTuple
                seen.add(member)
                yield member, owner


def describe_member(name: str, member: str, value: Any) -> Iterator[str]:
    if isinstance(value, property):
        returns = inspect.get_annotations(value.fget).get("return") if value.fget else None
        yield f"### {name}.{member}\n"
        yield fenced(f"{member}: {annotation(returns)}" if returns else member)
        text = value.__doc__
    else:
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        yield f"### {name}.{member}()\n"
        yield fenced(f"{member}{signature(function, bound=not isinstance(value, staticmethod))}")
        text = function.__doc__
    if text:
        yield markdown(inspect.cleandoc(text)) + "\n"


def fields(cls: type[Any]) -> Iterator[str]:
    """The annotated attributes of a class, with the string below each."""
    notes = attribute_notes(body_of(cls))
    rows = []
    if issubclass(cls, enum.Enum):
        rows = [(item.name, "", notes.get(item.name, "")) for item in cls]
    for owner in reversed(cls.__mro__):
        if owner.__module__.startswith("cues") and owner.__name__ != "CuesError":
            for field, kind in inspect.get_annotations(owner).items():
                if not field.startswith("_"):
                    rows.append((field, annotation(kind), notes.get(field, "")))
    if rows:
        yield "| field | type | |\n|---|---|---|"
        for field, kind, note in {row[0]: row for row in rows}.values():
            shown = f"`{kind}`".replace("|", "\\|") if kind else ""
            yield f"| `{field}` | {shown} | {' '.join(markdown(note).split())} |"
        yield ""


@functools.cache
def tree_of(name: str) -> ast.Module:
    """The syntax tree of a module. It is parsed once: ``inspect.getsource`` would parse it for each of its classes."""
    source = Path(str(importlib.import_module(name).__file__))  # of a compiled module the source is beside it
    return ast.parse(source.with_name(source.name.partition(".")[0] + ".py").read_text(encoding="utf-8"))


def body_of(cls: type[Any]) -> list[ast.stmt]:
    """The statements of a class; none where its module does not define it."""
    body = tree_of(cls.__module__).body
    for part in cls.__qualname__.split("."):
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
    return body


def attribute_notes(body: list[ast.stmt]) -> dict[str, str]:
    """The strings that are written below the assignments of a class or a module, by name."""
    notes = {}
    for first, second in itertools.pairwise(body):
        text = second.value if isinstance(second, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            targets = first.targets if isinstance(first, ast.Assign) else [getattr(first, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name):
                    notes[target.id] = inspect.cleandoc(text.value)
    return notes


# Signatures


def signature(function: Any, bound: bool = True) -> str:
    """The signature as the source says it, one parameter a line where one line is too short."""
    try:
        found = inspect.signature(function)
    except (ValueError, TypeError):
        return "(...)"
    parameters = list(found.parameters.values())
    if parameters and bound and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    written: list[str] = []
    before: Any = None
    for parameter in parameters:
        kind = parameter.kind
        if kind is parameter.KEYWORD_ONLY and before not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            written.append("*")
        if before is parameter.POSITIONAL_ONLY and kind is not before:
            written.append("/")
        written.append(one_parameter(parameter))
        before = kind
    if before is inspect.Parameter.POSITIONAL_ONLY:
        written.append("/")
    returns = found.return_annotation
    end = "" if returns is found.empty or inspect.isclass(function) else f" -> {annotation(returns)}"
    line = f"({', '.join(written)}){end}"
    if len(line) <= 80:
        return line
    return "(\n" + "".join(f"    {item},\n" for item in written) + f"){end}"


def one_parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += (" = " if ":" in text else "=") + default(parameter.default)
    return text


def annotation(kind: Any) -> str:
    if hasattr(kind, "__forward_arg__"):
        kind = kind.__forward_arg__
    if isinstance(kind, str):
        return kind
    return getattr(kind, "__name__", None) or re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(kind))


def default(value: Any) -> str:
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(value.__name__)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


# Text


def fenced(text: str) -> str:
    return f"```python\n{text}\n```\n"


def markdown(text: str) -> str:
    """The reStructuredText of docstrings as Markdown; indented blocks become fenced ones."""
    lines: list[str] = []
    code = False
    for line in inspect.cleandoc(text).splitlines():
        inside = line.startswith("    ") or (code and not line)
        if inside and not code and not (lines and lines[-1].lstrip().startswith(("-", "*", "1"))):
            lines += ["", "```text"] if lines and lines[-1] else ["```text"]
            code = True
        elif code and not inside:
            while not lines[-1]:
                lines.pop()
            lines += ["```", ""]
            code = False
        lines.append(line[4:] if code else prose(line))
    if code:
        lines.append("```")
    return "\n".join(lines)


def prose(line: str) -> str:
    line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line)
    line = line.replace("``", "`")
    parts = line.split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def write(directory: Path) -> None:
    """Write the pages into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/make_reference.py DIRECTORY")
    write(Path(sys.argv[1]))
