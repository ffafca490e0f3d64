"""Pictures of a plan: as text for a terminal, as a Mermaid flowchart for a page.

    flights: 2 sources, 1 stream; 3 queues; failures are written to errors

      source  rows     → rows
                       exactly-once: its position commits with its messages
      stream  enrich   rows as flight | weather → enriched
                       exactly-once · state by place

For every processor, both show its queues, its guarantee, and the options that change how it is called. For the graph,
they show the queues that are fed from outside, the queues that no processor reads, and the cycles.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from cues.graphs.options import Kind
from cues.graphs.plan import Plan, away, partitions_of, unwritten
from cues.graphs.processor import Node, Port, function_name
from cues.queues.options import kept

_SHAPES: Final[dict[Kind, tuple[str, str]]] = {
    "source": ("([", "])"),
    "stream": ("[", "]"),
    "frame": ("[", "]"),
    "sink": ("[/", "/]"),
}
"""The two sides of the box of each kind of processor in Mermaid."""


def text(plan: Plan) -> str:
    """The graph as lines for a person, sources first."""
    nodes = in_order(plan)
    name_width = max(len(node.name) for node in nodes)
    indent = " " * (2 + 6 + 2 + name_width + 3)
    usual = _usual_errors(plan)
    lines = [_headline(plan), ""]
    for node in nodes:
        flow = (" + " if node.mode == "join" else " | ").join(_port(plan, port) for port in node.inputs)
        outputs = ", ".join(_port(plan, port) + _pending(plan, node, port) for port in node.outputs)
        flow = " → ".join(filter(None, (flow, outputs))) if flow else f"→ {outputs}"
        lines.append(f"  {node.kind:<6}  {node.name:<{name_width}}   {flow}")
        failures = [] if node.fn is None or node.errors == usual else [_failures(node.errors)]
        lines.append(indent + " · ".join([node.guarantee, *_manner(plan, node), *failures]))
    notes = _notes(plan)
    if notes:
        lines += ["", *(f"  {note}" for note in notes)]
    return "\n".join(lines)


def mermaid(plan: Plan) -> str:
    """The graph as a Mermaid flowchart: processors are boxes, queues are drums, failures are dotted lines."""
    ids = {queue: f"q{number}" for number, queue in enumerate(plan.queues)}
    lines = ["flowchart LR", *(f"%% {note}" for note in (_headline(plan), *_notes(plan)))]
    at_home = [queue for queue in plan.queues if plan.queues[queue].path is None]
    lines += [f"    {ids[queue]}[({_quoted(_drum(plan, queue))})]" for queue in at_home]
    for number, (path, queues) in enumerate(_elsewhere(plan).items()):
        lines.append(f"    subgraph s{number}[{_quoted(path)}]")
        lines += [f"        {ids[queue]}[({_quoted(_drum(plan, queue))})]" for queue in queues]
        lines.append("    end")
    lines += [f"    send_{ids[queue]}([{_quoted('cues send')}]) --> {ids[queue]}" for queue in plan.fed]
    for number, node in enumerate(in_order(plan)):
        if node.fn is None:
            continue  # its queue is drawn already
        me = f"p{number}"
        label = _quoted(node.name, node.guarantee)
        left, right = _SHAPES[node.kind]
        lines.append(f"    {me}{left}{label}{right}")
        lines += [f"    {ids[port.queue]} {_edge(plan, port)} {me}" for port in node.inputs]
        for port in node.outputs:
            how = "pending: " if _pending(plan, node, port) else ""
            lines.append(f"    {me} {_edge(plan, port, how)} {ids[port.queue]}")
        lines += [f"    {ids[port.queue]} {_edge(plan, port, 'imperative: ')} {me}" for port in node.tailers]
        lines += [f"    {me} {_edge(plan, port, 'imperative: ')} {ids[port.queue]}" for port in node.appenders]
        if node.errors:
            lines.append(f"    {me} -.-> {ids[node.errors]}")
    return "\n".join(lines)


def describe(plan: Plan) -> list[dict[str, Any]]:
    """Each processor as plain data, in the order of :func:`text`."""
    ports = ("inputs", "outputs", "tailers", "appenders")
    return [
        {
            "processor": node.id,
            "kind": node.kind,
            "function": function_name(node.fn),
            "mode": node.mode,
            **{name: {port.binding: port.queue for port in getattr(node, name)} for name in ports},
            "errors": node.errors,
            "strategy": node.strategy if node.kind != "source" else None,
            "guarantee": node.guarantee,
            "across": node.options.across if away(node, plan.queues) else None,
            "partitions": partitions_of(node, plan.queues),
            "stores": {q: plan.queues[q].path for q in plan.named(node) if plan.queues[q].path is not None},
            "cycle": next((list(cycle) for cycle in plan.topology().cycles() if node.name in cycle), None),
        }
        for node in in_order(plan)
    ]


def in_order(plan: Plan) -> list[Node]:
    """Sources first, then every processor after those that it depends on; otherwise in the order of declaration."""
    topology = plan.topology()
    groups = {name: set(cycle) for cycle in topology.cycles() for name in cycle}
    left = sorted(plan.nodes, key=lambda node: node.kind != "source")
    done: set[str] = set()
    ordered: list[Node] = []
    while left:
        ready = (n for n in left if topology.dependencies(n.name) <= done | groups.get(n.name, set()))
        node = next(ready, left[0])  # the first one inside a cycle
        left.remove(node)
        done.add(node.name)
        ordered.append(node)
    return ordered


def _headline(plan: Plan) -> str:
    kinds = Counter(node.kind for node in plan.nodes)
    counts = [_count(kinds[kind], kind) for kind in _SHAPES if kinds[kind]]
    queues = _count(len(plan.queues), "queue")
    return f"{plan.id}: {', '.join(counts)}; {queues}; {_failures(_usual_errors(plan), 'its processor')}"


def _usual_errors(plan: Plan) -> str | None:
    """The error queue of most processors."""
    counts = Counter(node.errors for node in plan.nodes if node.fn is not None)
    return counts.most_common(1)[0][0] if counts else None


def _notes(plan: Plan) -> list[str]:
    notes = [f"A processor reads {unwritten(queue, near)}." for queue, near in plan.misspelt.items()]
    if plan.fed:
        notes.append(f"Fed from outside (cues send): {', '.join(plan.fed)}")
    read = {port.queue for node in plan.nodes for port in node.reads}
    ends = [queue for queue in plan.queues if queue not in read]
    if ends:
        notes.append(f"Read by no processor: {', '.join(ends)}")
    notes += [f"Cycle: {_round(plan, cycle)}" for cycle in plan.topology().cycles()]
    notes += [f"In the store {path}: {', '.join(queues)}" for path, queues in _elsewhere(plan).items()]
    notes += _retention(plan)
    parted = [queue for queue, options in plan.queues.items() if options.partitions > 1]
    if parted:
        ways = ", ".join(f"{queue} {_placing(plan, queue)}" for queue in parted)
        notes.append(f"×n: the number of partitions; messages keep their order in each partition: {ways}")
    if plan.crossing:
        notes.append("@: crosses stores; messages are written twice, first at home on a fork queue")
    if any(node.pending for node in plan.nodes):
        notes.append(
            "(pending): written there directly; readers of committed messages see them after the commit at home"
        )
    modes = {node.mode for node in plan.nodes}
    if "join" in modes:
        notes.append("a + b: one message from each")
    if "alts" in modes:
        notes.append("a | b: one message from any")
    return notes


def _retention(plan: Plan) -> list[str]:
    """Which messages the queues keep, if some do not keep all."""
    keeping: dict[str, list[str]] = {}
    for queue in plan.queues:
        policy = plan.new_options(queue).to_dict().get("retention")
        if policy:
            keeping.setdefault(kept(policy) or "", []).append(queue)
    return [f"Retention of {', '.join(queues)}: {what}" for what, queues in keeping.items()]


def _elsewhere(plan: Plan) -> dict[str, list[str]]:
    """Queues that are in other stores, by the path of their store."""
    queues: dict[str, list[str]] = {}
    for queue, options in plan.queues.items():
        if options.path is not None:
            queues.setdefault(options.path, []).append(queue)
    return queues


def _round(plan: Plan, cycle: tuple[str, ...]) -> str:
    """One cycle, with its queues."""
    edges = sorted(edge for edge in plan.topology().edges if edge[0] in cycle and edge[2] in cycle)
    ways: list[list[tuple[str, str, str]]] = [[edge] for edge in edges if edge[0] == cycle[0]]
    while ways:
        way = ways.pop(0)
        if way[-1][2] == cycle[0]:
            return " → ".join(f"{writer} → ({queue})" for writer, queue, _ in way) + f" → {cycle[0]}"
        seen = {writer for writer, _, _ in way}
        ways += [[*way, edge] for edge in edges if edge[0] == way[-1][2] and edge[2] not in seen - {cycle[0]}]
    return ", ".join(cycle)


def _pending(plan: Plan, node: Node, port: Port) -> str:
    return " (pending)" if node.pending and plan.queues[port.queue].path is not None else ""


def _port(plan: Plan, port: Port) -> str:
    shown = "" if port.binding == port.queue else f" as {port.binding}"
    options = plan.queues[port.queue]
    many = f" ×{options.partitions}" if options.partitions > 1 else ""
    return f"{port.queue}{shown}{many}" + (f" @{options.path}" if options.path else "")


def _placing(plan: Plan, queue: str) -> str:
    key, way = plan.queues[queue].placing
    return f"by {key}" if key is not None and way == "murmur2" else f"by {key} ({way})" if key is not None else f"{way}"


def _drum(plan: Plan, queue: str) -> str:
    """Return a queue's name, and the number of its partitions if there are several."""
    partitions = plan.queues[queue].partitions
    return f"{queue} ×{partitions}" if partitions > 1 else queue


def _manner(plan: Plan, node: Node) -> list[str]:
    """Return phrases for the ways in which calls of the processor differ from the default."""
    options = node.options
    manner = []
    if node.returns_messages and len(node.outputs) > 1:
        manner.append("the same to each output")
    if node.kind == "frame":
        manner.append(f"a DataFrame of up to {options.batch_size:,}, on Spark only")
    elif options.batch:
        manner.append(f"in batches of up to {options.batch_size:,}")
    partitions = partitions_of(node, plan.queues)
    if partitions > 1:
        threads = min(options.instances, partitions)
        manner.append(f"a unit for each of {partitions} partitions{f', in {threads} threads' if threads > 1 else ''}")
    if options.concurrency > 1:
        manner.append(f"up to {options.concurrency} calls at once")
    if node.imperative:
        read = [f"reads {_port(plan, port)}" for port in node.tailers]
        written = [f"writes {_port(plan, port)}{_pending(plan, node, port)}" for port in node.appenders]
        manner.append(f"imperative: {', '.join(read + written)}")
    if options.key is not None:
        key = options.key if isinstance(options.key, str) else getattr(options.key, "__name__", "a function")
        manner.append(f"state by {key}")
    filters = [name for name in ("types", "topics", "where") if getattr(options, name) is not None]
    if filters:
        manner.append(f"filtered by {', '.join(filters)}")
    if options.retry.attempts > 1:
        manner.append(f"up to {options.retry.attempts} attempts")
    return manner


def _failures(errors: str | None, what: str = "it") -> str:
    return f"failures are written to {errors}" if errors else f"an error stops {what}"


def _edge(plan: Plan, port: Port, how: str = "") -> str:
    """An arrow; a thick one if it crosses stores."""
    line = "--" if plan.queues[port.queue].path is None else "=="
    if not how and port.binding == port.queue:
        return f"{line}>"
    return f"{line} {_quoted(how + port.binding)} {line}>"


def _quoted(*lines: str) -> str:
    """A Mermaid label."""
    escaped = [line.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;") for line in lines]
    return '"' + "<br>".join(escaped) + '"'


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
