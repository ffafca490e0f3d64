// A table whose cells change while somebody reads it: rows are kept by key, and only what differs is written.

import { h, say } from "./dom.js";

export class LiveTable {
  /** columns: {title, kind, cell(row) → text or {text, href, kind}}. */
  constructor(caption, columns, key, empty) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = h("tbody");
    this.none = h("p.quiet", empty || "None.");
    this.scroll = h("div.scroll", { tabindex: "0", role: "region", "aria-label": caption },
      h("table.cards", h("caption.unseen", caption),
        h("thead", h("tr", columns.map(({ title, kind }) => h("th", { scope: "col", class: kind }, title)))), this.body));
    this.element = h("div", this.none, this.scroll);
  }

  update(rows) {
    this.none.hidden = rows.length > 0;
    this.scroll.hidden = rows.length === 0;
    const seen = new Set();
    let before = null;
    for (const row of rows) {
      const key = this.key(row);
      seen.add(key);
      let cells = this.rows.get(key);
      if (!cells) {
        cells = this.columns.map(({ kind, title }, place) => h(place ? "td" : "th", { scope: place ? null : "row", class: kind, "data-title": place ? title : null }));
        cells.row = h("tr", cells);
        this.rows.set(key, cells);
      }
      const next = before ? before.nextSibling : this.body.firstChild;
      if (next !== cells.row) this.body.insertBefore(cells.row, next);
      before = cells.row;
      this.columns.forEach(({ cell, kind }, place) => put(cells[place], cell(row), kind));
    }
    for (const [key, cells] of this.rows) {
      if (!seen.has(key)) {
        cells.row.remove();
        this.rows.delete(key);
      }
    }
  }
}

function put(cell, value, kind) {
  const { text, href, kind: own } = typeof value === "object" && value ? value : { text: value ?? "" };
  const classes = [kind, own].filter(Boolean).join(" ");
  if (cell.className !== classes) cell.className = classes;
  let inside = cell.firstElementChild;
  if (Boolean(href) !== Boolean(inside)) {
    cell.textContent = "";
    inside = href ? cell.appendChild(h("a")) : null;
  }
  if (inside && inside.getAttribute("href") !== href) inside.setAttribute("href", href);
  say(inside || cell, String(text));
}
