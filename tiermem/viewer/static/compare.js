// Two runs side by side: what a change of the policy did to the step, the links and each unit.

import { el, refill } from "./dom.js";
import {
  formatBytes,
  formatCount,
  formatLink,
  formatRate,
  formatSeconds,
  formatShare,
  NAMELESS,
} from "./format.js";

/**
 * The change from ``before`` to ``after`` as an element: in per cent, or of shares in points; with an arrow that doesn't
 * need its colour.
 */
function change(before, after, lowerIsBetter, share) {
  if (before === null || after === null) return el("span", { class: "dim" }, "–");
  if (before === after) return el("span", { class: "dim" }, "same");
  if (!before && !share) return el("span", {}, "new");
  const by = share ? after - before : after / before - 1;
  const better = by < 0 === lowerIsBetter;
  const arrow = by < 0 ? "▼" : "▲";
  const sign = by > 0 ? "+" : "−";
  const unit = share ? "points" : "%";
  const text =
    Math.abs(by) >= 10 ? `×${(by + 1).toFixed(1)}` : `${sign}${Math.abs(100 * by).toFixed(1)} ${unit}`;
  if (Math.abs(by) < 0.0005) return el("span", { class: "dim" }, "same");
  return el(
    "span",
    { class: better ? "better" : "worse" },
    `${arrow} ${text} ${better ? "better" : "worse"}`,
  );
}

function row(what, before, after, format, lowerIsBetter = true) {
  const show = (value) => (value === null ? "–" : format(value));
  return el(
    "tr",
    {},
    el("th", { scope: "row", class: "text" }, what),
    el("td", { class: "number" }, show(before)),
    el("td", { class: "number" }, show(after)),
    el("td", { class: "number" }, change(before, after, lowerIsBetter, format === formatShare)),
  );
}

function sheet(id, caption, first, rows) {
  const titles = [first, "before", "after", "change"];
  return el(
    "table",
    { id, class: "compare" },
    el("caption", {}, caption),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        ...titles.map((title, index) => el("th", { scope: "col", class: index ? "number" : "text" }, title)),
      ),
    ),
    el("tbody", {}, ...rows),
  );
}

function policyOf(run) {
  return el("pre", {}, run.policy ?? "The trace has no policy in it.");
}

export class Compare {
  constructor(app) {
    this.app = app;
    this.element = el("div", { class: "compare-tab" });
  }

  async load() {
    const { units } = await this.app.source.comparison();
    this.units = units;
    this.render();
  }

  render() {
    if (!this.units) return;
    const [before, after] = this.app.session.runs;
    const of = (run, get) => (run.summary.steps.count ? get(run.summary) : null);
    const both = (get) => [of(before, get), of(after, get)];
    const perStep = (get) => both((summary) => get(summary) / summary.steps.count);
    const links = [...new Set([...before.links, ...after.links])];
    const carried = (name) => (summary) =>
      summary.links.find((link) => `${link.source}->${link.target}` === name)?.nbytes ?? 0;
    const rate = (run, name) => {
      const link = run.summary.links.find((each) => `${each.source}->${each.target}` === name);
      return link ? link.bandwidth : null;
    };
    const reasons = [before, after].flatMap((run) => Object.keys(run.summary.stalls_by_reason));
    const whole = [
      row("step, mean", ...both((summary) => summary.steps.mean_s), formatSeconds),
      row("step, median", ...both((summary) => summary.steps.median_s), formatSeconds),
      row("waiting, of the step time", ...both((summary) => summary.stall_share), formatShare),
      row("waiting a step", ...perStep((summary) => summary.stall_s), formatSeconds),
      ...[...new Set(reasons)].map((reason) =>
        row(`… ${reason}`, ...perStep((summary) => summary.stalls_by_reason[reason] ?? 0), formatSeconds),
      ),
      row("compute a step", ...perStep((summary) => summary.compute_s), formatSeconds),
      row("optimizer a step", ...perStep((summary) => summary.optimizer_s), formatSeconds),
      ...links.map((name) =>
        row(`${formatLink(name)}, bytes a step`, ...perStep(carried(name)), formatBytes),
      ),
      ...links.map((name) =>
        row(`${formatLink(name)}, while busy`, rate(before, name), rate(after, name), formatRate, false),
      ),
      row("pages found there", ...both((summary) => summary.requests.hit_rate), formatShare, false),
      row("faults a step", ...perStep((summary) => summary.requests.faults), formatCount),
    ];
    const pick = (unit, name) => [unit.before?.[name] ?? null, unit.after?.[name] ?? null];
    const most = (unit) => Math.max(unit.before?.stall_s ?? 0, unit.after?.stall_s ?? 0);
    const sorted = this.units
      .slice()
      .sort((a, b) => most(b) - most(a))
      .slice(0, 500);
    const unitSheet = (id, caption, name, format) =>
      sheet(
        id,
        caption,
        "unit",
        sorted.map((unit) => row(unit.name || NAMELESS, ...pick(unit, name), format)),
      );
    refill(
      this.element,
      el(
        "div",
        { class: "columns" },
        sheet("compare-run", "The run", "", whole),
        this.policies(before, after),
      ),
      el(
        "div",
        { class: "columns" },
        unitSheet("compare-waits", "Waited for a unit, a step", "stall_s", formatSeconds),
        unitSheet("compare-bytes", "Moved for a unit, a step", "nbytes", formatBytes),
        unitSheet("compare-time", "Computed in a unit, a step", "seconds", formatSeconds),
      ),
    );
  }

  policies(before, after) {
    return el(
      "div",
      { class: "policies" },
      ...[before, after].map((run) =>
        el("figure", {}, el("figcaption", {}, `${run.label}: ${run.name}`), policyOf(run)),
      ),
    );
  }
}
