// Where each row of the timeline is drawn, from the top: the overview, the ruler, and the lanes of each run.

import { formatLink } from "./format.js";

export const LEFT = 172;
export const OVERVIEW = 26;
export const RULER = 22;
const GAP = 5;
const HEIGHTS = { steps: 16, compute: 21, stalls: 25, collectives: 18, failed: 14, link: 12 };

/**
 * The lanes of ``runs``: {type, y, height, run, label, row?, link?, tier?}, and the height of all.
 * Types: "run" (a title), "lane" (spans), "rate" (bandwidth of a link), "tier" (bytes held).
 */
export function layOut(session) {
  const lanes = [];
  let y = OVERVIEW + RULER + 4;
  const add = (type, height, run, label, more = {}) => {
    lanes.push({ type, y, height, run, label, ...more });
    y += height;
  };
  session.runs.forEach((run, number) => {
    if (session.runs.length > 1) {
      y += GAP;
      add("run", 20, number, `${run.label}  ${run.name}`);
    }
    const rows = run.rows.filter((row) => row.group !== "");
    for (const row of rows.filter((each) => each.group !== "link")) {
      add("lane", HEIGHTS[row.group], number, row.label, { row });
      y += 2;
    }
    for (const link of run.links) {
      y += GAP;
      rows
        .filter((row) => row.link === link)
        .forEach((row, index) => {
          add("lane", HEIGHTS.link, number, row.label, { row, title: index === 0 ? formatLink(link) : "" });
          y += 1;
        });
      add("rate", 34, number, "bandwidth", { link });
    }
    for (const [tier, use] of Object.entries(run.summary.tiers)) {
      if (!use.peak) continue; // an older trace, which doesn't say what the disk holds
      y += GAP;
      add("tier", tier === "disk" ? 26 : 44, number, tier, { tier, use });
    }
  });
  return { lanes, height: y + 8 };
}

/** The lane at height ``y``, if there is one. */
export function laneAt(lanes, y) {
  return lanes.find((lane) => y >= lane.y && y < lane.y + lane.height) ?? null;
}
