// The page: header, live overview, and the view that the address names.

import { h, say, plural, bytes } from "./dom.js";
import { ask, follow } from "./api.js";
import { graphView, queuesView } from "./overview.js";
import { queueView } from "./queue.js";
import { messageView } from "./message.js";
import { processorView } from "./processor.js";
import { errorsView } from "./errors.js";

const VIEWS = { "": graphView, queues: queuesView, queue: queueView, message: messageView, processor: processorView, errors: errorsView };
const main = document.getElementById("main");
const page = { overview: null };
let view = null;
let shown = 0;

function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { name: parts[0] || "", parts: parts.slice(1), query: new URLSearchParams(query || "") };
}

async function show(first) {
  const mine = ++shown;
  const at = place();
  const make = VIEWS[at.name];
  view?.leave?.();
  view = null;
  main.setAttribute("aria-busy", "true");
  let next;
  try {
    // A view shows what its user may do, also on the way in from a link.
    page.overview ??= await ask("overview").then((overview) => (overview.failed ? null : overview), () => null);
    if (!make) throw new Error("There is no such page.");
    next = await make(at.parts, at.query, page);
  } catch (error) {
    next = { title: "Not shown", element: h("section", h("h2", "Not shown"), h("p.bad", error.message)) };
  }
  if (mine !== shown) {
    next.leave?.();
    return;
  }
  view = next;
  main.replaceChildren(next.element);
  main.removeAttribute("aria-busy");
  document.title = `${next.title} · ${page.overview?.title || "Cues"}`;
  for (const link of document.querySelectorAll("header nav a")) {
    const here = link.getAttribute("href").replace(/^#\//, "") === { queue: "queues", message: "queues", processor: "" }[at.name] || link.getAttribute("href") === `#/${at.name}`;
    here ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  next.drawn?.();
  if (page.overview) next.update?.(page.overview);
  if (!first) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
}

// --- what is always there: headline, state, new problems ---

const told = new Map();

function announce(problems) {
  const now = Date.now();
  const fresh = problems.filter(({ text }) => {
    const kind = text.replace(/[\d.,]+/g, "#"); // the same problem with another number is no news
    const known = told.has(kind) && now - told.get(kind) < 60000;
    told.set(kind, now);
    return !known;
  });
  if (fresh.length) say(document.getElementById("announce"), fresh.map(({ text }) => text).join(". "));
}

follow(
  (overview) => {
    if (overview.failed) {
      state("lost", overview.failed);
      return;
    }
    page.overview = overview;
    say(document.getElementById("title"), overview.title);
    const kept = { disk: "survives power loss", process: "survives kill -9" }[overview.durability] || overview.durability;
    say(document.getElementById("headline"),
      `${overview.running ? "Running" : "Not running"} · ${plural(overview.messages, "message")} · ${bytes(overview.disk_bytes)} · ${kept}`);
    announce(overview.problems);
    document.documentElement.classList.toggle("troubled", overview.problems.length > 0);
    view?.update?.(overview);
  },
  (how) => state(how),
);

function state(how, text) {
  const element = document.getElementById("live");
  element.className = `live ${how}`;
  say(document.getElementById("live-text"), text || { live: "Live", waiting: "Connecting", lost: "No connection" }[how]);
}

addEventListener("hashchange", () => show(false));
show(true);
