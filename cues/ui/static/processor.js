// A processor: its figures, inputs and outputs, units, steps and state.

import { h, say, put, ago, clock, failures, logParts, number, rate, span, table, toErrors, toMessage, toQueue } from "./dom.js";
import { ask } from "./api.js";
import { Charts } from "./history.js";
import { LiveTable } from "./live.js";
import { stateOf } from "./overview.js";

export async function processorView([id], query, page) {
  const base = id.split("/")[0];
  const state = h("p.state");
  const facts = h("dl.facts");
  const inputs = new LiveTable("Inputs", [
    { title: "Reads", cell: (row) => ({ text: row.queue, href: toQueue(row.queue) }) },
    { title: "At", kind: "num", cell: (row) => number(row.position) },
    { title: "Wait", kind: "num", cell: (row) => (row.lag === null ? "" : number(row.lag)) },
    { title: "Store", cell: (row) => row.store || "" },
  ], (row) => row.queue, "It reads no queue: it is a source.");
  const units = new LiveTable("Units", [
    { title: "Unit", cell: (row) => ({ text: row.id, href: `#/processor/${encodeURIComponent(row.id)}` }) },
    { title: "Wait", kind: "num", cell: (row) => number(row.lag) },
    { title: "Per second", kind: "num", cell: (row) => rate(row.rate) },
    { title: "Failed", kind: "num", cell: (row) => failures(row) },
    { title: "Last step", cell: (row) => ago(row.stepped) },
    { title: "Process", cell: (row) => String(row.pid || "") },
  ], (row) => row.id);
  const outputs = h("p.around");
  const unitSection = h("section", { hidden: true }, h("h3", "Units"), units.element);
  const steps = h("section", h("h3", "Last steps"), h("p.quiet", "Loading"));
  const rows = h("div");
  const key = h("input", { id: "key", name: "key", autocomplete: "off", spellcheck: "false", placeholder: "a key, as text or JSON" });
  const stateForm = h("form.tools", { "aria-label": "State of a key" }, h("div.field", h("label", { for: "key" }, "Key"), key), h("button", "Look"));
  const stateSection = h("section", h("h3", "State"), stateForm, rows);
  stateForm.addEventListener("submit", (event) => {
    event.preventDefault();
    loadState(key.value.trim(), "");
  });

  const loadSteps = async () => {
    const button = h("button", { type: "button", onclick: loadSteps }, "Read again");
    try {
      const answer = await ask("steps", { processor: id, count: 20 });
      put(steps, h("h3", answer.units.length > 1 ? `Last steps of ${answer.processor}` : "Last steps"), button, table("Last steps", [
        ["Time (UTC)", (row) => h("span.time", clock(row.time)), "time"],
        ["Took", (row) => (row.taken.length ? row.taken.filter((each) => each.last >= each.first).flatMap((each, n) => [n ? ", " : "", ranged(each)]) : h("span", row.took))],
        ["Outcome", (row) => h("span", { class: row.outcome === "error" ? "bad" : row.outcome === "not committed" ? "warn" : null }, row.outcome)],
        ["Wrote", (row) => (row.wrote.length ? row.wrote.flatMap((each, n) => [n ? ", " : "", from(each)]) : row.text || "")],
        ["Hash", (row) => h("code", (row.hash || "").slice(0, 12))],
      ], answer.steps, "It has made no step yet."));
    } catch (error) {
      put(steps, h("h3", "Last steps"), h("p.quiet", error.message));
    }
  };
  const loadState = async (wanted, after) => {
    try {
      const answer = await ask("state", { processor: id, key: wanted, after, count: 50 });
      put(rows, table("State", [
        ["Key", (row) => h("code", row.key)],
        ["Field", (row) => h("code", row.field)],
        ["Value", (row) => h("code.line", row.text, row.cut ? "…" : ""), "message"],
      ], answer.rows, wanted ? "There is no state under this key." : "It has no state."),
      answer.after ? h("button", { type: "button", onclick: () => loadState("", answer.after) }, "More keys") : "");
      stateForm.hidden = !answer.rows.length && !wanted && !after;
    } catch (error) {
      stateForm.hidden = true;
      put(rows, h("p.quiet", error.message));
    }
  };
  const charts = new Charts(base);
  await Promise.all([loadSteps(), loadState("", ""), charts.load()]);
  charts.follow();

  let known = "";
  const update = (overview) => {
    const row = overview.processors.find((each) => each.id === base);
    if (!row) {
      say(state, "The graph has no such processor.");
      return;
    }
    const { text, kind } = stateOf(row);
    const why = row.stopped ? `: ${row.stopped.text} (${ago(row.stopped.time)})` : "";
    say(state, `${row.kind || "Processor"} · ${text}${why}${row.rate ? ` · ${rate(row.rate)}` : ""}`);
    state.className = `state ${kind}`;
    const list = [
      ["Function", row.function], ["Guarantee", row.guarantee],
      ["Process", row.owners.map((each) => `${each.worker ? `${each.worker}, ` : ""}${each.pid} (${each.state}${each.lease_s ? "" : "; does not answer"})`).join(", ")],
      ["Last step", ago(row.stepped)], ["Next timer", row.timer], ["Epoch", row.epoch], ["Source position", row.source_position],
      ["Calls", row.calls ? `${number(row.calls)} done, ${row.in_flight} in flight${row.call_s ? `, ${row.call_s < 0.001 ? "under 1 ms" : row.call_s < 1 ? `${Math.round(row.call_s * 1000)} ms` : span(row.call_s)} each` : ""}` : ""],
    ].filter(([, value]) => value !== "" && value !== null && value !== undefined);
    const names = list.map(([name]) => name).join();
    if (facts.dataset.names !== names) {
      facts.dataset.names = names;
      facts.replaceChildren(...list.map(([name]) => h("div", h("dt", name), h("dd"))));
    }
    list.forEach(([, value], n) => say(facts.children[n].lastChild, String(value)));
    inputs.update(row.inputs);
    units.update(row.units);
    unitSection.hidden = !row.units.length;
    const key = `${row.outputs}|${row.error_queue}|${row.errors}|${row.last_error?.index}`;
    if (key !== known) {
      known = key;
      put(outputs,
        ...(row.outputs.length ? ["Writes ", ...row.outputs.flatMap((each, n) => [n ? ", " : "", h("a", { href: toQueue(each) }, each)]), ". "] : []),
        ...(row.error_queue ? ["Failures go to ", h("a", { href: toQueue(row.error_queue) }, row.error_queue), ". "] : []),
        row.errors ? h("a.bad", { href: toErrors(base) }, `${failures(row)} failed`) : "",
        row.last_error ? `, the last ${ago(row.last_error.time)}: ${row.last_error.type}: ${row.last_error.text}` : "");
    }
  };
  return {
    title: id,
    element: h("article", h("h2", h("span.kind", "Processor "), id), state, facts, outputs, charts.element, h("div.halves", h("section", h("h3", "Inputs"), inputs.element), unitSection), steps, stateSection),
    leave: () => charts.leave(),
    update,
  };
}

function ranged({ log, first, last }) {
  const [queue, partition] = logParts(log);
  const words = first === last ? `${log} ${number(first)}` : `${log} ${number(first)} to ${number(last)}`;
  return h("a", { href: first === last ? toMessage(queue, partition, first) : toQueue(log, { at: first }) }, words);
}

function from({ log, first }) {
  const [queue, partition] = logParts(log);
  return h("a", { href: toMessage(queue, partition, first) }, `${log} from ${number(first)}`);
}
