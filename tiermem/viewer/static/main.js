// The page: it opens its data, has a tab for each question, and keeps itself up to date where it follows a run.

import { Compare } from "./compare.js";
import { el, refill } from "./dom.js";
import { Header } from "./header.js";
import { readPalette } from "./palette.js";
import { Stalls } from "./stalls.js";
import { openSource, Tiles } from "./store.js";
import { Timeline } from "./timeline.js";
import { Units } from "./units.js";
import { steerByKey, View } from "./view.js";

const PERIOD = 1000; // ms between two looks at a run that is followed
const THEMES = { dark: "light", light: "dark" };
const KEYS = [
  ["W S, ↑ ↓, wheel", "zoom in and out; over the names the wheel scrolls"],
  ["A D, ← →, drag", "move"],
  ["Shift and drag, or drag on the ruler", "select a range"],
  ["E", "select what is shown"],
  ["Z", "zoom to the selection"],
  ["N P", "next and previous step"],
  ["0", "show the whole run"],
  ["Home End", "go to its beginning or end"],
  ["Esc", "clear the selection"],
  ["1 2 3 4", "timeline, units, stalls, compare"],
  ["/", "search"],
  ["double click", "zoom to a span"],
];

class App {
  constructor(root) {
    this.root = root;
    this.view = new View();
    this.source = openSource();
    this.seen = [];
    this.tiles = new Tiles(
      this.source,
      () => this.redraw(),
      (error) => this.fail(error),
    );
    this.failure = el("p", { class: "failure", role: "alert", hidden: true });
  }

  async start() {
    this.theme(this.storedTheme());
    readPalette();
    this.session = await this.source.session([]);
    this.build();
    this.take();
    this.view.fit();
    this.open("timeline");
    this.root.setAttribute("aria-busy", "false");
    if (this.session.follow) setTimeout(() => this.follow(), PERIOD);
  }

  build() {
    this.header = new Header(this);
    this.tabs = { timeline: new Timeline(this), units: new Units(this), stalls: new Stalls(this) };
    if (this.session.mode === "compare") this.tabs.compare = new Compare(this);
    this.bar = el("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    for (const name of Object.keys(this.tabs)) {
      this.bar.append(
        el(
          "button",
          { type: "button", role: "tab", id: `tab-${name}`, onclick: () => this.open(name) },
          name,
        ),
      );
    }
    this.panel = el("main", { role: "tabpanel", id: "panel" });
    this.dialog = el("dialog", { id: "keys", "aria-label": "Keys" });
    refill(this.root, this.header.element, this.failure, this.bar, this.panel, this.dialog);
    this.view.listen((what) => this.moved(what));
    window.addEventListener("resize", () => this.redraw());
    document.addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
  }

  /** Take in a session document. */
  take() {
    const { runs } = this.session;
    this.view.following = this.session.follow;
    this.view.reach(
      Math.min(...runs.map((run) => run.shift)),
      Math.max(...runs.map((run) => run.shift + run.end)),
    );
    this.seen = runs.map((run) => `${run.generation}-${run.num_records}`);
    this.header.render();
  }

  async follow() {
    try {
      const before = this.session;
      this.session = await this.source.session(this.seen);
      this.session.runs.forEach((run, number) => {
        const news = run.num_records !== before.runs[number].num_records;
        if (news || run.generation !== before.runs[number].generation) {
          this.tiles.expire(number, run.changed, this.session.bins);
        }
      });
      this.take();
      if (this.empty && this.session.runs.some((run) => run.num_records)) {
        this.view.fit();
        this.open(this.shown);
      }
      // What somebody goes through with the keys isn't taken from under them.
      const inUse = this.panel.querySelector("tbody :focus");
      if (this.shown === "stalls" && !inUse) this.tabs.stalls.render();
      else if (this.tabs[this.shown].load && !inUse) await this.tabs[this.shown].load();
      this.moved("view");
      this.failure.hidden = true;
    } catch (error) {
      this.fail(error);
    }
    setTimeout(() => this.follow(), PERIOD);
  }

  moved() {
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.report(this.tabs.timeline.details.showRange()), 60);
    this.redraw();
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.tabs[this.shown]?.draw?.();
    });
  }

  open(name) {
    this.shown = name;
    const tab = this.tabs[name];
    this.empty = this.session.runs.every((run) => !run.num_records);
    refill(this.panel, this.empty ? this.nothing() : tab.element);
    for (const button of this.bar.children) {
      button.setAttribute("aria-selected", String(button.id === `tab-${name}`));
    }
    this.panel.setAttribute("aria-labelledby", `tab-${name}`);
    if (this.empty) return;
    if (tab.load) this.report(tab.load());
    else tab.render?.();
    this.moved();
  }

  /** What stands in the place of each view as long as nothing is recorded. */
  nothing() {
    const { follow } = this.session;
    let next = "The run ended before its model was called.";
    if (follow) next = "This page goes on by itself as soon as there is a record.";
    else if (this.session.runs.some((run) => run.summary.damage))
      next = "What is wrong with it stands above.";
    else if (this.session.runs.some((run) => run.live)) {
      next = "Its model has not been called yet. Start the viewer with --follow to see the records come.";
    }
    return el(
      "p",
      { class: "state" },
      el("strong", {}, "Nothing is recorded in this trace."),
      el("br"),
      next,
    );
  }

  /** Show a promise's failure to people. */
  report(promise) {
    promise.catch((error) => this.fail(error));
  }

  fail(error) {
    this.failure.textContent = error.message;
    this.failure.hidden = false;
  }

  /** Show the units of this run, from the next time they are shown on. */
  showRun(run) {
    this.tabs.units.run = run;
    this.tabs.units.chosen = null;
    if (this.shown === "units") this.report(this.tabs.units.load());
  }

  showUnit(run, unit) {
    this.open("units");
    this.report(this.tabs.units.reveal(run, unit));
  }

  showStall(stall) {
    const run = this.session.runs[stall.number];
    const begin = stall.at_s * 1e9 + run.shift + run.zero;
    const end = begin + stall.seconds * 1e9;
    this.open("timeline");
    this.view.select(begin, end);
    this.view.focus(begin, end, 2);
    this.tabs.timeline.choose(this.spanOf(stall));
    this.tabs.timeline.canvas.focus({ preventScroll: true });
  }

  /** A stall of the table as the span that it is in its lane. */
  spanOf(stall) {
    const { runs, tiers, reasons } = this.session;
    const run = runs[stall.number];
    const [source, target] = stall.link ? stall.link.split("->") : [tiers[0], tiers[0]];
    return {
      start: stall.at_s * 1e9 + run.zero,
      duration: stall.seconds * 1e9,
      unit: run.units.indexOf(stall.unit),
      page: stall.page,
      step: stall.step,
      link: tiers.indexOf(source) * tiers.length + tiers.indexOf(target),
      nbytes: 0,
      reason: Number(Object.keys(reasons).find((code) => reasons[code] === stall.reason)),
      row: run.rows.find((row) => row.key === "stall"),
      number: stall.number,
    };
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.dialog.open) return;
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    // What a key does on a button, or where the page scrolls, stays with it.
    const onButton = event.target.matches("button") && !event.target.matches('[role="tab"]');
    if (event.key.startsWith("Arrow") && this.shown !== "timeline") return;
    if (event.key.startsWith("Arrow") && event.target.matches('[role="tab"]')) {
      this.stepTab(event.key === "ArrowLeft" ? -1 : 1);
      return;
    }
    if (onButton && event.key.startsWith("Arrow")) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (this.command(key) || steerByKey(this.view, key)) event.preventDefault();
  }

  stepTab(way) {
    const names = Object.keys(this.tabs);
    const next = names[(names.indexOf(this.shown) + way + names.length) % names.length];
    this.open(next);
    document.getElementById(`tab-${next}`).focus();
  }

  command(key) {
    const names = Object.keys(this.tabs);
    if (key === "n" || key === "p") this.tabs.timeline.goToStep(key === "n" ? 1 : -1);
    else if (key === "?") this.help();
    else if (names[Number(key) - 1]) this.open(names[Number(key) - 1]);
    else if (key === "/") {
      if (this.shown !== "stalls") this.open("units");
      this.tabs[this.shown].search.focus();
    } else return false;
    return true;
  }

  help() {
    const rows = KEYS.flatMap(([keys, what]) => [el("dt", {}, keys), el("dd", {}, what)]);
    const close = el("button", { type: "button", onclick: () => this.dialog.close() }, "Close");
    refill(this.dialog, el("h2", {}, "Keys"), el("dl", {}, ...rows), close);
    this.dialog.showModal();
  }

  storedTheme() {
    try {
      return localStorage.getItem("tiermem-theme");
    } catch {
      return null; // a page that may keep nothing goes without
    }
  }

  theme(name) {
    if (name) document.documentElement.dataset.theme = name;
  }

  switchTheme() {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const next = THEMES[document.documentElement.dataset.theme ?? system];
    this.theme(next);
    try {
      localStorage.setItem("tiermem-theme", next);
    } catch {
      // kept for this page only
    }
    this.recolour();
  }

  recolour() {
    readPalette();
    this.header.render();
    if (this.shown === "units") this.report(this.tabs.units.load());
    this.moved();
  }
}

const root = document.getElementById("app");
const app = new App(root);
app.start().catch((error) => {
  root.setAttribute("aria-busy", "false");
  refill(root, el("p", { class: "state", role: "alert" }, error.message));
});
window.tiermem = app; // for whoever looks into the page by hand, and for its tests
