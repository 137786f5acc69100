// The units: a row each with where its bytes were over time, and what became of its pages.

import { el, refill, sharpen, table } from "./dom.js";
import { formatAt, formatBytes, formatCount, formatTime } from "./format.js";
import { segments } from "./paint.js";
import { palette } from "./palette.js";
import { plant, rowsOf } from "./tree.js";
import { steer } from "./view.js";

const ROW = 20;
const MOST_ROWS = 2000;
const WHOLE = 35;
const DEEPEST = 7;
const COLUMNS = [
  ["size", "bytes of its pages"],
  ["faults", "times a page was asked for and was not there"],
  ["late", "of these: prefetched, but too late"],
  ["early", "how long before their use its prefetched pages landed (median)"],
  ["moved", "bytes over all links"],
  ["waited", "time that was waited for it"],
];

function figuresOf(figures) {
  return [
    formatBytes(figures.nbytes),
    formatCount(figures.faults),
    formatCount(figures.late),
    figures.early_ns === null ? "–" : formatTime(figures.early_ns),
    formatBytes(figures.up + figures.down),
    formatTime(figures.stall_ns),
  ];
}

export class Units {
  constructor(app) {
    this.app = app;
    this.run = 0;
    this.open = new Set();
    this.chosen = null;
    this.search = el("input", {
      type: "search",
      id: "unit-search",
      placeholder: "Search modules and parameters",
      "aria-label": "Search modules and parameters",
      oninput: () => this.render(),
    });
    this.pick = el("select", { "aria-label": "Run", onchange: () => this.switchTo(Number(this.pick.value)) });
    this.key = el("span", { class: "key" });
    this.span = el("span");
    this.more = el("p", { class: "dim" });
    this.body = el("tbody");
    this.table = el(
      "table",
      { class: "units", id: "units" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col", class: "text" }, "unit"),
          el("th", { scope: "col", class: "text wide" }, this.span),
          ...COLUMNS.map(([name, title]) => el("th", { scope: "col", class: "number", title }, name)),
        ),
      ),
      this.body,
    );
    this.detail = el("section", { class: "unit-detail", id: "unit", "aria-live": "polite" });
    this.element = el(
      "div",
      { class: "units-tab" },
      el("div", { class: "tools" }, this.search, this.pick, this.key),
      this.table,
      this.more,
      this.detail,
    );
    this.rows = [];
    window.addEventListener("scroll", () => app.redraw(), { passive: true });
  }

  /** Bring the figures up to date. */
  async load() {
    const { session } = this.app;
    const figures = await this.app.source.units(this.run);
    this.figures = figures;
    this.trees = plant(figures.units);
    if (this.open.size === 0 && figures.units.length <= 60) this.openAll(this.trees);
    refill(
      this.pick,
      ...session.runs.map((run, number) => el("option", { value: number }, run.label || run.name)),
    );
    this.pick.value = String(this.run);
    this.pick.hidden = session.runs.length < 2;
    const tiers = Object.keys(session.runs[this.run].summary.tiers).filter((tier) => tier !== "disk");
    refill(this.key, ...[...tiers, "disk only"].map((tier) => this.keyOf(tier)));
    this.render();
  }

  keyOf(tier) {
    const swatch = el("i");
    swatch.style.background = palette()[tier === "disk only" ? "disk" : tier];
    return el("span", {}, swatch, tier);
  }

  openAll(nodes) {
    for (const node of nodes) {
      this.open.add(node.name);
      this.openAll(node.children);
    }
  }

  switchTo(run) {
    this.run = run;
    this.chosen = null;
    this.app.report(this.load());
  }

  /** Whether a unit, or a parameter in it, has the searched text in its name. */
  matches(unit, search) {
    if (this.figures.units[unit].name.toLowerCase().includes(search)) return true;
    return this.figures.pages.some(
      (page) => page.unit === unit && page.names.some((name) => name.toLowerCase().includes(search)),
    );
  }

  render() {
    if (!this.figures) return;
    const search = this.search.value.trim().toLowerCase();
    const rows = rowsOf(this.trees, this.open, search, (unit) => this.matches(unit, search));
    this.rows = rows.slice(0, MOST_ROWS).map(({ node, depth }) => this.row(node, depth));
    const more = `${formatCount(rows.length - MOST_ROWS)} more: close a group, or search.`;
    this.more.textContent = rows.length > MOST_ROWS ? more : "";
    const none = el("tr", {}, el("td", { colspan: 8, class: "text dim" }, this.nothing(search)));
    refill(this.body, ...(rows.length ? this.rows.map((row) => row.element) : [none]));
    this.showDetail();
    this.app.redraw();
  }

  nothing(search) {
    return search ? `No module or parameter has “${search}” in its name.` : "The trace names no units.";
  }

  row(node, depth) {
    const canvas = el("canvas", { "aria-hidden": "true" });
    const toggle = node.children.length
      ? el(
          "button",
          {
            type: "button",
            class: "toggle",
            "aria-expanded": String(this.open.has(node.name)),
            "aria-label": `Parts of ${node.name || node.label}`,
            onclick: () => this.toggle(node.name),
          },
          this.open.has(node.name) ? "▾" : "▸",
        )
      : el("span", { class: "toggle" });
    const choose = () => this.choose(node);
    const name = el(
      "button",
      { type: "button", class: "name", title: node.name, onclick: choose },
      node.label,
    );
    const first = el("td", { class: "text" }, toggle, name);
    first.style.paddingLeft = `${4 + 14 * Math.min(depth, DEEPEST)}px`; // deeper ones leave no room for names
    const element = el(
      "tr",
      { class: this.chosen === node.name ? "chosen" : "" },
      first,
      el("td", { class: "wide" }, canvas),
      ...figuresOf(node.figures).map((text) => el("td", { class: "number" }, text)),
    );
    const width = () => Math.max(canvas.clientWidth, 1);
    steer(
      canvas,
      this.app.view,
      () => ({ left: 0, width: width(), ruler: 0 }),
      choose,
      () => {},
    );
    return { element, canvas, node };
  }

  toggle(name) {
    if (!this.open.delete(name)) this.open.add(name);
    this.render();
    const again = this.rows.find((row) => row.node.name === name);
    again?.element.querySelector(".toggle").focus();
  }

  choose(node) {
    this.chosen = node.name;
    for (const row of this.rows) row.element.className = row.node.name === node.name ? "chosen" : "";
    this.showDetail();
  }

  /** Show one unit: open the way to it, and its pages. */
  async reveal(run, unit) {
    this.search.value = "";
    if (run !== this.run || !this.figures) {
      this.run = run;
      await this.load();
    }
    const name = this.figures.units[unit].name;
    const visit = (nodes) => {
      for (const node of nodes) {
        if (!node.units.includes(unit)) continue;
        if (node.unit !== unit) this.open.add(node.name);
        visit(node.children);
      }
    };
    visit(this.trees);
    this.chosen = name;
    this.render();
    this.rows.find((row) => row.node.name === name)?.element.scrollIntoView({ block: "center" });
  }

  find(nodes, name) {
    for (const node of nodes) {
      const found = node.name === name ? node : this.find(node.children, name);
      if (found) return found;
    }
    return null;
  }

  showDetail() {
    const node = this.chosen === null ? null : this.find(this.trees, this.chosen);
    if (!node) {
      refill(this.detail, el("p", { class: "dim" }, "Choose a unit to see its pages."));
      return;
    }
    const { figures } = node;
    const evictions = {};
    for (const unit of node.units) {
      for (const [reason, number] of Object.entries(this.figures.units[unit].evictions)) {
        evictions[reason] = (evictions[reason] ?? 0) + number;
      }
    }
    const facts = [
      ["pages", `${formatCount(figures.num_pages)}, ${formatBytes(figures.nbytes)}`],
      ["asked for", `${formatCount(figures.hits)} found there, ${formatCount(figures.faults)} faults`],
      [
        "prefetched",
        `${formatCount(figures.prefetches)}: ${formatCount(figures.used)} in time, ${formatCount(figures.late)} too late, ` +
          `${formatCount(figures.wasted)} evicted unused`,
      ],
      ["landed before use", figures.early_ns === null ? "–" : `${formatTime(figures.early_ns)} (median)`],
      ["brought up", formatBytes(figures.up)],
      ["written down", formatBytes(figures.down)],
      ["waited for it", formatTime(figures.stall_ns)],
      ...Object.entries(evictions).map(([reason, number]) => [
        "evicted",
        `${formatCount(number)}: ${reason}`,
      ]),
    ];
    const pages = this.figures.pages.filter((page) => node.units.includes(page.unit));
    refill(
      this.detail,
      el("h3", {}, node.name || node.label),
      el("dl", {}, ...facts.flatMap(([what, figure]) => [el("dt", {}, what), el("dd", {}, figure)])),
      this.pages(pages),
    );
  }

  pages(pages) {
    const most = 300;
    const columns = [
      ["page", "number"],
      ["kind", "text"],
      ["type", "text"],
      ["size", "number"],
      ["found", "number"],
      ["faults", "number"],
      ["prefetched", "number"],
      ["early", "number"],
      ["evicted", "number"],
      ["moved", "number"],
      ["parameters", "text"],
    ];
    const rows = pages
      .slice(0, most)
      .map((page) => [
        page.number,
        page.kind,
        page.dtype,
        formatBytes(page.nbytes),
        formatCount(page.hits),
        formatCount(page.faults),
        formatCount(page.prefetches),
        page.early_ns === null ? "–" : formatTime(page.early_ns),
        formatCount(Object.values(page.evictions).reduce((sum, each) => sum + each, 0)),
        formatBytes(page.up + page.down),
        el("span", { title: page.names.join("\n") }, this.namesOf(page)),
      ]);
    const more = pages.length > most ? `, the first ${most} of ${formatCount(pages.length)}` : "";
    return table(`Pages${more}`, columns, rows);
  }

  namesOf(page) {
    const names = page.names.slice(0, 2).join(", ");
    return page.names.length > 2 ? `${names} and ${page.names.length - 2} more` : names;
  }

  /** Draw the rows that are in sight. */
  draw() {
    const { session, tiles, view } = this.app;
    const first = this.rows[0]?.canvas;
    if (!first || !this.element.isConnected) return;
    const width = Math.max(120, Math.floor(first.parentElement.clientWidth) - 2);
    const run = session.runs[this.run];
    const times = [view.begin, view.end].map((at) => formatAt(at, view.width / 100));
    this.span.textContent = `where its bytes were, ${times.join(" to ")}`;
    const nsPerPixel = view.width / width;
    const begin = view.begin - run.shift;
    const shown = segments(tiles, this.run, run, session.bins, begin, begin + view.width, nsPerPixel);
    const x = (ns) => (ns - begin) / nsPerPixel;
    for (const row of this.rows) {
      const box = row.element.getBoundingClientRect();
      if (box.bottom < 0 || box.top > window.innerHeight) continue;
      this.paint(sharpen(row.canvas, width, ROW), row.node, shown, x, width);
    }
  }

  paint(context, node, shown, x, width) {
    const { bins } = this.app.session;
    context.fillStyle = palette().ground;
    context.fillRect(0, 0, width, ROW);
    const total = node.figures.nbytes || 1;
    for (const { tile, from, to } of shown) {
      const wide = 2 ** tile.level;
      const zero = tile.index * bins * wide;
      context.fillStyle = palette().disk;
      context.fillRect(x(from), 2, x(to) - x(from), ROW - 4);
      for (const tier of ["host", "device"]) {
        const texts = tile.units[tier];
        if (!texts) continue;
        context.fillStyle = palette()[tier];
        const share = this.share(node, texts, total);
        const last = Math.min(bins, Math.ceil((to - zero) / wide));
        for (let bin = Math.max(0, Math.floor((from - zero) / wide)); bin < last; ) {
          let next = bin + 1;
          while (next < last && share[next] === share[bin]) next++;
          const left = Math.round(x(Math.max(from, zero + bin * wide)));
          const right = Math.round(x(Math.min(to, zero + next * wide)));
          const tall = share[bin] * (ROW - 4);
          if (tall > 0) context.fillRect(left, ROW - 2 - tall, Math.max(right - left, 0.7), tall);
          bin = next;
        }
      }
    }
  }

  /** The part of a node's bytes that is in a tier, by bin: that of its units, by their size. */
  share(node, texts, total) {
    const { bins } = this.app.session;
    const share = new Float32Array(bins);
    for (const unit of node.units) {
      const text = texts[unit];
      if (!text) continue;
      const weight = this.figures.units[unit].nbytes / total / WHOLE;
      for (let bin = 0; bin < bins; bin++) share[bin] += weight * Number.parseInt(text[bin], 36);
    }
    return share;
  }
}
