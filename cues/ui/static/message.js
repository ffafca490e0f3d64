// One message: whole, where it came from, and what became of it.

import { h, clock, logName, number, toMessage, toProcessor, toQueue } from "./dom.js";
import { ask } from "./api.js";
import { failure } from "./errors.js";

export async function messageView([queue, partitionText, indexText], query, page) {
  const [partition, index] = [Number(partitionText), Number(indexText)];
  const answer = await ask("message", { queue, partition, index });
  const text = h("code", answer.text);
  const whole = h("pre.whole", { tabindex: "0", role: "region", "aria-label": "Message" }, text);
  const more = h("p");
  const moreOf = (shown) => {
    more.replaceChildren();
    if (shown >= answer.characters) return;
    more.append(`The first ${number(shown)} of ${number(answer.characters)} characters. `, h("button", {
      type: "button",
      onclick: async () => {
        const next = await ask("message", { queue, partition, index, offset: shown });
        text.append(next.text);
        moreOf(shown + next.text.length);
      },
    }, "Show more"));
  };
  moreOf(answer.text.length);
  const name = logName(queue, partition);
  const step = (to, words, there) => (there
    ? h("a.button", { href: toMessage(queue, partition, to) }, words)
    : h("span.button.off", { "aria-disabled": "true" }, words));
  const facts = [["Time (UTC)", clock(answer.time)], ["Type", answer.type], ["Step hash", answer.hash], ["UUID", answer.uuid], ["Metadata", answer.metadata]];
  const became = h("section", { "aria-busy": "true" }, h("h3", "What became of it"), h("p.quiet", "Searching"));
  ask("became", { queue, partition, index }).then((found) => became.replaceChildren(...drawBecame(found)),
    (error) => became.replaceChildren(h("h3", "What became of it"), h("p.quiet", error.message)))
    .finally(() => became.removeAttribute("aria-busy"));
  const element = h("article",
    h("h2", h("span.kind", "Message "), h("a", { href: toQueue(name) }, name), ` ${number(answer.index)}`),
    h("div.buttons", step(index - 1, "Earlier", index > answer.first), step(index + 1, "Later", index < answer.last),
      h("a.button", { href: toQueue(name, { at: Math.max(answer.first, index - 10) }) }, "Around it")),
    h("dl.facts", facts.filter(([, value]) => value).map(([key, value]) => h("div", h("dt", key), h("dd", value)))),
    answer.error ? failure(answer.error, { queue, partition, index }, page) : null,
    answer.error ? h("h3", "The whole record") : null,
    whole, more,
    h("div.lineage", h("section", h("h3", "Where it came from"), drawFrom(answer)), became));
  return { title: `${name} ${number(answer.index)}`, element };
}

const origin = (place) => h("a", { href: toMessage(place.queue, place.partition, place.index) }, `${logName(place.queue, place.partition)} ${number(place.index)}`);

function drawFrom(answer) {
  const parts = [];
  if (answer.from.length) {
    parts.push(h("ul.places", answer.from.map((place) => h("li",
      place.index === null ? h("span", logName(place.queue, place.partition), ", at ", clock(place.time)) : origin(place),
      place.text === null ? h("span.quiet", " is no longer there") : h("code.line", place.text)))));
  }
  if (answer.step) {
    const taken = answer.step.taken.flatMap(({ log, first, last }, n) => {
      const [queue, partition] = [log.replace(/\/\d+$/, ""), Number(/\/(\d+)$/.exec(log)?.[1] || 0)];
      return [n ? ", " : "", h("a", { href: first === last ? toMessage(queue, partition, first) : toQueue(log, { at: first }) },
        first === last ? `${log} ${number(first)}` : `${log} ${number(first)} to ${number(last)}`)];
    });
    parts.push(h("p", "Written by a step of ", h("a", { href: toProcessor(answer.step.processor) }, answer.step.processor),
      taken.length ? [", which took ", taken, "."] : "."));
  }
  if (!parts.length) {
    parts.push(h("p.quiet", answer.hash
      ? "A step wrote it, which is no longer in the try logs. Queues with metadata \"t\" keep the origin in each message."
      : "It was appended from outside: by a program, a source or cues send."));
  }
  return parts;
}

function drawBecame(found) {
  const parts = [h("h3", "What became of it")];
  if (!found.readers.length) parts.push(h("p.quiet", "No processor reads this queue."));
  if (found.readers.length) {
    parts.push(h("ul.places", found.readers.map((row) => h("li", h("a", { href: toProcessor(row.processor) }, row.processor),
      row.taken === null ? " has not run yet" : row.taken ? " has taken it" : ` has not taken it; it is at ${number(row.position)}`,
      row.outcome === "q.type.try/error-attempt" ? h("span.bad", " and failed") : row.outcome === "q.type.try/nil-attempt" ? " and wrote nothing" : ""))));
  }
  for (const made of found.made) {
    const exact = made.how === "metadata";
    const title = `${exact ? "Made from it" : "Written by the step that took it"}: ${made.log}`;
    parts.push(h("p", title), h("ul.places", made.messages.map((place) => h("li", origin(place), place.text === null ? "" : h("code.line", place.text)))));
    if (!made.complete) parts.push(h("p.quiet", "There may be more: the search stopped at its bound."));
  }
  if (!found.made.length && found.readers.some((row) => row.taken)) {
    parts.push(h("p.quiet", "Nothing was found that was made from it: its readers wrote nothing, or the messages and steps are gone."));
  }
  return parts;
}

