// A queue: pages of messages, a search bounded in time, and a place to go to by index or time.

import { h, say, put, ago, bytes, clock, number, plural, rate, table, toMessage, toProcessor, toQueue } from "./dom.js";
import { ask } from "./api.js";
import { options } from "./overview.js";

const COUNT = 50;
const FOLLOW_MS = 1500;

// The address of the last search that was asked for here. Another one came with a link, and waits for a click.
let asked = "";

export async function queueView([name], query, page) {
  const [base, partition] = name.includes("/") ? [name.slice(0, name.lastIndexOf("/")), name.slice(name.lastIndexOf("/") + 1)] : [name, ""];
  const given = { at: query.get("at") || "", older: query.get("older") ?? (query.has("at") ? "" : "1"), where: query.get("where") || "" };
  const figures = h("p.figures");
  const links = h("p.around");
  const status = h("p.status", { role: "status" });
  const rows = h("div");
  const buttons = h("div.buttons");
  const at = h("input", { id: "at", name: "at", value: given.at.includes(":") && !given.at.includes("-") ? "" : given.at, placeholder: "1200, 15m, 2026-01-31T12:00Z, start", size: 26, autocomplete: "off", spellcheck: "false" });
  const where = h("input.wide", { id: "where", name: "where", value: given.where, placeholder: "total > 100 and country in (\"DE\", \"FR\")", autocomplete: "off", spellcheck: "false", "aria-describedby": "where-help" });
  const choose = h("select", { id: "partition", name: "partition" });
  const chooser = h("div.field", { hidden: true }, h("label", { for: "partition" }, "Partition"), choose);
  const form = h("form.tools", { role: "search", "aria-label": `Search ${name}` }, chooser,
    h("div.field", h("label", { for: "at" }, "Go to index or time"), at),
    h("div.field.grow", h("label", { for: "where" }, "Search"), where),
    h("button", "Go"));
  const help = h("p.hint", { id: "where-help" }, "A search is an expression over fields, as in cues tail --where: comparisons, in, and, or, not, has(\"x\"), match(text, pattern). It looks back from the newest message, or from the place.");

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const queue = choose.value === "" ? base : `${base}/${choose.value}`;
    const place = at.value.trim();
    const next = toQueue(queue, { at: place, older: place && !where.value ? "" : "1", where: where.value.trim() });
    asked = next;
    if (next === location.hash) dispatchEvent(new HashChangeEvent("hashchange"));
    else location.hash = next;
  });

  let found = [];
  let searched = 0;
  let timer = 0;
  let following = false;
  let last = null;

  const draw = () => {
    put(rows, table(`Messages of ${name}`, [
      ["Index", (row) => row.damaged ? number(row.index) : h("a", { href: toMessage(base, row.partition, row.index) }, `${last.partitioned ? `${row.partition}/` : ""}${number(row.index)}`), "num"],
      ["Time (UTC)", (row) => h("span.time", clock(row.time)), "time"],
      ["Message", (row) => row.damaged ? h("span.bad", row.damaged) : [row.type ? h("span.type", row.type, " ") : null, h("code.line", row.text, row.cut ? "…" : "")], "message"],
    ], found, given.where ? "No message matches so far." : "No messages here."));
  };

  const load = async (how, more) => {
    const answer = await ask("messages", { queue: name, count: COUNT, where: given.where, ...how });
    answer.partitioned = page.overview?.queues.find((each) => each.name === base)?.partitions > 1 && !partition;
    last = answer;
    found = more ? [...answer.messages, ...found] : answer.messages;
    searched = more ? searched + answer.searched : answer.searched;
    draw();
    const older = Boolean(how.older);
    if (given.where) {
      const whole = searched + answer.left;
      say(status, `${plural(found.length, "match").replace("matchs", "matches")}. Searched ${number(searched)} of ${number(whole)}${answer.left ? " so far" : ""}. ${answer.hint}`);
      put(buttons,
        answer.left ? h("button", { type: "button", onclick: () => go(() => load({ at: older ? answer.before : answer.after, older: older ? "1" : "" }, true)) }, found.length >= COUNT ? "More matches" : "Search on") : "",
        h("a.button", { href: toQueue(name) }, "Leave the search"));
    } else {
      const first = answer.messages[0];
      const end = answer.messages.at(-1);
      say(status, first ? `${number(first.index)} to ${number(end.index)}, of ${plural(answer.total, "message")}.` : `${plural(answer.total, "message")}.`);
      put(buttons,
        h(answer.at_start ? "span.button.off" : "a.button", { href: answer.at_start ? null : toQueue(name, { at: answer.before, older: "1" }), "aria-disabled": answer.at_start ? "true" : null }, "Older"),
        h(answer.at_end ? "span.button.off" : "a.button", { href: answer.at_end ? null : toQueue(name, { at: answer.after, older: "" }), "aria-disabled": answer.at_end ? "true" : null }, "Newer"),
        h("a.button", { href: toQueue(name) }, "Newest"),
        h("label.check", h("input", { type: "checkbox", checked: following, onchange: (event) => followOn(event.target.checked) }), "Follow"));
    }
  };

  const go = async (work) => {
    rows.setAttribute("aria-busy", "true");
    try {
      await work();
    } catch (error) {
      say(status, error.message);
      status.classList.add("bad");
    }
    rows.removeAttribute("aria-busy");
  };

  const followOn = (on) => {
    following = on;
    clearTimeout(timer);
    status.setAttribute("aria-live", on ? "off" : "polite");
    const again = async () => {
      const answer = await ask("messages", { queue: name, count: COUNT, older: "1" }).catch(() => null);
      if (!following) return;
      if (answer && answer.after !== last.after) {
        answer.partitioned = last.partitioned;
        last = answer;
        found = answer.messages;
        draw();
        say(status, `The newest of ${plural(answer.total, "message")}.`);
      }
      timer = setTimeout(again, FOLLOW_MS);
    };
    if (on) again();
  };

  if (given.where && location.hash !== asked) {
    say(status, "This address holds a search. Look at it, and click Go to run it.");
    put(buttons, h("a.button", { href: toQueue(name) }, "Leave the search"));
  } else {
    await go(() => load({ at: given.at, older: given.older ? "1" : "" }, false));
  }
  return {
    title: name,
    element: h("section", h("h2", h("span.kind", "Queue "), name), figures, links, form, help, status, buttons, rows),
    leave: () => followOn(false),
    update: (overview) => {
      const row = overview.queues.find((each) => each.name === base);
      if (row) {
        say(figures, [plural(row.messages, "message"), row.rate ? rate(row.rate) : "", bytes(row.bytes), `last append ${ago(row.appended)}`, row.partitions > 1 ? plural(row.partitions, "partition") : "", options(row)].filter(Boolean).join(" · "));
        chooser.hidden = row.partitions < 2;
        if (choose.options.length !== row.partitions + 1) {
          choose.replaceChildren(h("option", { value: "" }, "all"), ...Array.from({ length: row.partitions }, (_, n) => h("option", { value: n }, n)));
          choose.value = partition;
        }
      }
      const writers = overview.processors.filter((each) => each.outputs.includes(base) || each.error_queue === base);
      const readers = overview.processors.filter((each) => each.inputs.some((input) => input.queue === base));
      const key = [writers, "", readers].flat().map((each) => each.id || "|").join();
      if (links.dataset.key !== key) {
        links.dataset.key = key;
        const list = (some) => some.flatMap((each, n) => [n ? ", " : "", h("a", { href: toProcessor(each.id) }, each.name)]);
        put(links, ...(writers.length ? ["Written by ", ...list(writers), ". "] : ["Written from outside. "]),
          ...(readers.length ? ["Read by ", ...list(readers), "."] : ["No processor reads it."]));
      }
    },
  };
}
