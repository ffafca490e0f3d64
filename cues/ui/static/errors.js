// Failed messages: the list, and the record of one failure.

import { h, say, put, ago, logName, number, plural, table, toErrors, toMessage, toProcessor } from "./dom.js";
import { ask, change } from "./api.js";

export async function errorsView([processor], query, page) {
  const settled = query.get("settled") || "";
  const status = h("p.status", { role: "status" });
  const body = h("div");
  const reason = h("input", { id: "reason", size: 40, autocomplete: "off", required: true });
  const what = h("strong");
  const form = h("form.tools", { hidden: true, "aria-label": "Discard a group" },
    h("div.field.grow", h("label", { for: "reason" }, "Why nothing is to be done about ", what), reason), h("button", "Discard"),
    h("button", { type: "button", onclick: () => { form.hidden = true; } }, "Cancel"));
  let group = null;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act("discard", group, { reason: reason.value });
  });
  const act = async (verb, { processor: id, cause, count }, more) => {
    for (const button of body.querySelectorAll("button")) button.disabled = true;
    form.hidden = true;
    status.className = "status";
    say(status, `${verb === "redrive" ? "Redriving" : "Discarding"} ${plural(count, "error message")}.`);
    try {
      const [words, good] = outcome(await change(verb, { processor: id, cause, ...more }));
      say(status, words);
      status.className = good ? "status good" : "status bad";
    } catch (problem) {
      say(status, problem.message);
      status.className = "status bad";
    }
    await load();
  };
  const buttons = (row) => h("span.buttons",
    h("button", { type: "button", onclick: () => act("redrive", row, {}) }, "Redrive"),
    h("button", { type: "button", onclick: () => { group = row; say(what, `${plural(row.count, "error message")} of this cause`); form.hidden = false; reason.focus(); } }, "Discard…"));
  const load = async () => {
    const answer = await ask("errors", { processor: processor || "", settled });
    const plus = answer.complete ? "" : "+";
    const listed = answer.found > answer.errors.length ? `, the last ${answer.errors.length} are listed` : "";
    put(body,
      h("p.figures", answer.found ? `${number(answer.found)}${plus} error message${answer.found === 1 && !plus ? "" : "s"}${listed}` : ""),
      h("p", h("a", { href: `${toErrors(processor)}${settled ? "" : "?settled=1"}` }, settled ? "Leave out those that are done with" : "Show those that are done with too")),
      ...(answer.groups.length ? [h("h3", "By cause"), table("Causes", [
        ["Count", (row) => number(row.count) + plus, "num"],
        ["Processor", (row) => h("a", { href: toProcessor(row.processor) }, row.processor)],
        ["Cause", (row) => h("span.cause", row.shown), "message"],
        ["Last", (row) => h("a", { href: toMessage(row.last.queue, row.last.partition, row.last.index) }, ago(row.last.time)), "when"],
        ...(page.overview?.can_write ? [["Do", buttons, "when"]] : []),
      ], answer.groups), h("h3", "Each")] : []),
      table("Failed messages", [
        ["Record", (row) => h("a", { href: toMessage(row.queue, row.partition, row.index) }, `${logName(row.queue, row.partition)} ${number(row.index)}`)],
        ["When", (row) => ago(row.time), "when"],
        ["Processor", (row) => h("a", { href: toProcessor(row.processor.split("/")[0]) }, row.processor)],
        ["State", (row) => h("span", { class: row.settled ? "quiet" : row.state === "unresolved" ? "bad" : "warn" }, row.state)],
        ["Cause", (row) => [h("strong", row.type), h("span.cause", ` ${row.message}`)], "message"],
      ], answer.errors, "No failed messages."));
  };
  await load();
  return {
    title: processor ? `Errors of ${processor}` : "Errors",
    element: h("section", h("h2", processor ? ["Errors of ", h("a", { href: toProcessor(processor) }, processor)] : "Errors"), status, form, body),
  };
}

/** What a change did, as words, and whether all of it was done. */
function outcome({ resolved = [], failed_again: again = [], waiting = [], discarded = [], refused = [] }) {
  const parts = [
    resolved.length && `${number(resolved.length)} redriven`, discarded.length && `${number(discarded.length)} discarded`,
    again.length && `${number(again.length)} failed again`, waiting.length && `${number(waiting.length)} asked for, and wait for the process that runs the graph`,
    refused.length && `${number(refused.length)} refused: ${refused[0].reason}`,
  ].filter(Boolean);
  return [parts.length ? `${parts.join("; ")}.` : "There was nothing to do.", !again.length && !refused.length];
}

/** The record of a failure: causes with their tracebacks, and the messages that failed. */
export function failure(error, place, page) {
  return h("section.failure", h("h3", "Failure of ", h("a", { href: toProcessor(error.processor.split("/")[0]) }, error.processor),
    error.attempts ? ` after ${plural(error.attempts, "attempt")}` : ""),
    resolution(error, place, page),
    error.causes.map((cause, n) => [
      h("p.cause", n ? "caused by " : "", h("strong", cause.type), cause.message ? `: ${cause.message}` : ""),
      cause.trace ? h("details", { open: n === 0 }, h("summary", "Traceback"), h("pre", { tabindex: "0" }, cause.trace)) : null,
    ]),
    error.context ? [h("h4", "Context"), h("pre", error.context)] : null,
    error.inputs.length ? [h("h4", error.inputs.length > 1 ? "The messages that failed" : "The message that failed"),
      error.inputs.map((input) => h("p.input", h("span.quiet", `${input.binding} `), h("code", input.text)))] : null);
}

/** What was done about a failure, and the buttons that do something. */
function resolution(error, place, page) {
  const status = h("p.status", { role: "status" });
  const box = h("div");
  if (error.state && error.state !== "unresolved") {
    box.append(h("p", h("strong", error.state), error.done ? `, ${ago(error.done.time)} by ${error.done.by}` : "", error.done?.reason ? `: ${error.done.reason}` : "",
      (error.again || []).flatMap((index) => [" ", h("a", { href: toMessage(place.queue, place.partition, index) }, `${logName(place.queue, place.partition)} ${number(index)}`)])));
  }
  if (!page.overview?.can_write || error.settled || error.state === "requested") return box;
  const reason = h("input", { id: "reason", size: 32, autocomplete: "off" });
  const buttons = [
    h("button", { type: "button", onclick: () => act("redrive", {}) }, "Redrive"),
    h("form.discard", { onsubmit: (event) => { event.preventDefault(); act("discard", { reason: reason.value }); } },
      h("label", { for: "reason" }, "or, with a reason"), reason, h("button", "Discard")),
  ];
  const act = async (verb, more) => {
    for (const button of box.querySelectorAll("button")) button.disabled = true;
    say(status, verb === "redrive" ? "Its processor gets the message once more." : "Discarding.");
    status.className = "status";
    try {
      const told = await change(verb, { ...place, ...more });
      const refused = (told.refused || []).map((each) => each.reason).join(" ");
      const words = told.resolved?.length ? "Redriven: the outputs are committed, and the failure is resolved."
        : told.failed_again?.length ? "It failed again: a new record names this one."
        : told.waiting?.length ? "Asked for: it waits for the process that runs the graph."
        : told.discarded?.length ? "Discarded; the reason is kept." : refused || "There was nothing to do.";
      say(status, words);
      status.className = told.failed_again?.length || refused ? "status bad" : "status good";
      if (refused) for (const button of box.querySelectorAll("button")) button.disabled = false;
    } catch (problem) {
      say(status, problem.message);
      status.className = "status bad";
      for (const button of box.querySelectorAll("button")) button.disabled = false;
    }
  };
  box.append(h("div.buttons", buttons), status);
  return box;
}
