// Drawing on the timeline's canvas: bins where spans would be too thin to see, spans where they are wide enough.

import { visible } from "./dom.js";
import { formatAt, formatBytes, formatRate, roundStep } from "./format.js";
import { colourOf, isUpward, palette } from "./palette.js";

export const FONT = '11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
const BOLD = `600 ${FONT}`;

/**
 * The tiles that show [begin, end) (ns from the run's base) as [{tile, from, to}]; what isn't here yet is shown by
 * the coarser tile that is.
 */
export function segments(tiles, number, run, bins, begin, end, nsPerPixel) {
  const level = Math.min(run.top_level, Math.max(0, Math.ceil(Math.log2(nsPerPixel))));
  const width = bins * 2 ** level;
  const found = [];
  const from = Math.max(begin, 0);
  const to = Math.min(end, run.end + 1);
  for (let index = Math.floor(from / width); index * width < to; index++) {
    const tile = nearest(tiles, number, run, level, index);
    if (tile)
      found.push({ tile, from: Math.max(from, index * width), to: Math.min(to, (index + 1) * width) });
  }
  return found;
}

function nearest(tiles, number, run, level, index) {
  const tile = tiles.get(number, level, index);
  if (tile) return tile;
  for (let up = 1; level + up <= run.top_level; up++) {
    const place = [number, level + up, Math.floor(index / 2 ** up)];
    // null: the page has none so fine, so the coarser one is wanted and no stopgap.
    const coarser = tile === null ? tiles.get(...place) : tiles.peek(...place);
    if (coarser) return coarser;
    if (tile === null && coarser === undefined) return null;
  }
  return null;
}

/** The numbers of a tile's spans by lane; made once a tile. */
function byLane(tile) {
  if (!tile.byLane) {
    tile.byLane = new Map();
    tile.spans.lane.forEach((lane, number) => {
      if (!tile.byLane.has(lane)) tile.byLane.set(lane, []);
      tile.byLane.get(lane).push(number);
    });
  }
  return tile.byLane;
}

/** The spans of ``row`` in a tile, by number. */
export function spansOf(tile, row) {
  return tile.spans ? row.lanes.flatMap((lane) => byLane(tile).get(lane) ?? []) : [];
}

/** Calls ``draw(x, width, value)`` for the bins of a segment, neighbours of one value together. */
function eachBin(values, segment, bins, axis, draw) {
  const width = 2 ** segment.tile.level;
  const zero = segment.tile.index * bins * width;
  const first = Math.max(0, Math.floor((segment.from - zero) / width));
  const last = Math.min(bins, Math.ceil((segment.to - zero) / width));
  for (let bin = first; bin < last; ) {
    let next = bin + 1;
    while (next < last && values[next] === values[bin]) next++;
    // On whole pixels: edges between them would show as seams.
    const left = Math.round(axis.x(Math.max(segment.from, zero + bin * width)));
    const right = Math.round(axis.x(Math.min(segment.to, zero + next * width)));
    draw(left, right - left, values[bin]);
    bin = next;
  }
}

function inkOn(colour) {
  const value = Number.parseInt(colour.slice(1), 16);
  const light = 0.299 * (value >> 16) + 0.587 * ((value >> 8) & 255) + 0.114 * (value & 255);
  return light > 140 ? "#14181d" : "#ffffff";
}

/** ``text`` as much as fits into ``width`` pixels; "" where nothing sensible does. */
export function fitted(context, text, width) {
  const shown = visible(text.slice(0, 200));
  if (width < 18) return "";
  if (context.measureText(shown).width <= width) return shown;
  let low = 0;
  let high = shown.length;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (context.measureText(`${shown.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low < 2 ? "" : `${shown.slice(0, low)}…`;
}

/** Draw one lane of spans: the bins of all segments first, so that none covers a span that reaches over from another. */
export function paintLane(context, lane, run, shown, bins, axis) {
  const colour = colourOf(lane.row);
  context.fillStyle = colour;
  const wide = shown.map(({ tile }) => tile.spans !== null && 2 ** tile.level > 2.5 * axis.nsPerPixel);
  shown.forEach((segment, index) => {
    const values = segment.tile.busy[lane.row.key];
    if (!values || wide[index]) return;
    const width = 2 ** segment.tile.level;
    eachBin(values, segment, bins, axis, (x, w, value) => {
      if (!value) return;
      const height = Math.max(2, Math.min(1, value / width) * lane.height);
      context.fillRect(x, lane.y + lane.height - height, Math.max(w, 0.7), height);
    });
  });
  shown.forEach((segment, index) => {
    if (!segment.tile.spans) return;
    const drawn = index > 0 && shown[index - 1].tile.spans !== null;
    paintSpans(context, lane, run, segment, axis, { least: wide[index] ? 0 : 3, colour, drawn });
  });
}

/** ``how.drawn``: the segment before has drawn the spans that reach into this one. */
function paintSpans(context, lane, run, segment, axis, how) {
  const { start, duration, unit } = segment.tile.spans;
  const left = axis.x(segment.from);
  for (const number of spansOf(segment.tile, lane.row)) {
    const end = start[number] + duration[number];
    if (end < segment.from || start[number] > segment.to) continue;
    if (how.drawn && start[number] < segment.from) continue;
    const from = Math.max(axis.x(start[number]), left);
    const to = Math.min(axis.x(end), axis.left + axis.width);
    if (to - from < how.least) continue;
    context.fillStyle = how.colour;
    context.globalAlpha = lane.row.group === "link" ? 0.75 : 1;
    paintSpan(context, lane, from, to, run.units[unit[number]] ?? "", inkOn(how.colour));
  }
}

/** One span with its name in it, where there is room. */
function paintSpan(context, lane, from, to, name, ink) {
  const width = to - from;
  context.fillRect(from, lane.y, Math.max(width > 3 ? width - 0.75 : width, 0.8), lane.height);
  context.globalAlpha = 1;
  if (width < 30 || lane.height < 14) return;
  const text = fitted(context, name, width - 8);
  if (!text) return;
  context.fillStyle = ink;
  context.fillText(text, from + 4, lane.y + lane.height / 2 + 0.5);
}

/** Draw the lane of the steps, which a page knows without tiles. */
export function paintStepLane(context, lane, run, axis) {
  const colour = colourOf(lane.row);
  const { start, duration, step } = run.steps;
  const right = axis.left + axis.width;
  for (let i = 0; i < start.length; i++) {
    const from = Math.max(axis.x(start[i]), axis.left);
    const to = Math.min(axis.x(start[i] + duration[i]), right);
    if (to < axis.left || from > right) continue;
    context.fillStyle = colour;
    paintSpan(context, lane, from, to, `step ${step[i]}`, inkOn(colour));
  }
}

/** The most bytes per second that a link's graph shows: what it can carry, or what it was seen to carry. */
export function rateScale(run, link) {
  const figures = run.summary.links.find((each) => `${each.source}->${each.target}` === link);
  const limit = figures?.limit ?? null;
  const best = run.best_rates[link] ?? 0;
  return { limit, best, top: Math.max(limit ?? 0, best) * 1.15 || 1 };
}

/** Draw the bandwidth of a link against what it can carry. */
export function paintRate(context, lane, run, shown, bins, axis) {
  const { limit, best, top } = rateScale(run, lane.link);
  const bottom = lane.y + lane.height;
  context.fillStyle = palette()[isUpward(lane.link) ? "up" : "down"];
  context.globalAlpha = 0.75;
  for (const segment of shown) {
    const values = segment.tile.nbytes[lane.link];
    if (!values) continue;
    const seconds = 2 ** segment.tile.level / 1e9;
    eachBin(values, segment, bins, axis, (x, w, value) => {
      const height = Math.min(1, value / seconds / top) * lane.height;
      if (value) context.fillRect(x, bottom - height, Math.max(w, 0.7), height);
    });
  }
  context.globalAlpha = 1;
  const y = bottom - ((limit ?? best) / top) * lane.height;
  line(context, axis, y, limit === null ? [2, 4] : [6, 3]);
  note(context, axis, y, limit === null ? `at best ${formatRate(best)}` : `limit ${formatRate(limit)}`);
}

/** Draw what is held in a tier against its budget. */
export function paintTier(context, lane, shown, bins, axis) {
  const { peak, budget } = lane.use;
  const near = budget !== null && budget < 4 * peak;
  const top = (near ? Math.max(budget, peak) : peak) * 1.12 || 1;
  const bottom = lane.y + lane.height;
  for (const segment of shown) {
    const values = segment.tile.tiers[lane.tier];
    if (!values) continue;
    for (const [name, alpha] of [
      ["most", 0.35],
      ["last", 0.75],
    ]) {
      context.fillStyle = palette()[lane.tier];
      context.globalAlpha = alpha;
      eachBin(values[name], segment, bins, axis, (x, w, value) => {
        const height = Math.min(1, value / top) * lane.height;
        context.fillRect(x, bottom - height, Math.max(w, 0.7), height);
      });
    }
  }
  context.globalAlpha = 1;
  const y = bottom - ((near ? budget : peak) / top) * lane.height;
  line(context, axis, y, near ? [6, 3] : [2, 4]);
  const told = budget === null ? "no budget told" : `budget ${formatBytes(budget)}`;
  note(context, axis, y, near ? told : `peak ${formatBytes(peak)}, ${told}`);
}

function line(context, axis, y, dash) {
  context.strokeStyle = palette().text;
  context.setLineDash(dash);
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(axis.left, Math.round(y) + 0.5);
  context.lineTo(axis.left + axis.width, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
}

function note(context, axis, at, text) {
  context.font = FONT;
  const y = at + 18 > context.canvas.clientHeight ? at - 18 : at;
  const width = context.measureText(text).width;
  const x = axis.left + axis.width - width - 6;
  context.fillStyle = palette().panel;
  context.globalAlpha = 0.85;
  context.fillRect(x - 3, y + 2, width + 6, 14);
  context.globalAlpha = 1;
  context.fillStyle = palette().text;
  context.fillText(text, x, y + 9.5);
}

/** The label of a lane, in the margin on the left. */
export function paintLabel(context, lane, left) {
  const middle = lane.y + lane.height / 2 + 0.5;
  const sub = lane.type === "rate" || lane.row?.group === "link";
  context.font = lane.type === "run" || lane.title ? BOLD : FONT;
  context.fillStyle = palette().text;
  if (lane.title) context.fillText(lane.title, 10, middle);
  context.font = lane.type === "run" ? BOLD : FONT;
  context.fillStyle = sub ? palette().dim : palette().text;
  const text = fitted(context, lane.label, left - (sub ? 96 : 20));
  const width = context.measureText(text).width;
  context.fillText(text, sub ? left - 8 - width : 10, middle);
}

/** The ruler, and lines down from it; ``zero`` is where the axis' 0 is drawn from. */
export function paintRuler(context, axis, view, top, height, bottom) {
  const step = roundStep((view.width / axis.width) * 90);
  context.font = FONT;
  for (let at = Math.ceil(view.begin / step) * step; at <= view.end; at += step) {
    const x = axis.axis(at);
    context.fillStyle = palette().line;
    context.fillRect(Math.round(x), top + height - 5, 1, bottom - top - height + 5);
    context.fillStyle = palette().dim;
    context.fillText(formatAt(at, step), x + 4, top + height / 2);
  }
}

/** Lines where steps begin, unless they would be closer than a few pixels. */
export function paintSteps(context, axis, run, top, bottom) {
  const { start, duration } = run.steps;
  if (start.length === 0) return;
  const mean = duration.reduce((sum, each) => sum + each, 0) / start.length;
  if (mean / axis.nsPerPixel < 6) return;
  context.strokeStyle = palette().step;
  context.globalAlpha = 0.55;
  context.setLineDash([1, 3]);
  context.beginPath();
  for (const at of start) {
    const x = Math.round(axis.x(at)) + 0.5;
    if (x < axis.left || x > axis.left + axis.width) continue;
    context.moveTo(x, top);
    context.lineTo(x, bottom);
  }
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}
