// Where the page's data comes from: its server, or the page itself.

const MOST_TILES = 600;
const MOST_IN_FLIGHT = 4;

/** JSON that was packed with gzip and base64. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function get(path) {
  let answer;
  try {
    answer = await fetch(path);
  } catch {
    throw new Error("The viewer's server has gone. Start `tiermem trace view` again.");
  }
  if (!answer.ok) throw new Error(`The viewer's server says: ${await answer.text()}`);
  return answer.json();
}

/** The data in the page: all that a server would answer. */
class Embedded {
  constructor(data) {
    this.data = data;
  }

  session() {
    return unpack(this.data.session);
  }

  units(run) {
    return unpack(this.data.units[run]);
  }

  comparison() {
    return unpack(this.data.comparison);
  }

  tile(key) {
    return Object.hasOwn(this.data.tiles, key) ? unpack(this.data.tiles[key]) : null;
  }
}

class Served {
  session(seen) {
    return get(`session${seen.length ? "?" : ""}${seen.map((each) => `seen=${each}`).join("&")}`);
  }

  units(run) {
    return get(`units/${run}`);
  }

  comparison() {
    return get("comparison");
  }

  tile(key) {
    return get(`tile/${key}`);
  }
}

/** The source that this page has. */
export function openSource() {
  const text = document.getElementById("data").textContent;
  return text.trim() ? new Embedded(JSON.parse(text)) : new Served();
}

/** Tiles by run, level and index: those that were asked for lately are kept, those missing are fetched. */
export class Tiles {
  /** ``arrived`` is called after a tile came, ``failed`` with an error where one didn't. */
  constructor(source, arrived, failed) {
    this.source = source;
    this.arrived = arrived;
    this.failed = failed;
    this.kept = new Map();
    this.wanted = [];
    this.inFlight = new Map();
  }

  /** The tile, or null where the page has none, or undefined while it is on its way. */
  get(run, level, index) {
    const key = `${run}/${level}/${index}`;
    const entry = this.kept.get(key);
    if (entry) {
      this.kept.delete(key);
      this.kept.set(key, entry);
    }
    if ((!entry || entry.stale) && !this.inFlight.has(key) && !this.wanted.includes(key)) {
      this.wanted.push(key);
      this.pump();
    }
    return entry?.tile;
  }

  /** The tile if it is here; nothing is fetched. */
  peek(run, level, index) {
    return this.kept.get(`${run}/${level}/${index}`)?.tile;
  }

  /** The tile once it is here. */
  async load(run, level, index) {
    const key = `${run}/${level}/${index}`;
    const entry = this.kept.get(key);
    return entry && !entry.stale ? entry.tile : this.fetch(key);
  }

  /** What a run shows from ``time`` on is another than before: shown until the new tiles have come. */
  expire(run, time, bins) {
    for (const [key, entry] of this.kept) {
      const [of, level, index] = key.split("/").map(Number);
      if (of === run && (index + 1) * bins * 2 ** level > time) entry.stale = true;
    }
  }

  pump() {
    // The newest wish first: what was asked for before may be out of sight by now.
    while (this.inFlight.size < MOST_IN_FLIGHT && this.wanted.length) {
      this.fetch(this.wanted.pop()).then(this.arrived, this.failed);
    }
    if (this.wanted.length > 64) this.wanted.splice(0, this.wanted.length - 64);
  }

  fetch(key) {
    let going = this.inFlight.get(key);
    if (!going) {
      going = this.bring(key);
      this.inFlight.set(key, going);
    }
    return going;
  }

  async bring(key) {
    try {
      const tile = await this.source.tile(key);
      this.kept.set(key, { tile, stale: false });
      while (this.kept.size > MOST_TILES) this.kept.delete(this.kept.keys().next().value);
      return tile;
    } finally {
      this.inFlight.delete(key);
      this.pump();
    }
  }
}
