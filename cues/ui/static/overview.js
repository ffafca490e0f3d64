// The graph with its problems, processors, workers and groups; and the list of queues.

import { h, say, ago, brief, bytes, failures, number, rate, plural, toErrors, toProcessor, toQueue } from "./dom.js";
import { ask } from "./api.js";
import { Graph } from "./graph.js";
import { EVERY_MS } from "./history.js";
import { LiveTable } from "./live.js";

export const STATES = { running: "running", stopped: "stopped", silent: "does not answer", off: "not running", new: "has not run" };

export const stateOf = (row) => ({
  text: row.growing && row.state === "running" ? "falls behind" : STATES[row.state],
  kind: row.state === "stopped" || row.state === "silent" ? "bad" : row.growing ? "warn" : row.state === "running" ? "good" : "quiet",
});

// Figures that have more than a text; the others are columns by their unit.
const marked = {
  lag: { title: "Wait", cell: (row) => ({ text: row.lag ? number(row.lag) : "", kind: row.growing ? "warn" : "" }) },
  errors: { title: "Failed", cell: (row) => (row.errors ? { text: failures(row), href: toErrors(row.id), kind: "bad" } : "") },
};
const shownAs = {
  messages: (n) => (n ? number(n) : ""),
  "messages a second": rate,
  seconds: (n) => (n === null ? "" : brief(n)),
};
export const figureColumn = ({ name, title, unit }) => ({
  title: title[0].toUpperCase() + title.slice(1), kind: "num", cell: (row) => shownAs[unit](row[name]), ...marked[name],
});

const processorColumns = (figures) => [
  { title: "Processor", cell: (row) => ({ text: row.name, href: toProcessor(row.id) }) },
  { title: "State", cell: stateOf },
  { title: "Reads", cell: (row) => row.inputs.map((each) => each.queue).join(", ") },
  ...figures.map(figureColumn),
  { title: "Last step", cell: (row) => ago(row.stepped) },
  { title: "Process", cell: (row) => row.owners.map((each) => (each.worker ? `${each.worker} (${each.pid})` : each.pid)).join(", ") },
];

export async function graphView(parts, query, page) {
  const problems = h("ul.problems");
  const frame = h("div.frame");
  let layout = await ask("graph");
  const processors = new LiveTable("Processors", processorColumns(layout.figures), (row) => row.id, "No graph has run on this store.");
  const workers = new LiveTable("Workers", [
    { title: "Worker", cell: (row) => row.worker },
    { title: "Process", kind: "num", cell: (row) => String(row.pid) },
    { title: "Processors", cell: (row) => row.units.map((unit) => unit.slice(unit.indexOf(".") + 1)).join(", ") },
    { title: "Started again", kind: "num", cell: (row) => (row.restarts ? { text: plural(row.restarts, "time"), kind: "warn" } : "") },
    { title: "Last failure", cell: (row) => (row.last_failure ? `${ago(row.last_failure.time)}: ${row.last_failure.text}` : "") },
  ], (row) => `${row.graph}/${row.worker}`);
  const members = new LiveTable("Consumer groups", [
    { title: "Group", cell: (row) => row.group },
    { title: "Member", cell: (row) => row.member || { text: "none", kind: "warn" } },
    { title: "Process", cell: (row) => row.process },
    { title: "Reads", cell: (row) => row.reads },
    { title: "Wait", kind: "num", cell: (row) => number(row.lag) },
  ], (row) => `${row.group}/${row.member}`);
  const consumers = new LiveTable("Consumers", [
    { title: "Consumer", cell: (row) => row.consumer },
    { title: "Process", cell: (row) => (row.pid ? `${row.pid} (${row.state})` : { text: "none", kind: row.lag ? "warn" : "quiet" }) },
    { title: "Reads", cell: (row) => row.sources.map((each) => `${each.log}, at ${number(each.position)}`).join("; ") },
    { title: "Wait", kind: "num", cell: (row) => number(row.lag) },
    { title: "Checkpoint", cell: (row) => row.checkpoint },
    { title: "Noted", cell: (row) => ago(row.noted) },
  ], (row) => row.checkpoint);
  const transactions = new LiveTable("Pending transactions", [
    { title: "Queue", cell: (row) => row.log },
    { title: "Of", cell: (row) => row.owner || `publisher ${row.publisher}` },
    { title: "Process", cell: (row) => (row.pid ? `${row.pid} (${row.state})` : { text: "none", kind: "warn" }) },
    { title: "Messages", kind: "num", cell: (row) => (row.messages === null ? "" : number(row.messages)) },
    { title: "Since", cell: (row) => ago(row.since) },
  ], (row) => `${row.log}/${row.publisher}`);
  const readers = new LiveTable("Readers and writers in other stores", [
    { title: "Processor", cell: (row) => row.processor },
    { title: "Does", cell: (row) => row.does },
    { title: "Store", cell: (row) => row.store },
  ], (row) => `${row.processor}/${row.does}`);
  const drivers = new LiveTable("Drivers", [
    { title: "Graph", cell: (row) => row.graph },
    { title: "Driver", cell: (row) => `${row.pid} on ${row.host}` },
    { title: "State", cell: (row) => ({ text: row.state, kind: row.state === "runs" ? "good" : "warn" }) },
  ], (row) => `${row.graph}/${row.host}/${row.pid}`);
  const optional = [["Workers", workers], ["Drivers", drivers], ["Consumer groups", members], ["Consumers", consumers],
    ["Pending transactions", transactions], ["Other stores", readers]].map(([title, each]) => {
    const section = h("section", { hidden: true }, h("h2", title), each.element);
    return { section, table: each };
  });
  const trouble = h("section", { "aria-label": "Problems" }, problems);
  const element = h("div", trouble, h("div.split",
    h("section", { "aria-label": "Graph" }, h("h2.unseen", "Graph"), frame,
      h("p.legend", "Boxes are processors: their rate in the last hour, in which a thin line is the messages that waited; and the time within which 99 % of the results came, from the append to the commit. Pills are queues with their messages. On a line: messages a second, and messages that wait.")),
    h("section", h("h2", "Processors"), processors.element)), optional.map((each) => each.section));

  let graph = null;
  let known = "";
  const shapeOf = (overview) => overview.processors.map((row) => `${row.id}:${row.inputs.map((each) => each.queue)}>${row.outputs}`).join();
  const draw = () => {
    if (!layout.nodes.length) {
      frame.replaceChildren(h("p.quiet", "There is no graph to draw: no processor has run on this store."));
      return;
    }
    graph = new Graph(layout, element.clientWidth || 900);
    frame.replaceChildren(graph.element);
    if (page.overview) graph.update(page.overview);
    graph.remember(past);
    arrange();
  };
  // A narrow picture has the table of processors at its side, if that has room for all its columns.
  const arrange = () => {
    element.classList.remove("beside");
    const left = element.clientWidth - (graph?.element.firstChild.clientWidth || 0);
    if (!graph?.down || left < 640) return;
    element.classList.add("beside");
    const { scrollWidth, clientWidth } = processors.scroll;
    if (scrollWidth > clientWidth) element.classList.remove("beside");
  };
  let past = {};
  const remember = async () => {
    if (document.hidden) return;
    past = (await ask("history").catch(() => ({ processors: past }))).processors;
    graph?.remember(past);
  };
  await remember();
  const timer = setInterval(remember, EVERY_MS);
  let width = 0;
  const watch = new ResizeObserver(() => {
    if (Math.abs(element.clientWidth - width) < 24) return;
    width = element.clientWidth;
    draw();
  });
  return {
    title: "Graph",
    element,
    drawn: () => {
      width = element.clientWidth;
      draw();
      watch.observe(element);
    },
    leave: () => {
      watch.disconnect();
      clearInterval(timer);
    },
    update: async (overview) => {
      const shape = shapeOf(overview);
      if (known && shape !== known) {
        layout = await ask("graph");
        draw();
      }
      graph?.update(overview);
      updateProblems(problems, overview.problems);
      processors.update(overview.processors);
      if (shape !== known) arrange();
      known = shape;
      workers.update(overview.workers);
      drivers.update(overview.drivers || []);
      members.update(overview.groups.flatMap(memberRows));
      consumers.update(overview.consumers);
      transactions.update(overview.transactions);
      readers.update([
        ...overview.readers.map((row) => ({ ...row, does: `reads ${row.queue}, at ${number(row.position)}` })),
        ...overview.forwards.map((row) => ({ ...row, does: row.waiting === null ? "writes; the store cannot be opened" : `writes; ${plural(row.waiting, "message")} wait` })),
      ]);
      for (const each of optional) each.section.hidden = !each.table.rows.size;
    },
  };
}

function memberRows(group) {
  const rows = [...group.members, null].map((member) => {
    const held = group.partitions.filter((each) => each.member === (member ? member.member : null));
    return {
      group: group.group, member: member?.member || "", process: member ? `${member.pid} (${member.state})` : "",
      reads: held.map((each) => each.log).join(", "), lag: held.reduce((sum, each) => sum + each.lag, 0), held,
    };
  });
  return rows.filter((row) => row.member || row.held.length);
}

function updateProblems(list, problems) {
  while (list.children.length > problems.length) list.lastChild.remove();
  problems.forEach(({ level, text, link }, place) => {
    let item = list.children[place];
    const href = `#/${link.split("/").map(encodeURIComponent).join("/")}`;
    if (!item) {
      item = h("li", h("span.level"), " ", h("a"));
      list.append(item);
    }
    if (item.className !== level) item.className = level;
    say(item.firstChild, level === "error" ? "Error" : "Warning");
    if (item.lastChild.getAttribute("href") !== href) item.lastChild.setAttribute("href", href);
    say(item.lastChild, text);
  });
  list.hidden = !problems.length;
}

export async function queuesView() {
  const queues = new LiveTable("Queues", [
    { title: "Queue", cell: (row) => ({ text: row.name, href: toQueue(row.name) }) },
    { title: "Messages", kind: "num", cell: (row) => number(row.messages) },
    { title: "First", kind: "num", cell: (row) => (row.messages ? number(row.first) : "") },
    { title: "Last", kind: "num", cell: (row) => (row.messages ? number(row.last) : "") },
    { title: "Per second", kind: "num", cell: (row) => rate(row.rate) },
    { title: "Size", kind: "num", cell: (row) => bytes(row.bytes) },
    { title: "Last append", cell: (row) => ago(row.appended) },
    { title: "Options", cell: (row) => options(row) },
  ], (row) => row.name, "The store has no queues yet.");
  return {
    title: "Queues",
    element: h("section", h("h2", "Queues"), queues.element),
    update: (overview) => queues.update(overview.queues),
  };
}

export function options(row) {
  const words = Object.entries(row.options || {}).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  return words.join(", ");
}

