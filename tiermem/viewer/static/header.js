// What is said at a glance: the run, its verdict and what to change, and where the time and the bytes are.

import { el, refill } from "./dom.js";
import { formatBytes, formatCount, formatLink, formatRate, formatSeconds, formatShare } from "./format.js";
import { isUpward, palette } from "./palette.js";

function card(title, figure, more, bar = null) {
  return el(
    "div",
    { class: "card" },
    el("h2", {}, title),
    el("p", { class: "figure" }, figure),
    bar,
    el("p", {}, more),
  );
}

function meter(share, colour, label) {
  const inner = el("i");
  inner.style.width = `${100 * Math.min(1, share)}%`;
  inner.style.background = colour;
  return el("div", { class: "meter", role: "img", "aria-label": label }, inner);
}

function linkCard(run, link) {
  const name = `${link.source}->${link.target}`;
  const seen = run.peak_rates[name] ?? 0;
  const most = link.limit ?? seen;
  const against = link.limit === null ? `at most ${formatRate(seen)}` : `limit ${formatRate(link.limit)}`;
  const colour = palette()[isUpward(name) ? "up" : "down"];
  const share = most ? link.bandwidth / most : 0;
  return card(
    formatLink(name),
    formatRate(link.bandwidth),
    `${formatBytes(link.nbytes)}, ${against}`,
    meter(share, colour, `${formatShare(share)} of the ${link.limit === null ? "most seen" : "limit"}`),
  );
}

function tierCard(name, use) {
  const against = use.budget === null ? "no budget told" : `of ${formatBytes(use.budget)}`;
  const share = use.budget ? use.final / use.budget : 0;
  return card(
    `in ${name} now`,
    formatBytes(use.final),
    `${against}`,
    meter(share, palette()[name], `${formatShare(share)} of the budget`),
  );
}

function cardsOf(run) {
  const { summary } = run;
  const { requests, steps } = summary;
  const asked = requests.hits + requests.faults;
  return [
    card(
      "step, mean",
      steps.count ? formatSeconds(steps.mean_s) : "–",
      `${formatCount(steps.count)} steps, median ${formatSeconds(steps.median_s)}`,
    ),
    card(
      "waiting, of step time",
      steps.count ? formatShare(summary.stall_share) : "–",
      `${formatSeconds(summary.stall_s)} in all`,
      meter(summary.stall_share, palette().stall, "share of the step time"),
    ),
    ...summary.links.map((link) => linkCard(run, link)),
    ...Object.entries(summary.tiers)
      .filter(([, use]) => use.peak)
      .map(([name, use]) => tierCard(name, use)),
    card(
      "pages found there",
      asked ? formatShare(requests.hit_rate) : "–",
      `${formatCount(requests.faults)} faults, ${formatCount(requests.late)} late`,
    ),
  ];
}

/** The head of the page; ``app`` has the session. */
export class Header {
  constructor(app) {
    this.app = app;
    this.name = el("span", { class: "run-name" });
    this.state = el("span", { class: "chip", id: "state", role: "status" });
    this.problems = el("div", { id: "problems", role: "alert" });
    this.verdicts = el("div", { id: "verdict" });
    this.cards = el("div", { class: "cards" });
    const theme = el(
      "button",
      { type: "button", id: "theme", onclick: () => app.switchTheme(), title: "Dark or light" },
      "◐ theme",
    );
    const help = el(
      "button",
      { type: "button", id: "help", onclick: () => app.help(), title: "Keys (?)" },
      "? keys",
    );
    this.element = el(
      "header",
      {},
      el(
        "div",
        { class: "top" },
        el("h1", {}, "tiermem trace"),
        this.name,
        this.state,
        el("span", { class: "space" }),
        theme,
        help,
      ),
      this.problems,
      this.verdicts,
      this.cards,
    );
  }

  render() {
    const { session } = this.app;
    const { runs } = session;
    const several = runs.length > 1;
    this.name.textContent = "";
    this.name.append(el("span", {}, several ? `${runs.length} traces ${session.clocks}` : runs[0].path));
    const states = [...new Set(runs.map((run) => run.summary.state))];
    const records = runs.reduce((sum, run) => sum + run.num_records, 0);
    this.state.textContent = `${states.join(", ")} · ${formatCount(records)} records`;
    this.state.classList.toggle("live", session.follow && runs.some((run) => run.live));
    refill(this.problems, ...this.told().map((text) => el("p", {}, text)));
    refill(this.verdicts, ...runs.map((run) => this.verdict(run)));
    const shown = session.mode === "ranks" ? [this.slowest()] : runs.slice(0, 1);
    refill(this.cards, ...(session.mode === "compare" ? [] : shown.flatMap(cardsOf)));
  }

  /** The rank that waited least: the others waited for it. */
  slowest() {
    return this.app.session.runs.reduce((a, b) => (b.summary.stall_s < a.summary.stall_s ? b : a));
  }

  told() {
    const { session } = this.app;
    const told = [...session.errors];
    for (const run of session.runs) {
      if (run.summary.damage) told.push(`${run.name}: ${run.summary.damage}. What was before that is shown.`);
      if (!run.num_records) told.push(`${run.name}: nothing is recorded in this trace yet.`);
      if (run.live && !session.follow) {
        told.push(`${run.name} is still being written: start the viewer with --follow to see it go on.`);
      }
      if (run.finest)
        told.push(`${run.name}: this file has no details below ${formatSeconds(2 ** run.finest / 1e9)}.`);
      if (run.units_left_out)
        told.push(`${run.name}: ${run.units_left_out} units are too many to be shown over time.`);
    }
    return told;
  }

  verdict(run) {
    const { verdict } = run.summary;
    const sentence = `${verdict.charAt(0).toUpperCase()}${verdict.slice(1)}.`;
    return el(
      "p",
      {},
      run.label ? el("span", { class: "label" }, `${run.label}: `) : null,
      el("strong", {}, sentence),
      run.advice ? ` ${run.advice}` : null,
    );
  }
}
