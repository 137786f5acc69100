// What is said at a glance: the run, its verdict and what to change, and where the time and the bytes are.

import { el, refill, visible } from "./dom.js";
import { formatBytes, formatCount, formatLink, formatRate, formatSeconds, formatShare } from "./format.js";
import { isUpward, palette } from "./palette.js";

const MOST_VERDICTS = 4; // more are folded, but for the rank that waited least and the one that waited most

/** The run that waited least: the other ranks waited for it. */
function leastWaiting(runs) {
  return runs.reduce((a, b) => (b.summary.stall_s < a.summary.stall_s ? b : a));
}

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

/** A card with a line for each of ``gauges``: [name, figure, what it is of, share, colour]. */
function gauges(title, lines) {
  return el(
    "div",
    { class: "card gauges" },
    el("h2", {}, title),
    ...lines.map(([name, figure, of, share, colour]) =>
      el(
        "div",
        { class: "gauge" },
        el("span", { class: "what" }, name),
        meter(share, colour, `${formatShare(share)} ${of}`),
        el("b", { class: "figure" }, figure),
        el("span", {}, of),
      ),
    ),
  );
}

function linkGauge(run, link) {
  const name = `${link.source}->${link.target}`;
  const best = run.best_rates[name] ?? 0;
  const of = link.limit === null ? `at best ${formatRate(best)}` : `limit ${formatRate(link.limit)}`;
  const share = link.bandwidth / (link.limit ?? best) || 0;
  const colour = palette()[isUpward(name) ? "up" : "down"];
  return [formatLink(name), formatRate(link.bandwidth), `${of} · ${formatBytes(link.nbytes)}`, share, colour];
}

function tierGauge([name, use]) {
  const of = use.budget === null ? "no budget told" : `of ${formatBytes(use.budget)}`;
  const share = use.budget ? use.final / use.budget : 0;
  return [name, formatBytes(use.final), `${of} · peak ${formatBytes(use.peak)}`, share, palette()[name]];
}

function cardsOf(run) {
  const { summary } = run;
  const { requests, steps } = summary;
  const asked = requests.hits + requests.faults;
  const tiers = Object.entries(summary.tiers).filter(([, use]) => use.peak);
  return [
    card(
      "step, mean",
      steps.count ? formatSeconds(steps.mean_s) : "–",
      steps.count
        ? `${formatCount(steps.count)} steps, median ${formatSeconds(steps.median_s)}`
        : "no step finished",
    ),
    card(
      "waiting",
      steps.count ? formatShare(summary.stall_share) : "–",
      "of the step time",
      meter(summary.stall_share, palette().stall, "share of the step time"),
    ),
    summary.links.length
      ? gauges(
          "links, while busy",
          summary.links.map((link) => linkGauge(run, link)),
        )
      : null,
    tiers.length ? gauges(run.live ? "held now" : "held at the end", tiers.map(tierGauge)) : null,
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
    this.chosen = null; // the rank whose figures are shown; null for the one that waited least
    this.pick = el("select", {
      id: "figures-of",
      onchange: () => {
        this.chosen = this.pick.value === "" ? null : Number(this.pick.value);
        this.render();
        app.showRun(app.session.runs.indexOf(this.rank()));
      },
    });
    this.whose = el("label", { class: "whose dim", hidden: true }, "Figures of ", this.pick);
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
      this.whose,
      this.cards,
    );
  }

  render() {
    const { session } = this.app;
    const { runs } = session;
    const several = runs.length > 1;
    document.title = `${visible(several ? runs.map((run) => run.label).join(", ") : runs[0].name)} · tiermem trace`;
    this.name.textContent = "";
    this.name.append(el("span", {}, several ? `${runs.length} traces ${session.clocks}` : runs[0].path));
    const states = [...new Set(runs.map((run) => run.summary.state))];
    const records = runs.reduce((sum, run) => sum + run.num_records, 0);
    this.state.textContent = `${states.join(", ")} · ${formatCount(records)} records`;
    this.state.classList.toggle("live", session.follow && runs.some((run) => run.live));
    refill(this.problems, ...this.told().map((text) => el("p", {}, text)));
    this.renderVerdicts();
    this.whose.hidden = session.mode !== "ranks";
    if (session.mode === "compare") refill(this.cards);
    else refill(this.cards, ...cardsOf(session.mode === "ranks" ? this.rank() : runs[0]));
  }

  /** The rank whose figures are shown; all of them can be chosen. */
  rank() {
    const { runs } = this.app.session;
    const awaited = leastWaiting(runs);
    refill(
      this.pick,
      el("option", { value: "" }, `${awaited.label}, which waited least`),
      ...runs.map((run, number) => el("option", { value: number }, run.label)),
    );
    this.pick.value = this.chosen === null ? "" : String(this.chosen);
    return this.chosen === null ? awaited : runs[this.chosen];
  }

  renderVerdicts() {
    const { runs } = this.app.session;
    if (runs.length <= MOST_VERDICTS) {
      refill(this.verdicts, ...runs.map((run) => this.verdict(run)));
      return;
    }
    const ends = [leastWaiting(runs), runs.reduce((a, b) => (b.summary.stall_s > a.summary.stall_s ? b : a))];
    const open = this.verdicts.querySelector("details")?.open;
    refill(
      this.verdicts,
      ...[...new Set(ends)].map((run) => this.verdict(run)),
      el(
        "details",
        { open },
        el("summary", {}, `All ${formatCount(runs.length)} ranks`),
        ...runs.map((run) => this.verdict(run)),
      ),
    );
  }

  told() {
    const { session } = this.app;
    const told = [...session.errors];
    for (const run of session.runs) {
      if (run.summary.damage) {
        const shown = run.num_records ? "What was before that is shown." : "There is nothing before that.";
        told.push(`${run.name}: ${run.summary.damage}. ${shown}`);
      } else if (!run.num_records) {
        told.push(`${run.name}: nothing is recorded in this trace${run.live ? " yet" : ""}.`);
      }
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
