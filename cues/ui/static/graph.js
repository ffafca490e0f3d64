// The picture of the graph. The server gives ranks and places (cues/ui/shape.py); here they become pixels, from left to
// right where that fits, else from top to bottom. Updates change texts and classes, never the elements.

import { h, s, say, brief, failures, short, rate, number, toProcessor, toQueue } from "./dom.js";
import { spark } from "./history.js";

const PROCESSOR = { w: 156, h: 62 };
const QUEUE = { w: 118, h: 30 };
const ACROSS = { row: 78, gap: 70 }; // from left to right: pixels between places, and between ranks
const DOWN = { row: 172, gap: 46 };
const SCALE_MIN = 0.62; // smaller text cannot be read: the picture scrolls instead
const SCALE_GOOD = 0.8;

const sizeOf = (id) => (id.startsWith("p:") ? PROCESSOR : QUEUE);

/** A name that fits in so many characters; the middle is left out. */
function fitted(name, most) {
  const letters = [...name];
  if (letters.length <= most) return name;
  const head = Math.ceil((most - 1) / 2);
  return letters.slice(0, head).join("") + "…" + letters.slice(letters.length - (most - 1 - head)).join("");
}

export class Graph {
  constructor(layout, width) {
    this.layout = layout;
    this.nodes = new Map();
    this.edges = [];
    this.down = this.choose(width);
    this.element = this.draw(width);
  }

  extent(down) {
    const { row, gap } = down ? DOWN : ACROSS;
    const thick = Array(this.layout.ranks).fill(0);
    for (const node of this.layout.nodes) {
      const size = sizeOf(node.id);
      thick[node.rank] = Math.max(thick[node.rank], down ? size.h : size.w);
    }
    const starts = [];
    let at = 0;
    for (const each of thick) {
      starts.push(at + each / 2);
      at += each + gap;
    }
    const along = at - gap + 12;
    const across = (this.layout.places - 1) * row + (down ? PROCESSOR.w : PROCESSOR.h) + 24;
    return { starts, row, width: down ? across : along, height: down ? along : across };
  }

  choose(width) {
    const flat = Math.min(1, width / this.extent(false).width);
    return flat < SCALE_GOOD && Math.min(1, width / this.extent(true).width) > flat;
  }

  draw(width) {
    const { starts, row, width: w, height } = this.extent(this.down);
    this.scale = Math.max(SCALE_MIN, Math.min(1, width / w));
    const point = (rank, place) => {
      const along = starts[rank] + 6;
      const across = place * row + (this.down ? PROCESSOR.w : PROCESSOR.h) / 2 + 12;
      return this.down ? [across, along] : [along, across];
    };
    const svg = s("svg", {
      viewBox: `0 0 ${w} ${height}`, width: Math.round(w * this.scale), height: Math.round(height * this.scale),
      role: "group", "aria-label": "Graph of processors and queues",
    });
    const lines = s("g", { "aria-hidden": "true" });
    const boxes = s("g");
    svg.append(lines, boxes);
    const places = new Map(this.layout.nodes.map((node) => [node.id, point(node.rank, node.place)]));
    for (const edge of this.layout.edges) lines.append(this.edge(edge, places, point));
    const order = [...this.layout.nodes].sort((a, b) => a.rank - b.rank || a.place - b.place);
    for (const node of order) boxes.append(this.node(node.id, places.get(node.id)));
    return h(this.down ? "div.graph.down" : "div.graph", { tabindex: "0", role: "region", "aria-label": "Graph" }, svg);
  }

  edge(edge, places, point) {
    const along = this.down ? 1 : 0;
    const sign = edge.back ? -1 : 1;
    const shift = edge.back ? 11 : 0;
    const ends = [edge.from, edge.to].map((id, last) => {
      const place = [...places.get(id)];
      place[along] += (last ? -1 : 1) * sign * (this.down ? sizeOf(id).h : sizeOf(id).w) / 2;
      place[1 - along] += shift;
      return place;
    });
    const points = [ends[0], ...edge.bends.map(([rank, place]) => point(rank, place)), ends[1]];
    let path = `M${points[0]}`;
    for (let i = 1; i < points.length; i++) {
      const [a, b] = [points[i - 1], points[i]];
      const middle = (a[along] + b[along]) / 2;
      const [c, d] = [[...a], [...b]];
      c[along] = d[along] = middle;
      path += `C${c} ${d} ${b}`;
    }
    // The label is in the gap beside the processor, where no other node is.
    const takes = edge.to.startsWith("p:");
    const [near, far] = takes ? [points.at(-1), points.at(-2)] : [points[0], points[1]];
    const label = [(near[0] + far[0]) / 2, (near[1] + far[1]) / 2];
    const lineUp = this.down ? { x: label[0] + 7, "text-anchor": "start" } : { x: label[0], "text-anchor": "middle" };
    const flow = s("path.edge", { d: path, "marker-end": null });
    const tip = ends[1];
    const arrow = this.down
      ? `M${tip[0] - 4},${tip[1] - 7 * sign}L${tip}L${tip[0] + 4},${tip[1] - 7 * sign}`
      : `M${tip[0] - 7 * sign},${tip[1] - 4}L${tip}L${tip[0] - 7 * sign},${tip[1] + 4}`;
    const speed = s("text.rate", { ...lineUp, y: label[1] + (this.down ? 4 : -6) });
    const lag = s("text.lag", { ...lineUp, y: label[1] + (this.down ? 4 : 15) });
    if (this.down) {
      lag.setAttribute("x", label[0] - 7);
      lag.setAttribute("text-anchor", "end");
    }
    const group = s("g.flow", flow, s("path.tip", { d: arrow }), speed, lag);
    this.edges.push({ ...edge, takes, group, speed, lag, flow });
    return group;
  }

  node(id, [x, y]) {
    const { w, h: high } = sizeOf(id);
    const name = id.slice(2);
    const isQueue = id.startsWith("q:");
    const shown = isQueue ? name : name.slice(name.indexOf(".") + 1);
    const left = x - w / 2;
    const title = s("title");
    const detail = s("text.detail", isQueue ? { x: left + w - 12, y: y + 4, "text-anchor": "end" } : { x: left + 14, y: y + 4 });
    const failed = s("text.failed", { x: left + w - 10, y: y + 24, "text-anchor": "end" });
    const latency = s("text.latency", { x: left + w - 10, y: y + 4, "text-anchor": "end" });
    const past = s("g.spark", { "aria-hidden": "true" });
    const link = s(isQueue ? "a.queue" : "a.processor", { href: isQueue ? toQueue(name) : toProcessor(name) }, title,
      s("rect.box", { x: left, y: y - high / 2, width: w, height: high, rx: isQueue ? high / 2 : 5 }),
      isQueue ? null : s("rect.mark", { x: left, y: y - high / 2, width: 5, height: high, rx: 2 }),
      s("text.name", isQueue ? { x: left + 13, y: y + 4 } : { x: left + 14, y: y - 13 }, fitted(shown, isQueue ? 10 : 19)),
      detail, ...(isQueue ? [] : [past, failed, latency]));
    this.nodes.set(id, { link, title, detail, failed, latency, past, name, shown, box: { x: left + 14, y: y + 10, w: 56, h: 15 } });
    return link;
  }

  update(overview) {
    const processors = new Map(overview.processors.map((each) => [each.id, each]));
    const queues = new Map(overview.queues.map((each) => [each.name, each]));
    const writers = new Map();
    for (const edge of this.layout.edges) if (edge.to.startsWith("q:")) writers.set(edge.to, (writers.get(edge.to) || 0) + 1);
    for (const [id, node] of this.nodes) {
      if (id.startsWith("p:")) this.updateProcessor(node, processors.get(node.name));
      else this.updateQueue(node, queues.get(node.name), writers.get(id) || 0);
    }
    for (const edge of this.edges) {
      const [processor, queue] = edge.takes ? [edge.to.slice(2), edge.from.slice(2)] : [edge.from.slice(2), edge.to.slice(2)];
      const row = processors.get(processor);
      const lag = edge.takes && row ? row.inputs.find((each) => each.queue === queue)?.lag : 0;
      const speed = edge.takes ? (row && row.inputs.length === 1 ? row.rate : 0)
        : writers.get(edge.to) === 1 ? queues.get(queue)?.rate : 0;
      say(edge.speed, speed ? rate(speed) : "");
      say(edge.lag, lag ? `${short(lag)} wait` : "");
      edge.group.classList.toggle("flows", Boolean(speed));
      edge.group.classList.toggle("waits", Boolean(lag));
      edge.group.classList.toggle("grows", Boolean(lag && row?.growing));
      edge.flow.style.setProperty("--thick", speed ? String(Math.min(4, 1.4 + Math.log10(1 + speed) / 2)) : "1.2");
    }
  }

  /** Draw the last hour of each processor. */
  remember(processors) {
    for (const [id, node] of this.nodes) if (id.startsWith("p:")) spark(node.past, processors[node.name], node.box);
  }

  updateProcessor(node, row) {
    const state = row ? row.state : "new";
    const words = { running: "running", stopped: "stopped", silent: "no answer", off: "not running", new: "not run yet" };
    const speed = state === "running" && row.rate ? rate(row.rate) : words[state];
    say(node.detail, state === "running" && row.growing ? `falls behind · ${rate(row.rate)}` : speed);
    say(node.failed, row && row.errors ? `${failures(row, short)} failed` : "");
    say(node.latency, row && row.p99 !== null && row.p99 !== undefined && !row.growing ? brief(row.p99) : "");
    for (const each of Object.keys(words)) node.link.classList.toggle(each, each === state);
    node.link.classList.toggle("failing", Boolean(row?.errors));
    node.link.classList.toggle("growing", Boolean(row?.growing));
    const lag = row?.lag ? `, ${number(row.lag)} messages wait` : "";
    const late = node.latency.textContent ? `, 99 % of results within ${node.latency.textContent}` : "";
    const text = `${node.shown}: ${words[state]}${row?.rate ? `, ${rate(row.rate)}` : ""}${lag}${late}${row?.errors ? `, ${failures(row)} failed` : ""}`;
    say(node.title, text);
    name(node.link, `Processor ${text}`);
  }

  updateQueue(node, row, writers) {
    say(node.detail, row ? (writers !== 1 && row.rate ? rate(row.rate) : short(row.messages)) : "");
    const text = `${node.name}: ${row ? `${number(row.messages)} messages${row.rate ? `, ${rate(row.rate)}` : ""}` : "no messages yet"}`;
    say(node.title, text);
    name(node.link, `Queue ${text}`);
  }
}

function name(element, text) {
  if (element.getAttribute("aria-label") !== text) element.setAttribute("aria-label", text);
}
