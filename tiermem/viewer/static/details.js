// The panel below the timeline: totals of the selected range, and the span that was clicked.

import { el, refill, table } from "./dom.js";
import { formatAt, formatBytes, formatLink, formatRate, formatShare, formatTime } from "./format.js";
import { parts, totals } from "./totals.js";

function bar(sums) {
  const all = sums.time || 1;
  const strip = el("div", { class: "bar", "aria-hidden": "true" });
  for (const [label, time, colour] of parts(sums)) {
    const part = el("span", { title: `${label}: ${formatTime(time)}` });
    part.style.width = `${Math.min(100, (100 * time) / all)}%`;
    part.style.background = colour;
    strip.append(part);
  }
  return strip;
}

function totalsOf(run, sums, several) {
  const share = (time) => formatShare(sums.time ? time / sums.time : 0);
  const facts = [
    ...parts(sums).map(([label, time]) => [label, formatTime(time), share(time)]),
    ["links busy", formatTime(sums.transfer), share(sums.transfer)],
    [
      "of that, behind computation",
      formatTime(sums.overlap),
      sums.transfer ? formatShare(sums.overlap / sums.transfer) : "–",
    ],
  ];
  if (sums.collectives) facts.push(["collectives", formatTime(sums.collectives), share(sums.collectives)]);
  const links = sums.links.map((link) => [
    formatLink(link.name),
    formatBytes(link.nbytes),
    link.busy ? formatRate((link.nbytes / link.busy) * 1e9) : "–",
    formatRate((link.nbytes / (sums.time || 1)) * 1e9),
  ]);
  return el(
    "div",
    { class: "totals" },
    several ? el("h4", {}, run.label) : null,
    bar(sums),
    el(
      "div",
      { class: "tables" },
      table(
        "Time",
        [
          ["", "text"],
          ["time", "number"],
          ["share", "number"],
        ],
        facts,
      ),
      table(
        "Links",
        [
          ["link", "text"],
          ["bytes", "number"],
          ["while busy", "number"],
          ["mean", "number"],
        ],
        links,
      ),
    ),
  );
}

/** The words for a span: [[what, figure]]. */
export function describe(session, run, span) {
  const link = [Math.floor(span.link / session.tiers.length), span.link % session.tiers.length];
  const rows = [
    ["unit", run.units[span.unit] ?? ""],
    ["step", span.step >= 0 ? String(span.step) : "outside of steps"],
    ["begins", formatAt(span.start + run.shift, 1e5)],
    ["takes", formatTime(span.duration)],
  ];
  if (span.row.group === "link") rows.splice(1, 0, ["kind", span.row.label]);
  if (span.page >= 0) rows.push(["page", String(span.page)]);
  if (link[0] && link[1]) {
    rows.push(["link", `${session.tiers[link[0]]} → ${session.tiers[link[1]]}`]);
  }
  if (span.nbytes) {
    rows.push(["bytes", formatBytes(span.nbytes)]);
    if (span.duration) rows.push(["rate", formatRate((span.nbytes / span.duration) * 1e9)]);
  }
  if (span.reason) rows.push(["why", session.reasons[span.reason] ?? ""]);
  return rows.filter(([, text]) => text !== "");
}

/** The panel; ``toUnit(run, unit)`` is called for the button that leads to a unit. */
export class Details {
  constructor(app, toUnit) {
    this.app = app;
    this.toUnit = toUnit;
    this.range = el("section", { class: "range", "aria-live": "polite", id: "range" });
    this.span = el("section", { class: "span", "aria-live": "polite", id: "span" });
    this.element = el("div", { class: "details" }, this.range, this.span);
    this.asked = 0;
    this.showSpan(null);
  }

  /** Show the totals of the selection, or of what is visible. */
  async showRange() {
    const { session, view, tiles } = this.app;
    const [begin, end] = view.selection ?? [view.begin, view.end];
    const asked = ++this.asked;
    const all = await Promise.all(
      session.runs.map((run, number) =>
        totals(tiles, number, run, session.bins, begin - run.shift, end - run.shift),
      ),
    );
    if (asked !== this.asked) return; // another range was asked for meanwhile
    const width = end - begin;
    const what = view.selection ? "Selected" : "In view";
    const clear = view.selection
      ? el("button", { type: "button", onclick: () => view.select(null) }, "Clear")
      : el("span", { class: "dim" }, "Shift and drag, or drag on the ruler, to select");
    refill(
      this.range,
      el("h3", {}, `${what}: ${formatTime(width)} from ${formatAt(begin, width / 100)}`, " ", clear),
      ...all.map((sums, number) => totalsOf(session.runs[number], sums, session.runs.length > 1)),
    );
  }

  showSpan(found) {
    if (!found) {
      refill(this.span, el("h3", {}, "Span"), el("p", { class: "dim" }, "Click a span to see what it was."));
      return;
    }
    const run = this.app.session.runs[found.number];
    const rows = describe(this.app.session, run, found).map(([what, figure]) => [
      el("dt", {}, what),
      el("dd", {}, figure),
    ]);
    const known = run.units[found.unit] !== undefined;
    refill(
      this.span,
      el("h3", {}, found.row.group === "link" ? formatLink(found.row.link) : found.row.label),
      el("dl", {}, ...rows.flat()),
      known
        ? el(
            "button",
            { type: "button", onclick: () => this.toUnit(found.number, found.unit) },
            "Show the unit",
          )
        : null,
    );
  }
}
