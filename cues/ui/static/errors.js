// Failed messages: the list, and the record of one failure.

import { h, ago, logName, number, plural, table, toMessage, toProcessor } from "./dom.js";
import { ask } from "./api.js";

export async function errorsView([processor], query, page) {
  const answer = await ask("errors", { processor: processor || "" });
  const groups = new Map();
  for (const row of answer.errors) {
    const kind = `${row.processor}\n${row.type}`;
    groups.set(kind, (groups.get(kind) || 0) + 1);
  }
  const causes = [...groups].sort((a, b) => b[1] - a[1]);
  return {
    title: processor ? `Errors of ${processor}` : "Errors",
    element: h("section", h("h2", processor ? ["Errors of ", h("a", { href: toProcessor(processor) }, processor)] : "Errors"),
      h("p.figures", answer.found ? `${plural(answer.found, "record")}${answer.complete ? "" : " or more"}${answer.found > answer.errors.length ? `, the last ${answer.errors.length}` : ""}` : ""),
      causes.length > 1 ? h("ul.causes", causes.map(([kind, count]) => h("li", h("strong", number(count)), ` ${kind.split("\n")[1]} `, h("span.quiet", kind.split("\n")[0])))) : null,
      table("Failed messages", [
        ["Record", (row) => h("a", { href: toMessage(row.queue, row.partition, row.index) }, `${logName(row.queue, row.partition)} ${number(row.index)}`)],
        ["When", (row) => ago(row.time)],
        ["Processor", (row) => h("a", { href: toProcessor(row.processor.split("/")[0]) }, row.processor)],
        ["Cause", (row) => [h("strong", row.type), h("span.cause", ` ${row.message}`)], "message"],
      ], answer.errors, "No failed messages.")),
  };
}

/** The record of a failure: causes with their tracebacks, and the messages that failed. */
export function failure(error, place, page) {
  return h("section.failure", h("h3", "Failure of ", h("a", { href: toProcessor(error.processor.split("/")[0]) }, error.processor),
    error.attempts ? ` after ${plural(error.attempts, "attempt")}` : ""),
    error.causes.map((cause, n) => [
      h("p.cause", n ? "caused by " : "", h("strong", cause.type), cause.message ? `: ${cause.message}` : ""),
      cause.trace ? h("details", { open: n === 0 }, h("summary", "Traceback"), h("pre", { tabindex: "0" }, cause.trace)) : null,
    ]),
    error.context ? [h("h4", "Context"), h("pre", error.context)] : null,
    error.inputs.length ? [h("h4", error.inputs.length > 1 ? "The messages that failed" : "The message that failed"),
      error.inputs.map((input) => h("p.input", h("span.quiet", `${input.binding} `), h("code", input.text)))] : null);
}
