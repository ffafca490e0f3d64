// What was: a sparkline for a box of the graph, and the charts of a processor. Values are lists with null for periods
// in which nothing was done (see cues/operate/history.py).

import { h, s, say, brief, clock, number, rate } from "./dom.js";
import { ask } from "./api.js";

export const EVERY_MS = 10000; // the server has a new sample every ten seconds
const SPANS = { hour: "Hour", day: "Day", weeks: "5 weeks" };
const CHARTS = [
  { title: "Messages a second", lines: [["in", "in", "good"], ["out", "out", "link"]], shown: (n) => rate(n), empty: 0 },
  { title: "Messages that wait", lines: [["lag", "wait", "warn"]], shown: number, empty: 0 },
  { title: "Latency", lines: [["p50", "median", "good"], ["p99", "99 %", "warn"]], shown: brief, empty: null },
  { title: "Failed messages, and seconds of outages", lines: [["failed", "failed", "bad"], ["away", "outages", "warn"]], shown: (n) => number(Math.round(n)), empty: 0 },
];
const SIZE = { w: 600, h: 130 };

const largest = (values) => values.reduce((most, each) => Math.max(most, each ?? 0), 0);

/** The path of a line through values; null values that have no stand-in are gaps. */
function path(values, top, { x, y, w, h: high }, empty) {
  let drawn = "";
  let pen = "M";
  values.forEach((value, n) => {
    const known = value ?? empty;
    if (known === null) {
      pen = "M";
      return;
    }
    const at = [x + (values.length < 2 ? w : (n * w) / (values.length - 1)), y + high - (top ? (known / top) * high : 0)];
    const alone = pen === "M" && (values[n + 1] ?? empty ?? null) === null;
    drawn += `${pen}${at.map((each) => each.toFixed(1))}${alone ? "h1" : ""}`;
    pen = "L";
  });
  return drawn;
}

/** Draw the last hour into a group of the graph: the rate as an area, and over it the lag. */
export function spark(group, row, box) {
  const known = row ? row.in.some((each) => each) || row.lag.some((each) => each) : false;
  if (!known) {
    group.replaceChildren();
    return;
  }
  const line = path(row.in, largest(row.in), box, 0);
  const lag = largest(row.lag);
  group.replaceChildren(
    s("path.area", { d: `${line}L${box.x + box.w},${box.y + box.h}L${box.x},${box.y + box.h}Z` }),
    s("path.line", { d: line }),
    lag ? s("path.line.wait", { d: path(row.lag, lag, box, 0) }) : null);
}

/** The charts of a processor, with a choice of the time that they cover. */
export class Charts {
  constructor(processor) {
    this.processor = processor;
    this.span = "hour";
    this.buttons = Object.entries(SPANS).map(([span, title]) => h("button", { type: "button", "aria-pressed": String(span === this.span), onclick: () => this.choose(span) }, title));
    this.charts = CHARTS.map((each) => new Chart(each));
    this.note = h("p.quiet");
    this.grid = h("div.charts", this.charts.map((each) => each.element));
    this.element = h("section", h("h3", "History"), h("div.buttons", { role: "group", "aria-label": "Time" }, this.buttons), this.note, this.grid);
  }

  async choose(span) {
    this.span = span;
    Object.keys(SPANS).forEach((each, n) => this.buttons[n].setAttribute("aria-pressed", String(each === span)));
    await this.load();
  }

  async load() {
    const span = this.span;
    try {
      const answer = await ask("history", { processor: this.processor, span });
      if (span !== this.span) return;
      const known = answer.in.some((each) => each !== null);
      say(this.note, known ? "" : "There are no samples of this time: the graph did not run, or it was idle.");
      this.note.hidden = known;
      this.grid.hidden = !known;
      for (const chart of this.charts) chart.draw(answer);
    } catch (error) {
      say(this.note, error.message);
      this.note.hidden = false;
    }
  }

  follow() {
    this.timer = setInterval(() => document.hidden || this.load(), EVERY_MS);
  }

  leave() {
    clearInterval(this.timer);
  }
}

class Chart {
  constructor(about) {
    this.about = about;
    this.value = h("span.value");
    this.box = { x: 0, y: 6, w: SIZE.w, h: SIZE.h - 8 };
    this.lines = s("g");
    this.cursor = s("path.cursor");
    this.top = h("span.top");
    this.from = h("span");
    this.to = h("span");
    this.svg = s("svg", { viewBox: `0 0 ${SIZE.w} ${SIZE.h}`, preserveAspectRatio: "none", role: "img", tabindex: "0" }, s("path.base", { d: `M0,${SIZE.h - 2}H${SIZE.w}` }), this.lines, this.cursor);
    this.svg.addEventListener("pointermove", (event) => {
      const { left, width } = this.svg.getBoundingClientRect();
      this.point(Math.round(((event.clientX - left) / width) * (this.data.in.length - 1)));
    });
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.point((this.at ?? this.data.in.length - (step > 0 ? 1 : 0)) + step);
    });
    this.at = null;
    const keys = about.lines.length > 1 ? about.lines.map(([, title, kind]) => h(`span.key.${kind}`, title)) : null;
    this.element = h("figure.chart", h("figcaption", h("span", about.title), keys, this.value), h("div.plot", this.svg, this.top), h("div.axis", this.from, this.to));
  }

  draw(data) {
    this.data = data;
    const { lines, shown, empty } = this.about;
    const top = Math.max(...lines.map(([name]) => largest(data[name])));
    this.lines.replaceChildren(...lines.map(([name, , kind]) => s(`path.line.${kind}`, { d: path(data[name], top, this.box, empty) })));
    say(this.top, top ? shown(top) : "");
    const times = [data.start, data.start + data.seconds * data.in.length].map((each) => time(each, data.seconds));
    say(this.from, times[0]);
    say(this.to, `${times[1]} UTC`);
    this.svg.setAttribute("aria-label", `${this.about.title} from ${times[0]} to ${times[1]} UTC, at most ${top ? shown(top) : 0}. The arrow keys read values.`);
    this.point(this.at);
  }

  /** Show the values of one period; of none with null. */
  point(at) {
    const count = this.data?.in.length || 0;
    this.at = at === null || !count ? null : Math.max(0, Math.min(count - 1, at));
    if (this.at === null) {
      this.cursor.setAttribute("d", "");
      say(this.value, "");
      return;
    }
    const x = (this.at * SIZE.w) / (count - 1);
    this.cursor.setAttribute("d", `M${x},0V${SIZE.h}`);
    const values = this.about.lines.map(([name, title]) => [this.data[name][this.at], title]).filter(([value]) => value !== null);
    say(this.value, `${time(this.data.start + this.at * this.data.seconds, this.data.seconds)}: ${values.length ? values.map(([value, title]) => `${this.about.shown(value) || 0} ${title}`).join(", ") : "nothing"}`);
  }
}

/** A time of an axis: of short periods the time of day, of hours with the date. */
function time(seconds, period) {
  const [day, hour] = clock(new Date(seconds * 1000).toISOString()).split(" ");
  return period >= 3600 ? `${day.slice(5)} ${hour.slice(0, 5)}` : hour.slice(0, period < 60 ? 8 : 5);
}
