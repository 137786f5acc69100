// Numbers and times in words. Times are nanoseconds unless a name says otherwise.

export const NAMELESS = "(no name)";
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Three significant digits, without the exponent that toPrecision may give. */
function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 10 ? 1 : 2);
}

export function formatBytes(nbytes) {
  let step = 0;
  let value = nbytes;
  while (Math.abs(value) >= 1024 && step < BINARY.length - 1) {
    value /= 1024;
    step += 1;
  }
  return step === 0 ? `${Math.round(value)} B` : `${digits(value)} ${BINARY[step]}`;
}

/** Bandwidth in powers of 1000, as disks are sold. */
export function formatRate(perSecond) {
  if (perSecond >= 1e9) return `${(perSecond / 1e9).toFixed(2)} GB/s`;
  return `${digits(perSecond / 1e6)} MB/s`;
}

export function formatTime(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${digits(ns / 1e9)} s`;
  if (size >= 1e6) return `${digits(ns / 1e6)} ms`;
  if (size >= 1e3) return `${digits(ns / 1e3)} µs`;
  return `${Math.round(ns)} ns`;
}

export function formatSeconds(seconds) {
  return formatTime(seconds * 1e9);
}

export function formatShare(share) {
  return `${(100 * share).toFixed(1)} %`;
}

export function formatCount(count) {
  return Math.round(count).toLocaleString("en-US");
}

/** A point of time on the axis, with as many digits as ``step`` between two points needs. */
export function formatAt(ns, step) {
  const places = Math.max(0, Math.min(9, Math.ceil(9 - Math.log10(Math.max(step, 1)))));
  const text = (ns / 1e9).toFixed(places);
  return `${Number(text) === 0 ? text.replace("-", "") : text} s`;
}

/** A round number of nanoseconds that is at least ``ns``: 1, 2 or 5 times a power of ten. */
export function roundStep(ns) {
  const power = 10 ** Math.floor(Math.log10(Math.max(ns, 1)));
  for (const factor of [1, 2, 5]) if (factor * power >= ns) return factor * power;
  return 10 * power;
}

/** A unit's name for people: modules may be called anything, and what waits may belong to none. */
export function formatUnit(run, name) {
  return name || (run.units.includes("") ? NAMELESS : "–");
}

/** A link's name for people. */
export function formatLink(name) {
  return name.replace("->", " → ");
}
