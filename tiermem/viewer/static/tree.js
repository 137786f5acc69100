// The tree of units: it follows the modules' names, and sums up.

import { NAMELESS } from "./format.js";

const DEEPEST = 40;
const SUMS = [
  "nbytes",
  "num_pages",
  "hits",
  "faults",
  "late",
  "prefetches",
  "used",
  "wasted",
  "up",
  "down",
  "stall_ns",
];

/**
 * The tree of ``units`` (as the server tells them): nodes {name, label, children, units, figures}, where ``units`` are
 * numbers. A module that has no unit of its own and one part only goes without a node.
 */
export function plant(units) {
  const root = { name: "", label: "", children: new Map(), unit: null };
  units.forEach((unit, number) => {
    let node = root;
    let path = "";
    for (const part of partsOf(unit.name)) {
      path = path ? `${path}.${part}` : part;
      if (!node.children.has(part)) {
        node.children.set(part, { name: path, label: part || NAMELESS, children: new Map(), unit: null });
      }
      node = node.children.get(part);
    }
    node.unit = number;
  });
  return [...root.children.values()].map((node) => grow(node, units));
}

/** The parts of a module's name; what lies deeper than any model's modules stays in one. */
function partsOf(name) {
  const parts = name.split(".");
  return parts.length > DEEPEST
    ? [...parts.slice(0, DEEPEST - 1), parts.slice(DEEPEST - 1).join(".")]
    : parts;
}

function grow(node, units) {
  let at = node;
  let label = node.label;
  while (at.unit === null && at.children.size === 1) {
    at = at.children.values().next().value;
    label = `${label}.${at.label}`;
  }
  const children = [...at.children.values()].map((child) => grow(child, units));
  const own = at.unit === null ? [] : [at.unit];
  const numbers = [...own, ...children.flatMap((child) => child.units)];
  return { name: at.name, label, children, unit: at.unit, units: numbers, figures: sum(numbers, units) };
}

function sum(numbers, units) {
  const found = Object.fromEntries(SUMS.map((name) => [name, 0]));
  for (const number of numbers) for (const name of SUMS) found[name] += units[number][name];
  found.early_ns = numbers.length === 1 ? units[numbers[0]].early_ns : null;
  return found;
}

/** The nodes of ``trees`` to show, from the top, with their depth: those open, or those that match ``search``. */
export function rowsOf(trees, open, search, matches) {
  const rows = [];
  const visit = (node, depth) => {
    if (search && !node.units.some(matches)) return;
    rows.push({ node, depth });
    if (search || open.has(node.name)) for (const child of node.children) visit(child, depth + 1);
  };
  for (const node of trees) visit(node, 0);
  return rows;
}
