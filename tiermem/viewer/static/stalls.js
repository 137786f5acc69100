// The stalls: when, how long, for which unit and why. A click goes there.

import { el, refill } from "./dom.js";
import { formatAt, formatCount, formatLink, formatSeconds, formatShare, formatUnit } from "./format.js";

const COLUMNS = [
  ["run", "text", (stall) => stall.run.label],
  ["at", "number", (stall) => stall.at_s],
  ["waited", "number", (stall) => stall.seconds],
  ["unit", "text", (stall) => stall.unit],
  ["kind", "text", (stall) => stall.kind],
  ["cause", "text", (stall) => stall.reason],
  ["link", "text", (stall) => stall.link],
  ["phase", "text", (stall) => stall.phase],
  ["step", "number", (stall) => stall.step],
];
const MOST_ROWS = 500;

export class Stalls {
  constructor(app) {
    this.app = app;
    this.order = "waited";
    this.ascending = false;
    this.cause = null;
    this.search = el("input", {
      type: "search",
      id: "stall-search",
      placeholder: "Search units, kinds, causes",
      "aria-label": "Search stalls by unit, kind or cause",
      oninput: () => this.render(),
    });
    this.causes = el("div", { class: "causes", role: "group", "aria-label": "Causes" });
    this.count = el("p", { class: "dim", "aria-live": "polite" });
    this.head = el("tr");
    this.body = el("tbody");
    this.element = el(
      "div",
      { class: "stalls-tab" },
      this.causes,
      el("div", { class: "tools" }, this.search, this.count),
      el("table", { class: "stalls", id: "stalls" }, el("thead", {}, this.head), this.body),
    );
  }

  get columns() {
    return COLUMNS.filter(([name]) => name !== "run" || this.app.session.runs.length > 1);
  }

  get stalls() {
    return this.app.session.runs.flatMap((run, number) =>
      run.summary.slowest_stalls.map((stall) => ({ ...stall, run, number })),
    );
  }

  render() {
    this.renderCauses();
    const all = this.stalls;
    const search = this.search.value.trim().toLowerCase();
    const wanted = all.filter(
      (stall) =>
        (this.cause === null || stall.reason === this.cause) &&
        (!search ||
          [stall.unit, stall.kind, stall.reason, stall.link].some((text) =>
            text.toLowerCase().includes(search),
          )),
    );
    const value = COLUMNS.find(([name]) => name === this.order)[2];
    wanted.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const order = typeof x === "number" ? x - y : x.localeCompare(y);
      return this.ascending ? order : -order;
    });
    const total = this.app.session.runs.reduce((sum, run) => sum + run.num_stalls, 0);
    const slowest = all.length < total ? `the ${formatCount(all.length)} slowest of ` : "";
    this.count.textContent = `${formatCount(Math.min(wanted.length, MOST_ROWS))} shown, of ${slowest}${formatCount(total)} stalls`;
    refill(this.head, ...this.columns.map(([name, kind]) => this.title(name, kind)));
    refill(
      this.body,
      ...(wanted.length
        ? wanted.slice(0, MOST_ROWS).map((stall) => this.row(stall))
        : [el("tr", {}, el("td", { colspan: 9, class: "text dim" }, this.nothing(total)))]),
    );
  }

  nothing(total) {
    return total ? "No stall matches." : "Nobody waited: there is no stall in this trace.";
  }

  renderCauses() {
    const sums = {};
    for (const run of this.app.session.runs) {
      for (const [reason, seconds] of Object.entries(run.summary.stalls_by_reason)) {
        sums[reason] = (sums[reason] ?? 0) + seconds;
      }
    }
    const runs = this.app.session.runs;
    const all = runs.reduce((sum, run) => sum + run.summary.stall_s, 0) || 1;
    const overlap = Object.values(sums).reduce((sum, each) => sum + each, 0) / all > 1.001;
    refill(
      this.causes,
      ...Object.entries(sums).map(([reason, seconds]) => {
        const bar = el("i", { "aria-hidden": "true" });
        bar.style.width = `${(100 * seconds) / all}%`;
        const choose = () => {
          this.cause = this.cause === reason ? null : reason;
          this.render();
        };
        return el(
          "button",
          { type: "button", "aria-pressed": String(this.cause === reason), onclick: choose },
          bar,
          el("b", {}, formatSeconds(seconds)),
          ` ${reason} `,
          el("span", { class: "dim" }, formatShare(seconds / all)),
        );
      }),
      overlap
        ? el("p", { class: "dim" }, `Together ${formatSeconds(all)}: waits of several threads overlap.`)
        : null,
    );
  }

  title(name, kind) {
    const sorted = this.order === name;
    const sort = () => {
      this.ascending = sorted ? !this.ascending : kind === "text";
      this.order = name;
      this.render();
      this.head.querySelector("[aria-sort] button")?.focus();
    };
    return el(
      "th",
      {
        scope: "col",
        class: kind,
        "aria-sort": sorted ? (this.ascending ? "ascending" : "descending") : null,
      },
      el("button", { type: "button", onclick: sort }, name, sorted ? (this.ascending ? " ▴" : " ▾") : ""),
    );
  }

  row(stall) {
    const shown = {
      run: stall.run.label,
      waited: formatSeconds(stall.seconds),
      at: formatAt(stall.at_s * 1e9, 1e6),
      unit: formatUnit(stall.run, stall.unit),
      kind: stall.kind,
      cause: stall.reason,
      link: formatLink(stall.link),
      phase: stall.phase,
      step: stall.step >= 0 ? stall.step : "–",
    };
    const go = () => this.app.showStall(stall);
    return el(
      "tr",
      { class: "link", onclick: go },
      ...this.columns.map(([name, kind]) =>
        el(
          "td",
          { class: `${kind} ${name}` },
          name === "at" ? el("button", { type: "button", class: "name" }, shown[name]) : shown[name],
        ),
      ),
    );
  }
}
