// The colours, from the style sheet, where dark and light are chosen.

const NAMES = [
  "ground",
  "panel",
  "line",
  "text",
  "dim",
  "forward",
  "backward",
  "other",
  "optimizer",
  "stall",
  "collective",
  "up",
  "down",
  "device",
  "host",
  "disk",
  "select",
  "step",
];

let colours = {};

/** The colours of the theme in force, by name. */
export function palette() {
  return colours;
}

/** Read the colours again: the theme has changed. */
export function readPalette() {
  const style = getComputedStyle(document.documentElement);
  colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** The colour of a row of the timeline. */
export function colourOf(row) {
  if (row.group === "link") return colours[isUpward(row.link) ? "up" : "down"];
  const names = {
    steps: "step",
    forward: "forward",
    backward: "backward",
    compute: "other",
    optimizer: "optimizer",
    stall: "stall",
    collectives: "collective",
    failed: "stall",
  };
  return colours[names[row.key]];
}

const ORDER = ["device", "host", "disk"];

/** Whether a link leads towards the device. */
export function isUpward(link) {
  const [source, target] = link.split("->");
  return ORDER.indexOf(source) > ORDER.indexOf(target);
}
