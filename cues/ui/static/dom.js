// Elements, numbers and times. Everything that comes from a message is put in as text, never as markup.

/** An element: h("a.name", {href: "#/"}, "text", other). Attributes that are null or false are left out. */
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElement(tag || "div"), classes, rest);
}

/** The same for SVG. */
export function s(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), classes, rest);
}

function fill(element, classes, rest) {
  if (classes.length) element.classList.add(...classes);
  for (const each of rest.flat(3)) {
    if (each === null || each === undefined || each === false) continue;
    if (each instanceof Node) element.append(each);
    else if (typeof each === "object") {
      for (const [name, value] of Object.entries(each)) {
        if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
        else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
      }
    } else element.append(String(each));
  }
  return element;
}

/** Put other parts into an element. Who stood on a link or a button in it by keyboard stands on the same one again. */
export function put(element, ...parts) {
  const stood = element.contains(document.activeElement) ? document.activeElement : null;
  const like = () => [...element.querySelectorAll(stood.tagName)].filter((each) =>
    each.getAttribute("href") === stood.getAttribute("href") && each.textContent === stood.textContent);
  const place = stood ? like().indexOf(stood) : -1;
  element.replaceChildren(...parts);
  if (place >= 0) like()[place]?.focus({ preventScroll: true });
}

/** Change the text of an element, only if it differs: a screen reader reads what changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const grouped = new Intl.NumberFormat("en");
export const number = (n) => (n === null || n === undefined ? "" : grouped.format(n));

/** The failed messages of a row: exact, or a lower bound that ends in "+". */
export const failures = (row, shown = number) => (row.errors ? shown(row.errors) + (row.errors_more ? "+" : "") : "");

/** A count in few characters: 950, 1.2k, 3.4M. */
export function short(n) {
  if (n === null || n === undefined) return "";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (n >= size) return (n / size).toFixed(n / size < 10 ? 1 : 0).replace(/\.0$/, "") + unit;
  }
  return n >= 10 || Number.isInteger(n) ? String(Math.round(n)) : n.toFixed(1);
}

export const rate = (n) => (n ? short(n) + "/s" : n === 0 ? "0/s" : "");

export function bytes(n) {
  if (n === null || n === undefined) return "";
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) {
    if (n >= size) return (n / size).toFixed(n / size < 10 ? 1 : 0) + " " + unit;
  }
  return n + " B";
}

export function span(seconds) {
  if (seconds < 10) return seconds.toFixed(1) + " s";
  if (seconds < 60) return Math.round(seconds) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return minutes + " min";
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A time span with its unit, also a short one. */
export const brief = (seconds) => (seconds < 0.01 ? `${(seconds * 1000).toFixed(1)} ms` : seconds < 0.9995 ? `${Math.round(seconds * 1000)} ms` : span(seconds));

export function ago(iso, now) {
  if (!iso) return "never";
  const seconds = ((now ? Date.parse(now) : Date.now()) - Date.parse(iso)) / 1000;
  return seconds < 1.5 ? "now" : span(seconds) + " ago";
}

/** A time of day in UTC, with the date. */
export function clock(iso) {
  if (!iso) return "";
  const [day, time] = iso.replace(/(\+00:00|Z)$/, "").split("T");
  return `${day} ${time.slice(0, 12)}`;
}

export const plural = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A table whose first cell of a row is its header. columns: [title, cell(row), class]. On a phone it is a list. */
export function table(caption, columns, rows, empty) {
  if (!rows.length) return h("p.quiet", empty || "None.");
  return h("div.scroll", { tabindex: "0", role: "region", "aria-label": caption },
    h("table.cards",
      h("caption.unseen", caption),
      h("thead", h("tr", columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title)))),
      h("tbody", rows.map((row) => h("tr", columns.map(([, cell, kind], place) =>
        h(place ? "td" : "th", { scope: place ? null : "row", class: kind }, cell(row))))))));
}

// --- addresses inside the page ---

const part = encodeURIComponent;
export const toProcessor = (id) => `#/processor/${part(id)}`;
export const toErrors = (id) => (id ? `#/errors/${part(id)}` : "#/errors");
export function toQueue(queue, given = {}) {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  return `#/queue/${part(queue)}${query.size ? "?" + query : ""}`;
}
export const toMessage = (queue, partition, index) => `#/message/${part(queue)}/${partition}/${index}`;

export function logParts(log) {
  const found = /^(.*)\/(\d+)$/.exec(log);
  return found ? [found[1], Number(found[2])] : [log, 0];
}

export const logName = (queue, partition) => (partition ? `${queue}/${partition}` : queue);
