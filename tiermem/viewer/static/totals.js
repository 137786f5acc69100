// The totals of a stretch of time: from the spans where the tiles list them, else from their bins.

import { palette } from "./palette.js";

/** Disjoint intervals from any, each [start, end]. */
export function merge(intervals) {
  const sorted = intervals.slice().sort((a, b) => a[0] - b[0]);
  const found = [];
  for (const [start, end] of sorted) {
    const last = found.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else found.push([start, end]);
  }
  return found;
}

function fromSpans(run, tile, begin, end, busy, nbytes) {
  const { start, duration, lane, nbytes: sizes } = tile.spans;
  const intervals = new Map();
  const linkOf = new Map();
  for (const row of run.rows)
    if (row.group === "link") for (const each of row.lanes) linkOf.set(each, row.link);
  for (let i = 0; i < start.length; i++) {
    const from = Math.max(start[i], begin);
    const to = Math.min(start[i] + duration[i], end);
    if (to < from || (to === from && duration[i] > 0)) continue;
    if (to > from) {
      if (!intervals.has(lane[i])) intervals.set(lane[i], []);
      intervals.get(lane[i]).push([from, to]);
    }
    const link = linkOf.get(lane[i]);
    const share = duration[i] > 0 ? (to - from) / duration[i] : 1;
    if (link !== undefined) nbytes[link] = (nbytes[link] ?? 0) + share * sizes[i];
  }
  for (const row of run.rows) {
    const all = row.lanes.flatMap((each) => intervals.get(each) ?? []);
    const time = merge(all).reduce((sum, [from, to]) => sum + to - from, 0);
    busy[row.key] = (busy[row.key] ?? 0) + time;
  }
}

function fromBins(run, tile, bins, begin, end, busy, nbytes) {
  const width = 2 ** tile.level;
  const zero = tile.index * bins * width;
  const first = Math.max(0, Math.floor((begin - zero) / width));
  const last = Math.min(bins, Math.ceil((end - zero) / width));
  for (const [rows, sums] of [
    [tile.busy, busy],
    [tile.nbytes, nbytes],
  ]) {
    for (const [key, values] of Object.entries(rows)) {
      let sum = 0;
      for (let bin = first; bin < last; bin++) {
        // Nothing is behind the run's end: what the last bin has lies before it.
        const whole = Math.min(zero + (bin + 1) * width, run.end + 1) - (zero + bin * width);
        const from = Math.max(begin, zero + bin * width);
        const to = Math.min(end, zero + bin * width + whole);
        if (to > from) sum += (values[bin] * (to - from)) / whole;
      }
      sums[key] = (sums[key] ?? 0) + sum;
    }
  }
}

/** Tiles of ``run`` that cover [begin, end) as finely as is worth it; null where the page lacks them. */
async function cover(tiles, number, bins, level, begin, end, found) {
  const width = bins * 2 ** level;
  for (let index = Math.floor(begin / width); index * width < end; index++) {
    const from = Math.max(begin, index * width);
    const to = Math.min(end, (index + 1) * width);
    const tile = await tiles.load(number, level, index);
    if (tile?.spans || (tile && (to - from) / 2 ** level >= bins / 2) || level === 0) {
      if (tile) found.push([tile, from, to]);
      continue;
    }
    const finer = tile ? await tiles.load(number, level - 1, Math.floor((2 * from) / width)) : null;
    if (finer) await cover(tiles, number, bins, level - 1, from, to, found);
    else if (tile) found.push([tile, from, to]);
  }
}

/**
 * The totals of [begin, end), ns from the run's base: times in ns, bytes by link.
 * @returns {Promise<Object>}
 */
export async function totals(tiles, number, run, bins, begin, end) {
  const from = Math.max(0, begin);
  const to = Math.min(run.end + 1, end);
  const busy = {};
  const nbytes = {};
  const parts = [];
  if (to > from) await cover(tiles, number, bins, run.top_level, from, to, parts);
  for (const [tile, a, b] of parts) {
    if (tile.spans) fromSpans(run, tile, a, b, busy, nbytes);
    else fromBins(run, tile, bins, a, b, busy, nbytes);
  }
  const of = (key) => busy[key] ?? 0;
  const compute = (phase) => of(`compute+stall:${phase}`) - of(`stall:${phase}`);
  return {
    time: end - begin,
    forward: compute("forward"),
    backward: compute("backward"),
    other: compute("optimizer") + compute("none"),
    optimizer: of("optimizer"),
    collectives: of("collectives"),
    stall: of("stall"),
    transfer: of("link"),
    // |L n W|, W being what is computed and not waited: |L u S| + |W u S| - |L u W u S| - |S|.
    overlap: of("link+stall") + of("work+stall") - of("link+work+stall") - of("stall"),
    links: run.links.map((name) => ({ name, nbytes: nbytes[name] ?? 0, busy: of(`link:${name}`) })),
  };
}

/** The parts of a stretch as [label, ns, colour], for a bar. */
export function parts(sums) {
  const colours = palette();
  return [
    ["forward", sums.forward, colours.forward],
    ["backward", sums.backward, colours.backward],
    ["other compute", sums.other, colours.other],
    ["optimizer", sums.optimizer, colours.optimizer],
    ["stalls", sums.stall, colours.stall],
  ].filter(([, time]) => time > 0);
}
