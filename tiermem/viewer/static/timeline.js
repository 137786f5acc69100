// The timeline: the canvas with the overview, the ruler and the lanes, and the panel below it.

import { Details, describe } from "./details.js";
import { el, refill, sharpen } from "./dom.js";
import { formatTime } from "./format.js";
import { LEFT, laneAt, layOut, OVERVIEW, RULER } from "./lanes.js";
import {
  FONT,
  paintLabel,
  paintLane,
  paintRate,
  paintRuler,
  paintStepLane,
  paintSteps,
  paintTier,
  segments,
  spansOf,
} from "./paint.js";
import { palette } from "./palette.js";
import { steer } from "./view.js";

const REACH = 3; // pixels beside a thin span that still count as on it

export class Timeline {
  constructor(app) {
    this.app = app;
    this.canvas = el("canvas", {
      id: "timeline",
      tabindex: "0",
      role: "application",
      "aria-label":
        "Timeline. W and S zoom, A and D move, N and P go to the next and previous step, E selects.",
    });
    this.tip = el("div", { class: "tip", hidden: true });
    this.details = new Details(app, (run, unit) => app.showUnit(run, unit));
    this.element = el("div", { class: "timeline" }, this.canvas, this.tip, this.details.element);
    this.selected = null;
    this.pending = 0;
    steer(
      this.canvas,
      app.view,
      () => ({ left: LEFT, width: this.width - LEFT, ruler: OVERVIEW + RULER }),
      (x, y) => this.click(x, y),
      (x, y) => this.hover(x, y),
    );
    this.canvas.addEventListener("dblclick", (event) => this.zoomTo(event));
  }

  get width() {
    return Math.max(480, this.element.clientWidth);
  }

  /** From time to pixels: ``x`` for ns from a run's base, ``axis`` for ns of the common axis. */
  axis(shift) {
    const { view } = this.app;
    const width = this.width - LEFT;
    const nsPerPixel = view.width / width;
    return {
      left: LEFT,
      width,
      nsPerPixel,
      x: (ns) => LEFT + (ns + shift - view.begin) / nsPerPixel,
      axis: (ns) => LEFT + (ns - view.begin) / nsPerPixel,
    };
  }

  shown(number) {
    const { session, tiles, view } = this.app;
    const run = session.runs[number];
    const axis = this.axis(run.shift);
    const begin = view.begin - run.shift;
    return segments(tiles, number, run, session.bins, begin, begin + view.width, axis.nsPerPixel);
  }

  draw() {
    const { session, view } = this.app;
    const begun = performance.now();
    const { lanes, height } = layOut(session);
    this.lanes = lanes;
    const context = sharpen(this.canvas, this.width, height);
    context.fillStyle = palette().panel;
    context.fillRect(0, 0, this.width, height);
    context.textBaseline = "middle";
    const common = this.axis(0);
    paintRuler(context, common, view, OVERVIEW, RULER, height);
    context.save();
    context.beginPath();
    context.rect(LEFT, OVERVIEW + RULER, common.width, height);
    context.clip();
    const shown = session.runs.map((_, number) => this.shown(number));
    for (const lane of lanes) this.paint(context, lane, shown[lane.run]);
    this.paintSelection(context, common, height);
    context.restore();
    for (const lane of lanes) paintLabel(context, lane, LEFT);
    this.paintOverview(context, common);
    this.app.frame = performance.now() - begun;
  }

  paint(context, lane, shown) {
    const { session } = this.app;
    const run = session.runs[lane.run];
    const axis = this.axis(run.shift);
    context.font = FONT;
    if (lane.type === "run") {
      context.fillStyle = palette().line;
      context.fillRect(LEFT, lane.y + lane.height / 2, axis.width, 1);
    } else if (lane.type === "lane") {
      context.fillStyle = palette().ground;
      context.fillRect(LEFT, lane.y, axis.width, lane.height);
      if (lane.row.key === "steps") {
        paintStepLane(context, lane, run, axis);
        paintSteps(context, axis, run, lane.y, this.bottomOf(lane.run));
      } else paintLane(context, lane, run, shown, session.bins, axis);
    } else if (lane.type === "rate") paintRate(context, lane, run, shown, session.bins, axis);
    else paintTier(context, lane, shown, session.bins, axis);
  }

  bottomOf(run) {
    const last = this.lanes.findLast((lane) => lane.run === run);
    return last.y + last.height;
  }

  paintSelection(context, axis, height) {
    const { selection } = this.app.view;
    if (selection) {
      const [left, right] = selection.map(axis.axis);
      context.fillStyle = palette().select;
      context.globalAlpha = 0.18;
      context.fillRect(left, OVERVIEW, right - left, height);
      context.globalAlpha = 1;
      context.fillRect(left, OVERVIEW, 1, height);
      context.fillRect(right, OVERVIEW, 1, height);
    }
    if (!this.selected) return;
    const lane = this.lanes.find(
      (each) => each.run === this.selected.number && each.row?.key === this.selected.row.key,
    );
    const on = this.axis(this.app.session.runs[this.selected.number].shift);
    const left = on.x(this.selected.start);
    const wide = Math.max(on.x(this.selected.start + this.selected.duration) - left, 2);
    context.strokeStyle = palette().text;
    context.lineWidth = 2;
    if (lane) context.strokeRect(left, lane.y, wide, lane.height);
    context.lineWidth = 1;
  }

  /** The whole run in small: when it computed, when it waited, and which part of it is shown below. */
  paintOverview(context, axis) {
    const { session, tiles, view } = this.app;
    const x = (ns) => LEFT + ((ns - view.low) / (view.high - view.low)) * axis.width;
    context.fillStyle = palette().ground;
    context.fillRect(LEFT, 0, axis.width, OVERVIEW - 2);
    session.runs.forEach((run, number) => {
      const tile = tiles.get(number, run.top_level, 0);
      if (!tile) return;
      const each = (OVERVIEW - 2) / session.runs.length;
      const width = 2 ** tile.level;
      for (const [key, colour] of [
        ["work+stall", palette().forward],
        ["stall", palette().stall],
      ]) {
        context.fillStyle = colour;
        (tile.busy[key] ?? []).forEach((value, bin) => {
          const left = Math.round(x(bin * width + run.shift));
          const right = Math.round(x((bin + 1) * width + run.shift));
          const tall = Math.min(1, value / width) * each;
          const top = number * each + each - tall;
          if (value) context.fillRect(left, top, Math.max(right - left, 0.7), tall);
        });
      }
    });
    context.fillStyle = palette().panel;
    context.globalAlpha = 0.7;
    context.fillRect(LEFT, 0, x(view.begin) - LEFT, OVERVIEW - 2);
    context.fillRect(x(view.end), 0, LEFT + axis.width - x(view.end), OVERVIEW - 2);
    context.globalAlpha = 1;
    context.strokeStyle = palette().select;
    context.strokeRect(x(view.begin) + 0.5, 0.5, Math.max(x(view.end) - x(view.begin) - 1, 2), OVERVIEW - 3);
    context.font = FONT;
    context.fillStyle = palette().dim;
    context.fillText("whole run", 10, OVERVIEW / 2);
    context.fillText(`${formatTime(view.width)} shown`, 10, OVERVIEW + RULER / 2);
  }

  /** The span at a place of the canvas, with all its fields; null where there is none. */
  spanAt(x, y) {
    const lane = laneAt(this.lanes ?? [], y);
    if (!lane?.row || x < LEFT) return null;
    const axis = this.axis(this.app.session.runs[lane.run].shift);
    let best = null;
    for (const { tile } of this.shown(lane.run)) {
      for (const number of spansOf(tile, lane.row)) {
        const { start, duration } = tile.spans;
        const away = Math.max(axis.x(start[number]) - x, x - axis.x(start[number] + duration[number]), 0);
        if (away > REACH || (best && away > best.away)) continue;
        const fields = Object.entries(tile.spans).map(([name, values]) => [name, values[number]]);
        best = { ...Object.fromEntries(fields), away, row: lane.row, number: lane.run };
      }
    }
    return best;
  }

  click(x, y) {
    if (y < OVERVIEW) {
      const { view } = this.app;
      const at = view.low + ((x - LEFT) / (this.width - LEFT)) * (view.high - view.low);
      view.show(at - view.width / 2, at + view.width / 2);
      return;
    }
    this.canvas.focus();
    this.choose(this.spanAt(x, y));
  }

  choose(span) {
    this.selected = span;
    this.details.showSpan(span);
    this.app.redraw();
  }

  zoomTo(event) {
    const box = this.canvas.getBoundingClientRect();
    const span = this.spanAt(event.clientX - box.left, event.clientY - box.top);
    if (!span) return;
    const begin = span.start + this.app.session.runs[span.number].shift;
    this.app.view.focus(begin, begin + span.duration);
  }

  hover(x, y) {
    const span = x < 0 ? null : this.spanAt(x, y);
    this.tip.hidden = !span;
    if (!span) return;
    const run = this.app.session.runs[span.number];
    const lines = describe(this.app.session, run, span).map(([what, figure]) =>
      el("div", {}, el("b", {}, what), " ", figure),
    );
    refill(this.tip, ...lines);
    this.tip.style.left = `${Math.min(x + 14, this.width - 250)}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  /** Show and select step ``way`` (1 or -1) from the one in the middle of the view. */
  goToStep(way) {
    const { session, view } = this.app;
    const { shift, steps } = session.runs[0];
    const middle = view.selection ? (view.selection[0] + view.selection[1]) / 2 : view.begin;
    const found = steps.start.map((start, index) => [start + shift, start + shift + steps.duration[index]]);
    const next =
      way > 0 ? found.find(([start]) => start > middle) : found.findLast(([, end]) => end < middle);
    if (!next) return;
    view.select(...next);
    view.focus(...next, 0.06);
  }
}
